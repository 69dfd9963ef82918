//! Commits that were applied and whose requests failed after that: who asks again means them, and not the transaction that
//! follows.
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

impl<B: Backing> Commits<B> {
    /// Says to the other hosts that this one has applied a commit.
    pub(crate) fn leave_applied(&self, id: u64, scope: &[u8]) -> Result<(), Errno> {
        self.shared.leave_commit(scope)?;
        self.votes.leave_vote(id, scope)
    }
}

impl<B: Backing> TransactionalBacking<B> {
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
