//! Queues of the files that have bytes to write to the backing, the directory that the mount serves: one queue for each
//! lane (one I/O server). The trait [`Executor`] is the interface to the threads that make these writes.
//!
//! A file enters the queue of its lane ([`queue::DrainQueue`]) in one of four cases:
//! * enough new bytes of it are pending for a write
//! * a caller waits for its drain
//! * its oldest pending byte is old
//! * the *arena*, the memory with the pending bytes, is short of room
//!
//! [`Drainer`](crate::Drainer) takes the files from the queues, and decides which bytes are written.
//!
//! Locks: the caller may hold the lock of a file. Most functions change the state of the file and its queue together.
//!
//! See docs/internals/drain.md.

mod line;
mod queue;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::time::Instant;

use firn_backing::lock::RwLock;
use firn_backing::{Backing, LaneIndex};
use queue::DrainQueue;
pub(crate) use queue::QueueFigures;

use crate::Result;
use crate::counters::PendingTotals;
use crate::file::{File, FileState};
use crate::file_events::FileEvents;
use crate::options::Order;

/// Carries out the jobs of the drain. Implemented by the I/O threads of `firn-drain`, and by tests that make each step
/// themselves.
pub trait Executor: Send + Sync {
    /// Notifies the executor that `lane` may have work. Called with locks of the engine held, so it must not call the
    /// engine.
    fn wake(&self, lane: LaneIndex);
    /// Blocks until the result of a drain arrives, and returns it. It is called with no lock held, by a thread that
    /// carries out no job.
    fn wait_for(&self, outcome: &Receiver<Result<()>>) -> Result<()> {
        wait_for(outcome)
    }
}

/// Queues of all lanes, and the executor that works on them.
pub(crate) struct Drain<B: Backing> {
    /// One queue for each lane.
    lanes: Box<[DrainQueue<File<B>>]>,
    /// Whether the backing can write distant pieces of some files in one call.
    gathers: bool,
    /// Set by [`Drain::set_executor`]; without one, no thread is woken.
    executor: RwLock<Option<Arc<dyn Executor>>>,
    /// Number of callers that wait for files to be drained, over all files. A caller is counted before it is added to
    /// its file, so the number may briefly be larger than the sum over the files.
    waiter_count: AtomicU64,
    /// Recorder of events of files.
    pub(crate) file_events: Arc<FileEvents<B>>,
}

impl<B: Backing> Drain<B> {
    /// Makes a queue for each lane of `backing`.
    pub(crate) fn new(backing: &B, order: Order) -> Self {
        let lane_count = backing.features().lane_count;
        assert!(lane_count > 0, "a mount has a lane");
        Self {
            lanes: (0..lane_count).map(|_| DrainQueue::new(order)).collect(),
            gathers: backing.facts(&backing.root()).gathers,
            executor: RwLock::new(None),
            waiter_count: AtomicU64::new(0),
            file_events: Arc::default(),
        }
    }

    /// Returns the number of lanes, which is at least one.
    pub(crate) fn lane_count(&self) -> usize {
        self.lanes.len()
    }

    /// Returns whether all files go to the same lane, and the backing gathers none of them.
    pub(crate) fn has_one_route(&self) -> bool {
        self.lanes.len() == 1 && !self.gathers
    }

    /// Returns the indexes of all lanes.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = LaneIndex> + use<B> {
        (0..self.lanes.len() as u16).map(LaneIndex::new)
    }

    /// Returns the queue of a lane.
    pub(crate) fn queue(&self, lane: LaneIndex) -> &DrainQueue<File<B>> {
        &self.lanes[lane.index()]
    }

    /// Returns the queue of a file's lane.
    pub(crate) fn queue_of(&self, file: &File<B>) -> &DrainQueue<File<B>> {
        self.queue(file.lane)
    }

    /// Returns whether a file of any lane is in line or being written.
    pub(crate) fn is_busy(&self) -> bool {
        self.lanes.iter().any(DrainQueue::is_busy)
    }

    /// Returns the status figures of each lane's queue.
    pub(crate) fn figures(&self) -> Vec<QueueFigures<File<B>>> {
        self.lanes.iter().map(DrainQueue::figures).collect()
    }

    /// Sets the executor that carries out the jobs from here on.
    pub(crate) fn set_executor(&self, executor: Arc<dyn Executor>) {
        *self.executor.write() = Some(executor);
    }

    /// Returns the executor, if one is set.
    pub(crate) fn executor(&self) -> Option<Arc<dyn Executor>> {
        self.executor.read().clone()
    }

    /// Wakes the threads that drain a lane.
    pub(crate) fn wake(&self, lane: LaneIndex) {
        if let Some(executor) = &*self.executor.read() {
            executor.wake(lane);
        }
    }

    /// Wakes the threads that drain any lane.
    pub(crate) fn wake_all(&self) {
        for lane in self.lanes() {
            self.wake(lane);
        }
    }

    /// Makes the queue check the age of a file's data at `when`, unless a check is planned already.
    pub(crate) fn check_age_at(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        when: Instant,
    ) {
        let is_first =
            state.drain.start_age_check() && self.queue_of(file).check_age_at(when, file);
        if is_first {
            // A thread that sleeps without a timeout must be woken for the first check. If an earlier check is planned,
            // the thread has a timeout.
            self.wake(file.lane);
        }
    }

    /// Records when the oldest pending byte of a file was written. `written` is `None` if the file has no pending
    /// bytes.
    pub(crate) fn set_oldest(
        &self,
        file: &Arc<File<B>>,
        state: &mut FileState<B>,
        written: Option<Instant>,
    ) {
        if state.drain.oldest() != written {
            let old_time = state.drain.replace_oldest(written);
            self.queue_of(file).replace_oldest(file, old_time, written);
        }
    }

    /// Puts a file into the queue of its lane, and wakes the lane's threads. Does nothing if the file is in the queue
    /// already, has no pending bytes, or waits for its next try after a failure.
    pub(crate) fn enqueue(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        let waits_for_retry = state.drain.waits_for_retry(Instant::now());
        if state.drain.is_queued() || state.pending.is_empty() || waits_for_retry {
            return;
        }
        state.drain.set_queued(true);
        self.queue_of(file)
            .push(Arc::clone(file), state.drain.has_waiters());
        self.wake(file.lane);
    }

    /// Counts a change of a file's pending bytes from `bytes_before` to `bytes_after`, under the file's lock.
    pub(crate) fn record_pending_change(
        &self,
        file: &File<B>,
        bytes_before: u64,
        bytes_after: u64,
    ) {
        self.queue_of(file)
            .pending_totals
            .record_change(bytes_before, bytes_after);
        self.file_events
            .record_pending_change(&file.inode, bytes_before, bytes_after);
    }

    /// Returns the pending bytes of all lanes.
    pub(crate) fn pending_bytes(&self) -> u64 {
        self.lanes
            .iter()
            .map(|lane| lane.pending_totals.bytes())
            .sum()
    }

    /// Returns the number of files with pending bytes, of all lanes.
    pub(crate) fn pending_files(&self) -> u64 {
        self.lanes
            .iter()
            .map(|lane| lane.pending_totals.files())
            .sum()
    }

    /// Counts one more caller that waits for a file. Must be called before the file is queued, because a drain thread
    /// checks [`Drain::has_waiters`] before it takes the file.
    pub(crate) fn count_waiter(&self) {
        self.waiter_count.fetch_add(1, Ordering::SeqCst);
    }

    /// Removes `waiters` callers, which wait no longer, from the count.
    pub(crate) fn count_answered(&self, waiters: usize) {
        let previous_count = self
            .waiter_count
            .fetch_sub(waiters as u64, Ordering::SeqCst);
        debug_assert!(
            previous_count >= waiters as u64,
            "more waiters answered than waited"
        );
    }

    /// Returns whether any caller waits for a file to be drained.
    pub(crate) fn has_waiters(&self) -> bool {
        self.waiter_count.load(Ordering::SeqCst) > 0
    }

    /// Requests the drain of all bytes of a file that are pending now, however few they are.
    pub(crate) fn force(&self, file: &Arc<File<B>>, state: &mut FileState<B>) {
        if let Some(newest) = state.pending.newest_sequence() {
            state.drain.force_up_to(newest);
        }
        self.enqueue(file, state);
    }

    /// Asserts that the queue of each lane (one I/O server) agrees with the states of `files`, which are all files. No
    /// other thread may use the engine meanwhile.
    pub(crate) fn assert_queues(&self, files: &[Arc<File<B>>]) {
        for lane in self.lanes() {
            let files_of_lane: Vec<_> = files.iter().filter(|file| file.lane == lane).collect();
            assert_queue(self.queue(lane), &files_of_lane);
            assert_pending_totals(&self.queue(lane).pending_totals, &files_of_lane);
        }
        let waiters: usize = files
            .iter()
            .map(|file| file.lock().drain.waiter_count())
            .sum();
        assert_eq!(
            self.waiter_count.load(Ordering::SeqCst),
            waiters as u64,
            "waiters for files"
        );
    }
}

/// Asserts that the queue of a lane (one I/O server) agrees with the states of the lane's files: which of them are
/// queued, are being written, have old bytes, or failed.
fn assert_queue<B: Backing>(queue: &DrainQueue<File<B>>, files: &[&Arc<File<B>>]) {
    let mut writes_in_flight = 0;
    // The time of each file's oldest pending byte, with the address that identifies the file in the queue.
    let mut oldest_of_files = BTreeSet::new();
    for file in files {
        let queued_count = queue.count_in_line(file);
        let state = file.lock();
        assert_eq!(
            queued_count,
            usize::from(state.drain.is_queued()),
            "times that a file stands in line"
        );
        writes_in_flight += state.drain.writes_in_flight();
        if let Some(oldest) = state.drain.oldest() {
            oldest_of_files.insert((oldest, Arc::as_ptr(file) as usize));
        }
        if let Some(failure) = state.drain.failure() {
            let is_retry_planned = queue.has_retry(failure.retry_at, file);
            assert!(
                is_retry_planned || failure.retry_at <= Instant::now(),
                "a failed file is not tried again"
            );
        }
    }
    assert_eq!(
        queue.figures().active,
        writes_in_flight,
        "jobs that are not completed"
    );
    assert_eq!(queue.oldest_of_files(), oldest_of_files, "ages of files");
}

/// Asserts that the totals of a lane are those of its files.
fn assert_pending_totals<B: Backing>(totals: &PendingTotals, files: &[&Arc<File<B>>]) {
    let bytes_of_files = || files.iter().map(|file| file.lock().pending.bytes());
    assert_eq!(totals.bytes(), bytes_of_files().sum::<u64>(), "held bytes");
    let file_count = bytes_of_files().filter(|bytes| *bytes > 0).count();
    assert_eq!(totals.files(), file_count as u64, "held files");
}

/// Blocks until `outcome` has a result, and returns it. Fails with EIO if the sender was dropped without a result.
pub(crate) fn wait_for(outcome: &Receiver<Result<()>>) -> Result<()> {
    outcome.recv().unwrap_or(Err(firn_backing::Errno::IO))
}

#[cfg(test)]
mod tests {
    use firn_backing::Volume;
    use firn_sim::SimBacking;

    use super::*;
    use crate::file::Route;
    use crate::names::Names;

    #[test]
    fn a_file_stands_in_the_queue_of_its_lane_and_in_no_other() {
        let backing = SimBacking::new();
        let root = backing.root();
        let attr = backing.attr(&root).expect("root");
        let names = Names::<SimBacking>::new(root, &attr, false, 16);
        backing.set_lanes(2);
        let drain = Drain::new(&backing, Order::Interleaved);
        let lanes: Vec<LaneIndex> = drain.lanes().collect();
        let route = Route {
            lane: lanes[1],
            gathers: false,
        };
        let file = Arc::new(File::new(Arc::clone(names.root()), route));
        drain.queue_of(&file).push(Arc::clone(&file), false);
        assert!(drain.is_busy());
        assert!(drain.queue(lanes[0]).pop(false).is_none());
        let popped = drain.queue(lanes[1]).pop(false).expect("it is in line");
        assert!(Arc::ptr_eq(&popped, &file));
        let active: Vec<usize> = drain.figures().iter().map(|lane| lane.active).collect();
        assert_eq!(active, [0, 1]);
    }
}
