//! `firn recover`: copies to the backing, without a mount, what a firnd that ended has left on the host. These are
//! bytes in the arena (the host's shared memory), and names in a stub tree (empty files on tmpfs) that are not in the
//! backing yet.
//!
//! Promises
//! * The arena is removed only after all of its data is durable in the backing.
//! * Locks exclude other processes that use the backing or the arena on this host.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_config::Options;
use firn_format::durability::DurabilityLevel;
use firn_protocol::ErrorStatus;
use firn_transact::{Expected, Members, Opening, RecoveryOutcome, TransactionalBacking};
use serde::Serialize;

use crate::attach::AttachedArena;
use crate::error::{AttachError, RecoverError};
use crate::event::Event;
use crate::frontend::{Stubs, TreeEnd};
use crate::host_lease::{
    HostLease, open_backing, release_lease_of_earlier_boot, release_leases_of_arena,
    was_backing_shared,
};
use crate::host_name::host_name;
use crate::last_drain::drain_remaining;
use crate::lock::{LockSharing, Locks};
use crate::logs;
use crate::lost::{self, LostPolicy, LostReport};
use crate::lower_store::open_lower_store_unmounted;
use crate::part::ArenaEnd;
use crate::parts::count_remaining_bytes;
use crate::preflight;
use crate::process;
use crate::runtime_files::{find_runtime_files, waiting_tree};
use crate::status;
use crate::store::Layers as _;

const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// The arena to recover, by its backing.
#[derive(Clone, Debug)]
pub struct RecoverRequest {
    /// The backing directory, as the user gave it.
    pub backing: PathBuf,
    /// Checked options, of which `arena-dir` and `io-threads` are used.
    pub options: Options,
    /// What to do with held data if its file is missing in the backing.
    pub lost: LostPolicy,
}

/// What a recovery has done.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RecoverReport {
    /// Path of the arena; `None` if there was none, so there was nothing to recover.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub arena: Option<PathBuf>,
    /// Bytes that are durable in the backing now.
    pub recovered_bytes: u64,
    /// Number of files that had these bytes.
    pub recovered_files: u64,
    /// Bytes that are still in the arena.
    pub left_bytes: u64,
    /// Bytes in the arena that belong to files which are missing in the backing.
    pub lost_file_bytes: u64,
    /// The files that are missing in the backing, and what was done with their data.
    pub lost: Vec<LostReport>,
    /// Numbers of commits that are decided but not applied. Reported only without an arena; the next mount applies
    /// them.
    pub decided: Vec<u64>,
    /// Bytes that this host held before its last boot, by its last report; they are lost with its memory. `None` if
    /// there is no such report.
    pub gone_bytes: Option<u64>,
    /// The errors of the drain.
    pub errors: Vec<ErrorStatus>,
}

/// What was done with the transactions of a dead host.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HostReport {
    /// Numbers of the commits that were applied.
    pub finished: Vec<u64>,
    /// Number of transactions that were undone.
    pub undone: u64,
    /// Numbers of prepared transactions that the other hosts have not decided.
    pub waiting: Vec<u64>,
    /// Bytes that the host held in memory at its last report; they are given up.
    pub held_bytes: u64,
}

/// Finishes what a dead host has begun: its transactions, as the other hosts have decided, and its lease, the locked
/// file in the backing by which others list it as dead.
///
/// Data that was only in the host's memory is not needed, because a prepared transaction (one that waits for the
/// decision) has all its data in the backing. If the host comes back, its next mount drops data that has become
/// invalid.
///
/// Fails if the host has neither a lease nor transactions in the backing.
pub fn recover_host(backing: &Path, host: String) -> Result<HostReport, RecoverError> {
    process::prepare();
    let read_only = false;
    let backing = preflight::check_backing(backing, read_only)?;
    let members = Members {
        host,
        // The number of hosts is not used, because no votes are counted here.
        expected: Expected::Count(0),
    };
    let keeper_link = None;
    let mut lease = HostLease::new(&backing, keeper_link);
    let Some(dead_host) = lease.take_over_dead_host(&members.host)? else {
        return Err(RecoverError::NoSuchHost {
            host: members.host,
            backing,
        });
    };
    if !dead_host.has_transactions {
        return Ok(HostReport {
            held_bytes: dead_host.held_bytes,
            ..HostReport::default()
        });
    }
    let outcome = finish_transactions(&backing, members, &mut lease)?;
    Ok(HostReport {
        finished: outcome.finished,
        undone: outcome.undone.len() as u64,
        waiting: outcome.waiting.into_iter().map(|(id, _)| id).collect(),
        held_bytes: dead_host.held_bytes,
    })
}

/// Finishes or undoes the transactions of a dead host, in its name, and returns the outcome. The caller has taken the
/// host's lease.
fn finish_transactions(
    backing: &Path,
    members: Members,
    lease: &mut HostLease,
) -> Result<RecoveryOutcome, AttachError> {
    // The host's files may lie in logs. Its transaction is then applied to the logs in its name.
    let options = Options {
        host: Some(members.host.clone()),
        ..Options::default()
    };
    let lower_store = open_lower_store_unmounted(backing, &options, lease)?;
    let opening = Opening {
        members: Some(members),
        ..Opening::default()
    };
    // The opening does the work, so the opened store is dropped. The dead host's memory is gone, so there is no data of
    // undone transactions to drop.
    let drop_data = |_: &[Vec<u8>]| Ok::<_, AttachError>(());
    let (_, outcome) = TransactionalBacking::open_with(lower_store, opening, drop_data)
        .map_err(AttachError::in_backing(backing))?;
    Ok(outcome)
}

/// Drains the arena of a backing until all of it is durable, then removes the arena. Returns what was done and what is
/// left.
///
/// `progress` gets the bytes left, the files left and a phase about ten times a second. If it returns false, the
/// recovery stops, and what is left stays in the arena. Call this before other threads are started.
pub fn recover(
    request: RecoverRequest,
    progress: &mut dyn FnMut(u64, u64, &str) -> bool,
) -> Result<RecoverReport, RecoverError> {
    let read_only = false;
    let backing = preflight::check_backing(&request.backing, read_only)?;
    let files = find_runtime_files(&backing, &request.options)?;
    let stub_tree_path = waiting_tree(&files)?;
    if !files.arena.exists() && stub_tree_path.is_none() {
        process::prepare();
        return recover_without_arena(&backing, &request.options, &files.arena);
    }
    let sharing = sharing_of_dead_mount(&backing, &files.arena)?;
    let locks = Locks::acquire_unmounted(&backing, &files, sharing)?;
    process::prepare();
    let arena = files.arena.clone();
    let attached = AttachedArena::attach_for_recovery(
        &backing,
        files,
        locks,
        &request.options,
        &mut |text| tracing::warn!("{text}"),
    )?;
    let (events, _) = std::sync::mpsc::channel();
    let stubs = match stub_tree_path {
        Some(path) => Some(begin_stub_tree(&attached, &backing, &path, events)?),
        None => None,
    };
    let drained = drain_until_durable(&attached, progress);
    let is_durable = drained.is_ok();
    // The arena is removed only if the drained data is durable too.
    let arena_end = if is_durable {
        ArenaEnd::RemoveIfEmpty
    } else {
        ArenaEnd::Keep
    };
    let lost_reports = match lost::apply_policy(&attached.engine, &request.lost) {
        Ok(lost_reports) => lost_reports,
        Err(error) => {
            attached.stop_before_visible(arena_end);
            return Err(error);
        }
    };
    if let Some(logs) = attached.engine.backing().log_layer()
        && is_durable
    {
        logs::settle_at_unmount(logs, request.options.flatten);
    }
    let report = describe_drain(&attached, arena, lost_reports, drained);
    if let Some(stubs) = stubs {
        let has_remaining_data = !is_durable || count_remaining_bytes(&attached.engine) > 0;
        let tree_end = if has_remaining_data {
            TreeEnd::Keep
        } else {
            TreeEnd::Remove
        };
        stubs.end(tree_end);
    }
    attached.stop_before_visible(arena_end);
    if let Some(arena) = &report.arena
        && !arena.exists()
        && let Err(error) = release_leases_of_arena(&backing, arena)
    {
        tracing::warn!(%error, "cannot release the lease of the mount that had the arena");
    }
    Ok(report)
}

/// Returns the kind of lock that the dead mount of an arena had. A recovery needs the same kind: if the lock reaches
/// all hosts, other hosts may hold it, too.
fn sharing_of_dead_mount(backing: &Path, arena: &Path) -> Result<LockSharing, AttachError> {
    if was_backing_shared(backing, arena)? {
        Ok(LockSharing::Shared)
    } else {
        Ok(LockSharing::Exclusive)
    }
}

/// Recovers a backing of which this host has neither an arena nor a stub tree: finishes removals of logged files, and
/// reports what is in the backing.
fn recover_without_arena(
    backing: &Path,
    options: &Options,
    arena: &Path,
) -> Result<RecoverReport, RecoverError> {
    match logs::finish_removals_of_logged_files(backing, options) {
        // `Held` means that another host has the backing mounted; that mount finishes the removals.
        Ok(()) | Err(AttachError::Held { .. }) => report_last_boot(backing, options, arena),
        Err(error) => Err(error.into()),
    }
}

/// Reports on a host without an arena, from the backing alone. If the host had an arena before its last boot, its old
/// lease is released, so others no longer list it as dead.
fn report_last_boot(
    backing: &Path,
    options: &Options,
    arena: &Path,
) -> Result<RecoverReport, RecoverError> {
    let gone_bytes = match host_name(options) {
        Ok(host) => release_lease_of_earlier_boot(backing, &host, arena)?,
        // A host with an invalid name has shared nothing, so it has no lease.
        Err(_) => None,
    };
    Ok(RecoverReport {
        gone_bytes,
        ..report_decided(backing)?
    })
}

/// Reports the decided commits in the backing. They are not applied here: another host may be applying them, and each
/// host of a job may call this when the job has ended.
fn report_decided(backing: &Path) -> Result<RecoverReport, RecoverError> {
    let directory = open_backing(backing)?;
    let decided = TransactionalBacking::decided_commits(directory)
        .map_err(AttachError::transactions(backing))?;
    Ok(RecoverReport {
        decided,
        ..RecoverReport::default()
    })
}

/// Opens the stub tree (empty files on tmpfs) that an earlier mount left at `prefix`, and creates as many of its names
/// in the backing as possible. A failure to create them is only logged.
fn begin_stub_tree(
    attached: &AttachedArena,
    backing: &Path,
    prefix: &Path,
    events: Sender<Event>,
) -> Result<Stubs, AttachError> {
    let engine = Arc::clone(&attached.engine);
    // Programs open no stub of this tree, and only such an open needs to know how files are placed.
    let places_by_name = false;
    let stubs = Stubs::begin(
        engine,
        backing,
        prefix,
        places_by_name,
        &attached.files,
        events,
    )?;
    if let Err(error) = stubs.tree.reconcile() {
        tracing::warn!(%error, "cannot create every name of the stub tree in the backing");
    }
    Ok(stubs)
}

/// Copies all data that only the arena (the host's memory) has to the backing and syncs it. `progress` gets the bytes
/// and files that are left, at most every [`PROGRESS_EVERY`]; if it returns false, the result is ECANCELED.
fn drain_until_durable(
    attached: &AttachedArena,
    progress: &mut dyn FnMut(u64, u64, &str) -> bool,
) -> Result<(), Errno> {
    let mut next_report = Instant::now();
    let mut throttled_progress = |bytes, files| {
        let now = Instant::now();
        if now < next_report {
            return true;
        }
        next_report = now + PROGRESS_EVERY;
        progress(bytes, files, "draining")
    };
    drain_remaining(
        &attached.engine,
        DurabilityLevel::Durable,
        &mut throttled_progress,
    )
}

/// Returns the report of what went from the arena (the host's memory) to the backing, and what is left. `drained` is
/// the result of the drain; an error that belongs to no file is added, unless the user has stopped the drain
/// (ECANCELED).
fn describe_drain(
    attached: &AttachedArena,
    arena: PathBuf,
    lost_reports: Vec<LostReport>,
    drained: Result<(), Errno>,
) -> RecoverReport {
    let figures = attached.engine.figures();
    let recovered = &attached.recovered;
    let mut errors = figures.errors;
    status::explain_errors(&mut errors);
    if let Err(error) = drained
        && error != Errno::CANCELED
        && errors.is_empty()
    {
        let explained = process::describe_errno(error);
        errors.push(ErrorStatus {
            errno: error.raw_os_error(),
            message: format!("the backing did not accept all data: {explained}"),
            repeats: 1,
            ..ErrorStatus::default()
        });
    }
    RecoverReport {
        arena: Some(arena),
        recovered_bytes: recovered.bytes.saturating_sub(figures.held_bytes),
        recovered_files: recovered.files.saturating_sub(figures.held_files),
        left_bytes: figures.held_bytes,
        lost_file_bytes: figures.lost_file_bytes,
        lost: lost_reports,
        decided: Vec::new(),
        gone_bytes: None,
        errors,
    }
}
