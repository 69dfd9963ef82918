//! Names of slabs and piece records, and what is found in a record.

use firn_format::piece::Piece;

/// One slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlabRef {
    /// Index of the chunk.
    pub chunk: u32,
    /// Index of the slab in it.
    pub slab: u32,
}

/// One piece record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PieceRef {
    /// The slab that holds the data.
    pub slab: SlabRef,
    /// Index of the record in the chunk's table.
    pub record: u32,
}

/// A piece found at attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Where its record is.
    pub at: PieceRef,
    /// What it says.
    pub piece: Piece,
    /// Time of the last write to it, nanoseconds since 1970; 0: unknown. No checksum covers it.
    pub modified: u64,
}
