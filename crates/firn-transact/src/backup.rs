//! Backups of prepared transactions: a commit can be completed from its backup if the host and `.firn/` are lost.
//!
//! ```text
//! tx-N-TOKEN/DIR-M      bytes of the staged file `new/DIR/M` of a transaction
//! tx-N-TOKEN/manifest   the change log, by path, and where the bytes are ([`crate::change_log`])
//! ```
//!
//! Promises
//! * When prepare or commit has returned, or while one is decided and not applied, there is a manifest, and all that it
//!   names is durable. It is written last and renamed into place.
//! * A manifest is there only while its transaction is prepared or decided. `.firn/tx-N/backup` has the name of the
//!   directory, which no other transaction ever has.
//! * `Revival::revive` changes nothing below but `.firn/`, and nothing counts before its record is in its place.
//!
//! Rounds copy ahead files that did not change for a whole round. So a file that keeps growing is copied once, and a
//! look in each round notices every change in between, however coarse the clock of the backing is.

mod content;
mod mirror;
mod portable;
pub(crate) mod revive;
pub(crate) mod rounds;

pub use mirror::Progress;

/// The change log in the directory of a backup.
pub const MANIFEST: &str = "manifest";
