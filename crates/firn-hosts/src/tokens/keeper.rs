//! The threads that speak to the lock service, one for each lane.
//!
//! Promises
//! * [`LaneToken::enter`], [`LaneToken::leave`] and [`LaneToken::figures`] never wait for the service.
//! * No lock is held while the service is called, or while the lane's threads are woken.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_backing::lock::{Mutex, MutexGuard};
use parking_lot::Condvar;

use super::service::{Asked, LockService, ServiceError};
use super::turn::{Limits, Permit, Step, TokenFigures, Turn, Use};

/// Wakes the threads of a lane.
pub type Waker = Box<dyn Fn() + Send + Sync>;

/// The token of one lane, for the lane's threads. Cloned, it is the same token.
#[derive(Clone)]
pub struct LaneToken {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<KeeperState>,
    /// The keeper has something new to look at.
    changed: Condvar,
    /// The keeper has ended.
    ended: Condvar,
    wake: Mutex<Option<Arc<Waker>>>,
}

struct KeeperState {
    turn: Turn,
    is_stopping: bool,
    has_ended: bool,
}

impl LaneToken {
    fn new(limits: Limits, renew_every: Option<Duration>) -> Self {
        let turn = Turn::new(limits, renew_every, Instant::now());
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(KeeperState {
                    turn,
                    is_stopping: false,
                    has_ended: false,
                }),
                changed: Condvar::new(),
                ended: Condvar::new(),
                wake: Mutex::new(None),
            }),
        }
    }

    /// Says how the lane's threads are woken, when the answer of [`LaneToken::enter`] may be another one.
    pub fn set_waker(&self, wake: Waker) {
        *self.shared.wake.lock() = Some(Arc::new(wake));
    }

    /// To be asked before anything is picked, where there is something to pick.
    pub fn enter(&self) -> Permit {
        self.update(|state| {
            if state.is_stopping {
                return Permit::Go(Use::without_token());
            }
            let permit = state.turn.enter(Instant::now());
            if state.turn.take_task() {
                self.shared.changed.notify_one();
            }
            permit
        })
    }

    /// To be told when everything that was picked with a permit is done.
    pub fn leave(&self, ended: Use) {
        let mut state = self.shared.state.lock();
        if state.turn.leave(&ended, Instant::now()) {
            self.shared.changed.notify_one();
        }
    }

    /// What the token does.
    pub fn figures(&self) -> TokenFigures {
        self.shared.state.lock().turn.figures(Instant::now())
    }

    fn stop(&self) {
        self.shared.state.lock().is_stopping = true;
        self.shared.changed.notify_one();
        self.wake();
    }

    /// Waits for the end of the keeper, until `deadline`.
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

    fn wake(&self) {
        let wake = self.shared.wake.lock().clone();
        if let Some(wake) = wake {
            wake();
        }
    }

    /// Runs a step of the state; wakes the lane afterwards if there is news.
    fn update<T>(&self, work: impl FnOnce(&mut MutexGuard<'_, KeeperState>) -> T) -> T {
        let (done, has_news) = {
            let mut state = self.shared.state.lock();
            let done = work(&mut state);
            (done, state.turn.take_news())
        };
        if has_news {
            self.wake();
        }
        done
    }

    /// What the keeper does now, after it has slept if there was nothing; `None`: it is over.
    fn next_step(&self) -> Option<Step> {
        self.update(|state| {
            let step = state.turn.next_step(Instant::now());
            if state.is_stopping {
                return state.turn.has_asked().then_some(Step::GiveBack);
            }
            if let Step::Sleep(at_most) = step {
                match at_most {
                    Some(time) => state.wait_for(&self.shared.changed, time),
                    None => state.wait(&self.shared.changed),
                }
            }
            Some(step)
        })
    }

    fn keep(&self, service: &mut dyn LockService) {
        while let Some(step) = self.next_step() {
            match step {
                Step::Sleep(_) => {}
                Step::Ask => {
                    let asked = service.ask();
                    self.update(|state| note_asked(&mut state.turn, asked));
                }
                Step::GiveBack => {
                    let given_back = service.give_back();
                    if let Err(error) = given_back {
                        // The next host has to wait until the service sees that this host is gone.
                        tracing::debug!(%error, "cannot give the token of a lane back");
                    }
                    self.update(|state| state.turn.note_given_back());
                }
                Step::LookForOthers => {
                    let others = service.others_wait();
                    self.update(|state| match others {
                        Ok(are_waiting) => state.turn.note_others(are_waiting, Instant::now()),
                        Err(error) => note_failure(&mut state.turn, &error),
                    });
                }
                Step::Renew => {
                    let renewed = service.renew();
                    self.update(|state| match renewed {
                        Ok(()) => state.turn.note_renewed(Instant::now()),
                        Err(error) => note_failure(&mut state.turn, &error),
                    });
                }
            }
        }
    }
}

fn note_asked(turn: &mut Turn, asked: Result<Asked, ServiceError>) {
    let now = Instant::now();
    match asked {
        Ok(Asked::Granted) => turn.note_granted(now),
        Ok(Asked::Behind(behind)) => turn.note_behind(behind, now),
        Err(error) => note_failure(turn, &error),
    }
}

fn note_failure(turn: &mut Turn, error: &ServiceError) {
    tracing::debug!(%error, "the lock service failed");
    let now = Instant::now();
    match error {
        ServiceError::Lost { .. } => turn.note_lost(error.to_string(), now),
        ServiceError::File(_) | ServiceError::Outside(_) => {
            turn.note_failure(error.to_string(), now)
        }
    }
}

/// Says that a keeper has ended, also when it panics.
struct EndOfKeeper<'a>(&'a LaneToken);

impl Drop for EndOfKeeper<'_> {
    fn drop(&mut self) {
        self.0.shared.state.lock().has_ended = true;
        self.0.shared.ended.notify_all();
    }
}

/// The tokens of all lanes of a mount, and their keepers. Stopped when dropped.
pub struct Tokens {
    lanes: Vec<LaneToken>,
}

/// How long a dropped [`Tokens`] waits until its tokens are given back.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

impl Tokens {
    /// Starts a keeper for each of these services, one a lane in this order.
    pub fn start(services: Vec<Box<dyn LockService>>, limits: Limits) -> io::Result<Self> {
        let mut tokens = Self { lanes: Vec::new() };
        for (index, mut service) in services.into_iter().enumerate() {
            let lane = LaneToken::new(limits, service.renew_every());
            let kept = lane.clone();
            let thread = std::thread::Builder::new().name(format!("firn-token-{index}"));
            thread.spawn(move || {
                let _end = EndOfKeeper(&kept);
                let _lane = tracing::debug_span!("token", lane = index).entered();
                kept.keep(&mut *service);
            })?;
            tokens.lanes.push(lane);
        }
        Ok(tokens)
    }

    /// The tokens, lane by lane.
    pub fn lanes(&self) -> &[LaneToken] {
        &self.lanes
    }

    /// The token of a lane.
    pub fn lane(&self, index: usize) -> Option<&LaneToken> {
        self.lanes.get(index)
    }

    /// Gives all tokens back and lets the lanes go on without. Waits for at most `patience`; a keeper that is in a call
    /// of its service ends after it.
    pub fn stop_within(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
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
        self.stop_within(STOP_PATIENCE);
    }
}
