//! Supervisor of a benchmark: runs the benchmark in a child process, and removes what it leaves behind however it ends.
//!
//! The child records in a list everything that it is about to set up ([`firn_testfs::cleanup`]). The supervisor only
//! waits. After the child has ended, or was killed because of a signal, the supervisor ends all remaining processes and
//! removes everything that is still in the list.
//!
//! Promises
//! * No mount, process, directory or network of the benchmark is left after its end, a panic, SIGINT, SIGTERM, SIGHUP, or
//!   the death of the child.
//! * Every process that the benchmark started is found, also a daemon, because the supervisor is the subreaper of its
//!   descendants (PR_SET_CHILD_SUBREAPER).
//! * Nothing is removed while one of these processes lives, so none of them can set up something again.

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use firn_testfs::cleanup;
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, getpid, kill_process, pidfd_open,
    pidfd_send_signal, set_child_subreaper, set_parent_process_death_signal, wait,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Environment variable with the path of the list. The supervisor sets it for the child.
const LIST_VARIABLE: &str = "FIRN_BENCH_LEFTOVERS";
/// Environment variable with the path of the firn program to measure.
pub const FIRN_VARIABLE: &str = "FIRN_BENCH_PROGRAM";
/// Maximum time for the end of killed processes.
const END_MAX: Duration = Duration::from_secs(20);

/// Returns whether this process is the child of a supervisor. If so, the process dies with its supervisor, and records
/// in the list what it sets up from now on.
pub fn is_supervised() -> anyhow::Result<bool> {
    let Some(list) = std::env::var_os(LIST_VARIABLE) else {
        return Ok(false);
    };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    cleanup::keep_list(Path::new(&list))?;
    Ok(true)
}

/// Runs this program again as a child with the same arguments, and removes what the child leaves behind. Returns the
/// exit code for this process.
///
/// `firn` is the firn program to measure, unless an argument names one.
pub fn supervise(firn: Option<&Path>) -> anyhow::Result<ExitCode> {
    // Handle signals before anything exists that a signal could leave behind, such as the list.
    let signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    set_child_subreaper(Some(getpid()))?;
    let list = tempfile::NamedTempFile::new().context("cannot make a temporary file")?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let mut command = Command::new(program);
    command
        .args(std::env::args_os().skip(1))
        .env(LIST_VARIABLE, list.path());
    if let Some(firn) = firn {
        command.env(FIRN_VARIABLE, firn);
    }
    let child = command.spawn().context("cannot start the benchmark")?;
    let child = Pid::from_child(&child);
    let received = Arc::new(AtomicI32::new(0));
    // Clean up even if the child cannot be watched, because it runs.
    let ended = kill_at_signal(child, signals, &received).and_then(|()| wait_for(child));
    end_children();
    cleanup::remove_listed(list.path())?;
    Ok(exit_code(ended?, received.load(Ordering::Relaxed)))
}

/// Starts a thread that kills `child` at the first signal, and stores the number of the signal in `received`.
fn kill_at_signal(
    child: Pid,
    mut signals: Signals,
    received: &Arc<AtomicI32>,
) -> anyhow::Result<()> {
    let handle = pidfd_open(child, PidfdFlags::empty())?;
    let received = Arc::clone(received);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            for signal in signals.forever() {
                // Later signals change nothing: the removal has begun.
                if received.swap(signal, Ordering::Relaxed) == 0 {
                    eprintln!("firn: interrupted, removing what the benchmark set up");
                    let _ = pidfd_send_signal(&handle, Signal::KILL);
                }
            }
        })?;
    Ok(())
}

/// Waits until `child` has ended. Also reaps the daemons that end meanwhile.
fn wait_for(child: Pid) -> anyhow::Result<WaitStatus> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => return Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("the benchmark cannot be waited for"),
        }
    }
}

/// Kills all children of this process, and then their children, which become children of this process. Gives up after
/// [`END_MAX`].
fn end_children() {
    let begin = Instant::now();
    while has_children() {
        let left = children();
        if begin.elapsed() > END_MAX {
            let left: Vec<String> = left.iter().map(ToString::to_string).collect();
            eprintln!("firn: these processes do not end: {}", left.join(", "));
            return;
        }
        for pid in left {
            // A program with the rights of another user, such as fusermount3, cannot be killed. It ends by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Reaps the children that have ended, and returns whether others are left.
///
/// A listing of /proc could not answer this. It is not a snapshot, so it may miss a process that was started during the
/// listing by a process that has ended since.
fn has_children() -> bool {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) => return true,
            // ECHILD: there are none.
            Err(_) => return false,
        }
    }
}

/// Returns the children of this process that a listing of /proc shows.
fn children() -> Vec<Pid> {
    let own = getpid();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| {
        let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = std::fs::read(entry.path().join("stat")).ok()?;
        (parent_in(&stat)? == own.as_raw_pid()).then_some(Pid::from_raw(pid)?)
    });
    pids.collect()
}

/// Returns the id of the parent process from the text of /proc/PID/stat. The name of the program in it may contain any
/// byte.
fn parent_in(stat: &[u8]) -> Option<i32> {
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the exit code of the child. If a signal was received or ended the child, returns 128 plus its number.
fn exit_code(status: WaitStatus, received: i32) -> ExitCode {
    let signal = match received {
        0 => status.terminating_signal(),
        received => Some(received),
    };
    let code = match signal {
        Some(signal) => 128 + signal,
        None => status.exit_status().unwrap_or(1),
    };
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_is_found_behind_any_name() {
        assert_eq!(parent_in(b"7 (a) S 3 (x) \xff) S 42 7 7 0"), Some(42));
        assert_eq!(parent_in(b"7 (firnd) S 1 7 7 0"), Some(1));
        assert_eq!(parent_in(b"7 (firnd"), None);
    }
}
