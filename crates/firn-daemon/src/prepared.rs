//! The frontend of a mount between its preparation and its start.
//!
//! A frontend is either a FUSE mount or a stub tree (empty files on tmpfs; the preload library serves their bytes). It
//! is made in two steps, because the parts of a mount need the prepared frontend, and programs may see the mount only
//! after all parts have started. [`PreparedFrontend::new`] makes what the parts use; [`PreparedFrontend::start`] makes
//! the mount visible.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::Duration;

use firn_backing::Volume as _;
use firn_config::{KernelFlag, Options, TokenService};
use firn_engine::Engine;
use firn_fuse::{Adapter, AdapterOptions, Invalidator, ResumedConnection, Session, SessionOptions};
use firn_hosts::FileLocks;
use firn_workers::{Workers, spawn_thread};

use crate::attach::{AttachedArena, passthrough};
use crate::data_socket::ServedFrontend;
use crate::error::MountError;
use crate::event::Event;
use crate::frontend::{Frontend, Stubs};
use crate::gate::TransactionGate;
use crate::keeper::KeeperLink;
use crate::mount_request::MountRequest;
use crate::part::Part;
use crate::parts::{FuseRequests, InvalidateCache, StubNames, WaitingWriters};
use crate::preflight::CheckedPaths;
use crate::store::{Layers as _, Store};
use crate::takeover::{TakenOverMount, Takeover};

/// What the parts of a mount are made from.
pub(crate) struct MountSetup<'a> {
    pub(crate) request: &'a MountRequest,
    pub(crate) options: &'a Options,
    pub(crate) checked: &'a CheckedPaths,
    pub(crate) attached: &'a AttachedArena,
    pub(crate) events: Sender<Event>,
    /// The connection with the keeper, if there is one.
    pub(crate) link: Option<Arc<KeeperLink>>,
    /// The mount of an earlier firnd, if this firnd takes it over.
    pub(crate) taken_over: Option<&'a TakenOverMount>,
}

/// A frontend that programs do not see yet: a FUSE adapter or a stub tree.
pub(crate) enum PreparedFrontend {
    Mount {
        adapter: Box<Adapter<Store>>,
        kernel: Invalidator,
    },
    Tree(Arc<Stubs>),
}

impl PreparedFrontend {
    /// Prepares the frontend that the options name, by which programs will use the mount: a FUSE adapter, or a stub
    /// tree (empty files on tmpfs). Programs do not see it yet.
    ///
    /// `gate` makes changes wait for transactions, if the mount has them. `file_locks` are locks that also exclude
    /// programs on other hosts.
    pub(crate) fn new(
        setup: &MountSetup<'_>,
        data_socket_path: &Path,
        gate: Option<Arc<TransactionGate>>,
        file_locks: Option<Arc<FileLocks>>,
    ) -> Result<Self, MountError> {
        let &MountSetup {
            options,
            checked,
            attached,
            ..
        } = setup;
        let engine = Arc::clone(&attached.engine);
        if options.frontend == firn_config::Frontend::Preload {
            let prefix = &checked.mount_point;
            let backing = &checked.backing;
            let places_by_name = options.places_by_name();
            let files = &attached.files;
            let events = setup.events.clone();
            let stubs = Stubs::begin(engine, backing, prefix, places_by_name, files, events)?;
            return Ok(Self::Tree(Arc::new(stubs)));
        }
        let adapter_options = adapter_options(&engine, options);
        let uuid = engine.arena().superblock().uuid;
        let gate = gate.map(|gate| gate as _);
        let mut adapter = Adapter::new(engine, gate, adapter_options, attached.workers.clone());
        let kernel = adapter.offer_direct_access(uuid, data_socket_path);
        if let Some(locks) = file_locks {
            adapter.share_locks(locks);
        }
        let adapter = Box::new(adapter);
        Ok(Self::Mount { adapter, kernel })
    }

    /// Returns what the data socket of this mount serves.
    pub(crate) fn served_frontend(&self) -> ServedFrontend<Store> {
        match self {
            Self::Mount { kernel, .. } => ServedFrontend::Mount(kernel.clone()),
            Self::Tree(stubs) => ServedFrontend::Tree(Arc::clone(&stubs.tree)),
        }
    }

    /// Returns a function that makes the kernel drop what it has cached. The kernel caches nothing of a stub tree.
    pub(crate) fn cache_invalidator(&self) -> InvalidateCache {
        match self {
            Self::Mount { kernel, .. } => {
                let kernel = kernel.clone();
                Arc::new(move |cached| kernel.invalidate(&cached))
            }
            Self::Tree(_) => Arc::new(|_| {}),
        }
    }

    /// Returns a function that counts the writers that wait for room in the arena.
    pub(crate) fn waiting_writers(&self, engine: &Arc<Engine<Store>>) -> WaitingWriters {
        match self {
            Self::Mount { adapter, .. } => {
                let waiting_writers = adapter.waiting_writers();
                Box::new(move || waiting_writers.load(Ordering::Relaxed))
            }
            Self::Tree(_) => {
                let engine = Arc::clone(engine);
                Box::new(move || engine.waiting_writers())
            }
        }
    }

    /// Returns the part that belongs to this frontend.
    pub(crate) fn frontend_part(
        &self,
        engine: &Arc<Engine<Store>>,
        workers: &Workers,
    ) -> Arc<dyn Part> {
        match self {
            Self::Mount { adapter, .. } => Arc::new(FuseRequests {
                waiting_writers: adapter.waiting_writers(),
                waiting_threads: adapter.waiting_threads(),
                failures: adapter.failures(),
            }),
            Self::Tree(stubs) => StubNames::new(engine, stubs, workers),
        }
    }

    /// Starts the frontend: programs see the mount from now on. All parts of the mount must have started. `takeover`
    /// stores what another process needs to continue the mount if this one dies.
    pub(crate) fn start(
        self,
        setup: &MountSetup<'_>,
        data_socket_path: &Path,
        takeover: &Takeover,
    ) -> Result<Frontend, MountError> {
        let &MountSetup {
            options,
            checked,
            attached,
            ..
        } = setup;
        match self {
            Self::Mount { adapter, .. } => {
                let session_options = session_options(options, checked);
                let mount_point = &checked.mount_point;
                let session = Arc::new(match setup.taken_over {
                    None => Session::mount(*adapter, mount_point, &session_options, takeover)?,
                    Some(taken_over) => {
                        resume_session(*adapter, mount_point, &session_options, taken_over)?
                    }
                });
                watch_session(&session, setup.events.clone())?;
                Ok(Frontend::Mount(session))
            }
            Self::Tree(stubs) => {
                let uuid = attached.engine.arena().superblock().uuid;
                let shares_files = attached.engine.backing().log_layer().is_some();
                stubs.publish(shares_files, uuid, data_socket_path, &checked.backing)?;
                takeover.register_stub_tree();
                Ok(Frontend::Tree(stubs))
            }
        }
    }
}

/// Continues the FUSE session of a mount after the death of the process that served it. Programs still use the mount.
/// `taken_over` has its connection to the kernel, and the requests that were not answered.
fn resume_session(
    adapter: Adapter<Store>,
    mount_point: &Path,
    options: &SessionOptions,
    taken_over: &TakenOverMount,
) -> Result<Session, MountError> {
    let device = taken_over
        .device
        .try_clone()
        .map_err(MountError::io("keep the connection"))?;
    let device_number = taken_over.header.device;
    let requests = taken_over.resumed_requests.lock().take();
    let connection = ResumedConnection {
        device,
        number: (device_number.major, device_number.minor),
        exchange: &taken_over.header.exchange,
        left: requests.unwrap_or_default(),
    };
    Ok(Session::resume(adapter, mount_point, options, connection)?)
}

/// Returns how long the kernel may cache attributes and names, and whether it may read files itself (passthrough).
/// Names are not cached if other hosts may change them at any time.
fn adapter_options(engine: &Engine<Store>, options: &Options) -> AdapterOptions {
    let cache_timeout = Duration::from_millis(options.attr_timeout_ms);
    AdapterOptions {
        // What the log layer shows of other hosts may be as old as half of the timeout (`view_age_max`), so the kernel
        // may cache attributes only for the other half.
        attr_timeout: if has_log_layer(engine) {
            cache_timeout / 2
        } else {
            cache_timeout
        },
        name_timeout: if do_other_hosts_change_names(engine, options) {
            Duration::ZERO
        } else {
            cache_timeout
        },
        passthrough: passthrough(options),
    }
}

/// Returns whether files may lie in logs: only the log layer has work to finish after the last close of a file.
fn has_log_layer(engine: &Engine<Store>) -> bool {
    engine.backing().features().finishes_files
}

/// Returns whether other hosts may create, rename and remove files at any time, so that the kernel must not cache
/// names.
///
/// Hosts that commit together are different: they see each other's names at a commit, and the kernel's cache is cleared
/// then.
fn do_other_hosts_change_names(engine: &Engine<Store>, options: &Options) -> bool {
    has_log_layer(engine) || options.tokens != TokenService::None
}

/// Returns the options of the FUSE session.
fn session_options(options: &Options, checked: &CheckedPaths) -> SessionOptions {
    SessionOptions {
        source: checked.backing.clone(),
        threads: options.fuse_threads as usize,
        allow_other: options.allow_other,
        read_only: options.read_only,
        kernel_flags: options
            .kernel_flags
            .iter()
            .copied()
            .map(mount_option)
            .collect(),
    }
}

/// Returns the option of mount(8) for a flag.
fn mount_option(flag: KernelFlag) -> &'static str {
    match flag {
        KernelFlag::Dev => "dev",
        KernelFlag::NoDev => "nodev",
        KernelFlag::Suid => "suid",
        KernelFlag::NoSuid => "nosuid",
        KernelFlag::Exec => "exec",
        KernelFlag::NoExec => "noexec",
        KernelFlag::Atime => "atime",
        KernelFlag::NoAtime => "noatime",
        KernelFlag::Sync => "sync",
        KernelFlag::Async => "async",
        KernelFlag::DirSync => "dirsync",
    }
}

/// Starts the thread that sends [`Event::Ended`] when the session with the kernel ends.
fn watch_session(session: &Arc<Session>, events: Sender<Event>) -> Result<(), MountError> {
    let session = Arc::clone(session);
    let watch = move || {
        if let Err(error) = session.wait() {
            tracing::error!(%error, "the FUSE session failed");
        }
        let _ = events.send(Event::Ended);
    };
    spawn_thread("firn-session", watch).map_err(MountError::io("start a thread"))
}
