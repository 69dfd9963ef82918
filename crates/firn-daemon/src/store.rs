//! What the engine writes to, and how its scopes are named to a person.

use firn_backing::DirBacking;
use firn_transact::TransactionalBacking;

/// The store below the engine: a directory, with or without transactions.
pub(crate) type Store = firn_transact::Store<DirBacking>;
/// A store that can have transactions.
pub(crate) type TransactionalStore = TransactionalBacking<DirBacking>;

/// Names a scope to a person.
pub(crate) fn shown_scope(path: &[u8]) -> String {
    match path {
        b"" => "the whole mount".into(),
        path => firn_format::quote::quoted(path),
    }
}
