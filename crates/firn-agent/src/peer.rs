//! The client's end of a connection between hosts. The client, the *puller*, copies files. It connects to an *agent*,
//! which serves the files of a mount, sends requests and receives replies.
//!
//! Replies arrive in the order of the requests; further requests may be sent before a reply arrives. Whatever an agent
//! sends, a list is bounded in entries, bytes and time, and an answer in time. An error of the agent becomes a
//! [`PullError`].

use std::io;
use std::net::{IpAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use firn_protocol::path::BytePath;

use crate::auth::{HandshakeInputs, Key, begin_handshake};
use crate::block_mac::BlockHasher;
use crate::encryption::{Encrypt, Side};
use crate::error::{PullError, WireError};
use crate::key_file::KeyFile;
use crate::link::Link;
use crate::message::{
    ENTRIES_MAX, Entry, EntryList, ErrorKind, FRAME_BYTES_MAX, FirndIdentity, LIST_NAME_BYTES_MAX,
    PATH_BYTES_MAX, Reply, Request,
};
use crate::munge::Munge;
use crate::transport::Stream;

/// Maximum time to connect to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time of a handshake over TCP.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of a handshake over ssh, which may ask the user for a password.
const SSH_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time of one whole answer, such as a block from a slow backing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// A list may exceed [`ANSWER_TIMEOUT`] as long as at least this many bytes of names arrive per second.
const LIST_BYTES_PER_S_MIN: usize = 8 << 10;
/// Maximum number of bytes of an unexpected reply that an error shows.
const SHOWN_REPLY_BYTES_MAX: usize = 80;

/// How to reach and authenticate an agent.
#[derive(Clone, Debug)]
pub enum Route {
    /// By the agent's record in the backing.
    Backing {
        /// Path of the backing.
        dir: PathBuf,
        /// Whether bytes of files are encrypted.
        encrypt: Encrypt,
    },
    /// By a copy of the agent's record.
    KeyFile {
        /// Path of the copy.
        path: PathBuf,
        /// Address of the agent; `None` means the one in the record.
        address: Option<String>,
        /// Whether bytes of files are encrypted.
        encrypt: Encrypt,
    },
    /// By an address; MUNGE authenticates both sides.
    Munge {
        /// Address of the agent.
        address: String,
        /// Access to munged.
        munge: Munge,
        /// Whether bytes of files are encrypted.
        encrypt: Encrypt,
    },
    /// By ssh, which starts an agent for this connection.
    Ssh {
        /// The program ssh and its arguments before the host.
        command: Vec<String>,
        /// Path or name of the program firn on the source host.
        firn: String,
    },
}

/// A connection to an agent.
pub struct Peer {
    /// Name of the source host, for messages.
    host: String,
    /// The connection. It is dropped before `_ssh`, because ssh ends when its pipes are closed.
    link: Link<Stream>,
    /// This host's address on the connection; `None` over ssh.
    local_ip: Option<IpAddr>,
    /// Deadline of the answer that is being received.
    answer_deadline: Instant,
    _ssh: Option<SshProcess>,
}

/// How the handshake authenticates both sides.
#[derive(Clone, Copy)]
enum Authentication<'a> {
    Key(&'a Key),
    Munge(&'a Munge),
}

/// A process of ssh. Dropping it ends the process.
struct SshProcess(Child);

impl Drop for SshProcess {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Peer {
    /// Connects to the agent on `host`, which serves the files of a mount, and authenticates both sides.
    ///
    /// `route` says how: by the agent's record in the backing (the directory that the mount serves), by a copy of the
    /// record, by MUNGE, or over ssh, which starts an agent.
    pub fn connect(host: &str, route: &Route) -> Result<Self, PullError> {
        // The host may have the form `user@host` of ssh.
        let bare_host = host.rsplit('@').next().unwrap_or(host);
        match route {
            Route::Backing { dir, encrypt } => {
                let file = KeyFile::load(dir, bare_host)?;
                Self::connect_tcp(
                    bare_host,
                    &file.address,
                    Authentication::Key(&file.key),
                    *encrypt,
                )
            }
            Route::KeyFile {
                path,
                address,
                encrypt,
            } => {
                let file = KeyFile::load_from(path)?;
                let address = address.as_ref().unwrap_or(&file.address);
                Self::connect_tcp(bare_host, address, Authentication::Key(&file.key), *encrypt)
            }
            Route::Munge {
                address,
                munge,
                encrypt,
            } => Self::connect_tcp(bare_host, address, Authentication::Munge(munge), *encrypt),
            Route::Ssh { command, firn } => Self::connect_ssh(host, command, firn),
        }
    }

    /// Connects over TCP to the agent (which serves a mount's files) at `address`, and carries out the handshake, with
    /// a key or with MUNGE. `host` is only for messages. `encrypt` says whether files' bytes are encrypted.
    fn connect_tcp(
        host: &str,
        address: &str,
        authentication: Authentication<'_>,
        encrypt: Encrypt,
    ) -> Result<Self, PullError> {
        let connect_error = |error| PullError::Connect {
            host: host.into(),
            address: address.into(),
            error,
        };
        let socket = connect_to_any(address).map_err(connect_error)?;
        let local_ip = socket.local_addr().map_err(connect_error)?.ip();
        let side = Side::from_tcp(&socket, encrypt).map_err(connect_error)?;
        let (key, munge) = match authentication {
            Authentication::Key(key) => (Some(key), None),
            Authentication::Munge(munge) => (None, Some(munge)),
        };
        let inputs = HandshakeInputs { key, munge, side };
        let stream = Stream::over_tcp(socket).map_err(connect_error)?;
        let peer = Self::authenticate(host, stream, &inputs, HANDSHAKE_TIMEOUT)?;
        Ok(Self {
            local_ip: Some(local_ip),
            ..peer
        })
    }

    /// Runs ssh, which starts an agent (it serves the files of a mount) on the host, and carries out the handshake over
    /// the pipes of ssh. `command` is the ssh command with its options, and `firn` the program on the other host.
    fn connect_ssh(host: &str, command: &[String], firn: &str) -> Result<Self, PullError> {
        let (program, arguments) = command.split_first().expect("ssh has a name");
        let ssh_error = |error| PullError::Ssh {
            program: program.clone(),
            error,
        };
        let mut child = Command::new(program)
            .args(arguments)
            .args(["--", host, firn, "agent", "--stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(ssh_error)?;
        let from_agent = child.stdout.take().expect("the output of ssh is a pipe");
        let to_agent = child.stdin.take().expect("the input of ssh is a pipe");
        // From here on, an error ends the ssh process, because dropping `ssh` kills it.
        let ssh = SshProcess(child);
        let stream = Stream::over_pipes(OwnedFd::from(from_agent), OwnedFd::from(to_agent))
            .map_err(ssh_error)?;
        let peer = Self::authenticate(host, stream, &HandshakeInputs::of_pipes(), SSH_TIMEOUT)?;
        Ok(Self {
            _ssh: Some(ssh),
            ..peer
        })
    }

    /// Carries out the handshake with an agent, which serves the files of a mount, over a new stream. Fails if the
    /// agent does not have the key of `inputs`, or if the handshake takes longer than `timeout`.
    fn authenticate(
        host: &str,
        stream: Stream,
        inputs: &HandshakeInputs<'_>,
        timeout: Duration,
    ) -> Result<Self, PullError> {
        let mut link = Link::over(stream);
        let deadline = Instant::now() + timeout;
        begin_handshake(&mut link, inputs, deadline).map_err(|error| PullError::Wire {
            host: host.into(),
            error,
        })?;
        Ok(Self {
            host: host.into(),
            link,
            local_ip: None,
            answer_deadline: Instant::now(),
            _ssh: None,
        })
    }

    /// Name of the source host, for messages.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Whether bytes of files are encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.link.is_encrypted()
    }

    /// This host's address on the connection; `None` over ssh.
    pub(crate) fn local_ip(&self) -> Option<IpAddr> {
        self.local_ip
    }

    /// Sends a request. Its answer comes after the answers to earlier requests.
    pub(crate) fn send(&mut self, request: &Request) -> Result<(), PullError> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let sent = self.link.send(request, deadline);
        sent.map_err(|error| self.wire_error(error))
    }

    /// Receives the first reply of the next answer. A reply with an error is returned as an error.
    pub(crate) fn receive(&mut self) -> Result<Reply, PullError> {
        self.answer_deadline = Instant::now() + ANSWER_TIMEOUT;
        self.receive_more()
    }

    /// Receives the next reply of the same answer.
    pub(crate) fn receive_more(&mut self) -> Result<Reply, PullError> {
        match self.link.receive(FRAME_BYTES_MAX, self.answer_deadline) {
            Ok(Reply::Error { kind, message }) => Err(PullError::Remote {
                host: self.host.clone(),
                kind,
                message,
            }),
            Ok(reply) => Ok(reply),
            Err(error) => Err(self.wire_error(error)),
        }
    }

    /// Receives bytes that a [`Reply::Bytes`] has announced.
    pub(crate) fn receive_bytes(&mut self, buffer: &mut [u8]) -> Result<(), PullError> {
        let received = self.link.receive_data(buffer, self.answer_deadline);
        received.map_err(|error| self.wire_error(error))
    }

    /// Returns the hasher for the MAC of an answer; `None` if bytes of files are encrypted.
    pub(crate) fn block_hasher(&self) -> Option<BlockHasher> {
        self.link.block_hasher()
    }

    /// Lists everything at and below a path, parents first.
    pub(crate) fn list(&mut self, path: &BytePath) -> Result<EntryList, PullError> {
        self.receive_list(&Request::List { path: path.clone() })
    }

    /// Lists the files that firnd holds at and below a path, which is relative to the mount point, and the directories
    /// above them.
    pub(crate) fn list_held(&mut self, path: &BytePath) -> Result<EntryList, PullError> {
        self.receive_list(&Request::ListHeld { path: path.clone() })
    }

    /// Requests and receives a list of files from the agent, which serves the files of a mount. The list arrives in
    /// batches.
    ///
    /// Its number of entries, its bytes and its time are bounded, whatever the agent sends. The entries are not checked
    /// beyond that.
    fn receive_list(&mut self, request: &Request) -> Result<EntryList, PullError> {
        self.send(request)?;
        let mut list = Vec::new();
        let mut name_bytes = 0;
        let mut reply = self.receive()?;
        let first_deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            match reply {
                Reply::Entries { entries } => {
                    self.check_batch(&entries)?;
                    name_bytes += entries.iter().map(Entry::name_bytes).sum::<usize>();
                    list.extend(entries);
                }
                Reply::Listed { path } => {
                    return Ok(EntryList {
                        top: path,
                        entries: list,
                    });
                }
                unexpected => return Err(self.out_of_turn(&unexpected)),
            }
            if list.len() > ENTRIES_MAX || name_bytes > LIST_NAME_BYTES_MAX {
                return Err(self.implausible("more entries than a list may have"));
            }
            // A long list may take longer than one answer, if it arrives at the minimum rate or faster.
            let extra_seconds = name_bytes / LIST_BYTES_PER_S_MIN;
            self.answer_deadline = first_deadline + Duration::from_secs(extra_seconds as u64);
            reply = self.receive_more()?;
        }
    }

    /// Checks one batch of a list. Fails if the batch has no entries, or a name that is too long.
    fn check_batch(&self, entries: &[Entry]) -> Result<(), PullError> {
        if entries.is_empty() {
            return Err(self.implausible("a part of a list without entries"));
        }
        for entry in entries {
            let longest_name_bytes = entry.path.as_bytes().len().max(entry.target_bytes());
            if longest_name_bytes > PATH_BYTES_MAX {
                return Err(self.implausible(format!("a name of more than {PATH_BYTES_MAX} bytes")));
            }
        }
        Ok(())
    }

    // ---- partners ------------------------------------------------------------------------------

    /// Asks the other host to become the partner of `host`.
    pub(crate) fn request_following(&mut self, host: &str) -> Result<(), PullError> {
        self.request_done(&Request::Adopt { host: host.into() })
    }

    /// Begins to follow as the partner `host`. Returns the identity of the source's firnd.
    pub(crate) fn follow(&mut self, host: &str) -> Result<FirndIdentity, PullError> {
        self.send(&Request::Follow { host: host.into() })?;
        match self.receive()? {
            Reply::Following { incarnation, arena } => Ok(FirndIdentity { incarnation, arena }),
            unexpected => Err(self.out_of_turn(&unexpected)),
        }
    }

    /// Reports to the source that there is a copy of a file with this number of changes.
    pub(crate) fn mark_copied(&mut self, path: &BytePath, changes: u64) -> Result<(), PullError> {
        let path = path.clone();
        self.request_done(&Request::Mark { path, changes })
    }

    /// Sets the note about this partner in the source's status.
    pub(crate) fn set_note(&mut self, text: &str) -> Result<(), PullError> {
        self.request_done(&Request::Note { text: text.into() })
    }

    /// Shows the source that this partner is alive.
    pub(crate) fn send_heartbeat(&mut self) -> Result<(), PullError> {
        self.request_done(&Request::Beat)
    }

    /// Sends a request whose reply is `Done`.
    fn request_done(&mut self, request: &Request) -> Result<(), PullError> {
        self.send(request)?;
        match self.receive()? {
            Reply::Done => Ok(()),
            unexpected => Err(self.out_of_turn(&unexpected)),
        }
    }

    /// Makes the error of a reply that does not answer the request.
    pub(crate) fn out_of_turn(&self, reply: &Reply) -> PullError {
        let mut shown_reply = format!("{reply:?}");
        shown_reply.truncate(shown_reply.floor_char_boundary(SHOWN_REPLY_BYTES_MAX));
        self.wire_error(WireError::OutOfTurn(shown_reply))
    }

    /// Makes the error of an answer that no correct agent sends.
    pub(crate) fn implausible(&self, what: impl Into<String>) -> PullError {
        PullError::Implausible {
            host: self.host.clone(),
            what: what.into(),
        }
    }

    /// Makes the error of a held file that has changed. After this error, a pull tries again.
    pub(crate) fn stale(&self, message: impl Into<String>) -> PullError {
        PullError::Remote {
            host: self.host.clone(),
            kind: ErrorKind::Stale,
            message: message.into(),
        }
    }

    /// Makes the error of a failed connection.
    fn wire_error(&self, error: WireError) -> PullError {
        PullError::Wire {
            host: self.host.clone(),
            error,
        }
    }
}

/// Connects to the first address of a name that accepts a connection. Returns the last error if there is none.
fn connect_to_any(address: &str) -> io::Result<TcpStream> {
    let mut last_error = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for socket_address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&socket_address, CONNECT_TIMEOUT) {
            Ok(socket) => return Ok(socket),
            Err(error) => last_error = error,
        }
    }
    Err(last_error)
}
