//! The timeline of a report: what each host did over time, on one time axis for all hosts.
//!
//! Both a *bucket* and a *bin* hold the sums of a time interval. The record of a host, which its mount writes, has
//! buckets of some length, which begin when the mount began. The common axis has bins of another length, which begin
//! when the first host began. So each bucket is distributed to the bins that it overlaps.

use firn_protocol::record::{Bucket, RunRecord};

/// What one host did over time.
pub struct HostLine {
    /// Name of the host.
    pub host: String,
    /// What the host did in each bin.
    pub bins: Vec<Bucket>,
}

/// All hosts of a run on one time axis.
pub struct Timeline {
    /// When the first host began, by that host's clock, in microseconds since 1970.
    pub began_unix_us: u64,
    /// Seconds from that moment to the end of the last host.
    pub seconds: f64,
    /// Length of a bin in seconds.
    pub bin_seconds: f64,
    /// The hosts, in the order of their records.
    pub hosts: Vec<HostLine>,
}

impl Timeline {
    /// Returns the timeline of all records, with `bin_count` bins (equal time intervals). Each record says what one
    /// host did since its mount began.
    pub fn new(records: &[RunRecord], bin_count: usize) -> Self {
        let began_unix_us = records
            .iter()
            .map(|record| record.began_unix_us)
            .min()
            .unwrap_or(0);
        let start = |record: &RunRecord| (record.began_unix_us - began_unix_us) as f64 / 1e6;
        // The minimum avoids an axis of length 0.
        let mut seconds: f64 = 0.1;
        for record in records {
            seconds = seconds.max(start(record) + record.lasted_seconds);
        }
        let bin_seconds = seconds / bin_count as f64;
        let hosts = records
            .iter()
            .map(|record| HostLine {
                host: record.host.clone(),
                bins: distribute_buckets(record, start(record), bin_seconds, bin_count),
            })
            .collect();
        Self {
            began_unix_us,
            seconds,
            bin_seconds,
            hosts,
        }
    }

    /// Returns for each bin the sum of `value` over all hosts.
    pub fn sum(&self, value: impl Fn(&Bucket) -> u64) -> Vec<f64> {
        let bin_count = self.hosts.first().map_or(0, |host| host.bins.len());
        let sum_over_hosts = |bin: usize| -> f64 {
            self.hosts
                .iter()
                .map(|host| value(&host.bins[bin]) as f64)
                .sum()
        };
        (0..bin_count).map(sum_over_hosts).collect()
    }
}

/// Returns the sums of a record for each bin (a time interval of the common axis), from its sums for each bucket (a
/// time interval of the record). `start` is when the record began on the axis, in seconds.
///
/// A bucket that overlaps several bins is divided in proportion to time: with bins of 10 s, a bucket from 8 s to 12 s
/// adds one half to the first bin and one half to the second. A bucket beyond the end counts in the last bin.
fn distribute_buckets(
    record: &RunRecord,
    start: f64,
    bin_seconds: f64,
    bin_count: usize,
) -> Vec<Bucket> {
    let mut bins = vec![Bucket::default(); bin_count];
    let bucket_seconds = record.bucket_seconds();
    let record_end = start + record.lasted_seconds;
    let bin_at = |time: f64| ((time / bin_seconds) as usize).min(bin_count - 1);
    for (index, bucket) in record.buckets.iter().enumerate() {
        let begin = start + index as f64 * bucket_seconds;
        // The run may have ended in the middle of the last bucket.
        let end = (begin + bucket_seconds).min(record_end).max(begin);
        let first_bin = bin_at(begin);
        let last_bin = bin_at(end).max(first_bin);
        let overlapped_bins = bins.iter_mut().enumerate();
        for (bin, sum) in overlapped_bins.take(last_bin + 1).skip(first_bin) {
            // Both shares are the part of the bucket's time before an edge of the bin. They are exactly 0 and 1 at the
            // ends, so that rounding loses no part of the bucket.
            let begin_share = if bin == first_bin {
                0.0
            } else {
                share_of_interval(begin, end, bin as f64 * bin_seconds)
            };
            let end_share = if bin == last_bin {
                1.0
            } else {
                share_of_interval(begin, end, (bin + 1) as f64 * bin_seconds)
            };
            sum.add(bucket.part(begin_share, end_share));
        }
    }
    bins
}

/// Returns which share of an interval lies before `moment`, from 0 to 1. An empty interval has the share 0.
fn share_of_interval(begin: f64, end: f64, moment: f64) -> f64 {
    let length = end - begin;
    if length > 0.0 {
        ((moment - begin) / length).clamp(0.0, 1.0)
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_of_any_width_have_all_bytes() {
        let buckets: Vec<Bucket> = (0..37)
            .map(|index| Bucket {
                ingest_bytes: index * 1013,
                held_bytes: index,
                ..Bucket::default()
            })
            .collect();
        let record = |began_unix_us| RunRecord {
            began_unix_us,
            bucket_ms: 100,
            lasted_seconds: 3.65,
            buckets: buckets.clone(),
            ..RunRecord::default()
        };
        let records = [record(5_000_000), record(6_500_000)];
        for bin_count in [1, 2, 7, 100, 1000] {
            let timeline = Timeline::new(&records, bin_count);
            assert_eq!(timeline.began_unix_us, 5_000_000);
            assert!((timeline.seconds - 5.15).abs() < 1e-9);
            let sum: f64 = timeline.sum(|bin| bin.ingest_bytes).iter().sum();
            assert_eq!(sum, 2.0 * (36 * 37 / 2 * 1013) as f64, "{bin_count} bins");
            let held = timeline.hosts[0].bins.iter().map(|bin| bin.held_bytes);
            assert_eq!(held.max(), Some(36));
        }
    }
}
