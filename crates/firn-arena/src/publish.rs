//! Makes bytes that a writer has stored in shared memory valid, by one store that survives a crash. Counts what still
//! needs that memory.
//!
//! Terms
//! * A *slab* is a part of a *chunk*, a unit of shared memory. One writer fills it with bytes that the backing
//!   directory does not have yet.
//! * A *piece* is one recorded append of bytes of one file to a slab. Its record is in the chunk's piece table.
//! * To *publish* a piece is to store the *seal* of its record. The piece counts from then on, whatever process dies.
//! * A byte is *live* while it is pending: the backing does not have it yet.
//! * A *use* of a slab is a live byte, a lease, an I/O that reads the slab, or a hold. A slab is freed with its last
//!   use.
//!
//! Invariants
//! * A slab is free when nothing uses it.
//! * A piece without pending bytes is marked dead before its slab can be leased again, so no recovery finds it.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_format::append::{RecordTable, Room};
use firn_format::piece::{CheckedPiece, FROZEN, Piece, dead_seal};
use firn_format::slab::SlabState;

use crate::arena::Arena;
use crate::lease::Lease;
use crate::map::crash_point;
use crate::pool::Pool;
use crate::refs::{NewPiece, PieceRef, SlabRef};
use crate::tables::Tables;
use crate::uses::PIN;

/// The piece records of one slab. Implements the trait through which `firn_format::append` reads and stores records.
struct Records<'a> {
    tables: &'a Tables,
    slab: SlabRef,
}

impl RecordTable for Records<'_> {
    fn word(&self, record: u32, word: u64) -> &AtomicU64 {
        let piece = PieceRef {
            slab: self.slab,
            record,
        };
        self.tables.record_word(piece, word)
    }

    fn before_store(&self) {
        crash_point();
    }
}

impl Arena {
    /// Publishes the bytes that were stored at `room` as a new piece, a recorded range of a file's bytes. Counts them
    /// as live (not in the backing yet). Returns the piece.
    pub fn publish_piece(&self, lease: &mut Lease, room: Room, new_piece: NewPiece) -> PieceRef {
        let piece = Piece {
            file: new_piece.file_id,
            offset: new_piece.offset,
            sequence: new_piece.sequence,
            position: room.position,
            len: room.len,
        };
        let slab = lease.slab;
        self.uses.add(slab, piece.len.into());
        let record = lease
            .cursor
            .publish_piece(&self.records(slab), piece, new_piece.modified)
            .expect("only firnd ends its own leases");
        crash_point();
        self.tables.published(slab).fetch_add(1, Ordering::Release);
        PieceRef { slab, record }
    }

    /// Publishes `len` bytes that directly follow the last piece of the lease as more of that piece, and counts them as
    /// live. Returns the piece and its sequence number.
    pub fn extend_piece(&self, lease: &mut Lease, len: u32, modified: u64) -> (PieceRef, u64) {
        let slab = lease.slab;
        self.uses.add(slab, len.into());
        lease
            .cursor
            .extend_piece(&self.records(slab), len, modified)
            .expect("only firnd freezes its own pieces");
        let (record, piece) = lease.cursor.last().expect("it was just extended");
        (PieceRef { slab, record }, piece.sequence)
    }

    /// Counts the first `bytes` bytes of a leased slab as used, without a piece record, because the backing has them
    /// too. The returned reference is only for the count: no recovery finds such a piece.
    pub fn use_without_piece(&self, lease: &Lease, bytes: u64) -> PieceRef {
        let slab = lease.slab;
        self.uses.add(slab, bytes);
        PieceRef {
            slab,
            record: self.tables.records_of(lease.class(), slab.slab).start,
        }
    }

    /// Returns the records of a slab, for `firn_format::append`.
    fn records(&self, slab: SlabRef) -> Records<'_> {
        Records {
            tables: &self.tables,
            slab,
        }
    }

    /// Counts `bytes` of a piece as no longer live. With `are_last`, they are the last live bytes of the piece.
    pub fn retire_bytes(&self, piece_ref: PieceRef, bytes: u32, are_last: bool) {
        if are_last {
            // Before the release: afterwards the slab could be leased again while a recovery still finds the piece.
            self.mark_dead(piece_ref);
        }
        self.release_uses(piece_ref.slab, u64::from(bytes));
    }

    /// Subtracts `bytes` from the uses of a slab.
    pub fn release_bytes(&self, slab: SlabRef, bytes: u64) {
        self.release_uses(slab, bytes);
    }

    /// Marks a piece dead: nothing of it is pending.
    pub fn mark_dead(&self, piece_ref: PieceRef) {
        let generation = self
            .tables
            .generation(piece_ref.slab)
            .load(Ordering::Relaxed);
        crash_point();
        self.tables
            .seal(piece_ref)
            .store(dead_seal(generation), Ordering::Release);
    }

    /// Shortens a piece, a recorded range of a file's bytes, after its file was truncated. From now on the piece ends
    /// at the offset `new_end` in the chunk. Does nothing if the piece is dead (without pending bytes) or if `new_end`
    /// is not inside it.
    ///
    /// Needed above all for bytes in a memory file, which was truncated too: an attach reports a piece that ends beyond
    /// the end of its memory file as damage. The length is in one word, so a crash leaves the old length or the new
    /// one.
    pub fn shorten_piece(&self, piece_ref: PieceRef, new_end: u64) {
        let generation = self
            .tables
            .generation(piece_ref.slab)
            .load(Ordering::Relaxed);
        let raw = self.tables.load(piece_ref);
        // The record was valid when it was stored, so the range of the whole chunk is enough here.
        let Ok(CheckedPiece::Live(piece)) = raw.check(generation, 0, self.geometry.chunk_bytes)
        else {
            return;
        };
        let len = new_end.saturating_sub(u64::from(piece.position));
        if len == 0 || len >= u64::from(piece.len) {
            return;
        }
        let shorter = Piece {
            len: len as u32,
            ..piece
        };
        let shorter_seal = shorter.seal(generation) | (raw.seal & FROZEN);
        crash_point();
        self.tables
            .seal(piece_ref)
            .store(shorter_seal, Ordering::Release);
    }

    /// Returns the time of the last write to a piece, in nanoseconds since 1970, as its record has it.
    pub fn modified(&self, piece_ref: PieceRef) -> u64 {
        self.tables.modified(piece_ref).load(Ordering::Relaxed)
    }

    /// Stores the time of a write in a piece's record. The write went to the piece, or to another part of the file that
    /// has no record of its own.
    pub fn set_modified(&self, piece_ref: PieceRef, modified: u64) {
        crash_point();
        self.tables
            .modified(piece_ref)
            .store(modified, Ordering::Relaxed);
    }

    /// Keeps a slab in use, and its chunk where it is, for an I/O that reads it. [`Arena::unpin_slab`] ends it.
    pub fn pin_slab(&self, slab: SlabRef) {
        self.uses.add(slab, PIN);
        self.homes.enter(slab.chunk);
    }

    /// Ends one [`Arena::pin_slab`].
    pub fn unpin_slab(&self, slab: SlabRef) {
        self.homes.leave(slab.chunk);
        self.release_uses(slab, PIN);
    }

    /// Keeps a slab in use, and its chunk where it is, without a time limit. A move does not wait for this chunk but
    /// takes another one. [`Arena::unhold_slab`] ends it.
    pub fn hold_slab_in_place(&self, slab: SlabRef) {
        self.uses.add(slab, PIN);
        self.homes.hold(slab.chunk);
    }

    /// Ends one [`Arena::hold_slab_in_place`]. A writer without memory may now have this chunk moved.
    pub fn unhold_slab(&self, slab: SlabRef) {
        self.homes.end_hold(slab.chunk);
        self.release_uses(slab, PIN);
        let memory_used = self.pool.lock().memory_used();
        self.callbacks.report_memory_used(memory_used);
    }

    /// Subtracts `amount` from the uses of a slab. Frees the slab with its last use, and the chunk with its last slab.
    pub(crate) fn release_uses(&self, slab: SlabRef, amount: u64) {
        if !self.uses.release(slab, amount) {
            return;
        }
        crash_point();
        // The state is stored before the pool gets the slab: from then on another thread may lease the slab.
        self.tables.set_state(slab, SlabState::Free);
        let mut pool = self.pool.lock();
        if pool.free_slab(slab.chunk, slab.slab) {
            self.free_chunk(slab.chunk, &mut pool);
        }
        // No lock is held during a callback.
        drop(pool);
        self.callbacks.report_freed();
    }

    /// Frees a chunk and its slot. The pool has freed all its slabs.
    pub(crate) fn free_chunk(&self, chunk: u32, pool: &mut Pool) {
        crash_point();
        self.tables.set_class(chunk, None);
        if let Some(home) = self.homes.get(chunk) {
            self.homes.set(chunk, None);
            pool.free_slot(home);
        }
    }
}
