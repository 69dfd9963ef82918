//! Predicts what the kernel will do with a thread that got a signal while it waits for the answer to a FUSE request.
//!
//! The kernel reports to firnd (the process that serves the mount) that a signal came, but not which one. So
//! [`signal_effect`] reads the thread's pending signals, and its handlers, from /proc.

use std::path::Path;

use firn_process::read_status;

/// What the kernel will do with a thread once it has its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignalEffect {
    /// A signal kills the thread.
    Dies,
    /// The thread is stopped, frozen or traced, or it runs a handler for a signal that asks a program to end.
    Stops,
    /// The thread resumes its program, perhaps after a handler has run.
    Continues,
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

/// Returns what the kernel will do with a thread that got a signal.
///
/// A thread that firnd cannot see (number 0, or in another PID namespace) counts as one that dies. A caller that cannot
/// be killed would be worse than a call that another signal ends early.
pub(crate) fn signal_effect(thread: u32) -> SignalEffect {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{thread}/status")) else {
        return SignalEffect::Dies;
    };
    let Some(status) = Status::parse(&text) else {
        return SignalEffect::Dies;
    };
    if let Some(effect) = status.effect_of_pending() {
        return effect;
    }
    // No signal is pending: the kernel stops or freezes the thread, or another thread took the signal.
    if status.tracer != 0 || is_stopping(status.process) || is_frozen(thread) {
        SignalEffect::Stops
    } else {
        SignalEffect::Continues
    }
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

    /// Returns the effect of the pending signals; `None` if none is pending.
    fn effect_of_pending(&self) -> Option<SignalEffect> {
        if self.pending == 0 {
            return None;
        }
        // The kernel shows a deadly signal as a pending SIGKILL of every thread, except a signal that also dumps core.
        let kills = self.pending & !self.caught & !self.ignored & !IGNORED_BY_DEFAULT & !ENDING;
        let dumps = self.pending & !self.caught & !self.ignored & bit(libc::SIGQUIT);
        if self.pending & bit(libc::SIGKILL) != 0 || kills | dumps != 0 {
            Some(SignalEffect::Dies)
        } else if self.pending & ENDING != 0 {
            Some(SignalEffect::Stops)
        } else {
            Some(SignalEffect::Continues)
        }
    }
}

/// Whether a thread of a process is stopped: then its other threads will stop too. Reads the file `status`, because a
/// read of `stat` waits for the end of an exec (see [`firn_process::has_memory`]).
fn is_stopping(process: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{process}/task")) else {
        return false;
    };
    for entry in threads.flatten() {
        let thread = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let state = thread.and_then(|thread| read_status(thread, "State"));
        if state.is_some_and(|state| state.starts_with(['T', 't'])) {
            return true;
        }
    }
    false
}

/// Whether a control group of the thread is frozen. Also true if that cannot be read.
fn is_frozen(thread: u32) -> bool {
    let Ok(groups) = std::fs::read_to_string(format!("/proc/{thread}/cgroup")) else {
        return true;
    };
    is_any_group_frozen(&groups, Path::new(CGROUPS)).unwrap_or(true)
}

/// Whether one of a thread's control groups is frozen. `groups` has a line `number:controllers:path` for each group
/// (cgroups(7)). Returns `None` if no group is found below `root`.
fn is_any_group_frozen(groups: &str, root: &Path) -> Option<bool> {
    let mut is_group_found = false;
    for line in groups.lines() {
        let (_number, controllers_and_path) = line.split_once(':')?;
        let (controllers, path) = controllers_and_path.split_once(':')?;
        let path = path.trim_start_matches('/');
        let is_frozen = if controllers.split(',').any(|name| name == "freezer") {
            is_version_1_frozen(&root.join("freezer").join(path))
        } else if controllers.is_empty() {
            is_version_2_frozen(root, path)
        } else {
            None
        };
        match is_frozen {
            Some(true) => return Some(true),
            Some(false) => is_group_found = true,
            None => {}
        }
    }
    is_group_found.then_some(false)
}

/// Whether a group of the freezer, a controller of version 1, is frozen. Returns `None` if there is no such group.
fn is_version_1_frozen(group: &Path) -> Option<bool> {
    let state = std::fs::read_to_string(group.join("freezer.state")).ok()?;
    Some(state.trim() != "THAWED")
}

/// Whether a group of version 2, or a group above it, is frozen. Returns `None` if there is no such group.
fn is_version_2_frozen(root: &Path, path: &str) -> Option<bool> {
    let mut is_group_found = false;
    // The groups are below `unified` if those of version 1 are mounted too.
    for hierarchy in [root.to_owned(), root.join("unified")] {
        let group = hierarchy.join(path);
        if !group.join("cgroup.procs").exists() {
            continue;
        }
        is_group_found = true;
        for ancestor in group.ancestors() {
            if !ancestor.starts_with(&hierarchy) {
                break;
            }
            let setting = std::fs::read(ancestor.join("cgroup.freeze"));
            if setting.is_ok_and(|text| text.starts_with(b"1")) {
                return Some(true);
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
        let effect = |signal, caught| status(bit(signal), 0, 0, caught).effect_of_pending();
        assert_eq!(effect(libc::SIGKILL, 0), Some(SignalEffect::Dies));
        assert_eq!(effect(libc::SIGSEGV, 0), Some(SignalEffect::Dies));
        assert_eq!(effect(libc::SIGQUIT, 0), Some(SignalEffect::Dies));
        assert_eq!(
            effect(libc::SIGINT, bit(libc::SIGINT)),
            Some(SignalEffect::Stops)
        );
        assert_eq!(effect(libc::SIGSTOP, 0), Some(SignalEffect::Stops));
        assert_eq!(effect(libc::SIGTSTP, 0), Some(SignalEffect::Stops));
        for signal in [libc::SIGALRM, libc::SIGCHLD, libc::SIGUSR1, libc::SIGPROF] {
            assert_eq!(effect(signal, bit(signal)), Some(SignalEffect::Continues));
        }
        // The status of a shell that waits for its child under a debugger.
        assert_eq!(effect(libc::SIGCHLD, 0), Some(SignalEffect::Continues));
        // A blocked signal does nothing yet.
        assert_eq!(
            status(bit(libc::SIGTERM), bit(libc::SIGTERM), 0, 0).effect_of_pending(),
            None
        );
        assert_eq!(status(0, 0, 0, 0).effect_of_pending(), None);
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
        assert_eq!(signal_effect(std::process::id()), SignalEffect::Continues);
        assert_eq!(signal_effect(0), SignalEffect::Dies);
    }
}
