//! Files of a plan, over one connection.
//!
//! ```text
//!   queue ─► Open ─► Sum for each block that is there already ─► Read for each that differs or is not ─► Check ─► Release
//! ```
//!
//! Where the puller reads memory by itself, `Place` is asked instead of `Read`, and a block comes later than its answer
//! ([`Remote`]).
//!
//! Requests go ahead of their answers: while one block arrives, the agent has the next ones asked for, and while a file
//! ends, the next one is open. Answers come in the order of the requests.
//!
//! Invariants
//! * A block is handed to the writers after it was found to be what the agent sent: by its MAC, or as it was decrypted.
//! * What an agent says is bounded before it takes memory: a block has few parts, and a file that is open a counter.
//! * A file is finished after the agent has said, after its last byte had been read, that what was read is a snapshot.

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
use crate::pull::remote::{Answer, ExpectedMac, Incoming, Remote, failed};
use crate::pull::staging::{Staging, local};
use crate::pull::state::PullState;
use crate::pull::writers::{Block, Finish, StagedFile, Writers};
use crate::source::join;

/// Requests without an answer yet, and blocks that are read: enough that the agent, or the network, always has the next.
const IN_FLIGHT: usize = 16;
const _: () = assert!(IN_FLIGHT as u64 <= STAGING_BUFFERS);
/// Files that are open ahead of the one that arrives, in number and in bytes.
const AHEAD_FILES: usize = 16;
const AHEAD_BYTES: u64 = 64 << 20;
/// How often a file is read that changes while it is read and keeps no snapshot, and a block that arrives damaged.
const TRIES: u32 = 5;
/// Until an agent that holds as much as it may for others is asked again.
const FULL_PAUSE: Duration = Duration::from_millis(200);
/// Zeros that may become a hole: fewer are no block of a file system.
const HOLE_BYTES_MIN: usize = 4096;
/// Bytes that are summed up while they are in the processor's cache.
const SUM_BYTES: usize = 256 << 10;

/// The reads of a pull; see the head of this file.
pub(crate) struct Fetch<'a, 't> {
    peer: &'a mut Peer,
    staging: &'a Staging,
    writers: &'a Writers,
    /// None: bytes come over the connection.
    remote: Option<Remote>,
    state: &'a mut PullState<'t>,
    /// Path below the mount point of what is pulled.
    top: BytePath,
    /// Files that are not opened yet.
    queue: VecDeque<Wanted>,
    /// Open files of which there are blocks to ask for.
    reading: VecDeque<u32>,
    /// To be asked before those.
    ready: VecDeque<Ask>,
    /// Asked, in this order.
    asked: VecDeque<Ask>,
    open: BTreeMap<u32, OpenFile>,
    last_number: u32,
    /// The agent holds as much as it may.
    is_full: bool,
}

/// A file that is to be pulled.
pub(crate) struct Wanted {
    pub(crate) entry: Entry,
    /// As far as is known.
    pub(crate) bytes: u64,
    /// How often it was read.
    pub(crate) tries: u32,
}

struct OpenFile {
    wanted: Wanted,
    /// None until it is opened.
    staged: Option<Arc<StagedFile>>,
    /// Length of the file where it is held.
    bytes: u64,
    /// What was there before.
    staged_bytes: u64,
    /// The first block that was not asked for yet.
    next_block: u64,
    /// Blocks of which neither an equal sum nor the bytes have come.
    blocks_left: u64,
    damaged: u32,
    /// It was written to after it was listed and before it was opened.
    is_newer: bool,
}

/// A question about a file.
#[derive(Clone, Copy, Debug)]
enum Ask {
    Open(u32),
    Sum(u32, u64),
    Read(u32, u64),
    /// A question for the place of bytes, with a staging buffer.
    Place(u32, u64, u32),
    Check(u32),
    Release(u32),
}

/// What came of a block.
struct Received {
    parts: Vec<Range<usize>>,
    bytes: u64,
}

impl<'a, 't> Fetch<'a, 't> {
    /// Nothing is asked yet.
    pub(crate) fn new(
        peer: &'a mut Peer,
        staging: &'a Staging,
        writers: &'a Writers,
        remote: Option<Remote>,
        state: &'a mut PullState<'t>,
        top: BytePath,
        queue: VecDeque<Wanted>,
    ) -> Self {
        Self {
            peer,
            staging,
            writers,
            remote,
            state,
            top,
            queue,
            reading: VecDeque::new(),
            ready: VecDeque::new(),
            asked: VecDeque::new(),
            open: BTreeMap::new(),
            last_number: 0,
            is_full: false,
        }
    }

    /// Until all files are there.
    pub(crate) fn run(mut self) -> Result<(), PullError> {
        let fetched = self.fetch_all();
        let Some(remote) = self.remote.take() else {
            return fetched;
        };
        let closed = remote.close(self.writers);
        closed.map_err(|error| failed(self.peer, error))?;
        fetched
    }

    fn fetch_all(&mut self) -> Result<(), PullError> {
        loop {
            self.ask()?;
            // Without an answer to wait for, there are blocks to wait for.
            let is_over = self.asked.is_empty();
            self.take_landed(is_over)?;
            if is_over && (self.under_way() > 0 || self.has_ready()) {
                continue;
            }
            let Some(ask) = self.asked.pop_front() else {
                if self.queue.is_empty() {
                    return Ok(());
                }
                // Only others keep the agent full now.
                if self.state.is_late() {
                    let host = self.peer.host().into();
                    return Err(PullError::Full { host });
                }
                std::thread::sleep(FULL_PAUSE);
                self.is_full = false;
                continue;
            };
            match ask {
                Ask::Open(number) => self.opened(number)?,
                Ask::Sum(number, block) => self.summed(number, block)?,
                Ask::Read(number, block) => self.read(number, block)?,
                Ask::Place(number, block, staging) => self.placed(number, block, staging)?,
                Ask::Check(number) => self.checked(number)?,
                Ask::Release(number) => self.released(number)?,
            }
        }
    }

    // ---- requests ------------------------------------------------------------------------------

    fn ask(&mut self) -> Result<(), PullError> {
        while self.asked.len() + self.under_way() < IN_FLIGHT {
            let Some(ask) = self.next_ask() else {
                break;
            };
            let ask = self.choose_staging(ask);
            let request = self.request(ask);
            self.peer.send(&request)?;
            self.asked.push_back(ask);
        }
        Ok(())
    }

    /// Whether there is something to ask for of files that are open.
    fn has_ready(&self) -> bool {
        !self.ready.is_empty() || !self.reading.is_empty()
    }

    fn under_way(&self) -> usize {
        self.remote.as_ref().map_or(0, Remote::under_way)
    }

    fn choose_staging(&mut self, ask: Ask) -> Ask {
        match (ask, &mut self.remote) {
            (Ask::Read(number, block), Some(remote)) => {
                let staging = remote.take_staging();
                let staging = staging.expect("as many as may be asked at once");
                Ask::Place(number, block, staging)
            }
            (ask, _) => ask,
        }
    }

    fn next_ask(&mut self) -> Option<Ask> {
        if let Some(ask) = self.ready.pop_front() {
            return Some(ask);
        }
        if let Some(number) = self.reading.front().copied() {
            return Some(self.next_block(number));
        }
        let ahead: u64 = self.open.values().map(|file| file.wanted.bytes).sum();
        let may_open =
            self.open.len() < 2 || (self.open.len() < AHEAD_FILES && ahead < AHEAD_BYTES);
        if self.is_full || !may_open {
            return None;
        }
        let wanted = self.queue.pop_front()?;
        self.last_number += 1;
        let file = OpenFile {
            wanted,
            staged: None,
            bytes: 0,
            staged_bytes: 0,
            next_block: 0,
            blocks_left: 0,
            damaged: 0,
            is_newer: false,
        };
        self.open.insert(self.last_number, file);
        Some(Ask::Open(self.last_number))
    }

    /// The question about the next block of the file that is read first. A file has as many blocks as its agent says, so
    /// none of them takes memory before it is asked for.
    fn next_block(&mut self, number: u32) -> Ask {
        let file = self.open.get_mut(&number).expect("it is open");
        let block = file.next_block;
        file.next_block += 1;
        let is_there = block * BLOCK_BYTES + file.block_bytes(block) <= file.staged_bytes;
        if file.next_block == file.bytes.div_ceil(BLOCK_BYTES) {
            self.reading.pop_front();
        }
        if is_there {
            Ask::Sum(number, block)
        } else {
            Ask::Read(number, block)
        }
    }

    fn request(&self, ask: Ask) -> Request {
        match ask {
            Ask::Open(number) => Request::Open {
                file: number,
                path: join(&self.top, self.open[&number].wanted.entry.path.as_path()),
            },
            Ask::Sum(number, block) => Request::Sum {
                file: number,
                offset: block * BLOCK_BYTES,
                bytes: self.open[&number].block_bytes(block),
            },
            Ask::Read(number, block) => Request::Read {
                file: number,
                offset: block * BLOCK_BYTES,
                bytes: self.open[&number].block_bytes(block),
            },
            Ask::Place(number, block, staging) => Request::Place {
                file: number,
                offset: block * BLOCK_BYTES,
                bytes: self.open[&number].block_bytes(block),
                buffer: staging,
            },
            Ask::Check(number) => Request::Check { file: number },
            Ask::Release(number) => Request::Release { file: number },
        }
    }

    // ---- replies -------------------------------------------------------------------------------

    fn opened(&mut self, number: u32) -> Result<(), PullError> {
        let (bytes, changes) = match self.peer.receive()? {
            Reply::Opened { bytes, changes } => (bytes, changes),
            Reply::Full => {
                let file = self.open.remove(&number).expect("it was asked for");
                self.queue.push_front(file.wanted);
                self.is_full = true;
                return Ok(());
            }
            other => return Err(self.peer.out_of_turn(&other)),
        };
        if bytes > i64::MAX as u64 {
            return Err(self.peer.implausible(format!("a file of {bytes} bytes")));
        }
        let expected = self.open[&number].wanted.bytes;
        self.state.check_size(expected, bytes)?;
        let file = self.open.get_mut(&number).expect("it was asked for");
        let path = self.staging.locate(&file.wanted.entry.path);
        let opened = self.staging.open_file(&file.wanted.entry.path)?;
        file.staged_bytes = opened.metadata().map_err(local(&path))?.len();
        let is_direct = self.staging.is_synced() && bytes >= BLOCK_BYTES;
        let direct = is_direct.then(|| DirectFile::open(&opened)).flatten();
        file.staged = Some(StagedFile::new(path, opened, direct));
        file.bytes = bytes;
        file.is_newer = file.wanted.entry.is_older_than(changes);
        file.blocks_left = bytes.div_ceil(BLOCK_BYTES);
        self.state.know_size(file.wanted.bytes, bytes);
        file.wanted.bytes = bytes;
        match file.blocks_left {
            0 => self.ready.push_back(Ask::Check(number)),
            _ => self.reading.push_back(number),
        }
        Ok(())
    }

    fn summed(&mut self, number: u32, block: u64) -> Result<(), PullError> {
        let (bytes, sum) = match self.peer.receive()? {
            Reply::Sum { bytes, xxh3 } => (bytes, xxh3),
            other => return Err(self.peer.out_of_turn(&other)),
        };
        let file = &self.open[&number];
        let mut there = vec![0; file.block_bytes(block) as usize];
        let staged = file.staged.as_ref().expect("it is open");
        let is_same = bytes == there.len() as u64
            && staged
                .file()
                .read_exact_at(&mut there, block * BLOCK_BYTES)
                .is_ok()
            && format!("{:032x}", xxh3_128(&there)) == sum;
        if !is_same {
            self.ready.push_front(Ask::Read(number, block));
            return Ok(());
        }
        self.state.reused(bytes);
        self.end_block(number);
        Ok(())
    }

    fn read(&mut self, number: u32, block: u64) -> Result<(), PullError> {
        let mut buffer = self.writers.take_buffer()?;
        let expected = self.open[&number].block_bytes(block);
        let was_there = self.open[&number].staged_bytes > block * BLOCK_BYTES;
        let received = self.receive_block(&mut buffer, expected, was_there);
        let received = match received {
            Ok(Some(received)) => received,
            Ok(None) => {
                self.writers.return_buffer(buffer);
                return self.read_again(number, block);
            }
            Err(error) => {
                self.writers.return_buffer(buffer);
                return Err(error);
            }
        };
        let staged = self.open[&number].staged.as_ref().expect("it is open");
        let block = Block {
            offset: block * BLOCK_BYTES,
            buffer,
            parts: received.parts,
        };
        self.writers.write(staged, block);
        self.state.received(expected, received.bytes);
        self.end_block(number);
        Ok(())
    }

    /// The bytes of a block; `None` where their MAC is wrong. Zeros are left out where nothing was before.
    fn receive_block(
        &mut self,
        buffer: &mut [u8],
        expected: u64,
        was_there: bool,
    ) -> Result<Option<Received>, PullError> {
        let mut received = Received {
            parts: Vec::new(),
            bytes: 0,
        };
        let mut hasher = self.peer.block_hasher();
        let mut at = 0;
        let mut reply = self.peer.receive()?;
        loop {
            let (bytes, is_zero) = match reply {
                Reply::Bytes { bytes } => (bytes, false),
                Reply::Zeros { bytes } => (bytes, true),
                Reply::End { mac } if at == expected => {
                    let is_right = match (hasher, mac) {
                        (Some(hasher), Some(mac)) => hasher.is(&mac),
                        // Encrypted bytes are authenticated as they come.
                        (None, _) => true,
                        (Some(_), None) => false,
                    };
                    return Ok(is_right.then_some(received));
                }
                // It became shorter than its list says: the list is of another file.
                Reply::End { .. } => {
                    return Err(self.peer.stale("a file was cut while it was read"));
                }
                other => return Err(self.peer.out_of_turn(&other)),
            };
            let part = self.check_part(at, bytes, expected)?;
            if is_zero {
                buffer[part.clone()].fill(0);
            } else {
                self.receive_part(&mut buffer[part.clone()], hasher.as_mut())?;
                received.bytes += bytes;
            }
            if !is_zero || was_there {
                add_part(&mut received.parts, part);
            }
            at += bytes;
            reply = self.peer.receive_more()?;
        }
    }

    /// Where the next `bytes` of a block go, of which `at` have come and `expected` were asked for.
    fn check_part(&self, at: u64, bytes: u64, expected: u64) -> Result<Range<usize>, PullError> {
        if bytes == 0 || bytes > expected - at {
            return Err(self.peer.implausible("more bytes than were asked for"));
        }
        Ok(at as usize..(at + bytes) as usize)
    }

    /// Begins to read a block where the agent says that it is.
    fn placed(&mut self, number: u32, block: u64, staging: u32) -> Result<(), PullError> {
        let mut buffer = self.writers.take_buffer()?;
        let (answer, mac) = match self.receive_places(number, block, &mut buffer) {
            Ok(received) => received,
            Err(error) => {
                self.writers.return_buffer(buffer);
                return Err(error);
            }
        };
        let incoming = Incoming::of(&answer, number, block, mac);
        let remote = self.remote.as_mut().expect("it was asked for");
        let begun = remote.land(staging, answer, incoming, buffer);
        begun.map_err(|error| failed(self.peer, error))
    }

    /// Where the bytes of a block are, and their MAC. Zeros are left out where nothing was before.
    fn receive_places(
        &mut self,
        number: u32,
        block: u64,
        buffer: &mut [u8],
    ) -> Result<(Answer, Option<ExpectedMac>), PullError> {
        let file = &self.open[&number];
        let expected = file.block_bytes(block);
        let was_there = file.staged_bytes > block * BLOCK_BYTES;
        let mut answer = Answer::default();
        let mut at = 0;
        let mut reply = self.peer.receive()?;
        loop {
            let (bytes, is_zero) = match reply {
                Reply::InMemory { bytes, .. } | Reply::Staged { bytes, .. } => (bytes, false),
                Reply::Zeros { bytes } => (bytes, true),
                Reply::Placed { mac } if at == expected => {
                    return Ok((answer, self.expect_mac(mac)?));
                }
                // It became shorter than its list says: the list is of another file.
                Reply::Placed { .. } => {
                    return Err(self.peer.stale("a file was cut while it was read"));
                }
                other => return Err(self.peer.out_of_turn(&other)),
            };
            let part = self.check_part(at, bytes, expected)?;
            if is_zero {
                buffer[part.clone()].fill(0);
            } else {
                let remote = self.remote.as_ref().expect("it was asked for");
                let added = remote.add(&mut answer, &reply, part.clone());
                added.map_err(|error| failed(self.peer, error))?;
            }
            if !is_zero || was_there {
                add_part(&mut answer.parts, part);
            }
            at += bytes;
            reply = self.peer.receive_more()?;
        }
    }

    /// An agent leaves the MAC out only where it was not asked for.
    fn expect_mac(&self, mac: Option<BlockMac>) -> Result<Option<ExpectedMac>, PullError> {
        let is_wanted = self.remote.as_ref().is_some_and(Remote::is_summed);
        match (is_wanted, self.peer.block_hasher(), mac) {
            (false, ..) => Ok(None),
            (true, Some(hasher), Some(mac)) => Ok(Some(ExpectedMac { hasher, mac })),
            _ => Err(self.peer.implausible("a block without a MAC")),
        }
    }

    /// Hands on what has come of blocks that are read; waits for one where that is asked for.
    fn take_landed(&mut self, mut is_waited: bool) -> Result<(), PullError> {
        while let Some(remote) = &mut self.remote
            && remote.under_way() > 0
        {
            let landed = remote.next_landed(is_waited);
            let landed = landed.map_err(|error| failed(self.peer, error))?;
            let Some((incoming, buffer)) = landed else {
                return Ok(());
            };
            is_waited = false;
            self.landed(incoming, buffer)?;
        }
        Ok(())
    }

    fn landed(&mut self, incoming: Incoming, buffer: Buffer) -> Result<(), PullError> {
        let Incoming { number, block, .. } = incoming;
        if !incoming.is_right(&buffer) {
            self.writers.return_buffer(buffer);
            return self.read_again(number, block);
        }
        let file = &self.open[&number];
        let staged = file.staged.as_ref().expect("it is open");
        let expected = file.block_bytes(block);
        let read_bytes = incoming.read_bytes();
        let block = Block {
            offset: block * BLOCK_BYTES,
            buffer,
            parts: incoming.parts,
        };
        self.writers.write(staged, block);
        self.state.received(expected, read_bytes);
        self.end_block(number);
        Ok(())
    }

    fn receive_part(
        &mut self,
        part: &mut [u8],
        mut hasher: Option<&mut BlockHasher>,
    ) -> Result<(), PullError> {
        for piece in part.chunks_mut(SUM_BYTES) {
            self.peer.receive_bytes(piece)?;
            if let Some(hasher) = &mut hasher {
                hasher.update(piece);
            }
        }
        Ok(())
    }

    fn read_again(&mut self, number: u32, block: u64) -> Result<(), PullError> {
        let file = self.open.get_mut(&number).expect("it is open");
        file.damaged += 1;
        self.state.outcome.damaged_blocks += 1;
        if file.damaged >= TRIES {
            return Err(PullError::Corrupt {
                path: file.wanted.entry.path.clone(),
                tries: file.damaged,
            });
        }
        self.ready.push_front(Ask::Read(number, block));
        Ok(())
    }

    fn end_block(&mut self, number: u32) {
        let file = self.open.get_mut(&number).expect("it is open");
        file.blocks_left -= 1;
        if file.blocks_left == 0 {
            self.ready.push_back(Ask::Check(number));
        }
    }

    fn checked(&mut self, number: u32) -> Result<(), PullError> {
        let (changed, snapshot) = match self.peer.receive()? {
            Reply::Checked { changed, snapshot } => (changed, snapshot),
            other => return Err(self.peer.out_of_turn(&other)),
        };
        // Before the next file is opened: it makes room.
        self.ready.push_front(Ask::Release(number));
        let file = self.open.get_mut(&number).expect("it is open");
        if snapshot {
            let entry = file.wanted.entry.clone();
            let staged = file.staged.as_ref().expect("it is open");
            self.state
                .done(&entry, file.bytes, changed || file.is_newer);
            let bytes = file.bytes;
            self.writers.finish(staged, Finish { bytes, entry });
            return Ok(());
        }
        let tries = file.wanted.tries + 1;
        if tries >= TRIES {
            return Err(PullError::KeepsChanging {
                host: self.peer.host().into(),
                path: file.wanted.entry.path.clone(),
                tries,
            });
        }
        // What of it is on its way to the disk must not land on what comes then.
        self.writers.wait()?;
        self.state.undo(file.bytes);
        self.queue.push_back(Wanted {
            entry: file.wanted.entry.clone(),
            bytes: file.bytes,
            tries,
        });
        Ok(())
    }

    fn released(&mut self, number: u32) -> Result<(), PullError> {
        match self.peer.receive()? {
            Reply::Done => {}
            other => return Err(self.peer.out_of_turn(&other)),
        }
        self.open.remove(&number);
        self.is_full = false;
        Ok(())
    }
}

impl OpenFile {
    fn block_bytes(&self, block: u64) -> u64 {
        BLOCK_BYTES.min(self.bytes - block * BLOCK_BYTES)
    }
}

/// Adds a part of a block that is to be written. Where zeros before it are too few to make a hole, they are written too:
/// so a block has few parts, however it was sent.
fn add_part(parts: &mut Vec<Range<usize>>, part: Range<usize>) {
    match parts.last_mut() {
        Some(last) if part.start - last.end < HOLE_BYTES_MIN => last.end = part.end,
        _ => parts.push(part),
    }
}
