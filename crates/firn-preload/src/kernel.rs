//! Reads and writes files of a Firn mount: by direct access to the shared memory where possible, else by the kernel.
//!
//! ```text
//!   candidate ── firnd grants a write, or lists the extents ──► direct access: the offset is private
//!       ▲                                                              │
//!       └── no room, lease revoked, list void, kernel's offset needed ◄┘
//! ```
//!
//! * A *candidate* is a descriptor of a mount without direct access, for which firnd may be asked.
//! * *Direct access* of a write goes by a *lease*: the right to write into a range of the shared memory, which firnd
//!   grants and may revoke.
//! * Direct access of a read goes by a *list*, which says where the bytes of the file (its *extents*) are.
//! * A *private* offset is kept by this process, and the kernel's offset is not used.
//! * firnd is the process that serves the mount.
//!
//! A call that direct access cannot serve gives the offset back to the kernel, which then serves the call. After
//! [`REFUSALS_MAX`] refusals, or once the descriptor is shared, it stays with the kernel for good.
//!
//! A program may close a descriptor by a raw system call, which the library does not see. Then firnd ends the leases of
//! the file, so the next write through that number finds its lease revoked. The write compares the tokens (firnd's
//! numbers of open files), finds that the number is another file now, and leaves the number to the kernel.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use firn_direct::slab_writer::Appended;
use firn_format::data_socket::{Op, Reply, Status, Token};
use rustix::process::Resource;

use crate::connect;
use crate::descriptor;
use crate::devices::{self, fetch_token};
use crate::fallback::{
    Fallback, WriteError, is_full, postpone_after_end, postpone_after_lost_lease, write_runs,
};
use crate::lease::LeaseLost;
use crate::lease::fill::{self, LeaseWrite};
use crate::list::fetch;
use crate::memory::{Readable, Run, Source, Target, Writable};
use crate::offset::{self, CallRange, Claim};
use crate::outcome::{CallOutcome, KernelCall, Step};
use crate::probe;
use crate::report::{self, Call, Reason};
use crate::request_policy::{CALL_BYTES_MIN, RETRY_BYTES_MAX};
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
    fn obtain_grant(locked: &mut LockedEntry, total: usize) -> bool {
        locked.is_private() || request_grant(locked, total)
    }

    fn ensure_list(locked: &mut LockedEntry, explicit_offset: Option<u64>, total: usize) -> bool {
        locked.is_private() || request_list(locked, explicit_offset, total)
    }

    /// Lets the kernel serve a call that direct access cannot serve. For that it gives the descriptor's offset, which
    /// this process has kept, back to the kernel.
    ///
    /// `Err` is the usual result: the kernel serves the call. `Ok` means that it cannot, because a signal handler has
    /// claimed the range behind this one. The caller then moves the bytes of the claimed range itself.
    fn hand_over(
        mut locked: LockedEntry,
        claim: Option<&mut Claim>,
        explicit_offset: Option<u64>,
        call: Call,
    ) -> Step<LockedEntry> {
        if let Some(claim) = claim
            && !claim.release_unused(&locked, 0)
            && !claim.is_returned_unused()
        {
            // A signal handler has claimed a range behind this one. So the kernel cannot repeat the call at its own
            // offset, and the caller must serve the claimed range.
            pause_direct_access(&mut locked);
            let is_released = false;
            claim.record_return(is_released, 0);
            return Ok(locked);
        }
        // Without an offset of its own the call uses the kernel's, so direct access ends, and with it the list.
        let has_list = locked.tag == tag::READER && !locked.list.extents().is_empty();
        if explicit_offset.is_none() && has_list {
            drop_list(&mut locked);
        }
        Err(forward_to_kernel(locked, explicit_offset, call))
    }

    /// Handles the loss of a lease, the right to write into shared memory, after `done` bytes: gives the offset back to
    /// the kernel, and postpones the next request to firnd.
    ///
    /// `Ok` means that the kernel serves the remaining bytes. `Err` is the result of the call if the number refers to
    /// another file by now.
    fn handle_lost_lease(
        mut locked: LockedEntry,
        claim: &mut Claim,
        reason: LeaseLost,
        done: usize,
        _call: Call,
    ) -> Step<LockedEntry> {
        // The program may have closed the number by a raw system call, and opened another file under it.
        if reason == LeaseLost::Revoked && !has_same_token(&locked) {
            locked.set_private(false);
            locked.set_tag(tag::ORDINARY);
            return Err(if done > 0 {
                CallOutcome::Done(done as isize)
            } else {
                CallOutcome::Forward(KernelCall::WITHOUT_OFFSET)
            });
        }
        let is_released = claim.release_unused(&locked, done);
        pause_direct_access(&mut locked);
        claim.record_return(is_released, done);
        postpone_after_lost_lease(&mut locked, reason, REFUSED_BYTES);
        Ok(locked)
    }

    fn handle_lost_list(
        mut locked: LockedEntry,
        claim: &mut Claim,
        explicit_offset: Option<u64>,
        call: Call,
    ) -> Step<LockedEntry> {
        let is_released = claim.release_unused(&locked, 0);
        drop_list(&mut locked);
        claim.record_return(is_released, 0);
        if is_released {
            return Err(forward_to_kernel(locked, explicit_offset, call));
        }
        Ok(locked)
    }

    fn write_at(
        locked: &mut LockedEntry,
        run: Run<'_, Readable>,
        offset: u64,
    ) -> Result<usize, WriteError> {
        count_or_errno(run.write_to(locked.fd, offset)).map_err(WriteError::Failed)
    }

    fn read_at(
        locked: &mut LockedEntry,
        run: Run<'_, Writable>,
        offset: u64,
    ) -> Result<usize, c_int> {
        count_or_errno(run.read_from(locked.fd, offset))
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
/// current lease, a slab of shared memory that this process may fill. For any other write it does nothing and returns
/// `None`, and the caller takes the usual path.
#[inline(always)]
pub(crate) fn write_fast(
    fd: c_int,
    run: Run<'_, Readable>,
    explicit_offset: Option<u64>,
    call: Call,
) -> Option<CallOutcome> {
    let Entered::Locked(mut locked) = table::lock_entry(fd) else {
        return None;
    };
    let len = run.len();
    let has_direct_access = locked.tag == tag::WRITER && locked.is_private();
    if !has_direct_access || len == 0 || !probe::is_short(len) {
        return None;
    }
    let is_next_requested = locked.lease.is_next_requested;
    let writer = locked.lease.writer()?;
    // At half of the slab, the usual path requests the next lease.
    let has_room = len <= writer.free_bytes() as usize;
    if !has_room || (!is_next_requested && writer.is_half_full()) {
        return None;
    }
    if !run.is_accessible() {
        return None;
    }
    let offset =
        explicit_offset.unwrap_or_else(|| sys::add_to_word(&locked.entry.offset, len as u64));
    let appended = run.append_to(locked.lease.writer()?, offset);
    if appended != Appended::Bytes(len) {
        let range = CallRange {
            explicit_offset,
            total: len,
        };
        return Some(finish_fast_write(
            locked, run, offset, range, appended, call,
        ));
    }
    locked.request_policy.count_direct_bytes(len);
    report::count_direct(call, len);
    Some(CallOutcome::Done(len as isize))
}

/// Finishes a write of the fast path, which has not stored all bytes in its lease, a slab of shared memory. Further
/// leases or the kernel get the other bytes. The write began at `offset`, and `appended` is the result of its only
/// append.
#[cold]
fn finish_fast_write(
    mut locked: LockedEntry,
    run: Run<'_, Readable>,
    offset: u64,
    range: CallRange,
    appended: Appended,
    call: Call,
) -> CallOutcome {
    let appended_bytes = match appended {
        Appended::Bytes(count) => count,
        _ => 0,
    };
    locked.request_policy.count_direct_bytes(appended_bytes);
    let lease_write = if appended == Appended::Revoked {
        LeaseWrite {
            done: 0,
            lost: Some(LeaseLost::Revoked),
        }
    } else {
        let unwritten = run.without_first(appended_bytes);
        let file_offset = offset.wrapping_add(appended_bytes as u64);
        let call_bytes = range.total - appended_bytes;
        let more = fill::write_run_to_leases(&mut locked, unwritten, file_offset, call_bytes);
        LeaseWrite {
            done: appended_bytes + more.done,
            lost: more.lost,
        }
    };
    let claim = Claim::from_moved_offset(offset, range);
    run.as_memory(|source| {
        let written =
            descriptor::finish_write::<Kernel>(locked, source, claim, range, lease_write, call);
        CallOutcome::from_step(written)
    })
}

/// write(2) and its kin of a file on a mount, at the descriptor's offset or at `explicit_offset`: by direct access to
/// shared memory if possible, else by the kernel. [`CallOutcome::Forward`] means that the caller makes the kernel's
/// call.
pub(crate) fn write_file(
    fd: c_int,
    source: Source<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> CallOutcome {
    let locked = match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag == tag::WRITER => locked,
        Entered::Interrupted(entry) => return write_in_handler(fd, entry, source, explicit_offset),
        _ => return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
    };
    match valid_range(explicit_offset, source.total()) {
        Some(range) => descriptor::write_descriptor::<Kernel>(locked, source, range, call),
        None => forward_to_kernel(locked, explicit_offset, call),
    }
}

/// read(2) and its kin of a file on a mount, at the descriptor's offset or at `explicit_offset`: by direct access to
/// shared memory if possible, else by the kernel. [`CallOutcome::Forward`] means that the caller makes the kernel's
/// call.
pub(crate) fn read_file(
    fd: c_int,
    target: Target<'_>,
    explicit_offset: Option<u64>,
    call: Call,
) -> CallOutcome {
    let locked = match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag == tag::READER => locked,
        _ if explicit_offset.is_some() => return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
        Entered::NotServed => return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
        // `Locked` with another tag: the descriptor may write. `Interrupted`: this is a signal handler. In both cases
        // the kernel gets the offset back before it reads.
        entered => {
            // Unlocks the entry, which `prepare_kernel_call` locks again.
            drop(entered);
            return CallOutcome::Forward(prepare_kernel_call(fd, call));
        }
    };
    if let Some(range) = valid_range(explicit_offset, target.total()) {
        return descriptor::read_descriptor::<Kernel>(locked, target, range, call);
    }
    match Kernel::hand_over(locked, None, explicit_offset, call) {
        Ok(_) => CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
        Err(outcome) => outcome,
    }
}

/// Returns the range of a call; `None` if it has no bytes, or if the kernel would refuse the call.
fn valid_range(explicit_offset: Option<u64>, total: Option<usize>) -> Option<CallRange> {
    let is_valid_offset = explicit_offset.unwrap_or(0) <= i64::MAX as u64;
    match total {
        Some(total) if total > 0 && is_valid_offset => Some(CallRange {
            explicit_offset,
            total,
        }),
        _ => None,
    }
}

/// lseek(2).
pub(crate) fn seek_file(fd: c_int, offset: i64, whence: c_int) -> CallOutcome {
    match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag != tag::INTERNAL => {
            descriptor::seek_descriptor::<Kernel>(locked, offset, whence)
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            let seek_in_file = || count_or_errno(offset::seek_in_kernel(fd, offset, whence));
            offset::seek_in_handler(entry, offset, whence, seek_in_file)
        }
        _ => CallOutcome::Forward(KernelCall::WITHOUT_OFFSET),
    }
}

/// write(2) in a signal handler that has interrupted a hook on the same descriptor, so this thread holds the lock of
/// the descriptor. It writes through the kernel, behind the range that the interrupted hook has claimed (by a move of
/// the offset).
#[cold]
fn write_in_handler(
    fd: c_int,
    entry: &'static Entry,
    source: Source<'_>,
    explicit_offset: Option<u64>,
) -> CallOutcome {
    if explicit_offset.is_some() || !entry.is_private() {
        return CallOutcome::Forward(KernelCall::begin(entry));
    }
    let Some(total) = source.total() else {
        return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET);
    };
    let range = CallRange {
        explicit_offset: None,
        total,
    };
    let claim = Claim::for_entry(entry, fd, range);
    report::count_kernel(Call::Write);
    let progress = write_runs(source, 0, total, |run, done| {
        let written = run.write_to(fd, claim.offset.wrapping_add(done));
        count_or_errno(written).map_err(WriteError::Failed)
    });
    if progress.done < total {
        claim.release_unused_of_entry(entry, fd, progress.done);
    }
    CallOutcome::from_result(progress.into_result())
}

/// Gives the kernel its offset back before a call of the kernel that uses it. The returned value must be finished
/// after the call.
pub(crate) fn prepare_kernel_call(fd: c_int, call: Call) -> KernelCall {
    match table::lock_entry(fd) {
        Entered::Locked(locked) if locked.tag != tag::INTERNAL => {
            match forward_to_kernel(locked, None, call) {
                CallOutcome::Forward(kernel_call) => kernel_call,
                CallOutcome::Done(_) => KernelCall::WITHOUT_OFFSET,
            }
        }
        Entered::Interrupted(entry) if entry.is_private() => {
            entry.copy_offset_to_kernel(fd);
            KernelCall::WITHOUT_OFFSET
        }
        _ => KernelCall::WITHOUT_OFFSET,
    }
}

/// Leaves a descriptor to the kernel for good, and ends its *grant*, the right of direct access that firnd has given.
/// Gives the private offset, which this process kept, back to the kernel.
pub(crate) fn end_direct_access(mut locked: LockedEntry, reason: Reason) {
    let was_granted = locked.is_private();
    let link = locked.link;
    let token = locked.token;
    let end_op = if locked.tag == tag::WRITER {
        Op::EndWrite
    } else {
        Op::EndRead
    };
    pause_direct_access(&mut locked);
    locked.list.unmap_extents();
    locked.set_tag(tag::ORDINARY);
    // The request to firnd is made without the lock.
    drop(locked);
    if was_granted {
        connect::request_without_data(link, end_op, token, 0);
    }
    report::count_left(reason);
}

/// Leaves a call to the kernel. If the call uses the kernel's offset (`explicit_offset` is `None`), the kernel first
/// gets the right offset.
fn forward_to_kernel(
    mut locked: LockedEntry,
    explicit_offset: Option<u64>,
    call: Call,
) -> CallOutcome {
    report::count_kernel(call);
    if explicit_offset.is_some() {
        return CallOutcome::Forward(KernelCall::WITHOUT_OFFSET);
    }
    if locked.is_private() {
        pause_direct_access(&mut locked);
        if locked.tag == tag::WRITER {
            postpone_after_end(&mut locked, Reason::Read);
        }
    }
    CallOutcome::Forward(KernelCall::begin(locked.entry))
}

/// Ends direct access for now: gives the offset back to the kernel, and drops the lease.
fn pause_direct_access(locked: &mut LockedEntry) {
    if !locked.is_private() {
        return;
    }
    offset::return_offset(locked, is_same_file);
    if locked.request_policy.direct_bytes() > 0 {
        sys::refresh_size(locked.fd);
    }
    locked.lease.clear_lease();
}

/// Whether firnd still knows the number by the same token. A raw close(2) may have given the number to another file.
fn has_same_token(locked: &LockedEntry) -> bool {
    fetch_token(locked.fd).is_some_and(|token| token.token == locked.token)
}

/// Whether the number still is the file that was opened, and not another one after a raw close(2).
fn is_same_file(locked: &LockedEntry) -> bool {
    sys::identity(locked.fd).is_some_and(|(identity, _)| identity == locked.identity)
}

// ---- the grant to write ----------------------------------------------------------------------------

/// Asks firnd for a grant, the right to write by direct access to shared memory, unless the policy postpones that. The
/// call writes `total` bytes. Returns whether the descriptor has direct access now.
#[cold]
fn request_grant(locked: &mut LockedEntry, total: usize) -> bool {
    // The first calls go through the kernel, and so do calls while the next request is postponed. Each of the two
    // functions also counts the bytes of this call, if it is reached.
    if locked.request_policy.count_as_small(total as u64)
        || !locked.request_policy.may_request(total)
    {
        return false;
    }
    // A call that uses the kernel's offset is under way, or a limit of file sizes exists, which only the kernel
    // enforces.
    if locked.entry.kernel_calls.load(Ordering::Acquire) != 0 || !sys::is_unlimited(Resource::Fsize)
    {
        return false;
    }
    if !has_supported_flags(locked.fd)
        || !is_same_file(locked)
        || locked.request_policy.refusals() >= REFUSALS_MAX
    {
        locked.set_tag(tag::ORDINARY);
        return false;
    }
    let lease_bytes = (total as u64).max(FIRST_LEASE_BYTES);
    match request_write_grant(locked, lease_bytes) {
        Some(reply) if connect::is_granted(&reply) => begin_grant(locked, &reply),
        Some(reply) if is_full(&reply) => {
            postpone_after_lost_lease(locked, LeaseLost::Full, REFUSED_BYTES);
            false
        }
        Some(_) => {
            report::count_left(Reason::Refused);
            locked.request_policy.postpone_by(REFUSED_BYTES);
            locked.request_policy.count_refusal();
            false
        }
        None => {
            locked.set_tag(tag::ORDINARY);
            report::count_left(Reason::NoConnection);
            false
        }
    }
}

/// Whether the status flags of a descriptor permit direct access.
fn has_supported_flags(fd: c_int) -> bool {
    let unsupported = libc::O_APPEND | libc::O_DIRECT | libc::O_SYNC | libc::O_DSYNC | libc::O_PATH;
    let flags = sys::fcntl(fd, libc::F_GETFL, 0);
    flags >= 0 && flags as c_int & unsupported == 0
}

/// Begins direct writes after firnd has granted them. Returns whether the offset could be made private.
fn begin_grant(locked: &mut LockedEntry, reply: &Reply) -> bool {
    locked.file_id = reply.file_id;
    locked.lease.clear_lease();
    // The first lease came with the grant.
    locked.lease.is_next_requested = true;
    locked.request_policy.begin_grant();
    offset::make_private(locked)
}

/// Requests a grant and a first lease: over the known connection, or over a new one with a token of the open file.
fn request_write_grant(locked: &mut LockedEntry, lease_bytes: u64) -> Option<Reply> {
    let reply = if locked.link != 0 {
        connect::request_write_grant(locked.link, locked.token, lease_bytes)
    } else {
        devices::first_token(locked.token)
            .and_then(|token| connect_and_request_grant(locked, &token, lease_bytes))
    };
    if reply.is_some_and(|reply| Status::from_word(reply.status) != Status::BadToken) {
        return reply;
    }
    // The token is void, because firnd was started again, or the connection has ended.
    connect_and_request_grant(locked, &fetch_token(locked.fd)?, lease_bytes)
}

/// Connects with a token and requests a grant and a first lease.
#[inline(never)]
fn connect_and_request_grant(
    locked: &mut LockedEntry,
    token: &Token,
    lease_bytes: u64,
) -> Option<Reply> {
    let (link, first) = connect::connect_to_write(token, lease_bytes)?;
    (locked.link, locked.token) = (link, token.token);
    first.or_else(|| connect::request_write_grant(link, token.token, lease_bytes))
}

// ---- the list to read by ---------------------------------------------------------------------------

/// Asks firnd for the *list* of a file (where its bytes are in shared memory), for a read at `explicit_offset` or at
/// the descriptor's offset, unless the policy postpones that. Returns whether the descriptor has a list and a private
/// offset (kept by this process) now.
#[cold]
fn request_list(locked: &mut LockedEntry, explicit_offset: Option<u64>, total: usize) -> bool {
    if is_small_read(locked, total) || !locked.request_policy.may_request(total) {
        return false;
    }
    // A call that uses the kernel's offset is under way.
    if locked.entry.kernel_calls.load(Ordering::Acquire) != 0 {
        return false;
    }
    let is_same_file = is_same_file(locked);
    let read_offset = match explicit_offset {
        Some(offset) => offset,
        None => u64::try_from(sys::lseek(locked.fd, 0, libc::SEEK_CUR)).unwrap_or(0),
    };
    // If the number refers to another file by now, its list does not count.
    let status = fetch::connect_and_fetch(locked, read_offset).filter(|_| is_same_file);
    let is_listed = status == Some(Status::Ok);
    if is_listed && !locked.list.extents().is_empty() {
        return offset::make_private(locked);
    }
    locked.list.unmap_extents();
    if status == Some(Status::Busy) && locked.request_policy.refusals() < REFUSALS_MAX {
        locked.request_policy.count_refusal();
        locked.request_policy.postpone_by(REFUSED_BYTES);
        report::count_left(Reason::Refused);
        return false;
    }
    locked.set_tag(tag::ORDINARY);
    report::count_left(if is_listed {
        Reason::NoExtents
    } else {
        Reason::NoConnection
    });
    false
}

/// Whether a read goes through the kernel because the program has read little so far, and the file as a whole is small.
fn is_small_read(locked: &mut LockedEntry, total: usize) -> bool {
    if !locked.request_policy.may_be_small() {
        return false;
    }
    if total as u64 <= CALL_BYTES_MIN {
        return locked.request_policy.count_as_small(total as u64);
    }
    let size = sys::file_size(locked.fd).unwrap_or(0);
    size < LISTED_FILE_BYTES_MIN && locked.request_policy.count_as_small(size.min(total as u64))
}

/// Ends direct reads of a file: drops its *list* (the places of its bytes in shared memory) and tells firnd. The next
/// read asks firnd for a new list.
///
/// A list that has served few bytes counts as a refusal. After [`REFUSALS_MAX`] of them firnd is not asked again.
fn drop_list(locked: &mut LockedEntry) {
    let link = locked.link;
    let token = locked.token;
    let has_paid_off = locked.list.read_bytes() >= RETRY_BYTES_MAX;
    pause_direct_access(locked);
    locked.list.unmap_extents();
    if has_paid_off {
        locked.request_policy.forget_refusals();
    } else {
        locked.request_policy.count_refusal();
    }
    let bytes_until_request = if locked.request_policy.refusals() < REFUSALS_MAX {
        0
    } else {
        // No file has so much data, so firnd is not asked again.
        u64::MAX
    };
    locked.request_policy.postpone_by(bytes_until_request);
    connect::request_without_data(link, Op::EndRead, token, 0);
    report::count_left(Reason::Changed);
}
