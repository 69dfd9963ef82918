//! What a mount writes to: a plain backing, or one that can have transactions.
//!
//! Invariant: a store is of one kind from its first call to its last, and so is every object, file and directory of it.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use firn_backing::{
    Access, Attr, Backing, Caller, DirEntry, LaneIndex, LockMode, RenameFlags, Result, Seek,
    SetTime, StatFs, SyncWay,
};

use firn_rendezvous::Members;

use crate::data::TrackedFile;
use crate::listing::TrackedDir;
use crate::object::Object;
use crate::plain::{PlainBacking, PlainDir, PlainInode};
use crate::transactional::TransactionalBacking;

/// The backing of a mount.
pub enum Store<B: Backing> {
    /// The mount has no transactions.
    Plain(PlainBacking<B>),
    /// It may have them.
    Transactional(Box<TransactionalBacking<B>>),
}

/// An object of a [`Store`].
#[allow(missing_docs, reason = "each variant is of the store of that name")]
pub enum StoreInode<B: Backing> {
    Plain(PlainInode<B>),
    Transactional(Arc<Object<B>>),
}

/// An open file of a [`Store`].
#[allow(missing_docs, reason = "each variant is of the store of that name")]
pub enum StoreFile<B: Backing> {
    Plain(B::File),
    Transactional(TrackedFile<B>),
}

/// An open directory of a [`Store`].
#[allow(missing_docs, reason = "each variant is of the store of that name")]
pub enum StoreDir<B: Backing> {
    Plain(PlainDir<B>),
    Transactional(TrackedDir<B>),
}

impl<B: Backing> Clone for StoreInode<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(inode) => Self::Plain(inode.clone()),
            Self::Transactional(object) => Self::Transactional(Arc::clone(object)),
        }
    }
}

impl<B: Backing> StoreInode<B> {
    /// The object, where the store can have transactions.
    pub fn transactional(&self) -> Option<&Arc<Object<B>>> {
        match self {
            Self::Plain(_) => None,
            Self::Transactional(object) => Some(object),
        }
    }
}

impl<B: Backing> Store<B> {
    /// The hosts that commit together, if there are several.
    pub fn members(&self) -> Option<&Members> {
        self.transactional()?.members()
    }

    /// The backing with transactions, if the mount can have them.
    pub fn transactional(&self) -> Option<&TransactionalBacking<B>> {
        match self {
            Self::Plain(_) => None,
            Self::Transactional(backing) => Some(backing),
        }
    }
}

/// Something of another store than the one that is called.
fn foreign() -> ! {
    unreachable!("a store is called with what it gave out")
}

/// Calls the store of the kind that `$of`, a reference to a [`StoreInode`], [`StoreFile`] or [`StoreDir`], is of.
macro_rules! delegate {
    ($self:ident, $kind:ident($of:ident), |$store:ident, $inner:ident| $call:expr) => {
        match ($self, $of) {
            (Self::Plain($store), $kind::Plain($inner)) => $call,
            (Self::Transactional($store), $kind::Transactional($inner)) => $call,
            _ => foreign(),
        }
    };
    ($self:ident, $kind:ident($one:ident, $other:ident), |$store:ident| $call:expr) => {
        match ($self, $one, $other) {
            (Self::Plain($store), $kind::Plain($one), $kind::Plain($other)) => $call,
            (
                Self::Transactional($store),
                $kind::Transactional($one),
                $kind::Transactional($other),
            ) => $call,
            _ => foreign(),
        }
    };
}

/// The same for a call that returns an object and its attributes.
macro_rules! delegate_new {
    ($self:ident, $parent:ident, |$store:ident| $call:expr) => {
        match ($self, $parent) {
            (Self::Plain($store), StoreInode::Plain($parent)) => {
                $call.map(|(inode, attr)| (StoreInode::Plain(inode), attr))
            }
            (Self::Transactional($store), StoreInode::Transactional($parent)) => {
                $call.map(|(object, attr)| (StoreInode::Transactional(object), attr))
            }
            _ => foreign(),
        }
    };
}

/// A call that is about the whole backing.
macro_rules! delegate_whole {
    ($self:ident, |$store:ident| $call:expr) => {
        match $self {
            Self::Plain($store) => $call,
            Self::Transactional($store) => $call,
        }
    };
}

impl<B: Backing> Backing for Store<B> {
    type Inode = StoreInode<B>;
    type File = StoreFile<B>;
    type Dir = StoreDir<B>;

    fn root(&self) -> StoreInode<B> {
        match self {
            Self::Plain(store) => StoreInode::Plain(store.root()),
            Self::Transactional(store) => StoreInode::Transactional(store.root()),
        }
    }

    fn lookup(&self, parent: &StoreInode<B>, name: &OsStr) -> Result<(StoreInode<B>, Attr)> {
        delegate_new!(self, parent, |store| store.lookup(parent, name))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &StoreInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(StoreInode<B>, StoreFile<B>, Attr)> {
        match (self, parent) {
            (Self::Plain(store), StoreInode::Plain(parent)) => {
                let (inode, file, attr) = store.create(caller, parent, name, mode)?;
                Ok((StoreInode::Plain(inode), StoreFile::Plain(file), attr))
            }
            (Self::Transactional(store), StoreInode::Transactional(parent)) => {
                let (object, file, attr) = store.create(caller, parent, name, mode)?;
                let file = StoreFile::Transactional(file);
                Ok((StoreInode::Transactional(object), file, attr))
            }
            _ => foreign(),
        }
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &StoreInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(StoreInode<B>, Attr)> {
        delegate_new!(self, parent, |store| store
            .mkdir(caller, parent, name, mode))
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &StoreInode<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(StoreInode<B>, Attr)> {
        delegate_new!(self, parent, |store| store
            .mknod(caller, parent, name, mode, rdev))
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &StoreInode<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(StoreInode<B>, Attr)> {
        delegate_new!(self, parent, |store| store
            .symlink(caller, parent, name, target))
    }

    fn link(&self, inode: &StoreInode<B>, parent: &StoreInode<B>, name: &OsStr) -> Result<Attr> {
        delegate!(self, StoreInode(inode, parent), |store| store
            .link(inode, parent, name))
    }

    fn unlink(&self, parent: &StoreInode<B>, name: &OsStr) -> Result<()> {
        delegate!(self, StoreInode(parent), |store, parent| store
            .unlink(parent, name))
    }

    fn rmdir(&self, parent: &StoreInode<B>, name: &OsStr) -> Result<()> {
        delegate!(self, StoreInode(parent), |store, parent| store
            .rmdir(parent, name))
    }

    fn rename(
        &self,
        parent: &StoreInode<B>,
        name: &OsStr,
        new_parent: &StoreInode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        delegate!(self, StoreInode(parent, new_parent), |store| store
            .rename(parent, name, new_parent, new_name, flags))
    }

    fn readlink(&self, inode: &StoreInode<B>) -> Result<Vec<u8>> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .readlink(inode))
    }

    fn attr(&self, inode: &StoreInode<B>) -> Result<Attr> {
        delegate!(self, StoreInode(inode), |store, inode| store.attr(inode))
    }

    fn attr_of_file(&self, file: &StoreFile<B>) -> Result<Attr> {
        delegate!(self, StoreFile(file), |store, file| store
            .attr_of_file(file))
    }

    fn set_mode(&self, inode: &StoreInode<B>, mode: u32) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .set_mode(inode, mode))
    }

    fn set_owner(&self, inode: &StoreInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .set_owner(inode, uid, gid))
    }

    fn set_times(&self, inode: &StoreInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .set_times(inode, atime, mtime))
    }

    fn get_xattr(&self, inode: &StoreInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .get_xattr(inode, name))
    }

    fn set_xattr(
        &self,
        inode: &StoreInode<B>,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .set_xattr(inode, name, value, flags))
    }

    fn list_xattr(&self, inode: &StoreInode<B>) -> Result<Vec<u8>> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .list_xattr(inode))
    }

    fn remove_xattr(&self, inode: &StoreInode<B>, name: &OsStr) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .remove_xattr(inode, name))
    }

    fn has_default_acl(&self, inode: &StoreInode<B>) -> bool {
        delegate!(self, StoreInode(inode), |store, inode| store
            .has_default_acl(inode))
    }

    fn open_dir(&self, inode: &StoreInode<B>) -> Result<StoreDir<B>> {
        match (self, inode) {
            (Self::Plain(store), StoreInode::Plain(inode)) => {
                store.open_dir(inode).map(StoreDir::Plain)
            }
            (Self::Transactional(store), StoreInode::Transactional(object)) => {
                store.open_dir(object).map(StoreDir::Transactional)
            }
            _ => foreign(),
        }
    }

    fn read_dir(
        &self,
        dir: &StoreDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        delegate!(self, StoreDir(dir), |store, dir| store
            .read_dir(dir, cookie, sink))
    }

    fn sync_dir(&self, inode: &StoreInode<B>) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .sync_dir(inode))
    }

    fn open(&self, inode: &StoreInode<B>, access: Access) -> Result<StoreFile<B>> {
        match (self, inode) {
            (Self::Plain(store), StoreInode::Plain(inode)) => {
                store.open(inode, access).map(StoreFile::Plain)
            }
            (Self::Transactional(store), StoreInode::Transactional(object)) => {
                store.open(object, access).map(StoreFile::Transactional)
            }
            _ => foreign(),
        }
    }

    fn read_at(&self, file: &StoreFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        delegate!(self, StoreFile(file), |store, file| store
            .read_at(file, buf, offset))
    }

    fn write_at(&self, file: &StoreFile<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        delegate!(self, StoreFile(file), |store, file| store
            .write_at(file, data, offset))
    }

    fn set_len(&self, file: &StoreFile<B>, len: u64) -> Result<()> {
        delegate!(self, StoreFile(file), |store, file| store
            .set_len(file, len))
    }

    fn allocate(&self, file: &StoreFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        delegate!(self, StoreFile(file), |store, file| store
            .allocate(file, mode, offset, len))
    }

    fn seek(&self, file: &StoreFile<B>, offset: u64, what: Seek) -> Result<u64> {
        delegate!(self, StoreFile(file), |store, file| store
            .seek(file, offset, what))
    }

    fn copy_range(
        &self,
        from: &StoreFile<B>,
        from_offset: u64,
        to: &StoreFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        delegate!(self, StoreFile(from, to), |store| store.copy_range(
            from,
            from_offset,
            to,
            to_offset,
            len
        ))
    }

    fn sync(&self, file: &StoreFile<B>, data_only: bool) -> Result<()> {
        delegate!(self, StoreFile(file), |store, file| store
            .sync(file, data_only))
    }

    fn begin_sync(&self, file: &StoreFile<B>, offset: u64, len: u64) {
        delegate!(self, StoreFile(file), |store, file| store
            .begin_sync(file, offset, len));
    }

    fn try_lock(&self, file: &StoreFile<B>, mode: LockMode) -> Result<bool> {
        delegate!(self, StoreFile(file), |store, file| store
            .try_lock(file, mode))
    }

    fn fd<'a>(&self, file: &'a StoreFile<B>) -> Option<BorrowedFd<'a>> {
        delegate!(self, StoreFile(file), |store, file| store.fd(file))
    }

    fn lane_count(&self) -> u16 {
        delegate_whole!(self, |store| store.lane_count())
    }

    fn lane_of(&self, inode: &StoreInode<B>) -> LaneIndex {
        delegate!(self, StoreInode(inode), |store, inode| store.lane_of(inode))
    }

    fn statfs(&self) -> Result<StatFs> {
        delegate_whole!(self, |store| store.statfs())
    }

    fn sync_all(&self) -> Result<()> {
        delegate_whole!(self, |store| store.sync_all())
    }

    fn sync_changes(&self) -> Result<()> {
        delegate_whole!(self, |store| store.sync_changes())
    }

    fn sync_tree(&self, inode: &StoreInode<B>) -> Result<()> {
        delegate!(self, StoreInode(inode), |store, inode| store
            .sync_tree(inode))
    }

    fn sync_way(&self) -> SyncWay {
        delegate_whole!(self, |store| store.sync_way())
    }
}
