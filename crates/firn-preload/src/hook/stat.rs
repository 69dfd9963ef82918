//! Hooks of the stat family. The kernel has all attributes of a stub (an empty file; firnd has its bytes) except its
//! size, so these hooks ask firnd for the size. For a file of a mount, the kernel itself asks firnd.

use std::ffi::{c_char, c_int};

use libc::stat64 as Stat;

use super::{export, forward};
use crate::devices;
use crate::real::{FSTAT, FSTATAT, FXSTAT, FXSTATAT, LSTAT, LXSTAT, STAT, STATX, XSTAT};
use crate::stub::{self, Attr};
use crate::sys::{self, Identity, fail};
use crate::table::{descriptor_tag, tag};
use crate::trees;

export! {
    stat stat64 = do_stat(path: *const c_char, to: *mut Stat) -> c_int;
    lstat lstat64 = do_lstat(path: *const c_char, to: *mut Stat) -> c_int;
    fstat fstat64 = do_fstat(fd: c_int, to: *mut Stat) -> c_int;
    fstatat fstatat64 = do_fstatat(
        dir: c_int,
        path: *const c_char,
        to: *mut Stat,
        flags: c_int,
    ) -> c_int;
    __xstat __xstat64 = do_xstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int;
    __lxstat __lxstat64 = do_lxstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int;
    __fxstat __fxstat64 = do_fxstat(version: c_int, fd: c_int, to: *mut Stat) -> c_int;
    __fxstatat __fxstatat64 = do_fxstatat(
        version: c_int,
        dir: c_int,
        path: *const c_char,
        to: *mut Stat,
        flags: c_int,
    ) -> c_int;
    statx = do_statx(
        dir: c_int,
        path: *const c_char,
        flags: c_int,
        mask: u32,
        to: *mut libc::statx,
    ) -> c_int;
}

/// The arguments by which a call names its file.
#[derive(Clone, Copy)]
struct PathArgs {
    dir: c_int,
    path: *const c_char,
    flags: c_int,
}

impl PathArgs {
    fn from_path(path: *const c_char, flags: c_int) -> Self {
        Self {
            dir: libc::AT_FDCWD,
            path,
            flags,
        }
    }

    fn from_fd(fd: c_int) -> Self {
        Self {
            dir: fd,
            path: c"".as_ptr(),
            flags: libc::AT_EMPTY_PATH,
        }
    }

    /// Asks firnd for the attributes of the file, if it is the stub with this identity.
    fn request_attr(self, expected: Identity) -> Option<Result<Attr, c_int>> {
        let path = if self.path.is_null() {
            c"".as_ptr()
        } else {
            self.path
        };
        // Without AT_EMPTY_PATH only the kernel reads the path: it returns EFAULT for a bad address.
        // SAFETY: the kernel has found a file by this path, so it is a C string.
        let names_descriptor = self.flags & libc::AT_EMPTY_PATH != 0 && unsafe { *path } == 0;
        if names_descriptor && descriptor_tag(self.dir) == tag::STUB {
            return stub::request_attr(self.dir);
        }
        stub::request_attr_at_path(self.dir, path, self.flags, Some(expected))
    }
}

/// Corrects the size of a stub (an empty file; firnd has its bytes) in the kernel's answer to a call of the stat
/// family, and returns the result of the call. `repeat_call` repeats the kernel's call, if firnd has just set the
/// times. Any other file's answer stays as it is.
///
/// # Safety
/// If `result` is 0, the kernel has filled `to`.
unsafe fn correct_size(
    result: c_int,
    to: *mut Stat,
    name: PathArgs,
    repeat_call: impl Fn() -> c_int,
) -> c_int {
    if result != 0 || !trees::has_trees() {
        return result;
    }
    // SAFETY: `result` is 0, so the kernel has filled the program's structure.
    let stat = unsafe { &mut *to };
    let device = sys::device_number(libc::major(stat.st_dev), libc::minor(stat.st_dev));
    if stat.st_mode & libc::S_IFMT != libc::S_IFREG || !trees::has_stubs(device) {
        return result;
    }
    let inode = stat.st_ino;
    match name.request_attr(Identity { device, inode }) {
        Some(Ok(attr)) => {
            if attr.has_new_times && repeat_call() != 0 {
                return -1;
            }
            stat.st_size = attr.size as i64;
            stat.st_blocks = attr.blocks as i64;
            0
        }
        Some(Err(errno)) => fail(errno),
        None => result,
    }
}

/// Makes a call of the stat family, and corrects the size in the structure that it has filled.
macro_rules! stat_with_size {
    ($name:expr, $to:ident, $call:expr) => {{
        // SAFETY: the program has passed these arguments to the hook.
        let call_kernel = || unsafe { $call };
        let result = call_kernel();
        // SAFETY: if the result is 0, the call has filled the program's structure.
        unsafe { correct_size(result, $to, $name, call_kernel) }
    }};
}

unsafe fn do_stat(path: *const c_char, to: *mut Stat) -> c_int {
    stat_with_size!(PathArgs::from_path(path, 0), to, STAT.get()(path, to))
}

unsafe fn do_lstat(path: *const c_char, to: *mut Stat) -> c_int {
    stat_with_size!(
        PathArgs::from_path(path, libc::AT_SYMLINK_NOFOLLOW),
        to,
        LSTAT.get()(path, to)
    )
}

unsafe fn do_fstat(fd: c_int, to: *mut Stat) -> c_int {
    stat_with_size!(PathArgs::from_fd(fd), to, FSTAT.get()(fd, to))
}

unsafe fn do_fstatat(dir: c_int, path: *const c_char, to: *mut Stat, flags: c_int) -> c_int {
    stat_with_size!(
        PathArgs { dir, path, flags },
        to,
        FSTATAT.get()(dir, path, to, flags)
    )
}

unsafe fn do_xstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int {
    stat_with_size!(
        PathArgs::from_path(path, 0),
        to,
        XSTAT.get()(version, path, to)
    )
}

unsafe fn do_lxstat(version: c_int, path: *const c_char, to: *mut Stat) -> c_int {
    stat_with_size!(
        PathArgs::from_path(path, libc::AT_SYMLINK_NOFOLLOW),
        to,
        LXSTAT.get()(version, path, to)
    )
}

unsafe fn do_fxstat(version: c_int, fd: c_int, to: *mut Stat) -> c_int {
    stat_with_size!(PathArgs::from_fd(fd), to, FXSTAT.get()(version, fd, to))
}

unsafe fn do_fxstatat(
    version: c_int,
    dir: c_int,
    path: *const c_char,
    to: *mut Stat,
    flags: c_int,
) -> c_int {
    stat_with_size!(
        PathArgs { dir, path, flags },
        to,
        FXSTATAT.get()(version, dir, path, to, flags)
    )
}

/// statx(2). firnd is asked for the size of a stub (an empty file; firnd has its bytes). For a file of a mount, a
/// second call with the size in its mask makes the kernel ask firnd.
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
    let device = sys::device_number(major, minor);
    if mask & libc::STATX_SIZE == 0
        && flags & libc::AT_STATX_DONT_SYNC == 0
        && devices::is_known_mount(device)
    {
        // After writes by direct access the kernel's size is out of date. A call that does not ask for the size would
        // get it, marked as valid.
        let mask_with_size = mask | libc::STATX_SIZE | libc::STATX_BLOCKS;
        return forward!(STATX(dir, path, flags, mask_with_size, to));
    }
    let is_regular = u32::from(mode) & libc::S_IFMT == libc::S_IFREG;
    if !trees::has_trees() || !is_regular || !trees::has_stubs(device) {
        return result;
    }
    let name = PathArgs { dir, path, flags };
    match name.request_attr(Identity { device, inode }) {
        // SAFETY: the program has passed the structure to statx(2), and the kernel has filled it.
        Some(Ok(attr)) => unsafe {
            if attr.has_new_times && STATX.get()(dir, path, flags, mask, to) != 0 {
                return -1;
            }
            (*to).stx_size = attr.size;
            (*to).stx_blocks = attr.blocks;
            0
        },
        Some(Err(errno)) => fail(errno),
        None => result,
    }
}
