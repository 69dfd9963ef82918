//! Drain queue of one lane (one I/O server): which files have pending bytes (in memory only) to write now, and when to
//! check the other files.
//!
//! Files stand in line ([`Line`]). Besides the line there are two lists: files whose drain failed, with the time of the
//! next try, and files with few pending bytes, with the time at which these bytes are old.
//!
//! Invariants
//! * A file stands in line at most once. The flag `queued` in its state says whether it does. The flag is set together
//!   with [`DrainQueue::push`], under the file's lock. The thread that got the file from [`DrainQueue::pop`] clears it.
//! * `active` counts the files that were popped and are being examined, and the jobs that are not completed.
//! * `oldest` has the same times as the states of the lane's files with pending bytes.
//! * A file that failed is in `retries` with the time of its next try.
//!
//! Locks: a file's lock may be held when this lock is taken. Under this lock only the arena's lock is taken.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;

use super::line::{Line, RunsUnderWay};
use crate::counters::PendingTotals;
use crate::options::Order;

/// Files to drain. The type of a file is a parameter, for the tests.
pub(crate) struct DrainQueue<T> {
    order: Order,
    /// Sums of the pending bytes and files of the lane.
    pub(crate) pending_totals: PendingTotals,
    state: Mutex<QueueState<T>>,
}

/// Data that the lock of a queue protects.
struct QueueState<T> {
    /// Files that have bytes to write.
    line: Line<T>,
    /// Files that failed, with the time of their next try.
    retries: Vec<(Instant, Arc<T>)>,
    /// Files whose age is to be checked, with the time of the check, the earliest first.
    aging: VecDeque<(Instant, Weak<T>)>,
    /// Files being examined and jobs not completed.
    active: usize,
    /// Approximate time at which the oldest pending byte of each file was written, with the file's address.
    oldest: BTreeSet<(Instant, usize)>,
}

/// Files whose time for a retry or an age check has come.
pub(crate) struct DueFiles<T> {
    /// Files to try again after a failure.
    pub retries: Vec<Arc<T>>,
    /// Files whose data may be old.
    pub aged: Vec<Arc<T>>,
}

/// Status figures of a queue.
pub(crate) struct QueueFigures<T> {
    /// Number of files in line.
    pub files: usize,
    /// In sequential order, the file that has the turn.
    pub turn: Option<Arc<T>>,
    /// Number of files being examined, and of jobs not completed.
    pub active: usize,
    /// Time until the next try of a file that failed.
    pub retry_in: Option<Duration>,
    /// Time at which the oldest pending byte was written.
    pub oldest: Option<Instant>,
}

impl<T> DrainQueue<T> {
    /// Makes an empty queue of files to drain, which are taken in this order.
    pub(crate) fn new(order: Order) -> Self {
        let state = QueueState {
            line: match order {
                Order::Interleaved => Line::interleaved(),
                Order::Sequential => Line::sequential(),
            },
            retries: Vec::new(),
            aging: VecDeque::new(),
            active: 0,
            oldest: BTreeSet::new(),
        };
        Self {
            order,
            pending_totals: PendingTotals::default(),
            state: Mutex::new(state),
        }
    }

    /// Puts a file into line. The file must not be in line yet.
    pub(crate) fn push(&self, file: Arc<T>, is_awaited: bool) {
        self.state.lock().line.push(file, is_awaited);
    }

    /// Takes the next file in line. It counts as active until [`DrainQueue::finish`].
    ///
    /// `leaves_hung_file` says whether the runs that are under way hang. In sequential order another file may then
    /// begin beside them.
    pub(crate) fn pop(&self, leaves_hung_file: bool) -> Option<Arc<T>> {
        let mut state = self.state.lock();
        let runs = match state.active {
            0 => RunsUnderWay::None,
            _ if leaves_hung_file => RunsUnderWay::Hanging,
            _ => RunsUnderWay::Working,
        };
        let file = state.line.pop(runs)?;
        state.active += 1;
        Some(file)
    }

    /// Records that a caller began to wait for a file.
    pub(crate) fn record_waiter(&self, file: &Arc<T>) {
        if self.order == Order::Sequential {
            self.state.lock().line.record_waiter(file);
        }
    }

    /// Records that a run of `bytes` bytes was picked from a file. `pending`: number of the file's pending bytes,
    /// including this run.
    pub(crate) fn record_pick(&self, file: &Arc<T>, bytes: u64, pending: u64) {
        if self.order == Order::Sequential {
            self.state.lock().line.record_pick(file, bytes, pending);
        }
    }

    /// Ends the activity of a file from [`DrainQueue::pop`]: the file had nothing to write, or its job is completed.
    pub(crate) fn finish(&self) {
        let mut state = self.state.lock();
        assert!(state.active > 0, "more was completed than picked");
        state.active -= 1;
    }

    /// Returns whether a file is in line, being examined or being written.
    pub(crate) fn is_busy(&self) -> bool {
        let state = self.state.lock();
        state.active > 0 || !state.line.is_empty()
    }

    /// Returns whether a file is in line.
    pub(crate) fn has_files(&self) -> bool {
        !self.state.lock().line.is_empty()
    }

    /// Plans the next try of a file that failed.
    pub(crate) fn retry_at(&self, when: Instant, file: Arc<T>) {
        self.state.lock().retries.push((when, file));
    }

    /// Plans a check of the age of a file's data at `when`. Calls come approximately in the order of their times.
    ///
    /// Returns whether no other check was planned.
    pub(crate) fn check_age_at(&self, when: Instant, file: &Arc<T>) -> bool {
        let entry = (when, Arc::downgrade(file));
        let aging = &mut self.state.lock().aging;
        aging.push_back(entry);
        aging.len() == 1
    }

    /// Takes the files that are due by `now`: for a retry after a failure, or for a check of their age. Files that no
    /// longer exist are left out.
    pub(crate) fn take_due(&self, now: Instant) -> DueFiles<T> {
        let mut state = self.state.lock();
        let (due_retries, later_retries): (Vec<_>, Vec<_>) = std::mem::take(&mut state.retries)
            .into_iter()
            .partition(|(retry_at, _)| *retry_at <= now);
        state.retries = later_retries;
        let mut aged = Vec::new();
        while state
            .aging
            .front()
            .is_some_and(|(check_at, _)| *check_at <= now)
        {
            let file = state.aging.pop_front().and_then(|(_, weak)| weak.upgrade());
            aged.extend(file);
        }
        let retries = due_retries.into_iter().map(|(_, file)| file).collect();
        DueFiles { retries, aged }
    }

    /// Returns the time at which the next file is due for a retry or an age check.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        let state = self.state.lock();
        let next_age_check = state.aging.front().map(|(check_at, _)| *check_at);
        state.next_retry().into_iter().chain(next_age_check).min()
    }

    /// Replaces the recorded time at which the oldest pending byte of a file was written. A time is `None` if the file
    /// has no pending bytes. `old_time` must be the recorded one.
    pub(crate) fn replace_oldest(
        &self,
        file: &Arc<T>,
        old_time: Option<Instant>,
        new_time: Option<Instant>,
    ) {
        let address = Arc::as_ptr(file) as usize;
        let mut state = self.state.lock();
        if let Some(old_time) = old_time {
            let was_known = state.oldest.remove(&(old_time, address));
            debug_assert!(was_known, "the age of a file was not known");
        }
        if let Some(new_time) = new_time {
            state.oldest.insert((new_time, address));
        }
    }

    /// Returns the status figures of the queue.
    pub(crate) fn figures(&self) -> QueueFigures<T> {
        let state = self.state.lock();
        let now = Instant::now();
        QueueFigures {
            files: state.line.len(),
            turn: state.line.turn(),
            active: state.active,
            retry_in: state
                .next_retry()
                .map(|retry_at| retry_at.saturating_duration_since(now)),
            oldest: state.oldest.first().map(|(written, _)| *written),
        }
    }

    /// Returns how often a file is in line.
    pub(crate) fn count_in_line(&self, file: &Arc<T>) -> usize {
        self.state.lock().line.count(file)
    }

    /// Returns whether a try of this file is planned at `when`.
    pub(crate) fn has_retry(&self, when: Instant, file: &Arc<T>) -> bool {
        let state = self.state.lock();
        let is_retry_of_file =
            |(retry_at, known): &(Instant, Arc<T>)| *retry_at == when && Arc::ptr_eq(known, file);
        state.retries.iter().any(is_retry_of_file)
    }

    /// Returns the times of the oldest pending bytes, with the addresses of their files.
    pub(crate) fn oldest_of_files(&self) -> BTreeSet<(Instant, usize)> {
        self.state.lock().oldest.clone()
    }
}

impl<T> QueueState<T> {
    fn next_retry(&self) -> Option<Instant> {
        self.retries.iter().map(|(retry_at, _)| *retry_at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_taken_first_in_first_out_and_count_as_active_until_they_are_finished() {
        let queue = DrainQueue::new(Order::Interleaved);
        queue.push(Arc::new(1), false);
        queue.push(Arc::new(2), false);
        assert!(queue.is_busy());
        assert_eq!(queue.pop(false).as_deref(), Some(&1));
        assert_eq!(queue.pop(false).as_deref(), Some(&2));
        assert_eq!(queue.pop(false), None);
        assert_eq!(queue.figures().active, 2);
        queue.finish();
        queue.finish();
        assert!(!queue.is_busy());
    }

    #[test]
    #[should_panic(expected = "more was completed than picked")]
    fn nothing_is_finished_that_was_not_popped() {
        DrainQueue::<u32>::new(Order::Interleaved).finish();
    }

    #[test]
    fn a_file_is_due_at_its_time_and_not_before() {
        let queue = DrainQueue::new(Order::Interleaved);
        let now = Instant::now();
        let later = now + Duration::from_secs(60);
        let failed = Arc::new("failed");
        let old = Arc::new("old");
        queue.retry_at(now, Arc::clone(&failed));
        queue.retry_at(later, Arc::new("failed later"));
        queue.check_age_at(now, &old);
        assert!(queue.has_retry(now, &failed));
        assert_eq!(queue.next_due(), Some(now));
        let due = queue.take_due(now);
        assert_eq!(due.retries, [failed]);
        assert_eq!(due.aged, [old]);
        assert_eq!(queue.next_due(), Some(later));
        assert!(queue.take_due(now).retries.is_empty());
    }

    #[test]
    fn files_that_are_gone_do_not_age() {
        let queue = DrainQueue::new(Order::Interleaved);
        let now = Instant::now();
        queue.check_age_at(now, &Arc::new(1));
        assert!(queue.take_due(now).aged.is_empty());
    }

    #[test]
    fn the_oldest_byte_of_all_files_is_known() {
        let queue = DrainQueue::new(Order::Interleaved);
        let early = Instant::now();
        let late = early + Duration::from_secs(1);
        let one = Arc::new(1);
        let two = Arc::new(2);
        queue.replace_oldest(&one, None, Some(late));
        queue.replace_oldest(&two, None, Some(early));
        assert_eq!(queue.figures().oldest, Some(early));
        queue.replace_oldest(&two, Some(early), None);
        assert_eq!(queue.figures().oldest, Some(late));
        queue.replace_oldest(&one, Some(late), None);
        assert_eq!(queue.figures().oldest, None);
    }
}
