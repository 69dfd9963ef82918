//! What every part of an engine stands on: the backing, the arena with its journal, the policies, and what is counted.

use std::sync::Arc;

use firn_arena::{Arena, Located as LocatedBytes};
use firn_backing::Backing;
use firn_format::data_socket::{Extent as Listed, IN_MEMORY, IN_MEMORY_FILE, IN_SPILL};
use firn_format::geometry::{SLAB_MEDIUM, SLAB_SMALL};
use firn_format::slab::Class;

use crate::counters::Counters;
use crate::errors::ErrorLog;
use crate::extents::Extent;
use crate::file_events::FileEvents;
use crate::file_journal::FileJournal;
use crate::options::EngineOptions;

/// The lowest part of an engine; the others share it.
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
    /// Where an extent is now, or `None` if the spill file is gone or damage hides the place.
    pub(crate) fn list(&self, offset: u64, extent: Extent) -> Option<Listed> {
        let (at, place) = match self
            .arena
            .locate_bytes(extent.piece.slab, extent.position)?
        {
            LocatedBytes::Arena(at) => (at, IN_MEMORY),
            LocatedBytes::Spill(at) => (at, IN_SPILL),
            LocatedBytes::MemoryFile(_, at) => (at, IN_MEMORY_FILE),
        };
        Some(Listed {
            offset,
            len: extent.len,
            at,
            chunk: extent.piece.slab.chunk,
            place,
        })
    }

    /// The class of slab for a writer that has `expected` bytes in all: small ones first, so that many small files fit,
    /// whole chunks for those that prove large, but no more than its share: writers that wait for whole chunks of others
    /// would stand still while these have room.
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

    /// Bytes of a file that are worth a write to the backing unasked: no more than the share of a writer, or the arena
    /// would be full of what is not.
    pub(crate) fn write_bytes_min(&self) -> u64 {
        let share = self.arena.share_bytes().max(SLAB_MEDIUM);
        self.options.drain_write_bytes_min.min(share)
    }
}
