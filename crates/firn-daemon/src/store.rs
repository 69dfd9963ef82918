//! What the engine writes to: layers over a directory, each of which is there or is not.
//!
//! ```text
//!   TransactionalBacking    or   PlainBacking, which only hides `.firn`
//!   LogBacking              or   nothing: files lie in the backing as they are
//!   Lanes                   or   nothing: data lies where names do
//!   DirBacking
//! ```
//!
//! Only this file says in which order layers lie.

use std::sync::Arc;

use firn_backing::{Backing, DirBacking, Either};
use firn_lanes::Lanes;
use firn_log::{LogBacking, Logs};
use firn_transact::{Object, PlainBacking, TransactionalBacking};

/// A directory, whose files may be placed in lanes.
pub(crate) type PlaceableStore<B = DirBacking> = Either<B, Lanes<B>>;

/// The same with files that may lie in logs.
pub(crate) type LoggableStore<B = DirBacking> =
    Either<PlaceableStore<B>, LogBacking<PlaceableStore<B>>>;

/// A store that can have transactions.
pub(crate) type TransactionalStore<B = DirBacking> = TransactionalBacking<LoggableStore<B>>;

/// The backing of a mount.
pub(crate) type Store<B = DirBacking> =
    Either<PlainBacking<LoggableStore<B>>, TransactionalStore<B>>;

/// An object of a [`Store`] that can have transactions.
pub(crate) type TransactionalObject<B = DirBacking> = Arc<Object<LoggableStore<B>>>;

/// Names a scope to a person.
pub(crate) fn shown_scope(path: &[u8]) -> String {
    match path {
        b"" => "the whole mount".into(),
        path => firn_format::quote::quoted(path),
    }
}

/// The layers that a [`Store`] has.
pub(crate) trait Layers<B: Backing> {
    /// The backing with transactions, if the mount can have them.
    fn transactional(&self) -> Option<&TransactionalStore<B>>;

    /// What is below that.
    fn loggable(&self) -> &LoggableStore<B>;

    /// The backing with logs, if files may lie in them.
    fn logged(&self) -> Option<&dyn Logs>;

    /// The lanes, if files are placed.
    fn placed(&self) -> Option<&Lanes<B>>;
}

impl<B: Backing> Layers<B> for Store<B> {
    fn transactional(&self) -> Option<&TransactionalStore<B>> {
        self.upper()
    }

    fn loggable(&self) -> &LoggableStore<B> {
        match self {
            Either::Lower(plain) => plain.base(),
            Either::Upper(transactional) => transactional.base(),
        }
    }

    fn logged(&self) -> Option<&dyn Logs> {
        Some(self.loggable().upper()?)
    }

    fn placed(&self) -> Option<&Lanes<B>> {
        let placeable = match self.loggable() {
            Either::Lower(placeable) => placeable,
            Either::Upper(logs) => logs.below(),
        };
        placeable.upper()
    }
}

#[cfg(test)]
mod stacks;
