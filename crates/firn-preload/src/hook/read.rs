//! read(2) and its kin, and what moves or uses the offset without bytes in the program's memory.

use std::ffi::{c_int, c_uint, c_void};

use libc::{iovec, off64_t, size_t, ssize_t};

use super::{export, parts_of};
use crate::reader;
use crate::real::{
    COPY_FILE_RANGE, LSEEK, PREAD, PREAD_CHK, PREADV, PREADV2, READ, READ_CHK, READV, SENDFILE,
    SPLICE,
};
use crate::report::Call;
use crate::stub;
use crate::sys::told;
use crate::table::{tag, tag_of};
use crate::writer::{self, Ticket, Went};

export! { read __read = do_read(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t }
export! { __read_chk = do_read_chk(fd: c_int, data: *mut c_void, len: size_t, size: size_t) -> ssize_t }
export! { readv = do_readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t }
export! { pread pread64 __pread64 =
do_pread(fd: c_int, data: *mut c_void, len: size_t, offset: off64_t) -> ssize_t }
export! { __pread_chk __pread64_chk =
do_pread_chk(fd: c_int, data: *mut c_void, len: size_t, offset: off64_t, size: size_t) -> ssize_t }
export! { preadv preadv64 =
do_preadv(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> ssize_t }
export! { preadv2 preadv64v2 =
do_preadv2(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t }
export! { lseek lseek64 __lseek llseek = do_lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t }
export! { sendfile sendfile64 =
do_sendfile(to: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t }
export! { copy_file_range = do_copy_file_range(
from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t }
export! { splice = do_splice(
from: c_int, from_at: *mut off64_t, to: c_int, to_at: *mut off64_t, len: size_t, flags: c_uint) -> ssize_t }

#[inline(always)]
unsafe fn do_read(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t {
    if tag_of(fd) == tag::NONE {
        // SAFETY: the caller's promise.
        return unsafe { READ.get()(fd, data, len) };
    }
    // SAFETY: the caller's promise.
    unsafe { read_ours(fd, data, len) }
}

/// A read from a descriptor of ours.
///
/// # Safety
/// The parts are the program's, to be written.
unsafe fn from(fd: c_int, parts: &[iovec], at: Option<u64>, call: Call) -> Went {
    // SAFETY: the caller's promise.
    unsafe {
        if tag_of(fd) == tag::STUB {
            stub::read(fd, parts, at, call)
        } else {
            reader::read(fd, parts, at, call)
        }
    }
}

#[inline(never)]
unsafe fn read_ours(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t {
    let part = [iovec {
        iov_base: data,
        iov_len: len,
    }];
    // SAFETY: the caller's promise.
    match unsafe { from(fd, &part, None, Call::Read) } {
        Went::Past(result) => told(result),
        Went::Kernel(ticket) => {
            // SAFETY: the caller's promise.
            let result = unsafe { READ.get()(fd, data, len) };
            ticket.done();
            result
        }
    }
}

unsafe fn do_read_chk(fd: c_int, data: *mut c_void, len: size_t, size: size_t) -> ssize_t {
    if len > size {
        // SAFETY: it ends the program, as it should.
        return unsafe { READ_CHK.get()(fd, data, len, size) };
    }
    // SAFETY: the caller's promise.
    unsafe { do_read(fd, data, len) }
}

#[inline(always)]
unsafe fn do_readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    if tag_of(fd) == tag::NONE {
        // SAFETY: the caller's promise.
        return unsafe { READV.get()(fd, parts, count) };
    }
    // SAFETY: the caller's promise.
    let went = match unsafe { parts_of(parts, count) } {
        // SAFETY: the caller's promise.
        Some(parts) => unsafe { from(fd, parts, None, Call::Readv) },
        // Numbers of vectors that the kernel refuses.
        None if tag_of(fd) == tag::STUB => Went::Kernel(Ticket::NONE),
        None => Went::Kernel(writer::before_kernel(fd, Call::Readv)),
    };
    match went {
        Went::Past(result) => told(result),
        Went::Kernel(ticket) => {
            // SAFETY: the caller's promise.
            let result = unsafe { READV.get()(fd, parts, count) };
            ticket.done();
            result
        }
    }
}

#[inline(always)]
unsafe fn do_pread(fd: c_int, data: *mut c_void, len: size_t, offset: off64_t) -> ssize_t {
    if matches!(tag_of(fd), tag::READER | tag::STUB) && offset >= 0 {
        let part = [iovec {
            iov_base: data,
            iov_len: len,
        }];
        // SAFETY: the caller's promise.
        if let Went::Past(result) = unsafe { from(fd, &part, Some(offset as u64), Call::Pread) } {
            return told(result);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { PREAD.get()(fd, data, len, offset) }
}

unsafe fn do_pread_chk(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    offset: off64_t,
    size: size_t,
) -> ssize_t {
    if len > size {
        // SAFETY: it ends the program, as it should.
        return unsafe { PREAD_CHK.get()(fd, data, len, offset, size) };
    }
    // SAFETY: the caller's promise.
    unsafe { do_pread(fd, data, len, offset) }
}

#[inline(always)]
unsafe fn do_preadv(fd: c_int, parts: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    if matches!(tag_of(fd), tag::READER | tag::STUB) && offset >= 0 {
        // SAFETY: the caller's promise.
        let vectors = unsafe { parts_of(parts, count) };
        if let Some(vectors) = vectors
            // SAFETY: the caller's promise.
            && let Went::Past(result) = unsafe { from(fd, vectors, Some(offset as u64), Call::Preadv) }
        {
            return told(result);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { PREADV.get()(fd, parts, count, offset) }
}

#[inline(always)]
unsafe fn do_preadv2(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    if tag_of(fd) == tag::STUB && flags & !libc::RWF_HIPRI != 0 {
        return told(-(libc::EOPNOTSUPP as isize));
    }
    if tag_of(fd) != tag::NONE && (flags == 0 || tag_of(fd) == tag::STUB) {
        // SAFETY: the caller's promise.
        return unsafe {
            if offset == -1 {
                do_readv(fd, parts, count)
            } else {
                do_preadv(fd, parts, count, offset)
            }
        };
    }
    let ticket = if offset == -1 && tag_of(fd) != tag::NONE {
        writer::before_kernel(fd, Call::Readv)
    } else {
        Ticket::NONE
    };
    // SAFETY: the caller's promise.
    let result = unsafe { PREADV2.get()(fd, parts, count, offset, flags) };
    ticket.done();
    result
}

#[inline(always)]
unsafe fn do_lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
    if tag_of(fd) == tag::NONE {
        // SAFETY: the caller's promise.
        return unsafe { LSEEK.get()(fd, offset, whence) };
    }
    let went = match tag_of(fd) {
        tag::STUB => stub::seek(fd, offset, whence),
        _ => writer::seek(fd, offset, whence),
    };
    match went {
        Went::Past(result) => told(result) as off64_t,
        Went::Kernel(ticket) => {
            // SAFETY: the caller's promise.
            let result = unsafe { LSEEK.get()(fd, offset, whence) };
            ticket.done();
            result
        }
    }
}

/// A descriptor is the kernel's for one call, which goes by its offset or at least by the file's size.
#[inline(always)]
fn handed_back(fd: c_int) -> Ticket {
    if tag_of(fd) != tag::NONE {
        return writer::before_kernel(fd, Call::Transfer);
    }
    Ticket::NONE
}

/// Whether a call moves bytes between descriptors in the kernel, which has none of a stub's. It fails as for
/// files that cannot do that; programs read and write then.
fn moves_stubs(one: c_int, other: c_int) -> bool {
    tag_of(one) == tag::STUB || tag_of(other) == tag::STUB
}

unsafe fn do_sendfile(to: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t {
    if moves_stubs(to, from) {
        return told(-(libc::EINVAL as isize));
    }
    let tickets = (handed_back(to), handed_back(from));
    // SAFETY: the caller's promise.
    let result = unsafe { SENDFILE.get()(to, from, offset, len) };
    tickets.0.done();
    tickets.1.done();
    result
}

unsafe fn do_copy_file_range(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    if moves_stubs(to, from) {
        return told(-(libc::EXDEV as isize));
    }
    let tickets = (handed_back(from), handed_back(to));
    // SAFETY: the caller's promise.
    let result = unsafe { COPY_FILE_RANGE.get()(from, from_at, to, to_at, len, flags) };
    tickets.0.done();
    tickets.1.done();
    result
}

unsafe fn do_splice(
    from: c_int,
    from_at: *mut off64_t,
    to: c_int,
    to_at: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    if moves_stubs(to, from) {
        return told(-(libc::EINVAL as isize));
    }
    let tickets = (handed_back(from), handed_back(to));
    // SAFETY: the caller's promise.
    let result = unsafe { SPLICE.get()(from, from_at, to, to_at, len, flags) };
    tickets.0.done();
    tickets.1.done();
    result
}
