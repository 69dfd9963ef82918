//! The sampler of `firn top`: threads that ask for what the screen shows, and keep the last answers.
//!
//! Promises
//! * A slow answer never delays the screen: [`Sampler::fill`] copies the last answers and asks nothing itself.
//! * Each mount has a thread of its own that asks its firnd.
//! * A look at checkpoints or at a backing may hang in the kernel. A child process makes it, and is abandoned at a
//!   timeout.
//!
//! The threads end with the process. A thread of a mount ends earlier when that mount is gone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use firn_client::{ClientError, Connection, Mount};
use firn_protocol::Status;

use super::{Checkpoints, JobView, MountView, Rates, View};
use crate::ask::{ChildFailure, ask_child};
use crate::job::Job;
use crate::text;
use crate::verb::history::CheckpointEntry;

/// Minimum time between two looks at a job. Hosts renew their leases every two seconds, so a shorter time shows nothing
/// new.
const JOB_INTERVAL_MIN: Duration = Duration::from_secs(2);
/// Timeout for a child process that looks at a job or at checkpoints.
const CHILD_TIMEOUT: Duration = Duration::from_millis(1500);
/// Minimum time between two lists of checkpoints.
const CHECKPOINTS_INTERVAL_MIN: Duration = Duration::from_secs(5);
/// Pause after a list of checkpoints, in multiples of the time that the list took. A list examines every file of the
/// checkpoints, so the pause bounds its cost to about 0.5 % of the time.
const PAUSE_PER_LIST_TIME: u32 = 200;

/// What the command line asks the screen to show.
#[derive(Clone, Debug)]
pub struct TopRequest {
    /// Time between two samples of a mount.
    pub every: Duration,
    /// The directory whose checkpoints are shown. `None` means the mount that is chosen on the screen.
    pub directory: Option<PathBuf>,
    /// The backing or the mount point of the job. `None` means the mount that is chosen on the screen.
    pub job_path: Option<PathBuf>,
}

/// The last answers of all threads. `Sampler::fill` copies them into a view.
#[derive(Default)]
struct LastAnswers {
    /// Samples of each mount, by mount point.
    mounts: BTreeMap<PathBuf, MountSamples>,
    /// Why the mounts cannot be listed. `None` means that the last list succeeded.
    fault: Option<String>,
    /// Checkpoints of the chosen directory.
    checkpoints: Checkpoints,
    /// The last look at the job. `None` means that none has ended yet.
    job: Option<Result<Job, String>>,
    /// Rates of the job at its last looks.
    job_rates: Rates,
}

/// The last answers of the firnd of one mount.
struct MountSamples {
    /// The last status. `None` means that none has arrived yet.
    status: Option<Box<Status>>,
    /// Rates of the last samples.
    rates: Rates,
    /// The error of the last question. `None` means that firnd answered it.
    silent: Option<String>,
    /// Whether the socket of its firnd is in another runtime directory, so that this process cannot ask.
    is_elsewhere: bool,
    /// When firnd last answered, or when the thread began.
    answered_at: Instant,
}

/// The user's choices on the screen that decide what the threads ask for.
struct UserChoice {
    /// Whether the screen shows a job.
    shows_job: AtomicBool,
    /// Whether samples are paused.
    is_paused: AtomicBool,
    /// Directory whose checkpoints are listed. `None` means that no directory is chosen yet.
    directory: Mutex<Option<PathBuf>>,
    /// The backing or the mount point of the job. `None` means this user's only mount.
    job_path: Mutex<Option<PathBuf>>,
}

/// The running threads, their answers, and the choices that steer them.
pub struct Sampler {
    /// The last answers.
    board: Arc<Mutex<LastAnswers>>,
    /// The user's choices, which all threads read.
    choice: Arc<UserChoice>,
    /// What the command line asked for.
    wanted: TopRequest,
}

/// Locks a mutex. A panic of another thread leaves usable values here, so poisoning is ignored.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sampler {
    /// Starts the threads. They send to `fresh` whenever there is something new to show. Returns an error where a
    /// thread cannot be started.
    pub fn start(wanted: TopRequest, shows_job: bool, fresh: &Sender<()>) -> std::io::Result<Self> {
        let sampler = Self {
            board: Arc::default(),
            choice: Arc::new(UserChoice {
                shows_job: AtomicBool::new(shows_job),
                is_paused: AtomicBool::new(false),
                directory: Mutex::new(wanted.directory.clone()),
                job_path: Mutex::new(wanted.job_path.clone()),
            }),
            wanted,
        };
        sampler.spawn(fresh, watch_mounts)?;
        sampler.spawn(fresh, watch_checkpoints)?;
        sampler.spawn(fresh, watch_job)?;
        Ok(sampler)
    }

    /// Starts one thread that runs `work` until `fresh` has no receiver.
    fn spawn(&self, fresh: &Sender<()>, work: fn(&SamplerThread)) -> std::io::Result<()> {
        let watch = SamplerThread {
            board: Arc::clone(&self.board),
            choice: Arc::clone(&self.choice),
            wanted: self.wanted.clone(),
            fresh: fresh.clone(),
        };
        let thread = std::thread::Builder::new();
        thread.spawn(move || work(&watch)).map(drop)
    }

    /// Passes the user's choices on the screen to the threads.
    ///
    /// Where the chosen directory or mount changes, the answers about the previous one are dropped from the board.
    pub fn choose(&self, view: &View) {
        self.choice
            .shows_job
            .store(view.job.is_some(), Ordering::Relaxed);
        self.choice
            .is_paused
            .store(view.is_paused, Ordering::Relaxed);
        let path = match &view.job {
            Some(job) => job_directory(job, view),
            None => self.mount_directory(view),
        };
        if view.job.is_none() && self.wanted.job_path.is_none() {
            self.choose_job(path.clone());
        }
        if self.wanted.directory.is_none() {
            let mut directory = lock(&self.choice.directory);
            if *directory != path {
                *directory = path;
                drop(directory);
                lock(&self.board).checkpoints = Checkpoints::Asked;
            }
        }
    }

    /// Makes the job of `mount` the one that is shown when the user asks for a job.
    fn choose_job(&self, mount: Option<PathBuf>) {
        let mut job_path = lock(&self.choice.job_path);
        if *job_path != mount {
            *job_path = mount;
            drop(job_path);
            let mut board = lock(&self.board);
            board.job = None;
            board.job_rates = Rates::default();
        }
    }

    /// Returns the mount point that is chosen on the screen, or `None` where no mount is listed.
    fn mount_directory(&self, view: &View) -> Option<PathBuf> {
        let mounts = view.ordered_mounts();
        let chosen = mounts.get(view.upper)?;
        let board = lock(&self.board);
        let mut paths = board.mounts.keys();
        let found = paths.find(|path| text::path(path) == chosen.mount_point);
        found.cloned()
    }

    /// Copies the last answers into a view, and keeps the user's choice within the new rows.
    pub fn fill(&self, view: &mut View) {
        let board = lock(&self.board);
        view.mounts = board
            .mounts
            .iter()
            .filter(|(_, samples)| !samples.is_elsewhere)
            .map(|(path, samples)| MountView {
                mount_point: text::path(path),
                status: samples.status.clone(),
                silent: samples
                    .silent
                    .clone()
                    .map(|why| (why, samples.answered_at.elapsed().as_secs_f64())),
                rates: samples.rates.clone(),
            })
            .collect();
        view.elsewhere = board.mounts.len() - view.mounts.len();
        view.fault = board.fault.clone();
        if view.chosen.is_none()
            && let Some(directory) = self.wanted.directory.as_ref()
        {
            let directory = std::path::absolute(directory).unwrap_or_default();
            let mut above = board.mounts.keys().rev();
            let mount = above.find(|path| directory.starts_with(path));
            view.chosen = mount.map(|path| text::path(path));
        }
        view.checkpoints = board.checkpoints.clone();
        if view.job.is_some() {
            view.job = Some(JobView {
                seen: board.job.clone(),
                rates: board.job_rates.clone(),
            });
        }
        drop(board);
        view.clamp();
    }
}

/// Returns the directory in which this host sees the files of a job: its mount of the backing, or else the backing.
/// Returns `None` while the job is unknown.
fn job_directory(job: &JobView, view: &View) -> Option<PathBuf> {
    let Some(Ok(job)) = &job.seen else {
        return None;
    };
    let mut answered = view.mounts.iter().filter_map(|mount| mount.status.as_ref());
    let own = answered.find(|status| status.backing == job.backing);
    let path = own.map_or(&job.backing, |status| &status.mount_point);
    Some(path.as_path().to_owned())
}

/// What each thread works with.
struct SamplerThread {
    /// The last answers.
    board: Arc<Mutex<LastAnswers>>,
    /// The user's choices.
    choice: Arc<UserChoice>,
    /// What the command line asked for.
    wanted: TopRequest,
    /// Gets a message whenever there is something new to show.
    fresh: Sender<()>,
}

impl SamplerThread {
    /// Signals that there is something new to show. Returns false where the screen is gone, so that the thread ends.
    fn tell(&self) -> bool {
        self.fresh.send(()).is_ok()
    }

    fn is_paused(&self) -> bool {
        self.choice.is_paused.load(Ordering::Relaxed)
    }
}

/// Lists the mounts of this host again and again. Starts a thread for each new mount, and ends that of each mount that
/// is gone.
fn watch_mounts(watch: &SamplerThread) {
    let mut asked: BTreeMap<PathBuf, Sender<()>> = BTreeMap::new();
    loop {
        let listed = firn_client::mounts();
        lock(&watch.board).fault = listed.as_ref().err().map(ToString::to_string);
        if let Ok(mounts) = listed {
            let paths: BTreeSet<&Path> = mounts
                .iter()
                .map(|mount| mount.mount_point.as_path())
                .collect();
            asked.retain(|path, _| paths.contains(path.as_path()));
            lock(&watch.board)
                .mounts
                .retain(|path, _| paths.contains(path.as_path()));
            for mount in &mounts {
                if !asked.contains_key(&mount.mount_point)
                    && let Some(end) = ask_mount(watch, mount)
                {
                    asked.insert(mount.mount_point.clone(), end);
                }
            }
        }
        if !watch.tell() {
            return;
        }
        std::thread::sleep(watch.wanted.every.max(Duration::from_secs(1)));
    }
}

/// Starts the thread that asks the firnd of a mount. The thread ends when the returned sender is dropped. Returns
/// `None` where the thread cannot be started.
fn ask_mount(watch: &SamplerThread, mount: &Mount) -> Option<Sender<()>> {
    let (end, ended) = mpsc::channel();
    lock(&watch.board).mounts.insert(
        mount.mount_point.clone(),
        MountSamples {
            status: None,
            rates: Rates::default(),
            silent: None,
            is_elsewhere: false,
            answered_at: Instant::now(),
        },
    );
    let watch = SamplerThread {
        board: Arc::clone(&watch.board),
        choice: Arc::clone(&watch.choice),
        wanted: watch.wanted.clone(),
        fresh: watch.fresh.clone(),
    };
    let mount = mount.clone();
    let thread = std::thread::Builder::new();
    thread
        .spawn(move || sample_mount(&watch, &mount, &ended))
        .ok()?;
    Some(end)
}

/// Asks the firnd of one mount for its status until `ended` has no sender. An error is kept as the reason for silence,
/// and the next question opens a new connection.
fn sample_mount(watch: &SamplerThread, mount: &Mount, ended: &Receiver<()>) {
    let mut connection: Option<Connection> = None;
    loop {
        if !watch.is_paused() {
            let open = match connection.take() {
                Some(open) => Ok(open),
                None => Connection::open(mount),
            };
            let answer = open.and_then(|mut open| Ok((open.status()?, open)));
            let mut board = lock(&watch.board);
            // The mount has left the list, so its thread ends.
            let Some(samples) = board.mounts.get_mut(&mount.mount_point) else {
                return;
            };
            match answer {
                Ok((status, open)) => {
                    samples.rates.push(
                        status.ingest_bytes_per_second,
                        status.drain_bytes_per_second,
                    );
                    samples.status = Some(Box::new(status));
                    samples.silent = None;
                    samples.is_elsewhere = false;
                    samples.answered_at = Instant::now();
                    connection = Some(open);
                }
                Err(error) => {
                    samples.is_elsewhere = matches!(error, ClientError::NoSocket { .. });
                    samples.silent = Some(error.to_string());
                }
            }
            drop(board);
            if !watch.tell() {
                return;
            }
        }
        if let Err(mpsc::RecvTimeoutError::Disconnected) = ended.recv_timeout(watch.wanted.every) {
            return;
        }
    }
}

/// Lists the checkpoints of the chosen directory again and again.
fn watch_checkpoints(watch: &SamplerThread) {
    loop {
        let directory = lock(&watch.choice.directory).clone();
        let Some(directory) = directory.filter(|_| !watch.is_paused()) else {
            std::thread::sleep(Duration::from_millis(200));
            continue;
        };
        let begin = Instant::now();
        let seen = look_at_checkpoints(&directory);
        let took = begin.elapsed();
        let is_current = || lock(&watch.choice.directory).as_ref() == Some(&directory);
        if is_current() {
            lock(&watch.board).checkpoints = seen;
        }
        if !watch.tell() {
            return;
        }
        let rest = watch
            .wanted
            .every
            .max(CHECKPOINTS_INTERVAL_MIN)
            .max(took * PAUSE_PER_LIST_TIME);
        let end = Instant::now() + rest;
        // A change of the chosen directory ends the pause, so that the new directory is listed at once.
        while Instant::now() < end && is_current() {
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

/// Lists the checkpoints of a directory in a child process (`firn history --json`). Returns the reason where the child
/// fails or exceeds its timeout.
fn look_at_checkpoints(directory: &Path) -> Checkpoints {
    let arguments = vec![
        "history".into(),
        "--json".into(),
        "--".into(),
        directory.into(),
    ];
    match ask_child::<Vec<CheckpointEntry>>(arguments, CHILD_TIMEOUT) {
        Ok(list) => Checkpoints::Listed(list),
        Err(ChildFailure::Late) => Checkpoints::Unknown(format!(
            "{} did not list its files within {}",
            text::path(directory),
            text::seconds(CHILD_TIMEOUT.as_secs_f64())
        )),
        Err(ChildFailure::Refused { text, .. } | ChildFailure::NotRun(text)) => {
            Checkpoints::Unknown(text)
        }
    }
}

/// Looks at the chosen job again and again while the screen shows a job. An answer is dropped where the choice has
/// changed meanwhile.
fn watch_job(watch: &SamplerThread) {
    loop {
        if !watch.choice.shows_job.load(Ordering::Relaxed) || watch.is_paused() {
            std::thread::sleep(Duration::from_millis(100));
            continue;
        }
        let path = lock(&watch.choice.job_path).clone();
        let seen = Job::look(path.as_deref(), CHILD_TIMEOUT);
        let seen = seen.map_err(|failure| failure.text().unwrap_or_default());
        if *lock(&watch.choice.job_path) != path {
            continue;
        }
        let mut board = lock(&watch.board);
        if let Ok(job) = &seen {
            let total = &job.total;
            board
                .job_rates
                .push(total.ingest_bytes_per_second, total.drain_bytes_per_second);
        }
        board.job = Some(seen);
        drop(board);
        if !watch.tell() {
            return;
        }
        std::thread::sleep(watch.wanted.every.max(JOB_INTERVAL_MIN));
    }
}
