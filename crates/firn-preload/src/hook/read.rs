//! Hooks (exported functions that replace those of the C library) of read(2) and its kin, and of calls that use the
//! offset without memory of the program, such as lseek(2) and sendfile(2).

use std::ffi::{c_int, c_uint, c_ulong, c_void};

use libc::{iovec, off64_t, size_t, ssize_t};

use super::{export, forward, program_memory};
use crate::kernel;
use crate::memory::{Run, Target, Writable};
use crate::outcome::{CallOutcome, KernelCall};
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
        from_offset: *mut off64_t,
        to: c_int,
        to_offset: *mut off64_t,
        len: size_t,
        flags: c_uint,
    ) -> ssize_t;
    splice = do_splice(
        from: c_int,
        from_offset: *mut off64_t,
        to: c_int,
        to_offset: *mut off64_t,
        len: size_t,
        flags: c_uint,
    ) -> ssize_t;
    ioctl __ioctl = do_ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int;
}

/// Offset by which preadv2(2) reads at the descriptor's own offset.
const DESCRIPTOR_OFFSET: off64_t = -1;

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
fn read_from(
    fd: c_int,
    target: Target<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> CallOutcome {
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
    let outcome = run.as_memory(|target| read_from(fd, target, None, Call::Read));
    outcome.finish(|| forward!(READ(fd, data, len)))
}

unsafe fn do_read_chk(fd: c_int, data: *mut c_void, len: size_t, size: size_t) -> ssize_t {
    if len > size {
        return forward!(READ_CHK(fd, data, len, size));
    }
    // SAFETY: the program has passed `size` bytes to read(2), and `len` are no more.
    unsafe { do_read(fd, data, len) }
}

/// readv(2), by direct access if the descriptor has it.
#[inline(always)]
unsafe fn do_readv(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    if descriptor_tag(fd) == tag::ORDINARY {
        return forward!(READV(fd, vectors, count));
    }
    // SAFETY: the program has passed the vectors to readv(2), to be written.
    let outcome = match unsafe { program_memory(vectors, count) } {
        Some(target) => read_from(fd, target, None, Call::Readv),
        // The kernel refuses these vectors.
        None if descriptor_tag(fd) == tag::STUB => CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
        None => CallOutcome::Forward(kernel::prepare_kernel_call(fd, Call::Readv)),
    };
    outcome.finish(|| forward!(READV(fd, vectors, count)))
}

/// pread(2), by direct access if the descriptor has it.
#[inline(always)]
unsafe fn do_pread(fd: c_int, data: *mut c_void, len: size_t, offset: off64_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::READER | tag::STUB) && offset >= 0 {
        // SAFETY: the program has passed the bytes to pread(2), to be written.
        let run: Run<'_, Writable> = unsafe { Run::new(data, len) };
        let read = |target: Target<'_>| read_from(fd, target, Some(offset as u64), Call::Pread);
        if let CallOutcome::Done(result) = run.as_memory(read) {
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

/// preadv(2), by direct access if the descriptor has it.
#[inline(always)]
unsafe fn do_preadv(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::READER | tag::STUB) && offset >= 0 {
        // SAFETY: the program has passed the vectors to preadv(2), to be written.
        let target = unsafe { program_memory(vectors, count) };
        if let Some(target) = target
            && let CallOutcome::Done(result) =
                read_from(fd, target, Some(offset as u64), Call::Preadv)
        {
            return with_errno(result);
        }
    }
    forward!(PREADV(fd, vectors, count, offset))
}

/// preadv2(2). Without flags it is readv(2) or preadv(2). With flags only the kernel can serve it, so it fails for a
/// stub (the kernel does not have its bytes).
#[inline(always)]
unsafe fn do_preadv2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    let fd_tag = descriptor_tag(fd);
    // RWF_HIPRI only asks for speed, so it may be ignored.
    if fd_tag == tag::STUB && flags & !libc::RWF_HIPRI != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let uses_descriptor_offset = offset == DESCRIPTOR_OFFSET;
    if fd_tag != tag::ORDINARY && (flags == 0 || fd_tag == tag::STUB) {
        // SAFETY: the program has passed the vectors to preadv2(2), which without flags is readv(2) or preadv(2).
        return unsafe {
            if uses_descriptor_offset {
                do_readv(fd, vectors, count)
            } else {
                do_preadv(fd, vectors, count, offset)
            }
        };
    }
    let kernel_call = if uses_descriptor_offset && fd_tag != tag::ORDINARY {
        kernel::prepare_kernel_call(fd, Call::Readv)
    } else {
        KernelCall::WITHOUT_OFFSET
    };
    kernel_call.run(|| forward!(PREADV2(fd, vectors, count, offset, flags)))
}

/// lseek(2). The offset of a descriptor with direct access is kept in this process.
#[inline(always)]
unsafe fn do_lseek(fd: c_int, offset: off64_t, whence: c_int) -> off64_t {
    let outcome = match descriptor_tag(fd) {
        tag::ORDINARY => return forward!(LSEEK(fd, offset, whence)),
        tag::STUB => stub::seek_stub(fd, offset, whence),
        _ => kernel::seek_file(fd, offset, whence),
    };
    outcome.finish(|| forward!(LSEEK(fd, offset, whence)) as isize) as off64_t
}

/// Makes a call of the kernel that uses the offsets or sizes of two descriptors.
fn run_transfer(fds: [c_int; 2], call_kernel: impl FnOnce() -> ssize_t) -> ssize_t {
    let [first_call, second_call] = fds.map(|fd| {
        if descriptor_tag(fd) == tag::ORDINARY {
            KernelCall::WITHOUT_OFFSET
        } else {
            kernel::prepare_kernel_call(fd, Call::Transfer)
        }
    });
    second_call.run(|| first_call.run(call_kernel))
}

/// Whether a call that moves bytes between descriptors within the kernel involves a stub. The kernel has no bytes of
/// stubs, so the call fails like for files without such support. Programs then read and write instead.
fn involves_stub(first: c_int, second: c_int) -> bool {
    descriptor_tag(first) == tag::STUB || descriptor_tag(second) == tag::STUB
}

/// sendfile(2), which copies bytes within the kernel. It fails for a stub (the kernel does not have its bytes);
/// programs then read and write instead.
unsafe fn do_sendfile(to: c_int, from: c_int, offset: *mut off64_t, len: size_t) -> ssize_t {
    if involves_stub(to, from) {
        return fail(libc::EINVAL);
    }
    run_transfer([to, from], || forward!(SENDFILE(to, from, offset, len)))
}

/// copy_file_range(2), which copies bytes within the kernel. It fails for a stub (the kernel does not have its bytes);
/// programs then read and write instead.
unsafe fn do_copy_file_range(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    if involves_stub(to, from) {
        return fail(libc::EXDEV);
    }
    run_transfer([from, to], || {
        forward!(COPY_FILE_RANGE(
            from,
            from_offset,
            to,
            to_offset,
            len,
            flags
        ))
    })
}

/// splice(2), which moves bytes within the kernel. It fails for a stub (the kernel does not have its bytes); programs
/// then read and write instead.
unsafe fn do_splice(
    from: c_int,
    from_offset: *mut off64_t,
    to: c_int,
    to_offset: *mut off64_t,
    len: size_t,
    flags: c_uint,
) -> ssize_t {
    if involves_stub(to, from) {
        return fail(libc::EINVAL);
    }
    run_transfer([from, to], || {
        forward!(SPLICE(from, from_offset, to, to_offset, len, flags))
    })
}

/// ioctl(2), which is variadic in C like `open`. The argument is passed on, whatever it is. A request that depends on
/// the offset needs the offset back in the kernel. For a stub (an empty file; firnd has its bytes) only FIONREAD is
/// possible.
unsafe fn do_ioctl(fd: c_int, request: c_ulong, arg: usize) -> c_int {
    let asks_for_count = request == libc::FIONREAD as c_ulong;
    let concerns_offset = asks_for_count || RANGE_REQUESTS.contains(&request);
    if descriptor_tag(fd) == tag::ORDINARY || !concerns_offset {
        return forward!(IOCTL(fd, request, arg));
    }
    if descriptor_tag(fd) != tag::STUB {
        let kernel_call = kernel::prepare_kernel_call(fd, Call::Transfer);
        return kernel_call.run(|| forward!(IOCTL(fd, request, arg)));
    }
    if !asks_for_count {
        return fail(libc::EOPNOTSUPP);
    }
    let unread_bytes = match stub::count_unread(fd) {
        Ok(count) => count,
        Err(errno) => return fail(errno),
    };
    let result = arg as *mut c_int;
    if !probe::is_writable(result.cast(), size_of::<c_int>()) {
        return fail(libc::EFAULT);
    }
    // SAFETY: the program has passed the address of the number to ioctl(2), and it was just found writable.
    unsafe { result.write_unaligned(unread_bytes as c_int) };
    0
}
