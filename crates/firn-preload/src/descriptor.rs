//! write(2), read(2) and lseek(2) of one descriptor: by a lease or a list where possible, else by the fallback.
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
//!
//! In all functions `explicit_offset` is the offset that the call names, as pwrite(2) does; `None` means the
//! descriptor's own offset.

use std::ffi::c_int;

use crate::fallback::Fallback;
use crate::handled::{Handled, Ticket};
use crate::lease::{LeaseLost, fill};
use crate::list::copy;
use crate::memory::{Source, Target};
use crate::offset::{Claim, current_offset, set_offset};
use crate::report::{self, Call};
use crate::table::LockedEntry;

/// Writes `total` bytes of a source, into leases as far as possible.
pub(crate) fn write_descriptor<F: Fallback>(
    mut locked: LockedEntry,
    source: Source<'_>,
    (explicit_offset, total): (Option<u64>, usize),
    call: Call,
) -> Handled {
    let uses_leases = F::may_lease(&mut locked, total) && source.is_accessible();
    if !uses_leases {
        locked = match F::leave(locked, None, explicit_offset, call) {
            Ok(locked) => locked,
            Err(handled) => return handled,
        };
    }
    let claim = Claim::of_range(&mut locked, explicit_offset, total);
    if claim.is_beyond_files() {
        claim.cut_back(&locked, 0);
        return match F::leave(locked, None, explicit_offset, call) {
            // The kernel returns the same error if offset and length together are too large.
            Ok(_) => Handled::of(Err(libc::EINVAL)),
            Err(handled) => handled,
        };
    }
    let (done, lost) = if uses_leases {
        fill::fill_leases(&mut locked, source, claim.offset, total)
    } else {
        (0, None)
    };
    finish_write::<F>(
        locked,
        source,
        claim,
        (explicit_offset, total),
        (done, lost),
        call,
    )
}

/// Finishes a write of which `done` bytes are in leases: the fallback writes the rest. If a lease was lost, `lost` is
/// the reason.
pub(crate) fn finish_write<F: Fallback>(
    mut locked: LockedEntry,
    source: Source<'_>,
    mut claim: Claim,
    (explicit_offset, total): (Option<u64>, usize),
    (mut done, lost): (usize, Option<LeaseLost>),
    call: Call,
) -> Handled {
    if done == total {
        report::count_direct(call, done);
        return Handled::Done(done as isize);
    }
    if let Some(lost) = lost {
        locked = match F::lease_lost(locked, &mut claim, lost, done, call) {
            Ok(locked) => locked,
            Err(handled) => return handled,
        };
        if done == 0 {
            locked = match F::leave(locked, Some(&mut claim), explicit_offset, call) {
                Ok(locked) => locked,
                Err(handled) => return handled,
            };
        }
    }
    report::count_kernel(call);
    let mut failed = None;
    for run in source.runs(done, total - done) {
        match F::write_at(&mut locked, run, claim.offset.wrapping_add(done as u64)) {
            Ok(more) => {
                done += more;
                if more < run.len() {
                    break;
                }
            }
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    claim.settle_offset(&locked, done);
    Handled::of(failed.map_or(Ok(done), |error| error.after(done)))
}

/// Reads up to `total` bytes, by the list if there is one, else by the fallback.
pub(crate) fn read_descriptor<F: Fallback>(
    mut locked: LockedEntry,
    target: Target<'_>,
    (explicit_offset, total): (Option<u64>, usize),
    call: Call,
) -> Handled {
    let is_listed = F::has_list(&mut locked, explicit_offset, total);
    if !is_listed {
        locked = match F::leave(locked, None, explicit_offset, call) {
            Ok(locked) => locked,
            Err(handled) => return handled,
        };
    }
    let mut claim = Claim::of_range(&mut locked, explicit_offset, total);
    if claim.offset > i64::MAX as u64 {
        return Handled::of(Err(libc::EINVAL));
    }
    if is_listed {
        locked = match read_by_list::<F>(locked, target, &mut claim, (explicit_offset, total), call)
        {
            Ok(locked) => locked,
            Err(handled) => return handled,
        };
    }
    report::count_kernel(call);
    let result = read_by_fallback::<F>(&mut locked, target, claim.offset, total);
    claim.settle_offset(&locked, result.unwrap_or(0));
    Handled::of(result)
}

/// Reads by the list. `Err` is the end of the call, with its result. `Ok` means that the fallback must serve the call.
fn read_by_list<F: Fallback>(
    mut locked: LockedEntry,
    target: Target<'_>,
    claim: &mut Claim,
    (explicit_offset, total): (Option<u64>, usize),
    call: Call,
) -> Result<LockedEntry, Handled> {
    let left = locked.list.size().saturating_sub(claim.offset);
    let expected = total.min(usize::try_from(left).unwrap_or(usize::MAX));
    if !target.is_accessible(expected) {
        return F::leave(locked, Some(claim), explicit_offset, call);
    }
    let Some(done) = copy::copy_out::<F>(&mut locked, target, claim.offset, total) else {
        return F::list_lost(locked, claim, explicit_offset, call);
    };
    claim.settle_offset(&locked, done);
    report::count_direct(call, done);
    Err(Handled::Done(done as isize))
}

/// Reads by the fallback. Returns the number of bytes, or an errno if the first read failed.
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
) -> Handled {
    if !F::has_offset(&locked) {
        return Handled::Forward(Ticket::of(locked.entry));
    }
    match seek_to::<F>(&mut locked, offset, whence) {
        Ok(target) => Handled::Done(target as isize),
        Err(errno) => Handled::Done(-(errno as isize)),
    }
}

/// Sets the offset as lseek(2) does, and returns it.
fn seek_to<F: Fallback>(
    locked: &mut LockedEntry,
    offset: i64,
    whence: c_int,
) -> Result<u64, c_int> {
    report::count_direct(Call::Lseek, 0);
    let current = |locked: &LockedEntry| current_offset(locked) as i64;
    let target = match whence {
        libc::SEEK_SET => offset,
        libc::SEEK_CUR => current(locked).checked_add(offset).ok_or(libc::EOVERFLOW)?,
        _ => {
            let target = F::seek_in_file(locked, offset, whence)?;
            set_offset(locked, target);
            return Ok(target);
        }
    };
    let target = u64::try_from(target).map_err(|_| libc::EINVAL)?;
    if whence == libc::SEEK_SET || offset != 0 {
        set_offset(locked, target);
    }
    Ok(target)
}
