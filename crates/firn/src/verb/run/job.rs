//! All hosts of a run: their mounts, from the first word to the last.
//!
//! Promises
//! * The command starts when every host has mounted, or not at all.
//! * A host that says nothing for `timeout` is lost: the run waits for the others only, and names the lost host with the
//!   command that recovers its data.
//! * Each other host ends by itself what it has begun, also when this process ends before.

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

use super::launcher::{Launcher, Program, Start};
use super::message::{Mounted, Order, Output, Report, Setup, Word, Words, send_order};
use crate::failure::{FAILED, Failure};
use crate::progress::{Meter, Waited};
use crate::{output, report};

/// Signals that are for the command.
const PASSED_ON: [i32; 7] = [SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCONT];
/// How often a host says that it is there, as a part of the time after which it is lost.
const BEATS: u32 = 5;
/// How often it is looked at whether one is lost.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Events in the queue at most. A reader of a host's output waits for room in it.
const EVENTS_MAX: usize = 1024;
/// How long a host may be silent before it has a mount. A launcher may have to wait for other work, and the first thing
/// that a mount does is to recover what an earlier one held.
const START_LIMIT: Duration = Duration::from_secs(60);
/// How long launchers may take to end when all hosts have.
const LAUNCHER_END: Duration = Duration::from_secs(5);

/// What this process waits for.
enum Event {
    /// Output of a start.
    Output(usize, Output),
    /// A start has ended, and with it all its hosts.
    StartEnded(usize),
    Signal(i32),
    CommandEnded(std::io::Result<ExitStatus>),
}

/// A process here that starts the part of the run on some hosts.
struct Running {
    child: Child,
    /// None once it reads no more.
    orders: Option<ChildStdin>,
    hosts: Vec<usize>,
}

/// How far a host is.
enum HostState {
    Starting,
    Ready,
    Mounted,
    Ended(Report),
    /// It has no mount: why, and the exit status.
    Failed(String, u8),
}

struct Host {
    name: String,
    /// As it calls itself.
    own_name: String,
    /// Number of its words; none before the first.
    id: Option<u64>,
    state: HostState,
    /// What it mounted.
    mounted: Option<Mounted>,
    last_word: Instant,
    is_lost: bool,
    left_bytes: u64,
    left_files: u64,
}

impl Host {
    fn has_ended(&self) -> bool {
        matches!(self.state, HostState::Ended(_) | HostState::Failed(..))
    }
}

/// The hosts of a run.
pub(super) struct Job<'a> {
    launcher: &'a dyn Launcher,
    timeout: Duration,
    hosts: Vec<Host>,
    running: Vec<Running>,
    sender: SyncSender<Event>,
    events: Receiver<Event>,
    /// Events that were taken since the last look for lost hosts.
    taken: usize,
    /// Notices that were told already, without the host.
    told: Vec<String>,
    /// What hosts tell for the report of the run.
    report: report::Run,
}

/// How the mounts of a run ended.
pub(super) struct Ended {
    pub(super) waited: Waited,
    /// What stays in memory, and in which arenas.
    pub(super) held_bytes: u64,
    pub(super) arenas: Vec<PathBuf>,
    pub(super) mounted: Vec<Mounted>,
    /// Hosts that are lost, with a mount.
    pub(super) lost: Vec<String>,
    /// What went wrong on hosts, in words, and its exit status.
    pub(super) failures: Vec<(String, u8)>,
    /// What hosts told for the report of the run.
    pub(super) report: report::Run,
}

impl<'a> Job<'a> {
    /// Starts the part of this run on each host.
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
            last_word: Instant::now(),
            is_lost: false,
            left_bytes: 0,
            left_files: 0,
        };
        let mut job = Self {
            launcher,
            timeout,
            hosts: launcher.hosts().iter().map(host).collect(),
            running: Vec::new(),
            sender,
            events,
            taken: 0,
            told: Vec::new(),
            report: report::Run::default(),
        };
        // Before the first process, so that no signal falls between.
        job.watch_signals()?;
        let beat = (timeout / BEATS).max(Duration::from_millis(100));
        let program = program(u64::try_from(beat.as_millis()).unwrap_or(u64::MAX))?;
        for start in launcher.starts(&program) {
            job.begin(start)?;
        }
        Ok(job)
    }

    fn watch_signals(&self) -> Result<(), Failure> {
        let mut signals = Signals::new(PASSED_ON)
            .map_err(|error| Failure::new(FAILED, format!("cannot watch for signals: {error}")))?;
        let sender = self.sender.clone();
        thread::spawn(move || {
            for signal in &mut signals {
                let _ = sender.send(Event::Signal(signal));
            }
        });
        Ok(())
    }

    fn begin(&mut self, start: Start) -> Result<(), Failure> {
        let Start { mut command, hosts } = start;
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A Ctrl-C is for the command. The mounts end after it.
        command.process_group(0);
        let mut child = command.spawn().map_err(|error| {
            let text = format!("cannot start `{program}`, which starts what mounts: {error}");
            Failure::new(FAILED, text)
        })?;
        let orders = child.stdin.take();
        let number = self.running.len();
        let sender = self.sender.clone();
        if let Some(words) = child.stdout.take() {
            thread::spawn(move || {
                for output in Words::new(BufReader::new(words)) {
                    if sender.send(Event::Output(number, output)).is_err() {
                        return;
                    }
                }
                let _ = sender.send(Event::StartEnded(number));
            });
        }
        self.running.push(Running {
            child,
            orders,
            hosts,
        });
        Ok(())
    }

    /// Has all hosts mount, and waits for that; `make` gives the order when all are there, knowing what they call themselves.
    pub(super) fn mount(
        &mut self,
        make: impl FnOnce(&[String]) -> Setup,
    ) -> Result<Vec<Mounted>, Failure> {
        self.wait_for_all(|state| matches!(state, HostState::Starting))?;
        let names: Vec<String> = self
            .hosts
            .iter()
            .map(|host| host.own_name.clone())
            .collect();
        self.order(&Order::Mount(Box::new(make(&names))));
        self.wait_for_all(|state| matches!(state, HostState::Ready))?;
        Ok(self
            .hosts
            .iter()
            .filter_map(|host| host.mounted.clone())
            .collect())
    }

    /// Until no host is in such a state; an error if one fails, or is lost, or a signal comes before.
    fn wait_for_all(&mut self, is_before: impl Fn(&HostState) -> bool) -> Result<(), Failure> {
        loop {
            if let Some(failure) = self.find_failure() {
                return Err(failure);
            }
            if !self.hosts.iter().any(|host| is_before(&host.state)) {
                return Ok(());
            }
            if let Some(Event::Signal(signal)) = self.next_event()
                && signal != SIGCONT
            {
                let code = u8::try_from(128 + signal).unwrap_or(FAILED);
                return Err(Failure::new(code, self.describe_interruption(&is_before)));
            }
        }
    }

    fn describe_interruption(&self, is_before: &impl Fn(&HostState) -> bool) -> String {
        let waited_for = self.hosts.iter().filter(|host| is_before(&host.state));
        let names: Vec<&str> = waited_for.map(|host| host.name.as_str()).collect();
        format!(
            "interrupted before the command, while {} had not answered",
            names.join(", ")
        )
    }

    /// The first host that has no mount and gets none.
    fn find_failure(&self) -> Option<Failure> {
        let is_one = self.hosts.len() == 1;
        self.hosts.iter().find_map(|host| {
            let (text, code) = match &host.state {
                HostState::Failed(text, code) if is_one => (text.clone(), *code),
                HostState::Failed(text, code) => (format!("{}: {text}", host.name), *code),
                HostState::Ended(_) => (format!("the mount on {} has ended", host.name), FAILED),
                _ if host.is_lost => {
                    let program = std::env::current_exe().unwrap_or_else(|_| "firn".into());
                    let program = crate::text::path(&program);
                    let line = self
                        .launcher
                        .line_on(&host.name, &format!("{program} version"));
                    let text = format!(
                        "{} does not answer: `{line}` must work, and --host-timeout be long enough",
                        host.name
                    );
                    (text, FAILED)
                }
                _ => return None,
            };
            Some(Failure::new(code, text))
        })
    }

    /// Waits for the command. SIGTERM, which comes before a time limit, makes durable what is held meanwhile.
    pub(super) fn wait_for_command(&mut self, mut command: Child) -> Result<ExitStatus, Failure> {
        let pid = Pid::from_child(&command);
        let sender = self.sender.clone();
        thread::spawn(move || {
            let _ = sender.send(Event::CommandEnded(command.wait()));
        });
        loop {
            match self.next_event() {
                Some(Event::Signal(signal)) => {
                    // A Ctrl-C reached the whole group already; a second one does no harm.
                    if let Some(signal) = Signal::from_named_raw(signal) {
                        let _ = kill_process(pid, signal);
                    }
                    if signal == SIGTERM {
                        self.order(&Order::Drain);
                    }
                }
                Some(Event::CommandEnded(status)) => {
                    return status.map_err(|error| {
                        Failure::new(FAILED, format!("cannot wait for the command: {error}"))
                    });
                }
                Some(Event::Output(..) | Event::StartEnded(_)) | None => {}
            }
        }
    }

    /// Has all hosts unmount, and waits for those that are not lost. A second signal meanwhile ends the wait.
    pub(super) fn end(mut self, policy: HeldPolicy, quiet: bool) -> Ended {
        let mut meter = Meter::quiet_if(quiet);
        self.order(&Order::End(policy));
        let mut signals = 0;
        // A host that has not begun sees that orders have ended.
        let is_waited_for = |host: &Host| {
            matches!(host.state, HostState::Ready | HostState::Mounted) && !host.is_lost
        };
        while self.hosts.iter().any(is_waited_for) {
            match self.next_event() {
                Some(Event::Signal(SIGINT | SIGTERM)) => {
                    signals += 1;
                    if signals > 1 {
                        break;
                    }
                    output::say("draining; a second signal leaves that to the hosts");
                }
                Some(Event::Output(..)) => {
                    let bytes = self.hosts.iter().map(|host| host.left_bytes).sum();
                    let files = self.hosts.iter().map(|host| host.left_files).sum();
                    meter.show(bytes, files, "draining");
                }
                _ => {}
            }
        }
        let time = meter.waited().time;
        drop(meter);
        let ended = self.sum_up(time);
        self.close();
        ended
    }

    fn sum_up(&mut self, time: Duration) -> Ended {
        let mut ended = Ended {
            waited: Waited {
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
        let is_one = self.hosts.len() == 1;
        for host in &self.hosts {
            match &host.state {
                HostState::Ended(report) => {
                    ended.waited.bytes += report.waited_bytes;
                    ended.waited.files += report.waited_files;
                    ended.held_bytes += report.held_bytes;
                    ended.arenas.push(report.arena.clone());
                    if let Some((text, code)) = &report.failure {
                        let text = if is_one {
                            text.clone()
                        } else {
                            format!("{}: {text}", host.name)
                        };
                        ended.failures.push((text, *code));
                    }
                }
                // It never had a mount.
                HostState::Failed(..) | HostState::Starting | HostState::Ready => {}
                HostState::Mounted => {
                    ended.failures.extend(self.describe_lost(host));
                    if host.is_lost {
                        ended.lost.push(host.own_name.clone());
                    }
                }
            }
        }
        ended
    }

    fn describe_lost(&self, host: &Host) -> Option<(String, u8)> {
        let backing = crate::text::path(host.mounted.as_ref()?.backing.as_path());
        let line = self
            .launcher
            .line_on(&host.name, &format!("firn recover {backing}"));
        let why = if host.is_lost {
            "is lost"
        } else {
            "has not ended"
        };
        let text = format!(
            "{} {why}: what it held that was not durable is in its memory; if it was not rebooted, drain that with `{line}`",
            host.name
        );
        Some((text, FAILED))
    }

    /// Ends the launchers; the hosts that have not ended see that orders have ended.
    fn close(mut self) {
        for running in &mut self.running {
            running.orders = None;
        }
        let until = Instant::now() + LAUNCHER_END;
        for running in &mut self.running {
            let is_over = running.hosts.iter().all(|at| self.hosts[*at].has_ended());
            while is_over && Instant::now() < until {
                if !matches!(running.child.try_wait(), Ok(None)) {
                    break;
                }
                thread::sleep(Duration::from_millis(5));
            }
            // srun and ssh wait for a host that is lost or has never answered. But srun ends all others of its step when it
            // is ended.
            let is_vain = running.hosts.iter().all(|at| {
                let host = &self.hosts[*at];
                host.has_ended() || host.is_lost || matches!(host.state, HostState::Starting)
            });
            if is_vain && matches!(running.child.try_wait(), Ok(None)) {
                let _ = kill_process(Pid::from_child(&running.child), Signal::TERM);
                let _ = running.child.try_wait();
            }
        }
    }

    fn order(&mut self, order: &Order) {
        for running in &mut self.running {
            if let Some(orders) = &mut running.orders
                && send_order(orders, order).is_err()
            {
                // Its end tells the rest.
                running.orders = None;
            }
        }
    }

    /// The next thing that happens, which is done as far as it is about hosts; none: nothing for a while.
    fn next_event(&mut self) -> Option<Event> {
        // This process may have been stopped meanwhile: the words of all hosts are taken before one counts as lost.
        let mut event = None;
        if self.taken < EVENTS_MAX {
            event = self.events.try_recv().ok();
        }
        if event.is_none() {
            self.taken = 0;
            self.find_lost();
            event = self.events.recv_timeout(LOOK_EVERY).ok();
        }
        self.taken += 1;
        match &event {
            Some(Event::Output(start, Output::Word(id, word))) => self.take(*start, *id, word),
            Some(Event::Output(_, Output::Other(line))) => output::say(line),
            Some(Event::StartEnded(start)) => self.start_ended(*start),
            Some(Event::Signal(_) | Event::CommandEnded(_)) | None => {}
        }
        event
    }

    fn take(&mut self, start: usize, id: u64, word: &Word) {
        let at = match word {
            Word::Hello(name) => self.assign(start, id, name),
            _ => self.hosts.iter().position(|host| host.id == Some(id)),
        };
        let Some(at) = at else {
            return;
        };
        let is_one = self.hosts.len() == 1;
        let host = &mut self.hosts[at];
        host.last_word = Instant::now();
        if std::mem::take(&mut host.is_lost) {
            output::say(&format!("{} answers again", host.name));
        }
        match word {
            Word::Hello(name) => {
                host.own_name.clone_from(name);
                host.state = HostState::Ready;
            }
            Word::Alive => {}
            Word::Notice(text) if is_one => output::say(text),
            // Many hosts notice the same: it is told once.
            Word::Notice(text) if !self.told.contains(text) => {
                output::say(&format!("{}: {text}", host.name));
                self.told.push(text.clone());
            }
            Word::Notice(_) => {}
            Word::Mounted(mounted) => {
                host.mounted = Some(mounted.clone());
                host.state = HostState::Mounted;
            }
            Word::Failed { text, code } => host.state = HostState::Failed(text.clone(), *code),
            Word::Record(record) => match record.as_ref().clone().check() {
                Ok(record) => self.report.add(record),
                Err(error) => self
                    .report
                    .failures
                    .push(format!("the record of {}: {error}", host.name)),
            },
            Word::Checkpoints(some) => {
                let some = some.iter().map(|one| (one.path.clone(), one.clone()));
                self.report.checkpoints.extend(some);
            }
            Word::NotReported(text) if is_one => self.report.failures.push(text.clone()),
            Word::NotReported(text) => {
                let text = format!("{}: {text}", host.name);
                self.report.failures.push(text);
            }
            Word::Left { bytes, files } => (host.left_bytes, host.left_files) = (*bytes, *files),
            Word::Ended(report) => host.state = HostState::Ended(report.clone()),
        }
    }

    /// The host that a first word comes from: by its name, or the next one of that start which has said nothing yet.
    fn assign(&mut self, start: usize, id: u64, name: &str) -> Option<usize> {
        let short = |name: &str| name.split('.').next().unwrap_or_default().to_owned();
        let free = |at: &usize| self.hosts[*at].id.is_none();
        let of_start = || self.running[start].hosts.iter().copied().filter(free);
        let at = of_start()
            .find(|at| self.hosts[*at].name == name)
            .or_else(|| of_start().find(|at| short(&self.hosts[*at].name) == short(name)))
            .or_else(|| of_start().next())?;
        self.hosts[at].id = Some(id);
        Some(at)
    }

    fn start_ended(&mut self, start: usize) {
        for at in self.running[start].hosts.clone() {
            self.lose(at);
        }
    }

    fn find_lost(&mut self) {
        for at in 0..self.hosts.len() {
            let host = &self.hosts[at];
            let limit = match host.state {
                HostState::Starting | HostState::Ready => self.timeout.max(START_LIMIT),
                HostState::Mounted | HostState::Ended(_) | HostState::Failed(..) => self.timeout,
            };
            if host.last_word.elapsed() > limit {
                self.lose(at);
            }
        }
    }

    fn lose(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if host.is_lost || host.has_ended() {
            return;
        }
        host.is_lost = true;
        if let HostState::Mounted = host.state {
            output::say(&format!("{} does not answer any more", host.name));
        }
    }
}
