//! The puller's end of a connection, and the ways to an agent.

use std::io;
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firn_protocol::path::BytePath;

use crate::auth::{Key, Terms, begin_handshake};
use crate::block_mac::BlockHasher;
use crate::encryption::{Encrypt, Side};
use crate::error::{PullError, WireError};
use crate::key_file::KeyFile;
use crate::link::Link;
use crate::message::{
    ENTRIES_MAX, Entry, ErrorKind, FRAME_BYTES_MAX, LIST_NAME_BYTES_MAX, PATH_BYTES_MAX, Reply,
    Request,
};
use crate::munge::Munge;
use crate::transport::Stream;

/// How long an address may take to answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How long the handshake may take; an ssh may have to ask for a password.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
const SSH_LIMIT: Duration = Duration::from_secs(120);
/// How long one answer may take, all of it: a block that comes from a slow backing.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// A list may take longer, as long as at least this many bytes of names come a second.
const LIST_BYTES_PER_S_MIN: usize = 8 << 10;

/// How an agent is reached.
#[derive(Clone, Debug)]
pub enum Route {
    /// By what it left in the backing.
    Backing {
        /// The backing.
        dir: PathBuf,
        /// Whether bytes are encrypted on their way.
        encrypt: Encrypt,
    },
    /// By a copy of its key file.
    KeyFile {
        /// Path of the copy.
        path: PathBuf,
        /// Where it listens, if not where the file says.
        address: Option<String>,
        /// Whether bytes are encrypted on their way.
        encrypt: Encrypt,
    },
    /// MUNGE identifies both sides.
    Munge {
        /// Where the agent listens.
        address: String,
        /// How munged is reached.
        munge: Munge,
        /// Whether bytes are encrypted on their way.
        encrypt: Encrypt,
    },
    /// It is started by ssh and ends with the connection.
    Ssh {
        /// The program and its arguments before the host.
        command: Vec<String>,
        /// What is run there.
        firn: String,
    },
}

/// A connection to an agent, with the agent at its other end.
pub struct Peer {
    host: String,
    /// Before the process that carries it: it ends when its pipes are closed.
    link: Link<Stream>,
    /// This host's address on the way there; none through ssh.
    near: Option<IpAddr>,
    /// When the answer that comes now is late.
    answer_until: Instant,
    _ssh: Option<Ssh>,
}

/// What an agent at an address is asked to believe.
#[derive(Clone, Copy)]
enum Trust<'a> {
    Key(&'a Key),
    Munge(&'a Munge),
}

/// A process of ours.
struct Ssh(Child);

impl Drop for Ssh {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    /// Connects to the agent on `host`.
    pub fn connect(host: &str, route: &Route) -> Result<Self, PullError> {
        let bare = host.rsplit('@').next().unwrap_or(host);
        match route {
            Route::Backing { dir, encrypt } => {
                let file = KeyFile::load(dir, bare)?;
                Self::connect_tcp(bare, &file.address, Trust::Key(&file.key), *encrypt)
            }
            Route::KeyFile {
                path,
                address,
                encrypt,
            } => {
                let file = KeyFile::load_from(path)?;
                let address = address.as_ref().unwrap_or(&file.address);
                Self::connect_tcp(bare, address, Trust::Key(&file.key), *encrypt)
            }
            Route::Munge {
                address,
                munge,
                encrypt,
            } => Self::connect_tcp(bare, address, Trust::Munge(munge), *encrypt),
            Route::Ssh { command, firn } => Self::connect_ssh(host, command, firn),
        }
    }

    fn connect_tcp(
        host: &str,
        address: &str,
        trust: Trust<'_>,
        encrypt: Encrypt,
    ) -> Result<Self, PullError> {
        let failed = |error| PullError::Connect {
            host: host.into(),
            address: address.into(),
            error,
        };
        let socket = connect_any(address).map_err(failed)?;
        let near = Some(socket.local_addr().map_err(failed)?.ip());
        let side = Side::of_tcp(&socket, encrypt).map_err(failed)?;
        let (key, munge) = match trust {
            Trust::Key(key) => (Some(key), None),
            Trust::Munge(munge) => (None, Some(munge)),
        };
        let terms = Terms { key, munge, side };
        let stream = Stream::over_tcp(socket).map_err(failed)?;
        let peer = Self::greet(host, stream, &terms, HANDSHAKE_LIMIT, None)?;
        Ok(Self { near, ..peer })
    }

    fn connect_ssh(host: &str, command: &[String], firn: &str) -> Result<Self, PullError> {
        let (program, arguments) = command.split_first().expect("ssh has a name");
        let failed = |error| PullError::Ssh {
            program: program.clone(),
            error,
        };
        let mut child = Command::new(program)
            .args(arguments)
            .args(["--", host, firn, "agent", "--stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let input = child.stdout.take().expect("it is a pipe");
        let output = child.stdin.take().expect("it is a pipe");
        let ssh = Ssh(child);
        let stream =
            Stream::over_pipes(OwnedFd::from(input), OwnedFd::from(output)).map_err(failed)?;
        Self::greet(host, stream, &Terms::of_pipes(), SSH_LIMIT, Some(ssh))
    }

    fn greet(
        host: &str,
        stream: Stream,
        terms: &Terms<'_>,
        limit: Duration,
        ssh: Option<Ssh>,
    ) -> Result<Self, PullError> {
        let mut link = Link::over(stream);
        let greeted = begin_handshake(&mut link, terms, Instant::now() + limit);
        greeted.map_err(|error| PullError::Wire {
            host: host.into(),
            error,
        })?;
        Ok(Self {
            host: host.into(),
            link,
            near: None,
            answer_until: Instant::now(),
            _ssh: ssh,
        })
    }

    /// The source host, for messages.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Whether all that goes over the connection is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.link.is_encrypted()
    }

    /// This host's address on the way to it; none through ssh.
    pub(crate) fn near(&self) -> Option<IpAddr> {
        self.near
    }

    /// Sends a request; its answer comes after those to the requests before.
    pub(crate) fn send(&mut self, request: &Request) -> Result<(), PullError> {
        let sent = self.link.send(request, Instant::now() + ANSWER_LIMIT);
        sent.map_err(|error| self.broken(error))
    }

    /// The first reply of an answer; an error that the agent tells is one here.
    pub(crate) fn receive(&mut self) -> Result<Reply, PullError> {
        self.answer_until = Instant::now() + ANSWER_LIMIT;
        self.receive_more()
    }

    /// The next reply of the same answer.
    pub(crate) fn receive_more(&mut self) -> Result<Reply, PullError> {
        match self.link.receive(FRAME_BYTES_MAX, self.answer_until) {
            Ok(Reply::Error { kind, message }) => Err(PullError::Remote {
                host: self.host.clone(),
                kind,
                message,
            }),
            Ok(reply) => Ok(reply),
            Err(error) => Err(self.broken(error)),
        }
    }

    /// Bytes that follow a [`Reply::Bytes`].
    pub(crate) fn receive_bytes(&mut self, into: &mut [u8]) -> Result<(), PullError> {
        let received = self.link.receive_data(into, self.answer_until);
        received.map_err(|error| self.broken(error))
    }

    /// What authenticates the bytes of an answer; none where they are encrypted.
    pub(crate) fn block_hasher(&self) -> Option<BlockHasher> {
        self.link.block_hasher()
    }

    /// What is at and below a path, parents first, and that path below the mount point.
    pub(crate) fn list(&mut self, path: &BytePath) -> Result<(BytePath, Vec<Entry>), PullError> {
        self.receive_list(&Request::List { path: path.clone() })
    }

    /// What firnd holds there at and below a path below the mount point, with the directories that lead to it.
    pub(crate) fn list_held(
        &mut self,
        path: &BytePath,
    ) -> Result<(BytePath, Vec<Entry>), PullError> {
        self.receive_list(&Request::ListHeld { path: path.clone() })
    }

    /// Bounded in number, names and time, whatever the agent sends.
    fn receive_list(&mut self, request: &Request) -> Result<(BytePath, Vec<Entry>), PullError> {
        self.send(request)?;
        let mut all = Vec::new();
        let mut name_bytes = 0;
        let mut reply = self.receive()?;
        let begun = Instant::now() + ANSWER_LIMIT;
        loop {
            match reply {
                Reply::Entries { entries } => {
                    name_bytes += self.check_entries(&entries)?;
                    all.extend(entries);
                }
                Reply::Listed { path } => return Ok((path, all)),
                other => return Err(self.out_of_turn(&other)),
            }
            if all.len() > ENTRIES_MAX || name_bytes > LIST_NAME_BYTES_MAX {
                return Err(self.implausible("more files than an agent lists"));
            }
            self.answer_until =
                begun + Duration::from_secs((name_bytes / LIST_BYTES_PER_S_MIN) as u64);
            reply = self.receive_more()?;
        }
    }

    /// Bytes of the names of a part of a list, in which there is something, and no name that no host has.
    fn check_entries(&self, entries: &[Entry]) -> Result<usize, PullError> {
        if entries.is_empty() {
            return Err(self.implausible("a part of a list with nothing in it"));
        }
        let is_long =
            |entry: &Entry| entry.path.as_bytes().len().max(entry.target_bytes()) > PATH_BYTES_MAX;
        if entries.iter().any(is_long) {
            return Err(self.implausible(format!("a name of more than {PATH_BYTES_MAX} bytes")));
        }
        Ok(entries.iter().map(Entry::name_bytes).sum())
    }

    // ---- partners ------------------------------------------------------------------------------

    /// Asks the other host to be the partner of `host`.
    pub(crate) fn adopt(&mut self, host: &str) -> Result<(), PullError> {
        self.done(&Request::Adopt { host: host.into() })
    }

    /// Follows as the partner `host`; gives the firnd that counts the changes and its arena.
    pub(crate) fn follow(&mut self, host: &str) -> Result<(String, String), PullError> {
        self.send(&Request::Follow { host: host.into() })?;
        match self.receive()? {
            Reply::Following { incarnation, arena } => Ok((incarnation, arena)),
            other => Err(self.out_of_turn(&other)),
        }
    }

    /// There is a copy of a file as it was at `changes`.
    pub(crate) fn mark(&mut self, path: &BytePath, changes: u64) -> Result<(), PullError> {
        let path = path.clone();
        self.done(&Request::Mark { path, changes })
    }

    /// What people should know of this partner.
    pub(crate) fn note(&mut self, text: &str) -> Result<(), PullError> {
        self.done(&Request::Note { text: text.into() })
    }

    /// This partner lives.
    pub(crate) fn beat(&mut self) -> Result<(), PullError> {
        self.done(&Request::Beat)
    }

    fn done(&mut self, request: &Request) -> Result<(), PullError> {
        self.send(request)?;
        match self.receive()? {
            Reply::Done => Ok(()),
            other => Err(self.out_of_turn(&other)),
        }
    }

    /// A reply that answers something else.
    pub(crate) fn out_of_turn(&self, reply: &Reply) -> PullError {
        let mut text = format!("{reply:?}");
        text.truncate(text.floor_char_boundary(80));
        self.broken(WireError::OutOfTurn(text))
    }

    /// Something that no agent of ours says.
    pub(crate) fn implausible(&self, what: impl Into<String>) -> PullError {
        PullError::Implausible {
            host: self.host.clone(),
            what: what.into(),
        }
    }

    /// What was held does not hold any more.
    pub(crate) fn stale(&self, message: impl Into<String>) -> PullError {
        PullError::Remote {
            host: self.host.clone(),
            kind: ErrorKind::Stale,
            message: message.into(),
        }
    }

    fn broken(&self, error: WireError) -> PullError {
        PullError::Wire {
            host: self.host.clone(),
            error,
        }
    }
}

/// The first of the addresses of a name that answers.
fn connect_any(address: &str) -> io::Result<TcpStream> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, CONNECT_LIMIT) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}
