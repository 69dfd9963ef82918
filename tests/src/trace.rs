//! A program that is killed at a system call of one's choice: at the same place each time, where a kill after some
//! time is anywhere.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// A stop at a system call, with PTRACE_O_TRACESYSGOOD: ptrace(2).
const SYSTEM_CALL_STOP: i32 = libc::SIGTRAP | 0x80;

/// Calls that change what a file system or an arena on it keeps, or make that durable.
pub const CHANGING: [libc::c_long; 14] = [
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_mkdirat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_utimensat,
    libc::SYS_fchmod,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_syncfs,
    libc::SYS_copy_file_range,
];

/// How a traced program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// By SIGKILL, before its call of that number was made.
    Killed,
    /// By itself: its exit code, and the number of calls before.
    Exited(i32, usize),
}

/// Runs `command` and kills it, with all of its threads, when it is about to make its call number `kill_at` (from 0) of
/// those in `calls`. What it prints is thrown away. This thread may have no other children meanwhile.
pub fn kill_at_call(command: &mut Command, calls: &[libc::c_long], kill_at: usize) -> Ended {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // SAFETY: ptrace(2) is a plain system call, which may be made between fork(2) and exec(2); PTRACE_TRACEME uses none
    // of its other arguments.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    #[expect(
        clippy::zombie_processes,
        reason = "waitpid below takes what becomes of all its threads, it too"
    )]
    let child = command.spawn().expect("the program starts, traced");
    let program = child.id() as libc::pid_t;
    let mut count = 0;
    let mut entering = std::collections::HashSet::new();
    let mut is_set_up = false;
    loop {
        let mut status = 0;
        // SAFETY: `status` is an int that outlives the call. __WNOTHREAD: children of other tests are not ours.
        let stopped = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        assert!(stopped > 0, "waitpid: {}", std::io::Error::last_os_error());
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            entering.remove(&stopped);
            if stopped != program {
                continue;
            }
            return match libc::WIFEXITED(status) {
                true => Ended::Exited(libc::WEXITSTATUS(status), count),
                false => Ended::Killed,
            };
        }
        let signal = libc::WSTOPSIG(status);
        if !std::mem::replace(&mut is_set_up, true) {
            set_up(stopped);
        }
        let mut deliver = 0;
        if signal == SYSTEM_CALL_STOP {
            // Entry and exit take turns, in each thread.
            let is_entry = entering.insert(stopped);
            if !is_entry {
                entering.remove(&stopped);
            } else if calls.contains(&number_of_call(stopped)) {
                if count == kill_at {
                    crate::sandbox::kill(program as u32, libc::SIGKILL);
                    continue;
                }
                count += 1;
            }
        } else if signal != libc::SIGTRAP && signal != libc::SIGSTOP {
            deliver = signal;
        }
        // SAFETY: PTRACE_SYSCALL uses no memory of ours; a thread that was killed meanwhile makes it fail, and waitpid
        // tells of it.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, stopped, 0, deliver) };
    }
}

/// A call at which a running program is killed.
#[derive(Clone, Copy, Debug)]
pub struct KillAt {
    /// Which calls count.
    pub call: CallFilter,
    /// How many of them pass before.
    pub skip: usize,
    /// When, of that call.
    pub when: Moment,
}

/// When a traced program is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// When it is about to make the call.
    Before,
    /// When it has made the call.
    After,
}

/// A system call, as a condition on its number and arguments.
pub type CallFilter = fn(libc::c_long, &[u64; 6]) -> bool;

/// Attaches to a program that runs, calls `attached`, and kills it at that call. Returns once it is dead, also by
/// another cause.
pub fn kill_running_at_call(
    program: u32,
    KillAt { call, skip, when }: KillAt,
    attached: &std::sync::mpsc::Sender<()>,
) {
    let program = program as libc::pid_t;
    let seized = seize_all_threads(program);
    let mut stopped_once = std::collections::HashSet::new();
    let mut meant = std::collections::HashSet::new();
    let mut is_told = false;
    let mut passed = 0;
    loop {
        let mut status = 0;
        // SAFETY: `status` is an int that outlives the call. __WNOTHREAD: what other threads trace is not ours.
        let thread = unsafe { libc::waitpid(-1, &mut status, libc::__WALL | libc::__WNOTHREAD) };
        assert!(thread > 0, "waitpid: {}", std::io::Error::last_os_error());
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            if thread == program {
                return;
            }
            continue;
        }
        stopped_once.insert(thread);
        let signal = libc::WSTOPSIG(status);
        if signal == SYSTEM_CALL_STOP {
            let is_reached = match entry_of(thread) {
                Some((number, arguments)) if call(number, &arguments) => {
                    passed += 1;
                    if passed == skip + 1 {
                        meant.insert(thread);
                    }
                    when == Moment::Before && passed == skip + 1
                }
                Some(_) => false,
                None => meant.remove(&thread),
            };
            if is_reached {
                crate::sandbox::kill_alone(program as u32, libc::SIGKILL);
                continue;
            }
        }
        let is_event = status >> 16 != 0;
        let is_ours = is_event || signal == SYSTEM_CALL_STOP || signal == libc::SIGTRAP;
        let deliver = if is_ours { 0 } else { signal };
        // SAFETY: PTRACE_SYSCALL uses no memory of ours.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, thread, 0, deliver) };
        if !is_told && seized.is_subset(&stopped_once) {
            is_told = true;
            let _ = attached.send(());
        }
    }
}

fn seize_all_threads(program: libc::pid_t) -> std::collections::HashSet<libc::pid_t> {
    let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE;
    let mut seized = std::collections::HashSet::new();
    // Threads may begin meanwhile: until a look finds no other one.
    loop {
        let threads = std::fs::read_dir(format!("/proc/{program}/task")).expect("its threads");
        let fresh: Vec<libc::pid_t> = threads
            .flatten()
            .filter_map(|thread| thread.file_name().to_str()?.parse().ok())
            .filter(|thread| seized.insert(*thread))
            .collect();
        if fresh.is_empty() {
            return seized;
        }
        for thread in fresh {
            // SAFETY: both requests use no memory of ours; a thread that has ended makes them fail.
            unsafe {
                libc::ptrace(libc::PTRACE_SEIZE, thread, 0, options);
                libc::ptrace(libc::PTRACE_INTERRUPT, thread, 0, 0);
            }
        }
    }
}

/// Number and arguments of the call that a stopped thread is about to make; `None`: it has made one.
fn entry_of(thread: libc::pid_t) -> Option<(libc::c_long, [u64; 6])> {
    // SAFETY: all fields are integers, for which zero is a value.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    // SAFETY: `info` has `size` bytes and outlives the call.
    let got = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size, &raw mut info) };
    if got <= 0 || info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return None;
    }
    // SAFETY: the kernel filled in what belongs to an entry.
    let entry = unsafe { info.u.entry };
    Some((entry.nr as libc::c_long, entry.args))
}

fn set_up(program: libc::pid_t) {
    let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
    // SAFETY: the options are passed by value.
    let set = unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, program, 0, options) };
    assert_eq!(
        set,
        0,
        "PTRACE_SETOPTIONS: {}",
        std::io::Error::last_os_error()
    );
}

/// The system call that a stopped thread is about to make.
fn number_of_call(thread: libc::pid_t) -> libc::c_long {
    // SAFETY: all fields are integers, for which zero is a value.
    let mut info: libc::ptrace_syscall_info = unsafe { std::mem::zeroed() };
    let size = size_of_val(&info);
    // SAFETY: `info` has `size` bytes and outlives the call.
    let got = unsafe { libc::ptrace(libc::PTRACE_GET_SYSCALL_INFO, thread, size, &raw mut info) };
    if got <= 0 || info.op != libc::PTRACE_SYSCALL_INFO_ENTRY {
        return -1;
    }
    // SAFETY: the kernel filled in what belongs to an entry.
    unsafe { info.u.entry.nr as libc::c_long }
}
