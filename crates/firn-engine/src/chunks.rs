//! Lists of chunks: where each byte of a file lies, for programs that map the arena and the spill file themselves.
//!
//! Promises, as long as a [`HeldChunks`] exists
//! * Every listed part in memory or in the spill file keeps its place and its bytes, even if the file is written,
//!   truncated, drained, evicted or removed.
//! * [`HeldChunks::changed`] is true after the bytes or the length of the file were changed through the mount.
//!
//! The slabs of the parts are held ([`firn_arena::Arena::hold_slab`]). So their space is not used again, and their
//! chunks do not move. The file's pending bytes are not overwritten in place. Bytes that only the backing has cannot be
//! held: after a read of such bytes, a reader checks [`HeldChunks::changed`].

use std::collections::HashSet;
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
    /// Position of the first byte in `place`. [`PartPlace::Memory`]: in bytes from the start of the first chunk.
    /// [`PartPlace::Spill`], [`PartPlace::MemoryFile`], [`PartPlace::Backing`]: from the start of that file.
    /// [`PartPlace::Hole`]: 0.
    pub at: u64,
    /// Index of the chunk if the place is memory or the spill file; number of the memory file if it is one.
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
    bytes: u64,
}

impl<B: Backing> HeldChunks<B> {
    /// Lists where the bytes of the file at `path` are, without gap or overlap from offset 0 to its end. The slabs that
    /// the list names are held until the returned value is dropped. Waits for a truncation under way.
    ///
    /// Fails with EISDIR or EINVAL if `path` is not a regular file, and with EIO if pending parts of the file cannot be
    /// read.
    pub fn list_file(engine: &Arc<Engine<B>>, path: &[u8]) -> Result<(Self, Vec<ListedPart>)> {
        let inode = engine.tree.find(path)?;
        match inode.kind {
            Kind::File => {}
            Kind::Dir => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
        let file = engine
            .open_files
            .file_with(&inode, |state| state.direct.add_chunk_list());
        engine
            .base
            .counters
            .chunk_lists
            .fetch_add(1, Ordering::Relaxed);
        let slabs = Vec::new();
        let mut held = Self {
            engine: Arc::clone(engine),
            file: Arc::clone(&file),
            slabs,
            changes: 0,
            memory_bytes: 0,
            bytes: 0,
        };
        // From here on a drop of `held` releases all holds, also after an error.
        engine.room.check_cache(&file)?;
        let mut state = file.lock_without_exclusive_use();
        engine.intake.ingest_published(&file, &mut state);
        // A writer's changes go into the memory file at once, where its readers see them. So these bytes may change,
        // and the list refers readers to the mount.
        let is_viewed = state.view.is_some();
        let in_arena = if is_viewed {
            (held.bytes, held.changes) = (state.pending.end(), state.changes);
            Vec::new()
        } else {
            held.hold_slabs_and_list(&state)?
        };
        drop(state);
        held.count_memory(&in_arena);
        // All other bytes were in the backing before the lock was released, and `changed` shows a change since then.
        let attr = engine.base.backing.attr(&engine.tree.object(&inode)?)?;
        held.bytes = whole_size(&attr, held.bytes);
        let in_backing = if is_viewed { held.bytes } else { attr.size };
        let mut parts = Vec::new();
        let mut listed_end = 0;
        for extent in in_arena {
            push_gap(&mut parts, listed_end, extent.offset, in_backing);
            listed_end = extent.offset + extent.len;
            push_part(&mut parts, engine.base.part_of(&extent));
        }
        push_gap(&mut parts, listed_end, held.bytes, in_backing);
        Ok((held, parts))
    }

    /// Holds the slabs of the file, and returns the file's extents in the arena, in the order of their offsets.
    ///
    /// Fails with EIO if the memory or the disk of pending bytes cannot be read.
    fn hold_slabs_and_list(&mut self, state: &FileState<B>) -> Result<Vec<ListedExtent>> {
        let engine = &self.engine;
        self.bytes = state.pending.end();
        self.changes = state.changes;
        let mut in_arena = Vec::new();
        let mut known = HashSet::new();
        for (offset, extent) in state.extents_in_arena(0, usize::MAX) {
            let slab = extent.piece.slab;
            // The slab is held before its place is looked up, so that the place remains valid.
            if known.insert(slab) {
                engine.base.arena.hold_slab(slab);
                self.slabs.push(slab);
            }
            let Some(listed) = engine.base.list_if_readable(offset, extent) else {
                // An unreadable cached extent is left out, as the backing has its bytes too. Pending bytes are nowhere
                // else, so their loss is an error.
                if state
                    .pending
                    .extents()
                    .covering(offset..offset + extent.len)
                    .is_some()
                {
                    return Err(Errno::IO);
                }
                continue;
            };
            in_arena.push(listed);
        }
        Ok(in_arena)
    }

    /// Adds the bytes of the list that are in memory to the counters of the mount, until the list is dropped.
    fn count_memory(&mut self, in_arena: &[ListedExtent]) {
        let in_memory = in_arena
            .iter()
            .filter(|part| part.place == IN_MEMORY || part.place == IN_MEMORY_FILE);
        self.memory_bytes = in_memory.map(|part| part.len).sum();
        self.engine
            .base
            .counters
            .chunk_list_bytes
            .fetch_add(self.memory_bytes, Ordering::Relaxed);
    }

    /// Returns the length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
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
    /// Releases the slabs. A writer may wait for their space.
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
    fn list_if_readable(&self, offset: u64, extent: Extent) -> Option<ListedExtent> {
        self.locate_extent(offset, extent)
            .filter(|_| self.arena.is_readable(extent.piece.slab.chunk))
    }

    /// Converts an extent to a part of a list. The caller must hold the chunk of the extent.
    fn part_of(
        &self,
        &ListedExtent {
            offset,
            len,
            at,
            chunk,
            place,
        }: &ListedExtent,
    ) -> ListedPart {
        if place == IN_MEMORY_FILE {
            let (file, _) = self
                .arena
                .memory_file_of(chunk)
                .expect("the chunk of a held slab does not move");
            return ListedPart {
                offset,
                bytes: len,
                place: PartPlace::MemoryFile,
                at,
                chunk: Some(u32::from(file.number())),
            };
        }
        let chunk = Some(chunk);
        if place == IN_MEMORY {
            let at = at - self.arena.geometry().data_offset();
            return ListedPart {
                offset,
                bytes: len,
                place: PartPlace::Memory,
                at,
                chunk,
            };
        }
        ListedPart {
            offset,
            bytes: len,
            place: PartPlace::Spill,
            at,
            chunk,
        }
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

/// Adds a range that the arena does not have: bytes of the backing up to the end of its file, `in_backing`, and zeros
/// beyond.
fn push_gap(parts: &mut Vec<ListedPart>, from: u64, to: u64, in_backing: u64) {
    let border = in_backing.clamp(from, to);
    if from < border {
        let place = PartPlace::Backing;
        push_part(
            parts,
            ListedPart {
                offset: from,
                bytes: border - from,
                place,
                at: from,
                chunk: None,
            },
        );
    }
    if border < to {
        let place = PartPlace::Hole;
        push_part(
            parts,
            ListedPart {
                offset: border,
                bytes: to - border,
                place,
                at: 0,
                chunk: None,
            },
        );
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
        let rest = |from, to, in_backing| {
            let mut parts = Vec::new();
            push_gap(&mut parts, from, to, in_backing);
            parts
        };
        assert_eq!(rest(0, 10, 10), [backing(0, 10)]);
        assert_eq!(rest(4, 10, 7), [backing(4, 3), hole(7, 3)]);
        assert_eq!(rest(4, 10, 3), [hole(4, 6)]);
        assert_eq!(rest(4, 10, 99), [backing(4, 6)]);
        assert_eq!(rest(4, 4, 99), []);
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
