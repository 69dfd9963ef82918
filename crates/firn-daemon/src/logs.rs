//! Files in logs (`layout=log`): each host appends its writes to a log of its own, and the plain file is made later.
//! This file opens that layer of a mount, and makes plain files after the last close.
//!
//! Terms
//! * A *container* is a directory with the logs of one file, from an open for writing to their flattening.
//! * To *flatten* a file is to make the plain file from its logs.
//! * To *settle* a file is to do the work that its last close has left for later, such as flattening.
//! * A file is *under way* while other hosts flatten parts of it.
//!
//! Parts: [`open_store`] makes the layer. A [`Settler`] is the thread of a mount that settles files; a [`Flattener`]
//! sends it requests. [`flatten`] and [`flatten_with_loss`] work on a backing without a mount.
//!
//! Promises
//! * A backing that has containers is never opened without its logs, so logged files are complete in every mount.
//! * A host that writes to logs has a lease (a lock and a record that show that it is alive), and no other process
//!   writes in its name.
//! * A mount without logs, over a backing without containers, reads the directory `.firn/log` once and has no further
//!   cost.
//!
//! Relies on `firn_log` for the layer itself, and on [`LivingHosts`] to know which hosts may still write.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use firn_backing::{Backing, DirBacking, Errno};
use firn_config::{Flatten, Layout, Options};
use firn_engine::{Engine, HiddenFile};
use firn_hosts::LeaseUse;
use firn_hosts::own::{self, TOP};
use firn_log::seal::UNIT_BYTES;
use firn_log::{CONTAINERS, LogBacking, Logs, Setup, UnflattenedFiles, WhenClosed};
use firn_workers::spawn_thread;
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::error::{AttachError, FlattenError};
use crate::host_lease::{HostLease, LivingHosts, own_error};
use crate::host_name::host_name;
use crate::lock::Locks;
use crate::losses::LossReport;
use crate::peers::terms_from_options;
use crate::placement::{self, NewFiles};
use crate::process;
use crate::store::{Layers as _, LoggableStore, PlaceableStore, Store};
use crate::unmounted::{FoundOrphan, UnmountedBacking, open_unmounted};

/// Pause between two attempts to settle the files that are left.
const SETTLE_AGAIN_EVERY: Duration = Duration::from_secs(1);
/// Time between two searches for logs of removed files, and pause of the settle thread if no file is left. The close of
/// a file wakes the thread.
const ORPHAN_SEARCH_EVERY: Duration = Duration::from_secs(60);
/// Delay with which a network file system may show what another host has created or removed: its clients cache
/// attributes and names for some seconds.
const OTHER_HOSTS_LAG_MAX: Duration = Duration::from_secs(5);
/// Pause of a caller that waits for other hosts, between two attempts.
const RETRY_EVERY: Duration = Duration::from_millis(50);
/// With close=held the kernel reports a close to firnd after close(2) has returned. A file that seems to have a writer
/// is reported as written only after this time.
const CLOSE_REPORT_DELAY_MAX: Duration = Duration::from_secs(1);

/// Adds the layer of logs to the store `base`, in which each host appends its writes of a file to a log of its own.
/// Returns `base` as it is if no file can be in logs: the backing has none, the options ask for none, and no other host
/// may make some.
///
/// `new_files` says whether the options decide where new files go. `nameless_files` are the open files of an earlier
/// firnd that may have lost their last name; their logs stay.
///
/// A host that may write to logs takes its lease first. That is a locked file in the backing by which other hosts see
/// that it is alive. Fails if another process has the lease.
pub(crate) fn open_store(
    backing: &Path,
    base: PlaceableStore,
    options: &Options,
    new_files: NewFiles,
    nameless_files: &[HiddenFile],
    lease: &mut HostLease,
) -> Result<LoggableStore, AttachError> {
    let may_write = !options.read_only;
    let logs_new_files =
        new_files == NewFiles::ByOptions && options.layout == Layout::Log && may_write;
    let needs_log_layer = logs_new_files
        || has_containers(backing, &base)?
        || is_other_host_logging(backing, options)?;
    if !needs_log_layer {
        if may_write {
            // A killed process may have begun to remove the last logs. That removal is finished here.
            firn_log::remove_half_removed_containers(&base).map_err(own_error(backing))?;
        }
        return Ok(LoggableStore::Lower(base));
    }
    let host = host_name(options)?;
    if may_write {
        let serves_logs = true;
        let terms = terms_from_options(options, serves_logs);
        lease.begin_use(LeaseUse::Logs, &host, &terms)?;
    }
    let hosts = LivingHosts::open(backing, LeaseUse::Logs, &host)?;
    let setup = log_setup(options, host, hosts, logs_new_files);
    let descriptors = nameless_files
        .iter()
        .map(|file| file.descriptor.try_clone())
        .collect::<Result<_, _>>()
        .map_err(AttachError::io("duplicate a descriptor"))?;
    let logs = LogBacking::resume(base, setup, descriptors).map_err(own_error(backing))?;
    Ok(LoggableStore::Upper(logs))
}

/// Returns the settings of the layer of logs. `logs_new_files` says whether new files go to logs; `hosts` knows which
/// hosts are alive.
fn log_setup(options: &Options, host: String, hosts: LivingHosts, logs_new_files: bool) -> Setup {
    let patterns = log_file_patterns(options);
    Setup {
        host,
        chooses: Box::new(move |name: &OsStr| {
            logs_new_files && (patterns.is_empty() || patterns.is_match(name))
        }),
        is_alive: Box::new(move |host| hosts.is_living(host)),
        // `attr-timeout` limits how old the attributes are that a program sees. The kernel caches attributes for half
        // of it (`adapter_options`), so the listing that they come from may have the other half as its age.
        view_age_max: Duration::from_millis(options.attr_timeout_ms) / 2,
        lag_max: OTHER_HOSTS_LAG_MAX,
        unit_bytes: UNIT_BYTES,
        when_closed: when_closed(options),
        flattens_read: !options.read_only && options.flatten == Flatten::Read,
    }
}

/// Returns what the last close of a logged file does. A read-only mount flattens nothing.
fn when_closed(options: &Options) -> WhenClosed {
    match options.flatten {
        _ if options.read_only => WhenClosed::Keep,
        Flatten::Close => WhenClosed::Flatten,
        Flatten::Behind => WhenClosed::FlattenBehind,
        Flatten::Demand | Flatten::Read | Flatten::Off => WhenClosed::Keep,
    }
}

/// Returns the patterns of files that go to logs; an empty set means all files. Invalid patterns were refused with the
/// options.
fn log_file_patterns(options: &Options) -> GlobSet {
    let mut patterns = GlobSetBuilder::new();
    for pattern in &options.log_files {
        if let Ok(pattern) = Glob::new(pattern) {
            patterns.add(pattern);
        }
    }
    patterns.build().unwrap_or_default()
}

/// Returns whether another host that may be alive writes to logs. Such a host may make a container at any time.
fn is_other_host_logging(backing: &Path, options: &Options) -> Result<bool, AttachError> {
    let host = host_name(options).unwrap_or_default();
    let living_hosts = LivingHosts::open(backing, LeaseUse::Logs, &host)?;
    let other_hosts = living_hosts
        .others_living()
        .map_err(|errno| own_error(backing)(errno.into()))?;
    Ok(!other_hosts.is_empty())
}

/// Returns whether the backing has a container, so that a file of it may lie in logs.
fn has_containers<B: Backing>(backing: &Path, base: &B) -> Result<bool, AttachError> {
    let to_error = own_error(backing);
    let Some((firn_dir, _)) = own::find_dir(base, &base.root(), TOP).map_err(&to_error)? else {
        return Ok(false);
    };
    let containers_dir =
        own::find_dir(base, &firn_dir, CONTAINERS).map_err(|error| to_error(error.below(TOP)))?;
    let Some((containers_dir, _)) = containers_dir else {
        return Ok(false);
    };
    let names = own::list(base, &containers_dir).map_err(|errno| to_error(errno.into()))?;
    Ok(names.iter().any(|(name, ..)| firn_log::is_file_dir(name)))
}

/// Returns the containers without their file in the backing. Either the file was removed without Firn, or a dead
/// host did not finish its removal.
pub(crate) fn find_logs_without_file<B: Backing>(
    backing: &Path,
    base: &B,
) -> Result<Vec<FoundOrphan>, AttachError> {
    let unowned = firn_log::find_containers_without_file(base)
        .map_err(|errno| own_error(backing)(errno.into()))?;
    let mut orphans = Vec::new();
    for container in &unowned.unfinished {
        orphans.push(container_orphan("removed-logs", container));
    }
    for container in &unowned.lost {
        orphans.push(container_orphan("logs", container));
    }
    Ok(orphans)
}

/// Describes a container without its file.
fn container_orphan(kind: &'static str, container: &str) -> FoundOrphan {
    FoundOrphan {
        kind,
        path: firn_log::container_path(container),
        bytes: 0,
        is_removed: false,
    }
}

/// Finishes, without a mount, the removals of logged files that dead hosts have begun: removes the logs (each has one
/// host's writes to a file) of which the file is gone.
pub(crate) fn finish_removals_of_logged_files(
    backing: &Path,
    options: &Options,
) -> Result<(), AttachError> {
    let UnmountedBacking {
        path: backing,
        directory,
        mut locks,
    } = open_unmounted(backing, options)?;
    let end_result = with_logs(
        &backing,
        directory,
        options,
        &mut locks,
        &mut |text| tracing::warn!("{text}"),
        &mut |logs, _| logs.end_removals(),
    )?;
    match end_result {
        Some(Err(errno)) => Err(own_error(&backing)(errno.into())),
        // A backing without logs has no removals.
        Some(Ok(())) | None => Ok(()),
    }
}

/// Sends requests to flatten files to the [`Settler`], and waits for the results.
pub(crate) struct Flattener {
    engine: Arc<Engine<Store>>,
    requests: Sender<FlattenRequest>,
}

/// A request to flatten the files below a path.
pub(crate) struct FlattenRequest {
    /// Path below the mount point; empty for the whole mount.
    path: Vec<u8>,
    result_sender: Sender<Result<UnflattenedFiles, Errno>>,
}

impl Flattener {
    /// Returns a flattener, and the receiver from which a [`Settler`] reads its requests.
    pub(crate) fn new(engine: &Arc<Engine<Store>>) -> (Self, Receiver<FlattenRequest>) {
        let (requests, receiver) = mpsc::channel();
        let engine = Arc::clone(engine);
        (Self { engine, requests }, receiver)
    }

    /// Flattens the files at or below `path` that have no writers: makes plain files from their logs. Waits while other
    /// hosts flatten parts of them.
    ///
    /// Returns the files that stay in logs. `keep_waiting` is called several times a second; once it returns false, the
    /// wait ends with ECANCELED. ESHUTDOWN means that the settler, the thread that flattens, has ended.
    pub(crate) fn flatten(
        &self,
        path: &[u8],
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<UnflattenedFiles, Errno> {
        let start = Instant::now();
        loop {
            let remaining = self.flatten_once(path, keep_waiting)?;
            // The kernel may report a close late, so a file that seems to have a writer is tried again for a moment.
            let may_be_unreported_close =
                remaining.written > 0 && start.elapsed() < CLOSE_REPORT_DELAY_MAX;
            if remaining.under_way == 0 && !may_be_unreported_close {
                return Ok(remaining);
            }
            std::thread::sleep(RETRY_EVERY);
            if !keep_waiting() {
                return Err(Errno::CANCELED);
            }
        }
    }

    /// Sends one request to the settler, the thread that makes plain files from logs, and waits for its answer: the
    /// files at or below `path` that stay in logs. `keep_waiting` and the errors are those of [`Flattener::flatten`].
    fn flatten_once(
        &self,
        path: &[u8],
        keep_waiting: &mut dyn FnMut() -> bool,
    ) -> Result<UnflattenedFiles, Errno> {
        let (result_sender, results) = mpsc::channel();
        let request = FlattenRequest {
            path: path.to_vec(),
            result_sender,
        };
        if self.requests.send(request).is_err() {
            return Err(Errno::SHUTDOWN);
        }
        if let Some(logs) = self.engine.backing().log_layer() {
            logs.wake();
        }
        loop {
            match results.recv_timeout(RETRY_EVERY) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) if keep_waiting() => {}
                Err(RecvTimeoutError::Timeout) => return Err(Errno::CANCELED),
                Err(RecvTimeoutError::Disconnected) => return Err(Errno::SHUTDOWN),
            }
        }
    }
}

/// The thread that settles closed files and answers the requests of a [`Flattener`].
pub(crate) struct Settler {
    engine: Arc<Engine<Store>>,
    is_stopping: Arc<AtomicBool>,
    /// Gets no message; it is disconnected when the thread ends.
    ended: Receiver<()>,
}

impl Settler {
    /// Starts the settler, the thread that makes plain files from logs after their last close and answers `requests`
    /// for that. The mount must have write access. `flatten` says when files become plain.
    pub(crate) fn start(
        engine: &Arc<Engine<Store>>,
        flatten: Flatten,
        requests: Receiver<FlattenRequest>,
    ) -> io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let thread_engine = Arc::clone(engine);
        let stop = Arc::clone(&is_stopping);
        let flattens_logs_of_dead_hosts = matches!(flatten, Flatten::Behind | Flatten::Close);
        let (ended_sender, ended) = mpsc::channel::<()>();
        spawn_thread("firn-settle", move || {
            if let Some(logs) = thread_engine.backing().log_layer() {
                settle_until_stopped(logs, flattens_logs_of_dead_hosts, &requests, &stop);
            }
            // Its end tells the stop that the thread has ended.
            drop(ended_sender);
        })?;
        Ok(Self {
            engine: Arc::clone(engine),
            is_stopping,
            ended,
        })
    }

    /// Stops the thread after its current file, and waits for its end.
    pub(crate) fn stop(self) {
        self.is_stopping.store(true, Ordering::Release);
        if let Some(logs) = self.engine.backing().log_layer() {
            logs.wake();
        }
        let _ = self.ended.recv();
    }
}

/// Settles closed files and answers requests until `stop` is set. To settle a file is to do what its last close has
/// left for later, such as making the plain file from its logs. This is the main function of the settle thread.
///
/// If `flattens_logs_of_dead_hosts` is set, the logs that dead hosts have left are flattened first.
fn settle_until_stopped(
    logs: &dyn Logs,
    flattens_logs_of_dead_hosts: bool,
    requests: &Receiver<FlattenRequest>,
    stop: &AtomicBool,
) {
    if flattens_logs_of_dead_hosts && let Err(error) = flatten_logs_of_dead_hosts(logs) {
        tracing::warn!(%error, "cannot look for files in logs");
    }
    let mut last_error = None;
    let mut next_orphan_search = Instant::now();
    while !stop.load(Ordering::Acquire) {
        if Instant::now() >= next_orphan_search {
            next_orphan_search = Instant::now() + ORPHAN_SEARCH_EVERY;
            if let Err(error) = logs.end_removals() {
                tracing::warn!(%error, "cannot look for logs of removed files");
            }
        }
        for request in requests.try_iter() {
            // The requesting thread may have stopped waiting.
            let _ = request.result_sender.send(logs.flatten_at(&request.path));
        }
        let remaining = logs.settle();
        // An error that repeats is logged once.
        if remaining.error != last_error {
            last_error = remaining.error;
            if let Some(error) = last_error {
                tracing::warn!(%error, files = remaining.failed, "cannot flatten logs; firnd tries again");
            }
        }
        // The last close of a file, a request and the stop end this wait.
        logs.wait_for_ended(if remaining.is_empty() {
            ORPHAN_SEARCH_EVERY
        } else {
            SETTLE_AGAIN_EVERY
        });
    }
}

/// Flattens the logs that dead hosts have left, and removes the logs of files that they were removing. Other logs
/// without a file are kept and reported.
fn flatten_logs_of_dead_hosts(logs: &dyn Logs) -> Result<(), Errno> {
    if logs.flatten_at(b"")?.lost == 0 {
        return Ok(());
    }
    for name in logs.find_orphans()?.lost {
        tracing::warn!(
            container = name,
            "the file that these logs belong to is not found: the logs are kept"
        );
    }
    Ok(())
}

/// Flattens the files at or below `path`, relative to the backing, without a mount. Fails if any file stays in logs.
pub fn flatten(
    backing: &Path,
    path: &Path,
    options: &Options,
    notice: &mut dyn FnMut(String),
) -> Result<(), FlattenError> {
    flatten_unmounted(backing, path, options, notice, &mut |logs, _| {
        logs.flatten_whole(path.as_os_str().as_bytes())
    })
}

/// Makes plain files from logs without a mount, as [`flatten`] does, also if some bytes cannot be read: those become
/// zeros, or what else the report says. Each loss is written to the new file `report` first. Losses are returned as
/// [`FlattenError::GivenUp`].
pub fn flatten_with_loss(
    backing: &Path,
    path: &Path,
    options: &Options,
    report: &Path,
    notice: &mut dyn FnMut(String),
) -> Result<(), FlattenError> {
    let mut losses = LossReport::create(report)?;
    let flattened = flatten_unmounted(backing, path, options, notice, &mut |logs, reach| {
        // Data in a lane that cannot be reached is not lost, so nothing is given up.
        if reach == LaneReach::SomeAbsent {
            return Err(Errno::NODEV);
        }
        logs.flatten_with_loss(path.as_os_str().as_bytes(), &mut losses.below(path))
    });
    // The report is finished after a failure too: it is removed if it is empty, and an error in writing it comes first.
    let given_up = losses.finish()?;
    flattened?;
    match given_up {
        None => Ok(()),
        Some(given_up) => Err(given_up.into()),
    }
}

/// Whether all lanes in the record of a backing can be reached.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LaneReach {
    All,
    /// The data of some files is out of reach, but not lost.
    SomeAbsent,
}

/// A function that runs on the logs of an unmounted backing.
type UnmountedWork<'a, T> = dyn FnMut(&dyn Logs, LaneReach) -> Result<T, Errno> + 'a;

/// Runs `work`, which makes plain files from the logs of an unmounted backing, at or below `path`. Fails if `work`
/// fails, or if files stay in logs. A backing without logs is a success.
fn flatten_unmounted(
    backing: &Path,
    path: &Path,
    options: &Options,
    notice: &mut dyn FnMut(String),
    work: &mut UnmountedWork<'_, UnflattenedFiles>,
) -> Result<(), FlattenError> {
    process::prepare();
    let UnmountedBacking {
        path: backing,
        directory,
        mut locks,
    } = open_unmounted(backing, options)?;
    match with_logs(&backing, directory, options, &mut locks, notice, work)? {
        None => Ok(()),
        Some(Ok(remaining)) => {
            let fails_on_missing_file = true;
            FlattenError::check_remaining(&remaining, fails_on_missing_file)
        }
        Some(Err(Errno::NOENT)) => Err(FlattenError::NoSuchFile { path: path.into() }),
        Some(Err(errno)) => Err(FlattenError::Failed { files: 0, errno }),
    }
}

/// Runs `work` with the logs of an unmounted backing, and returns its result; `None` if the backing has no logs. The
/// outer error means that the backing could not be opened.
///
/// The caller has locked the backing. `work` also gets whether all lanes (directories with data of files) can be
/// reached.
fn with_logs<T>(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    locks: &mut Locks,
    notice: &mut dyn FnMut(String),
    work: &mut UnmountedWork<'_, T>,
) -> Result<Option<Result<T, Errno>>, AttachError> {
    let placeable =
        placement::open_store(backing, directory, options, NewFiles::InBacking, notice)?;
    let store = open_store(
        backing,
        placeable,
        options,
        NewFiles::InBacking,
        &[],
        locks.host_lease(),
    )?;
    let LoggableStore::Upper(logs) = &store else {
        return Ok(None);
    };
    // Below the logs there may be lanes.
    let Some(lanes) = logs.below().upper() else {
        return Ok(Some(work(logs, LaneReach::All)));
    };
    let reach = if lanes.absent().is_empty() {
        LaneReach::All
    } else {
        LaneReach::SomeAbsent
    };
    let mut result = work(logs, reach);
    // A flattened file leaves data in the lanes that is removed now.
    if result.is_ok()
        && let Err(errno) = lanes.finish_removals()
    {
        result = Err(errno);
    }
    Ok(Some(result))
}

/// Makes plain files from logs at the end of a mount, and returns the files that stay in logs. It waits for other hosts
/// that flatten a file at the same time, but not for hosts that write to one. The settle thread must have ended.
pub(crate) fn settle_at_unmount(logs: &dyn Logs, flatten: Flatten) -> UnflattenedFiles {
    let mut remaining = logs.settle();
    while remaining.under_way > 0 {
        std::thread::sleep(RETRY_EVERY);
        remaining = logs.settle();
    }
    // With `demand` and `read`, a close leaves files in logs that are flattened now.
    if matches!(flatten, Flatten::Demand | Flatten::Read) {
        match logs.flatten_whole(b"") {
            Ok(remaining_after_flatten) => remaining = remaining_after_flatten,
            Err(error) => remaining.error = Some(error),
        }
    }
    if let Err(error) = logs.end_removals() {
        remaining.error.get_or_insert(error);
    }
    log_remaining_files(&remaining);
    remaining
}

/// Logs what stays in logs at the end of a mount.
fn log_remaining_files(remaining: &UnflattenedFiles) {
    if let Some(error) = remaining.error {
        tracing::error!(%error, "files stay in logs: the next mount tries again");
    }
    if remaining.written > 0 {
        tracing::info!(
            files = remaining.written,
            "files stay in logs: other hosts write to them"
        );
    }
}
