//! The sampler of `firn top`: threads that ask for mounts, jobs and checkpoints at intervals, and store the last
//! answers.
//!
//! The figures of a mount come from its daemon, firnd. Those of a job come from the files of its hosts in the backing,
//! the directory that they share.
//!
//! Promises
//! * A slow answer never delays the screen: [`Sampler::copy_answers_to`] copies the last answers and asks nothing
//!   itself.
//! * Each mount has a separate thread that asks its firnd.
//! * Calls to list checkpoints or to read a backing may hang in the kernel. A child process makes them, and is
//!   abandoned at a timeout.
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

use super::{Checkpoints, FirndSilence, JobView, MountView, Rates, View};
use crate::ask::{ChildFailure, ask_child};
use crate::job::Job;
use crate::text;
use crate::verb::history::CheckpointEntry;

/// Minimum time between two questions about a job. Hosts renew their leases every two seconds, so a shorter time shows
/// nothing new.
const JOB_INTERVAL_MIN: Duration = Duration::from_secs(2);
/// Timeout for a child process that asks for a job or for checkpoints.
const CHILD_TIMEOUT: Duration = Duration::from_millis(1500);
/// Interval at which the thread for checkpoints checks whether the selection has changed.
const SELECTION_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which the thread for jobs checks whether the screen shows a job.
const JOB_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum interval between two lists of mounts.
const MOUNTS_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Minimum time between two lists of checkpoints.
const CHECKPOINTS_INTERVAL_MIN: Duration = Duration::from_secs(5);
/// Pause after a list of checkpoints, in multiples of the time that the list took. A list examines every file of the
/// checkpoints, so the pause bounds its cost to about 0.5 % of the time.
const PAUSE_FACTOR: u32 = 200;

/// What the command line asks the screen to show.
#[derive(Clone, Debug)]
pub struct TopRequest {
    /// Time between two samples of a mount.
    pub interval: Duration,
    /// The directory with the checkpoints that are shown. `None` means the mount that is selected on the screen.
    pub directory: Option<PathBuf>,
    /// The backing or the mount point of the job. `None` means the mount that is selected on the screen.
    pub job_path: Option<PathBuf>,
}

/// The last answers of all threads. [`Sampler::copy_answers_to`] copies them into a view.
#[derive(Default)]
struct LastAnswers {
    /// Samples of each mount, by mount point.
    mounts: BTreeMap<PathBuf, MountSamples>,
    /// Why the mounts cannot be listed. `None` means that the last list succeeded.
    list_error: Option<String>,
    /// Checkpoints of the selected directory.
    checkpoints: Checkpoints,
    /// The last answer about the job. `None` means that none has arrived yet.
    job: Option<Result<Job, String>>,
    /// Rates of the job in its last answers.
    job_rates: Rates,
}

/// The last answers of the firnd of one mount.
struct MountSamples {
    /// The last status. `None` means that none has arrived yet.
    status: Option<Box<Status>>,
    /// Rates of the last samples.
    rates: Rates,
    /// The error of the last question. `None` means that firnd answered it.
    error: Option<String>,
    /// Whether the socket of its firnd is in another runtime directory, so that this process cannot ask.
    is_unreachable: bool,
    /// When firnd last answered, or when the thread began.
    answered_at: Instant,
}

/// What the user selected on the screen. It decides what the threads ask for.
///
/// [`Sampler::publish_selection`] writes it, and the threads read it. A thread may get the answer about an earlier
/// selection, so it compares the selection again before it stores the answer.
struct UserSelection {
    /// Whether the screen shows a job.
    shows_job: AtomicBool,
    /// Whether samples are paused.
    is_paused: AtomicBool,
    /// Directory with the checkpoints that are listed. `None` means that no directory is selected yet.
    directory: Mutex<Option<PathBuf>>,
    /// The backing or the mount point of the job. `None` means this user's only mount.
    job_path: Mutex<Option<PathBuf>>,
}

/// The running threads, their last answers, and the selection that they follow.
pub struct Sampler {
    /// The last answers.
    answers: Arc<Mutex<LastAnswers>>,
    /// The user's selection, which all threads read.
    selection: Arc<UserSelection>,
    /// What the command line asked for.
    request: TopRequest,
}

/// Locks a mutex. A panic of another thread leaves usable values here, so poisoning is ignored.
fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sampler {
    /// Starts the threads that ask for mounts, checkpoints and the job. They send to `updates` whenever there is
    /// something new to show, and end when `updates` has no receiver. Fails if a thread cannot be started.
    pub fn start(
        request: TopRequest,
        shows_job: bool,
        updates: &Sender<()>,
    ) -> std::io::Result<Self> {
        let sampler = Self {
            answers: Arc::default(),
            selection: Arc::new(UserSelection {
                shows_job: AtomicBool::new(shows_job),
                is_paused: AtomicBool::new(false),
                directory: Mutex::new(request.directory.clone()),
                job_path: Mutex::new(request.job_path.clone()),
            }),
            request,
        };
        sampler.spawn(updates, run_mounts_thread)?;
        sampler.spawn(updates, run_checkpoints_thread)?;
        sampler.spawn(updates, run_job_thread)?;
        Ok(sampler)
    }

    /// Starts one thread that runs `work` until `updates` has no receiver.
    fn spawn(&self, updates: &Sender<()>, work: fn(&SamplerThread)) -> std::io::Result<()> {
        let context = SamplerThread {
            answers: Arc::clone(&self.answers),
            selection: Arc::clone(&self.selection),
            request: self.request.clone(),
            updates: updates.clone(),
        };
        let thread = std::thread::Builder::new();
        thread.spawn(move || work(&context)).map(drop)
    }

    /// Publishes the user's selection on the screen to the threads.
    ///
    /// A directory or job on the command line stays selected. Without one, the selected mount or the shown job decides.
    /// If the selection changes, the answers about the previous selection are deleted, and the screen waits for new
    /// ones.
    pub fn publish_selection(&self, view: &View) {
        self.selection
            .shows_job
            .store(view.job.is_some(), Ordering::Relaxed);
        self.selection
            .is_paused
            .store(view.is_paused, Ordering::Relaxed);
        let selected_directory = match &view.job {
            Some(job) => job_directory(job, view),
            None => self.selected_mount_point(view),
        };
        // The key `j` shows the job of the selected mount, so that job is followed here. While a job is shown, or if
        // the command line names one, the job stays.
        if view.job.is_none() && self.request.job_path.is_none() {
            self.select_next_job(selected_directory.clone());
        }
        if self.request.directory.is_none() {
            self.select_directory(selected_directory);
        }
    }

    /// Selects the directory whose checkpoints are listed.
    fn select_directory(&self, selected_directory: Option<PathBuf>) {
        let mut directory = lock_ignoring_poison(&self.selection.directory);
        if *directory != selected_directory {
            *directory = selected_directory;
            // The lock of the answers is never taken while this one is held.
            drop(directory);
            lock_ignoring_poison(&self.answers).checkpoints = Checkpoints::Loading;
        }
    }

    /// Selects the job of `mount` as the one that is shown when the user asks for a job.
    fn select_next_job(&self, mount: Option<PathBuf>) {
        let mut job_path = lock_ignoring_poison(&self.selection.job_path);
        if *job_path != mount {
            *job_path = mount;
            // The lock of the answers is never taken while this one is held.
            drop(job_path);
            let mut answers = lock_ignoring_poison(&self.answers);
            answers.job = None;
            answers.job_rates = Rates::default();
        }
    }

    /// Returns the mount point that is selected on the screen, or `None` if no mount is listed.
    fn selected_mount_point(&self, view: &View) -> Option<PathBuf> {
        let mounts = view.ordered_mounts();
        let selected_mount = mounts.get(view.upper_row)?;
        let answers = lock_ignoring_poison(&self.answers);
        // The view has only the escaped mount point, from which the path cannot be derived.
        answers
            .mounts
            .keys()
            .find(|path| text::path(path) == selected_mount.mount_point)
            .cloned()
    }

    /// Copies the last answers of all threads into a view (what the screen shows), and updates the selected rows. Does
    /// not wait for new answers.
    pub fn copy_answers_to(&self, view: &mut View) {
        let answers = lock_ignoring_poison(&self.answers);
        view.mounts = answers
            .mounts
            .iter()
            .filter(|(_, samples)| !samples.is_unreachable)
            .map(|(path, samples)| samples.to_view(path))
            .collect();
        view.unreachable_mounts = answers
            .mounts
            .values()
            .filter(|samples| samples.is_unreachable)
            .count();
        view.list_error = answers.list_error.clone();
        if view.selected_name.is_none()
            && let Some(directory) = self.request.directory.as_ref()
        {
            let mount_point = mount_point_of(directory, &answers);
            view.selected_name = mount_point.map(text::path);
        }
        view.checkpoints = answers.checkpoints.clone();
        if view.job.is_some() {
            view.job = Some(JobView {
                answer: answers.job.clone(),
                rates: answers.job_rates.clone(),
            });
        }
        // The threads can store new answers while the rows are updated.
        drop(answers);
        view.update_selected_rows();
    }
}

impl MountSamples {
    /// Stores the answer of firnd, the daemon of the mount. An error leaves the last status as it is, and becomes the
    /// reason for silence.
    fn add_answer(&mut self, answer: Result<Status, ClientError>) {
        match answer {
            Ok(status) => {
                self.rates.push(
                    status.ingest_bytes_per_second,
                    status.drain_bytes_per_second,
                );
                self.status = Some(Box::new(status));
                self.error = None;
                self.is_unreachable = false;
                self.answered_at = Instant::now();
            }
            Err(error) => {
                self.is_unreachable = matches!(error, ClientError::NoSocket { .. });
                self.error = Some(error.to_string());
            }
        }
    }

    /// Returns the mount at `path` as the screen shows it.
    fn to_view(&self, path: &Path) -> MountView {
        let silence = self.error.clone().map(|error| FirndSilence {
            error,
            seconds: self.answered_at.elapsed().as_secs_f64(),
        });
        MountView {
            mount_point: text::path(path),
            status: self.status.clone(),
            silence,
            rates: self.rates.clone(),
        }
    }
}

/// Returns the mount point that a directory is below, or `None` if it is on no mount. Only the paths are compared.
fn mount_point_of<'a>(directory: &Path, answers: &'a LastAnswers) -> Option<&'a Path> {
    let directory = std::path::absolute(directory).unwrap_or_default();
    // If mount points are nested, the innermost one comes last in the order of paths.
    let mut innermost_first = answers.mounts.keys().rev();
    innermost_first
        .find(|path| directory.starts_with(path))
        .map(PathBuf::as_path)
}

/// Returns the directory in which this host sees the files of a job: its mount of the backing, or else the backing.
/// Returns `None` while the job is unknown.
fn job_directory(job: &JobView, view: &View) -> Option<PathBuf> {
    let Some(Ok(job)) = &job.answer else {
        return None;
    };
    let own_mount = view
        .mounts
        .iter()
        .filter_map(|mount| mount.status.as_ref())
        .find(|status| status.backing == job.backing);
    let path = match own_mount {
        Some(status) => &status.mount_point,
        None => &job.backing,
    };
    Some(path.as_path().to_owned())
}

/// What each thread works with: its own handle of the shared state.
#[derive(Clone)]
struct SamplerThread {
    /// The last answers.
    answers: Arc<Mutex<LastAnswers>>,
    /// The user's selection.
    selection: Arc<UserSelection>,
    /// What the command line asked for.
    request: TopRequest,
    /// Gets a message whenever there is something new to show.
    updates: Sender<()>,
}

impl SamplerThread {
    /// Signals that there is something new to show. Returns false if the screen is gone, so that the thread ends.
    fn send_update(&self) -> bool {
        self.updates.send(()).is_ok()
    }

    fn is_paused(&self) -> bool {
        self.selection.is_paused.load(Ordering::Relaxed)
    }
}

/// Lists the mounts of this host at intervals, until the screen is gone. Starts a thread for each new mount, and ends
/// the thread of each mount that is gone.
fn run_mounts_thread(thread: &SamplerThread) {
    // Each sender belongs to the thread of one mount, which ends when its sender is dropped.
    let mut stop_senders: BTreeMap<PathBuf, Sender<()>> = BTreeMap::new();
    loop {
        let list_result = firn_client::mounts();
        lock_ignoring_poison(&thread.answers).list_error =
            list_result.as_ref().err().map(ToString::to_string);
        if let Ok(mounts) = list_result {
            update_mount_threads(thread, &mounts, &mut stop_senders);
        }
        if !thread.send_update() {
            return;
        }
        std::thread::sleep(thread.request.interval.max(MOUNTS_INTERVAL_MIN));
    }
}

/// Starts a thread for each new mount, and ends the thread of each mount that is not among `mounts` any more.
fn update_mount_threads(
    thread: &SamplerThread,
    mounts: &[Mount],
    stop_senders: &mut BTreeMap<PathBuf, Sender<()>>,
) {
    let mount_points: BTreeSet<&Path> = mounts
        .iter()
        .map(|mount| mount.mount_point.as_path())
        .collect();
    stop_senders.retain(|path, _| mount_points.contains(path.as_path()));
    lock_ignoring_poison(&thread.answers)
        .mounts
        .retain(|path, _| mount_points.contains(path.as_path()));
    for mount in mounts {
        if !stop_senders.contains_key(&mount.mount_point)
            && let Some(stop_sender) = start_mount_thread(thread, mount)
        {
            stop_senders.insert(mount.mount_point.clone(), stop_sender);
        }
    }
}

/// Starts the thread that gets the status of one mount from firnd, its daemon, at intervals. The thread ends when the
/// returned sender is dropped. Returns `None` if the thread cannot be started: the mount then has no status yet, and
/// the next list of mounts leads to a new try.
fn start_mount_thread(context: &SamplerThread, mount: &Mount) -> Option<Sender<()>> {
    let (stop_sender, stop_receiver) = mpsc::channel();
    lock_ignoring_poison(&context.answers).mounts.insert(
        mount.mount_point.clone(),
        MountSamples {
            status: None,
            rates: Rates::default(),
            error: None,
            is_unreachable: false,
            answered_at: Instant::now(),
        },
    );
    let thread_context = context.clone();
    let mount = mount.clone();
    std::thread::Builder::new()
        .spawn(move || run_mount_thread(&thread_context, &mount, &stop_receiver))
        .ok()?;
    Some(stop_sender)
}

/// Asks firnd, the daemon of one mount, for its status at intervals. Ends when `stop_receiver` has no sender, or when
/// the mount or the screen is gone.
fn run_mount_thread(thread: &SamplerThread, mount: &Mount, stop_receiver: &Receiver<()>) {
    let mut connection: Option<Connection> = None;
    loop {
        if !thread.is_paused() {
            let answer = ask_status(&mut connection, mount);
            let mut answers = lock_ignoring_poison(&thread.answers);
            let Some(samples) = answers.mounts.get_mut(&mount.mount_point) else {
                // The mount has left the list, so its thread ends.
                return;
            };
            samples.add_answer(answer);
            // The screen copies the answers after the update, so they must be unlocked.
            drop(answers);
            if !thread.send_update() {
                return;
            }
        }
        if let Err(mpsc::RecvTimeoutError::Disconnected) =
            stop_receiver.recv_timeout(thread.request.interval)
        {
            return;
        }
    }
}

/// Asks the firnd of a mount for its status. Opens a connection if there is none, and stores it for the next question.
/// After an error no connection is stored, so that the next question opens a new one.
fn ask_status(
    stored_connection: &mut Option<Connection>,
    mount: &Mount,
) -> Result<Status, ClientError> {
    let mut connection = match stored_connection.take() {
        Some(connection) => connection,
        None => Connection::open(mount)?,
    };
    let status = connection.status()?;
    *stored_connection = Some(connection);
    Ok(status)
}

/// Lists the checkpoints of the selected directory at intervals, until the screen is gone.
fn run_checkpoints_thread(thread: &SamplerThread) {
    loop {
        let selected_directory = lock_ignoring_poison(&thread.selection.directory).clone();
        let Some(directory) = selected_directory.filter(|_| !thread.is_paused()) else {
            std::thread::sleep(SELECTION_CHECK_INTERVAL);
            continue;
        };
        let start = Instant::now();
        let checkpoints = list_checkpoints(&directory);
        let list_time = start.elapsed();
        let is_still_selected =
            || lock_ignoring_poison(&thread.selection.directory).as_ref() == Some(&directory);
        // The user may have selected another directory meanwhile. This answer is then dropped.
        if is_still_selected() {
            lock_ignoring_poison(&thread.answers).checkpoints = checkpoints;
        }
        if !thread.send_update() {
            return;
        }
        let pause = thread
            .request
            .interval
            .max(CHECKPOINTS_INTERVAL_MIN)
            .max(list_time * PAUSE_FACTOR);
        let pause_end = Instant::now() + pause;
        // A change of the selected directory ends the pause, so that the new directory is listed at once.
        while Instant::now() < pause_end && is_still_selected() {
            std::thread::sleep(SELECTION_CHECK_INTERVAL);
        }
    }
}

/// Lists the checkpoints of a directory in a child process (`firn history --json`). Returns the reason if the child
/// fails or exceeds its timeout.
fn list_checkpoints(directory: &Path) -> Checkpoints {
    let arguments = vec![
        "history".into(),
        "--json".into(),
        "--".into(),
        directory.into(),
    ];
    match ask_child::<Vec<CheckpointEntry>>(arguments, CHILD_TIMEOUT) {
        Ok(list) => Checkpoints::Listed(list),
        Err(ChildFailure::TimedOut) => Checkpoints::Unknown(format!(
            "{} did not list its files within {}",
            text::path(directory),
            text::seconds(CHILD_TIMEOUT.as_secs_f64())
        )),
        Err(ChildFailure::Refused { text, .. } | ChildFailure::NotRun(text)) => {
            Checkpoints::Unknown(text)
        }
    }
}

/// Queries the selected job (the hosts that share a backing) at intervals, while the screen shows a job and until the
/// screen is gone. An answer is dropped if the user has selected another job in the meantime.
fn run_job_thread(thread: &SamplerThread) {
    loop {
        if !thread.selection.shows_job.load(Ordering::Relaxed) || thread.is_paused() {
            std::thread::sleep(JOB_CHECK_INTERVAL);
            continue;
        }
        let asked_path = lock_ignoring_poison(&thread.selection.job_path).clone();
        let answer = Job::inspect(asked_path.as_deref(), CHILD_TIMEOUT)
            .map_err(|failure| failure.text().unwrap_or_default());
        if *lock_ignoring_poison(&thread.selection.job_path) != asked_path {
            continue;
        }
        let mut answers = lock_ignoring_poison(&thread.answers);
        if let Ok(job) = &answer {
            let total = &job.total;
            answers
                .job_rates
                .push(total.ingest_bytes_per_second, total.drain_bytes_per_second);
        }
        answers.job = Some(answer);
        // The screen copies the answers after the update, so they must be unlocked.
        drop(answers);
        if !thread.send_update() {
            return;
        }
        std::thread::sleep(thread.request.interval.max(JOB_INTERVAL_MIN));
    }
}
