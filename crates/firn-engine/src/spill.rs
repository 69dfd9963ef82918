//! Memory is short: the oldest sealed chunks go to the spill file.
//!
//! A thread of the drain calls [`Engine::spill_step`] until it is idle. Chunks move from when more than the
//! upper threshold of memory is in use until no more than the lower one is, so that the device gets work in
//! long runs. When the device fails, the chunks stay in memory, the status says so, and it is tried again
//! with growing waits; who waits for room then fares as without a spill file.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use firn_arena::Spilled;
use firn_backing::lock::{Mutex, RwLock};
use firn_backing::{Backing, Errno};
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use thin_vec::ThinVec;

use crate::counters::Decision;
use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::{File, FileState, Waiter};
use crate::retry::retry_wait;

/// What a call of [`Engine::spill_step`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpillStep {
    /// A chunk moved, or there is another to try: call again.
    More,
    /// Nothing now; look again after `retry`, or when woken.
    Idle {
        /// Time until a failed device is tried again.
        retry: Option<Duration>,
    },
}

/// Called when there may be something to spill.
pub(crate) type Waker = Arc<dyn Fn() + Send + Sync>;

/// What the engine knows of spilling.
#[derive(Default)]
pub(crate) struct Spill {
    state: Mutex<SpillState>,
    waker: RwLock<Option<Waker>>,
}

impl Spill {
    fn wake(&self) {
        if let Some(wake) = &*self.waker.read() {
            wake();
        }
    }

    /// Whether the last try to spill failed.
    pub(crate) fn fails(&self) -> bool {
        self.state.lock().failure.is_some()
    }
}

#[derive(Default)]
struct SpillState {
    /// Above the upper threshold, and not yet below the lower one.
    active: bool,
    failure: Option<SpillFailure>,
}

struct SpillFailure {
    /// How often in a row.
    count: u32,
    retry_at: Instant,
}

impl<B: Backing> Engine<B> {
    /// Calls `f` when [`Engine::spill_step`] may have something to do.
    pub fn set_spill_waker(&self, f: Waker) {
        let wake = f.clone();
        self.arena
            .on_pressure(self.slots_at(self.options.spill_upper_percent), move || {
                wake()
            });
        *self.spill.waker.write() = Some(f);
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
        const IDLE: SpillStep = SpillStep::Idle { retry: None };
        if self.arena.spill_figures().is_none() {
            return IDLE;
        }
        let lower = self.slots_at(self.options.spill_lower_percent);
        let used = self.arena.memory_used();
        {
            let mut spill = self.spill.state.lock();
            spill.active |= used > self.slots_at(self.options.spill_upper_percent);
            spill.active &= used > lower;
            if !spill.active {
                return IDLE;
            }
            if let Some(failure) = &spill.failure {
                let retry = failure.retry_at.saturating_duration_since(Instant::now());
                if !retry.is_zero() {
                    return SpillStep::Idle { retry: Some(retry) };
                }
            }
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
                self.spill.state.lock().failure = None;
                self.wake_writers();
                self.progress.signal();
                SpillStep::More
            }
            Ok(Spilled::Nothing) => {
                if used == self.arena.geometry().chunk_count && self.seal_for_spill() {
                    return SpillStep::More;
                }
                self.wake_writers();
                IDLE
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
        let path = self.spill_path();
        let mut spill = self.spill.state.lock();
        let count = spill.failure.as_ref().map_or(0, |failure| failure.count) + 1;
        let wait = retry_wait(count);
        spill.failure = Some(SpillFailure {
            count,
            retry_at: Instant::now() + wait,
        });
        drop(spill);
        tracing::warn!(%path, %errno, count, "spilling failed; the data stays in memory");
        self.errors.record(
            self.arena.superblock().spill_path.clone(),
            errno,
            format!("write to the spill file failed: {errno}; the data is kept in memory"),
        );
        wait
    }

    /// Where a file with pending bytes stands.
    pub(crate) fn level_of_pending(&self, state: &FileState<B>) -> DurabilityLevel {
        let spilled = |extent: &Extent| self.arena.is_spilled(extent.piece.slab.chunk);
        if state
            .pending
            .extents()
            .iter()
            .all(|(_, extent)| spilled(&extent))
        {
            DurabilityLevel::Spilled
        } else {
            DurabilityLevel::Held
        }
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
        self.progress.signal();
        told
    }

    pub(crate) fn spill_path(&self) -> BytePath {
        self.arena.superblock().spill_path.as_slice().into()
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
        let handles = self.handles.all();
        for handle in handles {
            if let Some(mut slot) = handle.lease.try_lock()
                && let Some(lease) = slot.take()
            {
                self.arena.seal(lease);
            }
        }
        self.arena.can_spill()
    }
}
