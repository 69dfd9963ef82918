//! The layout of an arena's file: the offsets of all its parts, computed from the sizes in the superblock, its first
//! page. The arena is shared memory with the bytes of files that are not in the backing directory yet.
//!
//! ```text
//! 0             superblock page, state page
//! 8192          file words: counters by which processes with direct access notice that a file has changed
//! journal       two halves
//! tables        one piece table for each chunk
//! data          slots for chunks, 2 MiB-aligned
//! ```
//!
//! A *chunk* is the unit in which data is stored. It has a *piece table*, which says which bytes of which file are
//! where in its data. A *slot* has space for the data of one chunk, in the arena's memory, or in the *spill file* on a
//! local disk. There are as many chunks as slots of both kinds. A chunk is divided into *slabs*, each filled by one
//! writer.
//!
//! Each position is computed from numbers in the superblock, and never from the environment.

use crate::FormatError;
use crate::piece::PIECE_BYTES;
use crate::slab::{CHUNK_HEADER_BYTES, SLAB_HEADER_BYTES};

/// Divisor: the free memory divided by this is left for the journal's growth, for logs and for other files in memory.
const SPARE_DIVISOR: u64 = 8;
/// Length of a page. Positions of data are congruent to file offsets modulo this.
pub const PAGE: u64 = 4096;
/// Alignment of the data area, so that huge pages can back it.
pub const DATA_ALIGN: u64 = 2 << 20;
/// Length of the smallest slabs, in bytes. The writer of a small file gets one.
pub const SLAB_SMALL: u64 = 64 << 10;
/// Length of the middle slabs, in bytes.
pub const SLAB_MEDIUM: u64 = 512 << 10;
/// Minimum length of a chunk in bytes.
pub const CHUNK_MIN: u64 = SLAB_SMALL;
/// Maximum length of a chunk in bytes. Positions in a chunk have 32 bits.
pub const CHUNK_MAX: u64 = 1 << 30;
/// Number of piece records for each 64 KiB of a chunk. With 13 the table of a 4 MiB chunk has nine pages, less
/// than 1 % of the data. A slab of scattered 4 KiB writes is then nearly full when its last record is used.
pub const RECORDS_PER_SMALL: u32 = 13;

/// Offset of the file words. By a file's word, processes with direct access to the file detect whether what they know
/// of it is still valid.
pub const WORDS_OFFSET: u64 = 2 * PAGE;
/// Number of file words. Files that share a word count as changed together, which only costs time.
pub const WORDS_COUNT: u32 = 4096;
/// Length of all file words in bytes.
pub const WORDS_BYTES: u64 = WORDS_COUNT as u64 * 4;

/// Number of bytes of each half of the journal that always have memory. The rest gets memory when the journal grows.
pub const JOURNAL_STEP: u64 = 256 << 10;
/// A half of the journal may grow to the data's length divided by this. The record of a file's name has some 200 bytes.
/// So a half can name all files of an arena that is full of 4 KiB files. An unused part has no memory.
const JOURNAL_DATA_DIVISOR: u64 = 16;
/// Bounds on the maximum length of a half of the journal.
const JOURNAL_HALF_MIN: u64 = 4 * JOURNAL_STEP;
const JOURNAL_HALF_MAX: u64 = 4 << 30;

/// The layout of one arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Length of a chunk in bytes, a power of two.
    pub chunk_bytes: u64,
    /// Number of slots in memory.
    pub chunk_count: u32,
    /// Number of slots in the spill file; 0 without one.
    pub spill_count: u32,
    /// Maximum length of one half of the journal in bytes.
    pub journal_half_bytes: u64,
}

impl Geometry {
    /// Computes the layout for `arena_bytes` of chunks, without a spill file.
    pub fn new(arena_bytes: u64, chunk_bytes: u64) -> Result<Self, FormatError> {
        Self::with_spill(arena_bytes, chunk_bytes, 0)
    }

    /// Computes the layout of an arena file for `arena_bytes` of chunks in memory and `spill_bytes` in the spill file
    /// on disk. Both are divided into chunks of `chunk_bytes`; a remainder is not used. Fails if a size is not
    /// possible.
    pub fn with_spill(
        arena_bytes: u64,
        chunk_bytes: u64,
        spill_bytes: u64,
    ) -> Result<Self, FormatError> {
        let invalid = |why: String| FormatError::Field {
            what: "geometry",
            why,
        };
        if !chunk_bytes.is_power_of_two() || !(CHUNK_MIN..=CHUNK_MAX).contains(&chunk_bytes) {
            return Err(invalid(format!(
                "chunk-size {chunk_bytes} must be a power of two from {CHUNK_MIN} to {CHUNK_MAX}"
            )));
        }
        if arena_bytes < chunk_bytes {
            return Err(invalid(format!(
                "arena-size {arena_bytes} does not hold one chunk of {chunk_bytes} bytes: raise arena-size or lower chunk-size"
            )));
        }
        let Ok(chunk_count) = u32::try_from(arena_bytes / chunk_bytes) else {
            return Err(invalid(format!(
                "arena-size {arena_bytes} is more than 2^32 chunks"
            )));
        };
        if spill_bytes > 0 && spill_bytes < chunk_bytes {
            return Err(invalid(format!(
                "spill-size {spill_bytes} does not hold one chunk of {chunk_bytes} bytes: raise spill-size or lower chunk-size"
            )));
        }
        // A count that does not fit becomes the maximum. Then the sum does not fit either, and the sizes are refused.
        let spill_count = u32::try_from(spill_bytes / chunk_bytes).unwrap_or(u32::MAX);
        if spill_count.checked_add(chunk_count).is_none() {
            return Err(invalid(format!(
                "arena-size and spill-size {spill_bytes} are more than 2^32 chunks"
            )));
        }
        // The length of the journal is computed from the number of chunks, not from `arena_bytes`: the superblock
        // stores only that number, and must give the same length.
        let data_bytes = u64::from(chunk_count) * chunk_bytes;
        let journal_half_bytes = (data_bytes / JOURNAL_DATA_DIVISOR)
            .clamp(JOURNAL_HALF_MIN, JOURNAL_HALF_MAX)
            .next_multiple_of(JOURNAL_STEP);
        Ok(Self {
            chunk_bytes,
            chunk_count,
            spill_count,
            journal_half_bytes,
        })
    }

    /// Returns the number of chunks, in memory and spilled.
    pub fn chunks(&self) -> u32 {
        self.chunk_count + self.spill_count
    }

    /// Returns the length of all slots of the spill file.
    pub fn spill_bytes(&self) -> u64 {
        self.chunk_bytes * u64::from(self.spill_count)
    }

    /// Returns the length of all slots in memory.
    pub fn data_bytes(&self) -> u64 {
        self.chunk_bytes * u64::from(self.chunk_count)
    }

    /// Returns the offset of half `half` (0 or 1) of the journal.
    pub fn journal_offset(&self, half: usize) -> u64 {
        WORDS_OFFSET + WORDS_BYTES + half as u64 * self.journal_half_bytes
    }

    /// Returns the offset of a file's word. `index` is taken modulo [`WORDS_COUNT`].
    pub fn word_offset(&self, index: u32) -> u64 {
        WORDS_OFFSET + 4 * u64::from(index % WORDS_COUNT)
    }

    /// Returns the number of smallest slabs in a chunk.
    pub fn small_slabs(&self) -> u32 {
        (self.chunk_bytes / SLAB_SMALL) as u32
    }

    /// Returns the number of piece records in a chunk's table.
    pub fn records_per_chunk(&self) -> u32 {
        self.small_slabs() * RECORDS_PER_SMALL
    }

    /// Returns the length of one chunk's table.
    pub fn table_bytes(&self) -> u64 {
        (CHUNK_HEADER_BYTES
            + u64::from(self.small_slabs()) * SLAB_HEADER_BYTES
            + u64::from(self.records_per_chunk()) * PIECE_BYTES)
            .next_multiple_of(PAGE)
    }

    /// Returns the offset of the table of `chunk`.
    pub fn table_offset(&self, chunk: u32) -> u64 {
        self.journal_offset(2) + u64::from(chunk) * self.table_bytes()
    }

    /// Returns the offset of the header of a slab.
    pub fn slab_header_offset(&self, chunk: u32, slab: u32) -> u64 {
        self.table_offset(chunk) + CHUNK_HEADER_BYTES + u64::from(slab) * SLAB_HEADER_BYTES
    }

    /// Returns the offset of a piece record.
    pub fn record_offset(&self, chunk: u32, record: u32) -> u64 {
        self.slab_header_offset(chunk, self.small_slabs()) + u64::from(record) * PIECE_BYTES
    }

    /// Returns the offset of the first slot.
    pub fn data_offset(&self) -> u64 {
        self.table_offset(self.chunks())
            .next_multiple_of(DATA_ALIGN)
    }

    /// Returns the offset of a slot in memory. The home of a chunk says which slot it has.
    pub fn slot_offset(&self, slot: u32) -> u64 {
        self.data_offset() + u64::from(slot) * self.chunk_bytes
    }

    /// Returns how many bytes of the file get memory when the arena is made.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated_ranges()
            .iter()
            .map(|range| range.end - range.start)
            .sum()
    }

    /// Returns the `arena-size` to propose if `free_bytes` are free, in whole MiB. Returns `None` if no arena fits.
    pub fn proposed_arena_bytes(&self, free_bytes: u64) -> Option<u64> {
        let usable_bytes = free_bytes - free_bytes / SPARE_DIVISOR;
        match self.fitting_arena_bytes(usable_bytes) {
            0 => None,
            arena_bytes => Some(arena_bytes),
        }
    }

    /// Returns the size of the largest arena that fits into `free_bytes`, in whole MiB; 0 if none fits. It has chunks
    /// and a spill file of the same size as this one. An arena fits if its [`Geometry::allocated_bytes`] are at most
    /// `free_bytes`.
    fn fitting_arena_bytes(&self, free_bytes: u64) -> u64 {
        let fits = |chunks: u64| {
            let arena_bytes = chunks * self.chunk_bytes;
            Self::with_spill(arena_bytes, self.chunk_bytes, self.spill_bytes())
                .is_ok_and(|geometry| geometry.allocated_bytes() <= free_bytes)
        };
        // A binary search: `fitting` chunks fit, and `too_many` do not.
        let mut fitting = 0;
        let mut too_many = free_bytes / self.chunk_bytes + 1;
        while too_many - fitting > 1 {
            let chunks = fitting.midpoint(too_many);
            if fits(chunks) {
                fitting = chunks;
            } else {
                too_many = chunks;
            }
        }
        let whole_mib = (fitting * self.chunk_bytes) >> 20;
        whole_mib << 20
    }

    /// Returns the ranges of the file that get memory when the arena is made: all except the part into which the
    /// journal may grow, and the gap that aligns the data.
    pub fn allocated_ranges(&self) -> [std::ops::Range<u64>; 4] {
        let first_half = self.journal_offset(0);
        let second_half = self.journal_offset(1);
        [
            0..first_half + JOURNAL_STEP,
            second_half..second_half + JOURNAL_STEP,
            self.table_offset(0)..self.table_offset(self.chunks()),
            self.data_offset()..self.file_bytes(),
        ]
    }

    /// Returns the length of the file.
    pub fn file_bytes(&self) -> u64 {
        self.slot_offset(self.chunk_count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_arena_that_fits_fits_and_one_chunk_more_does_not() {
        let chunk = 4 << 20;
        let wanted = Geometry::new(1 << 30, chunk).unwrap();
        for free_mib in [1, 7, 8, 64, 65, 259, 1000] {
            let free = free_mib << 20;
            let fitting = wanted.fitting_arena_bytes(free);
            let allocated = |bytes| Geometry::new(bytes, chunk).unwrap().allocated_bytes();
            assert!(fitting == 0 || allocated(fitting) <= free, "{free_mib} MiB");
            assert!(allocated(fitting + chunk) > free, "{free_mib} MiB");
        }
    }

    #[test]
    fn areas_follow_each_other_without_overlap() {
        for (arena, chunk) in [
            (64 << 10, 64 << 10),
            (16 << 20, 4 << 20),
            (1 << 30, 64 << 20),
            (256 << 20, 128 << 10),
        ] {
            let g = Geometry::with_spill(arena, chunk, 3 * chunk).unwrap();
            assert!(g.word_offset(WORDS_COUNT - 1) + 4 <= g.journal_offset(0));
            assert_eq!(
                (g.spill_bytes(), g.chunks() - g.chunk_count),
                (3 * chunk, 3)
            );
            assert!(g.journal_offset(1) == g.journal_offset(0) + g.journal_half_bytes);
            assert!(g.allocated_ranges().is_sorted_by(|a, b| a.end <= b.start));
            assert!(JOURNAL_STEP <= g.journal_half_bytes);
            assert!(g.record_offset(0, g.records_per_chunk()) <= g.table_offset(1));
            assert!(g.table_offset(g.chunks()) <= g.data_offset());
            assert_eq!(g.data_offset() % DATA_ALIGN, 0);
            assert_eq!(g.file_bytes() - g.data_offset(), g.data_bytes());
        }
    }

    #[test]
    fn regression_a_size_that_is_no_multiple_of_the_chunk_gives_the_layout_of_its_chunks() {
        for (arena, chunk) in [
            ((256 << 20) + (3 << 20), 4 << 20),
            (2_151_678_000, 512 << 20),
        ] {
            let g = Geometry::new(arena, chunk).unwrap();
            assert_eq!(Geometry::new(g.data_bytes(), chunk), Ok(g));
        }
    }

    #[test]
    fn the_layout_follows_from_the_chunks_alone() {
        for arena in [65 << 20, 130 << 20, (13 << 30) / 10, (256 << 20) + 1] {
            let g = Geometry::new(arena, 4 << 20).unwrap();
            assert_eq!(Geometry::new(g.data_bytes(), g.chunk_bytes), Ok(g));
        }
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_option_to_change() {
        for (arena, chunk) in [
            (1 << 20, 4 << 20),
            (1 << 20, 3 << 16),
            (1 << 20, 1 << 10),
            (0, 1 << 20),
        ] {
            let text = Geometry::new(arena, chunk).unwrap_err().to_string();
            assert!(
                text.contains("arena-size") || text.contains("chunk-size"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_spill_file_below_one_chunk_is_refused_with_the_option_to_change() {
        let text = Geometry::with_spill(16 << 20, 4 << 20, 1 << 20)
            .unwrap_err()
            .to_string();
        assert!(text.contains("spill-size"), "{text}");
    }

    #[test]
    fn what_is_not_data_takes_less_than_one_percent() {
        for arena in [1 << 30, 3 << 30, 64 << 30] {
            let g = Geometry::new(arena, 4 << 20).unwrap();
            let rest = g.allocated_bytes() - g.data_bytes();
            assert!(rest * 100 < g.data_bytes(), "{rest} of {}", g.data_bytes());
        }
    }
}
