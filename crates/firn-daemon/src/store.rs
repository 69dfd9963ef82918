//! What the engine writes to: a directory as it is, one whose files are placed in lanes, one whose files may lie in
//! logs, one with both, or one that can have transactions; and how scopes are named to a person.
//!
//! Invariant: a store is of one kind from its first call to its last, and so is every object, file and directory of it.
//! Only the macros of this file know which kinds there are.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, DirBacking, DirEntry, KernelReads, LaneIndex,
    LocateLimits, Located, LockMode, RenameFlags, Result, Seek, SetTime, StatFs, SyncWay,
};
use firn_lanes::Lanes;
use firn_log::LogBacking;
use firn_transact::{
    Object, PlainBacking, PlainDir, PlainInode, TrackedDir, TrackedFile, TransactionalBacking,
};

use crate::logs::Logs;

/// A store that can have transactions.
pub(crate) type TransactionalStore = TransactionalBacking<DirBacking>;

/// Names a scope to a person.
pub(crate) fn shown_scope(path: &[u8]) -> String {
    match path {
        b"" => "the whole mount".into(),
        path => firn_format::quote::quoted(path),
    }
}

/// The backing of a mount.
pub(crate) enum Store<B: Backing = DirBacking> {
    /// The files lie in the backing itself, and there are no transactions.
    Plain(PlainBacking<B>),
    /// The files lie in lanes.
    Placed(Box<PlainBacking<Lanes<B>>>),
    /// Files may lie in logs.
    Logged(Box<PlainBacking<LogBacking<B>>>),
    /// Files may lie in logs, and files and logs lie in lanes.
    LoggedInLanes(Box<PlainBacking<LogBacking<Lanes<B>>>>),
    /// The mount may have transactions.
    Transactional(Box<TransactionalBacking<B>>),
}

/// An object of a [`Store`].
pub(crate) enum StoreInode<B: Backing> {
    Plain(PlainInode<B>),
    Placed(PlainInode<Lanes<B>>),
    Logged(PlainInode<LogBacking<B>>),
    LoggedInLanes(PlainInode<LogBacking<Lanes<B>>>),
    Transactional(Arc<Object<B>>),
}

/// An open file of a [`Store`].
pub(crate) enum StoreFile<B: Backing> {
    Plain(B::File),
    Placed(<Lanes<B> as Backing>::File),
    Logged(<LogBacking<B> as Backing>::File),
    LoggedInLanes(<LogBacking<Lanes<B>> as Backing>::File),
    Transactional(TrackedFile<B>),
}

/// An open directory of a [`Store`].
pub(crate) enum StoreDir<B: Backing> {
    Plain(PlainDir<B>),
    Placed(PlainDir<Lanes<B>>),
    Logged(PlainDir<LogBacking<B>>),
    LoggedInLanes(PlainDir<LogBacking<Lanes<B>>>),
    Transactional(TrackedDir<B>),
}

impl<B: Backing> Clone for StoreInode<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(inode) => Self::Plain(inode.clone()),
            Self::Placed(inode) => Self::Placed(inode.clone()),
            Self::Logged(inode) => Self::Logged(inode.clone()),
            Self::LoggedInLanes(inode) => Self::LoggedInLanes(inode.clone()),
            Self::Transactional(object) => Self::Transactional(Arc::clone(object)),
        }
    }
}

impl<B: Backing> StoreInode<B> {
    /// The object, where the store can have transactions.
    pub(crate) fn transactional(&self) -> Option<&Arc<Object<B>>> {
        match self {
            Self::Transactional(object) => Some(object),
            _ => None,
        }
    }
}

impl<B: Backing> Store<B> {
    /// The backing with transactions, if the mount can have them.
    pub(crate) fn transactional(&self) -> Option<&TransactionalBacking<B>> {
        match self {
            Self::Transactional(backing) => Some(backing),
            _ => None,
        }
    }
}

impl<B: Backing> Store<B> {
    /// The lanes, if files are placed.
    pub(crate) fn placed(&self) -> Option<&Lanes<B>> {
        match self {
            Self::Placed(backing) => Some(backing.base()),
            Self::LoggedInLanes(backing) => Some(backing.base().below()),
            Self::Plain(_) | Self::Logged(_) | Self::Transactional(_) => None,
        }
    }

    /// The backing with logs, if files may lie in them.
    pub(crate) fn logged(&self) -> Option<&dyn Logs> {
        match self {
            Self::Logged(backing) => Some(backing.base()),
            Self::LoggedInLanes(backing) => Some(backing.base()),
            Self::Plain(_) | Self::Placed(_) | Self::Transactional(_) => None,
        }
    }
}

/// Something of another store than the one that is called.
fn foreign() -> ! {
    unreachable!("a store is called with what it gave out")
}

/// Calls the store of the kind that `$of`, a reference to a [`StoreInode`], [`StoreFile`] or [`StoreDir`], is of.
macro_rules! delegate {
    ($self:ident, $kind:ident($of:ident), |$store:ident| $call:expr) => {
        match ($self, $of) {
            (Self::Plain($store), $kind::Plain($of)) => $call,
            (Self::Placed($store), $kind::Placed($of)) => $call,
            (Self::Logged($store), $kind::Logged($of)) => $call,
            (Self::LoggedInLanes($store), $kind::LoggedInLanes($of)) => $call,
            (Self::Transactional($store), $kind::Transactional($of)) => $call,
            _ => foreign(),
        }
    };
    ($self:ident, $kind:ident($one:ident, $other:ident), |$store:ident| $call:expr) => {
        match ($self, $one, $other) {
            (Self::Plain($store), $kind::Plain($one), $kind::Plain($other)) => $call,
            (Self::Placed($store), $kind::Placed($one), $kind::Placed($other)) => $call,
            (Self::Logged($store), $kind::Logged($one), $kind::Logged($other)) => $call,
            (
                Self::LoggedInLanes($store),
                $kind::LoggedInLanes($one),
                $kind::LoggedInLanes($other),
            ) => $call,
            (
                Self::Transactional($store),
                $kind::Transactional($one),
                $kind::Transactional($other),
            ) => $call,
            _ => foreign(),
        }
    };
}

/// The same for a call of an object that returns a file or a directory, which `$new` wraps.
macro_rules! delegate_open {
    ($self:ident, $inode:ident, $new:ident, |$store:ident| $call:expr) => {
        match ($self, $inode) {
            (Self::Plain($store), StoreInode::Plain($inode)) => $call.map($new::Plain),
            (Self::Placed($store), StoreInode::Placed($inode)) => $call.map($new::Placed),
            (Self::Logged($store), StoreInode::Logged($inode)) => $call.map($new::Logged),
            (Self::LoggedInLanes($store), StoreInode::LoggedInLanes($inode)) => {
                $call.map($new::LoggedInLanes)
            }
            (Self::Transactional($store), StoreInode::Transactional($inode)) => {
                $call.map($new::Transactional)
            }
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
            (Self::Placed($store), StoreInode::Placed($parent)) => {
                $call.map(|(inode, attr)| (StoreInode::Placed(inode), attr))
            }
            (Self::Logged($store), StoreInode::Logged($parent)) => {
                $call.map(|(inode, attr)| (StoreInode::Logged(inode), attr))
            }
            (Self::LoggedInLanes($store), StoreInode::LoggedInLanes($parent)) => {
                $call.map(|(inode, attr)| (StoreInode::LoggedInLanes(inode), attr))
            }
            (Self::Transactional($store), StoreInode::Transactional($parent)) => {
                $call.map(|(object, attr)| (StoreInode::Transactional(object), attr))
            }
            _ => foreign(),
        }
    };
}

/// The same for a call that returns an object, an open file of it and its attributes.
macro_rules! delegate_create {
    ($self:ident, $parent:ident, |$store:ident| $call:expr) => {
        match ($self, $parent) {
            (Self::Plain($store), StoreInode::Plain($parent)) => {
                $call.map(|(inode, file, attr)| {
                    (StoreInode::Plain(inode), StoreFile::Plain(file), attr)
                })
            }
            (Self::Placed($store), StoreInode::Placed($parent)) => {
                $call.map(|(inode, file, attr)| {
                    (StoreInode::Placed(inode), StoreFile::Placed(file), attr)
                })
            }
            (Self::Logged($store), StoreInode::Logged($parent)) => {
                $call.map(|(inode, file, attr)| {
                    (StoreInode::Logged(inode), StoreFile::Logged(file), attr)
                })
            }
            (Self::LoggedInLanes($store), StoreInode::LoggedInLanes($parent)) => {
                $call.map(|(inode, file, attr)| {
                    let inode = StoreInode::LoggedInLanes(inode);
                    (inode, StoreFile::LoggedInLanes(file), attr)
                })
            }
            (Self::Transactional($store), StoreInode::Transactional($parent)) => {
                $call.map(|(object, file, attr)| {
                    let inode = StoreInode::Transactional(object);
                    (inode, StoreFile::Transactional(file), attr)
                })
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
            Self::Placed($store) => $call,
            Self::Logged($store) => $call,
            Self::LoggedInLanes($store) => $call,
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
            Self::Placed(store) => StoreInode::Placed(store.root()),
            Self::Logged(store) => StoreInode::Logged(store.root()),
            Self::LoggedInLanes(store) => StoreInode::LoggedInLanes(store.root()),
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
        delegate_create!(self, parent, |store| store
            .create(caller, parent, name, mode))
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
        delegate!(self, StoreInode(parent), |store| store.unlink(parent, name))
    }

    fn rmdir(&self, parent: &StoreInode<B>, name: &OsStr) -> Result<()> {
        delegate!(self, StoreInode(parent), |store| store.rmdir(parent, name))
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
        delegate!(self, StoreInode(inode), |store| store.readlink(inode))
    }

    fn attr(&self, inode: &StoreInode<B>) -> Result<Attr> {
        delegate!(self, StoreInode(inode), |store| store.attr(inode))
    }

    fn attr_of_file(&self, file: &StoreFile<B>) -> Result<Attr> {
        delegate!(self, StoreFile(file), |store| store.attr_of_file(file))
    }

    fn set_mode(&self, inode: &StoreInode<B>, mode: u32) -> Result<()> {
        delegate!(self, StoreInode(inode), |store| store.set_mode(inode, mode))
    }

    fn set_owner(&self, inode: &StoreInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        delegate!(self, StoreInode(inode), |store| store
            .set_owner(inode, uid, gid))
    }

    fn set_times(&self, inode: &StoreInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        delegate!(self, StoreInode(inode), |store| store
            .set_times(inode, atime, mtime))
    }

    fn get_xattr(&self, inode: &StoreInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        delegate!(self, StoreInode(inode), |store| store
            .get_xattr(inode, name))
    }

    fn set_xattr(
        &self,
        inode: &StoreInode<B>,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        delegate!(self, StoreInode(inode), |store| store
            .set_xattr(inode, name, value, flags))
    }

    fn list_xattr(&self, inode: &StoreInode<B>) -> Result<Vec<u8>> {
        delegate!(self, StoreInode(inode), |store| store.list_xattr(inode))
    }

    fn remove_xattr(&self, inode: &StoreInode<B>, name: &OsStr) -> Result<()> {
        delegate!(self, StoreInode(inode), |store| store
            .remove_xattr(inode, name))
    }

    fn has_default_acl(&self, inode: &StoreInode<B>) -> bool {
        delegate!(self, StoreInode(inode), |store| store
            .has_default_acl(inode))
    }

    fn open_dir(&self, inode: &StoreInode<B>) -> Result<StoreDir<B>> {
        delegate_open!(self, inode, StoreDir, |store| store.open_dir(inode))
    }

    fn read_dir(
        &self,
        dir: &StoreDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        delegate!(self, StoreDir(dir), |store| store
            .read_dir(dir, cookie, sink))
    }

    fn sync_dir(&self, inode: &StoreInode<B>) -> Result<()> {
        delegate!(self, StoreInode(inode), |store| store.sync_dir(inode))
    }

    fn open(&self, inode: &StoreInode<B>, access: Access) -> Result<StoreFile<B>> {
        delegate_open!(self, inode, StoreFile, |store| store.open(inode, access))
    }

    fn read_at(&self, file: &StoreFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        delegate!(self, StoreFile(file), |store| store
            .read_at(file, buf, offset))
    }

    fn write_at(&self, file: &StoreFile<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        delegate!(self, StoreFile(file), |store| store
            .write_at(file, data, offset))
    }

    fn write_parts(&self, file: &StoreFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        delegate!(self, StoreFile(file), |store| store
            .write_parts(file, parts))
    }

    fn gathers(&self, inode: &StoreInode<B>) -> bool {
        delegate!(self, StoreInode(inode), |store| store.gathers(inode))
    }

    fn set_len(&self, file: &StoreFile<B>, len: u64) -> Result<()> {
        delegate!(self, StoreFile(file), |store| store.set_len(file, len))
    }

    fn grow(&self, file: &StoreFile<B>, len: u64) -> Result<()> {
        delegate!(self, StoreFile(file), |store| store.grow(file, len))
    }

    fn finish_set_len(&self, file: &StoreFile<B>, len: u64) -> Result<bool> {
        delegate!(self, StoreFile(file), |store| store
            .finish_set_len(file, len))
    }

    fn rewrite_nothing(&self, file: &StoreFile<B>) -> Result<()> {
        delegate!(self, StoreFile(file), |store| store.rewrite_nothing(file))
    }

    fn allocate(&self, file: &StoreFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        delegate!(self, StoreFile(file), |store| store
            .allocate(file, mode, offset, len))
    }

    fn seek(&self, file: &StoreFile<B>, offset: u64, what: Seek) -> Result<u64> {
        delegate!(self, StoreFile(file), |store| store
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
        delegate!(self, StoreFile(file), |store| store.sync(file, data_only))
    }

    fn begin_sync(&self, file: &StoreFile<B>, offset: u64, len: u64) {
        delegate!(self, StoreFile(file), |store| store
            .begin_sync(file, offset, len));
    }

    fn try_lock(&self, file: &StoreFile<B>, mode: LockMode) -> Result<bool> {
        delegate!(self, StoreFile(file), |store| store.try_lock(file, mode))
    }

    fn fd<'a>(&self, file: &'a StoreFile<B>) -> Option<BorrowedFd<'a>> {
        delegate!(self, StoreFile(file), |store| store.fd(file))
    }

    fn reading_fd(&self, file: &StoreFile<B>) -> Option<OwnedFd> {
        delegate!(self, StoreFile(file), |store| store.reading_fd(file))
    }

    fn locate(
        &self,
        file: &StoreFile<B>,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        delegate!(self, StoreFile(file), |store| store
            .locate(file, range, limits))
    }

    fn kernel_reads(&self, file: &StoreFile<B>) -> KernelReads {
        delegate!(self, StoreFile(file), |store| store.kernel_reads(file))
    }

    fn note_opened(&self, file: &StoreFile<B>, writes: bool) -> Result<()> {
        delegate!(self, StoreFile(file), |store| store
            .note_opened(file, writes))
    }

    fn changes_by_others(&self, inode: &StoreInode<B>) -> u64 {
        delegate!(self, StoreInode(inode), |store| store
            .changes_by_others(inode))
    }

    fn finishes_files(&self) -> bool {
        delegate_whole!(self, |store| store.finishes_files())
    }

    fn note_written(&self, file: &StoreFile<B>) {
        delegate!(self, StoreFile(file), |store| store.note_written(file));
    }

    fn finish_file(&self, file: &StoreFile<B>) -> Result<()> {
        delegate!(self, StoreFile(file), |store| store.finish_file(file))
    }

    fn is_logged(&self, inode: &StoreInode<B>) -> bool {
        delegate!(self, StoreInode(inode), |store| store.is_logged(inode))
    }

    fn lane_count(&self) -> u16 {
        delegate_whole!(self, |store| store.lane_count())
    }

    fn lane_of(&self, inode: &StoreInode<B>) -> LaneIndex {
        delegate!(self, StoreInode(inode), |store| store.lane_of(inode))
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
        delegate!(self, StoreInode(inode), |store| store.sync_tree(inode))
    }

    fn sync_way(&self) -> SyncWay {
        delegate_whole!(self, |store| store.sync_way())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_lanes::{Lane, Rule, Setup};
    use firn_sim::{SimBacking, suite};

    #[test]
    fn a_store_of_each_kind_conforms() {
        suite::run(|| Store::Plain(PlainBacking::new(SimBacking::new())));
        suite::run(|| Store::Placed(Box::new(PlainBacking::new(placed()))));
        suite::run(|| Store::Logged(Box::new(PlainBacking::new(logged(SimBacking::new())))));
        suite::run(|| Store::LoggedInLanes(Box::new(PlainBacking::new(logged(placed())))));
        let open = |base| TransactionalBacking::open(base).expect("open").0;
        suite::run(|| Store::Transactional(Box::new(open(SimBacking::new()))));
    }

    fn logged<B: Backing>(base: B) -> LogBacking<B> {
        let setup = firn_log::Setup {
            host: "host".to_owned(),
            chooses: Box::new(|_: &OsStr| true),
            is_alive: Box::new(|_| Ok(true)),
            patience: std::time::Duration::ZERO,
            lag_max: std::time::Duration::ZERO,
            unit_bytes: 64 << 10,
            flattens_closed: true,
            flattens_read: false,
        };
        LogBacking::open(base, setup).expect("open")
    }

    fn placed() -> Lanes<SimBacking> {
        let primary = SimBacking::new();
        let staging = OsStr::new(firn_transact::TOP);
        let made = primary.mkdir(&suite::own_caller(), &primary.root(), staging, 0o700);
        let (staging, _) = made.expect("mkdir");
        let lane = Lane::new(SimBacking::new(), "/lane".into());
        let setup = Setup {
            id: 1,
            staging: Some(staging),
            lanes: vec![lane],
            absent: Vec::new(),
            rule: Some(Rule::new(1, "host")),
        };
        Lanes::open(primary, setup).expect("open")
    }
}
