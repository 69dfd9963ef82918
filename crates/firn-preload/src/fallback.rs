//! The *fallback* of a descriptor serves the bytes that direct access to the shared memory cannot serve: bytes for
//! which the process has neither a *lease* (to write) nor a *list* (to read by).
//!
//! * A *stub* is an empty file. Its bytes are in firnd, the process that serves a mount.
//! * A *grant* is the right of this process to access a file directly; leases need one.
//!
//! The fallback is the kernel for files of a mount, and firnd over the data socket for stubs. It also decides when
//! firnd is asked for a grant or a list, and what happens when these are lost.

use std::ffi::c_int;

use firn_format::data_socket::{Reply, Status};

use crate::lease::LeaseLost;
use crate::memory::{Readable, Run, Source, Writable};
use crate::offset::Claim;
use crate::outcome::Step;
use crate::report::{self, Call, Reason};
use crate::table::LockedEntry;

/// Why bytes were not written, with the errno for the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteError {
    /// None of the bytes is in the file.
    Failed(c_int),
    /// firnd ended before it answered, so some of the bytes may be stored. A count without them would make the program
    /// write them again. So the call fails, even if it has written other bytes before.
    Unknown(c_int),
}

impl WriteError {
    pub(crate) fn errno(self) -> c_int {
        let (Self::Failed(errno) | Self::Unknown(errno)) = self;
        errno
    }

    /// Returns the result of a call that has written `done` bytes before this error.
    pub(crate) fn after(self, done: usize) -> Result<usize, c_int> {
        match self {
            Self::Failed(_) if done > 0 => Ok(done),
            error => Err(error.errno()),
        }
    }
}

/// How many bytes of a call are written, and the error that ended the write.
pub(crate) struct WriteProgress {
    pub(crate) done: usize,
    error: Option<WriteError>,
}

impl WriteProgress {
    /// Returns the result of the call for the program.
    pub(crate) fn into_result(self) -> Result<usize, c_int> {
        match self.error {
            None => Ok(self.done),
            Some(error) => error.after(self.done),
        }
    }
}

/// Writes the bytes of a source (the program's memory) from byte `done` up to byte `total`, one run of contiguous bytes
/// after the other. It ends at the first error and after a run that was not written as a whole. `write_run` writes one
/// run; it also gets the position of the run in the source. Returns how far the write came.
pub(crate) fn write_runs<'a>(
    source: Source<'a>,
    mut done: usize,
    total: usize,
    mut write_run: impl FnMut(Run<'a, Readable>, u64) -> Result<usize, WriteError>,
) -> WriteProgress {
    for run in source.runs(done, total - done) {
        let count = match write_run(run, done as u64) {
            Ok(count) => count,
            Err(error) => {
                let error = Some(error);
                return WriteProgress { done, error };
            }
        };
        done += count;
        if count < run.len() {
            break;
        }
    }
    WriteProgress { done, error: None }
}

/// Serves the bytes of a descriptor that neither lease nor list can serve.
///
/// Some methods return a [`Step`]. Its `Err` ends the call with its result, or leaves the call to the kernel. Its `Ok`
/// means that the caller continues with the fallback's `write_at` or `read_at`. `explicit_offset` is the offset that
/// the call names; `None` means the descriptor's own offset.
pub(crate) trait Fallback {
    /// Returns whether a write may use leases. Asks firnd for a grant if the request policy permits that.
    fn obtain_grant(locked: &mut LockedEntry, total: usize) -> bool;
    /// Returns whether the descriptor has a list. Asks firnd for a list if that pays off.
    fn ensure_list(locked: &mut LockedEntry, explicit_offset: Option<u64>, total: usize) -> bool;
    /// Hands a call over to the fallback. If that is the kernel, it gets the offset back and the call ends here.
    fn hand_over(
        locked: LockedEntry,
        claim: Option<&mut Claim>,
        explicit_offset: Option<u64>,
        call: Call,
    ) -> Step<LockedEntry>;
    /// Handles the loss of a lease after `done` bytes of a claim.
    fn handle_lost_lease(
        locked: LockedEntry,
        claim: &mut Claim,
        lost: LeaseLost,
        done: usize,
        call: Call,
    ) -> Step<LockedEntry>;
    /// Handles a list that has become void, so that the bytes copied by it do not count.
    fn handle_lost_list(
        locked: LockedEntry,
        claim: &mut Claim,
        explicit_offset: Option<u64>,
        call: Call,
    ) -> Step<LockedEntry>;
    /// Writes a run at an offset. Returns the number of bytes, which may be less than the run has.
    fn write_at(
        locked: &mut LockedEntry,
        run: Run<'_, Readable>,
        offset: u64,
    ) -> Result<usize, WriteError>;
    /// Reads into a run from an offset. Returns the number of bytes; 0 at the end of the file.
    fn read_at(
        locked: &mut LockedEntry,
        run: Run<'_, Writable>,
        offset: u64,
    ) -> Result<usize, c_int>;
    /// Returns the target of an lseek(2) from the end of the file, to data or to a hole.
    fn seek_in_file(locked: &mut LockedEntry, offset: i64, whence: c_int) -> Result<u64, c_int>;
    /// Whether this library can serve lseek(2) of the descriptor.
    fn has_offset(locked: &LockedEntry) -> bool;
}

/// Postpones the next request for a grant after a lease was lost. If there is no connection, the fallback must first
/// move `unconnected_bytes` bytes.
pub(crate) fn postpone_after_lost_lease(
    locked: &mut LockedEntry,
    lost: LeaseLost,
    unconnected_bytes: u64,
) {
    match lost {
        LeaseLost::Full => {
            locked.request_policy.postpone_until_room();
            report::count_left(Reason::NoRoom);
        }
        LeaseLost::NoConnection | LeaseLost::Limited => {
            locked.request_policy.postpone_by(unconnected_bytes);
            report::count_left(Reason::NoConnection);
        }
        LeaseLost::Revoked => postpone_after_end(locked, Reason::Revoked),
    }
}

/// Whether firnd refuses only because the arena has no room for a lease.
pub(crate) fn is_full(reply: &Reply) -> bool {
    Status::from_word(reply.status) == Status::Full
}

/// Counts a grant or a list that has ended, and postpones the next request if it has served few bytes.
pub(crate) fn postpone_after_end(locked: &mut LockedEntry, reason: Reason) {
    report::count_left(reason);
    locked.request_policy.postpone_if_unprofitable();
}
