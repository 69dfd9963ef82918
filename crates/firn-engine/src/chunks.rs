//! Lists of chunks: say where each byte of a file lies, for programs that map the arena (the shared memory for written
//! data) and the spill file themselves.
//!
//! Terms
//! * A *chunk* is a fixed part of the arena, which lies in memory or in the spill file. A *slab* is a chunk or a part
//!   of one that has the bytes of one file.
//! * A *memory file* is a file in memory with all bytes of one large file.
//! * A slab is *held* while its space must not be used again and its chunk must not move.
//!
//! Promises, as long as a [`HeldChunks`] exists
//! * Every listed part in memory or in the spill file keeps its place and its bytes, even if the file is written,
//!   truncated, drained, evicted or removed.
//! * [`HeldChunks::changed`] is true after the bytes or the length of the file were changed through the mount.
//!
//! The slabs of the parts are held ([`firn_arena::Arena::hold_slab_in_place`]), and the file's pending bytes are not
//! overwritten in place. Bytes that only the backing has cannot be held: after a read of such bytes, a reader checks
//! [`HeldChunks::changed`].

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_arena::SlabRef;
use firn_backing::{Backing, Errno, Kind};
use firn_format::data_socket::{Extent as ListedExtent, IN_MEMORY, IN_MEMORY_FILE};

use crate::Result;
use crate::base::Base;
use crate::engine::Engine;
use crate::extents::Extent;
use crate::file::{File, FileState};
use crate::names::Inode;
use crate::size::whole_size;

/// A part of a file, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListedPart {
    /// Bytes from the start of the file.
    pub offset: u64,
    /// Length in bytes, more than 0.
    pub bytes: u64,
    /// Where the bytes are.
    pub place: PartPlace,
    /// Position of the first byte, in bytes: from the start of the first chunk for [`PartPlace::Memory`], from the
    /// start of the file for the spill file, a memory file or the backing. 0 for a hole.
    pub at: u64,
    /// For memory and the spill file, index of the chunk. For a memory file, its number. Otherwise `None`.
    pub chunk: Option<u32>,
}

/// Where the bytes of a part are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartPlace {
    /// In the arena.
    Memory,
    /// In the spill file.
    Spill,
    /// In a memory file.
    MemoryFile,
    /// In the backing, which may have a hole there, or in memory that changes with the file. A program reads these
    /// bytes through the mount.
    Backing,
    /// In a hole: the bytes are zeros.
    Hole,
}

/// A list of chunks, with the holds that keep it valid. Dropping it releases the chunks.
pub struct HeldChunks<B: Backing> {
    engine: Arc<Engine<B>>,
    file: Arc<File<B>>,
    slabs: Vec<SlabRef>,
    /// Value of the file's change counter when the list was made.
    changes: u64,
    /// Number of the list's bytes that are in memory.
    memory_bytes: u64,
    /// Length of the file in bytes.
    file_size: u64,
}

impl<B: Backing> HeldChunks<B> {
    /// Lists where the bytes of the file at `path` are, without gap or overlap from offset 0 to its end. The slabs
    /// (parts of the arena) that the list names are held until the returned value is dropped: they keep their place and
    /// bytes. Waits for a truncation under way.
    ///
    /// Fails with EISDIR or EINVAL if `path` is not a regular file, and with EIO if pending parts of the file cannot be
    /// read.
    pub fn list_file(engine: &Arc<Engine<B>>, path: &[u8]) -> Result<(Self, Vec<ListedPart>)> {
        let inode = regular_file_at(engine, path)?;
        let file = engine
            .open_files
            .acquire_file_with(&inode, |state| state.direct.add_chunk_list());
        engine
            .base
            .counters
            .chunk_lists
            .fetch_add(1, Ordering::Relaxed);
        // From here on a drop of `held_chunks` releases all holds, also after an error.
        let mut held_chunks = Self {
            engine: Arc::clone(engine),
            file,
            slabs: Vec::new(),
            changes: 0,
            memory_bytes: 0,
            file_size: 0,
        };
        let parts = held_chunks.collect_parts(&inode)?;
        Ok((held_chunks, parts))
    }

    /// Holds the file's slabs, and returns the places of all its bytes. Records the length and the version of the file.
    fn collect_parts(&mut self, inode: &Inode<B>) -> Result<Vec<ListedPart>> {
        let engine = Arc::clone(&self.engine);
        let file = Arc::clone(&self.file);
        engine.room.evict_if_backing_changed(&file)?;
        // Waits for a truncation under way.
        let mut state = file.lock_without_exclusive_use();
        // Bytes that a client process has stored in the arena, without a request, belong to the list too.
        engine.intake.ingest_published(&file, &mut state);
        let pending_end = state.pending.end();
        self.changes = state.changes;
        // A view is a memory file that processes read in place. Each change of the file goes into it at once, so its
        // bytes cannot be held, and the list refers readers to the mount.
        let is_viewed = state.view.is_some();
        let arena_extents = if is_viewed {
            Vec::new()
        } else {
            self.hold_extents(&state)?
        };
        // The lock is released, because the next steps call the backing.
        drop(state);
        self.count_memory(&arena_extents);
        // All other bytes were in the backing before the lock was released, and `changed` shows a change since then.
        let attr = engine.base.backing.attr(&engine.tree.object(inode)?)?;
        let file_size = whole_size(&attr, pending_end);
        self.file_size = file_size;
        // Readers of a file with a view get all its bytes through the mount, as they get bytes of the backing.
        let backing_size = if is_viewed { file_size } else { attr.size };
        let base = &engine.base;
        Ok(base.list_all_parts(&arena_extents, backing_size, file_size))
    }

    /// Holds the slabs of the file (parts of the arena), so that they keep their place and bytes. Returns the file's
    /// extents in the arena (ranges with the place of their bytes), in the order of their offsets. `state` is the
    /// locked state of the file.
    ///
    /// Fails with EIO if pending bytes (which only the arena has) cannot be read from memory or from the spill file.
    fn hold_extents(&mut self, state: &FileState<B>) -> Result<Vec<ListedExtent>> {
        let base = &self.engine.base;
        let mut listed_extents = Vec::new();
        let mut held_slabs = HashSet::new();
        for (offset, extent) in state.extents_in_arena(0, usize::MAX) {
            let slab = extent.piece.slab;
            // The slab is held before its place is looked up, so that the place remains valid.
            if held_slabs.insert(slab) {
                base.arena.hold_slab_in_place(slab);
                self.slabs.push(slab);
            }
            let range = offset..offset + extent.len;
            if let Some(listed) = base.locate_if_readable(offset, extent) {
                listed_extents.push(listed);
            } else if state.pending.extents().covering(range).is_some() {
                // Pending bytes are nowhere else, so their loss is an error. An unreadable cached extent is left out,
                // because the backing has its bytes too.
                return Err(Errno::IO);
            }
        }
        Ok(listed_extents)
    }

    /// Adds the bytes of the list that are in memory to the counters of the mount, until the list is dropped.
    fn count_memory(&mut self, extents: &[ListedExtent]) {
        let in_memory = extents
            .iter()
            .filter(|extent| extent.place == IN_MEMORY || extent.place == IN_MEMORY_FILE);
        self.memory_bytes = in_memory.map(|extent| extent.len).sum();
        self.engine
            .base
            .counters
            .chunk_list_bytes
            .fetch_add(self.memory_bytes, Ordering::Relaxed);
    }

    /// Returns the length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.file_size
    }

    /// Returns the value of [`crate::FileFigures::changes`] when the list was made.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns whether the file was changed since the list was made. Also true while the kernel may write the backing
    /// file itself, which the engine does not see.
    pub fn changed(&self) -> bool {
        let mut state = self.file.lock();
        self.engine.intake.ingest_published(&self.file, &mut state);
        state.changes != self.changes
            || (state.opens.has_passthrough() && state.opens.has_writers())
    }
}

impl<B: Backing> Drop for HeldChunks<B> {
    /// Releases the slabs, the parts of the arena that the list names. A writer may wait for their space.
    fn drop(&mut self) {
        self.file.lock().direct.remove_chunk_list();
        for slab in self.slabs.drain(..) {
            self.engine.base.arena.unhold_slab(slab);
        }
        self.engine
            .base
            .counters
            .chunk_lists
            .fetch_sub(1, Ordering::Relaxed);
        self.engine
            .base
            .counters
            .chunk_list_bytes
            .fetch_sub(self.memory_bytes, Ordering::Relaxed);
        self.engine.open_files.drop_if_unused(&self.file);
        self.engine.room.wake_writers();
    }
}

impl<B: Backing> Base<B> {
    /// Returns where an extent of a file lies. Returns `None` if its bytes cannot be located or read.
    fn locate_if_readable(&self, offset: u64, extent: Extent) -> Option<ListedExtent> {
        let listed = self.locate_extent(offset, extent)?;
        if !self.arena.is_readable(extent.piece.slab.chunk) {
            return None;
        }
        Some(listed)
    }

    /// Lists all `file_size` bytes of a file: its extents in the arena (ranges in shared memory), and the gaps between
    /// them, which are in the backing or zero. The caller must hold the slabs of the extents, so that their bytes keep
    /// their places.
    fn list_all_parts(
        &self,
        arena_extents: &[ListedExtent],
        backing_size: u64,
        file_size: u64,
    ) -> Vec<ListedPart> {
        let mut parts = Vec::new();
        let mut listed_end = 0;
        for extent in arena_extents {
            push_gap(&mut parts, listed_end..extent.offset, backing_size);
            listed_end = extent.offset + extent.len;
            push_part(&mut parts, self.list_part(extent));
        }
        push_gap(&mut parts, listed_end..file_size, backing_size);
        parts
    }

    /// Converts an extent of the arena (a file range and the place of its bytes) to a part of a list of chunks. The
    /// caller must hold the slab with the bytes, so that they keep their place.
    fn list_part(&self, extent: &ListedExtent) -> ListedPart {
        let part_in_spill_file = ListedPart {
            offset: extent.offset,
            bytes: extent.len,
            place: PartPlace::Spill,
            at: extent.at,
            chunk: Some(extent.chunk),
        };
        match extent.place {
            IN_MEMORY => ListedPart {
                place: PartPlace::Memory,
                // An extent counts from the start of the arena, but a part from the start of the first chunk.
                at: extent.at - self.arena.geometry().data_offset(),
                ..part_in_spill_file
            },
            IN_MEMORY_FILE => {
                let (memory_file, _) = self
                    .arena
                    .memory_file_of(extent.chunk)
                    .expect("the chunk of a held slab does not move");
                ListedPart {
                    place: PartPlace::MemoryFile,
                    // For this place, the field is the number of the memory file.
                    chunk: Some(u32::from(memory_file.number())),
                    ..part_in_spill_file
                }
            }
            // An extent of the arena is in memory, in a memory file, or in the spill file (`IN_SPILL`).
            _ => part_in_spill_file,
        }
    }
}

/// Returns the inode of the regular file at `path`. Fails with EISDIR or EINVAL if another object has this path.
fn regular_file_at<B: Backing>(engine: &Engine<B>, path: &[u8]) -> Result<Arc<Inode<B>>> {
    let inode = engine.tree.inode_at(path)?;
    match inode.kind {
        Kind::File => Ok(inode),
        Kind::Dir => Err(Errno::ISDIR),
        _ => Err(Errno::INVAL),
    }
}

/// Adds a part. A part that continues the last one is joined with it.
fn push_part(parts: &mut Vec<ListedPart>, part: ListedPart) {
    if let Some(last) = parts.last_mut()
        && (last.place, last.chunk) == (part.place, part.chunk)
        && last.offset + last.bytes == part.offset
        && last.at + last.bytes == part.at
    {
        last.bytes += part.bytes;
        return;
    }
    parts.push(part);
}

/// Adds a range without bytes in the arena (shared memory) to the list. It consists of bytes of the backing, up to the
/// size of the backing's file, and of zeros after them.
fn push_gap(parts: &mut Vec<ListedPart>, gap: Range<u64>, backing_size: u64) {
    let hole_start = backing_size.clamp(gap.start, gap.end);
    if gap.start < hole_start {
        let in_backing = ListedPart {
            offset: gap.start,
            bytes: hole_start - gap.start,
            place: PartPlace::Backing,
            at: gap.start,
            chunk: None,
        };
        push_part(parts, in_backing);
    }
    if hole_start < gap.end {
        let hole = ListedPart {
            offset: hole_start,
            bytes: gap.end - hole_start,
            place: PartPlace::Hole,
            at: 0,
            chunk: None,
        };
        push_part(parts, hole);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backing(offset: u64, bytes: u64) -> ListedPart {
        ListedPart {
            offset,
            bytes,
            place: PartPlace::Backing,
            at: offset,
            chunk: None,
        }
    }

    fn hole(offset: u64, bytes: u64) -> ListedPart {
        ListedPart {
            offset,
            bytes,
            place: PartPlace::Hole,
            at: 0,
            chunk: None,
        }
    }

    fn memory(offset: u64, bytes: u64, at: u64, chunk: u32) -> ListedPart {
        ListedPart {
            offset,
            bytes,
            place: PartPlace::Memory,
            at,
            chunk: Some(chunk),
        }
    }

    #[test]
    fn what_the_arena_lacks_is_in_the_backing_up_to_its_end() {
        let list_gap = |gap, backing_size| {
            let mut parts = Vec::new();
            push_gap(&mut parts, gap, backing_size);
            parts
        };
        assert_eq!(list_gap(0..10, 10), [backing(0, 10)]);
        assert_eq!(list_gap(4..10, 7), [backing(4, 3), hole(7, 3)]);
        assert_eq!(list_gap(4..10, 3), [hole(4, 6)]);
        assert_eq!(list_gap(4..10, 99), [backing(4, 6)]);
        assert_eq!(list_gap(4..4, 99), []);
    }

    #[test]
    fn runs_are_joined_within_a_chunk_only() {
        let mut parts = Vec::new();
        for part in [
            memory(0, 5, 100, 1),
            memory(5, 5, 105, 1),
            memory(10, 5, 110, 2),
            memory(15, 5, 120, 2),
        ] {
            push_part(&mut parts, part);
        }
        assert_eq!(
            parts,
            [
                memory(0, 10, 100, 1),
                memory(10, 5, 110, 2),
                memory(15, 5, 120, 2)
            ]
        );
    }
}
