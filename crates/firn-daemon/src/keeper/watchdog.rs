//! The watchdog of a firnd: says when the keeper pings firnd, and when firnd is late and is to be killed.
//!
//! Invariant: a firnd is late only if it has not answered a ping for the whole limit. The keeper reads waiting answers
//! before it judges, so a keeper that was stopped itself blames no firnd.

use std::time::{Duration, Instant};

/// Number of pings in the time of the limit.
const QUESTIONS: u32 = 4;

/// What the keeper is to do now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Nothing for this time.
    Wait(Duration),
    /// Ping firnd.
    Ask,
    /// Kill firnd, which did not answer in time.
    Late,
}

/// The pings of one firnd.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watchdog {
    limit: Duration,
    /// When firnd last answered.
    heard: Instant,
    /// When the first ping was sent since that answer; `None` if there was none.
    asked: Option<Instant>,
}

impl Watchdog {
    /// Returns a watchdog; `None` if the limit is 0.
    pub(super) fn begin(limit: Duration, now: Instant) -> Option<Self> {
        (!limit.is_zero()).then_some(Self {
            limit,
            heard: now,
            asked: None,
        })
    }

    pub(super) fn note_answer(&mut self, now: Instant) {
        self.heard = now;
        self.asked = None;
    }

    pub(super) fn note_question(&mut self, now: Instant) {
        self.asked = self.asked.or(Some(now));
    }

    /// Returns what is due at `now`.
    pub(super) fn judge(&self, now: Instant) -> Due {
        let (since, time) = match self.asked {
            None => (self.heard, self.limit / QUESTIONS),
            Some(asked) => (asked, self.limit),
        };
        let left = time.saturating_sub(now.duration_since(since));
        if !left.is_zero() {
            return Due::Wait(left);
        }
        self.asked.map_or(Due::Ask, |_| Due::Late)
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
        assert!(Watchdog::begin(Duration::ZERO, began).is_none());
        let mut watchdog = Watchdog::begin(limit, began).unwrap();
        assert_eq!(watchdog.judge(at(0)), Due::Wait(limit / QUESTIONS));
        // However late the question itself is.
        assert_eq!(watchdog.judge(at(100)), Due::Ask);
        watchdog.note_question(at(100));
        assert_eq!(watchdog.judge(at(101)), Due::Wait(Duration::from_secs(3)));
        watchdog.note_answer(at(103));
        assert_eq!(watchdog.judge(at(104)), Due::Ask);
        watchdog.note_question(at(104));
        watchdog.note_question(at(106));
        assert_eq!(watchdog.judge(at(108)), Due::Late);
    }
}
