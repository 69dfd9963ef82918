//! Abort: `CallOff`, `Undo`.
//!
//! In a shadow transaction of several hosts the thread that follows them may undo it first. It is over then, which is what was
//! asked for.

use firn_backing::Backing;

use super::{Answer, Event, Machine, Mount, Pending, Step};
use crate::error::{AbortError, StageError, TransactionError};
use crate::transaction::handle::{Found, Known, Place};

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
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

    /// Drains that wait for the outcome hear of it before the scope is quiesced, or their data could not be dropped.
    pub(super) fn call_off(
        &self,
        found: Found<'a, B>,
        then: Box<Step<'a, B>>,
    ) -> Result<Step<'a, B>, TransactionError> {
        match &found {
            Found::Decided(commit) => return Err(StageError::Decided { id: commit.id() }.into()),
            // Other hosts may have committed it: asked before anything is thrown away.
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
