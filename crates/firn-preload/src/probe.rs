//! Bad pointers give EFAULT, as far as it can be had cheaply.
//!
//! The kernel checks every page that it copies; a copy in the program itself dies of SIGSEGV at the first
//! bad one. From [`PROBE_BYTES_MIN`] on the first and the last bytes of a buffer are shown to the kernel
//! before. Not found are bad pages between good ones, shorter buffers, and a bad array of vectors.

use std::ffi::c_void;

use crate::sys::syscall;

/// A system call takes 0.1 to 0.2 µs, a copy of so many bytes 4 to 7: with shorter ones it would be felt.
const PROBE_BYTES_MIN: usize = 128 << 10;
/// No value of `how` that sigprocmask(2) knows: it reads the set, finds this and does nothing.
const NO_SUCH_HOW: usize = 77;
const SET_BYTES: usize = 8;

/// Whether a buffer is not looked at.
#[inline(always)]
pub(crate) fn is_short(len: usize) -> bool {
    len < PROBE_BYTES_MIN
}

/// Whether the ends of a buffer can be read.
pub(crate) fn is_readable(data: *const c_void, len: usize) -> bool {
    if is_short(len) {
        return true;
    }
    let last = (data as usize).wrapping_add(len).wrapping_sub(SET_BYTES);
    [data as usize, last].into_iter().all(|at| {
        // SAFETY: the kernel reads eight bytes and changes nothing.
        let result = unsafe { syscall!(libc::SYS_rt_sigprocmask, NO_SUCH_HOW, at, 0usize, SET_BYTES) };
        result != -(libc::EFAULT as isize)
    })
}

/// Whether the ends of a buffer can be written. They are: with bytes that the read replaces.
///
/// # Safety
/// The buffer is about to be overwritten.
pub(crate) unsafe fn is_writable(data: *mut c_void, len: usize) -> bool {
    if is_short(len) {
        return true;
    }
    let last = (data as usize).wrapping_add(len).wrapping_sub(size_of::<u32>());
    // Both ends in one call, which stores two numbers of four bytes: half as long as one for each.
    // SAFETY: the caller's promise; nothing else changes.
    let result = unsafe { syscall!(libc::SYS_getcpu, data, last, 0usize) };
    result != -(libc::EFAULT as isize)
}
