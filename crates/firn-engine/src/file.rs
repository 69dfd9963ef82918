//! One file with open handles or pending data.
//!
//! Its state is in parts, each with its invariants: what is pending ([`Pending`]), how far the drain is ([`DrainState`]),
//! its handles ([`Opens`]), direct access ([`DirectState`]), and drained bytes that are still in the arena
//! ([`Cached`]). What concerns several parts is a method of [`FileState`].
//!
//! Invariants
//! * Pending bytes and cached bytes do not overlap.
//! * No call of the backing is made under the lock. [`DrainState::is_exclusive`] stands for a call that needs the file
//!   alone, [`DrainState::sets_time`] for one that sets the time of its last write.
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

use crate::cache::Cached;
use crate::extents::Extent;
use crate::names::Inode;

pub(crate) use direct::{DirectState, Grant};
pub(crate) use drain_state::{DrainState, Waiter};
pub(crate) use opens::Opens;
pub use pending::FileId;
pub(crate) use pending::{Layers, Pending, PieceUse, latest_ns};

/// A descriptor of the backing file and what it may do.
pub(crate) struct BackingFile<B: Backing> {
    pub file: B::File,
    pub access: Access,
}

pub(crate) struct FileState<B: Backing> {
    pub pending: Pending,
    pub drain: DrainState,
    pub opens: Opens,
    pub direct: DirectState,
    /// Drained bytes that are still in the arena.
    pub cache: Cached,
    /// What the kernel reads by itself, while a handle is open that way: it has the bytes of the file, whatever changes.
    pub view: Option<Arc<MemoryFile>>,
    pub reader: Option<Arc<BackingFile<B>>>,
    pub writer: Option<Arc<BackingFile<B>>>,
    /// Version of the contents: changes with each write or truncation, and no other file uses the same number.
    pub changes: u64,
    /// Version of the contents that a partner has a copy of; 0: none.
    pub partnered_changes: u64,
    /// Epoch ([`Privileges::epoch`](crate::privileges::Privileges)) in which the file was last seen without set-id bits
    /// and capabilities; 0: never.
    pub plain_in: u32,
    /// What is drained of it is not evicted to make room.
    pub is_pinned: bool,
    /// No name leads to it any more.
    pub unlinked: bool,
    /// The keeper has it for the next firnd. Only while it is open.
    pub is_kept: bool,
}

/// A file that firnd has something to do with.
pub(crate) struct File<B: Backing> {
    pub inode: Arc<Inode<B>>,
    /// The lane that its data is drained through.
    pub lane: LaneIndex,
    /// Pieces of it that are apart may be written together.
    pub gathers: bool,
    state: Mutex<FileState<B>>,
    /// Some I/O or exclusive use ended.
    quiet: Condvar,
}

/// What the backing says of where a file's data goes. Advice: a wrong one costs time and nothing else.
#[derive(Clone, Copy, Default)]
pub(crate) struct Route {
    pub lane: LaneIndex,
    /// See [`Facts::gathers`](firn_backing::Facts::gathers).
    pub gathers: bool,
}

/// Where [`FileState::changes`] of the next file begins.
static FIRST_CHANGE: AtomicU64 = AtomicU64::new(1);
/// More than a file sees while it is known.
const CHANGES_OF_A_FILE: u64 = 1 << 32;

/// There is one for each held file, and there may be 10^5 of them. What few files have is boxed.
const _: () = assert!(size_of::<File<firn_backing::DirBacking>>() <= 400);

impl<B: Backing> File<B> {
    /// A file of which nothing is known.
    pub(crate) fn new(inode: Arc<Inode<B>>, route: Route) -> Self {
        let state = FileState {
            pending: Pending::default(),
            drain: DrainState::default(),
            opens: if inode.is_cut.load(Ordering::Acquire) {
                Opens::of_cut_file()
            } else {
                Opens::default()
            },
            direct: DirectState::default(),
            cache: Cached::default(),
            view: None,
            reader: None,
            writer: None,
            changes: FIRST_CHANGE.fetch_add(CHANGES_OF_A_FILE, Ordering::Relaxed),
            partnered_changes: 0,
            plain_in: 0,
            is_pinned: false,
            unlinked: false,
            is_kept: false,
        };
        Self {
            inode,
            lane: route.lane,
            gathers: route.gathers,
            state: Mutex::new(state),
            quiet: Condvar::new(),
        }
    }

    pub(crate) fn route(&self) -> Route {
        Route {
            lane: self.lane,
            gathers: self.gathers,
        }
    }

    /// Its path as a person may read it.
    pub(crate) fn shown(&self) -> String {
        firn_format::quote::quoted(&self.inode.paths().into_iter().next().unwrap_or_default())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, FileState<B>> {
        self.state.lock()
    }

    /// The lock, or `None` if another thread has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, FileState<B>>> {
        self.state.try_lock()
    }

    /// Takes the backing file for the caller alone: no drain of it is under way until
    /// [`File::end_exclusive`]. Waits for the I/O in flight, not for pending data. The lock is to be let go
    /// while the backing works: until the end writes are appended, so that they count as later ones.
    pub(crate) fn begin_exclusive(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while !state.drain.is_idle() {
            state.wait(&self.quiet);
        }
        state.drain.set_exclusive(true);
        state
    }

    pub(crate) fn end_exclusive(&self, state: &mut FileState<B>) {
        state.drain.set_exclusive(false);
        self.quiet.notify_all();
    }

    /// The lock, once no truncation or the like is under way.
    pub(crate) fn lock_settled(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.drain.is_exclusive() {
            state.wait(&self.quiet);
        }
        state
    }

    /// The lock, once no thread sets an older time in the backing than the caller's.
    pub(crate) fn lock_to_set_times(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.drain.sets_time() {
            state.wait(&self.quiet);
        }
        state
    }

    /// Keeps a descriptor that was just opened, unless there is one already; returns the one that counts.
    pub(crate) fn keep_writer(&self, opened: BackingFile<B>) -> Arc<BackingFile<B>> {
        // A descriptor that is not needed closes after the lock is released.
        let opened = Arc::new(opened);
        let mut state = self.lock();
        Arc::clone(state.writer.get_or_insert_with(|| Arc::clone(&opened)))
    }

    /// [`File::keep_writer`] for a descriptor that can only read.
    pub(crate) fn keep_reader(&self, opened: BackingFile<B>) -> Arc<BackingFile<B>> {
        let opened = Arc::new(opened);
        let mut state = self.lock();
        Arc::clone(state.reader.get_or_insert_with(|| Arc::clone(&opened)))
    }

    pub(crate) fn notify_io_ended(&self) {
        self.quiet.notify_all();
    }
}

impl<B: Backing> FileState<B> {
    /// What the backing file can be read by, if that is open.
    pub(crate) fn open_reader(&self) -> Option<Arc<BackingFile<B>>> {
        let can_read = self
            .writer
            .as_ref()
            .filter(|writer| writer.access == Access::ReadWrite);
        can_read.or(self.reader.as_ref()).cloned()
    }

    /// The backing file, if it is open.
    pub(crate) fn open_any(&self) -> Option<Arc<BackingFile<B>>> {
        self.writer.as_ref().or(self.reader.as_ref()).cloned()
    }

    /// Whether the descriptors of the backing file may be closed.
    pub(crate) fn may_close(&self) -> bool {
        let is_busy = self.drain.is_exclusive() || self.drain.writes_in_flight() > 0;
        self.opens.is_empty() && !is_busy && !self.unlinked
    }

    /// Whether handles, bytes in the arena, the drain or chunk lists still need this entry.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.opens.is_empty()
            || !self.pending.is_empty()
            || !self.cache.is_empty()
            || !self.drain.is_idle()
            || self.direct.has_chunk_lists()
    }

    /// Its bytes or its length change: what readers were told of it ends to hold.
    pub(crate) fn note_change(&mut self, arena: &Arena) {
        self.changes += 1;
        self.direct.invalidate_list(arena);
    }

    /// Enters bytes of a piece that was just published or extended by them. Returns the pending bytes that they
    /// replace.
    pub(crate) fn insert(&mut self, arena: &Arena, offset: u64, extent: Extent) -> u64 {
        self.note_change(arena);
        self.cache.drop_range(arena, offset..offset + extent.len);
        let replaced = self.pending.insert(arena, offset, extent);
        self.check();
        replaced
    }

    /// Drops every extent of `range` up to `sequence`; returns the bytes.
    pub(crate) fn cut(&mut self, arena: &Arena, range: Range<u64>, sequence: u64) -> u64 {
        self.note_change(arena);
        self.cache.drop_range(arena, range.clone());
        let bytes = self.pending.cut(arena, range, sequence);
        self.check();
        bytes
    }

    /// What the arena has of the file from an offset on, pending or drained: at most `max` extents, sorted.
    pub(crate) fn extents_in_arena(&self, from: u64, max: usize) -> Vec<(u64, Extent)> {
        let pending = self.pending.extents().from(from).take(max);
        let cached = self.cache.extents().from(from).take(max);
        let mut both: Vec<_> = pending.chain(cached).collect();
        both.sort_unstable_by_key(|(offset, _)| *offset);
        both.truncate(max);
        both
    }

    /// What a file with pending bytes survives.
    pub(crate) fn level_of_pending(&self, arena: &Arena) -> DurabilityLevel {
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

    /// Whether a partner has all of its present bytes, and no writer has it open.
    pub(crate) fn is_partnered(&self) -> bool {
        self.partnered_changes == self.changes && !self.opens.has_writers()
    }

    /// The waiters whose data is in the backing.
    pub(crate) fn take_satisfied_waiters(&mut self) -> ThinVec<Waiter> {
        if !self.drain.has_waiters() {
            return ThinVec::new();
        }
        self.drain.take_satisfied(self.pending.oldest_sequence())
    }

    /// Asserts that pending and cached bytes do not overlap, of a file with few pieces or at some of its changes. To be
    /// called after each change of either.
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
