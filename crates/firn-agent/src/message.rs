//! Messages between puller and agent: frames of a length and JSON.
//!
//! A frame is its length in 4 bytes, the most significant first, and a [`Request`] or [`Reply`] as JSON. After a
//! [`Reply::Bytes`] that many bytes follow as they are. The agent answers requests in their order, each with one final
//! reply; only [`Request::List`], [`Request::ListHeld`], [`Request::Read`] and [`Request::Place`] have others before it.
//!
//! Invariants
//! * A frame has at most [`FRAME_BYTES_MAX`] bytes, before the handshake is over [`HANDSHAKE_BYTES_MAX`]: looked at
//!   before memory is taken for it.
//! * A block has at most [`BLOCK_BYTES`] bytes, and is the unit of requests, checksums and comparisons.

use firn_format::record::Ending;
use firn_protocol::path::BytePath;
use serde::{Deserialize, Serialize};

use crate::encryption::Encryption;

/// Version of this protocol; an agent and a puller of different ones do not work together.
pub const PROTOCOL_VERSION: u32 = 4;
/// Bytes of the longest frame: an entry with a path and a link target of 4 KiB each, every byte of them escaped.
pub const FRAME_BYTES_MAX: usize = 64 << 10;
/// Bytes of the longest frame from somebody who has not shown the key yet.
pub const HANDSHAKE_BYTES_MAX: usize = 1024;
/// Bytes of a block: it is written while it is still in the processor's cache, and larger ones gained nothing.
pub const BLOCK_BYTES: u64 = 1 << 20;
/// Staging buffers of a block each, for what a puller reads by itself and is not in memory. A puller names the one that
/// is to be used, and none of which it has not read all.
pub const STAGING_BUFFERS: u64 = 16;
/// Bytes of the longest path in a message.
pub const PATH_BYTES_MAX: usize = 4096;

/// Bytes that are used once.
pub type Nonce = [u8; 32];
/// An HMAC-SHA256.
pub type Proof = [u8; 32];

/// What a puller asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum Request {
    /// The first message of a connection.
    Hello {
        /// [`PROTOCOL_VERSION`] of the puller.
        protocol: u32,
        /// Made for this connection.
        nonce: Nonce,
        /// The puller's wish.
        encryption: Encryption,
        /// What MUNGE says of the puller, with the key in it ([`crate::Munge`]). None: both have one already.
        credential: Option<String>,
    },
    /// The answer to [`Reply::Challenge`]: the puller has the key.
    Proof {
        /// Over both nonces and both wishes for encryption.
        proof: Proof,
        /// Where the connection is to be encrypted: the puller's message of the exchange of keys.
        exchange: Option<Vec<u8>>,
    },
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
        /// At most [`BLOCK_BYTES`].
        bytes: u64,
    },
    /// Let this puller read memory by itself, until it lists again.
    Expose {
        /// Providers of libfabric that the puller has, the best first.
        providers: Vec<String>,
        /// Whether answers to [`Request::Place`] have checksums.
        sums: bool,
    },
    /// Where bytes of a file are that is held, for a puller that reads them by itself.
    Place {
        /// Number of the file.
        file: u32,
        /// Bytes from its start.
        offset: u64,
        /// At most [`BLOCK_BYTES`].
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
        /// At most [`BLOCK_BYTES`].
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
    /// Answer to [`Request::Hello`] where a key is needed.
    Challenge {
        /// [`PROTOCOL_VERSION`] of the agent.
        protocol: u32,
        /// Made for this connection.
        nonce: Nonce,
        /// The agent's wish.
        encryption: Encryption,
        /// The agent takes a [`Request::Hello::credential`].
        munge: bool,
    },
    /// The handshake is over.
    Welcome {
        /// [`PROTOCOL_VERSION`] of the agent.
        protocol: u32,
        /// Over the same: the agent has the key. None where the connection itself says who is there (ssh).
        proof: Option<Proof>,
        /// The agent's message of the exchange of keys; all that follows is encrypted.
        exchange: Option<Vec<u8>>,
        /// Package version of the agent.
        version: String,
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
    /// Not the end: so many bytes of the answer to [`Request::Read`] follow.
    Bytes {
        /// How many.
        bytes: u64,
    },
    /// Not the end: so many bytes of the answer to [`Request::Read`] are zeros, and do not follow.
    Zeros {
        /// How many.
        bytes: u64,
    },
    /// The end of the answer to [`Request::Read`]; there are fewer bytes than were asked for where the file ends.
    End {
        /// CRC32C of the bytes that followed a [`Reply::Bytes`].
        crc32c: u32,
    },
    /// Answer to [`Request::Expose`].
    Exposed(Exposed),
    /// Not the end: so many bytes of the answer to [`Request::Place`] are in the data region.
    InMemory {
        /// From its start.
        at: u64,
        /// How many.
        bytes: u64,
    },
    /// The same, in the staging buffers.
    Staged {
        /// From the start of the first one.
        at: u64,
        /// How many.
        bytes: u64,
    },
    /// The end of the answer to [`Request::Place`].
    Placed {
        /// As in [`Reply::End`]; none where the puller wanted none.
        crc32c: Option<u32>,
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
    /// And nanoseconds.
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
