//! Locks of files in a real directory, without waiting.
//!
//! * A lock of a whole file is a flock(2): it belongs to the open file.
//! * A lock of a range is an fcntl(2) lock. It belongs to the open file, or to the process ([`RangeOwner`]). libc makes
//!   this call, because rustix has none for ranges.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::{self, FlockOperation};

use crate::{Errno, LockMode, LockRange, Result};

/// The owner of locks of ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangeOwner {
    /// The open file. A lock lives as long as any process has a descriptor of that open file (`F_OFD_SETLK`).
    OpenFile,
    /// The process (`F_SETLK`). It is the owner on FUSE: there, the kernel does not notify the server when a close ends
    /// a lock of an open file.
    Process,
}

/// `f_type` of statfs(2) of FUSE (linux/magic.h).
const FUSE_SUPER_MAGIC: u32 = 0x6573_5546;

impl RangeOwner {
    /// Returns the owner of locks in a file system with this number (`f_type` of statfs(2)), if the number is known.
    pub(super) fn in_file_system(number: Option<u32>) -> Self {
        match number {
            Some(number) if number != FUSE_SUPER_MAGIC => Self::OpenFile,
            _ => Self::Process,
        }
    }

    /// Returns the command of fcntl(2) that sets a lock.
    fn set_command(self) -> libc::c_int {
        match self {
            Self::OpenFile => libc::F_OFD_SETLK,
            Self::Process => libc::F_SETLK,
        }
    }

    /// Returns the command of fcntl(2) that looks for a conflicting lock.
    fn test_command(self) -> libc::c_int {
        match self {
            Self::OpenFile => libc::F_OFD_GETLK,
            Self::Process => libc::F_GETLK,
        }
    }
}

/// Locks a whole file. Returns false if another open file has a conflicting lock.
pub(super) fn acquire_file(file: BorrowedFd<'_>, mode: LockMode) -> Result<bool> {
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

/// Unlocks a whole file. Returns true.
pub(super) fn release_file(file: BorrowedFd<'_>) -> Result<bool> {
    fs::flock(file, FlockOperation::Unlock)?;
    Ok(true)
}

/// Locks a range, or unlocks it if `mode` is `None`. Returns false if another owner has a conflicting lock.
pub(super) fn set_range(
    owner: RangeOwner,
    file: BorrowedFd<'_>,
    range: LockRange,
    mode: Option<LockMode>,
) -> Result<bool> {
    match call_fcntl(file, owner.set_command(), range, mode) {
        Ok(_) => Ok(true),
        // POSIX allows both for a conflict.
        Err(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Returns whether a lock of this range and mode would be granted now.
pub(super) fn is_range_free(
    owner: RangeOwner,
    file: BorrowedFd<'_>,
    range: LockRange,
    mode: LockMode,
) -> Result<bool> {
    let conflict = call_fcntl(file, owner.test_command(), range, Some(mode))?;
    Ok(conflict.l_type == libc::F_UNLCK as i16)
}

/// Locks, tests or unlocks a range of bytes by fcntl(2) with `command`. A `mode` of `None` unlocks. Returns the lock as
/// the kernel wrote it, which for a test shows a conflicting lock, if there is one.
fn call_fcntl(
    file: BorrowedFd<'_>,
    command: libc::c_int,
    range: LockRange,
    mode: Option<LockMode>,
) -> Result<libc::flock> {
    let lock_type = match mode {
        None => libc::F_UNLCK,
        Some(LockMode::Shared) => libc::F_RDLCK,
        Some(LockMode::Exclusive) => libc::F_WRLCK,
    };
    // A length of 0 means up to the end of the file, however long it becomes.
    let len = if range.last >= LockRange::LAST {
        0
    } else {
        (range.last + 1 - range.first) as i64
    };
    let mut lock = libc::flock {
        l_type: lock_type as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: range.first as i64,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: both commands read and write one `flock`, which lives until the call returns.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) };
    if result == -1 {
        return Err(last_error());
    }
    Ok(lock)
}

/// Returns the errno of the system call that just failed.
fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
