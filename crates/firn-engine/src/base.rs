//! The lowest part of an engine, which all other parts use: the backing, the arena, the journal, the policies and the
//! counters.
//!
//! Terms
//! * The *backing* is the directory that the mount serves; drained bytes go there.
//! * The *arena* is shared memory with the bytes that are not in the backing yet. The *journal* is its record of names
//!   of files, and of ranges that the backing has.
//! * A *slab* is a part of the arena that one writer fills. A *chunk* is a fixed part of the arena, and contains slabs.

use std::sync::Arc;

use firn_arena::{Arena, FileLocation as LocatedBytes};
use firn_backing::Backing;
use firn_format::data_socket::{Extent as ListedExtent, IN_MEMORY, IN_MEMORY_FILE, IN_SPILL};
use firn_format::geometry::{SLAB_MEDIUM, SLAB_SMALL};
use firn_format::slab::Class;

use crate::counters::Counters;
use crate::errors::ErrorLog;
use crate::extents::Extent;
use crate::file_events::FileEvents;
use crate::file_journal::FileJournal;
use crate::options::EngineOptions;

/// Data that all parts of an engine share.
pub struct Base<B: Backing> {
    pub(crate) backing: B,
    pub(crate) arena: Arena,
    pub(crate) options: EngineOptions,
    pub(crate) journal: FileJournal,
    pub(crate) counters: Counters,
    pub(crate) errors: ErrorLog,
    pub(crate) file_events: Arc<FileEvents<B>>,
}

impl<B: Backing> Base<B> {
    /// Returns where a client process finds the bytes of `extent` (a range of a file in the arena): in memory, in the
    /// spill file, or in a memory file. `offset` is the file offset of the extent. The bytes lie in one slab, which is
    /// a chunk (unit of the arena) or a part of one.
    ///
    /// Returns `None` if the bytes cannot be located, because the spill file is missing or damaged.
    pub(crate) fn locate_extent(&self, offset: u64, extent: Extent) -> Option<ListedExtent> {
        let located = self
            .arena
            .locate_bytes(extent.piece.slab, extent.position)?;
        // The numbers of the places are those of the data socket.
        let (place, position) = match located {
            LocatedBytes::Arena(position) => (IN_MEMORY, position),
            LocatedBytes::Spill(position) => (IN_SPILL, position),
            LocatedBytes::MemoryFile(_, position) => (IN_MEMORY_FILE, position),
        };
        Some(ListedExtent {
            offset,
            len: extent.len,
            at: position,
            chunk: extent.piece.slab.chunk,
            place,
        })
    }

    /// Returns the size class of the next slab for a writer that is expected to write `expected` bytes in all. A writer
    /// of few bytes gets a small slab, so that many small files fit. A writer of many bytes gets whole chunks, unless a
    /// chunk is more than the writer's share: otherwise writers would wait for whole chunks while partly used chunks
    /// have room.
    pub(crate) fn class_for(&self, expected: u64) -> Class {
        let share = self.arena.share_bytes();
        if expected >= 2 * SLAB_MEDIUM && self.arena.geometry().chunk_bytes <= share {
            Class::Whole
        } else if expected > SLAB_SMALL {
            Class::Medium
        } else {
            Class::Small
        }
    }

    /// Returns the number of new bytes for which a file is drained without a request. It is at most the share of a
    /// writer; otherwise the arena could fill up with files that have fewer new bytes.
    pub(crate) fn write_bytes_min(&self) -> u64 {
        let share = self.arena.share_bytes().max(SLAB_MEDIUM);
        self.options.drain_write_bytes_min.min(share)
    }
}
