//! Locks of byte ranges (fcntl(2)): rustix has them for whole files only.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::{Errno, LockMode, LockRange, Result};

/// `F_SETLK` or `F_GETLK` of a range; without a mode it is unlocked. Returns what the kernel says.
pub(super) fn call(
    file: BorrowedFd<'_>,
    command: libc::c_int,
    range: LockRange,
    mode: Option<LockMode>,
) -> Result<libc::flock> {
    let kind = match mode {
        None => libc::F_UNLCK,
        Some(LockMode::Shared) => libc::F_RDLCK,
        Some(LockMode::Exclusive) => libc::F_WRLCK,
    };
    let mut lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: range.first as i64,
        // No length means all up to the end.
        l_len: match range.last {
            LockRange::LAST.. => 0,
            last => (last + 1 - range.first) as i64,
        },
        l_pid: 0,
    };
    // SAFETY: both commands read and write one `flock`, which lives until the call returns.
    let outcome = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    match outcome {
        -1 => Err(last_error()),
        _ => Ok(lock),
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
