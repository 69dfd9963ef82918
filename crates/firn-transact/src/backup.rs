//! Backups of prepared transactions: a commit can be completed from its backup if the host and `.firn/` are lost.
//!
//! ```text
//! tx-N-TOKEN/DIR-M      bytes of the staged file `new/DIR/M` of a transaction
//! tx-N-TOKEN/manifest   the change log, by path, and where the bytes are ([`crate::change_log`])
//! ```
//!
//! Promises
//! * From the return of a prepare until its commit is applied there is a manifest, and all that it names is durable. The
//!   manifest is written last and renamed into place.
//! * A manifest exists only while its transaction is prepared or decided. `.firn/tx-N/backup` has the name of the
//!   directory, which no other transaction ever has.
//! * `Revival::revive` changes nothing in the backing but `.firn/`, and the revived transaction takes effect only when
//!   its record is renamed into place.
//!
//! While a transaction is open, *rounds* copy the staged files that have not changed since the round before. So a file
//! that keeps growing is copied only once, and the prepare has little left to copy. A change is noticed however coarse
//! the clock of the backing is, because a file must look the same in two rounds.

mod content;
mod mirror;
mod portable;
pub(crate) mod revive;
pub(crate) mod rounds;

pub use mirror::Progress;

/// Name of the file with the portable change log, in the backup directory of a transaction.
pub const MANIFEST: &str = "manifest";
