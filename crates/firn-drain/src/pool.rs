//! The IO threads of all lanes, and the thread that carries chunks to the spill file.
//!
//! Promise: [`Pool::stop`] returns when no thread of the pool touches the engine any more. [`Pool::stop_within`] gives
//! up on threads whose call of the backing does not return.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Executor, LaneIndex, SpillStep};

use crate::lane::{Lane, is_io_thread};
use crate::pacer::Pacer;
use crate::sleepers::Sleepers;

/// The IO threads of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoThreads {
    /// Of each lane; at least one.
    pub per_lane: usize,
    /// Percent of a CPU that they take where nobody waits for them and programs want all CPUs; from 100 on they do not
    /// ask.
    pub cpu_percent: u32,
}

/// Running IO threads; stops them when dropped.
pub struct Pool {
    lanes: Vec<Lane>,
    /// Where the thread that spills sleeps.
    spill: Arc<Sleepers>,
    spiller: Option<JoinHandle<()>>,
}

/// Wakes the threads of a lane for the engine.
struct LaneThreads {
    sleepers: Vec<(LaneIndex, Arc<Sleepers>)>,
}

impl Executor for LaneThreads {
    fn wake(&self, lane: LaneIndex) {
        let of_lane = self.sleepers.iter().find(|(known, _)| *known == lane);
        if let Some((_, sleepers)) = of_lane {
            sleepers.wake();
        }
    }

    fn wait_for(&self, outcome: &Receiver<Result<(), Errno>>) -> Result<(), Errno> {
        assert!(!is_io_thread(), "an IO thread waits for a drain");
        outcome.recv().unwrap_or(Err(Errno::IO))
    }
}

impl Pool {
    /// Starts threads for each lane of `engine`, which drain it into its backing.
    pub fn start<B: Backing>(engine: Arc<Engine<B>>, io_threads: IoThreads) -> io::Result<Self> {
        let pacer = Pacer::start(io_threads.cpu_percent).map(Arc::new);
        let new_lane = |index| {
            let engine = Arc::clone(&engine);
            Lane::new(engine, index, io_threads.per_lane, pacer.clone())
        };
        let lanes: Vec<(LaneIndex, Lane)> = engine
            .lanes()
            .map(|index| (index, new_lane(index)))
            .collect();
        let sleepers = lanes
            .iter()
            .map(|(index, lane)| (*index, lane.sleepers()))
            .collect();
        engine.set_executor(Arc::new(LaneThreads { sleepers }));
        let spill = Arc::new(Sleepers::default());
        let spiller = start_spiller(&engine, &spill)?;
        // A pool that could not start whole is dropped, which stops what did start.
        let pool = Self {
            lanes: lanes.into_iter().map(|(_, lane)| lane).collect(),
            spill,
            spiller,
        };
        for lane in &pool.lanes {
            lane.start()?;
        }
        Ok(pool)
    }

    /// Starts one more thread for each lane whose threads are all in writes that do not return. To be called now and
    /// then.
    pub fn replace_hung(&self) {
        for lane in &self.lanes {
            lane.replace_hung();
        }
    }

    /// Ends the threads after the job each of them is at.
    pub fn stop(&mut self) {
        self.begin_stop();
        let of_lanes = self.lanes.iter().flat_map(Lane::take_threads);
        for thread in of_lanes.chain(self.spiller.take()) {
            if thread.join().is_err() {
                tracing::error!("an IO thread panicked");
            }
        }
    }

    /// As [`Pool::stop`], but waits for at most `patience`. False: threads are left in calls of the backing, and
    /// end with the process.
    pub fn stop_within(&mut self, patience: Duration) -> bool {
        const CHECK_EVERY: Duration = Duration::from_millis(5);
        self.begin_stop();
        let deadline = Instant::now() + patience;
        while self.is_running() {
            if Instant::now() >= deadline {
                self.lanes.iter().for_each(Lane::abandon);
                self.spiller = None;
                return false;
            }
            std::thread::sleep(CHECK_EVERY);
        }
        self.stop();
        true
    }

    fn begin_stop(&self) {
        self.lanes.iter().for_each(Lane::stop);
        self.spill.stop();
    }

    fn is_running(&self) -> bool {
        let spills = |thread: &JoinHandle<()>| !thread.is_finished();
        self.spiller.as_ref().is_some_and(spills) || self.lanes.iter().any(Lane::is_running)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Starts the thread that moves chunks to the spill file, where there is one.
fn start_spiller<B: Backing>(
    engine: &Arc<Engine<B>>,
    sleepers: &Arc<Sleepers>,
) -> io::Result<Option<JoinHandle<()>>> {
    if engine.arena().spill_figures().is_none() {
        return Ok(None);
    }
    let waker = Arc::clone(sleepers);
    engine.set_spill_waker(Arc::new(move || waker.wake()));
    let engine = Arc::clone(engine);
    let sleepers = Arc::clone(sleepers);
    let thread = std::thread::Builder::new().name("firn-spill".into());
    thread
        .spawn(move || run_spiller(&engine, &sleepers))
        .map(Some)
}

fn run_spiller<B: Backing>(engine: &Engine<B>, sleepers: &Sleepers) {
    while !sleepers.is_stopping() {
        let ticket = sleepers.ticket();
        match engine.spill_step() {
            SpillStep::More => {}
            SpillStep::Idle { retry } => sleepers.sleep(ticket, retry),
        }
    }
}
