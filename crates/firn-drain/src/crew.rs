//! The I/O threads of a mount, which serve all of its lanes.
//!
//! Promises
//! * A picked job is completed, even if its execution panics.
//! * A new thread starts if all threads hang in writes, or if all writers of a lane hang and the lane has more to
//!   write ([`Crew::replace_hung`]). A file whose writes hang therefore does not stop the drain of other files.
//!
//! Invariants
//! * If a lane has more than one regular thread, one file has fewer writes in progress than the lane has regular
//!   threads.
//! * There are at most [`STAND_INS_MAX`] threads in addition to the regular ones.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use firn_backing::Backing;
use parking_lot::Mutex;

use crate::sleepers::Sleepers;
use crate::worker::{Role, Worker};

/// Time after which a write counts as hanging.
const HANGS_AFTER: Duration = Duration::from_secs(5);
/// Maximum number of threads at a time that replace hanging ones.
const STAND_INS_MAX: usize = 64;

/// The I/O threads and their regular number.
pub(crate) struct Crew {
    sleepers: Arc<Sleepers>,
    lane_count: usize,
    regular_count: usize,
    threads: Mutex<Vec<IoThread>>,
    start_thread: Box<dyn Fn(usize, Role) -> io::Result<IoThread> + Send + Sync>,
    has_work: Box<dyn Fn(usize) -> bool + Send + Sync>,
    started_count: AtomicUsize,
    /// Whether the log reports a hang of writes, and does not yet report its end.
    has_told_of_hang: AtomicBool,
}

struct IoThread {
    handle: JoinHandle<()>,
    clock: Arc<JobClock>,
}

/// The lane and the start time of a thread's current job.
pub(crate) struct JobClock {
    zero: Instant,
    /// Milliseconds from `zero` to the start of the job, plus one. 0 means that there is no job.
    began_ms: AtomicU64,
    lane: AtomicUsize,
}

impl JobClock {
    fn new() -> Self {
        Self {
            zero: Instant::now(),
            began_ms: AtomicU64::new(0),
            lane: AtomicUsize::new(0),
        }
    }

    /// Records the start of a job of `lane`.
    pub(crate) fn start(&self, lane: usize) {
        self.lane.store(lane, Ordering::Relaxed);
        self.began_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(crate) fn stop(&self) {
        self.began_ms.store(0, Ordering::Relaxed);
    }

    fn now_ms(&self) -> u64 {
        1 + self.zero.elapsed().as_millis() as u64
    }

    /// Returns the lane of the current job. Returns `None` if there is no job.
    fn lane(&self) -> Option<usize> {
        let is_at_job = self.began_ms.load(Ordering::Relaxed) > 0;
        is_at_job.then(|| self.lane.load(Ordering::Relaxed))
    }

    fn hangs(&self) -> bool {
        let began_ms = self.began_ms.load(Ordering::Relaxed);
        let age_ms = self.now_ms().saturating_sub(began_ms);
        began_ms > 0 && age_ms >= HANGS_AFTER.as_millis() as u64
    }
}

/// Returns whether threads execute jobs of the lane, and all of these threads hang.
fn lane_hangs(threads: &[IoThread], lane: usize) -> bool {
    let mut at_lane = threads
        .iter()
        .filter(|thread| thread.clock.lane() == Some(lane))
        .peekable();
    at_lane.peek().is_some() && at_lane.all(|thread| thread.clock.hangs())
}

impl Crew {
    /// Creates a crew without threads. [`Crew::start`] starts `regular_count` threads.
    pub(crate) fn new<B: Backing>(worker: Worker<B>, regular_count: usize) -> Self {
        let sleepers = Arc::clone(&worker.sleepers);
        let lane_count = worker.lanes.len();
        let worker = Arc::new(worker);
        let looker = Arc::clone(&worker);
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
            lane_count,
            regular_count,
            threads: Mutex::default(),
            start_thread: Box::new(start_thread),
            has_work: Box::new(move |lane| looker.has_work(lane)),
            started_count: AtomicUsize::new(0),
            has_told_of_hang: AtomicBool::new(false),
        }
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
            "{} threads of {}",
            threads.len(),
            self.regular_count
        );
        Ok(())
    }

    /// Starts one more thread if all threads hang, or if all writers of a lane hang and the lane has more to write.
    /// The new thread ends when it finds no job.
    pub(crate) fn replace_hung(&self) {
        let role = {
            let mut threads = self.threads.lock();
            threads.retain(|thread| !thread.handle.is_finished());
            if !threads.iter().any(|thread| thread.clock.hangs()) {
                self.tell_of_end_of_hang();
                return;
            }
            if self.sleepers.is_stopping() || threads.len() >= self.regular_count + STAND_INS_MAX {
                return;
            }
            if threads.iter().all(|thread| thread.clock.hangs()) {
                Some(Role::StandIn)
            } else {
                let mut hung = (0..self.lane_count).filter(|lane| lane_hangs(&threads, *lane));
                hung.find(|lane| (self.has_work)(*lane))
                    .map(Role::StandInOfLane)
            }
        };
        let Some(role) = role else {
            return;
        };
        self.tell_of_hang(role);
        if let Err(error) = self.add_thread(role) {
            tracing::warn!(%error, "cannot start an I/O thread");
        }
    }

    /// Warns once for each outage and then logs at debug level: a server may be down for hours, and threads are
    /// replaced during all that time.
    fn tell_of_hang(&self, role: Role) {
        let message =
            "writes to the backing do not return: an additional thread continues the drain";
        if self.has_told_of_hang.swap(true, Ordering::Relaxed) {
            tracing::debug!(?role, message);
        } else {
            tracing::warn!(?role, message);
        }
    }

    fn tell_of_end_of_hang(&self) {
        if self.has_told_of_hang.swap(false, Ordering::Relaxed) {
            tracing::info!("writes to the backing return again");
        }
    }

    /// Stops the threads. Each thread ends after its current job.
    pub(crate) fn stop(&self) {
        self.sleepers.stop();
    }

    /// Returns whether a thread is still running.
    pub(crate) fn is_running(&self) -> bool {
        let threads = self.threads.lock();
        threads.iter().any(|thread| !thread.handle.is_finished())
    }

    /// Drops the handles of the threads, so that threads in calls of the backing that never return are not joined.
    pub(crate) fn abandon(&self) {
        self.threads.lock().clear();
    }

    /// Returns all threads, so that the caller can join them.
    pub(crate) fn take_threads(&self) -> Vec<JoinHandle<()>> {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().map(|thread| thread.handle).collect()
    }
}
