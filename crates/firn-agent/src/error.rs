//! Errors of agents and pullers. Each text says what happened and what a user can do next.
//!
//! [`WireError`] is an error of one connection. [`AgentError`] says why an agent cannot run, [`PullError`] why a pull
//! failed. A [`PullError`] also tells whether another try may succeed.

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
    /// The other side does not begin with the handshake of an agent or puller.
    #[error("it does not speak the protocol of firn agents")]
    NoHello,
    /// The other side does not have the key.
    #[error("the key is wrong")]
    WrongKey,
    /// A program of MUNGE cannot be started.
    #[error("cannot start `{program}`: {error}; MUNGE must be installed on both hosts")]
    NoMunge {
        /// Name of the program.
        program: String,
        /// Error of the start.
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
    /// The credential is one of another user.
    #[error("its credential is one of user {uid}, and this agent serves its own user only")]
    OtherUser {
        /// User that made the credential.
        uid: u32,
    },
    /// The puller sent a credential, and the agent accepts none.
    #[error("the agent takes no credentials of MUNGE: it was started without --munge")]
    MungeUnwanted,
    /// The agent refused the credential, or the key in it.
    #[error("the agent did not believe the credential")]
    CredentialRefused,
    /// This side requires encryption, and the other side refuses it.
    #[error("the other side does not encrypt, and this one does not go on without")]
    PeerRefusesEncryption,
    /// The other side requires encryption, and this side refuses it.
    #[error("the other side wants encryption, which is switched off here")]
    PeerRequiresEncryption,
    /// The other side speaks another version of the protocol.
    #[error("it speaks version {found} of the protocol and not {PROTOCOL_VERSION}")]
    Version {
        /// Version of the other side.
        found: u32,
    },
    /// The other side announced a frame that is longer than any of the protocol.
    #[error("it announced a message of {length} bytes, where {bytes_max} are the most")]
    TooLong {
        /// Announced length.
        length: usize,
        /// Length of the longest frame.
        bytes_max: usize,
    },
    /// A frame is no message of the protocol.
    #[error("it sent what is no message ({0})")]
    Nonsense(String),
    /// A message is not allowed at this point of the protocol.
    #[error("it sent a message out of its turn ({0})")]
    OutOfTurn(String),
    /// A system call failed, the connection broke, or a deadline passed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Why an agent cannot run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The mount does not exist or does not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The agent's record cannot be written to the backing.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// The agent cannot listen at its address: it is in use, or is none of this host.
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
    #[error("partner={host} is this host: mount with the name of another one, or partner=next")]
    OwnPartner {
        /// Name of this host.
        host: String,
    },
    /// This host does not have the provider of libfabric that an option names.
    #[error(transparent)]
    Fabric(#[from] OfiError),
    /// The kernel gave no random bytes for a key.
    #[error("the kernel gives no random bytes for a key: {0}")]
    Random(#[from] getrandom::Error),
    /// Another system call failed.
    #[error("{what}: {error}")]
    Io {
        /// What the agent cannot do.
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

/// Why a pull failed. Unless a variant says otherwise, received blocks stay in the staging directory for the next try.
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
    #[error("cannot start {program}: {error}; --backing or --key-file reach an agent without it")]
    Ssh {
        /// Name of the program.
        program: String,
        /// Error of the start.
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
    #[error("no bytes from {host} by libfabric: {error}")]
    Fabric {
        /// Name of the source host.
        host: String,
        /// Error of libfabric.
        error: OfiError,
    },
    /// Libfabric was required, but the connection is encrypted and libfabric cannot encrypt.
    #[error(
        "the connection to {host} is encrypted, as one side asked for, and libfabric encrypts nothing: say --encrypt no on both sides, or --transport tcp"
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
    /// The agent held as many bytes for other pulls as it may, for as long as this pull waited.
    #[error(
        "{host} holds as much memory for other pulls as it may (`firn agent --hold-max`): try again when they are over"
    )]
    Full {
        /// Name of the source host.
        host: String,
    },
    /// The source has more bytes than this pull may store.
    #[error("{bytes} bytes came of what was listed with {bytes_max}")]
    Outgrown {
        /// Bytes of the source.
        bytes: u64,
        /// Maximum number of bytes.
        bytes_max: u64,
    },
    /// The agent sent names or numbers that no honest agent sends.
    #[error("the agent on {host} described what cannot be ({what}); nothing of it was believed")]
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
        "{path} of {host} was changed each of the {tries} times that it was read, and a part of it is in the backing only, which keeps no snapshot: pull it when its writer has closed it"
    )]
    KeepsChanging {
        /// Name of the source host.
        host: String,
        /// Path of the file.
        path: BytePath,
        /// Number of tries.
        tries: u32,
    },
    /// Blocks of a file did not match their MACs too often.
    #[error(
        "a block of {path} was not what was sent {tries} times: a network card, a switch or memory is faulty, or an attacker on the network changes it"
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
    /// The target's file system takes two names of the source for one.
    #[error(
        "{}: the file system there takes two names of the source for one (it may not tell upper from lower case): pull into another file system",
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

    /// Whether the error is one of the target, not of the source or the connection.
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

    /// Whether the agent holds as many bytes as it may.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether the error shows that no agent runs: its record is unusable, or nothing listens at its address.
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

/// Turns an error of the mount into the kind and the text of an agent's reply.
pub(crate) fn describe_mount_error(error: &MountError) -> (ErrorKind, String) {
    let kind = match error {
        MountError::Client(ClientError::Refused { errno, .. })
            if *errno == rustix::io::Errno::NOENT.raw_os_error() =>
        {
            ErrorKind::Missing
        }
        MountError::Client(ClientError::Refused { .. } | ClientError::NoMount { .. })
        | MountError::OtherMount { .. } => ErrorKind::Refused,
        _ => ErrorKind::Stale,
    };
    (kind, error.to_string())
}

/// Returns what a puller's user can do about an error of the connection.
fn wire_advice(error: &WireError) -> &'static str {
    match error {
        WireError::WrongKey => {
            "; the agent has begun anew since the key was read, or another one has its address"
        }
        WireError::Version { .. } => "; use the same version of firn on both hosts",
        WireError::CredentialRefused => {
            "; it may run as another user, or its munged have another key or another time; its log says which"
        }
        WireError::PeerRefusesEncryption => {
            "; the agent was started with --encrypt no: start it with auto or yes, or pull over ssh"
        }
        WireError::PeerRequiresEncryption => "; pull with --encrypt auto or yes",
        WireError::NoHello | WireError::Nonsense(_) | WireError::TooLong { .. } => {
            "; is there a firn agent at this address, and does its shell print nothing by itself?"
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
