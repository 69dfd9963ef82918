//! Hooks of the stat family. The kernel has all attributes of a stub except its size, so firnd is asked for the size.
//! For a file of a mount the kernel asks firnd itself, if the call wants the size.

use std::ffi::{c_char, c_int};

use libc::stat64 as Stat;

use super::{export, forward};
use crate::devices;
use crate::real::{FSTAT, FSTATAT, FXSTAT, FXSTATAT, LSTAT, LXSTAT, STAT, STATX, XSTAT};
use crate::stub::{self, Attr};
use crate::sys::with_errno;
use crate::table::{descriptor_tag, tag};
use crate::trees;

export! { stat stat64 = do_stat(path: *const c_char, to: *mut Stat) -> c_int }
export! { lstat lstat64 = do_lstat(path: *const c_char, to: *mut Stat) -> c_int }
export! { fstat fstat64 = do_fstat(fd: c_int, to: *mut Stat) -> c_int }
export! { fstatat fstatat64 =
do_fstatat(dir: c_int, path: *const c_char, to: *mut Stat, flags: c_int) -> c_int }
export! { __xstat __xstat64 = do_xstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int }
export! { __lxstat __lxstat64 = do_lxstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int }
export! { __fxstat __fxstat64 = do_fxstat(version: c_int, fd: c_int, to: *mut Stat) -> c_int }
export! { __fxstatat __fxstatat64 = do_fxstatat(
version: c_int, dir: c_int, path: *const c_char, to: *mut Stat, flags: c_int) -> c_int }
export! { statx = do_statx(
dir: c_int, path: *const c_char, flags: c_int, mask: u32, to: *mut libc::statx) -> c_int }

/// The arguments by which a call names its file.
#[derive(Clone, Copy)]
struct FileName {
    dir: c_int,
    path: *const c_char,
    flags: c_int,
}

impl FileName {
    fn path(path: *const c_char, flags: c_int) -> Self {
        Self {
            dir: libc::AT_FDCWD,
            path,
            flags,
        }
    }

    fn fd(fd: c_int) -> Self {
        Self {
            dir: fd,
            path: c"".as_ptr(),
            flags: libc::AT_EMPTY_PATH,
        }
    }

    /// Asks firnd for the attributes of the file, if it is the stub with this inode number on this device.
    fn attr(self, device: u64, inode: u64) -> Option<Result<Attr, c_int>> {
        // SAFETY: the kernel has found a file by this path, so it is a C string.
        let is_fd = self.flags & libc::AT_EMPTY_PATH != 0
            && (self.path.is_null() || unsafe { *self.path } == 0);
        if is_fd && descriptor_tag(self.dir) == tag::STUB {
            return stub::request_attr(self.dir);
        }
        stub::request_attr_at_path(
            self.dir,
            if self.path.is_null() {
                c"".as_ptr()
            } else {
                self.path
            },
            self.flags,
            Some((device, inode)),
        )
    }
}

/// Corrects the size of a stub in the kernel's answer. `again` repeats the kernel's call, if firnd has just set the
/// times.
///
/// # Safety
/// If `result` is 0, the kernel has filled `to`.
unsafe fn correct_size(
    result: c_int,
    to: *mut Stat,
    named: FileName,
    again: impl Fn() -> c_int,
) -> c_int {
    if result != 0 || !trees::has_trees() {
        return result;
    }
    // SAFETY: `result` is 0, so the kernel has filled the program's structure.
    let stat = unsafe { &mut *to };
    let device = u64::from(libc::major(stat.st_dev)) << 32 | u64::from(libc::minor(stat.st_dev));
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG || !trees::has_stubs(device) {
        return result;
    }
    match named.attr(device, stat.st_ino) {
        Some(Ok(attr)) => {
            if attr.has_new_times && again() != 0 {
                return -1;
            }
            stat.st_size = attr.size as i64;
            stat.st_blocks = attr.blocks as i64;
            0
        }
        Some(Err(errno)) => with_errno(-(errno as isize)) as c_int,
        None => result,
    }
}

macro_rules! sized {
    ($named:expr, $to:ident, $call:expr) => {{
        // SAFETY: the program has passed these arguments to the hook.
        let ask = || unsafe { $call };
        let result = ask();
        // SAFETY: if the result is 0, the call has filled the program's structure.
        unsafe { correct_size(result, $to, $named, ask) }
    }};
}

unsafe fn do_stat(path: *const c_char, to: *mut Stat) -> c_int {
    sized!(FileName::path(path, 0), to, STAT.get()(path, to))
}

unsafe fn do_lstat(path: *const c_char, to: *mut Stat) -> c_int {
    sized!(
        FileName::path(path, libc::AT_SYMLINK_NOFOLLOW),
        to,
        LSTAT.get()(path, to)
    )
}

unsafe fn do_fstat(fd: c_int, to: *mut Stat) -> c_int {
    sized!(FileName::fd(fd), to, FSTAT.get()(fd, to))
}

unsafe fn do_fstatat(dir: c_int, path: *const c_char, to: *mut Stat, flags: c_int) -> c_int {
    sized!(
        FileName { dir, path, flags },
        to,
        FSTATAT.get()(dir, path, to, flags)
    )
}

unsafe fn do_xstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int {
    sized!(FileName::path(path, 0), to, XSTAT.get()(version, path, to))
}

unsafe fn do_lxstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int {
    sized!(
        FileName::path(path, libc::AT_SYMLINK_NOFOLLOW),
        to,
        LXSTAT.get()(version, path, to)
    )
}

unsafe fn do_fxstat(version: c_int, fd: c_int, to: *mut Stat) -> c_int {
    sized!(FileName::fd(fd), to, FXSTAT.get()(version, fd, to))
}

unsafe fn do_fxstatat(
    version: c_int,
    dir: c_int,
    path: *const c_char,
    to: *mut Stat,
    flags: c_int,
) -> c_int {
    sized!(
        FileName { dir, path, flags },
        to,
        FXSTATAT.get()(version, dir, path, to, flags)
    )
}

unsafe fn do_statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: u32,
    to: *mut libc::statx,
) -> c_int {
    let result = forward!(STATX(dir, path, flags, mask, to));
    if result != 0 {
        return result;
    }
    // SAFETY: statx(2) has succeeded, so the kernel has filled the program's structure.
    let (major, minor, mode, inode) = unsafe {
        (
            (*to).stx_dev_major,
            (*to).stx_dev_minor,
            (*to).stx_mode,
            (*to).stx_ino,
        )
    };
    let device = u64::from(major) << 32 | u64::from(minor);
    if mask & libc::STATX_SIZE == 0
        && flags & libc::AT_STATX_DONT_SYNC == 0
        && devices::is_known_mount(device)
    {
        // After writes by direct access the kernel's size is out of date. A call that does not ask for the size would
        // get it, marked as valid.
        return forward!(STATX(
            dir,
            path,
            flags,
            mask | libc::STATX_SIZE | libc::STATX_BLOCKS,
            to,
        ));
    }
    if !trees::has_trees() {
        return result;
    }
    if u32::from(mode) & libc::S_IFMT != libc::S_IFREG || !trees::has_stubs(device) {
        return result;
    }
    match (FileName { dir, path, flags }).attr(device, inode) {
        // SAFETY: the program has passed the structure to statx(2), and the kernel has filled it.
        Some(Ok(attr)) => unsafe {
            if attr.has_new_times && STATX.get()(dir, path, flags, mask, to) != 0 {
                return -1;
            }
            (*to).stx_size = attr.size;
            (*to).stx_blocks = attr.blocks;
            0
        },
        Some(Err(errno)) => with_errno(-(errno as isize)) as c_int,
        None => result,
    }
}
