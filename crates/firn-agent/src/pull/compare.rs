//! Compares a local file with a file that another host holds, by checksums of blocks. No byte of the file is sent.
//!
//! Promise: a comparison returns true only after the other host has confirmed, following the last checksum, that its file
//! is unchanged since it was opened and is the listed file.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_128;

use crate::error::PullError;
use crate::message::{BLOCK_BYTES, Entry, EntryKind, Reply, Request};
use crate::peer::Peer;
use crate::source::join;

/// Number of checksums that are requested in advance, so that both hosts compute at the same time.
const IN_FLIGHT: usize = 4;
/// Pause before a host that answered `Full` is asked again.
const FULL_PAUSE: Duration = Duration::from_millis(200);
/// Maximum time for which a host may answer `Full`.
const FULL_TIMEOUT: Duration = Duration::from_secs(10);
/// Number of the file in the requests. One file is open at a time, so one number is enough.
const FILE_NUMBER: u32 = 0;

/// Compares the file `entry` of the other host with the open file `local`.
///
/// The host has listed `entry` on the connection `peer`, with paths relative to `top`. An entry that is not a regular
/// file counts as equal. Returns false if size, bytes or the number of changes differ. The connection must then be
/// closed, because replies may be outstanding. `tick` is called before each reply; an error of `tick` ends the
/// comparison.
pub(crate) fn is_same_file(
    peer: &mut Peer,
    top: &firn_protocol::path::BytePath,
    entry: &Entry,
    local: &File,
    tick: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<bool, PullError> {
    let EntryKind::File { bytes, .. } = entry.kind else {
        return Ok(true);
    };
    if local
        .metadata()
        .is_ok_and(|metadata| metadata.len() != bytes)
    {
        return Ok(false);
    }
    let started_at = Instant::now();
    let (opened_bytes, opened_changes) = loop {
        let path = join(top, entry.path.as_path());
        peer.send(&Request::Open {
            file: FILE_NUMBER,
            path,
        })?;
        match peer.receive()? {
            Reply::Opened { bytes, changes } => break (bytes, changes),
            Reply::Full if started_at.elapsed() > FULL_TIMEOUT => {
                let host = peer.host().into();
                return Err(PullError::Full { host });
            }
            Reply::Full => std::thread::sleep(FULL_PAUSE),
            other => return Err(peer.out_of_turn(&other)),
        }
        tick()?;
    };
    if opened_bytes != bytes
        || entry.is_older_than(opened_changes)
        || !has_same_sums(peer, bytes, local, tick)?
    {
        return Ok(false);
    }
    peer.send(&Request::Check { file: FILE_NUMBER })?;
    let is_as_listed = match peer.receive()? {
        Reply::Checked { changed, snapshot } => !changed && snapshot,
        other => return Err(peer.out_of_turn(&other)),
    };
    peer.send(&Request::Release { file: FILE_NUMBER })?;
    match peer.receive()? {
        Reply::Done => Ok(is_as_listed),
        other => Err(peer.out_of_turn(&other)),
    }
}

/// Compares the checksum of each block. Returns false at the first one that differs, or if the local file cannot be
/// read.
fn has_same_sums(
    peer: &mut Peer,
    bytes: u64,
    local: &File,
    tick: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<bool, PullError> {
    let mut buffer = vec![0; BLOCK_BYTES.min(bytes) as usize];
    let mut outstanding: VecDeque<(u64, u64)> = VecDeque::new();
    let mut next_offset = 0;
    loop {
        while outstanding.len() < IN_FLIGHT && next_offset < bytes {
            let count = BLOCK_BYTES.min(bytes - next_offset);
            peer.send(&Request::Sum {
                file: FILE_NUMBER,
                offset: next_offset,
                bytes: count,
            })?;
            outstanding.push_back((next_offset, count));
            next_offset += count;
        }
        let Some((offset, count)) = outstanding.pop_front() else {
            return Ok(true);
        };
        tick()?;
        let block = &mut buffer[..count as usize];
        let read = local.read_exact_at(block, offset);
        let local_sum = read.map(|()| format!("{:032x}", xxh3_128(block)));
        let remote_sum = match peer.receive()? {
            Reply::Sum { bytes, xxh3 } if bytes == count => xxh3,
            Reply::Sum { .. } => return Ok(false),
            other => return Err(peer.out_of_turn(&other)),
        };
        if !local_sum.is_ok_and(|sum| sum == remote_sum) {
            return Ok(false);
        }
    }
}
