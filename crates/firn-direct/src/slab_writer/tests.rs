//! Tests of the client's writer on a slab in plain memory. The test plays firnd: it reads the records and revokes the
//! lease, in some tests while the writer appends.

use std::sync::atomic::AtomicBool;

use firn_format::piece::{CheckedPiece, FROZEN, RawPiece, poison_seal, word};

use super::*;

const DATA: u64 = 1 << 16;
const SLAB_BYTES: u32 = 1 << 16;
const RECORDS: u64 = 4096;
const WRITER: u64 = 512;
const GENERATION: u64 = 77;
const FILE_ID: u64 = 5;

/// A slab in plain memory, with firnd's side of the protocol.
struct FakeSlab {
    memory: Vec<u64>,
    slab: Slab,
}

// SAFETY: the vector is never resized, and words that threads share are read and written as atomics.
unsafe impl Sync for FakeSlab {}

impl FakeSlab {
    fn new(record_count: u32) -> Self {
        let slab = Slab {
            chunk: DATA,
            records: RECORDS,
            writer: WRITER,
            generation: GENERATION,
            sequence: 1000,
            start: 0,
            end: SLAB_BYTES,
            record_count,
            reserved: 0,
            modified: 0,
        };
        let fake = Self {
            memory: vec![0; ((DATA + u64::from(SLAB_BYTES)) / 8) as usize],
            slab,
        };
        fake.word(WRITER)
            .store(writer_idle(GENERATION), Ordering::Relaxed);
        fake
    }

    fn base(&self) -> *mut u8 {
        self.memory.as_ptr().cast_mut().cast()
    }

    fn writer(&self) -> SlabWriter {
        // SAFETY: the records, the writer word and the data are in `memory`.
        unsafe { SlabWriter::new(self.base(), self.slab, FILE_ID) }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: the offset is in `memory` and a multiple of 8.
        unsafe { AtomicU64::from_ptr(self.base().add(offset as usize).cast()) }
    }

    fn seal(&self, record: u32) -> &AtomicU64 {
        self.word(RECORDS + u64::from(record) * PIECE_BYTES + word::SEAL)
    }

    fn raw(&self, record: u32) -> RawPiece {
        let offset = RECORDS + u64::from(record) * PIECE_BYTES;
        let seal = self.seal(record).load(Ordering::Acquire);
        RawPiece {
            file_word: self.word(offset + word::FILE).load(Ordering::Relaxed),
            offset: self.word(offset + word::OFFSET).load(Ordering::Relaxed),
            position_word: self.word(offset + word::POSITION).load(Ordering::Relaxed),
            seal,
        }
    }

    /// The piece of a record, if it is published.
    fn piece(&self, record: u32) -> Option<Piece> {
        match self.raw(record).check(GENERATION, 0, SLAB_BYTES.into()) {
            Ok(CheckedPiece::Live(piece)) => Some(piece),
            _ => None,
        }
    }

    /// The pieces of all published records.
    fn pieces(&self) -> Vec<Piece> {
        (0..self.slab.record_count)
            .map_while(|record| self.piece(record))
            .collect()
    }

    /// The bytes of a published piece.
    fn bytes(&self, piece: &Piece) -> Vec<u8> {
        let from = self
            .base()
            .wrapping_add((DATA + u64::from(piece.position)) as usize);
        // SAFETY: a published piece lies in the slab.
        unsafe { std::slice::from_raw_parts(from, piece.len as usize) }.to_vec()
    }

    /// Revokes the lease as firnd does, and returns the number of valid records. Freezes the last published record and
    /// poisons the next one; starts again if the writer publishes that record at the same time.
    fn revoke(&self) -> u32 {
        let idle = writer_idle(GENERATION);
        let _ = self
            .word(WRITER)
            .compare_exchange(idle, 0, Ordering::SeqCst, Ordering::Relaxed);
        loop {
            let count = self.pieces().len() as u32;
            if count > 0 {
                self.seal(count - 1).fetch_or(FROZEN, Ordering::SeqCst);
            }
            if count == self.slab.record_count {
                return count;
            }
            let seal_before = self.seal(count).load(Ordering::Acquire);
            if self.piece(count).is_some() {
                continue;
            }
            let poisoned = self.seal(count).compare_exchange(
                seal_before,
                poison_seal(GENERATION),
                Ordering::SeqCst,
                Ordering::Relaxed,
            );
            if poisoned.is_ok() {
                return count;
            }
        }
    }
}

fn append(writer: &mut SlabWriter, offset: u64, data: &[u8]) -> Appended {
    // SAFETY: the bytes are a slice's.
    unsafe { writer.append(offset, data.as_ptr(), data.len()) }
}

#[test]
fn bytes_that_follow_each_other_are_one_piece() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    assert_eq!(append(&mut writer, 100, b"hello "), Appended::Bytes(6));
    assert_eq!(append(&mut writer, 106, b"world"), Appended::Bytes(5));
    let pieces = fake.pieces();
    assert_eq!(
        pieces,
        [Piece {
            file: FILE_ID,
            offset: 100,
            sequence: 1000,
            position: 100,
            len: 11
        }]
    );
    assert_eq!(fake.bytes(&pieces[0]), b"hello world");
}

#[test]
fn a_page_or_more_lies_congruent_to_its_offset_and_small_pieces_are_packed() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    assert_eq!(append(&mut writer, 7, b"a"), Appended::Bytes(1));
    assert_eq!(append(&mut writer, 5000, b"b"), Appended::Bytes(1));
    assert_eq!(
        append(&mut writer, 12_289, &[3; 4096]),
        Appended::Bytes(4096)
    );
    let positions: Vec<u32> = fake.pieces().iter().map(|p| p.position).collect();
    assert_eq!(positions, [7, 8, 4097]);
    let sequences: Vec<u64> = fake.pieces().iter().map(|p| p.sequence).collect();
    assert_eq!(sequences, [1000, 1001, 1002]);
}

#[test]
fn the_end_of_the_slab_takes_the_first_part_and_then_nothing() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    assert!(!writer.is_half_full());
    assert_eq!(
        append(&mut writer, 0, &[1; 65_000]),
        Appended::Bytes(65_000)
    );
    assert!(writer.is_half_full());
    assert_eq!(
        append(&mut writer, 65_000, &[2; 1000]),
        Appended::Bytes(536)
    );
    assert_eq!(append(&mut writer, 65_536, &[2; 1000]), Appended::Full);
    assert_eq!(append(&mut writer, 0, b"x"), Appended::Full);
}

#[test]
fn without_a_record_there_is_no_room_but_for_more_of_the_last_piece() {
    let fake = FakeSlab::new(2);
    let mut writer = fake.writer();
    assert_eq!(append(&mut writer, 0, b"a"), Appended::Bytes(1));
    assert_eq!(append(&mut writer, 50, b"b"), Appended::Bytes(1));
    assert_eq!(append(&mut writer, 90, b"c"), Appended::Full);
    assert_eq!(append(&mut writer, 51, b"c"), Appended::Bytes(1));
    fake.seal(1).fetch_or(FROZEN, Ordering::SeqCst);
    assert_eq!(append(&mut writer, 52, b"d"), Appended::Full);
}

#[test]
fn a_frozen_piece_is_followed_by_a_new_one() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    assert_eq!(append(&mut writer, 0, b"abc"), Appended::Bytes(3));
    fake.seal(0).fetch_or(FROZEN, Ordering::SeqCst);
    assert_eq!(append(&mut writer, 3, b"def"), Appended::Bytes(3));
    let pieces = fake.pieces();
    assert_eq!((pieces[0].len, pieces[1].len, pieces[1].offset), (3, 3, 3));
    assert_eq!(fake.bytes(&pieces[1]), b"def");
}

#[test]
fn after_a_revocation_nothing_is_taken_and_what_was_taken_stays() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    assert_eq!(append(&mut writer, 0, b"kept"), Appended::Bytes(4));
    assert_eq!(fake.revoke(), 1);
    assert_eq!(append(&mut writer, 4, b"not"), Appended::Revoked);
    assert_eq!(append(&mut writer, 400, b"not"), Appended::Revoked);
    assert_eq!(fake.pieces().len(), 1);
    assert_eq!(fake.bytes(&fake.pieces()[0]), b"kept");
}

#[test]
fn a_writer_that_was_busy_when_it_was_revoked_publishes_nothing() {
    for extends in [true, false] {
        let fake = FakeSlab::new(8);
        let mut writer = fake.writer();
        assert_eq!(append(&mut writer, 0, b"kept"), Appended::Bytes(4));
        // The writer word during an append.
        fake.word(WRITER)
            .store(writer_idle(GENERATION) | WRITER_BUSY, Ordering::SeqCst);
        assert_eq!(fake.revoke(), 1);
        fake.word(WRITER)
            .store(writer_idle(GENERATION), Ordering::SeqCst);
        let offset = if extends { 4 } else { 100 };
        assert_eq!(append(&mut writer, offset, b"not"), Appended::Revoked);
        assert_eq!(fake.pieces().len(), 1);
    }
}

#[test]
fn a_slab_that_was_leased_to_another_is_not_touched() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    fake.word(WRITER)
        .store(writer_idle(GENERATION + 1), Ordering::SeqCst);
    assert_eq!(append(&mut writer, 0, b"not"), Appended::Revoked);
    assert_eq!(fake.word(DATA).load(Ordering::Relaxed), 0);
    assert_eq!(
        fake.word(WRITER).load(Ordering::Relaxed),
        writer_idle(GENERATION + 1)
    );
}

#[test]
fn an_offset_beyond_the_largest_file_is_left_to_the_kernel() {
    let fake = FakeSlab::new(8);
    let mut writer = fake.writer();
    assert_eq!(append(&mut writer, OFFSET_MAX, b"x"), Appended::Full);
    assert_eq!(append(&mut writer, u64::MAX, b"x"), Appended::Full);
}

/// Whenever the lease is revoked, the published pieces are exactly the bytes that `append` acknowledged.
#[test]
fn a_revocation_at_any_instant_neither_loses_nor_invents_bytes() {
    for round in 0..300u32 {
        let fake = FakeSlab::new(600);
        let go = AtomicBool::new(false);
        let acknowledged = std::thread::scope(|scope| {
            let appender = scope.spawn(|| {
                let mut writer = fake.writer();
                while !go.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                let mut acknowledged = 0u64;
                loop {
                    let byte = [acknowledged as u8; 16];
                    match append(&mut writer, acknowledged, &byte) {
                        Appended::Bytes(count) => acknowledged += count as u64,
                        Appended::Full | Appended::Revoked => return acknowledged,
                    }
                }
            });
            go.store(true, Ordering::Release);
            for turn in 0..round % 97 {
                std::hint::spin_loop();
                let count = fake.pieces().len() as u32;
                if turn % 16 == 5 && count > 0 {
                    fake.seal(count - 1).fetch_or(FROZEN, Ordering::SeqCst);
                }
            }
            fake.revoke();
            appender.join().unwrap()
        });
        let pieces = fake.pieces();
        let published: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        assert_eq!(published, acknowledged, "round {round}");
        let mut end = 0;
        for piece in &pieces {
            assert_eq!(piece.offset, end);
            for (index, byte) in fake.bytes(piece).iter().enumerate() {
                // Each append of 16 bytes repeats the low byte of its offset.
                assert_eq!(*byte, ((end + index as u64) / 16 * 16) as u8);
            }
            end += u64::from(piece.len);
        }
    }
}
