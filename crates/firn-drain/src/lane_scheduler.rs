//! The scheduler of lanes: decides to which lane (one I/O server) a thread writes next. All threads serve all lanes.
//!
//! Promises
//! * The next free thread goes to a lane that has work and no writer. If there are several such lanes, they take
//!   turns.
//! * If there are several lanes, the last free thread is reserved for a lane without writers. A lane whose writes
//!   hang therefore always leaves one thread to the others.
//!
//! Invariants
//! * A lane has at most `lane-writers` writers, not counting those that replace hanging ones.
//! * Each thread that entered a lane leaves it.

use parking_lot::Mutex;

/// Counts the writers of each lane, and assigns free threads to lanes.
pub(crate) struct LaneScheduler {
    thread_count: usize,
    /// Maximum number of writers of a lane.
    lane_writers_max: usize,
    state: Mutex<SchedulerState>,
}

struct SchedulerState {
    /// Number of threads that pick from a lane or write to it, for each lane.
    writers: Vec<usize>,
    /// The lane that was entered last.
    last_lane: usize,
}

/// The lanes that a thread has searched since it last had a job.
pub(crate) struct LaneSearch {
    searched: Vec<bool>,
}

impl LaneSearch {
    pub(crate) fn new(lane_count: usize) -> Self {
        Self {
            searched: vec![false; lane_count],
        }
    }

    /// Begins a new search, in which no lane was searched yet.
    pub(crate) fn restart(&mut self) {
        self.searched.fill(false);
    }
}

impl LaneScheduler {
    /// Creates a scheduler for `thread_count` threads, of which at most `lane_writers_max` write to one lane at once.
    pub(crate) fn new(lane_count: usize, thread_count: usize, lane_writers_max: usize) -> Self {
        assert!(lane_count > 0 && thread_count > 0 && lane_writers_max > 0);
        Self {
            thread_count,
            lane_writers_max,
            state: Mutex::new(SchedulerState {
                writers: vec![0; lane_count],
                last_lane: lane_count - 1,
            }),
        }
    }

    /// Enters the lane with the fewest writers, among the lanes that were not searched in `search`. Returns `None` if
    /// no lane can be entered.
    pub(crate) fn enter_next(&self, search: &mut LaneSearch) -> Option<usize> {
        let mut state = self.state.lock();
        let lane_count = state.writers.len();
        let first_lane = state.last_lane + 1;
        let lane = (0..lane_count)
            .map(|step| (first_lane + step) % lane_count)
            .filter(|lane| !search.searched[*lane] && self.can_enter(&state.writers, *lane))
            // `min_by_key` returns the first of several equal lanes.
            .min_by_key(|lane| state.writers[*lane])?;
        search.searched[lane] = true;
        state.last_lane = lane;
        state.writers[lane] += 1;
        Some(lane)
    }

    /// Enters a lane whose writers all hang, with a thread that is started for it. No limit applies.
    pub(crate) fn enter_hung(&self, lane: usize) {
        self.state.lock().writers[lane] += 1;
    }

    /// Leaves a lane that the thread has entered.
    pub(crate) fn leave(&self, lane: usize) {
        let writers = &mut self.state.lock().writers[lane];
        assert!(*writers > 0, "a lane was left that was not entered");
        *writers -= 1;
    }

    /// Returns whether one more thread may enter a lane. `writers` is the number of threads in each lane. The last free
    /// thread may not enter a lane with writers while another lane has none.
    fn can_enter(&self, writers: &[usize], lane: usize) -> bool {
        let busy_threads: usize = writers.iter().sum();
        let is_last_thread = busy_threads + 1 >= self.thread_count;
        let is_reserved_for_others = is_last_thread && writers[lane] > 0 && writers.contains(&0);
        writers[lane] < self.lane_writers_max && !is_reserved_for_others
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entered(lane_scheduler: &LaneScheduler) -> Option<usize> {
        let lane_count = lane_scheduler.state.lock().writers.len();
        lane_scheduler.enter_next(&mut LaneSearch::new(lane_count))
    }

    #[test]
    fn lanes_are_entered_in_turn_and_the_one_with_fewest_writers_first() {
        let lane_scheduler = LaneScheduler::new(3, 8, usize::MAX);
        let order: Vec<_> = (0..6).map(|_| entered(&lane_scheduler)).collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2].map(Some));
        lane_scheduler.leave(1);
        assert_eq!(entered(&lane_scheduler), Some(1));
    }

    #[test]
    fn a_lane_is_searched_once() {
        let lane_scheduler = LaneScheduler::new(2, 4, usize::MAX);
        let mut search = LaneSearch::new(2);
        for expected in [Some(0), Some(1), None] {
            let lane = lane_scheduler.enter_next(&mut search);
            assert_eq!(lane, expected);
            lane.into_iter().for_each(|lane| lane_scheduler.leave(lane));
        }
        search.restart();
        assert_eq!(lane_scheduler.enter_next(&mut search), Some(0));
    }

    #[test]
    fn a_lane_has_no_more_writers_than_it_may() {
        let lane_scheduler = LaneScheduler::new(2, 8, 1);
        assert_eq!(entered(&lane_scheduler), Some(0));
        assert_eq!(entered(&lane_scheduler), Some(1));
        assert_eq!(entered(&lane_scheduler), None);
        lane_scheduler.enter_hung(0);
        lane_scheduler.leave(0);
        assert_eq!(entered(&lane_scheduler), None);
        lane_scheduler.leave(0);
        assert_eq!(entered(&lane_scheduler), Some(0));
    }

    #[test]
    fn the_last_thread_is_for_a_lane_without_writers() {
        let lane_scheduler = LaneScheduler::new(2, 3, usize::MAX);
        // Lane 1 has no work: the thread has searched it already.
        let mut search = LaneSearch::new(2);
        search.searched[1] = true;
        assert_eq!(lane_scheduler.enter_next(&mut search), Some(0));
        search.searched[0] = false;
        assert_eq!(lane_scheduler.enter_next(&mut search), Some(0));
        search.searched[0] = false;
        assert_eq!(lane_scheduler.enter_next(&mut search), None);
        search.restart();
        assert_eq!(lane_scheduler.enter_next(&mut search), Some(1));
    }

    #[test]
    fn a_single_lane_has_all_threads() {
        let lane_scheduler = LaneScheduler::new(1, 2, usize::MAX);
        assert_eq!(entered(&lane_scheduler), Some(0));
        assert_eq!(entered(&lane_scheduler), Some(0));
        let only = LaneScheduler::new(2, 1, usize::MAX);
        assert_eq!(entered(&only), Some(0));
    }
}
