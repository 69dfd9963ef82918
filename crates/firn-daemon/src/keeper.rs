//! The keeper: a small process that keeps what a mount needs beyond the death of its firnd, and starts another one.
//!
//! ```text
//!  firn mount ──starts──► firn-keeper ──starts──► firnd
//!                             │  ▲  socket: descriptors, "serving", "ending"
//!                             │  └──────────────────┘
//!                             └ /dev/fuse, control of the connection, the request
//! ```
//!
//! Promises
//! * It has no thread beside the first, asks no backing, and reads nothing but its socket: there is nothing that could end it
//!   but a signal. firnd starts another keeper then, and gives it the same descriptors.
//! * firnd is started again only once the kernel says that all of it has ended: its locks and its arena are free.
//! * Where no firnd comes to serve, the connection is aborted: programs get what they get from a mount whose firnd died
//!   without a keeper.
//!
//! A firnd that dies without the word *ending* is started again: at once if it had served, and after a while that doubles
//! if it died before it served or right after. Five such deaths in a minute end the mount.
//!
//! An upgrade is the death of a firnd that has given another program first. That program is tried once: where it does not
//! come to serve, for whatever reason, the one that served last is started as if nothing had been.

mod link;
mod message;
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
pub(crate) use message::uptime;
use message::{Kept, Label, LastUpgrade, Message, Socket, Tag};
use watchdog::{Due, Watchdog};

/// The name under which the binary is a keeper.
pub const KEEPER_NAME: &str = "firn-keeper";
/// The argument that says that another keeper had this place, and that its firnd is at the other end of stdin.
pub(crate) const REPLACES: &str = "replaces";
/// The argument that says that the process which starts the keeper ends the mount.
pub(crate) const ENDS_WITH_PARENT: &str = "ends-with-parent";
/// The argument of a firnd that has a keeper at the other end of its stdin.
pub(crate) const KEPT: &str = "kept";

/// A firnd that served for so long was taken over well: what ended it is no fault of the takeover.
const SERVED_WELL: Duration = Duration::from_millis(250);
/// Before the second try in a row; it doubles with each further one.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(5);
/// Deaths of a firnd that did not come to serve well …
const FAILURES_MAX: usize = 5;
/// … in this time.
const FAILURES_WITHIN: Duration = Duration::from_secs(60);
/// The program of an upgrade that does not serve by then is killed: programs wait meanwhile.
const TRIAL_MAX: Duration = Duration::from_secs(60);

/// What the keeper has of a mount.
struct Keeper {
    kept: Vec<Kept>,
    socket: Socket,
    /// Of the firnd that is there now.
    firnd: OwnedFd,
    /// Its process number, where it is a child of this process.
    child: Option<Pid>,
    state: State,
    failures: Vec<Instant>,
    /// Failures since a firnd last served well.
    failures_in_a_row: u32,
    upgrade: LastUpgrade,
    /// Of the firnd that serves, if it is watched.
    watchdog: Option<Watchdog>,
}

/// How far a firnd is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// It does not serve yet.
    Starts { is_first: bool },
    /// It is the first one of an upgrade, and does not serve yet. It is killed at this time.
    IsTried { until: Instant },
    /// Programs see the mount, since then.
    Serves(Instant),
    /// It ends the mount, or cannot go on with it.
    Ends,
}

/// What to do about a firnd that ended.
enum Next {
    /// Nothing is left to keep.
    End,
    /// Start another one.
    Start,
    /// Give the mount up.
    GiveUp,
}

/// The main function of the keeper.
pub fn keeper_main() -> ExitCode {
    let _ = rustix::thread::set_name(c"firn-keeper");
    let _ = rustix::process::setsid();
    // Files without a name may be many.
    let _ = firn_backing::raise_descriptor_limit();
    // They are for firnd, which drains and ends; the keeper goes with it.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        // A handler and not SIG_IGN, which firnd would inherit.
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
    /// Begins a mount: stdin is the request, stdout the pipe to `firn mount`.
    fn begin(ends_with_parent: bool) -> io::Result<Self> {
        let request = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        let mut kept = vec![Kept {
            label: Tag::Request.into(),
            descriptor: request,
        }];
        if ends_with_parent && let Some(parent) = getppid() {
            kept.push(Kept {
                label: Tag::Caller.into(),
                descriptor: pidfd_open(parent, PidfdFlags::empty())?,
            });
        }
        let gifts = kept.iter().map(Gift::of).collect();
        let started = start_firnd(gifts, None)?;
        // With the pipe open here `firn mount` would not see that firnd ended.
        forget_stdio()?;
        Ok(Self {
            kept,
            socket: started.socket,
            firnd: started.firnd,
            child: Some(started.child),
            state: State::Starts { is_first: true },
            failures: Vec::new(),
            failures_in_a_row: 0,
            upgrade: LastUpgrade::None,
            watchdog: None,
        })
    }

    /// Takes the place of a keeper that died: stdin is a socket to the firnd that started this process.
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
            state: State::Serves(Instant::now()),
            failures: Vec::new(),
            failures_in_a_row: 0,
            upgrade: LastUpgrade::None,
            watchdog: None,
        })
    }

    fn run(mut self) {
        loop {
            self.wait_for_the_end();
            match self.judge_end() {
                Next::End => return,
                Next::GiveUp => return self.give_up(),
                Next::Start => {}
            }
            let died = uptime();
            std::thread::sleep(self.delay());
            self.start_next(died);
        }
    }

    /// Starts another firnd. Where that fails it is as if it had ended at once.
    fn start_next(&mut self, died: Duration) {
        let is_tried = self.has(Tag::NextProgram);
        self.state = if is_tried {
            let until = Instant::now() + TRIAL_MAX;
            State::IsTried { until }
        } else {
            State::Starts { is_first: false }
        };
        let again = Again {
            died,
            upgrade: if is_tried {
                LastUpgrade::Done
            } else {
                self.upgrade
            },
            is_tried,
        };
        if let Ok(started) = start_firnd(self.choose_gifts(is_tried), Some(again)) {
            self.socket = started.socket;
            self.firnd = started.firnd;
            self.child = Some(started.child);
            self.watchdog = None;
        }
    }

    /// What the next firnd gets. One that is tried gets what the upgrade gave in place of what served before.
    fn choose_gifts(&self, is_tried: bool) -> Vec<Gift<'_>> {
        let choose = |kept| {
            let gift = Gift::of(kept);
            match gift.label.tag {
                Tag::Request | Tag::Program if is_tried => None,
                Tag::NextRequest => is_tried.then_some(gift.with(Tag::Request)),
                Tag::NextProgram => is_tried.then_some(gift.with(Tag::Program)),
                _ => Some(gift),
            }
        };
        self.kept.iter().filter_map(choose).collect()
    }

    /// Takes what firnd says, until all of it has ended.
    fn wait_for_the_end(&mut self) {
        let mut talks = true;
        loop {
            let readable = PollFlags::IN;
            let mut both = [
                PollFd::new(&self.firnd, readable),
                PollFd::new(&self.socket, readable),
            ];
            let count = if talks { 2 } else { 1 };
            let _ = poll(&mut both[..count], self.time_left().as_ref());
            let has_ended = !both[0].revents().is_empty();
            // What it said before it ended counts.
            while talks && self.socket.has_message() {
                match self.socket.receive() {
                    Ok(Some(message)) => self.take(message),
                    Ok(None) | Err(_) => talks = false,
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

    fn take(&mut self, message: Message) {
        match message {
            Message::Keep(given) => self.keep(given),
            Message::Drop(label) => self.kept.retain(|kept| kept.label != label),
            Message::Serving => {
                if matches!(self.state, State::IsTried { .. }) {
                    self.settle_upgrade(LastUpgrade::Done);
                }
                self.state = State::Serves(Instant::now());
            }
            // What a program that is tried cannot go on with, the one before it can.
            Message::Ending if matches!(self.state, State::IsTried { .. }) => {}
            Message::Ending => self.state = State::Ends,
            Message::Watch(limit) => self.watchdog = Watchdog::begin(limit, Instant::now()),
            Message::Pong => {
                if let Some(watchdog) = &mut self.watchdog {
                    watchdog.note_answer(Instant::now());
                }
            }
            Message::Begin { .. } | Message::Ping => {}
        }
    }

    /// Keeps what the upgrade gave in place of what served before, or drops it.
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
                self.keep(Kept { label, descriptor });
            }
        }
    }

    /// Keeps a descriptor in place of the one that has its label.
    fn keep(&mut self, given: Kept) {
        self.kept.retain(|kept| kept.label != given.label);
        self.kept.push(given);
    }

    /// Until firnd is to be asked, or is late.
    fn time_left(&self) -> Option<Timespec> {
        let now = Instant::now();
        let left = match (self.state, &self.watchdog) {
            (State::IsTried { until }, _) => until.saturating_duration_since(now),
            (State::Serves(_), Some(watchdog)) => match watchdog.judge(now) {
                Due::Wait(left) => left,
                Due::Ask | Due::Late => Duration::ZERO,
            },
            _ => return None,
        };
        Timespec::try_from(left).ok()
    }

    /// Asks a firnd that is watched, and kills one that is late.
    fn end_late_firnd(&mut self) {
        let now = Instant::now();
        let is_late = match (self.state, &mut self.watchdog) {
            (State::IsTried { until }, _) => until <= now,
            (State::Serves(_), Some(watchdog)) => match watchdog.judge(now) {
                Due::Wait(_) => false,
                Due::Ask => {
                    self.socket.ping();
                    watchdog.note_question(now);
                    false
                }
                Due::Late => {
                    // It is killed once more if it has not ended by then: a call that hangs may hold it.
                    watchdog.note_answer(now);
                    true
                }
            },
            _ => false,
        };
        if is_late {
            self.say_in_log("firn-keeper: firnd does not answer, and is killed\n");
            let _ = pidfd_send_signal(&self.firnd, Signal::KILL);
        }
    }

    fn say_in_log(&self, line: &str) {
        if let Some(log) = self.kept.iter().find(|kept| kept.label.tag == Tag::Log) {
            let _ = rustix::io::write(&log.descriptor, line.as_bytes());
        }
    }

    fn judge_end(&mut self) -> Next {
        match self.state {
            State::Starts { is_first: true } => return Next::End,
            State::IsTried { .. } => {
                self.settle_upgrade(LastUpgrade::Refused);
                return Next::Start;
            }
            State::Ends => return Next::GiveUp,
            State::Serves(since) if since.elapsed() >= SERVED_WELL => {
                self.failures_in_a_row = 0;
                self.failures.clear();
            }
            State::Serves(_) | State::Starts { is_first: false } => self.note_failure(),
        }
        if !self.has(Tag::CanBeTakenOver) || self.failures.len() >= FAILURES_MAX {
            return Next::GiveUp;
        }
        Next::Start
    }

    fn note_failure(&mut self) {
        let now = Instant::now();
        self.failures
            .retain(|failure| now.duration_since(*failure) < FAILURES_WITHIN);
        self.failures.push(now);
        self.failures_in_a_row += 1;
    }

    fn delay(&self) -> Duration {
        match self.failures_in_a_row {
            0 => Duration::ZERO,
            failures => DELAY_MAX.min(FIRST_DELAY * 2u32.saturating_pow(failures.min(16) - 1)),
        }
    }

    fn has(&self, tag: Tag) -> bool {
        self.kept.iter().any(|kept| kept.label.tag == tag)
    }

    /// Programs are told that no firnd serves the mount any more. A mount that ended has nothing to abort.
    fn give_up(&self) {
        let control = self.kept.iter().find(|kept| kept.label.tag == Tag::Control);
        if let Some(control) = control {
            let _ = rustix::io::write(&control.descriptor, b"1");
        }
    }
}

/// A firnd that was started.
struct Started {
    socket: Socket,
    firnd: OwnedFd,
    child: Pid,
}

impl Started {
    fn give(&self, gifts: &[Gift<'_>], again: Option<Again>) -> io::Result<()> {
        for gift in gifts {
            self.socket.send(gift.label, gift.descriptor)?;
        }
        self.socket.begin(
            again.map(|again| again.died),
            again.map_or(LastUpgrade::None, |again| again.upgrade),
        )
    }
}

/// What a firnd that is not the first one is told.
#[derive(Clone, Copy)]
struct Again {
    /// When the end of the one before it was seen, since the host started.
    died: Duration,
    upgrade: LastUpgrade,
    /// It is the first one of an upgrade: its standard output is the report.
    is_tried: bool,
}

/// A descriptor that a firnd gets, and what it is to that firnd.
#[derive(Clone, Copy)]
struct Gift<'a> {
    label: Label,
    descriptor: BorrowedFd<'a>,
}

impl<'a> Gift<'a> {
    fn of(kept: &'a Kept) -> Self {
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

/// Starts firnd and gives it what is kept.
fn start_firnd(gifts: Vec<Gift<'_>>, again: Option<Again>) -> io::Result<Started> {
    let (ours, theirs) = Socket::pair()?;
    let find = |tag| gifts.iter().find(|gift| gift.label.tag == tag);
    if let Some(request) = find(Tag::Request) {
        // Each firnd reads it from its beginning, and the position is one for all of its descriptors.
        File::from(request.descriptor.try_clone_to_owned()?).rewind()?;
    }
    let program = find(Tag::Program).map_or_else(
        || "/proc/self/exe".to_owned(),
        |gift| format!("/proc/self/fd/{}", gift.descriptor.as_raw_fd()),
    );
    let mut firnd = Command::new(program);
    firnd.arg0("firnd").arg(KEPT).stdin(theirs.into_stdio());
    if let Some(again) = again {
        let report = find(Tag::UpgradeReport).filter(|_| again.is_tried);
        firnd.stdout(match report {
            Some(report) => report.descriptor.try_clone_to_owned()?.into(),
            None => Stdio::null(),
        });
    }
    if let Some(log) = find(Tag::Log) {
        firnd.stderr(log.descriptor.try_clone_to_owned()?);
    }
    let child = firnd.spawn()?;
    // Its end of the socket: a firnd that dies early must not leave this process waiting for room.
    drop(firnd);
    let child = Pid::from_child(&child);
    let started = Started {
        socket: ours,
        firnd: pidfd_open(child, PidfdFlags::empty())?,
        child,
    };
    // More than a socket holds may be kept, so firnd reads meanwhile. Where it has died, its end is found below.
    let _ = started.give(&gifts, again);
    Ok(started)
}

/// A process that waits for the end of these descriptors does not wait for the keeper.
fn forget_stdio() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    Ok(())
}
