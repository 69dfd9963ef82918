//! Hooks (exported functions that replace those of the C library) of write(2) and its kin.
//!
//! A *stub* is an empty file. Its bytes are in firnd, the process that serves a mount.

use std::ffi::{c_int, c_void};

use libc::{iovec, off64_t, size_t, ssize_t};

use super::{export, forward, program_memory};
use crate::kernel;
use crate::memory::{Readable, Run, Source};
use crate::outcome::{CallOutcome, KernelCall};
use crate::real::{PWRITE, PWRITEV, PWRITEV2, WRITE, WRITEV};
use crate::report::Call;
use crate::stub::{self, Append};
use crate::sys::{fail, with_errno};
use crate::table::{descriptor_tag, tag};

/// Offset by which pwritev2(2) writes at the descriptor's own offset.
const DESCRIPTOR_OFFSET: off64_t = -1;
/// Flag of pwritev2(2): do not append, even if the descriptor has O_APPEND (linux/fs.h, since Linux 6.9).
const RWF_NOAPPEND: c_int = 0x20;

export! {
    write __write = do_write(fd: c_int, data: *const c_void, len: size_t) -> ssize_t;
    writev = do_writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t;
    pwrite pwrite64 __pwrite64 = do_pwrite(
        fd: c_int,
        data: *const c_void,
        len: size_t,
        offset: off64_t,
    ) -> ssize_t;
    pwritev pwritev64 = do_pwritev(
        fd: c_int,
        vectors: *const iovec,
        count: c_int,
        offset: off64_t,
    ) -> ssize_t;
    pwritev2 pwritev64v2 = do_pwritev2(
        fd: c_int,
        vectors: *const iovec,
        count: c_int,
        offset: off64_t,
        flags: c_int,
    ) -> ssize_t;
}

#[inline(always)]
unsafe fn do_write(fd: c_int, data: *const c_void, len: size_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::WRITER | tag::STUB) {
        // SAFETY: the program has passed the bytes to write(2), to be read.
        let run = unsafe { Run::new(data.cast_mut(), len) };
        return write_served(fd, run);
    }
    forward!(WRITE(fd, data, len))
}

/// Writes to a descriptor that the library serves.
fn write_to(
    fd: c_int,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> CallOutcome {
    if descriptor_tag(fd) == tag::STUB {
        return stub::write_stub(fd, source, explicit_offset, Append::AsOpened, call);
    }
    kernel::write_file(fd, source, explicit_offset, call)
}

/// write(2) of a descriptor that the library serves: by the fast path if possible.
#[inline(never)]
fn write_served(fd: c_int, run: Run<'_, Readable>) -> ssize_t {
    match kernel::write_fast(fd, run, None, Call::Write) {
        Some(CallOutcome::Done(result)) if result >= 0 => result,
        outcome => write_slowly(fd, run, outcome),
    }
}

/// Ends a write. `fast_result` is the result of the fast path; without one, the write is made here.
#[inline(never)]
fn write_slowly(fd: c_int, run: Run<'_, Readable>, fast_result: Option<CallOutcome>) -> ssize_t {
    let outcome = match fast_result {
        Some(outcome) => outcome,
        None => run.as_memory(|source| write_to(fd, source, None, Call::Write)),
    };
    outcome.finish(|| {
        let vector = run.as_vector();
        forward!(WRITE(fd, vector.iov_base, vector.iov_len))
    })
}

#[inline(always)]
unsafe fn do_writev(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::WRITER | tag::STUB) {
        // SAFETY: the program has passed the vectors to writev(2).
        return unsafe { writev_served(fd, vectors, count) };
    }
    forward!(WRITEV(fd, vectors, count))
}

/// writev(2) of a descriptor that the library serves.
///
/// # Safety
/// The same as for writev(2).
#[inline(never)]
unsafe fn writev_served(fd: c_int, vectors: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the program has passed the vectors to writev(2), to be read.
    let outcome = match unsafe { program_memory(vectors, count) } {
        Some(source) => write_to(fd, source, None, Call::Writev),
        // The kernel refuses these vectors.
        None if descriptor_tag(fd) == tag::STUB => CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
        None => CallOutcome::Forward(kernel::prepare_kernel_call(fd, Call::Writev)),
    };
    outcome.finish(|| forward!(WRITEV(fd, vectors, count)))
}

#[inline(always)]
unsafe fn do_pwrite(fd: c_int, data: *const c_void, len: size_t, offset: off64_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::WRITER | tag::STUB) && offset >= 0 {
        // SAFETY: the program has passed the bytes to pwrite(2), to be read.
        let run = unsafe { Run::new(data.cast_mut(), len) };
        if let CallOutcome::Done(result) = pwrite_served(fd, run, offset as u64) {
            return with_errno(result);
        }
    }
    forward!(PWRITE(fd, data, len, offset))
}

#[inline(never)]
fn pwrite_served(fd: c_int, run: Run<'_, Readable>, offset: u64) -> CallOutcome {
    let slowly = || run.as_memory(|source| write_to(fd, source, Some(offset), Call::Pwrite));
    kernel::write_fast(fd, run, Some(offset), Call::Pwrite).unwrap_or_else(slowly)
}

#[inline(always)]
unsafe fn do_pwritev(fd: c_int, vectors: *const iovec, count: c_int, offset: off64_t) -> ssize_t {
    if matches!(descriptor_tag(fd), tag::WRITER | tag::STUB) && offset >= 0 {
        // SAFETY: the program has passed the vectors to pwritev(2), to be read.
        let source = unsafe { program_memory(vectors, count) };
        if let Some(source) = source
            && let CallOutcome::Done(result) =
                write_to(fd, source, Some(offset as u64), Call::Pwritev)
        {
            return with_errno(result);
        }
    }
    forward!(PWRITEV(fd, vectors, count, offset))
}

/// pwritev2(2). Without flags it is writev(2) or pwritev(2), which may use direct access. With flags the kernel serves
/// it, or firnd if the file is a stub, an empty file with its bytes in firnd.
#[inline(always)]
unsafe fn do_pwritev2(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    let fd_tag = descriptor_tag(fd);
    let uses_descriptor_offset = offset == DESCRIPTOR_OFFSET;
    if flags == 0 && matches!(fd_tag, tag::WRITER | tag::STUB) {
        // SAFETY: the program has passed the vectors to pwritev2(2), which without flags is writev(2) or pwritev(2).
        return unsafe {
            if uses_descriptor_offset {
                do_writev(fd, vectors, count)
            } else {
                do_pwritev(fd, vectors, count, offset)
            }
        };
    }
    if fd_tag == tag::STUB {
        // SAFETY: the program has passed the vectors to pwritev2(2).
        return unsafe { write_stub_with_flags(fd, vectors, count, offset, flags) };
    }
    // An append needs the kernel's size of the file, so direct access to it ends before.
    let needs_kernel = uses_descriptor_offset || flags & libc::RWF_APPEND != 0;
    let kernel_call = if needs_kernel && fd_tag != tag::ORDINARY {
        kernel::prepare_kernel_call(fd, Call::Writev)
    } else {
        KernelCall::WITHOUT_OFFSET
    };
    kernel_call.run(|| forward!(PWRITEV2(fd, vectors, count, offset, flags)))
}

/// pwritev2(2) with flags, to a stub (an empty file; firnd has its bytes). Flags that firnd cannot honour are refused.
///
/// # Safety
/// The same as for pwritev2(2).
unsafe fn write_stub_with_flags(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    offset: off64_t,
    flags: c_int,
) -> ssize_t {
    let sync_flags = libc::RWF_SYNC | libc::RWF_DSYNC;
    let append_flags = libc::RWF_APPEND | RWF_NOAPPEND;
    if flags & !(sync_flags | append_flags | libc::RWF_HIPRI) != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    let append = match flags & append_flags {
        0 => Append::AsOpened,
        libc::RWF_APPEND => Append::Always,
        RWF_NOAPPEND => Append::Never,
        _ => return fail(libc::EINVAL),
    };
    if offset < DESCRIPTOR_OFFSET {
        return fail(libc::EINVAL);
    }
    // SAFETY: the program has passed the vectors to pwritev2(2), to be read.
    let source = match unsafe { program_memory(vectors, count) } {
        Some(source) => source,
        None if count == 0 => return 0,
        None => return fail(libc::EINVAL),
    };
    let explicit_offset = u64::try_from(offset).ok();
    let outcome = stub::write_stub(fd, source, explicit_offset, append, Call::Pwritev);
    if let CallOutcome::Done(0..) = outcome
        && flags & sync_flags != 0
        && let Some(Err(errno)) = stub::sync_stub(fd, true)
    {
        return fail(errno);
    }
    match outcome {
        CallOutcome::Done(result) => with_errno(result),
        CallOutcome::Forward(_) => forward!(PWRITEV2(fd, vectors, count, offset, flags)),
    }
}
