//! The offset of a descriptor (lseek(2)). With direct access this process keeps it, and it is *private*; otherwise the
//! kernel keeps it.
//!
//! A call *claims* its range of the offset before it moves bytes. So a signal handler that interrupts the call and uses
//! the same descriptor gets the next range. After the call, the offset moves back over the unused rest of a claim,
//! unless a later claim begins behind it.
//!
//! While the offset is private, the kernel's offset is *parked* at a value at which no byte can be read or written.
//! Some uses of the descriptor are not seen: a raw system call, or a process that copied it by pidfd_getfd(2). They
//! fail with EINVAL instead of moving bytes at an old offset. The alternative is an lseek(2) after each call, which
//! would make a write of 64 bytes six times as slow.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::outcome::CallOutcome;
use crate::sys;
use crate::table::{self, Entry, LockedEntry};

/// The range of bytes that a call asks for.
#[derive(Clone, Copy)]
pub(crate) struct CallRange {
    /// The offset in the file that the call names, as pwrite(2) does; `None` means the descriptor's own offset.
    pub(crate) explicit_offset: Option<u64>,
    /// Number of bytes.
    pub(crate) total: usize,
}

/// The range of a file that a call has claimed, and where its offset comes from.
pub(crate) struct Claim {
    /// Start of the range.
    pub(crate) offset: u64,
    /// Length of the range.
    total: usize,
    origin: ClaimOrigin,
}

/// Where the range of a claim comes from.
enum ClaimOrigin {
    /// The call named its offset, so no offset was moved.
    Explicit,
    /// The private offset, which a later claim has moved beyond this range. This claim no longer changes it.
    Overtaken,
    /// The private offset, which is at the end of the range now.
    Private,
    /// The kernel's offset, which may be shared with others and is at the end of the range now.
    Kernel,
    /// The private offset, which was returned to the kernel this many bytes after the start of the range.
    ReturnedToKernel(usize),
}

impl Claim {
    /// Claims the range of a call. If the call names no offset, the descriptor's offset moves behind the range.
    #[inline(always)]
    pub(crate) fn for_descriptor(locked: &mut LockedEntry, range: CallRange) -> Self {
        Self::for_entry(locked.entry, locked.fd, range)
    }

    /// Claims the range of a call: moves the descriptor's offset behind it. So a signal handler that interrupts the
    /// call and uses the same descriptor gets the next range.
    ///
    /// The offset is *private* (kept by this process) or the kernel's. This function does not need the lock of the
    /// entry (the descriptor's state), so the handler itself can call it too.
    #[inline(always)]
    pub(crate) fn for_entry(entry: &Entry, fd: c_int, range: CallRange) -> Self {
        let total = range.total;
        let (offset, origin) = if let Some(explicit_offset) = range.explicit_offset {
            (explicit_offset, ClaimOrigin::Explicit)
        } else if entry.is_private() {
            let start = sys::add_to_word(&entry.offset, total as u64);
            (start, ClaimOrigin::Private)
        } else {
            let end = sys::lseek(fd, total as i64, libc::SEEK_CUR);
            let start = match u64::try_from(end) {
                Ok(end) => end.wrapping_sub(total as u64),
                Err(_) => NO_OFFSET,
            };
            (start, ClaimOrigin::Kernel)
        };
        Self {
            offset,
            total,
            origin,
        }
    }

    /// Makes the claim of a caller that has moved the private offset itself. The range begins at `offset`.
    pub(crate) fn from_moved_offset(offset: u64, range: CallRange) -> Self {
        let origin = if range.explicit_offset.is_some() {
            ClaimOrigin::Explicit
        } else {
            ClaimOrigin::Private
        };
        Self {
            offset,
            total: range.total,
            origin,
        }
    }

    /// Whether the range ends beyond the largest possible file.
    pub(crate) fn is_beyond_files(&self) -> bool {
        let end = self.offset.checked_add(self.total as u64);
        end.is_none_or(|end| end > i64::MAX as u64)
    }

    /// Moves the offset back to the end of the first `done` bytes of the range. Returns false if a later claim begins
    /// where this one ends, so that the offset cannot move.
    pub(crate) fn release_unused(&self, locked: &LockedEntry, done: usize) -> bool {
        self.release_unused_of_entry(locked.entry, locked.fd, done)
    }

    /// Gives back the unused end of a claimed range: moves the offset back to the end of its first `done` bytes. Does
    /// not need the lock of the entry, so it also works in a signal handler that has interrupted the holder of that
    /// lock.
    ///
    /// Returns false if the offset cannot move: a later claim begins behind this one, or this claim does not own the
    /// offset any more.
    pub(crate) fn release_unused_of_entry(&self, entry: &Entry, fd: c_int, done: usize) -> bool {
        let new_end = self.offset.wrapping_add(done as u64);
        match self.origin {
            ClaimOrigin::Explicit => true,
            ClaimOrigin::Private => {
                let end = self.offset.wrapping_add(self.total as u64);
                // The exchange fails if a signal handler has claimed a range behind this one.
                entry
                    .offset
                    .compare_exchange(end, new_end, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            }
            ClaimOrigin::Kernel if self.offset != NO_OFFSET => {
                let unused_bytes = (self.total - done) as i64;
                sys::lseek(fd, -unused_bytes, libc::SEEK_CUR) >= 0
            }
            ClaimOrigin::Kernel | ClaimOrigin::ReturnedToKernel(_) | ClaimOrigin::Overtaken => {
                false
            }
        }
    }

    /// Whether the offset was returned to the kernel and is at the start of the range.
    pub(crate) fn is_returned_unused(&self) -> bool {
        matches!(self.origin, ClaimOrigin::ReturnedToKernel(0))
    }

    /// Records that the private offset was returned to the kernel. With `is_released` the offset is `done` bytes after
    /// the start of the range; otherwise a later claim has moved it on.
    pub(crate) fn record_return(&mut self, is_released: bool, done: usize) {
        self.origin = match &self.origin {
            ClaimOrigin::Private if is_released => ClaimOrigin::ReturnedToKernel(done),
            ClaimOrigin::Private => ClaimOrigin::Overtaken,
            ClaimOrigin::Explicit => ClaimOrigin::Explicit,
            _ => return,
        };
    }

    /// Ends the claim after `done` bytes were used, and moves the offset to their end if it is not there.
    pub(crate) fn finish(&self, locked: &LockedEntry, done: usize) {
        match self.origin {
            ClaimOrigin::ReturnedToKernel(returned_at) if done > returned_at => {
                sys::lseek(locked.fd, (done - returned_at) as i64, libc::SEEK_CUR);
            }
            ClaimOrigin::Private | ClaimOrigin::Kernel if done < self.total => {
                self.release_unused(locked, done);
            }
            _ => {}
        }
    }
}

/// Start of the range if lseek(2) has failed, for example on a pipe.
const NO_OFFSET: u64 = u64::MAX;

/// Value of a parked offset: the largest one, at which read(2) and write(2) fail with EINVAL.
const PARKED: i64 = i64::MAX;

/// Makes the offset private, at the kernel's current value, and parks the kernel's offset. Returns whether that was
/// possible.
pub(crate) fn make_private(locked: &mut LockedEntry) -> bool {
    // A signal handler that wrote between the two calls of lseek(2) would move an offset that was read already.
    sys::without_signals(|| {
        let offset = sys::lseek(locked.fd, 0, libc::SEEK_CUR);
        locked.entry.offset.store(offset as u64, Ordering::Relaxed);
        // A parked offset means that another process has taken the descriptor unseen, and has made its offset private.
        let is_usable = offset >= 0 && offset as i64 != PARKED;
        locked.set_private(is_usable && sys::lseek(locked.fd, PARKED, libc::SEEK_SET) >= 0);
    });
    locked.is_private()
}

/// Asks the kernel for the target of an lseek(2) of a descriptor with a private offset, and parks the kernel's offset
/// again. It serves seeks for which only the kernel knows the file: from its end, to data or to a hole.
pub(crate) fn seek_in_kernel(fd: c_int, offset: i64, whence: c_int) -> isize {
    let target = sys::lseek(fd, offset, whence);
    if target >= 0 {
        sys::lseek(fd, PARKED, libc::SEEK_SET);
    }
    target
}

/// Gives a private offset back to the kernel. The kernel's offset is set only if `is_same_file` confirms that the
/// number still is the same file.
pub(crate) fn return_offset(
    locked: &mut LockedEntry,
    is_same_file: impl FnOnce(&LockedEntry) -> bool,
) {
    sys::without_signals(|| {
        locked.set_private(false);
        if is_same_file(locked) {
            locked.entry.copy_offset_to_kernel(locked.fd);
        }
    });
}

/// Returns the current offset, private or the kernel's.
pub(crate) fn current_offset(locked: &LockedEntry) -> u64 {
    if locked.is_private() {
        locked.entry.offset.load(Ordering::Relaxed)
    } else {
        sys::lseek(locked.fd, 0, libc::SEEK_CUR) as u64
    }
}

/// Returns the private offset of a descriptor; `None` if the kernel has the offset.
pub(crate) fn private_offset(fd: c_int) -> Option<u64> {
    let entry = table::unlocked_entry(fd)?;
    entry
        .is_private()
        .then(|| entry.offset.load(Ordering::Relaxed))
}

/// Sets the current offset, private or the kernel's.
pub(crate) fn set_offset(locked: &LockedEntry, offset: u64) {
    set_offset_of_entry(locked.entry, locked.fd, offset);
}

/// Does the same as [`set_offset`] in a signal handler whose thread holds the lock of the entry.
pub(crate) fn set_offset_of_entry(entry: &Entry, fd: c_int, offset: u64) {
    if entry.is_private() {
        entry.offset.store(offset, Ordering::Relaxed);
    } else {
        sys::lseek(fd, offset as i64, libc::SEEK_SET);
    }
}

/// lseek(2) of a private offset (kept by this process instead of the kernel), in a signal handler whose thread holds
/// the lock of the entry, the descriptor's state. `seek_in_file` returns the target of a seek from the end of the file,
/// to data or to a hole.
#[cold]
pub(crate) fn seek_in_handler(
    entry: &Entry,
    offset: i64,
    whence: c_int,
    seek_in_file: impl FnOnce() -> Result<usize, c_int>,
) -> CallOutcome {
    let current = entry.offset.load(Ordering::Relaxed) as i64;
    let target = match whence {
        libc::SEEK_SET => Ok(offset),
        libc::SEEK_CUR => current.checked_add(offset).ok_or(libc::EOVERFLOW),
        _ => seek_in_file().map(|target| target as i64),
    };
    let new_offset = match target.map(usize::try_from) {
        Ok(Ok(new_offset)) => new_offset,
        // The offset would be negative.
        Ok(Err(_)) => return CallOutcome::from_errno(libc::EINVAL),
        Err(errno) => return CallOutcome::from_errno(errno),
    };
    entry.offset.store(new_offset as u64, Ordering::Relaxed);
    CallOutcome::Done(new_offset as isize)
}
