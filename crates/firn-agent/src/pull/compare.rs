//! Compares a local file with a file that another host holds, by checksums of blocks. No byte of the file is sent.
//!
//! The other host *holds* a file from its opening to its release: bytes of the file in memory do not change meanwhile.
//! It answers `Full` to an open request if it already holds as many bytes as it may.
//!
//! Promise: a comparison returns true only after the other host has confirmed, following the last checksum, that its
//! file is unchanged since it was opened and is the listed file.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use firn_protocol::path::BytePath;
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

/// Compares the file `entry` of the other host with the open file `local`, by checksums over the connection `peer`.
/// `entry` is from a list of `top` on this connection. An entry that is not a regular file counts as equal.
///
/// Returns false if size, bytes or the number of changes differ. The caller must then close the connection, because
/// replies may be outstanding. `on_progress` is called before each reply; its error ends the comparison.
pub(crate) fn is_same_as_remote(
    peer: &mut Peer,
    top: &BytePath,
    entry: &Entry,
    local: &File,
    on_progress: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<bool, PullError> {
    let EntryKind::File { bytes, .. } = entry.kind else {
        return Ok(true);
    };
    // If the local size is unknown, the comparison of the bytes finds any difference.
    if let Ok(metadata) = local.metadata()
        && metadata.len() != bytes
    {
        return Ok(false);
    }
    // The number of changes, if the list has one, shows whether the file is still the listed one.
    let opened = open_file(peer, top, entry, on_progress)?;
    if opened.bytes != bytes || entry.is_older_than(opened.changes) {
        return Ok(false);
    }
    if !has_same_sums(peer, bytes, local, on_progress)? {
        return Ok(false);
    }
    // The checksums count only if the other file has not changed while they were computed.
    peer.send(&Request::Check { file: FILE_NUMBER })?;
    let is_as_opened = match peer.receive()? {
        Reply::Checked { changed, snapshot } => !changed && snapshot,
        unexpected => return Err(peer.out_of_turn(&unexpected)),
    };
    peer.send(&Request::Release { file: FILE_NUMBER })?;
    match peer.receive()? {
        Reply::Done => Ok(is_as_opened),
        unexpected => Err(peer.out_of_turn(&unexpected)),
    }
}

/// A file that the other host has opened.
struct OpenedFile {
    bytes: u64,
    /// Number of changes of the file; `None` for a partner copy.
    changes: Option<u64>,
}

/// Opens a file on the other host, which then holds the file: bytes in memory do not change. Returns its present size
/// and number of changes. `entry` has the file's path relative to `top`.
///
/// The host answers `Full` while it already holds as many bytes as it may. Tries again for at most [`FULL_TIMEOUT`].
fn open_file(
    peer: &mut Peer,
    top: &BytePath,
    entry: &Entry,
    on_progress: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<OpenedFile, PullError> {
    let started_at = Instant::now();
    loop {
        peer.send(&Request::Open {
            file: FILE_NUMBER,
            path: join(top, entry.path.as_path()),
        })?;
        match peer.receive()? {
            Reply::Opened { bytes, changes } => return Ok(OpenedFile { bytes, changes }),
            Reply::Full if started_at.elapsed() > FULL_TIMEOUT => {
                let host = peer.host().into();
                return Err(PullError::Full { host });
            }
            Reply::Full => std::thread::sleep(FULL_PAUSE),
            unexpected => return Err(peer.out_of_turn(&unexpected)),
        }
        on_progress()?;
    }
}

/// A block whose checksum was requested.
struct RequestedBlock {
    offset: u64,
    bytes: u64,
}

/// Compares the local file with the file that is open on the other host, by the checksum of each block (1 MiB). Both
/// have `file_bytes`.
///
/// Returns false at the first block that differs, or if the local file cannot be read. Replies to later requests may
/// then still arrive, so the connection cannot be used further.
fn has_same_sums(
    peer: &mut Peer,
    file_bytes: u64,
    local: &File,
    on_progress: &mut dyn FnMut() -> Result<(), PullError>,
) -> Result<bool, PullError> {
    let mut buffer = vec![0; BLOCK_BYTES.min(file_bytes) as usize];
    let mut requested_blocks: VecDeque<RequestedBlock> = VecDeque::new();
    let mut next_offset = 0;
    loop {
        while requested_blocks.len() < IN_FLIGHT && next_offset < file_bytes {
            let block = RequestedBlock {
                offset: next_offset,
                bytes: BLOCK_BYTES.min(file_bytes - next_offset),
            };
            peer.send(&Request::Sum {
                file: FILE_NUMBER,
                offset: block.offset,
                bytes: block.bytes,
            })?;
            next_offset += block.bytes;
            requested_blocks.push_back(block);
        }
        let Some(block) = requested_blocks.pop_front() else {
            return Ok(true);
        };
        on_progress()?;
        // The local sum is computed while the reply is on its way.
        let local_bytes = &mut buffer[..block.bytes as usize];
        let read = local.read_exact_at(local_bytes, block.offset);
        let local_sum = format!("{:032x}", xxh3_128(local_bytes));
        let remote_sum = match peer.receive()? {
            Reply::Sum { bytes, xxh3 } if bytes == block.bytes => xxh3,
            Reply::Sum { .. } => return Ok(false),
            unexpected => return Err(peer.out_of_turn(&unexpected)),
        };
        if read.is_err() || local_sum != remote_sum {
            return Ok(false);
        }
    }
}
