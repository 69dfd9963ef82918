//! Bytes to checked structs and back: everything Firn stores or sends, and the kernel's table of mounts. No I/O.
//!
//! Each stored structure has its own module. Numbers are little-endian. docs/FORMAT.md describes the
//! bytes; a change here that an older firnd could misread raises [`superblock::VERSION`].

pub mod amount;
pub mod append;
pub mod clock;
pub mod data_socket;
pub mod durability;
pub mod geometry;
pub mod home;
pub mod journal;
pub mod mountinfo;
pub mod piece;
pub mod processor;
pub mod quote;
pub mod record;
pub mod sealed;
pub mod slab;
pub mod spill;
pub mod superblock;
pub mod tally;

/// Why bytes were not what they claim to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The first bytes are not Firn's.
    #[error("not a firn arena (the magic number is missing)")]
    Magic,
    /// Made by another version.
    #[error("arena format version {found}, this firn reads version {expected}")]
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
