//! Begin of a transaction, of a whole directory or of some names in a directory.
//!
//! A begin makes the directory `.firn/tx-N/`, and stores there what identifies the transaction. It stores and syncs
//! `tx-N/open` last. After a crash, the recovery undoes every transaction that has `open` but no record of its changes.
//!
//! Promises
//! * Scopes of open transactions never overlap. A begin that would overlap fails with the path of the other scope.
//! * A begin that fails leaves no transaction, except when the backing refuses to remove `open`. In that case the begin
//!   returns an error, but the transaction is open and can be aborted.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, SyncScope};

use crate::change_log::{ChangeLog, Direction};
use crate::error::{BeginError, ScopeError};
use crate::names_ballot::NamesEntry;
use crate::object::Object;
use crate::paths::join;
use crate::recovery::StoredScopes;
use crate::scope::{NameSet, Scope, Stage, Top};
use crate::shadow::{Mode, Shadow};
use crate::staging;
use crate::transaction::handle::Open;
use crate::transactional::TransactionalBacking;
use crate::uses::Area;

impl<B: Backing> StoredScopes<B> {
    /// Makes the scope of a transaction that is stored in `dir`. `recovered` is the log of a transaction that an
    /// earlier firnd prepared.
    pub(crate) fn new_scope(
        &self,
        serial: u64,
        root: Arc<Object<B>>,
        path: Vec<u8>,
        dir: B::Inode,
        recovered: Option<ChangeLog>,
    ) -> Result<Scope<B>, Errno> {
        let shadow = self.shared.shadow_of(&dir, &path)?;
        Scope::new(&self.lower.base, serial, root, path, dir, recovered, shadow)
    }

    /// Makes the scope of a transaction that undoes a commit. The transaction counts as decided, and `record` is the
    /// log of the commit.
    pub(crate) fn undoing_scope(
        &self,
        serial: u64,
        root: &Arc<Object<B>>,
        dir: B::Inode,
        record: ChangeLog,
    ) -> Result<Scope<B>, Errno> {
        let path = record.scope_before(Direction::Undo).to_vec();
        let id = record.id_after(Direction::Undo);
        let path_after = record.scope_after(Direction::Undo).to_vec();
        let mut scope = self.new_scope(serial, Arc::clone(root), path, dir, Some(record))?;
        scope.is_undo = true;
        scope.top.set_name_after(&path_after);
        scope.set_stage(Stage::Decided(id));
        Ok(scope)
    }

    /// Syncs the mark `open` of a new transaction, and in shadow mode puts a new top in its place.
    ///
    /// If that fails, the mark is removed and the error is returned. If the removal fails too, the scope is returned
    /// with the first error, because the transaction is open then and can be aborted.
    fn mark_open(&self, scope: Scope<B>) -> Result<(Scope<B>, Result<(), BeginError>), BeginError> {
        let synced = self.lower.base.sync_dir(&scope.dir);
        let Err(errno) = synced.and_then(|()| self.place_new_top(&scope)) else {
            return Ok((scope, Ok(())));
        };
        match self.lower.forget_records(&scope.dir) {
            Ok(()) => {
                self.shared.withdraw_from_hosts(&scope.path);
                Err(errno.into())
            }
            Err(_) => Ok((scope, Err(errno.into()))),
        }
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Begins a transaction in the directory `root` and all below it, and returns its handle.
    ///
    /// `path` is the path of `root`, relative to the backing. Fails if `root` is not a directory, or if its scope
    /// overlaps another transaction that the new one cannot follow.
    pub fn begin(&self, root: &Arc<Object<B>>, path: &[u8]) -> Result<Open<'_, B>, BeginError> {
        if root.kind != Kind::Dir {
            return Err(ScopeError::NotDirectory.into());
        }
        self.commits.apply_commits_around(root)?;
        let _quiet = self.tree.quiesce_tree(root);
        let mut before = None;
        for scope in &self.scopes.all() {
            if scope.can_be_followed(root) {
                before = Some(Arc::clone(scope));
            } else if root.is_below(&scope.root) || scope.root.is_below(root) {
                return Err(BeginError::Overlaps {
                    scope: scope.path_now().as_slice().into(),
                });
            }
        }
        self.open_scope(path, before, |serial, firn, dir| {
            self.start(serial, root, path, firn, dir)
        })
    }

    /// Makes the directory of a new transaction, calls `start` to make its scope, and enters the transaction in the
    /// tables.
    ///
    /// The new transaction follows the commit `before`, if there is one. The caller keeps names and data of the scope.
    pub(super) fn open_scope(
        &self,
        path: &[u8],
        before: Option<Arc<Scope<B>>>,
        start: impl FnOnce(u64, &B::Inode, &B::Inode) -> Result<Scope<B>, BeginError>,
    ) -> Result<Open<'_, B>, BeginError> {
        let firn = self.own_links.make_hidden_staging_dir()?;
        self.endings.remove_leftovers(&firn);
        let serial = self.scopes.next_serial();
        let name = format!("tx-{serial}");
        let dir = staging::make_dir(&self.lower.base, &firn, &name)?;
        let started =
            start(serial, &firn, &dir).and_then(|scope| self.stored_scopes.mark_open(scope));
        let (scope, result) = match started {
            Ok(started) => started,
            Err(error) => {
                self.endings.remove_or_leave(&firn, serial, &dir);
                return Err(error);
            }
        };
        self.stopped_by.lock().remove(path);
        self.stored_scopes.adopt_new_top(&scope);
        let scope = Arc::new(scope);
        match before {
            Some(before) => before.set_next(Arc::clone(&scope)),
            None => self.scopes.add(Arc::clone(&scope)),
        }
        result.map(|()| self.open_handle(scope))
    }

    /// Makes the scope of a transaction in an existing directory. After an error this host has withdrawn from the
    /// shared transaction of several hosts.
    fn start(
        &self,
        serial: u64,
        root: &Arc<Object<B>>,
        path: &[u8],
        firn: &B::Inode,
        dir: &B::Inode,
    ) -> Result<Scope<B>, BeginError> {
        self.make_shadow(serial, path, firn, dir)?;
        self.make_scope(serial, root, path, dir)
            .inspect_err(|_| self.shared.withdraw_from_hosts(path))
    }

    /// In shadow mode, makes the directories for the saved state. With several hosts, joins the shared transaction.
    ///
    /// Fails with `InodesDiffer` if directories of the backing list other inode numbers than stat(2) returns, because
    /// an abort could not restore the saved names. Does nothing in buffer mode.
    pub(super) fn make_shadow(
        &self,
        serial: u64,
        path: &[u8],
        firn: &B::Inode,
        dir: &B::Inode,
    ) -> Result<(), BeginError> {
        if self.mode != Mode::Shadow {
            return Ok(());
        }
        if !Shadow::lists_stat_inodes(&self.lower.base, firn, &format!("tx-{serial}"))? {
            return Err(BeginError::InodesDiffer);
        }
        match &self.lower.members {
            None => Ok(Shadow::make(&self.lower.base, dir)?),
            Some(_) => {
                self.commits.leave_rest_of(path)?;
                self.shared.join_hosts(dir, path)
            }
        }
    }

    /// Makes the scope of a transaction in an existing directory and stores its mark `open`, which is not synced yet.
    fn make_scope(
        &self,
        serial: u64,
        root: &Arc<Object<B>>,
        path: &[u8],
        dir: &B::Inode,
    ) -> Result<Scope<B>, BeginError> {
        if self.mode == Mode::Shadow {
            // Shadow mode changes the backing at once, so the state that an abort restores must be durable first.
            match path {
                b"" => self.lower.base.sync_all()?,
                _ => {
                    let top = root.inode(&self.lower.base)?;
                    self.lower.base.sync_scope(SyncScope::Tree(&top))?;
                }
            }
        }
        let scope = self.stored_scopes.new_scope(
            serial,
            Arc::clone(root),
            path.to_vec(),
            dir.clone(),
            None,
        )?;
        self.arena_notes.note_arena(dir)?;
        staging::replace_file_unsynced(&self.lower.base, dir, staging::OPEN, path)?;
        Ok(scope)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Begins a transaction of some names in the directory `dir` at `path`, and of all below these names.
    ///
    /// The names need not exist. Transactions of other names may be open in the same directory. Several hosts identify
    /// the transaction by `key`; a mount of one host ignores it. Fails in shadow mode, if a name is in another
    /// transaction, or if other hosts have not ended an earlier transaction with this key.
    pub fn begin_names(
        &self,
        dir: &Arc<Object<B>>,
        path: &[u8],
        names: &[OsString],
        key: &[u8],
    ) -> Result<Open<'_, B>, BeginError> {
        if dir.kind != Kind::Dir {
            return Err(ScopeError::NotDirectory.into());
        }
        if self.mode != Mode::Buffer {
            return Err(BeginError::NotAmongHosts);
        }
        if self.lower.members.is_none() {
            return self.open_names(dir, path, names, None);
        }
        if let NamesEntry::NotYet(hosts) = self.names_ballots.join(key)? {
            return Err(BeginError::NotOver { hosts });
        }
        self.open_names(dir, path, names, Some(key))
            .inspect_err(|_| self.names_ballots.withdraw(key))
    }

    /// Begins a transaction of names after this host has joined. `key` identifies the transaction among several hosts.
    fn open_names(
        &self,
        dir: &Arc<Object<B>>,
        path: &[u8],
        names: &[OsString],
        key: Option<&[u8]>,
    ) -> Result<Open<'_, B>, BeginError> {
        let Some((first, others)) = names.split_first() else {
            return Err(ScopeError::Missing.into());
        };
        let area = Area::Names(Arc::clone(dir), Arc::new(names.iter().cloned().collect()));
        let _quiet = self.tree.quiesce(vec![area]);
        self.must_not_overlap(dir, names)?;
        let path = join(path, first.as_bytes());
        self.open_scope(&path, None, |serial, _, tx| {
            let stored = &self.stored_scopes;
            let mut scope =
                stored.new_scope(serial, Arc::clone(dir), path.clone(), tx.clone(), None)?;
            scope.top = Top::without_names();
            scope.names_in_root = Some(NameSet::from_names(names));
            scope.key = key.map(Into::into);
            if let Some(key) = key {
                staging::replace_file_unsynced(&self.lower.base, tx, staging::KEY, key)?;
            }
            if !others.is_empty() {
                self.lower.write_names(&scope, dir.key, others)?;
            }
            self.arena_notes.note_arena(tx)?;
            staging::replace_file_unsynced(&self.lower.base, tx, staging::OPEN, &path)?;
            Ok(scope)
        })
    }

    /// Fails with the path of another scope if it contains one of the names or the directory itself.
    fn must_not_overlap(&self, dir: &Arc<Object<B>>, names: &[OsString]) -> Result<(), BeginError> {
        let is_one = |name: &OsStr| names.iter().any(|one| one == name);
        match self.scopes.overlapping(dir, is_one) {
            Some(other) => Err(BeginError::Overlaps {
                scope: other.path_now().as_slice().into(),
            }),
            None => Ok(()),
        }
    }

    /// Adds names of the directory to an open transaction of names; see [`Open::add_names`].
    ///
    /// Each name is durable in `tx-N/names` before it belongs to the transaction. Fails if a name is in another
    /// transaction, or if this one is not open.
    pub(super) fn add_names_to(
        &self,
        scope: &Arc<Scope<B>>,
        names: &[OsString],
    ) -> Result<(), BeginError> {
        let Some(known) = &scope.names_in_root else {
            return Err(ScopeError::NotDirectory.into());
        };
        let dir = &scope.root;
        let new: Vec<OsString> = names
            .iter()
            .filter(|name| !known.has(name))
            .cloned()
            .collect();
        let area = Area::Names(Arc::clone(dir), Arc::new(new.iter().cloned().collect()));
        let _quiet = self.tree.quiesce(vec![area]);
        self.must_not_overlap(dir, &new)?;
        if scope.stage() != Stage::Open {
            return Err(BeginError::Overlaps {
                scope: scope.path.as_slice().into(),
            });
        }
        for name in &new {
            self.lower.note_name(scope, name)?;
        }
        known.add(&new);
        Ok(())
    }
}
