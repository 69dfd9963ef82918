//! Messages on the control socket: one JSON object per line, request then replies.
//!
//! The client sends one [`Request`] per line. firnd answers with any number of
//! [`Reply::Progress`] lines and exactly one final line (any other variant). A connection on which nobody has asked
//! anything for long, and that holds nothing, may be closed in favour of another one: [`Reply::Closed`] is its last
//! line then, and whatever was sent on it since the last answer was not carried out. Every field is plain
//! JSON, and every path a [`BytePath`], so `firn … --json` prints what it got and other tools can speak to the socket.

pub mod path;

use std::collections::BTreeMap;

use firn_format::durability::DurabilityLevel;
use firn_format::record::Ending;
use serde::{Deserialize, Serialize};

use crate::path::BytePath;

/// Version of this protocol; a client refuses a firnd that speaks another one.
pub const PROTOCOL_VERSION: u32 = 6;

/// What a client asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "request")]
pub enum Request {
    /// Who is there?
    Hello,
    /// A [`Status`].
    Status,
    /// Drain the files at or below `path` (relative to the mount, empty: all) and wait until they
    /// have the level `until` ([`DurabilityLevel::Logged`], [`DurabilityLevel::Drained`] or
    /// [`DurabilityLevel::Durable`]). EBUSY: they are logged, and cannot be more as long as somebody writes to them.
    Wait {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
        /// The durability level to reach.
        until: DurabilityLevel,
        /// Give up after so many milliseconds.
        timeout_ms: Option<u64>,
    },
    /// Begin to drain the files at or below `path`, without waiting.
    Drain {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
    },
    /// Drain the files at or below `path`, make those plain that have bytes in logs, and wait for that. EBUSY: somebody
    /// writes to some of them.
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
    /// Pending files at or below `path`, with their durability level.
    Files {
        /// Path below the mount point, without a leading slash.
        path: BytePath,
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
        /// Whose it is: when the owner is gone and nobody has prepared the transaction, it is aborted.
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
    /// Decide to commit the transaction and apply it; prepare it first, if nobody did.
    Commit {
        /// Path of its scope.
        path: BytePath,
        /// Its number; without one that with which it was prepared, or else the one after the last commit.
        id: Option<u64>,
        /// Begin the next one before anybody can change anything.
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
    /// The metrics as Prometheus text.
    Metrics,
    /// Drop the errors that are recorded (the data stays and is still tried).
    ClearErrors,
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

/// Whom a transaction belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Owner {
    /// Nobody: it stays open until somebody commits or aborts it.
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
        /// Tells this firnd from any other: who connects again must not take a later mount for this one.
        incarnation: String,
    },
    /// Answer to [`Request::Status`].
    Status(Box<Status>),
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
    /// Answer to [`Request::Metrics`].
    Metrics {
        /// Prometheus text exposition format.
        text: String,
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
    /// Done.
    Done,
    /// Not an answer, and the end of the connection: it was idle and is closed in favour of another one. What was sent
    /// since the last answer was not carried out: connect again, and repeat it.
    Closed,
    /// Too many connections are in use, each with a request or with something that it holds; nothing was done. A few
    /// more are answered [`Request::Hello`], [`Request::Status`], [`Request::Metrics`] and [`Request::Unmount`].
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

/// The state of one mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Package version of firnd.
    pub version: String,
    /// firnd's process id.
    pub pid: u32,
    /// Absolute path of the backing directory.
    pub backing: BytePath,
    /// Absolute path of the mount point.
    pub mount_point: BytePath,
    /// Path of the arena file.
    pub arena: BytePath,
    /// Seconds since firnd attached.
    pub uptime_s: f64,
    /// Lifetimes of firnd that this arena has seen, this one included.
    pub epoch: u64,
    /// Options in force that change what promises mean, as `key=value`; paths as people are shown them
    /// (`firn_format::quote`).
    pub options: Vec<String>,
    /// Bytes of chunks.
    pub arena_bytes: u64,
    /// Bytes of slabs that are in use.
    pub arena_used_bytes: u64,
    /// Bytes of one chunk.
    pub chunk_bytes: u64,
    /// Bytes written by programs and not yet in the backing.
    pub held_bytes: u64,
    /// Files that have such bytes.
    pub held_files: u64,
    /// Files with bytes in logs (layout=log), as far as this host knows.
    #[serde(default)]
    pub logged_files: u64,
    /// Age of the oldest of the held bytes, in milliseconds.
    pub oldest_held_ms: Option<u64>,
    /// Bytes recovered from an earlier firnd when this one attached.
    pub recovered_bytes: u64,
    /// Bytes of held data whose file could not be found in the backing at recovery.
    pub lost_file_bytes: u64,
    /// Files open through the mount.
    pub open_files: u64,
    /// Writers that wait for room in the arena.
    pub waiting_writers: u64,
    /// Since attach: files that the backing's file system did not put on the server that `placement` asked for.
    #[serde(default)]
    pub misplaced_files: u64,
    /// Since attach: bytes taken from programs.
    pub ingest_bytes: u64,
    /// Since attach: write requests taken from programs.
    pub ingest_writes: u64,
    /// Since attach: bytes written to the backing.
    pub drain_bytes: u64,
    /// Since attach: write calls to the backing that succeeded.
    pub drain_writes: u64,
    /// Since attach: write calls to the backing that failed.
    pub drain_errors: u64,
    /// Since attach: bytes that were overwritten or removed before they were drained.
    pub cancelled_bytes: u64,
    /// Since attach: bytes read by programs through firnd.
    pub read_bytes: u64,
    /// Drained bytes that are still in the arena to be read again.
    #[serde(default)]
    pub cached_bytes: u64,
    /// Bytes of held files of which the kernel may have a copy in its page cache.
    #[serde(default)]
    pub kernel_copies_bytes: u64,
    /// The most that they may be.
    #[serde(default)]
    pub kernel_copies_bytes_max: u64,
    /// Drained bytes that left the arena since the mount, to make room or because somebody asked.
    #[serde(default)]
    pub evicted_bytes: u64,
    /// Processes that are connected to the data socket.
    #[serde(default)]
    pub direct_clients: u64,
    /// Files that they write by direct access now.
    #[serde(default)]
    pub direct_files: u64,
    /// Slabs leased to them.
    #[serde(default)]
    pub direct_leases: u64,
    /// Since attach: leases that ended because their client broke the rules.
    #[serde(default)]
    pub direct_errors: u64,
    /// Lists of chunks that programs hold ([`Request::Chunks`]).
    #[serde(default)]
    pub chunk_lists: u64,
    /// Bytes in memory that they name, and that nobody else is given as long as they are held.
    #[serde(default)]
    pub chunk_list_bytes: u64,
    /// Connections of agents for pullers on other hosts ([`Request::ReportPull`]).
    #[serde(default)]
    pub pulls: u64,
    /// Since attach: files that agents have sent.
    #[serde(default)]
    pub pulled_files: u64,
    /// Since attach: bytes that agents have sent.
    #[serde(default)]
    pub pulled_bytes: u64,
    /// The same over the last seconds.
    #[serde(default)]
    pub pulled_bytes_per_s: f64,
    /// The spill file, where there is one.
    #[serde(default)]
    pub spill: Option<SpillStatus>,
    /// NUMA nodes, each with an equal part of the arena.
    #[serde(default)]
    pub numa_nodes: Vec<NumaNodeStatus>,
    /// Transactions that are not over.
    #[serde(default)]
    pub transactions: Vec<TransactionStatus>,
    /// Copies in the memory of another host, where the option `partner` asks for them.
    #[serde(default)]
    pub partner: Option<PartnerStatus>,
    /// Ingest over the last seconds, bytes per second.
    pub ingest_bytes_per_s: f64,
    /// Drain over the last seconds, bytes per second.
    pub drain_bytes_per_s: f64,
    /// Lanes and what they do.
    pub lanes: Vec<LaneStatus>,
    /// What makes placement slower than it could be, and what to do.
    #[serde(default)]
    pub placement_advice: Vec<String>,
    /// What other hosts that have the backing mounted do otherwise than this one, a sentence for each.
    #[serde(default)]
    pub host_differences: Vec<String>,
    /// Lines that firnd could not write to its log since it began: full, or over a limit.
    #[serde(default)]
    pub log_lines_lost: u64,
    /// Bytes of the largest file that firnd may write to the backing, the limit of whoever started it; none: no limit.
    #[serde(default)]
    pub file_size_limit_bytes: Option<u64>,
    /// Since attach: requests of the kernel that failed, by operation. A lookup of a name that is not there is one.
    #[serde(default)]
    pub failed_requests: BTreeMap<String, u64>,
    /// Since attach: decisions of the drain: `picked`, `written`, `waits` (after an error), `retried`, `given up`
    /// (whoever waited was told the error), `spilled` and `put off` (programs wanted the CPUs).
    #[serde(default)]
    pub drain_decisions: BTreeMap<String, u64>,
    /// Since attach: steps of transactions on this host: `begin`, `quiesce`, `drained`, `prepared`, `decided`,
    /// `applied`, `ended`, `undone`.
    #[serde(default)]
    pub transaction_steps: BTreeMap<String, u64>,
    /// Errors not yet dealt with, newest last, at most 64.
    pub errors: Vec<ErrorStatus>,
}

/// A transaction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TransactionStatus {
    /// Path of its scope below the mount point; empty: all of it.
    pub scope: BytePath,
    /// `open`, `prepared`, or `decided`: committed and not yet applied.
    pub stage: String,
    /// Its number, once it has one.
    pub id: Option<u64>,
    /// Whose it is; none: nobody's.
    #[serde(default)]
    pub owner: Option<OwnerStatus>,
    /// Seconds since it was begun; none: an earlier firnd began it.
    #[serde(default)]
    pub age_s: Option<f64>,
    /// Bytes that programs wrote in it, with what is not in the backing yet.
    #[serde(default)]
    pub bytes: u64,
    /// Files, directories and others that it changes.
    pub objects: u64,
    /// How many names of files are in each state of CprFS.
    pub states: BTreeMap<String, u64>,
    /// An earlier firnd prepared it.
    pub recovered: bool,
    /// Where several hosts commit together: those that have come.
    #[serde(default)]
    pub here: Vec<String>,
    /// Why it could not be applied when that was tried last; it is tried again.
    #[serde(default)]
    pub error: Option<String>,
    /// How far its backup is; none without the option `backup`.
    #[serde(default)]
    pub backup: Option<BackupStatus>,
}

/// Copies in the memory of another host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartnerStatus {
    /// The option: `next`, or the name of a host.
    pub wanted: String,
    /// What this host is called among the others.
    pub this_host: String,
    /// The file that says which hosts fail together; none: each alone.
    pub domains: Option<BytePath>,
    /// The host that has the copies; none: there is none now.
    pub host: Option<String>,
    /// What a person should know of it; empty: nothing.
    pub note: String,
    /// Held files of which it has all bytes.
    pub copied_files: u64,
    /// Their held bytes.
    pub copied_bytes: u64,
    /// Held files of which it does not.
    pub left_files: u64,
    /// Their held bytes.
    pub left_bytes: u64,
    /// Seconds since the oldest of those was written; 0: there are none.
    pub lag_s: f64,
}

/// Who owns a transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerStatus {
    /// Process id of the owner, or of who opened the connection; 0: firnd does not see it.
    pub pid: u32,
    /// It is a connection of that process.
    pub connection: bool,
}

/// The backup of a transaction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BackupStatus {
    /// The transaction is prepared, and can be finished from there.
    pub whole: bool,
    /// Seconds since what did not change any more was copied last; none: not yet.
    pub age_s: Option<f64>,
    /// Bytes that are there.
    pub copied_bytes: u64,
    /// Bytes that a prepare has to copy.
    pub left_bytes: u64,
    /// Why it could not be written last.
    pub error: Option<String>,
}

/// The spill file of a mount.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SpillStatus {
    /// Path of the file.
    pub path: BytePath,
    /// Bytes that it may hold.
    pub bytes: u64,
    /// Bytes of its slots in use: whole chunks.
    pub used_bytes: u64,
    /// Since attach: bytes moved to it.
    pub moved_bytes: u64,
    /// Over the last seconds, bytes per second.
    pub moved_bytes_per_s: f64,
    /// The last try to write to it failed, or it was found damaged: nothing moves to it.
    pub failing: bool,
}

/// One NUMA node and its part of the arena.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NumaNodeStatus {
    /// The kernel's number.
    pub numa_node: u32,
    /// Bytes of its chunks.
    pub bytes: u64,
    /// Bytes of those in use; the others are free.
    pub used_bytes: u64,
    /// Since attach: slabs of it given to writers that run nearer to another NUMA node.
    pub foreign_slabs: u64,
}

/// One I/O server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneStatus {
    /// Its backing directory.
    pub path: BytePath,
    /// IO threads that may write to it at once.
    pub writers_max: u32,
    /// IO threads that do.
    pub writers: u32,
    /// Milliseconds until it is tried again after an error.
    pub retry_in_ms: Option<u64>,
    /// Files in line for a write.
    #[serde(default)]
    pub queued_files: u64,
    /// Files with bytes that are not in the backing yet.
    #[serde(default)]
    pub held_files: u64,
    /// Those bytes.
    #[serde(default)]
    pub held_bytes: u64,
    /// With `order=sequential`: the file that is being written.
    #[serde(default)]
    pub file: Option<BytePath>,
    /// What was placed in it, where files are placed and it is not the backing itself.
    #[serde(default)]
    pub placed: Option<PlacedStatus>,
    /// What gives it one writer among several hosts, where something does.
    #[serde(default)]
    pub token: Option<TokenStatus>,
}

/// The token of a lane.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenStatus {
    /// What it does now.
    pub state: TokenState,
    /// Milliseconds for which it has done so.
    pub for_ms: u64,
    /// Who has it instead, as far as this host was told.
    pub holder: Option<String>,
    /// Since attach: how often this host got it.
    pub granted: u64,
    /// Since attach: milliseconds that drains waited for it.
    pub waited_ms: u64,
    /// Since attach: how often drains went on without it.
    pub went_without: u64,
    /// Since attach: questions that failed.
    pub errors: u64,
    /// Why the last of them did.
    pub last_error: Option<String>,
}

/// What the token of a lane does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenState {
    /// The lane has nothing to write.
    #[default]
    Idle,
    /// The lane waits for it.
    Waiting,
    /// This host has it.
    Held,
    /// The lane is written to without it.
    Without,
}

/// What was placed in a lane.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlacedStatus {
    /// Files that were made there since the mount.
    pub files: u64,
    /// Bytes that were written there since the mount.
    pub bytes: u64,
    /// Whether new files may go to it.
    pub takes_files: bool,
    /// Whether it takes files and bytes.
    pub state: LaneState,
}

/// Whether a lane takes files and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaneState {
    /// As far as is known.
    #[default]
    Ok,
    /// There was no room.
    Full,
    /// It did not answer as a directory should.
    Gone,
    /// A call of it does not return.
    Hung,
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

/// An error of the backing that firnd remembers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ErrorStatus {
    /// Path below the mount point, as far as it is known.
    pub path: BytePath,
    /// The errno.
    pub errno: i32,
    /// What was tried and what it means.
    pub message: String,
    /// How often it happened in a row.
    pub count: u64,
    /// Seconds since the last time.
    pub age_s: f64,
    /// Whether the file still has bytes that are not drained.
    pub pending: bool,
}

/// One pending file.
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
    /// Whether its writers closed it. A file that firnd has nothing to do with any more counts as closed.
    #[serde(default)]
    pub ending: Ending,
    /// Another number after each change of its bytes or its length: for [`Request::MarkPartnered`].
    #[serde(default)]
    pub changes: u64,
    /// It is in the scope of a transaction that is not over: what is held of it may come to nothing.
    #[serde(default)]
    pub in_transaction: bool,
}

/// Where a mount keeps data, for a process that maps it. The files belong to the user who mounted, mode
/// 0600; who maps them for writing breaks them.
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
    /// file. [`Place::Backing`]: from the start of the file. [`Place::Hole`]: 0.
    pub at: u64,
    /// Index of the chunk, in memory and in the spill file.
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
            Self::Backing => "backing",
            Self::Hole => "hole",
        }
    }
}
