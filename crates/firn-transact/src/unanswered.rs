//! Remembers applied commits after a failed request ([`Unanswered`]), so that a repeated request succeeds. Also
//! remembers the votes on applied commits that this host must still leave ([`VoteToLeave`]).
//!
//! A repeated request with the same number is for the applied commit, not for the transaction after it. The commit is
//! remembered until it is requested again, or until another request for its *scope* (the directory of the transaction)
//! arrives. An unmount forgets it: the next mount leaves its vote, and no later transaction can be confused with it.
//!
//! With several hosts, a *vote* or *ballot* decides a commit by files that all hosts see. A host *leaves* it when it
//! records there that it has applied the commit. If that fails, the host tries again later.

use firn_backing::{Backing, Errno};

use crate::transaction::apply_commit::DecidedCommits;
use crate::transactional::TransactionalBacking;

/// An applied commit. Its request failed before it was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unanswered {
    /// Number of the commit.
    pub(crate) id: u64,
    /// Path of the scope at the begin, which identifies the vote.
    pub(crate) scope: Vec<u8>,
    /// Path of the scope after the commit.
    pub(crate) path_after: Vec<u8>,
}

/// The vote on an applied commit, which this host could not leave yet.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VoteToLeave {
    /// Number of the commit.
    pub(crate) id: u64,
    /// Path of the scope at the begin.
    pub(crate) scope: Vec<u8>,
}

impl<B: Backing> DecidedCommits<B> {
    /// Records for the other hosts that this host has applied a commit: it leaves the vote and the shared transaction.
    /// `scope` is the path of the transaction's directory. After an error [`Self::leave_remaining_votes`] tries again.
    pub(crate) fn leave_applied(&self, id: u64, scope: &[u8]) -> Result<(), Errno> {
        let left = self
            .shared
            .leave_commit(scope)
            .and_then(|()| self.votes.leave_vote(id, scope));
        let vote = VoteToLeave {
            id,
            scope: scope.to_vec(),
        };
        let mut votes_to_leave = self.votes_to_leave.lock();
        match left {
            Ok(()) => votes_to_leave.remove(&vote),
            Err(_) => votes_to_leave.insert(vote),
        };
        left
    }

    /// Leaves the votes of the selected commits that could not be left before. Tries all, and returns the first error.
    fn leave_remaining_votes(
        &self,
        is_selected: impl Fn(&VoteToLeave) -> bool,
    ) -> Result<(), Errno> {
        let votes_to_leave = self.votes_to_leave.lock().clone();
        let mut result = Ok(());
        for commit in votes_to_leave.iter().filter(|commit| is_selected(commit)) {
            result = result.and(self.leave_applied(commit.id, &commit.scope));
        }
        result
    }

    /// Records for the other hosts that this host has applied the commit of the transaction of names with this key.
    pub(crate) fn leave_ballot(&self, key: &[u8]) -> Result<(), Errno> {
        let left = self.names_ballots.leave(key);
        let mut ballots_to_leave = self.ballots_to_leave.lock();
        match left {
            Ok(()) => ballots_to_leave.remove(key),
            Err(_) => ballots_to_leave.insert(key.to_vec()),
        };
        left
    }

    /// Leaves the vote of the last commit of a scope, if that failed before.
    ///
    /// This comes before the host joins the next transaction there. Otherwise a late record of this host could count
    /// for the next commit.
    pub(crate) fn leave_remaining_votes_on(&self, scope: &[u8]) -> Result<(), Errno> {
        self.leave_remaining_votes(|commit| commit.scope == scope)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Leaves all votes and ballots of applied commits that could not be left before, because other hosts wait for
    /// that. Tries all, and returns the first error.
    pub fn leave_applied_commits(&self) -> Result<(), Errno> {
        let ballots_to_leave = self.commits.ballots_to_leave.lock().clone();
        let mut ballots_left = Ok(());
        for key in &ballots_to_leave {
            ballots_left = ballots_left.and(self.commits.leave_ballot(key));
        }
        self.commits
            .leave_remaining_votes(|_| true)
            .and(ballots_left)
    }

    /// Records a commit whose request failed. Does nothing if the commit is not applied yet.
    pub(crate) fn record_unanswered(&self, commit: Unanswered) {
        let unapplied_commit = self.transactions_at_path(&commit.path_after).commit;
        if unapplied_commit.is_some_and(|unapplied| unapplied.id() == commit.id) {
            return;
        }
        let path = commit.path_after.clone();
        self.unanswered.lock().insert(path, commit);
    }

    /// Returns the unanswered commit with this number at `path`, if there is one.
    pub(crate) fn find_unanswered(&self, path: &[u8], id: u64) -> Option<Unanswered> {
        let unanswered = self.unanswered.lock();
        unanswered
            .get(path)
            .filter(|commit| commit.id == id)
            .cloned()
    }

    /// Removes the unanswered commit at `path`, because it is answered or the client has made another request.
    pub(crate) fn remove_unanswered(&self, path: &[u8]) {
        self.unanswered.lock().remove(path);
    }
}
