//! Hooks (exported functions that replace those of the C library) of open(2) and its kin, of mmap(2), and of calls that
//! unmap or protect memory.
//!
//! `open` is variadic in C. On x86-64 and AArch64 Linux three fixed arguments are passed in the same way. The third one
//! is passed on, whatever it is, and the kernel uses it only if the flags say so.

use std::ffi::{c_char, c_int, c_void};

use libc::{mode_t, off64_t, size_t};

use super::{export, forward, stream};
use crate::mapping::{self, MapArguments};
use crate::opened::{NewDescriptor, OpenedBy, register_opened_fd};
use crate::probe;
use crate::real::{
    CREAT, MKOSTEMPS, MMAP, MPROTECT, MREMAP, MUNMAP, OPEN, OPEN_2, OPENAT, OPENAT_2,
};
use crate::share;
use crate::sharing::SharingSnapshot;
use crate::stub;
use crate::sys::{self, fail, with_errno};
use crate::table::{descriptor_tag, tag};

export! {
    open open64 __open __open64 = do_open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int;
    openat openat64 = do_openat(
        dir: c_int,
        path: *const c_char,
        flags: c_int,
        mode: mode_t,
    ) -> c_int;
    __open_2 __open64_2 = do_open_2(path: *const c_char, flags: c_int) -> c_int;
    __openat_2 __openat64_2 = do_openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int;
    creat creat64 = do_creat(path: *const c_char, mode: mode_t) -> c_int;
    mkstemp mkstemp64 = do_mkstemp(template: *mut c_char) -> c_int;
    mkostemp mkostemp64 = do_mkostemp(template: *mut c_char, flags: c_int) -> c_int;
    mkstemps mkstemps64 = do_mkstemps(template: *mut c_char, suffix: c_int) -> c_int;
    mkostemps mkostemps64 = do_mkostemps(
        template: *mut c_char,
        suffix: c_int,
        flags: c_int,
    ) -> c_int;
    mmap mmap64 = do_mmap(
        address: *mut c_void,
        len: size_t,
        prot: c_int,
        flags: c_int,
        fd: c_int,
        offset: off64_t,
    ) -> *mut c_void;
    munmap = do_munmap(address: *mut c_void, len: size_t) -> c_int;
    mprotect = do_mprotect(address: *mut c_void, len: size_t, prot: c_int) -> c_int;
    mremap = do_mremap(
        address: *mut c_void,
        len: size_t,
        to_len: size_t,
        flags: c_int,
        to: *mut c_void,
    ) -> *mut c_void;
}

/// Registers a new descriptor that was opened with `flags`; `sharing_before_open` was taken before the open.
/// Returns the result for the program: the descriptor, or -1 with errno if it is a stub that cannot be used. Without
/// such an error, errno is unchanged.
pub(super) fn finish_open(fd: c_int, flags: c_int, sharing_before_open: &SharingSnapshot) -> c_int {
    match register_opened_fd(fd, flags, sharing_before_open, OpenedBy::Program) {
        NewDescriptor::UnusableStub(errno) => {
            sys::close(fd);
            fail(errno)
        }
        NewDescriptor::Stub => {
            stream::replace_stream_of_stub(fd);
            fd
        }
        NewDescriptor::NotStub => fd,
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

/// mmap(2). For some files of Firn the library maps other memory instead ([`map_without_kernel`]). A mapping at a fixed
/// address replaces earlier ones, so the records of these are updated.
unsafe fn do_mmap(
    address: *mut c_void,
    len: size_t,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: off64_t,
) -> *mut c_void {
    let replaces_memory = flags & libc::MAP_FIXED != 0;
    if flags & libc::MAP_ANONYMOUS == 0 {
        let arguments = MapArguments {
            address,
            len,
            prot,
            flags,
            offset,
        };
        // SAFETY: these are the program's arguments of mmap(2), whose conditions it fulfils.
        if let Some(mapped) = unsafe { map_without_kernel(fd, arguments) } {
            return mapped;
        }
    }
    if replaces_memory {
        mapping::record_unmapped(address, len);
    }
    let mapped = forward!(MMAP(address, len, prot, flags, fd, offset));
    // Pages that were found accessible may no longer be so.
    if replaces_memory {
        probe::forget_pages();
    }
    mapped
}

/// Maps a copy of a stub (an empty file; firnd has its bytes), or the *memory file* of a file on a mount, in which
/// firnd keeps all of its bytes. Returns `None` if the kernel must map the descriptor; then direct access to it has
/// ended.
///
/// # Safety
/// The same as for mmap(2).
unsafe fn map_without_kernel(fd: c_int, arguments: MapArguments) -> Option<*mut c_void> {
    if descriptor_tag(fd) == tag::STUB {
        // SAFETY: the caller keeps the promises of mmap(2).
        let result = unsafe { stub::map_copy(fd, arguments) }?;
        return Some(with_errno(result) as *mut c_void);
    }
    // SAFETY: the caller keeps the promises of mmap(2).
    if let Some(mapped) = unsafe { mapping::map_memory_file(fd, arguments) } {
        if arguments.flags & libc::MAP_FIXED != 0 {
            probe::forget_pages();
        }
        return Some(mapped as *mut c_void);
    }
    // A mapping shows only bytes that were written through the kernel, so direct access ends here.
    if descriptor_tag(fd) != tag::ORDINARY {
        share::prepare_to_share(fd);
    }
    None
}

unsafe fn do_munmap(address: *mut c_void, len: size_t) -> c_int {
    // The slots are updated before the call, because another thread may map something at this address right after it.
    mapping::record_unmapped(address, len);
    let result = forward!(MUNMAP(address, len));
    probe::forget_pages();
    result
}

unsafe fn do_mprotect(address: *mut c_void, len: size_t, prot: c_int) -> c_int {
    let result = forward!(MPROTECT(address, len, prot));
    probe::forget_pages();
    result
}

/// mremap(2), which is variadic in C like `open`. The new address is passed on, whatever it is.
unsafe fn do_mremap(
    address: *mut c_void,
    len: size_t,
    to_len: size_t,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let result = forward!(MREMAP(address, len, to_len, flags, to));
    probe::forget_pages();
    if result != libc::MAP_FAILED {
        mapping::record_moved(address, len, result, to_len);
    }
    result
}
