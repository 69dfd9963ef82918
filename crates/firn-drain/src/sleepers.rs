//! The place where threads without work sleep, and how they are woken.
//!
//! Promise: a wake between [`Sleepers::ticket`] and [`Sleepers::sleep`] is never lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A count of wakes. It shows a thread whether a wake came since the thread looked for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(u64);

/// Threads that sleep until there is work.
#[derive(Default)]
pub(crate) struct Sleepers {
    state: Mutex<SleepersState>,
    woken: Condvar,
    stopping: AtomicBool,
}

#[derive(Default)]
struct SleepersState {
    wakes: u64,
    sleepers: usize,
}

impl Sleepers {
    /// Returns a ticket. A thread must call this before it looks for work.
    pub(crate) fn ticket(&self) -> Ticket {
        Ticket(self.state.lock().wakes)
    }

    /// Sleeps until a wake that is newer than `ticket`, at most for `at_most`.
    pub(crate) fn sleep(&self, ticket: Ticket, at_most: Option<Duration>) {
        let mut state = self.state.lock();
        if state.wakes != ticket.0 || self.is_stopping() {
            return;
        }
        state.sleepers += 1;
        match at_most {
            Some(wait) => drop(self.woken.wait_for(&mut state, wait)),
            None => self.woken.wait(&mut state),
        }
        state.sleepers -= 1;
    }

    /// Wakes one sleeper, because there may be work.
    ///
    /// A thread that finds work wakes the next thread. A burst of work therefore wakes as many threads as it keeps
    /// busy, and a single job wakes only one.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.wakes += 1;
        if state.sleepers > 0 {
            self.woken.notify_one();
        }
    }

    /// Wakes all sleepers. From now on no thread sleeps.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.wakes += 1;
        self.stopping.store(true, Ordering::Release);
        self.woken.notify_all();
    }

    /// Returns whether [`Sleepers::stop`] was called.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_after_the_ticket_is_not_slept_over() {
        let sleepers = Sleepers::default();
        let ticket = sleepers.ticket();
        sleepers.wake();
        sleepers.sleep(ticket, None);
    }

    #[test]
    fn sleep_ends_after_its_bound() {
        let sleepers = Sleepers::default();
        sleepers.sleep(sleepers.ticket(), Some(Duration::from_millis(1)));
        assert_eq!(sleepers.state.lock().sleepers, 0);
    }

    #[test]
    fn stop_wakes_everyone() {
        let sleepers = Sleepers::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !sleepers.is_stopping() {
                        sleepers.sleep(sleepers.ticket(), None);
                    }
                });
            }
            sleepers.stop();
        });
    }
}
