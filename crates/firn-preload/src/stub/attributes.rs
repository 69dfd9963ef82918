//! Attributes of a stub (an empty file; firnd has its bytes) that only firnd knows, and calls that change or sync the
//! file as a whole.

use std::ffi::c_int;

use firn_direct::connection::{CallError, Payload};
use firn_format::data_socket::{Op, Reply, Request, Token};
use rustix::process::Resource;
use zerocopy::IntoBytes;

use crate::connect;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{Wait, check_status, request_size, send_request};
use crate::sys::{self, Identity, syscall};
use crate::table::LockedEntry;
use crate::trees;
use crate::vfork::is_vfork_child;

/// Value of `size_after` for a request that does not let the file grow.
const NO_GROWTH: u64 = 0;

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
    /// Takes the attributes out of an answer: `slot` is the number of blocks, and `count` says whether times are new.
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

/// Asks firnd for the attributes of the stub (an empty file; firnd has its bytes) at a path. If `expected` is given,
/// the file must have that identity.
///
/// `None` means that the path leads to another file, or that no process has written to the stub. If firnd has ended,
/// the call waits for the next one for a limited time.
pub(crate) fn request_attr_at_path(
    dir: c_int,
    path: *const libc::c_char,
    flags: c_int,
    expected: Option<Identity>,
) -> Option<Result<Attr, c_int>> {
    if is_vfork_child() {
        return None;
    }
    let handle = tmpfs_handle(dir, path, flags)?;
    let device = match expected {
        Some(expected) if expected.inode == handle.inode => expected.device,
        Some(_) => return None,
        None => sys::identity(dir)?.0.device,
    };
    let request = Request::new(Op::AttrOf, handle.inode, u64::from(handle.generation));
    let mut wait = Wait::new();
    loop {
        let socket = trees::data_socket_on(device)?;
        if let Ok(reply) = request_in_any_context(&socket, &request) {
            return match check_status(&reply) {
                Ok(()) => Some(Ok(Attr::from_reply(&reply))),
                // firnd does not know the stub, so no process has written to it.
                Err(libc::ENODEV) => None,
                Err(errno) => Some(Err(errno)),
            };
        }
        // The connection has ended. It is made again when firnd is restarted, until the wait is over.
        if let Err(errno) = wait.pause_and_reread_trees() {
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

/// What tmpfs stores in the handle of a file (name_to_handle_at(2)).
struct TmpfsHandle {
    inode: u64,
    generation: u32,
}

/// Fetches the kernel's handle (inode and generation) of the file at a path. Returns `None` if there is no file, or if
/// it is not on tmpfs (handles of tmpfs have 12 bytes). `flags` are those of fstatat(2).
fn tmpfs_handle(dir: c_int, path: *const libc::c_char, flags: c_int) -> Option<TmpfsHandle> {
    /// `struct file_handle`.
    #[repr(C)]
    struct FileHandle {
        bytes: u32,
        kind: i32,
        words: [u32; 32],
    }
    const HANDLE_BYTES_MAX: u32 = 128;
    const TMPFS_HANDLE_BYTES: u32 = 12;
    let mut handle = FileHandle {
        bytes: HANDLE_BYTES_MAX,
        kind: 0,
        words: [0; 32],
    };
    let mut mount_id = 0i32;
    // Unlike stat(2), name_to_handle_at(2) follows a symbolic link only with AT_SYMLINK_FOLLOW.
    let follow_flag = if flags & libc::AT_SYMLINK_NOFOLLOW == 0 {
        libc::AT_SYMLINK_FOLLOW
    } else {
        0
    };
    let handle_flags = flags & libc::AT_EMPTY_PATH | follow_flag;
    // SAFETY: the kernel writes at most `handle.bytes` bytes behind the first two fields, and reads the program's path.
    let result = unsafe {
        syscall!(
            libc::SYS_name_to_handle_at,
            dir,
            path,
            &raw mut handle,
            &raw mut mount_id,
            handle_flags
        )
    };
    if result < 0 || handle.bytes != TMPFS_HANDLE_BYTES {
        return None;
    }
    // These are the words that tmpfs puts into its handles.
    let [generation, inode_low, inode_high, ..] = handle.words;
    Some(TmpfsHandle {
        inode: u64::from(inode_high) << 32 | u64::from(inode_low),
        generation,
    })
}

/// Lets firnd execute an operation on a stub (an empty file; firnd has its bytes), such as a truncation or a sync.
/// Returns the errno if it failed, and `None` if the descriptor is no stub.
///
/// `arg` and `data` are the parameters of the operation. `size_after` is the size to which the file grows, if it is
/// smaller now; the program's limit of file sizes is checked with it.
fn execute(
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
    let is_read_only = locked.stub.flags & libc::O_ACCMODE == libc::O_RDONLY;
    match op {
        Op::Truncate if is_read_only => return Some(Err(libc::EINVAL)),
        Op::Allocate if is_read_only => return Some(Err(libc::EBADF)),
        _ => {}
    }
    if let Err(errno) = check_size_limit(&mut locked, size_after) {
        return Some(Err(errno));
    }
    let data = data.as_bytes();
    let payload = Payload {
        data: data.into(),
        ..Payload::none()
    };
    locked.stub.has_unreleased_writes |= matches!(op, Op::Truncate | Op::Allocate);
    let reply = send_request(&mut locked, op, arg, data.len() as u32, payload);
    Some(reply.map(drop))
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

/// ftruncate(2). Returns `None` if the descriptor is no stub.
pub(crate) fn truncate_stub(fd: c_int, size: i64) -> Option<Result<(), c_int>> {
    if size < 0 {
        return Some(Err(libc::EINVAL));
    }
    execute(fd, Op::Truncate, size as u64, &[], size as u64)
}

/// fsync(2), or with `data_only` fdatasync(2). Returns `None` if the descriptor is no stub.
pub(crate) fn sync_stub(fd: c_int, data_only: bool) -> Option<Result<(), c_int>> {
    execute(fd, Op::Sync, u64::from(data_only), &[], NO_GROWTH)
}

/// fallocate(2) of a stub (an empty file; firnd has its bytes): reserves, frees or moves a range of the file. Returns
/// `None` if the descriptor is no stub.
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
        NO_GROWTH
    };
    let range = [offset as u64, len as u64];
    execute(fd, Op::Allocate, mode as u32 as u64, &range, size_after)
}
