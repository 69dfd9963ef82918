//! The offset of a descriptor, which is private to this process or the kernel's.
//!
//! A call *claims* its range of the offset before it moves bytes. So a signal handler that interrupts the call and uses
//! the same descriptor gets the next range. After the call, the unused rest of a claim is released, unless a later
//! claim lies behind it.
//!
//! While the offset is private, the kernel's offset is *parked* at a value at which no byte can be read or written.
//! Some uses of the descriptor are not seen: a raw system call, or a process that copied it by pidfd_getfd(2). They
//! fail with EINVAL instead of moving bytes at an old offset. The alternative is an lseek(2) after each call, which
//! would make a write of 64 bytes six times as slow.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::handled::Handled;
use crate::sys;
use crate::table::{self, Entry, LockedEntry};

/// The range of a file that a call works on.
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
    Given,
    /// The private offset, which a later claim has moved beyond this range. This claim no longer changes it.
    Passed,
    /// The private offset, which is at the end of the range now.
    Private,
    /// The kernel's offset, which may be shared with others and is at the end of the range now.
    Shared,
    /// The private offset, which was given back to the kernel this many bytes after the start of the range.
    GivenBack(usize),
}

impl Claim {
    /// Claims `total` bytes at `explicit_offset`, or at the descriptor's offset, which moves behind them.
    #[inline(always)]
    pub(crate) fn of_range(
        locked: &mut LockedEntry,
        explicit_offset: Option<u64>,
        total: usize,
    ) -> Self {
        Self::of_entry(locked.entry, locked.fd, explicit_offset, total)
    }

    /// Does the same as [`Claim::of_range`] in a signal handler whose thread holds the lock of the entry.
    #[inline(always)]
    pub(crate) fn of_entry(
        entry: &Entry,
        fd: c_int,
        explicit_offset: Option<u64>,
        total: usize,
    ) -> Self {
        let (offset, origin) = match explicit_offset {
            Some(explicit_offset) => (explicit_offset, ClaimOrigin::Given),
            None if entry.is_private() => (
                sys::add_to_word(&entry.offset, total as u64),
                ClaimOrigin::Private,
            ),
            None => {
                let end = sys::lseek(fd, total as i64, libc::SEEK_CUR);
                let start =
                    u64::try_from(end).map_or(u64::MAX, |end| end.wrapping_sub(total as u64));
                (start, ClaimOrigin::Shared)
            }
        };
        Self {
            offset,
            total,
            origin,
        }
    }

    /// Makes the claim of a caller that has moved the private offset itself.
    pub(crate) fn of_private(explicit_offset: Option<u64>, offset: u64, total: usize) -> Self {
        let origin = if explicit_offset.is_some() {
            ClaimOrigin::Given
        } else {
            ClaimOrigin::Private
        };
        Self {
            offset,
            total,
            origin,
        }
    }

    /// Whether the range ends beyond the largest possible file.
    pub(crate) fn is_beyond_files(&self) -> bool {
        let end = self.offset.checked_add(self.total as u64);
        end.is_none_or(|end| end > i64::MAX as u64)
    }

    /// Cuts the claim back to its first `done` bytes. Returns false if a later claim depends on where it ends.
    pub(crate) fn cut_back(&self, locked: &LockedEntry, done: usize) -> bool {
        self.cut_back_entry(locked.entry, locked.fd, done)
    }

    /// Does the same as [`Claim::cut_back`] in a signal handler whose thread holds the lock of the entry.
    pub(crate) fn cut_back_entry(&self, entry: &Entry, fd: c_int, done: usize) -> bool {
        let new_end = self.offset.wrapping_add(done as u64);
        match self.origin {
            ClaimOrigin::Given => true,
            ClaimOrigin::Private => {
                let end = self.offset.wrapping_add(self.total as u64);
                // The exchange fails if a signal handler has claimed a range behind this one.
                entry
                    .offset
                    .compare_exchange(end, new_end, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            }
            ClaimOrigin::Shared if self.offset != u64::MAX => {
                let back = (self.total - done) as i64;
                sys::lseek(fd, -back, libc::SEEK_CUR) >= 0
            }
            ClaimOrigin::Shared | ClaimOrigin::GivenBack(_) | ClaimOrigin::Passed => false,
        }
    }

    /// Whether the kernel has the offset, and it is at the start of the range.
    pub(crate) fn is_given_back(&self) -> bool {
        matches!(self.origin, ClaimOrigin::GivenBack(0))
    }

    /// Records that the kernel has the offset from now on: `done` bytes after the start if the claim was cut back
    /// there, else behind the range.
    pub(crate) fn give_back(&mut self, is_cut: bool, done: usize) {
        self.origin = match &self.origin {
            ClaimOrigin::Private if is_cut => ClaimOrigin::GivenBack(done),
            ClaimOrigin::Private => ClaimOrigin::Passed,
            ClaimOrigin::Given => ClaimOrigin::Given,
            _ => return,
        };
    }

    /// Ends the claim after `done` bytes were used, and moves the offset to their end if it is not there.
    pub(crate) fn settle_offset(&self, locked: &LockedEntry, done: usize) {
        match self.origin {
            ClaimOrigin::GivenBack(given_at) if done > given_at => {
                sys::lseek(locked.fd, (done - given_at) as i64, libc::SEEK_CUR);
            }
            ClaimOrigin::Private | ClaimOrigin::Shared if done < self.total => {
                self.cut_back(locked, done);
            }
            _ => {}
        }
    }
}

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

/// Gives a private offset back to the kernel. The kernel's offset is set only if `is_same` confirms that the number
/// still is the same file.
pub(crate) fn return_offset(locked: &mut LockedEntry, is_same: impl FnOnce(&LockedEntry) -> bool) {
    sys::without_signals(|| {
        locked.set_private(false);
        if is_same(locked) {
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
    let entry = table::entry_of(fd)?;
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

/// lseek(2) of a private offset in a signal handler whose thread holds the lock of the entry. `in_file` returns the
/// target of a seek from the end of the file, to data or to a hole.
#[cold]
pub(crate) fn seek_in_handler(
    entry: &Entry,
    offset: i64,
    whence: c_int,
    in_file: impl FnOnce() -> Result<usize, c_int>,
) -> Handled {
    let current = entry.offset.load(Ordering::Relaxed) as i64;
    let target = match whence {
        libc::SEEK_SET => Ok(offset),
        libc::SEEK_CUR => current.checked_add(offset).ok_or(libc::EOVERFLOW),
        _ => in_file().map(|target| target as i64),
    };
    let target = target.and_then(|target| usize::try_from(target).map_err(|_| libc::EINVAL));
    if let Ok(target) = target {
        entry.offset.store(target as u64, Ordering::Relaxed);
    }
    Handled::of(target)
}
