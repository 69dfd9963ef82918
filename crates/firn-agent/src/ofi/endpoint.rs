//! An endpoint: memory that it exposes, and reads of what others expose.
//!
//! Invariants
//! * A buffer that bytes arrive in is in [`Endpoint::landings`] from its first read until the last one is complete. A
//!   buffer whose reads are not complete is dropped only after libfabric has closed the endpoint, or never.
//! * A context is free, or that of one read under way.
//!
//! One thread uses an endpoint at a time (FI_THREAD_DOMAIN): all that changes takes `&mut`.

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

/// Reads under way at once.
const CONTEXTS: usize = 128;
/// Bytes of the longest address of an endpoint; libfabric's are of 64 and less.
const ADDRESS_BYTES_MAX: usize = 256;
/// How long a wait of a provider that can be waited for may be: what it misses is found then.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// For reads that are under way when their endpoint is closed.
const CLOSE_LIMIT: Duration = Duration::from_millis(500);
/// Polls before the processor is given up, where a provider cannot be waited for.
const SPINS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);

/// An object of libfabric's, closed when it is dropped.
struct Object<T>(NonNull<T>);

impl<T> Object<T> {
    /// What a call made.
    ///
    /// # Safety
    /// `made` is null or an object that begins with a `struct fid` and is owned by the caller alone.
    unsafe fn take(made: *mut T, code: i32) -> Result<Self, isize> {
        match (code, NonNull::new(made)) {
            (0, Some(made)) => Ok(Self(made)),
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

    /// Closes it; an error says that libfabric has it still.
    fn close(self) -> Result<(), isize> {
        let object = ManuallyDrop::new(self);
        // SAFETY: it is closed once: its drop is not run.
        match unsafe { close(object.fid()) } {
            0 => Ok(()),
            code => Err(code as isize),
        }
    }
}

impl<T> Drop for Object<T> {
    fn drop(&mut self) {
        // SAFETY: it is closed once, after all that depends on it: see the order of the members that hold one.
        let _ = unsafe { close(self.fid()) };
    }
}

/// # Safety
/// `fid` is an object that was not closed.
unsafe fn close(fid: *mut Fid) -> i32 {
    // SAFETY: every object has a table with this function.
    unsafe { ((*(*fid).ops).close)(fid) }
}

/// # Safety
/// Both are objects that were not closed, of one domain.
unsafe fn bind(fid: *mut Fid, to: *mut Fid, flags: u64) -> Result<(), isize> {
    // SAFETY: every object has a table with this function.
    done(unsafe { ((*(*fid).ops).bind)(fid, to, flags) })
}

/// # Safety
/// It is an object that was not closed.
unsafe fn enable(fid: *mut Fid) -> Result<(), isize> {
    // SAFETY: every object has a table with this function.
    done(unsafe { ((*(*fid).ops).control)(fid, FI_ENABLE, null_mut()) })
}

fn done(code: i32) -> Result<(), isize> {
    match code {
        0 => Ok(()),
        code => Err(code as isize),
    }
}

/// Memory that others may read, until its endpoint is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// What they read it by: the right to do so.
    pub key: u64,
    /// What they call its first byte.
    pub base: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

/// A [`Region`] of another endpoint, by its words.
#[derive(Clone, Copy, Debug)]
pub struct RemoteRegion {
    key: u64,
    base: u64,
    bytes: u64,
}

impl RemoteRegion {
    /// Checks that it can be.
    pub fn check(region: &Region) -> Result<Self, OfiError> {
        let Region { key, base, bytes } = *region;
        if base.checked_add(bytes).is_none() {
            return Err(OfiError::Implausible("a region without an end"));
        }
        Ok(Self { key, base, bytes })
    }

    /// A read of `bytes` from `at` of it.
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

/// A part of a region, and the part of a buffer that it is to arrive in.
#[derive(Clone, Debug)]
pub struct Read {
    into: Range<usize>,
    address: u64,
    key: u64,
}

/// A buffer that all bytes have arrived in, and the number that it was handed over with.
pub struct Landed {
    /// As in [`Endpoint::land`].
    pub number: u64,
    /// The buffer that was given to [`Endpoint::land`].
    pub buffer: Buffer,
}

struct Landing {
    number: u64,
    buffer: Buffer,
    /// Under way or not begun.
    reads_left: usize,
}

/// A read that is not begun.
struct Waiting {
    landing: usize,
    read: Read,
}

struct Exposed {
    _registered: Object<Mr>,
    _memory: Arc<dyn Memory>,
}

/// Memory that bytes may arrive in; registered where the provider needs it.
struct Local {
    registered: Option<Object<Mr>>,
    pool: Arc<Pool>,
}

/// See the head of this file.
pub struct Endpoint {
    library: &'static Library,
    provider: String,
    /// Taken when it is shut.
    parts: ManuallyDrop<Parts>,
    is_shut: bool,
    contexts: Vec<NonNull<Context>>,
    /// By context: the landing of the read that it is of.
    owners: Vec<Option<usize>>,
    free: Vec<usize>,
    landings: Vec<Option<Landing>>,
    waiting: VecDeque<Waiting>,
    landed: VecDeque<Landed>,
    under_way: usize,
    /// How long was waited since a read was complete.
    waited: Duration,
    peer: Option<u64>,
    failed: Option<OfiError>,
}

/// What libfabric has, in the order in which it is closed.
struct Parts {
    exposed: Vec<Exposed>,
    endpoint: Object<Ep>,
    local: Vec<Local>,
    addresses: Object<Av>,
    completions: Object<Cq>,
    can_wait: bool,
    domain: Object<Domain>,
    _fabric: Object<Fabric>,
    info: InfoList,
}

// SAFETY: the objects may be used by any thread, by one at a time (FI_THREAD_DOMAIN): nothing here has interior
// mutability, and the contexts belong to the value.
unsafe impl Send for Endpoint {}

impl Endpoint {
    /// Opens one, near an address of this host where its provider knows such ones.
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
            is_shut: false,
            contexts: contexts.collect(),
            owners: vec![None; CONTEXTS],
            free: (0..CONTEXTS).collect(),
            landings: Vec::new(),
            waiting: VecDeque::new(),
            landed: VecDeque::new(),
            under_way: 0,
            waited: Duration::ZERO,
            peer: None,
            failed: None,
        })
    }

    /// The whole name of its provider.
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Whether others can read what it exposes only while [`Endpoint::progress`] is called.
    pub fn needs_progress(&self) -> bool {
        // SAFETY: null, or a part of the entry, which lives as long as `parts`.
        let domain = unsafe { self.parts.info.first().domain_attr.as_ref() };
        domain.is_none_or(|domain| {
            domain.data_progress != FI_PROGRESS_AUTO || domain.control_progress != FI_PROGRESS_AUTO
        })
    }

    fn failure(&self, operation: Operation, error: isize) -> OfiError {
        OfiError::Failed {
            provider: self.provider.clone(),
            operation,
            why: self.library.describe(error),
        }
    }

    fn no_registration(&self, bytes: usize, error: isize) -> OfiError {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
        OfiError::Register {
            provider: self.provider.clone(),
            bytes,
            why: self.library.describe(error),
            limit: limit.filter(|limit| *limit < bytes as u64),
        }
    }

    // ---- what others may read ------------------------------------------------------------------

    /// Its address, for [`Endpoint::connect`] of another one.
    pub fn address(&self) -> Result<Vec<u8>, OfiError> {
        let mut address = vec![0; ADDRESS_BYTES_MAX];
        let mut length = address.len();
        let endpoint = self.parts.endpoint.as_ptr();
        // SAFETY: the endpoint is open; its table is looked at before it is used, and `address` has `length` bytes.
        let code = unsafe {
            let ops = (*endpoint).cm;
            if has(ops, offset_of!(OpsCm, getname)) {
                ((*ops).getname)(endpoint.cast(), address.as_mut_ptr().cast(), &mut length)
            } else {
                -libc::ENOSYS
            }
        };
        done(code).map_err(|error| self.failure(Operation::Open, error))?;
        address.truncate(length);
        Ok(address)
    }

    /// Lets others read memory, by a key that they must know: `key`, or one of the provider's.
    pub fn expose(&mut self, memory: Arc<dyn Memory>, key: u64) -> Result<Region, OfiError> {
        let (start, bytes) = (memory.start(), memory.bytes());
        let registered = self.parts.register(start, bytes, FI_REMOTE_READ, key);
        let registered = registered.map_err(|error| self.no_registration(bytes, error))?;
        // SAFETY: it was just registered, and is open.
        let key = unsafe { (*registered.as_ptr()).key };
        let base = match self.parts.mr_mode() & FI_MR_VIRT_ADDR {
            0 => 0,
            _ => start as u64,
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

    /// Lets the provider serve others, for about `limit`.
    pub fn progress(&mut self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut spins = 0;
        while Instant::now() < deadline {
            // What becomes of the reads of others is theirs to see.
            match self.parts.next_completion(deadline) {
                Ok(Some(_)) | Err(_) => spins = 0,
                Ok(None) => self.parts.pause(&mut spins),
            }
        }
    }

    // ---- reads ---------------------------------------------------------------------------------

    /// Reads from the endpoint with this address from now on. The address comes from another host: whatever it is, at
    /// most `ADDRESS_BYTES_MAX` bytes of it are looked at.
    pub fn connect(&mut self, address: &[u8]) -> Result<(), OfiError> {
        if address.is_empty() || address.len() >= ADDRESS_BYTES_MAX {
            return Err(OfiError::Implausible(
                "an address of a length that none has",
            ));
        }
        // A provider looks at as many bytes as its addresses have, or until a zero: both end within.
        let mut room = [0_u64; ADDRESS_BYTES_MAX / 8];
        for (word, bytes) in room.iter_mut().zip(address.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let mut peer = u64::MAX;
        let table = self.parts.addresses.as_ptr();
        // SAFETY: the table of addresses is open and has this function; `room` is longer than any address.
        let count = unsafe {
            ((*(*table).ops).insert)(table, room.as_ptr().cast(), 1, &mut peer, 0, null_mut())
        };
        if count != 1 {
            let error = if count < 0 { count } else { -libc::EINVAL };
            return Err(self.failure(Operation::Connect, error as isize));
        }
        self.peer = Some(peer);
        Ok(())
    }

    /// Registers the memory that buffers are of, where the provider needs that.
    pub fn prepare(&mut self, pool: &Arc<Pool>) -> Result<(), OfiError> {
        let registered = match self.parts.mr_mode() & FI_MR_LOCAL {
            0 => None,
            _ => {
                let registered = self.parts.register(pool.start(), pool.bytes(), FI_READ, 0);
                Some(registered.map_err(|error| self.no_registration(pool.bytes(), error))?)
            }
        };
        self.parts.local.push(Local {
            registered,
            pool: Arc::clone(pool),
        });
        Ok(())
    }

    /// Begins to read into a buffer of a pool that was prepared. [`Endpoint::poll`] gives it back.
    pub fn land(&mut self, number: u64, buffer: Buffer, reads: Vec<Read>) -> Result<(), OfiError> {
        let room = buffer.len();
        let most = self.parts.bytes_at_once();
        let mut parts = Vec::with_capacity(reads.len());
        for read in reads {
            assert!(read.into.end <= room, "a read has the bounds of its buffer");
            for at in read.into.clone().step_by(most) {
                parts.push(Read {
                    into: at..at + (read.into.end - at).min(most),
                    address: read.address + (at - read.into.start) as u64,
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
        let free = self.landings.iter().position(Option::is_none);
        let landing_at = free.unwrap_or(self.landings.len());
        match free {
            Some(at) => self.landings[at] = Some(landing),
            None => self.landings.push(Some(landing)),
        }
        let waiting = parts.into_iter().map(|read| Waiting {
            landing: landing_at,
            read,
        });
        self.waiting.extend(waiting);
        self.begin_reads()
    }

    /// A buffer that all bytes have arrived in, or `None` after `limit`. An error where nothing arrived for `silence`.
    pub fn poll(&mut self, limit: Duration, silence: Duration) -> Result<Option<Landed>, OfiError> {
        let mut looked_at = Instant::now();
        let deadline = looked_at + limit;
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
                    self.waited += now - looked_at;
                    looked_at = now;
                    self.check_silence(silence)?;
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

    fn check_silence(&mut self, silence: Duration) -> Result<(), OfiError> {
        let is_waiting = self.under_way > 0 || !self.waiting.is_empty();
        if !is_waiting {
            self.waited = Duration::ZERO;
        }
        if self.waited < silence {
            return Ok(());
        }
        let provider = self.provider.clone();
        Err(self.fail(OfiError::Silent {
            provider,
            limit: silence,
        }))
    }

    fn fail(&mut self, error: OfiError) -> OfiError {
        self.failed.get_or_insert(error).clone()
    }

    fn complete(&mut self, context: *mut Context) {
        let found = self.contexts.iter().position(|own| own.as_ptr() == context);
        // Not of a read: the provider's own business.
        let Some(index) = found else { return };
        let Some(at) = self.owners[index].take() else {
            return;
        };
        self.free.push(index);
        self.under_way -= 1;
        self.waited = Duration::ZERO;
        let landing = self.landings[at].as_mut().expect("a read has a landing");
        landing.reads_left -= 1;
        if landing.reads_left == 0 {
            let Landing { number, buffer, .. } = self.landings[at].take().expect("it is there");
            self.landed.push_back(Landed { number, buffer });
        }
    }

    /// As many as the provider takes.
    fn begin_reads(&mut self) -> Result<(), OfiError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        while let (Some(next), Some(context)) = (self.waiting.front(), self.free.last()) {
            let landing = self.landings[next.landing].as_mut();
            let landing = landing.expect("a read has a landing");
            let descriptor = self.parts.descriptor(landing.buffer.pool());
            let peer = self.peer.expect("connected before it reads");
            let into = &mut landing.buffer[next.read.into.clone()];
            let endpoint = self.parts.endpoint.as_ptr();
            // SAFETY: the endpoint is open, its table is looked at. The landing owns the buffer, and the context is not
            // free. So both stay where they are, and are not accessed, until the read is complete or the endpoint is
            // closed.
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
                    self.waiting.pop_front();
                    self.free.pop();
                }
                again if again == libc::EAGAIN as isize => return Ok(()),
                _ => return Err(self.fail(self.failure(Operation::Read, code))),
            }
        }
        Ok(())
    }
}

impl Parts {
    fn open(library: &'static Library, info: InfoList) -> Result<Self, isize> {
        let entry: *mut Info = info.as_ptr();
        // SAFETY: `entry` and its parts are libfabric's own, alive as long as `info`. Each object is made from those
        // before it, by a function that its table has in every version, and lives until the ones after it are closed.
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
                count: 4,
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

    fn mr_mode(&self) -> i32 {
        // SAFETY: null, or a part of the entry, which lives as long as `self`.
        let domain = unsafe { self.info.first().domain_attr.as_ref() };
        domain.map_or(0, |domain| domain.mr_mode)
    }

    fn bytes_at_once(&self) -> usize {
        // SAFETY: null, or a part of the entry, which lives as long as `self`.
        let endpoint = unsafe { self.info.first().ep_attr.as_ref() };
        endpoint.map_or(4096, |endpoint| endpoint.max_msg_size.max(1))
    }

    /// The caller keeps the memory for as long as it keeps what is returned.
    fn register(
        &self,
        start: *const u8,
        bytes: usize,
        access: u64,
        key: u64,
    ) -> Result<Object<Mr>, isize> {
        // SAFETY: null, or a part of the entry, which lives as long as `self`.
        let domain = unsafe { self.info.first().domain_attr.as_ref() };
        let key_bytes = domain.map_or(8, |domain| domain.mr_key_size);
        let key = match (self.mr_mode() & FI_MR_PROV_KEY, key_bytes) {
            (0, 1..=7) => key & ((1 << (8 * key_bytes)) - 1),
            (0, _) => key,
            _ => 0,
        };
        let domain = self.domain.as_ptr();
        let mut made = null_mut();
        // SAFETY: the domain is open and its table is looked at. libfabric is told where the memory is; it is mapped as
        // long as it is registered, because the caller keeps both together.
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
            // SAFETY: both are open and of one domain.
            unsafe {
                bind(registered.fid(), self.endpoint.fid(), 0)?;
                enable(registered.fid())?;
            }
        }
        Ok(registered)
    }

    fn descriptor(&self, pool: &Arc<Pool>) -> *mut std::ffi::c_void {
        let mut local = self.local.iter();
        let local = local.find(|local| Arc::ptr_eq(&local.pool, pool));
        let registered = local.and_then(|local| local.registered.as_ref());
        // SAFETY: it is open as long as `self`.
        registered.map_or(null_mut(), |mr| unsafe { (*mr.as_ptr()).mem_desc })
    }

    /// The context of a read that is complete; waits for one where the provider can. An error is that of a read.
    fn next_completion(&mut self, deadline: Instant) -> Result<Option<*mut Context>, isize> {
        let queue = self.completions.as_ptr();
        let mut entry = CqEntry {
            op_context: null_mut(),
        };
        let into = (&raw mut entry).cast();
        let wait = deadline
            .saturating_duration_since(Instant::now())
            .min(WAIT_MAX);
        // SAFETY: the queue is open, its table has both functions in every version, and an entry has the format that
        // the queue was opened with.
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
            other => {
                let passing = [0, libc::EAGAIN, libc::EINTR, libc::ECANCELED];
                if passing.contains(&(other as i32)) {
                    Ok(None)
                } else {
                    Err(count)
                }
            }
        }
    }

    /// What the queue says of a read that failed.
    fn read_error(&mut self) -> isize {
        let queue = self.completions.as_ptr();
        // SAFETY: integers and pointers, for which zeros are values.
        let mut entry: CqErrEntry = unsafe { std::mem::zeroed() };
        // SAFETY: the queue is open and has this function; the entry is as large as that of any version.
        let count = unsafe { ((*(*queue).ops).readerr)(queue, &mut entry, 0) };
        match count {
            1 if entry.err != 0 => -(entry.err as isize),
            _ => -(libc::EIO as isize),
        }
    }

    /// Between two polls of a provider that cannot be waited for.
    fn pause(&self, spins: &mut u32) {
        if self.can_wait {
            return;
        }
        *spins += 1;
        if *spins < SPINS {
            std::thread::yield_now()
        } else {
            std::thread::sleep(PAUSE)
        }
    }
}

/// A queue of completions, and whether it can be waited for.
///
/// # Safety
/// The domain is open.
unsafe fn open_completions(domain: &Object<Domain>) -> Result<(Object<Cq>, bool), isize> {
    let mut failed = -(libc::ENOSYS as isize);
    // Others wait by giving the processor up and taking it again: shm's does not even end in time.
    for (wait, can_wait) in [(FI_WAIT_FD, true), (FI_WAIT_NONE, false)] {
        let mut attributes = CqAttr {
            size: 2 * CONTEXTS,
            format: FI_CQ_FORMAT_CONTEXT,
            wait_obj: wait,
            ..CqAttr::default()
        };
        let mut made = null_mut();
        // SAFETY: as promised; its table has this function in every version.
        let opened = unsafe {
            let ops = (*domain.as_ptr()).ops;
            let code = ((*ops).cq_open)(domain.as_ptr(), &mut attributes, &mut made, null_mut());
            Object::take(made, code)
        };
        match opened {
            Ok(queue) => return Ok((queue, can_wait)),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

impl Endpoint {
    /// Closes it, after a short wait for the reads under way. The buffers that it had are given back, some in the
    /// middle of what was to arrive in them; an error says that libfabric keeps them.
    pub fn close(mut self) -> Result<Vec<Buffer>, OfiError> {
        self.shut()
            .map_err(|error| self.failure(Operation::Close, error))?;
        let landings = self.landings.drain(..).flatten();
        let landed = self.landed.drain(..).map(|landed| landed.buffer);
        Ok(landings
            .map(|landing| landing.buffer)
            .chain(landed)
            .collect())
    }

    /// Lets the reads under way end, for at most [`CLOSE_LIMIT`]: ofi_rxm of libfabric 1.17 follows a null pointer in
    /// about one of ten closes that cancel a read.
    fn end_reads(&mut self) {
        self.waiting.clear();
        let deadline = Instant::now() + CLOSE_LIMIT;
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

    /// Closes what libfabric has. Where it does not let go, memory that its reads may write to stays for ever.
    fn shut(&mut self) -> Result<(), isize> {
        if std::mem::replace(&mut self.is_shut, true) {
            return Ok(());
        }
        self.end_reads();
        // SAFETY: it is taken once, here.
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
        // What is bound to an endpoint is closed before it.
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
            // SAFETY: made by `Box::leak` in `open`; no read uses it, since the endpoint is closed.
            drop(unsafe { Box::from_raw(context.as_ptr()) });
        }
        Ok(())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.shut();
    }
}
