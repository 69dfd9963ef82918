//! Connections of this process to firnd, the process that serves a mount: one for each *arena*, the shared memory of a
//! mount. A connection is made at the first use.
//!
//! firnd answers requests in their order. [`request_lease_ahead`] sends a request for leases (rights to write into the
//! arena) and does not wait. The next request first receives that answer, and stores its leases for [`receive_lease`].
//!
//! If a connection has ended, the next use makes a new one, because firnd may have been started again. The number of
//! connections is limited. Each connection has a new *link number*. Tokens (firnd's numbers of open files) of the old
//! one are void.
//!
//! Invariant: no byte is sent before the kernel has confirmed that a process of this user listens at the other end.

use std::ffi::c_int;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use firn_direct::arena_map::ArenaMap;
use firn_direct::connection::{CallError, ConnectError, Connection, Files, Payload};
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{Extent, LEASE_SLABS_MAX, Op, Reply, Request, Slab, Status, Token};

use rustix::process::Resource;

use crate::lock::{Guard, Locked};
use crate::report::{self, Distrust};
use crate::sys::{self, Identity};
use crate::table::{self, tag};
use crate::wiped::Wiped;

/// Maximum number of arenas that a process uses.
const LINKS_MAX: usize = 4;
/// Maximum number of connections to one arena, one after the other.
const CONNECTIONS_MAX: u32 = 8;
/// Maximum number of answers whose leases are stored.
const LEASE_ANSWERS_MAX: usize = 16;
/// Value of [`Link::socket`] while there is no connection.
const NO_SOCKET: c_int = 0;
/// Value of a slab that is not leased.
const NO_SLAB: Slab = Slab {
    chunk: 0,
    records: 0,
    writer: 0,
    generation: 0,
    sequence: 0,
    start: 0,
    end: 0,
    record_count: 0,
    reserved: 0,
    modified: 0,
};
/// The library's own descriptors have this number or a higher one, so that they do not collide with numbers that
/// programs choose.
pub(crate) const OWN_FD_MIN: c_int = 900;

/// Returns the value of [`Link::socket`] for a descriptor: its number plus one, so that 0 means no socket.
fn socket_word(fd: c_int) -> c_int {
    fd + 1
}

/// The connection to one arena, and its successors.
struct Link {
    /// The [`socket_word`] of the socket, or [`NO_SOCKET`]. It is changed under the lock of `state`.
    socket: AtomicI32,
    state: Locked<LinkState>,
}

/// The links of this process: each is the place of the connection to one arena.
// SAFETY: the value consists of words, locks, an empty map, and options of words, for each of which zero bytes are
// valid. Zeros mean that there is no connection, and `send_first_requests` sets the other values for the first one.
static LINKS: Wiped<[Link; LINKS_MAX]> = unsafe { Wiped::new([const { Link::new() }; LINKS_MAX]) };

/// Makes children of fork(2) find no connection. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    LINKS.wipe_on_fork()
}

/// The part of a link that its lock guards.
struct LinkState {
    /// Identity of the arena.
    arena: [u8; 16],
    /// Number of connections so far; 0 if the link is unused. It is limited, and part of the link number.
    connection_count: u32,
    /// Identity of the socket, by which a reuse of its number is noticed.
    identity: Identity,
    /// Where the arena is mapped.
    map: ArenaMap,
    /// Token of the request for leases that has no answer yet.
    outstanding_token: Option<u64>,
    /// The received answers, in a ring.
    lease_answers: [LeaseAnswer; LEASE_ANSWERS_MAX],
    /// Index of the next answer in `lease_answers`, modulo its length.
    next_answer: usize,
}

/// The leases of one answer. firnd's answer is received into it directly, because callers may have little stack. All
/// zeros mean no lease.
struct LeaseAnswer {
    /// Token of the open file.
    token: u64,
    /// The word of a [`Status`]. It is not an enum, because a child of fork(2) finds zeros here.
    status: u32,
    slabs: [Slab; LEASE_SLABS_MAX],
    /// Index in `slabs` of the first lease that was not taken.
    next: usize,
    /// Index after the last lease.
    end: usize,
}

/// A lease taken from the stored ones.
pub(crate) struct StoredLease {
    pub(crate) status: Status,
    /// The leased slab; valid if the status is [`Status::Ok`].
    pub(crate) slab: Slab,
    /// Whether further leases of the same answer are stored.
    pub(crate) has_more: bool,
}

impl LeaseAnswer {
    const fn empty() -> Self {
        Self {
            token: 0,
            status: 0,
            slabs: [NO_SLAB; LEASE_SLABS_MAX],
            next: 0,
            end: 0,
        }
    }

    /// Drops the leases that were not taken.
    fn clear(&mut self) {
        (self.next, self.end) = (0, 0);
    }

    /// Whether there are leases for an open file.
    fn has_lease_for(&self, token: u64) -> bool {
        self.next < self.end && self.token == token
    }

    fn take_lease(&mut self) -> Option<StoredLease> {
        let slab = *self.slabs.get(self.next)?;
        self.next += 1;
        Some(StoredLease {
            status: Status::from_word(self.status),
            slab,
            has_more: self.next < self.end,
        })
    }
}

/// A locked connection.
struct LockedConnection {
    link: &'static Link,
    state: Guard<'static, LinkState>,
    /// The link owns the socket and closes it, so this value must not.
    connection: ManuallyDrop<Connection>,
}

/// Returns whether this process is connected to any arena.
pub(crate) fn has_connection() -> bool {
    LINKS
        .iter()
        .any(|link| link.socket_fd(Ordering::Relaxed).is_some())
}

/// Connects to the arena that a token names, for a writer. Returns the link number.
///
/// A new connection also carries a request for a grant and the first lease. firnd's answer, which is the same as that
/// of [`request_write_grant`], is then returned too.
pub(crate) fn connect_to_write(token: &Token, lease_bytes: u64) -> Option<(u32, Option<Reply>)> {
    let mut early_request = EarlyRequest::WriteGrant(lease_bytes, None);
    let link = find_or_connect(token, ServedFiles::OfMount, &mut early_request)?;
    Some((link, early_request.into_reply()))
}

/// A request for extents of a file.
pub(crate) struct ExtentRequest<'a> {
    /// Offset in the file from which extents are wanted.
    pub(crate) from: u64,
    /// Maximum number of files of the backing that the answer may name; 0 means no extents in the backing.
    pub(crate) files_max: u32,
    /// Receives the descriptors of these files.
    pub(crate) files: &'a mut Files,
}

impl ExtentRequest<'_> {
    fn request(&self, token: u64) -> Request {
        Request::new(Op::Extents, token, self.from).with_len(self.files_max)
    }
}

/// Connects for a reader. A new connection also carries a request for extents. firnd's answer, which is the same as
/// that of [`request_extents`], is then returned too.
pub(crate) fn connect_to_read(
    token: &Token,
    extent_request: ExtentRequest<'_>,
    extents: &mut [MaybeUninit<Extent>],
) -> Option<(u32, Option<Reply>)> {
    let mut early_request = EarlyRequest::Extents(extent_request, extents, None);
    let link = find_or_connect(token, ServedFiles::OfMount, &mut early_request)?;
    Some((link, early_request.into_reply()))
}

/// Connects for a mapping. Returns the link number.
pub(crate) fn connect_to_map(token: &Token) -> Option<u32> {
    find_or_connect(token, ServedFiles::OfMount, &mut EarlyRequest::Nothing)
}

/// Connects for a stub. Returns the link number.
pub(crate) fn connect_for_stubs(token: &Token) -> Option<u32> {
    find_or_connect(token, ServedFiles::Stubs, &mut EarlyRequest::Nothing)
}

/// The files that a connection is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ServedFiles {
    /// Files of a mount. The kernel serves them if there is no connection.
    OfMount,
    /// Stubs, which only firnd can serve. So the number of connections is not limited, and a process that cannot map
    /// the arena still gets a connection for requests.
    Stubs,
}

impl ServedFiles {
    /// Returns how many connections to one arena may be made, one after the other.
    fn connections_max(self) -> u32 {
        match self {
            Self::OfMount => CONNECTIONS_MAX,
            // The largest count whose link numbers fit into a word.
            Self::Stubs => u32::MAX / LINKS_MAX as u32 - 1,
        }
    }
}

/// Finds the connection to the firnd (serving process) of a mount, or makes one. Returns its link number. `token`
/// names firnd's socket and the mount's *arena* (its shared memory). Requests of this process for all files of the
/// mount use the same connection.
///
/// A new connection sends `early_request` at once. Returns `None` if all places for connections are in use or locked,
/// if too many connections were made, or if firnd is not there.
fn find_or_connect(
    token: &Token,
    served_files: ServedFiles,
    early_request: &mut EarlyRequest<'_>,
) -> Option<u32> {
    for (index, link) in LINKS.iter().enumerate() {
        let Some(mut state) = link.state.lock_unless_held_by_thread() else {
            continue;
        };
        let is_unused = state.connection_count == 0;
        if is_unused {
            state.arena = token.arena;
        }
        // This place is for connections to another mount.
        if state.arena != token.arena {
            continue;
        }
        if link.socket_fd(Ordering::Relaxed).is_none() {
            if state.connection_count >= served_files.connections_max() {
                return None;
            }
            state.connection_count += 1;
            let socket_fd = open_socket(&mut state, token, served_files, early_request);
            let word = socket_fd.map_or(NO_SOCKET, socket_word);
            link.socket.store(word, Ordering::Release);
            // A failed attempt counts as a connection too.
            socket_fd?;
        }
        return Some(link_number(index, state.connection_count));
    }
    None
}

/// Locks a connection by its link number. Returns `None` if the connection has ended, or if this thread holds the lock.
fn lock_link(number: u32) -> Option<LockedConnection> {
    let index = number as usize % LINKS_MAX;
    let locked = LINKS.get(index)?.lock_connection()?;
    let is_current = link_number(index, locked.state.connection_count) == number;
    is_current.then_some(locked)
}

/// Returns the sockets of all connections.
pub(crate) fn open_sockets() -> impl Iterator<Item = c_int> {
    LINKS
        .iter()
        .filter_map(|link| link.socket_fd(Ordering::Acquire))
}

/// Moves the library's socket (its connection to firnd) to another number, because the program wants to use the number
/// `fd`. Does nothing if the library has no socket of this number, or if no other number is free.
pub(crate) fn move_socket(fd: c_int) {
    for link in LINKS.iter() {
        if link.socket_fd(Ordering::Acquire) != Some(fd) {
            continue;
        }
        let Some(locked) = link.lock_connection() else {
            continue;
        };
        if locked.connection.as_fd().as_raw_fd() != fd {
            // Another thread has closed or moved the socket meanwhile.
            continue;
        }
        let Some(copy) = copy_to_high_number(&locked.connection) else {
            continue;
        };
        let new_fd = copy.into_raw_fd();
        set_internal(fd, false);
        set_internal(new_fd, true);
        link.socket.store(socket_word(new_fd), Ordering::Release);
        // This closes the old number.
        drop(ManuallyDrop::into_inner(locked.connection));
    }
}

impl Link {
    const fn new() -> Self {
        Self {
            socket: AtomicI32::new(NO_SOCKET),
            state: Locked::new(LinkState {
                arena: [0; 16],
                connection_count: 0,
                identity: Identity {
                    device: 0,
                    inode: 0,
                },
                map: ArenaMap::NONE,
                outstanding_token: None,
                lease_answers: [const { LeaseAnswer::empty() }; LEASE_ANSWERS_MAX],
                next_answer: 0,
            }),
        }
    }

    /// Locks the connection to firnd. Returns `None` if there is none, if it was closed behind the library's back, or
    /// if this thread holds the lock: it is in a signal handler then.
    fn lock_connection(&'static self) -> Option<LockedConnection> {
        let state = self.state.lock_unless_held_by_thread()?;
        let fd = self.socket_fd(Ordering::Relaxed)?;
        // A raw system call may have closed the socket, and then its number may belong to another file.
        if sys::own_identity(fd) != Some(state.identity) {
            set_internal(fd, false);
            self.socket.store(NO_SOCKET, Ordering::Release);
            return None;
        }
        // SAFETY: the number is the link's open socket, as was just checked. The link closes it under its lock, and
        // `ManuallyDrop` keeps this value from closing it.
        let connection = ManuallyDrop::new(unsafe { Connection::from_raw_fd(fd) });
        Some(LockedConnection {
            link: self,
            state,
            connection,
        })
    }

    /// Returns the socket; `None` if there is no connection.
    fn socket_fd(&self, ordering: Ordering) -> Option<c_int> {
        match self.socket.load(ordering) {
            NO_SOCKET => None,
            word => Some(word - 1),
        }
    }
}

/// Connects to the firnd (serving process) of an arena (the shared memory of a mount), makes the first requests and
/// maps the arena. Returns the socket; `None` if any step fails. Called with the lock of the link, of which `state` is
/// a part.
#[inline(never)]
fn open_socket(
    state: &mut LinkState,
    token: &Token,
    served_files: ServedFiles,
    early_request: &mut EarlyRequest<'_>,
) -> Option<c_int> {
    // If the address space of the program is limited, the program needs all of it, so the arena is not mapped. A stub
    // (an empty file; firnd has its bytes) then is served by requests only; a file of a mount is left to the kernel.
    let has_limited_memory = !sys::is_unlimited(Resource::As);
    let map_arena = match served_files {
        ServedFiles::OfMount if has_limited_memory => return None,
        ServedFiles::OfMount => MapArena::Always,
        ServedFiles::Stubs if has_limited_memory => MapArena::Never,
        ServedFiles::Stubs => MapArena::IfPossible,
    };
    let mut connection = connect_to(token)?;
    // A high number does not collide with numbers that the program chooses. If no high number is free, the low one
    // works.
    if let Some(copy) = copy_to_high_number(&connection) {
        connection = copy;
    }
    send_first_requests(&connection, state, token, map_arena, early_request)?;
    state.identity = sys::own_identity(connection.as_fd().as_raw_fd())?;
    let fd = connection.into_raw_fd();
    set_internal(fd, true);
    Some(fd)
}

/// A request that is sent along with the hello of a new connection. The last field of a variant receives the answer.
enum EarlyRequest<'a> {
    Nothing,
    /// Requests a grant and a lease of this many bytes.
    WriteGrant(u64, Option<Reply>),
    /// Requests extents, which are stored in the slice.
    Extents(
        ExtentRequest<'a>,
        &'a mut [MaybeUninit<Extent>],
        Option<Reply>,
    ),
}

impl EarlyRequest<'_> {
    /// Returns firnd's answer; `None` if the request was not sent, because there was a connection already.
    fn into_reply(self) -> Option<Reply> {
        match self {
            Self::Nothing => None,
            Self::WriteGrant(_, reply) | Self::Extents(_, _, reply) => reply,
        }
    }
}

/// Sends the hello of a new connection and `early_request` to firnd in one packet, and receives the answers. So firnd
/// works on that request while this process maps the arena, the mount's shared memory. Returns `None` if that fails.
#[inline(never)]
fn send_first_requests(
    connection: &Connection,
    state: &mut LinkState,
    token: &Token,
    map_arena: MapArena,
    early_request: &mut EarlyRequest<'_>,
) -> Option<()> {
    let request = match early_request {
        EarlyRequest::Nothing => None,
        EarlyRequest::WriteGrant(bytes, _) => Some(write_grant_request(token.token, *bytes)),
        EarlyRequest::Extents(extent_request, ..) => Some(extent_request.request(token.token)),
    };
    connection.send_hello(request.as_ref()).ok()?;
    if let EarlyRequest::WriteGrant(..) = early_request {
        // Initializes what the first write needs, while firnd works on the requests.
        firn_direct::slab_writer::prepare();
    }
    state.map = receive_arena(connection, &token.arena, map_arena)?;
    state.outstanding_token = None;
    state.lease_answers.iter_mut().for_each(LeaseAnswer::clear);
    receive_early_answer(connection, state, token, early_request)
}

/// Receives firnd's answer to the request that was sent along with a new connection, and stores it in `early_request`.
/// Returns `None` if the connection has ended. With a grant come *leases*: rights to write into ranges of shared
/// memory.
#[inline(never)]
fn receive_early_answer(
    connection: &Connection,
    state: &mut LinkState,
    token: &Token,
    early_request: &mut EarlyRequest<'_>,
) -> Option<()> {
    match early_request {
        EarlyRequest::Nothing => {}
        EarlyRequest::WriteGrant(_, reply) => {
            let received = state.receive_first_leases(connection, token.token);
            *reply = Some(received.ok()?);
        }
        EarlyRequest::Extents(extent_request, extents, reply) => {
            let mut extents = (&mut **extents).into();
            let files = Some(&mut *extent_request.files);
            let received = connection.receive_reply_with(&mut extents, files);
            *reply = Some(received.ok()?);
        }
    }
    Some(())
}

impl LinkState {
    /// Receives the answer to a request for leases, and stores the leases for [`receive_lease`].
    fn receive_leases(&mut self, connection: &Connection, token: u64) -> Result<Reply, CallError> {
        let index = self.next_answer % LEASE_ANSWERS_MAX;
        self.next_answer = self.next_answer.wrapping_add(1);
        let Some(answer) = self.lease_answers.get_mut(index) else {
            return Err(CallError::NoReply);
        };
        answer.clear();
        // The first lease is in the reply itself, and the others are its payload.
        let (first_slab, more_slabs) = answer.slabs.split_at_mut(1);
        let reply = connection.receive_reply(&mut more_slabs.into())?;
        first_slab.fill(reply.lease);
        (answer.token, answer.status) = (token, reply.status);
        answer.end = 1 + reply.count as usize;
        Ok(reply)
    }

    /// Receives the leases that come with a grant. If the grant was refused, no lease is stored.
    fn receive_first_leases(
        &mut self,
        connection: &Connection,
        token: u64,
    ) -> Result<Reply, CallError> {
        let reply = self.receive_leases(connection, token)?;
        if !is_granted(&reply) {
            self.forget_leases(token);
        }
        Ok(reply)
    }

    /// Drops the stored leases of an open file.
    fn forget_leases(&mut self, token: u64) {
        for answer in &mut self.lease_answers {
            if answer.has_lease_for(token) {
                answer.clear();
            }
        }
    }
}

impl LockedConnection {
    /// Receives the answer to an earlier request for leases, if it is outstanding. Returns `None` if the connection
    /// ended.
    fn receive_outstanding_answer(&mut self) -> Option<()> {
        let Some(token) = self.state.outstanding_token.take() else {
            return Some(());
        };
        let received = self.state.receive_leases(&self.connection, token);
        self.close_if_ended(received.map(drop)).ok()
    }

    /// Sends a request for leases. Stored leases of the open file are dropped.
    fn send_lease_request(&mut self, token: u64, lease_bytes: u64) -> Option<()> {
        self.state.forget_leases(token);
        self.state.outstanding_token = Some(token);
        let request = Request::new(Op::Lease, token, lease_bytes).with_len(sys::current_cpu());
        let sent = self.connection.send_request(&request, &Payload::none());
        self.close_if_ended(sent).ok()
    }

    /// Takes the next stored lease of an open file.
    fn take_stored_lease(&mut self, token: u64) -> Option<StoredLease> {
        let mut answers = self.state.lease_answers.iter_mut();
        let answer = answers.find(|answer| answer.has_lease_for(token))?;
        answer.take_lease()
    }

    /// Returns `answer`. If it shows that the connection has ended, the socket is closed first.
    fn close_if_ended<T>(&mut self, answer: Result<T, CallError>) -> Result<T, CallError> {
        if let Err(CallError::NotSent | CallError::NoReply) = answer {
            let fd = self.connection.as_fd().as_raw_fd();
            set_internal(fd, false);
            // The swap makes sure that one thread closes the socket, and that no other thread uses it afterwards.
            if self.link.socket.swap(NO_SOCKET, Ordering::AcqRel) != NO_SOCKET {
                sys::close(fd);
            }
        }
        answer
    }
}

/// Makes a request without data. Returns the reply, or `None` if the connection has ended.
pub(crate) fn request_without_data(link: u32, op: Op, token: u64, arg: u64) -> Option<Reply> {
    call_firnd(link, &Request::new(op, token, arg), &mut Payload::none()).ok()
}

/// Requests extents of a file, which are stored in `extents`. Returns `None` if the connection has ended.
pub(crate) fn request_extents(
    link: u32,
    token: u64,
    extent_request: ExtentRequest<'_>,
    extents: &mut [MaybeUninit<Extent>],
) -> Option<Reply> {
    let request = extent_request.request(token);
    let mut payload = Payload {
        room: extents.into(),
        files: Some(extent_request.files),
        ..Payload::none()
    };
    call_firnd(link, &request, &mut payload).ok()
}

/// Requests a grant to write a file and its first lease, which is stored for [`receive_lease`]. Returns `None` if the
/// connection has ended.
pub(crate) fn request_write_grant(link: u32, token: u64, lease_bytes: u64) -> Option<Reply> {
    let mut locked = lock_link(link)?;
    locked.receive_outstanding_answer()?;
    // Leases of an earlier grant for this open file are void.
    locked.state.forget_leases(token);
    let request = write_grant_request(token, lease_bytes);
    let sent = locked.connection.send_request(&request, &Payload::none());
    let received = sent.and_then(|()| locked.state.receive_first_leases(&locked.connection, token));
    locked.close_if_ended(received).ok()
}

fn write_grant_request(token: u64, lease_bytes: u64) -> Request {
    Request::new(Op::OpenWrite, token, lease_bytes).with_len(sys::current_cpu())
}

/// Requests leases without waiting for the answer, which [`receive_lease`] receives. Returns whether the request was
/// sent: only one may be outstanding.
pub(crate) fn request_lease_ahead(link: u32, token: u64, lease_bytes: u64) -> bool {
    let Some(mut locked) = lock_link(link) else {
        return false;
    };
    locked.state.outstanding_token.is_none()
        && locked.send_lease_request(token, lease_bytes).is_some()
}

/// Takes the next lease that was requested before. It receives an outstanding answer if no lease is stored. Returns
/// `None` if there is no lease.
pub(crate) fn receive_lease(link: u32, token: u64) -> Option<StoredLease> {
    let mut locked = lock_link(link)?;
    if let Some(lease) = locked.take_stored_lease(token) {
        return Some(lease);
    }
    locked.receive_outstanding_answer()?;
    locked.take_stored_lease(token)
}

/// Requests leases, waits for the answer and takes the first lease.
pub(crate) fn request_lease(link: u32, token: u64, lease_bytes: u64) -> Option<StoredLease> {
    let mut locked = lock_link(link)?;
    locked.receive_outstanding_answer()?;
    locked.send_lease_request(token, lease_bytes)?;
    locked.receive_outstanding_answer()?;
    locked.take_stored_lease(token)
}

/// Returns where the arena of a connection is mapped. The mapping lasts as long as the process, even if the connection
/// has ended.
pub(crate) fn arena_map(number: u32) -> Option<ArenaMap> {
    let index = number as usize % LINKS_MAX;
    let state = LINKS.get(index)?.state.lock_unless_held_by_thread()?;
    (link_number(index, state.connection_count) == number).then_some(state.map)
}

/// Returns the link number of a connection, from the index of its link and the number of connections that the link has
/// made. So each connection has another number.
fn link_number(index: usize, connection_count: u32) -> u32 {
    connection_count * LINKS_MAX as u32 + index as u32
}

/// Marks a descriptor as the library's own, or removes that mark. Hooks do not touch such descriptors.
fn set_internal(fd: c_int, internal: bool) {
    if let Some(mut locked) = table::lock_new_entry(fd) {
        locked.set_tag(if internal {
            tag::INTERNAL
        } else {
            tag::ORDINARY
        });
    }
}

/// Copies a connection to a high descriptor number, which the program hardly chooses for itself.
#[inline(never)]
fn copy_to_high_number(connection: &Connection) -> Option<Connection> {
    let number = connection.as_fd().as_raw_fd();
    let copy = rustix::io::fcntl_dupfd_cloexec(connection, OWN_FD_MIN)
        .or_else(|_| rustix::io::fcntl_dupfd_cloexec(connection, number + 1))
        .ok()?;
    // SAFETY: the descriptor is new, and this call passes its ownership on.
    Some(unsafe { Connection::from_raw_fd(copy.into_raw_fd()) })
}

/// Connects to the firnd of a token. A process of another user at the other end is refused and counted.
#[inline(never)]
fn connect_to(token: &Token) -> Option<Connection> {
    match Connection::connect(token, sys::euid()) {
        Ok(connection) => Some(connection),
        Err(ConnectError::Peer(_)) => {
            report::count_distrusted(Distrust::Peer);
            None
        }
        Err(ConnectError::Unreachable(_)) => None,
    }
}

/// Whether the arena is mapped for a new connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MapArena {
    /// The arena is not mapped, and the connection serves requests only.
    Never,
    /// The arena is mapped if this process can map it.
    IfPossible,
    /// If the arena cannot be mapped, the connection is closed.
    Always,
}

/// Receives the answer to the hello, which comes with the arena's descriptor, and maps the arena as wanted.
#[inline(never)]
fn receive_arena(
    connection: &Connection,
    arena_id: &[u8; 16],
    map_arena: MapArena,
) -> Option<ArenaMap> {
    let (arena, fd): (_, Descriptor) = connection.receive_hello(arena_id)?;
    if map_arena == MapArena::Never {
        return Some(ArenaMap::NONE);
    }
    match ArenaMap::map(&fd, &arena) {
        None if map_arena == MapArena::IfPossible => Some(ArenaMap::NONE),
        map => map,
    }
}

/// Makes a request with a payload over a connection, and returns the reply.
pub(crate) fn call_firnd(
    link: u32,
    request: &Request,
    payload: &mut Payload<'_>,
) -> Result<Reply, CallError> {
    let mut locked = lock_link(link).ok_or(CallError::NotSent)?;
    locked
        .receive_outstanding_answer()
        .ok_or(CallError::NotSent)?;
    let reply = locked.connection.call(request, payload);
    locked.close_if_ended(reply)
}

/// Makes a connection that the caller owns. A signal handler needs one if it interrupts the thread that holds the lock
/// of the usual connection.
pub(crate) fn connect_for_one_call(token: &Token) -> Option<Connection> {
    let connection = connect_to(token)?;
    connection.send_hello(None).ok()?;
    receive_arena(&connection, &token.arena, MapArena::Never)?;
    Some(connection)
}

/// Whether a reply grants the request.
pub(crate) fn is_granted(reply: &Reply) -> bool {
    Status::from_word(reply.status) == Status::Ok
}
