//! Locks of whole files (flock(2)) and of byte ranges (fcntl(2)), which rustix has not.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{self, FlockOperation};

use crate::{Errno, LockMode, LockRange, Result};

/// Locks a whole file; false where another open file has a lock in the way.
pub(super) fn take_file(file: BorrowedFd<'_>, mode: LockMode) -> Result<bool> {
    let operation = match mode {
        LockMode::Exclusive => FlockOperation::NonBlockingLockExclusive,
        LockMode::Shared => FlockOperation::NonBlockingLockShared,
    };
    match fs::flock(file, operation) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Locks a range, or without a mode unlocks it; false where another process has a lock in the way.
pub(super) fn set_range(
    file: BorrowedFd<'_>,
    range: LockRange,
    mode: Option<LockMode>,
) -> Result<bool> {
    match call(file, libc::F_SETLK, range, mode) {
        Ok(_) => Ok(true),
        // POSIX allows either.
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether no other process has a lock in the way of this one.
pub(super) fn is_range_free(
    file: BorrowedFd<'_>,
    range: LockRange,
    mode: LockMode,
) -> Result<bool> {
    let found = call(file, libc::F_GETLK, range, Some(mode))?;
    Ok(found.l_type == libc::F_UNLCK as i16)
}

/// `F_SETLK` or `F_GETLK` of a range; without a mode it is unlocked. Returns what the kernel says.
fn call(
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
