//! The calls of stdio that open and close descriptors. What it does in between is not seen: its streams are
//! left to the kernel, except those of libstdc++, which reads and writes the descriptor itself.

use std::ffi::{c_char, c_int, c_void};

use libc::FILE;

use super::export;
use crate::opened::{Before, By, forget_stale, note};
use crate::real::{FCLOSE, FDOPEN, FOPEN, FREOPEN};
use crate::report;
use crate::share;
use crate::table::{tag, tag_of};

export! { fdopen _IO_fdopen = do_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE }
export! { freopen freopen64 =
do_freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE }
export! { fclose _IO_fclose = do_fclose(file: *mut FILE) -> c_int }

/// Hands the caller's address on as the third argument.
macro_rules! with_caller {
    ($($name:ident)+ = $to:ident) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!("mov rdx, [rsp]", "jmp {to}", to = sym $to);
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!("mov x2, x30", "b {to}", to = sym $to);
        }
    )+};
}

with_caller! { fopen fopen64 _IO_fopen = do_fopen }

unsafe extern "C" fn do_fopen(path: *const c_char, mode: *const c_char, caller: *const c_void) -> *mut FILE {
    let before = Before::now();
    // SAFETY: the caller's promise.
    let file = unsafe { FOPEN.get()(path, mode) };
    if !file.is_null() {
        let by = if share::is_stream_buffer(caller) { By::StreamBuffer } else { By::Stdio };
        // SAFETY: an open stream, and the mode that opened it.
        unsafe { note(libc::fileno(file), flags_of(mode), &before, by) };
    }
    file
}

/// Flags of open(2), as far as they matter here.
///
/// # Safety
/// A C string.
unsafe fn flags_of(mode: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    let mode = unsafe { std::ffi::CStr::from_ptr(mode) }.to_bytes();
    let append = if mode.first() == Some(&b'a') { libc::O_APPEND } else { 0 };
    let writes = mode.first() != Some(&b'r') || mode.contains(&b'+');
    append | if writes { libc::O_RDWR } else { libc::O_RDONLY }
}

unsafe fn do_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if tag_of(fd) != tag::NONE {
        share::one(fd);
    }
    // SAFETY: the caller's promise.
    unsafe { FDOPEN.get()(fd, mode) }
}

unsafe fn do_freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    // SAFETY: the caller's promise.
    unsafe {
        forget(file);
        let file = FREOPEN.get()(path, mode, file);
        forget(file);
        file
    }
}

unsafe fn do_fclose(file: *mut FILE) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        forget(file);
        FCLOSE.get()(file)
    }
}

/// # Safety
/// Null or an open stream.
unsafe fn forget(file: *mut FILE) {
    if file.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let fd = unsafe { libc::fileno(file) };
    if fd == libc::STDERR_FILENO {
        report::print();
    }
    if tag_of(fd) != tag::NONE && tag_of(fd) != tag::INTERNAL {
        forget_stale(fd);
    }
}
