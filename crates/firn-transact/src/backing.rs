//! [`Held`] as a backing: which calls go through and which do not.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use firn_backing::{
    Access, Attr, Backing, Caller, DirEntry, Errno, RenameFlags, Result, Seek, SetTime, StatFs,
    SyncWay,
};

use crate::data::TrackedFile;
use crate::listing::TrackedDir;
use crate::object::Object;
use crate::staging;
use crate::transactional::Held;

/// An object of [`Held`].
pub enum Inode<B: Backing> {
    /// Of a backing that has no transactions.
    Plain(B::Inode),
    /// The top of one, where `.firn` is not shown.
    Top(B::Inode),
    /// Of one that may have them.
    Tracked(Arc<Object<B>>),
}

impl<B: Backing> Clone for Inode<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(inode) => Self::Plain(inode.clone()),
            Self::Top(inode) => Self::Top(inode.clone()),
            Self::Tracked(object) => Self::Tracked(Arc::clone(object)),
        }
    }
}

/// An open file of [`Held`].
pub enum File<B: Backing> {
    /// As [`Host::Plain`].
    Plain(B::File),
    /// As [`Host::Tracked`].
    Tracked(TrackedFile<B>),
}

/// An open directory of [`Held`].
pub enum Dir<B: Backing> {
    /// As [`Host::Plain`].
    Plain(B::Dir),
    /// As [`Host::Top`].
    Top(B::Dir),
    /// As [`Host::Tracked`].
    Tracked(TrackedDir<B>),
}

impl<B: Backing> Backing for Held<B> {
    type Inode = Inode<B>;
    type File = File<B>;
    type Dir = Dir<B>;

    fn root(&self) -> Inode<B> {
        self.top().clone()
    }

    fn lookup(&self, parent: &Inode<B>, name: &OsStr) -> Result<(Inode<B>, Attr)> {
        match parent {
            Inode::Top(_) if is_own(name) => Err(Errno::NOENT),
            Inode::Plain(parent) | Inode::Top(parent) => self
                .base
                .lookup(parent, name)
                .map(|(inode, attr)| (Inode::Plain(inode), attr)),
            Inode::Tracked(parent) => self
                .look(parent, name)
                .map(|(o, attr)| (Inode::Tracked(o), attr)),
        }
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Inode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Inode<B>, File<B>, Attr)> {
        match parent {
            Inode::Top(_) if is_own(name) => Err(Errno::PERM),
            Inode::Plain(parent) | Inode::Top(parent) => {
                let (inode, file, attr) = self.base.create(caller, parent, name, mode)?;
                Ok((Inode::Plain(inode), File::Plain(file), attr))
            }
            Inode::Tracked(parent) => {
                let (object, attr) = self.make(parent, name, |dir, name| {
                    self.base
                        .create(caller, dir, name, mode)
                        .map(|(inode, _, attr)| (inode, attr))
                })?;
                let file = File::Tracked(TrackedFile::new(&object, Access::ReadWrite));
                Ok((Inode::Tracked(object), file, attr))
            }
        }
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Inode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Inode<B>, Attr)> {
        self.make_object(parent, name, |dir, name| {
            self.base.mkdir(caller, dir, name, mode)
        })
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &Inode<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Inode<B>, Attr)> {
        self.make_object(parent, name, |dir, name| {
            self.base.mknod(caller, dir, name, mode, rdev)
        })
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &Inode<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Inode<B>, Attr)> {
        self.make_object(parent, name, |dir, name| {
            self.base.symlink(caller, dir, name, target)
        })
    }

    fn link(&self, inode: &Inode<B>, parent: &Inode<B>, name: &OsStr) -> Result<Attr> {
        match (inode, parent) {
            (_, Inode::Top(_)) if is_own(name) => Err(Errno::PERM),
            (Inode::Plain(inode), Inode::Plain(parent) | Inode::Top(parent)) => {
                self.base.link(inode, parent, name)
            }
            (Inode::Tracked(inode), Inode::Tracked(parent)) => self.add_link(inode, parent, name),
            _ => Err(Errno::XDEV),
        }
    }

    fn unlink(&self, parent: &Inode<B>, name: &OsStr) -> Result<()> {
        match parent {
            Inode::Top(_) if is_own(name) => Err(Errno::NOENT),
            Inode::Plain(parent) | Inode::Top(parent) => self.base.unlink(parent, name),
            Inode::Tracked(parent) => self.remove_name(parent, name, false),
        }
    }

    fn rmdir(&self, parent: &Inode<B>, name: &OsStr) -> Result<()> {
        match parent {
            Inode::Top(_) if is_own(name) => Err(Errno::NOENT),
            Inode::Plain(parent) | Inode::Top(parent) => self.base.rmdir(parent, name),
            Inode::Tracked(parent) => self.remove_name(parent, name, true),
        }
    }

    fn rename(
        &self,
        parent: &Inode<B>,
        name: &OsStr,
        new_parent: &Inode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        match (parent, new_parent) {
            (Inode::Top(_), _) if is_own(name) => Err(Errno::NOENT),
            (_, Inode::Top(_)) if is_own(new_name) => Err(Errno::PERM),
            (Inode::Plain(from) | Inode::Top(from), Inode::Plain(to) | Inode::Top(to)) => {
                self.base.rename(from, name, to, new_name, flags)
            }
            (Inode::Tracked(from), Inode::Tracked(to)) => {
                self.move_name((from, name), (to, new_name), flags)
            }
            _ => Err(Errno::XDEV),
        }
    }

    fn readlink(&self, inode: &Inode<B>) -> Result<Vec<u8>> {
        self.ask(inode, |inode| self.base.readlink(inode))
    }

    fn attr(&self, inode: &Inode<B>) -> Result<Attr> {
        match inode {
            Inode::Plain(inode) => self.base.attr(inode),
            Inode::Top(inode) => self.attr_of_top(inode),
            Inode::Tracked(object) => object.attr(self),
        }
    }

    fn attr_of_file(&self, file: &File<B>) -> Result<Attr> {
        match file {
            File::Plain(file) => self.base.attr_of_file(file),
            File::Tracked(file) => file.object.attr(self),
        }
    }

    fn set_mode(&self, inode: &Inode<B>, mode: u32) -> Result<()> {
        self.tell(inode, |inode| self.base.set_mode(inode, mode))
    }

    fn set_owner(&self, inode: &Inode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.tell(inode, |inode| self.base.set_owner(inode, uid, gid))
    }

    fn set_times(&self, inode: &Inode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        if (atime, mtime) == (SetTime::Keep, SetTime::Keep) {
            return Ok(());
        }
        self.set_times_of(inode, atime, mtime)
    }

    fn get_xattr(&self, inode: &Inode<B>, name: &OsStr) -> Result<Vec<u8>> {
        self.ask(inode, |inode| self.base.get_xattr(inode, name))
    }

    fn set_xattr(&self, inode: &Inode<B>, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        self.tell(inode, |inode| {
            self.base.set_xattr(inode, name, value, flags)
        })
    }

    fn list_xattr(&self, inode: &Inode<B>) -> Result<Vec<u8>> {
        self.ask(inode, |inode| self.base.list_xattr(inode))
    }

    fn remove_xattr(&self, inode: &Inode<B>, name: &OsStr) -> Result<()> {
        self.tell(inode, |inode| self.base.remove_xattr(inode, name))
    }

    fn open_dir(&self, inode: &Inode<B>) -> Result<Dir<B>> {
        match inode {
            Inode::Plain(inode) => self.base.open_dir(inode).map(Dir::Plain),
            Inode::Top(inode) => self.base.open_dir(inode).map(Dir::Top),
            Inode::Tracked(object) => self.open_tracked_dir(object).map(Dir::Tracked),
        }
    }

    fn read_dir(
        &self,
        dir: &Dir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        match dir {
            Dir::Plain(dir) => self.base.read_dir(dir, cookie, sink),
            Dir::Top(dir) => self
                .base
                .read_dir(dir, cookie, &mut |entry| is_own(entry.name) || sink(entry)),
            Dir::Tracked(dir) => self.read_tracked_dir(dir, cookie, sink),
        }
    }

    fn sync_dir(&self, inode: &Inode<B>) -> Result<()> {
        match inode {
            Inode::Plain(inode) | Inode::Top(inode) => self.base.sync_dir(inode),
            Inode::Tracked(object) => self.sync_tracked_dir(object),
        }
    }

    fn open(&self, inode: &Inode<B>, access: Access) -> Result<File<B>> {
        match inode {
            Inode::Plain(inode) | Inode::Top(inode) => {
                self.base.open(inode, access).map(File::Plain)
            }
            Inode::Tracked(object) => self.open_tracked(object, access).map(File::Tracked),
        }
    }

    fn read_at(&self, file: &File<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        match file {
            File::Plain(file) => self.base.read_at(file, buf, offset),
            File::Tracked(file) => self.read_tracked(file, buf, offset),
        }
    }

    fn write_at(&self, file: &File<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        match file {
            File::Plain(file) => self.base.write_at(file, data, offset),
            File::Tracked(file) => self.write_tracked(file, data, offset),
        }
    }

    fn set_len(&self, file: &File<B>, len: u64) -> Result<()> {
        match file {
            File::Plain(file) => self.base.set_len(file, len),
            File::Tracked(file) => self.set_len_tracked(file, len),
        }
    }

    fn allocate(&self, file: &File<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        match file {
            File::Plain(file) => self.base.allocate(file, mode, offset, len),
            File::Tracked(file) => self.allocate_tracked(file, mode, offset, len),
        }
    }

    fn seek(&self, file: &File<B>, offset: u64, what: Seek) -> Result<u64> {
        match file {
            File::Plain(file) => self.base.seek(file, offset, what),
            File::Tracked(file) => self.seek_tracked(file, offset, what),
        }
    }

    fn copy_range(
        &self,
        from: &File<B>,
        from_offset: u64,
        to: &File<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        match (from, to) {
            (File::Plain(from), File::Plain(to)) => {
                self.base.copy_range(from, from_offset, to, to_offset, len)
            }
            (File::Tracked(from), File::Tracked(to)) => {
                self.copy_tracked((from, from_offset), (to, to_offset), len)
            }
            _ => Err(Errno::XDEV),
        }
    }

    fn sync(&self, file: &File<B>, data_only: bool) -> Result<()> {
        match file {
            File::Plain(file) => self.base.sync(file, data_only),
            File::Tracked(file) => self.sync_tracked(file, data_only),
        }
    }

    fn fd<'a>(&self, file: &'a File<B>) -> Option<BorrowedFd<'a>> {
        match file {
            File::Plain(file) => self.base.fd(file),
            // The kernel would go on with it after a change in a transaction.
            File::Tracked(_) => None,
        }
    }

    fn statfs(&self) -> Result<StatFs> {
        self.base.statfs()
    }

    fn sync_all(&self) -> Result<()> {
        self.base.sync_all()
    }

    fn sync_changes(&self) -> Result<()> {
        self.base.sync_changes()
    }

    fn sync_tree(&self, inode: &Inode<B>) -> Result<()> {
        match inode {
            Inode::Plain(inode) | Inode::Top(inode) => self.base.sync_tree(inode),
            Inode::Tracked(object) => {
                // What is staged lies elsewhere, and was made by this process.
                self.base.sync_changes()?;
                let base = object.inner.read().base.clone();
                base.map_or(Ok(()), |inode| self.base.sync_tree(&inode))
            }
        }
    }

    fn sync_way(&self) -> SyncWay {
        self.base.sync_way()
    }

    fn await_change(&self, inode: &Inode<B>) -> Result<()> {
        match inode {
            Inode::Plain(_) | Inode::Top(_) => Ok(()),
            Inode::Tracked(object) => self.writing(object).map(drop),
        }
    }

    fn changes_wait(&self) -> bool {
        self.some_scope_waits()
    }
}

/// Whether a name at the top is Firn's own.
fn is_own(name: &OsStr) -> bool {
    name == staging::TOP
}

impl<B: Backing> Held<B> {
    /// Without what `.firn` adds, where that is a directory and the file system counts those.
    fn attr_of_top(&self, inode: &B::Inode) -> Result<Attr> {
        let attr = self.base.attr(inode)?;
        let hidden = u32::from(attr.nlink > 1 && self.hides_own());
        Ok(Attr {
            nlink: attr.nlink - hidden,
            ..attr
        })
    }

    fn make_object(
        &self,
        parent: &Inode<B>,
        name: &OsStr,
        make: impl FnOnce(&B::Inode, &OsStr) -> Result<(B::Inode, Attr)>,
    ) -> Result<(Inode<B>, Attr)> {
        match parent {
            Inode::Top(_) if is_own(name) => Err(Errno::PERM),
            Inode::Plain(parent) | Inode::Top(parent) => {
                make(parent, name).map(|(inode, attr)| (Inode::Plain(inode), attr))
            }
            Inode::Tracked(parent) => self
                .make(parent, name, make)
                .map(|(object, attr)| (Inode::Tracked(object), attr)),
        }
    }

    /// A question about attributes.
    fn ask<T>(&self, inode: &Inode<B>, question: impl FnOnce(&B::Inode) -> Result<T>) -> Result<T> {
        match inode {
            Inode::Plain(inode) | Inode::Top(inode) => question(inode),
            Inode::Tracked(object) => question(&object.inner.read().inode(&self.base)?),
        }
    }

    /// A change of attributes.
    fn tell(&self, inode: &Inode<B>, change: impl FnOnce(&B::Inode) -> Result<()>) -> Result<()> {
        match inode {
            Inode::Plain(inode) | Inode::Top(inode) => change(inode),
            Inode::Tracked(object) => self.change_attributes(object, change),
        }
    }
}
