//! Handles on transactions: one type for each stage, with the operations that the stage allows.
//!
//! ```text
//! begin ──► Open ──prepare──► Prepared ──decide──► Decided ──apply──► (over)
//!            │ ▲─────reopen─────┘ │
//!            ├──────decide────────┼───────────────► Decided
//!            └──────abort─────────┴──abort──► (over)
//! ```
//!
//! Invariants
//! * The type of a handle is the stage at the time of the search. Another thread may have advanced the transaction
//!   since then. So each method checks the stage again, under the locks that it needs, and fails if the stage does not
//!   fit.
//! * A *scope*, which is what a transaction covers, has at most one undecided transaction. A decided commit may precede
//!   it.

use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::Backing;

use crate::change_log::NO_ID;
use crate::conflict::AccessedFile;
use crate::error::{AbortError, BeginError, CommitError, PrepareError, StoreError, VoteError};
use crate::object::Object;
use crate::scope::{Scope, Stage};
use crate::scopes::Scopes;
use crate::transactional::TransactionalBacking;
use crate::vote::Vote;

/// The scope of a transaction, and the store that has it.
pub(crate) struct ScopeRef<'a, B: Backing> {
    store: &'a TransactionalBacking<B>,
    scope: Arc<Scope<B>>,
}

impl<B: Backing> Clone for ScopeRef<'_, B> {
    fn clone(&self) -> Self {
        Self {
            store: self.store,
            scope: Arc::clone(&self.scope),
        }
    }
}

/// An open transaction: programs may change its scope.
pub struct Open<'a, B: Backing>(ScopeRef<'a, B>);

/// A prepared transaction: its changes are durable and its outcome is open. Further changes wait for the outcome.
pub struct Prepared<'a, B: Backing> {
    scope_ref: ScopeRef<'a, B>,
    id: u64,
}

/// A decided commit that is not completely applied to the backing.
pub struct Decided<'a, B: Backing> {
    scope_ref: ScopeRef<'a, B>,
    id: u64,
}

/// A transaction that was not over at the time of the search, with its stage.
#[allow(missing_docs, reason = "each variant is the handle of that name")]
pub enum TransactionHandle<'a, B: Backing> {
    Open(Open<'a, B>),
    Prepared(Prepared<'a, B>),
    Decided(Decided<'a, B>),
}

impl<'a, B: Backing> Open<'a, B> {
    /// Makes all changes of the transaction durable and leaves its outcome open. A commit that the transaction follows
    /// is applied first.
    ///
    /// After an error the transaction is open as before, with one exception: if its record can neither be synced nor
    /// removed, the transaction is prepared.
    pub fn prepare(&self, id: u64) -> Result<Prepared<'a, B>, PrepareError> {
        self.0.prepare(id)
    }

    /// Decides the commit durably, without a prepare.
    pub fn decide(&self, id: u64) -> Result<Decided<'a, B>, CommitError> {
        self.0.decide(id)
    }

    /// Decides the commit durably and without a number. Transactions of [`TransactionalBacking::begin_names`] have no
    /// number.
    pub fn decide_unnumbered(&self) -> Result<Decided<'a, B>, CommitError> {
        self.0.decide(NO_ID)
    }

    /// Adds names of the directory to a transaction of names. Fails if a name is in another transaction, or if this one
    /// is not open.
    pub fn add_names(&self, names: &[OsString]) -> Result<(), BeginError> {
        self.0.store.add_names_to(&self.0.scope, names)
    }

    /// Returns the serial number, by which [`TransactionalBacking::transaction_numbered`] finds the transaction.
    pub fn serial(&self) -> u64 {
        self.0.scope.serial
    }

    /// Aborts the transaction: programs see the tree as it was at the begin. Further use of an object that the
    /// transaction made fails with ESTALE.
    pub fn abort(&self) -> Result<(), AbortError> {
        self.0.store.abort_scope(&self.0.scope)
    }

    pub(crate) fn scope_ref(&self) -> &ScopeRef<'a, B> {
        &self.0
    }

    /// Returns whether the transaction is still open. Another request may have prepared or ended it.
    pub(crate) fn is_still_open(&self) -> bool {
        self.0.scope.stage() == Stage::Open
    }
}

impl<'a, B: Backing> Prepared<'a, B> {
    /// Returns the commit number under which the transaction was prepared.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Decides the commit durably: from now on, programs and a recovery after a crash see the committed tree. With
    /// several hosts, fails unless the vote allows the commit.
    pub fn decide(&self) -> Result<Decided<'a, B>, CommitError> {
        self.scope_ref.decide(self.id)
    }

    /// Aborts the transaction; see [`Open::abort`]. With several hosts, fails if the commit is decided.
    pub fn abort(&self) -> Result<(), AbortError> {
        self.scope_ref.store.abort_scope(&self.scope_ref.scope)
    }

    /// Makes the transaction open again with all of its changes, because the vote did not allow the commit.
    ///
    /// Returns the accesses that [`Prepared::store_accesses`] stored, so that they can be recorded again.
    pub fn reopen(&self) -> Result<Vec<AccessedFile>, VoteError> {
        self.scope_ref
            .store
            .votes
            .reopen(&self.scope_ref.scope, self.id)
    }

    /// Makes a transaction of names open again, because the hosts' attempt to commit has failed.
    pub fn reopen_names(&self) -> Result<(), VoteError> {
        self.scope_ref.store.reopen_names(&self.scope_ref.scope)
    }

    /// Stores what processes of this host used before the prepare, for the vote.
    pub fn store_accesses(&self, used: Vec<AccessedFile>) {
        *self.scope_ref.scope.recorded_accesses.lock() = Some(used);
    }

    /// Publishes what this host read and wrote in the transaction, as its part of the vote. Fails with
    /// [`VoteError::LastVoteNotOver`] while an earlier vote on the same number is not over.
    pub fn publish_accesses(&self) -> Result<(), VoteError> {
        let ScopeRef { store, scope } = &self.scope_ref;
        store.commits.leave_remaining_votes_on(&scope.path)?;
        store.votes.publish_accesses(scope, self.id)
    }

    /// Returns the state of the vote. Finds and stores the verdict once all hosts have published their accesses.
    pub(crate) fn poll_vote(&self) -> Result<Vote, VoteError> {
        self.scope_ref
            .store
            .votes
            .poll_vote(self.id, &self.scope_ref.scope.path)
    }

    /// Ends the vote without a commit, unless the vote has a verdict already. `reason` is a text for people.
    pub(crate) fn give_vote_up(&self, reason: String) -> Result<(), VoteError> {
        let path = &self.scope_ref.scope.path;
        self.scope_ref
            .store
            .votes
            .give_vote_up(self.id, path, reason)
    }

    /// Decides for all hosts that the transaction is not committed. Fails with
    /// [`StageError::Decided`](crate::StageError::Decided) if its commit is decided.
    pub(crate) fn call_commit_off(&self) -> Result<(), VoteError> {
        let path = &self.scope_ref.scope.path;
        self.scope_ref.store.votes.call_commit_off(self.id, path)
    }
}

impl<B: Backing> Decided<'_, B> {
    /// Returns the number of the commit.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Applies the commit to the backing. Programs see the committed tree already and can read meanwhile; their changes
    /// in the scope wait.
    ///
    /// Does nothing if the commit is applied already. After an error the call can be repeated.
    pub fn apply(&self) -> Result<(), StoreError> {
        self.scope_ref
            .store
            .commits
            .apply_commit(&self.scope_ref.scope)
            .map(drop)
    }

    /// Applies the commit; see [`Decided::apply`]. Returns whether this call completed the application, and `false` if
    /// another call had completed it.
    pub(crate) fn apply_once(&self) -> Result<bool, StoreError> {
        self.scope_ref
            .store
            .commits
            .apply_commit(&self.scope_ref.scope)
    }

    /// Returns the directory of the scope.
    pub(crate) fn root(&self) -> &Arc<Object<B>> {
        &self.scope_ref.scope.root
    }

    /// Returns whether programs see the tree from before the commit until it is applied. This is the case if an earlier
    /// firnd prepared the commit, or if the commit undoes another commit.
    pub(crate) fn is_recovered(&self) -> bool {
        self.scope_ref.scope.recovered.is_some()
    }

    /// Returns whether an undecided transaction of the same scope follows the commit.
    pub(crate) fn is_followed(&self) -> bool {
        let current = self.scope_ref.store.transaction_at(self.root());
        matches!(
            current,
            Some(TransactionHandle::Open(_) | TransactionHandle::Prepared(_))
        )
    }

    /// Returns the path of the scope after the commit.
    pub(crate) fn path_after(&self) -> Vec<u8> {
        self.scope_ref.scope.path_after()
    }

    /// Ends the transaction that follows this commit, whose changes have not begun yet. A failure is logged, and the
    /// transaction stays open.
    pub fn give_up_next(&self) {
        self.scope_ref
            .store
            .commits
            .give_up_next(&self.scope_ref.scope);
    }

    /// Returns the path of the scope at the begin, relative to the backing.
    pub fn scope(&self) -> &[u8] {
        &self.scope_ref.scope.path
    }

    /// Returns whether the commit undoes an earlier one, for a restore.
    pub fn is_undo(&self) -> bool {
        self.scope_ref.scope.is_undo
    }

    /// Returns the error of the last attempt to apply the commit; `None` if it succeeded or there was none.
    pub fn last_error(&self) -> Option<String> {
        self.scope_ref.scope.apply_state.last_error()
    }
}

impl<'a, B: Backing> TransactionHandle<'a, B> {
    /// Returns the handle for a transaction in this stage; `None` if the transaction is over.
    fn new(store: &'a TransactionalBacking<B>, scope: Arc<Scope<B>>, stage: Stage) -> Option<Self> {
        let scope_ref = ScopeRef { store, scope };
        match stage {
            Stage::Open => Some(Self::Open(Open(scope_ref))),
            Stage::Prepared(id) => Some(Self::Prepared(Prepared { scope_ref, id })),
            Stage::Decided(id) => Some(Self::Decided(Decided { scope_ref, id })),
            Stage::Ended => None,
        }
    }

    pub(crate) fn scope_ref(&self) -> &ScopeRef<'a, B> {
        match self {
            Self::Open(Open(scope_ref))
            | Self::Prepared(Prepared { scope_ref, .. })
            | Self::Decided(Decided { scope_ref, .. }) => scope_ref,
        }
    }

    /// Returns the path of the scope at the begin, relative to the backing.
    pub fn scope(&self) -> &[u8] {
        &self.scope_ref().scope.path
    }

    /// Returns the serial number; see [`Open::serial`].
    pub fn serial(&self) -> u64 {
        self.scope_ref().scope.serial
    }

    /// Returns the path under which programs see the scope.
    pub fn path_now(&self) -> Vec<u8> {
        self.scope_ref().scope.path_now()
    }

    /// Returns the same transaction with its present stage; `None` if it is over.
    pub fn refresh(&self) -> Option<Self> {
        let scope_ref = self.scope_ref();
        let scope = Arc::clone(&scope_ref.scope);
        let stage = scope.stage();
        Self::new(scope_ref.store, scope, stage)
    }

    /// Returns whether the transaction covers some names of a directory; see [`TransactionalBacking::begin_names`].
    pub fn is_of_names(&self) -> bool {
        self.scope_ref().scope.names_in_root.is_some()
    }

    /// Returns whether the next firnd can continue the transaction in its present stage if this firnd dies. For a
    /// decided commit, to continue means to apply it.
    pub fn outlives_firnd(&self) -> bool {
        let ScopeRef { store, scope } = self.scope_ref();
        let is_of_one_host = store.lower.members().is_none();
        let has_changes_in_backing = scope.shadow.is_some() && is_of_one_host;
        has_changes_in_backing || self.is_recovered() || matches!(self, Self::Decided(_))
    }

    /// Returns whether an earlier firnd prepared the transaction.
    pub fn is_recovered(&self) -> bool {
        self.scope_ref().scope.recovered.is_some()
    }

    /// Returns the path of the scope after the commit.
    pub(crate) fn path_after(&self) -> Vec<u8> {
        self.scope_ref().scope.path_after()
    }

    /// Applies the commit that the transaction follows. Does nothing if it follows none.
    pub(crate) fn apply_commit_before(&self) -> Result<(), StoreError> {
        let scope_ref = self.scope_ref();
        scope_ref
            .store
            .commits
            .apply_commit_before(&scope_ref.scope)
    }

    /// Returns whether the transaction was open at the time of the search.
    pub fn is_open(&self) -> bool {
        matches!(self, Self::Open(_))
    }

    /// Returns the number of the prepare or commit; `None` for an open transaction.
    pub fn id(&self) -> Option<u64> {
        match self {
            Self::Open(_) => None,
            Self::Prepared(prepared) => Some(prepared.id()),
            Self::Decided(commit) => Some(commit.id()),
        }
    }

    /// Returns the handle on the commit if it is decided.
    pub fn decided(self) -> Option<Decided<'a, B>> {
        match self {
            Self::Decided(commit) => Some(commit),
            Self::Open(_) | Self::Prepared(_) => None,
        }
    }

    /// Prepares this host's part of a transaction of names, unless it is prepared, and publishes the part for the
    /// hosts' commit attempt with this number.
    pub fn publish_names(&self, attempt: u64) -> Result<(), PrepareError> {
        let ScopeRef { store, scope } = self.scope_ref();
        store.prepare_scope(scope, NO_ID)?;
        store.publish_names(scope, attempt)
    }

    /// Prepares the transaction under the number `id`. Returns `Ok` if it is prepared under that number already.
    pub fn prepare(&self, id: u64) -> Result<Prepared<'a, B>, PrepareError> {
        self.scope_ref().prepare(id)
    }

    /// Decides the commit under the number `id`. Returns `Ok` if it is decided under that number already.
    pub fn decide(&self, id: u64) -> Result<Decided<'a, B>, CommitError> {
        self.scope_ref().decide(id)
    }

    /// Aborts the transaction; see [`Open::abort`]. Fails if its commit is decided.
    pub fn abort(&self) -> Result<(), AbortError> {
        let scope_ref = self.scope_ref();
        scope_ref.store.abort_scope(&scope_ref.scope)
    }

    /// Makes each change in the transaction fail with ECANCELED, including changes that wait for the outcome. The
    /// caller then ends the transaction.
    pub fn refuse_changes(&self) -> Result<(), AbortError> {
        let scope_ref = self.scope_ref();
        scope_ref.store.refuse_changes(&scope_ref.scope)
    }
}

impl<'a, B: Backing> From<Open<'a, B>> for TransactionHandle<'a, B> {
    fn from(open: Open<'a, B>) -> Self {
        Self::Open(open)
    }
}

/// The directory to quiesce: the scope of a transaction, or a directory that may become one.
pub struct QuiesceTarget<'a, B: Backing>(QuiesceTargetKind<'a, B>);

enum QuiesceTargetKind<'a, B: Backing> {
    Directory(Vec<u8>),
    Scope(ScopeRef<'a, B>),
}

impl<'a, B: Backing> QuiesceTarget<'a, B> {
    /// Returns the target for a directory without a transaction.
    pub(crate) fn for_directory(path: &[u8]) -> Self {
        Self(QuiesceTargetKind::Directory(path.to_vec()))
    }

    /// Returns the target for the scope of a transaction.
    pub(crate) fn scope(scope_ref: &ScopeRef<'a, B>) -> Self {
        Self(QuiesceTargetKind::Scope(scope_ref.clone()))
    }

    /// Returns the path under which programs see the directory. The path may change unless the caller is admitted
    /// to the names above it.
    pub fn path_now(&self) -> Vec<u8> {
        match &self.0 {
            QuiesceTargetKind::Directory(path) => path.clone(),
            QuiesceTargetKind::Scope(scope_ref) => scope_ref.scope.path_now(),
        }
    }

    /// Returns the directory of a scope, even if programs do not see it yet. Returns `None` if the caller must look the
    /// directory up by its path.
    pub fn root(&self) -> Option<&Arc<Object<B>>> {
        match &self.0 {
            QuiesceTargetKind::Directory(_) => None,
            QuiesceTargetKind::Scope(scope_ref) => Some(&scope_ref.scope.root),
        }
    }
}

/// The transactions of one scope, as one search found them.
pub(crate) struct ScopeTransactions<'a, B: Backing> {
    /// The commit that is decided and not applied yet.
    pub(crate) commit: Option<Decided<'a, B>>,
    /// The open or prepared transaction. It follows `commit` if there is one.
    pub(crate) undecided: Option<TransactionHandle<'a, B>>,
}

impl<'a, B: Backing> ScopeTransactions<'a, B> {
    /// Returns the undecided transaction, or else the decided commit.
    pub(crate) fn into_current(self) -> Option<TransactionHandle<'a, B>> {
        self.undecided
            .or(self.commit.map(TransactionHandle::Decided))
    }

    /// Returns the scope of the transactions as a target for a quiesce; the directory at `path` if there is no
    /// transaction.
    pub(crate) fn quiesce_target(&self, path: &[u8]) -> QuiesceTarget<'a, B> {
        match (&self.undecided, &self.commit) {
            (Some(undecided), _) => QuiesceTarget::scope(undecided.scope_ref()),
            (None, Some(commit)) => QuiesceTarget::scope(&commit.scope_ref),
            (None, None) => QuiesceTarget::for_directory(path),
        }
    }
}

impl<'a, B: Backing> ScopeRef<'a, B> {
    /// Returns the path of the scope at the begin.
    pub(crate) fn scope_path(&self) -> &[u8] {
        &self.scope.path
    }

    fn prepare(&self, id: u64) -> Result<Prepared<'a, B>, PrepareError> {
        self.store.prepare_scope(&self.scope, id)?;
        let scope_ref = self.clone();
        Ok(Prepared { scope_ref, id })
    }

    fn decide(&self, id: u64) -> Result<Decided<'a, B>, CommitError> {
        self.store.decide_scope(&self.scope, id)?;
        let scope_ref = self.clone();
        Ok(Decided { scope_ref, id })
    }
}

impl<B: Backing> Scopes<B> {
    /// Returns whether a transaction is open or prepared.
    pub fn has_undecided(&self) -> bool {
        self.in_order()
            .iter()
            .any(|(_, stage)| !matches!(stage, Stage::Decided(_)))
    }
}

impl<B: Backing> TransactionalBacking<B> {
    pub(crate) fn open_handle(&self, scope: Arc<Scope<B>>) -> Open<'_, B> {
        Open(ScopeRef { store: self, scope })
    }

    /// Calls `search` until it finds a scope whose transaction is not over, and returns that transaction. Returns
    /// `None` once `search` finds none.
    fn find_transaction(
        &self,
        search: impl Fn() -> Option<Arc<Scope<B>>>,
    ) -> Option<TransactionHandle<'_, B>> {
        // A transaction that ended after the search is no longer in the list, so a further search does not find it
        // again.
        std::iter::from_fn(search).find_map(|scope| {
            let stage = scope.stage();
            TransactionHandle::new(self, scope, stage)
        })
    }

    /// Returns the transactions of the scope with this path: its path at the begin, now, or after the commit.
    pub(crate) fn transactions_at_path(&self, path: &[u8]) -> ScopeTransactions<'_, B> {
        let mut transactions = ScopeTransactions {
            commit: None,
            undecided: None,
        };
        for (scope, stage) in self.scopes.in_order_at(path) {
            match TransactionHandle::new(self, scope, stage) {
                Some(TransactionHandle::Decided(commit)) => transactions.commit = Some(commit),
                undecided => transactions.undecided = undecided,
            }
        }
        transactions
    }

    /// Returns the earliest transaction of a scope. This is the decided commit if another transaction follows it.
    pub fn first_transaction(&self, scope: &[u8]) -> Option<TransactionHandle<'_, B>> {
        self.find_transaction(|| self.scopes.at_path(scope))
    }

    /// Returns the undecided transaction of a scope, or else its decided commit.
    pub fn current_transaction(&self, scope: &[u8]) -> Option<TransactionHandle<'_, B>> {
        self.find_transaction(|| self.scopes.current_at_path(scope))
    }

    /// Returns the transaction with this serial number.
    pub fn transaction_numbered(&self, serial: u64) -> Option<TransactionHandle<'_, B>> {
        self.find_transaction(|| self.scopes.find(|scope| scope.serial == serial))
    }

    /// Returns the undecided transaction of the scope whose directory is `root`, or else its decided commit.
    pub fn transaction_at(&self, root: &Arc<Object<B>>) -> Option<TransactionHandle<'_, B>> {
        self.find_transaction(|| {
            let first = self.scopes.with_root(root)?;
            let next_scope = first.apply_state.next_scope();
            Some(next_scope.unwrap_or(first))
        })
    }

    /// Returns the decided commits that can be applied while programs continue.
    ///
    /// A commit that undoes another one is left out: its application changes names that the kernel has cached, so the
    /// next request applies it and invalidates the cache.
    pub fn commits_to_apply(&self) -> Vec<Decided<'_, B>> {
        self.open_transactions()
            .into_iter()
            .filter_map(TransactionHandle::decided)
            .filter(|commit| !commit.is_undo())
            .collect()
    }

    /// Returns all transactions that are not over. A commit comes before the transaction that follows it.
    pub fn open_transactions(&self) -> Vec<TransactionHandle<'_, B>> {
        self.scopes
            .in_order()
            .into_iter()
            .filter_map(|(scope, stage)| TransactionHandle::new(self, scope, stage))
            .collect()
    }
}
