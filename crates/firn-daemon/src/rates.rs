//! Computes rates in bytes per second over the last seconds: bytes that programs wrote (ingest), that went to the
//! backing (drain), to the spill file (spill) and to other hosts (pulled).

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time over which a rate is averaged.
const WINDOW: Duration = Duration::from_secs(5);
/// Time between two samples.
pub(crate) const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// Counters of bytes since the mount.
#[derive(Clone, Copy, Default)]
pub(crate) struct Totals {
    pub(crate) ingest: u64,
    pub(crate) drain: u64,
    pub(crate) spill: u64,
    /// Bytes that were sent to other hosts.
    pub(crate) pulled: u64,
}

/// The counters at one time.
#[derive(Clone, Copy)]
struct Sample {
    time: Instant,
    totals: Totals,
}

/// The samples of the last [`WINDOW`], oldest first, and one older sample.
#[derive(Default)]
pub(crate) struct Window {
    samples: VecDeque<Sample>,
}

/// Rates in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    pub(crate) ingest: f64,
    pub(crate) drain: f64,
    pub(crate) spill: f64,
    pub(crate) pulled: f64,
}

impl Window {
    /// Adds a sample, and drops those that no rate needs any more.
    pub(crate) fn add(&mut self, now: Instant, totals: Totals) {
        self.samples.push_back(Sample { time: now, totals });
        // One sample older than the window is kept as its start.
        while self
            .samples
            .get(1)
            .is_some_and(|next| now.duration_since(next.time) >= WINDOW)
        {
            self.samples.pop_front();
        }
    }

    /// Returns the rates, in bytes per second, from the oldest sample to the counters `totals` at `now`. Without a
    /// sample all rates are 0.
    pub(crate) fn rates(&self, now: Instant, totals: Totals) -> Rates {
        let Some(first) = self.samples.front() else {
            return Rates::default();
        };
        let seconds = now.duration_since(first.time).as_secs_f64();
        if seconds <= 0.0 {
            return Rates::default();
        }
        let rate =
            |total: u64, first_total: u64| total.saturating_sub(first_total) as f64 / seconds;
        Rates {
            ingest: rate(totals.ingest, first.totals.ingest),
            drain: rate(totals.drain, first.totals.drain),
            spill: rate(totals.spill, first.totals.spill),
            pulled: rate(totals.pulled, first.totals.pulled),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_over_the_window_and_not_since_the_start() {
        let start = Instant::now();
        let mut window = Window::default();
        let totals = |ingest, drain, spill, pulled| Totals {
            ingest,
            drain,
            spill,
            pulled,
        };
        for second in 0..20 {
            // 100 bytes a second for ten seconds, then nothing.
            window.add(
                start + Duration::from_secs(second),
                totals(second.min(10) * 100, second, 2 * second, 3 * second),
            );
        }
        let rates = window.rates(start + Duration::from_secs(20), totals(1000, 20, 40, 60));
        assert_eq!(
            rates,
            Rates {
                ingest: 0.0,
                drain: 1.0,
                spill: 2.0,
                pulled: 3.0
            }
        );
        assert!(window.samples.len() <= 7, "{}", window.samples.len());
    }

    #[test]
    fn without_samples_or_time_there_is_no_rate() {
        let now = Instant::now();
        let mut window = Window::default();
        let totals = Totals {
            ingest: 5,
            ..Totals::default()
        };
        assert_eq!(window.rates(now, totals), Rates::default());
        window.add(now, Totals::default());
        assert_eq!(window.rates(now, totals), Rates::default());
    }
}
