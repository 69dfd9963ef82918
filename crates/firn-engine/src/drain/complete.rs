//! What the outcome of a job means.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_arena::PieceRef;
use firn_backing::lock::MutexGuard;
use firn_backing::{Backing, Errno, SetTime};
use firn_format::record::Record;
use thin_vec::ThinVec;

use super::job::{Job, JobOutcome, Part};
use super::retry_wait;
use crate::engine::{Decision, DrainPolicy, Engine};
use crate::extents::Extent;
use crate::file::{Failure, File, FileState, Waiter};

/// Void ranges of a file before the first look whether they can be forgotten.
const VOIDS_KEPT: usize = 8;

impl<B: Backing> Engine<B> {
    /// Takes the outcome of a job in.
    pub fn complete(&self, job: Job<B>, outcome: JobOutcome) {
        let Job {
            file, parts, range, ..
        } = job;
        let counters = &self.counters;
        if outcome.written > 0 {
            counters.drain_decisions.count(Decision::Written);
            let bytes = outcome.written;
            tracing::debug!(path = %file.shown(), offset = range.start, bytes, "drain: written");
        }
        counters
            .drain_bytes
            .fetch_add(outcome.written, Ordering::Relaxed);
        counters
            .drain_writes
            .fetch_add(outcome.writes, Ordering::Relaxed);
        let mut state = file.lock();
        let before = state.pending;
        state.inflight.retain(|r| *r != range);
        let written = range.start..range.start + outcome.written;
        let mut error = outcome.error;
        if !written.is_empty() {
            if !self.remove_drained(&mut state, &parts, written) {
                // The journal is full: tried again later, like any other failure.
                error = error.or(Some(Errno::NOSPC));
            }
            file.inode.data_unsynced.store(true, Ordering::Release);
        }
        for part in &parts {
            self.arena.unpin(part.extent.piece.slab);
        }
        let mut told = ThinVec::new();
        match error {
            // A failure of another part stays until everything is drained: it must not go untold.
            None => self.enqueue(&file, &mut state),
            Some(errno) => {
                counters.drain_errors.fetch_add(1, Ordering::Relaxed);
                self.schedule_retry(&file, &mut state, errno, outcome.unreadable);
                told = std::mem::take(&mut state.waiters);
                if let Some(failure) = &mut state.failure {
                    failure.told |= !told.is_empty();
                }
            }
        }
        self.count_held(before, state.pending);
        let satisfied = self.finish_drained(&file, &mut state);
        if error.is_some() {
            // The next write tells the program, and only those through the kernel can.
            self.revoke(&file, &mut state);
        }
        file.io_ended();
        let done = state.pending == 0;
        let cached = !state.cache.is_empty();
        drop(state);
        if done {
            self.close_if_unused(&file);
        }
        if cached {
            self.note_cached(&file);
            if done {
                self.confirm_cache(&file);
            }
        }
        self.drain.queue_of(&file).finish();
        for waiter in satisfied {
            (waiter.done)(Ok(()));
        }
        for waiter in told {
            (waiter.done)(Err(error.unwrap_or(Errno::IO)));
        }
        self.drop_if_unused(&file);
        self.close_excess_files();
        self.wake_writers();
        self.signal_progress();
    }

    /// These bytes are in the backing: they are not pending any more. False where the journal could
    /// not take that in: they stay pending and are written again, slow but never wrong.
    fn remove_drained(
        &self,
        state: &mut FileState<B>,
        parts: &[Part],
        written: Range<u64>,
    ) -> bool {
        let mut gone: Vec<(u64, Extent)> = Vec::new();
        for part in parts {
            let end = (part.offset + part.extent.len).min(written.end);
            for (offset, extent) in state.extents.within(part.offset..end.max(part.offset)) {
                // A newer write over the same bytes has its own piece and stays.
                if extent.piece == part.extent.piece {
                    gone.push((offset, extent));
                }
            }
        }
        // Does any piece stay with a part pending? Then the journal must say what is void, or recovery
        // would take the drained part of it for pending.
        let mut taken: HashMap<PieceRef, u64> = HashMap::new();
        for (_, extent) in &gone {
            *taken.entry(extent.piece).or_default() += extent.len;
        }
        let mut partial = state.partial;
        for (piece, bytes) in &taken {
            let used = state.pieces.get(piece).expect("an extent's piece is known");
            let before = used.live < used.len;
            let after = used.live > *bytes;
            partial = partial + u32::from(after && !before) - u32::from(before && !after);
        }
        let partial = partial > 0;
        if partial && let Some(file) = state.bound {
            let sequence = parts.iter().map(|p| p.extent.sequence).max().unwrap_or(0);
            let record = Record::Void {
                file,
                offset: written.start,
                len: written.end - written.start,
                sequence,
            };
            if self.journal.lock().append(&record).is_err() {
                return false;
            }
            state.voids += 1;
        }
        // Older pieces die first: after a crash between two of them the newer one is still there and
        // covers the older, which must not come back over what was drained.
        gone.sort_by_key(|(_, extent)| extent.sequence);
        if gone.iter().map(|(_, extent)| extent.len).sum::<u64>() == state.pending {
            // No piece will tell it any more, and the backing has the time of the drain until it is set there.
            self.record_time(state);
        }
        for (offset, extent) in gone {
            state
                .extents
                .remove(offset..offset + extent.len, &mut |_, e| {
                    e.piece == extent.piece
                });
            match self.options.drain {
                DrainPolicy::Eager => state.retire(&self.arena, extent.piece, extent.len),
                DrainPolicy::Demand => {
                    state.settle_piece(&self.arena, extent.piece, extent.len);
                    state
                        .cache
                        .insert(&self.arena, &self.counters.cached_bytes, offset, extent);
                }
            }
        }
        state.check();
        self.forget_voids(state);
        true
    }

    /// A file that is written and drained for ever, and never has nothing pending, would fill the
    /// journal with what is void.
    fn forget_voids(&self, state: &mut FileState<B>) {
        // The search is paid for by as many drains. A client's piece may have bytes that were not taken in.
        if (state.voids as usize) < VOIDS_KEPT.max(state.pieces.len() / 16) || state.door.is_some()
        {
            return;
        }
        let (Some(file), Some(oldest)) = (
            state.bound,
            state.extents.iter().map(|(_, e)| e.sequence).min(),
        ) else {
            return;
        };
        let record = Record::VoidsPassed {
            file,
            sequence: oldest.saturating_sub(1),
        };
        if self.journal.lock().append_end(&record).is_ok() {
            state.voids = 0;
        }
    }

    /// After a change of what is pending: who waited for it, and what ends with the last byte.
    ///
    /// Lets go of the lock while the backing works. Whoever comes meanwhile leaves the rest, its own waiters
    /// too, to the caller that was first.
    pub(crate) fn finish_drained(
        &self,
        file: &Arc<File<B>>,
        state: &mut MutexGuard<'_, FileState<B>>,
    ) -> ThinVec<Waiter> {
        if state.settling {
            return ThinVec::new();
        }
        while state.pending == 0 {
            self.set_oldest(file, state, None);
            state.fresh = 0;
            state.force_to = 0;
            state.failure = None;
            let drained = file.inode.data_unsynced.load(Ordering::Acquire);
            let Some(mtime) = state.mtime.take().filter(|_| drained) else {
                self.unbind(state);
                break;
            };
            // The backing stamped the drain; programs saw the time of their write. A refusal (not the
            // owner) leaves the backing's time.
            state.settling = true;
            let _ = state.unlocked(|| {
                let object = self.object(&file.inode)?;
                self.backing
                    .set_times(&object, SetTime::Keep, SetTime::At(mtime))
            });
            state.settling = false;
            file.io_ended();
        }
        state.take_satisfied_waiters()
    }

    pub(crate) fn schedule_retry(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        errno: Errno,
        unreadable: bool,
    ) {
        let now = Instant::now();
        let earlier = state.failure.filter(|failure| failure.retry_at > now);
        if let Some(failure) = &mut state.failure
            && earlier.is_some()
        {
            // Another write of the same try: it waits for the same next one.
            (failure.errno, failure.told) = (errno, false);
        }
        let count = state.failure.map_or(0, |f| f.count) + u32::from(earlier.is_none());
        let wait = retry_wait(count);
        if earlier.is_none() {
            let retry_at = now + wait;
            state.failure = Some(Failure {
                errno,
                told: false,
                count,
                retry_at,
            });
            self.drain
                .queue_of(file)
                .retry_at(retry_at, Arc::clone(file));
        }
        self.counters.drain_decisions.count(Decision::Waits);
        let path = file.inode.paths().into_iter().next().unwrap_or_default();
        let what = if unreadable {
            "read from the spill file"
        } else {
            "write to the backing"
        };
        let wait_ms = wait.as_millis() as u64;
        tracing::warn!(path = %file.shown(), %errno, count, wait_ms, what, "drain failed; the data is kept and tried again");
        self.errors.record(
            path,
            errno,
            format!("{what} failed: {errno}; the data is kept and tried again"),
        );
    }
}
