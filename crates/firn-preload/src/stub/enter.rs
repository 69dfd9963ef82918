//! Begins a call of a stub (an empty file; firnd has its bytes): locks its entry in the table of descriptors.
//!
//! Each call first checks whether the number still is the file that was opened. If the program has closed a stub by a
//! raw system call, firnd has not noticed that, and the lease of the stub is still valid.

use std::ffi::c_int;

use firn_format::data_socket::Op;

use crate::connect;
use crate::sys;
use crate::table::{self, Entry, LockedEntry, descriptor_stub_mark, mark_stub, stub_mark, tag};
use crate::trees;
use crate::vfork::is_vfork_child;

/// Result of locking the entry of a stub.
pub(crate) enum Entered {
    /// The entry is locked.
    Locked(LockedEntry),
    /// This thread holds the lock already: the caller is a signal handler that has interrupted a hook.
    Interrupted(&'static Entry),
    /// The descriptor is no stub.
    NotStub,
    /// The caller is in a child of vfork(2), which has no memory of its own for the state of a stub.
    Vforked,
}

/// Locks the *entry* (the state in the table) of a descriptor if it is a stub, an empty file with its bytes in firnd.
/// An inherited stub gets its entry here. The other results say why there is no lock.
pub(crate) fn lock_stub(fd: c_int) -> Entered {
    if is_vfork_child() {
        return Entered::Vforked;
    }
    let Some(mut locked) = table::lock_new_entry(fd) else {
        return table::unlocked_entry(fd).map_or(Entered::NotStub, Entered::Interrupted);
    };
    let current_file = sys::identity(fd);
    if locked.tag == tag::STUB {
        if current_file.is_some_and(|(identity, _)| identity == locked.identity) {
            return Entered::Locked(locked);
        }
        // The program has closed the stub by a raw system call, and opened another file under the number.
        release_closed_stub(&mut locked);
    }
    // This is the first use of the descriptor in this process: it was inherited or just opened.
    locked.reset();
    match current_file {
        Some((identity, mode)) if is_regular(mode) && trees::is_stub_on(fd, identity.device) => {
            locked.identity = identity;
            locked.stub.flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
            if descriptor_stub_mark(fd) == stub_mark::NONE {
                mark_stub(fd, stub_mark::SHARED);
            }
            locked.set_tag(tag::STUB);
            Entered::Locked(locked)
        }
        _ => {
            forget_stub(&mut locked);
            Entered::NotStub
        }
    }
}

/// Forgets a stub that was closed by a raw call, and informs firnd now. If firnd does not run, it does not wait.
fn release_closed_stub(locked: &mut LockedEntry) {
    let was_adopted = locked.stub.is_adopted;
    let link = locked.link;
    let token = locked.token;
    forget_stub(locked);
    if was_adopted {
        connect::request_without_data(link, Op::Release, token, 0);
    }
}

/// Whether a mode is that of a regular file.
pub(crate) fn is_regular(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFREG
}

/// Forgets the stub of a number.
pub(crate) fn forget_stub(locked: &mut LockedEntry) {
    locked.list.unmap_extents();
    locked.reset();
    mark_stub(locked.fd, stub_mark::NONE);
}
