//! Transactions: changes of names and data are held above a backing until they are committed, as in the paper on CprFS.
//!
//! A *backing* is the file system that a mount of Firn shows to programs. [`TransactionalBacking`] is a layer over a
//! backing; a mount without transactions has a [`PlainBacking`] instead. Outside of transactions every call goes to the
//! backing below.
//!
//! A *scope* is what a transaction covers: a directory and all below it. Between [`TransactionalBacking::begin`] and
//! the commit of a scope, programs see their changes, but the backing's tree does not have them. New objects are made
//! in `.firn/`, Firn's own directory in the backing. Changes of existing objects are in memory and in *staged copies*,
//! files in `.firn/` with the changed bytes.
//! * [`Open::prepare`] writes a durable record of all changes and leaves the outcome open.
//! * [`Prepared::decide`] durably decides to commit; [`Open::decide`] prepares and decides in one step.
//! * [`Decided::apply`] applies the record to the backing. An abort drops the record instead.
//! * After a crash [`TransactionalBacking::open`] finishes what was decided and undoes what was not prepared.
//!
//! This is *buffer mode*. In *shadow mode* ([`shadow`]) changes go to the backing at once, after the old state was
//! saved, and an abort restores it.
//!
//! [`TransactionalBacking`] is assembled from parts. Each part is a struct with its own fields, locks and methods, and
//! uses only parts below it.
//!
//! Layers, each of which calls only those before it
//! 1. What is stored, what hosts compare, and errors: `paths`, `own`, `change_log`, `conflict`, `error`, `staging`,
//!    `copy`, `apply`.
//! 2. Objects, and what is recorded of them: `object`, `inline_changes`, `hidden_links`, `claim`, `uses`, `tree`.
//! 3. One transaction: `shadow` (what it saved), `scope` (what it changes).
//! 4. All of a mount: `lower_backing`, `scopes`, `backup::mirror`, `invariants`, `unanswered`.
//! 5. What programs see and do: `waiting`, `namespace`, `listing`, `attributes`, `data`, `inline`, `link_counts`,
//!    `top_overlay`, `shadow::{save, names}`.
//! 6. What becomes of a transaction: `transaction`, `difference`, `records`, `vote`, `names_ballot`, `history`,
//!    `backup`, `recovery`, `shadow::{shared, undo}`.
//! 7. For callers: `transactional` (the parts), `machine` (requests, step by step), `backing` (the trait), `plain`,
//!    `state`, `report`.
//!
//! Promises
//! * After a crash at any instant, `open` restores either the tree before the transaction or the tree after it.
//! * A commit moves new objects into place and does not copy them. Of existing files it copies only the changed ranges.
//!
//! Relies on
//! * While a transaction is open, only Firn changes the scope in the backing.
//! * `.firn/` is on the same file system as the whole scope.

mod apply;
mod attributes;
mod backing;
pub mod backup;
pub mod change_log;
mod claim;
pub mod conflict;
mod copy;
mod data;
mod difference;
mod error;
mod hidden_links;
mod history;
mod inline;
mod inline_changes;
mod invariants;
mod link_counts;
mod listing;
mod lower_backing;
pub mod machine;
mod names_ballot;
mod namespace;
mod object;
mod own;
mod paths;
mod plain;
mod records;
mod recovery;
mod report;
mod scope;
mod scopes;
pub mod shadow;
mod staging;
pub mod state;
mod top_overlay;
mod transaction;
mod transactional;
mod tree;
mod unanswered;
mod uses;
mod vote;
mod waiting;

pub use firn_hosts::{Expected, Members};

pub use data::TrackedFile;
pub use error::{
    AbortError, BackupError, BeginError, CommitError, OpenError, PrepareError, RestoreError,
    ReviveError, ScopeError, StageError, StoreError, TransactionError, VoteError,
};
pub use firn_hosts::OwnError;
pub use listing::TrackedDir;
pub use machine::Machine;
pub use names_ballot::{NamesAttempt, NamesBallot, NamesBallots, NamesEntry, NamesView};
pub use object::Object;
pub use paths::parent_of;
pub use plain::{PlainBacking, PlainDir, PlainInode};
pub use recovery::{LivingTransactions, Opening, RecoveryOutcome};
pub use report::TransactionFigures;
pub use scope::{ArenaId, Stage};
pub use shadow::Mode;
pub use staging::TOP;
pub use transaction::handle::{Decided, Open, Prepared, QuiesceTarget, TransactionHandle};
pub use transaction::top::TopMaker;
pub use transactional::TransactionalBacking;
pub use vote::{Verdict, Vote};
