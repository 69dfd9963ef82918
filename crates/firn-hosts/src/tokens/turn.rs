//! The state machine of a lane's token: it decides what the threads of the lane may do and what the keeper does next.
//!
//! A *lane* is one I/O server, with the threads of this host that write to it. Its *token* is a lock that lets one host
//! at a time write there. The *keeper* is the thread that requests the token from a lock service and gives it back. A
//! *permit* lets one thread of the lane write. A *batch* is the time for which a host keeps a token that others wait
//! for.
//!
//! ```text
//!           enter                   granted
//!   Idle ──────────► Waiting ───────────────────► Held
//!    ▲                  │  no change for `wait`,      │ idle, or the batch is over and others wait,
//!    │                  ▼  or waited too long         │ or lost
//!    │               Tokenless ── granted ──────────►│
//!    └───────────────────────────────────────────────┘
//! ```
//!
//! Invariants
//! * A *grant* lasts from the moment when this host gets the token until the token is given back or lost. `uses` counts
//!   only permits of the present grant.
//! * While the token must be given back (`is_returning`), the keeper makes no request.
//! * In the state `Tokenless` every permit is given at once, whatever the service does.
//! * No wait is longer than `WAIT_FACTOR_MAX * wait`, whatever the service reports. That the token changes hands is
//!   only a claim of the service.

use std::time::{Duration, Instant};

use firn_backing::backoff::Backoff;

use super::service::QueuePosition;

/// How long an unused token is kept. Giving it back and requesting it again would cost one or two round trips.
const KEEP_UNUSED_FOR: Duration = Duration::from_millis(10);
/// Time between requests that fail.
const RETRY: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(1));

/// Longest wait of a lane in a queue that moves, as a multiple of [`TokenLimits::wait`]. In a queue of up to
/// `WAIT_FACTOR_MAX * wait / hold` hosts, every host is therefore served in order.
pub const WAIT_FACTOR_MAX: u32 = 8;
/// Maximum time between two requests of a lane that writes without its token, unless `wait` is longer.
const REQUEST_PAUSE_MAX: Duration = Duration::from_secs(60);

/// How long a lane holds a token, and how long it waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimits {
    /// Length of a batch. After it the token goes to a host that waits for it.
    pub hold: Duration,
    /// Maximum wait while the service does not answer or the token does not change hands. While the token changes
    /// hands, the maximum is [`WAIT_FACTOR_MAX`] times as long. Must be at least twice `hold`.
    pub wait: Duration,
}

/// What a thread of a lane may do now.
#[derive(Debug, PartialEq, Eq)]
pub enum Permit {
    /// The thread may pick work and write it. It must hand the permit back ([`crate::tokens::LaneToken::leave`]).
    Go(TokenUse),
    /// The thread must wait until the lane is woken, but no longer than this time.
    Wait(Duration),
}

/// One thread's use of a token.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the token is held until each use has ended"]
pub struct TokenUse {
    /// Number of the grant. `None` if the thread writes without a token.
    grant_number: Option<u64>,
}

impl TokenUse {
    /// Returns whether the thread writes with the token.
    pub fn has_token(&self) -> bool {
        self.grant_number.is_some()
    }

    pub(crate) fn without_token() -> Self {
        Self { grant_number: None }
    }
}

/// State of a lane's token, for people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TokenState {
    /// The lane has nothing to write.
    #[default]
    Idle,
    /// The token was requested.
    Waiting,
    /// This host has the token.
    Held,
    /// The lane writes without the token.
    Without,
}

/// Figures of a token, for the status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenFigures {
    /// State of the token.
    pub state: TokenState,
    /// Time since the token entered that state.
    pub age: Duration,
    /// The host that holds the token, if the service named one.
    pub holder: Option<String>,
    /// Number of times the token was granted.
    pub granted: u64,
    /// Total time that this host has waited for the token.
    pub waited: Duration,
    /// Number of times the lane went on without the token.
    pub went_without: u64,
    /// Number of failed requests.
    pub errors: u64,
    /// Reason of the last failure.
    pub last_error: Option<String>,
}

/// The next step of a keeper.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Request the token, or check an earlier request again.
    Ask,
    /// Give the token back, or withdraw the request.
    GiveBack,
    /// Ask whether other hosts wait for the token.
    LookForOthers,
    /// Tell the service that this host is alive.
    Renew,
    /// Sleep until something changes, or for this time.
    Sleep(Option<Duration>),
}

/// State of the machine; see the diagram in the head of this file.
#[derive(Debug)]
enum Phase {
    Idle,
    Waiting(WaitingPhase),
    Held(HeldPhase),
    Tokenless(TokenlessPhase),
}

/// The lane waits for the token.
#[derive(Debug)]
struct WaitingPhase {
    /// Time of the last change of hands, as far as the service reported it.
    last_handover: Instant,
    /// The grant of another host that the service reported last.
    reported_grant: Option<String>,
    next_request_at: Instant,
    /// Number of failed requests in a row.
    failures: u32,
}

impl WaitingPhase {
    /// Returns the end of a wait that began at `began`.
    fn ends_at(&self, began: Instant, limits: TokenLimits) -> Instant {
        let without_progress = self.last_handover + limits.wait;
        let with_progress = began + limits.wait * WAIT_FACTOR_MAX;
        without_progress.min(with_progress)
    }
}

/// This host has the token.
#[derive(Debug)]
struct HeldPhase {
    /// End of the batch. Then the token goes to a host that waits for it; without such a host a new batch begins.
    batch_ends: Instant,
    /// Whether another host waits for the end of this batch.
    are_others_waiting: bool,
    check_others_at: Instant,
    renew_at: Option<Instant>,
}

/// The lane writes without the token, because none came in time.
#[derive(Debug)]
struct TokenlessPhase {
    next_request_at: Instant,
    /// Number of requests since the lane went on without the token.
    tries: u32,
    /// Whether the keeper waits for the answer to a request.
    is_request_in_progress: bool,
    /// Whether a thread of the lane wanted to write since the last request.
    has_new_work: bool,
    /// The grant of another host that the service reported when the lane gave up waiting. While the service still
    /// reports it, the lane does not wait again.
    grant_at_giveup: Option<String>,
    /// Whether the token still changed hands when the lane gave up waiting: the queue moves, but is too long. The lane
    /// does not wait for such a queue again; it keeps its place in the queue while it writes.
    does_queue_move: bool,
    /// Whether the lane has a place in the queue now.
    keeps_queue_place: bool,
    /// Time when a thread of the lane last had something to write.
    wanted_at: Instant,
}

/// The state machine of one lane's token.
#[derive(Debug)]
pub(crate) struct TokenMachine {
    limits: TokenLimits,
    renew_every: Option<Duration>,
    phase: Phase,
    phase_since: Instant,
    /// Number of the present grant. Raised at the begin and at the end of a grant.
    grant_number: u64,
    /// Number of permits of that grant that have not ended.
    uses: u32,
    /// Time since when no permit is in use.
    unused_since: Instant,
    /// Whether the service has a request of this host, or this host has the token.
    has_request: bool,
    /// Whether the keeper must give the token or the request back.
    is_returning: bool,
    /// Whether the threads of the lane must be woken.
    must_wake_lane: bool,
    /// Whether the keeper must be woken.
    must_wake_keeper: bool,
    figures: TokenFigures,
}

impl TokenMachine {
    /// Returns the state of a lane, an I/O server, for which this host has no token (the lock for writing there) and
    /// has requested none. `renew_every` is the interval at which a lock service wants a held token to be renewed;
    /// `None` if it need not be.
    pub(crate) fn new(limits: TokenLimits, renew_every: Option<Duration>, now: Instant) -> Self {
        Self {
            limits,
            renew_every,
            phase: Phase::Idle,
            phase_since: now,
            grant_number: 0,
            uses: 0,
            unused_since: now,
            has_request: false,
            is_returning: false,
            must_wake_lane: false,
            must_wake_keeper: false,
            figures: TokenFigures::default(),
        }
    }

    // ---- threads of the lane -----------------------------------------------------------------

    /// Requests a permit for a thread of the lane that has something to write. A lane is one I/O server, and its token
    /// lets one host at a time write there.
    ///
    /// Returns a permit to write, with or without the token, or the longest time to wait. The thread then calls this
    /// again. It hands each permit back after its write.
    pub(crate) fn enter(&mut self, now: Instant) -> Permit {
        match &mut self.phase {
            // The keeper, another thread, requests the token now.
            Phase::Idle => {
                self.start_waiting(now);
                self.must_wake_keeper = true;
                Permit::Wait(self.limits.wait)
            }
            Phase::Waiting(waiting) => {
                let until = waiting.ends_at(self.phase_since, self.limits);
                if now < until {
                    return Permit::Wait(until - now);
                }
                // The token did not come in time, so the lane writes without it.
                self.write_without_token(now);
                Permit::Go(TokenUse::without_token())
            }
            // This host has the token. It may write until the batch is over, and also after that if no other host
            // waits.
            Phase::Held(held) if now < held.batch_ends || !held.are_others_waiting => {
                self.uses += 1;
                Permit::Go(TokenUse {
                    grant_number: Some(self.grant_number),
                })
            }
            Phase::Held(_) if self.uses == 0 => {
                // The batch is over and another host waits for the token. The keeper may be inside a call that does not
                // return, so this thread ends the grant.
                self.end_grant(now);
                self.start_waiting(now);
                self.must_wake_keeper = true;
                Permit::Wait(self.limits.wait)
            }
            // The batch is over and another host waits, but threads of this host still write.
            Phase::Held(held) => {
                let until = held.batch_ends + self.limits.wait;
                if now < until {
                    return Permit::Wait(until - now);
                }
                // Writes of this host hang, and the keeper's call of the service hangs too.
                self.end_grant(now);
                self.write_without_token(now);
                Permit::Go(TokenUse::without_token())
            }
            // The lane writes without the token, and the keeper requests it again.
            Phase::Tokenless(tokenless) => {
                tokenless.wanted_at = now;
                if !tokenless.has_new_work {
                    tokenless.has_new_work = true;
                    self.must_wake_keeper = true;
                }
                Permit::Go(TokenUse::without_token())
            }
        }
    }

    /// Ends one use of the token. Returns whether it was the last use, after which the token may be given back.
    pub(crate) fn leave(&mut self, ended: &TokenUse, now: Instant) -> bool {
        if ended.grant_number != Some(self.grant_number) {
            return false;
        }
        debug_assert!(self.uses > 0, "a use ended twice");
        self.uses -= 1;
        if self.uses == 0 {
            self.unused_since = now;
        }
        self.uses == 0
    }

    // ---- the keeper --------------------------------------------------------------------------

    /// Returns the next step of the keeper, the thread that requests a lane's token from the lock service and gives it
    /// back. The token is the lock for writing to the lane, an I/O server. The caller takes the step and records its
    /// result here.
    pub(crate) fn next_step(&mut self, now: Instant) -> Step {
        if self.is_returning {
            return Step::GiveBack;
        }
        match &mut self.phase {
            Phase::Idle => Step::Sleep(None),
            Phase::Waiting(waiting) => {
                let until = waiting.ends_at(self.phase_since, self.limits);
                if now >= until {
                    self.write_without_token(now);
                    return self.next_step(now);
                }
                if now < waiting.next_request_at {
                    return Step::Sleep(Some(waiting.next_request_at.min(until) - now));
                }
                self.has_request = true;
                Step::Ask
            }
            Phase::Held(_) => self.next_step_while_held(now),
            Phase::Tokenless(_) => self.next_step_without_token(now),
        }
    }

    /// Returns the next step of the keeper while the lane, an I/O server, is written to without the token.
    ///
    /// If the lane still has its place in the queue, the keeper asks again, until the lane has had no work for `wait`.
    /// Otherwise the keeper withdraws an earlier request first, and makes a new one when the lane has work.
    fn next_step_without_token(&mut self, now: Instant) -> Step {
        let Phase::Tokenless(tokenless) = &mut self.phase else {
            return Step::Sleep(None);
        };
        // The queue was long, so the lane has kept its place there while it writes.
        if tokenless.keeps_queue_place {
            if now < tokenless.next_request_at {
                return Step::Sleep(Some(tokenless.next_request_at - now));
            }
            if now < tokenless.wanted_at + self.limits.wait {
                return Step::Ask;
            }
            // The lane has had no work for so long that it gives up its place in the queue.
            tokenless.keeps_queue_place = false;
        }
        if self.has_request && !tokenless.is_request_in_progress {
            // The service may still have the lane in its queue, so the request is withdrawn.
            self.is_returning = true;
            return Step::GiveBack;
        }
        if !tokenless.has_new_work {
            return Step::Sleep(None);
        }
        if now < tokenless.next_request_at {
            return Step::Sleep(Some(tokenless.next_request_at - now));
        }
        tokenless.is_request_in_progress = true;
        tokenless.has_new_work = false;
        self.has_request = true;
        Step::Ask
    }

    /// Returns the next step of the keeper, the thread that handles the token, while this host has the token. A token
    /// that no write uses is given back in two cases: other hosts wait and the batch is over, or nothing was written
    /// for [`KEEP_UNUSED_FOR`]. A token that is overdue is given back even during a write.
    fn next_step_while_held(&mut self, now: Instant) -> Step {
        let Phase::Held(held) = &self.phase else {
            return Step::Sleep(None);
        };
        let kept_unused_until = self.unused_since + KEEP_UNUSED_FOR;
        let overdue_at = held.batch_ends + self.limits.wait;
        let is_turn_over = now >= held.batch_ends && held.are_others_waiting;
        let is_free = self.uses == 0 && (is_turn_over || now >= kept_unused_until);
        // A write that hangs must not keep the token from other hosts for ever.
        if is_free || now >= overdue_at {
            self.end_grant(now);
            return Step::GiveBack;
        }
        if held.renew_at.is_some_and(|renew_at| now >= renew_at) {
            return Step::Renew;
        }
        if now >= held.check_others_at && !held.are_others_waiting {
            return Step::LookForOthers;
        }
        let mut wake_at = overdue_at;
        if self.uses == 0 {
            wake_at = wake_at.min(kept_unused_until);
        }
        if !held.are_others_waiting {
            wake_at = wake_at.min(held.check_others_at);
        } else if now < held.batch_ends {
            wake_at = wake_at.min(held.batch_ends);
        }
        if let Some(renew_at) = held.renew_at {
            wake_at = wake_at.min(renew_at);
        }
        Step::Sleep(Some(wake_at - now))
    }

    /// Records that the service granted the token, which lets this host write to the lane. A new batch begins, and the
    /// waiting threads of the lane are woken.
    pub(crate) fn record_granted(&mut self, now: Instant) {
        if matches!(self.phase, Phase::Waiting(_)) {
            self.figures.waited += now - self.phase_since;
        }
        if matches!(self.phase, Phase::Tokenless(_)) {
            tracing::info!("the token is granted again: one host at a time writes to this lane");
        }
        self.figures.granted += 1;
        self.figures.holder = None;
        self.grant_number += 1;
        self.uses = 0;
        self.unused_since = now;
        let held = HeldPhase {
            batch_ends: now + self.limits.hold,
            are_others_waiting: false,
            check_others_at: now + self.check_others_after(),
            renew_at: self.renew_every.map(|every| now + every),
        };
        self.change_phase(Phase::Held(held), now);
        self.must_wake_lane = true;
    }

    /// Returns the time from the start of a batch to the check for waiting hosts. The check comes shortly before the
    /// end of the batch, so that the next batch follows without a gap if no host waits.
    fn check_others_after(&self) -> Duration {
        self.limits.hold * 7 / 8
    }

    /// Records the lock service's answer that other hosts are ahead in the queue for the token. Decides when the
    /// keeper, the thread that requests the token, asks again.
    ///
    /// `position.holding` identifies the grant of the present holder. If it differs from the last one, the token passes
    /// from host to host, and waiting is worthwhile. A lane that writes without the token then waits again, unless it
    /// gave up because such a queue was too long.
    pub(crate) fn record_queued(&mut self, position: QueuePosition, now: Instant) {
        self.figures.holder = position.holder;
        // The pause of a lane that writes without the token. No write waits for the answer, and the service may be
        // unreliable, so there is a minimum pause.
        let queued_pause = position.ask_again_after.max(RETRY.first());
        match &mut self.phase {
            Phase::Waiting(waiting) => {
                if waiting.reported_grant.as_ref() != Some(&position.holding) {
                    waiting.last_handover = now;
                    waiting.reported_grant = Some(position.holding);
                }
                waiting.failures = 0;
                waiting.next_request_at = now + position.ask_again_after;
            }
            // The lane still has its place in the queue.
            Phase::Tokenless(tokenless) if tokenless.keeps_queue_place => {
                tokenless.next_request_at = now + queued_pause
            }
            // This is the answer to a new request of a lane that writes without the token.
            Phase::Tokenless(tokenless) if tokenless.is_request_in_progress => {
                if tokenless.does_queue_move {
                    // The lane writes on, and keeps its place in the queue meanwhile.
                    tokenless.is_request_in_progress = false;
                    tokenless.keeps_queue_place = true;
                    tokenless.next_request_at = now + queued_pause;
                } else if tokenless.grant_at_giveup.as_ref() == Some(&position.holding) {
                    // The token has not changed hands since the lane gave up waiting.
                    self.postpone_request(now);
                } else {
                    tracing::info!("the token changes hands again: this lane waits for its turn");
                    self.start_waiting(now);
                }
            }
            // The lane waits for no answer any more.
            _ => {}
        }
    }

    /// Records that the lock service did not answer, or refused the request. The request is repeated after a pause that
    /// grows with each failure; a held token stays held.
    pub(crate) fn record_failure(&mut self, reason: String, now: Instant) {
        self.figures.errors += 1;
        self.figures.last_error = Some(reason);
        match &mut self.phase {
            Phase::Waiting(waiting) => {
                waiting.failures += 1;
                waiting.next_request_at = now + RETRY.after(waiting.failures);
            }
            Phase::Tokenless(tokenless)
                if tokenless.is_request_in_progress || tokenless.keeps_queue_place =>
            {
                self.postpone_request(now)
            }
            // The failed check or renewal is repeated later. The next renewal comes after the shortest pause, because
            // the token is lost if it is not renewed in time. A check for waiting hosts is less urgent.
            Phase::Held(held) => {
                let shortest_pause = RETRY.first();
                let longest_pause = RETRY.last();
                held.check_others_at = held.check_others_at.max(now + longest_pause);
                held.renew_at = held
                    .renew_at
                    .map(|renew_at| renew_at.max(now + shortest_pause));
            }
            Phase::Idle | Phase::Tokenless(_) => {}
        }
    }

    /// Records that the token is lost. Another host may have it.
    pub(crate) fn record_lost(&mut self, reason: String, now: Instant) {
        self.figures.errors += 1;
        self.figures.last_error = Some(reason);
        if matches!(self.phase, Phase::Held(_)) {
            self.end_grant(now);
        }
    }

    /// Records whether other hosts wait for the token. If no host waits, a new batch begins.
    pub(crate) fn record_others(&mut self, are_waiting: bool, now: Instant) {
        let check_others_after = self.check_others_after();
        if let Phase::Held(held) = &mut self.phase {
            held.are_others_waiting = are_waiting;
            if !are_waiting {
                held.batch_ends = now + self.limits.hold;
                held.check_others_at = now + check_others_after;
            }
        }
    }

    /// Records that the service has renewed the grant.
    pub(crate) fn record_renewed(&mut self, now: Instant) {
        if let Phase::Held(held) = &mut self.phase {
            held.renew_at = self.renew_every.map(|every| now + every);
        }
    }

    /// Records that the token or the request was given back, even if the call of the service failed.
    pub(crate) fn record_given_back(&mut self) {
        self.is_returning = false;
        self.has_request = false;
        self.must_wake_lane = true;
    }

    /// Returns whether a request or the token is not given back yet.
    pub(crate) fn must_give_back(&self) -> bool {
        self.has_request
    }

    /// Returns whether the threads of the lane must be woken, and clears that flag.
    pub(crate) fn take_lane_wake(&mut self) -> bool {
        std::mem::take(&mut self.must_wake_lane)
    }

    /// Returns whether the keeper must be woken, and clears that flag.
    pub(crate) fn take_keeper_wake(&mut self) -> bool {
        std::mem::take(&mut self.must_wake_keeper)
    }

    /// Returns the state and the counters of the token.
    pub(crate) fn figures(&self, now: Instant) -> TokenFigures {
        let state = match &self.phase {
            Phase::Idle => TokenState::Idle,
            Phase::Waiting(_) => TokenState::Waiting,
            Phase::Held(_) => TokenState::Held,
            Phase::Tokenless(_) => TokenState::Without,
        };
        TokenFigures {
            state,
            age: now.saturating_duration_since(self.phase_since),
            ..self.figures.clone()
        }
    }

    // ---- changes of phase --------------------------------------------------------------------

    /// Enters a phase, and notes the time.
    fn change_phase(&mut self, phase: Phase, now: Instant) {
        self.phase = phase;
        self.phase_since = now;
    }

    /// Enters the phase `Waiting`. The first request is due at once.
    fn start_waiting(&mut self, now: Instant) {
        let waiting = WaitingPhase {
            last_handover: now,
            reported_grant: None,
            next_request_at: now,
            failures: 0,
        };
        self.change_phase(Phase::Waiting(waiting), now);
    }

    /// Lets the threads of a lane, an I/O server, write without its token because the token did not come in time, and
    /// logs the reason. The token is a lock by which hosts take turns. It affects speed only, so no data is at risk.
    ///
    /// If the token changes hands and the queue is only long, this host keeps its place in the queue. Otherwise the
    /// next request comes after `wait`.
    fn write_without_token(&mut self, now: Instant) {
        let mut grant_at_giveup = None;
        let mut has_failed = false;
        let mut does_queue_move = false;
        if let Phase::Waiting(waiting) = &mut self.phase {
            self.figures.waited += now - self.phase_since;
            grant_at_giveup = waiting.reported_grant.take();
            has_failed = waiting.failures > 0;
            // The token changes hands, but this host is not served in time.
            does_queue_move = now < waiting.last_handover + self.limits.wait;
        }
        let reason = match self.figures.last_error.as_deref() {
            Some(error) if has_failed => error,
            _ if does_queue_move => {
                "the queue of hosts is long: raise token-wait, or check the lock service"
            }
            _ if grant_at_giveup.is_some() => "the holder of the token makes no progress",
            _ => "the lock service does not answer",
        };
        tracing::warn!(
            reason,
            "this lane got no token in time: its drain writes without the token"
        );
        self.figures.went_without += 1;
        // A request that is being given back has no place in the queue.
        let keeps_queue_place = does_queue_move && self.has_request && !self.is_returning;
        let tokenless = TokenlessPhase {
            next_request_at: if keeps_queue_place {
                now
            } else {
                now + self.limits.wait
            },
            tries: 0,
            is_request_in_progress: false,
            has_new_work: false,
            grant_at_giveup,
            does_queue_move,
            keeps_queue_place,
            wanted_at: now,
        };
        self.change_phase(Phase::Tokenless(tokenless), now);
        self.must_wake_lane = true;
        self.must_wake_keeper = true;
    }

    /// Records a failed attempt of a lane that writes without its token. The next request comes after a longer time.
    fn postpone_request(&mut self, now: Instant) {
        let Phase::Tokenless(tokenless) = &mut self.phase else {
            return;
        };
        tokenless.is_request_in_progress = false;
        tokenless.keeps_queue_place = false;
        tokenless.tries += 1;
        let pause_max = self.limits.wait.max(REQUEST_PAUSE_MAX);
        let backoff = Backoff::new(self.limits.wait, pause_max);
        // `write_without_token` has used the first pause of this sequence.
        tokenless.next_request_at = now + backoff.after(tokenless.tries.saturating_add(1));
    }

    /// Ends the present grant. Its permits no longer count, and the keeper gives the token back.
    fn end_grant(&mut self, now: Instant) {
        self.grant_number += 1;
        self.uses = 0;
        self.is_returning = true;
        self.change_phase(Phase::Idle, now);
    }
}

#[cfg(test)]
mod tests;
