//! Predicts what the kernel will do with a thread that got a signal while the thread waits for an answer.
//!
//! The kernel reports that a signal came, but not which one. So [`fate`] reads the thread's pending signals, and its
//! handlers, from /proc.

use std::path::Path;

use firn_process::read_status;

/// What the kernel will do with a thread once it has its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// A signal kills the thread.
    Dies,
    /// The thread is stopped, frozen or traced, or it runs a handler for a signal that asks a program to end.
    Stops,
    /// The thread resumes its program, perhaps after a handler has run.
    GoesOn,
}

/// Signals that ask a program to end or to stop, whether or not it has a handler.
const ENDING: u64 = bit(libc::SIGHUP)
    | bit(libc::SIGINT)
    | bit(libc::SIGQUIT)
    | bit(libc::SIGTERM)
    | bit(libc::SIGSTOP)
    | bit(libc::SIGTSTP)
    | bit(libc::SIGTTIN)
    | bit(libc::SIGTTOU);
/// Signals that are ignored by a program without a handler for them.
const IGNORED_BY_DEFAULT: u64 =
    bit(libc::SIGCHLD) | bit(libc::SIGCONT) | bit(libc::SIGURG) | bit(libc::SIGWINCH);

/// Usual mount point of the control groups.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Bit of a signal in a set of signals.
const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Returns the fate of a thread.
///
/// A thread that firnd cannot see (number 0, or in another PID namespace) counts as one that dies. A caller that cannot
/// be killed would be worse than a call that another signal ends early.
pub(crate) fn fate(thread: u32) -> Fate {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    let Some(status) = status.ok().as_deref().and_then(Status::parse) else {
        return Fate::Dies;
    };
    status.fate().unwrap_or_else(|| {
        // No signal is pending: the kernel stops or freezes the thread, or another thread took the signal.
        if status.tracer != 0 || is_stopping(status.process) || is_frozen(thread) {
            Fate::Stops
        } else {
            Fate::GoesOn
        }
    })
}

/// Signals of a thread, as /proc/PID/status shows them (proc(5)).
#[derive(Default)]
struct Status {
    process: u32,
    tracer: u32,
    /// Signals that are pending and not blocked.
    pending: u64,
    ignored: u64,
    caught: u64,
}

impl Status {
    fn parse(text: &str) -> Option<Self> {
        let value = |field: &str| {
            let mut lines = text.lines();
            lines.find_map(|line| Some(line.strip_prefix(field)?.strip_prefix(':')?.trim()))
        };
        let number = |field| value(field)?.parse().ok();
        let signals = |field| u64::from_str_radix(value(field)?, 16).ok();
        Some(Self {
            process: number("Tgid")?,
            tracer: number("TracerPid")?,
            pending: (signals("SigPnd")? | signals("ShdPnd")?) & !signals("SigBlk")?,
            ignored: signals("SigIgn")?,
            caught: signals("SigCgt")?,
        })
    }

    /// Returns the fate that follows from pending signals; `None` if none is pending.
    fn fate(&self) -> Option<Fate> {
        if self.pending == 0 {
            return None;
        }
        // The kernel shows a deadly signal as a pending SIGKILL of every thread, except a signal that also dumps core.
        let kills = self.pending & !self.caught & !self.ignored & !IGNORED_BY_DEFAULT & !ENDING;
        let dumps = self.pending & !self.caught & !self.ignored & bit(libc::SIGQUIT);
        if self.pending & bit(libc::SIGKILL) != 0 || kills | dumps != 0 {
            Some(Fate::Dies)
        } else if self.pending & ENDING != 0 {
            Some(Fate::Stops)
        } else {
            Some(Fate::GoesOn)
        }
    }
}

/// Whether a thread of a process is stopped: then its other threads will stop too. Reads the file `status`, because a
/// read of `stat` waits for the end of an exec (see [`firn_process::has_memory`]).
fn is_stopping(process: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return false;
    };
    threads.flatten().any(|thread| {
        let thread = thread.file_name().to_str().and_then(|id| id.parse().ok());
        let state = thread.and_then(|thread| read_status(thread, "State"));
        state.is_some_and(|state| state.starts_with(['T', 't']))
    })
}

/// Whether a control group of the thread is frozen. Also true if that cannot be read.
fn is_frozen(thread: u32) -> bool {
    let groups = std::fs::read_to_string(format!("/proc/{thread}/cgroup"));
    groups.map_or(true, |groups| {
        is_any_group_frozen(&groups, Path::new(CGROUPS)).unwrap_or(true)
    })
}

/// Whether one of the groups is frozen. `groups`: lines `number:controllers:path` (cgroups(7)). `None` if no group is
/// found below `root`.
fn is_any_group_frozen(groups: &str, root: &Path) -> Option<bool> {
    let mut is_group_found = false;
    for line in groups.lines() {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        if controllers.split(',').any(|name| name == "freezer") {
            let state = root.join("freezer").join(path).join("freezer.state");
            if let Ok(state) = std::fs::read_to_string(state) {
                is_group_found = true;
                if state.trim() != "THAWED" {
                    return Some(true);
                }
            }
        } else if controllers.is_empty() {
            for root in [root.to_owned(), root.join("unified")] {
                let group = root.join(path);
                if !group.join("cgroup.procs").exists() {
                    continue;
                }
                is_group_found = true;
                let is_set = |group: &Path| {
                    std::fs::read(group.join("cgroup.freeze"))
                        .is_ok_and(|text| text.starts_with(b"1"))
                };
                let mut above = group
                    .ancestors()
                    .take_while(|group| group.starts_with(&root));
                if above.any(is_set) {
                    return Some(true);
                }
            }
        }
    }
    is_group_found.then_some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pending: u64, blocked: u64, ignored: u64, caught: u64) -> Status {
        let text = format!(
            "Name:\tx\nTgid:\t7\nTracerPid:\t0\nSigPnd:\t{pending:016x}\nShdPnd:\t0000000000000000\n\
             SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        );
        Status::parse(&text).unwrap()
    }

    #[test]
    fn a_thread_dies_of_what_kills_stops_for_what_stops_or_ends_and_goes_on_with_its_handlers() {
        let fate = |signal, caught| status(bit(signal), 0, 0, caught).fate();
        assert_eq!(fate(libc::SIGKILL, 0), Some(Fate::Dies));
        assert_eq!(fate(libc::SIGSEGV, 0), Some(Fate::Dies));
        assert_eq!(fate(libc::SIGQUIT, 0), Some(Fate::Dies));
        assert_eq!(fate(libc::SIGINT, bit(libc::SIGINT)), Some(Fate::Stops));
        assert_eq!(fate(libc::SIGSTOP, 0), Some(Fate::Stops));
        assert_eq!(fate(libc::SIGTSTP, 0), Some(Fate::Stops));
        for signal in [libc::SIGALRM, libc::SIGCHLD, libc::SIGUSR1, libc::SIGPROF] {
            assert_eq!(fate(signal, bit(signal)), Some(Fate::GoesOn));
        }
        // The status of a shell that waits for its child under a debugger.
        assert_eq!(fate(libc::SIGCHLD, 0), Some(Fate::GoesOn));
        // A blocked signal does nothing yet.
        assert_eq!(
            status(bit(libc::SIGTERM), bit(libc::SIGTERM), 0, 0).fate(),
            None
        );
        assert_eq!(status(0, 0, 0, 0).fate(), None);
    }

    #[test]
    fn a_frozen_group_above_freezes_a_thread() {
        let root = tempfile::tempdir().unwrap();
        let leaf = root.path().join("job/step");
        std::fs::create_dir_all(&leaf).unwrap();
        let set = |path: &str, text: &str| std::fs::write(root.path().join(path), text).unwrap();
        set("job/step/cgroup.procs", "");
        set("job/step/cgroup.freeze", "0\n");
        set("job/cgroup.freeze", "0\n");
        assert_eq!(
            is_any_group_frozen("0::/job/step\n", root.path()),
            Some(false)
        );
        set("job/cgroup.freeze", "1\n");
        assert_eq!(
            is_any_group_frozen("0::/job/step\n", root.path()),
            Some(true)
        );
        // The path of a group outside this namespace.
        assert_eq!(is_any_group_frozen("0::/../other\n", root.path()), None);
        std::fs::create_dir_all(root.path().join("freezer/job")).unwrap();
        set("freezer/job/freezer.state", "THAWED\n");
        let groups = "5:freezer:/job\n1:cpu,cpuacct:/job\n";
        assert_eq!(is_any_group_frozen(groups, root.path()), Some(false));
        set("freezer/job/freezer.state", "FREEZING\n");
        assert_eq!(is_any_group_frozen(groups, root.path()), Some(true));
    }

    #[test]
    fn this_thread_goes_on_and_one_that_is_not_there_dies() {
        assert_eq!(fate(std::process::id()), Fate::GoesOn);
        assert_eq!(fate(0), Fate::Dies);
    }
}
