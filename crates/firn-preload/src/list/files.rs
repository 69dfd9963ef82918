//! Files of the backing that a list names: descriptors of the library's own.
//!
//! Invariants
//! * Each has a number out of the program's way, which the program's calls leave alone (`tag::INTERNAL`), and is closed
//!   with its list. Before fork(2) and its kin all lists end, so children have none of them.
//! * A process has [`FILES_OPEN_MAX`] of them at most, and half of the numbers that it may use there.
//! * What was read by one counts only if its number still is the file that it was ([`ListFile::is_same`]): a raw
//!   system call may have closed it.

use std::ffi::c_int;
use std::os::fd::{AsFd, IntoRawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use firn_direct::syscall::Descriptor;
use rustix::process::Resource;

use crate::connect::OWN_FD_MIN;
use crate::sys::{self, Identity};
use crate::table::{self, Entered, tag};
use crate::wiped::Wiped;

/// Files of one list; what lies in others is read by the fallback.
pub(crate) const LIST_FILES_MAX: usize = 64;
/// Files of all lists of a process.
const FILES_OPEN_MAX: u32 = 256;

// SAFETY: a counter, of which zeros are a value: a child of fork(2) has no list.
static FILES_OPEN: Wiped<AtomicU32> = unsafe { Wiped::new(AtomicU32::new(0)) };

/// Makes children of fork(2) count from 0. `false`: the kernel cannot.
pub(crate) fn wipe_on_fork() -> bool {
    FILES_OPEN.wipe_on_fork()
}

/// Files that the lists of this process may have, by its limit of descriptors.
fn files_max() -> u32 {
    let numbers = sys::limit_of(Resource::Nofile).unwrap_or(u64::MAX);
    let room = numbers.saturating_sub(u64::from(OWN_FD_MIN.unsigned_abs())) / 2;
    u64::from(FILES_OPEN_MAX).min(room) as u32
}

/// Whether there is room for another one.
pub(crate) fn has_room() -> bool {
    FILES_OPEN.load(Ordering::Acquire) < files_max()
}

/// One file. All zeros: none.
#[derive(Clone, Copy)]
pub(crate) struct ListFile {
    pub(crate) fd: c_int,
    pub(crate) identity: Identity,
}

impl ListFile {
    /// Keeps a descriptor that came for the list of `owner`; `None` where there is no room for it.
    pub(crate) fn keep(received: &Descriptor, identity: Identity, owner: c_int) -> Option<Self> {
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

    /// Whether its number still is this file.
    pub(crate) fn is_same(&self) -> bool {
        sys::own_identity(self.fd) == Some(self.identity)
    }

    /// Closes it, unless its number was reused by another descriptor.
    pub(crate) fn close(self) {
        release_number(self.fd);
        if self.is_same() {
            sys::close(self.fd);
        }
        FILES_OPEN.fetch_sub(1, Ordering::AcqRel);
    }

    /// Gives the file another number; false where there is none.
    pub(crate) fn move_away(&mut self, owner: c_int) -> bool {
        let fd = sys::borrow(self.fd).filter(|_| self.is_same());
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

/// Makes the hooks leave a number alone; false where that is not possible.
fn guard_number(fd: c_int, owner: c_int) -> bool {
    let Some(mut held) = table::lock_new_entry(fd) else {
        return false;
    };
    held.reset();
    held.owner = owner + 1;
    held.set_tag(tag::INTERNAL);
    true
}

fn release_number(fd: c_int) {
    if let Some(mut held) = table::lock_new_entry(fd)
        && held.tag == tag::INTERNAL
    {
        held.owner = 0;
        held.set_tag(tag::NONE);
    }
}

/// Gives a file of a list another number: the program wants that one for itself.
pub(crate) fn move_file(fd: c_int) {
    let owner = match table::lock_entry(fd) {
        Entered::Held(held) if held.tag == tag::INTERNAL && held.owner != 0 => held.owner - 1,
        _ => return,
    };
    if let Entered::Held(mut held) = table::lock_entry(owner) {
        held.list.move_file(fd, owner);
    }
}
