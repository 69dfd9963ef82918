//! Drained bytes that stay in the arena to be read again.
//!
//! Where the policy is *demand*, what was drained keeps its place until the arena is short of room, the
//! file changes, or somebody evicts it. Its piece records are dead: after a crash it is gone, and only
//! the backing has it.
//!
//! Invariants
//! * A file's cached extents and its pending ones do not overlap.
//! * What is cached is in the backing too.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::Arena;
use firn_backing::{Attr, Backing, Time, is_below};
use firn_format::slab::Class;

use crate::Result;
use crate::engine::Engine;
use crate::extents::{Extent, Extents};
use crate::file::{File, FileState};

/// Of one file. A file that is held has none of it: it takes a word then.
#[derive(Default)]
pub(crate) struct Cached {
    parts: Option<Box<Parts>>,
    /// Not evicted to make room.
    pinned: bool,
}

struct Parts {
    extents: Extents,
    bytes: u64,
    /// Sum of the bytes of all files.
    total: Arc<AtomicU64>,
    /// Size and time of the backing's file when it was last known to hold the same; `None`: it does.
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

    /// Keeps an extent that is not pending any more. Its slab counts it as used until it is dropped.
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

    /// Drops what is cached of `range`; returns the bytes.
    pub(crate) fn drop_range(&mut self, arena: &Arena, range: Range<u64>) -> u64 {
        let Some(parts) = &mut self.parts else {
            return 0;
        };
        let mut gone = 0;
        parts.extents.remove(range, &mut |_, e| {
            gone += e.len;
            arena.release(e.piece.slab, e.len);
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

    /// The backing's file is as `attr` says, and holds what is cached.
    pub(crate) fn confirm(&mut self, attr: &Attr) {
        if let Some(parts) = &mut self.parts {
            parts.stamp = Some((attr.size, attr.mtime));
        }
    }

    /// What changes the file's times through the mount makes nothing stale.
    pub(crate) fn trust(&mut self) {
        if let Some(parts) = &mut self.parts {
            parts.stamp = None;
        }
    }
}

impl<B: Backing> Engine<B> {
    /// After a drain that left cached bytes.
    pub(crate) fn note_cached(&self, file: &Arc<File<B>>) {
        self.space.evictable.add(file);
    }

    /// Drops cached files until a slab of `class` can be leased; false where nothing is left to drop.
    pub(crate) fn evict_for(&self, class: Class) -> bool {
        self.evict_until(&|| self.arena.has_room(class))
    }

    /// Drops cached files until it is `enough`; whether it is.
    pub(crate) fn evict_until(&self, enough: &dyn Fn() -> bool) -> bool {
        // Each file once: those that cannot go now are put back.
        let candidates = self.space.evictable.len();
        for _ in 0..candidates {
            if enough() {
                return true;
            }
            let Some(file) = self.space.evictable.pop() else {
                break;
            };
            let mut state = file.lock();
            // Where a list of chunks is held, it would make no room.
            if state.cache.pinned || state.direct.has_chunk_lists() {
                drop(state);
                self.space.evictable.add(&file);
                continue;
            }
            self.evict(&mut state);
            drop(state);
            self.drop_if_unused(&file);
        }
        enough()
    }

    fn evict(&self, state: &mut FileState<B>) -> u64 {
        state.direct.invalidate_list(&self.arena);
        let bytes = state.cache.drop_all(&self.arena);
        self.counters
            .evicted_bytes
            .fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    fn cached_below(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        let files = self.files.all();
        let below = |file: &Arc<File<B>>| {
            path.is_empty() || file.inode.paths().iter().any(|known| is_below(known, path))
        };
        files.into_iter().filter(below).collect()
    }

    /// Frees the memory of drained data at or below `path`; returns the bytes freed and the bytes that
    /// stay because they are not drained, or because a list of chunks names them.
    pub fn evict_tree(&self, path: &[u8]) -> Result<(u64, u64)> {
        self.must_exist(path)?;
        let mut freed = 0;
        let mut stay = 0;
        for file in self.cached_below(path) {
            let mut state = file.lock();
            stay += state.pending.bytes();
            state.cache.pinned = false;
            if state.direct.has_chunk_lists() {
                stay += state.cache.bytes();
                continue;
            }
            freed += self.evict(&mut state);
            drop(state);
            self.drop_if_unused(&file);
        }
        self.wake_writers();
        Ok((freed, stay))
    }

    /// Keeps the files that are at or below `path` now in memory once they are drained (or no longer
    /// does); returns their number and bytes in memory.
    pub fn pin_tree(&self, path: &[u8], pinned: bool) -> Result<(u64, u64)> {
        self.must_exist(path)?;
        let mut files = 0;
        let mut bytes = 0;
        for file in self.cached_below(path) {
            let mut state = file.lock();
            let held = state.pending.bytes() + state.cache.bytes();
            if held == 0 {
                continue;
            }
            state.cache.pinned = pinned;
            files += 1;
            bytes += held;
        }
        Ok((files, bytes))
    }

    fn must_exist(&self, path: &[u8]) -> Result<()> {
        if path.is_empty() {
            Ok(())
        } else {
            self.find(path).map(drop)
        }
    }

    /// At open: what is cached goes if the backing's file was changed beside the mount.
    pub(crate) fn check_cache(&self, file: &File<B>) -> Result<()> {
        if file.lock().cache.is_empty() {
            return Ok(());
        }
        let attr = self.backing.attr(&self.object(&file.inode)?)?;
        let mut state = file.lock();
        if state
            .cache
            .stamp()
            .is_some_and(|stamp| stamp != (attr.size, attr.mtime))
        {
            state.changes += 1;
            self.evict(&mut state);
            drop(state);
            self.wake_writers();
        }
        Ok(())
    }

    /// After the last pending byte was drained: how the backing's file is now.
    pub(crate) fn confirm_cache(&self, file: &File<B>) {
        let attr = self
            .object(&file.inode)
            .and_then(|object| self.backing.attr(&object));
        let mut state = file.lock();
        if let Ok(attr) = attr
            && state.pending.is_empty()
            && !state.cache.is_empty()
        {
            state.cache.confirm(&attr);
        }
    }
}
