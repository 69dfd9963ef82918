//! Prepare: `Prepare`, `Vote`.
//!
//! | the transaction is | first step |
//! |---|---|
//! | open | `ApplyBefore`, then `Prepare` with the scope quiesced and drained |
//! | prepared with the same number | `Vote`: what was written since is no part of it |
//! | prepared or decided with any other | refused |

use firn_backing::Backing;

use super::commit::Plan;
use super::{Answer, Event, Goal, Machine, Mount, Pending, Step};
use crate::error::{StageError, TransactionError};
use crate::transaction::handle::{Found, Known, Open, Place, Prepared};
use crate::vote::Vote;

/// What follows once the hosts agree.
pub(super) enum AfterVote {
    /// The outcome stays open.
    Answer,
    /// It is committed.
    Decide(Plan),
}

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    pub(super) fn find_prepare(
        &self,
        path: &[u8],
        known: Known<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        match known.undecided {
            Some(Found::Open(open)) => Ok(Step::ApplyBefore {
                commit: known.commit,
                open,
                goal: Goal::Prepare(id),
            }),
            Some(Found::Prepared(prepared)) if prepared.id() == id => Ok(Step::Vote {
                prepared,
                then: AfterVote::Answer,
            }),
            undecided => {
                let id_found = undecided.and_then(|found| found.id());
                let found = id_found.or(known.commit.map(|commit| commit.id()));
                Err(found.map_or_else(
                    || self.no_transaction(path),
                    |found| StageError::OtherId { found, wanted: id }.into(),
                ))
            }
        }
    }

    pub(super) fn prepare(
        &self,
        open: &Open<'a, B>,
        id: u64,
        then: AfterVote,
    ) -> Result<Step<'a, B>, TransactionError> {
        let place = Place::scope(open.handle());
        let prepared = self.mount.quiesce(&place, Pending::Drain, |_| {
            // Another request may have prepared it, and has noted what was used until then.
            let is_first = open.is_still_open();
            let prepared = open.prepare(id)?;
            let scope = open.handle().scope_path();
            self.mount.note(Event::Prepared, scope, Some(id));
            if is_first && self.store.home.members().is_some() {
                prepared.note_accesses(self.mount.take_accesses(scope));
            }
            Ok(prepared)
        })?;
        Ok(Step::Vote { prepared, then })
    }

    /// Where the hosts do not agree or do not come the transaction is open again.
    pub(super) fn vote(
        &self,
        prepared: Prepared<'a, B>,
        then: AfterVote,
    ) -> Result<Step<'a, B>, TransactionError> {
        if self.store.home.members().is_some()
            && let Err(error) = self.find_verdict(&prepared)
        {
            // The scope is not quiesced: that would wait for programs whose changes wait for this.
            match prepared.reopen() {
                Ok(used) => self.mount.put_accesses_back(used),
                Err(error) => {
                    tracing::debug!(%error, id = prepared.id(), "the transaction stays prepared");
                }
            }
            return Err(error);
        }
        Ok(match then {
            AfterVote::Answer => Step::Over(Answer::Done),
            AfterVote::Decide(plan) => Step::Decide {
                found: Found::Prepared(prepared),
                plan,
            },
        })
    }

    fn find_verdict(&self, prepared: &Prepared<'a, B>) -> Result<(), TransactionError> {
        let mut rest = self.mount.begin_wait();
        self.retry(|| Ok(prepared.publish_accesses()?))?;
        loop {
            match prepared.poll_vote()? {
                Vote::Over(verdict) => return Ok(verdict.agreed()?),
                Vote::Waiting { .. } if rest() => {}
                Vote::Waiting {
                    published,
                    expected,
                    missing,
                } => {
                    let missing = match &missing[..] {
                        [] => String::new(),
                        missing => format!(", {} missing", missing.join(", ")),
                    };
                    let count = published.len();
                    let why = format!("only {count} of {expected} hosts came{missing}");
                    prepared.give_vote_up(why)?;
                }
            }
        }
    }
}
