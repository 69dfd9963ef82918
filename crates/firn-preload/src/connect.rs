//! Connections to firnd: one for each arena, made at the first use.
//!
//! Requests are answered in order, and so are read: whoever asks first takes what is still to come from
//! an earlier [`Link::ask_ahead`]. A connection that ended is made anew at the next use, a few times: firnd
//! may have been mounted again. Its number is another then, because its tokens are.
//!
//! Nothing is sent before the kernel said that a process of this user listens at the other end.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use firn_direct::arena_map::ArenaMap;
use firn_direct::connection::{CallError, ConnectError, Connection, Incoming, Payload};
use firn_direct::syscall::Descriptor;
use firn_format::data_socket::{Extent, Op, Reply, Request, Status, Token};

use crate::lock::Lock;
use crate::report::{self, Distrust};
use crate::sys::{self, Identity};
use crate::table::{TABLE, tag};

/// Arenas that one process writes to.
const LINKS: usize = 4;
/// Connections to one arena, one after the other.
const ATTEMPTS: u32 = 8;
/// Answers that came before they were wanted.
const STASH: usize = 16;
/// Numbers from here on are out of the way of programs that choose theirs.
const SOCKET_FD_MIN: c_int = 900;

/// All connections.
pub(crate) struct Links {
    links: [Link; LINKS],
}

/// One connection.
pub(crate) struct Link {
    lock: Lock,
    /// The socket plus one; 0: none.
    socket: AtomicI32,
    inner: UnsafeCell<Inner>,
}

struct Inner {
    uuid: [u8; 16],
    /// Connections so far; 0: the link is nobody's.
    attempts: u32,
    identity: Identity,
    map: ArenaMap,
    /// The answer to the grant that was asked for with the connection, and for which token.
    opened: Option<(u64, Reply)>,
    /// Token of the request that was not answered yet, if any.
    ahead: Option<u64>,
    stash: [Option<(u64, Reply)>; STASH],
    stash_next: usize,
}

/// A connection, locked.
struct Open<'a> {
    link: &'a Link,
    /// The link's own: closed where it ends, not with this borrow.
    connection: ManuallyDrop<Connection>,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.link.lock.give();
    }
}

impl Links {
    pub(crate) const fn new() -> Self {
        Self {
            links: [const { Link::new() }; LINKS],
        }
    }

    /// The number of the connection to the arena that a token names, for [`Links::get`]. For a writer, who asks
    /// with [`ask_open`] next: of a new connection the answers are there then.
    pub(crate) fn to_write(&self, token: &Token, lease_bytes: u64) -> Option<u32> {
        self.to_within(token, ATTEMPTS, &mut First::Lease(lease_bytes))
    }

    /// The same for a reader: of a new connection the first extents come along, as from [`ask_extents`].
    pub(crate) fn to_read(
        &self,
        token: &Token,
        extents: &mut [MaybeUninit<Extent>],
    ) -> Option<(u32, Option<Reply>)> {
        let mut first = First::Extents(extents, None);
        let link = self.to_within(token, ATTEMPTS, &mut first)?;
        let reply = if let First::Extents(_, reply) = first {
            reply
        } else {
            None
        };
        Some((link, reply))
    }

    /// The same for stubs, which have no other way: however often, and without the arena where this process
    /// cannot map it.
    pub(crate) fn to_at_any_rate(&self, token: &Token) -> Option<u32> {
        self.to_within(token, u32::MAX / LINKS as u32 - 1, &mut First::Nothing)
    }

    fn to_within(&self, token: &Token, attempts_max: u32, first: &mut First<'_>) -> Option<u32> {
        for (index, link) in self.links.iter().enumerate() {
            if !link.lock.take() {
                continue;
            }
            // SAFETY: the lock is held.
            let inner = unsafe { &mut *link.inner.get() };
            if inner.attempts == 0 {
                inner.uuid = token.arena;
            }
            let found = inner.uuid == token.arena;
            if found && link.socket.load(Ordering::Relaxed) == 0 && inner.attempts < attempts_max {
                inner.attempts += 1;
                let socket = link.connect(inner, token, attempts_max > ATTEMPTS, first);
                let socket = socket.map_or(0, |fd| fd + 1);
                link.socket.store(socket, Ordering::Release);
            }
            let number = number(index, inner.attempts);
            let connected = link.socket.load(Ordering::Relaxed) != 0;
            link.lock.give();
            if found {
                return connected.then_some(number);
            }
        }
        None
    }

    /// A connection by its number; `None` where it has ended.
    fn get(&self, wanted: u32) -> Option<Open<'_>> {
        let index = wanted as usize % LINKS;
        let open = self.links.get(index)?.open()?;
        (number(index, open.inner().attempts) == wanted).then_some(open)
    }

    /// The sockets of all connections.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = c_int> + '_ {
        self.links
            .iter()
            .map(|link| link.socket.load(Ordering::Acquire) - 1)
            .filter(|fd| *fd >= 0)
    }

    /// The program wants the number of a socket for itself: the socket moves.
    pub(crate) fn make_way(&self, fd: c_int) {
        for link in &self.links {
            if link.socket.load(Ordering::Acquire) != fd + 1 || !link.lock.take() {
                continue;
            }
            // SAFETY: the link's own socket, under its lock.
            let connection = unsafe { Connection::from_raw_fd(fd) };
            if let Some(moved) = copy_to_high_number(&connection) {
                let moved = moved.into_raw_fd();
                set_internal(fd, false);
                set_internal(moved, true);
                link.socket.store(moved + 1, Ordering::Release);
                drop(connection);
            } else {
                // It keeps its number.
                let _ = connection.into_raw_fd();
            }
            link.lock.give();
        }
    }
}

impl Link {
    const fn new() -> Self {
        Self {
            lock: Lock::new(),
            socket: AtomicI32::new(0),
            inner: UnsafeCell::new(Inner {
                uuid: [0; 16],
                attempts: 0,
                identity: Identity {
                    device: 0,
                    inode: 0,
                },
                map: ArenaMap::NONE,
                opened: None,
                ahead: None,
                stash: [const { None }; STASH],
                stash_next: 0,
            }),
        }
    }

    /// Locks the connection, if it is one and this thread does not hold it.
    fn open(&self) -> Option<Open<'_>> {
        if !self.lock.take() {
            return None;
        }
        let fd = self.socket.load(Ordering::Relaxed) - 1;
        if fd < 0 {
            self.lock.give();
            return None;
        }
        let open = Open {
            link: self,
            // SAFETY: the link's own socket; it is closed where the link forgets it, under the lock, and `ManuallyDrop`
            // keeps this borrow from doing so.
            connection: ManuallyDrop::new(unsafe { Connection::from_raw_fd(fd) }),
        };
        // A raw close, and the number may be anything by now.
        if sys::identity(fd).is_none_or(|(found, _)| found != open.inner().identity) {
            set_internal(fd, false);
            self.socket.store(0, Ordering::Release);
            return None;
        }
        Some(open)
    }

    fn connect(
        &self,
        inner: &mut Inner,
        token: &Token,
        at_any_rate: bool,
        first: &mut First<'_>,
    ) -> Option<c_int> {
        // Where memory or descriptors are scarce on purpose, the program needs them more.
        let scarce = !sys::is_unlimited(libc::RLIMIT_AS);
        if scarce && !at_any_rate {
            return None;
        }
        let mut connection = connect_to(token)?;
        if let Some(moved) = copy_to_high_number(&connection) {
            connection = moved;
        }
        let arena = if scarce {
            MapArena::Never
        } else if at_any_rate {
            MapArena::IfPossible
        } else {
            MapArena::Always
        };
        greet(&connection, inner, token, arena, first)?;
        let (identity, _) = sys::identity(connection.as_fd().as_raw_fd())?;
        inner.identity = identity;
        let fd = connection.into_raw_fd();
        set_internal(fd, true);
        Some(fd)
    }
}

/// What is asked together with a new connection.
enum First<'a> {
    Nothing,
    /// A grant and a lease of so many bytes.
    Lease(u64),
    /// The first extents, and the answer.
    Extents(&'a mut [MaybeUninit<Extent>], Option<Reply>),
}

/// The first requests over a connection, all sent before the first answer is waited for: firnd works while this
/// process maps the arena.
fn greet(
    connection: &Connection,
    inner: &mut Inner,
    token: &Token,
    arena: MapArena,
    first: &mut First<'_>,
) -> Option<()> {
    connection.send_hello().ok()?;
    match first {
        First::Nothing => {}
        First::Lease(bytes) => {
            send_open(connection, token.token, *bytes).ok()?;
            firn_direct::slab_writer::prepare();
        }
        First::Extents(..) => {
            let request = Request::new(Op::Extents, token.token, 0);
            connection.send_request(&request, &Payload::none()).ok()?;
        }
    }
    inner.map = receive_arena(connection, &token.arena, arena)?;
    (inner.opened, inner.ahead, inner.stash) = (None, None, [None; STASH]);
    match first {
        First::Nothing => {}
        First::Lease(_) => {
            let reply = connection.receive_reply(&mut Incoming::none()).ok()?;
            inner.opened = Some((token.token, reply));
            inner.ahead = Some(token.token);
        }
        First::Extents(room, reply) => {
            *reply = Some(connection.receive_reply(&mut (&mut **room).into()).ok()?);
        }
    }
    Some(())
}

impl Open<'_> {
    fn inner(&self) -> &Inner {
        // SAFETY: the lock is held.
        unsafe { &*self.link.inner.get() }
    }

    fn inner_mut(&mut self) -> &mut Inner {
        // SAFETY: the lock is held by this `Open`, which is borrowed alone.
        unsafe { &mut *self.link.inner.get() }
    }

    /// Reads the answer that is still to come, if any.
    fn collect(&mut self) -> Option<()> {
        let Some(token) = self.inner_mut().ahead.take() else {
            return Some(());
        };
        let reply = self.connection.receive_reply(&mut Incoming::none());
        let reply = self.or_give_up(reply).ok()?;
        let inner = self.inner_mut();
        if let Some(slot) = inner.stash.get_mut(inner.stash_next % STASH) {
            *slot = Some((token, reply));
        }
        inner.stash_next = inner.stash_next.wrapping_add(1);
        Some(())
    }

    /// Asks for a grant and the first lease; the answer to the first question.
    fn ask_open(&mut self, token: u64, lease_bytes: u64) -> Option<Reply> {
        self.collect()?;
        // Leases of an earlier grant for this open file are over.
        for slot in &mut self.inner_mut().stash {
            *slot = slot.filter(|(of, _)| *of != token);
        }
        let reply = send_open(&self.connection, token, lease_bytes)
            .and_then(|()| self.connection.receive_reply(&mut Incoming::none()));
        let reply = self.or_give_up(reply).ok()?;
        self.inner_mut().ahead = Some(token);
        Some(reply)
    }

    /// Forgets a connection that has ended.
    fn or_give_up<T>(&mut self, answer: Result<T, CallError>) -> Result<T, CallError> {
        if let Err(CallError::NotSent | CallError::NoReply) = answer {
            let fd = self.connection.as_fd().as_raw_fd();
            set_internal(fd, false);
            // Without the socket nobody makes another `Open` of it.
            if self.link.socket.swap(0, Ordering::AcqRel) != 0 {
                sys::close(fd);
            }
        }
        answer
    }
}

/// Asks and waits for the answer; `None`: that connection has ended.
pub(crate) fn ask(link: u32, op: Op, token: u64, arg: u64) -> Option<Reply> {
    ask_extents(link, token, (op, arg), &mut [])
}

/// [`ask`], with room for the extents that follow the reply.
pub(crate) fn ask_extents(
    link: u32,
    token: u64,
    (op, arg): (Op, u64),
    extents: &mut [MaybeUninit<Extent>],
) -> Option<Reply> {
    let mut open = TABLE.links.get(link)?;
    open.collect()?;
    let len = if op == Op::Lease { sys::cpu() } else { 0 };
    let request = Request::new(op, token, arg).with_len(len);
    let mut payload = Payload {
        room: extents.into(),
        ..Payload::none()
    };
    let reply = open.connection.call(&request, &mut payload);
    open.or_give_up(reply).ok()
}

/// Asks for a grant to write a file and, in the same trip, for its first lease; [`take_ahead`] has that one then.
/// `None`: that connection has ended.
pub(crate) fn ask_open(link: u32, token: u64, lease_bytes: u64) -> Option<Reply> {
    let mut open = TABLE.links.get(link)?;
    let reply = match open.inner_mut().opened.take_if(|(of, _)| *of == token) {
        Some((_, reply)) => reply,
        None => open.ask_open(token, lease_bytes)?,
    };
    drop(open);
    if !is_ok(&reply) {
        // No grant, no lease: the second answer says so and is of no use later.
        take_ahead(link, token);
    }
    Some(reply)
}

fn send_open(connection: &Connection, token: u64, lease_bytes: u64) -> Result<(), CallError> {
    let open = Request::new(Op::OpenWrite, token, 0);
    let lease = Request::new(Op::Lease, token, lease_bytes).with_len(sys::cpu());
    connection.send_request(&open, &Payload::none())?;
    connection.send_request(&lease, &Payload::none())
}

/// Asks for a lease and does not wait for it: [`take_ahead`] does.
pub(crate) fn ask_ahead(link: u32, token: u64, arg: u64) -> bool {
    let Some(mut open) = TABLE.links.get(link) else {
        return false;
    };
    if open.inner().ahead.is_some() {
        return false;
    }
    open.inner_mut().ahead = Some(token);
    let request = Request::new(Op::Lease, token, arg).with_len(sys::cpu());
    let sent = open.connection.send_request(&request, &Payload::none());
    open.or_give_up(sent).is_ok()
}

/// The answer to [`ask_ahead`].
pub(crate) fn take_ahead(link: u32, token: u64) -> Option<Reply> {
    let mut open = TABLE.links.get(link)?;
    open.collect()?;
    let slot = open
        .inner_mut()
        .stash
        .iter_mut()
        .find(|slot| slot.is_some_and(|(of, _)| of == token))?;
    slot.take().map(|(_, reply)| reply)
}

/// Where the arena of a connection is mapped. It stays so as long as the process lives; the socket is not asked for.
pub(crate) fn arena_map(number: u32) -> Option<ArenaMap> {
    let index = number as usize % LINKS;
    let link = TABLE.links.links.get(index)?;
    if !link.lock.take() {
        return None;
    }
    // SAFETY: the lock is held.
    let inner = unsafe { &*link.inner.get() };
    let map = (self::number(index, inner.attempts) == number).then_some(inner.map);
    link.lock.give();
    map
}

/// The number of a connection: differs from that of the one before it over the same link.
fn number(index: usize, attempts: u32) -> u32 {
    attempts * LINKS as u32 + index as u32
}

/// Tells the hooks whether a number is the library's own.
fn set_internal(fd: c_int, internal: bool) {
    if let Some(mut held) = crate::table::enter_new(fd) {
        held.set_tag(if internal { tag::INTERNAL } else { tag::NONE });
    }
}

/// A copy of a connection with a high number; its own may be one that the program chooses.
fn copy_to_high_number(connection: &Connection) -> Option<Connection> {
    let number = connection.as_fd().as_raw_fd();
    let copy = rustix::io::fcntl_dupfd_cloexec(connection, SOCKET_FD_MIN)
        .or_else(|_| rustix::io::fcntl_dupfd_cloexec(connection, number + 1))
        .ok()?;
    // SAFETY: a new descriptor of the same socket, given away here.
    Some(unsafe { Connection::from_raw_fd(copy.into_raw_fd()) })
}

/// Connects to this user's own firnd, and to nobody else.
fn connect_to(token: &Token) -> Option<Connection> {
    match Connection::to(token, sys::euid()) {
        Ok(connection) => Some(connection),
        Err(ConnectError::Peer(_)) => {
            report::distrusted(Distrust::Peer);
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
fn receive_arena(connection: &Connection, uuid: &[u8; 16], map: MapArena) -> Option<ArenaMap> {
    let (arena, fd): (_, Descriptor) = connection.receive_hello(uuid)?;
    if map == MapArena::Never {
        return Some(ArenaMap::NONE);
    }
    let or_none = (map == MapArena::IfPossible).then_some(ArenaMap::NONE);
    ArenaMap::map(&fd, &arena).or(or_none)
}

/// Makes a request with bytes over the connection of a link.
pub(crate) fn call(
    link: u32,
    request: &Request,
    payload: &mut Payload<'_>,
) -> Result<Reply, CallError> {
    let mut open = TABLE.links.get(link).ok_or(CallError::NotSent)?;
    open.collect().ok_or(CallError::NotSent)?;
    let reply = open.connection.call(request, payload);
    open.or_give_up(reply)
}

/// Connects for one purpose: in a signal handler whose thread holds the other connection.
pub(crate) fn connect_once(token: &Token) -> Option<Connection> {
    let connection = connect_to(token)?;
    connection.send_hello().ok()?;
    receive_arena(&connection, &token.arena, MapArena::Never)?;
    Some(connection)
}

/// Whether a reply grants what was asked.
pub(crate) fn is_ok(reply: &Reply) -> bool {
    Status::from_word(reply.status) == Status::Ok
}
