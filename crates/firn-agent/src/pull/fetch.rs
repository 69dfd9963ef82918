//! Fetches files from another host over one connection.
//!
//! The other side is the *agent*, which serves the files of its host's mount. The *plan* is its checked list of files.
//! Files are written to the *staging directory*, where the copy is built. Each *block* (1 MiB of a file) is requested
//! separately. Each file needs these requests, in this order:
//!
//! ```text
//!   Open ─► for each block: Sum, Read, or both ─► Check ─► Release
//! ```
//!
//! A block that an earlier pull has written is compared by its checksum (`Sum`). A new block, or one with another sum,
//! is read. `Check` asks whether the file has changed since its `Open`.
//!
//! With libfabric the puller sends `Place` instead of `Read`, and then reads the block directly from the agent's memory
//! ([`FabricReader`]). Such a block arrives after the reply.
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
use std::fs::File;
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
use crate::pull::remote::{
    ArrivedBlock, BlockId, ExpectedMac, FabricReader, PendingBlock, PlaceAnswer, pull_error,
};
use crate::pull::staging::{Staging, local_error};
use crate::pull::state::PullState;
use crate::pull::writers::{Block, Finish, StagedFile, Writers};
use crate::source::join;

/// Maximum number of requests without a reply plus blocks that libfabric is reading. This number keeps agent and
/// network busy.
const IN_FLIGHT: usize = 16;
const _: () = assert!(IN_FLIGHT as u64 <= STAGING_BUFFERS);
/// Maximum number of files that are open at once.
const OPEN_FILES_MAX: usize = 16;
/// Size of all open files together at which no further file is opened.
const OPEN_BYTES_MAX: u64 = 64 << 20;
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
    fabric: Option<FabricReader>,
    state: &'a mut PullState<'t>,
    /// Path of the pulled tree, relative to the mount point of the source.
    root: BytePath,
    /// Files for which no `Open` was sent, or whose `Open` was answered with `Full`.
    queue: VecDeque<FileToFetch>,
    /// Numbers of the open files with blocks that are not requested yet. Blocks of the first one are requested now.
    partly_requested: VecDeque<u32>,
    /// Requests that are sent before the next block of `partly_requested`: repeated blocks, `Check` and `Release`.
    urgent_requests: VecDeque<FileRequest>,
    /// Requests that were sent and have no reply yet, oldest first.
    sent_requests: VecDeque<FileRequest>,
    /// Files whose `Open` was sent and whose `Release` was not answered, by the number that both sides use.
    open_files: BTreeMap<u32, OpenFile>,
    last_file_number: u32,
    /// Whether the agent answered `Full`. If so, no file is opened until a file of this pull is released, or
    /// [`FULL_PAUSE`] is over.
    is_agent_full: bool,
}

/// A file that is to be fetched, with the results of earlier tries.
pub(crate) struct FileToFetch {
    pub(crate) entry: Entry,
    /// Size in the list, or in the last reply to `Open` if there was one.
    pub(crate) bytes: u64,
    /// Number of complete reads that did not yield a snapshot.
    pub(crate) tries: u32,
}

/// A file that is open at the agent, or for which an `Open` was sent.
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
    incomplete_blocks: u64,
    /// Number of blocks that arrived damaged.
    damaged_blocks: u32,
    /// Whether the file was changed between the list and the `Open`.
    is_newer: bool,
}

/// A request about a file, which is given by its number, or about a block.
#[derive(Clone, Copy, Debug)]
enum FileRequest {
    Open(u32),
    Sum(BlockId),
    Read(BlockId),
    /// Requests the address of a block's bytes.
    Place {
        block: BlockId,
        /// Staging buffer for bytes that are not in memory.
        staging_buffer: u32,
    },
    Check(u32),
    Release(u32),
}

/// A block that was received over the connection.
#[derive(Default)]
struct ReceivedBlock {
    /// Ranges of the buffer to write to the file.
    write_ranges: Vec<Range<usize>>,
    /// Number of bytes that were received over the network. Zeros are not sent.
    network_bytes: u64,
}

impl OpenFile {
    fn new(to_fetch: FileToFetch) -> Self {
        Self {
            to_fetch,
            staged: None,
            bytes: 0,
            staged_bytes: 0,
            next_block: 0,
            incomplete_blocks: 0,
            damaged_blocks: 0,
            is_newer: false,
        }
    }

    /// Records the reply to `Open`: the file's size and number of changes at the agent. Opens the file in the staging
    /// directory.
    fn set_opened(
        &mut self,
        staging: &Staging,
        bytes: u64,
        changes: Option<u64>,
    ) -> Result<(), PullError> {
        self.bytes = bytes;
        self.open_staged(staging)?;
        // If the file was changed between the list and the `Open`, the result of the pull names it as changed.
        self.is_newer = self.to_fetch.entry.is_older_than(changes);
        self.incomplete_blocks = bytes.div_ceil(BLOCK_BYTES);
        self.to_fetch.bytes = bytes;
        Ok(())
    }

    /// Opens the file in the staging directory. The size at the source must be known.
    fn open_staged(&mut self, staging: &Staging) -> Result<(), PullError> {
        let path = &self.to_fetch.entry.path;
        let staged_path = staging.locate(path);
        let file = staging.open_file(path)?;
        let metadata = file.metadata().map_err(local_error(&staged_path))?;
        // Only files of a block or more that are synced at their end are written past the page cache.
        let direct = if staging.is_synced() && self.bytes >= BLOCK_BYTES {
            DirectFile::open(&file)
        } else {
            None
        };
        self.staged_bytes = metadata.len();
        self.staged = Some(StagedFile::new(staged_path, file, direct));
        Ok(())
    }

    /// Returns the staged file. `Open` must have been answered.
    fn staged(&self) -> &Arc<StagedFile> {
        self.staged.as_ref().expect("the file is open")
    }

    /// Returns the size of a block: [`BLOCK_BYTES`], or the remaining bytes of the file for the last block.
    fn block_bytes(&self, block: BlockId) -> u64 {
        BLOCK_BYTES.min(self.bytes - block.offset())
    }

    /// Whether an earlier pull has written any byte of a block.
    fn has_staged_bytes(&self, block: BlockId) -> bool {
        self.staged_bytes > block.offset()
    }

    /// Whether an earlier pull has written all bytes of a block.
    fn is_staged(&self, block: BlockId) -> bool {
        block.offset() + self.block_bytes(block) <= self.staged_bytes
    }
}

impl<'a, 't> Fetch<'a, 't> {
    /// Prepares to fetch the files of `queue` from the other host `peer`. No request is sent before [`Fetch::run`].
    ///
    /// `root` is the path of the copied tree on that host. `staging` is the directory in which the copy is built, and
    /// `writers` are the threads that write there. With `fabric`, bytes are read by libfabric (RDMA).
    pub(crate) fn new(
        peer: &'a mut Peer,
        staging: &'a Staging,
        writers: &'a Writers,
        fabric: Option<FabricReader>,
        state: &'a mut PullState<'t>,
        root: BytePath,
        queue: VecDeque<FileToFetch>,
    ) -> Self {
        Self {
            peer,
            staging,
            writers,
            fabric,
            state,
            root,
            queue,
            partly_requested: VecDeque::new(),
            urgent_requests: VecDeque::new(),
            sent_requests: VecDeque::new(),
            open_files: BTreeMap::new(),
            last_file_number: 0,
            is_agent_full: false,
        }
    }

    /// Fetches all files. Returns when all blocks are handed to the writers, which may still be writing.
    pub(crate) fn run(mut self) -> Result<(), PullError> {
        let fetched = self.fetch_all();
        if let Some(fabric) = self.fabric.take() {
            let closed = fabric.close(self.writers);
            closed.map_err(|error| pull_error(self.peer, error))?;
        }
        fetched
    }

    /// Sends requests to the agent (the process that serves files on the other host) and receives replies, until all
    /// files are fetched. All blocks are then handed to the threads that write them.
    ///
    /// Fails with `Full` if the agent holds its maximum of bytes for others, and this pull made no progress for long.
    fn fetch_all(&mut self) -> Result<(), PullError> {
        loop {
            self.send_requests()?;
            // Each iteration waits for one thing at most: a reply, a block that libfabric (RDMA) is reading, or space
            // at the agent. A reply has precedence: while one is outstanding, the thread does not wait for a block.
            let is_reply_outstanding = !self.sent_requests.is_empty();
            self.write_arrived_blocks(!is_reply_outstanding)?;
            if !is_reply_outstanding && (self.pending_blocks() > 0 || self.has_request()) {
                continue;
            }
            if let Some(request) = self.sent_requests.pop_front() {
                self.receive_reply(request)?;
                continue;
            }
            // No file is open. Either all are fetched, or the agent was full at each `Open`.
            if self.queue.is_empty() {
                return Ok(());
            }
            // This pull holds no file, so other pulls occupy all that the agent may hold.
            if self.state.is_stalled() {
                let host = self.peer.host().into();
                return Err(PullError::Full { host });
            }
            std::thread::sleep(FULL_PAUSE);
            // The agent may hold fewer bytes by now, so it is asked again.
            self.is_agent_full = false;
        }
    }

    /// Returns an open file, or one whose `Open` was sent.
    fn open_file(&mut self, file_number: u32) -> &mut OpenFile {
        let file = self.open_files.get_mut(&file_number);
        file.expect("a request names an open file")
    }

    // ---- requests ------------------------------------------------------------------------------

    /// Sends requests until [`IN_FLIGHT`] are outstanding, or none can be sent now.
    fn send_requests(&mut self) -> Result<(), PullError> {
        while self.sent_requests.len() + self.pending_blocks() < IN_FLIGHT {
            let Some(request) = self.next_request() else {
                break;
            };
            let request = self.replace_read_by_place(request);
            let message = self.make_message(request);
            self.peer.send(&message)?;
            self.sent_requests.push_back(request);
        }
        Ok(())
    }

    /// Whether a request about an open file can be sent.
    fn has_request(&self) -> bool {
        !self.urgent_requests.is_empty() || !self.partly_requested.is_empty()
    }

    /// Number of blocks that libfabric is reading.
    fn pending_blocks(&self) -> usize {
        self.fabric.as_ref().map_or(0, FabricReader::pending_blocks)
    }

    /// If bytes are read by libfabric, converts a `Read` to a `Place` with a free staging buffer.
    fn replace_read_by_place(&mut self, request: FileRequest) -> FileRequest {
        match (request, &mut self.fabric) {
            (FileRequest::Read(block), Some(fabric)) => {
                let staging_buffer = fabric
                    .take_staging_buffer()
                    .expect("there are at least IN_FLIGHT staging buffers");
                FileRequest::Place {
                    block,
                    staging_buffer,
                }
            }
            _ => request,
        }
    }

    /// Returns the next request to the other host: an urgent one, or for the next block of an open file, or to open a
    /// new file.
    ///
    /// Returns `None` if nothing can be requested now: all files are open, or enough of them, or the other host holds
    /// its maximum of bytes.
    fn next_request(&mut self) -> Option<FileRequest> {
        if let Some(request) = self.urgent_requests.pop_front() {
            return Some(request);
        }
        if let Some(&file_number) = self.partly_requested.front() {
            return Some(self.next_block_request(file_number));
        }
        if self.is_agent_full || !self.may_open_another_file() {
            return None;
        }
        let to_fetch = self.queue.pop_front()?;
        self.last_file_number += 1;
        self.open_files
            .insert(self.last_file_number, OpenFile::new(to_fetch));
        Some(FileRequest::Open(self.last_file_number))
    }

    /// Whether the open files are few and small enough that one more may be opened.
    fn may_open_another_file(&self) -> bool {
        let file_count = self.open_files.len();
        if file_count < ALWAYS_OPEN_FILES {
            return true;
        }
        let open_files = self.open_files.values();
        let open_bytes: u64 = open_files.map(|file| file.to_fetch.bytes).sum();
        file_count < OPEN_FILES_MAX && open_bytes < OPEN_BYTES_MAX
    }

    /// Returns the request for the next block (1 MiB) of an open file: for its checksum if an earlier pull wrote the
    /// block, otherwise for its bytes. After the last block, the file leaves the queue of partly requested ones.
    fn next_block_request(&mut self, file_number: u32) -> FileRequest {
        let file = self.open_file(file_number);
        let block = BlockId {
            file_number,
            index: file.next_block,
        };
        file.next_block += 1;
        let is_from_earlier_pull = file.is_staged(block);
        let is_last_block = file.next_block == file.bytes.div_ceil(BLOCK_BYTES);
        if is_last_block {
            self.partly_requested.pop_front();
        }
        if is_from_earlier_pull {
            FileRequest::Sum(block)
        } else {
            FileRequest::Read(block)
        }
    }

    /// Makes the protocol message of a request about an open file or one of its blocks. Both hosts know the file by a
    /// number, which this host has chosen.
    fn make_message(&self, request: FileRequest) -> Request {
        let block_bytes = |block: BlockId| self.open_files[&block.file_number].block_bytes(block);
        match request {
            FileRequest::Open(file_number) => {
                let entry = &self.open_files[&file_number].to_fetch.entry;
                Request::Open {
                    file: file_number,
                    path: join(&self.root, entry.path.as_path()),
                }
            }
            FileRequest::Sum(block) => Request::Sum {
                file: block.file_number,
                offset: block.offset(),
                bytes: block_bytes(block),
            },
            FileRequest::Read(block) => Request::Read {
                file: block.file_number,
                offset: block.offset(),
                bytes: block_bytes(block),
            },
            FileRequest::Place {
                block,
                staging_buffer,
            } => Request::Place {
                file: block.file_number,
                offset: block.offset(),
                bytes: block_bytes(block),
                buffer: staging_buffer,
            },
            FileRequest::Check(file_number) => Request::Check { file: file_number },
            FileRequest::Release(file_number) => Request::Release { file: file_number },
        }
    }

    // ---- replies -------------------------------------------------------------------------------

    /// Receives and handles the reply to a request.
    fn receive_reply(&mut self, request: FileRequest) -> Result<(), PullError> {
        match request {
            FileRequest::Open(file_number) => self.receive_opened(file_number),
            FileRequest::Sum(block) => self.receive_sum(block),
            FileRequest::Read(block) => self.receive_read(block),
            FileRequest::Place {
                block,
                staging_buffer,
            } => self.receive_placed(block, staging_buffer),
            FileRequest::Check(file_number) => self.receive_checked(file_number),
            FileRequest::Release(file_number) => self.receive_released(file_number),
        }
    }

    /// Receives the reply to `Open`. If the other host has opened the file, opens the file of the copy in the staging
    /// directory, and lets the blocks be requested.
    ///
    /// If the other host already holds its maximum of bytes (`Full`), puts the file back into the queue. No further
    /// file is then opened until one is released. Fails if the file has an impossible size.
    fn receive_opened(&mut self, file_number: u32) -> Result<(), PullError> {
        let (bytes, changes) = match self.peer.receive()? {
            Reply::Opened { bytes, changes } => (bytes, changes),
            Reply::Full => {
                let file = self.open_files.remove(&file_number);
                let file = file.expect("an answered request names an open file");
                self.queue.push_front(file.to_fetch);
                self.is_agent_full = true;
                return Ok(());
            }
            unexpected => return Err(self.peer.out_of_turn(&unexpected)),
        };
        // A file on Linux cannot be longer, so no correct agent sends this.
        if bytes > i64::MAX as u64 {
            return Err(self.peer.implausible(format!("a file of {bytes} bytes")));
        }
        let expected_bytes = self.open_files[&file_number].to_fetch.bytes;
        // The file may have grown since the list: the limit for the whole copy is checked again.
        self.state.check_size(expected_bytes, bytes)?;
        let staging = self.staging;
        let file = self.open_file(file_number);
        file.set_opened(staging, bytes, changes)?;
        let is_empty = file.incomplete_blocks == 0;
        self.state.correct_size(expected_bytes, bytes);
        // An empty file has no block, so its `Check` is sent now. Otherwise it follows the last block.
        if is_empty {
            self.urgent_requests
                .push_back(FileRequest::Check(file_number));
        } else {
            self.partly_requested.push_back(file_number);
        }
        Ok(())
    }

    /// Compares the checksum of a block with the staged bytes. If it differs, requests the block's bytes.
    fn receive_sum(&mut self, block: BlockId) -> Result<(), PullError> {
        let (bytes, sum) = match self.peer.receive()? {
            Reply::Sum { bytes, xxh3 } => (bytes, xxh3),
            unexpected => return Err(self.peer.out_of_turn(&unexpected)),
        };
        let file = &self.open_files[&block.file_number];
        let block_bytes = file.block_bytes(block);
        if bytes != block_bytes || !has_sum(file.staged().file(), block, block_bytes, &sum) {
            self.urgent_requests.push_front(FileRequest::Read(block));
            return Ok(());
        }
        self.state.count_reused(bytes);
        self.complete_block(block.file_number);
        Ok(())
    }

    /// Receives a block (up to 1 MiB of a file) over the connection, and hands it to the threads that write it. A block
    /// that was damaged on the way is requested again.
    fn receive_read(&mut self, block: BlockId) -> Result<(), PullError> {
        let mut buffer = self.writers.take_buffer()?;
        let received = match self.receive_block(&mut buffer, block) {
            Ok(Some(received)) => received,
            Ok(None) => {
                self.writers.return_buffer(buffer);
                return self.request_again(block);
            }
            Err(error) => {
                self.writers.return_buffer(buffer);
                return Err(error);
            }
        };
        self.write_block(block, buffer, received.write_ranges, received.network_bytes);
        Ok(())
    }

    /// Receives the bytes of a block (up to 1 MiB of a file) into `buffer`. Returns `None` if their message
    /// authentication code (MAC) is wrong or missing. Fails if the replies do not add up to the block.
    ///
    /// Zeros are written only if the file of the copy had bytes in this block before. Otherwise they remain a hole.
    fn receive_block(
        &mut self,
        buffer: &mut [u8],
        block: BlockId,
    ) -> Result<Option<ReceivedBlock>, PullError> {
        let file = &self.open_files[&block.file_number];
        let block_bytes = file.block_bytes(block);
        let has_staged_bytes = file.has_staged_bytes(block);
        let mut received = ReceivedBlock::default();
        let mut hasher = self.peer.block_hasher();
        let mut position = 0;
        let mut reply = self.peer.receive()?;
        loop {
            let (bytes, are_zeros) = match reply {
                Reply::Bytes { bytes } => (bytes, false),
                Reply::Zeros { bytes } => (bytes, true),
                Reply::End { mac } if position == block_bytes => {
                    let is_intact = match (hasher, mac) {
                        (Some(hasher), Some(mac)) => hasher.matches(&mac),
                        // Decryption has authenticated each byte on arrival.
                        (None, _) => true,
                        (Some(_), None) => false,
                    };
                    return Ok(is_intact.then_some(received));
                }
                Reply::End { .. } => return Err(self.shortened_file_error()),
                unexpected => return Err(self.peer.out_of_turn(&unexpected)),
            };
            let range = self.check_part(position, bytes, block_bytes)?;
            if are_zeros {
                buffer[range.clone()].fill(0);
            } else {
                self.receive_part(&mut buffer[range.clone()], hasher.as_mut())?;
                received.network_bytes += bytes;
            }
            if !are_zeros || has_staged_bytes {
                add_range(&mut received.write_ranges, range);
            }
            position += bytes;
            reply = self.peer.receive_more()?;
        }
    }

    /// Makes the error of a file that is shorter than when it was held. Its chunk list describes an earlier state.
    fn shortened_file_error(&self) -> PullError {
        self.peer.stale("a file was cut while it was read")
    }

    /// Returns the range of the buffer for the next part of a block, which has `bytes` and begins at `position`. Fails
    /// if the part is empty, or longer than the block still needs.
    fn check_part(
        &self,
        position: u64,
        bytes: u64,
        block_bytes: u64,
    ) -> Result<Range<usize>, PullError> {
        if bytes == 0 || bytes > block_bytes - position {
            return Err(self.peer.implausible("more bytes than were requested"));
        }
        Ok(position as usize..(position + bytes) as usize)
    }

    /// Receives bytes and hashes them while they are in the processor's cache.
    fn receive_part(
        &mut self,
        part: &mut [u8],
        mut hasher: Option<&mut BlockHasher>,
    ) -> Result<(), PullError> {
        for chunk in part.chunks_mut(HASH_BYTES) {
            self.peer.receive_bytes(chunk)?;
            if let Some(hasher) = &mut hasher {
                hasher.update(chunk);
            }
        }
        Ok(())
    }

    /// Receives the addresses of a block in the agent's memory, and begins to read the block by libfabric.
    fn receive_placed(&mut self, block: BlockId, staging_buffer: u32) -> Result<(), PullError> {
        let mut buffer = self.writers.take_buffer()?;
        let answer = match self.receive_addresses(block, &mut buffer) {
            Ok(answer) => answer,
            Err(error) => {
                self.writers.return_buffer(buffer);
                return Err(error);
            }
        };
        let begun = self
            .fabric_reader()
            .begin_block(block, answer, staging_buffer, buffer);
        begun.map_err(|error| pull_error(self.peer, error))
    }

    /// Returns the reader of a pull by libfabric. Only such a pull sends `Place`.
    fn fabric_reader(&mut self) -> &mut FabricReader {
        let fabric = self.fabric.as_mut();
        fabric.expect("Place is sent by libfabric pulls only")
    }

    /// Receives the addresses of a block's bytes in the other host's memory, from which libfabric (RDMA) then reads
    /// them into `buffer`. Also receives their message authentication code (MAC) if MACs were requested.
    ///
    /// Zeros are written only if the file of the copy had bytes in this block before. Otherwise they remain a hole.
    /// Fails if the parts do not add up to the block, which means that the file was shortened.
    fn receive_addresses(
        &mut self,
        block: BlockId,
        buffer: &mut [u8],
    ) -> Result<PlaceAnswer, PullError> {
        let file = &self.open_files[&block.file_number];
        let block_bytes = file.block_bytes(block);
        let has_staged_bytes = file.has_staged_bytes(block);
        let mut answer = PlaceAnswer::default();
        let mut position = 0;
        let mut reply = self.peer.receive()?;
        loop {
            let (bytes, are_zeros) = match reply {
                Reply::InMemory { bytes, .. } | Reply::Staged { bytes, .. } => (bytes, false),
                Reply::Zeros { bytes } => (bytes, true),
                Reply::Placed { mac } if position == block_bytes => {
                    answer.mac = self.expected_mac(mac)?;
                    return Ok(answer);
                }
                Reply::Placed { .. } => return Err(self.shortened_file_error()),
                unexpected => return Err(self.peer.out_of_turn(&unexpected)),
            };
            let range = self.check_part(position, bytes, block_bytes)?;
            if are_zeros {
                buffer[range.clone()].fill(0);
            } else {
                let added = self
                    .fabric_reader()
                    .add_reply(&mut answer, &reply, range.clone());
                added.map_err(|error| pull_error(self.peer, error))?;
            }
            if !are_zeros || has_staged_bytes {
                add_range(&mut answer.write_ranges, range);
            }
            position += bytes;
            reply = self.peer.receive_more()?;
        }
    }

    /// Returns the MAC that a block must match; `None` if this puller requested no MACs. A missing MAC ends the pull.
    fn expected_mac(&self, mac: Option<BlockMac>) -> Result<Option<ExpectedMac>, PullError> {
        let is_required = self
            .fabric
            .as_ref()
            .is_some_and(FabricReader::requires_macs);
        if !is_required {
            return Ok(None);
        }
        match (self.peer.block_hasher(), mac) {
            (Some(hasher), Some(mac)) => Ok(Some(ExpectedMac { hasher, mac })),
            _ => Err(self.peer.implausible("a block without a MAC")),
        }
    }

    /// Hands all blocks that libfabric has read to the writers. If `may_wait` and no block has arrived yet, first waits
    /// a short time for one.
    fn write_arrived_blocks(&mut self, mut may_wait: bool) -> Result<(), PullError> {
        while let Some(fabric) = &mut self.fabric
            && fabric.pending_blocks() > 0
        {
            let arrived = fabric.next_arrived_block(may_wait);
            let arrived = arrived.map_err(|error| pull_error(self.peer, error))?;
            let Some(ArrivedBlock { pending, buffer }) = arrived else {
                return Ok(());
            };
            may_wait = false;
            self.write_arrived_block(pending, buffer)?;
        }
        Ok(())
    }

    /// Hands a block that libfabric has read to the writers. A damaged block is requested again.
    fn write_arrived_block(
        &mut self,
        pending: PendingBlock,
        buffer: Buffer,
    ) -> Result<(), PullError> {
        if !pending.is_intact(&buffer) {
            self.writers.return_buffer(buffer);
            return self.request_again(pending.block);
        }
        let network_bytes = pending.read_bytes();
        self.write_block(pending.block, buffer, pending.write_ranges, network_bytes);
        Ok(())
    }

    /// Hands an authenticated block (up to 1 MiB of a file) to the threads that write it, and counts it. The other
    /// bytes than `network_bytes` were zeros, which are not sent. After the last block of a file, the file is checked.
    fn write_block(
        &mut self,
        block: BlockId,
        buffer: Buffer,
        write_ranges: Vec<Range<usize>>,
        network_bytes: u64,
    ) {
        let file = &self.open_files[&block.file_number];
        let block_bytes = file.block_bytes(block);
        let received_block = Block {
            offset: block.offset(),
            buffer,
            write_ranges,
        };
        self.writers.write(file.staged(), received_block);
        self.state.count_received(block_bytes, network_bytes);
        self.complete_block(block.file_number);
    }

    /// Requests a damaged block again. If a file has [`TRIES`] damaged blocks, the pull fails.
    fn request_again(&mut self, block: BlockId) -> Result<(), PullError> {
        self.state.outcome.damaged_blocks += 1;
        let file = self.open_file(block.file_number);
        file.damaged_blocks += 1;
        if file.damaged_blocks >= TRIES {
            return Err(PullError::Corrupt {
                path: file.to_fetch.entry.path.clone(),
                tries: file.damaged_blocks,
            });
        }
        self.urgent_requests.push_front(FileRequest::Read(block));
        Ok(())
    }

    /// Counts a block as complete. After the last one the file is checked.
    fn complete_block(&mut self, file_number: u32) {
        let file = self.open_file(file_number);
        file.incomplete_blocks -= 1;
        if file.incomplete_blocks == 0 {
            self.urgent_requests
                .push_back(FileRequest::Check(file_number));
        }
    }

    /// Finishes a file whose bytes are one snapshot. A file that changed during the read is queued again.
    fn receive_checked(&mut self, file_number: u32) -> Result<(), PullError> {
        let (has_changed, is_snapshot) = match self.peer.receive()? {
            Reply::Checked { changed, snapshot } => (changed, snapshot),
            unexpected => return Err(self.peer.out_of_turn(&unexpected)),
        };
        // The release is sent before the next `Open`, because it frees memory at the agent.
        self.urgent_requests
            .push_front(FileRequest::Release(file_number));
        if is_snapshot {
            self.finish_file(file_number, has_changed);
            Ok(())
        } else {
            self.queue_file_again(file_number)
        }
    }

    /// Records a file as complete, and lets the writers set its length, mode and time.
    fn finish_file(&mut self, file_number: u32, has_changed: bool) {
        let file = &self.open_files[&file_number];
        let entry = file.to_fetch.entry.clone();
        let bytes = file.bytes;
        let has_changed = has_changed || file.is_newer;
        self.state.record_complete(&entry, bytes, has_changed);
        let finish = Finish { bytes, entry };
        self.writers.finish(file.staged(), finish);
    }

    /// Queues a file again that changed while it was read, so that the bytes were not one state (a snapshot). After
    /// [`TRIES`] such reads the pull fails.
    fn queue_file_again(&mut self, file_number: u32) -> Result<(), PullError> {
        let file = &self.open_files[&file_number];
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
        self.state.uncount_file(file.bytes);
        self.queue.push_back(FileToFetch {
            entry: file.to_fetch.entry.clone(),
            bytes: file.bytes,
            tries,
        });
        Ok(())
    }

    /// Forgets a file that the agent has released. The agent may then have memory for another file.
    fn receive_released(&mut self, file_number: u32) -> Result<(), PullError> {
        match self.peer.receive()? {
            Reply::Done => {}
            unexpected => return Err(self.peer.out_of_turn(&unexpected)),
        }
        self.open_files.remove(&file_number);
        self.is_agent_full = false;
        Ok(())
    }
}

/// Whether a block of a file can be read and has this checksum (XXH3, in hexadecimal digits).
fn has_sum(file: &File, block: BlockId, block_bytes: u64, sum: &str) -> bool {
    let mut staged_block = vec![0; block_bytes as usize];
    let read = file.read_exact_at(&mut staged_block, block.offset());
    read.is_ok() && format!("{:032x}", xxh3_128(&staged_block)) == sum
}

/// Adds a range of a block to those to be written.
///
/// If there are fewer than [`HOLE_BYTES_MIN`] zeros between the last range and this one, they are written too. A block
/// therefore has few ranges, even if the agent divided it into many parts.
fn add_range(ranges: &mut Vec<Range<usize>>, range: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if range.start - last.end < HOLE_BYTES_MIN => last.end = range.end,
        _ => ranges.push(range),
    }
}
