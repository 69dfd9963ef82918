//! `firn recover`: drain an arena, and carry over the names of a stub tree, without a mount.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use firn_backing::Errno;
use firn_config::Options;
use firn_format::durability::DurabilityLevel;
use firn_protocol::ErrorStatus;
use firn_transact::{Expected, Members, Opening, TransactionalBacking};
use serde::Serialize;

use crate::attach::Attached;
use crate::error::{AttachError, RecoverError};
use crate::event::Event;
use crate::frontend::{Stubs, TreeEnd};
use crate::ground::serve_ground;
use crate::host_lease::{
    HostLease, open_backing, release_of_arena, release_of_last_boot, was_shared,
};
use crate::host_name::host_name;
use crate::last_drain::drain_rest;
use crate::lock::{Locks, Sharing};
use crate::logs;
use crate::lost::{self, LostPolicy, LostReport};
use crate::part::ArenaEnd;
use crate::parts::count_left_bytes;
use crate::preflight;
use crate::process;
use crate::runtime_files::{find_runtime_files, waiting_tree};
use crate::status;
use crate::store::Layers as _;

const PROGRESS_EVERY: Duration = Duration::from_millis(100);

/// The arena to recover.
#[derive(Clone, Debug)]
pub struct RecoverRequest {
    /// The backing directory, as the user gave it.
    pub backing: PathBuf,
    /// Checked options: `arena-dir` and `io-threads` count.
    pub options: Options,
    /// What to do with held data whose file is gone from the backing.
    pub lost: LostPolicy,
}

/// What became of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RecoverReport {
    /// The arena; `None`: there was none, nothing to recover.
    #[serde(with = "firn_protocol::path::exact_option")]
    pub arena: Option<PathBuf>,
    /// Bytes that are now durable in the backing.
    pub recovered_bytes: u64,
    /// Files that had them.
    pub recovered_files: u64,
    /// Bytes still in the arena.
    pub left_bytes: u64,
    /// Bytes in the arena whose file is not in the backing.
    pub lost_file_bytes: u64,
    /// Files that were not found in the backing, and what became of their data.
    pub lost: Vec<LostReport>,
    /// Commits that are decided and not applied, where there was no arena: the next mount applies them.
    pub decided: Vec<u64>,
    /// Bytes that this host held at its last beat before it was started again, which are gone with its memory; none: it was not.
    pub gone_bytes: Option<u64>,
    /// What went wrong on the way.
    pub errors: Vec<ErrorStatus>,
}

/// What became of the transactions of a host that is gone.
#[derive(Clone, Debug, Default, Serialize)]
pub struct HostReport {
    /// Numbers of commits that were applied.
    pub finished: Vec<u64>,
    /// Transactions that were undone.
    pub undone: u64,
    /// Numbers of those that the other hosts have not decided.
    pub waiting: Vec<u64>,
    /// Bytes that the host held in memory at its last beat, and that are given up for lost.
    pub held_bytes: u64,
}

/// Ends what a host began that does not come back: its transactions, as the other hosts have decided, and its lease, by which
/// others list it as dead. What was only in its
/// memory is not needed for that: a transaction that is prepared is in the backing. Should that memory still be there,
/// its next mount finds what it must drop.
pub fn recover_host(backing: &Path, host: String) -> Result<HostReport, RecoverError> {
    process::prepare();
    let backing = preflight::check_backing(backing, false)?;
    let members = Members {
        host,
        expected: Expected::Count(0),
    };
    let mut lease = HostLease::on(&backing);
    let Some(estate) = lease.take_over(&members.host)? else {
        return Err(RecoverError::NoSuchHost {
            host: members.host,
            backing,
        });
    };
    if !estate.has_transactions {
        return Ok(HostReport {
            held_bytes: estate.held_bytes,
            ..HostReport::default()
        });
    }
    // Its files may lie in logs, to which its transaction is applied in its name.
    let options = Options {
        host: Some(members.host.clone()),
        ..Options::default()
    };
    let ground = serve_ground(&backing, &options, &mut lease)?;
    let opening = Opening {
        members: Some(members),
        ..Opening::default()
    };
    let (_, outcome) =
        TransactionalBacking::open_with(ground, opening, |_| Ok::<_, AttachError>(()))
            .map_err(AttachError::in_backing(&backing))?;
    Ok(HostReport {
        finished: outcome.finished,
        undone: outcome.undone.len() as u64,
        waiting: outcome.waiting.into_iter().map(|(id, _)| id).collect(),
        held_bytes: estate.held_bytes,
    })
}

/// Drains the arena of a backing until all of it is durable, then removes it. `progress` gets bytes
/// left, files left and a phase some ten times a second; false stops, and what is left stays in the
/// arena. To be called before other threads are started.
pub fn recover(
    request: RecoverRequest,
    progress: &mut dyn FnMut(u64, u64, &str) -> bool,
) -> Result<RecoverReport, RecoverError> {
    let backing = preflight::check_backing(&request.backing, false)?;
    let files = find_runtime_files(&backing, &request.options)?;
    let prefix = waiting_tree(&files)?;
    if !files.arena.exists() && prefix.is_none() {
        process::prepare();
        return match logs::end_removals(&backing, &request.options) {
            // Held: another host has it mounted, and ends the removals.
            Ok(()) | Err(AttachError::Held { .. }) => {
                report_last_boot(&backing, &request.options, &files.arena)
            }
            Err(error) => Err(error.into()),
        };
    }
    // As the mount did: where the lock of the directory reaches all hosts, the others have it.
    let sharing = if was_shared(&backing, &files.arena)? {
        Sharing::Shared
    } else {
        Sharing::Alone
    };
    let locks = Locks::take(&backing, &files, None, sharing)?;
    process::prepare();
    let arena = files.arena.clone();
    let attached = Attached::salvage(&backing, files, locks, &request.options, &mut |text| {
        tracing::warn!("{text}")
    })?;
    let (events, _) = std::sync::mpsc::channel();
    let stubs = prefix.map(|prefix| attach_tree(&attached, &backing, &prefix, events));
    let stubs = stubs.transpose()?;
    let drained = drain_until_durable(&attached, progress);
    // Removed only if what was drained is durable too.
    let arena_end = if drained.is_ok() {
        ArenaEnd::RemoveIfEmpty
    } else {
        ArenaEnd::Keep
    };
    let lost = match lost::settle(&attached.engine, &request.lost) {
        Ok(lost) => lost,
        Err(error) => {
            attached.finish(arena_end);
            return Err(error);
        }
    };
    if let Some(logs) = attached.engine.backing().logged()
        && drained.is_ok()
    {
        logs::settle_last(logs, request.options.flatten);
    }
    let report = report(&attached, arena, lost, drained);
    if let Some(stubs) = stubs {
        let is_left = drained.is_err() || count_left_bytes(&attached.engine) > 0;
        stubs.end(if is_left {
            TreeEnd::Keep
        } else {
            TreeEnd::Remove
        });
    }
    attached.finish(arena_end);
    let removed = report.arena.as_ref().filter(|arena| !arena.exists());
    if let Some(arena) = removed
        && let Err(error) = release_of_arena(&backing, arena)
    {
        tracing::warn!(%error, "cannot give back the lease of the mount that had the arena");
    }
    Ok(report)
}

/// What the backing alone tells, of a host without an arena. Had it one before it was started again, others list it as dead
/// no more.
fn report_last_boot(
    backing: &Path,
    options: &Options,
    arena: &Path,
) -> Result<RecoverReport, RecoverError> {
    let gone_bytes = match host_name(options) {
        Ok(host) => release_of_last_boot(backing, &host, arena)?,
        // By such a name it shared nothing.
        Err(_) => None,
    };
    Ok(RecoverReport {
        gone_bytes,
        ..report_decided(backing)?
    })
}

/// What the backing alone tells. A commit is not applied here: another host may be at it, and every host of a job may
/// call this when the job has ended.
fn report_decided(backing: &Path) -> Result<RecoverReport, RecoverError> {
    let directory = open_backing(backing)?;
    let decided = TransactionalBacking::decided_commits(directory);
    Ok(RecoverReport {
        decided: decided.map_err(AttachError::transactions(backing))?,
        ..RecoverReport::default()
    })
}

/// The stub tree whose names wait at `prefix`, with as many of them in the backing as can be.
fn attach_tree(
    attached: &Attached,
    backing: &Path,
    prefix: &Path,
    events: Sender<Event>,
) -> Result<Stubs, AttachError> {
    let engine = Arc::clone(&attached.engine);
    let stubs = Stubs::begin(engine, backing, prefix, false, &attached.files, events)?;
    if let Err(error) = stubs.tree.reconcile() {
        tracing::warn!(%error, "cannot create every name of the stub tree in the backing");
    }
    Ok(stubs)
}

fn drain_until_durable(
    attached: &Attached,
    progress: &mut dyn FnMut(u64, u64, &str) -> bool,
) -> Result<(), Errno> {
    let mut next = Instant::now();
    let mut throttled = |bytes, files| {
        let now = Instant::now();
        if now < next {
            return true;
        }
        next = now + PROGRESS_EVERY;
        progress(bytes, files, "draining")
    };
    drain_rest(&attached.engine, DurabilityLevel::Durable, &mut throttled)
}

/// What is drained and what is left. An error that no file has is listed too, unless the user stopped the drain.
fn report(
    attached: &Attached,
    arena: PathBuf,
    lost: Vec<LostReport>,
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
        let explained = process::explain(error);
        errors.push(ErrorStatus {
            errno: error.raw_os_error(),
            message: format!("the backing did not take all of it: {explained}"),
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
        lost,
        decided: Vec::new(),
        gone_bytes: None,
        errors,
    }
}
