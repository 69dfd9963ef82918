//! Handles on transactions: in which state one was found is their type, and what can be done there are their methods.
//!
//! ```text
//! begin ──► Open ──prepare──► Prepared ──decide──► Decided ──apply──► (over)
//!            │ ▲─────reopen─────┘ │
//!            ├──────decide────────┼───────────────► Decided
//!            └──────abort─────────┴──abort──► (over)
//! ```
//!
//! Invariants
//! * A handle says how its transaction was found. Somebody else may have gone on with it since: each method looks
//!   again, under the locks that it needs, and says so.
//! * A scope has one transaction, or a commit that is decided and one that follows it.

use std::sync::Arc;

use crate::conflict::Used;
use firn_backing::Backing;

use crate::error::{AbortError, CommitError, PrepareError, StoreError, VoteError};
use crate::object::Object;
use crate::scope::{Scope, Stage};
use crate::transactional::TransactionalBacking;

/// A transaction, and the backing that it is in.
struct Handle<'a, B: Backing> {
    store: &'a TransactionalBacking<B>,
    scope: Arc<Scope<B>>,
}

impl<B: Backing> Clone for Handle<'_, B> {
    fn clone(&self) -> Self {
        Self {
            store: self.store,
            scope: Arc::clone(&self.scope),
        }
    }
}

/// A transaction in which programs change things.
pub struct Open<'a, B: Backing>(Handle<'a, B>);

/// A transaction that is durable, its outcome open; changes wait.
pub struct Prepared<'a, B: Backing> {
    handle: Handle<'a, B>,
    id: u64,
}

/// A commit that is decided and not applied to its end.
pub struct Decided<'a, B: Backing> {
    handle: Handle<'a, B>,
    id: u64,
}

/// A transaction that was not over when it was looked for.
#[allow(missing_docs, reason = "each variant is the handle of that name")]
pub enum Found<'a, B: Backing> {
    Open(Open<'a, B>),
    Prepared(Prepared<'a, B>),
    Decided(Decided<'a, B>),
}

impl<'a, B: Backing> Open<'a, B> {
    /// Makes it durable and leaves its outcome open. Where this fails it is as it was. A commit that it follows is
    /// applied first.
    pub fn prepare(&self, id: u64) -> Result<Prepared<'a, B>, PrepareError> {
        self.0.prepare(id)
    }

    /// Decides to commit it, durably, without a prepare.
    pub fn decide(&self, id: u64) -> Result<Decided<'a, B>, CommitError> {
        self.0.decide(id)
    }

    /// Throws it away: the tree is as it was when it began. What was made in it is gone: ESTALE.
    pub fn abort(&self) -> Result<(), AbortError> {
        self.0.store.abort_scope(&self.0.scope)
    }
}

impl<'a, B: Backing> Prepared<'a, B> {
    /// The number that it was prepared with.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Decides to commit it, durably: from now on every crash ends in the tree after it, which is also what programs
    /// see. Several hosts must have voted.
    pub fn decide(&self) -> Result<Decided<'a, B>, CommitError> {
        self.handle.decide(self.id)
    }

    /// As [`Open::abort`].
    pub fn abort(&self) -> Result<(), AbortError> {
        self.handle.store.abort_scope(&self.handle.scope)
    }

    /// Back to open, with all that was changed: the other hosts do not agree, or did not come. Returns what
    /// [`Prepared::note_accesses`] was told.
    pub fn reopen(&self) -> Result<Vec<Used>, VoteError> {
        self.handle.store.reopen(&self.handle.scope, self.id)
    }

    /// Notes what processes of this host used up to the moment at which it was prepared.
    pub fn note_accesses(&self, used: Vec<Used>) {
        *self.handle.scope.used.lock() = Some(used);
    }

    /// Publishes what this host read and wrote in it. Fails with [`VoteError::LastVoteNotOver`] while an earlier vote
    /// on the same number is not over.
    pub fn publish_accesses(&self) -> Result<(), VoteError> {
        self.handle
            .store
            .publish_accesses(&self.handle.scope, self.id)
    }
}

impl<B: Backing> Decided<'_, B> {
    /// The number of the commit.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Makes the backing what programs see already, while they read on. Changes of the scope wait. Where this fails it
    /// can be called again; once it is applied it does nothing.
    pub fn apply(&self) -> Result<(), StoreError> {
        self.handle.store.apply_commit(&self.handle.scope)
    }

    /// Gives up the transaction that was to begin when this commit is applied.
    pub fn give_up_next(&self) {
        self.handle.store.give_up_next(&self.handle.scope);
    }

    /// Path of its scope at the begin, relative to the backing.
    pub fn scope(&self) -> &[u8] {
        &self.handle.scope.path
    }

    /// A restore is bringing an older commit back.
    pub fn is_undo(&self) -> bool {
        self.handle.scope.is_undo
    }

    /// Why it could not be applied when that was tried last.
    pub fn trouble(&self) -> Option<String> {
        self.handle.scope.application.trouble()
    }
}

impl<'a, B: Backing> Found<'a, B> {
    /// `None` where the transaction is over.
    fn new(store: &'a TransactionalBacking<B>, scope: Arc<Scope<B>>, stage: Stage) -> Option<Self> {
        let handle = Handle { store, scope };
        match stage {
            Stage::Open => Some(Self::Open(Open(handle))),
            Stage::Prepared(id) => Some(Self::Prepared(Prepared { handle, id })),
            Stage::Decided(id) => Some(Self::Decided(Decided { handle, id })),
            Stage::Ended => None,
        }
    }

    fn handle(&self) -> &Handle<'a, B> {
        match self {
            Self::Open(Open(handle))
            | Self::Prepared(Prepared { handle, .. })
            | Self::Decided(Decided { handle, .. }) => handle,
        }
    }

    /// Path of its scope at the begin, relative to the backing.
    pub fn scope(&self) -> &[u8] {
        &self.handle().scope.path
    }

    /// Path under which programs see its scope.
    pub fn path_now(&self) -> Vec<u8> {
        self.handle().scope.path_now()
    }

    /// The state that it is in by now; `None` where it is over.
    pub fn look_again(&self) -> Option<Self> {
        let handle = self.handle();
        let scope = Arc::clone(&handle.scope);
        let stage = scope.stage();
        Self::new(handle.store, scope, stage)
    }

    /// An earlier firnd prepared it.
    pub fn is_recovered(&self) -> bool {
        self.handle().scope.recovered.is_some()
    }

    /// Applies the commit that it follows.
    pub(crate) fn apply_commit_before(&self) -> Result<(), StoreError> {
        let handle = self.handle();
        handle.store.apply_commit_before(&handle.scope)
    }

    /// Programs change things in it.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }

    /// The number that it was prepared or is committed with.
    pub fn id(&self) -> Option<u64> {
        match self {
            Self::Open(_) => None,
            Self::Prepared(prepared) => Some(prepared.id()),
            Self::Decided(commit) => Some(commit.id()),
        }
    }

    /// The commit, if it is decided.
    pub fn decided(self) -> Option<Decided<'a, B>> {
        match self {
            Self::Decided(commit) => Some(commit),
            Self::Open(_) | Self::Prepared(_) => None,
        }
    }

    /// Prepares it with `id`, unless it is.
    pub fn prepare(&self, id: u64) -> Result<Prepared<'a, B>, PrepareError> {
        self.handle().prepare(id)
    }

    /// Decides to commit it with `id`, unless that is decided.
    pub fn decide(&self, id: u64) -> Result<Decided<'a, B>, CommitError> {
        self.handle().decide(id)
    }

    /// Throws it away, unless it is decided.
    pub fn abort(&self) -> Result<(), AbortError> {
        let handle = self.handle();
        handle.store.abort_scope(&handle.scope)
    }

    /// From now on every change in it fails with ECANCELED, also one that waits for the outcome: the next call ends it.
    pub fn refuse_changes(&self) -> Result<(), AbortError> {
        let handle = self.handle();
        handle.store.refuse_changes(&handle.scope)
    }
}

impl<'a, B: Backing> Handle<'a, B> {
    fn prepare(&self, id: u64) -> Result<Prepared<'a, B>, PrepareError> {
        self.store.prepare_scope(&self.scope, id)?;
        let handle = self.clone();
        Ok(Prepared { handle, id })
    }

    fn decide(&self, id: u64) -> Result<Decided<'a, B>, CommitError> {
        self.store.decide_scope(&self.scope, id)?;
        let handle = self.clone();
        Ok(Decided { handle, id })
    }
}

impl<B: Backing> TransactionalBacking<B> {
    pub(crate) fn open_handle(&self, scope: Arc<Scope<B>>) -> Open<'_, B> {
        Open(Handle { store: self, scope })
    }

    /// A transaction that is not over, of those that `look` finds one after the other.
    fn find_found(&self, look: impl Fn() -> Option<Arc<Scope<B>>>) -> Option<Found<'_, B>> {
        // One that was over by then is not in the list any more.
        std::iter::from_fn(look).find_map(|scope| {
            let stage = scope.stage();
            Found::new(self, scope, stage)
        })
    }

    /// The transaction of a scope that was begun first: where a commit is decided and followed by another transaction,
    /// the commit.
    pub fn first_transaction(&self, scope: &[u8]) -> Option<Found<'_, B>> {
        self.find_found(|| self.scopes.at_path(scope))
    }

    /// The transaction of a scope that programs change things in, or else the commit that is being applied.
    pub fn current_transaction(&self, scope: &[u8]) -> Option<Found<'_, B>> {
        self.find_found(|| self.scopes.current_at_path(scope))
    }

    /// [`TransactionalBacking::current_transaction`] of the scope that begins at `root`.
    pub fn transaction_at(&self, root: &Arc<Object<B>>) -> Option<Found<'_, B>> {
        self.find_found(|| {
            let first = self.scopes.with_root(root)?;
            Some(first.application.next().unwrap_or(first))
        })
    }

    /// All that are not over; a commit comes before the transaction that follows it.
    pub fn open_transactions(&self) -> Vec<Found<'_, B>> {
        let scopes = self.scopes.in_order().into_iter();
        let found = scopes.filter_map(|(scope, stage)| Found::new(self, scope, stage));
        found.collect()
    }
}
