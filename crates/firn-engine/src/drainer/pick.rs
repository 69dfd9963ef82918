//! Chooses the next write of the drain: which bytes of which file a thread writes next to the backing, the directory
//! that the mount serves.
//!
//! Terms
//! * *Pending* bytes are only in the *arena* (shared memory) and must be written. A *job* is one such write.
//! * A *lane* is one I/O server of the backing. Each lane has its own queue of files.
//! * A range of a file is *in flight* while it is being written.
//! * A backing *gathers* if it can write distant parts of a file in one call.
//! * A slab (a part of the arena) is *pinned* while it must not be moved or used again.
//!
//! Relies on: the caller completes each job that it gets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_arena::PieceBytes;
use firn_backing::{Backing, Errno, LaneIndex};
use thin_vec::ThinVec;

use super::job::{Job, JobErrorSource, JobPart};
use crate::counters::Decision;
use crate::drainer::Drainer;
use crate::extents::Extent;
use crate::file::{File, FileState, Waiter};
use crate::options::DrainPolicy;

/// Maximum number of parts of one vectored write (`UIO_MAXIOV`).
const PARTS_MAX: usize = 1024;
/// Maximum number of parts of a write that gathers.
const GATHERED_PARTS_MAX: usize = 16 << 10;

/// Divisor of the arena's size: a write that gathers has at most this fraction of the arena, because its slabs remain
/// pinned until the write is completed.
const GATHERED_ARENA_DIVISOR: u64 = 4;

/// What an I/O thread must do next.
pub enum NextStep<B: Backing> {
    /// Execute this write, then complete it.
    Job(Job<B>),
    /// Wait for the time `retry`, or until the lane is woken. There is no work before.
    Idle {
        /// Time until the next retry or age check; `None` if no file is due.
        retry: Option<Duration>,
    },
}

/// Limits for the next write of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLimits {
    /// Maximum number of writes of one file at a time. It is less than the number of threads, so that a file whose
    /// writes hang leaves a thread for other files.
    pub file_writes_max: usize,
    /// Whether other files are written if the writes of one file hang. Only needed in sequential order, in which a lane
    /// otherwise writes one file until it is finished.
    pub leaves_hung_file: bool,
}

impl LaneLimits {
    /// No limits.
    pub const NONE: Self = Self {
        file_writes_max: usize::MAX,
        leaves_hung_file: false,
    };
}

/// Limits for a job of one file.
#[derive(Clone, Copy)]
struct JobLimits {
    /// Whether the parts of the job may be distant from each other.
    gathers: bool,
    parts_max: usize,
    bytes_max: u64,
    /// Maximum number of bytes from the spill file. It is limited because these bytes are read into memory all at once.
    spilled_bytes_max: u64,
}

impl<B: Backing> Drainer<B> {
    /// Returns the next write of a lane (an I/O server), or how long there is no work. A caller that gets a job must
    /// complete it.
    ///
    /// The range of a job blocks a truncation of its file until the job is completed. So a lane that must wait before a
    /// write, for example for its token (the right of this host to write), must do so *before* this call, and never
    /// between this call and [`Job::execute`].
    pub fn pick(&self, lane: LaneIndex, limits: LaneLimits) -> NextStep<B> {
        let queue = self.drain.queue(lane);
        loop {
            // A writer may begin to wait for room while this thread examines a file, and then relies on this thread. So
            // waiting writers are checked in each round.
            self.room.wake_writers();
            let Some(file) = self.next_file(lane, limits.leaves_hung_file) else {
                let next_due = queue.next_due();
                return NextStep::Idle {
                    retry: next_due.map(|due| due.saturating_duration_since(Instant::now())),
                };
            };
            let mut state = file.lock();
            assert!(
                state.drain.is_queued(),
                "a file was in line and does not know"
            );
            state.drain.set_queued(false);
            if let Some(job) = self.begin_job(&file, &mut state, limits) {
                drop(state);
                self.base.counters.drain_decisions.count(Decision::Picked);
                let offset = job.span.start;
                let bytes = job.len();
                tracing::debug!(path = %file.shown(), offset, bytes, "drain: picked");
                return NextStep::Job(job);
            }
            let failed_waiters = self.fail_unreadable_file(&file, &mut state);
            // The lock is released, because the callbacks may take any lock.
            drop(state);
            for waiter in failed_waiters {
                (waiter.done)(Err(Errno::IO));
            }
            // The file had nothing to write, so its examination ends here. For a job, the completion ends it.
            queue.finish();
        }
    }

    /// Queues the files that are due, for a retry after a failure or because of the age of their data, and takes the
    /// next file in line. Returns `None` if no file can be written now.
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

    /// Requests the drain of a file if its oldest pending byte is old, even if few bytes are pending. Plans the next
    /// check, if one is needed.
    fn check_age(&self, file: &Arc<File<B>>, now: Instant) {
        let mut state = file.lock();
        state.drain.end_age_check();
        // Bytes that a client process has stored in the arena, without a request, count as written too.
        self.intake.ingest_published(file, &mut state);
        let drain_age = self.base.options.drain_age;
        let Some(oldest_write) = state.drain.oldest() else {
            // No byte is pending. A client may publish bytes later without a request, so the age is checked again.
            if state.direct.has_grant() {
                self.drain.check_age_at(file, &mut state, now + drain_age);
            }
            return;
        };
        let due = oldest_write + drain_age;
        if due > now {
            self.drain.check_age_at(file, &mut state, due);
            return;
        }
        self.drain.force(file, &mut state);
        // The drain of the old bytes is requested, so their age starts again from now.
        self.drain.set_oldest(file, &mut state, Some(now));
        self.drain.check_age_at(file, &mut state, now + drain_age);
    }

    /// Begins a job: one write of this file to the backing. Pins the slabs with its bytes, so that these are not moved
    /// or used again. Marks the range as in flight, and queues the file again for its other bytes.
    ///
    /// Returns `None` if no write may begin now, or if no pending bytes are urgent or long enough for one.
    fn begin_job(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        limits: LaneLimits,
    ) -> Option<Job<B>> {
        // Bytes that a client process has stored become pending, and their pieces do not grow any more.
        self.intake.freeze_published(file, state);
        if state.drain.is_exclusive()
            || state.pending.is_empty()
            || state.drain.writes_in_flight() >= limits.file_writes_max
        {
            return None;
        }
        let parts = self.next_parts(file, state)?;
        let span = parts[0].offset..parts.last().map_or(0, JobPart::end);
        let bytes = parts.iter().map(|part| part.extent.len).sum();
        let places = parts
            .iter()
            .map(|part| self.pin_and_locate(part.extent))
            .collect();
        state.drain.begin_write(span.clone());
        debug_assert!(state.drain.writes_in_flight() <= limits.file_writes_max);
        let queue = self.drain.queue_of(file);
        queue.record_pick(file, bytes, state.pending.bytes());
        // The journal will record this range as drained, for all appends up to the newest one in the job. So bytes that
        // are written from now on must not extend that append.
        state.pending.stop_extending_last_piece();
        // The file may have more bytes to write, and another thread can write them at the same time.
        self.drain.enqueue(file, state);
        Some(Job {
            file: Arc::clone(file),
            parts,
            places,
            span,
            bytes,
        })
    }

    /// Pins the slab of an extent, and returns where the bytes of the extent are while the slab is pinned.
    fn pin_and_locate(&self, extent: Extent) -> PieceBytes {
        let slab = extent.piece.slab;
        self.base.arena.pin_slab(slab);
        self.base
            .arena
            .find_bytes(slab, extent.position, extent.len as u32)
    }

    /// Returns the next extents that are worth a write, searching from the cursor to the end and then from the start.
    /// They are contiguous; if the backing gathers, they are all extents that fit into one write.
    fn next_parts(&self, file: &File<B>, state: &FileState<B>) -> Option<Vec<JobPart>> {
        let limits = self.job_limits(file);
        self.next_parts_from(state, limits, state.drain.cursor())
            .or_else(|| self.next_parts_from(state, limits, 0))
    }

    /// Searches the pending bytes of a file from `start` on for the parts of the next write. Collects parts into a
    /// candidate for one write. A part that does not fit, is being written already or is unreadable ends the candidate.
    /// Returns the first candidate that is worth a write, or `None`.
    fn next_parts_from(
        &self,
        state: &FileState<B>,
        limits: JobLimits,
        start: u64,
    ) -> Option<Vec<JobPart>> {
        let mut candidate = JobCandidate::default();
        for (offset, extent) in state.pending.extents().from(start) {
            let part = JobPart { extent, offset };
            let chunk = extent.piece.slab.chunk;
            let is_spilled = limits.gathers && self.base.arena.is_spilled(chunk);
            let fits = candidate.has_room_for(&part, is_spilled, limits);
            let can_be_written = !state.drain.is_in_flight(&(offset..part.end()))
                && self.base.arena.is_readable(chunk);
            if !fits || !can_be_written {
                if self.is_worth_a_write(&candidate) {
                    return Some(candidate.parts);
                }
                candidate = JobCandidate::default();
            }
            if can_be_written {
                candidate.is_forced |= state.drain.is_forced(extent.sequence);
                candidate.push(part, is_spilled);
            }
        }
        if !self.is_worth_a_write(&candidate) {
            return None;
        }
        Some(candidate.parts)
    }

    /// Returns the limits for a job (one write to the backing) of this file. They are higher if the backing writes
    /// distant parts in one call.
    fn job_limits(&self, file: &File<B>) -> JobLimits {
        let options = &self.base.options;
        if !file.gathers {
            return JobLimits {
                gathers: false,
                parts_max: PARTS_MAX,
                bytes_max: options.drain_write_bytes_max,
                spilled_bytes_max: u64::MAX,
            };
        }
        let geometry = self.base.arena.geometry();
        let arena_bytes = u64::from(geometry.chunk_count) * geometry.chunk_bytes;
        JobLimits {
            gathers: true,
            parts_max: GATHERED_PARTS_MAX,
            bytes_max: options
                .drain_gathered_bytes_max
                .min(arena_bytes / GATHERED_ARENA_DIVISOR),
            spilled_bytes_max: options.drain_write_bytes_max,
        }
    }

    /// Returns whether a candidate is written now: it has a forced part, or the policy is eager and the candidate is
    /// long enough.
    fn is_worth_a_write(&self, candidate: &JobCandidate) -> bool {
        if candidate.parts.is_empty() {
            return false;
        }
        let is_long = || candidate.bytes >= self.base.write_bytes_min();
        candidate.is_forced || (self.base.options.drain == DrainPolicy::Eager && is_long())
    }

    /// Fails a file if bytes that must go to the backing cannot be read from the spill file, and no write of the file
    /// is in flight. Returns the callbacks of callers that wait for the file, which must be called with no lock held.
    pub(crate) fn fail_unreadable_file(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
    ) -> ThinVec<Waiter> {
        if state.drain.is_exclusive() || state.drain.writes_in_flight() > 0 {
            return ThinVec::new();
        }
        let is_forced_and_unreadable = |extent: Extent| {
            state.drain.is_forced(extent.sequence)
                && !self.base.arena.is_readable(extent.piece.slab.chunk)
        };
        let must_fail = state
            .pending
            .extents()
            .iter()
            .any(|(_, extent)| is_forced_and_unreadable(extent));
        if !must_fail {
            return ThinVec::new();
        }
        self.record_failed_attempt(file, state, Errno::IO, JobErrorSource::SpillFile)
    }
}

/// Parts that may become one job.
#[derive(Default)]
struct JobCandidate {
    parts: Vec<JobPart>,
    bytes: u64,
    spilled_bytes: u64,
    /// Whether any part is forced. The job is then made even if it has few bytes.
    is_forced: bool,
}

impl JobCandidate {
    /// Returns whether another part fits into the same job.
    fn has_room_for(&self, part: &JobPart, is_spilled: bool, limits: JobLimits) -> bool {
        let len = part.extent.len;
        let spilled_len = if is_spilled { len } else { 0 };
        let last_part = self.parts.last();
        let is_contiguous = last_part.is_none_or(|last| last.end() == part.offset);
        self.parts.len() < limits.parts_max
            && self.bytes + len <= limits.bytes_max
            && self.spilled_bytes + spilled_len <= limits.spilled_bytes_max
            && (limits.gathers || is_contiguous)
    }

    /// Adds a part at the end.
    fn push(&mut self, part: JobPart, is_spilled: bool) {
        let len = part.extent.len;
        self.bytes += len;
        self.spilled_bytes += if is_spilled { len } else { 0 };
        self.parts.push(part);
    }
}
