//! Counts the files of this mount that other hosts pull: the connections, files and bytes. An *agent* sends the files
//! of a mount to other hosts. It reports what it sends on its connection to the control socket.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sums over all agents: connections now, and files and bytes since the mount.
#[derive(Default)]
pub(crate) struct Pulls {
    open_connections: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
}

/// A connection over which an agent serves a puller (the agent of another host). It counts as open until it is
/// dropped.
pub(crate) struct PullConnection(Arc<Pulls>);

impl Pulls {
    /// Counts a connection, when it sends its first report.
    pub(crate) fn begin(self: &Arc<Self>) -> PullConnection {
        self.open_connections.fetch_add(1, Ordering::Relaxed);
        PullConnection(Arc::clone(self))
    }

    /// Returns the number of open connections.
    pub(crate) fn open_connections(&self) -> u64 {
        self.open_connections.load(Ordering::Relaxed)
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

impl PullConnection {
    /// Adds files and bytes that were sent.
    pub(crate) fn add(&self, files: u64, bytes: u64) {
        self.0.files.fetch_add(files, Ordering::Relaxed);
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for PullConnection {
    fn drop(&mut self) {
        self.0.open_connections.fetch_sub(1, Ordering::Relaxed);
    }
}
