//! Steps of a prepare request: `Prepare` makes the transaction durable, `Vote` waits for the other hosts.
//!
//! The *scope* is the directory that the transaction covers. It is *quiesced* if no change is in progress and none may
//! begin, and *drained* if all its data is in the backing (the directory below the mount) or in staged files there.
//! `ApplyBefore` first applies the commit that the transaction follows, if there is one.
//!
//! | the transaction is | first step |
//! |---|---|
//! | open | `ApplyBefore`, then `Prepare` with the scope quiesced and drained |
//! | prepared under the same number | `Vote`; data written since the prepare is not part of the transaction |
//! | prepared or decided under another number | none: the request fails |
//!
//! With several hosts, a commit request takes these two steps as well. A vote without agreement reopens the
//! transaction.

use firn_backing::Backing;

use super::commit::Plan;
use super::{Answer, Event, Goal, Machine, Mount, Pending, Step};
use crate::error::{StageError, TransactionError};
use crate::transaction::handle::{
    Open, Prepared, QuiesceTarget, ScopeTransactions, TransactionHandle,
};
use crate::vote::Vote;

/// What follows a vote that allows the commit.
pub(super) enum AfterVote {
    /// The prepare request is answered; the outcome stays open.
    Answer,
    /// The commit is decided as planned.
    Decide(Plan),
}

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Returns the first step of a prepare request, which makes the transaction of the directory at `path` durable
    /// under the number `id`.
    ///
    /// Fails if the transaction has another number, or if there is no transaction.
    pub(super) fn first_prepare_step(
        &self,
        path: &[u8],
        transactions: ScopeTransactions<'a, B>,
        id: u64,
    ) -> Result<Step<'a, B>, TransactionError> {
        match transactions.undecided {
            Some(TransactionHandle::Open(open)) => Ok(Step::ApplyBefore {
                commit: transactions.commit,
                open,
                goal: Goal::Prepare(id),
            }),
            Some(TransactionHandle::Prepared(prepared)) if prepared.id() == id => Ok(Step::Vote {
                prepared,
                then: AfterVote::Answer,
            }),
            // The transaction has another number, or there is none.
            undecided => {
                let commit = transactions.commit.map(TransactionHandle::Decided);
                let other_transaction = undecided.or(commit);
                match other_transaction.and_then(|transaction| transaction.id()) {
                    Some(found) => Err(StageError::OtherId { found, wanted: id }.into()),
                    None => Err(self.no_transaction(path)),
                }
            }
        }
    }

    /// Prepares an open transaction, which makes it durable, and returns the step `Vote`. Meanwhile programs change
    /// nothing in it, and their data in memory is written to the backing first.
    ///
    /// With several hosts, the first prepare also takes the record of what programs used, for the vote.
    pub(super) fn prepare(
        &self,
        open: &Open<'a, B>,
        id: u64,
        then: AfterVote,
    ) -> Result<Step<'a, B>, TransactionError> {
        let target = QuiesceTarget::scope(open.scope_ref());
        let prepared = self.mount.quiesce(&target, Pending::Drain, |_| {
            // Another request may have prepared the transaction first. That request has already taken the accesses.
            let is_first = open.is_still_open();
            let prepared = open.prepare(id)?;
            let scope = open.scope_ref().scope_path();
            self.mount.note(Event::Prepared, scope, Some(id));
            if is_first && self.store.lower.members().is_some() {
                prepared.store_accesses(self.mount.take_accesses(scope));
            }
            Ok(prepared)
        })?;
        Ok(Step::Vote { prepared, then })
    }

    /// Waits for the verdict of all hosts on a prepared transaction, and returns the step that `then` asks for. A mount
    /// of one host has no members and does not wait.
    ///
    /// If the hosts conflict or some do not vote, the transaction is reopened and the error says why.
    pub(super) fn await_vote(
        &self,
        prepared: Prepared<'a, B>,
        then: AfterVote,
    ) -> Result<Step<'a, B>, TransactionError> {
        if self.store.lower.members().is_some()
            && let Err(error) = self.await_agreement(&prepared)
        {
            self.reopen(&prepared);
            return Err(error);
        }
        Ok(match then {
            AfterVote::Answer => Step::Over(Answer::Done),
            AfterVote::Decide(plan) => Step::Decide {
                transaction: TransactionHandle::Prepared(prepared),
                plan,
            },
        })
    }

    /// Makes a prepared transaction open again. After an error, which is logged, the transaction remains prepared.
    ///
    /// The scope is not quiesced here: a quiesce would wait for programs, and their changes wait for the reopening.
    fn reopen(&self, prepared: &Prepared<'a, B>) {
        match prepared.reopen() {
            Ok(used) => self.mount.put_accesses_back(used),
            Err(error) => {
                tracing::debug!(%error, id = prepared.id(), "cannot reopen the transaction: it remains prepared");
            }
        }
    }

    /// Publishes what this host's programs read and changed, and waits until the vote of all hosts is over. Returns
    /// `Ok` only if the verdict allows a commit.
    ///
    /// When the mount's timeout is over, this host ends the vote for all hosts and returns that verdict as the error.
    fn await_agreement(&self, prepared: &Prepared<'a, B>) -> Result<(), TransactionError> {
        let mut wait_again = self.mount.begin_wait();
        self.retry_while_hosts_finish(|| Ok(prepared.publish_accesses()?))?;
        loop {
            match prepared.poll_vote()? {
                Vote::Over(verdict) => return Ok(verdict.into_result()?),
                Vote::Waiting { .. } if wait_again() => {}
                // The mount's timeout is over.
                Vote::Waiting {
                    published,
                    expected,
                    missing,
                } => {
                    // The next look at the vote returns the verdict that this call stores.
                    let reason = incomplete_vote_text(published.len(), expected, &missing);
                    prepared.give_vote_up(reason)?;
                }
            }
        }
    }
}

/// Returns the reason of a vote that was given up because some hosts did not publish their accesses in time.
fn incomplete_vote_text(published_count: usize, expected: usize, missing: &[String]) -> String {
    let mut text = format!("only {published_count} of {expected} hosts took part in time");
    if !missing.is_empty() {
        text += &format!(", {} missing", missing.join(", "));
    }
    text
}
