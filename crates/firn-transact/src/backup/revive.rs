//! [`Revival`]: prepares a transaction again from its backup, after the host or `.firn/` was lost.
//!
//! `.firn/` has the files of transactions in the backing, the directory below the mount. The backing must have the tree
//! from before the transaction. It may be a copy with other inode numbers, so objects are found by path. The check of
//! the tree reads no file contents: it compares kinds, sizes, links, and the number of the last commit.
//!
//! Promise: after an error the backing is unchanged, apart from `.firn/`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, RenameFlags, SyncScope};

use super::content::{BackupDir, copy_from_backup};
use super::mirror::{backup_failed, load_manifest, remove_directory};
use crate::change_log::{
    BACKING_TOP_NUMBER, ChangeLog, Direction, EntryName, Identity, LogError, PortableIdentity,
    StagedObject, StagedPath,
};
use crate::error::{BackupError, ReviveError};
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::paths::{join, names_in};
use crate::recovery::StoredScopes;
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;

/// Returns the error of a backing that does not have the tree from before the transaction.
fn other_tree(path: &[u8], difference: &str) -> ReviveError {
    ReviveError::OtherTree {
        path: path.to_vec(),
        what: difference.into(),
    }
}

/// Returns whether `path` is `dir` or is below it.
fn is_at_or_below(path: &[u8], dir: &[u8]) -> bool {
    if dir.is_empty() {
        return true;
    }
    match path.strip_prefix(dir) {
        Some(suffix) => suffix.is_empty() || suffix[0] == b'/',
        None => false,
    }
}

/// An object of the backing that takes part in the revived transaction.
struct FoundObject<B: Backing> {
    inode: B::Inode,
    path: Vec<u8>,
}

/// The objects of the backing that a manifest refers to, by their numbers in it.
type FoundObjects<B> = HashMap<u64, FoundObject<B>>;

/// Prepares transactions again from their backups.
pub struct Revival<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) stored_scopes: Arc<StoredScopes<B>>,
}

impl<B: Backing> Revival<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        scopes: &Arc<Scopes<B>>,
        link_counts: &Arc<LinkCounts<B>>,
        stored_scopes: &Arc<StoredScopes<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            scopes: Arc::clone(scopes),
            link_counts: Arc::clone(link_counts),
            stored_scopes: Arc::clone(stored_scopes),
        }
    }

    /// Prepares a transaction again from its copy in the backup `store`, after the host or `.firn/` in the backing was
    /// lost. The transaction then waits for its decision.
    ///
    /// The copy is the directory `backup_dir` named `name`, and `manifest` is the change log in it.
    ///
    /// Fails with `OtherTree`, `Overlaps` or `Applied` if the backing does not have the tree from before the
    /// transaction, and with `Damaged` if the copy does not have the bytes that the manifest says.
    pub fn revive(
        &self,
        store: &B,
        backup_dir: &B::Inode,
        name: &OsStr,
        manifest: &ChangeLog,
    ) -> Result<(), ReviveError> {
        manifest
            .check_portable()
            .map_err(|_| ReviveError::Damaged {
                file: super::MANIFEST.into(),
            })?;
        self.check_state_before(manifest)?;
        let found_objects = self.find_objects(manifest)?;
        self.check_applicable(manifest, &found_objects)?;
        let backup = BackupDir {
            store,
            dir: backup_dir,
        };
        let transactions_dir = self.link_counts.make_hidden_transactions_dir()?;
        let serial = self.scopes.next_serial();
        let dir_name = format!("tx-{serial}");
        let dir = staging::make_dir(&self.lower.base, &transactions_dir, &dir_name)?;
        let staged = self
            .stage_objects(&backup, manifest, &found_objects, &dir)
            .and_then(|record| self.store_staged(record, &dir, name));
        let record = match staged {
            Ok(record) => record,
            Err(error) => {
                let removed = self
                    .lower
                    .remove_transaction(&transactions_dir, &dir, &dir_name);
                if let Err(errno) = removed {
                    tracing::warn!(%errno, name = dir_name, "cannot remove staged files; the next mount removes them");
                }
                return Err(error);
            }
        };
        // The rename prepares the transaction.
        let temporary_name = staging::new_name(staging::RECORD);
        self.lower.base.rename(
            &dir,
            OsStr::new(&temporary_name),
            &dir,
            OsStr::new(staging::RECORD),
            RenameFlags::empty(),
        )?;
        self.lower.base.sync_dir(&dir)?;
        Ok(self.stored_scopes.register_prepared(serial, dir, record)?)
    }

    /// Finds all objects of the backing that the manifest (the change log in a backup) refers to, by their paths.
    /// Returns them by their numbers in the manifest. Fails with `OtherTree` if one is missing or differs.
    fn find_objects(&self, manifest: &ChangeLog) -> Result<FoundObjects<B>, ReviveError> {
        let top = FoundObject {
            inode: self.lower.base.root(),
            path: Vec::new(),
        };
        let mut found_objects = HashMap::from([(BACKING_TOP_NUMBER, top)]);
        for entry in &manifest.entries {
            if let Some(identity) = &entry.portable {
                let object = FoundObject {
                    inode: self.find_object(identity)?,
                    path: identity.paths[0].clone(),
                };
                found_objects.insert(entry.number, object);
            }
        }
        Ok(found_objects)
    }

    /// Stores the files of a transaction whose objects are staged in `dir`, and syncs them. The record still has its
    /// temporary name. `backup_name` is the name of the copy; a later mount with the same backup continues with that
    /// copy.
    fn store_staged(
        &self,
        record: ChangeLog,
        dir: &B::Inode,
        backup_name: &OsStr,
    ) -> Result<ChangeLog, ReviveError> {
        let base = &self.lower.base;
        staging::replace_file(base, dir, staging::BACKUP, backup_name.as_bytes())?;
        staging::replace_file(base, dir, staging::OPEN, &record.scope)?;
        base.sync_scope(SyncScope::Changes)?;
        staging::write_new_file(base, dir, staging::RECORD, &record.encode())?;
        self.lower.sync_transactions_dir()?;
        Ok(record)
    }

    /// Fails with `Overlaps` if a stored transaction covers a part of what the transaction of `manifest` covers, under
    /// the path before or after its commit.
    fn check_no_overlap(&self, manifest: &ChangeLog) -> Result<(), ReviveError> {
        let scope_after = manifest.scope_after(Direction::Redo);
        let overlapping = self.scopes.paths_where(|scope| {
            is_at_or_below(&scope.path, &manifest.scope)
                || is_at_or_below(&manifest.scope, &scope.path)
                || scope.has_path(&manifest.scope)
                || scope.has_path(scope_after)
        });
        if let Some(overlapping_path) = overlapping.first() {
            return Err(ReviveError::Overlaps {
                scope: overlapping_path.as_slice().into(),
            });
        }
        Ok(())
    }

    /// Checks that the backing has the state from before the transaction of `manifest`, the change log in a backup.
    /// * No other transaction overlaps its scope, the directory that it covers.
    /// * The transaction is not applied already, under its old path or the new one.
    /// * The last commit of the scope is the one before the transaction. A backing without `.firn` has no last commit
    ///   and passes.
    fn check_state_before(&self, manifest: &ChangeLog) -> Result<(), ReviveError> {
        self.check_no_overlap(manifest)?;
        let scope_after = manifest.scope_after(Direction::Redo);
        if scope_after != manifest.scope
            && self.lower.present_commit_id(scope_after)? == Some(manifest.id)
        {
            return Err(ReviveError::Applied { id: manifest.id });
        }
        match self.lower.present_commit_id(&manifest.scope)? {
            last_id if last_id == manifest.id_before => Ok(()),
            // A copy of the tree without `.firn`.
            None => Ok(()),
            Some(id) if id == manifest.id => Err(ReviveError::Applied { id }),
            Some(id) => Err(other_tree(
                &manifest.scope,
                &format!("its last commit is {id}, not the one before the transaction"),
            )),
        }
    }

    /// Returns the object at `path`, and its attributes.
    fn look_up_path(&self, path: &[u8]) -> Result<(B::Inode, Attr), Errno> {
        let mut inode = self.lower.base.root();
        let mut attr = self.lower.base.attr(&inode)?;
        for name in names_in(path) {
            (inode, attr) = self.lower.base.lookup(&inode, name)?;
        }
        Ok((inode, attr))
    }

    /// Returns the object of the backing that has all paths of `identity`, which a backup stored. Fails with
    /// `OtherTree` if the names lead to different objects, or to an object of another kind or size.
    fn find_object(&self, identity: &PortableIdentity) -> Result<B::Inode, ReviveError> {
        let mut last_found: Option<(B::Inode, Identity)> = None;
        for path in &identity.paths {
            let (inode, attr) = match self.look_up_path(path) {
                Ok(found) => found,
                Err(Errno::NOENT | Errno::NOTDIR) => {
                    return Err(other_tree(path, "it is not there"));
                }
                Err(errno) => return Err(errno.into()),
            };
            if attr.mode & libc::S_IFMT != identity.kind {
                return Err(other_tree(path, "it is of another kind"));
            }
            if identity.size.is_some_and(|size| size != attr.size) {
                return Err(other_tree(path, "it has another size"));
            }
            let found_identity = Identity::from_attr(&attr, self.lower.device);
            if let Some((_, last_identity)) = &last_found
                && *last_identity != found_identity
            {
                let first_path = firn_format::quote::quoted(&identity.paths[0]);
                let difference = format!("it is not the same object as {first_path}");
                return Err(other_tree(path, &difference));
            }
            last_found = Some((inode, found_identity));
        }
        let (inode, _) = last_found.expect("a manifest has a path for each object");
        Ok(inode)
    }

    /// Checks that the application of a commit to the backing would not fail half-way, because a new name exists
    /// already or a removed directory would not be empty.
    ///
    /// `log` has the transaction's changes; each entry has the names that its object has only `before` and only `after`
    /// it.
    fn check_applicable(
        &self,
        log: &ChangeLog,
        found_objects: &FoundObjects<B>,
    ) -> Result<(), ReviveError> {
        let removed_names: BTreeSet<&EntryName> =
            log.entries.iter().flat_map(|entry| &entry.before).collect();
        for entry in &log.entries {
            for new_name in &entry.after {
                self.must_be_free(new_name, &removed_names, found_objects)?;
            }
            let is_removed_dir = entry.is_dir && !entry.before.is_empty() && entry.after.is_empty();
            if is_removed_dir && let Some(dir) = found_objects.get(&entry.number) {
                self.must_become_empty(entry.number, dir, &removed_names)?;
            }
        }
        Ok(())
    }

    /// Checks that a name which the transaction adds will be free by then. Fails with `OtherTree` if the backing has it
    /// and it is not in `removed_names`, the names that the transaction removes.
    fn must_be_free(
        &self,
        new_name: &EntryName,
        removed_names: &BTreeSet<&EntryName>,
        found_objects: &FoundObjects<B>,
    ) -> Result<(), ReviveError> {
        let EntryName { dir, name } = new_name;
        // A directory that the transaction makes has no names yet.
        let Some(dir) = found_objects.get(dir) else {
            return Ok(());
        };
        let existing = staging::find(&self.lower.base, &dir.inode, OsStr::from_bytes(name))?;
        if existing.is_some() && !removed_names.contains(new_name) {
            return Err(other_tree(
                &join(&dir.path, name),
                "the transaction makes it, but it exists already",
            ));
        }
        Ok(())
    }

    /// Checks that a directory which the transaction removes will be empty by then. Fails with `OtherTree` if it has a
    /// name that is not in `removed_names`, the names that the transaction removes.
    ///
    /// `number` is the directory's number in the manifest, the backup's change log.
    fn must_become_empty(
        &self,
        number: u64,
        dir: &FoundObject<B>,
        removed_names: &BTreeSet<&EntryName>,
    ) -> Result<(), ReviveError> {
        for (name, ..) in staging::list(&self.lower.base, &dir.inode)? {
            if !removed_names.contains(&EntryName::new(number, name.clone())) {
                return Err(other_tree(
                    &join(&dir.path, &name),
                    "the transaction removes its directory, but does not remove this entry",
                ));
            }
        }
        Ok(())
    }

    /// Makes all new objects and copies of the manifest (the backup's change log) in the transaction's directory `dir`.
    /// Returns the change log with the inode numbers of this backing.
    ///
    /// `found_objects` are the objects of the backing that the manifest refers to.
    fn stage_objects(
        &self,
        backup: &BackupDir<'_, B>,
        manifest: &ChangeLog,
        found_objects: &FoundObjects<B>,
        dir: &B::Inode,
    ) -> Result<ChangeLog, ReviveError> {
        let base = &self.lower.base;
        let new = staging::make_dir(base, dir, staging::NEW)?;
        staging::make_dir(base, dir, staging::AWAY)?;
        // The caller has checked that the manifest lists each staged path that an entry has.
        let staged_identities = self.make_all_staged(backup, manifest, &new)?;
        // The change log of this backing: the same entries, but with inode numbers and not with paths.
        let mut record = ChangeLog {
            staged: Vec::new(),
            ..manifest.clone()
        };
        for entry in &mut record.entries {
            entry.portable = None;
            entry.identity = match &entry.new_at {
                Some(path) => staged_identities[path],
                None => self.read_identity(&found_objects[&entry.number].inode)?,
            };
            // A further link, by which the object is found when the commit is applied.
            if let Some(StagedPath { dir, name }) = &entry.anchor_at {
                let staging_dir = staging::make_dir(base, &new, dir)?;
                let inode = &found_objects[&entry.number].inode;
                base.link(inode, &staging_dir, OsStr::new(name))?;
            }
        }
        Ok(record)
    }

    /// Makes all new objects and copies of the manifest below `new`, a part of the transaction's directory. Returns
    /// their identities by their staged paths.
    fn make_all_staged<'m>(
        &self,
        backup: &BackupDir<'_, B>,
        manifest: &'m ChangeLog,
        new: &B::Inode,
    ) -> Result<BTreeMap<&'m StagedPath, Identity>, ReviveError> {
        let mut identities = BTreeMap::new();
        for staged in &manifest.staged {
            let staging_dir = staging::make_dir(&self.lower.base, new, &staged.at.dir)?;
            let inode = self.make_staged(backup, staged, &staging_dir)?;
            identities.insert(&staged.at, self.read_identity(&inode)?);
        }
        Ok(identities)
    }

    /// Returns the identity of an object of this backing.
    fn read_identity(&self, inode: &B::Inode) -> Result<Identity, Errno> {
        let attr = self.lower.base.attr(inode)?;
        Ok(Identity::from_attr(&attr, self.lower.device))
    }

    /// Makes a file, directory or other object of a transaction again from its backup, with its bytes and attributes.
    /// Makes it in `staging_dir`, a part of the transaction's directory; `stored` describes it.
    fn make_staged(
        &self,
        backup: &BackupDir<'_, B>,
        stored: &StagedObject,
        staging_dir: &B::Inode,
    ) -> Result<B::Inode, ReviveError> {
        let base = &self.lower.base;
        let name = OsStr::new(&stored.at.name);
        let mode = stored.attributes.mode;
        let inode = if mode & libc::S_IFMT == libc::S_IFREG {
            let (inode, file, _) =
                base.create(&staging::daemon_caller(), staging_dir, name, 0o600)?;
            if let Some(content) = &stored.content {
                copy_from_backup(backup, content, base, &file)?;
            }
            inode
        } else {
            staging::make_non_file(base, staging_dir, name, mode, stored.rdev, &stored.target)?
        };
        staging::set_attributes(base, &inode, &stored.attributes)?;
        Ok(inode)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Reads the manifest in a directory of a backup. Returns `None` if there is none, and `Some(Err(_))` if it cannot
    /// be decoded.
    pub fn manifest(
        store: &B,
        dir: &B::Inode,
    ) -> Result<Option<Result<ChangeLog, LogError>>, BackupError> {
        load_manifest(store, dir)
    }

    /// Removes the backup `name` of a transaction that is over from the directory of a backup.
    pub fn remove_backup(store: &B, name: &str) -> Result<(), BackupError> {
        remove_directory(store, &store.root(), name).map_err(backup_failed)
    }
}
