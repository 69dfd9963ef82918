//! Reclaiming: makes space in the arena (the shared memory for written data), and calls waiting writers back.
//!
//! Cached bytes (which are in the backing too) are evicted first, then unused slabs (parts of the arena) are freed,
//! then the file with the most pending bytes is drained to the backing. If nothing can be drained, waiting writers get
//! an error.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::Lease;
use firn_backing::{Backing, Errno};
use firn_format::slab::Class;

use crate::counters::Decision;
use crate::file::File;
use crate::options::DrainPolicy;
use crate::space::{LeaseSlot, Room};
use crate::tables::Handle;
use crate::{Done, Result};

/// Result of [`Room::choose_file_to_drain`].
struct DrainChoice<B: Backing> {
    /// The file with the most pending bytes; `None` if no file can be drained now.
    largest: Option<Arc<File<B>>>,
    /// Error of a file that waits for its retry.
    last_error: Option<Errno>,
}

impl<B: Backing> Room<B> {
    /// Leases a slab (a part of the arena that one writer fills) for the next `len` bytes of a handle. If the arena has
    /// no space, begins to make space and returns `None`. The lock of `lease_slot` is released meanwhile.
    ///
    /// The first slabs of a file are small, so that many small files fit. A large file gets whole chunks.
    pub(crate) fn lease_for(
        &self,
        handle: &Handle<B>,
        lease_slot: &mut LeaseSlot<'_>,
        len: u64,
    ) -> Option<Lease> {
        let expected_bytes = handle.written_bytes.load(Ordering::Relaxed) + len;
        let class = self.base.class_for(expected_bytes);
        // The slab of a closed handle may have space for another small file.
        if class == Class::Small
            && let Some(parked_lease) = self.space.parked.take_near(&self.base.arena)
        {
            return Some(parked_lease);
        }
        let lease = self.base.arena.lease_slab(class).or_else(|| {
            // An eviction may close a file of the backing, which may wait for a server. So the lock is released.
            lease_slot.unlocked(|| self.evict_for(class));
            self.base.arena.lease_slab(class)
        });
        if lease.is_none() {
            lease_slot.unlocked(|| self.reclaim());
        }
        lease
    }

    /// Calls `waiter` with `Ok` when there may be space in the arena, so that the write can be tried again. If nothing
    /// can be drained, calls `waiter` with the error that the write must return.
    ///
    /// This function does not call `waiter` itself: a later [`Drainer::pick`](crate::Drainer::pick) does.
    pub fn call_when_space_is_free(&self, waiter: Done) {
        self.space.waiters.add(waiter);
        self.reclaim();
        // Space may have been freed after the caller's write failed and before this waiter was added.
        self.space.schedule_wake_if_room(&self.base.arena);
        self.drain.wake_all();
    }

    /// Blocks until there may be space in the arena. Fails with the error for the write if nothing can be drained. The
    /// caller must hold no lock, and no drain may depend on its thread.
    pub fn wait_for_room(&self) -> Result<()> {
        let (sender, receiver) = std::sync::mpsc::channel();
        self.call_when_space_is_free(Box::new(move |result| {
            let _ = sender.send(result);
        }));
        receiver.recv().unwrap_or(Err(Errno::IO))
    }

    /// If space in the arena was freed, calls back the writers that wait for it. Otherwise begins to make space for
    /// them. Called with no lock held.
    pub(crate) fn wake_writers(&self) {
        // There is a further round only if space was freed during the reclaim.
        loop {
            if self.space.waiters.take_freed() {
                for waiter in self.space.waiters.take_all() {
                    waiter(Ok(()));
                }
                return;
            }
            if self.space.waiters.is_empty() {
                return;
            }
            self.reclaim();
            if !self.space.waiters.has_freed() {
                return;
            }
        }
    }

    /// Fails all writers that wait for space in the arena with `errno`, unless there is space now or a move to the
    /// spill file will make space.
    pub(crate) fn fail_waiting_writers(&self, errno: Errno) {
        if self.spill_makes_room() {
            return;
        }
        // Checked after the spill file, because the last move may have ended since the caller found no space.
        if self.space.schedule_wake_if_room(&self.base.arena) {
            // A drain thread calls the writers back.
            return self.drain.wake_all();
        }
        let waiters = self.space.waiters.take_all();
        if !waiters.is_empty() {
            self.base
                .counters
                .drain_decisions
                .count(Decision::WritersFailed);
            tracing::debug!(%errno, writers = waiters.len(), "drain: given up; writes that wait for room fail");
        }
        for waiter in waiters {
            waiter(Err(errno));
        }
    }

    /// Begins to make space in the arena: frees unused slabs (parts of the arena), and requests a drain of the file
    /// with the most pending bytes. If no file can be drained and there is no space, waiting writers get the error of
    /// the last failed drain. While a drain is under way, does nothing, because that drain makes space.
    pub(crate) fn reclaim(&self) {
        if self.drain.is_busy() {
            return;
        }
        // Client processes with a grant (the right to write a file directly) have slabs with free space.
        self.intake.revoke_all_grants();
        if self.base.options.drain == DrainPolicy::Demand {
            return self.reclaim_on_demand();
        }
        let DrainChoice {
            largest,
            last_error,
        } = self.choose_file_to_drain();
        // A slab that a writer may still fill is not freed by a drain of its bytes.
        self.seal_leases_of(largest.as_ref());
        let Some(file) = largest else {
            // No file can be drained: each file with pending bytes waits for its retry.
            if !self.has_room_for_waiters() {
                self.fail_waiting_writers(last_error.unwrap_or(Errno::NOSPC));
            }
            return;
        };
        let mut state = file.lock();
        self.drain.force(&file, &mut state);
    }

    /// Returns whether space was freed or there is space now. In both cases, waiting writers are called back soon.
    fn has_room_for_waiters(&self) -> bool {
        self.space.waiters.has_freed() || self.space.schedule_wake_if_room(&self.base.arena)
    }

    /// Chooses the file with the most pending bytes (not in the backing yet), of those that can be drained now.
    fn choose_file_to_drain(&self) -> DrainChoice<B> {
        let files = self.open_files.files.all();
        let now = Instant::now();
        let mut largest_bytes = 0;
        let mut choice = DrainChoice {
            largest: None,
            last_error: None,
        };
        for file in files {
            let state = file.lock();
            let pending_bytes = state.pending.bytes();
            let failure = state.drain.failure();
            drop(state);
            if pending_bytes == 0 {
                continue;
            }
            if let Some(failure) = failure
                && failure.retry_at > now
            {
                // A file that waits for its retry is not drained now, but its error is reported.
                choice.last_error = Some(failure.errno);
            } else if pending_bytes > largest_bytes {
                largest_bytes = pending_bytes;
                choice.largest = Some(file);
            }
        }
        choice
    }

    /// Seals the leases of `file`, and all leases that no thread is using, so that their slabs can be freed.
    fn seal_leases_of(&self, file: Option<&Arc<File<B>>>) {
        self.space.parked.seal_all(&self.base.arena);
        self.open_files
            .handles
            .seal_leases(&self.base.arena, |handle, lease| {
                self.base.arena.is_idle(lease)
                    || file.is_some_and(|file| Arc::ptr_eq(file, &handle.file))
            });
    }

    /// Makes space with the policy *demand*, in which no drain begins without a request: evicts cached bytes. Pending
    /// bytes remain, so if that is not enough, waiting writers get ENOSPC.
    fn reclaim_on_demand(&self) {
        self.seal_leases_of(None);
        self.evict_for(Class::Small);
        if !self.has_room_for_waiters() {
            self.fail_waiting_writers(Errno::NOSPC);
        }
    }
}
