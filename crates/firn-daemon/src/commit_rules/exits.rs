//! Watches the processes that write in scopes (names of checkpoints with an open transaction), and reports how each of
//! them ended.
//!
//! One thread waits for the pidfds of these processes. Linux 6.15 and later report the exit status by the pidfd
//! after the parent has waited for the process. Before that, and on older kernels, /proc/PID/stat of the zombie has it.
//!
//! Race: if the process is gone before either was read, its exit status is lost. A lost status counts as a failure.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use firn_backing::lock::Mutex;
use firn_process::{ProcessEnd, end_of_process, has_memory};
use firn_rules::Ending;
use parking_lot::Condvar;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Pause between two attempts to read the status of a zombie.
const STATUS_RETRY_EVERY: Duration = Duration::from_millis(10);
/// Position of the flags in /proc/PID/stat, counted from the first field after the name of the program.
const FLAGS_AFTER_NAME: usize = 6;
/// The flag PF_EXITING in /proc/PID/stat: the process is exiting.
const PF_EXITING: u64 = 4;
/// After this time the parent does not seem to wait for the zombie, and the status in /proc counts.
const REAP_TIMEOUT: Duration = Duration::from_secs(1);

/// The processes that are watched.
pub(super) struct ExitWatcher {
    watched: Mutex<WatchTable>,
    /// Signals that the ends found by one round were reported.
    all_reported: Condvar,
    wake: OwnedFd,
}

/// The table of watched processes.
#[derive(Default)]
struct WatchTable {
    /// The pidfd of each process; `None` if the process was gone before its pidfd was opened.
    processes: HashMap<u32, Option<OwnedFd>>,
    /// Processes that have ended without a known exit status so far, and when the end was first seen.
    zombies: HashMap<u32, Instant>,
    /// Ends that were taken from the table are being reported now.
    is_reporting: bool,
    is_stopped: bool,
}

impl ExitWatcher {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            watched: Mutex::default(),
            all_reported: Condvar::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    /// Watches a process from now on. Process 0 is in a PID namespace that firnd cannot see; it counts as alive while
    /// the mount exists.
    pub(super) fn add(&self, process: u32) {
        let mut watched = self.watched.lock();
        if process == 0 || watched.processes.contains_key(&process) {
            return;
        }
        let pidfd = match i32::try_from(process).ok().and_then(Pid::from_raw) {
            Some(pid) => pidfd_open(pid, PidfdFlags::empty()).ok(),
            None => None,
        };
        watched.processes.insert(process, pidfd);
        drop(watched);
        self.wake();
    }

    /// Returns whether a process has ended and its end is not reported yet.
    pub(super) fn has_unreported_exit(&self) -> bool {
        self.watched.lock().has_unreported_exit()
    }

    /// Returns whether a watched process (one that writes files of a checkpoint) has failed or is exiting with a
    /// failure. A large process may take long to exit, because its memory is freed first. A lost exit status counts as
    /// a failure; a process that is not watched has not failed.
    pub(super) fn has_failed(&self, process: u32) -> bool {
        let watched = self.watched.lock();
        let pidfd = match watched.processes.get(&process) {
            Some(Some(pidfd)) => pidfd,
            // The process was gone before its pidfd was opened, so its status is lost.
            Some(None) => return true,
            None => return false,
        };
        // The pidfd is read after /proc: a process that is reaped between both reads has its status in the pidfd.
        let proc_state = ProcState::read(process);
        match (end_of_process(pidfd), proc_state) {
            (Some(end), _) | (None, ProcState::Exiting(end)) => is_failure(end),
            (None, ProcState::Running) => false,
            (None, ProcState::Gone) => true,
        }
    }

    /// Waits until each end that has happened is reported.
    pub(super) fn wait_until_reported(&self) {
        let mut watched = self.watched.lock();
        while !watched.is_stopped && watched.has_unreported_exit() {
            watched.wait(&self.all_reported);
        }
    }

    /// Stops the thread and releases the threads that wait for reports.
    pub(super) fn stop(&self) {
        self.watched.lock().is_stopped = true;
        self.all_reported.notify_all();
        self.wake();
    }

    /// Wakes the thread, which then examines all processes again.
    pub(super) fn wake(&self) {
        // If the counter of the eventfd is full, the thread wakes anyway.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    /// Runs until [`ExitWatcher::stop`]: calls `report` for each watched process that has ended, with how it ended, and
    /// `after_wake` after each round. No lock is held during these calls. This is the main function of the thread.
    pub(super) fn watch(&self, report: &dyn Fn(u32, Ending), after_wake: &dyn Fn()) {
        loop {
            let mut watched = self.watched.lock();
            if watched.is_stopped {
                return;
            }
            let exits = watched.take_known_exits();
            watched.is_reporting = !exits.is_empty();
            // `report` may call the backing, and other threads add processes meanwhile.
            drop(watched);
            for WriterExit { process, ending } in exits {
                report(process, ending);
            }
            // Threads that wait for all reports continue.
            self.watched.lock().is_reporting = false;
            self.all_reported.notify_all();
            after_wake();
            self.wait();
        }
    }

    /// Waits until a watched process ends, the thread is woken, or the exit status of a zombie is to be read again. The
    /// lock of the table is not held meanwhile.
    fn wait(&self) {
        let watched = self.watched.lock();
        let pidfds = watched.copy_pidfds_of_running();
        let must_read_again = watched.has_unread_status();
        // Other threads add processes while this one waits.
        drop(watched);
        let mut fds: Vec<PollFd<'_>> = pidfds
            .iter()
            .map(|pidfd| PollFd::new(pidfd, PollFlags::IN))
            .collect();
        fds.push(PollFd::new(&self.wake, PollFlags::IN));
        let timeout = must_read_again.then_some(Timespec {
            tv_sec: 0,
            tv_nsec: STATUS_RETRY_EVERY.as_nanos() as i64,
        });
        // A signal only causes one more round.
        let _ = poll(&mut fds, timeout.as_ref());
        // The read sets the counter of the eventfd to 0, so that the next wake is noticed.
        let _ = rustix::io::read(&self.wake, &mut [0_u8; 8]);
    }
}

impl WatchTable {
    fn has_unreported_exit(&self) -> bool {
        let mut pidfds = self.processes.values().flatten();
        self.is_reporting || pidfds.any(has_ended)
    }

    /// Returns copies of the pidfds of processes that had not ended in the last round.
    fn copy_pidfds_of_running(&self) -> Vec<OwnedFd> {
        let mut pidfds = Vec::new();
        for (process, pidfd) in &self.processes {
            if let Some(pidfd) = pidfd
                && !self.zombies.contains_key(process)
            {
                pidfds.extend(pidfd.try_clone().ok());
            }
        }
        pidfds
    }

    /// Returns whether the status of a process that has ended is still to be read.
    fn has_unread_status(&self) -> bool {
        let has_process_without_pidfd = self.processes.values().any(Option::is_none);
        has_process_without_pidfd || !self.zombies.is_empty()
    }

    /// Removes the processes with a known end from the table, and returns how each ended. A lost exit status counts as
    /// a failure. A process stays while its status may still become known.
    fn take_known_exits(&mut self) -> Vec<WriterExit> {
        let mut exits = Vec::new();
        let Self {
            processes, zombies, ..
        } = self;
        processes.retain(|process, pidfd| {
            let end = match pidfd {
                None => Some(WriterEnd::StatusLost),
                Some(pidfd) => find_writer_end(*process, pidfd, zombies),
            };
            let ending = match end {
                None => return true,
                Some(WriterEnd::Known(end)) if !is_failure(end) => Ending::Success,
                Some(WriterEnd::Known(_) | WriterEnd::StatusLost) => Ending::Failure,
            };
            zombies.remove(process);
            exits.push(WriterExit {
                process: *process,
                ending,
            });
            false
        });
        exits
    }
}

/// Returns whether the process of a pidfd has ended; the call does not wait.
fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let no_wait = Timespec::default();
    poll(&mut fds, Some(&no_wait)).is_ok_and(|ready| ready > 0)
}

/// The end of a watched process, as it is reported.
struct WriterExit {
    process: u32,
    ending: Ending,
}

/// How a watched process ended.
enum WriterEnd {
    Known(ProcessEnd),
    /// The process was reaped before its status was read.
    StatusLost,
}

/// Returns how a process ended; `None` if it is running, or if its status may still become known. `zombies` has the
/// time at which each end was first seen, and gets that of this process.
fn find_writer_end(
    process: u32,
    pidfd: &OwnedFd,
    zombies: &mut HashMap<u32, Instant>,
) -> Option<WriterEnd> {
    if !has_ended(pidfd) {
        return None;
    }
    if let Some(end) = end_of_process(pidfd) {
        return Some(WriterEnd::Known(end));
    }
    let first_seen = zombies.entry(process).or_insert_with(Instant::now);
    let is_late = first_seen.elapsed() > REAP_TIMEOUT;
    match ProcState::read(process) {
        // Older kernels report no status by the pidfd, so after [`REAP_TIMEOUT`] the status of the zombie counts.
        // A failure is final and counts at once: a program that is started again must not see the files of the failed
        // one.
        ProcState::Exiting(end) if is_late || is_failure(end) => Some(WriterEnd::Known(end)),
        ProcState::Exiting(_) => None,
        // The process was reaped; its number is unused or belongs to another process by now.
        ProcState::Running | ProcState::Gone => is_late.then_some(WriterEnd::StatusLost),
    }
}

fn is_failure(end: ProcessEnd) -> bool {
    end != ProcessEnd::Exited(0)
}

/// The state of a process in /proc/PID/stat.
enum ProcState {
    /// There is no such process.
    Gone,
    Running,
    /// The process is a zombie, or releases its memory and files.
    Exiting(ProcessEnd),
}

impl ProcState {
    /// Reads from /proc whether a process is running, exiting or gone. Does not wait for an exec of the process, which
    /// may itself wait for a close that the caller answers.
    fn read(process: u32) -> Self {
        if has_memory(process) == Some(true) {
            return Self::Running;
        }
        let Ok(text) = std::fs::read_to_string(format!("/proc/{process}/stat")) else {
            return Self::Gone;
        };
        // The name of the program is in parentheses and may contain parentheses itself.
        let after_name = text
            .rsplit_once(')')
            .map_or("", |(_, after_name)| after_name);
        let mut fields = after_name.split_ascii_whitespace();
        let flags = fields
            .nth(FLAGS_AFTER_NAME)
            .and_then(|flags| flags.parse::<u64>().ok());
        // The exit status is the last field.
        let status = fields.next_back().and_then(|status| status.parse().ok());
        match (flags, status) {
            // The first thread may exit before the others are stopped. A stop signal as status does not mean that the
            // process was killed.
            (Some(_), Some(libc::SIGSTOP..=libc::SIGTTOU)) => Self::Running,
            (Some(flags), Some(status)) if flags & PF_EXITING != 0 => {
                Self::Exiting(ProcessEnd::from_wait_status(status))
            }
            _ => Self::Running,
        }
    }
}
