//! Whether files that are here are what another host holds: by checksums, so that no byte of them is sent.
//!
//! Promise: they are the same only if the host has said, after its last checksum, that the file was all the time as it
//! was listed.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_128;

use crate::error::PullError;
use crate::message::{BLOCK_BYTES, Entry, EntryKind, Reply, Request};
use crate::peer::Peer;
use crate::source::join;

/// Checksums that are asked for ahead: the host makes one while another is made here.
const IN_FLIGHT: usize = 4;
/// Until a host that holds as much as it may for others is asked again.
const FULL_PAUSE: Duration = Duration::from_millis(200);
/// How long it is asked.
const FULL_LIMIT: Duration = Duration::from_secs(10);
/// By which the host means the file: there is one at a time.
const NUMBER: u32 = 0;

/// Compares one file that the host listed (on the connection `peer`, with paths below `top`) with a file that is here.
/// False: something differs; the connection is of no more use then. `tick` is called all the time.
pub(crate) fn is_same_file(
    peer: &mut Peer,
    top: &firn_protocol::path::BytePath,
    entry: &Entry,
    here: &File,
    tick: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<bool, PullError> {
    let EntryKind::File { bytes, .. } = entry.kind else {
        return Ok(true);
    };
    if here.metadata().is_ok_and(|found| found.len() != bytes) {
        return Ok(false);
    }
    let begun = Instant::now();
    let opened = loop {
        let path = join(top, entry.path.as_path());
        peer.send(&Request::Open { file: NUMBER, path })?;
        match peer.receive()? {
            Reply::Opened { bytes, changes } => break (bytes, changes),
            Reply::Full if begun.elapsed() > FULL_LIMIT => {
                let host = peer.host().into();
                return Err(PullError::Full { host });
            }
            Reply::Full => std::thread::sleep(FULL_PAUSE),
            other => return Err(peer.out_of_turn(&other)),
        }
        tick()?;
    };
    if opened.0 != bytes
        || entry.is_older_than(opened.1)
        || !has_same_sums(peer, bytes, here, tick)?
    {
        return Ok(false);
    }
    peer.send(&Request::Check { file: NUMBER })?;
    let is_as_listed = match peer.receive()? {
        Reply::Checked { changed, snapshot } => !changed && snapshot,
        other => return Err(peer.out_of_turn(&other)),
    };
    peer.send(&Request::Release { file: NUMBER })?;
    match peer.receive()? {
        Reply::Done => Ok(is_as_listed),
        other => Err(peer.out_of_turn(&other)),
    }
}

fn has_same_sums(
    peer: &mut Peer,
    bytes: u64,
    here: &File,
    tick: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<bool, PullError> {
    let mut buffer = vec![0; BLOCK_BYTES.min(bytes) as usize];
    let mut asked: VecDeque<(u64, u64)> = VecDeque::new();
    let mut next = 0;
    loop {
        while asked.len() < IN_FLIGHT && next < bytes {
            let count = BLOCK_BYTES.min(bytes - next);
            peer.send(&Request::Sum {
                file: NUMBER,
                offset: next,
                bytes: count,
            })?;
            asked.push_back((next, count));
            next += count;
        }
        let Some((offset, count)) = asked.pop_front() else {
            return Ok(true);
        };
        tick()?;
        let block = &mut buffer[..count as usize];
        let own = here.read_exact_at(block, offset);
        let own = own.map(|()| format!("{:032x}", xxh3_128(block)));
        let sum = match peer.receive()? {
            Reply::Sum { bytes, xxh3 } if bytes == count => xxh3,
            Reply::Sum { .. } => return Ok(false),
            other => return Err(peer.out_of_turn(&other)),
        };
        if !own.is_ok_and(|own| own == sum) {
            return Ok(false);
        }
    }
}
