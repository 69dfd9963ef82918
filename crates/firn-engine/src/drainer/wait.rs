//! Waiting for the drain of a file, and what the executor (the threads that drain) asks the engine before it sleeps.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use firn_backing::{Backing, LaneIndex};

use crate::counters::Decision;
use crate::drain::{Executor, wait_for};
use crate::drainer::Drainer;
use crate::file::{File, Waiter};
use crate::{Done, Result};

/// When a lane has something to drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextWork {
    /// A file is in line, or is due.
    Now,
    /// No file is in line or due. The next one is due after `retry`, unless the lane is woken before.
    Later {
        /// Time until the next file is due, for a retry or a check of the age of its data. `None` if none is planned.
        retry: Option<Duration>,
    },
}

impl<B: Backing> Drainer<B> {
    /// Calls `done` when all bytes of a file that are pending now are in the backing, or with the error of a failed
    /// attempt. If nothing is pending, calls `done` before it returns.
    pub(crate) fn when_drained(&self, file: &Arc<File<B>>, done: Done) {
        let mut state = file.lock();
        // Bytes that a client process has stored in the arena, without a request, count as written too.
        self.intake.ingest_published(file, &mut state);
        if state.pending.is_empty() {
            // The lock is released, because the callback may take any lock.
            drop(state);
            done(Ok(()));
            return;
        }
        let newest_sequence = state.pending.newest_sequence().unwrap_or(0);
        self.drain.count_waiter();
        state.drain.add_waiter(Waiter {
            until_sequence: newest_sequence,
            done,
        });
        // A caller waits, so the file is tried again now and not after the back-off.
        state.drain.retry_now();
        self.drain.force(file, &mut state);
        self.drain.queue_of(file).record_waiter(file);
        // The lane is woken even if the file is already in line, because a drain thread may have delayed its write.
        self.drain.wake(file.lane);
    }

    /// Sets the executor that carries out the jobs from here on.
    pub fn set_executor(&self, executor: Arc<dyn Executor>) {
        self.drain.set_executor(executor);
    }

    /// Returns the lanes. The executor picks from each of them.
    pub fn lanes(&self) -> impl Iterator<Item = LaneIndex> + use<B> {
        self.drain.lanes()
    }

    /// Returns whether a caller waits for a drain: for a file, or for room in the arena.
    pub fn has_waiters(&self) -> bool {
        self.drain.has_waiters() || self.room.space.waiters.count() > 0
    }

    /// Returns when a lane has something to pick. Unlike [`Drainer::pick`], this changes nothing.
    pub fn next_work(&self, lane: LaneIndex) -> NextWork {
        let queue = self.drain.queue(lane);
        let now = Instant::now();
        let next_due = queue.next_due();
        if queue.has_files() || next_due.is_some_and(|due| due <= now) {
            return NextWork::Now;
        }
        NextWork::Later {
            retry: next_due.map(|due| due - now),
        }
    }

    /// Returns whether a caller waits for a drain or soon may, because more than three quarters of the arena are in
    /// use. If this is false, drains are not urgent.
    pub fn is_drain_awaited(&self) -> bool {
        let is_nearly_full = || {
            let slots = u64::from(self.base.arena.geometry().chunk_count);
            u64::from(self.base.arena.memory_used()) * 4 > slots * 3
        };
        self.has_waiters() || is_nearly_full()
    }

    /// Counts a drain that was delayed because programs need the CPUs.
    pub fn note_drain_put_off(&self) {
        self.base.counters.drain_decisions.count(Decision::Delayed);
        tracing::debug!("drain: put off, because programs need the CPUs");
    }

    /// Drains the bytes of a file that are pending now (writes them to the backing). Blocks until they are there, or
    /// returns the error of a failed attempt. The caller must hold no lock and must not be a thread that executes jobs.
    pub(crate) fn drain_and_wait(&self, file: &Arc<File<B>>) -> Result<()> {
        let (sender, outcome) = mpsc::channel();
        self.when_drained(
            file,
            Box::new(move |result| {
                // The send fails only if the caller does not wait any more.
                let _ = sender.send(result);
            }),
        );
        // If nothing is pending, the result is there already.
        if let Ok(result) = outcome.try_recv() {
            return result;
        }
        match self.drain.executor() {
            Some(executor) => executor.wait_for(&outcome),
            None => wait_for(&outcome),
        }
    }
}
