//! Encodes and decodes all that Firn stores or sends, and parses the kernel's table of mounts. Makes no I/O.
//!
//! Each stored structure has a module. Decoding checks each field, so the decoded structs are valid. Numbers are
//! little-endian, unless a module says otherwise. docs/FORMAT.md describes the bytes. A change that an older firnd
//! could misread raises [`superblock::VERSION`].

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
mod page_field;
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

/// Returns the message for an arena of another version: which Firn made the arena, and what the user should do.
fn other_version(found: u32, expected: u32) -> String {
    let versions = format!("arena format version {found}, this firn reads version {expected}");
    if found < expected {
        format!(
            "left by an older Firn ({versions}): run `firn recover BACKING` of that version, then use this one; nothing is lost"
        )
    } else {
        format!("made by a newer Firn ({versions}): use that newer Firn; nothing is lost")
    }
}

/// Why bytes could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The magic number is missing.
    #[error("not a firn arena (the magic number is missing)")]
    Magic,
    /// Another version of Firn made the arena.
    #[error("{}", other_version(*found, *expected))]
    Version {
        /// Version in the file.
        found: u32,
        /// Version that this Firn reads.
        expected: u32,
    },
    /// A checksum does not match.
    #[error("{what}: checksum {found:#010x}, expected {expected:#010x}")]
    Checksum {
        /// Name of the structure.
        what: &'static str,
        /// Stored checksum.
        found: u32,
        /// Computed checksum.
        expected: u32,
    },
    /// The value of a field is not valid.
    #[error("{what}: {why}")]
    Field {
        /// Name of the structure.
        what: &'static str,
        /// What is wrong with the value.
        why: String,
    },
    /// There are fewer bytes than the structure needs.
    #[error("{what}: truncated ({found} bytes, {expected} needed)")]
    Truncated {
        /// Name of the structure.
        what: &'static str,
        /// Number of bytes.
        found: u64,
        /// Number of bytes needed.
        expected: u64,
    },
}
