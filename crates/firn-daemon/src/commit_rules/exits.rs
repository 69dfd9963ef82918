//! How the processes that write in scopes end.
//!
//! One thread waits for their pidfds. The kernel (6.15) tells how a process ended once its parent has waited for it; until
//! then, and on older kernels, /proc/PID/stat of the zombie does. If the process is gone before either
//! was read, its status is lost, and that counts as a failure.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_process::{ProcessEnd, end_of_process};
use firn_rules::Ending;
use parking_lot::Condvar;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// How often the end of a zombie is asked for.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// The flag of a process in /proc/PID/stat that it is exiting: PF_EXITING of the kernel.
const EXITING: u64 = 4;
/// After that its parent does not seem to wait for it, and /proc has the answer.
const REAP_WAIT: Duration = Duration::from_secs(1);

/// The processes that are waited for.
pub(super) struct Exits {
    watched: Mutex<Watched>,
    /// Ends were told.
    told: Condvar,
    wake: OwnedFd,
}

#[derive(Default)]
struct Watched {
    /// Pidfds; none of a process that was gone when it was looked for.
    processes: HashMap<u32, Option<OwnedFd>>,
    /// Those that have ended, and since when.
    ended: HashMap<u32, Instant>,
    /// Ends are being told.
    is_telling: bool,
    is_stopped: bool,
}

impl Exits {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            watched: Mutex::default(),
            told: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Waits for a process from now on. 0 is one that firnd does not see: it counts as alive while the mount is.
    pub(super) fn add(&self, process: u32) {
        let mut watched = self.watched.lock();
        if process == 0 || watched.processes.contains_key(&process) {
            return;
        }
        let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
        let pidfd = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        watched.processes.insert(process, pidfd);
        drop(watched);
        self.wake();
    }

    /// Whether a process has ended, and its end is not told yet.
    pub(super) fn has_untold_end(&self) -> bool {
        self.watched.lock().has_untold_end()
    }

    /// Whether a process that is waited for has ended badly, or is about to: it may take long to give its memory back.
    pub(super) fn has_failed(&self, process: u32) -> bool {
        let watched = self.watched.lock();
        match watched.processes.get(&process) {
            Some(Some(pidfd)) => {
                // A process that is reaped after this is known to its pidfd.
                let in_proc = ProcEnd::read(process);
                match (end_of_process(pidfd), in_proc) {
                    (Some(end), _) | (None, ProcEnd::Exiting(end)) => is_failure(end),
                    (None, ProcEnd::Running) => false,
                    (None, ProcEnd::Gone) => true,
                }
            }
            Some(None) => true,
            None => false,
        }
    }

    /// Waits until each end is told that has come.
    pub(super) fn wait_until_told(&self) {
        let mut watched = self.watched.lock();
        while !watched.is_stopped && watched.has_untold_end() {
            watched.wait(&self.told);
        }
    }

    pub(super) fn stop(&self) {
        self.watched.lock().is_stopped = true;
        self.told.notify_all();
        self.wake();
    }

    pub(super) fn wake(&self) {
        // Where the counter is full, the thread wakes anyway.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Waits until it is stopped, tells of each end, and calls `after_wake` each time it was woken.
    pub(super) fn watch(&self, tell: &dyn Fn(u32, Ending), after_wake: &dyn Fn()) {
        loop {
            let ends = {
                let mut watched = self.watched.lock();
                if watched.is_stopped {
                    return;
                }
                let ends = watched.take_ends();
                watched.is_telling = !ends.is_empty();
                ends
            };
            for (process, ending) in ends {
                tell(process, ending);
            }
            self.watched.lock().is_telling = false;
            self.told.notify_all();
            after_wake();
            self.wait();
        }
    }

    fn wait(&self) {
        let (pidfds, asks_again): (Vec<OwnedFd>, bool) = {
            let watched = self.watched.lock();
            let running = watched
                .processes
                .iter()
                .filter(|(process, _)| !watched.ended.contains_key(process));
            let pidfds = running.filter_map(|(_, pidfd)| pidfd.as_ref()?.try_clone().ok());
            let is_lost = watched.processes.values().any(Option::is_none);
            (pidfds.collect(), is_lost || !watched.ended.is_empty())
        };
        let mut fds: Vec<PollFd<'_>> = pidfds
            .iter()
            .map(|pidfd| PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN))
            .collect();
        fds.push(PollFd::from_borrowed_fd(self.wake.as_fd(), PollFlags::IN));
        let timeout = asks_again.then_some(Timespec {
            tv_sec: 0,
            tv_nsec: ASK_AGAIN.as_nanos() as i64,
        });
        // A signal only makes it look once more.
        let _ = poll(&mut fds, timeout.as_ref());
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
    }
}

impl Watched {
    fn has_untold_end(&self) -> bool {
        let mut pidfds = self.processes.values().flatten();
        self.is_telling || pidfds.any(has_ended)
    }

    fn take_ends(&mut self) -> Vec<(u32, Ending)> {
        let mut ends = Vec::new();
        let Self {
            processes, ended, ..
        } = self;
        processes.retain(|process, pidfd| {
            let end = match pidfd {
                None => Some(WriterEnd::StatusLost),
                Some(pidfd) => end_of(*process, pidfd, ended),
            };
            let Some(end) = end else { return true };
            ended.remove(process);
            let ending = match end {
                WriterEnd::Known(end) if !is_failure(end) => Ending::Success,
                _ => Ending::Failure,
            };
            ends.push((*process, ending));
            false
        });
        ends
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let now = Timespec::default();
    poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
}

/// How a process that is waited for ended.
enum WriterEnd {
    Known(ProcessEnd),
    /// The process was reaped before its status was read.
    StatusLost,
}

/// How a process ended; `None`: the process lives, or its status is not known yet.
fn end_of(process: u32, pidfd: &OwnedFd, ended: &mut HashMap<u32, Instant>) -> Option<WriterEnd> {
    if !has_ended(pidfd) {
        return None;
    }
    if let Some(end) = end_of_process(pidfd) {
        return Some(WriterEnd::Known(end));
    }
    let since = ended.entry(process).or_insert_with(Instant::now);
    let is_late = since.elapsed() > REAP_WAIT;
    match ProcEnd::read(process) {
        // Older kernels tell no status by the pidfd: after a while that of the zombie counts.
        // A failure is final, and counts at once: a program that is started again must not see what the failed one left.
        ProcEnd::Exiting(end) if is_late || is_failure(end) => Some(WriterEnd::Known(end)),
        ProcEnd::Exiting(_) => None,
        // The number is that of another process by now, or of none.
        ProcEnd::Running | ProcEnd::Gone => is_late.then_some(WriterEnd::StatusLost),
    }
}

fn is_failure(end: ProcessEnd) -> bool {
    end != ProcessEnd::Exited(0)
}

/// What /proc/PID/stat says of the end of a process.
enum ProcEnd {
    /// There is no such process.
    Gone,
    Running,
    /// The process is a zombie, or gives back its memory and files.
    Exiting(ProcessEnd),
}

impl ProcEnd {
    fn read(process: u32) -> Self {
        let Ok(text) = std::fs::read_to_string(format!("/proc/{process}/stat")) else {
            return Self::Gone;
        };
        // The name of the program is in parentheses, and may have some itself.
        let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
        let mut fields = fields.split_ascii_whitespace();
        let flags = fields.nth(6).and_then(|flags| flags.parse::<u64>().ok());
        let status = fields.next_back().and_then(|status| status.parse().ok());
        match (flags, status) {
            // The first thread may have exited before the others were stopped. A signal that stops kills no process.
            (Some(_), Some(libc::SIGSTOP..=libc::SIGTTOU)) => Self::Running,
            (Some(flags), Some(status)) if flags & EXITING != 0 => {
                Self::Exiting(ProcessEnd::of_wait_status(status))
            }
            _ => Self::Running,
        }
    }
}
