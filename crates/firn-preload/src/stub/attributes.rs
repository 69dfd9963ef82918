//! What the kernel does not know of a stub, and calls that change or sync it as a whole.

use std::ffi::c_int;

use firn_direct::connection::{CallError, Payload};
use firn_format::data_socket::{Op, Reply, Request, Token};
use rustix::process::Resource;
use zerocopy::IntoBytes;

use crate::connect;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{Wait, ask_size, check_status, send_request};
use crate::sys::{self, syscall};
use crate::table::Held;
use crate::trees;
use crate::vfork::in_vfork_child;

/// What the kernel does not know of a stub.
#[derive(Clone, Copy)]
pub(crate) struct Attr {
    /// Bytes of the file.
    pub(crate) size: u64,
    /// 512-byte blocks.
    pub(crate) blocks: u64,
    /// Its time of change was just set.
    pub(crate) told: bool,
}

impl Attr {
    fn of(reply: &Reply) -> Self {
        Self {
            size: reply.size,
            blocks: reply.slot,
            told: reply.count != 0,
        }
    }
}

/// Of a descriptor; `None`: it is no stub.
pub(crate) fn attr_of_fd(fd: c_int) -> Option<Result<Attr, c_int>> {
    match lock_stub(fd) {
        Entered::Held(mut held) => {
            let reply = send_request(&mut held, Op::Attr, 0, 0, Payload::none());
            Some(reply.map(|reply| Attr::of(&reply)))
        }
        Entered::Again(_) => attr_of_path(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, None),
        _ => None,
    }
}

/// Attributes of what a path leads to, if that still is the stub with this inode number on this device. `None` if it is
/// not, or if the stub has no writes.
pub(crate) fn attr_of_path(
    dir: c_int,
    path: *const libc::c_char,
    flags: c_int,
    expected: Option<(u64, u64)>,
) -> Option<Result<Attr, c_int>> {
    if in_vfork_child() {
        return None;
    }
    let (inode, generation) = handle_of(dir, path, flags)?;
    let device = match expected {
        Some((device, expected)) if expected == inode => device,
        Some(_) => return None,
        None => sys::identity(dir)?.0.device,
    };
    let request = Request::new(Op::AttrOf, inode, u64::from(generation));
    let mut wait = Wait::new();
    loop {
        let socket = trees::data_socket_on(device)?;
        if let Ok(reply) = ask_anyhow(&socket, &request) {
            return match check_status(&reply) {
                Ok(()) => Some(Ok(Attr::of(&reply))),
                Err(libc::ENODEV) => None,
                Err(errno) => Some(Err(errno)),
            };
        }
        if let Err(errno) = wait.pause() {
            return Some(Err(errno));
        }
    }
}

/// Makes a request over the connection to a firnd, or over one of its own in a signal handler that interrupts it.
fn ask_anyhow(socket: &Token, request: &Request) -> Result<Reply, CallError> {
    match connect::connect_for_stubs(socket) {
        Some(link) => connect::call_firnd(link, request, &mut Payload::none()),
        None => connect::connect_once(socket)
            .ok_or(CallError::NotSent)
            .and_then(|connection| connection.call(request, &mut Payload::none())),
    }
}

/// Inode number and generation of what a path leads to, as tmpfs puts them into its handles (name_to_handle_at(2)).
fn handle_of(dir: c_int, path: *const libc::c_char, flags: c_int) -> Option<(u64, u32)> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        words: [u32; 32],
    }
    const TMPFS_HANDLE_BYTES: u32 = 12;
    let mut handle = Handle {
        bytes: 128,
        kind: 0,
        words: [0; 32],
    };
    let mut mount = 0i32;
    // Unlike stat(2), it follows only where it is told to.
    let follow = if flags & libc::AT_SYMLINK_NOFOLLOW == 0 {
        libc::AT_SYMLINK_FOLLOW
    } else {
        0
    };
    let flags = flags & libc::AT_EMPTY_PATH | follow;
    // SAFETY: the kernel writes at most `bytes` bytes behind the head; the path is the program's.
    let result = unsafe {
        syscall!(
            libc::SYS_name_to_handle_at,
            dir,
            path,
            &raw mut handle,
            &raw mut mount,
            flags
        )
    };
    if result < 0 || handle.bytes != TMPFS_HANDLE_BYTES {
        return None;
    }
    let [generation, low, high, ..] = handle.words;
    Some((u64::from(high) << 32 | u64::from(low), generation))
}

/// A request that answers with nothing but success; `None`: the descriptor is no stub. `grown`: the length that the file
/// has afterwards, if it is shorter now.
fn request_plainly(
    fd: c_int,
    op: Op,
    arg: u64,
    data: &[u64],
    grown: u64,
) -> Option<Result<(), c_int>> {
    let mut held = match lock_stub(fd) {
        Entered::Held(held) => held,
        Entered::Again(_) | Entered::Vforked => return Some(Err(libc::EIO)),
        Entered::Not => return None,
    };
    let writes = matches!(op, Op::Truncate | Op::Allocate);
    if writes && held.stub.flags & libc::O_ACCMODE == libc::O_RDONLY {
        return Some(Err(if op == Op::Truncate {
            libc::EINVAL
        } else {
            libc::EBADF
        }));
    }
    if let Err(errno) = check_size_limit(&mut held, grown) {
        return Some(Err(errno));
    }
    let data = data.as_bytes();
    let payload = Payload {
        data: data.into(),
        ..Payload::none()
    };
    held.stub.wrote |= writes;
    Some(send_request(&mut held, op, arg, data.len() as u32, payload).map(drop))
}

/// Whether the limit of file sizes (getrlimit(2)) lets a file grow to a length, if it is shorter; if not: SIGXFSZ and
/// EFBIG.
fn check_size_limit(held: &mut Held, grown: u64) -> Result<(), c_int> {
    let is_beyond = sys::limit_of(Resource::Fsize).is_some_and(|limit| grown > limit);
    if is_beyond && grown > ask_size(held)? {
        sys::raise_signal(libc::SIGXFSZ);
        return Err(libc::EFBIG);
    }
    Ok(())
}

/// ftruncate(2).
pub(crate) fn truncate_stub(fd: c_int, size: i64) -> Option<Result<(), c_int>> {
    if size < 0 {
        return Some(Err(libc::EINVAL));
    }
    request_plainly(fd, Op::Truncate, size as u64, &[], size as u64)
}

/// fsync(2), fdatasync(2).
pub(crate) fn sync_stub(fd: c_int, data_only: bool) -> Option<Result<(), c_int>> {
    request_plainly(fd, Op::Sync, u64::from(data_only), &[], 0)
}

/// fallocate(2).
pub(crate) fn allocate_range(
    fd: c_int,
    mode: c_int,
    offset: i64,
    len: i64,
) -> Option<Result<(), c_int>> {
    if offset < 0 || len <= 0 {
        return Some(Err(libc::EINVAL));
    }
    let stays = libc::FALLOC_FL_KEEP_SIZE
        | libc::FALLOC_FL_PUNCH_HOLE
        | libc::FALLOC_FL_COLLAPSE_RANGE
        | libc::FALLOC_FL_INSERT_RANGE;
    let grown = if mode & stays == 0 {
        offset as u64 + len as u64
    } else {
        0
    };
    let range = [offset as u64, len as u64];
    request_plainly(fd, Op::Allocate, mode as u32 as u64, &range, grown)
}
