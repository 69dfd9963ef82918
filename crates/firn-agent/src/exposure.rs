//! An agent's memory, exposed to one puller by libfabric.
//!
//! Promises
//! * What is exposed is the data region, for reading, and the staging buffers; by keys that are new for each puller,
//!   until its connection ends or lists anew.
//! * At most [`EXPOSURES_MAX`] pullers are served so at once: each locks the arena's memory where hardware reads it.
//! * The region stays mapped as long as it is exposed.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::ofi::{Buffer, Endpoint, Memory, OfiError, Pool, Region};
use firn_client::OpenMount;

use crate::block_mac::BlockHasher;
use crate::data_path::Told;
use crate::message::{BLOCK_BYTES, ErrorKind, Exposed, STAGING_BUFFERS};
use crate::source::SourceError;
use crate::transport_choice::TransportChoice;

/// Pullers that are served by libfabric at once.
const EXPOSURES_MAX: usize = 4;
/// How long the end of a connection may wait for the thread that serves its reads.
const PROGRESS: Duration = Duration::from_millis(50);

/// What an agent may serve by, and near which address of this host.
#[derive(Clone, Default)]
pub(crate) struct Offer {
    pub(crate) transport: TransportChoice,
    pub(crate) near: Option<IpAddr>,
}

/// The data region of a mount that is mapped.
struct ArenaMemory {
    mount: Arc<OpenMount>,
    bytes: usize,
    start: *const u8,
}

// SAFETY: memory that other processes write to and that this value only tells the place of.
unsafe impl Send for ArenaMemory {}
// SAFETY: as above.
unsafe impl Sync for ArenaMemory {}

// SAFETY: `start` and `bytes` are those of the mapping, which is made once and lives as long as `mount`.
unsafe impl Memory for ArenaMemory {
    fn start(&self) -> *const u8 {
        self.start
    }

    fn bytes(&self) -> usize {
        debug_assert!(self.mount.mapping().is_some());
        self.bytes
    }
}

impl ArenaMemory {
    fn of(mount: &Arc<OpenMount>) -> Option<Self> {
        let region = &mount.mapping()?.region;
        let bytes = mount.region().bytes;
        Some(Self {
            start: region.address(0, bytes)?,
            bytes: usize::try_from(bytes).ok()?,
            mount: Arc::clone(mount),
        })
    }
}

/// One of [`EXPOSURES_MAX`].
struct ExposureSlot;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

impl ExposureSlot {
    fn take() -> Option<Self> {
        let free = |taken| (taken < EXPOSURES_MAX).then_some(taken + 1);
        let taken = TAKEN.try_update(Ordering::AcqRel, Ordering::Acquire, free);
        // Not made where there is none to give back.
        taken.is_ok().then(|| Self)
    }
}

impl Drop for ExposureSlot {
    fn drop(&mut self) {
        TAKEN.fetch_sub(1, Ordering::AcqRel);
    }
}

/// What serves the reads of the puller.
enum Served {
    /// Hardware.
    Alone { _endpoint: Box<Endpoint> },
    /// A thread, until it is told to stop.
    ByThread {
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    },
}

impl Served {
    fn start(mut endpoint: Endpoint) -> std::io::Result<Self> {
        if !endpoint.needs_progress() {
            return Ok(Self::Alone {
                _endpoint: Box::new(endpoint),
            });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("agent-fabric".into());
        let thread = thread.spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                endpoint.progress(PROGRESS);
            }
        })?;
        Ok(Self::ByThread {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Self::ByThread { stop, thread } = self {
            stop.store(true, Ordering::Relaxed);
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// See the head of this file.
pub(crate) struct Exposure {
    _served: Served,
    staging: Vec<Buffer>,
    is_summed: bool,
    provider: String,
    bytes: u64,
    _place: ExposureSlot,
}

impl Exposure {
    /// Exposes the memory of a mount by the first of the providers that this host has, too.
    pub(crate) fn open(
        offer: &Offer,
        mount: &Arc<OpenMount>,
        providers: &[String],
        is_summed: bool,
    ) -> Result<(Self, Exposed), SourceError> {
        let provider = offer.transport.choose(providers).map_err(refused)?;
        let place = ExposureSlot::take().ok_or_else(|| {
            refused(format!(
                "the agent reads for {EXPOSURES_MAX} pullers by libfabric already, and for no more at once: try again later, or use --transport tcp"
            ))
        })?;
        let memory = ArenaMemory::of(mount).ok_or_else(|| refused("nothing is mapped"))?;
        let bytes = memory.bytes as u64;
        let keys = random_keys()?;
        let open = || -> Result<_, OfiError> {
            let mut endpoint = Endpoint::open(&provider, offer.near)?;
            let arena = endpoint.expose(Arc::new(memory), keys[0])?;
            let staging = Pool::create(STAGING_BUFFERS as usize, BLOCK_BYTES as usize);
            let staging = staging.map_err(|error| OfiError::Register {
                provider: provider.clone(),
                bytes: (STAGING_BUFFERS * BLOCK_BYTES) as usize,
                why: error.to_string(),
                limit: None,
            })?;
            let pool = Arc::clone(staging[0].pool());
            let staged = endpoint.expose(pool, keys[1])?;
            let address = endpoint.address()?;
            Ok((endpoint, staging, arena, staged, address))
        };
        let (endpoint, staging, arena, staged, address) =
            open().map_err(|error| refused(error.to_string()))?;
        let exposed = Exposed {
            provider: endpoint.provider().to_owned(),
            address,
            arena: arena.into(),
            staging: staged.into(),
        };
        let served = Served::start(endpoint).map_err(|error| refused(error.to_string()))?;
        let exposure = Self {
            _served: served,
            staging,
            is_summed,
            provider: exposed.provider.clone(),
            bytes,
            _place: place,
        };
        Ok((exposure, exposed))
    }

    /// How an answer is told that uses one of the staging buffers. The puller chose it and reads nothing of it now; one
    /// that does so all the same sees bytes change.
    pub(crate) fn tell(
        &mut self,
        buffer: u32,
        hasher: Option<BlockHasher>,
        deadline: Instant,
    ) -> Option<Told<'_>> {
        let hasher = hasher.filter(|_| self.is_summed);
        let at = u64::from(buffer) * BLOCK_BYTES;
        let staging = self.staging.get_mut(usize::try_from(buffer).ok()?)?;
        Some(Told::begin(staging, at, hasher, deadline))
    }
}

impl std::fmt::Display for Exposure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            provider, bytes, ..
        } = self;
        write!(f, "registered {bytes} bytes of memory for ofi:{provider}")
    }
}

fn refused(message: impl Into<String>) -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message: message.into(),
    }
}

/// Two random keys, for providers that choose none themselves.
fn random_keys() -> Result<[u64; 2], SourceError> {
    let key = || getrandom::u64().map_err(|error| refused(error.to_string()));
    Ok([key()?, key()?])
}

impl From<Region> for crate::message::ExposedRegion {
    fn from(region: Region) -> Self {
        let Region { key, base, bytes } = region;
        Self { key, base, bytes }
    }
}
