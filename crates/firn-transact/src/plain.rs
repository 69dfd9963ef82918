//! A backing without transactions: every call goes through. `.firn` at the top, which is Firn's here, too, is not shown and
//! cannot be made.
//!
//! Promise: a call takes no lock and uses no table of transactions.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, DirEntry, Errno, KernelReads, Kind, LaneIndex,
    LocateLimits, Located, LockMode, LockRange, Placing, RenameFlags, Result, Seek, SetTime,
    StatFs, SyncWay,
};

use crate::staging;

/// A backing without transactions.
pub struct PlainBacking<B: Backing> {
    base: B,
    root: PlainInode<B>,
    /// Directories at the top that are not shown, as far as the number of links counts them.
    hidden_links: u32,
}

/// An object of a [`PlainBacking`].
pub struct PlainInode<B: Backing> {
    inode: B::Inode,
    /// It is the top, where `.firn` is not shown.
    hides_own: bool,
}

impl<B: Backing> Clone for PlainInode<B> {
    fn clone(&self) -> Self {
        Self {
            inode: self.inode.clone(),
            hides_own: self.hides_own,
        }
    }
}

impl<B: Backing> PlainInode<B> {
    fn below_top(inode: B::Inode) -> Self {
        Self {
            inode,
            hides_own: false,
        }
    }

    /// Whether a name in this directory is not shown.
    fn hides(&self, name: &OsStr) -> bool {
        self.hides_own && name == staging::TOP
    }

    /// Fails where a name in this directory is Firn's and is to be made.
    fn check_new_name(&self, name: &OsStr) -> Result<()> {
        if self.hides(name) {
            Err(Errno::PERM)
        } else {
            Ok(())
        }
    }

    /// Fails where a name in this directory is not shown.
    fn check_old_name(&self, name: &OsStr) -> Result<()> {
        if self.hides(name) {
            Err(Errno::NOENT)
        } else {
            Ok(())
        }
    }
}

/// An open directory of a [`PlainBacking`].
pub struct PlainDir<B: Backing> {
    dir: B::Dir,
    hides_own: bool,
}

impl<B: Backing> PlainBacking<B> {
    /// Over `base`, whose `.firn` is not shown.
    pub fn new(base: B) -> Self {
        let own_dir = base.lookup(&base.root(), OsStr::new(staging::TOP));
        let has_own_dir = own_dir.is_ok_and(|(_, attr)| attr.kind == Kind::Dir);
        Self {
            root: PlainInode {
                inode: base.root(),
                hides_own: true,
            },
            base,
            hidden_links: u32::from(has_own_dir),
        }
    }

    /// The same for a stub tree, which has files of its own in `.firn`: it is shown.
    pub fn with_own_shown(base: B) -> Self {
        Self {
            root: PlainInode::below_top(base.root()),
            base,
            hidden_links: 0,
        }
    }

    /// The backing below.
    pub fn base(&self) -> &B {
        &self.base
    }

    fn without_hidden_links(&self, inode: &PlainInode<B>, attr: Attr) -> Attr {
        // Some file systems do not count subdirectories and say 1.
        let hidden = match inode.hides_own && attr.nlink > 1 {
            true => self.hidden_links,
            false => 0,
        };
        Attr {
            nlink: attr.nlink - hidden,
            ..attr
        }
    }
}

/// The object that was just found or made below the top.
fn below_top<B: Backing>((inode, attr): (B::Inode, Attr)) -> (PlainInode<B>, Attr) {
    (PlainInode::below_top(inode), attr)
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backing> Backing for PlainBacking<B> {
    type Inode = PlainInode<B>;
    type File = B::File;
    type Dir = PlainDir<B>;

    fn root(&self) -> PlainInode<B> {
        self.root.clone()
    }

    fn lookup(&self, parent: &PlainInode<B>, name: &OsStr) -> Result<(PlainInode<B>, Attr)> {
        parent.check_old_name(name)?;
        self.base.lookup(&parent.inode, name).map(below_top)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(PlainInode<B>, B::File, Attr)> {
        parent.check_new_name(name)?;
        let (inode, file, attr) = self.base.create(caller, &parent.inode, name, mode)?;
        Ok((PlainInode::below_top(inode), file, attr))
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(PlainInode<B>, Attr)> {
        parent.check_new_name(name)?;
        self.base
            .mkdir(caller, &parent.inode, name, mode)
            .map(below_top)
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(PlainInode<B>, Attr)> {
        parent.check_new_name(name)?;
        self.base
            .mknod(caller, &parent.inode, name, mode, rdev)
            .map(below_top)
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(PlainInode<B>, Attr)> {
        parent.check_new_name(name)?;
        self.base
            .symlink(caller, &parent.inode, name, target)
            .map(below_top)
    }

    fn link(&self, inode: &PlainInode<B>, parent: &PlainInode<B>, name: &OsStr) -> Result<Attr> {
        parent.check_new_name(name)?;
        self.base.link(&inode.inode, &parent.inode, name)
    }

    fn unlink(&self, parent: &PlainInode<B>, name: &OsStr) -> Result<()> {
        parent.check_old_name(name)?;
        self.base.unlink(&parent.inode, name)
    }

    fn rmdir(&self, parent: &PlainInode<B>, name: &OsStr) -> Result<()> {
        parent.check_old_name(name)?;
        self.base.rmdir(&parent.inode, name)
    }

    fn rename(
        &self,
        parent: &PlainInode<B>,
        name: &OsStr,
        new_parent: &PlainInode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        parent.check_old_name(name)?;
        new_parent.check_new_name(new_name)?;
        self.base
            .rename(&parent.inode, name, &new_parent.inode, new_name, flags)
    }

    fn moved_to(
        &self,
        inode: &PlainInode<B>,
        parent: &PlainInode<B>,
        name: &OsStr,
    ) -> PlainInode<B> {
        PlainInode {
            inode: self.base.moved_to(&inode.inode, &parent.inode, name),
            hides_own: inode.hides_own,
        }
    }

    fn readlink(&self, inode: &PlainInode<B>) -> Result<Vec<u8>> {
        self.base.readlink(&inode.inode)
    }

    fn attr(&self, inode: &PlainInode<B>) -> Result<Attr> {
        let attr = self.base.attr(&inode.inode)?;
        Ok(self.without_hidden_links(inode, attr))
    }

    fn attr_of_file(&self, file: &B::File) -> Result<Attr> {
        self.base.attr_of_file(file)
    }

    fn attr_now(&self, inode: &PlainInode<B>) -> Result<Attr> {
        let attr = self.base.attr_now(&inode.inode)?;
        Ok(self.without_hidden_links(inode, attr))
    }

    fn attr_of_file_now(&self, file: &B::File) -> Result<Attr> {
        self.base.attr_of_file_now(file)
    }

    fn set_mode(&self, inode: &PlainInode<B>, mode: u32) -> Result<()> {
        self.base.set_mode(&inode.inode, mode)
    }

    fn set_owner(&self, inode: &PlainInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.base.set_owner(&inode.inode, uid, gid)
    }

    fn set_times(&self, inode: &PlainInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        self.base.set_times(&inode.inode, atime, mtime)
    }

    fn get_xattr(&self, inode: &PlainInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        self.base.get_xattr(&inode.inode, name)
    }

    fn set_xattr(
        &self,
        inode: &PlainInode<B>,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        self.base.set_xattr(&inode.inode, name, value, flags)
    }

    fn list_xattr(&self, inode: &PlainInode<B>) -> Result<Vec<u8>> {
        self.base.list_xattr(&inode.inode)
    }

    fn remove_xattr(&self, inode: &PlainInode<B>, name: &OsStr) -> Result<()> {
        self.base.remove_xattr(&inode.inode, name)
    }

    fn has_default_acl(&self, inode: &PlainInode<B>) -> bool {
        self.base.has_default_acl(&inode.inode)
    }

    fn open_dir(&self, inode: &PlainInode<B>) -> Result<PlainDir<B>> {
        let dir = self.base.open_dir(&inode.inode)?;
        let hides_own = inode.hides_own;
        Ok(PlainDir { dir, hides_own })
    }

    fn read_dir(
        &self,
        dir: &PlainDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        if !dir.hides_own {
            return self.base.read_dir(&dir.dir, cookie, sink);
        }
        let mut shown = |entry: DirEntry<'_>| entry.name == staging::TOP || sink(entry);
        self.base.read_dir(&dir.dir, cookie, &mut shown)
    }

    fn sync_dir(&self, inode: &PlainInode<B>) -> Result<()> {
        self.base.sync_dir(&inode.inode)
    }

    fn open(&self, inode: &PlainInode<B>, access: Access) -> Result<B::File> {
        self.base.open(&inode.inode, access)
    }

    fn read_at(&self, file: &B::File, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.base.read_at(file, buf, offset)
    }

    fn write_at(&self, file: &B::File, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        self.base.write_at(file, data, offset)
    }

    fn write_parts(&self, file: &B::File, parts: &[DataPart<'_>]) -> Result<u64> {
        self.base.write_parts(file, parts)
    }

    fn gathers(&self, inode: &PlainInode<B>) -> bool {
        self.base.gathers(&inode.inode)
    }

    fn set_len(&self, file: &B::File, len: u64) -> Result<()> {
        self.base.set_len(file, len)
    }

    fn grow(&self, file: &B::File, len: u64) -> Result<()> {
        self.base.grow(file, len)
    }

    fn finish_set_len(&self, file: &B::File, len: u64) -> Result<bool> {
        self.base.finish_set_len(file, len)
    }

    fn rewrite_nothing(&self, file: &B::File) -> Result<()> {
        self.base.rewrite_nothing(file)
    }

    fn allocate(&self, file: &B::File, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.base.allocate(file, mode, offset, len)
    }

    fn seek(&self, file: &B::File, offset: u64, what: Seek) -> Result<u64> {
        self.base.seek(file, offset, what)
    }

    fn copy_range(
        &self,
        from: &B::File,
        from_offset: u64,
        to: &B::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        self.base.copy_range(from, from_offset, to, to_offset, len)
    }

    fn sync(&self, file: &B::File, data_only: bool) -> Result<()> {
        self.base.sync(file, data_only)
    }

    fn begin_sync(&self, file: &B::File, offset: u64, len: u64) {
        self.base.begin_sync(file, offset, len);
    }

    fn forget_pages(&self, file: &B::File, offset: u64, len: u64) {
        self.base.forget_pages(file, offset, len);
    }

    fn lock_range(&self, file: &B::File, range: LockRange, mode: Option<LockMode>) -> Result<bool> {
        self.base.lock_range(file, range, mode)
    }

    fn is_range_locked(&self, file: &B::File, range: LockRange, mode: LockMode) -> Result<bool> {
        self.base.is_range_locked(file, range, mode)
    }

    fn try_lock(&self, file: &B::File, mode: LockMode) -> Result<bool> {
        self.base.try_lock(file, mode)
    }

    fn fd<'a>(&self, file: &'a B::File) -> Option<BorrowedFd<'a>> {
        self.base.fd(file)
    }

    fn reading_fd(&self, file: &B::File) -> Option<OwnedFd> {
        self.base.reading_fd(file)
    }

    fn locate(
        &self,
        file: &B::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        self.base.locate(file, range, limits)
    }

    fn kernel_reads(&self, file: &B::File) -> KernelReads {
        self.base.kernel_reads(file)
    }

    fn changes_by_others(&self, inode: &PlainInode<B>) -> u64 {
        self.base.changes_by_others(&inode.inode)
    }

    fn note_opened(&self, file: &B::File, writes: bool) -> Result<()> {
        self.base.note_opened(file, writes)
    }

    fn finishes_files(&self) -> bool {
        self.base.finishes_files()
    }

    fn note_written(&self, file: &B::File) {
        self.base.note_written(file);
    }

    fn finish_file(&self, file: &B::File) -> Result<()> {
        self.base.finish_file(file)
    }

    fn is_logged(&self, inode: &PlainInode<B>) -> bool {
        self.base.is_logged(&inode.inode)
    }

    fn lane_count(&self) -> u16 {
        self.base.lane_count()
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        self.base.lane_of_turn(turn)
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &PlainInode<B>,
        name: &OsStr,
        mode: u32,
        placing: Placing<'_, PlainInode<B>>,
    ) -> Result<(PlainInode<B>, B::File, Attr)> {
        parent.check_new_name(name)?;
        let placing = placing.map(|inode| &inode.inode);
        let made = self
            .base
            .create_placed(caller, &parent.inode, name, mode, placing);
        let (inode, file, attr) = made?;
        Ok((PlainInode::below_top(inode), file, attr))
    }

    fn lane_of(&self, inode: &PlainInode<B>) -> LaneIndex {
        self.base.lane_of(&inode.inode)
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

    fn sync_tree(&self, inode: &PlainInode<B>) -> Result<()> {
        self.base.sync_tree(&inode.inode)
    }

    fn sync_way(&self) -> SyncWay {
        self.base.sync_way()
    }
}
