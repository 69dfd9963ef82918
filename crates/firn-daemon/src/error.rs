//! What can go wrong before and around a mount, in words that say what to do. Each verb has an enum of its own, over
//! what all of them may find when they attach an arena to its backing.

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

/// Exit status: something failed.
const FAILED: u8 = 1;
/// Exit status: an option that cannot be here.
const USAGE: u8 = 2;
/// Exit status: part of it is done.
const PARTLY: u8 = 3;
/// Exit status: not a Firn arena or mount.
const NOT_FIRN: u8 = 10;
/// Exit status: held by another process.
const BUSY: u8 = 11;

/// The enum of a verb takes whatever an attach finds.
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
