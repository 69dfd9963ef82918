//! The threads of a mount that move data: the I/O threads, which write to the backing, and one thread that moves
//! *chunks* (units of the arena, the memory for written data) to the spill file on a local disk and to memory files.
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

use crate::cpu::thread_time;
use crate::idle_threads::IdleThreads;
use crate::io_thread_set::IoThreadSet;
use crate::lane_scheduler::LaneScheduler;
use crate::pacer::Pacer;
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
    io_threads: IoThreadSet,
    tokens: Option<Tokens>,
    /// Lets the thread that moves chunks sleep, and wakes it.
    mover_sleep: Arc<IdleThreads>,
    /// The thread that moves chunks, if there is one.
    mover: Option<JoinHandle<()>>,
}

/// Lets the engine wake the threads.
struct WakeThreads {
    idle_threads: Arc<IdleThreads>,
}

impl Executor for WakeThreads {
    fn wake(&self, _lane: LaneIndex) {
        self.idle_threads.wake();
    }

    fn wait_for(&self, outcome: &Receiver<Result<(), Errno>>) -> Result<(), Errno> {
        assert!(!is_io_thread(), "an IO thread waits for a drain");
        outcome.recv().unwrap_or(Err(Errno::IO))
    }
}

/// Returns the limits of a regular I/O thread, if `thread_count` threads drain `lane_count` lanes.
fn limits_of_regular_thread(lane_count: usize, thread_count: usize) -> LaneLimits {
    // If there are several lanes, one thread is reserved for another lane.
    let has_reserved_thread = lane_count > 1 && thread_count > 1;
    let lane_threads_max = thread_count - usize::from(has_reserved_thread);
    LaneLimits {
        // A file whose writes hang leaves one thread to other files.
        file_writes_max: (lane_threads_max - 1).max(1),
        leaves_hung_file: false,
    }
}

impl Pool {
    /// Starts threads that drain all lanes (I/O servers) of `engine` into its backing. With `tokens`, only one of
    /// several hosts writes to a lane at a time. Fails if not all threads can be started; then none remains.
    pub fn start<B: Backing>(
        engine: Arc<Engine<B>>,
        io_threads: IoThreads,
        tokens: Option<Tokens>,
    ) -> io::Result<Self> {
        let idle_threads = Arc::new(IdleThreads::default());
        let new_lane = |index: LaneIndex| {
            let token = tokens
                .as_ref()
                .and_then(|tokens| tokens.lane(index.index()));
            Lane::new(index, token.cloned(), &idle_threads)
        };
        let lanes: Vec<Lane> = engine.drainer.lanes().map(new_lane).collect();
        engine.drainer.set_executor(Arc::new(WakeThreads {
            idle_threads: Arc::clone(&idle_threads),
        }));
        // The pacer delays work that no program waits for, so that programs get the CPUs.
        let pacer = Pacer::start(io_threads.cpu_percent).map(Arc::new);
        // The mover is the thread that moves chunks to the spill file and to memory files.
        let mover_sleep = Arc::new(IdleThreads::default());
        let mover = start_mover(&engine, &mover_sleep, pacer.clone())?;
        let thread_count = io_threads.count.max(1);
        let worker = Worker {
            lane_scheduler: LaneScheduler::new(
                lanes.len(),
                thread_count,
                io_threads.lane_writers_max,
            ),
            limits: limits_of_regular_thread(lanes.len(), thread_count),
            engine,
            lanes,
            idle_threads,
            pacer,
        };
        // If not all threads can be started, dropping the pool stops the threads that were started.
        let pool = Self {
            io_threads: IoThreadSet::new(worker, thread_count),
            tokens,
            mover_sleep,
            mover,
        };
        pool.io_threads.start()?;
        Ok(pool)
    }

    /// Starts one more thread if writes that do not return occupy all threads, or all threads of a lane with work.
    /// The caller must call this periodically.
    pub fn replace_hung(&self) {
        self.io_threads.replace_hung();
    }

    /// Returns the tokens of all lanes. The result is empty if the mount has no tokens.
    pub fn lane_tokens(&self) -> &[LaneToken] {
        self.tokens.as_ref().map_or(&[], Tokens::lanes)
    }

    /// Stops the threads and waits for them. Each thread ends after its current job.
    pub fn stop(&mut self) {
        self.request_stop();
        let io_threads = self.io_threads.take_threads().into_iter();
        for thread in io_threads.chain(self.mover.take()) {
            if thread.join().is_err() {
                tracing::error!("an I/O thread panicked");
            }
        }
        // Give the tokens back for the other hosts.
        self.tokens = None;
    }

    /// Stops all threads of the pool, as [`Pool::stop`] does, but waits for at most `patience`. Returns false if
    /// threads remain in calls of the backing; they end with the process.
    pub fn stop_within(&mut self, patience: Duration) -> bool {
        const CHECK_EVERY: Duration = Duration::from_millis(5);
        self.request_stop();
        let deadline = Instant::now() + patience;
        while self.is_running() {
            if Instant::now() >= deadline {
                // The drop of the pool must not wait for these threads.
                self.io_threads.detach_threads();
                self.mover = None;
                self.tokens = None;
                return false;
            }
            std::thread::sleep(CHECK_EVERY);
        }
        self.stop();
        true
    }

    /// Requests that all threads end after their current job.
    fn request_stop(&self) {
        self.io_threads.stop();
        self.mover_sleep.stop();
    }

    fn is_running(&self) -> bool {
        let is_mover_running = self
            .mover
            .as_ref()
            .is_some_and(|thread| !thread.is_finished());
        is_mover_running || self.io_threads.is_running()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts the thread that moves chunks (units of the arena's memory), if there is a spill file or there may be memory
/// files. Returns `None` if there is nothing to move.
fn start_mover<B: Backing>(
    engine: &Arc<Engine<B>>,
    mover_sleep: &Arc<IdleThreads>,
    pacer: Option<Arc<Pacer>>,
) -> io::Result<Option<JoinHandle<()>>> {
    let has_spill_file = engine.arena().spill_figures().is_some();
    if !has_spill_file && !engine.room.settles() {
        return Ok(None);
    }
    let spill_waker = Arc::clone(mover_sleep);
    engine
        .room
        .set_spill_waker(Arc::new(move || spill_waker.wake()));
    let settle_waker = Arc::clone(mover_sleep);
    engine
        .room
        .set_settle_waker(Arc::new(move || settle_waker.wake()));
    let engine = Arc::clone(engine);
    let mover_sleep = Arc::clone(mover_sleep);
    let thread = std::thread::Builder::new().name("firn-move".into());
    let handle = thread.spawn(move || run_mover(&engine, &mover_sleep, pacer.as_deref()))?;
    Ok(Some(handle))
}

/// Body of the thread that moves chunks (units of the arena's memory): to the spill file if memory is short, and to
/// memory files otherwise. Ends when the pool stops. The pacer delays work that no program waits for.
fn run_mover<B: Backing>(engine: &Engine<B>, mover_sleep: &IdleThreads, pacer: Option<&Pacer>) {
    while !mover_sleep.is_stopping() {
        let wake_count = mover_sleep.wake_count();
        let SpillStep::Idle { retry: spill_retry } = engine.room.spill_step() else {
            continue;
        };
        // Spilling comes first, because it makes room in memory. No program waits for a file to move into a memory
        // file, so that work may be delayed.
        if let Some(delay) = pacer.and_then(Pacer::delay) {
            mover_sleep.sleep(wake_count, Some(delay));
            continue;
        }
        let start_time = thread_time();
        let step = engine.room.settle_step();
        if let Some(pacer) = pacer {
            // No caller waits for this work.
            pacer.charge(thread_time() - start_time, false);
        }
        if let SettleStep::Idle {
            retry: settle_retry,
        } = step
        {
            let next_retry = [spill_retry, settle_retry].into_iter().flatten().min();
            mover_sleep.sleep(wake_count, next_retry);
        }
    }
}
