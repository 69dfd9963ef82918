//! The IO threads, and the one that carries chunks to the spill file.
//!
//! Promises
//! * A job that was picked is completed, also if its execution panics.
//! * [`Pool::stop`] returns when no thread of the pool touches the engine any more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Job, Outcome, Pick, SpillStep};

use crate::lane::Lane;

/// The lane of the only I/O server there is until placement knows several.
const LANE: usize = 0;

/// Running IO threads; stops them when dropped.
pub struct Pool {
    lane: Arc<Lane>,
    /// Where the thread that spills sleeps.
    spill: Arc<Lane>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `io_threads` threads (at least one) that drain `engine` into its backing.
    pub fn start<B: Backing>(engine: Arc<Engine<B>>, io_threads: usize) -> std::io::Result<Self> {
        let lane = Arc::new(Lane::default());
        let waker = Arc::clone(&lane);
        engine.set_waker(Arc::new(move || waker.wake()));
        let spill = Arc::new(Lane::default());
        let mut pool = Self { lane: Arc::clone(&lane), spill: Arc::clone(&spill), threads: Vec::new() };
        for index in 0..io_threads.max(1) {
            let (engine, lane) = (Arc::clone(&engine), Arc::clone(&lane));
            let thread = std::thread::Builder::new().name(format!("firn-io-{index}"));
            // A pool that could not start whole is dropped here, which stops what did start.
            pool.threads.push(thread.spawn(move || serve(&engine, &lane))?);
        }
        if engine.arena().spill_figures().is_some() {
            let waker = Arc::clone(&spill);
            engine.set_spill_waker(Arc::new(move || waker.wake()));
            let thread = std::thread::Builder::new().name("firn-spill".into());
            pool.threads.push(thread.spawn(move || spill_over(&engine, &spill))?);
        }
        Ok(pool)
    }

    /// Ends the threads after the job each of them is at.
    pub fn stop(&mut self) {
        self.lane.stop();
        self.spill.stop();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("an IO thread panicked");
            }
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

fn serve<B: Backing>(engine: &Engine<B>, lane: &Lane) {
    while !lane.stopping() {
        let ticket = lane.ticket();
        match engine.pick(LANE) {
            Pick::Job(job) => {
                lane.wake();
                let outcome = execute(&job, engine.backing());
                engine.complete(job, outcome);
            }
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
fn execute<B: Backing>(job: &Job<B>, backing: &B) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| job.execute(backing))).unwrap_or_else(|_| {
        tracing::error!("writing to the backing panicked; the data is kept and tried again");
        Outcome { written: 0, writes: 0, error: Some(Errno::IO), unreadable: false }
    })
}
