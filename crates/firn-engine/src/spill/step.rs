//! One step of spilling: moves a chunk (a fixed part of the arena) to the spill file on a local disk, or evicts cached
//! bytes instead.

use std::time::Duration;

use firn_arena::SpillOutcome;
use firn_backing::{Backing, Errno};
use firn_protocol::path::BytePath;

use super::{SpillStep, Waker};
use crate::counters::Decision;
use crate::extents::Extent;
use crate::space::Room;

impl<B: Backing> Room<B> {
    /// Sets the callback that runs when [`Room::spill_step`] may have work.
    pub fn set_spill_waker(&self, waker: Waker) {
        let wake = waker.clone();
        self.base.arena.on_pressure(
            self.slots_at(self.base.options.spill_upper_percent),
            move || wake(),
        );
        self.spill.set_waker(waker);
    }

    /// Returns how many slots of memory may be in use at a threshold of `percent`. One slot always remains free, even
    /// at 100 percent, because writers wait for a slot.
    fn slots_at(&self, percent: u32) -> u32 {
        let count = self.base.arena.geometry().chunk_count;
        let slots = (u64::from(count) * u64::from(percent) / 100) as u32;
        slots.min(count - 1)
    }

    /// Moves a chunk (a unit of the arena's memory) to the spill file on a local disk if memory is short. If no chunk
    /// can move now, the result says when to call again.
    pub fn spill_step(&self) -> SpillStep {
        // The mount has no spill file.
        if self.base.arena.spill_figures().is_none() {
            return SpillStep::IDLE;
        }
        let upper = self.slots_at(self.base.options.spill_upper_percent);
        let lower = self.slots_at(self.base.options.spill_lower_percent);
        let used = self.base.arena.memory_used();
        if let Some(step) = self.spill.step_without_move(used, upper, lower) {
            return step;
        }
        // Cached bytes are also in the backing, so they are evicted instead of moved.
        if self.evict_until(&|| self.base.arena.memory_used() <= lower) {
            self.wake_writers();
            return SpillStep::More;
        }
        let invalidate_lists = |chunk| self.invalidate_lists_of_chunk(chunk);
        let step = match self.base.arena.spill_oldest(&invalidate_lists) {
            Ok(SpillOutcome::Chunk(chunk)) => {
                self.base.counters.drain_decisions.count(Decision::Spilled);
                tracing::debug!(chunk, "drain: spilled");
                self.spill.record_success();
                SpillStep::More
            }
            // No chunk moved, but another one can be tried.
            Ok(SpillOutcome::Again) => {
                self.spill.record_success();
                SpillStep::More
            }
            Ok(SpillOutcome::Nothing) => {
                let is_memory_full = used == self.base.arena.geometry().chunk_count;
                // A chunk cannot move while a writer may still fill it. The seal of its leases lets it move.
                if is_memory_full && self.seal_for_spill() {
                    // The next step moves such a chunk. No memory is free yet, so no writer is woken.
                    return SpillStep::More;
                }
                SpillStep::IDLE
            }
            Err(errno) => SpillStep::Idle {
                retry: Some(self.record_spill_failure(errno)),
            },
        };
        // Waiting writers are woken after a failure too, because they must not wait for a disk that fails.
        self.wake_writers();
        step
    }

    /// Makes lists of places that refer to this chunk (a unit of the arena) invalid, so that the client processes that
    /// read there request new lists.
    fn invalidate_lists_of_chunk(&self, chunk: u32) {
        if !self.intake.grants.has_lists() {
            return;
        }
        for file in self.open_files.files.all() {
            let mut state = file.lock();
            if !state.direct.has_lists() {
                continue;
            }
            let is_in_chunk = |(_, extent): (u64, Extent)| extent.piece.slab.chunk == chunk;
            let uses_chunk = state.pending.extents().iter().any(is_in_chunk)
                || state.cache.extents().iter().any(is_in_chunk);
            if uses_chunk {
                state.direct.invalidate_lists(&self.base.arena);
            }
        }
    }

    /// Records a failure of the disk, also for the status of the mount. Returns the time until the next try.
    fn record_spill_failure(&self, errno: Errno) -> Duration {
        let spill_path = &self.base.arena.superblock().spill_path;
        let path: BytePath = spill_path.as_slice().into();
        let retry = self.spill.record_failure();
        let count = retry.failure_count;
        tracing::warn!(%path, %errno, count, "cannot move data to the spill file; it stays in memory");
        self.base.errors.record(
            spill_path.clone(),
            errno,
            format!("write to the spill file failed: {errno}; the data is kept in memory"),
        );
        retry.wait
    }

    /// Returns whether spilling will free memory, so that writers can wait for that. Wakes the thread that spills.
    pub(crate) fn spill_makes_room(&self) -> bool {
        let makes_room =
            !self.spill.has_failed() && (self.base.arena.can_spill() || self.seal_for_spill());
        if makes_room {
            self.spill.wake();
        }
        makes_room
    }

    /// Seals leases that no thread uses at this moment, so that their chunks can move. Returns whether any chunk can
    /// move.
    fn seal_for_spill(&self) -> bool {
        let Some(figures) = self.base.arena.spill_figures() else {
            return false;
        };
        let is_spill_file_full = figures.used_bytes == figures.bytes;
        if is_spill_file_full {
            return false;
        }
        self.space.parked.seal_all(&self.base.arena);
        self.open_files
            .handles
            .seal_leases(&self.base.arena, |_, _| true);
        self.base.arena.can_spill()
    }
}
