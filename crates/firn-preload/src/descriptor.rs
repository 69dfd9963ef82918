//! write(2), read(2) and lseek(2) of one descriptor: by a lease or a list where possible, else by the fallback.
//!
//! * A *lease* is the right to write into a *slab*, a free range of the shared memory (the arena).
//! * A *list* says where the bytes of a file are, in the arena or in a file of the backing (the directory that a mount
//!   serves).
//! * The *fallback* serves all other bytes: the kernel for a file of a mount, or firnd for a stub.
//! * A *stub* is an empty file on tmpfs. Its bytes are in firnd, the process that serves a mount.
//!
//! ```text
//!            hook ── locked entry, ProgramMemory ──► write / read / seek
//!                                             │ claims a range of the offset
//!              write: lease (slabs) ◄─────────┼─────────► read: list (extents)
//!                                             │ other bytes
//!                            Fallback: Kernel (a mount) or Socket (a stub)
//! ```
//!
//! Descriptors of a mount ([`crate::kernel`]) and stubs ([`crate::stub`]) differ only in their [`Fallback`].

use std::ffi::c_int;

use crate::fallback::{Fallback, WriteProgress, write_runs};
use crate::lease::fill::{self, LeaseWrite};
use crate::list::copy;
use crate::memory::{Source, Target};
use crate::offset::{CallRange, Claim, current_offset, set_offset};
use crate::outcome::{CallOutcome, KernelCall, Step};
use crate::report::{self, Call};
use crate::table::LockedEntry;

/// Writes the bytes of a source, into leases as far as possible.
pub(crate) fn write_descriptor<F: Fallback>(
    locked: LockedEntry,
    source: Source<'_>,
    range: CallRange,
    call: Call,
) -> CallOutcome {
    CallOutcome::from_step(write_range::<F>(locked, source, range, call))
}

/// Writes bytes of a program to an open file: into leases (slabs of the shared memory) if possible. The fallback
/// writes the other bytes: the kernel, or firnd for a stub (an empty file; firnd has its bytes). Returns the number of
/// written bytes. `Err` ends the call ([`Step`]).
fn write_range<F: Fallback>(
    mut locked: LockedEntry,
    source: Source<'_>,
    range: CallRange,
    call: Call,
) -> Step<usize> {
    let uses_leases = F::obtain_grant(&mut locked, range.total) && source.is_accessible();
    // `?`: if the fallback is the kernel, it serves the whole call, and this function ends.
    if !uses_leases {
        locked = F::hand_over(locked, None, range.explicit_offset, call)?;
    }
    // Moves the descriptor's offset behind the range first, so that a signal handler gets the next range.
    let claim = Claim::for_descriptor(&mut locked, range);
    if claim.is_beyond_files() {
        claim.release_unused(&locked, 0);
        F::hand_over(locked, None, range.explicit_offset, call)?;
        // The kernel returns the same error if offset and length together are too large.
        return Err(CallOutcome::from_errno(libc::EINVAL));
    }
    let lease_write = if uses_leases {
        fill::write_to_leases(&mut locked, source, claim.offset, range.total)
    } else {
        LeaseWrite::NOTHING
    };
    finish_write::<F>(locked, source, claim, range, lease_write, call)
}

/// Finishes a write whose first bytes are in leases (slabs of the shared memory): the fallback, which is the kernel or
/// firnd, writes the others. `claim` is the range by which the descriptor's offset was moved. Returns the number of
/// written bytes.
pub(crate) fn finish_write<F: Fallback>(
    mut locked: LockedEntry,
    source: Source<'_>,
    mut claim: Claim,
    range: CallRange,
    lease_write: LeaseWrite,
    call: Call,
) -> Step<usize> {
    let in_leases = lease_write.done;
    if in_leases == range.total {
        report::count_direct(call, in_leases);
        return Ok(in_leases);
    }
    if let Some(reason) = lease_write.lost {
        // `?`: if the descriptor has become another file, the call ends here.
        locked = F::handle_lost_lease(locked, &mut claim, reason, in_leases, call)?;
        // Nothing is written yet, so the fallback may serve the call from its beginning.
        if in_leases == 0 {
            locked = F::hand_over(locked, Some(&mut claim), range.explicit_offset, call)?;
        }
    }
    report::count_kernel(call);
    let write_run = |run, done| F::write_at(&mut locked, run, claim.offset.wrapping_add(done));
    let progress: WriteProgress = write_runs(source, in_leases, range.total, write_run);
    claim.finish(&locked, progress.done);
    progress.into_result().map_err(CallOutcome::from_errno)
}

/// Reads bytes into a target, by the list if there is one, else by the fallback.
pub(crate) fn read_descriptor<F: Fallback>(
    locked: LockedEntry,
    target: Target<'_>,
    range: CallRange,
    call: Call,
) -> CallOutcome {
    CallOutcome::from_step(read_range::<F>(locked, target, range, call))
}

/// Reads bytes of an open file for a program: by its list of extents, which says where the bytes are in shared memory,
/// or else by the fallback (the kernel, or firnd for a stub). Returns the number of bytes. `Err` ends the call
/// ([`Step`]).
fn read_range<F: Fallback>(
    mut locked: LockedEntry,
    target: Target<'_>,
    range: CallRange,
    call: Call,
) -> Step<usize> {
    let is_listed = F::ensure_list(&mut locked, range.explicit_offset, range.total);
    // `?`: if the fallback is the kernel, it serves the whole call, and this function ends.
    if !is_listed {
        locked = F::hand_over(locked, None, range.explicit_offset, call)?;
    }
    let mut claim = Claim::for_descriptor(&mut locked, range);
    if claim.offset > i64::MAX as u64 {
        return Err(CallOutcome::from_errno(libc::EINVAL));
    }
    if is_listed {
        locked = read_by_list::<F>(locked, target, &mut claim, range, call)?;
    }
    report::count_kernel(call);
    let result = read_by_fallback::<F>(&mut locked, target, claim.offset, range.total);
    claim.finish(&locked, result.unwrap_or(0));
    result.map_err(CallOutcome::from_errno)
}

/// Tries to serve a read by the list, which says where the bytes of the file are in the shared memory.
///
/// `Err` ends the call ([`Step`]): also if the list has served it, with the number of bytes. `Ok` means that the list
/// is of no use, so the caller reads by the fallback (the kernel or firnd). `claim` is the range by which the
/// descriptor's offset was moved.
fn read_by_list<F: Fallback>(
    mut locked: LockedEntry,
    target: Target<'_>,
    claim: &mut Claim,
    range: CallRange,
    call: Call,
) -> Step<LockedEntry> {
    let bytes_to_end = locked.list.size().saturating_sub(claim.offset);
    let expected_bytes = range
        .total
        .min(usize::try_from(bytes_to_end).unwrap_or(usize::MAX));
    // A copy to a bad address would end the program; the fallback returns EFAULT instead.
    if !target.is_accessible(expected_bytes) {
        return F::hand_over(locked, Some(claim), range.explicit_offset, call);
    }
    let Ok(done) = copy::copy_out::<F>(&mut locked, target, claim.offset, range.total) else {
        return F::handle_lost_list(locked, claim, range.explicit_offset, call);
    };
    claim.finish(&locked, done);
    report::count_direct(call, done);
    // The call is complete, so the caller must not read by the fallback.
    Err(CallOutcome::Done(done as isize))
}

/// Reads by the fallback, which is the kernel, or firnd for a stub. Returns the number of bytes, which is less than
/// `total` at the end of the file or after an error, or an errno if the first read failed.
pub(crate) fn read_by_fallback<F: Fallback>(
    locked: &mut LockedEntry,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    let mut done = 0;
    for run in target.runs(0, total) {
        match F::read_at(locked, run, offset.wrapping_add(done as u64)) {
            Ok(count) => {
                done += count;
                if count < run.len() {
                    break;
                }
            }
            Err(errno) if done == 0 => return Err(errno),
            // The bytes that were read already are the result of the call.
            Err(_) => break,
        }
    }
    Ok(done)
}

/// lseek(2).
pub(crate) fn seek_descriptor<F: Fallback>(
    mut locked: LockedEntry,
    offset: i64,
    whence: c_int,
) -> CallOutcome {
    if !F::has_offset(&locked) {
        return CallOutcome::Forward(KernelCall::begin(locked.entry));
    }
    match seek_to::<F>(&mut locked, offset, whence) {
        Ok(new_offset) => CallOutcome::Done(new_offset as isize),
        Err(errno) => CallOutcome::from_errno(errno),
    }
}

/// Sets the offset of a descriptor as lseek(2) does, and returns it, or an errno. Only the fallback (the kernel or
/// firnd) can find the end of the file, data and holes.
fn seek_to<F: Fallback>(
    locked: &mut LockedEntry,
    offset: i64,
    whence: c_int,
) -> Result<u64, c_int> {
    report::count_direct(Call::Lseek, 0);
    let new_offset = match whence {
        libc::SEEK_SET => offset,
        libc::SEEK_CUR => {
            let current = current_offset(locked) as i64;
            current.checked_add(offset).ok_or(libc::EOVERFLOW)?
        }
        _ => {
            let new_offset = F::seek_in_file(locked, offset, whence)?;
            set_offset(locked, new_offset);
            return Ok(new_offset);
        }
    };
    let new_offset = u64::try_from(new_offset).map_err(|_| libc::EINVAL)?;
    let only_asks = whence == libc::SEEK_CUR && offset == 0;
    if !only_asks {
        set_offset(locked, new_offset);
    }
    Ok(new_offset)
}
