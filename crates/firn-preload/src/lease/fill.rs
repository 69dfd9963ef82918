//! Copies the bytes of a write(2) into memory that firnd has leased to this process.
//!
//! A *lease* is the right to write into one *slab*, a free piece of the arena (the mount's shared memory). The next
//! lease is requested when the current one is half full, or too small for the call, so that firnd finds a slab while
//! this process copies.

use firn_direct::slab_writer::{Appended, SlabWriter};
use firn_format::data_socket::Status;
use rustix::process::Resource;

use crate::connect::{self, StoredLease};
use crate::lease::LeaseLost;
use crate::memory::{Readable, Run, Source};
use crate::sys;
use crate::table::LockedEntry;

/// Maximum number of bytes that one request asks for: one reply carries leases for no more. A program that has written
/// much is expected to write as much again.
const REQUEST_BYTES_MAX: u64 = 16 << 20;

/// How far a write to leases came.
pub(crate) struct LeaseWrite {
    /// Number of bytes that are in leases.
    pub(crate) done: usize,
    /// Why the other bytes are not; `None` if all bytes are in leases, or if no lease was to be used.
    pub(crate) lost: Option<LeaseLost>,
}

impl LeaseWrite {
    /// The write uses no lease.
    pub(crate) const NOTHING: Self = Self {
        done: 0,
        lost: None,
    };
}

/// Writes `total` bytes of a source (the program's memory) to leases (slabs of shared memory that only this process may
/// fill), as bytes of the file from `offset` on. Returns how many are written, and why the others are not.
pub(crate) fn write_to_leases(
    locked: &mut LockedEntry,
    source: Source<'_>,
    offset: u64,
    total: usize,
) -> LeaseWrite {
    let mut done = 0;
    for run in source.runs(0, total) {
        let run_offset = offset.wrapping_add(done as u64);
        let run_write = write_run_to_leases(locked, run, run_offset, total - done);
        done += run_write.done;
        if run_write.lost.is_some() {
            return LeaseWrite { done, ..run_write };
        }
    }
    LeaseWrite { done, lost: None }
}

/// Writes one run of contiguous bytes to leases (slabs of shared memory), as [`write_to_leases`] does. `call_bytes` is
/// the number of bytes that the program's call still has to write, in this run and later ones.
pub(crate) fn write_run_to_leases(
    locked: &mut LockedEntry,
    run: Run<'_, Readable>,
    offset: u64,
    call_bytes: usize,
) -> LeaseWrite {
    let mut done = 0;
    while done < run.len() {
        let file_offset = offset.wrapping_add(done as u64);
        let unwritten = run.without_first(done);
        match append_to_lease(locked, unwritten, file_offset, call_bytes - done) {
            Ok(count) => done += count,
            Err(reason) => {
                let lost = Some(reason);
                return LeaseWrite { done, lost };
            }
        }
    }
    LeaseWrite { done, lost: None }
}

/// Writes bytes from the beginning of a run to the current lease, a slab of shared memory that only this process may
/// fill. If the slab is full, it writes them to a new lease. Returns the number of written bytes, which may be less
/// than the run has. `call_bytes` is the number that the program's call still has to write.
#[inline(always)]
fn append_to_lease(
    locked: &mut LockedEntry,
    run: Run<'_, Readable>,
    offset: u64,
    call_bytes: usize,
) -> Result<usize, LeaseLost> {
    // Two attempts: with the current lease, and with a new one.
    for needs_new_lease in [false, true] {
        if needs_new_lease || locked.lease.writer().is_none() {
            acquire_next_lease(locked, call_bytes)?;
        }
        let is_next_requested = locked.lease.is_next_requested;
        let is_too_small = |writer: &mut SlabWriter| call_bytes > writer.free_bytes() as usize;
        if !is_next_requested && locked.lease.writer().is_some_and(is_too_small) {
            // This call needs the next lease too. firnd finds one while the bytes are copied.
            request_next_lease(locked, call_bytes);
        }
        let Some(writer) = locked.lease.writer() else {
            return Err(LeaseLost::NoConnection);
        };
        match run.append_to(writer, offset) {
            Appended::Bytes(count) if count > 0 => {
                let is_half_full = writer.is_half_full();
                locked.request_policy.count_direct_bytes(count);
                if is_half_full && !locked.lease.is_next_requested {
                    request_next_lease(locked, call_bytes);
                }
                return Ok(count.min(run.len()));
            }
            Appended::Revoked => return Err(LeaseLost::Revoked),
            // The lease is full: nothing was appended.
            _ => {}
        }
    }
    Err(LeaseLost::Full)
}

/// Requests the next leases without waiting for the answer.
#[cold]
fn request_next_lease(locked: &mut LockedEntry, call_bytes: usize) {
    let lease_bytes = bytes_to_request(locked, call_bytes);
    locked.lease.is_next_requested =
        connect::request_lease_ahead(locked.link, locked.token, lease_bytes);
}

/// Returns the bytes of leases to request: as many as the program has written so far, but at least `call_bytes`.
fn bytes_to_request(locked: &LockedEntry, call_bytes: usize) -> u64 {
    locked
        .request_policy
        .direct_bytes()
        .min(REQUEST_BYTES_MAX)
        .max(call_bytes as u64)
}

/// Replaces the lease, the right to fill a slab of shared memory, by the next one: by one that was requested before, or
/// else by a new one. `call_bytes` is the number of bytes that the program's call still has to write. The error says
/// why there is no lease.
#[cold]
fn acquire_next_lease(locked: &mut LockedEntry, call_bytes: usize) -> Result<(), LeaseLost> {
    let is_next_requested = locked.lease.is_next_requested;
    locked.lease.clear_lease();
    // A limit of file sizes is enforced by the kernel and firnd only. The requested lease remains for later.
    if !sys::is_unlimited(Resource::Fsize) {
        locked.lease.is_next_requested = is_next_requested;
        return Err(LeaseLost::Limited);
    }
    let Some(lease) = receive_or_request_lease(locked, is_next_requested, call_bytes) else {
        return Err(LeaseLost::NoConnection);
    };
    match lease.status {
        Status::Ok => {}
        Status::Full => return Err(LeaseLost::Full),
        Status::Busy | Status::BadToken => return Err(LeaseLost::Revoked),
        _ => return Err(LeaseLost::NoConnection),
    }
    locked.lease.is_next_requested = lease.has_more;
    let arena_map = connect::arena_map(locked.link).ok_or(LeaseLost::NoConnection)?;
    // SAFETY: firnd grants each lease once, and `connect` returns each stored lease once. So this is its only writer.
    let writer = unsafe { arena_map.slab_writer(lease.slab, locked.file_id) };
    let writer = writer.ok_or(LeaseLost::NoConnection)?;
    locked.lease.set_writer(writer);
    Ok(())
}

/// Receives a lease that was requested before, if any. Otherwise it requests one now.
fn receive_or_request_lease(
    locked: &LockedEntry,
    is_requested: bool,
    call_bytes: usize,
) -> Option<StoredLease> {
    if is_requested && let Some(lease) = connect::receive_lease(locked.link, locked.token) {
        return Some(lease);
    }
    let lease_bytes = bytes_to_request(locked, call_bytes);
    connect::request_lease(locked.link, locked.token, lease_bytes)
}
