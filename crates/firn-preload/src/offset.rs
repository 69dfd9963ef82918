//! The offset of a descriptor: private to this process, or the kernel's.
//!
//! A call claims its range of the offset before it moves bytes: a signal handler that interrupts it and uses the
//! same descriptor takes the next range. What was claimed and not used is given up, unless somebody claimed more
//! behind it.

use std::sync::atomic::Ordering;

use crate::sys;
use crate::table::Held;

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
    /// The offset is past it for good: somebody claimed more behind it.
    Passed,
    /// The private offset, which is behind it now.
    Private,
    /// The kernel's offset, which others share.
    Shared,
    /// The private offset, given back to the kernel after so many bytes.
    GivenBack(usize),
}

impl Claim {
    /// At `at`, or the next `total` bytes of the offset.
    #[inline(always)]
    pub(crate) fn of_range(held: &mut Held, at: Option<u64>, total: usize) -> Self {
        let (offset, of) = match at {
            Some(at) => (at, Range::Given),
            None if held.is_private() => (
                sys::add_to_word(&held.entry.offset, total as u64),
                Range::Private,
            ),
            None => {
                let end = sys::lseek(held.fd, total as i64, libc::SEEK_CUR);
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

    /// Whether nobody depends on where it ends: the offset can stand after its first `done` bytes again.
    pub(crate) fn cut_back(&self, held: &Held, done: usize) -> bool {
        let used = self.offset.wrapping_add(done as u64);
        match self.of {
            Range::Given => true,
            Range::Private => {
                let end = self.offset.wrapping_add(self.total as u64);
                // Not where a signal handler claimed more behind it.
                held.entry
                    .offset
                    .compare_exchange(end, used, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            }
            Range::Shared if self.offset != u64::MAX => {
                let back = (self.total - done) as i64;
                sys::lseek(held.fd, -back, libc::SEEK_CUR) >= 0
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

/// The offset becomes private, from where the kernel has it.
pub(crate) fn make_private(held: &mut Held) -> bool {
    // A handler that wrote between the two steps would move an offset that nobody reads.
    sys::without_signals(|| {
        let offset = sys::lseek(held.fd, 0, libc::SEEK_CUR);
        held.entry.offset.store(offset as u64, Ordering::Relaxed);
        held.set_private(offset >= 0);
    });
    held.is_private()
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

/// Sets the offset.
pub(crate) fn set_offset(held: &Held, offset: u64) {
    if held.is_private() {
        held.entry.offset.store(offset, Ordering::Relaxed);
    } else {
        sys::lseek(held.fd, offset as i64, libc::SEEK_SET);
    }
}
