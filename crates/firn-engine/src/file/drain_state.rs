//! How far the drain of a file is: what is asked for, what is under way, what failed, and its waiters.
//!
//! Invariants
//! * Ranges in flight do not overlap: two writes to the same bytes of the backing never race. The range of a job whose
//!   parts are apart is from the first to the last of them.
//! * While the file's backing is used exclusively (`exclusive`), nothing is in flight.
//! * `queued` is set while the file stands in the queue of its lane.

use std::mem::take;
use std::ops::Range;
use std::time::Instant;

use firn_backing::Errno;
use thin_vec::ThinVec;

use crate::Done;
use crate::retry::RETRY;

/// A drain of this file failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub errno: Errno,
    /// A write, close or fsync has returned the error.
    is_reported: bool,
    /// How often in a row.
    pub count: u32,
    pub retry_at: Instant,
}

pub(crate) struct Waiter {
    /// Waits for all extents up to this sequence.
    pub until: u64,
    pub done: Done,
}

/// The drain part of a file's state.
#[derive(Default)]
pub(crate) struct DrainState {
    in_flight: ThinVec<Range<u64>>,
    waiters: ThinVec<Waiter>,
    /// Few files have one.
    failure: Option<Box<Failure>>,
    /// Drain extents up to this sequence, however small.
    force_to: u64,
    /// Bytes written since the file was queued last for a run that is worth a write.
    fresh_bytes: u64,
    /// Where the next pick looks first.
    cursor: u64,
    /// When the oldest pending byte was written, about.
    oldest: Option<Instant>,
    queued: bool,
    /// The queue of the lane looks at the age of the file's data.
    ages: bool,
    /// A truncation or the like has the backing file for itself.
    exclusive: bool,
    /// The time of the last write is being set in the backing.
    sets_time: bool,
    /// Counts what begins or ends that changes the backing file, but for its time.
    backing_changes: u32,
}

impl DrainState {
    // ---- the queue -----------------------------------------------------------------------------

    pub(crate) fn is_queued(&self) -> bool {
        self.queued
    }

    /// The file was put into the queue, or taken from it.
    pub(crate) fn set_queued(&mut self, queued: bool) {
        assert_ne!(self.queued, queued, "the queue and the file disagree");
        self.queued = queued;
    }

    /// Notes that the queue looks at the file's age from here on. False where it does already.
    pub(crate) fn begin_aging(&mut self) -> bool {
        !std::mem::replace(&mut self.ages, true)
    }

    pub(crate) fn end_aging(&mut self) {
        self.ages = false;
    }

    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.oldest
    }

    /// Changes when the oldest pending byte was written; returns what it was.
    pub(crate) fn replace_oldest(&mut self, at: Option<Instant>) -> Option<Instant> {
        std::mem::replace(&mut self.oldest, at)
    }

    // ---- what is asked for ---------------------------------------------------------------------

    /// Drains what has a sequence up to this one, however little it is.
    pub(crate) fn force_up_to(&mut self, sequence: u64) {
        self.force_to = self.force_to.max(sequence);
    }

    pub(crate) fn is_forced(&self, sequence: u64) -> bool {
        sequence <= self.force_to
    }

    /// Counts bytes that were just written; whether there are `enough` since it was last so.
    pub(crate) fn add_fresh_bytes(&mut self, bytes: u64, enough: u64) -> bool {
        self.fresh_bytes += bytes;
        let is_enough = self.fresh_bytes >= enough;
        if is_enough {
            self.fresh_bytes = 0;
        }
        is_enough
    }

    /// Nothing is pending: what was asked for is done, and what failed has succeeded.
    pub(crate) fn reset(&mut self) {
        self.fresh_bytes = 0;
        self.force_to = 0;
        self.failure = None;
    }

    // ---- what is under way ---------------------------------------------------------------------

    /// Where the next pick looks first.
    pub(crate) fn cursor(&self) -> u64 {
        self.cursor
    }

    pub(crate) fn writes_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    pub(crate) fn begin_write(&mut self, range: Range<u64>) {
        debug_assert!(
            !self.exclusive,
            "a drain while the file is used exclusively"
        );
        debug_assert!(!self.is_in_flight(&range), "two writes to the same bytes");
        self.cursor = range.end;
        self.in_flight.push(range);
        self.backing_changes = self.backing_changes.wrapping_add(1);
    }

    pub(crate) fn end_write(&mut self, range: &Range<u64>) {
        let before = self.in_flight.len();
        self.in_flight.retain(|known| known != range);
        debug_assert_eq!(
            self.in_flight.len() + 1,
            before,
            "a write that was not picked"
        );
    }

    pub(crate) fn is_in_flight(&self, range: &Range<u64>) -> bool {
        let overlaps = |known: &Range<u64>| known.start < range.end && range.start < known.end;
        self.in_flight.iter().any(overlaps)
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.exclusive
    }

    pub(crate) fn set_exclusive(&mut self, exclusive: bool) {
        debug_assert_ne!(
            self.exclusive, exclusive,
            "exclusive use begins or ends twice"
        );
        debug_assert!(self.in_flight.is_empty(), "exclusive use beside a drain");
        self.exclusive = exclusive;
        self.backing_changes = self.backing_changes.wrapping_add(1);
    }

    /// Another number than before once something has begun, or a truncation or the like has ended, that changes the backing
    /// file.
    pub(crate) fn backing_changes(&self) -> u32 {
        self.backing_changes
    }

    pub(crate) fn sets_time(&self) -> bool {
        self.sets_time
    }

    /// Setting the time of the last write in the backing begins, or ends.
    pub(crate) fn set_sets_time(&mut self, sets_time: bool) {
        self.sets_time = sets_time;
    }

    /// Whether nothing uses the backing file, by a write, exclusively, or for its time.
    pub(crate) fn is_idle(&self) -> bool {
        !self.exclusive && !self.sets_time && self.in_flight.is_empty()
    }

    // ---- failures --------------------------------------------------------------------------------

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure.as_deref().copied()
    }

    /// Whether the file waits for its next try.
    pub(crate) fn waits_for_retry(&self, now: Instant) -> bool {
        self.failure().is_some_and(|failure| failure.retry_at > now)
    }

    /// A write failed. Returns the failure, and whether it is the first of its try: others wait for the same next one.
    pub(crate) fn fail(&mut self, errno: Errno, now: Instant) -> (Failure, bool) {
        let is_first = !self.waits_for_retry(now);
        let failure = match self.failure() {
            Some(earlier) if !is_first => Failure {
                errno,
                is_reported: false,
                ..earlier
            },
            earlier => {
                let count = earlier.map_or(0, |failure| failure.count) + 1;
                Failure {
                    errno,
                    is_reported: false,
                    count,
                    retry_at: now + RETRY.after(count),
                }
            }
        };
        self.failure = Some(Box::new(failure));
        (failure, is_first)
    }

    /// A caller waits: the next try is now, not after the back-off.
    pub(crate) fn retry_now(&mut self) {
        if let Some(failure) = &mut self.failure {
            failure.retry_at = Instant::now();
        }
    }

    /// A failure that no program was told yet; it counts as reported now.
    pub(crate) fn take_unreported_failure(&mut self) -> Option<Errno> {
        let failure = self.failure.as_mut().filter(|known| !known.is_reported)?;
        failure.is_reported = true;
        Some(failure.errno)
    }

    // ---- waiters ---------------------------------------------------------------------------------

    pub(crate) fn add_waiter(&mut self, waiter: Waiter) {
        self.waiters.push(waiter);
    }

    /// Takes those whose data is in the backing. `oldest_sequence`: of what is pending.
    pub(crate) fn take_satisfied(&mut self, oldest_sequence: Option<u64>) -> ThinVec<Waiter> {
        if self.waiters.is_empty() {
            return ThinVec::new();
        }
        let oldest = oldest_sequence.unwrap_or(u64::MAX);
        let (satisfied, waiting) = take(&mut self.waiters)
            .into_iter()
            .partition(|waiter| oldest > waiter.until);
        self.waiters = waiting;
        satisfied
    }

    /// Takes all, to be told of the failure.
    pub(crate) fn take_failed(&mut self) -> ThinVec<Waiter> {
        let failed = take(&mut self.waiters);
        if let Some(failure) = &mut self.failure {
            failure.is_reported |= !failed.is_empty();
        }
        failed
    }

    pub(crate) fn waiter_count(&self) -> usize {
        self.waiters.len()
    }

    /// Whether there is a waiter.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.waiters.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn waiter(until: u64) -> Waiter {
        Waiter {
            until,
            done: Box::new(|_| {}),
        }
    }

    #[test]
    fn waiters_are_satisfied_once_nothing_older_is_pending() {
        let mut drain = DrainState::default();
        drain.add_waiter(waiter(5));
        drain.add_waiter(waiter(9));
        assert!(drain.take_satisfied(Some(5)).is_empty());
        assert_eq!(drain.take_satisfied(Some(6)).len(), 1);
        assert!(drain.has_waiters());
        assert_eq!(drain.take_satisfied(None).len(), 1);
        assert!(!drain.has_waiters());
    }

    #[test]
    fn failures_of_one_try_wait_for_the_same_next_one() {
        let mut drain = DrainState::default();
        let now = Instant::now();
        let (first, is_first) = drain.fail(Errno::IO, now);
        assert!(is_first);
        let (second, is_first) = drain.fail(Errno::NOSPC, now);
        assert!(!is_first);
        assert_eq!(second.errno, Errno::NOSPC);
        assert_eq!((second.count, second.retry_at), (1, first.retry_at));
        let (third, is_first) = drain.fail(Errno::IO, first.retry_at);
        assert!(is_first);
        assert_eq!(third.count, 2);
        assert!(third.retry_at - first.retry_at > Duration::ZERO);
    }

    #[test]
    fn a_failure_is_reported_once() {
        let mut drain = DrainState::default();
        drain.fail(Errno::IO, Instant::now());
        assert_eq!(drain.take_unreported_failure(), Some(Errno::IO));
        assert_eq!(drain.take_unreported_failure(), None);
        drain.fail(Errno::NOSPC, Instant::now());
        drain.add_waiter(waiter(1));
        assert_eq!(drain.take_failed().len(), 1);
        assert_eq!(drain.take_unreported_failure(), None);
        drain.reset();
        assert!(drain.failure().is_none());
    }

    #[test]
    fn ranges_in_flight_are_known_until_they_end() {
        let mut drain = DrainState::default();
        drain.begin_write(10..20);
        assert!(drain.is_in_flight(&(19..30)));
        assert!(!drain.is_in_flight(&(20..30)));
        assert!(!drain.is_idle());
        drain.end_write(&(10..20));
        assert!(drain.is_idle());
        assert_eq!(drain.cursor(), 20);
    }

    #[test]
    fn enough_fresh_bytes_are_told_once() {
        let mut drain = DrainState::default();
        assert!(!drain.add_fresh_bytes(60, 100));
        assert!(drain.add_fresh_bytes(60, 100));
        assert!(!drain.add_fresh_bytes(60, 100));
    }
}
