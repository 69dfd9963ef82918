//! The keepers: threads that make the calls of the lock service, one thread for each lane.
//!
//! A *lane* is one I/O server, with the threads of this host that write to it. Its *token* is a lock that lets one host
//! at a time write there.
//!
//! Promises
//! * [`LaneToken::enter`], [`LaneToken::leave`] and [`LaneToken::figures`] never wait for the service.
//! * No lock is held while a keeper calls the service or wakes the threads of its lane.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::lock::{Mutex, MutexGuard};
use parking_lot::Condvar;

use super::service::{LockService, ServiceError, TokenReply};
use super::turn::{Permit, Step, TokenFigures, TokenLimits, TokenMachine, TokenUse};

/// Callback that wakes the threads of a lane.
pub type Waker = Box<dyn Fn() + Send + Sync>;

/// The token of one lane, as the threads of the lane use it. A clone is a handle to the same token.
#[derive(Clone)]
pub struct LaneToken {
    shared: Arc<Shared>,
}

/// What the keeper and the threads of the lane share.
struct Shared {
    state: Mutex<KeeperState>,
    /// Signals the keeper that its next step may have changed.
    changed: Condvar,
    /// Signals that the keeper has ended.
    ended: Condvar,
    wake: Mutex<Option<Arc<Waker>>>,
}

struct KeeperState {
    /// The machine that decides about permits and the keeper's next step.
    machine: TokenMachine,
    /// Whether the keeper must give the token back and end.
    is_stopping: bool,
    /// Whether the keeper has ended.
    has_ended: bool,
}

impl LaneToken {
    fn new(limits: TokenLimits, renew_every: Option<Duration>) -> Self {
        let machine = TokenMachine::new(limits, renew_every, Instant::now());
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(KeeperState {
                    machine,
                    is_stopping: false,
                    has_ended: false,
                }),
                changed: Condvar::new(),
                ended: Condvar::new(),
                wake: Mutex::new(None),
            }),
        }
    }

    /// Sets the callback that wakes the threads of the lane. It is called when [`LaneToken::enter`] may return
    /// another permit.
    pub fn set_waker(&self, wake: Waker) {
        *self.shared.wake.lock() = Some(Arc::new(wake));
    }

    /// Requests a permit to write. A thread with work to pick must call this before it picks.
    pub fn enter(&self) -> Permit {
        self.update(|state| {
            if state.is_stopping {
                return Permit::Go(TokenUse::without_token());
            }
            let permit = state.machine.enter(Instant::now());
            if state.machine.take_keeper_wake() {
                self.shared.changed.notify_one();
            }
            permit
        })
    }

    /// Ends the use of a permit. The thread must call this when all work that it picked with the permit is done.
    pub fn leave(&self, ended: TokenUse) {
        let mut state = self.shared.state.lock();
        if state.machine.leave(&ended, Instant::now()) {
            self.shared.changed.notify_one();
        }
    }

    /// Returns the state and the counters of the token.
    pub fn figures(&self) -> TokenFigures {
        self.shared.state.lock().machine.figures(Instant::now())
    }

    /// Tells the keeper to give the token back and end. Does not wait for that.
    fn stop(&self) {
        self.shared.state.lock().is_stopping = true;
        self.shared.changed.notify_one();
        self.wake();
    }

    /// Waits until the keeper has ended, at most until `deadline`.
    fn await_end(&self, deadline: Instant) {
        let mut state = self.shared.state.lock();
        while !state.has_ended {
            let now = Instant::now();
            if now >= deadline {
                return;
            }
            state.wait_for(&self.shared.ended, deadline - now);
        }
    }

    /// Wakes the threads of the lane, if a callback is set.
    fn wake(&self) {
        let wake = self.shared.wake.lock().clone();
        if let Some(wake) = wake {
            wake();
        }
    }

    /// Runs `change` on the state, and afterwards wakes the lane if the state has news.
    fn update<T>(&self, change: impl FnOnce(&mut MutexGuard<'_, KeeperState>) -> T) -> T {
        let mut state = self.shared.state.lock();
        let result = change(&mut state);
        let must_wake_lane = state.machine.take_lane_wake();
        // No lock is held while the lane is woken, because its threads take this lock.
        drop(state);
        if must_wake_lane {
            self.wake();
        }
        result
    }

    /// Returns the next step of the keeper. If there is nothing to do, the call sleeps first. Returns `None` when the
    /// keeper must end.
    fn next_step(&self) -> Option<Step> {
        self.update(|state| {
            let step = state.machine.next_step(Instant::now());
            if state.is_stopping {
                return state.machine.must_give_back().then_some(Step::GiveBack);
            }
            match step {
                Step::Sleep(Some(time_max)) => state.wait_for(&self.shared.changed, time_max),
                Step::Sleep(None) => state.wait(&self.shared.changed),
                _ => {}
            }
            Some(step)
        })
    }

    /// Runs the keeper, the thread that requests a lane's token and gives it back, until the keeper must end. The token
    /// is the lock that lets one host at a time write to the lane, an I/O server.
    ///
    /// The state machine decides each step, and the result of the step is recorded in it. No lock of this process is
    /// held during a call of the lock service.
    fn run_keeper(&self, service: &mut dyn LockService) {
        while let Some(step) = self.next_step() {
            match step {
                // `next_step` has slept already.
                Step::Sleep(_) => {}
                Step::Ask => {
                    let reply = service.ask();
                    self.update(|state| record_reply(&mut state.machine, reply));
                }
                Step::GiveBack => {
                    if let Err(error) = service.give_back() {
                        // The next host must wait until the service notices that this host is gone.
                        tracing::debug!(%error, "cannot give the token of a lane back");
                    }
                    self.update(|state| state.machine.record_given_back());
                }
                Step::LookForOthers => {
                    let do_others_wait = service.others_wait();
                    self.update(|state| match do_others_wait {
                        Ok(are_waiting) => state.machine.record_others(are_waiting, Instant::now()),
                        Err(error) => record_failure(&mut state.machine, &error),
                    });
                }
                Step::Renew => {
                    let renewed = service.renew();
                    self.update(|state| match renewed {
                        Ok(()) => state.machine.record_renewed(Instant::now()),
                        Err(error) => record_failure(&mut state.machine, &error),
                    });
                }
            }
        }
    }
}

/// Records the reply to a request for the token.
fn record_reply(machine: &mut TokenMachine, reply: Result<TokenReply, ServiceError>) {
    let now = Instant::now();
    match reply {
        Ok(TokenReply::Granted) => machine.record_granted(now),
        Ok(TokenReply::Queued(position)) => machine.record_queued(position, now),
        Err(error) => record_failure(machine, &error),
    }
}

/// Records a failed call of the service.
fn record_failure(machine: &mut TokenMachine, error: &ServiceError) {
    tracing::debug!(%error, "the lock service failed");
    let now = Instant::now();
    match error {
        ServiceError::Lost { .. } => machine.record_lost(error.to_string(), now),
        ServiceError::File(_) | ServiceError::Outside(_) => {
            machine.record_failure(error.to_string(), now)
        }
    }
}

/// Marks the keeper as ended when it is dropped, also after a panic.
struct EndOfKeeper<'a>(&'a LaneToken);

impl Drop for EndOfKeeper<'_> {
    fn drop(&mut self) {
        self.0.shared.state.lock().has_ended = true;
        self.0.shared.ended.notify_all();
    }
}

/// The tokens of all lanes of a mount, with their keepers. Dropping the value stops them.
pub struct Tokens {
    lanes: Vec<LaneToken>,
}

/// How long the drop of [`Tokens`] waits for the tokens to be given back.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);

impl Tokens {
    /// Starts a thread for each lock service, called a keeper. It requests the token of one lane (the lock for writing
    /// to an I/O server) and gives it back. The services are in the order of the lanes, one for each lane.
    pub fn start(services: Vec<Box<dyn LockService>>, limits: TokenLimits) -> io::Result<Self> {
        let mut tokens = Self { lanes: Vec::new() };
        for (index, mut service) in services.into_iter().enumerate() {
            let lane = LaneToken::new(limits, service.renew_every());
            let keeper_lane = lane.clone();
            std::thread::Builder::new()
                .name(format!("firn-token-{index}"))
                .spawn(move || {
                    // Its drop records the end of the keeper, also after a panic.
                    let _end = EndOfKeeper(&keeper_lane);
                    let _span = tracing::debug_span!("token", lane = index).entered();
                    keeper_lane.run_keeper(&mut *service);
                })?;
            tokens.lanes.push(lane);
        }
        Ok(tokens)
    }

    /// Returns all tokens, in the order of the lanes.
    pub fn lanes(&self) -> &[LaneToken] {
        &self.lanes
    }

    /// Returns the token of a lane.
    pub fn lane(&self, index: usize) -> Option<&LaneToken> {
        self.lanes.get(index)
    }

    /// Stops all keepers and gives all tokens back. From then on the lanes write without tokens.
    ///
    /// The call waits for at most `timeout`. A keeper that is inside a call of its service ends after that call.
    pub fn stop_within(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        for lane in &self.lanes {
            lane.stop();
        }
        for lane in &self.lanes {
            lane.await_end(deadline);
        }
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.stop_within(STOP_TIMEOUT);
    }
}
