//! Messages on the control socket of a mount: one line of JSON for each. *firnd* is the process that serves the mount.
//!
//! To *drain* a file is to write its bytes to the *backing*, the directory that the mount serves. With `layout=log`
//! they come into logs there, and to *flatten* a file is to copy its logs into the plain file. The durability *level*
//! of a file says which failures its bytes survive.
//!
//! * The client sends one [`Request`] per line. firnd answers with any number of [`Reply::Progress`] lines, and then
//!   with exactly one final line, which is any other variant.
//! * firnd may close an idle connection that holds nothing, to make room for another connection. The last line of the
//!   closed connection is [`Reply::Closed`], and requests sent after the last answer were not carried out.
//! * Every field is plain JSON, and every path is a [`BytePath`]. So `firn … --json` prints a reply as it is, and other
//!   tools can use the socket.

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

/// Version of this protocol. A client refuses a firnd with another version, except for [`Request::Upgrade`].
pub const PROTOCOL_VERSION: u32 = 7;

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum Request {
    /// Get version and identity of firnd. Answer: [`Reply::Hello`].
    Hello,
    /// Get the [`Status`] of the mount.
    Status,
    /// Drain the files at or below `path` and wait until they have the level `until`: [`DurabilityLevel::Logged`],
    /// [`DurabilityLevel::Drained`] or [`DurabilityLevel::Durable`]. EBUSY: the files are logged, but cannot reach a
    /// higher level, because a writer has one open.
    Wait {
        /// Path below the mount point, without a leading slash. Empty: all files.
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
    /// Drain the files at or below `path`, flatten those with bytes in logs, and wait until both are done. EBUSY: a
    /// writer has one of the files open.
    Flatten {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Free the memory that holds drained data of files at or below `path`.
    Evict {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Keep the files at or below `path` in memory after they are drained, or stop doing so.
    Pin {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// Whether to keep the files in memory.
        pinned: bool,
    },
    /// Explain in which lane a file is, or would be if it were created. Answer: [`Reply::Placed`].
    Place {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// List the files at or below `path` that are open or have bytes in the arena, with their durability level.
    Files {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// List also idle files about which firnd has information that the backing lacks: the file was synced, or firnd
        /// died while the file was open.
        #[serde(default)]
        idle: bool,
    },
    /// Get the files that a process can map to read data: a [`DataRegion`].
    Region,
    /// Get a list of where each byte of a file is: a [`ChunkList`]. The listed bytes stay in place and unchanged until
    /// [`Request::ReleaseChunks`] or the end of the connection.
    Chunks {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Ask whether the file of a list was changed after the list was made.
    CheckChunks {
        /// [`ChunkList::list`].
        list: u64,
    },
    /// Release a list.
    ReleaseChunks {
        /// [`ChunkList::list`].
        list: u64,
    },
    /// An agent names the partner host. Files that it marks ([`Request::MarkPartnered`]) on this connection count as
    /// partnered until the connection ends, or until another connection names a partner.
    Partner {
        /// Name of the partner host. `None`: there is no partner now.
        host: Option<String>,
        /// Remark for users; empty: there is none.
        note: String,
    },
    /// The agent reports that the partner has a copy of a file.
    MarkPartnered {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// [`FileStatus::changes`] of the copy. If the file has changed since, nothing is marked.
        changes: u64,
    },
    /// An agent reports what it has sent to a puller on another host since its last report.
    ReportPull {
        /// Number of files that were sent completely.
        files: u64,
        /// Number of bytes that were sent, including those of holes.
        bytes: u64,
    },
    /// Begin a transaction. Its scope is a directory and all below it.
    Begin {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// Owner of the transaction. When the owner ends and the transaction is not prepared, it is aborted.
        #[serde(default)]
        owner: Owner,
        /// If set, make the directory as a part of the transaction; it must not exist. The value is the permission bits
        /// of the new directory, with the caller's umask already applied. If not set, the directory must exist.
        #[serde(default)]
        create: Option<u32>,
    },
    /// Make the transaction durable without deciding it. Until the decision, further changes in its scope wait.
    Prepare {
        /// Scope of the transaction.
        path: BytePath,
        /// Number for the transaction, chosen by the caller.
        id: u64,
    },
    /// Decide to commit the transaction, and apply it. Prepares it first if necessary.
    Commit {
        /// Scope of the transaction.
        path: BytePath,
        /// Number of the transaction. Default: the number with which it was prepared, else the last commit's number
        /// plus 1.
        id: Option<u64>,
        /// Begin the next transaction of the scope at once, before any program can change the scope.
        #[serde(default)]
        begin: bool,
        /// Answer after the durable decision, and apply the transaction later.
        #[serde(default, rename = "async")]
        apply_later: bool,
    },
    /// Undo the transaction.
    Abort {
        /// Scope of the transaction.
        path: BytePath,
    },
    /// Restore the files of checkpoint `id`.
    Restore {
        /// Scope of the transaction.
        path: BytePath,
        /// Number of a commit, or of a prepared transaction.
        id: u64,
    },
    /// Get the [`record::RunRecord`] of the mount.
    Record,
    /// Forget the recorded errors. The data of failed writes remains held, and the writes are still retried.
    ClearErrors,
    /// Replace this firnd by a firnd of the client's version, which continues the mount. The last reply of this firnd
    /// is [`Reply::Upgrading`]. Client and firnd may have different versions of this protocol.
    Upgrade {
        /// Options to change, in the form of the argument of `-o`.
        options: String,
    },
    /// Unmount and end.
    Unmount {
        /// Unmount even if a file is open (lazily), and end even if data cannot be drained. Undrained data remains in
        /// the arena.
        force: bool,
        /// What to do with data that is held.
        #[serde(default)]
        held: HeldPolicy,
    },
}

/// What to do with held data at the end of a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HeldPolicy {
    /// Drain it first.
    #[default]
    Drain,
    /// Leave it in the arena for the next mount.
    Keep,
    /// Drop it: remove the arena with all its data.
    Discard,
}

/// The owner of a transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Owner {
    /// No owner: the transaction stays open until a request commits or aborts it.
    #[default]
    None,
    /// The connection of the request, and the process that opened it.
    Connection,
    /// A process, as firnd sees it.
    Process {
        /// Process id.
        pid: u32,
        /// Start time of the process, in clock ticks since the host started. It distinguishes the process from a later
        /// process with the same id.
        start_ticks: u64,
    },
}

/// A reply of firnd.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "reply")]
pub enum Reply {
    /// Answer to [`Request::Hello`].
    Hello {
        /// [`PROTOCOL_VERSION`] of firnd.
        protocol: u32,
        /// Package version of firnd.
        version: String,
        /// Process id of firnd.
        pid: u32,
        /// Unique value of this firnd. A client that reconnects compares it, to notice that another mount answers now.
        incarnation: String,
    },
    /// Answer to [`Request::Status`].
    Status(Box<Status>),
    /// Answer to [`Request::Record`].
    Record(Box<record::RunRecord>),
    /// Answer to [`Request::Files`].
    Files {
        /// One entry for each file.
        files: Vec<FileStatus>,
    },
    /// Answer to [`Request::Evict`].
    Evicted {
        /// Bytes of memory freed.
        freed_bytes: u64,
        /// Bytes that remain in memory, because they are not drained or because a [`ChunkList`] lists them.
        held_bytes: u64,
    },
    /// Answer to [`Request::Pin`].
    Pinned {
        /// Number of the files at or below the path that are in memory.
        files: u64,
        /// Number of their bytes in memory.
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
        /// Whether the file was changed, or may have been changed, through the mount since the list was made.
        changed: bool,
    },
    /// Progress of a long request. Other lines follow.
    Progress {
        /// Bytes that this request must still drain.
        bytes_left: u64,
        /// Files with such bytes.
        files_left: u64,
        /// Present step in one or two words: `draining`, `syncing`, `unmounting`.
        phase: String,
    },
    /// Answer to [`Request::Commit`].
    Committed {
        /// Number of the commit.
        id: u64,
        /// Hosts that commit together with this one and have not applied their part yet.
        #[serde(default)]
        not_applied_on: Vec<String>,
    },
    /// Answer to [`Request::Unmount`].
    Unmounted {
        /// Files that remain in logs, because other hosts write to them.
        #[serde(default)]
        written_files: u64,
    },
    /// Answer to [`Request::Upgrade`]. This firnd ends now.
    Upgrading {
        /// Process id of the keeper, which starts the next firnd. The keeper ends if it cannot start one.
        keeper: u32,
    },
    /// The request succeeded, and its answer has no data.
    Done,
    /// firnd closes this idle connection to make room for another connection. This line is not an answer to a request:
    /// requests sent after the last answer were not carried out. Reconnect and repeat them.
    Closed,
    /// The request was not carried out, because too many connections are in use: each has a request or holds something.
    /// A few more connections may still send [`Request::Hello`], [`Request::Status`], [`Request::Upgrade`] and
    /// [`Request::Unmount`].
    Busy {
        /// Largest number of connections that may be in use.
        connections: u32,
        /// The processes with the most connections.
        holders: Vec<Holder>,
    },
    /// The request failed.
    Error {
        /// The errno that describes the failure best.
        errno: i32,
        /// What happened and what to do.
        message: String,
    },
}

/// A process with connections to firnd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Process id. 0: the process is in another PID namespace, so firnd does not see it.
    pub pid: u32,
    /// Number of its connections.
    pub connections: u32,
}

/// In which lane a name is, or would be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Path of the file in its lane. `None`: the file does not exist, or is in the backing itself.
    pub file: Option<BytePath>,
    /// Server of the file, as the file system reports it. Only with a placement in one file system.
    #[serde(default)]
    pub server: Option<BytePath>,
    /// Whether the name exists.
    pub exists: bool,
    /// Lane to which a new file with this name would go. `None`: the lanes take turns, or no lane takes files.
    pub lane: Option<BytePath>,
    /// Reason for the lane, in a sentence.
    pub reason: String,
}

/// A file about which firnd has information that the backing lacks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileStatus {
    /// Path below the mount point.
    pub path: BytePath,
    /// Durability level of the file.
    pub state: DurabilityLevel,
    /// Number of its bytes that are not in the backing.
    pub held_bytes: u64,
    /// Offset after the last held byte, or 0 if no bytes are held. The file is at least that long.
    #[serde(default)]
    pub held_end: u64,
    /// Whether a program has the file open.
    pub open: bool,
    /// How the file's last writer ended. A file of which firnd knows no writer counts as closed.
    #[serde(default)]
    pub ending: Ending,
    /// Number that changes with each change of the file's bytes or length; for [`Request::MarkPartnered`].
    #[serde(default)]
    pub changes: u64,
    /// Whether the file is in the scope of an unfinished transaction, whose abort would drop the file's held bytes.
    #[serde(default)]
    pub in_transaction: bool,
}

/// Where a mount keeps data, for a process that maps it read-only. The files belong to the user of the mount and have
/// mode 0600. A process must not store to them: that would destroy data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataRegion {
    /// Path of the arena file.
    pub path: BytePath,
    /// Identity of the arena, in hexadecimal digits. The superblocks of the arena and of its spill file contain it.
    pub uuid: String,
    /// Offset of the first chunk in the file.
    pub offset: u64,
    /// Size of the region: all chunks, from `offset` on.
    pub bytes: u64,
    /// Size of a page: unit and alignment of mappings.
    pub page_bytes: u64,
    /// Size of a chunk.
    pub chunk_bytes: u64,
    /// The spill file, if the mount has one.
    pub spill: Option<SpillRegion>,
}

/// The spill file of a [`DataRegion`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpillRegion {
    /// Path of the file.
    pub path: BytePath,
    /// Offset of the first chunk in the file.
    pub offset: u64,
    /// Size of all chunks, from `offset` on.
    pub bytes: u64,
}

/// A list of where each byte of a file is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkList {
    /// Number of the list, for [`Request::CheckChunks`] and [`Request::ReleaseChunks`] on the same connection.
    pub list: u64,
    /// Length of the file.
    pub bytes: u64,
    /// [`FileStatus::changes`] of the file when the list was made.
    #[serde(default)]
    pub changes: u64,
    /// The parts of the file, in order, without gap or overlap from offset 0 to its end.
    pub pieces: Vec<ChunkPiece>,
}

/// A range of a file whose bytes are in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkPiece {
    /// Offset of the range in the file.
    pub offset: u64,
    /// Length of the range, at least 1.
    pub bytes: u64,
    /// Where the bytes are.
    pub place: Place,
    /// Offset of the bytes at their place: in the region for [`Place::Memory`], in the spill file for [`Place::Spill`],
    /// in the memory file for [`Place::MemoryFile`], in the file of the backing for [`Place::Backing`]. 0 for
    /// [`Place::Hole`].
    pub at: u64,
    /// For memory and the spill file: index of the chunk. For a memory file: its number. The name of a memory file is
    /// the name of the region's file, `.m` and the number.
    pub chunk: Option<u32>,
}

/// Where bytes of a file are.
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
    /// In the backing only. The file of the backing may have a hole in this range.
    Backing,
    /// Nowhere: the bytes are zeros.
    Hole,
}

impl Place {
    /// Returns the word for the place.
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
