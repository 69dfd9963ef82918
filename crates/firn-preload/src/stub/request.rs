//! Makes requests to firnd about a stub (an empty file; firnd has its bytes), and repeats them if the connection ends.
//!
//! A stub is *adopted* before its first request: firnd gets a copy of the descriptor and returns a token. After a
//! restart of firnd it is adopted again. If firnd does not run, a call waits until it is started, at most [`WAIT_MS`],
//! and then fails with EIO.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use firn_direct::connection::{CallError, Payload};
use firn_format::data_socket::{ADOPT_AGAIN, Op, Reply, Request, Status};

use crate::connect;
use crate::fallback::WriteError;
use crate::report::{self, Reason};
use crate::sys;
use crate::table::LockedEntry;
use crate::trees;

/// Longest time that a call waits until firnd is started, unless `FIRN_PRELOAD_WAIT` (in seconds) says otherwise.
const WAIT_MS_DEFAULT: u32 = 10_000;
/// Value of the length field of a request to adopt a descriptor for the first time. If an earlier firnd had adopted it,
/// the value is [`ADOPT_AGAIN`].
const ADOPT_FIRST: u32 = 0;
/// Time between two attempts to connect.
const PAUSE_MS: u32 = 20;
/// Number of free descriptors that a new connection needs: one for its socket, and one that is closed soon, for the
/// arena or a copy of the socket.
const CONNECT_DESCRIPTORS: usize = 2;
/// Maximum number of connections over which one request is tried.
const CONNECTIONS_MAX: u32 = 64;
/// Longest time that a call waits until firnd is started, in milliseconds. An environment variable can change it at the
/// start.
static WAIT_MS: AtomicU32 = AtomicU32::new(WAIT_MS_DEFAULT);

/// Sets the longest wait, from the text of an environment variable. It is called once, at the start.
pub(crate) fn set_wait_limit(seconds: Option<&[u8]>) {
    let number = seconds.and_then(|text| std::str::from_utf8(text).ok()?.parse::<u32>().ok());
    if let Some(number) = number {
        WAIT_MS.store(number.saturating_mul(1000), Ordering::Relaxed);
    }
}

/// The time that one call has waited until firnd is started.
pub(crate) struct Wait {
    waited_ms: u32,
}

impl Wait {
    pub(crate) fn new() -> Self {
        Self { waited_ms: 0 }
    }

    /// Pauses, and reads the runtime directory again, where a restarted firnd describes its tree. The error is EIO if
    /// the call has waited long enough, and EMFILE or ENFILE if no descriptor is left to connect with.
    pub(crate) fn pause_and_reread_trees(&mut self) -> Result<(), c_int> {
        sys::check_descriptors_left(CONNECT_DESCRIPTORS)?;
        if self.waited_ms >= WAIT_MS.load(Ordering::Relaxed) {
            return Err(libc::EIO);
        }
        sys::sleep_ms(PAUSE_MS);
        self.waited_ms += PAUSE_MS;
        trees::read_trees();
        Ok(())
    }
}

/// Makes sure that firnd (the serving process) knows the descriptor of a stub, an empty file with its bytes in firnd.
/// If firnd does not run, it waits for a limited time until firnd is started, and then returns an errno.
pub(crate) fn adopt(locked: &mut LockedEntry) -> Result<(), c_int> {
    if locked.stub.is_adopted {
        return Ok(());
    }
    let mut wait = Wait::new();
    loop {
        let socket = trees::data_socket_on(locked.identity.device);
        if let Some(socket) = socket
            && let Some(link) = connect::connect_for_stubs(&socket)
            && adopt_on_link(locked, link)?
        {
            return Ok(());
        }
        if let Err(errno) = wait.pause_and_reread_trees() {
            report::count_left(Reason::NoConnection);
            return Err(errno);
        }
    }
}

/// Makes the firnd (serving process) at the other end of the connection `link` know the descriptor of a stub, an empty
/// file with its bytes in firnd. It gets a copy of the descriptor. Returns false if the connection has ended.
fn adopt_on_link(locked: &mut LockedEntry, link: u32) -> Result<bool, c_int> {
    let open_flags = locked.stub.flags & (libc::O_ACCMODE | libc::O_TRUNC);
    // The length field of this request says whether an earlier firnd has known the descriptor.
    let adoption = if locked.stub.was_adopted {
        ADOPT_AGAIN
    } else {
        ADOPT_FIRST
    };
    let request = Request::new(Op::Adopt, 0, open_flags as u64).with_len(adoption);
    let mut payload = Payload {
        fd: sys::borrow(locked.fd),
        ..Payload::none()
    };
    let reply = match connect::call_firnd(link, &request, &mut payload) {
        Ok(reply) => reply,
        Err(CallError::Fault) => return Err(libc::EFAULT),
        Err(CallError::NotSent | CallError::NoReply) => return Ok(false),
    };
    check_status(&reply)?;
    locked.link = link;
    locked.token = reply.file_id;
    locked.stub.is_adopted = true;
    locked.stub.was_adopted = true;
    // firnd was informed of the truncation, which must not be repeated.
    locked.stub.flags &= !libc::O_TRUNC;
    // Grants and lists of an earlier firnd are void.
    locked.stub.has_grant = false;
    locked.lease.clear_lease();
    locked.list.unmap_extents();
    Ok(true)
}

/// Turns the status of a reply into a result for the program. ENODEV means that the descriptor is no stub of this
/// firnd.
pub(crate) fn check_status(reply: &Reply) -> Result<(), c_int> {
    match Status::from_word(reply.status) {
        Status::Ok => Ok(()),
        Status::Failed => Err(reply.errno as c_int),
        Status::BadToken => Err(libc::ENODEV),
        _ => Err(libc::EIO),
    }
}

/// Makes a request about a stub, and repeats it over a new connection if the connection has ended. firnd may have
/// executed the first one. So an append is not repeated, because its bytes could be written twice.
pub(crate) fn send_request(
    locked: &mut LockedEntry,
    op: Op,
    arg: u64,
    len: u32,
    mut payload: Payload<'_>,
) -> Result<Reply, c_int> {
    repeat_request(locked, op, arg, len, &mut payload).map_err(WriteError::errno)
}

/// Makes a request to firnd about a stub (an empty file; firnd has its bytes), and repeats it over a new connection if
/// the connection has ended. The error says whether firnd may have executed a part of the request.
pub(crate) fn repeat_request(
    locked: &mut LockedEntry,
    op: Op,
    arg: u64,
    len: u32,
    payload: &mut Payload<'_>,
) -> Result<Reply, WriteError> {
    // An append whose bytes are in a file may be repeated, because firnd has noted its progress in that file.
    let may_repeat = op != Op::Append || payload.fd.is_some();
    // An error means that nothing was executed (`Failed`), until a request was sent and not answered (`Unknown`).
    let mut to_error: fn(c_int) -> WriteError = WriteError::Failed;
    for _ in 0..CONNECTIONS_MAX {
        adopt(locked).map_err(to_error)?;
        let request = Request::new(op, locked.token, arg).with_len(len);
        match connect::call_firnd(locked.link, &request, payload) {
            // firnd does not know the descriptor any more, so it is adopted again.
            Ok(reply) if Status::from_word(reply.status) == Status::BadToken => {}
            Ok(reply) => {
                check_status(&reply).map_err(to_error)?;
                return Ok(reply);
            }
            Err(CallError::Fault) => return Err(to_error(libc::EFAULT)),
            Err(CallError::NoReply) => {
                // firnd may have executed the request before the connection ended.
                to_error = WriteError::Unknown;
                if !may_repeat {
                    locked.stub.is_adopted = false;
                    return Err(to_error(libc::EIO));
                }
            }
            Err(CallError::NotSent) => {}
        }
        // The next attempt makes the firnd that runs then know the descriptor.
        locked.stub.is_adopted = false;
    }
    Err(to_error(libc::EIO))
}

/// Asks firnd for the size of the file.
pub(crate) fn request_size(locked: &mut LockedEntry) -> Result<u64, c_int> {
    send_request(locked, Op::Attr, 0, 0, Payload::none()).map(|reply| reply.size)
}
