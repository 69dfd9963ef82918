//! One file with open handles or pending data.
//!
//! Invariants (under the lock of [`FileState`])
//! * `pending` is the sum of the extents; each piece in `pieces` has `0 < live <= len`.
//! * `partial` counts the pieces with `live < len`.
//! * An extent that overlaps a range in `inflight` is not picked for another I/O: two writes to the
//!   same bytes of the backing never race.
//! * A file is bound in the journal while anything is pending.
//! * While anything is pending, the record of some piece has the time of the last write ([`FileState::written`]): a
//!   recovery finds it there. The journal has a time that a program set instead, and what `written` was then.
//! * No call of the backing is made under the lock. While one is under way that the file has to itself,
//!   `exclusive` is set; while the time of its last write is set, `settling`.
//!
//! Lock order: file table, file state, drain queue or journal, arena pool.

use std::mem::take;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use firn_arena::{Arena, PieceRef};
use firn_backing::lock::{Mutex, MutexGuard};
use firn_backing::{Access, Backing, Errno, TICK_NS_MAX, Time};
use firn_format::record::Ending;
use parking_lot::Condvar;
use smallvec::SmallVec;
use thin_vec::ThinVec;

use crate::drain::LaneIndex;
use crate::extents::{Extent, Extents};
use crate::names::Inode;
use crate::small_map::SmallMap;
use crate::{Done, HandleId};

/// A descriptor of the backing file and what it may do.
pub(crate) struct BackingFile<B: Backing> {
    pub file: B::File,
    pub access: Access,
}

/// How much of a piece is pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PieceUse {
    pub len: u64,
    pub live: u64,
}

/// A drain of this file failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub errno: Errno,
    /// Some write, close or fsync was told.
    pub told: bool,
    /// How often in a row.
    pub count: u32,
    pub retry_at: Instant,
}

pub(crate) struct Waiter {
    /// Waits for all extents up to this sequence.
    pub until: u64,
    pub done: Done,
}

pub(crate) struct FileState<B: Backing> {
    pub extents: Extents,
    pub pieces: SmallMap<PieceRef, PieceUse>,
    pub partial: u32,
    pub pending: u64,
    /// Void ranges of this file that the journal knows, about.
    pub voids: u32,
    /// Binding in the journal.
    pub bound: Option<u64>,
    pub reader: Option<Arc<BackingFile<B>>>,
    pub writer: Option<Arc<BackingFile<B>>>,
    pub inflight: ThinVec<Range<u64>>,
    /// A truncation or the like has the backing file for itself.
    pub exclusive: bool,
    /// The time of the last write is being set in the backing.
    pub settling: bool,
    /// The piece that the last write made or extended: only it may be extended, and only until its
    /// sequence is used to cut.
    pub tail: Option<PieceRef>,
    /// Drain extents up to this sequence, however small.
    pub force_to: u64,
    /// Bytes written since the last look for a run that is worth a write.
    pub fresh: u64,
    /// In the drain queue.
    pub queued: bool,
    /// Where the next pick looks first.
    pub cursor: u64,
    pub failure: Option<Failure>,
    pub waiters: ThinVec<Waiter>,
    /// Time of the last write or utimens while data is pending.
    pub mtime: Option<Time>,
    /// Time of the last write as piece records have it, nanoseconds since 1970; 0 where there was none. It only grows,
    /// also where the clock is set back: so a recovery can tell a write from what came before it.
    pub written: u64,
    /// When the oldest pending byte was written, about.
    pub oldest: Option<Instant>,
    pub handles: SmallVec<[HandleId; 1]>,
    pub engine_opens: u32,
    pub passthrough_opens: u32,
    pub cached_opens: u32,
    /// The drain queue looks at it when it is old.
    pub aging: bool,
    /// Handles that may write.
    pub writers: u32,
    /// A client process writes past the kernel.
    pub door: Option<Box<crate::lease::Door>>,
    /// The word of the arena under which processes that read past the kernel were told where the bytes lie.
    pub listed: Option<u32>,
    /// Lists of chunks in use: what they name is not changed in place.
    pub holds: u32,
    /// Counts changes of its bytes and of its length.
    pub changes: u64,
    /// Whether its writers closed it.
    pub ending: Ending,
    /// A writer of it died of a signal, or an earlier firnd died while it was open, and it was not emptied
    /// since.
    pub cut: bool,
    /// Drained bytes that are still in the arena.
    pub cache: crate::cache::Cached,
    /// No name leads to it any more.
    pub unlinked: bool,
    /// The [`Engine::privileges_epoch`](crate::Engine) in which it was seen to have no privileges; 0: never.
    pub plain_in: u32,
}

/// A file that firnd has something to do with.
pub(crate) struct File<B: Backing> {
    pub inode: Arc<Inode<B>>,
    /// The lane that its data is drained through.
    pub lane: LaneIndex,
    state: Mutex<FileState<B>>,
    /// Some I/O or exclusive use ended.
    quiet: Condvar,
}

/// Times so much in the future are of the present: the clock that stamps files runs in ticks, and writes within one of
/// them get later ones.
const FUTURE_NS_MAX: u64 = 2 * TICK_NS_MAX as u64;

/// The latest time that a write can have had by now.
pub(crate) fn latest_ns() -> u64 {
    Time::now().to_ns().saturating_add(FUTURE_NS_MAX)
}

/// There is one for each held file, and there may be 10^5 of them. What few files have is boxed.
const _: () = assert!(size_of::<File<firn_backing::DirBacking>>() <= 392);

impl<B: Backing> File<B> {
    /// Its path as a person may read it.
    pub(crate) fn shown(&self) -> String {
        firn_format::quote::quoted(&self.inode.paths().into_iter().next().unwrap_or_default())
    }

    pub(crate) fn new(inode: Arc<Inode<B>>) -> Self {
        let state = FileState {
            extents: Extents::default(),
            pieces: SmallMap::default(),
            partial: 0,
            voids: 0,
            pending: 0,
            bound: None,
            reader: None,
            writer: None,
            inflight: ThinVec::new(),
            exclusive: false,
            settling: false,
            tail: None,
            force_to: 0,
            fresh: 0,
            queued: false,
            cursor: 0,
            failure: None,
            waiters: ThinVec::new(),
            mtime: None,
            written: 0,
            oldest: None,
            handles: SmallVec::new(),
            engine_opens: 0,
            passthrough_opens: 0,
            cached_opens: 0,
            aging: false,
            writers: 0,
            door: None,
            listed: None,
            holds: 0,
            changes: 0,
            ending: Ending::Closed,
            cut: false,
            cache: Default::default(),
            unlinked: false,
            plain_in: 0,
        };
        Self {
            inode,
            lane: LaneIndex::FIRST,
            state: Mutex::new(state),
            quiet: Condvar::new(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, FileState<B>> {
        self.state.lock()
    }

    /// The lock, if nobody has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, FileState<B>>> {
        self.state.try_lock()
    }

    /// Takes the backing file for the caller alone: no drain of it is under way until
    /// [`File::end_exclusive`]. Waits for the I/O in flight, not for pending data. The lock is to be let go
    /// while the backing works: until the end writes are appended, so that they count as later ones.
    pub(crate) fn begin_exclusive(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.exclusive || state.settling || !state.inflight.is_empty() {
            state.wait(&self.quiet);
        }
        state.exclusive = true;
        state
    }

    pub(crate) fn end_exclusive(&self, state: &mut FileState<B>) {
        state.exclusive = false;
        self.quiet.notify_all();
    }

    /// The lock, once no truncation or the like is under way.
    pub(crate) fn lock_settled(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.exclusive {
            state.wait(&self.quiet);
        }
        state
    }

    /// The lock, once nobody sets a time in the backing that is older than the caller's.
    pub(crate) fn lock_to_set_times(&self) -> MutexGuard<'_, FileState<B>> {
        let mut state = self.state.lock();
        while state.settling {
            state.wait(&self.quiet);
        }
        state
    }

    /// Keeps a descriptor that was just opened, unless there is one already; returns the one that counts.
    pub(crate) fn keep_writer(&self, opened: BackingFile<B>) -> Arc<BackingFile<B>> {
        // Closed after the lock was let go, if nobody needs it.
        let opened = Arc::new(opened);
        let mut state = self.lock();
        Arc::clone(state.writer.get_or_insert_with(|| Arc::clone(&opened)))
    }

    /// The same for one that can only read.
    pub(crate) fn keep_reader(&self, opened: BackingFile<B>) -> Arc<BackingFile<B>> {
        let opened = Arc::new(opened);
        let mut state = self.lock();
        Arc::clone(state.reader.get_or_insert_with(|| Arc::clone(&opened)))
    }

    pub(crate) fn io_ended(&self) {
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

    /// Whether nobody needs the descriptors of the backing file now.
    pub(crate) fn may_close(&self) -> bool {
        self.handles.is_empty() && self.inflight.is_empty() && !self.exclusive && !self.unlinked
    }

    /// Its bytes or its length change now. The time is in `written`: to be stored in the record of a piece.
    pub(crate) fn touch(&mut self) {
        let now = Time::now_after(self.mtime).to_ns();
        self.written = now.max(self.written.saturating_add(1));
        // The present, where the clock was set back.
        let is_now = self.written - now <= FUTURE_NS_MAX;
        self.mtime = Some(Time::from_ns(if is_now { self.written } else { now }));
    }

    /// Its bytes were changed by a client, which says that it was at `modified`. False where the record has to get
    /// another time: a client that goes on in its next lease may be a few writes of the same tick behind; and what
    /// cannot be is taken as now.
    pub(crate) fn touch_at(&mut self, modified: u64) -> bool {
        if modified == 0
            || modified > latest_ns()
            || modified.saturating_add(FUTURE_NS_MAX) < self.written
        {
            self.touch();
            return false;
        }
        let is_behind = modified < self.written;
        self.written = if is_behind {
            self.written.saturating_add(1)
        } else {
            modified
        };
        self.mtime = Some(Time::from_ns(self.written));
        !is_behind
    }

    /// Lets the record of some piece have the time of the last write, which no new piece tells.
    pub(crate) fn keep_time(&self, arena: &Arena) {
        if let Some((piece, _)) = self.pieces.iter().next() {
            arena.set_modified(*piece, self.written);
        }
    }

    /// Takes in a piece that was just published or extended by `extent.len`.
    pub(crate) fn insert(&mut self, arena: &Arena, offset: u64, extent: Extent) -> u64 {
        self.changes += 1;
        self.unlist(arena);
        self.cache.drop_range(arena, offset..offset + extent.len);
        let mut cut: Vec<(PieceRef, u64)> = Vec::new();
        self.extents
            .insert(offset, extent, &mut |piece, bytes| cut.push((piece, bytes)));
        let used = self.pieces.get(&extent.piece).copied().unwrap_or_default();
        let used = PieceUse {
            len: used.len + extent.len,
            live: used.live + extent.len,
        };
        self.pieces.insert(extent.piece, used);
        self.pending += extent.len;
        self.tail = Some(extent.piece);
        let mut cancelled = 0;
        for (piece, bytes) in cut {
            cancelled += bytes;
            self.retire(arena, piece, bytes);
        }
        self.check();
        cancelled
    }

    /// `bytes` of a piece are not pending any more, and their room is free.
    pub(crate) fn retire(&mut self, arena: &Arena, piece: PieceRef, bytes: u64) {
        self.unlist(arena);
        self.settle_piece(arena, piece, bytes);
        arena.release(piece.slab, bytes);
    }

    /// `bytes` of a piece are not pending any more; they keep their room.
    pub(crate) fn settle_piece(&mut self, arena: &Arena, piece: PieceRef, bytes: u64) {
        let used = self
            .pieces
            .get_mut(&piece)
            .expect("an extent's piece is known");
        let was_partial = used.live < used.len;
        used.live -= bytes;
        let dead = used.live == 0;
        match (was_partial, dead) {
            (false, false) => self.partial += 1,
            (true, true) => self.partial -= 1,
            _ => {}
        }
        if dead {
            self.pieces.remove(&piece);
            if self.tail == Some(piece) {
                self.tail = None;
            }
            // Before its record is dead: a crash in between must not lose it.
            if arena.modified(piece) >= self.written {
                self.keep_time(arena);
            }
        }
        self.pending -= bytes;
        if dead {
            arena.mark_dead(piece);
        }
    }

    /// Drops every extent of `range` up to `sequence`; returns the bytes.
    pub(crate) fn cut(&mut self, arena: &Arena, range: Range<u64>, sequence: u64) -> u64 {
        self.changes += 1;
        self.unlist(arena);
        self.cache.drop_range(arena, range.clone());
        let mut gone: Vec<(PieceRef, u64)> = Vec::new();
        self.extents.remove(range, &mut |_, e| {
            let take = e.sequence <= sequence;
            if take {
                gone.push((e.piece, e.len));
            }
            take
        });
        self.tail = None;
        let bytes = gone.iter().map(|(_, bytes)| bytes).sum();
        for (piece, bytes) in gone {
            self.retire(arena, piece, bytes);
        }
        self.check();
        bytes
    }

    /// Asserts the invariants of this file and of its maps. To be called after each change of what is pending. Of a
    /// file with many pieces, which would take long, at some of them.
    #[inline]
    pub(crate) fn check(&self) {
        const PIECES_EACH_TIME: usize = 32;
        const CHANGES_BETWEEN: u64 = 64;
        if cfg!(debug_assertions)
            && (self.pieces.len() <= PIECES_EACH_TIME
                || self.changes.is_multiple_of(CHANGES_BETWEEN))
        {
            self.assert_invariants();
        }
    }

    fn assert_invariants(&self) {
        self.extents.assert_invariants();
        self.cache.extents().assert_invariants();
        let mut live: std::collections::BTreeMap<PieceRef, u64> = Default::default();
        for (offset, extent) in self.extents.iter() {
            *live.entry(extent.piece).or_default() += extent.len;
            let cached = self
                .cache
                .extents()
                .within(offset..offset + extent.len)
                .next();
            assert!(
                cached.is_none(),
                "bytes at {offset} are pending and drained: {cached:?}"
            );
        }
        assert_eq!(
            self.pending,
            live.values().sum::<u64>(),
            "pending bytes are those of the extents"
        );
        assert_eq!(
            self.pieces.len(),
            live.len(),
            "pieces are those of the extents"
        );
        let mut partial: u32 = 0;
        for (piece, used) in self.pieces.iter() {
            let bytes = live.get(piece).copied();
            assert_eq!(bytes, Some(used.live), "pending bytes of {piece:?}");
            assert!(used.live <= used.len, "{piece:?} has {used:?}");
            partial += u32::from(used.live < used.len);
        }
        assert_eq!(self.partial, partial, "pieces that are partly pending");
        assert!(
            self.pending == 0 || self.bound.is_some(),
            "pending bytes of a file that is not bound"
        );
        assert!(
            !self.exclusive || self.inflight.is_empty(),
            "a drain while the file is used alone"
        );
    }

    /// Asserts that a recovery would find the time of the last write. Of a file that no client writes: its records are
    /// the client's to spoil.
    pub(crate) fn assert_time(&self, arena: &Arena) {
        let newest = self
            .pieces
            .iter()
            .map(|(piece, _)| arena.modified(*piece))
            .max();
        assert!(
            newest.is_none_or(|newest| newest >= self.written),
            "no piece has the time of the last write"
        );
    }

    pub(crate) fn is_inflight(&self, range: &Range<u64>) -> bool {
        self.inflight
            .iter()
            .any(|r| r.start < range.end && range.start < r.end)
    }

    /// The waiters whose data is in the backing.
    pub(crate) fn take_satisfied_waiters(&mut self) -> ThinVec<Waiter> {
        if self.waiters.is_empty() {
            return ThinVec::new();
        }
        let oldest = self
            .extents
            .iter()
            .map(|(_, e)| e.sequence)
            .min()
            .unwrap_or(u64::MAX);
        let (satisfied, waiting) = take(&mut self.waiters)
            .into_iter()
            .partition(|w| oldest > w.until);
        self.waiters = waiting;
        satisfied
    }

    /// An error that no program was told yet; it counts as told now.
    pub(crate) fn take_unreported_failure(&mut self) -> Option<Errno> {
        let failure = self.failure.as_mut().filter(|f| !f.told)?;
        failure.told = true;
        Some(failure.errno)
    }
}
