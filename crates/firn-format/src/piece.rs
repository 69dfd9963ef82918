//! Piece records: the index of the data that programs have written and that is not in the backing directory yet.
//!
//! The data is in the *arena*, a file of shared memory. The arena is allocated in *chunks*, each divided into *slabs*;
//! one writer at a time has a *lease* of a slab and fills it. A *piece* is a range of bytes of one file that a writer
//! has appended to a slab. Its record is in the table of the chunk, and has five words.
//!
//! ```text
//! offset  word       content
//! 0       FILE       bits 0 to 39: file id; bits 40 to 63: bits 32 to 55 of the sequence
//! 8       OFFSET     offset in the file
//! 16      MODIFIED   time of the last write to the piece, nanoseconds since 1970; 0 if unknown
//! 24      POSITION   low half: bits 0 to 31 of the sequence; high half: position, from the start of the chunk
//! 32      SEAL       low half: length, whose highest bit is FROZEN; high half: CRC32C
//! ```
//!
//! The *sequence* orders all writes of the arena: where pieces overlap in a file, the one with the higher sequence has
//! the newer bytes.
//!
//! Crash safety
//! * The *seal* is stored last, and publishes the record. Length and checksum are in this one word, so a later append
//!   can also extend the piece by one store. A writer that is killed leaves the old piece or the new one.
//! * The checksum covers the generation of the slab, which each lease raises. So a record that is left over from an
//!   earlier lease is never valid.
//! * The checksum does not cover the time, which is stored separately. Readers check its bounds.
//! * The data has no checksum: the death of a process does not damage memory of a live host.
//!
//! Two seals have the length 0, and so are never those of a piece: [`poison_seal`] ends a lease, and [`dead_seal`]
//! marks a piece without pending bytes.

use crate::FormatError;
#[cfg(target_arch = "x86_64")]
use crate::processor::processor;

/// Length of a record in bytes.
pub const PIECE_BYTES: u64 = 40;

/// Offsets of the words in a record, each a `u64`.
pub mod word {
    /// File id, and the upper part of the sequence.
    pub const FILE: u64 = 0;
    /// Offset in the file.
    pub const OFFSET: u64 = 8;
    /// Time of the last write to the piece.
    pub const MODIFIED: u64 = 16;
    /// Lower part of the sequence, and the position in the chunk.
    pub const POSITION: u64 = 24;
    /// Length and checksum.
    pub const SEAL: u64 = 32;
}

/// Number of bits of a file id.
const FILE_BITS: u32 = 40;
/// Largest file id. Ten thousand new files a second reach it after three years.
pub const FILE_MAX: u64 = (1 << FILE_BITS) - 1;
/// Largest sequence. Ten million writes a second reach it after two centuries.
pub const SEQUENCE_MAX: u64 = (1 << 56) - 1;

/// Bit of a seal that says that the piece must not be extended. The checksum does not cover it. Lengths are smaller
/// than this bit, because a chunk has at most `CHUNK_MAX` bytes.
pub const FROZEN: u64 = 1 << 31;
const _: () = assert!(crate::geometry::CHUNK_MAX < FROZEN);

/// Returns the seal that firnd stores in the next free record of a lease, to revoke it.
///
/// A writer publishes a record by a compare-exchange of its seal, which fails after this store. So the writer can
/// publish nothing more.
pub fn poison_seal(generation: u64) -> u64 {
    (generation << 32) | FROZEN
}

/// Returns the seal that firnd stores in the record of a piece when no byte of it is pending any more.
///
/// It differs in many bits from the seals of pieces and from [`poison_seal`], so a flipped bit does not make a piece
/// pending again.
pub fn dead_seal(generation: u64) -> u64 {
    (!generation << 32) | FROZEN
}

/// The content of a valid piece record, without the time.
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

/// The words of a piece record as they are stored, without the time. They may be damaged: [`RawPiece::check`] validates
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawPiece {
    /// The word [`word::FILE`].
    pub file_word: u64,
    /// The word [`word::OFFSET`].
    pub offset: u64,
    /// The word [`word::POSITION`].
    pub position_word: u64,
    /// The word [`word::SEAL`].
    pub seal: u64,
}

impl Piece {
    /// Encodes the record of this piece for a slab of `generation`. File id and sequence must not exceed [`FILE_MAX`]
    /// and [`SEQUENCE_MAX`].
    pub fn to_raw(&self, generation: u64) -> RawPiece {
        debug_assert!(
            self.file <= FILE_MAX && self.sequence <= SEQUENCE_MAX,
            "{self:?}"
        );
        let seal = self.seal(generation);
        RawPiece {
            file_word: self.file_word(),
            offset: self.offset,
            position_word: self.position_word(),
            seal,
        }
    }

    /// Returns the word [`word::FILE`].
    pub fn file_word(&self) -> u64 {
        self.file | self.sequence >> 32 << FILE_BITS
    }

    /// Returns the word [`word::POSITION`].
    pub fn position_word(&self) -> u64 {
        self.sequence & u64::from(u32::MAX) | u64::from(self.position) << 32
    }

    /// Returns the word [`word::SEAL`] for a slab of `generation`. Storing it publishes the piece.
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

/// Computes what [`checksum_words`] returns with the processor's instruction for CRC32C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "sse4.2")]
fn checksum_words_by_instruction(words: [u64; 5]) -> u32 {
    let next = |sum, word| std::arch::x86_64::_mm_crc32_u64(sum, word);
    !(words.into_iter().fold(u64::from(u32::MAX), next) as u32)
}

/// Computes the seals of one piece for any length, faster than [`Piece::seal`]. An append that extends a piece needs
/// only a new length.
///
/// A CRC is linear: the checksums of two messages differ by a value that depends only on the bits in which the messages
/// differ. So the seal is computed from the checksum for length 0 and a table of the differences that a length makes.
/// Computing the whole checksum took a third of the time of a write of 64 bytes.
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

    /// Returns what [`Piece::seal`] returns for a piece of `len` bytes.
    #[inline]
    pub fn for_len(self, len: u32) -> u64 {
        let [byte_0, byte_1, byte_2, byte_3] = len.to_le_bytes();
        let [table_0, table_1, table_2, table_3] = &CHECKSUM_CHANGES;
        let change = table_0[byte_0 as usize]
            ^ table_1[byte_1 as usize]
            ^ table_2[byte_2 as usize]
            ^ table_3[byte_3 as usize];
        u64::from(len) | (u64::from(self.checksum_of_empty ^ change) << 32)
    }
}

/// The difference that each byte of the length makes to the checksum, by the byte's index and value.
static CHECKSUM_CHANGES: [[u32; 256]; 4] = compute_checksum_changes();

/// Number of bytes after the length that the checksum covers: the generation.
const BYTES_AFTER_LENGTH: usize = 8;

/// Computes [`CHECKSUM_CHANGES`]: for each byte of the length and each value of the byte, how the checksum differs from
/// that of length 0. The value is shifted through the rest of the message, as by a CRC without a table.
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
            // The rest of the message: this byte, the higher bytes of the length, and the bytes after the length.
            while bit < 8 * (4 - byte + BYTES_AFTER_LENGTH) {
                // The subtraction gives a mask of ones if the lowest bit is set, else 0.
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

/// Maximum length of a file: the largest offset of pread(2) and pwrite(2).
const FILE_BYTES_MAX: u64 = i64::MAX as u64;

/// A valid piece record, as [`RawPiece::check`] returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckedPiece {
    /// The piece has pending bytes, except those in ranges that the journal records as drained.
    Live(Piece),
    /// The piece has no pending bytes.
    Dead,
}

impl RawPiece {
    /// Decodes the record of a piece, a range of a file's bytes in a slab, if it is valid. `generation` is the number
    /// of the slab's present lease. The slab occupies the bytes `slab_start..slab_end` of its chunk.
    ///
    /// Fails if the checksum does not match, as for a record that was never published in this lease. Fails also if the
    /// piece leaves its slab, or ends beyond the largest offset of a file.
    pub fn check(
        &self,
        generation: u64,
        slab_start: u64,
        slab_end: u64,
    ) -> Result<CheckedPiece, FormatError> {
        if self.seal == dead_seal(generation) {
            return Ok(CheckedPiece::Dead);
        }
        let piece = self.unpack();
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
        let file_end = piece.offset.checked_add(u64::from(piece.len));
        if file_end.is_none_or(|end| end > FILE_BYTES_MAX) {
            return Err(FormatError::Field {
                what: "piece record",
                why: "beyond the largest file".into(),
            });
        }
        Ok(CheckedPiece::Live(piece))
    }

    /// Returns the fields of the record as they are stored, without a check. The file word has the upper bits of the
    /// sequence, and the position word the lower ones. The seal has the length, and the checksum above it.
    fn unpack(&self) -> Piece {
        let sequence_high = self.file_word >> FILE_BITS;
        let sequence_low = self.position_word & u64::from(u32::MAX);
        Piece {
            file: self.file_word & FILE_MAX,
            offset: self.offset,
            sequence: sequence_high << 32 | sequence_low,
            position: (self.position_word >> 32) as u32,
            len: (self.seal & !FROZEN) as u32,
        }
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
        assert_eq!(
            piece.to_raw(7).check(7, 0, 100),
            Ok(CheckedPiece::Live(piece))
        );
        assert!(piece.to_raw(7).check(8, 0, 100).is_err());
        let past = RawPiece {
            seal: dead_seal(7),
            ..piece.to_raw(8)
        };
        assert_eq!(past.check(7, 0, 100), Ok(CheckedPiece::Dead));
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
        let good = piece.to_raw(1);
        for bit in 0..64 {
            for field in 0..5 {
                let mut bad = good;
                match field {
                    0 => bad.file_word ^= 1 << bit,
                    1 => bad.offset ^= 1 << bit,
                    2 => bad.position_word ^= 1 << bit,
                    3 => bad.seal ^= 1 << bit,
                    _ => bad.seal = dead_seal(1) ^ (1 << bit),
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
        assert_eq!(
            piece.to_raw(7).check(7, 0, 1 << 32),
            Ok(CheckedPiece::Live(piece))
        );
        let other = Piece {
            file: FILE_MAX - 1,
            sequence: SEQUENCE_MAX - (1 << 32),
            ..piece
        };
        assert_eq!(
            other.to_raw(7).check(7, 0, 1 << 32),
            Ok(CheckedPiece::Live(other))
        );
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
        let mut record = piece.to_raw(7);
        record.seal |= FROZEN;
        assert_eq!(record.check(7, 0, 100), Ok(CheckedPiece::Live(piece)));
        record.seal = poison_seal(7);
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
                    seals.for_len(len),
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
        assert!(piece.to_raw(1).check(1, 0, 100).is_err());
        assert!(piece.to_raw(1).check(1, 64, 200).is_err());
    }
}
