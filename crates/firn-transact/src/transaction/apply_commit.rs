//! Decision and application of a commit.
//!
//! A decision is the rename of the transaction's log to `tx-N/commit`. From then on the commit is a fact, and programs
//! see the committed tree from the transaction's tables in memory. The application then changes the backing step by
//! step.
//!
//! Why programs can read during the application: they see the tables, and no step changes what the tables refer to.
//! * Attributes are copied into the tables before the first step ([`Change::frozen`]).
//! * Names that a step changes are in the tables.
//! * Bytes that a step writes are read from the staged copy or from memory.
//! * New objects are found where they are or where they are moved to ([`StagedCopy::final_name`]); a move does not change
//!   the object itself.
//!
//! Changes of the scope wait for the end of the application, unless a transaction follows the commit. The following
//! transaction is stored already; it takes the commit's place when the commit's tables are dropped.
//!
//! A commit of an earlier firnd has no tables, so programs wait while it is applied.
//!
//! [`Change::frozen`]: crate::object::Change
//! [`StagedCopy::final_name`]: crate::object::StagedCopy::final_name

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::sync::Arc;

use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno, Kind, RenameFlags};

use crate::apply::{Apply, StagingDirs};
use crate::attributes::Objects;
use crate::change_log::{ChangeLog, Direction};
use crate::claim::{Claim, Owning};
use crate::error::{CommitError, StageError, StoreError};
use crate::hidden::OwnLinks;
use crate::lower_backing::LowerBacking;
use crate::names_ballot::NamesBallots;
use crate::object::{Change, Inner, Object};
use crate::records::Endings;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::shadow::shared::SharedTransactions;
use crate::staging;
use crate::transactional::TransactionalBacking;
use crate::tree::QuietGuard;
use crate::tree::Tree;
use crate::unanswered::AppliedCommit;
use crate::vote::Votes;

/// Decided commits, and the operations that apply them.
pub(crate) struct Commits<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) own_links: Arc<OwnLinks<B>>,
    pub(crate) objects: Arc<Objects<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
    pub(crate) votes: Arc<Votes<B>>,
    pub(crate) names_ballots: Arc<NamesBallots<B>>,
    pub(crate) endings: Arc<Endings<B>>,
    /// Applied commits whose votes this host could not leave yet. Firnd tries again later.
    pub(crate) to_leave: Mutex<BTreeSet<AppliedCommit>>,
    /// Keys of applied transactions of names whose ballots this host could not leave yet. Firnd tries again later.
    pub(crate) keys_to_leave: Mutex<BTreeSet<Vec<u8>>>,
}

impl<B: Backing> Commits<B> {
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
            own_links: Arc::clone(&endings.own_links),
            objects: Arc::clone(objects),
            shared: Arc::clone(&votes.shared),
            votes: Arc::clone(votes),
            names_ballots: Arc::clone(names_ballots),
            endings: Arc::clone(endings),
            to_leave: Mutex::default(),
            keys_to_leave: Mutex::default(),
        }
    }

    /// Applies the commit that a transaction follows, if it follows one.
    pub(super) fn apply_commit_before(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        match self.scopes.commit_before(scope) {
            Some(before) => self.apply_commit(&before).map(drop),
            None => Ok(()),
        }
    }

    /// Before a transaction begins at `root`, applies the decided commits at, above or below it.
    ///
    /// If the new transaction can follow a commit, the commit remains unapplied. So does a commit that another
    /// transaction follows already, because the begin will fail there.
    pub(super) fn apply_commits_around(&self, root: &Arc<Object<B>>) -> Result<(), StoreError> {
        let scopes = self.scopes.all();
        let overlaps =
            |scope: &&Arc<Scope<B>>| root.is_below(&scope.root) || scope.root.is_below(root);
        let in_the_way = scopes.iter().filter(overlaps).filter(|scope| {
            scope.decided().is_some()
                && scope.application.next().is_none()
                && !scope.can_be_followed(root)
        });
        in_the_way
            .into_iter()
            .try_for_each(|scope| self.apply_commit(scope).map(drop))
    }

    /// Keeps names and data of a scope until the returned guard is dropped. If the end of the transaction changes the
    /// name of the scope's top, the parent directory is kept too.
    pub(super) fn quiesce_scope(&self, scope: &Scope<B>) -> QuietGuard<'_, B> {
        loop {
            let parts = scope.parts();
            let count = parts.len();
            let quiet = self.tree.quiesce(parts);
            // The top may have been renamed during the wait. In that case the parent must be kept as well.
            if scope.parts().len() == count {
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
        let Some(next) = scope.application.next() else {
            return Ok(false);
        };
        self.lower.forget_records(&next.dir)?;
        scope.application.take_next();
        next.set_stage(Stage::Ended);
        // The following transaction has no changes yet, because they wait for the commit. They will be made after the
        // commit, outside of a transaction.
        scope.refuse_changes(false);
        self.endings.clean_up(&next);
        Ok(true)
    }

    /// Applies a decided commit; see [`Decided::apply`](crate::Decided::apply).
    ///
    /// Returns whether this call completed the application; `false` if another call had completed it. After an error
    /// the commit stays decided, and the application can be repeated.
    pub(super) fn apply_commit(&self, scope: &Arc<Scope<B>>) -> Result<bool, StoreError> {
        let _applying = Claim::own(&scope.application.applying);
        let Some(id) = scope.decided() else {
            return Ok(false);
        };
        let applied = match &scope.recovered {
            None => self.apply_while_read(scope),
            // A commit of an earlier firnd has no tables from which programs could read, so programs wait.
            Some(_) => self.apply_alone(scope),
        };
        let result = applied.and_then(|()| match &scope.key {
            Some(key) => Ok(self.leave_key(key)?),
            None => Ok(self.leave_applied(id, &scope.path)?),
        });
        scope.application.note_result(&result);
        result.map(|()| true)
    }

    /// Applies the undo of a commit. `serial` is the serial number of that undo's transaction. The caller keeps names
    /// and data.
    pub(crate) fn apply_undo(&self, serial: u64) -> Result<(), StoreError> {
        let found = self.scopes.find(|one| one.serial == serial);
        let scope = found.expect("it was just entered");
        let applied = self
            .lower
            .sync_staging_dir()
            .map_err(StoreError::from)
            .and_then(|()| self.apply_and_end(&scope));
        scope.application.note_result(&applied);
        applied
    }

    /// Applies a commit while programs that use the scope wait.
    fn apply_alone(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        let _quiet = self.quiesce_scope(scope);
        if scope.is_undo {
            self.lower.sync_staging_dir()?;
        }
        self.apply_and_end(scope)
    }

    /// Applies a commit in a scope that the caller keeps, and ends the transaction.
    fn apply_and_end(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        // Programs may still read attributes of objects that they have open, so hidden links must be subtracted
        // correctly.
        self.own_links.note_links_ending(scope);
        self.apply(scope)?;
        self.settle_top(scope);
        self.endings.end_transaction(scope);
        self.endings.clean_up(scope);
        Ok(())
    }

    /// Applies a commit while programs continue to read the scope, and ends the transaction.
    fn apply_while_read(&self, scope: &Arc<Scope<B>>) -> Result<(), StoreError> {
        self.make_shared_dirs(scope)?;
        self.freeze(scope)?;
        self.apply(scope)?;
        let quiet = self.quiesce_scope(scope);
        self.hold_new(scope)?;
        self.drop_changes_of(scope);
        drop(quiet);
        self.endings.clean_up(scope);
        Ok(())
    }

    /// Creates the new directories that other hosts may create as well, and makes the tables refer to them.
    ///
    /// Does nothing on a mount of one host.
    fn make_shared_dirs(&self, scope: &Scope<B>) -> Result<(), StoreError> {
        if self.lower.members.is_none() {
            return Ok(());
        }
        let tx = format!("tx-{}", scope.serial);
        let log = self.lower.load_record(&scope.dir, &tx, staging::COMMIT)?;
        let Some(log) = log else { return Ok(()) };
        let mut apply = self.start_apply(scope, &log, Direction::Redo);
        let made = apply.make_shared_dirs()?;
        let changed = scope.changed.lock().clone();
        for (number, inode) in made {
            let Some(object) = changed.get(&number) else {
                continue;
            };
            let owned = object.inner.own();
            let mut inner = owned.edit();
            let change = inner.change.as_mut();
            if let Some(copy) = change.and_then(|change| change.copy.as_mut()) {
                copy.kept_inode = Some(inode);
            }
        }
        Ok(())
    }

    /// Prepares an application of `log` with the staging directories of the scope. Nothing is changed yet.
    fn start_apply<'a>(
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

    /// Applies the stored log of a decided transaction to the backing, and stores the number of the commit.
    fn apply(&self, scope: &Scope<B>) -> Result<(), StoreError> {
        let direction = scope.direction();
        let name = match direction {
            Direction::Redo => staging::COMMIT,
            Direction::Undo => staging::UNDO,
        };
        let log = self
            .lower
            .load_record(&scope.dir, &format!("tx-{}", scope.serial), name)?;
        let Some(log) = log else {
            // An earlier attempt applied the whole log, and failed while it removed the records.
            return Ok(self.lower.forget_records(&scope.dir)?);
        };
        let mut apply = self.start_apply(scope, &log, direction);
        let changed = scope.changed.lock().clone();
        for (number, object) in &changed {
            if let Some(inode) = object.base() {
                apply.set_object(*number, inode);
            }
        }
        drop(changed);
        apply.run()?;
        self.endings
            .finish_commit(&scope.dir, (&log, direction), scope.serial)
    }

    /// Drops the tables of an applied commit, so that programs see the backing again. The caller keeps names and data.
    fn drop_changes_of(&self, scope: &Arc<Scope<B>>) {
        scope.drop_names_in_root();
        let changed = std::mem::take(&mut *scope.changed.lock());
        // In the order of the changes' numbers, so that a new directory has a base before its children need that base.
        for (_, object) in changed {
            let place = object.location.lock().clone();
            let place = place.and_then(|(parent, name)| Some((parent.base()?, name)));
            let owned = object.inner.own();
            {
                let mut inner = owned.edit();
                let Some(change) = inner.change.take() else {
                    continue;
                };
                if inner.base.is_none() {
                    let held = change.copy.and_then(|copy| copy.kept_inode);
                    inner.base = held.map(|inode| match &place {
                        Some((parent, name)) => self.lower.base.moved_to(&inode, parent, name),
                        None => inode,
                    });
                }
            }
            object.close_lower_files();
        }
        self.endings.end_transaction(scope);
    }

    /// Copies the attributes of all changed objects into the tables, before the first step of the application changes
    /// them.
    ///
    /// A repeated attempt keeps the attributes of the first one, because the objects may have changed since.
    fn freeze(&self, scope: &Scope<B>) -> Result<(), Errno> {
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        for object in &changed {
            let is_done = object
                .inner
                .share()
                .read()
                .change
                .as_ref()
                .is_none_or(|change| change.frozen.is_some());
            if is_done {
                continue;
            }
            let attr = match self.objects.read_attr(object) {
                Ok(attr) => Some(attr),
                Err(Errno::STALE) => None,
                Err(errno) => return Err(errno),
            };
            let is_dir = object.kind == Kind::Dir;
            let owned = object.inner.own();
            let is_there = |change: &Change<B>| !change.removed && (is_dir || change.links > 0);
            self.hold_copy_if(&owned, |inner, change| {
                inner.base.is_none() && is_there(change) && is_dir
            })?;
            if let Some(change) = &mut owned.edit().change {
                change.frozen = attr;
            }
        }
        changed
            .iter()
            .filter(|object| object.kind != Kind::Dir)
            .try_for_each(|object| self.note_destination(object))
    }

    /// Records where the commit moves a new object. An object with several names is retained by its inode instead.
    ///
    /// Not all new objects are retained by inode, because there may be more than a process may have descriptors.
    fn note_destination(&self, object: &Arc<Object<B>>) -> Result<(), Errno> {
        let place = self.only_place(object);
        let location = object.location.lock().clone();
        let owned = object.inner.own();
        {
            let mut inner = owned.edit();
            let is_new = inner.base.is_none();
            let Some(change) = inner
                .change
                .as_mut()
                .filter(|change| is_new && change.links > 0)
            else {
                return Ok(());
            };
            let Some(copy) = change.copy.as_mut() else {
                return Ok(());
            };
            if copy.kept_inode.is_some() || copy.final_name.is_some() {
                return Ok(());
            }
            if let (Some(dir), Some((_, name)), 1) = (place, location, change.links) {
                copy.final_name = Some((dir, name));
                return Ok(());
            }
        }
        self.hold_copy_if(&owned, |_, _| true)
    }

    /// Keeps the inode of a staged copy in the tables if `is_wanted` returns true.
    fn hold_copy_if(
        &self,
        owned: &Owning<'_, Inner<B>>,
        is_wanted: impl FnOnce(&Inner<B>, &Change<B>) -> bool,
    ) -> Result<(), Errno> {
        let copy = {
            let inner = owned.read();
            let change = inner.change.as_ref();
            let change = change.filter(|change| is_wanted(&inner, change));
            change.and_then(|change| change.copy.clone())
        };
        let Some(copy) = copy else { return Ok(()) };
        let held = copy.inode(&self.lower.base)?;
        let mut inner = owned.edit();
        let copy = inner
            .change
            .as_mut()
            .and_then(|change| change.copy.as_mut());
        if let Some(copy) = copy {
            copy.kept_inode = Some(held);
        }
        Ok(())
    }

    /// Returns the directory that the object was last seen in, if the object's name there still leads to it.
    fn only_place(&self, object: &Arc<Object<B>>) -> Option<B::Inode> {
        let (dir, name) = object.location.lock().clone()?;
        let shared = dir.inner.share();
        let dir = shared.read();
        let named = dir.change.as_ref()?.names.get(&name)?.object.as_ref()?;
        if !Arc::ptr_eq(named, object) {
            return None;
        }
        dir.base
            .clone()
            .or_else(|| dir.staged_copy()?.kept_inode.clone())
    }

    /// Retains the inodes of new objects that callers refer to, before their staged names are removed. All other new
    /// objects are found by their new names at the next look-up.
    fn hold_new(&self, scope: &Scope<B>) -> Result<(), Errno> {
        // The list is copied, because a look-up in the backing may hang and the status needs the list's lock.
        let changed: Vec<_> = scope.changed.lock().values().cloned().collect();
        for object in &changed {
            self.hold_copy_if(&object.inner.own(), |inner, change| {
                // References that no caller has: the scope's, the one of this list, and one for each name.
                let ours = 2 + usize::try_from(change.links).unwrap_or(0);
                let is_used = object.kind == Kind::Dir || Arc::strong_count(object) > ours;
                inner.base.is_none() && is_used
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
        self.commits.apply_commit_before(scope)?;
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        self.tree.check_all(scope);
        if !scope.is_whole() {
            return Err(StageError::Undoing.into());
        }
        let stage = *scope.stage.lock();
        match stage {
            Stage::Prepared(found) | Stage::Decided(found) if found != id => {
                return Err(StageError::OtherId { found, wanted: id }.into());
            }
            Stage::Prepared(_) => {
                if let Some(record) = scope
                    .recovered
                    .as_ref()
                    .filter(|_| !self.backups.is_backed_up(scope))
                {
                    self.backups.back_up(scope, record)?;
                }
                match &scope.key {
                    Some(key) => self.names_ballots.must_be_committed(key)?,
                    None => self.votes.agree_with_hosts(scope, stage, id)?,
                }
                let from = OsStr::new(staging::RECORD);
                let to = OsStr::new(staging::COMMIT);
                self.lower
                    .base
                    .rename(&scope.dir, from, &scope.dir, to, RenameFlags::empty())?;
                scope.set_stage(Stage::Decided(id));
                self.lower.base.sync_dir(&scope.dir)?;
            }
            Stage::Open => {
                self.votes.agree_with_hosts(scope, stage, id)?;
                // The record is renamed to `commit` directly. A crash before that rename leaves an open transaction,
                // which the recovery undoes.
                self.write_record(scope, id)?;
                self.lower
                    .place_record(scope, staging::COMMIT)
                    .inspect_err(|_| self.backups.withdraw_backup(scope))?;
                scope.set_stage(Stage::Decided(id));
                self.lower.base.sync_dir(&scope.dir)?;
            }
            Stage::Decided(_) => self.lower.base.sync_dir(&scope.dir)?,
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        Ok(())
    }
}
