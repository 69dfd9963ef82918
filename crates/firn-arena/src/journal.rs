//! The journal: metadata records of files, such as their names, that are appended to a byte region and replayed from it
//! after a crash. The region is in the *arena*, the shared memory with bytes that are not in the backing directory yet.
//!
//! The region has two halves, of which one is active. Records are appended to the active half. When it is full, a
//! *snapshot* is written to the other half: the state that results from the records (the [`Ledger`]), as a new list of
//! records. One store of the header makes that half the active one.
//!
//! Promises
//! * A record whose append returned is replayed after the death of the process. A record that was being appended is
//!   replayed completely or not at all.
//! * The ledger in memory always equals the ledger that results from a replay, because [`Ledger::apply`] computes both.
//! * An append that does not fit, even after a snapshot, changes nothing and returns an error. An append that begins
//!   something also fails if a snapshot would gain less than 1/64 of a half. So snapshots take a bounded share of the
//!   time.

mod ledger;
mod medium;
mod records;

pub use ledger::{DrainedRange, KnownFile, KnownName, Ledger, ModifiedAt, PathState};
pub use medium::{Medium, Memory};
pub use records::{Damage, Full, Journal, Replay, replay};
