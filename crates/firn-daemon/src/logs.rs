//! Files that lie in logs (`layout=log`; `firn_log`): which mounts read and write logs, and who does what is left to do
//! when files are closed.
//!
//! Invariants
//! * A backing that has containers is never opened without them: logged files are whole in every mount.
//! * Who writes to logs has a lease that shows so, and no other process writes in the name of this host.
//! * A mount without logs, over a backing without containers, pays one look at `.firn/log`.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use firn_backing::{Backing, DirBacking, Errno};
use firn_config::{Flatten, Layout, Options, Placement};
use firn_engine::Engine;
use firn_log::seal::UNIT_BYTES;
use firn_log::{CONTAINERS, Left, LogBacking, Setup};
use firn_rendezvous::own::{self, TOP};
use firn_workers::spawn_thread;
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::error::AttachError;
use crate::host_lease::{HostLease, LogHosts, own_error, whoever_comes};
use crate::lock::DYING;
use crate::participants::host_name;
use crate::placement::{self, Use};
use crate::store::Store;

/// What other hosts write is looked at so often, as long as something is left to flatten.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Else so often; whoever closes a file wakes the thread.
const IDLE: Duration = Duration::from_secs(60);
/// So often at the end of a mount, while other hosts are at it.
const LAST_LOOK_EVERY: Duration = Duration::from_millis(50);

/// A backing with logs.
pub(crate) struct Opened {
    pub(crate) logs: LogBacking<DirBacking>,
    /// None where nothing is written.
    pub(crate) lease: Option<HostLease>,
}

/// Opens a backing with logs; gives it back where there are none and none are asked for.
pub(crate) fn open(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    wanted: Use,
) -> Result<Result<Opened, DirBacking>, AttachError> {
    let writes = !options.read_only;
    let chooses = wanted == Use::Place && options.layout == Layout::Log && writes;
    if !chooses && !has_containers(backing, &directory)? {
        return Ok(Err(directory));
    }
    let host = host_name(options)?;
    let lease = match writes {
        true => Some(HostLease::take_for_logs(
            backing,
            &whoever_comes(&host),
            DYING,
        )?),
        false => None,
    };
    let hosts = LogHosts::over(backing, &host)?;
    let patterns = patterns(options);
    let setup = Setup {
        host,
        chooses: Box::new(move |name: &OsStr| {
            chooses && (patterns.is_empty() || patterns.is_match(name))
        }),
        is_alive: Box::new(move |host| hosts.is_living(host)),
        patience: Duration::from_millis(options.attr_timeout_ms),
        unit_bytes: UNIT_BYTES,
        flattens_closed: writes && options.flatten == Flatten::Close,
        flattens_read: writes && options.flatten == Flatten::Read,
    };
    let logs = LogBacking::open(directory, setup).map_err(own_error(backing))?;
    Ok(Ok(Opened { logs, lease }))
}

/// The names of files that lie in logs; none for all. They were looked at when the options were read.
fn patterns(options: &Options) -> GlobSet {
    let mut patterns = GlobSetBuilder::new();
    for pattern in &options.log_files {
        if let Ok(pattern) = Glob::new(pattern) {
            patterns.add(pattern);
        }
    }
    patterns.build().unwrap_or_default()
}

/// Whether files of a backing lie in logs.
fn has_containers(backing: &Path, directory: &DirBacking) -> Result<bool, AttachError> {
    let refused = own_error(backing);
    let Some((firn, _)) = own::find_dir(directory, &directory.root(), TOP).map_err(&refused)?
    else {
        return Ok(false);
    };
    let found = own::find_dir(directory, &firn, CONTAINERS);
    let Some((top, _)) = found.map_err(|error| refused(error.below(TOP)))? else {
        return Ok(false);
    };
    let names = own::list(directory, &top).map_err(|errno| refused(errno.into()))?;
    Ok(names.iter().any(|(name, ..)| firn_log::is_container(name)))
}

/// Refuses transactions over files that lie in logs, which would be shown too short.
pub(crate) fn refuse_transactions(
    backing: &Path,
    directory: &DirBacking,
) -> Result<(), AttachError> {
    match has_containers(backing, directory)? {
        true => Err(AttachError::LoggedInTransactions {
            backing: backing.into(),
        }),
        false => Ok(()),
    }
}

/// Refuses logs over files that lie in lanes, and lanes over files that lie in logs.
pub(crate) fn refuse_lanes(
    backing: &Path,
    directory: &DirBacking,
    options: &Options,
) -> Result<(), AttachError> {
    let record = placement::find_record(backing, directory)?;
    let has_lanes = record.is_some_and(|record| !record.lanes.is_empty());
    if !has_lanes && options.placement != Placement::Dirs {
        return Ok(());
    }
    let backing_path = backing.to_owned();
    if options.layout == Layout::Log {
        return Err(AttachError::LoggedInLanes {
            backing: backing_path,
        });
    }
    match has_containers(backing, directory)? {
        true => Err(AttachError::LogsInTheWay {
            backing: backing_path,
        }),
        false => Ok(()),
    }
}

/// Does what is left to do for files that were closed.
pub(crate) struct Settler {
    engine: Arc<Engine<Store>>,
    is_stopping: Arc<AtomicBool>,
    /// Closed when its thread has ended.
    ended: Receiver<()>,
}

impl Settler {
    /// None where no file may lie in a log, or nothing is written.
    pub(crate) fn start(
        engine: &Arc<Engine<Store>>,
        options: &Options,
    ) -> io::Result<Option<Self>> {
        if engine.backing().logged().is_none() || options.read_only {
            return Ok(None);
        }
        let is_stopping = Arc::new(AtomicBool::new(false));
        let settled = Arc::clone(engine);
        let stop = Arc::clone(&is_stopping);
        let adopts = options.flatten == Flatten::Close;
        let (running, ended) = mpsc::channel::<()>();
        spawn_thread("firn-settle", move || {
            if let Some(logs) = settled.backing().logged() {
                settle_until_stopped(logs, adopts, &stop);
            }
            drop(running);
        })?;
        Ok(Some(Self {
            engine: Arc::clone(engine),
            is_stopping,
            ended,
        }))
    }

    /// Waits for what it is at.
    pub(crate) fn stop(self) {
        self.is_stopping.store(true, Ordering::Release);
        if let Some(logs) = self.engine.backing().logged() {
            logs.wake();
        }
        let _ = self.ended.recv();
    }
}

fn settle_until_stopped(logs: &LogBacking<DirBacking>, adopts: bool, stop: &AtomicBool) {
    if adopts && let Err(error) = adopt(logs) {
        tracing::warn!(%error, "cannot look for files in logs");
    }
    let mut told = None;
    while !stop.load(Ordering::Acquire) {
        let left = logs.settle();
        if left.error != told {
            told = left.error;
            if let Some(error) = told {
                tracing::warn!(%error, files = left.failed, "cannot flatten logs; firnd tries again");
            }
        }
        logs.wait_for_ended(if left.is_empty() { IDLE } else { LOOK_EVERY });
    }
}

/// Flattens, or removes, what hosts left that are gone.
fn adopt(logs: &LogBacking<DirBacking>) -> Result<(), Errno> {
    if logs.flatten_below(&logs.root())?.lost == 0 {
        return Ok(());
    }
    for name in logs.find_orphans()?.lost {
        tracing::warn!(
            container = name,
            "the file of these logs is not found: they are kept"
        );
    }
    Ok(())
}

/// At the end of a mount: flattens what nobody writes any more. Other hosts that are at it are waited for, those that
/// write are not.
pub(crate) fn settle_last(logs: &LogBacking<DirBacking>, flatten: Flatten) {
    let mut left = logs.settle();
    while left.under_way > 0 {
        std::thread::sleep(LAST_LOOK_EVERY);
        left = logs.settle();
    }
    if matches!(flatten, Flatten::Demand | Flatten::Read) {
        match logs.flatten_below(&logs.root()) {
            Ok(found) => left = found,
            Err(error) => left.error = Some(error),
        }
    }
    tell(&left);
}

fn tell(left: &Left) {
    if let Some(error) = left.error {
        tracing::error!(%error, "files stay in logs: the next mount tries again");
    }
    if left.written > 0 {
        tracing::info!(
            files = left.written,
            "files stay in logs: other hosts write to them"
        );
    }
}
