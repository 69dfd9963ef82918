//! Types that identify a slab or a record in shared memory, and types with the contents of a record.
//!
//! The *arena* is shared memory with the bytes that are not in the backing directory yet. It is allocated in *chunks*,
//! which are divided into *slabs*. A *piece* is a range of a file's bytes in a slab. Its *record*, in the table of the
//! chunk, describes it. There is one record for each piece, so a [`PieceRef`] identifies both.

use firn_format::piece::Piece;

/// Identifies a slab by its chunk and its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlabRef {
    /// Index of the chunk.
    pub chunk: u32,
    /// Index of the slab in the chunk.
    pub slab: u32,
}

/// Identifies a piece and its record: by the slab and the index of the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PieceRef {
    /// The slab that holds the data.
    pub slab: SlabRef,
    /// Index of the record in the chunk's table.
    pub record: u32,
}

/// The fields of a new piece's record that its writer supplies.
#[derive(Clone, Copy, Debug)]
pub struct NewPiece {
    /// The id of the file.
    pub file_id: u64,
    /// Offset in the file.
    pub offset: u64,
    /// The piece's number in the order of all writes.
    pub sequence: u64,
    /// Time of the write, in nanoseconds since 1970.
    pub modified: u64,
}

/// A piece that the arena found when it was attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPiece {
    /// Where the record is.
    pub record: PieceRef,
    /// What the record says of the piece.
    pub piece: Piece,
    /// Time of the last write to the piece, in nanoseconds since 1970; 0 if unknown. No checksum covers this time.
    pub modified: u64,
}
