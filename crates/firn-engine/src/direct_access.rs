//! Direct access: a client process writes bytes of a file into the shared memory (the *arena*) itself, or reads the
//! file's bytes where they lie there.
//!
//! Terms
//! * A *grant* is a client's right to write one open file directly. It ends when it is *revoked*.
//! * A *slab* is a part of the arena. A *lease* is the client's right to fill one slab.
//! * A *piece* is one recorded append of bytes. A client *publishes* it by its record in the slab; the engine then
//!   *ingests* it, so that it counts as pending data of the file.
//! * A *list* tells a reader where the bytes of a file lie. Its *stamp* is the value of the file's *version counter* in
//!   the arena. The engine raises the counter to make all lists of the file invalid.
//!
//! A direct write: the client gets the grant and a lease, stores bytes and a record in its slab, and sends nothing. The
//! engine reads the record when it next needs the file.
//!
//! Promises
//! * Each answer about a file covers every byte whose write has returned: pieces that the client has published are
//!   ingested before the answer ([`Intake::ingest_published`]).
//! * While a client has the grant of a file, no other handle of the file is open. Any other open, read, write or
//!   truncation revokes the grant first ([`Intake::revoke_grant`]); afterwards the client writes through the kernel.
//! * A piece that may still grow is neither drained nor marked dead.
//!
//! Order of writes: each record has a *sequence* number, which its lease has reserved. These numbers are in the order
//! of the writes: during a grant only the client writes the file, and it fills its leases one after the other.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use firn_backing::{Backing, LocateLimits, Located, LocatedPart};
use firn_format::data_socket::{
    EXTENTS_MAX, Extent as ListedExtent, FILES_MAX, IN_BACKING, IN_MEMORY_FILE, LEASE_SLABS_MAX,
    Slab, TO_BE_ASKED,
};
use firn_format::geometry::WORDS_COUNT;
use firn_format::slab::Class;

use crate::base::Base;
use crate::drain::Drain;
use crate::file::{BackingFile, File, FileId, FileState, Grant};
use crate::intake::Intake;
use crate::open_files::OpenFiles;
use crate::options::DrainPolicy;
use crate::privileges::{Privileges, has_set_id_bits};
use crate::size::whole_size;
use crate::space::Room;
use crate::tables::Handle;
use crate::tree::NameTree;
use crate::{
    ClientId, DirectGrant, DirectList, DirectRefusal, DirectWriteObserver, HandleId, OpenMode,
    Result, SlabRequest,
};

/// Number of leases that remain when the client asks for more: it may still be filling the last one.
const LEASES_KEPT_MAX: usize = 1;

/// Maximum number of attempts to make a list. A change of the file makes an attempt fail.
const LIST_ATTEMPTS_MAX: usize = 4;

/// Result of a client's request, or the reason why the request is refused.
type DirectResult<T> = std::result::Result<T, DirectRefusal>;

/// Places of bytes in the backing, from [`DirectAccess::locate_in_backing`].
struct LocatedInBacking<B: Backing> {
    located: Located,
    /// The object of the file.
    object: B::Inode,
    /// Value of [`Facts::changes_by_others`](firn_backing::Facts) for which the places are valid.
    changes_by_others: u64,
}

/// A grant that was just created.
struct CreatedGrant {
    file_id: FileId,
    /// File offset after the last pending byte.
    pending_end: u64,
}

/// A list that is being made.
struct PartialList {
    extents: Vec<ListedExtent>,
    /// File offset up to which the list is complete.
    end: u64,
    /// Descriptors of the files that extents name by index.
    files: Vec<OwnedFd>,
}

impl PartialList {
    /// Adds the places of bytes that only the backing has.
    fn add_backing_parts(&mut self, mut located: Located) {
        for part in &mut located.parts {
            part.file = part.file.map(|index| index + self.files.len());
        }
        self.end = self.end.min(located.end);
        self.extents.retain(|extent| extent.offset < self.end);
        self.extents = merge_by_offset(&self.extents, &located.parts);
        if let Some(first_left_out) = self.extents.get(EXTENTS_MAX) {
            self.end = first_left_out.offset;
            self.extents.truncate(EXTENTS_MAX);
        }
        self.files.extend(located.files);
    }
}

/// Returns whether a reader may get a list of the places of a file's bytes. Each change of the bytes must make the list
/// invalid, so a file with a writer, a grant or an exclusive use has no list.
fn allows_lists<B: Backing>(state: &FileState<B>) -> bool {
    !state.opens.has_writers()
        && !state.opens.has_passthrough()
        && !state.drain.is_exclusive()
        && !state.direct.has_grant()
}

/// Merges two lists of places, both in the order of the file offsets: the `extents` of the arena, and the `parts` that
/// lie in the backing. Where both have bytes, the arena's bytes are newer and are used.
///
/// Example: extent 4..6 and part 0..10 give part 0..4, extent 4..6, part 6..10.
fn merge_by_offset(extents: &[ListedExtent], parts: &[LocatedPart]) -> Vec<ListedExtent> {
    let mut merged = Vec::with_capacity(extents.len() + parts.len());
    let mut extents_left = extents.iter().peekable();
    for part in parts {
        let part_end = part.offset + part.len;
        let mut offset = part.offset;
        // Each round adds the part's bytes up to the next extent, and then the extent.
        while offset < part_end {
            let next_extent = extents_left
                .peek()
                .copied()
                .filter(|extent| extent.offset < part_end);
            // The extent may have begun before `offset`, in an earlier part.
            let gap_end = next_extent.map_or(part_end, |extent| extent.offset.max(offset));
            if gap_end > offset {
                merged.push(list_backing_part(part, offset..gap_end));
            }
            let Some(extent) = next_extent else { break };
            let extent_end = extent.offset + extent.len;
            if extent_end > part_end {
                // The extent may also cover bytes of the next part, so it remains the next extent.
                break;
            }
            // The extent may lie before this part as a whole. The offset never goes back.
            offset = extent_end.max(gap_end);
            merged.push(*extent);
            extents_left.next();
        }
    }
    merged.extend(extents_left);
    merged
}

/// Returns the list entry for the bytes of `range`, which is inside `part`.
fn list_backing_part(part: &LocatedPart, range: Range<u64>) -> ListedExtent {
    ListedExtent {
        offset: range.start,
        len: range.end - range.start,
        at: part.position + (range.start - part.offset),
        chunk: part.file.unwrap_or(0) as u32,
        place: part.file.map_or(TO_BE_ASKED, |_| IN_BACKING),
    }
}

/// Issues grants, leases and lists to client processes.
pub struct DirectAccess<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Knows whether files may have set-id bits or capabilities.
    pub(crate) privileges: Arc<Privileges>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// Makes space in the arena.
    pub(crate) room: Arc<Room<B>>,
}

impl<B: Backing> DirectAccess<B> {
    pub(crate) fn new(room: &Arc<Room<B>>, privileges: &Arc<Privileges>) -> Self {
        Self {
            base: Arc::clone(&room.base),
            tree: Arc::clone(&room.tree),
            privileges: Arc::clone(privileges),
            drain: Arc::clone(&room.drain),
            intake: Arc::clone(&room.intake),
            open_files: Arc::clone(&room.open_files),
            room: Arc::clone(room),
        }
    }

    /// Grants `client`, a process that uses the arena (shared memory) itself, the right to write the open file
    /// directly. From now on the kernel must not cache the file's attributes. Before the client gets the answer, the
    /// caller must make the kernel drop the attributes that it has cached.
    ///
    /// Fails with `BadToken` if the handle is not open for writing. Fails with `Busy` if the client must write through
    /// the kernel: the file has another handle, set-id bits, capabilities or no name, or a drain of it failed.
    pub fn grant_direct_access(
        &self,
        client: ClientId,
        handle_id: HandleId,
    ) -> DirectResult<DirectGrant> {
        let handle = self.writable_handle(handle_id)?;
        let file = &handle.file;
        let epoch_before = self.privileges.epoch();
        if self.must_write_through_kernel(&handle) {
            return Err(DirectRefusal::Busy);
        }
        let create_grant = || self.create_grant(client, &handle);
        // The journal may get a record with the file's paths, so no path changes meanwhile.
        let granted = self
            .tree
            .claims
            .with_unchanged_paths(|| file.inode.paths(), create_grant)?;
        // From here on only the client changes the file. Its length is the larger of two: the length in the backing,
        // and the end of the pending bytes. A drain before the next call does not change that.
        let attr = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object));
        // The epoch is raised when any file may get privileges. A change before the grant was made did not end the
        // grant, so the epochs are compared.
        let have_privileges_changed = self.privileges.epoch() != epoch_before;
        match attr {
            Ok(attr) if !has_set_id_bits(&attr) && !have_privileges_changed => Ok(DirectGrant {
                file_id: granted.file_id,
                size: whole_size(&attr, granted.pending_end),
                inode: file.inode.id,
            }),
            _ => {
                self.end_direct_access(client, handle_id);
                Err(DirectRefusal::Busy)
            }
        }
    }

    /// Returns whether the writes of a handle must go through the kernel, because of the file's capabilities or names,
    /// or because the kernel serves the handle. An error of the backing counts as a reason too.
    fn must_write_through_kernel(&self, handle: &Handle<B>) -> bool {
        let file = &handle.file;
        // A write must remove capabilities, which only a write through the kernel does.
        let has_capabilities = || {
            let object = self.tree.object(&file.inode);
            object.map_or(true, |object| self.tree.has_capabilities(&object))
        };
        // Recovery could not find the file by a name.
        let has_no_name = || self.tree.has_no_known_name(file).unwrap_or(true);
        has_capabilities() || has_no_name() || *handle.mode.lock() != OpenMode::Engine
    }

    /// Creates the grant: the right of `client` to write the file into the arena itself. The caller prevents renames of
    /// the file's paths. Fails with `Busy` if another process uses the file, a drain of it failed, the file has no
    /// name, or the journal is full.
    fn create_grant(&self, client: ClientId, handle: &Handle<B>) -> DirectResult<CreatedGrant> {
        let file = &handle.file;
        let mut state = file.lock();
        let has_other_client = state
            .direct
            .grant()
            .is_some_and(|grant| grant.client != client);
        // A client that asks again gets a new grant. Two clients that share a descriptor get none.
        self.intake.revoke_grant(file, &mut state);
        let has_other_user =
            has_other_client || !state.opens.is_only(handle.id) || state.drain.is_exclusive();
        if has_other_user || state.drain.failure().is_some() || state.unlinked {
            return Err(DirectRefusal::Busy);
        }
        let Some(file_id) = self.base.journal.allocate_file_id(file, &mut state) else {
            return Err(DirectRefusal::Busy);
        };
        let grant = Grant {
            handle: handle.id,
            client,
            file_id,
            leases: Vec::new(),
            bytes: 0,
        };
        state.direct.set_grant(grant);
        self.intake.grants.add(file);
        if self.base.options.drain == DrainPolicy::Eager {
            // Published bytes must be drained at their age even if no request asks about the file, so the queue checks
            // the file's age.
            self.drain.check_age_at(
                file,
                &mut state,
                Instant::now() + self.base.options.drain_age,
            );
        }
        Ok(CreatedGrant {
            file_id,
            pending_end: state.pending.end(),
        })
    }

    /// Leases a slab (a part of the arena that the client fills with bytes) to the client that has the grant. Ends all
    /// earlier leases except the last one.
    ///
    /// Returns the slab, and further slabs to fill after it. All slabs together have at most the smaller of two sizes:
    /// what the client asks for, and what it has written so far. The first slab is leased even if it is larger.
    ///
    /// Fails with `BadToken` if the client has no grant of this handle. Fails with `Full` if the arena has no room. The
    /// grant is then revoked, and the client writes through the kernel, where the write waits for room.
    pub fn lease_slabs(
        &self,
        client: ClientId,
        handle_id: HandleId,
        request: SlabRequest,
    ) -> DirectResult<(Slab, Vec<Slab>)> {
        let handle = self.writable_handle(handle_id)?;
        let file = &handle.file;
        let mut state = file.lock();
        // Ends the leases that the client has filled, and counts its bytes.
        self.intake.ingest_published(file, &mut state);
        let has_excess_lease = |grant: &Grant| grant.leases.len() > LEASES_KEPT_MAX;
        while state.direct.grant().is_some_and(has_excess_lease) {
            self.intake.end_first_lease(file, &mut state);
        }
        let written_bytes = state.direct.grant().map_or(0, |grant| grant.bytes);
        let expected_bytes = written_bytes.saturating_add(request.bytes);
        let class = self.base.class_for(expected_bytes);
        if !self.base.arena.has_room(class) {
            // The lock is released, because an eviction takes the locks of other files.
            drop(state);
            self.room.evict_for(class);
            state = file.lock();
        }
        let last_write_ns = state.pending.recorded_ns();
        // The grant may have ended while the lock was released.
        let is_of_client = |grant: &&mut Grant| grant.client == client && grant.handle == handle_id;
        let Some(grant) = state.direct.grant_mut().filter(is_of_client) else {
            return Err(DirectRefusal::BadToken);
        };
        let Some(first_slab) = self.lease_slab(grant, class, request, last_write_ns) else {
            // Without a slab the client writes through the kernel, and waits there for room.
            self.intake.revoke_grant(file, &mut state);
            // The lock is released, because the next calls take locks of other files.
            drop(state);
            self.room.reclaim();
            self.room.wake_writers();
            return Err(DirectRefusal::Full);
        };
        let further_slabs = self.lease_in_advance(grant, request, last_write_ns);
        // The lock is released, because waiting writers are called back.
        drop(state);
        self.room.wake_writers();
        Ok((first_slab, further_slabs))
    }

    /// Leases one slab to the client of a grant. Returns `None` if the arena has no room.
    fn lease_slab(
        &self,
        grant: &mut Grant,
        class: Class,
        request: SlabRequest,
        last_write_ns: u64,
    ) -> Option<Slab> {
        let arena = &self.base.arena;
        let lease = arena.lease_client(class, grant.file_id.get(), request.pid, request.cpu)?;
        let slab = arena.client_slab(&lease, last_write_ns);
        grant.leases.push(lease);
        self.intake.grants.count_lease();
        Some(slab)
    }

    /// Leases further slabs (parts of the arena) to the client of `grant` in advance, so that the client sends fewer
    /// requests.
    ///
    /// Stops at the first of three limits: the slabs reach the size that the client has written so far; half of the
    /// arena's memory is in use; the share of each writer is below two chunks.
    fn lease_in_advance(
        &self,
        grant: &mut Grant,
        request: SlabRequest,
        last_write_ns: u64,
    ) -> Vec<Slab> {
        let mut further_slabs = Vec::new();
        let bytes_max = request.bytes.min(grant.bytes);
        let geometry = self.base.arena.geometry();
        let slabs_max = (bytes_max / geometry.chunk_bytes).min(LEASE_SLABS_MAX as u64) as usize;
        let has_ample_room = || {
            self.base.arena.memory_used() < geometry.chunk_count / 2
                && self.base.arena.share_bytes() >= 2 * geometry.chunk_bytes
        };
        // The client already has the first slab of this request.
        while further_slabs.len() + 1 < slabs_max && has_ample_room() {
            let Some(slab) = self.lease_slab(grant, Class::Whole, request, last_write_ns) else {
                break;
            };
            further_slabs.push(slab);
        }
        further_slabs
    }

    /// Ends the grant that the client has by this handle, if it has one.
    pub fn end_direct_access(&self, client: ClientId, handle_id: HandleId) {
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return;
        };
        let mut state = handle.file.lock();
        if state
            .direct
            .grant()
            .is_some_and(|grant| grant.client == client)
        {
            self.intake.revoke_grant(&handle.file, &mut state);
        }
        drop(state);
        self.room.wake_writers();
    }

    /// Ends all grants of a client whose connection closed, and frees slabs that could be freed only after that.
    pub fn end_client(&self, client: ClientId) {
        for file in self.intake.files_with_grant() {
            let mut state = file.lock();
            if state
                .direct
                .grant()
                .is_some_and(|grant| grant.client == client)
            {
                self.intake.revoke_grant(&file, &mut state);
            }
        }
        self.base.arena.free_lingering_slabs();
        self.room.wake_writers();
    }

    /// Returns a list of the places of a file's bytes from offset `from` on: in the arena (shared memory), in memory
    /// files (each with all bytes of one large file), or in files of the backing. The list names at most `files_max`
    /// files.
    ///
    /// Fails with `BadToken` if the handle is not open for reading. Fails with `Busy` if the file has a writer or is
    /// being changed; the client then reads through the kernel.
    pub fn list_extents(
        &self,
        handle_id: HandleId,
        from: u64,
        files_max: usize,
    ) -> DirectResult<DirectList> {
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return Err(DirectRefusal::BadToken);
        };
        if !handle.readable {
            return Err(DirectRefusal::BadToken);
        }
        // With this option each read must come to the engine.
        if self.base.options.serves_every_read {
            return Err(DirectRefusal::Busy);
        }
        for _ in 0..LIST_ATTEMPTS_MAX {
            if let Some(list) = self.try_list(&handle.file, from, files_max)? {
                return Ok(list);
            }
        }
        Err(DirectRefusal::Busy)
    }

    /// Returns a descriptor of the memory file that has all bytes of a file. The process of the handle maps it, and its
    /// mapping shows each change of the file while the handle is open.
    ///
    /// The memory file becomes the *view* of the file: each later change is stored there too, until no handle reads it
    /// any more.
    ///
    /// Fails with `BadToken` if the handle is not open for reading only. Fails with `Busy` if no memory file has all
    /// bytes, or if the file is in use otherwise; the process then reads through the kernel.
    pub fn map_file(&self, handle_id: HandleId) -> DirectResult<OwnedFd> {
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return Err(DirectRefusal::BadToken);
        };
        if !handle.readable || handle.writable {
            return Err(DirectRefusal::BadToken);
        }
        // With this option each read must come to the engine.
        if self.base.options.serves_every_read {
            return Err(DirectRefusal::Busy);
        }
        let Ok(size) = self.intake.size_of(&handle.file) else {
            return Err(DirectRefusal::Busy);
        };
        let mut state = handle.file.lock();
        let existing_view = state.view.clone();
        let Some(view) = existing_view.or_else(|| state.create_view(&self.base.arena, size)) else {
            return Err(DirectRefusal::Busy);
        };
        let descriptor = view.reader().map_err(|_| DirectRefusal::Busy);
        if *handle.mode.lock() == OpenMode::Memory {
            // The kernel serves this handle from the view, which therefore exists until the handle is released.
            return descriptor;
        }
        if descriptor.is_err() {
            state.end_view(&self.base.arena);
            return descriptor;
        }
        let is_first_mapping = handle.record_mapping(&mut state);
        if is_first_mapping && let Some(live) = self.tree.names.live() {
            // The view is recorded in the live table before the process can map it, so that a next firnd continues to
            // store changes in the view.
            live.record_view(handle_id.0, view.number());
        }
        descriptor
    }

    /// Tries once to make a list of the places of a file's bytes; see [`Self::list_extents`]. Returns `None` if the
    /// file changed meanwhile. Fails with `Busy` if the file has a writer, or its bytes cannot be located.
    ///
    /// The list contains a *stamp*: the value of the file's version counter in the arena. A change of the file raises
    /// the counter. The reader then sees another value, and does not use the list any more.
    fn try_list(
        &self,
        file: &Arc<File<B>>,
        from: u64,
        files_max: usize,
    ) -> DirectResult<Option<DirectList>> {
        let mut state = file.lock();
        if !allows_lists(&state) {
            return Err(DirectRefusal::Busy);
        }
        // This precedes the look-up of places: a chunk that moves afterwards then invalidates this list.
        self.intake.grants.record_list();
        let pending_end = state.pending.end();
        let mut list = self.list_arena_extents(&state, from, files_max)?;
        // The arena has a limited number of version counters, so several files share one.
        let counter_index = (file.inode.id.0 % u64::from(WORDS_COUNT)) as u32;
        state.direct.record_list(counter_index);
        let (counter_position, mut stamp) = self.base.arena.file_word(counter_index);
        let reader = state.open_reader();
        // The lock is released, because the next steps call the backing.
        drop(state);
        let files_left = files_max - list.files.len();
        let in_backing = if files_left > 0 {
            self.locate_in_backing(file, reader, from..list.end, files_left)
        } else {
            None
        };
        // The size is read after the list. Bytes that are drained in between are still valid, and a truncation
        // invalidates the list.
        let Ok(size) = self.tree.size_with_pending(&file.inode, pending_end) else {
            return Err(DirectRefusal::Busy);
        };
        let mut valid_until = None;
        if let Some(in_backing) = in_backing {
            let stamp_of_backing_list =
                self.record_backing_list(file, counter_index, stamp, &in_backing)?;
            let Some(new_stamp) = stamp_of_backing_list else {
                return Ok(None);
            };
            stamp = new_stamp;
            valid_until = Some(in_backing.located.until);
            list.add_backing_parts(in_backing.located);
        }
        Ok(Some(DirectList {
            size,
            slot: counter_position,
            stamp,
            extents: list.extents,
            end: list.end,
            files: list.files,
            until: valid_until,
        }))
    }

    /// Records that a reader gets a list which names files of the backing, so that changes by other hosts make the list
    /// invalid. Fails with `Busy` if the file must have no list, for example because it has a writer.
    ///
    /// Returns the stamp that the list gets, or `None` if the list is already invalid. A list is valid while the file's
    /// version counter equals the stamp. `stamp` is the value of the counter from before the list was made. It is
    /// returned unchanged, unless readers have lists of an older state of the backing.
    fn record_backing_list(
        &self,
        file: &File<B>,
        counter_index: u32,
        stamp: u32,
        in_backing: &LocatedInBacking<B>,
    ) -> DirectResult<Option<u32>> {
        let changes_by_others = in_backing.changes_by_others;
        let mut state = file.lock();
        if !allows_lists(&state) {
            return Err(DirectRefusal::Busy);
        }
        let present_stamp = || self.base.arena.file_word(counter_index).1;
        let is_valid = state.direct.has_lists() && present_stamp() == stamp;
        // From here on, a change by another host makes this list invalid. A change since the places were read had no
        // list to make invalid, so it is noticed by its count.
        let facts = self.base.backing.facts(&in_backing.object);
        if !is_valid || facts.changes_by_others != changes_by_others {
            return Ok(None);
        }
        let has_same_backing_state = state.direct.try_record_backing_list(changes_by_others);
        if has_same_backing_state {
            return Ok(Some(stamp));
        }
        // Earlier lists describe another state of the backing: they become invalid, and this list gets a new stamp.
        state.direct.invalidate_lists(&self.base.arena);
        state.direct.record_list(counter_index);
        state.direct.try_record_backing_list(changes_by_others);
        Ok(Some(present_stamp()))
    }

    /// Lists the extents of a file (ranges with the place of their bytes) that are in the arena, from offset `from` on.
    /// Opens at most `files_max` memory files, which have all bytes of one large file each. The caller has the lock of
    /// the file, so that the memory files still have the bytes of this file.
    ///
    /// Fails with `Busy` if an extent cannot be located. A read through the kernel then returns the error.
    fn list_arena_extents(
        &self,
        state: &FileState<B>,
        from: u64,
        files_max: usize,
    ) -> DirectResult<PartialList> {
        let mut extents = Vec::new();
        for (offset, extent) in state.extents_in_arena(from, EXTENTS_MAX) {
            let Some(listed) = self.base.locate_extent(offset, extent) else {
                return Err(DirectRefusal::Busy);
            };
            extents.push(listed);
        }
        // A list that is full may lack later extents. Any other list has all of them.
        let end = match extents.last() {
            Some(last) if extents.len() >= EXTENTS_MAX => last.offset + last.len,
            _ => u64::MAX,
        };
        let files = self.open_memory_files(&mut extents, files_max);
        Ok(PartialList {
            extents,
            end,
            files,
        })
    }

    /// Opens the memory files (files in memory with all bytes of one large file) that extents lie in, at most
    /// `files_max`, and returns them. Each extent in such a file is changed to refer to the file by its index in the
    /// result. Extents in further memory files remain unchanged, and clients read them through the kernel.
    fn open_memory_files(&self, extents: &mut [ListedExtent], files_max: usize) -> Vec<OwnedFd> {
        let mut files = Vec::new();
        // The number of each memory file in `files`, at the same index.
        let mut file_numbers = Vec::new();
        for extent in extents {
            if extent.place != IN_MEMORY_FILE {
                continue;
            }
            let Some((memory_file, _)) = self.base.arena.memory_file_of(extent.chunk) else {
                continue;
            };
            let number = memory_file.number();
            let known_index = file_numbers.iter().position(|known| *known == number);
            let file_index = if let Some(index) = known_index {
                index
            } else {
                let is_list_full = files.len() >= files_max.min(FILES_MAX);
                if is_list_full {
                    continue;
                }
                let Ok(descriptor) = memory_file.reader() else {
                    continue;
                };
                files.push(descriptor);
                file_numbers.push(number);
                files.len() - 1
            };
            // A reader reads a memory file as it reads a file of the backing, by a descriptor. The format has one place
            // for both. Its field `chunk` is then the index of the descriptor.
            extent.place = IN_BACKING;
            extent.chunk = file_index as u32;
        }
        files
    }

    /// Returns where the backing has the bytes of a range. `reader` is the backing's file if it is open already.
    ///
    /// Returns `None` if the backing cannot locate the bytes, or changed during the call. The range must then be read
    /// through the kernel, which also returns any error.
    fn locate_in_backing(
        &self,
        file: &Arc<File<B>>,
        reader: Option<Arc<BackingFile<B>>>,
        range: Range<u64>,
        files_max: usize,
    ) -> Option<LocatedInBacking<B>> {
        let object = self.tree.object(&file.inode).ok()?;
        let limits = LocateLimits {
            parts_max: EXTENTS_MAX,
            files_max: files_max.min(FILES_MAX),
        };
        let locate = || {
            let reader = match &reader {
                Some(reader) => Arc::clone(reader),
                None => self.open_files.reader(file)?,
            };
            self.locate_between_changes(&object, &reader.file, range.clone(), limits)
        };
        self.open_files.with_descriptor(locate).ok()?
    }

    /// Asks the backing where the bytes of a range of `file` lie; `file` is an open file of `object`. Tries again if
    /// another host changes the object meanwhile, because some of the places may then be from before the change.
    /// Returns `None` if each try fails, or if the backing cannot locate the bytes.
    fn locate_between_changes(
        &self,
        object: &B::Inode,
        file: &B::File,
        range: Range<u64>,
        limits: LocateLimits,
    ) -> Result<Option<LocatedInBacking<B>>> {
        let backing = &self.base.backing;
        for _ in 0..LIST_ATTEMPTS_MAX {
            let changes_by_others = backing.facts(object).changes_by_others;
            let located = backing.locate(file, range.clone(), limits)?;
            if backing.facts(object).changes_by_others != changes_by_others {
                continue;
            }
            return Ok(located.map(|located| LocatedInBacking {
                located,
                object: object.clone(),
                changes_by_others,
            }));
        }
        Ok(None)
    }

    /// Returns a handle that is open for writing.
    fn writable_handle(&self, handle_id: HandleId) -> DirectResult<Arc<Handle<B>>> {
        match self.open_files.handle(handle_id) {
            Ok(handle) if handle.writable => Ok(handle),
            _ => Err(DirectRefusal::BadToken),
        }
    }

    /// Sets the observer that is called with each range that clients write. There is at most one, set before the
    /// first grant.
    pub fn observe_direct_writes(&self, observer: DirectWriteObserver) {
        self.intake.grants.set_observer(observer);
    }

    /// Revokes the grants of files at or below `path`. All bytes that their clients wrote are ingested.
    pub fn revoke_grants_in_tree(&self, path: &[u8]) {
        for file in self.open_files.files_at(path) {
            self.intake.end_grant(&file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firn_format::data_socket::IN_MEMORY;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    const BYTES: usize = 200;

    /// Ranges that do not overlap, sorted.
    fn random_ranges(random: &mut StdRng) -> Vec<Range<u64>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        while at < BYTES as u64 - 20 {
            let start = at + random.random_range(0..10);
            at = start + random.random_range(1..10);
            if random.random() {
                ranges.push(start..at);
            }
        }
        ranges
    }

    #[test]
    fn extents_of_the_arena_lie_over_parts_of_the_backing() {
        for seed in 0..500 {
            let mut random = StdRng::seed_from_u64(seed);
            let extents: Vec<ListedExtent> = random_ranges(&mut random)
                .into_iter()
                .map(|range| ListedExtent {
                    offset: range.start,
                    len: range.end - range.start,
                    at: 1000 + range.start,
                    chunk: 0,
                    place: IN_MEMORY,
                })
                .collect();
            let parts: Vec<LocatedPart> = random_ranges(&mut random)
                .into_iter()
                .map(|range| LocatedPart {
                    offset: range.start,
                    len: range.end - range.start,
                    file: Some(3),
                    position: 5000 + range.start,
                })
                .collect();
            let mut expected = [None; BYTES];
            for part in &parts {
                for at in part.offset..part.offset + part.len {
                    expected[at as usize] = Some((5000 + at, IN_BACKING));
                }
            }
            for extent in &extents {
                for at in extent.offset..extent.offset + extent.len {
                    expected[at as usize] = Some((1000 + at, IN_MEMORY));
                }
            }
            let mut found = [None; BYTES];
            let mut end = 0;
            for extent in merge_by_offset(&extents, &parts) {
                assert!(extent.offset >= end && extent.len > 0, "seed {seed}");
                end = extent.offset + extent.len;
                for at in extent.offset..end {
                    let place = extent.at + (at - extent.offset);
                    found[at as usize] = Some((place, extent.place));
                }
            }
            assert_eq!(found, expected, "seed {seed}");
        }
    }
}
