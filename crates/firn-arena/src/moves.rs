//! Reads written data, whether it is in memory or in a file on a local disk, and moves data from memory to that file.
//!
//! Terms
//! * The *arena* is shared memory with the bytes that are not in the backing directory yet. A *chunk* is the unit in
//!   which its memory is allocated.
//! * A *slot* has space for the data of one chunk, in memory or in the *spill file* on a local disk.
//! * The *home* of a chunk is the slot that has its data. The *home word* in the chunk's header names it.
//!
//! A move has three steps
//! 1. The bytes are copied from the slot of memory to a free slot of the spill file.
//! 2. The home word of the new slot is stored.
//! 3. The slot of memory becomes free.
//!
//! Promises
//! * A crash at any instant leaves each chunk in exactly one slot. Before step 2 the copy in the spill file does not
//!   count, and after step 2 the slot of memory does not count.
//! * Pieces and extents name chunks, not slots, so a move changes none of them.
//! * A thread that reads or changes bytes during a move uses the old slot or the new one, and finds all bytes there
//!   (`homes`).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_format::home::Home;
use rustix::io::Errno;

use crate::arena::Arena;
use crate::lease::Lease;
use crate::map::crash_point;
use crate::memory_files::MemoryFile;
use crate::pool::BegunMove;
use crate::refs::SlabRef;
use crate::spill::{SpillFault, SpillFile};

/// The result of [`Arena::spill_oldest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpillOutcome {
    /// This chunk is in the spill file now.
    Chunk(u32),
    /// The chosen chunk was freed during its copy, or an I/O used it for too long. Another call may move a chunk.
    Again,
    /// No chunk can move: each is leased, in use or in the spill file already, or the spill file is full or cannot be
    /// used.
    Nothing,
}

/// Where pending bytes are. Valid while their slab is pinned.
#[derive(Clone, Debug)]
pub enum PieceBytes {
    /// In memory, mapped at this address.
    Memory(*const u8),
    /// In this spill file, from this offset on.
    Spill(Arc<SpillFile>, u64),
    /// Unknown: the spill file is gone, or the chunk's home word is damaged.
    Nowhere,
}

// SAFETY: the pointer is into the shared mapping, which any thread may read while the slab is pinned.
unsafe impl Send for PieceBytes {}
// SAFETY: a shared reference gives no more than the pointer itself, through which nothing is written.
unsafe impl Sync for PieceBytes {}

/// A file that contains pending bytes, and their offset in it.
#[derive(Clone, Debug)]
pub enum FileLocation {
    /// In the arena's file.
    Arena(u64),
    /// In the spill file.
    Spill(u64),
    /// In this memory file.
    MemoryFile(Arc<MemoryFile>, u64),
}

/// Figures of the spill file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpillFigures {
    /// Bytes of its slots.
    pub bytes: u64,
    /// Bytes of its slots that are in use.
    pub used_bytes: u64,
    /// Bytes moved to it since attach.
    pub moved_bytes: u64,
}

impl Arena {
    /// Returns the spill file, to be read. Returns `None` if the arena has none, or it could not be opened at attach.
    pub fn spill_file(&self) -> Option<&Arc<SpillFile>> {
        self.spill.file()
    }

    /// Returns the fault that the attach found in the spill file. Its readable slots can still be read; no chunk moves
    /// to it.
    pub fn spill_fault(&self) -> Option<&SpillFault> {
        self.spill.fault()
    }

    /// Returns the figures of the spill file, or `None` for an arena without one.
    pub fn spill_figures(&self) -> Option<SpillFigures> {
        let geometry = self.geometry();
        if geometry.spill_count == 0 {
            return None;
        }
        let free_slots = self.pool.lock().free_spill_slot_count();
        let free_bytes = u64::from(free_slots) * geometry.chunk_bytes;
        Some(SpillFigures {
            bytes: geometry.spill_bytes(),
            used_bytes: geometry.spill_bytes() - free_bytes,
            moved_bytes: self.spill.moved_bytes(),
        })
    }

    /// Returns how many slots of memory are in use, of `Geometry::chunk_count`.
    pub fn memory_used(&self) -> u32 {
        self.pool.lock().memory_used()
    }

    /// Returns whether a chunk could move to the spill file and so make room in memory.
    pub fn can_spill(&self) -> bool {
        // A pinned chunk counts as movable: its I/O ends soon. A held chunk does not: the hold has no time limit.
        self.spill.usable_file().is_some()
            && self
                .pool
                .lock()
                .can_move(&|chunk| !self.homes.is_held(chunk))
    }

    /// Returns the slot that has a chunk's data. Returns `None` if the chunk is free, or its home word is damaged.
    pub fn home(&self, chunk: u32) -> Option<Home> {
        self.homes.get(chunk)
    }

    /// Returns whether the data of a chunk is in the spill file.
    pub fn is_spilled(&self, chunk: u32) -> bool {
        matches!(self.homes.get(chunk), Some(Home::Spill(_)))
    }

    /// Returns whether the data of a chunk can be read. The result follows from what the attach found: nothing is read
    /// now.
    pub fn is_readable(&self, chunk: u32) -> bool {
        match self.homes.get(chunk) {
            Some(Home::Memory(_)) => true,
            Some(Home::Spill(slot)) => self.spill.has_slot(slot),
            None => false,
        }
    }

    // ---- data --------------------------------------------------------------------------------

    /// Returns the offset in the arena's file of byte `position` of the slab's chunk. Returns `None` if the chunk is
    /// not in memory.
    fn arena_offset(&self, slab: SlabRef, position: u32) -> Option<u64> {
        match self.homes.get(slab.chunk) {
            Some(Home::Memory(slot)) => {
                Some(self.geometry().slot_offset(slot) + u64::from(position))
            }
            _ => None,
        }
    }

    /// Returns the address of the byte at `offset` of the arena's file.
    pub fn address(&self, offset: u64) -> *const u8 {
        self.map.address(offset, 1)
    }

    /// Returns the offset in the arena's file where the data of a leased chunk begins.
    pub fn data_offset(&self, chunk: u32) -> u64 {
        self.arena_offset(SlabRef { chunk, slab: 0 }, 0)
            .expect("a leased chunk is in memory")
    }

    /// Returns the file that contains pending bytes, for readers that open or map files by themselves. The answer holds
    /// while the slab is pinned. Returns `None` if the spill file is gone, or the chunk's home word is damaged.
    pub fn locate_bytes(&self, slab: SlabRef, position: u32) -> Option<FileLocation> {
        if let Some((file, start)) = self.memory_file_of(slab.chunk) {
            return Some(FileLocation::MemoryFile(file, start + u64::from(position)));
        }
        match (self.homes.get(slab.chunk)?, self.spill.file()) {
            (Home::Memory(slot), _) => Some(FileLocation::Arena(
                self.geometry().slot_offset(slot) + u64::from(position),
            )),
            (Home::Spill(slot), Some(file)) => {
                Some(FileLocation::Spill(file.offset(slot, position)))
            }
            (Home::Spill(_), None) => None,
        }
    }

    /// Copies `data` to reserved space of a leased slab. Readers see the bytes only after they are published.
    pub fn fill_slab(&self, slab: SlabRef, position: u32, data: &[u8]) {
        let offset = self
            .arena_offset(slab, position)
            .expect("a leased slab is in memory");
        self.map.write(offset, data);
    }

    /// Copies `len` bytes of the slab `source` to the slab that `lease` gives to the caller. Readers see the copy only
    /// after it is published. Fails if the bytes are in the spill file and cannot be read.
    ///
    /// The caller must have pinned `source`, so that it is not freed meanwhile. Both positions count from the start of
    /// the chunk that the slab is a part of.
    pub fn copy_slab(
        &self,
        (source, source_position): (SlabRef, u32),
        lease: &Lease,
        target_position: u32,
        len: usize,
    ) -> Result<(), Errno> {
        let target_end = u64::from(target_position) + len as u64;
        assert!(lease.start() <= target_position && target_end <= u64::from(lease.end()));
        let target_offset = self.data_offset(lease.slab().chunk) + u64::from(target_position);
        match self.find_bytes(source, source_position, len as u32) {
            PieceBytes::Memory(_) => {
                let source_offset = self
                    .arena_offset(source, source_position)
                    .ok_or(Errno::IO)?;
                self.map
                    .copy_within(source_offset, target_offset, len as u64);
                Ok(())
            }
            PieceBytes::Spill(spill_file, spill_offset) => {
                let mut bytes = vec![0; len];
                spill_file.read(spill_offset, &mut bytes)?;
                self.map.write(target_offset, &bytes);
                Ok(())
            }
            PieceBytes::Nowhere => Err(Errno::IO),
        }
    }

    /// Changes pending bytes in place. Returns false, and changes nothing, if they are spilled or are being copied to
    /// the spill file.
    pub fn overwrite_bytes(&self, slab: SlabRef, position: u32, data: &[u8]) -> bool {
        if !self.homes.enter_to_change(slab.chunk) {
            return false;
        }
        let offset = self.arena_offset(slab, position);
        if let Some(offset) = offset {
            self.map.write(offset, data);
        }
        self.homes.leave(slab.chunk);
        offset.is_some()
    }

    /// Fills `out` with pending bytes (not in the backing yet) of a slab. `position` counts from the start of the
    /// slab's chunk. Fails if the bytes are in the spill file and cannot be read.
    pub fn copy_out(&self, slab: SlabRef, position: u32, out: &mut [u8]) -> Result<(), Errno> {
        self.homes.enter(slab.chunk);
        let result = match self.find_bytes(slab, position, out.len() as u32) {
            // Read by offset: `Map::read` checks the range, and the pointer would need unsafe code here.
            PieceBytes::Memory(_) => {
                let offset = self
                    .arena_offset(slab, position)
                    .expect("a chunk keeps its home while a thread is inside");
                self.map.read(offset, out);
                Ok(())
            }
            PieceBytes::Spill(file, offset) => file.read(offset, out),
            PieceBytes::Nowhere => Err(Errno::IO),
        };
        self.homes.leave(slab.chunk);
        result
    }

    /// Returns where pending bytes are, for vectored writes and for readers of the spill file. The answer holds while
    /// the slab is pinned.
    pub fn find_bytes(&self, slab: SlabRef, position: u32, len: u32) -> PieceBytes {
        match (self.homes.get(slab.chunk), self.spill.file()) {
            (Some(Home::Memory(slot)), _) => PieceBytes::Memory(self.map.address(
                self.geometry().slot_offset(slot) + u64::from(position),
                u64::from(len),
            )),
            (Some(Home::Spill(slot)), Some(file)) => {
                PieceBytes::Spill(Arc::clone(file), file.offset(slot, position))
            }
            _ => PieceBytes::Nowhere,
        }
    }

    // ---- moves -------------------------------------------------------------------------------

    /// Moves the chunk (the unit of allocation) whose last lease ended longest ago from memory to the spill file on a
    /// local disk. The result says which chunk has moved, that none can move, or that another call may move one.
    ///
    /// `on_moved` is called with the moved chunk before its slot of memory can be used again. Fails if the spill file
    /// cannot be written. Then the chunk stays in memory.
    pub fn spill_oldest(&self, on_moved: &dyn Fn(u32)) -> Result<SpillOutcome, Errno> {
        let Some(spill_file) = self.spill.usable_file() else {
            return Ok(SpillOutcome::Nothing);
        };
        // Only one move at a time: the pool keeps the state of one move.
        let _mover_lock = self.spill.lock_mover();
        let begun_move = self
            .pool
            .lock()
            .begin_move(&mut |chunk| self.homes.begin_copy(chunk));
        let Some(begun_move) = begun_move else {
            return Ok(SpillOutcome::Nothing);
        };
        let chunk = begun_move.chunk;
        let Some(Home::Memory(memory_slot)) = self.homes.get(chunk) else {
            unreachable!("a resting chunk is in memory");
        };
        let copied = self.copy_to_spill_file(spill_file, &begun_move, memory_slot);
        let has_moved = self.end_move(&begun_move, copied);
        self.homes.open_gate(chunk);
        if has_moved {
            on_moved(chunk);
            self.pool.lock().free_vacated_slot(memory_slot);
        }
        // An error of the copy is returned only now, after the move has ended and the gate is open.
        copied?;
        self.callbacks.report_freed();
        if !has_moved {
            return Ok(SpillOutcome::Again);
        }
        self.spill.count_moved(self.geometry().chunk_bytes);
        Ok(SpillOutcome::Chunk(chunk))
    }

    /// Copies the bytes of a moving chunk from its slot of memory to its slot of the spill file. The caller has begun
    /// the copy at the chunk's gate (`begin_copy`), which refuses all changes of these bytes.
    fn copy_to_spill_file(
        &self,
        spill_file: &SpillFile,
        begun_move: &BegunMove,
        memory_slot: u32,
    ) -> Result<(), Errno> {
        let len = self.existing_bytes(begun_move.chunk);
        let data = self
            .map
            .address(self.geometry().slot_offset(memory_slot), len);
        // SAFETY: the bytes are in the mapping. No thread changes them: all pieces of the chunk are sealed, and
        // `begin_copy` prevents changes in place. If the chunk is freed during the copy, its slot is not used again
        // before `abandon_move`.
        let bytes = unsafe { std::slice::from_raw_parts(data, len as usize) };
        spill_file.write(begun_move.spill_slot, bytes)
    }

    /// Ends a move of a chunk to the spill file after its copy: stores the new home, the slot with its data, and
    /// returns true. The gate of the chunk stays closed, so that no thread uses its bytes before the caller opens it.
    ///
    /// Returns false if the copy failed, an I/O used the chunk for too long, or its last piece died meanwhile. In the
    /// last case the chunk is free now; otherwise it stays in memory.
    fn end_move(&self, begun_move: &BegunMove, copied: Result<(), Errno>) -> bool {
        let &BegunMove { chunk, spill_slot } = begun_move;
        let can_move = copied.is_ok() && self.homes.close_gate(chunk);
        let mut pool = self.pool.lock();
        // The pool is locked from this check to the store of the new home, so no last piece is released between them.
        if can_move && !pool.is_moving_chunk_emptied() {
            crash_point();
            self.store_home(chunk, Home::Spill(spill_slot));
            pool.finish_move();
            return true;
        }
        if let Some(emptied_chunk) = pool.abandon_move(copied.is_err()) {
            self.free_chunk(emptied_chunk, &mut pool);
        }
        false
    }

    /// Stores the slot of a chunk, in the arena for the next attach and in `homes` for this process.
    pub(crate) fn store_home(&self, chunk: u32, home: Home) {
        self.tables
            .home(chunk)
            .store(home.to_word(chunk), Ordering::Release);
        self.homes.set(chunk, Some(home));
    }

    /// Syncs the spill file: its bytes survive a loss of power. The arena's own pages survive one only on DAX.
    pub fn sync_spill(&self) -> Result<(), Errno> {
        self.spill.sync()
    }
}
