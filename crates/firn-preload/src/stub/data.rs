//! write(2), read(2) and lseek(2) on stubs.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use firn_direct::connection::{Connection, Payload};
use firn_format::data_socket::{ADOPT_AGAIN, AT_END, DATA_BYTES_MAX, Op, Request};
use rustix::process::Resource;

use crate::connect;
use crate::descriptor;
use crate::handled::{Handled, Ticket};
use crate::memory::{CALL_BYTES_MAX, Readable, Run, Source, Target};
use crate::offset;
use crate::report::{self, Call};
use crate::stub::attributes::sync_stub;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{adopt, write_by_requests};
use crate::stub::socket::Socket;
use crate::sys;
use crate::table::{Entry, Held, stub_mark, stub_mark_of};
use crate::trees;

/// Makes the offset private where nobody shares it.
fn own_offset(held: &mut Held) {
    if !held.is_private() && stub_mark_of(held.fd) == stub_mark::OWN {
        offset::make_private(held);
    }
}

/// write(2) and its kin, at the descriptor's offset or at `at`.
pub(crate) fn write_stub(
    fd: c_int,
    source: Source<'_>,
    at: Option<u64>,
    append: bool,
    call: Call,
) -> Handled {
    if source.is_outside() {
        return Handled::of(Err(libc::EFAULT));
    }
    let mut held = match lock_stub(fd) {
        Entered::Held(held) => held,
        Entered::Again(entry) => return Handled::of(write_again(fd, entry, source, at)),
        Entered::Not => return Handled::Forward(Ticket::NONE),
        Entered::Vforked => return Handled::of(Err(libc::EIO)),
    };
    let mut total = source.total().unwrap_or(CALL_BYTES_MAX);
    if let Err(handled) = prepare_call(&mut held, libc::O_RDONLY, total) {
        return handled;
    }
    let flags = held.stub.flags;
    let handled = if append || flags & libc::O_APPEND != 0 {
        append_all(held, source, at, total)
    } else {
        total = match bytes_within_limit(&held, at, total) {
            Ok(total) => total,
            Err(errno) => return Handled::of(Err(errno)),
        };
        held.stub.wrote = true;
        descriptor::write_descriptor::<Socket>(held, source, (at, total), call)
    };
    let is_synced = flags & (libc::O_SYNC | libc::O_DSYNC) != 0;
    match handled {
        Handled::Done(done) if done > 0 && is_synced => match sync_stub(fd, false) {
            Some(Err(errno)) => Handled::of(Err(errno)),
            _ => Handled::Done(done),
        },
        handled => handled,
    }
}

/// How many bytes of a write the limit of file sizes lets through (getrlimit(2)); none: SIGXFSZ and EFBIG.
fn bytes_within_limit(held: &Held, at: Option<u64>, total: usize) -> Result<usize, c_int> {
    let Some(limit) = sys::limit_of(Resource::Fsize) else {
        return Ok(total);
    };
    let from = at.unwrap_or_else(|| offset::current_offset(held));
    if from >= limit {
        sys::raise_signal(libc::SIGXFSZ);
        return Err(libc::EFBIG);
    }
    Ok(total.min(usize::try_from(limit - from).unwrap_or(usize::MAX)))
}

/// What comes before a write or read: the access mode `forbidden` fails, 0 bytes are done, and firnd knows the
/// descriptor.
fn prepare_call(held: &mut Held, forbidden: c_int, total: usize) -> Result<(), Handled> {
    if held.stub.flags & libc::O_ACCMODE == forbidden {
        return Err(Handled::of(Err(libc::EBADF)));
    }
    if total == 0 {
        return Err(Handled::of(Ok(0)));
    }
    adopt(held).map_err(|errno| Handled::of(Err(errno)))?;
    own_offset(held);
    Ok(())
}

fn append_all(mut held: Held, source: Source<'_>, at: Option<u64>, total: usize) -> Handled {
    let mut done = 0;
    let mut end = 0;
    for run in source.runs(0, total) {
        match write_by_requests(&mut held, run, AT_END) {
            Ok((more, place)) => {
                done += more;
                end = place.wrapping_add(more as u64);
                if more < run.len() {
                    break;
                }
            }
            Err(errno) if done == 0 => return Handled::of(Err(errno)),
            Err(_) => break,
        }
    }
    if at.is_none() {
        offset::set_offset(&held, end);
    }
    report::count_kernel(Call::Write);
    Handled::of(Ok(done))
}

/// A signal handler writes to the descriptor that the interrupted code is busy with, and over whose connection
/// it may be: it makes one of its own.
#[cold]
fn write_again(
    fd: c_int,
    entry: &'static Entry,
    source: Source<'_>,
    at: Option<u64>,
) -> Result<usize, c_int> {
    let total = source.total().ok_or(libc::EINVAL)?;
    let (identity, _) = sys::identity(fd).ok_or(libc::EIO)?;
    let socket = trees::data_socket_on(identity.device).ok_or(libc::EIO)?;
    let connection = connect::connect_once(&socket).ok_or(libc::EIO)?;
    let flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
    let token = adopt_once(&connection, fd, flags & libc::O_ACCMODE)?;
    let appends = flags & libc::O_APPEND != 0;
    let offset = match at {
        Some(at) => at,
        None if entry.is_private() => entry.offset.fetch_add(total as u64, Ordering::Relaxed),
        None => (sys::lseek(fd, total as i64, libc::SEEK_CUR) as u64).wrapping_sub(total as u64),
    };
    let mut done = 0;
    for run in source.runs(0, total) {
        let at = if appends {
            AT_END
        } else {
            offset.wrapping_add(done as u64)
        };
        match write_over(&connection, token, run, at) {
            Ok(more) => done += more,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Tells firnd of a descriptor over a connection that nothing else uses; its token there.
fn adopt_once(connection: &Connection, fd: c_int, access: c_int) -> Result<u64, c_int> {
    let request = Request::new(Op::Adopt, 0, access as u64).with_len(ADOPT_AGAIN);
    let mut payload = Payload {
        fd: sys::borrow(fd),
        ..Payload::none()
    };
    let reply = connection.call(&request, &mut payload);
    reply.map(|reply| reply.file_id).map_err(|_| libc::EIO)
}

/// Writes a run at `at`, which may be [`AT_END`]; how many bytes, or EIO where it is none.
fn write_over(
    connection: &Connection,
    token: u64,
    run: Run<'_, Readable>,
    at: u64,
) -> Result<usize, c_int> {
    let mut done = 0;
    while done < run.len() {
        let data = run.rest(done).first(DATA_BYTES_MAX);
        let to = if at == AT_END {
            AT_END
        } else {
            at.wrapping_add(done as u64)
        };
        let request = Request::new(Op::Write, token, to).with_len(data.len() as u32);
        let mut payload = Payload {
            data: data.as_outgoing(),
            ..Payload::none()
        };
        match connection.call(&request, &mut payload) {
            Ok(reply) if connect::is_ok(&reply) => done += reply.count as usize,
            _ if done > 0 => break,
            _ => return Err(libc::EIO),
        }
    }
    Ok(done)
}

/// lseek(2).
pub(crate) fn seek_stub(fd: c_int, offset: i64, whence: c_int) -> Handled {
    match lock_stub(fd) {
        Entered::Held(mut held) => {
            own_offset(&mut held);
            descriptor::seek_descriptor::<Socket>(held, offset, whence)
        }
        Entered::Again(entry) if entry.is_private() && whence == libc::SEEK_CUR && offset == 0 => {
            Handled::Done(entry.offset.load(Ordering::Relaxed) as isize)
        }
        _ => Handled::Forward(Ticket::NONE),
    }
}

/// read(2) and its kin.
pub(crate) fn read_stub(fd: c_int, target: Target<'_>, at: Option<u64>, call: Call) -> Handled {
    if target.is_outside() {
        return Handled::of(Err(libc::EFAULT));
    }
    let mut held = match lock_stub(fd) {
        Entered::Held(held) => held,
        Entered::Again(_) | Entered::Vforked => return Handled::of(Err(libc::EIO)),
        Entered::Not => return Handled::Forward(Ticket::NONE),
    };
    let total = target.total().unwrap_or(CALL_BYTES_MAX);
    if let Err(handled) = prepare_call(&mut held, libc::O_WRONLY, total) {
        return handled;
    }
    descriptor::read_descriptor::<Socket>(held, target, (at, total), call)
}
