//! Space in the arena (the shared memory for written data): writers that wait for it, and what can be freed for them.
//!
//! Terms: a *lease* is the right to fill one slab (a part of the arena). *Cached* bytes are in the arena and in the
//! backing, so they can be evicted.
//!
//! Promises
//! * A waiting writer is called back when there may be space, or with an error when no space can be made.
//! * No callback is called with a lock held.

mod reclaim;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use firn_arena::{Arena, Lease};
use firn_backing::Backing;
use firn_backing::lock::{Mutex, MutexGuard};
use firn_format::slab::Class;

use crate::Done;
use crate::base::Base;
use crate::drain::Drain;
use crate::file::File;
use crate::intake::Intake;
use crate::kernel_cache::KernelCache;
use crate::open_files::OpenFiles;
use crate::settle::Settle;
use crate::spill::Spill;
use crate::tree::NameTree;

/// Waiting writers, and the memory that can be freed for them. Each part has its own lock, and no two of these locks
/// are held together.
pub(crate) struct Space<B: Backing> {
    /// Writers that wait for space.
    pub waiters: SpaceWaiters,
    /// Leases of closed handles, which the next writers of small files use.
    pub parked: ParkedLeases,
    /// Files with cached bytes, in the order in which they were drained.
    pub evictable: UniqueQueue<File<B>>,
}

impl<B: Backing> Default for Space<B> {
    fn default() -> Self {
        Self {
            waiters: SpaceWaiters::default(),
            parked: ParkedLeases::default(),
            evictable: UniqueQueue::default(),
        }
    }
}

impl<B: Backing> Space<B> {
    /// Returns whether a writer would find space. If so, waiting writers are called back soon.
    pub(crate) fn schedule_wake_if_room(&self, arena: &Arena) -> bool {
        let has_room = arena.has_room(Class::Small);
        if has_room {
            self.waiters.record_freed_space();
        }
        has_room
    }
}

/// Makes space in the arena: reclaims, evicts and spills.
pub struct Room<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// What the kernel caches.
    pub(crate) kernel_cache: Arc<KernelCache<B>>,
    /// Waiting writers, and memory that can be freed for them.
    pub(crate) space: Space<B>,
    /// State of the moves to the spill file on a local disk.
    pub(crate) spill: Spill,
    /// Large closed files that are copied into memory files.
    pub(crate) settle: Settle<B>,
}

impl<B: Backing> Room<B> {
    pub(crate) fn new(kernel_cache: &Arc<KernelCache<B>>) -> Self {
        Self {
            base: Arc::clone(&kernel_cache.base),
            tree: Arc::clone(&kernel_cache.tree),
            drain: Arc::clone(&kernel_cache.intake.drain),
            intake: Arc::clone(&kernel_cache.intake),
            open_files: Arc::clone(&kernel_cache.open_files),
            kernel_cache: Arc::clone(kernel_cache),
            space: Space::default(),
            spill: Spill::default(),
            settle: Settle::default(),
        }
    }
}

/// The locked lease of a handle.
pub(crate) type LeaseSlot<'a> = MutexGuard<'a, Option<Lease>>;

/// Writers that wait for space, and whether space was freed since they were last called back.
#[derive(Default)]
pub(crate) struct SpaceWaiters {
    /// Callbacks of the waiting writers.
    callbacks: Mutex<Vec<Done>>,
    /// Number of the callbacks, for reads without their lock. While a callback is being added or taken, this number may
    /// be larger than that of `callbacks`.
    waiting: AtomicU64,
    /// Whether space was freed since the last call of [`SpaceWaiters::take_freed`].
    freed: Arc<AtomicBool>,
}

impl SpaceWaiters {
    /// Adds a writer that waits. `callback` is called once.
    pub(crate) fn add(&self, callback: Done) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.callbacks.lock().push(callback);
    }

    /// Takes all callbacks. The caller calls each, with no lock held.
    pub(crate) fn take_all(&self) -> Vec<Done> {
        let callbacks = std::mem::take(&mut *self.callbacks.lock());
        self.waiting
            .fetch_sub(callbacks.len() as u64, Ordering::Relaxed);
        callbacks
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.callbacks.lock().is_empty()
    }

    /// Returns the number of waiting writers.
    pub(crate) fn count(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Records that space was freed.
    pub(crate) fn record_freed_space(&self) {
        self.freed.store(true, Ordering::Release);
    }

    /// Returns the callback with which the arena reports that space was freed. It takes no lock.
    pub(crate) fn freed_callback(&self) -> impl Fn() + Send + Sync + 'static {
        let freed = Arc::clone(&self.freed);
        move || freed.store(true, Ordering::Release)
    }

    pub(crate) fn has_freed(&self) -> bool {
        self.freed.load(Ordering::Acquire)
    }

    /// Returns whether space was freed since the last call.
    pub(crate) fn take_freed(&self) -> bool {
        self.freed.swap(false, Ordering::AcqRel)
    }
}

/// Leases of closed handles whose slabs have space for more small files.
#[derive(Default)]
pub(crate) struct ParkedLeases {
    leases: Mutex<Vec<Lease>>,
}

impl ParkedLeases {
    /// Maximum number of parked leases. With more of them, too many chunks could not be freed.
    const MAX: usize = 8;
    /// Minimum number of free bytes of a lease that is parked.
    const FREE_BYTES_MIN: u32 = 4096;

    /// Parks a lease of a small slab with enough free bytes for the next small file. Seals any other lease.
    pub(crate) fn park(&self, arena: &Arena, lease: Lease) {
        let mut leases = self.leases.lock();
        let is_useful = lease.class() == Class::Small && lease.free_bytes() >= Self::FREE_BYTES_MIN;
        if is_useful && leases.len() < Self::MAX {
            leases.push(lease);
            return;
        }
        drop(leases);
        arena.seal_slab(lease);
    }

    /// Takes a parked lease whose memory is near the caller's CPU. Returns `None` if there is no such lease.
    pub(crate) fn take_near(&self, arena: &Arena) -> Option<Lease> {
        let mut leases = self.leases.lock();
        let index = leases.iter().rposition(|lease| arena.is_near(lease))?;
        Some(leases.swap_remove(index))
    }

    /// Seals all parked leases, so that their slabs can be freed or moved.
    pub(crate) fn seal_all(&self, arena: &Arena) {
        let leases = std::mem::take(&mut *self.leases.lock());
        for lease in leases {
            arena.seal_slab(lease);
        }
    }
}

/// A queue of files, first in, first out. Each file is in the queue at most once.
pub(crate) struct UniqueQueue<T> {
    files: Mutex<VecDeque<Weak<T>>>,
}

impl<T> Default for UniqueQueue<T> {
    fn default() -> Self {
        Self {
            files: Mutex::new(VecDeque::new()),
        }
    }
}

impl<T> UniqueQueue<T> {
    /// Adds a file at the end of the queue, unless it is in the queue already.
    pub(crate) fn add(&self, file: &Arc<T>) {
        let mut files = self.files.lock();
        let is_same_file = |known: &Weak<T>| std::ptr::eq(known.as_ptr(), Arc::as_ptr(file));
        if !files.iter().any(is_same_file) {
            files.push_back(Arc::downgrade(file));
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.files.lock().len()
    }

    /// Takes the first file that still exists. Returns `None` if the queue has no such file.
    pub(crate) fn pop(&self) -> Option<Arc<T>> {
        let mut files = self.files.lock();
        while let Some(weak_file) = files.pop_front() {
            if let Some(file) = weak_file.upgrade() {
                return Some(file);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiters_are_counted_until_they_are_taken() {
        let waiters = SpaceWaiters::default();
        assert!(waiters.is_empty());
        waiters.add(Box::new(|_| {}));
        waiters.add(Box::new(|_| {}));
        assert_eq!(waiters.count(), 2);
        assert_eq!(waiters.take_all().len(), 2);
        assert_eq!(waiters.count(), 0);
        assert!(waiters.is_empty());
    }

    #[test]
    fn room_that_became_free_is_told_once() {
        let waiters = SpaceWaiters::default();
        assert!(!waiters.take_freed());
        waiters.freed_callback()();
        assert!(waiters.has_freed());
        assert!(waiters.take_freed());
        assert!(!waiters.take_freed());
    }

    #[test]
    fn files_are_evicted_in_the_order_in_which_they_were_added_each_once() {
        let queue = UniqueQueue::default();
        let one = Arc::new(1);
        let two = Arc::new(2);
        queue.add(&one);
        queue.add(&Arc::new(0));
        queue.add(&two);
        queue.add(&one);
        assert_eq!(queue.pop(), Some(one));
        assert_eq!(queue.pop(), Some(two));
        assert_eq!(queue.pop(), None);
    }
}
