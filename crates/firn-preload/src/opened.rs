//! Descriptors that were just opened: which of them are ours.
//!
//! Ours are regular files of a Firn mount. Nothing is asked of firnd yet, but the token of the first file of each
//! device. No fstatfs(2): on a mount that is a trip to firnd of its own.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::connect;
use crate::devices;
use crate::report::{self, Reason};
use crate::sharing::Moment;
use crate::stub;
use crate::sys::{self, Identity};
use crate::table::{self, ACTIVE, tag};

/// Flags with which every write moves the offset or blocks go to the disk: not what the arena is for.
const UNUSUAL: c_int = libc::O_APPEND | libc::O_SYNC | libc::O_DSYNC | libc::O_DIRECT;

/// How a descriptor came to be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A call that leaves its use to the program.
    Program,
    /// stdio, for libstdc++: it reads and writes the descriptor itself.
    StreamBuffer,
    /// stdio: its own calls are not seen.
    Stdio,
}

/// What a new descriptor is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Noted {
    /// A stub.
    Stub,
    /// A stub that cannot be used, and why.
    Unusable(c_int),
    /// Anything else.
    Else,
}

/// A call gave the descriptor `fd`, opened with `flags`. Keeps errno.
pub(crate) fn note_open(fd: c_int, flags: c_int, before: &Moment, by: By) -> Noted {
    if fd < 0 || ACTIVE.load(Ordering::Relaxed) == 0 {
        return Noted::Else;
    }
    if table::tag_of(fd) != tag::NONE {
        forget_stale(fd);
    }
    let path_only = flags & libc::O_PATH != 0
        || flags & libc::O_DIRECTORY != 0 && flags & libc::O_TMPFILE != libc::O_TMPFILE;
    let Some((identity, mode)) = sys::identity(fd).filter(|_| !path_only) else {
        return Noted::Else;
    };
    if mode & libc::S_IFMT == libc::S_IFREG {
        match stub::register_open(fd, identity.device, flags) {
            Ok(true) => return Noted::Stub,
            Err(errno) => return Noted::Unusable(errno),
            Ok(false) => {}
        }
    }
    note_on_mount(fd, flags, (identity, mode), before, by);
    Noted::Else
}

/// Tracks a descriptor that was just opened on a mount, unless its flags or its use rule that out.
fn note_on_mount(
    fd: c_int,
    flags: c_int,
    (identity, mode): (Identity, u32),
    before: &Moment,
    by: By,
) {
    if mode & libc::S_IFMT != libc::S_IFREG {
        return;
    }
    let Some(token) = devices::token_on_mount(fd, identity.device) else {
        return;
    };
    if flags & UNUSUAL != 0 {
        return report::count_left(Reason::Flags);
    }
    // Descriptors 0 to 2 have a stdio stream already, which has a buffer of its own.
    if by == By::Stdio || fd <= libc::STDERR_FILENO {
        return report::count_left(Reason::Stdio);
    }
    let writes = flags & libc::O_ACCMODE != libc::O_RDONLY;
    let Some(mut held) = table::lock_new_entry(fd) else {
        return;
    };
    held.reset();
    held.identity = identity;
    held.token = token;
    held.patience.begin_small(connect::has_connection());
    held.entry.in_kernel.store(0, Ordering::Relaxed);
    held.set_tag(if writes { tag::WRITER } else { tag::READER });
    // Another thread has changed the table of descriptors meanwhile: the number may be another file by now.
    if !before.is_undisturbed() {
        held.set_tag(tag::NONE);
        report::count_left(Reason::Shared);
    }
}

/// The number was closed unseen and is another descriptor now.
pub(crate) fn forget_stale(fd: c_int) {
    if table::tag_of(fd) == tag::STUB {
        stub::close_stub(fd);
        return;
    }
    if let table::Entered::Held(mut held) = table::lock_entry(fd)
        && table::is_owner()
        && held.tag != tag::INTERNAL
    {
        held.list.unmap_extents();
        held.set_private(false);
        held.set_tag(tag::NONE);
    }
}
