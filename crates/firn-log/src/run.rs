//! Runs: pieces of a file that follow a regular pattern.
//!
//! A process of a parallel job writes records of one size at equal distances (*strided*), or one contiguous range
//! (*segmented*). Either is one [`Run`], however many pieces it has. So an index stays small.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A piece of a file: `len` bytes from `offset` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// Length in bytes; never 0.
    pub len: u64,
}

/// Pieces of one length at equal distances. Their bytes lie one after the other in a log.
///
/// Invariants
/// * `len` and `count` are not 0.
/// * `stride >= len` if there are several pieces, so they do not overlap.
/// * No piece ends after [`FILE_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Offset of the first piece in the file.
    offset: u64,
    /// Length of each piece in bytes.
    len: u64,
    /// Distance between the offsets of two pieces.
    stride: u64,
    /// Number of pieces.
    count: u64,
}

/// Maximum length of a file (`loff_t`).
pub const FILE_BYTES_MAX: u64 = i64::MAX as u64;

impl Run {
    /// Makes a run of one piece.
    ///
    /// # Panics
    ///
    /// If the piece is empty or ends after [`FILE_BYTES_MAX`].
    pub fn from_piece(piece: Piece) -> Self {
        let run = Self {
            offset: piece.offset,
            len: piece.len,
            stride: piece.len,
            count: 1,
        };
        assert!(run.is_valid(), "a piece of a file: {piece:?}");
        run
    }

    /// Makes a run of decoded numbers: the gap between two pieces, and the number of pieces after the first. Returns
    /// `None` if they are not valid.
    pub(crate) fn from_stored(offset: u64, len: u64, gap: u64, more: u64) -> Option<Self> {
        let run = Self {
            offset,
            len,
            stride: len.checked_add(gap)?,
            count: more.checked_add(1)?,
        };
        run.is_valid().then_some(run)
    }

    /// Returns the offset of the first piece in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length of each piece in bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the number of bytes between two pieces.
    pub(crate) fn gap(&self) -> u64 {
        self.stride - self.len
    }

    /// Returns how many pieces may have bytes in `range`. The result may be one too large.
    pub(crate) fn count_in(&self, range: &Range<u64>) -> u64 {
        let pieces = self.pieces_touching(range);
        pieces.end.saturating_sub(pieces.start)
    }

    /// Returns the total number of bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// Returns the number of pieces.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Returns the range from the beginning of the first piece to the end of the last.
    pub fn span(&self) -> Range<u64> {
        let last = self.offset + self.stride * (self.count - 1);
        self.offset..last + self.len
    }

    /// Returns the pieces in order.
    pub fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let Self {
            offset,
            len,
            stride,
            count,
        } = *self;
        (0..count).map(move |number| Piece {
            offset: offset + stride * number,
            len,
        })
    }

    /// Returns the parts of the pieces that lie in `range`. The time depends on the number of these parts, not on that
    /// of all pieces.
    pub fn parts_in(&self, range: Range<u64>) -> impl Iterator<Item = Part> + use<> {
        let run = *self;
        run.pieces_touching(&range).filter_map(move |number| {
            let start = run.offset + run.stride * number;
            let part_start = start.max(range.start);
            let part_end = (start + run.len).min(range.end);
            (part_start < part_end).then(|| Part {
                file: part_start..part_end,
                run_offset: run.len * number + (part_start - start),
            })
        })
    }

    /// Returns the numbers of the pieces that may have bytes in `range`.
    fn pieces_touching(&self, range: &Range<u64>) -> Range<u64> {
        if range.start >= range.end || range.end <= self.offset {
            return 0..0;
        }
        // The number of the piece that contains the start, or after which the start lies in a gap.
        let first = range.start.saturating_sub(self.offset) / self.stride;
        let last = (range.end - 1 - self.offset) / self.stride;
        first..(last + 1).min(self.count)
    }

    /// Adds a piece at the end if it continues the pattern. Returns whether it did.
    fn extend(&mut self, piece: Piece) -> bool {
        let end = self.offset + self.len;
        // A piece that continues a single piece makes it longer.
        if self.count == 1 && piece.offset == end {
            self.len += piece.len;
            self.stride = self.len;
            return true;
        }
        if piece.len != self.len || piece.offset < end {
            return false;
        }
        let distance_from_first = piece.offset - self.offset;
        if self.count == 1 {
            // The second piece determines the stride.
            self.stride = distance_from_first;
        } else if self.stride.checked_mul(self.count) != Some(distance_from_first) {
            // The next piece must begin at `offset + stride * count`.
            return false;
        }
        self.count += 1;
        true
    }

    /// Returns whether the pieces of the run are not empty, do not overlap, and lie within the largest file.
    fn is_valid(&self) -> bool {
        let Some(end) = self.checked_end() else {
            return false;
        };
        self.len > 0
            && (self.count == 1 || self.stride >= self.len)
            && self.stride > 0
            && end <= FILE_BYTES_MAX
    }

    /// Returns the end of the last piece. Returns `None` if there is no piece, or if the end is no `u64`.
    fn checked_end(&self) -> Option<u64> {
        let last_piece = self.count.checked_sub(1)?;
        let distance = last_piece.checked_mul(self.stride)?;
        let last_offset = self.offset.checked_add(distance)?;
        last_offset.checked_add(self.len)
    }
}

/// A part of a run that lies in a range of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Range of the part in the file.
    pub file: Range<u64>,
    /// Offset of the first byte in the run, as counted in the log.
    pub run_offset: u64,
}

/// Returns the runs of pieces whose bytes lie one after the other in a log. Pieces that are contiguous in the file are
/// joined.
///
/// # Panics
///
/// If a piece is empty or ends after [`FILE_BYTES_MAX`].
pub fn find_runs(pieces: impl IntoIterator<Item = Piece>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for piece in join_neighbours(pieces) {
        // Made even if the piece extends the last run, because this checks the piece.
        let new_run = Run::from_piece(piece);
        let is_joined = runs.last_mut().is_some_and(|run| run.extend(piece));
        if !is_joined {
            runs.push(new_run);
        }
    }
    runs
}

/// Joins each piece that begins where the one before it ends.
fn join_neighbours(pieces: impl IntoIterator<Item = Piece>) -> impl Iterator<Item = Piece> {
    let mut pieces = pieces.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut joined = pieces.next()?;
        while let Some(next) = pieces.next_if(|next| joined.offset + joined.len == next.offset) {
            joined.len += next.len;
        }
        Some(joined)
    })
}

/// A run as an index stores it. Distances are stored in place of offsets, because small numbers take few bytes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct StoredRun {
    /// Distance from the offset of the run before.
    distance: i64,
    len: u64,
    /// Number of bytes between two pieces.
    gap: u64,
    /// Number of pieces after the first.
    more: u64,
}

/// A list of runs as an index stores it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StoredRuns(Vec<StoredRun>);

impl StoredRuns {
    /// Converts runs to their stored form.
    pub(crate) fn pack(runs: &[Run]) -> Self {
        let mut last_offset = 0;
        let packed = runs.iter().map(|run| {
            let distance = run.offset.wrapping_sub(last_offset).cast_signed();
            last_offset = run.offset;
            StoredRun {
                distance,
                len: run.len,
                gap: run.gap(),
                more: run.count - 1,
            }
        });
        Self(packed.collect())
    }

    /// Converts stored runs back. Returns `None` if one of them is not valid.
    pub(crate) fn unpack(&self) -> Option<Vec<Run>> {
        let mut offset = 0u64;
        let mut runs = Vec::with_capacity(self.0.len());
        for stored in &self.0 {
            offset = offset.wrapping_add(stored.distance.cast_unsigned());
            let run = Run::from_stored(offset, stored.len, stored.gap, stored.more)?;
            runs.push(run);
        }
        Some(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn strided(offset: u64, len: u64, stride: u64, count: u64) -> Vec<Piece> {
        let pieces = (0..count).map(|number| Piece {
            offset: offset + stride * number,
            len,
        });
        pieces.collect()
    }

    #[test]
    fn strided_and_segmented_pieces_are_one_run() {
        assert_eq!(find_runs(strided(7, 4096, 65536, 10_000)).len(), 1);
        let segment = find_runs(strided(0, 4096, 4096, 10_000));
        assert_eq!(
            segment,
            [Run::from_piece(Piece {
                offset: 0,
                len: 40_960_000
            })]
        );
    }

    #[test]
    fn a_change_of_pattern_begins_a_run() {
        let mut pieces = strided(0, 10, 100, 5);
        pieces.extend(strided(1000, 20, 100, 3));
        pieces.extend(strided(900, 10, 10, 1));
        let runs = find_runs(pieces.clone());
        assert_eq!(runs.len(), 3);
        let again: Vec<Piece> = runs.iter().flat_map(Run::pieces).collect();
        assert_eq!(again, pieces);
    }

    fn any_pieces() -> impl Strategy<Value = Vec<Piece>> {
        let one = (0u64..200, 1u64..20).prop_map(|(offset, len)| Piece { offset, len });
        let some =
            prop_oneof![
                one.prop_map(|piece| vec![piece]),
                (0u64..100, 1u64..8, 0u64..8, 1u64..8)
                    .prop_map(|(offset, len, gap, count)| strided(offset, len, len + gap, count)),
            ];
        proptest::collection::vec(some, 0..6).prop_map(|groups| groups.concat())
    }

    /// Returns the offset in the file of each byte in the log.
    fn offsets(pieces: impl IntoIterator<Item = Piece>) -> Vec<u64> {
        let ranges = pieces.into_iter();
        ranges
            .flat_map(|piece| piece.offset..piece.offset + piece.len)
            .collect()
    }

    proptest! {
        #[test]
        fn runs_are_the_same_bytes_in_the_same_order(pieces in any_pieces()) {
            let runs = find_runs(pieces.clone());
            prop_assert_eq!(offsets(runs.iter().flat_map(Run::pieces)), offsets(pieces));
            prop_assert_eq!(StoredRuns::pack(&runs).unpack(), Some(runs));
        }

        #[test]
        fn parts_in_a_range_are_the_bytes_there(pieces in any_pieces(), from in 0u64..250, len in 0u64..100) {
            let range = from..from + len;
            for run in find_runs(pieces) {
                let all = offsets(run.pieces());
                let inside: Vec<(u64, u64)> = all.iter().enumerate()
                    .filter(|(_, offset)| range.contains(offset))
                                    .map(|(run_offset, &offset)| (offset, run_offset as u64))
                    .collect();
                let found: Vec<(u64, u64)> = run.parts_in(range.clone())
                    .flat_map(|part| (part.file.clone()).zip(part.run_offset..))
                    .collect();
                prop_assert_eq!(found, inside);
            }
        }

        #[test]
        fn whatever_numbers_are_stored_runs_are_valid(numbers in proptest::collection::vec(any::<(i64, u64, u64, u64)>(), 0..4)) {
            let stored = numbers.into_iter().map(|(distance, len, gap, more)| StoredRun { distance, len, gap, more });
            if let Some(runs) = StoredRuns(stored.collect()).unpack() {
                for run in runs {
                    prop_assert!(run.span().end <= FILE_BYTES_MAX);
                    prop_assert!(run.bytes() <= run.span().end - run.span().start);
                }
            }
        }
    }
}
