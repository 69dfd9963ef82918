//! The calls of [`LogBacking`] as a backing.
//!
//! Each call goes to the backing below, unless the file is logged: its newest bytes are in logs, one log for each host.
//! A call on a logged file is repeated while the backing lags ([`crate::lag`]).

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use firn_backing::{
    Access, Adopted, AdoptedBy, Attr, AttrChange, Attributes, Backing, Caller, Created, DataPart,
    DescriptorUse, DurabilityLevel, Errno, Facts, Features, FileUse, Files, Freshness, KernelReads,
    LocateLimits, Located, Names, NewKind, PageAdvice, Placement, PlacementHint, Remove,
    RenameFlags, Resize, Result, Seek, SetTime, Sharing, SyncScope, Target, TargetOf, Time, Volume,
    copy_through_memory, forward,
};

use super::{LOCATED_FOR_MIN, LogBacking, LogFile, LogInode, Region};
use crate::frame::{PIECES_MAX, SPAN_BYTES_MAX};
use crate::run::{FILE_BYTES_MAX, Piece};
use crate::tag;

/// Passes a call to the backing below, with that backing's inode or file in place of this one's.
///
/// [`forward`] uses this macro. For example, `forward!(below: statfs)` defines the function `statfs`, which returns
/// `self.below.statfs()`.
macro_rules! below {
    ($self:ident, |$below:ident| $call:expr) => {{
        let $below = &$self.below;
        $call
    }};
    ($self:ident, dir $dir:ident, |$below:ident| $call:expr) => {{
        let $below = &$self.below;
        $call
    }};
    ($self:ident, $kind:ident $of:ident, |$below:ident| $call:expr) => {{
        let ($below, $of) = (&$self.below, &$of.below);
        $call
    }};
}

impl<B: Backing> Volume for LogBacking<B> {
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

    forward!(below: statfs);

    fn features(&self) -> Features {
        Features {
            finishes_files: true,
            ..self.below.features()
        }
    }

    fn sync_scope(&self, scope: SyncScope<'_, LogInode<B>>) -> Result<()> {
        let scope = match scope {
            SyncScope::Dir(inode) => {
                return self.below.sync_scope(SyncScope::Dir(&inode.below));
            }
            SyncScope::All => SyncScope::All,
            SyncScope::Changes => SyncScope::Changes,
            SyncScope::Tree(inode) => SyncScope::Tree(&inode.below),
        };
        self.sync_logs()?;
        self.below.sync_scope(scope)
    }
}

impl<B: Backing> Names for LogBacking<B> {
    forward!(below: readlink open_dir read_dir);

    /// Returns the object with this name, and its attributes. New bytes of a file may be in logs of hosts, and not in
    /// the plain file (the ordinary file with the name) yet. The length and the time include them.
    ///
    /// Race: between the two look-ups here, another thread may find that all bytes have been copied to the plain file,
    /// and forget the file's logs. The attributes of the plain file are then older than the copy.
    fn lookup(&self, parent: &LogInode<B>, name: &OsStr) -> Result<(LogInode<B>, Attr)> {
        let forget_count_before = self.forget_count.load(Ordering::Acquire);
        let (plain_inode, plain_attr) = self.below.lookup(&parent.below, name)?;
        let inode = self.make_child_inode(parent, name, plain_inode, &plain_attr)?;
        let logged = self.find_known(inode.id)?;
        if logged.is_some() {
            let attr = self.visible_attr(logged.as_ref(), &|| self.below.attr(&inode.below))?;
            return Ok((inode, attr));
        }
        if self.forget_count.load(Ordering::Acquire) != forget_count_before {
            // The logs of some file were forgotten meanwhile, perhaps of this one: read the attributes again.
            let attr = self.below.attr(&inode.below)?;
            return Ok((inode, attr));
        }
        Ok((inode, plain_attr))
    }

    /// Creates a regular file and opens it. If the configuration chooses its name, the new bytes go to logs, one for
    /// each host. All other files are written directly.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
        placing: PlacementHint<'_, LogInode<B>>,
    ) -> Result<Created<Self>> {
        let region = parent.region.child_region(name);
        // The new bytes of a chosen file go to logs.
        let is_chosen = match placing {
            PlacementHint::ByName => self.chooses_name(region, name),
            PlacementHint::Named { name, .. } => (self.setup.chooses)(name),
            PlacementHint::Turn(_) | PlacementHint::Beside(_) => false,
        };
        let plain_placing = placing.map(|inode| &inode.below);
        let (plain_inode, plain_file, attr) =
            self.below
                .create_placed(caller, &parent.below, name, mode, plain_placing)?;
        let inode = self.make_inode(plain_inode, &attr, region, is_chosen)?;
        let file = LogFile {
            below: plain_file,
            logged: self.open_logged(&inode, Access::ReadWrite)?,
        };
        Ok((inode, file, attr))
    }

    fn make(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        kind: NewKind<'_>,
    ) -> Result<(LogInode<B>, Attr)> {
        let (inode, attr) = self.below.make(caller, &parent.below, name, kind)?;
        Ok((self.make_child_inode(parent, name, inode, &attr)?, attr))
    }

    fn link(&self, inode: &LogInode<B>, parent: &LogInode<B>, name: &OsStr) -> Result<Attr> {
        self.below.link(&inode.below, &parent.below, name)?;
        self.attr(inode)
    }

    fn remove(&self, parent: &LogInode<B>, name: &OsStr, what: Remove) -> Result<()> {
        if what == Remove::Dir {
            return self.below.remove(&parent.below, name, what);
        }
        let file_losing_name = self.find_file_losing_name(&parent.below, name)?;
        self.begin_removal(file_losing_name.as_ref())?;
        let outcome = self.below.remove(&parent.below, name, what);
        self.finish_removal(file_losing_name, outcome)
    }

    /// Renames an object. The rename may replace a file and remove its last name. Then the logs of that file are marked
    /// for removal before the rename, and again after it. So they are removed even if this host dies.
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
        // The file at the new name, if this is its last name. Its logs are marked before the removal and after it.
        let mut replaced_file = if may_replace {
            self.find_file_losing_name(new_parent, new_name)?
        } else {
            None
        };
        if let Ok((_, renamed_attr)) = self.below.lookup(parent, name) {
            // A rename to another name of the same file removes no file.
            replaced_file = replaced_file.filter(|replaced| replaced.id.ino != renamed_attr.ino);
        }
        self.begin_removal(replaced_file.as_ref())?;
        let outcome = self.below.rename(parent, name, new_parent, new_name, flags);
        self.finish_removal(replaced_file, outcome)
    }

    fn moved_to(&self, inode: &LogInode<B>, parent: &LogInode<B>, name: &OsStr) -> LogInode<B> {
        LogInode {
            below: self.below.moved_to(&inode.below, &parent.below, name),
            region: parent.region.child_region(name),
            ..inode.clone()
        }
    }
}

impl<B: Backing> Attributes for LogBacking<B> {
    /// Returns the attributes that programs see. The length and the modification time of a file include what is in its
    /// logs, as far as this host has read them. For an open file, the logs of other hosts are read again if that is
    /// due.
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        match target {
            Target::Inode(inode) => {
                let logged = self.find_known(inode.id)?;
                let stat_plain = || self.below.stat(Target::Inode(&inode.below), freshness);
                self.visible_attr(logged.as_ref(), &stat_plain)
            }
            Target::File(file) => {
                // The listing says which files have logs on any host.
                self.refresh_listing()?;
                let logged = file.logged.as_ref().map(|descriptor| &descriptor.file);
                if let Some(logged) = logged {
                    self.refresh_file(logged);
                }
                let stat_plain = || self.below.stat(Target::File(&file.below), freshness);
                self.visible_attr(logged, &stat_plain)
            }
        }
    }

    /// Changes an attribute of the plain file, the ordinary file with the name. A copy of logs into that file sets its
    /// time at the end. So a new time is also recorded beside logs that are just being copied.
    fn set_attr(&self, inode: &LogInode<B>, change: AttrChange<'_>) -> Result<()> {
        let change_plain = || self.below.set_attr(&inode.below, change);
        match change {
            // The tag, an attribute that names the logs of the file, is hidden from programs.
            AttrChange::SetXattr { name, .. } if tag::is_tag(name) => Err(Errno::PERM),
            AttrChange::RemoveXattr { name } if tag::is_tag(name) => Err(Errno::NODATA),
            AttrChange::Times { mtime, .. } => match mtime {
                SetTime::Keep => change_plain(),
                SetTime::Now => self.set_modified(inode, Time::now(), &change_plain),
                SetTime::At(new_time) => self.set_modified(inode, new_time, &change_plain),
            },
            AttrChange::Mode(_)
            | AttrChange::Owner { .. }
            | AttrChange::SetXattr { .. }
            | AttrChange::RemoveXattr { .. } => change_plain(),
        }
    }

    fn get_xattr(&self, inode: &LogInode<B>, name: &OsStr) -> Result<Vec<u8>> {
        if tag::is_tag(name) {
            return Err(Errno::NODATA);
        }
        self.below.get_xattr(&inode.below, name)
    }

    fn list_xattr(&self, inode: &LogInode<B>) -> Result<Vec<u8>> {
        let mut names = self.below.list_xattr(&inode.below)?;
        if inode.id.is_some() {
            // Programs do not see the tag.
            names = tag::without_tag(&names);
        }
        Ok(names)
    }
}

impl<B: Backing> Files for LogBacking<B> {
    forward!(below: lock);

    /// Opens a file: the plain file with the name and, if bytes of the file are in logs or will go there, the state of
    /// these logs.
    fn open(&self, inode: &LogInode<B>, access: Access) -> Result<LogFile<B>> {
        let logged = self.open_logged(inode, access)?;
        // The plain file of a logged file is opened for reading even if the program only writes: bytes that lie in the
        // plain file may have to be copied.
        let plain_access = if logged.is_some() && access == Access::Write {
            Access::ReadWrite
        } else {
            access
        };
        if let Some(descriptor) = &logged {
            descriptor.file.check_exists()?;
        }
        let plain_file = self.below.open(&inode.below, plain_access)?;
        Ok(LogFile {
            below: plain_file,
            logged,
        })
    }

    /// Reads from `offset` until `buf` is full or the file ends, and returns the number of bytes read. Each byte comes
    /// from the newest log that has it, or else from the plain file.
    fn read_at(&self, file: &LogFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        let Some(descriptor) = &file.logged else {
            return self.below.read_at(&file.below, buf, offset);
        };
        if descriptor.access == Access::Write {
            return Err(Errno::BADF);
        }
        let logged = &descriptor.file;
        self.refresh_listing()?;
        self.refresh_file(logged);
        // Without bytes in logs, the plain file has all of them.
        if !logged.is_logged() {
            logged.check_exists()?;
            return self.below.read_at(&file.below, buf, offset);
        }
        let context = self.context();
        logged.retry_while_lagging(&context, &mut || {
            logged.read(&context, &file.below, buf, offset)
        })
    }

    /// Appends as many of the parts as one frame can describe to this host's log, with one frame. After an error none
    /// of them counts.
    fn write_parts(&self, file: &LogFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        let Some(logged) = file.file_to_write(Errno::BADF)? else {
            return self.below.write_parts(&file.below, parts);
        };
        if parts.iter().all(DataPart::is_empty) {
            return Ok(0);
        }
        let parts = parts_for_one_frame(parts)?;
        let plain_len = || self.plain_len(file);
        let context = self.context();
        logged.retry_while_lagging(&context, &mut || logged.write(&context, &plain_len, parts))?;
        self.update_mtime(file);
        Ok(parts.iter().map(DataPart::len).sum())
    }

    /// Changes the length of a file by an entry in the index of this host's log, or directly if the file has no logs.
    ///
    /// For a file in logs, [`Resize::Finish`] only asks about an earlier change that may have been interrupted by the
    /// death of firnd: returns false if that change has not taken effect. In all other cases returns true.
    fn resize(&self, file: &LogFile<B>, resize: Resize) -> Result<bool> {
        let Some(logged) = file.file_to_write(Errno::INVAL)? else {
            return self.below.resize(&file.below, resize);
        };
        let context = self.context();
        match resize {
            Resize::To(len) => {
                let plain_len = || self.plain_len(file);
                logged.retry_while_lagging(&context, &mut || {
                    logged.set_len(&context, &plain_len, len)
                })?;
            }
            Resize::AtLeast(len) => {
                let plain_len = || Ok(self.below.attr_of_file(&file.below)?.size);
                logged.grow(&context, &plain_len, len)?;
            }
            // If this host died before it recorded the cut, the cut is not made now: other hosts may have written
            // since.
            Resize::Finish(len) => return logged.was_set_to(&context, len),
            // Nothing has to be done: the plain file gets its length when it is flattened.
            Resize::Unchanged => return Ok(true),
        }
        self.update_mtime(file);
        Ok(true)
    }

    /// Does what fallocate(2) does. For a file with logs, a range can be zeroed and the file can be made longer, but no
    /// space is reserved.
    fn allocate(&self, file: &LogFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        let Some(logged) = file.file_to_write(Errno::BADF)? else {
            return self.below.allocate(&file.below, mode, offset, len);
        };
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        if end > FILE_BYTES_MAX {
            return Err(Errno::FBIG);
        }
        let context = self.context();
        let plain_len = || self.plain_len(file);
        let file_bytes = self.attr_of_file(file)?.size;
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            // A log cannot reserve space, so the call only sets the length.
            0 => {}
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => {
                let len = end.min(file_bytes).saturating_sub(offset);
                if len > 0 {
                    let zeroed = Piece { offset, len };
                    logged.retry_while_lagging(&context, &mut || {
                        logged.zero(&context, &plain_len, zeroed)
                    })?;
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        if end > file_bytes && !keeps_size {
            logged.retry_while_lagging(&context, &mut || logged.grow(&context, &plain_len, end))?;
        }
        // The time is set even if no byte changed, as on ext4, xfs and btrfs.
        self.update_mtime(file);
        Ok(())
    }

    fn seek(&self, file: &LogFile<B>, offset: u64, what: Seek) -> Result<u64> {
        let Some(logged) = file.file_in_logs() else {
            return self.below.seek(&file.below, offset, what);
        };
        let context = self.context();
        logged.retry_while_lagging(&context, &mut || {
            let plain_bytes = self.plain_len(file)?;
            logged.seek(&context, plain_bytes, offset, what)
        })
    }

    /// Copies bytes between files, and returns their number. The file system copies between plain files; bytes in logs
    /// are read and written here. Fails with EINVAL if the ranges overlap in one file.
    fn copy_range(
        &self,
        from: &LogFile<B>,
        from_offset: u64,
        to: &LogFile<B>,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        // The file system can copy only between plain files.
        if from.file_in_logs().is_none() && to.logged.is_none() {
            let (from, to) = (&from.below, &to.below);
            return self.below.copy_range(from, from_offset, to, to_offset, len);
        }
        let existing_bytes = self.attr_of_file(from)?.size.saturating_sub(from_offset);
        let copied_bytes = len.min(existing_bytes);
        let is_same_file = match (&from.logged, &to.logged) {
            (Some(from), Some(to)) => from.file.id == to.file.id,
            _ => false,
        };
        let ranges_overlap = from_offset.abs_diff(to_offset) < copied_bytes;
        if is_same_file && ranges_overlap {
            return Err(Errno::INVAL);
        }
        copy_through_memory(self, from, from_offset, to, to_offset, copied_bytes)
    }

    fn sync(&self, file: &LogFile<B>, data_only: bool) -> Result<()> {
        if let Some(descriptor) = &file.logged {
            let context = self.context();
            descriptor
                .file
                .retry_while_lagging(&context, &mut || descriptor.file.sync(&context))?;
            if !descriptor.file.is_logged() {
                self.refresh_at_open(descriptor)?;
            }
        }
        self.below.sync(&file.below, data_only)
    }

    fn advise(&self, file: &LogFile<B>, range: Range<u64>, advice: PageAdvice) {
        if file.logged.is_none() || advice == PageAdvice::Forget {
            self.below.advise(&file.below, range, advice);
        }
    }

    /// Returns `None` if the descriptor's reader would miss bytes in logs, now or later.
    fn descriptor(&self, file: &LogFile<B>, purpose: DescriptorUse) -> Option<OwnedFd> {
        match (&file.logged, purpose) {
            (None, _) | (Some(_), DescriptorUse::Keeping) => {
                self.below.descriptor(&file.below, purpose)
            }
            (Some(_), DescriptorUse::Passthrough | DescriptorUse::Reading) => None,
        }
    }

    /// Continues to use a file that an earlier process of this host had open, by its descriptor. The file may have no
    /// name any more.
    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        let plain = self.below.adopt(descriptor)?;
        // Files are chosen by name, and the name is not known here.
        let is_chosen = false;
        let inode = self.make_inode(plain.inode, &plain.attr, Region::Files, is_chosen)?;
        let logged = self.open_logged(&inode, plain.access)?;
        if let Some(logged) = &logged
            && plain.attr.nlink == 0
        {
            // An earlier process of this host may have ended between the removal of the name and this mark.
            self.mark_removed(&logged.file)?;
        }
        Ok(Adopted {
            inode,
            file: LogFile {
                below: plain.file,
                logged,
            },
            access: plain.access,
            attr: plain.attr,
        })
    }
}

impl<B: Backing> Sharing for LogBacking<B> {
    fn kernel_reads(&self, file: &LogFile<B>) -> KernelReads {
        let Some(descriptor) = &file.logged else {
            return self.below.kernel_reads(&file.below);
        };
        let logged = &descriptor.file;
        if logged.is_logged() || logged.check_exists().is_err() {
            KernelReads::Shared
        } else {
            KernelReads::Cached
        }
    }

    /// Returns where bytes lie. The result is valid for as long as the listing of the files with logs on which it is
    /// based. Returns `None` if programs must read through the mount.
    fn locate(
        &self,
        file: &LogFile<B>,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        let Some(descriptor) = &file.logged else {
            return Ok(None);
        };
        // The listing is at most this old, so the result is valid for at least as long.
        let listing_age_max = self.setup.view_age_max / 2;
        if descriptor.access == Access::Write || listing_age_max < LOCATED_FOR_MIN {
            return Ok(None);
        }
        self.refresh_listing_older_than(listing_age_max)?;
        self.refresh_file(&descriptor.file);
        let listed_at = self.files.lock().last_listing_began.ok_or(Errno::IO)?;
        let context = self.context();
        let located = descriptor
            .file
            .locate(&context, &file.below, range, limits)?;
        Ok(Some(Located {
            parts: located.parts,
            files: located.files,
            end: located.end,
            until: listed_at + self.setup.view_age_max,
        }))
    }

    /// Does the work that is due after programs of this host have opened a file, or have closed it. At an open, what
    /// other hosts wrote and closed becomes visible. After the last close of a writer, the logs are copied to the plain
    /// file: soon (`Written`) or before this call returns (`Finished`).
    fn report_use(&self, file: &LogFile<B>, what: FileUse) -> Result<()> {
        let Some(descriptor) = &file.logged else {
            return self.below.report_use(&file.below, what);
        };
        match what {
            FileUse::OpenedToRead => self.refresh_at_open(descriptor),
            FileUse::OpenedToWrite => {
                self.refresh_at_open(descriptor)?;
                if let Err(error) = self.begin_writing(file, descriptor) {
                    // A write reports the error itself; an open that never writes needs no log.
                    tracing::debug!(%error, "cannot begin a log yet");
                }
                Ok(())
            }
            // The logs are copied to the plain file later, by the settling thread.
            FileUse::Written => {
                descriptor.file.clear_local_writer();
                if descriptor.file.has_containers() {
                    self.settle_queue.add(&descriptor.file, &descriptor.inode);
                }
                Ok(())
            }
            // The logs are copied to the plain file now, as far as other hosts allow.
            FileUse::Finished => {
                descriptor.file.clear_local_writer();
                self.finish_last_close(descriptor)
            }
        }
    }

    fn level_max(&self, inode: &LogInode<B>) -> DurabilityLevel {
        match self.find_known(inode.id) {
            Ok(Some(file)) if file.is_logged() => DurabilityLevel::Logged,
            Ok(_) => DurabilityLevel::Durable,
            // The containers cannot be read, so they may have bytes of the file.
            Err(_) => DurabilityLevel::Logged,
        }
    }
}

impl<B: Backing> Placement for LogBacking<B> {
    forward!(below: lane_of_turn);

    /// Returns what is known of an object without a call of the file system: the I/O server of its data, and how often
    /// other hosts have changed it. New bytes of a file with logs go to the server of this host's log.
    fn facts(&self, inode: &LogInode<B>) -> Facts {
        let plain = self.below.facts(&inode.below);
        let Some(id) = inode.id else {
            // The values for a directory apply to its new files, which may be logged. So collected writes may be
            // passed on in one call although they are not neighbours in the file (`gathers`).
            return Facts {
                gathers: true,
                changes_by_others: 0,
                ..plain
            };
        };
        let known_file = self.files.lock().by_id.get(&id).cloned();
        let is_written_to_logs = inode.is_chosen || known_file.is_some();
        let lane_of_own_log = if is_written_to_logs {
            self.below.lane_of_turn(self.context().turn_of(id))
        } else {
            None
        };
        Facts {
            lane: lane_of_own_log.unwrap_or(plain.lane),
            // A log keeps bytes in the order of the writes. So one call can write bytes that are not neighbours in the
            // file.
            gathers: is_written_to_logs,
            changes_by_others: known_file.map_or(0, |file| file.changes_by_others()),
        }
    }
}

impl<B: Backing> LogBacking<B> {
    /// Sets the modification time to `new_time`. `set_plain_time` sets it on the plain file.
    fn set_modified(
        &self,
        inode: &LogInode<B>,
        new_time: Time,
        set_plain_time: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        let Some(file) = self.find_and_refresh(inode.id)? else {
            return set_plain_time();
        };
        file.set_modified(&self.context(), new_time, set_plain_time)?;
        // The next write sets the time again, although the last update may be recent.
        *file.last_mtime_update.lock() = None;
        Ok(())
    }

    /// Returns the length of the plain file, as its server has it.
    pub(super) fn plain_len(&self, file: &LogFile<B>) -> Result<u64> {
        Ok(self.below.attr_of_file_now(&file.below)?.size)
    }
}

/// Returns the first parts, as many as one frame can describe. Fails with EINVAL if the first part alone is too long.
fn parts_for_one_frame<'a, 'd>(parts: &'a [DataPart<'d>]) -> Result<&'a [DataPart<'d>]> {
    let mut bytes = 0;
    let mut count = 0;
    for part in parts.iter().take(PIECES_MAX) {
        bytes += part.len();
        if bytes > SPAN_BYTES_MAX {
            break;
        }
        count += 1;
    }
    if count == 0 {
        return Err(Errno::INVAL);
    }
    Ok(&parts[..count])
}
