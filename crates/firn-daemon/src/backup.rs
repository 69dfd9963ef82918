//! `backup=DIR`: a second directory for what is prepared, and `firn recover --from-backup`.
//!
//! Each mount has a directory of its own in it, named by host and backing; what is in that is `firn_transact::backup`'s.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use firn_backing::{DirBacking, Volume};
use firn_client::paths::Key;
use firn_config::Options;
use firn_engine::Engine;
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;
use firn_transact::backup::MANIFEST;
use firn_transact::change_log::ChangeLog;
use firn_transact::{BackupError, CommitError, ReviveError, StageError, TransactionalBacking};
use firn_trust::{TrustError, check_place, create_private_dir, open_private_dir};
use parking_lot::{Condvar, Mutex};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, accessat, open};
use serde::Serialize;

use crate::error::{AttachError, RecoverError};
use crate::ground::serve_ground;
use crate::lock::{Locks, Sharing};
use crate::preflight::{self, Checked};
use crate::process;
use crate::runtime_files::{exists, find_runtime_files};
use crate::store::{
    Layers as _, LoggableStore, PlaceableStore, Store, TransactionalStore, shown_scope,
};

/// Refuses directories that cannot be a backup of this mount.
pub(crate) fn check(options: &Options, checked: &Checked) -> Result<(), AttachError> {
    let Some(dir) = &options.backup else {
        return Ok(());
    };
    let unusable = |source: io::Error| AttachError::BackupDirectory {
        path: dir.clone(),
        source,
    };
    let canonical = dir.canonicalize().map_err(unusable)?;
    if !canonical.is_dir() {
        return Err(unusable(io::Error::from_raw_os_error(libc::ENOTDIR)));
    }
    for taken in [&checked.mount_point, &checked.backing] {
        if canonical.starts_with(taken) {
            return Err(AttachError::BackupInside {
                backup: dir.clone(),
                dir: taken.clone(),
            });
        }
    }
    let home = home(&canonical, &checked.backing);
    drop(open_home(&canonical, &home, unusable)?);
    let needed = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, &home, needed, AtFlags::EACCESS).map_err(|errno| unusable(errno.into()))
}

/// Opens the directory of one mount, made if it is not there. What is in it will be believed, and removed.
fn open_home(
    dir: &Path,
    home: &Path,
    unusable: impl Fn(io::Error) -> AttachError,
) -> Result<OwnedFd, AttachError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = open(dir, flags, Mode::empty()).map_err(|errno| unusable(errno.into()))?;
    check_place(dir)?;
    let name = Path::new(home.file_name().expect("a directory below another"));
    create_private_dir(&parent, name).map_err(|error| match error {
        TrustError::Io { error, .. } => unusable(error),
        error => error.at(home).into(),
    })
}

/// The directory of one mount: hosts may have backings of the same path.
fn home(dir: &Path, backing: &Path) -> PathBuf {
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .replace('/', "-");
    dir.join(format!("{host}-{}", Key::of(backing)))
}

/// The directory of a mount's backups, and where it is.
pub(crate) type Home = (LoggableStore, PathBuf);

/// Opens that directory, if the options have one.
pub(crate) fn open_backups(backing: &Path, options: &Options) -> Result<Option<Home>, AttachError> {
    let Some(dir) = &options.backup else {
        return Ok(None);
    };
    let unusable = |source: io::Error| AttachError::BackupDirectory {
        path: dir.clone(),
        source,
    };
    let canonical = dir.canonicalize().map_err(unusable)?;
    let home = home(&canonical, backing);
    let opened = open_home(&canonical, &home, unusable)?;
    let directory = DirBacking::of_dir(opened, &home).map_err(unusable)?;
    Ok(Some((without_layers(directory), home)))
}

/// A directory of a backup, with the type of what it backs up: its files lie in no lane and no log.
fn without_layers(directory: DirBacking) -> LoggableStore {
    LoggableStore::Lower(PlaceableStore::Lower(directory))
}

/// Gives a store its backup, if there is one. `known` was asked for before the store was opened.
pub(crate) fn attach(
    store: TransactionalStore,
    backing: &Path,
    home: Option<Home>,
    known: &std::collections::BTreeSet<String>,
) -> Result<TransactionalStore, AttachError> {
    let Some((directory, home)) = home else {
        return Ok(store);
    };
    store
        .backed_up(directory, known)
        .map_err(|error| match error {
            BackupError::UnknownTransaction { id, name } => AttachError::BackupWaits {
                id,
                dir: home.join(name),
                backing: backing.into(),
            },
            error => AttachError::transactions(backing)(error),
        })
}

/// The thread that copies ahead.
pub(crate) struct Rounds {
    stopping: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Rounds {
    /// Does nothing without a backup.
    pub(crate) fn start(engine: &Arc<Engine<Store>>, every: Duration) -> io::Result<Self> {
        let stopping = Arc::new((Mutex::new(false), Condvar::new()));
        let has_backup = |store: &TransactionalStore| store.backups.directory().is_some();
        if !engine.backing().transactional().is_some_and(has_backup) {
            return Ok(Self {
                stopping,
                thread: None,
            });
        }
        let engine = Arc::clone(engine);
        let shared = Arc::clone(&stopping);
        let rounds = move || {
            let (stopping, wake) = &*shared;
            loop {
                let mut stop = stopping.lock();
                if !*stop {
                    wake.wait_for(&mut stop, every);
                }
                if *stop {
                    return;
                }
                drop(stop);
                if let Some(store) = engine.backing().transactional() {
                    store.backups.back_up_ahead();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("firn-backup".into())
            .spawn(rounds)?;
        Ok(Self {
            stopping,
            thread: Some(thread),
        })
    }

    /// Ends it after the round it is at.
    pub(crate) fn stop(&mut self) {
        *self.stopping.0.lock() = true;
        self.stopping.1.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that copies to the backup panicked");
        }
    }
}

impl Drop for Rounds {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A backup to finish a commit from.
#[derive(Clone, Debug)]
pub struct FromBackup {
    /// What `backup=` said, or a directory in it.
    pub dir: PathBuf,
    /// The tree as it was before the transaction.
    pub backing: PathBuf,
    /// To be committed; without it the transaction is left prepared.
    pub id: Option<u64>,
    /// Checked options: `arena-dir` counts.
    pub options: Options,
}

/// What became of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BackupReport {
    /// Number of the transaction.
    pub id: u64,
    /// Its scope, from the top of the backing; empty: all of it.
    pub scope: BytePath,
    /// Objects that it changes.
    pub objects: u64,
    /// It is committed; else it is prepared.
    pub committed: bool,
    /// The backing had it already.
    pub before: bool,
}

/// Prepares the transaction of a backup in a backing, and commits it if it is named by its number.
pub fn recover_from_backup(request: &FromBackup) -> Result<BackupReport, RecoverError> {
    process::prepare();
    let backing = preflight::check_backing(&request.backing, false)?;
    let Found { place, log } = choose(request)?;
    let files = find_runtime_files(&backing, &request.options)?;
    if exists(&files.arena) {
        return Err(RecoverError::BackupArena {
            arena: files.arena,
            backing,
        });
    }
    let mut locks = Locks::take(&backing, &files, None, Sharing::Alone)?;
    let ground = serve_ground(&backing, &request.options, locks.host_lease())?;
    let store = without_layers(open_place(&place)?);
    let (held, _) =
        TransactionalBacking::open(ground).map_err(AttachError::transactions(&backing))?;
    let mut report = BackupReport {
        id: log.id,
        scope: log.scope.as_slice().into(),
        objects: log.entries.len() as u64,
        ..BackupReport::default()
    };
    match held.revival.revive(
        (&store, &store.root()),
        place.file_name().unwrap_or_default(),
        &log,
    ) {
        Ok(()) => {}
        Err(ReviveError::Applied { .. }) => (report.before, report.committed) = (true, true),
        Err(ReviveError::Overlaps { scope }) => {
            let scope = shown_scope(scope.as_bytes());
            return Err(RecoverError::BackupOpen { scope, backing });
        }
        Err(error) => return Err(AttachError::transactions(&backing)(error).into()),
    }
    if request.id.is_some() && !report.before {
        let found = held.current_transaction(&log.scope);
        let found = found.ok_or(CommitError::Stage(StageError::NoTransaction))?;
        found.decide(log.id)?.apply()?;
        report.committed = true;
    }
    if report.committed {
        forget(&place);
    }
    Ok(report)
}

/// It is applied: what is left of the backup means nothing, and is found to mean nothing.
fn forget(place: &Path) {
    let (Some(home), Some(name)) = (place.parent(), place.file_name()) else {
        return;
    };
    let removed = || {
        let home = open_private_dir(CWD, home)?;
        let home = DirBacking::of_dir(home, place).map_err(AttachError::io("open the backup"))?;
        TransactionalBacking::remove_backup(&home, &name.to_string_lossy())
            .map_err(AttachError::from)
    };
    if let Err(error) = removed() {
        tracing::warn!(%error, place = %quoted_path(place), "cannot remove the backup of a commit that is complete");
    }
}

/// Opens a directory of a backup, in which everything is believed.
fn open_place(place: &Path) -> Result<DirBacking, AttachError> {
    let dir = open_private_dir(CWD, place)?;
    let unusable = |source| AttachError::BackupDirectory {
        path: place.to_owned(),
        source,
    };
    DirBacking::of_dir(dir, place).map_err(unusable)
}

/// A whole backup of one transaction.
struct Found {
    place: PathBuf,
    log: ChangeLog,
}

/// Backups in a directory: those that are meant, and in words what else is there.
struct Search<'a> {
    request: &'a FromBackup,
    found: Vec<Found>,
    others: Vec<String>,
}

/// Finds the only backup that is meant.
fn choose(request: &FromBackup) -> Result<Found, RecoverError> {
    let unusable = |source| AttachError::BackupDirectory {
        path: request.dir.clone(),
        source,
    };
    let mut search = Search {
        request,
        found: Vec::new(),
        others: Vec::new(),
    };
    // The directory of the option, of a mount, or of a transaction.
    let top = request.dir.canonicalize().map_err(unusable)?;
    if !search.look_at(&top)? {
        for mount in list_dirs(&top).map_err(unusable)? {
            if search.look_at(&mount)? {
                continue;
            }
            // It may be another user's, in a directory that others share.
            for transaction in list_dirs(&mount).unwrap_or_default() {
                search.look_at(&transaction)?;
            }
        }
    }
    search.finish()
}

fn list_dirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir)?.flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(dirs.map(|entry| entry.path()).collect())
}

impl Search<'_> {
    /// Whether it is the directory of a transaction. Then it is one of those found, or of the others.
    fn look_at(&mut self, place: &Path) -> Result<bool, RecoverError> {
        if !place.join(MANIFEST).is_file() {
            return Ok(false);
        }
        let store = match open_place(place) {
            Ok(store) => store,
            Err(error @ AttachError::Trust(_)) => {
                self.others.push(error.to_string());
                return Ok(true);
            }
            Err(error) => return Err(error.into()),
        };
        match TransactionalBacking::manifest(&store, &store.root())? {
            Some(Ok(log)) if self.request.id.is_none_or(|id| id == log.id) => {
                let place = place.to_owned();
                self.found.push(Found { place, log });
            }
            Some(Ok(log)) => {
                let shown = quoted_path(place);
                self.others
                    .push(format!("{shown} has one with id {}", log.id));
            }
            Some(Err(error)) => {
                let manifest = place.join(MANIFEST);
                self.others
                    .push(format!("{}: {error}", quoted_path(&manifest)));
            }
            None => {}
        }
        Ok(true)
    }

    fn finish(mut self) -> Result<Found, RecoverError> {
        match self.found.len() {
            1 => Ok(self.found.remove(0)),
            0 => Err(self.describe_none()),
            _ => {
                let one =
                    |found: &Found| format!("{} (id {})", quoted_path(&found.place), found.log.id);
                let all = self.found.iter().map(one).collect::<Vec<_>>().join(", ");
                Err(RecoverError::BackupSeveral { all })
            }
        }
    }

    fn describe_none(&self) -> RecoverError {
        let with_id = |id| format!(" with id {id}");
        let others = if self.others.is_empty() {
            String::new()
        } else {
            format!(" ({})", self.others.join("; "))
        };
        RecoverError::BackupNone {
            dir: self.request.dir.clone(),
            wanted: self.request.id.map_or_else(String::new, with_id),
            others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(dir: &Path) -> Checked {
        let [backing, mount_point] = ["backing", "mnt"].map(|name| dir.join(name));
        for path in [&backing, &mount_point] {
            std::fs::create_dir_all(path).unwrap();
        }
        Checked {
            backing,
            mount_point,
        }
    }

    #[test]
    fn a_backup_is_neither_missing_nor_a_file_nor_in_the_mount_or_the_backing() {
        let dir = tempfile::tempdir().unwrap();
        let checked = checked(dir.path());
        let at = |path: &Path| {
            let options = Options {
                backup: Some(path.into()),
                ..Options::default()
            };
            check(&options, &checked)
        };
        let missing = at(&dir.path().join("none")).expect_err("missing");
        assert!(matches!(missing, AttachError::BackupDirectory { .. }));
        std::fs::write(dir.path().join("file"), b"").unwrap();
        assert!(matches!(
            at(&dir.path().join("file")),
            Err(AttachError::BackupDirectory { .. })
        ));
        for taken in [&checked.backing, &checked.mount_point] {
            std::fs::create_dir(taken.join("below")).unwrap();
            assert!(matches!(at(taken), Err(AttachError::BackupInside { .. })));
            assert!(matches!(
                at(&taken.join("below")),
                Err(AttachError::BackupInside { .. })
            ));
        }
        std::fs::create_dir(dir.path().join("backup")).unwrap();
        at(&dir.path().join("backup")).expect("a directory of its own");
    }

    #[test]
    fn a_directory_without_a_whole_backup_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let tx = dir.path().join("host-1/tx-1-a");
        std::fs::create_dir_all(&tx).unwrap();
        let private = |path: &Path, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, mode).unwrap();
        };
        let request = |id| FromBackup {
            dir: dir.path().into(),
            backing: "/".into(),
            id,
            options: Options::default(),
        };
        let refusal = |id| choose(&request(id)).err().expect("refused").to_string();
        assert!(
            refusal(Some(3)).contains("with id 3"),
            "{}",
            refusal(Some(3))
        );
        std::fs::write(tx.join(MANIFEST), b"torn").unwrap();
        private(&tx, 0o755);
        assert!(
            refusal(None).contains("lets others in"),
            "{}",
            refusal(None)
        );
        private(&tx, 0o700);
        private(&tx.join(MANIFEST), 0o600);
        assert!(refusal(None).contains("damaged"), "{}", refusal(None));
    }
}
