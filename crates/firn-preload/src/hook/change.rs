//! Hooks of calls that change or sync a file or set its times.
//!
//! A *stub* is an empty file with its bytes in the daemon firnd. The kernel would change or sync the empty file, so
//! firnd serves these calls. The kernel sets the times of stubs. Before that, firnd sets the times of earlier writes,
//! so that it does not later overwrite those of the program.

use std::ffi::{c_char, c_int, c_uint};
use std::mem::MaybeUninit;
use std::os::fd::FromRawFd;

use firn_direct::syscall::Descriptor;
use libc::off64_t;

use super::{export, forward};
use crate::real::{
    FALLOCATE, FDATASYNC, FSYNC, FTRUNCATE, FUTIMENS, FUTIMES, FUTIMESAT, LUTIMES, POSIX_FALLOCATE,
    SYNC_FILE_RANGE, TRUNCATE, UTIME, UTIMENSAT, UTIMES,
};
use crate::stub;
use crate::sys::{self, Identity, fail, syscall};
use crate::table::{descriptor_tag, tag};
use crate::trees;

export! {
    ftruncate ftruncate64 = do_ftruncate(fd: c_int, size: off64_t) -> c_int;
    truncate truncate64 = do_truncate(path: *const c_char, size: off64_t) -> c_int;
    fallocate fallocate64 = do_fallocate(
        fd: c_int,
        mode: c_int,
        offset: off64_t,
        len: off64_t,
    ) -> c_int;
    posix_fallocate posix_fallocate64 = do_posix_fallocate(
        fd: c_int,
        offset: off64_t,
        len: off64_t,
    ) -> c_int;
    fsync = do_fsync(fd: c_int) -> c_int;
    fdatasync = do_fdatasync(fd: c_int) -> c_int;
    sync_file_range = do_sync_file_range(
        fd: c_int,
        offset: off64_t,
        len: off64_t,
        flags: c_uint,
    ) -> c_int;
    futimens = do_futimens(fd: c_int, times: *const libc::timespec) -> c_int;
    utimensat = do_utimensat(
        dir: c_int,
        path: *const c_char,
        times: *const libc::timespec,
        flags: c_int,
    ) -> c_int;
    futimes = do_futimes(fd: c_int, times: *const libc::timeval) -> c_int;
    futimesat = do_futimesat(dir: c_int, path: *const c_char, times: *const libc::timeval) -> c_int;
    utimes = do_utimes(path: *const c_char, times: *const libc::timeval) -> c_int;
    lutimes = do_lutimes(path: *const c_char, times: *const libc::timeval) -> c_int;
    utime = do_utime(path: *const c_char, times: *const libc::utimbuf) -> c_int;
}

/// Turns a result into that of a function of the C library: 0, or -1 with errno.
fn c_result(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => fail(errno),
    }
}

unsafe fn do_ftruncate(fd: c_int, size: off64_t) -> c_int {
    if descriptor_tag(fd) == tag::STUB
        && let Some(result) = stub::truncate_stub(fd, size)
    {
        return c_result(result);
    }
    forward!(FTRUNCATE(fd, size))
}

unsafe fn do_truncate(path: *const c_char, size: off64_t) -> c_int {
    if find_file_on_tree(libc::AT_FDCWD, path, 0).is_some() {
        // SAFETY: the program has passed the path to truncate(2).
        match unsafe { truncate_stub_at_path(path, size) } {
            Ok(()) => return 0,
            Err(libc::ENODEV) => {}
            Err(errno) => return fail(errno),
        }
    }
    forward!(TRUNCATE(path, size))
}

/// truncate(2) of a stub (an empty file; firnd has its bytes). The error is ENODEV if the path leads to no stub.
///
/// The stub is opened with O_PATH. The close of any other descriptor would end the locks (fcntl(2)) that the program
/// holds on the file by another descriptor.
///
/// # Safety
/// `path` is a C string.
unsafe fn truncate_stub_at_path(path: *const c_char, size: off64_t) -> Result<(), c_int> {
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: the kernel reads the path, which is a C string.
    let result = unsafe { syscall!(libc::SYS_openat, libc::AT_FDCWD, path, flags, 0usize) };
    if result < 0 {
        return Err(-result as c_int);
    }
    let fd = result as c_int;
    // SAFETY: the descriptor was just opened, and only this value closes it.
    let _closed_at_the_end = unsafe { Descriptor::from_raw_fd(fd) };
    // SAFETY: the path is a C string.
    unsafe { check_may_write(fd, path)? };
    let (identity, _) = sys::identity(fd).ok_or(libc::ENODEV)?;
    if !stub::register_open(fd, identity.device, libc::O_WRONLY)? {
        return Err(libc::ENODEV);
    }
    let truncated = stub::truncate_stub(fd, size);
    // Informs firnd of the close; its result is not that of truncate(2).
    stub::close_stub(fd);
    truncated.unwrap_or(Err(libc::ENODEV))
}

/// Checks that the process may write an open file, as the kernel does before truncate(2).
///
/// # Safety
/// `path`, which the file was opened by, is a C string.
unsafe fn check_may_write(fd: c_int, path: *const c_char) -> Result<(), c_int> {
    let flags = libc::AT_EACCESS | libc::AT_EMPTY_PATH;
    // SAFETY: the arguments are a descriptor, an empty C string and numbers.
    let mut result = unsafe { syscall!(libc::SYS_faccessat2, fd, c"".as_ptr(), libc::W_OK, flags) };
    if result == -(libc::ENOSYS as isize) {
        // Linux before 5.8 does not have faccessat2(2).
        // SAFETY: the kernel reads the path, which is a C string.
        result = unsafe { syscall!(libc::SYS_faccessat, libc::AT_FDCWD, path, libc::W_OK) };
    }
    match result {
        0.. => Ok(()),
        errno => Err(-errno as c_int),
    }
}

unsafe fn do_fallocate(fd: c_int, mode: c_int, offset: off64_t, len: off64_t) -> c_int {
    if descriptor_tag(fd) == tag::STUB
        && let Some(result) = stub::allocate_range(fd, mode, offset, len)
    {
        return c_result(result);
    }
    forward!(FALLOCATE(fd, mode, offset, len))
}

unsafe fn do_posix_fallocate(fd: c_int, offset: off64_t, len: off64_t) -> c_int {
    if descriptor_tag(fd) == tag::STUB
        && let Some(result) = stub::allocate_range(fd, 0, offset, len)
    {
        return result.err().unwrap_or(0);
    }
    forward!(POSIX_FALLOCATE(fd, offset, len))
}

unsafe fn do_fsync(fd: c_int) -> c_int {
    if descriptor_tag(fd) == tag::STUB
        && let Some(result) = stub::sync_stub(fd, false)
    {
        return c_result(result);
    }
    forward!(FSYNC(fd))
}

unsafe fn do_fdatasync(fd: c_int) -> c_int {
    if descriptor_tag(fd) == tag::STUB
        && let Some(result) = stub::sync_stub(fd, true)
    {
        return c_result(result);
    }
    forward!(FDATASYNC(fd))
}

unsafe fn do_sync_file_range(fd: c_int, offset: off64_t, len: off64_t, flags: c_uint) -> c_int {
    if descriptor_tag(fd) == tag::STUB {
        // sync_file_range(2) promises less than firnd does for each held byte.
        return 0;
    }
    forward!(SYNC_FILE_RANGE(fd, offset, len, flags))
}

// ---- times ---------------------------------------------------------------------------------------

/// Returns the identity of the file at a path, if it is a regular file on the device of a stub tree: a directory of
/// empty files with their bytes in firnd. `None` for any other file, or if the path leads to none.
pub(super) fn find_file_on_tree(dir: c_int, path: *const c_char, flags: c_int) -> Option<Identity> {
    if !trees::has_trees() || path.is_null() {
        return None;
    }
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let mask = libc::STATX_TYPE | libc::STATX_INO;
    // SAFETY: the kernel reads the path, which the program has passed to the hook, and fills a local variable.
    let result = unsafe { syscall!(libc::SYS_statx, dir, path, flags, mask, stat.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    // SAFETY: all fields are numbers, for which zero is valid.
    let stat = unsafe { stat.assume_init() };
    let device = sys::device_number(stat.stx_dev_major, stat.stx_dev_minor);
    let is_regular = u32::from(stat.stx_mode) & libc::S_IFMT == libc::S_IFREG;
    let inode = stat.stx_ino;
    (is_regular && trees::has_stubs(device)).then_some(Identity { device, inode })
}

/// Makes firnd set the times of earlier writes now. It is called before the program sets a time.
fn store_earlier_times(fd: c_int) {
    if descriptor_tag(fd) == tag::STUB {
        // The answer is not needed: firnd sets the times of earlier writes before it answers.
        let _ = stub::request_attr(fd);
    }
}

fn store_earlier_times_at_path(dir: c_int, path: *const c_char, flags: c_int) {
    if path.is_null() {
        store_earlier_times(dir);
    } else if let Some(file) = find_file_on_tree(dir, path, flags) {
        // As above.
        let _ = stub::request_attr_at_path(dir, path, flags, Some(file));
    }
}

unsafe fn do_futimens(fd: c_int, times: *const libc::timespec) -> c_int {
    store_earlier_times(fd);
    forward!(FUTIMENS(fd, times))
}

unsafe fn do_utimensat(
    dir: c_int,
    path: *const c_char,
    times: *const libc::timespec,
    flags: c_int,
) -> c_int {
    store_earlier_times_at_path(dir, path, flags);
    forward!(UTIMENSAT(dir, path, times, flags))
}

unsafe fn do_futimes(fd: c_int, times: *const libc::timeval) -> c_int {
    store_earlier_times(fd);
    forward!(FUTIMES(fd, times))
}

unsafe fn do_futimesat(dir: c_int, path: *const c_char, times: *const libc::timeval) -> c_int {
    store_earlier_times_at_path(dir, path, 0);
    forward!(FUTIMESAT(dir, path, times))
}

unsafe fn do_utimes(path: *const c_char, times: *const libc::timeval) -> c_int {
    store_earlier_times_at_path(libc::AT_FDCWD, path, 0);
    forward!(UTIMES(path, times))
}

unsafe fn do_lutimes(path: *const c_char, times: *const libc::timeval) -> c_int {
    store_earlier_times_at_path(libc::AT_FDCWD, path, libc::AT_SYMLINK_NOFOLLOW);
    forward!(LUTIMES(path, times))
}

unsafe fn do_utime(path: *const c_char, times: *const libc::utimbuf) -> c_int {
    store_earlier_times_at_path(libc::AT_FDCWD, path, 0);
    forward!(UTIME(path, times))
}
