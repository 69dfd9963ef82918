//! The bytes of write(2) as requests: to an offset, in parts of a packet; to the end of the file, in one request.
//!
//! Promises
//! * A count is that of the bytes that are stored. Where it is not known, the call fails ([`WriteError::Unknown`]).
//! * An append is one request, so that firnd stores it between two others and never twice. What does not fit into a packet
//!   goes as a file in memory (memfd_create(2)), in which firnd notes how far it came: the next firnd finishes it.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};

use firn_direct::connection::{CallError, Connection, Payload};
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{ADOPT_AGAIN, DATA_BYTES_MAX, Op, Reply, Request};
use rustix::io::Errno;
use rustix::process::Resource;

use crate::connect;
use crate::fallback::WriteError;
use crate::handled::Handled;
use crate::memory::{Readable, Run, Source};
use crate::report::Call;
use crate::stub::data::{Append, write_stub};
use crate::stub::request::{check_status, repeat_request};
use crate::sys::{self, syscall};
use crate::table::Held;
use crate::trees;

/// How the requests of a call get to firnd.
pub(crate) trait Requester {
    /// Makes a request about the stub and waits for the answer.
    fn request(
        &mut self,
        op: Op,
        arg: u64,
        len: u32,
        payload: &mut Payload<'_>,
    ) -> Result<Reply, WriteError>;
}

/// Over the process's connection, which is made again where firnd is.
impl Requester for Held {
    fn request(
        &mut self,
        op: Op,
        arg: u64,
        len: u32,
        payload: &mut Payload<'_>,
    ) -> Result<Reply, WriteError> {
        repeat_request(self, op, arg, len, payload)
    }
}

/// A connection for one call: for a signal handler that interrupts the thread with the usual connection.
pub(crate) struct OwnConnection {
    connection: Connection,
    token: u64,
}

impl OwnConnection {
    /// Connects and tells firnd of the descriptor.
    pub(crate) fn for_stub(fd: c_int, access: c_int) -> Option<Self> {
        let (identity, _) = sys::identity(fd)?;
        let socket = trees::data_socket_on(identity.device)?;
        let connection = connect::connect_once(&socket)?;
        let request = Request::new(Op::Adopt, 0, access as u64).with_len(ADOPT_AGAIN);
        let mut payload = Payload {
            fd: sys::borrow(fd),
            ..Payload::none()
        };
        let reply = connection.call(&request, &mut payload).ok()?;
        check_status(&reply).ok()?;
        let token = reply.file_id;
        Some(Self { connection, token })
    }
}

impl Requester for OwnConnection {
    fn request(
        &mut self,
        op: Op,
        arg: u64,
        len: u32,
        payload: &mut Payload<'_>,
    ) -> Result<Reply, WriteError> {
        let request = Request::new(op, self.token, arg).with_len(len);
        match self.connection.call(&request, payload) {
            Ok(reply) => check_status(&reply)
                .map(|()| reply)
                .map_err(WriteError::Failed),
            Err(CallError::Fault) => Err(WriteError::Failed(libc::EFAULT)),
            Err(CallError::NotSent) => Err(WriteError::Failed(libc::EIO)),
            Err(CallError::NoReply) => Err(WriteError::Unknown(libc::EIO)),
        }
    }
}

/// Writes a run to an offset; fewer bytes where firnd has taken no more.
pub(crate) fn write_run(
    to: &mut impl Requester,
    run: Run<'_, Readable>,
    at: u64,
) -> Result<usize, WriteError> {
    let mut done = 0;
    while done < run.len() {
        let data = run.rest(done).first(DATA_BYTES_MAX);
        let mut payload = Payload {
            data: data.as_outgoing(),
            ..Payload::none()
        };
        let offset = at.wrapping_add(done as u64);
        match to.request(Op::Write, offset, data.len() as u32, &mut payload) {
            Ok(reply) => done += reply.count as usize,
            Err(WriteError::Failed(_)) if done > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes the runs of a source to an offset, as [`write_run`] does.
pub(crate) fn write_source(
    to: &mut impl Requester,
    source: Source<'_>,
    at: u64,
    total: usize,
) -> Result<usize, c_int> {
    let mut done = 0;
    for run in source.runs(0, total) {
        match write_run(to, run, at.wrapping_add(done as u64)) {
            Ok(more) => done += more,
            Err(error) => return error.after(done),
        }
    }
    Ok(done)
}

/// Writes a source to the end of the file; bytes written, and where they begin.
pub(crate) fn append_source(
    to: &mut impl Requester,
    source: Source<'_>,
    total: usize,
) -> Result<(usize, u64), c_int> {
    let limit = sys::limit_of(Resource::Fsize);
    let size_max = limit.unwrap_or(u64::MAX);
    let appended = append_within(to, source, total, size_max);
    if limit.is_some() && appended == Err(WriteError::Failed(libc::EFBIG)) {
        sys::raise_signal(libc::SIGXFSZ);
    }
    appended.map_err(WriteError::errno)
}

fn append_within(
    to: &mut impl Requester,
    source: Source<'_>,
    total: usize,
    size_max: u64,
) -> Result<(usize, u64), WriteError> {
    let mut runs = source.runs(0, total);
    let Some(first) = runs.next() else {
        return Ok((0, 0));
    };
    let is_one = first.len() == total;
    let file = if is_one && total <= DATA_BYTES_MAX {
        None
    } else {
        new_memory_file()
    };
    let reply = match file {
        Some(file) => {
            let len = fill_memory_file(&file, source, total).map_err(WriteError::Failed)?;
            let mut payload = Payload {
                fd: Some(file.as_fd()),
                ..Payload::none()
            };
            to.request(Op::Append, size_max, len, &mut payload)?
        }
        // Without a file in memory it is a short write: its bytes are together all the same.
        None => {
            let data = first.first(DATA_BYTES_MAX);
            let mut payload = Payload {
                data: data.as_outgoing(),
                ..Payload::none()
            };
            to.request(Op::Append, size_max, data.len() as u32, &mut payload)?
        }
    };
    Ok((reply.count as usize, reply.slot))
}

/// A file that has no name and lies in memory; `None` where the process can have none.
pub(crate) fn new_memory_file() -> Option<Descriptor> {
    let name = c"firn".as_ptr();
    // Linux before 6.3 does not know the second one, and from there on the system may insist on it.
    for flags in [libc::MFD_CLOEXEC | libc::MFD_NOEXEC_SEAL, libc::MFD_CLOEXEC] {
        // SAFETY: the kernel reads the name, a C string.
        let fd = unsafe { syscall!(libc::SYS_memfd_create, name, flags) };
        if fd >= 0 {
            // SAFETY: a new descriptor, known to this function only.
            return Some(unsafe { Descriptor::from_raw_fd(fd as c_int) });
        }
        if fd != -(libc::EINVAL as isize) {
            break;
        }
    }
    None
}

/// Copies a source into such a file; how many bytes: those before memory that cannot be read.
fn fill_memory_file(file: &Descriptor, source: Source<'_>, total: usize) -> Result<u32, c_int> {
    let number = file.as_fd().as_raw_fd();
    let mut done = 0;
    for run in source.runs(0, total) {
        let mut filled = 0;
        while filled < run.len() {
            let written = run.rest(filled).write_to(number, done as u64);
            match usize::try_from(written) {
                Ok(more) => {
                    filled += more;
                    done += more;
                }
                Err(_) if done > 0 => return Ok(done as u32),
                Err(_) => return Err(written.wrapping_neg() as c_int),
            }
        }
    }
    Ok(done as u32)
}

/// Writes all of a file in memory to a stub, at its offset.
pub(crate) fn write_memory_file(fd: c_int, file: &Descriptor) -> Result<(), c_int> {
    let len = rustix::fs::fstat(file)
        .map(|stat| stat.st_size as usize)
        .map_err(Errno::raw_os_error)?;
    if len == 0 {
        return Ok(());
    }
    let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
    let number = file.as_fd().as_raw_fd();
    // SAFETY: a new mapping of a file that only this function knows.
    let start = unsafe { syscall!(libc::SYS_mmap, 0usize, len, prot, flags, number, 0usize) };
    if start < 0 {
        return Err(start.wrapping_neg() as c_int);
    }
    // SAFETY: mapped for reading just now, until below.
    let text: Run<'_, Readable> = unsafe { Run::new(start as *mut c_void, len) };
    let mut done = 0;
    let mut result = Ok(());
    while done < len && result.is_ok() {
        let write =
            |source: Source<'_>| write_stub(fd, source, None, Append::AsOpened, Call::Write);
        match text.rest(done).as_memory(write) {
            Handled::Done(more) if more > 0 => done += more as usize,
            Handled::Done(failed) => result = Err(failed.wrapping_neg() as c_int),
            Handled::Forward(_) => result = Err(libc::EBADF),
        }
    }
    // SAFETY: as mapped above; nothing refers to it any more.
    unsafe { syscall!(libc::SYS_munmap, start, len) };
    result
}
