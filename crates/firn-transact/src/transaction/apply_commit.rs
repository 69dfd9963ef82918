//! Decision of a commit, and its application to the backing, the directory below the mount.
//!
//! A decision is the rename of the transaction's log to `tx-N/commit`. From then on the commit is a fact, and programs
//! see the committed tree from the transaction's tables in memory. The application then changes the backing step by
//! step. The *scope* of a transaction is what it covers; a *staged copy* is a file in `tx-N/` with changed bytes.
//!
//! Why programs can read during the application: they see the tables, and no step changes what the tables refer to.
//! * Attributes are copied into the tables before the first step ([`Change::frozen_attr`]).
//! * Names that a step changes are in the tables.
//! * Bytes that a step writes are read from the staged copy or from memory.
//! * New objects are found where they are or where they are moved to ([`StagedCopy::final_name`]); a move does not
//!   change the object itself.
//!
//! Changes of the scope wait for the end of the application, unless a transaction follows the commit. The following
//! transaction is stored already; it takes the commit's place when the commit's tables are dropped.
//!
//! A commit of an earlier firnd (the process that serves the mount) has no tables, so programs wait while it is
//! applied.
//!
//! [`Change::frozen_attr`]: crate::object::Change
//! [`StagedCopy::final_name`]: crate::object::StagedCopy::final_name

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Kind, RenameFlags};

use crate::apply::{Apply, MadeDir, StagingDirs};
use crate::attributes::Objects;
use crate::change_log::{ChangeLog, Direction};
use crate::claim::{Claim, ExclusiveValue};
use crate::error::{CommitError, StageError, StoreError};
use crate::link_counts::LinkCounts;
use crate::lower_backing::LowerBacking;
use crate::names_ballot::NamesBallots;
use crate::object::{Change, Object, ObjectState};
use crate::records::Endings;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::shadow::shared::SharedTransactions;
use crate::staging;
use crate::transactional::TransactionalBacking;
use crate::tree::{QuietGuard, Tree};
use crate::unanswered::VoteToLeave;
use crate::vote::Votes;

/// Decided commits, and the operations that apply them.
pub(crate) struct DecidedCommits<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) link_counts: Arc<LinkCounts<B>>,
    pub(crate) objects: Arc<Objects<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
    pub(crate) votes: Arc<Votes<B>>,
    pub(crate) names_ballots: Arc<NamesBallots<B>>,
    pub(crate) endings: Arc<Endings<B>>,
    /// Applied commits whose votes this host could not leave yet. Firnd tries again later.
    pub(crate) votes_to_leave: Mutex<BTreeSet<VoteToLeave>>,
    /// Keys of applied transactions of names whose ballots this host could not leave yet. Firnd tries again later.
    pub(crate) ballots_to_leave: Mutex<BTreeSet<Vec<u8>>>,
}

impl<B: Backing> DecidedCommits<B> {
    /// Assembles this part of a [`TransactionalBacking`] from the parts below it. No vote or ballot remains to be left.
    pub(crate) fn new(
        objects: &Arc<Objects<B>>,
        votes: &Arc<Votes<B>>,
        names_ballots: &Arc<NamesBallots<B>>,
        endings: &Arc<Endings<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(&endings.lower),
            tree: Arc::clone(&votes.tree),
            scopes: Arc::clone(&endings.scopes),
            link_counts: Arc::clone(&endings.link_counts),
            objects: Arc::clone(objects),
            shared: Arc::clone(&votes.shared),
            votes: Arc::clone(votes),
            names_ballots: Arc::clone(names_ballots),
            endings: Arc::clone(endings),
            votes_to_leave: Mutex::default(),
            ballots_to_leave: Mutex::default(),
        }
    }

    /// Applies the commit that a transaction follows, if it follows one.
    pub(super) fn apply_commit_before(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        match self.scopes.commit_before(scope) {
            Some(followed_commit) => self.apply_commit(&followed_commit).map(drop),
            None => Ok(()),
        }
    }

    /// Before a transaction begins at `root`, applies the decided commits at, above or below it.
    ///
    /// If the new transaction can follow a commit, the commit remains unapplied. So does a commit that another
    /// transaction follows already, because the begin will fail there.
    pub(super) fn apply_commits_around(&self, root: &Arc<Object<B>>) -> Result<(), StoreError> {
        for scope in &self.scopes.all() {
            let overlaps = root.is_below(&scope.root) || scope.root.is_below(root);
            if overlaps
                && scope.decided_id().is_some()
                && scope.apply_state.next_scope().is_none()
                && !scope.can_be_followed(root)
            {
                self.apply_commit(scope)?;
            }
        }
        Ok(())
    }

    /// Quiesces names and data of a scope until the returned guard is dropped. If the end of the transaction changes
    /// the name of the scope's top, the parent directory is quiesced too.
    pub(super) fn quiesce_scope(&self, scope: &Scope<B>) -> QuietGuard<'_, B> {
        loop {
            let areas = scope.areas_to_quiesce();
            let area_count = areas.len();
            let quiet = self.tree.quiesce(areas);
            // The top may have been renamed during the wait. In that case the parent must be quiesced as well.
            if scope.areas_to_quiesce().len() == area_count {
                return quiet;
            }
        }
    }

    /// Ends the transaction that follows a commit; see [`Decided::give_up_next`](crate::Decided::give_up_next). A
    /// failure is logged, and the transaction stays open.
    pub(super) fn give_up_next(&self, scope: &Scope<B>) {
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        if let Err(error) = self.drop_next(scope) {
            tracing::warn!(%error, "the commit is done, but the next transaction, which began with it, cannot be ended and remains open");
        }
    }

    /// Ends the transaction that follows a commit. Returns whether there was one.
    pub(super) fn drop_next(&self, scope: &Scope<B>) -> Result<bool, Errno> {
        let Some(next_scope) = scope.apply_state.next_scope() else {
            return Ok(false);
        };
        self.lower.remove_records(&next_scope.dir)?;
        scope.apply_state.take_next_scope();
        next_scope.set_stage(Stage::Ended);
        // The following transaction has no changes yet, because they wait for the commit. They will be made after the
        // commit, outside of a transaction.
        scope.allow_changes();
        self.endings.clean_up(&next_scope);
        Ok(true)
    }

    /// Applies a decided commit to the backing; see [`Decided::apply`](crate::Decided::apply).
    ///
    /// Returns whether this call completed the application; `false` if another call had completed it. After an error
    /// the commit stays decided, and the application can be repeated.
    pub(super) fn apply_commit(&self, scope: &Arc<Scope<B>>) -> Result<bool, StoreError> {
        // One thread at a time applies the commit.
        let _applying = Claim::acquire_exclusive(&scope.apply_state.applying);
        let Some(id) = scope.decided_id() else {
            return Ok(false);
        };
        let applied = match &scope.recovered {
            None => self.apply_while_programs_read(scope),
            // A commit of an earlier firnd has no tables from which programs could read, so programs wait.
            Some(_) => self.apply_exclusively(scope),
        };
        // Other hosts wait until this host has left the vote or ballot.
        let result = applied.and_then(|()| match &scope.key {
            Some(key) => Ok(self.leave_ballot(key)?),
            None => Ok(self.leave_applied(id, &scope.path)?),
        });
        scope.apply_state.record_result(&result);
        result.map(|()| true)
    }

    /// Applies the undo of a commit. `serial` is the serial number of that undo's transaction. The caller has
    /// quiesced names and data.
    pub(crate) fn apply_undo(&self, serial: u64) -> Result<(), StoreError> {
        let scope = self
            .scopes
            .find(|scope| scope.serial == serial)
            .expect("the caller has just added the transaction");
        let applied = self
            .lower
            .sync_transactions_dir()
            .map_err(StoreError::from)
            .and_then(|()| self.apply_and_end(&scope));
        scope.apply_state.record_result(&applied);
        applied
    }

    /// Applies a commit while programs that use the scope wait.
    fn apply_exclusively(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        let _quiet = self.quiesce_scope(scope);
        if scope.is_undo {
            self.lower.sync_transactions_dir()?;
        }
        self.apply_and_end(scope)
    }

    /// Applies a commit in a scope that the caller has quiesced, and ends the transaction.
    fn apply_and_end(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        // Programs may still read attributes of objects that they have open, so hidden links must be subtracted
        // correctly.
        self.link_counts.mark_links_ending(scope);
        self.apply(scope)?;
        self.move_top_to_name_after_commit(scope);
        self.endings.end_transaction(scope);
        self.endings.clean_up(scope);
        Ok(())
    }

    /// Applies a commit while programs continue to read the scope, and ends the transaction.
    fn apply_while_programs_read(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        self.make_shared_dirs(scope)?;
        self.freeze_attributes(scope)?;
        self.apply(scope)?;
        // Programs go on only after the backing has taken the place of the tables.
        let quiet = self.quiesce_scope(scope);
        self.keep_inodes_in_use(scope)?;
        self.drop_applied_changes(scope);
        drop(quiet);
        self.endings.clean_up(scope);
        Ok(())
    }

    /// Creates the new directories of a decided commit that other hosts may create as well. Makes the tables, from
    /// which programs read during the application, refer to them.
    ///
    /// Does nothing on a mount of one host.
    fn make_shared_dirs(&self, scope: &Scope<B>) -> Result<(), StoreError> {
        if self.lower.members.is_none() {
            return Ok(());
        }
        let dir_name = format!("tx-{}", scope.serial);
        let Some(log) = self
            .lower
            .load_record(&scope.dir, &dir_name, staging::COMMIT)?
        else {
            return Ok(());
        };
        let made_dirs = self
            .prepare_apply(scope, &log, Direction::Redo)
            .make_shared_dirs()?;
        let changed = scope.changed.lock().clone();
        for MadeDir { number, inode } in made_dirs {
            let Some(object) = changed.get(&number) else {
                continue;
            };
            let claimed = object.state.acquire_exclusive();
            // Programs find the new directory by this inode from now on.
            if let Some(staged_copy) = claimed.edit().staged_copy_mut() {
                staged_copy.kept_inode = Some(inode);
            }
        }
        Ok(())
    }

    /// Prepares an application of `log` with the staging directories of the scope. Nothing is changed yet.
    fn prepare_apply<'a>(
        &'a self,
        scope: &'a Scope<B>,
        log: &'a ChangeLog,
        direction: Direction,
    ) -> Apply<'a, B> {
        let dirs = StagingDirs {
            new: &scope.new,
            away: &scope.away,
        };
        Apply::new(&self.lower.base, self.lower.device, log, direction, &dirs)
    }

    /// Applies the stored change log of a decided transaction to the backing: forward for a commit, backward for the
    /// undo of one. Then stores the number of the commit, and removes the log or keeps it for an undo.
    fn apply(&self, scope: &Scope<B>) -> Result<(), StoreError> {
        let direction = scope.direction();
        let record_name = match direction {
            Direction::Redo => staging::COMMIT,
            Direction::Undo => staging::UNDO,
        };
        let dir_name = format!("tx-{}", scope.serial);
        let log = self.lower.load_record(&scope.dir, &dir_name, record_name)?;
        let Some(log) = log else {
            // An earlier attempt applied the whole log, and failed while it removed the records.
            return Ok(self.lower.remove_records(&scope.dir)?);
        };
        let mut apply = self.prepare_apply(scope, &log, direction);
        // Objects that are in use need not be searched by name.
        let changed = scope.changed.lock().clone();
        for (number, object) in &changed {
            if let Some(inode) = object.base() {
                apply.set_object(*number, inode);
            }
        }
        drop(changed);
        apply.run()?;
        self.endings
            .finish_commit(&scope.dir, &log, direction, scope.serial)
    }

    /// Drops the changes in memory of an applied commit, so that programs see the backing again. The caller has
    /// quiesced names and data: no program uses them meanwhile.
    ///
    /// If the inode of a new object was kept open during the application, the object uses it from now on. Any other new
    /// object is not in use, and is looked up anew by its name.
    fn drop_applied_changes(&self, scope: &Arc<Scope<B>>) {
        scope.drop_names_in_root();
        let changed = std::mem::take(&mut *scope.changed.lock());
        // In the order of the changes' numbers, so that a new directory has a base before its children need that base.
        for object in changed.into_values() {
            let location = object.location.lock().clone();
            let parent_and_name = location.and_then(|(parent, name)| Some((parent.base()?, name)));
            let claimed = object.state.acquire_exclusive();
            {
                let mut state = claimed.edit();
                let Some(change) = state.change.take() else {
                    continue;
                };
                if state.base.is_none() {
                    let kept_inode = change.staged_copy.and_then(|copy| copy.kept_inode);
                    // The commit has moved the object from the transaction's directory to its name.
                    state.base = kept_inode.map(|inode| match &parent_and_name {
                        Some((parent, name)) => self.lower.base.moved_to(&inode, parent, name),
                        None => inode,
                    });
                }
            }
            object.close_lower_files();
        }
        self.endings.end_transaction(scope);
    }

    /// Copies the attributes of all changed objects into the transaction's tables, before the first step of the
    /// application to the backing changes them. Programs read them from there until the application ends.
    ///
    /// A repeated attempt retains the attributes of the first one, because the objects may have changed since.
    fn freeze_attributes(&self, scope: &Scope<B>) -> Result<(), Errno> {
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        for object in &changed {
            let needs_copy = object
                .state
                .acquire_shared()
                .read()
                .change
                .as_ref()
                .is_some_and(|change| change.frozen_attr.is_none());
            if !needs_copy {
                continue;
            }
            let attr = match self.objects.read_attr(object) {
                Ok(attr) => Some(attr),
                // The object has no inode any more, so programs cannot read its attributes either.
                Err(Errno::STALE) => None,
                Err(errno) => return Err(errno),
            };
            let claimed = object.state.acquire_exclusive();
            // A new directory is reached by its inode, which stays valid when the commit moves the directory.
            if object.kind == Kind::Dir {
                self.keep_staged_inode_if(&claimed, |state, change| {
                    state.base.is_none() && !change.is_removed
                })?;
            }
            if let Some(change) = &mut claimed.edit().change {
                change.frozen_attr = attr;
            }
        }
        // Second pass: all directories have their inodes in the tables by now, so the destinations of other objects are
        // known.
        for object in changed.iter().filter(|object| object.kind != Kind::Dir) {
            self.record_final_name(object)?;
        }
        Ok(())
    }

    /// Ensures that programs can read a new object while the commit moves it: records the name that it gets. If the
    /// object has several names, its inode is kept open instead. Not all inodes can be kept open, because there may be
    /// more new objects than a process may have descriptors.
    ///
    /// Does nothing if the object is not new or has lost its names, or if its name or inode is recorded already.
    fn record_final_name(&self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let final_dir = self.dir_with_name_of(object);
        let location = object.location.lock().clone();
        let claimed = object.state.acquire_exclusive();
        {
            let mut state = claimed.edit();
            let is_new = state.base.is_none();
            let Some(change) = &mut state.change else {
                return Ok(());
            };
            // The names of a new object are all added in the transaction.
            let name_count = change.link_delta;
            if !is_new || name_count <= 0 {
                return Ok(());
            }
            let Some(staged_copy) = &mut change.staged_copy else {
                return Ok(());
            };
            if staged_copy.kept_inode.is_some() || staged_copy.final_name.is_some() {
                return Ok(());
            }
            if let (Some(dir), Some((_, name))) = (final_dir, location)
                && name_count == 1
            {
                staged_copy.final_name = Some((dir, name));
                return Ok(());
            }
        }
        let in_any_case = |_: &ObjectState<B>, _: &Change<B>| true;
        self.keep_staged_inode_if(&claimed, in_any_case)
    }

    /// Keeps the inode of an object's staged copy open, so that programs can read the object while the commit moves the
    /// copy. The staged copy has a transaction's changes of the object.
    ///
    /// Does nothing if there is no copy, or if `is_wanted` returns false.
    fn keep_staged_inode_if(
        &self,
        claimed: &ExclusiveValue<'_, ObjectState<B>>,
        is_wanted: impl FnOnce(&ObjectState<B>, &Change<B>) -> bool,
    ) -> Result<(), Errno> {
        let staged_copy = {
            let state = claimed.read();
            match &state.change {
                Some(change) if is_wanted(&state, change) => change.staged_copy.clone(),
                _ => None,
            }
        };
        let Some(staged_copy) = staged_copy else {
            return Ok(());
        };
        let inode = staged_copy.inode(&self.lower.base)?;
        if let Some(staged_copy) = claimed.edit().staged_copy_mut() {
            staged_copy.kept_inode = Some(inode);
        }
        Ok(())
    }

    /// Returns the directory that the object was last seen in, if a changed name there leads to the object. Returns
    /// `None` if the inode of the directory is not in the tables.
    fn dir_with_name_of(&self, object: &Arc<Object<B>>) -> Option<B::Inode> {
        let (dir, name) = object.location.lock().clone()?;
        let claimed = dir.state.acquire_shared();
        let dir_state = claimed.read();
        let name_change = dir_state.change.as_ref()?.names.get(&name)?;
        let named_object = name_change.object.as_ref()?;
        if !Arc::ptr_eq(named_object, object) {
            return None;
        }
        match &dir_state.base {
            Some(inode) => Some(inode.clone()),
            None => dir_state.staged_copy()?.kept_inode.clone(),
        }
    }

    /// Keeps the inodes of new objects that callers refer to, before their staged names are removed. All other new
    /// objects are found by their new names at the next look-up.
    fn keep_inodes_in_use(&self, scope: &Scope<B>) -> Result<(), Errno> {
        // The list is copied, because a look-up in the backing may hang and the status needs the list's lock.
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        for object in &changed {
            self.keep_staged_inode_if(&object.state.acquire_exclusive(), |state, change| {
                // References that no caller has: the scope's, the one of this list, and one for each name.
                let own_references = 2 + usize::try_from(change.link_delta).unwrap_or(0);
                let is_in_use =
                    object.kind == Kind::Dir || Arc::strong_count(object) > own_references;
                state.base.is_none() && is_in_use
            })?;
        }
        Ok(())
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Decides the commit of a transaction durably under the number `id`; see
    /// [`TransactionHandle::decide`](crate::TransactionHandle::decide).
    ///
    /// Returns `Ok` if the commit is decided, even by an earlier call. Fails if the transaction has another number or
    /// is being undone, or if the other hosts do not agree. After an error of the last sync the commit counts as
    /// decided.
    pub(super) fn decide_scope(&self, scope: &Arc<Scope<B>>, id: u64) -> Result<(), CommitError> {
        // A decided commit that the transaction follows comes first.
        self.commits.apply_commit_before(scope)?;
        // From here on no program changes what the transaction covers.
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        self.tree.check_all(scope);
        if !scope.has_all_changes() {
            return Err(StageError::Undoing.into());
        }
        let stage = *scope.stage.lock();
        match stage {
            Stage::Prepared(found) | Stage::Decided(found) if found != id => {
                return Err(StageError::OtherId { found, wanted: id }.into());
            }
            Stage::Prepared(_) => self.decide_prepared(scope, stage, id)?,
            Stage::Open => self.decide_open(scope, stage, id)?,
            // The sync of an earlier call may have failed.
            Stage::Decided(_) => {}
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        self.lower.base.sync_dir(&scope.dir)?;
        Ok(())
    }

    /// Decides the commit of a prepared transaction: renames its change log, stored in the backing, to `commit`. Does
    /// not sync the rename. Fails if the other hosts, if there are any, have not agreed on the commit.
    fn decide_prepared(
        &self,
        scope: &Arc<Scope<B>>,
        stage: Stage,
        id: u64,
    ) -> Result<(), CommitError> {
        // An earlier firnd may have prepared the transaction without a backup.
        if let Some(record) = &scope.recovered
            && !self.backups.is_backed_up(scope)
        {
            self.backups.back_up(scope, record)?;
        }
        // The hosts decide a transaction of names by a ballot with its key, and any other by a vote.
        match &scope.key {
            Some(key) => self.names_ballots.must_be_committed(key)?,
            None => self.votes.decide_commit_with_hosts(scope, stage, id)?,
        }
        let old_name = OsStr::new(staging::RECORD);
        let new_name = OsStr::new(staging::COMMIT);
        self.lower.base.rename(
            &scope.dir,
            old_name,
            &scope.dir,
            new_name,
            RenameFlags::empty(),
        )?;
        scope.set_stage(Stage::Decided(id));
        Ok(())
    }

    /// Decides the commit of an open transaction: writes its record and renames it to `commit`. Does not sync the
    /// rename.
    ///
    /// A crash before the rename leaves an open transaction, which the recovery undoes.
    fn decide_open(&self, scope: &Arc<Scope<B>>, stage: Stage, id: u64) -> Result<(), CommitError> {
        self.votes.decide_commit_with_hosts(scope, stage, id)?;
        self.write_record(scope, id)?;
        self.lower
            .place_record(scope, staging::COMMIT)
            .inspect_err(|_| self.backups.withdraw_backup(scope))?;
        scope.set_stage(Stage::Decided(id));
        Ok(())
    }
}
