//! The headers of a chunk and of its slabs, at the start of the chunk's piece table.
//!
//! The *arena* is shared memory with the bytes of files that are not in the backing directory yet. A *chunk* is the
//! unit in which it is allocated. It is divided into *slabs* of one class, and each slab is filled by one writer at a
//! time. A *piece* is a range of a file's bytes in a slab; its record is in the chunk's *piece table*.
//!
//! * Each field that changes while programs write is one word, so a crash never leaves half of a change.
//! * The values of a class or state differ from each other in many bits. So a flipped bit is recognized as damage, and
//!   not taken for another value.

/// Length of a chunk's header in bytes.
pub const CHUNK_HEADER_BYTES: u64 = 64;
/// Length of a slab's header in bytes.
pub const SLAB_HEADER_BYTES: u64 = 32;

/// Offsets of the words in a chunk header.
pub mod chunk_word {
    /// `u32`: [`super::Class`] of the chunk's slabs, or the word of a free chunk.
    pub const CLASS: u64 = 0;
    /// `u64`: [`crate::home::Home`] of the chunk's data, or 0. It has no meaning while the chunk is free.
    pub const HOME: u64 = 8;
    /// `u64`: a word of a memory slot (place for one chunk) that only shares the header: slot *i* has its word in the
    /// header of chunk *i*, though its data may belong to another chunk. It is the slot's
    /// [`crate::memory_file::MemoryFileLocation`], or 0 if the slot's bytes are in the arena's own file.
    pub const MEMORY_FILE_LOCATION: u64 = 16;
}

/// Offsets of the words in a slab header.
pub mod slab_word {
    /// `u32`: [`super::SlabState`].
    pub const STATE: u64 = 0;
    /// `u32`: number of published piece records.
    pub const PUBLISHED: u64 = 4;
    /// `u64`: generation, raised by each lease (a writer's right to fill the slab). The checksums of records cover it,
    /// so a record of an earlier lease is never valid.
    pub const GENERATION: u64 = 8;
    /// `u64`: [`super::writer_idle`] of the generation while a client (a process that fills the slab itself) has the
    /// lease, with [`super::WRITER_BUSY`] while it stores bytes; 0 if no client may store bytes.
    pub const WRITER: u64 = 16;
    /// `u32`: process id of the client that has the lease. It has a meaning only while [`WRITER`] is not 0.
    pub const CLIENT_PID: u64 = 24;
}

/// Bit of the word [`slab_word::WRITER`]: the client is storing bytes into the slab.
pub const WRITER_BUSY: u64 = 1;

/// Returns the word [`slab_word::WRITER`] of a leased slab while its client stores nothing.
pub fn writer_idle(generation: u64) -> u64 {
    generation << 1
}

/// How a chunk is divided into slabs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Slabs of 64 KiB.
    Small,
    /// Slabs of 512 KiB.
    Medium,
    /// One slab, as large as the chunk.
    Whole,
}

const CLASS_FREE: u32 = 0;
const CLASS_SMALL: u32 = 0x5af1_0c3e;
const CLASS_MEDIUM: u32 = 0xa3c6_59d1;
const CLASS_WHOLE: u32 = 0x3d98_a6e7;

impl Class {
    /// Encodes a class. `None` stands for a free chunk.
    pub fn to_word(class: Option<Self>) -> u32 {
        match class {
            None => CLASS_FREE,
            Some(Self::Small) => CLASS_SMALL,
            Some(Self::Medium) => CLASS_MEDIUM,
            Some(Self::Whole) => CLASS_WHOLE,
        }
    }

    /// Decodes the word of a class. Returns `None` for a free chunk. The error is the word, which is damaged.
    pub fn from_word(word: u32) -> Result<Option<Self>, u32> {
        match word {
            CLASS_FREE => Ok(None),
            CLASS_SMALL => Ok(Some(Self::Small)),
            CLASS_MEDIUM => Ok(Some(Self::Medium)),
            CLASS_WHOLE => Ok(Some(Self::Whole)),
            other => Err(other),
        }
    }

    /// Returns the length of a slab of this class in chunks of `chunk_bytes`.
    pub fn slab_bytes(self, chunk_bytes: u64) -> u64 {
        match self {
            Self::Small => chunk_bytes.min(super::geometry::SLAB_SMALL),
            Self::Medium => chunk_bytes.min(super::geometry::SLAB_MEDIUM),
            Self::Whole => chunk_bytes,
        }
    }
}

/// What a slab is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlabState {
    /// The slab is not in use. Its records do not count.
    Free,
    /// A writer fills the slab.
    Leased,
    /// The slab is full, or its writer returned it. Its pieces wait to be drained.
    Sealed,
}

const SLAB_FREE: u32 = 0;
const SLAB_LEASED: u32 = 0x6c65_6173;
const SLAB_SEALED: u32 = 0x9a1c_5e87;

impl SlabState {
    /// Encodes the state.
    pub fn to_word(self) -> u32 {
        match self {
            Self::Free => SLAB_FREE,
            Self::Leased => SLAB_LEASED,
            Self::Sealed => SLAB_SEALED,
        }
    }

    /// Decodes the word of a state. The error is the word, which is damaged.
    pub fn from_word(word: u32) -> Result<Self, u32> {
        match word {
            SLAB_FREE => Ok(Self::Free),
            SLAB_LEASED => Ok(Self::Leased),
            SLAB_SEALED => Ok(Self::Sealed),
            other => Err(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flipped_bit_never_turns_a_state_into_another() {
        let words = [CLASS_FREE, CLASS_SMALL, CLASS_MEDIUM, CLASS_WHOLE];
        for word in words {
            for bit in 0..32 {
                assert!(Class::from_word(word ^ (1 << bit)).is_err());
            }
        }
        for word in [SLAB_FREE, SLAB_LEASED, SLAB_SEALED] {
            for bit in 0..32 {
                assert!(SlabState::from_word(word ^ (1 << bit)).is_err());
            }
        }
    }
}
