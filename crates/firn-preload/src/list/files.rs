//! Descriptors of files of the backing (the directory that a mount serves), from which reads by a *list* (the places of
//! a file's bytes) take bytes that are not in memory. The library owns them.
//!
//! Invariants
//! * Each descriptor has a high number and the tag `INTERNAL`, so that the program's calls do not affect it. It is
//!   closed with its list. All lists end before fork(2) and similar calls, so children have none of these descriptors.
//! * A process has at most [`FILES_OPEN_MAX`] of them, and uses at most half of the high numbers that it may have.
//! * Bytes that were read by a descriptor count only if its number still is the same file ([`ListFile::is_same_file`]),
//!   because a raw system call may have closed it.

use std::ffi::c_int;
use std::os::fd::{AsFd, IntoRawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use firn_direct::syscall::Descriptor;
use rustix::process::Resource;

use crate::connect::OWN_FD_MIN;
use crate::sys::{self, Identity};
use crate::table::{self, Entered, tag};
use crate::wiped::Wiped;

/// Maximum number of files of one list. The fallback reads bytes in further files.
pub(crate) const LIST_FILES_MAX: usize = 64;
/// Maximum number of files of all lists of a process.
const FILES_OPEN_MAX: u32 = 256;

/// Number of files of all lists of this process.
// SAFETY: zero is a valid counter, and a child of fork(2) has no list.
static FILES_OPEN: Wiped<AtomicU32> = unsafe { Wiped::new(AtomicU32::new(0)) };

/// Makes children of fork(2) count from 0. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    FILES_OPEN.wipe_on_fork()
}

/// Maximum number of files of all lists, given this process's limit of descriptors.
fn files_max() -> u32 {
    let numbers = sys::limit_of(Resource::Nofile).unwrap_or(u64::MAX);
    let half = numbers.saturating_sub(u64::from(OWN_FD_MIN.unsigned_abs())) / 2;
    u64::from(FILES_OPEN_MAX).min(half) as u32
}

/// Whether this process may open a further file for a list.
pub(crate) fn has_room() -> bool {
    FILES_OPEN.load(Ordering::Acquire) < files_max()
}

/// A file of a list.
#[derive(Clone, Copy)]
pub(crate) struct ListFile {
    pub(crate) fd: c_int,
    pub(crate) identity: Identity,
}

impl ListFile {
    /// Copies a received descriptor to a high number, for the list of the program's descriptor `owner`. Returns `None`
    /// if there are too many files or no number is free.
    pub(crate) fn copy(received: &Descriptor, identity: Identity, owner: c_int) -> Option<Self> {
        if FILES_OPEN.fetch_add(1, Ordering::AcqRel) < files_max()
            && let Ok(fd) = rustix::io::fcntl_dupfd_cloexec(received.as_fd(), OWN_FD_MIN)
        {
            let fd = fd.into_raw_fd();
            if guard_number(fd, owner) {
                return Some(Self { fd, identity });
            }
            sys::close(fd);
        }
        FILES_OPEN.fetch_sub(1, Ordering::AcqRel);
        None
    }

    /// Whether the number still is this file.
    pub(crate) fn is_same_file(&self) -> bool {
        sys::own_identity(self.fd) == Some(self.identity)
    }

    /// Closes the file, unless its number is another file by now.
    pub(crate) fn close(self) {
        release_number(self.fd);
        if self.is_same_file() {
            sys::close(self.fd);
        }
        FILES_OPEN.fetch_sub(1, Ordering::AcqRel);
    }

    /// Moves the file to another number. Returns false if none is free.
    pub(crate) fn move_away(&mut self, owner: c_int) -> bool {
        let fd = sys::borrow(self.fd).filter(|_| self.is_same_file());
        let moved = fd.and_then(|fd| rustix::io::fcntl_dupfd_cloexec(fd, self.fd + 1).ok());
        let Some(moved) = moved.map(IntoRawFd::into_raw_fd) else {
            return false;
        };
        if !guard_number(moved, owner) {
            sys::close(moved);
            return false;
        }
        release_number(self.fd);
        sys::close(self.fd);
        self.fd = moved;
        true
    }
}

/// Marks a number as the library's own, so that hooks do not touch it. Returns false if that is not possible.
fn guard_number(fd: c_int, owner: c_int) -> bool {
    let Some(mut locked) = table::lock_new_entry(fd) else {
        return false;
    };
    locked.reset();
    locked.owner = owner + 1;
    locked.set_tag(tag::INTERNAL);
    true
}

/// Removes the mark that [`guard_number`] has set.
fn release_number(fd: c_int) {
    if let Some(mut locked) = table::lock_new_entry(fd)
        && locked.tag == tag::INTERNAL
    {
        locked.owner = 0;
        locked.set_tag(tag::ORDINARY);
    }
}

/// Moves a file of a list to another number, because the program wants to use this number.
pub(crate) fn move_file(fd: c_int) {
    let owner = match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag == tag::INTERNAL && locked.owner != 0 => {
            locked.owner - 1
        }
        _ => return,
    };
    if let Entered::Locked(mut locked) = table::lock_entry(owner) {
        locked.list.move_file(fd, owner);
    }
}
