//! [`TransactionalBacking`] as a backing: each call on objects and files that may be in a transaction.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, DirEntry, Errno, KernelReads, LaneIndex, LocateLimits,
    Located, LockMode, LockRange, Placing, RenameFlags, Result, Seek, SetTime, StatFs, SyncWay,
};

use crate::data::TrackedFile;
use crate::listing::TrackedDir;
use crate::object::Object;
use crate::transactional::TransactionalBacking;

#[deny(clippy::missing_trait_methods)]
impl<B: Backing> Backing for TransactionalBacking<B> {
    type Inode = Arc<Object<B>>;
    type File = TrackedFile<B>;
    type Dir = TrackedDir<B>;

    fn root(&self) -> Arc<Object<B>> {
        Arc::clone(self.top())
    }

    fn lookup(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Result<(Arc<Object<B>>, Attr)> {
        self.look_up(parent, name)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Arc<Object<B>>, TrackedFile<B>, Attr)> {
        let (object, attr) = self.make_object(parent, name, |new| {
            let made = self
                .base
                .create_placed(caller, new.dir, new.name, mode, new.placing);
            let (inode, _, attr) = made?;
            Ok((inode, attr))
        })?;
        let file = TrackedFile::new(&object, Access::ReadWrite);
        Ok((object, file, attr))
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        self.make_object(parent, name, |new| {
            self.base.mkdir(caller, new.dir, new.name, mode)
        })
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        self.make_object(parent, name, |new| {
            self.base.mknod(caller, new.dir, new.name, mode, rdev)
        })
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Arc<Object<B>>, Attr)> {
        self.make_object(parent, name, |new| {
            self.base.symlink(caller, new.dir, new.name, target)
        })
    }

    fn link(&self, object: &Arc<Object<B>>, parent: &Arc<Object<B>>, name: &OsStr) -> Result<Attr> {
        self.add_link(object, parent, name)
    }

    fn unlink(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Result<()> {
        self.remove_name(parent, name, false)
    }

    fn rmdir(&self, parent: &Arc<Object<B>>, name: &OsStr) -> Result<()> {
        self.remove_name(parent, name, true)
    }

    fn rename(
        &self,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        new_parent: &Arc<Object<B>>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        self.move_name((parent, name), (new_parent, new_name), flags)
    }

    fn moved_to(
        &self,
        object: &Arc<Object<B>>,
        _parent: &Arc<Object<B>>,
        _name: &OsStr,
    ) -> Arc<Object<B>> {
        Arc::clone(object)
    }

    fn readlink(&self, object: &Arc<Object<B>>) -> Result<Vec<u8>> {
        self.base.readlink(&object.inode(&self.base)?)
    }

    fn attr(&self, object: &Arc<Object<B>>) -> Result<Attr> {
        self.read_attr(object)
    }

    fn attr_of_file(&self, file: &TrackedFile<B>) -> Result<Attr> {
        self.read_attr(&file.object)
    }

    fn attr_now(&self, object: &Arc<Object<B>>) -> Result<Attr> {
        if let Some(inode) = self.unchanged(object) {
            self.base.attr_now(&inode)?;
        }
        self.read_attr(object)
    }

    fn attr_of_file_now(&self, file: &TrackedFile<B>) -> Result<Attr> {
        self.attr_now(&file.object)
    }

    fn set_mode(&self, object: &Arc<Object<B>>, mode: u32) -> Result<()> {
        self.change_attributes(object, |inode| self.base.set_mode(inode, mode))
    }

    fn set_owner(&self, object: &Arc<Object<B>>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.change_attributes(object, |inode| self.base.set_owner(inode, uid, gid))
    }

    fn set_times(&self, object: &Arc<Object<B>>, atime: SetTime, mtime: SetTime) -> Result<()> {
        if (atime, mtime) == (SetTime::Keep, SetTime::Keep) {
            return Ok(());
        }
        self.set_times_of(object, atime, mtime)
    }

    fn get_xattr(&self, object: &Arc<Object<B>>, name: &OsStr) -> Result<Vec<u8>> {
        self.base.get_xattr(&object.inode(&self.base)?, name)
    }

    fn set_xattr(
        &self,
        object: &Arc<Object<B>>,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> Result<()> {
        self.change_attributes(object, |inode| {
            self.base.set_xattr(inode, name, value, flags)
        })
    }

    fn list_xattr(&self, object: &Arc<Object<B>>) -> Result<Vec<u8>> {
        self.base.list_xattr(&object.inode(&self.base)?)
    }

    fn remove_xattr(&self, object: &Arc<Object<B>>, name: &OsStr) -> Result<()> {
        self.change_attributes(object, |inode| self.base.remove_xattr(inode, name))
    }

    fn has_default_acl(&self, object: &Arc<Object<B>>) -> bool {
        let inode = object.inode(&self.base);
        inode.is_ok_and(|inode| self.base.has_default_acl(&inode))
    }

    fn open_dir(&self, object: &Arc<Object<B>>) -> Result<TrackedDir<B>> {
        self.open_tracked_dir(object)
    }

    fn read_dir(
        &self,
        dir: &TrackedDir<B>,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        self.read_tracked_dir(dir, cookie, sink)
    }

    fn sync_dir(&self, object: &Arc<Object<B>>) -> Result<()> {
        self.sync_tracked_dir(object)
    }

    fn open(&self, object: &Arc<Object<B>>, access: Access) -> Result<TrackedFile<B>> {
        self.open_tracked(object, access)
    }

    fn read_at(&self, file: &TrackedFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        self.read_tracked(file, buf, offset)
    }

    fn write_at(&self, file: &TrackedFile<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        self.write_tracked(file, data, offset)
    }

    fn write_parts(&self, file: &TrackedFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        self.write_parts_tracked(file, parts)
    }

    fn gathers(&self, object: &Arc<Object<B>>) -> bool {
        let inode = self.unchanged(object);
        inode.is_some_and(|inode| self.base.gathers(&inode))
    }

    fn set_len(&self, file: &TrackedFile<B>, len: u64) -> Result<()> {
        self.set_len_tracked(file, len)
    }

    fn grow(&self, file: &TrackedFile<B>, len: u64) -> Result<()> {
        match self.outside_transactions(file, len, |below| self.base.grow(below, len))? {
            Some(()) => Ok(()),
            None if self.read_attr(&file.object)?.size < len => self.set_len_tracked(file, len),
            None => Ok(()),
        }
    }

    fn finish_set_len(&self, file: &TrackedFile<B>, len: u64) -> Result<bool> {
        let finish = |below: &B::File| self.base.finish_set_len(below, len);
        match self.outside_transactions(file, len, finish)? {
            Some(is_done) => Ok(is_done),
            None => self.set_len_tracked(file, len).map(|()| true),
        }
    }

    fn rewrite_nothing(&self, file: &TrackedFile<B>) -> Result<()> {
        let rewrite = |below: &B::File| self.base.rewrite_nothing(below);
        let len = self.read_attr(&file.object)?.size;
        match self.outside_transactions(file, len, rewrite)? {
            Some(()) => Ok(()),
            None => self.set_len_tracked(file, len),
        }
    }

    fn allocate(&self, file: &TrackedFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.allocate_tracked(file, mode, offset, len)
    }

    fn seek(&self, file: &TrackedFile<B>, offset: u64, what: Seek) -> Result<u64> {
        self.seek_tracked(file, offset, what)
    }

    fn copy_range(
        &self,
        from: &TrackedFile<B>,
        from_offset: u64,
        to: &TrackedFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        self.copy_tracked((from, from_offset), (to, to_offset), len)
    }

    fn sync(&self, file: &TrackedFile<B>, data_only: bool) -> Result<()> {
        self.sync_tracked(file, data_only)
    }

    fn begin_sync(&self, file: &TrackedFile<B>, offset: u64, len: u64) {
        let _ = self.ask_below(file, |below| self.base.begin_sync(below, offset, len));
    }

    fn forget_pages(&self, file: &TrackedFile<B>, offset: u64, len: u64) {
        let _ = self.ask_below(file, |below| self.base.forget_pages(below, offset, len));
    }

    /// Hosts meet in the backing below.
    fn try_lock(&self, _file: &TrackedFile<B>, _mode: LockMode) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }

    fn lock_range(
        &self,
        _file: &TrackedFile<B>,
        _range: LockRange,
        _mode: Option<LockMode>,
    ) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }

    fn is_range_locked(
        &self,
        _file: &TrackedFile<B>,
        _range: LockRange,
        _mode: LockMode,
    ) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }

    /// None: the kernel would go on reading the descriptor after a change in a transaction.
    fn fd<'a>(&self, _file: &'a TrackedFile<B>) -> Option<BorrowedFd<'a>> {
        None
    }

    /// None: what a process reads by itself would stay as it was before a transaction.
    fn reading_fd(&self, _file: &TrackedFile<B>) -> Option<OwnedFd> {
        None
    }

    fn locate(
        &self,
        _file: &TrackedFile<B>,
        _range: Range<u64>,
        _limits: LocateLimits,
    ) -> Result<Option<Located>> {
        Ok(None)
    }

    fn kernel_reads(&self, file: &TrackedFile<B>) -> KernelReads {
        let asked = self.ask_shared(file, |below| self.base.kernel_reads(below));
        asked.unwrap_or(KernelReads::Cached)
    }

    fn note_opened(&self, file: &TrackedFile<B>, writes: bool) -> Result<()> {
        let opened = self.ask_shared(file, |below| self.base.note_opened(below, writes));
        opened.unwrap_or(Ok(()))
    }

    fn changes_by_others(&self, object: &Arc<Object<B>>) -> u64 {
        let inode = self.unchanged(object);
        inode.map_or(0, |inode| self.base.changes_by_others(&inode))
    }

    fn finishes_files(&self) -> bool {
        self.base.finishes_files()
    }

    fn note_written(&self, file: &TrackedFile<B>) {
        let _ = self.ask_shared(file, |below| self.base.note_written(below));
    }

    fn finish_file(&self, file: &TrackedFile<B>) -> Result<()> {
        let finished = self.ask_shared(file, |below| self.base.finish_file(below));
        finished.unwrap_or(Ok(()))
    }

    fn is_logged(&self, object: &Arc<Object<B>>) -> bool {
        let inode = self.unchanged(object);
        inode.is_some_and(|inode| self.base.is_logged(&inode))
    }

    fn lane_count(&self) -> u16 {
        self.base.lane_count()
    }

    fn lane_of(&self, inode: &Arc<Object<B>>) -> LaneIndex {
        inode.lane
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        self.base.lane_of_turn(turn)
    }

    /// What lies over transactions gives no file another place than that of its name.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Arc<Object<B>>,
        name: &OsStr,
        mode: u32,
        _placing: Placing<'_, Arc<Object<B>>>,
    ) -> Result<(Arc<Object<B>>, TrackedFile<B>, Attr)> {
        self.create(caller, parent, name, mode)
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

    fn sync_tree(&self, object: &Arc<Object<B>>) -> Result<()> {
        // Staged objects are elsewhere and were made by this process.
        self.base.sync_changes()?;
        let base = object.base();
        base.map_or(Ok(()), |inode| self.base.sync_tree(&inode))
    }

    fn sync_way(&self) -> SyncWay {
        self.base.sync_way()
    }
}
