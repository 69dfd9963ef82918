//! The errors around a mount, each with a text that says what to do.
//!
//! Each verb (mount, recover, check, flatten) has an enum of its own. All of them contain [`AttachError`], because each
//! verb attaches an arena (shared memory with bytes for the backing) or opens a backing.

mod attach;
mod check;
mod flatten;
mod lane;
mod mount;
mod recover;

use firn_arena::{ArenaError, SpillFault};

pub use attach::AttachError;
pub use check::CheckError;
pub use flatten::FlattenError;
pub(crate) use lane::MAP_BYTES_MAX;
pub use lane::{LaneFault, MapFault};
pub use mount::MountError;
pub use recover::RecoverError;

/// Exit status: the command failed.
const FAILED: u8 = 1;
/// Exit status: an option is invalid here.
const USAGE: u8 = 2;
/// Exit status: the command did only part of its work.
const PARTLY: u8 = 3;
/// Exit status: the path is not a Firn arena or mount.
const NOT_FIRN: u8 = 10;
/// Exit status: another process uses the arena or the backing.
const BUSY: u8 = 11;

/// Implements `From` for the error of a verb, through [`AttachError`].
macro_rules! attach_failures {
    ($verb:ty: $($source:ty),*) => {$(
        impl From<$source> for $verb {
            fn from(source: $source) -> Self {
                Self::Attach(source.into())
            }
        }
    )*};
}
use attach_failures;

/// Returns the exit status of firn for an error of the arena.
fn arena_code(error: &ArenaError) -> u8 {
    match error {
        ArenaError::NoRoom { .. } => USAGE,
        ArenaError::Format { .. } | ArenaError::Distrusted { .. } => NOT_FIRN,
        ArenaError::Io { source, .. } if *source == rustix::io::Errno::NOENT => NOT_FIRN,
        ArenaError::Spill(
            SpillFault::NoRoom { .. } | SpillFault::LongPath { .. } | SpillFault::NotSpill { .. },
        ) => USAGE,
        ArenaError::Spill(SpillFault::Taken { .. }) => BUSY,
        ArenaError::Spill(SpillFault::Distrusted { .. }) => NOT_FIRN,
        ArenaError::Spill(_) => FAILED,
        ArenaError::Io { .. } => FAILED,
    }
}
