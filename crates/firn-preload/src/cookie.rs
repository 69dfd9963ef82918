//! Streams of stdio over stubs.
//!
//! The C library's own calls in a stream are not seen, so streams over stubs are made with fopencookie(3),
//! which calls back here. They have the descriptor's number (`fileno`), and are byte streams: wide characters
//! are refused as in any stream that was used for bytes before.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{FILE, off64_t, size_t, ssize_t};

/// Places in `struct _IO_FILE` (bits/types/struct_FILE.h), which the C library has kept since 2.1.
mod place {
    pub(super) const FLAGS: usize = 0;
    pub(super) const WRITE_BASE: usize = 32;
    pub(super) const WRITE_PTR: usize = 40;
    pub(super) const FILENO: usize = 112;
    pub(super) const MODE: usize = 192;
    pub(super) const FUNCTIONS: usize = 216;
}
const UNBUFFERED: u32 = 0x2;
const LINE_BUFFERED: u32 = 0x200;
/// Of `_mode`: used for bytes.
const BYTES: c_int = -1;

#[repr(C)]
struct Functions {
    read: unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn __fpurge(file: *mut FILE);
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

/// The table of functions that tells these streams from others; 0: none was made.
static OURS: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn read(cookie: *mut c_void, data: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: the C library gives its own buffer, writable for `len` bytes.
    unsafe { libc::read(cookie as c_int, data.cast(), len) }
}

unsafe extern "C" fn write(cookie: *mut c_void, data: *const c_char, len: size_t) -> ssize_t {
    let mut done = 0;
    while done < len {
        // SAFETY: the C library's buffer, and only what it has not written yet.
        let more =
            unsafe { libc::write(cookie as c_int, data.wrapping_add(done).cast(), len - done) };
        match usize::try_from(more) {
            Ok(more) => done += more,
            // The C library takes less than all of it for the error, and nothing negative.
            Err(_) => break,
        }
    }
    done as ssize_t
}

unsafe extern "C" fn seek(cookie: *mut c_void, offset: *mut off64_t, whence: c_int) -> c_int {
    // SAFETY: the C library gives a place for the offset that it may read and write.
    unsafe {
        let result = libc::lseek64(cookie as c_int, *offset, whence);
        if result < 0 {
            return -1;
        }
        *offset = result;
        0
    }
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream is being closed, and the descriptor is its own.
    unsafe { libc::close(cookie as c_int) }
}

/// A stream over a descriptor; null where there is no memory.
///
/// # Safety
/// `mode` is a C string for fdopen(3).
pub(crate) unsafe fn open_over(fd: c_int, mode: *const c_char) -> *mut FILE {
    // SAFETY: `mode` is a C string as promised; the structure is the C library's, at places that are part of its interface.
    unsafe {
        let file = fopencookie(
            fd as *mut c_void,
            mode,
            Functions {
                read,
                write,
                seek,
                close,
            },
        );
        if file.is_null() {
            return file;
        }
        let base = file.cast::<u8>();
        base.wrapping_add(place::FILENO).cast::<c_int>().write(fd);
        base.wrapping_add(place::MODE).cast::<c_int>().write(BYTES);
        OURS.store(
            base.wrapping_add(place::FUNCTIONS).cast::<usize>().read(),
            Ordering::Release,
        );
        if *mode == b'a' as c_char {
            libc::lseek64(fd, 0, libc::SEEK_END);
        }
        file
    }
}

/// Whether a stream is one of these.
///
/// # Safety
/// An open stream.
pub(crate) unsafe fn is_ours(file: *mut FILE) -> bool {
    // SAFETY: an open stream of the C library, whose structure has that place.
    let functions = unsafe {
        file.cast::<u8>()
            .wrapping_add(place::FUNCTIONS)
            .cast::<usize>()
            .read()
    };
    functions == OURS.load(Ordering::Acquire) && functions != 0
}

/// The stream of a standard descriptor.
pub(crate) fn standard_slot(fd: c_int) -> Option<*mut *mut FILE> {
    match fd {
        libc::STDIN_FILENO => Some(&raw mut stdin),
        libc::STDOUT_FILENO => Some(&raw mut stdout),
        libc::STDERR_FILENO => Some(&raw mut stderr),
        _ => None,
    }
}

/// A standard descriptor is a stub now: so its stream becomes one of these, for good. It works as well
/// where the descriptor is something else later.
pub(crate) fn replace_standard(fd: c_int) {
    let Some(slot) = standard_slot(fd) else {
        return;
    };
    // SAFETY: the program's own streams; it does not use them while it redirects their descriptor, as it must
    // not without the library.
    unsafe {
        let old = *slot;
        if old.is_null() || is_ours(old) || libc::fileno(old) != fd {
            return;
        }
        let new = open_over(
            fd,
            if fd == libc::STDIN_FILENO {
                c"r".as_ptr()
            } else {
                c"w".as_ptr()
            },
        );
        if new.is_null() {
            return;
        }
        let base = old.cast::<u8>();
        let flags = base.wrapping_add(place::FLAGS).cast::<u32>().read();
        if flags & UNBUFFERED != 0 || fd == libc::STDERR_FILENO {
            libc::setvbuf(new, std::ptr::null_mut(), libc::_IONBF, 0);
        } else if flags & LINE_BUFFERED != 0 {
            libc::setvbuf(new, std::ptr::null_mut(), libc::_IOLBF, 0);
        }
        // What waits in the old buffer would be written to the descriptor later, unseen.
        let start = base
            .wrapping_add(place::WRITE_BASE)
            .cast::<*const c_void>()
            .read();
        let end = base
            .wrapping_add(place::WRITE_PTR)
            .cast::<*const c_void>()
            .read();
        let waits = (end as usize).saturating_sub(start as usize);
        if waits > 0 {
            libc::fwrite(start, 1, waits, new);
            __fpurge(old);
        }
        *slot = new;
    }
}
