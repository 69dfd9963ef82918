//! Arena, engine and IO threads of one backing, with its locks: what firnd and `firn recover` share.
//!
//! An arena that holds data is always attached as it is, whatever the options say now; an empty one
//! of another shape is made anew.

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

use crate::error::AttachError;
use crate::found_arena::{Found, NewArena, find};
use crate::ground::{Purpose, Target};
use crate::host_lease::{HostLease, LeaseState, open_backing};
use crate::host_name::host_name;
use crate::lock::Locks;
use crate::part::{ArenaEnd, Part, Parts, Stop};
use crate::parts::{ArenaFile, Held, HeldLocks, IoThreads, Peers, PlacedLanes};
use crate::peers::{PeerBoard, terms_of};
use crate::process;
use crate::runtime_files::exists;
use crate::store::{Layers as _, Store};
use crate::store_opening::open_store;
use crate::token_source::TokenSource;

/// A backing that is being drained.
pub(crate) struct Attached {
    pub(crate) engine: Arc<Engine<Store>>,
    pub(crate) recovered: Recovered,
    /// Scopes of transactions that were undone.
    pub(crate) undone: Vec<Vec<u8>>,
    pub(crate) files: RuntimeFiles,
    pub(crate) workers: Workers,
    pub(crate) io_threads: Arc<IoThreads>,
    /// What becomes of this host's lease, where hosts commit together.
    pub(crate) host_lease: Option<Arc<LeaseState>>,
    /// What the beats of this host's lease say, where it has one.
    pub(crate) beats: Option<Arc<LeaseState>>,
    /// From the locks that keep others away to the threads that drain.
    pub(crate) parts: Vec<Arc<dyn Part>>,
}

impl Attached {
    /// Attaches the arena of `backing` (canonical), making it if there is none, and begins to drain
    /// what is in it. The locks must be taken already.
    pub(crate) fn new(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        resumed: Option<&Resumed>,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let target = Target {
            backing,
            files: &files,
            options,
            purpose: Purpose::Mount,
            resumed,
        };
        Self::attach(&target, locks, notice)
    }

    /// The same for an arena of which parts may be gone with its spill file: what is left is drained.
    pub(crate) fn salvage(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let target = Target {
            backing,
            files: &files,
            options,
            purpose: Purpose::Salvage,
            resumed: None,
        };
        Self::attach(&target, locks, notice)
    }

    fn attach(
        target: &Target<'_>,
        mut locks: Locks,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let &Target {
            backing,
            files,
            options,
            purpose,
            resumed,
        } = target;
        let identity = identify(backing)?;
        // Before its first byte is touched: where the backing knows no flock(2), this is the only lock.
        if exists(&files.arena) {
            locks.add_arena(&files.arena, backing, files)?;
        }
        let mut found = find(target, &identity, notice)?;
        if matches!(found, Found::Fresh(_)) {
            locks.add_arena(&files.arena, backing, files)?;
        }
        let new = NewArena::of(&found);
        let was_damaged = matches!(found, Found::Used { damaged: true, .. });
        let directory = open_backing(backing)?;
        let workers = Workers::default();
        // Before the backing is opened, which counts the directories of Firn's own in it.
        let lease = locks.host_lease();
        let token_source = TokenSource::open(backing, options, lease, notice)?;
        let opened = open_store(target, directory, &mut found, lease, notice)
            .map_err(AttachError::in_backing(backing))?;
        let mut parts = opened.parts;
        if purpose == Purpose::Mount {
            tell_of_exposed_names(backing, options, notice);
            parts.push(meet_hosts(target, &opened.store, &workers, lease, notice)?);
        }
        let undone = opened.undone;
        let Begun { engine, recovered } = begin_engine(opened.store, found, options, resumed)?;
        tell(&recovered, options.drain, notice);
        let is_damaged = was_damaged || !recovered.damage.is_empty();
        let io_threads = start_io_threads(&engine, options, token_source.as_ref())?;
        parts.push(Arc::new(ArenaFile {
            engine: Arc::clone(&engine),
            files: files.clone(),
            is_damaged,
        }));
        if engine.backing().placed().is_some() {
            parts.push(PlacedLanes::new(&engine, &workers));
        }
        parts.push(Arc::clone(&io_threads) as _);
        new.keep();
        let host_lease = locks.host_lease_state();
        let beats = locks.host_lease().state();
        let mut first: Vec<Arc<dyn Part>> = vec![HeldLocks::new(locks)];
        first.extend(token_source.map(Held::part));
        parts.splice(..0, first);
        Ok(Self {
            engine,
            recovered,
            undone,
            files: files.clone(),
            workers,
            io_threads,
            host_lease,
            beats,
            parts,
        })
    }

    /// Stops its parts, and does with the arena what `end` says. For what programs have not seen.
    pub(crate) fn finish(mut self, end: ArenaEnd) {
        let parts = std::mem::take(&mut self.parts);
        Parts::new(parts).stop(&mut Stop::unseen(end));
    }
}

impl Drop for Attached {
    /// What is not stopped, because something failed, ends in the same order: what keeps others away is last.
    fn drop(&mut self) {
        while let Some(last) = self.parts.pop() {
            drop(last);
        }
    }
}

/// What an arena knows its backing by.
fn identify(backing: &Path) -> Result<Identity, AttachError> {
    let metadata = backing
        .metadata()
        .map_err(AttachError::io("look at the backing directory"))?;
    Ok(Identity {
        backing: backing.into(),
        dev: metadata.dev(),
        ino: metadata.ino(),
    })
}

/// An engine over its store, and what was found in its arena.
struct Begun {
    engine: Arc<Engine<Store>>,
    recovered: Recovered,
}

fn begin_engine(
    store: Store,
    found: Found,
    options: &Options,
    resumed: Option<&Resumed>,
) -> Result<Begun, AttachError> {
    match found {
        Found::Fresh(arena) => {
            let policies = policies(&arena, options);
            Ok(Begun {
                engine: Engine::begin(store, *arena, policies)?,
                recovered: Recovered::default(),
            })
        }
        Found::Used { stored, .. } => {
            let policies = policies(stored.arena(), options);
            let (engine, recovered) = Engine::attach_stored(store, *stored, policies, resumed)?;
            Ok(Begun { engine, recovered })
        }
    }
}

fn start_io_threads(
    engine: &Arc<Engine<Store>>,
    options: &Options,
    token_source: Option<&TokenSource>,
) -> Result<Arc<IoThreads>, AttachError> {
    let threads = firn_drain::IoThreads {
        count: options.io_threads as usize,
        lane_writers_max: match options.lane_writers {
            0 => usize::MAX,
            count => count as usize,
        },
        cpu_percent: options.drain_cpu_percent,
    };
    let lane_count = engine.drainer.lanes().count();
    let tokens = token_source.map(|source| source.start(lane_count));
    let tokens = tokens
        .transpose()
        .map_err(AttachError::io("start the threads of the tokens"))?;
    let pool = Pool::start(Arc::clone(engine), threads, tokens);
    let pool = pool.map_err(AttachError::io("start the IO threads"))?;
    Ok(IoThreads::new(pool))
}

/// Tells where others may rename `.firn`, with transactions or logs in it: without them files are shown as they were
/// before, and nothing else tells. The backing is not refused for it: it is where the user wants the files.
fn tell_of_exposed_names(backing: &Path, options: &Options, notice: &mut dyn FnMut(String)) {
    let keeps_some = options.drain == Drain::Commit || options.layout == Layout::Log;
    if !keeps_some && !exists(&backing.join(firn_hosts::own::TOP)) {
        return;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(opened) = rustix::fs::open(backing, flags, FileMode::empty()) else {
        return;
    };
    if let Err(TrustError::Exposed { why, .. }) = firn_trust::check_shared_parent(&opened, backing)
    {
        let backing = quoted_path(backing);
        let advice = match why {
            Distrust::Replaceable { .. } => format!("; `chmod +t {backing}` keeps it there"),
            _ => String::new(),
        };
        notice(format!(
            "{backing} {why}: others can take .firn away, with transactions and files in logs{advice}"
        ));
    }
}

/// Shows other hosts that this one mounts the backing, and looks how they do.
fn meet_hosts(
    target: &Target<'_>,
    store: &Store,
    workers: &Workers,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<Arc<dyn Part>, AttachError> {
    let serves_logs = store.logged().is_some();
    show_lanes(target, serves_logs, lease, notice)?;
    let peers =
        PeerBoard::compare_before_mount(target.backing, target.options, serves_logs, notice)?;
    Ok(Peers::new(peers, workers))
}

/// Shows by the lease that this host shares lanes, or tokens of a service elsewhere, or wants a partner: others see how it
/// mounts, and nothing else depends on it.
fn show_lanes(
    target: &Target<'_>,
    serves_logs: bool,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<(), AttachError> {
    let options = target.options;
    let shares_lanes = options.placement != Placement::None
        || options.tokens == TokenService::Etcd
        || options.partner != Partner::None;
    if options.read_only || !shares_lanes {
        return Ok(());
    }
    let terms = terms_of(options, serves_logs);
    match lease.use_for(LeaseUse::Lanes, &host_name(options)?, &terms) {
        Err(reason @ (AttachError::TokensDoNotReach { .. } | AttachError::HostHeld { .. })) => {
            notice(format!(
                "other hosts do not see how this one mounts the backing: {reason}"
            ));
            Ok(())
        }
        used => used,
    }
}

fn policies(arena: &Arena, options: &Options) -> EngineOptions {
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
        serves_every_read: options.participants != Participants::Off,
        objects_max: process::objects_max(),
        open_files_max: process::objects_max(),
        ..EngineOptions::new(arena.geometry().chunk_bytes)
    }
}

/// The list of a stub names no other files, so its reader would ask firnd for each part of a memory file.
fn memory_file_bytes_min(options: &Options) -> u64 {
    match options.frontend {
        Frontend::Fuse => options.memory_file_bytes_min,
        Frontend::Preload => 0,
    }
}

/// Kernel passthrough needs CAP_SYS_ADMIN of the first user namespace; the kernel has the last word.
pub(crate) fn passthrough(options: &Options) -> bool {
    options.passthrough == Passthrough::Auto
        && options.drain != Drain::Commit
        && options.frontend == Frontend::Fuse
        && rustix::process::geteuid().is_root()
}

fn tell(recovered: &Recovered, drain: Drain, notice: &mut dyn FnMut(String)) {
    for damage in &recovered.damage {
        notice(format!("journal: {damage}"));
    }
    if recovered.dropped_bytes > 0 {
        notice(format!(
            "dropped {} that were written in a transaction that is no more",
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
