//! Blocks (1 MiB of a file) that one host reads directly from the memory of another by libfabric (RDMA).
//!
//! The reading host is the *puller*, which copies files. The other one is the *agent*, which serves the files of its
//! mount. It exposes the *arena*, the mount's memory with bytes of files, and *staging buffers* for all other bytes.
//!
//! The life of a block:
//!
//! ```text
//!   request Place ─► replies InMemory, Staged, Zeros … Placed ─► reads under way ─► all complete ─► MAC ─► writers
//! ```
//!
//! A block is *pending* from its first read until it has *arrived*, which is when all of its reads are complete. Bytes
//! in the arena are read from there (`InMemory`). The agent copies other bytes to the staging buffer that the request
//! names (`Staged`).
//!
//! Invariants
//! * At most one block uses a staging buffer, from its request until it has arrived.
//! * A block counts as received only after it has arrived and its MAC was compared. The `Check` of a file therefore
//!   follows its last block.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::ofi::{Buffer, Endpoint, FilledBuffer, OfiError, Read, Region, RemoteRegion};

use crate::block_mac::{BlockHasher, BlockMac};
use crate::data_path::PARTS_MAX;
use crate::error::PullError;
use crate::message::{
    BLOCK_BYTES, ErrorKind, Exposed, ExposedRegion, Reply, Request, STAGING_BUFFERS,
};
use crate::peer::Peer;
use crate::pull::writers::Writers;
use crate::transport_choice::{DataTransport, TransportChoice};

/// Maximum time without a complete read while reads are under way. After that time the endpoint counts as failed.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that one call waits for a block.
const POLL_TIMEOUT: Duration = Duration::from_millis(100);

/// Identifies a block of an open file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockId {
    /// Number of the open file that both sides use.
    pub(crate) file_number: u32,
    /// Index of the block in the file.
    pub(crate) index: u64,
}

impl BlockId {
    /// Offset of the block in its file.
    pub(crate) fn offset(self) -> u64 {
        self.index * BLOCK_BYTES
    }
}

/// A block whose reads are under way.
pub(crate) struct PendingBlock {
    pub(crate) block: BlockId,
    /// Ranges of the buffer to write to the file.
    pub(crate) write_ranges: Vec<Range<usize>>,
    /// Ranges of the buffer that libfabric fills.
    read_ranges: Vec<Range<usize>>,
    /// MAC of the bytes that libfabric reads; `None` if this puller asked for no MACs.
    mac: Option<ExpectedMac>,
}

/// A block whose reads are complete, and the buffer with its bytes.
pub(crate) struct ArrivedBlock {
    pub(crate) pending: PendingBlock,
    pub(crate) buffer: Buffer,
}

/// The MAC that an agent sent, and the keyed hasher that computes the MAC of the received bytes.
pub(crate) struct ExpectedMac {
    pub(crate) hasher: BlockHasher,
    pub(crate) mac: BlockMac,
}

impl PendingBlock {
    /// Returns the number of bytes that libfabric reads, without zeros.
    pub(crate) fn read_bytes(&self) -> u64 {
        let ranges = self.read_ranges.iter();
        ranges.map(|range| range.len() as u64).sum()
    }

    /// Returns whether the bytes match their MAC. Returns true if there is no MAC: checksums of the network then
    /// protect the bytes.
    pub(crate) fn is_intact(&self, buffer: &[u8]) -> bool {
        let Some(ExpectedMac { hasher, mac }) = &self.mac else {
            return true;
        };
        let mut hasher = hasher.clone();
        for range in &self.read_ranges {
            hasher.update(&buffer[range.clone()]);
        }
        hasher.matches(mac)
    }
}

/// The replies to one [`Request::Place`] that have arrived so far.
#[derive(Default)]
pub(crate) struct PlaceAnswer {
    /// Ranges of the buffer to write to the file.
    pub(crate) write_ranges: Vec<Range<usize>>,
    /// Ranges of the buffer that libfabric fills, one for each of `reads`.
    read_ranges: Vec<Range<usize>>,
    reads: Vec<Read>,
    /// The MAC of the last reply; `None` before it, or if this puller asked for no MACs.
    pub(crate) mac: Option<ExpectedMac>,
}

/// Reads the blocks of one pull by libfabric; see the head of this file.
pub(crate) struct FabricReader {
    endpoint: Endpoint,
    /// Data region of the agent's arena.
    arena: RemoteRegion,
    /// The agent's staging buffers.
    staging: RemoteRegion,
    /// Whether the agent sends a MAC with each block.
    requires_macs: bool,
    /// Staging buffers that no block uses.
    free_staging_buffers: Vec<u32>,
    /// Pending blocks by their staging buffer.
    pending: BTreeMap<u32, PendingBlock>,
}

impl FabricReader {
    /// Agrees with the agent, which serves files on the other host, on the use of libfabric (RDMA), if options and
    /// encryption allow it. Then opens an endpoint that can read the agent's memory into the buffers of `writers`.
    ///
    /// Returns `None` if bytes are received over the connection. With `--transport auto`, a refusal or failure also
    /// returns `None`; if an option names a provider (a driver of libfabric), both are errors.
    pub(crate) fn negotiate(
        peer: &mut Peer,
        data_transport: &DataTransport,
        writers: &Writers,
    ) -> Result<Option<Self>, PullError> {
        let choice = &data_transport.transport;
        let is_auto = *choice == TransportChoice::Auto;
        let is_over_ssh = peer.local_ip().is_none();
        // Over ssh the user expects encrypted bytes. Libfabric is used there only if an option names it.
        if is_auto && (is_over_ssh || peer.is_encrypted()) {
            return Ok(None);
        }
        let providers = choice
            .wanted_providers()
            .map_err(|error| pull_error(peer, error))?;
        if providers.is_empty() {
            return Ok(None);
        }
        if peer.is_encrypted() {
            let host = peer.host().into();
            return Err(PullError::Unencrypted { host });
        }
        let requires_macs = data_transport.sums;
        peer.send(&Request::Expose {
            providers,
            sums: requires_macs,
        })?;
        let exposed = match peer.receive() {
            Ok(Reply::Exposed(exposed)) => exposed,
            Ok(unexpected) => return Err(peer.out_of_turn(&unexpected)),
            Err(PullError::Remote {
                kind: ErrorKind::Refused,
                ..
            }) if is_auto => return Ok(None),
            Err(error) => return Err(error),
        };
        match Self::open(peer, &exposed, requires_macs, writers) {
            Ok(reader) => Ok(Some(reader)),
            Err(_) if is_auto => Ok(None),
            Err(error) => Err(pull_error(peer, error)),
        }
    }

    /// Opens an endpoint of libfabric that can read the memory that the other host exposes: its arena, with files'
    /// bytes in memory, and its staging buffers for all other bytes. They are read into the buffers of `writers`.
    ///
    /// Fails if the other host's regions are implausible.
    fn open(
        peer: &Peer,
        exposed: &Exposed,
        requires_macs: bool,
        writers: &Writers,
    ) -> Result<Self, OfiError> {
        let arena = RemoteRegion::check(&exposed.arena.into())?;
        let staging = RemoteRegion::check(&exposed.staging.into())?;
        let mut endpoint = Endpoint::open(&exposed.provider, peer.local_ip())?;
        endpoint.connect(&exposed.address)?;
        endpoint.prepare(writers.pool())?;
        Ok(Self {
            endpoint,
            arena,
            staging,
            requires_macs,
            free_staging_buffers: (0..STAGING_BUFFERS as u32).collect(),
            pending: BTreeMap::new(),
        })
    }

    /// Name of the provider, for reports.
    pub(crate) fn provider(&self) -> &str {
        self.endpoint.provider()
    }

    /// Whether the agent sends a MAC with each block.
    pub(crate) fn requires_macs(&self) -> bool {
        self.requires_macs
    }

    /// Number of blocks whose reads are under way.
    pub(crate) fn pending_blocks(&self) -> usize {
        self.pending.len()
    }

    /// Takes a free staging buffer for a request. Returns `None` if all [`STAGING_BUFFERS`] are in use.
    pub(crate) fn take_staging_buffer(&mut self) -> Option<u32> {
        self.free_staging_buffers.pop()
    }

    /// Adds a read of the bytes at the address in `reply` to the answer about a block. The bytes will be read into
    /// `buffer_range` of the block's buffer. Does nothing if the reply has no address.
    ///
    /// Fails if the bytes are outside the agent's regions, or if the block has more than [`PARTS_MAX`] parts.
    pub(crate) fn add_reply(
        &self,
        answer: &mut PlaceAnswer,
        reply: &Reply,
        buffer_range: Range<usize>,
    ) -> Result<(), OfiError> {
        let read = match *reply {
            Reply::InMemory { at, .. } => self.arena.read(at, buffer_range.clone())?,
            Reply::Staged { at, .. } => self.staging.read(at, buffer_range.clone())?,
            _ => return Ok(()),
        };
        if answer.reads.len() >= PARTS_MAX {
            return Err(OfiError::Implausible("a block in too many parts"));
        }
        answer.reads.push(read);
        answer.read_ranges.push(buffer_range);
        Ok(())
    }

    /// Begins to read a block (up to 1 MiB of a file) from the other host's memory. The buffer belongs to the endpoint
    /// until the block has arrived, when [`Self::next_arrived_block`] returns it.
    ///
    /// `staging_buffer` is the other host's buffer for this block. No other pending block uses it, so its number also
    /// identifies the block.
    pub(crate) fn begin_block(
        &mut self,
        block: BlockId,
        answer: PlaceAnswer,
        staging_buffer: u32,
        buffer: Buffer,
    ) -> Result<(), OfiError> {
        let pending = PendingBlock {
            block,
            write_ranges: answer.write_ranges,
            read_ranges: answer.read_ranges,
            mac: answer.mac,
        };
        self.pending.insert(staging_buffer, pending);
        self.endpoint
            .land(u64::from(staging_buffer), buffer, answer.reads)
    }

    /// Returns a block that was read completely, or `None` if there is none now. If `may_wait`, first waits up to
    /// [`POLL_TIMEOUT`] for one. The block is not authenticated yet.
    ///
    /// Fails if no read was completed for [`STALL_TIMEOUT`].
    pub(crate) fn next_arrived_block(
        &mut self,
        may_wait: bool,
    ) -> Result<Option<ArrivedBlock>, OfiError> {
        let timeout = if may_wait {
            POLL_TIMEOUT
        } else {
            Duration::ZERO
        };
        let filled = self.endpoint.poll(timeout, STALL_TIMEOUT)?;
        let Some(FilledBuffer { number, buffer }) = filled else {
            return Ok(None);
        };
        // The reads of a block have the number of its staging buffer.
        let staging_buffer = number as u32;
        self.free_staging_buffers.push(staging_buffer);
        let pending = self.pending.remove(&staging_buffer);
        let pending = pending.expect("a block that arrives was pending");
        Ok(Some(ArrivedBlock { pending, buffer }))
    }

    /// Closes the endpoint, which ends all reads, and returns their buffers to the writers.
    pub(crate) fn close(self, writers: &Writers) -> Result<(), OfiError> {
        for buffer in self.endpoint.close()? {
            writers.return_buffer(buffer);
        }
        Ok(())
    }
}

/// Returns the error of a pull whose reads by libfabric failed.
pub(crate) fn pull_error(peer: &Peer, error: OfiError) -> PullError {
    match error {
        OfiError::Implausible(what) => peer.implausible(what),
        error => PullError::Fabric {
            host: peer.host().into(),
            error,
        },
    }
}

impl From<ExposedRegion> for Region {
    fn from(region: ExposedRegion) -> Self {
        let ExposedRegion { key, base, bytes } = region;
        Self { key, base, bytes }
    }
}
