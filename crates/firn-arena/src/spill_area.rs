//! The spill file of an arena, the fault that it may have, and the lock and count of moves to it. The *arena* is shared
//! memory, allocated in *chunks*. The *spill file*, on a local disk, has chunks that no longer fit into memory.
//!
//! Invariants
//! * No chunk moves to a file that is missing or has a fault.
//! * One chunk moves at a time: the thread that moves it has the guard of [`SpillArea::lock_mover`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;

use crate::spill::{OpenedSpillFile, SpillFault, SpillFile};

/// The state of an arena's spill file. The default is an arena without one.
#[derive(Default)]
pub(crate) struct SpillArea {
    file: Option<Arc<SpillFile>>,
    fault: Option<SpillFault>,
    /// Locked by the thread that moves a chunk.
    mover: Mutex<()>,
    /// Bytes moved since the arena was attached.
    moved_bytes: AtomicU64,
}

impl SpillArea {
    /// Returns the spill area of a new arena.
    pub(crate) fn with_file(file: SpillFile) -> Self {
        Self {
            file: Some(Arc::new(file)),
            ..Self::default()
        }
    }

    /// Returns the spill area of an attached arena. `opened` is the file, or the fault that prevented its opening.
    pub(crate) fn from_opened(opened: Result<OpenedSpillFile, SpillFault>) -> Self {
        let (file, fault) = match opened {
            Ok(OpenedSpillFile { file, write_fault }) => (Some(Arc::new(file)), write_fault),
            Err(fault) => (None, Some(fault)),
        };
        Self {
            file,
            fault,
            ..Self::default()
        }
    }

    /// Returns the file, for reads.
    pub(crate) fn file(&self) -> Option<&Arc<SpillFile>> {
        self.file.as_ref()
    }

    pub(crate) fn fault(&self) -> Option<&SpillFault> {
        self.fault.as_ref()
    }

    /// Returns the file, if it has no fault: then chunks may move to it.
    pub(crate) fn usable_file(&self) -> Option<&Arc<SpillFile>> {
        match self.fault {
            None => self.file.as_ref(),
            Some(_) => None,
        }
    }

    /// Returns whether the file has all bytes of a slot. Nothing is read.
    pub(crate) fn has_slot(&self, slot: u32) -> bool {
        let Some(file) = &self.file else {
            return false;
        };
        // A file without a fault has all its slots.
        self.fault.is_none() || file.has_slot(slot)
    }

    /// Begins a move: waits until no other thread moves a chunk, and keeps others out until the guard is dropped.
    pub(crate) fn lock_mover(&self) -> MutexGuard<'_, ()> {
        self.mover.lock()
    }

    /// Adds to the count of moved bytes. The caller has the guard of [`SpillArea::lock_mover`].
    pub(crate) fn count_moved(&self, bytes: u64) {
        debug_assert!(self.mover.is_locked(), "a chunk moved without its turn");
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        self.moved_bytes.load(Ordering::Relaxed)
    }

    /// Makes all spilled chunks durable. Does nothing without a file.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        match &self.file {
            Some(file) => file.sync(),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn nothing_moves_to_a_file_with_a_fault() {
        let path = PathBuf::from("/nonexistent/spill");
        let fault = SpillFault::LongPath { path };
        let area = SpillArea::from_opened(Err(fault.clone()));
        assert_eq!(area.fault(), Some(&fault));
        assert!(area.usable_file().is_none());
        assert!(!area.has_slot(0));
        assert_eq!(area.sync(), Ok(()));
    }

    #[test]
    fn moved_bytes_are_counted_by_the_mover() {
        let area = SpillArea::default();
        let guard = area.lock_mover();
        area.count_moved(3);
        area.count_moved(4);
        drop(guard);
        assert_eq!(area.moved_bytes(), 7);
    }
}
