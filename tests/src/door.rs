//! A client of the door in a few lines: what the preload library does for one descriptor.

use std::fs::File;
use std::io::{IoSliceMut, Read, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use firn_client::door::{Outcome, SlabWriter};
use firn_format::door::{Arena, DOOR_VERSION, IOCTL_TOKEN, Op, Reply, Request, Status, Token};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// The token of an open file; `None` where the file system knows no such request.
pub fn token(file: &File) -> Option<Token> {
    let mut token = Token::new_zeroed();
    // SAFETY: the request fills a `Token`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(IOCTL_TOKEN), &raw mut token) };
    (result == 0).then_some(token)
}

/// A connection to the socket that a token names.
pub fn knock(token: &Token) -> std::io::Result<OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let len = token.socket.iter().position(|byte| *byte == 0).expect("an end");
    connect(&socket, &SocketAddrUnix::new(&token.socket[..len])?)?;
    Ok(socket)
}

/// Sends any bytes and gives the answer's status; `None`: the other side closed.
pub fn say(socket: &OwnedFd, packet: &[u8]) -> Option<Status> {
    send(socket, packet, SendFlags::NOSIGNAL).ok()?;
    let (reply, _) = receive(socket)?;
    Some(Status::from_word(reply.status))
}

fn receive(socket: &OwnedFd) -> Option<(Reply, Vec<u8>)> {
    let mut bytes = vec![0; 64 << 10];
    let (len, _) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::empty()).ok()?;
    bytes.truncate(len);
    let (reply, rest) = Reply::read_from_prefix(&bytes).ok()?;
    Some((reply, rest.to_vec()))
}

/// A process's connection, and its mapping of the arena.
pub struct Client {
    socket: OwnedFd,
    base: *mut u8,
}

/// A file that is written past the kernel as long as that goes.
pub struct DoorFile<'a> {
    client: &'a Client,
    /// The descriptor.
    pub file: File,
    token: u64,
    binding: u64,
    writer: Option<SlabWriter>,
    /// Whether the next byte may go past the kernel.
    pub granted: bool,
}

impl Client {
    /// Connects with the token of any open file of the mount.
    pub fn new(token: &Token) -> Self {
        let socket = knock(token).expect("the door socket");
        let hello = Request { op: Op::Hello as u32, arg: DOOR_VERSION.into(), ..Request::default() };
        send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL).expect("hello");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let (mut reply, mut arena) = (Reply::new_zeroed(), Arena::new_zeroed());
        let parts = &mut [IoSliceMut::new(reply.as_mut_bytes()), IoSliceMut::new(arena.as_mut_bytes())];
        recvmsg(&socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC).expect("an answer");
        assert_eq!(Status::from_word(reply.status), Status::Ok);
        assert_eq!(arena.uuid, token.arena);
        let fd = control
            .drain()
            .find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
                _ => None,
            })
            .expect("the arena's descriptor");
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let len = (arena.file_bytes - arena.shared_offset) as usize;
        // SAFETY: a new mapping, kept for the life of the process.
        let shared = unsafe {
            let shared = rustix::mm::MapFlags::SHARED;
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, shared, &fd, arena.shared_offset).expect("mmap")
        };
        Self { socket, base: shared.cast::<u8>().wrapping_sub(arena.shared_offset as usize) }
    }

    fn ask(&self, op: Op, token: u64, arg: u64) -> Option<Reply> {
        let request = Request { op: op as u32, len: 0, token, arg };
        send(&self.socket, request.as_bytes(), SendFlags::NOSIGNAL).ok()?;
        receive(&self.socket).map(|(reply, _)| reply)
    }

    /// Asks for the door to an open file.
    pub fn open(&self, file: File) -> DoorFile<'_> {
        let token = token(&file).expect("a file of the mount").token;
        let mut open = DoorFile { client: self, file, token, binding: 0, writer: None, granted: false };
        open.ask();
        open
    }
}

impl DoorFile<'_> {
    /// Asks for the door; what firnd says.
    pub fn ask(&mut self) -> Option<Status> {
        let reply = self.client.ask(Op::OpenWrite, self.token, 0)?;
        let status = Status::from_word(reply.status);
        (self.binding, self.writer, self.granted) = (reply.binding, None, status == Status::Ok);
        Some(status)
    }

    /// Bytes taken past the kernel.
    pub fn append(&mut self, offset: u64, data: &[u8]) -> usize {
        let mut done = 0;
        while self.granted && done < data.len() {
            let outcome = match &mut self.writer {
                // SAFETY: the bytes are a slice's.
                Some(writer) => unsafe {
                    writer.append(offset + done as u64, data[done..].as_ptr(), data.len() - done)
                },
                None => Outcome::Full,
            };
            match outcome {
                Outcome::Done(n) => done += n,
                Outcome::Full => self.granted = self.lease((data.len() - done) as u64),
                Outcome::Revoked => self.granted = false,
            }
        }
        done
    }

    /// The same, and asks again where the door was closed meanwhile: any process that is started here
    /// closes its copies of all descriptors, and a close ends the door.
    pub fn append_again(&mut self, offset: u64, data: &[u8]) {
        let mut done = self.append(offset, data);
        while done < data.len() {
            assert_eq!(self.ask(), Some(Status::Ok), "after {done} bytes");
            done += self.append(offset + done as u64, &data[done..]);
        }
    }

    fn lease(&mut self, want: u64) -> bool {
        let Some(reply) = self.client.ask(Op::Lease, self.token, want) else { return false };
        let ok = Status::from_word(reply.status) == Status::Ok;
        // SAFETY: the client's mapping lives as long as the process.
        self.writer = ok.then(|| unsafe { SlabWriter::new(self.client.base, reply.lease, self.binding) });
        ok
    }

    /// Past the kernel, then through it.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let done = self.append(offset, data);
        self.file.write_all_at(&data[done..], offset + done as u64)
    }
}

/// The bytes that [`write_until_killed`] writes at `offset`.
pub fn byte_at(offset: u64) -> u8 {
    (offset % 253) as u8 ^ (offset >> 12) as u8
}

/// Appends to a file past the kernel until killed, and tells in `log` after each write how much was
/// acknowledged.
pub fn write_until_killed(path: &Path, log: &Path) {
    let file = File::create(path).expect("create");
    let client = Client::new(&token(&file).expect("a token"));
    let mut door = client.open(file);
    let mut log = File::create(log).expect("create the log");
    let mut at = 0u64;
    loop {
        let len = 1 + at * 7919 % 50_000;
        let data: Vec<u8> = (at..at + len).map(byte_at).collect();
        if !door.granted {
            door.ask();
        }
        let done = door.append(at, &data);
        if done < data.len() && door.file.write_all_at(&data[done..], at + done as u64).is_err() {
            // firnd is gone: what it took past the kernel still counts.
            at += done as u64;
            say_acknowledged(&mut log, at);
            return;
        }
        at += len;
        say_acknowledged(&mut log, at);
    }
}

fn say_acknowledged(log: &mut File, at: u64) {
    log.seek(SeekFrom::Start(0)).and_then(|_| log.write_all(&at.to_ne_bytes())).expect("tell");
}

/// What [`write_until_killed`] told last.
pub fn acknowledged(log: &Path) -> u64 {
    let mut word = [0; 8];
    match File::open(log).and_then(|mut log| log.read_exact(&mut word)) {
        Ok(()) => u64::from_ne_bytes(word),
        Err(_) => 0,
    }
}

/// Prints the version of the door that `path` has for this process.
pub fn print_version(path: &Path) {
    let token = File::open(path).ok().and_then(|file| token(&file));
    println!("{}", token.map_or("none".into(), |token| token.version.to_string()));
}

/// Two requests in one packet, for those who send nonsense.
pub fn two_requests() -> Vec<u8> {
    let one = Request { op: Op::Hello as u32, arg: DOOR_VERSION.into(), ..Request::default() };
    [one.as_bytes(), one.as_bytes()].concat()
}
