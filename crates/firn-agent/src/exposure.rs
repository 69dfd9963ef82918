//! Exposes memory to one process on another host, which reads it by libfabric (RDMA).
//!
//! The *agent* serves the files of a mount. The reading process is the *puller*, which copies them. Bytes of files are
//! in the *data region* of the *arena*, the shared memory of the mount. The agent copies other bytes, such as those on
//! disk, to its *staging buffers*, from which the puller reads them.
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
use crate::data_path::AddressAnswer;
use crate::message::{BLOCK_BYTES, ErrorKind, Exposed, STAGING_BUFFERS};
use crate::source::SourceError;
use crate::transport_choice::TransportChoice;

/// Maximum number of pullers that read memory by libfabric at once.
const EXPOSURES_MAX: usize = 4;
/// Maximum time of one call that serves reads. The end of a connection waits for such a call.
const PROGRESS_TIMEOUT: Duration = Duration::from_millis(50);

/// The libfabric transports that an agent offers to a puller.
#[derive(Clone, Default)]
pub(crate) struct FabricOffer {
    /// The agent's option.
    pub(crate) transport: TransportChoice,
    /// Address of this host on the puller's connection. libfabric uses the same network interface. `None` means any
    /// interface.
    pub(crate) local_ip: Option<IpAddr>,
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
    /// Returns the data region of a mount. Returns `None` if the region is not mapped.
    fn from_mount(mount: &Arc<OpenMount>) -> Option<Self> {
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
    /// Acquires a slot. Returns `None` if all are in use.
    fn acquire() -> Option<Self> {
        let increment = |count| (count < EXPOSURES_MAX).then_some(count + 1);
        let updated = EXPOSURES.try_update(Ordering::AcqRel, Ordering::Acquire, increment);
        if updated.is_err() {
            return None;
        }
        Some(Self)
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
    /// A thread calls the provider until `is_stopping` is set.
    Thread {
        is_stopping: Arc<AtomicBool>,
        thread: Option<JoinHandle<()>>,
    },
}

impl ReadServer {
    /// Begins to serve reads of other hosts. If the provider, libfabric's driver, has no hardware that answers reads,
    /// starts a thread that does. The thread ends when the returned value is dropped.
    fn start(mut endpoint: Endpoint) -> std::io::Result<Self> {
        if !endpoint.needs_progress() {
            return Ok(Self::Hardware {
                _endpoint: Box::new(endpoint),
            });
        }
        let is_stopping = Arc::new(AtomicBool::new(false));
        let thread_is_stopping = Arc::clone(&is_stopping);
        let thread = std::thread::Builder::new()
            .name("agent-fabric".into())
            .spawn(move || {
                while !thread_is_stopping.load(Ordering::Relaxed) {
                    endpoint.progress(PROGRESS_TIMEOUT);
                }
            })?;
        Ok(Self::Thread {
            is_stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for ReadServer {
    fn drop(&mut self) {
        if let Self::Thread {
            is_stopping,
            thread,
        } = self
        {
            is_stopping.store(true, Ordering::Relaxed);
            if let Some(thread) = thread.take() {
                // An error means that the thread has panicked, which was reported then.
                let _ = thread.join();
            }
        }
    }
}

/// Memory that is exposed to one puller; see the head of this file. Dropping it ends the exposure.
pub(crate) struct Exposure {
    _server: ReadServer,
    staging_buffers: Vec<Buffer>,
    /// Whether answers have a MAC.
    sends_macs: bool,
    /// Name of the provider.
    provider: String,
    /// Size of the data region.
    region_bytes: u64,
    _slot: ExposureSlot,
}

/// An endpoint with exposed memory.
struct ExposingEndpoint {
    endpoint: Endpoint,
    staging_buffers: Vec<Buffer>,
    /// The data that a puller needs for its reads.
    exposed: Exposed,
}

/// Random keys that a puller must name in its reads. Some providers choose keys of their own instead.
struct RegionKeys {
    arena: u64,
    staging: u64,
}

impl RegionKeys {
    fn random() -> Result<Self, SourceError> {
        let random_key = || getrandom::u64().map_err(|error| refused(error.to_string()));
        Ok(Self {
            arena: random_key()?,
            staging: random_key()?,
        })
    }
}

impl ExposingEndpoint {
    /// Opens an endpoint of a provider (libfabric's driver for one network), and lets the other host read two regions:
    /// the arena, which has files' bytes in memory, and new staging buffers for all other bytes.
    ///
    /// `local_ip` selects the network interface. A remote read must carry the key of its region: the one in `keys`,
    /// unless the provider assigns its own. The returned `exposed` has the valid keys.
    fn open(
        provider: &str,
        local_ip: Option<IpAddr>,
        arena_memory: ArenaMemory,
        keys: &RegionKeys,
    ) -> Result<Self, OfiError> {
        let mut endpoint = Endpoint::open(provider, local_ip)?;
        let arena = endpoint.expose(Arc::new(arena_memory), keys.arena)?;
        let staging_buffers = Pool::create(STAGING_BUFFERS as usize, BLOCK_BYTES as usize)
            .map_err(|error| OfiError::Register {
                provider: provider.to_owned(),
                bytes: (STAGING_BUFFERS * BLOCK_BYTES) as usize,
                why: error.to_string(),
                limit: None,
            })?;
        let staging_pool = Arc::clone(staging_buffers[0].pool());
        let staging = endpoint.expose(staging_pool, keys.staging)?;
        let exposed = Exposed {
            address: endpoint.address()?,
            provider: endpoint.provider().to_owned(),
            arena: arena.into(),
            staging: staging.into(),
        };
        Ok(Self {
            endpoint,
            staging_buffers,
            exposed,
        })
    }
}

impl Exposure {
    /// Exposes the memory of a mount for remote reads (RDMA) by a puller, a process on another host that copies files.
    /// The memory is exposed until the returned exposure is dropped. Also returns the data that the puller needs.
    ///
    /// `providers` are libfabric's drivers on the puller's host. The first one that this host has too is used. If
    /// `sends_macs`, each answer has a message authentication code.
    pub(crate) fn open(
        offer: &FabricOffer,
        mount: &Arc<OpenMount>,
        providers: &[String],
        sends_macs: bool,
    ) -> Result<(Self, Exposed), SourceError> {
        let provider = offer.transport.choose(providers).map_err(refused)?;
        // The slot counts this exposure against the maximum as long as it lives.
        let Some(slot) = ExposureSlot::acquire() else {
            return Err(refused(format!(
                "the agent already serves {EXPOSURES_MAX} pullers by libfabric, the maximum: try again later, or use --transport tcp"
            )));
        };
        let Some(arena_memory) = ArenaMemory::from_mount(mount) else {
            return Err(refused("the arena is not mapped"));
        };
        let region_bytes = arena_memory.bytes as u64;
        let keys = RegionKeys::random()?;
        let ExposingEndpoint {
            endpoint,
            staging_buffers,
            exposed,
        } = ExposingEndpoint::open(&provider, offer.local_ip, arena_memory, &keys)
            .map_err(|error| refused(error.to_string()))?;
        let server = ReadServer::start(endpoint).map_err(|error| refused(error.to_string()))?;
        let exposure = Self {
            _server: server,
            staging_buffers,
            sends_macs,
            provider: exposed.provider.clone(),
            region_bytes,
            _slot: slot,
        };
        Ok((exposure, exposed))
    }

    /// Begins an answer that sends addresses. The puller, the host that copies files, then reads the bytes from this
    /// host's memory. Returns `None` if there is no staging buffer `buffer_index`.
    ///
    /// Bytes that are not in memory are copied to that buffer. The puller must have finished reading the buffer's
    /// earlier content, because it is overwritten. If not, the puller detects a wrong message authentication code.
    pub(crate) fn begin_answer(
        &mut self,
        buffer_index: u32,
        hasher: Option<BlockHasher>,
        deadline: Instant,
    ) -> Option<AddressAnswer<'_>> {
        let staging_start = u64::from(buffer_index) * BLOCK_BYTES;
        let staging_buffer = self.staging_buffers.get_mut(buffer_index as usize)?;
        let mac_hasher = if self.sends_macs { hasher } else { None };
        Some(AddressAnswer::begin(
            staging_buffer,
            staging_start,
            mac_hasher,
            deadline,
        ))
    }
}

impl std::fmt::Display for Exposure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            provider,
            region_bytes,
            ..
        } = self;
        write!(
            f,
            "registered {region_bytes} bytes of memory for ofi:{provider}"
        )
    }
}

fn refused(message: impl Into<String>) -> SourceError {
    SourceError {
        kind: ErrorKind::Refused,
        message: message.into(),
    }
}

impl From<Region> for crate::message::ExposedRegion {
    fn from(region: Region) -> Self {
        let Region { key, base, bytes } = region;
        Self { key, base, bytes }
    }
}
