//! Backups of prepared transactions: a commit can be completed from its backup if the host and `.firn/` are lost.
//!
//! `.firn/` is Firn's own directory in the backing, which is the directory below the mount. It has the *staged files*:
//! bytes that the commit moves or copies into the visible tree.
//!
//! ```text
//! tx-N-TOKEN/DIR-M      bytes of the staged file `new/DIR/M` of a transaction
//! tx-N-TOKEN/manifest   the change log with objects by path, and a list of the files with the bytes
//! ```
//!
//! Promises
//! * From the return of a prepare until its commit is applied, the directory has a manifest, and everything that the
//!   manifest refers to is durable. The manifest is written last and renamed into place.
//! * A manifest exists only while its transaction is prepared or decided. `.firn/tx-N/backup` has the name of the
//!   directory, which no other transaction ever has.
//! * `Revival::revive` changes nothing in the backing outside of `.firn/`. The revived transaction takes effect only
//!   when its record is renamed into place.
//!
//! While a transaction is open, *rounds* copy the staged files that have not changed since the round before. A file
//! that keeps growing is therefore copied only once, and the prepare has little left to copy. A file must look the same
//! in two rounds, so even a coarse clock of the backing hides no change.

mod content;
mod mirror;
mod portable;
pub(crate) mod revive;
pub(crate) mod rounds;

pub use mirror::Progress;

/// Name of the file with the portable change log, in the backup directory of a transaction.
pub const MANIFEST: &str = "manifest";
