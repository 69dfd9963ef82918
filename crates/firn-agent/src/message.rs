//! Messages of the protocol by which one host copies the files of another. The *puller* copies files and sends
//! requests; the *agent* serves the files of its mount and replies.
//!
//! A message travels as a *frame*: its length in 4 bytes, most significant first, and then a [`Request`] or [`Reply`]
//! as JSON. The bytes that a [`Reply::Bytes`] announces follow its frame.
//!
//! The agent answers requests in their order. Each answer ends with one final reply. Only [`Request::List`],
//! [`Request::ListHeld`], [`Request::Read`] and [`Request::Place`] have partial replies before it.
//!
//! [`Request::Hello`], [`Reply::Welcome`] and [`Reply::Rejected`] are sent in the clear. All other frames are encrypted
//! and authenticated (`crate::auth`). Bytes of files are encrypted too, or they are plain and the final reply has their
//! message authentication code ([`BlockMac`]).
//!
//! Invariants
//! * A frame has at most [`FRAME_BYTES_MAX`] bytes, and at most [`HANDSHAKE_BYTES_MAX`] before the end of the
//!   handshake. The length is checked before memory is allocated for the frame.
//! * A list has at most [`ENTRIES_MAX`] entries, and at most [`LIST_NAME_BYTES_MAX`] bytes of names.
//! * A block has at most [`BLOCK_BYTES`] bytes. It is the unit of requests, checksums and comparisons.

use std::net::SocketAddr;

use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::block_mac::BlockMac;
use crate::encryption::Encryption;

/// Version of this protocol. An agent and a puller with different versions refuse each other.
pub const PROTOCOL_VERSION: u32 = 6;
/// Maximum number of bytes of a frame. An entry with a path and a link target of 4 KiB each fits, even if every byte is
/// escaped.
pub const FRAME_BYTES_MAX: usize = 64 << 10;
/// Maximum number of bytes of a frame from a peer that has not yet proved that it has the key.
pub const HANDSHAKE_BYTES_MAX: usize = 1024;
/// Bytes of a block. A block of this size is written while it is still in the processor's cache; larger blocks were not
/// faster.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Number of staging buffers of an agent, of one block each. Bytes that are not in memory are copied there, so that a
/// puller can read them by libfabric. The puller names a buffer in each request, and reuses the buffer only after it
/// has read the content.
pub const STAGING_BUFFERS: u64 = 16;
/// Maximum number of bytes of a path in a message, and of a link target.
pub const PATH_BYTES_MAX: usize = 4096;
/// Maximum number of entries of a list.
pub const ENTRIES_MAX: usize = 1 << 20;
/// Maximum number of bytes of all paths and link targets of a list: 256 for each of [`ENTRIES_MAX`] entries. Both sides
/// keep a whole list in memory.
pub const LIST_NAME_BYTES_MAX: usize = 256 << 20;

const PAGE_BYTES: u64 = 4096;

/// An ephemeral public key (Curve25519).
pub type PublicKey = [u8; 32];
/// The authentication tag of a handshake message.
pub type Tag = [u8; 16];

/// A request of a puller, or of a host that looks for a partner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum Request {
    /// The first message of a connection.
    Hello(Hello),
    /// Ends the handshake. It is the first encrypted message, which proves that the puller did not replay a recorded
    /// hello. It has no reply.
    Ready,
    /// Lists everything at and below a path.
    List {
        /// Path on the source host; empty means the mount that the agent serves.
        path: BytePath,
    },
    /// Lists the files at and below a path that firnd holds, and the directories above them.
    ListHeld {
        /// Path relative to the mount point; empty means the whole mount.
        path: BytePath,
    },
    /// Requests that this agent becomes the partner of a host whose record is in the same backing.
    Adopt {
        /// Name of the host that wants a partner.
        host: String,
    },
    /// Makes this connection that of a partner. The partner's marks count until the connection ends.
    Follow {
        /// Name of the partner.
        host: String,
    },
    /// Reports that the partner has a copy of a file. It is allowed after [`Request::Follow`] only.
    Mark {
        /// Path relative to the mount point.
        path: BytePath,
        /// [`Held::changes`] of the copied file.
        changes: u64,
    },
    /// Sets the note about the partner in the status. It is allowed after [`Request::Follow`] only.
    Note {
        /// Text for people; empty means no note.
        text: String,
    },
    /// Shows that the partner is alive. It is allowed after [`Request::Follow`] only.
    Beat,
    /// Holds a file as it is now.
    Open {
        /// Number of the file in later requests, chosen by the puller.
        file: u32,
        /// Path relative to the mount point.
        path: BytePath,
    },
    /// Requests bytes of a held file.
    Read {
        /// Number of the file.
        file: u32,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Number of bytes; at most [`BLOCK_BYTES`].
        bytes: u64,
    },
    /// Requests the right to read memory by libfabric, until the next list.
    Expose {
        /// Providers of libfabric that the puller has, the best first.
        providers: Vec<String>,
        /// Whether answers to [`Request::Place`] must have a [`BlockMac`].
        sums: bool,
    },
    /// Requests the addresses of bytes of a held file, so that the puller can read them by libfabric.
    Place {
        /// Number of the file.
        file: u32,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Number of bytes; at most [`BLOCK_BYTES`].
        bytes: u64,
        /// Index of the staging buffer for bytes that are not in memory; less than [`STAGING_BUFFERS`].
        buffer: u32,
    },
    /// Requests the checksum of bytes that the puller may already have.
    Sum {
        /// Number of the file.
        file: u32,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Number of bytes; at most [`BLOCK_BYTES`].
        bytes: u64,
    },
    /// Requests a check whether the bytes that were read of a file so far are one state of the file.
    Check {
        /// Number of the file.
        file: u32,
    },
    /// Releases a held file.
    Release {
        /// Number of the file.
        file: u32,
    },
}

/// A reply of an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// Answers [`Request::Hello`]: the puller has the right key, and this message proves that the agent has it too.
    Welcome {
        /// [`PROTOCOL_VERSION`] of the agent.
        protocol: u32,
        /// The agent's handshake message in hexadecimal digits. Its encrypted payload is a `crate::auth::Agreement`.
        handshake: String,
    },
    /// Answers a [`Request::Hello`] that is refused. The connection ends.
    Rejected {
        /// [`PROTOCOL_VERSION`] of the agent.
        protocol: u32,
        /// Reason of the refusal.
        reason: Rejection,
    },
    /// Partial answer to [`Request::List`] and [`Request::ListHeld`].
    Entries {
        /// Entries; a directory comes before the entries in it.
        entries: Vec<Entry>,
    },
    /// Ends the answer to [`Request::List`] and [`Request::ListHeld`].
    Listed {
        /// The listed path, relative to the mount point.
        path: BytePath,
    },
    /// Answers [`Request::Open`].
    Opened {
        /// Size of the file.
        bytes: u64,
        /// [`Held::changes`] of the file as it is held; `None` for a partner copy.
        changes: Option<u64>,
    },
    /// Partial answer to [`Request::Read`]: bytes of the file follow this frame.
    Bytes {
        /// Number of bytes that follow.
        bytes: u64,
    },
    /// Partial answer to [`Request::Read`] and [`Request::Place`]: the next bytes are zeros, which are not sent.
    Zeros {
        /// Number of zeros.
        bytes: u64,
    },
    /// Ends the answer to [`Request::Read`]. If the file ends in the requested range, the answer has fewer bytes than
    /// requested.
    End {
        /// MAC of all bytes that followed a [`Reply::Bytes`]; `None` if they were encrypted.
        mac: Option<BlockMac>,
    },
    /// Answers [`Request::Expose`].
    Exposed(Exposed),
    /// Partial answer to [`Request::Place`]: the next bytes are in the data region.
    InMemory {
        /// Offset from the start of the data region.
        at: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Partial answer to [`Request::Place`]: the next bytes are in a staging buffer.
    Staged {
        /// Offset from the start of the first staging buffer.
        at: u64,
        /// Number of bytes.
        bytes: u64,
    },
    /// Ends the answer to [`Request::Place`].
    Placed {
        /// MAC of the bytes in memory and in staging buffers; `None` if the puller requested no MACs.
        mac: Option<BlockMac>,
    },
    /// Answers [`Request::Sum`].
    Sum {
        /// Number of bytes in the sum. If the file ends in the requested range, it is less than the requested number.
        bytes: u64,
        /// XXH3 of the bytes: 128 bits in hexadecimal digits.
        xxh3: String,
    },
    /// Answers [`Request::Check`].
    Checked {
        /// Whether the file was changed through the mount, or may have been changed, since it was opened.
        changed: bool,
        /// Whether the bytes that were read are those of the file as it was opened, even if it was changed since.
        snapshot: bool,
    },
    /// Answers [`Request::Follow`].
    Following {
        /// Incarnation of the firnd that counts the changes.
        incarnation: String,
        /// Identity of this firnd's arena.
        arena: String,
    },
    /// The request was carried out.
    Done,
    /// Answers [`Request::Open`]: the agent holds the maximum number of bytes. The puller must release a file or try
    /// later.
    Full,
    /// The request failed.
    Error {
        /// The kind of the error, which determines how the puller may react.
        kind: ErrorKind,
        /// Description of the error, and what a user can do about it.
        message: String,
    },
}

/// The first message of a puller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the puller.
    pub protocol: u32,
    /// The puller's ephemeral key. Up to version 4 this field was a random number. It still has the name of that time,
    /// so that agents of those versions can read the hello and answer with their version.
    pub nonce: PublicKey,
    /// Tag of the first handshake message, which proves that the puller has the key.
    pub tag: Tag,
    /// Whether the puller requires, allows or refuses the encryption of files' bytes.
    pub encryption: Encryption,
    /// The puller's own address as the puller sees it; `None` over pipes.
    pub here: Option<SocketAddr>,
    /// The agent's address as the puller sees it; `None` over pipes.
    pub there: Option<SocketAddr>,
    /// A MUNGE credential of the puller's user with the key in it ([`crate::Munge`]). `None` if both sides have the
    /// key.
    pub credential: Option<String>,
}

/// Reason why an agent refuses a puller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// The puller speaks another version of the protocol.
    Version,
    /// The agent accepts no [`Hello::credential`].
    Munge,
    /// The key or the credential is wrong.
    Key,
}

/// The agent's endpoint and the memory that a puller may read by libfabric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exposed {
    /// Name of the provider of libfabric.
    pub provider: String,
    /// Address of the agent's endpoint, in the provider's format.
    pub address: Vec<u8>,
    /// The data region of the arena.
    pub arena: ExposedRegion,
    /// All staging buffers, one after the other.
    pub staging: ExposedRegion,
}

/// A region of the agent's memory that a puller may read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExposedRegion {
    /// Key that each read by libfabric must have.
    pub key: u64,
    /// Address of the first byte in reads: a virtual address or 0, as the provider requires.
    pub base: u64,
    /// Size of the region.
    pub bytes: u64,
}

/// How a puller may react to an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// A held file is no longer in the state in which it was opened, or the mount does not answer now. The puller
    /// connects again.
    Stale,
    /// The file does not exist.
    Missing,
    /// Another try would fail too.
    Refused,
}

/// A file or directory at or below the listed path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Path relative to the listed path; empty for the listed path itself.
    pub path: BytePath,
    /// Kind of the file.
    pub kind: EntryKind,
    /// Permission bits.
    pub mode: u32,
    /// Seconds of the modification time.
    pub mtime_s: i64,
    /// Nanoseconds of the modification time.
    pub mtime_ns: u32,
    /// State of a held file. Only the answer to [`Request::ListHeld`] has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
}

/// State of a file that firnd holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Number of changes of the file's bytes or length. It is different after each change while the same firnd runs.
    pub changes: u64,
    /// Whether the partner has marked a copy of this state.
    pub partnered: bool,
}

/// A list of everything at and below a path, parents first.
#[derive(Debug)]
pub(crate) struct EntryList {
    /// The listed path, relative to the mount point.
    pub(crate) top: BytePath,
    pub(crate) entries: Vec<Entry>,
}

/// Identity of the firnd that counts the changes of files.
#[derive(Clone, Debug)]
pub(crate) struct FirndIdentity {
    /// Incarnation of firnd, which is different after each start.
    pub(crate) incarnation: String,
    /// Identity of its arena.
    pub(crate) arena: String,
}

impl Entry {
    /// Makes the entry of a listed directory itself.
    pub(crate) fn directory() -> Self {
        Self {
            path: BytePath::default(),
            kind: EntryKind::Directory,
            mode: 0o700,
            mtime_s: 0,
            mtime_ns: 0,
            held: None,
        }
    }

    /// Length of the path and of a link's target.
    pub(crate) fn name_bytes(&self) -> usize {
        self.path.as_bytes().len() + self.target_bytes()
    }

    /// Length of a link's target; 0 for other kinds.
    pub(crate) fn target_bytes(&self) -> usize {
        match &self.kind {
            EntryKind::Link { target } => target.as_bytes().len(),
            _ => 0,
        }
    }

    /// Returns the bytes of memory that a copy occupies: whole pages for its content, and one page for the kernel's own
    /// records.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let bytes = match self.kind {
            EntryKind::File { bytes, .. } => bytes,
            _ => 0,
        };
        let bytes_of_pages = bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(bytes);
        bytes_of_pages.saturating_add(PAGE_BYTES)
    }

    /// Lists a file as open for writing, so that no follower copies it.
    pub(crate) fn mark_open(&mut self) {
        if let EntryKind::File { ending, .. } = &mut self.kind {
            *ending = Ending::Open;
        }
    }

    /// Number of changes of a held file.
    pub(crate) fn changes(&self) -> Option<u64> {
        self.held.map(|held| held.changes)
    }

    /// Whether a file has changed since it was listed, to judge by its present number of changes. Returns false if
    /// either number is unknown.
    pub(crate) fn is_older_than(&self, current_changes: Option<u64>) -> bool {
        match (self.changes(), current_changes) {
            (Some(listed), Some(current)) => listed != current,
            _ => false,
        }
    }
}

/// Kind of an [`Entry`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A regular file.
    File {
        /// Size, as far as it is known without opening the file.
        bytes: u64,
        /// Whether the writers of the file have closed it.
        ending: Ending,
    },
    /// A symbolic link.
    Link {
        /// Text of the link.
        target: BytePath,
    },
    /// A pipe, a socket or a device.
    Other,
}
