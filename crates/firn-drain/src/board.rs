//! Decides to which lane a thread writes next. One set of threads serves all lanes.
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

/// The writers of all lanes.
pub(crate) struct Board {
    thread_count: usize,
    /// Maximum number of writers of a lane.
    lane_writers_max: usize,
    state: Mutex<BoardState>,
}

struct BoardState {
    /// Number of threads that pick from a lane or write to it, for each lane.
    writers: Vec<usize>,
    /// The lane that was entered last.
    last: usize,
}

/// The lanes that a thread has searched since it last had a job.
pub(crate) struct Round {
    looked_at: Vec<bool>,
}

impl Round {
    pub(crate) fn new(lane_count: usize) -> Self {
        Self {
            looked_at: vec![false; lane_count],
        }
    }

    pub(crate) fn begin(&mut self) {
        self.looked_at.fill(false);
    }
}

impl Board {
    /// Creates a board for `thread_count` threads, of which at most `lane_writers_max` write to one lane at once.
    pub(crate) fn new(lane_count: usize, thread_count: usize, lane_writers_max: usize) -> Self {
        assert!(lane_count > 0 && thread_count > 0 && lane_writers_max > 0);
        Self {
            thread_count,
            lane_writers_max,
            state: Mutex::new(BoardState {
                writers: vec![0; lane_count],
                last: lane_count - 1,
            }),
        }
    }

    /// Enters the lane with the fewest writers, among the lanes that were not searched in this round. Returns `None` if
    /// no lane can be entered.
    pub(crate) fn enter_next(&self, round: &mut Round) -> Option<usize> {
        let mut state = self.state.lock();
        let count = state.writers.len();
        let first = state.last + 1;
        let lane = (0..count)
            .map(|step| (first + step) % count)
            .filter(|lane| !round.looked_at[*lane] && self.may_enter(&state.writers, *lane))
            // `min_by_key` returns the first of several equal lanes.
            .min_by_key(|lane| state.writers[*lane])?;
        round.looked_at[lane] = true;
        state.last = lane;
        state.writers[lane] += 1;
        Some(lane)
    }

    /// Enters a lane whose writers all hang.
    pub(crate) fn enter_hung(&self, lane: usize) {
        self.state.lock().writers[lane] += 1;
    }

    pub(crate) fn leave(&self, lane: usize) {
        let writers = &mut self.state.lock().writers[lane];
        assert!(*writers > 0, "a lane was left that was not entered");
        *writers -= 1;
    }

    fn may_enter(&self, writers: &[usize], lane: usize) -> bool {
        let used: usize = writers.iter().sum();
        let is_last = used + 1 >= self.thread_count;
        let is_kept = is_last && writers[lane] > 0 && writers.contains(&0);
        writers[lane] < self.lane_writers_max && !is_kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entered(board: &Board) -> Option<usize> {
        let lane_count = board.state.lock().writers.len();
        board.enter_next(&mut Round::new(lane_count))
    }

    #[test]
    fn lanes_are_entered_in_turn_and_the_one_with_fewest_writers_first() {
        let board = Board::new(3, 8, usize::MAX);
        let order: Vec<_> = (0..6).map(|_| entered(&board)).collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2].map(Some));
        board.leave(1);
        assert_eq!(entered(&board), Some(1));
    }

    #[test]
    fn a_lane_is_looked_at_once_in_a_round() {
        let board = Board::new(2, 4, usize::MAX);
        let mut round = Round::new(2);
        for expected in [Some(0), Some(1), None] {
            let lane = board.enter_next(&mut round);
            assert_eq!(lane, expected);
            lane.into_iter().for_each(|lane| board.leave(lane));
        }
        round.begin();
        assert_eq!(board.enter_next(&mut round), Some(0));
    }

    #[test]
    fn a_lane_has_no_more_writers_than_it_may() {
        let board = Board::new(2, 8, 1);
        assert_eq!(entered(&board), Some(0));
        assert_eq!(entered(&board), Some(1));
        assert_eq!(entered(&board), None);
        board.enter_hung(0);
        board.leave(0);
        assert_eq!(entered(&board), None);
        board.leave(0);
        assert_eq!(entered(&board), Some(0));
    }

    #[test]
    fn the_last_thread_is_for_a_lane_without_writers() {
        let board = Board::new(2, 3, usize::MAX);
        // Lane 1 has no work: the thread has searched it already.
        let mut round = Round::new(2);
        round.looked_at[1] = true;
        assert_eq!(board.enter_next(&mut round), Some(0));
        round.looked_at[0] = false;
        assert_eq!(board.enter_next(&mut round), Some(0));
        round.looked_at[0] = false;
        assert_eq!(board.enter_next(&mut round), None);
        round.begin();
        assert_eq!(board.enter_next(&mut round), Some(1));
    }

    #[test]
    fn a_single_lane_has_all_threads() {
        let board = Board::new(1, 2, usize::MAX);
        assert_eq!(entered(&board), Some(0));
        assert_eq!(entered(&board), Some(0));
        let only = Board::new(2, 1, usize::MAX);
        assert_eq!(entered(&only), Some(0));
    }
}
