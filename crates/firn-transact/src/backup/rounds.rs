//! [`Backups`]: copies a transaction's files to the backup directory, and removes the copies of ended transactions.
//!
//! A *staged file* has new bytes in the transaction's directory. While the transaction is open, *rounds* copy those
//! that have not changed since the round before. A prepare, which makes the transaction durable, copies all that are
//! left, and last the *manifest*: the list of files and changes. The *mirror* is the state of the backup
//! ([`super::mirror`]). On a mount without a backup there is no mirror, and the calls of [`Backups`] do nothing.
//!
//! Relies on the caller of [`Backups::back_up`], which keeps the staged files unchanged until the call returns.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use firn_backing::{Attr, Backing, Errno, Kind, SyncScope};

use super::MANIFEST;
use super::content::{COPY_STOPPED, copy_to_backup};
use super::mirror::{
    CopiedFile, CopyState, FileVersion, Mirror, Progress, TransactionCopy, backup_failed,
    backup_file_name, is_directory_name, load_directory_name, load_manifest, new_token,
    remove_manifest_of, unlink_if_exists,
};
use super::portable::PortableLogMaker;
use crate::change_log::{BackupContent, ChangeLog, Direction, StagedObject, StagedPath};
use crate::error::{BackupError, StoreError};
use crate::history::ANCHOR;
use crate::lower_backing::LowerBacking;
use crate::own::OwnError;
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;

/// For the progress after a prepare, which copies all bytes, and after a round that failed.
const NO_BYTES_LEFT: u64 = 0;

/// The backup of prepared transactions, if the mount has one.
pub struct Backups<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    /// The backup. It is set at most once, before programs use the mount.
    pub(crate) mirror: OnceLock<Mirror<B>>,
}

impl<B: Backing> Backups<B> {
    pub(crate) fn new(lower: &Arc<LowerBacking<B>>, scopes: &Arc<Scopes<B>>) -> Self {
        Self {
            lower: Arc::clone(lower),
            scopes: Arc::clone(scopes),
            mirror: OnceLock::new(),
        }
    }

    /// Returns the backup directory of this mount; `None` without a backup.
    pub fn directory(&self) -> Option<&B> {
        self.mirror.get().map(|mirror| &mirror.store)
    }

    /// Returns the progress of the backup of a transaction; `None` without a backup.
    pub(crate) fn backup_progress(&self, scope: &Scope<B>) -> Option<Progress> {
        let mirror = self.mirror.get()?;
        let entry = mirror.progress.lock().get(&scope.serial).cloned();
        let entry = entry.unwrap_or_default();
        Some(Progress {
            age: entry.last_round.map(|end| end.elapsed()),
            ..entry.progress
        })
    }

    /// Runs one round: copies to the backup those new files of open transactions that have not changed since the last
    /// round, so that a prepare has less to copy. Also removes the copies of ended transactions.
    ///
    /// Errors are recorded for the status. Does nothing on a mount without a backup.
    pub fn back_up_ahead(&self) {
        let Some(mirror) = self.mirror.get() else {
            return;
        };
        for scope in self.scopes.all() {
            mirror.with_copy_in_round(scope.serial, |state, waiting_threads| {
                self.run_round_of(mirror, state, waiting_threads, &scope);
            });
        }
        for name in mirror.ended_dir_names() {
            if let Err(errno) = mirror.remove_ended(&name) {
                tracing::debug!(%errno, name, "cannot remove the backup of an ended transaction");
            }
        }
    }

    /// Runs the round of one transaction, and records its result for the status. Does nothing if the transaction is not
    /// open.
    fn run_round_of(
        &self,
        mirror: &Mirror<B>,
        state: &mut CopyState<B>,
        waiting_threads: &AtomicU32,
        scope: &Arc<Scope<B>>,
    ) {
        if !scope.is_open() {
            return;
        }
        let result = self.copy_ahead(mirror, state, waiting_threads, scope);
        // If the transaction has ended meanwhile, its staged files are gone, and an error only says so.
        if scope.is_open() {
            let left_bytes = result.as_ref().copied().unwrap_or(NO_BYTES_LEFT);
            mirror.record_progress(scope, state, &result, left_bytes);
        }
    }

    /// Copies to the backup those new files of one transaction that have not changed since the last round. Returns the
    /// number of bytes that it left for later. While `waiting_threads` is not 0, threads wait for the end of the round,
    /// so nothing is copied.
    fn copy_ahead(
        &self,
        mirror: &Mirror<B>,
        state: &mut CopyState<B>,
        waiting_threads: &AtomicU32,
        scope: &Arc<Scope<B>>,
    ) -> Result<u64, BackupError> {
        let mut round = Round {
            base: &self.lower.base,
            store: &mirror.store,
            copy: self.incomplete_copy(mirror, state, scope)?,
            waiting_threads,
            seen_versions: HashMap::new(),
            left_bytes: 0,
        };
        for (name, ..) in staging::list(&self.lower.base, &scope.new)? {
            let (dir, _) = self
                .lower
                .base
                .lookup(&scope.new, OsStr::from_bytes(&name))?;
            round.visit_dir(&name, &dir)?;
        }
        round.finish()
    }

    /// Returns the copy of a transaction that is open or is being prepared. Makes it if there is none, and withdraws it
    /// if it has a manifest.
    fn incomplete_copy<'a>(
        &self,
        mirror: &Mirror<B>,
        state: &'a mut CopyState<B>,
        scope: &Scope<B>,
    ) -> Result<&'a mut TransactionCopy<B>, BackupError> {
        let copy = match &mut state.copy {
            Some(copy) => copy,
            missing => missing.insert(self.make_copy(mirror, scope)?),
        };
        mirror.withdraw(copy).map_err(backup_failed)?;
        Ok(copy)
    }

    /// Makes the directory of a transaction in the backup, under a name that no other transaction ever has.
    fn make_copy(
        &self,
        mirror: &Mirror<B>,
        scope: &Scope<B>,
    ) -> Result<TransactionCopy<B>, BackupError> {
        let token = new_token().map_err(backup_failed)?;
        let name = format!("tx-{}-{token}", scope.serial);
        // The name is stored first, so that the backing knows every directory in the backup.
        staging::replace_file(
            &self.lower.base,
            &scope.dir,
            staging::BACKUP,
            name.as_bytes(),
        )?;
        let dir =
            staging::make_dir(&mirror.store, &mirror.store.root(), &name).map_err(backup_failed)?;
        let has_manifest = false;
        Ok(TransactionCopy::new(name, dir, has_manifest))
    }

    /// Returns whether the copy of a prepared transaction is complete; true without a backup.
    pub(crate) fn is_backed_up(&self, scope: &Scope<B>) -> bool {
        let Some(mirror) = self.mirror.get() else {
            return true;
        };
        mirror.with_copy(scope.serial, |state| state.is_complete())
    }

    /// Completes the copy of a transaction in the backup, durably, so that its commit can be finished from the copy.
    /// `record` is the transaction's change log. After an error the copy is withdrawn: no commit can be finished from
    /// it.
    ///
    /// Does nothing on a mount without a backup. The caller keeps the transaction's files unchanged until the return.
    pub(crate) fn back_up(&self, scope: &Scope<B>, record: &ChangeLog) -> Result<(), BackupError> {
        let Some(mirror) = self.mirror.get() else {
            return Ok(());
        };
        let result = mirror.with_copy(scope.serial, |state| {
            let result = self.complete_copy(mirror, state, scope, record);
            mirror.record_progress(scope, state, &result, NO_BYTES_LEFT);
            // `record_progress` counts all files in the copy, also those that the transaction does not need any more.
            if let Ok(bytes) = &result
                && let Some(entry) = mirror.progress.lock().get_mut(&scope.serial)
            {
                entry.progress.copied_bytes = *bytes;
            }
            result
        });
        if result.is_err() {
            self.withdraw_backup(scope);
        }
        result.map(drop)
    }

    /// Copies the new objects of a transaction that its copy in the backup does not have. Then writes the manifest, the
    /// list of files and changes, with which the copy counts. Returns the number of bytes in the copy.
    fn complete_copy(
        &self,
        mirror: &Mirror<B>,
        state: &mut CopyState<B>,
        scope: &Scope<B>,
        record: &ChangeLog,
    ) -> Result<u64, BackupError> {
        let id_before = self.lower.present_commit_id(&scope.path)?;
        // Without their manifests, the copies of ended transactions do not look like prepared ones beside this one.
        for name in mirror.ended_dir_names() {
            remove_manifest_of(&mirror.store, &name)?;
        }
        let copy = self.incomplete_copy(mirror, state, scope)?;
        let mut log =
            PortableLogMaker::new(&self.lower.base, self.lower.device, record).make_log()?;
        log.id_before = id_before;
        let mut staged = Vec::new();
        let mut copied_bytes = 0;
        for entry in &log.entries {
            for path in entry.new_at.iter().chain(&entry.redo.copy_at) {
                let object = self.copy_staged(mirror, copy, scope, path)?;
                copied_bytes += object.content.as_ref().map_or(0, |content| content.size);
                staged.push(object);
            }
        }
        log.staged = staged;
        publish_manifest(&mirror.store, copy, &log).map_err(backup_failed)?;
        copy.is_complete = true;
        Ok(copied_bytes)
    }

    /// Copies one object of a transaction to the backup, and returns its description for the manifest, the backup's
    /// list of files and changes. A file that the backup has in this version is not copied again.
    ///
    /// `path` leads to the object in the transaction's directory in the backing.
    fn copy_staged(
        &self,
        mirror: &Mirror<B>,
        copy: &mut TransactionCopy<B>,
        scope: &Scope<B>,
        path: &StagedPath,
    ) -> Result<StagedObject, BackupError> {
        let base = &self.lower.base;
        let (staging_dir, _) = base.lookup(&scope.new, OsStr::new(&path.dir))?;
        let (inode, attr) = base.lookup(&staging_dir, OsStr::new(&path.name))?;
        let content = if attr.kind == Kind::File {
            let file_name = backup_file_name(path);
            Some(self.copy_staged_file(mirror, copy, &file_name, &inode, &attr)?)
        } else {
            None
        };
        Ok(StagedObject {
            at: path.clone(),
            attributes: staging::read_attributes(base, &inode, &attr)?,
            rdev: attr.rdev,
            target: if attr.kind == Kind::Symlink {
                base.readlink(&inode)?
            } else {
                Vec::new()
            },
            content,
        })
    }

    /// Copies a new file of a transaction to `file_name` in the transaction's copy in the backup, unless the copy has
    /// the file in this version. Returns what the manifest, the backup's list of files, says of the bytes.
    fn copy_staged_file(
        &self,
        mirror: &Mirror<B>,
        copy: &mut TransactionCopy<B>,
        file_name: &str,
        inode: &B::Inode,
        attr: &Attr,
    ) -> Result<BackupContent, BackupError> {
        if let Some(content) = copy.find_copied(file_name, FileVersion::from_attr(attr)) {
            return Ok(content.clone());
        }
        // The new copy is not recorded: if the prepare fails, a change soon afterwards may leave the same times.
        copy.copied.remove(file_name);
        let never_stop = || true;
        copy_to_backup(
            &self.lower.base,
            inode,
            &mirror.store,
            &copy.dir,
            file_name,
            never_stop,
        )
    }

    /// Withdraws the copy of a transaction whose prepare failed. An error is only logged, because the next prepare or
    /// round withdraws the copy again.
    pub(crate) fn withdraw_backup(&self, scope: &Scope<B>) {
        let Some(mirror) = self.mirror.get() else {
            return;
        };
        mirror.with_copy(scope.serial, |state| {
            if let Some(copy) = &mut state.copy
                && let Err(errno) = mirror.withdraw(copy)
            {
                tracing::warn!(%errno, "cannot remove the copy of a transaction from the backup, after its prepare \
                    failed");
            }
        });
    }

    /// Withdraws the copy of a transaction that is about to be aborted, and removes it if possible.
    ///
    /// The caller removes the transaction's record afterwards. In the other order a crash could leave only the copy,
    /// and the transaction would seem to be prepared.
    pub(crate) fn withdraw_for_abort(&self, serial: u64) -> Result<(), BackupError> {
        let Some(mirror) = self.mirror.get() else {
            return Ok(());
        };
        mirror.with_copy(serial, |state| {
            if let Some(copy) = &mut state.copy {
                mirror
                    .withdraw(copy)
                    .map_err(|source| BackupError::NotRemoved { source })?;
            }
            drop_copy(mirror, state, serial);
            Ok(())
        })
    }

    /// Removes the copy of an applied transaction. A copy that remains does no harm, because the number of the last
    /// commit shows that the transaction is applied.
    pub(crate) fn drop_backup(&self, serial: u64) {
        let Some(mirror) = self.mirror.get() else {
            return;
        };
        mirror.with_copy(serial, |state| drop_copy(mirror, state, serial));
    }

    /// Withdraws the copies of applied transactions that are not removed yet. Called before the number of the last
    /// commit changes, because that number shows that they are applied.
    pub(crate) fn withdraw_backups_of_applied(&self) -> Result<(), BackupError> {
        let Some(mirror) = self.mirror.get() else {
            return Ok(());
        };
        mirror
            .ended_dir_names()
            .iter()
            .try_for_each(|name| remove_manifest_of(&mirror.store, name))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Returns the names of the directories in the backup that stored transactions of the backing `base` refer to.
    /// Called before [`TransactionalBacking::open`], which ends transactions.
    ///
    /// Also removes from the backup `store` the manifests of the transactions that `open` will undo. With a manifest,
    /// the copy of such a transaction would later look like a prepared one that the backing has lost.
    pub fn known_backups(base: &B, store: Option<&B>) -> Result<BTreeSet<String>, BackupError> {
        let mut backup_names = BTreeSet::new();
        let found = staging::find_dir(base, &base.root(), staging::FIRN_DIR)?;
        let Some((transactions_dir, _)) = found else {
            return Ok(backup_names);
        };
        for (name, ..) in staging::list(base, &transactions_dir)? {
            if !name.starts_with(b"tx-") {
                continue;
            }
            let name = String::from_utf8_lossy(&name);
            let dir = staging::must_find_dir(base, &transactions_dir, &name)
                .map_err(|error| error.below(staging::FIRN_DIR))?;
            let Some(backup_name) = load_directory_name(base, &dir)? else {
                continue;
            };
            let has_record = |record: &str| {
                staging::find(base, &dir, OsStr::new(record)).map(|found| found.is_some())
            };
            if let Some(store) = store {
                // A transaction that is neither prepared nor decided is undone by `open`.
                let is_undone = !has_record(staging::RECORD)? && !has_record(staging::COMMIT)?;
                if is_undone {
                    remove_manifest_of(store, &backup_name)?;
                }
            }
            backup_names.insert(backup_name);
        }
        Ok(backup_names)
    }

    /// Returns the serial number of the transaction in `scopes` that has the directory `name` in the backup as its
    /// copy; `None` if there is none.
    fn find_backup_owner(
        &self,
        scopes: &[Arc<Scope<B>>],
        name: &str,
    ) -> Result<Option<u64>, BackupError> {
        let mut serial_of_owner = None;
        for scope in scopes {
            let backup_name = load_directory_name(&self.lower.base, &scope.dir)?;
            if backup_name.as_deref() == Some(name) {
                serial_of_owner = Some(scope.serial);
            }
        }
        Ok(serial_of_owner)
    }

    /// Adds a backup in `store`, a directory that no other mount uses, and completes the copies of the transactions
    /// that are prepared. `known` are the names that [`TransactionalBacking::known_backups`] returned.
    ///
    /// Directories of ended transactions are removed later. Fails with `UnknownTransaction` if a directory has the
    /// manifest of a transaction that the backing does not have, because nothing else may be left of that transaction.
    pub fn backed_up(self, store: B, known: &BTreeSet<String>) -> Result<Self, BackupError> {
        let mirror = Mirror::new(store);
        let store = &mirror.store;
        let scopes = self.scopes.all();
        let root = store.root();
        for (name, ..) in staging::list(store, &root).map_err(backup_failed)? {
            let Ok(name) = String::from_utf8(name) else {
                continue;
            };
            if !is_directory_name(&name) {
                continue;
            }
            let dir = staging::must_find_dir(store, &root, &name).map_err(backup_failed)?;
            let serial_of_owner = self.find_backup_owner(&scopes, &name)?;
            let manifest = load_manifest(store, &dir)?;
            if let Some(serial) = serial_of_owner {
                mirror.insert(serial, TransactionCopy::new(name, dir, manifest.is_some()));
                continue;
            }
            if let Some(Ok(log)) = manifest
                && !known.contains(&name)
            {
                let scope_after = log.scope_after(Direction::Redo);
                let is_applied = self.lower.present_commit_id(scope_after)? == Some(log.id);
                if !is_applied {
                    return Err(BackupError::UnknownTransaction { id: log.id, name });
                }
            }
            mirror.ended_dirs.lock().insert(name);
        }
        // From here on the mount has the backup.
        let is_first = self.backups.mirror.set(mirror).is_ok();
        assert!(is_first, "a mount has one backup");
        for scope in &scopes {
            // The transaction may have been prepared without a backup. The status and a commit report the error.
            if let Some(record) = &scope.recovered
                && let Err(error) = self.backups.back_up(scope, record)
            {
                tracing::warn!(%error, id = record.id, "a prepared transaction could not be copied to the backup");
            }
        }
        Ok(self)
    }
}

/// Writes the manifest of a copy, durably, after the files that it refers to.
fn publish_manifest<B: Backing>(
    store: &B,
    copy: &mut TransactionCopy<B>,
    manifest: &ChangeLog,
) -> Result<(), Errno> {
    store.sync_scope(SyncScope::Changes)?;
    // The flag is set before the write, because after an error the manifest may exist.
    copy.has_manifest = true;
    staging::replace_file(store, &copy.dir, MANIFEST, &manifest.encode())?;
    store.sync_dir(&store.root())
}

/// One round of one transaction: a file that has the same version as in the last round is copied.
struct Round<'a, B: Backing> {
    base: &'a B,
    store: &'a B,
    copy: &'a mut TransactionCopy<B>,
    /// Number of threads that wait for the end of the round. While it is not 0, nothing is copied.
    waiting_threads: &'a AtomicU32,
    /// Versions of the staged files in this round.
    seen_versions: HashMap<String, FileVersion>,
    /// Bytes of the files that this round did not copy.
    left_bytes: u64,
}

impl<B: Backing> Round<'_, B> {
    /// Visits the files in one directory of a transaction's new objects, and copies those that have not changed since
    /// the last round to the backup.
    fn visit_dir(&mut self, dir_name: &[u8], dir: &B::Inode) -> Result<(), BackupError> {
        let to_text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        for (name, _, kind) in staging::list(self.base, dir)? {
            // An anchor is a further link to an object of the backing and has no new content.
            let is_anchor = name.starts_with(ANCHOR.as_bytes());
            if is_anchor || kind.is_some_and(|kind| kind != Kind::File) {
                continue;
            }
            let found = staging::find(self.base, dir, OsStr::from_bytes(&name))?;
            if let Some((inode, attr)) = found
                && attr.kind == Kind::File
            {
                let file_name = backup_file_name(&StagedPath {
                    dir: to_text(dir_name),
                    name: to_text(&name),
                });
                self.visit_file(file_name, &inode, FileVersion::from_attr(&attr))?;
            }
        }
        Ok(())
    }

    /// Copies a file if it has not changed since the last round; otherwise counts its bytes as left.
    fn visit_file(
        &mut self,
        file_name: String,
        inode: &B::Inode,
        version: FileVersion,
    ) -> Result<(), BackupError> {
        let is_unchanged = self.copy.seen_versions.get(&file_name) == Some(&version);
        self.seen_versions.insert(file_name.clone(), version);
        let is_copied = self.copy.find_copied(&file_name, version).is_some()
            || (is_unchanged && self.copy_file(file_name, inode, version)?);
        if !is_copied {
            self.left_bytes += version.size;
        }
        Ok(())
    }

    /// Copies a file of a transaction to the backup. `version` is the file's size and times before the copy.
    ///
    /// Returns false if the file changed during the copy or a thread waits for the end of the round; the file then does
    /// not count as copied.
    fn copy_file(
        &mut self,
        file_name: String,
        inode: &B::Inode,
        version: FileVersion,
    ) -> Result<bool, BackupError> {
        let may_continue = || self.waiting_threads.load(Ordering::Relaxed) == 0;
        if !may_continue() {
            return Ok(false);
        }
        // From here on the file in the backup does not count, until it is complete.
        self.copy.copied.remove(&file_name);
        let copied = copy_to_backup(
            self.base,
            inode,
            self.store,
            &self.copy.dir,
            &file_name,
            may_continue,
        );
        let content = match copied {
            // This error says that the copy was stopped, or that the file became shorter.
            Err(BackupError::Store(StoreError::Own(OwnError::Backing(COPY_STOPPED)))) => {
                return Ok(false);
            }
            copied => copied?,
        };
        let version_after = FileVersion::from_attr(&self.base.attr(inode)?);
        if version_after != version {
            return Ok(false);
        }
        self.copy
            .copied
            .insert(file_name, CopiedFile { version, content });
        Ok(true)
    }

    /// Removes the copies of files that are no longer staged. Returns the number of bytes that were not copied.
    fn finish(self) -> Result<u64, BackupError> {
        let is_removed = |file: &&String| !self.seen_versions.contains_key(*file);
        for file in self.copy.copied.keys().filter(is_removed) {
            unlink_if_exists(self.store, &self.copy.dir, OsStr::new(file))
                .map_err(backup_failed)?;
        }
        self.copy
            .copied
            .retain(|file, _| self.seen_versions.contains_key(file));
        self.copy.seen_versions = self.seen_versions;
        Ok(self.left_bytes)
    }
}

/// Drops the copy of an ended transaction, and removes its directory. If that fails, the next round removes it.
fn drop_copy<B: Backing>(mirror: &Mirror<B>, state: &mut CopyState<B>, serial: u64) {
    mirror.progress.lock().remove(&serial);
    let Some(copy) = state.copy.take() else {
        return;
    };
    if let Err(errno) = mirror.remove_ended(&copy.name) {
        tracing::warn!(%errno, name = copy.name, "cannot remove the backup of an ended transaction; firnd tries again");
    }
}
