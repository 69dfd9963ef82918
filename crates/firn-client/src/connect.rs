//! The control socket: a request, progress, an answer.
//!
//! Promises
//! * A [`Connection`] exists only after firnd has said Hello in our protocol.
//! * Hello and short questions fail after `ANSWER_S` seconds of silence; waits may take for ever.
//! * A firnd that is gone is an error and no SIGPIPE: the program may be anybody's.

use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use firn_format::protocol::{ChunkList, DataRegion, FileStatus, PROTOCOL_VERSION, Reply, Request, Status};
use rustix::net::SendFlags;

use crate::error::ClientError;
use crate::find::Mount;

/// Seconds that firnd may take to answer a short question. firnd answers from memory, so only a stopped
/// or starved one needs longer than a moment.
const ANSWER_S: u64 = 10;
/// Bytes of the longest answer that is taken: 10^6 pending files with long paths.
const REPLY_BYTES_MAX: u64 = 1 << 30;

/// How far a long request is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes still to be drained.
    pub bytes_left: u64,
    /// Files that still have some.
    pub files_left: u64,
    /// `draining`, `syncing`, `unmounting`.
    pub phase: String,
}

/// A connection to a firnd that speaks our protocol.
pub struct Connection {
    mount: Mount,
    stream: BufReader<UnixStream>,
    /// Package version of firnd.
    pub version: String,
    /// Its process id.
    pub pid: u32,
}

impl Connection {
    /// Connects to the firnd of `mount`.
    pub fn open(mount: &Mount) -> Result<Self, ClientError> {
        let stream = UnixStream::connect(mount.files().socket).map_err(|error| refused(mount, error))?;
        Self::over(mount, stream)
    }

    fn over(mount: &Mount, stream: UnixStream) -> Result<Self, ClientError> {
        let stream = BufReader::new(stream);
        let mut connection = Self { mount: mount.clone(), stream, version: String::new(), pid: 0 };
        match connection.ask(&Request::Hello)? {
            Reply::Hello { protocol, version, pid } if protocol == PROTOCOL_VERSION => {
                connection.version = version;
                connection.pid = pid;
                Ok(connection)
            }
            Reply::Hello { protocol, version, .. } => {
                Err(ClientError::Protocol { found: protocol, expected: PROTOCOL_VERSION, version })
            }
            other => Err(nonsense(&other)),
        }
    }

    /// The state of the mount.
    pub fn status(&mut self) -> Result<Status, ClientError> {
        match self.ask(&Request::Status)? {
            Reply::Status(status) => Ok(*status),
            other => Err(nonsense(&other)),
        }
    }

    /// Pending files at or below `path`.
    pub fn files(&mut self, path: &str) -> Result<Vec<FileStatus>, ClientError> {
        match self.ask(&Request::Files { path: path.to_owned() })? {
            Reply::Files { files } => Ok(files),
            other => Err(nonsense(&other)),
        }
    }

    /// Where the mount's data can be mapped.
    pub fn region(&mut self) -> Result<DataRegion, ClientError> {
        match self.ask(&Request::Region)? {
            Reply::Region(region) => Ok(region),
            other => Err(nonsense(&other)),
        }
    }

    /// Where each byte of the file at `path` is. It holds until it is released or the connection ends.
    pub fn chunks(&mut self, path: &str) -> Result<ChunkList, ClientError> {
        match self.ask(&Request::Chunks { path: path.to_owned() })? {
            Reply::Chunks(list) => Ok(list),
            other => Err(nonsense(&other)),
        }
    }

    /// Whether the file was changed since its list was made. Any answer says that the list held until now.
    pub fn check_chunks(&mut self, list: u64) -> Result<bool, ClientError> {
        match self.ask(&Request::CheckChunks { list })? {
            Reply::ChunksChecked { changed } => Ok(changed),
            other => Err(nonsense(&other)),
        }
    }

    /// A list is not used any more.
    pub fn release_chunks(&mut self, list: u64) -> Result<(), ClientError> {
        self.done(&Request::ReleaseChunks { list })
    }

    /// The metrics as Prometheus text.
    pub fn metrics(&mut self) -> Result<String, ClientError> {
        match self.ask(&Request::Metrics)? {
            Reply::Metrics { text } => Ok(text),
            other => Err(nonsense(&other)),
        }
    }

    /// A short request whose only answer is that it is done.
    pub fn done(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.ask(request)? {
            Reply::Done => Ok(()),
            other => Err(nonsense(&other)),
        }
    }

    /// Frees the memory of drained data: bytes freed, bytes that stay because they are not drained.
    pub fn evict(&mut self, path: &str) -> Result<(u64, u64), ClientError> {
        match self.ask(&Request::Evict { path: path.to_owned() })? {
            Reply::Evicted { freed_bytes, held_bytes } => Ok((freed_bytes, held_bytes)),
            other => Err(nonsense(&other)),
        }
    }

    /// Keeps files in memory, or no longer: their number and bytes.
    pub fn pin(&mut self, path: &str, pinned: bool) -> Result<(u64, u64), ClientError> {
        match self.ask(&Request::Pin { path: path.to_owned(), pinned })? {
            Reply::Pinned { files, bytes } => Ok((files, bytes)),
            other => Err(nonsense(&other)),
        }
    }

    /// A request that may take for ever ([`Request::Wait`], [`Request::Unmount`]).
    pub fn wait(&mut self, request: &Request, progress: &mut dyn FnMut(Progress)) -> Result<(), ClientError> {
        match self.exchange(request, None, progress)? {
            Reply::Done => Ok(()),
            other => Err(nonsense(&other)),
        }
    }

    /// A request about a transaction: the number of a commit, and the nodes that have not carried it out yet.
    pub fn transaction(&mut self, request: &Request) -> Result<Option<(u64, Vec<String>)>, ClientError> {
        match self.exchange(request, None, &mut |_| {})? {
            Reply::Done => Ok(None),
            Reply::Committed { id, behind } => Ok(Some((id, behind))),
            other => Err(nonsense(&other)),
        }
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        self.exchange(request, Some(Duration::from_secs(ANSWER_S)), &mut |_| {})
    }

    fn exchange(
        &mut self,
        request: &Request,
        timeout: Option<Duration>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Reply, ClientError> {
        let mut line = serde_json::to_vec(request).expect("a request is plain JSON");
        line.push(b'\n');
        let stream = self.stream.get_mut();
        let sent = stream
            .set_read_timeout(timeout)
            .and_then(|()| stream.set_write_timeout(timeout))
            .and_then(|()| send_all(stream, &line));
        sent.map_err(|error| self.broken(error))?;
        loop {
            match self.read_reply()? {
                Reply::Progress { bytes_left, files_left, phase } => {
                    progress(Progress { bytes_left, files_left, phase })
                }
                Reply::Error { errno, message } => return Err(ClientError::Refused { errno, message }),
                other => return Ok(other),
            }
        }
    }

    fn read_reply(&mut self) -> Result<Reply, ClientError> {
        let mut line = Vec::new();
        let read = (&mut self.stream).take(REPLY_BYTES_MAX).read_until(b'\n', &mut line);
        match read {
            Ok(_) if line.last() == Some(&b'\n') => serde_json::from_slice(&line)
                .map_err(|error| ClientError::Nonsense { what: error.to_string() }),
            Ok(_) => Err(self.broken(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(self.broken(error)),
        }
    }

    fn broken(&self, error: io::Error) -> ClientError {
        let (mount_point, log): (PathBuf, PathBuf) = (self.mount.mount_point.clone(), self.mount.files().log);
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                let pid = rustix::net::sockopt::socket_peercred(self.stream.get_ref())
                    .map_or_else(|_| "unknown".to_owned(), |peer| peer.pid.as_raw_nonzero().to_string());
                ClientError::Silent { mount_point, seconds: ANSWER_S, pid, log }
            }
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                ClientError::Gone { mount_point, log }
            }
            _ => ClientError::Io { what: format!("the control socket of {}", mount_point.display()), error },
        }
    }
}

fn send_all(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::net::send(stream, bytes, SendFlags::NOSIGNAL) {
            Ok(n) => bytes = &bytes[n..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

fn nonsense(reply: &Reply) -> ClientError {
    let mut what = serde_json::to_string(reply).unwrap_or_default();
    what.truncate(what.floor_char_boundary(80));
    ClientError::Nonsense { what }
}

fn refused(mount: &Mount, error: io::Error) -> ClientError {
    let (backing, mount_point) = (mount.backing.clone(), mount.mount_point.clone());
    match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ClientError::Dead { backing, mount_point }
        }
        io::ErrorKind::PermissionDenied => ClientError::NotYours { mount_point, user_id: mount.user_id },
        _ => ClientError::Io { what: mount.files().socket.display().to_string(), error },
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn mount() -> Mount {
        Mount {
            backing: "/no/such/backing".into(),
            mount_point: "/no/such/mount".into(),
            user_id: 0,
            is_tree: false,
        }
    }

    /// A firnd that sends these lines, each after it has read one request.
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
        Connection::over(&mount(), ours)
    }

    const HELLO: &str = "{\"reply\":\"hello\",\"protocol\":1,\"version\":\"0.1.0\",\"pid\":7}\n";

    #[test]
    fn progress_is_passed_on_until_the_answer() {
        let lines = "{\"reply\":\"progress\",\"bytes_left\":9,\"files_left\":1,\"phase\":\"draining\"}\n{\"reply\":\"done\"}\n";
        let mut connection = with_replies(vec![HELLO, lines]).unwrap();
        let mut seen = Vec::new();
        connection
            .wait(&Request::Unmount { force: false, keep_held: false }, &mut |progress| {
                seen.push(progress.bytes_left)
            })
            .unwrap();
        assert_eq!((connection.pid, seen), (7, vec![9]));
    }

    #[test]
    fn another_protocol_is_refused_with_both_versions() {
        let hello = "{\"reply\":\"hello\",\"protocol\":9,\"version\":\"3.0\",\"pid\":7}\n";
        let error = with_replies(vec![hello]).err().unwrap().to_string();
        assert!(error.starts_with("firnd 3.0 speaks protocol 9, this firn 1;"), "{error}");
    }

    #[test]
    fn a_firnd_that_ends_before_its_answer_is_told_from_one_that_refuses() {
        assert!(matches!(with_replies(vec!["{\"reply\":"]), Err(ClientError::Gone { .. })));
        let refusal = "{\"reply\":\"error\",\"errno\":16,\"message\":\"busy\"}\n";
        assert!(matches!(with_replies(vec![refusal]), Err(ClientError::Refused { errno: 16, .. })));
        assert!(matches!(with_replies(vec!["what?\n"]), Err(ClientError::Nonsense { .. })));
    }

    #[test]
    fn a_mount_without_its_socket_is_dead() {
        assert!(matches!(Connection::open(&mount()), Err(ClientError::Dead { .. })));
    }
}
