//! Finds out which new descriptors the library serves: regular files of a Firn mount, and *stubs*, empty files with
//! their bytes in the daemon firnd.
//!
//! At this time firnd is asked only for the token (its number) of the first file of each device. fstatfs(2) is not
//! used, because on a mount it costs a trip to firnd of its own.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::connect;
use crate::devices;
use crate::report::{self, Reason};
use crate::sharing::SharingSnapshot;
use crate::stub;
use crate::sys::{self, Identity};
use crate::table::{self, ACTIVE, tag};

/// Flags for which direct access is not supported: with O_APPEND each write goes to the end of the file, and with the
/// others bytes go to the disk.
const UNSUPPORTED_FLAGS: c_int = libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC | libc::O_DIRECT;

/// The user of a new descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpenedBy {
    /// The program itself.
    Program,
    /// libstdc++, which has opened the file by stdio but reads and writes the descriptor itself.
    StreamBuffer,
    /// stdio, whose own calls are not seen.
    Stdio,
}

/// The kind of a new descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum NewDescriptor {
    /// A stub.
    Stub,
    /// A stub that cannot be used, with the errno for the program.
    UnusableStub(c_int),
    /// Any other file, also a file of a mount.
    NotStub,
}

/// Registers a new descriptor that was opened with `flags`, so that later calls may use direct access to shared memory.
/// `sharing_before_open` was taken before the open. Returns whether the descriptor is a stub, an empty file with its
/// bytes in firnd. Leaves errno unchanged.
pub(crate) fn register_opened_fd(
    fd: c_int,
    flags: c_int,
    sharing_before_open: &SharingSnapshot,
    opened_by: OpenedBy,
) -> NewDescriptor {
    if fd < 0 || ACTIVE.load(Ordering::Relaxed) == 0 {
        return NewDescriptor::NotStub;
    }
    // Drops the state of an earlier file of this number, which was closed by a call that no hook saw.
    if table::descriptor_tag(fd) != tag::ORDINARY {
        forget_closed_descriptor(fd);
    }
    let Some((identity, mode)) = sys::identity(fd) else {
        return NewDescriptor::NotStub;
    };
    let is_regular = mode & libc::S_IFMT == libc::S_IFREG;
    if !is_regular || is_path_or_directory(flags) {
        return NewDescriptor::NotStub;
    }
    match stub::register_open(fd, identity.device, flags) {
        Ok(true) => return NewDescriptor::Stub,
        Err(errno) => return NewDescriptor::UnusableStub(errno),
        Ok(false) => {}
    }
    let Some(token) = devices::token_on_mount(fd, identity.device) else {
        return NewDescriptor::NotStub;
    };
    match reason_against_direct_access(fd, flags, opened_by) {
        Some(reason) => report::count_left(reason),
        None => register_mount_file(fd, flags, identity, token, sharing_before_open),
    }
    NewDescriptor::NotStub
}

/// Whether flags of open(2) let a descriptor only name a file, or open a directory only.
fn is_path_or_directory(flags: c_int) -> bool {
    // O_TMPFILE includes the bit O_DIRECTORY.
    let is_directory = flags & libc::O_DIRECTORY != 0 && flags & libc::O_TMPFILE != libc::O_TMPFILE;
    flags & libc::O_PATH != 0 || is_directory
}

/// Returns why a descriptor of a file on a mount gets no direct access; `None` if it may get it.
fn reason_against_direct_access(fd: c_int, flags: c_int, opened_by: OpenedBy) -> Option<Reason> {
    if flags & UNSUPPORTED_FLAGS != 0 {
        return Some(Reason::Flags);
    }
    // A stdio stream with its own buffer uses descriptors 0 to 2 already.
    let has_unseen_buffer = opened_by == OpenedBy::Stdio || fd <= libc::STDERR_FILENO;
    has_unseen_buffer.then_some(Reason::Stdio)
}

/// Registers a new descriptor of a regular file on a mount in the table of descriptors, so that it may get direct
/// access to shared memory later. `token` is firnd's number of the open file, if known.
fn register_mount_file(
    fd: c_int,
    flags: c_int,
    identity: Identity,
    token: u64,
    sharing_before_open: &SharingSnapshot,
) {
    let is_read_only = flags & libc::O_ACCMODE == libc::O_RDONLY;
    let Some(mut locked) = table::lock_new_entry(fd) else {
        return;
    };
    locked.reset();
    locked.identity = identity;
    locked.token = token;
    locked
        .request_policy
        .begin_for_new_file(connect::has_connection());
    locked.entry.kernel_calls.store(0, Ordering::Relaxed);
    locked.set_tag(if is_read_only {
        tag::READER
    } else {
        tag::WRITER
    });
    // Another thread has begun a fork or exec since the file was opened, so a child may share the descriptor.
    if !sharing_before_open.is_unchanged() {
        locked.set_tag(tag::ORDINARY);
        report::count_left(Reason::Shared);
    }
}

/// Forgets the state of a number that was closed unseen and is another file now.
pub(crate) fn forget_closed_descriptor(fd: c_int) {
    if table::descriptor_tag(fd) == tag::STUB {
        stub::close_stub(fd);
        return;
    }
    if let table::Entered::Locked(mut locked) = table::lock_entry(fd)
        && table::is_owner()
        && locked.tag != tag::INTERNAL
    {
        locked.list.unmap_extents();
        locked.set_private(false);
        locked.set_tag(tag::ORDINARY);
    }
}
