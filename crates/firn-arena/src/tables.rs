//! The piece tables: where each word of a chunk, a slab and a record lies in the mapping.
//!
//! Promise: each word of a table has its function here, so an offset is computed in one place. Words are atomics;
//! which order their stores need is said where they are stored.

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

    pub(crate) fn class_word(&self, chunk: u32) -> &AtomicU32 {
        self.map
            .u32(self.geometry.table_offset(chunk) + chunk_word::CLASS)
    }

    /// How a chunk is cut; `None`: it is free. The error is the word that says nothing.
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

    /// Where the slot of memory with this index is: the word lies in the table of the chunk of that index.
    pub(crate) fn memory_place(&self, slot: u32) -> &AtomicU64 {
        self.map
            .u64(self.geometry.table_offset(slot) + chunk_word::MEMORY_PLACE)
    }

    // ---- slabs -------------------------------------------------------------------------------

    fn slab_word(&self, slab: SlabRef, word: u64) -> u64 {
        self.geometry.slab_header_offset(slab.chunk, slab.slab) + word
    }

    pub(crate) fn state_word(&self, slab: SlabRef) -> &AtomicU32 {
        self.map.u32(self.slab_word(slab, slab_word::STATE))
    }

    /// The error is the word that says nothing.
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

    /// Records published in the slab's lease.
    pub(crate) fn published(&self, slab: SlabRef) -> &AtomicU32 {
        self.map.u32(self.slab_word(slab, slab_word::PUBLISHED))
    }

    /// The process that has the slab's lease.
    pub(crate) fn holder(&self, slab: SlabRef) -> &AtomicU32 {
        self.map.u32(self.slab_word(slab, slab_word::HOLDER))
    }

    /// Offset of the word in which a client says that it stores bytes.
    pub(crate) fn writer_offset(&self, slab: SlabRef) -> u64 {
        self.slab_word(slab, slab_word::WRITER)
    }

    pub(crate) fn writer(&self, slab: SlabRef) -> &AtomicU64 {
        self.map.u64(self.writer_offset(slab))
    }

    /// Slabs of a chunk that is cut so.
    pub(crate) fn slab_count(&self, class: Class) -> u32 {
        (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32
    }

    /// Bytes of a slab, from the start of its chunk.
    pub(crate) fn bytes_of(&self, class: Class, slab: u32) -> Range<u32> {
        let bytes = class.slab_bytes(self.geometry.chunk_bytes) as u32;
        slab * bytes..(slab + 1) * bytes
    }

    /// Records of a slab, in the table of its chunk.
    pub(crate) fn records_of(&self, class: Class, slab: u32) -> Range<u32> {
        let each = self.geometry.records_per_chunk() / self.slab_count(class);
        slab * each..(slab + 1) * each
    }

    // ---- records -----------------------------------------------------------------------------

    pub(crate) fn record_word(&self, at: PieceRef, word: u64) -> &AtomicU64 {
        debug_assert!(
            at.record < self.geometry.records_per_chunk(),
            "{at:?} is beyond the table of its chunk"
        );
        self.map
            .u64(self.geometry.record_offset(at.slab.chunk, at.record) + word)
    }

    pub(crate) fn seal(&self, at: PieceRef) -> &AtomicU64 {
        self.record_word(at, word::SEAL)
    }

    pub(crate) fn modified(&self, at: PieceRef) -> &AtomicU64 {
        self.record_word(at, word::MODIFIED)
    }

    /// A record as it stands, to be checked.
    pub(crate) fn load(&self, at: PieceRef) -> RawPiece {
        let seal = self.seal(at).load(Ordering::Acquire);
        let load = |word| self.record_word(at, word).load(Ordering::Relaxed);
        RawPiece {
            who: load(word::WHO),
            offset: load(word::OFFSET),
            place: load(word::PLACE),
            seal,
        }
    }
}
