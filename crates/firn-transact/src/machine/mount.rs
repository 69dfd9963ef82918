//! [`Mount`]: what the machine of transactions (which carries out begins, commits and aborts) calls in the mount.
//!
//! The mount stops programs, invalidates the kernel's cache and records accesses. It also *drains* data of programs
//! from its memory, the arena, to the backing (the directory that the mount serves), or drops the data. The mount knows
//! no rule of transactions. Paths are relative to the backing.

use std::sync::Arc;

use crate::conflict::AccessedFile;
use firn_backing::{Backing, Errno};

use crate::error::TransactionError;
use crate::object::Object;
use crate::transaction::handle::QuiesceTarget;

/// What a quiesce does with the pending data of the directory. Pending data is in the arena and not in the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// The data is drained to the backing.
    Drain,
    /// The data is dropped.
    Discard,
}

/// A change of the stage of a transaction on this host, for counters and the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The transaction has begun.
    Begin,
    /// New changes wait, and firnd waits for the changes that are under way.
    Quiesce,
    /// No change is under way, and all pending data is drained or dropped.
    Drained,
    /// The transaction is durable, and its outcome is open.
    Prepared,
    /// The commit is decided.
    Decided,
    /// The commit is applied to the backing.
    Applied,
    /// The transaction is over, after a commit or an abort.
    Ended,
    /// The changes of the transaction are undone.
    Undone,
}

/// The mount whose programs make the changes of transactions.
pub trait Mount<B: Backing> {
    /// Returns the directory that programs see at `path`; fails if there is none.
    fn directory_at(&self, path: &[u8]) -> Result<Arc<Object<B>>, TransactionError>;

    /// Checks that the client may create names in the directory at `path`; returns the errno of the refusal otherwise.
    fn must_be_writable(&self, path: &[u8]) -> Result<(), Errno>;

    /// Runs `work` while programs change nothing at or below the directory of `target`, and returns its result.
    ///
    /// Before `work` runs, the pending data there is drained or dropped, as `pending` says. If a drain fails, `work`
    /// does not run and the error is returned.
    fn quiesce<T>(
        &self,
        target: &QuiesceTarget<'_, B>,
        pending: Pending,
        work: impl FnOnce(&Arc<Object<B>>) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError>;

    /// Returns whether no data is pending below `path`.
    fn is_drained(&self, path: &[u8]) -> bool;

    /// Makes the kernel write back what programs stored in shared mappings of files below `path`.
    fn write_back(&self, path: &[u8]);

    /// Makes the kernel drop its cached names at and below these paths, because they changed without a call of a
    /// program.
    fn forget_names(&self, paths: &[&[u8]]);

    /// Makes the kernel drop its cached listing of a directory, because it changed without a call of a program.
    fn forget_directory(&self, path: &[u8]);

    /// Starts to record which bytes and names processes use below `path`.
    fn begin_accesses(&self, path: &[u8]);

    /// Takes the record of what processes used below `path`, and returns it.
    fn take_accesses(&self, path: &[u8]) -> Vec<AccessedFile>;

    /// Adds a record that [`Mount::take_accesses`] returned back to the recording.
    fn put_accesses_back(&self, used: Vec<AccessedFile>);

    /// Stops recording what processes use below `path`.
    fn end_accesses(&self, path: &[u8]);

    /// Starts a wait for other hosts, and returns a function for the waiting loop.
    ///
    /// Each call of that function pauses and returns `true`. It returns `false` when the request must wait no longer.
    fn begin_wait(&self) -> impl FnMut() -> bool;

    /// Returns whether any of these hosts has a living firnd, which could finish its part.
    fn is_any_living(&self, hosts: &[String]) -> Result<bool, Errno>;

    /// Schedules the application of decided commits ([`TransactionalBacking::commits_to_apply`]), and returns at once.
    ///
    /// [`TransactionalBacking::commits_to_apply`]: crate::TransactionalBacking::commits_to_apply
    fn apply_later(&self);

    /// Notes that the abort of the transaction with this serial number begins. The transaction must not continue even
    /// if firnd is killed and another firnd takes the mount over.
    fn note_abort(&self, serial: u64);

    /// Counts and logs an event of the transaction in `scope`. `id` is the number of the commit, if there is one.
    fn note(&self, event: Event, scope: &[u8], id: Option<u64>);
}
