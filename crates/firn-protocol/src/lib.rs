//! Messages on the control socket: one JSON object per line, request then replies.
//!
//! * The client sends one [`Request`] per line. firnd answers with any number of [`Reply::Progress`] lines and exactly
//!   one final line (any other variant).
//! * firnd may close a connection that holds nothing and was idle for long, in favour of another one. [`Reply::Closed`]
//!   is its last line then; requests sent since the last answer were not carried out.
//! * Every field is plain JSON, and every path a [`BytePath`]. So `firn … --json` prints what it got, and other tools
//!   can speak to the socket.

pub mod events;
pub mod figures;
mod host_report;
pub mod path;
pub mod record;
pub mod status;

use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use serde::{Deserialize, Serialize};

pub use crate::figures::HistogramStatus;
pub use crate::host_report::{HostReport, LaneReport, NAMES_MAX, PartnerReport};
use crate::path::BytePath;
pub use crate::status::{
    BackupStatus, ErrorStatus, LaneState, LaneStatus, NumaNodeStatus, OwnerStatus, PartnerStatus,
    PlacedStatus, Scrape, SpillStatus, Status, TokenState, TokenStatus, TransactionStage,
    TransactionStatus, WaitingProgram, close_hint,
};

/// Version of this protocol; a client refuses a firnd that speaks another one.
pub const PROTOCOL_VERSION: u32 = 7;

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum Request {
    /// Version and identity of firnd: a [`Reply::Hello`].
    Hello,
    /// A [`Status`].
    Status,
    /// Drain the files at or below `path` (relative to the mount, empty: all) and wait until they
    /// have the level `until` ([`DurabilityLevel::Logged`], [`DurabilityLevel::Drained`] or
    /// [`DurabilityLevel::Durable`]). EBUSY: they are logged, and a writer keeps them from a higher level.
    Wait {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// The durability level to reach.
        until: DurabilityLevel,
        /// Milliseconds after which the request fails.
        timeout_ms: Option<u64>,
    },
    /// Begin to drain the files at or below `path`, without waiting.
    Drain {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Drain the files at or below `path`, make those plain that have bytes in logs, and wait for that. EBUSY: a writer
    /// has one of them open.
    Flatten {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Free the memory of drained data at or below `path`.
    Evict {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Keep the files at or below `path` in memory once they are drained, or no longer.
    Pin {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// Whether to keep them.
        pinned: bool,
    },
    /// Say where a file lies, or would lie.
    Place {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Files at or below `path` that are open or have bytes in the arena, with their durability level.
    Files {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// The others too of which firnd knows more than the backing shows: that they were synced, or cut.
        #[serde(default)]
        idle: bool,
    },
    /// Where the arena and the spill file can be mapped: a [`DataRegion`].
    Region,
    /// Where each byte of a file is: a [`ChunkList`]. What it names stays where it is, unchanged, until
    /// [`Request::ReleaseChunks`] or the end of the connection.
    Chunks {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Whether a file was changed since its list was made.
    CheckChunks {
        /// [`ChunkList::list`].
        list: u64,
    },
    /// A list is not used any more.
    ReleaseChunks {
        /// [`ChunkList::list`].
        list: u64,
    },
    /// This connection is an agent's and speaks of the partner; what it marks counts until it ends, or until another
    /// one names a partner.
    Partner {
        /// Name of the partner host; none: there is none now.
        host: Option<String>,
        /// What a person should know of it; empty: nothing.
        note: String,
    },
    /// The partner that this connection named has a copy of a file.
    MarkPartnered {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// [`FileStatus::changes`] of what it has. If the file has others now, nothing is marked.
        changes: u64,
    },
    /// The connection is that of an agent for a puller on another host, to which it has sent so much more.
    ReportPull {
        /// Files that are through.
        files: u64,
        /// Bytes, those of holes as well.
        bytes: u64,
    },
    /// Begin a transaction in a directory and all below it.
    Begin {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// Its owner. When the owner is gone and the transaction is not prepared, it is aborted.
        #[serde(default)]
        owner: Owner,
        /// Make the directory as a part of the transaction, with these permission bits, from which the caller's umask
        /// is taken already; it must not exist. Without, it must.
        #[serde(default)]
        create: Option<u32>,
    },
    /// Make the transaction durable and leave its outcome open. Changes wait until it is decided.
    Prepare {
        /// Path of its scope.
        path: BytePath,
        /// Number that the caller gives it.
        id: u64,
    },
    /// Decide to commit the transaction and apply it; prepare it first if it is not prepared.
    Commit {
        /// Path of its scope.
        path: BytePath,
        /// Its number; without one that with which it was prepared, or else the one after the last commit.
        id: Option<u64>,
        /// Begin the next transaction before any program can change the scope.
        #[serde(default)]
        begin: bool,
        /// Answer once it is decided, durably, and apply it after the answer.
        #[serde(default, rename = "async")]
        apply_later: bool,
    },
    /// Throw the transaction away.
    Abort {
        /// Path of its scope.
        path: BytePath,
    },
    /// Make the files those of checkpoint `id`.
    Restore {
        /// Path of the scope.
        path: BytePath,
        /// Number of a commit, or of a transaction that is prepared.
        id: u64,
    },
    /// A [`record::RunRecord`].
    Record,
    /// Drop the errors that are recorded (the data stays and is still tried).
    ClearErrors,
    /// Die, and have the program of the client go on with the mount: [`Reply::Upgrading`] is the last word of this
    /// firnd. Client and firnd may speak different versions of this protocol.
    Upgrade {
        /// Options that change, as after `-o`.
        options: String,
    },
    /// Unmount and end. With `force`: unmount even if a file is open (lazily) and end even if data
    /// cannot be drained (it stays in the arena).
    Unmount {
        /// See above.
        force: bool,
        /// What becomes of the data that is held.
        #[serde(default)]
        held: HeldPolicy,
    },
}

/// What the end of a mount does with the data that is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldPolicy {
    /// Drain it first.
    #[default]
    Drain,
    /// Leave it in the arena for the next mount.
    Keep,
    /// Drop it: the arena is removed with all that is in it.
    Discard,
}

/// The owner of a transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Owner {
    /// None: it stays open until a request commits or aborts it.
    #[default]
    None,
    /// The connection that the request comes over, and the process that opened it.
    Connection,
    /// A process, as firnd sees it.
    Process {
        /// Its process id.
        pid: u32,
        /// When it began, in clock ticks since the host started: tells it from a later one of this number.
        start_ticks: u64,
    },
}

/// What firnd answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// Answer to [`Request::Hello`].
    Hello {
        /// [`PROTOCOL_VERSION`] of firnd.
        protocol: u32,
        /// Package version of firnd.
        version: String,
        /// Its process id.
        pid: u32,
        /// Tells this firnd from any other, so that a client that connects again does not mistake a later mount for it.
        incarnation: String,
    },
    /// Answer to [`Request::Status`].
    Status(Box<Status>),
    /// Answer to [`Request::Record`].
    Record(Box<record::RunRecord>),
    /// Answer to [`Request::Files`].
    Files {
        /// One entry a file.
        files: Vec<FileStatus>,
    },
    /// Answer to [`Request::Evict`].
    Evicted {
        /// Bytes of memory freed.
        freed_bytes: u64,
        /// Bytes that stay because they are not drained, or in use by a [`ChunkList`].
        held_bytes: u64,
    },
    /// Answer to [`Request::Pin`].
    Pinned {
        /// Files in memory that are concerned.
        files: u64,
        /// Their bytes in memory.
        bytes: u64,
    },
    /// Answer to [`Request::Place`].
    Placed(Explanation),
    /// Answer to [`Request::Region`].
    Region(DataRegion),
    /// Answer to [`Request::Chunks`].
    Chunks(ChunkList),
    /// Answer to [`Request::CheckChunks`].
    ChunksChecked {
        /// The file was changed through the mount since, or may have been.
        changed: bool,
    },
    /// Not the end: how far a long request is.
    Progress {
        /// Bytes that are still to be drained for this request.
        bytes_left: u64,
        /// Files that still have some.
        files_left: u64,
        /// What is going on, in a word or two: `draining`, `syncing`, `unmounting`.
        phase: String,
    },
    /// Answer to [`Request::Commit`].
    Committed {
        /// Its number.
        id: u64,
        /// Hosts that commit together with this one and have not applied their part yet.
        #[serde(default)]
        not_applied_on: Vec<String>,
    },
    /// Answer to [`Request::Unmount`].
    Unmounted {
        /// Files that stay in logs, because other hosts write to them.
        #[serde(default)]
        written_files: u64,
    },
    /// Answer to [`Request::Upgrade`]: this firnd dies now.
    Upgrading {
        /// The process that starts the next firnd, and that ends where it cannot.
        keeper: u32,
    },
    /// Done.
    Done,
    /// Not an answer, and the end of the connection: it was idle and is closed in favour of another one. What was sent
    /// since the last answer was not carried out: connect again, and repeat it.
    Closed,
    /// Too many connections are in use, each with a request or with something that it holds; nothing was done. A few
    /// more are answered [`Request::Hello`], [`Request::Status`], [`Request::Upgrade`] and
    /// [`Request::Unmount`].
    Busy {
        /// How many there may be.
        connections: u32,
        /// The processes with the most of them.
        holders: Vec<Holder>,
    },
    /// Failed.
    Error {
        /// The errno that says it best.
        errno: i32,
        /// What happened and what to do.
        message: String,
    },
}

/// A process that is connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Its process id; 0: firnd does not see it.
    pub pid: u32,
    /// Its connections.
    pub connections: u32,
}

/// Where a name is placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Path of the file in its lane; none: it does not exist, or lies in the backing itself.
    pub file: Option<BytePath>,
    /// With a placement on one file system: where that says that the file is.
    #[serde(default)]
    pub server: Option<BytePath>,
    /// Whether there is something with this name.
    pub exists: bool,
    /// The lane that a new file with this name would go to; none: it is the lanes' turn, or none takes files.
    pub lane: Option<BytePath>,
    /// Why.
    pub reason: String,
}

/// A file that firnd knows more of than the backing shows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileStatus {
    /// Path below the mount point.
    pub path: BytePath,
    /// Where it stands.
    pub state: DurabilityLevel,
    /// Its bytes that are not in the backing.
    pub held_bytes: u64,
    /// Offset behind the last of them, 0 where there are none: the file is at least so long.
    #[serde(default)]
    pub held_end: u64,
    /// Whether a program has it open.
    pub open: bool,
    /// Whether its writers closed it. A file that firnd knows nothing of counts as closed.
    #[serde(default)]
    pub ending: Ending,
    /// Another number after each change of its bytes or its length: for [`Request::MarkPartnered`].
    #[serde(default)]
    pub changes: u64,
    /// It is in the scope of a transaction that is not over: what is held of it may come to nothing.
    #[serde(default)]
    pub in_transaction: bool,
}

/// Where a mount keeps data, for a process that maps it read-only. The files belong to the user of the mount, mode
/// 0600; a store to them destroys data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRegion {
    /// Path of the arena file.
    pub path: BytePath,
    /// Tells this arena from any other: what its superblock and that of its spill file say, in hexadecimal
    /// digits.
    pub uuid: String,
    /// Bytes from the start of the file to the first chunk.
    pub offset: u64,
    /// Bytes of chunks from there on: the region.
    pub bytes: u64,
    /// Bytes of a page: unit of allocation and alignment of what is mapped.
    pub page_bytes: u64,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// The spill file, where there is one.
    pub spill: Option<SpillRegion>,
}

/// The spill file of a [`DataRegion`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillRegion {
    /// Path of the file.
    pub path: BytePath,
    /// Bytes from the start of the file to the first chunk.
    pub offset: u64,
    /// Bytes of chunks from there on.
    pub bytes: u64,
}

/// Where each byte of a file is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkList {
    /// For [`Request::CheckChunks`] and [`Request::ReleaseChunks`] on the same connection.
    pub list: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// [`FileStatus::changes`] of what is listed.
    #[serde(default)]
    pub changes: u64,
    /// Without gap or overlap from offset 0 to the end of the file.
    pub pieces: Vec<ChunkPiece>,
}

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkPiece {
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Bytes, more than none.
    pub bytes: u64,
    /// Where they are.
    pub place: Place,
    /// [`Place::Memory`]: bytes from the start of the region. [`Place::Spill`]: from the start of the spill
    /// file. [`Place::MemoryFile`]: from the start of that. [`Place::Backing`]: from the start of the file.
    /// [`Place::Hole`]: 0.
    pub at: u64,
    /// Index of the chunk, in memory and in the spill file; number of the memory file, whose name is that of the region's
    /// file with `.m` and this number behind it.
    pub chunk: Option<u32>,
}

/// Where bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// In the region.
    Memory,
    /// In the spill file.
    Spill,
    /// In a memory file.
    #[serde(rename = "memory-file")]
    MemoryFile,
    /// In the backing only, which may have a hole there.
    Backing,
    /// Nowhere: they are zeros.
    Hole,
}

impl Place {
    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Spill => "spill",
            Self::MemoryFile => "memory-file",
            Self::Backing => "backing",
            Self::Hole => "hole",
        }
    }
}
