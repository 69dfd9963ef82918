//! Ranges of a file that have data. Between them are holes.

use std::ops::Range;

use crate::{Backing, Errno, Seek};

/// Returns the ranges with data within a range of a file, in order. If the file system does not report holes, the whole
/// range counts as data.
pub fn data_ranges<'a, B: Backing>(
    backing: &'a B,
    file: &'a B::File,
    range: Range<u64>,
) -> DataRanges<'a, B> {
    DataRanges {
        backing,
        file,
        unsearched: range,
    }
}

/// Iterator of [`data_ranges`].
pub struct DataRanges<'a, B: Backing> {
    backing: &'a B,
    file: &'a B::File,
    /// Part of the range that was not searched yet.
    unsearched: Range<u64>,
}

impl<B: Backing> Iterator for DataRanges<'_, B> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let Range {
            start: position,
            end,
        } = self.unsearched;
        if position >= end {
            return None;
        }
        let start = match self.backing.seek(self.file, position, Seek::Data) {
            Ok(data) => data.clamp(position, end),
            Err(Errno::NXIO) => end,
            Err(_) => position,
        };
        if start == end {
            self.unsearched.start = end;
            return None;
        }
        let hole = self.backing.seek(self.file, start, Seek::Hole);
        self.unsearched.start = hole.map_or(end, |hole| hole.clamp(start + 1, end));
        Some(start..self.unsearched.start)
    }
}
