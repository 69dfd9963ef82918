//! An endpoint of libfabric: exposes memory to other endpoints, and reads the memory that they expose.
//!
//! A *landing* is a buffer with all the reads that fill it. It has *landed* when all of them are complete. A *context*
//! is memory that libfabric uses for one read while it is under way.
//!
//! Invariants
//! * A landing is in [`Endpoint::landings`] from its first read until its last one is complete. Its buffer is dropped
//!   before that only after libfabric has closed the endpoint. If the endpoint cannot be closed, the buffer is leaked.
//! * A context is free, or belongs to exactly one read under way.
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
use crate::ofi::library::{InfoList, Library, provider_of};
use crate::ofi::pool::{Buffer, Memory, Pool};

/// Maximum number of reads under way.
const CONTEXTS: usize = 128;
/// Bytes of the longest address of an endpoint. Those of libfabric have at most 64.
const ADDRESS_BYTES_MAX: usize = 256;
/// Maximum time of a single wait for a completion. If a provider misses a wake, the next wait finds the completion.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// Maximum wait for reads under way before their endpoint is closed.
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
/// Hint to the provider: number of addresses that an endpoint will use.
const ADDRESSES_HINT: usize = 4;

/// An object of libfabric. It is closed when it is dropped.
struct Object<T>(NonNull<T>);

impl<T> Object<T> {
    /// Returns the object that a call has made. `code` is the result of the call.
    ///
    /// # Safety
    /// `made` is null, or points to an object that begins with a `struct fid` and that only the caller owns.
    unsafe fn take(made: *mut T, code: i32) -> Result<Self, isize> {
        match (code, NonNull::new(made)) {
            (0, Some(object)) => Ok(Self(object)),
            (0, None) => Err(-(libc::EIO as isize)),
            (code, _) => Err(code as isize),
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
        match unsafe { close(object.fid()) } {
            0 => Ok(()),
            code => Err(code as isize),
        }
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: the object is open and closed once. The order of the fields of `Parts` ensures that all objects that
        // depend on it are closed before.
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

/// A buffer whose reads are all complete.
pub struct Landed {
    /// The number that was passed to [`Endpoint::land`].
    pub number: u64,
    /// The buffer that was passed to [`Endpoint::land`].
    pub buffer: Buffer,
}

/// A buffer with reads that are not all complete.
struct Landing {
    number: u64,
    buffer: Buffer,
    /// Reads that are under way or not begun.
    reads_left: usize,
}

/// A read that is not begun.
struct QueuedRead {
    /// Index of its landing.
    landing: usize,
    read: Read,
}

/// Memory that other endpoints may read.
struct Exposed {
    _registered: Object<Mr>,
    _memory: Arc<dyn Memory>,
}

/// Memory for the bytes of reads.
struct Local {
    /// Registration of the memory; `None` if the provider needs none.
    registered: Option<Object<Mr>>,
    pool: Arc<Pool>,
}

/// An endpoint of libfabric; see the head of this file.
pub struct Endpoint {
    library: &'static Library,
    /// Name of the provider.
    provider: String,
    /// Objects of libfabric. They are moved out when the endpoint is shut down.
    parts: ManuallyDrop<Parts>,
    is_shut_down: bool,
    contexts: Vec<NonNull<Context>>,
    /// For each context the index of the landing whose read uses it; `None` if the context is free.
    owners: Vec<Option<usize>>,
    /// Indexes of free contexts.
    free: Vec<usize>,
    landings: Vec<Option<Landing>>,
    queue: VecDeque<QueuedRead>,
    landed: VecDeque<Landed>,
    /// Number of reads under way.
    under_way: usize,
    /// Total wait since the last complete read.
    time_waited: Duration,
    /// Address of the endpoint from which reads are made, as libfabric numbers it; `None` before [`Endpoint::connect`].
    peer: Option<u64>,
    /// The first error. No read begins after it.
    failed: Option<OfiError>,
}

/// Objects of libfabric, in the order in which they must be closed.
struct Parts {
    exposed: Vec<Exposed>,
    endpoint: Object<Ep>,
    local: Vec<Local>,
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
    /// Opens an endpoint of a provider. If the provider uses IP addresses, the endpoint uses the network interface with
    /// the address `near`.
    pub fn open(provider: &str, near: Option<IpAddr>) -> Result<Self, OfiError> {
        let library = Library::load()?;
        let info = library.find(provider, near)?;
        let provider = provider_of(info.first());
        let parts = Parts::open(library, info).map_err(|error| OfiError::Failed {
            provider: provider.clone(),
            operation: Operation::Open,
            why: library.describe(error),
        })?;
        let contexts = (0..CONTEXTS).map(|_| NonNull::from(Box::leak(Box::default())));
        Ok(Self {
            library,
            provider,
            parts: ManuallyDrop::new(parts),
            is_shut_down: false,
            contexts: contexts.collect(),
            owners: vec![None; CONTEXTS],
            free: (0..CONTEXTS).collect(),
            landings: Vec::new(),
            queue: VecDeque::new(),
            landed: VecDeque::new(),
            under_way: 0,
            time_waited: Duration::ZERO,
            peer: None,
            failed: None,
        })
    }

    /// Full name of the provider.
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Whether other endpoints can read exposed memory only while [`Endpoint::progress`] is called.
    pub fn needs_progress(&self) -> bool {
        // SAFETY: the pointer is null, or points to a part of the entry, which lives as long as `parts`.
        let domain = unsafe { self.parts.info.first().domain_attr.as_ref() };
        domain.is_none_or(|domain| {
            domain.data_progress != FI_PROGRESS_AUTO || domain.control_progress != FI_PROGRESS_AUTO
        })
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
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        OfiError::Register {
            provider: self.provider.clone(),
            bytes,
            why: self.library.describe(error),
            limit: limit.filter(|limit| *limit < bytes as u64),
        }
    }

    // ---- exposed memory ------------------------------------------------------------------------

    /// Returns the address of this endpoint, which another one passes to [`Endpoint::connect`].
    pub fn address(&self) -> Result<Vec<u8>, OfiError> {
        let mut address = vec![0; ADDRESS_BYTES_MAX];
        let mut length = address.len();
        let endpoint = self.parts.endpoint.as_ptr();
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

    /// Allows other endpoints to read memory. Reads must name the key of the returned region, which is `key` or one
    /// that the provider has chosen.
    pub fn expose(&mut self, memory: Arc<dyn Memory>, key: u64) -> Result<Region, OfiError> {
        let (start, bytes) = (memory.start(), memory.bytes());
        let registered = self.parts.register(start, bytes, FI_REMOTE_READ, key);
        let registered = registered.map_err(|error| self.registration_failure(bytes, error))?;
        // SAFETY: the registration is open.
        let key = unsafe { (*registered.as_ptr()).key };
        let uses_virtual_addresses = self.parts.mr_mode() & FI_MR_VIRT_ADDR != 0;
        let base = if uses_virtual_addresses {
            start as u64
        } else {
            0
        };
        self.parts.exposed.push(Exposed {
            _registered: registered,
            _memory: memory,
        });
        Ok(Region {
            key,
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
            match self.parts.next_completion(deadline) {
                Ok(Some(_)) | Err(_) => spins = 0,
                Ok(None) => self.parts.pause(&mut spins),
            }
        }
    }

    // ---- reads ---------------------------------------------------------------------------------

    /// Sets the endpoint from which reads are made. The address comes from another host, so its length is checked.
    pub fn connect(&mut self, address: &[u8]) -> Result<(), OfiError> {
        if address.is_empty() || address.len() >= ADDRESS_BYTES_MAX {
            return Err(OfiError::Implausible("an address of an invalid length"));
        }
        // A provider reads as many bytes as its addresses have, or up to a zero byte. Both end within this array of
        // zeros, which is also aligned.
        let mut padded = [0_u64; ADDRESS_BYTES_MAX / size_of::<u64>()];
        for (word, bytes) in padded.iter_mut().zip(address.chunks(size_of::<u64>())) {
            let mut word_bytes = [0; size_of::<u64>()];
            word_bytes[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(word_bytes);
        }
        let mut peer = u64::MAX;
        let table = self.parts.addresses.as_ptr();
        // SAFETY: the table of addresses is open and has this function, and `padded` is longer than any address.
        let count = unsafe {
            ((*(*table).ops).insert)(table, padded.as_ptr().cast(), 1, &mut peer, 0, null_mut())
        };
        if count != 1 {
            let error = if count < 0 { count } else { -libc::EINVAL };
            return Err(self.failure(Operation::Connect, error as isize));
        }
        self.peer = Some(peer);
        Ok(())
    }

    /// Registers the memory of a pool, whose buffers can then be used for reads. Some providers need no registration.
    pub fn prepare(&mut self, pool: &Arc<Pool>) -> Result<(), OfiError> {
        let needs_registration = self.parts.mr_mode() & FI_MR_LOCAL != 0;
        let registered = if needs_registration {
            let registered = self.parts.register(pool.start(), pool.bytes(), FI_READ, 0);
            Some(registered.map_err(|error| self.registration_failure(pool.bytes(), error))?)
        } else {
            None
        };
        self.parts.local.push(Local {
            registered,
            pool: Arc::clone(pool),
        });
        Ok(())
    }

    /// Begins reads into a buffer, whose pool must be prepared. When all reads are complete, [`Endpoint::poll`] returns
    /// the buffer with `number`.
    pub fn land(&mut self, number: u64, buffer: Buffer, reads: Vec<Read>) -> Result<(), OfiError> {
        let buffer_bytes = buffer.len();
        let read_bytes_max = self.parts.read_bytes_max();
        let mut parts = Vec::with_capacity(reads.len());
        for read in reads {
            assert!(read.into.end <= buffer_bytes, "a read is within its buffer");
            for start in read.into.clone().step_by(read_bytes_max) {
                parts.push(Read {
                    into: start..start + (read.into.end - start).min(read_bytes_max),
                    address: read.address + (start - read.into.start) as u64,
                    key: read.key,
                });
            }
        }
        if parts.is_empty() {
            self.landed.push_back(Landed { number, buffer });
            return Ok(());
        }
        let landing = Landing {
            number,
            buffer,
            reads_left: parts.len(),
        };
        let free_index = self.landings.iter().position(Option::is_none);
        let landing_index = free_index.unwrap_or(self.landings.len());
        match free_index {
            Some(index) => self.landings[index] = Some(landing),
            None => self.landings.push(Some(landing)),
        }
        let queued = parts.into_iter().map(|read| QueuedRead {
            landing: landing_index,
            read,
        });
        self.queue.extend(queued);
        self.begin_reads()
    }

    /// Returns a buffer that has landed, or `None` if there is none within `timeout`. Fails if reads are under way and
    /// none was completed for `stall_timeout`.
    pub fn poll(
        &mut self,
        timeout: Duration,
        stall_timeout: Duration,
    ) -> Result<Option<Landed>, OfiError> {
        let mut polled_at = Instant::now();
        let deadline = polled_at + timeout;
        let mut spins = 0;
        loop {
            if let Some(landed) = self.landed.pop_front() {
                return Ok(Some(landed));
            }
            if let Some(failed) = &self.failed {
                return Err(failed.clone());
            }
            match self.parts.next_completion(deadline) {
                Ok(Some(context)) => {
                    self.complete(context);
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
                    self.parts.pause(&mut spins);
                }
                Err(error) => return Err(self.fail(self.failure(Operation::Read, error))),
            }
            self.begin_reads()?;
        }
    }

    /// Fails if there are reads, and none of them was completed for `timeout`.
    fn check_stall(&mut self, timeout: Duration) -> Result<(), OfiError> {
        let has_reads = self.under_way > 0 || !self.queue.is_empty();
        if !has_reads {
            self.time_waited = Duration::ZERO;
        }
        if self.time_waited < timeout {
            return Ok(());
        }
        let provider = self.provider.clone();
        Err(self.fail(OfiError::Silent {
            provider,
            limit: timeout,
        }))
    }

    /// Records an error, after which the endpoint begins no read. Returns the first error that was recorded.
    fn fail(&mut self, error: OfiError) -> OfiError {
        self.failed.get_or_insert(error).clone()
    }

    /// Records that the read with this context is complete.
    fn complete(&mut self, context: *mut Context) {
        // A completion with another context does not concern a read of this endpoint.
        let Some(index) = self.contexts.iter().position(|own| own.as_ptr() == context) else {
            return;
        };
        let Some(landing_index) = self.owners[index].take() else {
            return;
        };
        self.free.push(index);
        self.under_way -= 1;
        self.time_waited = Duration::ZERO;
        let slot = &mut self.landings[landing_index];
        let landing = slot.as_mut().expect("a read has a landing");
        landing.reads_left -= 1;
        if landing.reads_left == 0 {
            let Landing { number, buffer, .. } = slot.take().expect("a read has a landing");
            self.landed.push_back(Landed { number, buffer });
        }
    }

    /// Begins as many queued reads as there are contexts and as the provider accepts.
    fn begin_reads(&mut self) -> Result<(), OfiError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        while let (Some(next), Some(context)) = (self.queue.front(), self.free.last()) {
            let landing = self.landings[next.landing].as_mut();
            let landing = landing.expect("a read has a landing");
            let descriptor = self.parts.descriptor(landing.buffer.pool());
            let peer = self.peer.expect("connected before it reads");
            let into = &mut landing.buffer[next.read.into.clone()];
            let endpoint = self.parts.endpoint.as_ptr();
            // SAFETY: the endpoint is open, and the table is checked for the function. The landing owns the buffer, and
            // the context is removed from the free ones. Both therefore do not move and are not accessed until the read
            // is complete or the endpoint is closed.
            let code = unsafe {
                let ops = (*endpoint).rma;
                if has(ops, offset_of!(OpsRma, read)) {
                    ((*ops).read)(
                        endpoint,
                        into.as_mut_ptr().cast(),
                        into.len(),
                        descriptor,
                        peer,
                        next.read.address,
                        next.read.key,
                        self.contexts[*context].as_ptr().cast(),
                    )
                } else {
                    -(libc::ENOSYS as isize)
                }
            };
            match -code {
                0 => {
                    self.owners[*context] = Some(next.landing);
                    self.under_way += 1;
                    self.queue.pop_front();
                    self.free.pop();
                }
                // The provider accepts no more reads now.
                errno if errno == libc::EAGAIN as isize => return Ok(()),
                _ => return Err(self.fail(self.failure(Operation::Read, code))),
            }
        }
        Ok(())
    }
}

impl Parts {
    /// Opens all objects of an endpoint. After an error, closes those that were opened, the last one first.
    fn open(library: &'static Library, info: InfoList) -> Result<Self, isize> {
        let entry: *mut Info = info.as_ptr();
        // SAFETY: libfabric has made `entry` and its parts, and they live as long as `info`. Each object is made from
        // earlier ones, by a function that its table has in every version, and lives until the later ones are closed.
        unsafe {
            let mut made = null_mut();
            let code = (library.fabric)((*entry).fabric_attr, &mut made, null_mut());
            let fabric = Object::take(made, code)?;
            let mut made = null_mut();
            let code =
                ((*(*fabric.as_ptr()).ops).domain)(fabric.as_ptr(), entry, &mut made, null_mut());
            let domain = Object::take(made, code)?;
            let (completions, can_wait) = open_completions(&domain)?;
            let mut attributes = AvAttr {
                kind: (*entry)
                    .domain_attr
                    .as_ref()
                    .map_or(0, |domain| domain.av_type),
                count: ADDRESSES_HINT,
                ..AvAttr::default()
            };
            let ops = (*domain.as_ptr()).ops;
            let mut made = null_mut();
            let code = ((*ops).av_open)(domain.as_ptr(), &mut attributes, &mut made, null_mut());
            let addresses = Object::<Av>::take(made, code)?;
            let mut made = null_mut();
            let code = ((*ops).endpoint)(domain.as_ptr(), entry, &mut made, null_mut());
            let endpoint = Object::<Ep>::take(made, code)?;
            bind(endpoint.fid(), addresses.fid(), 0)?;
            bind(endpoint.fid(), completions.fid(), FI_TRANSMIT | FI_RECV)?;
            enable(endpoint.fid())?;
            Ok(Self {
                exposed: Vec::new(),
                endpoint,
                local: Vec::new(),
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

    /// Registers memory with the domain. The caller must keep the memory as long as the returned registration.
    fn register(
        &self,
        start: *const u8,
        bytes: usize,
        access: u64,
        key: u64,
    ) -> Result<Object<Mr>, isize> {
        // SAFETY: the pointer is null, or points to a part of the entry, which lives as long as `self`.
        let domain = unsafe { self.info.first().domain_attr.as_ref() };
        let key_bytes = domain.map_or(KEY_BYTES_DEFAULT, |domain| domain.mr_key_size);
        let provider_chooses_key = self.mr_mode() & FI_MR_PROV_KEY != 0;
        let key = match key_bytes {
            _ if provider_chooses_key => 0,
            // The provider accepts only shorter keys.
            1..=7 => key & ((1 << (8 * key_bytes)) - 1),
            _ => key,
        };
        let domain = self.domain.as_ptr();
        let mut made = null_mut();
        // SAFETY: the domain is open, and the table is checked for the function. The memory stays mapped while it is
        // registered, because the caller keeps both together.
        let registered = unsafe {
            let ops = (*domain).mr;
            if !has(ops, offset_of!(OpsMr, reg)) {
                return Err(-(libc::ENOSYS as isize));
            }
            let code = ((*ops).reg)(
                domain.cast(),
                start.cast(),
                bytes,
                access,
                0,
                key,
                0,
                &mut made,
                null_mut(),
            );
            Object::<Mr>::take(made, code)?
        };
        if access == FI_REMOTE_READ && self.mr_mode() & FI_MR_ENDPOINT != 0 {
            // SAFETY: both objects are open and belong to one domain.
            unsafe {
                bind(registered.fid(), self.endpoint.fid(), 0)?;
                enable(registered.fid())?;
            }
        }
        Ok(registered)
    }

    /// Returns the descriptor of a pool's registration, which libfabric requires with each read. Returns null without a
    /// registration.
    fn descriptor(&self, pool: &Arc<Pool>) -> *mut std::ffi::c_void {
        let mut local = self.local.iter();
        let local = local.find(|local| Arc::ptr_eq(&local.pool, pool));
        let registered = local.and_then(|local| local.registered.as_ref());
        // SAFETY: the registration is open as long as `self` lives.
        registered.map_or(null_mut(), |mr| unsafe { (*mr.as_ptr()).mem_desc })
    }

    /// Returns the context of a complete read, if there is one. If the provider can wait, waits for one until the
    /// deadline. An error is the error of a failed read.
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
        match -count {
            -1 => Ok(Some(entry.op_context.cast())),
            FI_EAVAIL => Err(self.read_error()),
            errno => {
                let no_completion = [0, libc::EAGAIN, libc::EINTR, libc::ECANCELED];
                if no_completion.contains(&(errno as i32)) {
                    Ok(None)
                } else {
                    Err(count)
                }
            }
        }
    }

    /// Removes the error of a failed read from the queue, and returns it.
    fn read_error(&mut self) -> isize {
        let queue = self.completions.as_ptr();
        // SAFETY: all fields are integers and pointers, for which zero is valid.
        let mut entry: CqErrEntry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open and has this function, and the entry is as large as that of any version.
        let count = unsafe { ((*(*queue).ops).readerr)(queue, &mut entry, 0) };
        match count {
            1 if entry.err != 0 => -(entry.err as isize),
            _ => -(libc::EIO as isize),
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

/// Opens a queue of completions. Returns the queue, and whether a thread can wait for it.
///
/// # Safety
/// The domain is open.
unsafe fn open_completions(domain: &Object<Domain>) -> Result<(Object<Cq>, bool), isize> {
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
        let mut made = null_mut();
        // SAFETY: the domain is open, and its table has this function in every version.
        let opened = unsafe {
            let ops = (*domain.as_ptr()).ops;
            let code = ((*ops).cq_open)(domain.as_ptr(), &mut attributes, &mut made, null_mut());
            Object::take(made, code)
        };
        match opened {
            Ok(queue) => return Ok((queue, can_wait)),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}

impl Endpoint {
    /// Closes the endpoint, after a short wait for reads under way. Returns the buffers of all landings; some may have
    /// only a part of their bytes. After an error libfabric may still write to the buffers, so they are leaked.
    pub fn close(mut self) -> Result<Vec<Buffer>, OfiError> {
        self.shut_down()
            .map_err(|error| self.failure(Operation::Close, error))?;
        let landings = self.landings.drain(..).flatten();
        let landed = self.landed.drain(..).map(|landed| landed.buffer);
        Ok(landings
            .map(|landing| landing.buffer)
            .chain(landed)
            .collect())
    }

    /// Waits for the reads under way, for at most [`CLOSE_TIMEOUT`]. A close with reads under way would cancel them. In
    /// ofi_rxm of libfabric 1.17, about one of ten such closes dereferences a null pointer.
    fn end_reads(&mut self) {
        self.queue.clear();
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        let mut spins = 0;
        while self.failed.is_none() && self.under_way > 0 && Instant::now() < deadline {
            match self.parts.next_completion(deadline) {
                Ok(Some(context)) => {
                    self.complete(context);
                    spins = 0;
                }
                Ok(None) => self.parts.pause(&mut spins),
                Err(_) => return,
            }
        }
    }

    /// Closes all objects of libfabric. If the endpoint cannot be closed, everything that its reads may use is leaked.
    fn shut_down(&mut self) -> Result<(), isize> {
        if std::mem::replace(&mut self.is_shut_down, true) {
            return Ok(());
        }
        self.end_reads();
        // SAFETY: `is_shut_down` ensures that the parts are moved out once; nothing uses them afterwards.
        let Parts {
            exposed,
            endpoint,
            local,
            addresses,
            completions,
            domain,
            _fabric: fabric,
            info,
            ..
        } = unsafe { ManuallyDrop::take(&mut self.parts) };
        // Registrations that are bound to the endpoint must be closed before it.
        drop(exposed);
        if let Err(error) = endpoint.close() {
            std::mem::forget((local, addresses, completions, domain, fabric, info));
            std::mem::forget(std::mem::take(&mut self.landings));
            return Err(error);
        }
        drop(local);
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
        let _ = self.shut_down();
    }
}
