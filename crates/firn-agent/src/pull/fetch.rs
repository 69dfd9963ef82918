//! Fetches the files of a plan over one connection.
//!
//! Each file needs these requests, in this order:
//!
//! ```text
//!   Open ─► for each block: Sum, Read, or both ─► Check ─► Release
//! ```
//!
//! A block that an earlier pull has written is compared by `Sum`. A new block, or one with another sum, is read.
//!
//! With libfabric the puller sends `Place` instead of `Read`, and then reads the block directly from the agent's memory
//! ([`Remote`]). Such a block arrives after the reply.
//!
//! Requests are pipelined: up to [`IN_FLIGHT`] of them are sent before their replies arrive, and the next files are
//! opened before the current one ends. Replies arrive in the order of the requests.
//!
//! Invariants
//! * A block reaches the writers only after it was authenticated, by its MAC or by decryption.
//! * The memory that is used for an agent is bounded, whatever the agent sends. A block has few parts, and the blocks
//!   of an open file are counted, not listed.
//! * A file is finished only after a `Check` that follows its last byte has confirmed that its bytes are one snapshot.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use crate::ofi::Buffer;
use firn_protocol::path::BytePath;
use xxhash_rust::xxh3::xxh3_128;

use crate::block_mac::{BlockHasher, BlockMac};
use crate::error::PullError;
use crate::message::{BLOCK_BYTES, Entry, Reply, Request, STAGING_BUFFERS};
use crate::peer::Peer;
use crate::pull::direct::DirectFile;
use crate::pull::remote::{Answer, ExpectedMac, Incoming, Remote, pull_error};
use crate::pull::staging::{Staging, local};
use crate::pull::state::PullState;
use crate::pull::writers::{Block, Finish, StagedFile, Writers};
use crate::source::join;

/// Maximum number of requests without a reply plus blocks under way by libfabric. This number keeps agent and network
/// busy.
const IN_FLIGHT: usize = 16;
const _: () = assert!(IN_FLIGHT as u64 <= STAGING_BUFFERS);
/// Maximum number of files that are open at once.
const AHEAD_FILES: usize = 16;
/// Size of all open files together at which no further file is opened.
const AHEAD_BYTES: u64 = 64 << 20;
/// Number of files that may be open whatever their sizes are, so that the next file is opened before the current one
/// ends.
const ALWAYS_OPEN_FILES: usize = 2;
/// Maximum number of tries to read a file that changes, and maximum number of damaged blocks of one file.
const TRIES: u32 = 5;
/// Pause before an agent that answered `Full` is asked again.
const FULL_PAUSE: Duration = Duration::from_millis(200);
/// Minimum length of a run of zeros that becomes a hole: a block of a usual file system.
const HOLE_BYTES_MIN: usize = 4096;
/// Bytes that are received and then hashed at a time: few enough to be still in the processor's cache.
const HASH_BYTES: usize = 256 << 10;

/// Fetches the files of a plan over one connection; see the head of this file.
pub(crate) struct Fetch<'a, 't> {
    peer: &'a mut Peer,
    staging: &'a Staging,
    writers: &'a Writers,
    /// Reads by libfabric; `None` if bytes are received over the connection.
    remote: Option<Remote>,
    state: &'a mut PullState<'t>,
    /// Path of the pulled tree, relative to the mount point of the source.
    root: BytePath,
    /// Files for which no `Open` was sent, or whose `Open` was answered with `Full`.
    queue: VecDeque<FileToFetch>,
    /// Numbers of the open files with blocks that are not requested yet. Blocks of the first one are requested now.
    partly_requested: VecDeque<u32>,
    /// Requests that are sent before the next block of `partly_requested`: repeated blocks, `Check` and `Release`.
    urgent: VecDeque<FileRequest>,
    /// Requests that were sent and have no reply yet, oldest first.
    sent_requests: VecDeque<FileRequest>,
    /// Files whose `Open` was sent and whose `Release` was not answered, by the number that both sides use.
    open_files: BTreeMap<u32, OpenFile>,
    last_file_number: u32,
    /// Whether the agent answered `Full`. If so, no file is opened until a file of this pull is released, or
    /// [`FULL_PAUSE`] is over.
    is_full: bool,
}

/// A file that is to be fetched, with the results of earlier tries.
pub(crate) struct FileToFetch {
    pub(crate) entry: Entry,
    /// Size in the list, or in the last reply to `Open` if there was one.
    pub(crate) bytes: u64,
    /// Number of complete reads that did not yield a snapshot.
    pub(crate) tries: u32,
}

/// A file that is open at the agent, or for which an `Open` is under way.
struct OpenFile {
    to_fetch: FileToFetch,
    /// The file in the staging directory; `None` until `Open` is answered.
    staged: Option<Arc<StagedFile>>,
    /// Size of the file as the agent holds it.
    bytes: u64,
    /// Size of the staged file when it was opened. These bytes are from an earlier pull.
    staged_bytes: u64,
    /// Index of the first block that was not requested yet.
    next_block: u64,
    /// Number of blocks that were neither received nor found equal by their checksum.
    blocks_left: u64,
    /// Number of blocks that arrived damaged.
    damaged: u32,
    /// Whether the file was changed between the list and the `Open`.
    is_newer: bool,
}

/// A request about a file: the file's number, and for a request about a block, the index of the block.
#[derive(Clone, Copy, Debug)]
enum FileRequest {
    Open(u32),
    Sum(u32, u64),
    Read(u32, u64),
    /// Requests the address of a block's bytes. The last number is the staging buffer for bytes that are not in memory.
    Place(u32, u64, u32),
    Check(u32),
    Release(u32),
}

/// A block that was received over the connection.
struct Received {
    /// Ranges of the buffer to write to the file.
    parts: Vec<Range<usize>>,
    /// Number of bytes that were received over the network. Zeros are not sent.
    bytes: u64,
}

impl<'a, 't> Fetch<'a, 't> {
    /// Prepares to fetch the files of `queue`. No request is sent before [`Fetch::run`].
    pub(crate) fn new(
        peer: &'a mut Peer,
        staging: &'a Staging,
        writers: &'a Writers,
        remote: Option<Remote>,
        state: &'a mut PullState<'t>,
        root: BytePath,
        queue: VecDeque<FileToFetch>,
    ) -> Self {
        Self {
            peer,
            staging,
            writers,
            remote,
            state,
            root,
            queue,
            partly_requested: VecDeque::new(),
            urgent: VecDeque::new(),
            sent_requests: VecDeque::new(),
            open_files: BTreeMap::new(),
            last_file_number: 0,
            is_full: false,
        }
    }

    /// Fetches all files. Returns when all blocks are handed to the writers, which may still be writing.
    pub(crate) fn run(mut self) -> Result<(), PullError> {
        let fetched = self.fetch_all();
        let Some(remote) = self.remote.take() else {
            return fetched;
        };
        let closed = remote.close(self.writers);
        closed.map_err(|error| pull_error(self.peer, error))?;
        fetched
    }

    fn fetch_all(&mut self) -> Result<(), PullError> {
        loop {
            self.send_requests()?;
            // Without an outstanding reply, this thread may wait, but only for blocks that libfabric reads. Otherwise
            // it must not wait for blocks, because it waits for the reply below.
            let waits_for_block = self.sent_requests.is_empty();
            self.write_arrived_blocks(waits_for_block)?;
            if waits_for_block && (self.under_way() > 0 || self.has_request()) {
                continue;
            }
            let Some(request) = self.sent_requests.pop_front() else {
                if self.queue.is_empty() {
                    return Ok(());
                }
                // This pull holds no file, so other pulls occupy all that the agent may hold.
                if self.state.is_stalled() {
                    let host = self.peer.host().into();
                    return Err(PullError::Full { host });
                }
                std::thread::sleep(FULL_PAUSE);
                self.is_full = false;
                continue;
            };
            match request {
                FileRequest::Open(file_number) => self.receive_opened(file_number)?,
                FileRequest::Sum(file_number, block) => self.receive_sum(file_number, block)?,
                FileRequest::Read(file_number, block) => self.receive_read(file_number, block)?,
                FileRequest::Place(file_number, block, staging) => {
                    self.receive_placed(file_number, block, staging)?
                }
                FileRequest::Check(file_number) => self.receive_checked(file_number)?,
                FileRequest::Release(file_number) => self.receive_released(file_number)?,
            }
        }
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Sends requests until [`IN_FLIGHT`] are outstanding, or none can be sent now.
    fn send_requests(&mut self) -> Result<(), PullError> {
        while self.sent_requests.len() + self.under_way() < IN_FLIGHT {
            let Some(request) = self.next_request() else {
                break;
            };
            let request = self.choose_staging(request);
            let message = self.make_request(request);
            self.peer.send(&message)?;
            self.sent_requests.push_back(request);
        }
        Ok(())
    }

    /// Whether a request about an open file can be sent.
    fn has_request(&self) -> bool {
        !self.urgent.is_empty() || !self.partly_requested.is_empty()
    }

    /// Number of blocks that libfabric is reading.
    fn under_way(&self) -> usize {
        self.remote.as_ref().map_or(0, Remote::under_way)
    }

    /// If bytes are read by libfabric, converts a `Read` to a `Place` with a free staging buffer.
    fn choose_staging(&mut self, request: FileRequest) -> FileRequest {
        match (request, &mut self.remote) {
            (FileRequest::Read(file_number, block), Some(remote)) => {
                let staging = remote.take_staging();
                let staging = staging.expect("there are at least IN_FLIGHT staging buffers");
                FileRequest::Place(file_number, block, staging)
            }
            (request, _) => request,
        }
    }

    /// Returns the next request: an urgent one, or the next block of an open file, or a new file.
    fn next_request(&mut self) -> Option<FileRequest> {
        if let Some(request) = self.urgent.pop_front() {
            return Some(request);
        }
        if let Some(file_number) = self.partly_requested.front().copied() {
            return Some(self.next_block(file_number));
        }
        let open_bytes: u64 = self
            .open_files
            .values()
            .map(|file| file.to_fetch.bytes)
            .sum();
        let may_open = self.open_files.len() < ALWAYS_OPEN_FILES
            || (self.open_files.len() < AHEAD_FILES && open_bytes < AHEAD_BYTES);
        if self.is_full || !may_open {
            return None;
        }
        let to_fetch = self.queue.pop_front()?;
        self.last_file_number += 1;
        let file = OpenFile {
            to_fetch,
            staged: None,
            bytes: 0,
            staged_bytes: 0,
            next_block: 0,
            blocks_left: 0,
            damaged: 0,
            is_newer: false,
        };
        self.open_files.insert(self.last_file_number, file);
        Some(FileRequest::Open(self.last_file_number))
    }

    /// Returns the request for the next block of an open file: for its checksum if an earlier pull wrote the block,
    /// otherwise for its bytes.
    ///
    /// The agent determines the number of blocks of a file. Memory is therefore used only for blocks that are
    /// requested.
    fn next_block(&mut self, file_number: u32) -> FileRequest {
        let file = self
            .open_files
            .get_mut(&file_number)
            .expect("the file is open");
        let block = file.next_block;
        file.next_block += 1;
        let is_staged = block * BLOCK_BYTES + file.block_bytes(block) <= file.staged_bytes;
        if file.next_block == file.bytes.div_ceil(BLOCK_BYTES) {
            self.partly_requested.pop_front();
        }
        if is_staged {
            FileRequest::Sum(file_number, block)
        } else {
            FileRequest::Read(file_number, block)
        }
    }

    /// Makes the protocol message of a request.
    fn make_request(&self, request: FileRequest) -> Request {
        match request {
            FileRequest::Open(file_number) => Request::Open {
                file: file_number,
                path: join(
                    &self.root,
                    self.open_files[&file_number].to_fetch.entry.path.as_path(),
                ),
            },
            FileRequest::Sum(file_number, block) => Request::Sum {
                file: file_number,
                offset: block * BLOCK_BYTES,
                bytes: self.open_files[&file_number].block_bytes(block),
            },
            FileRequest::Read(file_number, block) => Request::Read {
                file: file_number,
                offset: block * BLOCK_BYTES,
                bytes: self.open_files[&file_number].block_bytes(block),
            },
            FileRequest::Place(file_number, block, staging) => Request::Place {
                file: file_number,
                offset: block * BLOCK_BYTES,
                bytes: self.open_files[&file_number].block_bytes(block),
                buffer: staging,
            },
            FileRequest::Check(file_number) => Request::Check { file: file_number },
            FileRequest::Release(file_number) => Request::Release { file: file_number },
        }
    }

    // ---- replies -------------------------------------------------------------------------------

    fn receive_opened(&mut self, file_number: u32) -> Result<(), PullError> {
        let (bytes, changes) = match self.peer.receive()? {
            Reply::Opened { bytes, changes } => (bytes, changes),
            Reply::Full => {
                let file = self
                    .open_files
                    .remove(&file_number)
                    .expect("an answered request names an open file");
                self.queue.push_front(file.to_fetch);
                self.is_full = true;
                return Ok(());
            }
            other => return Err(self.peer.out_of_turn(&other)),
        };
        if bytes > i64::MAX as u64 {
            return Err(self.peer.implausible(format!("a file of {bytes} bytes")));
        }
        let expected_bytes = self.open_files[&file_number].to_fetch.bytes;
        self.state.check_size(expected_bytes, bytes)?;
        let file = self
            .open_files
            .get_mut(&file_number)
            .expect("an answered request names an open file");
        let path = self.staging.locate(&file.to_fetch.entry.path);
        let opened = self.staging.open_file(&file.to_fetch.entry.path)?;
        file.staged_bytes = opened.metadata().map_err(local(&path))?.len();
        let is_direct = self.staging.is_synced() && bytes >= BLOCK_BYTES;
        let direct = is_direct.then(|| DirectFile::open(&opened)).flatten();
        file.staged = Some(StagedFile::new(path, opened, direct));
        file.bytes = bytes;
        file.is_newer = file.to_fetch.entry.is_older_than(changes);
        file.blocks_left = bytes.div_ceil(BLOCK_BYTES);
        self.state.correct_size(file.to_fetch.bytes, bytes);
        file.to_fetch.bytes = bytes;
        match file.blocks_left {
            0 => self.urgent.push_back(FileRequest::Check(file_number)),
            _ => self.partly_requested.push_back(file_number),
        }
        Ok(())
    }

    /// Compares the checksum of a block with the staged bytes. If it differs, requests the block's bytes.
    fn receive_sum(&mut self, file_number: u32, block: u64) -> Result<(), PullError> {
        let (bytes, sum) = match self.peer.receive()? {
            Reply::Sum { bytes, xxh3 } => (bytes, xxh3),
            other => return Err(self.peer.out_of_turn(&other)),
        };
        let file = &self.open_files[&file_number];
        let mut staged_block = vec![0; file.block_bytes(block) as usize];
        let staged = file.staged.as_ref().expect("the file is open");
        let is_same = bytes == staged_block.len() as u64
            && staged
                .file()
                .read_exact_at(&mut staged_block, block * BLOCK_BYTES)
                .is_ok()
            && format!("{:032x}", xxh3_128(&staged_block)) == sum;
        if !is_same {
            self.urgent
                .push_front(FileRequest::Read(file_number, block));
            return Ok(());
        }
        self.state.count_reused(bytes);
        self.end_block(file_number);
        Ok(())
    }

    /// Receives a block and hands it to the writers. A damaged block is requested again.
    fn receive_read(&mut self, file_number: u32, block: u64) -> Result<(), PullError> {
        let mut buffer = self.writers.take_buffer()?;
        let expected_bytes = self.open_files[&file_number].block_bytes(block);
        let has_staged_bytes = self.open_files[&file_number].staged_bytes > block * BLOCK_BYTES;
        let received = self.receive_block(&mut buffer, expected_bytes, has_staged_bytes);
        let received = match received {
            Ok(Some(received)) => received,
            Ok(None) => {
                self.writers.return_buffer(buffer);
                return self.read_again(file_number, block);
            }
            Err(error) => {
                self.writers.return_buffer(buffer);
                return Err(error);
            }
        };
        let staged = self.open_files[&file_number]
            .staged
            .as_ref()
            .expect("the file is open");
        let block = Block {
            offset: block * BLOCK_BYTES,
            buffer,
            parts: received.parts,
        };
        self.writers.write(staged, block);
        self.state.count_received(expected_bytes, received.bytes);
        self.end_block(file_number);
        Ok(())
    }

    /// Receives the bytes of a block into `buffer`. Returns `None` if their MAC is wrong or missing.
    ///
    /// Zeros are written only if the staged file had bytes in this block (`has_staged_bytes`). Otherwise they remain a
    /// hole.
    fn receive_block(
        &mut self,
        buffer: &mut [u8],
        expected_bytes: u64,
        has_staged_bytes: bool,
    ) -> Result<Option<Received>, PullError> {
        let mut received = Received {
            parts: Vec::new(),
            bytes: 0,
        };
        let mut hasher = self.peer.block_hasher();
        let mut position = 0;
        let mut reply = self.peer.receive()?;
        loop {
            let (bytes, is_zero) = match reply {
                Reply::Bytes { bytes } => (bytes, false),
                Reply::Zeros { bytes } => (bytes, true),
                Reply::End { mac } if position == expected_bytes => {
                    let is_right = match (hasher, mac) {
                        (Some(hasher), Some(mac)) => hasher.is(&mac),
                        // Decryption has authenticated each byte on arrival.
                        (None, _) => true,
                        (Some(_), None) => false,
                    };
                    return Ok(is_right.then_some(received));
                }
                // The file is shorter than when it was held, so its chunk list describes an earlier state of the file.
                Reply::End { .. } => {
                    return Err(self.peer.stale("a file was cut while it was read"));
                }
                other => return Err(self.peer.out_of_turn(&other)),
            };
            let part = self.check_part(position, bytes, expected_bytes)?;
            if is_zero {
                buffer[part.clone()].fill(0);
            } else {
                self.receive_part(&mut buffer[part.clone()], hasher.as_mut())?;
                received.bytes += bytes;
            }
            if !is_zero || has_staged_bytes {
                add_part(&mut received.parts, part);
            }
            position += bytes;
            reply = self.peer.receive_more()?;
        }
    }

    /// Returns the range of the buffer for the next `bytes` of a block, which begin at `position` in the block.
    /// `expected_bytes` is the size of the block. Fails if the agent sends no bytes, or more than the block still
    /// needs.
    fn check_part(
        &self,
        position: u64,
        bytes: u64,
        expected_bytes: u64,
    ) -> Result<Range<usize>, PullError> {
        if bytes == 0 || bytes > expected_bytes - position {
            return Err(self.peer.implausible("more bytes than were requested"));
        }
        Ok(position as usize..(position + bytes) as usize)
    }

    /// Receives the addresses of a block in the agent's memory, and begins to read the block by libfabric.
    fn receive_placed(
        &mut self,
        file_number: u32,
        block: u64,
        staging: u32,
    ) -> Result<(), PullError> {
        let mut buffer = self.writers.take_buffer()?;
        let (answer, mac) = match self.receive_places(file_number, block, &mut buffer) {
            Ok(received) => received,
            Err(error) => {
                self.writers.return_buffer(buffer);
                return Err(error);
            }
        };
        let incoming = Incoming::of(&answer, file_number, block, mac);
        let remote = self
            .remote
            .as_mut()
            .expect("Place is sent by libfabric pulls only");
        let begun = remote.begin_reads(staging, answer, incoming, buffer);
        begun.map_err(|error| pull_error(self.peer, error))
    }

    /// Receives the addresses of a block's bytes, and their MAC if MACs were requested.
    ///
    /// Zeros are written only if the staged file had bytes in this block. Otherwise they remain a hole.
    fn receive_places(
        &mut self,
        file_number: u32,
        block: u64,
        buffer: &mut [u8],
    ) -> Result<(Answer, Option<ExpectedMac>), PullError> {
        let file = &self.open_files[&file_number];
        let expected_bytes = file.block_bytes(block);
        let has_staged_bytes = file.staged_bytes > block * BLOCK_BYTES;
        let mut answer = Answer::default();
        let mut position = 0;
        let mut reply = self.peer.receive()?;
        loop {
            let (bytes, is_zero) = match reply {
                Reply::InMemory { bytes, .. } | Reply::Staged { bytes, .. } => (bytes, false),
                Reply::Zeros { bytes } => (bytes, true),
                Reply::Placed { mac } if position == expected_bytes => {
                    return Ok((answer, self.expect_mac(mac)?));
                }
                // The file is shorter than when it was held, so its chunk list describes an earlier state of the file.
                Reply::Placed { .. } => {
                    return Err(self.peer.stale("a file was cut while it was read"));
                }
                other => return Err(self.peer.out_of_turn(&other)),
            };
            let part = self.check_part(position, bytes, expected_bytes)?;
            if is_zero {
                buffer[part.clone()].fill(0);
            } else {
                let remote = self
                    .remote
                    .as_ref()
                    .expect("Place is sent by libfabric pulls only");
                let added = remote.add(&mut answer, &reply, part.clone());
                added.map_err(|error| pull_error(self.peer, error))?;
            }
            if !is_zero || has_staged_bytes {
                add_part(&mut answer.parts, part);
            }
            position += bytes;
            reply = self.peer.receive_more()?;
        }
    }

    /// Returns the MAC that a block must match; `None` if this puller requested no MACs. A missing MAC ends the pull.
    fn expect_mac(&self, mac: Option<BlockMac>) -> Result<Option<ExpectedMac>, PullError> {
        let is_wanted = self.remote.as_ref().is_some_and(Remote::is_summed);
        match (is_wanted, self.peer.block_hasher(), mac) {
            (false, ..) => Ok(None),
            (true, Some(hasher), Some(mac)) => Ok(Some(ExpectedMac { hasher, mac })),
            _ => Err(self.peer.implausible("a block without a MAC")),
        }
    }

    /// Hands all blocks that libfabric has read to the writers. If `waits` and no block has arrived yet, first waits a
    /// short time for one.
    fn write_arrived_blocks(&mut self, mut waits: bool) -> Result<(), PullError> {
        while let Some(remote) = &mut self.remote
            && remote.under_way() > 0
        {
            let arrived = remote.next_landed(waits);
            let arrived = arrived.map_err(|error| pull_error(self.peer, error))?;
            let Some((incoming, buffer)) = arrived else {
                return Ok(());
            };
            waits = false;
            self.write_arrived_block(incoming, buffer)?;
        }
        Ok(())
    }

    /// Hands a block that libfabric has read to the writers. A damaged block is requested again.
    fn write_arrived_block(&mut self, incoming: Incoming, buffer: Buffer) -> Result<(), PullError> {
        let Incoming {
            file_number, block, ..
        } = incoming;
        if !incoming.is_intact(&buffer) {
            self.writers.return_buffer(buffer);
            return self.read_again(file_number, block);
        }
        let file = &self.open_files[&file_number];
        let staged = file.staged.as_ref().expect("the file is open");
        let expected_bytes = file.block_bytes(block);
        let read_bytes = incoming.read_bytes();
        let block = Block {
            offset: block * BLOCK_BYTES,
            buffer,
            parts: incoming.parts,
        };
        self.writers.write(staged, block);
        self.state.count_received(expected_bytes, read_bytes);
        self.end_block(file_number);
        Ok(())
    }

    /// Receives bytes and hashes them while they are in the processor's cache.
    fn receive_part(
        &mut self,
        part: &mut [u8],
        mut hasher: Option<&mut BlockHasher>,
    ) -> Result<(), PullError> {
        for piece in part.chunks_mut(HASH_BYTES) {
            self.peer.receive_bytes(piece)?;
            if let Some(hasher) = &mut hasher {
                hasher.update(piece);
            }
        }
        Ok(())
    }

    /// Requests a damaged block again. If a file has [`TRIES`] damaged blocks, the pull fails.
    fn read_again(&mut self, file_number: u32, block: u64) -> Result<(), PullError> {
        let file = self
            .open_files
            .get_mut(&file_number)
            .expect("the file is open");
        file.damaged += 1;
        self.state.outcome.damaged_blocks += 1;
        if file.damaged >= TRIES {
            return Err(PullError::Corrupt {
                path: file.to_fetch.entry.path.clone(),
                tries: file.damaged,
            });
        }
        self.urgent
            .push_front(FileRequest::Read(file_number, block));
        Ok(())
    }

    /// Counts a block as complete. After the last one the file is checked.
    fn end_block(&mut self, file_number: u32) {
        let file = self
            .open_files
            .get_mut(&file_number)
            .expect("the file is open");
        file.blocks_left -= 1;
        if file.blocks_left == 0 {
            self.urgent.push_back(FileRequest::Check(file_number));
        }
    }

    /// Finishes a file whose bytes are one snapshot. A file that changed during the read is queued again.
    fn receive_checked(&mut self, file_number: u32) -> Result<(), PullError> {
        let (changed, snapshot) = match self.peer.receive()? {
            Reply::Checked { changed, snapshot } => (changed, snapshot),
            other => return Err(self.peer.out_of_turn(&other)),
        };
        // The release is sent before the next `Open`, because it frees memory at the agent.
        self.urgent.push_front(FileRequest::Release(file_number));
        let file = self
            .open_files
            .get_mut(&file_number)
            .expect("the file is open");
        if snapshot {
            let entry = file.to_fetch.entry.clone();
            let staged = file.staged.as_ref().expect("the file is open");
            self.state
                .record_done(&entry, file.bytes, changed || file.is_newer);
            let bytes = file.bytes;
            self.writers.finish(staged, Finish { bytes, entry });
            return Ok(());
        }
        let tries = file.to_fetch.tries + 1;
        if tries >= TRIES {
            return Err(PullError::KeepsChanging {
                host: self.peer.host().into(),
                path: file.to_fetch.entry.path.clone(),
                tries,
            });
        }
        // The next try writes the same file, so all writes of this try must have ended.
        self.writers.wait()?;
        self.state.undo_file(file.bytes);
        self.queue.push_back(FileToFetch {
            entry: file.to_fetch.entry.clone(),
            bytes: file.bytes,
            tries,
        });
        Ok(())
    }

    fn receive_released(&mut self, file_number: u32) -> Result<(), PullError> {
        match self.peer.receive()? {
            Reply::Done => {}
            other => return Err(self.peer.out_of_turn(&other)),
        }
        self.open_files.remove(&file_number);
        self.is_full = false;
        Ok(())
    }
}

impl OpenFile {
    /// Returns the size of a block: [`BLOCK_BYTES`], or the rest of the file for the last block.
    fn block_bytes(&self, block: u64) -> u64 {
        BLOCK_BYTES.min(self.bytes - block * BLOCK_BYTES)
    }
}

/// Adds a range of a block to those to be written.
///
/// If there are fewer than [`HOLE_BYTES_MIN`] zeros between the last range and this one, they are written too. A block
/// therefore has few ranges, even if the agent divided it into many parts.
fn add_part(parts: &mut Vec<Range<usize>>, part: Range<usize>) {
    match parts.last_mut() {
        Some(last) if part.start - last.end < HOLE_BYTES_MIN => last.end = part.end,
        _ => parts.push(part),
    }
}
