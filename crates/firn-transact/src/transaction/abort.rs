//! Abort of a transaction: programs see the tree as it was at the begin.
//!
//! The *backing* is the directory below the mount. The *scope* of a transaction is what it covers.
//! * In buffer mode the changes are kept back until the commit, so only the record and the tables are dropped.
//! * In shadow mode the backing has the changes, so the saved old state is restored ([`crate::shadow`]).
//! * With several hosts, the abort is decided for all of them first. It fails if the commit is decided.
//!
//! An abort that fails part way can be repeated.

use std::sync::Arc;

use firn_backing::Backing;

use crate::change_log::NO_ID;
use crate::error::{AbortError, StageError};
use crate::scope::{Scope, Stage};
use crate::transactional::TransactionalBacking;
use crate::vote::Proposal;

impl<B: Backing> TransactionalBacking<B> {
    /// Makes changes in a transaction fail from now on; see
    /// [`TransactionHandle::refuse_changes`](crate::TransactionHandle::refuse_changes). Fails if the transaction is
    /// over.
    pub(super) fn refuse_changes(&self, scope: &Arc<Scope<B>>) -> Result<(), AbortError> {
        // Changes of a transaction that follows a commit wait for that commit, so the commit's scope refuses them.
        let followed_commit = self.scopes.commit_before(scope);
        let refusing_scope = followed_commit.as_ref().unwrap_or(scope);
        if refusing_scope.stage() == Stage::Ended {
            return Err(StageError::NoTransaction.into());
        }
        refusing_scope.refuse_changes();
        Ok(())
    }

    /// Aborts a transaction, so that programs see the tree from before it; see
    /// [`TransactionHandle::abort`](crate::TransactionHandle::abort).
    ///
    /// Fails if the commit is decided, here or by another host. A transaction that began before the last commit was
    /// applied, and thus follows that commit, has changed nothing yet, so only its records are removed.
    pub(super) fn abort_scope(&self, scope: &Arc<Scope<B>>) -> Result<(), AbortError> {
        // From here on no program changes what the transaction covers.
        let _quiet = self.commits.quiesce_scope(scope);
        if let Some(followed_commit) = self.scopes.commit_before(scope) {
            self.commits.drop_next(&followed_commit)?;
            return Ok(());
        }
        self.tree.check_all(scope);
        self.link_counts.mark_links_ending(scope);
        let stage = *scope.stage.lock();
        // First the abort is decided. A transaction of names with a key is decided by a ballot of all hosts.
        if let (Some(key), Stage::Open | Stage::Prepared(_)) = (&scope.key, stage) {
            let is_committed = self.names_ballots.settle_or_abort(key)?;
            if is_committed {
                return Err(StageError::Decided { id: NO_ID }.into());
            }
        }
        self.decide_and_undo(scope, stage)?;
        // Then the tables in memory lose the changes, so programs see the old tree.
        scope.drop_names_in_root();
        self.drop_changes(scope);
        scope.move_top_back();
        self.link_counts.remove_links_of_dirs(scope);
        self.endings.end_transaction(scope);
        self.endings.clean_up(scope);
        // Last, this host leaves the vote or ballot, for which other hosts wait.
        match (&scope.key, stage) {
            (Some(key), _) => self.names_ballots.leave(key)?,
            (None, Stage::Prepared(id)) => self.votes.leave_vote(id, &scope.path)?,
            _ => {}
        }
        Ok(())
    }

    /// Decides the abort, unless a ballot has decided it. In shadow mode also undoes the changes, as the backing has
    /// them.
    fn decide_and_undo(&self, scope: &Arc<Scope<B>>, stage: Stage) -> Result<(), AbortError> {
        match &scope.shadow {
            Some(shadow) if shadow.is_shared() => self.abort_shared(scope, shadow, stage)?,
            Some(shadow) => {
                self.record_abort(scope, stage)?;
                scope.refuse_changes_for_good();
                self.shadow_undo.undo_shadow(scope, shadow)?;
                self.lower.remove_records(&scope.dir)?;
            }
            None => self.record_abort(scope, stage)?,
        }
        Ok(())
    }

    /// Records the abort of a transaction durably, for this host and for the hosts that vote with it on the commit.
    /// After a crash from here on, a recovery restores the tree from before the transaction. Fails if the commit is
    /// decided or the transaction has ended.
    ///
    /// A transaction of names with a `key` has no vote; the caller has aborted its ballot.
    fn record_abort(&self, scope: &Scope<B>, stage: Stage) -> Result<(), AbortError> {
        let prepared_id = match stage {
            Stage::Open => None,
            Stage::Prepared(id) => Some(id),
            Stage::Decided(id) => return Err(StageError::Decided { id }.into()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        };
        if scope.key.is_none() {
            match prepared_id {
                None => self.votes.withdraw_from_votes(&scope.path)?,
                Some(id) => self.votes.decide_vote(id, &scope.path, Proposal::Abort)?,
            }
        }
        // From now on the transaction cannot be committed from its backup.
        self.backups.withdraw_for_abort(scope.serial)?;
        if scope.shadow.is_none() {
            // With the mark `open` the next mount would take the transaction as open and drop data that programs write
            // from now on.
            self.lower.remove_records(&scope.dir)?;
        } else if prepared_id.is_some() {
            // In shadow mode the mark remains until the changes are undone. Without the other record, the recovery
            // after a crash undoes them.
            self.lower.remove_prepared_record(&scope.dir)?;
        }
        Ok(())
    }

    /// Drops the changes of a transaction from all objects, and removes the objects that it created from the table.
    fn drop_changes(&self, scope: &Scope<B>) {
        let changed = std::mem::take(&mut *scope.changed.lock());
        for (_, object) in changed {
            let claimed = object.state.acquire_exclusive();
            let change = claimed.edit().change.take();
            if claimed.base().is_none() {
                self.tree.remove(object.key);
            }
            object.close_lower_files();
            drop(change);
        }
    }
}
