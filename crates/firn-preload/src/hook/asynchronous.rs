//! Hooks of asynchronous input and output, aio(7). Threads of the C library carry it out by calls that no hook sees. So
//! for stubs (empty files; firnd has their bytes) the hooks carry it out at once.

use std::ffi::{c_int, c_void};

use libc::aiocb;

use super::{export, forward};
use crate::real::{AIO_FSYNC, AIO_READ, AIO_WRITE, LIO_LISTIO};
use crate::stub;
use crate::sys::fail;
use crate::table::{descriptor_tag, tag};

export! {
    aio_read aio_read64 = do_aio_read(control: *mut aiocb) -> c_int;
    aio_write aio_write64 = do_aio_write(control: *mut aiocb) -> c_int;
    aio_fsync aio_fsync64 = do_aio_fsync(op: c_int, control: *mut aiocb) -> c_int;
    lio_listio lio_listio64 = do_lio_listio(
        mode: c_int,
        list: *const *mut aiocb,
        count: c_int,
        event: *mut libc::sigevent,
    ) -> c_int;
}

/// Offset in `struct aiocb` (aio.h) of the errno, which aio_error(3) returns.
const ERROR_CODE: usize = 112;
/// Offset in `struct aiocb` of the result, which aio_return(3) returns.
const RETURN_VALUE: usize = 120;
const _: () = assert!(size_of::<aiocb>() == 168);

/// Whether a control block is about a stub.
///
/// # Safety
/// `control` is null or a control block.
unsafe fn is_stub(control: *const aiocb) -> bool {
    // SAFETY: the pointer is not null, so it is a control block that the program keeps until the call returns.
    !control.is_null() && descriptor_tag(unsafe { (*control).aio_fildes }) == tag::STUB
}

/// Reads or writes at once as a control block of aio(7) says, stores the result there and notifies the program. `op` is
/// an operation of lio_listio(3); any other than a read or write does nothing.
///
/// # Safety
/// `control` is a control block of the program.
unsafe fn execute_request(control: *mut aiocb, op: c_int) {
    // SAFETY: the program has passed the control block and its buffer for this request.
    unsafe {
        let fd = (*control).aio_fildes;
        let data = (*control).aio_buf.cast::<c_void>();
        let len = (*control).aio_nbytes;
        let offset = (*control).aio_offset;
        let result = match op {
            libc::LIO_READ => libc::pread64(fd, data, len, offset),
            libc::LIO_WRITE => libc::pwrite64(fd, data, len, offset),
            _ => 0,
        };
        let errno = if result < 0 {
            *libc::__errno_location()
        } else {
            0
        };
        finish_request(control, result, errno);
    }
}

/// Stores the result of a request in its control block, and notifies the program.
///
/// # Safety
/// The same as for [`execute_request`].
unsafe fn finish_request(control: *mut aiocb, result: isize, errno: c_int) {
    // SAFETY: the program has passed the control block.
    unsafe {
        let result_field = control.cast::<u8>().wrapping_add(RETURN_VALUE);
        result_field.cast::<isize>().write(result);
        error_field(control).write(errno);
        send_event(&raw const (*control).aio_sigevent);
    }
}

/// Returns the address of the errno in a control block.
fn error_field(control: *mut aiocb) -> *mut c_int {
    control.cast::<u8>().wrapping_add(ERROR_CODE).cast()
}

/// Notifies the program by a signal, if the event wants one.
///
/// # Safety
/// `event` is null or an event of the program.
unsafe fn send_event(event: *const libc::sigevent) {
    // SAFETY: the pointer is null, or the program has passed the event with its request.
    unsafe {
        if !event.is_null() && (*event).sigev_notify == libc::SIGEV_SIGNAL {
            libc::sigqueue(libc::getpid(), (*event).sigev_signo, (*event).sigev_value);
        }
    }
}

unsafe fn do_aio_read(control: *mut aiocb) -> c_int {
    // SAFETY: the program has passed the control block to aio_read(3).
    unsafe {
        if is_stub(control) {
            execute_request(control, libc::LIO_READ);
            return 0;
        }
        AIO_READ.get()(control)
    }
}

unsafe fn do_aio_write(control: *mut aiocb) -> c_int {
    // SAFETY: the program has passed the control block to aio_write(3).
    unsafe {
        if is_stub(control) {
            execute_request(control, libc::LIO_WRITE);
            return 0;
        }
        AIO_WRITE.get()(control)
    }
}

/// aio_fsync(3). For a stub (an empty file; firnd has its bytes) it syncs at once.
unsafe fn do_aio_fsync(op: c_int, control: *mut aiocb) -> c_int {
    // SAFETY: the program has passed the control block to aio_fsync(3).
    unsafe {
        if !is_stub(control) {
            return AIO_FSYNC.get()(op, control);
        }
        match stub::sync_stub((*control).aio_fildes, op == libc::O_DSYNC) {
            Some(Err(errno)) => finish_request(control, -1, errno),
            Some(Ok(())) | None => finish_request(control, 0, 0),
        }
        0
    }
}

/// lio_listio(3). If a file is a stub (an empty file; firnd has its bytes), the whole list is executed at once: the C
/// library's threads make calls that no hook sees.
unsafe fn do_lio_listio(
    mode: c_int,
    list: *const *mut aiocb,
    count: c_int,
    event: *mut libc::sigevent,
) -> c_int {
    let block = |index: c_int| list.wrapping_add(index as usize);
    // SAFETY: the program has passed `count` pointers to lio_listio(3), which may be null.
    let has_stub = !list.is_null() && (0..count).any(|index| unsafe { is_stub(*block(index)) });
    if !has_stub {
        return forward!(LIO_LISTIO(mode, list, count, event));
    }
    // A list with stubs and other files is executed at once as a whole.
    let mut has_failed = false;
    for index in 0..count {
        // SAFETY: the pointer is one of `count`, and a control block if it is not null.
        unsafe {
            let control = *block(index);
            if control.is_null() || (*control).aio_lio_opcode == libc::LIO_NOP {
                continue;
            }
            execute_request(control, (*control).aio_lio_opcode);
            has_failed |= error_field(control).read() != 0;
        }
    }
    if mode == libc::LIO_NOWAIT {
        // SAFETY: the program has passed the event to lio_listio(3).
        unsafe { send_event(event) };
        return 0;
    }
    if has_failed { fail(libc::EIO) } else { 0 }
}
