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
//! * A handle says how its transaction was found. Another thread may have advanced the transaction since: each method
//!   checks its stage again, under the locks that it needs, and reports it.
//! * A scope has one transaction, or a commit that is decided and one that follows it.

use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::Backing;

use crate::change_log::NO_ID;
use crate::conflict::Used;
use crate::scopes::Scopes;

use crate::error::{AbortError, BeginError, CommitError, PrepareError, StoreError, VoteError};
use crate::object::Object;
use crate::scope::{Scope, Stage};
use crate::transactional::TransactionalBacking;
use crate::vote::Vote;

/// A transaction, and the backing that it is in.
pub(crate) struct Handle<'a, B: Backing> {
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

    /// Decides the commit, durably, without an id, for the transactions that [`TransactionalBacking::begin_names`]
    /// begins.
    pub fn decide_unnumbered(&self) -> Result<Decided<'a, B>, CommitError> {
        self.0.decide(NO_ID)
    }

    /// More names in the directory of a transaction of names belong to it.
    pub fn add_names(&self, names: &[OsString]) -> Result<(), BeginError> {
        self.0.store.add_names_to(&self.0.scope, names)
    }

    /// The serial number, by which [`TransactionalBacking::transaction_numbered`] finds it.
    pub fn serial(&self) -> u64 {
        self.0.scope.serial
    }

    /// Throws it away: the tree is as it was when it began. What was made in it is gone: ESTALE.
    pub fn abort(&self) -> Result<(), AbortError> {
        self.0.store.abort_scope(&self.0.scope)
    }

    pub(crate) fn handle(&self) -> &Handle<'a, B> {
        &self.0
    }

    /// Programs change things in it: it was not prepared since.
    pub(crate) fn is_still_open(&self) -> bool {
        self.0.scope.stage() == Stage::Open
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
        self.handle.store.votes.reopen(&self.handle.scope, self.id)
    }

    /// Back to open, of a scope of names of several hosts: the attempt to commit has failed.
    pub fn reopen_names(&self) -> Result<(), VoteError> {
        self.handle.store.reopen_names(&self.handle.scope)
    }

    /// Notes what processes of this host used up to the moment at which it was prepared.
    pub fn note_accesses(&self, used: Vec<Used>) {
        *self.handle.scope.used.lock() = Some(used);
    }

    /// Publishes what this host read and wrote in it. Fails with [`VoteError::LastVoteNotOver`] while an earlier vote
    /// on the same number is not over.
    pub fn publish_accesses(&self) -> Result<(), VoteError> {
        let Handle { store, scope, .. } = &self.handle;
        store.commits.leave_rest_of(&scope.path)?;
        store.votes.publish_accesses(scope, self.id)
    }

    /// Looks whether all hosts have published, and finds the verdict if they have.
    pub(crate) fn poll_vote(&self) -> Result<Vote, VoteError> {
        self.handle
            .store
            .votes
            .poll_vote(self.id, &self.handle.scope.path)
    }

    /// Puts an end to its vote, if there is no verdict yet.
    pub(crate) fn give_vote_up(&self, why: String) -> Result<(), VoteError> {
        let path = &self.handle.scope.path;
        self.handle.store.votes.give_vote_up(self.id, path, why)
    }

    /// Decides for all hosts that it is not committed; fails with [`StageError::Decided`](crate::StageError::Decided) where it is.
    pub(crate) fn call_commit_off(&self) -> Result<(), VoteError> {
        let path = &self.handle.scope.path;
        self.handle.store.votes.call_commit_off(self.id, path)
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
        self.handle
            .store
            .commits
            .apply_commit(&self.handle.scope)
            .map(drop)
    }

    /// Applies it; whether this call came to its end, and no other one before.
    pub(crate) fn apply_once(&self) -> Result<bool, StoreError> {
        self.handle.store.commits.apply_commit(&self.handle.scope)
    }

    /// The directory that it covers.
    pub(crate) fn root(&self) -> &Arc<Object<B>> {
        &self.handle.scope.root
    }

    /// An earlier firnd prepared it, or it undoes a commit: programs see the tree before it until it is applied.
    pub(crate) fn is_recovered(&self) -> bool {
        self.handle.scope.recovered.is_some()
    }

    /// Programs change things in a transaction that follows it, or did by the time that it was applied.
    pub(crate) fn is_followed(&self) -> bool {
        let current = self.handle.store.transaction_at(self.root());
        matches!(current, Some(Found::Open(_) | Found::Prepared(_)))
    }

    /// Path that its scope has once it is applied.
    pub(crate) fn path_after(&self) -> Vec<u8> {
        self.handle.scope.path_after()
    }

    /// Gives up the transaction that was to begin when this commit is applied.
    pub fn give_up_next(&self) {
        self.handle.store.commits.give_up_next(&self.handle.scope);
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

    pub(crate) fn handle(&self) -> &Handle<'a, B> {
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

    /// [`Open::serial`].
    pub fn serial(&self) -> u64 {
        self.handle().scope.serial
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

    /// [`TransactionalBacking::begin_names`] began it.
    pub fn is_of_names(&self) -> bool {
        self.handle().scope.names_in_root.is_some()
    }

    /// Whether the next firnd goes on with it where this one dies, in the stage that it has. What is decided is applied then.
    pub fn outlives_firnd(&self) -> bool {
        let is_alone = self.handle().store.lower.members().is_none();
        let is_in_backing = self.handle().scope.shadow.is_some() && is_alone;
        is_in_backing || self.is_recovered() || matches!(self, Self::Decided(_))
    }

    /// An earlier firnd prepared it.
    pub fn is_recovered(&self) -> bool {
        self.handle().scope.recovered.is_some()
    }

    /// Path that its scope has after its commit.
    pub(crate) fn path_after(&self) -> Vec<u8> {
        self.handle().scope.path_after()
    }

    /// Applies the commit that it follows.
    pub(crate) fn apply_commit_before(&self) -> Result<(), StoreError> {
        let handle = self.handle();
        handle.store.commits.apply_commit_before(&handle.scope)
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

    /// Prepares this host's part of a scope of names, unless it is, and publishes it in an attempt of the hosts to commit.
    pub fn publish_names(&self, attempt: u64) -> Result<(), PrepareError> {
        let Handle { store, scope } = self.handle();
        store.prepare_scope(scope, NO_ID)?;
        store.publish_names(scope, attempt)
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

    /// From now on every change in the transaction fails with ECANCELED, also one that waits for the outcome. The next
    /// call ends it.
    pub fn refuse_changes(&self) -> Result<(), AbortError> {
        let handle = self.handle();
        handle.store.refuse_changes(&handle.scope)
    }
}

impl<'a, B: Backing> From<Open<'a, B>> for Found<'a, B> {
    fn from(open: Open<'a, B>) -> Self {
        Self::Open(open)
    }
}

/// A directory that is quiesced: the scope of a transaction, or one that may become one.
pub struct Place<'a, B: Backing>(PlaceKind<'a, B>);

enum PlaceKind<'a, B: Backing> {
    Directory(Vec<u8>),
    Scope(Handle<'a, B>),
}

impl<'a, B: Backing> Place<'a, B> {
    /// A directory that no transaction covers.
    pub(crate) fn directory(path: &[u8]) -> Self {
        Self(PlaceKind::Directory(path.to_vec()))
    }

    /// The scope of a transaction.
    pub(crate) fn scope(handle: &Handle<'a, B>) -> Self {
        Self(PlaceKind::Scope(handle.clone()))
    }

    /// Path under which programs see it. It may change while nothing keeps the names above it.
    pub fn path_now(&self) -> Vec<u8> {
        match &self.0 {
            PlaceKind::Directory(path) => path.clone(),
            PlaceKind::Scope(handle) => handle.scope.path_now(),
        }
    }

    /// The directory, also where programs do not see it yet; `None`: what has that path.
    pub fn root(&self) -> Option<&Arc<Object<B>>> {
        match &self.0 {
            PlaceKind::Directory(_) => None,
            PlaceKind::Scope(handle) => Some(&handle.scope.root),
        }
    }
}

/// The transactions of one scope at an instant.
pub(crate) struct Known<'a, B: Backing> {
    /// The commit that is decided and not applied.
    pub(crate) commit: Option<Decided<'a, B>>,
    /// The transaction that programs change things in, or that is prepared.
    pub(crate) undecided: Option<Found<'a, B>>,
}

impl<'a, B: Backing> Known<'a, B> {
    /// What programs change things in, or else the commit that is being applied.
    pub(crate) fn into_current(self) -> Option<Found<'a, B>> {
        self.undecided.or(self.commit.map(Found::Decided))
    }

    /// The scope of what is there; `path` where nothing is.
    pub(crate) fn place(&self, path: &[u8]) -> Place<'a, B> {
        match (&self.undecided, &self.commit) {
            (Some(found), _) => Place::scope(found.handle()),
            (None, Some(commit)) => Place::scope(&commit.handle),
            (None, None) => Place::directory(path),
        }
    }
}

impl<'a, B: Backing> Handle<'a, B> {
    /// Path of its scope at the begin.
    pub(crate) fn scope_path(&self) -> &[u8] {
        &self.scope.path
    }

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

impl<B: Backing> Scopes<B> {
    /// Whether programs change things in a transaction, or one waits for its outcome.
    pub fn has_undecided(&self) -> bool {
        let mut stages = self.in_order().into_iter();
        stages.any(|(_, stage)| !matches!(stage, Stage::Decided(_)))
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

    /// The transactions of the scope that is known by `path`.
    pub(crate) fn known_at(&self, path: &[u8]) -> Known<'_, B> {
        let mut known = Known {
            commit: None,
            undecided: None,
        };
        for (scope, stage) in self.scopes.in_order_at(path) {
            match Found::new(self, scope, stage) {
                Some(Found::Decided(commit)) => known.commit = Some(commit),
                found => known.undecided = found,
            }
        }
        known
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

    /// The transaction with a serial number.
    pub fn transaction_numbered(&self, serial: u64) -> Option<Found<'_, B>> {
        self.find_found(|| self.scopes.find(|scope| scope.serial == serial))
    }

    /// [`TransactionalBacking::current_transaction`] of the scope that begins at `root`.
    pub fn transaction_at(&self, root: &Arc<Object<B>>) -> Option<Found<'_, B>> {
        self.find_found(|| {
            let first = self.scopes.with_root(root)?;
            Some(first.application.next().unwrap_or(first))
        })
    }

    /// Commits that are applied while programs go on. None that undoes another one: what the kernel knows of its tree goes
    /// with it, and the next request does both.
    pub fn commits_to_apply(&self) -> Vec<Decided<'_, B>> {
        let found = self.open_transactions().into_iter();
        let decided = found.filter_map(Found::decided);
        decided.filter(|commit| !commit.is_undo()).collect()
    }

    /// All that are not over; a commit comes before the transaction that follows it.
    pub fn open_transactions(&self) -> Vec<Found<'_, B>> {
        let scopes = self.scopes.in_order().into_iter();
        let found = scopes.filter_map(|(scope, stage)| Found::new(self, scope, stage));
        found.collect()
    }
}
