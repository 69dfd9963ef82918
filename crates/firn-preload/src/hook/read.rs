//! Hooks of read(2) and its kin, and of calls that use the offset without memory of the program, such as lseek(2) and
//! sendfile(2).

use std::ffi::{c_int, c_uint, c_ulong, c_void};

use libc::{iovec, off64_t, size_t, ssize_t};

use super::{export, forward, program_memory};
use crate::handled::{Handled, KernelCall};
use crate::kernel;
use crate::memory::{Run, Target, Writable};
use crate::probe;
use crate::real::{
    COPY_FILE_RANGE, IOCTL, LSEEK, PREAD, PREAD_CHK, PREADV, PREADV2, READ, READ_CHK, READV,
    SENDFILE, SPLICE,
};
use crate::report::Call;
use crate::stub;
use crate::sys::{fail, with_errno};
use crate::table::{descriptor_tag, tag};

export! {
    read __read = do_read(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t;
    __read_chk = do_read_chk(fd: c_int, data: *mut c_void, len: size_t, size: size_t) -> ssize_t;
    readv = do_readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t;
    pread pread64 __pread64 = do_pread(
        fd: c_int,
        data: *mut c_void,
        len: size_t,
        offset: off64_t,
    ) -> ssize_t;
    __pread_chk __pread64_chk = do_pread_chk(
        fd: c_int,
        data: *mut c_void,
        len: size_t,
        offset: off64_t,
        size: size_t,
    ) -> ssize_t;
    preadv preadv64 = do_preadv(
        fd: c_int,
        vectors: *const iovec,
        count: c_int,
        offset: off64_t,
    ) -> ssize_t;
    preadv2 preadv64v2 = do_preadv2(
        fd: c_int,
        vectors: *const iovec,
        count: c_int,
        offset: off64_t,
        flags: c_int,
    ) -> ssize_t;
    lseek lseek64 __lseek llseek = do_lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t;
    sendfile sendfile64 = do_sendfile(
        to: c_int,
        from: c_int,
        offset: *mut off64_t,
        len: size_t,
    ) -> ssize_t;
    copy_file_range = do_copy_file_range(
        from: c_int,
        from_at: *mut off64_t,
        to: c_int,
        to_at: *mut off64_t,
        len: size_t,
        flags: c_uint,
    ) -> ssize_t;
    splice = do_splice(
        from: c_int,
        from_at: *mut off64_t,
        to: c_int,
        to_at: *mut off64_t,
        len: size_t,
        flags: c_uint,
    ) -> ssize_t;
    ioctl __ioctl = do_ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int;
}

/// Requests of ioctl(2) about a range of a file that may be relative to the offset (`struct space_resv` of
/// linux/falloc.h).
const RANGE_REQUESTS: [c_ulong; 5] = [
    0x4030_5828,
    0x4030_5829,
    0x4030_582a,
    0x4030_582b,
    0x4030_5839,
];

#[inline(always)]
unsafe fn do_read(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t {
    if descriptor_tag(fd) == tag::ORDINARY {
        return forward!(READ(fd, data, len));
    }
    // SAFETY: the program has passed the bytes to read(2).
    unsafe { read_served(fd, data, len) }
}

/// Reads from a descriptor that the library serves.
fn read_from(fd: c_int, target: Target<'_>, explicit_offset: Option<u64>, call: Call) -> Handled {
    if descriptor_tag(fd) == tag::STUB {
        stub::read_stub(fd, target, explicit_offset, call)
    } else {
        kernel::read_file(fd, target, explicit_offset, call)
    }
}

/// read(2) of a descriptor that the library serves.
///
/// # Safety
/// The same as for read(2).
#[inline(never)]
unsafe fn read_served(fd: c_int, data: *mut c_void, len: size_t) -> ssize_t {
    // SAFETY: the program has passed the bytes to read(2), to be written.
    let run: Run<'_, Writable> = unsafe { Run::new(data, len) };
    match run.as_memory(|target| read_from(fd, target, None, Call::Read)) {
        Handled::Done(result) => with_errno(result),
        Handled::Forward(kernel_call) => {
            let result = forward!(READ(fd, data, len));
            kernel_call.finish();
            result
        }
    }
}

unsafe fn do_read_chk(fd: c_int, data: *mut c_void, len: size_t, size: size_t) -> ssize_t {
    if len > size {
        return forward!(READ_CHK(fd, data, len, size));
    }
    // SAFETY: the program has passed `size` bytes to read(2), and `len` are no more.
    unsafe { do_read(fd, data, len) }
}

#[inline(always)]
unsafe fn do_readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    if descriptor_tag(fd) == tag::ORDINARY {
        return forward!(READV(fd, vectors, count));
    }
    // SAFETY: the program has passed the vectors to readv(2), to be written.
    let handled = match unsafe { program_memory(vectors, count) } {
        Some(target) => read_from(fd, target, None, Call::Readv),
        // The kernel refuses this number of vectors.
        None if descriptor_tag(fd) == tag::STUB => Handled::Forward(KernelCall::WITHOUT_OFFSET),
        None => Handled::Forward(kernel::prepare_kernel_call(fd, Call::Readv)),
    };
    match handled {
        Handled::Done(result) => with_errno(result),
        Handled::Forward(kernel_call) => {
            let result = forward!(READV(fd, vectors, count));
            kernel_call.finish();
            result
        }
    }
}

#[inline(always)]
unsafe fn do_pread(fd: c_int, data: *mut c_void, len: size_t, offset: off64_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::READER | tag::STUB) && offset >= 0 {
        // SAFETY: the program has passed the bytes to pread(2), to be written.
        let run: Run<'_, Writable> = unsafe { Run::new(data, len) };
        let read = |target: Target<'_>| read_from(fd, target, Some(offset as u64), Call::Pread);
        if let Handled::Done(result) = run.as_memory(read) {
            return with_errno(result);
        }
    }
    forward!(PREAD(fd, data, len, offset))
}

unsafe fn do_pread_chk(
    fd: c_int,
    data: *mut c_void,
    len: size_t,
    offset: off64_t,
    size: size_t,
) -> ssize_t {
    if len > size {
        return forward!(PREAD_CHK(fd, data, len, offset, size));
    }
    // SAFETY: the program has passed `size` bytes to pread(2), and `len` are no more.
    unsafe { do_pread(fd, data, len, offset) }
}

#[inline(always)]
unsafe fn do_preadv(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::READER | tag::STUB) && offset >= 0 {
        // SAFETY: the program has passed the vectors to preadv(2), to be written.
        let target = unsafe { program_memory(vectors, count) };
        if let Some(target) = target
            && let Handled::Done(result) = read_from(fd, target, Some(offset as u64), Call::Preadv)
        {
            return with_errno(result);
        }
    }
    forward!(PREADV(fd, vectors, count, offset))
}

#[inline(always)]
unsafe fn do_preadv2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    if descriptor_tag(fd) == tag::STUB && flags & !libc::RWF_HIPRI != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    if descriptor_tag(fd) != tag::ORDINARY && (flags == 0 || descriptor_tag(fd) == tag::STUB) {
        // SAFETY: the program has passed the vectors to preadv2(2), which without flags is readv(2) or preadv(2).
        return unsafe {
            if offset == -1 {
                do_readv(fd, vectors, count)
            } else {
                do_preadv(fd, vectors, count, offset)
            }
        };
    }
    let kernel_call = if offset == -1 && descriptor_tag(fd) != tag::ORDINARY {
        kernel::prepare_kernel_call(fd, Call::Readv)
    } else {
        KernelCall::WITHOUT_OFFSET
    };
    let result = forward!(PREADV2(fd, vectors, count, offset, flags));
    kernel_call.finish();
    result
}

#[inline(always)]
unsafe fn do_lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
    if descriptor_tag(fd) == tag::ORDINARY {
        return forward!(LSEEK(fd, offset, whence));
    }
    let handled = match descriptor_tag(fd) {
        tag::STUB => stub::seek_stub(fd, offset, whence),
        _ => kernel::seek_file(fd, offset, whence),
    };
    match handled {
        Handled::Done(result) => with_errno(result) as off64_t,
        Handled::Forward(kernel_call) => {
            let result = forward!(LSEEK(fd, offset, whence));
            kernel_call.finish();
            result
        }
    }
}

/// Gives a descriptor back to the kernel for one call that uses the kernel's offset or size. The kernel_call is finished
/// after it.
#[inline(always)]
fn prepare_transfer(fd: c_int) -> KernelCall {
    if descriptor_tag(fd) != tag::ORDINARY {
        return kernel::prepare_kernel_call(fd, Call::Transfer);
    }
    KernelCall::WITHOUT_OFFSET
}

/// Whether a call that moves bytes between descriptors within the kernel involves a stub. The kernel has no bytes of
/// stubs, so the call fails like for files without such support. Programs then read and write instead.
fn involves_stub(first: c_int, second: c_int) -> bool {
    descriptor_tag(first) == tag::STUB || descriptor_tag(second) == tag::STUB
}

unsafe fn do_sendfile(to: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t {
    if involves_stub(to, from) {
        return fail(libc::EINVAL);
    }
    let kernel_calls = (prepare_transfer(to), prepare_transfer(from));
    let result = forward!(SENDFILE(to, from, offset, len));
    kernel_calls.0.finish();
    kernel_calls.1.finish();
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
    if involves_stub(to, from) {
        return fail(libc::EXDEV);
    }
    let kernel_calls = (prepare_transfer(from), prepare_transfer(to));
    let result = forward!(COPY_FILE_RANGE(from, from_at, to, to_at, len, flags));
    kernel_calls.0.finish();
    kernel_calls.1.finish();
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
    if involves_stub(to, from) {
        return fail(libc::EINVAL);
    }
    let kernel_calls = (prepare_transfer(from), prepare_transfer(to));
    let result = forward!(SPLICE(from, from_at, to, to_at, len, flags));
    kernel_calls.0.finish();
    kernel_calls.1.finish();
    result
}

/// ioctl(2), which is variadic in C like `open`. The argument is passed on, whatever it is.
unsafe fn do_ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
    let is_count = request == libc::FIONREAD as c_ulong;
    if descriptor_tag(fd) == tag::ORDINARY || !(is_count || RANGE_REQUESTS.contains(&request)) {
        return forward!(IOCTL(fd, request, arg));
    }
    if descriptor_tag(fd) == tag::STUB {
        if !is_count {
            return fail(libc::EOPNOTSUPP);
        }
        let count = match stub::count_unread(fd) {
            Ok(count) => count,
            Err(errno) => return fail(errno),
        };
        if !probe::is_writable(arg as *mut c_void, size_of::<c_int>()) {
            return fail(libc::EFAULT);
        }
        // SAFETY: the program has passed the address of the number to ioctl(2), and it was just found writable.
        unsafe { (arg as *mut c_int).write_unaligned(count as c_int) };
        return 0;
    }
    let kernel_call = kernel::prepare_kernel_call(fd, Call::Transfer);
    let result = forward!(IOCTL(fd, request, arg));
    kernel_call.finish();
    result
}
