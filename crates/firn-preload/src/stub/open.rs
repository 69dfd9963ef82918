//! The life of a descriptor of a stub (an empty file; firnd has its bytes): it is opened, copied, inherited, shared and
//! closed.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use firn_direct::connection::Payload;
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::Op;
use rustix::fs::{CWD, Mode, OFlags, RawDir};

use crate::connect;
use crate::offset;
use crate::stub::enter::{Entered, forget_stub, lock_stub};
use crate::stub::request::{adopt, send_request};
use crate::sys;
use crate::table::{self, LockedEntry, mark_stub, stub_mark};
use crate::trees;
use crate::vfork::is_vfork_child;

/// Descriptors that are checked if /proc is not there: the usual limit of a process.
const USUAL_FD_LIMIT: c_int = 1024;

/// Registers a descriptor of a regular file on `device` that was just opened with `flags`. Returns whether it is a
/// stub, an empty file with its bytes in firnd. Fails if it is a stub and cannot be used. A descriptor that firnd does
/// not adopt as a stub is forgotten again.
pub(crate) fn register_open(fd: c_int, device: u64, flags: c_int) -> Result<bool, c_int> {
    if is_vfork_child() || !trees::is_stub_on(fd, device) {
        return Ok(false);
    }
    if fd as usize >= table::FDS_MAX {
        // The table has no entry for so high a number, and the kernel cannot serve a stub.
        return Err(libc::EMFILE);
    }
    // The C library itself writes to standard error before it ends a program, and hooks do not see that. So the offset
    // of a standard descriptor stays with the kernel.
    let is_standard = fd <= libc::STDERR_FILENO;
    let mark = if is_standard {
        stub_mark::SHARED
    } else {
        stub_mark::OWN
    };
    mark_stub(fd, mark);
    // A signal handler cannot lock the entry; the next call of the stub registers it with firnd.
    let Entered::Locked(mut locked) = lock_stub(fd) else {
        return Ok(true);
    };
    locked.stub.flags |= flags & libc::O_TRUNC;
    if locked.stub.flags & libc::O_PATH != 0 {
        // F_GETFL does not return the access mode of a descriptor that was opened with O_PATH.
        locked.stub.flags |= flags & libc::O_ACCMODE;
    }
    // Gives firnd a copy of the descriptor.
    let adopted = adopt(&mut locked);
    if adopted.is_err() {
        forget_stub(&mut locked);
    }
    match adopted {
        Ok(()) => Ok(true),
        // firnd does not know the file, so it is no stub.
        Err(libc::ENODEV) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Registers a new descriptor that is a copy of a stub's descriptor.
pub(crate) fn register_copy(fd: c_int) {
    if fd < 0 || is_vfork_child() {
        return;
    }
    mark_stub(fd, stub_mark::SHARED);
    // firnd is informed at once, because a stub without a name lives only while firnd knows an open descriptor of it.
    if let Entered::Locked(mut locked) = lock_stub(fd) {
        // If that fails, the first call of the stub tries again.
        let _ = adopt(&mut locked);
    }
}

/// Finds the stubs (empty files; firnd has their bytes) among the descriptors that a program has inherited, at its
/// start. Without /proc, the first [`USUAL_FD_LIMIT`] numbers are checked.
pub(crate) fn find_inherited() {
    if !trees::has_trees() {
        return;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::openat(CWD, c"/proc/self/fd", flags, Mode::empty()) else {
        (0..USUAL_FD_LIMIT).for_each(mark_if_stub);
        return;
    };
    let dir = Descriptor::from(dir);
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(&dir, &mut buffer);
    while let Some(Ok(entry)) = entries.next() {
        let Ok(name) = entry.file_name().to_str() else {
            continue;
        };
        // The names `.` and `..` are no numbers.
        let Ok(fd) = name.parse() else {
            continue;
        };
        if fd != dir.as_fd().as_raw_fd() {
            mark_if_stub(fd);
        }
    }
}

fn mark_if_stub(fd: c_int) {
    if trees::is_stub(fd) {
        mark_stub(fd, stub_mark::SHARED);
    }
}

/// Gives the offset of a stub back to the kernel for good, because other processes or descriptors are about to share
/// it.
pub(crate) fn share_offset(fd: c_int) {
    match lock_stub(fd) {
        Entered::Locked(mut locked) => {
            return_private_offset(&mut locked);
            mark_stub(fd, stub_mark::SHARED);
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            entry.copy_offset_to_kernel(fd);
        }
        _ => {}
    }
}

/// Reads the status flags of a stub again, because they may have changed.
pub(crate) fn update_flags(fd: c_int) {
    if let Entered::Locked(mut locked) = lock_stub(fd) {
        let status = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
        locked.stub.flags = status | locked.stub.flags & libc::O_TRUNC;
    }
}

/// Releases a stub before close(2). Returns the result for the program: 0, or `-errno` if the written bytes may be
/// lost.
pub(crate) fn close_stub(fd: c_int) -> isize {
    let Entered::Locked(mut locked) = lock_stub(fd) else {
        return 0;
    };
    let mut result = 0;
    if locked.stub.is_adopted || locked.stub.has_unreleased_writes {
        // If no bytes were written, nothing is lost even if firnd does not run now.
        let waits_for_firnd = locked.stub.has_unreleased_writes;
        if let Err(errno) = release_token(&mut locked, waits_for_firnd) {
            result = -(errno as isize);
        }
    }
    forget_stub(&mut locked);
    result
}

/// Informs firnd that a descriptor is closed. With `waits_for_firnd` it waits until firnd is started,
/// if it does not run.
fn release_token(locked: &mut LockedEntry, waits_for_firnd: bool) -> Result<(), c_int> {
    return_private_offset(locked);
    if !waits_for_firnd {
        // If firnd is gone, it knows the descriptor no more.
        let _ = connect::request_without_data(locked.link, Op::Release, locked.token, 0);
        return Ok(());
    }
    send_request(locked, Op::Release, 0, 0, Payload::none()).map(drop)
}

/// Gives a private offset back to the kernel.
fn return_private_offset(locked: &mut LockedEntry) {
    if locked.is_private() {
        offset::return_offset(locked, |_| true);
    }
}
