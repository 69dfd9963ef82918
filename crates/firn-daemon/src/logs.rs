//! Files that lie in logs (`layout=log`; `firn_log`): which mounts read and write logs, and which thread flattens them
//! when files are closed.
//!
//! Invariants
//! * A backing that has containers is never opened without them: logged files are whole in every mount.
//! * A host that writes to logs has a lease that shows so, and no other process writes in the name of this host.
//! * A mount without logs, over a backing without containers, pays one look at `.firn/log`.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use firn_backing::{Backing, DirBacking, Errno};
use firn_config::{Flatten, Layout, Options};
use firn_engine::Engine;
use firn_hosts::LeaseUse;
use firn_hosts::own::{self, TOP};
use firn_log::seal::UNIT_BYTES;
use firn_log::{CONTAINERS, Left, LogBacking, Logs, Setup, WhenClosed};
use firn_workers::spawn_thread;
use globset::{Glob, GlobSet, GlobSetBuilder};

use crate::error::{AttachError, FlattenError};
use crate::host_lease::{HostLease, LivingHosts, own_error};
use crate::host_name::host_name;
use crate::lock::Locks;
use crate::losses::LossReport;
use crate::peers::terms_of;
use crate::placement::{self, Use};
use crate::process;
use crate::store::{Layers as _, LoggableStore, PlaceableStore, Store};
use crate::unmounted::{FoundOrphan, open_unmounted};

/// What other hosts write is looked at so often, as long as something is left to flatten.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Pause between looks otherwise; a close of a file wakes the thread.
const IDLE: Duration = Duration::from_secs(60);
/// What another host made or removed may come so late over a network file system: its clients keep attributes and names for
/// a second or a few.
const LAG_MAX: Duration = Duration::from_secs(5);
/// Pause of a waiting caller before it asks again.
const REST: Duration = Duration::from_millis(50);
/// With close=held the kernel reports a close only after close(2) has returned: wait this long before a writer is
/// reported.
const CLOSING: Duration = Duration::from_secs(1);

/// Opens the logs of a backing, where there are some or some are asked for. The lease shows that this host lives, if it may
/// write to them.
pub(crate) fn open(
    backing: &Path,
    base: PlaceableStore,
    options: &Options,
    wanted: Use,
    lease: &mut HostLease,
) -> Result<LoggableStore, AttachError> {
    let writes = !options.read_only;
    let chooses = wanted == Use::Place && options.layout == Layout::Log && writes;
    if !chooses && !has_containers(backing, &base)? && !others_log(backing, options)? {
        if writes {
            firn_log::remove_retired(&base).map_err(own_error(backing))?;
        }
        return Ok(LoggableStore::Lower(base));
    }
    let host = host_name(options)?;
    if writes {
        lease.use_for(LeaseUse::Logs, &host, &terms_of(options, true))?;
    }
    let hosts = LivingHosts::over(backing, LeaseUse::Logs, &host)?;
    let patterns = patterns(options);
    let setup = Setup {
        host,
        chooses: Box::new(move |name: &OsStr| {
            chooses && (patterns.is_empty() || patterns.is_match(name))
        }),
        is_alive: Box::new(move |host| hosts.is_living(host)),
        // The kernel keeps what it was told as long again.
        view_age_max: Duration::from_millis(options.attr_timeout_ms) / 2,
        lag_max: LAG_MAX,
        unit_bytes: UNIT_BYTES,
        when_closed: when_closed(options),
        flattens_read: writes && options.flatten == Flatten::Read,
    };
    let logs = LogBacking::open(base, setup).map_err(own_error(backing))?;
    Ok(LoggableStore::Upper(logs))
}

fn when_closed(options: &Options) -> WhenClosed {
    match options.flatten {
        _ if options.read_only => WhenClosed::Keep,
        Flatten::Close => WhenClosed::Flatten,
        Flatten::Behind => WhenClosed::FlattenBehind,
        Flatten::Demand | Flatten::Read | Flatten::Off => WhenClosed::Keep,
    }
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

/// Whether another host that may live writes to logs: then files may come to lie in them at any time.
fn others_log(backing: &Path, options: &Options) -> Result<bool, AttachError> {
    let host = host_name(options).unwrap_or_default();
    let others = LivingHosts::over(backing, LeaseUse::Logs, &host)?.others_living();
    let others = others.map_err(|errno| own_error(backing)(errno.into()))?;
    Ok(!others.is_empty())
}

/// Whether files of a backing lie in logs.
fn has_containers<B: Backing>(backing: &Path, base: &B) -> Result<bool, AttachError> {
    let refused = own_error(backing);
    let Some((firn, _)) = own::find_dir(base, &base.root(), TOP).map_err(&refused)? else {
        return Ok(false);
    };
    let found = own::find_dir(base, &firn, CONTAINERS);
    let Some((top, _)) = found.map_err(|error| refused(error.below(TOP)))? else {
        return Ok(false);
    };
    let names = own::list(base, &top).map_err(|errno| refused(errno.into()))?;
    Ok(names.iter().any(|(name, ..)| firn_log::is_file_dir(name)))
}

/// Logs of files that are not in the backing: those that were not removed through Firn, and those that a host was
/// removing.
pub(crate) fn find_unowned<B: Backing>(
    backing: &Path,
    base: &B,
) -> Result<Vec<FoundOrphan>, AttachError> {
    let unowned = firn_log::find_unowned(base);
    let unowned = unowned.map_err(|errno| own_error(backing)(errno.into()))?;
    let show = |kind: &'static str, containers: Vec<String>| {
        let shown = containers.into_iter().map(move |container| FoundOrphan {
            kind,
            path: firn_log::container_path(&container),
            bytes: 0,
            is_removed: false,
        });
        shown.collect::<Vec<_>>()
    };
    let mut shown = show("removed-logs", unowned.unfinished);
    shown.extend(show("logs", unowned.lost));
    Ok(shown)
}

/// Ends what hosts have left that died while they removed files in logs, without a mount.
pub(crate) fn end_removals(backing: &Path, options: &Options) -> Result<(), AttachError> {
    let (backing, directory, mut locks) = open_unmounted(backing, options)?;
    let ended = with_logs(
        &backing,
        directory,
        options,
        &mut locks,
        &mut |text| tracing::warn!("{text}"),
        &mut |logs, _| logs.end_removals(),
    )?;
    ended
        .unwrap_or(Ok(()))
        .map_err(|errno| own_error(&backing)(errno.into()))
}

/// Lets the settle worker flatten files for callers that wait for that.
pub(crate) struct Flattener {
    engine: Arc<Engine<Store>>,
    requests: Sender<FlattenRequest>,
}

/// Files that a caller wants to be flat.
pub(crate) struct FlattenRequest {
    /// Below the mount point; empty: all of it.
    path: Vec<u8>,
    done: Sender<Result<Left, Errno>>,
}

impl Flattener {
    /// With what a [`Settler`] takes its requests from.
    pub(crate) fn new(engine: &Arc<Engine<Store>>) -> (Self, Receiver<FlattenRequest>) {
        let (requests, taken) = mpsc::channel();
        let engine = Arc::clone(engine);
        (Self { engine, requests }, taken)
    }

    /// Flattens the files without writers at or below `path`, and waits for this host and others that are at it.
    /// `goes_on` is asked some times a second, and ends the wait with false (ECANCELED).
    pub(crate) fn flatten(
        &self,
        path: &[u8],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Left, Errno> {
        let began = Instant::now();
        loop {
            let left = self.ask(path, goes_on)?;
            let may_be_closed = left.written > 0 && began.elapsed() < CLOSING;
            if left.under_way == 0 && !may_be_closed {
                return Ok(left);
            }
            std::thread::sleep(REST);
            if !goes_on() {
                return Err(Errno::CANCELED);
            }
        }
    }

    fn ask(&self, path: &[u8], goes_on: &mut dyn FnMut() -> bool) -> Result<Left, Errno> {
        let (done, answer) = mpsc::channel();
        let path = path.to_vec();
        let asked = self.requests.send(FlattenRequest { path, done });
        asked.map_err(|_| Errno::SHUTDOWN)?;
        if let Some(logs) = self.engine.backing().logged() {
            logs.wake();
        }
        loop {
            match answer.recv_timeout(REST) {
                Ok(left) => return left,
                Err(RecvTimeoutError::Timeout) if goes_on() => {}
                Err(RecvTimeoutError::Timeout) => return Err(Errno::CANCELED),
                Err(RecvTimeoutError::Disconnected) => return Err(Errno::SHUTDOWN),
            }
        }
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
    /// For a mount whose files may lie in logs, and may be written.
    pub(crate) fn start(
        engine: &Arc<Engine<Store>>,
        flatten: Flatten,
        requests: Receiver<FlattenRequest>,
    ) -> io::Result<Self> {
        let is_stopping = Arc::new(AtomicBool::new(false));
        let settled = Arc::clone(engine);
        let stop = Arc::clone(&is_stopping);
        let adopts = matches!(flatten, Flatten::Behind | Flatten::Close);
        let (running, ended) = mpsc::channel::<()>();
        spawn_thread("firn-settle", move || {
            if let Some(logs) = settled.backing().logged() {
                settle_until_stopped(logs, adopts, &requests, &stop);
            }
            drop(running);
        })?;
        Ok(Self {
            engine: Arc::clone(engine),
            is_stopping,
            ended,
        })
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

fn settle_until_stopped(
    logs: &dyn Logs,
    adopts: bool,
    requests: &Receiver<FlattenRequest>,
    stop: &AtomicBool,
) {
    if adopts && let Err(error) = adopt(logs) {
        tracing::warn!(%error, "cannot look for files in logs");
    }
    let mut told = None;
    let mut next_look = Instant::now();
    while !stop.load(Ordering::Acquire) {
        if Instant::now() >= next_look {
            next_look = Instant::now() + IDLE;
            if let Err(error) = logs.end_removals() {
                tracing::warn!(%error, "cannot look for logs of removed files");
            }
        }
        for request in requests.try_iter() {
            // The requesting thread may not wait any more.
            let _ = request.done.send(logs.flatten_at(&request.path));
        }
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
fn adopt(logs: &dyn Logs) -> Result<(), Errno> {
    if logs.flatten_at(b"")?.lost == 0 {
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

/// Flattens the files at or below `path`, which is relative to the backing, without a mount.
pub fn flatten(
    backing: &Path,
    path: &Path,
    options: &Options,
    notice: &mut dyn FnMut(String),
) -> Result<(), FlattenError> {
    flatten_unmounted(backing, path, options, notice, &mut |logs, _| {
        logs.flatten_whole(path.as_os_str().as_bytes())
    })
}

/// The same; what cannot be read of logs is written to the file `report`, which is new, and given up.
pub fn flatten_with_loss(
    backing: &Path,
    path: &Path,
    options: &Options,
    report: &Path,
    notice: &mut dyn FnMut(String),
) -> Result<(), FlattenError> {
    let mut losses = LossReport::create(report)?;
    let flattened = flatten_unmounted(backing, path, options, notice, &mut |logs, is_all_there| {
        // What lies in a lane that is missing is not lost.
        if !is_all_there {
            return Err(Errno::NODEV);
        }
        logs.flatten_with_loss(path.as_os_str().as_bytes(), &mut losses.below(path))
    });
    let lost = losses.finish()?;
    flattened?;
    match lost {
        None => Ok(()),
        Some(lost) => Err(lost),
    }
}

/// Does something with logs; true: all lanes are there.
type LogWork<'a, T> = dyn FnMut(&dyn Logs, bool) -> Result<T, Errno> + 'a;

fn flatten_unmounted(
    backing: &Path,
    path: &Path,
    options: &Options,
    notice: &mut dyn FnMut(String),
    work: &mut LogWork<'_, Left>,
) -> Result<(), FlattenError> {
    process::prepare();
    let (backing, directory, mut locks) = open_unmounted(backing, options)?;
    match with_logs(&backing, directory, options, &mut locks, notice, work)? {
        None => Ok(()),
        Some(Ok(left)) => FlattenError::check(&left, true),
        Some(Err(Errno::NOENT)) => Err(FlattenError::NoSuchFile { path: path.into() }),
        Some(Err(errno)) => Err(FlattenError::Failed { files: 0, errno }),
    }
}

/// Runs `work` with the logs of a backing that is not mounted; None where there are none.
fn with_logs<T>(
    backing: &Path,
    directory: DirBacking,
    options: &Options,
    locks: &mut Locks,
    notice: &mut dyn FnMut(String),
    work: &mut LogWork<'_, T>,
) -> Result<Option<Result<T, Errno>>, AttachError> {
    let placeable = placement::open(backing, directory, options, Use::Serve, notice)?;
    let store = open(backing, placeable, options, Use::Serve, locks.host_lease())?;
    let LoggableStore::Upper(logs) = &store else {
        return Ok(None);
    };
    let Some(lanes) = logs.below().upper() else {
        return Ok(Some(work(logs, true)));
    };
    let done = work(logs, lanes.absent().is_empty());
    Ok(Some(
        done.and_then(|done| lanes.finish_removals().map(|()| done)),
    ))
}

/// At the end of a mount: flattens files without writers. Other hosts that are at it are waited for, those that write
/// are not.
pub(crate) fn settle_last(logs: &dyn Logs, flatten: Flatten) -> Left {
    let mut left = logs.settle();
    while left.under_way > 0 {
        std::thread::sleep(REST);
        left = logs.settle();
    }
    if matches!(flatten, Flatten::Demand | Flatten::Read) {
        match logs.flatten_whole(b"") {
            Ok(found) => left = found,
            Err(error) => left.error = Some(error),
        }
    }
    if let Err(error) = logs.end_removals() {
        left.error = left.error.or(Some(error));
    }
    tell(&left);
    left
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
