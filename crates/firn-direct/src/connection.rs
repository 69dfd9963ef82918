//! The client's end of a data socket, on which firnd, the process that serves a mount, gives out direct access to its
//! memory. The preload library, tests and benchmarks send requests with it.
//!
//! ```text
//!   Connection::to ── check_peer ──► send_hello ── receive_hello ──► ArenaMap
//!                                    send_request ── receive_reply        (or call: both)
//!                                    send_packet ── receive_packet        (any bytes, for tests of firnd)
//! ```
//!
//! firnd answers requests in order. A client may send several before it receives the first reply.
//!
//! Promises
//! * [`Connection::connect`] returns a connection only if the kernel says that a process of the expected user listens.
//! * A reply is never returned if it is incomplete, or claims more data than was received or than there is room for.
//! * No function here allocates memory, takes a lock, sets `errno`, or calls a function that the preload library
//!   replaces. They may therefore run in hooks and signal handlers.

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

/// Returns the token of an open file, with which a client asks firnd for direct access to the file. `None`: no firnd
/// serves the file. [`Token::version`] says whether that firnd gives this process direct access.
pub fn request_token(fd: impl AsFd) -> Option<Token> {
    let mut token = Token::new_zeroed();
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the number of this ioctl tells the kernel to write at most the bytes of a `Token`.
    let result = unsafe { syscall!(libc::SYS_ioctl, fd, IOCTL_TOKEN, &raw mut token) };
    (result >= 0).then_some(token)
}

/// Memory that the kernel reads to send a packet.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    part: iovec,
    memory: PhantomData<&'a [u8]>,
}

impl Outgoing<'_> {
    /// Returns an empty range of memory.
    pub const fn none() -> Self {
        Self {
            part: NO_PART,
            memory: PhantomData,
        }
    }

    /// Returns memory that may change or be unmapped during the call. If it is unmapped, the call fails with
    /// [`CallError::Fault`]. If it changes, firnd may receive any of its states.
    ///
    /// # Safety
    /// The caller must allow firnd to see these bytes while `'a` lasts.
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
        // SAFETY: the bytes are readable for `'a`, and the caller wants them to be sent.
        unsafe { Self::from_raw(bytes.as_ptr(), bytes.len()) }
    }
}

/// Memory that the kernel fills from a received packet.
#[derive(Debug)]
pub struct Incoming<'a> {
    part: iovec,
    /// Size in bytes of one unit that [`Reply::count`] counts: a byte or an extent.
    unit_bytes: usize,
    memory: PhantomData<&'a mut [u8]>,
}

impl Incoming<'_> {
    /// Returns an empty range of memory.
    pub const fn none() -> Self {
        Self {
            part: NO_PART,
            unit_bytes: 1,
            memory: PhantomData,
        }
    }

    /// Returns memory that may be unmapped during the call; the call then fails with [`CallError::Fault`].
    ///
    /// # Safety
    /// The caller must allow the kernel to overwrite `len` bytes there while `'a` lasts.
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

/// Data to send with a request, and memory for the data that follows its reply.
#[derive(Debug)]
pub struct Payload<'a> {
    /// Data that follows the request.
    pub data: Outgoing<'a>,
    /// Descriptor to send with the request.
    pub fd: Option<BorrowedFd<'a>>,
    /// Memory for the data that follows the reply.
    pub room: Incoming<'a>,
    /// Receives the descriptors that come with the reply. `None`: they are closed.
    pub files: Option<&'a mut Files>,
}

impl Payload<'_> {
    /// Returns a payload without data, descriptors and room.
    pub const fn none() -> Self {
        Self {
            data: Outgoing::none(),
            fd: None,
            room: Incoming::none(),
            files: None,
        }
    }
}

/// Descriptors that came with a reply. Dropping the value closes those that were not taken.
#[derive(Debug)]
pub struct Files {
    fds: [c_int; FILES_MAX],
    /// Number of descriptors that came.
    count: usize,
}

impl Files {
    /// Returns an empty set of descriptors.
    pub const fn new() -> Self {
        Self {
            fds: [-1; FILES_MAX],
            count: 0,
        }
    }

    /// Returns the number of descriptors that came.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes the descriptor with this index. `None`: there is none, or it was taken already.
    pub fn take(&mut self, index: usize) -> Option<Descriptor> {
        let fd = self.fds.get_mut(index).filter(|fd| **fd >= 0)?;
        let taken = std::mem::replace(fd, -1);
        // SAFETY: the kernel opened the descriptor for this process, and only this value knows it.
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

/// Reasons why there is no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectError {
    /// No process listens at the socket, or the token names no socket.
    Unreachable(Errno),
    /// The listening process does not belong to the expected user.
    Peer(PeerError),
}

/// Reasons why a request has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The memory of the payload cannot be read or written. The connection can be used further.
    Fault,
    /// The connection has ended, and the request was not sent.
    NotSent,
    /// The connection has ended; firnd may have executed the request.
    NoReply,
}

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Length of the packet.
    pub len: usize,
    /// The first descriptor that came with the packet.
    pub fd: Option<Descriptor>,
}

/// Result of recvmsg(2) for one packet.
struct ReceivedPacket {
    /// Length of the packet. EMSGSIZE if the packet is truncated; ECONNRESET if there is none, because firnd has ended
    /// the connection.
    complete_len: Result<usize, Errno>,
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

/// A connection to the data socket of a firnd.
#[derive(Debug)]
pub struct Connection {
    socket: Descriptor,
}

impl Connection {
    /// Connects to the firnd that a token names. The listening process must belong to user `uid`, because the token may
    /// come from any user that mounts a file system.
    pub fn connect(token: &Token, uid: u32) -> Result<Self, ConnectError> {
        let connection = Self::connect_to_any_user(token).map_err(ConnectError::Unreachable)?;
        firn_trust::check_peer(&connection.socket, uid).map_err(ConnectError::Peer)?;
        Ok(connection)
    }

    /// Connects to the socket that the token names, whichever user listens. For tests that do not run as the user of
    /// firnd, the process that serves the mount.
    pub fn connect_to_any_user(token: &Token) -> Result<Self, Errno> {
        let path = match token.socket.iter().position(|byte| *byte == 0) {
            // The token names no socket.
            None | Some(0) => return Err(Errno::INVAL),
            Some(path_end) => token.socket.get(..path_end).unwrap_or_default(),
        };
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

    /// Receives the reply to the oldest unanswered request, and the data that follows the reply.
    pub fn receive_reply(&self, buffer: &mut Incoming<'_>) -> Result<Reply, CallError> {
        self.receive_reply_with(buffer, None)
    }

    /// Receives the reply to the oldest unanswered request, with its data in `buffer` and its descriptors in `files`.
    /// Fails with `NoReply` if the reply is incomplete or claims more data than was received, and with `Fault` if
    /// `buffer` cannot be written.
    pub fn receive_reply_with(
        &self,
        buffer: &mut Incoming<'_>,
        files: Option<&mut Files>,
    ) -> Result<Reply, CallError> {
        let mut reply = Reply::default();
        let mut head = Incoming::from(reply.as_mut_bytes());
        let received = match files {
            Some(files) => self.receive_with_files(&mut head, buffer, files),
            None => self.receive_packet(&mut head, buffer),
        };
        let packet = match received {
            Ok(packet) => packet,
            Err(Errno::FAULT) => return Err(CallError::Fault),
            Err(_) => return Err(CallError::NoReply),
        };
        let buffer_bytes = buffer.part.iov_len;
        // Without a buffer no data follows the reply, so its count is not one of units of data.
        let data_bytes = if buffer_bytes == 0 {
            Some(0)
        } else {
            (reply.count as usize).checked_mul(buffer.unit_bytes)
        };
        match data_bytes {
            Some(data_bytes)
                if data_bytes <= buffer_bytes && packet.len == size_of::<Reply>() + data_bytes =>
            {
                Ok(reply)
            }
            // firnd claims more data than it has sent, or than there is room for.
            _ => Err(CallError::NoReply),
        }
    }

    /// Sends a request and receives its reply. All earlier requests must have their replies already.
    pub fn call(&self, request: &Request, payload: &mut Payload<'_>) -> Result<Reply, CallError> {
        self.send_request(request, payload)?;
        self.receive_reply_with(&mut payload.room, payload.files.as_deref_mut())
    }

    /// Sends the first request of a connection. A `second_request` is sent in the same packet, so that firnd wakes up
    /// only once.
    pub fn send_hello(&self, second_request: Option<&Request>) -> Result<(), CallError> {
        let hello = Request::new(Op::Hello, 0, u64::from(DATA_SOCKET_VERSION));
        let data = match second_request {
            Some(request) => Outgoing::from(request.as_bytes()),
            None => Outgoing::none(),
        };
        let payload = Payload {
            data,
            ..Payload::none()
        };
        self.send_request(&hello, &payload)
    }

    /// Receives the reply to [`Connection::send_hello`]. Returns the arena and its descriptor, or `None` if it is not
    /// the arena `uuid`.
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

    /// Sends one packet of any bytes, with the descriptor `fd` if there is one.
    pub fn send_packet(
        &self,
        head: Outgoing<'_>,
        data: Outgoing<'_>,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Errno> {
        let packet_bytes = head.part.iov_len + data.part.iov_len;
        let mut parts = [head.part, data.part];
        let mut control = fd.map(|fd| FdMessage::new(fd.as_raw_fd()));
        let message = new_message(&mut parts, control.as_mut());
        let sent_bytes = repeat_interrupted(|| {
            // SAFETY: the kernel only reads the message and its parts, as their owners allow (`Outgoing`).
            unsafe {
                syscall!(
                    libc::SYS_sendmsg,
                    self.socket.as_fd().as_raw_fd(),
                    &raw const message,
                    libc::MSG_NOSIGNAL
                )
            }
        })?;
        if sent_bytes == packet_bytes {
            Ok(())
        } else {
            Err(Errno::MSGSIZE)
        }
    }

    /// Receives one packet without checking its content.
    pub fn receive_packet(
        &self,
        head: &mut Incoming<'_>,
        data: &mut Incoming<'_>,
    ) -> Result<Packet, Errno> {
        let mut control = FdMessage::<1>::empty();
        let received = self.receive_into(head, data, &mut control)?;
        let fd = control.received().next();
        // SAFETY: the kernel opened the descriptor for this process, and only this function knows it.
        let fd = fd.map(|fd| unsafe { Descriptor::from_raw_fd(fd) });
        // An incomplete packet is an error, and its descriptor is closed.
        let len = received.complete_len?;
        Ok(Packet { len, fd })
    }

    /// Receives a packet with up to `FILES_MAX` descriptors, which are then in `files`. They are stored there even if
    /// the packet is incomplete, so that they are closed.
    fn receive_with_files(
        &self,
        head: &mut Incoming<'_>,
        data: &mut Incoming<'_>,
        files: &mut Files,
    ) -> Result<Packet, Errno> {
        let mut control = FdMessage::<FILES_MAX>::empty();
        let received = self.receive_into(head, data, &mut control)?;
        files.clear();
        for (file, fd) in files.fds.iter_mut().zip(control.received()) {
            *file = fd;
            files.count += 1;
        }
        let len = received.complete_len?;
        Ok(Packet { len, fd: None })
    }

    /// Receives one packet. Its descriptors are in `control` afterwards, even if the packet is incomplete. Fails if
    /// recvmsg(2) fails. The result also says whether the packet is complete, or the connection has ended.
    fn receive_into<const N: usize>(
        &self,
        head: &mut Incoming<'_>,
        data: &mut Incoming<'_>,
        control: &mut FdMessage<N>,
    ) -> Result<ReceivedPacket, Errno> {
        let mut parts = [head.part, data.part];
        let mut message = new_message(&mut parts, Some(control));
        let len = repeat_interrupted(|| {
            // SAFETY: the kernel writes the message, its control data of the given length, and the parts as their
            // owners allow (`Incoming`).
            unsafe {
                syscall!(
                    libc::SYS_recvmsg,
                    self.socket.as_fd().as_raw_fd(),
                    &raw mut message,
                    libc::MSG_CMSG_CLOEXEC
                )
            }
        })?;
        let is_truncated = message.msg_flags & libc::MSG_TRUNC != 0;
        let complete_len = if len == 0 {
            // firnd has ended the connection.
            Err(Errno::CONNRESET)
        } else if is_truncated {
            Err(Errno::MSGSIZE)
        } else {
            Ok(len)
        };
        Ok(ReceivedPacket { complete_len })
    }
}

impl<const N: usize> FdMessage<N> {
    /// `CMSG_LEN` for `N` descriptors. The kernel closes the descriptors beyond that number.
    const BYTES: usize = size_of::<libc::cmsghdr>() + N * size_of::<c_int>();

    /// Returns a message with room for descriptors.
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

    /// Returns the descriptors that the kernel has received.
    fn received(&self) -> impl Iterator<Item = c_int> + '_ {
        let has_descriptors =
            self.head.cmsg_level == libc::SOL_SOCKET && self.head.cmsg_type == libc::SCM_RIGHTS;
        let bytes = self
            .head
            .cmsg_len
            .saturating_sub(size_of::<libc::cmsghdr>());
        let count = if has_descriptors {
            bytes / size_of::<c_int>()
        } else {
            0
        };
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
            // SAFETY: the caller passes on the ownership of the descriptor of a data socket.
            socket: unsafe { Descriptor::from_raw_fd(fd) },
        }
    }
}

impl IntoRawFd for Connection {
    fn into_raw_fd(self) -> RawFd {
        self.socket.into_raw_fd()
    }
}

/// Makes a message for sendmsg(2) and recvmsg(2) from two parts and control data.
fn new_message<const N: usize>(
    parts: &mut [iovec; 2],
    control: Option<&mut FdMessage<N>>,
) -> libc::msghdr {
    let (control_start, control_bytes) = match control {
        Some(control) => (std::ptr::from_mut(control).cast(), FdMessage::<N>::BYTES),
        None => (std::ptr::null_mut(), 0),
    };
    libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: parts.as_mut_ptr(),
        msg_iovlen: parts.len(),
        msg_control: control_start,
        msg_controllen: control_bytes,
        msg_flags: 0,
    }
}

/// Size of `sun_path` in a socket address (unix(7)).
const SOCKET_PATH_BYTES: usize = 108;

/// Calls connect(2) with a path, without the terminating zero. Does not copy the address, because callers may have
/// little stack.
fn connect_to_path(socket: &Descriptor, path: &[u8]) -> Result<(), Errno> {
    let mut address = libc::sockaddr_un {
        sun_family: libc::AF_UNIX as libc::sa_family_t,
        sun_path: [0; SOCKET_PATH_BYTES],
    };
    // A zero byte ends the path.
    let path_bytes_max = address.sun_path.len() - 1;
    if path.len() > path_bytes_max {
        return Err(Errno::NAMETOOLONG);
    }
    for (address_byte, path_byte) in address.sun_path.iter_mut().zip(path) {
        *address_byte = *path_byte as libc::c_char;
    }
    let fd = socket.as_fd().as_raw_fd();
    let address_bytes = size_of::<libc::sockaddr_un>();
    // SAFETY: the kernel reads the address.
    let result = unsafe { syscall!(libc::SYS_connect, fd, &raw const address, address_bytes) };
    if result < 0 {
        return Err(Errno::from_raw_os_error(result.wrapping_neg() as c_int));
    }
    Ok(())
}

/// Repeats a system call while a signal interrupts it, and returns its result.
fn repeat_interrupted(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        let result = call();
        match usize::try_from(result) {
            Ok(result) => return Ok(result),
            Err(_) if result == -(libc::EINTR as isize) => {}
            Err(_) => return Err(Errno::from_raw_os_error(result.wrapping_neg() as c_int)),
        }
    }
}

#[cfg(test)]
mod tests;
