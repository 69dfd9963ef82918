//! The coordinator of a run: it starts the mounts of all hosts, follows them, and ends them.
//!
//! Terms
//! * A *host part* is the process that mounts on one host ([`super::host_part`]).
//! * A *launch command* is a local process, such as srun or ssh, that starts the host parts on some of the hosts.
//! * A host is *lost* when its host part has sent nothing for `timeout`.
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

use super::launcher::{LaunchCommand, Launcher, Program};
use super::message::{
    HostMessage, HostOrder, MessageReader, MountSetup, MountedHost, Output, UnmountReport,
    send_order,
};
use crate::failure::{FAILED, Failure};
use crate::progress::{ProgressMeter, WaitSummary};
use crate::{output, report};

/// Signals that are passed on to the command.
const FORWARDED_SIGNALS: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT];
/// Number of signs of life that a host sends within `timeout`.
const SIGNS_OF_LIFE_PER_TIMEOUT: u32 = 5;
/// Interval at which the hosts are checked for lost ones.
const LOST_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Capacity of the queue of events. A thread that reads a host's output waits while the queue is full.
const EVENTS_MAX: usize = 1024;
/// Minimum timeout for a host without a mount. A launcher may have to wait for other work, and a mount first recovers
/// the data of an earlier mount.
const START_TIMEOUT_MIN: Duration = Duration::from_secs(60);
/// Time for launchers to end after all hosts have ended.
const LAUNCHER_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Exit status of a program that was ended by signal N, minus N, as shells report it.
const SIGNAL_STATUS_BASE: i32 = 128;

/// An event for the coordinator.
enum JobEvent {
    /// Output of the launcher with this index.
    Output(usize, Output),
    /// The launcher with this index has ended, and so have the host parts that it started.
    LauncherEnded(usize),
    /// This process got the signal.
    Signal(i32),
    /// The command has ended.
    CommandEnded(std::io::Result<ExitStatus>),
}

/// A launch command that was started.
struct RunningLauncher {
    child: Child,
    /// Its standard input. `None` means that it accepts no more orders.
    orders: Option<ChildStdin>,
    /// Indices of its hosts.
    hosts: Vec<usize>,
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
    /// The host has no mount: the reason, and the exit status.
    Failed(String, u8),
}

/// A host of the run.
struct Host {
    /// Name of the host, as the launcher knows it.
    name: String,
    /// The name that the host gives itself.
    own_name: String,
    /// Number of the sender in the host's messages. `None` before its first message.
    id: Option<u64>,
    /// Progress of the host.
    state: HostState,
    /// The mount of the host. `None` before the mount is usable.
    mounted: Option<MountedHost>,
    /// When the last message arrived.
    last_message: Instant,
    /// Whether the host has exceeded its timeout.
    is_lost: bool,
    /// Bytes that the last drain still has to write.
    left_bytes: u64,
    /// Files that have such bytes.
    left_files: u64,
}

impl Host {
    fn has_ended(&self) -> bool {
        matches!(self.state, HostState::Ended(_) | HostState::Failed(..))
    }
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
    sender: SyncSender<JobEvent>,
    /// The queue of events.
    events: Receiver<JobEvent>,
    /// Events that were taken since the last check for lost hosts.
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
    /// Bytes that remain in memory, and the arenas that hold them.
    pub(super) held_bytes: u64,
    pub(super) arenas: Vec<PathBuf>,
    /// The mounts that were usable.
    pub(super) mounted: Vec<MountedHost>,
    /// Names of lost hosts that had a mount.
    pub(super) lost: Vec<String>,
    /// For each failed host, a message and its exit status.
    pub(super) failures: Vec<(String, u8)>,
    /// What hosts sent for the report of the run.
    pub(super) report: report::Run,
}

impl<'a> Job<'a> {
    /// Starts the host part on each host. `program` makes its command line from the interval of its signs of life in
    /// milliseconds. Fails if a launch command cannot be started.
    pub(super) fn start(
        launcher: &'a dyn Launcher,
        timeout: Duration,
        program: impl FnOnce(u64) -> Result<Program, Failure>,
    ) -> Result<Self, Failure> {
        let (sender, events) = sync_channel(EVENTS_MAX);
        let host = |name: &String| Host {
            name: name.clone(),
            own_name: name.clone(),
            id: None,
            state: HostState::Starting,
            mounted: None,
            last_message: Instant::now(),
            is_lost: false,
            left_bytes: 0,
            left_files: 0,
        };
        let mut job = Self {
            launcher,
            timeout,
            hosts: launcher.hosts().iter().map(host).collect(),
            launchers: Vec::new(),
            sender,
            events,
            events_since_check: 0,
            shown_notices: Vec::new(),
            report: report::Run::default(),
        };
        // The handlers are set before the first process starts, so that no signal is lost in between.
        job.watch_signals()?;
        let interval = (timeout / SIGNS_OF_LIFE_PER_TIMEOUT).max(Duration::from_millis(100));
        let program = program(u64::try_from(interval.as_millis()).unwrap_or(u64::MAX))?;
        for launch_command in launcher.launch_commands(&program) {
            job.spawn_launcher(launch_command)?;
        }
        Ok(job)
    }

    fn watch_signals(&self) -> Result<(), Failure> {
        let mut signals = Signals::new(FORWARDED_SIGNALS)
            .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
        let sender = self.sender.clone();
        thread::spawn(move || {
            for signal in &mut signals {
                let _ = sender.send(JobEvent::Signal(signal));
            }
        });
        Ok(())
    }

    /// Starts a launch command, and a thread that turns its output into events. Fails if the command cannot be started.
    fn spawn_launcher(&mut self, launch_command: LaunchCommand) -> Result<(), Failure> {
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
        let number = self.launchers.len();
        let sender = self.sender.clone();
        if let Some(messages) = child.stdout.take() {
            thread::spawn(move || {
                for output in MessageReader::new(BufReader::new(messages)) {
                    if sender.send(JobEvent::Output(number, output)).is_err() {
                        return;
                    }
                }
                let _ = sender.send(JobEvent::LauncherEnded(number));
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
    /// `make_setup` makes the order from the names that the hosts give themselves. It is called once all hosts have sent
    /// their names. Fails if a host fails or is lost, or if a signal comes first.
    pub(super) fn mount(
        &mut self,
        make_setup: impl FnOnce(&[String]) -> MountSetup,
    ) -> Result<Vec<MountedHost>, Failure> {
        self.wait_for_all(|state| matches!(state, HostState::Starting))?;
        let names: Vec<String> = self
            .hosts
            .iter()
            .map(|host| host.own_name.clone())
            .collect();
        self.send_to_hosts(&HostOrder::Mount(Box::new(make_setup(&names))));
        self.wait_for_all(|state| matches!(state, HostState::Ready))?;
        Ok(self
            .hosts
            .iter()
            .filter_map(|host| host.mounted.clone())
            .collect())
    }

    /// Waits until no host is in a state for which `is_before` holds. Fails if a host fails or is lost, or if a
    /// signal comes first.
    fn wait_for_all(&mut self, is_before: impl Fn(&HostState) -> bool) -> Result<(), Failure> {
        loop {
            if let Some(failure) = self.first_failure() {
                return Err(failure);
            }
            if !self.hosts.iter().any(|host| is_before(&host.state)) {
                return Ok(());
            }
            if let Some(JobEvent::Signal(signal)) = self.next_event()
                && signal != SIGCONT
            {
                let code = u8::try_from(SIGNAL_STATUS_BASE + signal).unwrap_or(FAILED);
                return Err(Failure::new(code, self.describe_interruption(&is_before)));
            }
        }
    }

    fn describe_interruption(&self, is_before: &impl Fn(&HostState) -> bool) -> String {
        let waited_for = self.hosts.iter().filter(|host| is_before(&host.state));
        let names: Vec<&str> = waited_for.map(|host| host.name.as_str()).collect();
        format!(
            "interrupted before the command started; {} had not answered",
            names.join(", ")
        )
    }

    /// Returns the failure of the first host that has no mount and will get none.
    fn first_failure(&self) -> Option<Failure> {
        let is_single_host = self.hosts.len() == 1;
        self.hosts.iter().find_map(|host| {
            let (text, code) = match &host.state {
                HostState::Failed(text, code) if is_single_host => (text.clone(), *code),
                HostState::Failed(text, code) => (format!("{}: {text}", host.name), *code),
                HostState::Ended(_) => (format!("the mount on {} has ended", host.name), FAILED),
                _ if host.is_lost => {
                    let program = std::env::current_exe().unwrap_or_else(|_| "firn".into());
                    let program = crate::text::path(&program);
                    let line = self
                        .launcher
                        .line_on_host(&host.name, &format!("{program} version"));
                    let text = format!(
                        "{} does not answer: check that `{line}` works, and that --host-timeout is long enough",
                        host.name
                    );
                    (text, FAILED)
                }
                _ => return None,
            };
            Some(Failure::new(code, text))
        })
    }

    /// Waits for the command, and returns its exit status. Signals to this process are forwarded to the command.
    ///
    /// A resource manager sends SIGTERM some time before it kills the job. So SIGTERM also makes the data in memory
    /// durable while the command still runs.
    pub(super) fn wait_for_command(&mut self, mut command: Child) -> Result<ExitStatus, Failure> {
        let pid = Pid::from_child(&command);
        let sender = self.sender.clone();
        thread::spawn(move || {
            let _ = sender.send(JobEvent::CommandEnded(command.wait()));
        });
        loop {
            match self.next_event() {
                Some(JobEvent::Signal(signal)) => {
                    // At a terminal, a Ctrl-C reached the whole group already. A second signal does no harm.
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        let _ = kill_process(pid, signal);
                    }
                    if signal == SIGTERM {
                        self.send_to_hosts(&HostOrder::Drain);
                    }
                }
                Some(JobEvent::CommandEnded(status)) => {
                    return status.map_err(|error| {
                        Failure::new(FAILED, format!("cannot wait for the command: {error}"))
                    });
                }
                Some(JobEvent::Output(..) | JobEvent::LauncherEnded(_)) | None => {}
            }
        }
    }

    /// Sends all hosts the order to unmount, and waits for those that are not lost. Returns their results.
    ///
    /// A second signal during the wait ends the wait. The hosts then finish alone.
    pub(super) fn unmount_all(mut self, policy: HeldPolicy, quiet: bool) -> UnmountSummary {
        let mut meter = ProgressMeter::with_quiet(quiet);
        self.send_to_hosts(&HostOrder::End(policy));
        let mut signals = 0;
        // A host in the state `Starting` has no mount. Its host part ends when standard input ends.
        let is_waited_for = |host: &Host| {
            matches!(host.state, HostState::Ready | HostState::Mounted) && !host.is_lost
        };
        while self.hosts.iter().any(is_waited_for) {
            match self.next_event() {
                Some(JobEvent::Signal(SIGINT | SIGTERM)) => {
                    signals += 1;
                    if signals > 1 {
                        break;
                    }
                    output::print_message(
                        "draining; after a second signal, firn run ends and the hosts finish alone",
                    );
                }
                Some(JobEvent::Output(..)) => {
                    let bytes = self.hosts.iter().map(|host| host.left_bytes).sum();
                    let files = self.hosts.iter().map(|host| host.left_files).sum();
                    meter.show(bytes, files, "draining");
                }
                _ => {}
            }
        }
        let time = meter.summary().time;
        drop(meter);
        let summary = self.summarize(time);
        self.end_launchers();
        summary
    }

    /// Sums up the results of all hosts. `time` is how long the unmounts took.
    fn summarize(&mut self, time: Duration) -> UnmountSummary {
        let mut summary = UnmountSummary {
            waited: WaitSummary {
                bytes: 0,
                files: 0,
                time,
            },
            held_bytes: 0,
            arenas: Vec::new(),
            mounted: self
                .hosts
                .iter()
                .filter_map(|host| host.mounted.clone())
                .collect(),
            lost: Vec::new(),
            failures: Vec::new(),
            report: std::mem::take(&mut self.report),
        };
        let is_single_host = self.hosts.len() == 1;
        for host in &self.hosts {
            match &host.state {
                HostState::Ended(report) => {
                    summary.waited.bytes += report.waited_bytes;
                    summary.waited.files += report.waited_files;
                    summary.held_bytes += report.held_bytes;
                    summary.arenas.push(report.arena.clone());
                    if let Some((text, code)) = &report.failure {
                        let text = if is_single_host {
                            text.clone()
                        } else {
                            format!("{}: {text}", host.name)
                        };
                        summary.failures.push((text, *code));
                    }
                }
                // The host never had a mount, so it left nothing behind.
                HostState::Failed(..) | HostState::Starting | HostState::Ready => {}
                HostState::Mounted => {
                    summary.failures.extend(self.describe_lost(host));
                    if host.is_lost {
                        summary.lost.push(host.own_name.clone());
                    }
                }
            }
        }
        summary
    }

    /// Returns a message for a host whose unmount did not finish, with the command that recovers its data. Returns
    /// `None` if the host never had a mount.
    fn describe_lost(&self, host: &Host) -> Option<(String, u8)> {
        let backing = crate::text::path(host.mounted.as_ref()?.backing.as_path());
        let line = self
            .launcher
            .line_on_host(&host.name, &format!("firn recover {backing}"));
        let reason = if host.is_lost {
            "is lost"
        } else {
            "has not ended"
        };
        let text = format!(
            "{} {reason}: its data that was not durable is in its memory; if it was not rebooted, drain the data with `{line}`",
            host.name
        );
        Some((text, FAILED))
    }

    /// Ends the launch commands. This ends the standard input of their host parts, which then unmount.
    fn end_launchers(mut self) {
        for launchers in &mut self.launchers {
            launchers.orders = None;
        }
        let deadline = Instant::now() + LAUNCHER_END_TIMEOUT;
        for launchers in &mut self.launchers {
            let have_hosts_ended = launchers
                .hosts
                .iter()
                .all(|index| self.hosts[*index].has_ended());
            while have_hosts_ended && Instant::now() < deadline {
                if !matches!(launchers.child.try_wait(), Ok(None)) {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            // srun and ssh would wait for a lost host, or for a host that never answered. But a signal to srun ends all
            // hosts of its step, so srun gets a signal only if none of its hosts still works.
            let no_host_works = launchers.hosts.iter().all(|index| {
                let host = &self.hosts[*index];
                host.has_ended() || host.is_lost || matches!(host.state, HostState::Starting)
            });
            if no_host_works && matches!(launchers.child.try_wait(), Ok(None)) {
                let _ = kill_process(Pid::from_child(&launchers.child), Signal::TERM);
                let _ = launchers.child.try_wait();
            }
        }
    }

    /// Sends an order to all hosts, through the launchers that still run.
    fn send_to_hosts(&mut self, order: &HostOrder) {
        for launchers in &mut self.launchers {
            if let Some(orders) = &mut launchers.orders
                && send_order(orders, order).is_err()
            {
                // The launcher has ended. The end of its output reports that, so this error is not reported.
                launchers.orders = None;
            }
        }
    }

    /// Waits for the next event, and updates the state of the hosts from it. Returns the event, or `None` if nothing
    /// happened for [`LOST_CHECK_INTERVAL`].
    fn next_event(&mut self) -> Option<JobEvent> {
        // After a stop of this process (Ctrl-Z), old messages wait in the queue. They are handled first, so that no
        // living host counts as lost.
        let mut event = None;
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
            Some(JobEvent::Output(start, Output::Message(id, message))) => {
                self.record_message(*start, *id, message)
            }
            Some(JobEvent::Output(_, Output::Other(line))) => output::print_message(line),
            Some(JobEvent::LauncherEnded(start)) => self.mark_hosts_of_launcher_lost(*start),
            Some(JobEvent::Signal(_) | JobEvent::CommandEnded(_)) | None => {}
        }
        event
    }

    /// Records a message of a host. Any message shows that the host is alive, even if it counted as lost.
    fn record_message(&mut self, start: usize, id: u64, message: &HostMessage) {
        let sender = match message {
            HostMessage::Hello(name) => self.assign_sender(start, id, name),
            _ => self.hosts.iter().position(|host| host.id == Some(id)),
        };
        let Some(sender) = sender else {
            return;
        };
        let is_single_host = self.hosts.len() == 1;
        let host = &mut self.hosts[sender];
        host.last_message = Instant::now();
        // The host was only slow. It takes part in the run again.
        if std::mem::take(&mut host.is_lost) {
            output::print_message(&format!("{} answers again", host.name));
        }
        match message {
            HostMessage::Hello(name) => {
                host.own_name.clone_from(name);
                host.state = HostState::Ready;
            }
            HostMessage::Alive => {}
            HostMessage::Notice(text) if is_single_host => output::print_message(text),
            // Many hosts often send the same notice, so its text is printed once.
            HostMessage::Notice(text) if !self.shown_notices.contains(text) => {
                output::print_message(&format!("{}: {text}", host.name));
                self.shown_notices.push(text.clone());
            }
            HostMessage::Notice(_) => {}
            HostMessage::Mounted(mounted) => {
                host.mounted = Some(mounted.clone());
                host.state = HostState::Mounted;
            }
            HostMessage::Failed { text, code } => {
                host.state = HostState::Failed(text.clone(), *code)
            }
            HostMessage::Record(record) => match record.as_ref().clone().check() {
                Ok(record) => self.report.add_record(record),
                Err(error) => self
                    .report
                    .failures
                    .push(format!("the record of {}: {error}", host.name)),
            },
            HostMessage::Checkpoints(checkpoints) => {
                let by_path = checkpoints
                    .iter()
                    .map(|checkpoint| (checkpoint.path.clone(), checkpoint.clone()));
                self.report.checkpoints.extend(by_path);
            }
            HostMessage::NotReported(text) if is_single_host => {
                self.report.failures.push(text.clone())
            }
            HostMessage::NotReported(text) => {
                let text = format!("{}: {text}", host.name);
                self.report.failures.push(text);
            }
            HostMessage::Left { bytes, files } => {
                (host.left_bytes, host.left_files) = (*bytes, *files)
            }
            HostMessage::Ended(report) => host.state = HostState::Ended(report.clone()),
        }
    }

    /// Finds out which host sent a first message, and returns the index of that host. `start` is the launcher whose
    /// output has the message, `id` the sender's number, and `name` the name that the host gives itself.
    ///
    /// Returns the host of that launcher with the same name, or else with the same name up to the first dot. If no name
    /// fits, returns the next host that has sent nothing yet. Returns `None` if all hosts of the launcher have sent
    /// messages.
    fn assign_sender(&mut self, start: usize, id: u64, name: &str) -> Option<usize> {
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        let is_unassigned = |index: &usize| self.hosts[*index].id.is_none();
        let candidates = || {
            let hosts = self.launchers[start].hosts.iter().copied();
            hosts.filter(is_unassigned)
        };
        let sender = candidates()
            .find(|index| self.hosts[*index].name == name)
            .or_else(|| candidates().find(|index| short(&self.hosts[*index].name) == short(name)))
            .or_else(|| candidates().next())?;
        self.hosts[sender].id = Some(id);
        Some(sender)
    }

    /// Marks the hosts of an ended launcher as lost, unless they have ended.
    fn mark_hosts_of_launcher_lost(&mut self, start: usize) {
        for index in self.launchers[start].hosts.clone() {
            self.mark_lost(index);
        }
    }

    /// Marks hosts as lost whose last message is older than their timeout.
    fn mark_silent_hosts_lost(&mut self) {
        for index in 0..self.hosts.len() {
            let host = &self.hosts[index];
            let limit = match host.state {
                // A host that has no mount yet may need longer: see `START_TIMEOUT_MIN`.
                HostState::Starting | HostState::Ready => self.timeout.max(START_TIMEOUT_MIN),
                HostState::Mounted | HostState::Ended(_) | HostState::Failed(..) => self.timeout,
            };
            if host.last_message.elapsed() > limit {
                self.mark_lost(index);
            }
        }
    }

    /// Marks a host as lost, unless it has ended.
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
