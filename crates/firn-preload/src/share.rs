//! Prepares descriptors to be shared with another process or another descriptor. Before that, their *private* offset,
//! which this process keeps instead of the kernel, is given back to the kernel.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

use crate::kernel;
use crate::report::Reason;
use crate::stub;
use crate::sys;
use crate::table::{self, Entered, tag};
use crate::vfork::{self, is_vfork_child};
use crate::{connect, sharing};

/// Prepares a descriptor to be shared with another process or descriptor: its private offset goes back to the kernel.
pub(crate) fn prepare_to_share(fd: c_int) {
    if table::descriptor_tag(fd) == tag::STUB {
        return stub::share_offset(fd);
    }
    match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag != tag::INTERNAL => {
            kernel::end_direct_access(locked, Reason::Shared)
        }
        // This is a signal handler that has interrupted a hook. The private offset already includes the hook's claim.
        Entered::Interrupted(entry) if entry.is_private() => {
            entry.copy_offset_to_kernel(fd);
        }
        _ => {}
    }
}

/// Prepares all descriptors to be shared. Until [`end_sharing`] no offset becomes private.
pub(crate) fn begin_sharing() {
    if is_vfork_child() {
        return;
    }
    sharing::count_begin();
    for fd in table::tagged_fds(0, u32::MAX) {
        prepare_to_share(fd);
    }
}

/// Ends the sharing, in the process that has called [`begin_sharing`].
pub(crate) fn end_sharing() {
    if !is_vfork_child() {
        sharing::count_end();
    }
}

/// Prepares all descriptors for a call that does not return here if it succeeds, such as execl(3). If it fails, it
/// usually fails before anything is shared.
pub(crate) fn prepare_for_exec() {
    begin_sharing();
    end_sharing();
}

/// Maximum number of sockets that a process has: as many as `connect` has places for connections.
const SOCKETS_MAX: usize = 4;
/// Sockets of the parent that a child of fork(2) must close. They are stored here, because the child finds an empty
/// table.
static INHERITED: [AtomicI32; SOCKETS_MAX] = [const { AtomicI32::new(-1) }; SOCKETS_MAX];

/// Runs before fork(2).
pub(crate) extern "C" fn before_fork() {
    begin_sharing();
    for slot in &INHERITED {
        slot.store(-1, Ordering::Relaxed);
    }
    for (slot, fd) in INHERITED.iter().zip(connect::open_sockets()) {
        slot.store(fd, Ordering::Relaxed);
    }
}

/// Runs after fork(2), in the parent.
pub(crate) extern "C" fn after_fork() {
    share_stubs();
    end_sharing();
}

/// Shares the stubs that another thread has opened while this one was about to fork, because both processes have them.
fn share_stubs() {
    for fd in table::tagged_fds(0, u32::MAX) {
        if table::descriptor_stub_mark(fd) == table::stub_mark::OWN {
            stub::share_offset(fd);
        }
    }
}

/// Runs after fork(2), in the child.
pub(crate) extern "C" fn after_fork_in_child() {
    share_stubs();
    for slot in &INHERITED {
        let fd = slot.swap(-1, Ordering::Relaxed);
        if fd >= 0 {
            sys::close(fd);
        }
    }
}

/// Runs before vfork(2).
pub(crate) extern "C" fn before_vfork() {
    begin_sharing();
    vfork::begin_vfork();
}

/// Runs after vfork(2), in the parent.
pub(crate) extern "C" fn after_vfork() {
    vfork::end_vfork();
    end_sharing();
}

/// Prepares the descriptors in a message (SCM_RIGHTS) to be shared with another process: offsets that this process has
/// kept go back to the kernel. Called before the message is sent.
///
/// # Safety
/// The message is null, or the program's argument of sendmsg(2).
pub(crate) unsafe fn share_sent_descriptors(message: *const libc::msghdr) {
    // SAFETY: the message is null or the program's argument of sendmsg(2), and the macros stay within its control data.
    unsafe {
        if message.is_null() || (*message).msg_control.is_null() {
            return;
        }
        let mut header = libc::CMSG_FIRSTHDR(message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let fds = libc::CMSG_DATA(header).cast::<c_int>();
                let data_bytes = (*header)
                    .cmsg_len
                    .saturating_sub(libc::CMSG_LEN(0) as usize);
                for index in 0..data_bytes / size_of::<c_int>() {
                    let fd = fds.add(index).read_unaligned();
                    if table::descriptor_tag(fd) != tag::ORDINARY {
                        prepare_to_share(fd);
                    }
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// Whether a return address is in libstdc++, whose file buffers read and write the descriptor themselves.
pub(crate) fn is_in_libstdcxx(caller: *const c_void) -> bool {
    // SAFETY: all fields are pointers, for which zero is valid.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr(3) fills the structure, and only compares the address.
    if unsafe { libc::dladdr(caller, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return false;
    }
    // SAFETY: the pointer is the name of a loaded object, which is a C string.
    let name = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_bytes();
    let base = name.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    base.starts_with(b"libstdc++.so")
}
