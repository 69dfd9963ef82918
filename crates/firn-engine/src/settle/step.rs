//! One step of settling (the copy of large closed files into memory files): copies a chunk (a unit of the arena), or
//! begins the next file.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_arena::{Lease, NewPiece};
use firn_backing::{Backing, Errno};
use firn_format::memory_file::MEMORY_FILE_SLOTS_MAX;

use super::{ChunkSource, SettleStep, SettleTask};
use crate::counters::Decision;
use crate::extents::Extent;
use crate::file::{File, FileState};
use crate::options::DrainPolicy;
use crate::space::Room;
use crate::spill::Waker;

/// Divisor of the number of slots (places for one chunk in memory): this fraction of the slots remains free for
/// writers.
const RESERVED_SLOTS_DIVISOR: u32 = 32;
/// Divisor of the arena's memory: memory files that no file uses may keep this fraction of the memory. Checkpoints
/// often have equal sizes, and memory that was used before costs much less time than fresh memory.
const IDLE_BYTES_DIVISOR: u64 = 4;

/// Time until the next check for space for a partly copied file. No program waits for the copy, and space becomes free
/// when checkpoints are removed.
const ROOM_RETRY_EVERY: Duration = Duration::from_secs(1);

/// Result of [`Room::copy_next_chunk`].
enum CopyResult {
    /// The chunk is in the memory file.
    Copied,
    /// The file was changed or is in use, so its task ends. The file is settled later.
    FileBusy,
    /// No slot of memory is free, apart from the slots reserved for writers.
    NoRoom,
}

impl<B: Backing> Room<B> {
    /// Sets the callback that runs when [`Room::settle_step`] may have work.
    pub fn set_settle_waker(&self, waker: Waker) {
        *self.settle.waker.write() = Some(waker);
    }

    /// Returns whether files are settled at all. With an eager drain they are not, because no drained bytes remain in
    /// the arena.
    pub fn settles(&self) -> bool {
        let options = &self.base.options;
        options.memory_file_bytes_min > 0
            && options.drain == DrainPolicy::Demand
            && !options.serves_every_read
    }

    /// Plans to settle a file (to copy it into a memory file), if it is large enough and has no writer. The caller must
    /// not have the file's lock.
    pub(crate) fn queue_for_memory_file(&self, file: &Arc<File<B>>) {
        if !self.settles() {
            return;
        }
        {
            let state = file.lock();
            let bytes = state.contiguous_bytes();
            if bytes < self.base.options.memory_file_bytes_min
                || state.opens.has_writers()
                || state.memory_file(&self.base.arena, bytes).is_some()
            {
                return;
            }
        }
        self.settle.waiting.add(file);
        self.settle.wake();
    }

    /// Copies the next chunk of a large closed file into a memory file, from which the kernel can read the whole file.
    /// If no file is being copied, begins the next one. If no file can be copied now, the result says when to call
    /// again.
    pub fn settle_step(&self) -> SettleStep {
        let task = self.settle.task.lock().take();
        let Some(mut task) = task.or_else(|| self.start_next_task()) else {
            // Memory that no file uses in memory files goes back to the arena, where any writer can use it.
            self.base.arena.trim_memory_files(self.idle_bytes_max());
            self.wake_writers();
            return SettleStep::Idle { retry: None };
        };
        match self.copy_next_chunk(&task) {
            Ok(CopyResult::Copied) => {
                self.base.counters.drain_decisions.count(Decision::Settled);
                task.next_chunk += 1;
                let is_complete = u64::from(task.next_chunk) * self.chunk_bytes() >= task.bytes;
                if is_complete {
                    self.base.arena.end_memory_file(&task.memory);
                    tracing::debug!(path = %task.file.shown(), bytes = task.bytes, "drain: settled");
                } else {
                    *self.settle.task.lock() = Some(task);
                }
            }
            // The file changed or is in use, so its copy is given up.
            Ok(CopyResult::FileBusy) => self.base.arena.end_memory_file(&task.memory),
            Ok(CopyResult::NoRoom) => {
                // The same chunk is tried again in a later step.
                *self.settle.task.lock() = Some(task);
                return self.free_memory_file_slots();
            }
            Err(errno) => {
                self.base.arena.end_memory_file(&task.memory);
                tracing::info!(path = %task.file.shown(), %errno, "cannot copy a file to where programs read it \
                    directly from memory; its data remains in the arena");
            }
        }
        self.wake_writers();
        SettleStep::More
    }

    /// Frees the slots of memory files that no file uses. The next step follows at once if some slots were freed, and
    /// after [`ROOM_RETRY_EVERY`] otherwise.
    fn free_memory_file_slots(&self) -> SettleStep {
        let freed_slots = self.base.arena.trim_memory_files(0);
        self.wake_writers();
        if freed_slots > 0 {
            return SettleStep::More;
        }
        SettleStep::Idle {
            retry: Some(ROOM_RETRY_EVERY),
        }
    }

    /// Returns the size of a chunk, and of a slot of a memory file, in bytes.
    fn chunk_bytes(&self) -> u64 {
        self.base.arena.geometry().chunk_bytes
    }

    /// Returns the maximum number of bytes of all idle memory files.
    fn idle_bytes_max(&self) -> u64 {
        self.base.arena.geometry().data_bytes() / IDLE_BYTES_DIVISOR
    }

    /// Starts to settle (to copy into a new memory file) the next file for which this is possible. Returns `None` if
    /// there is no such file.
    fn start_next_task(&self) -> Option<SettleTask<B>> {
        // Each file is tried once. A file that cannot be settled now is queued again when it is opened or closed.
        while let Some(file) = self.settle.waiting.pop() {
            if let Some(task) = self.start_task(file) {
                return Some(task);
            }
        }
        None
    }

    /// Starts to settle a file (to copy it into a memory file). Returns `None` if the file is in use, too short or too
    /// long, is in a memory file already, or if no memory file can be made for it.
    fn start_task(&self, file: Arc<File<B>>) -> Option<SettleTask<B>> {
        let (bytes, changes) = {
            let state = file.lock();
            let bytes = state.contiguous_bytes();
            if !state.can_be_copied() || state.memory_file(&self.base.arena, bytes).is_some() {
                return None;
            }
            (bytes, state.changes)
        };
        let slots = bytes.div_ceil(self.chunk_bytes());
        if bytes < self.base.options.memory_file_bytes_min
            || slots > u64::from(MEMORY_FILE_SLOTS_MAX)
        {
            return None;
        }
        let memory = match self.base.arena.begin_memory_file(slots as u32) {
            Ok(Some(memory)) => memory,
            Ok(None) => return None,
            Err(errno) => {
                tracing::info!(%errno, "cannot make memory that programs read directly");
                return None;
            }
        };
        Some(SettleTask {
            file,
            memory,
            changes,
            bytes,
            next_chunk: 0,
        })
    }

    /// Copies the next chunk of a file. The copy runs without the file's lock, from pinned slabs.
    fn copy_next_chunk(&self, task: &SettleTask<B>) -> Result<CopyResult, Errno> {
        let start = u64::from(task.next_chunk) * self.chunk_bytes();
        let range = start..task.bytes.min(start + self.chunk_bytes());
        let Some(source) = self.pin_source(task, range.clone()) else {
            return Ok(CopyResult::FileBusy);
        };
        let copied = self.copy_to_memory_slot(task, &source, start);
        for (_, extent) in &source.parts {
            self.base.arena.unpin_slab(extent.piece.slab);
        }
        let Some(lease) = copied? else {
            return Ok(CopyResult::NoRoom);
        };
        Ok(self.switch_to_copy(task, &source, lease, range))
    }

    /// Copies one chunk of a file, from file offset `start` on, to its place (a slot) in the memory file. The caller
    /// has pinned the source. Returns the lease of the slot, which is the right to fill it.
    ///
    /// Returns `None` if no slot of memory is free, apart from some that are reserved for writers.
    fn copy_to_memory_slot(
        &self,
        task: &SettleTask<B>,
        source: &ChunkSource,
        start: u64,
    ) -> Result<Option<Lease>, Errno> {
        let arena = &self.base.arena;
        let reserved_slots = arena.geometry().chunk_count / RESERVED_SLOTS_DIVISOR;
        let slot = arena.lease_memory_slot(&task.memory, task.next_chunk, reserved_slots)?;
        let Some(lease) = slot else {
            return Ok(None);
        };
        if let Err(errno) = self.copy_parts(source, &lease, start) {
            // The seal ends the use of the slot, in which nothing was published.
            arena.seal_slab(lease);
            return Err(errno);
        }
        Ok(Some(lease))
    }

    /// Returns the places of the bytes of a range of the task's file, with their slabs pinned: these parts of the arena
    /// are not moved or used again. Returns `None` if the file was changed or is in use, or if some of the bytes are
    /// not in memory. The caller unpins them.
    fn pin_source(&self, task: &SettleTask<B>, range: Range<u64>) -> Option<ChunkSource> {
        let state = task.file.lock();
        if state.changes != task.changes || !state.can_be_copied() {
            return None;
        }
        let source = state.chunk_source(range)?;
        for (_, extent) in &source.parts {
            // Bytes in the spill file are not read back, because they would displace other bytes from memory.
            if self.base.arena.is_spilled(extent.piece.slab.chunk) {
                return None;
            }
        }
        for (_, extent) in &source.parts {
            self.base.arena.pin_slab(extent.piece.slab);
        }
        Some(source)
    }

    /// Copies the extents of a chunk, which begins at file offset `start`, into the leased slot.
    fn copy_parts(&self, source: &ChunkSource, lease: &Lease, start: u64) -> Result<(), Errno> {
        for (offset, extent) in &source.parts {
            let source_place = (extent.piece.slab, extent.position);
            let slot_position = (offset - start) as u32;
            self.base
                .arena
                .copy_slab(source_place, lease, slot_position, extent.len as usize)?;
        }
        Ok(())
    }

    /// Replaces bytes of a file in the arena by their copy in the memory file, from which they are read from now on.
    /// Returns `FileBusy` if the file was changed since the copy. `lease` is the right to fill the place of the copy.
    fn switch_to_copy(
        &self,
        task: &SettleTask<B>,
        source: &ChunkSource,
        mut lease: Lease,
        range: Range<u64>,
    ) -> CopyResult {
        let arena = &self.base.arena;
        let mut state = task.file.lock();
        let is_unchanged = state.changes == task.changes
            && state.can_be_copied()
            && state.chunk_source(range.clone()).as_ref() == Some(source);
        if is_unchanged {
            // Only pending bytes need a record, from which a recovery restores them.
            if source.is_pending {
                self.publish_pending_copy(&mut state, &mut lease, range.clone());
            } else {
                self.cache_copy(&mut state, &lease, range.clone());
            }
            state.check();
        }
        // The seal and the counter below need no lock of the file.
        drop(state);
        arena.seal_slab(lease);
        if !is_unchanged {
            return CopyResult::FileBusy;
        }
        let bytes = range.end - range.start;
        self.settle
            .settled_bytes
            .fetch_add(bytes, Ordering::Relaxed);
        CopyResult::Copied
    }

    /// Replaces pending bytes of a file by their copy in the memory file. The copy becomes a new piece (a recorded
    /// append), so that a recovery finds it; the older pieces die afterwards.
    fn publish_pending_copy(&self, state: &mut FileState<B>, lease: &mut Lease, range: Range<u64>) {
        let arena = &self.base.arena;
        let file_id = state.pending.file_id().expect("it has pending bytes");
        let len = range.end - range.start;
        let reserved = lease
            .reserve(file_id.get(), range.start, len)
            .expect("the slot holds a chunk");
        assert_eq!((reserved.position, u64::from(reserved.len)), (0, len));
        let sequence = arena.next_sequence();
        let new_piece = NewPiece {
            file_id: file_id.get(),
            offset: range.start,
            sequence,
            // A recovery takes the latest time of all pieces, so this piece gets the time of the last write.
            modified: state.pending.recorded_ns(),
        };
        let piece = arena.publish_piece(lease, reserved, new_piece);
        // Lists that tell client processes where the bytes lie name the old places.
        state.direct.invalidate_lists(arena);
        let extent = Extent {
            len,
            piece,
            position: 0,
            sequence,
        };
        state.pending.insert(arena, range.start, extent);
        // No write made this piece, so the next write must begin a new piece.
        state.pending.stop_extending_last_piece();
    }

    /// Replaces the cached extents of a chunk by the copy, which needs no piece record.
    fn cache_copy(&self, state: &mut FileState<B>, lease: &Lease, range: Range<u64>) {
        let arena = &self.base.arena;
        let len = range.end - range.start;
        let extent = Extent {
            len,
            piece: arena.use_without_piece(lease, len),
            position: 0,
            // Cached bytes are not ordered by sequences.
            sequence: 0,
        };
        state.direct.invalidate_lists(arena);
        let cached_bytes = &self.base.counters.cached_bytes;
        state.cache.insert(arena, cached_bytes, range.start, extent);
    }
}
