//! The machine of transactions: a request goes from step to step, and each step is one function.
//!
//! ```text
//! begin ──► Clear ───────► Begin ──► Over
//! create ─► Create ──► Over
//! prepare ► ApplyBefore ─► Prepare ─► Vote ──► Over
//! commit ─► ApplyBefore ─┬─ one host ─────────► Decide ─► Apply ─┬► [Begin ─►] AwaitHosts ─► [Begin ─►] Over
//!                        └► Prepare ─► Vote ──────▲              └► Over      applied later
//! commit ─► AnswerApplied ──► [Begin ──►] Over      asked again, of one that was applied before its request failed
//! abort ──► CallOff ─► Undo ──► Over
//! restore ► FinishUndo ─┬► ApplyBefore ─┬► FinishCommit ──► Over
//!                       └───────────────┴► [CallOff ─► Undo ─►] Restore ──► Over
//! ```
//!
//! A commit that was prepared begins at `Decide`. So does one that is asked for again, at what is decided. One that was
//! applied is only answered: another transaction may follow it by then. The steps and
//! their rules are in the file of the verb that begins with them.
//!
//! Invariants
//! * The transactions of a scope are looked for once, by the path that a request gives. Each step takes the handle that
//!   the step before found, and a handle looks at the stage of its transaction under the locks of what it does. Only after a
//!   failure the path is looked at again: another host may have ended the transaction.
//! * A step that fails ends the request. The transaction is in the stage that it had, or in the next one (`Open`,
//!   `Prepared`, `Decided`, over); after a vote that failed it is open again. The same request goes on from there.
//! * Nothing is undone after `Decide`.
//!
//! Relies on [`Mount`] for what only the owner of the mount can do: stop programs, drain what they wrote, tell the kernel.

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
use crate::transaction::handle::{Decided, Found, Known, Open, Place, Prepared};
use crate::transaction::top::TopMaker;
use crate::transactional::TransactionalBacking;
use crate::unanswered::Unanswered;

pub use self::mount::{Event, Mount, Pending};

/// What a client asks for.
#[derive(Clone, Copy, Debug)]
pub enum Verb<'a> {
    /// A transaction in a directory that is there.
    Begin,
    /// A transaction that makes its directory.
    Create(TopMaker<'a>),
    /// Makes the changes durable, with this number, and leaves the outcome open.
    Prepare(u64),
    /// Commit it.
    Commit(CommitOptions),
    /// Throw it away.
    Abort,
    /// Bring the files of this checkpoint back.
    Restore(u64),
}

/// How a transaction is committed.
#[derive(Clone, Copy, Debug, Default)]
pub struct CommitOptions {
    /// The number of the commit; `None`: that of the prepare, or the one after the last commit.
    pub id: Option<u64>,
    /// The next transaction is open before anything can change.
    pub begins_next: bool,
    /// The backing gets the commit after the answer.
    pub applies_later: bool,
}

/// What came of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It is done.
    Done,
    /// It is committed.
    Committed(Committed),
}

/// What came of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its number.
    pub id: u64,
    /// Hosts that have not applied it.
    pub not_applied_on: Vec<String>,
    /// The path of the scope after it, which is that of the transaction that was begun after it.
    pub path_after: Vec<u8>,
}

/// Where a request is, with what the step needs.
enum Step<'a, B: Backing> {
    /// An earlier commit of the directory is applied where it would be in the way of a begin.
    Clear { path: Vec<u8>, known: Known<'a, B> },
    /// A transaction begins.
    Begin {
        place: Place<'a, B>,
        path: Vec<u8>,
        then: Box<Self>,
    },
    /// A transaction begins that makes its directory.
    Create { path: Vec<u8>, maker: TopMaker<'a> },
    /// The commit that a transaction follows is applied, while changes go on.
    ApplyBefore {
        commit: Option<Decided<'a, B>>,
        open: Open<'a, B>,
        goal: Goal,
    },
    /// It becomes durable, its outcome open.
    Prepare {
        open: Open<'a, B>,
        id: u64,
        then: AfterVote,
    },
    /// The hosts that commit together agree on it.
    Vote {
        prepared: Prepared<'a, B>,
        then: AfterVote,
    },
    /// The commit becomes a fact.
    Decide { found: Found<'a, B>, plan: Plan },
    /// Makes the backing what programs see already.
    Apply { commit: Decided<'a, B>, plan: Plan },
    /// The other hosts apply it, too.
    AwaitHosts { commit: Decided<'a, B>, plan: Plan },
    /// A commit that was applied is answered after all.
    AnswerApplied {
        commit: Unanswered,
        begins_next: bool,
    },
    /// The other hosts hear that it is not committed, and changes in it fail.
    CallOff {
        found: Found<'a, B>,
        then: Box<Self>,
    },
    /// Everything in it is thrown away.
    Undo {
        found: Found<'a, B>,
        then: Box<Self>,
    },
    /// Finishes a restore that failed.
    FinishUndo {
        path: Vec<u8>,
        known: Known<'a, B>,
        id: u64,
    },
    /// What was prepared or decided with the number that is asked for is committed, without what was written since.
    FinishCommit { found: Found<'a, B>, id: u64 },
    /// Commits are undone, and what is open.
    Restore {
        place: Place<'a, B>,
        path: Vec<u8>,
        pending: Pending,
        id: u64,
    },
    /// The request is answered.
    Over(Answer),
}

impl<B: Backing> Step<'_, B> {
    /// For the log.
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

    /// The commit that is answered when this step and what follows have gone well, from when it may be applied.
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

/// Next goal of a transaction that follows no commit any more.
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
    /// Over the transactions of `mount`.
    pub fn new(store: &'a TransactionalBacking<B>, mount: &'a M) -> Self {
        Self { store, mount }
    }

    /// Does what is asked for in the scope that is known by `path`.
    pub fn run(&self, verb: Verb<'a>, path: &[u8]) -> Result<Answer, TransactionError> {
        let result = self.find_step(verb, path).and_then(|step| self.go_on(step));
        result.or_else(|error| self.explain(verb, path, error))
    }

    /// Throws a transaction away.
    pub fn abort(&self, found: Found<'a, B>) -> Result<(), TransactionError> {
        let then = Box::new(Step::Over(Answer::Done));
        self.go_on(Step::CallOff { found, then }).map(drop)
    }

    /// Applies a commit, unless that is done.
    pub fn apply(&self, commit: &Decided<'a, B>) -> Result<(), TransactionError> {
        if commit.apply_once()? {
            self.note_end(Event::Applied, commit.scope(), Some(commit.id()));
        }
        Ok(())
    }

    /// At the end of a mount: an open transaction is undone, a decided one is applied. One that is prepared waits for the
    /// next mount, without what was written since.
    pub fn leave(&self, found: &Found<'a, B>) -> Result<(), TransactionError> {
        match found.look_again() {
            Some(open @ Found::Open(_)) => self.abort(open),
            Some(Found::Decided(commit)) => self.apply(&commit),
            Some(prepared @ Found::Prepared(_)) => {
                prepared.refuse_changes()?;
                let place = Place::scope(prepared.handle());
                self.mount.quiesce(&place, Pending::Discard, |_| Ok(()))
            }
            None => Ok(()),
        }
    }

    /// The first step. Here the transactions are looked for by the path.
    fn find_step(&self, verb: Verb<'a>, path: &[u8]) -> Result<Step<'a, B>, TransactionError> {
        if let Verb::Create(maker) = verb {
            let path = path.to_vec();
            return Ok(Step::Create { path, maker });
        }
        if !matches!(verb, Verb::Commit(_)) {
            self.store.forget_unanswered(path);
        }
        let known = self.store.known_at(path);
        match verb {
            Verb::Begin | Verb::Create(_) => Ok(Step::Clear {
                path: path.to_vec(),
                known,
            }),
            Verb::Prepare(id) => {
                self.write_back(&known);
                self.find_prepare(path, known, id)
            }
            Verb::Commit(options) => {
                self.write_back(&known);
                self.find_commit(path, known, options)
            }
            Verb::Abort => {
                self.write_back(&known);
                self.find_abort(path, known)
            }
            Verb::Restore(id) => {
                self.write_back(&known);
                Ok(Step::FinishUndo {
                    path: path.to_vec(),
                    known,
                    id,
                })
            }
        }
    }

    fn go_on(&self, mut step: Step<'a, B>) -> Result<Answer, TransactionError> {
        loop {
            step = match step {
                Step::Over(answer) => return Ok(answer),
                step => self.take(step)?,
            };
        }
    }

    /// Takes one step. What comes next is only in the functions that this calls.
    fn take(&self, step: Step<'a, B>) -> Result<Step<'a, B>, TransactionError> {
        tracing::trace!(step = step.name(), "step of a transaction");
        let commit = step.commit_to_answer();
        let next = self.take_step(step);
        if let (Err(_), Some(commit)) = (&next, commit) {
            self.store.note_unanswered(commit);
        }
        next
    }

    fn take_step(&self, step: Step<'a, B>) -> Result<Step<'a, B>, TransactionError> {
        match step {
            Step::Clear { path, known } => self.clear(path, known),
            Step::Begin { place, path, then } => self.begin(&place, &path, *then),
            Step::Create { path, maker } => self.create(&path, maker),
            Step::ApplyBefore { commit, open, goal } => self.apply_before(commit, open, goal),
            Step::Prepare { open, id, then } => self.prepare(&open, id, then),
            Step::Vote { prepared, then } => self.vote(prepared, then),
            Step::Decide { found, plan } => self.decide(&found, plan),
            Step::Apply { commit, plan } => self.apply_decided(commit, plan),
            Step::AwaitHosts { commit, plan } => self.await_hosts(&commit, plan),
            Step::AnswerApplied {
                commit,
                begins_next,
            } => self.answer_applied(commit, begins_next),
            Step::CallOff { found, then } => self.call_off(found, then),
            Step::Undo { found, then } => self.undo(&found, *then),
            Step::FinishUndo { path, known, id } => self.finish_undo(path, known, id),
            Step::FinishCommit { found, id } => self.finish_commit(&found, id),
            Step::Restore {
                place,
                path,
                pending,
                id,
            } => self.restore(&place, &path, pending, id),
            over @ Step::Over(_) => Ok(over),
        }
    }

    /// Applies the commit that `open` follows, while changes go on: drains of the scope wait for that.
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
                let path = open.handle().scope_path().to_vec();
                self.choose_restore(path, Some(open.into()), id)
            }
        }
    }

    /// Explains a failed request in a transaction that another host has aborted, for all hosts. The transaction may not
    /// be over here yet.
    fn explain(
        &self,
        verb: Verb<'a>,
        path: &[u8],
        error: TransactionError,
    ) -> Result<Answer, TransactionError> {
        let stopped = self.store.to_be_stopped();
        if !matches!(verb, Verb::Abort)
            && stopped.iter().any(|scope| scope == path)
            && let Some(found) = self.store.current_transaction(path)
        {
            self.abort(found)?;
        }
        let Some(host) = self.store.stopped_by(path) else {
            return Err(error);
        };
        match verb {
            _ if self.store.current_transaction(path).is_some() => Err(error),
            Verb::Abort => Ok(Answer::Done),
            Verb::Prepare(_) | Verb::Commit(_) => Err(TransactionError::AbortedBy { host }),
            Verb::Begin | Verb::Create(_) | Verb::Restore(_) => Err(error),
        }
    }

    // ---- what several steps use ---------------------------------------------------------------

    /// Why nothing can be done in a scope without a transaction. What is wrong with the path counts more.
    fn no_transaction(&self, path: &[u8]) -> TransactionError {
        match self.mount.directory_at(path) {
            Ok(_) => StageError::NoTransaction.into(),
            Err(error) => error,
        }
    }

    /// What programs stored in shared mappings is part of a transaction that is open. Once it is prepared, the writes would
    /// wait for the outcome.
    fn write_back(&self, known: &Known<'a, B>) {
        if let Some(open @ Found::Open(_)) = &known.undecided {
            self.mount.write_back(&open.path_now());
        }
    }

    /// Notes the event with which the transaction in `scope` ended.
    fn note_end(&self, event: Event, scope: &[u8], id: Option<u64>) {
        self.mount.note(event, scope, id);
        self.mount.note(Event::Ended, scope, id);
    }

    /// Notes the event with which this host's part ended; its accesses need no notes any more.
    fn end_part(&self, event: Event, scope: &[u8], id: Option<u64>) {
        self.note_end(event, scope, id);
        self.end_accesses(scope);
    }

    fn end_accesses(&self, scope: &[u8]) {
        if self.store.tests_conflicts() {
            self.mount.end_accesses(scope);
        }
    }

    /// Tries again while other hosts have something to end, as long as the mount waits for them.
    fn retry<T>(
        &self,
        mut attempt: impl FnMut() -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError> {
        let mut rest = self.mount.begin_wait();
        loop {
            match attempt() {
                Err(
                    TransactionError::Vote(VoteError::LastVoteNotOver { .. })
                    | TransactionError::Begin(BeginError::NotOver { .. })
                    | TransactionError::Abort(AbortError::Stopping { .. }),
                ) if rest() => {}
                done => return done,
            }
        }
    }
}
