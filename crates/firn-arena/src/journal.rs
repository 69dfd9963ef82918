//! Append, snapshot and replay of metadata records over a byte region.
//!
//! The region has two halves. Records are appended to the active one. When it is full, the state that they add up to
//! (the [`Ledger`]) is written to the other half as a fresh list of records. That half becomes the active one with the
//! single store of its header.
//!
//! Promises
//! * A record whose append returned is replayed after the death of the process; one that was being
//!   appended is replayed whole or not at all.
//! * The ledger in memory always equals the ledger that a replay gives: both are made by
//!   [`Ledger::apply`].
//! * An append that does not fit, even after a snapshot, changes nothing and says so. Nor does one that begins
//!   something where a snapshot would gain less than 1/64 of a half: so each takes a bounded share of the time.

mod ledger;
mod medium;
mod records;

pub use ledger::{DrainedRange, KnownFile, Ledger, ModifiedAt, Path, PathState};
pub use medium::{Medium, Memory};
pub use records::{Damage, Full, Journal, Replay, replay};
