//! The loop of an I/O thread: enters a lane, picks a job, executes and completes it, and leaves the lane.
//!
//! Terms
//! * A *lane* is one I/O server of the backing. Its *token*, if it has one, ensures that one host at a time writes to
//!   it.
//! * A *job* is one write of bytes of one file.
//! * A *stand-in* is a thread that replaces a thread whose write hangs. It ends when it finds no job.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use firn_backing::{Backing, Errno};
use firn_engine::{
    Engine, Job, JobErrorSource, JobOutcome, LaneIndex, LaneLimits, NextStep, NextWork,
};
use firn_hosts::tokens::{LaneToken, Permit, TokenUse};

use crate::cpu::thread_time;
use crate::idle_threads::IdleThreads;
use crate::io_thread_set::JobClock;
use crate::lane_scheduler::{LaneScheduler, LaneSearch};
use crate::pacer::Pacer;

thread_local! {
    static IS_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread is an I/O thread. Such a thread executes jobs, so it must not wait for a job.
pub(crate) fn is_io_thread() -> bool {
    IS_IO_THREAD.get()
}

/// How long a thread runs, and which lanes it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ThreadRole {
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
    /// Creates a lane. `idle_threads` are woken when the token may be used.
    pub(crate) fn new(
        index: LaneIndex,
        token: Option<LaneToken>,
        idle_threads: &Arc<IdleThreads>,
    ) -> Self {
        if let Some(token) = &token {
            let idle_threads = Arc::clone(idle_threads);
            token.set_waker(Box::new(move || idle_threads.wake()));
        }
        Self { index, token }
    }
}

/// State shared by the threads of the drain.
pub(crate) struct Worker<B: Backing> {
    pub(crate) engine: Arc<Engine<B>>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) lane_scheduler: LaneScheduler,
    pub(crate) limits: LaneLimits,
    pub(crate) idle_threads: Arc<IdleThreads>,
    /// The pacer, if the drain leaves the CPUs to programs.
    pub(crate) pacer: Option<Arc<Pacer>>,
}

/// The pacing of a thread during one round of its loop.
struct ThreadPacing<'a> {
    pacer: &'a Pacer,
    /// Whether a caller waits for a drain or for room.
    is_awaited: bool,
}

impl ThreadPacing<'_> {
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
enum SearchResult<B: Backing> {
    Job(LaneJob<B>),
    NoJob {
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
    /// Body of an I/O thread: executes jobs (writes to the backing) until the pool stops, or until a stand-in, which
    /// replaces a hanging thread, finds no job. `clock` shows other threads since when a job runs.
    pub(crate) fn run(&self, clock: &JobClock, role: ThreadRole) {
        IS_IO_THREAD.set(true);
        let mut search = LaneSearch::new(self.lanes.len());
        while !self.idle_threads.is_stopping() {
            // Read before the search for work, so that a wake during the search is not lost.
            let wake_count = self.idle_threads.wake_count();
            let pacing = self.pacer.as_deref().map(|pacer| ThreadPacing {
                pacer,
                is_awaited: self.engine.drainer.is_drain_awaited(),
            });
            if let Some(delay) = pacing.as_ref().and_then(ThreadPacing::delay) {
                // No caller waits for the drain, and programs need the CPUs.
                self.engine.drainer.note_drain_put_off();
                self.idle_threads.sleep(wake_count, Some(delay));
                continue;
            }
            match self.next_job(&mut search, role) {
                SearchResult::Job(lane_job) => {
                    // There may be work for one more thread.
                    self.idle_threads.wake();
                    clock.start(lane_job.lane);
                    self.execute_and_complete(lane_job.job, pacing.as_ref());
                    clock.stop();
                    self.leave(lane_job.lane, lane_job.token_use);
                }
                SearchResult::NoJob { retry } if role == ThreadRole::Regular => {
                    self.idle_threads.sleep(wake_count, retry);
                }
                SearchResult::NoJob { .. } => {
                    // Another thread may have found this lane full and skipped it, although it has more work. So one
                    // thread is woken.
                    self.idle_threads.wake();
                    return;
                }
            }
        }
    }

    /// Enters a lane and picks a job there, which the thread must execute. A stand-in of a lane enters only that lane.
    fn next_job(&self, search: &mut LaneSearch, role: ThreadRole) -> SearchResult<B> {
        match role {
            ThreadRole::StandInOfLane(lane) => {
                self.lane_scheduler.enter_hung(lane);
                self.pick_from(lane, role)
            }
            ThreadRole::Regular | ThreadRole::StandIn => self.find_job(search, role),
        }
    }

    /// Searches the lanes that may be entered, until one has a job.
    fn find_job(&self, search: &mut LaneSearch, role: ThreadRole) -> SearchResult<B> {
        search.restart();
        let mut retry: Option<Duration> = None;
        while let Some(lane) = self.lane_scheduler.enter_next(search) {
            match self.pick_from(lane, role) {
                SearchResult::NoJob { retry: lane_retry } => {
                    retry = retry.into_iter().chain(lane_retry).min();
                }
                job => return job,
            }
        }
        SearchResult::NoJob { retry }
    }

    /// Picks the next job (a write to the backing) of a lane that the thread has entered. If the lane has a token, this
    /// host must have it. If there is no job, the thread leaves the lane again.
    fn pick_from(&self, lane: usize, role: ThreadRole) -> SearchResult<B> {
        let Lane { index, token } = &self.lanes[lane];
        let mut token_use = None;
        if let Some(token) = token {
            match self.use_token(*index, token) {
                Ok(started_use) => token_use = Some(started_use),
                Err(retry) => {
                    self.lane_scheduler.leave(lane);
                    return SearchResult::NoJob { retry };
                }
            }
        }
        match self.engine.drainer.pick(*index, self.limits_of(role)) {
            NextStep::Job(job) => SearchResult::Job(LaneJob {
                lane,
                job,
                token_use,
            }),
            NextStep::Idle { retry } => {
                self.leave(lane, token_use);
                SearchResult::NoJob { retry }
            }
        }
    }

    /// Returns the limits for the jobs of a thread. A stand-in replaces a thread that hangs in a write of one file, so
    /// it goes on with other files.
    fn limits_of(&self, role: ThreadRole) -> LaneLimits {
        match role {
            ThreadRole::Regular => self.limits,
            ThreadRole::StandIn | ThreadRole::StandInOfLane(_) => LaneLimits {
                file_writes_max: 1,
                leaves_hung_file: true,
            },
        }
    }

    /// Starts to use a lane's token, the lock that lets one host at a time write to the lane. If the lane has no work
    /// or the token is not available, fails with the time until the next search; `None` if a wake announces the next
    /// work.
    fn use_token(&self, lane: LaneIndex, token: &LaneToken) -> Result<TokenUse, Option<Duration>> {
        if let NextWork::Later { retry } = self.engine.drainer.next_work(lane) {
            return Err(retry);
        }
        match token.enter() {
            Permit::Go(token_use) => Ok(token_use),
            Permit::Wait(time) => Err(Some(time)),
        }
    }

    /// Leaves a lane, and before that ends the use of its token, so that another host may get it.
    fn leave(&self, lane: usize, token_use: Option<TokenUse>) {
        if let (Some(token), Some(token_use)) = (&self.lanes[lane].token, token_use) {
            token.leave(token_use);
        }
        self.lane_scheduler.leave(lane);
    }

    /// Returns whether a lane has work now.
    pub(crate) fn has_work(&self, lane: usize) -> bool {
        self.engine.drainer.next_work(self.lanes[lane].index) == NextWork::Now
    }

    /// Executes and completes a job. If the drain is paced, the job's CPU time is charged.
    fn execute_and_complete(&self, job: Job<B>, pacing: Option<&ThreadPacing<'_>>) {
        let start_time = pacing.map(|_| thread_time());
        let outcome = self.execute(&job);
        self.engine.drainer.complete(job, outcome);
        if let (Some(pacing), Some(start_time)) = (pacing, start_time) {
            let used = thread_time() - start_time;
            pacing.pacer.charge(used, pacing.is_awaited);
        }
    }

    /// Executes a job and catches a panic. A panic is a bug, but the bytes of the job are still in the arena. The job
    /// then fails with EIO, so that the bytes remain there.
    fn execute(&self, job: &Job<B>) -> JobOutcome {
        let execute = AssertUnwindSafe(|| job.execute(&self.engine));
        catch_unwind(execute).unwrap_or_else(|_| {
            tracing::error!("a write to the backing panicked; its data stays in the arena and is written again later");
            JobOutcome {
                written_bytes: 0,
                write_calls: 0,
                error: Some(Errno::IO),
                error_source: JobErrorSource::Backing,
            }
        })
    }
}
