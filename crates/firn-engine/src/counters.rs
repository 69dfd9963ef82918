//! Counters of an engine since its start, and sums of the bytes and files that are pending (not in the backing yet).
//!
//! Invariant: [`PendingTotals`] of a lane (one I/O server) has the sums over the lane's files. Each change of a file's
//! pending bytes calls [`PendingTotals::record_change`] under the file's lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use firn_format::histogram::{SizeHistogram, TimeHistogram};
use firn_format::tally::Tally;

/// Decisions of the threads that write pending bytes to the backing. Each is counted, and logged with
/// `log-level=debug`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Decision {
    /// A write to the backing was chosen: bytes of one file.
    Picked,
    /// These bytes were written.
    Written,
    /// A write failed, and the next try of the file is planned.
    RetryPlanned,
    /// A file is tried again after its wait.
    Retried,
    /// Writers that wait for room got an error, because no drain or move can make room.
    WritersFailed,
    /// A chunk (a unit of the arena, the memory for written data) was moved to the spill file.
    Spilled,
    /// Writes were delayed, because no caller waits for them and programs need the CPUs.
    Delayed,
    /// A chunk was copied to a memory file (a file in memory with all bytes of one large file).
    Settled,
}

/// Counts of all [`Decision`]s.
pub(crate) struct Decisions(pub(crate) Tally<8>);

impl Default for Decisions {
    fn default() -> Self {
        // The names of the log, in the order of the variants.
        Self(Tally::new([
            "picked", "written", "waits", "retried", "given up", "spilled", "put off", "settled",
        ]))
    }
}

impl Decisions {
    pub(crate) fn count(&self, decision: Decision) {
        self.0.count(decision as usize);
    }

    pub(crate) fn count_of(&self, decision: Decision) -> u64 {
        self.0.get(decision as usize)
    }
}

/// Durations of programs' calls in firnd, from the request to its answer. The frontends count them. Writes by direct
/// access are not counted, as they are stores of the program to memory.
#[derive(Default)]
pub struct RequestTimes {
    /// write(2), including the wait for room.
    pub write: TimeHistogram,
    /// close(2), with or without a wait for the backing.
    pub close: TimeHistogram,
    /// fsync(2) and fdatasync(2) of a file.
    pub fsync: TimeHistogram,
}

/// Counters since the engine's start. The fields `chunk_lists`, `chunk_list_bytes` and `cached_bytes` are not counters
/// but present values.
#[derive(Default)]
pub(crate) struct Counters {
    /// Sizes in bytes of the writes that were accepted from programs.
    pub ingest: SizeHistogram,
    pub request_times: Arc<RequestTimes>,
    /// Sizes in bytes of the writes to the backing that succeeded.
    pub drain_sizes: SizeHistogram,
    /// Times of calls that wrote to the backing, including failed calls.
    pub drain_times: TimeHistogram,
    /// Bytes written to the backing.
    pub drain_bytes: AtomicU64,
    /// Calls that wrote to the backing.
    pub drain_writes: AtomicU64,
    /// Drains that failed.
    pub drain_errors: AtomicU64,
    pub drain_decisions: Decisions,
    /// Pending bytes that were overwritten, cut or discarded before a drain.
    pub cancelled_bytes: AtomicU64,
    /// Cached bytes that were evicted.
    pub evicted_bytes: AtomicU64,
    /// Bytes that programs read.
    pub read_bytes: AtomicU64,
    /// Sum of the times that closes waited for the backing, in microseconds.
    pub close_wait_us: AtomicU64,
    /// Lists of chunks in use.
    pub chunk_lists: AtomicU64,
    /// Bytes in memory that these lists name.
    pub chunk_list_bytes: AtomicU64,
    /// Drained bytes that are still in the arena. Shared by all files that have cached bytes.
    pub cached_bytes: Arc<AtomicU64>,
    /// Files of the backing that were opened since the last check of the number of open files.
    pub files_opened: AtomicUsize,
}

/// Sums over the files of a lane: their pending bytes, and the number of files with such bytes.
#[derive(Default)]
pub(crate) struct PendingTotals {
    bytes: AtomicU64,
    files: AtomicU64,
}

impl PendingTotals {
    /// Counts a change of one file's pending bytes (which are not in the backing yet), from `bytes_before` to
    /// `bytes_after`. The caller has the file's lock, so that changes of one file are counted in their order.
    pub(crate) fn record_change(&self, bytes_before: u64, bytes_after: u64) {
        if bytes_after >= bytes_before {
            let added = bytes_after - bytes_before;
            self.bytes.fetch_add(added, Ordering::Relaxed);
        } else {
            let removed = bytes_before - bytes_after;
            let total = self.bytes.fetch_sub(removed, Ordering::Relaxed);
            debug_assert!(total >= removed, "more is drained than was held");
        }
        if bytes_before == 0 && bytes_after > 0 {
            self.files.fetch_add(1, Ordering::Relaxed);
        }
        if bytes_before > 0 && bytes_after == 0 {
            let total = self.files.fetch_sub(1, Ordering::Relaxed);
            debug_assert!(total > 0, "more files are drained than were held");
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }
}

impl Counters {
    /// Counts a write of `bytes` bytes that was accepted from a program.
    pub(crate) fn count_ingest(&self, bytes: u64) {
        self.ingest.observe(bytes);
    }

    /// Counts a file of the backing that was opened.
    pub(crate) fn count_opened(&self) {
        self.files_opened.fetch_add(1, Ordering::Relaxed);
    }
}
