//! Direct access: files that a client process writes into slabs leased to it, or reads where they lie in the arena.
//!
//! Promises
//! * Whoever asks about a file learns of every byte whose write returned: what the client published is
//!   ingested before an answer ([`Engine::ingest_published`]).
//! * While a client has the grant of a file, it alone has the file open. Anything else that opens, reads, writes or
//!   cuts it revokes the grant first ([`Engine::revoke_grant`]); the client goes on through the kernel.
//! * A piece that may still grow is neither drained nor marked dead.
//!
//! Sequences: a lease takes as many as it has records. They keep the order of writes because nothing else
//! writes the file while there is a grant, and a file's leases are filled one after the other.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::{ClientLease, Located as LocatedBytes, Taken};
use firn_backing::{Backing, Errno, LocateLimits, Located, LocatedPart};
use firn_format::data_socket::{
    EXTENTS_MAX, Extent as Listed, FILES_MAX, IN_BACKING, IN_MEMORY, IN_SPILL, LEASE_SLABS_MAX,
    Slab, TO_BE_ASKED,
};
use firn_format::geometry::WORDS_COUNT;
use firn_format::slab::Class;

use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::{BackingFile, File, FileId, FileState, Grant};
use crate::options::DrainPolicy;
use crate::privileges::has_set_id_bits;
use crate::size::whole_size;
use crate::tables::Handle;
use crate::{
    ClientId, DirectGrant, DirectList, DirectRefusal, DirectWriteObserver, HandleId, OpenMode,
};

/// Leases of a file that stay when it gets more: the last one, which is being filled.
const LEASES_KEPT: usize = 1;

/// A list whose file changes while it is made is made anew; no more often than this.
const LIST_TRIES_MAX: usize = 4;

type Answer<T> = std::result::Result<T, DirectRefusal>;

/// Whether readers may be told where the bytes of a file lie.
fn may_be_listed<B: Backing>(state: &FileState<B>) -> bool {
    !state.opens.has_writers()
        && !state.opens.has_passthrough()
        && !state.drain.is_exclusive()
        && !state.direct.has_grant()
}

/// The parts that lie in the backing where there are no `extents` of the arena, and these. Both are sorted.
fn fill_gaps(extents: &[Listed], parts: &[LocatedPart]) -> Vec<Listed> {
    let mut filled = Vec::with_capacity(extents.len() + parts.len());
    let mut later = extents.iter().peekable();
    for part in parts {
        let end = part.offset + part.len;
        let mut at = part.offset;
        while at < end {
            let next = later.peek().filter(|extent| extent.offset < end);
            let gap_end = next.map_or(end, |extent| extent.offset.max(at));
            if gap_end > at {
                filled.push(Listed {
                    offset: at,
                    len: gap_end - at,
                    at: part.position + (at - part.offset),
                    chunk: part.file.unwrap_or(0) as u32,
                    place: part.file.map_or(TO_BE_ASKED, |_| IN_BACKING),
                });
            }
            let Some(extent) = next else { break };
            let extent_end = extent.offset + extent.len;
            at = extent_end.max(gap_end);
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

impl<B: Backing> Engine<B> {
    // ---- what the data socket asks -----------------------------------------------------------

    /// May `client` write the open file directly? From now on attributes must not be kept by the
    /// kernel, and those that it keeps must be dropped before the client is told.
    pub fn grant_direct_access(&self, client: ClientId, token: HandleId) -> Answer<DirectGrant> {
        let handle = self.writable(token)?;
        let file = &handle.file;
        let privileges = self.privileges.epoch();
        let has_capabilities = |object| self.has_capabilities(&object);
        if self.object(&file.inode).map_or(true, has_capabilities)
            || self.is_nameless(file).unwrap_or(true)
            || *handle.mode.lock() != OpenMode::Engine
        {
            return Err(DirectRefusal::Busy);
        }
        let grant = || self.give_grant(client, &handle);
        let (file_id, end) = self.paths.while_staying(|| file.inode.paths(), grant)?;
        // Nobody else changes the file from here on: what a drain moves to the backing before it is asked
        // counts all the same.
        let in_backing = self
            .object(&file.inode)
            .and_then(|object| self.backing.attr(&object));
        let plain = in_backing.ok().filter(|attr| !has_set_id_bits(attr));
        // Who gave it privileges meanwhile found no grant to end.
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

    /// Gives the grant, where it may be. Returns the file id, and the end of what is pending.
    fn give_grant(&self, client: ClientId, handle: &Handle<B>) -> Answer<(FileId, u64)> {
        let file = &handle.file;
        let mut state = file.lock();
        // Asked for again, or by a process that shares the descriptor: what there was ends.
        let shared = state
            .direct
            .grant()
            .is_some_and(|grant| grant.client != client);
        self.revoke_grant(file, &mut state);
        let alone = state.opens.is_only(handle.id) && !state.drain.is_exclusive();
        if shared || !alone || state.drain.failure().is_some() || state.unlinked {
            return Err(DirectRefusal::Busy);
        }
        let file_id = self
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
        self.grants.add(file);
        if self.options.drain == DrainPolicy::Eager {
            // What nobody asks about must be found when it is old.
            self.drain
                .check_age_at(file, &mut state, Instant::now() + self.options.drain_age);
        }
        Ok((file_id, state.pending.end()))
    }

    /// A slab for the client that has the grant, and more that it fills after this one, as far as it has written as much
    /// before, up to the `want` bytes that it would like; the leases before the last one end. `cpu`: where it runs.
    pub fn lease_slabs(
        &self,
        client: ClientId,
        token: HandleId,
        (pid, cpu): (u32, Option<u32>),
        want: u64,
    ) -> Answer<(Slab, Vec<Slab>)> {
        let handle = self.writable(token)?;
        let file = &handle.file;
        let mut state = file.lock();
        self.ingest_published(file, &mut state);
        while state
            .direct
            .grant()
            .is_some_and(|grant| grant.leases.len() > LEASES_KEPT)
        {
            self.end_first_lease(file, &mut state);
        }
        let bytes = state.direct.grant().map_or(0, |grant| grant.bytes);
        let class = self.class_for(bytes.saturating_add(want));
        if !self.arena.has_room(class) {
            // Not under this lock: what is dropped may be of any file.
            drop(state);
            self.evict_for(class);
            state = file.lock();
        }
        let written = state.pending.recorded_ns();
        let Some(grant) = state
            .direct
            .grant_mut()
            .filter(|grant| grant.client == client && grant.handle == token)
        else {
            return Err(DirectRefusal::BadToken);
        };
        let lease = self
            .arena
            .lease_client(class, grant.file_id.get(), pid, cpu);
        if let Some(lease) = lease {
            let slab = self.arena.client_slab(&lease, written);
            grant.leases.push(lease);
            self.grants.count_lease();
            let more = self.lease_more(grant, (pid, cpu), want, written);
            drop(state);
            self.wake_writers();
            return Ok((slab, more));
        }
        // Without room the client writes through the kernel, which waits for some.
        self.revoke_grant(file, &mut state);
        drop(state);
        self.reclaim();
        self.wake_writers();
        Err(DirectRefusal::Full)
    }

    /// Leases behind the one that was just given, so that the client asks less often: not for more than the file has,
    /// while half of the memory is free, and while every writer would still get two chunks.
    fn lease_more(
        &self,
        grant: &mut Grant,
        (pid, cpu): (u32, Option<u32>),
        want: u64,
        written: u64,
    ) -> Vec<Slab> {
        let mut more = Vec::new();
        let bytes_max = want.min(grant.bytes);
        let geometry = self.arena.geometry();
        let slabs_max = (bytes_max / geometry.chunk_bytes).min(LEASE_SLABS_MAX as u64) as usize;
        let has_ample_room = || {
            self.arena.memory_used() < geometry.chunk_count / 2
                && self.arena.share_bytes() >= 2 * geometry.chunk_bytes
        };
        while more.len() + 1 < slabs_max && has_ample_room() {
            let lease = self
                .arena
                .lease_client(Class::Whole, grant.file_id.get(), pid, cpu);
            let Some(lease) = lease else { break };
            more.push(self.arena.client_slab(&lease, written));
            grant.leases.push(lease);
            self.grants.count_lease();
        }
        more
    }

    /// The client is done with the file.
    pub fn end_direct_access(&self, client: ClientId, token: HandleId) {
        let Ok(handle) = self.handle(token) else {
            return;
        };
        let mut state = handle.file.lock();
        if state
            .direct
            .grant()
            .is_some_and(|grant| grant.client == client)
        {
            self.revoke_grant(&handle.file, &mut state);
        }
        drop(state);
        self.wake_writers();
    }

    /// The client is gone: all that it had ends.
    pub fn end_client(&self, client: ClientId) {
        for file in self.files_with_grant() {
            let mut state = file.lock();
            if state
                .direct
                .grant()
                .is_some_and(|grant| grant.client == client)
            {
                self.revoke_grant(&file, &mut state);
            }
        }
        self.arena.free_lingering_slabs();
        self.wake_writers();
    }

    /// Where the bytes of a file lie that nobody has open for writing, from `from` on: in the arena, and where that has none
    /// in files of the backing, `files_max` of them at most.
    pub fn list_extents(&self, token: HandleId, from: u64, files_max: usize) -> Answer<DirectList> {
        let handle = self.handle(token).ok().filter(|handle| handle.readable);
        let handle = handle.ok_or(DirectRefusal::BadToken)?;
        if self.options.serves_every_read {
            return Err(DirectRefusal::Busy);
        }
        for _ in 0..LIST_TRIES_MAX {
            if let Some(list) = self.try_to_list(&handle.file, from, files_max)? {
                return Ok(list);
            }
        }
        Err(DirectRefusal::Busy)
    }

    /// `None`: what it lists has changed meanwhile.
    fn try_to_list(
        &self,
        file: &Arc<File<B>>,
        from: u64,
        files_max: usize,
    ) -> Answer<Option<DirectList>> {
        let mut state = file.lock();
        if !may_be_listed(&state) {
            return Err(DirectRefusal::Busy);
        }
        // Before any place is looked up: who moves one then looks for this file.
        self.grants.note_list();
        let pending_end = state.pending.end();
        // Through the kernel, which tells the error, where a place is not known.
        let list = |(offset, extent)| self.list(offset, extent).ok_or(DirectRefusal::Busy);
        let mut extents = state
            .extents_in_arena(from, EXTENTS_MAX)
            .into_iter()
            .map(list)
            .collect::<Answer<Vec<_>>>()?;
        let mut end = match extents.last() {
            Some(last) if extents.len() >= EXTENTS_MAX => last.offset + last.len,
            _ => u64::MAX,
        };
        let word = (file.inode.id.0 % u64::from(WORDS_COUNT)) as u32;
        state.direct.set_listed(word);
        let (slot, mut stamp) = self.arena.file_word(word);
        let source = state.open_reader();
        drop(state);
        let located = match files_max {
            0 => None,
            _ => self.locate(file, source, from..end, files_max),
        };
        // What is drained before the backing is asked counts all the same; what is cut makes the list invalid.
        let size = self
            .size_beside(&file.inode, pending_end)
            .map_err(|_| DirectRefusal::Busy)?;
        let mut files = Vec::new();
        let mut until = None;
        if let Some((located, object, changes)) = located {
            end = end.min(located.end);
            extents.retain(|extent| extent.offset < end);
            extents = fill_gaps(&extents, &located.parts);
            if let Some(cut) = extents.get(EXTENTS_MAX) {
                end = cut.offset;
                extents.truncate(EXTENTS_MAX);
            }
            files = located.files;
            until = Some(located.until);
            let mut state = file.lock();
            if !may_be_listed(&state) {
                return Err(DirectRefusal::Busy);
            }
            let is_same = state.direct.is_listed() && self.arena.file_word(word).1 == stamp;
            // Whoever learns of a change ends lists afterwards, under this lock, and found none of the backing until now.
            if !is_same || self.backing.facts(&object).changes_by_others != changes {
                return Ok(None);
            }
            if !state.direct.set_listed_in_backing(changes) {
                state.direct.invalidate_list(&self.arena);
                state.direct.set_listed(word);
                state.direct.set_listed_in_backing(changes);
                stamp = self.arena.file_word(word).1;
            }
        }
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

    /// Where the backing has bytes of a range, of which object, and as of which change by other hosts. What cannot be found is read by the
    /// kernel, which tells the error.
    fn locate(
        &self,
        file: &Arc<File<B>>,
        source: Option<Arc<BackingFile<B>>>,
        range: Range<u64>,
        files_max: usize,
    ) -> Option<(Located, B::Inode, u64)> {
        let object = self.object(&file.inode).ok()?;
        let limits = LocateLimits {
            parts_max: EXTENTS_MAX,
            files_max: files_max.min(FILES_MAX),
        };
        let find = || {
            let source = source.clone().map_or_else(|| self.reader(file), Ok)?;
            for _ in 0..LIST_TRIES_MAX {
                let changes = self.backing.facts(&object).changes_by_others;
                let located = self.backing.locate(&source.file, range.clone(), limits)?;
                // Else it may be of before the change in one part, and of after it in another.
                if self.backing.facts(&object).changes_by_others == changes {
                    return Ok(located.map(|located| (located, changes)));
                }
            }
            Ok(None)
        };
        let (located, changes) = self.with_descriptor(find).ok().flatten()?;
        Some((located, object, changes))
    }

    /// To be called when this host may have learnt of changes by others: what readers were told of the backing before
    /// does not hold any more.
    pub(crate) fn end_lists_before_changes(&self, file: &File<B>, object: &B::Inode) {
        if !self.grants.has_lists() {
            return;
        }
        let changes = self.backing.facts(object).changes_by_others;
        let mut state = file.lock();
        if state.direct.is_listed_before(changes) {
            state.direct.invalidate_list(&self.arena);
        }
    }

    /// Where an extent is now; `None`: nobody knows.
    pub(crate) fn list(&self, offset: u64, extent: Extent) -> Option<Listed> {
        let (at, place) = match self
            .arena
            .locate_bytes(extent.piece.slab, extent.position)?
        {
            LocatedBytes::Arena(at) => (at, IN_MEMORY),
            LocatedBytes::Spill(at) => (at, IN_SPILL),
        };
        Some(Listed {
            offset,
            len: extent.len,
            at,
            chunk: extent.piece.slab.chunk,
            place,
        })
    }

    fn writable(&self, token: HandleId) -> Answer<Arc<Handle<B>>> {
        self.handle(token)
            .ok()
            .filter(|handle| handle.writable)
            .ok_or(DirectRefusal::BadToken)
    }

    // ---- what the engine does ----------------------------------------------------------------

    /// Has `observer` told of what clients write. There is one at most; to be called before the first grant.
    pub fn observe_direct_writes(&self, observer: DirectWriteObserver) {
        self.grants.set_observer(observer);
    }

    /// Whether a client may be writing the file of an inode now, or has and the kernel was not told of it: its
    /// attributes change unseen.
    pub fn is_written_directly(&self, inode: crate::InodeId) -> bool {
        let Some(inode) = self.names.get(inode) else {
            return false;
        };
        let has_grant = !self.grants.is_empty()
            && self
                .known_file(&inode)
                .is_some_and(|file| file.lock().direct.has_grant());
        // Last: a grant that just ended left it so.
        has_grant || inode.is_size_stale_in_kernel.load(Ordering::Acquire)
    }

    /// The kernel knows now how long the file of an inode is.
    pub fn note_kernel_size(&self, inode: crate::InodeId) {
        if let Some(inode) = self.names.get(inode) {
            inode
                .is_size_stale_in_kernel
                .store(false, Ordering::Release);
        }
    }

    fn files_with_grant(&self) -> Vec<Arc<File<B>>> {
        self.grants.files()
    }

    /// Takes in what clients published, of all files.
    pub(crate) fn ingest_all_published(&self) {
        for file in self.files_with_grant() {
            self.ingest_published(&file, &mut file.lock());
        }
    }

    /// Takes in what a client published of this file.
    pub(crate) fn ingest_published(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        self.ingest_from_client(file, state, |arena, lease, sink| {
            arena.take_client(lease, sink)
        });
    }

    /// Takes in what a client published, and lets none of it grow: the drain may have it.
    pub(crate) fn freeze_published(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        self.ingest_from_client(file, state, |arena, lease, sink| {
            arena.freeze_client(lease, sink)
        });
    }

    fn ingest_from_client(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        take: impl Fn(
            &firn_arena::Arena,
            &mut ClientLease,
            &mut dyn FnMut(Taken),
        ) -> std::result::Result<(), firn_arena::Wrong>,
    ) {
        // Whoever fills a later lease is done with the first, whose last bytes come before.
        let next = |grant: &Grant| {
            let mut later = grant.leases.iter().skip(1);
            later.any(|lease| self.arena.client_has_begun(lease))
        };
        while state.direct.grant().is_some_and(next) {
            self.end_first_lease(file, state);
        }
        let Some(mut grant) = state.direct.take_grant() else {
            return;
        };
        let mut taken = Vec::new();
        let lease = grant.leases.first_mut();
        let pid = lease.as_ref().map_or(0, |lease| lease.pid());
        let wrong =
            lease.and_then(|lease| take(&self.arena, lease, &mut |bytes| taken.push(bytes)).err());
        grant.bytes += self.enter(file, state, pid, &taken);
        state.direct.put_back(grant);
        if let Some(wrong) = wrong {
            tracing::warn!(%wrong, "it writes through the kernel from now on");
            self.grants.count_error();
            self.revoke_grant(file, state);
        }
    }

    fn enter(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        pid: u32,
        taken: &[Taken],
    ) -> u64 {
        let mut bytes = 0;
        for &Taken {
            piece,
            offset,
            position,
            len,
            sequence,
            modified,
        } in taken
        {
            if let Some(observe) = self.grants.observer() {
                observe(&*file.inode, pid, offset..offset + u64::from(len));
            }
            if !state.pending.touch_at(modified) {
                self.arena.set_modified(piece, state.pending.recorded_ns());
            }
            self.ingest(
                file,
                state,
                offset,
                Extent {
                    len: len.into(),
                    piece,
                    position,
                    sequence,
                },
            );
            bytes += u64::from(len);
            self.counters.ingest_writes.fetch_add(1, Ordering::Relaxed);
        }
        if bytes > 0 {
            self.counters
                .ingest_bytes
                .fetch_add(bytes, Ordering::Relaxed);
            file.inode
                .is_size_stale_in_kernel
                .store(true, Ordering::Release);
            // Only what the engine itself published may be extended by it.
            state.pending.end_tail();
        }
        bytes
    }

    /// Ends the grant to a file, if there is one: all that the client published is taken in, and it can
    /// publish nothing more.
    pub(crate) fn revoke_grant(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        if !state.direct.has_grant() {
            return;
        }
        while state
            .direct
            .grant()
            .is_some_and(|grant| !grant.leases.is_empty())
        {
            self.end_first_lease(file, state);
        }
        state.direct.take_grant();
        self.grants.remove(file);
        self.journal.end_file_id(state);
    }

    /// Ends the older lease of a grant.
    fn end_first_lease(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        let Some(grant) = state
            .direct
            .grant_mut()
            .filter(|grant| !grant.leases.is_empty())
        else {
            return;
        };
        let mut lease = grant.leases.remove(0);
        self.grants.count_lease_end();
        let mut taken = Vec::new();
        let result = self
            .arena
            .revoke_client(&mut lease, &mut |bytes| taken.push(bytes));
        let bytes = self.enter(file, state, lease.pid(), &taken);
        if let Some(grant) = state.direct.grant_mut() {
            grant.bytes += bytes;
        }
        self.arena.end_client(lease);
        if let Err(wrong) = result {
            tracing::warn!(%wrong, "what follows it is not taken");
            self.grants.count_error();
        }
    }

    /// As [`Engine::revoke_grant`], for callers without the lock.
    pub(crate) fn end_grant(&self, file: &Arc<File<B>>) {
        if !self.grants.is_empty() {
            self.revoke_grant(file, &mut file.lock());
        }
    }

    /// Ends all grants: their slabs are wanted.
    pub(crate) fn revoke_all_grants(&self) {
        for file in self.files_with_grant() {
            self.revoke_grant(&file, &mut file.lock());
        }
    }

    /// For an opener of a file whose bytes came by direct access: how long it is.
    pub(crate) fn size_for_kernel(&self, file: &File<B>) -> Option<u64> {
        if !file.inode.is_size_stale_in_kernel.load(Ordering::Acquire) {
            return None;
        }
        let end = file.lock().pending.end();
        Some(self.size_beside(&file.inode, end).unwrap_or(end))
    }

    /// The byte at `offset`, for the kernel's cache.
    pub fn byte_at(&self, handle: HandleId, offset: u64) -> std::result::Result<u8, Errno> {
        let mut byte = [0];
        self.read(handle, offset, &mut byte)?;
        Ok(byte[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            let extents: Vec<Listed> = random_ranges(&mut random)
                .into_iter()
                .map(|range| Listed {
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
