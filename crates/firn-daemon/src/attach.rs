//! Attaches an arena to its backing: takes the locks, makes the engine and starts the I/O threads. firnd (the process
//! that serves a mount) and `firn recover` share this.
//!
//! The *backing* is the directory that a mount serves. The *arena* is shared memory with the bytes that are not there
//! yet.
//!
//! An arena that holds data keeps its geometry (its size and that of its chunks), whatever the options say now. An
//! empty arena of another geometry is replaced.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use firn_arena::{Arena, Identity};
use firn_client::paths::RuntimeFiles;
use firn_config::{
    Close, Drain, Frontend, Fsync, Layout, Options, Participants, Partner, Passthrough, Placement,
    TokenService,
};
use firn_drain::Pool;
use firn_engine::{
    ClosePolicy, DrainPolicy, Engine, EngineOptions, FsyncPolicy, Order, Recovered, Resumed,
};
use firn_format::quantity::{bytes, count};
use firn_format::quote::quoted_path;
use firn_hosts::LeaseUse;
use firn_trust::{Distrust, TrustError};
use firn_workers::Workers;
use rustix::fs::{Mode as FileMode, OFlags};

use crate::arena_opening::{FoundArena, NewArenaFiles, find_or_create_arena};
use crate::error::AttachError;
use crate::host_lease::{HostLease, LeaseState, open_backing};
use crate::host_name::host_name;
use crate::lock::Locks;
use crate::lower_store::{AttachPurpose, AttachTarget};
use crate::part::{ArenaEnd, Part, Parts, StopContext};
use crate::parts::{ArenaFile, HeldLocks, HeldValue, IoThreads, Peers, PlacedLanes};
use crate::peers::{PeerComparison, terms_from_options};
use crate::process;
use crate::runtime_files::exists;
use crate::store::{Layers as _, Store};
use crate::store_opening::open_store;
use crate::token_source::TokenSource;

/// An arena that is attached to its backing, and the threads that drain it.
pub(crate) struct AttachedArena {
    pub(crate) engine: Arc<Engine<Store>>,
    pub(crate) recovered: Recovered,
    /// Directories that transactions of an earlier firnd covered, and that were undone.
    pub(crate) undone_scopes: Vec<Vec<u8>>,
    pub(crate) files: RuntimeFiles,
    pub(crate) workers: Workers,
    pub(crate) io_threads: Arc<IoThreads>,
    /// State of this host's lease, on which transactions of several hosts depend; `None` if there are none.
    pub(crate) commit_lease: Option<Arc<LeaseState>>,
    /// State of the same lease, which carries reports to other hosts; `None` if this host has no lease.
    pub(crate) report_lease: Option<Arc<LeaseState>>,
    /// The parts in the order of their start: from the locks that exclude other processes to the I/O threads.
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

impl AttachedArena {
    /// Attaches the arena of `backing` (a canonical path), or makes one, and starts to drain its data to the backing.
    /// The arena is shared memory with the bytes that are not there yet. The caller has taken `locks` already.
    ///
    /// `resumed` is the state of a dead firnd if this process continues its mount; `None` for a new mount.
    pub(crate) fn attach_for_mount(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        resumed: Option<&Resumed>,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let target = AttachTarget {
            backing,
            files: &files,
            options,
            purpose: AttachPurpose::Mount,
            resumed,
        };
        Self::attach(&target, locks, notice)
    }

    /// Attaches the arena of `backing` for a recovery, and starts to drain its data to the backing. The caller has
    /// taken `locks` already. If data is lost with the spill file (the arena's extension on a disk), the other data is
    /// drained.
    pub(crate) fn attach_for_recovery(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let target = AttachTarget {
            backing,
            files: &files,
            options,
            purpose: AttachPurpose::Recovery,
            resumed: None,
        };
        Self::attach(&target, locks, notice)
    }

    /// Takes the steps that a mount and a recovery share: locks, arena, store, engine, I/O threads. The parts that this
    /// needs are returned in the order of their start.
    fn attach(
        target: &AttachTarget<'_>,
        mut locks: Locks,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let &AttachTarget {
            backing,
            files,
            options,
            purpose,
            resumed,
        } = target;
        let mut arena = lock_and_find_arena(target, &mut locks, notice)?;
        let new_arena_files = NewArenaFiles::from_found(&arena);
        let was_damaged = matches!(arena, FoundArena::Used { damaged: true, .. });
        let directory = open_backing(backing)?;
        let workers = Workers::default();
        // The tokens come before the store, because opening the store counts Firn's own directories in the backing.
        let lease = locks.host_lease();
        let token_source = TokenSource::open(backing, options, lease, notice)?;
        let opened = open_store(target, directory, &mut arena, lease, notice)
            .map_err(AttachError::in_backing(backing))?;
        let mut parts = opened.parts;
        if purpose == AttachPurpose::Mount {
            warn_of_exposed_firn_dir(backing, options, notice);
            parts.push(compare_with_other_hosts(
                target,
                &opened.store,
                &workers,
                lease,
                notice,
            )?);
        }
        let undone_scopes = opened.undone_scopes;
        let StartedEngine { engine, recovered } =
            start_engine(opened.store, arena, options, resumed)?;
        report_recovery(&recovered, options.drain, notice);
        let is_damaged = was_damaged || !recovered.damage.is_empty();
        let io_threads = start_io_threads(&engine, options, token_source.as_ref())?;
        parts.push(Arc::new(ArenaFile {
            engine: Arc::clone(&engine),
            files: files.clone(),
            is_damaged,
        }));
        if engine.backing().lane_layer().is_some() {
            parts.push(PlacedLanes::new(&engine, &workers));
        }
        parts.push(Arc::clone(&io_threads) as Arc<dyn Part>);
        new_arena_files.keep();
        let commit_lease = locks.transaction_lease_state();
        let report_lease = locks.host_lease().state();
        let mut first_parts: Vec<Arc<dyn Part>> = vec![HeldLocks::new(locks)];
        first_parts.extend(token_source.map(HeldValue::into_part));
        parts.splice(..0, first_parts);
        Ok(Self {
            engine,
            recovered,
            undone_scopes,
            files: files.clone(),
            workers,
            io_threads,
            commit_lease,
            report_lease,
            parts,
        })
    }

    /// Stops the parts of an arena that programs have not seen yet. `arena_end` says what happens to the arena.
    pub(crate) fn stop_before_visible(mut self, arena_end: ArenaEnd) {
        let parts = std::mem::take(&mut self.parts);
        Parts::new(parts).stop(&mut StopContext::unseen(arena_end));
    }
}

impl Drop for AttachedArena {
    /// Drops the parts that were not stopped because of a failure, from the last to the first. So the locks that
    /// exclude other processes are released last.
    fn drop(&mut self) {
        while let Some(last_part) = self.parts.pop() {
            drop(last_part);
        }
    }
}

/// Returns the values by which an arena identifies its backing: path, device and inode.
fn arena_identity(backing: &Path) -> Result<Identity, AttachError> {
    let metadata = backing
        .metadata()
        .map_err(AttachError::io("look at the backing directory"))?;
    Ok(Identity {
        backing: backing.into(),
        dev: metadata.dev(),
        ino: metadata.ino(),
    })
}

/// A started engine, and what it has recovered from its arena.
struct StartedEngine {
    engine: Arc<Engine<Store>>,
    recovered: Recovered,
}

/// Starts the engine, which manages the files of the mount, on an empty arena or on the data that an earlier firnd left
/// in its arena. `resumed` is the state of that firnd if this one continues its mount.
fn start_engine(
    store: Store,
    arena: FoundArena,
    options: &Options,
    resumed: Option<&Resumed>,
) -> Result<StartedEngine, AttachError> {
    match arena {
        FoundArena::Fresh(arena) => {
            let engine_options = engine_options(&arena, options);
            Ok(StartedEngine {
                engine: Engine::begin(store, *arena, engine_options)?,
                recovered: Recovered::default(),
            })
        }
        FoundArena::Used { stored, .. } => {
            let engine_options = engine_options(stored.arena(), options);
            let (engine, recovered) =
                Engine::attach_stored(store, *stored, engine_options, resumed)?;
            Ok(StartedEngine { engine, recovered })
        }
    }
}

/// Starts the threads that drain the arena to the backing. With a `token_source`, they write to a lane (one I/O server)
/// only under its token, the lock that lets one host at a time write there.
fn start_io_threads(
    engine: &Arc<Engine<Store>>,
    options: &Options,
    token_source: Option<&TokenSource>,
) -> Result<Arc<IoThreads>, AttachError> {
    let pool_options = firn_drain::IoThreads {
        count: options.io_threads as usize,
        lane_writers_max: match options.lane_writers {
            // 0 means no limit.
            0 => usize::MAX,
            count => count as usize,
        },
        cpu_percent: options.drain_cpu_percent,
    };
    let lane_count = engine.drainer.lanes().count();
    let tokens = token_source
        .map(|source| source.start(lane_count))
        .transpose()
        .map_err(AttachError::io("start the threads of the tokens"))?;
    let pool = Pool::start(Arc::clone(engine), pool_options, tokens)
        .map_err(AttachError::io("start the I/O threads"))?;
    Ok(IoThreads::new(pool))
}

/// Warns if other users may rename `.firn`, the directory in the backing for Firn's own files, while that directory may
/// have transactions or logs. After such a rename their data is not found, and files silently show earlier contents.
/// This is no reason to refuse the mount, because the user has chosen the backing.
fn warn_of_exposed_firn_dir(backing: &Path, options: &Options, notice: &mut dyn FnMut(String)) {
    let will_use_firn_dir = options.drain == Drain::Commit || options.layout == Layout::Log;
    let firn_dir = backing.join(firn_hosts::own::TOP);
    if !will_use_firn_dir && !exists(&firn_dir) {
        return;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    // A backing that cannot be opened fails later with an error of its own.
    let Ok(directory) = rustix::fs::open(backing, flags, FileMode::empty()) else {
        return;
    };
    if let Err(TrustError::Exposed { why, .. }) =
        firn_trust::check_shared_parent(&directory, backing)
    {
        let backing = quoted_path(backing);
        let advice = match why {
            Distrust::Replaceable { .. } => format!("; `chmod +t {backing}` prevents that"),
            _ => String::new(),
        };
        notice(format!(
            "{backing} {why}: other users can take .firn away, and with it the transactions and the logs of \
             files{advice}"
        ));
    }
}

/// Publishes how this host mounts the backing, compares that with the other hosts, and returns the part that repeats
/// the comparison. Fails if the mount would give wrong results beside another host.
fn compare_with_other_hosts(
    target: &AttachTarget<'_>,
    store: &Store,
    workers: &Workers,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<Arc<dyn Part>, AttachError> {
    let serves_logs = store.log_layer().is_some();
    publish_mount_options(target, serves_logs, lease, notice)?;
    let comparison =
        PeerComparison::compare_before_mount(target.backing, target.options, serves_logs, notice)?;
    Ok(Peers::new(comparison, workers))
}

/// Returns the arena of a backing, locked against other processes of this host; makes one if there is none. The arena
/// is shared memory with the bytes that are not in the backing yet. The lock is added to `locks`.
fn lock_and_find_arena(
    target: &AttachTarget<'_>,
    locks: &mut Locks,
    notice: &mut dyn FnMut(String),
) -> Result<FoundArena, AttachError> {
    let AttachTarget { backing, files, .. } = target;
    let identity = arena_identity(backing)?;
    // The arena is locked before any of its bytes is read. If the backing's file system has no flock(2), this is the
    // only lock.
    if exists(&files.arena) {
        locks.lock_arena_file(&files.arena, backing, files)?;
    }
    let arena = find_or_create_arena(target, &identity, notice)?;
    if matches!(arena, FoundArena::Fresh(_)) {
        locks.lock_arena_file(&files.arena, backing, files)?;
    }
    Ok(arena)
}

/// Tells other hosts how this host mounts the backing, so that they can compare that with their own mounts. Does
/// nothing for a read-only mount, or for one that neither shares I/O servers nor wants a partner.
///
/// The description is written to this host's lease, a locked file in the backing that shows that the host is alive.
/// Only the comparison needs this lease, so a lease that cannot be used is reported and is no error. `serves_logs` says
/// whether the mount keeps the writes to files in logs, which is part of the description.
fn publish_mount_options(
    target: &AttachTarget<'_>,
    serves_logs: bool,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<(), AttachError> {
    let options = target.options;
    // Files on several I/O servers (lanes), locks of these servers in etcd, or another host that keeps copies.
    let shares_lanes = options.placement != Placement::None
        || options.tokens == TokenService::Etcd
        || options.partner != Partner::None;
    if options.read_only || !shares_lanes {
        return Ok(());
    }
    let terms = terms_from_options(options, serves_logs);
    match lease.begin_use(LeaseUse::Lanes, &host_name(options)?, &terms) {
        Err(reason) if is_lease_unusable(&reason) => {
            notice(format!(
                "other hosts cannot see the options of this mount: {reason}"
            ));
            Ok(())
        }
        result => result,
    }
}

/// Returns whether an error means that this host cannot have its lease: locks do not reach other hosts, or another
/// process has the lease.
fn is_lease_unusable(error: &AttachError) -> bool {
    matches!(
        error,
        AttachError::TokensDoNotReach { .. } | AttachError::HostHeld { .. }
    )
}

/// Converts the options of the mount to those of the engine, which manages its files. Only the size of a chunk (a unit
/// of memory) comes from the arena, the shared memory itself: an arena with data keeps its sizes.
fn engine_options(arena: &Arena, options: &Options) -> EngineOptions {
    EngineOptions {
        drain: match options.drain {
            Drain::Eager | Drain::Commit => DrainPolicy::Eager,
            Drain::Demand => DrainPolicy::Demand,
        },
        close: match options.close {
            Close::Drain | Close::Auto => ClosePolicy::Drain,
            Close::Held => ClosePolicy::Held,
        },
        fsync: match options.fsync {
            Fsync::Durable => FsyncPolicy::Durable,
            Fsync::Held => FsyncPolicy::Held,
        },
        order: match options.order {
            firn_config::Order::Interleaved => Order::Interleaved,
            firn_config::Order::Sequential => Order::Sequential,
        },
        drain_age: Duration::from_millis(options.drain_age_ms),
        spill_upper_percent: options.spill_upper_percent,
        spill_lower_percent: options.spill_lower_percent,
        passthrough: passthrough(options),
        memory_file_bytes_min: memory_file_bytes_min(options),
        // With other hosts, each read must reach the engine, so that conflicts between hosts are found.
        serves_every_read: options.participants != Participants::Off,
        objects_max: process::objects_max(),
        open_files_max: process::objects_max(),
        ..EngineOptions::new(arena.geometry().chunk_bytes)
    }
}

/// Returns the size from which a file gets a memory file; 0 means that no file does. A stub tree has no memory files: a
/// chunk list of a stub cannot refer to one, so its reader would ask firnd for each part.
fn memory_file_bytes_min(options: &Options) -> u64 {
    match options.frontend {
        Frontend::Fuse => options.memory_file_bytes_min,
        Frontend::Preload => 0,
    }
}

/// Returns whether to try kernel passthrough. It needs CAP_SYS_ADMIN in the initial user namespace, and the kernel may
/// still refuse it.
pub(crate) fn passthrough(options: &Options) -> bool {
    options.passthrough == Passthrough::Auto
        && options.drain != Drain::Commit
        && options.frontend == Frontend::Fuse
        && rustix::process::geteuid().is_root()
}

/// Reports to the user what was recovered from the arena (shared memory with bytes that the backing lacked), what was
/// dropped, and which data has no file any more. `drain` says when the recovered data goes to the backing.
fn report_recovery(recovered: &Recovered, drain: Drain, notice: &mut dyn FnMut(String)) {
    for damage in &recovered.damage {
        notice(format!("journal: {damage}"));
    }
    if recovered.dropped_bytes > 0 {
        notice(format!(
            "dropped {} that were written in a transaction which has ended",
            bytes(recovered.dropped_bytes)
        ));
    }
    if recovered.files > 0 {
        notice(format!(
            "recovered {} in {}; they {}",
            bytes(recovered.bytes),
            count(recovered.files, "file"),
            match drain {
                Drain::Eager | Drain::Commit => "are being drained",
                Drain::Demand => "stay in memory until they are drained",
            }
        ));
    }
    for lost in &recovered.lost {
        notice(format!(
            "{}: {} are kept in the arena, but their file is not in the backing ({})",
            lost.known_path(),
            bytes(lost.bytes),
            lost.reason
        ));
    }
}
