//! Copies the bytes of a write(2) into memory that firnd has leased to this process.
//!
//! A *lease* is the right to write into one *slab*, a free piece of the arena. The next lease is requested when the
//! current one is half full, or too small for the call, so that firnd finds a slab while this process copies.

use firn_direct::slab_writer::{Appended, SlabWriter};
use firn_format::data_socket::Status;
use rustix::process::Resource;

use crate::connect;
use crate::lease::LeaseLost;
use crate::memory::{Readable, Run, Source};
use crate::sys;
use crate::table::LockedEntry;

/// Maximum number of bytes that one request asks for: one reply carries leases for no more. A program that has written
/// much is expected to write as much again.
const WANTED_BYTES_MAX: u64 = 16 << 20;

/// Writes `total` bytes of a source to leases, for the file's offset `offset`. Returns how many were written, and the
/// reason if not all were.
pub(crate) fn fill_leases(
    locked: &mut LockedEntry,
    source: Source<'_>,
    offset: u64,
    total: usize,
) -> (usize, Option<LeaseLost>) {
    let mut done = 0;
    for run in source.runs(0, total) {
        match fill_run(locked, run, offset.wrapping_add(done as u64), total - done) {
            (taken, None) => done += taken,
            (taken, lost) => return (done + taken, lost),
        }
    }
    (done, None)
}

/// Writes one run to leases, as [`fill_leases`] does. `left` is the number of bytes that this call still has to write.
pub(crate) fn fill_run(
    locked: &mut LockedEntry,
    run: Run<'_, Readable>,
    offset: u64,
    left: usize,
) -> (usize, Option<LeaseLost>) {
    let mut taken = 0;
    while taken < run.len() {
        let at = offset.wrapping_add(taken as u64);
        match fill_some(locked, run.rest(taken), at, left - taken) {
            Ok(more) => taken += more,
            Err(lost) => return (taken, Some(lost)),
        }
    }
    (taken, None)
}

/// Writes some bytes to the current lease, or if it is full to a new one. Returns their number.
#[inline(always)]
fn fill_some(
    locked: &mut LockedEntry,
    run: Run<'_, Readable>,
    offset: u64,
    left: usize,
) -> Result<usize, LeaseLost> {
    for is_second_try in [false, true] {
        if is_second_try || locked.lease.writer().is_none() {
            next_lease(locked, left)?;
        }
        let has_asked = locked.lease.has_asked;
        let is_short = |writer: &mut SlabWriter| left > writer.free_bytes() as usize;
        if !has_asked && locked.lease.writer().is_some_and(is_short) {
            // This call needs the next lease too. firnd finds one while the bytes are copied.
            ask_ahead(locked, left);
        }
        let Some(writer) = locked.lease.writer() else {
            return Err(LeaseLost::NoConnection);
        };
        match run.append_to(writer, offset) {
            Appended::Bytes(more) if more > 0 => {
                let is_half_full = writer.is_half_full();
                locked.ask_policy.count_direct_bytes(more);
                if is_half_full && !locked.lease.has_asked {
                    ask_ahead(locked, left);
                }
                return Ok(more.min(run.len()));
            }
            Appended::Revoked => return Err(LeaseLost::Revoked),
            _ => {}
        }
    }
    Err(LeaseLost::Full)
}

/// Requests the next leases without waiting for them.
#[cold]
fn ask_ahead(locked: &mut LockedEntry, left: usize) {
    locked.lease.has_asked =
        connect::ask_ahead(locked.link, locked.token, wanted_bytes(locked, left));
}

/// Returns the bytes of leases to request: as many as the program has written so far, but at least `left`.
fn wanted_bytes(locked: &LockedEntry, left: usize) -> u64 {
    locked
        .ask_policy
        .direct_bytes()
        .min(WANTED_BYTES_MAX)
        .max(left as u64)
}

/// Takes the next lease: one that was requested before, or else a new one.
#[cold]
fn next_lease(locked: &mut LockedEntry, left: usize) -> Result<(), LeaseLost> {
    let has_asked = locked.lease.has_asked;
    locked.lease.clear_lease();
    if !sys::is_unlimited(Resource::Fsize) {
        locked.lease.has_asked = has_asked;
        return Err(LeaseLost::Limited);
    }
    let requested_before = has_asked
        .then(|| connect::take_lease(locked.link, locked.token))
        .flatten();
    let request_now = || connect::ask_lease(locked.link, locked.token, wanted_bytes(locked, left));
    let lease = requested_before
        .or_else(request_now)
        .ok_or(LeaseLost::NoConnection)?;
    match lease.status {
        Status::Ok => {}
        Status::Full => return Err(LeaseLost::Full),
        Status::Busy | Status::BadToken => return Err(LeaseLost::Revoked),
        _ => return Err(LeaseLost::NoConnection),
    }
    locked.lease.has_asked = lease.has_more;
    let map = connect::arena_map(locked.link).ok_or(LeaseLost::NoConnection)?;
    // SAFETY: firnd grants each lease once, and `connect` returns each stored lease once. So this is its only writer.
    let writer = unsafe { map.slab_writer(lease.slab, locked.file_id) };
    locked
        .lease
        .set_writer(writer.ok_or(LeaseLost::NoConnection)?);
    Ok(())
}
