//! The client's end of a data socket: what the preload library, tests and benchmarks ask firnd with.
//!
//! ```text
//!   Connection::to ── check_peer ──► send_hello ── receive_hello ──► ArenaMap
//!                                    send_request ── receive_reply        (or call: both)
//!                                    send_packet ── receive_packet        (any bytes, for tests of firnd)
//! ```
//!
//! Promises
//! * [`Connection::to`] gives a connection only where the kernel says that a process of the expected user listens.
//! * A reply that is not whole, or that announces more than there is room for, is never returned.
//! * Nothing here allocates, takes a lock, sets `errno` or calls a function that the preload library puts itself
//!   before: it may run in hooks and signal handlers.
//!
//! Requests are answered in order; several may be sent before the first reply is received.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, RawFd};

use firn_format::data_socket::{
    Arena, DATA_SOCKET_VERSION, Extent, FILES_MAX, IOCTL_TOKEN, Op, Reply, Request, Slab, Status,
    Token,
};
use firn_trust::PeerError;
use libc::iovec;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use zerocopy::{FromZeros, IntoBytes};

use crate::syscall;
use crate::syscall::Descriptor;

/// How the firnd that serves an open file calls it; `None` where no firnd serves it. [`Token::version`] says whether
/// that firnd serves this process.
pub fn token_of(fd: impl AsFd) -> Option<Token> {
    let mut token = Token::new_zeroed();
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the number of this ioctl says how many bytes the kernel writes at most: those of a `Token`.
    let result = unsafe { syscall!(libc::SYS_ioctl, fd, IOCTL_TOKEN, &raw mut token) };
    (result >= 0).then_some(token)
}

/// Memory that the kernel reads for a packet.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    part: iovec,
    memory: PhantomData<&'a [u8]>,
}

impl Outgoing<'_> {
    /// No bytes.
    pub const fn none() -> Self {
        Self {
            part: NO_PART,
            memory: PhantomData,
        }
    }

    /// Memory that may be unmapped, or change meanwhile: then the call ends with [`CallError::Fault`], or sends
    /// what it finds.
    ///
    /// # Safety
    /// firnd may see these bytes for as long as `'a` lasts.
    pub unsafe fn from_raw(start: *const u8, len: usize) -> Self {
        Self {
            part: iovec {
                iov_base: start.cast_mut().cast(),
                iov_len: len,
            },
            memory: PhantomData,
        }
    }
}

impl<'a> From<&'a [u8]> for Outgoing<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        // SAFETY: a caller that lends the bytes wants them sent.
        unsafe { Self::from_raw(bytes.as_ptr(), bytes.len()) }
    }
}

/// Memory that the kernel fills from a packet.
#[derive(Debug)]
pub struct Incoming<'a> {
    part: iovec,
    /// Bytes of each of the things that [`Reply::count`] counts.
    unit_bytes: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl Incoming<'_> {
    /// No room.
    pub const fn none() -> Self {
        Self {
            part: NO_PART,
            unit_bytes: 1,
            memory: PhantomData,
        }
    }

    /// Memory that may be unmapped: then the call ends with [`CallError::Fault`].
    ///
    /// # Safety
    /// The kernel may overwrite `len` bytes there for as long as `'a` lasts.
    pub unsafe fn from_raw(start: *mut u8, len: usize) -> Self {
        Self {
            part: iovec {
                iov_base: start.cast(),
                iov_len: len,
            },
            unit_bytes: 1,
            memory: PhantomData,
        }
    }
}

impl<'a> From<&'a mut [u8]> for Incoming<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        // SAFETY: the bytes are lent exclusively for `'a`, and bytes may have any value.
        unsafe { Self::from_raw(bytes.as_mut_ptr(), bytes.len()) }
    }
}

impl<'a> From<&'a mut [MaybeUninit<Extent>]> for Incoming<'a> {
    fn from(extents: &'a mut [MaybeUninit<Extent>]) -> Self {
        Self {
            unit_bytes: size_of::<Extent>(),
            // SAFETY: the extents are lent exclusively for `'a`, and are words that may have any value.
            ..unsafe { Self::from_raw(extents.as_mut_ptr().cast(), size_of_val(extents)) }
        }
    }
}

impl<'a> From<&'a mut [Slab]> for Incoming<'a> {
    fn from(slabs: &'a mut [Slab]) -> Self {
        Self {
            unit_bytes: size_of::<Slab>(),
            ..Self::from(slabs.as_mut_bytes())
        }
    }
}

const NO_PART: iovec = iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// What goes along with a request, and room for what follows its reply.
#[derive(Debug)]
pub struct Payload<'a> {
    /// Follows the request.
    pub data: Outgoing<'a>,
    /// Goes along with the packet.
    pub fd: Option<BorrowedFd<'a>>,
    /// For what follows the reply.
    pub room: Incoming<'a>,
    /// For the descriptors that come with it; without it they are closed.
    pub files: Option<&'a mut Files>,
}

impl Payload<'_> {
    /// A request alone, and a reply alone.
    pub const fn none() -> Self {
        Self {
            data: Outgoing::none(),
            fd: None,
            room: Incoming::none(),
            files: None,
        }
    }
}

/// Descriptors that came with a reply. Those that are not taken are closed.
#[derive(Debug)]
pub struct Files {
    fds: [c_int; FILES_MAX],
    /// How many came.
    count: usize,
}

impl Files {
    /// None.
    pub const fn new() -> Self {
        Self {
            fds: [-1; FILES_MAX],
            count: 0,
        }
    }

    /// How many came.
    pub fn count(&self) -> usize {
        self.count
    }

    /// The one with this index, once.
    pub fn take(&mut self, index: usize) -> Option<Descriptor> {
        let fd = self.fds.get_mut(index).filter(|fd| **fd >= 0)?;
        let taken = std::mem::replace(fd, -1);
        // SAFETY: the kernel opened the descriptor for this process with a message, and only this value knows it.
        Some(unsafe { Descriptor::from_raw_fd(taken) })
    }

    fn clear(&mut self) {
        (0..self.count).for_each(|index| drop(self.take(index)));
        self.count = 0;
    }
}

impl Default for Files {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// No process listens there, or the token names no socket.
    Unreachable(Errno),
    /// The listener is not of the expected user.
    Peer(PeerError),
}

/// Why a request has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The memory of the payload cannot be read or written. The connection stays.
    Fault,
    /// The connection has ended, and the request was not sent.
    NotSent,
    /// The connection has ended; firnd may have executed the request.
    NoReply,
}

/// A packet that was received.
#[derive(Debug)]
pub struct Packet {
    /// Bytes.
    pub len: usize,
    /// The first descriptor that came with it.
    pub fd: Option<Descriptor>,
}

/// A control message with descriptors (`SCM_RIGHTS`, unix(7)).
#[repr(C)]
struct FdMessage<const N: usize> {
    head: libc::cmsghdr,
    fds: [c_int; N],
}

const _: () = assert!(std::mem::offset_of!(FdMessage<1>, fds) == size_of::<libc::cmsghdr>());

impl FdMessage<1> {
    fn new(fd: c_int) -> Self {
        Self {
            head: libc::cmsghdr {
                cmsg_len: Self::BYTES,
                cmsg_level: libc::SOL_SOCKET,
                cmsg_type: libc::SCM_RIGHTS,
            },
            fds: [fd],
        }
    }
}

/// One end of a data socket.
#[derive(Debug)]
pub struct Connection {
    socket: Descriptor,
}

impl Connection {
    /// Connects to the firnd that a token names, which must be a process of user `uid`: the token may come from any
    /// user that mounts something.
    pub fn to(token: &Token, uid: u32) -> Result<Self, ConnectError> {
        let connection = Self::to_any_listener(token).map_err(ConnectError::Unreachable)?;
        firn_trust::check_peer(&connection.socket, uid).map_err(ConnectError::Peer)?;
        Ok(connection)
    }

    /// Connects to any listener: for tests that are not the user of firnd.
    pub fn to_any_listener(token: &Token) -> Result<Self, Errno> {
        let end = token.socket.iter().position(|byte| *byte == 0);
        let path = end.and_then(|end| token.socket.get(..end));
        let path = path.filter(|path| !path.is_empty()).ok_or(Errno::INVAL)?;
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let socket = Descriptor::from(socket);
        connect_to_path(&socket, path)?;
        Ok(Self { socket })
    }

    /// Sends a request.
    pub fn send_request(&self, request: &Request, payload: &Payload<'_>) -> Result<(), CallError> {
        let head = Outgoing::from(request.as_bytes());
        self.send_packet(head, payload.data, payload.fd)
            .map_err(|errno| match errno {
                Errno::FAULT => CallError::Fault,
                _ => CallError::NotSent,
            })
    }

    /// Receives the reply to the earliest request that has none yet, and what follows it.
    pub fn receive_reply(&self, room: &mut Incoming<'_>) -> Result<Reply, CallError> {
        self.receive_reply_with(room, None)
    }

    /// The same, and the descriptors that come with it.
    pub fn receive_reply_with(
        &self,
        room: &mut Incoming<'_>,
        files: Option<&mut Files>,
    ) -> Result<Reply, CallError> {
        let mut reply = Reply::default();
        let mut head = Incoming::from(reply.as_mut_bytes());
        let received = match files {
            Some(files) => self.receive_with_files(&mut head, room, files),
            None => self.receive_packet(&mut head, room),
        };
        let packet = received.map_err(|errno| match errno {
            Errno::FAULT => CallError::Fault,
            _ => CallError::NoReply,
        })?;
        let room_bytes = room.part.iov_len;
        let follow = if room_bytes > 0 {
            (reply.count as usize).checked_mul(room.unit_bytes)
        } else {
            Some(0)
        };
        follow
            .filter(|follow| *follow <= room_bytes && packet.len == size_of::<Reply>() + follow)
            .map(|_| reply)
            .ok_or(CallError::NoReply)
    }

    /// Sends a request and receives its reply; every earlier request has its reply already.
    pub fn call(&self, request: &Request, payload: &mut Payload<'_>) -> Result<Reply, CallError> {
        self.send_request(request, payload)?;
        self.receive_reply_with(&mut payload.room, payload.files.as_deref_mut())
    }

    /// Sends the first request of every connection, and the second one with it, if there is one: firnd wakes up once for both.
    pub fn send_hello(&self, next: Option<&Request>) -> Result<(), CallError> {
        let hello = Request::new(Op::Hello, 0, u64::from(DATA_SOCKET_VERSION));
        let payload = Payload {
            data: next.map_or(Outgoing::none(), |next| Outgoing::from(next.as_bytes())),
            ..Payload::none()
        };
        self.send_request(&hello, &payload)
    }

    /// Receives the reply to [`Connection::send_hello`]: the arena and its descriptor, if it is the arena `uuid`.
    pub fn receive_hello(&self, uuid: &[u8; 16]) -> Option<(Arena, Descriptor)> {
        let mut reply = Reply::default();
        let mut arena = Arena::new_zeroed();
        let mut head = Incoming::from(reply.as_mut_bytes());
        let packet = self
            .receive_packet(&mut head, &mut Incoming::from(arena.as_mut_bytes()))
            .ok()?;
        let is_whole = packet.len == size_of::<Reply>() + size_of::<Arena>();
        let is_expected = reply.status == Status::Ok as u32 && arena.uuid == *uuid;
        let fd = packet.fd.filter(|_| is_whole && is_expected)?;
        Some((arena, fd))
    }

    /// Sends one packet of any bytes, and a descriptor with it.
    pub fn send_packet(
        &self,
        head: Outgoing<'_>,
        data: Outgoing<'_>,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        let mut parts = [head.part, data.part];
        let mut control = fd.map(|fd| FdMessage::new(fd.as_raw_fd()));
        let message = message_of(&mut parts, control.as_mut());
        let bytes = head.part.iov_len + data.part.iov_len;
        let sent = repeat_interrupted(|| {
            // SAFETY: the kernel reads the message, and the parts as their owners allow (`Outgoing`).
            unsafe {
                syscall!(
                    libc::SYS_sendmsg,
                    self.socket.as_fd().as_raw_fd(),
                    &raw const message,
                    libc::MSG_NOSIGNAL
                )
            }
        })?;
        if sent == bytes {
            Ok(())
        } else {
            Err(Errno::MSGSIZE)
        }
    }

    /// Receives one packet, whatever it says.
    pub fn receive_packet(
        &self,
        head: &mut Incoming<'_>,
        rest: &mut Incoming<'_>,
    ) -> Result<Packet, Errno> {
        let mut control = FdMessage::<1>::empty();
        let len = self.receive_into(head, rest, &mut control)?;
        let fd = control.received().next();
        // SAFETY: the kernel opened the descriptor for this process with the message, and only this function knows it.
        let fd = fd.map(|fd| unsafe { Descriptor::from_raw_fd(fd) });
        Ok(Packet { len: len?, fd })
    }

    /// Receives a packet with up to `FILES_MAX` descriptors, which `files` has afterwards.
    fn receive_with_files(
        &self,
        head: &mut Incoming<'_>,
        rest: &mut Incoming<'_>,
        files: &mut Files,
    ) -> Result<Packet, Errno> {
        let mut control = FdMessage::<FILES_MAX>::empty();
        let len = self.receive_into(head, rest, &mut control)?;
        files.clear();
        for (slot, fd) in files.fds.iter_mut().zip(control.received()) {
            *slot = fd;
            files.count += 1;
        }
        Ok(Packet {
            len: len?,
            fd: None,
        })
    }

    /// Receives one packet and its descriptors. The inner error is that of a packet that is not whole, whose descriptors
    /// have come all the same.
    fn receive_into<const N: usize>(
        &self,
        head: &mut Incoming<'_>,
        rest: &mut Incoming<'_>,
        control: &mut FdMessage<N>,
    ) -> Result<Result<usize, Errno>, Errno> {
        let mut parts = [head.part, rest.part];
        let mut message = message_of(&mut parts, Some(control));
        let len = repeat_interrupted(|| {
            // SAFETY: the kernel writes the message, its control data, which has the length that it says, and the
            // parts, as their owners allow (`Incoming`).
            unsafe {
                syscall!(
                    libc::SYS_recvmsg,
                    self.socket.as_fd().as_raw_fd(),
                    &raw mut message,
                    libc::MSG_CMSG_CLOEXEC
                )
            }
        })?;
        if len == 0 {
            return Ok(Err(Errno::CONNRESET));
        }
        if message.msg_flags & libc::MSG_TRUNC != 0 {
            return Ok(Err(Errno::MSGSIZE));
        }
        Ok(Ok(len))
    }
}

impl<const N: usize> FdMessage<N> {
    /// What `CMSG_LEN` gives for as many descriptors: the kernel finds room for these, and drops others.
    const BYTES: usize = size_of::<libc::cmsghdr>() + N * size_of::<c_int>();

    /// Room for descriptors.
    fn empty() -> Self {
        Self {
            head: libc::cmsghdr {
                cmsg_len: 0,
                cmsg_level: 0,
                cmsg_type: 0,
            },
            fds: [-1; N],
        }
    }

    /// The descriptors that the kernel put here.
    fn received(&self) -> impl Iterator<Item = c_int> + '_ {
        let is_it =
            self.head.cmsg_level == libc::SOL_SOCKET && self.head.cmsg_type == libc::SCM_RIGHTS;
        let bytes = self
            .head
            .cmsg_len
            .saturating_sub(size_of::<libc::cmsghdr>());
        let count = if is_it { bytes / size_of::<c_int>() } else { 0 };
        self.fds.iter().copied().take(count)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl FromRawFd for Connection {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        Self {
            // SAFETY: as for this function: the caller gives the descriptor of a data socket away.
            socket: unsafe { Descriptor::from_raw_fd(fd) },
        }
    }
}

impl IntoRawFd for Connection {
    fn into_raw_fd(self) -> RawFd {
        self.socket.into_raw_fd()
    }
}

fn message_of<const N: usize>(
    parts: &mut [iovec; 2],
    control: Option<&mut FdMessage<N>>,
) -> libc::msghdr {
    let control_bytes = control.as_ref().map_or(0, |_| FdMessage::<N>::BYTES);
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: parts.as_mut_ptr(),
        msg_iovlen: parts.len(),
        msg_control: control.map_or(std::ptr::null_mut(), |control| {
            std::ptr::from_mut(control).cast()
        }),
        msg_controllen: control_bytes,
        msg_flags: 0,
    }
}

/// connect(2) to a path, without the copies of an address that callers with little stack have no room for.
fn connect_to_path(socket: &Descriptor, path: &[u8]) -> Result<(), Errno> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; 108],
    };
    // One byte less: the path ends with a zero.
    let room = address.sun_path.len() - 1;
    if path.len() > room {
        return Err(Errno::NAMETOOLONG);
    }
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = *from as libc::c_char;
    }
    let number = socket.as_fd().as_raw_fd();
    let bytes = size_of::<libc::sockaddr_un>();
    // SAFETY: the kernel reads the address.
    let result = unsafe { syscall!(libc::SYS_connect, number, &raw const address, bytes) };
    if result < 0 {
        return Err(Errno::from_raw_os_error(result.wrapping_neg() as c_int));
    }
    Ok(())
}

/// The result of a system call, made again each time that a signal interrupted it.
fn repeat_interrupted(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        let result = call();
        match usize::try_from(result) {
            Ok(done) => return Ok(done),
            Err(_) if result == -(libc::EINTR as isize) => {}
            Err(_) => return Err(Errno::from_raw_os_error(result.wrapping_neg() as c_int)),
        }
    }
}

#[cfg(test)]
mod tests;
