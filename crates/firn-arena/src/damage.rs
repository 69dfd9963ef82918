//! The kinds of damage that the arena finds in its stored words and records.
//!
//! The *arena* is shared memory with the bytes that are not in the backing directory yet. It is allocated in *chunks*,
//! which are divided into *slabs*. A *piece* is a range of a file's bytes in a slab. The *home word* of a chunk says
//! where its data is, in memory or in the spill file.

use firn_format::FormatError;

use crate::refs::{PieceRef, SlabRef};

/// A stored word or record with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The class word of a chunk is invalid.
    #[error(
        "chunk {chunk}: class word {word:#010x} is invalid; the data of this chunk cannot be found"
    )]
    ClassWord {
        /// Index of the chunk.
        chunk: u32,
        /// The stored value of the word.
        word: u32,
    },
    /// The home word of a chunk is invalid for this chunk, so its data cannot be found.
    #[error(
        "chunk {chunk}: home word {word:#018x} is invalid; the data of this chunk cannot be found"
    )]
    HomeWord {
        /// Index of the chunk.
        chunk: u32,
        /// The stored value of the word.
        word: u64,
    },
    /// Pieces have their data in the spill file, and the data cannot be read.
    #[error(
        "chunk {chunk}: {pieces} pieces, {bytes} bytes, are in slot {slot} of the spill file and cannot be read: {reason}"
    )]
    Spill {
        /// Index of the chunk.
        chunk: u32,
        /// Index of the slot in the spill file.
        slot: u32,
        /// Number of the pieces.
        pieces: u64,
        /// Total bytes of these pieces.
        bytes: u64,
        /// What is wrong with the file.
        reason: String,
    },
    /// Pieces have their data in a memory file, and the data cannot be read.
    #[error(
        "chunk {chunk}: {pieces} pieces, {bytes} bytes, are in slot {slot} and cannot be read: {reason}"
    )]
    MemoryFile {
        /// Index of the chunk.
        chunk: u32,
        /// Index of the memory slot.
        slot: u32,
        /// Number of the pieces.
        pieces: u64,
        /// Total bytes of these pieces.
        bytes: u64,
        /// What is wrong with the file.
        reason: String,
    },
    /// The state word of a slab is invalid.
    #[error(
        "chunk {} slab {}: state word {word:#010x} is invalid; the slab's records were read nevertheless",
        slab.chunk,
        slab.slab
    )]
    SlabState {
        /// The damaged slab.
        slab: SlabRef,
        /// The stored value of the word.
        word: u32,
    },
    /// The publish counter of a slab exceeds the number of its records.
    #[error("chunk {} slab {}: publish counter {published} exceeds the slab's {max} records", slab.chunk, slab.slab)]
    PublishCounter {
        /// The damaged slab.
        slab: SlabRef,
        /// The stored value of the counter.
        published: u32,
        /// Number of records of the slab.
        max: u32,
    },
    /// A published record fails its check, so the bytes of its piece are lost.
    #[error("piece record {} of chunk {}: {error}; its data cannot be used", piece.record, piece.slab.chunk)]
    Piece {
        /// The damaged piece record.
        piece: PieceRef,
        /// The check that failed.
        error: FormatError,
    },
}
