//! Pending data of a file: bytes that were written to the arena (shared memory) and are not in the backing yet.
//!
//! Terms
//! * A *piece* is a record in the arena that describes written bytes. An *extent* is a range of the file whose newest
//!   bytes are in one piece.
//! * A *live* byte of a piece is pending. All other bytes of the piece were overwritten, cut or drained. A piece
//!   without live bytes is *dead*.
//! * The *tail* is the file's last piece, which an append may extend.
//!
//! Invariants
//! * `bytes` is the sum of the extents. Each piece in `pieces` has `0 < live <= len`, and its extents have `live` bytes
//!   together.
//! * `partial` counts the pieces with `live < len`.
//! * The file has a file id (its number in the journal of the arena) while anything is pending.
//! * While anything is pending, the record of at least one piece has the time of the last write
//!   ([`Pending::recorded_ns`]), so that a recovery finds this time. A time that a program set is in the journal,
//!   together with the value of `recorded_ns` at that moment.
//!
//! docs/internals/pending.md

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU64;
use std::ops::Range;

use firn_arena::{Arena, PieceRef};
use firn_backing::{TICK_NS_MAX, Time};

use crate::extents::{Extent, Extents};
use crate::small_map::SmallMap;

/// Number that identifies a file with pending data in the journal and in piece records. It is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId(NonZeroU64);

impl FileId {
    /// Returns the id with this number; `None` for 0, which no file has.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }

    /// Returns the number, as records store it.
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

/// How much of a piece is pending.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PieceUse {
    /// Length of the piece in bytes.
    pub len: u64,
    /// Number of its bytes that are pending.
    pub live: u64,
}

impl PieceUse {
    /// Returns whether some bytes of the piece are not pending.
    fn is_partial(&self) -> bool {
        self.live < self.len
    }
}

/// Result of laying the pieces of a file over each other: the newest bytes of each range, and the pieces that contain
/// these bytes.
#[derive(Default)]
pub(crate) struct PieceLayers {
    pub extents: Extents,
    pub pieces: SmallMap<PieceRef, PieceUse>,
}

/// Time of the last write to a file with pending data, as a recovery found it.
#[derive(Clone, Copy)]
pub(crate) struct LastWrite {
    /// The modification time that programs saw last; `None` if it is not known.
    pub mtime: Option<Time>,
    /// The time in the piece records, in nanoseconds since 1970; 0 if there is none.
    pub recorded_ns: u64,
}

/// The pending part of a file's state.
#[derive(Default)]
pub(crate) struct Pending {
    extents: Extents,
    pieces: SmallMap<PieceRef, PieceUse>,
    /// Sum of the bytes of all extents.
    bytes: u64,
    /// Number of pieces of which only a part is pending.
    partial: u32,
    /// Approximate number of the file's drained ranges in the journal.
    drained_ranges: u32,
    /// The file's id, while it has one.
    file_id: Option<FileId>,
    /// The piece that the last write made or extended. Only this piece may be extended, and only until a cut uses its
    /// sequence.
    tail: Option<PieceRef>,
    /// Time of the last write or utimens(2) while data is pending.
    mtime: Option<Time>,
    /// Time of the last write as piece records store it, in nanoseconds since 1970; 0 if there was none. It only grows,
    /// even if the clock is set back, so a recovery can order writes by this time.
    recorded_ns: u64,
}

/// Tolerance for coarse clocks: a time at most this far ahead counts as now. The clock that stamps files runs in
/// ticks, and each write within one tick gets a later time than the one before.
const FUTURE_NS_MAX: u64 = 2 * TICK_NS_MAX as u64;

/// Returns the latest time that a write can have had by now, in nanoseconds since 1970.
pub(crate) fn latest_ns() -> u64 {
    Time::now().to_ns().saturating_add(FUTURE_NS_MAX)
}

impl Pending {
    /// Makes the record of the pending bytes of file `id` after a crash or restart. `layers` has the newest bytes of
    /// each file range, as recovery found them in the arena. `drained_ranges` is the number of the file's drained
    /// ranges in the journal.
    pub(crate) fn recovered(
        id: FileId,
        layers: PieceLayers,
        drained_ranges: u32,
        last_write: LastWrite,
    ) -> Self {
        let uses = || layers.pieces.iter().map(|(_, used)| used);
        let partial_count = uses().filter(|used| used.is_partial()).count();
        let live_bytes = uses().map(|used| used.live).sum();
        let pending = Self {
            partial: partial_count as u32,
            bytes: live_bytes,
            extents: layers.extents,
            pieces: layers.pieces,
            drained_ranges,
            file_id: Some(id),
            tail: None,
            mtime: last_write.mtime,
            recorded_ns: last_write.recorded_ns,
        };
        pending.check_all();
        pending
    }

    // ---- pending bytes ---------------------------------------------------------------------

    /// Returns the number of pending bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    pub(crate) fn extents(&self) -> &Extents {
        &self.extents
    }

    /// Returns the offset after the last pending byte, or 0 if none is pending. The file has at least this length.
    pub(crate) fn end(&self) -> u64 {
        self.extents.end()
    }

    /// Returns the lowest sequence of all pending bytes.
    pub(crate) fn oldest_sequence(&self) -> Option<u64> {
        self.extents.iter().map(|(_, extent)| extent.sequence).min()
    }

    /// Returns the highest sequence of all pending bytes.
    pub(crate) fn newest_sequence(&self) -> Option<u64> {
        self.extents.iter().map(|(_, extent)| extent.sequence).max()
    }

    pub(crate) fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    // ---- changes ---------------------------------------------------------------------------

    /// Adds the bytes of a piece (a recorded append) that was just published, or by which the file's last piece was
    /// just extended. Returns the number of older pending bytes that they replace.
    pub(crate) fn insert(&mut self, arena: &Arena, offset: u64, extent: Extent) -> u64 {
        let mut replaced: Vec<(PieceRef, u64)> = Vec::new();
        self.extents.insert(offset, extent, &mut |piece, bytes| {
            replaced.push((piece, bytes));
        });
        let mut used = self.pieces.get(&extent.piece).copied().unwrap_or_default();
        used.len += extent.len;
        used.live += extent.len;
        self.pieces.insert(extent.piece, used);
        self.bytes += extent.len;
        // The tail is the file's last piece, which the next append may extend.
        self.tail = Some(extent.piece);
        let mut replaced_bytes = 0;
        for (piece, bytes) in replaced {
            replaced_bytes += bytes;
            self.free_bytes(arena, piece, bytes);
        }
        self.check();
        replaced_bytes
    }

    /// Drops all pending bytes of `range` from appends with a sequence up to `sequence`. Returns their number. A piece
    /// (a recorded append) without pending bytes dies.
    pub(crate) fn drop_extents(&mut self, arena: &Arena, range: Range<u64>, sequence: u64) -> u64 {
        let mut dropped: Vec<(PieceRef, u64)> = Vec::new();
        self.extents.remove(range, &mut |_, extent| {
            let must_drop = extent.sequence <= sequence;
            if must_drop {
                dropped.push((extent.piece, extent.len));
            }
            must_drop
        });
        // The caller may have used the sequence of the last piece, so later bytes need a new piece with a later
        // sequence.
        self.tail = None;
        let dropped_bytes = dropped.iter().map(|(_, bytes)| bytes).sum();
        for (piece, bytes) in dropped {
            self.free_bytes(arena, piece, bytes);
        }
        self.check();
        dropped_bytes
    }

    /// Removes an extent that was drained. Its bytes in the slab remain in use until the caller caches or releases
    /// them.
    pub(crate) fn remove_drained(&mut self, arena: &Arena, offset: u64, extent: Extent) {
        let range = offset..offset + extent.len;
        self.extents
            .remove(range, &mut |_, known| known.piece == extent.piece);
        self.end_pending_bytes(arena, extent.piece, extent.len);
    }

    /// Records that `bytes` of a piece are not pending any more, and frees them in the slab.
    fn free_bytes(&mut self, arena: &Arena, piece: PieceRef, bytes: u64) {
        self.end_pending_bytes(arena, piece, bytes);
        arena.release_bytes(piece.slab, bytes);
    }

    /// Records that `bytes` of a piece (a recorded append) are not pending any more. If none of its bytes is pending
    /// now, the piece dies: a recovery ignores its record. The bytes remain in use in the slab of the piece.
    fn end_pending_bytes(&mut self, arena: &Arena, piece: PieceRef, bytes: u64) {
        let piece_use = self
            .pieces
            .get_mut(&piece)
            .expect("an extent's piece is known");
        let was_partial = piece_use.is_partial();
        piece_use.live -= bytes;
        let is_dead = piece_use.live == 0;
        // A piece is partial if some of its bytes are pending and some are not. So a dead piece is not partial.
        if !was_partial && !is_dead {
            self.partial += 1;
        } else if was_partial && is_dead {
            self.partial -= 1;
        }
        self.bytes -= bytes;
        if is_dead {
            self.remove_dead_piece(arena, piece);
        }
    }

    /// Removes a piece without pending bytes, and marks its record as dead. Stores the time of the last write in
    /// another piece if this record may be the only one with that time.
    fn remove_dead_piece(&mut self, arena: &Arena, piece: PieceRef) {
        self.pieces.remove(&piece);
        if self.tail == Some(piece) {
            self.tail = None;
        }
        // The time is stored in another piece before this record is dead, so that a crash in between does not lose the
        // time.
        if arena.modified(piece) >= self.recorded_ns {
            self.store_time_in_piece(arena);
        }
        arena.mark_dead(piece);
    }

    /// Returns whether any piece (a recorded append) would be partly pending after `drained` is drained. If so, the
    /// drained range must be in the journal: otherwise a recovery would count the whole piece as pending.
    pub(crate) fn would_leave_partial_pieces(&self, drained: &[(u64, Extent)]) -> bool {
        let mut bytes_by_piece: HashMap<PieceRef, u64> = HashMap::new();
        for (_, extent) in drained {
            *bytes_by_piece.entry(extent.piece).or_default() += extent.len;
        }
        let mut partial_count = self.partial;
        for (piece, drained_bytes) in &bytes_by_piece {
            let used = self.pieces.get(piece).expect("an extent's piece is known");
            let would_remain_partial = used.live > *drained_bytes;
            if would_remain_partial && !used.is_partial() {
                partial_count += 1;
            } else if used.is_partial() && !would_remain_partial {
                partial_count -= 1;
            }
        }
        partial_count > 0
    }

    // ---- file id, drained ranges, tail -------------------------------------------------------

    pub(crate) fn file_id(&self) -> Option<FileId> {
        self.file_id
    }

    /// Records that the file now has this id in the journal.
    pub(crate) fn set_file_id(&mut self, id: FileId) {
        debug_assert!(self.file_id.is_none(), "a file gets a second file id");
        self.file_id = Some(id);
    }

    /// Records that the file's id has ended in the journal. No byte of the file may be pending.
    pub(crate) fn end_file_id(&mut self) {
        debug_assert!(self.is_empty(), "pending bytes of a file without a file id");
        self.file_id = None;
        self.drained_ranges = 0;
    }

    pub(crate) fn drained_ranges(&self) -> u32 {
        self.drained_ranges
    }

    pub(crate) fn count_drained_range(&mut self) {
        self.drained_ranges += 1;
    }

    pub(crate) fn forget_drained_ranges(&mut self) {
        self.drained_ranges = 0;
    }

    /// Returns whether this is the tail, which may be extended.
    pub(crate) fn is_tail(&self, piece: PieceRef) -> bool {
        self.tail == Some(piece)
    }

    /// Makes the next write begin a new piece with a later sequence, even if it continues the last one.
    pub(crate) fn stop_extending_last_piece(&mut self) {
        self.tail = None;
    }

    // ---- time ------------------------------------------------------------------------------

    /// Returns the modification time that programs see while data is pending.
    pub(crate) fn mtime(&self) -> Option<Time> {
        self.mtime
    }

    pub(crate) fn set_mtime(&mut self, mtime: Option<Time>) {
        self.mtime = mtime;
    }

    /// Takes the time that must be set in the backing after everything is drained.
    pub(crate) fn take_mtime(&mut self) -> Option<Time> {
        self.mtime.take()
    }

    /// Returns the time of the last write as piece records store it, in nanoseconds since 1970.
    pub(crate) fn recorded_ns(&self) -> u64 {
        self.recorded_ns
    }

    /// Records that bytes or the length change now. The caller then stores [`Pending::recorded_ns`] in the record of a
    /// piece.
    pub(crate) fn record_write(&mut self) {
        let now_ns = Time::now_after(self.mtime).to_ns();
        self.recorded_ns = now_ns.max(self.recorded_ns.saturating_add(1));
        // If the clock was set back, `recorded_ns` is ahead of the clock. Programs then see the present time.
        let is_ahead = self.recorded_ns - now_ns > FUTURE_NS_MAX;
        let shown_ns = if is_ahead { now_ns } else { self.recorded_ns };
        self.mtime = Some(Time::from_ns(shown_ns));
    }

    /// Records that a client process with direct access to the arena changed bytes at the time `modified_ns`, which it
    /// has stored in its piece record. An impossible time counts as now.
    ///
    /// Returns whether the record may keep this time. If not, because the time is impossible or earlier than the last
    /// write, the caller must store [`Pending::recorded_ns`] in the record.
    pub(crate) fn record_client_write(&mut self, modified_ns: u64) -> bool {
        let is_impossible = modified_ns == 0
            || modified_ns > latest_ns()
            || modified_ns.saturating_add(FUTURE_NS_MAX) < self.recorded_ns;
        if is_impossible {
            self.record_write();
            return false;
        }
        // Each write within one clock tick gets a later time than the one before. A client that begins its next slab
        // may not know the latest of these times, so an earlier time is no error.
        let is_too_early = modified_ns < self.recorded_ns;
        self.recorded_ns = if is_too_early {
            // As for any other write within the tick: the smallest later time.
            self.recorded_ns.saturating_add(1)
        } else {
            modified_ns
        };
        self.mtime = Some(Time::from_ns(self.recorded_ns));
        !is_too_early
    }

    /// Stores the time of the last write in the record of any piece, for a change that makes no new piece.
    pub(crate) fn store_time_in_piece(&self, arena: &Arena) {
        if let Some((piece, _)) = self.pieces.iter().next() {
            arena.set_modified(*piece, self.recorded_ns);
        }
    }

    // ---- invariants --------------------------------------------------------------------------

    /// Asserts the invariants. For a file with many pieces, checks only at some of the calls, because each check reads
    /// all pieces.
    #[inline]
    fn check(&self) {
        const PIECES_EACH_TIME: usize = 32;
        const PIECES_BETWEEN: usize = 64;
        if cfg!(debug_assertions)
            && (self.pieces.len() <= PIECES_EACH_TIME
                || self.pieces.len().is_multiple_of(PIECES_BETWEEN))
        {
            self.assert_invariants();
        }
    }

    fn check_all(&self) {
        if cfg!(debug_assertions) {
            self.assert_invariants();
        }
    }

    /// Asserts that the counts of pending bytes and pieces (recorded appends) agree with the extents, which are the
    /// file ranges with the piece of their newest bytes.
    fn assert_invariants(&self) {
        self.extents.assert_invariants();
        let mut bytes_by_piece: BTreeMap<PieceRef, u64> = BTreeMap::new();
        for (_, extent) in self.extents.iter() {
            *bytes_by_piece.entry(extent.piece).or_default() += extent.len;
        }
        let sum: u64 = bytes_by_piece.values().sum();
        assert_eq!(self.bytes, sum, "pending bytes are the sum of the extents");
        assert_eq!(
            self.pieces.len(),
            bytes_by_piece.len(),
            "pieces are those of the extents"
        );
        let mut partial_count: u32 = 0;
        for (piece, used) in self.pieces.iter() {
            let bytes = bytes_by_piece.get(piece).copied();
            assert_eq!(bytes, Some(used.live), "pending bytes of {piece:?}");
            assert!(used.live <= used.len, "{piece:?} has {used:?}");
            partial_count += u32::from(used.is_partial());
        }
        assert_eq!(
            self.partial, partial_count,
            "pieces that are partly pending"
        );
        assert!(
            self.bytes == 0 || self.file_id.is_some(),
            "pending bytes of a file without a file id"
        );
    }

    /// Asserts that a recovery would find the time of the last write. Not called for a file with a grant, as its client
    /// may overwrite the piece records.
    pub(crate) fn assert_time(&self, arena: &Arena) {
        let times = self.pieces.iter().map(|(piece, _)| arena.modified(*piece));
        let latest_time = times.max();
        assert!(
            latest_time.is_none_or(|latest| latest >= self.recorded_ns),
            "no piece has the time of the last write"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use firn_arena::Identity;
    use firn_format::geometry::Geometry;
    use firn_format::slab::Class;

    use super::*;

    struct Scene {
        arena: Arena,
        lease: firn_arena::Lease,
        pending: Pending,
        _dir: tempfile::TempDir,
    }

    impl Scene {
        fn new() -> Self {
            let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
            let identity = Identity {
                backing: PathBuf::from("/backing"),
                dev: 1,
                ino: 1,
            };
            let geometry = Geometry::new(1 << 20, 128 << 10).expect("a valid geometry");
            let path = dir.path().join("arena");
            let arena = Arena::create(&path, geometry, &identity).expect("an arena");
            let lease = arena.lease_slab(Class::Small).expect("a lease");
            let mut pending = Pending::default();
            pending.set_file_id(FileId::new(1).expect("not 0"));
            Self {
                arena,
                lease,
                pending,
                _dir: dir,
            }
        }

        /// Publishes a piece and inserts its extent. Returns the extent and the number of bytes that it replaced.
        fn write(&mut self, offset: u64, len: u64) -> (Extent, u64) {
            self.pending.record_write();
            let reserved = self.lease.reserve(1, offset, len).expect("room");
            let sequence = self.arena.next_sequence();
            let modified = self.pending.recorded_ns();
            let lease = &mut self.lease;
            let piece = self.arena.publish_piece(
                lease,
                reserved,
                firn_arena::NewPiece {
                    file_id: 1,
                    offset,
                    sequence,
                    modified,
                },
            );
            let extent = Extent {
                len,
                piece,
                position: reserved.position,
                sequence,
            };
            let replaced = self.pending.insert(&self.arena, offset, extent);
            (extent, replaced)
        }
    }

    #[test]
    fn a_newer_write_replaces_what_it_covers() {
        let mut scene = Scene::new();
        scene.write(0, 100);
        let (_, replaced) = scene.write(50, 100);
        assert_eq!(replaced, 50);
        assert_eq!(scene.pending.bytes(), 150);
        assert_eq!(scene.pending.end(), 150);
        assert_eq!(scene.pending.piece_count(), 2);
        let (_, replaced) = scene.write(0, 150);
        assert_eq!(replaced, 150);
        assert_eq!(scene.pending.piece_count(), 1);
    }

    #[test]
    fn a_drained_range_is_recorded_only_where_a_piece_stays_partly_pending() {
        let mut scene = Scene::new();
        let (first, _) = scene.write(0, 100);
        let (second, _) = scene.write(100, 100);
        let half = Extent { len: 50, ..second };
        assert!(!scene.pending.would_leave_partial_pieces(&[(0, first)]));
        assert!(scene.pending.would_leave_partial_pieces(&[(100, half)]));
        let pending = &mut scene.pending;
        pending.remove_drained(&scene.arena, 100, half);
        assert_eq!(pending.bytes(), 150);
        let rest = Extent {
            len: 50,
            position: second.position + 50,
            ..second
        };
        assert!(pending.would_leave_partial_pieces(&[(0, first)]));
        assert!(!pending.would_leave_partial_pieces(&[(0, first), (150, rest)]));
    }

    #[test]
    fn the_last_piece_may_be_extended_until_its_sequence_is_used_to_cut() {
        let mut scene = Scene::new();
        let (first, _) = scene.write(0, 10);
        let (second, _) = scene.write(20, 10);
        assert!(!scene.pending.is_tail(first.piece));
        assert!(scene.pending.is_tail(second.piece));
        scene
            .pending
            .drop_extents(&scene.arena, 25..30, second.sequence);
        assert!(!scene.pending.is_tail(second.piece));
    }

    #[test]
    fn a_cut_leaves_what_is_newer() {
        let mut scene = Scene::new();
        let (first, _) = scene.write(0, 10);
        scene.write(10, 10);
        let cut = scene
            .pending
            .drop_extents(&scene.arena, 0..u64::MAX, first.sequence);
        assert_eq!(cut, 10);
        assert_eq!(scene.pending.oldest_sequence(), Some(first.sequence + 1));
    }

    #[test]
    fn the_time_of_the_last_write_outlives_the_piece_that_told_it() {
        let mut scene = Scene::new();
        scene.write(0, 10);
        let (second, _) = scene.write(20, 10);
        let pending = &mut scene.pending;
        pending.remove_drained(&scene.arena, 20, second);
        pending.assert_time(&scene.arena);
    }

    #[test]
    fn times_of_writes_only_grow() {
        let mut pending = Pending::default();
        pending.record_write();
        let first = pending.recorded_ns();
        pending.record_write();
        assert!(pending.recorded_ns() > first);
        let last = pending.recorded_ns();
        assert!(!pending.record_client_write(0), "no time is taken as now");
        assert!(pending.recorded_ns() > last);
        let next = pending.recorded_ns() + 1;
        assert!(pending.record_client_write(next));
        assert_eq!(pending.recorded_ns(), next);
    }
}
