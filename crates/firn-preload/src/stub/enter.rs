//! How a call finds the entry of a stub.
//!
//! Every call looks first whether the number still is the file that was opened: no release by the kernel ends
//! the lease of a descriptor that was closed by a raw call.

use std::ffi::c_int;

use firn_format::data_socket::Op;

use crate::connect;
use crate::sys;
use crate::table::{self, Entry, Held, mark_stub, stub_mark, stub_mark_of, tag};
use crate::trees;
use crate::vfork::in_vfork_child;

/// How a call finds the descriptor.
pub(crate) enum Entered {
    Held(Held),
    /// This thread was interrupted by a signal while it held the entry.
    Again(&'static Entry),
    /// It is no stub (any more).
    Not,
    /// In a child of vfork(2), which has nothing of its own to keep what a stub needs.
    Vforked,
}

pub(crate) fn lock_stub(fd: c_int) -> Entered {
    if in_vfork_child() {
        return Entered::Vforked;
    }
    let Some(mut held) = table::lock_new_entry(fd) else {
        return table::entry_of(fd).map_or(Entered::Not, Entered::Again);
    };
    let found = sys::identity(fd);
    if held.tag == tag::STUB {
        if found.is_some_and(|(identity, _)| identity == held.identity) {
            return Entered::Held(held);
        }
        // Closed by a raw call: firnd is told at once, and a firnd that is gone is not waited for.
        let adopted = held.stub.adopted;
        let link = held.link;
        let token = held.token;
        forget_stub(&mut held);
        if adopted {
            connect::ask_firnd(link, Op::Release, token, 0);
        }
    }
    // The first use in this process: inherited, or just opened.
    held.reset();
    match found {
        Some((identity, mode)) if is_regular(mode) && trees::is_stub_on(fd, identity.device) => {
            held.identity = identity;
            held.stub.flags = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
            if stub_mark_of(fd) == stub_mark::NONE {
                mark_stub(fd, stub_mark::SHARED);
            }
            held.set_tag(tag::STUB);
            Entered::Held(held)
        }
        _ => {
            forget_stub(&mut held);
            Entered::Not
        }
    }
}

pub(crate) fn is_regular(mode: u32) -> bool {
    mode & libc::S_IFMT == libc::S_IFREG
}

/// The number is no stub's any more.
pub(crate) fn forget_stub(held: &mut Held) {
    held.list.unmap_extents();
    held.reset();
    mark_stub(held.fd, stub_mark::NONE);
}
