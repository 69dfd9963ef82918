//! A mount that another firnd can go on with: what is kept for it, and how it is found again.
//!
//! Promises
//! * What another firnd needs is kept before the kernel hears that the mount works.
//! * A table is believed only if it is this user's, of this version, of this arena, and whole in its header.
//! * Where the mount cannot be gone on with, the keeper is told: it aborts the connection, and no program waits for ever.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use firn_arena::ArenaError;
use firn_arena::live::{Left, LiveTable, LiveTableError};
use firn_backing::Volume as _;
use firn_client::paths::RuntimeFiles;
use firn_engine::{Engine, KeptFile, Resumed, ResumedRequests};
use firn_format::live::{Device, Exchange, Header};
use firn_format::mountinfo;
use firn_fuse::KeepConnection;
use firn_protocol::{Reply, Request, Status};
use firn_transact::parent_of;
use firn_workers::Class;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, Mode as FileMode, OFlags, fstat, memfd_create, open};
use rustix::io::Errno;
use rustix::param::clock_ticks_per_second;
use rustix::process::{Pid, Signal, geteuid, getpid, kill_process};

use crate::attach::Attached;
use crate::error::MountError;
use crate::gate::NAMES_AWAITED_MAX;
use crate::keeper::{KeeperLink, NextFirnd, ResumedMount, uptime};
use crate::mount_request::MountRequest;
use crate::part::{Part, Question, Stop};
use crate::parts::Forget;
use crate::spawn::write_request;
use crate::store::{Layers as _, Store};

/// A mount of the kernel whose firnd died, and that this one goes on with.
pub(crate) struct TakenOver {
    /// The connection to the kernel.
    pub(crate) device: OwnedFd,
    pub(crate) header: Header,
    /// When the death of the other was seen, since the host started.
    died: Duration,
    pub(crate) resumed: Resumed,
    /// What concerns the kernel's requests, once the engine has gone on.
    pub(crate) left: Mutex<Option<ResumedRequests>>,
}

impl TakenOver {
    /// Opens what the firnd that died has left.
    pub(crate) fn open(
        files: &RuntimeFiles,
        connection: Connection,
        link: Option<&Arc<KeeperLink>>,
    ) -> Result<Self, MountError> {
        let Connection {
            device,
            died,
            files: kept,
        } = connection;
        let (table, Left { header, contents }) =
            LiveTable::open(&files.live).map_err(refuse_table)?;
        if contents.damaged > 0 {
            tracing::warn!(
                entries = contents.damaged,
                "parts of the live table are damaged: open files that were in them are lost to their programs"
            );
        }
        let takeovers = table.count_takeover();
        Ok(Self {
            device,
            header,
            died,
            resumed: Resumed {
                table: Arc::new(table),
                contents,
                takeovers,
                files: kept,
                keeper: link.map(|link| Arc::clone(link) as _),
                died_ticks: ticks_of_time(died),
                losses: Default::default(),
            },
            left: Mutex::new(None),
        })
    }

    /// Takes what recovery found of the kernel's requests. Refuses an arena that the table is not of.
    pub(crate) fn go_on_with(&self, attached: &mut Attached) -> Result<(), MountError> {
        let refuse = |why: &str| Err(MountError::NotTakenOver { why: why.into() });
        if attached.engine.arena().superblock().uuid != self.header.arena {
            return refuse("the live table belongs to another arena");
        }
        *self.left.lock() = attached.recovered.requests.take();
        Ok(())
    }

    /// Waits until the kernel has no name from a transaction that was undone: this firnd does not know all of them.
    pub(crate) fn await_lost_names(&self, names_cached: Duration) {
        if let Some(loss) = self.last_loss() {
            let until = loss + names_cached.min(NAMES_AWAITED_MAX);
            std::thread::sleep(until.saturating_sub(uptime()));
        }
    }

    /// When the last firnd died whose transactions were undone, since the host started.
    fn last_loss(&self) -> Option<Duration> {
        let scopes = self.resumed.table.undone_scopes().into_iter();
        scopes
            .map(|scope| scope.died_ticks)
            .max()
            .map(time_of_ticks)
    }

    /// Scopes of which the kernel may have what was undone.
    fn lost_scopes(&self) -> BTreeSet<Vec<u8>> {
        let scopes = self.resumed.losses.lock().scopes.clone();
        let is_recent = |loss| uptime().saturating_sub(loss) < RECENT_LOSS;
        if scopes.is_empty() && self.last_loss().is_some_and(is_recent) {
            // A firnd that undid them has died since, and no path is known.
            return BTreeSet::from([Vec::new()]);
        }
        scopes
    }

    /// Has the kernel drop what it has of files in transactions that were undone. Programs must be served meanwhile: the
    /// kernel waits for requests that it has under way.
    pub(crate) fn forget_lost(&self, attached: &Attached, forget: &Forget) {
        let scopes = self.lost_scopes();
        if scopes.is_empty() {
            return;
        }
        let (engine, forget) = (Arc::clone(&attached.engine), Arc::clone(forget));
        attached.workers.run(Class::Job, move || {
            for scope in scopes {
                let cached = engine.namespace.revalidate_names(&scope);
                let parent = engine.tree.cached_at(parent_of(&scope));
                cached.into_iter().chain(parent).for_each(&*forget);
            }
        });
    }

    /// Where the mount is.
    pub(crate) fn mount_point(&self) -> PathBuf {
        std::ffi::OsString::from_vec(self.header.mount_point.clone()).into()
    }

    /// Programs are answered again.
    pub(crate) fn note_end_of_pause(&self) {
        let pause = uptime().saturating_sub(self.died);
        let table = &self.resumed.table;
        table.note_pause(u64::try_from(pause.as_nanos()).unwrap_or(u64::MAX));
        tracing::warn!(
            pause_ms = pause.as_millis() as u64,
            takeovers = self.resumed.takeovers,
            handles = self.resumed.contents.handles.len(),
            requests = self.resumed.contents.requests.len(),
            "firnd died, and this one goes on with the mount: programs waited"
        );
    }
}

/// A time since the host started, as the starts of processes are told.
fn ticks_of_time(time: Duration) -> u64 {
    time.as_millis() as u64 * clock_ticks_per_second() / 1000
}

/// The end of the tick.
fn time_of_ticks(ticks: u64) -> Duration {
    Duration::from_millis((ticks + 1).saturating_mul(1000) / clock_ticks_per_second())
}

/// For so long the keeper tries to start a firnd.
const RECENT_LOSS: Duration = Duration::from_secs(60);

/// A table that is none is refused for good; what cannot be opened or mapped now is tried again.
fn refuse_table(error: LiveTableError) -> MountError {
    match error {
        LiveTableError::Io(errno) if errno != Errno::NOENT => {
            MountError::io("open the live table")(errno.into())
        }
        LiveTableError::Map(ArenaError::Io { source, .. }) => {
            MountError::io("map the live table")(source.into())
        }
        error => MountError::NotTakenOver {
            why: error.to_string(),
        },
    }
}

/// Why a mount is not taken over if its firnd dies; none: it is.
fn name_obstacle(engine: &Engine<Store>) -> Option<&'static str> {
    if engine.backing().features().finishes_files || engine.backing().logged().is_some() {
        return Some("layout=log: firnd keeps the locks of files");
    }
    None
}

/// What keeps a mount for another firnd.
pub(crate) struct Takeover {
    link: Option<Arc<KeeperLink>>,
    table: Option<Arc<LiveTable>>,
    obstacle: Mutex<Option<&'static str>>,
    /// Whether the kernel sends requests again.
    resends: AtomicBool,
    /// Open files that were lost at the last takeover.
    bad_handles: u64,
    arena: [u8; 16],
    mount_point: PathBuf,
    /// What the mount was made with, and what upgrades changed.
    request: MountRequest,
}

impl Takeover {
    /// For a mount that is made now.
    pub(crate) fn begin(
        request: &MountRequest,
        engine: &Arc<Engine<Store>>,
        files: &RuntimeFiles,
        mount_point: &Path,
        link: Option<&Arc<KeeperLink>>,
    ) -> Arc<Self> {
        let options = &request.options;
        let mut obstacle = match link {
            None => Some("takeover=no, or the mount is in the foreground"),
            Some(_) => name_obstacle(engine),
        };
        let is_mount = options.frontend == firn_config::Frontend::Fuse;
        let mut table = None;
        if obstacle.is_none() && is_mount {
            match LiveTable::create(&files.live) {
                Ok(made) => {
                    let made = Arc::new(made);
                    engine.note_live(Arc::clone(&made));
                    if let Some(link) = link {
                        engine.keep_files_by(Arc::clone(link) as _);
                    }
                    table = Some(made);
                }
                Err(error) => {
                    tracing::warn!(%error, "the mount cannot be taken over if firnd dies");
                    obstacle = Some("the live table could not be made");
                }
            }
        } else {
            // One of an earlier mount tells nothing of this one.
            let _ = std::fs::remove_file(&files.live);
        }
        Arc::new(Self {
            link: link.cloned(),
            table,
            obstacle: Mutex::new(obstacle),
            resends: AtomicBool::new(true),
            bad_handles: 0,
            arena: engine.arena().superblock().uuid,
            mount_point: mount_point.to_owned(),
            request: request.clone(),
        })
    }

    /// For a mount that is gone on with.
    pub(crate) fn go_on(
        request: &MountRequest,
        taken: &TakenOver,
        link: Option<&Arc<KeeperLink>>,
    ) -> Arc<Self> {
        let left = taken.left.lock();
        Arc::new(Self {
            link: link.cloned(),
            table: Some(Arc::clone(&taken.resumed.table)),
            obstacle: Mutex::new(None),
            resends: AtomicBool::new(firn_fuse::sends_again(&taken.header.exchange)),
            bad_handles: left.as_ref().map_or(0, |left| left.bad_handles),
            arena: taken.header.arena,
            mount_point: taken.mount_point(),
            request: request.clone(),
        })
    }

    /// A stub tree needs nothing but another firnd.
    pub(crate) fn keep_tree(&self) {
        if self.obstacle.lock().is_none()
            && let Some(link) = &self.link
            && let Err(error) = link.keep_mount(None, None)
        {
            tracing::warn!(%error, "the keeper does not answer: firnd is not started again if it dies");
        }
    }

    /// Gives the FUSE connection to the keeper, and writes the head of the live table: the next firnd finds both. An error is the
    /// reason why the mount is not taken over.
    fn keep_connection(
        &self,
        device: BorrowedFd<'_>,
        exchange: &Exchange,
    ) -> Result<(), &'static str> {
        let (Some(link), Some(table)) = (&self.link, &self.table) else {
            return Ok(());
        };
        let entries = crate::mountinfo::all();
        let entry = mountinfo::on_top(&entries, &self.mount_point)
            .ok_or("the mount is not in the table of mounts")?;
        let (major, minor) = entry.device;
        let header = Header {
            arena: self.arena,
            device: Device { major, minor },
            mount_point: self.mount_point.as_os_str().as_bytes().to_vec(),
            exchange: exchange.clone(),
        };
        let control = firn_fuse::open_control(minor).ok();
        table
            .seal(&header)
            .map_err(|_| "the live table could not be written")?;
        let control = control.as_ref().map(AsFd::as_fd);
        link.keep_mount(Some(device), control)
            .map_err(|_| "the keeper does not answer")
    }
}

/// Why a mount is not upgraded. The firnd that serves it goes on.
#[derive(Debug, thiserror::Error)]
enum UpgradeError {
    #[error("the mount cannot be taken over, so no other firnd can go on with it: {0}")]
    NotReady(&'static str),
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
    #[error("the keeper of the mount does not answer: {0}; try again")]
    Keeper(std::io::Error),
}

impl Takeover {
    /// Gives the keeper the program of a client, and the request with `changes`. Gives the process of the keeper.
    fn prepare_upgrade(&self, client: u32, changes: &str) -> Result<Pid, UpgradeError> {
        let Some(link) = &self.link else {
            return Err(UpgradeError::NotReady("it has no keeper"));
        };
        let program = open_program(client)?;
        let mut request = self.request.clone();
        if !changes.is_empty() {
            request.changes.push(changes.to_owned());
        }
        let request = write_request(&request);
        let report = memfd_create(c"firn-upgrade", MemfdFlags::CLOEXEC);
        let next = NextFirnd {
            program,
            request: request
                .map_err(|error| UpgradeError::Request(Box::new(error)))?
                .into(),
            report: report.map_err(|errno| UpgradeError::Keeper(errno.into()))?,
        };
        let keeper = link.keep_next(&next).map_err(UpgradeError::Keeper)?;
        keeper.ok_or_else(|| UpgradeError::Keeper(std::io::ErrorKind::NotFound.into()))
    }
}

/// The program that a process runs. Its name may lead to another one by now, or to none.
fn open_program(process: u32) -> Result<OwnedFd, UpgradeError> {
    if process == 0 {
        return Err(UpgradeError::Unseen);
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let path = format!("/proc/{process}/exe");
    let program = open(path, flags, FileMode::empty()).map_err(UpgradeError::Program)?;
    let stat = fstat(&program).map_err(UpgradeError::Program)?;
    firn_trust::Facts::of(&stat)
        .check_program(geteuid().as_raw())
        .map_err(UpgradeError::Distrusted)?;
    Ok(program)
}

/// Dies as by kill -9: nothing is ended, and the next firnd goes on.
fn die() -> ! {
    let _ = kill_process(getpid(), Signal::KILL);
    // The signal comes before the call returns, unless a debugger holds it back.
    std::process::abort()
}

impl KeepConnection for Takeover {
    fn keep(&self, device: BorrowedFd<'_>, exchange: &Exchange, resends: bool) {
        if self.obstacle.lock().is_some() {
            return;
        }
        self.resends.store(resends, Ordering::Relaxed);
        if let Err(why) = self.keep_connection(device, exchange) {
            tracing::info!(why, "the mount cannot be taken over if firnd dies");
            *self.obstacle.lock() = Some(why);
            if let Some(table) = &self.table {
                table.remove();
            }
        }
    }
}

impl Part for Takeover {
    fn fill_status(&self, status: &mut Status) {
        let obstacle = *self.obstacle.lock();
        status.takeover = match obstacle {
            None if !self.resends.load(Ordering::Relaxed) => {
                "ready, and requests that are under way then end with EIO (before Linux 6.9)".into()
            }
            None => "ready".into(),
            Some(why) => why.into(),
        };
        status.lost_open_files = self.bad_handles;
        if let Some(link) = &self.link {
            status.upgrade.clone_from(&link.last_upgrade);
        }
        if let Some(table) = self.table.as_ref().filter(|_| obstacle.is_none()) {
            status.takeovers = table.takeovers();
            status.takeover_last_seconds = table.last_pause_ns() as f64 / 1e9;
            status.takeover_seconds = table.pauses_ns() as f64 / 1e9;
            status.live_table_bytes = table.bytes();
            status.live_table_lost = table.lost();
        }
    }

    fn answer(&self, question: &mut Question<'_>) -> Option<Reply> {
        let Request::Upgrade { options } = question.request else {
            return None;
        };
        let prepared = match *self.obstacle.lock() {
            Some(why) => Err(UpgradeError::NotReady(why)),
            None => self.prepare_upgrade(question.client.peer.pid, options),
        };
        Some(match prepared {
            Ok(keeper) => {
                let keeper = keeper.as_raw_pid() as u32;
                tracing::info!("firnd dies: the program of `firn upgrade` goes on with the mount");
                (question.send_progress)(Reply::Upgrading { keeper });
                die()
            }
            Err(error) => Reply::Error {
                errno: libc::EINVAL,
                message: error.to_string(),
            },
        })
    }

    fn stop(&self, stop: &mut Stop) {
        if stop.was_never_visible {
            // Another try may go on with it.
            return;
        }
        if let Some(table) = &self.table {
            table.remove();
        }
    }
}

/// The connection that a firnd gets from its keeper, where there is one.
pub(crate) fn connection_of(resumed: Option<ResumedMount>) -> Option<Connection> {
    let ResumedMount {
        device,
        died,
        files,
    } = resumed?;
    Some(Connection {
        device: device?,
        died,
        files,
    })
}

/// A connection whose firnd died.
pub(crate) struct Connection {
    pub(crate) device: OwnedFd,
    pub(crate) died: Duration,
    pub(crate) files: Vec<KeptFile>,
}
