//! [`RangeSet`]: a set of the bytes of a file, kept as ranges.
//!
//! Invariant: the ranges are not empty, do not overlap and do not touch each other, so a set has one representation.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of bytes of a file, such as those that a transaction has written or that a process has read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    /// The end of each range, by its start.
    ends: BTreeMap<u64, u64>,
}

/// A part of a file that is as a whole in a [`RangeSet`], or as a whole outside of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetPart {
    /// Offset behind the last byte; `u64::MAX` behind the last range of the set.
    pub end: u64,
    /// Whether the part is in the set.
    pub is_inside: bool,
}

impl RangeSet {
    /// Adds the bytes of a range.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        // Ranges that overlap or touch the new one are merged with it.
        while let Some((&old_start, &old_end)) = self.ends.range(..=end).next_back()
            && old_end >= start
        {
            start = start.min(old_start);
            end = end.max(old_end);
            self.ends.remove(&old_start);
        }
        self.ends.insert(start, end);
    }

    /// Removes all bytes from `from` on.
    pub fn cut(&mut self, from: u64) {
        drop(self.ends.split_off(&from));
        if let Some(mut last) = self.ends.last_entry() {
            let end = (*last.get()).min(from);
            last.insert(end);
        }
    }

    /// Returns whether the byte at `offset` is in the set, and the end of the part for which the same is true.
    pub fn part_at(&self, offset: u64) -> SetPart {
        if let Some((_, &end)) = self.ends.range(..=offset).next_back()
            && offset < end
        {
            return SetPart {
                end,
                is_inside: true,
            };
        }
        let next_range = self.ends.range(offset..).next();
        SetPart {
            end: next_range.map_or(u64::MAX, |(&start, _)| start),
            is_inside: false,
        }
    }

    /// Returns the ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.ends.iter().map(|(&start, &end)| start..end)
    }

    /// Adds the bytes of another set.
    pub fn extend(&mut self, other: &Self) {
        other.iter().for_each(|range| self.insert(range));
    }

    /// Returns the number of ranges.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns whether the set has no bytes.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_are_a_set_of_bytes(ops in prop::collection::vec((0u64..60, 0u64..20, any::<bool>()), 1..40)) {
            let mut ranges = RangeSet::default();
            let mut model = [false; 100];
            for (at, len, add) in ops {
                if add {
                    ranges.insert(at..at + len);
                    model[at as usize..(at + len) as usize].fill(true);
                } else {
                    ranges.cut(at);
                    model[at as usize..].fill(false);
                }
                for (at, &expected) in model.iter().enumerate() {
                    let SetPart { end, is_inside } = ranges.part_at(at as u64);
                    prop_assert_eq!(is_inside, expected, "at {}", at);
                    let end = end.min(100) as usize;
                    prop_assert!(model[at..end].iter().all(|&byte| byte == expected));
                    prop_assert!(end == 100 || model[end] != expected);
                }
            }
        }
    }
}
