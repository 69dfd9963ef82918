//! Counters by the name of what they count.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter for each of `N` names.
pub struct Tally<const N: usize> {
    names: [&'static str; N],
    counts: [AtomicU64; N],
}

impl<const N: usize> Tally<N> {
    /// All zero.
    pub const fn new(names: [&'static str; N]) -> Self {
        Self {
            names,
            counts: [const { AtomicU64::new(0) }; N],
        }
    }

    /// Counts one more of `index`, which is a name's place.
    pub fn count(&self, index: usize) {
        if let Some(count) = self.counts.get(index) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How often `index` was counted.
    pub fn get(&self, index: usize) -> u64 {
        let count = self.counts.get(index);
        count.map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// The name at `index`.
    pub fn name(&self, index: usize) -> &'static str {
        self.names.get(index).copied().unwrap_or_default()
    }

    /// The figures that are not zero.
    pub fn figures(&self) -> BTreeMap<String, u64> {
        let all = self.names.iter().zip(&self.counts);
        let figures = all.map(|(name, count)| ((*name).to_owned(), count.load(Ordering::Relaxed)));
        figures.filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_has_its_own_count_and_zeros_are_left_out() {
        let tally = Tally::new(["one", "two", "three"]);
        tally.count(1);
        tally.count(1);
        tally.count(2);
        tally.count(9);
        let expected = [("three".to_owned(), 1), ("two".to_owned(), 2)];
        assert_eq!(tally.figures(), BTreeMap::from(expected));
        assert_eq!(tally.name(2), "three");
    }
}
