//! Commits that were applied, but whose requests failed after that: a repeated request means this commit, and not the
//! transaction that follows.
//!
//! They are known until they are asked for again, or something else is asked for. A mount that ends forgets them: the next
//! one leaves their votes, and has no transaction that could be meant.

use firn_backing::{Backing, Errno};

use crate::transaction::apply_commit::Commits;
use crate::transactional::TransactionalBacking;

/// A commit that was applied, with something left to do before it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unanswered {
    pub(crate) id: u64,
    /// Path of its scope at the begin, which names its vote.
    pub(crate) scope: Vec<u8>,
    /// Path of its scope after it.
    pub(crate) path_after: Vec<u8>,
}

/// A commit that was applied, and its scope at the begin: its vote.
pub(crate) type AppliedCommit = (u64, Vec<u8>);

impl<B: Backing> Commits<B> {
    /// Says to the other hosts that this one has applied a commit. Where that fails, [`Self::leave_rest`] tries it again.
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

    /// Says to the other hosts what could not be said before of these commits; the first error, after all were tried.
    fn leave_rest(&self, is_wanted: impl Fn(&AppliedCommit) -> bool) -> Result<(), Errno> {
        let to_leave = self.to_leave.lock().clone();
        let wanted = to_leave.iter().filter(|commit| is_wanted(commit));
        let left = wanted.map(|(id, scope)| self.leave_applied(*id, scope));
        left.fold(Ok(()), Result::and)
    }

    /// Says to the other hosts that this one has applied the commit of a scope of names.
    pub(crate) fn leave_key(&self, key: &[u8]) -> Result<(), Errno> {
        let left = self.names_ballots.leave(key);
        let mut to_leave = self.keys_to_leave.lock();
        match left {
            Ok(()) => drop(to_leave.remove(key)),
            Err(_) => drop(to_leave.insert(key.to_vec())),
        }
        left
    }

    /// Says to the other hosts that this one has applied the last commit of a scope. It does so before this host
    /// joins the next vote there, so that no late message counts for the next commit.
    pub(crate) fn leave_rest_of(&self, scope: &[u8]) -> Result<(), Errno> {
        self.leave_rest(|(_, of)| of == scope)
    }
}

impl<B: Backing> TransactionalBacking<B> {
    /// Says to the other hosts which commits this one has applied, where that failed before. They wait for it.
    pub fn leave_applied_commits(&self) -> Result<(), Errno> {
        let keys = self.commits.keys_to_leave.lock().clone();
        let left = keys.iter().map(|key| self.commits.leave_key(key));
        let left = left.fold(Ok(()), Result::and);
        self.commits.leave_rest(|_| true).and(left)
    }

    /// Notes a commit whose request failed, if that was after it was applied.
    pub(crate) fn note_unanswered(&self, commit: Unanswered) {
        let waiting = self.known_at(&commit.path_after).commit;
        if waiting.is_some_and(|waiting| waiting.id() == commit.id) {
            return;
        }
        let path = commit.path_after.clone();
        self.unanswered.lock().insert(path, commit);
    }

    /// The commit of this number, if it is one of those.
    pub(crate) fn find_unanswered(&self, path: &[u8], id: u64) -> Option<Unanswered> {
        let unanswered = self.unanswered.lock();
        unanswered
            .get(path)
            .filter(|commit| commit.id == id)
            .cloned()
    }

    /// It is answered, or something else is meant from here on.
    pub(crate) fn forget_unanswered(&self, path: &[u8]) {
        self.unanswered.lock().remove(path);
    }
}
