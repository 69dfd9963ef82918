//! Hooks of calls that close or copy descriptors (close, dup, fcntl) or pass them to other processes (messages).

use std::ffi::{c_int, c_uint};

use libc::ssize_t;

use super::{export, forward, locks, stream};
use crate::connect;
use crate::list::files;
use crate::opened::forget_closed_descriptor;
use crate::real::{CLOSE, CLOSE_RANGE, CLOSEFROM, DUP, DUP2, DUP3, FCNTL, SENDMMSG, SENDMSG};
use crate::share;
use crate::stub;
use crate::sys::{self, fail, with_errno};
use crate::table::{self, descriptor_tag, tag};
use crate::vfork::is_vfork_child;

export! {
    close __close = do_close(fd: c_int) -> c_int;
    dup = do_dup(fd: c_int) -> c_int;
    dup2 __dup2 = do_dup2(from: c_int, to: c_int) -> c_int;
    dup3 = do_dup3(from: c_int, to: c_int, flags: c_int) -> c_int;
    fcntl fcntl64 __fcntl = do_fcntl(fd: c_int, command: c_int, arg: usize) -> c_int;
    close_range = do_close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom = do_closefrom(first: c_int) -> ();
    sendmsg = do_sendmsg(socket: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t;
    sendmmsg = do_sendmmsg(
        socket: c_int,
        messages: *mut libc::mmsghdr,
        count: c_uint,
        flags: c_int,
    ) -> c_int;
}

/// Whether a descriptor is the library's own. In a child of vfork(2) none is.
fn is_internal(fd: c_int) -> bool {
    descriptor_tag(fd) == tag::INTERNAL && !is_vfork_child()
}

/// close(2). For a stub (an empty file; firnd has its bytes) firnd is informed first, and close(2) returns an error of
/// firnd to the program. The library's own descriptors stay open.
#[inline(always)]
unsafe fn do_close(fd: c_int) -> c_int {
    match descriptor_tag(fd) {
        tag::ORDINARY => {}
        // The program cannot know the number, so it gets the error of a number that is not open.
        _ if is_internal(fd) => return fail(libc::EBADF),
        tag::STUB => {
            let released = stub::close_stub(fd);
            table::forget_tag(fd);
            let closed = forward!(CLOSE(fd));
            return if closed == 0 {
                with_errno(released) as c_int
            } else {
                closed
            };
        }
        _ => forget_closed_descriptor(fd),
    }
    // The next file with this number may be a stub.
    table::forget_tag(fd);
    forward!(CLOSE(fd))
}

unsafe fn do_dup(fd: c_int) -> c_int {
    if descriptor_tag(fd) != tag::ORDINARY {
        share::prepare_to_share(fd);
    }
    let new = forward!(DUP(fd));
    register_copied_fd(fd, new);
    new
}

/// Registers `new`, which the kernel has just made as a copy of `fd`.
fn register_copied_fd(fd: c_int, new: c_int) {
    forget_reused_number(new);
    if new >= 0 && descriptor_tag(fd) == tag::STUB {
        stub::register_copy(new);
        stream::replace_stream_of_stub(new);
    }
}

/// Forgets the state of a number that the kernel has just returned. The state is of a descriptor that was closed
/// unseen.
fn forget_reused_number(fd: c_int) {
    if table::has_state(fd) {
        forget_closed_descriptor(fd);
    }
}

/// Registers a number that the kernel has just returned and that is no copy of a known descriptor.
pub(super) fn register_received_fd(fd: c_int) {
    forget_reused_number(fd);
    table::forget_tag(fd);
}

/// Prepares dup2(2) or dup3(2), which closes `to` and then makes it a copy of `from`. Offsets that this process has
/// kept go back to the kernel, because both descriptors share them from then on. A stub is an empty file with its bytes
/// in firnd.
fn prepare_dup(from: c_int, to: c_int) {
    if from == to {
        return;
    }
    if descriptor_tag(from) != tag::ORDINARY {
        share::prepare_to_share(from);
    }
    if descriptor_tag(to) == tag::STUB {
        // The kernel closes `to` within the call, so firnd must be informed before. The call fails only if `from` is
        // not open.
        if sys::fcntl(from, libc::F_GETFD, 0) >= 0 {
            stub::close_stub(to);
        }
    } else if is_internal(to) {
        // The program wants this number, so the library's descriptor moves to another one.
        connect::move_socket(to);
        files::move_file(to);
    } else if descriptor_tag(to) != tag::ORDINARY {
        // The offset is given back, because the call may fail, and then `to` stays open.
        share::prepare_to_share(to);
    }
}

unsafe fn do_dup2(from: c_int, to: c_int) -> c_int {
    prepare_dup(from, to);
    let new = forward!(DUP2(from, to));
    if from != to {
        register_copied_fd(from, new);
    }
    new
}

unsafe fn do_dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    prepare_dup(from, to);
    let new = forward!(DUP3(from, to, flags));
    register_copied_fd(from, new);
    new
}

/// fcntl(2). Before a command that copies a descriptor or sets its flags, the descriptor's private offset (kept by this
/// process) goes back to the kernel. Locks of ranges may depend on that offset, so a hook of their own serves them.
unsafe fn do_fcntl(fd: c_int, command: c_int, arg: usize) -> c_int {
    let copies_fd = matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC);
    let sets_flags = command == libc::F_SETFL;
    if descriptor_tag(fd) != tag::ORDINARY && (copies_fd || sets_flags) {
        share::prepare_to_share(fd);
    }
    if descriptor_tag(fd) != tag::ORDINARY && locks::is_range_lock_command(command) {
        // SAFETY: the program has passed the lock to fcntl(2).
        return unsafe { locks::lock_range(fd, command, arg) };
    }
    let result = forward!(FCNTL(fd, command, arg));
    if copies_fd {
        register_copied_fd(fd, result);
    } else if sets_flags && descriptor_tag(fd) == tag::STUB {
        stub::update_flags(fd);
    }
    result
}

/// close_range(2), which must leave the library's own descriptors open. So the range is closed in parts, between them.
/// firnd is informed of the close of stubs, empty files with their bytes in firnd.
unsafe fn do_close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let close_range = CLOSE_RANGE.get();
    if is_vfork_child() || flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0 {
        // SAFETY: the arguments are numbers, and the program closes its own descriptors.
        return unsafe { close_range(first, last, flags) };
    }
    let mut first_open = first;
    for fd in table::tagged_fds(first, last) {
        if !is_internal(fd) {
            if descriptor_tag(fd) == tag::STUB {
                stub::close_stub(fd);
            } else {
                forget_closed_descriptor(fd);
            }
            continue;
        }
        let internal_fd = fd as c_uint;
        if internal_fd > first_open {
            // SAFETY: the range is a part of the one that the program closes.
            let result = unsafe { close_range(first_open, internal_fd - 1, flags) };
            if result < 0 {
                return -1;
            }
        }
        first_open = internal_fd + 1;
    }
    // The last descriptor of the range is the library's own, so no part is left.
    let ends_with_internal = first_open > last && first_open > first;
    if ends_with_internal {
        return 0;
    }
    // SAFETY: the range is the rest of the one that the program closes.
    unsafe { close_range(first_open, last, flags) }
}

unsafe fn do_closefrom(first: c_int) {
    let first = first.max(0) as c_uint;
    if is_vfork_child() || table::tagged_fds(first, u32::MAX).next().is_none() {
        return forward!(CLOSEFROM(first as c_int));
    }
    // SAFETY: the arguments are numbers, and the program closes these descriptors by closefrom(3).
    unsafe { do_close_range(first, c_uint::MAX, 0) };
}

unsafe fn do_sendmsg(socket: c_int, message: *const libc::msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the program has passed the message to sendmsg(2).
    unsafe {
        share::share_sent_descriptors(message);
        SENDMSG.get()(socket, message, flags)
    }
}

unsafe fn do_sendmmsg(
    socket: c_int,
    messages: *mut libc::mmsghdr,
    count: c_uint,
    flags: c_int,
) -> c_int {
    // SAFETY: the program has passed `count` messages to sendmmsg(2).
    unsafe {
        for index in 0..count as usize {
            share::share_sent_descriptors(&raw const (*messages.wrapping_add(index)).msg_hdr);
        }
        SENDMMSG.get()(socket, messages, count, flags)
    }
}
