//! A backing whose directories can be in a transaction.

use std::collections::BTreeMap;
use std::sync::Arc;

use firn_backing::Backing;
use firn_backing::lock::Mutex;
use firn_hosts::Members;

use crate::backup::Mirror;
use crate::claim::Claim;
use crate::object::Object;
use crate::scope::ArenaId;
use crate::scopes::Scopes;
use crate::shadow::Mode;
use crate::tree::Tree;
use crate::unanswered::Unanswered;

/// What a backing keeps of commits that are over.
#[derive(Default)]
pub(crate) struct History {
    /// Commits of each scope that can be undone.
    pub(crate) commits_max: u32,
    /// Owned by whoever changes the list of the last commit of each scope.
    pub(crate) numbers: Claim,
}

/// A backing whose directories can be in a transaction.
pub struct TransactionalBacking<B: Backing> {
    pub(crate) base: B,
    pub(crate) tree: Tree<B>,
    pub(crate) scopes: Scopes<B>,
    pub(crate) history: History,
    /// Where several hosts commit together.
    pub(crate) members: Option<Members>,
    /// [`crate::Opening::arena`].
    pub(crate) arena: Option<ArenaId>,
    /// Mode of transactions that begin.
    pub(crate) mode: Mode,
    /// The host that aborted the last transaction of a scope, where that was another one.
    pub(crate) stopped_by: Mutex<BTreeMap<Vec<u8>, String>>,
    /// The last commit of a scope, by the path of the scope after it, where it was applied and the request failed after that.
    pub(crate) unanswered: Mutex<BTreeMap<Vec<u8>, Unanswered>>,
    /// Owned while a vote is left, and while something is written to one without the lock of the names: a vote that is made
    /// anew after the last host has left would never be removed. Nothing else is locked meanwhile.
    pub(crate) leaving: Claim,
    /// The backup of prepared transactions.
    pub(crate) mirror: Option<Mirror<B>>,
}

impl<B: Backing> TransactionalBacking<B> {
    pub(crate) fn assemble(base: B, top: &Arc<Object<B>>) -> Self {
        Self {
            base,
            tree: Tree::new(top),
            scopes: Scopes::default(),
            history: History::default(),
            members: None,
            arena: None,
            mode: Mode::Buffer,
            stopped_by: Mutex::default(),
            unanswered: Mutex::default(),
            leaving: Claim::default(),
            mirror: None,
        }
    }

    /// What becomes of changes of transactions that begin.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether hosts compare what their programs used before they commit together.
    pub(crate) fn tests_conflicts(&self) -> bool {
        self.members.is_some() && self.mode == Mode::Buffer
    }

    /// This backing, whose transactions begin in `mode` from now on.
    #[must_use]
    pub fn in_mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// The backing below.
    pub fn base(&self) -> &B {
        &self.base
    }

    /// The backing below, without what was known of transactions.
    pub fn into_base(self) -> B {
        self.base
    }

    pub(crate) fn top(&self) -> &Arc<Object<B>> {
        self.tree.top()
    }

    /// The device that the top is on.
    pub(crate) fn device(&self) -> u64 {
        self.top().key.0
    }
}
