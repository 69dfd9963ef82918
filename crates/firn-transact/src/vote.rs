//! How the hosts of a transaction vote on its commit.
//!
//! Each host has its transactions in a staging directory of its own. To commit, every host prepares its part and
//! publishes what it read and wrote. Once all lists are published, each host tests them, and the first one to finish puts
//! the verdict. After a verdict of no conflict any host may decide for all; then each host applies its part, after a crash
//! too, and records that it did.
//!
//! ```text
//! .firn/vote-ID[-SCOPE]/     one vote, a [`Ballot`]; SCOPE stands for the path of the scope
//!   in-HOST                  what a host read and wrote: `crate::conflict::Published`
//!   verdict                  JSON: whether that goes together; put once
//!   decision                 JSON: commit or abort, and which host said so
//!   left-HOST                the host has applied the decision
//! ```
//!
//! Invariants, beside those of a ballot
//! * No decision is a commit without a verdict of no conflict, and no host applies a commit before it is decided.
//! * A verdict other than that comes to the decision of an abort when the first host leaves. A host may open its part again
//!   before that and after it; it leaves only then.

use std::ffi::OsStr;
use std::sync::Arc;

use crate::conflict::{Published, Report, Used};
use crate::scopes::Scopes;
use crate::shadow::shared::SharedTransactions;
use crate::tree::Tree;
use firn_backing::{Backing, Errno};
use firn_hosts::{Attendance, Ballot, Joined, Members, Plan, Protocol, VoteDir};
use serde::{Deserialize, Serialize};

use crate::claim::Claim;
use crate::error::{StageError, VoteError};
use crate::scope::{Scope, Stage};
use crate::staging;
use crate::staging_dir::Home;

mod accesses;

/// Before the name of the directory of a vote.
const VOTE: &str = "vote-";
const VERDICT: &str = "verdict";

/// Result of the votes of all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// No two hosts conflict.
    Clear,
    /// Accesses of hosts conflict.
    Conflict(Report),
    /// Not all hosts voted, or one withdrew.
    GivenUp {
        /// The host that said so.
        by: String,
        /// The reason that it gave.
        why: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    pub(crate) commit: bool,
    pub(crate) by: String,
}

/// How far a vote is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vote {
    /// Some hosts have not published what they used.
    Waiting {
        /// Hosts that have published.
        published: Vec<String>,
        /// Number of hosts that take part.
        expected: usize,
        /// The names of the others, where they are known.
        missing: Vec<String>,
    },
    /// All have published, or a host gave the vote up.
    Over(Verdict),
}

/// The name of the directory of the vote on transaction `id` of a scope.
fn vote_name(id: u64, scope: &[u8]) -> String {
    scoped_name(&format!("{VOTE}{id}"), scope)
}

/// A name that stands for a scope.
pub(crate) fn scoped_name(name: &str, scope: &[u8]) -> String {
    match scope {
        b"" => name.into(),
        scope => format!("{name}-{:08x}{:x}", crc32c::crc32c(scope), scope.len()),
    }
}

/// How a vote ends: each host carries the decision out by itself.
struct VoteEnd;

impl Protocol for VoteEnd {
    type Decision = Outcome;

    fn plan(&self, _outcome: &Outcome) -> Plan {
        Plan::default()
    }
}

/// The directory of one vote.
struct VoteBallot<'a, B: Backing> {
    ballot: Ballot<'a, B, VoteEnd>,
}

impl<'a, B: Backing> VoteBallot<'a, B> {
    fn in_dir(dir: VoteDir<'a, B>) -> Self {
        Self {
            ballot: Ballot::in_dir(dir, VoteEnd),
        }
    }

    fn verdict(&self) -> Result<Option<Verdict>, Errno> {
        self.ballot.dir().read_json(VERDICT)
    }

    /// The verdict, which is this one if there is none.
    fn judge(&self, verdict: &Verdict) -> Result<Option<Verdict>, Errno> {
        self.ballot.dir().put_json(VERDICT, verdict)?;
        self.verdict()
    }

    fn is_refused(&self) -> Result<bool, Errno> {
        Ok(!matches!(self.verdict()?, None | Some(Verdict::Clear)))
    }

    /// Whether there is nothing left to be found out or decided.
    fn is_decided(&self) -> Result<bool, Errno> {
        Ok(self.is_refused()? || self.ballot.decision()?.is_some())
    }

    /// The decision, which is this one if there is none. None if another host has removed the vote.
    fn settle(&self, commit: bool) -> Result<Option<Outcome>, Errno> {
        let by = self.ballot.dir().host().to_owned();
        self.ballot.decide(&Outcome { commit, by })
    }

    /// Records that this host has done its part. The last host removes the directory.
    fn leave(&self) -> Result<(), Errno> {
        self.settle_refused()?;
        self.ballot.leave()
    }

    fn remove_if_over(&self) -> Result<(), Errno> {
        match self.settle_refused() {
            // Another host has removed it.
            Err(Errno::NOENT | Errno::STALE) => return Ok(()),
            settled => settled?,
        }
        self.ballot.remove_if_over()
    }

    /// After a verdict that is not clear there is no commit.
    fn settle_refused(&self) -> Result<(), Errno> {
        if self.is_refused()? {
            self.settle(false)?;
        }
        Ok(())
    }
}

impl<B: Backing> Home<B> {
    fn host_name(&self) -> String {
        self.members
            .as_ref()
            .map_or_else(String::new, |members| members.host.clone())
    }
}

/// Votes of several hosts on commits.
pub struct Votes<B: Backing> {
    pub(crate) home: Arc<Home<B>>,
    pub(crate) tree: Arc<Tree<B>>,
    pub(crate) scopes: Arc<Scopes<B>>,
    pub(crate) shared: Arc<SharedTransactions<B>>,
    /// Serialises leaving a vote with writes to it that are made without the lock of the names. Otherwise a vote that
    /// is made anew after the last host has left would never be removed. Innermost claim.
    pub(crate) leaving: Claim,
}

impl<B: Backing> Votes<B> {
    pub(crate) fn new(
        home: &Arc<Home<B>>,
        tree: &Arc<Tree<B>>,
        scopes: &Arc<Scopes<B>>,
        shared: &Arc<SharedTransactions<B>>,
    ) -> Self {
        Self {
            home: Arc::clone(home),
            tree: Arc::clone(tree),
            scopes: Arc::clone(scopes),
            shared: Arc::clone(shared),
            leaving: Claim::default(),
        }
    }

    fn find_vote(&self, id: u64, scope: &[u8]) -> Result<Option<VoteBallot<'_, B>>, Errno> {
        let Some(members) = &self.home.members else {
            return Ok(None);
        };
        let Some(top) = self.home.find_top()? else {
            return Ok(None);
        };
        let name = vote_name(id, scope);
        let found = VoteDir::find(&self.home.base, &top, &name, &members.host)?;
        Ok(found.map(VoteBallot::in_dir))
    }

    fn make_vote<'a>(
        &'a self,
        members: &'a Members,
        id: u64,
        scope: &[u8],
    ) -> Result<VoteBallot<'a, B>, Errno> {
        let top = staging::dir(&self.home.base, &self.home.base.root(), staging::TOP)?;
        let name = vote_name(id, scope);
        let made = VoteDir::make(&self.home.base, &top, &name, &members.host)?;
        Ok(VoteBallot::in_dir(made))
    }

    /// [`Prepared::publish_accesses`](crate::Prepared::publish_accesses).
    pub(crate) fn publish_accesses(&self, scope: &Scope<B>, id: u64) -> Result<(), VoteError> {
        let Some(members) = &self.home.members else {
            return Ok(());
        };
        // Another host may be removing the rest of an earlier vote.
        let not_over = |errno| match errno {
            Errno::NOENT | Errno::STALE => VoteError::LastVoteNotOver { id },
            errno => VoteError::from(errno),
        };
        let vote = self.make_vote(members, id, &scope.path);
        let vote = vote.map_err(not_over)?;
        let view = vote.ballot.view().map_err(not_over)?;
        if view.left.contains(&members.host) {
            vote.remove_if_over()?;
            return Err(VoteError::LastVoteNotOver { id });
        }
        if view.joined.contains(&members.host) {
            return Ok(());
        }
        let known = scope.used.lock().clone();
        let used = match known {
            Some(used) => used,
            // Nothing is tested in shadow mode.
            None if self.shared.find_shared(&scope.path)?.is_some() => Vec::new(),
            None => {
                let why = "its firnd was restarted before it had told what its programs read";
                return self.give_vote_up(id, &scope.path, why.to_owned());
            }
        };
        let tx = format!("tx-{}", scope.serial);
        let record = self
            .home
            .load_record(&scope.dir, &tx, staging::RECORD)?
            .ok_or(VoteError::NotVoted { id })?;
        let list = self.list_accesses(members, &record, &used)?;
        match vote.ballot.join(&list.encode()).map_err(not_over)? {
            Joined::Yes => Ok(()),
            // Another host has given it up: the verdict or the decision says so.
            Joined::Over if vote.ballot.dir().is_current()? => Ok(()),
            Joined::Over => Err(VoteError::LastVoteNotOver { id }),
        }
    }

    /// Looks whether all hosts have published, and finds the verdict if they have.
    pub fn poll_vote(&self, id: u64, scope: &[u8]) -> Result<Vote, VoteError> {
        let Some(members) = &self.home.members else {
            return Ok(Vote::Over(Verdict::Clear));
        };
        let Some(vote) = self.find_vote(id, scope)? else {
            return Err(VoteError::NotVoted { id });
        };
        if let Some(verdict @ (Verdict::Conflict(_) | Verdict::GivenUp { .. })) = vote.verdict()? {
            return Ok(Vote::Over(verdict));
        }
        if let Some(Outcome { commit: false, by }) = vote.ballot.decision()? {
            let why = "it aborted its part".to_owned();
            return Ok(Vote::Over(Verdict::GivenUp { by, why }));
        }
        let shared = self.shared.find_shared(scope)?;
        let shared_outcome = match &shared {
            Some(shared) => shared.outcome()?,
            None => None,
        };
        if let Some(Outcome { commit: false, by }) = shared_outcome {
            let why = "it aborted the transaction".to_owned();
            return Ok(Vote::Over(Verdict::GivenUp { by, why }));
        }
        if let Some(verdict) = vote.verdict()? {
            return Ok(Vote::Over(verdict));
        }
        let published = vote.ballot.joined()?;
        // In shadow mode all hosts that changed something must be prepared.
        let joined = match &shared {
            Some(shared) => shared.joined()?,
            None => Vec::new(),
        };
        let verdict = match members.attendance(&published, &joined) {
            Attendance::Incomplete { expected, missing } => {
                return Ok(Vote::Waiting {
                    published,
                    expected,
                    missing,
                });
            }
            Attendance::TooMany { expected } => Verdict::GivenUp {
                by: members.host.clone(),
                why: format!(
                    "{} hosts came, {}, where {expected} take part",
                    published.len(),
                    published.join(", ")
                ),
            },
            Attendance::Complete => test_lists(&vote, &published)?,
        };
        // The verdict of the first host counts.
        vote.judge(&verdict)?
            .map(Vote::Over)
            .ok_or(VoteError::NotVoted { id })
    }

    /// Puts an end to a vote that has no verdict yet.
    pub fn give_vote_up(&self, id: u64, scope: &[u8], why: String) -> Result<(), VoteError> {
        let Some(vote) = self.find_vote(id, scope)? else {
            return Ok(());
        };
        // An abort says the same already.
        if vote.ballot.decision()?.is_some() {
            return Ok(());
        }
        let by = vote.ballot.dir().host().to_owned();
        vote.judge(&Verdict::GivenUp { by, why })?;
        Ok(())
    }

    /// Decides for all hosts that there is no commit; fails with [`StageError::Decided`] where there is one. Does
    /// nothing if another thread has ended this host's prepared part.
    pub fn call_commit_off(&self, id: u64, scope: &[u8]) -> Result<(), VoteError> {
        let _stays = Claim::own(&self.leaving);
        let is_prepared = |one: &Scope<B>| one.path == scope && one.stage() == Stage::Prepared(id);
        if self.scopes.paths_where(is_prepared).is_empty() {
            Ok(())
        } else {
            self.decide_vote(id, scope, false)
        }
    }

    /// Decides for all hosts, if there is no decision yet: whether the outcome is the wanted one. A commit needs a
    /// verdict of no conflict.
    pub(crate) fn decide_vote(&self, id: u64, scope: &[u8], commit: bool) -> Result<(), VoteError> {
        let Some(members) = &self.home.members else {
            return Ok(());
        };
        let vote = if commit {
            self.find_vote(id, scope)?
                .ok_or(VoteError::NotVoted { id })?
        } else {
            // A host that comes to the vote later must find that it is over.
            self.make_vote(members, id, scope)?
        };
        match (vote.verdict()?, commit) {
            (None, true) => return Err(VoteError::NotVoted { id }),
            (Some(verdict @ (Verdict::Conflict(_) | Verdict::GivenUp { .. })), true) => {
                return Err(refused(verdict));
            }
            (Some(Verdict::Conflict(_) | Verdict::GivenUp { .. }), false) => return Ok(()),
            (Some(Verdict::Clear), _) | (None, false) => {}
        }
        // The outcome that counts is beside the saved objects: a host that has not come to this vote may abort.
        if let Some(shared) = self.shared.find_shared(scope)? {
            must_be(
                shared.settle(commit)?,
                commit,
                id,
                "it aborted the transaction",
            )?;
        }
        let outcome = vote.settle(commit)?.ok_or(VoteError::NotVoted { id })?;
        must_be(outcome, commit, id, "it aborted its part")
    }

    /// Decision about a transaction that this host had prepared; `None`: none yet.
    pub(crate) fn find_decision(&self, id: u64, scope: &[u8]) -> Result<Option<bool>, Errno> {
        let Some(vote) = self.find_vote(id, scope)? else {
            return Ok(None);
        };
        // After a conflict a host may open its part again: it is not aborted.
        if vote.is_refused()? {
            return Ok(None);
        }
        Ok(vote.ballot.decision()?.map(|outcome| outcome.commit))
    }

    /// Records that this host has applied the decision.
    pub(crate) fn leave_vote(&self, id: u64, scope: &[u8]) -> Result<(), Errno> {
        let _leaving = Claim::own(&self.leaving);
        match self.find_vote(id, scope)? {
            Some(vote) => vote.leave(),
            None => Ok(()),
        }
    }

    /// Called before a transaction ends that was not prepared, so that other hosts do not wait for this one.
    pub(crate) fn withdraw_from_votes(&self, scope: &[u8]) -> Result<(), VoteError> {
        for id in self.votes_on(scope)? {
            let Some(vote) = self.find_vote(id, scope)? else {
                continue;
            };
            let has_published = vote.ballot.joined()?.contains(&self.home.host_name());
            if !has_published && !vote.is_decided()? {
                self.decide_vote(id, scope, false)?;
            }
        }
        Ok(())
    }

    /// After a crash: leaves the votes in which this host has nothing to do any more. `waiting`: transactions that it
    /// has.
    pub(crate) fn leave_old_votes(&self, waiting: &[(u64, Vec<u8>)]) -> Result<(), Errno> {
        let Some(members) = &self.home.members else {
            return Ok(());
        };
        let Some(top) = self.home.find_top()? else {
            return Ok(());
        };
        let kept: Vec<String> = waiting
            .iter()
            .map(|(id, scope)| vote_name(*id, scope))
            .collect();
        for (name, ..) in staging::list(&self.home.base, &top)? {
            let name = String::from_utf8_lossy(&name).into_owned();
            if !name.starts_with(VOTE) || kept.contains(&name) {
                continue;
            }
            let Some(vote) = VoteDir::find(&self.home.base, &top, &name, &members.host)? else {
                continue;
            };
            let vote = VoteBallot::in_dir(vote);
            if vote.ballot.is_taking_part()? && vote.is_decided()? {
                vote.leave()?;
            } else {
                vote.remove_if_over()?;
            }
        }
        Ok(())
    }

    /// Hosts that have not applied a commit yet.
    pub fn hosts_not_applied(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, Errno> {
        let Some(vote) = self.find_vote(id, scope)? else {
            return Ok(Vec::new());
        };
        match vote.ballot.view() {
            // It was removed meanwhile.
            Err(Errno::NOENT | Errno::STALE) => Ok(Vec::new()),
            view => Ok(view?.remaining()),
        }
    }

    /// The numbers of the votes on transactions of a scope.
    fn votes_on(&self, scope: &[u8]) -> Result<Vec<u64>, Errno> {
        if self.home.members.is_none() {
            return Ok(Vec::new());
        }
        let Some(top) = self.home.find_top()? else {
            return Ok(Vec::new());
        };
        let id_of = |name: Vec<u8>| {
            let text = String::from_utf8(name).ok()?;
            let id = text.strip_prefix(VOTE)?.split('-').next()?.parse().ok()?;
            (vote_name(id, scope) == text).then_some(id)
        };
        Ok(staging::list(&self.home.base, &top)?
            .into_iter()
            .filter_map(|(name, ..)| id_of(name))
            .collect())
    }

    /// [`Prepared::reopen`](crate::Prepared::reopen).
    pub(crate) fn reopen(&self, scope: &Scope<B>, id: u64) -> Result<Vec<Used>, VoteError> {
        let _quiet = self.tree.quiesce(vec![scope.area()]);
        match scope.stage() {
            Stage::Prepared(found) if found == id => {}
            Stage::Prepared(found) | Stage::Decided(found) => {
                return Err(StageError::OtherId { found, wanted: id }.into());
            }
            Stage::Open => return Ok(Vec::new()),
            Stage::Ended => return Err(StageError::NoTransaction.into()),
        }
        // Its changes are in the record only.
        if scope.recovered.is_some() {
            return Err(VoteError::GivenUp {
                by: self.home.host_name(),
                why: "its firnd was restarted".into(),
            });
        }
        self.must_be_open_for_change(scope, id)?;
        self.home
            .base
            .unlink(&scope.dir, OsStr::new(staging::RECORD))?;
        self.home.base.sync_dir(&scope.dir)?;
        scope.set_stage(Stage::Open);
        self.leave_vote(id, &scope.path)?;
        Ok(scope.used.lock().take().unwrap_or_default())
    }

    /// In a shadow transaction of several hosts nothing may change any more once the others have agreed.
    fn must_be_open_for_change(&self, scope: &Scope<B>, id: u64) -> Result<(), VoteError> {
        if self.shared.find_shared(&scope.path)?.is_none() {
            return Ok(());
        }
        let Some(vote) = self.find_vote(id, &scope.path)? else {
            return Ok(());
        };
        let by = self.home.host_name();
        let why = "it failed there".to_owned();
        let verdict = vote.judge(&Verdict::GivenUp { by, why })?;
        let outcome = vote.ballot.decision()?;
        let is_aborted = outcome.is_some_and(|outcome| !outcome.commit);
        match verdict {
            Some(Verdict::Clear) if !is_aborted => Err(StageError::Decided { id }.into()),
            _ => Ok(()),
        }
    }

    /// The hosts that have published what they used.
    pub fn hosts_published(&self, id: u64, scope: &[u8]) -> Result<Vec<String>, Errno> {
        match self.find_vote(id, scope)? {
            Some(vote) => vote.ballot.joined(),
            None => Ok(Vec::new()),
        }
    }

    /// For `TransactionalBacking::decide_scope`: checks, durably, that all hosts agree.
    pub(crate) fn agree_with_hosts(
        &self,
        scope: &Scope<B>,
        stage: Stage,
        id: u64,
    ) -> Result<(), VoteError> {
        match stage {
            Stage::Open if self.home.members.is_some() => Err(VoteError::NotVoted { id }),
            Stage::Prepared(_) => self.decide_vote(id, &scope.path, true),
            _ => Ok(()),
        }
    }
}

/// Tests the lists of all hosts.
fn test_lists<B: Backing>(
    vote: &VoteBallot<'_, B>,
    hosts: &[String],
) -> Result<Verdict, VoteError> {
    let mut lists = Vec::new();
    for host in hosts {
        let bytes = vote.ballot.brought_by(host)?.unwrap_or_default();
        let list = Published::decode(&bytes).map_err(|source| VoteError::Published {
            host: host.clone(),
            source,
        })?;
        lists.push(list);
    }
    let report = crate::conflict::test(&lists);
    Ok(match report.total {
        0 => Verdict::Clear,
        _ => Verdict::Conflict(report),
    })
}

/// Fails unless the outcome is the one that is wanted.
fn must_be(outcome: Outcome, commit: bool, id: u64, why: &str) -> Result<(), VoteError> {
    match outcome {
        Outcome { commit: found, .. } if found == commit => Ok(()),
        Outcome { commit: true, .. } => Err(StageError::Decided { id }.into()),
        Outcome { by, .. } => Err(VoteError::GivenUp {
            by,
            why: why.into(),
        }),
    }
}

/// Why there is no commit.
pub(crate) fn refused(verdict: Verdict) -> VoteError {
    match verdict {
        Verdict::Conflict(report) => VoteError::Conflict(Box::new(report)),
        Verdict::GivenUp { by, why } => VoteError::GivenUp { by, why },
        Verdict::Clear => StageError::NoTransaction.into(),
    }
}

impl Verdict {
    /// `Err` with the reason unless the hosts agree.
    pub fn agreed(self) -> Result<(), VoteError> {
        if self == Self::Clear {
            Ok(())
        } else {
            Err(refused(self))
        }
    }
}
