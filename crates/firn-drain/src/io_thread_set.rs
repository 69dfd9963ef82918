//! The I/O threads of a mount, which write its pending bytes to all lanes (I/O servers) of the backing.
//!
//! Promises
//! * A picked job (one write of bytes of one file) is completed, even if its execution panics.
//! * A new thread starts if all threads hang in writes, or if all writers of a lane hang and the lane has more to
//!   write ([`IoThreadSet::replace_hung`]). A file whose writes hang therefore does not stop the drain of other files.
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

use crate::idle_threads::IdleThreads;
use crate::worker::{ThreadRole, Worker};

/// Time after which a write counts as hanging.
const HANGS_AFTER: Duration = Duration::from_secs(5);
/// Maximum number of threads at a time that replace hanging ones.
const STAND_INS_MAX: usize = 64;

/// The I/O threads of a mount: the regular ones, and those that replace hanging threads.
pub(crate) struct IoThreadSet {
    idle_threads: Arc<IdleThreads>,
    lane_count: usize,
    /// Number of regular threads.
    regular_count: usize,
    threads: Mutex<Vec<IoThread>>,
    /// Starts a thread with this index and role.
    start_thread: Box<dyn Fn(usize, ThreadRole) -> io::Result<IoThread> + Send + Sync>,
    /// Returns whether the lane with this index has work.
    has_work: Box<dyn Fn(usize) -> bool + Send + Sync>,
    /// Number of threads that were started so far.
    started_count: AtomicUsize,
    /// Whether the log reports a hang of writes, and does not yet report its end.
    is_hang_logged: AtomicBool,
}

/// A thread, and the clock of its current job.
struct IoThread {
    handle: JoinHandle<()>,
    clock: Arc<JobClock>,
}

/// The lane and the start time of a thread's current job.
pub(crate) struct JobClock {
    /// The time from which `start_ms` counts.
    epoch: Instant,
    /// Start of the job ([`JobClock::now_ms`]), or [`NO_JOB`].
    start_ms: AtomicU64,
    lane: AtomicUsize,
}

/// Value of [`JobClock::start_ms`] while the thread has no job.
const NO_JOB: u64 = 0;

impl JobClock {
    fn new() -> Self {
        Self {
            epoch: Instant::now(),
            start_ms: AtomicU64::new(NO_JOB),
            lane: AtomicUsize::new(0),
        }
    }

    /// Records the start of a job of `lane`.
    pub(crate) fn start(&self, lane: usize) {
        self.lane.store(lane, Ordering::Relaxed);
        self.start_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Records the end of the job.
    pub(crate) fn stop(&self) {
        self.start_ms.store(NO_JOB, Ordering::Relaxed);
    }

    /// Returns the milliseconds since `epoch`, counted from 1 so that no time is [`NO_JOB`].
    fn now_ms(&self) -> u64 {
        1 + self.epoch.elapsed().as_millis() as u64
    }

    /// Returns the lane of the current job. Returns `None` if there is no job.
    fn lane(&self) -> Option<usize> {
        if self.start_ms.load(Ordering::Relaxed) == NO_JOB {
            return None;
        }
        Some(self.lane.load(Ordering::Relaxed))
    }

    /// Returns whether the current job takes so long that it counts as hanging.
    fn is_hanging(&self) -> bool {
        let start_ms = self.start_ms.load(Ordering::Relaxed);
        let age_ms = self.now_ms().saturating_sub(start_ms);
        start_ms != NO_JOB && age_ms >= HANGS_AFTER.as_millis() as u64
    }
}

/// Returns whether threads execute jobs of the lane, and all of these threads hang.
fn is_lane_hanging(threads: &[IoThread], lane: usize) -> bool {
    let mut clocks = threads
        .iter()
        .map(|thread| &thread.clock)
        .filter(|clock| clock.lane() == Some(lane))
        .peekable();
    clocks.peek().is_some() && clocks.all(|clock| clock.is_hanging())
}

impl IoThreadSet {
    /// Creates the set of I/O threads of a mount. No thread runs until [`IoThreadSet::start`], which starts
    /// `regular_count` threads; each of them runs `worker`.
    pub(crate) fn new<B: Backing>(worker: Worker<B>, regular_count: usize) -> Self {
        let idle_threads = Arc::clone(&worker.idle_threads);
        let lane_count = worker.lanes.len();
        // The set calls the worker only by two closures, so its type does not depend on `B`.
        let worker = Arc::new(worker);
        let worker_for_has_work = Arc::clone(&worker);
        let start_thread = move |index, role| {
            let worker = Arc::clone(&worker);
            let clock = Arc::new(JobClock::new());
            let clock_of_thread = Arc::clone(&clock);
            let thread = std::thread::Builder::new().name(format!("firn-io-{index}"));
            let handle = thread.spawn(move || worker.run(&clock_of_thread, role))?;
            Ok(IoThread { handle, clock })
        };
        Self {
            idle_threads,
            lane_count,
            regular_count,
            threads: Mutex::default(),
            start_thread: Box::new(start_thread),
            has_work: Box::new(move |lane| worker_for_has_work.has_work(lane)),
            started_count: AtomicUsize::new(0),
            is_hang_logged: AtomicBool::new(false),
        }
    }

    /// Starts the regular threads.
    pub(crate) fn start(&self) -> io::Result<()> {
        for _ in 0..self.regular_count {
            self.add_thread(ThreadRole::Regular)?;
        }
        Ok(())
    }

    fn add_thread(&self, role: ThreadRole) -> io::Result<()> {
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
        let Some(role) = self.find_missing_stand_in() else {
            return;
        };
        self.log_hang(role);
        if let Err(error) = self.add_thread(role) {
            tracing::warn!(%error, "cannot start an I/O thread");
        }
    }

    /// Returns the role of the stand-in that must be started: for all lanes (I/O servers), or for one lane. A stand-in
    /// is a thread that replaces a hanging one. Returns `None` if no stand-in is needed, or none may be started.
    ///
    /// Also removes ended threads from the set, and logs the end of a hang.
    fn find_missing_stand_in(&self) -> Option<ThreadRole> {
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.handle.is_finished());
        if !threads.iter().any(|thread| thread.clock.is_hanging()) {
            self.log_end_of_hang();
            return None;
        }
        if self.idle_threads.is_stopping() || threads.len() >= self.regular_count + STAND_INS_MAX {
            return None;
        }
        if threads.iter().all(|thread| thread.clock.is_hanging()) {
            return Some(ThreadRole::StandIn);
        }
        let mut lanes = 0..self.lane_count;
        let hanging_lane =
            lanes.find(|lane| is_lane_hanging(&threads, *lane) && (self.has_work)(*lane))?;
        Some(ThreadRole::StandInOfLane(hanging_lane))
    }

    /// Warns once for each outage and then logs at debug level: a server may be down for hours, and threads are
    /// replaced during all that time.
    fn log_hang(&self, role: ThreadRole) {
        let message =
            "writes to the backing do not return: an additional thread continues the drain";
        if self.is_hang_logged.swap(true, Ordering::Relaxed) {
            tracing::debug!(?role, message);
        } else {
            tracing::warn!(?role, message);
        }
    }

    fn log_end_of_hang(&self) {
        if self.is_hang_logged.swap(false, Ordering::Relaxed) {
            tracing::info!("writes to the backing return again");
        }
    }

    /// Stops the threads. Each thread ends after its current job.
    pub(crate) fn stop(&self) {
        self.idle_threads.stop();
    }

    /// Returns whether a thread is still running.
    pub(crate) fn is_running(&self) -> bool {
        let threads = self.threads.lock();
        threads.iter().any(|thread| !thread.handle.is_finished())
    }

    /// Drops the handles of the threads, so that threads in calls of the backing that never return are not joined.
    pub(crate) fn detach_threads(&self) {
        self.threads.lock().clear();
    }

    /// Returns all threads, so that the caller can join them.
    pub(crate) fn take_threads(&self) -> Vec<JoinHandle<()>> {
        let threads = std::mem::take(&mut *self.threads.lock());
        threads.into_iter().map(|thread| thread.handle).collect()
    }
}
