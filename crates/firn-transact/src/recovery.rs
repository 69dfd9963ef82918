//! Finishes or undoes the transactions that a crash left behind, when the mount is made again.
//!
//! Terms
//! * *firnd* is the process that serves one mount. An earlier firnd served the same directory, the *backing*, before.
//! * The *scope* of a transaction is what it covers. Its *records* are its files that survive a crash.
//! * The *arena* of a mount has the *pending* data, which is not in the backing yet. It survives firnd.
//! * In *shadow mode* changes go to the backing at once, and the old state is saved there first.
//!
//! | the transaction was | recovery |
//! |---|---|
//! | decided | applies it |
//! | prepared | keeps it for a decision, unless the other hosts have decided |
//! | open | undoes it, or continues it if its programs still run (shadow mode of one host) |
//!
//! Promise: after a crash during a recovery, the next recovery finds everything that it needs. Pending data of an
//! undone transaction is dropped before the transaction's records are removed. If that data is in another arena, a
//! durable note says what that arena must drop.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use firn_backing::{Backing, Errno, Kind, RenameFlags, SyncScope};
use firn_hosts::Members;

use crate::apply::{Apply, StagingDirs};
use crate::change_log::{ChangeLog, Direction, Identity, StagedPath};
use crate::error::{OpenError, StoreError};
use crate::history::History;
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::names_ballot::NamesBallots;
use crate::object::{Object, ObjectKey, ObjectState};
use crate::own::OwnError;
use crate::paths::{join, names_in, parent_of};
use crate::records::Endings;
use crate::scope::{ArenaId, Scope, Stage};
use crate::scopes::Scopes;
use crate::shadow::shared::SharedTransactions;
use crate::shadow::undo::ShadowUndo;
use crate::shadow::{KeptObject, Shadow};
use crate::staging;
use crate::transaction::arenas::ArenaNotes;
use crate::transaction::begin::NOT_RECOVERED;
use crate::transaction::top::TopUndo;
use crate::transactional::TransactionalBacking;
use crate::tree::Tree;
use crate::unanswered::Unanswered;
use crate::vote::Votes;

/// The transactions that [`TransactionalBacking::open`] found, grouped by what it did with them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryOutcome {
    /// Numbers of committed transactions that were applied to the end.
    pub finished: Vec<u64>,
    /// Scopes of the transactions that were undone because they had not been prepared.
    pub undone: Vec<Vec<u8>>,
    /// Numbers and scopes of the transactions that are prepared and wait for a decision.
    pub waiting: Vec<(u64, Vec<u8>)>,
    /// Serial numbers of the transactions that continue.
    pub continuing: Vec<u64>,
    /// Those finished commits that a program may request again.
    pub(crate) unanswered: Vec<Unanswered>,
}

/// Serial numbers of an earlier firnd's transactions whose programs still run, because this firnd takes the mount over.
#[derive(Clone, Debug, Default)]
pub struct LivingTransactions {
    /// Transactions that may continue, if the backing has all of their changes.
    pub open: BTreeSet<u64>,
    /// Transactions in `open` whose abort has begun. They can only be aborted.
    pub ending: BTreeSet<u64>,
}

/// How [`TransactionalBacking::open_with`] opens a backing.
#[derive(Clone, Debug, Default)]
pub struct Opening {
    /// Number of commits of each scope that can be undone.
    pub history: u32,
    /// The hosts that commit together; `None` on a mount of one host.
    pub members: Option<Members>,
    /// The arena of this mount. If another arena must drop data, a note is stored until that arena is attached again.
    pub arena: Option<ArenaId>,
    /// Transactions that may continue from an earlier firnd.
    pub living: LivingTransactions,
}

/// A transaction that is stored in the backing.
pub(super) struct StoredTransaction<B: Backing> {
    serial: u64,
    name: String,
    pub(super) dir: B::Inode,
}

impl<B: Backing> LowerBacking<B> {
    /// Returns the transactions with a directory `tx-N` in `transactions_dir`, sorted by the names of their
    /// directories. Other entries are skipped.
    pub(super) fn stored_transactions(
        &self,
        transactions_dir: &B::Inode,
    ) -> Result<Vec<StoredTransaction<B>>, OwnError> {
        let mut listed = staging::list(&self.base, transactions_dir)?;
        listed.sort_by(|(left_name, ..), (right_name, ..)| left_name.cmp(right_name));
        let mut stored = Vec::new();
        for (name, ..) in listed {
            let name = String::from_utf8_lossy(&name).into_owned();
            let Some(serial) = name
                .strip_prefix("tx-")
                .and_then(|number| number.parse::<u64>().ok())
            else {
                continue;
            };
            let dir = staging::must_find_dir(&self.base, transactions_dir, &name)
                .map_err(|error| error.below(&self.transactions_path()))?;
            stored.push(StoredTransaction { serial, name, dir });
        }
        Ok(stored)
    }

    /// Syncs the directory of this mount's transactions and the scope, where a killed process may have applied changes
    /// without a sync.
    fn sync_applied_changes(&self, transactions_dir: &B::Inode, scope: &[u8]) -> Result<(), Errno> {
        self.base.sync_scope(SyncScope::Tree(transactions_dir))?;
        match self.directory_at(scope) {
            Ok(root) => self.base.sync_scope(SyncScope::Tree(&root)),
            // The scope is not a directory: its names are files, or the transaction removed it.
            Err(Errno::NOTDIR | Errno::NOENT) => self.base.sync_all(),
            Err(errno) => Err(errno),
        }
    }

    /// Returns whether the stored transaction in `dir` is a decided commit or restore.
    fn has_decided_record(&self, dir: &B::Inode) -> Result<bool, Errno> {
        for record in [staging::COMMIT, staging::UNDO] {
            if staging::find(&self.base, dir, OsStr::new(record))?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether a stored transaction got more names after its begin.
    fn has_more_names(&self, dir: &B::Inode) -> Result<bool, Errno> {
        Ok(staging::find(&self.base, dir, OsStr::new(staging::NAMES))?.is_some())
    }
}

impl<B: Backing> ArenaNotes<B> {
    /// Returns the paths below which the *pending* data of a stored transaction must be dropped, because the recovery
    /// may undo the transaction. Pending data is in memory that outlives this process, and not in the backing yet.
    ///
    /// Empty if the transaction is committed or has ended.
    pub(super) fn paths_to_drop_of(
        &self,
        stored: &StoredTransaction<B>,
    ) -> Result<Vec<Vec<u8>>, StoreError> {
        let StoredTransaction { dir, name, .. } = stored;
        // All changes of a decided transaction are durable. Pending data was written later and is kept.
        if self.lower.has_decided_record(dir)? {
            return Ok(Vec::new());
        }
        let record = self.lower.load_record(dir, name, staging::RECORD)?;
        let scope = match &record {
            Some(record) => Some(record.scope.clone()),
            None => staging::load_scope(&self.lower.base, dir, staging::OPEN)?,
        };
        // Without a stored scope the transaction has ended, and only its directory is left.
        let Some(scope) = scope else {
            return Ok(Vec::new());
        };
        // Other hosts may have decided the commit while this host was down.
        if self.shared.is_shared_commit(dir, &scope)? {
            return Ok(Vec::new());
        }
        if let Some(record) = &record
            && self.is_decided_commit(dir, record.id, &scope)?
        {
            return Ok(Vec::new());
        }
        let mut paths = self.lower.stored_names(dir, name)?;
        paths.push(scope);
        Ok(paths)
    }

    /// Returns whether a stored transaction can continue: its programs still run, and the backing has all of their
    /// changes.
    pub(super) fn can_continue(&self, stored: &StoredTransaction<B>) -> Result<bool, StoreError> {
        let base = &self.lower.base;
        if self.lower.members.is_some() || !self.living.open.contains(&stored.serial) {
            return Ok(false);
        }
        if self.lower.has_decided_record(&stored.dir)? {
            return Ok(false);
        }
        let is_begun = staging::find(base, &stored.dir, OsStr::new(staging::OPEN))?.is_some();
        Ok(is_begun && Shadow::is_in_dir(base, &stored.dir)?)
    }

    /// Returns whether the hosts have decided to commit a transaction that this host has prepared.
    fn is_decided_commit(&self, dir: &B::Inode, id: u64, scope: &[u8]) -> Result<bool, StoreError> {
        let decision = match staging::read_file(&self.lower.base, dir, staging::KEY)? {
            Some(key) => match self.names_ballots.find(&key)? {
                Some(ballot) => ballot.decision()?,
                None => None,
            },
            None => self.votes.find_decision(id, scope)?,
        };
        Ok(decision == Some(true))
    }
}

/// Scopes of transactions that are stored in the backing.
pub(crate) struct StoredScopes<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
}

impl<B: Backing> StoredScopes<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        tree: &Arc<Tree<B>>,
        scopes: &Arc<Scopes<B>>,
        link_counts: &Arc<LinkCounts<B>>,
        shared: &Arc<SharedTransactions<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
            scopes: Arc::clone(scopes),
            link_counts: Arc::clone(link_counts),
            shared: Arc::clone(shared),
        }
    }

    /// Returns a [`Scope`] for a transaction that continues although the firnd that began it (the server of the mount)
    /// has died. Returns `None` if the directory that it covers does not exist, because its creation was not finished.
    ///
    /// Only a transaction in shadow mode can continue, as its changes are in the backing and the old state is saved.
    /// Returns `None` for any other.
    pub(crate) fn revive_scope(
        &self,
        stored: &StoredTransaction<B>,
    ) -> Result<Option<Arc<Scope<B>>>, StoreError> {
        let StoredTransaction { serial, name, dir } = stored;
        let base = &self.lower.base;
        let shadow = Shadow::find_in_dir(base, dir)?;
        let path = staging::load_scope(base, dir, staging::OPEN)?;
        let (Some(shadow), Some(path)) = (shadow, path) else {
            return Ok(None);
        };
        let top_undo = self.lower.find_top_undo(dir, name, shadow.kept_dir())?;
        let Some(path_now) = self.present_path(&path, top_undo.as_ref())? else {
            return Ok(None);
        };
        let root = self.intern_path(&path_now)?;
        // Its programs still run, so it starts open like a new transaction, and not prepared from a change log.
        let mut scope = self.new_scope(*serial, root, path, dir.clone(), NOT_RECOVERED)?;
        scope.is_revived = true;
        // A directory that the transaction created had no name before.
        if let Some(top_undo) = top_undo {
            scope.top.names.lock().before = top_undo.before.map(OsString::from_vec);
        }
        self.record_kept_links(*serial, &shadow)?;
        Ok(Some(Arc::new(scope)))
    }

    /// Records the names of a transaction's removed objects in `kept/` as hidden links.
    fn record_kept_links(&self, serial: u64, shadow: &Shadow<B>) -> Result<(), Errno> {
        for KeptObject { key, name, is_dir } in shadow.list_kept(&self.lower.base)? {
            self.link_counts
                .record_found_link(serial, key, shadow.kept_dir(), name, is_dir);
        }
        Ok(())
    }

    /// Returns the path under which programs see the top of a stored transaction, which is the directory that it
    /// covers. Returns `None` if the top does not exist in the backing.
    ///
    /// `path` is the path at the begin. `top_undo` has all names that the top may have now; `None` if the transaction
    /// neither created nor renamed it.
    fn present_path(
        &self,
        path: &[u8],
        top_undo: Option<&TopUndo<B>>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(top_undo) = top_undo else {
            return Ok(Some(path.to_vec()));
        };
        for name in top_undo.names.iter().chain(&top_undo.before) {
            let os_name = OsStr::from_bytes(name);
            let found = staging::find(&self.lower.base, &top_undo.parent, os_name)?;
            if found.is_some_and(|(_, attr)| attr.ino == top_undo.ino) {
                return Ok(Some(join(parent_of(path), name)));
            }
        }
        Ok(None)
    }

    /// Returns the object at a path of the backing.
    pub(crate) fn intern_path(&self, path: &[u8]) -> Result<Arc<Object<B>>, Errno> {
        let mut object = Arc::clone(self.tree.top());
        for name in names_in(path) {
            let parent = object;
            let parent_inode = parent.inode(&self.lower.base)?;
            let (inode, attr) = self.lower.base.lookup(&parent_inode, name)?;
            object = self
                .tree
                .intern(&self.lower.base, inode, &attr, &parent, name);
        }
        Ok(object)
    }

    /// Registers a prepared transaction in memory, so that a program can decide it. It was prepared by an earlier firnd
    /// (server of this mount) or revived from a backup. Until the decision programs see the old tree in its scope and
    /// cannot change it.
    ///
    /// `dir` is the transaction's directory in the backing, and `record` its log of changes.
    pub(crate) fn register_prepared(
        &self,
        serial: u64,
        dir: B::Inode,
        record: ChangeLog,
    ) -> Result<(), StoreError> {
        let root = self.recovered_root(&dir, &record)?;
        // An anchor is a hard link in the transaction's directory, by which an object is found after a crash. Its link
        // must not count in `st_nlink`.
        let anchors: Vec<(Identity, StagedPath)> = record
            .entries
            .iter()
            .filter_map(|entry| Some((entry.identity, entry.anchor_at.clone()?)))
            .collect();
        let scope = self.new_scope(serial, root, record.scope.clone(), dir, Some(record))?;
        for (identity, StagedPath { dir, name }) in anchors {
            let found = staging::find_dir(&self.lower.base, &scope.new, &dir)?;
            // Without the directory, the link does not exist.
            let Some((staging_dir, _)) = found else {
                continue;
            };
            let key = ObjectKey {
                dev: self.lower.device,
                ino: identity.ino,
            };
            // Only objects other than directories have anchors.
            let is_dir = false;
            self.link_counts
                .record_found_link(serial, key, &staging_dir, name, is_dir);
        }
        // In shadow mode removed objects have links in `kept/`, which must not count either.
        if let Some(shadow) = &scope.shadow {
            self.record_kept_links(serial, shadow)?;
        }
        self.scopes.add(Arc::new(scope));
        Ok(())
    }
}

/// The recovery of one open.
pub(crate) struct Recovery<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
    pub(crate) votes: Arc<Votes<B>>,
    pub(crate) names_ballots: Arc<NamesBallots<B>>,
    pub(crate) shadow_undo: Arc<ShadowUndo<B>>,
    pub(crate) arena_notes: Arc<ArenaNotes<B>>,
    pub(crate) history: Arc<History<B>>,
    pub(crate) endings: Arc<Endings<B>>,
    pub(crate) stored_scopes: Arc<StoredScopes<B>>,
}

impl<B: Backing> Recovery<B> {
    fn new(backing: &TransactionalBacking<B>) -> Self {
        Self {
            lower: Arc::clone(&backing.lower),
            scopes: Arc::clone(&backing.scopes),
            shared: Arc::clone(&backing.shared),
            votes: Arc::clone(&backing.votes),
            names_ballots: Arc::clone(&backing.names_ballots),
            shadow_undo: Arc::clone(&backing.shadow_undo),
            arena_notes: Arc::clone(&backing.arena_notes),
            history: Arc::clone(&backing.history),
            endings: Arc::clone(&backing.endings),
            stored_scopes: Arc::clone(&backing.stored_scopes),
        }
    }

    /// Continues a transaction that an earlier firnd (server of this mount) began, because its programs still run. It
    /// becomes prepared if there is a change log (`prepared`), and otherwise open.
    ///
    /// Returns `false`, without a change, if the directory that the transaction covers does not exist. The caller has
    /// checked that the transaction is in shadow mode, so the backing has its changes and the saved old state.
    fn continue_transaction(
        &self,
        stored: &StoredTransaction<B>,
        prepared: Option<&ChangeLog>,
    ) -> Result<bool, StoreError> {
        let Some(scope) = self.stored_scopes.revive_scope(stored)? else {
            return Ok(false);
        };
        let is_being_aborted = self.arena_notes.living.ending.contains(&stored.serial);
        if is_being_aborted {
            // Its changes may be undone in part, so it can only be aborted. Changes by its programs fail from now on.
            self.lower.remove_prepared_record(&scope.dir)?;
            scope.refuse_changes();
            if let Some(shadow) = &scope.shadow {
                // From now on the transaction does not count as complete, so it cannot be prepared or committed.
                shadow.begin_undo();
            }
        } else if let Some(record) = prepared {
            scope.set_stage(Stage::Prepared(record.id));
        }
        self.scopes.add(scope);
        Ok(true)
    }

    /// Recovers all transactions. Before that, calls `drop_pending`, which drops the pending data of the transactions
    /// that are undone.
    fn recover_all<E: From<OpenError> + From<StoreError>>(
        &self,
        drop_pending: impl FnOnce(&[Vec<u8>]) -> Result<(), E>,
    ) -> Result<RecoveryOutcome, E> {
        let paths = self.arena_notes.paths_to_drop()?;
        if !paths.is_empty() {
            drop_pending(&paths)?;
        }
        self.arena_notes.record_drops_of_other_arenas()?;
        Ok(self.finish_or_undo()?)
    }

    /// Recovers the transactions of this host, those shared with other hosts first. Then leaves the votes and ballots
    /// of the ended ones.
    fn finish_or_undo(&self) -> Result<RecoveryOutcome, OpenError> {
        let mut outcome = RecoveryOutcome::default();
        if let Some(transactions_dir) = self.lower.find_transactions_dir()? {
            self.recover_shared(&transactions_dir)?;
            self.recover_local(&transactions_dir, &mut outcome)?;
        }
        self.shared.leave_finished_shared(&outcome.waiting)?;
        self.votes.leave_old_votes(&outcome.waiting)?;
        self.names_ballots.leave_all()?;
        Ok(outcome)
    }

    /// Returns the hosts' decision about a transaction that this host has prepared: `true` for a commit, `None` if
    /// there is none.
    ///
    /// A scope of names without a decision is aborted, because no program will ask for its commit again.
    fn find_decision(&self, dir: &B::Inode, record: &ChangeLog) -> Result<Option<bool>, OpenError> {
        let decision = match staging::read_file(&self.lower.base, dir, staging::KEY)? {
            Some(key) => Some(self.names_ballots.settle_or_abort(&key)?),
            None => self.votes.find_decision(record.id, &record.scope)?,
        };
        Ok(decision)
    }

    /// Applies a decided commit or restore to the backing durably. Then removes its records, the files by which a later
    /// recovery would find it.
    ///
    /// `log` is applied forward for a commit, and backward for a restore.
    fn finish_decided(
        &self,
        transactions_dir: &B::Inode,
        stored: &StoredTransaction<B>,
        log: &ChangeLog,
        direction: Direction,
        outcome: &mut RecoveryOutcome,
    ) -> Result<(), OpenError> {
        let StoredTransaction { serial, dir, .. } = stored;
        let base = &self.lower.base;
        let new = staging::make_dir(base, dir, staging::NEW)?;
        let away = staging::make_dir(base, dir, staging::AWAY)?;
        let staging_dirs = StagingDirs {
            new: &new,
            away: &away,
        };
        Apply::new(base, self.lower.device, log, direction, &staging_dirs).run()?;
        // A transaction of several names, or with a new or renamed top, has changes outside of the one path that is
        // synced below.
        if self.lower.has_more_names(dir)? {
            self.lower.base.sync_all()?;
        } else {
            self.lower
                .sync_applied_changes(transactions_dir, log.scope_after(direction))?;
        }
        self.endings.finish_commit(dir, log, direction, *serial)?;
        self.history
            .discard_ended_transaction(transactions_dir, *serial, dir)?;
        let id = log.id_after(direction);
        outcome.finished.push(id);
        // Programs that still run may request this commit once more, because the earlier firnd did not answer them.
        let programs_run = self.arena_notes.living.open.contains(serial);
        if direction == Direction::Redo && programs_run {
            outcome.unanswered.push(Unanswered {
                id,
                scope: log.scope.clone(),
                path_after: log.scope_after(direction).to_vec(),
            });
        }
        Ok(())
    }

    /// Recovers each stored transaction of this host as the table in the head of this file says.
    fn recover_local(
        &self,
        transactions_dir: &B::Inode,
        outcome: &mut RecoveryOutcome,
    ) -> Result<(), OpenError> {
        for stored in self.lower.stored_transactions(transactions_dir)? {
            self.recover_stored(transactions_dir, &stored, outcome)?;
        }
        self.history.finish_log_cleanup(transactions_dir)?;
        Ok(())
    }

    /// Recovers one transaction that a crash left behind, and adds the result to `outcome`. The first rule that fits
    /// applies:
    /// 1. A decided transaction is applied.
    /// 2. A transaction continues if its programs still run (`can_continue`).
    /// 3. A prepared one waits for its decision.
    /// 4. Any other is undone.
    fn recover_stored(
        &self,
        transactions_dir: &B::Inode,
        stored: &StoredTransaction<B>,
        outcome: &mut RecoveryOutcome,
    ) -> Result<(), OpenError> {
        let can_continue = self.arena_notes.can_continue(stored)?;
        let StoredTransaction { serial, name, dir } = stored;
        // No new transaction may get the same serial number, and thus the same directory.
        self.scopes.skip_serial(*serial);
        // If the other hosts have decided, this stores their decision, so it comes before the look for a decision.
        let prepared = self.settle_prepared(stored)?;
        if let Some((log, direction)) = self.load_decided(stored)? {
            return self.finish_decided(transactions_dir, stored, &log, direction, outcome);
        }
        if can_continue && self.continue_transaction(stored, prepared.as_ref())? {
            outcome.continuing.push(*serial);
            return Ok(());
        }
        if let Some(record) = prepared {
            outcome.waiting.push((record.id, record.scope.clone()));
            let dir = dir.clone();
            return Ok(self.stored_scopes.register_prepared(*serial, dir, record)?);
        }
        // Without the mark `open` the transaction has ended, and only its directory is left.
        let scope = staging::load_scope(&self.lower.base, dir, staging::OPEN)?;
        // In shadow mode the backing has the changes. Otherwise they are lost already, and this does nothing.
        if let Some(scope) = &scope {
            self.shadow_undo.undo_stored(dir, name, scope)?;
        }
        outcome.undone.extend(scope);
        self.lower.remove_transaction(transactions_dir, dir, name)?;
        Ok(())
    }

    /// Stores the decision of the other hosts on a prepared transaction, if they decided while this host was down: the
    /// file `record` is renamed to `commit`, or removed after an abort.
    ///
    /// Returns the change log in that file; `None` if the transaction is not prepared or is aborted.
    fn settle_prepared(
        &self,
        stored: &StoredTransaction<B>,
    ) -> Result<Option<ChangeLog>, OpenError> {
        let StoredTransaction { name, dir, .. } = stored;
        let Some(record) = self.lower.load_record(dir, name, staging::RECORD)? else {
            return Ok(None);
        };
        let old_name = OsStr::new(staging::RECORD);
        let Some(is_committed) = self.find_decision(dir, &record)? else {
            return Ok(Some(record));
        };
        if is_committed {
            let new_name = OsStr::new(staging::COMMIT);
            self.lower
                .base
                .rename(dir, old_name, dir, new_name, RenameFlags::empty())?;
            self.lower.base.sync_dir(dir)?;
            Ok(Some(record))
        } else {
            // Without its record, the transaction is not prepared any more, and is undone.
            self.lower.base.unlink(dir, old_name)?;
            self.lower.base.sync_dir(dir)?;
            Ok(None)
        }
    }

    /// Returns the log of a decided commit or restore, and the direction in which the log is applied.
    fn load_decided(
        &self,
        stored: &StoredTransaction<B>,
    ) -> Result<Option<(ChangeLog, Direction)>, StoreError> {
        let StoredTransaction { name, dir, .. } = stored;
        if let Some(log) = self.lower.load_record(dir, name, staging::UNDO)? {
            return Ok(Some((log, Direction::Undo)));
        }
        let commit = self.lower.load_record(dir, name, staging::COMMIT)?;
        Ok(commit.map(|log| (log, Direction::Redo)))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Returns whether the backing has transactions that [`TransactionalBacking::open`] must recover before use.
    pub fn has_transactions(base: &B) -> Result<bool, StoreError> {
        let Some((transactions_dir, _)) = staging::find_dir(base, &base.root(), staging::FIRN_DIR)?
        else {
            return Ok(false);
        };
        Self::has_transactions_in(base, &transactions_dir)
    }

    /// Returns whether `dir`, the directory of a host's transactions, has transactions that must be recovered first.
    pub fn has_transactions_in(base: &B, dir: &B::Inode) -> Result<bool, StoreError> {
        let names = staging::list(base, dir)?;
        Ok(names.iter().any(|(name, ..)| name.starts_with(b"tx-")))
    }

    /// Returns the numbers of commits that are decided but not fully applied to the backing `base`.
    ///
    /// This function changes nothing; [`TransactionalBacking::open`] applies the commits.
    pub fn decided_commits(base: B) -> Result<Vec<u64>, StoreError> {
        let backing = Self::open_unrecovered(base, Opening::default())?;
        let mut ids = Vec::new();
        let Some(transactions_dir) = backing.lower.find_transactions_dir()? else {
            return Ok(ids);
        };
        for StoredTransaction { name, dir, .. } in
            backing.lower.stored_transactions(&transactions_dir)?
        {
            let undo_log = backing.lower.load_record(&dir, &name, staging::UNDO)?;
            let redo_log = backing.lower.load_record(&dir, &name, staging::COMMIT)?;
            // An undo log means that a commit is being undone.
            match (undo_log, redo_log) {
                (Some(log), _) => ids.push(log.id_after(Direction::Undo)),
                (None, Some(log)) => ids.push(log.id_after(Direction::Redo)),
                (None, None) => {}
            }
        }
        Ok(ids)
    }

    /// Opens a backing for transactions, and finishes or undoes the transactions of an earlier firnd. Only for callers
    /// whose arena has no pending data.
    pub fn open(base: B) -> Result<(Self, RecoveryOutcome), OpenError> {
        Self::open_with_history(base, 0)
    }

    /// Opens a backing as [`Self::open`] does. The logs of the last `history` commits of each scope are kept, so that
    /// these commits can be undone.
    pub fn open_with_history(base: B, history: u32) -> Result<(Self, RecoveryOutcome), OpenError> {
        Self::open_with(
            base,
            Opening {
                history,
                ..Opening::default()
            },
            |_| Ok(()),
        )
    }

    /// Opens a backing as [`Self::open`] does, as one of several hosts that commit together.
    pub fn open_of_members(
        base: B,
        members: Members,
    ) -> Result<(Self, RecoveryOutcome), OpenError> {
        Self::open_with(
            base,
            Opening {
                members: Some(members),
                ..Opening::default()
            },
            |_| Ok(()),
        )
    }

    /// Opens a backing as [`Self::open`] does, for a mount whose arena may have pending data.
    ///
    /// Before anything changes, `drop_pending` is called with the scopes whose pending data must be dropped. That data
    /// was written in a transaction that is undone, or after the prepare of a transaction. If another arena may have
    /// such data, a durable record says what that arena must drop at its return.
    ///
    /// The records of the transactions are removed only afterwards. So after a crash at any point, the data either is
    /// dropped already or will be dropped by the next open.
    pub fn open_with<E: From<OpenError> + From<StoreError>>(
        base: B,
        opening: Opening,
        drop_pending: impl FnOnce(&[Vec<u8>]) -> Result<(), E>,
    ) -> Result<(Self, RecoveryOutcome), E> {
        Self::try_open(base, opening, drop_pending).map_err(|(_, error)| error)
    }

    /// Opens a backing and recovers its transactions, as [`Self::open_with`] does. An error comes with `base`, so that
    /// the caller can use the backing again.
    ///
    /// `drop_pending` is called with paths. It must drop all written data below them that is not in the backing yet.
    pub fn try_open<E: From<OpenError> + From<StoreError>>(
        base: B,
        opening: Opening,
        drop_pending: impl FnOnce(&[Vec<u8>]) -> Result<(), E>,
    ) -> Result<(Self, RecoveryOutcome), (B, E)> {
        let top = match BackingTop::find(&base) {
            Ok(top) => top,
            Err(error) => return Err((base, error.into())),
        };
        let backing = Self::assemble_over(base, &top, opening);
        let recovered = Recovery::new(&backing).recover_all(drop_pending);
        match recovered {
            Ok(outcome) => {
                for commit in &outcome.unanswered {
                    backing.record_unanswered(commit.clone());
                }
                Ok((backing, outcome))
            }
            Err(error) => Err((backing.into_base(), error)),
        }
    }

    /// Opens a backing for transactions without recovering earlier ones.
    pub(super) fn open_unrecovered(base: B, opening: Opening) -> Result<Self, StoreError> {
        let top = BackingTop::find(&base)?;
        Ok(Self::assemble_over(base, &top, opening))
    }

    /// Assembles the parts over a backing with this top.
    fn assemble_over(base: B, top: &BackingTop<B>, opening: Opening) -> Self {
        let backing = Self::assemble(base, &top.object, opening);
        if top.has_firn_dir {
            backing.link_counts.record_firn_dir_link();
        }
        backing
    }
}

/// The top of a backing that is being opened.
struct BackingTop<B: Backing> {
    object: Arc<Object<B>>,
    /// Whether the top has the directory `.firn`.
    has_firn_dir: bool,
}

impl<B: Backing> BackingTop<B> {
    fn find(base: &B) -> Result<Self, StoreError> {
        let root = base.root();
        let attr = base.attr(&root)?;
        let has_firn_dir = staging::find_dir(base, &root, staging::FIRN_DIR)?.is_some();
        let state = ObjectState {
            base: Some(root),
            change: None,
        };
        let object = Object::new(ObjectKey::from_attr(&attr), Kind::Dir, state, None);
        Ok(Self {
            object: Arc::new(object),
            has_firn_dir,
        })
    }
}
