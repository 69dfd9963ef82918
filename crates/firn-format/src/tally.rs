//! A fixed set of named counters, which threads raise without a lock. Statistics that are few and known at compile time
//! use it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// `N` counters, each with a name. Any number of threads may count.
pub struct Tally<const N: usize> {
    names: [&'static str; N],
    counts: [AtomicU64; N],
}

impl<const N: usize> Tally<N> {
    /// Makes counters with these names, all zero.
    pub const fn new(names: [&'static str; N]) -> Self {
        Self {
            names,
            counts: [const { AtomicU64::new(0) }; N],
        }
    }

    /// Adds one to the counter at `index`. An index without a counter is ignored.
    pub fn count(&self, index: usize) {
        if let Some(count) = self.counts.get(index) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the value of the counter at `index`; 0 if there is none.
    pub fn get(&self, index: usize) -> u64 {
        let count = self.counts.get(index);
        count.map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Returns the name of the counter at `index`; empty if there is none.
    pub fn name(&self, index: usize) -> &'static str {
        self.names.get(index).copied().unwrap_or_default()
    }

    /// Returns the counters that are not zero, by name.
    pub fn figures(&self) -> BTreeMap<String, u64> {
        let mut figures = BTreeMap::new();
        for (name, count) in self.names.iter().zip(&self.counts) {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                figures.insert((*name).to_owned(), count);
            }
        }
        figures
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
