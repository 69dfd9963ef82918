//! Reclaiming: makes space in the arena, and calls waiting writers back.
//!
//! Cached bytes are evicted first, then unused slabs are freed, then the file with the most pending bytes is drained.
//! If nothing can be drained, waiting writers get an error.

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

impl<B: Backing> Room<B> {
    /// Leases a slab for the next bytes of a handle. The first slabs of a file are small, so that many small files fit;
    /// a large file gets whole chunks. If the arena has no space, begins to reclaim space and returns `None`.
    ///
    /// The handle's lease is not locked during the eviction of files: a drop of the last reference to a file closes its
    /// descriptor, and the close may wait for a server.
    pub(crate) fn lease_for(
        &self,
        handle: &Handle<B>,
        slot: &mut LeaseSlot<'_>,
        len: u64,
    ) -> Option<Lease> {
        let expected = handle.written_bytes.load(Ordering::Relaxed) + len;
        let class = self.base.class_for(expected);
        if class == Class::Small {
            let parked = self.space.parked.take_near(&self.base.arena);
            if parked.is_some() {
                return parked;
            }
        }
        let lease = self.base.arena.lease_slab(class).or_else(|| {
            slot.unlocked(|| self.evict_for(class));
            self.base.arena.lease_slab(class)
        });
        if lease.is_none() {
            slot.unlocked(|| self.reclaim());
        }
        lease
    }

    /// Calls `waiter` with `Ok` when there may be space in the arena, so that the write can be tried again. If nothing
    /// can be drained, calls `waiter` with the error that the write must return.
    ///
    /// This function does not call `waiter` itself: a later [`Drainer::pick`](crate::Drainer::pick) does.
    pub fn on_space(&self, waiter: Done) {
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
        self.on_space(Box::new(move |result| {
            let _ = sender.send(result);
        }));
        receiver.recv().unwrap_or(Err(Errno::IO))
    }

    /// Calls waiting writers back if space was freed. Called with no lock held.
    pub(crate) fn wake_writers(&self) {
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
            // If the reclaim has freed unused slabs itself, the writers are called in the next round.
            if !self.space.waiters.has_freed() {
                return;
            }
        }
    }

    /// Fails all waiting writers, unless a move to the spill file will make space.
    pub(crate) fn fail_waiting_writers(&self, errno: Errno) {
        if self.spill_makes_room() {
            return;
        }
        // Checked after the spill file, because the last move may have ended since the caller found no space.
        if self.space.schedule_wake_if_room(&self.base.arena) {
            return self.drain.wake_all();
        }
        let waiters = self.space.waiters.take_all();
        if !waiters.is_empty() {
            self.base.counters.drain_decisions.count(Decision::GivenUp);
            tracing::debug!(%errno, writers = waiters.len(), "drain: given up; writes that wait for room fail");
        }
        for waiter in waiters {
            waiter(Err(errno));
        }
    }

    /// Frees unused slabs, and requests a drain of the file with the most pending bytes. Does nothing while a drain is
    /// under way, because it will make space. If no file can be drained, waiting writers get the error of the last
    /// failure.
    pub(crate) fn reclaim(&self) {
        if self.drain.is_busy() {
            return;
        }
        self.intake.revoke_all_grants();
        if self.base.options.drain == DrainPolicy::Demand {
            return self.reclaim_on_demand();
        }
        let files = self.open_files.files.all();
        let now = Instant::now();
        let mut largest: Option<(u64, Arc<File<B>>)> = None;
        let mut errno = None;
        for file in files {
            let state = file.lock();
            if state.pending.is_empty() {
                continue;
            }
            match state.drain.failure() {
                // A file that waits for its retry is not drained now, but its error is reported.
                Some(failure) if failure.retry_at > now => errno = Some(failure.errno),
                _ if largest
                    .as_ref()
                    .is_none_or(|(most, _)| state.pending.bytes() > *most) =>
                {
                    let pending = state.pending.bytes();
                    drop(state);
                    largest = Some((pending, file));
                }
                _ => {}
            }
        }
        self.seal_leases_of(largest.as_ref().map(|(_, file)| file));
        if let Some((_, file)) = largest {
            let mut state = file.lock();
            self.drain.force(&file, &mut state);
        } else if !self.space.waiters.has_freed()
            && !self.space.schedule_wake_if_room(&self.base.arena)
        {
            // No file can be drained now: each file with held data waits for its retry.
            self.fail_waiting_writers(errno.unwrap_or(Errno::NOSPC));
        }
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
        if !self.space.waiters.has_freed() && !self.space.schedule_wake_if_room(&self.base.arena) {
            self.fail_waiting_writers(Errno::NOSPC);
        }
    }
}
