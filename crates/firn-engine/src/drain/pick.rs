//! The choice of the next write of a lane.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno, LaneIndex};

use super::job::{Job, Part};
use crate::counters::Decision;
use crate::engine::Engine;
use crate::file::{File, FileState};
use crate::options::DrainPolicy;

/// Most parts of one vectored write (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;

/// What an IO thread shall do.
pub enum Pick<B: Backing> {
    /// This I/O.
    Job(Job<B>),
    /// Nothing now; look again after `retry`, or when woken.
    Idle {
        /// Time to the next retry or age limit.
        retry: Option<Duration>,
    },
}

/// What whoever drains a lane allows the next write to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLimits {
    /// Writes of one file that are under way at most: fewer than there are threads for them, so that a file whose
    /// writes hang leaves the others one.
    pub file_writes_max: usize,
    /// Other files are written though the one that a lane in sequential order is at is not: its writes hang.
    pub leaves_hung_file: bool,
}

impl LaneLimits {
    /// Whatever there is.
    pub const NONE: Self = Self {
        file_writes_max: usize::MAX,
        leaves_hung_file: false,
    };
}

impl<B: Backing> Engine<B> {
    /// The next write of a lane, if there is one. Whoever gets a job must complete it.
    ///
    /// A range that was picked blocks a truncation of its file until it is completed. So whatever has to be waited for
    /// before a lane may be written to, such as the token that gives it one writer among several hosts, is asked for
    /// *before* this call, and never between it and [`Job::execute`].
    pub fn pick(&self, lane: LaneIndex, limits: LaneLimits) -> Pick<B> {
        let queue = self.drain.queue(lane);
        loop {
            // Each time round: while a file was looked at that has nothing to drain, somebody may have begun to
            // wait for room, and have left it to this thread.
            self.wake_writers();
            let Some(file) = self.next_file(lane, limits.leaves_hung_file) else {
                let next = queue.next_due();
                return Pick::Idle {
                    retry: next.map(|at| at.saturating_duration_since(Instant::now())),
                };
            };
            let mut state = file.lock();
            assert!(
                state.drain.is_queued(),
                "a file was in line and does not know"
            );
            state.drain.set_queued(false);
            if let Some(job) = self.choose_write(&file, &mut state, limits) {
                drop(state);
                self.counters.drain_decisions.count(Decision::Picked);
                let offset = job.offset();
                let bytes = job.len();
                tracing::debug!(path = %file.shown(), offset, bytes, "drain: picked");
                return Pick::Job(job);
            }
            let failed = self.fail_unreadable_file(&file, &mut state);
            drop(state);
            for waiter in failed {
                (waiter.done)(Err(Errno::IO));
            }
            queue.finish();
        }
    }

    /// Puts the files into line whose time has come, and takes the next in line.
    fn next_file(&self, lane: LaneIndex, leaves_hung_file: bool) -> Option<Arc<File<B>>> {
        let queue = self.drain.queue(lane);
        let now = Instant::now();
        let due = queue.take_due(now);
        for file in due.retries {
            self.counters.drain_decisions.count(Decision::Retried);
            tracing::debug!(path = %file.shown(), "drain: retried");
            let mut state = file.lock();
            self.drain.enqueue(&file, &mut state);
        }
        for file in due.aged {
            self.check_age(&file, now);
        }
        queue.pop(leaves_hung_file)
    }

    /// Forces a file whose oldest pending byte is old.
    fn check_age(&self, file: &Arc<File<B>>, now: Instant) {
        let mut state = file.lock();
        state.drain.end_aging();
        self.ingest_published(file, &mut state);
        let Some(oldest) = state.drain.oldest() else {
            if state.direct.has_grant() {
                self.drain
                    .check_age_at(file, &mut state, now + self.options.drain_age);
            }
            return;
        };
        let due = oldest + self.options.drain_age;
        if due > now {
            self.drain.check_age_at(file, &mut state, due);
            return;
        }
        self.drain.force(file, &mut state);
        self.drain.set_oldest(file, &mut state, Some(now));
        self.drain
            .check_age_at(file, &mut state, now + self.options.drain_age);
    }

    /// A write of this file: its slabs are pinned, and its range is in flight.
    fn choose_write(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        limits: LaneLimits,
    ) -> Option<Job<B>> {
        self.freeze_published(file, state);
        if state.drain.is_exclusive()
            || state.pending.is_empty()
            || state.drain.writes_in_flight() >= limits.file_writes_max
        {
            return None;
        }
        let parts = self.next_run(state)?;
        let range = parts[0].offset..parts.last().map_or(0, |p| p.offset + p.extent.len);
        let places = parts
            .iter()
            .map(|p| {
                self.arena.pin_slab(p.extent.piece.slab);
                let len = p.extent.len as usize;
                (
                    self.arena
                        .place(p.extent.piece.slab, p.extent.position, len as u32),
                    len,
                )
            })
            .collect();
        state.drain.begin_write(range.clone());
        debug_assert!(state.drain.writes_in_flight() <= limits.file_writes_max);
        let queue = self.drain.queue_of(file);
        queue.note_picked(file, range.end - range.start, state.pending.bytes());
        // Its sequence is about to be used to cut: later bytes need a later one.
        state.pending.end_tail();
        self.drain.enqueue(file, state);
        Some(Job {
            file: Arc::clone(file),
            parts,
            places,
            range,
        })
    }

    /// The next run of contiguous extents that is worth a write, from the cursor on and round.
    fn next_run(&self, state: &FileState<B>) -> Option<Vec<Part>> {
        self.next_run_from(state, state.drain.cursor())
            .or_else(|| self.next_run_from(state, 0))
    }

    fn next_run_from(&self, state: &FileState<B>, start: u64) -> Option<Vec<Part>> {
        let max = self.options.drain_write_bytes_max;
        let mut run: Vec<Part> = Vec::new();
        let mut bytes = 0;
        let mut forced = false;
        for (offset, extent) in state.pending.extents().from(start) {
            let range = offset..offset + extent.len;
            let joins = run.last().is_none_or(|p| p.offset + p.extent.len == offset);
            let fits = run.len() < PARTS_MAX && bytes + extent.len <= max;
            let busy = state.drain.is_in_flight(&range)
                || !self.arena.is_readable(extent.piece.slab.chunk);
            if !run.is_empty() && (!joins || !fits || busy) {
                if forced || self.is_worth_a_write(bytes) {
                    return Some(run);
                }
                run.clear();
                (bytes, forced) = (0, false);
            }
            if busy {
                continue;
            }
            bytes += extent.len;
            forced |= state.drain.is_forced(extent.sequence);
            run.push(Part { extent, offset });
        }
        (!run.is_empty() && (forced || self.is_worth_a_write(bytes))).then_some(run)
    }

    /// Whether a run of so many bytes goes to the backing though nobody asked for it.
    fn is_worth_a_write(&self, bytes: u64) -> bool {
        self.options.drain == DrainPolicy::Eager && bytes >= self.write_bytes_min()
    }
}
