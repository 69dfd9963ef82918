//! Waits between tries of an operation that fails. Each wait is twice as long as the one before, up to a bound.
//!
//! Invariants
//! * `first <= wait <= last` for every wait, and no wait is shorter than the one before it.
//! * After a reset, the next wait is `first`.
//!
//! ```
//! use firn_backing::backoff::Backoff;
//! use std::time::Duration;
//!
//! const RETRY: Backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(5));
//! let mut waits = RETRY.start();
//! assert_eq!(waits.next_wait(), Duration::from_millis(2));
//! assert_eq!(waits.next_wait(), Duration::from_millis(4));
//! assert_eq!(waits.next_wait(), Duration::from_millis(5));
//! ```

use std::time::Duration;

/// The shortest and the longest wait of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    first: Duration,
    last: Duration,
}

/// The waits of one series of tries.
#[derive(Clone, Copy, Debug)]
pub struct Waits {
    backoff: Backoff,
    next: Duration,
}

impl Backoff {
    /// Waits are from `first`, the shortest, to `last`, the longest.
    pub const fn new(first: Duration, last: Duration) -> Self {
        assert!(first.as_nanos() <= last.as_nanos());
        Self { first, last }
    }

    /// Returns the shortest wait.
    pub const fn first(self) -> Duration {
        self.first
    }

    /// Returns the longest wait.
    pub const fn last(self) -> Duration {
        self.last
    }

    /// Returns the wait after this number of failures in a row, which is at least 1.
    pub fn after(self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(u32::BITS - 1);
        self.first.saturating_mul(1 << doublings).min(self.last)
    }

    /// Begins a series of tries.
    pub fn start(self) -> Waits {
        Waits {
            backoff: self,
            next: self.first,
        }
    }
}

impl Waits {
    /// Returns the wait before the next try, for a caller that waits by other means than [`Waits::sleep`].
    pub fn next_wait(&mut self) -> Duration {
        let wait = self.next;
        self.next = wait.saturating_mul(2).min(self.backoff.last);
        wait
    }

    /// Sleeps for the wait before the next try.
    pub fn sleep(&mut self) {
        std::thread::sleep(self.next_wait());
    }

    /// Makes the shortest wait the next one.
    pub fn reset(&mut self) {
        self.next = self.backoff.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));

    #[test]
    fn waits_double_up_to_a_bound() {
        assert_eq!(BACKOFF.after(1), BACKOFF.first());
        assert_eq!(BACKOFF.after(2), 2 * BACKOFF.first());
        assert_eq!(BACKOFF.after(3), 4 * BACKOFF.first());
        assert_eq!(BACKOFF.after(100), BACKOFF.last());
        assert_eq!(BACKOFF.after(u32::MAX), BACKOFF.last());
    }

    #[test]
    fn a_series_has_the_waits_of_its_failures_and_begins_again_after_a_reset() {
        let mut waits = BACKOFF.start();
        for _ in 0..2 {
            for failures in 1..50 {
                assert_eq!(waits.next_wait(), BACKOFF.after(failures));
            }
            waits.reset();
        }
    }

    #[test]
    fn a_bound_that_is_no_multiple_is_reached() {
        let bounds = Backoff::new(Duration::from_millis(2), Duration::from_millis(7));
        let mut waits = bounds.start();
        let ms: Vec<_> = (0..4).map(|_| waits.next_wait().as_millis()).collect();
        assert_eq!(ms, [2, 4, 7, 7]);
    }
}
