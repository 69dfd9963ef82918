//! Publishing pieces, and what keeps their slabs: live bytes and other uses.
//!
//! Invariants
//! * A slab is free when nothing uses it: no live byte, no lease, no I/O, no holder.
//! * A piece of which nothing is pending is marked dead before its slab can be leased again.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::append::{RecordTable, Room};
use firn_format::piece::{PIECE_BYTES, Piece, dead, word};
use firn_format::slab::{Class, SlabState, slab_word};

use crate::arena::{Arena, PIN, PieceRef, SlabRef};
use crate::lease::Lease;
use crate::map::{Map, probe};
use crate::pool::Pool;

/// The piece records of a chunk.
struct Records<'a> {
    map: &'a Map,
    /// Of the first record, from the start of the arena.
    first: u64,
}

impl RecordTable for Records<'_> {
    fn word(&self, record: u32, word: u64) -> &AtomicU64 {
        self.map
            .u64(self.first + u64::from(record) * PIECE_BYTES + word)
    }

    fn before_store(&self) {
        probe();
    }
}

impl Arena {
    /// Publishes what was filled at `room` as a new piece, `modified` at that time (nanoseconds since 1970). The
    /// slab counts the bytes as live.
    pub fn publish(
        &self,
        lease: &mut Lease,
        room: Room,
        (file, offset): (u64, u64),
        sequence: u64,
        modified: u64,
    ) -> PieceRef {
        let piece = Piece {
            file,
            offset,
            sequence,
            position: room.position,
            len: room.len,
        };
        let slab = lease.slab;
        self.add_uses(slab, piece.len.into());
        let record = lease
            .cursor
            .publish_piece(&self.records(slab), piece, modified)
            .expect("nobody else ends a lease of firnd's own");
        let header = self.geometry().slab_header_offset(slab.chunk, slab.slab);
        probe();
        self.map()
            .u32(header + slab_word::PUBLISHED)
            .fetch_add(1, Ordering::Release);
        PieceRef { slab, record }
    }

    /// Publishes what was filled directly behind the last piece of the lease as more of it; returns
    /// the piece and its sequence.
    pub fn extend(&self, lease: &mut Lease, len: u32, modified: u64) -> (PieceRef, u64) {
        let slab = lease.slab;
        self.add_uses(slab, len.into());
        lease
            .cursor
            .extend_piece(&self.records(slab), len, modified)
            .expect("nobody else freezes a piece of firnd's own");
        let (record, piece) = lease.cursor.last().expect("it was just extended");
        (PieceRef { slab, record }, piece.sequence)
    }

    fn records(&self, slab: SlabRef) -> Records<'_> {
        Records {
            map: self.map(),
            first: self.geometry().record_offset(slab.chunk, 0),
        }
    }

    /// `bytes` of a piece are not pending any more; `last` says that none is left. A dead piece is
    /// marked before its slab can be reused.
    pub fn retire(&self, at: PieceRef, bytes: u32, last: bool) {
        if last {
            self.mark_dead(at);
        }
        self.release_uses(at.slab, u64::from(bytes));
    }

    /// `bytes` of a slab are not used any more.
    pub fn release(&self, slab: SlabRef, bytes: u64) {
        self.release_uses(slab, bytes);
    }

    /// Nothing of a piece is pending.
    pub fn mark_dead(&self, at: PieceRef) {
        let base = self.geometry.record_offset(at.slab.chunk, at.record);
        let header = self
            .geometry
            .slab_header_offset(at.slab.chunk, at.slab.slab);
        let generation = self
            .map
            .u64(header + slab_word::GENERATION)
            .load(Ordering::Relaxed);
        probe();
        self.map
            .u64(base + word::SEAL)
            .store(dead(generation), Ordering::Release);
    }

    /// The time of the last write to a piece, nanoseconds since 1970, as its record has it.
    pub fn modified(&self, at: PieceRef) -> u64 {
        self.modified_word(at).load(Ordering::Relaxed)
    }

    /// Notes the time of a write to a piece, or of one to its file of which no other piece tells.
    pub fn set_modified(&self, at: PieceRef, modified: u64) {
        probe();
        self.modified_word(at).store(modified, Ordering::Relaxed);
    }

    fn modified_word(&self, at: PieceRef) -> &AtomicU64 {
        self.map
            .u64(self.geometry.record_offset(at.slab.chunk, at.record) + word::MODIFIED)
    }

    /// Keeps a slab, and its data where it is, while an I/O reads it.
    pub fn pin(&self, slab: SlabRef) {
        self.uses(slab).fetch_add(PIN, Ordering::AcqRel);
        self.homes.enter(slab.chunk);
    }
    /// Ends a [`Arena::pin`].
    pub fn unpin(&self, slab: SlabRef) {
        self.homes.leave(slab.chunk);
        self.release_uses(slab, PIN);
    }

    /// Keeps a slab, and its data where it is, for any time: who waits for room does not wait for this chunk
    /// to move.
    pub fn hold(&self, slab: SlabRef) {
        self.uses(slab).fetch_add(PIN, Ordering::AcqRel);
        self.homes.hold(slab.chunk);
    }
    /// Ends a [`Arena::hold`].
    pub fn let_go(&self, slab: SlabRef) {
        self.homes.let_go(slab.chunk);
        self.release_uses(slab, PIN);
        let memory_used = self.pool.lock().memory_used();
        self.tell_pressure(memory_used);
    }

    pub(crate) fn release_uses(&self, slab: SlabRef, amount: u64) {
        let before = self.uses(slab).fetch_sub(amount, Ordering::AcqRel);
        assert!(
            before >= amount,
            "slab {slab:?} released more often than it was used"
        );
        if before != amount {
            return;
        }
        probe();
        self.slab_state(slab)
            .store(SlabState::Free.to_word(), Ordering::Release);
        let mut pool = self.pool.lock();
        if pool.give(slab.chunk, slab.slab) {
            self.forget_chunk(slab.chunk, &mut pool);
        }
        drop(pool);
        self.tell_free();
    }

    /// A chunk became free: so does its slot.
    pub(crate) fn forget_chunk(&self, chunk: u32, pool: &mut Pool) {
        probe();
        self.chunk_class(chunk)
            .store(Class::to_word(None), Ordering::Release);
        if let Some(home) = self.homes.get(chunk) {
            self.homes.set(chunk, None);
            pool.free_slot(home);
        }
    }

    pub(crate) fn tell_free(&self) {
        if let Some(f) = &*self.on_free.lock() {
            f();
        }
    }
}
