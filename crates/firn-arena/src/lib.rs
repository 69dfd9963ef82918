//! The arena: a fixed-size shared-memory file that outlives every process.
//!
//! Promises
//! * What was published ([`Arena::publish_piece`], [`Arena::extend_piece`]) is found by [`Arena::attach`] after
//!   the death of every process, whole.
//! * So it is after chunks moved to the spill file ([`Arena::spill_oldest`]); what that file cannot give is an
//!   error, never other bytes.
//! * Numbers read from the file are checked; damage is reported and never interpreted.
//!
//! Relies on: the file lies on a file system whose pages survive processes (tmpfs, hugetlbfs, DAX),
//! and one firnd at a time has it attached (the daemon's lock).

mod arena;
mod attach;
mod check;
mod client;
mod create;
mod damage;
mod homes;
pub mod journal;
mod lease;
mod lingering;
mod listeners;
mod map;
mod moves;
mod open;
mod pool;
mod publish;
mod refs;
mod scan;
mod spill;
mod spill_area;
mod tables;
mod topology;
mod uses;

use firn_format::amount::bytes_text;

pub use arena::Arena;
pub use check::{Report, check};
pub use client::{ClientLease, Taken, Wrong};
pub use create::Identity;
pub use damage::Damage;
pub use lease::Lease;
pub use map::JournalRegion;
#[cfg(feature = "probe")]
pub use map::set_probe;
pub use moves::{Located, Place, SpillFigures, Spilled};
pub use pool::NumaNodeFigures;
pub use refs::{PieceRef, SlabRef, Stored};
pub use spill::{SpillFault, SpillFile};
pub use topology::{SYSFS_NODES, Topology};

/// Why an arena could not be made or attached.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// A system call on the file failed.
    #[error("{path}: cannot {what}: {source}")]
    Io {
        /// The file.
        path: String,
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: rustix::io::Errno,
    },
    /// The file system does not have so much room.
    #[error(
        "{path}: no room for {} ({why}){}, enlarge that file system, or put the arena elsewhere with arena-dir", bytes_text(*need), room_advice(*free, *fitting)
    )]
    NoRoom {
        /// The file.
        path: String,
        /// Bytes wanted.
        need: u64,
        /// Bytes that its file system has free, where it says so.
        free: Option<u64>,
        /// The largest `arena-size` that fits there; 0: none.
        fitting: u64,
        /// The system's reason.
        why: rustix::io::Errno,
    },
    /// The spill file cannot be made.
    #[error(transparent)]
    Spill(#[from] SpillFault),
    /// It is not a file that only this user could have made.
    #[error(
        "arena {path} {why}; Firn reads nothing from it: remove it, or give another place with arena-dir"
    )]
    Distrusted {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: firn_trust::Distrust,
    },
    /// The bytes are not an arena that this version can use.
    #[error("{path}: {source}")]
    Format {
        /// The file.
        path: String,
        /// What is wrong.
        source: firn_format::FormatError,
    },
}

fn room_advice(free: Option<u64>, fitting: u64) -> String {
    match free {
        Some(free) if fitting > 0 => format!(
            ", {} are free: lower arena-size (--memory) to {}M",
            bytes_text(free),
            fitting >> 20
        ),
        Some(free) => format!(
            ", {} are free: remove what is not needed there",
            bytes_text(free)
        ),
        None => ": lower arena-size (--memory)".into(),
    }
}

impl ArenaError {
    /// The errno that says it best.
    pub fn errno(&self) -> rustix::io::Errno {
        match self {
            Self::Io { source, .. } => *source,
            Self::NoRoom { why, .. } => *why,
            Self::Spill(fault) => fault.errno(),
            Self::Distrusted { .. } => rustix::io::Errno::PERM,
            Self::Format { .. } => rustix::io::Errno::INVAL,
        }
    }
}
