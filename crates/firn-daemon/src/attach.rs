//! Arena, engine and IO threads of one backing, with its locks: what firnd and `firn recover` share.
//!
//! An arena that holds data is always attached as it is, whatever the options say now; an empty one
//! of another shape is made anew.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_arena::{Arena, ArenaError, Damage, Identity, SpillFault, Stored, Topology};
use firn_backing::{Backing, DirBacking};
use firn_client::paths::RuntimeFiles;
use firn_config::{
    Close, Drain, Frontend, Fsync, Layout, Mode, Options, Participants, Passthrough, Placement,
    TokenService,
};
use firn_drain::{IoThreads, Pool};
use firn_engine::{
    ClosePolicy, DrainPolicy, Engine, EngineOptions, FsyncPolicy, Order, Recovered, StoredArena,
};
use firn_format::quote::quoted_path;
use firn_hosts::LeaseUse;
use firn_hosts::tokens::LaneToken;
use firn_lanes::steering::Steered;
use firn_transact::{
    AbortError, ArenaId, Members, Opening, PlainBacking, TransactionError, TransactionalBacking,
};
use firn_trust::{Distrust, TrustError};
use rustix::fs::{Mode as FileMode, OFlags};

use crate::error::AttachError;
use crate::frontend::waiting_tree;
use crate::gate::TransactionGate;
use crate::host_lease::{HostLease, LeaseState, open_backing};
use crate::host_name::host_name;
use crate::lock::Locks;
use crate::logs;
use crate::participants;
use crate::peers::{PeerBoard, terms_of};
use crate::placement;
use crate::process;
use crate::runtime_files::exists;
use crate::spill;
use crate::steering;
use crate::store::{Layers as _, LoggableStore, Store, TransactionalStore, shown_scope};
use crate::token_source::TokenSource;

/// How long an IO thread may take for the write that it is at when the mount ends.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// A backing that is being drained.
pub(crate) struct Attached {
    pub(crate) engine: Arc<Engine<Store>>,
    /// Where changes pass on their way to the engine; none without transactions.
    pub(crate) gate: Option<Arc<TransactionGate>>,
    /// What tells the backing's file system where new files go; none unless the placement asks for it.
    pub(crate) steered: Option<Arc<Steered>>,
    pub(crate) recovered: Recovered,
    pub(crate) files: RuntimeFiles,
    pool: Pool,
    /// The hosts that have the backing mounted, too.
    pub(crate) peers: Arc<PeerBoard>,
    /// Where the pool's tokens are kept.
    _token_source: Option<TokenSource>,
    /// Parts of the arena could not be read: it is put aside at the end, not removed.
    damaged: bool,
    locks: Locks,
}

/// What an arena is attached for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A mount, as the options say.
    Mount,
    /// What is in it is drained, of which parts may be gone.
    Salvage,
}

/// What is attached.
struct Target<'a> {
    /// Canonical.
    backing: &'a Path,
    files: &'a RuntimeFiles,
    options: &'a Options,
    purpose: Purpose,
}

/// What becomes of an arena when its firnd ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArenaEnd {
    /// It stays, whatever is in it.
    Keep,
    /// It is removed if nothing is left in it.
    RemoveIfEmpty,
    /// It is removed with all that is in it.
    Discard,
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
    ) -> Result<Self, AttachError> {
        Self::attach(backing, files, locks, options, Purpose::Mount, notice)
    }

    /// The same for an arena of which parts may be gone with its spill file: what is left is drained.
    pub(crate) fn salvage(
        backing: &Path,
        files: RuntimeFiles,
        locks: Locks,
        options: &Options,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        Self::attach(backing, files, locks, options, Purpose::Salvage, notice)
    }

    fn attach(
        backing: &Path,
        files: RuntimeFiles,
        mut locks: Locks,
        options: &Options,
        purpose: Purpose,
        notice: &mut dyn FnMut(String),
    ) -> Result<Self, AttachError> {
        let metadata = backing
            .metadata()
            .map_err(AttachError::io("look at the backing directory"))?;
        let identity = Identity {
            backing: backing.into(),
            dev: metadata.dev(),
            ino: metadata.ino(),
        };
        // Before its first byte is touched: where the backing knows no flock(2), this is the only lock.
        if exists(&files.arena) {
            locks.add_arena(&files.arena, backing, &files)?;
        }
        let mut found = find(&files, &identity, options, purpose, notice)?;
        if matches!(found, Found::Fresh(_)) {
            locks.add_arena(&files.arena, backing, &files)?;
        }
        let new = NewArena::of(&found);
        let damaged = matches!(found, Found::Used { damaged: true, .. });
        let directory = open_backing(backing)?;
        let target = Target {
            backing,
            files: &files,
            options,
            purpose,
        };
        // Before the backing is opened, which counts the directories of Firn's own in it.
        let token_source = TokenSource::open(backing, options, locks.host_lease(), notice)?;
        let OpenedStore { store, steered } =
            open_store(&target, directory, &mut found, locks.host_lease(), notice)
                .map_err(AttachError::in_backing(backing))?;
        if purpose == Purpose::Mount {
            tell_of_exposed_names(backing, options, notice);
        }
        let serves_logs = store.logged().is_some();
        show_lanes(&target, serves_logs, locks.host_lease(), notice)?;
        let peers = match purpose {
            Purpose::Mount => PeerBoard::meet(backing, options, serves_logs, notice)?,
            Purpose::Salvage => PeerBoard::alone(backing, options)?,
        };
        let (engine, recovered) = match found {
            Found::Fresh(arena) => {
                let policies = policies(&arena, options);
                (
                    Engine::begin(store, *arena, policies)?,
                    Recovered::default(),
                )
            }
            Found::Used { stored, .. } => {
                let policies = policies(stored.arena(), options);
                Engine::attach_stored(store, *stored, policies)?
            }
        };
        tell(&recovered, options.drain, notice);
        let threads = IoThreads {
            count: options.io_threads as usize,
            lane_writers_max: match options.lane_writers {
                0 => usize::MAX,
                count => count as usize,
            },
            cpu_percent: options.drain_cpu_percent,
        };
        let lane_count = engine.lanes().count();
        let tokens = token_source.as_ref().map(|source| source.start(lane_count));
        let tokens = tokens
            .transpose()
            .map_err(AttachError::io("start the threads of the tokens"))?;
        let pool = Pool::start(Arc::clone(&engine), threads, tokens)
            .map_err(AttachError::io("start the IO threads"))?;
        let damaged = damaged || !recovered.damage.is_empty();
        new.keep();
        let gate = (options.drain == Drain::Commit).then(|| {
            let tests_conflicts = options.participants != Participants::Off;
            Arc::new(TransactionGate::new(
                Arc::clone(&engine),
                backing,
                tests_conflicts,
            ))
        });
        Ok(Self {
            engine,
            gate,
            steered,
            recovered,
            files,
            pool,
            peers,
            _token_source: token_source,
            damaged,
            locks,
        })
    }

    /// Bytes that only the arena has.
    pub(crate) fn left_bytes(&self) -> u64 {
        let figures = self.engine.figures();
        figures.held_bytes + figures.lost_file_bytes
    }

    /// What becomes of this host's lease, where several hosts commit together.
    pub(crate) fn host_lease_state(&self) -> Option<Arc<LeaseState>> {
        self.locks.host_lease_state()
    }

    /// The token of each lane; none on a mount without tokens.
    pub(crate) fn lane_tokens(&self) -> Vec<LaneToken> {
        self.pool.lane_tokens().to_vec()
    }

    /// Sees to it that drains go on where those of some files hang.
    pub(crate) fn replace_hung_threads(&self) {
        self.pool.replace_hung();
    }

    /// Stops the IO threads, does with the arena what `end` says and gives the locks back. Returns the bytes that are
    /// left.
    ///
    /// Where a call of the backing may still be under way, the locks end with the process and not before: once it
    /// is answered it may change what the next mount has made.
    pub(crate) fn finish(mut self, end: ArenaEnd) -> u64 {
        let stopped = self.pool.stop_within(STOP_PATIENCE);
        if !stopped {
            tracing::warn!("the backing does not answer: firnd cannot end before it does");
        }
        if stopped {
            placement::finish_removals(self.engine.backing());
            // Nothing of this process changes the backing any more.
            self.locks.host_lease().release();
        }
        let discard = end == ArenaEnd::Discard;
        // Nothing that a late write may need is lost with what is dropped anyway.
        let remove = discard || stopped && end != ArenaEnd::Keep;
        let mut left = self.left_bytes();
        let spill = self
            .engine
            .arena()
            .spill_file()
            .map(|file| file.path().to_owned());
        if left == 0 && remove && self.damaged && !discard {
            let aside = self.files.arena.with_extension("damaged");
            match std::fs::rename(&self.files.arena, &aside) {
                Ok(()) => {
                    if let Some(spill) = &spill {
                        // Its name without this would be taken for that of an arena that is gone.
                        let _ = std::fs::rename(spill, spill.with_extension("spill.damaged"));
                    }
                    tracing::warn!(arena = %quoted_path(&aside), "parts of the arena were damaged, so it is kept: look at it with `firn check`, then remove it")
                }
                Err(error) => tracing::warn!(%error, "cannot put the damaged arena aside"),
            }
        } else if remove && (left == 0 || discard) {
            match self.remove_arena(spill.as_deref()) {
                Ok(()) if left > 0 => {
                    tracing::warn!(bytes = left, "held data was dropped, as requested");
                    left = 0;
                }
                Ok(()) => {}
                Err(error) => {
                    tracing::warn!(%error, arena = %quoted_path(&self.files.arena), "cannot remove the arena")
                }
            }
        }
        if !stopped || end == ArenaEnd::Keep {
            std::mem::forget(self.locks);
        }
        left
    }

    fn remove_arena(&self, spill: Option<&Path>) -> std::io::Result<()> {
        // In this order: without the arena the spill file means nothing and is replaced.
        std::fs::remove_file(&self.files.arena)?;
        if let Some(spill) = spill
            && let Err(error) = std::fs::remove_file(spill)
        {
            tracing::warn!(%error, file = %quoted_path(spill), "cannot remove the spill file");
        }
        Ok(())
    }
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

/// Shows by the lease that this host shares lanes, or tokens of a service elsewhere: others see how it mounts, and nothing
/// else depends on it.
fn show_lanes(
    target: &Target<'_>,
    serves_logs: bool,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<(), AttachError> {
    let options = target.options;
    let shares_lanes = options.placement != Placement::None || options.tokens == TokenService::Etcd;
    if target.purpose != Purpose::Mount || options.read_only || !shares_lanes {
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

/// What a mount writes to.
struct OpenedStore {
    store: Store,
    /// What tells its file system where new files go.
    steered: Option<Arc<Steered>>,
}

/// What is below transactions: the directory, with lanes and logs where there are any.
struct OpenedGround {
    store: LoggableStore,
    steered: Option<Arc<Steered>>,
}

/// The backing, after transactions of an earlier firnd were finished or undone. What the arena has of them is dropped
/// before anything else, so that a crash on the way finds again what tells of them.
fn open_store(
    target: &Target<'_>,
    directory: DirBacking,
    arena: &mut Found,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedStore, AttachError> {
    let members = participants::members(target.options)?;
    drop_of_other_homes(target.backing, &directory, members.as_ref(), arena)?;
    let has_transactions = target.options.drain == Drain::Commit
        || TransactionalBacking::has_transactions(&directory)?;
    let ground = open_ground(target, directory, lease, notice)?;
    let store = match has_transactions {
        true => open_transactional(target, ground.store, members, arena, notice)?,
        false => Store::Lower(plain(target, ground.store)?),
    };
    Ok(OpenedStore {
        store,
        steered: ground.steered,
    })
}

/// The store after its transactions were finished or undone: one that can have others, where the options say so.
fn open_transactional(
    target: &Target<'_>,
    ground: LoggableStore,
    members: Option<Members>,
    arena: &mut Found,
    notice: &mut dyn FnMut(String),
) -> Result<Store, AttachError> {
    let &Target {
        backing, options, ..
    } = target;
    let backups = crate::backup::open_backups(backing, options)?;
    let known =
        TransactionalBacking::known_backups(&ground, backups.as_ref().map(|(home, _)| home))?;
    let (store, outcome) = match members {
        None => {
            let opening = Opening {
                history: options.history,
                arena: Some(arena.id()),
                ..Opening::default()
            };
            TransactionalBacking::open_with(ground, opening, |scopes| arena.drop_below(scopes))?
        }
        Some(members) => open_of_members(ground, members, options, arena, notice)?,
    };
    let store = store.in_mode(match options.mode {
        Mode::Buffer => firn_transact::Mode::Buffer,
        Mode::Shadow => firn_transact::Mode::Shadow,
    });
    let store = crate::backup::attach(store, backing, backups, &known)?;
    for id in &outcome.finished {
        notice(format!(
            "finished the commit {id} that an earlier firnd had decided"
        ));
    }
    for scope in &outcome.undone {
        notice(format!(
            "undid a transaction in {} that nobody had prepared",
            shown_scope(scope)
        ));
    }
    if options.drain != Drain::Commit {
        // Without the tables of a backing that has transactions, the kernel may read files by itself.
        let Some((id, scope)) = outcome.waiting.first() else {
            return Ok(Store::Lower(plain(target, store.into_base())?));
        };
        let scope = shown_scope(scope);
        return Err(AttachError::TransactionWaits { id: *id, scope });
    }
    for (id, scope) in &outcome.waiting {
        notice(format!(
            "a transaction in {} is prepared with id {id} and waits: firn commit or firn abort ends it, firn restore finishes it",
            shown_scope(scope)
        ));
    }
    Ok(Store::Upper(store))
}

/// A mount without `participants` ends no transaction that its host began with others, nor one with them any that was
/// begun without, or as another host: that is for the next one like that, or `firn recover`. Data of it that this arena
/// has is dropped either way.
fn drop_of_other_homes(
    backing: &Path,
    directory: &DirBacking,
    members: Option<&Members>,
    arena: &mut Found,
) -> Result<(), AttachError> {
    if matches!(arena, Found::Fresh(_)) {
        return Ok(());
    }
    let id = arena.id();
    for home in TransactionalBacking::other_homes(directory, members)? {
        let directory = DirBacking::open(backing).map_err(|e| AttachError::BackingUnusable {
            path: backing.into(),
            source: e,
        })?;
        TransactionalBacking::drop_of(directory, home, id, |scopes| arena.drop_below(scopes))?;
    }
    Ok(())
}

/// The directory, with its files in lanes or logs where they are, or are to be.
fn open_ground(
    target: &Target<'_>,
    directory: DirBacking,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<OpenedGround, AttachError> {
    let &Target {
        backing, options, ..
    } = target;
    let wanted = match target.purpose {
        Purpose::Mount => placement::Use::Place,
        Purpose::Salvage => placement::Use::Serve,
    };
    let (directory, steered) = match target.purpose {
        Purpose::Mount => {
            let opened = steering::open_steered(directory, options)?;
            (opened.directory, opened.steered)
        }
        Purpose::Salvage => (directory, None),
    };
    let store = open_layers(backing, directory, options, wanted, lease, notice)?;
    Ok(OpenedGround { store, steered })
}

/// The same without a mount: files that lie in lanes or logs are served there.
pub(crate) fn serve_ground(
    backing: &Path,
    options: &Options,
    lease: &mut HostLease,
) -> Result<LoggableStore, AttachError> {
    let directory = open_backing(backing)?;
    let mut notice = |text| tracing::warn!("{text}");
    open_layers(
        backing,
        directory,
        options,
        placement::Use::Serve,
        lease,
        &mut notice,
    )
}

fn open_layers(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    wanted: placement::Use,
    lease: &mut HostLease,
    notice: &mut dyn FnMut(String),
) -> Result<LoggableStore, AttachError> {
    let placeable = placement::open(backing, directory, options, wanted, notice)?;
    logs::open(backing, placeable, options, wanted, lease)
}

/// A stub tree, also one that is recovered, keeps files without a name in `.firn`; a mount does not show that.
fn plain<B: Backing>(target: &Target<'_>, base: B) -> Result<PlainBacking<B>, AttachError> {
    let is_tree = target.options.frontend == Frontend::Preload;
    if is_tree || waiting_tree(target.files)?.is_some() {
        return Ok(PlainBacking::with_own_shown(base));
    }
    Ok(PlainBacking::new(base))
}

/// What this host left open is undone when the other hosts have stopped, which they hear of by this.
fn open_of_members(
    mut ground: LoggableStore,
    members: Members,
    options: &Options,
    arena: &mut Found,
    notice: &mut dyn FnMut(String),
) -> Result<(TransactionalStore, firn_transact::Outcome), AttachError> {
    let deadline = Instant::now() + Duration::from_millis(options.participants_wait_ms);
    let mut waits = participants::LOOK_AGAIN.start();
    let mut is_reported = false;
    loop {
        let opening = Opening {
            members: Some(members.clone()),
            arena: Some(arena.id()),
            ..Opening::default()
        };
        match TransactionalBacking::try_open(ground, opening, |scopes| arena.drop_below(scopes)) {
            Err((
                base,
                AttachError::Transactions(
                    error @ TransactionError::Abort(AbortError::Stopping { .. }),
                ),
            )) if Instant::now() < deadline => {
                if !std::mem::replace(&mut is_reported, true) {
                    notice(format!("waiting: {error}"));
                }
                ground = base;
            }
            opened => return opened.map_err(|(_, error)| error),
        }
        waits.sleep();
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
        kernel_copies_bytes_max: options.arena_bytes / 100
            * u64::from(options.kernel_copies_percent),
        serves_every_read: options.participants != Participants::Off,
        objects_max: process::objects_max(),
        open_files_max: process::objects_max(),
        ..EngineOptions::new(arena.geometry().chunk_bytes)
    }
}

/// Kernel passthrough needs CAP_SYS_ADMIN of the first user namespace; the kernel has the last word.
pub(crate) fn passthrough(options: &Options) -> bool {
    options.passthrough == Passthrough::Auto
        && options.drain != Drain::Commit
        && options.frontend == Frontend::Fuse
        && rustix::process::geteuid().is_root()
}

enum Found {
    Fresh(Box<Arena>),
    Used {
        stored: Box<StoredArena>,
        damaged: bool,
    },
}

impl Found {
    fn used(arena: Arena, stored: Vec<Stored>, damaged: bool) -> Self {
        Self::Used {
            stored: Box::new(StoredArena::open(arena, stored)),
            damaged,
        }
    }

    /// What tells it from other arenas.
    fn id(&self) -> ArenaId {
        match self {
            Self::Fresh(arena) => arena.superblock().uuid,
            Self::Used { stored, .. } => stored.arena().superblock().uuid,
        }
    }

    fn drop_below(&mut self, scopes: &[Vec<u8>]) -> Result<(), AttachError> {
        match self {
            Self::Fresh(_) => Ok(()),
            Self::Used { stored, .. } => Ok(stored.drop_below(scopes)?),
        }
    }
}

/// The files of an arena that was made just now. They go where the mount comes to nothing: an arena that is there
/// would be said to hold data.
struct NewArena {
    files: Vec<PathBuf>,
}

impl NewArena {
    fn of(found: &Found) -> Self {
        let Found::Fresh(arena) = found else {
            return Self { files: Vec::new() };
        };
        let spill = arena.spill_file().map(|file| file.path().to_owned());
        // In this order: without the arena the spill file means nothing.
        Self {
            files: std::iter::once(arena.path().to_owned())
                .chain(spill)
                .collect(),
        }
    }

    fn keep(mut self) {
        self.files.clear();
    }
}

impl Drop for NewArena {
    fn drop(&mut self) {
        for file in &self.files {
            if let Err(error) = std::fs::remove_file(file) {
                tracing::warn!(%error, file = %quoted_path(file), "cannot remove the arena of a mount that failed");
            }
        }
    }
}

fn find(
    files: &RuntimeFiles,
    identity: &Identity,
    options: &Options,
    purpose: Purpose,
    notice: &mut dyn FnMut(String),
) -> Result<Found, AttachError> {
    let path = &files.arena;
    let (geometry, spill_path) = spill::wanted(files, options)?;
    let topology = options
        .numa_topology
        .as_deref()
        .map_or_else(Topology::one, Topology::read);
    let create = || Arena::create_on(path, geometry, identity, &spill_path, &topology);
    if !exists(path) {
        return Ok(Found::Fresh(Box::new(create()?)));
    }
    let (arena, stored, damage) = Arena::attach_on(path, &topology)?;
    let made_for = PathBuf::from(text(&arena.superblock().backing_path));
    if made_for != identity.backing {
        return Err(AttachError::ArenaForeign {
            path: path.clone(),
            found: quoted_path(&made_for),
        });
    }
    if let Some(fault @ SpillFault::Distrusted { .. }) = arena.spill_fault() {
        return Err(ArenaError::Spill(fault.clone()).into());
    }
    for damage in &damage {
        notice(format!("arena {}: {damage}", quoted_path(path)));
    }
    let damaged = !damage.is_empty();
    let fault = arena.spill_fault().map(ToString::to_string);
    if let Some(fault) = &fault {
        let lost = damage
            .iter()
            .any(|damage| matches!(damage, Damage::Spill { .. }));
        if lost && purpose == Purpose::Mount {
            let arena = path.clone();
            let backing = identity.backing.clone();
            return Err(AttachError::SpillGone {
                arena,
                fault: fault.clone(),
                backing,
            });
        }
        notice(format!("{fault}: nothing moves to it"));
    }
    if *arena.geometry() == geometry && spill::is_at(&arena, &spill_path) && fault.is_none() {
        return Ok(Found::used(arena, stored, damaged));
    }
    if stored.is_empty() && !damaged && !journal_has_work(&arena) {
        let old_spill = arena.spill_file().map(|file| file.path().to_owned());
        drop(arena);
        std::fs::remove_file(path)
            .map_err(AttachError::io("remove the empty arena of another size"))?;
        if let Some(old) = old_spill {
            std::fs::remove_file(old).map_err(AttachError::io("remove the empty spill file"))?;
        }
        return Ok(Found::Fresh(Box::new(create()?)));
    }
    let has = arena.geometry();
    notice(format!(
        "the arena holds data and keeps its arena-size={}, chunk-size={} and spill-size={} until it was empty once",
        has.data_bytes(),
        has.chunk_bytes,
        has.spill_bytes()
    ));
    Ok(Found::used(arena, stored, damaged))
}

fn text(path: &[u8]) -> std::ffi::OsString {
    std::os::unix::ffi::OsStringExt::from_vec(path.to_vec())
}

/// A truncation that was journaled and perhaps not done, with no piece left that tells of it.
fn journal_has_work(arena: &Arena) -> bool {
    let replay = firn_arena::journal::replay(&arena.journal_region());
    !replay.damage.is_empty()
        || replay
            .ledger
            .files()
            .any(|(_, bound)| !bound.truncating.is_empty())
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
            lost.known_path(),
            lost.bytes,
            lost.reason
        ));
    }
}
