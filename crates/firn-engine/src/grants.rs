//! The table of grants: which files client processes may write directly into the arena (the shared memory for written
//! data).
//!
//! A *lease* is the right of a client with a grant to fill one *slab*, a part of the arena.
//!
//! Invariants
//! * A file is in this table exactly while its state has a grant: both change together, under the file's lock.
//! * `lease_count` is the number of leases of all grants.
//!
//! Its lock is a leaf: a file's lock may be held when it is taken.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use crate::DirectWriteObserver;
use crate::file::File;

/// Figures of direct access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirectAccessFigures {
    /// Files with a grant.
    pub files: u64,
    /// Slabs leased to clients.
    pub leases: u64,
    /// Leases that ended because their client stored an invalid record.
    pub errors: u64,
}

/// All grants of an engine, for requests that concern no single file.
pub(crate) struct Grants<B: Backing> {
    /// Number of files with a grant. While it is 0, as on most mounts, no lock is taken.
    file_count: AtomicU64,
    /// Files with a grant, by their address.
    files: Mutex<HashMap<usize, Arc<File<B>>>>,
    /// Slabs leased to clients.
    lease_count: AtomicU64,
    /// Leases that ended because their client stored an invalid record.
    error_count: AtomicU64,
    /// Whether any process has got a list of the places of a file's bytes.
    has_lists: AtomicBool,
    /// Called with each range that clients write.
    observer: OnceLock<DirectWriteObserver>,
}

impl<B: Backing> Default for Grants<B> {
    fn default() -> Self {
        Self {
            file_count: AtomicU64::new(0),
            files: Mutex::new(HashMap::new()),
            lease_count: AtomicU64::new(0),
            error_count: AtomicU64::new(0),
            has_lists: AtomicBool::new(false),
            observer: OnceLock::new(),
        }
    }
}

impl<B: Backing> Grants<B> {
    pub(crate) fn add(&self, file: &Arc<File<B>>) {
        let address = Arc::as_ptr(file) as usize;
        self.files.lock().insert(address, Arc::clone(file));
        self.file_count.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn remove(&self, file: &Arc<File<B>>) {
        let address = Arc::as_ptr(file) as usize;
        let removed = self.files.lock().remove(&address);
        debug_assert!(removed.is_some(), "a grant ends that was not given");
        self.file_count.fetch_sub(1, Ordering::AcqRel);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.file_count.load(Ordering::Acquire) == 0
    }

    pub(crate) fn files(&self) -> Vec<Arc<File<B>>> {
        if self.is_empty() {
            return Vec::new();
        }
        self.files.lock().values().cloned().collect()
    }

    pub(crate) fn count_error(&self) {
        self.error_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a slab that is leased to a client.
    pub(crate) fn count_lease(&self) {
        self.lease_count.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a client's lease.
    pub(crate) fn count_lease_end(&self) {
        let previous_count = self.lease_count.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(previous_count > 0, "a lease ends that was not given");
    }

    /// Sets the observer that is called with each range that clients write. There is at most one observer.
    pub(crate) fn set_observer(&self, observer: DirectWriteObserver) {
        let is_first = self.observer.set(observer).is_ok();
        debug_assert!(is_first, "direct writes have one observer");
    }

    pub(crate) fn observer(&self) -> Option<&DirectWriteObserver> {
        self.observer.get()
    }

    /// Records that a process may get a list of the places of a file's bytes.
    pub(crate) fn record_list(&self) {
        self.has_lists.store(true, Ordering::Release);
    }

    /// Returns whether any process may have such a list.
    pub(crate) fn has_lists(&self) -> bool {
        self.has_lists.load(Ordering::Acquire)
    }

    pub(crate) fn figures(&self) -> DirectAccessFigures {
        DirectAccessFigures {
            files: self.file_count.load(Ordering::Acquire),
            leases: self.lease_count.load(Ordering::Relaxed),
            errors: self.error_count.load(Ordering::Relaxed),
        }
    }

    /// Asserts that `expected` files have a grant.
    pub(crate) fn assert_files(&self, expected: u64) {
        assert_eq!(self.figures().files, expected, "files with a grant");
        assert_eq!(
            self.files.lock().len() as u64,
            expected,
            "files with a grant"
        );
    }
}
