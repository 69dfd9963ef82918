//! mmap(2) of a stub: a copy of its bytes, made at the call.

use std::ffi::{c_int, c_void};

use crate::descriptor;
use crate::fallback::{Fallback, wait_longer_after};
use crate::list::copy;
use crate::memory::{Run, Target, Writable};
use crate::report::Reason;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{adopt, ask_size};
use crate::stub::socket::Socket;
use crate::sys::syscall;
use crate::table::Held;

/// mmap(2): a copy. `None`: it is no stub.
///
/// # Safety
/// As for mmap(2).
pub(crate) unsafe fn map_copy(
    at: *mut c_void,
    len: usize,
    prot: c_int,
    flags: c_int,
    fd: c_int,
    offset: i64,
) -> Option<isize> {
    let mut held = match lock_stub(fd) {
        Entered::Held(held) => held,
        Entered::Again(_) | Entered::Vforked => return Some(-(libc::ENODEV as isize)),
        Entered::Not => return None,
    };
    let is_shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    let stores = is_shared && prot & libc::PROT_WRITE != 0;
    let size = check_access(held.stub.flags & libc::O_ACCMODE, stores).and_then(|()| {
        if len == 0 || offset < 0 || offset % 4096 != 0 {
            return Err(libc::EINVAL);
        }
        ask_size(&mut held)
    });
    let size = match size {
        Ok(size) => size,
        Err(errno) => return Some(-(errno as isize)),
    };
    let unchanged = flags & !(libc::MAP_TYPE | libc::MAP_SYNC);
    let flags = unchanged | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let first = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: what the program asked of mmap(2), but private and anonymous.
    let start = unsafe { syscall!(libc::SYS_mmap, at, len, first, flags, -1isize, 0usize) };
    if start < 0 {
        return Some(start);
    }
    let bytes = size.saturating_sub(offset as u64).min(len as u64) as usize;
    // SAFETY: memory that was just mapped for writing, and is known to this function only.
    let run: Run<'_, Writable> = unsafe { Run::new(start as *mut c_void, bytes) };
    let filled = run.as_memory(|target| copy_file(&mut held, target, offset as u64, bytes));
    if let Err(errno) = filled {
        // SAFETY: as just mapped; known to this function only.
        unsafe { syscall!(libc::SYS_munmap, start, len) };
        return Some(-(errno as isize));
    }
    if prot != first {
        // SAFETY: as just mapped, with the protection that the program asked for.
        unsafe { syscall!(libc::SYS_mprotect, start, len, prot) };
    }
    Some(start)
}

/// Whether a descriptor with this access mode can be mapped, where `stores` to the mapping would reach the file: they
/// do not reach firnd.
fn check_access(access: c_int, stores: bool) -> Result<(), c_int> {
    match access {
        libc::O_WRONLY => Err(libc::EACCES),
        libc::O_RDONLY if stores => Err(libc::EACCES),
        _ if stores => Err(libc::ENODEV),
        _ => Ok(()),
    }
}

/// Bytes of the file, by the list or by requests.
fn copy_file(
    held: &mut Held,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    if total == 0 {
        return Ok(0);
    }
    adopt(held)?;
    if Socket::has_list(held, None, total) {
        if let Some(done) = copy::copy_out::<Socket>(held, target, offset, total) {
            return Ok(done);
        }
        held.list.unmap_extents();
        wait_longer_after(held, Reason::Changed);
    }
    descriptor::read_by_fallback::<Socket>(held, target, offset, total)
}
