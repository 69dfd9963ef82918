//! Read-ahead of logs: the bytes read last from each log stay in memory. A *log* has the bytes that one host wrote to a
//! file.
//!
//! A program that reads a file in order reads each log in order too. So each read that continues the last one of its
//! log is twice as long, up to 1 MiB. All logs share [`WINDOW_BYTES_MAX`] of memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Result};

use crate::lag::read_whole;
use crate::locate::LogId;

/// Largest gap in bytes between two pieces that are read with one call. A call costs more than reading this many bytes.
pub(super) const GAP_BYTES_MAX: u64 = 4096;

/// Length of the first read of a log that is read in order.
pub(super) const AHEAD_BYTES_MIN: u64 = 64 << 10;
/// Largest length of a read ahead.
const AHEAD_BYTES_MAX: u64 = 1 << 20;

/// Bound on the bytes in memory of all logs.
const WINDOW_BYTES_MAX: u64 = 16 << 20;

/// The bytes read last from each log, of all containers.
#[derive(Default)]
pub(super) struct ReadAhead(Mutex<Windows>);

/// The windows, under a lock.
///
/// Invariant: `bytes` is the sum over all windows and is at most [`WINDOW_BYTES_MAX`].
#[derive(Default)]
struct Windows {
    by_log: HashMap<LogId, Arc<Window>>,
    bytes: u64,
}

impl ReadAhead {
    /// Returns the bytes read last from a log.
    pub(super) fn find(&self, id: LogId) -> Option<Arc<Window>> {
        self.0.lock().by_log.get(&id).cloned()
    }

    /// Stores the bytes read last from a log, in place of its earlier ones. Drops all windows if there is no room.
    pub(super) fn insert(&self, id: LogId, window: &Arc<Window>) {
        let mut windows = self.0.lock();
        if let Some(replaced) = windows.by_log.remove(&id) {
            windows.bytes -= replaced.len();
        }
        if windows.bytes + window.len() > WINDOW_BYTES_MAX {
            *windows = Windows::default();
        }
        if window.len() <= WINDOW_BYTES_MAX {
            windows.bytes += window.len();
            windows.by_log.insert(id, Arc::clone(window));
        }
    }

    /// Returns how many bytes to read if the read continues `last`: twice as many, bounded by a fair share of the
    /// memory.
    pub(super) fn bytes_after(&self, last: &Window) -> u64 {
        let logs = self.0.lock().by_log.len() as u64;
        let share = WINDOW_BYTES_MAX / logs.max(1);
        let share_max = share.clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        (2 * last.len()).clamp(AHEAD_BYTES_MIN, share_max)
    }
}

/// A range of a log in memory. Its bytes never change, because a frame describes them.
pub(super) struct Window {
    /// Position of the first byte in the log.
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Window {
    /// Reads a range of a log. The window is shorter if the log ends before the range does.
    pub(super) fn read<B: Backing>(backing: &B, file: &B::File, range: Range<u64>) -> Result<Self> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let count = read_whole(backing, file, &mut bytes, range.start)?;
        bytes.truncate(count);
        let start = range.start;
        Ok(Self { start, bytes })
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub(super) fn end(&self) -> u64 {
        self.start + self.len()
    }

    pub(super) fn contains(&self, range: Range<u64>) -> bool {
        self.start <= range.start && range.end <= self.end()
    }

    /// Returns whether a read at `position` continues this window, with a small gap at most.
    pub(super) fn is_continued_at(&self, position: u64) -> bool {
        (self.start..=self.end() + GAP_BYTES_MAX).contains(&position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::WriterId;

    #[test]
    fn windows_of_all_logs_have_a_bound_and_share_it() {
        let ahead = ReadAhead::default();
        let window = |bytes: u64| {
            let bytes = vec![0; bytes as usize];
            Arc::new(Window { start: 0, bytes })
        };
        let writer = WriterId { host: 0, life: 1 };
        let id = |log| LogId {
            container: 0,
            writer,
            log,
        };
        let small = window(1000);
        assert_eq!(ahead.bytes_after(&small), AHEAD_BYTES_MIN);
        assert_eq!(ahead.bytes_after(&window(3 << 20)), AHEAD_BYTES_MAX);
        for log in 0..40 {
            ahead.insert(id(log), &window(1 << 20));
            ahead.insert(id(log), &window(1 << 20));
            let windows = ahead.0.lock();
            let sum: u64 = windows.by_log.values().map(|window| window.len()).sum();
            assert!(sum == windows.bytes && sum <= WINDOW_BYTES_MAX);
        }
        assert!(ahead.find(id(39)).is_some());
        (0..64).for_each(|log| ahead.insert(id(log), &small));
        assert_eq!(ahead.bytes_after(&window(3 << 20)), WINDOW_BYTES_MAX / 64);
        ahead.insert(id(0), &window(WINDOW_BYTES_MAX + 1));
        assert!(ahead.find(id(0)).is_none());
    }
}
