//! What is done with a transaction as a whole, a step in each file: begin, prepare, decide and apply, abort; and the
//! handles that callers hold ([`handle`]).

mod abort;
pub(crate) mod apply_commit;
pub(crate) mod arenas;
pub(crate) mod begin;
pub(crate) mod handle;
mod prepare;
pub(crate) mod top;
