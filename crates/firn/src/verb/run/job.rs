//! The coordinator of `firn run`: it starts the mounts of all hosts, follows them, and ends them.
//!
//! Terms
//! * A *host part* is the process that mounts on one host ([`super::host_part`]).
//! * A *launch command* is a local process, such as srun or ssh, that starts the host parts on some of the hosts.
//! * A host is *lost* when its host part has sent nothing for `timeout`, or its launch command has ended before it.
//! * To *drain* is to write data that is only in memory to the backing, the directory in which files end up.
//!
//! Promises
//! * The command starts only when every host has mounted.
//! * The run does not wait for a lost host. It names the host, and the command that recovers the host's data.
//! * Every other host drains and unmounts, even if this process ends earlier.

use std::io::BufReader;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use firn_protocol::HeldPolicy;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use super::SIGNAL_STATUS_BASE;
use super::launcher::{LaunchCommand, Launcher, Program};
use super::message::{
    HostMessage, HostOrder, LauncherOutput, MessageReader, MountSetup, MountedHost, UnmountReport,
    send_order,
};
use crate::failure::{FAILED, Failure};
use crate::progress::{ProgressMeter, WaitSummary};
use crate::{output, report};

/// Signals that are passed on to the command.
const FORWARDED_SIGNALS: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT];
/// Number of messages within `timeout` by which a host says that it is alive.
const ALIVE_MESSAGES_PER_TIMEOUT: u32 = 5;
/// Minimum interval of these messages.
const ALIVE_INTERVAL_MIN: Duration = Duration::from_millis(100);
/// Interval at which the hosts are checked for lost ones.
const LOST_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Capacity of the queue of events. A thread that reads a host's output waits while the queue is full.
const EVENTS_MAX: usize = 1024;
/// Minimum timeout for a host without a mount. A launcher may have to wait for other work, and a mount first recovers
/// the data of an earlier mount.
const START_TIMEOUT_MIN: Duration = Duration::from_secs(60);
/// Time for launchers to end after all hosts have ended.
const LAUNCHER_END_TIMEOUT: Duration = Duration::from_secs(5);

/// An event for the coordinator.
enum JobEvent {
    /// Output of a launch command.
    Output {
        launcher_index: usize,
        output: LauncherOutput,
    },
    /// The launch command with this index has ended, and so have the host parts that it started.
    LauncherEnded(usize),
    /// This process got the signal.
    Signal(i32),
    /// The command has ended.
    CommandEnded(std::io::Result<ExitStatus>),
}

/// A launch command that was started.
struct RunningLauncher {
    /// The process of the launch command.
    child: Child,
    /// Its standard input. `None` means that it accepts no more orders.
    orders: Option<ChildStdin>,
    /// Indices of its hosts.
    hosts: Vec<usize>,
}

impl RunningLauncher {
    fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until the launch command has ended, at most until the deadline.
    fn wait_for_end(&mut self, deadline: Instant) {
        while Instant::now() < deadline && self.is_running() {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Progress of a host.
enum HostState {
    /// The launch command was started, and the host has sent no message.
    Starting,
    /// The host part runs, and waits for the order to mount.
    Ready,
    /// The host's mount is usable.
    Mounted,
    /// The host has unmounted, with this result.
    Ended(UnmountReport),
    /// The host has no mount.
    Failed(HostFailure),
}

/// Why a host failed.
#[derive(Clone)]
pub(super) struct HostFailure {
    /// The message for the user.
    pub(super) text: String,
    /// The exit status for a run in which this is the first failure.
    pub(super) exit_status: u8,
}

/// A host of the run.
struct Host {
    /// Name of the host, as the launcher knows it.
    name: String,
    /// The name that the host gives itself.
    own_name: String,
    /// Number of the sender in the host's messages. `None` before its first message.
    sender_id: Option<u64>,
    /// Progress of the host.
    state: HostState,
    /// The mount of the host. `None` before the mount is usable.
    mounted: Option<MountedHost>,
    /// When the last message arrived.
    last_message: Instant,
    /// Whether the host is lost. A later message of the host clears this.
    is_lost: bool,
    /// Bytes that the last drain still has to write.
    remaining_bytes: u64,
    /// Files that have such bytes.
    remaining_files: u64,
}

impl Host {
    /// Returns the state of a host whose launch command is about to start.
    fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            own_name: name.to_owned(),
            sender_id: None,
            state: HostState::Starting,
            mounted: None,
            last_message: Instant::now(),
            is_lost: false,
            remaining_bytes: 0,
            remaining_files: 0,
        }
    }

    /// Updates the state of the host from a message about its progress. The message comes from the host part, the
    /// process that mounts on the host. Messages about other things have no effect.
    fn record_progress(&mut self, message: &HostMessage) {
        match message {
            HostMessage::Hello(name) => {
                self.own_name.clone_from(name);
                self.state = HostState::Ready;
            }
            HostMessage::Mounted(mounted) => {
                self.mounted = Some(mounted.clone());
                self.state = HostState::Mounted;
            }
            HostMessage::Failed { text, code } => {
                self.state = HostState::Failed(HostFailure {
                    text: text.clone(),
                    exit_status: *code,
                });
            }
            HostMessage::Left { bytes, files } => {
                self.remaining_bytes = *bytes;
                self.remaining_files = *files;
            }
            HostMessage::Ended(report) => self.state = HostState::Ended(report.clone()),
            // The caller handles the other messages.
            _ => {}
        }
    }

    fn has_ended(&self) -> bool {
        matches!(self.state, HostState::Ended(_) | HostState::Failed(_))
    }

    /// Returns whether the host answers, and has not ended.
    fn is_working(&self) -> bool {
        !self.has_ended() && !self.is_lost && !matches!(self.state, HostState::Starting)
    }
}

/// Returns the name of a host up to the first dot.
fn short_host_name(name: &str) -> &str {
    name.split('.').next().unwrap_or_default()
}

/// The hosts of a run.
pub(super) struct Job<'a> {
    /// The launcher that started the hosts.
    launcher: &'a dyn Launcher,
    /// Time without a message after which a host is lost.
    timeout: Duration,
    /// All hosts, in the order of the launcher.
    hosts: Vec<Host>,
    /// The launch commands that were started.
    launchers: Vec<RunningLauncher>,
    /// Sender for threads that produce events.
    event_sender: SyncSender<JobEvent>,
    /// The queue of events.
    events: Receiver<JobEvent>,
    /// Number of events that were taken since the last check for lost hosts: see `next_event`.
    events_since_check: usize,
    /// Notices that were printed already, without the name of a host.
    shown_notices: Vec<String>,
    /// What hosts sent for the report of the run.
    report: report::Run,
}

/// The result of the unmounts of a run.
pub(super) struct UnmountSummary {
    /// What was waited for during the unmounts.
    pub(super) waited: WaitSummary,
    /// Bytes that remain in memory.
    pub(super) held_bytes: u64,
    /// The arenas that hold these bytes.
    pub(super) arenas: Vec<PathBuf>,
    /// The mounts that were usable.
    pub(super) mounted: Vec<MountedHost>,
    /// Names of lost hosts that had a mount.
    pub(super) lost: Vec<String>,
    /// The failures of hosts, at most one for each host.
    pub(super) failures: Vec<HostFailure>,
    /// What hosts sent for the report of the run.
    pub(super) report: report::Run,
}

impl UnmountSummary {
    /// Adds the figures of one host.
    fn add_report(&mut self, report: &UnmountReport) {
        self.waited.bytes += report.waited_bytes;
        self.waited.files += report.waited_files;
        self.held_bytes += report.held_bytes;
        self.arenas.push(report.arena.clone());
    }
}

impl<'a> Job<'a> {
    /// Starts the host part, the process that mounts, on each host. Does not wait for the hosts. Fails if a launch
    /// command (srun, ssh) cannot be started.
    ///
    /// `make_program` gets the interval in milliseconds at which a host part must say that it is alive, and returns the
    /// command line of the host part.
    pub(super) fn start(
        launcher: &'a dyn Launcher,
        timeout: Duration,
        make_program: impl FnOnce(u64) -> Result<Program, Failure>,
    ) -> Result<Self, Failure> {
        let (event_sender, events) = sync_channel(EVENTS_MAX);
        let hosts = launcher.hosts().iter().map(|name| Host::new(name));
        let mut job = Self {
            launcher,
            timeout,
            hosts: hosts.collect(),
            launchers: Vec::new(),
            event_sender,
            events,
            events_since_check: 0,
            shown_notices: Vec::new(),
            report: report::Run::default(),
        };
        // The handlers are set before the first process starts, so that no signal is lost in between.
        job.watch_signals()?;
        let alive_interval = (timeout / ALIVE_MESSAGES_PER_TIMEOUT).max(ALIVE_INTERVAL_MIN);
        let alive_interval_ms = u64::try_from(alive_interval.as_millis()).unwrap_or(u64::MAX);
        let program = make_program(alive_interval_ms)?;
        for launch_command in launcher.launch_commands(&program) {
            job.start_launcher(launch_command)?;
        }
        Ok(job)
    }

    fn watch_signals(&self) -> Result<(), Failure> {
        let mut signals = Signals::new(FORWARDED_SIGNALS)
            .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
        let event_sender = self.event_sender.clone();
        thread::spawn(move || {
            for signal in &mut signals {
                // An error means that the run has ended, and this process with it.
                let _ = event_sender.send(JobEvent::Signal(signal));
            }
        });
        Ok(())
    }

    /// Starts a launch command (srun or ssh), and a thread that turns its output, the messages of its hosts, into
    /// events. Fails if the command cannot be started.
    fn start_launcher(&mut self, launch_command: LaunchCommand) -> Result<(), Failure> {
        let LaunchCommand { mut command, hosts } = launch_command;
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A Ctrl-C at the terminal is meant for the user's command, and the mounts end after the command. In a separate
        // process group, the launcher does not get the signal.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| {
            let text =
                format!("cannot start `{program}`, which starts the mounts on the hosts: {error}");
            Failure::new(FAILED, text)
        })?;
        let orders = child.stdin.take();
        let launcher_index = self.launchers.len();
        let event_sender = self.event_sender.clone();
        if let Some(messages) = child.stdout.take() {
            thread::spawn(move || {
                for output in MessageReader::new(BufReader::new(messages)) {
                    let event = JobEvent::Output {
                        launcher_index,
                        output,
                    };
                    if event_sender.send(event).is_err() {
                        return;
                    }
                }
                // An error means that the job has ended, and needs no event.
                let _ = event_sender.send(JobEvent::LauncherEnded(launcher_index));
            });
        }
        self.launchers.push(RunningLauncher {
            child,
            orders,
            hosts,
        });
        Ok(())
    }

    /// Sends all hosts the order to mount, and waits until all mounts are usable. Returns the mounts.
    ///
    /// `make_setup` makes the order from the names that the hosts give themselves. It is called once all hosts have
    /// sent their names. Fails if a host fails or is lost, or if a signal comes first.
    pub(super) fn mount_all(
        &mut self,
        make_setup: impl FnOnce(&[String]) -> MountSetup,
    ) -> Result<Vec<MountedHost>, Failure> {
        self.wait_while_any(|state| matches!(state, HostState::Starting))?;
        let names: Vec<String> = self
            .hosts
            .iter()
            .map(|host| host.own_name.clone())
            .collect();
        self.send_order_to_hosts(&HostOrder::Mount(Box::new(make_setup(&names))));
        self.wait_while_any(|state| matches!(state, HostState::Ready))?;
        Ok(self.mounts())
    }

    /// Returns the mounts that are usable, or were.
    fn mounts(&self) -> Vec<MountedHost> {
        self.hosts
            .iter()
            .filter_map(|host| host.mounted.clone())
            .collect()
    }

    /// Waits while a host is in a state for which `is_waiting_state` holds. Fails if a host fails or is lost (no longer
    /// answers), or if a signal other than SIGCONT comes first.
    fn wait_while_any(
        &mut self,
        is_waiting_state: impl Fn(&HostState) -> bool,
    ) -> Result<(), Failure> {
        loop {
            if let Some(failure) = self.first_mount_failure() {
                return Err(failure);
            }
            if !self.hosts.iter().any(|host| is_waiting_state(&host.state)) {
                return Ok(());
            }
            if let Some(JobEvent::Signal(signal)) = self.next_event()
                && signal != SIGCONT
            {
                return Err(self.interruption_failure(signal, &is_waiting_state));
            }
        }
    }

    /// Returns the failure of a run that a signal interrupts before the command starts. The message names the hosts
    /// that have not answered.
    fn interruption_failure(
        &self,
        signal: i32,
        is_waiting_state: &impl Fn(&HostState) -> bool,
    ) -> Failure {
        let waiting_hosts = self
            .hosts
            .iter()
            .filter(|host| is_waiting_state(&host.state));
        let names: Vec<&str> = waiting_hosts.map(|host| host.name.as_str()).collect();
        let text = format!(
            "interrupted before the command started; {} had not answered",
            names.join(", ")
        );
        let exit_status = u8::try_from(SIGNAL_STATUS_BASE + signal).unwrap_or(FAILED);
        Failure::new(exit_status, text)
    }

    /// Returns the failure of the first host that has no mount and will get none.
    fn first_mount_failure(&self) -> Option<Failure> {
        self.hosts.iter().find_map(|host| match &host.state {
            HostState::Failed(failure) => Some(Failure::new(
                failure.exit_status,
                self.with_host_name(host, &failure.text),
            )),
            HostState::Ended(_) => Some(Failure::new(
                FAILED,
                format!("the mount on {} has ended", host.name),
            )),
            _ if host.is_lost => Some(self.no_answer_failure(host)),
            _ => None,
        })
    }

    /// Returns the failure for a host that is lost before it has mounted.
    fn no_answer_failure(&self, host: &Host) -> Failure {
        let program = std::env::current_exe().unwrap_or_else(|_| "firn".into());
        let program = crate::text::path(&program);
        let test_line = self
            .launcher
            .line_on_host(&host.name, &format!("{program} version"));
        let text = format!(
            "{} does not answer: check that `{test_line}` works, and that --host-timeout is long enough",
            host.name
        );
        Failure::new(FAILED, text)
    }

    /// Returns a text about a host with the host's name before it, unless the run has only one host.
    fn with_host_name(&self, host: &Host, text: &str) -> String {
        if self.hosts.len() == 1 {
            text.to_owned()
        } else {
            format!("{}: {text}", host.name)
        }
    }

    /// Waits for the command, and returns its exit status. Signals to this process are forwarded to the command.
    ///
    /// A resource manager sends SIGTERM some time before it kills the job. So SIGTERM also makes the data in memory
    /// durable while the command still runs.
    pub(super) fn wait_for_command(&mut self, mut command: Child) -> Result<ExitStatus, Failure> {
        let pid = Pid::from_child(&command);
        let event_sender = self.event_sender.clone();
        thread::spawn(move || {
            // An error means that the job no longer waits for the command.
            let _ = event_sender.send(JobEvent::CommandEnded(command.wait()));
        });
        loop {
            match self.next_event() {
                Some(JobEvent::Signal(signal)) => {
                    // At a terminal, a Ctrl-C reached the whole group already. A second signal does no harm.
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        // An error means that the command has just ended.
                        let _ = kill_process(pid, signal);
                    }
                    if signal == SIGTERM {
                        self.send_order_to_hosts(&HostOrder::Drain);
                    }
                }
                Some(JobEvent::CommandEnded(status)) => {
                    return status.map_err(|error| {
                        Failure::new(FAILED, format!("cannot wait for the command: {error}"))
                    });
                }
                Some(JobEvent::Output { .. } | JobEvent::LauncherEnded(_)) | None => {}
            }
        }
    }

    /// Sends all hosts the order to unmount, and waits for those that are not lost (still answer). Returns their
    /// results. `policy` says what happens to held data, which is in memory only.
    ///
    /// A second signal during the wait ends the wait. The hosts then finish alone.
    pub(super) fn unmount_all(mut self, policy: HeldPolicy, is_quiet: bool) -> UnmountSummary {
        let mut meter = ProgressMeter::with_quiet(is_quiet);
        self.send_order_to_hosts(&HostOrder::End(policy));
        let mut signal_count = 0;
        // A host in the state `Starting` has no mount. Its host part ends when standard input ends.
        let is_waited_for = |host: &Host| {
            matches!(host.state, HostState::Ready | HostState::Mounted) && !host.is_lost
        };
        while self.hosts.iter().any(is_waited_for) {
            match self.next_event() {
                Some(JobEvent::Signal(SIGINT | SIGTERM)) => {
                    signal_count += 1;
                    if signal_count > 1 {
                        break;
                    }
                    output::print_message(
                        "draining; after a second signal, firn run ends and the hosts finish alone",
                    );
                }
                Some(JobEvent::Output { .. }) => {
                    let bytes = self.hosts.iter().map(|host| host.remaining_bytes).sum();
                    let files = self.hosts.iter().map(|host| host.remaining_files).sum();
                    meter.show(bytes, files, "draining");
                }
                _ => {}
            }
        }
        let duration = meter.summary().time;
        // The bar disappears before a message is printed.
        drop(meter);
        let summary = self.summarize_unmounts(duration);
        self.end_launchers();
        summary
    }

    /// Sums up the results of the unmounts on all hosts, with a failure for each host that did not finish. `duration`
    /// is how long they took. The report of the run moves from `self` to the summary.
    fn summarize_unmounts(&mut self, duration: Duration) -> UnmountSummary {
        let mut summary = UnmountSummary {
            waited: WaitSummary {
                bytes: 0,
                files: 0,
                time: duration,
            },
            held_bytes: 0,
            arenas: Vec::new(),
            mounted: self.mounts(),
            lost: Vec::new(),
            failures: Vec::new(),
            report: std::mem::take(&mut self.report),
        };
        for host in &self.hosts {
            match &host.state {
                HostState::Ended(report) => {
                    summary.add_report(report);
                    if let Some((text, exit_status)) = &report.failure {
                        summary.failures.push(HostFailure {
                            text: self.with_host_name(host, text),
                            exit_status: *exit_status,
                        });
                    }
                }
                // The host never had a mount, so it left nothing behind.
                HostState::Failed(_) | HostState::Starting | HostState::Ready => {}
                HostState::Mounted => {
                    summary.failures.extend(self.unfinished_failure(host));
                    if host.is_lost {
                        summary.lost.push(host.own_name.clone());
                    }
                }
            }
        }
        summary
    }

    /// Returns the failure of a host that did not finish its unmount, with the command that recovers the data in its
    /// memory. Returns `None` if the host never had a mount. A lost host no longer answers.
    fn unfinished_failure(&self, host: &Host) -> Option<HostFailure> {
        let backing = crate::text::path(host.mounted.as_ref()?.backing.as_path());
        let recover_line = self
            .launcher
            .line_on_host(&host.name, &format!("firn recover {backing}"));
        let reason = if host.is_lost {
            "is lost"
        } else {
            "has not ended"
        };
        let text = format!(
            "{} {reason}: its data that was not durable is in its memory; if it was not rebooted, drain the data with `{recover_line}`",
            host.name
        );
        Some(HostFailure {
            text,
            exit_status: FAILED,
        })
    }

    /// Ends the launch commands (srun, ssh). The processes that they started on the hosts get the end of their standard
    /// input, and unmount if they have not yet done so.
    fn end_launchers(mut self) {
        // This closes the standard input of each launch command.
        for launcher in &mut self.launchers {
            launcher.orders = None;
        }
        let deadline = Instant::now() + LAUNCHER_END_TIMEOUT;
        for launcher in &mut self.launchers {
            let have_hosts_ended = launcher
                .hosts
                .iter()
                .all(|index| self.hosts[*index].has_ended());
            if have_hosts_ended {
                launcher.wait_for_end(deadline);
            }
            // srun and ssh would wait for a lost host, or for a host that never answered. But a signal to srun ends all
            // hosts of its step, so srun gets a signal only if none of its hosts still works.
            let has_working_host = launcher
                .hosts
                .iter()
                .any(|index| self.hosts[*index].is_working());
            if !has_working_host && launcher.is_running() {
                // An error means that it has just ended.
                let _ = kill_process(Pid::from_child(&launcher.child), Signal::TERM);
                // If the process has ended already, this reaps it, so that it does not remain as a zombie.
                let _ = launcher.child.try_wait();
            }
        }
    }

    /// Sends an order to all hosts, through the launch commands that still run.
    fn send_order_to_hosts(&mut self, order: &HostOrder) {
        for launcher in &mut self.launchers {
            if let Some(orders) = &mut launcher.orders
                && send_order(orders, order).is_err()
            {
                // The launch command has ended. The end of its output reports that, so this error is not reported.
                launcher.orders = None;
            }
        }
    }

    /// Waits for the next event, and updates the state of the hosts from it. An event is output of a launch command
    /// (srun, ssh), its end, a signal, or the end of the user's command. Returns the event, or `None` if nothing
    /// happened for [`LOST_CHECK_INTERVAL`].
    ///
    /// Each time the queue of events is empty, this function first marks hosts as lost that were silent for too long.
    fn next_event(&mut self) -> Option<JobEvent> {
        // Queued events come before the check for lost hosts. After a stop of this process (Ctrl-Z), messages of living
        // hosts wait in the queue; a check before them would find all hosts silent.
        let mut event = None;
        // Under a constant flow of events the queue is never empty. The check then takes place once per `EVENTS_MAX`
        // events, which is a full queue.
        if self.events_since_check < EVENTS_MAX {
            event = self.events.try_recv().ok();
        }
        if event.is_none() {
            self.events_since_check = 0;
            self.mark_silent_hosts_lost();
            event = self.events.recv_timeout(LOST_CHECK_INTERVAL).ok();
        }
        self.events_since_check += 1;
        match &event {
            Some(JobEvent::Output {
                launcher_index,
                output,
            }) => match output {
                LauncherOutput::Message(sender_id, message) => {
                    self.record_message(*launcher_index, *sender_id, message)
                }
                LauncherOutput::Other(line) => output::print_message(line),
            },
            Some(JobEvent::LauncherEnded(launcher_index)) => {
                self.mark_launcher_hosts_lost(*launcher_index)
            }
            Some(JobEvent::Signal(_) | JobEvent::CommandEnded(_)) | None => {}
        }
        event
    }

    /// Records what a message says about the host that sent it: that it is alive, and its progress. The message came
    /// with the output of a launch command (srun, ssh). A host that counted as lost takes part again.
    ///
    /// The first message of a host, `Hello`, links its sender number to the host. Messages of other senders are
    /// ignored.
    fn record_message(&mut self, launcher_index: usize, sender_id: u64, message: &HostMessage) {
        let sending_host = match message {
            HostMessage::Hello(name) => self.assign_sender(launcher_index, sender_id, name),
            _ => self
                .hosts
                .iter()
                .position(|host| host.sender_id == Some(sender_id)),
        };
        let Some(host_index) = sending_host else {
            return;
        };
        let host = &mut self.hosts[host_index];
        host.last_message = Instant::now();
        // This also clears the mark: the host was only slow.
        if std::mem::take(&mut host.is_lost) {
            output::print_message(&format!("{} answers again", host.name));
        }
        match message {
            HostMessage::Alive => {}
            HostMessage::Hello(_)
            | HostMessage::Mounted(_)
            | HostMessage::Failed { .. }
            | HostMessage::Left { .. }
            | HostMessage::Ended(_) => host.record_progress(message),
            HostMessage::Notice(text) => self.print_notice(host_index, text),
            HostMessage::Record(_) | HostMessage::Checkpoints(_) | HostMessage::NotReported(_) => {
                self.add_to_report(host_index, message)
            }
        }
    }

    /// Prints a notice of a host. Many hosts often send the same notice, so its text is printed once.
    fn print_notice(&mut self, host_index: usize, text: &str) {
        if self.hosts.len() == 1 {
            output::print_message(text);
        } else if !self
            .shown_notices
            .iter()
            .any(|shown_text| shown_text == text)
        {
            output::print_message(&format!("{}: {text}", self.hosts[host_index].name));
            self.shown_notices.push(text.to_owned());
        }
    }

    /// Adds what a host sent for the report of the run: the record (what its mount did), or checkpoints. Other messages
    /// have no effect.
    fn add_to_report(&mut self, host_index: usize, message: &HostMessage) {
        let host = &self.hosts[host_index];
        match message {
            HostMessage::Record(record) => match record.as_ref().clone().check() {
                Ok(record) => self.report.add_record(record),
                Err(error) => self
                    .report
                    .failures
                    .push(format!("the record of {}: {error}", host.name)),
            },
            HostMessage::Checkpoints(checkpoints) => {
                for checkpoint in checkpoints {
                    self.report
                        .checkpoints
                        .insert(checkpoint.path.clone(), checkpoint.clone());
                }
            }
            HostMessage::NotReported(text) => {
                let text = self.with_host_name(host, text);
                self.report.failures.push(text);
            }
            _ => {}
        }
    }

    /// Finds out which host sent a first message, and returns the index of that host. The message is in the output of
    /// the launch command with the index `launcher_index`. `name` is the name that the host gives itself.
    ///
    /// Returns the host of that launch command with the same name, or else with the same name up to the first dot. If
    /// no name fits, returns the next host that has sent nothing yet. Returns `None` if all hosts of the launch command
    /// have sent messages.
    fn assign_sender(
        &mut self,
        launcher_index: usize,
        sender_id: u64,
        name: &str,
    ) -> Option<usize> {
        // Hosts that have sent nothing yet.
        let mut candidates = self.launchers[launcher_index].hosts.clone();
        candidates.retain(|index| self.hosts[*index].sender_id.is_none());
        let has_name = |index: &&usize| self.hosts[**index].name == name;
        let has_short_name =
            |index: &&usize| short_host_name(&self.hosts[**index].name) == short_host_name(name);
        let host_index = *candidates
            .iter()
            .find(has_name)
            .or_else(|| candidates.iter().find(has_short_name))
            .or_else(|| candidates.first())?;
        self.hosts[host_index].sender_id = Some(sender_id);
        Some(host_index)
    }

    /// Marks the hosts of an ended launch command as lost, unless they have ended.
    fn mark_launcher_hosts_lost(&mut self, launcher_index: usize) {
        for index in self.launchers[launcher_index].hosts.clone() {
            self.mark_lost(index);
        }
    }

    /// Marks hosts as lost whose last message is older than their timeout.
    fn mark_silent_hosts_lost(&mut self) {
        for index in 0..self.hosts.len() {
            let host = &self.hosts[index];
            let timeout = match host.state {
                // A host that has no mount yet may need longer: see `START_TIMEOUT_MIN`.
                HostState::Starting | HostState::Ready => self.timeout.max(START_TIMEOUT_MIN),
                HostState::Mounted | HostState::Ended(_) | HostState::Failed(_) => self.timeout,
            };
            if host.last_message.elapsed() > timeout {
                self.mark_lost(index);
            }
        }
    }

    /// Marks a host as lost, unless it has ended. If it had a mount, prints a message about it.
    fn mark_lost(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        if host.is_lost || host.has_ended() {
            return;
        }
        host.is_lost = true;
        if let HostState::Mounted = host.state {
            output::print_message(&format!("{} does not answer any more", host.name));
        }
    }
}
