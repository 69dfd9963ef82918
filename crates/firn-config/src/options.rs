//! The options of a mount, typed.
//!
//! [`Options`] travel from `firn mount` to firnd as JSON, so every type here serialises. Out of
//! [`crate::Sources::resolve`] they are in range and free of contradictions.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray, VariantNames};

use crate::kernel::KernelFlag;
use crate::table::TABLE;

/// When data goes to the backing.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Drain {
    /// As it comes.
    #[default]
    Eager,
    /// On request: fsync(2), `firn drain`, `firn wait`.
    Demand,
    /// As it comes; in a transaction to where it is staged until that is committed.
    Commit,
}

/// How programs reach the files.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Frontend {
    /// Through the kernel, and by direct access where the preload library is loaded.
    #[default]
    Fuse,
    /// Through the preload library only.
    Preload,
}

/// What chooses the I/O server of a new file.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Placement {
    /// The backing's file system.
    #[default]
    None,
    /// Firn: it goes whole to one of several directories.
    Dirs,
    /// Firn tells Lustre.
    Lustre,
    /// Firn tells MooseFS.
    Moosefs,
    /// A program of the site makes the file.
    Command,
}

impl Placement {
    /// As the option has it.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the backing is one file system whose files are steered to its servers.
    pub fn is_steered(self) -> bool {
        !matches!(self, Self::None | Self::Dirs)
    }
}

/// How the bytes of a new file lie in the backing until it is closed.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Layout {
    /// In their places in the file.
    #[default]
    Plain,
    /// In a log of each host.
    Log,
}

/// When the logs of a file become the plain file.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Flatten {
    /// After the last host has closed it, while programs go on.
    #[default]
    Behind,
    /// In the close of the last host.
    Close,
    /// At the unmount.
    Demand,
    /// When it is opened for reading, and at the unmount.
    Read,
    /// By a mount with another value.
    Off,
}

/// When close(2) returns.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Close {
    /// As `drain` says; not found in resolved options.
    Auto,
    /// When the file is in the backing.
    Drain,
    /// At once.
    Held,
}

/// What fsync(2) waits for.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Fsync {
    /// Bytes and name durable in the backing.
    Durable,
    /// Nothing: the bytes are in the arena.
    Held,
}

/// Where firnd leaves its record of the run.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum RecordPlace {
    /// In the runtime directory of this host.
    Host,
    /// There, and in the backing, where other hosts find it.
    Backing,
}

/// Whether the kernel reads drained files from the backing itself.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Passthrough {
    /// Where firnd may (root, kernel 6.9 or later).
    Auto,
    /// Never.
    Off,
}

/// Whether another firnd goes on with the mount where one dies.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Takeover {
    /// Where the kernel and the other options allow it.
    Auto,
    /// Programs lose the mount.
    No,
}

/// In which order the files of one I/O server are written.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Order {
    /// In turns of one write each.
    Interleaved,
    /// One after the other.
    Sequential,
}

/// How much firnd writes to its log.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum LogLevel {
    /// Only faults that a person has to mend.
    Error,
    /// Also what is unusual.
    Warn,
    /// Also what changes state: attach, recovery, unmount.
    Info,
    /// Also each decision of the drain.
    Debug,
    /// Also each request.
    Trace,
}

impl LogLevel {
    /// The word.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What becomes of changes in a transaction.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum Mode {
    /// They are held until it is committed.
    #[default]
    Buffer,
    /// They go to the backing, and what undoes them is saved.
    Shadow,
}

/// Hosts that commit together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Participants {
    /// This one alone.
    #[default]
    Off,
    /// Any hosts, this many.
    Count(u32),
    /// The hosts of this list.
    Hosts(Vec<String>),
}

/// Which other host has copies of what this one holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partner {
    /// None.
    #[default]
    None,
    /// The next one after this of those that have an agent.
    Next,
    /// This one.
    Host(String),
}

/// Where the lock is kept that gives a lane one writer among several hosts.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    Serialize,
    Deserialize,
    IntoStaticStr,
    VariantArray,
    VariantNames,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum TokenService {
    /// There is none: hosts write when they like.
    #[default]
    None,
    /// In files of the backing.
    Flock,
    /// In etcd.
    Etcd,
}

/// The options of a mount. One that a request of another version lacks has its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// Bytes of chunks in the arena.
    pub arena_bytes: u64,
    /// Bytes of a chunk: a power of two from 64 KiB to 1 GiB, at most `arena_bytes`.
    pub chunk_bytes: u64,
    /// IO threads that write to the backing.
    pub io_threads: u32,
    /// Order of the files of one I/O server.
    pub order: Order,
    /// Writes that one I/O server gets at once; 0: as many as there are IO threads.
    pub lane_writers: u32,
    /// How programs reach the files.
    pub frontend: Frontend,
    /// When data goes to the backing.
    pub drain: Drain,
    /// Commits of a scope that can be undone; 0: none.
    pub history: u32,
    /// What becomes of changes in a transaction.
    pub mode: Mode,
    /// Hosts that commit together.
    pub participants: Participants,
    /// The name of this one; `None`: the host's.
    pub host: Option<String>,
    /// The host that has copies of what this one holds.
    pub partner: Partner,
    /// Which hosts fail together; none: each alone.
    pub partner_domains: Option<PathBuf>,
    /// Milliseconds that a commit waits for the other hosts.
    pub participants_wait_ms: u64,
    /// What gives each lane one writing host.
    pub tokens: TokenService,
    /// Milliseconds that a host holds a token while others wait for it.
    pub token_hold_ms: u64,
    /// Milliseconds that a drain waits for a token that does not come.
    pub token_wait_ms: u64,
    /// Members of the etcd cluster, HOST:PORT each.
    pub token_endpoints: Vec<String>,
    /// Name of the tokens in etcd; `None`: that of the backing.
    pub token_group: Option<String>,
    /// Names of commit rules, and paths of files of them.
    pub rules: Vec<String>,
    /// A second directory for what is prepared; `None`: none.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub backup: Option<PathBuf>,
    /// Milliseconds between its rounds.
    pub backup_every_ms: u64,
    /// What chooses the I/O server of a new file.
    pub placement: Placement,
    /// Directories that files are placed in, each on a server of its own.
    #[serde(with = "firn_protocol::path::exact_list")]
    pub lanes: Vec<PathBuf>,
    /// A file that says which names go to which lane; `None`: numbers in names say it.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub lane_map: Option<PathBuf>,
    /// With a placement of one file system: what it calls each lane's server.
    pub servers: Vec<String>,
    /// With `placement=command`: the program.
    pub place_command: Option<PathBuf>,
    /// How the bytes of new files lie in the backing until they are closed.
    pub layout: Layout,
    /// Patterns of the names of files that lie in logs; empty: all.
    pub log_files: Vec<String>,
    /// When logs become the plain file.
    pub flatten: Flatten,
    /// When close returns.
    pub close: Close,
    /// What fsync waits for.
    pub fsync: Fsync,
    /// Milliseconds that a byte may stay undrained though its chunk is not full.
    pub drain_age_ms: u64,
    /// Percent of a CPU for a drain without a waiting caller, while programs want all CPUs; 100: no limit.
    pub drain_cpu_percent: u32,
    /// Threads that answer the kernel; 0: one a core.
    pub fuse_threads: u32,
    /// Whether other users may use the mount.
    pub allow_other: bool,
    /// Kernel passthrough for reads.
    pub passthrough: Passthrough,
    /// Bytes from which on a file gets a memory file of its own; 0: none does.
    pub memory_file_bytes_min: u64,
    /// Whether another firnd goes on with the mount.
    pub takeover: Takeover,
    /// Milliseconds in which firnd must answer its keeper; 0: it is not asked.
    pub watchdog_ms: u64,
    /// Directory of the arena; `None`: the runtime directory.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub arena_dir: Option<PathBuf>,
    /// Where the NUMA nodes are described; `None`: all memory is as near.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub numa_topology: Option<PathBuf>,
    /// The spill file, or a directory for it; `None`: nothing spills.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub spill: Option<PathBuf>,
    /// Its bytes; 0: as many as `arena_bytes`.
    pub spill_bytes: u64,
    /// Percent of the arena in use above which chunks move there.
    pub spill_upper_percent: u32,
    /// Percent of the arena in use down to which they move.
    pub spill_lower_percent: u32,
    /// Milliseconds that the kernel may keep attributes and names.
    pub attr_timeout_ms: u64,
    /// How much firnd logs.
    pub log_level: LogLevel,
    /// Socket of the host's system log.
    pub system_log: Option<PathBuf>,
    /// See the table.
    pub record: RecordPlace,
    /// Whether the mount refuses changes.
    pub read_only: bool,
    /// Whether the mount may hide files that are at the mount point.
    pub nonempty: bool,
    /// Whether the arena's memory is taken at mount instead of at first use.
    pub populate: bool,
    /// Flags of the mount that the kernel honours (`nodev`, `noexec`, …).
    pub kernel_flags: Vec<KernelFlag>,
}

impl Default for Options {
    /// The defaults of the table.
    fn default() -> Self {
        let mut options = Self::blank();
        for row in &TABLE {
            let value = row.kind.parse(row.default);
            // An empty default means that the field stays as `blank` made it.
            if !row.default.is_empty() {
                (row.set)(
                    &mut options,
                    value.expect("the table's defaults are in range (a test proves it)"),
                );
            }
        }
        options
    }
}

impl Options {
    /// Something for the table's defaults to fill.
    fn blank() -> Self {
        Self {
            arena_bytes: 0,
            chunk_bytes: 0,
            io_threads: 0,
            order: Order::Interleaved,
            lane_writers: 0,
            frontend: Frontend::Fuse,
            drain: Drain::Eager,
            history: 0,
            mode: Mode::Buffer,
            participants: Participants::Off,
            host: None,
            partner: Partner::None,
            partner_domains: None,
            participants_wait_ms: 0,
            tokens: TokenService::None,
            token_hold_ms: 0,
            token_wait_ms: 0,
            token_endpoints: Vec::new(),
            token_group: None,
            rules: Vec::new(),
            backup: None,
            backup_every_ms: 0,
            placement: Placement::None,
            lanes: Vec::new(),
            lane_map: None,
            servers: Vec::new(),
            place_command: None,
            layout: Layout::Plain,
            log_files: Vec::new(),
            flatten: Flatten::Behind,
            close: Close::Auto,
            fsync: Fsync::Durable,
            drain_age_ms: 0,
            drain_cpu_percent: 0,
            fuse_threads: 0,
            allow_other: false,
            passthrough: Passthrough::Auto,
            memory_file_bytes_min: 16 << 20,
            takeover: Takeover::Auto,
            watchdog_ms: 0,
            arena_dir: None,
            spill: None,
            numa_topology: None,
            spill_bytes: 0,
            spill_upper_percent: 0,
            spill_lower_percent: 0,
            attr_timeout_ms: 0,
            log_level: LogLevel::Info,
            system_log: None,
            record: RecordPlace::Host,
            read_only: false,
            nonempty: false,
            populate: true,
            kernel_flags: Vec::new(),
        }
    }

    /// Puts what `auto` stands for in its place.
    pub(crate) fn settle(&mut self) {
        if self.close == Close::Auto {
            // In shadow mode other hosts wait for what is closed.
            let is_shown = self.drain == Drain::Eager || self.mode == Mode::Shadow;
            self.close = if is_shown { Close::Drain } else { Close::Held };
        }
    }

    /// Whether the name of a new file decides where its data lies.
    pub fn places_by_name(&self) -> bool {
        self.placement != Placement::None || !self.log_files.is_empty()
    }

    /// The options that change what promises mean, as `key=value`, for the status of the mount.
    pub fn in_force(&self) -> Vec<String> {
        TABLE
            .iter()
            .filter(|row| row.changes_promises)
            .map(|row| format!("{}={}", row.name, (row.get)(self)))
            .collect()
    }
}
