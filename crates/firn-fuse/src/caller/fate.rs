//! What the kernel is about to do with a thread that waits for an answer and got a signal.

use std::path::Path;

/// What becomes of a thread once it has its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It dies of a signal.
    Dies,
    /// It is stopped, frozen or traced, or runs a handler for a signal that asks it to end.
    Stops,
    /// It goes on; a handler may run.
    GoesOn,
}

/// Signals that ask a program to end or to stop, whether it handles them or not.
const ENDING: u64 = bit(libc::SIGHUP)
    | bit(libc::SIGINT)
    | bit(libc::SIGQUIT)
    | bit(libc::SIGTERM)
    | bit(libc::SIGSTOP)
    | bit(libc::SIGTSTP)
    | bit(libc::SIGTTIN)
    | bit(libc::SIGTTOU);
/// Signals that do nothing to a program that does not handle them.
const IGNORED_BY_DEFAULT: u64 =
    bit(libc::SIGCHLD) | bit(libc::SIGCONT) | bit(libc::SIGURG) | bit(libc::SIGWINCH);

const CGROUPS: &str = "/sys/fs/cgroup";

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// The fate of a thread. One that cannot be seen (0, or of a PID namespace beside firnd's) dies: that its caller can be
/// killed counts more than that another signal ends a call early.
pub(crate) fn fate(thread: u32) -> Fate {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    let Some(status) = status.ok().as_deref().and_then(Status::parse) else {
        return Fate::Dies;
    };
    status.fate().unwrap_or_else(|| {
        // No signal: the kernel wants something else of the thread, or another thread took the signal.
        if status.tracer != 0 || is_stopping(status.process) || is_frozen(thread) {
            Fate::Stops
        } else {
            Fate::GoesOn
        }
    })
}

/// What /proc/PID/status tells of signals (proc(5)).
#[derive(Default)]
struct Status {
    process: u32,
    tracer: u32,
    /// Pending and not blocked.
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

    /// The fate that pending signals mean; `None` without any.
    fn fate(&self) -> Option<Fate> {
        if self.pending == 0 {
            return None;
        }
        // The kernel turns each signal that kills into a SIGKILL of every thread, but for those that dump core.
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

/// Whether threads of a process are stopped: those that are not yet will be.
fn is_stopping(process: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return false;
    };
    threads.flatten().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The name, in parentheses, may have any character.
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        state.is_some_and(|state| state.starts_with(['T', 't']))
    })
}

/// Whether a control group of the thread is frozen; also where that cannot be told.
fn is_frozen(thread: u32) -> bool {
    let groups = std::fs::read_to_string(format!("/proc/{thread}/cgroup"));
    groups.map_or(true, |groups| {
        is_one_frozen(&groups, Path::new(CGROUPS)).unwrap_or(true)
    })
}

/// `groups`: the lines of cgroups(7), `number:controllers:path`. `None` where no group is found.
fn is_one_frozen(groups: &str, root: &Path) -> Option<bool> {
    let mut is_known = false;
    for line in groups.lines() {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let path = path.trim_start_matches('/');
        if controllers.split(',').any(|name| name == "freezer") {
            let state = root.join("freezer").join(path).join("freezer.state");
            if let Ok(state) = std::fs::read_to_string(state) {
                is_known = true;
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
                is_known = true;
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
    is_known.then_some(false)
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
        // A shell that waits for its child, under a debugger.
        assert_eq!(fate(libc::SIGCHLD, 0), Some(Fate::GoesOn));
        // Blocked signals do nothing yet.
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
        assert_eq!(is_one_frozen("0::/job/step\n", root.path()), Some(false));
        set("job/cgroup.freeze", "1\n");
        assert_eq!(is_one_frozen("0::/job/step\n", root.path()), Some(true));
        // A group that another namespace shows.
        assert_eq!(is_one_frozen("0::/../other\n", root.path()), None);
        std::fs::create_dir_all(root.path().join("freezer/job")).unwrap();
        set("freezer/job/freezer.state", "THAWED\n");
        let groups = "5:freezer:/job\n1:cpu,cpuacct:/job\n";
        assert_eq!(is_one_frozen(groups, root.path()), Some(false));
        set("freezer/job/freezer.state", "FREEZING\n");
        assert_eq!(is_one_frozen(groups, root.path()), Some(true));
    }

    #[test]
    fn this_thread_goes_on_and_one_that_is_not_there_dies() {
        assert_eq!(fate(std::process::id()), Fate::GoesOn);
        assert_eq!(fate(0), Fate::Dies);
    }
}
