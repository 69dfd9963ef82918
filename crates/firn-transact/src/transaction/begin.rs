//! Begin of a transaction, of a whole directory or of some names in a directory. What it covers is its *scope*.
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
use crate::scope::{NameSet, Scope, ScopeTop, Stage};
use crate::shadow::{Mode, Shadow};
use crate::staging;
use crate::transaction::handle::Open;
use crate::transactional::TransactionalBacking;
use crate::uses::Area;

/// Argument of [`StoredScopes::new_scope`] for a transaction that no earlier firnd prepared.
pub(crate) const NOT_RECOVERED: Option<ChangeLog> = None;

/// A new transaction whose directory exists.
pub(super) struct NewTransaction<'a, B: Backing> {
    pub(super) serial: u64,
    /// The directory of this mount's transactions, which contains `dir`.
    pub(super) transactions_dir: &'a B::Inode,
    /// `tx-N/`, the directory of the transaction.
    pub(super) dir: &'a B::Inode,
}

/// The scope of a transaction that is open.
struct OpenedScope<B: Backing> {
    scope: Scope<B>,
    /// The error that the begin returns although the transaction is open: its mark `open` could not be removed.
    error: Option<BeginError>,
}

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

    /// Returns a [`Scope`] for a decided transaction that undoes a commit of the directory `root`. `record` is the
    /// change log of the commit, which is applied backward. `dir` is the transaction's directory.
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

    /// Makes a new transaction durable: syncs its mark `open`, by which a recovery finds it after a crash. If it
    /// creates its own directory in shadow mode (its changes are made at once), also moves that directory to its name.
    ///
    /// If that fails, the mark is removed and the error is returned. If the removal fails too, the transaction is open
    /// in spite of the error, and the error is a part of the result.
    fn mark_open(&self, scope: Scope<B>) -> Result<OpenedScope<B>, BeginError> {
        let marked = self
            .lower
            .base
            .sync_dir(&scope.dir)
            .and_then(|()| self.place_new_top(&scope));
        if let Err(errno) = marked {
            let is_unmarked = self.lower.remove_records(&scope.dir).is_ok();
            if is_unmarked {
                self.shared.withdraw_from_hosts(&scope.path);
                return Err(errno.into());
            }
            let error = Some(errno.into());
            return Ok(OpenedScope { scope, error });
        }
        Ok(OpenedScope { scope, error: None })
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Begins a transaction in the directory `root` and all below it, and returns its handle.
    ///
    /// `path` is the path of `root`, relative to the backing. Fails if `root` is not a directory, or if it overlaps
    /// another transaction. The exception is a decided commit of the same directory that the new one can *follow*: its
    /// changes then begin when the commit is applied.
    pub fn begin(&self, root: &Arc<Object<B>>, path: &[u8]) -> Result<Open<'_, B>, BeginError> {
        if root.kind != Kind::Dir {
            return Err(ScopeError::NotDirectory.into());
        }
        self.commits.apply_commits_around(root)?;
        // From here on no program changes anything at or below `root`.
        let _quiet = self.tree.quiesce_tree(root);
        let mut followed_commit = None;
        for scope in &self.scopes.all() {
            if scope.can_be_followed(root) {
                followed_commit = Some(Arc::clone(scope));
            } else if root.is_below(&scope.root) || scope.root.is_below(root) {
                return Err(BeginError::Overlaps {
                    scope: scope.path_now().as_slice().into(),
                });
            }
        }
        self.open_scope(path, followed_commit, |new| {
            // In shadow mode (changes are made at once), this makes directories for the saved old state.
            self.make_shadow(&new, path)?;
            self.make_scope(&new, root, path)
                .inspect_err(|_| self.shared.withdraw_from_hosts(path))
        })
    }

    /// Opens a new transaction and returns its handle: makes its directory, calls `make_scope` to store what it covers,
    /// and adds it to the list of transactions. `path` is the path of what it covers.
    ///
    /// `followed_commit` is the decided commit of the same directory that is not applied to the backing yet; `None` if
    /// there is none. The caller ensures that no program changes names or data there meanwhile.
    ///
    /// After an error the transaction is removed, or else is open and can be aborted ([`OpenedScope::error`]).
    pub(super) fn open_scope(
        &self,
        path: &[u8],
        followed_commit: Option<Arc<Scope<B>>>,
        make_scope: impl FnOnce(NewTransaction<'_, B>) -> Result<Scope<B>, BeginError>,
    ) -> Result<Open<'_, B>, BeginError> {
        let transactions_dir = self.link_counts.make_hidden_transactions_dir()?;
        self.endings.remove_leftovers(&transactions_dir);
        let serial = self.scopes.next_serial();
        let dir = staging::make_dir(&self.lower.base, &transactions_dir, &format!("tx-{serial}"))?;
        let opened = make_scope(NewTransaction {
            serial,
            transactions_dir: &transactions_dir,
            dir: &dir,
        })
        .and_then(|scope| self.stored_scopes.mark_open(scope));
        let OpenedScope { scope, error } = match opened {
            Ok(opened) => opened,
            Err(error) => {
                self.endings
                    .remove_or_leave(&transactions_dir, serial, &dir);
                return Err(error);
            }
        };
        // An abort of the last transaction by another host does not concern the new one.
        self.stopped_by.lock().remove(path);
        self.stored_scopes.insert_new_top(&scope);
        let scope = Arc::new(scope);
        match followed_commit {
            Some(commit) => commit.set_next_scope(Arc::clone(&scope)),
            None => self.scopes.add(Arc::clone(&scope)),
        }
        match error {
            // The transaction is open in spite of this error, and can be aborted.
            Some(error) => Err(error),
            None => Ok(self.open_handle(scope)),
        }
    }

    /// In shadow mode (changes are made at once), makes the directories for the saved old state of a new transaction.
    /// With several hosts, joins the transaction that they share. `path` is the path of the directory that it covers.
    ///
    /// Fails with `InodesDiffer` if directories of the backing list other inode numbers than stat(2) returns, because
    /// an abort could not restore the saved names. Does nothing in buffer mode.
    pub(super) fn make_shadow(
        &self,
        new: &NewTransaction<'_, B>,
        path: &[u8],
    ) -> Result<(), BeginError> {
        if self.mode != Mode::Shadow {
            return Ok(());
        }
        let dir_name = format!("tx-{}", new.serial);
        if !Shadow::lists_stat_inodes(&self.lower.base, new.transactions_dir, &dir_name)? {
            return Err(BeginError::InodesDiffer);
        }
        if self.lower.members.is_none() {
            return Ok(Shadow::create_dirs(&self.lower.base, new.dir)?);
        }
        // Other hosts wait for this host to leave the votes on earlier commits.
        self.commits.leave_remaining_votes_on(path)?;
        self.shared.join_hosts(new.dir, path)
    }

    /// Returns a [`Scope`] for a new transaction in the existing directory `root` at `path`, and stores its mark
    /// `open`: after a crash, a transaction with this mark and without a stored log of changes is undone. The caller
    /// syncs the mark.
    fn make_scope(
        &self,
        new: &NewTransaction<'_, B>,
        root: &Arc<Object<B>>,
        path: &[u8],
    ) -> Result<Scope<B>, BeginError> {
        if self.mode == Mode::Shadow {
            // Shadow mode changes the backing at once, so the state that an abort restores must be durable first.
            let is_backing_top = path.is_empty();
            if is_backing_top {
                self.lower.base.sync_all()?;
            } else {
                let root_inode = root.inode(&self.lower.base)?;
                self.lower.base.sync_scope(SyncScope::Tree(&root_inode))?;
            }
        }
        let scope = self.stored_scopes.new_scope(
            new.serial,
            Arc::clone(root),
            path.to_vec(),
            new.dir.clone(),
            NOT_RECOVERED,
        )?;
        // After an abort, this note says which arena (memory with data that is not in the backing yet) must drop data.
        self.arena_notes.record_arena(new.dir)?;
        // The mark comes last: a crash before it leaves no transaction.
        staging::replace_file_unsynced(&self.lower.base, new.dir, staging::OPEN, path)?;
        Ok(scope)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Begins a transaction of some names in the directory `dir` at `path`, and of all below these names.
    ///
    /// The names need not exist. Transactions of other names may be open in the same directory. Several hosts identify
    /// the transaction by `key`; a mount of one host ignores it.
    ///
    /// Fails in each of these cases: the mount is in shadow mode (`NotAmongHosts`); a name is in another transaction;
    /// other hosts have not ended an earlier transaction with this key (`NotOver`).
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
        // The hosts commit these names together by a ballot, which this host must join before its first change.
        if let NamesEntry::NotYet(hosts) = self.names_ballots.join(key)? {
            return Err(BeginError::NotOver { hosts });
        }
        self.open_names(dir, path, names, Some(key))
            .inspect_err(|_| self.names_ballots.withdraw(key))
    }

    /// Begins a transaction that covers some names in the directory `dir` at `path`, and all below them. Fails if a
    /// name is in another transaction.
    ///
    /// `key` identifies its ballot, which this host has joined; `None` on a mount of one host. The path of the first
    /// name identifies the transaction in this mount: no other transaction can cover it.
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
        // From here on no program changes anything at or below these names.
        let _quiet = self.tree.quiesce(vec![area]);
        self.must_not_overlap(dir, names)?;
        let path_of_first = join(path, first.as_bytes());
        self.open_scope(&path_of_first, None, |new| {
            let mut scope = self.stored_scopes.new_scope(
                new.serial,
                Arc::clone(dir),
                path_of_first.clone(),
                new.dir.clone(),
                NOT_RECOVERED,
            )?;
            scope.top = ScopeTop::without_names();
            scope.names_in_root = Some(NameSet::from_names(names));
            scope.key = key.map(Into::into);
            if let Some(key) = key {
                staging::replace_file_unsynced(&self.lower.base, new.dir, staging::KEY, key)?;
            }
            if !others.is_empty() {
                self.lower.write_names(&scope, dir.key, others)?;
            }
            // After an abort, this note says which arena (memory with data that is not in the backing yet) must drop
            // data.
            self.arena_notes.record_arena(new.dir)?;
            // The mark `open` comes last: a crash before it leaves no transaction.
            staging::replace_file_unsynced(
                &self.lower.base,
                new.dir,
                staging::OPEN,
                &path_of_first,
            )?;
            Ok(scope)
        })
    }

    /// Fails with the path of another scope if it contains one of the names or the directory itself.
    fn must_not_overlap(&self, dir: &Arc<Object<B>>, names: &[OsString]) -> Result<(), BeginError> {
        let is_requested = |name: &OsStr| names.iter().any(|requested| requested == name);
        match self.scopes.find_overlapping(dir, is_requested) {
            Some(overlapping_scope) => Err(BeginError::Overlaps {
                scope: overlapping_scope.path_now().as_slice().into(),
            }),
            None => Ok(()),
        }
    }

    /// Adds names to an open transaction that covers some names in a directory; see [`Open::add_names`]. Each name is
    /// durable in `tx-N/names` before it belongs to the transaction.
    ///
    /// Fails with `Overlaps` if a name is in another transaction, or if this one is prepared or over. Fails with
    /// `NotDirectory` if this one covers a whole directory.
    pub(super) fn add_names_to(
        &self,
        scope: &Arc<Scope<B>>,
        names: &[OsString],
    ) -> Result<(), BeginError> {
        let Some(names_in_root) = &scope.names_in_root else {
            return Err(ScopeError::NotDirectory.into());
        };
        let dir = &scope.root;
        let new_names: Vec<OsString> = names
            .iter()
            .filter(|name| !names_in_root.contains(name))
            .cloned()
            .collect();
        let area = Area::Names(
            Arc::clone(dir),
            Arc::new(new_names.iter().cloned().collect()),
        );
        // From here on no program changes anything at or below these names.
        let _quiet = self.tree.quiesce(vec![area]);
        self.must_not_overlap(dir, &new_names)?;
        if scope.stage() != Stage::Open {
            return Err(BeginError::Overlaps {
                scope: scope.path.as_slice().into(),
            });
        }
        for name in &new_names {
            self.lower.record_name(scope, name)?;
        }
        names_in_root.extend(&new_names);
        Ok(())
    }
}
