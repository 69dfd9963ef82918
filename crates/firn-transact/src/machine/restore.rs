//! Steps of a restore request, which gives a directory the files of an earlier commit.
//!
//! The *scope* is the directory that a transaction covers. In *shadow mode* the changes of a transaction go to the
//! backing (the directory below the mount) at once. The *history* has the commits that can be undone.
//!
//! | requested commit | transaction of the scope | steps |
//! |---|---|---|
//! | the prepared or decided one | | `FinishCommit`: commits it and drops data written since |
//! | another one | a decided commit | none: the request fails |
//! | another one, in the history | shared by several hosts in shadow mode | `CallOff`, `Undo`, `Restore` |
//! | another one, in the history | any other, or none | `Restore` |
//!
//! `FinishUndo` comes first. It completes an earlier restore that failed and left the backing in between two commits.

use firn_backing::Backing;

use super::{Answer, Event, Goal, Machine, Mount, Pending, Step};
use crate::error::{CommitError, StageError, TransactionError};
use crate::transaction::handle::{QuiesceTarget, ScopeTransactions, TransactionHandle};

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Returns the first step of a restore of the directory at `path` to commit `id`. If an earlier restore failed,
    /// completes it before.
    ///
    /// `transactions` are those of the directory: a decided commit that is not applied to the backing yet, and an
    /// undecided transaction, which follows it. Either may be missing.
    pub(super) fn first_restore_step(
        &self,
        path: Vec<u8>,
        transactions: ScopeTransactions<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        let ScopeTransactions { commit, undecided } = transactions;
        match (commit, undecided) {
            // The undo of a commit was decided, so it must be applied to the end first.
            (Some(commit), _) if commit.is_undo() => {
                self.apply_recovered(&commit, &path)?;
                self.choose_restore(path, None, id)
            }
            (commit, Some(TransactionHandle::Open(open))) => Ok(Step::ApplyBefore {
                commit,
                open,
                goal: Goal::Restore(id),
            }),
            // Without a transaction after it, a decided commit may be the requested one.
            (commit, undecided) => self.choose_restore(
                path,
                undecided.or(commit.map(TransactionHandle::Decided)),
                id,
            ),
        }
    }

    /// Returns the next step of a restore of the directory at `path` to commit `id`. `transaction` is the present
    /// transaction of the directory.
    ///
    /// If the transaction has this number, its commit is finished. Otherwise the transaction is dropped, and commits of
    /// the history are undone.
    ///
    /// All checks come before the first loss of data: a request that fails here has dropped nothing.
    pub(super) fn choose_restore(
        &self,
        path: Vec<u8>,
        transaction: Option<TransactionHandle<'a, B>>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        match transaction {
            Some(transaction) if transaction.id() == Some(id) => {
                Ok(Step::FinishCommit { transaction, id })
            }
            // A decided commit cannot be dropped.
            Some(TransactionHandle::Decided(commit)) => {
                Err(StageError::Decided { id: commit.id() }.into())
            }
            Some(transaction) => {
                self.store.history.can_restore(&path, id)?;
                self.drop_and_restore(path, transaction, id)
            }
            None => {
                self.store.history.can_restore(&path, id)?;
                Ok(restore_drained(path, id))
            }
        }
    }

    /// Returns the next step of a restore to commit `id` that drops an open or prepared transaction. The caller has
    /// checked that the restore is possible.
    fn drop_and_restore(
        &self,
        path: Vec<u8>,
        transaction: TransactionHandle<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        // Other hosts must end their parts of a shared transaction before the restore may change the scope.
        if self.store.scopes.shares() {
            let then = Box::new(restore_drained(path, id));
            return Ok(Step::CallOff { transaction, then });
        }
        // Even if firnd is killed now, the next one must not continue the transaction. Changes fail from here on.
        self.mount.note_abort(transaction.serial());
        transaction.refuse_changes()?;
        Ok(Step::Restore {
            target: QuiesceTarget::scope(transaction.scope_ref()),
            path,
            pending: Pending::Discard,
            id,
        })
    }

    /// Decides the commit of a prepared transaction with the number `id`, and applies it to the backing. The commit may
    /// be decided already. Data that was written since is dropped.
    pub(super) fn finish_commit(
        &self,
        transaction: &TransactionHandle<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        let path_after = transaction.path_after();
        transaction.refuse_changes()?;
        let target = QuiesceTarget::scope(transaction.scope_ref());
        self.mount.quiesce(&target, Pending::Discard, |_| {
            match transaction.decide(id) {
                // The background thread has applied this commit meanwhile, so nothing is left to do.
                Err(CommitError::Stage(StageError::NoTransaction))
                    if self.store.lower.present_commit_id(&path_after)? == Some(id) => {}
                commit => commit?.apply()?,
            }
            self.end_local_part(Event::Applied, transaction.scope(), Some(id));
            Ok(())
        })?;
        self.mount.forget_names(&[&path_after, transaction.scope()]);
        Ok(Step::Over(Answer::Done))
    }

    /// Restores the directory at `path` to commit `id`, and ends its open transaction. Meanwhile no program changes
    /// `target`, the same directory. `pending` says what becomes of data in memory.
    pub(super) fn restore(
        &self,
        target: &QuiesceTarget<'a, B>,
        path: &[u8],
        pending: Pending,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        let path_before = target.path_now();
        self.mount.quiesce(target, pending, |root| {
            self.store.restore(root, id)?;
            self.end_local_part(Event::Undone, path, Some(id));
            Ok(())
        })?;
        self.mount.forget_names(&[&path_before, path]);
        Ok(Step::Over(Answer::Done))
    }
}

/// Returns the step that restores the directory at `path`, which has no transaction by then, to commit `id`. Pending
/// data is drained first.
fn restore_drained<'a, B: Backing>(path: Vec<u8>, id: u64) -> Step<'a, B> {
    Step::Restore {
        target: QuiesceTarget::for_directory(&path),
        path,
        pending: Pending::Drain,
        id,
    }
}
