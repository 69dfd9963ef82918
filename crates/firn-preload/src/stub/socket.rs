//! firnd as the fallback of a stub: serves the bytes that neither a lease nor a list can serve, over the data socket.

use std::ffi::c_int;

use firn_direct::connection::Payload;
use firn_format::data_socket::{DATA_BYTES_MAX, Op, Status};

use crate::connect;
use crate::fallback::{Fallback, WriteError, is_full, wait_after_lost_lease, wait_longer_after};
use crate::handled::Handled;
use crate::lease::LeaseLost;
use crate::list::fetch;
use crate::memory::{Readable, Run, Writable};
use crate::offset::Claim;
use crate::report::{Call, Reason};
use crate::stub::request::{ask_size, send_request};
use crate::stub::write::write_run;
use crate::table::Held;

/// Bytes that are moved by requests after the loss of a connection, before leases are requested again.
const UNCONNECTED_BYTES: u64 = 128 << 10;
/// Size from which a read is worth asking for a list.
const LIST_BYTES_MIN: u64 = 4 << 10;

/// firnd over the data socket as the fallback of a descriptor.
pub(crate) enum Socket {}

impl Fallback for Socket {
    fn may_lease(held: &mut Held, total: usize) -> bool {
        if held.stub.granted {
            return true;
        }
        if !held.patience.may_ask(total) {
            return false;
        }
        match connect::ask_open(held.link, held.token, total as u64) {
            Some(reply) if connect::is_ok(&reply) => {
                held.file_id = reply.file_id;
                held.lease.clear_lease();
                // The first lease came with the grant.
                held.lease.has_asked = true;
                held.patience.note_grant();
                held.stub.granted = true;
            }
            Some(reply) if is_full(&reply) => {
                wait_after_lost_lease(held, LeaseLost::Full, UNCONNECTED_BYTES);
            }
            Some(_) => wait_longer_after(held, Reason::Refused),
            None => held.stub.adopted = false,
        }
        held.stub.granted
    }

    fn has_list(held: &mut Held, _at: Option<u64>, total: usize) -> bool {
        if held.stub.flags & libc::O_ACCMODE != libc::O_RDONLY {
            return false;
        }
        if !held.list.extents().is_empty() {
            held.patience.count_fast(total);
            return true;
        }
        if !held.patience.may_ask(total) || (total as u64) < LIST_BYTES_MIN {
            return false;
        }
        let status = fetch::fetch_known_list(held);
        let is_listed = status == Some(Status::Ok) && !held.list.extents().is_empty();
        if !is_listed {
            held.list.unmap_extents();
            wait_longer_after(held, Reason::Refused);
        }
        is_listed
    }

    fn leave(
        held: Held,
        _claim: Option<&mut Claim>,
        _at: Option<u64>,
        _call: Call,
    ) -> Result<Held, Handled> {
        Ok(held)
    }

    fn lease_lost(
        mut held: Held,
        _claim: &mut Claim,
        lost: LeaseLost,
        _done: usize,
        _call: Call,
    ) -> Result<Held, Handled> {
        held.stub.granted = false;
        held.lease.clear_lease();
        wait_after_lost_lease(&mut held, lost, UNCONNECTED_BYTES);
        Ok(held)
    }

    fn list_lost(
        mut held: Held,
        _claim: &mut Claim,
        _at: Option<u64>,
        _call: Call,
    ) -> Result<Held, Handled> {
        held.list.unmap_extents();
        wait_longer_after(&mut held, Reason::Changed);
        Ok(held)
    }

    fn write_at(held: &mut Held, run: Run<'_, Readable>, at: u64) -> Result<usize, WriteError> {
        write_run(held, run, at)
    }

    fn read_at(held: &mut Held, run: Run<'_, Writable>, at: u64) -> Result<usize, c_int> {
        let mut done = 0;
        while done < run.len() {
            let into = run.rest(done).first(DATA_BYTES_MAX);
            let payload = Payload {
                room: into.as_incoming(),
                ..Payload::none()
            };
            let from = at.wrapping_add(done as u64);
            match send_request(held, Op::Read, from, into.len() as u32, payload) {
                Ok(reply) if reply.count == 0 => break,
                Ok(reply) => done += reply.count as usize,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn seek_in_file(held: &mut Held, offset: i64, whence: c_int) -> Result<u64, c_int> {
        let target = match whence {
            libc::SEEK_END => (ask_size(held)? as i64)
                .checked_add(offset)
                .ok_or(libc::EOVERFLOW)?,
            // The whole file counts as data. POSIX allows this answer if holes are not known.
            libc::SEEK_DATA | libc::SEEK_HOLE => {
                let size = ask_size(held)? as i64;
                if offset < 0 || offset >= size {
                    return Err(libc::ENXIO);
                }
                if whence == libc::SEEK_DATA {
                    offset
                } else {
                    size
                }
            }
            _ => return Err(libc::EINVAL),
        };
        u64::try_from(target).map_err(|_| libc::EINVAL)
    }

    fn has_offset(_held: &Held) -> bool {
        true
    }
}
