//! Finds invalid pointers before bytes are copied, so that calls return EFAULT as they do without the library.
//!
//! The kernel checks each page that it copies. A copy in the process itself dies of SIGSEGV at the first inaccessible
//! page. So the kernel is asked about the first and the last page of a buffer, and of an array of vectors. Accessible
//! pages are remembered, so that each is asked about once. A call with an inaccessible page goes to the kernel, which
//! returns EFAULT or copies the bytes before that page.
//!
//! Two kinds of inaccessible pages are not found: those between accessible ones, and those that the C library itself
//! has unmapped since (free(3), the end of a thread). Pages that the program unmaps or protects are found, because
//! hooks see that.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::sys::syscall;

/// Writes of fewer bytes may take the fast path.
const SHORT_BYTES_MAX: usize = 128 << 10;
/// An invalid value of `how` for sigprocmask(2); any but 0, 1 and 2 would do. The kernel reads the set, finds this
/// value, and does nothing.
const NO_SUCH_HOW: usize = 77;
/// Size of a set of signals.
const SET_BYTES: usize = 8;
/// Operation of FUTEX_WAKE_OP: adds 0 to the second word, and then tests whether it was less than 0x800. This means
/// -2048, the lowest number that the 12 bits of the operand can express.
const ADD_NOTHING: usize =
    (libc::FUTEX_OP_ADD as usize) << 28 | (libc::FUTEX_OP_CMP_LT as usize) << 24 | 0x800;

/// Size of the smallest page of all machines that Firn runs on. Larger pages are treated as several ones.
const PAGE: usize = 4096;
/// Number of remembered pages: 1 MiB of buffers, in 2 KiB of memory.
const PAGES: usize = 256;

/// The pages that the kernel has found accessible, each in the slot of its number modulo [`PAGES`]. A slot has the
/// address of the page, and in the low bits the [`ERA`] in which the page was accessible.
struct Pages {
    slots: [AtomicUsize; PAGES],
}

/// Pages from which the program can read.
static READABLE: Pages = Pages::new();
/// Pages to which the program can write.
static WRITABLE: Pages = Pages::new();

/// Number of the current era. A new era begins when accessible pages may have become inaccessible. Its low bits are
/// never all 0, so that an empty slot matches no page.
static ERA: AtomicUsize = AtomicUsize::new(1);

/// Forgets all accessible pages, because the program has unmapped or protected memory.
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

    /// Whether the first and the last page of a buffer are accessible. `probe` is asked about pages that are not
    /// remembered.
    #[inline(always)]
    fn has_ends_of(&self, data: usize, len: usize, probe: fn(usize) -> bool) -> bool {
        if len == 0 {
            return true;
        }
        let Some(last) = data.checked_add(len - 1) else {
            return false;
        };
        let first = data & !(PAGE - 1);
        let last = last & !(PAGE - 1);
        self.has_page(first, probe) && (first == last || self.has_page(last, probe))
    }

    /// Whether a page is accessible.
    #[inline(always)]
    fn has_page(&self, page: usize, probe: fn(usize) -> bool) -> bool {
        let era = ERA.load(Ordering::Relaxed) % PAGE;
        let Some(slot) = self.slots.get(page / PAGE % PAGES) else {
            return probe(page);
        };
        slot.load(Ordering::Relaxed) == page | era || remember(slot, page | era, probe)
    }
}

/// Probes a page, and remembers it if it is accessible.
#[cold]
fn remember(slot: &AtomicUsize, page_and_era: usize, probe: fn(usize) -> bool) -> bool {
    let is_accessible = probe(page_and_era & !(PAGE - 1));
    if is_accessible {
        slot.store(page_and_era, Ordering::Relaxed);
    }
    is_accessible
}

/// Whether a buffer is so short that a write of it may take the fast path.
#[inline(always)]
pub(crate) fn is_short(len: usize) -> bool {
    len < SHORT_BYTES_MAX
}

/// Whether the first and the last page of a buffer can be read.
#[inline(always)]
pub(crate) fn is_readable(data: *const c_void, len: usize) -> bool {
    READABLE.has_ends_of(data as usize, len, can_read)
}

/// Whether the first and the last page of a buffer can be written.
#[inline(always)]
pub(crate) fn is_writable(data: *mut c_void, len: usize) -> bool {
    WRITABLE.has_ends_of(data as usize, len, can_write)
}

/// Asks the kernel whether a page can be read, which takes 0.1 to 0.2 µs.
fn can_read(page: usize) -> bool {
    // The set is not at the beginning of the page, because the first page begins at NULL, which means no set.
    // SAFETY: the kernel reads eight bytes, and changes nothing.
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

/// Asks the kernel whether a page can be written. The page stays unchanged, even while other threads use it.
fn can_write(page: usize) -> bool {
    static WORD_WITHOUT_WAITERS: AtomicU32 = AtomicU32::new(0);
    let wake_word = WORD_WITHOUT_WAITERS.as_ptr();
    let op = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    let (wake_count, second_wake_count) = (0usize, 0usize);
    // SAFETY: the kernel atomically adds 0 to a word of the page, and no thread waits for the first word.
    let result = unsafe {
        syscall!(
            libc::SYS_futex,
            wake_word,
            op,
            wake_count,
            second_wake_count,
            page,
            ADD_NOTHING
        )
    };
    result != -(libc::EFAULT as isize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Maps three pages, of which the middle one has no permission.
    fn pages() -> usize {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
        );
        // SAFETY: the memory is new, and only this test uses it.
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

    /// Whether a buffer is readable and writable.
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
    fn a_read_only_page_is_not_writable_and_pages_are_probed_again_after_a_change() {
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
    fn a_probe_changes_no_byte() {
        let at = pages();
        // SAFETY: memory of this test.
        let page = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, PAGE) };
        page.fill(0xa5);
        assert_eq!(both(at, PAGE), [true; 2]);
        assert!(page.iter().all(|byte| *byte == 0xa5));
    }
}
