//! The data socket: leases and lists for processes with direct access, and all data calls of
//! stubs.
//!
//! Promises
//! * Only processes of firnd's own user are answered (SO_PEERCRED).
//! * The end of a connection ends what it had; what was published stays.
//! * A broken, slow or mad client costs one thread and no more; at most [`CONNECTIONS_MAX`] are served.
//!
//! Several threads wait for clients at once, and the one that a client wakes answers it. To start a thread for each
//! client would double the time of a process's first write by direct access.
//!
//! Messages: `firn_format::data_socket`.

mod stub;

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_backing::Backing;
use firn_engine::{ClientId, DirectList, DirectRefusal, Engine, HandleId};
use firn_format::data_socket::{
    Arena, DATA_BYTES_MAX, DATA_SOCKET_VERSION, FILES_MAX, Op, Reply, Request, Slab, Status,
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

/// One for each process of a well-filled host; their threads sleep.
const CONNECTIONS_MAX: u64 = 1024;
/// A client that does not take its answer for this long is given up.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// With fewer threads that wait for clients another is started …
const WAITING_MIN: u64 = 2;
/// … and with more, one whose client went ends: the processes of a host begin together, and again and again.
const WAITING_MAX: u64 = 16;
const _: () = assert!(CONNECTIONS_MAX + WAITING_MAX <= Class::DataClient.threads_max() as u64);

/// A socket that is listened on; removed when dropped.
pub(crate) struct DataSocket {
    path: PathBuf,
    listener: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
}

/// What a data socket serves.
pub(crate) enum Served<B: Backing> {
    /// A mount; the kernel has to forget what is written by direct access.
    Mount(Invalidator),
    /// A stub tree.
    Tree(Arc<Tree<B>>),
}

/// What all connections share.
struct Shared<B: Backing> {
    engine: Arc<Engine<B>>,
    /// None without transactions.
    gate: Option<Arc<dyn Gate>>,
    served: Served<B>,
    /// By which the end of a file is that of all hosts; none where there are no others.
    file_locks: Option<Arc<FileLocks>>,
    /// Connections now.
    count: Arc<AtomicU64>,
    /// Connections so far.
    clients: AtomicU64,
    listener: Arc<OwnedFd>,
    workers: Workers,
    /// Threads that wait for clients, those about to included.
    waiting: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl DataSocket {
    /// Listens at `path`, in place of what a dead firnd left there. `count` is kept at the number of
    /// connections.
    pub(crate) fn start<B: Backing>(
        path: &Path,
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        served: Served<B>,
        file_locks: Option<Arc<FileLocks>>,
        count: Arc<AtomicU64>,
        workers: Workers,
    ) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = Arc::new(new_socket()?);
        // Before the first connection: the runtime directory is private, and so is the socket.
        rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR)?;
        bind(&listener, &SocketAddrUnix::new(path)?)?;
        listen(&listener, 128)?;
        let stop = Arc::new(AtomicBool::new(false));
        let shared = Arc::new(Shared {
            engine,
            gate,
            served,
            file_locks,
            count,
            clients: AtomicU64::new(0),
            listener: Arc::clone(&listener),
            workers,
            waiting: AtomicU64::new(0),
            stop: Arc::clone(&stop),
        });
        Shared::add_thread(&shared).map_err(io::Error::other)?;
        Shared::top_up(&shared);
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
        // Wakes the threads in accept(2): they find EINVAL.
        let _ = shutdown(&self.listener, Shutdown::Both);
        let _ = std::fs::remove_file(&self.path);
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

impl<B: Backing> Shared<B> {
    /// Lets a process write directly, which waits while a directory above the file is quiesced.
    fn with_pass<T>(&self, token: HandleId, let_in: impl FnOnce() -> T) -> T {
        // A handle that is not open is refused by the engine.
        let inode = self.engine.open_files.inode_of_handle(token);
        let gate = self.gate.as_deref().zip(inode);
        let _pass = gate.map(|(gate, inode)| gate.enter(inode));
        let_in()
    }

    /// One more thread that waits for clients.
    fn add_thread(this: &Arc<Self>) -> Result<(), Refused> {
        this.waiting.fetch_add(1, Ordering::AcqRel);
        let shared = Arc::clone(this);
        let attend = move || while Self::attend(&shared) {};
        let started = this.workers.try_run(Class::DataClient, attend);
        if started.is_err() {
            this.waiting.fetch_sub(1, Ordering::AcqRel);
        }
        started
    }

    /// Waits for a client and serves it until it goes. Whether the thread is to wait for another one.
    fn attend(this: &Arc<Self>) -> bool {
        let Some(socket) = this.next_client() else {
            return false;
        };
        let left = this.waiting.fetch_sub(1, Ordering::AcqRel) - 1;
        if left == 0
            && let Err(error) = Self::add_thread(this)
        {
            tracing::warn!(%error, "cannot start a thread for data connections");
            this.waiting.fetch_add(1, Ordering::AcqRel);
            return true;
        }
        // A client beyond the maximum, or not let in, finds the connection closed and uses the kernel.
        if this.count.fetch_add(1, Ordering::AcqRel) < CONNECTIONS_MAX {
            let client = ClientId(this.clients.fetch_add(1, Ordering::AcqRel) + 1);
            if let Err(error) = serve(&socket, client, this) {
                tracing::debug!(%error, client = client.0, "a data connection ended");
            }
            this.engine.direct_access.end_client(client);
            if let Served::Tree(tree) = &this.served {
                tree.release_client(client);
            }
        }
        this.count.fetch_sub(1, Ordering::AcqRel);
        let one_more = |waiting| (waiting < WAITING_MAX).then_some(waiting + 1);
        this.waiting
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more)
            .is_ok()
    }

    /// `None`: the socket is being closed.
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
                    // Out of descriptors, most likely: without a pause this would spin.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
    }

    /// Some threads wait, so that the next client is answered at once.
    fn top_up(this: &Arc<Self>) {
        while this.waiting.load(Ordering::Acquire) < WAITING_MIN && Self::add_thread(this).is_ok() {
        }
    }
}

/// Until the client goes or talks nonsense.
fn serve<B: Backing>(
    socket: &OwnedFd,
    client: ClientId,
    shared: &Arc<Shared<B>>,
) -> io::Result<()> {
    let peer = firn_trust::peer(socket)?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    // 0 is a process of a PID namespace that we do not see: its end cannot be noticed.
    let pid = peer.pid.map_or(0, std::num::NonZeroU32::get);
    set_socket_timeout(socket, Timeout::Send, Some(SEND_TIMEOUT))?;
    let mut greeted = false;
    // Clients of a mount send requests only, two at once at first.
    let room = if matches!(shared.served, Served::Tree(_)) {
        DATA_BYTES_MAX
    } else {
        size_of::<Request>()
    };
    let mut data = vec![0u8; room];
    let mut topped_up = false;
    loop {
        // What a new client sends first comes in one go and is answered before anything else.
        if greeted && !topped_up && rustix::io::ioctl_fionread(socket)? == 0 {
            topped_up = true;
            Shared::top_up(shared);
        }
        let Some(packet) = receive(socket, &mut data)? else {
            return Ok(());
        };
        let Some((
            op,
            Packet {
                request,
                len,
                given,
            },
        )) = packet.and_then(|p| Op::from_word(p.request.op).map(|op| (op, p)))
        else {
            return refuse(socket, Status::Malformed);
        };
        let answer = match (op, &shared.served) {
            (Op::Hello, _) if !greeted && request.arg == u64::from(DATA_SOCKET_VERSION) => {
                let behind = data.get(..len).unwrap_or_default();
                let Some(next) = request_with_hello(behind).filter(|_| given.is_none()) else {
                    return refuse(socket, Status::Malformed);
                };
                greeted = true;
                hello(socket, &shared.engine)?;
                let Some((op, request)) = next else { continue };
                answer(shared, client, pid, op, &request)
            }
            (Op::Hello, _) if !greeted => return refuse(socket, Status::Version),
            (Op::Hello, _) => return refuse(socket, Status::Malformed),
            _ if !greeted => return refuse(socket, Status::Malformed),
            (op, served) if stub::is_op(op) => {
                let Served::Tree(tree) = served else {
                    return refuse(socket, Status::Malformed);
                };
                let call = stub::Call {
                    tree,
                    engine: &shared.engine,
                    file_locks: shared.file_locks.as_deref(),
                    client,
                };
                match call.answer(op, &request, data.get(..len).unwrap_or_default(), given) {
                    Some(answer) => answer,
                    None => return refuse(socket, Status::Malformed),
                }
            }
            _ if len != 0 || given.is_some() || !has_usual_len(op, &request) => {
                return refuse(socket, Status::Malformed);
            }
            (op, _) => answer(shared, client, pid, op, &request),
        };
        send(socket, &answer)?;
    }
}

/// Whether only a request that says so has a length.
fn has_usual_len(op: Op, request: &Request) -> bool {
    match op {
        Op::Lease | Op::OpenWrite => true,
        Op::Extents => request.len as usize <= FILES_MAX,
        _ => request.len == 0,
    }
}

/// The request in the packet of the first one, behind it: `Some(None)` where there is none, `None` where it is not one
/// that may stand there.
fn request_with_hello(behind: &[u8]) -> Option<Option<(Op, Request)>> {
    if behind.is_empty() {
        return Some(None);
    }
    let request = Request::read_from_bytes(behind).ok()?;
    let op = Op::from_word(request.op)?;
    let may_follow = matches!(op, Op::OpenWrite | Op::Extents) && has_usual_len(op, &request);
    may_follow.then_some(Some((op, request)))
}

/// What a client sent: a request, bytes behind it, a descriptor.
struct Packet {
    request: Request,
    /// Bytes behind the request, now in the caller's buffer.
    len: usize,
    given: Option<OwnedFd>,
}

/// One packet; `Some(None)` where it is none. `None`: the client is gone.
fn receive(socket: &OwnedFd, data: &mut [u8]) -> io::Result<Option<Option<Packet>>> {
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
    let given = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    if received.bytes == 0 {
        return Ok(None);
    }
    let whole = !received
        .flags
        .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let request = Request::read_from_bytes(&head)
        .ok()
        .filter(|_| whole && received.bytes >= head.len());
    let len = received.bytes.saturating_sub(head.len());
    Ok(Some(request.map(|request| Packet {
        request,
        len,
        given,
    })))
}

fn hello<B: Backing>(socket: &OwnedFd, engine: &Engine<B>) -> io::Result<()> {
    let arena = engine.arena();
    let geometry = arena.geometry();
    let reply = Reply {
        status: Status::Ok as u32,
        ..Reply::default()
    };
    let about = Arena {
        uuid: arena.superblock().uuid,
        file_bytes: geometry.file_bytes(),
        words_offset: WORDS_OFFSET,
        words_bytes: WORDS_BYTES,
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
        IoSlice::new(about.as_bytes()),
    ];
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// An answer, the extents or bytes that follow it, and the descriptors that go with it.
struct Answer(Reply, Vec<u8>, Vec<OwnedFd>);

impl Answer {
    fn status(status: Status) -> Self {
        Self(
            Reply {
                status: status as u32,
                ..Reply::default()
            },
            Vec::new(),
            Vec::new(),
        )
    }
}

impl From<Reply> for Answer {
    fn from(reply: Reply) -> Self {
        Self(reply, Vec::new(), Vec::new())
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

fn answer<B: Backing>(
    shared: &Shared<B>,
    client: ClientId,
    pid: u32,
    op: Op,
    &Request {
        token, arg, len, ..
    }: &Request,
) -> Answer {
    let engine = &shared.engine;
    let token = HandleId(token);
    let lease = || {
        shared.with_pass(token, || {
            engine
                .direct_access
                .lease_slabs(client, token, (pid, len.checked_sub(1)), arg)
        })
    };
    match op {
        Op::OpenWrite => {
            match shared.with_pass(token, || {
                engine.direct_access.grant_direct_access(client, token)
            }) {
                Ok(grant) => {
                    // Before the client may write: what the kernel knew of the file ends to hold then.
                    if let Served::Mount(kernel) = &shared.served {
                        kernel.invalidate_attributes(grant.inode);
                    }
                    let opened = Reply {
                        file_id: grant.file_id.get(),
                        size: grant.size,
                        ..Reply::default()
                    };
                    match arg {
                        0 => opened.into(),
                        _ => lease().map_or_else(from_first_lease, |slabs| of_slabs(opened, slabs)),
                    }
                }
                Err(refusal) => refusal.into(),
            }
        }
        Op::Lease => lease().map_or_else(Answer::from, |slabs| of_slabs(Reply::default(), slabs)),
        Op::EndWrite => {
            engine.direct_access.end_direct_access(client, token);
            Answer::status(Status::Ok)
        }
        Op::Extents => engine
            .direct_access
            .list_extents(token, arg, len as usize)
            .map_or_else(Answer::from, of_list),
        Op::Map => engine
            .direct_access
            .map_file(token)
            .map_or_else(Answer::from, |file| {
                Answer(Reply::default(), Vec::new(), vec![file])
            }),
        // A list needs no end: its word tells when it does not hold any more.
        Op::EndRead => Answer::status(Status::Ok),
        _ => Answer::status(Status::Malformed),
    }
}

/// Leased slabs as part of an answer.
fn of_slabs(reply: Reply, (lease, more): (Slab, Vec<Slab>)) -> Answer {
    let reply = Reply {
        count: more.len() as u32,
        lease,
        ..reply
    };
    Answer(reply, more.as_bytes().to_vec(), Vec::new())
}

/// A list as an answer.
fn of_list(list: DirectList) -> Answer {
    let valid = |until: Instant| until.saturating_duration_since(Instant::now());
    let reply = Reply {
        count: list.extents.len() as u32,
        size: list.size,
        slot: list.slot,
        stamp: list.stamp,
        end: list.end,
        // 0 would say that there is no such time.
        valid_ns: list
            .until
            .map_or(0, |until| (valid(until).as_nanos() as u64).max(1)),
        ..Reply::default()
    };
    Answer(reply, list.extents.as_bytes().to_vec(), list.files)
}

/// The answer where a grant got no lease. It was known by its token, so it has been revoked where it is not now.
fn from_first_lease(refusal: DirectRefusal) -> Answer {
    Answer::from(match refusal {
        DirectRefusal::BadToken => DirectRefusal::Busy,
        other => other,
    })
}

fn refuse(socket: &OwnedFd, status: Status) -> io::Result<()> {
    send(socket, &Answer::status(status))
}

fn send(socket: &OwnedFd, Answer(reply, follows, files): &Answer) -> io::Result<()> {
    let parts = [IoSlice::new(reply.as_bytes()), IoSlice::new(follows)];
    let files: Vec<BorrowedFd<'_>> = files.iter().map(OwnedFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}
