//! Cached bytes: bytes of files that were written to the backing, and that remain in memory to be read again.
//!
//! With the drain policy *demand*, drained bytes remain in the arena (the shared memory for written data) until the
//! arena is short of room, the file changes, or a request evicts them. Their records in the arena are marked as dead:
//! after a crash only the backing has these bytes.
//!
//! Invariants
//! * No range of a file is both cached and pending (not in the backing yet).
//! * All cached bytes are in the backing too.

mod evict;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::Arena;
use firn_backing::{Attr, Time};

use crate::extents::{Extent, Extents};

pub use evict::{EvictionResult, Pinned};

/// Size and modification time of a file in the backing.
#[derive(Clone, Copy, PartialEq, Eq)]
struct BackingStamp {
    size: u64,
    mtime: Time,
}

impl BackingStamp {
    fn from_attr(attr: &Attr) -> Self {
        Self {
            size: attr.size,
            mtime: attr.mtime,
        }
    }
}

/// Cached bytes of one file. A file without cached bytes, as most files are, uses one word of memory.
#[derive(Default)]
pub(crate) struct CachedBytes {
    cached: Option<Box<CachedExtents>>,
}

/// The extents of a file that has cached bytes.
struct CachedExtents {
    extents: Extents,
    bytes: u64,
    /// Sum of the cached bytes of all files.
    total: Arc<AtomicU64>,
    /// State of the backing's file when it was last known to contain the cached bytes. A different state later means
    /// that the file was changed beside the mount (by a program that does not use the mount). `None`: no state is known
    /// to compare with, and the cached bytes are used.
    backing_stamp: Option<BackingStamp>,
}

impl CachedExtents {
    fn new(total: &Arc<AtomicU64>) -> Self {
        Self {
            extents: Extents::default(),
            bytes: 0,
            total: Arc::clone(total),
            backing_stamp: None,
        }
    }
}

static NO_EXTENTS: Extents = Extents::NONE;

impl CachedBytes {
    /// Returns whether the file has no cached bytes.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes() == 0
    }

    /// Returns the number of cached bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.cached.as_ref().map_or(0, |cached| cached.bytes)
    }

    /// Returns where the cached bytes lie.
    pub(crate) fn extents(&self) -> &Extents {
        self.cached
            .as_ref()
            .map_or(&NO_EXTENTS, |cached| &cached.extents)
    }

    /// Returns the state that the backing's file must have for the cached bytes to be valid, if one is known.
    fn backing_stamp(&self) -> Option<BackingStamp> {
        self.cached.as_ref()?.backing_stamp
    }

    /// Keeps bytes of a file in memory as cached bytes, to be read again. The backing has these bytes too. They replace
    /// older cached bytes of the range.
    ///
    /// `extent` says where in the arena the bytes are. Their part of the arena remains in use until the extent is
    /// dropped. `total_bytes` counts the cached bytes of all files.
    pub(crate) fn insert(
        &mut self,
        arena: &Arena,
        total_bytes: &Arc<AtomicU64>,
        offset: u64,
        extent: Extent,
    ) {
        self.drop_range(arena, offset..offset + extent.len);
        let cached = self
            .cached
            .get_or_insert_with(|| Box::new(CachedExtents::new(total_bytes)));
        cached.bytes += extent.len;
        total_bytes.fetch_add(extent.len, Ordering::Relaxed);
        cached.extents.insert(offset, extent, &mut |_, _| {
            unreachable!("the range was just emptied")
        });
    }

    /// Drops the cached bytes of `range`. Returns their number.
    pub(crate) fn drop_range(&mut self, arena: &Arena, range: Range<u64>) -> u64 {
        let Some(cached) = &mut self.cached else {
            return 0;
        };
        let mut dropped = 0;
        cached.extents.remove(range, &mut |_, extent| {
            dropped += extent.len;
            arena.release_bytes(extent.piece.slab, extent.len);
            true
        });
        cached.bytes -= dropped;
        cached.total.fetch_sub(dropped, Ordering::Relaxed);
        dropped
    }

    /// Drops all cached bytes. Returns their number.
    pub(crate) fn drop_all(&mut self, arena: &Arena) -> u64 {
        let bytes = self.drop_range(arena, 0..u64::MAX);
        self.cached = None;
        bytes
    }

    /// Records that the backing's file contains the cached bytes while it has the size and time in `attr`.
    pub(crate) fn record_backing_version(&mut self, attr: &Attr) {
        if let Some(cached) = &mut self.cached {
            cached.backing_stamp = Some(BackingStamp::from_attr(attr));
        }
    }

    /// Makes the cached bytes valid for any size and time of the backing's file, because the mount itself has changed
    /// size or time.
    pub(crate) fn accept_backing_state(&mut self) {
        if let Some(cached) = &mut self.cached {
            cached.backing_stamp = None;
        }
    }
}
