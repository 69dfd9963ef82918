//! A backing that forgets the data it is given; names and everything else are real.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use firn_backing::{
    Access, Attr, Backing, Caller, DirBacking, DirEntry, LaneIndex, RenameFlags, Result, Seek,
    SetTime, StatFs, SyncWay,
};

/// See the module.
pub struct DiscardBacking(pub DirBacking);

type Inode = <DirBacking as Backing>::Inode;
type File = <DirBacking as Backing>::File;
type Dir = <DirBacking as Backing>::Dir;

impl Backing for DiscardBacking {
    type Inode = Inode;
    type File = File;
    type Dir = Dir;

    /// Says that all was written.
    fn write_at(&self, _: &File, data: &[IoSlice<'_>], _: u64) -> Result<usize> {
        Ok(data.iter().map(|slice| slice.len()).sum())
    }

    fn root(&self) -> Inode {
        self.0.root()
    }
    fn lookup(&self, parent: &Inode, name: &OsStr) -> Result<(Inode, Attr)> {
        self.0.lookup(parent, name)
    }
    fn create(
        &self,
        caller: &Caller,
        parent: &Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Inode, File, Attr)> {
        self.0.create(caller, parent, name, mode)
    }
    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Inode, Attr)> {
        self.0.mkdir(caller, parent, name, mode)
    }
    fn mknod(
        &self,
        caller: &Caller,
        parent: &Inode,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Inode, Attr)> {
        self.0.mknod(caller, parent, name, mode, rdev)
    }
    fn symlink(
        &self,
        caller: &Caller,
        parent: &Inode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Inode, Attr)> {
        self.0.symlink(caller, parent, name, target)
    }
    fn link(&self, inode: &Inode, parent: &Inode, name: &OsStr) -> Result<Attr> {
        self.0.link(inode, parent, name)
    }
    fn unlink(&self, parent: &Inode, name: &OsStr) -> Result<()> {
        self.0.unlink(parent, name)
    }
    fn rmdir(&self, parent: &Inode, name: &OsStr) -> Result<()> {
        self.0.rmdir(parent, name)
    }
    fn rename(
        &self,
        parent: &Inode,
        name: &OsStr,
        new_parent: &Inode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        self.0.rename(parent, name, new_parent, new_name, flags)
    }
    fn readlink(&self, inode: &Inode) -> Result<Vec<u8>> {
        self.0.readlink(inode)
    }
    fn attr(&self, inode: &Inode) -> Result<Attr> {
        self.0.attr(inode)
    }
    fn attr_of_file(&self, file: &File) -> Result<Attr> {
        self.0.attr_of_file(file)
    }
    fn set_mode(&self, inode: &Inode, mode: u32) -> Result<()> {
        self.0.set_mode(inode, mode)
    }
    fn set_owner(&self, inode: &Inode, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.0.set_owner(inode, uid, gid)
    }
    fn set_times(&self, inode: &Inode, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.0.set_times(inode, atime, mtime)
    }
    fn get_xattr(&self, inode: &Inode, name: &OsStr) -> Result<Vec<u8>> {
        self.0.get_xattr(inode, name)
    }
    fn set_xattr(&self, inode: &Inode, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        self.0.set_xattr(inode, name, value, flags)
    }
    fn list_xattr(&self, inode: &Inode) -> Result<Vec<u8>> {
        self.0.list_xattr(inode)
    }
    fn remove_xattr(&self, inode: &Inode, name: &OsStr) -> Result<()> {
        self.0.remove_xattr(inode, name)
    }
    fn has_default_acl(&self, inode: &Inode) -> bool {
        self.0.has_default_acl(inode)
    }
    fn open_dir(&self, inode: &Inode) -> Result<Dir> {
        self.0.open_dir(inode)
    }
    fn read_dir(
        &self,
        dir: &Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        self.0.read_dir(dir, cookie, sink)
    }
    fn sync_dir(&self, inode: &Inode) -> Result<()> {
        self.0.sync_dir(inode)
    }
    fn open(&self, inode: &Inode, access: Access) -> Result<File> {
        self.0.open(inode, access)
    }
    fn read_at(&self, file: &File, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.0.read_at(file, buf, offset)
    }
    fn set_len(&self, file: &File, len: u64) -> Result<()> {
        self.0.set_len(file, len)
    }
    fn allocate(&self, file: &File, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.0.allocate(file, mode, offset, len)
    }
    fn seek(&self, file: &File, offset: u64, what: Seek) -> Result<u64> {
        self.0.seek(file, offset, what)
    }
    fn copy_range(
        &self,
        from: &File,
        from_offset: u64,
        to: &File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        self.0.copy_range(from, from_offset, to, to_offset, len)
    }
    fn sync(&self, file: &File, data_only: bool) -> Result<()> {
        self.0.sync(file, data_only)
    }
    fn fd<'a>(&self, file: &'a File) -> Option<BorrowedFd<'a>> {
        self.0.fd(file)
    }
    fn lane_count(&self) -> u16 {
        self.0.lane_count()
    }

    fn lane_of(&self, inode: &Inode) -> LaneIndex {
        self.0.lane_of(inode)
    }

    fn statfs(&self) -> Result<StatFs> {
        self.0.statfs()
    }
    fn sync_all(&self) -> Result<()> {
        self.0.sync_all()
    }

    fn sync_changes(&self) -> Result<()> {
        self.0.sync_changes()
    }

    fn sync_tree(&self, inode: &Inode) -> Result<()> {
        self.0.sync_tree(inode)
    }

    fn sync_way(&self) -> SyncWay {
        self.0.sync_way()
    }
}
