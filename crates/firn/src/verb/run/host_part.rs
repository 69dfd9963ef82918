//! The host part: the process of `firn run` on one host. It mounts, makes data durable on request, and unmounts.
//!
//! A launcher such as srun or ssh starts this process ([`super::launcher`]). Its child is firnd, the daemon of the
//! mount. This process lives as long as firnd, because a resource manager may kill all processes of a job step when the
//! step's own process ends.
//!
//! It reads orders of `firn run` from standard input, and writes messages to standard output ([`super::message`]).
//!
//! Promises
//! * At SIGTERM or SIGINT, the data that is in memory now becomes durable. A resource manager sends these signals some
//!   time before it kills the job. The mount stays, because the job may still write its last checkpoint. firnd gets the
//!   same signal, and leaves the unmount to this process.
//! * When `firn run` ends early, standard input ends. This process then unmounts as soon as no program uses the mount,
//!   or at the next signal. It first drains everything (writes it to the backing), if there is a backing.

use std::ffi::{OsStr, OsString};
use std::io::{self, BufReader};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use firn_client::{ClientError, Connection, Progress};
use firn_config::Frontend;
use firn_daemon::MountRequest;
use firn_format::durability::DurabilityLevel;
use firn_protocol::path::BytePath;
use firn_protocol::{HeldPolicy, Request};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::message::{
    HostMessage, HostOrder, MountSetup, MountedHost, ReportWanted, UnmountReport, read_order,
    send_message,
};
use super::place::RunDirs;
use super::{choose_frontend, prune, restart};
use crate::failure::{DONE, FAILED, Failure, PARTLY, USAGE};
use crate::progress::ProgressMeter;
use crate::report;
use crate::verb::umount::{unmount_failure, wait_for_end};

/// First argument with which the program `firn` runs as a host part.
pub const NAME: &str = "run-host";
/// Interval at which a mount that has to end is checked for programs that still use it.
const UNMOUNT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of checkpoints in one message. Even with paths of 4 KiB, a message stays below its maximum size.
const CHECKPOINTS_PER_MESSAGE: usize = 100;
/// Variable with the name of the host under Slurm, which may differ from its host name.
const SLURM_HOST: &str = "SLURMD_NODENAME";

/// An event for the main loop.
enum HostEvent {
    /// An order of `firn run`.
    Order(HostOrder),
    /// A signal that asks this process to end.
    Signal,
    /// Standard input has ended, so `firn run` is gone.
    CoordinatorGone,
}

/// Sends messages to `firn run`.
#[derive(Clone)]
struct MessageSender {
    /// Number of this sender, which its fragments carry.
    id: u64,
    /// Standard output; the lock keeps the fragments of a message together.
    out: Arc<Mutex<io::Stdout>>,
}

impl MessageSender {
    fn new() -> Result<Self, Failure> {
        let id = getrandom::u64()
            .map_err(|error| Failure::new(FAILED, format!("no random number: {error}")))?;
        let out = Arc::new(Mutex::new(io::stdout()));
        Ok(Self { id, out })
    }

    /// Sends a message. An error is ignored: `firn run` is then gone, and standard input ends as well.
    fn send_message(&self, message: &HostMessage) {
        // A thread that panicked has left no state that matters behind the lock.
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = send_message(&mut *out, self.id, message);
    }

    /// Sends a message for the user.
    fn send_notice(&self, text: impl Into<String>) {
        self.send_message(&HostMessage::Notice(text.into()));
    }
}

/// Runs the host part, the process of `firn run` on one host, until its mount has ended. Returns the exit status.
///
/// The argument after [`NAME`] is the interval in milliseconds at which it tells `firn run` that it is alive.
pub fn main(args: &[OsString]) -> Result<u8, Failure> {
    let Some(alive_interval) = args.first().and_then(|arg| parse_interval(arg)) else {
        let text = format!("only `firn run` may start firn {NAME}");
        return Err(Failure::new(USAGE, text));
    };
    let message_sender = MessageSender::new()?;
    let (event_sender, events) = channel();
    watch_signals(event_sender.clone())?;
    thread::spawn(move || forward_orders(&event_sender));
    message_sender.send_message(&HostMessage::Hello(own_host_name()));
    let alive_message_sender = message_sender.clone();
    thread::spawn(move || {
        loop {
            thread::sleep(alive_interval);
            alive_message_sender.send_message(&HostMessage::Alive);
        }
    });
    run_host(&message_sender, &events)
}

/// Parses a number of milliseconds that is not 0.
fn parse_interval(text: &OsStr) -> Option<Duration> {
    let milliseconds: u64 = text.to_str()?.parse().ok()?;
    if milliseconds == 0 {
        return None;
    }
    Some(Duration::from_millis(milliseconds))
}

/// Returns the name that Slurm has for this host, or else its host name.
fn own_host_name() -> String {
    std::env::var(SLURM_HOST).unwrap_or_else(|_| crate::text::own_host_name())
}

/// Starts the thread that forwards signals which ask the process to end as events.
fn watch_signals(events: Sender<HostEvent>) -> Result<(), Failure> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
    thread::spawn(move || {
        for _ in &mut signals {
            // An error means that the main loop has ended, and this process with it.
            let _ = events.send(HostEvent::Signal);
        }
    });
    Ok(())
}

/// Reads orders from standard input and forwards each as an event. The end of standard input becomes the event
/// [`HostEvent::CoordinatorGone`].
fn forward_orders(events: &Sender<HostEvent>) {
    let mut stdin = BufReader::new(io::stdin());
    while let Ok(Some(order)) = read_order(&mut stdin) {
        if events.send(HostEvent::Order(order)).is_err() {
            return;
        }
    }
    // An error means that the main loop has ended, and this process with it.
    let _ = events.send(HostEvent::CoordinatorGone);
}

/// Serves one host of a run: waits for the order to mount, mounts, serves until the end, and unmounts. Returns the exit
/// status. A failure is sent to `firn run` as a message.
///
/// `events` are the orders of `firn run` and the signals. `message_sender` sends messages to `firn run`.
fn run_host(message_sender: &MessageSender, events: &Receiver<HostEvent>) -> Result<u8, Failure> {
    let Some(setup) = wait_for_mount_order(events) else {
        // Nothing is mounted yet, so there is nothing to undo.
        return Ok(DONE);
    };
    let mount = match HostMount::mount(&setup, message_sender) {
        Ok(mount) => mount,
        Err(failure) => {
            let (text, exit_status) = text_and_status(failure);
            message_sender.send_message(&HostMessage::Failed {
                text,
                code: exit_status,
            });
            return Ok(exit_status);
        }
    };
    message_sender.send_message(&HostMessage::Mounted(mount.describe()));
    let pruning = match &setup.keep {
        Some(keep) if is_task_of_this_host(keep.by.as_deref()) => {
            Some(mount.start_pruning(keep.count, message_sender))
        }
        _ => None,
    };
    let end_policy = mount.serve_until_end(message_sender, events);
    // The thread that prunes stops when its sender is dropped.
    drop(pruning);
    // Without a policy, `firn run` has ended early, and nothing reads a report.
    let report = match (end_policy, &setup.report) {
        (Some(policy), None) => mount.unmount(policy, message_sender),
        (Some(policy), Some(wanted)) => mount.unmount_and_report(policy, wanted, message_sender),
        (None, _) => mount.unmount_without_coordinator(events),
    };
    let exit_status = match &report.failure {
        Some((_, exit_status)) => *exit_status,
        None => DONE,
    };
    message_sender.send_message(&HostMessage::Ended(report));
    Ok(exit_status)
}

/// Waits for the order to mount, and returns its setup. Returns `None` if this process has to end before.
fn wait_for_mount_order(events: &Receiver<HostEvent>) -> Option<Box<MountSetup>> {
    loop {
        match events.recv() {
            Ok(HostEvent::Order(HostOrder::Mount(setup))) => return Some(setup),
            Ok(HostEvent::Order(HostOrder::Drain)) => {}
            Ok(
                HostEvent::Order(HostOrder::End(_))
                | HostEvent::Signal
                | HostEvent::CoordinatorGone,
            )
            | Err(_) => return None,
        }
    }
}

/// Returns whether this host does a task that may be only for the host `only_host`. `None` means each host.
fn is_task_of_this_host(only_host: Option<&str>) -> bool {
    only_host.is_none_or(|host| host == own_host_name())
}

/// Whether an unmount goes on although a program uses the mount.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Force {
    Yes,
    No,
}

/// The mount of a run on this host.
struct HostMount {
    /// The two directories of the run.
    dirs: RunDirs,
    /// Whether the mount is a stub tree: empty files without FUSE, behind which the preload library serves the real
    /// files.
    is_stub_tree: bool,
    /// The file with ROMIO hints. The unmount removes it.
    romio_hints: Option<PathBuf>,
    /// Number of requested drains that are not finished. The thread that drains runs while it is not 0, until the
    /// unmount begins.
    requested_drains: Arc<AtomicU32>,
    /// Set when the unmount begins. A drain that fails after that is no error.
    is_ending: Arc<AtomicBool>,
}

impl HostMount {
    /// Mounts as `setup` says, and prepares the mount for the command. If the preparation fails, unmounts again, and
    /// keeps the data that is in memory only.
    fn mount(setup: &MountSetup, message_sender: &MessageSender) -> Result<Self, Failure> {
        let to_path_buf =
            |path: &Option<BytePath>| path.as_ref().map(|path| path.as_path().to_owned());
        let mut options = setup.options.clone();
        if setup.may_choose_frontend {
            options.frontend = choose_frontend(&mut |text| message_sender.send_notice(text));
        }
        let dirs = RunDirs::create(
            to_path_buf(&setup.prefix),
            &setup.default_prefix,
            to_path_buf(&setup.backing),
        )?;
        let is_stub_tree = options.frontend == Frontend::Preload;
        let request = MountRequest {
            backing: dirs.backing.clone(),
            mount_point: dirs.prefix.clone(),
            options,
            foreground: false,
            ends_with_parent: true,
            changes: Vec::new(),
        };
        firn_daemon::mount_with_notices(request, &mut |text| message_sender.send_notice(text))?;
        let mut mount = Self {
            dirs,
            is_stub_tree,
            romio_hints: None,
            requested_drains: Arc::default(),
            is_ending: Arc::default(),
        };
        if let Err(failure) = mount.prepare_for_command(setup) {
            mount.unmount(HeldPolicy::Keep, message_sender);
            return Err(failure);
        }
        Ok(mount)
    }

    /// Prepares what the command needs besides the mount: writes the file with ROMIO hints, and restores the files of a
    /// lost host if this host is to do so.
    fn prepare_for_command(&mut self, setup: &MountSetup) -> Result<(), Failure> {
        if let Some(hints) = &setup.romio_hints {
            self.romio_hints = Some(write_hints(&self.dirs, hints)?);
        }
        if let Some(restart) = &setup.restart
            && restart.to == own_host_name()
        {
            restart::restore_files(&restart.lost, &self.dirs.prefix, &self.dirs.backing)?;
        }
        Ok(())
    }

    fn describe(&self) -> MountedHost {
        MountedHost {
            prefix: self.dirs.prefix.clone().into(),
            backing: self.dirs.backing.clone().into(),
            is_tree: self.is_stub_tree,
            romio_hints: self.romio_hints.clone().map(Into::into),
        }
    }

    /// Starts to remove old checkpoints. The removal ends when the returned sender is dropped.
    fn start_pruning(&self, keep: u32, message_sender: &MessageSender) -> Sender<()> {
        let (stop_sender, stop_receiver) = channel();
        let prefix = self.dirs.prefix.clone();
        let message_sender = message_sender.clone();
        thread::spawn(move || {
            prune::prune_until_stopped(&stop_receiver, &prefix, keep as usize, &mut |text| {
                message_sender.send_notice(text);
            });
        });
        stop_sender
    }

    /// Serves orders and signals until the mount has to end. Returns the policy for held data (data in memory only), or
    /// `None` if `firn run` is gone. A signal does not end the mount, but makes its data durable.
    fn serve_until_end(
        &self,
        message_sender: &MessageSender,
        events: &Receiver<HostEvent>,
    ) -> Option<HeldPolicy> {
        loop {
            match events.recv() {
                Ok(HostEvent::Signal | HostEvent::Order(HostOrder::Drain)) => {
                    self.start_drain(message_sender)
                }
                // The mount exists already.
                Ok(HostEvent::Order(HostOrder::Mount(_))) => {}
                Ok(HostEvent::Order(HostOrder::End(policy))) => return Some(policy),
                Ok(HostEvent::CoordinatorGone) | Err(_) => return None,
            }
        }
    }

    /// Starts a drain, which makes the data in memory durable, in a thread, and returns at once. Only one drain runs at
    /// a time: calls during a drain cause a single further drain after it. Without a backing there is nothing to do.
    ///
    /// After the unmount has begun, no further drain starts: the thread ends with the counter above 0.
    fn start_drain(&self, message_sender: &MessageSender) {
        if self.dirs.is_memory_only || self.requested_drains.fetch_add(1, Ordering::AcqRel) > 0 {
            return;
        }
        let prefix = self.dirs.prefix.clone();
        let message_sender = message_sender.clone();
        let is_ending = Arc::clone(&self.is_ending);
        let requested_drains = Arc::clone(&self.requested_drains);
        thread::spawn(move || {
            loop {
                // This drain serves the calls that are counted now. Data may have been written before a later call, so
                // later calls cause another round.
                let served_drains = requested_drains.load(Ordering::Acquire);
                let result = make_durable(&prefix, &mut |_| {});
                // The unmount has begun and drains by itself, so an error here would be misleading.
                if is_ending.load(Ordering::Acquire) {
                    return;
                }
                if let Err(error) = result {
                    message_sender.send_notice(format!("some data is not durable yet: {error}"));
                }
                if requested_drains.fetch_sub(served_drains, Ordering::AcqRel) == served_drains {
                    return;
                }
            }
        });
    }

    /// Unmounts, and sends this host's data for the report of the run: the record (what the mount did) and, if that is
    /// a task of this host, the list of checkpoints. `policy` says what happens to data that is in memory only.
    ///
    /// The checkpoints are listed before the unmount, while the mount shows the files. The record is read after the
    /// unmount, so that it covers everything. If this data cannot be read, a message tells `firn run` why.
    fn unmount_and_report(
        &self,
        policy: HeldPolicy,
        wanted: &ReportWanted,
        message_sender: &MessageSender,
    ) -> UnmountReport {
        let lists_checkpoints = is_task_of_this_host(wanted.checkpoints_by.as_deref());
        let run_result = report::Run::from_own_mount(&self.dirs.prefix, lists_checkpoints);
        let unmount_report = self.unmount(policy, message_sender);
        let mut run = match run_result {
            Ok(run) => run,
            Err(failure) => {
                let (text, _) = text_and_status(failure);
                message_sender.send_message(&HostMessage::NotReported(text));
                return unmount_report;
            }
        };
        run.replace_own_record(&self.dirs.backing);
        let checkpoints: Vec<report::CurrentCheckpoint> = run.checkpoints.into_values().collect();
        for chunk in checkpoints.chunks(CHECKPOINTS_PER_MESSAGE) {
            message_sender.send_message(&HostMessage::Checkpoints(chunk.to_vec()));
        }
        for failure in run.failures {
            message_sender.send_message(&HostMessage::NotReported(failure));
        }
        for record in run.records {
            message_sender.send_message(&HostMessage::Record(Box::new(record)));
        }
        unmount_report
    }

    /// Unmounts, even if programs that the command left behind still use the mount. `policy` says what happens to held
    /// data, which is in memory only. A failure is in the report. Progress is sent to `firn run`.
    fn unmount(&self, policy: HeldPolicy, message_sender: &MessageSender) -> UnmountReport {
        self.remove_hints();
        let mut meter = ProgressMeter::with_quiet(true);
        let mut report = UnmountReport::default();
        let show = &mut |progress: Progress| {
            let (bytes, files) = (progress.bytes_left, progress.files_left);
            meter.show(bytes, files, &progress.phase);
            message_sender.send_message(&HostMessage::Left { bytes, files });
        };
        if let Err(failure) = self.drain_and_unmount(policy, Force::Yes, &mut report, show) {
            report.failure = Some(text_and_status(failure));
        }
        let waited = meter.summary();
        report.waited_bytes = waited.bytes;
        report.waited_files = waited.files;
        if report.failure.is_none() && self.dirs.is_memory_only {
            self.remove_memory_only_files(policy, &mut report);
        }
        report
    }

    /// Drains (writes all data in memory to the backing) if the policy says so, and unmounts. Stores in `report` how
    /// many bytes stay in memory, and in which arena (the file that has them).
    ///
    /// Fails if a program uses the mount (unless forced), or if files stay in logs that other hosts have open. Also
    /// fails if the policy is to drain and something did not become durable: this failure comes last, after the
    /// unmount.
    fn drain_and_unmount(
        &self,
        policy: HeldPolicy,
        force: Force,
        report: &mut UnmountReport,
        show: &mut dyn FnMut(Progress),
    ) -> Result<(), Failure> {
        // Some files cannot be made durable yet, such as files that are open in logs. The unmount tries again, and its
        // result counts.
        let durability_result = match policy {
            HeldPolicy::Drain => make_durable(&self.dirs.prefix, show),
            HeldPolicy::Keep | HeldPolicy::Discard => Ok(()),
        };
        let location = firn_client::find(&self.dirs.prefix)?;
        let mut connection = Connection::open(&location.mount)?;
        let status = connection.status()?;
        // A drain that a signal started must not report an error of the mount's end.
        self.is_ending.store(true, Ordering::Release);
        report.held_bytes = status.held_bytes;
        report.arena = status.arena.into();
        let is_forced = force == Force::Yes;
        let (firnd, unmount_result) = connection.unmount(is_forced, policy, show)?;
        let files_in_logs =
            unmount_result.map_err(|error| unmount_failure(error, &location.mount))?;
        wait_for_end(&firnd, false);
        self.dirs.remove_default_prefix();
        // Other hosts still have these files open, so the run is only partly done.
        if files_in_logs > 0 {
            let text = format!(
                "{} remain in logs: other hosts have them open, and make them plain when they close them",
                crate::text::count(files_in_logs, "file")
            );
            return Err(Failure::new(PARTLY, text));
        }
        if policy == HeldPolicy::Drain {
            report.held_bytes = 0;
        }
        if let Err(error) = durability_result {
            let text = format!("all data is drained, but not all is durable: {error}");
            return Err(Failure::new(FAILED, text));
        }
        Ok(())
    }

    /// Removes the directory of names of a run without a backing, if no data is left for the names. A failure to
    /// discard files is recorded in `report`.
    fn remove_memory_only_files(&self, policy: HeldPolicy, report: &mut UnmountReport) {
        let backing = &self.dirs.backing;
        if policy == HeldPolicy::Discard {
            if let Err(error) = std::fs::remove_dir_all(backing) {
                let backing = crate::text::path(backing);
                report.failure = Some((format!("cannot remove {backing}: {error}"), FAILED));
            }
        } else if report.held_bytes == 0 {
            // An arena that is left takes memory, but has no data. firnd may have removed it.
            let _ = std::fs::remove_file(&report.arena);
            // This fails for a directory that is not empty: it has names without data, which stay.
            let _ = std::fs::remove_dir(backing);
        }
    }

    /// Unmounts after `firn run`, the coordinator, has ended early. Waits until no program uses the mount. A signal
    /// forces the unmount. A failure is in the returned report.
    fn unmount_without_coordinator(&self, events: &Receiver<HostEvent>) -> UnmountReport {
        self.remove_hints();
        // Without `firn run`, the result of the command is unknown. Files in memory only are kept, and others are
        // drained.
        let policy = if self.dirs.is_memory_only {
            HeldPolicy::Keep
        } else {
            HeldPolicy::Drain
        };
        let mut force = Force::No;
        loop {
            let mut report = UnmountReport::default();
            match self.drain_and_unmount(policy, force, &mut report, &mut |_| {}) {
                // The mount still exists, most often because a program uses it. The unmount is tried again later.
                Err(_) if force == Force::No && firn_client::find(&self.dirs.prefix).is_ok() => {}
                Err(failure) => {
                    report.failure = Some(text_and_status(failure));
                    return report;
                }
                Ok(()) => return report,
            }
            match events.recv_timeout(UNMOUNT_CHECK_INTERVAL) {
                Ok(HostEvent::Signal) => force = Force::Yes,
                // The thread that watches for signals never ends, so the channel stays connected.
                Ok(_) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }

    /// Removes the file with hints for ROMIO. A file that remains does no harm: the next run replaces it.
    fn remove_hints(&self) {
        if let Some(hints) = &self.romio_hints {
            let _ = std::fs::remove_file(hints);
        }
    }
}

/// Makes the data durable that the mount has now, and waits for that. Calls `show` with the progress.
fn make_durable(
    prefix: &std::path::Path,
    show: &mut dyn FnMut(Progress),
) -> Result<(), ClientError> {
    let location = firn_client::find(prefix)?;
    let request = Request::Wait {
        path: location.relative,
        until: DurabilityLevel::Durable,
        timeout_ms: None,
    };
    Connection::open(&location.mount)?.wait(&request, show)
}

/// Writes the file with hints for ROMIO. Its path in the runtime directory is the same on all hosts.
fn write_hints(dirs: &RunDirs, hints: &str) -> Result<PathBuf, Failure> {
    let runtime = firn_client::paths::create_runtime_dir()?;
    let key = firn_client::Key::from_backing(&dirs.prefix);
    let file = runtime.join(format!("{:016x}.romio-hints", key.0));
    // Other users cannot change names in the runtime directory, so the file needs no further protection.
    std::fs::write(&file, hints).map_err(|error| {
        let file = crate::text::path(&file);
        Failure::new(FAILED, format!("cannot write {file}: {error}"))
    })?;
    Ok(file)
}

/// Returns the text and the exit status of a failure.
fn text_and_status(failure: Failure) -> (String, u8) {
    match failure {
        Failure::Message { text, code } => (text, code),
        Failure::OutputClosed => (String::from("its output is not read"), FAILED),
    }
}
