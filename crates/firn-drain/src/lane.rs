//! One I/O server: its IO threads and their limits.
//!
//! Promises
//! * A job that was picked is completed, also if its execution panics.
//! * Where the writes of all threads hang, others come in for them ([`Lane::replace_hung`]): files whose writes hang do
//!   not stop the drains of others.
//!
//! Invariants
//! * One file has fewer writes under way than the lane has regular threads, where it has more than one.
//! * At most [`STAND_INS_MAX`] threads beside the regular ones.

use std::cell::Cell;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Job, JobOutcome, LaneIndex, LaneLimits, Pick};
use parking_lot::Mutex;

use crate::cpu::thread_time;
use crate::pacer::Pacer;
use crate::sleepers::Sleepers;

/// A write that takes so long may take for ever.
const HANGS_AFTER: Duration = Duration::from_secs(5);
/// Threads that stand in for such as hang, at a time.
const STAND_INS_MAX: usize = 64;

thread_local! {
    static IS_IO_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread carries out jobs. It must not wait for one.
pub(crate) fn is_io_thread() -> bool {
    IS_IO_THREAD.get()
}

/// The threads of one lane.
pub(crate) struct Lane {
    sleepers: Arc<Sleepers>,
    regular_count: usize,
    threads: Mutex<Vec<IoThread>>,
    start_thread: Box<dyn Fn(usize, Role) -> io::Result<IoThread> + Send + Sync>,
    started_count: AtomicUsize,
}

struct IoThread {
    handle: JoinHandle<()>,
    clock: Arc<JobClock>,
}

/// How long a thread has been at its job.
struct JobClock {
    zero: Instant,
    /// Milliseconds from `zero` to the begin of the job, and one; 0 without a job.
    began_ms: AtomicU64,
}

impl JobClock {
    fn new() -> Self {
        Self {
            zero: Instant::now(),
            began_ms: AtomicU64::new(0),
        }
    }

    fn start(&self) {
        self.began_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    fn stop(&self) {
        self.began_ms.store(0, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        1 + self.zero.elapsed().as_millis() as u64
    }

    fn hangs(&self) -> bool {
        let began_ms = self.began_ms.load(Ordering::Relaxed);
        let age_ms = self.now_ms().saturating_sub(began_ms);
        began_ms > 0 && age_ms >= HANGS_AFTER.as_millis() as u64
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Runs until the lane stops.
    Regular,
    /// Runs while there is something to do.
    StandIn,
}

/// What each thread of a lane works with.
struct Worker<B: Backing> {
    engine: Arc<Engine<B>>,
    lane: LaneIndex,
    limits: LaneLimits,
    sleepers: Arc<Sleepers>,
    /// Where the drain leaves the CPUs to programs.
    pacer: Option<Arc<Pacer>>,
}

/// How a thread that paces itself goes on.
struct Pace<'a> {
    pacer: &'a Pacer,
    /// Somebody waits for a drain, or for room.
    is_awaited: bool,
}

impl Pace<'_> {
    /// How long to sleep because programs want the CPU; `None`: there is no need.
    fn delay(&self) -> Option<Duration> {
        if self.is_awaited {
            None
        } else {
            self.pacer.delay()
        }
    }
}

impl Lane {
    /// A lane without threads yet; `regular_count` (at least one) are to be started.
    pub(crate) fn new<B: Backing>(
        engine: Arc<Engine<B>>,
        lane: LaneIndex,
        regular_count: usize,
        pacer: Option<Arc<Pacer>>,
    ) -> Self {
        let regular_count = regular_count.max(1);
        let sleepers = Arc::new(Sleepers::default());
        let limits = LaneLimits {
            file_writes_max: (regular_count - 1).max(1),
        };
        let worker = Arc::new(Worker {
            engine,
            lane,
            limits,
            sleepers: Arc::clone(&sleepers),
            pacer,
        });
        let start_thread = move |index, role| {
            let worker = Arc::clone(&worker);
            let clock = Arc::new(JobClock::new());
            let own_clock = Arc::clone(&clock);
            let thread = std::thread::Builder::new().name(format!("firn-io-{index}"));
            let handle = thread.spawn(move || worker.run(&own_clock, role))?;
            Ok(IoThread { handle, clock })
        };
        Self {
            sleepers,
            regular_count,
            threads: Mutex::default(),
            start_thread: Box::new(start_thread),
            started_count: AtomicUsize::new(0),
        }
    }

    /// Where the lane's threads sleep.
    pub(crate) fn sleepers(&self) -> Arc<Sleepers> {
        Arc::clone(&self.sleepers)
    }

    /// Starts the regular threads.
    pub(crate) fn start(&self) -> io::Result<()> {
        for _ in 0..self.regular_count {
            self.add_thread(Role::Regular)?;
        }
        Ok(())
    }

    fn add_thread(&self, role: Role) -> io::Result<()> {
        let index = self.started_count.fetch_add(1, Ordering::Relaxed);
        let thread = (self.start_thread)(index, role)?;
        let mut threads = self.threads.lock();
        threads.push(thread);
        debug_assert!(
            threads.len() <= self.regular_count + STAND_INS_MAX,
            "{} threads in a lane of {}",
            threads.len(),
            self.regular_count
        );
        Ok(())
    }

    /// Starts one more thread if all are in a write that does not return. It ends when it finds nothing to do.
    pub(crate) fn replace_hung(&self) {
        let hung = {
            let mut threads = self.threads.lock();
            threads.retain(|thread| !thread.handle.is_finished());
            if threads.iter().any(|thread| !thread.clock.hangs()) {
                return;
            }
            threads.len()
        };
        if self.sleepers.is_stopping() || hung >= self.regular_count + STAND_INS_MAX {
            return;
        }
        tracing::warn!(
            threads = hung,
            "writes to the backing do not return: another thread goes on with what is left"
        );
        if let Err(error) = self.add_thread(Role::StandIn) {
            tracing::warn!(%error, "cannot start an IO thread");
        }
    }

    /// Lets the threads end after the job each of them is at.
    pub(crate) fn stop(&self) {
        self.sleepers.stop();
    }

    /// Whether a thread has not ended.
    pub(crate) fn is_running(&self) -> bool {
        let threads = self.threads.lock();
        threads.iter().any(|thread| !thread.handle.is_finished())
    }

    /// Gives up on threads whose call of the backing does not return.
    pub(crate) fn abandon(&self) {
        self.threads.lock().clear();
    }

    /// Takes the threads, to be joined.
    pub(crate) fn take_threads(&self) -> Vec<JoinHandle<()>> {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().map(|thread| thread.handle).collect()
    }
}

impl<B: Backing> Worker<B> {
    fn run(&self, clock: &JobClock, role: Role) {
        IS_IO_THREAD.set(true);
        while !self.sleepers.is_stopping() {
            let ticket = self.sleepers.ticket();
            let pace = self.pacer.as_deref().map(|pacer| Pace {
                pacer,
                is_awaited: self.engine.is_drain_awaited(),
            });
            if let Some(delay) = pace.as_ref().and_then(Pace::delay) {
                self.engine.note_drain_put_off();
                self.sleepers.sleep(ticket, Some(delay));
                continue;
            }
            match self.engine.pick(self.lane, self.limits) {
                Pick::Job(job) => {
                    self.sleepers.wake();
                    clock.start();
                    self.perform(job, pace.as_ref());
                    clock.stop();
                }
                Pick::Idle { .. } if role == Role::StandIn => return,
                Pick::Idle { retry } => self.sleepers.sleep(ticket, retry),
            }
        }
    }

    /// Executes and completes a job, and charges its CPU time where the drain is paced.
    fn perform(&self, job: Job<B>, pace: Option<&Pace<'_>>) {
        let before = pace.map(|_| thread_time());
        let outcome = self.execute(&job);
        self.engine.complete(job, outcome);
        if let (Some(pace), Some(before)) = (pace, before) {
            pace.pacer.charge(thread_time() - before, pace.is_awaited);
        }
    }

    /// A panic is a bug, but the bytes of the job are still in the arena: told as EIO, they stay there.
    fn execute(&self, job: &Job<B>) -> JobOutcome {
        catch_unwind(AssertUnwindSafe(|| job.execute(&self.engine))).unwrap_or_else(|_| {
            tracing::error!("writing to the backing panicked; the data is kept and tried again");
            JobOutcome {
                written: 0,
                writes: 0,
                error: Some(Errno::IO),
                unreadable: false,
            }
        })
    }
}
