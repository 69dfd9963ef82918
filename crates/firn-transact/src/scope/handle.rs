//! Handles on transactions: how far one is, for who acts on it.
//!
//! Invariants
//! * Every answer is of the moment when it was asked. Between two of them a transaction may end; whoever acts on one
//!   that did is told so by the call that acts.
//! * A scope has one transaction, or a commit that is decided and one that follows it.

use std::sync::Arc;

use firn_backing::Backing;

use crate::scope::{Scope, Stage};
use crate::transactional::Held;

/// A transaction that was not over when it was looked for.
pub struct TransactionHandle<B: Backing>(Arc<Scope<B>>);

impl<B: Backing> TransactionHandle<B> {
    /// Path of its scope, relative to the backing.
    pub fn scope(&self) -> &[u8] {
        &self.0.path
    }

    /// How far it is now.
    pub fn stage(&self) -> Stage {
        self.0.stage()
    }

    /// Nobody has decided it, and it is not over.
    pub fn is_undecided(&self) -> bool {
        match self.stage() {
            Stage::Open | Stage::Prepared(_) => true,
            Stage::Decided(_) | Stage::Ended => false,
        }
    }

    /// The number of a commit that is decided and not applied to its end.
    pub fn decided(&self) -> Option<u64> {
        self.0.decided()
    }

    /// An earlier firnd prepared it.
    pub fn is_recovered(&self) -> bool {
        self.0.recovered.is_some()
    }

    /// A restore is bringing an older commit back.
    pub fn is_undo(&self) -> bool {
        self.0.is_undo
    }

    /// Why it could not be applied when that was tried last.
    pub fn trouble(&self) -> Option<String> {
        self.0.carried.trouble()
    }
}

impl<B: Backing> Held<B> {
    /// The transaction of a scope that was begun first: where a commit is decided and followed by another transaction,
    /// the commit.
    pub fn first_transaction(&self, scope: &[u8]) -> Option<TransactionHandle<B>> {
        self.scopes.at_path(scope).map(TransactionHandle)
    }

    /// The transaction of a scope that programs change things in, or else the commit that is being applied.
    pub fn current_transaction(&self, scope: &[u8]) -> Option<TransactionHandle<B>> {
        self.scopes.current_at_path(scope).map(TransactionHandle)
    }

    /// All that are not over; a commit comes before the transaction that follows it.
    pub fn open_transactions(&self) -> Vec<TransactionHandle<B>> {
        let scopes = self.scopes.in_order();
        scopes.into_iter().map(TransactionHandle).collect()
    }
}
