//! firnd (the process that serves a mount) as the *fallback* of a stub, an empty file with its bytes in firnd: it
//! serves over the data socket what direct access cannot serve.
//!
//! Direct access to the shared memory goes by a *lease* (the right to write into a range) or by a *list* (the places of
//! the file's bytes).

use std::ffi::c_int;

use firn_direct::connection::Payload;
use firn_format::data_socket::{DATA_BYTES_MAX, Op, Status};

use crate::connect;
use crate::fallback::{
    Fallback, WriteError, is_full, postpone_after_end, postpone_after_lost_lease,
};
use crate::lease::LeaseLost;
use crate::list::fetch;
use crate::memory::{Readable, Run, Writable};
use crate::offset::Claim;
use crate::outcome::Step;
use crate::report::{Call, Reason};
use crate::stub::request::{request_size, send_request};
use crate::stub::write::write_run;
use crate::table::LockedEntry;

/// Bytes that are moved by requests after the loss of a connection, before leases are requested again.
const UNCONNECTED_BYTES: u64 = 128 << 10;
/// Minimum size of a read for which a list is requested.
const LIST_BYTES_MIN: u64 = 4 << 10;

/// firnd over the data socket as the fallback of a descriptor.
pub(crate) enum Socket {}

impl Fallback for Socket {
    /// Whether a write to a stub (an empty file; firnd has its bytes) may use leases, rights to fill slabs of shared
    /// memory. Asks firnd for a grant of them, unless the policy postpones that.
    fn obtain_grant(locked: &mut LockedEntry, total: usize) -> bool {
        if locked.stub.has_grant {
            return true;
        }
        if !locked.request_policy.may_request(total) {
            return false;
        }
        match connect::request_write_grant(locked.link, locked.token, total as u64) {
            Some(reply) if connect::is_granted(&reply) => {
                locked.file_id = reply.file_id;
                locked.lease.clear_lease();
                // The first lease came with the grant.
                locked.lease.is_next_requested = true;
                locked.request_policy.begin_grant();
                locked.stub.has_grant = true;
            }
            Some(reply) if is_full(&reply) => {
                postpone_after_lost_lease(locked, LeaseLost::Full, UNCONNECTED_BYTES);
            }
            Some(_) => postpone_after_end(locked, Reason::Refused),
            // The connection has ended. A restarted firnd does not know the descriptor.
            None => locked.stub.is_adopted = false,
        }
        locked.stub.has_grant
    }

    /// Whether a stub (an empty file; firnd has its bytes) has a list that says where its bytes are in shared memory.
    /// Asks firnd for a list if the read is large enough and the policy does not postpone that.
    fn ensure_list(locked: &mut LockedEntry, _explicit_offset: Option<u64>, total: usize) -> bool {
        if locked.stub.flags & libc::O_ACCMODE != libc::O_RDONLY {
            return false;
        }
        if !locked.list.extents().is_empty() {
            locked.request_policy.count_direct_bytes(total);
            return true;
        }
        if !locked.request_policy.may_request(total) || (total as u64) < LIST_BYTES_MIN {
            return false;
        }
        let status = fetch::fetch_whole_list(locked);
        let is_listed = status == Some(Status::Ok) && !locked.list.extents().is_empty();
        if !is_listed {
            locked.list.unmap_extents();
            postpone_after_end(locked, Reason::Refused);
        }
        is_listed
    }

    fn hand_over(
        locked: LockedEntry,
        _claim: Option<&mut Claim>,
        _explicit_offset: Option<u64>,
        _call: Call,
    ) -> Step<LockedEntry> {
        Ok(locked)
    }

    fn handle_lost_lease(
        mut locked: LockedEntry,
        _claim: &mut Claim,
        lost: LeaseLost,
        _done: usize,
        _call: Call,
    ) -> Step<LockedEntry> {
        locked.stub.has_grant = false;
        locked.lease.clear_lease();
        postpone_after_lost_lease(&mut locked, lost, UNCONNECTED_BYTES);
        Ok(locked)
    }

    fn handle_lost_list(
        mut locked: LockedEntry,
        _claim: &mut Claim,
        _explicit_offset: Option<u64>,
        _call: Call,
    ) -> Step<LockedEntry> {
        locked.list.unmap_extents();
        postpone_after_end(&mut locked, Reason::Changed);
        Ok(locked)
    }

    fn write_at(
        locked: &mut LockedEntry,
        run: Run<'_, Readable>,
        offset: u64,
    ) -> Result<usize, WriteError> {
        write_run(locked, run, offset)
    }

    /// Reads bytes of a stub (an empty file; firnd has its bytes) by requests to firnd, one for each packet. Returns
    /// the number of bytes, or an errno if the first request failed.
    fn read_at(
        locked: &mut LockedEntry,
        run: Run<'_, Writable>,
        offset: u64,
    ) -> Result<usize, c_int> {
        let mut done = 0;
        while done < run.len() {
            let packet = run.without_first(done).first(DATA_BYTES_MAX);
            let payload = Payload {
                room: packet.as_incoming(),
                ..Payload::none()
            };
            let packet_offset = offset.wrapping_add(done as u64);
            match send_request(
                locked,
                Op::Read,
                packet_offset,
                packet.len() as u32,
                payload,
            ) {
                // This is the end of the file.
                Ok(reply) if reply.count == 0 => break,
                Ok(reply) => done += reply.count as usize,
                Err(errno) if done == 0 => return Err(errno),
                // The bytes that were read already are the result.
                Err(_) => break,
            }
        }
        Ok(done)
    }

    /// Returns the target of an lseek(2) from the end of a stub (an empty file; firnd has its bytes), to data or to a
    /// hole. Only firnd knows the size.
    fn seek_in_file(locked: &mut LockedEntry, offset: i64, whence: c_int) -> Result<u64, c_int> {
        if !matches!(whence, libc::SEEK_END | libc::SEEK_DATA | libc::SEEK_HOLE) {
            return Err(libc::EINVAL);
        }
        let size = request_size(locked)? as i64;
        let target = if whence == libc::SEEK_END {
            size.checked_add(offset).ok_or(libc::EOVERFLOW)?
        } else if offset < 0 || offset >= size {
            return Err(libc::ENXIO);
        } else if whence == libc::SEEK_DATA {
            // The whole file counts as data. POSIX allows this answer if holes are not known.
            offset
        } else {
            size
        };
        u64::try_from(target).map_err(|_| libc::EINVAL)
    }

    fn has_offset(_held: &LockedEntry) -> bool {
        true
    }
}
