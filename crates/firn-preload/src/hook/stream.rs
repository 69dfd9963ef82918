//! Hooks of the functions of stdio that open and close streams.
//!
//! Hooks do not see the reads and writes of a stream. So streams are left to the kernel, with two exceptions: libstdc++
//! reads and writes the descriptors of its streams itself, and streams over stubs (empty files; firnd has their bytes)
//! are made by [`crate::cookie`].

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::Ordering;

use libc::FILE;

use super::{export, forward};
use crate::cookie;
use crate::opened::{NewDescriptor, OpenedBy, forget_closed_descriptor, register_opened_fd};
use crate::real::{FCLOSE, FDOPEN, FOPEN, FREOPEN};
use crate::share;
use crate::sharing::SharingSnapshot;
use crate::summary;
use crate::sys::{self, syscall, with_errno};
use crate::table::{ACTIVE, descriptor_tag, tag};
use crate::trees;
use crate::vfork::is_vfork_child;

/// Permissions with which fopen(3) creates a file, before the umask.
const CREATE_MODE: usize = 0o666;

export! {
    fdopen _IO_fdopen = do_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE;
    freopen freopen64 = do_freopen(
        path: *const c_char,
        mode: *const c_char,
        file: *mut FILE,
    ) -> *mut FILE;
    fclose _IO_fclose = do_fclose(file: *mut FILE) -> c_int;
}

/// Defines hooks that pass their caller's return address on to a function, as its third argument.
macro_rules! export_with_return_address {
    ($($name:ident)+ = $function:ident) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name(path: *const c_char, mode: *const c_char) -> *mut FILE {
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "mov rdx, [rsp]",
                "jmp {function}",
                function = sym $function,
            );
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "mov x2, x30",
                "b {function}",
                function = sym $function,
            );
        }
    )+};
}

export_with_return_address! { fopen fopen64 _IO_fopen = do_fopen }

/// fopen(3). A stream over a stub (an empty file; firnd has its bytes) gets functions of this library. `return_address`
/// shows whether libstdc++ opens the file for a stream of its own.
unsafe extern "C" fn do_fopen(
    path: *const c_char,
    mode: *const c_char,
    return_address: *const c_void,
) -> *mut FILE {
    let sharing_before_open = SharingSnapshot::take();
    if ACTIVE.load(Ordering::Relaxed) == 0 {
        return forward!(FOPEN(path, mode));
    }
    // SAFETY: the program has passed the mode to fopen(3).
    let Some(flags) = (unsafe { fopen_flags(mode) }) else {
        return forward!(FOPEN(path, mode));
    };
    // SAFETY: the program has passed path and mode to fopen(3).
    unsafe {
        if share::is_in_libstdcxx(return_address) {
            let file = FOPEN.get()(path, mode);
            return register_stream(file, flags, &sharing_before_open, OpenedBy::StreamBuffer);
        }
        if let Some(file) = open_existing_stub_stream(path, mode, flags, &sharing_before_open) {
            return file;
        }
        let file = FOPEN.get()(path, mode);
        if !file.is_null() && is_stub(libc::fileno(file)) {
            return reopen_as_stub_stream(file, mode, flags, &sharing_before_open);
        }
        register_stream(file, flags, &sharing_before_open, OpenedBy::Stdio)
    }
}

/// Registers the descriptor of a stream that the C library has opened. Returns the stream, or null with errno if the
/// descriptor is a stub (an empty file; firnd has its bytes) that cannot be used. `sharing_before_open` tells whether a
/// fork has begun since the open.
///
/// # Safety
/// `file` is null or an open stream that is not in use yet.
unsafe fn register_stream(
    file: *mut FILE,
    flags: c_int,
    sharing_before_open: &SharingSnapshot,
    opened_by: OpenedBy,
) -> *mut FILE {
    if file.is_null() {
        return file;
    }
    // SAFETY: the stream is open.
    unsafe {
        let registered =
            register_opened_fd(libc::fileno(file), flags, sharing_before_open, opened_by);
        if let NewDescriptor::UnusableStub(errno) = registered {
            FCLOSE.get()(file);
            return fail_with_null(errno);
        }
    }
    file
}

/// Sets errno, and returns the null by which fopen(3) reports an error.
fn fail_with_null(errno: c_int) -> *mut FILE {
    with_errno(-(errno as isize));
    std::ptr::null_mut()
}

/// Opens a stream over an existing stub, an empty file with its bytes in firnd. Returns `None` if the path leads to no
/// stub, and null with errno if the stub cannot be opened.
///
/// The C library must not open a stream of its own for such a file. That stream would have to be closed, and a close
/// ends the locks (fcntl(2)) that the program holds on the file by another descriptor. A file that does not exist yet
/// has no locks.
///
/// # Safety
/// `path` and `mode` are C strings.
unsafe fn open_existing_stub_stream(
    path: *const c_char,
    mode: *const c_char,
    flags: c_int,
    sharing_before_open: &SharingSnapshot,
) -> Option<*mut FILE> {
    if is_vfork_child() {
        return None;
    }
    super::change::find_file_on_tree(libc::AT_FDCWD, path, 0)?;
    // SAFETY: the kernel reads the path, which is a C string.
    let result = unsafe { syscall!(libc::SYS_openat, libc::AT_FDCWD, path, flags, CREATE_MODE) };
    if result < 0 {
        with_errno(result);
        return Some(std::ptr::null_mut());
    }
    // SAFETY: the descriptor is new, and `mode` is a C string.
    Some(unsafe { open_stream_over(result as c_int, mode, flags, sharing_before_open) })
}

/// Opens a stream over a descriptor that was just opened: by functions of this library if it is a stub (an empty file;
/// firnd has its bytes), else by fdopen(3). An error closes the descriptor, and null is returned with errno.
///
/// # Safety
/// Only this thread knows the descriptor, and `mode` is a C string.
unsafe fn open_stream_over(
    fd: c_int,
    mode: *const c_char,
    flags: c_int,
    sharing_before_open: &SharingSnapshot,
) -> *mut FILE {
    // SAFETY: the caller keeps these two promises.
    unsafe {
        let file = match register_opened_fd(fd, flags, sharing_before_open, OpenedBy::Program) {
            NewDescriptor::UnusableStub(errno) => {
                sys::close(fd);
                return fail_with_null(errno);
            }
            NewDescriptor::Stub => cookie::open_stub_stream(fd, mode),
            NewDescriptor::NotStub => do_fdopen(fd, mode),
        };
        if file.is_null() {
            // By the hook of close(2), which also forgets the state that was registered.
            libc::close(fd);
        }
        file
    }
}

/// Whether a descriptor that was just opened is a stub.
fn is_stub(fd: c_int) -> bool {
    trees::may_have_trees() && !is_vfork_child() && trees::is_stub(fd)
}

/// Replaces a stream that the C library has just opened on a stub (an empty file; firnd has its bytes). The new stream
/// has the same descriptor number if possible.
///
/// # Safety
/// The stream was not used yet, and `mode` is a C string.
unsafe fn reopen_as_stub_stream(
    file: *mut FILE,
    mode: *const c_char,
    flags: c_int,
    sharing_before_open: &SharingSnapshot,
) -> *mut FILE {
    // SAFETY: the stream is open and unused, and the mode has opened it.
    unsafe {
        let old_fd = libc::fileno(file);
        let copy_command = if flags & libc::O_CLOEXEC != 0 {
            libc::F_DUPFD_CLOEXEC
        } else {
            libc::F_DUPFD
        };
        // A copy keeps the stub open while its stream is closed.
        let copy = sys::fcntl(old_fd, copy_command, 0) as c_int;
        FCLOSE.get()(file);
        if copy < 0 {
            return fail_with_null(-copy);
        }
        let new_fd = sys::fcntl(copy, copy_command, old_fd as usize) as c_int;
        // Another thread may have taken the number since the stream was closed. Then the copy is used.
        let (fd, unused_fd) = if new_fd == old_fd {
            (new_fd, copy)
        } else {
            (copy, new_fd)
        };
        sys::close(unused_fd);
        open_stream_over(fd, mode, flags, sharing_before_open)
    }
}

/// Replaces the stream of a standard descriptor that has become a stub, because the old stream would write to the stub
/// itself.
pub(crate) fn replace_stream_of_stub(fd: c_int) {
    if fd <= libc::STDERR_FILENO && !is_vfork_child() && descriptor_tag(fd) == tag::STUB {
        cookie::replace_standard_stream(fd);
    }
}

/// Returns the flags of open(2) with which fopen(3) opens a file; `None` if it refuses the mode.
///
/// # Safety
/// `mode` is a C string.
unsafe fn fopen_flags(mode: *const c_char) -> Option<c_int> {
    // SAFETY: the program has passed the mode, which is a C string.
    let mode = unsafe { std::ffi::CStr::from_ptr(mode) }.to_bytes();
    let (first_letter, other_letters) = mode.split_first()?;
    // A comma begins the name of a character set.
    let options = other_letters.split(|letter| *letter == b',').next()?;
    let (access, creation) = match first_letter {
        b'r' => (libc::O_RDONLY, 0),
        b'w' => (libc::O_WRONLY, libc::O_CREAT | libc::O_TRUNC),
        b'a' => (libc::O_WRONLY, libc::O_CREAT | libc::O_APPEND),
        _ => return None,
    };
    let mut flags = creation;
    flags |= if options.contains(&b'+') {
        libc::O_RDWR
    } else {
        access
    };
    if options.contains(&b'x') {
        flags |= libc::O_EXCL;
    }
    if options.contains(&b'e') {
        flags |= libc::O_CLOEXEC;
    }
    Some(flags)
}

unsafe fn do_fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if descriptor_tag(fd) == tag::STUB {
        // SAFETY: the program has passed the mode to fdopen(3).
        return unsafe { cookie::open_stub_stream(fd, mode) };
    }
    if descriptor_tag(fd) != tag::ORDINARY {
        share::prepare_to_share(fd);
    }
    forward!(FDOPEN(fd, mode))
}

/// freopen(3). If the path leads to a stub (an empty file; firnd has its bytes), the stream needs functions of this
/// library.
unsafe fn do_freopen(path: *const c_char, mode: *const c_char, file: *mut FILE) -> *mut FILE {
    let sharing_before_open = SharingSnapshot::take();
    // SAFETY: the program has passed path, mode and stream to freopen(3).
    unsafe {
        if !file.is_null() && cookie::is_stub_stream(file) {
            libc::fflush(file);
        }
        // Hooks see neither the close nor the open in freopen(3), so both numbers are forgotten.
        forget_stream_descriptor(file);
        let file = FREOPEN.get()(path, mode, file);
        forget_stream_descriptor(file);
        if file.is_null() || !is_stub(libc::fileno(file)) {
            return file;
        }
        finish_freopen_of_stub(file, mode, &sharing_before_open)
    }
}

/// Finishes freopen(3) that has opened a stub, an empty file with its bytes in firnd. Only a standard stream (`stdin`,
/// `stdout`, `stderr`) can become the stream of a stub, because its variable can be set. Other streams are closed, and
/// the call fails.
///
/// # Safety
/// The C library has just reopened the stream with `mode`.
unsafe fn finish_freopen_of_stub(
    file: *mut FILE,
    mode: *const c_char,
    sharing_before_open: &SharingSnapshot,
) -> *mut FILE {
    // SAFETY: the stream is open, and the mode is a C string.
    unsafe {
        let fd = libc::fileno(file);
        let variable = cookie::standard_stream_variable(fd).filter(|variable| **variable == file);
        // The C library has accepted the mode, so the default is never used.
        let flags = fopen_flags(mode).unwrap_or(libc::O_RDWR);
        let registered = register_opened_fd(fd, flags, sharing_before_open, OpenedBy::Program);
        let errno = match (registered, variable) {
            (NewDescriptor::Stub, Some(variable)) => {
                cookie::replace_standard_stream(fd);
                return *variable;
            }
            (NewDescriptor::UnusableStub(errno), _) => errno,
            // freopen(3) must return the old stream, and the stream of a stub would be another one.
            _ => libc::EOPNOTSUPP,
        };
        forget_stream_descriptor(file);
        FCLOSE.get()(file);
        fail_with_null(errno)
    }
}

unsafe fn do_fclose(file: *mut FILE) -> c_int {
    // SAFETY: the program has passed the open stream to fclose(3).
    unsafe {
        // A stream of `cookie` closes its descriptor by the hook of close(2).
        if file.is_null() || !cookie::is_stub_stream(file) {
            forget_stream_descriptor(file);
        }
        FCLOSE.get()(file)
    }
}

/// Forgets the descriptor of a stream that is about to be closed or was just opened. Before the end of standard error
/// it prints the report.
///
/// # Safety
/// `file` is null or an open stream.
unsafe fn forget_stream_descriptor(file: *mut FILE) {
    if file.is_null() {
        return;
    }
    // SAFETY: the pointer is not null, so it is an open stream.
    let fd = unsafe { libc::fileno(file) };
    if fd == libc::STDERR_FILENO {
        summary::print_report();
    }
    if descriptor_tag(fd) != tag::ORDINARY && descriptor_tag(fd) != tag::INTERNAL {
        forget_closed_descriptor(fd);
    }
}
