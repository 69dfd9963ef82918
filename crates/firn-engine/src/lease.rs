//! Files that a client process writes past the kernel, into slabs leased to it.
//!
//! Promises
//! * Whoever asks about a file learns of every byte whose write returned: what the client published is
//!   taken in before an answer ([`Engine::ingest_published`]).
//! * While a client has the door to a file, it alone has the file open. Anything else that opens,
//!   reads, writes or cuts it ends the door first ([`Engine::revoke`]); the client goes on through the
//!   kernel.
//! * A piece that may still grow is neither drained nor marked dead.
//!
//! Sequences: a lease takes as many as it has records. They keep the order of writes because nothing else
//! writes the file while there is a door, and a file's leases are filled one after the other.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::{ClientLease, Located, Taken};
use firn_backing::{Backing, Errno};
use firn_conflict::Access;
use firn_format::data_socket::{EXTENTS_MAX, Extent as Listed, IN_MEMORY, IN_SPILL, Slab};
use firn_format::geometry::{SLAB_MEDIUM, SLAB_SMALL, WORDS_COUNT};
use firn_format::slab::Class;

use crate::engine::{DrainPolicy, Engine, Handle};
use crate::extents::Extent;
use crate::file::{File, FileState};
use crate::privileges::has_set_id_bits;
use crate::{ClientId, DoorGrant, DoorList, DoorRefusal, HandleId, OpenMode};

/// A file has the lease that is filled and the one that is next.
const LEASES_MAX: usize = 2;

/// One client's way past the kernel.
pub(crate) struct Door {
    handle: HandleId,
    client: ClientId,
    binding: u64,
    /// In the order in which they are filled.
    leases: Vec<ClientLease>,
    /// Bytes taken in: decides the class of the next slab.
    bytes: u64,
}

type Answer<T> = std::result::Result<T, DoorRefusal>;

impl<B: Backing> Engine<B> {
    // ---- what the door socket asks -----------------------------------------------------------

    /// May `client` write the open file past the kernel? From now on attributes must not be kept by the
    /// kernel, and those that it keeps must be dropped before the client is told.
    pub fn door_open(&self, client: ClientId, token: HandleId) -> Answer<DoorGrant> {
        let _writing = self.writing.read();
        let handle = self.writable(token)?;
        let file = &handle.file;
        let privileges = self.privileges_epoch();
        let plain = self.object(&file.inode).is_ok_and(|object| {
            let attr = self.backing.attr(&object);
            attr.is_ok_and(|attr| !has_set_id_bits(&attr)) && !self.has_capabilities(&object)
        });
        if !plain
            || self.is_nameless(file).unwrap_or(true)
            || *handle.mode.lock() != OpenMode::Engine
        {
            return Err(DoorRefusal::Busy);
        }
        let grant = || self.grant(client, &handle);
        let (binding, end) = self.paths.while_staying(|| file.inode.paths(), grant)?;
        // Nobody else changes the file from here on: what a drain moves to the backing before it is asked
        // counts all the same.
        let in_backing = self
            .object(&file.inode)
            .and_then(|object| self.backing.attr(&object));
        let Ok(attr) = in_backing else {
            self.door_end(client, token);
            return Err(DoorRefusal::Busy);
        };
        // Who gave it privileges meanwhile found no door to end.
        if self.privileges_epoch() != privileges {
            self.door_end(client, token);
            return Err(DoorRefusal::Busy);
        }
        Ok(DoorGrant {
            binding,
            size: attr.size.max(end),
            inode: file.inode.id,
        })
    }

    /// Opens the door, where it may be. Returns the binding, and the end of what is pending.
    fn grant(&self, client: ClientId, handle: &Handle<B>) -> Answer<(u64, u64)> {
        let file = &handle.file;
        let mut state = file.lock();
        // Asked for again, or by a process that shares the descriptor: what there was ends.
        let shared = state
            .door
            .as_ref()
            .is_some_and(|door| door.client != client);
        self.revoke(file, &mut state);
        let alone = state.handles[..] == [handle.id] && state.engine_opens == 1 && !state.exclusive;
        if shared || !alone || state.failure.is_some() || state.unlinked {
            return Err(DoorRefusal::Busy);
        }
        let binding = self.bind(file, &mut state).ok_or(DoorRefusal::Busy)?;
        let door = Door {
            handle: handle.id,
            client,
            binding,
            leases: Vec::new(),
            bytes: 0,
        };
        state.door = Some(Box::new(door));
        self.door_files
            .lock()
            .insert(Arc::as_ptr(file) as usize, Arc::clone(file));
        self.doors.fetch_add(1, Ordering::AcqRel);
        if self.options.drain == DrainPolicy::Eager {
            // What nobody asks about must be found when it is old.
            self.check_age_at(file, &mut state, Instant::now() + self.options.drain_age);
            self.wake_lane(file.lane);
        }
        Ok((binding, state.extents.end()))
    }

    /// A slab for the client that has the door; the lease before the last one ends. `cpu`: where it runs.
    pub fn door_lease(
        &self,
        client: ClientId,
        token: HandleId,
        (pid, cpu): (u32, Option<u32>),
        want: u64,
    ) -> Answer<Slab> {
        let _writing = self.writing.read();
        let handle = self.writable(token)?;
        let file = &handle.file;
        let mut state = file.lock();
        self.ingest_published(file, &mut state);
        while state
            .door
            .as_ref()
            .is_some_and(|door| door.leases.len() >= LEASES_MAX)
        {
            self.end_first(file, &mut state);
        }
        let bytes = state.door.as_ref().map_or(0, |door| door.bytes);
        let class = class_for(bytes.saturating_add(want));
        if !self.arena.has_room(class) {
            // Not under this lock: what is dropped may be of any file.
            drop(state);
            self.evict_for(class);
            state = file.lock();
        }
        let written = state.written;
        let Some(door) = state
            .door
            .as_mut()
            .filter(|door| door.client == client && door.handle == token)
        else {
            return Err(DoorRefusal::BadToken);
        };
        let lease = self.arena.lease_client(class, door.binding, pid, cpu);
        if let Some(lease) = lease {
            let slab = self.arena.client_slab(&lease, written);
            door.leases.push(lease);
            self.counters.door_leases.fetch_add(1, Ordering::Relaxed);
            drop(state);
            self.wake_writers();
            return Ok(slab);
        }
        // Without room the client writes through the kernel, which waits for some.
        self.revoke(file, &mut state);
        drop(state);
        self.reclaim();
        self.wake_writers();
        Err(DoorRefusal::Full)
    }

    /// The client is done with the file.
    pub fn door_end(&self, client: ClientId, token: HandleId) {
        let Ok(handle) = self.handle(token) else {
            return;
        };
        let mut state = handle.file.lock();
        if state
            .door
            .as_ref()
            .is_some_and(|door| door.client == client)
        {
            self.revoke(&handle.file, &mut state);
        }
        drop(state);
        self.wake_writers();
    }

    /// The client is gone: all that it had ends.
    pub fn door_gone(&self, client: ClientId) {
        for file in self.files_with_door() {
            let mut state = file.lock();
            if state
                .door
                .as_ref()
                .is_some_and(|door| door.client == client)
            {
                self.revoke(&file, &mut state);
            }
        }
        self.arena.await_clients();
        self.wake_writers();
    }

    /// Where the bytes of a file lie that nobody has open for writing, from `from` on.
    pub fn door_extents(&self, token: HandleId, from: u64) -> Answer<DoorList> {
        let handle = self.handle(token).ok().filter(|handle| handle.readable);
        let handle = handle.ok_or(DoorRefusal::BadToken)?;
        if self.options.tracking {
            return Err(DoorRefusal::Busy);
        }
        let file = &handle.file;
        let mut state = file.lock();
        if state.writers > 0
            || state.passthrough_opens > 0
            || state.exclusive
            || state.door.is_some()
        {
            return Err(DoorRefusal::Busy);
        }
        // Before any place is looked up: who moves one then looks for this file.
        self.lists.store(true, Ordering::Release);
        let end = state.extents.end();
        // Through the kernel, which tells the error, where a place is not known.
        let list = |(offset, extent)| self.list(offset, extent).ok_or(DoorRefusal::Busy);
        let extents = state
            .in_arena(from, EXTENTS_MAX)
            .into_iter()
            .map(list)
            .collect::<Answer<_>>()?;
        let word = (file.inode.id.0 % u64::from(WORDS_COUNT)) as u32;
        state.listed = Some(word);
        let (slot, stamp) = self.arena.file_word(word);
        drop(state);
        // What is drained before the backing is asked counts all the same; what is cut makes the list void.
        let attr = self
            .object(&file.inode)
            .and_then(|object| self.backing.attr(&object));
        let size = attr.map_err(|_| DoorRefusal::Busy)?.size.max(end);
        Ok(DoorList {
            size,
            slot,
            stamp,
            extents,
        })
    }

    /// Where an extent is now; `None`: nobody knows.
    pub(crate) fn list(&self, offset: u64, extent: Extent) -> Option<Listed> {
        let (at, place) = match self.arena.locate(extent.piece.slab, extent.position)? {
            Located::Arena(at) => (at, IN_MEMORY),
            Located::Spill(at) => (at, IN_SPILL),
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
            .ok_or(DoorRefusal::BadToken)
    }

    // ---- what the engine does ----------------------------------------------------------------

    /// Whether a client may be writing the file of a host now, or has and the kernel was not told of it: its
    /// attributes change unseen.
    pub fn is_written_past_the_kernel(&self, inode: crate::InodeId) -> bool {
        let Some(inode) = self.names.get(inode) else {
            return false;
        };
        let doors = self.doors.load(Ordering::Acquire) > 0;
        let door = doors
            && self
                .known_file(&inode)
                .is_some_and(|file| file.lock().door.is_some());
        // Last: a door that just ended left it so.
        door || inode.kernel_behind.load(Ordering::Acquire)
    }

    /// The kernel knows now how long the file of a host is.
    pub fn kernel_knows(&self, inode: crate::InodeId) {
        if let Some(inode) = self.names.get(inode) {
            inode.kernel_behind.store(false, Ordering::Release);
        }
    }

    fn files_with_door(&self) -> Vec<Arc<File<B>>> {
        if self.doors.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        self.door_files.lock().values().cloned().collect()
    }

    /// Takes in what clients published, of all files.
    pub(crate) fn ingest_all_published(&self) {
        for file in self.files_with_door() {
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
        // Whoever fills the second lease is done with the first, whose last bytes come before.
        let next = |door: &Door| {
            door.leases
                .get(1)
                .is_some_and(|next| self.arena.client_has_begun(next))
        };
        while state.door.as_deref().is_some_and(next) {
            self.end_first(file, state);
        }
        let Some(mut door) = state.door.take() else {
            return;
        };
        let mut taken = Vec::new();
        let lease = door.leases.first_mut();
        let pid = lease.as_ref().map_or(0, |lease| lease.pid());
        let wrong =
            lease.and_then(|lease| take(&self.arena, lease, &mut |bytes| taken.push(bytes)).err());
        door.bytes += self.enter(file, state, pid, &taken);
        state.door = Some(door);
        if let Some(wrong) = wrong {
            tracing::warn!(%wrong, "it writes through the kernel from now on");
            self.counters.door_errors.fetch_add(1, Ordering::Relaxed);
            self.revoke(file, state);
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
            self.note_access(
                &file.inode,
                pid,
                Access::Write,
                offset..offset + u64::from(len),
            );
            if !state.touch_at(modified) {
                self.arena.set_modified(piece, state.written);
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
            file.inode.kernel_behind.store(true, Ordering::Release);
            // Only what the engine itself published may be extended by it.
            state.tail = None;
        }
        bytes
    }

    /// Ends the door to a file, if there is one: all that the client published is taken in, and it can
    /// publish nothing more.
    pub(crate) fn revoke(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        if state.door.is_none() {
            return;
        }
        while state
            .door
            .as_ref()
            .is_some_and(|door| !door.leases.is_empty())
        {
            self.end_first(file, state);
        }
        state.door = None;
        self.door_files.lock().remove(&(Arc::as_ptr(file) as usize));
        self.doors.fetch_sub(1, Ordering::AcqRel);
        if state.pending == 0 {
            self.unbind(state);
        }
    }

    /// Ends the older lease of a door.
    fn end_first(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        let Some(door) = state.door.as_mut().filter(|door| !door.leases.is_empty()) else {
            return;
        };
        let mut lease = door.leases.remove(0);
        self.counters.door_leases.fetch_sub(1, Ordering::Relaxed);
        let mut taken = Vec::new();
        let result = self
            .arena
            .revoke_client(&mut lease, &mut |bytes| taken.push(bytes));
        let bytes = self.enter(file, state, lease.pid(), &taken);
        if let Some(door) = &mut state.door {
            door.bytes += bytes;
        }
        self.arena.end_client(lease);
        if let Err(wrong) = result {
            tracing::warn!(%wrong, "what follows it is not taken");
            self.counters.door_errors.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// As [`Engine::revoke`], for callers without the lock.
    pub(crate) fn end_door(&self, file: &Arc<File<B>>) {
        if self.doors.load(Ordering::Acquire) > 0 {
            self.revoke(file, &mut file.lock());
        }
    }

    /// Ends all doors: their slabs are wanted.
    pub(crate) fn end_all_doors(&self) {
        for file in self.files_with_door() {
            self.revoke(&file, &mut file.lock());
        }
    }

    /// For an opener of a file whose bytes came past the kernel: how long it is.
    pub(crate) fn size_for_kernel(&self, file: &File<B>) -> Option<u64> {
        if !file.inode.kernel_behind.load(Ordering::Acquire) {
            return None;
        }
        let end = file.lock().extents.end();
        let attr = self
            .object(&file.inode)
            .and_then(|object| self.backing.attr(&object));
        Some(attr.map_or(end, |attr| attr.size.max(end)))
    }

    /// The byte at `offset`, for the kernel's cache.
    pub fn byte_at(&self, handle: HandleId, offset: u64) -> std::result::Result<u8, Errno> {
        let mut byte = [0];
        self.read(handle, offset, &mut byte)?;
        Ok(byte[0])
    }
}

impl<B: Backing> FileState<B> {
    /// What the arena has of the file from an offset on, pending or drained: at most `max` extents, sorted.
    pub(crate) fn in_arena(&self, from: u64, max: usize) -> Vec<(u64, Extent)> {
        let cached = self.cache.extents().from(from).take(max);
        let mut both: Vec<_> = self.extents.from(from).take(max).chain(cached).collect();
        both.sort_unstable_by_key(|(offset, _)| *offset);
        both.truncate(max);
        both
    }

    /// What was told of this file to processes that read it past the kernel ends to hold. To be called
    /// before its bytes change or their room can be used again.
    pub(crate) fn unlist(&mut self, arena: &firn_arena::Arena) {
        if let Some(word) = self.listed.take() {
            arena.raise_file_word(word);
        }
    }
}

/// Small slabs first, whole chunks for those who prove large.
fn class_for(expected: u64) -> Class {
    if expected >= 2 * SLAB_MEDIUM {
        Class::Whole
    } else if expected > SLAB_SMALL {
        Class::Medium
    } else {
        Class::Small
    }
}
