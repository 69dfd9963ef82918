//! The loop of an I/O thread: enter a lane, pick, execute, complete, leave.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Job, JobErrorSource, JobOutcome, LaneIndex, LaneLimits, NextWork, Pick};
use firn_hosts::tokens::{LaneToken, Permit, TokenUse};

use crate::board::{Board, Round};
use crate::cpu::thread_time;
use crate::crew::JobClock;
use crate::pacer::Pacer;
use crate::sleepers::Sleepers;

thread_local! {
    static IS_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread is an I/O thread. Such a thread executes jobs, so it must not wait for a job.
pub(crate) fn is_io_thread() -> bool {
    IS_IO_THREAD.get()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Runs until the pool stops.
    Regular,
    /// Runs as long as there is work.
    StandIn,
    /// Serves one lane whose writers all hang, as long as the lane has work.
    StandInOfLane(usize),
}

/// A lane as its writers see it: one I/O server.
pub(crate) struct Lane {
    index: LaneIndex,
    /// The token that lets only one of several hosts write to the lane.
    token: Option<LaneToken>,
}

impl Lane {
    /// Creates a lane. `sleepers` are woken when the token may be used.
    pub(crate) fn new(
        index: LaneIndex,
        token: Option<LaneToken>,
        sleepers: &Arc<Sleepers>,
    ) -> Self {
        if let Some(token) = &token {
            let sleepers = Arc::clone(sleepers);
            token.set_waker(Box::new(move || sleepers.wake()));
        }
        Self { index, token }
    }
}

/// State shared by the threads of the drain.
pub(crate) struct Worker<B: Backing> {
    pub(crate) engine: Arc<Engine<B>>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) board: Board,
    pub(crate) limits: LaneLimits,
    pub(crate) sleepers: Arc<Sleepers>,
    /// The pacer, if the drain leaves the CPUs to programs.
    pub(crate) pacer: Option<Arc<Pacer>>,
}

/// The pacing of a thread.
struct Pace<'a> {
    pacer: &'a Pacer,
    /// Whether a caller waits for a drain or for room.
    is_awaited: bool,
}

impl Pace<'_> {
    /// Returns how long to sleep because programs want the CPUs. Returns `None` if no sleep is needed.
    fn delay(&self) -> Option<Duration> {
        if self.is_awaited {
            None
        } else {
            self.pacer.delay()
        }
    }
}

/// Result of a search for work in the lanes.
enum Found<B: Backing> {
    Job(LaneJob<B>),
    Nothing {
        /// Time until the next search. `None` if a wake announces the next work.
        retry: Option<Duration>,
    },
}

/// A job, and the lane that the thread has entered for it.
struct LaneJob<B: Backing> {
    lane: usize,
    job: Job<B>,
    /// Use of the lane's token, if the lane has one.
    token_use: Option<TokenUse>,
}

impl<B: Backing> Worker<B> {
    pub(crate) fn run(&self, clock: &JobClock, role: Role) {
        IS_IO_THREAD.set(true);
        let mut round = Round::new(self.lanes.len());
        while !self.sleepers.is_stopping() {
            let ticket = self.sleepers.ticket();
            let pace = self.pacer.as_deref().map(|pacer| Pace {
                pacer,
                is_awaited: self.engine.drainer.is_drain_awaited(),
            });
            if let Some(delay) = pace.as_ref().and_then(Pace::delay) {
                self.engine.drainer.note_drain_put_off();
                self.sleepers.sleep(ticket, Some(delay));
                continue;
            }
            let found = match role {
                Role::StandInOfLane(lane) => {
                    self.board.enter_hung(lane);
                    self.pick_from(lane, role)
                }
                _ => self.find_job(&mut round, role),
            };
            match found {
                Found::Job(found) => {
                    self.sleepers.wake();
                    clock.start(found.lane);
                    self.perform(found.job, pace.as_ref());
                    clock.stop();
                    self.leave(found.lane, found.token_use);
                }
                Found::Nothing { retry } if role == Role::Regular => {
                    self.sleepers.sleep(ticket, retry);
                }
                Found::Nothing { .. } => {
                    // Another thread may have found this lane full and skipped it, although it has more work. So one
                    // thread is woken.
                    self.sleepers.wake();
                    return;
                }
            }
        }
    }

    /// Searches the lanes that may be entered, until one has a job.
    fn find_job(&self, round: &mut Round, role: Role) -> Found<B> {
        round.begin();
        let mut retry: Option<Duration> = None;
        while let Some(lane) = self.board.enter_next(round) {
            match self.pick_from(lane, role) {
                Found::Nothing { retry: of_lane } => {
                    retry = retry.into_iter().chain(of_lane).min();
                }
                job => return job,
            }
        }
        Found::Nothing { retry }
    }

    /// Picks the next job of a lane that the thread has entered. If there is no job, the thread has left the lane
    /// again.
    fn pick_from(&self, lane: usize, role: Role) -> Found<B> {
        let Lane { index, token } = &self.lanes[lane];
        let token_use = match token.as_ref().map(|token| self.use_token(*index, token)) {
            None => None,
            Some(Ok(token_use)) => Some(token_use),
            Some(Err(retry)) => {
                self.board.leave(lane);
                return Found::Nothing { retry };
            }
        };
        match self.engine.drainer.pick(*index, self.limits_of(role)) {
            Pick::Job(job) => Found::Job(LaneJob {
                lane,
                job,
                token_use,
            }),
            Pick::Idle { retry } => {
                self.leave(lane, token_use);
                Found::Nothing { retry }
            }
        }
    }

    fn limits_of(&self, role: Role) -> LaneLimits {
        match role {
            Role::Regular => self.limits,
            Role::StandIn | Role::StandInOfLane(_) => LaneLimits {
                file_writes_max: 1,
                leaves_hung_file: true,
            },
        }
    }

    /// Starts to use a lane's token. If the lane has no work or the token is not available, returns the time until
    /// the next search.
    fn use_token(&self, lane: LaneIndex, token: &LaneToken) -> Result<TokenUse, Option<Duration>> {
        if let NextWork::Later { retry } = self.engine.drainer.next_work(lane) {
            return Err(retry);
        }
        match token.enter() {
            Permit::Go(token_use) => Ok(token_use),
            Permit::Wait(time) => Err(Some(time)),
        }
    }

    fn leave(&self, lane: usize, token_use: Option<TokenUse>) {
        if let (Some(token), Some(token_use)) = (&self.lanes[lane].token, token_use) {
            token.leave(token_use);
        }
        self.board.leave(lane);
    }

    /// Returns whether a lane has work now.
    pub(crate) fn has_work(&self, lane: usize) -> bool {
        self.engine.drainer.next_work(self.lanes[lane].index) == NextWork::Now
    }

    /// Executes and completes a job. If the drain is paced, the job's CPU time is charged.
    fn perform(&self, job: Job<B>, pace: Option<&Pace<'_>>) {
        let before = pace.map(|_| thread_time());
        let outcome = self.execute(&job);
        self.engine.drainer.complete(job, outcome);
        if let (Some(pace), Some(before)) = (pace, before) {
            pace.pacer.charge(thread_time() - before, pace.is_awaited);
        }
    }

    /// Executes a job and catches a panic. A panic is a bug, but the bytes of the job are still in the arena. The job
    /// then fails with EIO, so that the bytes remain there.
    fn execute(&self, job: &Job<B>) -> JobOutcome {
        catch_unwind(AssertUnwindSafe(|| job.execute(&self.engine))).unwrap_or_else(|_| {
            tracing::error!("a write to the backing panicked; its data stays in the arena and is written again later");
            JobOutcome {
                written: 0,
                writes: 0,
                error: Some(Errno::IO),
                error_source: JobErrorSource::Backing,
            }
        })
    }
}
