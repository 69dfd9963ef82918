//! Takes over a mount: the next firnd continues to serve the programs of one that died. Also prepares each mount for
//! that.
//!
//! Terms
//! * *firnd* is the process that serves a mount. The *keeper* is the process that starts the next firnd when one dies.
//! * The *live table* is a mapped file that tells the next firnd what the kernel knows: files, handles and locks.
//! * The *arena* is shared memory with the bytes that are not in the backing yet.
//!
//! Parts
//! * [`Takeover`] passes the FUSE connection to the keeper, and writes the live table while this firnd serves.
//! * [`TakenOverMount`] is what the next firnd opens: the connection, the live table, files without a name, and lock
//!   files.
//!
//! Promises
//! * All that another firnd needs is stored before the first request of the kernel is answered.
//! * A live table is used only if it belongs to this user, this version and this arena, and its header is undamaged.
//! * If a firnd cannot take the mount over, it informs the keeper. The keeper aborts the connection, so that no program
//!   waits for ever.

use std::collections::{BTreeSet, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_arena::ArenaError;
use firn_arena::live::{EarlierTable, LiveTable, LiveTableError};
use firn_backing::Volume as _;
use firn_client::paths::RuntimeFiles;
use firn_engine::{Engine, FileKeeper, HiddenFile, Resumed, ResumedRequests};
use firn_format::live::{Device, FileLock, Header, InitExchange};
use firn_format::mountinfo;
use firn_fuse::KeepConnection;
use firn_hosts::KeptLockFile;
use firn_protocol::{Reply, Request, Status};
use firn_transact::parent_of;
use firn_workers::Class;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, Mode as FileMode, OFlags, fstat, memfd_create, open};
use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, geteuid, getpid, kill_process};

use crate::attach::AttachedArena;
use crate::error::MountError;
use crate::gate::NAMES_AWAITED_MAX;
use crate::keeper::{KeeperLink, NextFirnd, ResumedMount, uptime};
use crate::mount_request::MountRequest;
use crate::part::{ClientRequest, Part, StopContext};
use crate::parts::InvalidateCache;
use crate::spawn::write_request;
use crate::store::{Layers as _, Store};

/// A mount of a firnd that died, which this firnd serves from now on.
pub(crate) struct TakenOverMount {
    /// The connection to the kernel.
    pub(crate) device: OwnedFd,
    pub(crate) header: Header,
    /// Time of the death of the earlier firnd, since the host started.
    death_time: Duration,
    pub(crate) resumed: Resumed,
    /// Lock files of the earlier firnd, until the lock thread takes them.
    pub(crate) lock_files: Mutex<Vec<KeptLockFile>>,
    /// The resumed requests, once recovery has found them.
    pub(crate) resumed_requests: Mutex<Option<ResumedRequests>>,
}

impl TakenOverMount {
    /// Opens what a dead serving process has left for this one, which continues its mount: the live table, a mapped
    /// file that lists what the kernel knows. Fails if the table cannot be used.
    ///
    /// `connection` has the descriptors of the mount, which the keeper (the process that started this one) has kept
    /// open.
    pub(crate) fn open(
        files: &RuntimeFiles,
        connection: ResumedConnection,
        link: Option<&Arc<KeeperLink>>,
    ) -> Result<Self, MountError> {
        let ResumedConnection {
            device,
            death_time,
            nameless_files,
            lock_files,
        } = connection;
        let (table, EarlierTable { header, contents }) =
            LiveTable::open(&files.live).map_err(refuse_table)?;
        if contents.damaged > 0 {
            tracing::warn!(
                entries = contents.damaged,
                "parts of the table of open files are damaged: programs lose the open files in these parts"
            );
        }
        let takeovers = table.count_takeover();
        let resumed = Resumed {
            table: Arc::new(table),
            contents,
            takeovers,
            files: nameless_files,
            keeper: link.map(|link| Arc::clone(link) as Arc<dyn FileKeeper>),
            died_ticks: clock_ticks_from_time(death_time),
            // The recovery records here what programs lose.
            losses: Default::default(),
        };
        abandon_handles_without_locks(&resumed, &lock_files);
        Ok(Self {
            device,
            header,
            death_time,
            resumed,
            lock_files: Mutex::new(lock_files),
            resumed_requests: Mutex::new(None),
        })
    }

    /// Takes the resumed requests from the result of the recovery. Fails if the live table belongs to another arena.
    pub(crate) fn take_resumed_requests(
        &self,
        attached: &mut AttachedArena,
    ) -> Result<(), MountError> {
        if attached.engine.arena().superblock().uuid != self.header.arena {
            return Err(MountError::NotTakenOver {
                why: "the table of open files belongs to another arena".into(),
            });
        }
        *self.resumed_requests.lock() = attached.recovered.requests.take();
        Ok(())
    }

    /// Waits until names from aborted transactions have expired in the kernel. This firnd does not know all of these
    /// names, so it cannot invalidate each.
    pub(crate) fn await_expiry_of_lost_names(&self, name_cache_timeout: Duration) {
        if let Some(loss) = self.last_loss() {
            let until = loss + name_cache_timeout.min(NAMES_AWAITED_MAX);
            std::thread::sleep(until.saturating_sub(uptime()));
        }
    }

    /// Returns the time of the last death of a firnd by which transactions were aborted, since the host started.
    fn last_loss(&self) -> Option<Duration> {
        if self.died_during_abort() {
            return Some(self.death_time);
        }
        let scopes = self.resumed.table.undone_scopes();
        let last_death = scopes.iter().map(|scope| scope.died_ticks).max()?;
        Some(time_from_clock_ticks(last_death))
    }

    /// Returns whether the earlier firnd died during an abort. The transaction may have ended before the kernel was
    /// informed. Then nothing else shows that the kernel still has names and bytes of it.
    fn died_during_abort(&self) -> bool {
        let transactions = &self.resumed.contents.transactions;
        transactions.iter().any(|stored| stored.entry.is_ending)
    }

    /// Returns the paths of aborted transactions of which the kernel may still cache names and bytes. The empty path
    /// stands for the whole mount.
    fn scopes_to_invalidate(&self) -> BTreeSet<Vec<u8>> {
        const WHOLE_MOUNT: Vec<u8> = Vec::new();
        let scopes = self.resumed.losses.lock().scopes.clone();
        if !scopes.is_empty() && !self.died_during_abort() {
            return scopes;
        }
        match self.last_loss() {
            // The firnd that aborted the transactions has died, and the live table has no full paths. So the whole mount
            // counts.
            Some(loss) if uptime().saturating_sub(loss) < RECENT_LOSS => {
                BTreeSet::from([WHOLE_MOUNT])
            }
            _ => BTreeSet::new(),
        }
    }

    /// Makes the kernel drop names and bytes that it has cached of transactions which were aborted because firnd died.
    /// Runs on a worker while requests are answered, because the kernel waits for requests of the same files.
    pub(crate) fn invalidate_lost_names(
        &self,
        attached: &AttachedArena,
        invalidate_cache: &InvalidateCache,
    ) {
        let scopes = self.scopes_to_invalidate();
        if scopes.is_empty() {
            return;
        }
        let engine = Arc::clone(&attached.engine);
        let invalidate_cache = Arc::clone(invalidate_cache);
        attached.workers.run(Class::Job, move || {
            for scope in scopes {
                let cached = engine.namespace.revalidate_names(&scope);
                let parent = engine.tree.cached_at(parent_of(&scope));
                cached
                    .into_iter()
                    .chain(parent)
                    .for_each(&*invalidate_cache);
            }
        });
    }

    /// Returns the mount point.
    pub(crate) fn mount_point(&self) -> PathBuf {
        std::ffi::OsString::from_vec(self.header.mount_point.clone()).into()
    }

    /// Records in the live table that requests are answered again, and logs the length of the pause.
    pub(crate) fn record_end_of_pause(&self) {
        let pause = uptime().saturating_sub(self.death_time);
        let table = &self.resumed.table;
        table.record_pause(u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX));
        tracing::warn!(
            pause_ms = pause.as_millis() as u64,
            takeovers = self.resumed.takeovers,
            handles = self.resumed.contents.handles.len(),
            requests = self.resumed.contents.requests.len(),
            "firnd died, and this firnd has taken over the mount: programs waited meanwhile"
        );
    }
}

/// Gives up the open files of programs that have lost file locks; these programs get EIO. All hosts see a lock as a
/// lock of a second file, its *lock file*.
///
/// A lock is lost if its lock file is not in `kept`: no process had that file open after the earlier serving process
/// died, so another host may have taken the lock.
fn abandon_handles_without_locks(resumed: &Resumed, kept: &[KeptLockFile]) {
    let is_kept = |lock: &FileLock| kept.iter().any(|file| file.ino == lock.lock_file);
    let mut handles_without_locks = HashSet::new();
    for stored in &resumed.contents.file_locks {
        if !is_kept(&stored.entry) {
            handles_without_locks.insert(stored.entry.handle);
        }
    }
    if !handles_without_locks.is_empty() {
        tracing::error!(
            handles = handles_without_locks.len(),
            "locks of files are lost, because the keeper (which restarts firnd) did not have them: their programs get \
             EIO"
        );
        resumed.abandon_handles(|handle| handles_without_locks.contains(&handle.id));
    }
}

/// Converts a time since the host started to clock ticks, the unit of process start times in /proc.
fn clock_ticks_from_time(time: Duration) -> u64 {
    time.as_millis() as u64 * clock_ticks_per_second() / 1000
}

/// Returns the end of a clock tick, as time since the host started.
fn time_from_clock_ticks(ticks: u64) -> Duration {
    Duration::from_millis((ticks + 1).saturating_mul(1000) / clock_ticks_per_second())
}

/// After this time an abort no longer affects the kernel's cache: the keeper gives up starting a firnd within a minute.
const RECENT_LOSS: Duration = Duration::from_secs(60);

/// Translates an error of the live table. An invalid table ends the takeover; other errors make the keeper try again.
fn refuse_table(error: LiveTableError) -> MountError {
    match error {
        LiveTableError::Io(errno) if errno != Errno::NOENT => {
            MountError::io("open the table of open files")(errno.into())
        }
        LiveTableError::Map(ArenaError::Io { source, .. }) => {
            MountError::io("map the table of open files")(source.into())
        }
        error => MountError::NotTakenOver {
            why: error.to_string(),
        },
    }
}

/// Returns why a mount cannot be taken over if its firnd dies; `None` if it can.
fn find_takeover_obstacle(engine: &Engine<Store>) -> Option<&'static str> {
    let features = engine.backing().features();
    if engine.backing().log_layer().is_some() && !features.shares_range_locks {
        return Some("layout=log in a FUSE file system: locks of files end with firnd");
    }
    None
}

/// Creates the live table of a new mount. From now on the engine stores in it what the next firnd needs, and gives open
/// files without a name to the keeper.
fn create_live_table(
    engine: &Arc<Engine<Store>>,
    files: &RuntimeFiles,
    link: Option<&Arc<KeeperLink>>,
) -> Result<Arc<LiveTable>, LiveTableError> {
    let table = Arc::new(LiveTable::create(&files.live)?);
    engine.note_live(Arc::clone(&table));
    if let Some(link) = link {
        engine.set_file_keeper(Arc::clone(link) as Arc<dyn FileKeeper>);
    }
    Ok(table)
}

/// Keeps a mount ready for a takeover by another firnd.
pub(crate) struct Takeover {
    link: Option<Arc<KeeperLink>>,
    table: Option<Arc<LiveTable>>,
    obstacle: Mutex<Option<&'static str>>,
    /// Whether the kernel sends unanswered requests again to the next firnd (Linux 6.9).
    kernel_resends: AtomicBool,
    /// Open files that were lost at the last takeover.
    lost_open_files: u64,
    arena: [u8; 16],
    mount_point: PathBuf,
    /// The request that made the mount, with the changes of later upgrades.
    request: MountRequest,
}

impl Takeover {
    /// Prepares a new mount so that another process can continue to serve it if this one dies. If that is impossible,
    /// `obstacle` says why, and the mount works without it.
    ///
    /// It needs a keeper (`link`), which starts the next process, and for FUSE a live table, a mapped file with what
    /// the kernel knows.
    pub(crate) fn for_new_mount(
        request: &MountRequest,
        engine: &Arc<Engine<Store>>,
        files: &RuntimeFiles,
        mount_point: &Path,
        link: Option<&Arc<KeeperLink>>,
    ) -> Arc<Self> {
        let mut obstacle = match link {
            None => {
                Some("takeover=no, or the mount is in the foreground without a service manager")
            }
            Some(_) => find_takeover_obstacle(engine),
        };
        // A stub tree has no kernel's state that a live table would describe.
        let is_fuse = request.options.frontend == firn_config::Frontend::Fuse;
        let mut table = None;
        if obstacle.is_none() && is_fuse {
            match create_live_table(engine, files, link) {
                Ok(created) => table = Some(created),
                Err(error) => {
                    tracing::warn!(%error, "the mount cannot be taken over if firnd dies");
                    obstacle = Some("the table of open files could not be made");
                }
            }
        } else {
            // A live table of an earlier mount does not describe this one.
            let _ = std::fs::remove_file(&files.live);
        }
        Arc::new(Self {
            link: link.cloned(),
            table,
            obstacle: Mutex::new(obstacle),
            kernel_resends: AtomicBool::new(true),
            lost_open_files: 0,
            arena: engine.arena().superblock().uuid,
            mount_point: mount_point.to_owned(),
            request: request.clone(),
        })
    }

    /// Prepares a mount that this firnd continues after the death of another one, so that the next firnd can continue
    /// it too. The live table (a mapped file with what the kernel knows) is used further.
    pub(crate) fn for_taken_over_mount(
        request: &MountRequest,
        taken_over: &TakenOverMount,
        link: Option<&Arc<KeeperLink>>,
    ) -> Arc<Self> {
        let requests = taken_over.resumed_requests.lock();
        Arc::new(Self {
            link: link.cloned(),
            table: Some(Arc::clone(&taken_over.resumed.table)),
            obstacle: Mutex::new(None),
            kernel_resends: AtomicBool::new(firn_fuse::sends_again(&taken_over.header.exchange)),
            lost_open_files: requests.as_ref().map_or(0, |requests| requests.bad_handles),
            arena: taken_over.header.arena,
            mount_point: taken_over.mount_point(),
            request: request.clone(),
        })
    }

    /// Registers a stub tree with the keeper. It has no FUSE connection, so the keeper only has to start another firnd.
    pub(crate) fn register_stub_tree(&self) {
        if self.obstacle.lock().is_none()
            && let Some(link) = &self.link
            && let Err(error) = link.keep_connection(None, None)
        {
            tracing::warn!(%error, "the keeper, which restarts firnd, does not answer: if firnd dies, it is not \
                started again");
        }
    }

    /// Stores what another process needs to continue this mount if this one dies. The keeper, a process beside this
    /// one, gets the FUSE connection. The live table, a mapped file that says what the kernel knows, gets its header.
    ///
    /// `exchange` is the first exchange with the kernel. The error is the reason why no other process can continue the
    /// mount.
    fn store_connection(
        &self,
        device: BorrowedFd<'_>,
        exchange: &InitExchange,
    ) -> Result<(), &'static str> {
        // Without a keeper or a live table, no other firnd continues the mount; `obstacle` says that already.
        let (Some(link), Some(table)) = (&self.link, &self.table) else {
            return Ok(());
        };
        let mounts = crate::mountinfo::all_mounts();
        let Some(own_mount) = mountinfo::on_top(&mounts, &self.mount_point) else {
            return Err("the mount is not in the table of mounts");
        };
        let (major, minor) = own_mount.device;
        let header = Header {
            arena: self.arena,
            device: Device { major, minor },
            mount_point: self.mount_point.as_os_str().as_bytes().to_vec(),
            exchange: exchange.clone(),
        };
        // By its control file the keeper can abort the connection. A takeover works without that file.
        let control = firn_fuse::open_control(minor).ok();
        table
            .seal(&header)
            .map_err(|_| "the table of open files could not be written")?;
        let control = control.as_ref().map(AsFd::as_fd);
        link.keep_connection(Some(device), control)
            .map_err(|_| "the keeper does not answer")
    }
}

/// Why a mount is not upgraded. Its firnd continues to serve.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("the mount cannot be taken over, so no other firnd can serve it: {0}")]
    NotReady(&'static str),
    #[error(
        "a service manager starts the firnd of this mount: install the new program, and kill firnd"
    )]
    StartedByServiceManager,
    #[error(
        "`firn upgrade` runs in another PID namespace, where firnd does not see its program: run it where firnd runs"
    )]
    Unseen,
    #[error("the program of `firn upgrade` cannot be opened: {0}")]
    Program(rustix::io::Errno),
    #[error(
        "the program of `firn upgrade` {0}: install it so that only root, or the user of the mount, can change it"
    )]
    Distrusted(firn_trust::Distrust),
    #[error("the request of the next firnd cannot be written: {0}")]
    Request(Box<MountError>),
    #[error(
        "the keeper of the mount, which starts the next firnd, does not answer: {0}; try again"
    )]
    Keeper(std::io::Error),
}

impl Takeover {
    /// Prepares an upgrade of the serving process to the program of the process `client`, with `changes` of the mount's
    /// options. The keeper, a process beside this one, gets that program and the changed request. When this process
    /// ends, the keeper starts the program in its place.
    ///
    /// Returns the process of the keeper.
    fn prepare_upgrade(&self, client: u32, changes: &str) -> Result<Pid, UpgradeError> {
        let Some(link) = &self.link else {
            return Err(UpgradeError::NotReady(
                "it has no process that would start the next firnd",
            ));
        };
        if link.is_to_service_manager() {
            return Err(UpgradeError::StartedByServiceManager);
        }
        let program = open_program(client)?;
        let mut request = self.request.clone();
        if !changes.is_empty() {
            request.changes.push(changes.to_owned());
        }
        let request_file =
            write_request(&request).map_err(|error| UpgradeError::Request(Box::new(error)))?;
        let report = memfd_create(c"firn-upgrade", MemfdFlags::CLOEXEC)
            .map_err(|errno| UpgradeError::Keeper(errno.into()))?;
        let next = NextFirnd {
            program,
            request: request_file.into(),
            report,
        };
        match link
            .keep_next_program(&next)
            .map_err(UpgradeError::Keeper)?
        {
            Some(keeper) => Ok(keeper),
            None => Err(UpgradeError::Keeper(std::io::ErrorKind::NotFound.into())),
        }
    }
}

/// Opens the program that a process runs. The name of the program may belong to another file by now, or to none.
fn open_program(process: u32) -> Result<OwnedFd, UpgradeError> {
    if process == 0 {
        return Err(UpgradeError::Unseen);
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let path = format!("/proc/{process}/exe");
    let program = open(path, flags, FileMode::empty()).map_err(UpgradeError::Program)?;
    let stat = fstat(&program).map_err(UpgradeError::Program)?;
    firn_trust::FileMetadata::from_stat(&stat)
        .check_program(geteuid().as_raw())
        .map_err(UpgradeError::Distrusted)?;
    Ok(program)
}

/// Ends this process as kill -9 does: nothing is cleaned up, and the next firnd resumes the mount.
fn kill_this_process() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    // The signal arrives before the call returns, unless a debugger delays it.
    std::process::abort()
}

impl KeepConnection for Takeover {
    fn keep(&self, device: BorrowedFd<'_>, exchange: &InitExchange, kernel_resends: bool) {
        if self.obstacle.lock().is_some() {
            return;
        }
        self.kernel_resends.store(kernel_resends, Ordering::Relaxed);
        if let Err(why) = self.store_connection(device, exchange) {
            tracing::info!(why, "the mount cannot be taken over if firnd dies");
            *self.obstacle.lock() = Some(why);
            if let Some(table) = &self.table {
                table.remove();
            }
        }
    }
}

impl Takeover {
    /// Describes for the status whether another firnd can continue the mount; `obstacle` is the reason if none can.
    fn describe_readiness(&self, obstacle: Option<&'static str>) -> &'static str {
        match obstacle {
            None if !self.kernel_resends.load(Ordering::Relaxed) => {
                "ready, but requests in progress then end with EIO (before Linux 6.9)"
            }
            None => "ready",
            Some(why) => why,
        }
    }
}

impl Part for Takeover {
    /// Adds to the status whether another firnd can continue the mount if this one dies, and why not; how the last
    /// upgrade ended; and the takeovers so far.
    fn fill_status(&self, status: &mut Status) {
        let obstacle = *self.obstacle.lock();
        status.takeover = self.describe_readiness(obstacle).into();
        // Open files that could not be continued after the last death of a firnd.
        status.lost_open_files = self.lost_open_files;
        if let Some(link) = &self.link {
            status.upgrade.clone_from(&link.last_upgrade);
        }
        if let Some(table) = &self.table
            && obstacle.is_none()
        {
            status.takeovers = table.takeovers();
            status.takeover_last_seconds = table.last_pause_ns() as f64 / 1e9;
            status.takeover_seconds = table.pauses_ns() as f64 / 1e9;
            status.live_table_bytes = table.bytes();
            status.live_table_lost = table.lost();
        }
    }

    /// Answers `firn upgrade`: prepares the upgrade, replies with the keeper's process, and then kills this process, so
    /// that the keeper starts the new program. It returns only if that is impossible, with the reason. `None` for all
    /// other requests.
    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        let Request::Upgrade { options } = client_request.request else {
            return None;
        };
        let prepared = match *self.obstacle.lock() {
            Some(why) => Err(UpgradeError::NotReady(why)),
            None => self.prepare_upgrade(client_request.client.peer.pid, options),
        };
        Some(match prepared {
            Ok(keeper) => {
                let keeper = keeper.as_raw_pid() as u32;
                tracing::info!("firnd ends: the program of `firn upgrade` takes over the mount");
                // This is the last reply of this process; it names the keeper, which starts the new program.
                (client_request.send_progress)(Reply::Upgrading { keeper });
                // The keeper sees the death and starts the new program, as after a crash.
                kill_this_process()
            }
            Err(error) => Reply::Error {
                errno: libc::EINVAL,
                message: error.to_string(),
            },
        })
    }

    fn stop(&self, context: &mut StopContext) {
        if context.was_never_visible {
            // Another firnd may still take over the mount.
            return;
        }
        if let Some(table) = &self.table {
            table.remove();
        }
    }
}

/// Returns the FUSE connection of a mount after the death of the process that served it, with the open files without a
/// name and the lock files of that process. The keeper, the process that started this one, has kept all of them open.
///
/// `None` for a new mount, or for a stub tree (empty files on tmpfs), which has no connection.
pub(crate) fn connection_of_resumed_mount(
    resumed: Option<ResumedMount>,
) -> Option<ResumedConnection> {
    let ResumedMount {
        device,
        death_time,
        nameless_files,
        lock_files,
    } = resumed?;
    Some(ResumedConnection {
        device: device?,
        death_time,
        nameless_files,
        lock_files,
    })
}

/// A connection to the kernel that outlived its firnd.
pub(crate) struct ResumedConnection {
    pub(crate) device: OwnedFd,
    /// Time of the death, since the host started.
    pub(crate) death_time: Duration,
    pub(crate) nameless_files: Vec<HiddenFile>,
    pub(crate) lock_files: Vec<KeptLockFile>,
}
