//! The threads of a mount that move data: the I/O threads, and one thread that moves chunks to the spill file and to
//! memory files.
//!
//! Promise: after [`Pool::stop`] returns, no thread of the pool uses the engine. [`Pool::stop_within`] gives up on
//! threads whose call of the backing does not return.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Executor, LaneIndex, LaneLimits, SettleStep, SpillStep};
use firn_hosts::tokens::{LaneToken, Tokens};

use crate::board::Board;
use crate::cpu::thread_time;
use crate::crew::Crew;
use crate::pacer::Pacer;
use crate::sleepers::Sleepers;
use crate::worker::{Lane, Worker, is_io_thread};

/// Number and limits of the I/O threads of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoThreads {
    /// Number of threads for all lanes together; at least one.
    pub count: usize,
    /// Maximum number of threads that write to one lane at once; at least one.
    pub lane_writers_max: usize,
    /// Percent of one CPU that the threads use while programs want all CPUs and no caller waits. From 100 on there is
    /// no limit.
    pub cpu_percent: u32,
}

impl IoThreads {
    /// Describes `count` threads, each for any lane, without a limit of the CPU time.
    pub const fn new(count: usize) -> Self {
        Self {
            count,
            lane_writers_max: usize::MAX,
            cpu_percent: 100,
        }
    }
}

/// The running I/O threads. Dropping the value stops them.
pub struct Pool {
    crew: Crew,
    tokens: Option<Tokens>,
    /// The place where the thread that moves chunks sleeps.
    moves: Arc<Sleepers>,
    mover: Option<JoinHandle<()>>,
}

/// Lets the engine wake the threads.
struct WakeThreads {
    sleepers: Arc<Sleepers>,
}

impl Executor for WakeThreads {
    fn wake(&self, _lane: LaneIndex) {
        self.sleepers.wake();
    }

    fn wait_for(&self, outcome: &Receiver<Result<(), Errno>>) -> Result<(), Errno> {
        assert!(!is_io_thread(), "an IO thread waits for a drain");
        outcome.recv().unwrap_or(Err(Errno::IO))
    }
}

impl Pool {
    /// Starts threads that drain all lanes of `engine` into its backing. With `tokens`, only one of several hosts
    /// writes to a lane at a time.
    pub fn start<B: Backing>(
        engine: Arc<Engine<B>>,
        io_threads: IoThreads,
        tokens: Option<Tokens>,
    ) -> io::Result<Self> {
        let sleepers = Arc::new(Sleepers::default());
        let new_lane = |index: LaneIndex| {
            let token = tokens.as_ref().and_then(|all| all.lane(index.index()));
            Lane::new(index, token.cloned(), &sleepers)
        };
        let lanes: Vec<Lane> = engine.drainer.lanes().map(new_lane).collect();
        engine.drainer.set_executor(Arc::new(WakeThreads {
            sleepers: Arc::clone(&sleepers),
        }));
        let pacer = Pacer::start(io_threads.cpu_percent).map(Arc::new);
        let moves = Arc::new(Sleepers::default());
        let mover = start_mover(&engine, &moves, pacer.clone())?;
        let thread_count = io_threads.count.max(1);
        // If there are several lanes, one thread is reserved for another lane.
        let of_lane = thread_count - usize::from(lanes.len() > 1 && thread_count > 1);
        let worker = Worker {
            board: Board::new(lanes.len(), thread_count, io_threads.lane_writers_max),
            limits: LaneLimits {
                file_writes_max: (of_lane - 1).max(1),
                leaves_hung_file: false,
            },
            engine,
            lanes,
            sleepers,
            pacer,
        };
        // If not all threads can be started, dropping the pool stops the threads that were started.
        let pool = Self {
            crew: Crew::new(worker, thread_count),
            tokens,
            moves,
            mover,
        };
        pool.crew.start()?;
        Ok(pool)
    }

    /// Starts one more thread if writes that do not return occupy all threads, or all threads of a lane with work.
    /// The caller must call this periodically.
    pub fn replace_hung(&self) {
        self.crew.replace_hung();
    }

    /// Returns the tokens of all lanes. The result is empty if the mount has no tokens.
    pub fn lane_tokens(&self) -> &[LaneToken] {
        self.tokens.as_ref().map_or(&[], Tokens::lanes)
    }

    /// Stops the threads and waits for them. Each thread ends after its current job.
    pub fn stop(&mut self) {
        self.begin_stop();
        let of_lanes = self.crew.take_threads().into_iter();
        for thread in of_lanes.chain(self.mover.take()) {
            if thread.join().is_err() {
                tracing::error!("an I/O thread panicked");
            }
        }
        // Give the tokens back for the other hosts.
        self.tokens = None;
    }

    /// Does the same as [`Pool::stop`], but waits for at most `patience`. Returns false if threads remain in calls of
    /// the backing; they end with the process.
    pub fn stop_within(&mut self, patience: Duration) -> bool {
        const CHECK_EVERY: Duration = Duration::from_millis(5);
        self.begin_stop();
        let deadline = Instant::now() + patience;
        while self.is_running() {
            if Instant::now() >= deadline {
                self.crew.abandon();
                self.mover = None;
                self.tokens = None;
                return false;
            }
            std::thread::sleep(CHECK_EVERY);
        }
        self.stop();
        true
    }

    fn begin_stop(&self) {
        self.crew.stop();
        self.moves.stop();
    }

    fn is_running(&self) -> bool {
        let moves = |thread: &JoinHandle<()>| !thread.is_finished();
        self.mover.as_ref().is_some_and(moves) || self.crew.is_running()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts the thread that moves chunks, if there is a spill file or there may be memory files.
fn start_mover<B: Backing>(
    engine: &Arc<Engine<B>>,
    sleepers: &Arc<Sleepers>,
    pacer: Option<Arc<Pacer>>,
) -> io::Result<Option<JoinHandle<()>>> {
    let spills = engine.arena().spill_figures().is_some();
    if !spills && !engine.room.settles() {
        return Ok(None);
    }
    let waker = Arc::clone(sleepers);
    engine.room.set_spill_waker(Arc::new(move || waker.wake()));
    let waker = Arc::clone(sleepers);
    engine.room.set_settle_waker(Arc::new(move || waker.wake()));
    let engine = Arc::clone(engine);
    let sleepers = Arc::clone(sleepers);
    let thread = std::thread::Builder::new().name("firn-move".into());
    thread
        .spawn(move || run_mover(&engine, &sleepers, pacer.as_deref()))
        .map(Some)
}

fn run_mover<B: Backing>(engine: &Engine<B>, sleepers: &Sleepers, pacer: Option<&Pacer>) {
    while !sleepers.is_stopping() {
        let ticket = sleepers.ticket();
        let SpillStep::Idle { retry } = engine.room.spill_step() else {
            continue;
        };
        // Spilling comes first, because it makes room in memory. No program waits for a file to move into a memory
        // file, so that work may be delayed.
        if let Some(delay) = pacer.and_then(Pacer::delay) {
            sleepers.sleep(ticket, Some(delay));
            continue;
        }
        let before = thread_time();
        let step = engine.room.settle_step();
        if let Some(pacer) = pacer {
            pacer.charge(thread_time() - before, false);
        }
        if let SettleStep::Idle { retry: settle } = step {
            let soonest = [retry, settle].into_iter().flatten().min();
            sleepers.sleep(ticket, soonest);
        }
    }
}
