//! An endpoint of libfabric (a socket for RDMA): exposes memory to endpoints on other hosts, and reads the memory that
//! they expose. A *provider* is libfabric's driver for one kind of network.
//!
//! Several reads fill a buffer. The buffer is *pending* until all of them are complete, and then it is *filled*. A
//! *context* is memory that libfabric uses for one read while it is active.
//!
//! Invariants
//! * A buffer is in [`Endpoint::pending_buffers`] from its first read until its last one is complete. It is dropped
//!   before that only after libfabric has closed the endpoint. If the endpoint cannot be closed, the buffer is leaked.
//! * A context is free, or belongs to exactly one active read.
//!
//! libfabric allows one thread at a time to use an endpoint (FI_THREAD_DOMAIN). So all methods that use libfabric's
//! state take `&mut self`.

use std::collections::VecDeque;
use std::mem::{ManuallyDrop, offset_of};
use std::net::IpAddr;
use std::ops::Range;
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ofi::abi::{
    Av, AvAttr, Context, Cq, CqAttr, CqEntry, CqErrEntry, Domain, Ep, FI_CQ_FORMAT_CONTEXT,
    FI_EAVAIL, FI_ENABLE, FI_MR_ENDPOINT, FI_MR_LOCAL, FI_MR_PROV_KEY, FI_MR_VIRT_ADDR,
    FI_PROGRESS_AUTO, FI_READ, FI_RECV, FI_REMOTE_READ, FI_TRANSMIT, FI_WAIT_FD, FI_WAIT_NONE,
    Fabric, Fid, Info, Mr, OpsCm, OpsMr, OpsRma, has,
};
use crate::ofi::error::{OfiError, Operation};
use crate::ofi::library::{InfoList, Library, provider_name};
use crate::ofi::pool::{Buffer, Memory, Pool};

/// Maximum number of active reads.
const CONTEXTS: usize = 128;
/// Bytes of the longest address of an endpoint. Those of libfabric have at most 64.
const ADDRESS_BYTES_MAX: usize = 256;
/// Maximum time of a single wait for a completion. If a provider misses a wake, the next wait finds the completion.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// Maximum wait for active reads before their endpoint is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of polls that only yield the processor, before the thread begins to sleep. Applies to providers that cannot
/// wait.
const SPINS: u32 = 200;
/// Sleep between two later polls of such a provider.
const POLL_PAUSE: Duration = Duration::from_micros(50);
/// Bytes of a read if the provider states no maximum.
const READ_BYTES_DEFAULT: usize = 4096;
/// Bytes of a key if the provider states no size.
const KEY_BYTES_DEFAULT: usize = 8;
/// Error numbers that mean that the queue has no completion now.
const NO_COMPLETION: [isize; 4] = [
    0,
    libc::EAGAIN as isize,
    libc::EINTR as isize,
    libc::ECANCELED as isize,
];
/// Hint to the provider: number of addresses that an endpoint will use.
const ADDRESSES_HINT: usize = 4;

/// An object of libfabric. It is closed when it is dropped.
struct Object<T>(NonNull<T>);

impl<T> Object<T> {
    /// Returns the object that a call has created. `code` is the result of the call.
    ///
    /// # Safety
    /// `created` is null, or points to an object that begins with a `struct fid` and that only the caller owns.
    unsafe fn from_call(created: *mut T, code: i32) -> Result<Self, isize> {
        check_code(code)?;
        match NonNull::new(created) {
            Some(object) => Ok(Self(object)),
            None => Err(-(libc::EIO as isize)),
        }
    }

    fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }

    fn fid(&self) -> *mut Fid {
        self.0.as_ptr().cast()
    }

    /// Closes the object. If this fails, libfabric still uses the object.
    fn close(self) -> Result<(), isize> {
        let object = ManuallyDrop::new(self);
        // SAFETY: the object is open, and is closed once, because its drop does not run.
        check_code(unsafe { close(object.fid()) })
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: the object is open and closed once. The order of the fields of `Objects` ensures that all objects
        // that depend on it are closed before.
        let _ = unsafe { close(self.fid()) };
    }
}

/// Closes an object of libfabric.
///
/// # Safety
/// `fid` points to an open object.
unsafe fn close(fid: *mut Fid) -> i32 {
    // SAFETY: each object has a table with this function.
    unsafe { ((*(*fid).ops).close)(fid) }
}

/// Binds an object to another one.
///
/// # Safety
/// Both point to open objects of one domain.
unsafe fn bind(fid: *mut Fid, to: *mut Fid, flags: u64) -> Result<(), isize> {
    // SAFETY: each object has a table with this function.
    check_code(unsafe { ((*(*fid).ops).bind)(fid, to, flags) })
}

/// Enables an object, after which it can be used.
///
/// # Safety
/// `fid` points to an open object.
unsafe fn enable(fid: *mut Fid) -> Result<(), isize> {
    // SAFETY: each object has a table with this function.
    check_code(unsafe { ((*(*fid).ops).control)(fid, FI_ENABLE, null_mut()) })
}

/// Converts the result of a call of libfabric to a `Result`.
fn check_code(code: i32) -> Result<(), isize> {
    match code {
        0 => Ok(()),
        code => Err(code as isize),
    }
}

/// Memory of this process that other endpoints may read until this endpoint is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Key that a read must name. Only endpoints that know it can read.
    pub key: u64,
    /// Address of the first byte in reads: a virtual address or 0, as the provider requires.
    pub base: u64,
    /// Size of the region.
    pub bytes: u64,
}

/// A [`Region`] of another endpoint. The other host has described it, and it was checked.
#[derive(Clone, Copy, Debug)]
pub struct RemoteRegion {
    key: u64,
    base: u64,
    bytes: u64,
}

impl RemoteRegion {
    /// Checks that the addresses of a described region do not overflow.
    pub fn check(region: &Region) -> Result<Self, OfiError> {
        let Region { key, base, bytes } = *region;
        if base.checked_add(bytes).is_none() {
            return Err(OfiError::Implausible("a region without an end"));
        }
        Ok(Self { key, base, bytes })
    }

    /// Makes a read from the offset `at` of the region into the range `into` of a buffer. Fails if the read leaves the
    /// region.
    pub fn read(&self, at: u64, into: Range<usize>) -> Result<Read, OfiError> {
        let bytes = into.len() as u64;
        if into.start > into.end || at.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(OfiError::Implausible("bytes beyond the end of its region"));
        }
        Ok(Read {
            into,
            address: self.base + at,
            key: self.key,
        })
    }
}

/// A read: a range of a remote region, and the range of a buffer for its bytes.
#[derive(Clone, Debug)]
pub struct Read {
    into: Range<usize>,
    address: u64,
    key: u64,
}

impl Read {
    /// Divides the read into reads of at most `bytes_max` bytes, and adds them to `reads`.
    fn split(&self, bytes_max: usize, reads: &mut Vec<Self>) {
        for start in self.into.clone().step_by(bytes_max) {
            // A provider without a maximum states the largest number, so `start + bytes_max` may overflow.
            let bytes = (self.into.end - start).min(bytes_max);
            reads.push(Self {
                into: start..start + bytes,
                address: self.address + (start - self.into.start) as u64,
                key: self.key,
            });
        }
    }
}

/// A buffer whose reads are all complete.
pub struct FilledBuffer {
    /// The number that was passed to [`Endpoint::land`].
    pub number: u64,
    /// The buffer that was passed to [`Endpoint::land`].
    pub buffer: Buffer,
}

/// A buffer with reads that are not all complete.
struct PendingBuffer {
    number: u64,
    buffer: Buffer,
    /// Number of reads that are active or not begun.
    incomplete_reads: usize,
}

/// A read that is not begun.
struct QueuedRead {
    /// Index of its buffer in [`Endpoint::pending_buffers`].
    buffer_index: usize,
    read: Read,
}

/// Memory that other endpoints may read.
struct ExposedMemory {
    _registration: Object<Mr>,
    _memory: Arc<dyn Memory>,
}

/// Memory for the bytes of reads.
struct ReadMemory {
    /// `None` if the provider needs no registration.
    registration: Option<Object<Mr>>,
    pool: Arc<Pool>,
}

/// An endpoint of libfabric; see the head of this file.
pub struct Endpoint {
    library: &'static Library,
    /// Name of the provider.
    provider: String,
    /// They are moved out when the endpoint is shut down.
    objects: ManuallyDrop<Objects>,
    is_shut_down: bool,
    contexts: Vec<NonNull<Context>>,
    /// For each context the index of the pending buffer whose read uses it; `None` if the context is free.
    buffer_of_context: Vec<Option<usize>>,
    /// Indexes of free contexts.
    free_contexts: Vec<usize>,
    pending_buffers: Vec<Option<PendingBuffer>>,
    queued_reads: VecDeque<QueuedRead>,
    filled_buffers: VecDeque<FilledBuffer>,
    active_reads: usize,
    /// Total wait since the last complete read.
    time_waited: Duration,
    /// Address of the endpoint from which reads are made, as libfabric numbers it; `None` before [`Endpoint::connect`].
    peer: Option<u64>,
    /// The first error. No read begins after it.
    first_error: Option<OfiError>,
}

/// Objects of libfabric, in the order in which they must be closed.
struct Objects {
    exposed: Vec<ExposedMemory>,
    endpoint: Object<Ep>,
    read_memory: Vec<ReadMemory>,
    addresses: Object<Av>,
    completions: Object<Cq>,
    /// Whether the thread can wait for the queue of completions.
    can_wait: bool,
    domain: Object<Domain>,
    _fabric: Object<Fabric>,
    info: InfoList,
}

// SAFETY: libfabric's objects may be used by any thread, but by one at a time (FI_THREAD_DOMAIN). No method with
// `&self` changes them, and the contexts belong to this value alone.
unsafe impl Send for Endpoint {}

impl Endpoint {
    /// Opens an endpoint of a provider, libfabric's driver for one kind of network. It can expose memory at once;
    /// before it reads, it must be connected. If the provider uses IP addresses, the endpoint uses the network
    /// interface with the address `local_ip`.
    pub fn open(provider: &str, local_ip: Option<IpAddr>) -> Result<Self, OfiError> {
        let library = Library::load()?;
        let info = library.find(provider, local_ip)?;
        let full_name = provider_name(info.first());
        let objects = Objects::open(library, info).map_err(|error| OfiError::Failed {
            provider: full_name.clone(),
            operation: Operation::Open,
            why: library.describe(error),
        })?;
        // libfabric keeps the addresses of the contexts, so they must not move with this value.
        let contexts = (0..CONTEXTS).map(|_| NonNull::from(Box::leak(Box::default())));
        Ok(Self {
            library,
            provider: full_name,
            objects: ManuallyDrop::new(objects),
            is_shut_down: false,
            contexts: contexts.collect(),
            buffer_of_context: vec![None; CONTEXTS],
            free_contexts: (0..CONTEXTS).collect(),
            pending_buffers: Vec::new(),
            queued_reads: VecDeque::new(),
            filled_buffers: VecDeque::new(),
            active_reads: 0,
            time_waited: Duration::ZERO,
            peer: None,
            first_error: None,
        })
    }

    /// Full name of the provider.
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Whether other endpoints can read exposed memory only while [`Endpoint::progress`] is called.
    pub fn needs_progress(&self) -> bool {
        // SAFETY: the pointer is null, or points to a part of the entry, which lives as long as `objects`.
        let domain = unsafe { self.objects.info.first().domain_attr.as_ref() };
        let Some(domain) = domain else {
            return true;
        };
        domain.data_progress != FI_PROGRESS_AUTO || domain.control_progress != FI_PROGRESS_AUTO
    }

    /// Makes the error of a failed operation.
    fn failure(&self, operation: Operation, error: isize) -> OfiError {
        OfiError::Failed {
            provider: self.provider.clone(),
            operation,
            why: self.library.describe(error),
        }
    }

    /// Makes the error of memory that cannot be registered.
    fn registration_failure(&self, bytes: usize, error: isize) -> OfiError {
        let memlock_limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        OfiError::Register {
            provider: self.provider.clone(),
            bytes,
            why: self.library.describe(error),
            // A limit that the memory does not exceed is not the reason.
            limit: memlock_limit.filter(|limit| *limit < bytes as u64),
        }
    }

    // ---- exposed memory ------------------------------------------------------------------------

    /// Returns the address of this endpoint in the form of its provider (libfabric's driver). An endpoint on another
    /// host passes it to [`Endpoint::connect`].
    pub fn address(&self) -> Result<Vec<u8>, OfiError> {
        let mut address = vec![0; ADDRESS_BYTES_MAX];
        let mut length = address.len();
        let endpoint = self.objects.endpoint.as_ptr();
        // SAFETY: the endpoint is open, the table is checked for the function, and `address` has `length` bytes.
        let code = unsafe {
            let ops = (*endpoint).cm;
            if has(ops, offset_of!(OpsCm, getname)) {
                ((*ops).getname)(endpoint.cast(), address.as_mut_ptr().cast(), &mut length)
            } else {
                -libc::ENOSYS
            }
        };
        check_code(code).map_err(|error| self.failure(Operation::Open, error))?;
        address.truncate(length);
        Ok(address)
    }

    /// Allows endpoints of other hosts to read memory, until this endpoint is closed. Reads must name the key of the
    /// returned region, which is `key` or one that the provider (libfabric's driver) has chosen.
    pub fn expose(&mut self, memory: Arc<dyn Memory>, key: u64) -> Result<Region, OfiError> {
        let start = memory.start();
        let bytes = memory.bytes();
        let registration = self
            .objects
            .register(start, bytes, FI_REMOTE_READ, key)
            .map_err(|error| self.registration_failure(bytes, error))?;
        // SAFETY: the registration is open.
        let actual_key = unsafe { (*registration.as_ptr()).key };
        // With this mode, reads name addresses of this process; otherwise offsets in the region.
        let uses_virtual_addresses = self.objects.mr_mode() & FI_MR_VIRT_ADDR != 0;
        let base = if uses_virtual_addresses {
            start as u64
        } else {
            0
        };
        self.objects.exposed.push(ExposedMemory {
            _registration: registration,
            _memory: memory,
        });
        Ok(Region {
            key: actual_key,
            base,
            bytes: bytes as u64,
        })
    }

    /// Lets the provider answer the reads of other endpoints, for about `time`.
    pub fn progress(&mut self, time: Duration) {
        let deadline = Instant::now() + time;
        let mut spins = 0;
        while Instant::now() < deadline {
            // Completions and errors here concern reads of other endpoints, which receive the result themselves.
            match self.objects.next_completion(deadline) {
                Ok(Some(_)) | Err(_) => spins = 0,
                Ok(None) => self.objects.pause(&mut spins),
            }
        }
    }

    // ---- reads ---------------------------------------------------------------------------------

    /// Sets the endpoint of the other host, from which this one reads memory. Nothing is sent. The address comes from
    /// another host, so its length is checked.
    pub fn connect(&mut self, address: &[u8]) -> Result<(), OfiError> {
        if address.is_empty() || address.len() >= ADDRESS_BYTES_MAX {
            return Err(OfiError::Implausible("an address of an invalid length"));
        }
        // A provider reads as many bytes as its addresses have, or up to a zero byte. Both end within this array of
        // zeros, which is also aligned.
        let mut padded_address = [0_u64; ADDRESS_BYTES_MAX / size_of::<u64>()];
        let chunks = address.chunks(size_of::<u64>());
        for (word, chunk) in padded_address.iter_mut().zip(chunks) {
            let mut word_bytes = [0; size_of::<u64>()];
            word_bytes[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(word_bytes);
        }
        let mut peer = u64::MAX;
        let table = self.objects.addresses.as_ptr();
        let address_start = padded_address.as_ptr().cast();
        // SAFETY: the table of addresses is open and has this function. `padded_address` is longer than any address.
        let inserted_count =
            unsafe { ((*(*table).ops).insert)(table, address_start, 1, &mut peer, 0, null_mut()) };
        if inserted_count != 1 {
            let code = if inserted_count < 0 {
                inserted_count
            } else {
                -libc::EINVAL
            };
            return Err(self.failure(Operation::Connect, code as isize));
        }
        self.peer = Some(peer);
        Ok(())
    }

    /// Registers the memory of a pool with libfabric. Its buffers can then be used for reads until the endpoint is
    /// closed. Some providers (libfabric's drivers) need no registration; the pool is then only kept.
    pub fn prepare(&mut self, pool: &Arc<Pool>) -> Result<(), OfiError> {
        let needs_registration = self.objects.mr_mode() & FI_MR_LOCAL != 0;
        let registration = if needs_registration {
            // No other endpoint reads this memory, so its key is never used.
            let key = 0;
            let registration = self
                .objects
                .register(pool.start(), pool.bytes(), FI_READ, key)
                .map_err(|error| self.registration_failure(pool.bytes(), error))?;
            Some(registration)
        } else {
            None
        };
        self.objects.read_memory.push(ReadMemory {
            registration,
            pool: Arc::clone(pool),
        });
        Ok(())
    }

    /// Begins reads of the other host's memory into a buffer. The endpoint must be connected, and the buffer's pool
    /// prepared. When all reads are complete, [`Endpoint::poll`] returns the buffer with `number`, by which the caller
    /// identifies it.
    ///
    /// A read that exceeds the provider's maximum is split. Reads that cannot be begun at once are queued.
    pub fn land(&mut self, number: u64, buffer: Buffer, reads: Vec<Read>) -> Result<(), OfiError> {
        let read_bytes_max = self.objects.read_bytes_max();
        let mut split_reads = Vec::with_capacity(reads.len());
        for read in reads {
            assert!(read.into.end <= buffer.len(), "a read is within its buffer");
            read.split(read_bytes_max, &mut split_reads);
        }
        if split_reads.is_empty() {
            self.filled_buffers
                .push_back(FilledBuffer { number, buffer });
            return Ok(());
        }
        let buffer_index = self.add_pending(PendingBuffer {
            number,
            buffer,
            incomplete_reads: split_reads.len(),
        });
        for read in split_reads {
            self.queued_reads
                .push_back(QueuedRead { buffer_index, read });
        }
        self.begin_reads()
    }

    /// Adds a pending buffer. Returns its index.
    fn add_pending(&mut self, pending: PendingBuffer) -> usize {
        let free_index = self.pending_buffers.iter().position(Option::is_none);
        if let Some(index) = free_index {
            self.pending_buffers[index] = Some(pending);
            return index;
        }
        self.pending_buffers.push(Some(pending));
        self.pending_buffers.len() - 1
    }

    /// Returns a filled buffer (all of its reads are complete), or `None` if there is none within `timeout`. Begins
    /// queued reads meanwhile.
    ///
    /// Fails if reads are active and none was completed for `stall_timeout`, counted only while this function waits.
    /// After an error, no further read is begun.
    pub fn poll(
        &mut self,
        timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<Option<FilledBuffer>, OfiError> {
        let mut polled_at = Instant::now();
        let deadline = polled_at + timeout;
        let mut spins = 0;
        loop {
            if let Some(filled) = self.filled_buffers.pop_front() {
                return Ok(Some(filled));
            }
            if let Some(error) = &self.first_error {
                return Err(error.clone());
            }
            match self.objects.next_completion(deadline) {
                Ok(Some(context)) => {
                    self.complete_read(context);
                    spins = 0;
                }
                Ok(None) => {
                    let now = Instant::now();
                    self.time_waited += now - polled_at;
                    polled_at = now;
                    self.check_stall(stall_timeout)?;
                    if now >= deadline {
                        return Ok(None);
                    }
                    self.objects.pause(&mut spins);
                }
                Err(error) => return Err(self.record_error(self.failure(Operation::Read, error))),
            }
            self.begin_reads()?;
        }
    }

    /// Fails if there are reads, and none of them was completed for `timeout`.
    fn check_stall(&mut self, timeout: Duration) -> Result<(), OfiError> {
        let has_reads = self.active_reads > 0 || !self.queued_reads.is_empty();
        if !has_reads {
            self.time_waited = Duration::ZERO;
        }
        if self.time_waited < timeout {
            return Ok(());
        }
        let provider = self.provider.clone();
        Err(self.record_error(OfiError::Silent {
            provider,
            limit: timeout,
        }))
    }

    /// Records an error, after which the endpoint begins no read. Returns the first error that was recorded.
    fn record_error(&mut self, error: OfiError) -> OfiError {
        self.first_error.get_or_insert(error).clone()
    }

    /// Records that the read with this context (libfabric's memory for one active read) is complete, and frees the
    /// context. After the last read of a buffer, the buffer is ready to be returned.
    fn complete_read(&mut self, context: *mut Context) {
        let mut contexts = self.contexts.iter();
        let Some(context_index) = contexts.position(|own| own.as_ptr() == context) else {
            // The completion does not concern a read of this endpoint.
            return;
        };
        // No read uses the context now.
        let Some(buffer_index) = self.buffer_of_context[context_index].take() else {
            return;
        };
        self.free_contexts.push(context_index);
        self.active_reads -= 1;
        self.time_waited = Duration::ZERO;
        let slot = &mut self.pending_buffers[buffer_index];
        let pending = slot.as_mut().expect("a read has a pending buffer");
        pending.incomplete_reads -= 1;
        if pending.incomplete_reads == 0 {
            let PendingBuffer { number, buffer, .. } = slot.take().expect("it was there above");
            self.filled_buffers
                .push_back(FilledBuffer { number, buffer });
        }
    }

    /// Begins as many queued reads as the provider (libfabric's driver) accepts, each with a free context, which is
    /// libfabric's memory for one active read. The others remain queued. Fails after any earlier error.
    fn begin_reads(&mut self) -> Result<(), OfiError> {
        if let Some(error) = &self.first_error {
            return Err(error.clone());
        }
        while let (Some(queued), Some(&context_index)) =
            (self.queued_reads.front(), self.free_contexts.last())
        {
            let buffer_index = queued.buffer_index;
            let read = queued.read.clone();
            let code = self.begin_read(buffer_index, &read, context_index);
            match -code {
                0 => {
                    self.buffer_of_context[context_index] = Some(buffer_index);
                    self.active_reads += 1;
                    self.queued_reads.pop_front();
                    self.free_contexts.pop();
                }
                // The provider accepts no more reads now.
                errno if errno == libc::EAGAIN as isize => return Ok(()),
                _ => return Err(self.record_error(self.failure(Operation::Read, code))),
            }
        }
        Ok(())
    }

    /// Passes a read to libfabric, with a free context (memory that libfabric uses until the read is complete). The
    /// endpoint must be connected. Returns libfabric's code: 0, or a negated error number.
    ///
    /// If the code is 0, the caller removes the context from the free ones.
    fn begin_read(&mut self, buffer_index: usize, read: &Read, context_index: usize) -> isize {
        let pending = self.pending_buffers[buffer_index].as_mut();
        let pending = pending.expect("a read has a pending buffer");
        let descriptor = self.objects.descriptor(pending.buffer.pool());
        let peer = self.peer.expect("connected before it reads");
        let into = &mut pending.buffer[read.into.clone()];
        let endpoint = self.objects.endpoint.as_ptr();
        // SAFETY: the endpoint is open, and the table is checked for the function. The pending buffer owns the memory,
        // and the caller removes the context from the free ones. Both therefore do not move and are not accessed until
        // the read is complete or the endpoint is closed.
        unsafe {
            let ops = (*endpoint).rma;
            if !has(ops, offset_of!(OpsRma, read)) {
                return -(libc::ENOSYS as isize);
            }
            ((*ops).read)(
                endpoint,
                into.as_mut_ptr().cast(),
                into.len(),
                descriptor,
                peer,
                read.address,
                read.key,
                self.contexts[context_index].as_ptr().cast(),
            )
        }
    }
}

impl Objects {
    /// Opens all objects of libfabric that an endpoint needs, for the network that `info` describes. After an error,
    /// closes those that were opened, the last one first, and returns the negated error number.
    fn open(library: &'static Library, info: InfoList) -> Result<Self, isize> {
        let entry: *mut Info = info.as_ptr();
        // SAFETY: libfabric has made `entry` and its parts, and they live as long as `info`. Each object is made from
        // earlier ones, by a function that its table has in every version, and lives until the later ones are closed.
        unsafe {
            let mut fabric_ptr = null_mut();
            let code = (library.fabric)((*entry).fabric_attr, &mut fabric_ptr, null_mut());
            let fabric = Object::<Fabric>::from_call(fabric_ptr, code)?;

            let mut domain_ptr = null_mut();
            let open_domain = (*(*fabric.as_ptr()).ops).domain;
            let code = open_domain(fabric.as_ptr(), entry, &mut domain_ptr, null_mut());
            let domain = Object::<Domain>::from_call(domain_ptr, code)?;

            let CompletionQueue {
                queue: completions,
                can_wait,
            } = open_completions(&domain)?;
            let addresses = open_addresses(&domain, entry)?;

            let mut endpoint_ptr = null_mut();
            let open_endpoint = (*(*domain.as_ptr()).ops).endpoint;
            let code = open_endpoint(domain.as_ptr(), entry, &mut endpoint_ptr, null_mut());
            let endpoint = Object::<Ep>::from_call(endpoint_ptr, code)?;
            // libfabric enables an endpoint only after the table of addresses and the queue are bound to it.
            bind(endpoint.fid(), addresses.fid(), 0)?;
            bind(endpoint.fid(), completions.fid(), FI_TRANSMIT | FI_RECV)?;
            enable(endpoint.fid())?;
            Ok(Self {
                exposed: Vec::new(),
                endpoint,
                read_memory: Vec::new(),
                addresses,
                completions,
                can_wait,
                domain,
                _fabric: fabric,
                info,
            })
        }
    }

    /// Returns the flags that say which properties of registered memory the provider requires.
    fn mr_mode(&self) -> i32 {
        // SAFETY: the pointer is null, or points to a part of the entry, which lives as long as `self`.
        let domain = unsafe { self.info.first().domain_attr.as_ref() };
        domain.map_or(0, |domain| domain.mr_mode)
    }

    /// Returns the maximum number of bytes of one read.
    fn read_bytes_max(&self) -> usize {
        // SAFETY: the pointer is null, or points to a part of the entry, which lives as long as `self`.
        let endpoint = unsafe { self.info.first().ep_attr.as_ref() };
        endpoint.map_or(READ_BYTES_DEFAULT, |endpoint| endpoint.max_msg_size.max(1))
    }

    /// Registers memory with libfabric, so that the network device can access it. `access` says for which reads: those
    /// of other hosts, which must name `key`, or those of this endpoint. The provider may choose another key.
    ///
    /// The caller must keep the memory as long as the returned registration. The error is a negated error number.
    fn register(
        &self,
        start: *const u8,
        bytes: usize,
        access: u64,
        key: u64,
    ) -> Result<Object<Mr>, isize> {
        let domain = self.domain.as_ptr();
        let accepted_key = self.shorten_key(key);
        let offset = 0;
        let flags = 0;
        let mut registration_ptr = null_mut();
        // SAFETY: the domain is open, and the table is checked for the function. The memory stays mapped while it is
        // registered, because the caller keeps both together.
        let registration = unsafe {
            let ops = (*domain).mr;
            if !has(ops, offset_of!(OpsMr, reg)) {
                return Err(-(libc::ENOSYS as isize));
            }
            let code = ((*ops).reg)(
                domain.cast(),
                start.cast(),
                bytes,
                access,
                offset,
                accepted_key,
                flags,
                &mut registration_ptr,
                null_mut(),
            );
            Object::<Mr>::from_call(registration_ptr, code)?
        };
        // Some providers demand that memory for other hosts is bound to the endpoint.
        if access == FI_REMOTE_READ && self.mr_mode() & FI_MR_ENDPOINT != 0 {
            // SAFETY: both objects are open and belong to one domain.
            unsafe {
                bind(registration.fid(), self.endpoint.fid(), 0)?;
                enable(registration.fid())?;
            }
        }
        Ok(registration)
    }

    /// Returns the part of a key that the provider accepts; 0 if the provider chooses keys itself.
    fn shorten_key(&self, key: u64) -> u64 {
        let provider_chooses_key = self.mr_mode() & FI_MR_PROV_KEY != 0;
        if provider_chooses_key {
            return 0;
        }
        // SAFETY: the pointer is null, or points to a part of the entry, which lives as long as `self`.
        let domain = unsafe { self.info.first().domain_attr.as_ref() };
        let key_bytes = domain.map_or(KEY_BYTES_DEFAULT, |domain| domain.mr_key_size);
        match key_bytes {
            1..=7 => key & ((1 << (8 * key_bytes)) - 1),
            _ => key,
        }
    }

    /// Returns the descriptor of a pool's registration, which libfabric requires with each read. Returns null without a
    /// registration.
    fn descriptor(&self, pool: &Arc<Pool>) -> *mut std::ffi::c_void {
        let mut read_memory = self.read_memory.iter();
        let memory = read_memory.find(|memory| Arc::ptr_eq(&memory.pool, pool));
        let Some(registration) = memory.and_then(|memory| memory.registration.as_ref()) else {
            return null_mut();
        };
        // SAFETY: the registration is open as long as `self` lives.
        unsafe { (*registration.as_ptr()).mem_desc }
    }

    /// Returns the context of a complete read (the memory by which libfabric names the read), or `None` if there is
    /// none now. If the provider can wait, waits for one until the deadline, at most [`WAIT_MAX`].
    ///
    /// An error is the negated error number of a failed read or of the queue.
    fn next_completion(&mut self, deadline: Instant) -> Result<Option<*mut Context>, isize> {
        let queue = self.completions.as_ptr();
        let mut entry = CqEntry {
            op_context: null_mut(),
        };
        let into = (&raw mut entry).cast();
        let wait = deadline
            .saturating_duration_since(Instant::now())
            .min(WAIT_MAX);
        // SAFETY: the queue is open, its table has both functions in every version, and `entry` has the format with
        // which the queue was opened.
        let count = unsafe {
            let ops = (*queue).ops;
            if self.can_wait && !wait.is_zero() {
                ((*ops).sread)(queue, into, 1, null(), wait.as_millis().max(1) as i32)
            } else {
                ((*ops).read)(queue, into, 1)
            }
        };
        let error_number = -count;
        if count == 1 {
            Ok(Some(entry.op_context.cast()))
        } else if error_number == FI_EAVAIL {
            // A read has failed. Another call removes its error from the queue.
            Err(self.take_read_error())
        } else if NO_COMPLETION.contains(&error_number) {
            Ok(None)
        } else {
            Err(count)
        }
    }

    /// Removes the error of a failed read from the queue, and returns it.
    fn take_read_error(&mut self) -> isize {
        let queue = self.completions.as_ptr();
        // SAFETY: all fields are integers and pointers, for which zero is valid.
        let mut entry: CqErrEntry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open and has this function, and the entry is as large as that of any version.
        let count = unsafe { ((*(*queue).ops).readerr)(queue, &mut entry, 0) };
        if count == 1 && entry.err != 0 {
            -(entry.err as isize)
        } else {
            -(libc::EIO as isize)
        }
    }

    /// Pauses between two polls if the provider cannot wait: first it yields the processor, later it sleeps.
    fn pause(&self, spins: &mut u32) {
        if self.can_wait {
            return;
        }
        *spins += 1;
        if *spins < SPINS {
            std::thread::yield_now()
        } else {
            std::thread::sleep(POLL_PAUSE)
        }
    }
}

/// Opens the table in which libfabric keeps the addresses of other hosts' endpoints. The error is a negated error
/// number.
///
/// # Safety
/// The domain is open, and `entry` is the entry from which it was made.
unsafe fn open_addresses(domain: &Object<Domain>, entry: *mut Info) -> Result<Object<Av>, isize> {
    let mut addresses_ptr = null_mut();
    // SAFETY: the entry is valid, and its parts live as long as it. The domain is open, and its table has this function
    // in every version.
    unsafe {
        let domain_attributes = (*entry).domain_attr.as_ref();
        let mut attributes = AvAttr {
            kind: domain_attributes.map_or(0, |attributes| attributes.av_type),
            count: ADDRESSES_HINT,
            ..AvAttr::default()
        };
        let open = (*(*domain.as_ptr()).ops).av_open;
        let code = open(
            domain.as_ptr(),
            &mut attributes,
            &mut addresses_ptr,
            null_mut(),
        );
        Object::from_call(addresses_ptr, code)
    }
}

/// A queue of completions.
struct CompletionQueue {
    queue: Object<Cq>,
    /// Whether a thread can wait for the queue.
    can_wait: bool,
}

/// Opens the queue in which libfabric reports complete reads: one that can wait for them if the provider has it,
/// otherwise one that must be polled. The error is a negated error number.
///
/// # Safety
/// The domain is open.
unsafe fn open_completions(domain: &Object<Domain>) -> Result<CompletionQueue, isize> {
    let mut last_error = -(libc::ENOSYS as isize);
    // Only queues with a descriptor are used for waiting. Other queues wait by spinning, and the queue of shm exceeds
    // its timeout.
    for (wait, can_wait) in [(FI_WAIT_FD, true), (FI_WAIT_NONE, false)] {
        let mut attributes = CqAttr {
            size: 2 * CONTEXTS,
            format: FI_CQ_FORMAT_CONTEXT,
            wait_obj: wait,
            ..CqAttr::default()
        };
        let mut queue_ptr = null_mut();
        // SAFETY: the domain is open, and its table has this function in every version.
        let opened = unsafe {
            let open = (*(*domain.as_ptr()).ops).cq_open;
            let code = open(domain.as_ptr(), &mut attributes, &mut queue_ptr, null_mut());
            Object::from_call(queue_ptr, code)
        };
        match opened {
            Ok(queue) => return Ok(CompletionQueue { queue, can_wait }),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

impl Endpoint {
    /// Closes the endpoint, after a short wait for active reads. Returns the pending and the filled buffers. Pending
    /// ones may have only a part of their bytes. After an error libfabric may still write to the buffers, so they are
    /// leaked.
    pub fn close(mut self) -> Result<Vec<Buffer>, OfiError> {
        self.shut_down()
            .map_err(|error| self.failure(Operation::Close, error))?;
        let mut buffers = Vec::new();
        for pending in self.pending_buffers.drain(..).flatten() {
            buffers.push(pending.buffer);
        }
        for filled in self.filled_buffers.drain(..) {
            buffers.push(filled.buffer);
        }
        Ok(buffers)
    }

    /// Waits for the active reads, for at most [`CLOSE_TIMEOUT`]. A close would cancel active reads. In ofi_rxm of
    /// libfabric 1.17, about one of ten such closes dereferences a null pointer.
    fn wait_for_active_reads(&mut self) {
        self.queued_reads.clear();
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        let mut spins = 0;
        while self.first_error.is_none() && self.active_reads > 0 && Instant::now() < deadline {
            match self.objects.next_completion(deadline) {
                Ok(Some(context)) => {
                    self.complete_read(context);
                    spins = 0;
                }
                Ok(None) => self.objects.pause(&mut spins),
                Err(_) => return,
            }
        }
    }

    /// Closes all objects of libfabric, in the order that it demands. Waits a short time for active reads before that.
    ///
    /// If the endpoint cannot be closed, libfabric may still write to the buffers of its reads. Everything that the
    /// reads may use is then leaked, and the negated error number is returned. Further calls do nothing.
    fn shut_down(&mut self) -> Result<(), isize> {
        // Only the first call closes the objects.
        if std::mem::replace(&mut self.is_shut_down, true) {
            return Ok(());
        }
        self.wait_for_active_reads();
        // SAFETY: `is_shut_down` ensures that the objects are moved out once; nothing uses them afterwards.
        let Objects {
            exposed,
            endpoint,
            read_memory,
            addresses,
            completions,
            domain,
            _fabric: fabric,
            info,
            ..
        } = unsafe { ManuallyDrop::take(&mut self.objects) };
        // Registrations that are bound to the endpoint must be closed before it.
        drop(exposed);
        if let Err(error) = endpoint.close() {
            // Never freed, because libfabric may still use them.
            std::mem::forget((read_memory, addresses, completions, domain, fabric, info));
            std::mem::forget(std::mem::take(&mut self.pending_buffers));
            return Err(error);
        }
        // Each object is closed before those from which it was made.
        drop(read_memory);
        drop(addresses);
        drop(completions);
        drop(domain);
        drop(fabric);
        drop(info);
        for context in self.contexts.drain(..) {
            // SAFETY: `open` has made it by `Box::leak`, and no read uses it, because the endpoint is closed.
            drop(unsafe { Box::from_raw(context.as_ptr()) });
        }
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Nothing else can be done about an error here; what libfabric may still use was leaked.
        let _ = self.shut_down();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_is_divided_only_where_it_is_longer_than_the_provider_allows() {
        let read = Read {
            into: 4096..12_288,
            address: 100,
            key: 7,
        };
        let split = |bytes_max| {
            let mut reads = Vec::new();
            read.split(bytes_max, &mut reads);
            let reads = reads.into_iter();
            reads
                .map(|part| (part.into, part.address))
                .collect::<Vec<_>>()
        };
        assert_eq!(split(usize::MAX), [(4096..12_288, 100)]);
        assert_eq!(split(8000), [(4096..12_096, 100), (12_096..12_288, 8100)]);
    }
}
