//! The life of a stub's descriptor: opened, copied, inherited, shared, closed.

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
use crate::table::{self, Held, mark_stub, stub_mark};
use crate::trees;
use crate::vfork::in_vfork_child;

/// A call just gave a descriptor of a regular file on `device`, opened with `flags`; whether it is a stub.
/// `Err`: it is, and cannot be used.
pub(crate) fn register_open(fd: c_int, device: u64, flags: c_int) -> Result<bool, c_int> {
    if in_vfork_child() || !trees::is_stub_on(fd, device) {
        return Ok(false);
    }
    if fd as usize >= table::FDS {
        // The library has no room to keep it, and the kernel no bytes of it.
        return Err(libc::EMFILE);
    }
    // The C library writes what it says before it ends a program to standard error by itself.
    let is_standard = fd <= libc::STDERR_FILENO;
    mark_stub(
        fd,
        if is_standard {
            stub_mark::SHARED
        } else {
            stub_mark::OWN
        },
    );
    let Entered::Held(mut held) = lock_stub(fd) else {
        return Ok(true);
    };
    held.stub.flags |= flags & libc::O_TRUNC;
    if held.stub.flags & libc::O_PATH != 0 {
        // fcntl(2) tells nothing of what it is used for.
        held.stub.flags |= flags & libc::O_ACCMODE;
    }
    match adopt(&mut held) {
        Ok(()) => Ok(true),
        Err(libc::ENODEV) => {
            forget_stub(&mut held);
            Ok(false)
        }
        Err(errno) => {
            forget_stub(&mut held);
            Err(errno)
        }
    }
}

/// `fd` is a copy of a stub's descriptor.
pub(crate) fn register_copy(fd: c_int) {
    if fd < 0 || in_vfork_child() {
        return;
    }
    mark_stub(fd, stub_mark::SHARED);
    // At once: a stub without a name lives as long as firnd knows of an open descriptor.
    if let Entered::Held(mut held) = lock_stub(fd) {
        let _ = adopt(&mut held);
    }
}

/// At the start of a program: descriptors that it inherited.
pub(crate) fn find_inherited() {
    if !trees::has_trees() {
        return;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = rustix::fs::openat(CWD, c"/proc/self/fd", flags, Mode::empty()) else {
        (0..1024).for_each(mark_inherited);
        return;
    };
    let dir = Descriptor::from(dir);
    let mut room = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(&dir, &mut room);
    while let Some(Ok(entry)) = entries.next() {
        let name = entry.file_name().to_str().ok();
        if let Some(fd) = name.and_then(|name| name.parse().ok())
            && fd != dir.as_fd().as_raw_fd()
        {
            mark_inherited(fd);
        }
    }
}

fn mark_inherited(fd: c_int) {
    if trees::is_stub(fd) {
        mark_stub(fd, stub_mark::SHARED);
    }
}

/// Others are about to get the descriptor: its offset is the kernel's from now on.
pub(crate) fn share_offset(fd: c_int) {
    match lock_stub(fd) {
        Entered::Held(mut held) => {
            give_back(&mut held);
            mark_stub(fd, stub_mark::SHARED);
        }
        Entered::Again(entry) if entry.is_private() => {
            entry.copy_offset_to_kernel(fd);
        }
        _ => {}
    }
}

/// The descriptor's status flags may have changed.
pub(crate) fn flags_changed(fd: c_int) {
    if let Entered::Held(mut held) = lock_stub(fd) {
        let status = sys::fcntl(fd, libc::F_GETFL, 0) as c_int;
        held.stub.flags = status | held.stub.flags & libc::O_TRUNC;
    }
}

/// Before close(2): what it returns, -errno where what was written could not be taken care of.
pub(crate) fn close_stub(fd: c_int) -> isize {
    let Entered::Held(mut held) = lock_stub(fd) else {
        return 0;
    };
    let mut result = 0;
    if held.stub.adopted || held.stub.wrote {
        let once = !held.stub.wrote;
        result = match release_token(&mut held, once) {
            Ok(()) => 0,
            Err(errno) => -(errno as isize),
        };
    }
    forget_stub(&mut held);
    result
}

/// Tells firnd that the descriptor is closed. `once`: without retries, for a firnd that may be gone.
fn release_token(held: &mut Held, once: bool) -> Result<(), c_int> {
    give_back(held);
    if once {
        let _ = connect::ask_firnd(held.link, Op::Release, held.token, 0);
        return Ok(());
    }
    send_request(held, Op::Release, 0, 0, Payload::none()).map(drop)
}

/// The offset is the kernel's again.
fn give_back(held: &mut Held) {
    if held.is_private() {
        offset::return_offset(held, |_| true);
    }
}
