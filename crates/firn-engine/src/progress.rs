//! What happens to pending data, for those who wait for a tree of files.

use std::time::Duration;

use firn_backing::lock::Mutex;
use parking_lot::Condvar;

/// Counts what happens to pending data, for those who wait for a tree.
#[derive(Default)]
pub(crate) struct Progress {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Progress {
    pub(crate) fn count(&self) -> u64 {
        *self.count.lock()
    }

    /// Something happened.
    pub(crate) fn signal(&self) {
        *self.count.lock() += 1;
        self.changed.notify_all();
    }

    /// Waits until more happened than `seen`, at most for `time`.
    pub(crate) fn wait_past(&self, seen: u64, time: Duration) {
        let mut count = self.count.lock();
        if *count == seen {
            count.wait_for(&self.changed, time);
        }
    }
}
