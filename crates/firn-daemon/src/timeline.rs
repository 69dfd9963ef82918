//! A timeline of sums: each bucket holds the counts of one span of time. Buckets become longer as the mount gets older,
//! so their number stays bounded.

use std::time::{Duration, Instant};

use firn_protocol::record::{BUCKETS_MAX, Bucket};

/// Length of a bucket in the first minute of a mount; it doubles with each doubling of the mount's age.
const FIRST_BUCKET: Duration = Duration::from_millis(100);
/// Longest time between two samples, so that a maximum is taken at least this often.
const SAMPLE_EVERY_MAX: Duration = Duration::from_secs(1);

/// The buckets since firnd attached the arena.
pub(crate) struct Timeline {
    attached_at: Instant,
    bucket_length: Duration,
    buckets: Vec<Bucket>,
    /// Time of the last sample.
    last_sample: Instant,
    /// The counters since the attach at the last sample, which are subtracted from those of the next one.
    last_counters: Bucket,
}

impl Timeline {
    pub(crate) fn new(attached_at: Instant) -> Self {
        Self {
            attached_at,
            bucket_length: FIRST_BUCKET,
            buckets: Vec::new(),
            last_sample: attached_at,
            last_counters: Bucket::default(),
        }
    }

    /// Returns the pause before the next sample: the length of a bucket, but at most [`SAMPLE_EVERY_MAX`].
    pub(crate) fn sample_every(&self) -> Duration {
        self.bucket_length.min(SAMPLE_EVERY_MAX)
    }

    /// Returns the length of each bucket.
    pub(crate) fn bucket_length(&self) -> Duration {
        self.bucket_length
    }

    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Returns the time from the attach to the last sample.
    pub(crate) fn span_to_last_sample(&self) -> Duration {
        self.last_sample.duration_since(self.attached_at)
    }

    /// Adds a sample of the counters at `now`. What was counted since the last sample is spread evenly over the buckets
    /// (spans of equal length) of the time between. If there would be too many buckets, their length doubles first.
    pub(crate) fn add(&mut self, now: Instant, counters: Bucket) {
        // The span is the time since the last sample. It, and all times of buckets, are counted from the attach.
        let sample_time = now.max(self.last_sample);
        let span_start = self.span_to_last_sample();
        let span_end = sample_time.duration_since(self.attached_at);
        while self.bucket_index(span_end) >= BUCKETS_MAX {
            self.double_bucket_length();
        }
        let increase = counters.since(self.last_counters);
        let first_index = self.bucket_index(span_start);
        let last_index = self.bucket_index(span_end);
        self.buckets.resize(last_index + 1, Bucket::default());
        // The share of the span that lies before a time, from 0 to 1.
        let share_before = |time: Duration| {
            let span = (span_end - span_start).as_secs_f64();
            let elapsed = time.saturating_sub(span_start).as_secs_f64();
            if span > 0.0 { elapsed / span } else { 1.0 }
        };
        for index in first_index..=last_index {
            let bucket_start = self.bucket_length * index as u32;
            let share_start = if index == first_index {
                0.0
            } else {
                share_before(bucket_start)
            };
            let share_end = if index == last_index {
                1.0
            } else {
                share_before(bucket_start + self.bucket_length)
            };
            self.buckets[index].add(increase.part(share_start, share_end));
        }
        self.last_sample = sample_time;
        self.last_counters = counters;
    }

    /// Returns the index of the bucket that a time since the attach lies in.
    fn bucket_index(&self, time: Duration) -> usize {
        (time.as_nanos() / self.bucket_length.as_nanos()) as usize
    }

    /// Merges each two buckets into one of double length.
    fn double_bucket_length(&mut self) {
        let pairs = self.buckets.chunks(2).map(|pair| {
            let mut merged = pair[0];
            pair[1..].iter().for_each(|second| merged.add(*second));
            merged
        });
        self.buckets = pairs.collect();
        self.bucket_length *= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(bytes: u64, held: u64) -> Bucket {
        Bucket {
            ingest_bytes: bytes,
            held_bytes: held,
            ..Bucket::default()
        }
    }

    #[test]
    fn a_timeline_of_any_length_is_bounded_and_loses_no_byte() {
        let began = Instant::now();
        let mut timeline = Timeline::new(began);
        let mut at = began;
        let mut bytes = 0;
        for step in 0..20_000u64 {
            at += timeline.sample_every();
            bytes += step % 977;
            timeline.add(at, counters(bytes, step));
            assert!(timeline.buckets().len() <= BUCKETS_MAX);
        }
        let sum: u64 = timeline.buckets().iter().map(|one| one.ingest_bytes).sum();
        assert_eq!(sum, bytes);
        let held = timeline.buckets().iter().map(|one| one.held_bytes).max();
        assert_eq!(held, Some(19_999));
        assert!(
            timeline.bucket_length() >= Duration::from_secs(10),
            "{:?}",
            timeline.bucket_length()
        );
    }

    #[test]
    fn what_was_not_looked_at_is_spread_over_the_time() {
        let began = Instant::now();
        let mut timeline = Timeline::new(began);
        timeline.add(began, counters(0, 0));
        timeline.add(began + Duration::from_millis(1000), counters(1000, 0));
        let bytes: Vec<u64> = timeline
            .buckets()
            .iter()
            .map(|one| one.ingest_bytes)
            .collect();
        assert_eq!(bytes.len(), 11);
        assert!(
            bytes[..10].iter().all(|one| (99..=101).contains(one)),
            "{bytes:?}"
        );
        assert_eq!(bytes.iter().sum::<u64>(), 1000);
    }
}
