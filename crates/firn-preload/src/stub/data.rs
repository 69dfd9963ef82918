//! write(2), read(2) and lseek(2) of stubs: empty files with their bytes in the daemon firnd.

use std::ffi::c_int;

use rustix::process::Resource;

use crate::descriptor;
use crate::memory::{CALL_BYTES_MAX, Source, Target};
use crate::offset::{self, CallRange, Claim};
use crate::outcome::{CallOutcome, KernelCall};
use crate::report::{self, Call};
use crate::sharing;
use crate::stub::attributes::sync_stub;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{adopt, request_size};
use crate::stub::socket::Socket;
use crate::stub::write::{OwnConnection, append_source, write_source};
use crate::sys;
use crate::table::{Entry, LockedEntry, descriptor_stub_mark, stub_mark};

/// Makes the offset private if the descriptor is not shared.
fn try_make_private(locked: &mut LockedEntry) {
    // A child that is being made now would inherit a parked offset.
    let is_own = descriptor_stub_mark(locked.fd) == stub_mark::OWN && !sharing::is_under_way();
    if !locked.is_private() && is_own {
        offset::make_private(locked);
    }
}

/// Whether a write appends to the file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Append {
    /// The write appends if the descriptor has O_APPEND.
    AsOpened,
    /// The write appends.
    Always,
    /// The write does not append, even if the descriptor has O_APPEND.
    Never,
}

impl Append {
    fn is_wanted(self, flags: c_int) -> bool {
        match self {
            Self::AsOpened => flags & libc::O_APPEND != 0,
            Self::Always => true,
            Self::Never => false,
        }
    }
}

/// write(2) and its kin, for a stub (an empty file; firnd has its bytes), at the descriptor's offset or at
/// `explicit_offset`. With O_SYNC the file is synced before it returns. [`CallOutcome::Forward`] means that the
/// descriptor is no stub, so the caller makes the kernel's call.
pub(crate) fn write_stub(
    fd: c_int,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    append: Append,
    call: Call,
) -> CallOutcome {
    if source.is_outside() {
        return CallOutcome::from_errno(libc::EFAULT);
    }
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(entry) => {
            let written = write_in_handler(fd, entry, source, explicit_offset, append);
            return CallOutcome::from_result(written);
        }
        Entered::NotStub => return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
        // A child of vfork(2) shares the memory of its parent, so it cannot lock the stub.
        Entered::Vforked => return CallOutcome::from_errno(libc::EIO),
    };
    let total = source.total().unwrap_or(CALL_BYTES_MAX);
    let forbidden_access = libc::O_RDONLY;
    if let Err(outcome) = prepare_call(&mut locked, forbidden_access, total) {
        return outcome;
    }
    let flags = locked.stub.flags;
    let range = CallRange {
        explicit_offset,
        total,
    };
    let outcome = if append.is_wanted(flags) {
        append_all(locked, source, range)
    } else {
        write_within_limit(locked, source, range, call)
    };
    let is_synced = flags & (libc::O_SYNC | libc::O_DSYNC) != 0;
    if is_synced
        && let CallOutcome::Done(1..) = outcome
        && let Some(Err(errno)) = sync_stub(fd, false)
    {
        return CallOutcome::from_errno(errno);
    }
    outcome
}

/// Writes to a stub at its offset or at an explicit one, as far as the limit of file sizes allows.
fn write_within_limit(
    mut locked: LockedEntry,
    source: Source<'_>,
    range: CallRange,
    call: Call,
) -> CallOutcome {
    let total = match bytes_within_limit(&locked, range) {
        Ok(total) => total,
        Err(errno) => return CallOutcome::from_errno(errno),
    };
    locked.stub.has_unreleased_writes = true;
    let range = CallRange { total, ..range };
    descriptor::write_descriptor::<Socket>(locked, source, range, call)
}

/// Returns how many bytes of a write the limit of file sizes allows (getrlimit(2)). If it allows none, the process gets
/// SIGXFSZ, and the error is EFBIG.
fn bytes_within_limit(locked: &LockedEntry, range: CallRange) -> Result<usize, c_int> {
    let Some(limit) = sys::limit_of(Resource::Fsize) else {
        return Ok(range.total);
    };
    let start = match range.explicit_offset {
        Some(offset) => offset,
        None => offset::current_offset(locked),
    };
    if start >= limit {
        sys::raise_signal(libc::SIGXFSZ);
        return Err(libc::EFBIG);
    }
    let allowed_bytes = usize::try_from(limit - start).unwrap_or(usize::MAX);
    Ok(range.total.min(allowed_bytes))
}

/// Prepares a read or write: makes sure that firnd knows the descriptor, and makes the offset private if possible.
/// Returns `Err`, the result of the call, if the access mode is `forbidden_access`, if the call moves no bytes, or if
/// firnd does not run.
fn prepare_call(
    locked: &mut LockedEntry,
    forbidden_access: c_int,
    total: usize,
) -> Result<(), CallOutcome> {
    if locked.stub.flags & libc::O_ACCMODE == forbidden_access {
        return Err(CallOutcome::from_errno(libc::EBADF));
    }
    if total == 0 {
        return Err(CallOutcome::Done(0));
    }
    adopt(locked).map_err(CallOutcome::from_errno)?;
    try_make_private(locked);
    Ok(())
}

/// Appends a source to the file. Unless the call named an offset, the descriptor's offset moves to the end of the file.
fn append_all(mut locked: LockedEntry, source: Source<'_>, range: CallRange) -> CallOutcome {
    locked.stub.has_unreleased_writes = true;
    report::count_kernel(Call::Write);
    let appended = match append_source(&mut locked, source, range.total) {
        Ok(appended) => appended,
        Err(errno) => return CallOutcome::from_errno(errno),
    };
    if range.explicit_offset.is_none() {
        offset::set_offset(&locked, appended.end());
    }
    CallOutcome::Done(appended.count as isize)
}

/// write(2) in a signal handler that has interrupted a hook on the same stub (an empty file; firnd has its bytes). This
/// thread holds the lock of the stub. The interrupted hook may be using the connection to firnd, so the handler makes
/// one of its own.
#[cold]
fn write_in_handler(
    fd: c_int,
    entry: &'static Entry,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    append: Append,
) -> Result<usize, c_int> {
    let total = source.total().ok_or(libc::EINVAL)?;
    let flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
    let access = flags & libc::O_ACCMODE;
    let mut connection = OwnConnection::for_stub(fd, access).ok_or(libc::EIO)?;
    if append.is_wanted(flags) {
        let appended = append_source(&mut connection, source, total)?;
        if explicit_offset.is_none() {
            offset::set_offset_of_entry(entry, fd, appended.end());
        }
        return Ok(appended.count);
    }
    let range = CallRange {
        explicit_offset,
        total,
    };
    let claim = Claim::for_entry(entry, fd, range);
    if claim.is_beyond_files() {
        claim.release_unused_of_entry(entry, fd, 0);
        return Err(libc::EINVAL);
    }
    let written = write_source(&mut connection, source, claim.offset, total);
    let done = written.unwrap_or(0);
    if done < total {
        claim.release_unused_of_entry(entry, fd, done);
    }
    written
}

/// lseek(2) of a stub (an empty file; firnd has its bytes). In a signal handler that has interrupted a hook on the same
/// stub, only an offset that needs no request can be found.
pub(crate) fn seek_stub(fd: c_int, offset: i64, whence: c_int) -> CallOutcome {
    match lock_stub(fd) {
        Entered::Locked(mut locked) => {
            try_make_private(&mut locked);
            descriptor::seek_descriptor::<Socket>(locked, offset, whence)
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            offset::seek_in_handler(entry, offset, whence, || Err(libc::EIO))
        }
        // The kernel knows the empty stub only, so it cannot find the end of the file.
        Entered::Interrupted(_) if !matches!(whence, libc::SEEK_SET | libc::SEEK_CUR) => {
            CallOutcome::from_errno(libc::EIO)
        }
        _ => CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
    }
}

/// Returns the bytes from the offset to the end of the file, for the ioctl FIONREAD. It is negative if the offset is
/// beyond the end.
pub(crate) fn count_unread(fd: c_int) -> Result<i64, c_int> {
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(_) | Entered::Vforked => return Err(libc::EIO),
        Entered::NotStub => return Err(libc::ENOTTY),
    };
    let size = request_size(&mut locked)? as i64;
    Ok(size.wrapping_sub(offset::current_offset(&locked) as i64))
}

/// read(2) and its kin, for a stub (an empty file; firnd has its bytes), at the descriptor's offset or at
/// `explicit_offset`. It fails in a signal handler that has interrupted a hook on the same stub, and in a child of
/// vfork(2). [`CallOutcome::Forward`] means that the descriptor is no stub, so the caller makes the kernel's call.
pub(crate) fn read_stub(
    fd: c_int,
    target: Target<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> CallOutcome {
    if target.is_outside() {
        return CallOutcome::from_errno(libc::EFAULT);
    }
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(_) | Entered::Vforked => return CallOutcome::from_errno(libc::EIO),
        Entered::NotStub => return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
    };
    let total = target.total().unwrap_or(CALL_BYTES_MAX);
    let forbidden_access = libc::O_WRONLY;
    if let Err(outcome) = prepare_call(&mut locked, forbidden_access, total) {
        return outcome;
    }
    let range = CallRange {
        explicit_offset,
        total,
    };
    descriptor::read_descriptor::<Socket>(locked, target, range, call)
}
