//! mmap(2) of a stub (an empty file; firnd has its bytes): gives the program private memory with a copy of the file's
//! bytes, made at the call.
//!
//! Later changes of the file do not appear in the mapping. A shared mapping to write to is refused, because its stores
//! would not reach firnd.

use std::ffi::{c_int, c_void};

use crate::descriptor;
use crate::fallback::{Fallback, postpone_after_end};
use crate::list::copy;
use crate::mapping::MapArguments;
use crate::memory::{Run, Target, Writable};
use crate::report::Reason;
use crate::stub::enter::{Entered, lock_stub};
use crate::stub::request::{adopt, request_size};
use crate::stub::socket::Socket;
use crate::sys::syscall;
use crate::table::LockedEntry;

const PAGE_BYTES: i64 = firn_format::geometry::PAGE as i64;

/// mmap(2) of a stub. Returns the address or `-errno`; `None` if the descriptor is no stub.
///
/// # Safety
/// The same as for mmap(2).
pub(crate) unsafe fn map_copy(fd: c_int, arguments: MapArguments) -> Option<isize> {
    let mut locked = match lock_stub(fd) {
        Entered::Locked(locked) => locked,
        Entered::Interrupted(_) | Entered::Vforked => return Some(-(libc::ENODEV as isize)),
        Entered::NotStub => return None,
    };
    // SAFETY: the caller keeps the promises of mmap(2).
    let mapped = unsafe { map_locked(&mut locked, arguments) };
    Some(match mapped {
        Ok(start) => start,
        Err(errno) => -(errno as isize),
    })
}

/// Maps private memory and fills it with bytes of a locked stub, an empty file with its bytes in firnd. Returns its
/// address, or an errno. A shared mapping to write to is refused, because its stores would not reach firnd.
///
/// # Safety
/// The same as for mmap(2).
unsafe fn map_locked(locked: &mut LockedEntry, arguments: MapArguments) -> Result<isize, c_int> {
    let MapArguments {
        address,
        len,
        prot,
        flags,
        offset,
    } = arguments;
    let is_shared = flags & libc::MAP_TYPE != libc::MAP_PRIVATE;
    let is_shared_writable = is_shared && prot & libc::PROT_WRITE != 0;
    check_access(locked.stub.flags & libc::O_ACCMODE, is_shared_writable)?;
    if len == 0 || offset < 0 || offset % PAGE_BYTES != 0 {
        return Err(libc::EINVAL);
    }
    let size = request_size(locked)?;
    let kept_flags = flags & !(libc::MAP_TYPE | libc::MAP_SYNC);
    let memory_flags = kept_flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let prot_while_filled = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: these are the program's arguments of mmap(2), but for private anonymous memory.
    let start = unsafe {
        syscall!(
            libc::SYS_mmap,
            address,
            len,
            prot_while_filled,
            memory_flags,
            -1isize,
            0usize
        )
    };
    if start < 0 {
        return Err(start.wrapping_neg() as c_int);
    }
    let file_bytes = size.saturating_sub(offset as u64).min(len as u64) as usize;
    // SAFETY: the memory was just mapped for writing, and only this function knows it.
    let run: Run<'_, Writable> = unsafe { Run::new(start as *mut c_void, file_bytes) };
    let filled = run.as_memory(|target| copy_file(locked, target, offset as u64, file_bytes));
    if let Err(errno) = filled {
        // SAFETY: the memory was mapped above, and only this function knows it.
        unsafe { syscall!(libc::SYS_munmap, start, len) };
        return Err(errno);
    }
    if prot != prot_while_filled {
        // SAFETY: the memory was mapped above, and gets the protection that the program wants.
        unsafe { syscall!(libc::SYS_mprotect, start, len, prot) };
    }
    Ok(start)
}

/// Checks whether a descriptor with this access mode can be mapped. ENODEV says that a shared writable mapping is not
/// supported; the other errors are those of mmap(2).
fn check_access(access: c_int, is_shared_writable: bool) -> Result<(), c_int> {
    match access {
        libc::O_WRONLY => Err(libc::EACCES),
        libc::O_RDONLY if is_shared_writable => Err(libc::EACCES),
        _ if is_shared_writable => Err(libc::ENODEV),
        _ => Ok(()),
    }
}

/// Copies bytes of a stub (an empty file; firnd has its bytes) into a new mapping, by its list (the places of its bytes
/// in shared memory) or by requests to firnd. Returns their number.
fn copy_file(
    locked: &mut LockedEntry,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    if total == 0 {
        return Ok(0);
    }
    adopt(locked)?;
    if Socket::ensure_list(locked, None, total) {
        if let Ok(done) = copy::copy_out::<Socket>(locked, target, offset, total) {
            return Ok(done);
        }
        locked.list.unmap_extents();
        postpone_after_end(locked, Reason::Changed);
    }
    descriptor::read_by_fallback::<Socket>(locked, target, offset, total)
}
