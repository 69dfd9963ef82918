//! open(2) and its kin, mmap(2), and what takes memory away again.
//!
//! `open` is variadic in C. On x86-64 and AArch64 Linux three fixed arguments are passed the same way; the
//! third is handed on whatever it holds, and the kernel looks at it only where the flags say so.

use std::ffi::{c_char, c_int, c_void};

use libc::{mode_t, off64_t, size_t};

use super::{export, forward, stream};
use crate::mapping;
use crate::opened::{By, Noted, note_open};
use crate::probe;
use crate::real::{
    CREAT, MKOSTEMPS, MMAP, MPROTECT, MREMAP, MUNMAP, OPEN, OPEN_2, OPENAT, OPENAT_2,
};
use crate::share;
use crate::sharing::Moment;
use crate::stub;
use crate::sys::{self, with_errno};
use crate::table::{tag, tag_of};

export! { open open64 __open __open64 =
do_open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int }
export! { openat openat64 =
do_openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int }
export! { __open_2 __open64_2 = do_open_2(path: *const c_char, flags: c_int) -> c_int }
export! { __openat_2 __openat64_2 = do_openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int }
export! { creat creat64 = do_creat(path: *const c_char, mode: mode_t) -> c_int }
export! { mkstemp mkstemp64 = do_mkstemp(template: *mut c_char) -> c_int }
export! { mkostemp mkostemp64 = do_mkostemp(template: *mut c_char, flags: c_int) -> c_int }
export! { mkstemps mkstemps64 = do_mkstemps(template: *mut c_char, suffix: c_int) -> c_int }
export! { mkostemps mkostemps64 =
do_mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int }
export! { mmap mmap64 = do_mmap(
at: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off64_t) -> *mut c_void }
export! { munmap = do_munmap(at: *mut c_void, len: size_t) -> c_int }
export! { mprotect = do_mprotect(at: *mut c_void, len: size_t, prot: c_int) -> c_int }
export! { mremap = do_mremap(
at: *mut c_void, len: size_t, to_len: size_t, flags: c_int, to: *mut c_void) -> *mut c_void }

/// A call of the program gave the descriptor `fd`, opened with `flags`: what it returns, which is -1 and
/// errno where `fd` is a stub that cannot be used. Else keeps errno.
pub(super) fn finish_open(fd: c_int, flags: c_int, before: &Moment) -> c_int {
    match note_open(fd, flags, before, By::Program) {
        Noted::Unusable(errno) => {
            sys::close(fd);
            with_errno(-(errno as isize)) as c_int
        }
        Noted::Stub => {
            stream::stub_at(fd);
            fd
        }
        Noted::Else => fd,
    }
}

unsafe fn do_open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let before = Moment::now();
    let fd = forward!(OPEN(path, flags, mode));
    finish_open(fd, flags, &before)
}

unsafe fn do_openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let before = Moment::now();
    let fd = forward!(OPENAT(dir, path, flags, mode));
    finish_open(fd, flags, &before)
}

unsafe fn do_open_2(path: *const c_char, flags: c_int) -> c_int {
    let before = Moment::now();
    let fd = forward!(OPEN_2(path, flags));
    finish_open(fd, flags, &before)
}

unsafe fn do_openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    let before = Moment::now();
    let fd = forward!(OPENAT_2(dir, path, flags));
    finish_open(fd, flags, &before)
}

unsafe fn do_creat(path: *const c_char, mode: mode_t) -> c_int {
    let before = Moment::now();
    let fd = forward!(CREAT(path, mode));
    finish_open(fd, libc::O_WRONLY | libc::O_TRUNC, &before)
}

unsafe fn do_mkstemp(template: *mut c_char) -> c_int {
    // SAFETY: the program gave the template to mkstemp(3), which asks the same of it.
    unsafe { do_mkostemps(template, 0, 0) }
}

unsafe fn do_mkostemp(template: *mut c_char, flags: c_int) -> c_int {
    // SAFETY: the program gave the template to mkostemp(3), which asks the same of it.
    unsafe { do_mkostemps(template, 0, flags) }
}

unsafe fn do_mkstemps(template: *mut c_char, suffix: c_int) -> c_int {
    // SAFETY: the program gave the template to mkstemps(3), which asks the same of it.
    unsafe { do_mkostemps(template, suffix, 0) }
}

unsafe fn do_mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    let before = Moment::now();
    let fd = forward!(MKOSTEMPS(template, suffix, flags));
    finish_open(fd, flags | libc::O_RDWR, &before)
}

unsafe fn do_mmap(
    at: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    if flags & libc::MAP_ANONYMOUS == 0 {
        if tag_of(fd) == tag::STUB {
            // SAFETY: what the program asked of mmap(2), whose promises it keeps.
            if let Some(result) = unsafe { stub::map_copy(at, len, prot, flags, fd, offset) } {
                return with_errno(result) as *mut c_void;
            }
        } else {
            let arguments = mapping::MapArguments {
                at,
                len,
                prot,
                flags,
                offset,
            };
            // SAFETY: what the program asked of mmap(2), whose promises it keeps.
            if let Some(mapped) = unsafe { mapping::map_memory_file(fd, arguments) } {
                if flags & libc::MAP_FIXED != 0 {
                    probe::forget_pages();
                }
                return mapped as *mut c_void;
            }
            // A mapping shows what goes through the kernel, and only that.
            if tag_of(fd) != tag::NONE {
                share::share_descriptor(fd);
            }
        }
    }
    if flags & libc::MAP_FIXED != 0 {
        mapping::note_unmapped(at, len);
    }
    let mapped = forward!(MMAP(at, len, prot, flags, fd, offset));
    if flags & libc::MAP_FIXED != 0 {
        probe::forget_pages();
    }
    mapped
}

unsafe fn do_munmap(at: *mut c_void, len: size_t) -> c_int {
    // First: another thread may map something there at once.
    mapping::note_unmapped(at, len);
    let result = forward!(MUNMAP(at, len));
    probe::forget_pages();
    result
}

unsafe fn do_mprotect(at: *mut c_void, len: size_t, prot: c_int) -> c_int {
    let result = forward!(MPROTECT(at, len, prot));
    probe::forget_pages();
    result
}

/// Variadic in C, like `open`: the new address is handed on whatever it is.
unsafe fn do_mremap(
    at: *mut c_void,
    len: size_t,
    to_len: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let result = forward!(MREMAP(at, len, to_len, flags, to));
    probe::forget_pages();
    if result != libc::MAP_FAILED {
        mapping::note_moved(at, len, result, to_len);
    }
    result
}
