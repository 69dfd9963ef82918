//! What an engine counts since the attach, and what it holds now.
//!
//! Invariants
//! * [`Held`] of a lane are the sums over its files of what is pending: each change of a file's pending bytes calls
//!   [`Held::count`] under the file's lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use firn_format::histogram::{SizeHistogram, TimeHistogram};
use firn_format::tally::Tally;

/// What the drain decides, each counted and, with `log-level=debug`, logged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Decision {
    /// A run of a file goes to the backing now.
    Picked,
    /// It is there.
    Written,
    /// It failed: the file waits for its next try.
    Waits,
    /// The wait is over.
    Retried,
    /// Writers that wait for room learn that there will be none.
    GivenUp,
    /// A chunk went to the spill file.
    Spilled,
    /// Put off: no caller waits for it, and programs want the CPUs.
    PutOff,
    /// A chunk went to a memory file.
    Settled,
}

/// Counts of [`Decision`]s.
pub(crate) struct Decisions(pub(crate) Tally<8>);

impl Default for Decisions {
    fn default() -> Self {
        Self(Tally::new([
            "picked", "written", "waits", "retried", "given up", "spilled", "put off", "settled",
        ]))
    }
}

impl Decisions {
    pub(crate) fn count(&self, decision: Decision) {
        self.0.count(decision as usize);
    }

    pub(crate) fn of(&self, decision: Decision) -> u64 {
        self.0.get(decision as usize)
    }
}

/// How long firnd took for calls of programs, from the request to its answer. The frontends count. Writes by direct
/// access are not counted: they are stores of the program to memory.
#[derive(Default)]
pub struct RequestTimes {
    /// write(2), with the time that it waited for room.
    pub write: TimeHistogram,
    /// close(2), whether or not it waited for the backing.
    pub close: TimeHistogram,
    /// fsync(2) and fdatasync(2) of a file.
    pub fsync: TimeHistogram,
}

/// What is counted since the attach; `chunk_lists`, `chunk_list_bytes` and `cached_bytes` are what is there now.
#[derive(Default)]
pub(crate) struct Counters {
    /// Sizes of the writes that were taken from programs.
    pub ingest: SizeHistogram,
    pub request_times: Arc<RequestTimes>,
    /// Sizes of the writes to the backing that succeeded.
    pub drain_sizes: SizeHistogram,
    /// How long calls took that wrote to the backing, those that failed too.
    pub drain_times: TimeHistogram,
    pub drain_bytes: AtomicU64,
    pub drain_writes: AtomicU64,
    pub drain_errors: AtomicU64,
    pub drain_decisions: Decisions,
    pub cancelled_bytes: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub read_bytes: AtomicU64,
    /// Microseconds that closes waited for the backing, each for itself.
    pub close_wait_us: AtomicU64,
    /// Lists of chunks in use.
    pub chunk_lists: AtomicU64,
    /// Bytes in memory that they name.
    pub chunk_list_bytes: AtomicU64,
    /// Drained bytes that are still in the arena. Shared with the files that have some.
    pub cached_bytes: Arc<AtomicU64>,
    /// Files of the backing that were opened since all of them were last looked at.
    pub files_opened: AtomicUsize,
}

/// What is pending.
#[derive(Default)]
pub(crate) struct Held {
    bytes: AtomicU64,
    files: AtomicU64,
}

impl Held {
    /// Counts a change of what is held of one file.
    pub(crate) fn count(&self, before: u64, after: u64) {
        if after >= before {
            self.bytes.fetch_add(after - before, Ordering::Relaxed);
        } else {
            let held = self.bytes.fetch_sub(before - after, Ordering::Relaxed);
            debug_assert!(held >= before - after, "more is drained than was held");
        }
        match (before == 0, after == 0) {
            (true, false) => {
                self.files.fetch_add(1, Ordering::Relaxed);
            }
            (false, true) => {
                let held = self.files.fetch_sub(1, Ordering::Relaxed);
                debug_assert!(held > 0, "more files are drained than were held");
            }
            _ => {}
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
    /// Counts a write that was taken from a program.
    pub(crate) fn count_ingest(&self, bytes: u64) {
        self.ingest.observe(bytes);
    }

    /// Counts a file of the backing that was opened.
    pub(crate) fn count_opened(&self) {
        self.files_opened.fetch_add(1, Ordering::Relaxed);
    }
}
