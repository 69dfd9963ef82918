//! Client side of the control socket of firnd, the process that serves a mount. The client sends a request, receives
//! progress messages, and then receives the answer.
//!
//! Terms
//! * *Hello*: the first request on each connection. firnd answers it with its protocol version.
//! * *Short request*: one that firnd answers from memory. Unmounts, waits, flattening and requests about
//!   transactions are long requests.
//!
//! Promises
//! * A [`Connection`] exists only after firnd has answered Hello with the client's protocol version.
//! * firnd may close a connection that was unused for long, to make room for others. The client then reconnects, at
//!   most once for each request. The close guarantees that firnd did not carry out the request. The client never
//!   reconnects to another firnd process than the first.
//! * Hello and short requests fail after 10 seconds (`ANSWER_S`) without a byte from firnd. Long requests may take for
//!   ever.
//! * If root asks the firnd of another user, the whole answer to a short request must arrive within these 10 seconds,
//!   and no answer may exceed 16 MiB. That firnd may be any program, so root does not trust it.
//! * If firnd is gone, the client gets an error and no SIGPIPE, because the calling program may not handle the
//!   signal.
//! * The client sends nothing before two checks: the runtime directory, which has the socket, and the process at the
//!   other end must belong to the user that mounted.

use std::io::{self, BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;
use firn_protocol::record::RunRecord;
use firn_protocol::{
    ChunkList, DataRegion, Explanation, FileStatus, HeldPolicy, Holder, PROTOCOL_VERSION, Reply,
    Request, Status,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;
use rustix::process::{Pid, PidfdFlags};

use crate::error::ClientError;
use crate::find::Mount;
use crate::liveness::Liveness;
use crate::paths::open_runtime_dir;

/// Seconds without a byte from firnd after which a short request fails. firnd answers it from memory, so it needs
/// longer only if it is stopped or gets no CPU time.
const ANSWER_S: u64 = 10;
/// Time limit of each read and write of the socket during a short request.
const SHORT_REQUEST: Option<Duration> = Some(Duration::from_secs(ANSWER_S));
/// Long requests have no time limit.
const NO_TIMEOUT: Option<Duration> = None;
/// Maximum number of bytes of an unexpected message that an error shows.
const SHOWN_REPLY_BYTES_MAX: usize = 80;
/// Maximum size of an answer in bytes. It allows for 10^6 pending files with long paths.
const REPLY_BYTES_MAX: usize = 1 << 30;
/// Maximum size in bytes of an answer from the firnd of another user. It allows for 10^5 pending files.
const OTHERS_REPLY_BYTES_MAX: usize = 16 << 20;

/// Progress of a long request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes still to be drained: written from memory to the backing, the directory that the mount serves.
    pub bytes_left: u64,
    /// Number of files that have such bytes.
    pub files_left: u64,
    /// What firnd does now: `draining`, `syncing` or `unmounting`.
    pub phase: String,
}

/// A connection to a firnd that uses the same protocol version.
pub struct Connection {
    /// The mount that firnd serves.
    mount: Mount,
    /// The connected socket.
    stream: BufReader<UnixStream>,
    /// Whether the next request must first connect again: firnd has closed the connection to make room for others, or
    /// Hello is not answered yet.
    must_reopen: bool,
    /// firnd may use another version of the protocol.
    accepts_any_version: bool,
    /// Incarnation of the firnd to which the connection was first opened. Empty before the first Hello.
    incarnation: String,
    /// Package version of firnd.
    pub version: String,
    /// Process id of firnd.
    pub pid: u32,
}

impl Connection {
    /// Connects to the firnd of `mount`.
    pub fn open(mount: &Mount) -> Result<Self, ClientError> {
        let accepts_any_version = false;
        Self::from_stream(mount, connect(mount)?, accepts_any_version)
    }

    /// Connects to the firnd of `mount`, whatever version of the protocol it uses. The connection is for
    /// [`Connection::upgrade`] and [`Connection::status`].
    pub fn open_of_any_version(mount: &Mount) -> Result<Self, ClientError> {
        let accepts_any_version = true;
        Self::from_stream(mount, connect(mount)?, accepts_any_version)
    }

    /// Returns a connection to firnd, the process that serves `mount`, over a connected stream. Sends the first
    /// request, Hello, and waits for the answer. Fails if firnd uses another version of the protocol, unless
    /// `accepts_any_version`.
    fn from_stream(
        mount: &Mount,
        stream: UnixStream,
        accepts_any_version: bool,
    ) -> Result<Self, ClientError> {
        let mut connection = Self {
            mount: mount.clone(),
            stream: BufReader::new(stream),
            // Until Hello is answered, the connection cannot be used for requests.
            must_reopen: true,
            accepts_any_version,
            // Empty before the first Hello, which accepts any firnd process. Later ones accept only the same process.
            incarnation: String::new(),
            version: String::new(),
            pid: 0,
        };
        match connection.exchange_hello() {
            Ok(()) => {}
            // firnd closed the new connection at once, because many processes connect at the same time.
            Err(ClientError::Busy { holders, .. }) if holders.is_empty() => connection.reopen()?,
            Err(error) => return Err(error),
        }
        Ok(connection)
    }

    /// Reconnects to the same firnd process.
    fn reopen(&mut self) -> Result<(), ClientError> {
        self.stream = BufReader::new(connect(&self.mount)?);
        self.exchange_hello()
    }

    /// Sends Hello, the first request of each connection, and checks the answer.
    ///
    /// Fails if firnd, the process that serves the mount, uses another version of the protocol or has closed the
    /// connection. Also fails, as if the connection had ended, if another process answers than at the first Hello. The
    /// *incarnation* is the id of a firnd process.
    fn exchange_hello(&mut self) -> Result<(), ClientError> {
        self.must_reopen = true;
        let Some(reply) = self.send_once(&Request::Hello, SHORT_REQUEST, &mut |_| {})? else {
            return Err(self.closed_error());
        };
        let Reply::Hello {
            protocol,
            version,
            pid,
            incarnation,
            ..
        } = reply
        else {
            return Err(unexpected_reply(&reply));
        };
        if protocol != PROTOCOL_VERSION && !self.accepts_any_version {
            return Err(ClientError::Protocol {
                found: protocol,
                expected: PROTOCOL_VERSION,
                version,
            });
        }
        let is_first_hello = self.incarnation.is_empty();
        if !is_first_hello && incarnation != self.incarnation {
            // The first firnd has ended, and another process serves the mount.
            return Err(self.io_error(io::ErrorKind::UnexpectedEof.into()));
        }
        self.version = version;
        self.pid = pid;
        self.incarnation = incarnation;
        self.must_reopen = false;
        Ok(())
    }

    /// Returns an identifier that distinguishes this firnd process from all others.
    pub fn incarnation(&self) -> &str {
        &self.incarnation
    }

    /// Returns the state of the mount.
    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.request_short(&Request::Status)? {
            Reply::Status(status) => Ok(*status),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Returns the record of the run so far.
    pub fn record(&mut self) -> Result<RunRecord, ClientError> {
        match self.request_short(&Request::Record)? {
            Reply::Record(record) => Ok(*record),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Returns the files at or below `path` that are open or have bytes in the arena.
    pub fn files(&mut self, path: &BytePath) -> Result<Vec<FileStatus>, ClientError> {
        let includes_idle = false;
        self.list_files(path, includes_idle)
    }

    /// Returns all files at or below `path` about which firnd knows more than the backing shows. As far as firnd
    /// knows, every other file was closed and is drained or logged.
    pub fn known_files(&mut self, path: &BytePath) -> Result<Vec<FileStatus>, ClientError> {
        let includes_idle = true;
        self.list_files(path, includes_idle)
    }

    /// Returns the files at or below `path` that firnd lists. If `includes_idle`, also those that are closed and have
    /// no bytes in the arena.
    fn list_files(
        &mut self,
        path: &BytePath,
        includes_idle: bool,
    ) -> Result<Vec<FileStatus>, ClientError> {
        let request = Request::Files {
            path: path.clone(),
            idle: includes_idle,
        };
        match self.request_short(&request)? {
            Reply::Files { files } => Ok(files),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Returns the location of the mount's data region, for mapping.
    pub fn region(&mut self) -> Result<DataRegion, ClientError> {
        match self.request_short(&Request::Region)? {
            Reply::Region(region) => Ok(region),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Requests the chunk list of the file at `path`. The list is held until it is released or the connection ends.
    pub fn chunks(&mut self, path: &BytePath) -> Result<ChunkList, ClientError> {
        match self.request_short(&Request::Chunks { path: path.clone() })? {
            Reply::Chunks(list) => Ok(list),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Returns whether the file was changed since its list was made. Any answer confirms that the list was held until
    /// now.
    pub fn check_chunks(&mut self, list: u64) -> Result<bool, ClientError> {
        match self.request_short(&Request::CheckChunks { list })? {
            Reply::ChunksChecked { changed } => Ok(changed),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Releases a chunk list.
    pub fn release_chunks(&mut self, list: u64) -> Result<(), ClientError> {
        self.request_done(&Request::ReleaseChunks { list })
    }

    /// Reports what an agent has sent to a puller since its last report.
    pub fn report_pull(&mut self, files: u64, bytes: u64) -> Result<(), ClientError> {
        self.request_done(&Request::ReportPull { files, bytes })
    }

    /// Makes a short request whose only answer is that it is done.
    pub fn request_done(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.request_short(request)? {
            Reply::Done => Ok(()),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Frees the memory of drained data. Returns the freed bytes, and the bytes that remain because they are not
    /// drained.
    pub fn evict(&mut self, path: &BytePath) -> Result<(u64, u64), ClientError> {
        match self.request_short(&Request::Evict { path: path.clone() })? {
            Reply::Evicted {
                freed_bytes,
                held_bytes,
            } => Ok((freed_bytes, held_bytes)),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Returns where a file is placed, or where it would be placed.
    pub fn explain_placement(&mut self, path: &BytePath) -> Result<Explanation, ClientError> {
        match self.request_short(&Request::Place { path: path.clone() })? {
            Reply::Placed(explanation) => Ok(explanation),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Pins files in memory, or unpins them. Returns the number of these files and their bytes.
    pub fn pin(&mut self, path: &BytePath, pinned: bool) -> Result<(u64, u64), ClientError> {
        let path = path.clone();
        match self.request_short(&Request::Pin { path, pinned })? {
            Reply::Pinned { files, bytes } => Ok((files, bytes)),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Asks firnd to end, so that the program of this process serves the mount with the changed `options`.
    ///
    /// Returns the process id of the keeper, which starts the program. The keeper ends if no firnd can serve the mount.
    pub fn upgrade(&mut self, options: &str) -> Result<u32, ClientError> {
        let options = options.to_owned();
        match self.request_short(&Request::Upgrade { options })? {
            Reply::Upgrading { keeper } => Ok(keeper),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Asks firnd, the process that serves the mount, to unmount and to end.
    ///
    /// `held` says what happens to bytes that are in memory only. Returns a handle that can wait for the end of the
    /// process, and firnd's answer: the number of files that remain in logs because other hosts write to them.
    ///
    /// The outer error means that the connection could not be opened again. The inner error is that of the unmount; the
    /// caller can still wait for the process, which may end nevertheless.
    pub fn unmount(
        &mut self,
        force: bool,
        held: HeldPolicy,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(Process, Result<u64, ClientError>), ClientError> {
        if self.must_reopen {
            self.reopen()?;
        }
        // The handle is taken before the request, because afterwards firnd may end at any time.
        let mut process = self.firnd_process();
        let request = Request::Unmount { force, held };
        let mut reply = self.send_once(&request, NO_TIMEOUT, progress);
        // firnd had closed the idle connection, so it did not get the request. The request is sent once more.
        let was_closed_before = matches!(reply, Ok(None));
        if was_closed_before {
            self.reopen()?;
            process = self.firnd_process();
            reply = self.send_once(&request, NO_TIMEOUT, progress);
        }
        let files_in_logs = match reply {
            Ok(Some(Reply::Unmounted { written_files })) => Ok(written_files),
            Ok(Some(unexpected)) => Err(unexpected_reply(&unexpected)),
            Ok(None) => Err(self.closed_error()),
            Err(error) => Err(error),
        };
        Ok((process, files_in_logs))
    }

    /// Makes a request without a time limit ([`Request::Wait`]).
    pub fn wait(
        &mut self,
        request: &Request,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<(), ClientError> {
        match self.request(request, NO_TIMEOUT, progress)? {
            Reply::Done => Ok(()),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Makes a request about a transaction. If the request committed, returns the number of the commit and the hosts
    /// that have not applied it yet.
    pub fn transaction(
        &mut self,
        request: &Request,
    ) -> Result<Option<(u64, Vec<String>)>, ClientError> {
        match self.request(request, NO_TIMEOUT, &mut |_| {})? {
            Reply::Done => Ok(None),
            Reply::Committed { id, not_applied_on } => Ok(Some((id, not_applied_on))),
            unexpected => Err(unexpected_reply(&unexpected)),
        }
    }

    /// Returns a handle that can wait for the end of the firnd at the other end.
    fn firnd_process(&self) -> Process {
        Process {
            pidfd: self.open_peer_pidfd(),
            socket: self.stream.get_ref().try_clone().ok(),
            id: self.pid,
        }
    }

    /// Opens a pidfd of the process at the other end. Returns `None` if that process is in another PID namespace.
    fn open_peer_pidfd(&self) -> Option<OwnedFd> {
        let peer = firn_trust::socket_peer(self.stream.get_ref()).ok()?;
        let pid = Pid::from_raw(peer.pid?.get().try_into().ok()?)?;
        // The process answered Hello, and its id is not reused while this connection exists.
        rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()
    }

    /// Sends a short request and returns the answer.
    fn request_short(&mut self, request: &Request) -> Result<Reply, ClientError> {
        self.request(request, SHORT_REQUEST, &mut |_| {})
    }

    /// Sends a request to firnd, the process that serves the mount, and returns the answer. `progress` is called for
    /// each progress message before it. `timeout` limits each read and write of the socket.
    ///
    /// firnd may have closed the connection, to make room for others, before the request came. It then did not carry
    /// the request out. The client reconnects and repeats the request, at most once.
    fn request(
        &mut self,
        request: &Request,
        timeout: Option<Duration>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Reply, ClientError> {
        if !self.must_reopen
            && let Some(reply) = self.send_once(request, timeout, progress)?
        {
            return Ok(reply);
        }
        // firnd has closed the connection: before this call (`must_reopen`), or before it got the request.
        self.reopen()?;
        match self.send_once(request, timeout, progress)? {
            Some(reply) => Ok(reply),
            None => Err(self.closed_error()),
        }
    }

    /// Sends a request to firnd, the process that serves the mount, and returns the answer. Each progress message
    /// before it is passed to `progress`. `timeout` limits each read and write of the socket, not the whole request.
    ///
    /// Returns `None` if firnd had closed the connection before. It then did not carry out the request, so the caller
    /// may reconnect and send it again (`must_reopen` is set). A refusal is an error.
    fn send_once(
        &mut self,
        request: &Request,
        timeout: Option<Duration>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Option<Reply>, ClientError> {
        let send_error = match self.send_request(request, timeout) {
            Ok(()) => None,
            // A firnd that refuses or closes a connection sends the reason first, often before this request is sent.
            // So if the other end is closed, read that message before the failure to send is reported.
            Err(error) if is_closed_by_peer(&error) => Some(error),
            Err(error) => return Err(self.io_error(error)),
        };
        // The firnd of another user may be any program. It could send progress messages without end, so the whole
        // answer gets a deadline, too.
        let is_bounded = timeout.is_some() && self.mount.is_of_another_user();
        let deadline = is_bounded.then(|| Instant::now() + Duration::from_secs(ANSWER_S));
        loop {
            match self.read_reply_after(send_error.as_ref(), deadline)? {
                Reply::Progress {
                    bytes_left,
                    files_left,
                    phase,
                } => progress(Progress {
                    bytes_left,
                    files_left,
                    phase,
                }),
                Reply::Error { errno, message } => {
                    return Err(ClientError::Refused { errno, message });
                }
                Reply::Busy {
                    connections,
                    holders,
                } => return Err(self.busy_error(connections, holders)),
                Reply::Closed => {
                    self.must_reopen = true;
                    return Ok(None);
                }
                answer => return Ok(Some(answer)),
            }
        }
    }

    fn send_request(&mut self, request: &Request, timeout: Option<Duration>) -> io::Result<()> {
        let mut line = serde_json::to_vec(request).expect("a request is plain JSON");
        line.push(b'\n');
        let stream = self.stream.get_mut();
        stream.set_read_timeout(timeout)?;
        stream.set_write_timeout(timeout)?;
        send_all(stream, &line)
    }

    /// Reads the next message. `send_error` is the error of sending the request, if there was one.
    ///
    /// After such an error, only a message that gives the reason for it is returned, such as `Busy`. If there is no
    /// such message, the error itself is returned.
    fn read_reply_after(
        &mut self,
        send_error: Option<&io::Error>,
        deadline: Option<Instant>,
    ) -> Result<Reply, ClientError> {
        let read = self.read_reply(deadline);
        let Some(send_error) = send_error else {
            return read.map_err(|error| match error {
                ReadError::Io(error) => self.io_error(error),
                ReadError::Nonsense(what) => ClientError::Nonsense { what },
            });
        };
        match read {
            Ok(reason @ (Reply::Error { .. } | Reply::Busy { .. } | Reply::Closed)) => Ok(reason),
            _ => Err(self.io_error(send_error.kind().into())),
        }
    }

    /// Reads one message, a line of JSON, of firnd, the process that serves the mount. Fails if the line is not
    /// complete by `deadline`, is too long, or is no valid message. Without a deadline, only the socket's time limit
    /// for each read applies.
    fn read_reply(&mut self, deadline: Option<Instant>) -> Result<Reply, ReadError> {
        let bytes_max = if self.mount.is_of_another_user() {
            OTHERS_REPLY_BYTES_MAX
        } else {
            REPLY_BYTES_MAX
        };
        let mut line = Vec::new();
        loop {
            if let Some(deadline) = deadline {
                self.set_read_deadline(deadline).map_err(ReadError::Io)?;
            }
            let buffer = match self.stream.fill_buf() {
                Ok(buffer) => buffer,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(ReadError::Io(error)),
            };
            let newline = buffer.iter().position(|byte| *byte == b'\n');
            let count = match newline {
                Some(index) => index + 1,
                None => buffer.len(),
            };
            line.extend_from_slice(&buffer[..count]);
            self.stream.consume(count);
            if newline.is_some() {
                break;
            }
            if count == 0 {
                return Err(ReadError::Io(io::ErrorKind::UnexpectedEof.into()));
            }
            if line.len() > bytes_max {
                let what = format!("an answer of more than {bytes_max} bytes");
                return Err(ReadError::Nonsense(what));
            }
        }
        serde_json::from_slice(&line).map_err(|error| ReadError::Nonsense(error.to_string()))
    }

    /// Limits the next read to the time until a deadline. Fails if the deadline has passed.
    fn set_read_deadline(&self, deadline: Instant) -> io::Result<()> {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.get_ref().set_read_timeout(Some(remaining))
    }

    /// Returns the error for a connection that firnd refused to make room for others.
    fn busy_error(&self, connections: u32, holders: Vec<Holder>) -> ClientError {
        ClientError::Busy {
            mount_point: self.mount.mount_point.clone(),
            connections,
            holders,
        }
    }

    /// Returns the error for a connection that firnd closed to make room for others. firnd then names no holders.
    fn closed_error(&self) -> ClientError {
        self.busy_error(0, Vec::new())
    }

    /// Returns the error for a failed read or write of the connection to firnd, the process that serves the mount. A
    /// timeout means that firnd is silent, and an end of the connection that firnd is gone.
    fn io_error(&self, error: io::Error) -> ClientError {
        let mount_point = self.mount.mount_point.clone();
        let log = self.mount.files().log;
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let peer = firn_trust::socket_peer(self.stream.get_ref()).ok();
                let pid = match peer.and_then(|peer| peer.pid) {
                    Some(pid) => pid.to_string(),
                    None => "unknown".to_owned(),
                };
                ClientError::Silent {
                    mount_point,
                    seconds: ANSWER_S,
                    pid,
                    log,
                }
            }
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset => ClientError::Gone { mount_point, log },
            _ => ClientError::Io {
                what: format!("the control socket of {}", quoted_path(&mount_point)),
                error,
            },
        }
    }
}

/// A firnd process that is about to end.
pub struct Process {
    /// pidfd of the process. `None` if the process is in another PID namespace.
    pidfd: Option<OwnedFd>,
    /// A connection to firnd. firnd keeps it open as long as it lives, and the kernel closes it afterwards.
    socket: Option<UnixStream>,
    /// Process id, as firnd reported it.
    pub id: u32,
}

impl Process {
    /// Waits until the process has ended and has closed every file. Returns false if it has not ended within `limit`,
    /// or if its end cannot be observed.
    pub fn wait(&self, limit: Option<Duration>) -> bool {
        let mut poll_fd = match (&self.pidfd, &self.socket) {
            (Some(pidfd), _) => PollFd::new(pidfd, PollFlags::IN),
            // Wait for a hang-up only: to wait for input would also end at an unread answer of a living process.
            (None, Some(socket)) => PollFd::new(socket, PollFlags::RDHUP),
            (None, None) => return false,
        };
        let deadline = limit.map(|limit| Instant::now() + limit);
        loop {
            let timeout = deadline.and_then(|deadline| {
                let remaining = deadline.saturating_duration_since(Instant::now());
                Timespec::try_from(remaining).ok()
            });
            match poll(std::slice::from_mut(&mut poll_fd), timeout.as_ref()) {
                Ok(0) => return false,
                Ok(_) => return true,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

/// Error of reading a message of firnd.
enum ReadError {
    /// The stream could not be read, or it ended.
    Io(io::Error),
    /// The bytes are no valid message. Contains the reason.
    Nonsense(String),
}

/// Connects to firnd, the process that serves `mount`, over its socket in the runtime directory of the user that
/// mounted. Nothing is sent yet.
///
/// Fails if the mount is of another user than that of this process, unless this process runs as root. Also fails if the
/// directory or the process at the other end does not belong to the user of the mount.
fn connect(mount: &Mount) -> Result<UnixStream, ClientError> {
    if mount.is_of_another_user() && !rustix::process::geteuid().is_root() {
        return Err(not_yours_error(mount));
    }
    if open_runtime_dir(&mount.runtime_dir, mount.user_id)?.is_none() {
        return Err(no_socket_error(mount));
    }
    let socket = mount.files().socket;
    let stream = UnixStream::connect(&socket).map_err(|error| connect_error(mount, error))?;
    if let Err(why) = firn_trust::check_peer(&stream, mount.user_id) {
        return Err(ClientError::Stranger {
            mount_point: mount.mount_point.clone(),
            socket,
            why,
        });
    }
    Ok(stream)
}

/// Whether an error of sending means that the other end is closed.
fn is_closed_by_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

/// Sends all bytes. Fails with EPIPE, without a signal, if the other end is closed.
fn send_all(stream: &UnixStream, bytes: &[u8]) -> io::Result<()> {
    let mut unsent = bytes;
    while !unsent.is_empty() {
        match rustix::net::send(stream, unsent, SendFlags::NOSIGNAL) {
            Ok(count) => unsent = &unsent[count..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Returns the error for a valid message that is no answer to the request.
fn unexpected_reply(reply: &Reply) -> ClientError {
    let mut what = serde_json::to_string(reply).unwrap_or_default();
    what.truncate(what.floor_char_boundary(SHOWN_REPLY_BYTES_MAX));
    ClientError::Nonsense { what }
}

/// Returns the error for a failed connect(2) to the socket of `mount`.
fn connect_error(mount: &Mount, error: io::Error) -> ClientError {
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => no_socket_error(mount),
        io::ErrorKind::PermissionDenied => not_yours_error(mount),
        _ => ClientError::Io {
            what: quoted_path(&mount.files().socket),
            error,
        },
    }
}

fn not_yours_error(mount: &Mount) -> ClientError {
    ClientError::NotYours {
        mount_point: mount.mount_point.clone(),
        user_id: mount.user_id,
    }
}

/// Returns the error for a missing socket of firnd, the process that serves `mount`.
///
/// The socket may have been removed, or may be in another runtime directory (a user can set it). The kernel is
/// therefore asked whether firnd is alive.
fn no_socket_error(mount: &Mount) -> ClientError {
    let mount_point = mount.mount_point.clone();
    match mount.liveness(Duration::from_secs(ANSWER_S)) {
        Liveness::Dead => ClientError::Dead {
            backing: mount.backing.clone(),
            mount_point,
        },
        Liveness::Alive => ClientError::NoSocket {
            mount_point,
            runtime_dir: mount.runtime_dir.clone(),
        },
        Liveness::Silent => ClientError::Silent {
            mount_point,
            seconds: ANSWER_S,
            pid: "unknown".into(),
            log: mount.files().log,
        },
        Liveness::Unknown(errno) => ClientError::Io {
            what: format!(
                "the socket of the firnd of {} is not in {}, and the kernel does not tell whether that firnd is alive",
                quoted_path(&mount_point),
                quoted_path(&mount.runtime_dir)
            ),
            error: errno.into(),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::LazyLock;

    use super::*;

    fn mount() -> Mount {
        Mount {
            backing: "/no/such/backing".into(),
            mount_point: "/no/such/mount".into(),
            user_id: rustix::process::geteuid().as_raw(),
            is_tree: false,
            runtime_dir: "/no/such/runtime".into(),
        }
    }

    /// Returns a connection to a thread that acts as firnd: it sends these lines, each after it has read one request.
    fn with_replies(replies: Vec<&'static str>) -> Result<Connection, ClientError> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut theirs = BufReader::new(theirs);
            for reply in replies {
                let mut request = String::new();
                theirs.read_line(&mut request).unwrap();
                theirs.get_mut().write_all(reply.as_bytes()).unwrap();
            }
        });
        Connection::from_stream(&mount(), ours, false)
    }

    /// The first message of a firnd of this version.
    static HELLO: LazyLock<String> = LazyLock::new(|| {
        format!(
            "{{\"reply\":\"hello\",\"protocol\":{PROTOCOL_VERSION},\"version\":\"0.1.0\",\"pid\":7,\"incarnation\":\"a-1\"}}\n"
        )
    });
    const CLOSED: &str = "{\"reply\":\"closed\"}\n";

    /// Starts a thread that acts as firnd and serves one connection after the other. It sends the lines of `replies` on
    /// each connection, each as the answer to one request, and closes it. The thread returns the requests that it read.
    fn serving(
        dir: &std::path::Path,
        replies: Vec<Vec<String>>,
    ) -> (Mount, std::thread::JoinHandle<Vec<String>>) {
        let mount = Mount {
            runtime_dir: dir.to_owned(),
            ..mount()
        };
        let listener = std::os::unix::net::UnixListener::bind(mount.files().socket).unwrap();
        let served = std::thread::spawn(move || {
            let mut requests = Vec::new();
            for replies in replies {
                let mut stream = BufReader::new(listener.accept().unwrap().0);
                for reply in replies {
                    // A `closed` message comes without a request.
                    if reply != CLOSED {
                        let mut request = String::new();
                        stream.read_line(&mut request).unwrap();
                        requests.push(request);
                    }
                    stream.get_mut().write_all(reply.as_bytes()).unwrap();
                }
            }
            requests
        });
        (mount, served)
    }

    fn private_dir() -> tempfile::TempDir {
        let mode: std::fs::Permissions = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        tempfile::Builder::new()
            .permissions(mode)
            .tempdir()
            .unwrap()
    }

    fn lines(lines: &[&str]) -> Vec<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn regression_a_connection_that_firnd_closed_because_it_was_idle_is_opened_again_and_the_request_repeated()
     {
        let dir = private_dir();
        let done = "{\"reply\":\"done\"}\n";
        let replies = vec![lines(&[&HELLO, done, CLOSED]), lines(&[&HELLO, done])];
        let (mount, served) = serving(dir.path(), replies);
        let mut connection = Connection::open(&mount).unwrap();
        connection.request_done(&Request::ClearErrors).unwrap();
        connection
            .transaction(&Request::Begin {
                path: "x".into(),
                owner: firn_protocol::Owner::None,
                create: None,
            })
            .unwrap();
        drop(connection);
        let requests = served.join().unwrap();
        let begun = requests
            .iter()
            .filter(|request| request.contains("begin"))
            .count();
        assert_eq!((requests.len(), begun), (4, 1), "{requests:?}");
    }

    #[test]
    fn a_request_is_repeated_once_and_never_to_another_firnd() {
        let dir = private_dir();
        let (mount, _) = serving(
            dir.path(),
            vec![lines(&[&HELLO, CLOSED]), lines(&[&HELLO, CLOSED])],
        );
        let mut connection = Connection::open(&mount).unwrap();
        let error = connection
            .request_done(&Request::ClearErrors)
            .err()
            .unwrap();
        assert_eq!((error.exit_code(), error.errno()), (12, 11), "{error}");
        let dir = private_dir();
        let other = HELLO.replace("a-1", "a-2");
        let (mount, _) = serving(dir.path(), vec![lines(&[&HELLO, CLOSED]), lines(&[&other])]);
        let mut connection = Connection::open(&mount).unwrap();
        assert!(matches!(
            connection.request_done(&Request::ClearErrors),
            Err(ClientError::Gone { .. })
        ));
    }

    #[test]
    fn who_holds_all_connections_is_named() {
        let holders = "[{\"pid\":12,\"connections\":60},{\"pid\":0,\"connections\":1}]";
        let busy = format!("{{\"reply\":\"busy\",\"connections\":64,\"holders\":{holders}}}\n");
        let error = with_replies(vec![Box::leak(busy.into_boxed_str())])
            .err()
            .unwrap();
        let text = error.to_string();
        assert!(
            text.contains("64 connections") && text.contains("process 12 has 60"),
            "{text}"
        );
        assert_eq!((error.exit_code(), error.errno()), (12, 11));
    }

    #[test]
    fn progress_is_passed_on_until_the_answer() {
        let lines = "{\"reply\":\"progress\",\"bytes_left\":9,\"files_left\":1,\"phase\":\"draining\"}\n{\"reply\":\"unmounted\"}\n";
        let mut connection = with_replies(vec![&*HELLO, lines]).unwrap();
        let mut seen = Vec::new();
        connection
            .unmount(false, HeldPolicy::Drain, &mut |progress| {
                seen.push(progress.bytes_left)
            })
            .unwrap()
            .1
            .unwrap();
        assert_eq!((connection.pid, seen), (7, vec![9]));
    }

    #[test]
    fn another_protocol_is_refused_with_both_versions() {
        let hello = "{\"reply\":\"hello\",\"protocol\":9,\"version\":\"3.0\",\"pid\":7,\"incarnation\":\"\"}\n";
        let error = with_replies(vec![hello]).err().unwrap().to_string();
        assert!(
            error.starts_with(&format!(
                "firnd 3.0 speaks protocol 9, this firn {PROTOCOL_VERSION};"
            )),
            "{error}"
        );
    }

    #[test]
    fn a_firnd_that_ends_before_its_answer_is_told_from_one_that_refuses() {
        assert!(matches!(
            with_replies(vec!["{\"reply\":"]),
            Err(ClientError::Gone { .. })
        ));
        let refusal = "{\"reply\":\"error\",\"errno\":16,\"message\":\"busy\"}\n";
        assert!(matches!(
            with_replies(vec![refusal]),
            Err(ClientError::Refused { errno: 16, .. })
        ));
        assert!(matches!(
            with_replies(vec!["what?\n"]),
            Err(ClientError::Nonsense { .. })
        ));
    }

    /// Proves S-priv-15 for a peer that sends a byte now and then, endless progress messages, or an endless line.
    #[test]
    fn regression_what_another_user_s_firnd_answers_is_bounded() {
        let mount = Mount {
            user_id: rustix::process::geteuid().as_raw() + 1,
            ..mount()
        };
        let ask = |line: &'static [u8], pause: Duration| {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            std::thread::spawn(move || {
                while theirs.write_all(line).is_ok() {
                    std::thread::sleep(pause);
                }
            });
            Connection::from_stream(&mount, ours, false).err().unwrap()
        };
        let dripped = ask(b" ", Duration::from_millis(100));
        assert!(matches!(dripped, ClientError::Silent { .. }), "{dripped}");
        let progress =
            b"{\"reply\":\"progress\",\"bytes_left\":9,\"files_left\":1,\"phase\":\"\"}\n";
        let busy = ask(progress, Duration::from_millis(100));
        assert!(matches!(busy, ClientError::Silent { .. }), "{busy}");
        let endless = ask(&[b' '; 1 << 16], Duration::ZERO);
        assert!(matches!(endless, ClientError::Nonsense { .. }), "{endless}");
    }

    #[test]
    fn regression_a_refusal_that_came_before_the_request_is_told() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs
            .write_all(b"{\"reply\":\"error\",\"errno\":11,\"message\":\"too many\"}\n")
            .unwrap();
        drop(theirs);
        let refused = Connection::from_stream(&mount(), ours, false)
            .err()
            .unwrap();
        assert!(
            matches!(refused, ClientError::Refused { errno: 11, .. }),
            "{refused}"
        );
    }

    #[test]
    fn regression_a_mount_without_its_socket_is_dead_only_if_the_kernel_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let alive = Mount {
            mount_point: dir.path().to_owned(),
            ..mount()
        };
        assert!(matches!(
            Connection::open(&alive),
            Err(ClientError::NoSocket { .. })
        ));
        // The kernel's mount table does not have this mount.
        assert!(matches!(
            Connection::open(&mount()),
            Err(ClientError::Io { .. })
        ));
        let tree = Mount {
            is_tree: true,
            ..mount()
        };
        assert!(matches!(
            Connection::open(&tree),
            Err(ClientError::Dead { .. })
        ));
    }

    #[test]
    fn regression_a_runtime_directory_that_others_may_enter_is_not_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let mount = Mount {
            runtime_dir: dir.path().to_owned(),
            ..mount()
        };
        let _listener = std::os::unix::net::UnixListener::bind(mount.files().socket).unwrap();
        std::fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        assert!(matches!(
            Connection::open(&mount),
            Err(ClientError::Paths(_))
        ));
    }
}
