//! Steps of an abort request: `CallOff` decides the abort for all hosts, `Undo` undoes the changes.
//!
//! In shadow mode, changes go to the backing at once, so an abort restores the saved old state.
//!
//! Race: in shadow mode with several hosts, the thread that watches the other hosts may undo the transaction first. The
//! request then finds no transaction and succeeds.

use firn_backing::Backing;

use super::{Answer, Event, Machine, Mount, Pending, Step};
use crate::error::{AbortError, StageError, TransactionError};
use crate::transaction::handle::{QuiesceTarget, ScopeTransactions, TransactionHandle};

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Returns the step `CallOff` for the current transaction. Fails if there is none.
    pub(super) fn first_abort_step(
        &self,
        path: &[u8],
        transactions: ScopeTransactions<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let Some(transaction) = transactions.into_current() else {
            return Err(self.no_transaction(path));
        };
        let then = Box::new(Step::Over(Answer::Done));
        Ok(Step::CallOff { transaction, then })
    }

    /// Decides the abort and makes further changes fail. Returns the step `Undo`, or `then` if another thread has ended
    /// the transaction. Fails if the commit is decided.
    ///
    /// Writes of pending data (in memory only) wait for the outcome. With this decision they end, and only
    /// then can the step `Undo` stop all changes and drop that data.
    pub(super) fn decide_abort(
        &self,
        transaction: TransactionHandle<'a, B>,
        then: Box<Step<'a, B>>,
    ) -> Result<Step<'a, B>, TransactionError> {
        match &transaction {
            TransactionHandle::Decided(commit) => {
                return Err(StageError::Decided { id: commit.id() }.into());
            }
            // Another host may have decided the commit. This must be ruled out before anything is undone.
            TransactionHandle::Prepared(prepared) => prepared.call_commit_off()?,
            TransactionHandle::Open(_) => {}
        }
        self.mount.note_abort(transaction.serial());
        match transaction.refuse_changes() {
            Err(AbortError::Stage(StageError::NoTransaction)) => Ok(*then),
            Err(error) => Err(error.into()),
            Ok(()) => Ok(Step::Undo { transaction, then }),
        }
    }

    /// Undoes the transaction while no program changes its scope, the part of the tree that it covers. Its pending
    /// data, which is in memory only, is dropped. Returns the step `then`.
    ///
    /// After a wait for other hosts, a missing transaction counts as undone: another thread has ended it.
    pub(super) fn undo(
        &self,
        transaction: &TransactionHandle<'a, B>,
        then: Step<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let target = QuiesceTarget::scope(transaction.scope_ref());
        let path_now = target.path_now();
        let mut is_first_attempt = true;
        self.retry_while_hosts_finish(|| {
            let aborted = self.mount.quiesce(&target, Pending::Discard, |_| {
                transaction.abort()?;
                self.end_local_part(Event::Undone, transaction.scope(), None);
                Ok(())
            });
            let is_over = matches!(
                aborted,
                Err(TransactionError::Stage(StageError::NoTransaction))
            );
            if is_over && !is_first_attempt {
                return Ok(());
            }
            is_first_attempt = false;
            aborted
        })?;
        self.mount.forget_names(&[&path_now, transaction.scope()]);
        Ok(then)
    }
}
