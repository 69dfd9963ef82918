//! Publishing pieces, and what keeps their slabs: live bytes and other uses.
//!
//! Invariants
//! * A slab is free when nothing uses it: no live byte, no lease, no I/O, no holder.
//! * A piece of which nothing is pending is marked dead before its slab can be leased again.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::append::{RecordTable, Room};
use firn_format::piece::{Checked, FROZEN, Piece, dead};
use firn_format::slab::SlabState;

use crate::arena::Arena;
use crate::lease::Lease;
use crate::map::probe;
use crate::pool::Pool;
use crate::refs::{PieceRef, SlabRef};
use crate::tables::Tables;
use crate::uses::PIN;

/// The piece records of a slab.
struct Records<'a> {
    tables: &'a Tables,
    slab: SlabRef,
}

impl RecordTable for Records<'_> {
    fn word(&self, record: u32, word: u64) -> &AtomicU64 {
        let at = PieceRef {
            slab: self.slab,
            record,
        };
        self.tables.record_word(at, word)
    }

    fn before_store(&self) {
        probe();
    }
}

impl Arena {
    /// Publishes what was filled at `room` as a new piece, `modified` at that time (nanoseconds since 1970). The
    /// slab counts the bytes as live.
    pub fn publish_piece(
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
        self.uses.add(slab, piece.len.into());
        let record = lease
            .cursor
            .publish_piece(&self.records(slab), piece, modified)
            .expect("nobody else ends a lease of firnd's own");
        probe();
        self.tables.published(slab).fetch_add(1, Ordering::Release);
        PieceRef { slab, record }
    }

    /// Publishes what was filled directly behind the last piece of the lease as more of it; returns
    /// the piece and its sequence.
    pub fn extend_piece(&self, lease: &mut Lease, len: u32, modified: u64) -> (PieceRef, u64) {
        let slab = lease.slab;
        self.uses.add(slab, len.into());
        lease
            .cursor
            .extend_piece(&self.records(slab), len, modified)
            .expect("nobody else freezes a piece of firnd's own");
        let (record, piece) = lease.cursor.last().expect("it was just extended");
        (PieceRef { slab, record }, piece.sequence)
    }

    /// Counts the first `bytes` of a leased slab as used, though no record tells of them: they are in the backing, too. The piece
    /// is none that a recovery finds.
    pub fn use_without_piece(&self, lease: &Lease, bytes: u64) -> PieceRef {
        let slab = lease.slab;
        self.uses.add(slab, bytes);
        PieceRef {
            slab,
            record: self.tables.records_of(lease.class(), slab.slab).start,
        }
    }

    fn records(&self, slab: SlabRef) -> Records<'_> {
        Records {
            tables: &self.tables,
            slab,
        }
    }

    /// `bytes` of a piece are not pending any more; `last` says that none is left. A dead piece is
    /// marked before its slab can be reused.
    pub fn retire_bytes(&self, at: PieceRef, bytes: u32, last: bool) {
        if last {
            self.mark_dead(at);
        }
        self.release_uses(at.slab, u64::from(bytes));
    }

    /// `bytes` of a slab are not used any more.
    pub fn release_bytes(&self, slab: SlabRef, bytes: u64) {
        self.release_uses(slab, bytes);
    }

    /// Nothing of a piece is pending.
    pub fn mark_dead(&self, at: PieceRef) {
        let generation = self.tables.generation(at.slab).load(Ordering::Relaxed);
        probe();
        self.tables
            .seal(at)
            .store(dead(generation), Ordering::Release);
    }

    /// Takes what a piece has from `end` of its chunk on out of its record: its file was cut, and a memory file that is as
    /// short as its file would be taken for a damaged one. One store: a crash leaves the old length or the new one.
    pub fn shorten_piece(&self, at: PieceRef, end: u64) {
        let generation = self.tables.generation(at.slab).load(Ordering::Relaxed);
        let raw = self.tables.load(at);
        let checked = raw.check(generation, 0, self.geometry.chunk_bytes);
        let Ok(Checked::Live(piece)) = checked else {
            return;
        };
        let len = end.saturating_sub(u64::from(piece.position));
        if len == 0 || len >= u64::from(piece.len) {
            return;
        }
        let shorter = Piece {
            len: len as u32,
            ..piece
        };
        probe();
        self.tables.seal(at).store(
            shorter.seal(generation) | raw.seal & FROZEN,
            Ordering::Release,
        );
    }

    /// The time of the last write to a piece, nanoseconds since 1970, as its record has it.
    pub fn modified(&self, at: PieceRef) -> u64 {
        self.tables.modified(at).load(Ordering::Relaxed)
    }

    /// Notes the time of a write to a piece, or of one to its file of which no other piece tells.
    pub fn set_modified(&self, at: PieceRef, modified: u64) {
        probe();
        self.tables.modified(at).store(modified, Ordering::Relaxed);
    }

    /// Keeps a slab, and its data where it is, while an I/O reads it.
    pub fn pin_slab(&self, slab: SlabRef) {
        self.uses.add(slab, PIN);
        self.homes.enter(slab.chunk);
    }
    /// Ends a [`Arena::pin_slab`].
    pub fn unpin_slab(&self, slab: SlabRef) {
        self.homes.leave(slab.chunk);
        self.release_uses(slab, PIN);
    }

    /// Keeps a slab, and its data where it is, for any time: a writer without room does not wait for this chunk
    /// to move.
    pub fn hold_slab(&self, slab: SlabRef) {
        self.uses.add(slab, PIN);
        self.homes.hold(slab.chunk);
    }
    /// Ends a [`Arena::hold_slab`].
    pub fn unhold_slab(&self, slab: SlabRef) {
        self.homes.let_go(slab.chunk);
        self.release_uses(slab, PIN);
        let memory_used = self.pool.lock().memory_used();
        self.listeners.report_memory_used(memory_used);
    }

    /// Takes a use away; with the last the slab is free, and its chunk if that was its last slab.
    pub(crate) fn release_uses(&self, slab: SlabRef, amount: u64) {
        if !self.uses.release(slab, amount) {
            return;
        }
        probe();
        self.tables.set_state(slab, SlabState::Free);
        let mut pool = self.pool.lock();
        if pool.free_slab(slab.chunk, slab.slab) {
            self.forget_chunk(slab.chunk, &mut pool);
        }
        drop(pool);
        self.listeners.report_freed();
    }

    /// A chunk became free: so does its slot.
    pub(crate) fn forget_chunk(&self, chunk: u32, pool: &mut Pool) {
        probe();
        self.tables.set_class(chunk, None);
        if let Some(home) = self.homes.get(chunk) {
            self.homes.set(chunk, None);
            pool.free_slot(home);
        }
    }
}
