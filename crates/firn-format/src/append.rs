//! Appends to a slab in shared memory: the rule for where the next bytes go, and the stores that publish them.
//!
//! Terms
//! * The *arena* is shared memory with the bytes that are not in the backing directory yet. It is allocated in
//!   *chunks*.
//! * A *slab* is a part of a chunk that one writer fills. A *lease* is the writer's right to do so.
//! * A *piece* is a range of a file's bytes in a slab, with a record. The record's last word, the *seal*, publishes it.
//! * *firnd* is the process that serves the mount and gives leases to client processes.
//!
//! firnd (`firn-arena`) and client processes (`firn-direct`) both append with this code. Each has its own mapping of
//! the piece records ([`RecordTable`]).
//!
//! * **Page rule.** Bytes that continue the last piece lie directly after it. A new piece of a page or more, or the
//!   first piece of a slab, begins at an aligned position: congruent to its file offset modulo the page size. So whole
//!   pages can be written to the backing or mapped as they are.
//! * **Seal protocol.** The other words of a record are stored first. One compare-exchange of its seal then publishes
//!   the piece, or more bytes of the last piece.
//! * **Race.** While a client appends, firnd may end the piece by setting [`FROZEN`](crate::piece::FROZEN) in the last
//!   seal, or end the lease by storing [`poison_seal`] in the next record. The client's compare-exchange then fails and
//!   publishes nothing.
//!
//! Invariants
//! * `position <= end` and `next_record <= record_end`.
//! * The last piece, if there is one, ends at `position`, and its record is `next_record - 1`.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::geometry::PAGE;
use crate::piece::{Piece, Seals, poison_seal, word};

/// The piece records of a lease, as this process maps them.
pub trait RecordTable {
    /// Returns a word of the record with this index. `word` is the offset of the word in the record ([`word`]).
    fn word(&self, record: u32, word: u64) -> &AtomicU64;
    /// Called before each store that a recovery could find after a crash. Tests simulate a crash there.
    fn before_store(&self) {}
}

/// Free bytes in a leased slab, to which a writer may store data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Position of the first byte, from the start of the chunk.
    pub position: u32,
    /// Number of free bytes, at most the requested number.
    pub len: u32,
}

/// Why the last piece cannot be extended, or why a new piece cannot be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AppendError {
    /// firnd has ended the last piece. The writer must begin a new one.
    Frozen,
    /// firnd has ended the lease.
    Revoked,
}

/// The append position in a leased slab: the next free byte, the next free record, and the last piece.
#[derive(Debug)]
pub struct SlabCursor {
    /// Generation of the lease, which seals cover.
    generation: u64,
    /// Position of the next free byte, from the start of the chunk.
    position: u32,
    /// End of the slab, from the start of the chunk.
    end: u32,
    /// Index of the next free record.
    next_record: u32,
    /// Index after the last record of the slab.
    record_end: u32,
    /// The last piece of this lease. `None` before the first one.
    last: Option<LastPiece>,
}

/// The last piece, which the next bytes may extend.
#[derive(Debug)]
struct LastPiece {
    piece: Piece,
    /// The seal that this process stored last. If the record has another one, firnd has frozen the piece.
    seal: u64,
    /// Computes the seal for a new length.
    seal_by_len: Seals,
    /// Index of the record.
    record: u32,
}

impl SlabCursor {
    /// Returns the cursor of an empty slab. `bytes` is the range of the slab in its chunk, and `records` are the
    /// indexes of its records.
    pub fn new(generation: u64, bytes: Range<u32>, records: Range<u32>) -> Self {
        Self {
            generation,
            position: bytes.start,
            end: bytes.end,
            next_record: records.start,
            record_end: records.end,
            last: None,
        }
    }

    /// Returns the generation of the lease, which seals cover.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the position of the next free byte, from the start of the chunk.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Returns the end of the slab, from the start of the chunk.
    pub fn end(&self) -> u32 {
        self.end
    }

    /// Returns the number of free bytes.
    pub fn free_bytes(&self) -> u32 {
        self.end.saturating_sub(self.position)
    }

    /// Returns the index of the next free record.
    pub fn next_record(&self) -> u32 {
        self.next_record
    }

    /// Returns whether a free record is left, so that a piece can be published.
    pub fn has_record(&self) -> bool {
        self.next_record < self.record_end
    }

    /// Returns the last piece, and the index of its record.
    pub fn last(&self) -> Option<(u32, &Piece)> {
        self.last.as_ref().map(|last| (last.record, &last.piece))
    }

    /// Returns whether bytes of `file` at `offset` continue the last piece.
    #[inline(always)]
    pub fn continues(&self, file: u64, offset: u64) -> bool {
        match &self.last {
            Some(LastPiece { piece, .. }) => {
                piece.file == file && piece.offset + u64::from(piece.len) == offset
            }
            None => false,
        }
    }

    /// Returns room for up to `len` bytes directly after the last piece, or `None` if the slab is full.
    #[inline(always)]
    pub fn room_behind_last(&self, len: u64) -> Option<Room> {
        self.room_at(u64::from(self.position), len)
    }

    /// Returns room for up to `len` bytes of a new piece at `offset` of its file, by the page rule. Returns `None` if
    /// the slab has no free byte or no free record.
    pub fn room_for_piece(&self, offset: u64, len: u64) -> Option<Room> {
        if !self.has_record() {
            return None;
        }
        let free_position = u64::from(self.position);
        let must_align = len >= PAGE || self.last.is_none();
        let skipped_bytes = if must_align {
            (offset % PAGE + PAGE - free_position % PAGE) % PAGE
        } else {
            0
        };
        self.room_at(free_position + skipped_bytes, len)
    }

    /// Returns room for up to `len` bytes at `position`, or `None` if `position` is at or after the end of the slab.
    #[inline(always)]
    fn room_at(&self, position: u64, len: u64) -> Option<Room> {
        let free_bytes = u64::from(self.end).saturating_sub(position);
        if free_bytes == 0 {
            return None;
        }
        Some(Room {
            position: position as u32,
            len: len.min(free_bytes) as u32,
        })
    }

    /// Publishes the bytes that the caller has stored at `piece.position` as a new piece of a file. `modified` is the
    /// time of the write. Returns the index of the piece's record.
    ///
    /// Fails with [`AppendError::Revoked`] if firnd has ended the lease; then nothing is published.
    pub fn publish_piece(
        &mut self,
        records: &impl RecordTable,
        piece: Piece,
        modified: u64,
    ) -> Result<u32, AppendError> {
        let record = self.next_record;
        let record_word = |offset| records.word(record, offset);
        let old_seal = record_word(word::SEAL).load(Ordering::Acquire);
        // An exchange with the poison as the old seal would succeed. A poison that comes later makes it fail.
        if old_seal == poison_seal(self.generation) {
            return Err(AppendError::Revoked);
        }
        // The order of these stores does not matter: the record counts only once its seal is stored.
        record_word(word::FILE).store(piece.file_word(), Ordering::Relaxed);
        record_word(word::OFFSET).store(piece.offset, Ordering::Relaxed);
        record_word(word::POSITION).store(piece.position_word(), Ordering::Relaxed);
        record_word(word::MODIFIED).store(modified, Ordering::Relaxed);
        records.before_store();
        let seal_by_len = Seals::new(&piece, self.generation);
        let new_seal = seal_by_len.for_len(piece.len);
        replace_seal(record_word(word::SEAL), old_seal, new_seal)
            .map_err(|()| AppendError::Revoked)?;
        self.position = piece.position + piece.len;
        self.next_record += 1;
        self.last = Some(LastPiece {
            piece,
            seal: new_seal,
            seal_by_len,
            record,
        });
        self.check_invariants();
        Ok(record)
    }

    /// Extends the last piece by `added` bytes, which the caller has stored directly after it. `modified` is the time
    /// of the write.
    ///
    /// Fails if firnd has frozen the piece or ended the lease. Then nothing is published. If there is no piece yet,
    /// fails with [`AppendError::Frozen`] too: the caller begins a new piece in both cases.
    #[inline(always)]
    pub fn extend_piece(
        &mut self,
        records: &impl RecordTable,
        added: u32,
        modified: u64,
    ) -> Result<(), AppendError> {
        let Some(last) = &mut self.last else {
            return Err(AppendError::Frozen);
        };
        // The room ends with the slab, so the sum fits.
        let new_len = last.piece.len + added;
        let new_seal = last.seal_by_len.for_len(new_len);
        // If the exchange below fails, the time of the piece is too new, which is harmless.
        records
            .word(last.record, word::MODIFIED)
            .store(modified, Ordering::Relaxed);
        records.before_store();
        if replace_seal(records.word(last.record, word::SEAL), last.seal, new_seal).is_err() {
            return Err(self.find_append_error(records));
        }
        last.piece.len = new_len;
        last.seal = new_seal;
        self.position += added;
        self.check_invariants();
        Ok(())
    }

    /// Returns why the last piece could not be extended: firnd has frozen the piece, or ended the lease of the slab.
    /// The caller has found another seal in the piece's record than the one that this process stored.
    #[cold]
    fn find_append_error(&self, records: &impl RecordTable) -> AppendError {
        // firnd freezes the piece first, and then poisons the next record. The fence makes this thread read in the same
        // order: the failed exchange first, then the poison. If firnd has not stored the poison yet, the publication of
        // the next piece finds it.
        fence(Ordering::Acquire);
        let poisoned = self.has_record()
            && records
                .word(self.next_record, word::SEAL)
                .load(Ordering::Acquire)
                == poison_seal(self.generation);
        if poisoned {
            AppendError::Revoked
        } else {
            AppendError::Frozen
        }
    }

    #[inline(always)]
    fn check_invariants(&self) {
        debug_assert!(self.position <= self.end && self.next_record <= self.record_end);
        debug_assert!(self.last.as_ref().is_none_or(|last| {
            last.piece.position + last.piece.len == self.position
                && last.record + 1 == self.next_record
        }));
    }
}

/// Replaces a seal if it has the expected value. The release order makes the other fields visible before the seal.
#[inline(always)]
fn replace_seal(seal: &AtomicU64, expected: u64, new: u64) -> Result<(), ()> {
    seal.compare_exchange(expected, new, Ordering::Release, Ordering::Relaxed)
        .map(drop)
        .map_err(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::{CheckedPiece, FROZEN, PIECE_BYTES, RawPiece};

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
                file_word: load(word::FILE),
                offset: load(word::OFFSET),
                position_word: load(word::POSITION),
                seal: load(word::SEAL),
            };
            match raw.check(GENERATION, 0, 1 << 20) {
                Ok(CheckedPiece::Live(piece)) => Some(piece),
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
            .store(poison_seal(GENERATION), Ordering::SeqCst);
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
