//! Connections to firnd: one for each arena, made at the first use.
//!
//! Requests are answered in order, and answers are read in that order: the next request takes what is still to come
//! from an earlier [`ask_ahead`]. A connection that ended is made anew at the next use, a few times: firnd may have
//! been mounted again. A new connection has a new number, because its tokens are new.
//!
//! Nothing is sent before the kernel said that a process of this user listens at the other end.

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

/// Arenas that one process writes to.
const LINKS_COUNT: usize = 4;
/// Connections to one arena, one after the other.
const ATTEMPTS: u32 = 8;
/// Answers that came before they were wanted.
const STASH: usize = 16;
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
/// Numbers from here on are out of the way of programs that choose theirs.
pub(crate) const OWN_FD_MIN: c_int = 900;

/// One connection after another to one arena.
struct Link {
    /// The socket plus one; 0: none. Changed under the lock.
    socket: AtomicI32,
    inner: Locked<Inner>,
}

// SAFETY: words, locks, an empty map, and options of words; zeros are a valid value of each. What was answered is set
// anew before the first connection (`ask_first`), and without an attempt there is none.
static LINKS: Wiped<[Link; LINKS_COUNT]> =
    unsafe { Wiped::new([const { Link::new() }; LINKS_COUNT]) };

/// Makes children of fork(2) find no connection. `false`: the kernel cannot.
pub(crate) fn wipe_on_fork() -> bool {
    LINKS.wipe_on_fork()
}

struct Inner {
    uuid: [u8; 16],
    /// Connections so far; 0: the link is free.
    attempts: u32,
    identity: Identity,
    map: ArenaMap,
    /// Token of the request for leases that was not answered yet, if any.
    ahead: Option<u64>,
    stash: [Leases; STASH],
    stash_next: usize,
}

/// The answer to a request for leases, as far as it was not taken. It is received where it is kept: callers may have
/// little stack. All zeros: none.
struct Leases {
    /// The open file.
    token: u64,
    /// The word of a [`Status`]: a child of fork(2) finds zeros here.
    status: u32,
    slabs: [Slab; LEASE_SLABS_MAX],
    /// Index in `slabs` of the first lease that is still to be filled …
    next: usize,
    /// … and the index after the last one. They are filled in this order.
    end: usize,
}

/// What [`take_lease`] took.
pub(crate) struct NextLease {
    pub(crate) status: Status,
    /// Of [`Status::Ok`].
    pub(crate) slab: Slab,
    /// Whether another one waits behind it.
    pub(crate) has_more: bool,
}

impl Leases {
    const fn none() -> Self {
        Self {
            token: 0,
            status: 0,
            slabs: [NO_SLAB; LEASE_SLABS_MAX],
            next: 0,
            end: 0,
        }
    }

    /// Forgets what was not taken.
    fn clear(&mut self) {
        (self.next, self.end) = (0, 0);
    }

    fn is_of(&self, token: u64) -> bool {
        self.next < self.end && self.token == token
    }

    fn take_next(&mut self) -> Option<NextLease> {
        let slab = *self.slabs.get(self.next)?;
        self.next += 1;
        Some(NextLease {
            status: Status::from_word(self.status),
            slab,
            has_more: self.next < self.end,
        })
    }
}

/// A connection, locked.
struct Open {
    link: &'static Link,
    inner: Guard<'static, Inner>,
    /// The link's own: closed where it ends, not with this borrow.
    connection: ManuallyDrop<Connection>,
}

/// Whether this process is connected to any arena.
pub(crate) fn has_connection() -> bool {
    LINKS
        .iter()
        .any(|link| link.socket.load(Ordering::Relaxed) != 0)
}

/// Connects to the arena that a token names; the number of the connection. For a writer: of a new connection the grant
/// and the first lease come along, as from [`ask_open`].
pub(crate) fn connect_to_write(token: &Token, lease_bytes: u64) -> Option<(u32, Option<Reply>)> {
    let mut first = First::Open(lease_bytes, None);
    let link = connect_within(token, ATTEMPTS, &mut first)?;
    let reply = if let First::Open(_, reply) = first {
        reply
    } else {
        None
    };
    Some((link, reply))
}

/// The extents that are asked for.
pub(crate) struct Wanted<'a> {
    /// From here of the file on.
    pub(crate) from: u64,
    /// Files of the backing that may be named; 0: none, and no extents in them.
    pub(crate) files_max: u32,
    /// For their descriptors.
    pub(crate) files: &'a mut Files,
}

impl Wanted<'_> {
    fn request(&self, token: u64) -> Request {
        Request::new(Op::Extents, token, self.from).with_len(self.files_max)
    }
}

/// The same for a reader: of a new connection the first extents come along, as from [`ask_extents`].
pub(crate) fn connect_to_read(
    token: &Token,
    wanted: Wanted<'_>,
    extents: &mut [MaybeUninit<Extent>],
) -> Option<(u32, Option<Reply>)> {
    let mut first = First::Extents(wanted, extents, None);
    let link = connect_within(token, ATTEMPTS, &mut first)?;
    let reply = if let First::Extents(_, _, reply) = first {
        reply
    } else {
        None
    };
    Some((link, reply))
}

/// The same for a mapping.
pub(crate) fn connect_to_map(token: &Token) -> Option<u32> {
    connect_within(token, ATTEMPTS, &mut First::Nothing)
}

/// The same for stubs, which nothing else serves: however often, and without the arena where this process cannot
/// map it.
pub(crate) fn connect_for_stubs(token: &Token) -> Option<u32> {
    let attempts_max = u32::MAX / LINKS_COUNT as u32 - 1;
    connect_within(token, attempts_max, &mut First::Nothing)
}

fn connect_within(token: &Token, attempts_max: u32, first: &mut First<'_>) -> Option<u32> {
    for (index, link) in LINKS.iter().enumerate() {
        let Some(mut inner) = link.inner.take_lock() else {
            continue;
        };
        if inner.attempts == 0 {
            inner.uuid = token.arena;
        }
        if inner.uuid != token.arena {
            continue;
        }
        if link.socket.load(Ordering::Relaxed) == 0 && inner.attempts < attempts_max {
            inner.attempts += 1;
            let socket = open_socket(&mut inner, token, attempts_max > ATTEMPTS, first);
            let socket = socket.map_or(0, |fd| fd + 1);
            link.socket.store(socket, Ordering::Release);
        }
        let is_connected = link.socket.load(Ordering::Relaxed) != 0;
        return is_connected.then_some(number_of(index, inner.attempts));
    }
    None
}

/// A connection by its number; `None` where it has ended, or this thread holds it.
fn open_link(number: u32) -> Option<Open> {
    let index = number as usize % LINKS_COUNT;
    let open = LINKS.get(index)?.lock_connection()?;
    (number_of(index, open.inner.attempts) == number).then_some(open)
}

/// The sockets of all connections.
pub(crate) fn open_sockets() -> impl Iterator<Item = c_int> {
    LINKS
        .iter()
        .map(|link| link.socket.load(Ordering::Acquire) - 1)
        .filter(|fd| *fd >= 0)
}

/// Gives a socket another number, because the program wants its number.
pub(crate) fn move_socket(fd: c_int) {
    for link in LINKS.iter() {
        if link.socket.load(Ordering::Acquire) != fd + 1 {
            continue;
        }
        let Some(open) = link.lock_connection() else {
            continue;
        };
        if open.connection.as_fd().as_raw_fd() == fd
            && let Some(moved) = copy_to_high_number(&open.connection)
        {
            let moved = moved.into_raw_fd();
            set_internal(fd, false);
            set_internal(moved, true);
            link.socket.store(moved + 1, Ordering::Release);
            drop(ManuallyDrop::into_inner(open.connection));
        }
    }
}

impl Link {
    const fn new() -> Self {
        Self {
            socket: AtomicI32::new(0),
            inner: Locked::new(Inner {
                uuid: [0; 16],
                attempts: 0,
                identity: Identity {
                    device: 0,
                    inode: 0,
                },
                map: ArenaMap::NONE,
                ahead: None,
                stash: [const { Leases::none() }; STASH],
                stash_next: 0,
            }),
        }
    }

    /// Locks the connection, if it is one and this thread does not hold it.
    fn lock_connection(&'static self) -> Option<Open> {
        let inner = self.inner.take_lock()?;
        let fd = self.socket.load(Ordering::Relaxed) - 1;
        if fd < 0 {
            return None;
        }
        // A raw close, and the number may be anything by now.
        if sys::identity(fd).is_none_or(|(found, _)| found != inner.identity) {
            set_internal(fd, false);
            self.socket.store(0, Ordering::Release);
            return None;
        }
        // SAFETY: the link's own socket, as just asked; it is closed where the link forgets it, under the lock, and
        // `ManuallyDrop` keeps this borrow from doing so.
        let connection = ManuallyDrop::new(unsafe { Connection::from_raw_fd(fd) });
        Some(Open {
            link: self,
            inner,
            connection,
        })
    }
}

/// Connects to an arena, asks the first questions and maps the arena; the socket.
#[inline(never)]
fn open_socket(
    inner: &mut Inner,
    token: &Token,
    for_stubs: bool,
    first: &mut First<'_>,
) -> Option<c_int> {
    // Where memory or descriptors are scarce on purpose, the program needs them more.
    let is_scarce = !sys::is_unlimited(Resource::As);
    if is_scarce && !for_stubs {
        return None;
    }
    let mut connection = connect_to(token)?;
    if let Some(moved) = copy_to_high_number(&connection) {
        connection = moved;
    }
    let arena = if is_scarce {
        MapArena::Never
    } else if for_stubs {
        MapArena::IfPossible
    } else {
        MapArena::Always
    };
    ask_first(&connection, inner, token, arena, first)?;
    let (identity, _) = sys::identity(connection.as_fd().as_raw_fd())?;
    inner.identity = identity;
    let fd = connection.into_raw_fd();
    set_internal(fd, true);
    Some(fd)
}

/// What is asked together with a new connection.
enum First<'a> {
    Nothing,
    /// A grant and a lease of this many bytes, and the answer.
    Open(u64, Option<Reply>),
    /// The first extents, and the answer.
    Extents(Wanted<'a>, &'a mut [MaybeUninit<Extent>], Option<Reply>),
}

/// The first requests over a connection, sent in one packet: firnd works while this process maps the arena.
#[inline(never)]
fn ask_first(
    connection: &Connection,
    inner: &mut Inner,
    token: &Token,
    arena: MapArena,
    first: &mut First<'_>,
) -> Option<()> {
    let next = match first {
        First::Nothing => None,
        First::Open(bytes, _) => Some(open_request(token.token, *bytes)),
        First::Extents(wanted, ..) => Some(wanted.request(token.token)),
    };
    connection.send_hello(next.as_ref()).ok()?;
    if let First::Open(..) = first {
        firn_direct::slab_writer::prepare();
    }
    inner.map = receive_arena(connection, &token.arena, arena)?;
    inner.ahead = None;
    inner.stash.iter_mut().for_each(Leases::clear);
    receive_first(connection, inner, token, first)
}

/// The answer to what was asked together with a new connection.
#[inline(never)]
fn receive_first(
    connection: &Connection,
    inner: &mut Inner,
    token: &Token,
    first: &mut First<'_>,
) -> Option<()> {
    match first {
        First::Nothing => {}
        First::Open(_, reply) => {
            *reply = Some(inner.receive_first_leases(connection, token.token).ok()?);
        }
        First::Extents(wanted, room, reply) => {
            let mut room = (&mut **room).into();
            let files = Some(&mut *wanted.files);
            *reply = Some(connection.receive_reply_with(&mut room, files).ok()?);
        }
    }
    Some(())
}

impl Inner {
    /// Receives the answer to a request for leases, and keeps these for [`take_lease`].
    fn receive_leases(&mut self, connection: &Connection, token: u64) -> Result<Reply, CallError> {
        let index = self.stash_next % STASH;
        self.stash_next = self.stash_next.wrapping_add(1);
        let Some(leases) = self.stash.get_mut(index) else {
            return Err(CallError::NoReply);
        };
        leases.clear();
        let (first, more) = leases.slabs.split_at_mut(1);
        let reply = connection.receive_reply(&mut more.into())?;
        first.fill(reply.lease);
        (leases.token, leases.status) = (token, reply.status);
        leases.end = 1 + reply.count as usize;
        Ok(reply)
    }

    /// The same for those that come with a grant, unless there is none.
    fn receive_first_leases(
        &mut self,
        connection: &Connection,
        token: u64,
    ) -> Result<Reply, CallError> {
        let opened = self.receive_leases(connection, token)?;
        if !is_ok(&opened) {
            self.forget_leases(token);
        }
        Ok(opened)
    }

    fn forget_leases(&mut self, token: u64) {
        let of_token = |leases: &&mut Leases| leases.is_of(token);
        self.stash
            .iter_mut()
            .filter(of_token)
            .for_each(Leases::clear);
    }
}

impl Open {
    /// Reads the answer that is still to come, if any.
    fn collect_reply(&mut self) -> Option<()> {
        let Some(token) = self.inner.ahead.take() else {
            return Some(());
        };
        let received = self.inner.receive_leases(&self.connection, token);
        self.or_give_up(received.map(drop)).ok()
    }

    /// Asks for leases and does not wait for them. Those of an earlier answer that were not taken are dropped.
    fn send_lease_request(&mut self, token: u64, lease_bytes: u64) -> Option<()> {
        self.inner.forget_leases(token);
        self.inner.ahead = Some(token);
        let request = Request::new(Op::Lease, token, lease_bytes).with_len(sys::current_cpu());
        let sent = self.connection.send_request(&request, &Payload::none());
        self.or_give_up(sent).ok()
    }

    /// The next lease of an open file that was answered before.
    fn take_lease(&mut self, token: u64) -> Option<NextLease> {
        let of_token = |leases: &&mut Leases| leases.is_of(token);
        self.inner.stash.iter_mut().find(of_token)?.take_next()
    }

    /// Forgets a connection that has ended.
    fn or_give_up<T>(&mut self, answer: Result<T, CallError>) -> Result<T, CallError> {
        if let Err(CallError::NotSent | CallError::NoReply) = answer {
            let fd = self.connection.as_fd().as_raw_fd();
            set_internal(fd, false);
            // Without the socket no other thread makes an `Open` of it.
            if self.link.socket.swap(0, Ordering::AcqRel) != 0 {
                sys::close(fd);
            }
        }
        answer
    }
}

/// Asks and waits for the answer; `None`: that connection has ended.
pub(crate) fn ask_firnd(link: u32, op: Op, token: u64, arg: u64) -> Option<Reply> {
    call_firnd(link, &Request::new(op, token, arg), &mut Payload::none()).ok()
}

/// Asks for extents of a file, which `extents` get.
pub(crate) fn ask_extents(
    link: u32,
    token: u64,
    wanted: Wanted<'_>,
    extents: &mut [MaybeUninit<Extent>],
) -> Option<Reply> {
    let request = wanted.request(token);
    let mut payload = Payload {
        room: extents.into(),
        files: Some(wanted.files),
        ..Payload::none()
    };
    call_firnd(link, &request, &mut payload).ok()
}

/// Asks for a grant to write a file together with its first lease, which [`take_lease`] has then. `None`: that
/// connection has ended.
pub(crate) fn ask_open(link: u32, token: u64, lease_bytes: u64) -> Option<Reply> {
    let mut open = open_link(link)?;
    open.collect_reply()?;
    // Leases of an earlier grant for this open file are over.
    open.inner.forget_leases(token);
    let sent = open
        .connection
        .send_request(&open_request(token, lease_bytes), &Payload::none());
    let received = sent.and_then(|()| open.inner.receive_first_leases(&open.connection, token));
    open.or_give_up(received).ok()
}

fn open_request(token: u64, lease_bytes: u64) -> Request {
    Request::new(Op::OpenWrite, token, lease_bytes).with_len(sys::current_cpu())
}

/// Asks for leases and does not wait for them: [`take_lease`] does. Whether it was possible.
pub(crate) fn ask_ahead(link: u32, token: u64, lease_bytes: u64) -> bool {
    let Some(mut open) = open_link(link) else {
        return false;
    };
    open.inner.ahead.is_none() && open.send_lease_request(token, lease_bytes).is_some()
}

/// The next lease of those that were asked for before; `None`: there is none.
pub(crate) fn take_lease(link: u32, token: u64) -> Option<NextLease> {
    let mut open = open_link(link)?;
    if let Some(lease) = open.take_lease(token) {
        return Some(lease);
    }
    open.collect_reply()?;
    open.take_lease(token)
}

/// Asks for leases and takes the first one.
pub(crate) fn ask_lease(link: u32, token: u64, lease_bytes: u64) -> Option<NextLease> {
    let mut open = open_link(link)?;
    open.collect_reply()?;
    open.send_lease_request(token, lease_bytes)?;
    open.collect_reply()?;
    open.take_lease(token)
}

/// Where the arena of a connection is mapped. It stays so as long as the process lives; the socket is not asked for.
pub(crate) fn arena_map(number: u32) -> Option<ArenaMap> {
    let index = number as usize % LINKS_COUNT;
    let inner = LINKS.get(index)?.inner.take_lock()?;
    (number_of(index, inner.attempts) == number).then_some(inner.map)
}

/// The number of a connection: differs from that of the one before it over the same link.
fn number_of(index: usize, attempts: u32) -> u32 {
    attempts * LINKS_COUNT as u32 + index as u32
}

/// Tells the hooks whether a number is the library's own.
fn set_internal(fd: c_int, internal: bool) {
    if let Some(mut held) = table::lock_new_entry(fd) {
        held.set_tag(if internal { tag::INTERNAL } else { tag::NONE });
    }
}

/// A copy of a connection with a high number, which the program does not choose for itself.
#[inline(never)]
fn copy_to_high_number(connection: &Connection) -> Option<Connection> {
    let number = connection.as_fd().as_raw_fd();
    let copy = rustix::io::fcntl_dupfd_cloexec(connection, OWN_FD_MIN)
        .or_else(|_| rustix::io::fcntl_dupfd_cloexec(connection, number + 1))
        .ok()?;
    // SAFETY: a new descriptor of the same socket, given away here.
    Some(unsafe { Connection::from_raw_fd(copy.into_raw_fd()) })
}

/// Connects to this user's own firnd only.
#[inline(never)]
fn connect_to(token: &Token) -> Option<Connection> {
    match Connection::to(token, sys::euid()) {
        Ok(connection) => Some(connection),
        Err(ConnectError::Peer(_)) => {
            report::count_distrusted(Distrust::Peer);
            None
        }
        Err(ConnectError::Unreachable(_)) => None,
    }
}

/// Whether a connection comes with the arena in this process's memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MapArena {
    /// It is for requests alone.
    Never,
    /// Or for requests alone, where the arena cannot be mapped.
    IfPossible,
    /// Or there is no connection.
    Always,
}

/// Receives the answer to the first request, which gives the arena.
#[inline(never)]
fn receive_arena(connection: &Connection, uuid: &[u8; 16], map: MapArena) -> Option<ArenaMap> {
    let (arena, fd): (_, Descriptor) = connection.receive_hello(uuid)?;
    if map == MapArena::Never {
        return Some(ArenaMap::NONE);
    }
    let or_none = (map == MapArena::IfPossible).then_some(ArenaMap::NONE);
    ArenaMap::map(&fd, &arena).or(or_none)
}

/// Makes a request with bytes over the connection of a link.
pub(crate) fn call_firnd(
    link: u32,
    request: &Request,
    payload: &mut Payload<'_>,
) -> Result<Reply, CallError> {
    let mut open = open_link(link).ok_or(CallError::NotSent)?;
    open.collect_reply().ok_or(CallError::NotSent)?;
    let reply = open.connection.call(request, payload);
    open.or_give_up(reply)
}

/// Connects for one purpose: in a signal handler whose thread holds the other connection.
pub(crate) fn connect_once(token: &Token) -> Option<Connection> {
    let connection = connect_to(token)?;
    connection.send_hello(None).ok()?;
    receive_arena(&connection, &token.arena, MapArena::Never)?;
    Some(connection)
}

/// Whether a reply grants what was asked.
pub(crate) fn is_ok(reply: &Reply) -> bool {
    Status::from_word(reply.status) == Status::Ok
}
