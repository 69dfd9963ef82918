//! Open, create, read, release.

use std::ffi::OsStr;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use firn_backing::lock::Mutex;
use firn_backing::{
    Access, Attr, Backing, Caller, DescriptorUse, Errno, FileUse, KernelReads, Placing, Time,
};

use crate::engine::Engine;
use crate::extents::Extents;
use crate::file::{BackingFile, File, FileState};
use crate::kernel_copies::Admission;
use crate::names::{Inode, Stamp};
use crate::privileges::{Anybody, has_set_id_bits};
use crate::tables::Handle;
use crate::{ClosePolicy, Entry, HandleId, InodeId, OpenMode, Opened, Result};

const O_ACCMODE: i32 = 0o3;
const O_WRONLY: i32 = 0o1;
const O_RDWR: i32 = 0o2;
const O_EXCL: i32 = 0o200;
const O_TRUNC: i32 = 0o1000;

/// A file that is cut or written while it is read is read anew so often, and then without being changed meanwhile.
const LOOKS_MAX: usize = 10;

/// What a read has found.
#[derive(Default)]
struct Look {
    bytes: u64,
    /// How the file was before bytes of the backing were read, if any were.
    before: Option<FileChanges>,
    /// The backing had less than it should by what is pending after it.
    has_filled_gap: bool,
}

/// How often a file was changed.
#[derive(Clone, Copy)]
struct FileChanges {
    changes: u64,
    backing_changes: u32,
}

impl<B: Backing> Engine<B> {
    /// Creates and opens a regular file; opens it if it is there and `flags` lack `O_EXCL`.
    pub fn create(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> Result<(Entry, Opened)> {
        let dir = self.inode(parent)?;
        self.create_file(&dir, name, flags, || {
            self.backing.create(caller, &self.object(&dir)?, name, mode)
        })
    }

    /// [`Engine::create`] of a file that is renamed to `later` afterwards: the backing places its data by that name.
    pub fn create_placed(
        &self,
        caller: &Caller,
        (parent, name): (InodeId, &OsStr),
        mode: u32,
        flags: i32,
        later: (InodeId, &OsStr),
    ) -> Result<(Entry, Opened)> {
        let dir = self.inode(parent)?;
        let later_dir = self.inode(later.0)?;
        self.create_file(&dir, name, flags, || {
            let later_dir = self.object(&later_dir)?;
            let placing = Placing::Named {
                parent: &later_dir,
                name: later.1,
            };
            self.backing
                .create_placed(caller, &self.object(&dir)?, name, mode, placing)
        })
    }

    fn create_file(
        &self,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        flags: i32,
        create: impl FnMut() -> Result<(B::Inode, B::File, Attr)>,
    ) -> Result<(Entry, Opened)> {
        self.close_excess_files();
        let before = self.names.changes();
        let privileges = self.privileges.epoch();
        match self.with_descriptor(create) {
            Ok((object, backing_file, attr)) => {
                self.counters.count_opened();
                self.backing
                    .note_use(&backing_file, FileUse::OpenedToWrite)?;
                let inode = self.register_created(before, dir, name, object, &attr)?;
                let opened = Arc::new(BackingFile {
                    file: backing_file,
                    access: Access::ReadWrite,
                });
                let opened = self.add_handle(&inode, flags, |state| {
                    state.writer.get_or_insert_with(|| Arc::clone(&opened));
                    if !has_set_id_bits(&attr) {
                        state.plain_in = privileges;
                    }
                    OpenMode::Engine
                });
                Ok((
                    Entry {
                        inode: inode.id,
                        attr,
                    },
                    opened,
                ))
            }
            Err(Errno::EXIST) if flags & O_EXCL == 0 => {
                let entry = self.lookup(dir.id, name)?;
                let truncates = flags & O_TRUNC != 0;
                let ready = if truncates {
                    self.drop_privileges(entry.inode, &Anybody)
                } else {
                    Ok(())
                };
                match ready.and_then(|()| self.open(entry.inode, flags)) {
                    Ok(opened) => Ok((entry, opened)),
                    Err(errno) => {
                        self.forget(entry.inode, 1);
                        Err(errno)
                    }
                }
            }
            Err(errno) => Err(errno),
        }
    }

    /// Opens a regular file. `flags` are those of open(2); `O_TRUNC` is done here, after [`Engine::drop_privileges`].
    pub fn open(&self, inode: InodeId, flags: i32) -> Result<Opened> {
        let inode = self.inode(inode)?;
        let wants_write = matches!(flags & O_ACCMODE, O_WRONLY | O_RDWR);
        let file = self.file_with(&inode, |_| {});
        self.close_excess_files();
        let opened = self.with_descriptor(|| self.open_backing(&file, wants_write));
        let ready = opened.and_then(|()| self.check_cache(&file));
        let truncated = ready.and_then(|()| {
            if flags & O_TRUNC != 0 {
                self.truncate_file(&file, 0)
            } else {
                Ok(())
            }
        });
        if let Err(errno) = truncated {
            self.drop_if_unused(&file);
            return Err(errno);
        }
        let kernel_reads = self.kernel_reads(&file);
        let allowed = self.allows_passthrough() && kernel_reads == KernelReads::Passthrough;
        let is_cacheable = !wants_write && !self.options.serves_every_read;
        let is_shared = kernel_reads == KernelReads::Shared;
        // In any case it is noted how the file is now.
        let unchanged = is_cacheable && !allowed && self.is_as_cached(&inode) && !is_shared;
        let held_size = if is_cacheable && self.kernel_copies.are_allowed() {
            self.size_if_held(&file)
        } else {
            None
        };
        let mut copy = None;
        let opened = self.add_handle(&inode, flags, |state| {
            // The file may have been dropped and made anew meanwhile; its descriptors come again.
            let both = state
                .writer
                .as_ref()
                .is_some_and(|w| w.access == Access::ReadWrite);
            let in_backing =
                state.pending.is_empty() && state.cache.is_empty() && !state.direct.has_grant();
            let quiet = in_backing && !state.opens.has_through_engine() && !wants_write;
            // While the kernel caches pages for an open file, it refuses to pass the inode through.
            let is_cached = state.opens.has_cached();
            if state.opens.has_passthrough() || (allowed && both && quiet && !is_cached) {
                OpenMode::Passthrough
            } else if is_cacheable && in_backing && (!allowed || is_cached) {
                OpenMode::Cached { keep: unchanged }
            } else {
                copy = held_size.and_then(|size| self.admit_copy(&inode, state, size));
                copy.as_ref().map_or(OpenMode::Engine, |copy| {
                    let keep = copy.is_current;
                    OpenMode::Cached { keep }
                })
            }
        });
        if let Some(copy) = copy {
            self.kernel_copies.drop_pages(&copy.dropped);
        }
        Ok(opened)
    }

    /// The length of a file of which the arena has bytes. The backing is asked once for each contents.
    fn size_if_held(&self, file: &Arc<File<B>>) -> Option<u64> {
        let changes = {
            let state = file.lock();
            if state.pending.is_empty() && state.cache.is_empty() {
                return None;
            }
            state.changes
        };
        let known = self.kernel_copies.size_of(file.inode.id, changes);
        known.or_else(|| self.size_of(file).ok())
    }

    /// Whether the kernel may cache a held file: nobody has it open for writing, and all of its `size` bytes are in the
    /// arena. Of bytes of the backing nobody here learns when another host changes them.
    fn admit_copy(&self, inode: &Inode<B>, state: &FileState<B>, size: u64) -> Option<Admission> {
        let in_arena = state.pending.bytes() + state.cache.bytes();
        if in_arena != size || state.opens.has_writers() || state.direct.has_grant() {
            return None;
        }
        self.kernel_copies.admit(inode.id, size, state.changes)
    }

    /// Whether the backing's file is as it was when the kernel began to cache it. Only what was old then
    /// tells: a change within one tick of the backing's clock leaves the times as they are.
    fn is_as_cached(&self, inode: &Inode<B>) -> bool {
        const SETTLED_S: i64 = 2;
        let Ok(object) = self.object(inode) else {
            return false;
        };
        // Before the attributes, for what comes between the two is news.
        let changes_by_others = self.backing.facts(&object).changes_by_others;
        let Ok(attr) = self.backing.attr(&object) else {
            return false;
        };
        let mut cached = inode.cached.lock();
        let before = cached.as_deref().copied();
        let now = Stamp {
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
            is_settled: attr.mtime.sec.max(attr.ctime.sec) + SETTLED_S < Time::now().sec,
            changes_by_others: changes_by_others.max(before.map_or(0, |it| it.changes_by_others)),
            pages_after: before.map_or(changes_by_others, |it| it.pages_after),
        };
        *cached = Some(Box::new(now));
        now.is_settled && !now.has_stale_pages() && before == Some(now)
    }

    /// To be called when the backing was asked about a file that the kernel may have pages of: it may have learnt of
    /// changes by other hosts.
    pub(crate) fn see_changes_by_others(&self, inode: &Inode<B>, object: &B::Inode) {
        if inode.cached.lock().is_none() {
            return;
        }
        let changes = self.backing.facts(object).changes_by_others;
        if let Some(stamp) = inode.cached.lock().as_mut() {
            stamp.changes_by_others = stamp.changes_by_others.max(changes);
        }
    }

    /// The last change by another host that this one knows of, if the kernel may have pages from before it. Whoever
    /// has it drop them tells [`Engine::note_pages_dropped`].
    pub fn stale_pages(&self, inode: InodeId) -> Option<u64> {
        if !self.backing.features().finishes_files {
            return None;
        }
        let inode = self.inode(inode).ok()?;
        let cached = inode.cached.lock();
        let stale = cached.as_ref().filter(|stamp| stamp.has_stale_pages());
        stale.map(|stamp| stamp.changes_by_others)
    }

    /// Bytes were read from the arena until now, and from here on are where they stand among what other hosts wrote at
    /// the same time, which may lie over them.
    pub(crate) fn note_drained_among_others(&self, file: &File<B>) {
        if self.backing.features().finishes_files
            && self.kernel_reads(file) == KernelReads::Shared
            && let Some(stamp) = file.inode.cached.lock().as_mut()
        {
            stamp.pages_after = 0;
        }
    }

    /// The kernel has no page from before this change.
    pub fn note_pages_dropped(&self, inode: InodeId, change: u64) {
        if let Ok(inode) = self.inode(inode)
            && let Some(stamp) = inode.cached.lock().as_mut()
        {
            stamp.pages_after = stamp.pages_after.max(change);
        }
    }

    /// Whether the handle may write.
    pub fn is_writer(&self, handle: HandleId) -> bool {
        self.handle(handle).is_ok_and(|handle| handle.writable)
    }

    /// Whether the kernel reads this handle through its cache.
    pub fn reads_through_cache(&self, handle: HandleId) -> bool {
        self.handle(handle)
            .is_ok_and(|handle| matches!(*handle.mode.lock(), OpenMode::Cached { .. }))
    }

    /// Whether the kernel caches pages of this handle's file that a write through the handle does not change.
    pub fn has_cached_readers(&self, handle: HandleId) -> bool {
        self.cached_opens.load(Ordering::Acquire) > 0
            && self.handle(handle).is_ok_and(|handle| {
                handle.file.lock().opens.has_cached()
                    && !matches!(*handle.mode.lock(), OpenMode::Cached { .. })
            })
    }

    /// How far the kernel may read a file that is open below.
    pub(crate) fn kernel_reads(&self, file: &File<B>) -> KernelReads {
        let open = file.lock().open_any();
        open.map_or(KernelReads::Passthrough, |open| {
            self.backing.kernel_reads(&open.file)
        })
    }

    /// Opens what a handle needs of the backing, so that open(2) tells what is wrong.
    pub(crate) fn open_backing(&self, file: &Arc<File<B>>, wants_write: bool) -> Result<()> {
        if wants_write {
            let writer = self.writer(file)?;
            return self.see_others(file, &writer.file, true);
        }
        // Passthrough needs one descriptor that can do everything, for writers that come later.
        let writer = match self.passthrough.load(Ordering::Relaxed) {
            true => self.writer(file).ok(),
            false => None,
        };
        let open = writer.map_or_else(|| self.reader(file), Ok)?;
        self.see_others(file, &open.file, false)
    }

    /// Close-to-open: what other hosts have closed is seen, the length included, which the kernel may have kept.
    fn see_others(&self, file: &File<B>, open: &B::File, writes: bool) -> Result<()> {
        let opened = match writes {
            true => FileUse::OpenedToWrite,
            false => FileUse::OpenedToRead,
        };
        self.backing.note_use(open, opened)?;
        self.drop_kernel_attributes(file);
        Ok(())
    }

    /// Where other hosts may write the file: the kernel asks for its attributes again.
    pub(crate) fn drop_kernel_attributes(&self, file: &File<B>) {
        if self.backing.features().finishes_files {
            if let Ok(object) = self.object(&file.inode) {
                self.see_changes_by_others(&file.inode, &object);
                self.end_lists_before_changes(file, &object);
            }
            self.privileges.tell_attributes_changed(file.inode.id);
        }
    }

    fn add_handle(
        &self,
        inode: &Arc<Inode<B>>,
        flags: i32,
        mode: impl FnOnce(&mut FileState<B>) -> OpenMode,
    ) -> Opened {
        let id = self.handles.new_id();
        let writable = flags & O_ACCMODE != 0;
        let mut chosen = OpenMode::Engine;
        let mut has_kernel_copy = false;
        let file = self.file_with(inode, |state| {
            chosen = mode(state);
            let is_held = !state.pending.is_empty() || !state.cache.is_empty();
            has_kernel_copy = is_held && matches!(chosen, OpenMode::Cached { .. });
            if let OpenMode::Cached { .. } = chosen {
                self.cached_opens.fetch_add(1, Ordering::AcqRel);
            }
            state.opens.add(id, chosen, writable);
            if writable {
                // What the kernel writes by itself is not seen here.
                state.changes += u64::from(chosen == OpenMode::Passthrough);
                state.direct.invalidate_list(&self.arena);
                self.journal.update_ending(state);
            }
        });
        // Nobody gets a grant from here on: the file is open twice.
        self.end_grant(&file);
        let size = self.size_for_kernel(&file);
        let access = flags & O_ACCMODE;
        let handle = Handle {
            id,
            file,
            readable: access != O_WRONLY,
            writable,
            lease: Mutex::new(None),
            has_kernel_copy,
            written: AtomicU64::new(0),
            killed: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            opener: AtomicU32::new(0),
            mode: Mutex::new(chosen),
        };
        self.handles.insert(handle);
        Opened {
            handle: id,
            mode: chosen,
            size,
        }
    }

    /// The kernel cannot pass this handle through: it and all later ones come to the engine.
    pub fn no_passthrough(&self, handle: HandleId) {
        self.passthrough.store(false, Ordering::Relaxed);
        let Ok(handle) = self.handle(handle) else {
            return;
        };
        let mut state = handle.file.lock();
        let mut mode = handle.mode.lock();
        if *mode == OpenMode::Passthrough {
            *mode = OpenMode::Engine;
            state
                .opens
                .change_mode(OpenMode::Passthrough, OpenMode::Engine);
        }
    }

    /// The kernel is to serve a handle that comes to the engine from its page cache, and to write through it. False where
    /// it cannot: it passes the inode through.
    pub fn serve_through_cache(&self, handle: HandleId) -> bool {
        let Ok(handle) = self.handle(handle) else {
            return false;
        };
        let mut state = handle.file.lock();
        let mut mode = handle.mode.lock();
        if *mode != OpenMode::Engine || state.opens.has_passthrough() {
            return false;
        }
        let cached = OpenMode::Cached { keep: false };
        state.opens.change_mode(*mode, cached);
        *mode = cached;
        self.cached_opens.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// A duplicate of the backing's descriptor, for kernel passthrough.
    pub fn backing_fd(&self, handle: HandleId) -> Option<OwnedFd> {
        let handle = self.handle(handle).ok()?;
        let writer = self.writer(&handle.file).ok()?;
        self.backing
            .descriptor(&writer.file, DescriptorUse::Passthrough)
    }

    /// Reads pending bytes over backing bytes; less than asked only at the end of the file.
    pub fn read(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.close_excess_files();
        self.with_descriptor(|| self.read_with(handle, offset, buf))
    }

    fn read_with(&self, handle: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let handle = self.handle(handle)?;
        let bytes = self.read_at_one_moment(&handle.file, offset, buf)?;
        self.counters.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes as usize)
    }

    fn read_at_one_moment(&self, file: &Arc<File<B>>, offset: u64, buf: &mut [u8]) -> Result<u64> {
        for _ in 0..LOOKS_MAX {
            let look = self.read_once(file, offset, buf)?;
            if self.is_one_look(file, &look) {
                return Ok(look.bytes);
            }
        }
        // Somebody cuts and writes it faster than it is read.
        let mut state = file.begin_exclusive();
        let look = state.unlocked(|| self.read_once(file, offset, buf));
        file.end_exclusive(&mut state);
        self.drain.enqueue(file, &mut state);
        Ok(look?.bytes)
    }

    /// Whether what was read is the file at some moment. Bytes of the backing are read after it was looked what is pending:
    /// where the file was cut and written again meanwhile, and a part of that was drained, the backing has holes that were
    /// never in the file. Waits for a truncation under way.
    fn is_one_look(&self, file: &Arc<File<B>>, look: &Look) -> bool {
        let Some(before) = look.before else {
            return true;
        };
        let mut state = file.lock();
        self.ingest_published(file, &mut state);
        if state.drain.is_exclusive() && look.has_filled_gap {
            drop(state);
            drop(file.lock_settled());
            return false;
        }
        let is_changed = state.changes != before.changes;
        !is_changed || state.drain.backing_changes() == before.backing_changes
    }

    fn read_once(&self, file: &Arc<File<B>>, offset: u64, buf: &mut [u8]) -> Result<Look> {
        let end = offset.saturating_add(buf.len() as u64).min(i64::MAX as u64);
        let mut look = Look::default();
        if offset >= end {
            return Ok(look);
        }
        let mut state = file.lock();
        self.revoke_grant(file, &mut state);
        let before = FileChanges {
            changes: state.changes,
            backing_changes: state.drain.backing_changes(),
        };
        // Up to here the file exists, whatever the backing's size says.
        let mut known_end = state.pending.end().min(end);
        #[allow(
            clippy::single_range_in_vec_init,
            reason = "a list of gaps that is one gap at first"
        )]
        let mut gaps = vec![offset..end];
        gaps = self.read_extents(state.pending.extents(), gaps, offset, buf)?;
        // What is cached is in the backing too, should the spill file not give it.
        if !state.cache.is_empty()
            && let Ok(left) = self.read_extents(state.cache.extents(), gaps.clone(), offset, buf)
        {
            gaps = left;
        }
        if gaps.last().is_none_or(|gap| gap.end < end) {
            known_end = end;
        }
        let source = state.open_reader();
        drop(state);
        if !gaps.is_empty() {
            look.before = Some(before);
            let source = source.map_or_else(|| self.reader(file), Ok)?;
            for gap in gaps {
                let out = &mut buf[(gap.start - offset) as usize..(gap.end - offset) as usize];
                let n = self.backing.read_at(&source.file, out, gap.start)?;
                out[n..].fill(0);
                let read_end = gap.start + n as u64;
                look.has_filled_gap |= read_end < gap.end.min(known_end);
                known_end = known_end.max(read_end);
            }
        }
        look.bytes = known_end.max(offset).min(end) - offset;
        Ok(look)
    }

    /// Fills the parts of `gaps` that `extents` have; `buf` begins at `offset` of the file. Returns what is
    /// left of the gaps.
    fn read_extents(
        &self,
        extents: &Extents,
        gaps: Vec<Range<u64>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Vec<Range<u64>>> {
        let mut left = Vec::new();
        for gap in gaps {
            let mut at = gap.start;
            for (start, extent) in extents.within(gap.clone()) {
                if start > at {
                    left.push(at..start);
                }
                let out = &mut buf[(start - offset) as usize..][..extent.len as usize];
                self.arena
                    .copy_out(extent.piece.slab, extent.position, out)?;
                at = start + extent.len;
            }
            if at < gap.end {
                left.push(at..gap.end);
            }
        }
        Ok(left)
    }

    /// The last use of a handle is over. What is pending stays and is drained.
    pub fn release(&self, handle: HandleId) {
        let Some(handle) = self.handles.remove(handle) else {
            return;
        };
        if let Some(lease) = handle.lease.lock().take() {
            self.space.parked.park(&self.arena, lease);
        }
        let file = &handle.file;
        let mut state = file.lock();
        self.revoke_grant(file, &mut state);
        let mode = *handle.mode.lock();
        if handle.closing.load(Ordering::Acquire) {
            state.opens.end_closing();
        }
        state.opens.remove(handle.id, mode, handle.writable);
        self.journal.record_released(&handle, &mut state);
        match mode {
            OpenMode::Engine => {}
            OpenMode::Passthrough => state.changes += u64::from(handle.writable),
            OpenMode::Cached { .. } => {
                self.cached_opens.fetch_sub(1, Ordering::AcqRel);
            }
        }
        let orphan = state.unlinked && state.opens.is_empty();
        // The kernel drops the FLUSH of a process that was killed before firnd had read it.
        let is_written = handle.writable && !state.opens.has_writers();
        if is_written && self.options.close == ClosePolicy::Drain && !state.unlinked {
            self.drain.force(file, &mut state);
        }
        drop(state);
        if handle.has_kernel_copy {
            self.kernel_copies.close(file.inode.id);
            self.end_kernel_copy(file);
        }
        if handle.writable {
            self.note_written(file);
        }
        self.close_if_unused(file);
        if orphan {
            self.discard(file);
        }
        self.drop_if_unused(file);
        self.wake_writers();
    }

    /// Tells the backing of a file that nobody writes to any more, if it wants to know.
    pub(crate) fn note_written(&self, file: &File<B>) {
        if !self.backing.features().finishes_files {
            return;
        }
        let writer = {
            let state = file.lock();
            let is_written = !state.opens.has_writers() && state.pending.is_empty();
            state.writer.clone().filter(|_| is_written)
        };
        if let Some(writer) = writer {
            // The call waits for nothing: what it begins fails elsewhere.
            let _ = self.backing.note_use(&writer.file, FileUse::Written);
        }
    }

    /// Closes the backing's file of one that nobody has open: more files may be in memory than a process may have
    /// descriptors. With pending data only where there are many, and only after a descriptor was had by the name
    /// once more: it may be that nobody would get one later (mode 0444).
    pub(crate) fn close_if_unused(&self, file: &File<B>) {
        let pending = {
            let state = file.lock();
            if !state.may_close() {
                return;
            }
            !state.pending.is_empty()
        };
        if pending {
            let many = self.drain.held_files() > self.options.objects_max as u64;
            let opens = || {
                let object = self.object(&file.inode)?;
                self.backing.open(&object, Access::ReadWrite)
            };
            if !many || opens().is_err() {
                return;
            }
        }
        let mut state = file.lock();
        if state.may_close() && (pending || state.pending.is_empty()) {
            let closed = (state.writer.take(), state.reader.take());
            drop(state);
            drop(closed);
        }
    }

    /// Before the mode of a file changes: a drain, or a program that has the file open, may not get its descriptor
    /// afterwards.
    pub(crate) fn open_before_mode_change(&self, file: &File<B>) {
        let writes = {
            let state = file.lock();
            if state.pending.is_empty() && state.opens.is_empty() {
                return;
            }
            !state.pending.is_empty() || state.opens.has_writers()
        };
        // If it is not to be had now, nothing is lost by the change.
        let _ = self.with_descriptor(|| match writes {
            true => self.writer(file).map(drop),
            false => self.reader(file).map(drop),
        });
    }

    /// A file that programs have open lost its last name.
    pub(crate) fn open_nameless(&self, file: &File<B>) {
        let writes = {
            let state = file.lock();
            state.opens.has_writers() || !state.pending.is_empty()
        };
        let kept = self.with_descriptor(|| match writes {
            true => self.writer(file).map(drop),
            false => self.reader(file).map(drop),
        });
        if let Err(errno) = kept {
            // It is held as an object, and opened by that when it is used.
            tracing::debug!(%errno, "a file without a name is not open below");
        }
    }

    /// Drops the pending data of a file that has neither a name nor a handle.
    pub(crate) fn discard(&self, file: &Arc<File<B>>) {
        let mut state = file.begin_exclusive();
        let before = state.pending.bytes();
        let cancelled = state.cut(&self.arena, 0..u64::MAX, u64::MAX);
        self.counters
            .cancelled_bytes
            .fetch_add(cancelled, Ordering::Relaxed);
        state.pending.set_mtime(None);
        self.drain.count_held(file, before, state.pending.bytes());
        let waiters = self.finish_drained(file, &mut state);
        file.end_exclusive(&mut state);
        drop(state);
        for waiter in waiters {
            (waiter.done)(Ok(()));
        }
    }
}
