//! The IO threads, and the one that carries chunks to the spill file.
//!
//! Promises
//! * A job that was picked is completed, also if its execution panics.
//! * [`Pool::stop`] returns when no thread of the pool touches the engine any more. [`Pool::stop_within`] gives up
//!   on threads whose call of the backing does not return.
//! * Where the writes of all threads hang, others come in for them ([`Pool::stand_in`]): a file whose writes hang does
//!   not stop the drains of others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Job, Outcome, Pick, SpillStep};
use parking_lot::Mutex;

use crate::lane::Lane;

/// The lane of the only I/O server there is until placement knows several.
const LANE: usize = 0;

/// A write that takes so long may take for ever.
const HANGS_AFTER: Duration = Duration::from_secs(5);
/// Threads that stand in for such as hang, at a time.
const STAND_INS_MAX: usize = 64;

/// Running IO threads; stops them when dropped.
pub struct Pool {
    lane: Arc<Lane>,
    /// Where the thread that spills sleeps.
    spill: Arc<Lane>,
    threads: Mutex<Vec<IoThread>>,
    spiller: Option<JoinHandle<()>>,
    io_threads: usize,
    start: Box<dyn Fn(usize, Role) -> std::io::Result<IoThread> + Send + Sync>,
    started: AtomicU64,
}

struct IoThread {
    handle: JoinHandle<()>,
    clock: Arc<Clock>,
}

/// How long a thread has been at what it does.
struct Clock {
    zero: Instant,
    /// Milliseconds from `zero`, and one; 0 while it does nothing.
    since: AtomicU64,
}

impl Clock {
    fn start(&self) {
        self.since.store(self.now(), Ordering::Relaxed);
    }

    fn stop(&self) {
        self.since.store(0, Ordering::Relaxed);
    }

    fn now(&self) -> u64 {
        1 + self.zero.elapsed().as_millis() as u64
    }

    fn hangs(&self) -> bool {
        let since = self.since.load(Ordering::Relaxed);
        since > 0 && self.now().saturating_sub(since) >= HANGS_AFTER.as_millis() as u64
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Runs until the pool stops.
    Regular,
    /// Runs while there is something to do.
    StandIn,
}

impl Pool {
    /// Starts `io_threads` threads (at least one) that drain `engine` into its backing.
    pub fn start<B: Backing>(engine: Arc<Engine<B>>, io_threads: usize) -> std::io::Result<Self> {
        let lane = Arc::new(Lane::default());
        let waker = Arc::clone(&lane);
        engine.set_waker(Arc::new(move || waker.wake()));
        let spill = Arc::new(Lane::default());
        let spiller = match engine.arena().spill_figures() {
            Some(_) => {
                let waker = Arc::clone(&spill);
                let engine = Arc::clone(&engine);
                let spill = Arc::clone(&spill);
                engine.set_spill_waker(Arc::new(move || waker.wake()));
                let thread = std::thread::Builder::new().name("firn-spill".into());
                Some(thread.spawn(move || spill_over(&engine, &spill))?)
            }
            None => None,
        };
        let of_lane = Arc::clone(&lane);
        let start = move |index, role| {
            let engine = Arc::clone(&engine);
            let lane = Arc::clone(&of_lane);
            let clock = Arc::new(Clock {
                zero: Instant::now(),
                since: AtomicU64::new(0),
            });
            let ours = Arc::clone(&clock);
            let thread = std::thread::Builder::new().name(format!("firn-io-{index}"));
            Ok(IoThread {
                handle: thread.spawn(move || serve(&engine, &lane, &ours, role))?,
                clock,
            })
        };
        let threads = Mutex::default();
        let started = AtomicU64::new(0);
        let io_threads = io_threads.max(1);
        let pool = Self {
            lane,
            spill,
            threads,
            spiller,
            io_threads,
            start: Box::new(start),
            started,
        };
        for _ in 0..io_threads {
            // A pool that could not start whole is dropped here, which stops what did start.
            pool.add(Role::Regular)?;
        }
        Ok(pool)
    }

    fn add(&self, role: Role) -> std::io::Result<()> {
        let index = self.started.fetch_add(1, Ordering::Relaxed) as usize;
        let thread = (self.start)(index, role)?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Starts one more thread if all are in a write that does not return. It ends when it finds nothing to do. To be
    /// called now and then.
    pub fn stand_in(&self) {
        let hung = {
            let mut threads = self.threads.lock();
            threads.retain(|thread| !thread.handle.is_finished());
            if threads.iter().any(|thread| !thread.clock.hangs()) {
                return;
            }
            threads.len()
        };
        if self.lane.stopping() || hung >= self.io_threads + STAND_INS_MAX {
            return;
        }
        tracing::warn!(
            threads = hung,
            "writes to the backing do not return: another thread goes on with what is left"
        );
        if let Err(error) = self.add(Role::StandIn) {
            tracing::warn!(%error, "cannot start an IO thread");
        }
    }

    /// Ends the threads after the job each of them is at.
    pub fn stop(&mut self) {
        self.lane.stop();
        self.spill.stop();
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads
            .into_iter()
            .map(|thread| thread.handle)
            .chain(self.spiller.take())
        {
            if thread.join().is_err() {
                tracing::error!("an IO thread panicked");
            }
        }
    }
}

impl Pool {
    /// As [`Pool::stop`], but waits for at most `patience`. False: threads are left in calls of the backing, and
    /// end with the process.
    pub fn stop_within(&mut self, patience: Duration) -> bool {
        const LOOK_AGAIN: Duration = Duration::from_millis(5);
        self.lane.stop();
        self.spill.stop();
        let deadline = Instant::now() + patience;
        let runs = |pool: &Self| {
            let spills = pool
                .spiller
                .as_ref()
                .is_some_and(|thread| !thread.is_finished());
            spills
                || pool
                    .threads
                    .lock()
                    .iter()
                    .any(|thread| !thread.handle.is_finished())
        };
        while runs(self) {
            if Instant::now() >= deadline {
                self.threads.lock().clear();
                self.spiller = None;
                return false;
            }
            std::thread::sleep(LOOK_AGAIN);
        }
        self.stop();
        true
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve<B: Backing>(engine: &Engine<B>, lane: &Lane, clock: &Clock, role: Role) {
    while !lane.stopping() {
        let ticket = lane.ticket();
        match engine.pick(LANE) {
            Pick::Job(job) => {
                lane.wake();
                clock.start();
                let outcome = execute(&job, engine);
                engine.complete(job, outcome);
                clock.stop();
            }
            Pick::Idle { .. } if role == Role::StandIn => return,
            Pick::Idle { retry } => lane.sleep(ticket, retry),
        }
    }
}

fn spill_over<B: Backing>(engine: &Engine<B>, lane: &Lane) {
    while !lane.stopping() {
        let ticket = lane.ticket();
        match engine.spill_step() {
            SpillStep::More => {}
            SpillStep::Idle { retry } => lane.sleep(ticket, retry),
        }
    }
}

/// A panic is a bug, but the bytes of the job are still in the arena: told as EIO, they stay there.
fn execute<B: Backing>(job: &Job<B>, engine: &Engine<B>) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| job.execute(engine))).unwrap_or_else(|_| {
        tracing::error!("writing to the backing panicked; the data is kept and tried again");
        Outcome {
            written: 0,
            writes: 0,
            error: Some(Errno::IO),
            unreadable: false,
        }
    })
}
