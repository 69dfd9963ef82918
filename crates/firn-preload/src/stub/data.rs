//! write(2), read(2) and lseek(2) of stubs.

use std::ffi::c_int;

use rustix::process::Resource;

use crate::descriptor;
use crate::handled::{Handled, Ticket};
use crate::memory::{CALL_BYTES_MAX, Source, Target};
use crate::offset::{self, Claim};
use crate::report::{self, Call};
use crate::sharing;
use crate::stub::attributes::sync_stub;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{adopt, ask_size};
use crate::stub::socket::Socket;
use crate::stub::write::{OwnConnection, append_source, write_source};
use crate::sys;
use crate::table::{Entry, LockedEntry, stub_mark, stub_mark_of};

/// Makes the offset private if the descriptor is not shared.
fn take_offset(locked: &mut LockedEntry) {
    // A child that is being made now would inherit a parked offset.
    let is_own = stub_mark_of(locked.fd) == stub_mark::OWN && !sharing::is_under_way();
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

/// write(2) and its kin, at the descriptor's offset or at `explicit_offset`. With O_SYNC the file is synced before it
/// returns.
pub(crate) fn write_stub(
    fd: c_int,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    append: Append,
    call: Call,
) -> Handled {
    if source.is_outside() {
        return Handled::of(Err(libc::EFAULT));
    }
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(entry) => {
            return Handled::of(write_in_handler(
                fd,
                entry,
                source,
                (explicit_offset, append),
            ));
        }
        Entered::NotStub => return Handled::Forward(Ticket::NONE),
        Entered::Vforked => return Handled::of(Err(libc::EIO)),
    };
    let mut total = source.total().unwrap_or(CALL_BYTES_MAX);
    if let Err(handled) = prepare_call(&mut locked, libc::O_RDONLY, total) {
        return handled;
    }
    let flags = locked.stub.flags;
    let handled = if append.is_wanted(flags) {
        append_all(locked, source, explicit_offset, total)
    } else {
        total = match bytes_within_limit(&locked, explicit_offset, total) {
            Ok(total) => total,
            Err(errno) => return Handled::of(Err(errno)),
        };
        locked.stub.wrote = true;
        descriptor::write_descriptor::<Socket>(locked, source, (explicit_offset, total), call)
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

/// Returns how many bytes of a write the limit of file sizes allows (getrlimit(2)). If it allows none, the process gets
/// SIGXFSZ, and the error is EFBIG.
fn bytes_within_limit(
    locked: &LockedEntry,
    explicit_offset: Option<u64>,
    total: usize,
) -> Result<usize, c_int> {
    let Some(limit) = sys::limit_of(Resource::Fsize) else {
        return Ok(total);
    };
    let from = explicit_offset.unwrap_or_else(|| offset::current_offset(locked));
    if from >= limit {
        sys::raise_signal(libc::SIGXFSZ);
        return Err(libc::EFBIG);
    }
    Ok(total.min(usize::try_from(limit - from).unwrap_or(usize::MAX)))
}

/// Prepares a read or write: makes sure that firnd knows the descriptor, and takes the offset if possible. Returns
/// `Err`, the result of the call, if the access mode is `forbidden_access`, if the call moves no bytes, or if no firnd
/// is found.
fn prepare_call(
    locked: &mut LockedEntry,
    forbidden_access: c_int,
    total: usize,
) -> Result<(), Handled> {
    if locked.stub.flags & libc::O_ACCMODE == forbidden_access {
        return Err(Handled::of(Err(libc::EBADF)));
    }
    if total == 0 {
        return Err(Handled::of(Ok(0)));
    }
    adopt(locked).map_err(|errno| Handled::of(Err(errno)))?;
    take_offset(locked);
    Ok(())
}

/// Appends a source to the file, and sets the offset to its end unless the call named an offset.
fn append_all(
    mut locked: LockedEntry,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    total: usize,
) -> Handled {
    locked.stub.wrote = true;
    report::count_kernel(Call::Write);
    let appended = append_source(&mut locked, source, total);
    if let Ok((done, start)) = appended
        && explicit_offset.is_none()
    {
        offset::set_offset(&locked, start.wrapping_add(done as u64));
    }
    Handled::of(appended.map(|(done, _)| done))
}

/// write(2) in a signal handler that has interrupted a hook on the same stub. The interrupted hook may be using the
/// connection, so the handler makes a connection of its own.
#[cold]
fn write_in_handler(
    fd: c_int,
    entry: &'static Entry,
    source: Source<'_>,
    (explicit_offset, append): (Option<u64>, Append),
) -> Result<usize, c_int> {
    let total = source.total().ok_or(libc::EINVAL)?;
    let flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
    let mut firnd = OwnConnection::for_stub(fd, flags & libc::O_ACCMODE).ok_or(libc::EIO)?;
    if append.is_wanted(flags) {
        let (done, start) = append_source(&mut firnd, source, total)?;
        if explicit_offset.is_none() {
            offset::set_offset_of_entry(entry, fd, start.wrapping_add(done as u64));
        }
        return Ok(done);
    }
    let claim = Claim::of_entry(entry, fd, explicit_offset, total);
    if claim.is_beyond_files() {
        claim.cut_back_entry(entry, fd, 0);
        return Err(libc::EINVAL);
    }
    let written = write_source(&mut firnd, source, claim.offset, total);
    let done = written.unwrap_or(0);
    if done < total {
        claim.cut_back_entry(entry, fd, done);
    }
    written
}

/// lseek(2).
pub(crate) fn seek_stub(fd: c_int, offset: i64, whence: c_int) -> Handled {
    match lock_stub(fd) {
        Entered::Locked(mut locked) => {
            take_offset(&mut locked);
            descriptor::seek_descriptor::<Socket>(locked, offset, whence)
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            offset::seek_in_handler(entry, offset, whence, || Err(libc::EIO))
        }
        // The kernel knows the empty stub only, so it cannot find the end of the file.
        Entered::Interrupted(_) if !matches!(whence, libc::SEEK_SET | libc::SEEK_CUR) => {
            Handled::of(Err(libc::EIO))
        }
        _ => Handled::Forward(Ticket::NONE),
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
    let size = ask_size(&mut locked)? as i64;
    Ok(size.wrapping_sub(offset::current_offset(&locked) as i64))
}

/// read(2) and its kin.
pub(crate) fn read_stub(
    fd: c_int,
    target: Target<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> Handled {
    if target.is_outside() {
        return Handled::of(Err(libc::EFAULT));
    }
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(_) | Entered::Vforked => return Handled::of(Err(libc::EIO)),
        Entered::NotStub => return Handled::Forward(Ticket::NONE),
    };
    let total = target.total().unwrap_or(CALL_BYTES_MAX);
    if let Err(handled) = prepare_call(&mut locked, libc::O_WRONLY, total) {
        return handled;
    }
    descriptor::read_descriptor::<Socket>(locked, target, (explicit_offset, total), call)
}
