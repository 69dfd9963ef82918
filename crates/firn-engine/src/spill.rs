//! Spilling: when memory is short, the oldest chunks move to the spill file on a local disk. A *chunk* is a fixed part
//! of the arena (the memory for written data); it can move once no writer fills it.
//!
//! A thread calls [`Room::spill_step`](crate::Room::spill_step) until it is idle. Moving begins when the memory in use
//! exceeds the upper threshold, and ends at the lower threshold, so that the disk gets long sequences of writes.
//!
//! If the disk fails, the chunks remain in memory, the status shows the failure, and the disk is tried again with
//! growing waits. Until a try succeeds, a writer that waits for space is treated as on a mount without a spill file.

mod step;

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::lock::{Mutex, RwLock};

use crate::retry::RETRY;

/// Result of a call of [`Room::spill_step`](crate::Room::spill_step).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpillStep {
    /// A chunk moved, or another one can be tried. Call again.
    More,
    /// There is no work for the time `retry`, or until the thread is woken.
    Idle {
        /// Time until a failed disk is tried again.
        retry: Option<Duration>,
    },
}

impl SpillStep {
    const IDLE: Self = Self::Idle { retry: None };
}

/// Callback that wakes the thread that moves chunks, because there may be work for it.
pub(crate) type Waker = Arc<dyn Fn() + Send + Sync>;

/// State of the spilling: whether chunks move now, and the last failure of the disk.
#[derive(Default)]
pub(crate) struct Spill {
    state: Mutex<SpillState>,
    waker: RwLock<Option<Waker>>,
}

/// State of the spilling, protected by a lock.
#[derive(Default)]
struct SpillState {
    /// Whether chunks move: the upper threshold was exceeded, and the lower one is not reached yet.
    active: bool,
    /// The failure of the last try, if it failed.
    failure: Option<SpillFailure>,
}

/// A failure of the disk.
struct SpillFailure {
    /// Number of failures in a row.
    count: u32,
    /// Time of the next try.
    retry_at: Instant,
}

/// The next try after a failure of the disk.
struct PlannedRetry {
    /// Number of failures in a row.
    failure_count: u32,
    /// Time until the try.
    wait: Duration,
}

impl Spill {
    fn set_waker(&self, waker: Waker) {
        *self.waker.write() = Some(waker);
    }

    /// Wakes the spilling thread, if there is one.
    fn wake(&self) {
        if let Some(wake) = &*self.waker.read() {
            wake();
        }
    }

    /// Returns whether the last try to spill failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.state.lock().failure.is_some()
    }

    /// Returns the result of a step in which no chunk (a unit of the arena's memory) moves to the disk. Returns `None`
    /// if a chunk must move now. `used` chunks are in memory; above `upper` moves begin, and at `lower` they end.
    fn step_without_move(&self, used: u32, upper: u32, lower: u32) -> Option<SpillStep> {
        let mut state = self.state.lock();
        if used <= lower {
            state.active = false;
        } else if used > upper {
            state.active = true;
        }
        if !state.active {
            return Some(SpillStep::IDLE);
        }
        if let Some(failure) = &state.failure {
            let time_left = failure.time_left();
            if !time_left.is_zero() {
                return Some(SpillStep::Idle {
                    retry: Some(time_left),
                });
            }
        }
        None
    }

    /// Records that a chunk moved, so that the disk works.
    fn record_success(&self) {
        self.state.lock().failure = None;
    }

    /// Records a failure of the disk, and plans the next try.
    fn record_failure(&self) -> PlannedRetry {
        let mut state = self.state.lock();
        let failure_count = state.failure.as_ref().map_or(0, |failure| failure.count) + 1;
        let wait = RETRY.after(failure_count);
        state.failure = Some(SpillFailure {
            count: failure_count,
            retry_at: Instant::now() + wait,
        });
        PlannedRetry {
            failure_count,
            wait,
        }
    }
}

impl SpillFailure {
    /// Returns the time until the next try, or 0 if it is due.
    fn time_left(&self) -> Duration {
        self.retry_at.saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_move_from_the_upper_threshold_down_to_the_lower_one() {
        let spill = Spill::default();
        assert_eq!(spill.step_without_move(7, 8, 4), Some(SpillStep::IDLE));
        assert_eq!(spill.step_without_move(9, 8, 4), None);
        assert_eq!(spill.step_without_move(5, 8, 4), None);
        assert_eq!(spill.step_without_move(4, 8, 4), Some(SpillStep::IDLE));
        assert_eq!(spill.step_without_move(5, 8, 4), Some(SpillStep::IDLE));
    }

    #[test]
    fn a_device_that_failed_is_tried_again_later_and_later() {
        let spill = Spill::default();
        let first_retry = spill.record_failure();
        assert_eq!(first_retry.failure_count, 1);
        assert!(spill.has_failed());
        assert!(matches!(
            spill.step_without_move(9, 8, 4),
            Some(SpillStep::Idle { retry: Some(_) })
        ));
        let second_retry = spill.record_failure();
        assert_eq!(second_retry.failure_count, 2);
        assert!(second_retry.wait > first_retry.wait);
        spill.record_success();
        assert!(!spill.has_failed());
        assert_eq!(spill.step_without_move(9, 8, 4), None);
    }
}
