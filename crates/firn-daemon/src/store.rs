//! The store that the engine writes to: layers over a directory. Each layer is present or not. The layer of logs keeps
//! the writes of each host in its own log; a lane is the directory of one I/O server.
//!
//! ```text
//!   TransactionalBacking    or   PlainBacking, which only hides `.firn`
//!   LogBacking              or   no log layer: files lie in the backing as they are
//!   Lanes                   or   no lane layer: data lies where names do
//!   DirBacking
//! ```
//!
//! Only this file defines the order of the layers.

use std::sync::Arc;

use firn_backing::{Backing, DirBacking, Either};
use firn_lanes::Lanes;
use firn_log::{LogBacking, Logs};
use firn_transact::{Object, PlainBacking, TransactionalBacking};

/// A directory, with a layer of lanes (`Upper`) if files are placed, and without it (`Lower`) otherwise.
pub(crate) type PlaceableStore<B = DirBacking> = Either<B, Lanes<B>>;

/// A placeable store, with a layer of logs (`Upper`) if files may lie in logs, and without it (`Lower`) otherwise.
pub(crate) type LoggableStore<B = DirBacking> =
    Either<PlaceableStore<B>, LogBacking<PlaceableStore<B>>>;

/// A store with a layer of transactions.
pub(crate) type TransactionalStore<B = DirBacking> = TransactionalBacking<LoggableStore<B>>;

/// The complete store of a mount.
pub(crate) type Store<B = DirBacking> =
    Either<PlainBacking<LoggableStore<B>>, TransactionalStore<B>>;

/// An object of a store with transactions.
pub(crate) type TransactionalObject<B = DirBacking> = Arc<Object<LoggableStore<B>>>;

/// Returns the name of a scope as messages show it.
pub(crate) fn shown_scope(path: &[u8]) -> String {
    match path {
        b"" => "the whole mount".into(),
        path => firn_format::quote::quoted(path),
    }
}

/// Access to the layers that a [`Store`] has.
pub(crate) trait Layers<B: Backing> {
    /// Returns the layer of transactions; `None` if the mount has none.
    fn transactional(&self) -> Option<&TransactionalStore<B>>;

    /// Returns the store below the layer of transactions: the directory, with lanes and logs if there are some.
    fn below_transactions(&self) -> &LoggableStore<B>;

    /// Returns the layer of logs; `None` if no file can lie in logs.
    fn log_layer(&self) -> Option<&dyn Logs>;

    /// Returns the layer of lanes; `None` if no file is placed.
    fn lane_layer(&self) -> Option<&Lanes<B>>;
}

impl<B: Backing> Layers<B> for Store<B> {
    fn transactional(&self) -> Option<&TransactionalStore<B>> {
        self.upper()
    }

    fn below_transactions(&self) -> &LoggableStore<B> {
        match self {
            Either::Lower(plain) => plain.base(),
            Either::Upper(transactional) => transactional.base(),
        }
    }

    fn log_layer(&self) -> Option<&dyn Logs> {
        Some(self.below_transactions().upper()?)
    }

    fn lane_layer(&self) -> Option<&Lanes<B>> {
        let placeable = match self.below_transactions() {
            Either::Lower(placeable) => placeable,
            Either::Upper(logs) => logs.below(),
        };
        placeable.upper()
    }
}

#[cfg(test)]
mod stacks;
