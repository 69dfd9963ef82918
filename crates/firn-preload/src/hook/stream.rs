//! The calls of stdio that open and close descriptors. What it does in between is not seen: its streams are
//! left to the kernel, except those of libstdc++, which reads and writes the descriptor itself, and those
//! over stubs ([`crate::cookie`]).

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering;

use libc::FILE;

use super::{export, forward};
use crate::cookie;
use crate::opened::{By, Noted, forget_stale, note_open};
use crate::real::{FCLOSE, FDOPEN, FOPEN, FREOPEN};
use crate::share;
use crate::sharing::Moment;
use crate::summary;
use crate::sys::{self, syscall, with_errno};
use crate::table::{ACTIVE, tag, tag_of};
use crate::trees;
use crate::vfork::in_vfork_child;

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

unsafe extern "C" fn do_fopen(
    path: *const c_char,
    mode: *const c_char,
    caller: *const c_void,
) -> *mut FILE {
    let before = Moment::now();
    if ACTIVE.load(Ordering::Relaxed) == 0 {
        return forward!(FOPEN(path, mode));
    }
    // SAFETY: the mode that the program gave to fopen(3).
    let Some(flags) = (unsafe { flags_of(mode) }) else {
        return forward!(FOPEN(path, mode));
    };
    let by = if share::is_stream_buffer(caller) {
        By::StreamBuffer
    } else {
        By::Stdio
    };
    if by == By::Stdio {
        // SAFETY: path and mode are what the program gave to fopen(3).
        let opened = unsafe { open_on_tree(path, mode, flags, &before) };
        if let Some(file) = opened {
            return file;
        }
    }
    let file = forward!(FOPEN(path, mode));
    if file.is_null() {
        return file;
    }
    // SAFETY: an open stream, and the mode that opened it.
    unsafe {
        if by == By::Stdio && is_stub(libc::fileno(file)) {
            return over_stub(file, mode, flags, &before);
        }
        if let Noted::Unusable(errno) = note_open(libc::fileno(file), flags, &before, by) {
            FCLOSE.get()(file);
            with_errno(-(errno as isize));
            return std::ptr::null_mut();
        }
    }
    file
}

/// A stream of ours over a stub that is there already; `None`: the path leads to none.
///
/// The C library must not open a stream of its own here. That stream would have to be closed, and a close ends the
/// locks (fcntl(2)) that the program holds on the file by a descriptor of its own. On a file that is only made now
/// there are none.
///
/// # Safety
/// Two C strings.
unsafe fn open_on_tree(
    path: *const c_char,
    mode: *const c_char,
    flags: c_int,
    before: &Moment,
) -> Option<*mut FILE> {
    if in_vfork_child() {
        return None;
    }
    super::change::file_on_tree(libc::AT_FDCWD, path, 0)?;
    // SAFETY: the caller's strings.
    let fd = unsafe { syscall!(libc::SYS_openat, libc::AT_FDCWD, path, flags, 0o666usize) };
    if fd < 0 {
        with_errno(fd);
        return Some(std::ptr::null_mut());
    }
    let fd = fd as c_int;
    // SAFETY: an open descriptor that is still unused, and the mode of its stream.
    Some(unsafe { open_stream(fd, mode, flags, before) })
}

/// A stream over a descriptor that was just opened.
///
/// # Safety
/// Only this thread knows the descriptor yet; the mode is a C string.
unsafe fn open_stream(fd: c_int, mode: *const c_char, flags: c_int, before: &Moment) -> *mut FILE {
    // SAFETY: the caller's promise.
    unsafe {
        let file = match note_open(fd, flags, before, By::Program) {
            Noted::Unusable(errno) => {
                sys::close(fd);
                with_errno(-(errno as isize));
                return std::ptr::null_mut();
            }
            Noted::Stub => cookie::open_over(fd, mode),
            Noted::Else => do_fdopen(fd, mode),
        };
        if file.is_null() {
            libc::close(fd);
        }
        file
    }
}

/// Whether a descriptor that was just opened is a stub.
fn is_stub(fd: c_int) -> bool {
    trees::may_have_trees() && !in_vfork_child() && trees::is_stub(fd)
}

/// A stream of ours instead of one that was just opened on a stub, with the same number.
///
/// # Safety
/// Nothing was done with the stream yet.
unsafe fn over_stub(
    file: *mut FILE,
    mode: *const c_char,
    flags: c_int,
    before: &Moment,
) -> *mut FILE {
    // SAFETY: an open stream that is still unused, and the mode that opened it.
    unsafe {
        let fd = libc::fileno(file);
        let copy = if flags & libc::O_CLOEXEC != 0 {
            libc::F_DUPFD_CLOEXEC
        } else {
            libc::F_DUPFD
        };
        let kept = sys::fcntl(fd, copy, 0) as c_int;
        if kept < 0 {
            FCLOSE.get()(file);
            with_errno(kept as isize);
            return std::ptr::null_mut();
        }
        FCLOSE.get()(file);
        let again = sys::fcntl(kept, copy, fd as usize) as c_int;
        // Another thread may have got the number meanwhile.
        let fd = if again == fd {
            sys::close(kept);
            fd
        } else {
            sys::close(again);
            kept
        };
        open_stream(fd, mode, flags, before)
    }
}

/// A standard descriptor became a stub: its stream must not write into the stub itself.
pub(crate) fn stub_at(fd: c_int) {
    if fd <= libc::STDERR_FILENO && !in_vfork_child() && tag_of(fd) == tag::STUB {
        cookie::replace_standard(fd);
    }
}

/// Flags with which fopen(3) opens; `None`: it refuses the mode.
///
/// # Safety
/// A C string.
unsafe fn flags_of(mode: *const c_char) -> Option<c_int> {
    // SAFETY: the mode that the program gave to open a stream, a string that ends.
    let mode = unsafe { std::ffi::CStr::from_ptr(mode) }.to_bytes();
    let (first, rest) = mode.split_first()?;
    let makes = match first {
        b'r' => 0,
        b'w' => libc::O_CREAT | libc::O_TRUNC,
        b'a' => libc::O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    // What follows a comma names a character set.
    let rest = rest.split(|&letter| letter == b',').next()?;
    let access = match (rest.contains(&b'+'), first) {
        (true, _) => libc::O_RDWR,
        (false, b'r') => libc::O_RDONLY,
        (false, _) => libc::O_WRONLY,
    };
    let flag_if = |letter, flag| if rest.contains(&letter) { flag } else { 0 };
    Some(makes | access | flag_if(b'x', libc::O_EXCL) | flag_if(b'e', libc::O_CLOEXEC))
}

unsafe fn do_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if tag_of(fd) == tag::STUB {
        // SAFETY: the program gave the mode to fdopen(3).
        return unsafe { cookie::open_over(fd, mode) };
    }
    if tag_of(fd) != tag::NONE {
        share::share_descriptor(fd);
    }
    forward!(FDOPEN(fd, mode))
}

unsafe fn do_freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    let before = Moment::now();
    // SAFETY: path, mode and stream are what the program gave to freopen(3).
    unsafe {
        if !file.is_null() && cookie::is_ours(file) {
            libc::fflush(file);
        }
        forget_stream(file);
        let file = FREOPEN.get()(path, mode, file);
        forget_stream(file);
        if file.is_null() || !is_stub(libc::fileno(file)) {
            return file;
        }
        let fd = libc::fileno(file);
        let slot = cookie::standard_slot(fd).filter(|slot| **slot == file);
        // The C library has taken the mode.
        let flags = flags_of(mode).unwrap_or(libc::O_RDWR);
        let errno = match (note_open(fd, flags, &before, By::Program), slot) {
            (Noted::Stub, Some(slot)) => {
                cookie::replace_standard(fd);
                return *slot;
            }
            (Noted::Unusable(errno), _) => errno,
            // The caller may go on with the old stream, which must not be another one then.
            _ => libc::EOPNOTSUPP,
        };
        forget_stream(file);
        FCLOSE.get()(file);
        with_errno(-(errno as isize));
        std::ptr::null_mut()
    }
}

unsafe fn do_fclose(file: *mut FILE) -> c_int {
    // SAFETY: the program gave the open stream to fclose(3).
    unsafe {
        // One of ours closes its descriptor by way of the hook.
        if file.is_null() || !cookie::is_ours(file) {
            forget_stream(file);
        }
        FCLOSE.get()(file)
    }
}

/// # Safety
/// Null or an open stream.
unsafe fn forget_stream(file: *mut FILE) {
    if file.is_null() {
        return;
    }
    // SAFETY: not null, so an open stream.
    let fd = unsafe { libc::fileno(file) };
    if fd == libc::STDERR_FILENO {
        summary::print_report();
    }
    if tag_of(fd) != tag::NONE && tag_of(fd) != tag::INTERNAL {
        forget_stale(fd);
    }
}
