//! The options of a mount as typed values.
//!
//! `firn mount` sends [`Options`] as JSON to firnd (the process that serves the mount), so every type here can be
//! serialized. Options that [`crate::Sources::resolve`] returns are in range and do not contradict each other. The long
//! help of each option is in [`crate::table::TABLE`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use strum::{IntoStaticStr, VariantArray, VariantNames};

use crate::kernel::KernelFlag;
use crate::table::TABLE;

/// When data is *drained*: written from memory to the backing, the directory that the mount serves.
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
    /// Data is drained as soon as it is written.
    #[default]
    Eager,
    /// Data is drained when fsync(2), `firn drain` or `firn wait` demands it.
    Demand,
    /// Data is drained as soon as it is written. In a transaction it goes to staged copies of the changed bytes until
    /// the commit.
    Commit,
}

/// How programs reach the files of a mount.
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
    /// Through the kernel. Programs with the preload library have direct access as well.
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
    /// The backing's file system chooses.
    #[default]
    None,
    /// Firn puts the whole file into one of several directories.
    Dirs,
    /// Firn chooses, and tells Lustre.
    Lustre,
    /// Firn chooses, and tells MooseFS.
    Moosefs,
    /// Firn chooses, and a program of the site makes the file.
    Command,
}

impl Placement {
    /// Returns the word of the option.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Whether the backing is one file system, and Firn tells it which server gets a file.
    pub fn is_steered(self) -> bool {
        !matches!(self, Self::None | Self::Dirs)
    }
}

/// Layout of a new file in the backing until it is closed.
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
    /// The plain file.
    #[default]
    Plain,
    /// A log for each host.
    Log,
}

/// When the logs of a file are flattened, that is, made into the plain file.
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
    /// The file is flattened in the background, after the last host has closed it.
    #[default]
    Behind,
    /// The file is flattened when the last host closes it; that close waits.
    Close,
    /// Files are flattened at the unmount.
    Demand,
    /// The file is flattened when it is opened for reading, and at the latest at the unmount.
    Read,
    /// This mount flattens no file.
    Off,
}

/// When close(2) of a written file returns.
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
    /// The option `drain` decides. Resolved options never have this value.
    Auto,
    /// The close returns when the file is drained.
    Drain,
    /// The close returns at once; the bytes are in the arena.
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
    /// Bytes and name of the file are durable in the backing.
    Durable,
    /// Nothing, because the bytes are in the arena.
    Held,
}

/// Where firnd stores the record of a run, which `firn report` reads.
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
    /// In the runtime directory, and in the backing for other hosts.
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
    /// The kernel reads them if firnd may permit it (root, Linux 6.9 or later).
    Auto,
    /// firnd serves all reads.
    Off,
}

/// Whether another firnd continues the mount after firnd has died.
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
    /// Another firnd continues the mount if the kernel and the other options allow it.
    Auto,
    /// No firnd continues it: programs lose the mount.
    No,
}

/// Order in which the files of one I/O server are written.
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
    /// The files take turns, with one write for each.
    Interleaved,
    /// Each file is written to its end before the next one begins.
    Sequential,
}

/// How much firnd logs. Each level includes the levels that are listed before it.
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
    /// Faults that a person must fix.
    Error,
    /// Unusual events.
    Warn,
    /// Changes of state: attach, recovery, unmount.
    Info,
    /// Each decision of the drain.
    Debug,
    /// Each request.
    Trace,
}

impl LogLevel {
    /// Returns the word of the option.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// What happens to changes in a transaction before its commit.
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
    /// Changes are held until the commit.
    #[default]
    Buffer,
    /// Changes go to the backing at once, and the old state is saved to undo them.
    Shadow,
}

/// Hosts that commit together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Participants {
    /// This host commits alone.
    #[default]
    Off,
    /// This number of hosts commits together, whichever hosts they are.
    Count(u32),
    /// The hosts with these names commit together.
    Hosts(Vec<String>),
}

/// Which other host keeps copies of the files that this host holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Partner {
    /// No host keeps copies.
    #[default]
    None,
    /// The host after this one, among the hosts that have an agent.
    Next,
    /// The host of this name.
    Host(String),
}

/// Where a lane's token is stored. The token is the lock that makes one host at a time the writer of the lane.
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
    /// There is no token: hosts write without one.
    #[default]
    None,
    /// Tokens are locks of files in the backing.
    Flock,
    /// Tokens are keys in etcd.
    Etcd,
}

/// The options of a mount. A request of another version may lack an option, which then has its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// Size of the arena's data, all chunks together.
    pub arena_bytes: u64,
    /// Size of a chunk: a power of two from 64 KiB to 1 GiB, at most `arena_bytes`.
    pub chunk_bytes: u64,
    /// Number of I/O threads, which write to the backing.
    pub io_threads: u32,
    /// Order in which the files of one I/O server are written.
    pub order: Order,
    /// Largest number of writes that one I/O server gets at a time; 0: as many as there are I/O threads.
    pub lane_writers: u32,
    /// How programs reach the files.
    pub frontend: Frontend,
    /// When the drain writes data to the backing.
    pub drain: Drain,
    /// Number of commits of a scope that can be undone; 0: none.
    pub history: u32,
    /// What happens to changes in a transaction before its commit.
    pub mode: Mode,
    /// Hosts that commit together.
    pub participants: Participants,
    /// Name of this host among the participants; `None`: its host name.
    pub host: Option<String>,
    /// The host that keeps copies of the files that this host holds.
    pub partner: Partner,
    /// File that lists which hosts fail together; `None`: each host fails alone.
    pub partner_domains: Option<PathBuf>,
    /// Longest time that a commit waits for the other hosts.
    pub participants_wait_ms: u64,
    /// Where the token of each lane is stored.
    pub tokens: TokenService,
    /// Longest time that a host keeps a token while other hosts wait for it.
    pub token_hold_ms: u64,
    /// Longest time that a drain waits for a token before it writes without it.
    pub token_wait_ms: u64,
    /// Addresses of the members of the etcd cluster, HOST:PORT each.
    pub token_endpoints: Vec<String>,
    /// Prefix of the tokens' names in etcd; `None`: the name of the backing.
    pub token_group: Option<String>,
    /// Names of commit rules, and paths of files with rules.
    pub rules: Vec<String>,
    /// Directory for a second copy of prepared transactions; `None`: no second copy.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub backup: Option<PathBuf>,
    /// Time between two rounds that copy changed files of open transactions to `backup`.
    pub backup_every_ms: u64,
    /// What chooses the I/O server of a new file.
    pub placement: Placement,
    /// Directories in which files are placed, each on a separate server.
    #[serde(with = "firn_protocol::path::exact_list")]
    pub lanes: Vec<PathBuf>,
    /// File that maps names of files to lanes; `None`: numbers in the names choose the lane.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub lane_map: Option<PathBuf>,
    /// For a placement in one file system: the file system's name for the server of each lane.
    pub servers: Vec<String>,
    /// For `placement=command`: the program that makes a new file on a server.
    pub place_command: Option<PathBuf>,
    /// Layout of new files in the backing until they are closed.
    pub layout: Layout,
    /// Patterns for names of the files that are laid out in logs; empty: all files.
    pub log_files: Vec<String>,
    /// When the logs of a file are flattened.
    pub flatten: Flatten,
    /// When close(2) of a written file returns.
    pub close: Close,
    /// What fsync(2) waits for.
    pub fsync: Fsync,
    /// Longest time that a byte may remain undrained while its chunk is not full.
    pub drain_age_ms: u64,
    /// Percentage of one CPU that a drain may use while programs use all CPUs and no caller waits for it; 100: no
    /// limit.
    pub drain_cpu_percent: u32,
    /// Number of threads that answer the kernel; 0: one for each core.
    pub fuse_threads: u32,
    /// Whether other users may use the mount.
    pub allow_other: bool,
    /// Whether the kernel reads drained files itself.
    pub passthrough: Passthrough,
    /// Smallest size of a file that moves to a memory file; 0: no file does.
    pub memory_file_bytes_min: u64,
    /// Whether another firnd continues the mount after firnd has died.
    pub takeover: Takeover,
    /// Longest time for firnd to answer its keeper; 0: the keeper does not ask.
    pub watchdog_ms: u64,
    /// Directory of the arena; `None`: the runtime directory.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub arena_dir: Option<PathBuf>,
    /// File that describes the NUMA nodes; `None`: all memory counts as equally near.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub numa_topology: Option<PathBuf>,
    /// Spill file, or a directory for it; `None`: no chunk is spilled.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub spill: Option<PathBuf>,
    /// Size of the spill file; 0: as large as `arena_bytes`.
    pub spill_bytes: u64,
    /// Use of the arena, in percent, above which chunks are spilled.
    pub spill_upper_percent: u32,
    /// Use of the arena, in percent, at which spilling stops.
    pub spill_lower_percent: u32,
    /// How long the kernel may cache attributes and names.
    pub attr_timeout_ms: u64,
    /// How much firnd logs.
    pub log_level: LogLevel,
    /// Socket of the host's system log; `None`: firnd does not log there.
    pub system_log: Option<PathBuf>,
    /// Where firnd stores the record of a run.
    pub record: RecordPlace,
    /// Whether the mount refuses changes.
    pub read_only: bool,
    /// Whether the mount may hide files that are at the mount point.
    pub nonempty: bool,
    /// Whether the arena's memory is allocated at the mount, and not at first use.
    pub populate: bool,
    /// Flags of the kernel for the mount (`nodev`, `noexec`, …).
    pub kernel_flags: Vec<KernelFlag>,
}

impl Default for Options {
    /// Returns the defaults of the table.
    fn default() -> Self {
        let mut options = Self::blank();
        for row in &TABLE {
            let value = row.kind.parse(row.default);
            // An option without a default keeps its value from `blank`.
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
    /// Returns initial values of all options, which the defaults of the table then replace.
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

    /// Replaces `auto` by the value that it stands for.
    pub(crate) fn settle(&mut self) {
        if self.close == Close::Auto {
            // In shadow mode, processes on other hosts expect a closed file to be in the backing.
            let is_shown = self.drain == Drain::Eager || self.mode == Mode::Shadow;
            self.close = if is_shown { Close::Drain } else { Close::Held };
        }
    }

    /// Whether the name of a new file decides where its data is stored.
    pub fn places_by_name(&self) -> bool {
        self.placement != Placement::None || !self.log_files.is_empty()
    }

    /// Returns the options that change what the mount promises, as `key=value`, for its status.
    pub fn in_force(&self) -> Vec<String> {
        TABLE
            .iter()
            .filter(|row| row.changes_promises)
            .map(|row| format!("{}={}", row.name, (row.get)(self)))
            .collect()
    }
}
