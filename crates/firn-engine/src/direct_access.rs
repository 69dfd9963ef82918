//! Direct access: a client process writes bytes of a file into slabs leased to it, or reads the file's bytes where they
//! lie in the arena.
//!
//! Terms
//! * A *grant* is a client's right to write one open file directly. It ends when it is *revoked*.
//! * A *lease* is the client's right to fill one slab.
//! * A *list* tells a reader where the bytes of a file lie. When the list becomes invalid, the engine raises a counter
//!   in the arena (the file's word).
//!
//! Promises
//! * Each answer about a file covers every byte whose write has returned: pieces that the client has published are
//!   ingested before the answer ([`Intake::ingest_published`]).
//! * While a client has the grant of a file, no other handle of the file is open. Any other open, read, write or
//!   truncation revokes the grant first ([`Intake::revoke_grant`]); afterwards the client writes through the kernel.
//! * A piece that may still grow is neither drained nor marked dead.
//!
//! Order of writes: a lease reserves one sequence for each of its records. The sequences are in the order of the
//! writes, because only the client writes the file during a grant, and the client fills its leases one after the other.

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
    SlabRequest,
};

/// Number of leases that remain when the client asks for more: it may still be filling the last one.
const LEASES_KEPT_MAX: usize = 1;

/// Maximum number of tries to make a list. A change of the file makes a try fail.
const LIST_TRIES_MAX: usize = 4;

/// Result of a client's request, or the reason why the request is refused.
type DirectResult<T> = std::result::Result<T, DirectRefusal>;

/// Places of bytes in the backing, from [`DirectAccess::locate`].
struct LocatedInBacking<B: Backing> {
    located: Located,
    /// The object of the file.
    object: B::Inode,
    /// Value of [`Facts::changes_by_others`](firn_backing::Facts) for which the places are valid.
    changes_by_others: u64,
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
        self.extents = fill_gaps(&self.extents, &located.parts);
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

/// Merges two sorted lists: the `extents` of the arena, and the `parts` that lie in the backing. Where both have bytes,
/// the arena's bytes are newer and are used.
fn fill_gaps(extents: &[ListedExtent], parts: &[LocatedPart]) -> Vec<ListedExtent> {
    let mut filled = Vec::with_capacity(extents.len() + parts.len());
    let mut later = extents.iter().peekable();
    for part in parts {
        let end = part.offset + part.len;
        let mut position = part.offset;
        while position < end {
            let next = later.peek().filter(|extent| extent.offset < end);
            let gap_end = next.map_or(end, |extent| extent.offset.max(position));
            if gap_end > position {
                filled.push(ListedExtent {
                    offset: position,
                    len: gap_end - position,
                    at: part.position + (position - part.offset),
                    chunk: part.file.unwrap_or(0) as u32,
                    place: part.file.map_or(TO_BE_ASKED, |_| IN_BACKING),
                });
            }
            let Some(extent) = next else { break };
            let extent_end = extent.offset + extent.len;
            position = extent_end.max(gap_end);
            if extent_end > end {
                break;
            }
            filled.push(**extent);
            later.next();
        }
    }
    filled.extend(later);
    filled
}

/// Issues grants, leases and lists to client processes.
pub struct DirectAccess<B: Backing> {
    pub(crate) base: Arc<Base<B>>,
    pub(crate) tree: Arc<NameTree<B>>,
    pub(crate) privileges: Arc<Privileges>,
    pub(crate) drain: Arc<Drain<B>>,
    pub(crate) intake: Arc<Intake<B>>,
    pub(crate) open_files: Arc<OpenFiles<B>>,
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

    /// Grants `client` the right to write the open file directly. From now on the kernel must not cache the file's
    /// attributes. Before the client gets the answer, the caller must make the kernel drop the attributes that it has
    /// cached.
    ///
    /// Fails with `BadToken` if the handle is not open for writing. Fails with `Busy` if the file has another handle,
    /// set-id bits, capabilities or no name, or if a drain of it failed; the client then writes through the kernel.
    pub fn grant_direct_access(
        &self,
        client: ClientId,
        token: HandleId,
    ) -> DirectResult<DirectGrant> {
        let handle = self.writable_handle(token)?;
        let file = &handle.file;
        let privileges = self.privileges.epoch();
        let has_capabilities = |object| self.tree.has_capabilities(&object);
        // A write must remove capabilities, and recovery cannot find a file without a name. So in both cases programs
        // must write through the kernel.
        if self.tree.object(&file.inode).map_or(true, has_capabilities)
            || self.tree.has_no_known_name(file).unwrap_or(true)
            || *handle.mode.lock() != OpenMode::Engine
        {
            return Err(DirectRefusal::Busy);
        }
        let grant = || self.give_grant(client, &handle);
        let (file_id, end) = self
            .tree
            .paths
            .while_staying(|| file.inode.paths(), grant)?;
        // From here on only the client changes the file. Bytes that a drain moves to the backing before the next call
        // are counted in the arena or in the backing.
        let in_backing = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object));
        let plain = in_backing.ok().filter(|attr| !has_set_id_bits(attr));
        // A change of privileges before the grant could not revoke it. The epoch shows such a change.
        let is_same = self.privileges.epoch() == privileges;
        let Some(attr) = plain.filter(|_| is_same) else {
            self.end_direct_access(client, token);
            return Err(DirectRefusal::Busy);
        };
        Ok(DirectGrant {
            file_id,
            size: whole_size(&attr, end),
            inode: file.inode.id,
        })
    }

    /// Makes the grant if the state of the file allows it. Returns the file id, and the end of the pending bytes.
    fn give_grant(&self, client: ClientId, handle: &Handle<B>) -> DirectResult<(FileId, u64)> {
        let file = &handle.file;
        let mut state = file.lock();
        // A client that asks again gets a new grant, and the old one ends. Two clients that share a descriptor get no
        // grant.
        let shared = state
            .direct
            .grant()
            .is_some_and(|grant| grant.client != client);
        self.intake.revoke_grant(file, &mut state);
        let alone = state.opens.is_only(handle.id) && !state.drain.is_exclusive();
        if shared || !alone || state.drain.failure().is_some() || state.unlinked {
            return Err(DirectRefusal::Busy);
        }
        let file_id = self
            .base
            .journal
            .begin_file_id(file, &mut state)
            .ok_or(DirectRefusal::Busy)?;
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
        Ok((file_id, state.pending.end()))
    }

    /// Leases a slab to the client that has the grant. Ends all earlier leases except the last one.
    ///
    /// Returns the slab, and further slabs to fill after it. The further slabs together have at most the size that the
    /// client asks for, and at most the size that it has written so far.
    ///
    /// Fails with `BadToken` if the client has no grant of this handle. Fails with `Full` if the arena has no room. The
    /// grant is then revoked, and the client writes through the kernel, where the write waits for room.
    pub fn lease_slabs(
        &self,
        client: ClientId,
        token: HandleId,
        request: SlabRequest,
    ) -> DirectResult<(Slab, Vec<Slab>)> {
        let handle = self.writable_handle(token)?;
        let file = &handle.file;
        let mut state = file.lock();
        self.intake.ingest_published(file, &mut state);
        while state
            .direct
            .grant()
            .is_some_and(|grant| grant.leases.len() > LEASES_KEPT_MAX)
        {
            self.intake.end_first_lease(file, &mut state);
        }
        let bytes = state.direct.grant().map_or(0, |grant| grant.bytes);
        let class = self.base.class_for(bytes.saturating_add(request.bytes));
        if !self.base.arena.has_room(class) {
            // The lock is released, because an eviction takes the locks of other files.
            drop(state);
            self.room.evict_for(class);
            state = file.lock();
        }
        let last_write_ns = state.pending.recorded_ns();
        let Some(grant) = state
            .direct
            .grant_mut()
            .filter(|grant| grant.client == client && grant.handle == token)
        else {
            return Err(DirectRefusal::BadToken);
        };
        let lease =
            self.base
                .arena
                .lease_client(class, grant.file_id.get(), request.pid, request.cpu);
        if let Some(lease) = lease {
            let slab = self.base.arena.client_slab(&lease, last_write_ns);
            grant.leases.push(lease);
            self.intake.grants.count_lease();
            let more = self.lease_in_advance(grant, request, last_write_ns);
            drop(state);
            self.room.wake_writers();
            return Ok((slab, more));
        }
        // Without a slab the client writes through the kernel, and waits there for room.
        self.intake.revoke_grant(file, &mut state);
        drop(state);
        self.room.reclaim();
        self.room.wake_writers();
        Err(DirectRefusal::Full)
    }

    /// Leases further slabs in advance, so that the client sends fewer requests.
    ///
    /// Stops at the first of three limits: the slabs reach the size that the client has written so far; half of the
    /// arena's memory is in use; the share of each writer is below two chunks.
    fn lease_in_advance(
        &self,
        grant: &mut Grant,
        request: SlabRequest,
        last_write_ns: u64,
    ) -> Vec<Slab> {
        let mut more = Vec::new();
        let bytes_max = request.bytes.min(grant.bytes);
        let geometry = self.base.arena.geometry();
        let slabs_max = (bytes_max / geometry.chunk_bytes).min(LEASE_SLABS_MAX as u64) as usize;
        let has_ample_room = || {
            self.base.arena.memory_used() < geometry.chunk_count / 2
                && self.base.arena.share_bytes() >= 2 * geometry.chunk_bytes
        };
        while more.len() + 1 < slabs_max && has_ample_room() {
            let lease = self.base.arena.lease_client(
                Class::Whole,
                grant.file_id.get(),
                request.pid,
                request.cpu,
            );
            let Some(lease) = lease else { break };
            more.push(self.base.arena.client_slab(&lease, last_write_ns));
            grant.leases.push(lease);
            self.intake.grants.count_lease();
        }
        more
    }

    /// Ends the grant that the client has by this handle, if it has one.
    pub fn end_direct_access(&self, client: ClientId, token: HandleId) {
        let Ok(handle) = self.open_files.handle(token) else {
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

    /// Returns a list of the places of a file's bytes from offset `from` on: in the arena, in memory files, or in files
    /// of the backing. The list names at most `files_max` files.
    ///
    /// Fails with `BadToken` if the handle is not open for reading. Fails with `Busy` if the file has a writer or is
    /// being changed; the client then reads through the kernel.
    pub fn list_extents(
        &self,
        token: HandleId,
        from: u64,
        files_max: usize,
    ) -> DirectResult<DirectList> {
        let handle = self
            .open_files
            .handle(token)
            .ok()
            .filter(|handle| handle.readable);
        let handle = handle.ok_or(DirectRefusal::BadToken)?;
        if self.base.options.serves_every_read {
            return Err(DirectRefusal::Busy);
        }
        for _ in 0..LIST_TRIES_MAX {
            if let Some(list) = self.make_list(&handle.file, from, files_max)? {
                return Ok(list);
            }
        }
        Err(DirectRefusal::Busy)
    }

    /// Returns a descriptor of the memory file that has all bytes of a file, for a mapping by the process that opened
    /// the file for reading. While the handle is open, the mapping shows each change of the file.
    ///
    /// Fails with `Busy` if there is no such memory file and none can be made.
    pub fn map_file(&self, token: HandleId) -> DirectResult<OwnedFd> {
        let handle = self.open_files.handle(token).ok();
        let handle = handle.filter(|handle| handle.readable && !handle.writable);
        let handle = handle.ok_or(DirectRefusal::BadToken)?;
        if self.base.options.serves_every_read {
            return Err(DirectRefusal::Busy);
        }
        let size = self.intake.size_of(&handle.file);
        let size = size.map_err(|_| DirectRefusal::Busy)?;
        let mut state = handle.file.lock();
        let present_view = state.view.clone();
        let view = present_view.or_else(|| state.begin_view(&self.base.arena, size));
        let view = view.ok_or(DirectRefusal::Busy)?;
        let file = view.reader().map_err(|_| DirectRefusal::Busy);
        // A handle that the kernel serves from the view already keeps the view.
        if *handle.mode.lock() == OpenMode::Memory {
            return file;
        }
        if file.is_err() {
            state.end_view(&self.base.arena);
        } else if handle.note_mapped(&mut state) {
            // The view is recorded in the live table before the process can map it, so that a next firnd continues to
            // store changes in the view.
            if let Some(live) = self.tree.names.live() {
                live.note_view(token.0, view.number());
            }
        }
        file
    }

    /// Tries once to make a list; see [`Self::list_extents`]. Returns `None` if the file changed meanwhile.
    fn make_list(
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
        self.intake.grants.note_list();
        let pending_end = state.pending.end();
        let mut list = self.list_arena_extents(&state, from, files_max)?;
        let word = (file.inode.id.0 % u64::from(WORDS_COUNT)) as u32;
        state.direct.note_list(word);
        let (slot, mut stamp) = self.base.arena.file_word(word);
        let source = state.open_reader();
        drop(state);
        let located = match files_max - list.files.len() {
            0 => None,
            more => self.locate(file, source, from..list.end, more),
        };
        // The size is read after the list. Bytes that are drained in between are still valid, and a truncation
        // invalidates the list.
        let size = self
            .tree
            .size_beside(&file.inode, pending_end)
            .map_err(|_| DirectRefusal::Busy)?;
        let mut until = None;
        if let Some(LocatedInBacking {
            located,
            object,
            changes_by_others,
        }) = located
        {
            until = Some(located.until);
            list.add_backing_parts(located);
            let mut state = file.lock();
            if !allows_lists(&state) {
                return Err(DirectRefusal::Busy);
            }
            let is_same = state.direct.has_lists() && self.base.arena.file_word(word).1 == stamp;
            // A change by another host invalidates lists under this lock. A change that was noted earlier found no list
            // of the backing, so the counters are compared here.
            let facts = self.base.backing.facts(&object);
            if !is_same || facts.changes_by_others != changes_by_others {
                return Ok(None);
            }
            // Earlier lists describe another state of the backing: they become invalid, and this list gets a new stamp.
            if !state.direct.note_backing_list(changes_by_others) {
                state.direct.invalidate_lists(&self.base.arena);
                state.direct.note_list(word);
                state.direct.note_backing_list(changes_by_others);
                stamp = self.base.arena.file_word(word).1;
            }
        }
        let PartialList {
            extents,
            end,
            files,
        } = list;
        Ok(Some(DirectList {
            size,
            slot,
            stamp,
            extents,
            end,
            files,
            until,
        }))
    }

    /// Lists the extents of a file that are in the arena, from offset `from` on. Opens at most `files_max` memory
    /// files. Does so under the lock of the file, so that the memory files still have the bytes of this file.
    ///
    /// Fails with `Busy` if an extent cannot be located. A read through the kernel then returns the error.
    fn list_arena_extents(
        &self,
        state: &FileState<B>,
        from: u64,
        files_max: usize,
    ) -> DirectResult<PartialList> {
        let list = |(offset, extent)| self.base.list(offset, extent).ok_or(DirectRefusal::Busy);
        let mut extents = state
            .extents_in_arena(from, EXTENTS_MAX)
            .into_iter()
            .map(list)
            .collect::<DirectResult<Vec<_>>>()?;
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

    /// Opens the memory files that extents lie in, at most `files_max`, and returns them. The extents in these files
    /// are changed to name their file by its index in the result. Extents in further memory files are read through the
    /// kernel.
    fn open_memory_files(&self, extents: &mut [ListedExtent], files_max: usize) -> Vec<OwnedFd> {
        let mut numbers = Vec::new();
        let mut files = Vec::new();
        let arena = &self.base.arena;
        for extent in extents
            .iter_mut()
            .filter(|extent| extent.place == IN_MEMORY_FILE)
        {
            let Some((memory, _)) = arena.memory_file_of(extent.chunk) else {
                continue;
            };
            let opened = numbers.iter().position(|number| *number == memory.number());
            let index = opened.or_else(|| {
                let is_room = files.len() < files_max.min(FILES_MAX);
                files.push(is_room.then(|| memory.reader().ok()).flatten()?);
                numbers.push(memory.number());
                Some(files.len() - 1)
            });
            if let Some(index) = index {
                (extent.chunk, extent.place) = (index as u32, IN_BACKING);
            }
        }
        files
    }

    /// Returns where the backing has the bytes of a range. Returns `None` if the backing cannot locate the bytes, or
    /// changed during the call. The range must then be read through the kernel, which also returns any error.
    fn locate(
        &self,
        file: &Arc<File<B>>,
        source: Option<Arc<BackingFile<B>>>,
        range: Range<u64>,
        files_max: usize,
    ) -> Option<LocatedInBacking<B>> {
        let object = self.tree.object(&file.inode).ok()?;
        let limits = LocateLimits {
            parts_max: EXTENTS_MAX,
            files_max: files_max.min(FILES_MAX),
        };
        let find = || {
            let source = source
                .clone()
                .map_or_else(|| self.open_files.reader(file), Ok)?;
            for _ in 0..LIST_TRIES_MAX {
                let changes = self.base.backing.facts(&object).changes_by_others;
                let located = self
                    .base
                    .backing
                    .locate(&source.file, range.clone(), limits)?;
                // If the count differs, a part of the answer may be from before the change, and another part from after
                // it.
                if self.base.backing.facts(&object).changes_by_others == changes {
                    return Ok(located.map(|located| (located, changes)));
                }
            }
            Ok(None)
        };
        let (located, changes_by_others) = self.open_files.with_descriptor(find).ok().flatten()?;
        Some(LocatedInBacking {
            located,
            object,
            changes_by_others,
        })
    }

    /// Returns a handle that is open for writing.
    fn writable_handle(&self, token: HandleId) -> DirectResult<Arc<Handle<B>>> {
        self.open_files
            .handle(token)
            .ok()
            .filter(|handle| handle.writable)
            .ok_or(DirectRefusal::BadToken)
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
            for extent in fill_gaps(&extents, &parts) {
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
