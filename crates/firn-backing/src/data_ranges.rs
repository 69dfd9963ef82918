//! The parts of a file that have data: what lies between them is a hole.

use std::ops::Range;

use crate::{Backing, Errno, Seek};

/// Walks over the data in a range of a file, in order. A file whose holes cannot be told has data everywhere.
pub fn data_ranges<'a, B: Backing>(
    backing: &'a B,
    file: &'a B::File,
    range: Range<u64>,
) -> DataRanges<'a, B> {
    DataRanges {
        backing,
        file,
        rest: range,
    }
}

/// See [`data_ranges`].
pub struct DataRanges<'a, B: Backing> {
    backing: &'a B,
    file: &'a B::File,
    /// What was not walked over.
    rest: Range<u64>,
}

impl<B: Backing> Iterator for DataRanges<'_, B> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let Range { start: at, end } = self.rest;
        if at >= end {
            return None;
        }
        let start = match self.backing.seek(self.file, at, Seek::Data) {
            Ok(data) => data.clamp(at, end),
            Err(Errno::NXIO) => end,
            Err(_) => at,
        };
        if start == end {
            self.rest.start = end;
            return None;
        }
        let hole = self.backing.seek(self.file, start, Seek::Hole);
        self.rest.start = hole.map_or(end, |hole| hole.clamp(start + 1, end));
        Some(start..self.rest.start)
    }
}
