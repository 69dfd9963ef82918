//! The choice of the next write of a lane.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno, LaneIndex};
use thin_vec::ThinVec;

use super::job::{Job, Part};
use crate::counters::Decision;
use crate::drainer::Drainer;
use crate::extents::Extent;
use crate::file::{File, FileState, Waiter};
use crate::options::DrainPolicy;

/// Most parts of one vectored write (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;
/// Most parts of a write where the backing gathers.
const GATHERED_PARTS_MAX: usize = 16 << 10;

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

/// Limits for the next write of a lane.
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

/// What a job of a file may be.
#[derive(Clone, Copy)]
struct JobMax {
    /// Its parts may be apart.
    gathers: bool,
    parts: usize,
    bytes: u64,
    /// Of those that lie in the spill file: all of them are in memory at once.
    spilled_bytes: u64,
}

impl<B: Backing> Drainer<B> {
    /// The next write of a lane, if there is one. A caller that gets a job must complete it.
    ///
    /// A range that was picked blocks a truncation of its file until it is completed. So whatever a lane has to wait
    /// for before it is written to, such as its token, is asked for *before* this call. It is never asked for between
    /// this call and [`Job::execute`].
    pub fn pick(&self, lane: LaneIndex, limits: LaneLimits) -> Pick<B> {
        let queue = self.drain.queue(lane);
        loop {
            // Each time round: during the look at a file with nothing to drain, a writer may have begun to wait for
            // room, and have left it to this thread.
            self.room.wake_writers();
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
                self.base.counters.drain_decisions.count(Decision::Picked);
                let offset = job.span.start;
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
            self.base.counters.drain_decisions.count(Decision::Retried);
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
        self.intake.ingest_published(file, &mut state);
        let Some(oldest) = state.drain.oldest() else {
            if state.direct.has_grant() {
                self.drain
                    .check_age_at(file, &mut state, now + self.base.options.drain_age);
            }
            return;
        };
        let due = oldest + self.base.options.drain_age;
        if due > now {
            self.drain.check_age_at(file, &mut state, due);
            return;
        }
        self.drain.force(file, &mut state);
        self.drain.set_oldest(file, &mut state, Some(now));
        self.drain
            .check_age_at(file, &mut state, now + self.base.options.drain_age);
    }

    /// A write of this file: its slabs are pinned, and its range is in flight.
    fn choose_write(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        limits: LaneLimits,
    ) -> Option<Job<B>> {
        self.intake.freeze_published(file, state);
        if state.drain.is_exclusive()
            || state.pending.is_empty()
            || state.drain.writes_in_flight() >= limits.file_writes_max
        {
            return None;
        }
        let parts = self.next_parts(file, state)?;
        let span = parts[0].offset..parts.last().map_or(0, Part::end);
        let bytes = parts.iter().map(|part| part.extent.len).sum();
        let places = parts
            .iter()
            .map(|p| {
                self.base.arena.pin_slab(p.extent.piece.slab);
                let len = p.extent.len as usize;
                (
                    self.base
                        .arena
                        .place(p.extent.piece.slab, p.extent.position, len as u32),
                    len,
                )
            })
            .collect();
        state.drain.begin_write(span.clone());
        debug_assert!(state.drain.writes_in_flight() <= limits.file_writes_max);
        let queue = self.drain.queue_of(file);
        queue.note_picked(file, bytes, state.pending.bytes());
        // Its sequence is about to be used to cut: later bytes need a later one.
        state.pending.end_tail();
        self.drain.enqueue(file, state);
        Some(Job {
            file: Arc::clone(file),
            parts,
            places,
            span,
            bytes,
        })
    }

    /// The next extents that are worth a write, from the cursor on and round: a run of contiguous ones, or all that fit
    /// where the backing gathers them.
    fn next_parts(&self, file: &File<B>, state: &FileState<B>) -> Option<Vec<Part>> {
        let max = self.job_max(file);
        self.next_parts_from(state, max, state.drain.cursor())
            .or_else(|| self.next_parts_from(state, max, 0))
    }

    fn next_parts_from(&self, state: &FileState<B>, max: JobMax, start: u64) -> Option<Vec<Part>> {
        let mut found = JobCandidate::default();
        for (offset, extent) in state.pending.extents().from(start) {
            let part = Part { extent, offset };
            let chunk = extent.piece.slab.chunk;
            let is_spilled = max.gathers && self.base.arena.is_spilled(chunk);
            let joins = found.takes(&part, is_spilled, max);
            let busy = state.drain.is_in_flight(&(offset..part.end()))
                || !self.base.arena.is_readable(chunk);
            if !found.parts.is_empty() && (!joins || busy) {
                if self.is_worth_a_write(&found) {
                    return Some(found.parts);
                }
                found = JobCandidate::default();
            }
            if busy {
                continue;
            }
            found.forced |= state.drain.is_forced(extent.sequence);
            found.push(part, is_spilled);
        }
        let is_job = !found.parts.is_empty() && self.is_worth_a_write(&found);
        is_job.then_some(found.parts)
    }

    fn job_max(&self, file: &File<B>) -> JobMax {
        let options = &self.base.options;
        if !file.gathers {
            return JobMax {
                gathers: false,
                parts: PARTS_MAX,
                bytes: options.drain_write_bytes_max,
                spilled_bytes: u64::MAX,
            };
        }
        let geometry = self.base.arena.geometry();
        let arena_bytes = u64::from(geometry.chunk_count) * geometry.chunk_bytes;
        JobMax {
            gathers: true,
            parts: GATHERED_PARTS_MAX,
            bytes: options.drain_gathered_bytes_max.min(arena_bytes / 4),
            spilled_bytes: options.drain_write_bytes_max,
        }
    }

    /// Whether that goes to the backing: a caller asked for a part of it, or it is long.
    fn is_worth_a_write(&self, found: &JobCandidate) -> bool {
        let is_long = || found.bytes >= self.base.write_bytes_min();
        found.forced || (self.base.options.drain == DrainPolicy::Eager && is_long())
    }

    /// A file of which nothing can be drained but what the spill file does not give: its waiters are told, with no lock
    /// held.
    pub(crate) fn fail_unreadable_file(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
    ) -> ThinVec<Waiter> {
        let wanted = |extent: &Extent| state.drain.is_forced(extent.sequence);
        let gone = |extent: &Extent| !self.base.arena.is_readable(extent.piece.slab.chunk);
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
        self.base
            .counters
            .drain_errors
            .fetch_add(1, Ordering::Relaxed);
        self.schedule_retry(file, state, Errno::IO, true);
        let told = state.drain.take_failed();
        self.drain.count_answered(told.len());
        told
    }
}

/// What may become a job.
#[derive(Default)]
struct JobCandidate {
    parts: Vec<Part>,
    bytes: u64,
    spilled_bytes: u64,
    /// A caller asked for a part of it.
    forced: bool,
}

impl JobCandidate {
    /// Whether a further part may be of the same job.
    fn takes(&self, part: &Part, is_spilled: bool, max: JobMax) -> bool {
        let len = part.extent.len;
        let spilled = if is_spilled { len } else { 0 };
        let is_next = || {
            self.parts
                .last()
                .is_none_or(|last| last.end() == part.offset)
        };
        self.parts.len() < max.parts
            && self.bytes + len <= max.bytes
            && self.spilled_bytes + spilled <= max.spilled_bytes
            && (max.gathers || is_next())
    }

    fn push(&mut self, part: Part, is_spilled: bool) {
        let len = part.extent.len;
        self.bytes += len;
        self.spilled_bytes += if is_spilled { len } else { 0 };
        self.parts.push(part);
    }
}
