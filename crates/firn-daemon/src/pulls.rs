//! What agents send of this mount to other hosts, as they report it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Of all agents.
#[derive(Default)]
pub(crate) struct Pulls {
    under_way: AtomicU64,
    files: AtomicU64,
    bytes: AtomicU64,
}

/// A connection that an agent has for a puller; it counts until it is dropped.
pub(crate) struct Pull(Arc<Pulls>);

impl Pulls {
    /// A connection says for the first time what it is.
    pub(crate) fn begin(self: &Arc<Self>) -> Pull {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        Pull(Arc::clone(self))
    }

    /// Connections now.
    pub(crate) fn under_way(&self) -> u64 {
        self.under_way.load(Ordering::Relaxed)
    }

    /// Files since the mount.
    pub(crate) fn files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    /// Bytes since the mount.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Pull {
    /// This many more bytes were sent.
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
