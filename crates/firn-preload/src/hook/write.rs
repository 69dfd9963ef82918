//! write(2) and its kin.

use std::ffi::{c_int, c_void};

use libc::{iovec, off64_t, size_t, ssize_t};

use super::{export, parts_of};
use crate::real::{PWRITE, PWRITEV, PWRITEV2, WRITE, WRITEV};
use crate::report::Call;
use crate::stub;
use crate::sys::told;
use crate::table::{tag, tag_of};
use crate::writer::{self, Ticket, Went};

export! { write __write = do_write(fd: c_int, data: *const c_void, len: size_t) -> ssize_t }
export! { writev = do_writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t }
export! { pwrite pwrite64 __pwrite64 =
do_pwrite(fd: c_int, data: *const c_void, len: size_t, offset: off64_t) -> ssize_t }
export! { pwritev pwritev64 =
do_pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> ssize_t }
export! { pwritev2 pwritev64v2 =
do_pwritev2(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t }

#[inline(always)]
unsafe fn do_write(fd: c_int, data: *const c_void, len: size_t) -> ssize_t {
    if matches!(tag_of(fd), tag::WRITER | tag::STUB) {
        // SAFETY: the caller's promise.
        return unsafe { write_ours(fd, data, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { WRITE.get()(fd, data, len) }
}

/// A write to a descriptor of ours.
///
/// # Safety
/// The parts are the program's.
unsafe fn to(fd: c_int, parts: &[iovec], at: Option<u64>, call: Call) -> Went {
    if tag_of(fd) == tag::STUB {
        // SAFETY: the caller's promise.
        return unsafe { stub::write(fd, parts, at, false, call) };
    }
    writer::write(fd, parts, at, call)
}

#[inline(never)]
unsafe fn write_ours(fd: c_int, data: *const c_void, len: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    match unsafe { writer::write_on(fd, data, len, None, Call::Write) } {
        Some(Went::Past(result)) if result >= 0 => result,
        // SAFETY: the caller's promise.
        went => unsafe { write_slowly(fd, data, len, went) },
    }
}

/// A write that is not a usual one, or went as it did.
#[inline(never)]
unsafe fn write_slowly(fd: c_int, data: *const c_void, len: size_t, went: Option<Went>) -> ssize_t {
    let part = [iovec {
        iov_base: data.cast_mut(),
        iov_len: len,
    }];
    // SAFETY: the caller's promise.
    match went.unwrap_or_else(|| unsafe { to(fd, &part, None, Call::Write) }) {
        Went::Past(result) => told(result),
        Went::Kernel(ticket) => {
            // SAFETY: the caller's promise.
            let result = unsafe { WRITE.get()(fd, data, len) };
            ticket.done();
            result
        }
    }
}

#[inline(always)]
unsafe fn do_writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    if matches!(tag_of(fd), tag::WRITER | tag::STUB) {
        // SAFETY: the caller's promise.
        return unsafe { writev_ours(fd, parts, count) };
    }
    // SAFETY: the caller's promise.
    unsafe { WRITEV.get()(fd, parts, count) }
}

#[inline(never)]
unsafe fn writev_ours(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's promise.
    let went = match unsafe { parts_of(parts, count) } {
        // SAFETY: the caller's promise.
        Some(parts) => unsafe { to(fd, parts, None, Call::Writev) },
        // Numbers of vectors that the kernel refuses.
        None if tag_of(fd) == tag::STUB => Went::Kernel(Ticket::NONE),
        None => Went::Kernel(writer::before_kernel(fd, Call::Writev)),
    };
    match went {
        Went::Past(result) => told(result),
        Went::Kernel(ticket) => {
            // SAFETY: the caller's promise.
            let result = unsafe { WRITEV.get()(fd, parts, count) };
            ticket.done();
            result
        }
    }
}

#[inline(always)]
unsafe fn do_pwrite(fd: c_int, data: *const c_void, len: size_t, offset: off64_t) -> ssize_t {
    if matches!(tag_of(fd), tag::WRITER | tag::STUB) && offset >= 0 {
        // SAFETY: the caller's promise.
        if let Went::Past(result) = unsafe { pwrite_ours(fd, data, len, offset as u64) } {
            return told(result);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { PWRITE.get()(fd, data, len, offset) }
}

#[inline(never)]
unsafe fn pwrite_ours(fd: c_int, data: *const c_void, len: size_t, offset: u64) -> Went {
    // SAFETY: the caller's promise.
    let went = unsafe { writer::write_on(fd, data, len, Some(offset), Call::Pwrite) };
    let part = [iovec {
        iov_base: data.cast_mut(),
        iov_len: len,
    }];
    // SAFETY: the caller's promise.
    went.unwrap_or_else(|| unsafe { to(fd, &part, Some(offset), Call::Pwrite) })
}

#[inline(always)]
unsafe fn do_pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    if matches!(tag_of(fd), tag::WRITER | tag::STUB) && offset >= 0 {
        // SAFETY: the caller's promise.
        let vectors = unsafe { parts_of(parts, count) };
        if let Some(vectors) = vectors
            // SAFETY: the caller's promise.
            && let Went::Past(result) = unsafe { to(fd, vectors, Some(offset as u64), Call::Pwritev) }
        {
            return told(result);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { PWRITEV.get()(fd, parts, count, offset) }
}

#[inline(always)]
unsafe fn do_pwritev2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    if tag_of(fd) == tag::STUB && flags != 0 {
        // SAFETY: the caller's promise.
        return unsafe { write_flagged(fd, parts, count, offset, flags) };
    }
    if !matches!(tag_of(fd), tag::WRITER | tag::STUB) || (offset != -1 && flags != 0) {
        // SAFETY: the caller's promise.
        return unsafe { PWRITEV2.get()(fd, parts, count, offset, flags) };
    }
    if flags == 0 {
        // SAFETY: the caller's promise.
        return unsafe {
            if offset == -1 {
                do_writev(fd, parts, count)
            } else {
                do_pwritev(fd, parts, count, offset)
            }
        };
    }
    let ticket = writer::before_kernel(fd, Call::Writev);
    // SAFETY: the caller's promise.
    let result = unsafe { PWRITEV2.get()(fd, parts, count, offset, flags) };
    ticket.done();
    result
}

/// pwritev2(2) with flags, to a stub.
///
/// # Safety
/// As for pwritev2(2).
unsafe fn write_flagged(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    let synced = flags & (libc::RWF_SYNC | libc::RWF_DSYNC) != 0;
    let known = libc::RWF_SYNC | libc::RWF_DSYNC | libc::RWF_HIPRI | libc::RWF_APPEND;
    if flags & !known != 0 {
        return told(-(libc::EOPNOTSUPP as isize));
    }
    // SAFETY: the caller's promise.
    let Some(vectors) = (unsafe { parts_of(parts, count) }) else {
        return told(if count == 0 {
            0
        } else {
            -(libc::EINVAL as isize)
        });
    };
    let at = u64::try_from(offset).ok();
    // SAFETY: the caller's promise.
    match unsafe {
        stub::write(
            fd,
            vectors,
            at,
            flags & libc::RWF_APPEND != 0,
            Call::Pwritev,
        )
    } {
        Went::Past(result) if result >= 0 && synced => match stub::sync(fd, true) {
            Some(Err(errno)) => told(-(errno as isize)),
            _ => result,
        },
        Went::Past(result) => told(result),
        // SAFETY: the caller's promise.
        Went::Kernel(_) => unsafe { PWRITEV2.get()(fd, parts, count, offset, flags) },
    }
}
