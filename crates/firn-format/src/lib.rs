//! Bytes to checked structs and back: everything Firn stores or sends, and the kernel's table of mounts. No I/O.
//!
//! Each stored structure has its own module. Numbers are little-endian. docs/FORMAT.md describes the
//! bytes; a change here that an older firnd could misread raises [`superblock::VERSION`].

pub mod append;
pub mod clock;
pub mod data_socket;
pub mod durability;
pub mod geometry;
pub mod histogram;
pub mod home;
pub mod journal;
pub mod live;
pub mod memory_file;
pub mod mountinfo;
pub mod piece;
pub mod processor;
pub mod quantity;
pub mod quote;
pub mod record;
pub mod sealed;
pub mod slab;
pub mod spill;
pub mod step;
pub mod superblock;
pub mod tally;

/// What to do with an arena that another version made.
fn other_version(found: u32, expected: u32) -> String {
    let versions = format!("arena format version {found}, this firn reads version {expected}");
    if found < expected {
        format!(
            "left by an older Firn ({versions}): run `firn recover BACKING` of that version, then this one; nothing is lost"
        )
    } else {
        format!("made by a newer Firn ({versions}): use that one; nothing is lost")
    }
}

/// Why bytes were not what they claim to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The first bytes are not Firn's.
    #[error("not a firn arena (the magic number is missing)")]
    Magic,
    /// Made by another version.
    #[error("{}", other_version(*found, *expected))]
    Version {
        /// In the file.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// A checksum does not match.
    #[error("{what}: checksum {found:#010x}, expected {expected:#010x}")]
    Checksum {
        /// Which structure.
        what: &'static str,
        /// Stored.
        found: u32,
        /// Computed.
        expected: u32,
    },
    /// A field holds what cannot be.
    #[error("{what}: {why}")]
    Field {
        /// Which structure.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Fewer bytes than the structure needs.
    #[error("{what}: truncated ({found} bytes, {expected} needed)")]
    Truncated {
        /// Which structure.
        what: &'static str,
        /// Bytes there.
        found: u64,
        /// Bytes needed.
        expected: u64,
    },
}
