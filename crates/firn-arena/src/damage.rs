//! What can be wrong with the words and records of an arena.

use firn_format::FormatError;

use crate::refs::{PieceRef, SlabRef};

/// A word or record that is not what it can be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// A chunk whose class is none.
    #[error("chunk {chunk}: class word {word:#010x} is none; its pieces cannot be found")]
    Chunk {
        /// Index.
        chunk: u32,
        /// Stored.
        word: u32,
    },
    /// A chunk whose data cannot be found.
    #[error(
        "chunk {chunk}: home word {word:#018x} is none of its own; the data of its pieces cannot be found"
    )]
    Home {
        /// Index.
        chunk: u32,
        /// Stored.
        word: u64,
    },
    /// Pieces whose data the spill file should have.
    #[error(
        "chunk {chunk}: {pieces} pieces, {bytes} bytes, are in slot {slot} of the spill file and cannot be read: {why}"
    )]
    Spill {
        /// Index.
        chunk: u32,
        /// In the spill file.
        slot: u32,
        /// How many.
        pieces: u64,
        /// Of them all.
        bytes: u64,
        /// What is wrong with the file.
        why: String,
    },
    /// Pieces whose data a memory file should have.
    #[error(
        "chunk {chunk}: {pieces} pieces, {bytes} bytes, are in slot {slot} and cannot be read: {why}"
    )]
    MemoryFile {
        /// Index.
        chunk: u32,
        /// Of memory.
        slot: u32,
        /// How many.
        pieces: u64,
        /// Of them all.
        bytes: u64,
        /// What is wrong with the file.
        why: String,
    },
    /// A slab whose state is none.
    #[error("chunk {} slab {}: state word {word:#010x} is none; its records were read all the same", slab.chunk, slab.slab)]
    Slab {
        /// Which.
        slab: SlabRef,
        /// Stored.
        word: u32,
    },
    /// A publish counter beyond the table.
    #[error("chunk {} slab {}: publish counter {published} exceeds {max}", slab.chunk, slab.slab)]
    Count {
        /// Which.
        slab: SlabRef,
        /// Stored.
        published: u32,
        /// Records that the slab has.
        max: u32,
    },
    /// A published record that fails its check: its bytes are lost.
    #[error("piece record {} of chunk {}: {error}; its data cannot be used", piece.record, piece.slab.chunk)]
    Piece {
        /// Which.
        piece: PieceRef,
        /// Why.
        error: FormatError,
    },
}
