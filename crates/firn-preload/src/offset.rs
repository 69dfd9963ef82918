//! The offset of a descriptor: private to this process, or the kernel's.
//!
//! A call claims its range of the offset before it moves bytes: a signal handler that interrupts it and uses the same
//! descriptor takes the next range. What was claimed and not used is given up, unless a later claim lies behind it.
//!
//! While the offset is private, the kernel's offset is parked where nothing can be read or written. A use of the
//! descriptor that Firn does not see (a system call of its own, or another process that took it with pidfd_getfd(2))
//! fails with EINVAL instead of moving bytes at an old offset. To keep the kernel's offset right instead would take an
//! lseek(2) after each call: a write of 64 bytes would cost six times as much.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::handled::Handled;
use crate::sys;
use crate::table::{self, Entry, Held};

/// A range that a call works on.
pub(crate) struct Claim {
    pub(crate) offset: u64,
    total: usize,
    of: Range,
}

/// What a claim was taken from.
enum Range {
    /// The call named its offset.
    Given,
    /// The offset is past it for good: a later claim lies behind it.
    Passed,
    /// The private offset, which is behind it now.
    Private,
    /// The kernel's offset, which others share.
    Shared,
    /// The private offset was given back to the kernel after this many bytes.
    GivenBack(usize),
}

impl Claim {
    /// At `at`, or the next `total` bytes of the offset.
    #[inline(always)]
    pub(crate) fn of_range(held: &mut Held, at: Option<u64>, total: usize) -> Self {
        Self::of_entry(held.entry, held.fd, at, total)
    }

    /// The same for a signal handler whose thread holds the entry.
    #[inline(always)]
    pub(crate) fn of_entry(entry: &Entry, fd: c_int, at: Option<u64>, total: usize) -> Self {
        let (offset, of) = match at {
            Some(at) => (at, Range::Given),
            None if entry.is_private() => (
                sys::add_to_word(&entry.offset, total as u64),
                Range::Private,
            ),
            None => {
                let end = sys::lseek(fd, total as i64, libc::SEEK_CUR);
                let start =
                    u64::try_from(end).map_or(u64::MAX, |end| end.wrapping_sub(total as u64));
                (start, Range::Shared)
            }
        };
        Self { offset, total, of }
    }

    /// One that was taken from the private offset.
    pub(crate) fn of_private(at: Option<u64>, offset: u64, total: usize) -> Self {
        let of = if at.is_some() {
            Range::Given
        } else {
            Range::Private
        };
        Self { offset, total, of }
    }

    /// Whether it ends beyond what a file may have.
    pub(crate) fn is_beyond_files(&self) -> bool {
        let end = self.offset.checked_add(self.total as u64);
        end.is_none_or(|end| end > i64::MAX as u64)
    }

    /// Cuts the claim back to its first `done` bytes. Returns false if a later claim depends on where it ends.
    pub(crate) fn cut_back(&self, held: &Held, done: usize) -> bool {
        self.cut_back_entry(held.entry, held.fd, done)
    }

    /// The same for a signal handler whose thread holds the entry.
    pub(crate) fn cut_back_entry(&self, entry: &Entry, fd: c_int, done: usize) -> bool {
        let used = self.offset.wrapping_add(done as u64);
        match self.of {
            Range::Given => true,
            Range::Private => {
                let end = self.offset.wrapping_add(self.total as u64);
                // Not where a signal handler claimed more behind it.
                entry
                    .offset
                    .compare_exchange(end, used, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            }
            Range::Shared if self.offset != u64::MAX => {
                let back = (self.total - done) as i64;
                sys::lseek(fd, -back, libc::SEEK_CUR) >= 0
            }
            Range::Shared | Range::GivenBack(_) | Range::Passed => false,
        }
    }

    /// Whether the offset stands at its begin, in the kernel.
    pub(crate) fn is_given_back(&self) -> bool {
        matches!(self.of, Range::GivenBack(0))
    }

    /// The kernel has the offset from now on, `done` bytes into the claim if it was `cut` there.
    pub(crate) fn give_back(&mut self, is_cut: bool, done: usize) {
        self.of = match &self.of {
            Range::Private if is_cut => Range::GivenBack(done),
            Range::Private => Range::Passed,
            Range::Given => Range::Given,
            _ => return,
        };
    }

    /// The call is over: `done` bytes of the claim were used.
    pub(crate) fn settle_offset(&self, held: &Held, done: usize) {
        match self.of {
            Range::GivenBack(already) if done > already => {
                sys::lseek(held.fd, (done - already) as i64, libc::SEEK_CUR);
            }
            Range::Private | Range::Shared if done < self.total => {
                self.cut_back(held, done);
            }
            _ => {}
        }
    }
}

/// Where the kernel's offset is parked: the largest, at which read(2) and write(2) fail with EINVAL.
const PARKED: i64 = i64::MAX;

/// The offset becomes private, from where the kernel has it.
pub(crate) fn make_private(held: &mut Held) -> bool {
    // A handler that wrote between the two steps would move an offset that is not read.
    sys::without_signals(|| {
        let offset = sys::lseek(held.fd, 0, libc::SEEK_CUR);
        held.entry.offset.store(offset as u64, Ordering::Relaxed);
        // Another process has parked it, which took the descriptor unseen.
        let is_usable = offset >= 0 && offset as i64 != PARKED;
        held.set_private(is_usable && sys::lseek(held.fd, PARKED, libc::SEEK_SET) >= 0);
    });
    held.is_private()
}

/// lseek(2) in the kernel, of a descriptor whose offset is private: for what the kernel alone knows, the end of the file.
pub(crate) fn seek_in_kernel(fd: c_int, offset: i64, whence: c_int) -> isize {
    let target = sys::lseek(fd, offset, whence);
    if target >= 0 {
        sys::lseek(fd, PARKED, libc::SEEK_SET);
    }
    target
}

/// The private offset is the kernel's again, if `is_same` says that the descriptor still is the one it was.
pub(crate) fn return_offset(held: &mut Held, is_same: impl FnOnce(&Held) -> bool) {
    sys::without_signals(|| {
        held.set_private(false);
        if is_same(held) {
            held.entry.copy_offset_to_kernel(held.fd);
        }
    });
}

/// Where the offset stands.
pub(crate) fn current_offset(held: &Held) -> u64 {
    if held.is_private() {
        held.entry.offset.load(Ordering::Relaxed)
    } else {
        sys::lseek(held.fd, 0, libc::SEEK_CUR) as u64
    }
}

/// The private offset of a descriptor; `None` where the kernel has the offset.
pub(crate) fn private_offset(fd: c_int) -> Option<u64> {
    let entry = table::entry_of(fd)?;
    entry
        .is_private()
        .then(|| entry.offset.load(Ordering::Relaxed))
}

/// Sets the offset.
pub(crate) fn set_offset(held: &Held, offset: u64) {
    set_offset_of_entry(held.entry, held.fd, offset);
}

/// The same for a signal handler whose thread holds the entry.
pub(crate) fn set_offset_of_entry(entry: &Entry, fd: c_int, offset: u64) {
    if entry.is_private() {
        entry.offset.store(offset, Ordering::Relaxed);
    } else {
        sys::lseek(fd, offset as i64, libc::SEEK_SET);
    }
}

/// A signal handler seeks on a private offset while its thread holds the entry. `in_file`: from the end of the file, or to
/// data or a hole.
#[cold]
pub(crate) fn seek_again(
    entry: &Entry,
    offset: i64,
    whence: c_int,
    in_file: impl FnOnce() -> Result<usize, c_int>,
) -> Handled {
    let now = entry.offset.load(Ordering::Relaxed) as i64;
    let target = match whence {
        libc::SEEK_SET => Ok(offset),
        libc::SEEK_CUR => now.checked_add(offset).ok_or(libc::EOVERFLOW),
        _ => in_file().map(|target| target as i64),
    };
    let target = target.and_then(|target| usize::try_from(target).map_err(|_| libc::EINVAL));
    if let Ok(target) = target {
        entry.offset.store(target as u64, Ordering::Relaxed);
    }
    Handled::of(target)
}
