//! Operations on whole transactions, each step in its own file: begin, prepare, decide and apply, abort. Also the
//! handles by which callers refer to a transaction ([`handle`]).

mod abort;
pub(crate) mod apply_commit;
pub(crate) mod arenas;
pub(crate) mod begin;
pub(crate) mod handle;
mod prepare;
pub(crate) mod top;
