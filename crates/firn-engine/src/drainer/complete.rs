//! Completion of a write to the backing: the bytes that it wrote are not pending any more, and bytes that it could not
//! write are retried.
//!
//! Terms
//! * A *job* is one write to the backing, made of *parts*: extents of one file, each with its file offset.
//! * A *piece* is a record in the arena that describes written bytes. A piece *dies* when its record is marked as dead,
//!   because none of its bytes is pending any more. A recovery after a crash ignores dead pieces.
//!
//! Invariants, for a crash at any moment
//! * A drained range is in the journal (the arena's record of drained ranges) before its pieces die.
//! * Older pieces die before newer ones, so a recovery never writes older bytes over drained bytes.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use firn_backing::lock::MutexGuard;
use firn_backing::{Backing, Errno, SetTime};
use firn_format::record::Record;
use thin_vec::ThinVec;

use super::job::{Job, JobErrorSource, JobOutcome, JobPart};
use crate::counters::Decision;
use crate::drainer::Drainer;
use crate::extents::{Extent, Extents};
use crate::file::{File, FileState, RecordedFailure, Waiter};
use crate::options::DrainPolicy;

/// Number of drained ranges of a file in the journal from which on the engine checks whether they can be forgotten.
const CHECKED_RANGES_MIN: usize = 8;
/// The same limit for a file with many pieces: one drained range for this number of pieces. The check takes longer the
/// more pieces the file has.
const PIECES_PER_CHECKED_RANGE: usize = 16;

/// Returns the parts (extents with their file offsets) that have the first `bytes` bytes of a job. The last of them may
/// be shortened.
fn parts_with_first_bytes(parts: &[JobPart], bytes: u64) -> Vec<JobPart> {
    let mut remaining_bytes = bytes;
    let mut first_parts = Vec::new();
    for part in parts {
        let len = part.extent.len.min(remaining_bytes);
        if len == 0 {
            break;
        }
        remaining_bytes -= len;
        first_parts.push(JobPart {
            extent: Extent { len, ..part.extent },
            offset: part.offset,
        });
    }
    first_parts
}

/// Returns the file ranges that the journal must record as drained, because the parts in `written` are in the backing.
/// `sequence` is the number of the newest append in `written`. After a crash, bytes of these ranges from appends up to
/// this number do not become pending again.
///
/// Two parts are joined to one range if all pending bytes between them are newer, so that few journal records cover
/// many parts.
fn drained_ranges(pending: &Extents, written: &[JobPart], sequence: u64) -> Vec<Range<u64>> {
    let has_only_newer_bytes = |gap: Range<u64>| {
        gap.is_empty()
            || pending
                .within(gap)
                .all(|(_, extent)| extent.sequence > sequence)
    };
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for part in written {
        match ranges.last_mut() {
            Some(range) if has_only_newer_bytes(range.end..part.offset) => range.end = part.end(),
            _ => ranges.push(part.offset..part.end()),
        }
    }
    ranges
}

/// Returns the extents of `pending` that contain written bytes, with their file offsets. A newer write of the same
/// bytes has a separate piece, which is not drained yet.
fn written_extents(pending: &Extents, written: &[JobPart]) -> Vec<(u64, Extent)> {
    let mut extents = Vec::new();
    for part in written {
        for (offset, extent) in pending.within(part.offset..part.end()) {
            if extent.piece == part.extent.piece {
                extents.push((offset, extent));
            }
        }
    }
    extents
}

impl<B: Backing> Drainer<B> {
    /// Records the result of a job. Then it calls the waiters whose data is in the backing or whose drain has failed,
    /// and wakes writers that wait for room.
    pub fn complete(&self, job: Job<B>, outcome: JobOutcome) {
        let Job {
            file, parts, span, ..
        } = job;
        self.count_outcome(&file, &span, &outcome);
        let mut state = file.lock();
        let bytes_before = state.pending.bytes();
        state.drain.end_write(&span);
        let error = self.remove_written_bytes(&file, &mut state, &parts, &outcome);
        for part in &parts {
            self.base.arena.unpin_slab(part.extent.piece.slab);
        }
        let mut failed_waiters = ThinVec::new();
        match error {
            // A failure of another job remains recorded until everything is drained, so that a program gets the error.
            None => self.drain.enqueue(&file, &mut state),
            Some(errno) => {
                failed_waiters =
                    self.record_failed_attempt(&file, &mut state, errno, outcome.error_source);
            }
        }
        self.drain
            .record_pending_change(&file, bytes_before, state.pending.bytes());
        let satisfied_waiters = self.finish_drained(&file, &mut state);
        if error.is_some() {
            // The next write must return the error, which only a write through the kernel can do. So direct access
            // ends.
            self.intake.revoke_grant(&file, &mut state);
        }
        file.notify_io_ended();
        let is_drained = state.pending.is_empty();
        let is_cached = !state.cache.is_empty();
        drop(state);
        if outcome.written_bytes > 0 {
            self.kernel_cache.make_pages_stale_after_drain(&file);
        }
        if is_drained {
            self.open_files.notify_file_written(&file);
            self.open_files.close_if_unused(&file);
        }
        if is_cached {
            self.room.add_evictable_file(&file);
        }
        if is_cached && is_drained {
            self.room.confirm_cache(&file);
        }
        self.drain.queue_of(&file).finish();
        for waiter in satisfied_waiters {
            (waiter.done)(Ok(()));
        }
        for waiter in failed_waiters {
            (waiter.done)(Err(error.unwrap_or(Errno::IO)));
        }
        self.open_files.drop_if_unused(&file);
        self.open_files.close_excess_files();
        self.room.wake_writers();
    }

    /// Counts the error of a try to drain a file, and schedules the next try. Returns the waiters that must get the
    /// error, which the caller must call with no lock held.
    pub(crate) fn record_failed_attempt(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        errno: Errno,
        source: JobErrorSource,
    ) -> ThinVec<Waiter> {
        let errors = &self.base.counters.drain_errors;
        errors.fetch_add(1, Ordering::Relaxed);
        self.schedule_retry(file, state, errno, source);
        let failed_waiters = state.drain.take_failed_waiters();
        self.drain.count_answered(failed_waiters.len());
        failed_waiters
    }

    /// Removes the written bytes of a job (a write to the backing) from the file's pending bytes. Returns the error of
    /// the job; ENOSPC if the job has none but the journal is full.
    fn remove_written_bytes(
        &self,
        file: &File<B>,
        state: &mut FileState<B>,
        parts: &[JobPart],
        outcome: &JobOutcome,
    ) -> Option<Errno> {
        if outcome.written_bytes == 0 {
            return outcome.error;
        }
        let written_parts = parts_with_first_bytes(parts, outcome.written_bytes);
        let is_removed = self.finish_drained_bytes(state, &written_parts);
        // The next sync of the file must cover these bytes.
        file.inode.data_unsynced.store(true, Ordering::Release);
        if is_removed {
            return outcome.error;
        }
        // The written bytes remain pending and are written again, as after any other failure.
        outcome.error.or(Some(Errno::NOSPC))
    }

    /// Counts the bytes and writes of a job, and logs the write.
    fn count_outcome(&self, file: &File<B>, span: &Range<u64>, outcome: &JobOutcome) {
        let counters = &self.base.counters;
        if outcome.written_bytes > 0 {
            counters.drain_decisions.count(Decision::Written);
            let bytes = outcome.written_bytes;
            tracing::debug!(path = %file.shown(), offset = span.start, bytes, "drain: written");
        }
        let count = |counter: &AtomicU64, more| counter.fetch_add(more, Ordering::Relaxed);
        count(&counters.drain_bytes, outcome.written_bytes);
        count(&counters.drain_writes, outcome.write_calls);
    }

    /// Ends the pending state of bytes that the backing has now, and caches them in the arena or frees them. Returns
    /// false if the journal is full. The bytes then remain pending and are written again, which is slow but safe.
    fn finish_drained_bytes(&self, state: &mut FileState<B>, written: &[JobPart]) -> bool {
        let mut drained = written_extents(state.pending.extents(), written);
        if state.pending.would_leave_partial_pieces(&drained)
            && !self.record_drained_ranges(state, written)
        {
            return false;
        }
        // Older pieces (recorded appends) die first. So a crash in between never leaves an older piece without the
        // newer one that covers it: a recovery would write the old bytes over drained ones.
        drained.sort_by_key(|(_, extent)| extent.sequence);
        let drained_bytes: u64 = drained.iter().map(|(_, extent)| extent.len).sum();
        if drained_bytes == state.pending.bytes() {
            // The last pieces die now, and with them the record of the file's time. The backing has the time of the
            // drain until `finish_drained` sets the right one. So the journal keeps the time in the meantime.
            self.base.journal.record_time(state);
        }
        // Client processes may have lists of the places of these bytes, which may be used again.
        state.direct.invalidate_lists(&self.base.arena);
        for (offset, extent) in drained {
            state
                .pending
                .remove_drained(&self.base.arena, offset, extent);
            if self.base.options.drain == DrainPolicy::Demand && state.can_cache() {
                let cached_bytes = &self.base.counters.cached_bytes;
                state
                    .cache
                    .insert(&self.base.arena, cached_bytes, offset, extent);
            } else {
                self.base.arena.release_bytes(extent.piece.slab, extent.len);
            }
        }
        state.check();
        self.forget_drained_ranges(state);
        true
    }

    /// Records in the journal that these bytes are drained (in the backing), so that a recovery does not write them
    /// again. Returns false if the journal has no room for all ranges.
    fn record_drained_ranges(&self, state: &mut FileState<B>, written: &[JobPart]) -> bool {
        let Some(file_id) = state.pending.file_id() else {
            return true;
        };
        let newest_sequence = written
            .iter()
            .map(|part| part.extent.sequence)
            .max()
            .unwrap_or(0);
        for range in drained_ranges(state.pending.extents(), written, newest_sequence) {
            let record = Record::DrainedRange {
                file: file_id.get(),
                offset: range.start,
                len: range.end - range.start,
                sequence: newest_sequence,
            };
            if self.base.journal.append(&record).is_err() {
                return false;
            }
            state.pending.count_drained_range();
        }
        true
    }

    /// Lets the journal forget those drained ranges of a file that are older than each pending byte. A drained range is
    /// a journal record: bytes of appends up to a sequence are in the backing. Without this call, a file that always
    /// has pending bytes would fill the journal.
    fn forget_drained_ranges(&self, state: &mut FileState<B>) {
        let pending = &mut state.pending;
        // The search for the oldest sequence reads all extents, so it is made only once in many drains.
        let check_threshold =
            CHECKED_RANGES_MIN.max(pending.piece_count() / PIECES_PER_CHECKED_RANGE);
        // A client's piece may have older bytes that were not ingested.
        if (pending.drained_ranges() as usize) < check_threshold || state.direct.has_grant() {
            return;
        }
        let (Some(file_id), Some(oldest_sequence)) = (pending.file_id(), pending.oldest_sequence())
        else {
            return;
        };
        let record = Record::DrainedRangesForgotten {
            file: file_id.get(),
            sequence: oldest_sequence.saturating_sub(1),
        };
        if self.base.journal.try_append_end(&record) {
            pending.forget_drained_ranges();
        }
    }

    /// Returns the waiters for bytes that are not pending any more. The caller calls them with no lock held. This
    /// function runs after each change of the pending bytes (those that are not in the backing). If none is left, it
    /// also sets the file's time in the backing and ends the file id (its number in the journal).
    ///
    /// The file's lock is released while the time is being set. If another thread calls this function meanwhile, it
    /// gets no waiters, and the first thread gets all of them.
    pub(crate) fn finish_drained(
        &self,
        file: &Arc<File<B>>,
        state: &mut MutexGuard<'_, FileState<B>>,
    ) -> ThinVec<Waiter> {
        if state.drain.is_setting_time() {
            return ThinVec::new();
        }
        // Repeated until no time is left to set: a program may set another one while the lock is released.
        while state.pending.is_empty() {
            self.drain.set_oldest(file, state, None);
            state.drain.clear_requests();
            let was_drained = file.inode.data_unsynced.load(Ordering::Acquire);
            let pending_mtime = state.pending.take_mtime();
            // If no byte was drained, the backing still has the right time.
            let mtime_to_set = pending_mtime.filter(|_| was_drained);
            let Some(mtime) = mtime_to_set else {
                self.base.journal.end_file_id(state);
                break;
            };
            // The backing has the time of the drain, but programs saw the time of their write. If the backing refuses
            // the change, for example because firnd is not the owner, the time of the drain remains.
            state.drain.set_setting_time(true);
            let _ = state.unlocked(|| {
                let object = self.tree.object(&file.inode)?;
                self.base
                    .backing
                    .set_times(&object, SetTime::Keep, SetTime::At(mtime))
            });
            state.drain.set_setting_time(false);
            file.notify_io_ended();
        }
        let satisfied_waiters = state.take_satisfied_waiters();
        self.drain.count_answered(satisfied_waiters.len());
        satisfied_waiters
    }

    /// Schedules the next attempt to drain a file (to write its pending bytes to the backing) after an error, and
    /// records the error for the status.
    pub(crate) fn schedule_retry(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        errno: Errno,
        source: JobErrorSource,
    ) {
        let now = Instant::now();
        let RecordedFailure {
            failure,
            must_plan_attempt,
        } = state.drain.record_failure(errno, now);
        if must_plan_attempt {
            self.drain
                .queue_of(file)
                .retry_at(failure.retry_at, Arc::clone(file));
        }
        let count = failure.tries;
        self.base
            .counters
            .drain_decisions
            .count(Decision::RetryPlanned);
        let path = file.inode.paths().into_iter().next().unwrap_or_default();
        let failed_call = match source {
            JobErrorSource::SpillFile => "read from the spill file",
            JobErrorSource::Backing => "write to the backing",
        };
        let wait_ms = failure.retry_at.saturating_duration_since(now).as_millis() as u64;
        tracing::warn!(path = %file.shown(), %errno, count, wait_ms, what = failed_call, "cannot drain a file; its \
            data is kept and tried again");
        self.base
            .errors
            .record(path, errno, format!("{failed_call} failed: {errno}"));
    }
}

#[cfg(test)]
mod tests {
    use firn_arena::{PieceRef, SlabRef};

    use super::*;

    fn part(offset: u64, len: u64, sequence: u64) -> JobPart {
        let piece = PieceRef {
            slab: SlabRef { chunk: 0, slab: 0 },
            record: sequence as u32,
        };
        let extent = Extent {
            len,
            piece,
            position: 0,
            sequence,
        };
        JobPart { extent, offset }
    }

    fn pending(parts: &[JobPart]) -> Extents {
        let mut extents = Extents::default();
        for part in parts {
            extents.insert(part.offset, part.extent, &mut |_, _| {});
        }
        extents
    }

    #[test]
    fn what_was_written_of_a_job_is_its_first_bytes() {
        let parts = [part(0, 10, 1), part(20, 10, 2), part(40, 10, 3)];
        let ranges = |bytes| {
            let first = parts_with_first_bytes(&parts, bytes);
            let ranges = first.iter().map(|part| part.offset..part.end());
            ranges.collect::<Vec<_>>()
        };
        assert_eq!(ranges(30), [0..10, 20..30, 40..50]);
        assert_eq!(ranges(20), [0..10, 20..30]);
        assert_eq!(ranges(15), [0..10, 20..25]);
    }

    #[test]
    fn one_drained_range_reaches_over_gaps_without_older_pending_bytes() {
        let written = [part(0, 10, 5), part(20, 10, 9), part(30, 10, 7)];
        let of = |others: &[JobPart]| {
            let ranges = drained_ranges(&pending(others), &written, 9);
            let ends = ranges.into_iter().map(|range| (range.start, range.end));
            ends.collect::<Vec<_>>()
        };
        assert_eq!(of(&[]), [(0, 40)]);
        assert_eq!(of(&[part(12, 3, 10), part(100, 5, 1)]), [(0, 40)]);
        assert_eq!(of(&[part(12, 3, 8)]), [(0, 10), (20, 40)]);
        assert_eq!(of(&[part(12, 3, 10), part(16, 2, 9)]), [(0, 10), (20, 40)]);
    }
}
