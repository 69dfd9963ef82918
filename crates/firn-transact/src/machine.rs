//! The state machine of transactions: a request such as `commit` goes from step to step; each step is one function.
//!
//! ```text
//! begin ──► Clear ───────► Begin ──► Over
//! create ─► Create ──► Over
//! prepare ► ApplyBefore ─► Prepare ─► Vote ──► Over
//! commit ─► ApplyBefore ─┬─ one host ─────────► Decide ─► Apply ─┬► [Begin ─►] AwaitHosts ─► [Begin ─►] Over
//!                        └► Prepare ─► Vote ──────▲              └► Over      applied later
//! commit ─► AnswerApplied ──► [Begin ──►] Over      repeated; the commit is applied, not answered
//! abort ──► CallOff ─► Undo ──► Over
//! restore ► FinishUndo ─┬► ApplyBefore ─┬► FinishCommit ──► Over
//!                       └───────────────┴► [CallOff ─► Undo ─►] Restore ──► Over
//! ```
//!
//! Terms
//! * A *scope* is the directory that a transaction covers; a request names the scope by its path.
//! * A transaction is *open*, then optionally *prepared* (durable, outcome open), then *decided* (its commit is a
//!   fact), then *applied* (the backing has the changes).
//! * A step in brackets is taken only if the request or the state of the transaction asks for it.
//!
//! Where a commit starts
//! * A commit of a prepared transaction starts at `Decide`.
//! * A repeated commit request also starts at `Decide` if the commit is decided and not applied.
//! * A repeated request for an applied commit starts at `AnswerApplied`, because another transaction may be open by
//!   then.
//!
//! Each file below `machine/` has the steps and rules of one request, such as `machine/commit.rs`.
//!
//! Invariants
//! * A request searches for the transactions of its scope once, by path. Each step passes its transaction handle to the
//!   next step. Each method of a handle checks the stage again, under the locks that the method takes.
//! * After a failure the machine searches by path once more, because another host may have ended the transaction.
//! * A failed step ends the request. The transaction keeps its stage or is in the next one (open, prepared, decided,
//!   over); a failed vote makes the transaction open again. A repeated request continues from that stage.
//! * Nothing is undone after `Decide`.
//!
//! The machine relies on [`Mount`] to stop programs, to write their data in memory to the backing, and to invalidate
//! the kernel's cache.

mod abort;
mod begin;
mod commit;
mod mount;
mod prepare;
mod restore;
#[cfg(test)]
mod tests;

use firn_backing::Backing;

use self::commit::Plan;
use self::prepare::AfterVote;
use crate::error::{AbortError, BeginError, StageError, TransactionError, VoteError};
use crate::transaction::handle::{
    Decided, Open, Prepared, QuiesceTarget, ScopeTransactions, TransactionHandle,
};
use crate::transaction::top::TopMaker;
use crate::transactional::TransactionalBacking;
use crate::unanswered::Unanswered;

pub use self::mount::{Event, Mount, Pending};

/// The request of a client about one scope.
#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    /// Begin a transaction in an existing directory.
    Begin,
    /// Begin a transaction that creates the directory of its scope.
    Create(TopMaker<'a>),
    /// Make the changes durable under this commit number, and leave the outcome open.
    Prepare(u64),
    /// Commit the transaction of the scope.
    Commit(CommitOptions),
    /// Abort the transaction of the scope: all of its changes are lost.
    Abort,
    /// Restore the files to the commit with this number.
    Restore(u64),
}

/// How a transaction is committed.
#[derive(Clone, Copy, Debug, Default)]
pub struct CommitOptions {
    /// Number of the commit. `None` stands for the number of the prepare, or, without a prepare, for the number after
    /// the last commit of the scope.
    pub id: Option<u64>,
    /// Whether the next transaction of the scope begins with this commit, so that no change falls between the two.
    pub begins_next: bool,
    /// Whether the client is answered before the commit is applied to the backing.
    pub applies_later: bool,
}

/// The answer to a request that succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A request other than a commit is done.
    Done,
    /// The transaction is committed.
    Committed(Committed),
}

/// The result of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Number of the commit.
    pub id: u64,
    /// Names of the hosts that had not applied the commit when the wait for them ended.
    pub not_applied_on: Vec<String>,
    /// Path of the scope after the commit. The next transaction, if the commit began one, has this path.
    pub path_after: Vec<u8>,
}

/// The next step of a request, with the step's inputs. `then` is the step that follows.
enum Step<'a, B: Backing> {
    /// Applies an earlier commit of the directory where a new transaction could not begin otherwise.
    Clear {
        path: Vec<u8>,
        transactions: ScopeTransactions<'a, B>,
    },
    /// Begins a transaction in an existing directory.
    Begin {
        target: QuiesceTarget<'a, B>,
        path: Vec<u8>,
        then: Box<Self>,
    },
    /// Begins a transaction that creates its directory.
    Create { path: Vec<u8>, maker: TopMaker<'a> },
    /// Applies the commit that the open transaction follows, while programs continue to change the scope.
    ApplyBefore {
        commit: Option<Decided<'a, B>>,
        open: Open<'a, B>,
        goal: Goal,
    },
    /// Makes the transaction durable and leaves its outcome open.
    Prepare {
        open: Open<'a, B>,
        id: u64,
        then: AfterVote,
    },
    /// Waits until all hosts have voted on the commit, and fails unless the verdict allows the commit.
    Vote {
        prepared: Prepared<'a, B>,
        then: AfterVote,
    },
    /// Decides the commit durably. Nothing is undone from here on.
    Decide {
        transaction: TransactionHandle<'a, B>,
        plan: Plan,
    },
    /// Applies the decided commit to the backing. Programs see the committed tree already.
    Apply { commit: Decided<'a, B>, plan: Plan },
    /// Waits until the other hosts have applied the commit.
    AwaitHosts { commit: Decided<'a, B>, plan: Plan },
    /// Answers a repeated request for a commit that was applied before its first request failed.
    AnswerApplied {
        commit: Unanswered,
        begins_next: bool,
    },
    /// Decides for all hosts that the transaction is not committed, and makes further changes in the scope fail.
    CallOff {
        transaction: TransactionHandle<'a, B>,
        then: Box<Self>,
    },
    /// Undoes all changes of the transaction.
    Undo {
        transaction: TransactionHandle<'a, B>,
        then: Box<Self>,
    },
    /// Finishes a restore that failed.
    FinishUndo {
        path: Vec<u8>,
        transactions: ScopeTransactions<'a, B>,
        id: u64,
    },
    /// Commits the transaction that was prepared or decided under the requested number. Data written since is dropped.
    FinishCommit {
        transaction: TransactionHandle<'a, B>,
        id: u64,
    },
    /// Undoes the open transaction and the commits after the requested one.
    Restore {
        target: QuiesceTarget<'a, B>,
        path: Vec<u8>,
        pending: Pending,
        id: u64,
    },
    /// Ends the request with this answer.
    Over(Answer),
}

impl<B: Backing> Step<'_, B> {
    /// Returns the step's name for the trace log.
    fn name(&self) -> &'static str {
        match self {
            Self::Clear { .. } => "clear",
            Self::Begin { .. } => "begin",
            Self::Create { .. } => "create",
            Self::ApplyBefore { .. } => "apply before",
            Self::Prepare { .. } => "prepare",
            Self::Vote { .. } => "vote",
            Self::Decide { .. } => "decide",
            Self::Apply { .. } => "apply",
            Self::AwaitHosts { .. } => "await hosts",
            Self::AnswerApplied { .. } => "answer applied",
            Self::CallOff { .. } => "call off",
            Self::Undo { .. } => "undo",
            Self::FinishUndo { .. } => "finish undo",
            Self::FinishCommit { .. } => "finish commit",
            Self::Restore { .. } => "restore",
            Self::Over(_) => "over",
        }
    }

    /// Returns the commit that this step or a later step answers, if that commit may be applied already. If the step
    /// fails, a repeated request must find this commit.
    fn commit_to_answer(&self) -> Option<Unanswered> {
        match self {
            Self::Apply { commit, plan } | Self::AwaitHosts { commit, plan } => {
                Some(plan.commit_to_answer(commit.scope()))
            }
            Self::AnswerApplied { commit, .. } => Some(commit.clone()),
            Self::Begin { then, .. } => then.commit_to_answer(),
            Self::Over(Answer::Committed(committed)) => Some(Unanswered {
                id: committed.id,
                scope: committed.path_after.clone(),
                path_after: committed.path_after.clone(),
            }),
            _ => None,
        }
    }
}

/// What follows `ApplyBefore`, once the open transaction follows no unapplied commit.
#[derive(Clone, Copy, Debug)]
enum Goal {
    Prepare(u64),
    Commit(CommitOptions),
    Restore(u64),
}

/// Takes requests about the transactions of one mount through their steps.
pub struct Machine<'a, B: Backing, M: Mount<B>> {
    store: &'a TransactionalBacking<B>,
    mount: &'a M,
}

impl<'a, B: Backing, M: Mount<B>> Machine<'a, B, M> {
    /// Makes a machine for the transactions in `store`, whose programs use `mount`.
    pub fn new(store: &'a TransactionalBacking<B>, mount: &'a M) -> Self {
        Self { store, mount }
    }

    /// Carries out the request `verb` in the scope at `path`, and returns the answer.
    ///
    /// After an error the transaction is in the stage that the last successful step left, and the request can be
    /// repeated.
    pub fn run(&self, verb: Verb<'a>, path: &[u8]) -> Result<Answer, TransactionError> {
        self.find_first_step(verb, path)
            .and_then(|step| self.run_steps(step))
            .or_else(|error| self.explain_failure(verb, path, error))
    }

    /// Aborts a transaction: takes the steps `CallOff` and `Undo`.
    pub fn abort(&self, transaction: TransactionHandle<'a, B>) -> Result<(), TransactionError> {
        let decide_abort = Step::CallOff {
            transaction,
            then: Box::new(Step::Over(Answer::Done)),
        };
        self.run_steps(decide_abort).map(drop)
    }

    /// Applies a decided commit and reports its end to the mount. Does nothing if the commit is applied already.
    pub fn apply(&self, commit: &Decided<'a, B>) -> Result<(), TransactionError> {
        if commit.apply_once()? {
            self.report_end(Event::Applied, commit.scope(), Some(commit.id()));
        }
        Ok(())
    }

    /// Ends the use of a transaction at an unmount.
    ///
    /// An open transaction is undone, and a decided commit is applied. A prepared transaction waits for the next mount;
    /// data written after its prepare is dropped.
    pub fn end_at_unmount(
        &self,
        transaction: &TransactionHandle<'a, B>,
    ) -> Result<(), TransactionError> {
        match transaction.refresh() {
            Some(open @ TransactionHandle::Open(_)) => self.abort(open),
            Some(TransactionHandle::Decided(commit)) => self.apply(&commit),
            Some(prepared @ TransactionHandle::Prepared(_)) => {
                prepared.refuse_changes()?;
                let target = QuiesceTarget::scope(prepared.scope_ref());
                self.mount.quiesce(&target, Pending::Discard, |_| Ok(()))
            }
            None => Ok(()),
        }
    }

    /// Returns the first step of a request. Only this function and [`Self::explain_failure`] search for transactions by
    /// path.
    fn find_first_step(
        &self,
        verb: Verb<'a>,
        path: &[u8],
    ) -> Result<Step<'a, B>, TransactionError> {
        if let Verb::Create(maker) = verb {
            let path = path.to_vec();
            return Ok(Step::Create { path, maker });
        }
        // Only a commit can be requested again. After any other request no unanswered commit is needed.
        if !matches!(verb, Verb::Commit(_)) {
            self.store.remove_unanswered(path);
        }
        let transactions = self.store.transactions_at_path(path);
        match verb {
            Verb::Begin | Verb::Create(_) => Ok(Step::Clear {
                path: path.to_vec(),
                transactions,
            }),
            Verb::Prepare(id) => {
                self.write_back(&transactions);
                self.first_prepare_step(path, transactions, id)
            }
            Verb::Commit(options) => {
                self.write_back(&transactions);
                self.first_commit_step(path, transactions, options)
            }
            Verb::Abort => {
                self.write_back(&transactions);
                self.first_abort_step(path, transactions)
            }
            Verb::Restore(id) => {
                self.write_back(&transactions);
                Ok(Step::FinishUndo {
                    path: path.to_vec(),
                    transactions,
                    id,
                })
            }
        }
    }

    /// Takes steps until the request is over, and returns its answer. The first failed step ends the request.
    fn run_steps(&self, mut step: Step<'a, B>) -> Result<Answer, TransactionError> {
        loop {
            step = match step {
                Step::Over(answer) => return Ok(answer),
                step => self.take_step(step)?,
            };
        }
    }

    /// Takes one step and returns the next one.
    ///
    /// If the step fails after its commit may have been applied, the commit is recorded as unanswered for a repeated
    /// request.
    fn take_step(&self, step: Step<'a, B>) -> Result<Step<'a, B>, TransactionError> {
        tracing::trace!(step = step.name(), "step of a transaction");
        let commit_to_answer = step.commit_to_answer();
        let next_step = self.dispatch_step(step);
        if let (Err(_), Some(commit)) = (&next_step, commit_to_answer) {
            self.store.record_unanswered(commit);
        }
        next_step
    }

    /// Calls the function of the step. That function alone chooses the next step.
    fn dispatch_step(&self, step: Step<'a, B>) -> Result<Step<'a, B>, TransactionError> {
        match step {
            Step::Clear { path, transactions } => self.finish_blocking_commit(path, transactions),
            Step::Begin { target, path, then } => self.begin(&target, &path, *then),
            Step::Create { path, maker } => self.create(&path, maker),
            Step::ApplyBefore { commit, open, goal } => self.apply_before(commit, open, goal),
            Step::Prepare { open, id, then } => self.prepare(&open, id, then),
            Step::Vote { prepared, then } => self.await_vote(prepared, then),
            Step::Decide { transaction, plan } => self.decide(&transaction, plan),
            Step::Apply { commit, plan } => self.apply_decided(commit, plan),
            Step::AwaitHosts { commit, plan } => self.await_hosts(&commit, plan),
            Step::AnswerApplied {
                commit,
                begins_next,
            } => self.answer_applied(commit, begins_next),
            Step::CallOff { transaction, then } => self.decide_abort(transaction, then),
            Step::Undo { transaction, then } => self.undo(&transaction, *then),
            Step::FinishUndo {
                path,
                transactions,
                id,
            } => self.first_restore_step(path, transactions, id),
            Step::FinishCommit { transaction, id } => self.finish_commit(&transaction, id),
            Step::Restore {
                target,
                path,
                pending,
                id,
            } => self.restore(&target, &path, pending, id),
            over @ Step::Over(_) => Ok(over),
        }
    }

    /// Applies the commit that `open` follows, and returns the first step towards `goal`.
    ///
    /// Programs continue to change the scope meanwhile. The commit comes before the drain of the scope, because that
    /// drain waits until the commit is applied.
    fn apply_before(
        &self,
        commit: Option<Decided<'a, B>>,
        open: Open<'a, B>,
        goal: Goal,
    ) -> Result<Step<'a, B>, TransactionError> {
        if let Some(commit) = &commit {
            self.apply(commit)?;
        }
        match goal {
            Goal::Prepare(id) => Ok(Step::Prepare {
                open,
                id,
                then: AfterVote::Answer,
            }),
            Goal::Commit(options) => self.plan_commit(open.into(), options),
            Goal::Restore(id) => {
                let path = open.scope_ref().scope_path().to_vec();
                self.choose_restore(path, Some(open.into()), id)
            }
        }
    }

    /// Replaces the error of a failed request if another host has aborted the transaction for all hosts.
    ///
    /// In that case an abort counts as done, and a prepare or commit fails with the name of that host. In all other
    /// cases `error` is returned. If the abort has not reached this host's part yet, the function first ends that part.
    fn explain_failure(
        &self,
        verb: Verb<'a>,
        path: &[u8],
        error: TransactionError,
    ) -> Result<Answer, TransactionError> {
        let scopes_to_stop = self.store.scopes_to_stop();
        let must_stop = scopes_to_stop.iter().any(|scope| scope == path);
        if must_stop
            && !matches!(verb, Verb::Abort)
            && let Some(transaction) = self.store.current_transaction(path)
        {
            self.abort(transaction)?;
        }
        let Some(host) = self.store.stopped_by(path) else {
            return Err(error);
        };
        // A transaction that is left was not aborted by that host.
        if self.store.current_transaction(path).is_some() {
            return Err(error);
        }
        match verb {
            Verb::Abort => Ok(Answer::Done),
            Verb::Prepare(_) | Verb::Commit(_) => Err(TransactionError::AbortedBy { host }),
            Verb::Begin | Verb::Create(_) | Verb::Restore(_) => Err(error),
        }
    }

    // ---- what several steps use ---------------------------------------------------------------

    /// Returns the error of a request for a scope without a transaction: the error of the path if `path` is not a
    /// directory, otherwise `NoTransaction`.
    fn no_transaction(&self, path: &[u8]) -> TransactionError {
        match self.mount.directory_at(path) {
            Ok(_) => StageError::NoTransaction.into(),
            Err(error) => error,
        }
    }

    /// Makes the kernel write back shared mappings of an open transaction, because these stores are part of it.
    ///
    /// Does nothing once the transaction is prepared: the writes would wait for the outcome.
    fn write_back(&self, transactions: &ScopeTransactions<'a, B>) {
        if let Some(open @ TransactionHandle::Open(_)) = &transactions.undecided {
            self.mount.write_back(&open.path_now());
        }
    }

    /// Reports `event` and the end of the transaction in `scope` to the mount, for counters and the log.
    fn report_end(&self, event: Event, scope: &[u8], id: Option<u64>) {
        self.mount.note(event, scope, id);
        self.mount.note(Event::Ended, scope, id);
    }

    /// Reports the end of this host's part, and stops recording which bytes and names its programs use.
    fn end_local_part(&self, event: Event, scope: &[u8], id: Option<u64>) {
        self.report_end(event, scope, id);
        self.end_accesses(scope);
    }

    /// Stops recording which bytes and names programs use, if that is recorded.
    fn end_accesses(&self, scope: &[u8]) {
        if self.store.tests_conflicts() {
            self.mount.end_accesses(scope);
        }
    }

    /// Repeats `attempt` while it fails because another host has not finished an earlier vote, transaction or abort.
    ///
    /// Returns the first other result, or the last error once the mount's wait for other hosts is over.
    fn retry_while_hosts_finish<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        let mut wait_again = self.mount.begin_wait();
        loop {
            match attempt() {
                Err(
                    TransactionError::Vote(VoteError::LastVoteNotOver { .. })
                    | TransactionError::Begin(BeginError::NotOver { .. })
                    | TransactionError::Abort(AbortError::Stopping { .. }),
                ) if wait_again() => {}
                result => return result,
            }
        }
    }
}
