//! Errors of agents, which serve the files of a mount to other hosts, and of pullers, which copy these files. Each text
//! says what happened and what a user can do next.
//!
//! [`WireError`] is an error of one connection. [`AgentError`] is the reason why an agent cannot run, [`PullError`] the
//! reason why a pull failed. [`PullError::is_transient`] says whether another try may succeed.

use std::io;
use std::path::PathBuf;

use crate::ofi::OfiError;
use firn_client::{ClientError, MountError};
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;

use crate::key_file::KeyFileError;
use crate::message::{ErrorKind, PROTOCOL_VERSION};

/// Error of a connection.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side closed the connection between two messages.
    #[error("the connection was closed")]
    Ended,
    /// A message of the handshake is missing or unexpected, so the other side is probably no agent or puller.
    #[error("the other side does not speak the protocol of firn agents")]
    NoHello,
    /// The other side does not have the key.
    #[error("the key is wrong")]
    WrongKey,
    /// A program of MUNGE, an authentication daemon, cannot be started.
    #[error("cannot start `{program}`: {error}; MUNGE must be installed on both hosts")]
    NoMunge {
        /// Name of the program.
        program: String,
        /// The error of starting the program.
        error: io::Error,
    },
    /// A program of MUNGE failed or refused the credential.
    #[error("{program}: {told}")]
    Munge {
        /// Name of the program.
        program: String,
        /// Message of the program.
        told: String,
    },
    /// The MUNGE credential, which proves the user of the other side, is one of another user.
    #[error("the credential was made by user {uid}, but this agent serves only its own user")]
    OtherUser {
        /// User that made the credential.
        uid: u32,
    },
    /// The puller sent a credential, and the agent accepts none.
    #[error("the agent accepts no MUNGE credentials: it was started without --munge")]
    MungeUnwanted,
    /// The agent refused the credential, or the key in it.
    #[error("the agent refused the credential")]
    CredentialRefused,
    /// This side requires encryption, and the other side refuses it.
    #[error("the other side does not encrypt, but this side requires encryption")]
    PeerRefusesEncryption,
    /// The other side requires encryption, and this side refuses it.
    #[error("the other side requires encryption, but it is switched off on this side")]
    PeerRequiresEncryption,
    /// The other side speaks another version of the protocol.
    #[error(
        "the other side speaks version {found} of the protocol, this side version {PROTOCOL_VERSION}"
    )]
    Version {
        /// Version of the other side.
        found: u32,
    },
    /// The other side announced a frame that is longer than the protocol allows.
    #[error("the other side announced a message of {length} bytes; the maximum is {bytes_max}")]
    TooLong {
        /// Announced length.
        length: usize,
        /// Length of the longest frame.
        bytes_max: usize,
    },
    /// A frame is not a message of the protocol.
    #[error("the other side sent a message that cannot be decoded ({0})")]
    Nonsense(String),
    /// A message is not allowed at this point of the protocol.
    #[error("the other side sent a message that is not allowed at this point ({0})")]
    OutOfTurn(String),
    /// A system call failed, the connection broke, or a deadline passed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// The reason why an agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The mount does not exist or does not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The agent's record cannot be written to the backing.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// The agent cannot listen at its address: the address is in use, or is none of this host.
    #[error(
        "cannot listen at {address}: {error}; --listen ADDRESS:PORT chooses another, port 0 any free one"
    )]
    Listen {
        /// The address.
        address: String,
        /// Error of the system call.
        error: io::Error,
    },
    /// The file of failure domains cannot be read, or has an error.
    #[error("partner-domains={}: {why}", quoted_path(path))]
    Domains {
        /// Path of the file.
        path: PathBuf,
        /// Description of the error.
        why: String,
    },
    /// The wanted partner is this host itself.
    #[error("partner={host} names this host itself: name another host, or use partner=next")]
    OwnPartner {
        /// Name of this host.
        host: String,
    },
    /// This host does not have the provider of libfabric that an option names.
    #[error(transparent)]
    Fabric(#[from] OfiError),
    /// The kernel supplied no random bytes for a key.
    #[error("the kernel supplies no random bytes for a key: {0}")]
    Random(#[from] getrandom::Error),
    /// Another system call failed.
    #[error("{what}: {error}")]
    Io {
        /// The action of the agent that failed.
        what: &'static str,
        /// Error of the system call.
        error: io::Error,
    },
}

impl AgentError {
    /// Returns the exit code for this error (docs/OPERATIONS.md).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => error.exit_code(),
            Self::KeyFile(_)
            | Self::Fabric(_)
            | Self::Listen { .. }
            | Self::Domains { .. }
            | Self::OwnPartner { .. }
            | Self::Random(_)
            | Self::Io { .. } => 1,
        }
    }
}

/// The reason why a pull failed. Unless a variant says otherwise, received blocks remain in the staging directory for
/// the next try.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The agent cannot be reached.
    #[error(
        "the agent on {host} cannot be reached at {address}: {error}; is `firn agent` running there?"
    )]
    Connect {
        /// Name of the source host.
        host: String,
        /// Address of the agent.
        address: String,
        /// Error of the connection.
        error: io::Error,
    },
    /// The agent's record cannot be read.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// ssh cannot be started.
    #[error("cannot start {program}: {error}; with --backing or --key-file, ssh is not needed")]
    Ssh {
        /// Name of the program.
        program: String,
        /// The error of starting the program.
        error: io::Error,
    },
    /// The connection to the agent failed.
    #[error(
        "the connection to the agent on {host} failed: {error}{}",
        wire_advice(error)
    )]
    Wire {
        /// Name of the source host.
        host: String,
        /// Error of the connection.
        error: WireError,
    },
    /// Reads of the source's memory by libfabric failed.
    #[error("cannot read the memory of {host} by libfabric: {error}")]
    Fabric {
        /// Name of the source host.
        host: String,
        /// Error of libfabric.
        error: OfiError,
    },
    /// Libfabric was required, but the connection is encrypted and libfabric cannot encrypt.
    #[error(
        "the connection to {host} is encrypted because one side requires it, and libfabric encrypts nothing: use --encrypt no on both sides, or --transport tcp"
    )]
    Unencrypted {
        /// Name of the source host.
        host: String,
    },
    /// The agent answered with an error.
    #[error("{host}: {message}")]
    Remote {
        /// Name of the source host.
        host: String,
        /// Kind of the error, which says whether another try may succeed.
        kind: ErrorKind,
        /// Text of the agent.
        message: String,
    },
    /// The agent held the maximum number of bytes for other pulls, for as long as this pull waited.
    #[error(
        "the agent on {host} holds as much memory for other pulls as its --hold-max allows: try again when they have \
         ended"
    )]
    Full {
        /// Name of the source host.
        host: String,
    },
    /// The source has more bytes than this pull may store.
    #[error("the source has {bytes} bytes, but this pull may store only {bytes_max}")]
    Outgrown {
        /// Bytes of the source.
        bytes: u64,
        /// Maximum number of bytes.
        bytes_max: u64,
    },
    /// The agent sent names or numbers that no correct agent sends.
    #[error("the agent on {host} sent an impossible answer ({what}); the pull did not use it")]
    Implausible {
        /// Name of the source host.
        host: String,
        /// The refused name or number.
        what: String,
    },
    /// A file is open for writing or was cut off.
    #[error(
        "{} of {host} is not a complete checkpoint: {example}{}; --cut pulls it as it is",
        path,
        and_more(*more)
    )]
    Incomplete {
        /// Name of the source host.
        host: String,
        /// The path that was to be pulled.
        path: BytePath,
        /// One such file, and its state.
        example: String,
        /// Number of further such files.
        more: usize,
    },
    /// A file without a snapshot was changed during each try to read it.
    #[error(
        "{path} of {host} changed during each of {tries} reads, and its part in the backing has no snapshot: pull the \
         file after its writer has closed it"
    )]
    KeepsChanging {
        /// Name of the source host.
        host: String,
        /// Path of the file.
        path: BytePath,
        /// Number of tries.
        tries: u32,
    },
    /// Blocks of a file failed the comparison with their MACs too often.
    #[error(
        "a block of {path} arrived damaged {tries} times: a network card, a switch or memory is faulty, or an attacker on the network changes it"
    )]
    Corrupt {
        /// Path of the file.
        path: BytePath,
        /// Number of damaged blocks.
        tries: u32,
    },
    /// The name of the copy exists already.
    #[error(
        "{} exists: choose another name, or remove it first",
        quoted_path(path)
    )]
    Exists {
        /// Path that exists already.
        path: PathBuf,
    },
    /// The target's file system treats two names of the source as one.
    #[error(
        "{}: the file system of the copy treats two names of the source as one (it may ignore case): pull into another file system",
        quoted_path(path)
    )]
    Collision {
        /// Path of one of the names, or of their directory.
        path: PathBuf,
    },
    /// Another pull with the same target is under way.
    #[error("another `firn pull` to {} is under way", quoted_path(path))]
    Busy {
        /// The target.
        path: PathBuf,
    },
    /// The staging directory or its parent could be changed by another user.
    #[error(transparent)]
    Trust(#[from] firn_trust::TrustError),
    /// A system call on the target's file system failed.
    #[error("{}: {error}", quoted_path(path))]
    Local {
        /// Path of the failed call.
        path: PathBuf,
        /// Error of the call.
        error: io::Error,
    },
}

impl PullError {
    /// Returns the exit code for this error (docs/OPERATIONS.md).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exists { .. } | Self::Busy { .. } => 11,
            _ => 1,
        }
    }

    /// Whether the error concerns the target, and not the source or the connection.
    pub fn is_of_target(&self) -> bool {
        matches!(
            self,
            Self::Exists { .. }
                | Self::Busy { .. }
                | Self::Collision { .. }
                | Self::Trust(_)
                | Self::Local { .. }
        )
    }

    /// Whether the source has changed since it was listed.
    pub(crate) fn is_change_of_source(&self) -> bool {
        match self {
            Self::Incomplete { .. } | Self::KeepsChanging { .. } | Self::Outgrown { .. } => true,
            Self::Remote { kind, .. } => *kind == ErrorKind::Missing,
            _ => false,
        }
    }

    /// Whether the agent refused a file because it holds the maximum number of bytes.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether the error shows that no agent runs: its record is unusable, or no process listens at its address.
    pub(crate) fn is_absence(&self) -> bool {
        match self {
            Self::Connect { error, .. } => error.kind() == io::ErrorKind::ConnectionRefused,
            Self::KeyFile(_) => true,
            _ => false,
        }
    }

    /// Whether a new connection may succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Full { .. } => true,
            // An agent that is started again writes a new record.
            Self::KeyFile(error) => error.is_missing(),
            Self::Wire { error, .. } => matches!(error, WireError::Ended | WireError::Io(_)),
            Self::Fabric { error, .. } => error.is_transient(),
            Self::Remote { kind, .. } => *kind == ErrorKind::Stale,
            _ => false,
        }
    }
}

/// Returns how a puller may react to an error of the mount.
pub(crate) fn mount_error_kind(error: &MountError) -> ErrorKind {
    match error {
        MountError::Client(ClientError::Refused { errno, .. })
            if *errno == rustix::io::Errno::NOENT.raw_os_error() =>
        {
            ErrorKind::Missing
        }
        MountError::Client(ClientError::Refused { .. } | ClientError::NoMount { .. })
        | MountError::OtherMount { .. } => ErrorKind::Refused,
        _ => ErrorKind::Stale,
    }
}

/// Returns advice for the user about an error of the connection between a puller, which copies files, and an agent,
/// which serves them. The advice follows the text of the error; it is empty if the text says enough.
fn wire_advice(error: &WireError) -> &'static str {
    match error {
        WireError::WrongKey => {
            "; the agent was restarted after the key was read, or another agent has its address"
        }
        WireError::Version { .. } => "; use the same version of firn on both hosts",
        WireError::CredentialRefused => {
            "; the agent may run as another user, or the munged daemons of the two hosts have different keys or clocks; the agent's log says which"
        }
        WireError::PeerRefusesEncryption => {
            "; the agent was started with --encrypt no: start it with auto or yes, or pull over ssh"
        }
        WireError::PeerRequiresEncryption => "; pull with --encrypt auto or yes",
        WireError::NoHello | WireError::Nonsense(_) | WireError::TooLong { .. } => {
            "; check that a firn agent is at this address, and that the shell there prints nothing when it starts"
        }
        WireError::NoMunge { .. }
        | WireError::Munge { .. }
        | WireError::OtherUser { .. }
        | WireError::MungeUnwanted
        | WireError::Ended
        | WireError::OutOfTurn(_)
        | WireError::Io(_) => "",
    }
}

fn and_more(more: usize) -> String {
    match more {
        0 => String::new(),
        more => format!(", and {more} more"),
    }
}
