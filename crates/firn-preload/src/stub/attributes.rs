//! Attributes of a stub that only firnd knows, and calls that change or sync the file as a whole.

use std::ffi::c_int;

use firn_direct::connection::{CallError, Payload};
use firn_format::data_socket::{Op, Reply, Request, Token};
use rustix::process::Resource;
use zerocopy::IntoBytes;

use crate::connect;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{Wait, check_status, request_size, send_request};
use crate::sys::{self, syscall};
use crate::table::LockedEntry;
use crate::trees;
use crate::vfork::is_vfork_child;

/// Attributes that only firnd knows.
#[derive(Clone, Copy)]
pub(crate) struct Attr {
    /// Size of the file.
    pub(crate) size: u64,
    /// Number of 512-byte blocks.
    pub(crate) blocks: u64,
    /// Whether firnd has just set the times of the stub, so that the kernel's earlier answer is out of date.
    pub(crate) has_new_times: bool,
}

impl Attr {
    fn from_reply(reply: &Reply) -> Self {
        Self {
            size: reply.size,
            blocks: reply.slot,
            has_new_times: reply.count != 0,
        }
    }
}

/// Returns the attributes of a descriptor; `None` if it is no stub.
pub(crate) fn request_attr(fd: c_int) -> Option<Result<Attr, c_int>> {
    match lock_stub(fd) {
        Entered::Locked(mut locked) => {
            let reply = send_request(&mut locked, Op::Attr, 0, 0, Payload::none());
            Some(reply.map(|reply| Attr::from_reply(&reply)))
        }
        Entered::Interrupted(_) => {
            request_attr_at_path(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, None)
        }
        _ => None,
    }
}

/// Returns the attributes of the stub at a path. `expected` is a device and an inode number that it must have.
///
/// `None` means that the path leads to another file, or that no process has written to the stub.
pub(crate) fn request_attr_at_path(
    dir: c_int,
    path: *const libc::c_char,
    flags: c_int,
    expected: Option<(u64, u64)>,
) -> Option<Result<Attr, c_int>> {
    if is_vfork_child() {
        return None;
    }
    let (inode, generation) = tmpfs_handle(dir, path, flags)?;
    let device = match expected {
        Some((device, expected)) if expected == inode => device,
        Some(_) => return None,
        None => sys::identity(dir)?.0.device,
    };
    let request = Request::new(Op::AttrOf, inode, u64::from(generation));
    let mut wait = Wait::new();
    loop {
        let socket = trees::data_socket_on(device)?;
        if let Ok(reply) = request_in_any_context(&socket, &request) {
            return match check_status(&reply) {
                Ok(()) => Some(Ok(Attr::from_reply(&reply))),
                Err(libc::ENODEV) => None,
                Err(errno) => Some(Err(errno)),
            };
        }
        if let Err(errno) = wait.pause() {
            return Some(Err(errno));
        }
    }
}

/// Makes a request over the usual connection. In a signal handler whose thread holds that connection, it makes a
/// connection of its own.
fn request_in_any_context(socket: &Token, request: &Request) -> Result<Reply, CallError> {
    match connect::connect_for_stubs(socket) {
        Some(link) => connect::call_firnd(link, request, &mut Payload::none()),
        None => connect::connect_for_one_call(socket)
            .ok_or(CallError::NotSent)
            .and_then(|connection| connection.call(request, &mut Payload::none())),
    }
}

/// Returns the inode number and the generation of the file at a path, from the handle that tmpfs returns
/// (name_to_handle_at(2)). Returns `None` for another file system.
fn tmpfs_handle(dir: c_int, path: *const libc::c_char, flags: c_int) -> Option<(u64, u32)> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        words: [u32; 32],
    }
    const HANDLE_BYTES_MAX: u32 = 128;
    const TMPFS_HANDLE_BYTES: u32 = 12;
    let mut handle = Handle {
        bytes: HANDLE_BYTES_MAX,
        kind: 0,
        words: [0; 32],
    };
    let mut mount = 0i32;
    // Unlike stat(2), name_to_handle_at(2) follows a symbolic link only with AT_SYMLINK_FOLLOW.
    let follow = if flags & libc::AT_SYMLINK_NOFOLLOW == 0 {
        libc::AT_SYMLINK_FOLLOW
    } else {
        0
    };
    let flags = flags & libc::AT_EMPTY_PATH | follow;
    // SAFETY: the kernel writes at most `handle.bytes` bytes behind the first two fields, and reads the program's path.
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

/// Makes a request about a stub whose reply is only success or an error. `size_after` is the size to which the file
/// grows, if it is smaller now. Returns `None` if the descriptor is no stub.
fn request_success(
    fd: c_int,
    op: Op,
    arg: u64,
    data: &[u64],
    size_after: u64,
) -> Option<Result<(), c_int>> {
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(_) | Entered::Vforked => return Some(Err(libc::EIO)),
        Entered::NotStub => return None,
    };
    let writes = matches!(op, Op::Truncate | Op::Allocate);
    if writes && locked.stub.flags & libc::O_ACCMODE == libc::O_RDONLY {
        return Some(Err(if op == Op::Truncate {
            libc::EINVAL
        } else {
            libc::EBADF
        }));
    }
    if let Err(errno) = check_size_limit(&mut locked, size_after) {
        return Some(Err(errno));
    }
    let data = data.as_bytes();
    let payload = Payload {
        data: data.into(),
        ..Payload::none()
    };
    locked.stub.wrote |= writes;
    Some(send_request(&mut locked, op, arg, data.len() as u32, payload).map(drop))
}

/// Checks whether the limit of file sizes (getrlimit(2)) lets a file grow to a size. If not, the process gets SIGXFSZ,
/// and the error is EFBIG.
fn check_size_limit(locked: &mut LockedEntry, size_after: u64) -> Result<(), c_int> {
    let is_beyond = sys::limit_of(Resource::Fsize).is_some_and(|limit| size_after > limit);
    if is_beyond && size_after > request_size(locked)? {
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
    request_success(fd, Op::Truncate, size as u64, &[], size as u64)
}

/// fsync(2), fdatasync(2).
pub(crate) fn sync_stub(fd: c_int, data_only: bool) -> Option<Result<(), c_int>> {
    request_success(fd, Op::Sync, u64::from(data_only), &[], 0)
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
    let modes_without_growth = libc::FALLOC_FL_KEEP_SIZE
        | libc::FALLOC_FL_PUNCH_HOLE
        | libc::FALLOC_FL_COLLAPSE_RANGE
        | libc::FALLOC_FL_INSERT_RANGE;
    let size_after = if mode & modes_without_growth == 0 {
        offset as u64 + len as u64
    } else {
        0
    };
    let range = [offset as u64, len as u64];
    request_success(fd, Op::Allocate, mode as u32 as u64, &range, size_after)
}
