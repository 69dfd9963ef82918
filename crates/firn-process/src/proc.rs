//! Facts about a process from the files of /proc that never wait for an exec of the process.
//!
//! These functions exist to avoid a deadlock of firnd, the process that serves a mount. An exec closes descriptors, and
//! each close of a file of a mount waits for the answer of firnd. During that time the kernel holds the exec lock of
//! the process. If the answering thread of firnd waited for the same lock, both would hang.
//!
//! | file of /proc/PID | during an exec (Linux 6.18) |
//! |---|---|
//! | `status`, `statm`, `comm`, `cgroup`, `mountinfo`, `fdinfo/N`, the lists `fd` and `task` | is read at once |
//! | `stat`, `wchan`, `io`, `environ`, `maps`, `ns/*`, `fd/N`, `exe`, `cwd`, `root` | waits for the end of the exec |
//!
//! So a thread that answers a close reads a file of the second row only if [`has_memory`] returns that the process has
//! released its memory. Such a process is exiting, and cannot be in an exec.

use std::fs::File;
use std::io::Read;

/// Returns the process of a thread. `None` if firnd does not see the thread, or the thread has ended.
pub fn process_of_thread(thread: u32) -> Option<u32> {
    read_status(thread, "Tgid")?.parse().ok()
}

/// Returns the value of a line of /proc/PID/status (proc(5)). `None` if it cannot be read.
pub fn read_status(thread: u32, field: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let value = |line: &str| {
        let value = line.strip_prefix(field)?.strip_prefix(':')?;
        Some(value.trim().to_owned())
    };
    status.lines().find_map(value)
}

/// Returns whether a thread still has its memory: an exiting thread releases its memory first. `None` if firnd does not
/// see the thread, or the thread has ended.
pub fn has_memory(thread: u32) -> Option<bool> {
    // Each close of a writer calls this, so it makes few system calls. The first two bytes show whether the number of
    // pages is 0.
    let mut pages = [0; 2];
    let mut statm = File::open(format!("/proc/{thread}/statm")).ok()?;
    statm.read_exact(&mut pages).ok()?;
    Some(&pages != b"0 ")
}

#[cfg(test)]
mod tests {
    use std::process::{Command, id};

    use super::*;

    #[test]
    fn a_process_has_memory_until_it_exits() {
        assert_eq!(process_of_thread(id()), Some(id()));
        assert_eq!(process_of_thread(u32::MAX), None);
        assert_eq!(has_memory(id()), Some(true));
        assert_eq!(has_memory(u32::MAX), None);
        let mut child = Command::new("true").spawn().expect("spawn");
        // The child is a zombie until it is reaped.
        while has_memory(child.id()) != Some(false) {
            std::thread::yield_now();
        }
        child.wait().expect("wait");
    }
}
