//! Steps of a commit request: `Decide`, `Apply`, `AwaitHosts`, `AnswerApplied`.
//!
//! Terms
//! * A commit is *decided* when it is durable and final, and *applied* when the backing (the directory below the mount)
//!   has all changes. In *shadow mode* the backing has them before, and in *buffer mode* only then.
//! * An earlier *firnd* is the process that served the mount before.
//! * The *scope* is the directory that a transaction covers. It is *quiesced* if no change is in progress and none may
//!   begin, and *drained* if none of its data is in memory only.
//!
//! A [`Plan`] says what a commit does after its decision. It is made once, from the options and the transaction:
//!
//! | transaction | the next transaction, if requested, begins | the commit is applied |
//! |---|---|---|
//! | of one host, or in buffer mode | with the decision | before the answer, or after it if requested |
//! | prepared by an earlier firnd | after the application; programs see the old tree until then | before the answer |
//! | of several hosts in shadow mode | after the last host applied it | before the answer, if a next one begins |
//!
//! An open transaction is decided while its scope is quiesced and drained. A prepared one is decided without a quiesce:
//! its changes already wait for the decision, so a quiesce would wait for them without end.

use firn_backing::Backing;

use super::prepare::AfterVote;
use super::{Answer, CommitOptions, Committed, Event, Goal, Machine, Mount, Pending, Step};
use crate::error::TransactionError;
use crate::shadow::Mode;
use crate::transaction::handle::{Decided, QuiesceTarget, ScopeTransactions, TransactionHandle};
use crate::unanswered::Unanswered;

/// Number of the first commit of a scope, unless the client chooses one.
const FIRST_COMMIT_ID: u64 = 1;

/// The point at which the next transaction of the scope begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextBegin {
    /// This commit begins none.
    Never,
    /// With the decision, so that no change falls between the two.
    AtDecision,
    /// After this host has applied the commit.
    AfterApply,
    /// After all hosts have applied the commit.
    AfterOtherHosts,
}

/// Whether the commit is applied to the backing before or after the client is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ApplyTime {
    BeforeAnswer,
    AfterAnswer,
}

/// What a commit does after its decision.
pub(super) struct Plan {
    /// Number of the commit.
    id: u64,
    /// When the next transaction begins.
    next_begin: NextBegin,
    /// When the commit is applied.
    apply_time: ApplyTime,
    /// Path of the scope after the commit. Empty before the decision; the scope is not renamed after it.
    path_after: Vec<u8>,
}

impl Plan {
    /// Returns the path of the next transaction if it begins at `point`.
    fn path_to_begin_at(&self, point: NextBegin) -> Option<Vec<u8>> {
        (self.next_begin == point).then(|| self.path_after.clone())
    }

    /// Returns the commit as a repeated request would look for it. `scope` is the path at the begin of the transaction.
    pub(super) fn commit_to_answer(&self, scope: &[u8]) -> Unanswered {
        Unanswered {
            id: self.id,
            scope: scope.to_vec(),
            path_after: self.path_after.clone(),
        }
    }

    /// Returns the answer to the commit request.
    fn into_answer(self, not_applied_on: Vec<String>) -> Answer {
        Answer::Committed(Committed {
            id: self.id,
            not_applied_on,
            path_after: self.path_after,
        })
    }
}

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Returns the first step of a commit request for the directory at `path`. Fails if it has no transaction.
    ///
    /// `transactions` are those of the directory: a decided commit that is not applied to the backing yet, and an
    /// undecided transaction, which follows it. Either may be missing.
    pub(super) fn first_commit_step(
        &self,
        path: &[u8],
        transactions: ScopeTransactions<'a, B>,
        options: CommitOptions,
    ) -> Result<Step<'a, B>, TransactionError> {
        let ScopeTransactions { commit, undecided } = transactions;
        // The request may be repeated for a commit that was applied before its first request failed.
        if let Some(id) = options.id
            && let Some(commit) = self.store.find_unanswered(path, id)
        {
            let begins_next = options.begins_next && undecided.is_none();
            return Ok(Step::AnswerApplied {
                commit,
                begins_next,
            });
        }
        match (commit, undecided) {
            // A repeated request means the commit with its number, even if another transaction follows that commit.
            (Some(commit), _) if options.id == Some(commit.id()) => {
                self.plan_commit(TransactionHandle::Decided(commit), options)
            }
            // A decided commit before an open transaction is applied first.
            (commit, Some(TransactionHandle::Open(open))) => Ok(Step::ApplyBefore {
                commit,
                open,
                goal: Goal::Commit(options),
            }),
            (_, Some(transaction)) => self.plan_commit(transaction, options),
            (Some(commit), None) => self.plan_commit(TransactionHandle::Decided(commit), options),
            (None, None) => Err(self.no_transaction(path)),
        }
    }

    /// Plans a commit: its number, when the next transaction begins, and when the commit is applied. Returns the step
    /// `Prepare` for an open transaction of several hosts, which must vote, or else `Decide`.
    ///
    /// Fails if the number of the last commit cannot be read.
    pub(super) fn plan_commit(
        &self,
        transaction: TransactionHandle<'a, B>,
        options: CommitOptions,
    ) -> Result<Step<'a, B>, TransactionError> {
        let id = match options.id.or(transaction.id()) {
            Some(id) => id,
            None => {
                let last_id = self.store.lower.present_commit_id(transaction.scope())?;
                last_id.map_or(FIRST_COMMIT_ID, |last_id| last_id.saturating_add(1))
            }
        };
        let next_begin = self.plan_next_begin(&transaction, options);
        // A recovered transaction was prepared by an earlier firnd. Programs see the old tree until it is applied.
        let applies_later = options.applies_later
            && !transaction.is_recovered()
            && next_begin != NextBegin::AfterOtherHosts;
        let apply_time = if applies_later {
            ApplyTime::AfterAnswer
        } else {
            ApplyTime::BeforeAnswer
        };
        let plan = Plan {
            id,
            next_begin,
            apply_time,
            // Known at the decision.
            path_after: Vec::new(),
        };
        Ok(match transaction {
            TransactionHandle::Open(open) if self.store.lower.members().is_some() => {
                Step::Prepare {
                    open,
                    id,
                    then: AfterVote::Decide(plan),
                }
            }
            transaction => Step::Decide { transaction, plan },
        })
    }

    /// Returns when the next transaction of the directory begins. A commit is decided first, and then applied to the
    /// backing. A *recovered* transaction is one that an earlier server of the mount prepared. In shadow mode the
    /// backing has changes at once.
    fn plan_next_begin(
        &self,
        transaction: &TransactionHandle<'a, B>,
        options: CommitOptions,
    ) -> NextBegin {
        let hosts_share_changes =
            self.store.lower.members().is_some() && self.store.mode() == Mode::Shadow;
        if !options.begins_next {
            NextBegin::Never
        } else if transaction.is_recovered() {
            // Programs see the old tree until the commit is applied.
            NextBegin::AfterApply
        } else if hosts_share_changes {
            // No host may begin the next transaction while another one has not finished this one.
            NextBegin::AfterOtherHosts
        } else {
            NextBegin::AtDecision
        }
    }

    /// Decides the commit, and returns the step `Apply`. If the transaction is open, changes are stopped first, and
    /// data in memory is written to the backing (quiesce and drain). Changes of a prepared transaction wait already.
    pub(super) fn decide(
        &self,
        transaction: &TransactionHandle<'a, B>,
        plan: Plan,
    ) -> Result<Step<'a, B>, TransactionError> {
        match transaction {
            TransactionHandle::Open(_) => {
                let target = QuiesceTarget::scope(transaction.scope_ref());
                let decide = |_: &_| self.decide_in_quiet_scope(transaction, plan);
                self.mount.quiesce(&target, Pending::Drain, decide)
            }
            TransactionHandle::Prepared(_) | TransactionHandle::Decided(_) => {
                self.decide_in_quiet_scope(transaction, plan)
            }
        }
    }

    /// Decides the commit, and begins the next transaction if the plan says so. The caller ensures that nothing changes
    /// in the directory of the transaction. Returns the step `Apply`.
    fn decide_in_quiet_scope(
        &self,
        transaction: &TransactionHandle<'a, B>,
        mut plan: Plan,
    ) -> Result<Step<'a, B>, TransactionError> {
        plan.path_after = transaction.path_after();
        let commit = transaction.decide(plan.id)?;
        self.store.remove_unanswered(&plan.path_after);
        self.mount
            .note(Event::Decided, commit.scope(), Some(plan.id));
        match plan.next_begin {
            NextBegin::Never => self.end_accesses(commit.scope()),
            NextBegin::AtDecision if !commit.is_followed() => {
                self.begin_in_quiet_scope(commit.root(), &plan.path_after)?;
            }
            NextBegin::AtDecision | NextBegin::AfterApply | NextBegin::AfterOtherHosts => {}
        }
        Ok(Step::Apply { commit, plan })
    }

    /// Applies a decided commit to the backing now, or arranges for it to be applied after the answer, as `plan` says.
    /// Returns the next step.
    pub(super) fn apply_decided(
        &self,
        commit: Decided<'a, B>,
        plan: Plan,
    ) -> Result<Step<'a, B>, TransactionError> {
        if plan.apply_time == ApplyTime::AfterAnswer {
            self.mount.apply_later();
            // The request does not wait for other hosts, so it reports none.
            let not_applied_on = Vec::new();
            return Ok(Step::Over(plan.into_answer(not_applied_on)));
        }
        // An earlier firnd prepared a recovered commit, so the kernel may have the old tree in its cache.
        if commit.is_recovered() {
            self.apply_recovered(&commit, commit.scope())?;
        } else if let Err(error) = self.apply(&commit) {
            // The client will repeat its request for this commit, so the transaction that follows the commit must not
            // stay open.
            if plan.next_begin == NextBegin::AtDecision {
                commit.give_up_next();
            }
            return Err(error);
        }
        let path_to_begin = plan.path_to_begin_at(NextBegin::AfterApply);
        Ok(begin_first(
            path_to_begin,
            Step::AwaitHosts { commit, plan },
        ))
    }

    /// Waits until the other hosts have applied the commit, then begins the next transaction if the plan says so.
    pub(super) fn await_hosts(
        &self,
        commit: &Decided<'a, B>,
        plan: Plan,
    ) -> Result<Step<'a, B>, TransactionError> {
        if self.store.lower.members().is_none() {
            return Ok(Step::Over(plan.into_answer(Vec::new())));
        }
        let not_applied_on = self.wait_until_applied(plan.id, commit.scope())?;
        let path_to_begin = plan.path_to_begin_at(NextBegin::AfterOtherHosts);
        let over = Step::Over(plan.into_answer(not_applied_on));
        Ok(begin_first(path_to_begin, over))
    }

    /// Waits until the other hosts have applied a commit. Returns the names of those that have not.
    ///
    /// The wait ends when all hosts have applied it, when none of the missing hosts is alive, or when the mount's
    /// timeout is over.
    fn wait_until_applied(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, TransactionError> {
        let mut wait_again = self.mount.begin_wait();
        let not_applied_on = loop {
            let hosts = self.store.votes.hosts_not_applied(id, scope)?;
            if hosts.is_empty() || !self.mount.is_any_living(&hosts)? || !wait_again() {
                break hosts;
            }
        };
        // The kernel may have cached names from before the other hosts applied their parts.
        self.mount.forget_names(&[scope]);
        Ok(not_applied_on)
    }

    /// Answers a repeated request for a commit that was applied before its first request failed. Leaves the vote of the
    /// hosts, and waits until the other hosts have applied the commit. Begins the next transaction if `begins_next`.
    pub(super) fn answer_applied(
        &self,
        commit: Unanswered,
        begins_next: bool,
    ) -> Result<Step<'a, B>, TransactionError> {
        self.store.commits.leave_applied(commit.id, &commit.scope)?;
        let not_applied_on = self.wait_until_applied(commit.id, &commit.scope)?;
        self.store.remove_unanswered(&commit.path_after);
        let path_to_begin = begins_next.then(|| commit.path_after.clone());
        let over = Step::Over(Answer::Committed(Committed {
            id: commit.id,
            not_applied_on,
            path_after: commit.path_after,
        }));
        Ok(begin_first(path_to_begin, over))
    }
}

/// Returns `then`, or a step that begins a transaction at `path` first if there is a path.
fn begin_first<B: Backing>(path: Option<Vec<u8>>, then: Step<'_, B>) -> Step<'_, B> {
    match path {
        Some(path) => Step::Begin {
            target: QuiesceTarget::for_directory(&path),
            path,
            then: Box::new(then),
        },
        None => then,
    }
}
