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
    mover_signal: Arc<IdleThreads>,
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

/// Makes the lanes of the engine, each with its token if the mount has tokens.
fn new_lanes<B: Backing>(
    engine: &Engine<B>,
    tokens: Option<&Tokens>,
    idle_threads: &Arc<IdleThreads>,
) -> Vec<Lane> {
    let new_lane = |lane: LaneIndex| {
        let token = tokens.and_then(|tokens| tokens.lane(lane.index()));
        Lane::new(lane, token.cloned(), idle_threads)
    };
    engine.drainer.lanes().map(new_lane).collect()
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
        let lanes = new_lanes(&engine, tokens.as_ref(), &idle_threads);
        engine.drainer.set_executor(Arc::new(WakeThreads {
            idle_threads: Arc::clone(&idle_threads),
        }));
        // The pacer delays writes that no program waits for, so that programs get the CPUs.
        let pacer = Pacer::start(io_threads.cpu_percent).map(Arc::new);
        // The mover is the thread that moves chunks of the arena. It sleeps until this signal wakes it.
        let mover_signal = Arc::new(IdleThreads::default());
        let mover = start_mover(&engine, &mover_signal, pacer.clone())?;
        let thread_count = io_threads.count.max(1);
        let lane_scheduler =
            LaneScheduler::new(lanes.len(), thread_count, io_threads.lane_writers_max);
        let worker = Worker {
            lane_scheduler,
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
            mover_signal,
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

    /// Stops all threads of the pool, as [`Pool::stop`] does, but waits for at most `timeout`. Returns false if some
    /// threads are still in calls of the backing. Such a thread runs until its call returns or the process ends.
    pub fn stop_within(&mut self, timeout: Duration) -> bool {
        // A thread handle cannot be joined with a timeout, so the state of the threads is checked periodically.
        const CHECK_EVERY: Duration = Duration::from_millis(5);
        self.request_stop();
        let deadline = Instant::now() + timeout;
        while self.is_running() {
            if Instant::now() >= deadline {
                self.detach_threads();
                return false;
            }
            std::thread::sleep(CHECK_EVERY);
        }
        self.stop();
        true
    }

    /// Drops the handles of all threads, which detaches the threads. The drop of the pool then does not wait for them.
    fn detach_threads(&mut self) {
        self.io_threads.detach_threads();
        self.mover = None;
        self.tokens = None;
    }

    /// Requests that all threads end after their current job.
    fn request_stop(&self) {
        self.io_threads.stop();
        self.mover_signal.stop();
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

/// Starts the mover, the thread that moves chunks (units of the arena's memory) to the spill file or to memory files.
/// Returns `None` if the mount has neither of them.
fn start_mover<B: Backing>(
    engine: &Arc<Engine<B>>,
    mover_signal: &Arc<IdleThreads>,
    pacer: Option<Arc<Pacer>>,
) -> io::Result<Option<JoinHandle<()>>> {
    let has_spill_file = engine.arena().spill_figures().is_some();
    if !has_spill_file && !engine.room.settles() {
        return Ok(None);
    }
    let new_waker = || {
        let signal = Arc::clone(mover_signal);
        Arc::new(move || signal.wake())
    };
    engine.room.set_spill_waker(new_waker());
    // To settle a file is to copy it to a memory file.
    engine.room.set_settle_waker(new_waker());
    let engine = Arc::clone(engine);
    let mover_signal = Arc::clone(mover_signal);
    let thread = std::thread::Builder::new().name("firn-move".into());
    let handle = thread.spawn(move || run_mover(&engine, &mover_signal, pacer.as_deref()))?;
    Ok(Some(handle))
}

/// Body of the thread that moves chunks (units of the arena's memory): to the spill file if memory is short, and to
/// memory files otherwise. Ends when the pool stops. The pacer delays work that no program waits for.
fn run_mover<B: Backing>(engine: &Engine<B>, mover_signal: &IdleThreads, pacer: Option<&Pacer>) {
    while !mover_signal.is_stopping() {
        let wake_count = mover_signal.wake_count();
        let SpillStep::Idle { retry: spill_retry } = engine.room.spill_step() else {
            continue;
        };
        // A move to the spill file comes first, because it makes room in memory. No program waits for the copy of a
        // file to a memory file (a settle step), so the pacer may delay that copy.
        if let Some(delay) = pacer.and_then(Pacer::delay) {
            mover_signal.sleep(wake_count, Some(delay));
            continue;
        }
        let start_time = thread_time();
        let step = engine.room.settle_step();
        if let Some(pacer) = pacer {
            let is_awaited = false;
            pacer.charge(thread_time() - start_time, is_awaited);
        }
        let SettleStep::Idle {
            retry: settle_retry,
        } = step
        else {
            continue;
        };
        let next_retry = [spill_retry, settle_retry].into_iter().flatten().min();
        mover_signal.sleep(wake_count, next_retry);
    }
}
