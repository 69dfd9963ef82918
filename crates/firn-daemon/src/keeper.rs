//! The keeper: a small process that holds copies of the descriptors of a mount, and starts another firnd when one dies.
//! firnd is the process that serves the mount.
//!
//! ```text
//!  firn mount ──starts──► firn-keeper ──starts──► firnd
//!                             │  ▲  socket: descriptors, "serving", "ending"
//!                             │  └──────────────────┘
//!                             └ /dev/fuse, control of the connection, the request
//! ```
//!
//! Promises
//! * The keeper has one thread, makes no call that may wait for the backing directory, and reads only its socket. So
//!   only a signal can end it. firnd then starts another keeper and gives it the same descriptors.
//! * firnd is started again only after the kernel reports its complete end: its locks and its arena are free.
//! * If no firnd can serve the mount, the keeper aborts the FUSE connection. Programs then get the same errors as
//!   without a keeper.
//!
//! Restarts: if a firnd dies without the message *ending*, another one is started. If the dead one had served for a
//! while, that happens at once. If it died before or just after it began to serve, a pause comes first, which doubles
//! each time. Five such deaths in a minute end the mount.
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

pub(crate) use link::{KeeperHandover, KeeperLink, NextFirnd, ResumedMount};
use message::{KeptDescriptor, Message, Socket, UpgradeResult};
pub(crate) use message::{Label, Tag, uptime};
use watchdog::{Watchdog, WatchdogAction};

/// The name (argument 0) under which the binary is a keeper.
pub const KEEPER_NAME: &str = "firn-keeper";
/// The argument of a keeper that replaces a dead one. Its stdin is a socket to the firnd that started it.
pub(crate) const REPLACES: &str = "replaces";
/// The argument of a keeper if the process that starts it also ends the mount.
pub(crate) const ENDS_WITH_PARENT: &str = "ends-with-parent";
/// The argument of a firnd that has a socket to its keeper as stdin.
pub(crate) const KEPT: &str = "kept";

/// The death of a firnd that has served for at least this time is not counted as a failure to take the mount over.
const STABLE_SERVICE_MIN: Duration = Duration::from_millis(250);
/// Pause before the start of another firnd after the first failure; each further pause is twice as long.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(5);
/// Number of failures within [`FAILURES_WITHIN`] after which the mount is given up.
const FAILURES_MAX: usize = 5;
/// Time within which [`FAILURES_MAX`] failures count together.
const FAILURES_WITHIN: Duration = Duration::from_secs(60);
/// Timeout for the first firnd of an upgrade to serve. Programs of the mount wait meanwhile.
const UPGRADE_TIMEOUT: Duration = Duration::from_secs(60);

/// The state of a keeper.
struct Keeper {
    /// Copies of the mount's descriptors, which each next firnd gets.
    kept: Vec<KeptDescriptor>,
    socket: Socket,
    /// Pidfd of the current firnd.
    firnd: OwnedFd,
    /// Process number of that firnd, if it is a child of this process.
    child: Option<Pid>,
    state: FirndState,
    /// Times of the failures within [`FAILURES_WITHIN`].
    recent_failures: Vec<Instant>,
    /// Number of failures since a firnd last served for [`STABLE_SERVICE_MIN`].
    consecutive_failures: u32,
    last_upgrade: UpgradeResult,
    /// The watchdog of the firnd that serves, if there is one.
    watchdog: Option<Watchdog>,
}

/// State of the current firnd.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FirndState {
    /// The firnd does not serve yet.
    Starting { is_first: bool },
    /// The firnd is the first one of an upgrade and does not serve yet. It is killed at `deadline`.
    Upgrading { deadline: Instant },
    /// The firnd has served since this time.
    Serving(Instant),
    /// The firnd ends the mount, or cannot take it over.
    Ending,
}

/// What the keeper does after the end of a firnd.
enum NextStep {
    /// Exit, because the mount was never made.
    Exit,
    /// Start another firnd.
    StartFirnd,
    /// Abort the connection of the mount and exit.
    AbortMount,
}

/// The main function of the keeper, the process that starts the next firnd when one dies. firnd serves the mount.
/// Returns after the end of the mount.
pub fn keeper_main() -> ExitCode {
    // Both calls may fail without harm: they set a name for ps, and keep signals of the terminal away.
    let _ = rustix::thread::set_name(c"firn-keeper");
    let _ = rustix::process::setsid();
    // The limit is raised because the keeper may hold many open files without a name.
    let _ = firn_backing::raise_descriptor_limit();
    // These signals are meant for firnd, which drains and ends. The keeper ends after it.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // SIG_IGN would be inherited by firnd; a handler is not.
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    let argument = std::env::args_os().nth(1).unwrap_or_default();
    let started = if argument == REPLACES {
        Keeper::replace_dead_keeper()
    } else {
        Keeper::start_mount(argument == ENDS_WITH_PARENT)
    };
    match started {
        Ok(keeper) => {
            // Otherwise this process would keep the file system of its directory from being unmounted.
            let _ = std::env::set_current_dir("/");
            keeper.run();
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("firn: cannot start firn-keeper, which restarts firnd if it dies: {error}");
            ExitCode::FAILURE
        }
    }
}

impl Keeper {
    /// Makes the keeper of a new mount and starts its first firnd, the process that serves the mount. stdin is the
    /// request, a file, and stdout is the pipe to `firn mount`.
    ///
    /// With `ends_with_parent` the keeper also holds a pidfd of its parent ([`Tag::Caller`]). firnd leaves signals to
    /// that process, which ends the mount.
    fn start_mount(ends_with_parent: bool) -> io::Result<Self> {
        let request = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        // The descriptors that the keeper holds for each next firnd.
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
        let descriptors = kept.iter().map(LabeledDescriptor::from_kept).collect();
        let earlier_firnd = None;
        let started = start_firnd(descriptors, earlier_firnd)?;
        // `firn mount` sees the end of firnd by the end of the pipe, so the pipe must not stay open in this process.
        replace_stdio_by_null()?;
        Ok(Self {
            kept,
            socket: started.socket,
            firnd: started.firnd,
            child: Some(started.child),
            state: FirndState::Starting { is_first: true },
            recent_failures: Vec::new(),
            consecutive_failures: 0,
            last_upgrade: UpgradeResult::None,
            watchdog: None,
        })
    }

    /// Makes a keeper in the place of one that was killed. stdin is a socket to firnd, the process that serves the
    /// mount and started this one. firnd sends all descriptors of the mount; a pidfd of firnd itself comes last.
    fn replace_dead_keeper() -> io::Result<Self> {
        let socket = Socket::new(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
        replace_stdio_by_null()?;
        let mut kept = Vec::new();
        let firnd = loop {
            match socket.receive()? {
                None => return Err(io::ErrorKind::UnexpectedEof.into()),
                Some(Message::Keep(received)) if received.label.tag == Tag::Firnd => {
                    break received.descriptor;
                }
                Some(Message::Keep(received)) => kept.push(received),
                Some(_) => {}
            }
        };
        Ok(Self {
            kept,
            socket,
            firnd,
            child: None,
            state: FirndState::Serving(Instant::now()),
            recent_failures: Vec::new(),
            consecutive_failures: 0,
            last_upgrade: UpgradeResult::None,
            watchdog: None,
        })
    }

    /// Waits for each end of firnd and acts on it, until the mount has ended or is given up.
    fn run(mut self) {
        loop {
            self.wait_for_firnd_end();
            match self.choose_next_step() {
                NextStep::Exit => return,
                NextStep::AbortMount => return self.abort_mount(),
                NextStep::StartFirnd => {}
            }
            let death_time = uptime();
            std::thread::sleep(self.restart_delay());
            self.start_next_firnd(death_time);
        }
    }

    /// Starts another firnd, which serves the mount from now on. `death_time` is when the last one died, as time since
    /// the boot. If the mount has a program of an upgrade, that program is started, and must serve before a deadline.
    ///
    /// After a failed start, the fields still describe the old firnd. So the next round sees its end again and counts a
    /// failure.
    fn start_next_firnd(&mut self, death_time: Duration) {
        let is_upgrade = self.has_descriptor(Tag::NextProgram);
        self.state = if is_upgrade {
            let deadline = Instant::now() + UPGRADE_TIMEOUT;
            FirndState::Upgrading { deadline }
        } else {
            FirndState::Starting { is_first: false }
        };
        let earlier = EarlierFirnd {
            death_time,
            last_upgrade: if is_upgrade {
                UpgradeResult::Done
            } else {
                self.last_upgrade
            },
            is_upgrade,
        };
        if let Ok(started) = start_firnd(self.choose_descriptors(is_upgrade), Some(earlier)) {
            self.socket = started.socket;
            self.firnd = started.firnd;
            self.child = Some(started.child);
            self.watchdog = None;
        }
    }

    /// Returns the descriptors for the next firnd. The first firnd of an upgrade gets the request and program of the
    /// upgrade instead of the old ones.
    fn choose_descriptors(&self, is_upgrade: bool) -> Vec<LabeledDescriptor<'_>> {
        let mut chosen = Vec::new();
        for kept in &self.kept {
            let labeled = LabeledDescriptor::from_kept(kept);
            match (labeled.label.tag, is_upgrade) {
                (Tag::Request | Tag::Program, true) => {}
                (Tag::NextRequest, true) => chosen.push(labeled.with_tag(Tag::Request)),
                (Tag::NextProgram, true) => chosen.push(labeled.with_tag(Tag::Program)),
                (Tag::NextRequest | Tag::NextProgram, false) => {}
                _ => chosen.push(labeled),
            }
        }
        chosen
    }

    /// Handles the messages of firnd until its process has ended, and removes its zombie. Meanwhile pings firnd, and
    /// kills it if it does not answer (the watchdog).
    fn wait_for_firnd_end(&mut self) {
        let mut is_connected = true;
        loop {
            let mut poll_fds = vec![PollFd::new(&self.firnd, PollFlags::IN)];
            if is_connected {
                poll_fds.push(PollFd::new(&self.socket, PollFlags::IN));
            }
            // An error, such as that of a signal, only causes one more round.
            let _ = poll(&mut poll_fds, self.time_until_check().as_ref());
            let has_ended = !poll_fds[0].revents().is_empty();
            // Messages that firnd sent before its end still count.
            while is_connected && self.socket.has_message() {
                match self.socket.receive() {
                    Ok(Some(message)) => self.handle(message),
                    Ok(None) | Err(_) => is_connected = false,
                }
            }
            self.ping_or_kill_firnd();
            if has_ended {
                if let Some(child) = self.child.take() {
                    let reap = || waitpid(Some(child), WaitOptions::empty());
                    // This removes the zombie; how firnd ended does not matter.
                    let _ = rustix::io::retry_on_intr(reap);
                }
                return;
            }
        }
    }

    /// Handles one message of firnd, the process that serves the mount.
    fn handle(&mut self, message: Message) {
        match message {
            Message::Keep(received) => self.keep_descriptor(received),
            Message::Drop(label) => self.kept.retain(|kept| kept.label != label),
            Message::Serving => {
                if matches!(self.state, FirndState::Upgrading { .. }) {
                    self.finish_upgrade(UpgradeResult::Done);
                }
                self.state = FirndState::Serving(Instant::now());
            }
            // The new program of an upgrade cannot continue the mount. The old program can, so the mount does not end.
            Message::Ending if matches!(self.state, FirndState::Upgrading { .. }) => {}
            Message::Ending => self.state = FirndState::Ending,
            Message::Watch(limit) => self.watchdog = Watchdog::start(limit, Instant::now()),
            Message::Pong => {
                if let Some(watchdog) = &mut self.watchdog {
                    watchdog.record_answer(Instant::now());
                }
            }
            // Only a keeper sends these.
            Message::Begin { .. } | Message::Ping => {}
        }
    }

    /// Ends an upgrade with this result. If it succeeded, its program and its mount request are used for each next
    /// firnd; otherwise both are dropped.
    fn finish_upgrade(&mut self, result: UpgradeResult) {
        self.last_upgrade = result;
        for (next_tag, current_tag) in [
            (Tag::NextProgram, Tag::Program),
            (Tag::NextRequest, Tag::Request),
        ] {
            let Some(descriptor) = self.take_descriptor(next_tag) else {
                continue;
            };
            if result == UpgradeResult::Done {
                let label = current_tag.into();
                self.keep_descriptor(KeptDescriptor { label, descriptor });
            }
        }
    }

    /// Removes the descriptor with this tag from the kept ones, and returns it.
    fn take_descriptor(&mut self, tag: Tag) -> Option<OwnedFd> {
        let index = self.kept.iter().position(|kept| kept.label.tag == tag)?;
        Some(self.kept.remove(index).descriptor)
    }

    /// Keeps a descriptor, and drops the one with the same label.
    fn keep_descriptor(&mut self, received: KeptDescriptor) {
        self.kept.retain(|kept| kept.label != received.label);
        self.kept.push(received);
    }

    /// Returns the time until firnd is to be pinged or killed; `None` if neither may become due.
    fn time_until_check(&self) -> Option<Timespec> {
        let now = Instant::now();
        let time_left = match (self.state, &self.watchdog) {
            (FirndState::Upgrading { deadline }, _) => deadline.saturating_duration_since(now),
            (FirndState::Serving(_), Some(watchdog)) => match watchdog.next_action(now) {
                WatchdogAction::Wait(time_left) => time_left,
                WatchdogAction::Ping | WatchdogAction::Kill => Duration::ZERO,
            },
            _ => return None,
        };
        Timespec::try_from(time_left).ok()
    }

    /// Pings firnd if a ping is due. Kills firnd if it has not answered in time, or if the program of an upgrade has
    /// not begun to serve in time.
    fn ping_or_kill_firnd(&mut self) {
        let now = Instant::now();
        let must_kill = match (self.state, &mut self.watchdog) {
            (FirndState::Upgrading { deadline }, _) => deadline <= now,
            (FirndState::Serving(_), Some(watchdog)) => match watchdog.next_action(now) {
                WatchdogAction::Wait(_) => false,
                WatchdogAction::Ping => {
                    self.socket.send_ping();
                    watchdog.record_ping(now);
                    false
                }
                WatchdogAction::Kill => {
                    // A firnd that a hanging system call keeps alive gets the signal once more after the same time.
                    watchdog.restart(now);
                    true
                }
            },
            _ => false,
        };
        if must_kill {
            self.write_to_log("firn-keeper: firnd does not answer, and is killed\n");
            // The call fails only if the process has ended, which the caller sees by the pidfd.
            let _ = pidfd_send_signal(&self.firnd, Signal::KILL);
        }
    }

    fn write_to_log(&self, line: &str) {
        if let Some(log) = self.kept.iter().find(|kept| kept.label.tag == Tag::Log) {
            let _ = rustix::io::write(&log.descriptor, line.as_bytes());
        }
    }

    /// Returns what the keeper does after the end of a firnd, the process that serves the mount. Records a failure to
    /// continue the mount, or the result of an upgrade.
    fn choose_next_step(&mut self) -> NextStep {
        match self.state {
            // The mount was never made; `firn mount` reports why.
            FirndState::Starting { is_first: true } => return NextStep::Exit,
            FirndState::Upgrading { .. } => {
                self.finish_upgrade(UpgradeResult::Refused);
                return NextStep::StartFirnd;
            }
            FirndState::Ending => return NextStep::AbortMount,
            FirndState::Serving(since) if since.elapsed() >= STABLE_SERVICE_MIN => {
                self.consecutive_failures = 0;
                self.recent_failures.clear();
            }
            FirndState::Serving(_) | FirndState::Starting { is_first: false } => {
                self.record_failure()
            }
        }
        if !self.has_descriptor(Tag::CanBeTakenOver) || self.recent_failures.len() >= FAILURES_MAX {
            return NextStep::AbortMount;
        }
        NextStep::StartFirnd
    }

    /// Records that a firnd died before, or just after, it began to serve.
    fn record_failure(&mut self) {
        let now = Instant::now();
        self.recent_failures
            .retain(|failure| now.duration_since(*failure) < FAILURES_WITHIN);
        self.recent_failures.push(now);
        self.consecutive_failures += 1;
    }

    /// Returns the pause before the next start: none without a failure, then [`FIRST_DELAY`], doubled each time.
    fn restart_delay(&self) -> Duration {
        /// The limit keeps the power in range; the delay reaches [`DELAY_MAX`] long before.
        const DOUBLINGS_MAX: u32 = 15;
        let Some(doublings) = self.consecutive_failures.checked_sub(1) else {
            return Duration::ZERO;
        };
        DELAY_MAX.min(FIRST_DELAY * 2u32.saturating_pow(doublings.min(DOUBLINGS_MAX)))
    }

    fn has_descriptor(&self, tag: Tag) -> bool {
        self.kept.iter().any(|kept| kept.label.tag == tag)
    }

    /// Aborts the connection, so that calls of programs fail. If the mount has ended, there is nothing to abort.
    fn abort_mount(&self) {
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
    /// Sends the descriptors to firnd, and then the message that all were sent, with what it must know of the firnd
    /// before it.
    fn send_all(
        &self,
        descriptors: &[LabeledDescriptor<'_>],
        earlier: Option<EarlierFirnd>,
    ) -> io::Result<()> {
        for labeled in descriptors {
            self.socket
                .send_descriptor(labeled.label, labeled.descriptor)?;
        }
        self.socket.send_begin(
            earlier.map(|earlier| earlier.death_time),
            earlier.map_or(UpgradeResult::None, |earlier| earlier.last_upgrade),
        )
    }
}

/// What a firnd that is not the first one of its mount must know.
#[derive(Clone, Copy)]
struct EarlierFirnd {
    /// When the keeper saw the end of the earlier firnd, as time since the boot.
    death_time: Duration,
    /// Result of the last upgrade of the mount.
    last_upgrade: UpgradeResult,
    /// The next firnd is the first one of an upgrade, so its standard output is the report of the upgrade.
    is_upgrade: bool,
}

/// A descriptor for a firnd, and the label that says what it is.
#[derive(Clone, Copy)]
struct LabeledDescriptor<'a> {
    label: Label,
    descriptor: BorrowedFd<'a>,
}

impl<'a> LabeledDescriptor<'a> {
    fn from_kept(kept: &'a KeptDescriptor) -> Self {
        Self {
            label: kept.label,
            descriptor: kept.descriptor.as_fd(),
        }
    }

    fn with_tag(self, tag: Tag) -> Self {
        Self {
            label: tag.into(),
            ..self
        }
    }
}

/// Starts firnd, the process that serves the mount, with a socket as stdin, by which it gets the descriptors. `earlier`
/// describes the firnd that died; `None` for the first firnd of the mount. An error of the start is returned; a failure
/// to send the descriptors is not.
fn start_firnd(
    descriptors: Vec<LabeledDescriptor<'_>>,
    earlier: Option<EarlierFirnd>,
) -> io::Result<StartedFirnd> {
    let (keeper_socket, firnd_socket) = Socket::pair()?;
    if let Some(request) = find_descriptor(&descriptors, Tag::Request) {
        // All descriptors of the request share one position, and each firnd reads the request from its beginning.
        File::from(request.try_clone_to_owned()?).rewind()?;
    }
    let mut command = firnd_command(&descriptors, earlier, firnd_socket)?;
    let pid = Pid::from_child(&command.spawn()?);
    // The command holds firnd's end of the socket. If it stayed open, a send to a dead firnd would block for ever.
    drop(command);
    let started = StartedFirnd {
        socket: keeper_socket,
        firnd: pidfd_open(pid, PidfdFlags::empty())?,
        child: pid,
    };
    // The descriptors may not fit in the socket, so firnd reads while they are sent. If it has died, the caller sees
    // its end later.
    let _ = started.send_all(&descriptors, earlier);
    Ok(started)
}

/// Returns the first descriptor with this tag.
fn find_descriptor<'a>(descriptors: &[LabeledDescriptor<'a>], tag: Tag) -> Option<BorrowedFd<'a>> {
    let labeled = descriptors
        .iter()
        .find(|labeled| labeled.label.tag == tag)?;
    Some(labeled.descriptor)
}

/// Returns the command that starts firnd, with its program, socket, standard output and log taken from `descriptors`.
fn firnd_command(
    descriptors: &[LabeledDescriptor<'_>],
    earlier: Option<EarlierFirnd>,
    firnd_socket: Socket,
) -> io::Result<Command> {
    let program = match find_descriptor(descriptors, Tag::Program) {
        Some(program) => format!("/proc/self/fd/{}", program.as_raw_fd()),
        None => "/proc/self/exe".to_owned(),
    };
    let mut command = Command::new(program);
    command
        .arg0("firnd")
        .arg(KEPT)
        .stdin(firnd_socket.into_stdio());
    // The first firnd of a mount inherits the pipe to `firn mount` as stdout.
    if let Some(earlier) = earlier {
        let upgrade_report =
            find_descriptor(descriptors, Tag::UpgradeReport).filter(|_| earlier.is_upgrade);
        command.stdout(match upgrade_report {
            Some(report) => report.try_clone_to_owned()?.into(),
            None => Stdio::null(),
        });
    }
    if let Some(log) = find_descriptor(descriptors, Tag::Log) {
        command.stderr(log.try_clone_to_owned()?);
    }
    Ok(command)
}

/// Replaces the standard descriptors by /dev/null. Otherwise a process that waits for their end would wait for the
/// keeper.
fn replace_stdio_by_null() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    Ok(())
}
