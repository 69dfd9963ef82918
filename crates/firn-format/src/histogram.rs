//! Histograms of durations and sizes, with buckets of exponentially growing width. Any number of threads may add to
//! them.
//!
//! Invariants
//! * Bound *i* is `2^(first + i * step)`. A value is counted at the lowest bound that it does not exceed. A value above
//!   all bounds is counted in a last bucket.
//! * An observation adds to two atomics and takes no lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of bounds for durations: from 1 µs, each four times the one before, up to 67 s.
const TIME_BOUNDS: usize = 14;
/// Number of bounds for sizes: from 512 bytes, each twice the one before, up to 64 MiB.
const SIZE_BOUNDS: usize = 18;
/// Exponent of the lowest bound for durations: 2^0 = 1 µs.
const TIME_FIRST: u32 = 0;
/// Difference of the exponents of two bounds for durations.
const TIME_STEP: u32 = 2;
/// Exponent of the lowest bound for sizes: 2^9 = 512 bytes.
const SIZE_FIRST: u32 = 9;
/// Difference of the exponents of two bounds for sizes.
const SIZE_STEP: u32 = 1;

/// The counts of a histogram at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistogramCounts {
    /// Upper bounds in ascending order, in seconds or bytes.
    pub bounds: Vec<f64>,
    /// Number of observations at each bound, not cumulative. A last entry counts those above all bounds.
    pub counts: Vec<u64>,
    /// Sum of all observations, in seconds or bytes.
    pub sum: f64,
}

/// One counter for each of `N` bounds, and one for values above them.
struct Buckets<const N: usize> {
    counts: [AtomicU64; N],
    above: AtomicU64,
}

impl<const N: usize> Buckets<N> {
    const fn new() -> Self {
        Self {
            counts: [const { AtomicU64::new(0) }; N],
            above: AtomicU64::new(0),
        }
    }

    /// Counts one value in the bucket at `index`, or above all bounds.
    fn count(&self, index: usize) {
        let bucket = self.counts.get(index).unwrap_or(&self.above);
        bucket.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counts of all buckets. The last one is that above all bounds.
    fn load(&self) -> Vec<u64> {
        self.counts
            .iter()
            .chain([&self.above])
            .map(|count| count.load(Ordering::Relaxed))
            .collect()
    }
}

/// Returns the index of the lowest bound that `value` does not exceed. Bound *i* is `2^(first + i * step)`.
fn bound_index(value: u64, first: u32, step: u32) -> usize {
    // Exponent of the lowest power of two that is at least `value`.
    let exponent = u64::BITS - value.saturating_sub(1).leading_zeros();
    exponent.saturating_sub(first).div_ceil(step) as usize
}

/// A histogram of durations. Any number of threads may add to it.
pub struct TimeHistogram {
    buckets: Buckets<TIME_BOUNDS>,
    sum_ns: AtomicU64,
}

impl Default for TimeHistogram {
    fn default() -> Self {
        Self {
            buckets: Buckets::new(),
            sum_ns: AtomicU64::new(0),
        }
    }
}

impl TimeHistogram {
    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        let us = ns.div_ceil(1000);
        self.buckets.count(bound_index(us, TIME_FIRST, TIME_STEP));
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Returns the sum of all durations.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns.load(Ordering::Relaxed))
    }

    /// Returns the counts, in seconds.
    pub fn counts(&self) -> HistogramCounts {
        let bounds = (0..TIME_BOUNDS as u32)
            .map(|index| (1u64 << (TIME_FIRST + TIME_STEP * index)) as f64 / 1e6);
        HistogramCounts {
            bounds: bounds.collect(),
            counts: self.buckets.load(),
            sum: self.sum().as_secs_f64(),
        }
    }
}

/// A histogram of sizes in bytes. Any number of threads may add to it.
pub struct SizeHistogram {
    buckets: Buckets<SIZE_BOUNDS>,
    sum: AtomicU64,
}

impl Default for SizeHistogram {
    fn default() -> Self {
        Self {
            buckets: Buckets::new(),
            sum: AtomicU64::new(0),
        }
    }
}

impl SizeHistogram {
    /// Counts one size.
    pub fn observe(&self, bytes: u64) {
        self.buckets
            .count(bound_index(bytes, SIZE_FIRST, SIZE_STEP));
        self.sum.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns how many sizes were counted.
    pub fn count(&self) -> u64 {
        self.buckets.load().iter().sum()
    }

    /// Returns the sum of all sizes in bytes.
    pub fn bytes(&self) -> u64 {
        self.sum.load(Ordering::Relaxed)
    }

    /// Returns the counts, in bytes.
    pub fn counts(&self) -> HistogramCounts {
        let bounds =
            (0..SIZE_BOUNDS as u32).map(|index| (1u64 << (SIZE_FIRST + SIZE_STEP * index)) as f64);
        HistogramCounts {
            bounds: bounds.collect(),
            counts: self.buckets.load(),
            sum: self.bytes() as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_counted_at_the_lowest_bound_that_it_does_not_exceed() {
        let sizes = [
            0,
            1,
            512,
            513,
            4096,
            4097,
            64 << 20,
            (64 << 20) + 1,
            1 << 40,
        ];
        let histogram = SizeHistogram::default();
        for size in sizes {
            histogram.observe(size);
        }
        let HistogramCounts {
            bounds,
            counts,
            sum,
        } = histogram.counts();
        assert_eq!(counts.len(), bounds.len() + 1);
        assert_eq!(sum, sizes.iter().sum::<u64>() as f64);
        assert_eq!(histogram.count(), sizes.len() as u64);
        for (index, count) in counts.iter().enumerate() {
            let above = index.checked_sub(1).map_or(-1.0, |below| bounds[below]);
            let upto = bounds.get(index).copied().unwrap_or(f64::INFINITY);
            let within = |size: &&u64| (**size as f64) > above && (**size as f64) <= upto;
            assert_eq!(
                *count,
                sizes.iter().filter(within).count() as u64,
                "at {upto}"
            );
        }
    }

    #[test]
    fn a_duration_is_counted_at_the_lowest_bound_that_it_does_not_exceed() {
        let histogram = TimeHistogram::default();
        let durations = [
            (0, 0),
            (1, 0),
            (1_000, 0),
            (1_001, 1),
            (4_000, 1),
            (4_001, 2),
            (67_108_864_000, 13),
            (67_108_865_000, 14),
            (u64::MAX / 2, 14),
        ];
        let mut expected = [0; TIME_BOUNDS + 1];
        for (ns, index) in durations {
            histogram.observe(Duration::from_nanos(ns));
            expected[index] += 1;
        }
        let HistogramCounts { bounds, counts, .. } = histogram.counts();
        assert_eq!(counts, expected);
        assert_eq!((bounds[0], bounds[13]), (1e-6, 67.108_864));
        let sum: u64 = durations.iter().map(|(ns, _)| ns).sum();
        assert_eq!(histogram.sum(), Duration::from_nanos(sum));
    }
}
