//! Handles of regular files: create, open, read, write, release.
//!
//! A write appends its bytes to the arena (shared memory), and returns when they survive the death of every process. A
//! read returns the newest bytes, from the arena or the backing. An open chooses the [`OpenMode`], which says what
//! serves the reads of the handle: the engine, the kernel's page cache, or the kernel itself (*passthrough*).
//!
//! Invariants
//! * If the kernel reads a file by itself for one handle, it does so for all handles of that inode. The kernel refuses
//!   to open an inode in two modes.
//! * A *grant* is a client process's right to write a file directly to the arena. Each further open, read or write of
//!   the file ends the grant, because only one client may have it.

use std::ffi::OsStr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Access, Attr, Backing, Caller, Errno, FileUse, KernelReads, PlacementHint};

use crate::engine::Engine;
use crate::file::{BackingFile, File, FileId, FileState};
use crate::file_events::FileChange;
use crate::names::Inode;
use crate::privileges::{AnyPrincipal, has_set_id_bits};
use crate::tables::Handle;
use crate::write::WriteStart;
use crate::{ClosePolicy, Entry, HandleId, InodeId, OpenMode, Opened, Principal, Result, Written};

// Flags of open(2), as in Linux. `O_ACCMODE` is the mask of the access mode.
pub(crate) const O_ACCMODE: i32 = 0o3;
const O_RDONLY: i32 = 0o0;
pub(crate) const O_WRONLY: i32 = 0o1;
pub(crate) const O_RDWR: i32 = 0o2;
const O_EXCL: i32 = 0o200;
const O_TRUNC: i32 = 0o1000;

/// Facts that decide the mode of a new handle, besides the state of the file.
struct OpenFacts {
    /// Whether the program may write through the handle.
    wants_write: bool,
    /// Whether the kernel may cache bytes that are read through the handle.
    is_cacheable: bool,
    /// Whether the kernel may read the backing's file by itself.
    allows_passthrough: bool,
    /// Whether the kernel's cached pages of the backing's file are still valid.
    has_current_pages: bool,
    /// Whether the kernel may read memory files by itself. A memory file is a file in memory with all bytes of one
    /// large file.
    kernel_reads_memory_files: bool,
    /// Length of the file, if all of its bytes are in one memory file.
    memory_file_size: Option<u64>,
}

/// State of a file after the release of a handle.
struct ReleasedHandle {
    /// Whether the file has no handle any more.
    is_closed: bool,
    /// Whether the file has neither a handle nor a name.
    is_orphan: bool,
    /// Whether the handle could write, and no other handle can.
    was_last_writer: bool,
}

impl<B: Backing> Engine<B> {
    /// Creates and opens a regular file. An existing file is opened, unless `flags` have `O_EXCL`.
    pub fn create(
        &self,
        caller: &Caller,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> Result<(Entry, Opened)> {
        let dir = self.tree.inode(parent)?;
        self.create_file(&dir, name, flags, || {
            self.base
                .backing
                .create(caller, &self.tree.object(&dir)?, name, mode)
        })
    }

    /// Creates and opens a file as [`Engine::create`] does, but the backing chooses the server of its data by another
    /// name. The caller will rename the file to that name: `final_name` in the directory `final_parent`.
    pub fn create_placed(
        &self,
        caller: &Caller,
        (parent, name): (InodeId, &OsStr),
        mode: u32,
        flags: i32,
        (final_parent, final_name): (InodeId, &OsStr),
    ) -> Result<(Entry, Opened)> {
        let dir = self.tree.inode(parent)?;
        let final_dir = self.tree.inode(final_parent)?;
        self.create_file(&dir, name, flags, || {
            let final_dir_object = self.tree.object(&final_dir)?;
            let placing = PlacementHint::Named {
                parent: &final_dir_object,
                name: final_name,
            };
            let dir_object = self.tree.object(&dir)?;
            self.base
                .backing
                .create_placed(caller, &dir_object, name, mode, placing)
        })
    }

    /// Creates a file with `create`, a call of the backing, and opens it. If the file exists already, it is opened,
    /// unless `flags` have `O_EXCL`. The kernel gets one reference to the inode.
    fn create_file(
        &self,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        flags: i32,
        create: impl FnMut() -> Result<(B::Inode, B::File, Attr)>,
    ) -> Result<(Entry, Opened)> {
        self.open_files.close_excess_files();
        // The count of name changes and the epoch of privileges are read before the create. A change of names or
        // privileges during the create is then noticed below.
        let name_changes_before = self.tree.names.backing_name_changes();
        let privilege_epoch = self.privileges.epoch();
        let (object, backing_file, attr) = match self.open_files.with_descriptor(create) {
            Ok(created) => created,
            Err(Errno::EXIST) if flags & O_EXCL == 0 => {
                return self.open_existing(dir, name, flags);
            }
            Err(errno) => return Err(errno),
        };
        self.base.counters.count_opened();
        // After an error, here or below, the new file remains in the backing, but the program gets no handle.
        self.base
            .backing
            .report_use(&backing_file, FileUse::OpenedToWrite)?;
        let inode =
            self.namespace
                .register_created(name_changes_before, dir, name, object, &attr)?;
        let writer = Arc::new(BackingFile {
            file: backing_file,
            access: Access::ReadWrite,
        });
        let opened = self.add_handle(&inode, flags, |state| {
            state.writer.get_or_insert_with(|| Arc::clone(&writer));
            // A new file has no capabilities. Until the epoch of privileges changes, which happens when any file may
            // get some, a write need not look for privileges to remove.
            if !has_set_id_bits(&attr) {
                state.unprivileged_epoch = privilege_epoch;
            }
            OpenMode::Engine
        });
        let entry = Entry {
            inode: inode.id,
            attr,
        };
        Ok((entry, opened))
    }

    /// Looks up and opens a file that exists already. If the open succeeds, this counts as a look-up of the name: the
    /// kernel gets one reference to the inode.
    fn open_existing(
        &self,
        dir: &Arc<Inode<B>>,
        name: &OsStr,
        flags: i32,
    ) -> Result<(Entry, Opened)> {
        let entry = self.namespace.lookup(dir.id, name)?;
        match self.drop_privileges_and_open(entry.inode, flags) {
            Ok(opened) => Ok((entry, opened)),
            Err(errno) => {
                // The kernel does not get the entry, so the look-up does not count.
                self.namespace.forget(entry.inode, 1);
                Err(errno)
            }
        }
    }

    /// Opens a file as [`Engine::open`] does, after a truncation has removed its privileges if `flags` have `O_TRUNC`.
    fn drop_privileges_and_open(&self, inode_id: InodeId, flags: i32) -> Result<Opened> {
        if flags & O_TRUNC != 0 {
            self.privilege_rules
                .drop_privileges(inode_id, &AnyPrincipal)?;
        }
        self.open(inode_id, flags)
    }

    /// Opens a regular file. `flags` are those of open(2). With `O_TRUNC`, the file is truncated to 0. The caller must
    /// then have removed the set-id bits and capabilities of the file before, by
    /// [`PrivilegeRules::drop_privileges`](crate::PrivilegeRules::drop_privileges).
    pub fn open(&self, inode_id: InodeId, flags: i32) -> Result<Opened> {
        let inode = self.tree.inode(inode_id)?;
        let wants_write = matches!(flags & O_ACCMODE, O_WRONLY | O_RDWR);
        let file = self.open_files.acquire_file(&inode);
        self.open_files.close_excess_files();
        if let Err(errno) = self.prepare_open(&file, wants_write, flags & O_TRUNC != 0) {
            self.open_files.drop_if_unused(&file);
            return Err(errno);
        }
        let facts = self.collect_open_facts(&inode, &file, wants_write);
        let opened = self.add_handle(&inode, flags, |state| {
            self.choose_open_mode(&inode, state, &facts)
        });
        // The file may not be in a memory file yet. If it is large and has no writer, this call queues it for a copy
        // there, which later opens read in place.
        if facts.is_cacheable && facts.memory_file_size.is_none() {
            self.room.queue_for_memory_file(&file);
        }
        Ok(opened)
    }

    /// Opens the backing's file for a new handle, drops cached bytes that are out of date, and truncates the file to 0
    /// if `truncates` is true.
    fn prepare_open(&self, file: &Arc<File<B>>, wants_write: bool, truncates: bool) -> Result<()> {
        self.open_files
            .with_descriptor(|| self.open_backing_file(file, wants_write))?;
        self.room.evict_if_backing_changed(file)?;
        if truncates {
            self.exclusive.truncate_file(file, 0)?;
        }
        Ok(())
    }

    /// Collects the facts that decide the mode of a new handle: what serves its reads. Also records the present state
    /// of the backing's file, which the next open compares.
    fn collect_open_facts(
        &self,
        inode: &Arc<Inode<B>>,
        file: &Arc<File<B>>,
        wants_write: bool,
    ) -> OpenFacts {
        let kernel_reads = self.open_files.kernel_reads(file);
        let allows_passthrough =
            self.kernel_cache.allows_passthrough() && kernel_reads == KernelReads::Passthrough;
        let is_cacheable = !wants_write && !self.base.options.serves_every_read;
        // The stamp is updated for files that other hosts write (shared files) too, although their cached pages never
        // count as current.
        let are_pages_unchanged = is_cacheable
            && !allows_passthrough
            && self.kernel_cache.check_and_update_page_stamp(inode);
        let has_current_pages = are_pages_unchanged && kernel_reads != KernelReads::Shared;
        let memory_file_size = if is_cacheable && kernel_reads == KernelReads::Passthrough {
            self.memory_file_size(file)
        } else {
            None
        };
        OpenFacts {
            wants_write,
            is_cacheable,
            allows_passthrough,
            has_current_pages,
            kernel_reads_memory_files: self.kernel_cache.passes_memory_through(),
            memory_file_size,
        }
    }

    /// Chooses what serves the reads of a new handle: the kernel from a memory file or from the backing (passthrough),
    /// the kernel from its page cache, or the engine. The kernel allows only one mode for all handles of an inode, so
    /// the other handles of the file limit the choice.
    ///
    /// `state` may have changed since the facts were collected.
    fn choose_open_mode(
        &self,
        inode: &Inode<B>,
        state: &mut FileState<B>,
        facts: &OpenFacts,
    ) -> OpenMode {
        let &OpenFacts {
            wants_write,
            is_cacheable,
            allows_passthrough,
            has_current_pages,
            kernel_reads_memory_files,
            memory_file_size,
        } = facts;
        // If the kernel reads a memory file for other handles, it must do so for this one.
        if state.is_passed_through_memory() {
            return OpenMode::Memory;
        }
        // If one memory file has all bytes, it becomes the view of the file, which the kernel reads.
        if kernel_reads_memory_files && self.create_view_for_kernel(state, memory_file_size) {
            return OpenMode::Memory;
        }
        let can_read_and_write = state
            .writer
            .as_ref()
            .is_some_and(|writer| writer.access == Access::ReadWrite);
        let is_only_in_backing =
            state.pending.is_empty() && state.cache.is_empty() && !state.direct.has_grant();
        let needs_no_engine =
            is_only_in_backing && !state.opens.has_through_engine() && !wants_write;
        // While the kernel caches pages of an open file, it refuses passthrough for the inode.
        let is_cached = state.opens.has_cached();
        let can_begin_passthrough =
            allows_passthrough && can_read_and_write && needs_no_engine && !is_cached;
        if state.opens.has_passthrough() || can_begin_passthrough {
            return OpenMode::Passthrough;
        }
        // `keep` says whether pages that the kernel cached at an earlier open are still valid.
        if is_cacheable && is_only_in_backing && (!allows_passthrough || is_cached) {
            return OpenMode::Cached {
                keep: has_current_pages,
            };
        }
        // The kernel may not read memory files itself, but it may cache pages that the engine reads from one.
        if !kernel_reads_memory_files && self.can_keep_pages(state, memory_file_size) {
            let keep = inode.record_memory_file_pages(state.changes);
            return OpenMode::Cached { keep };
        }
        OpenMode::Engine
    }

    /// Lets the kernel read a file of `size` bytes from its memory file. Returns false if the size is not known, the
    /// file has a writer, or not all of its bytes are in one memory file.
    fn create_view_for_kernel(&self, state: &mut FileState<B>, size: Option<u64>) -> bool {
        // The kernel allows only one mode for all handles of an inode.
        let has_other_mode = state.opens.has_through_engine() || state.opens.has_cached();
        match size {
            Some(size) if !has_other_mode => state.create_view(&self.base.arena, size).is_some(),
            _ => false,
        }
    }

    /// Returns the length of a file if all of its bytes are in one memory file.
    fn memory_file_size(&self, file: &Arc<File<B>>) -> Option<u64> {
        if !self.room.settles() {
            return None;
        }
        {
            let state = file.lock();
            let bytes = state.contiguous_bytes();
            if bytes < self.base.options.memory_file_bytes_min {
                return None;
            }
            state.memory_file(&self.base.arena, bytes)?;
        }
        self.intake.size_of(file).ok()
    }

    /// Returns whether the kernel may keep pages of a held file that it cannot read by itself. It may if the file has
    /// no writer and all of its `size` bytes are in a memory file. It may not keep bytes of the backing, because
    /// another host may change them without notice.
    fn can_keep_pages(&self, state: &FileState<B>, size: Option<u64>) -> bool {
        let is_used_otherwise =
            state.opens.has_passthrough() || state.opens.has_writers() || state.direct.has_grant();
        match size {
            Some(size) if !is_used_otherwise => state.memory_file(&self.base.arena, size).is_some(),
            _ => false,
        }
    }

    /// Opens the file in the backing with the access that a new handle needs, so that open(2) returns the error of the
    /// backing. Then makes changes by other hosts visible.
    pub(crate) fn open_backing_file(&self, file: &Arc<File<B>>, wants_write: bool) -> Result<()> {
        if wants_write {
            let writer = self.open_files.writer(file)?;
            return self.read_changes_of_other_hosts(file, &writer.file, FileUse::OpenedToWrite);
        }
        // For passthrough the kernel uses one descriptor for all handles. A later handle may write, so this descriptor
        // must allow writes too.
        let writer = if self.kernel_cache.can_pass_through() {
            // An error is ignored, because a descriptor for reading is enough for this open.
            self.open_files.writer(file).ok()
        } else {
            None
        };
        let backing_file = match writer {
            Some(writer) => writer,
            None => self.open_files.reader(file)?,
        };
        self.read_changes_of_other_hosts(file, &backing_file.file, FileUse::OpenedToRead)
    }

    /// Makes changes visible that other hosts made before their close (close-to-open consistency). The kernel's cached
    /// attributes are dropped, because the length may have changed.
    fn read_changes_of_other_hosts(
        &self,
        file: &File<B>,
        backing_file: &B::File,
        open_kind: FileUse,
    ) -> Result<()> {
        self.base.backing.report_use(backing_file, open_kind)?;
        self.kernel_cache.drop_kernel_attributes(file);
        Ok(())
    }

    /// Adds a handle under a new number; see [`Self::insert_handle`].
    fn add_handle(
        &self,
        inode: &Arc<Inode<B>>,
        flags: i32,
        choose_mode: impl FnOnce(&mut FileState<B>) -> OpenMode,
    ) -> Opened {
        let id = self.open_files.handles.new_id();
        self.insert_handle(id, inode, flags, choose_mode)
    }

    /// Adds a handle under the unused number `id`, and returns the result of the open for the kernel. `choose_mode` is
    /// called under the file's lock and returns what serves the handle's reads.
    pub(crate) fn insert_handle(
        &self,
        id: HandleId,
        inode: &Arc<Inode<B>>,
        flags: i32,
        choose_mode: impl FnOnce(&mut FileState<B>) -> OpenMode,
    ) -> Opened {
        let access = flags & O_ACCMODE;
        let writable = access != O_RDONLY;
        // The closure runs under the lock of the file, and sets these two values.
        let mut chosen_mode = OpenMode::Engine;
        let mut is_first_writer = false;
        let file = self.open_files.acquire_file_with(inode, |state| {
            chosen_mode = choose_mode(state);
            is_first_writer = writable && !state.opens.has_writers();
            self.add_handle_to_state(state, id, chosen_mode, writable);
        });
        if is_first_writer {
            let events = &self.base.file_events;
            events.record(&file.inode, FileChange::Opened);
        }
        // A client process may write a file directly only while its handle is the only one, so its grant ends.
        self.intake.end_grant(&file);
        let size = self.intake.size_for_kernel(&file);
        let readable = access != O_WRONLY;
        let handle = Handle::new(id, file, readable, writable, chosen_mode);
        self.open_files.handles.insert(handle);
        Opened {
            handle: id,
            mode: chosen_mode,
            size,
        }
    }

    /// Adds a new handle to the state of its file. If the handle can write, the bytes of the file may change from now
    /// on. So lists that tell other processes where the bytes lie become invalid, and cached bytes are dropped where
    /// they cannot be kept current.
    fn add_handle_to_state(
        &self,
        state: &mut FileState<B>,
        id: HandleId,
        mode: OpenMode,
        writable: bool,
    ) {
        if let OpenMode::Cached { .. } = mode {
            self.kernel_cache.count_cached_open();
        }
        state.opens.add(id, mode, writable);
        if !writable {
            return;
        }
        if mode == OpenMode::Passthrough {
            // The engine does not see writes that the kernel makes by itself, so the contents count as changed now.
            state.changes += 1;
        }
        state.direct.invalidate_lists(&self.base.arena);
        if !state.can_cache() {
            state.cache.drop_all(&self.base.arena);
        }
        // After a crash, a file that the journal records as open counts as cut (incomplete).
        self.base.journal.update_ending(state);
    }

    /// Removes a handle from the state of its file, and ends the mapping of its process. After the last reader of the
    /// view (a memory file that programs read without requests), the view ends too.
    fn remove_handle_from_state(&self, handle: &Handle<B>, state: &mut FileState<B>) {
        let mode = *handle.mode.lock();
        if handle.has_closed_descriptor.load(Ordering::Acquire) {
            // From the close of a descriptor until its release, a writer counts as closing. So of several writers that
            // close at once, the last one is known.
            state.opens.end_closing();
        }
        state.opens.remove(handle.id, mode, handle.writable);
        handle.remove_mapping(state);
        state.end_view(&self.base.arena);
        self.base.journal.record_released(handle, state);
        match mode {
            OpenMode::Engine | OpenMode::Memory => {}
            OpenMode::Passthrough => {
                // The kernel may have written by itself, so the contents count as changed.
                if handle.writable {
                    state.changes += 1;
                }
            }
            OpenMode::Cached { .. } => self.kernel_cache.count_cached_release(),
        }
    }

    /// Reads the newest bytes at `offset` into `buf`. Returns the number of bytes, which is less than requested only at
    /// the end of the file.
    pub fn read(&self, handle_id: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.open_files.close_excess_files();
        self.open_files
            .with_descriptor(|| self.read_counted(handle_id, offset, buf))
    }

    /// Does the work of [`Self::read`]; its caller limits the number of open descriptors.
    fn read_counted(&self, handle_id: HandleId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let handle = self.open_files.handle(handle_id)?;
        let bytes = self.reads.read_at_one_moment(&handle.file, offset, buf)?;
        self.base
            .counters
            .read_bytes
            .fetch_add(bytes, Ordering::Relaxed);
        Ok(bytes as usize)
    }

    /// Returns the byte at `offset`, which the kernel's cache needs.
    pub fn byte_at(&self, handle_id: HandleId, offset: u64) -> std::result::Result<u8, Errno> {
        let mut byte = [0];
        self.read(handle_id, offset, &mut byte)?;
        Ok(byte[0])
    }

    /// Writes bytes of a program at `offset` into the arena (shared memory). Returns how many were written, or `Full`
    /// if the arena has no room: the caller then waits for room and calls again. The written bytes survive the death of
    /// every process.
    ///
    /// `principal` is the caller of write(2), which removes privileges of the file. `None` for stores to a mapping,
    /// which remove no privileges.
    pub fn write(
        &self,
        handle_id: HandleId,
        offset: u64,
        data: &[u8],
        principal: Option<&dyn Principal>,
    ) -> Result<Written> {
        let handle = self.open_files.handle(handle_id)?;
        let file = &handle.file;
        if !handle.writable {
            return Err(Errno::BADF);
        }
        let end = offset.checked_add(data.len() as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::FBIG);
        }
        if data.is_empty() {
            return Ok(Written::Bytes(0));
        }
        // A client process with a grant must not write the file directly any more.
        self.intake.end_grant(file);
        let known_id = match self.writes.begin_write(file, offset, data, principal)? {
            // The bytes replaced pending ones in place, or went to the backing.
            WriteStart::Done(written_bytes) => {
                self.base.counters.count_ingest(written_bytes as u64);
                return Ok(Written::Bytes(written_bytes));
            }
            WriteStart::Append(known_id) => known_id,
        };
        let appended = self.append_all(&handle, known_id, offset, data);
        self.room.wake_writers();
        let written_bytes = appended?;
        if written_bytes == 0 {
            return Ok(Written::Full);
        }
        self.base.counters.count_ingest(written_bytes as u64);
        Ok(Written::Bytes(written_bytes))
    }

    /// Appends bytes of one write to the arena until all are appended or the arena is full. `known_id` is the file id
    /// (the number of the file in the arena) that [`Writes::begin_write`](crate::Writes) has read. Returns the number
    /// of appended bytes. Fails only if the first bytes cannot be appended: otherwise the write is a short one.
    fn append_all(
        &self,
        handle: &Handle<B>,
        known_id: Option<FileId>,
        offset: u64,
        data: &[u8],
    ) -> Result<usize> {
        let mut written_bytes = 0;
        // A lease is the right to fill one slab, a part of the arena. The lock makes this handle's writes follow each
        // other.
        let mut lease_slot = handle.lease.lock();
        while written_bytes < data.len() {
            let appended = self.writes.append(
                handle,
                &mut lease_slot,
                known_id,
                offset + written_bytes as u64,
                &data[written_bytes..],
            );
            match appended {
                Ok(0) => break,
                Ok(appended_bytes) => written_bytes += appended_bytes,
                Err(error) if written_bytes == 0 => return Err(error),
                Err(_) => break,
            }
        }
        Ok(written_bytes)
    }

    /// Makes the rest of a handle's slab (the part of the arena that it fills) available to the next small file.
    fn park_lease(&self, handle: &Handle<B>) {
        if let Some(lease) = handle.lease.lock().take() {
            self.room.space.parked.park(&self.base.arena, lease);
        }
    }

    /// Ends a handle after its last use. Pending bytes (not in the backing yet) remain pending and are drained. A file
    /// without a name and without another handle is discarded. Does nothing if the handle is unknown.
    pub fn release(&self, handle_id: HandleId) {
        let Some(handle) = self.open_files.handles.remove(handle_id) else {
            return;
        };
        self.park_lease(&handle);
        let file = &handle.file;
        let mut state = file.lock();
        self.intake.revoke_grant(file, &mut state);
        self.remove_handle_from_state(&handle, &mut state);
        let is_closed = state.opens.is_empty();
        let is_orphan = state.unlinked && is_closed;
        let was_last_writer = handle.writable && !state.opens.has_writers();
        // Usually close(2) requests the drain, by a FLUSH request. But when a process is killed, its FLUSH may never
        // reach firnd, so the drain is requested here too.
        if was_last_writer && self.base.options.close == ClosePolicy::Drain && !state.unlinked {
            self.drain.force(file, &mut state);
        }
        // A cut file is incomplete, because a writer of it was killed.
        file.inode.record_cut(state.opens.is_cut());
        // The lock is released, because the next steps call the backing.
        drop(state);
        self.finish_release(
            &handle,
            ReleasedHandle {
                is_closed,
                is_orphan,
                was_last_writer,
            },
        );
        if let Some(live) = self.live() {
            // The next firnd reads the open handles from the live table. This removal comes last: if firnd dies before
            // it, the next firnd releases the handle again.
            live.forget_handle(handle.id.0);
        }
        self.room.wake_writers();
    }

    /// Does the steps of [`Self::release`] that may call the backing, without the lock of the file.
    fn finish_release(&self, handle: &Handle<B>, released: ReleasedHandle) {
        let ReleasedHandle {
            is_closed,
            is_orphan,
            was_last_writer,
        } = released;
        let file = &handle.file;
        if was_last_writer {
            let events = &self.base.file_events;
            events.record(&file.inode, FileChange::Closed);
        }
        self.open_files.remember_cut_inode(&file.inode);
        if handle.writable {
            self.open_files.notify_file_written(file);
        }
        self.open_files.close_if_unused(file);
        if is_orphan {
            self.exclusive.discard(file);
        }
        if is_closed {
            // The keeper (the process that starts the next firnd) may have a descriptor of a file without a name. It
            // needs the descriptor only while the file is open.
            self.open_files.remove_from_keeper(file);
        }
        if was_last_writer {
            // A large file without a writer is copied to a memory file.
            self.room.queue_for_memory_file(file);
        }
        self.open_files.drop_if_unused(file);
    }
}
