//! Finds out how a process ended that is not a child of this process, through its pidfd.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessEnd {
    /// The process ended by itself, with this code.
    Exited(u8),
    /// This signal killed the process.
    Killed(u8),
}

impl ProcessEnd {
    /// Decodes a status as wait(2) returns it.
    pub fn from_wait_status(status: i32) -> Self {
        let [low, high, ..] = status.to_le_bytes();
        match low & 0x7f {
            0 => Self::Exited(high),
            signal => Self::Killed(signal),
        }
    }
}

/// Returns how the process of a pidfd ended.
///
/// Returns `None` if the process was not reaped yet, or the kernel is older than 6.15. The descriptor must have been
/// opened while the process existed.
pub fn end_of_process(pidfd: impl AsFd) -> Option<ProcessEnd> {
    let exit_info = u64::from(libc::PIDFD_INFO_EXIT);
    let mut info = MaybeUninit::<libc::pidfd_info>::zeroed();
    // SAFETY: `pidfd_info` is made of integers, for which zeros are values.
    unsafe { info.assume_init_mut() }.mask = exit_info;
    // SAFETY: the kernel writes at most the number of bytes that the request number contains, which is the size of
    // `info`.
    let result = unsafe {
        libc::ioctl(
            pidfd.as_fd().as_raw_fd(),
            libc::PIDFD_GET_INFO,
            info.as_mut_ptr(),
        )
    };
    // SAFETY: all bytes of `info` were zero before the call, and the kernel writes integers.
    let info = unsafe { info.assume_init() };
    let has_exit_info = result == 0 && info.mask & exit_info != 0;
    if !has_exit_info {
        return None;
    }
    Some(ProcessEnd::from_wait_status(info.exit_code))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn end_of(mut child: Child) -> Option<ProcessEnd> {
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("pidfd_open");
        child.kill().ok();
        child.wait().expect("wait");
        end_of_process(pidfd)
    }

    #[test]
    fn the_end_of_a_process_is_known_once_it_was_reaped() {
        let sleeper = Command::new("sleep").arg("100").spawn().expect("spawn");
        let end = end_of(sleeper);
        // Kernels before 6.15 do not report how the process ended.
        assert!(matches!(end, None | Some(ProcessEnd::Killed(9))), "{end:?}");
    }

    #[test]
    fn a_status_is_a_code_or_a_signal() {
        assert_eq!(ProcessEnd::from_wait_status(0x0300), ProcessEnd::Exited(3));
        assert_eq!(ProcessEnd::from_wait_status(9), ProcessEnd::Killed(9));
        assert_eq!(ProcessEnd::from_wait_status(0x8b), ProcessEnd::Killed(11));
    }
}
