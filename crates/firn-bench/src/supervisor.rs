//! The process that starts a benchmark and removes what it leaves behind, however it ends.
//!
//! A benchmark runs in a child, which notes in a list what it is about to set up ([`firn_testfs::cleanup`]). This process
//! only waits. When the child has ended, or a signal has come and the child was killed, it ends all processes that are
//! left and removes what the list still has.
//!
//! Promises
//! * No mount, process, directory or network of the benchmark is left after its end, a panic, SIGINT, SIGTERM, SIGHUP, or
//!   the death of the child.
//! * Every process that the benchmark started is found, daemons too: this process is the reaper of its descendants.
//! * Nothing is removed while one of them lives, so none can set up something again.

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

/// Names the list to the child.
const LIST_VARIABLE: &str = "FIRN_BENCH_LEFTOVERS";
/// Names the firn program to measure.
pub const FIRN_VARIABLE: &str = "FIRN_BENCH_PROGRAM";
/// Far more than a process takes to end that was killed.
const END_MAX: Duration = Duration::from_secs(20);

/// Returns whether this process is the child, and notes what it sets up.
pub fn is_supervised() -> anyhow::Result<bool> {
    let Some(list) = std::env::var_os(LIST_VARIABLE) else {
        return Ok(false);
    };
    set_parent_process_death_signal(Some(Signal::KILL))?;
    cleanup::keep_list(Path::new(&list))?;
    Ok(true)
}

/// Runs this program again with the same arguments, and removes what it leaves. `firn` is the program that it measures,
/// unless an argument names one.
pub fn supervise(firn: Option<&Path>) -> anyhow::Result<ExitCode> {
    // Before anything that a signal could leave behind: the list too.
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
    // Also where it cannot be watched: it runs.
    let ended = kill_at_signal(child, signals, &received).and_then(|()| wait_for(child));
    end_children();
    cleanup::remove_listed(list.path())?;
    Ok(exit_code(ended?, received.load(Ordering::Relaxed)))
}

/// From now on the first signal that comes goes to `received` and kills `child`.
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
                // Later ones change nothing: what was begun is removed.
                if received.swap(signal, Ordering::Relaxed) == 0 {
                    eprintln!("firn: interrupted, removing what the benchmark set up");
                    let _ = pidfd_send_signal(&handle, Signal::KILL);
                }
            }
        })?;
    Ok(())
}

/// Waits for `child`, and takes leave of the daemons that end meanwhile.
fn wait_for(child: Pid) -> anyhow::Result<WaitStatus> {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => return Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("the benchmark cannot be waited for"),
        }
    }
}

/// Ends the children of this process, and theirs, which are its own then.
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
            // A program with another user's rights, such as fusermount3, is waited for.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Takes leave of those that have ended; whether there are others. A list of /proc does not tell: it is not of one
/// moment, and one that is started meanwhile by one that ends may be in no part of it.
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

/// Returns the parent in the text of /proc/PID/stat, in which a name may have any byte.
fn parent_in(stat: &[u8]) -> Option<i32> {
    let end = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// That of the child; 128 and the signal that came, or that ended it.
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
