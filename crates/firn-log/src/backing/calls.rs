//! The calls of a backing.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use firn_backing::{
    Access, Attr, Backing, Caller, DataPart, DirEntry, Errno, KernelReads, LaneIndex, LocateLimits,
    Located, LockMode, LockRange, Placing, RenameFlags, Result, Seek, SetTime, StatFs, SyncWay,
    Time, copy_through_memory,
};

use super::{LOCATED_FOR_MIN, LogBacking, LogFile, LogInode, Region};
use crate::frame::{PIECES_MAX, SPAN_BYTES_MAX};
use crate::run::{FILE_BYTES_MAX, Piece};
use crate::tag;

#[deny(clippy::missing_trait_methods)]
impl<B: Backing> Backing for LogBacking<B> {
    type Inode = LogInode<B>;
    type File = LogFile<B>;
    type Dir = B::Dir;

    fn root(&self) -> LogInode<B> {
        LogInode {
            below: self.below.root(),
            id: None,
            is_chosen: false,
            region: Region::Top,
        }
    }

    fn lookup(&self, parent: &LogInode<B>, name: &OsStr) -> Result<(LogInode<B>, Attr)> {
        let forgotten = self.forgotten.load(Ordering::Acquire);
        let (inode, attr) = self.below.lookup(&parent.below, name)?;
        let inode = self.child(parent, name, inode, &attr)?;
        let logged = self.find(inode.id)?;
        let attr = match logged {
            Some(_) => self.shown(logged.as_ref(), &|| self.below.attr(&inode.below))?,
            // It was flattened between the two.
            None if self.forgotten.load(Ordering::Acquire) != forgotten => {
                self.below.attr(&inode.below)?
            }
            None => attr,
        };
        Ok((inode, attr))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LogInode<B>, LogFile<B>, Attr)> {
        let (inode, below, attr) = self.below.create(caller, &parent.below, name, mode)?;
        let inode = self.child(parent, name, inode, &attr)?;
        let logged = self.open_logged(&inode, Access::ReadWrite)?;
        let file = LogFile { below, logged };
        Ok((inode, file, attr))
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
        placing: Placing<'_, LogInode<B>>,
    ) -> Result<(LogInode<B>, LogFile<B>, Attr)> {
        let is_chosen = match placing {
            Placing::Named { name, .. } => (self.setup.chooses)(name),
            Placing::Turn(_) | Placing::Beside(_) => false,
        };
        let below = placing.map(|inode| &inode.below);
        let made = self
            .below
            .create_placed(caller, &parent.below, name, mode, below);
        let (inode, below, attr) = made?;
        let region = parent.region.of_child(name);
        let inode = self.inode(inode, &attr, region, is_chosen)?;
        let logged = self.open_logged(&inode, Access::ReadWrite)?;
        Ok((inode, LogFile { below, logged }, attr))
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
    ) -> Result<(LogInode<B>, Attr)> {
        let (inode, attr) = self.below.mkdir(caller, &parent.below, name, mode)?;
        Ok((self.child(parent, name, inode, &attr)?, attr))
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(LogInode<B>, Attr)> {
        let made = self.below.mknod(caller, &parent.below, name, mode, rdev)?;
        Ok((self.child(parent, name, made.0, &made.1)?, made.1))
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(LogInode<B>, Attr)> {
        let (inode, attr) = self.below.symlink(caller, &parent.below, name, target)?;
        Ok((self.child(parent, name, inode, &attr)?, attr))
    }

    fn link(&self, inode: &LogInode<B>, parent: &LogInode<B>, name: &OsStr) -> Result<Attr> {
        self.below.link(&inode.below, &parent.below, name)?;
        self.attr(inode)
    }

    fn unlink(&self, parent: &LogInode<B>, name: &OsStr) -> Result<()> {
        let doomed = self.doomed(&parent.below, name)?;
        self.begin_to_end_names(doomed.as_ref())?;
        let outcome = self.below.unlink(&parent.below, name);
        self.end_names(doomed, outcome)
    }

    fn rmdir(&self, parent: &LogInode<B>, name: &OsStr) -> Result<()> {
        self.below.rmdir(&parent.below, name)
    }

    fn rename(
        &self,
        parent: &LogInode<B>,
        name: &OsStr,
        new_parent: &LogInode<B>,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let (parent, new_parent) = (&parent.below, &new_parent.below);
        let may_replace = !flags.intersects(RenameFlags::NOREPLACE | RenameFlags::EXCHANGE);
        let doomed = match may_replace {
            true => self.doomed(new_parent, new_name)?,
            false => None,
        };
        // A name that is renamed to itself loses nothing.
        let renamed = self
            .below
            .lookup(parent, name)
            .ok()
            .map(|(_, attr)| attr.ino);
        let doomed = doomed.filter(|(_, id)| Some(id.ino) != renamed);
        self.begin_to_end_names(doomed.as_ref())?;
        let outcome = self.below.rename(parent, name, new_parent, new_name, flags);
        self.end_names(doomed, outcome)
    }

    fn moved_to(&self, inode: &LogInode<B>, parent: &LogInode<B>, name: &OsStr) -> LogInode<B> {
        LogInode {
            below: self.below.moved_to(&inode.below, &parent.below, name),
            region: parent.region.of_child(name),
            ..inode.clone()
        }
    }

    fn readlink(&self, inode: &LogInode<B>) -> Result<Vec<u8>> {
        self.below.readlink(&inode.below)
    }

    fn attr(&self, inode: &LogInode<B>) -> Result<Attr> {
        let logged = self.find(inode.id)?;
        self.shown(logged.as_ref(), &|| self.below.attr(&inode.below))
    }

    fn attr_of_file(&self, file: &LogFile<B>) -> Result<Attr> {
        self.look_around()?;
        let logged = file.logged.as_ref().map(|opened| &opened.file);
        self.shown(logged, &|| self.below.attr_of_file(&file.below))
    }

    fn attr_now(&self, inode: &LogInode<B>) -> Result<Attr> {
        let logged = self.find(inode.id)?;
        self.shown(logged.as_ref(), &|| self.below.attr_now(&inode.below))
    }

    fn attr_of_file_now(&self, file: &LogFile<B>) -> Result<Attr> {
        self.look_around()?;
        let logged = file.logged.as_ref().map(|opened| &opened.file);
        self.shown(logged, &|| self.below.attr_of_file_now(&file.below))
    }

    fn set_mode(&self, inode: &LogInode<B>, mode: u32) -> Result<()> {
        self.below.set_mode(&inode.below, mode)
    }

    fn set_owner(&self, inode: &LogInode<B>, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        self.below.set_owner(&inode.below, uid, gid)
    }

    fn set_times(&self, inode: &LogInode<B>, atime: SetTime, mtime: SetTime) -> Result<()> {
        let set = || self.below.set_times(&inode.below, atime, mtime);
        let given = match mtime {
            SetTime::Keep => return set(),
            SetTime::Now => Time::now(),
            SetTime::At(given) => given,
        };
        match self.find_ending(inode.id)? {
            Some(file) => {
                file.set_modified(&self.place(), given, &set)?;
                *file.modified.lock() = None;
                Ok(())
            }
            None => set(),
        }
    }

    fn get_xattr(&self, inode: &LogInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        if tag::is_tag(name) {
            return Err(Errno::NODATA);
        }
        self.below.get_xattr(&inode.below, name)
    }

    fn set_xattr(&self, inode: &LogInode<B>, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        if tag::is_tag(name) {
            return Err(Errno::PERM);
        }
        self.below.set_xattr(&inode.below, name, value, flags)
    }

    fn list_xattr(&self, inode: &LogInode<B>) -> Result<Vec<u8>> {
        let mut names = self.below.list_xattr(&inode.below)?;
        if inode.id.is_some() {
            names = tag::without_tag(&names);
        }
        Ok(names)
    }

    fn remove_xattr(&self, inode: &LogInode<B>, name: &OsStr) -> Result<()> {
        if tag::is_tag(name) {
            return Err(Errno::NODATA);
        }
        self.below.remove_xattr(&inode.below, name)
    }

    fn has_default_acl(&self, inode: &LogInode<B>) -> bool {
        self.below.has_default_acl(&inode.below)
    }

    fn open_dir(&self, inode: &LogInode<B>) -> Result<B::Dir> {
        self.below.open_dir(&inode.below)
    }

    fn read_dir(
        &self,
        dir: &B::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        self.below.read_dir(dir, cookie, sink)
    }

    fn sync_dir(&self, inode: &LogInode<B>) -> Result<()> {
        self.below.sync_dir(&inode.below)
    }

    fn open(&self, inode: &LogInode<B>, access: Access) -> Result<LogFile<B>> {
        // What is below a log is read too: base bytes, and what was flattened.
        let logged = self.open_logged(inode, access)?;
        let below_access = match (&logged, access) {
            (Some(_), Access::Write) => Access::ReadWrite,
            (_, access) => access,
        };
        if let Some(opened) = &logged {
            opened.file.check_lost()?;
        }
        let below = self.below.open(&inode.below, below_access)?;
        Ok(LogFile { below, logged })
    }

    fn read_at(&self, file: &LogFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        let opened = file.logged.as_ref();
        if opened.is_some_and(|opened| opened.access == Access::Write) {
            return Err(Errno::BADF);
        }
        if opened.is_some() {
            self.look_around()?;
        }
        match file.logged() {
            Some(logged) => {
                let place = self.place();
                logged.wait_for(&place, &mut || {
                    logged.read(&place, &file.below, buf, offset)
                })
            }
            None => {
                if let Some(opened) = opened {
                    opened.file.check_lost()?;
                }
                self.below.read_at(&file.below, buf, offset)
            }
        }
    }

    fn write_at(&self, file: &LogFile<B>, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        let part = DataPart { offset, data };
        match file.writable(Errno::BADF)? {
            None => self.below.write_at(&file.below, data, offset),
            Some(_) if part.is_empty() => Ok(0),
            Some(_) => Ok(self.write_parts(file, &[part])? as usize),
        }
    }

    /// One append to the log of this host and one frame, or nothing: all of it, as far as a frame speaks of so much.
    fn write_parts(&self, file: &LogFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        let Some(logged) = file.writable(Errno::BADF)? else {
            return self.below.write_parts(&file.below, parts);
        };
        let parts = first_of_a_frame(parts)?;
        let plain = || Ok(self.below.attr_of_file_now(&file.below)?.size);
        let place = self.place();
        logged.wait_for(&place, &mut || logged.write(&place, &plain, parts))?;
        self.note_modified(file);
        Ok(parts.iter().map(DataPart::len).sum())
    }

    /// Bytes of a log need not be near each other in the file.
    fn gathers(&self, inode: &LogInode<B>) -> bool {
        let Some(id) = inode.id else {
            // A directory: files in it may be logged.
            return true;
        };
        self.is_written_to_logs(inode, id)
    }

    fn set_len(&self, file: &LogFile<B>, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::INVAL)? else {
            return self.below.set_len(&file.below, len);
        };
        let plain = || Ok(self.below.attr_of_file_now(&file.below)?.size);
        let place = self.place();
        logged.wait_for(&place, &mut || logged.set_len(&place, &plain, len))?;
        self.note_modified(file);
        Ok(())
    }

    fn grow(&self, file: &LogFile<B>, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::INVAL)? else {
            return self.below.grow(&file.below, len);
        };
        let plain = || Ok(self.below.attr_of_file(&file.below)?.size);
        logged.grow(&self.place(), &plain, len)?;
        self.note_modified(file);
        Ok(())
    }

    /// What other hosts have written since this one died stays, whatever it was about to cut.
    fn finish_set_len(&self, file: &LogFile<B>, len: u64) -> Result<bool> {
        match file.writable(Errno::INVAL)? {
            Some(logged) => logged.was_set_to(&self.place(), len),
            None => self.below.finish_set_len(&file.below, len),
        }
    }

    /// The plain file is changed when it is flattened.
    fn rewrite_nothing(&self, file: &LogFile<B>) -> Result<()> {
        match file.writable(Errno::INVAL)? {
            Some(_) => Ok(()),
            None => self.below.rewrite_nothing(&file.below),
        }
    }

    fn allocate(&self, file: &LogFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::BADF)? else {
            return self.below.allocate(&file.below, mode, offset, len);
        };
        let place = self.place();
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        if end > FILE_BYTES_MAX {
            return Err(Errno::FBIG);
        }
        let plain = || Ok(self.below.attr_of_file_now(&file.below)?.size);
        let file_bytes = self.attr_of_file(file)?.size;
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            // Room in a log cannot be kept for later: only the length counts.
            0 => {}
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => {
                let zeroed = end.min(file_bytes).saturating_sub(offset);
                if zeroed > 0 {
                    let piece = Piece {
                        offset,
                        len: zeroed,
                    };
                    logged.wait_for(&place, &mut || logged.zero(&place, &plain, piece))?;
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        if end > file_bytes && !keeps_size {
            logged.wait_for(&place, &mut || logged.grow(&place, &plain, end))?;
        }
        // As on ext4, xfs and btrfs: also where every byte stays.
        self.note_modified(file);
        Ok(())
    }

    fn seek(&self, file: &LogFile<B>, offset: u64, what: Seek) -> Result<u64> {
        match file.logged() {
            None => self.below.seek(&file.below, offset, what),
            Some(logged) => {
                let place = self.place();
                logged.wait_for(&place, &mut || {
                    let plain_bytes = self.below.attr_of_file_now(&file.below)?.size;
                    logged.seek(&place, plain_bytes, offset, what)
                })
            }
        }
    }

    fn copy_range(
        &self,
        from: &LogFile<B>,
        from_offset: u64,
        to: &LogFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        if from.logged().is_none() && to.logged.is_none() {
            let (from, to) = (&from.below, &to.below);
            return self.below.copy_range(from, from_offset, to, to_offset, len);
        }
        let id = |file: &LogFile<B>| file.logged.as_ref().map(|opened| opened.file.id);
        let distance = from_offset.abs_diff(to_offset);
        let len = len.min(self.attr_of_file(from)?.size.saturating_sub(from_offset));
        if id(from).is_some() && id(from) == id(to) && distance < len {
            return Err(Errno::INVAL);
        }
        copy_through_memory(self, from, from_offset, to, to_offset, len)
    }

    fn sync(&self, file: &LogFile<B>, data_only: bool) -> Result<()> {
        if let Some(opened) = &file.logged {
            let place = self.place();
            opened
                .file
                .wait_for(&place, &mut || opened.file.sync(&place))?;
            self.see_others(opened)?;
        }
        self.below.sync(&file.below, data_only)
    }

    fn begin_sync(&self, file: &LogFile<B>, offset: u64, len: u64) {
        if file.logged.is_none() {
            self.below.begin_sync(&file.below, offset, len);
        }
    }

    fn forget_pages(&self, file: &LogFile<B>, offset: u64, len: u64) {
        self.below.forget_pages(&file.below, offset, len);
    }

    fn lock_range(
        &self,
        file: &LogFile<B>,
        range: LockRange,
        mode: Option<LockMode>,
    ) -> Result<bool> {
        self.below.lock_range(&file.below, range, mode)
    }

    fn is_range_locked(&self, file: &LogFile<B>, range: LockRange, mode: LockMode) -> Result<bool> {
        self.below.is_range_locked(&file.below, range, mode)
    }

    fn try_lock(&self, file: &LogFile<B>, mode: LockMode) -> Result<bool> {
        self.below.try_lock(&file.below, mode)
    }

    /// None where the kernel would miss what is in logs, now or later.
    fn fd<'a>(&self, file: &'a LogFile<B>) -> Option<BorrowedFd<'a>> {
        match file.logged {
            None => self.below.fd(&file.below),
            Some(_) => None,
        }
    }

    fn reading_fd(&self, file: &LogFile<B>) -> Option<OwnedFd> {
        match file.logged {
            None => self.below.reading_fd(&file.below),
            Some(_) => None,
        }
    }

    /// Right for as long as the listing that it comes from is believed.
    fn locate(
        &self,
        file: &LogFile<B>,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        let half = self.setup.patience / 2;
        let Some(opened) = &file.logged else {
            return Ok(None);
        };
        if opened.access == Access::Write || half < LOCATED_FOR_MIN {
            return Ok(None);
        }
        self.look_around_after(half)?;
        let listed = self.files.lock().listed.ok_or(Errno::IO)?;
        let place = self.place();
        let found = opened.file.locate(&place, &file.below, range, limits)?;
        Ok(Some(Located {
            parts: found.parts,
            files: found.files,
            end: found.end,
            until: listed + self.setup.patience,
        }))
    }

    fn kernel_reads(&self, file: &LogFile<B>) -> KernelReads {
        match &file.logged {
            None => self.below.kernel_reads(&file.below),
            Some(opened) if opened.file.is_logged() || opened.file.check_lost().is_err() => {
                KernelReads::Shared
            }
            Some(_) => KernelReads::Cached,
        }
    }

    fn note_opened(&self, file: &LogFile<B>, writes: bool) -> Result<()> {
        let Some(opened) = &file.logged else {
            return self.below.note_opened(&file.below, writes);
        };
        self.see_others(opened)?;
        if writes && let Err(error) = self.begin_writing(file, opened) {
            // Whoever writes is told, and who does not needs none.
            tracing::debug!(%error, "cannot begin a log yet");
        }
        Ok(())
    }

    fn changes_by_others(&self, inode: &LogInode<B>) -> u64 {
        let file = inode
            .id
            .and_then(|id| self.files.lock().known.get(&id).cloned());
        file.map_or(0, |file| file.changes_by_others())
    }

    fn finishes_files(&self) -> bool {
        true
    }

    fn note_written(&self, file: &LogFile<B>) {
        if let Some(opened) = &file.logged {
            opened.file.is_written.store(false, Ordering::Release);
            if opened.file.has_containers() {
                self.ended.add(&opened.file, &opened.inode);
            }
        }
    }

    fn finish_file(&self, file: &LogFile<B>) -> Result<()> {
        let Some(opened) = &file.logged else {
            return Ok(());
        };
        opened.file.is_written.store(false, Ordering::Release);
        self.finish(opened)
    }

    fn is_logged(&self, inode: &LogInode<B>) -> bool {
        let file = self.find(inode.id).ok().flatten();
        file.is_some_and(|file| file.is_logged())
    }

    fn lane_count(&self) -> u16 {
        self.below.lane_count()
    }

    /// That of this host's log, for a file that is written to one.
    fn lane_of(&self, inode: &LogInode<B>) -> LaneIndex {
        let logged = inode.id.filter(|id| self.is_written_to_logs(inode, *id));
        let lane = logged.and_then(|id| self.below.lane_of_turn(self.place().turn_of(id)));
        lane.unwrap_or_else(|| self.below.lane_of(&inode.below))
    }

    fn lane_of_turn(&self, turn: u64) -> Option<LaneIndex> {
        self.below.lane_of_turn(turn)
    }

    fn statfs(&self) -> Result<StatFs> {
        self.below.statfs()
    }

    fn sync_all(&self) -> Result<()> {
        self.sync_logs()?;
        self.below.sync_all()
    }

    fn sync_changes(&self) -> Result<()> {
        self.sync_logs()?;
        self.below.sync_changes()
    }

    fn sync_tree(&self, inode: &LogInode<B>) -> Result<()> {
        self.sync_logs()?;
        self.below.sync_tree(&inode.below)
    }

    fn sync_way(&self) -> SyncWay {
        self.below.sync_way()
    }
}

/// The first parts, as far as one frame speaks of so much.
fn first_of_a_frame<'a, 'd>(parts: &'a [DataPart<'d>]) -> Result<&'a [DataPart<'d>]> {
    let mut bytes = 0;
    let mut fits = |part: &DataPart<'_>| {
        bytes += part.len();
        bytes <= SPAN_BYTES_MAX
    };
    let count = parts
        .iter()
        .take(PIECES_MAX)
        .take_while(|part| fits(part))
        .count();
    match count {
        0 => Err(Errno::INVAL),
        count => Ok(&parts[..count]),
    }
}
