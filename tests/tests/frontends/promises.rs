//! Promises of docs/SEMANTICS.md one by one, where no larger test shows them.

mod attributes;
mod closing;
mod crashes;
mod errors;
mod names;
mod operations;
mod syncing;
mod users;
mod writing;
