//! Sends the bytes of write(2) on a *stub* (an empty file; firnd has its bytes) to firnd, the process that serves the
//! mount. A write to an offset is divided into packets of one request each; an append is one request.
//!
//! Promises
//! * A returned count is the number of stored bytes. If it is not known, the call fails ([`WriteError::Unknown`]).
//! * An append is one request, so that firnd stores its bytes together and only once. Bytes that do not fit into a
//!   packet are sent in a memory file (memfd_create(2)). firnd notes its progress there, so that a restarted firnd can
//!   finish.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd};

use firn_direct::connection::{CallError, Connection, Payload};
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{ADOPT_AGAIN, DATA_BYTES_MAX, Op, Reply, Request};
use rustix::io::Errno;
use rustix::process::Resource;

use crate::connect;
use crate::fallback::{WriteError, write_runs};
use crate::memory::{Readable, Run, Source};
use crate::outcome::CallOutcome;
use crate::report::Call;
use crate::stub::data::{Append, write_stub};
use crate::stub::request::{check_status, repeat_request};
use crate::sys::{self, syscall};
use crate::table::LockedEntry;
use crate::trees;

/// A way to make requests about a stub.
pub(crate) trait Requester {
    /// Makes a request about the stub, and waits for the reply.
    fn request(
        &mut self,
        op: Op,
        arg: u64,
        len: u32,
        payload: &mut Payload<'_>,
    ) -> Result<Reply, WriteError>;
}

/// Makes requests over the process's connection, which is made again if it has ended.
impl Requester for LockedEntry {
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

/// A connection for one call of a signal handler, whose thread may be using the usual connection.
pub(crate) struct OwnConnection {
    connection: Connection,
    token: u64,
}

impl OwnConnection {
    /// Connects, and makes firnd know the descriptor.
    pub(crate) fn for_stub(fd: c_int, access: c_int) -> Option<Self> {
        let (identity, _) = sys::identity(fd)?;
        let socket = trees::data_socket_on(identity.device)?;
        let connection = connect::connect_for_one_call(&socket)?;
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
    /// Makes a request over this connection, once. `Failed` means that firnd stored no byte. `Unknown` means that firnd
    /// ended before its reply, and may have stored some.
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

/// Writes a run of contiguous bytes to a stub (an empty file; firnd has its bytes) at an offset, by one request to
/// firnd for each packet. Returns the number of bytes, which is less than the run if firnd could not store more.
pub(crate) fn write_run(
    requester: &mut impl Requester,
    run: Run<'_, Readable>,
    offset: u64,
) -> Result<usize, WriteError> {
    let mut done = 0;
    while done < run.len() {
        let packet = run.without_first(done).first(DATA_BYTES_MAX);
        let mut payload = Payload {
            data: packet.as_outgoing(),
            ..Payload::none()
        };
        let packet_offset = offset.wrapping_add(done as u64);
        match requester.request(Op::Write, packet_offset, packet.len() as u32, &mut payload) {
            Ok(reply) => done += reply.count as usize,
            Err(WriteError::Failed(_)) if done > 0 => break,
            // Also `Unknown` after some packets: a count without bytes that may be stored would be wrong.
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Writes a source at an offset. Returns the number of bytes, which is less than `total` if firnd could not store more.
pub(crate) fn write_source(
    requester: &mut impl Requester,
    source: Source<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    let progress = write_runs(source, 0, total, |run, done| {
        write_run(requester, run, offset.wrapping_add(done))
    });
    progress.into_result()
}

/// Where firnd has stored the bytes of an append.
pub(crate) struct AppendedRange {
    /// Offset in the file of the first byte.
    start: u64,
    /// Number of bytes.
    pub(crate) count: usize,
}

impl AppendedRange {
    /// Returns the offset behind the last byte.
    pub(crate) fn end(&self) -> u64 {
        self.start.wrapping_add(self.count as u64)
    }
}

/// Appends a source to the file. If the limit of file sizes forbids that, the process gets SIGXFSZ.
pub(crate) fn append_source(
    requester: &mut impl Requester,
    source: Source<'_>,
    total: usize,
) -> Result<AppendedRange, c_int> {
    let limit = sys::limit_of(Resource::Fsize);
    let size_max = limit.unwrap_or(u64::MAX);
    let appended = append_within(requester, source, total, size_max);
    if limit.is_some() && matches!(appended, Err(WriteError::Failed(libc::EFBIG))) {
        sys::raise_signal(libc::SIGXFSZ);
    }
    appended.map_err(WriteError::errno)
}

/// Appends a source to a stub (an empty file; firnd has its bytes) that may not become larger than `size_max`, by one
/// request to firnd. Contiguous bytes that fit into a packet are sent in it, and others in a memory file, which has no
/// name. Returns the range of the file that the appended bytes have.
fn append_within(
    requester: &mut impl Requester,
    source: Source<'_>,
    total: usize,
    size_max: u64,
) -> Result<AppendedRange, WriteError> {
    let mut runs = source.runs(0, total);
    let Some(first_run) = runs.next() else {
        return Ok(AppendedRange { start: 0, count: 0 });
    };
    let is_single_run = first_run.len() == total;
    let fits_packet = is_single_run && total <= DATA_BYTES_MAX;
    let memory_file = if fits_packet { None } else { new_memory_file() };
    let reply = if let Some(file) = memory_file {
        let len = fill_memory_file(&file, source, total).map_err(WriteError::Failed)?;
        let mut payload = Payload {
            fd: Some(file.as_fd()),
            ..Payload::none()
        };
        requester.request(Op::Append, size_max, len, &mut payload)?
    } else {
        // If no memory file can be made, the append is a short write of what fits into one packet.
        let packet = first_run.first(DATA_BYTES_MAX);
        let mut payload = Payload {
            data: packet.as_outgoing(),
            ..Payload::none()
        };
        requester.request(Op::Append, size_max, packet.len() as u32, &mut payload)?
    };
    Ok(AppendedRange {
        // In this answer, `slot` is the offset in the file.
        start: reply.slot,
        count: reply.count as usize,
    })
}

/// Makes a memory file, which has no name (memfd_create(2)). Returns `None` if the process cannot have one, for example
/// because it has no free descriptor.
pub(crate) fn new_memory_file() -> Option<Descriptor> {
    let name = c"firn".as_ptr();
    // Linux before 6.3 does not know MFD_NOEXEC_SEAL, and a later one may require it.
    for flags in [libc::MFD_CLOEXEC | libc::MFD_NOEXEC_SEAL, libc::MFD_CLOEXEC] {
        // SAFETY: the kernel reads the name, which is a C string.
        let fd = unsafe { syscall!(libc::SYS_memfd_create, name, flags) };
        if fd >= 0 {
            // SAFETY: the descriptor is new, and only this function knows it.
            return Some(unsafe { Descriptor::from_raw_fd(fd as c_int) });
        }
        if fd != -(libc::EINVAL as isize) {
            break;
        }
    }
    None
}

/// Copies a source to a memory file, in which the bytes are sent to firnd. Returns the number of bytes. If a part of
/// the source cannot be read, the copy ends before it.
fn fill_memory_file(file: &Descriptor, source: Source<'_>, total: usize) -> Result<u32, c_int> {
    let fd = file.as_fd().as_raw_fd();
    let mut done = 0;
    for run in source.runs(0, total) {
        let mut run_done = 0;
        while run_done < run.len() {
            let written = run.without_first(run_done).write_to(fd, done as u64);
            match usize::try_from(written) {
                Ok(count) => {
                    run_done += count;
                    done += count;
                }
                Err(_) if done > 0 => return Ok(done as u32),
                Err(_) => return Err(written.wrapping_neg() as c_int),
            }
        }
    }
    Ok(done as u32)
}

/// Writes all bytes of a memory file (memfd_create(2)) to a stub, an empty file with its bytes in firnd, at the stub's
/// offset.
pub(crate) fn write_memory_file(fd: c_int, file: &Descriptor) -> Result<(), c_int> {
    let stat = rustix::fs::fstat(file).map_err(Errno::raw_os_error)?;
    let len = stat.st_size as usize;
    if len == 0 {
        return Ok(());
    }
    let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
    let file_fd = file.as_fd().as_raw_fd();
    // SAFETY: the kernel chooses the address of the new mapping, so no other memory is affected.
    let start = unsafe { syscall!(libc::SYS_mmap, 0usize, len, prot, flags, file_fd, 0usize) };
    if start < 0 {
        return Err(start.wrapping_neg() as c_int);
    }
    // SAFETY: the bytes are mapped for reading until the end of this function.
    let text: Run<'_, Readable> = unsafe { Run::new(start as *mut c_void, len) };
    let result = write_all_to_stub(fd, text);
    // SAFETY: the mapping was made above, and nothing uses it any more.
    unsafe { syscall!(libc::SYS_munmap, start, len) };
    result
}

/// Writes a whole run to a stub, by several calls if needed.
fn write_all_to_stub(fd: c_int, run: Run<'_, Readable>) -> Result<(), c_int> {
    let mut done = 0;
    while done < run.len() {
        let write =
            |source: Source<'_>| write_stub(fd, source, None, Append::AsOpened, Call::Write);
        match run.without_first(done).as_memory(write) {
            CallOutcome::Done(count) if count > 0 => done += count as usize,
            CallOutcome::Done(failure) => return Err(failure.wrapping_neg() as c_int),
            CallOutcome::Forward(_) => return Err(libc::EBADF),
        }
    }
    Ok(())
}
