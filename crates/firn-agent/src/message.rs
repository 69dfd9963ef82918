//! Messages between puller and agent: frames of a length and JSON.
//!
//! A frame is its length in 4 bytes, the most significant first, and a [`Request`] or [`Reply`] as JSON. After a
//! [`Reply::Bytes`] that many bytes follow. The agent answers requests in their order, each with one final
//! reply; only [`Request::List`], [`Request::ListHeld`], [`Request::Read`] and [`Request::Place`] have others before it.
//!
//! [`Request::Hello`], [`Reply::Welcome`] and [`Reply::Rejected`] go in the clear, all other frames encrypted and
//! authenticated (`crate::auth`). Bytes of files are either encrypted as well, or go as they are and have a
//! [`BlockMac`] in the frame that ends their answer.
//!
//! Invariants
//! * A frame has at most [`FRAME_BYTES_MAX`] bytes, before the handshake is over [`HANDSHAKE_BYTES_MAX`]: looked at
//!   before memory is taken for it.
//! * A list has at most [`ENTRIES_MAX`] entries, whose names have at most [`LIST_NAME_BYTES_MAX`] bytes.
//! * A block has at most [`BLOCK_BYTES`] bytes, and is the unit of requests, checksums and comparisons.

use std::net::SocketAddr;

use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::block_mac::BlockMac;
use crate::encryption::Encryption;

/// Version of this protocol; an agent and a puller of different ones do not work together.
pub const PROTOCOL_VERSION: u32 = 6;
/// Bytes of the longest frame: an entry with a path and a link target of 4 KiB each, every byte of them escaped.
pub const FRAME_BYTES_MAX: usize = 64 << 10;
/// Bytes of the longest frame from a peer that has not shown the key yet.
pub const HANDSHAKE_BYTES_MAX: usize = 1024;
/// Bytes of a block: it is written while it is still in the processor's cache, and larger ones gained nothing.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Staging buffers of a block each, for what a puller reads by itself and is not in memory. A puller names the one that
/// is to be used, and none of which it has not read all.
pub const STAGING_BUFFERS: u64 = 16;
/// Bytes of the longest path in a message, and of the longest target of a link.
pub const PATH_BYTES_MAX: usize = 4096;
/// Entries of the largest tree that is listed.
pub const ENTRIES_MAX: usize = 1 << 20;
/// Bytes of all paths and link targets of a list: 256 for each entry of the largest one, which both sides have in memory.
pub const LIST_NAME_BYTES_MAX: usize = 256 << 20;

const PAGE_BYTES: u64 = 4096;

/// An ephemeral public key (Curve25519).
pub type PublicKey = [u8; 32];
/// The tag of a message of the handshake.
pub type Tag = [u8; 16];

/// What a puller asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum Request {
    /// The first message of a connection.
    Hello(Hello),
    /// The end of the handshake, the first message that is encrypted: it shows that the hello is not a recorded one
    /// that is replayed. Has no answer.
    Ready,
    /// What is at and below a path.
    List {
        /// As the source host names it; empty: the mount of the agent.
        path: BytePath,
    },
    /// The files at and below a path that firnd holds, and the directories that lead to them.
    ListHeld {
        /// Path below the mount point; empty: all of it.
        path: BytePath,
    },
    /// Be the partner of a host that has left its record in the same backing.
    Adopt {
        /// Its name.
        host: String,
    },
    /// This connection is the partner's: what it marks counts until it ends.
    Follow {
        /// Name of the partner.
        host: String,
    },
    /// On a connection that follows: there is a copy of a file.
    Mark {
        /// Path below the mount point.
        path: BytePath,
        /// [`Held::changes`] of what was copied.
        changes: u64,
    },
    /// On a connection that follows: what people should know of the partner.
    Note {
        /// Empty: nothing.
        text: String,
    },
    /// On a connection that follows: the partner lives.
    Beat,
    /// Hold a file, as it is now.
    Open {
        /// The number by which the puller means it from now on.
        file: u32,
        /// Path below the mount point.
        path: BytePath,
    },
    /// Bytes of a file that is held.
    Read {
        /// Number of the file.
        file: u32,
        /// Bytes from its start.
        offset: u64,
        /// Length; at most [`BLOCK_BYTES`].
        bytes: u64,
    },
    /// Let this puller read memory by itself, until it lists again.
    Expose {
        /// Providers of libfabric that the puller has, the best first.
        providers: Vec<String>,
        /// Whether answers to [`Request::Place`] have a [`BlockMac`].
        sums: bool,
    },
    /// Where bytes of a file are that is held, for a puller that reads them by itself.
    Place {
        /// Number of the file.
        file: u32,
        /// Bytes from its start.
        offset: u64,
        /// Length; at most [`BLOCK_BYTES`].
        bytes: u64,
        /// Staging buffer for what is not in memory, below [`STAGING_BUFFERS`].
        buffer: u32,
    },
    /// A checksum that tells whether the puller has these bytes already.
    Sum {
        /// Number of the file.
        file: u32,
        /// Bytes from its start.
        offset: u64,
        /// Length; at most [`BLOCK_BYTES`].
        bytes: u64,
    },
    /// Whether all that was read of a file so far is the file.
    Check {
        /// Number of the file.
        file: u32,
    },
    /// Let go of a file.
    Release {
        /// Number of the file.
        file: u32,
    },
}

/// What an agent answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// Answer to [`Request::Hello`]: the agent has the key, too.
    Welcome {
        /// [`PROTOCOL_VERSION`] of the agent.
        protocol: u32,
        /// The agent's message of the handshake, in hexadecimal digits; in it, encrypted, an
        /// `crate::auth::Agreement`.
        handshake: String,
    },
    /// The other answer to [`Request::Hello`]; the connection ends.
    Rejected {
        /// [`PROTOCOL_VERSION`] of the agent.
        protocol: u32,
        /// Why.
        reason: Rejection,
    },
    /// Not the end: a part of the answer to [`Request::List`].
    Entries {
        /// Parents before what is in them.
        entries: Vec<Entry>,
    },
    /// The end of the answer to [`Request::List`].
    Listed {
        /// What was listed, below the mount point.
        path: BytePath,
    },
    /// Answer to [`Request::Open`].
    Opened {
        /// Bytes of the file.
        bytes: u64,
        /// [`Held::changes`] of what is held now; none: it is a copy.
        changes: Option<u64>,
    },
    /// Not the end: this many bytes of the answer to [`Request::Read`] follow.
    Bytes {
        /// How many.
        bytes: u64,
    },
    /// Not the end: this many bytes of the answer to [`Request::Read`] are zeros, and do not follow.
    Zeros {
        /// How many.
        bytes: u64,
    },
    /// The end of the answer to [`Request::Read`]; there are fewer bytes than were asked for where the file ends.
    End {
        /// Of the bytes that followed a [`Reply::Bytes`]; none where they are encrypted.
        mac: Option<BlockMac>,
    },
    /// Answer to [`Request::Expose`].
    Exposed(Exposed),
    /// Not the end: this many bytes of the answer to [`Request::Place`] are in the data region.
    InMemory {
        /// From its start.
        at: u64,
        /// How many.
        bytes: u64,
    },
    /// The bytes are in the staging buffers.
    Staged {
        /// From the start of the first one.
        at: u64,
        /// How many.
        bytes: u64,
    },
    /// The end of the answer to [`Request::Place`].
    Placed {
        /// Of the bytes in memory and in the staging buffers; none where the puller wanted none.
        mac: Option<BlockMac>,
    },
    /// Answer to [`Request::Sum`].
    Sum {
        /// Bytes that it is of; fewer than were asked for where the file ends.
        bytes: u64,
        /// XXH3 of them, 128 bits in hexadecimal digits.
        xxh3: String,
    },
    /// Answer to [`Request::Check`].
    Checked {
        /// The file was changed through the mount since it was opened, or may have been.
        changed: bool,
        /// What was read is all the same the file as it was when it was opened.
        snapshot: bool,
    },
    /// Answer to [`Request::Follow`].
    Following {
        /// The firnd that counts the changes.
        incarnation: String,
        /// Its arena.
        arena: String,
    },
    /// Done.
    Done,
    /// Answer to [`Request::Open`]: the agent holds as much as it may. Release something, or ask later.
    Full,
    /// Failed.
    Error {
        /// What a puller may do about it.
        kind: ErrorKind,
        /// What happened and what to do.
        message: String,
    },
}

/// What a puller begins with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`PROTOCOL_VERSION`] of the puller.
    pub protocol: u32,
    /// The puller's ephemeral key. Up to version 4 a random number had this place, so that agents of those versions
    /// answer with theirs.
    pub nonce: PublicKey,
    /// Of the first message of the handshake: the puller has the key.
    pub tag: Tag,
    /// The puller's wish.
    pub encryption: Encryption,
    /// The puller's end of the connection as it sees it; none over pipes.
    pub here: Option<SocketAddr>,
    /// Address of the agent.
    pub there: Option<SocketAddr>,
    /// What MUNGE says of the puller, with the key in it ([`crate::Munge`]). None: both have one already.
    pub credential: Option<String>,
}

/// Why an agent does not let a puller in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// It speaks another version.
    Version,
    /// The agent takes no [`Hello::credential`].
    Munge,
    /// The key, or the credential, is wrong.
    Key,
}

/// Where a puller reads by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exposed {
    /// The provider of libfabric.
    pub provider: String,
    /// Of the agent's endpoint, as the provider writes it.
    pub address: Vec<u8>,
    /// The data region.
    pub arena: ExposedRegion,
    /// The staging buffers, one after the other.
    pub staging: ExposedRegion,
}

/// Memory of the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExposedRegion {
    /// The right to read it.
    pub key: u64,
    /// What its first byte is called.
    pub base: u64,
    /// How many bytes it has.
    pub bytes: u64,
}

/// What a puller may do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// What is held does not hold any more, or the mount cannot be asked now: connect again.
    Stale,
    /// There is no such file.
    Missing,
    /// Trying again is no use.
    Refused,
}

/// Something at or below the path that was listed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Path below the one that was listed; empty: that itself.
    pub path: BytePath,
    /// What it is.
    pub kind: EntryKind,
    /// Permission bits.
    pub mode: u32,
    /// Seconds of its modification time.
    pub mtime_s: i64,
    /// Nanoseconds of the modification time.
    pub mtime_ns: u32,
    /// What firnd says of a file in a list of held ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Held>,
}

/// What firnd says of a file that it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Another number after each change of its bytes or its length, as long as the same firnd runs.
    pub changes: u64,
    /// The partner is known to have it.
    pub partnered: bool,
}

impl Entry {
    /// A directory that is listed itself.
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

    /// Bytes of its path and of the target of a link.
    pub(crate) fn name_bytes(&self) -> usize {
        self.path.as_bytes().len() + self.target_bytes()
    }

    /// Bytes of the target of a link.
    pub(crate) fn target_bytes(&self) -> usize {
        match &self.kind {
            EntryKind::Link { target } => target.as_bytes().len(),
            _ => 0,
        }
    }

    /// Bytes of memory that a copy of it takes: whole pages, and what the kernel has of each name.
    pub(crate) fn stored_bytes(&self) -> u64 {
        let bytes = match self.kind {
            EntryKind::File { bytes, .. } => bytes,
            _ => 0,
        };
        let pages = bytes.checked_next_multiple_of(PAGE_BYTES);
        pages.unwrap_or(bytes).saturating_add(PAGE_BYTES)
    }

    /// Makes a file one that is open for writing.
    pub(crate) fn reopen(&mut self) {
        if let EntryKind::File { ending, .. } = &mut self.kind {
            *ending = Ending::Open;
        }
    }

    pub(crate) fn changes(&self) -> Option<u64> {
        self.held.map(|held| held.changes)
    }

    /// Whether the file has other changes than it was listed with.
    pub(crate) fn is_older_than(&self, changes: Option<u64>) -> bool {
        let listed = self.changes().zip(changes);
        listed.is_some_and(|(listed, now)| listed != now)
    }
}

/// What an [`Entry`] is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum EntryKind {
    /// A directory.
    Directory,
    /// A regular file.
    File {
        /// Its bytes as far as is known without opening it.
        bytes: u64,
        /// Whether its writers closed it.
        ending: Ending,
    },
    /// A symbolic link.
    Link {
        /// Where it leads.
        target: BytePath,
    },
    /// A pipe, a socket or a device.
    Other,
}
