//! `backup=DIR`: a second directory for the data of prepared transactions, and `firn recover --from-backup`. A prepared
//! transaction has ended its changes and waits for a commit or abort.
//!
//! Each mount has a subdirectory of its own in DIR, named by host and backing. `firn_transact::backup` defines what
//! that subdirectory holds.
//!
//! Promises
//! * A directory is used only if its owner and mode show that no other user could have put anything there.
//! * `recover_from_backup` commits the transaction only if the user names its number; otherwise it stays prepared.
//! * A backup is removed only after its commit is applied.

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
use crate::lock::{LockSharing, Locks};
use crate::lower_store::open_lower_store_unmounted;
use crate::preflight::{self, CheckedPaths};
use crate::process;
use crate::runtime_files::{exists, find_runtime_files};
use crate::store::{
    Layers as _, LoggableStore, PlaceableStore, Store, TransactionalStore, shown_scope,
};

/// Checks that the directory of `backup=` can hold copies of this mount's transactions, and makes the mount's
/// subdirectory in it. Without that option it does nothing.
///
/// Fails if the directory is missing, cannot be written, or lies in the mount point or in the backing.
pub(crate) fn check_backup_dir(
    options: &Options,
    checked: &CheckedPaths,
) -> Result<(), AttachError> {
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
    for other_dir in [&checked.mount_point, &checked.backing] {
        if canonical.starts_with(other_dir) {
            return Err(AttachError::BackupInside {
                backup: dir.clone(),
                dir: other_dir.clone(),
            });
        }
    }
    let mount_dir = mount_dir(&canonical, &checked.backing);
    // Opening makes the subdirectory and checks its owner; its descriptor is not needed.
    drop(open_backup_dir_of_mount(&canonical, &mount_dir, unusable)?);
    let needed_access = Access::READ_OK | Access::WRITE_OK | Access::EXEC_OK;
    accessat(CWD, &mount_dir, needed_access, AtFlags::EACCESS)
        .map_err(|errno| unusable(errno.into()))
}

/// Opens the subdirectory of one mount, and makes it if it is missing.
///
/// Its contents are trusted, and may be removed, so its owner and mode are checked first.
fn open_backup_dir_of_mount(
    dir: &Path,
    mount_dir: &Path,
    unusable: impl Fn(io::Error) -> AttachError,
) -> Result<OwnedFd, AttachError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = open(dir, flags, Mode::empty()).map_err(|errno| unusable(errno.into()))?;
    check_place(dir)?;
    let name = Path::new(mount_dir.file_name().expect("a directory below another"));
    create_private_dir(&parent, name).map_err(|error| match error {
        TrustError::Io { error, .. } => unusable(error),
        error => error.at(mount_dir).into(),
    })
}

/// Returns the path of the subdirectory of one mount. The host name is in it because hosts may have backings of the
/// same path.
fn mount_dir(dir: &Path, backing: &Path) -> PathBuf {
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .replace('/', "-");
    dir.join(format!("{host}-{}", Key::from_backing(backing)))
}

/// The opened subdirectory of one mount, and its path.
pub(crate) struct MountBackup {
    pub(crate) store: LoggableStore,
    path: PathBuf,
}

/// Opens the subdirectory of this mount in the directory of `backup=`, which gets copies of transactions; makes it if
/// it is missing. `None` if the option is not set.
pub(crate) fn open_backup_of_mount(
    backing: &Path,
    options: &Options,
) -> Result<Option<MountBackup>, AttachError> {
    let Some(dir) = &options.backup else {
        return Ok(None);
    };
    let unusable = |source: io::Error| AttachError::BackupDirectory {
        path: dir.clone(),
        source,
    };
    let canonical = dir.canonicalize().map_err(unusable)?;
    let mount_dir = mount_dir(&canonical, backing);
    let opened = open_backup_dir_of_mount(&canonical, &mount_dir, unusable)?;
    let directory = DirBacking::from_dir(opened, &mount_dir).map_err(unusable)?;
    Ok(Some(MountBackup {
        store: store_without_layers(directory),
        path: mount_dir,
    }))
}

/// Converts a directory of a backup to the type of the store that is backed up, without layers of lanes and logs.
fn store_without_layers(directory: DirBacking) -> LoggableStore {
    LoggableStore::Lower(PlaceableStore::Lower(directory))
}

/// Attaches the backup directory, if there is one, to the store that the mount writes to. From then on the store copies
/// the data of its transactions there.
///
/// Fails if the directory has a copy of a transaction that is not in `known_backups`: such a copy waits for `firn
/// recover --from-backup`. The caller read these names before the store was opened.
pub(crate) fn attach_backup(
    store: TransactionalStore,
    backing: &Path,
    backup: Option<MountBackup>,
    known_backups: &std::collections::BTreeSet<String>,
) -> Result<TransactionalStore, AttachError> {
    let Some(backup) = backup else {
        return Ok(store);
    };
    store
        .backed_up(backup.store, known_backups)
        .map_err(|error| match error {
            BackupError::UnknownTransaction { id, name } => AttachError::BackupWaits {
                id,
                dir: backup.path.join(name),
                backing: backing.into(),
            },
            error => AttachError::transactions(backing)(error),
        })
}

/// The thread that copies data of open transactions to the backup ahead of their commit.
pub(crate) struct BackupThread {
    stop: Arc<StopFlag>,
    thread: Option<JoinHandle<()>>,
}

/// Tells the thread to stop, and ends its pause.
#[derive(Default)]
struct StopFlag {
    is_set: Mutex<bool>,
    changed: Condvar,
}

/// Copies data of open transactions to the backup, after each pause of `pause`, until `stop` is set.
fn back_up_in_rounds(engine: &Engine<Store>, stop: &StopFlag, pause: Duration) {
    loop {
        let mut is_stopping = stop.is_set.lock();
        if !*is_stopping {
            stop.changed.wait_for(&mut is_stopping, pause);
        }
        if *is_stopping {
            return;
        }
        drop(is_stopping);
        if let Some(store) = engine.backing().transactional() {
            store.backups.back_up_ahead();
        }
    }
}

impl BackupThread {
    /// Starts the thread that copies data of open transactions to the backup: one round after each pause of `pause`. If
    /// the store has no backup directory, no thread is started.
    pub(crate) fn start(engine: &Arc<Engine<Store>>, pause: Duration) -> io::Result<Self> {
        let stop = Arc::new(StopFlag::default());
        let has_backup = |store: &TransactionalStore| store.backups.directory().is_some();
        if !engine.backing().transactional().is_some_and(has_backup) {
            return Ok(Self { stop, thread: None });
        }
        let engine = Arc::clone(engine);
        let thread_stop = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("firn-backup".into())
            .spawn(move || back_up_in_rounds(&engine, &thread_stop, pause))?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Stops the thread after its current round, and waits for its end.
    pub(crate) fn stop(&mut self) {
        *self.stop.is_set.lock() = true;
        self.stop.changed.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that copies to the backup panicked");
        }
    }
}

impl Drop for BackupThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A request to finish a commit from a backup.
#[derive(Clone, Debug)]
pub struct FromBackup {
    /// The value of `backup=`, or a directory below it.
    pub dir: PathBuf,
    /// The backing, with its files as they were before the transaction.
    pub backing: PathBuf,
    /// Number of the transaction to commit; `None` leaves the transaction prepared.
    pub id: Option<u64>,
    /// Checked options, of which `arena-dir` is used.
    pub options: Options,
}

/// What `recover_from_backup` did with the transaction.
#[derive(Clone, Debug, Default, Serialize)]
pub struct BackupReport {
    /// Number of the transaction.
    pub id: u64,
    /// Scope of the transaction, relative to the top of the backing; an empty path is the whole backing.
    pub scope: BytePath,
    /// Number of objects that the transaction changes.
    pub objects: u64,
    /// The transaction is committed; otherwise it is prepared.
    pub committed: bool,
    /// The backing had the changes of this transaction before the call.
    pub before: bool,
}

/// Brings the transaction that a backup holds into a backing in the prepared state, in which it waits for a commit or
/// abort. Commits it if the request names its number.
///
/// Returns what was done. Fails if the backing still has an arena (memory with newer data), is in use, or has an open
/// transaction that overlaps the scope (the directory) of this one.
pub fn recover_from_backup(request: &FromBackup) -> Result<BackupReport, RecoverError> {
    process::prepare();
    let read_only = false;
    let backing = preflight::check_backing(&request.backing, read_only)?;
    let FoundBackup { dir, log } = find_one_backup(request)?;
    let files = find_runtime_files(&backing, &request.options)?;
    if exists(&files.arena) {
        return Err(RecoverError::ArenaExists {
            arena: files.arena,
            backing,
        });
    }
    let mut locks = Locks::acquire_unmounted(&backing, &files, LockSharing::Exclusive)?;
    let lower_store = open_lower_store_unmounted(&backing, &request.options, locks.host_lease())?;
    let backup_store = store_without_layers(open_transaction_backup(&dir)?);
    let (store, _recovered) =
        TransactionalBacking::open(lower_store).map_err(AttachError::transactions(&backing))?;
    let mut report = BackupReport {
        id: log.id,
        scope: log.scope.as_slice().into(),
        objects: log.entries.len() as u64,
        ..BackupReport::default()
    };
    let transaction_name = dir.file_name().unwrap_or_default();
    let prepare_result =
        store
            .revival
            .revive(&backup_store, &backup_store.root(), transaction_name, &log);
    let was_applied_before = matches!(prepare_result, Err(ReviveError::Applied { .. }));
    match prepare_result {
        Ok(()) => {}
        // An earlier call, or the mount itself, has committed this transaction.
        Err(ReviveError::Applied { .. }) => {
            report.before = true;
            report.committed = true;
        }
        Err(ReviveError::Overlaps { scope }) => {
            let scope = shown_scope(scope.as_bytes());
            return Err(RecoverError::ScopeBusy { scope, backing });
        }
        Err(error) => return Err(AttachError::transactions(&backing)(error).into()),
    }
    let must_commit = request.id.is_some() && !was_applied_before;
    if must_commit {
        commit_prepared(&store, &log)?;
        report.committed = true;
    }
    if report.committed {
        remove_applied_backup(&dir);
    }
    Ok(report)
}

/// Commits the prepared transaction of a backup, and applies the commit: makes its changes in the backing.
fn commit_prepared(store: &TransactionalStore, log: &ChangeLog) -> Result<(), RecoverError> {
    let Some(prepared) = store.current_transaction(&log.scope) else {
        return Err(CommitError::Stage(StageError::NoTransaction).into());
    };
    prepared.decide(log.id)?.apply()?;
    Ok(())
}

/// Removes the backup of a commit that is applied.
///
/// A failure is only logged: a later recovery finds that the backup is applied already and ignores it.
fn remove_applied_backup(dir: &Path) {
    let (Some(mount_dir), Some(name)) = (dir.parent(), dir.file_name()) else {
        return;
    };
    let remove = || {
        let mount_dir = open_private_dir(CWD, mount_dir)?;
        let backups =
            DirBacking::from_dir(mount_dir, dir).map_err(AttachError::io("open the backup"))?;
        TransactionalBacking::remove_backup(&backups, &name.to_string_lossy())
            .map_err(AttachError::from)
    };
    if let Err(error) = remove() {
        tracing::warn!(%error, place = %quoted_path(dir), "cannot remove the backup of a commit that is complete");
    }
}

/// Opens a directory of a backup. Its contents are trusted, so it must be private to this user.
fn open_transaction_backup(dir: &Path) -> Result<DirBacking, AttachError> {
    let opened = open_private_dir(CWD, dir)?;
    let unusable = |source| AttachError::BackupDirectory {
        path: dir.to_owned(),
        source,
    };
    DirBacking::from_dir(opened, dir).map_err(unusable)
}

/// A complete backup of one transaction, and its directory.
struct FoundBackup {
    dir: PathBuf,
    log: ChangeLog,
}

/// A search for the backup that a request names.
struct BackupSearch<'a> {
    request: &'a FromBackup,
    /// The backups that match the request.
    matches: Vec<FoundBackup>,
    /// Descriptions of the backups that do not match or cannot be used, for an error.
    rejected: Vec<String>,
}

/// Returns the only backup of a transaction that matches the request: it lies at or below the named directory, and has
/// the wanted number if there is one. Fails if there is no match, or more than one.
fn find_one_backup(request: &FromBackup) -> Result<FoundBackup, RecoverError> {
    let unusable = |source| AttachError::BackupDirectory {
        path: request.dir.clone(),
        source,
    };
    let mut search = BackupSearch {
        request,
        matches: Vec::new(),
        rejected: Vec::new(),
    };
    // The user may name the directory of the option, the directory of one mount, or that of one transaction.
    let top = request.dir.canonicalize().map_err(unusable)?;
    if !search.add_if_backup(&top)? {
        for mount in list_subdirectories(&top).map_err(unusable)? {
            if search.add_if_backup(&mount)? {
                continue;
            }
            // A directory of another user cannot be read when users share the parent, so it is skipped.
            for transaction in list_subdirectories(&mount).unwrap_or_default() {
                search.add_if_backup(&transaction)?;
            }
        }
    }
    search.finish()
}

/// Returns the paths of the directories in `dir`.
fn list_subdirectories(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut subdirectories = Vec::new();
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_type().is_ok_and(|file_type| file_type.is_dir()) {
            subdirectories.push(entry.path());
        }
    }
    Ok(subdirectories)
}

impl BackupSearch<'_> {
    /// Adds the backup of a transaction in `dir` to `matches`, or its description to `rejected` if it cannot be used or
    /// does not have the wanted id. Returns whether `dir` is the directory of a backup: it has a manifest file.
    fn add_if_backup(&mut self, dir: &Path) -> Result<bool, RecoverError> {
        if !dir.join(MANIFEST).is_file() {
            return Ok(false);
        }
        let store = match open_transaction_backup(dir) {
            Ok(store) => store,
            Err(error @ AttachError::Trust(_)) => {
                self.rejected.push(error.to_string());
                return Ok(true);
            }
            Err(error) => return Err(error.into()),
        };
        match TransactionalBacking::manifest(&store, &store.root())? {
            Some(Ok(log)) if self.request.id.is_none_or(|id| id == log.id) => {
                let dir = dir.to_owned();
                self.matches.push(FoundBackup { dir, log });
            }
            Some(Ok(log)) => {
                let quoted_dir = quoted_path(dir);
                self.rejected
                    .push(format!("{quoted_dir} has one with id {}", log.id));
            }
            Some(Err(error)) => {
                let manifest = dir.join(MANIFEST);
                self.rejected
                    .push(format!("{}: {error}", quoted_path(&manifest)));
            }
            // The manifest was removed after the test above.
            None => {}
        }
        Ok(true)
    }

    /// Returns the only backup that was found, or an error that lists what is there.
    fn finish(mut self) -> Result<FoundBackup, RecoverError> {
        match self.matches.len() {
            1 => Ok(self.matches.remove(0)),
            0 => Err(self.no_match_error()),
            _ => {
                let descriptions: Vec<String> = self
                    .matches
                    .iter()
                    .map(|backup| format!("{} (id {})", quoted_path(&backup.dir), backup.log.id))
                    .collect();
                let all = descriptions.join(", ");
                Err(RecoverError::SeveralBackups { all })
            }
        }
    }

    /// Returns the error for a search without a matching backup of a transaction; it lists the backups that do not
    /// match.
    fn no_match_error(&self) -> RecoverError {
        let wanted = match self.request.id {
            Some(id) => format!(" with id {id}"),
            None => String::new(),
        };
        let others = if self.rejected.is_empty() {
            String::new()
        } else {
            format!(" ({})", self.rejected.join("; "))
        };
        RecoverError::NoMatchingBackup {
            dir: self.request.dir.clone(),
            wanted,
            others,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(dir: &Path) -> CheckedPaths {
        let [backing, mount_point] = ["backing", "mnt"].map(|name| dir.join(name));
        for path in [&backing, &mount_point] {
            std::fs::create_dir_all(path).unwrap();
        }
        CheckedPaths {
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
            check_backup_dir(&options, &checked)
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
        let refusal = |id| {
            find_one_backup(&request(id))
                .err()
                .expect("refused")
                .to_string()
        };
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
