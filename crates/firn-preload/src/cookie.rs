//! Streams of stdio over *stubs*: empty files on tmpfs with their bytes in the daemon firnd.
//!
//! Hooks do not see the system calls of an ordinary stream. So streams over stubs are made with fopencookie(3), which
//! calls functions of this module. Such a stream has the number of its descriptor (`fileno`). It is a byte stream, so
//! the C library refuses wide characters, as in every stream that was used for bytes.

use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{FILE, off64_t, size_t, ssize_t};

/// Offsets in `struct _IO_FILE` (bits/types/struct_FILE.h), which have been stable since version 2.1 of glibc.
/// `ORIENTATION` is `_mode`, and `VTABLE` is the pointer to the table of functions behind the struct.
mod offset_in_file {
    pub(super) const FLAGS: usize = 0;
    pub(super) const WRITE_BASE: usize = 32;
    pub(super) const WRITE_PTR: usize = 40;
    pub(super) const FILENO: usize = 112;
    pub(super) const ORIENTATION: usize = 192;
    pub(super) const VTABLE: usize = 216;
}

/// Returns the address of a field of a stream; `offset` is a constant of [`offset_in_file`].
fn field<T>(file: *mut FILE, offset: usize) -> *mut T {
    file.cast::<u8>().wrapping_add(offset).cast()
}

/// Bit of `_flags`: the stream is unbuffered.
const UNBUFFERED: u32 = 0x2;
/// Bit of `_flags`: the stream is line buffered.
const LINE_BUFFERED: u32 = 0x200;
/// Value of `_mode`, the orientation of a stream: it is used for bytes, and not for wide characters.
const BYTE_ORIENTED: c_int = -1;

/// `cookie_io_functions_t` of fopencookie(3).
#[repr(C)]
struct Functions {
    read: unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn __fpurge(file: *mut FILE);
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

/// Address of the table of functions that only streams of this module have; 0 if none was made yet.
static STUB_STREAM_FUNCTIONS: AtomicUsize = AtomicUsize::new(0);

/// Reads for the C library, through the hook of read(2). A cookie is the number of the stream's descriptor.
unsafe extern "C" fn read(cookie: *mut c_void, data: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: the C library passes its own buffer, which has `len` writable bytes.
    unsafe { libc::read(cookie as c_int, data.cast(), len) }
}

/// Writes for the C library, through the hook of write(2), until all bytes are written or a write fails. Returns the
/// number of written bytes.
unsafe extern "C" fn write(cookie: *mut c_void, data: *const c_char, len: size_t) -> ssize_t {
    let fd = cookie as c_int;
    let mut done = 0;
    while done < len {
        // SAFETY: the range is the rest of the C library's buffer.
        let written = unsafe { libc::write(fd, data.wrapping_add(done).cast(), len - done) };
        match usize::try_from(written) {
            Ok(count) => done += count,
            // For the C library a short count means an error. It does not accept a negative one.
            Err(_) => break,
        }
    }
    done as ssize_t
}

unsafe extern "C" fn seek(cookie: *mut c_void, offset: *mut off64_t, whence: c_int) -> c_int {
    // SAFETY: the C library passes the address of an offset that may be read and written.
    unsafe {
        let result = libc::lseek64(cookie as c_int, *offset, whence);
        if result < 0 {
            return -1;
        }
        *offset = result;
        0
    }
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream is being closed, and it owns the descriptor.
    unsafe { libc::close(cookie as c_int) }
}

/// Makes a stdio stream over the descriptor of a stub (an empty file; firnd has its bytes). The stream reads and writes
/// by functions of this module. Returns null if there is no memory.
///
/// # Safety
/// `mode` is a C string, as for fdopen(3).
pub(crate) unsafe fn open_stub_stream(fd: c_int, mode: *const c_char) -> *mut FILE {
    let functions = Functions {
        read,
        write,
        seek,
        close,
    };
    // SAFETY: `mode` is a C string, and the stream has fields of these types at these offsets.
    unsafe {
        let file = fopencookie(fd as *mut c_void, mode, functions);
        if file.is_null() {
            return file;
        }
        // For fileno(3): streams of fopencookie(3) have no descriptor of their own.
        field::<c_int>(file, offset_in_file::FILENO).write(fd);
        // The C library then refuses wide characters.
        field::<c_int>(file, offset_in_file::ORIENTATION).write(BYTE_ORIENTED);
        // By this table, `is_stub_stream` recognises the streams of this module.
        let function_table = field::<usize>(file, offset_in_file::VTABLE).read();
        STUB_STREAM_FUNCTIONS.store(function_table, Ordering::Release);
        let appends = *mode == b'a' as c_char;
        if appends {
            libc::lseek64(fd, 0, libc::SEEK_END);
        }
        file
    }
}

/// Whether this module has made a stream.
///
/// # Safety
/// `file` is an open stream.
pub(crate) unsafe fn is_stub_stream(file: *mut FILE) -> bool {
    // SAFETY: an open stream has the address of its table of functions at this offset.
    let function_table = unsafe { field::<usize>(file, offset_in_file::VTABLE).read() };
    function_table == STUB_STREAM_FUNCTIONS.load(Ordering::Acquire) && function_table != 0
}

/// Returns the variable (`stdin`, `stdout` or `stderr`) of a standard descriptor.
pub(crate) fn standard_stream_variable(fd: c_int) -> Option<*mut *mut FILE> {
    match fd {
        libc::STDIN_FILENO => Some(&raw mut stdin),
        libc::STDOUT_FILENO => Some(&raw mut stdout),
        libc::STDERR_FILENO => Some(&raw mut stderr),
        _ => None,
    }
}

/// Replaces `stdin`, `stdout` or `stderr` if its descriptor has become a stub (an empty file; firnd has its bytes). The
/// new stream stays for good; it also works if the descriptor becomes another file later.
pub(crate) fn replace_standard_stream(fd: c_int) {
    let Some(variable) = standard_stream_variable(fd) else {
        return;
    };
    let mode = if fd == libc::STDIN_FILENO { c"r" } else { c"w" };
    // SAFETY: these are the program's streams. It must not use a stream while it redirects the stream's descriptor,
    // with or without this library.
    unsafe {
        let old_stream = *variable;
        if old_stream.is_null() || is_stub_stream(old_stream) || libc::fileno(old_stream) != fd {
            return;
        }
        let new_stream = open_stub_stream(fd, mode.as_ptr());
        if new_stream.is_null() {
            return;
        }
        copy_buffering(old_stream, new_stream, fd);
        move_buffered_bytes(old_stream, new_stream);
        *variable = new_stream;
    }
}

/// Gives a new stream the kind of buffering of an old one.
///
/// # Safety
/// Both are open streams, and the new one is unused.
unsafe fn copy_buffering(old_stream: *mut FILE, new_stream: *mut FILE, fd: c_int) {
    // SAFETY: the stream has its flags at this offset.
    let flags = unsafe { field::<u32>(old_stream, offset_in_file::FLAGS).read() };
    let buffering = if flags & UNBUFFERED != 0 || fd == libc::STDERR_FILENO {
        libc::_IONBF
    } else if flags & LINE_BUFFERED != 0 {
        libc::_IOLBF
    } else {
        // A new stream is fully buffered.
        return;
    };
    // SAFETY: the stream is unused, and gets no buffer of the program.
    unsafe { libc::setvbuf(new_stream, std::ptr::null_mut(), buffering, 0) };
}

/// Moves unwritten bytes from the buffer of an old stream to a new one. The old stream would write them to the
/// descriptor later, by a call that no hook sees.
///
/// # Safety
/// Both are open streams.
unsafe fn move_buffered_bytes(old_stream: *mut FILE, new_stream: *mut FILE) {
    // SAFETY: the stream has these pointers at these offsets, and its unwritten bytes are between them.
    unsafe {
        let start = field::<*const c_void>(old_stream, offset_in_file::WRITE_BASE).read();
        let end = field::<*const c_void>(old_stream, offset_in_file::WRITE_PTR).read();
        let buffered_bytes = (end as usize).saturating_sub(start as usize);
        if buffered_bytes > 0 {
            libc::fwrite(start, 1, buffered_bytes, new_stream);
            __fpurge(old_stream);
        }
    }
}
