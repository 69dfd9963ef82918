//! Arena, engine and IO threads of one backing, with its locks: what firnd and `firn recover` share.
//!
//! An arena that holds data is always attached as it is, whatever the options say now; an empty one
//! of another shape is made anew.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_arena::{Arena, Damage, Identity, Stored, Topology};
use firn_backing::DirBacking;
use firn_client::paths::{RuntimeFiles, create_runtime_dir};
use firn_config::{Close, Door, Drain, Fsync, Mode, Options, Participants, Passthrough};
use firn_drain::Pool;
use firn_engine::{ClosePolicy, DrainPolicy, Engine, EngineOptions, FsyncPolicy, Recovered};
use firn_held::{Group, Held, HeldError};

use crate::error::DaemonError;
use crate::lock::Locks;
use crate::participants::Pause;
use crate::process;
use crate::spill;

/// What the engine writes to: the backing, which may be in a transaction.
pub(crate) type Store = Held<DirBacking>;

/// A backing that is being drained.
pub(crate) struct Attached {
    pub(crate) engine: Arc<Engine<Store>>,
    pub(crate) recovered: Recovered,
    pub(crate) files: RuntimeFiles,
    pool: Pool,
    /// Parts of the arena could not be read: it is put aside at the end, not removed.
    damaged: bool,
    _locks: Locks,
}

/// Where the runtime files of `backing` are, in a directory that is there and ours.
pub(crate) fn runtime_files(backing: &Path, options: &Options) -> Result<RuntimeFiles, DaemonError> {
    create_runtime_dir().map_err(|error| DaemonError::Runtime { text: error.to_string() })?;
    if let Some(dir) = &options.arena_dir {
        let unusable = |source| DaemonError::ArenaDirectory { path: dir.clone(), source };
        if !dir.metadata().map_err(unusable)?.is_dir() {
            return Err(unusable(io::Error::from_raw_os_error(libc::ENOTDIR)));
        }
    }
    Ok(RuntimeFiles::of(backing, options.arena_dir.as_deref()))
}

impl Attached {
    /// Attaches the arena of `backing` (canonical), making it if there is none, and begins to drain
    /// what is in it. The locks must be taken already.
    pub(crate) fn new(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, DaemonError> {
        Self::attach(backing, files, locks, options, false, notice)
    }

    /// The same for an arena of which parts may be gone with its spill file: what is left is drained.
    pub(crate) fn salvage(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, DaemonError> {
        Self::attach(backing, files, locks, options, true, notice)
    }

    fn attach(
        backing: &Path,
        files: RuntimeFiles,
        mut locks: Locks,
        options: &Options,
        salvage: bool,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, DaemonError> {
        let metadata = backing.metadata().map_err(DaemonError::io("look at the backing directory"))?;
        let identity = Identity { backing: backing.into(), dev: metadata.dev(), ino: metadata.ino() };
        // Before its first byte is touched: where the backing knows no flock(2), this is the only lock.
        if files.arena.exists() {
            locks.add_arena(&files.arena, backing, &files)?;
        }
        let found = find(&files, &identity, options, salvage, notice)?;
        if matches!(found, Found::Fresh(_)) {
            locks.add_arena(&files.arena, backing, &files)?;
        }
        let damaged = matches!(found, Found::Used { damaged: true, .. });
        let directory = DirBacking::open(backing)
            .map_err(|e| DaemonError::BackingUnusable { path: backing.into(), source: e })?;
        let (store, outcome) = open_store(backing, directory, options, notice)?;
        let (engine, recovered) = match found {
            Found::Fresh(arena) => {
                let policies = policies(&arena, options);
                (Engine::begin(store, arena, policies)?, Recovered::default())
            }
            Found::Used { arena, stored, .. } => {
                let policies = policies(&arena, options);
                let dropped: Vec<&[u8]> = outcome.dropped().collect();
                Engine::attach_without(store, arena, &stored, policies, &dropped)?
            }
        };
        tell(&recovered, options.drain, notice);
        let threads = options.io_threads as usize;
        let pool =
            Pool::start(Arc::clone(&engine), threads).map_err(DaemonError::io("start the IO threads"))?;
        let damaged = damaged || !recovered.damage.is_empty();
        Ok(Self { engine, recovered, files, pool, damaged, _locks: locks })
    }

    /// Bytes that only the arena has.
    pub(crate) fn left_bytes(&self) -> u64 {
        let status = self.engine.status();
        status.held_bytes + status.lost_file_bytes
    }

    /// Stops the IO threads, removes the arena if nothing is left in it and `remove` allows, and
    /// gives the locks back. Returns the bytes that are left.
    pub(crate) fn finish(mut self, remove: bool) -> u64 {
        self.pool.stop();
        let left = self.left_bytes();
        let spill = self.engine.arena().spill_file().map(|file| file.path().to_owned());
        if left == 0 && remove && self.damaged {
            let aside = self.files.arena.with_extension("damaged");
            match std::fs::rename(&self.files.arena, &aside) {
                Ok(()) => {
                    if let Some(spill) = &spill {
                        // Its name without this would be taken for that of an arena that is gone.
                        let _ = std::fs::rename(spill, spill.with_extension("spill.damaged"));
                    }
                    tracing::warn!(arena = %aside.display(), "kept: parts of it were damaged; remove it when you have looked at it with firn check")
                }
                Err(error) => tracing::warn!(%error, "cannot put the damaged arena aside"),
            }
        } else if left == 0 && remove {
            // In this order: without the arena the spill file means nothing and is replaced.
            for file in std::iter::once(&self.files.arena).chain(&spill) {
                if let Err(error) = std::fs::remove_file(file) {
                    tracing::warn!(%error, file = %file.display(), "cannot remove the empty arena");
                    break;
                }
            }
        }
        left
    }
}

/// The backing, after transactions of an earlier firnd were finished or undone.
fn open_store(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    notice: &mut dyn FnMut(String),
) -> Result<(Store, firn_held::Outcome), DaemonError> {
    let wanted = options.drain == Drain::Commit;
    if !wanted && !Held::has_transactions(&directory).map_err(HeldError::from)? {
        return Ok((Held::plain(directory), firn_held::Outcome::default()));
    }
    let known = Held::known_backups(&directory).map_err(HeldError::from)?;
    let (store, outcome) = match crate::participants::group(options)? {
        None => Held::open_with_history(directory, options.history)?,
        Some(group) => open_of_group(backing, directory, group, options, notice)?,
    };
    let store = store.in_mode(match options.mode {
        Mode::Hold => firn_held::Mode::Hold,
        Mode::Shadow => firn_held::Mode::Shadow,
    });
    let store = crate::backup::attach(store, backing, options, &known)?;
    for id in &outcome.finished {
        notice(format!("finished the commit {id} that an earlier firnd had decided"));
    }
    for scope in &outcome.undone {
        notice(format!(
            "undid a transaction in {} that nobody had prepared",
            crate::transactions::shown_scope(scope)
        ));
    }
    if !wanted {
        // Without the tables of a backing that has transactions, the kernel may read files by itself.
        let Some((id, scope)) = outcome.waiting.first() else {
            let directory = DirBacking::open(backing)
                .map_err(|e| DaemonError::BackingUnusable { path: backing.into(), source: e })?;
            return Ok((Held::plain(directory), outcome));
        };
        let scope = crate::transactions::shown_scope(scope);
        return Err(DaemonError::TransactionWaits { id: *id, scope });
    }
    for (id, scope) in &outcome.waiting {
        notice(format!(
            "a transaction in {} is prepared with id {id} and waits: firn commit or firn abort ends it, firn restore finishes it",
            crate::transactions::shown_scope(scope)
        ));
    }
    Ok((store, outcome))
}

/// What this node left open is undone when the other nodes have stopped, which they hear of by this.
fn open_of_group(
    backing: &Path,
    mut directory: DirBacking,
    group: Group,
    options: &Options,
    notice: &mut dyn FnMut(String),
) -> Result<(Store, firn_held::Outcome), DaemonError> {
    let deadline = Instant::now() + Duration::from_millis(options.participants_wait_ms);
    let (mut pause, mut told) = (Pause::default(), false);
    loop {
        match Held::open_of_group(directory, group.clone()) {
            Err(error @ HeldError::Stopping { .. }) if Instant::now() < deadline => {
                if !std::mem::replace(&mut told, true) {
                    notice(format!("waiting: {error}"));
                }
            }
            opened => return Ok(opened?),
        }
        pause.rest();
        directory = DirBacking::open(backing)
            .map_err(|e| DaemonError::BackingUnusable { path: backing.into(), source: e })?;
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
        drain_age: Duration::from_millis(options.drain_age_ms),
        spill_upper_percent: options.spill_upper_percent,
        spill_lower_percent: options.spill_lower_percent,
        keep: options.keep,
        drain_every: options.drain_every,
        passthrough: passthrough(options),
        tracking: options.participants != Participants::Off,
        objects_max: process::objects_max(),
        ..EngineOptions::new(arena.geometry().chunk_bytes)
    }
}

/// Kernel passthrough needs CAP_SYS_ADMIN of the first user namespace; the kernel has the last word.
pub(crate) fn passthrough(options: &Options) -> bool {
    options.passthrough == Passthrough::Auto
        && options.drain != Drain::Commit
        && options.door == Door::Mount
        && rustix::process::geteuid().is_root()
}

enum Found {
    Fresh(Arena),
    Used { arena: Arena, stored: Vec<Stored>, damaged: bool },
}

fn find(
    files: &RuntimeFiles,
    identity: &Identity,
    options: &Options,
    salvage: bool,
    notice: &mut dyn FnMut(String),
) -> Result<Found, DaemonError> {
    let path = &files.arena;
    let (geometry, spill_path) = spill::wanted(files, options)?;
    let topology = options.numa_topology.as_deref().map_or_else(Topology::one, Topology::read);
    let create = || Arena::create_on(path, geometry, identity, &spill_path, &topology);
    if !path.exists() {
        return Ok(Found::Fresh(create()?));
    }
    let (arena, stored, damage) = Arena::attach_on(path, &topology)?;
    let made_for = PathBuf::from(text(&arena.superblock().backing_path));
    if made_for != identity.backing {
        return Err(DaemonError::ArenaForeign { path: path.clone(), found: made_for.display().to_string() });
    }
    for damage in &damage {
        notice(format!("arena {}: {damage}", path.display()));
    }
    let damaged = !damage.is_empty();
    let fault = arena.spill_fault().map(ToString::to_string);
    if let Some(fault) = &fault {
        let lost = damage.iter().any(|damage| matches!(damage, Damage::Spill { .. }));
        if lost && !salvage {
            let (arena, backing) = (path.clone(), identity.backing.clone());
            return Err(DaemonError::SpillGone { arena, fault: fault.clone(), backing });
        }
        notice(format!("{fault}: nothing moves to it"));
    }
    if *arena.geometry() == geometry && spill::is_at(&arena, &spill_path) && fault.is_none() {
        return Ok(Found::Used { arena, stored, damaged });
    }
    if stored.is_empty() && !damaged && !journal_has_work(&arena) {
        let old_spill = arena.spill_file().map(|file| file.path().to_owned());
        drop(arena);
        std::fs::remove_file(path).map_err(DaemonError::io("remove the empty arena of another size"))?;
        if let Some(old) = old_spill {
            std::fs::remove_file(old).map_err(DaemonError::io("remove the empty spill file"))?;
        }
        return Ok(Found::Fresh(create()?));
    }
    let has = arena.geometry();
    notice(format!(
        "the arena holds data and keeps its arena-size={}, chunk-size={} and spill-size={} until it was empty once",
        has.data_bytes(),
        has.chunk_bytes,
        has.spill_bytes()
    ));
    Ok(Found::Used { arena, stored, damaged })
}

fn text(path: &[u8]) -> std::ffi::OsString {
    std::os::unix::ffi::OsStringExt::from_vec(path.to_vec())
}

/// A truncation that was journaled and perhaps not done, with no piece left that tells of it.
fn journal_has_work(arena: &Arena) -> bool {
    let replay = firn_journal::replay(&arena.journal_region());
    !replay.damage.is_empty() || replay.ledger.files().any(|(_, bound)| !bound.truncating.is_empty())
}

fn tell(recovered: &Recovered, drain: Drain, notice: &mut dyn FnMut(String)) {
    for damage in &recovered.damage {
        notice(format!("journal: {damage}"));
    }
    if recovered.dropped_bytes > 0 {
        notice(format!(
            "dropped {} bytes that were written in a transaction that is no more",
            recovered.dropped_bytes
        ));
    }
    if recovered.files > 0 {
        notice(format!(
            "recovered {} bytes of {} files; they {}",
            recovered.bytes,
            recovered.files,
            match drain {
                Drain::Eager | Drain::Commit => "are being drained",
                Drain::Demand => "stay in memory until they are drained",
            }
        ));
    }
    for lost in &recovered.lost {
        notice(format!(
            "{}: {} bytes are kept in the arena, but their file is not in the backing ({})",
            lost.display_path(),
            lost.bytes,
            lost.reason
        ));
    }
}
