//! The arena: a fixed-size shared-memory file with the bytes that are not yet in the *backing*, the directory that a
//! mount serves. *firnd* is the process that serves the mount. The arena outlives every process.
//!
//! Layout, from large to small
//! * The file has a superblock, a journal, a table for each chunk, and *slots* of memory of equal size.
//! * A *chunk* has its data in one slot, of memory or of the spill file, and its piece records in its table.
//! * A chunk is cut into *slabs* of one class. A writer leases a slab and fills it.
//! * A *piece* is a range of a file's bytes in a slab; its record names the file, the offset and the length.
//!
//! Promises
//! * [`Arena::attach`] finds each piece that was published ([`Arena::publish_piece`], [`Arena::extend_piece`]) with all
//!   its bytes, after the death of every process.
//! * This also holds for chunks in the spill file ([`Arena::spill_oldest`]). A read that the spill file cannot serve
//!   is an error, never other bytes.
//! * Numbers that are read from the file are checked. Damage is reported and never interpreted.
//!
//! Relies on
//! * The file lies on a file system whose pages survive processes (tmpfs, hugetlbfs, DAX).
//! * At most one firnd has the arena attached at a time (the daemon's lock).

mod arena;
mod attach;
mod callbacks;
mod check;
mod client;
mod create;
mod damage;
mod homes;
pub mod journal;
mod lease;
mod lingering;
pub mod live;
mod map;
mod memory_files;
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

use firn_format::quantity::bytes;

pub use arena::Arena;
pub use check::{Report, check};
pub use client::{AcceptedBytes, ClientLease, InvalidRecord};
pub use create::Identity;
pub use damage::Damage;
pub use lease::Lease;
pub use map::JournalRegion;
#[cfg(feature = "probe")]
pub use map::set_probe;
pub use memory_files::{MemoryFile, MemoryFileFigures, remove_memory_files};
pub use moves::{FileLocation, PieceBytes, SpillFigures, SpillOutcome};
pub use pool::NumaNodeFigures;
pub use refs::{NewPiece, PieceRef, SlabRef, StoredPiece};
pub use spill::{SpillFault, SpillFile};
pub use topology::{SYSFS_NODES, Topology};

/// Why an arena could not be created or attached.
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
    /// The file system has too little room.
    #[error("{}", describe_no_room(path, *arena_bytes, *need, *reason, *room))]
    NoRoom {
        /// The file.
        path: String,
        /// Bytes for slots that were requested: the option `arena-size`.
        arena_bytes: u64,
        /// Bytes that the file needs in all.
        need: u64,
        /// The errno of the failed call.
        reason: rustix::io::Errno,
        /// The room that the file system has, if it is full.
        room: Option<FreeSpace>,
    },
    /// The spill file cannot be created or opened.
    #[error(transparent)]
    Spill(#[from] SpillFault),
    /// The file is not a regular file, or another user could have made or changed it.
    #[error(
        "arena {path} {reason}; Firn reads nothing from it: remove it, or choose another directory with arena-dir"
    )]
    Distrusted {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: firn_trust::Distrust,
    },
    /// The file's contents are not an arena that this version can use.
    #[error("{path}: {source}")]
    Format {
        /// The file.
        path: String,
        /// What is wrong.
        source: firn_format::FormatError,
    },
}

/// The room of a file system in which an arena does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreeSpace {
    /// Free bytes before the attempt.
    pub free_bytes: u64,
    /// The largest `arena-size` that would fit, with some room for the journal to grow. `None`: not even one chunk
    /// fits.
    pub fitting_bytes: Option<u64>,
}

/// Returns the message for [`ArenaError::NoRoom`]: what the arena, a file of shared memory, needs, what is free, and
/// what to do. `room` is known only if the file system is full.
fn describe_no_room(
    path: &str,
    arena_bytes: u64,
    need: u64,
    reason: rustix::io::Errno,
    room: Option<FreeSpace>,
) -> String {
    let size = size_option(arena_bytes);
    let need = bytes(need);
    let Some(room) = room else {
        return format!(
            "{path}: {size} needs {need} ({reason}): lower arena-size (--memory), or put the arena elsewhere with arena-dir"
        );
    };
    let dir = path.rsplit_once('/').map_or(path, |(dir, _)| dir);
    let free = bytes(room.free_bytes);
    let smaller_size_hint = match room.fitting_bytes {
        Some(fitting_bytes) => format!("mount with -o {}, ", size_option(fitting_bytes)),
        None => String::new(),
    };
    format!(
        "{size} needs {need} in {dir}, which has {free} free: {smaller_size_hint}enlarge that file system (in a container: \
         docker run --shm-size=1g), or put the arena elsewhere with arena-dir"
    )
}

/// Writes a size as the option `arena-size`, in MiB if it is a whole number of them, else in KiB.
fn size_option(size_bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    if size_bytes.is_multiple_of(MIB) {
        format!("arena-size={}M", size_bytes / MIB)
    } else {
        format!("arena-size={}K", size_bytes >> 10)
    }
}

impl ArenaError {
    /// Returns the errno that fits the error best.
    pub fn errno(&self) -> rustix::io::Errno {
        match self {
            Self::Io { source, .. } => *source,
            Self::NoRoom { reason, .. } => *reason,
            Self::Spill(fault) => fault.errno(),
            Self::Distrusted { .. } => rustix::io::Errno::PERM,
            Self::Format { .. } => rustix::io::Errno::INVAL,
        }
    }
}

#[cfg(test)]
mod error_tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn an_arena_that_does_not_fit_says_which_would() {
        let error = |fitting_bytes| {
            let room = FreeSpace {
                free_bytes: 64 << 20,
                fitting_bytes,
            };
            let path = "/dev/shm/firn-0/1.arena";
            describe_no_room(path, 256 << 20, 259 << 20, Errno::NOSPC, Some(room))
        };
        let text = error(Some(52 << 20));
        assert!(
            text.starts_with(
                "arena-size=256M needs 259.0 MiB in /dev/shm/firn-0, which has 64.0 MiB free: mount with -o arena-size=52M, "
            ),
            "{text}"
        );
        assert!(!error(None).contains("mount with -o"));
        assert_eq!(size_option(192 << 10), "arena-size=192K");
    }
}
