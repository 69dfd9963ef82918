//! Hooks of open(2) and its kin, of mmap(2), and of calls that unmap or protect memory.
//!
//! `open` is variadic in C. On x86-64 and AArch64 Linux three fixed arguments are passed in the same way. The third one
//! is passed on, whatever it is, and the kernel uses it only if the flags say so.

use std::ffi::{c_char, c_int, c_void};

use libc::{mode_t, off64_t, size_t};

use super::{export, forward, stream};
use crate::mapping;
use crate::opened::{NewDescriptor, OpenedBy, register_opened_fd};
use crate::probe;
use crate::real::{
    CREAT, MKOSTEMPS, MMAP, MPROTECT, MREMAP, MUNMAP, OPEN, OPEN_2, OPENAT, OPENAT_2,
};
use crate::share;
use crate::sharing::SharingSnapshot;
use crate::stub;
use crate::sys::{self, with_errno};
use crate::table::{descriptor_tag, tag};

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

/// Registers a new descriptor that was opened with `flags`; `sharing_before_open` was taken before the open.
/// Returns the result for the program: the descriptor, or -1 with errno if it is a stub that cannot be used. Without
/// such an error, errno is unchanged.
pub(super) fn finish_open(fd: c_int, flags: c_int, sharing_before_open: &SharingSnapshot) -> c_int {
    match register_opened_fd(fd, flags, sharing_before_open, OpenedBy::Program) {
        NewDescriptor::UnusableStub(errno) => {
            sys::close(fd);
            with_errno(-(errno as isize)) as c_int
        }
        NewDescriptor::Stub => {
            stream::replace_stream_of_stub(fd);
            fd
        }
        NewDescriptor::Other => fd,
    }
}

unsafe fn do_open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(OPEN(path, flags, mode));
    finish_open(fd, flags, &sharing_before_open)
}

unsafe fn do_openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(OPENAT(dir, path, flags, mode));
    finish_open(fd, flags, &sharing_before_open)
}

unsafe fn do_open_2(path: *const c_char, flags: c_int) -> c_int {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(OPEN_2(path, flags));
    finish_open(fd, flags, &sharing_before_open)
}

unsafe fn do_openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(OPENAT_2(dir, path, flags));
    finish_open(fd, flags, &sharing_before_open)
}

unsafe fn do_creat(path: *const c_char, mode: mode_t) -> c_int {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(CREAT(path, mode));
    finish_open(fd, libc::O_WRONLY | libc::O_TRUNC, &sharing_before_open)
}

unsafe fn do_mkstemp(template: *mut c_char) -> c_int {
    // SAFETY: the program has passed the template to mkstemp(3), whose conditions are the same.
    unsafe { do_mkostemps(template, 0, 0) }
}

unsafe fn do_mkostemp(template: *mut c_char, flags: c_int) -> c_int {
    // SAFETY: the program has passed the template to mkostemp(3), whose conditions are the same.
    unsafe { do_mkostemps(template, 0, flags) }
}

unsafe fn do_mkstemps(template: *mut c_char, suffix: c_int) -> c_int {
    // SAFETY: the program has passed the template to mkstemps(3), whose conditions are the same.
    unsafe { do_mkostemps(template, suffix, 0) }
}

unsafe fn do_mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    let sharing_before_open = SharingSnapshot::take();
    let fd = forward!(MKOSTEMPS(template, suffix, flags));
    finish_open(fd, flags | libc::O_RDWR, &sharing_before_open)
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
        if descriptor_tag(fd) == tag::STUB {
            // SAFETY: these are the program's arguments of mmap(2), whose conditions it fulfils.
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
            // SAFETY: these are the program's arguments of mmap(2), whose conditions it fulfils.
            if let Some(mapped) = unsafe { mapping::map_memory_file(fd, arguments) } {
                if flags & libc::MAP_FIXED != 0 {
                    probe::forget_pages();
                }
                return mapped as *mut c_void;
            }
            // A mapping shows only bytes that were written through the kernel, so direct access ends here.
            if descriptor_tag(fd) != tag::ORDINARY {
                share::share_descriptor(fd);
            }
        }
    }
    if flags & libc::MAP_FIXED != 0 {
        mapping::record_unmapped(at, len);
    }
    let mapped = forward!(MMAP(at, len, prot, flags, fd, offset));
    if flags & libc::MAP_FIXED != 0 {
        probe::forget_pages();
    }
    mapped
}

unsafe fn do_munmap(at: *mut c_void, len: size_t) -> c_int {
    // The slots are updated before the call, because another thread may map something at this address right after it.
    mapping::record_unmapped(at, len);
    let result = forward!(MUNMAP(at, len));
    probe::forget_pages();
    result
}

unsafe fn do_mprotect(at: *mut c_void, len: size_t, prot: c_int) -> c_int {
    let result = forward!(MPROTECT(at, len, prot));
    probe::forget_pages();
    result
}

/// mremap(2), which is variadic in C like `open`. The new address is passed on, whatever it is.
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
        mapping::record_moved(at, len, result, to_len);
    }
    result
}
