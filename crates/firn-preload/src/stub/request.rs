//! Requests about a stub: firnd is told of the descriptor before the first one, and again by a firnd that was mounted
//! next. Where there is none, the call waits for it, [`WAIT_MS`] at most, and fails with EIO.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use firn_direct::connection::{CallError, Payload};
use firn_format::data_socket::{ADOPT_AGAIN, AT_END, DATA_BYTES_MAX, Op, Reply, Request, Status};

use crate::connect;
use crate::memory::{Readable, Run};
use crate::report::{self, Reason};
use crate::sys;
use crate::table::Held;
use crate::trees;

/// How long a call waits for a firnd that was killed to be there again, unless `FIRN_PRELOAD_WAIT` says
/// otherwise (seconds).
const WAIT_MS_DEFAULT: u32 = 10_000;
const PAUSE_MS: u32 = 20;
static WAIT_MS: AtomicU32 = AtomicU32::new(WAIT_MS_DEFAULT);

/// Sets the patience, once, at the start.
pub(crate) fn set_patience(seconds: Option<&[u8]>) {
    let number = seconds.and_then(|text| std::str::from_utf8(text).ok()?.parse::<u32>().ok());
    if let Some(number) = number {
        WAIT_MS.store(number.saturating_mul(1000), Ordering::Relaxed);
    }
}

/// The wait of one call for a firnd.
pub(crate) struct Wait {
    waited_ms: u32,
}

impl Wait {
    pub(crate) fn new() -> Self {
        Self { waited_ms: 0 }
    }

    /// Pauses and reads the trees anew; `false`: the call has waited long enough.
    pub(crate) fn pause(&mut self) -> bool {
        if self.waited_ms >= WAIT_MS.load(Ordering::Relaxed) {
            return false;
        }
        sys::sleep_ms(PAUSE_MS);
        self.waited_ms += PAUSE_MS;
        trees::read_trees();
        true
    }
}

/// Makes sure that firnd knows the descriptor.
pub(crate) fn adopt(held: &mut Held) -> Result<(), c_int> {
    if held.stub.adopted {
        return Ok(());
    }
    let mut wait = Wait::new();
    loop {
        let socket = trees::data_socket_on(held.identity.device);
        if let Some(link) = socket.and_then(|socket| connect::connect_for_stubs(&socket))
            && adopt_over(held, link)?
        {
            return Ok(());
        }
        if !wait.pause() {
            report::count_left(Reason::NoConnection);
            return Err(libc::EIO);
        }
    }
}

/// Tells the firnd of a connection of the descriptor; `false` where the connection has ended.
fn adopt_over(held: &mut Held, link: u32) -> Result<bool, c_int> {
    let wanted = held.stub.flags & (libc::O_ACCMODE | libc::O_TRUNC);
    let again = if held.stub.known { ADOPT_AGAIN } else { 0 };
    let request = Request::new(Op::Adopt, 0, wanted as u64).with_len(again);
    let mut payload = Payload {
        fd: sys::borrow(held.fd),
        ..Payload::none()
    };
    let reply = match connect::call_firnd(link, &request, &mut payload) {
        Ok(reply) => reply,
        Err(CallError::Fault) => return Err(libc::EFAULT),
        Err(CallError::NotSent | CallError::NoReply) => return Ok(false),
    };
    check_status(&reply)?;
    held.link = link;
    held.token = reply.file_id;
    held.stub.adopted = true;
    held.stub.known = true;
    held.stub.flags &= !libc::O_TRUNC;
    held.stub.granted = false;
    held.lease.clear_lease();
    held.list.unmap_extents();
    Ok(true)
}

/// What a reply means for the call; ENODEV: it is no stub.
pub(crate) fn check_status(reply: &Reply) -> Result<(), c_int> {
    match Status::from_word(reply.status) {
        Status::Ok => Ok(()),
        Status::Failed => Err(reply.errno as c_int),
        Status::BadToken => Err(libc::ENODEV),
        _ => Err(libc::EIO),
    }
}

/// A request about the descriptor. One that firnd may have executed before the connection ended is sent again,
/// unless executing it twice would write twice.
pub(crate) fn send_request(
    held: &mut Held,
    op: Op,
    arg: u64,
    len: u32,
    mut payload: Payload<'_>,
) -> Result<Reply, c_int> {
    // A firnd that goes again and again is none.
    for _ in 0..64 {
        adopt(held)?;
        let request = Request::new(op, held.token, arg).with_len(len);
        match connect::call_firnd(held.link, &request, &mut payload) {
            Ok(reply) if Status::from_word(reply.status) == Status::BadToken => {}
            Ok(reply) => return check_status(&reply).map(|()| reply),
            Err(CallError::Fault) => return Err(libc::EFAULT),
            Err(CallError::NoReply) if op == Op::Write && arg == AT_END => {
                return Err(libc::EIO);
            }
            Err(CallError::NotSent | CallError::NoReply) => {}
        }
        held.stub.adopted = false;
    }
    Err(libc::EIO)
}

/// Writes by requests; bytes written and where, or the errno where there are none. `at`: [`AT_END`] appends.
pub(crate) fn write_by_requests(
    held: &mut Held,
    run: Run<'_, Readable>,
    at: u64,
) -> Result<(usize, u64), c_int> {
    let mut done = 0;
    let mut place = at;
    while done < run.len() {
        let data = run.rest(done).first(DATA_BYTES_MAX);
        let payload = Payload {
            data: data.as_outgoing(),
            ..Payload::none()
        };
        let to = if at == AT_END {
            AT_END
        } else {
            at.wrapping_add(done as u64)
        };
        match send_request(held, Op::Write, to, data.len() as u32, payload) {
            Ok(reply) => {
                done += reply.count as usize;
                if at == AT_END {
                    place = reply
                        .slot
                        .wrapping_add(u64::from(reply.count))
                        .wrapping_sub(done as u64);
                }
            }
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => break,
        }
    }
    held.stub.wrote = true;
    Ok((done, place))
}

pub(crate) fn ask_size(held: &mut Held) -> Result<u64, c_int> {
    send_request(held, Op::Attr, 0, 0, Payload::none()).map(|reply| reply.size)
}
