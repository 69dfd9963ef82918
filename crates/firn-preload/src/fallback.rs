//! What serves the bytes that neither a lease nor a list can: the kernel for files of a mount, firnd over the data
//! socket for stubs.

use std::ffi::c_int;

use firn_format::data_socket::{Reply, Status};

use crate::handled::Handled;
use crate::lease::LeaseLost;
use crate::memory::{Readable, Run, Writable};
use crate::offset::Claim;
use crate::report::{self, Call, Reason};
use crate::table::Held;

/// Why bytes were not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteError {
    /// None of them is in the file.
    Failed(c_int),
    /// firnd ended before it answered, so some of the bytes may be stored. A count that leaves them out would make the
    /// program write them again, so the call fails, whatever it wrote before.
    Unknown(c_int),
}

impl WriteError {
    pub(crate) fn errno(self) -> c_int {
        let (Self::Failed(errno) | Self::Unknown(errno)) = self;
        errno
    }

    /// How a call ends that wrote `done` bytes before.
    pub(crate) fn after(self, done: usize) -> Result<usize, c_int> {
        match self {
            Self::Failed(_) if done > 0 => Ok(done),
            error => Err(error.errno()),
        }
    }
}

/// Serves what goes past neither lease nor list.
pub(crate) trait Fallback {
    /// Whether bytes may go into leases now; asks for the grant where it is time to.
    fn may_lease(held: &mut Held, total: usize) -> bool;
    /// Whether there is a list of where the bytes are; asks for it where that is worth it.
    fn has_list(held: &mut Held, at: Option<u64>, total: usize) -> bool;
    /// Leaves a call to the kernel or the next function, where there is one, with the offset given back; else `Ok`.
    fn leave(
        held: Held,
        claim: Option<&mut Claim>,
        at: Option<u64>,
        call: Call,
    ) -> Result<Held, Handled>;
    /// A lease was lost after `done` bytes of a claim.
    fn lease_lost(
        held: Held,
        claim: &mut Claim,
        lost: LeaseLost,
        done: usize,
        call: Call,
    ) -> Result<Held, Handled>;
    /// What was copied by the list means nothing: it does not hold any more.
    fn list_lost(
        held: Held,
        claim: &mut Claim,
        at: Option<u64>,
        call: Call,
    ) -> Result<Held, Handled>;
    /// Writes at an offset; fewer bytes than given where that is all that goes.
    fn write_at(held: &mut Held, run: Run<'_, Readable>, at: u64) -> Result<usize, WriteError>;
    /// Reads at an offset; 0 at the end of the file.
    fn read_at(held: &mut Held, run: Run<'_, Writable>, at: u64) -> Result<usize, c_int>;
    /// lseek(2) from the end of the file, or to data or a hole: the new offset.
    fn seek_in_file(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int>;
    /// Whether the offset is known here, private or not.
    fn has_offset(held: &Held) -> bool;
}

/// Puts the next question for a grant off after a lease was lost; `unconnected_bytes` go by the fallback first where
/// there is no connection to ask over.
pub(crate) fn wait_after_lost_lease(held: &mut Held, lost: LeaseLost, unconnected_bytes: u64) {
    match lost {
        LeaseLost::Full => {
            held.patience.wait_for_room();
            report::count_left(Reason::NoRoom);
        }
        LeaseLost::NoConnection | LeaseLost::Limited => {
            held.patience.wait_for(unconnected_bytes);
            report::count_left(Reason::NoConnection);
        }
        LeaseLost::Revoked => wait_longer_after(held, Reason::Revoked),
    }
}

/// Whether firnd would grant direct access, but has no room for a lease.
pub(crate) fn is_full(reply: &Reply) -> bool {
    Status::from_word(reply.status) == Status::Full
}

/// Puts the next question off after a grant or a list ended early.
pub(crate) fn wait_longer_after(held: &mut Held, reason: Reason) {
    report::count_left(reason);
    held.patience.wait_longer();
}
