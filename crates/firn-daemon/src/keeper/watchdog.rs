//! The watchdog of firnd, the process that serves a mount: says when its supervisor, the keeper, pings it, and when it
//! is late and is to be killed.
//!
//! Invariant: a firnd is late only if it has not answered a ping for the whole limit. The keeper reads waiting answers
//! before it decides, so a firnd that answers is not killed even if the keeper itself was stopped.

use std::time::{Duration, Instant};

/// Number of pings in the time of the limit.
const PINGS_PER_LIMIT: u32 = 4;

/// The next action of the keeper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum WatchdogAction {
    /// Do nothing for this time.
    Wait(Duration),
    /// Ping firnd.
    Ping,
    /// Kill firnd, which did not answer in time.
    Kill,
}

/// The state of the pings of one firnd.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watchdog {
    limit: Duration,
    /// When firnd last answered.
    last_answer: Instant,
    /// When the first ping was sent since that answer; `None` if there was none.
    first_ping: Option<Instant>,
}

impl Watchdog {
    /// Returns a watchdog; `None` if the limit is 0.
    pub(super) fn start(limit: Duration, now: Instant) -> Option<Self> {
        (!limit.is_zero()).then_some(Self {
            limit,
            last_answer: now,
            first_ping: None,
        })
    }

    pub(super) fn record_answer(&mut self, now: Instant) {
        self.last_answer = now;
        self.first_ping = None;
    }

    /// Begins the time to an answer again, although none has come.
    pub(super) fn restart(&mut self, now: Instant) {
        self.record_answer(now);
    }

    pub(super) fn record_ping(&mut self, now: Instant) {
        self.first_ping = self.first_ping.or(Some(now));
    }

    /// Returns what is due at `now`.
    pub(super) fn next_action(&self, now: Instant) -> WatchdogAction {
        let (period_start, period, due_action) = match self.first_ping {
            None => (
                self.last_answer,
                self.limit / PINGS_PER_LIMIT,
                WatchdogAction::Ping,
            ),
            Some(first_ping) => (first_ping, self.limit, WatchdogAction::Kill),
        };
        let time_left = period.saturating_sub(now.duration_since(period_start));
        if time_left.is_zero() {
            return due_action;
        }
        WatchdogAction::Wait(time_left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_firnd_is_late_once_it_was_asked_and_silent_for_the_whole_limit() {
        let limit = Duration::from_secs(4);
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        assert!(Watchdog::start(Duration::ZERO, began).is_none());
        let mut watchdog = Watchdog::start(limit, began).unwrap();
        assert_eq!(
            watchdog.next_action(at(0)),
            WatchdogAction::Wait(limit / PINGS_PER_LIMIT)
        );
        // The ping is due, even if the keeper asks long after its time.
        assert_eq!(watchdog.next_action(at(100)), WatchdogAction::Ping);
        watchdog.record_ping(at(100));
        assert_eq!(
            watchdog.next_action(at(101)),
            WatchdogAction::Wait(Duration::from_secs(3))
        );
        watchdog.record_answer(at(103));
        assert_eq!(watchdog.next_action(at(104)), WatchdogAction::Ping);
        watchdog.record_ping(at(104));
        watchdog.record_ping(at(106));
        assert_eq!(watchdog.next_action(at(108)), WatchdogAction::Kill);
    }
}
