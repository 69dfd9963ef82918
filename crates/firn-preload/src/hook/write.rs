//! write(2) and its kin.

use std::ffi::{c_int, c_void};

use libc::{iovec, off64_t, size_t, ssize_t};

use super::{export, parts_of};
use crate::real::{PWRITE, PWRITEV, PWRITEV2, WRITE, WRITEV};
use crate::report::Call;
use crate::sys::told;
use crate::table::{tag, tag_of};
use crate::writer::{self, Went};

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
    if tag_of(fd) == tag::WRITER {
        // SAFETY: the caller's promise.
        return unsafe { write_ours(fd, data, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { WRITE.get()(fd, data, len) }
}

#[inline(never)]
unsafe fn write_ours(fd: c_int, data: *const c_void, len: size_t) -> ssize_t {
    let part = [iovec { iov_base: data.cast_mut(), iov_len: len }];
    match writer::write(fd, &part, None, Call::Write) {
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
    if tag_of(fd) == tag::WRITER {
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
        Some(parts) => writer::write(fd, parts, None, Call::Writev),
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
    if tag_of(fd) == tag::WRITER && offset >= 0 {
        let part = [iovec { iov_base: data.cast_mut(), iov_len: len }];
        if let Went::Past(result) = writer::write(fd, &part, Some(offset as u64), Call::Pwrite) {
            return told(result);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { PWRITE.get()(fd, data, len, offset) }
}

#[inline(always)]
unsafe fn do_pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    if tag_of(fd) == tag::WRITER && offset >= 0 {
        // SAFETY: the caller's promise.
        let vectors = unsafe { parts_of(parts, count) };
        if let Some(vectors) = vectors
            && let Went::Past(result) = writer::write(fd, vectors, Some(offset as u64), Call::Pwritev)
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
    if tag_of(fd) != tag::WRITER || (offset != -1 && flags != 0) {
        // SAFETY: the caller's promise.
        return unsafe { PWRITEV2.get()(fd, parts, count, offset, flags) };
    }
    if flags == 0 {
        // SAFETY: the caller's promise.
        return unsafe {
            if offset == -1 { do_writev(fd, parts, count) } else { do_pwritev(fd, parts, count, offset) }
        };
    }
    let ticket = writer::before_kernel(fd, Call::Writev);
    // SAFETY: the caller's promise.
    let result = unsafe { PWRITEV2.get()(fd, parts, count, offset, flags) };
    ticket.done();
    result
}
