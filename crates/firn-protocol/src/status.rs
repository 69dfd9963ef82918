//! The table of all figures in the status of a mount. A *figure* is a number, a boolean or a state with a name and a
//! help text. *firnd* is the process that serves the mount; a *takeover* is a next firnd that continues the mount.
//!
//! To add a figure, add a line here and the code that fills it in: `crates/firn-engine/src/figures.rs` for the engine,
//! `crates/firn-daemon/src/parts` for a part, `crates/firn-daemon/src/answers.rs` for the process. [`crate::figures`]
//! says what is made from the line.
//!
//! A field that can be empty (an `Option`, a `Vec`, a map, a part within a part) needs a value in [`Status::example`]
//! too, because the tests of outputs see only values that are there.
//!
//! A line is a kind (`text`, `label`, `gauge` and others, explained at `part!` in [`crate::figures`]), a name and a
//! type. Its doc comment is the help for users and collectors, so it must make sense without its neighbours. Counters
//! start at 0 when firnd attaches; those of takeovers start at the mount.
//!
//! The arena is the shared memory of the mount. It has *chunks* of equal size. A *slab* is a part of a chunk that one
//! writer fills.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::figures::{HistogramStatus, part, states};
use crate::path::BytePath;

part! {
    /// The state of one mount.
    Status, prefix "" {
        /// Package version of firnd.
        text version: String,
        /// firnd's process id.
        text pid: u32,
        /// Absolute path of the backing directory.
        label backing: BytePath,
        /// Absolute path of the mount point.
        label mount_point: BytePath,
        /// Name of the host.
        label host: String,
        /// Path of the arena file.
        text arena: BytePath,
        /// Time since firnd attached.
        gauge uptime_seconds: f64,
        /// Number of firnd processes that attached to this arena.
        gauge epoch: u64,
        /// Options that change what the mount promises, as `key=value`, with quoted paths (`firn_format::quote`).
        text options: Vec<String>,
        /// Size of the arena's chunks.
        gauge arena_bytes: u64,
        /// Size of the arena's slabs in use.
        gauge arena_used_bytes: u64,
        /// Size of one chunk.
        gauge chunk_bytes: u64,
        /// Bytes held: written by programs and not yet in the backing.
        gauge held_bytes: u64,
        /// Files with held bytes.
        gauge held_files: u64,
        /// Files with bytes in logs, as far as this host knows.
        gauge logged_files: u64,
        /// Bytes that this host wrote since the mount to logs that are not flattened.
        gauge logged_bytes: u64,
        /// Files that have not changed since they were synced; 16,384 at most.
        gauge durable_files: u64,
        /// Bytes of the files in `durable_files`.
        gauge durable_bytes: u64,
        /// Age of the oldest held byte.
        gauge oldest_held_seconds: Option<f64>,
        /// Bytes recovered from an earlier firnd.
        gauge recovered_bytes: u64,
        /// Held bytes whose file the recovery did not find.
        gauge lost_file_bytes: u64,
        /// Files open through the mount.
        gauge open_files: u64,
        /// Writers that wait for room in the arena.
        gauge waiting_writers: u64,
        /// Whether another firnd can continue the mount if this one dies: `ready`, or the reason why it cannot.
        text takeover: String,
        /// Times that another firnd continued the mount, after a death or an upgrade.
        counter takeovers: u64,
        /// Time that programs waited at the last takeover.
        gauge takeover_last_seconds: f64,
        /// Time that programs waited at all takeovers.
        counter takeover_seconds: f64,
        /// Result of the last `firn upgrade`: `done`, or `refused` with the reason. Empty: no upgrade was tried.
        text upgrade: String,
        /// Open files that the last takeover could not restore.
        gauge lost_open_files: u64,
        /// Size of the live table, which a takeover needs.
        gauge live_table_bytes: u64,
        /// Entries without room in the live table: a takeover cannot restore them.
        counter live_table_lost: u64,
        /// Programs that have waited for firnd for a second or longer; at most 8.
        part waiting_programs: Vec<WaitingProgram>,
        /// Files that the file system put on another server than `placement` chose.
        counter misplaced_files: u64,
        /// Bytes received from programs.
        counter ingest_bytes: u64,
        /// Writes from programs.
        counter ingest_writes: u64,
        /// Sizes of writes from programs.
        histogram ingest_write_bytes: HistogramStatus,
        /// Time that writes took in firnd, waits for room included; not those by direct access.
        histogram write_seconds: HistogramStatus,
        /// Time that closes took in firnd.
        histogram close_seconds: HistogramStatus,
        /// Time that fsync(2) and fdatasync(2) took in firnd.
        histogram fsync_seconds: HistogramStatus,
        /// Rate of bytes received from programs.
        gauge ingest_bytes_per_second: f64,
        /// Bytes written to the backing.
        counter drain_bytes: u64,
        /// Write calls to the backing that succeeded.
        counter drain_writes: u64,
        /// Write calls to the backing that failed.
        counter drain_errors: u64,
        /// Sizes of successful writes to the backing.
        histogram drain_write_bytes: HistogramStatus,
        /// Time of write calls to the backing, failed ones included.
        histogram drain_seconds: HistogramStatus,
        /// Rate of bytes written to the backing.
        gauge drain_bytes_per_second: f64,
        /// Held bytes overwritten or removed before the drain.
        counter cancelled_bytes: u64,
        /// Bytes read by programs through firnd.
        counter read_bytes: u64,
        /// Time that closes waited for the backing (`close=drain`).
        counter close_wait_seconds: f64,
        /// Drained bytes that remain in the arena for reads.
        gauge cached_bytes: u64,
        /// Drained bytes that left the arena.
        counter evicted_bytes: u64,
        /// Size of the memory files, unused room included.
        gauge memory_file_bytes: u64,
        /// Held bytes moved into memory files.
        counter settled_bytes: u64,
        /// Processes connected to the data socket.
        gauge direct_clients: u64,
        /// Files being written by direct access.
        gauge direct_files: u64,
        /// Slabs leased for direct access.
        gauge direct_leases: u64,
        /// Leases that firnd ended because a process broke the rules of direct access.
        counter direct_errors: u64,
        /// Chunk lists that programs hold.
        gauge chunk_lists: u64,
        /// Bytes that held chunk lists keep unchanged.
        gauge chunk_list_bytes: u64,
        /// Connections of agents to pullers.
        gauge pulls: u64,
        /// Files that agents sent to other hosts.
        counter pulled_files: u64,
        /// Bytes that agents sent to other hosts.
        counter pulled_bytes: u64,
        /// Rate of bytes that agents send to other hosts.
        gauge pulled_bytes_per_second: f64,
        /// The spill file, where there is one.
        part spill: Option<SpillStatus>,
        /// NUMA nodes that share the arena.
        part numa_nodes: Vec<NumaNodeStatus>,
        /// Unfinished transactions.
        part transactions: Vec<TransactionStatus>,
        /// Copies in the memory of another host, if the option `partner` asks for them.
        part partner: Option<PartnerStatus>,
        /// Lanes of the drain.
        part lanes: Vec<LaneStatus>,
        /// Hints on slow placement; `firn status` prints each.
        gauge placement_advice: Vec<String>,
        /// Differences between this host's options and those of other hosts; `firn status` prints each.
        gauge host_differences: Vec<String>,
        /// Lines of the log that were lost: there was no room, or too many came at once.
        counter log_lines_lost: u64,
        /// Size of the largest file that firnd may write (RLIMIT_FSIZE).
        gauge file_size_limit_bytes: Option<u64>,
        /// Failed requests of the kernel, by operation; lookups of missing names count too.
        counter failed_requests: BTreeMap<String, u64>,
        /// Decisions of the drain: `picked`, `written`, `waits` (after an error), `retried`, `given up` (waiting
        /// callers got the error), `spilled`, `put off` (programs wanted the CPUs), `settled` (moved to a memory file).
        counter drain_decisions: BTreeMap<String, u64>,
        /// Steps of transactions on this host: `begin`, `quiesce`, `drained`, `prepared`, `decided`, `applied`,
        /// `ended`, `undone`.
        counter transaction_steps: BTreeMap<String, u64>,
        /// Checkpoints committed, by rule.
        counter rule_commits: BTreeMap<String, u64>,
        /// Checkpoints undone because their writers ended too early, by rule.
        counter rule_aborts: BTreeMap<String, u64>,
        /// Failed begins and commits, by rule.
        counter rule_failures: BTreeMap<String, u64>,
        /// Old checkpoints that `keep` removed, by rule.
        counter rule_removals: BTreeMap<String, u64>,
        /// Checkpoints that are not complete yet, by rule.
        gauge rule_waits: BTreeMap<String, u64>,
        /// Errors that firnd remembers, 64 at most.
        part errors: Vec<ErrorStatus>,
    }
}

part! {
    /// Whether the firnd of a mount answers, for collectors of metrics.
    Scrape, prefix "" {
        /// Absolute path of the backing directory.
        label backing: BytePath,
        /// Absolute path of the mount point.
        label mount_point: BytePath,
        /// Name of the host.
        label host: String,
        /// Whether firnd answered in time; else its other figures are absent.
        gauge up: bool,
    }
}

/// Least sum of the waits of all closes for which there is advice, in seconds.
const CLOSE_WAIT_MIN_S: f64 = 10.0;
/// Least share of the mount's lifetime that closes waited for which there is advice.
const CLOSE_WAIT_SHARE_MIN: f64 = 0.01;

impl Status {
    /// Returns advice if closes waited long for the backing.
    pub fn close_hint(&self) -> Option<String> {
        close_hint(self.close_wait_seconds, self.uptime_seconds)
    }

    /// Returns a status for tests in which everything has a value.
    pub fn example() -> Self {
        let counts = BTreeMap::from([("lookup".to_owned(), 3)]);
        let backup = BackupStatus {
            age_seconds: Some(1.0),
            error: Some("no".into()),
            ..BackupStatus::default()
        };
        let transaction = TransactionStatus {
            id: Some(1),
            owner: Some(OwnerStatus::default()),
            age_seconds: Some(1.0),
            states: counts.clone(),
            here: vec!["n1".into()],
            rule: Some("hf".into()),
            waits_for: Some("next".into()),
            error: Some("no".into()),
            backup: Some(backup),
            ..TransactionStatus::default()
        };
        let token = TokenStatus {
            state: TokenState::Waiting,
            holder: Some("n2".into()),
            last_error: Some("no".into()),
            ..TokenStatus::default()
        };
        let lane = LaneStatus {
            retry_seconds: Some(1.0),
            file: Some("file".into()),
            placed: Some(PlacedStatus::default()),
            token: Some(token),
            ..LaneStatus::default()
        };
        let partner = PartnerStatus {
            domains: Some("file".into()),
            present: true,
            host: Some("n2".into()),
            left_files: 1,
            ..PartnerStatus::default()
        };
        let second_node = NumaNodeStatus {
            numa_node: 1,
            ..NumaNodeStatus::default()
        };
        let histogram = HistogramStatus {
            bounds: vec![1.0, 2.0],
            counts: vec![1, 2, 3],
            sum: 12.0,
        };
        Self {
            mount_point: "/a\"b\\c\nd".into(),
            options: vec!["a=b".into()],
            oldest_held_seconds: Some(1.0),
            spill: Some(SpillStatus::default()),
            numa_nodes: vec![NumaNodeStatus::default(), second_node],
            transactions: vec![transaction],
            partner: Some(partner),
            lanes: vec![lane],
            placement_advice: vec!["none".into()],
            host_differences: vec!["none".into()],
            file_size_limit_bytes: Some(1),
            failed_requests: counts.clone(),
            drain_decisions: counts.clone(),
            transaction_steps: counts.clone(),
            rule_commits: counts.clone(),
            rule_aborts: counts.clone(),
            rule_failures: counts.clone(),
            rule_removals: counts.clone(),
            rule_waits: counts,
            waiting_programs: vec![WaitingProgram::default()],
            errors: vec![ErrorStatus::default()],
            ingest_write_bytes: histogram.clone(),
            write_seconds: histogram.clone(),
            close_seconds: histogram.clone(),
            fsync_seconds: histogram.clone(),
            drain_write_bytes: histogram.clone(),
            drain_seconds: histogram,
            ..Self::default()
        }
    }
}

/// Returns advice for a mount whose closes waited `wait_s` seconds in all. `None`: the wait is short, or a small share
/// of `uptime_s`.
pub fn close_hint(wait_s: f64, uptime_s: f64) -> Option<String> {
    let is_long = wait_s >= CLOSE_WAIT_MIN_S && wait_s >= uptime_s * CLOSE_WAIT_SHARE_MIN;
    is_long.then(|| {
        format!(
            "closes waited {wait_s:.0} s for the backing; with -o close=held they return at once; `firn wait` waits instead"
        )
    })
}

part! {
    /// The spill file of a mount.
    SpillStatus, prefix "spill_" {
        /// Path of the file.
        text path: BytePath,
        /// Size of the spill file.
        gauge bytes: u64,
        /// Bytes of the spill file in use, in whole chunks.
        gauge used_bytes: u64,
        /// Bytes moved to the spill file.
        counter moved_bytes: u64,
        /// Rate of bytes moved to the spill file.
        gauge moved_bytes_per_second: f64,
        /// Whether spilling has stopped: the last write failed, or the file is damaged.
        gauge failing: bool,
    }
}

part! {
    /// One NUMA node and its part of the arena.
    NumaNodeStatus, prefix "numa_node_" {
        /// Number of the NUMA node in the kernel.
        label numa_node: u32,
        /// Size of the NUMA node's chunks.
        gauge bytes: u64,
        /// Size of the NUMA node's chunks in use.
        gauge used_bytes: u64,
        /// Slabs of the NUMA node leased to writers nearer to another node.
        counter foreign_slabs: u64,
    }
}

part! {
    /// A lane: one I/O server, or the backing itself.
    LaneStatus, prefix "lane_", numbered "lane" {
        /// Backing directory of the lane.
        label path: BytePath,
        /// I/O threads that may write to the lane at once.
        gauge max_writers: u32,
        /// I/O threads that write to the lane now.
        gauge writers: u32,
        /// Time until the lane is tried again.
        gauge retry_seconds: Option<f64>,
        /// Files queued for a write to the lane.
        gauge queued_files: u64,
        /// Files with held bytes for the lane.
        gauge held_files: u64,
        /// Held bytes for the lane.
        gauge held_bytes: u64,
        /// With `order=sequential`: the file that is being written.
        text file: Option<BytePath>,
        /// What was placed in the lane. `None`: the mount has no placement, or the lane is the backing itself.
        part placed: Option<PlacedStatus>,
        /// The lane's token, which gives the lane one writing host at a time. `None`: the lane has none.
        part token: Option<TokenStatus>,
    }
}

part! {
    /// What was placed in a lane.
    PlacedStatus, prefix "placed_" {
        /// Files made in the lane.
        counter files: u64,
        /// Bytes written to the lane.
        counter bytes: u64,
        /// Whether new files may go to the lane.
        gauge takes_files: bool,
        /// State of the lane: `ok`, `full`, `gone` or `hung`.
        gauge state: LaneState,
    }
}

states! {
    /// Whether a lane takes files and bytes.
    LaneState {
        /// The lane takes files, as far as firnd knows.
        #[default]
        Ok = "ok",
        /// The lane's server had no room.
        Full = "full",
        /// The lane's directory was missing, or its file system did not work.
        Gone = "gone",
        /// A call of the lane's server does not return.
        Hung = "hung",
    }
}

part! {
    /// The token of a lane.
    TokenStatus, prefix "token_" {
        /// State of the lane's token: `idle` (no file waits), `waiting`, `held`, or `without` (writes go on without
        /// it).
        gauge state: TokenState,
        /// Time that the lane's token has been in its state.
        gauge state_seconds: f64,
        /// Another host that has the token, as far as this host knows.
        text holder: Option<String>,
        /// Times that this host got the lane's token.
        counter granted: u64,
        /// Time that drains waited for the lane's token.
        counter waited_seconds: f64,
        /// Times that drains wrote without the lane's token.
        counter went_without: u64,
        /// Failed requests for the lane's token.
        counter errors: u64,
        /// Reason of the last failed request for the token.
        text last_error: Option<String>,
    }
}

states! {
    /// State of a lane's token.
    TokenState {
        /// No file waits for the lane.
        #[default]
        Idle = "idle",
        /// The lane waits for the token.
        Waiting = "waiting",
        /// This host has the token.
        Held = "held",
        /// The lane is written to without the token.
        Without = "without",
    }
}

part! {
    /// A transaction.
    TransactionStatus, prefix "transaction_" {
        /// Path of the scope below the mount point; empty: the whole mount.
        label scope: BytePath,
        /// Stage of the transaction: `open`, `prepared` or `decided`.
        gauge stage: TransactionStage,
        /// Number of the transaction. `None`: it has none yet.
        text id: Option<u64>,
        /// Owner of the transaction; `None`: it has none.
        text owner: Option<OwnerStatus>,
        /// Time since the transaction began; absent if an earlier firnd began it.
        gauge age_seconds: Option<f64>,
        /// Bytes written in the transaction, held ones included.
        gauge bytes: u64,
        /// Objects, such as files, that the transaction changes.
        gauge objects: u64,
        /// Names that the transaction changed, by what became of them, such as `renamed`.
        gauge states: BTreeMap<String, u64>,
        /// Whether an earlier firnd prepared the transaction.
        gauge recovered: bool,
        /// Hosts that have joined the commit, if several hosts commit together.
        text here: Vec<String>,
        /// The commit rule that began the transaction; `None`: a request began it.
        text rule: Option<String>,
        /// What the rule's commit still waits for.
        text waits_for: Option<String>,
        /// Reason why the last try to apply the transaction failed. It is tried again.
        text error: Option<String>,
        /// State of the transaction's backup. `None`: the mount has no option `backup`.
        part backup: Option<BackupStatus>,
    }
}

states! {
    /// Stage of a transaction.
    TransactionStage {
        /// Programs may still change files of the transaction.
        #[default]
        Open = "open",
        /// The transaction is durable and waits for its decision.
        Prepared = "prepared",
        /// The transaction is committed but not applied yet.
        Decided = "decided",
    }
}

/// The owner of a transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnerStatus {
    /// Process id of the owner, or of the process that opened the connection; 0: firnd does not see it.
    pub pid: u32,
    /// Whether the owner is a connection of that process.
    pub connection: bool,
}

part! {
    /// The backup of a transaction.
    BackupStatus, prefix "backup_" {
        /// Whether the transaction can be finished from its backup alone.
        gauge whole: bool,
        /// Time since the last write to the backup.
        gauge age_seconds: Option<f64>,
        /// Bytes in the backup.
        gauge copied_bytes: u64,
        /// Bytes that a prepare must still copy.
        gauge left_bytes: u64,
        /// Reason why the last write to the backup failed.
        text error: Option<String>,
    }
}

part! {
    /// Copies in the memory of another host.
    PartnerStatus, prefix "partner_" {
        /// Value of the option `partner`: `next`, or the name of a host.
        text wanted: String,
        /// Name by which the other hosts know this host.
        text this_host: String,
        /// File that lists which hosts fail together. `None`: each host fails alone.
        text domains: Option<BytePath>,
        /// Whether a partner host has copies now.
        gauge present: bool,
        /// The host that has the copies.
        text host: Option<String>,
        /// Remark for users; empty: there is none.
        text note: String,
        /// Held files that the partner has completely.
        gauge copied_files: u64,
        /// Held bytes of files that the partner has completely.
        gauge copied_bytes: u64,
        /// Held files that the partner lacks, wholly or in part.
        gauge left_files: u64,
        /// Held bytes of files that the partner lacks, wholly or in part.
        gauge left_bytes: u64,
        /// Age of the oldest byte that the partner lacks; 0: it lacks none.
        gauge lag_seconds: f64,
    }
}

part! {
    /// A program that waits for an answer of firnd.
    WaitingProgram, prefix "waiting_program_", numbered "program" {
        /// Name of the program's thread.
        label name: String,
        /// Id of the program's thread.
        text thread: u32,
        /// Name of the call that waits.
        label call: String,
        /// Time that the program's call has waited for firnd.
        gauge seconds: f64,
    }
}

part! {
    /// An error of the backing that firnd remembers.
    ErrorStatus, prefix "error_", numbered "error" {
        /// Path below the mount point, or as much of it as is known.
        label path: BytePath,
        /// Number of the error.
        label errno: i32,
        /// What firnd tried, and what the error means.
        text message: String,
        /// Times that the error occurred in a row.
        gauge repeats: u64,
        /// Time since the error last occurred.
        gauge age_seconds: f64,
        /// Whether the error's file has held bytes, or its spill file still fails.
        gauge pending: bool,
    }
}
