//! Descriptors of files of a mount. The kernel serves each call for which direct access is not possible.
//!
//! ```text
//!   candidate ── firnd grants a write, or lists the extents ──► direct access: the offset is private
//!       ▲                                                              │
//!       └── no room, lease revoked, list void, kernel's offset needed ◄┘
//! ```
//!
//! A call that direct access cannot serve gives the offset back to the kernel, which then serves the call. After
//! [`REFUSALS_MAX`] refusals, or once the descriptor is shared, it stays with the kernel for good.
//!
//! A program may close a descriptor by a raw system call, which the library does not see. Then firnd ends the leases of
//! the file, so the next write through that number finds its lease revoked. The write compares the tokens, finds that
//! the number is another file now, and leaves the number to the kernel.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use firn_direct::slab_writer::Appended;
use firn_format::data_socket::{Op, Reply, Status, Token};
use rustix::process::Resource;

use crate::ask_policy::{CALL_BYTES_MIN, RETRY_BYTES_MAX};
use crate::connect;
use crate::descriptor;
use crate::devices::{self, token_of};
use crate::fallback::{Fallback, WriteError, is_full, wait_after_lost_lease, wait_longer_after};
use crate::handled::{Handled, Ticket};
use crate::lease::{LeaseLost, fill};
use crate::list::fetch;
use crate::memory::{Readable, Run, Source, Target, Writable};
use crate::offset::{self, Claim};
use crate::probe;
use crate::report::{self, Call, Reason};
use crate::sys;
use crate::table::{self, Entered, Entry, LockedEntry, tag};

/// Refusals of firnd after which a descriptor stays with the kernel for good.
const REFUSALS_MAX: u32 = 16;
/// Bytes that go through the kernel after a refusal, before firnd is asked again.
const REFUSED_BYTES: u64 = RETRY_BYTES_MAX;
/// Bytes of the first lease of a file. A file that gets direct access is not small, so further writes are expected.
const FIRST_LEASE_BYTES: u64 = 128 << 10;
/// Minimum size of a file for which the first read asks for a list.
const LISTED_FILE_BYTES_MIN: u64 = 64 << 10;

/// The kernel as the fallback of a descriptor.
pub(crate) enum Kernel {}

impl Fallback for Kernel {
    fn may_lease(locked: &mut LockedEntry, total: usize) -> bool {
        locked.is_private() || request_grant(locked, total)
    }

    fn has_list(locked: &mut LockedEntry, explicit_offset: Option<u64>, total: usize) -> bool {
        locked.is_private() || request_list(locked, explicit_offset, total)
    }

    fn leave(
        mut locked: LockedEntry,
        claim: Option<&mut Claim>,
        explicit_offset: Option<u64>,
        call: Call,
    ) -> Result<LockedEntry, Handled> {
        if let Some(claim) = claim
            && !claim.cut_back(&locked, 0)
            && !claim.is_given_back()
        {
            // A signal handler has claimed a range behind this one. So the kernel cannot repeat the call at its own
            // offset, and the caller must serve the claimed range.
            give_back(&mut locked);
            claim.give_back(false, 0);
            return Ok(locked);
        }
        if explicit_offset.is_none()
            && locked.tag == tag::READER
            && !locked.list.extents().is_empty()
        {
            drop_list(&mut locked);
        }
        Err(leave_to_kernel(locked, explicit_offset, call))
    }

    /// Gives the offset back to the kernel after `done` bytes of a claim, and postpones the next question to firnd.
    ///
    /// `Ok` means that the caller continues with the rest. `Err` is the result for the program if the number is another
    /// file by now.
    fn lease_lost(
        mut locked: LockedEntry,
        claim: &mut Claim,
        lost: LeaseLost,
        done: usize,
        _call: Call,
    ) -> Result<LockedEntry, Handled> {
        let is_other_file = lost == LeaseLost::Revoked
            && token_of(locked.fd).is_none_or(|token| token.token != locked.token);
        if is_other_file {
            locked.set_private(false);
            locked.set_tag(tag::NONE);
            return Err(if done > 0 {
                Handled::Done(done as isize)
            } else {
                Handled::Forward(Ticket::NONE)
            });
        }
        let is_cut = claim.cut_back(&locked, done);
        give_back(&mut locked);
        claim.give_back(is_cut, done);
        wait_after_lost_lease(&mut locked, lost, REFUSED_BYTES);
        Ok(locked)
    }

    fn list_lost(
        mut locked: LockedEntry,
        claim: &mut Claim,
        explicit_offset: Option<u64>,
        call: Call,
    ) -> Result<LockedEntry, Handled> {
        let is_cut = claim.cut_back(&locked, 0);
        drop_list(&mut locked);
        claim.give_back(is_cut, 0);
        if is_cut {
            return Err(leave_to_kernel(locked, explicit_offset, call));
        }
        Ok(locked)
    }

    fn write_at(
        locked: &mut LockedEntry,
        run: Run<'_, Readable>,
        at: u64,
    ) -> Result<usize, WriteError> {
        count_or_errno(run.write_to(locked.fd, at)).map_err(WriteError::Failed)
    }

    fn read_at(locked: &mut LockedEntry, run: Run<'_, Writable>, at: u64) -> Result<usize, c_int> {
        count_or_errno(run.read_from(locked.fd, at))
    }

    fn seek_in_file(locked: &mut LockedEntry, offset: i64, whence: c_int) -> Result<u64, c_int> {
        // A seek from the end, to data or to a hole does not depend on the offset.
        let target = offset::seek_in_kernel(locked.fd, offset, whence);
        count_or_errno(target).map(|offset| offset as u64)
    }

    fn has_offset(locked: &LockedEntry) -> bool {
        locked.is_private()
    }
}

/// Turns the result of a system call into a count, or into an errno.
fn count_or_errno(result: isize) -> Result<usize, c_int> {
    usize::try_from(result).map_err(|_| result.wrapping_neg() as c_int)
}

// ---- calls -----------------------------------------------------------------------------------------

/// The fast path of a write, at the descriptor's offset or at `explicit_offset`: the write is short and fits into the
/// current lease. For any other write it does nothing and returns `None`.
#[inline(always)]
pub(crate) fn write_fast(
    fd: c_int,
    run: Run<'_, Readable>,
    explicit_offset: Option<u64>,
    call: Call,
) -> Option<Handled> {
    let Entered::Locked(mut locked) = table::lock_entry(fd) else {
        return None;
    };
    let len = run.len();
    if locked.tag != tag::WRITER || !locked.is_private() || len == 0 || !probe::is_short(len) {
        return None;
    }
    let has_asked = locked.lease.has_asked;
    let writer = locked.lease.writer()?;
    if len > writer.free_bytes() as usize || (!has_asked && writer.is_half_full()) {
        return None;
    }
    if !run.is_accessible() {
        return None;
    }
    let offset =
        explicit_offset.unwrap_or_else(|| sys::add_to_word(&locked.entry.offset, len as u64));
    let appended = run.append_to(locked.lease.writer()?, offset);
    if appended != Appended::Bytes(len) {
        return Some(write_rest(
            locked,
            run,
            (explicit_offset, offset),
            appended,
            call,
        ));
    }
    locked.ask_policy.count_direct_bytes(len);
    report::count_direct(call, len);
    Some(Handled::Done(len as isize))
}

/// Finishes a write of the fast path that did not store all bytes. `appended` is the result of its first step.
#[cold]
fn write_rest(
    mut locked: LockedEntry,
    run: Run<'_, Readable>,
    (explicit_offset, offset): (Option<u64>, u64),
    appended: Appended,
    call: Call,
) -> Handled {
    let len = run.len();
    let done = if let Appended::Bytes(done) = appended {
        done
    } else {
        0
    };
    locked.ask_policy.count_direct_bytes(done);
    let (more, lost) = match appended {
        Appended::Revoked => (0, Some(LeaseLost::Revoked)),
        _ => {
            let next = offset.wrapping_add(done as u64);
            fill::fill_run(&mut locked, run.rest(done), next, len - done)
        }
    };
    let claim = Claim::of_private(explicit_offset, offset, len);
    run.as_memory(|source| {
        let done = (done + more, lost);
        descriptor::finish_write::<Kernel>(
            locked,
            source,
            claim,
            (explicit_offset, len),
            done,
            call,
        )
    })
}

/// write(2) and its kin, at the descriptor's offset or at `explicit_offset`.
pub(crate) fn write_file(
    fd: c_int,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> Handled {
    let locked = match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag == tag::WRITER => locked,
        Entered::Interrupted(entry) => return write_in_handler(fd, entry, source, explicit_offset),
        _ => return Handled::Forward(Ticket::NONE),
    };
    match total_of(source.total(), explicit_offset) {
        Some(total) => {
            descriptor::write_descriptor::<Kernel>(locked, source, (explicit_offset, total), call)
        }
        None => leave_to_kernel(locked, explicit_offset, call),
    }
}

/// read(2) and its kin, at the descriptor's offset or at `explicit_offset`.
pub(crate) fn read_file(
    fd: c_int,
    target: Target<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> Handled {
    let locked = match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag == tag::READER => locked,
        _ if explicit_offset.is_some() => return Handled::Forward(Ticket::NONE),
        Entered::NotServed => return Handled::Forward(Ticket::NONE),
        entered => {
            drop(entered);
            return Handled::Forward(before_kernel(fd, call));
        }
    };
    match total_of(target.total(), explicit_offset) {
        Some(total) => {
            descriptor::read_descriptor::<Kernel>(locked, target, (explicit_offset, total), call)
        }
        None => Kernel::leave(locked, None, explicit_offset, call)
            .err()
            .unwrap_or(Handled::Forward(Ticket::NONE)),
    }
}

/// Returns the number of bytes of a call; `None` if it has none, or if the kernel would refuse the call.
fn total_of(total: Option<usize>, explicit_offset: Option<u64>) -> Option<usize> {
    total.filter(|total| *total > 0 && explicit_offset.unwrap_or(0) <= i64::MAX as u64)
}

/// lseek(2).
pub(crate) fn seek_file(fd: c_int, offset: i64, whence: c_int) -> Handled {
    match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag != tag::INTERNAL => {
            descriptor::seek_descriptor::<Kernel>(locked, offset, whence)
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            let in_file = || count_or_errno(offset::seek_in_kernel(fd, offset, whence));
            offset::seek_in_handler(entry, offset, whence, in_file)
        }
        _ => Handled::Forward(Ticket::NONE),
    }
}

/// write(2) in a signal handler that has interrupted a hook on the same descriptor. It writes through the kernel,
/// behind the range that the interrupted hook has claimed.
#[cold]
fn write_in_handler(
    fd: c_int,
    entry: &'static Entry,
    source: Source<'_>,
    explicit_offset: Option<u64>,
) -> Handled {
    if explicit_offset.is_some() || !entry.is_private() {
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
        let run_offset = claim.offset.wrapping_add(done as u64);
        match count_or_errno(run.write_to(fd, run_offset)) {
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

/// Gives the kernel its offset back before a call of the kernel that uses it. The returned ticket must be finished
/// after the call.
pub(crate) fn before_kernel(fd: c_int, call: Call) -> Ticket {
    match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag != tag::INTERNAL => {
            match leave_to_kernel(locked, None, call) {
                Handled::Forward(ticket) => ticket,
                Handled::Done(_) => Ticket::NONE,
            }
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            entry.copy_offset_to_kernel(fd);
            Ticket::NONE
        }
        _ => Ticket::NONE,
    }
}

/// Leaves a descriptor to the kernel for good, and ends its grant.
pub(crate) fn leave_for_good(mut locked: LockedEntry, reason: Reason) {
    let was_granted = locked.is_private();
    let link = locked.link;
    let token = locked.token;
    let end_op = if locked.tag == tag::WRITER {
        Op::EndWrite
    } else {
        Op::EndRead
    };
    give_back(&mut locked);
    locked.list.unmap_extents();
    locked.set_tag(tag::NONE);
    drop(locked);
    if was_granted {
        connect::ask_firnd(link, end_op, token, 0);
    }
    report::count_left(reason);
}

/// Leaves a call to the kernel. If the call uses the kernel's offset (`explicit_offset` is `None`), the kernel first
/// gets the right offset.
fn leave_to_kernel(mut locked: LockedEntry, explicit_offset: Option<u64>, call: Call) -> Handled {
    report::count_kernel(call);
    if explicit_offset.is_some() {
        return Handled::Forward(Ticket::NONE);
    }
    if locked.is_private() {
        give_back(&mut locked);
        if locked.tag == tag::WRITER {
            wait_longer_after(&mut locked, Reason::Read);
        }
    }
    Handled::Forward(Ticket::of(locked.entry))
}

/// Ends direct access for now: gives the offset back to the kernel, and drops the lease.
fn give_back(locked: &mut LockedEntry) {
    if !locked.is_private() {
        return;
    }
    offset::return_offset(locked, is_same);
    if locked.ask_policy.direct_bytes() > 0 {
        sys::refresh_size(locked.fd);
    }
    locked.lease.clear_lease();
}

/// Whether the number still is the file that was opened, and not another one after a raw close(2).
fn is_same(locked: &LockedEntry) -> bool {
    sys::identity(locked.fd).is_some_and(|(identity, _)| identity == locked.identity)
}

// ---- the grant to write ----------------------------------------------------------------------------

/// Asks firnd for a grant to write `total` bytes, unless it is too early. Returns whether the descriptor has direct
/// access.
#[cold]
fn request_grant(locked: &mut LockedEntry, total: usize) -> bool {
    if locked.ask_policy.is_small(total as u64) || !locked.ask_policy.may_ask(total) {
        return false;
    }
    if locked.entry.in_kernel.load(Ordering::Acquire) != 0 || !sys::is_unlimited(Resource::Fsize) {
        return false;
    }
    let unsupported = libc::O_APPEND | libc::O_DIRECT | libc::O_SYNC | libc::O_DSYNC | libc::O_PATH;
    let flags = sys::fcntl(locked.fd, libc::F_GETFL, 0);
    let is_supported = flags >= 0 && flags as c_int & unsupported == 0;
    if !is_supported || !is_same(locked) || locked.ask_policy.refusals() >= REFUSALS_MAX {
        locked.set_tag(tag::NONE);
        return false;
    }
    match open_write(locked, (total as u64).max(FIRST_LEASE_BYTES)) {
        Some(reply) if connect::is_ok(&reply) => {
            locked.file_id = reply.file_id;
            locked.lease.clear_lease();
            // The first lease came with the grant.
            locked.lease.has_asked = true;
            locked.ask_policy.note_grant();
            offset::make_private(locked)
        }
        Some(reply) if is_full(&reply) => {
            wait_after_lost_lease(locked, LeaseLost::Full, REFUSED_BYTES);
            false
        }
        Some(_) => {
            report::count_left(Reason::Refused);
            locked.ask_policy.wait_for(REFUSED_BYTES);
            locked.ask_policy.count_refusal();
            false
        }
        None => {
            locked.set_tag(tag::NONE);
            report::count_left(Reason::NoConnection);
            false
        }
    }
}

/// Requests a grant and a first lease: over the known connection, or over a new one with a token of the open file.
fn open_write(locked: &mut LockedEntry, lease_bytes: u64) -> Option<Reply> {
    let reply = if locked.link != 0 {
        connect::ask_open(locked.link, locked.token, lease_bytes)
    } else {
        devices::first_token(locked.token).and_then(|token| open_with(locked, &token, lease_bytes))
    };
    if reply.is_some_and(|reply| Status::from_word(reply.status) != Status::BadToken) {
        return reply;
    }
    // The token is void, because firnd was started again, or the connection has ended.
    open_with(locked, &token_of(locked.fd)?, lease_bytes)
}

/// Connects with a token and requests a grant and a first lease.
#[inline(never)]
fn open_with(locked: &mut LockedEntry, token: &Token, lease_bytes: u64) -> Option<Reply> {
    let (link, first) = connect::connect_to_write(token, lease_bytes)?;
    (locked.link, locked.token) = (link, token.token);
    first.or_else(|| connect::ask_open(link, token.token, lease_bytes))
}

// ---- the list to read by ---------------------------------------------------------------------------

/// Asks firnd where the bytes of a file are, for a read at `explicit_offset` or at the descriptor's offset, unless it
/// is too early. Returns whether the descriptor has a list now.
#[cold]
fn request_list(locked: &mut LockedEntry, explicit_offset: Option<u64>, total: usize) -> bool {
    if is_small_read(locked, total) || !locked.ask_policy.may_ask(total) {
        return false;
    }
    if locked.entry.in_kernel.load(Ordering::Acquire) != 0 {
        return false;
    }
    let is_same = is_same(locked);
    let offset = || sys::lseek(locked.fd, 0, libc::SEEK_CUR);
    let start = explicit_offset.unwrap_or_else(|| u64::try_from(offset()).unwrap_or(0));
    match fetch::fetch_list(locked, start).filter(|_| is_same) {
        Some(Status::Ok) if !locked.list.extents().is_empty() => offset::make_private(locked),
        Some(Status::Busy) if locked.ask_policy.refusals() < REFUSALS_MAX => {
            locked.list.unmap_extents();
            locked.ask_policy.count_refusal();
            locked.ask_policy.wait_for(REFUSED_BYTES);
            report::count_left(Reason::Refused);
            false
        }
        answer => {
            locked.list.unmap_extents();
            locked.set_tag(tag::NONE);
            report::count_left(if answer == Some(Status::Ok) {
                Reason::Nothing
            } else {
                Reason::NoConnection
            });
            false
        }
    }
}

/// Whether a read goes through the kernel because the program has read little so far, and the file as a whole is small.
fn is_small_read(locked: &mut LockedEntry, total: usize) -> bool {
    if !locked.ask_policy.may_be_small() {
        return false;
    }
    if total as u64 <= CALL_BYTES_MIN {
        return locked.ask_policy.is_small(total as u64);
    }
    let size = sys::file_size(locked.fd).unwrap_or(0);
    size < LISTED_FILE_BYTES_MIN && locked.ask_policy.is_small(size.min(total as u64))
}

/// Drops a void list, and asks for a new one at the next read. A list that has served few bytes counts as a refusal.
fn drop_list(locked: &mut LockedEntry) {
    let link = locked.link;
    let token = locked.token;
    let has_paid_off = locked.list.read_bytes() >= RETRY_BYTES_MAX;
    give_back(locked);
    locked.list.unmap_extents();
    if has_paid_off {
        locked.ask_policy.forget_refusals();
    } else {
        locked.ask_policy.count_refusal();
    }
    let is_too_often = locked.ask_policy.refusals() >= REFUSALS_MAX;
    locked
        .ask_policy
        .wait_for(if is_too_often { u64::MAX } else { 0 });
    connect::ask_firnd(link, Op::EndRead, token, 0);
    report::count_left(Reason::Changed);
}
