//! Piece records: one record for each append.
//!
//! ```text
//! 0   u64 who          file id (low 40 bits); bits 32 to 55 of the sequence
//! 8   u64 offset       offset in the file
//! 16  u64 modified     time of the last write to the piece, nanoseconds since 1970; 0 if unknown
//! 24  u64 place        low half: low 32 bits of the sequence, which orders all writes of the arena;
//!                      high half: position, from the start of the chunk
//! 32  u64 seal         low half: length, whose highest bit is FROZEN; high half: CRC32C.
//!                      `dead` if no byte of the piece is pending any more
//!
//! * Length and checksum are one word. So an append that extends the last piece publishes both with one store, and a
//!   writer that is killed leaves the old piece or the new one.
//! * The checksum covers the generation of the slab. So a record that is left over from an earlier lease is never
//!   valid.
//! * The data has no checksum: the death of a process does not damage memory of a live host.
//! * The checksum does not cover the time, which changes separately. Readers check its bounds.

use crate::FormatError;
#[cfg(target_arch = "x86_64")]
use crate::processor::processor;

/// Length of a record in bytes.
pub const PIECE_BYTES: u64 = 40;

/// Offsets of the words in a record, each a `u64`.
pub mod word {
    /// Word `who` of the table above.
    pub const WHO: u64 = 0;
    /// Word `offset` of the table above.
    pub const OFFSET: u64 = 8;
    /// Word `modified` of the table above.
    pub const MODIFIED: u64 = 16;
    /// Word `place` of the table above.
    pub const PLACE: u64 = 24;
    /// Word `seal` of the table above.
    pub const SEAL: u64 = 32;
}

/// Number of bits of a file id.
const FILE_BITS: u32 = 40;
/// Largest file id. Ten thousand new files a second reach it after three years.
pub const FILE_MAX: u64 = (1 << FILE_BITS) - 1;
/// Largest sequence. Ten million writes a second reach it after two centuries.
pub const SEQUENCE_MAX: u64 = (1 << 56) - 1;

/// Bit of a seal: the piece must not be extended. Lengths are smaller than this bit (`CHUNK_MAX`), and the checksum
/// does not cover it.
pub const FROZEN: u64 = 1 << 31;
const _: () = assert!(crate::geometry::CHUNK_MAX < FROZEN);

/// Returns the seal that firnd stores in the next record of a revoked lease. Its length is 0, so it never counts as a
/// piece. A compare-exchange that expects the earlier seal fails.
pub fn poison(generation: u64) -> u64 {
    (generation << 32) | FROZEN
}

/// Returns the seal of a piece of which no byte is pending. Its length is 0. It differs in many bits from the seals of
/// pieces and from [`poison`], so a flipped bit does not make a piece pending again.
pub fn dead(generation: u64) -> u64 {
    (!generation << 32) | FROZEN
}

/// A piece: one recorded append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Id of the file.
    pub file: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Number that orders all writes of the arena.
    pub sequence: u64,
    /// Position of the bytes, from the start of the chunk.
    pub position: u32,
    /// Length in bytes.
    pub len: u32,
}

/// The words of a record, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawPiece {
    /// File id and upper part of the sequence.
    pub who: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Lower part of the sequence, and the position.
    pub place: u64,
    /// Length and checksum, or [`dead`].
    pub seal: u64,
}

impl Piece {
    /// Returns the words of the record in a slab of `generation`.
    pub fn raw(&self, generation: u64) -> RawPiece {
        debug_assert!(
            self.file <= FILE_MAX && self.sequence <= SEQUENCE_MAX,
            "{self:?}"
        );
        let seal = self.seal(generation);
        RawPiece {
            who: self.who(),
            offset: self.offset,
            place: self.place(),
            seal,
        }
    }

    /// Returns the word [`word::WHO`].
    pub fn who(&self) -> u64 {
        self.file | self.sequence >> 32 << FILE_BITS
    }

    /// Returns the word [`word::PLACE`].
    pub fn place(&self) -> u64 {
        self.sequence & u64::from(u32::MAX) | u64::from(self.position) << 32
    }

    /// Returns the word that publishes this piece in a slab of `generation`.
    pub fn seal(&self, generation: u64) -> u64 {
        u64::from(self.len) | (u64::from(self.checksum(generation)) << 32)
    }

    /// Computes the checksum of all fields, for a slab of `generation`.
    fn checksum(&self, generation: u64) -> u32 {
        checksum_words([
            self.file,
            self.offset,
            self.sequence,
            u64::from(self.position) | u64::from(self.len) << 32,
            generation,
        ])
    }
}

/// Computes the CRC32C of the words' bytes, the lowest byte of each first.
fn checksum_words(words: [u64; 5]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if processor().has_crc32c {
        // SAFETY: `has_crc32c` says that the processor has SSE4.2.
        return unsafe { checksum_words_by_instruction(words) };
    }
    let bytes = words.map(u64::to_le_bytes);
    crc32c::crc32c(bytes.as_flattened())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn checksum_words_by_instruction(words: [u64; 5]) -> u32 {
    let next = |sum, word| std::arch::x86_64::_mm_crc32_u64(sum, word);
    !(words.into_iter().fold(u64::from(u32::MAX), next) as u32)
}

/// Computes the seals of one piece for any length, faster than [`Piece::seal`].
///
/// A CRC is linear: the checksums of two messages differ by a value that depends only on the bits in which the messages
/// differ. Here only the length differs. So the seal is computed from the checksum for length 0 and a table. Computing
/// the whole checksum took a third of a write of 64 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Seals {
    /// Checksum for length 0.
    checksum_of_empty: u32,
}

impl Seals {
    /// Prepares the seals of `piece`, whose length is ignored, in a slab of `generation`.
    pub fn new(piece: &Piece, generation: u64) -> Self {
        Self {
            checksum_of_empty: Piece { len: 0, ..*piece }.checksum(generation),
        }
    }

    /// Returns what [`Piece::seal`] returns for `len` bytes.
    #[inline]
    pub fn at(self, len: u32) -> u64 {
        let [byte_0, byte_1, byte_2, byte_3] = len.to_le_bytes();
        let [table_0, table_1, table_2, table_3] = &CHECKSUM_CHANGES;
        let change = table_0[byte_0 as usize]
            ^ table_1[byte_1 as usize]
            ^ table_2[byte_2 as usize]
            ^ table_3[byte_3 as usize];
        u64::from(len) | (u64::from(self.checksum_of_empty ^ change) << 32)
    }
}

/// How each byte of the length changes the checksum, by the byte's index and value.
static CHECKSUM_CHANGES: [[u32; 256]; 4] = compute_checksum_changes();

/// Number of bytes after the length that the checksum covers: the generation.
const BYTES_AFTER_LENGTH: usize = 8;

/// Computes [`CHECKSUM_CHANGES`] by shifting each value through the remaining bits of the message.
const fn compute_checksum_changes() -> [[u32; 256]; 4] {
    /// CRC32C, reflected (RFC 3720, appendix B.4).
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    let mut table = [[0; 256]; 4];
    let mut byte = 0;
    while byte < 4 {
        let mut value = 0;
        while value < 256 {
            let mut sum = value as u32;
            let mut bit = 0;
            while bit < 8 * (4 - byte + BYTES_AFTER_LENGTH) {
                sum = (sum >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(sum & 1));
                bit += 1;
            }
            table[byte][value] = sum;
            value += 1;
        }
        byte += 1;
    }
    table
}

/// A record that passed its check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checked {
    /// The piece is pending, unless the journal says otherwise.
    Live(Piece),
    /// No byte of the piece is pending.
    Dead,
}

impl RawPiece {
    /// Checks the record. Its slab has this generation, and lies at `slab_start..slab_end` of its chunk.
    pub fn check(
        &self,
        generation: u64,
        slab_start: u64,
        slab_end: u64,
    ) -> Result<Checked, FormatError> {
        if self.seal == dead(generation) {
            return Ok(Checked::Dead);
        }
        let piece = Piece {
            file: self.who & FILE_MAX,
            offset: self.offset,
            sequence: self.who >> FILE_BITS << 32 | self.place & u64::from(u32::MAX),
            position: (self.place >> 32) as u32,
            len: (self.seal & !FROZEN) as u32,
        };
        let found = (self.seal >> 32) as u32;
        let expected = piece.checksum(generation);
        if found != expected {
            return Err(FormatError::Checksum {
                what: "piece record",
                found,
                expected,
            });
        }
        let start = u64::from(piece.position);
        if piece.len == 0 || start < slab_start || start + u64::from(piece.len) > slab_end {
            return Err(FormatError::Field {
                what: "piece record",
                why: format!(
                    "{} bytes at {start} leave the slab {slab_start}..{slab_end}",
                    piece.len
                ),
            });
        }
        if piece
            .offset
            .checked_add(u64::from(piece.len))
            .is_none_or(|end| end > i64::MAX as u64)
        {
            return Err(FormatError::Field {
                what: "piece record",
                why: "beyond the largest file".into(),
            });
        }
        Ok(Checked::Live(piece))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_summed_as_their_bytes_are() {
        for seed in 0..1000u64 {
            let words = [1, 3, 5, 7, 11]
                .map(|odd| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_pow(odd));
            let bytes = words.map(u64::to_le_bytes);
            let expected = crc32c::crc32c(bytes.as_flattened());
            assert_eq!(checksum_words(words), expected, "{words:?}");
        }
    }

    #[test]
    fn a_record_of_an_earlier_lease_does_not_verify() {
        let piece = Piece {
            file: 1,
            offset: 2,
            sequence: 3,
            position: 4,
            len: 5,
        };
        assert_eq!(piece.raw(7).check(7, 0, 100), Ok(Checked::Live(piece)));
        assert!(piece.raw(7).check(8, 0, 100).is_err());
        let past = RawPiece {
            seal: dead(7),
            ..piece.raw(8)
        };
        assert_eq!(past.check(7, 0, 100), Ok(Checked::Dead));
        assert!(past.check(8, 0, 100).is_err());
    }

    #[test]
    fn any_flipped_bit_is_found() {
        let piece = Piece {
            file: FILE_MAX,
            offset: 1 << 30,
            sequence: 77,
            position: 4096,
            len: 4096,
        };
        let good = piece.raw(1);
        for bit in 0..64 {
            for field in 0..5 {
                let mut bad = good;
                match field {
                    0 => bad.who ^= 1 << bit,
                    1 => bad.offset ^= 1 << bit,
                    2 => bad.place ^= 1 << bit,
                    3 => bad.seal ^= 1 << bit,
                    _ => bad.seal = dead(1) ^ (1 << bit),
                }
                if bad.seal == good.seal ^ FROZEN {
                    continue;
                }
                assert!(bad.check(1, 0, 1 << 20).is_err(), "field {field} bit {bit}");
            }
        }
    }

    #[test]
    fn the_largest_numbers_come_back() {
        let piece = Piece {
            file: FILE_MAX,
            offset: 3,
            sequence: SEQUENCE_MAX,
            position: u32::MAX - 9,
            len: 9,
        };
        assert_eq!(piece.raw(7).check(7, 0, 1 << 32), Ok(Checked::Live(piece)));
        let other = Piece {
            file: FILE_MAX - 1,
            sequence: SEQUENCE_MAX - (1 << 32),
            ..piece
        };
        assert_eq!(other.raw(7).check(7, 0, 1 << 32), Ok(Checked::Live(other)));
    }

    #[test]
    fn a_frozen_piece_is_the_same_piece_and_poison_is_none() {
        let piece = Piece {
            file: 1,
            offset: 2,
            sequence: 3,
            position: 4,
            len: 5,
        };
        let mut record = piece.raw(7);
        record.seal |= FROZEN;
        assert_eq!(record.check(7, 0, 100), Ok(Checked::Live(piece)));
        record.seal = poison(7);
        assert!(record.check(7, 0, 100).is_err());
    }

    #[test]
    fn a_piece_that_grows_has_the_seals_of_pieces_of_each_length() {
        let piece = Piece {
            file: 9,
            offset: 1 << 33,
            sequence: 77,
            position: 4096,
            len: 1,
        };
        for generation in [0, 1, 77, u64::MAX] {
            let seals = Seals::new(&piece, generation);
            for len in (0..32).flat_map(|bit| [1 << bit, (1 << bit) - 1, 0x1234_5678 >> bit]) {
                assert_eq!(
                    seals.at(len),
                    Piece { len, ..piece }.seal(generation),
                    "{len} bytes"
                );
            }
        }
    }

    #[test]
    fn a_piece_that_leaves_its_slab_is_refused() {
        let piece = Piece {
            file: 1,
            offset: 0,
            sequence: 1,
            position: 60,
            len: 50,
        };
        assert!(piece.raw(1).check(1, 0, 100).is_err());
        assert!(piece.raw(1).check(1, 64, 200).is_err());
    }
}
