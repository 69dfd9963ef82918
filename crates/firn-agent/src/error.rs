//! What can go wrong between an agent and a puller. Every text says what to do next.

use std::io;
use std::path::PathBuf;

use crate::ofi::OfiError;
use firn_client::{ClientError, MountError};
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;

use crate::key_file::KeyFileError;
use crate::message::{ErrorKind, PROTOCOL_VERSION};

/// What can go wrong on the wire.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The other side closed the connection between two messages.
    #[error("the connection was closed")]
    Ended,
    /// The other side does not begin as a puller, or an agent, does.
    #[error("it does not speak the protocol of firn agents")]
    NoHello,
    /// The other side does not have the key.
    #[error("the key is wrong")]
    WrongKey,
    /// MUNGE cannot be asked.
    #[error("cannot start `{program}`: {error}; MUNGE must be installed on both hosts")]
    NoMunge {
        /// What was started.
        program: String,
        /// Why not.
        error: io::Error,
    },
    /// MUNGE says no.
    #[error("{program}: {told}")]
    Munge {
        /// Name of the program.
        program: String,
        /// Its words.
        told: String,
    },
    /// A credential of another user.
    #[error("its credential is one of user {uid}, and this agent serves its own user only")]
    OtherUser {
        /// Whose it is.
        uid: u32,
    },
    /// The puller has a credential that the agent does not ask for.
    #[error("the agent takes no credentials of MUNGE: it was started without --munge")]
    MungeUnwanted,
    /// The agent ended the connection when it had seen the credential.
    #[error("the agent did not believe the credential")]
    CredentialRefused,
    /// This side wants encryption and the other one does not.
    #[error("the other side does not encrypt, and this one does not go on without")]
    PeerRefusesEncryption,
    /// The other side wants encryption and this one does not.
    #[error("the other side wants encryption, which is switched off here")]
    PeerRequiresEncryption,
    /// The other side speaks another version.
    #[error("it speaks version {found} of the protocol and not {PROTOCOL_VERSION}")]
    Version {
        /// The other side's.
        found: u32,
    },
    /// A frame that no side of Firn would send.
    #[error("it announced a message of {length} bytes, where {bytes_max} are the most")]
    TooLong {
        /// Bytes announced.
        length: usize,
        /// The most that are taken.
        bytes_max: usize,
    },
    /// No message.
    #[error("it sent what is no message ({0})")]
    Nonsense(String),
    /// A message that answers nothing that was asked.
    #[error("it sent a message out of its turn ({0})")]
    OutOfTurn(String),
    /// The system refused something, the connection broke or took too long.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// There is no such mount, or it cannot be asked.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The key cannot be left where pullers look for it.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// The address is taken, or is none of this host.
    #[error(
        "cannot listen at {address}: {error}; --listen ADDRESS:PORT chooses another, port 0 any free one"
    )]
    Listen {
        /// The address.
        address: String,
        /// Why.
        error: io::Error,
    },
    /// The file of failure domains.
    #[error("partner-domains={}: {why}", quoted_path(path))]
    Domains {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A host that is to survive itself.
    #[error("partner={host} is this host: mount with the name of another one, or partner=next")]
    OwnPartner {
        /// Its name.
        host: String,
    },
    /// What was asked for by name is not there.
    #[error(transparent)]
    Fabric(#[from] OfiError),
    /// No random bytes.
    #[error("the kernel gives no random bytes for a key: {0}")]
    Random(#[from] getrandom::Error),
    /// Something else.
    #[error("{what}: {error}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
}

impl AgentError {
    /// Exit code for this error (docs/OPERATIONS.md).
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

/// Why nothing was pulled. Unless it says otherwise, what has arrived stays for the next try.
#[derive(Debug, thiserror::Error)]
pub enum PullError {
    /// The agent cannot be reached.
    #[error(
        "the agent on {host} cannot be reached at {address}: {error}; is `firn agent` running there?"
    )]
    Connect {
        /// Name of the source host.
        host: String,
        /// Where it was looked for.
        address: String,
        /// Why not.
        error: io::Error,
    },
    /// The key file tells no agent.
    #[error(transparent)]
    KeyFile(#[from] KeyFileError),
    /// ssh cannot be started.
    #[error("cannot start {program}: {error}; --backing or --key-file reach an agent without it")]
    Ssh {
        /// What was started.
        program: String,
        /// Why not.
        error: io::Error,
    },
    /// The connection failed.
    #[error(
        "the connection to the agent on {host} failed: {error}{}",
        wire_advice(error)
    )]
    Wire {
        /// Name of the source host.
        host: String,
        /// Cause.
        error: WireError,
    },
    /// Reads of the source's memory failed.
    #[error("no bytes from {host} by libfabric: {error}")]
    Fabric {
        /// Name of the source host.
        host: String,
        /// Why.
        error: OfiError,
    },
    /// Bytes are to be encrypted, and libfabric does not.
    #[error(
        "the connection to {host} is encrypted, as one side asked for, and libfabric encrypts nothing: say --encrypt no on both sides, or --transport tcp"
    )]
    Unencrypted {
        /// Name of the source host.
        host: String,
    },
    /// The agent says so.
    #[error("{host}: {message}")]
    Remote {
        /// Name of the source host.
        host: String,
        /// Whether to try again.
        kind: ErrorKind,
        /// Its words.
        message: String,
    },
    /// It holds as much as it may for others, for as long as this pull waits.
    #[error(
        "{host} holds as much memory for other pulls as it may (`firn agent --hold-max`): try again when they are over"
    )]
    Full {
        /// Name of the source host.
        host: String,
    },
    /// There is more than there is room for.
    #[error("{bytes} bytes came of what was listed with {bytes_max}")]
    Outgrown {
        /// Bytes that there are.
        bytes: u64,
        /// Bytes that there may be.
        bytes_max: u64,
    },
    /// An agent sent names or numbers that cannot be.
    #[error("the agent on {host} described what cannot be ({what}); nothing of it was believed")]
    Implausible {
        /// Name of the source host.
        host: String,
        /// What.
        what: String,
    },
    /// Not all files were closed by their writers.
    #[error(
        "{} of {host} is not a complete checkpoint: {example}{}; --cut pulls it as it is",
        path,
        and_more(*more)
    )]
    Incomplete {
        /// Name of the source host.
        host: String,
        /// What was to be pulled.
        path: BytePath,
        /// One of its files and what is wrong.
        example: String,
        /// How many more there are.
        more: usize,
    },
    /// A file was changed each time that it was read.
    #[error(
        "{path} of {host} was changed each of the {tries} times that it was read, and a part of it is in the backing only, which keeps no snapshot: pull it when its writer has closed it"
    )]
    KeepsChanging {
        /// Name of the source host.
        host: String,
        /// Path of the file.
        path: BytePath,
        /// How often it was read.
        tries: u32,
    },
    /// Bytes arrive other than they left, by their MAC.
    #[error(
        "a block of {path} was not what was sent {tries} times: a network card, a switch or memory is faulty, or an attacker on the network changes it"
    )]
    Corrupt {
        /// Path of the file.
        path: BytePath,
        /// How often.
        tries: u32,
    },
    /// There is something under the name that the copy was to have.
    #[error(
        "{} exists: choose another name, or remove it first",
        quoted_path(path)
    )]
    Exists {
        /// Path that exists already.
        path: PathBuf,
    },
    /// Two names of the source are one on the target.
    #[error(
        "{}: the file system there takes two names of the source for one (it may not tell upper from lower case): pull into another file system",
        quoted_path(path)
    )]
    Collision {
        /// One of them, or their directory.
        path: PathBuf,
    },
    /// Another pull to the same place is under way.
    #[error("another `firn pull` to {} is under way", quoted_path(path))]
    Busy {
        /// Where to.
        path: PathBuf,
    },
    /// A staging directory that is not ours.
    #[error(transparent)]
    Trust(#[from] firn_trust::TrustError),
    /// The file system of the target refused something.
    #[error("{}: {error}", quoted_path(path))]
    Local {
        /// Path of the failed call.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl PullError {
    /// The exit code that says it (docs/OPERATIONS.md).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Exists { .. } | Self::Busy { .. } => 11,
            _ => 1,
        }
    }

    /// Whether the directory of the copy is at fault, and not the source or the way to it.
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

    /// Whether the source has something else now than it has listed.
    pub(crate) fn is_change_of_source(&self) -> bool {
        match self {
            Self::Incomplete { .. } | Self::KeepsChanging { .. } | Self::Outgrown { .. } => true,
            Self::Remote { kind, .. } => *kind == ErrorKind::Missing,
            _ => false,
        }
    }

    /// Whether the source holds as much for others as it may.
    pub(crate) fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. })
    }

    /// Whether there is no agent that could be asked.
    pub(crate) fn is_absence(&self) -> bool {
        match self {
            Self::Connect { error, .. } => error.kind() == io::ErrorKind::ConnectionRefused,
            Self::KeyFile(_) => true,
            _ => false,
        }
    }

    /// Whether it may be over with another connection.
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Full { .. } => true,
            // An agent that is started again writes it anew.
            Self::KeyFile(error) => error.is_missing(),
            Self::Wire { error, .. } => matches!(error, WireError::Ended | WireError::Io(_)),
            Self::Fabric { error, .. } => error.may_pass(),
            Self::Remote { kind, .. } => *kind == ErrorKind::Stale,
            _ => false,
        }
    }
}

/// The words for an agent that cannot read what it is asked for, and what a puller may do.
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
