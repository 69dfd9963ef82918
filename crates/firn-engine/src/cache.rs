//! Cached bytes: drained bytes that stay in the arena to be read again.
//!
//! With the drain policy *demand*, drained bytes keep their place until the arena is short of room, the file changes,
//! or a request evicts them. Their piece records are dead: after a crash only the backing has these bytes.
//!
//! Invariants
//! * A file's cached extents and its pending ones do not overlap.
//! * All cached bytes are in the backing too.

mod evict;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::Arena;
use firn_backing::{Attr, Time};

use crate::extents::{Extent, Extents};

/// Cached bytes of one file. Without any it takes one word of memory, as most files have none.
#[derive(Default)]
pub(crate) struct Cached {
    parts: Option<Box<Parts>>,
}

struct Parts {
    extents: Extents,
    bytes: u64,
    /// Sum of the cached bytes of all files.
    total: Arc<AtomicU64>,
    /// Size and time that the backing's file had when it was last known to have the cached bytes. `None`: it is
    /// trusted to have them.
    stamp: Option<(u64, Time)>,
}

impl Parts {
    fn new(total: &Arc<AtomicU64>) -> Self {
        Self {
            extents: Extents::default(),
            bytes: 0,
            total: Arc::clone(total),
            stamp: None,
        }
    }
}

static NO_EXTENTS: Extents = Extents::NONE;

impl Cached {
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes() == 0
    }
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.as_ref().map_or(0, |parts| parts.bytes)
    }
    pub(crate) fn extents(&self) -> &Extents {
        self.parts
            .as_ref()
            .map_or(&NO_EXTENTS, |parts| &parts.extents)
    }
    fn stamp(&self) -> Option<(u64, Time)> {
        self.parts.as_ref()?.stamp
    }

    /// Caches an extent that is not pending any more. Its bytes in the slab stay in use until it is dropped.
    pub(crate) fn insert(
        &mut self,
        arena: &Arena,
        total: &Arc<AtomicU64>,
        offset: u64,
        extent: Extent,
    ) {
        self.drop_range(arena, offset..offset + extent.len);
        let parts = self
            .parts
            .get_or_insert_with(|| Box::new(Parts::new(total)));
        parts.bytes += extent.len;
        total.fetch_add(extent.len, Ordering::Relaxed);
        parts.extents.insert(offset, extent, &mut |_, _| {
            unreachable!("the range was just emptied")
        });
    }

    /// Drops the cached bytes of `range`. Returns their number.
    pub(crate) fn drop_range(&mut self, arena: &Arena, range: Range<u64>) -> u64 {
        let Some(parts) = &mut self.parts else {
            return 0;
        };
        let mut gone = 0;
        parts.extents.remove(range, &mut |_, e| {
            gone += e.len;
            arena.release_bytes(e.piece.slab, e.len);
            true
        });
        parts.bytes -= gone;
        parts.total.fetch_sub(gone, Ordering::Relaxed);
        gone
    }

    pub(crate) fn drop_all(&mut self, arena: &Arena) -> u64 {
        let bytes = self.drop_range(arena, 0..u64::MAX);
        self.parts = None;
        bytes
    }

    /// Records that the backing's file has the cached bytes, with the size and time in `attr`.
    pub(crate) fn confirm(&mut self, attr: &Attr) {
        if let Some(parts) = &mut self.parts {
            parts.stamp = Some((attr.size, attr.mtime));
        }
    }

    /// Trusts the cached bytes, after a change of the file's times through the mount.
    pub(crate) fn trust(&mut self) {
        if let Some(parts) = &mut self.parts {
            parts.stamp = None;
        }
    }
}
