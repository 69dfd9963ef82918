//! Bad pointers give EFAULT, as far as it can be had cheaply.
//!
//! The kernel checks every page that it copies; a copy in the program itself dies of SIGSEGV at the first
//! bad one. So the first and the last page of a buffer, and of an array of vectors, are shown to the kernel
//! before, once for each page: those that were good are remembered. What is not good goes to the kernel, which
//! says EFAULT or takes what comes before the bad page.
//!
//! Two kinds of bad pages are not found: those between good ones, and those that the C library itself gave back
//! meanwhile (free(3), the end of a thread). What the program unmaps or protects is seen.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::sys::syscall;

/// Bytes that are copied so fast that the usual write need not look at how many they are.
const SHORT_BYTES_MAX: usize = 128 << 10;
/// No value of `how` that sigprocmask(2) knows: it reads the set, finds this and does nothing.
const NO_SUCH_HOW: usize = 77;
const SET_BYTES: usize = 8;
/// futex(2): adds nothing to the second word, then compares it with a number that it hardly ever is below.
const ADD_NOTHING: usize =
    (libc::FUTEX_OP_ADD as usize) << 28 | (libc::FUTEX_OP_CMP_LT as usize) << 24 | 0x800;

/// The smallest page of any machine that Firn runs on: larger ones are looked at in parts.
const PAGE: usize = 4096;
/// Pages that are remembered: 1 MiB of buffers, in 2 KiB.
const PAGES: usize = 256;

/// Pages that the kernel found good, each at its number modulo [`PAGES`]: its address, and in the low bits the
/// [`ERA`] in which that was.
struct Pages {
    slots: [AtomicUsize; PAGES],
}

static READABLE: Pages = Pages::new();
static WRITABLE: Pages = Pages::new();

/// Counts what may have made good pages bad. Never 0 in its low bits, so that an empty slot is no page.
static ERA: AtomicUsize = AtomicUsize::new(1);

/// The program gave memory back or protected it: what was good may be so no more.
pub(crate) fn forget_pages() {
    let era = ERA.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
    if era.is_multiple_of(PAGE) {
        ERA.fetch_add(1, Ordering::SeqCst);
    }
}

impl Pages {
    const fn new() -> Self {
        Self {
            slots: [const { AtomicUsize::new(0) }; PAGES],
        }
    }

    /// Whether the ends of a buffer are good, those that are not remembered by asking `probe` for their pages.
    #[inline(always)]
    fn have(&self, data: usize, len: usize, probe: fn(usize) -> bool) -> bool {
        if len == 0 {
            return true;
        }
        let Some(last) = data.checked_add(len - 1) else {
            return false;
        };
        let first = data & !(PAGE - 1);
        let last = last & !(PAGE - 1);
        self.has(first, probe) && (first == last || self.has(last, probe))
    }

    #[inline(always)]
    fn has(&self, page: usize, probe: fn(usize) -> bool) -> bool {
        let era = ERA.load(Ordering::Relaxed) % PAGE;
        let Some(slot) = self.slots.get(page / PAGE % PAGES) else {
            return probe(page);
        };
        slot.load(Ordering::Relaxed) == page | era || remember(slot, page | era, probe)
    }
}

#[cold]
fn remember(slot: &AtomicUsize, page_and_era: usize, probe: fn(usize) -> bool) -> bool {
    let good = probe(page_and_era & !(PAGE - 1));
    if good {
        slot.store(page_and_era, Ordering::Relaxed);
    }
    good
}

/// Whether a buffer is so short that the usual write takes it.
#[inline(always)]
pub(crate) fn is_short(len: usize) -> bool {
    len < SHORT_BYTES_MAX
}

/// Whether the ends of a buffer can be read.
#[inline(always)]
pub(crate) fn is_readable(data: *const c_void, len: usize) -> bool {
    READABLE.have(data as usize, len, can_read)
}

/// Whether the ends of a buffer can be written.
#[inline(always)]
pub(crate) fn is_writable(data: *mut c_void, len: usize) -> bool {
    WRITABLE.have(data as usize, len, can_write)
}

/// Whether a page can be read: 0.1 to 0.2 µs.
fn can_read(page: usize) -> bool {
    // Not at its begin: the first page begins at NULL, which means no set.
    // SAFETY: the kernel reads eight bytes and changes nothing.
    let result = unsafe {
        syscall!(
            libc::SYS_rt_sigprocmask,
            NO_SUCH_HOW,
            page + SET_BYTES,
            0usize,
            SET_BYTES
        )
    };
    result != -(libc::EFAULT as isize)
}

/// Whether a page can be written. The page stays unchanged, also when other threads use it.
fn can_write(page: usize) -> bool {
    static NO_WAITERS: AtomicU32 = AtomicU32::new(0);
    let first = NO_WAITERS.as_ptr();
    let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the kernel adds 0 to a word of the page, atomically, and wakes no waiter of the first word.
    let result = unsafe {
        syscall!(
            libc::SYS_futex,
            first,
            op,
            0usize,
            0usize,
            page,
            ADD_NOTHING
        )
    };
    result != -(libc::EFAULT as isize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three pages, the middle one without any right.
    fn pages() -> usize {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: new memory, and a page of it.
        unsafe {
            let at = libc::mmap(std::ptr::null_mut(), 3 * PAGE, prot, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(
                libc::mprotect(at.wrapping_byte_add(PAGE), PAGE, libc::PROT_NONE),
                0
            );
            at as usize
        }
    }

    fn both(data: usize, len: usize) -> [bool; 2] {
        [
            is_readable(data as *const c_void, len),
            is_writable(data as *mut c_void, len),
        ]
    }

    #[test]
    fn a_buffer_of_any_length_that_begins_or_ends_in_a_bad_page_is_found() {
        let at = pages();
        assert_eq!(both(at, 1), [true; 2]);
        assert_eq!(both(at + PAGE - 1, 1), [true; 2]);
        assert_eq!(both(at + PAGE - 1, 2), [false; 2]);
        assert_eq!(both(at + PAGE, 1), [false; 2]);
        assert_eq!(both(at + 2 * PAGE - 1, 2), [false; 2]);
        assert_eq!(both(at + 2 * PAGE, PAGE), [true; 2]);
        assert_eq!(both(0, 1), [false; 2]);
        assert_eq!(both(0, 0), [true; 2]);
        assert_eq!(both(usize::MAX - 10, 100), [false; 2]);
        assert_eq!(both(usize::MAX - 10, 1), [false; 2]);
    }

    #[test]
    fn a_page_that_may_only_be_read_is_not_writable_and_what_was_good_is_asked_for_again() {
        let at = pages();
        assert_eq!(both(at, PAGE), [true; 2]);
        // SAFETY: a page of this test.
        let done = unsafe { libc::mprotect(at as *mut c_void, PAGE, libc::PROT_READ) };
        assert_eq!(done, 0);
        forget_pages();
        assert_eq!(both(at, PAGE), [true, false]);
        // SAFETY: a page of this test.
        assert_eq!(unsafe { libc::munmap(at as *mut c_void, 3 * PAGE) }, 0);
        forget_pages();
        assert_eq!(both(at, PAGE), [false; 2]);
    }

    #[test]
    fn looking_changes_nothing() {
        let at = pages();
        // SAFETY: memory of this test.
        let page = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, PAGE) };
        page.fill(0xa5);
        assert_eq!(both(at, PAGE), [true; 2]);
        assert!(page.iter().all(|byte| *byte == 0xa5));
    }
}
