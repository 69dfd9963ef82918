//! Gives access to the words of the piece tables, in which the arena records what its memory contains.
//!
//! The *arena* is shared memory with the bytes that are not in the backing directory yet. It is allocated in *chunks*,
//! and each chunk has a table. A chunk is divided into *slabs*, each filled by one writer. A *piece* is a range of a
//! file's bytes in a slab. The table has words for the chunk, for each slab and for each piece (its *record*).
//!
//! Promise: each word of a table has one accessor in this module, so each offset is computed in one place. The words
//! are atomics. A caller that stores a word states the memory order that the store needs.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::geometry::Geometry;
use firn_format::piece::{RawPiece, word};
use firn_format::slab::{Class, SlabState, chunk_word, slab_word};

use crate::map::Map;
use crate::refs::{PieceRef, SlabRef};

/// The piece tables of an arena.
#[derive(Clone)]
pub(crate) struct Tables {
    map: Arc<Map>,
    geometry: Geometry,
}

impl Tables {
    pub(crate) fn new(map: &Arc<Map>, geometry: Geometry) -> Self {
        Self {
            map: Arc::clone(map),
            geometry,
        }
    }

    pub(crate) fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    pub(crate) fn map(&self) -> &Map {
        &self.map
    }

    // ---- chunks ------------------------------------------------------------------------------

    fn class_word(&self, chunk: u32) -> &AtomicU32 {
        self.map
            .u32(self.geometry.table_offset(chunk) + chunk_word::CLASS)
    }

    /// Returns the class of a chunk, which gives the size of its slabs.
    ///
    /// Returns `None` if the chunk is free. If the stored word is not valid, the error is that word.
    pub(crate) fn class(&self, chunk: u32) -> Result<Option<Class>, u32> {
        Class::from_word(self.class_word(chunk).load(Ordering::Acquire))
    }

    pub(crate) fn set_class(&self, chunk: u32, class: Option<Class>) {
        self.class_word(chunk)
            .store(Class::to_word(class), Ordering::Release);
    }

    pub(crate) fn home(&self, chunk: u32) -> &AtomicU64 {
        self.map
            .u64(self.geometry.table_offset(chunk) + chunk_word::HOME)
    }

    /// Returns the location word of a memory slot, which says which file has the slot's bytes.
    ///
    /// The word is in the table of the chunk with the same index, though the slot may belong to another chunk.
    pub(crate) fn location_word(&self, slot: u32) -> &AtomicU64 {
        self.map
            .u64(self.geometry.table_offset(slot) + chunk_word::MEMORY_FILE_LOCATION)
    }

    // ---- slabs -------------------------------------------------------------------------------

    fn slab_word(&self, slab: SlabRef, word: u64) -> u64 {
        self.geometry.slab_header_offset(slab.chunk, slab.slab) + word
    }

    fn state_word(&self, slab: SlabRef) -> &AtomicU32 {
        self.map.u32(self.slab_word(slab, slab_word::STATE))
    }

    /// Returns the state of a slab. If the stored word is not valid, the error is that word.
    pub(crate) fn state(&self, slab: SlabRef) -> Result<SlabState, u32> {
        SlabState::from_word(self.state_word(slab).load(Ordering::Acquire))
    }

    pub(crate) fn set_state(&self, slab: SlabRef, state: SlabState) {
        self.state_word(slab)
            .store(state.to_word(), Ordering::Release);
    }

    pub(crate) fn generation(&self, slab: SlabRef) -> &AtomicU64 {
        self.map.u64(self.slab_word(slab, slab_word::GENERATION))
    }

    /// Returns the counter of records published under the slab's lease.
    pub(crate) fn published(&self, slab: SlabRef) -> &AtomicU32 {
        self.map.u32(self.slab_word(slab, slab_word::PUBLISHED))
    }

    /// Returns the word with the id of the client process that holds the slab's lease.
    pub(crate) fn client_pid(&self, slab: SlabRef) -> &AtomicU32 {
        self.map.u32(self.slab_word(slab, slab_word::CLIENT_PID))
    }

    /// Returns the offset of the word in which a client marks that it is storing bytes.
    pub(crate) fn writer_offset(&self, slab: SlabRef) -> u64 {
        self.slab_word(slab, slab_word::WRITER)
    }

    pub(crate) fn writer(&self, slab: SlabRef) -> &AtomicU64 {
        self.map.u64(self.writer_offset(slab))
    }

    /// Returns the number of slabs in a chunk of this class.
    pub(crate) fn slab_count(&self, class: Class) -> u32 {
        (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32
    }

    /// Returns the byte range of a slab, relative to the start of its chunk.
    pub(crate) fn bytes_of(&self, class: Class, slab: u32) -> Range<u32> {
        let bytes = class.slab_bytes(self.geometry.chunk_bytes) as u32;
        slab * bytes..(slab + 1) * bytes
    }

    /// Returns the indexes of a slab's records in the table of its chunk.
    pub(crate) fn records_of(&self, class: Class, slab: u32) -> Range<u32> {
        let each = self.geometry.records_per_chunk() / self.slab_count(class);
        slab * each..(slab + 1) * each
    }

    // ---- records -----------------------------------------------------------------------------

    /// Returns the word of a piece record at the byte offset `word` in the record.
    pub(crate) fn record_word(&self, record: PieceRef, word: u64) -> &AtomicU64 {
        debug_assert!(
            record.record < self.geometry.records_per_chunk(),
            "{record:?} is beyond the table of its chunk"
        );
        self.map.u64(
            self.geometry
                .record_offset(record.slab.chunk, record.record)
                + word,
        )
    }

    pub(crate) fn seal(&self, record: PieceRef) -> &AtomicU64 {
        self.record_word(record, word::SEAL)
    }

    pub(crate) fn modified(&self, record: PieceRef) -> &AtomicU64 {
        self.record_word(record, word::MODIFIED)
    }

    /// Loads a record without checking it. The caller must check the record.
    pub(crate) fn load(&self, record: PieceRef) -> RawPiece {
        let seal = self.seal(record).load(Ordering::Acquire);
        let load = |word| self.record_word(record, word).load(Ordering::Relaxed);
        RawPiece {
            file_word: load(word::FILE),
            offset: load(word::OFFSET),
            position_word: load(word::POSITION),
            seal,
        }
    }
}
