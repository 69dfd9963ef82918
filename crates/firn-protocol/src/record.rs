//! The record of a run: what happened while a mount existed, for `firn report`. firnd, the process that serves the
//! mount, writes it.
//!
//! The record is JSON. It is sent over the control socket, and stored in the runtime directory of the host
//! (`KEY.record`) and, with `record-in=backing`, in `.firn/records` of the backing, the directory that the mount
//! serves. Another user may have written such a file, so readers use [`RunRecord::parse`].
//!
//! Time is divided into *buckets* of equal length. When there are too many buckets, each two neighbours are merged.
//!
//! Invariants of a parsed record
//! * It has at most [`BUCKETS_MAX`] buckets, [`CHECKPOINTS_MAX`] checkpoints and [`EVENTS_MAX`] events.
//! * A bucket lasts from a millisecond to a year. No time is longer than `SECONDS_MAX`.
//! * A histogram has one count more than it has bounds. Its bounds are finite and ascend.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::figures::HistogramStatus;
use crate::path::BytePath;

/// Version of the format. A record of another version is not read.
pub const RECORD_VERSION: u32 = 1;
/// Largest size of a record.
pub const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Largest number of buckets. When there would be more, each two neighbours are merged.
pub const BUCKETS_MAX: usize = 600;
/// Largest number of checkpoints. When there would be more, the oldest is forgotten.
pub const CHECKPOINTS_MAX: usize = 512;
/// Largest number of events. When there would be more, the oldest is forgotten.
pub const EVENTS_MAX: usize = 256;
/// Longest time in a record: a hundred years. A longer time is a sign of damage.
const SECONDS_MAX: f64 = 100.0 * 366.0 * 86_400.0;
/// Largest number of bounds of a histogram.
const BOUNDS_MAX: usize = 256;
/// Size of the longest name or text in a record.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// Counts of what happened in one span of time: ten sums, then two maxima.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[u64; 12]", into = "[u64; 12]")]
pub struct Bucket {
    /// Bytes taken from programs.
    pub ingest_bytes: u64,
    /// Writes taken from programs.
    pub ingest_writes: u64,
    /// Bytes written to the backing.
    pub drain_bytes: u64,
    /// Writes to the backing.
    pub drain_writes: u64,
    /// Bytes read by programs through firnd.
    pub read_bytes: u64,
    /// Bytes moved to the spill file.
    pub spill_bytes: u64,
    /// Sum of the durations of writes of programs that ended in this time.
    pub write_us: u64,
    /// Sum of the durations of closes that ended in this time.
    pub close_us: u64,
    /// Sum of the durations of calls of fsync(2) that ended in this time.
    pub fsync_us: u64,
    /// Sum of the durations of writes to the backing that ended in this time.
    pub drain_us: u64,
    /// Largest number of held bytes.
    pub held_bytes: u64,
    /// Largest number of writers that waited for room.
    pub waiting_writers: u64,
}

/// Number of fields of a [`Bucket`]; the array form has them in the order of the struct.
const FIELDS: usize = 12;
/// Number of sums among the fields of a [`Bucket`]. They come first; the other fields are maxima.
const SUMS: usize = 10;

impl Bucket {
    /// Adds another bucket: sums are added, and of two maxima the larger is retained.
    pub fn add(&mut self, other: Self) {
        let mut fields: [u64; FIELDS] = (*self).into();
        let other_fields: [u64; FIELDS] = other.into();
        for index in 0..SUMS {
            fields[index] = fields[index].saturating_add(other_fields[index]);
        }
        for index in SUMS..FIELDS {
            fields[index] = fields[index].max(other_fields[index]);
        }
        *self = fields.into();
    }

    /// Returns the growth of the sums since `earlier`. Maxima are those of `self`.
    #[must_use]
    pub fn since(self, earlier: Self) -> Self {
        let mut fields: [u64; FIELDS] = self.into();
        let earlier_fields: [u64; FIELDS] = earlier.into();
        for index in 0..SUMS {
            fields[index] = fields[index].saturating_sub(earlier_fields[index]);
        }
        fields.into()
    }

    /// Returns the part of each sum for a section of the time: `from` and `to` are fractions of it, from 0 to 1.
    /// Adjoining sections add up to the whole. Maxima are those of `self`.
    #[must_use]
    pub fn part(self, from: f64, to: f64) -> Self {
        let mut fields: [u64; FIELDS] = self.into();
        for sum in &mut fields[..SUMS] {
            let sum_up_to = |share: f64| (*sum as f64 * share) as u64;
            // The last section gets what rounding left over.
            let sum_up_to_end = if to >= 1.0 { *sum } else { sum_up_to(to) };
            *sum = sum_up_to_end.saturating_sub(sum_up_to(from));
        }
        fields.into()
    }
}

impl From<[u64; FIELDS]> for Bucket {
    /// Makes a bucket from the values of its fields, in the order in which the struct declares them.
    fn from(fields: [u64; FIELDS]) -> Self {
        let [
            ingest_bytes,
            ingest_writes,
            drain_bytes,
            drain_writes,
            read_bytes,
            spill_bytes,
            write_us,
            close_us,
            fsync_us,
            drain_us,
            held_bytes,
            waiting_writers,
        ] = fields;
        Self {
            ingest_bytes,
            ingest_writes,
            drain_bytes,
            drain_writes,
            read_bytes,
            spill_bytes,
            write_us,
            close_us,
            fsync_us,
            drain_us,
            held_bytes,
            waiting_writers,
        }
    }
}

impl From<Bucket> for [u64; FIELDS] {
    /// Returns the values of a bucket, in the order of its fields.
    fn from(bucket: Bucket) -> Self {
        [
            bucket.ingest_bytes,
            bucket.ingest_writes,
            bucket.drain_bytes,
            bucket.drain_writes,
            bucket.read_bytes,
            bucket.spill_bytes,
            bucket.write_us,
            bucket.close_us,
            bucket.fsync_us,
            bucket.drain_us,
            bucket.held_bytes,
            bucket.waiting_writers,
        ]
    }
}

/// The times at which a checkpoint reached each durability level, in seconds since the start of the record.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckpointRecord {
    /// Path below the mount point: the directory or file with the step in its name.
    pub path: BytePath,
    /// Number of the step.
    pub step: u64,
    /// When the first of its files was opened for writing, or was seen with held bytes.
    pub began_seconds: f64,
    /// When the last of its files was closed by its last writer. `None`: a file is still open.
    pub closed_seconds: Option<f64>,
    /// When all its bytes were in the backing or dropped. `None`: some bytes are still held.
    pub drained_seconds: Option<f64>,
    /// When all its files were synced in the backing. `None`: some files were not.
    pub durable_seconds: Option<f64>,
    /// Number of its files that were written.
    pub files: u64,
}

/// An event of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EventRecord {
    /// Microseconds since 1970.
    pub unix_us: u64,
    /// One of [`crate::events::KINDS`].
    pub kind: String,
    /// Fields by name; a name ends with its unit.
    pub fields: BTreeMap<String, String>,
}

/// What firnd records of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunRecord {
    /// [`RECORD_VERSION`].
    pub version: u32,
    /// Package version of firnd.
    pub firn_version: String,
    /// Name of the host.
    pub host: String,
    /// Absolute path of the mount point.
    pub mount_point: BytePath,
    /// Absolute path of the backing directory.
    pub backing: BytePath,
    /// Options that change what the mount promises, as `key=value`.
    pub options: Vec<String>,
    /// When firnd attached, by the clock of its host: microseconds since 1970. The record starts then.
    pub began_unix_us: u64,
    /// Time from the start of the record to the last reading of the counters.
    pub lasted_seconds: f64,
    /// Whether the mount has ended.
    pub has_ended: bool,
    /// Size of the arena's data, all chunks together.
    pub arena_bytes: u64,
    /// Bytes held at the end, including those whose file is lost.
    pub held_bytes: u64,
    /// Bytes that were overwritten or removed before they were drained.
    pub cancelled_bytes: u64,
    /// Bytes that were recovered from an earlier firnd.
    pub recovered_bytes: u64,
    /// Write calls to the backing that failed.
    pub drain_errors: u64,
    /// Time that one bucket covers.
    pub bucket_ms: u64,
    /// The buckets, from the start of the record without gaps.
    pub buckets: Vec<Bucket>,
    /// Sizes of the writes of programs, in bytes.
    pub ingest_write_bytes: HistogramStatus,
    /// Sizes of the writes to the backing, in bytes.
    pub drain_write_bytes: HistogramStatus,
    /// Durations of writes of programs, in seconds.
    pub write_seconds: HistogramStatus,
    /// Durations of closes, in seconds.
    pub close_seconds: HistogramStatus,
    /// Durations of fsync(2), in seconds.
    pub fsync_seconds: HistogramStatus,
    /// Durations of calls that write to the backing, in seconds.
    pub drain_seconds: HistogramStatus,
    /// Sum of the times that closes waited for the backing.
    pub close_wait_seconds: f64,
    /// The checkpoints, in the order of their start.
    pub checkpoints: Vec<CheckpointRecord>,
    /// The events, the oldest first.
    pub events: Vec<EventRecord>,
    /// Number of checkpoints, events and changes of files that the record lacks, because there were too many.
    pub forgotten: u64,
}

/// Reasons why a record cannot be read.
#[derive(Debug)]
pub enum RecordError {
    /// The file is longer than any record that firnd writes.
    TooLong {
        /// Size of the file.
        bytes: u64,
    },
    /// The file is not the JSON of a record.
    Malformed(serde_json::Error),
    /// Another version of Firn wrote it.
    Version {
        /// Version of the record's format.
        found: u32,
    },
    /// A value in the record is impossible.
    Impossible(&'static str),
}

impl std::fmt::Display for RecordError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong { bytes } => write!(
                f,
                "it has {bytes} bytes, and firnd writes at most {RECORD_BYTES_MAX}"
            ),
            Self::Malformed(error) => write!(f, "it is damaged: {error}"),
            Self::Version { found } => write!(
                f,
                "its format is version {found}, and this firn reads version {RECORD_VERSION}: use the firn that wrote it"
            ),
            Self::Impossible(what) => write!(f, "it is damaged: {what}"),
        }
    }
}

impl std::error::Error for RecordError {}

impl RunRecord {
    /// Parses and checks a record from an untrusted source.
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        let len = bytes.len() as u64;
        if len > RECORD_BYTES_MAX {
            return Err(RecordError::TooLong { bytes: len });
        }
        let record: Self = serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
        record.check()
    }

    /// Checks the invariants of a record.
    pub fn check(self) -> Result<Self, RecordError> {
        if self.version != RECORD_VERSION {
            return Err(RecordError::Version {
                found: self.version,
            });
        }
        match self.find_fault() {
            Some(fault) => Err(RecordError::Impossible(fault)),
            None => Ok(self),
        }
    }

    /// Returns what breaks the invariants at the head of this file, or `None` if nothing does. Another user may have
    /// written the record, so each bound is checked.
    fn find_fault(&self) -> Option<&'static str> {
        let is_time = |seconds: f64| (0.0..=SECONDS_MAX).contains(&seconds);
        // The maximum is a hundred years for a hundred buckets, so a bucket lasts at most a year.
        let has_bucket_length = self.bucket_ms > 0 && is_time(self.bucket_seconds() * 100.0);
        let faults = [
            (self.buckets.len() > BUCKETS_MAX, "it has too many moments"),
            (
                self.checkpoints.len() > CHECKPOINTS_MAX,
                "it has too many checkpoints",
            ),
            (self.events.len() > EVENTS_MAX, "it has too many events"),
            (!has_bucket_length, "its moments have no length"),
            (!self.times().into_iter().all(is_time), "it lasts for ever"),
            (
                !is_time(self.began_unix_us as f64 / 1e6),
                "it begins in another age",
            ),
            (
                !self.histograms().into_iter().all(is_histogram),
                "a histogram is none",
            ),
            (!self.close_wait_seconds.is_finite(), "a time is no number"),
            (self.longest_text() > TEXT_BYTES_MAX, "a text is too long"),
        ];
        faults
            .into_iter()
            .find_map(|(is_broken, fault)| is_broken.then_some(fault))
    }

    /// Returns all times of the record and of its checkpoints, in seconds.
    fn times(&self) -> Vec<f64> {
        let mut times = vec![self.lasted_seconds];
        for checkpoint in &self.checkpoints {
            times.push(checkpoint.began_seconds);
            times.extend(checkpoint.closed_seconds);
            times.extend(checkpoint.drained_seconds);
            times.extend(checkpoint.durable_seconds);
        }
        times
    }

    /// Returns all histograms of the record.
    fn histograms(&self) -> [&HistogramStatus; 6] {
        [
            &self.ingest_write_bytes,
            &self.drain_write_bytes,
            &self.write_seconds,
            &self.close_seconds,
            &self.fsync_seconds,
            &self.drain_seconds,
        ]
    }

    /// Returns the length in bytes of the longest text or path in the record, for the check of its bound.
    fn longest_text(&self) -> usize {
        let mut longest = self.host.len().max(self.firn_version.len());
        for path in [&self.mount_point, &self.backing] {
            longest = longest.max(path.as_bytes().len());
        }
        for option in &self.options {
            longest = longest.max(option.len());
        }
        for checkpoint in &self.checkpoints {
            longest = longest.max(checkpoint.path.as_bytes().len());
        }
        for event in &self.events {
            longest = longest.max(event.kind.len());
            for (name, value) in &event.fields {
                longest = longest.max(name.len()).max(value.len());
            }
        }
        longest
    }

    /// Returns the length of a bucket in seconds.
    pub fn bucket_seconds(&self) -> f64 {
        self.bucket_ms as f64 / 1000.0
    }

    /// Returns the sums and maxima of all buckets together.
    pub fn total(&self) -> Bucket {
        let mut total = Bucket::default();
        self.buckets.iter().for_each(|bucket| total.add(*bucket));
        total
    }
}

/// Returns whether a histogram is valid: it is empty, or its bounds ascend and it has one more count than bounds.
fn is_histogram(histogram: &HistogramStatus) -> bool {
    let HistogramStatus {
        bounds,
        counts,
        sum,
    } = histogram;
    let is_empty = bounds.is_empty() && counts.is_empty();
    let ascends = bounds.is_sorted_by(|bound, next| bound < next);
    let is_finite = sum.is_finite() && bounds.iter().all(|bound| bound.is_finite());
    let has_bounds = bounds.len() <= BOUNDS_MAX && counts.len() == bounds.len() + 1;
    is_finite && ascends && (is_empty || has_bounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> RunRecord {
        RunRecord {
            version: RECORD_VERSION,
            bucket_ms: 100,
            buckets: vec![Bucket::default(); 3],
            checkpoints: vec![CheckpointRecord::default()],
            ..RunRecord::default()
        }
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = record();
        let bytes = serde_json::to_vec(&record).unwrap();
        assert_eq!(RunRecord::parse(&bytes).unwrap(), record);
    }

    #[test]
    fn a_damaged_record_is_refused_and_says_why() {
        let bytes = serde_json::to_vec(&record()).unwrap();
        for len in 0..bytes.len() {
            assert!(RunRecord::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        for index in 0..bytes.len() {
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[index] ^= 1 << bit;
                // Many damaged records still parse; none may cause a panic.
                if let Err(error) = RunRecord::parse(&damaged) {
                    assert!(!error.to_string().is_empty());
                }
            }
        }
        let long = vec![b' '; RECORD_BYTES_MAX as usize + 1];
        assert!(RunRecord::parse(&long).is_err());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        type Break = fn(&mut RunRecord);
        let breaks: [(Break, &str); 8] = [
            (|record| record.version = 2, "version 2"),
            (|record| record.bucket_ms = 0, "no length"),
            (|record| record.bucket_ms = u64::MAX, "no length"),
            (
                |record| record.buckets = vec![Bucket::default(); BUCKETS_MAX + 1],
                "moments",
            ),
            (|record| record.lasted_seconds = -1.0, "for ever"),
            (
                |record| record.checkpoints[0].closed_seconds = Some(1e300),
                "for ever",
            ),
            (
                |record| record.write_seconds.bounds = vec![1.0],
                "histogram",
            ),
            (
                |record| record.host = "x".repeat(TEXT_BYTES_MAX + 1),
                "too long",
            ),
        ];
        for (change, expected) in breaks {
            let mut broken = record();
            change(&mut broken);
            let text = broken.check().unwrap_err().to_string();
            assert!(text.contains(expected), "{text}: {expected}");
        }
    }

    #[test]
    fn parts_of_a_bucket_add_up_to_it() {
        let whole = Bucket::from([7, 1, 3, 1000, 1 << 40, 0, 13, 17, 19, 23, 5, 2]);
        let mut sum = Bucket::default();
        for (from, to) in [(0.0, 0.3), (0.3, 0.31), (0.31, 0.9), (0.9, 1.0)] {
            sum.add(whole.part(from, to));
        }
        assert_eq!(sum, whole);
    }
}
