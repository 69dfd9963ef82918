//! State of one file that is open or has bytes in the arena (the shared memory for written data).
//!
//! The state has parts, each with its invariants: pending data, which is not in the backing yet ([`Pending`]), the
//! drain that writes it there ([`DrainState`]), handles ([`Opens`]), direct access of client processes to the arena
//! ([`DirectState`]), and drained bytes that are still in the arena ([`CachedBytes`]). A method that concerns several
//! parts belongs to [`FileState`].
//!
//! Invariants
//! * Pending bytes and cached bytes do not overlap.
//! * No call of the backing is made under the lock. During a call, one of two flags takes the place of the lock:
//!   [`DrainState::is_exclusive`] if the call needs the backing file exclusively, [`DrainState::is_setting_time`] if it
//!   sets the time of the last write.
//!
//! Lock order: file table, file state, drain queue or journal, arena pool.

mod direct;
mod drain_state;
mod opens;
mod pending;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::{Arena, MemoryFile};
use firn_backing::lock::{Mutex, MutexGuard};
use firn_backing::{Access, Backing, LaneIndex};
use firn_format::durability::DurabilityLevel;
use parking_lot::Condvar;
use thin_vec::ThinVec;

use crate::cache::CachedBytes;
use crate::extents::Extent;
use crate::names::Inode;

pub(crate) use direct::{DirectState, Grant};
pub(crate) use drain_state::{DrainState, RecordedFailure, Waiter};
pub(crate) use opens::Opens;
pub use pending::FileId;
pub(crate) use pending::{LastWrite, Pending, PieceLayers, PieceUse, latest_ns};

/// An open file of the backing, and its access mode.
pub(crate) struct BackingFile<B: Backing> {
    pub file: B::File,
    pub access: Access,
}

/// State of a file, protected by the file's lock.
pub(crate) struct FileState<B: Backing> {
    pub pending: Pending,
    pub drain: DrainState,
    pub opens: Opens,
    pub direct: DirectState,
    /// Drained bytes that are still in the arena.
    pub cache: CachedBytes,
    /// Memory file (a file in memory with all bytes of this file) that the kernel or a process reads without requests.
    /// Set while a handle is read in this way. Each change of the file is also stored in the memory file.
    pub view: Option<Arc<MemoryFile>>,
    /// The backing's file, opened for reading.
    pub reader: Option<Arc<BackingFile<B>>>,
    /// The backing's file, opened for writing, and also for reading if that is allowed.
    pub writer: Option<Arc<BackingFile<B>>>,
    /// Version of the contents. It changes with each write or truncation, and no other file has the same number.
    pub changes: u64,
    /// Version of the contents of which a partner host has a copy; 0 if it has no copy.
    pub partnered_changes: u64,
    /// Epoch ([`Privileges::epoch`](crate::privileges::Privileges)) in which the file was last seen without set-id bits
    /// and capabilities; 0 if it was never seen without them.
    pub unprivileged_epoch: u32,
    /// Whether the file's drained bytes remain in memory when the arena is short of room.
    pub is_pinned: bool,
    /// Whether the file has lost its last name.
    pub unlinked: bool,
    /// Whether the keeper of the mount has a descriptor of the file for the next firnd. Only true while the file is
    /// open.
    pub is_kept: bool,
}

/// A file that is open, has bytes in the arena, or is being used by the drain.
pub(crate) struct File<B: Backing> {
    pub inode: Arc<Inode<B>>,
    /// Lane (I/O server) through which the file's data is drained.
    pub lane: LaneIndex,
    /// Whether the backing may write distant pieces of the file in one call.
    pub gathers: bool,
    state: Mutex<FileState<B>>,
    /// Signals that an I/O, an exclusive use or the setting of a time ended.
    io_ended: Condvar,
}

/// Where the data of a file goes, according to the backing. This is only a hint: a wrong value costs time but does no
/// harm.
#[derive(Clone, Copy, Default)]
pub(crate) struct Route {
    /// The lane of the file.
    pub lane: LaneIndex,
    /// See [`Facts::gathers`](firn_backing::Facts::gathers).
    pub gathers: bool,
}

/// First version number ([`FileState::changes`]) of the next file.
static FIRST_CHANGE: AtomicU64 = AtomicU64::new(1);
/// Number of version numbers of each file: more than a file has changes during its time in the table.
const CHANGES_PER_FILE: u64 = 1 << 32;

/// Bounds the memory of a file, because there may be 10^5 held files. Fields that few files need are boxed.
const _: () = assert!(size_of::<File<firn_backing::DirBacking>>() <= 400);

impl<B: Backing> File<B> {
    /// Makes the state of a file without handles and pending bytes. The file counts as cut (incomplete) if its inode is
    /// marked so.
    pub(crate) fn new(inode: Arc<Inode<B>>, route: Route) -> Self {
        let state = FileState {
            pending: Pending::default(),
            drain: DrainState::default(),
            opens: if inode.is_cut.load(Ordering::Acquire) {
                Opens::for_cut_file()
            } else {
                Opens::default()
            },
            direct: DirectState::default(),
            cache: CachedBytes::default(),
            view: None,
            reader: None,
            writer: None,
            // Each file gets a separate range of version numbers.
            changes: FIRST_CHANGE.fetch_add(CHANGES_PER_FILE, Ordering::Relaxed),
            partnered_changes: 0,
            // No epoch has the number 0, so the first write looks for privileges.
            unprivileged_epoch: 0,
            is_pinned: false,
            unlinked: false,
            is_kept: false,
        };
        Self {
            inode,
            lane: route.lane,
            gathers: route.gathers,
            state: Mutex::new(state),
            io_ended: Condvar::new(),
        }
    }

    pub(crate) fn route(&self) -> Route {
        Route {
            lane: self.lane,
            gathers: self.gathers,
        }
    }

    /// Returns a path of the file, quoted for messages.
    pub(crate) fn shown(&self) -> String {
        firn_format::quote::quoted(&self.inode.paths().into_iter().next().unwrap_or_default())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, FileState<B>> {
        self.state.lock()
    }

    /// Locks the state, or returns `None` if another thread has the lock.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, FileState<B>>> {
        self.state.try_lock()
    }

    /// Begins exclusive use of the backing file: no drain of it starts until [`File::release_exclusive_use`]. Waits for
    /// I/O in flight, not for pending data.
    ///
    /// The caller releases the lock during its calls of the backing. Writes that come meanwhile are appended, so they
    /// count as later writes.
    pub(crate) fn acquire_exclusive_use(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while !state.drain.is_idle() {
            state.wait(&self.io_ended);
        }
        state.drain.set_exclusive(true);
        state
    }

    /// Ends exclusive use, and wakes threads that wait for it.
    pub(crate) fn release_exclusive_use(&self, state: &mut FileState<B>) {
        state.drain.set_exclusive(false);
        self.io_ended.notify_all();
    }

    /// Locks the state when no exclusive use is under way.
    pub(crate) fn lock_without_exclusive_use(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.drain.is_exclusive() {
            state.wait(&self.io_ended);
        }
        state
    }

    /// Locks the state when no thread is setting a time in the backing, which could be older than the caller's.
    pub(crate) fn lock_to_set_times(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.drain.is_setting_time() {
            state.wait(&self.io_ended);
        }
        state
    }

    /// Stores a file that was just opened for writing, unless one is already stored. Returns the stored file.
    pub(crate) fn store_writer(&self, opened: BackingFile<B>) -> Arc<BackingFile<B>> {
        // This reference outlives the lock, so an unneeded descriptor is closed after the lock is released.
        let new_writer = Arc::new(opened);
        let mut state = self.lock();
        Arc::clone(state.writer.get_or_insert_with(|| Arc::clone(&new_writer)))
    }

    /// Stores a file that was just opened for reading, unless one is already stored. Returns the stored file.
    pub(crate) fn store_reader(&self, opened: BackingFile<B>) -> Arc<BackingFile<B>> {
        let new_reader = Arc::new(opened);
        let mut state = self.lock();
        Arc::clone(state.reader.get_or_insert_with(|| Arc::clone(&new_reader)))
    }

    /// Wakes threads that wait for the end of an I/O.
    pub(crate) fn notify_io_ended(&self) {
        self.io_ended.notify_all();
    }
}

impl<B: Backing> FileState<B> {
    /// Returns the backing file opened for reading, if there is one.
    pub(crate) fn open_reader(&self) -> Option<Arc<BackingFile<B>>> {
        match &self.writer {
            Some(writer) if writer.access == Access::ReadWrite => Some(Arc::clone(writer)),
            _ => self.reader.clone(),
        }
    }

    /// Returns the backing file, if it is open.
    pub(crate) fn open_any(&self) -> Option<Arc<BackingFile<B>>> {
        self.writer.as_ref().or(self.reader.as_ref()).cloned()
    }

    /// Returns whether the descriptors of the backing file may be closed: no handle or I/O uses them, and a name leads
    /// to the file.
    pub(crate) fn can_close(&self) -> bool {
        let is_busy = self.drain.is_exclusive() || self.drain.writes_in_flight() > 0;
        self.opens.is_empty() && !is_busy && !self.unlinked
    }

    /// Returns whether the file table must keep the file, because of handles, bytes in the arena, the drain or lists of
    /// chunks.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.opens.is_empty()
            || !self.pending.is_empty()
            || !self.cache.is_empty()
            || !self.drain.is_idle()
            || self.direct.has_chunk_lists()
    }

    /// Records a change of bytes or length. Makes the lists of direct readers invalid.
    pub(crate) fn record_change(&mut self, arena: &Arena) {
        self.changes += 1;
        self.direct.invalidate_lists(arena);
    }

    /// Adds bytes of a piece that was just published, or extended by these bytes. Returns the number of pending bytes
    /// that they replace.
    pub(crate) fn insert(&mut self, arena: &Arena, offset: u64, extent: Extent) -> u64 {
        self.record_change(arena);
        self.cache.drop_range(arena, offset..offset + extent.len);
        let replaced = self.pending.insert(arena, offset, extent);
        self.check();
        replaced
    }

    /// Drops all extents of `range` with a sequence up to `sequence`. Returns the number of their bytes.
    pub(crate) fn drop_extents(&mut self, arena: &Arena, range: Range<u64>, sequence: u64) -> u64 {
        self.record_change(arena);
        self.cache.drop_range(arena, range.clone());
        let bytes = self.pending.drop_extents(arena, range, sequence);
        self.check();
        bytes
    }

    /// Returns the file's extents in the arena from an offset on, pending or cached: at most `max`, sorted.
    pub(crate) fn extents_in_arena(&self, from: u64, max: usize) -> Vec<(u64, Extent)> {
        let pending = self.pending.extents().from(from).take(max);
        let cached = self.cache.extents().from(from).take(max);
        let mut extents: Vec<_> = pending.chain(cached).collect();
        extents.sort_unstable_by_key(|(offset, _)| *offset);
        extents.truncate(max);
        extents
    }

    /// Returns the durability level of a file with pending bytes.
    pub(crate) fn durability_of_pending(&self, arena: &Arena) -> DurabilityLevel {
        if self.is_partnered() {
            return DurabilityLevel::Partnered;
        }
        let mut extents = self.pending.extents().iter();
        if extents.all(|(_, extent)| arena.is_spilled(extent.piece.slab.chunk)) {
            DurabilityLevel::Spilled
        } else {
            DurabilityLevel::Held
        }
    }

    /// Returns whether a partner has all present bytes, and no writer has the file open.
    pub(crate) fn is_partnered(&self) -> bool {
        self.partnered_changes == self.changes && !self.opens.has_writers()
    }

    /// Takes the waiters whose data is in the backing.
    pub(crate) fn take_satisfied_waiters(&mut self) -> ThinVec<Waiter> {
        if !self.drain.has_waiters() {
            return ThinVec::new();
        }
        self.drain
            .take_satisfied_waiters(self.pending.oldest_sequence())
    }

    /// Asserts that pending and cached bytes do not overlap. Called after each change of pending or cached bytes. For a
    /// file with many pieces, checks only at some of the calls.
    #[inline]
    pub(crate) fn check(&self) {
        const PIECES_EACH_TIME: usize = 32;
        const CHANGES_BETWEEN: u64 = 64;
        if cfg!(debug_assertions)
            && (self.pending.piece_count() <= PIECES_EACH_TIME
                || self.changes.is_multiple_of(CHANGES_BETWEEN))
        {
            self.assert_no_overlap();
        }
    }

    /// Panics if a byte is both pending and cached.
    fn assert_no_overlap(&self) {
        self.cache.extents().assert_invariants();
        for (offset, extent) in self.pending.extents().iter() {
            let range = offset..offset + extent.len;
            let cached = self.cache.extents().within(range).next();
            assert!(
                cached.is_none(),
                "bytes at {offset} are pending and cached: {cached:?}"
            );
        }
    }
}
