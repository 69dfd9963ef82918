//! Steps of an abort request: `CallOff` decides the abort for all hosts, `Undo` takes the changes back.
//!
//! Race: in shadow mode with several hosts, the thread that watches the other hosts may undo the transaction first. The
//! request then finds no transaction and succeeds.

use firn_backing::Backing;

use super::{Answer, Event, Machine, Mount, Pending, Step};
use crate::error::{AbortError, StageError, TransactionError};
use crate::transaction::handle::{Found, Known, Place};

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Returns the step `CallOff` for the current transaction. Fails if there is none.
    pub(super) fn find_abort(
        &self,
        path: &[u8],
        known: Known<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let found = known.into_current();
        let found = found.ok_or_else(|| self.no_transaction(path))?;
        let then = Box::new(Step::Over(Answer::Done));
        Ok(Step::CallOff { found, then })
    }

    /// Decides the abort and makes further changes fail. Returns `Undo`, or `then` if another thread has ended the
    /// transaction. Fails if the commit is decided.
    ///
    /// This comes before the quiesce: drains that wait for the outcome must end first, or their data could not be
    /// dropped.
    pub(super) fn call_off(
        &self,
        found: Found<'a, B>,
        then: Box<Step<'a, B>>,
    ) -> Result<Step<'a, B>, TransactionError> {
        match &found {
            Found::Decided(commit) => return Err(StageError::Decided { id: commit.id() }.into()),
            // Another host may have decided the commit. This must be known before anything is undone.
            Found::Prepared(prepared) => prepared.call_commit_off()?,
            Found::Open(_) => {}
        }
        self.mount.note_abort(found.serial());
        match found.refuse_changes() {
            Err(AbortError::Stage(StageError::NoTransaction)) => Ok(*then),
            Err(error) => Err(error.into()),
            Ok(()) => Ok(Step::Undo { found, then }),
        }
    }

    /// Undoes the transaction while its scope is quiesced and its pending data is dropped. Returns the step `then`.
    ///
    /// After a wait for other hosts, a missing transaction counts as undone: another thread has ended it.
    pub(super) fn undo(
        &self,
        found: &Found<'a, B>,
        then: Step<'a, B>,
    ) -> Result<Step<'a, B>, TransactionError> {
        let place = Place::scope(found.handle());
        let path_now = place.path_now();
        let mut has_waited = false;
        self.retry(|| {
            let ended = self.mount.quiesce(&place, Pending::Discard, |_| {
                found.abort()?;
                self.end_part(Event::Undone, found.scope(), None);
                Ok(())
            });
            match ended {
                Err(TransactionError::Stage(StageError::NoTransaction)) if has_waited => Ok(()),
                ended => {
                    has_waited = true;
                    ended
                }
            }
        })?;
        self.mount.forget_names(&[&path_now, found.scope()]);
        Ok(then)
    }
}
