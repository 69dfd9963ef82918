//! Descriptors of files of a mount: what goes neither into a lease nor by a list goes to the kernel.
//!
//! A descriptor is a candidate at first. At a write, or a read, firnd is asked; while it agrees, the offset is private
//! and bytes go by direct access. A call that does not fit there (no room, a lease revoked, a list that does not hold,
//! a descriptor that others got) gives the offset back, and goes to the kernel as it came.
//!
//! A number that was closed by a raw call: firnd ended its leases at the close, so the first write finds them revoked.
//! The write sees by its token that the descriptor is another one, and leaves it alone.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use firn_direct::slab_writer::Appended;
use firn_format::data_socket::{Op, Reply, Status, Token};
use rustix::process::Resource;

use crate::connect;
use crate::descriptor;
use crate::devices::{self, token_of};
use crate::fallback::{Fallback, WriteError, is_full, wait_after_lost_lease, wait_longer_after};
use crate::handled::{Handled, Ticket};
use crate::lease::{LeaseLost, fill};
use crate::list::fetch;
use crate::memory::{Readable, Run, Source, Target, Writable};
use crate::offset::{self, Claim};
use crate::patience::{CALL_BYTES_MIN, HESITATE_BYTES_MAX};
use crate::probe;
use crate::report::{self, Call, Reason};
use crate::sys;
use crate::table::{self, Entered, Entry, Held, tag};

/// Refusals after which a descriptor is left to the kernel for good.
const REFUSALS_MAX: u32 = 16;
/// Bytes through the kernel after firnd refused.
const REFUSED_BYTES: u64 = HESITATE_BYTES_MAX;
/// The first lease of a file that gets direct access: as it is no small one, not a slab that this call would fill.
const FIRST_LEASE_BYTES: u64 = 128 << 10;
/// The first read of a file of at least this size is worth the question.
const LISTED_FILE_BYTES_MIN: u64 = 64 << 10;

/// The kernel, as a descriptor's fallback.
pub(crate) enum Kernel {}

impl Fallback for Kernel {
    fn may_lease(held: &mut Held, total: usize) -> bool {
        held.is_private() || request_grant(held, total)
    }

    fn has_list(held: &mut Held, at: Option<u64>, total: usize) -> bool {
        held.is_private() || request_list(held, at, total)
    }

    fn leave(
        mut held: Held,
        claim: Option<&mut Claim>,
        at: Option<u64>,
        call: Call,
    ) -> Result<Held, Handled> {
        if let Some(claim) = claim
            && !claim.cut_back(&held, 0)
            && !claim.is_given_back()
        {
            // A signal handler claimed more behind it: what was claimed is done here.
            give_back(&mut held);
            claim.give_back(false, 0);
            return Ok(held);
        }
        if at.is_none() && held.tag == tag::READER && !held.list.extents().is_empty() {
            drop_list(&mut held);
        }
        Err(leave_to_kernel(held, at, call))
    }

    /// Gives back what is not written after a lease was lost, and waits. `Ok`: the caller tries again. `Err`: the result for the
    /// program, if the descriptor is of another file by now.
    fn lease_lost(
        mut held: Held,
        claim: &mut Claim,
        lost: LeaseLost,
        done: usize,
        _call: Call,
    ) -> Result<Held, Handled> {
        let is_other_file = lost == LeaseLost::Revoked
            && token_of(held.fd).is_none_or(|token| token.token != held.token);
        if is_other_file {
            held.set_private(false);
            held.set_tag(tag::NONE);
            return Err(if done > 0 {
                Handled::Done(done as isize)
            } else {
                Handled::Forward(Ticket::NONE)
            });
        }
        let is_cut = claim.cut_back(&held, done);
        give_back(&mut held);
        claim.give_back(is_cut, done);
        wait_after_lost_lease(&mut held, lost, REFUSED_BYTES);
        Ok(held)
    }

    fn list_lost(
        mut held: Held,
        claim: &mut Claim,
        at: Option<u64>,
        call: Call,
    ) -> Result<Held, Handled> {
        let is_cut = claim.cut_back(&held, 0);
        drop_list(&mut held);
        claim.give_back(is_cut, 0);
        if is_cut {
            return Err(leave_to_kernel(held, at, call));
        }
        Ok(held)
    }

    fn write_at(held: &mut Held, run: Run<'_, Readable>, at: u64) -> Result<usize, WriteError> {
        count_or_errno(run.write_to(held.fd, at)).map_err(WriteError::Failed)
    }

    fn read_at(held: &mut Held, run: Run<'_, Writable>, at: u64) -> Result<usize, c_int> {
        count_or_errno(run.read_from(held.fd, at))
    }

    fn seek_in_file(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int> {
        // From the end, or to data: that does not depend on the offset.
        let target = offset::seek_in_kernel(held.fd, offset, whence);
        count_or_errno(target).map(|offset| offset as u64)
    }

    fn has_offset(held: &Held) -> bool {
        held.is_private()
    }
}

fn count_or_errno(result: isize) -> Result<usize, c_int> {
    usize::try_from(result).map_err(|_| result.wrapping_neg() as c_int)
}

// ---- calls -----------------------------------------------------------------------------------------

/// The usual write, at the descriptor's offset or at `at`: short, and into the lease that is there. `None`: it is
/// another one, and nothing was done.
#[inline(always)]
pub(crate) fn write_usual(
    fd: c_int,
    run: Run<'_, Readable>,
    at: Option<u64>,
    call: Call,
) -> Option<Handled> {
    let Entered::Held(mut held) = table::lock_entry(fd) else {
        return None;
    };
    let len = run.len();
    if held.tag != tag::WRITER || !held.is_private() || len == 0 || !probe::is_short(len) {
        return None;
    }
    let has_asked = held.lease.has_asked;
    let writer = held.lease.writer()?;
    if len > writer.free_bytes() as usize || (!has_asked && writer.is_half_full()) {
        return None;
    }
    if !run.is_good() {
        return None;
    }
    let offset = at.unwrap_or_else(|| sys::add_to_word(&held.entry.offset, len as u64));
    let appended = run.append_to(held.lease.writer()?, offset);
    if appended != Appended::Bytes(len) {
        return Some(write_rest(held, run, (at, offset), appended, call));
    }
    held.patience.count_fast(len);
    report::count_direct(call, len);
    Some(Handled::Done(len as isize))
}

/// The rest of a write whose first try came to `appended`.
#[cold]
fn write_rest(
    mut held: Held,
    run: Run<'_, Readable>,
    (at, offset): (Option<u64>, u64),
    appended: Appended,
    call: Call,
) -> Handled {
    let len = run.len();
    let done = if let Appended::Bytes(done) = appended {
        done
    } else {
        0
    };
    held.patience.count_fast(done);
    let (more, lost) = match appended {
        Appended::Revoked => (0, Some(LeaseLost::Revoked)),
        _ => {
            let next = offset.wrapping_add(done as u64);
            fill::fill_run(&mut held, run.rest(done), next, len - done)
        }
    };
    let claim = Claim::of_private(at, offset, len);
    run.as_memory(|source| {
        let done = (done + more, lost);
        descriptor::go_on::<Kernel>(held, source, claim, (at, len), done, call)
    })
}

/// Writes at the descriptor's offset, or at `at`.
pub(crate) fn write_file(fd: c_int, source: Source<'_>, at: Option<u64>, call: Call) -> Handled {
    let held = match table::lock_entry(fd) {
        Entered::Held(held) if held.tag == tag::WRITER => held,
        Entered::Again(entry) => return write_again(fd, entry, source, at),
        _ => return Handled::Forward(Ticket::NONE),
    };
    match total_of(source.total(), at) {
        Some(total) => descriptor::write_descriptor::<Kernel>(held, source, (at, total), call),
        None => leave_to_kernel(held, at, call),
    }
}

/// Reads at the descriptor's offset, or at `at`.
pub(crate) fn read_file(fd: c_int, target: Target<'_>, at: Option<u64>, call: Call) -> Handled {
    let held = match table::lock_entry(fd) {
        Entered::Held(held) if held.tag == tag::READER => held,
        _ if at.is_some() => return Handled::Forward(Ticket::NONE),
        Entered::Not => return Handled::Forward(Ticket::NONE),
        entered => {
            drop(entered);
            return Handled::Forward(before_kernel(fd, call));
        }
    };
    match total_of(target.total(), at) {
        Some(total) => descriptor::read_descriptor::<Kernel>(held, target, (at, total), call),
        None => Kernel::leave(held, None, at, call)
            .err()
            .unwrap_or(Handled::Forward(Ticket::NONE)),
    }
}

/// Bytes of a call, where there is something to do that the kernel would not refuse.
fn total_of(total: Option<usize>, at: Option<u64>) -> Option<usize> {
    total.filter(|total| *total > 0 && at.unwrap_or(0) <= i64::MAX as u64)
}

/// lseek(2).
pub(crate) fn seek_file(fd: c_int, offset: i64, whence: c_int) -> Handled {
    match table::lock_entry(fd) {
        Entered::Held(held) if held.tag != tag::INTERNAL => {
            descriptor::seek_descriptor::<Kernel>(held, offset, whence)
        }
        Entered::Again(entry) if entry.is_private() => {
            let in_file = || count_or_errno(offset::seek_in_kernel(fd, offset, whence));
            offset::seek_again(entry, offset, whence, in_file)
        }
        _ => Handled::Forward(Ticket::NONE),
    }
}

/// A signal handler writes to the descriptor that the interrupted code is busy with: through the kernel,
/// behind what that code claimed.
#[cold]
fn write_again(fd: c_int, entry: &'static Entry, source: Source<'_>, at: Option<u64>) -> Handled {
    if at.is_some() || !entry.is_private() {
        return Handled::Forward(Ticket::of(entry));
    }
    let Some(total) = source.total() else {
        return Handled::Forward(Ticket::NONE);
    };
    let claim = Claim::of_entry(entry, fd, None, total);
    report::count_kernel(Call::Write);
    let mut done = 0;
    let mut failed = None;
    for run in source.runs(0, total) {
        let at = claim.offset.wrapping_add(done as u64);
        match count_or_errno(run.write_to(fd, at)) {
            Ok(more) => {
                done += more;
                if more < run.len() {
                    break;
                }
            }
            Err(errno) => {
                failed = Some(WriteError::Failed(errno));
                break;
            }
        }
    }
    if done < total {
        claim.cut_back_entry(entry, fd, done);
    }
    Handled::of(failed.map_or(Ok(done), |error| error.after(done)))
}

/// What to do before a call that uses the kernel's offset of `fd`.
pub(crate) fn before_kernel(fd: c_int, call: Call) -> Ticket {
    match table::lock_entry(fd) {
        Entered::Held(held) if held.tag != tag::INTERNAL => {
            match leave_to_kernel(held, None, call) {
                Handled::Forward(ticket) => ticket,
                Handled::Done(_) => Ticket::NONE,
            }
        }
        Entered::Again(entry) if entry.is_private() => {
            entry.copy_offset_to_kernel(fd);
            Ticket::NONE
        }
        _ => Ticket::NONE,
    }
}

/// The descriptor is the kernel's for good.
pub(crate) fn leave_for_good(mut held: Held, reason: Reason) {
    let granted = held.is_private();
    let link = held.link;
    let token = held.token;
    let end = if held.tag == tag::WRITER {
        Op::EndWrite
    } else {
        Op::EndRead
    };
    give_back(&mut held);
    held.list.unmap_extents();
    held.set_tag(tag::NONE);
    drop(held);
    if granted {
        connect::ask_firnd(link, end, token, 0);
    }
    report::count_left(reason);
}

/// Leaves this call to the kernel, with the kernel's offset right.
fn leave_to_kernel(mut held: Held, at: Option<u64>, call: Call) -> Handled {
    report::count_kernel(call);
    if at.is_some() {
        return Handled::Forward(Ticket::NONE);
    }
    if held.is_private() {
        give_back(&mut held);
        if held.tag == tag::WRITER {
            wait_longer_after(&mut held, Reason::Read);
        }
    }
    Handled::Forward(Ticket::of(held.entry))
}

/// The offset is the kernel's again, and the descriptor a candidate.
fn give_back(held: &mut Held) {
    if !held.is_private() {
        return;
    }
    offset::return_offset(held, is_same);
    if held.patience.fast_bytes() > 0 {
        sys::refresh_size(held.fd);
    }
    held.lease.clear_lease();
}

/// Whether the number still is the file that was opened.
fn is_same(held: &Held) -> bool {
    sys::identity(held.fd).is_some_and(|(identity, _)| identity == held.identity)
}

// ---- the grant to write ----------------------------------------------------------------------------

/// Whether firnd grants direct access; asked unless it refused a short while ago.
#[cold]
fn request_grant(held: &mut Held, total: usize) -> bool {
    if held.patience.is_small(total as u64) || !held.patience.may_ask(total) {
        return false;
    }
    if held.entry.in_kernel.load(Ordering::Acquire) != 0 || !sys::is_unlimited(Resource::Fsize) {
        return false;
    }
    let unusual = libc::O_APPEND | libc::O_DIRECT | libc::O_SYNC | libc::O_DSYNC | libc::O_PATH;
    let flags = sys::fcntl(held.fd, libc::F_GETFL, 0);
    let is_usual = flags >= 0 && flags as c_int & unusual == 0;
    if !is_usual || !is_same(held) || held.patience.refusals() >= REFUSALS_MAX {
        held.set_tag(tag::NONE);
        return false;
    }
    match open_write(held, (total as u64).max(FIRST_LEASE_BYTES)) {
        Some(reply) if connect::is_ok(&reply) => {
            held.file_id = reply.file_id;
            held.lease.clear_lease();
            // With the grant.
            held.lease.has_asked = true;
            held.patience.note_grant();
            offset::make_private(held)
        }
        Some(reply) if is_full(&reply) => {
            wait_after_lost_lease(held, LeaseLost::Full, REFUSED_BYTES);
            false
        }
        Some(_) => {
            report::count_left(Reason::Refused);
            held.patience.wait_for(REFUSED_BYTES);
            held.patience.count_refusal();
            false
        }
        None => {
            held.set_tag(tag::NONE);
            report::count_left(Reason::NoConnection);
            false
        }
    }
}

fn open_write(held: &mut Held, lease_bytes: u64) -> Option<Reply> {
    let known = if held.link != 0 {
        connect::ask_open(held.link, held.token, lease_bytes)
    } else {
        devices::first_token(held.token).and_then(|token| open_with(held, &token, lease_bytes))
    };
    if known.is_some_and(|reply| Status::from_word(reply.status) != Status::BadToken) {
        return known;
    }
    open_with(held, &token_of(held.fd)?, lease_bytes)
}

#[inline(never)]
fn open_with(held: &mut Held, token: &Token, lease_bytes: u64) -> Option<Reply> {
    let (link, first) = connect::connect_to_write(token, lease_bytes)?;
    (held.link, held.token) = (link, token.token);
    first.or_else(|| connect::ask_open(link, token.token, lease_bytes))
}

// ---- the list to read by ---------------------------------------------------------------------------

/// Asks firnd where the bytes are, for a read at `at` or the descriptor's offset. Whether it said so.
#[cold]
fn request_list(held: &mut Held, at: Option<u64>, total: usize) -> bool {
    if stays_small(held, total) || !held.patience.may_ask(total) {
        return false;
    }
    if held.entry.in_kernel.load(Ordering::Acquire) != 0 {
        return false;
    }
    let same = is_same(held);
    let offset = || sys::lseek(held.fd, 0, libc::SEEK_CUR);
    let at = at.unwrap_or_else(|| u64::try_from(offset()).unwrap_or(0));
    match fetch::fetch_list(held, at).filter(|_| same) {
        Some(Status::Ok) if !held.list.extents().is_empty() => offset::make_private(held),
        Some(Status::Busy) if held.patience.refusals() < REFUSALS_MAX => {
            held.list.unmap_extents();
            held.patience.count_refusal();
            held.patience.wait_for(REFUSED_BYTES);
            report::count_left(Reason::Refused);
            false
        }
        answer => {
            held.list.unmap_extents();
            held.set_tag(tag::NONE);
            report::count_left(if answer == Some(Status::Ok) {
                Reason::Nothing
            } else {
                Reason::NoConnection
            });
            false
        }
    }
}

/// Whether a read of up to `total` bytes goes through the kernel because so little was read yet, of a file that is
/// small as a whole.
fn stays_small(held: &mut Held, total: usize) -> bool {
    if !held.patience.may_be_small() {
        return false;
    }
    if total as u64 <= CALL_BYTES_MIN {
        return held.patience.is_small(total as u64);
    }
    let size = sys::file_size(held.fd).unwrap_or(0);
    size < LISTED_FILE_BYTES_MIN && held.patience.is_small(size.min(total as u64))
}

/// The list does not hold any more.
fn drop_list(held: &mut Held) {
    let link = held.link;
    let token = held.token;
    let was_worth_it = held.list.read_bytes() >= HESITATE_BYTES_MAX;
    give_back(held);
    held.list.unmap_extents();
    if was_worth_it {
        held.patience.forget_refusals();
    } else {
        held.patience.count_refusal();
    }
    let is_last = held.patience.refusals() >= REFUSALS_MAX;
    held.patience.wait_for(if is_last { u64::MAX } else { 0 });
    connect::ask_firnd(link, Op::EndRead, token, 0);
    report::count_left(Reason::Changed);
}
