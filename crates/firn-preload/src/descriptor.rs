//! One descriptor of ours: its offset, its lease or list, and what serves the bytes that neither can.
//!
//! ```text
//!            hook ── Held, ProgramMemory ──► write / read / seek
//!                                             │ claim a range of the offset
//!                       lease (slabs) ◄───────┤───────► list (extents)
//!                                             │ what does not go there
//!                            Fallback: Kernel (a mount) or Socket (a stub)
//! ```
//!
//! A mount's descriptors ([`crate::kernel`]) and stubs ([`crate::stub`]) differ in their [`Fallback`] alone.

use std::ffi::c_int;

use crate::fallback::Fallback;
use crate::handled::{Handled, Ticket};
use crate::lease::{LeaseLost, fill};
use crate::list::copy;
use crate::memory::{Source, Target};
use crate::offset::{Claim, current_offset, set_offset};
use crate::report::{self, Call};
use crate::table::Held;

/// Writes `total` bytes at the descriptor's offset, or at `at`.
pub(crate) fn write_descriptor<F: Fallback>(
    mut held: Held,
    source: Source<'_>,
    (at, total): (Option<u64>, usize),
    call: Call,
) -> Handled {
    let leases = F::may_lease(&mut held, total) && source.is_good();
    if !leases {
        held = match F::leave(held, None, at, call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
    }
    let claim = Claim::of_range(&mut held, at, total);
    if claim.is_beyond_files() {
        claim.cut_back(&held, 0);
        return match F::leave(held, None, at, call) {
            // As the kernel says where offset and length together are too large.
            Ok(_) => Handled::of(Err(libc::EINVAL)),
            Err(handled) => handled,
        };
    }
    let (done, lost) = if leases {
        fill::fill_leases(&mut held, source, claim.offset, total)
    } else {
        (0, None)
    };
    go_on::<F>(held, source, claim, (at, total), (done, lost), call)
}

/// The rest of a write of which `done` bytes went into leases.
pub(crate) fn go_on<F: Fallback>(
    mut held: Held,
    source: Source<'_>,
    mut claim: Claim,
    (at, total): (Option<u64>, usize),
    (mut done, lost): (usize, Option<LeaseLost>),
    call: Call,
) -> Handled {
    if done == total {
        report::count_direct(call, done);
        return Handled::Done(done as isize);
    }
    if let Some(lost) = lost {
        held = match F::lease_lost(held, &mut claim, lost, done, call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
        if done == 0 {
            held = match F::leave(held, Some(&mut claim), at, call) {
                Ok(held) => held,
                Err(handled) => return handled,
            };
        }
    }
    report::count_kernel(call);
    let mut failed = None;
    for run in source.runs(done, total - done) {
        match F::write_at(&mut held, run, claim.offset.wrapping_add(done as u64)) {
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
    claim.settle_offset(&held, done);
    Handled::of(failed.map_or(Ok(done), |error| error.after(done)))
}

/// Reads up to `total` bytes at the descriptor's offset, or at `at`.
pub(crate) fn read_descriptor<F: Fallback>(
    mut held: Held,
    target: Target<'_>,
    (at, total): (Option<u64>, usize),
    call: Call,
) -> Handled {
    let is_listed = F::has_list(&mut held, at, total);
    if !is_listed {
        held = match F::leave(held, None, at, call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
    }
    let mut claim = Claim::of_range(&mut held, at, total);
    if claim.offset > i64::MAX as u64 {
        return Handled::of(Err(libc::EINVAL));
    }
    if is_listed {
        held = match read_by_list::<F>(held, target, &mut claim, (at, total), call) {
            Ok(held) => held,
            Err(handled) => return handled,
        };
    }
    report::count_kernel(call);
    let result = read_by_fallback::<F>(&mut held, target, claim.offset, total);
    claim.settle_offset(&held, result.unwrap_or(0));
    Handled::of(result)
}

/// Reads by the list: `Err` is how the call ends; `Ok` leaves it to the fallback.
fn read_by_list<F: Fallback>(
    mut held: Held,
    target: Target<'_>,
    claim: &mut Claim,
    (at, total): (Option<u64>, usize),
    call: Call,
) -> Result<Held, Handled> {
    let left = held.list.size().saturating_sub(claim.offset);
    let wanted = total.min(usize::try_from(left).unwrap_or(usize::MAX));
    if !target.is_good(wanted) {
        return F::leave(held, Some(claim), at, call);
    }
    let Some(done) = copy::copy_out::<F>(&mut held, target, claim.offset, total) else {
        return F::list_lost(held, claim, at, call);
    };
    claim.settle_offset(&held, done);
    report::count_direct(call, done);
    Err(Handled::Done(done as isize))
}

/// Reads by the fallback; an errno where it gave nothing.
pub(crate) fn read_by_fallback<F: Fallback>(
    held: &mut Held,
    target: Target<'_>,
    offset: u64,
    total: usize,
) -> Result<usize, c_int> {
    let mut done = 0;
    for run in target.runs(0, total) {
        match F::read_at(held, run, offset.wrapping_add(done as u64)) {
            Ok(got) => {
                done += got;
                if got < run.len() {
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
pub(crate) fn seek_descriptor<F: Fallback>(mut held: Held, offset: i64, whence: c_int) -> Handled {
    if !F::has_offset(&held) {
        return Handled::Forward(Ticket::of(held.entry));
    }
    match seek_to::<F>(&mut held, offset, whence) {
        Ok(target) => Handled::Done(target as isize),
        Err(errno) => Handled::Done(-(errno as isize)),
    }
}

fn seek_to<F: Fallback>(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int> {
    report::count_direct(Call::Lseek, 0);
    let now = |held: &Held| current_offset(held) as i64;
    let target = match whence {
        libc::SEEK_SET => offset,
        libc::SEEK_CUR => now(held).checked_add(offset).ok_or(libc::EOVERFLOW)?,
        _ => {
            let target = F::seek_in_file(held, offset, whence)?;
            set_offset(held, target);
            return Ok(target);
        }
    };
    let target = u64::try_from(target).map_err(|_| libc::EINVAL)?;
    if whence == libc::SEEK_SET || offset != 0 {
        set_offset(held, target);
    }
    Ok(target)
}
