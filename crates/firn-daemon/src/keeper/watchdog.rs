//! Whether a firnd goes on: the keeper asks, and a firnd that does not answer for too long is killed.
//!
//! Invariant: a firnd is late only if it did not answer for the whole limit while it could be asked. What it said before this
//! process was stopped itself is read first.

use std::time::{Duration, Instant};

/// Questions in the time of the limit.
const QUESTIONS: u32 = 4;

/// What is to be done now.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Nothing before this time is over.
    Wait(Duration),
    /// It is asked.
    Ask,
    /// It did not answer.
    Late,
}

/// The questions to one firnd.
#[derive(Clone, Copy, Debug)]
pub(super) struct Watchdog {
    limit: Duration,
    /// When it last said that it goes on.
    heard: Instant,
    /// When it was last asked since.
    asked: Option<Instant>,
}

impl Watchdog {
    /// None where the limit is 0.
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
