//! Threads without work: how they sleep, and how they are woken.
//!
//! Promise: a wake between [`IdleThreads::wake_count`] and [`IdleThreads::sleep`] is never lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Number of wakes so far. It shows a thread whether a wake came since the thread looked for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WakeCount(u64);

/// Threads that sleep until there is work.
#[derive(Default)]
pub(crate) struct IdleThreads {
    state: Mutex<IdleThreadsState>,
    woken: Condvar,
    stopping: AtomicBool,
}

#[derive(Default)]
struct IdleThreadsState {
    /// Number of wakes so far.
    wakes: u64,
    /// Number of threads that sleep.
    sleeping: usize,
}

impl IdleThreads {
    /// Returns the number of wakes so far. A thread must call this before it looks for work.
    pub(crate) fn wake_count(&self) -> WakeCount {
        WakeCount(self.state.lock().wakes)
    }

    /// Sleeps until a wake that is newer than `wake_count`, at most for `time_max`.
    pub(crate) fn sleep(&self, wake_count: WakeCount, time_max: Option<Duration>) {
        let mut state = self.state.lock();
        if state.wakes != wake_count.0 || self.is_stopping() {
            return;
        }
        state.sleeping += 1;
        match time_max {
            Some(time_max) => drop(self.woken.wait_for(&mut state, time_max)),
            None => self.woken.wait(&mut state),
        }
        state.sleeping -= 1;
    }

    /// Wakes one sleeper, because there may be work.
    ///
    /// A thread that finds work wakes the next thread. A burst of work therefore wakes as many threads as it keeps
    /// busy, and a single job wakes only one.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.wakes += 1;
        if state.sleeping > 0 {
            self.woken.notify_one();
        }
    }

    /// Wakes all sleeping threads. From now on no thread sleeps.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.wakes += 1;
        self.stopping.store(true, Ordering::Release);
        self.woken.notify_all();
    }

    /// Returns whether [`IdleThreads::stop`] was called.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_after_the_ticket_is_not_slept_over() {
        let idle_threads = IdleThreads::default();
        let wake_count = idle_threads.wake_count();
        idle_threads.wake();
        idle_threads.sleep(wake_count, None);
    }

    #[test]
    fn sleep_ends_after_its_bound() {
        let idle_threads = IdleThreads::default();
        idle_threads.sleep(idle_threads.wake_count(), Some(Duration::from_millis(1)));
        assert_eq!(idle_threads.state.lock().sleeping, 0);
    }

    #[test]
    fn stop_wakes_everyone() {
        let idle_threads = IdleThreads::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !idle_threads.is_stopping() {
                        idle_threads.sleep(idle_threads.wake_count(), None);
                    }
                });
            }
            idle_threads.stop();
        });
    }
}
