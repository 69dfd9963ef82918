//! Copying what is staged to the backup, and removing it when its transaction is over.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use firn_backing::{Backing, Errno, Kind, SyncScope};

use super::MANIFEST;
use super::content::copy_out;
use super::mirror::{
    CopiedFile, Copy, Mirror, Progress, SlotState, Stamp, Told, backup_failed, file_name, is_name,
    load, load_name, remove_manifest_of, token, unlink_if_there,
};
use super::portable::Paths;
use crate::change_log::{ChangeLog, Direction, Staged, StagedObject};
use crate::error::{BackupError, StoreError};
use crate::lower_backing::LowerBacking;
use crate::own::OwnError;
use crate::scope::Scope;
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;

/// The backup of prepared transactions, if there is one.
pub struct Backups<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    /// Set at most once, before programs use the mount.
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

    /// Where the backups of this mount are.
    pub fn directory(&self) -> Option<&B> {
        self.mirror.get().map(|mirror| &mirror.store)
    }

    /// How far the backup of a transaction is.
    pub(crate) fn backup_progress(&self, scope: &Scope<B>) -> Option<Progress> {
        let mirror = self.mirror.get()?;
        let told = mirror.told.lock().get(&scope.serial).cloned();
        let Told { progress, at } = told.unwrap_or_default();
        Some(Progress {
            age: at.map(|at| at.elapsed()),
            ..progress
        })
    }

    /// One round: copies files that have stopped changing, and removes transactions that are over.
    pub fn back_up_ahead(&self) {
        let Some(mirror) = self.mirror.get() else {
            return;
        };
        for scope in self.scopes.all() {
            mirror.with_place_in_round(scope.serial, |place, hurry| {
                if !scope.is_open() {
                    return;
                }
                let result = self.copy_ahead(mirror, place, hurry, &scope);
                // It may have ended meanwhile, and its staged files are gone.
                if scope.is_open() {
                    let left = result.as_ref().copied().unwrap_or(0);
                    mirror.tell(&scope, place, &result, left);
                }
            });
        }
        for name in mirror.names_of_over() {
            if let Err(errno) = mirror.remove_over(&name) {
                tracing::debug!(%errno, name, "cannot remove a backup that is over");
            }
        }
    }

    /// Returns the bytes that the backup does not have yet.
    fn copy_ahead(
        &self,
        mirror: &Mirror<B>,
        place: &mut SlotState<B>,
        hurry: &AtomicU32,
        scope: &Arc<Scope<B>>,
    ) -> Result<u64, BackupError> {
        let mut round = Round {
            base: &self.lower.base,
            store: &mirror.store,
            copy: self.copy_of(mirror, place, scope)?,
            hurry,
            seen: HashMap::new(),
            left_bytes: 0,
        };
        for (name, ..) in staging::list(&self.lower.base, &scope.new)? {
            let dir = self
                .lower
                .base
                .lookup(&scope.new, OsStr::from_bytes(&name))?
                .0;
            round.visit_dir(&name, &dir)?;
        }
        round.finish()
    }

    /// The copy of a transaction that is open or is being prepared; it has no manifest.
    fn copy_of<'a>(
        &self,
        mirror: &Mirror<B>,
        place: &'a mut SlotState<B>,
        scope: &Scope<B>,
    ) -> Result<&'a mut Copy<B>, BackupError> {
        if place.copy.is_none() {
            let name = format!("tx-{}-{}", scope.serial, token().map_err(backup_failed)?);
            // In this order, so that every directory in the backup is known to the backing.
            staging::store(
                &self.lower.base,
                &scope.dir,
                staging::BACKUP,
                name.as_bytes(),
            )?;
            let dir =
                staging::dir(&mirror.store, &mirror.store.root(), &name).map_err(backup_failed)?;
            place.copy = Some(Copy::new(name, dir, false));
        }
        let copy = place.copy.as_mut().expect("just made");
        mirror.withdraw(copy).map_err(backup_failed)?;
        Ok(copy)
    }

    /// Whether the backup has all of a prepared transaction.
    pub(crate) fn is_backed_up(&self, scope: &Scope<B>) -> bool {
        let Some(mirror) = self.mirror.get() else {
            return true;
        };
        mirror.with_place(scope.serial, |place| place.is_whole())
    }

    /// Makes the backup whole, durably. The caller keeps the staged copies unchanged until it returns.
    pub(crate) fn back_up(&self, scope: &Scope<B>, record: &ChangeLog) -> Result<(), BackupError> {
        let Some(mirror) = self.mirror.get() else {
            return Ok(());
        };
        let result = mirror.with_place(scope.serial, |place| {
            let result = self.back_up_now(mirror, place, scope, record);
            mirror.tell(scope, place, &result, 0);
            if let Ok(bytes) = &result
                && let Some(told) = mirror.told.lock().get_mut(&scope.serial)
            {
                told.progress.copied_bytes = *bytes;
            }
            result
        });
        if result.is_err() {
            self.withdraw_backup(scope);
        }
        result.map(drop)
    }

    fn back_up_now(
        &self,
        mirror: &Mirror<B>,
        place: &mut SlotState<B>,
        scope: &Scope<B>,
        record: &ChangeLog,
    ) -> Result<u64, BackupError> {
        let before = self.lower.committed(&scope.path)?;
        for name in mirror.names_of_over() {
            remove_manifest_of(&mirror.store, &name)?;
        }
        let copy = self.copy_of(mirror, place, scope)?;
        let mut log = Paths::new(&self.lower.base, self.lower.device, record).portable_log()?;
        log.id_before = before;
        let mut staged = Vec::new();
        for at in log
            .entries
            .iter()
            .flat_map(|entry| entry.new_at.iter().chain(&entry.redo.copy_at))
        {
            staged.push(self.store(mirror, copy, scope, at)?);
        }
        log.staged = staged;
        let bytes = log
            .staged
            .iter()
            .filter_map(|one| one.content.as_ref())
            .map(|content| content.size)
            .sum();
        mirror
            .store
            .sync_scope(SyncScope::Changes)
            .map_err(backup_failed)?;
        // Where this fails, too.
        copy.has_manifest = true;
        staging::store(&mirror.store, &copy.dir, MANIFEST, &log.encode()).map_err(backup_failed)?;
        mirror
            .store
            .sync_dir(&mirror.store.root())
            .map_err(backup_failed)?;
        copy.is_whole = true;
        Ok(bytes)
    }

    fn store(
        &self,
        mirror: &Mirror<B>,
        copy: &mut Copy<B>,
        scope: &Scope<B>,
        at: &Staged,
    ) -> Result<StagedObject, BackupError> {
        let staging_dir = self.lower.base.lookup(&scope.new, OsStr::new(&at.0))?.0;
        let (inode, attr) = self.lower.base.lookup(&staging_dir, OsStr::new(&at.1))?;
        let file = file_name(at);
        let content = match copy.find_copied(&file, Stamp::of(&attr)) {
            _ if attr.kind != Kind::File => None,
            Some(content) => Some(content.clone()),
            None => {
                // Not recorded as copied: where the prepare fails, a change soon after may leave the same times.
                copy.copied.remove(&file);
                let to_end = || true;
                let dir = &copy.dir;
                let content = copy_out(&self.lower.base, &inode, &mirror.store, dir, &file, to_end);
                Some(content?)
            }
        };
        Ok(StagedObject {
            at: at.clone(),
            attributes: staging::read_attributes(&self.lower.base, &inode, &attr)?,
            rdev: attr.rdev,
            target: if attr.kind == Kind::Symlink {
                self.lower.base.readlink(&inode)?
            } else {
                Vec::new()
            },
            content,
        })
    }

    /// The transaction was not prepared after all.
    pub(crate) fn withdraw_backup(&self, scope: &Scope<B>) {
        let Some(mirror) = self.mirror.get() else {
            return;
        };
        mirror.with_place(scope.serial, |place| {
            if let Some(copy) = &mut place.copy
                && let Err(errno) = mirror.withdraw(copy)
            {
                tracing::warn!(%errno, "a backup tells of a prepare that failed");
            }
        });
    }

    /// The transaction is going to be aborted. Its backup is invalidated before its record is removed from the backing: else
    /// it would seem to be all that is left of it. Its bytes may be removed later.
    pub(crate) fn withdraw_for_good(&self, serial: u64) -> Result<(), BackupError> {
        let Some(mirror) = self.mirror.get() else {
            return Ok(());
        };
        mirror.with_place(serial, |place| {
            if let Some(copy) = &mut place.copy {
                mirror
                    .withdraw(copy)
                    .map_err(|source| BackupError::NotRemoved { source })?;
            }
            drop_copy(mirror, place, serial);
            Ok(())
        })
    }

    /// The transaction is applied, which the number of the last commit tells until the next one.
    pub(crate) fn drop_backup(&self, serial: u64) {
        let Some(mirror) = self.mirror.get() else {
            return;
        };
        mirror.with_place(serial, |place| drop_copy(mirror, place, serial));
    }

    /// Before the number of the last commit changes: invalidates what was applied and is still in the backup.
    pub(crate) fn withdraw_what_is_over(&self) -> Result<(), BackupError> {
        let Some(mirror) = self.mirror.get() else {
            return Ok(());
        };
        mirror
            .names_of_over()
            .iter()
            .try_for_each(|name| remove_manifest_of(&mirror.store, name))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Names of the backups that the backing knows of: to be asked before [`TransactionalBacking::open`], which ends
    /// transactions. In the backup, `store`, those are invalidated that it is going to undo: once the backing has no record
    /// of them they would seem to be all that is left.
    pub fn known_backups(base: &B, store: Option<&B>) -> Result<BTreeSet<String>, BackupError> {
        let mut known = BTreeSet::new();
        let Some((firn, _)) = staging::find_dir(base, &base.root(), staging::TOP)? else {
            return Ok(known);
        };
        for (name, ..) in staging::list(base, &firn)? {
            if name.starts_with(b"tx-") {
                let name = String::from_utf8_lossy(&name);
                let found = staging::must_find_dir(base, &firn, &name);
                let dir = found.map_err(|error| error.below(staging::TOP))?;
                let Some(backup) = load_name(base, &dir)? else {
                    continue;
                };
                let is_undecided =
                    |file| Ok::<_, Errno>(staging::find(base, &dir, OsStr::new(file))?.is_none());
                if let Some(store) = store
                    && is_undecided(staging::RECORD)?
                    && is_undecided(staging::COMMIT)?
                {
                    remove_manifest_of(store, &backup)?;
                }
                known.insert(backup);
            }
        }
        Ok(known)
    }

    /// Adds a backup in `store`, a directory of this mount alone. Removes directories of transactions that are over.
    /// A directory of an unknown transaction is an error, because it may be all that is left of it.
    pub fn backed_up(self, store: B, known: &BTreeSet<String>) -> Result<Self, BackupError> {
        let mirror = Mirror::new(store);
        let store = &mirror.store;
        let scopes = self.scopes.all();
        let root = store.root();
        for (name, ..) in staging::list(store, &root).map_err(backup_failed)? {
            let Some(name) = String::from_utf8(name).ok().filter(|name| is_name(name)) else {
                continue;
            };
            let dir = staging::must_find_dir(store, &root, &name).map_err(backup_failed)?;
            let mut owner = None;
            for scope in &scopes {
                if load_name(&self.lower.base, &scope.dir)?.as_ref() == Some(&name) {
                    owner = Some(scope.serial);
                }
            }
            let manifest = load(store, &dir)?;
            if let Some(serial) = owner {
                mirror.adopt(serial, Copy::new(name, dir, manifest.is_some()));
                continue;
            }
            if let Some(Ok(log)) = manifest
                && !known.contains(&name)
                && self.lower.committed(log.scope_after(Direction::Redo))? != Some(log.id)
            {
                return Err(BackupError::UnknownTransaction { id: log.id, name });
            }
            mirror.over.lock().insert(name);
        }
        let is_first = self.backups.mirror.set(mirror).is_ok();
        assert!(is_first, "a mount has one backup");
        for scope in &scopes {
            // It was prepared without a backup. The status and a commit say what is wrong.
            if let Some(record) = &scope.recovered
                && let Err(error) = self.backups.back_up(scope, record)
            {
                tracing::warn!(%error, id = record.id, "a prepared transaction is not in the backup");
            }
        }
        Ok(self)
    }
}

/// One look at the staged files of a transaction. What is the same as at the look before is copied.
struct Round<'a, B: Backing> {
    base: &'a B,
    store: &'a B,
    copy: &'a mut Copy<B>,
    /// Callers that wait for this to end: nothing is copied meanwhile.
    hurry: &'a AtomicU32,
    seen: HashMap<String, Stamp>,
    /// Bytes that the backup does not have yet.
    left_bytes: u64,
}

impl<B: Backing> Round<'_, B> {
    fn visit_dir(&mut self, dir_name: &[u8], dir: &B::Inode) -> Result<(), BackupError> {
        let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
        for (name, _, kind) in staging::list(self.base, dir)? {
            // One more name of an object that is not staged.
            if name.starts_with(b"l") || kind.is_some_and(|kind| kind != Kind::File) {
                continue;
            }
            let found = staging::find(self.base, dir, OsStr::from_bytes(&name))?;
            if let Some((inode, attr)) = found
                && attr.kind == Kind::File
            {
                let file = file_name(&(text(dir_name), text(&name)));
                self.visit_file(file, &inode, Stamp::of(&attr))?;
            }
        }
        Ok(())
    }

    fn visit_file(
        &mut self,
        file: String,
        inode: &B::Inode,
        now: Stamp,
    ) -> Result<(), BackupError> {
        let is_quiet = self.copy.seen.get(&file) == Some(&now);
        self.seen.insert(file.clone(), now);
        let is_copied = self.copy.find_copied(&file, now).is_some()
            || (is_quiet && self.copy_file(file, inode, now)?);
        if !is_copied {
            self.left_bytes += now.size;
        }
        Ok(())
    }

    /// False: the file changed during the copy, or another thread waits for this round to end.
    fn copy_file(
        &mut self,
        file: String,
        inode: &B::Inode,
        now: Stamp,
    ) -> Result<bool, BackupError> {
        let go_on = || self.hurry.load(Ordering::Relaxed) == 0;
        if !go_on() {
            return Ok(false);
        }
        self.copy.copied.remove(&file);
        let copied = copy_out(self.base, inode, self.store, &self.copy.dir, &file, go_on);
        let content = match copied {
            Err(BackupError::Store(StoreError::Own(OwnError::Backing(Errno::AGAIN)))) => {
                return Ok(false);
            }
            copied => copied?,
        };
        if Stamp::of(&self.base.attr(inode)?) != now {
            return Ok(false);
        }
        let copied = CopiedFile {
            stamp: now,
            content,
        };
        self.copy.copied.insert(file, copied);
        Ok(true)
    }

    /// Removes what was copied of files that are not staged any more.
    fn finish(self) -> Result<u64, BackupError> {
        let is_gone = |file: &&String| !self.seen.contains_key(*file);
        for file in self.copy.copied.keys().filter(is_gone) {
            unlink_if_there(self.store, &self.copy.dir, OsStr::new(file)).map_err(backup_failed)?;
        }
        self.copy
            .copied
            .retain(|file, _| self.seen.contains_key(file));
        self.copy.seen = self.seen;
        Ok(self.left_bytes)
    }
}

fn drop_copy<B: Backing>(mirror: &Mirror<B>, place: &mut SlotState<B>, serial: u64) {
    mirror.told.lock().remove(&serial);
    let Some(copy) = place.copy.take() else {
        return;
    };
    if let Err(errno) = mirror.remove_over(&copy.name) {
        tracing::warn!(%errno, name = copy.name, "cannot remove a backup that is over; it is tried again");
    }
}
