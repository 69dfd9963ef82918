//! Held files of which the kernel may have a copy of its own in its page cache.
//!
//! A held file without writers is read through the kernel's cache. Its bytes are in memory twice then, so this table
//! bounds them. A file is admitted with all of its bytes, whether or not they are read. Of files that are not open the
//! kernel drops the one that was opened longest ago.
//!
//! Invariants
//! * `bytes` is the sum over the table, at most `bytes_max`.
//! * A file that is open through the cache stays in the table.
//! * A copy is kept from one open to the next only if the file has not changed since it was admitted.
//!
//! Its lock is the last one: nothing is called under it.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::InodeId;

/// Called, with no lock held, with a file whose pages the kernel is to drop.
pub(crate) type PagesObserver = Arc<dyn Fn(InodeId) + Send + Sync>;

/// The table of one mount.
pub(crate) struct KernelCopies {
    bytes_max: u64,
    table: Mutex<Table>,
    observer: OnceLock<PagesObserver>,
}

#[derive(Default)]
struct Table {
    copies: HashMap<InodeId, Copy>,
    bytes: u64,
    /// Number of the last admission.
    admissions: u64,
}

/// What the kernel may have of one file.
struct Copy {
    bytes: u64,
    /// Contents that were admitted: [`FileState::changes`](crate::file::FileState) at that time.
    changes: u64,
    opens: u32,
    admitted: u64,
}

/// A file may be read through the kernel's cache.
pub(crate) struct Admission {
    /// What the kernel has of it is still right.
    pub(crate) is_current: bool,
    /// Files whose pages must be dropped in return: [`KernelCopies::drop_pages`].
    pub(crate) dropped: Vec<InodeId>,
}

impl KernelCopies {
    pub(crate) fn new(bytes_max: u64) -> Self {
        Self {
            bytes_max,
            table: Mutex::default(),
            observer: OnceLock::new(),
        }
    }

    /// Whether there may be any.
    pub(crate) fn are_allowed(&self) -> bool {
        self.bytes_max > 0
    }

    /// To be called once, before the first open.
    pub(crate) fn set_observer(&self, observer: PagesObserver) {
        let _ = self.observer.set(observer);
    }

    /// Bytes of all files in the table, and the most that they may be.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.table.lock().bytes, self.bytes_max)
    }

    /// The length of a file that was admitted and has not changed since.
    pub(crate) fn size_of(&self, inode: InodeId, changes: u64) -> Option<u64> {
        let table = self.table.lock();
        let copy = table.copies.get(&inode)?;
        (copy.changes == changes).then_some(copy.bytes)
    }

    /// Counts one more open of a file of `bytes`; `None` where that would be too many.
    pub(crate) fn admit(&self, inode: InodeId, bytes: u64, changes: u64) -> Option<Admission> {
        let mut table = self.table.lock();
        let known = table.copies.get(&inode);
        let is_current = known.is_some_and(|copy| copy.changes == changes);
        let opens = known.map_or(0, |copy| copy.opens);
        let others_open: u64 = table
            .copies
            .iter()
            .filter(|(other, copy)| **other != inode && copy.opens > 0)
            .map(|(_, copy)| copy.bytes)
            .sum();
        if others_open.saturating_add(bytes) > self.bytes_max {
            return None;
        }
        table.remove(inode);
        let dropped = table.make_room(self.bytes_max - bytes);
        table.admissions += 1;
        table.bytes += bytes;
        let admitted = table.admissions;
        table.copies.insert(
            inode,
            Copy {
                bytes,
                changes,
                opens: opens + 1,
                admitted,
            },
        );
        table.check(self.bytes_max);
        Some(Admission {
            is_current,
            dropped,
        })
    }

    /// An open that was admitted is over.
    pub(crate) fn close(&self, inode: InodeId) {
        if let Some(copy) = self.table.lock().copies.get_mut(&inode) {
            copy.opens = copy.opens.saturating_sub(1);
        }
    }

    /// The file is not held any more: unless it is open, it does not count. Whether the kernel may have pages of it that
    /// are of no more use.
    pub(crate) fn forget(&self, inode: InodeId) -> bool {
        let mut table = self.table.lock();
        if table.copies.get(&inode).is_none_or(|copy| copy.opens > 0) {
            return false;
        }
        table.remove(inode);
        table.check(self.bytes_max);
        true
    }

    /// Has the kernel drop the pages of files.
    pub(crate) fn drop_pages(&self, inodes: &[InodeId]) {
        let Some(observer) = self.observer.get() else {
            return;
        };
        for inode in inodes {
            observer(*inode);
        }
    }
}

impl Table {
    fn remove(&mut self, inode: InodeId) -> Option<Copy> {
        let copy = self.copies.remove(&inode)?;
        self.bytes -= copy.bytes;
        Some(copy)
    }

    /// Removes what is not open, the oldest first, until no more than `bytes` are left.
    fn make_room(&mut self, bytes: u64) -> Vec<InodeId> {
        let mut removed = Vec::new();
        while self.bytes > bytes {
            let closed = self.copies.iter().filter(|(_, copy)| copy.opens == 0);
            let Some(oldest) = closed.min_by_key(|(_, copy)| copy.admitted) else {
                break;
            };
            let inode = *oldest.0;
            self.remove(inode);
            removed.push(inode);
        }
        removed
    }

    fn check(&self, bytes_max: u64) {
        debug_assert!(self.bytes <= bytes_max, "more copies than the bound");
        debug_assert_eq!(
            self.bytes,
            self.copies.values().map(|copy| copy.bytes).sum::<u64>(),
            "the sum of all copies"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: InodeId = InodeId(11);
    const TWO: InodeId = InodeId(12);
    const THREE: InodeId = InodeId(13);

    #[test]
    fn a_copy_is_kept_from_one_open_to_the_next_unless_the_file_changed() {
        let copies = KernelCopies::new(100);
        assert!(!copies.admit(ONE, 40, 7).unwrap().is_current);
        copies.close(ONE);
        assert_eq!(copies.size_of(ONE, 7), Some(40));
        assert_eq!(copies.size_of(ONE, 8), None);
        assert!(copies.admit(ONE, 40, 7).unwrap().is_current);
        copies.close(ONE);
        assert!(!copies.admit(ONE, 50, 8).unwrap().is_current);
        assert_eq!(copies.bytes(), (50, 100));
    }

    #[test]
    fn the_copy_that_was_admitted_first_makes_room_and_open_ones_stay() {
        let copies = KernelCopies::new(100);
        for inode in [ONE, TWO] {
            copies.admit(inode, 40, 1).unwrap();
        }
        assert!(copies.admit(THREE, 40, 1).is_none(), "both are open");
        copies.close(ONE);
        copies.close(TWO);
        assert_eq!(copies.admit(THREE, 40, 1).unwrap().dropped, [ONE]);
        assert_eq!(copies.bytes().0, 80);
        assert!(copies.admit(ONE, 101, 1).is_none(), "more than the bound");
    }

    #[test]
    fn a_file_that_is_drained_counts_no_more() {
        let copies = KernelCopies::new(100);
        copies.admit(ONE, 40, 1).unwrap();
        assert!(!copies.forget(ONE), "it is open");
        assert_eq!(copies.bytes().0, 40);
        copies.close(ONE);
        assert!(copies.forget(ONE));
        assert_eq!(copies.bytes().0, 0);
        assert!(!copies.forget(ONE), "there is nothing any more");
    }

    #[test]
    fn the_observer_gets_each_file_whose_pages_go() {
        let copies = KernelCopies::new(1);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        copies.set_observer(Arc::new(move |inode| sink.lock().push(inode)));
        copies.drop_pages(&[ONE, TWO]);
        assert_eq!(*seen.lock(), [ONE, TWO]);
    }
}
