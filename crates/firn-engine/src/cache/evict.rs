//! Eviction: drops cached bytes (which are in memory and in the backing) to make room, on request, or because a program
//! that does not use the mount has changed the file.
//!
//! A *pinned* file is evicted only on request or after such a change.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::{Backing, KernelReads, is_below};
use firn_format::slab::Class;

use super::BackingStamp;
use crate::Result;
use crate::file::{File, FileState};
use crate::space::Room;
use crate::view::refresh_view;

/// Result of [`Room::evict_tree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictionResult {
    /// Cached bytes that were dropped.
    pub freed_bytes: u64,
    /// Bytes that remain in the arena, because they are pending, or because a list of chunks or a memory file uses
    /// them.
    pub held_bytes: u64,
}

/// Result of [`Room::pin_tree`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Number of files.
    pub files: u64,
    /// Number of bytes of these files in the arena.
    pub bytes: u64,
}

impl<B: Backing> FileState<B> {
    /// Returns whether a list of chunks, or a reader of the file's memory file, relies on the places of the file's
    /// bytes.
    fn is_read_in_place(&self) -> bool {
        self.direct.has_chunk_lists() || self.view.is_some()
    }
}

impl<B: Backing> Room<B> {
    /// Adds a file of which a drain left cached bytes to the files that can be evicted.
    pub(crate) fn add_evictable_file(&self, file: &Arc<File<B>>) {
        self.space.evictable.add(file);
    }

    /// Evicts cached files until a slab of `class` (a part of the arena of this size) can be leased. Returns false if
    /// no file is left to evict and still no slab can be leased.
    pub(crate) fn evict_for(&self, class: Class) -> bool {
        self.evict_until(&|| self.base.arena.has_room(class))
    }

    /// Evicts the cached bytes of files (bytes that are in the arena and in the backing) until `enough` returns true.
    /// Returns false if no file is left to evict and `enough` still returns false.
    pub(crate) fn evict_until(&self, enough: &dyn Fn() -> bool) -> bool {
        // Each file is tried once: a file that cannot be evicted now is put back.
        let candidate_count = self.space.evictable.len();
        for _ in 0..candidate_count {
            if enough() {
                return true;
            }
            let Some(file) = self.space.evictable.pop() else {
                break;
            };
            let mut state = file.lock();
            // The bytes of a held list of chunks, or of a memory file in use, remain in memory, so an eviction makes no
            // room.
            if state.is_pinned || state.is_read_in_place() {
                drop(state);
                self.space.evictable.add(&file);
                continue;
            }
            self.evict(&mut state);
            // The table of files takes the file's lock itself.
            drop(state);
            self.open_files.drop_if_unused(&file);
        }
        enough()
    }

    /// Drops all cached bytes of a file, after making the lists that name them invalid. Returns the number of bytes.
    fn evict(&self, state: &mut FileState<B>) -> u64 {
        state.direct.invalidate_lists(&self.base.arena);
        let bytes = state.cache.drop_all(&self.base.arena);
        self.base
            .counters
            .evicted_bytes
            .fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// Returns the files at or below `path` that are open or have cached bytes. The empty path is the top of the mount.
    fn known_files_below(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        let is_below_path = |file: &Arc<File<B>>| {
            path.is_empty() || file.inode.paths().iter().any(|known| is_below(known, path))
        };
        let files = self.open_files.files.all();
        files.into_iter().filter(is_below_path).collect()
    }

    /// Evicts the cached bytes (which are in the arena and in the backing) at or below `path`, and unpins the files.
    /// Fails with ENOENT if no object has this path.
    pub fn evict_tree(&self, path: &[u8]) -> Result<EvictionResult> {
        self.check_path_exists(path)?;
        let mut evicted = EvictionResult {
            freed_bytes: 0,
            held_bytes: 0,
        };
        for file in self.known_files_below(path) {
            let mut state = file.lock();
            evicted.held_bytes += state.pending.bytes();
            state.is_pinned = false;
            if state.is_read_in_place() {
                // The cached bytes must remain in their places.
                evicted.held_bytes += state.cache.bytes();
                continue;
            }
            evicted.freed_bytes += self.evict(&mut state);
            // The table of files takes the file's lock itself.
            drop(state);
            self.open_files.drop_if_unused(&file);
        }
        self.wake_writers();
        Ok(evicted)
    }

    /// Pins or unpins the files that are at or below `path` now. The bytes of a pinned file remain in the arena
    /// (memory) after they are drained to the backing. Returns the number of files that have bytes there. Fails with
    /// ENOENT if no object has this path.
    pub fn pin_tree(&self, path: &[u8], is_pinned: bool) -> Result<Pinned> {
        self.check_path_exists(path)?;
        let mut pinned = Pinned { files: 0, bytes: 0 };
        for file in self.known_files_below(path) {
            let mut state = file.lock();
            let arena_bytes = state.pending.bytes() + state.cache.bytes();
            if arena_bytes == 0 {
                continue;
            }
            state.is_pinned = is_pinned;
            pinned.files += 1;
            pinned.bytes += arena_bytes;
        }
        Ok(pinned)
    }

    /// Fails with ENOENT if no object has this path.
    fn check_path_exists(&self, path: &[u8]) -> Result<()> {
        // The empty path is the top of the mount.
        if path.is_empty() {
            return Ok(());
        }
        self.tree.inode_at(path)?;
        Ok(())
    }

    /// Evicts the cached bytes of a file (kept in the arena after their drain) if a program that does not use the mount
    /// has changed the backing's file. Called at an open, and when other hosts may have changed the file.
    pub(crate) fn evict_if_backing_changed(&self, file: &Arc<File<B>>) -> Result<()> {
        if file.lock().cache.is_empty() {
            return Ok(());
        }
        let attr = self.base.backing.attr(&self.tree.object(&file.inode)?)?;
        // `KernelReads::Shared`: other hosts may write the file too, into logs beside it. The times of the file do not
        // show such writes, so it is always evicted.
        let may_be_written_by_other_hosts =
            self.open_files.kernel_reads(file) == KernelReads::Shared;
        let mut state = file.lock();
        let is_changed = |stamp| stamp != BackingStamp::from_attr(&attr);
        if may_be_written_by_other_hosts || state.cache.backing_stamp().is_some_and(is_changed) {
            state.changes += 1;
            self.evict(&mut state);
            // The lock is released, because the next call reads the file.
            drop(state);
            refresh_view(&self.intake, &self.open_files, file);
            self.wake_writers();
        }
        Ok(())
    }

    /// Records the state of the backing's file after the last pending byte was drained.
    pub(crate) fn confirm_cache(&self, file: &File<B>) {
        let attr = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.attr(&object));
        let mut state = file.lock();
        if let Ok(attr) = attr
            && state.pending.is_empty()
            && !state.cache.is_empty()
        {
            state.cache.record_backing_version(&attr);
        }
    }
}
