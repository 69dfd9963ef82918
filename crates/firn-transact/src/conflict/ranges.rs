//! Ranges of a file: those that a transaction has written, or that a process has read.

use std::collections::BTreeMap;
use std::ops::Range;

/// Disjoint ranges that do not touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = range;
        // Those that overlap or touch become one with it.
        while let Some((&at, &until)) = self.0.range(..=end).next_back()
            && until >= start
        {
            (start, end) = (start.min(at), end.max(until));
            self.0.remove(&at);
        }
        self.0.insert(start, end);
    }

    /// Takes out everything from `from` on.
    pub fn cut(&mut self, from: u64) {
        drop(self.0.split_off(&from));
        if let Some(mut last) = self.0.last_entry() {
            let end = (*last.get()).min(from);
            last.insert(end);
        }
    }

    /// The range that `at` is in, or else what lies between two: (its end, whether it is in one). The end is
    /// `u64::MAX` behind the last one.
    pub fn stretch(&self, at: u64) -> (u64, bool) {
        if let Some((_, &end)) = self.0.range(..=at).next_back()
            && at < end
        {
            return (end, true);
        }
        (
            self.0
                .range(at..)
                .next()
                .map_or(u64::MAX, |(&start, _)| start),
            false,
        )
    }

    /// The ranges in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(&start, &end)| start..end)
    }

    /// Adds all of another's.
    pub fn extend(&mut self, other: &Self) {
        other.iter().for_each(|range| self.insert(range));
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_are_a_set_of_bytes(ops in prop::collection::vec((0u64..60, 0u64..20, any::<bool>()), 1..40)) {
            let mut ranges = Ranges::default();
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
                    let (end, inside) = ranges.stretch(at as u64);
                    prop_assert_eq!(inside, expected, "at {}", at);
                    let end = end.min(100) as usize;
                    prop_assert!(model[at..end].iter().all(|&byte| byte == expected));
                    prop_assert!(end == 100 || model[end] != expected);
                }
            }
        }
    }
}
