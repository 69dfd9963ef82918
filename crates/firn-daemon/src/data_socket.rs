//! The data socket: gives processes direct access to the arena, the shared memory with the bytes that are not in the
//! backing yet. On a mount without FUSE it also serves reads and writes of programs.
//!
//! Terms
//! * A *grant* is the right of a process to write one file in the arena itself; a *lease* is its right to fill a
//!   *slab*, a part of the arena for one writer.
//! * A *direct list* says where the bytes of a file are in the arena, so that a process can read them there.
//! * A *stub* is an empty file on tmpfs, which a mount without FUSE shows. The preload library sends the calls of a
//!   program on it to this socket.
//!
//! Promises
//! * Only processes of firnd's own user are answered (SO_PEERCRED).
//! * The end of a connection ends its grants, leases and open stubs; bytes that it has published stay.
//! * A broken, slow or malicious client uses one thread and no more. At most [`CONNECTIONS_MAX`] clients are served.
//!
//! Several threads wait in accept(2), and the thread that a client wakes serves it. A new thread for each client would
//! double the time of a process's first write by direct access.
//!
//! The messages are in `firn_format::data_socket`.

mod stub;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::Backing;
use firn_engine::{ClientId, DirectList, DirectRefusal, Engine, HandleId, SlabRequest};
use firn_format::data_socket::{
    Arena as ArenaReply, DATA_BYTES_MAX, DATA_SOCKET_VERSION, FILES_MAX, Op, Reply, Request, Slab,
    Status,
};
use firn_format::geometry::{PAGE, WORDS_BYTES, WORDS_OFFSET};
use firn_fuse::{Gate, Invalidator};
use firn_hosts::FileLocks;
use firn_stub::Tree;
use firn_workers::{Class, Refused, Workers};
use rustix::fs::Mode;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, accept_with, bind, listen, recvmsg, sendmsg, shutdown, socket_with,
};
use zerocopy::{FromBytes, IntoBytes};

/// Limit of connections: one for each process of a well-filled host. Their threads sleep most of the time.
const CONNECTIONS_MAX: u64 = 1024;
/// Pause after a connection could not be accepted.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Limit of connections that the kernel queues before a thread accepts them.
const BACKLOG: i32 = 128;
/// A client that does not take its reply for this long is disconnected.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// If fewer threads than this wait for clients, another is started.
const WAITING_MIN: u64 = 2;
/// If more threads than this wait, a thread ends after its client has gone. The reserve is large because the processes
/// of a host start together, again and again.
const WAITING_MAX: u64 = 16;
const _: () = assert!(CONNECTIONS_MAX + WAITING_MAX <= Class::DataClient.threads_max() as u64);

/// A listening data socket. Its drop removes the socket and ends the threads that wait for clients.
pub(crate) struct DataSocket {
    path: PathBuf,
    listener: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
}

/// What a data socket serves.
pub(crate) enum ServedFrontend<B: Backing> {
    /// A mount. The kernel must forget its cached attributes of a file that is written by direct access.
    Mount(Invalidator),
    /// A stub tree.
    Tree(Arc<Tree<B>>),
}

/// What all connections of one socket share.
struct SocketShared<B: Backing> {
    engine: Arc<Engine<B>>,
    /// The gate that changes pass; `None` without transactions.
    gate: Option<Arc<dyn Gate>>,
    served: ServedFrontend<B>,
    /// Locks by which an append finds the end of the file that all hosts share; `None` if this host alone appends.
    file_locks: Option<Arc<FileLocks>>,
    /// Number of connections now.
    connection_count: Arc<AtomicU64>,
    /// Number of connections since the start, from which each client gets its number.
    last_client: AtomicU64,
    listener: Arc<OwnedFd>,
    workers: Workers,
    /// Number of threads that wait for clients, with those that are about to wait.
    waiting_threads: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl DataSocket {
    /// Starts the data socket at `path`, by which processes write and read the arena (shared memory) themselves.
    /// Replaces the socket that an earlier serving process left there when it died. `connection_count` is kept equal to
    /// the number of connections.
    ///
    /// `gate` makes changes wait for transactions, if the mount has them. `file_locks` are locks that also exclude
    /// programs on other hosts.
    pub(crate) fn start<B: Backing>(
        path: &Path,
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        served: ServedFrontend<B>,
        file_locks: Option<Arc<FileLocks>>,
        connection_count: Arc<AtomicU64>,
        workers: Workers,
    ) -> io::Result<Self> {
        // bind(2) fails if the path exists.
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = Arc::new(open_socket()?);
        // The mode is set before the first connection: only this user may connect, as to all of the private runtime
        // directory.
        rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, BACKLOG)?;
        let stop = Arc::new(AtomicBool::new(false));
        let shared = Arc::new(SocketShared {
            engine,
            gate,
            served,
            file_locks,
            connection_count,
            last_client: AtomicU64::new(0),
            listener: Arc::clone(&listener),
            workers,
            waiting_threads: AtomicU64::new(0),
            stop: Arc::clone(&stop),
        });
        SocketShared::add_thread(&shared).map_err(io::Error::other)?;
        SocketShared::start_waiting_threads(&shared);
        Ok(Self {
            path: path.into(),
            listener,
            stop,
        })
    }
}

impl Drop for DataSocket {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // The threads in accept(2) wake with EINVAL.
        let _ = shutdown(&self.listener, Shutdown::Both);
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Opens a socket that is not bound yet.
fn open_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

impl<B: Backing> SocketShared<B> {
    /// Runs `change` with the pass of a change (the gate's permission to change a file). Waits while a directory above
    /// the file is quiesced.
    fn with_pass<T>(&self, handle: HandleId, change: impl FnOnce() -> T) -> T {
        // The engine refuses a handle that is not open, so such a handle needs no pass.
        let inode = self.engine.open_files.inode_of_handle(handle);
        let _pass = match (self.gate.as_deref(), inode) {
            (Some(gate), Some(inode)) => Some(gate.enter(inode)),
            _ => None,
        };
        change()
    }

    /// Starts one more thread that waits for clients.
    fn add_thread(this: &Arc<Self>) -> Result<(), Refused> {
        this.waiting_threads.fetch_add(1, Ordering::AcqRel);
        let shared = Arc::clone(this);
        let serve_next_client = move || while Self::serve_next_client(&shared) {};
        let started = this.workers.try_run(Class::DataClient, serve_next_client);
        if started.is_err() {
            this.waiting_threads.fetch_sub(1, Ordering::AcqRel);
        }
        started
    }

    /// Waits for a client of the data socket and serves it until it disconnects; its rights to write in the arena end
    /// then. Returns false if this thread is to end, because the socket is closed or enough other threads wait.
    fn serve_next_client(this: &Arc<Self>) -> bool {
        let Some(socket) = this.next_client() else {
            return false;
        };
        let still_waiting = this.waiting_threads.fetch_sub(1, Ordering::AcqRel) - 1;
        // This thread serves the client only if another one waits for the next client. Otherwise it drops the
        // connection, and the client uses the kernel instead.
        if still_waiting == 0
            && let Err(error) = Self::add_thread(this)
        {
            tracing::warn!(%error, "cannot start a thread for data connections");
            this.waiting_threads.fetch_add(1, Ordering::AcqRel);
            return true;
        }
        // A client beyond the limit, or of another user, finds the connection closed and uses the kernel instead.
        if this.connection_count.fetch_add(1, Ordering::AcqRel) < CONNECTIONS_MAX {
            let client = ClientId(this.last_client.fetch_add(1, Ordering::AcqRel) + 1);
            if let Err(error) = serve_client(&socket, client, this) {
                tracing::debug!(%error, client = client.0, "a data connection ended");
            }
            this.engine.direct_access.end_client(client);
            if let ServedFrontend::Tree(tree) = &this.served {
                tree.release_client(client);
            }
        }
        this.connection_count.fetch_sub(1, Ordering::AcqRel);
        // The thread waits again unless enough threads wait already.
        let add_waiting = |waiting| (waiting < WAITING_MAX).then_some(waiting + 1);
        this.waiting_threads
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, add_waiting)
            .is_ok()
    }

    /// Waits for the next client of the data socket and returns its connection; `None` when the data socket is closed.
    fn next_client(&self) -> Option<OwnedFd> {
        loop {
            let accepted = accept_with(&self.listener, SocketFlags::CLOEXEC);
            if self.stop.load(Ordering::Acquire) {
                return None;
            }
            match accepted {
                Ok(socket) => return Some(socket),
                Err(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection on the data socket");
                    // The process probably has no free descriptor; without a pause this loop would use a CPU.
                    std::thread::sleep(ACCEPT_RETRY_DELAY);
                }
            }
        }
    }

    /// Starts threads until [`WAITING_MIN`] of them wait, so that the next client is answered at once.
    fn start_waiting_threads(this: &Arc<Self>) {
        while this.waiting_threads.load(Ordering::Acquire) < WAITING_MIN
            && Self::add_thread(this).is_ok()
        {}
    }
}

/// Serves a client of the data socket until it disconnects or sends an invalid request. A process of another user is
/// not answered. The first request must be a hello with the version of the protocol.
fn serve_client<B: Backing>(
    socket: &OwnedFd,
    client: ClientId,
    shared: &Arc<SocketShared<B>>,
) -> io::Result<()> {
    let peer = firn_trust::socket_peer(socket)?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    set_socket_timeout(socket, Timeout::Send, Some(SEND_TIMEOUT))?;
    let mut session = ClientSession {
        shared,
        client,
        // A client in a PID namespace that firnd cannot see has number 0. firnd cannot notice its end by that number.
        pid: peer.pid.map_or(0, std::num::NonZeroU32::get),
        has_said_hello: false,
    };
    // Clients of a mount send requests without data; the first packet of a client may have two requests.
    let data_bytes_max = match shared.served {
        ServedFrontend::Tree(_) => DATA_BYTES_MAX,
        ServedFrontend::Mount(_) => size_of::<Request>(),
    };
    let mut data = vec![0u8; data_bytes_max];
    let mut has_started_threads = false;
    loop {
        // The first requests of a new client come together. They are answered before further threads are started, so
        // that the client does not wait for that: no bytes of a further request are in the socket (FIONREAD).
        if session.has_said_hello
            && !has_started_threads
            && rustix::io::ioctl_fionread(socket)? == 0
        {
            has_started_threads = true;
            SocketShared::start_waiting_threads(shared);
        }
        let packet = match receive(socket, &mut data)? {
            Received::Packet(packet) => packet,
            Received::Malformed => return send_refusal(socket, Status::Malformed),
            Received::Disconnected => return Ok(()),
        };
        let packet_data = data.get(..packet.data_len).unwrap_or_default();
        let answered = if session.has_said_hello {
            session.answer(packet.request, packet_data, packet.descriptor)
        } else {
            session.answer_hello(socket, packet.request, packet_data, packet.descriptor)?
        };
        match answered {
            RequestOutcome::Answer(answer) => send_answer(socket, &answer)?,
            RequestOutcome::AlreadySent => {}
            RequestOutcome::Refused(status) => return send_refusal(socket, status),
        }
    }
}

/// A client that is being served.
struct ClientSession<'a, B: Backing> {
    shared: &'a SocketShared<B>,
    client: ClientId,
    /// Process number of the client; 0 if firnd does not see the process.
    pid: u32,
    /// The client has sent a valid first request.
    has_said_hello: bool,
}

/// What follows a request.
enum RequestOutcome {
    Answer(Answer),
    /// The answer to the first request was sent, and no second request came with it.
    AlreadySent,
    /// The request is invalid. The connection is closed after this status.
    Refused(Status),
}

impl<B: Backing> ClientSession<'_, B> {
    /// Answers the first request of a client, which names the version of the protocol, with the geometry of the arena
    /// (the shared memory). `data` may have a second request; its answer is returned for the caller to send.
    ///
    /// The geometry is sent here, because the answer to the second request is a packet of its own.
    fn answer_hello(
        &mut self,
        socket: &OwnedFd,
        request: Request,
        data: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> io::Result<RequestOutcome> {
        if Op::from_word(request.op) != Some(Op::Hello) {
            return Ok(RequestOutcome::Refused(Status::Malformed));
        }
        if request.arg != u64::from(DATA_SOCKET_VERSION) {
            return Ok(RequestOutcome::Refused(Status::Version));
        }
        let second = read_second_request(data);
        if descriptor.is_some() || matches!(second, SecondRequest::Malformed) {
            return Ok(RequestOutcome::Refused(Status::Malformed));
        }
        self.has_said_hello = true;
        send_geometry(socket, &self.shared.engine)?;
        let SecondRequest::Request(op, request) = second else {
            return Ok(RequestOutcome::AlreadySent);
        };
        Ok(RequestOutcome::Answer(
            self.answer_direct_access(op, &request),
        ))
    }

    /// Answers a later request: about a stub, or about direct access.
    fn answer(&self, request: Request, data: &[u8], descriptor: Option<OwnedFd>) -> RequestOutcome {
        let Some(op) = Op::from_word(request.op) else {
            return RequestOutcome::Refused(Status::Malformed);
        };
        if stub::is_stub_op(op) {
            return self.answer_about_stub(op, &request, data, descriptor);
        }
        let has_extra = !data.is_empty() || descriptor.is_some();
        if op == Op::Hello || has_extra || !has_valid_len(op, &request) {
            return RequestOutcome::Refused(Status::Malformed);
        }
        RequestOutcome::Answer(self.answer_direct_access(op, &request))
    }

    /// Answers a request about a stub (an empty file on tmpfs; this process has its bytes). Only clients of a stub tree
    /// may send such requests. `data` is what follows the request; `descriptor` came with it.
    fn answer_about_stub(
        &self,
        op: Op,
        request: &Request,
        data: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> RequestOutcome {
        let ServedFrontend::Tree(tree) = &self.shared.served else {
            return RequestOutcome::Refused(Status::Malformed);
        };
        let stub_service = stub::StubService {
            tree,
            engine: &self.shared.engine,
            file_locks: self.shared.file_locks.as_deref(),
            client: self.client,
        };
        match stub_service.answer(op, request, data, descriptor) {
            Some(answer) => RequestOutcome::Answer(answer),
            None => RequestOutcome::Refused(Status::Malformed),
        }
    }
}

/// Returns whether the length of a request is valid; most requests must have length 0.
fn has_valid_len(op: Op, request: &Request) -> bool {
    match op {
        Op::Lease | Op::OpenWrite => true,
        Op::Extents => request.len as usize <= FILES_MAX,
        _ => request.len == 0,
    }
}

/// The request that may follow a client's first request in the same packet.
enum SecondRequest {
    /// There is none.
    None,
    Request(Op, Request),
    /// The bytes are not a request that may follow.
    Malformed,
}

/// Reads the second request from the bytes after the first one.
fn read_second_request(bytes: &[u8]) -> SecondRequest {
    if bytes.is_empty() {
        return SecondRequest::None;
    }
    let Ok(request) = Request::read_from_bytes(bytes) else {
        return SecondRequest::Malformed;
    };
    match Op::from_word(request.op) {
        Some(op @ (Op::OpenWrite | Op::Extents)) if has_valid_len(op, &request) => {
            SecondRequest::Request(op, request)
        }
        _ => SecondRequest::Malformed,
    }
}

/// A packet of a client: a request, the bytes after it, and a descriptor.
struct Packet {
    request: Request,
    /// Number of bytes after the request, which are in the caller's buffer.
    data_len: usize,
    descriptor: Option<OwnedFd>,
}

/// Result of [`receive`].
enum Received {
    Packet(Packet),
    /// The packet is truncated, or is no request.
    Malformed,
    /// The client has disconnected.
    Disconnected,
}

/// Receives one packet: a request, bytes that are stored in `data`, and at most one descriptor. A packet that is too
/// short, or longer than `data`, is `Malformed`.
fn receive(socket: &OwnedFd, data: &mut [u8]) -> io::Result<Received> {
    let mut head = [0u8; size_of::<Request>()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut parts = [IoSliceMut::new(&mut head), IoSliceMut::new(data)];
        match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => break received,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    };
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    if received.bytes == 0 {
        return Ok(Received::Disconnected);
    }
    let is_truncated = received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    if is_truncated || received.bytes < head.len() {
        return Ok(Received::Malformed);
    }
    let Ok(request) = Request::read_from_bytes(&head) else {
        return Ok(Received::Malformed);
    };
    Ok(Received::Packet(Packet {
        request,
        data_len: received.bytes.saturating_sub(head.len()),
        descriptor,
    }))
}

/// Answers a client's first request with the geometry of the arena (where its tables and chunks are) and a descriptor
/// of its file. The client maps that file to write and read bytes there itself.
fn send_geometry<B: Backing>(socket: &OwnedFd, engine: &Engine<B>) -> io::Result<()> {
    let arena = engine.arena();
    let geometry = arena.geometry();
    let reply = Reply {
        status: Status::Ok as u32,
        ..Reply::default()
    };
    let arena_reply = ArenaReply {
        uuid: arena.superblock().uuid,
        file_bytes: geometry.file_bytes(),
        // The words of files, by which the client sees that a file has changed.
        words_offset: WORDS_OFFSET,
        words_bytes: WORDS_BYTES,
        // The first piece table: from there on the client may also write.
        shared_offset: geometry.table_offset(0),
        page_bytes: PAGE,
        chunk_bytes: geometry.chunk_bytes,
    };
    let file = [arena.file()];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&file));
    let parts = [
        IoSlice::new(reply.as_bytes()),
        IoSlice::new(arena_reply.as_bytes()),
    ];
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The answer to one request.
struct Answer {
    reply: Reply,
    /// Slabs, extents or bytes of a file, which follow the reply in its packet.
    data: Vec<u8>,
    /// Descriptors that are sent with the packet.
    files: Vec<OwnedFd>,
}

impl Answer {
    /// Returns an answer that is only a status.
    fn status(status: Status) -> Self {
        Reply {
            status: status as u32,
            ..Reply::default()
        }
        .into()
    }
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self {
            reply,
            data: Vec::new(),
            files: Vec::new(),
        }
    }
}

impl From<DirectRefusal> for Answer {
    fn from(refusal: DirectRefusal) -> Self {
        Self::status(match refusal {
            DirectRefusal::BadToken => Status::BadToken,
            DirectRefusal::Busy => Status::Busy,
            DirectRefusal::Full => Status::Full,
        })
    }
}

impl<B: Backing> ClientSession<'_, B> {
    /// Returns the answer to a request of a process that uses the arena (shared memory) itself: for a grant (the right
    /// to write a file there), a lease of slabs (parts of the arena to fill), a list of a file's bytes, or the mapping
    /// of a file.
    fn answer_direct_access(&self, op: Op, request: &Request) -> Answer {
        let direct_access = &self.shared.engine.direct_access;
        let handle = HandleId(request.token);
        match op {
            Op::OpenWrite => self.grant_write(request),
            Op::Lease => match self.lease_slabs(request) {
                Ok(slabs) => slabs.into_answer(Reply::default()),
                Err(refusal) => refusal.into(),
            },
            Op::EndWrite => {
                direct_access.end_direct_access(self.client, handle);
                Answer::status(Status::Ok)
            }
            Op::Extents => {
                match direct_access.list_extents(handle, request.arg, request.len as usize) {
                    Ok(list) => extent_list_answer(list),
                    Err(refusal) => refusal.into(),
                }
            }
            Op::Map => match direct_access.map_file(handle) {
                Ok(file) => Answer {
                    files: vec![file],
                    ..Reply::default().into()
                },
                Err(refusal) => refusal.into(),
            },
            // A list needs no release: the client sees from the file's version counter in the arena when it is invalid.
            Op::EndRead => Answer::status(Status::Ok),
            _ => Answer::status(Status::Malformed),
        }
    }

    /// Grants the client the right to write a file in the arena (shared memory) itself. If the request asks for slabs,
    /// parts of the arena that one writer fills, the client leases its first slabs too. The request's token is an open
    /// handle of the file.
    fn grant_write(&self, request: &Request) -> Answer {
        let handle = HandleId(request.token);
        // Like each change, this waits while a transaction above the file begins or ends.
        let granted = self.shared.with_pass(handle, || {
            let direct_access = &self.shared.engine.direct_access;
            direct_access.grant_direct_access(self.client, handle)
        });
        let grant = match granted {
            Ok(grant) => grant,
            Err(refusal) => return refusal.into(),
        };
        // The kernel forgets the file's attributes before the client may write, because they become stale then.
        if let ServedFrontend::Mount(kernel) = &self.shared.served {
            kernel.invalidate_attributes(grant.inode);
        }
        let reply = Reply {
            file_id: grant.file_id.get(),
            size: grant.size,
            ..Reply::default()
        };
        let wants_slabs = request.arg != 0;
        if !wants_slabs {
            return reply.into();
        }
        match self.lease_slabs(request) {
            Ok(slabs) => slabs.into_answer(reply),
            // The token was valid for the grant, so a bad token now means that the grant was revoked meanwhile.
            Err(DirectRefusal::BadToken) => DirectRefusal::Busy.into(),
            Err(refusal) => refusal.into(),
        }
    }

    /// Leases slabs (parts of the arena that the client fills itself) for `request.arg` bytes of a file.
    fn lease_slabs(&self, request: &Request) -> Result<LeasedSlabs, DirectRefusal> {
        let handle = HandleId(request.token);
        let slab_request = SlabRequest {
            pid: self.pid,
            // The client sends its CPU number plus 1; 0 stands for an unknown CPU.
            cpu: request.len.checked_sub(1),
            bytes: request.arg,
        };
        let (first, others) = self.shared.with_pass(handle, || {
            let direct_access = &self.shared.engine.direct_access;
            direct_access.lease_slabs(self.client, handle, slab_request)
        })?;
        Ok(LeasedSlabs { first, others })
    }
}

/// Slabs that a client has leased.
struct LeasedSlabs {
    first: Slab,
    others: Vec<Slab>,
}

impl LeasedSlabs {
    /// Returns an answer with these slabs: the first one in the reply, the others after it.
    fn into_answer(self, reply: Reply) -> Answer {
        let reply = Reply {
            count: self.others.len() as u32,
            lease: self.first,
            ..reply
        };
        Answer {
            data: self.others.as_bytes().to_vec(),
            ..reply.into()
        }
    }
}

/// Returns an answer with a direct list: where the bytes of a file are in the arena, the shared memory. The list is
/// complete up to the file offset `end`.
///
/// The client may use it while the file's version counter in the arena, at position `slot`, has the value `stamp`, and
/// for at most `valid_ns`.
fn extent_list_answer(list: DirectList) -> Answer {
    // 0 means that the list has no expiry, so an expired list gets 1 ns.
    let valid_ns = match list.until {
        Some(expiry) => {
            let time_left = expiry.saturating_duration_since(Instant::now());
            (time_left.as_nanos() as u64).max(1)
        }
        None => 0,
    };
    let reply = Reply {
        count: list.extents.len() as u32,
        size: list.size,
        slot: list.slot,
        stamp: list.stamp,
        end: list.end,
        valid_ns,
        ..Reply::default()
    };
    Answer {
        reply,
        data: list.extents.as_bytes().to_vec(),
        files: list.files,
    }
}

/// Sends the reason of a refusal; the caller then closes the connection.
fn send_refusal(socket: &OwnedFd, status: Status) -> io::Result<()> {
    send_answer(socket, &Answer::status(status))
}

/// Sends a reply with its data and descriptors in one packet.
fn send_answer(socket: &OwnedFd, Answer { reply, data, files }: &Answer) -> io::Result<()> {
    let parts = [IoSlice::new(reply.as_bytes()), IoSlice::new(data)];
    let files: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
