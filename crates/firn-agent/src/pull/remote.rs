//! Blocks that the puller reads out of the agent's memory by itself.
//!
//! ```text
//!   Place ─► InMemory, Staged, Zeros … Placed ─► reads under way ─► all have landed ─► MAC ─► writers
//! ```
//!
//! Invariants
//! * A staging buffer is named in one request at a time, from the request on until all of its answer has landed.
//! * What has not landed has not come: a file is checked after its last block was compared.

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

/// How long no read may be complete while there is one under way.
const SILENCE: Duration = Duration::from_secs(10);
/// How long one wait for a block is.
const WAIT: Duration = Duration::from_millis(100);

/// What a block is, and what is to become of it.
pub(crate) struct Incoming {
    pub(crate) number: u32,
    pub(crate) block: u64,
    /// What of the buffer is to be written.
    pub(crate) parts: Vec<Range<usize>>,
    /// What of it is read.
    pub(crate) read: Vec<Range<usize>>,
    /// MAC of what is read; None: not asked for.
    pub(crate) mac: Option<ExpectedMac>,
}

/// What the bytes of a block must have.
pub(crate) struct ExpectedMac {
    pub(crate) hasher: BlockHasher,
    pub(crate) mac: BlockMac,
}

impl Incoming {
    /// By an answer.
    pub(crate) fn of(answer: &Answer, number: u32, block: u64, mac: Option<ExpectedMac>) -> Self {
        Self {
            number,
            block,
            parts: answer.parts.clone(),
            read: answer.read.clone(),
            mac,
        }
    }

    /// Bytes that are read.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.read.iter().map(|range| range.len() as u64).sum()
    }

    /// Whether the bytes are those that the agent has; without a MAC the fabric's own checksums vouch for them.
    pub(crate) fn is_right(&self, buffer: &[u8]) -> bool {
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

/// An answer to [`Request::Place`], as far as it has come.
#[derive(Default)]
pub(crate) struct Answer {
    pub(crate) parts: Vec<Range<usize>>,
    pub(crate) read: Vec<Range<usize>>,
    reads: Vec<Read>,
}

/// See the head of this file.
pub(crate) struct Remote {
    endpoint: Endpoint,
    arena: RemoteRegion,
    staging: RemoteRegion,
    /// Answers have a MAC.
    is_summed: bool,
    free: Vec<u32>,
    /// Blocks under way, by staging buffer.
    incoming: BTreeMap<u32, Incoming>,
}

impl Remote {
    /// Asks the agent for what the choice wants; none: bytes come over the connection.
    pub(crate) fn agree(
        peer: &mut Peer,
        carriage: &Carriage,
        writers: &Writers,
    ) -> Result<Option<Self>, PullError> {
        let Carriage { transport, sums } = carriage;
        let is_auto = *transport == TransportChoice::Auto;
        // A puller that goes over ssh wants its bytes encrypted: only by name.
        if is_auto && (peer.near().is_none() || peer.is_encrypted()) {
            return Ok(None);
        }
        let providers = transport
            .wanted_providers()
            .map_err(|error| failed(peer, error))?;
        if providers.is_empty() {
            return Ok(None);
        }
        if peer.is_encrypted() {
            let host = peer.host().into();
            return Err(PullError::Unencrypted { host });
        }
        let sums = *sums;
        peer.send(&Request::Expose { providers, sums })?;
        let exposed = match peer.receive() {
            Ok(Reply::Exposed(exposed)) => exposed,
            Ok(other) => return Err(peer.out_of_turn(&other)),
            Err(PullError::Remote {
                kind: ErrorKind::Refused,
                ..
            }) if is_auto => return Ok(None),
            Err(error) => return Err(error),
        };
        match Self::open(peer, &exposed, sums, writers) {
            Ok(remote) => Ok(Some(remote)),
            Err(_) if is_auto => Ok(None),
            Err(error) => Err(failed(peer, error)),
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

    /// Whether the agent says of each block what it must have.
    pub(crate) fn is_summed(&self) -> bool {
        self.is_summed
    }

    /// Blocks whose reads are under way.
    pub(crate) fn under_way(&self) -> usize {
        self.incoming.len()
    }

    /// A staging buffer for a request: there is one for each that may be asked at once.
    pub(crate) fn take_staging(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Adds a part of an answer, which goes to `into` of the buffer.
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
            return Err(OfiError::Implausible("a block in crumbs"));
        }
        answer.reads.push(read);
        answer.read.push(into);
        Ok(())
    }

    /// Begins to read a block.
    pub(crate) fn land(
        &mut self,
        staging: u32,
        reads: Answer,
        incoming: Incoming,
        buffer: Buffer,
    ) -> Result<(), OfiError> {
        self.incoming.insert(staging, incoming);
        self.endpoint.land(u64::from(staging), buffer, reads.reads)
    }

    /// A block that has come; waits for one where that is asked for.
    pub(crate) fn next_landed(
        &mut self,
        is_waited: bool,
    ) -> Result<Option<(Incoming, Buffer)>, OfiError> {
        let limit = if is_waited { WAIT } else { Duration::ZERO };
        let landed = self.endpoint.poll(limit, SILENCE)?;
        Ok(landed.map(|Landed { number, buffer }| {
            let staging = number as u32;
            self.free.push(staging);
            let incoming = self.incoming.remove(&staging);
            (incoming.expect("what lands was begun"), buffer)
        }))
    }

    /// Ends all reads; their buffers go back.
    pub(crate) fn close(self, writers: &Writers) -> Result<(), OfiError> {
        for buffer in self.endpoint.close()? {
            writers.return_buffer(buffer);
        }
        Ok(())
    }
}

/// Reads by libfabric that failed.
pub(crate) fn failed(peer: &Peer, error: OfiError) -> PullError {
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
