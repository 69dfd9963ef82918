//! Moving chunks to the spill file, and what becomes of files whose bytes it does not give back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_arena::Spilled;
use firn_backing::{Backing, Errno};
use firn_protocol::path::BytePath;
use thin_vec::ThinVec;

use super::{SpillStep, Waker};
use crate::counters::Decision;
use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::{File, FileState, Waiter};

impl<B: Backing> Engine<B> {
    /// Calls `f` when [`Engine::spill_step`] may have something to do.
    pub fn set_spill_waker(&self, f: Waker) {
        let wake = f.clone();
        self.arena
            .on_pressure(self.slots_at(self.options.spill_upper_percent), move || {
                wake()
            });
        self.spill.set_waker(f);
    }

    /// Slots of memory that may stay in use. Not all of them, even at 100 percent: writers who find none wait
    /// for one.
    fn slots_at(&self, percent: u32) -> u32 {
        let count = self.arena.geometry().chunk_count;
        let slots = (u64::from(count) * u64::from(percent) / 100) as u32;
        slots.min(count - 1)
    }

    /// Moves a chunk to the spill file if memory is short.
    pub fn spill_step(&self) -> SpillStep {
        if self.arena.spill_figures().is_none() {
            return SpillStep::IDLE;
        }
        let upper = self.slots_at(self.options.spill_upper_percent);
        let lower = self.slots_at(self.options.spill_lower_percent);
        let used = self.arena.memory_used();
        if let Err(instead) = self.spill.begin_step(used, upper, lower) {
            return instead;
        }
        // What is in the backing already is dropped rather than carried about.
        if self.evict_until(&|| self.arena.memory_used() <= lower) {
            self.wake_writers();
            return SpillStep::More;
        }
        match self
            .arena
            .spill_oldest(&|chunk| self.invalidate_lists_of_chunk(chunk))
        {
            Ok(spilled @ (Spilled::Chunk(_) | Spilled::Again)) => {
                if let Spilled::Chunk(chunk) = spilled {
                    self.counters.drain_decisions.count(Decision::Spilled);
                    tracing::debug!(chunk, "drain: spilled");
                }
                self.spill.note_success();
                self.wake_writers();
                SpillStep::More
            }
            Ok(Spilled::Nothing) => {
                if used == self.arena.geometry().chunk_count && self.seal_for_spill() {
                    return SpillStep::More;
                }
                self.wake_writers();
                SpillStep::IDLE
            }
            Err(errno) => {
                let retry = self.spill_failed(errno);
                // Who waits must not wait for a device that fails.
                self.wake_writers();
                SpillStep::Idle { retry: Some(retry) }
            }
        }
    }

    /// Processes that read by direct access must ask again where these bytes are.
    fn invalidate_lists_of_chunk(&self, chunk: u32) {
        if !self.grants.has_lists() {
            return;
        }
        let files = self.files.all();
        for file in files {
            let mut state = file.lock();
            let mut extents = state
                .pending
                .extents()
                .iter()
                .chain(state.cache.extents().iter());
            if state.direct.is_listed()
                && extents.any(|(_, extent)| extent.piece.slab.chunk == chunk)
            {
                drop(extents);
                state.direct.invalidate_list(&self.arena);
            }
        }
    }

    fn spill_failed(&self, errno: Errno) -> Duration {
        let spill_path = &self.arena.superblock().spill_path;
        let path: BytePath = spill_path.as_slice().into();
        let (count, wait) = self.spill.note_failure();
        tracing::warn!(%path, %errno, count, "spilling failed; the data stays in memory");
        self.errors.record(
            spill_path.clone(),
            errno,
            format!("write to the spill file failed: {errno}; the data is kept in memory"),
        );
        wait
    }

    /// A file of which nothing can be drained but what the spill file does not give: who waits for it is to be
    /// told, with no lock held.
    pub(crate) fn fail_unreadable_file(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
    ) -> ThinVec<Waiter> {
        let wanted = |extent: &Extent| state.drain.is_forced(extent.sequence);
        let gone = |extent: &Extent| !self.arena.is_readable(extent.piece.slab.chunk);
        if state.drain.is_exclusive() || state.drain.writes_in_flight() > 0 {
            return ThinVec::new();
        }
        if !state
            .pending
            .extents()
            .iter()
            .any(|(_, extent)| wanted(&extent) && gone(&extent))
        {
            return ThinVec::new();
        }
        self.counters.drain_errors.fetch_add(1, Ordering::Relaxed);
        self.schedule_retry(file, state, Errno::IO, true);
        let told = state.drain.take_failed();
        self.drain.count_answered(told.len());
        told
    }

    /// Whether memory will become free by spilling, so that writers wait for that. Wakes who spills.
    pub(crate) fn spill_makes_room(&self) -> bool {
        let room = !self.spill.fails() && (self.arena.can_spill() || self.seal_for_spill());
        if room {
            self.spill.wake();
        }
        room
    }

    /// Seals slabs in use by nobody at this instant, so that their chunks can move; whether some can.
    fn seal_for_spill(&self) -> bool {
        if self
            .arena
            .spill_figures()
            .is_none_or(|figures| figures.used_bytes == figures.bytes)
        {
            return false;
        }
        self.space.parked.seal_all(&self.arena);
        self.handles.seal_leases(&self.arena, |_, _| true);
        self.arena.can_spill()
    }
}
