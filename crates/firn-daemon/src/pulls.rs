//! Counts what agents send of this mount to other hosts. An agent is a process that serves a mount's files to other
//! hosts. It reports what it sends on its connection to the control socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sums over all agents: connections now, and files and bytes since the mount.
#[derive(Default)]
pub(crate) struct Pulls {
    under_way: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
}

/// A connection over which an agent serves a puller (the agent of another host). It counts as under way until it is
/// dropped.
pub(crate) struct Pull(Arc<Pulls>);

impl Pulls {
    /// Counts a connection, when it sends its first report.
    pub(crate) fn begin(self: &Arc<Self>) -> Pull {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        Pull(Arc::clone(self))
    }

    /// Returns the number of connections that are under way.
    pub(crate) fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Returns the number of files sent since the mount.
    pub(crate) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes sent since the mount.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Pull {
    /// Adds files and bytes that were sent.
    pub(crate) fn add(&self, files: u64, bytes: u64) {
        self.0.files.fetch_add(files, Ordering::Relaxed);
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}
