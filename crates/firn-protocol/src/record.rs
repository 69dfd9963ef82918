//! The record of a run: what firnd keeps of the time that a mount was there, for `firn report`.
//!
//! It is JSON on the control socket, in the runtime directory of the host (`KEY.record`) and, with `record-in=backing`,
//! in `.firn/records` of the backing. Readers use [`RunRecord::parse`].
//!
//! Invariants of a parsed record
//! * It has at most [`BUCKETS_MAX`] buckets, [`CHECKPOINTS_MAX`] checkpoints and [`EVENTS_MAX`] events.
//! * A bucket lasts between a millisecond and a year, and no moment is more than `SECONDS_MAX` away from another one.
//! * A histogram has one count more than bounds, and its bounds are finite and ascend.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::figures::HistogramStatus;
use crate::path::BytePath;

/// Version of the format; a record of another one is not read.
pub const RECORD_VERSION: u32 = 1;
/// Bytes of the longest record.
pub const RECORD_BYTES_MAX: u64 = 1 << 20;
/// When there would be more, two become one.
pub const BUCKETS_MAX: usize = 600;
/// Of more than that, the oldest are forgotten.
pub const CHECKPOINTS_MAX: usize = 512;
/// Of more than that, the oldest are forgotten.
pub const EVENTS_MAX: usize = 256;
/// A hundred years: what is longer is damage.
const SECONDS_MAX: f64 = 100.0 * 366.0 * 86_400.0;
/// Bound on names and texts in a record.
const TEXT_BYTES_MAX: usize = 16 << 10;

/// What happened in one span of time.
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
    /// Microseconds that writes took which ended now, all added up.
    pub write_us: u64,
    /// Microseconds of the closes that ended now, added up.
    pub close_us: u64,
    /// Microseconds of the calls of fsync(2) that ended now, added up.
    pub fsync_us: u64,
    /// Microseconds of the writes to the backing that ended now, added up.
    pub drain_us: u64,
    /// The most bytes that were held.
    pub held_bytes: u64,
    /// The most writers that waited for room.
    pub waiting_writers: u64,
}

/// Fields of a [`Bucket`] before this one are sums, the others maxima.
const SUMS: usize = 10;

impl Bucket {
    /// Takes in what happened in another one.
    pub fn add(&mut self, other: Self) {
        let (mut all, other): ([u64; 12], [u64; 12]) = ((*self).into(), other.into());
        for (index, (one, more)) in all.iter_mut().zip(other).enumerate() {
            *one = if index < SUMS {
                one.saturating_add(more)
            } else {
                (*one).max(more)
            };
        }
        *self = all.into();
    }

    /// What counters say more than they said before. Maxima are those of `self`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        let (mut all, before): ([u64; 12], [u64; 12]) = (self.into(), before.into());
        for (one, before) in all[..SUMS].iter_mut().zip(before) {
            *one = one.saturating_sub(before);
        }
        all.into()
    }

    /// The part of each sum from one share to another one, between 0 and 1. The parts of adjoining shares add up.
    #[must_use]
    pub fn part(self, from: f64, to: f64) -> Self {
        let mut all: [u64; 12] = self.into();
        for one in &mut all[..SUMS] {
            let upto = |share: f64| (*one as f64 * share) as u64;
            let end = if to >= 1.0 { *one } else { upto(to) };
            *one = end.saturating_sub(upto(from));
        }
        all.into()
    }
}

impl From<[u64; 12]> for Bucket {
    fn from(all: [u64; 12]) -> Self {
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
        ] = all;
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

impl From<Bucket> for [u64; 12] {
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

/// A checkpoint on its way to durable. Times are seconds since the record began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckpointRecord {
    /// Path below the mount point, of the directory or the file with the step in its name.
    pub path: BytePath,
    /// The step.
    pub step: u64,
    /// When a file of it was opened for writing, or first held.
    pub began_seconds: f64,
    /// When its last writer closed its last file; none: a file is open.
    pub closed_seconds: Option<f64>,
    /// When all its bytes were in the backing, or dropped; none: some are held.
    pub drained_seconds: Option<f64>,
    /// When all its files were synced there; none: not all were.
    pub durable_seconds: Option<f64>,
    /// Files that were written.
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
    /// What it tells, by name; units are last in the names.
    pub fields: BTreeMap<String, String>,
}

/// What firnd keeps of the time that a mount was there.
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
    /// Options in force that change what promises mean.
    pub options: Vec<String>,
    /// When firnd attached, by the clock of its host: microseconds since 1970.
    pub began_unix_us: u64,
    /// Time from then to the last look at the counters.
    pub lasted_seconds: f64,
    /// Whether the mount has ended.
    pub has_ended: bool,
    /// Bytes of chunks in the arena.
    pub arena_bytes: u64,
    /// Bytes that are held at the end, and those whose file is lost.
    pub held_bytes: u64,
    /// Bytes that were overwritten or removed before they were drained.
    pub cancelled_bytes: u64,
    /// Bytes that were recovered from an earlier firnd.
    pub recovered_bytes: u64,
    /// Write calls to the backing that failed.
    pub drain_errors: u64,
    /// How long a bucket lasts.
    pub bucket_ms: u64,
    /// One after the other, from the beginning.
    pub buckets: Vec<Bucket>,
    /// Sizes of the writes of programs, in bytes.
    pub ingest_write_bytes: HistogramStatus,
    /// Sizes of the writes to the backing, in bytes.
    pub drain_write_bytes: HistogramStatus,
    /// Seconds that writes of programs took.
    pub write_seconds: HistogramStatus,
    /// Seconds that closes took.
    pub close_seconds: HistogramStatus,
    /// Seconds that fsync(2) took.
    pub fsync_seconds: HistogramStatus,
    /// Seconds that calls took which write to the backing.
    pub drain_seconds: HistogramStatus,
    /// Seconds that closes waited for the backing.
    pub close_wait_seconds: f64,
    /// In the order in which they began.
    pub checkpoints: Vec<CheckpointRecord>,
    /// The oldest first.
    pub events: Vec<EventRecord>,
    /// Checkpoints, events and changes of files that are not in the record, because there were too many.
    pub forgotten: u64,
}

/// Why a record cannot be read.
#[derive(Debug)]
pub enum RecordError {
    /// It is longer than firnd writes.
    TooLong {
        /// Its bytes.
        bytes: u64,
    },
    /// It is no JSON of a record.
    Malformed(serde_json::Error),
    /// Another version of Firn wrote it.
    Version {
        /// The version of its format.
        found: u32,
    },
    /// What it says cannot be.
    Impossible(&'static str),
}

impl std::fmt::Display for RecordError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::TooLong { bytes } => write!(
                f,
                "it has {bytes} bytes, and firnd writes no more than {RECORD_BYTES_MAX}"
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
    /// Reads a record, which anything may have written.
    pub fn parse(bytes: &[u8]) -> Result<Self, RecordError> {
        let len = bytes.len() as u64;
        if len > RECORD_BYTES_MAX {
            return Err(RecordError::TooLong { bytes: len });
        }
        let record: Self = serde_json::from_slice(bytes).map_err(RecordError::Malformed)?;
        record.check()
    }

    /// Refuses what cannot be.
    pub fn check(self) -> Result<Self, RecordError> {
        if self.version != RECORD_VERSION {
            return Err(RecordError::Version {
                found: self.version,
            });
        }
        let wrong = self.find_fault();
        wrong.map_or(Ok(self), |what| Err(RecordError::Impossible(what)))
    }

    fn find_fault(&self) -> Option<&'static str> {
        let is_time = |seconds: f64| (0.0..=SECONDS_MAX).contains(&seconds);
        let is_text = |text: &str| text.len() <= TEXT_BYTES_MAX;
        let histograms = [
            &self.ingest_write_bytes,
            &self.drain_write_bytes,
            &self.write_seconds,
            &self.close_seconds,
            &self.fsync_seconds,
            &self.drain_seconds,
        ];
        let bucket_seconds = self.bucket_ms as f64 / 1000.0;
        let times = self.checkpoints.iter().flat_map(|one| {
            [
                Some(one.began_seconds),
                one.closed_seconds,
                one.drained_seconds,
                one.durable_seconds,
            ]
        });
        let mut times = times.flatten().chain([self.lasted_seconds]);
        let mut texts = self.events.iter().flat_map(|event| {
            let fields = event.fields.iter().flat_map(|(name, value)| [name, value]);
            fields.chain([&event.kind])
        });
        let has_paths = [&self.mount_point, &self.backing]
            .into_iter()
            .chain(self.checkpoints.iter().map(|one| &one.path))
            .all(|path| path.as_bytes().len() <= TEXT_BYTES_MAX);
        let faults = [
            (self.buckets.len() > BUCKETS_MAX, "it has too many moments"),
            (
                self.checkpoints.len() > CHECKPOINTS_MAX,
                "it has too many checkpoints",
            ),
            (self.events.len() > EVENTS_MAX, "it has too many events"),
            (
                self.bucket_ms == 0 || !is_time(bucket_seconds * 100.0),
                "its moments have no length",
            ),
            (!times.all(is_time), "it lasts for ever"),
            (
                !is_time(self.began_unix_us as f64 / 1e6),
                "it begins in another age",
            ),
            (
                !histograms.into_iter().all(is_histogram),
                "a histogram is none",
            ),
            (!self.close_wait_seconds.is_finite(), "a time is no number"),
            (
                !(is_text(&self.host)
                    && is_text(&self.firn_version)
                    && self.options.iter().all(|text| is_text(text))
                    && texts.all(|text| is_text(text))
                    && has_paths),
                "a text is too long",
            ),
        ];
        faults
            .into_iter()
            .find_map(|(is_so, what)| is_so.then_some(what))
    }

    /// How long a bucket lasts.
    pub fn bucket_seconds(&self) -> f64 {
        self.bucket_ms as f64 / 1000.0
    }

    /// The sums and maxima of the whole time.
    pub fn total(&self) -> Bucket {
        let mut total = Bucket::default();
        self.buckets.iter().for_each(|bucket| total.add(*bucket));
        total
    }
}

/// Empty, or with one count more than bounds, which ascend.
fn is_histogram(histogram: &HistogramStatus) -> bool {
    let HistogramStatus {
        bounds,
        counts,
        sum,
    } = histogram;
    let is_empty = bounds.is_empty() && counts.is_empty();
    let ascends = bounds.is_sorted_by(|one, next| one < next);
    let is_finite = sum.is_finite() && bounds.iter().all(|bound| bound.is_finite());
    let has_bounds = bounds.len() <= 256 && counts.len() == bounds.len() + 1;
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
                // Many are records still; none may panic.
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
            (|one| one.version = 2, "version 2"),
            (|one| one.bucket_ms = 0, "no length"),
            (|one| one.bucket_ms = u64::MAX, "no length"),
            (
                |one| one.buckets = vec![Bucket::default(); BUCKETS_MAX + 1],
                "moments",
            ),
            (|one| one.lasted_seconds = -1.0, "for ever"),
            (
                |one| one.checkpoints[0].closed_seconds = Some(1e300),
                "for ever",
            ),
            (|one| one.write_seconds.bounds = vec![1.0], "histogram"),
            (|one| one.host = "x".repeat(TEXT_BYTES_MAX + 1), "too long"),
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
