//! Restore: `FinishUndo`, `FinishCommit`, `Restore`.
//!
//! | checkpoint that is asked for | what is there | steps |
//! |---|---|---|
//! | that of what is prepared or decided | | `FinishCommit`: it is committed, without what was written since |
//! | another one | a commit that is decided | refused |
//! | another one, which is kept | a transaction of several hosts in shadow mode | `CallOff`, `Undo`, `Restore` |
//! | | any other transaction, or none | `Restore` |

use firn_backing::Backing;

use super::{Answer, Event, Goal, Machine, Mount, Pending, Step};
use crate::error::{CommitError, StageError, TransactionError};
use crate::transaction::handle::{Found, Known, Place};

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// After a restore that failed the backing has an older commit in part.
    pub(super) fn finish_undo(
        &self,
        path: Vec<u8>,
        known: Known<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        let Known { commit, undecided } = known;
        match (commit, undecided) {
            (Some(commit), _) if commit.is_undo() => {
                self.apply_recovered(&commit, &path)?;
                self.choose_restore(path, None, id)
            }
            (commit, Some(Found::Open(open))) => Ok(Step::ApplyBefore {
                commit,
                open,
                goal: Goal::Restore(id),
            }),
            // A commit that is not followed may be the one that is meant.
            (commit, undecided) => {
                self.choose_restore(path, undecided.or(commit.map(Found::Decided)), id)
            }
        }
    }

    /// Refuses before anything is thrown away.
    pub(super) fn choose_restore(
        &self,
        path: Vec<u8>,
        found: Option<Found<'a, B>>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        match found {
            Some(found) if found.id() == Some(id) => Ok(Step::FinishCommit { found, id }),
            Some(Found::Decided(commit)) => Err(StageError::Decided { id: commit.id() }.into()),
            Some(found) => {
                self.store.history.can_restore(&path, id)?;
                if self.store.scopes.shares() {
                    let place = Place::directory(&path);
                    let restore = Step::Restore {
                        place,
                        path,
                        pending: Pending::Drain,
                        id,
                    };
                    let then = Box::new(restore);
                    return Ok(Step::CallOff { found, then });
                }
                self.mount.note_abort(found.serial());
                found.refuse_changes()?;
                Ok(Step::Restore {
                    place: Place::scope(found.handle()),
                    path,
                    pending: Pending::Discard,
                    id,
                })
            }
            None => {
                self.store.history.can_restore(&path, id)?;
                Ok(Step::Restore {
                    place: Place::directory(&path),
                    path,
                    pending: Pending::Drain,
                    id,
                })
            }
        }
    }

    pub(super) fn finish_commit(
        &self,
        found: &Found<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        let path_after = found.path_after();
        found.refuse_changes()?;
        let place = Place::scope(found.handle());
        self.mount.quiesce(&place, Pending::Discard, |_| {
            match found.decide(id) {
                // It was applied in the background meanwhile.
                Err(CommitError::Stage(StageError::NoTransaction))
                    if self.store.home.committed(&path_after)? == Some(id) => {}
                commit => commit?.apply()?,
            }
            self.end_part(Event::Applied, found.scope(), Some(id));
            Ok(())
        })?;
        self.mount.forget_names(&[&path_after, found.scope()]);
        Ok(Step::Over(Answer::Done))
    }

    pub(super) fn restore(
        &self,
        place: &Place<'a, B>,
        path: &[u8],
        pending: Pending,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        let path_before = place.path_now();
        self.mount.quiesce(place, pending, |root| {
            self.store.restore(root, id)?;
            self.end_part(Event::Undone, path, Some(id));
            Ok(())
        })?;
        self.mount.forget_names(&[&path_before, path]);
        Ok(Step::Over(Answer::Done))
    }
}
