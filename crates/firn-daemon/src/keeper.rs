//! The keeper: a small process that holds the descriptors of a mount when its firnd dies, and starts another firnd.
//!
//! ```text
//!  firn mount ──starts──► firn-keeper ──starts──► firnd
//!                             │  ▲  socket: descriptors, "serving", "ending"
//!                             │  └──────────────────┘
//!                             └ /dev/fuse, control of the connection, the request
//! ```
//!
//! Promises
//! * The keeper has one thread, calls no backing, and reads only its socket, so only a signal can end it. firnd then
//!   starts another keeper and gives it the same descriptors.
//! * firnd is started again only after the kernel reports its complete end: its locks and its arena are free.
//! * If no firnd can serve the mount, the connection is aborted. Programs then get the errors of a mount whose firnd
//!   died without a keeper.
//!
//! Restarts: a firnd that dies without the message *ending* is started again. If it had served, that happens at once.
//! If it died before or just after it began to serve, a pause comes first, which doubles each time. Five such deaths in
//! a minute end the mount.
//!
//! A service manager that stores descriptors can have the keeper's place (`service_manager.rs`).
//!
//! Upgrades: a firnd that is upgraded gives the keeper another program and dies. The keeper tries that program once. If
//! the program does not begin to serve, the keeper starts the program that served last.

mod link;
mod message;
mod service_manager;
mod watchdog;

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getppid, pidfd_open, pidfd_send_signal, waitpid,
};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

pub(crate) use link::{KeeperLink, NextFirnd, ResumedMount, Summons};
use message::{KeptDescriptor, LastUpgrade, Message, Socket};
pub(crate) use message::{Label, Tag, uptime};
use watchdog::{Watchdog, WatchdogAction};

/// The name (argument 0) under which the binary is a keeper.
pub const KEEPER_NAME: &str = "firn-keeper";
/// The argument of a keeper that replaces a dead one. Its stdin is a socket to the firnd that started it.
pub(crate) const REPLACES: &str = "replaces";
/// The argument of a keeper whose mount is ended by the process that starts the keeper.
pub(crate) const ENDS_WITH_PARENT: &str = "ends-with-parent";
/// The argument of a firnd whose stdin is a socket to its keeper.
pub(crate) const KEPT: &str = "kept";

/// The death of a firnd that has served for at least this time is not counted as a failure to take the mount over.
const GOOD_SERVICE_MIN: Duration = Duration::from_millis(250);
/// Pause before the second start in a row; each further pause is twice as long.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(5);
/// Number of failures within [`FAILURES_WITHIN`] after which the mount is given up.
const FAILURES_MAX: usize = 5;
/// Time within which [`FAILURES_MAX`] failures count together.
const FAILURES_WITHIN: Duration = Duration::from_secs(60);
/// Timeout for the program of an upgrade to serve. Programs of the mount wait meanwhile.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(60);

/// The state of a keeper.
struct Keeper {
    kept: Vec<KeptDescriptor>,
    socket: Socket,
    /// Pidfd of the current firnd.
    firnd: OwnedFd,
    /// Process number of that firnd, if it is a child of this process.
    child: Option<Pid>,
    state: FirndState,
    failures: Vec<Instant>,
    /// Number of failures since a firnd last served well.
    failures_in_a_row: u32,
    upgrade: LastUpgrade,
    /// The watchdog of the firnd that serves, if there is one.
    watchdog: Option<Watchdog>,
}

/// State of the current firnd.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FirndState {
    /// The firnd does not serve yet.
    Starting { is_first: bool },
    /// The firnd is the first one of an upgrade and does not serve yet. It is killed at the time `until`.
    Trial { until: Instant },
    /// The firnd has served since this time.
    Serving(Instant),
    /// The firnd ends the mount, or cannot take it over.
    Ending,
}

/// The next action of the keeper after the end of a firnd.
enum AfterEnd {
    /// End, because nothing is left to keep.
    End,
    /// Start another firnd.
    Start,
    /// Abort the connection of the mount and end.
    GiveUp,
}

/// The main function of the keeper. Returns after the end of the mount.
pub fn keeper_main() -> ExitCode {
    let _ = rustix::thread::set_name(c"firn-keeper");
    let _ = rustix::process::setsid();
    // The limit is raised because the keeper may hold many open files without a name.
    let _ = firn_backing::raise_descriptor_limit();
    // These signals are meant for firnd, which drains and ends. The keeper ends after it.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // SIG_IGN would be inherited by firnd; a handler is not.
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let mut arguments = std::env::args_os().skip(1);
    let argument = arguments.next().unwrap_or_default();
    let started = if argument == REPLACES {
        Keeper::replace()
    } else {
        Keeper::begin(argument == ENDS_WITH_PARENT)
    };
    match started {
        Ok(keeper) => {
            let _ = std::env::set_current_dir("/");
            keeper.run();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("firn: the keeper of the mount cannot start: {error}");
            ExitCode::FAILURE
        }
    }
}

impl Keeper {
    /// Begins a mount: stdin is the request, and stdout is the pipe to `firn mount`.
    fn begin(ends_with_parent: bool) -> io::Result<Self> {
        let request = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        let mut kept = vec![KeptDescriptor {
            label: Tag::Request.into(),
            descriptor: request,
        }];
        if ends_with_parent && let Some(parent) = getppid() {
            kept.push(KeptDescriptor {
                label: Tag::Caller.into(),
                descriptor: pidfd_open(parent, PidfdFlags::empty())?,
            });
        }
        let descriptors = kept.iter().map(LabeledDescriptor::of).collect();
        let started = start_firnd(descriptors, None)?;
        // An open pipe in this process would hide the end of firnd from `firn mount`.
        forget_stdio()?;
        Ok(Self {
            kept,
            socket: started.socket,
            firnd: started.firnd,
            child: Some(started.child),
            state: FirndState::Starting { is_first: true },
            failures: Vec::new(),
            failures_in_a_row: 0,
            upgrade: LastUpgrade::None,
            watchdog: None,
        })
    }

    /// Replaces a dead keeper: receives all descriptors from the firnd that started this process.
    fn replace() -> io::Result<Self> {
        let socket = Socket::new(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
        forget_stdio()?;
        let mut kept = Vec::new();
        let firnd = loop {
            match socket.receive()? {
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Message::Keep(given)) if given.label.tag == Tag::Firnd => {
                    break given.descriptor;
                }
                Some(Message::Keep(given)) => kept.push(given),
                Some(_) => {}
            }
        };
        Ok(Self {
            kept,
            socket,
            firnd,
            child: None,
            state: FirndState::Serving(Instant::now()),
            failures: Vec::new(),
            failures_in_a_row: 0,
            upgrade: LastUpgrade::None,
            watchdog: None,
        })
    }

    /// Waits for each end of firnd and acts on it, until the mount has ended or is given up.
    fn run(mut self) {
        loop {
            self.wait_for_end();
            match self.decide_after_end() {
                AfterEnd::End => return,
                AfterEnd::GiveUp => return self.give_up(),
                AfterEnd::Start => {}
            }
            let died = uptime();
            std::thread::sleep(self.delay());
            self.start_next(died);
        }
    }

    /// Starts another firnd. After a failed start, the next round sees the end of the old firnd again and counts a
    /// failure.
    fn start_next(&mut self, died: Duration) {
        let is_trial = self.has(Tag::NextProgram);
        self.state = if is_trial {
            let until = Instant::now() + TRIAL_TIMEOUT;
            FirndState::Trial { until }
        } else {
            FirndState::Starting { is_first: false }
        };
        let earlier = EarlierFirnd {
            died,
            upgrade: if is_trial {
                LastUpgrade::Done
            } else {
                self.upgrade
            },
            is_trial,
        };
        if let Ok(started) = start_firnd(self.choose_descriptors(is_trial), Some(earlier)) {
            self.socket = started.socket;
            self.firnd = started.firnd;
            self.child = Some(started.child);
            self.watchdog = None;
        }
    }

    /// Returns the descriptors for the next firnd. A program that is tried gets the request and program of the upgrade
    /// instead of the old ones.
    fn choose_descriptors(&self, is_trial: bool) -> Vec<LabeledDescriptor<'_>> {
        let choose = |kept| {
            let labeled = LabeledDescriptor::of(kept);
            match labeled.label.tag {
                Tag::Request | Tag::Program if is_trial => None,
                Tag::NextRequest => is_trial.then_some(labeled.with(Tag::Request)),
                Tag::NextProgram => is_trial.then_some(labeled.with(Tag::Program)),
                _ => Some(labeled),
            }
        };
        self.kept.iter().filter_map(choose).collect()
    }

    /// Handles the messages of firnd until all of it has ended.
    fn wait_for_end(&mut self) {
        let mut is_connected = true;
        loop {
            let readable = PollFlags::IN;
            let mut both = [
                PollFd::new(&self.firnd, readable),
                PollFd::new(&self.socket, readable),
            ];
            let count = if is_connected { 2 } else { 1 };
            let _ = poll(&mut both[..count], self.time_left().as_ref());
            let has_ended = !both[0].revents().is_empty();
            // Messages that firnd sent before its end still count.
            while is_connected && self.socket.has_message() {
                match self.socket.receive() {
                    Ok(Some(message)) => self.handle(message),
                    Ok(None) | Err(_) => is_connected = false,
                }
            }
            self.end_late_firnd();
            if has_ended {
                if let Some(child) = self.child.take() {
                    let reap = || waitpid(Some(child), WaitOptions::empty());
                    let _ = rustix::io::retry_on_intr(reap);
                }
                return;
            }
        }
    }

    /// Handles one message of firnd.
    fn handle(&mut self, message: Message) {
        match message {
            Message::Keep(given) => self.keep(given),
            Message::Drop(label) => self.kept.retain(|kept| kept.label != label),
            Message::Serving => {
                if matches!(self.state, FirndState::Trial { .. }) {
                    self.settle_upgrade(LastUpgrade::Done);
                }
                self.state = FirndState::Serving(Instant::now());
            }
            // A program that is tried cannot take the mount over, but the program before it can, so the mount does not
            // end.
            Message::Ending if matches!(self.state, FirndState::Trial { .. }) => {}
            Message::Ending => self.state = FirndState::Ending,
            Message::Watch(limit) => self.watchdog = Watchdog::begin(limit, Instant::now()),
            Message::Pong => {
                if let Some(watchdog) = &mut self.watchdog {
                    watchdog.note_answer(Instant::now());
                }
            }
            Message::Begin { .. } | Message::Ping => {}
        }
    }

    /// Replaces the program and request by those of the upgrade if it succeeded; otherwise drops those of the upgrade.
    fn settle_upgrade(&mut self, upgrade: LastUpgrade) {
        self.upgrade = upgrade;
        for (next, tag) in [
            (Tag::NextProgram, Tag::Program),
            (Tag::NextRequest, Tag::Request),
        ] {
            let Some(index) = self.kept.iter().position(|kept| kept.label.tag == next) else {
                continue;
            };
            let descriptor = self.kept.remove(index).descriptor;
            if upgrade == LastUpgrade::Done {
                let label = tag.into();
                self.keep(KeptDescriptor { label, descriptor });
            }
        }
    }

    /// Keeps a descriptor, and drops the one with the same label.
    fn keep(&mut self, given: KeptDescriptor) {
        self.kept.retain(|kept| kept.label != given.label);
        self.kept.push(given);
    }

    /// Returns the time until firnd is to be pinged or killed; `None` if neither is planned.
    fn time_left(&self) -> Option<Timespec> {
        let now = Instant::now();
        let left = match (self.state, &self.watchdog) {
            (FirndState::Trial { until }, _) => until.saturating_duration_since(now),
            (FirndState::Serving(_), Some(watchdog)) => match watchdog.next_action(now) {
                WatchdogAction::Wait(left) => left,
                WatchdogAction::Ask | WatchdogAction::Late => Duration::ZERO,
            },
            _ => return None,
        };
        Timespec::try_from(left).ok()
    }

    /// Pings a firnd that is watched, and kills one whose time has passed.
    fn end_late_firnd(&mut self) {
        let now = Instant::now();
        let is_late = match (self.state, &mut self.watchdog) {
            (FirndState::Trial { until }, _) => until <= now,
            (FirndState::Serving(_), Some(watchdog)) => match watchdog.next_action(now) {
                WatchdogAction::Wait(_) => false,
                WatchdogAction::Ask => {
                    self.socket.ping();
                    watchdog.note_ping(now);
                    false
                }
                WatchdogAction::Late => {
                    // The time begins again: a firnd that a hanging call keeps alive is killed once more.
                    watchdog.note_answer(now);
                    true
                }
            },
            _ => false,
        };
        if is_late {
            self.write_to_log("firn-keeper: firnd does not answer, and is killed\n");
            let _ = pidfd_send_signal(&self.firnd, Signal::KILL);
        }
    }

    fn write_to_log(&self, line: &str) {
        if let Some(log) = self.kept.iter().find(|kept| kept.label.tag == Tag::Log) {
            let _ = rustix::io::write(&log.descriptor, line.as_bytes());
        }
    }

    /// Decides what comes after the end of a firnd.
    fn decide_after_end(&mut self) -> AfterEnd {
        match self.state {
            FirndState::Starting { is_first: true } => return AfterEnd::End,
            FirndState::Trial { .. } => {
                self.settle_upgrade(LastUpgrade::Refused);
                return AfterEnd::Start;
            }
            FirndState::Ending => return AfterEnd::GiveUp,
            FirndState::Serving(since) if since.elapsed() >= GOOD_SERVICE_MIN => {
                self.failures_in_a_row = 0;
                self.failures.clear();
            }
            FirndState::Serving(_) | FirndState::Starting { is_first: false } => {
                self.note_failure()
            }
        }
        if !self.has(Tag::CanBeTakenOver) || self.failures.len() >= FAILURES_MAX {
            return AfterEnd::GiveUp;
        }
        AfterEnd::Start
    }

    fn note_failure(&mut self) {
        let now = Instant::now();
        self.failures
            .retain(|failure| now.duration_since(*failure) < FAILURES_WITHIN);
        self.failures.push(now);
        self.failures_in_a_row += 1;
    }

    /// Returns the pause before the next start.
    fn delay(&self) -> Duration {
        match self.failures_in_a_row {
            0 => Duration::ZERO,
            failures => DELAY_MAX.min(FIRST_DELAY * 2u32.saturating_pow(failures.min(16) - 1)),
        }
    }

    fn has(&self, tag: Tag) -> bool {
        self.kept.iter().any(|kept| kept.label.tag == tag)
    }

    /// Aborts the connection, so that calls of programs fail. If the mount has ended, there is nothing to abort.
    fn give_up(&self) {
        abort_connection(&self.kept);
    }
}

/// Aborts the connection of a mount, so that no program waits for an answer.
fn abort_connection(kept: &[KeptDescriptor]) {
    let control = kept.iter().find(|kept| kept.label.tag == Tag::Control);
    if let Some(control) = control {
        let _ = rustix::io::write(&control.descriptor, b"1");
    }
}

/// A firnd that was just started: the keeper's end of its socket, its pidfd and its process number.
struct StartedFirnd {
    socket: Socket,
    firnd: OwnedFd,
    child: Pid,
}

impl StartedFirnd {
    /// Sends the descriptors to firnd, and then the facts about the firnd before it.
    fn send_all(
        &self,
        descriptors: &[LabeledDescriptor<'_>],
        earlier: Option<EarlierFirnd>,
    ) -> io::Result<()> {
        for labeled in descriptors {
            self.socket.send(labeled.label, labeled.descriptor)?;
        }
        self.socket.begin(
            earlier.map(|earlier| earlier.died),
            earlier.map_or(LastUpgrade::None, |earlier| earlier.upgrade),
        )
    }
}

/// Facts for a firnd that is not the first one of its mount.
#[derive(Clone, Copy)]
struct EarlierFirnd {
    /// When the keeper saw the end of the earlier firnd, as time since the boot.
    died: Duration,
    /// Result of the last upgrade of the mount.
    upgrade: LastUpgrade,
    /// The next firnd is the first one of an upgrade, so its standard output is the report of the upgrade.
    is_trial: bool,
}

/// A descriptor for a firnd, and the label that says what it is.
#[derive(Clone, Copy)]
struct LabeledDescriptor<'a> {
    label: Label,
    descriptor: BorrowedFd<'a>,
}

impl<'a> LabeledDescriptor<'a> {
    fn of(kept: &'a KeptDescriptor) -> Self {
        Self {
            label: kept.label,
            descriptor: kept.descriptor.as_fd(),
        }
    }

    fn with(self, tag: Tag) -> Self {
        Self {
            label: tag.into(),
            ..self
        }
    }
}

/// Starts firnd and gives it the descriptors. Fails only if no process was started.
fn start_firnd(
    descriptors: Vec<LabeledDescriptor<'_>>,
    earlier: Option<EarlierFirnd>,
) -> io::Result<StartedFirnd> {
    let (ours, theirs) = Socket::pair()?;
    let find = |tag| descriptors.iter().find(|labeled| labeled.label.tag == tag);
    if let Some(request) = find(Tag::Request) {
        // All descriptors of the request share one position, and each firnd reads the request from its beginning.
        File::from(request.descriptor.try_clone_to_owned()?).rewind()?;
    }
    let program = find(Tag::Program).map_or_else(
        || "/proc/self/exe".to_owned(),
        |labeled| format!("/proc/self/fd/{}", labeled.descriptor.as_raw_fd()),
    );
    let mut firnd = Command::new(program);
    firnd.arg0("firnd").arg(KEPT).stdin(theirs.into_stdio());
    if let Some(earlier) = earlier {
        let report = find(Tag::UpgradeReport).filter(|_| earlier.is_trial);
        firnd.stdout(match report {
            Some(report) => report.descriptor.try_clone_to_owned()?.into(),
            None => Stdio::null(),
        });
    }
    if let Some(log) = find(Tag::Log) {
        firnd.stderr(log.descriptor.try_clone_to_owned()?);
    }
    let child = firnd.spawn()?;
    // The command holds firnd's end of the socket. If it stayed open, this process would wait for a dead firnd to read.
    drop(firnd);
    let child = Pid::from_child(&child);
    let started = StartedFirnd {
        socket: ours,
        firnd: pidfd_open(child, PidfdFlags::empty())?,
        child,
    };
    // The descriptors may not fit in the socket, so firnd reads while they are sent. If it has died, the caller sees
    // its end later.
    let _ = started.send_all(&descriptors, earlier);
    Ok(started)
}

/// Replaces the standard descriptors by /dev/null. Otherwise a process that waits for their end would wait for the
/// keeper.
fn forget_stdio() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    Ok(())
}
