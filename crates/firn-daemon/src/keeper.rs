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

mod link;
mod message;

use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, WaitOptions, getppid, pidfd_open, waitpid};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

pub(crate) use link::{KeeperLink, ResumedMount, Summons};
pub(crate) use message::uptime;
use message::{Kept, Message, Socket, Tag};

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
}

/// How far a firnd is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// It does not serve yet.
    Starts { is_first: bool },
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
        let started = start_firnd(&kept, None)?;
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
            match start_firnd(&self.kept, Some(died)) {
                Ok(started) => {
                    self.socket = started.socket;
                    self.firnd = started.firnd;
                    self.child = Some(started.child);
                    self.state = State::Starts { is_first: false };
                }
                Err(_) => self.note_failure(),
            }
        }
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
            let _ = poll(&mut both[..count], None::<&Timespec>);
            let has_ended = !both[0].revents().is_empty();
            // What it said before it ended counts.
            while talks && self.socket.has_message() {
                match self.socket.receive() {
                    Ok(Some(message)) => self.take(message),
                    Ok(None) | Err(_) => talks = false,
                }
            }
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
            Message::Keep(given) => {
                self.kept.retain(|kept| kept.label != given.label);
                self.kept.push(given);
            }
            Message::Drop(label) => self.kept.retain(|kept| kept.label != label),
            Message::Serving => self.state = State::Serves(Instant::now()),
            Message::Ending => self.state = State::Ends,
            Message::Begin { .. } => {}
        }
    }

    fn judge_end(&mut self) -> Next {
        match self.state {
            State::Starts { is_first: true } => return Next::End,
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
    fn give(&self, kept: &[Kept], died: Option<Duration>) -> io::Result<()> {
        for kept in kept {
            self.socket.send(kept.label, &kept.descriptor)?;
        }
        self.socket.begin(died)
    }
}

/// Starts firnd and gives it what is kept. `died`: when the end of the one before it was seen, since the host started.
fn start_firnd(kept: &[Kept], died: Option<Duration>) -> io::Result<Started> {
    let (ours, theirs) = Socket::pair()?;
    let find = |tag| kept.iter().find(|kept| kept.label.tag == tag);
    if let Some(request) = find(Tag::Request) {
        // Each firnd reads it from its beginning, and the position is one for all of its descriptors.
        File::from(request.descriptor.try_clone()?).rewind()?;
    }
    let mut firnd = Command::new("/proc/self/exe");
    firnd.arg0("firnd").arg(KEPT).stdin(theirs.into_stdio());
    if died.is_some() {
        firnd.stdout(Stdio::null());
    }
    if let Some(log) = find(Tag::Log) {
        firnd.stderr(log.descriptor.try_clone()?);
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
    let _ = started.give(kept, died);
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
