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

    /// Finds the next range of the file that has data, with lseek(2). Returns `None` if only a hole is left.
    fn next(&mut self) -> Option<Range<u64>> {
        let Range { start, end } = self.unsearched;
        if start >= end {
            return None;
        }
        let data_start = match self.backing.seek(self.file, start, Seek::Data) {
            Ok(offset) => offset.clamp(start, end),
            // No data follows.
            Err(Errno::NXIO) => end,
            // The file system does not report holes, so all bytes count as data.
            Err(_) => start,
        };
        if data_start == end {
            self.unsearched.start = end;
            return None;
        }
        let data_end = match self.backing.seek(self.file, data_start, Seek::Hole) {
            Ok(offset) => offset.clamp(data_start + 1, end),
            Err(_) => end,
        };
        self.unsearched.start = data_end;
        Some(data_start..data_end)
    }
}
