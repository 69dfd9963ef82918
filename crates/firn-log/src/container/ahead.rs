//! Bytes of logs that are in memory, because they were read together, or ahead.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Result};

use crate::behind::read_whole;
use crate::resolve::WriterId;

/// Pieces of a log that are no further from each other are read together: a call costs more than reading this many
/// bytes.
pub(super) const GAP_BYTES_MAX: u64 = 4096;

/// First read of a log that is read from its beginning to its end; each further read is twice as long.
pub(super) const AHEAD_BYTES_MIN: u64 = 64 << 10;
const AHEAD_BYTES_MAX: u64 = 1 << 20;

/// What is in memory of all logs, each of which may have as much as the others.
const WINDOW_BYTES_MAX: u64 = 16 << 20;

/// A container as this process has numbered it, and a log in it.
type LogId = (u64, WriterId, u32);

/// What was read last of each log, of all containers.
#[derive(Default)]
pub(super) struct ReadAhead(Mutex<Windows>);

/// Invariant: `bytes` is the sum over all windows, and at most [`WINDOW_BYTES_MAX`].
#[derive(Default)]
struct Windows {
    of_logs: HashMap<LogId, Arc<Window>>,
    bytes: u64,
}

impl ReadAhead {
    pub(super) fn find(&self, id: LogId) -> Option<Arc<Window>> {
        self.0.lock().of_logs.get(&id).cloned()
    }

    pub(super) fn keep(&self, id: LogId, window: &Arc<Window>) {
        let mut windows = self.0.lock();
        let old = windows.of_logs.remove(&id);
        windows.bytes -= old.map_or(0, |old| old.len());
        if windows.bytes + window.len() > WINDOW_BYTES_MAX {
            *windows = Windows::default();
        }
        if window.len() <= WINDOW_BYTES_MAX {
            windows.bytes += window.len();
            windows.of_logs.insert(id, Arc::clone(window));
        }
    }

    /// Bytes to read where `last` was read before.
    pub(super) fn bytes_after(&self, last: &Window) -> u64 {
        let logs = self.0.lock().of_logs.len() as u64;
        let share = WINDOW_BYTES_MAX / logs.max(1);
        let most = share.clamp(AHEAD_BYTES_MIN, AHEAD_BYTES_MAX);
        (2 * last.len()).clamp(AHEAD_BYTES_MIN, most)
    }
}

/// Bytes of a log, which do not change once a frame names them.
pub(super) struct Window {
    pub(super) start: u64,
    pub(super) bytes: Vec<u8>,
}

impl Window {
    pub(super) fn read<B: Backing>(base: &B, file: &B::File, range: Range<u64>) -> Result<Self> {
        let mut bytes = vec![0; (range.end - range.start) as usize];
        let count = read_whole(base, file, &mut bytes, range.start)?;
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

    pub(super) fn has(&self, range: Range<u64>) -> bool {
        self.start <= range.start && range.end <= self.end()
    }

    pub(super) fn is_followed_by(&self, position: u64) -> bool {
        (self.start..=self.end() + GAP_BYTES_MAX).contains(&position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_all_logs_have_a_bound_and_share_it() {
        let ahead = ReadAhead::default();
        let window = |bytes: u64| {
            let bytes = vec![0; bytes as usize];
            Arc::new(Window { start: 0, bytes })
        };
        let id = |log| (0, WriterId { host: 0, life: 1 }, log);
        let small = window(1000);
        assert_eq!(ahead.bytes_after(&small), AHEAD_BYTES_MIN);
        assert_eq!(ahead.bytes_after(&window(3 << 20)), AHEAD_BYTES_MAX);
        for log in 0..40 {
            ahead.keep(id(log), &window(1 << 20));
            ahead.keep(id(log), &window(1 << 20));
            let windows = ahead.0.lock();
            let sum: u64 = windows.of_logs.values().map(|window| window.len()).sum();
            assert!(sum == windows.bytes && sum <= WINDOW_BYTES_MAX);
        }
        assert!(ahead.find(id(39)).is_some());
        (0..64).for_each(|log| ahead.keep(id(log), &small));
        assert_eq!(ahead.bytes_after(&window(3 << 20)), WINDOW_BYTES_MAX / 64);
        ahead.keep(id(0), &window(WINDOW_BYTES_MAX + 1));
        assert!(ahead.find(id(0)).is_none());
    }
}
