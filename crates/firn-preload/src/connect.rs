//! Connections to firnd: one for each arena, made at the first use.
//!
//! Requests are answered in order, and so are read: whoever asks first takes what is still to come from
//! an earlier [`Link::ask_ahead`]. A connection that ended is made anew at the next use, a few times: firnd
//! may have been mounted again. Its number is another then, because its tokens are.
//!
//! Nothing is sent before the kernel said that a process of this user listens at the other end.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicI32, Ordering};

use firn_format::data_socket::{
    Arena, DATA_SOCKET_VERSION, Extent, Op, Reply, Request, Status, Token,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::lock::Lock;
use crate::mapping::Mapping;
use crate::memory::{Readable, Run, Writable};
use crate::report::{self, Distrust};
use crate::sys::{self, Identity, syscall};
use crate::table::{TABLE, tag};

/// Arenas that one process writes to.
const LINKS: usize = 4;
/// Connections to one arena, one after the other.
const ATTEMPTS: u32 = 8;
/// Answers that came before they were wanted.
const STASH: usize = 16;
/// Numbers from here on are out of the way of programs that choose theirs.
const SOCKET_FD_MIN: usize = 900;

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
    mapping: Mapping,
    /// The answer to the grant that was asked for with the connection, and for which token.
    opened: Option<(u64, Reply)>,
    /// Token of the request that was not answered yet, if any.
    ahead: Option<u64>,
    stash: [Option<(u64, Reply)>; STASH],
    stash_next: usize,
}

/// The socket of a connection, locked.
struct Open<'a> {
    link: &'a Link,
    fd: c_int,
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
            if let Some(moved) = move_away(fd) {
                set_internal(fd, false);
                set_internal(moved, true);
                link.socket.store(moved + 1, Ordering::Release);
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
                mapping: Mapping::NONE,
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
        let open = Open {
            link: self,
            fd: self.socket.load(Ordering::Relaxed) - 1,
        };
        // A raw close, and the number may be anything by now.
        if open.fd >= 0
            && sys::identity(open.fd).is_none_or(|(found, _)| found != open.inner().identity)
        {
            set_internal(open.fd, false);
            self.socket.store(0, Ordering::Release);
            return None;
        }
        (open.fd >= 0).then_some(open)
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
        let fd = connect_to(&token.socket)?;
        let fd = move_away(fd).unwrap_or(fd);
        let wanted = if scarce {
            Want::Nothing
        } else {
            Want::Arena {
                or_nothing: at_any_rate,
            }
        };
        let greeted = greet(fd, inner, token, wanted, first);
        match greeted.and_then(|()| sys::identity(fd)) {
            Some((identity, _)) => {
                inner.identity = identity;
                set_internal(fd, true);
                Some(fd)
            }
            None => {
                sys::close(fd);
                None
            }
        }
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
    fd: c_int,
    inner: &mut Inner,
    token: &Token,
    wanted: Want,
    first: &mut First<'_>,
) -> Option<()> {
    send_hello(fd)?;
    match first {
        First::Nothing => {}
        First::Lease(bytes) => {
            send_open(fd, token.token, *bytes)?;
            firn_direct::slab_writer::prepare();
        }
        First::Extents(..) => {
            send(
                fd,
                &Request {
                    op: Op::Extents as u32,
                    len: 0,
                    token: token.token,
                    arg: 0,
                },
            )?;
        }
    }
    inner.mapping = receive_hello(fd, &token.arena, wanted)?;
    (inner.opened, inner.ahead, inner.stash) = (None, None, [None; STASH]);
    match first {
        First::Nothing => {}
        First::Lease(_) => {
            inner.opened = Some((token.token, receive(fd, &mut [])?));
            inner.ahead = Some(token.token);
        }
        First::Extents(room, reply) => *reply = Some(receive(fd, room)?),
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
        let reply = receive(self.fd, &mut []);
        let reply = self.or_give_up(reply)?;
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
        let reply = send_open(self.fd, token, lease_bytes).and_then(|()| receive(self.fd, &mut []));
        let reply = self.or_give_up(reply)?;
        self.inner_mut().ahead = Some(token);
        Some(reply)
    }

    fn or_give_up<T>(&self, answer: Option<T>) -> Option<T> {
        if answer.is_none() {
            set_internal(self.fd, false);
            self.link.socket.store(0, Ordering::Release);
            sys::close(self.fd);
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
    let request = Request {
        op: op as u32,
        len,
        token,
        arg,
    };
    let reply = send(open.fd, &request).and_then(|()| receive(open.fd, extents));
    open.or_give_up(reply)
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

fn send_open(fd: c_int, token: u64, lease_bytes: u64) -> Option<()> {
    let request = |op, len, arg| Request {
        op: op as u32,
        len,
        token,
        arg,
    };
    send(fd, &request(Op::OpenWrite, 0, 0))?;
    send(fd, &request(Op::Lease, sys::cpu(), lease_bytes))
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
    let request = Request {
        op: Op::Lease as u32,
        len: sys::cpu(),
        token,
        arg,
    };
    let sent = send(open.fd, &request);
    open.or_give_up(sent).is_some()
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
pub(crate) fn mapping(number: u32) -> Option<Mapping> {
    let index = number as usize % LINKS;
    let link = TABLE.links.links.get(index)?;
    if !link.lock.take() {
        return None;
    }
    // SAFETY: the lock is held.
    let inner = unsafe { &*link.inner.get() };
    let mapping = (self::number(index, inner.attempts) == number).then_some(inner.mapping);
    link.lock.give();
    mapping
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

/// Gives a descriptor a high number.
fn move_away(fd: c_int) -> Option<c_int> {
    let moved = sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, SOCKET_FD_MIN);
    let moved = if moved >= 0 {
        moved
    } else {
        sys::fcntl(fd, libc::F_DUPFD_CLOEXEC, fd as usize + 1)
    };
    if moved < 0 {
        return None;
    }
    sys::close(fd);
    Some(moved as c_int)
}

fn connect_to(path: &[u8; 112]) -> Option<c_int> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    let len = path
        .iter()
        .position(|byte| *byte == 0)
        .filter(|len| *len > 0 && *len < 108)?;
    for (to, from) in address.sun_path.iter_mut().zip(path.iter().take(len)) {
        *to = *from as libc::c_char;
    }
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the address is ours, and nobody else closes the new descriptor meanwhile.
    unsafe {
        let fd = syscall!(libc::SYS_socket, libc::AF_UNIX, kind, 0usize);
        if fd < 0 {
            return None;
        }
        let connected = syscall!(
            libc::SYS_connect,
            fd,
            &raw const address,
            size_of::<libc::sockaddr_un>()
        );
        if connected < 0 {
            sys::close(fd as c_int);
            return None;
        }
        let socket = BorrowedFd::borrow_raw(fd as c_int);
        // Whoever gave the path may be anybody who mounts something: descriptors and data go to this user's own
        // firnd only.
        if firn_trust::check_peer(socket, sys::euid()).is_err() {
            report::distrusted(Distrust::Peer);
            sys::close(fd as c_int);
            return None;
        }
        Some(fd as c_int)
    }
}

/// What a connection is for.
#[derive(Clone, Copy)]
enum Want {
    /// Requests alone.
    Nothing,
    /// The arena in this process's memory.
    Arena {
        /// Or requests alone, where that cannot be had.
        or_nothing: bool,
    },
}

/// The first request.
fn send_hello(fd: c_int) -> Option<()> {
    send(
        fd,
        &Request {
            op: Op::Hello as u32,
            len: 0,
            token: 0,
            arg: u64::from(DATA_SOCKET_VERSION),
        },
    )
}

/// Its answer gives the arena.
fn receive_hello(fd: c_int, uuid: &[u8; 16], want: Want) -> Option<Mapping> {
    let mut reply = Reply::new_zeroed();
    let mut arena = Arena::new_zeroed();
    let mut parts = [part(reply.as_mut_bytes()), part(arena.as_mut_bytes())];
    // SAFETY: both parts are ours.
    let (len, sent) = unsafe { receive_or(fd, &mut parts) }.ok()?;
    let whole = len == size_of::<Reply>() + size_of::<Arena>() && reply.status == Status::Ok as u32;
    let ours = sent.filter(|_| whole && arena.uuid == *uuid);
    let mapping = ours.and_then(|sent| match want {
        Want::Nothing => Some(Mapping::NONE),
        Want::Arena { or_nothing } => {
            Mapping::of(sent, &arena).or(or_nothing.then_some(Mapping::NONE))
        }
    });
    if let Some(sent) = sent {
        sys::close(sent);
    }
    mapping
}

/// What became of an exchange with bytes of the program's.
pub(crate) enum Called {
    /// The answer.
    Reply(Reply),
    /// The connection has ended; `sent`: perhaps after the request was carried out.
    Gone { sent: bool },
    /// The program's memory could not be read or written.
    Fault,
}

/// What goes along with a request, and room for bytes that come back.
#[derive(Clone, Copy)]
pub(crate) struct Payload<'a> {
    pub(crate) data: Option<Run<'a, Readable>>,
    pub(crate) fd: Option<c_int>,
    pub(crate) into: Option<Run<'a, Writable>>,
}

impl Payload<'_> {
    pub(crate) const NOTHING: Self = Self {
        data: None,
        fd: None,
        into: None,
    };
}

const NO_PART: libc::iovec = libc::iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// A request with bytes.
pub(crate) fn call(link: u32, request: &Request, payload: Payload<'_>) -> Called {
    let Some(mut open) = TABLE.links.get(link) else {
        return Called::Gone { sent: false };
    };
    if open.collect().is_none() {
        return Called::Gone { sent: false };
    }
    let called = exchange(open.fd, request, payload);
    if let Called::Gone { .. } = called {
        open.or_give_up(None::<()>);
    }
    called
}

/// A connection for one purpose, which a signal handler makes whose thread holds the other.
pub(crate) struct OneOff {
    fd: c_int,
}

impl OneOff {
    /// Connects.
    pub(crate) fn to(token: &Token) -> Option<Self> {
        let fd = connect_to(&token.socket)?;
        let this = Self { fd };
        send_hello(fd)?;
        receive_hello(fd, &token.arena, Want::Nothing).map(|_| this)
    }

    /// As [`call`].
    pub(crate) fn call(&self, request: &Request, payload: Payload<'_>) -> Called {
        exchange(self.fd, request, payload)
    }
}

impl Drop for OneOff {
    fn drop(&mut self) {
        sys::close(self.fd);
    }
}

fn exchange(fd: c_int, request: &Request, payload: Payload<'_>) -> Called {
    match send_with(fd, request, payload) {
        Ok(()) => {}
        Err(libc::EFAULT) => return Called::Fault,
        Err(_) => return Called::Gone { sent: false },
    }
    let mut reply = Reply::new_zeroed();
    let room = payload.into.map_or(NO_PART, Run::as_part);
    let mut parts = [part(reply.as_mut_bytes()), room];
    // SAFETY: the reply is ours, and the room was given to be written (`Run`).
    let (len, sent) = match unsafe { receive_or(fd, &mut parts) } {
        Ok(received) => received,
        Err(libc::EFAULT) => return Called::Fault,
        Err(_) => return Called::Gone { sent: true },
    };
    if let Some(sent) = sent {
        sys::close(sent);
    }
    let follow = if room.iov_len > 0 {
        reply.count as usize
    } else {
        0
    };
    if len != size_of::<Reply>() + follow || follow > room.iov_len {
        return Called::Gone { sent: true };
    }
    Called::Reply(reply)
}

fn send_with(fd: c_int, request: &Request, payload: Payload<'_>) -> Result<(), c_int> {
    let head = request.as_bytes();
    let data = payload.data.map_or(NO_PART, Run::as_part);
    let mut parts = [
        libc::iovec {
            iov_base: head.as_ptr().cast_mut().cast(),
            iov_len: head.len(),
        },
        data,
    ];
    // SAFETY: a structure of numbers and pointers that may be null.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    let mut control = [0u64; 4];
    if let Some(given) = payload.fd {
        message.msg_control = control.as_mut_ptr().cast::<c_void>();
        // SAFETY: numbers in, numbers out; the macros stay within the control data, which has room for one.
        unsafe {
            message.msg_controllen = libc::CMSG_SPACE(size_of::<c_int>() as u32) as usize;
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN(size_of::<c_int>() as u32) as usize;
            libc::CMSG_DATA(head).cast::<c_int>().write_unaligned(given);
        }
    }
    let len = (head.len() + data.iov_len) as isize;
    loop {
        // SAFETY: the kernel reads the head, which is ours, and memory that was given to be read (`Run`).
        let sent = unsafe {
            syscall!(
                libc::SYS_sendmsg,
                fd,
                &raw const message,
                libc::MSG_NOSIGNAL
            )
        };
        if sent != -(libc::EINTR as isize) {
            return if sent == len {
                Ok(())
            } else {
                Err(sent.wrapping_neg() as c_int)
            };
        }
    }
}

fn send(fd: c_int, request: &Request) -> Option<()> {
    let bytes = request.as_bytes();
    loop {
        // SAFETY: the kernel reads the request.
        let sent = unsafe {
            syscall!(
                libc::SYS_sendto,
                fd,
                bytes.as_ptr(),
                bytes.len(),
                libc::MSG_NOSIGNAL,
                0usize,
                0usize
            )
        };
        if sent != -(libc::EINTR as isize) {
            return (sent == bytes.len() as isize).then_some(());
        }
    }
}

fn receive(fd: c_int, extents: &mut [MaybeUninit<Extent>]) -> Option<Reply> {
    let mut reply = Reply::new_zeroed();
    let room = libc::iovec {
        iov_base: extents.as_mut_ptr().cast(),
        iov_len: size_of_val(extents),
    };
    let mut parts = [part(reply.as_mut_bytes()), room];
    // SAFETY: the reply and the room for extents are ours.
    let (len, sent) = unsafe { receive_or(fd, &mut parts) }.ok()?;
    if let Some(sent) = sent {
        sys::close(sent);
    }
    let follow = (reply.count as usize).checked_mul(size_of::<Extent>())?;
    let whole =
        len == size_of::<Reply>().checked_add(follow)? && reply.count as usize <= extents.len();
    whole.then_some(reply)
}

fn part(bytes: &mut [u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    }
}

/// One packet and the descriptor that came with it; else the errno, 0 where the other end is gone.
///
/// # Safety
/// The parts may be written.
unsafe fn receive_or(
    fd: c_int,
    parts: &mut [libc::iovec; 2],
) -> Result<(usize, Option<c_int>), c_int> {
    let mut control = [0u64; 4];
    // SAFETY: a structure of numbers and pointers that may be null.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len();
    message.msg_control = control.as_mut_ptr().cast::<c_void>();
    message.msg_controllen = size_of_val(&control);
    let len = loop {
        // SAFETY: the parts may be written, as promised to this function; the rest is ours.
        let len = unsafe {
            syscall!(
                libc::SYS_recvmsg,
                fd,
                &raw mut message,
                libc::MSG_CMSG_CLOEXEC
            )
        };
        if len != -(libc::EINTR as isize) {
            break len;
        }
    };
    if len <= 0 || message.msg_flags & libc::MSG_TRUNC != 0 {
        return Err(if len < 0 {
            len.wrapping_neg() as c_int
        } else {
            0
        });
    }
    // SAFETY: the kernel filled the control data; the macros stay within it.
    let sent = unsafe {
        let head = libc::CMSG_FIRSTHDR(&raw const message);
        let has = !head.is_null()
            && (*head).cmsg_level == libc::SOL_SOCKET
            && (*head).cmsg_type == libc::SCM_RIGHTS
            && (*head).cmsg_len as usize >= libc::CMSG_LEN(4) as usize;
        has.then(|| libc::CMSG_DATA(head).cast::<c_int>().read_unaligned())
    };
    Ok((len as usize, sent))
}

/// Whether a reply grants what was asked.
pub(crate) fn is_ok(reply: &Reply) -> bool {
    Status::from_word(reply.status) == Status::Ok
}
