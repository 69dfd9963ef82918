//! Votes: several hosts agree on the commit of one transaction, by files in a directory that all of them see.
//!
//! The *scope* is the directory that the transaction covers. A [`Ballot`] is the general form of such a decision, by
//! put-once files: the first host creates such a file, and none changes it.
//!
//! 1. Each host prepares its part of the transaction in its own directory below `.firn/`, and publishes a list of the
//!    bytes and names that its programs used.
//! 2. Once all lists are published, each host tests them for conflicts. The first verdict that is stored counts.
//! 3. After a verdict of no conflict, any host may decide the commit for all hosts.
//! 4. Each host applies its part, after a crash too, and records that it did ("leaves" the vote).
//!
//! ```text
//! .firn/vote-ID[-SCOPE]/     one vote, a [`Ballot`]; SCOPE stands for the path of the scope
//!   in-HOST                  list of what the host's programs read and wrote: `crate::conflict::AccessList`
//!   verdict                  JSON: whether the lists conflict; written once
//!   decision                 JSON: commit or abort, and the host that decided
//!   left-HOST                the host has applied the decision
//! ```
//!
//! Invariants, in addition to those of a ballot
//! * A commit is decided only after a verdict of no conflict, and applied only after its decision.
//! * After any other verdict, the first host that leaves stores the decision to abort. A host leaves when it reopens
//!   its part, which it may do before or after that decision.

use std::ffi::OsStr;
use std::sync::Arc;

use crate::change_log::ChangeLog;
use crate::conflict::{AccessList, AccessedFile, ConflictReport, find_conflicts};
use crate::scopes::Scopes;
use crate::shadow::shared::SharedTransactions;
use crate::tree::Tree;
use firn_backing::{Backing, Errno};
use firn_hosts::{Ballot, Joined, MemberCheck, Members, Plan, Protocol, VoteDir};
use serde::{Deserialize, Serialize};

use crate::claim::Claim;
use crate::error::{StageError, VoteError};
use crate::lower_backing::LowerBacking;
use crate::scope::{Scope, Stage};
use crate::staging;

mod accesses;

/// Prefix of the name of a vote's directory.
const VOTE_PREFIX: &str = "vote-";
const VERDICT: &str = "verdict";

/// The verdict of a vote: whether the hosts' parts can be committed together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No two hosts conflict; the transaction may be committed.
    Clear,
    /// Accesses of two hosts or more conflict, as the report says; the transaction cannot be committed as it is.
    Conflict(ConflictReport),
    /// A host ended the vote without a commit, because a host did not vote or withdrew.
    GivenUp {
        /// Name of the host that ended the vote.
        by: String,
        /// The reason, as a text for people. Stored under the name `why`.
        #[serde(rename = "why")]
        reason: String,
    },
}

/// What a host wants to decide for all hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proposal {
    Commit,
    Abort,
}

impl Proposal {
    /// Returns the proposal as the decision of `host`.
    pub(crate) fn into_decision(self, host: &str) -> JointDecision {
        JointDecision {
            commit: self == Self::Commit,
            host: host.to_owned(),
        }
    }
}

/// The decision on a transaction of several hosts, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JointDecision {
    /// Whether the transaction is committed; otherwise it is aborted.
    pub(crate) commit: bool,
    /// Name of the host that decided. Stored under the name `by`.
    #[serde(rename = "by")]
    pub(crate) host: String,
}

/// Reason of a given-up vote: the host aborted its part before the vote was over.
const ABORTED_PART: &str = "it aborted its part";
/// Reason of a given-up vote: the host aborted the transaction that the hosts share.
const ABORTED_TRANSACTION: &str = "it aborted the transaction";

impl JointDecision {
    /// Returns the state of a vote that this decision to abort has ended.
    fn aborted_vote(self, reason: &str) -> Vote {
        Vote::Over(Verdict::GivenUp {
            by: self.host,
            reason: reason.to_owned(),
        })
    }
}

/// The state of a vote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vote {
    /// Some hosts have not published their lists.
    Waiting {
        /// Names of the hosts that have published their lists.
        published: Vec<String>,
        /// Number of hosts that take part.
        expected: usize,
        /// Names of the other hosts, as far as they are known.
        missing: Vec<String>,
    },
    /// The vote has a verdict: all hosts have published their lists, or a host gave the vote up.
    Over(Verdict),
}

/// Returns the name of the directory of the vote on commit `id` of a scope.
fn vote_name(id: u64, scope: &[u8]) -> String {
    scoped_name(&format!("{VOTE_PREFIX}{id}"), scope)
}

/// Returns the commit number in the name of the directory of a vote on `scope`; `None` for any other name.
fn parse_vote_id(name: &[u8], scope: &[u8]) -> Option<u64> {
    let name = std::str::from_utf8(name).ok()?;
    let id = name
        .strip_prefix(VOTE_PREFIX)?
        .split('-')
        .next()?
        .parse()
        .ok()?;
    (vote_name(id, scope) == name).then_some(id)
}

/// Returns `name` with a checksum of the scope's path appended; the top of the backing adds nothing.
pub(crate) fn scoped_name(name: &str, scope: &[u8]) -> String {
    match scope {
        b"" => name.into(),
        scope => format!("{name}-{:08x}{:x}", crc32c::crc32c(scope), scope.len()),
    }
}

/// The protocol of a vote's end: after the decision each host acts alone, so there are no shared units of work.
struct VoteEnd;

impl Protocol for VoteEnd {
    type Decision = JointDecision;

    fn plan(&self, _outcome: &JointDecision) -> Plan {
        Plan::default()
    }
}

/// One vote, in its directory below `.firn/`.
struct VoteBallot<'a, B: Backing> {
    ballot: Ballot<'a, B, VoteEnd>,
}

impl<'a, B: Backing> VoteBallot<'a, B> {
    fn in_dir(dir: VoteDir<'a, B>) -> Self {
        Self {
            ballot: Ballot::in_dir(dir, VoteEnd),
        }
    }

    /// Reads the verdict; `None` if there is none yet.
    fn verdict(&self) -> Result<Option<Verdict>, Errno> {
        self.ballot.dir().read_json(VERDICT)
    }

    /// Stores `verdict` unless there is one already, and returns the verdict that counts.
    fn store_verdict(&self, verdict: &Verdict) -> Result<Option<Verdict>, Errno> {
        self.ballot.dir().put_json(VERDICT, verdict)?;
        self.verdict()
    }

    /// Returns whether there is a verdict that rules a commit out.
    fn is_refused(&self) -> Result<bool, Errno> {
        Ok(!matches!(self.verdict()?, None | Some(Verdict::Clear)))
    }

    /// Returns whether the outcome of the vote is known: a commit is ruled out, or there is a decision.
    fn is_decided(&self) -> Result<bool, Errno> {
        Ok(self.is_refused()? || self.ballot.decision()?.is_some())
    }

    /// Stores this host's proposal as the decision unless there is a decision already, and returns the decision that
    /// counts. Returns `None` if another host has removed the vote.
    fn decide(&self, proposal: Proposal) -> Result<Option<JointDecision>, Errno> {
        let host = self.ballot.dir().host();
        self.ballot.decide(&proposal.into_decision(host))
    }

    /// Records that this host has carried the decision out. The last host removes the directory.
    fn leave(&self) -> Result<(), Errno> {
        self.decide_abort_if_refused()?;
        self.ballot.leave()
    }

    /// Removes the directory if all hosts have left the vote.
    fn remove_if_over(&self) -> Result<(), Errno> {
        match self.decide_abort_if_refused() {
            // Another host has removed the directory.
            Err(Errno::NOENT | Errno::STALE) => return Ok(()),
            decided => decided?,
        }
        self.ballot.remove_if_over()
    }

    /// Stores the decision to abort if the verdict rules a commit out.
    fn decide_abort_if_refused(&self) -> Result<(), Errno> {
        if self.is_refused()? {
            self.decide(Proposal::Abort)?;
        }
        Ok(())
    }
}

impl<B: Backing> LowerBacking<B> {
    /// Returns this host's name among the members; empty on a mount of one host.
    fn host_name(&self) -> String {
        self.members
            .as_ref()
            .map_or_else(String::new, |members| members.host.clone())
    }
}

/// Votes of several hosts on commits.
pub struct Votes<B: Backing> {
    pub(crate) lower: Arc<LowerBacking<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
    /// Serializes two acts on a vote: leaving it, and deciding it from a thread that has not quiesced the scope.
    /// Otherwise that thread could create the vote's directory anew after the last host has left, and no host would
    /// ever remove it. A thread acquires this claim after all others.
    pub(crate) leaving_claim: Claim,
}

impl<B: Backing> Votes<B> {
    pub(crate) fn new(
        lower: &Arc<LowerBacking<B>>,
        tree: &Arc<Tree<B>>,
        scopes: &Arc<Scopes<B>>,
        shared: &Arc<SharedTransactions<B>>,
    ) -> Self {
        Self {
            lower: Arc::clone(lower),
            tree: Arc::clone(tree),
            scopes: Arc::clone(scopes),
            shared: Arc::clone(shared),
            leaving_claim: Claim::default(),
        }
    }

    /// Returns the vote on commit `id` of a scope; `None` if it has no directory or the mount has no members.
    fn find_vote(&self, id: u64, scope: &[u8]) -> Result<Option<VoteBallot<'_, B>>, Errno> {
        let Some(members) = &self.lower.members else {
            return Ok(None);
        };
        let Some(firn_dir) = self.lower.find_firn_dir()? else {
            return Ok(None);
        };
        let name = vote_name(id, scope);
        let vote_dir = VoteDir::find(&self.lower.base, &firn_dir, &name, &members.host)?;
        Ok(vote_dir.map(VoteBallot::in_dir))
    }

    /// Returns the vote on commit `id` of a scope, and creates its directory if there is none.
    fn make_vote<'a>(
        &'a self,
        members: &'a Members,
        id: u64,
        scope: &[u8],
    ) -> Result<VoteBallot<'a, B>, Errno> {
        let base = &self.lower.base;
        let firn_dir = staging::make_dir(base, &base.root(), staging::FIRN_DIR)?;
        let name = vote_name(id, scope);
        let vote_dir = VoteDir::make(base, &firn_dir, &name, &members.host)?;
        Ok(VoteBallot::in_dir(vote_dir))
    }

    /// Publishes what this host's programs read and changed in a transaction, so that all hosts can vote on its commit
    /// `id`; see [`Prepared::publish_accesses`](crate::Prepared::publish_accesses). The transaction `scope` is
    /// prepared: its changes are durable in a record. Does nothing on a mount of one host.
    ///
    /// Returns `LastVoteNotOver` while an earlier vote of the same number is being removed; the caller may then try
    /// again. If this host no longer knows what its programs read, it ends the vote for all hosts without a commit.
    pub(crate) fn publish_accesses(&self, scope: &Scope<B>, id: u64) -> Result<(), VoteError> {
        let Some(members) = &self.lower.members else {
            return Ok(());
        };
        // A missing file or directory means that another host is removing an earlier vote of the same number.
        let not_over = |errno| match errno {
            Errno::NOENT | Errno::STALE => VoteError::LastVoteNotOver { id },
            errno => VoteError::from(errno),
        };
        let vote = self.make_vote(members, id, &scope.path).map_err(not_over)?;
        let view = vote.ballot.view().map_err(not_over)?;
        // A vote that this host has left is an earlier one of the same number.
        if view.left.contains(&members.host) {
            vote.remove_if_over()?;
            return Err(VoteError::LastVoteNotOver { id });
        }
        if view.joined.contains(&members.host) {
            return Ok(());
        }
        let Some(accesses) = self.accesses_to_publish(scope)? else {
            let reason =
                "its firnd was restarted and has lost the record of what its programs read";
            return self.give_vote_up(id, &scope.path, reason.to_owned());
        };
        let record = self.load_prepared_record(scope, id)?;
        let list = self.list_accesses(members, &record, &accesses)?;
        match vote.ballot.join(&list.encode()).map_err(not_over)? {
            Joined::Yes => Ok(()),
            // The vote has ended and its directory still exists, so its verdict or decision gives the reason.
            Joined::Over if vote.ballot.dir().is_current()? => Ok(()),
            Joined::Over => Err(VoteError::LastVoteNotOver { id }),
        }
    }

    /// Loads the change log of a prepared transaction. Fails with `NotVoted` if it is not prepared; `id` is the number
    /// for this error.
    fn load_prepared_record(&self, scope: &Scope<B>, id: u64) -> Result<ChangeLog, VoteError> {
        let dir_name = format!("tx-{}", scope.serial);
        self.lower
            .load_record(&scope.dir, &dir_name, staging::RECORD)?
            .ok_or(VoteError::NotVoted { id })
    }

    /// Returns the recorded accesses of this host's programs. Returns `None` if this firnd did not record them.
    fn accesses_to_publish(
        &self,
        scope: &Scope<B>,
    ) -> Result<Option<Vec<AccessedFile>>, VoteError> {
        let recorded = scope.recorded_accesses.lock().clone();
        if recorded.is_some() {
            return Ok(recorded);
        }
        // In shadow mode conflicts are not tested, so an empty list is enough.
        let is_shared = self.shared.find_shared(&scope.path)?.is_some();
        Ok(is_shared.then(Vec::new))
    }

    /// Returns the state of the vote on commit `id`. Does not wait.
    ///
    /// If all hosts have published and there is no verdict, this call tests the lists and stores the verdict. Fails
    /// with `NotVoted` if there is no vote. A mount of one host always gets a clear verdict.
    pub fn poll_vote(&self, id: u64, scope: &[u8]) -> Result<Vote, VoteError> {
        let Some(members) = &self.lower.members else {
            return Ok(Vote::Over(Verdict::Clear));
        };
        let Some(vote) = self.find_vote(id, scope)? else {
            return Err(VoteError::NotVoted { id });
        };
        // A verdict against the commit is final. A clear one counts only if no host has aborted since, so it comes
        // after the decisions.
        if let Some(verdict @ (Verdict::Conflict(_) | Verdict::GivenUp { .. })) = vote.verdict()? {
            return Ok(Vote::Over(verdict));
        }
        if let Some(decision) = vote.ballot.decision()?
            && !decision.commit
        {
            return Ok(decision.aborted_vote(ABORTED_PART));
        }
        // An abort of the shared transaction counts even if this vote does not record it.
        let shared = self.shared.find_shared(scope)?;
        let shared_decision = match &shared {
            Some(shared) => shared.decision()?,
            None => None,
        };
        if let Some(decision) = shared_decision
            && !decision.commit
        {
            return Ok(decision.aborted_vote(ABORTED_TRANSACTION));
        }
        if let Some(verdict) = vote.verdict()? {
            return Ok(Vote::Over(verdict));
        }
        let published = vote.ballot.joined()?;
        // In shadow mode, every host that joined the shared transaction may have changed the backing. So each of them
        // must vote.
        let joined_shared = match &shared {
            Some(shared) => shared.joined_hosts()?,
            None => Vec::new(),
        };
        let verdict = match members.check_joined(&published, &joined_shared) {
            MemberCheck::Incomplete { expected, missing } => {
                return Ok(Vote::Waiting {
                    published,
                    expected,
                    missing,
                });
            }
            MemberCheck::TooMany { expected } => Verdict::GivenUp {
                by: members.host.clone(),
                reason: format!(
                    "{} hosts took part ({}), but {expected} are expected",
                    published.len(),
                    published.join(", ")
                ),
            },
            MemberCheck::Complete => test_lists(&vote, &published)?,
        };
        // Another host may have stored a verdict first; that one counts.
        match vote.store_verdict(&verdict)? {
            Some(verdict) => Ok(Vote::Over(verdict)),
            None => Err(VoteError::NotVoted { id }),
        }
    }

    /// Ends a vote for all hosts without a commit. Does nothing if there is a verdict, a decision or no vote. `reason`
    /// is a text for people.
    pub fn give_vote_up(&self, id: u64, scope: &[u8], reason: String) -> Result<(), VoteError> {
        let Some(vote) = self.find_vote(id, scope)? else {
            return Ok(());
        };
        // With a decision the outcome is known already, so a verdict would add nothing.
        if vote.ballot.decision()?.is_some() {
            return Ok(());
        }
        let by = vote.ballot.dir().host().to_owned();
        vote.store_verdict(&Verdict::GivenUp { by, reason })?;
        Ok(())
    }

    /// Decides the abort for all hosts.
    ///
    /// Fails with [`StageError::Decided`] if the commit is decided. Does nothing if this host's part is no longer
    /// prepared, because another thread has ended it.
    pub fn call_commit_off(&self, id: u64, scope: &[u8]) -> Result<(), VoteError> {
        // Otherwise a vote that the last host has just left could be created anew, and would remain.
        let _leaving_claim = Claim::acquire_exclusive(&self.leaving_claim);
        let is_prepared = |candidate: &Scope<B>| {
            candidate.path == scope && candidate.stage() == Stage::Prepared(id)
        };
        if self.scopes.find(is_prepared).is_none() {
            return Ok(());
        }
        self.decide_vote(id, scope, Proposal::Abort)
    }

    /// Decides a commit or an abort of a transaction for all hosts, if there is no decision yet. `scope` is the path of
    /// the transaction's directory. Does nothing on a mount of one host.
    ///
    /// Returns `Ok` if the hosts have decided as `proposal` says, now or before, and otherwise an error that says what
    /// was decided. A commit needs a clear verdict: without one it fails with `NotVoted`, or with the conflict or the
    /// reason in the verdict.
    pub(crate) fn decide_vote(
        &self,
        id: u64,
        scope: &[u8],
        proposal: Proposal,
    ) -> Result<(), VoteError> {
        let Some(members) = &self.lower.members else {
            return Ok(());
        };
        let vote = match proposal {
            Proposal::Commit => self
                .find_vote(id, scope)?
                .ok_or(VoteError::NotVoted { id })?,
            // The vote is created if it does not exist, so that a host that joins later sees the abort.
            Proposal::Abort => self.make_vote(members, id, scope)?,
        };
        match (proposal, vote.verdict()?) {
            (Proposal::Commit, None) => return Err(VoteError::NotVoted { id }),
            (Proposal::Commit, Some(verdict)) => verdict.into_result()?,
            // The verdict rules the commit out already, so no decision is needed.
            (Proposal::Abort, Some(Verdict::Conflict(_) | Verdict::GivenUp { .. })) => {
                return Ok(());
            }
            (Proposal::Abort, Some(Verdict::Clear) | None) => {}
        }
        // In shadow mode the decision in the shared transaction's directory comes first, because a host that has not
        // joined this vote may abort there.
        if let Some(shared) = self.shared.find_shared(scope)? {
            let decision = shared.decide(proposal)?;
            check_decision(decision, proposal, id, ABORTED_TRANSACTION)?;
        }
        let decision = vote.decide(proposal)?.ok_or(VoteError::NotVoted { id })?;
        check_decision(decision, proposal, id, ABORTED_PART)
    }

    /// Returns the decision on a transaction that this host has prepared: `true` for a commit, `None` for none yet.
    pub(crate) fn find_decision(&self, id: u64, scope: &[u8]) -> Result<Option<bool>, Errno> {
        let Some(vote) = self.find_vote(id, scope)? else {
            return Ok(None);
        };
        // After a conflict a host may reopen its part, so the part does not count as aborted.
        if vote.is_refused()? {
            return Ok(None);
        }
        Ok(vote.ballot.decision()?.map(|outcome| outcome.commit))
    }

    /// Records that this host has applied the decision.
    pub(crate) fn leave_vote(&self, id: u64, scope: &[u8]) -> Result<(), Errno> {
        let _leaving_claim = Claim::acquire_exclusive(&self.leaving_claim);
        match self.find_vote(id, scope)? {
            Some(vote) => vote.leave(),
            None => Ok(()),
        }
    }

    /// Aborts each undecided vote on a scope in which this host has not published its list. Other hosts then do not
    /// wait for it.
    ///
    /// Called before an unprepared transaction ends.
    pub(crate) fn withdraw_from_votes(&self, scope: &[u8]) -> Result<(), VoteError> {
        for id in self.votes_on(scope)? {
            let Some(vote) = self.find_vote(id, scope)? else {
                continue;
            };
            let has_published = vote.ballot.joined()?.contains(&self.lower.host_name());
            if !has_published && !vote.is_decided()? {
                self.decide_vote(id, scope, Proposal::Abort)?;
            }
        }
        Ok(())
    }

    /// After a crash, leaves the votes (on commits of several hosts, in the backing) in which this host has nothing
    /// left to do. Removes votes that are over.
    ///
    /// `waiting` has the number and path of each transaction that this host still has; their votes remain.
    pub(crate) fn leave_old_votes(&self, waiting: &[(u64, Vec<u8>)]) -> Result<(), Errno> {
        let Some(members) = &self.lower.members else {
            return Ok(());
        };
        let Some(firn_dir) = self.lower.find_firn_dir()? else {
            return Ok(());
        };
        let waiting_names: Vec<String> = waiting
            .iter()
            .map(|(id, scope)| vote_name(*id, scope))
            .collect();
        for (name, ..) in staging::list(&self.lower.base, &firn_dir)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if !name.starts_with(VOTE_PREFIX) || waiting_names.contains(&name) {
                continue;
            }
            let found = VoteDir::find(&self.lower.base, &firn_dir, &name, &members.host)?;
            let Some(vote_dir) = found else {
                continue;
            };
            let vote = VoteBallot::in_dir(vote_dir);
            // The other hosts wait until this host has left a decided vote.
            if vote.ballot.is_taking_part()? && vote.is_decided()? {
                vote.leave()?;
            } else {
                vote.remove_if_over()?;
            }
        }
        Ok(())
    }

    /// Returns the names of the hosts that have not applied commit `id`. Empty if the vote is over and removed.
    pub fn hosts_not_applied(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, Errno> {
        let Some(vote) = self.find_vote(id, scope)? else {
            return Ok(Vec::new());
        };
        match vote.ballot.view() {
            // The last host has removed the vote since the look-up.
            Err(Errno::NOENT | Errno::STALE) => Ok(Vec::new()),
            view => Ok(view?.remaining()),
        }
    }

    /// Returns the commit numbers of all votes on a scope.
    fn votes_on(&self, scope: &[u8]) -> Result<Vec<u64>, Errno> {
        if self.lower.members.is_none() {
            return Ok(Vec::new());
        }
        let Some(firn_dir) = self.lower.find_firn_dir()? else {
            return Ok(Vec::new());
        };
        let listed = staging::list(&self.lower.base, &firn_dir)?;
        Ok(listed
            .iter()
            .filter_map(|(name, ..)| parse_vote_id(name, scope))
            .collect())
    }

    /// Makes a prepared transaction open again, so that programs can change it. Leaves its vote, and returns the
    /// accesses of programs that were recorded for the vote; see [`Prepared::reopen`](crate::Prepared::reopen). Returns
    /// none if the transaction is open already.
    ///
    /// Fails if the transaction has another number, is over, or was prepared by an earlier firnd.
    pub(crate) fn reopen(&self, scope: &Scope<B>, id: u64) -> Result<Vec<AccessedFile>, VoteError> {
        // No other thread commits or aborts the transaction meanwhile.
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        match scope.stage() {
            Stage::Prepared(found) if found == id => {}
            Stage::Prepared(found) | Stage::Decided(found) => {
                return Err(StageError::OtherId { found, wanted: id }.into());
            }
            Stage::Open => return Ok(Vec::new()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        // After a restart, only the record has the changes, and an open transaction does not read the record.
        if scope.recovered.is_some() {
            return Err(VoteError::GivenUp {
                by: self.lower.host_name(),
                reason: "its firnd was restarted".into(),
            });
        }
        self.end_vote_before_reopen(scope, id)?;
        self.lower
            .base
            .unlink(&scope.dir, OsStr::new(staging::RECORD))?;
        self.lower.base.sync_dir(&scope.dir)?;
        scope.set_stage(Stage::Open);
        self.leave_vote(id, &scope.path)?;
        Ok(scope.recorded_accesses.lock().take().unwrap_or_default())
    }

    /// Ends the vote on a prepared transaction for all hosts, without a commit, so that this host can open it again for
    /// changes. Only a transaction of several hosts in shadow mode (changes are made at once) needs this.
    ///
    /// Fails with `Decided` if the hosts have agreed already and none has aborted: they may commit at any time, so no
    /// host may change anything.
    fn end_vote_before_reopen(&self, scope: &Scope<B>, id: u64) -> Result<(), VoteError> {
        if self.shared.find_shared(&scope.path)?.is_none() {
            return Ok(());
        }
        let Some(vote) = self.find_vote(id, &scope.path)? else {
            return Ok(());
        };
        let by = self.lower.host_name();
        let reason = "the commit failed on that host".to_owned();
        let verdict = vote.store_verdict(&Verdict::GivenUp { by, reason })?;
        let decision = vote.ballot.decision()?;
        let is_aborted = decision.is_some_and(|decision| !decision.commit);
        if verdict == Some(Verdict::Clear) && !is_aborted {
            return Err(StageError::Decided { id }.into());
        }
        Ok(())
    }

    /// Returns the names of the hosts that have published their lists; empty if there is no vote.
    pub fn hosts_published(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, Errno> {
        match self.find_vote(id, scope)? {
            Some(vote) => vote.ballot.joined(),
            None => Ok(Vec::new()),
        }
    }

    /// Stores the decision to commit for all hosts, for `TransactionalBacking::decide_scope`.
    ///
    /// With several hosts, fails unless the transaction is prepared and the verdict is clear.
    pub(crate) fn decide_commit_with_hosts(
        &self,
        scope: &Scope<B>,
        stage: Stage,
        id: u64,
    ) -> Result<(), VoteError> {
        match stage {
            Stage::Open if self.lower.members.is_some() => Err(VoteError::NotVoted { id }),
            Stage::Prepared(_) => self.decide_vote(id, &scope.path, Proposal::Commit),
            _ => Ok(()),
        }
    }
}

/// Tests the lists of all hosts for conflicts and returns the verdict. Fails if a list cannot be decoded.
fn test_lists<B: Backing>(
    vote: &VoteBallot<'_, B>,
    hosts: &[String],
) -> Result<Verdict, VoteError> {
    let mut lists = Vec::new();
    for host in hosts {
        let bytes = vote.ballot.brought_by(host)?.unwrap_or_default();
        let list = AccessList::decode(&bytes).map_err(|source| VoteError::AccessList {
            host: host.clone(),
            source,
        })?;
        lists.push(list);
    }
    Ok(Verdict::from_report(find_conflicts(&lists)))
}

/// Returns an error unless the decision is the proposal. `reason` is the text that is reported for an abort.
fn check_decision(
    decision: JointDecision,
    proposal: Proposal,
    id: u64,
    reason: &str,
) -> Result<(), VoteError> {
    match (decision.commit, proposal) {
        (true, Proposal::Commit) | (false, Proposal::Abort) => Ok(()),
        (true, Proposal::Abort) => Err(StageError::Decided { id }.into()),
        (false, Proposal::Commit) => Err(VoteError::GivenUp {
            by: decision.host,
            reason: reason.into(),
        }),
    }
}

impl Verdict {
    /// Returns the verdict of a test of all lists, which found these conflicts.
    pub(crate) fn from_report(report: ConflictReport) -> Self {
        if report.total == 0 {
            Self::Clear
        } else {
            Self::Conflict(report)
        }
    }

    /// Returns `Ok` if the verdict is clear, and an error with the conflict or the reason otherwise.
    pub fn into_result(self) -> Result<(), VoteError> {
        match self {
            Self::Clear => Ok(()),
            Self::Conflict(report) => Err(VoteError::Conflict(Box::new(report))),
            Self::GivenUp { by, reason } => Err(VoteError::GivenUp { by, reason }),
        }
    }
}
