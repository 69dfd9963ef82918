//! What the steps need of the mount whose transactions they are.

use std::sync::Arc;

use crate::conflict::Used;
use firn_backing::{Backing, Errno};

use crate::error::TransactionError;
use crate::object::Object;
use crate::transaction::handle::Place;

/// What becomes of the data that is pending in a directory that is quiesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// It goes to the backing.
    Drain,
    /// It is dropped.
    Discard,
}

/// What becomes of a transaction on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is open.
    Begin,
    /// No change may begin, and those under way are waited for.
    Quiesce,
    /// Nothing changes, and what was written is in the backing or dropped.
    Drained,
    /// It is durable, its outcome open.
    Prepared,
    /// It is committed.
    Decided,
    /// The backing has it.
    Applied,
    /// It is over.
    Ended,
    /// It is thrown away.
    Undone,
}

/// The mount that transactions are in. It does what is asked of it and knows no rule of a transaction.
pub trait Mount<B: Backing> {
    /// The directory that programs see at `path`.
    fn directory_at(&self, path: &[u8]) -> Result<Arc<Object<B>>, TransactionError>;

    /// Refuses a client that may not make names in a directory.
    fn must_be_writable(&self, path: &[u8]) -> Result<(), Errno>;

    /// Runs `work` while programs change nothing at or below a directory, whose pending data was treated as `pending` says.
    /// Where it cannot be drained, `work` does not run.
    fn quiesce<T>(
        &self,
        place: &Place<'_, B>,
        pending: Pending,
        work: impl FnOnce(&Arc<Object<B>>) -> Result<T, TransactionError>,
    ) -> Result<T, TransactionError>;

    /// Whether nothing is pending below `path`.
    fn is_drained(&self, path: &[u8]) -> bool;

    /// Makes the kernel write back what programs stored in shared mappings of files below `path`.
    fn write_back(&self, path: &[u8]);

    /// Names at and below these paths changed without the kernel: it drops what it has of them.
    fn forget_names(&self, paths: &[&[u8]]);

    /// The listing of a directory changed without the kernel.
    fn forget_directory(&self, path: &[u8]);

    /// From now on counts what processes use below `path`.
    fn begin_accesses(&self, path: &[u8]);

    /// Takes what processes used below `path`.
    fn take_accesses(&self, path: &[u8]) -> Vec<Used>;

    /// Takes back what [`Mount::take_accesses`] gave.
    fn put_accesses_back(&self, used: Vec<Used>);

    /// Ends the count of what processes used below `path`.
    fn end_accesses(&self, path: &[u8]);

    /// Begins to wait for other hosts. Each call of what it returns rests before the next look at them; `false`: the
    /// request waits no longer.
    fn begin_wait(&self) -> impl FnMut() -> bool;

    /// Whether any of these hosts has a firnd that could go on.
    fn is_any_living(&self, hosts: &[String]) -> Result<bool, Errno>;

    /// Applies decided commits after the answer ([`TransactionalBacking::commits_to_apply`]).
    ///
    /// [`TransactionalBacking::commits_to_apply`]: crate::TransactionalBacking::commits_to_apply
    fn apply_later(&self);

    /// The abort of the transaction with this serial number is about to begin: it does not go on, whatever becomes of the
    /// process.
    fn note_abort(&self, serial: u64);

    /// Counts and logs what became of the transaction in `scope`.
    fn note(&self, event: Event, scope: &[u8], id: Option<u64>);
}
