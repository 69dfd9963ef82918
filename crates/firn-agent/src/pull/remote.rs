//! Blocks that the puller reads directly from the agent's memory by libfabric.
//!
//! The life of a block:
//!
//! ```text
//!   request Place ─► replies InMemory, Staged, Zeros … Placed ─► reads under way ─► all complete ─► MAC ─► writers
//! ```
//!
//! A block has *landed* when all of its reads are complete. Bytes in the arena are read from there (`InMemory`). The
//! agent copies other bytes to the staging buffer that the request names (`Staged`).
//!
//! Invariants
//! * At most one block uses a staging buffer, from its request until it has landed.
//! * A block counts as received only after it has landed and its MAC was compared. The `Check` of a file therefore
//!   follows its last block.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use crate::ofi::{Buffer, Endpoint, Landed, OfiError, Read, Region, RemoteRegion};

use crate::block_mac::{BlockHasher, BlockMac};
use crate::data_path::PARTS_MAX;
use crate::error::PullError;
use crate::message::{ErrorKind, Exposed, ExposedRegion, Reply, Request, STAGING_BUFFERS};
use crate::peer::Peer;
use crate::pull::writers::Writers;
use crate::transport_choice::{Carriage, TransportChoice};

/// Maximum time without a complete read while reads are under way. After that time the endpoint counts as failed.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time that one call waits for a block.
const POLL_TIMEOUT: Duration = Duration::from_millis(100);

/// A block whose reads are under way.
pub(crate) struct Incoming {
    /// Number of the open file that both sides use.
    pub(crate) file_number: u32,
    /// Index of the block in the file.
    pub(crate) block: u64,
    /// Ranges of the buffer to write to the file.
    pub(crate) parts: Vec<Range<usize>>,
    /// Ranges of the buffer that libfabric fills.
    pub(crate) read: Vec<Range<usize>>,
    /// MAC of the bytes that libfabric reads; `None` if this puller asked for no MACs.
    pub(crate) mac: Option<ExpectedMac>,
}

/// The MAC that an agent sent, and the keyed hasher that computes the MAC of the received bytes.
pub(crate) struct ExpectedMac {
    pub(crate) hasher: BlockHasher,
    pub(crate) mac: BlockMac,
}

impl Incoming {
    /// Makes the block that a complete answer describes.
    pub(crate) fn of(
        answer: &Answer,
        file_number: u32,
        block: u64,
        mac: Option<ExpectedMac>,
    ) -> Self {
        Self {
            file_number,
            block,
            parts: answer.parts.clone(),
            read: answer.read.clone(),
            mac,
        }
    }

    /// Returns the number of bytes that libfabric reads, without zeros.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read.iter().map(|range| range.len() as u64).sum()
    }

    /// Returns whether the bytes match their MAC. Returns true if there is no MAC: checksums of the network then
    /// protect the bytes.
    pub(crate) fn is_intact(&self, buffer: &[u8]) -> bool {
        let Some(ExpectedMac { hasher, mac }) = &self.mac else {
            return true;
        };
        let mut hasher = hasher.clone();
        for part in &self.read {
            hasher.update(&buffer[part.clone()]);
        }
        hasher.is(mac)
    }
}

/// The replies to one [`Request::Place`] that have arrived so far.
#[derive(Default)]
pub(crate) struct Answer {
    /// Ranges of the buffer to write to the file.
    pub(crate) parts: Vec<Range<usize>>,
    /// Ranges of the buffer that libfabric fills, one for each of `reads`.
    pub(crate) read: Vec<Range<usize>>,
    reads: Vec<Read>,
}

/// Reads of one pull by libfabric; see the head of this file.
pub(crate) struct Remote {
    endpoint: Endpoint,
    /// Data region of the agent's arena.
    arena: RemoteRegion,
    /// The agent's staging buffers.
    staging: RemoteRegion,
    /// Whether the agent sends a MAC with each block.
    is_summed: bool,
    /// Staging buffers that no block uses.
    free: Vec<u32>,
    /// Blocks under way, by staging buffer.
    incoming: BTreeMap<u32, Incoming>,
}

impl Remote {
    /// Agrees with the agent on the use of libfabric, if options and encryption allow it.
    ///
    /// Returns `None` if bytes are received over the connection. With `--transport auto`, a refusal or failure also
    /// returns `None`; if an option names a provider, both are errors.
    pub(crate) fn agree(
        peer: &mut Peer,
        carriage: &Carriage,
        writers: &Writers,
    ) -> Result<Option<Self>, PullError> {
        let Carriage { transport, sums } = carriage;
        let is_auto = *transport == TransportChoice::Auto;
        // Over ssh the user expects encrypted bytes. Libfabric is used there only if an option names it.
        if is_auto && (peer.near().is_none() || peer.is_encrypted()) {
            return Ok(None);
        }
        let providers = transport
            .wanted_providers()
            .map_err(|error| pull_error(peer, error))?;
        if providers.is_empty() {
            return Ok(None);
        }
        if peer.is_encrypted() {
            let host = peer.host().into();
            return Err(PullError::Unencrypted { host });
        }
        let wants_macs = *sums;
        peer.send(&Request::Expose {
            providers,
            sums: wants_macs,
        })?;
        let exposed = match peer.receive() {
            Ok(Reply::Exposed(exposed)) => exposed,
            Ok(other) => return Err(peer.out_of_turn(&other)),
            Err(PullError::Remote {
                kind: ErrorKind::Refused,
                ..
            }) if is_auto => return Ok(None),
            Err(error) => return Err(error),
        };
        match Self::open(peer, &exposed, wants_macs, writers) {
            Ok(remote) => Ok(Some(remote)),
            Err(_) if is_auto => Ok(None),
            Err(error) => Err(pull_error(peer, error)),
        }
    }

    fn open(
        peer: &Peer,
        exposed: &Exposed,
        is_summed: bool,
        writers: &Writers,
    ) -> Result<Self, OfiError> {
        let arena = RemoteRegion::check(&exposed.arena.into())?;
        let staging = RemoteRegion::check(&exposed.staging.into())?;
        let mut endpoint = Endpoint::open(&exposed.provider, peer.near())?;
        endpoint.connect(&exposed.address)?;
        endpoint.prepare(writers.pool())?;
        Ok(Self {
            endpoint,
            arena,
            staging,
            is_summed,
            free: (0..STAGING_BUFFERS as u32).collect(),
            incoming: BTreeMap::new(),
        })
    }

    /// Name of the provider, for reports.
    pub(crate) fn provider(&self) -> &str {
        self.endpoint.provider()
    }

    /// Whether the agent sends a MAC with each block.
    pub(crate) fn is_summed(&self) -> bool {
        self.is_summed
    }

    /// Number of blocks whose reads are under way.
    pub(crate) fn under_way(&self) -> usize {
        self.incoming.len()
    }

    /// Takes a free staging buffer for a request; `None` if all [`STAGING_BUFFERS`] are in use.
    pub(crate) fn take_staging(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Adds a reply to an answer. The bytes of the reply are read into the range `into` of the buffer.
    ///
    /// Fails if the place is outside the agent's regions, or if the block has more than [`PARTS_MAX`] parts.
    pub(crate) fn add(
        &self,
        answer: &mut Answer,
        reply: &Reply,
        into: Range<usize>,
    ) -> Result<(), OfiError> {
        let read = match *reply {
            Reply::InMemory { at, .. } => self.arena.read(at, into.clone())?,
            Reply::Staged { at, .. } => self.staging.read(at, into.clone())?,
            _ => return Ok(()),
        };
        if answer.reads.len() >= PARTS_MAX {
            return Err(OfiError::Implausible("a block in too many parts"));
        }
        answer.reads.push(read);
        answer.read.push(into);
        Ok(())
    }

    /// Begins the reads of a block. The buffer belongs to the endpoint until the block has landed.
    pub(crate) fn begin_reads(
        &mut self,
        staging: u32,
        answer: Answer,
        incoming: Incoming,
        buffer: Buffer,
    ) -> Result<(), OfiError> {
        self.incoming.insert(staging, incoming);
        self.endpoint.land(u64::from(staging), buffer, answer.reads)
    }

    /// Returns a block that has landed, if there is one. With `waits`, first waits up to [`POLL_TIMEOUT`] for one.
    pub(crate) fn next_landed(
        &mut self,
        waits: bool,
    ) -> Result<Option<(Incoming, Buffer)>, OfiError> {
        let timeout = if waits { POLL_TIMEOUT } else { Duration::ZERO };
        let landed = self.endpoint.poll(timeout, STALL_TIMEOUT)?;
        Ok(landed.map(|Landed { number, buffer }| {
            let staging = number as u32;
            self.free.push(staging);
            let incoming = self.incoming.remove(&staging);
            let incoming = incoming.expect("a block that lands was begun");
            (incoming, buffer)
        }))
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
