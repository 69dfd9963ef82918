//! Applied commits that were not answered, because the request failed after the application.
//!
//! A repeated request with the same number is for such a commit, not for the transaction that follows it. The commit is
//! remembered until it is requested again, or until another request for the scope arrives. An unmount forgets it: the
//! next mount leaves its vote, and no later transaction can be confused with it.
//!
//! With several hosts, this file also leaves votes and ballots that could not be left at once.

use firn_backing::{Backing, Errno};

use crate::transaction::apply_commit::Commits;
use crate::transactional::TransactionalBacking;

/// An applied commit whose request is not answered yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unanswered {
    /// Number of the commit.
    pub(crate) id: u64,
    /// Path of the scope at the begin, which identifies the vote.
    pub(crate) scope: Vec<u8>,
    /// Path of the scope after the commit.
    pub(crate) path_after: Vec<u8>,
}

/// Number of an applied commit and path of its scope at the begin, which together identify its vote.
pub(crate) type AppliedCommit = (u64, Vec<u8>);

impl<B: Backing> Commits<B> {
    /// Records for the other hosts that this host has applied a commit. After an error [`Self::leave_rest`] tries
    /// again.
    pub(crate) fn leave_applied(&self, id: u64, scope: &[u8]) -> Result<(), Errno> {
        let shared = self.shared.leave_commit(scope);
        let left = shared.and_then(|()| self.votes.leave_vote(id, scope));
        let commit = (id, scope.to_vec());
        let mut to_leave = self.to_leave.lock();
        match left {
            Ok(()) => to_leave.remove(&commit),
            Err(_) => to_leave.insert(commit),
        };
        left
    }

    /// Leaves the votes of the selected commits that could not be left before. Tries all, and returns the first error.
    fn leave_rest(&self, is_wanted: impl Fn(&AppliedCommit) -> bool) -> Result<(), Errno> {
        let to_leave = self.to_leave.lock().clone();
        let wanted = to_leave.iter().filter(|commit| is_wanted(commit));
        let left = wanted.map(|(id, scope)| self.leave_applied(*id, scope));
        left.fold(Ok(()), Result::and)
    }

    /// Records for the other hosts that this host has applied the commit of a transaction of names.
    pub(crate) fn leave_key(&self, key: &[u8]) -> Result<(), Errno> {
        let left = self.names_ballots.leave(key);
        let mut to_leave = self.keys_to_leave.lock();
        match left {
            Ok(()) => drop(to_leave.remove(key)),
            Err(_) => drop(to_leave.insert(key.to_vec())),
        }
        left
    }

    /// Leaves the vote of the last commit of a scope, if that failed before.
    ///
    /// This comes before the host joins the next transaction there. Otherwise a late record of this host could count
    /// for the next commit.
    pub(crate) fn leave_rest_of(&self, scope: &[u8]) -> Result<(), Errno> {
        self.leave_rest(|(_, of)| of == scope)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Leaves all votes and ballots of applied commits that could not be left before, because other hosts wait for
    /// that. Tries all, and returns the first error.
    pub fn leave_applied_commits(&self) -> Result<(), Errno> {
        let keys = self.commits.keys_to_leave.lock().clone();
        let left = keys.iter().map(|key| self.commits.leave_key(key));
        let left = left.fold(Ok(()), Result::and);
        self.commits.leave_rest(|_| true).and(left)
    }

    /// Notes a commit whose request failed. Does nothing if the commit is not applied yet.
    pub(crate) fn note_unanswered(&self, commit: Unanswered) {
        let waiting = self.transactions_at_path(&commit.path_after).commit;
        if waiting.is_some_and(|waiting| waiting.id() == commit.id) {
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

    /// Forgets the unanswered commit at `path`, because it is answered or the client has made another request.
    pub(crate) fn forget_unanswered(&self, path: &[u8]) {
        self.unanswered.lock().remove(path);
    }
}
