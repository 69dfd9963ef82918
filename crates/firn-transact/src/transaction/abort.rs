//! Aborting a transaction: the tree is as it was when it began.

use std::sync::Arc;

use firn_backing::Backing;

use crate::change_log::NO_ID;
use crate::error::{AbortError, StageError};
use crate::scope::{Scope, Stage};
use crate::transactional::TransactionalBacking;

impl<B: Backing> TransactionalBacking<B> {
    /// [`Found::refuse_changes`](crate::Found::refuse_changes).
    pub(super) fn refuse_changes(&self, scope: &Arc<Scope<B>>) -> Result<(), AbortError> {
        // Changes of a transaction that follows a commit wait in that commit.
        let before = self.scopes.commit_before(scope);
        let scope = before.as_ref().unwrap_or(scope);
        if scope.stage() == Stage::Ended {
            return Err(StageError::NoTransaction.into());
        }
        scope.refuse_changes(true);
        Ok(())
    }

    /// [`Found::abort`](crate::Found::abort).
    pub(super) fn abort_scope(&self, scope: &Arc<Scope<B>>) -> Result<(), AbortError> {
        let _quiet = self.commits.quiesce_scope(scope);
        if let Some(before) = self.scopes.commit_before(scope) {
            self.commits.drop_next(&before)?;
            return Ok(());
        }
        self.tree.check_all(scope);
        self.own_links.unhide(scope);
        let stage = *scope.stage.lock();
        let several = scope
            .shadow
            .as_ref()
            .filter(|shadow| shadow.is_of_several());
        if let (Some(key), Stage::Open | Stage::Prepared(_)) = (&scope.key, stage)
            && self.names_ballots.settle_or_abort(key)?
        {
            return Err(StageError::Decided { id: NO_ID }.into());
        }
        match stage {
            _ if several.is_some() => {}
            Stage::Open => {
                if scope.key.is_none() {
                    self.votes.withdraw_from_votes(&scope.path)?;
                }
                self.backups.withdraw_for_good(scope.serial)?;
                // With the mark left, the next mount would drop what is written from now on.
                if scope.shadow.is_none() {
                    self.home.forget_records(&scope.dir)?;
                }
            }
            Stage::Prepared(id) => {
                if scope.key.is_none() {
                    self.votes.decide_vote(id, &scope.path, false)?;
                }
                self.backups.withdraw_for_good(scope.serial)?;
                match scope.shadow {
                    // From here on a crash ends in the tree before.
                    Some(_) => self.home.forget_record(&scope.dir)?,
                    None => self.home.forget_records(&scope.dir)?,
                }
            }
            Stage::Decided(id) => return Err(StageError::Decided { id }.into()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        if let Some(shadow) = several {
            self.abort_shared(scope, shadow, stage)?;
        } else if let Some(shadow) = &scope.shadow {
            scope.stop_for_good();
            self.shadow_undo.undo_shadow(scope, shadow)?;
            self.home.forget_records(&scope.dir)?;
        }
        scope.drop_names_in_root();
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
        scope.put_top_back();
        self.own_links.dirs_are_back(scope);
        self.endings.end_transaction(scope);
        self.endings.clean_up(scope);
        match (&scope.key, stage) {
            (Some(key), _) => self.names_ballots.leave(key)?,
            (None, Stage::Prepared(id)) => self.votes.leave_vote(id, &scope.path)?,
            _ => {}
        }
        Ok(())
    }
}
