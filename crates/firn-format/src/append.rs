//! Appending to a leased slab: where the next bytes go, and the stores that make them count.
//!
//! firnd (`firn-arena`) and client processes (`firn-direct`) append with this code, each over its own mapping
//! of the piece records ([`RecordTable`]).
//!
//! * **Page rule.** Bytes that continue the last piece lie directly behind it. A new piece of a page or more, and the
//!   first of a slab, begins at a position congruent to its file offset modulo the page size. So whole pages can be
//!   written to the backing or mapped as they are.
//! * **Seal protocol.** The fields of a record are stored first; one compare-exchange of its seal publishes
//!   the piece, or more bytes of the last one. A seal that is not what was expected was changed by firnd:
//!   [`FROZEN`](crate::piece::FROZEN) ends the piece, [`poison`] in the next record ends the lease.
//!
//! Invariants
//! * `next <= end`, `record <= record_end`.
//! * The last piece, if any, ends at `next`, and its record is `record - 1`.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::geometry::PAGE;
use crate::piece::{Piece, Seals, poison, word};

/// The piece records of a lease, as this process maps them.
pub trait RecordTable {
    /// The word at an offset of [`word`] in a record.
    fn word(&self, record: u32, word: u64) -> &AtomicU64;
    /// Called before each store after which a crash leaves another state; tests stop there.
    fn before_store(&self) {}
}

/// Room for bytes in a leased slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Bytes from the start of the chunk.
    pub position: u32,
    /// Bytes that fit.
    pub len: u32,
}

/// Why the last piece cannot be extended, or a new one not be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendError {
    /// firnd lets the last piece not grow any more: begin a new one.
    Frozen,
    /// firnd ended the lease.
    Revoked,
}

/// How far the slab of a lease is filled.
#[derive(Debug)]
pub struct SlabCursor {
    generation: u64,
    /// Next free byte, from the start of the chunk.
    next: u32,
    /// End of the slab, from the start of the chunk.
    end: u32,
    /// Next free record.
    record: u32,
    record_end: u32,
    last: Option<LastPiece>,
}

/// The piece that the next bytes may continue.
#[derive(Debug)]
struct LastPiece {
    piece: Piece,
    /// As it was stored here.
    seal: u64,
    seals: Seals,
    record: u32,
}

impl SlabCursor {
    /// An empty slab: its bytes, from the start of the chunk, and its records.
    pub fn new(generation: u64, bytes: Range<u32>, records: Range<u32>) -> Self {
        Self {
            generation,
            next: bytes.start,
            end: bytes.end,
            record: records.start,
            record_end: records.end,
            last: None,
        }
    }

    /// Seeds the seals.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Next free byte, from the start of the chunk.
    pub fn position(&self) -> u32 {
        self.next
    }

    /// End of the slab, from the start of the chunk.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Bytes that are still free.
    pub fn free_bytes(&self) -> u32 {
        self.end.saturating_sub(self.next)
    }

    /// Index of the next free record.
    pub fn next_record(&self) -> u32 {
        self.record
    }

    /// Whether a piece can still be published.
    pub fn has_record(&self) -> bool {
        self.record < self.record_end
    }

    /// The last piece and the index of its record.
    pub fn last(&self) -> Option<(u32, &Piece)> {
        self.last.as_ref().map(|last| (last.record, &last.piece))
    }

    /// Whether bytes of `file` at `offset` continue the last piece.
    #[inline(always)]
    pub fn continues(&self, file: u64, offset: u64) -> bool {
        self.last.as_ref().is_some_and(|last| {
            last.piece.file == file && last.piece.offset + u64::from(last.piece.len) == offset
        })
    }

    /// Room directly behind the last piece.
    #[inline(always)]
    pub fn room_behind_last(&self, len: u64) -> Option<Room> {
        self.room_at(u64::from(self.next), len)
    }

    /// Room for a new piece that begins at `offset` of its file, by the page rule.
    pub fn room_for_piece(&self, offset: u64, len: u64) -> Option<Room> {
        if !self.has_record() {
            return None;
        }
        let next = u64::from(self.next);
        let aligned = len >= PAGE || self.last.is_none();
        let skip = if aligned {
            (offset % PAGE + PAGE - next % PAGE) % PAGE
        } else {
            0
        };
        self.room_at(next + skip, len)
    }

    #[inline(always)]
    fn room_at(&self, position: u64, len: u64) -> Option<Room> {
        let free = u64::from(self.end).saturating_sub(position);
        (free > 0).then(|| Room {
            position: position as u32,
            len: len.min(free) as u32,
        })
    }

    /// Publishes bytes of `file` that were stored at `room` as a new piece; the index of its record.
    pub fn publish_piece(
        &mut self,
        records: &impl RecordTable,
        piece: Piece,
        modified: u64,
    ) -> Result<u32, AppendError> {
        let record = self.record;
        let word = |at| records.word(record, at);
        let found = word(word::SEAL).load(Ordering::Acquire);
        if found == poison(self.generation) {
            return Err(AppendError::Revoked);
        }
        word(word::WHO).store(piece.who(), Ordering::Relaxed);
        word(word::OFFSET).store(piece.offset, Ordering::Relaxed);
        word(word::PLACE).store(piece.place(), Ordering::Relaxed);
        word(word::MODIFIED).store(modified, Ordering::Relaxed);
        records.before_store();
        let seals = Seals::new(&piece, self.generation);
        let seal = seals.at(piece.len);
        exchange(word(word::SEAL), found, seal).map_err(|()| AppendError::Revoked)?;
        self.next = piece.position + piece.len;
        self.record += 1;
        self.last = Some(LastPiece {
            piece,
            seal,
            seals,
            record,
        });
        self.check_invariants();
        Ok(record)
    }

    /// Publishes `more` bytes that were stored directly behind the last piece as a part of it.
    #[inline(always)]
    pub fn extend_piece(
        &mut self,
        records: &impl RecordTable,
        more: u32,
        modified: u64,
    ) -> Result<(), AppendError> {
        let Some(last) = &mut self.last else {
            return Err(AppendError::Frozen);
        };
        let len = last.piece.len + more;
        let seal = last.seals.at(len);
        records
            .word(last.record, word::MODIFIED)
            .store(modified, Ordering::Relaxed);
        records.before_store();
        if exchange(records.word(last.record, word::SEAL), last.seal, seal).is_err() {
            return Err(self.why_not_extended(records));
        }
        last.piece.len = len;
        last.seal = seal;
        self.next += more;
        self.check_invariants();
        Ok(())
    }

    /// The seal of the last piece is not what was stored: frozen, or spoiled; both end the piece.
    #[cold]
    fn why_not_extended(&self, records: &impl RecordTable) -> AppendError {
        // The freeze came before the poison; a thread that sees the one must look for the other in this order.
        fence(Ordering::Acquire);
        let poisoned = self.has_record()
            && records
                .word(self.record, word::SEAL)
                .load(Ordering::Acquire)
                == poison(self.generation);
        if poisoned {
            AppendError::Revoked
        } else {
            AppendError::Frozen
        }
    }

    #[inline(always)]
    fn check_invariants(&self) {
        debug_assert!(self.next <= self.end && self.record <= self.record_end);
        debug_assert!(self.last.as_ref().is_none_or(|last| {
            last.piece.position + last.piece.len == self.next && last.record + 1 == self.record
        }));
    }
}

#[inline(always)]
fn exchange(seal: &AtomicU64, expected: u64, new: u64) -> Result<(), ()> {
    seal.compare_exchange(expected, new, Ordering::Release, Ordering::Relaxed)
        .map(drop)
        .map_err(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::{Checked, FROZEN, PIECE_BYTES, RawPiece};

    const GENERATION: u64 = 7;

    struct Table(Vec<AtomicU64>);

    impl Table {
        fn new(records: u32) -> Self {
            let words = u64::from(records) * PIECE_BYTES / 8;
            Self((0..words).map(|_| AtomicU64::new(0)).collect())
        }
        fn check(&self, record: u32) -> Option<Piece> {
            let load = |at| self.word(record, at).load(Ordering::Relaxed);
            let raw = RawPiece {
                who: load(word::WHO),
                offset: load(word::OFFSET),
                place: load(word::PLACE),
                seal: load(word::SEAL),
            };
            match raw.check(GENERATION, 0, 1 << 20) {
                Ok(Checked::Live(piece)) => Some(piece),
                _ => None,
            }
        }
    }

    impl RecordTable for Table {
        fn word(&self, record: u32, word: u64) -> &AtomicU64 {
            &self.0[((u64::from(record) * PIECE_BYTES + word) / 8) as usize]
        }
    }

    fn piece(offset: u64, room: Room) -> Piece {
        Piece {
            file: 3,
            offset,
            sequence: 9,
            position: room.position,
            len: room.len,
        }
    }

    fn cursor() -> SlabCursor {
        SlabCursor::new(GENERATION, 0..64 << 10, 0..2)
    }

    #[test]
    fn a_new_piece_is_congruent_to_its_offset_if_it_is_long_or_the_first() {
        let table = Table::new(2);
        let mut cursor = cursor();
        let first = cursor.room_for_piece(5000, 10).unwrap();
        assert_eq!((first.position, first.len), (904, 10));
        cursor.publish_piece(&table, piece(5000, first), 1).unwrap();
        assert_eq!(cursor.room_for_piece(8192, 10).unwrap().position, 914);
        assert_eq!(cursor.room_for_piece(8192, 4096).unwrap().position, 4096);
        assert_eq!(cursor.room_for_piece(0, 1 << 30).unwrap().len, (60 << 10));
    }

    #[test]
    fn bytes_behind_the_last_piece_extend_it_and_others_need_a_record() {
        let table = Table::new(2);
        let mut cursor = cursor();
        let room = cursor.room_for_piece(0, 100).unwrap();
        cursor.publish_piece(&table, piece(0, room), 1).unwrap();
        assert!(cursor.continues(3, 100) && !cursor.continues(4, 100) && !cursor.continues(3, 99));
        cursor.extend_piece(&table, 50, 2).unwrap();
        assert_eq!(table.check(0).unwrap().len, 150);
        let room = cursor.room_for_piece(1 << 20, 8).unwrap();
        cursor
            .publish_piece(&table, piece(1 << 20, room), 3)
            .unwrap();
        assert_eq!(cursor.room_for_piece(0, 8), None, "no record is left");
        assert!(cursor.room_behind_last(8).is_some());
    }

    #[test]
    fn a_frozen_piece_ends_and_a_poisoned_lease_takes_nothing_more() {
        let table = Table::new(2);
        let mut cursor = cursor();
        let room = cursor.room_for_piece(0, 100).unwrap();
        cursor.publish_piece(&table, piece(0, room), 1).unwrap();
        table.word(0, word::SEAL).fetch_or(FROZEN, Ordering::SeqCst);
        assert_eq!(cursor.extend_piece(&table, 50, 2), Err(AppendError::Frozen));
        table
            .word(1, word::SEAL)
            .store(poison(GENERATION), Ordering::SeqCst);
        assert_eq!(
            cursor.extend_piece(&table, 50, 2),
            Err(AppendError::Revoked)
        );
        let room = cursor.room_for_piece(100, 8).unwrap();
        assert_eq!(
            cursor.publish_piece(&table, piece(100, room), 2),
            Err(AppendError::Revoked)
        );
        assert_eq!(table.check(0).unwrap().len, 100);
    }
}
