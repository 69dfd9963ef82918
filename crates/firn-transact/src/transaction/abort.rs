//! Abort of a transaction: restores the tree from the begin.
//!
//! * In buffer mode the record and the tables are dropped; the backing never had the changes.
//! * In shadow mode the backing has the changes, so the saved state is restored ([`crate::shadow`]).
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
        let before = self.scopes.commit_before(scope);
        let scope = before.as_ref().unwrap_or(scope);
        if scope.stage() == Stage::Ended {
            return Err(StageError::NoTransaction.into());
        }
        scope.refuse_changes(true);
        Ok(())
    }

    /// Aborts a transaction; see [`TransactionHandle::abort`](crate::TransactionHandle::abort).
    ///
    /// Fails if the commit is decided, here or by another host. A transaction that follows a commit has changed nothing
    /// yet, so only its records are removed.
    pub(super) fn abort_scope(&self, scope: &Arc<Scope<B>>) -> Result<(), AbortError> {
        let _quiet = self.commits.quiesce_scope(scope);
        if let Some(before) = self.scopes.commit_before(scope) {
            self.commits.drop_next(&before)?;
            return Ok(());
        }
        self.tree.check_all(scope);
        self.own_links.note_links_ending(scope);
        let stage = *scope.stage.lock();
        let shared_shadow = scope.shadow.as_ref().filter(|shadow| shadow.is_shared());
        if let (Some(key), Stage::Open | Stage::Prepared(_)) = (&scope.key, stage)
            && self.names_ballots.settle_or_abort(key)?
        {
            return Err(StageError::Decided { id: NO_ID }.into());
        }
        if let Some(shadow) = shared_shadow {
            // This decides the abort with the other hosts.
            self.abort_shared(scope, shadow, stage)?;
        } else {
            self.make_abort_certain(scope, stage)?;
            if let Some(shadow) = &scope.shadow {
                scope.refuse_changes_for_good();
                self.shadow_undo.undo_shadow(scope, shadow)?;
                self.lower.forget_records(&scope.dir)?;
            }
        }
        scope.drop_names_in_root();
        self.drop_changes(scope);
        scope.put_top_back();
        self.own_links.forget_links_of_dirs(scope);
        self.endings.end_transaction(scope);
        self.endings.clean_up(scope);
        match (&scope.key, stage) {
            (Some(key), _) => self.names_ballots.leave(key)?,
            (None, Stage::Prepared(id)) => self.votes.leave_vote(id, &scope.path)?,
            _ => {}
        }
        Ok(())
    }

    /// Makes the abort of a transaction certain, for this host and for the hosts that vote with it. After a crash from
    /// here on, recovery restores the tree from before the transaction. Fails if the commit is decided or the
    /// transaction has ended.
    fn make_abort_certain(&self, scope: &Scope<B>, stage: Stage) -> Result<(), AbortError> {
        match stage {
            Stage::Open => {
                if scope.key.is_none() {
                    self.votes.withdraw_from_votes(&scope.path)?;
                }
                self.backups.withdraw_for_abort(scope.serial)?;
                // If the mark `open` remained, the next mount would drop data that programs write from now on.
                if scope.shadow.is_none() {
                    self.lower.forget_records(&scope.dir)?;
                }
            }
            Stage::Prepared(id) => {
                if scope.key.is_none() {
                    self.votes.decide_vote(id, &scope.path, Proposal::Abort)?;
                }
                self.backups.withdraw_for_abort(scope.serial)?;
                match scope.shadow {
                    // Without the record, the recovery after a crash undoes the transaction.
                    Some(_) => self.lower.forget_record(&scope.dir)?,
                    None => self.lower.forget_records(&scope.dir)?,
                }
            }
            Stage::Decided(id) => return Err(StageError::Decided { id }.into()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        Ok(())
    }

    /// Drops the changes of a transaction from all objects, and forgets the objects that it created.
    fn drop_changes(&self, scope: &Scope<B>) {
        let changed = std::mem::take(&mut *scope.changed.lock());
        for (_, object) in changed {
            let owned = object.inner.own();
            let change = owned.edit().change.take();
            if owned.base().is_none() {
                self.tree.forget(object.key);
            }
            object.close_lower_files();
            drop(change);
        }
    }
}
