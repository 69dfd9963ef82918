//! [`Revival`]: prepares a transaction again from its backup, in a backing whose tree is that before the transaction.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Attr, Backing, Errno, RenameFlags, SyncScope};

use super::content::copy_in;
use super::mirror::{backup_failed, load, remove};
use crate::change_log::{
    ChangeLog, Direction, EntryName, Identity, LogError, PortableIdentity, StagedObject,
};
use crate::error::{BackupError, ReviveError};
use crate::hidden::OwnLinks;
use crate::lower_backing::LowerBacking;
use crate::paths::names_in;
use crate::recovery::StoredScopes;
use crate::scopes::Scopes;
use crate::staging;
use crate::transactional::TransactionalBacking;

fn tree(path: &[u8], what: &str) -> ReviveError {
    ReviveError::OtherTree {
        path: path.to_vec(),
        what: what.into(),
    }
}

/// Makes transactions of backups.
pub struct Revival<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) own_links: Arc<OwnLinks<B>>,
    pub(crate) stored_scopes: Arc<StoredScopes<B>>,
}

impl<B: Backing> Revival<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        scopes: &Arc<Scopes<B>>,
        own_links: &Arc<OwnLinks<B>>,
        stored_scopes: &Arc<StoredScopes<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            scopes: Arc::clone(scopes),
            own_links: Arc::clone(own_links),
            stored_scopes: Arc::clone(stored_scopes),
        }
    }

    /// Stages the contents of a backup, the directory `from` of a store that is named `called`, as a prepared
    /// transaction. Where this fails the backing is as it was.
    pub fn revive(
        &self,
        from: (&B, &B::Inode),
        called: &OsStr,
        wanted: &ChangeLog,
    ) -> Result<(), ReviveError> {
        wanted.check_portable().map_err(|_| ReviveError::Damaged {
            file: super::MANIFEST.into(),
        })?;
        self.must_be_before(wanted)?;
        let mut found = HashMap::from([(0, (self.lower.base.root(), Vec::new()))]);
        for entry in &wanted.entries {
            if let Some(known) = &entry.known {
                let inode = self.same(known)?;
                found.insert(entry.number, (inode, known.paths[0].clone()));
            }
        }
        self.must_have_room(wanted, &found)?;
        let firn = self.own_links.make_hidden_staging_dir()?;
        let serial = self.scopes.next_serial();
        let name = format!("tx-{serial}");
        let dir = staging::dir(&self.lower.base, &firn, &name)?;
        let staged = self.stage(from, wanted, &found, &dir).and_then(|record| {
            // A mount with the same backup continues it.
            staging::store(&self.lower.base, &dir, staging::BACKUP, called.as_bytes())?;
            staging::store(&self.lower.base, &dir, staging::OPEN, &record.scope)?;
            self.lower.base.sync_scope(SyncScope::Changes)?;
            staging::write(&self.lower.base, &dir, staging::RECORD, &record.encode())?;
            self.lower.sync_staging_dir()?;
            Ok(record)
        });
        let record = match staged {
            Ok(record) => record,
            Err(error) => {
                if let Err(errno) = self.lower.remove_transaction(&firn, &dir, &name) {
                    tracing::warn!(%errno, name, "cannot remove what was staged; the next mount does");
                }
                return Err(error);
            }
        };
        let new = staging::new_name(staging::RECORD);
        let flags = RenameFlags::empty();
        self.lower.base.rename(
            &dir,
            OsStr::new(&new),
            &dir,
            OsStr::new(staging::RECORD),
            flags,
        )?;
        self.lower.base.sync_dir(&dir)?;
        Ok(self.stored_scopes.wait_for_decision(serial, dir, record)?)
    }

    /// Fails if it shows at once that the tree is another one.
    fn must_be_before(&self, wanted: &ChangeLog) -> Result<(), ReviveError> {
        let is_in = |a: &[u8], b: &[u8]| {
            b.is_empty()
                || a.strip_prefix(b)
                    .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        };
        let scope_after = wanted.scope_after(Direction::Redo);
        let overlapping = self.scopes.paths_where(|one| {
            is_in(&one.path, &wanted.scope)
                || is_in(&wanted.scope, &one.path)
                || one.is_at(&wanted.scope)
                || one.is_at(scope_after)
        });
        if let Some(open) = overlapping.first() {
            return Err(ReviveError::Overlaps {
                scope: open.as_slice().into(),
            });
        }
        if scope_after != wanted.scope && self.lower.committed(scope_after)? == Some(wanted.id) {
            return Err(ReviveError::Applied { id: wanted.id });
        }
        match self.lower.committed(&wanted.scope)? {
            found if found == wanted.id_before => Ok(()),
            // A copy without `.firn`.
            None => Ok(()),
            Some(id) if id == wanted.id => Err(ReviveError::Applied { id }),
            Some(id) => Err(tree(
                &wanted.scope,
                &format!("its last commit is {id}, and not the one before"),
            )),
        }
    }

    fn at(&self, path: &[u8]) -> Result<(B::Inode, Attr), Errno> {
        let mut at = self.lower.base.root();
        let mut attr = self.lower.base.attr(&at)?;
        for name in names_in(path) {
            (at, attr) = self.lower.base.lookup(&at, name)?;
        }
        Ok((at, attr))
    }

    /// The object that has these names here.
    fn same(&self, known: &PortableIdentity) -> Result<B::Inode, ReviveError> {
        let mut same: Option<(B::Inode, Identity)> = None;
        for path in &known.paths {
            let (inode, attr) = match self.at(path) {
                Ok(found) => found,
                Err(Errno::NOENT | Errno::NOTDIR) => return Err(tree(path, "it is not there")),
                Err(errno) => return Err(errno.into()),
            };
            if attr.mode & libc::S_IFMT != known.kind {
                return Err(tree(path, "it is of another kind"));
            }
            if known.size.is_some_and(|size| size != attr.size) {
                return Err(tree(path, "it has another size"));
            }
            let identity = Identity::of(&attr, self.lower.device);
            if same.as_ref().is_some_and(|(_, other)| *other != identity) {
                let text = format!(
                    "it is not the same object as {}",
                    firn_format::quote::quoted(&known.paths[0])
                );
                return Err(tree(path, &text));
            }
            same = Some((inode, identity));
        }
        Ok(same.expect("a manifest has a name for each").0)
    }

    /// What would stop a commit half-way: a name that is taken, and a directory that goes and is not empty.
    fn must_have_room(
        &self,
        log: &ChangeLog,
        found: &HashMap<u64, (B::Inode, Vec<u8>)>,
    ) -> Result<(), ReviveError> {
        let left: BTreeSet<&EntryName> =
            log.entries.iter().flat_map(|entry| &entry.before).collect();
        let full = |path: &[u8], name: &[u8]| {
            let slash: &[u8] = if path.is_empty() { b"" } else { b"/" };
            [path, slash, name].concat()
        };
        for item in &log.entries {
            for place in &item.after {
                let Some((dir, path)) = found.get(&place.0) else {
                    continue;
                };
                let is_taken =
                    staging::find(&self.lower.base, dir, OsStr::from_bytes(&place.1))?.is_some();
                if is_taken && !left.contains(place) {
                    return Err(tree(
                        &full(path, &place.1),
                        "the transaction makes it, and it is there",
                    ));
                }
            }
            if !item.is_dir || item.before.is_empty() || !item.after.is_empty() {
                continue;
            }
            let Some((dir, path)) = found.get(&item.number) else {
                continue;
            };
            for (name, ..) in staging::list(&self.lower.base, dir)? {
                if !left.contains(&(item.number, name.clone())) {
                    return Err(tree(
                        &full(path, &name),
                        "the transaction removes its directory, and not it",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Stages everything; the record with the identities of this backing.
    fn stage(
        &self,
        from: (&B, &B::Inode),
        wanted: &ChangeLog,
        found: &HashMap<u64, (B::Inode, Vec<u8>)>,
        dir: &B::Inode,
    ) -> Result<ChangeLog, ReviveError> {
        let new = staging::dir(&self.lower.base, dir, staging::NEW)?;
        staging::dir(&self.lower.base, dir, staging::AWAY)?;
        let mut made = BTreeMap::new();
        for stored in &wanted.staged {
            let staging_dir = staging::dir(&self.lower.base, &new, &stored.at.0)?;
            let inode = self.rebuild(from, stored, &staging_dir)?;
            made.insert(
                &stored.at,
                Identity::of(&self.lower.base.attr(&inode)?, self.lower.device),
            );
        }
        let mut record = ChangeLog {
            staged: Vec::new(),
            ..wanted.clone()
        };
        for item in &mut record.entries {
            item.known = None;
            item.identity = match &item.new_at {
                Some(at) => made[at],
                None => Identity::of(
                    &self.lower.base.attr(&found[&item.number].0)?,
                    self.lower.device,
                ),
            };
            if let Some((staging_dir, name)) = &item.anchor_at {
                let staging_dir = staging::dir(&self.lower.base, &new, staging_dir)?;
                self.lower
                    .base
                    .link(&found[&item.number].0, &staging_dir, OsStr::new(name))?;
            }
        }
        Ok(record)
    }

    fn rebuild(
        &self,
        from: (&B, &B::Inode),
        stored: &StagedObject,
        staging_dir: &B::Inode,
    ) -> Result<B::Inode, ReviveError> {
        let base = &self.lower.base;
        let name = OsStr::new(&stored.at.1);
        let mode = stored.attributes.mode;
        let inode = if mode & libc::S_IFMT == libc::S_IFREG {
            let (inode, file, _) = base.create(&staging::own(), staging_dir, name, 0o600)?;
            if let Some(content) = &stored.content {
                copy_in(from, content, base, &file)?;
            }
            inode
        } else {
            staging::make_special(base, staging_dir, name, mode, stored.rdev, &stored.target)?
        };
        staging::set_attributes(base, &inode, &stored.attributes)?;
        Ok(inode)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// The manifest in a directory of a backup; `None` where there is none.
    pub fn manifest(
        store: &B,
        dir: &B::Inode,
    ) -> Result<Option<Result<ChangeLog, LogError>>, BackupError> {
        load(store, dir)
    }

    /// Removes the backup `name` of a transaction that is over from the directory of a backup.
    pub fn remove_backup(store: &B, name: &str) -> Result<(), BackupError> {
        remove(store, &store.root(), name).map_err(backup_failed)
    }
}
