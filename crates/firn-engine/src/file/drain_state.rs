//! State of a file's drain, which writes its pending bytes to the backing: requests, writes under way, the last
//! failure, and callers that wait.
//!
//! Terms
//! * A drain is *forced* for bytes that must go to the backing however few they are.
//! * A *waiter* is a callback that runs when certain bytes are in the backing.
//! * *Exclusive use* is a truncation or similar change during which no drain may write to the backing file.
//!
//! Invariants
//! * Ranges in flight do not overlap, so two writes to the same bytes of the backing never race. If the parts of a job
//!   are distant, its range is from the first part to the end of the last.
//! * During exclusive use (`exclusive`) nothing is in flight.
//! * `queued` is set while the file stands in the queue of its lane (one I/O server).

use std::mem::take;
use std::ops::Range;
use std::time::Instant;

use firn_backing::Errno;
use thin_vec::ThinVec;

use crate::Done;
use crate::retry::RETRY;

/// Failure of the last drain of this file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    /// Error of the backing, or of the spill file.
    pub errno: Errno,
    /// Whether a write, close or fsync has returned the error.
    is_reported: bool,
    /// Number of failed tries in a row.
    pub tries: u32,
    /// Time of the next try.
    pub retry_at: Instant,
}

/// Result of [`DrainState::record_failure`].
pub(crate) struct RecordedFailure {
    pub failure: Failure,
    /// Whether this failure must plan the next attempt: no write of the same attempt has failed before.
    pub must_plan_attempt: bool,
}

/// A caller that waits for a drain.
pub(crate) struct Waiter {
    /// Highest sequence to wait for: all bytes of appends up to this number must be in the backing.
    pub until_sequence: u64,
    /// Called with the result.
    pub done: Done,
}

/// The drain part of a file's state.
#[derive(Default)]
pub(crate) struct DrainState {
    /// Ranges of the file that are being written to the backing.
    in_flight: ThinVec<Range<u64>>,
    /// Callers that wait for a drain.
    waiters: ThinVec<Waiter>,
    /// The failure to report and to retry; boxed because few files have a failure.
    failure: Option<Box<Failure>>,
    /// Highest sequence of forced extents, which are drained however small they are.
    force_to: u64,
    /// Bytes that programs have written since the file was last queued for enough new bytes
    /// ([`DrainState::add_fresh_bytes`]).
    fresh_bytes: u64,
    /// File offset where the next pick begins to search.
    cursor: u64,
    /// Approximate time at which the oldest pending byte was written.
    oldest: Option<Instant>,
    /// Whether the file stands in the queue of its lane.
    queued: bool,
    /// Whether the queue of the lane has planned a check of the age of the file's data.
    has_age_check: bool,
    /// Whether a truncation or similar change uses the backing file exclusively.
    exclusive: bool,
    /// Whether the time of the last write is being set in the backing.
    is_setting_time: bool,
    /// Counter of starts of writes, and of starts and ends of exclusive use. A reader detects a change of the backing
    /// file by a change of this counter.
    backing_changes: u32,
}

impl DrainState {
    // ---- the queue -----------------------------------------------------------------------------

    pub(crate) fn is_queued(&self) -> bool {
        self.queued
    }

    /// Records that the file was put into the queue, or taken from it.
    pub(crate) fn set_queued(&mut self, queued: bool) {
        assert_ne!(self.queued, queued, "the queue and the file disagree");
        self.queued = queued;
    }

    /// Records that a check of the file's age is planned. Returns false if a check was already planned.
    pub(crate) fn start_age_check(&mut self) -> bool {
        !std::mem::replace(&mut self.has_age_check, true)
    }

    /// Records that the queue's check of the file's age was made.
    pub(crate) fn end_age_check(&mut self) {
        self.has_age_check = false;
    }

    pub(crate) fn oldest(&self) -> Option<Instant> {
        self.oldest
    }

    /// Replaces the time at which the oldest pending byte was written. Returns the earlier value.
    pub(crate) fn replace_oldest(&mut self, at: Option<Instant>) -> Option<Instant> {
        std::mem::replace(&mut self.oldest, at)
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Forces all extents with a sequence up to this one.
    pub(crate) fn force_up_to(&mut self, sequence: u64) {
        self.force_to = self.force_to.max(sequence);
    }

    pub(crate) fn is_forced(&self, sequence: u64) -> bool {
        sequence <= self.force_to
    }

    /// Counts bytes that were just written. Returns whether at least `threshold` bytes were written since this function
    /// last returned true.
    pub(crate) fn add_fresh_bytes(&mut self, bytes: u64, threshold: u64) -> bool {
        self.fresh_bytes += bytes;
        let is_enough = self.fresh_bytes >= threshold;
        if is_enough {
            self.fresh_bytes = 0;
        }
        is_enough
    }

    /// Clears requests and failure, because nothing is pending any more.
    pub(crate) fn clear_requests(&mut self) {
        self.fresh_bytes = 0;
        self.force_to = 0;
        self.failure = None;
    }

    // ---- writes under way ----------------------------------------------------------------------

    /// Returns the file offset where the next pick begins to search.
    pub(crate) fn cursor(&self) -> u64 {
        self.cursor
    }

    pub(crate) fn writes_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Records that a write to the backing begins.
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

    /// Records the end of a write that [`DrainState::begin_write`] recorded.
    pub(crate) fn end_write(&mut self, range: &Range<u64>) {
        let previous_count = self.in_flight.len();
        self.in_flight.retain(|write| write != range);
        debug_assert_eq!(
            self.in_flight.len() + 1,
            previous_count,
            "a write that was not picked"
        );
    }

    /// Returns whether a write to any byte of this range is under way.
    pub(crate) fn is_in_flight(&self, range: &Range<u64>) -> bool {
        let overlaps = |write: &Range<u64>| write.start < range.end && range.start < write.end;
        self.in_flight.iter().any(overlaps)
    }

    pub(crate) fn is_exclusive(&self) -> bool {
        self.exclusive
    }

    /// Begins or ends exclusive use of the backing file.
    pub(crate) fn set_exclusive(&mut self, exclusive: bool) {
        debug_assert_ne!(
            self.exclusive, exclusive,
            "exclusive use begins or ends twice"
        );
        debug_assert!(self.in_flight.is_empty(), "exclusive use beside a drain");
        self.exclusive = exclusive;
        self.backing_changes = self.backing_changes.wrapping_add(1);
    }

    /// Returns a counter that has changed since an earlier call if meanwhile a write or an exclusive use began, or an
    /// exclusive use ended.
    pub(crate) fn backing_changes(&self) -> u32 {
        self.backing_changes
    }

    pub(crate) fn is_setting_time(&self) -> bool {
        self.is_setting_time
    }

    /// Records that setting the time of the last write in the backing begins or ends.
    pub(crate) fn set_setting_time(&mut self, is_setting_time: bool) {
        self.is_setting_time = is_setting_time;
    }

    /// Returns whether the backing file is unused: no write, no exclusive use and no setting of its time is under way.
    pub(crate) fn is_idle(&self) -> bool {
        !self.exclusive && !self.is_setting_time && self.in_flight.is_empty()
    }

    // ---- failures --------------------------------------------------------------------------------

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure.as_deref().copied()
    }

    /// Returns whether the file's drain failed and the time of the next try has not come.
    pub(crate) fn waits_for_retry(&self, now: Instant) -> bool {
        self.failure().is_some_and(|failure| failure.retry_at > now)
    }

    /// Records a failed write to the backing, and returns the failure with the time of the next attempt. A write that
    /// fails before that time belongs to the same attempt, so only the first failure plans the next one.
    pub(crate) fn record_failure(&mut self, errno: Errno, now: Instant) -> RecordedFailure {
        let is_same_attempt = self.waits_for_retry(now);
        let last_failure = self.failure();
        let (tries, retry_at) = match last_failure {
            Some(last) if is_same_attempt => (last.tries, last.retry_at),
            _ => {
                let tries = last_failure.map_or(0, |last| last.tries) + 1;
                (tries, now + RETRY.after(tries))
            }
        };
        let failure = Failure {
            errno,
            // A program gets this error too, even if it got the error of an earlier write of the attempt.
            is_reported: false,
            tries,
            retry_at,
        };
        self.failure = Some(Box::new(failure));
        RecordedFailure {
            failure,
            must_plan_attempt: !is_same_attempt,
        }
    }

    /// Makes the next try due now, because a caller waits.
    pub(crate) fn retry_now(&mut self) {
        if let Some(failure) = &mut self.failure {
            failure.retry_at = Instant::now();
        }
    }

    /// Takes the error of a failure that no program has got yet, and counts it as reported.
    pub(crate) fn take_unreported_failure(&mut self) -> Option<Errno> {
        let failure = self.failure.as_mut().filter(|known| !known.is_reported)?;
        failure.is_reported = true;
        Some(failure.errno)
    }

    // ---- waiters ---------------------------------------------------------------------------------

    pub(crate) fn add_waiter(&mut self, waiter: Waiter) {
        self.waiters.push(waiter);
    }

    /// Takes the callbacks that waited for bytes which are in the backing now. Each append has a sequence, and
    /// `oldest_sequence` is the lowest one of all pending bytes.
    pub(crate) fn take_satisfied_waiters(
        &mut self,
        oldest_sequence: Option<u64>,
    ) -> ThinVec<Waiter> {
        if self.waiters.is_empty() {
            return ThinVec::new();
        }
        // If nothing is pending, all waiters are satisfied.
        let oldest_sequence = oldest_sequence.unwrap_or(u64::MAX);
        let (satisfied, unsatisfied) = take(&mut self.waiters)
            .into_iter()
            .partition(|waiter| oldest_sequence > waiter.until_sequence);
        self.waiters = unsatisfied;
        satisfied
    }

    /// Takes all waiters, to which the caller reports the error. If there is a waiter, the failure counts as reported.
    pub(crate) fn take_failed_waiters(&mut self) -> ThinVec<Waiter> {
        let failed = take(&mut self.waiters);
        if let Some(failure) = &mut self.failure {
            failure.is_reported |= !failed.is_empty();
        }
        failed
    }

    pub(crate) fn waiter_count(&self) -> usize {
        self.waiters.len()
    }

    /// Returns whether there is a waiter.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.waiters.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiter(until_sequence: u64) -> Waiter {
        Waiter {
            until_sequence,
            done: Box::new(|_| {}),
        }
    }

    #[test]
    fn waiters_are_satisfied_once_nothing_older_is_pending() {
        let mut drain = DrainState::default();
        drain.add_waiter(waiter(5));
        drain.add_waiter(waiter(9));
        assert!(drain.take_satisfied_waiters(Some(5)).is_empty());
        assert_eq!(drain.take_satisfied_waiters(Some(6)).len(), 1);
        assert!(drain.has_waiters());
        assert_eq!(drain.take_satisfied_waiters(None).len(), 1);
        assert!(!drain.has_waiters());
    }

    #[test]
    fn failures_of_one_try_wait_for_the_same_next_one() {
        let mut drain = DrainState::default();
        let now = Instant::now();
        let first = drain.record_failure(Errno::IO, now);
        assert!(first.must_plan_attempt);
        let second = drain.record_failure(Errno::NOSPC, now);
        assert!(!second.must_plan_attempt);
        assert_eq!(second.failure.errno, Errno::NOSPC);
        let retry_at = first.failure.retry_at;
        assert_eq!(second.failure.tries, 1);
        assert_eq!(second.failure.retry_at, retry_at);
        let third = drain.record_failure(Errno::IO, retry_at);
        assert!(third.must_plan_attempt);
        assert_eq!(third.failure.tries, 2);
        assert!(third.failure.retry_at > retry_at);
    }

    #[test]
    fn a_failure_is_reported_once() {
        let mut drain = DrainState::default();
        drain.record_failure(Errno::IO, Instant::now());
        assert_eq!(drain.take_unreported_failure(), Some(Errno::IO));
        assert_eq!(drain.take_unreported_failure(), None);
        drain.record_failure(Errno::NOSPC, Instant::now());
        drain.add_waiter(waiter(1));
        assert_eq!(drain.take_failed_waiters().len(), 1);
        assert_eq!(drain.take_unreported_failure(), None);
        drain.clear_requests();
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
    fn enough_fresh_bytes_are_reported_once() {
        let mut drain = DrainState::default();
        assert!(!drain.add_fresh_bytes(60, 100));
        assert!(drain.add_fresh_bytes(60, 100));
        assert!(!drain.add_fresh_bytes(60, 100));
    }
}
