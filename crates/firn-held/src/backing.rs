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
use crate::scope::Held;
use crate::staging;

/// An object of [`Held`].
pub enum Node<B: Backing> {
    /// Of a backing that has no transactions.
    Plain(B::Node),
    /// The top of one, where `.firn` is not shown.
    Top(B::Node),
    /// Of one that may have them.
    Tracked(Arc<Object<B>>),
}

impl<B: Backing> Clone for Node<B> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(node) => Self::Plain(node.clone()),
            Self::Top(node) => Self::Top(node.clone()),
            Self::Tracked(object) => Self::Tracked(Arc::clone(object)),
        }
    }
}

/// An open file of [`Held`].
pub enum File<B: Backing> {
    /// As [`Node::Plain`].
    Plain(B::File),
    /// As [`Node::Tracked`].
    Tracked(TrackedFile<B>),
}

/// An open directory of [`Held`].
pub enum Dir<B: Backing> {
    /// As [`Node::Plain`].
    Plain(B::Dir),
    /// As [`Node::Top`].
    Top(B::Dir),
    /// As [`Node::Tracked`].
    Tracked(TrackedDir<B>),
}

impl<B: Backing> Backing for Held<B> {
    type Node = Node<B>;
    type File = File<B>;
    type Dir = Dir<B>;

    fn root(&self) -> Node<B> {
        self.top().clone()
    }

    fn lookup(&self, parent: &Node<B>, name: &OsStr) -> Result<(Node<B>, Attr)> {
        match parent {
            Node::Top(_) if is_own(name) => Err(Errno::NOENT),
            Node::Plain(parent) | Node::Top(parent) => self
                .base
                .lookup(parent, name)
                .map(|(node, attr)| (Node::Plain(node), attr)),
            Node::Tracked(parent) => self
                .look(parent, name)
                .map(|(o, attr)| (Node::Tracked(o), attr)),
        }
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Node<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Node<B>, File<B>, Attr)> {
        match parent {
            Node::Top(_) if is_own(name) => Err(Errno::PERM),
            Node::Plain(parent) | Node::Top(parent) => {
                let (node, file, attr) = self.base.create(caller, parent, name, mode)?;
                Ok((Node::Plain(node), File::Plain(file), attr))
            }
            Node::Tracked(parent) => {
                let (object, attr) = self.make(parent, name, |dir, name| {
                    self.base
                        .create(caller, dir, name, mode)
                        .map(|(node, _, attr)| (node, attr))
                })?;
                let file = File::Tracked(TrackedFile::new(&object, Access::ReadWrite));
                Ok((Node::Tracked(object), file, attr))
            }
        }
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Node<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Node<B>, Attr)> {
        self.make_node(parent, name, |dir, name| {
            self.base.mkdir(caller, dir, name, mode)
        })
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &Node<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Node<B>, Attr)> {
        self.make_node(parent, name, |dir, name| {
            self.base.mknod(caller, dir, name, mode, rdev)
        })
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &Node<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Node<B>, Attr)> {
        self.make_node(parent, name, |dir, name| {
            self.base.symlink(caller, dir, name, target)
        })
    }

    fn link(&self, node: &Node<B>, parent: &Node<B>, name: &OsStr) -> Result<Attr> {
        match (node, parent) {
            (_, Node::Top(_)) if is_own(name) => Err(Errno::PERM),
            (Node::Plain(node), Node::Plain(parent) | Node::Top(parent)) => {
                self.base.link(node, parent, name)
            }
            (Node::Tracked(node), Node::Tracked(parent)) => self.add_link(node, parent, name),
            _ => Err(Errno::XDEV),
        }
    }

    fn unlink(&self, parent: &Node<B>, name: &OsStr) -> Result<()> {
        match parent {
            Node::Top(_) if is_own(name) => Err(Errno::NOENT),
            Node::Plain(parent) | Node::Top(parent) => self.base.unlink(parent, name),
            Node::Tracked(parent) => self.remove_name(parent, name, false),
        }
    }

    fn rmdir(&self, parent: &Node<B>, name: &OsStr) -> Result<()> {
        match parent {
            Node::Top(_) if is_own(name) => Err(Errno::NOENT),
            Node::Plain(parent) | Node::Top(parent) => self.base.rmdir(parent, name),
            Node::Tracked(parent) => self.remove_name(parent, name, true),
        }
    }

    fn rename(
        &self,
        parent: &Node<B>,
        name: &OsStr,
        new_parent: &Node<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        match (parent, new_parent) {
            (Node::Top(_), _) if is_own(name) => Err(Errno::NOENT),
            (_, Node::Top(_)) if is_own(new_name) => Err(Errno::PERM),
            (Node::Plain(from) | Node::Top(from), Node::Plain(to) | Node::Top(to)) => {
                self.base.rename(from, name, to, new_name, flags)
            }
            (Node::Tracked(from), Node::Tracked(to)) => {
                self.move_name((from, name), (to, new_name), flags)
            }
            _ => Err(Errno::XDEV),
        }
    }

    fn readlink(&self, node: &Node<B>) -> Result<Vec<u8>> {
        self.ask(node, |node| self.base.readlink(node))
    }

    fn attr(&self, node: &Node<B>) -> Result<Attr> {
        match node {
            Node::Plain(node) => self.base.attr(node),
            Node::Top(node) => self.attr_of_top(node),
            Node::Tracked(object) => object.attr(self),
        }
    }

    fn attr_of_file(&self, file: &File<B>) -> Result<Attr> {
        match file {
            File::Plain(file) => self.base.attr_of_file(file),
            File::Tracked(file) => file.object.attr(self),
        }
    }

    fn set_mode(&self, node: &Node<B>, mode: u32) -> Result<()> {
        self.tell(node, |node| self.base.set_mode(node, mode))
    }

    fn set_owner(&self, node: &Node<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.tell(node, |node| self.base.set_owner(node, uid, gid))
    }

    fn set_times(&self, node: &Node<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        if (atime, mtime) == (SetTime::Keep, SetTime::Keep) {
            return Ok(());
        }
        self.set_times_of(node, atime, mtime)
    }

    fn get_xattr(&self, node: &Node<B>, name: &OsStr) -> Result<Vec<u8>> {
        self.ask(node, |node| self.base.get_xattr(node, name))
    }

    fn set_xattr(&self, node: &Node<B>, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        self.tell(node, |node| self.base.set_xattr(node, name, value, flags))
    }

    fn list_xattr(&self, node: &Node<B>) -> Result<Vec<u8>> {
        self.ask(node, |node| self.base.list_xattr(node))
    }

    fn remove_xattr(&self, node: &Node<B>, name: &OsStr) -> Result<()> {
        self.tell(node, |node| self.base.remove_xattr(node, name))
    }

    fn open_dir(&self, node: &Node<B>) -> Result<Dir<B>> {
        match node {
            Node::Plain(node) => self.base.open_dir(node).map(Dir::Plain),
            Node::Top(node) => self.base.open_dir(node).map(Dir::Top),
            Node::Tracked(object) => self.open_tracked_dir(object).map(Dir::Tracked),
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

    fn sync_dir(&self, node: &Node<B>) -> Result<()> {
        match node {
            Node::Plain(node) | Node::Top(node) => self.base.sync_dir(node),
            Node::Tracked(object) => self.sync_tracked_dir(object),
        }
    }

    fn open(&self, node: &Node<B>, access: Access) -> Result<File<B>> {
        match node {
            Node::Plain(node) | Node::Top(node) => self.base.open(node, access).map(File::Plain),
            Node::Tracked(object) => self.open_tracked(object, access).map(File::Tracked),
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

    fn sync_tree(&self, node: &Node<B>) -> Result<()> {
        match node {
            Node::Plain(node) | Node::Top(node) => self.base.sync_tree(node),
            Node::Tracked(object) => {
                // What is staged lies elsewhere, and was made by this process.
                self.base.sync_changes()?;
                let base = object.inner.read().base.clone();
                base.map_or(Ok(()), |node| self.base.sync_tree(&node))
            }
        }
    }

    fn sync_way(&self) -> SyncWay {
        self.base.sync_way()
    }

    fn await_change(&self, node: &Node<B>) -> Result<()> {
        match node {
            Node::Plain(_) | Node::Top(_) => Ok(()),
            Node::Tracked(object) => self.writing(object).map(drop),
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
    fn attr_of_top(&self, node: &B::Node) -> Result<Attr> {
        let attr = self.base.attr(node)?;
        let hidden = u32::from(attr.nlink > 1 && self.hides_own());
        Ok(Attr {
            nlink: attr.nlink - hidden,
            ..attr
        })
    }

    fn make_node(
        &self,
        parent: &Node<B>,
        name: &OsStr,
        make: impl FnOnce(&B::Node, &OsStr) -> Result<(B::Node, Attr)>,
    ) -> Result<(Node<B>, Attr)> {
        match parent {
            Node::Top(_) if is_own(name) => Err(Errno::PERM),
            Node::Plain(parent) | Node::Top(parent) => {
                make(parent, name).map(|(node, attr)| (Node::Plain(node), attr))
            }
            Node::Tracked(parent) => self
                .make(parent, name, make)
                .map(|(object, attr)| (Node::Tracked(object), attr)),
        }
    }

    /// A question about attributes.
    fn ask<T>(&self, node: &Node<B>, question: impl FnOnce(&B::Node) -> Result<T>) -> Result<T> {
        match node {
            Node::Plain(node) | Node::Top(node) => question(node),
            Node::Tracked(object) => question(&object.inner.read().node(&self.base)?),
        }
    }

    /// A change of attributes.
    fn tell(&self, node: &Node<B>, change: impl FnOnce(&B::Node) -> Result<()>) -> Result<()> {
        match node {
            Node::Plain(node) | Node::Top(node) => change(node),
            Node::Tracked(object) => self.change_attributes(object, change),
        }
    }
}
