//! The calls of [`LogBacking`] as a backing.
//!
//! Each call goes to the backing below, unless the file is logged. A call on a logged file is repeated while the
//! backing lags ([`crate::lag`]).

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use firn_backing::{
    Access, Adopted, AdoptedBy, Attr, AttrChange, Attributes, Backing, Caller, Created, DataPart,
    DescriptorUse, DurabilityLevel, Errno, Facts, Features, FileUse, Files, Freshness, KernelReads,
    LocateLimits, Located, Names, NewKind, PageAdvice, Placement, Placing, Remove, RenameFlags,
    Resize, Result, Seek, SetTime, Sharing, SyncScope, Target, TargetOf, Time, Volume,
    copy_through_memory, forward,
};

use super::{LOCATED_FOR_MIN, LogBacking, LogFile, LogInode, Region};
use crate::frame::{PIECES_MAX, SPAN_BYTES_MAX};
use crate::run::{FILE_BYTES_MAX, Piece};
use crate::tag;

/// Passes a call to the backing below, with that backing's inode or file in place of this one's. [`forward`] uses this
/// macro.
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

    fn lookup(&self, parent: &LogInode<B>, name: &OsStr) -> Result<(LogInode<B>, Attr)> {
        let forget_count = self.forget_count.load(Ordering::Acquire);
        let (inode, attr) = self.below.lookup(&parent.below, name)?;
        let inode = self.make_child_inode(parent, name, inode, &attr)?;
        let logged = self.find(inode.id)?;
        let attr = match logged {
            Some(_) => self.visible_attr(logged.as_ref(), &|| self.below.attr(&inode.below))?,
            // The file became flat after its attributes were read, so they are read again.
            None if self.forget_count.load(Ordering::Acquire) != forget_count => {
                self.below.attr(&inode.below)?
            }
            None => attr,
        };
        Ok((inode, attr))
    }

    fn create_placed(
        &self,
        caller: &Caller,
        parent: &LogInode<B>,
        name: &OsStr,
        mode: u32,
        placing: Placing<'_, LogInode<B>>,
    ) -> Result<Created<Self>> {
        let region = parent.region.of_child(name);
        let is_chosen = match placing {
            Placing::ByName => region != Region::Own && (self.setup.chooses)(name),
            Placing::Named { name, .. } => (self.setup.chooses)(name),
            Placing::Turn(_) | Placing::Beside(_) => false,
        };
        let below = placing.map(|inode| &inode.below);
        let created = self
            .below
            .create_placed(caller, &parent.below, name, mode, below);
        let (inode, below, attr) = created?;
        let inode = self.make_inode(inode, &attr, region, is_chosen)?;
        let logged = self.open_logged(&inode, Access::ReadWrite)?;
        Ok((inode, LogFile { below, logged }, attr))
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
        let removed = self.find_file_losing_name(&parent.below, name)?;
        self.begin_removal(removed.as_ref())?;
        let outcome = self.below.remove(&parent.below, name, what);
        self.finish_removal(removed, outcome)
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
        let removed = if may_replace {
            self.find_file_losing_name(new_parent, new_name)?
        } else {
            None
        };
        // A rename to another name of the same file removes no file.
        let renamed = self
            .below
            .lookup(parent, name)
            .ok()
            .map(|(_, attr)| attr.ino);
        let removed = removed.filter(|(_, id)| Some(id.ino) != renamed);
        self.begin_removal(removed.as_ref())?;
        let outcome = self.below.rename(parent, name, new_parent, new_name, flags);
        self.finish_removal(removed, outcome)
    }

    fn moved_to(&self, inode: &LogInode<B>, parent: &LogInode<B>, name: &OsStr) -> LogInode<B> {
        LogInode {
            below: self.below.moved_to(&inode.below, &parent.below, name),
            region: parent.region.of_child(name),
            ..inode.clone()
        }
    }
}

impl<B: Backing> Attributes for LogBacking<B> {
    fn stat(&self, target: TargetOf<'_, Self>, freshness: Freshness) -> Result<Attr> {
        match target {
            Target::Inode(inode) => {
                let logged = self.find(inode.id)?;
                let below = || self.below.stat(Target::Inode(&inode.below), freshness);
                self.visible_attr(logged.as_ref(), &below)
            }
            Target::File(file) => {
                self.refresh_listing()?;
                let logged = file.logged.as_ref().map(|opened| &opened.file);
                if let Some(file) = logged {
                    self.refresh_file(file);
                }
                let below = || self.below.stat(Target::File(&file.below), freshness);
                self.visible_attr(logged, &below)
            }
        }
    }

    fn set_attr(&self, inode: &LogInode<B>, change: AttrChange<'_>) -> Result<()> {
        let set = || self.below.set_attr(&inode.below, change);
        let new_time = match change {
            AttrChange::SetXattr { name, .. } if tag::is_tag(name) => return Err(Errno::PERM),
            AttrChange::RemoveXattr { name } if tag::is_tag(name) => return Err(Errno::NODATA),
            AttrChange::Times { mtime, .. } => match mtime {
                SetTime::Keep => return set(),
                SetTime::Now => Time::now(),
                SetTime::At(new_time) => new_time,
            },
            AttrChange::Mode(_)
            | AttrChange::Owner { .. }
            | AttrChange::SetXattr { .. }
            | AttrChange::RemoveXattr { .. } => return set(),
        };
        match self.find_and_refresh(inode.id)? {
            Some(file) => {
                file.set_modified(&self.site(), new_time, &set)?;
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

    fn list_xattr(&self, inode: &LogInode<B>) -> Result<Vec<u8>> {
        let mut names = self.below.list_xattr(&inode.below)?;
        if inode.id.is_some() {
            names = tag::without_tag(&names);
        }
        Ok(names)
    }
}

impl<B: Backing> Files for LogBacking<B> {
    forward!(below: lock);

    fn open(&self, inode: &LogInode<B>, access: Access) -> Result<LogFile<B>> {
        let logged = self.open_logged(inode, access)?;
        // The plain file of a logged file is opened for reading even if the program only writes: bytes that lie in the
        // plain file may have to be copied.
        let below_access = match (&logged, access) {
            (Some(_), Access::Write) => Access::ReadWrite,
            (_, access) => access,
        };
        if let Some(opened) = &logged {
            opened.file.check_exists()?;
        }
        let below = self.below.open(&inode.below, below_access)?;
        Ok(LogFile { below, logged })
    }

    fn read_at(&self, file: &LogFile<B>, buf: &mut [u8], offset: u64) -> Result<usize> {
        let opened = file.logged.as_ref();
        if opened.is_some_and(|opened| opened.access == Access::Write) {
            return Err(Errno::BADF);
        }
        if let Some(opened) = opened {
            self.refresh_listing()?;
            self.refresh_file(&opened.file);
        }
        match file.logged() {
            Some(logged) => {
                let site = self.site();
                logged.retry_while_lagging(&site, &mut || {
                    logged.read(&site, &file.below, buf, offset)
                })
            }
            None => {
                if let Some(opened) = opened {
                    opened.file.check_exists()?;
                }
                self.below.read_at(&file.below, buf, offset)
            }
        }
    }

    /// Appends as many of the parts as one frame can describe to this host's log, with one frame. After an error none
    /// of them counts.
    fn write_parts(&self, file: &LogFile<B>, parts: &[DataPart<'_>]) -> Result<u64> {
        let Some(logged) = file.writable(Errno::BADF)? else {
            return self.below.write_parts(&file.below, parts);
        };
        if parts.iter().all(DataPart::is_empty) {
            return Ok(0);
        }
        let parts = take_for_one_frame(parts)?;
        let plain_len = || self.plain_len(file);
        let site = self.site();
        logged.retry_while_lagging(&site, &mut || logged.write(&site, &plain_len, parts))?;
        self.update_mtime(file);
        Ok(parts.iter().map(DataPart::len).sum())
    }

    fn resize(&self, file: &LogFile<B>, resize: Resize) -> Result<bool> {
        let Some(logged) = file.writable(Errno::INVAL)? else {
            return self.below.resize(&file.below, resize);
        };
        let site = self.site();
        match resize {
            Resize::To(len) => {
                let plain_len = || self.plain_len(file);
                logged
                    .retry_while_lagging(&site, &mut || logged.set_len(&site, &plain_len, len))?;
            }
            Resize::AtLeast(len) => {
                let plain_len = || Ok(self.below.attr_of_file(&file.below)?.size);
                logged.grow(&site, &plain_len, len)?;
            }
            // If this host died before it recorded the cut, the cut is not made now: other hosts may have written
            // since.
            Resize::Finish(len) => return logged.was_set_to(&site, len),
            // Nothing has to be done: the plain file gets its length when it is flattened.
            Resize::Unchanged => return Ok(true),
        }
        self.update_mtime(file);
        Ok(true)
    }

    fn allocate(&self, file: &LogFile<B>, mode: i32, offset: u64, len: u64) -> Result<()> {
        let Some(logged) = file.writable(Errno::BADF)? else {
            return self.below.allocate(&file.below, mode, offset, len);
        };
        let site = self.site();
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let end = offset.checked_add(len).ok_or(Errno::FBIG)?;
        if end > FILE_BYTES_MAX {
            return Err(Errno::FBIG);
        }
        let plain_len = || self.plain_len(file);
        let file_bytes = self.attr_of_file(file)?.size;
        let keeps_size = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        match mode & !libc::FALLOC_FL_KEEP_SIZE {
            // A log cannot reserve space, so the call only sets the length.
            0 => {}
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => {
                let zeroed = end.min(file_bytes).saturating_sub(offset);
                if zeroed > 0 {
                    let piece = Piece {
                        offset,
                        len: zeroed,
                    };
                    logged.retry_while_lagging(&site, &mut || {
                        logged.zero(&site, &plain_len, piece)
                    })?;
                }
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        if end > file_bytes && !keeps_size {
            logged.retry_while_lagging(&site, &mut || logged.grow(&site, &plain_len, end))?;
        }
        // The time is set even if no byte changed, as on ext4, xfs and btrfs.
        self.update_mtime(file);
        Ok(())
    }

    fn seek(&self, file: &LogFile<B>, offset: u64, what: Seek) -> Result<u64> {
        match file.logged() {
            None => self.below.seek(&file.below, offset, what),
            Some(logged) => {
                let site = self.site();
                logged.retry_while_lagging(&site, &mut || {
                    let plain_bytes = self.plain_len(file)?;
                    logged.seek(&site, plain_bytes, offset, what)
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
            let site = self.site();
            opened
                .file
                .retry_while_lagging(&site, &mut || opened.file.sync(&site))?;
            if !opened.file.is_logged() {
                self.see_closed_changes(opened)?;
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

    fn adopt(&self, descriptor: OwnedFd) -> Result<AdoptedBy<Self>> {
        let below = self.below.adopt(descriptor)?;
        let inode = self.make_inode(below.inode, &below.attr, Region::Files, false)?;
        let logged = self.open_logged(&inode, below.access)?;
        if let Some(opened) = logged.as_ref().filter(|_| below.attr.nlink == 0) {
            // An earlier process of this host may have ended between the removal of the name and this mark.
            self.note_removed(&opened.file)?;
        }
        Ok(Adopted {
            inode,
            file: LogFile {
                below: below.file,
                logged,
            },
            access: below.access,
            attr: below.attr,
        })
    }
}

impl<B: Backing> Sharing for LogBacking<B> {
    fn kernel_reads(&self, file: &LogFile<B>) -> KernelReads {
        match &file.logged {
            None => self.below.kernel_reads(&file.below),
            Some(opened) if opened.file.is_logged() || opened.file.check_exists().is_err() => {
                KernelReads::Shared
            }
            Some(_) => KernelReads::Cached,
        }
    }

    /// Returns where bytes lie. The result is valid for as long as the listing on which it is based.
    fn locate(
        &self,
        file: &LogFile<B>,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<Located>> {
        let half = self.setup.view_age_max / 2;
        let Some(opened) = &file.logged else {
            return Ok(None);
        };
        if opened.access == Access::Write || half < LOCATED_FOR_MIN {
            return Ok(None);
        }
        self.refresh_listing_older_than(half)?;
        self.refresh_file(&opened.file);
        let listed_at = self.files.lock().listed.ok_or(Errno::IO)?;
        let site = self.site();
        let located = opened.file.locate(&site, &file.below, range, limits)?;
        Ok(Some(Located {
            parts: located.parts,
            files: located.files,
            end: located.end,
            until: listed_at + self.setup.view_age_max,
        }))
    }

    fn note_use(&self, file: &LogFile<B>, what: FileUse) -> Result<()> {
        let Some(opened) = &file.logged else {
            return self.below.note_use(&file.below, what);
        };
        match what {
            FileUse::OpenedToRead => self.see_closed_changes(opened),
            FileUse::OpenedToWrite => {
                self.see_closed_changes(opened)?;
                if let Err(error) = self.begin_writing(file, opened) {
                    // A write reports the error itself; an open that never writes needs no log.
                    tracing::debug!(%error, "cannot begin a log yet");
                }
                Ok(())
            }
            FileUse::Written => {
                opened.file.has_local_writer.store(false, Ordering::Release);
                if opened.file.has_containers() {
                    self.ended.add(&opened.file, &opened.inode);
                }
                Ok(())
            }
            FileUse::Finished => {
                opened.file.has_local_writer.store(false, Ordering::Release);
                self.finish_last_close(opened)
            }
        }
    }

    fn level_max(&self, inode: &LogInode<B>) -> DurabilityLevel {
        match self.find(inode.id) {
            Ok(Some(file)) if file.is_logged() => DurabilityLevel::Logged,
            Ok(_) => DurabilityLevel::Durable,
            // The containers cannot be read, so they may have bytes of the file.
            Err(_) => DurabilityLevel::Logged,
        }
    }
}

impl<B: Backing> Placement for LogBacking<B> {
    forward!(below: lane_of_turn);

    fn facts(&self, inode: &LogInode<B>) -> Facts {
        let below = self.below.facts(&inode.below);
        let Some(id) = inode.id else {
            // The values for a directory apply to its new files, which may be logged.
            return Facts {
                gathers: true,
                changes_by_others: 0,
                ..below
            };
        };
        let file = self.files.lock().by_id.get(&id).cloned();
        let is_written_to_logs = inode.is_chosen || file.is_some();
        let own_lane = || self.below.lane_of_turn(self.site().turn_of(id));
        let lane = is_written_to_logs.then(own_lane).flatten();
        Facts {
            // The lane of this host's log if the file is written to a log, else that of the plain file.
            lane: lane.unwrap_or(below.lane),
            // A log keeps bytes in the order of the writes, so they need not be neighbours in the file.
            gathers: is_written_to_logs,
            changes_by_others: file.map_or(0, |file| file.changes_by_others()),
        }
    }
}

impl<B: Backing> LogBacking<B> {
    /// Returns the length of the plain file, as its server has it.
    pub(super) fn plain_len(&self, file: &LogFile<B>) -> Result<u64> {
        Ok(self.below.attr_of_file_now(&file.below)?.size)
    }
}

/// Returns the first parts, as many as one frame can describe.
fn take_for_one_frame<'a, 'd>(parts: &'a [DataPart<'d>]) -> Result<&'a [DataPart<'d>]> {
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
