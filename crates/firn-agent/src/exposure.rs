//! Exposes an agent's memory to one puller, which reads it by libfabric.
//!
//! Promises
//! * A puller can read the data region of the arena and the agent's staging buffers, and can write nothing. The
//!   puller's keys are new and random. They are valid until its connection ends or requests another list.
//! * At most [`EXPOSURES_MAX`] pullers of the process have exposed memory at once: for each of them, hardware locks the
//!   whole arena in memory.
//! * The data region stays mapped while it is exposed.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::ofi::{Buffer, Endpoint, Memory, OfiError, Pool, Region};
use firn_client::OpenMount;

use crate::block_mac::BlockHasher;
use crate::data_path::PlacedAnswer;
use crate::message::{BLOCK_BYTES, ErrorKind, Exposed, STAGING_BUFFERS};
use crate::source::SourceError;
use crate::transport_choice::TransportChoice;

/// Maximum number of pullers that read memory by libfabric at once.
const EXPOSURES_MAX: usize = 4;
/// Maximum time of one call that serves reads. The end of a connection waits for such a call.
const PROGRESS_TIMEOUT: Duration = Duration::from_millis(50);

/// The libfabric transports that an agent offers to a puller.
#[derive(Clone, Default)]
pub(crate) struct Offer {
    /// The agent's option.
    pub(crate) transport: TransportChoice,
    /// Address of this host on the puller's connection, whose network interface is to be used; `None` means any
    /// interface.
    pub(crate) near: Option<IpAddr>,
}

/// The mapped data region of a mount.
struct ArenaMemory {
    mount: Arc<OpenMount>,
    bytes: usize,
    start: *const u8,
}

// SAFETY: this type only carries the address of the memory and never reads or writes it.
unsafe impl Send for ArenaMemory {}
// SAFETY: as for `Send`.
unsafe impl Sync for ArenaMemory {}

// SAFETY: `start` and `bytes` describe the mapping of `mount`, which is made once and lives as long as `mount`.
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
    /// Returns the data region of a mount; `None` if it is not mapped.
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

/// The right to one of [`EXPOSURES_MAX`] exposures. Dropping it releases the right.
struct ExposureSlot;

/// Number of exposures of this process.
static EXPOSURES: AtomicUsize = AtomicUsize::new(0);

impl ExposureSlot {
    /// Takes a slot; `None` if all are in use.
    fn take() -> Option<Self> {
        let one_more = |count| (count < EXPOSURES_MAX).then_some(count + 1);
        let updated = EXPOSURES.try_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        // `then_some` would make and drop a slot even after a failure, and thereby release a slot that was not taken.
        updated.is_ok().then(|| Self)
    }
}

impl Drop for ExposureSlot {
    fn drop(&mut self) {
        EXPOSURES.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The hardware or thread that serves the reads of the puller.
enum ReadServer {
    /// Hardware serves them. The endpoint is only kept open.
    Hardware { _endpoint: Box<Endpoint> },
    /// A thread calls the provider until `stop` is set.
    Thread {
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    },
}

impl ReadServer {
    /// Starts a thread if the provider needs one.
    fn start(mut endpoint: Endpoint) -> std::io::Result<Self> {
        if !endpoint.needs_progress() {
            return Ok(Self::Hardware {
                _endpoint: Box::new(endpoint),
            });
        }
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("agent-fabric".into());
        let thread = thread.spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                endpoint.progress(PROGRESS_TIMEOUT);
            }
        })?;
        Ok(Self::Thread {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for ReadServer {
    fn drop(&mut self) {
        if let Self::Thread { stop, thread } = self {
            stop.store(true, Ordering::Relaxed);
            if let Some(thread) = thread.take() {
                let _ = thread.join();
            }
        }
    }
}

/// Memory that is exposed to one puller; see the head of this file. Dropping it ends the exposure.
pub(crate) struct Exposure {
    _server: ReadServer,
    staging: Vec<Buffer>,
    /// Whether answers have a MAC.
    is_summed: bool,
    /// Name of the provider.
    provider: String,
    /// Size of the data region.
    bytes: u64,
    _slot: ExposureSlot,
}

impl Exposure {
    /// Exposes the memory of a mount. Uses the first of the puller's `providers` that this host has too.
    ///
    /// Returns the exposure, and the data that the puller needs for its reads.
    pub(crate) fn open(
        offer: &Offer,
        mount: &Arc<OpenMount>,
        providers: &[String],
        is_summed: bool,
    ) -> Result<(Self, Exposed), SourceError> {
        let provider = offer.transport.choose(providers).map_err(refused)?;
        let slot = ExposureSlot::take().ok_or_else(|| {
            refused(format!(
                "the agent already serves {EXPOSURES_MAX} pullers by libfabric, the maximum: try again later, or use --transport tcp"
            ))
        })?;
        let memory = ArenaMemory::of(mount).ok_or_else(|| refused("the arena is not mapped"))?;
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
        let server = ReadServer::start(endpoint).map_err(|error| refused(error.to_string()))?;
        let exposure = Self {
            _server: server,
            staging,
            is_summed,
            provider: exposed.provider.clone(),
            bytes,
            _slot: slot,
        };
        Ok((exposure, exposed))
    }

    /// Begins an answer with the addresses of bytes. Uses the staging buffer that the puller has chosen; returns `None`
    /// if there is no such buffer.
    ///
    /// The puller must already have read the earlier content of the buffer. Otherwise it reads other bytes, and their
    /// MAC is wrong.
    pub(crate) fn begin_answer(
        &mut self,
        buffer: u32,
        hasher: Option<BlockHasher>,
        deadline: Instant,
    ) -> Option<PlacedAnswer<'_>> {
        let hasher = hasher.filter(|_| self.is_summed);
        let staging_start = u64::from(buffer) * BLOCK_BYTES;
        let staging = self.staging.get_mut(usize::try_from(buffer).ok()?)?;
        Some(PlacedAnswer::begin(
            staging,
            staging_start,
            hasher,
            deadline,
        ))
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

/// Makes two random keys. Some providers choose keys of their own instead.
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
