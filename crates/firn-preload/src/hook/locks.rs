//! Hooks of file locks: flock(2), lockf(3), and the locks of fcntl(2). Ranges that depend on an offset or size which
//! the kernel does not know are computed here.
//!
//! A range may be relative to the offset or to the end of the file. The kernel does not know a *private* offset, which
//! this process keeps. It never knows the end of a *stub*, an empty file with its bytes in firnd. So the hooks compute
//! such a range.
//!
//! The kernel keeps locks of stubs on this host only. If other hosts use the files too, such locks would not exclude
//! them. Then they are refused with ENOLCK.

use std::ffi::{c_int, c_short};

use libc::off64_t;

use super::{export, forward};
use crate::offset;
use crate::probe;
use crate::real::{FCNTL, FLOCK, LOCKF};
use crate::stub;
use crate::sys::{self, fail};
use crate::table::{descriptor_tag, tag};
use crate::trees;

export! {
    flock = do_flock(fd: c_int, operation: c_int) -> c_int;
    lockf lockf64 = do_lockf(fd: c_int, command: c_int, len: off64_t) -> c_int;
}

/// Whether a descriptor is a stub whose locks are refused, because other hosts use the file too.
fn has_refused_locks(fd: c_int) -> bool {
    descriptor_tag(fd) == tag::STUB
        && sys::identity(fd).is_some_and(|(identity, _)| trees::refuses_locks(identity.device))
}

fn refuse_lock() -> c_int {
    fail(libc::ENOLCK)
}

unsafe fn do_flock(fd: c_int, operation: c_int) -> c_int {
    if operation & libc::LOCK_UN == 0 && has_refused_locks(fd) {
        return refuse_lock();
    }
    forward!(FLOCK(fd, operation))
}

/// Whether a command of fcntl(2) takes a lock of a range.
pub(super) fn is_range_lock_command(command: c_int) -> bool {
    matches!(
        command,
        libc::F_GETLK
            | libc::F_SETLK
            | libc::F_SETLKW
            | libc::F_OFD_GETLK
            | libc::F_OFD_SETLK
            | libc::F_OFD_SETLKW
    )
}

/// fcntl(2) that locks, unlocks or tests a byte range, of a descriptor that the library serves. If the range is
/// relative to an offset or size that the kernel does not know, the hook passes the range on with its absolute start.
///
/// # Safety
/// The same as for fcntl(2).
pub(super) unsafe fn lock_range(fd: c_int, command: c_int, arg: usize) -> c_int {
    let program_lock = arg as *mut libc::flock;
    // For a bad address the kernel returns EFAULT.
    if !probe::is_readable(program_lock.cast(), size_of::<libc::flock>()) {
        return forward!(FCNTL(fd, command, arg));
    }
    // SAFETY: the program has passed a lock to fcntl(2), and it was just found readable.
    let mut lock = unsafe { program_lock.read_unaligned() };
    if c_int::from(lock.l_type) != libc::F_UNLCK && has_refused_locks(fd) {
        return refuse_lock();
    }
    let range_base = match find_range_base(fd, c_int::from(lock.l_whence)) {
        Ok(Some(offset)) => offset,
        Ok(None) => return forward!(FCNTL(fd, command, arg)),
        Err(errno) => return fail(errno),
    };
    let Some(start) = lock.l_start.checked_add(range_base as i64) else {
        return fail(libc::EOVERFLOW);
    };
    lock.l_start = start;
    lock.l_whence = libc::SEEK_SET as c_short;
    let result = forward!(FCNTL(fd, command, &raw mut lock as usize));
    if result == 0 && matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
        // SAFETY: the program has passed the lock to be written.
        unsafe { store_found_lock(program_lock, lock) };
    }
    result
}

/// Stores the answer of F_GETLK in the program's lock. If the range is not locked, fcntl(2) changes only the type.
///
/// # Safety
/// `program_lock` may be written.
unsafe fn store_found_lock(program_lock: *mut libc::flock, found: libc::flock) {
    // SAFETY: the caller keeps this promise.
    unsafe {
        if c_int::from(found.l_type) == libc::F_UNLCK {
            (&raw mut (*program_lock).l_type).write_unaligned(found.l_type);
        } else {
            program_lock.write_unaligned(found);
        }
    }
}

/// Returns the offset that a range is relative to, if the kernel does not know it.
fn find_range_base(fd: c_int, whence: c_int) -> Result<Option<u64>, c_int> {
    match whence {
        libc::SEEK_CUR => Ok(offset::private_offset(fd)),
        libc::SEEK_END if descriptor_tag(fd) == tag::STUB => stub::request_attr(fd)
            .map(|attr| attr.map(|attr| attr.size))
            .transpose(),
        libc::SEEK_END => {
            sys::refresh_size(fd);
            Ok(None)
        }
        _ => Ok(None),
    }
}

/// lockf(3), whose range begins at the offset. If this process keeps the offset, the hook makes the call as fcntl(2).
unsafe fn do_lockf(fd: c_int, command: c_int, len: off64_t) -> c_int {
    if command != libc::F_ULOCK && has_refused_locks(fd) {
        return refuse_lock();
    }
    // The offset, if this process keeps it instead of the kernel.
    let private_offset = offset::private_offset(fd).filter(|_| descriptor_tag(fd) != tag::ORDINARY);
    let Some(start) = private_offset else {
        // The kernel knows the offset.
        return forward!(LOCKF(fd, command, len));
    };
    let (lock_type, fcntl_command) = match command {
        libc::F_ULOCK => (libc::F_UNLCK, libc::F_SETLK),
        libc::F_LOCK => (libc::F_WRLCK, libc::F_SETLKW),
        libc::F_TLOCK => (libc::F_WRLCK, libc::F_SETLK),
        libc::F_TEST => (libc::F_RDLCK, libc::F_GETLK),
        _ => return fail(libc::EINVAL),
    };
    let mut lock = libc::flock {
        l_type: lock_type as c_short,
        l_whence: libc::SEEK_SET as c_short,
        l_start: start as i64,
        l_len: len,
        l_pid: 0,
    };
    let result = forward!(FCNTL(fd, fcntl_command, &raw mut lock as usize));
    // lockf(3) returns EACCES if F_TEST finds a lock of another process.
    let is_locked_by_other =
        c_int::from(lock.l_type) != libc::F_UNLCK && lock.l_pid as u32 != sys::pid();
    if result == 0 && command == libc::F_TEST && is_locked_by_other {
        return fail(libc::EACCES);
    }
    result
}
