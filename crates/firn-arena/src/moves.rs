//! Chunks go to the spill file, and their data is found there.
//!
//! A move: the slot is copied to the spill file; the home word in the chunk's header is stored; the slot of
//! memory is free. Before the store the copy means nothing, after it the slot of memory does: a crash at any
//! instant leaves the chunk in exactly one place. Pieces and extents speak of chunks, so none of them changes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_format::home::Home;
use rustix::io::Errno;

use crate::arena::Arena;
use crate::lease::Lease;
use crate::map::probe;
use crate::memory_files::MemoryFile;
use crate::refs::SlabRef;
use crate::spill::{SpillFault, SpillFile};

/// What [`Arena::spill_oldest`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spilled {
    /// This chunk is in the spill file now.
    Chunk(u32),
    /// The chunk was freed, or used by an I/O that lasts, while it was copied: look again.
    Again,
    /// No chunk can move: each is leased or in use, or the spill file is full.
    Nothing,
}

/// Where pending bytes are; holds while their slab is pinned.
#[derive(Clone, Debug)]
pub enum Place {
    /// Mapped here.
    Memory(*const u8),
    /// In this file from this offset on.
    Spill(Arc<SpillFile>, u64),
    /// The spill file is gone, or damage hides where they are.
    Nowhere,
}

// SAFETY: the pointer is into the shared mapping, which any thread may read while the slab is pinned.
unsafe impl Send for Place {}
// SAFETY: a shared reference gives no more than the pointer itself, through which nothing is written.
unsafe impl Sync for Place {}

/// Bytes from the start of a file.
#[derive(Clone, Debug)]
pub enum Located {
    /// Of the arena.
    Arena(u64),
    /// Of the spill file.
    Spill(u64),
    /// Of this memory file.
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
    /// The spill file, while it can be used.
    pub fn spill_file(&self) -> Option<&Arc<SpillFile>> {
        self.spill.file()
    }
    /// What was wrong with the spill file at attach. What it still has can be read; nothing moves to it.
    pub fn spill_fault(&self) -> Option<&SpillFault> {
        self.spill.fault()
    }
    /// Figures of the spill file; `None` for an arena without one.
    pub fn spill_figures(&self) -> Option<SpillFigures> {
        let g = self.geometry();
        (g.spill_count > 0).then(|| SpillFigures {
            bytes: g.spill_bytes(),
            used_bytes: g.spill_bytes() - u64::from(self.pool.lock().spill_free()) * g.chunk_bytes,
            moved_bytes: self.spill.moved_bytes(),
        })
    }
    /// Slots of memory in use, of `Geometry::chunk_count`.
    pub fn memory_used(&self) -> u32 {
        self.pool.lock().memory_used()
    }
    /// Whether a move could make room in memory.
    pub fn can_spill(&self) -> bool {
        // What an I/O uses moves soon after; what is held may be held for ever.
        self.spill.usable_file().is_some()
            && self
                .pool
                .lock()
                .can_move(&|chunk| !self.homes.is_held(chunk))
    }
    /// Where a chunk is; `None`: it is free, or damage hides it.
    pub fn home(&self, chunk: u32) -> Option<Home> {
        self.homes.get(chunk)
    }
    /// Whether the data of a chunk has left memory.
    pub fn is_spilled(&self, chunk: u32) -> bool {
        matches!(self.homes.get(chunk), Some(Home::Spill(_)))
    }
    /// Whether the data of a chunk can be read, as far as is known without trying.
    pub fn is_readable(&self, chunk: u32) -> bool {
        match self.homes.get(chunk) {
            Some(Home::Memory(_)) => true,
            Some(Home::Spill(slot)) => self.spill.has_slot(slot),
            None => false,
        }
    }

    // ---- data --------------------------------------------------------------------------------

    fn in_memory(&self, slab: SlabRef, position: u32) -> Option<u64> {
        match self.homes.get(slab.chunk) {
            Some(Home::Memory(slot)) => {
                Some(self.geometry().slot_offset(slot) + u64::from(position))
            }
            _ => None,
        }
    }

    /// The address of byte `at` of the file.
    pub fn address(&self, at: u64) -> *const u8 {
        self.map.address(at, 1)
    }

    /// Where the data of a leased chunk begins, in bytes from the start of the file.
    pub fn data_offset(&self, chunk: u32) -> u64 {
        self.in_memory(SlabRef { chunk, slab: 0 }, 0)
            .expect("a leased chunk is in memory")
    }

    /// Where pending bytes are, for readers that map or open the files themselves; holds while the slab is pinned.
    /// `None`: the spill file is gone, or damage hides where they are.
    pub fn locate_bytes(&self, slab: SlabRef, position: u32) -> Option<Located> {
        if let Some((file, start)) = self.memory_file_of(slab.chunk) {
            return Some(Located::MemoryFile(file, start + u64::from(position)));
        }
        match (self.homes.get(slab.chunk)?, self.spill.file()) {
            (Home::Memory(slot), _) => Some(Located::Arena(
                self.geometry().slot_offset(slot) + u64::from(position),
            )),
            (Home::Spill(slot), Some(file)) => Some(Located::Spill(file.offset(slot, position))),
            (Home::Spill(_), None) => None,
        }
    }

    /// Copies bytes to reserved room of a leased slab. No reader sees them before they are published.
    pub fn fill_slab(&self, slab: SlabRef, position: u32, data: &[u8]) {
        let at = self
            .in_memory(slab, position)
            .expect("a leased slab is in memory");
        self.map.write(at, data);
    }

    /// Copies bytes of a slab that is pinned to a leased slab, where no reader sees them before they are published.
    pub fn copy_slab(
        &self,
        (from, position): (SlabRef, u32),
        lease: &Lease,
        to: u32,
        len: usize,
    ) -> Result<(), Errno> {
        assert!(lease.start() <= to && u64::from(to) + len as u64 <= u64::from(lease.end()));
        let target = self.data_offset(lease.slab().chunk) + u64::from(to);
        match self.place(from, position, len as u32) {
            Place::Memory(_) => {
                let source = self.in_memory(from, position).ok_or(Errno::IO)?;
                self.map.copy_within(source, target, len as u64);
                Ok(())
            }
            Place::Spill(file, at) => {
                let mut bytes = vec![0; len];
                file.read(at, &mut bytes)?;
                self.map.write(target, &bytes);
                Ok(())
            }
            Place::Nowhere => Err(Errno::IO),
        }
    }

    /// Changes pending bytes where they lie. False: they are spilled or about to be; nothing was changed.
    pub fn overwrite_bytes(&self, slab: SlabRef, position: u32, data: &[u8]) -> bool {
        if !self.homes.enter_to_change(slab.chunk) {
            return false;
        }
        let at = self.in_memory(slab, position);
        if let Some(at) = at {
            self.map.write(at, data);
        }
        self.homes.leave(slab.chunk);
        at.is_some()
    }

    /// Copies pending bytes out. Fails where they are spilled and the device does.
    pub fn copy_out(&self, slab: SlabRef, position: u32, out: &mut [u8]) -> Result<(), Errno> {
        self.homes.enter(slab.chunk);
        let result = match self.place(slab, position, out.len() as u32) {
            // Again by offset, which is checked, and not through the pointer.
            Place::Memory(_) => {
                let at = self
                    .in_memory(slab, position)
                    .expect("it stays while we are inside");
                self.map.read(at, out);
                Ok(())
            }
            Place::Spill(file, at) => file.read(at, out),
            Place::Nowhere => Err(Errno::IO),
        };
        self.homes.leave(slab.chunk);
        result
    }

    /// Where pending bytes are, for vectored writes and readers of the file. Holds while the slab is pinned.
    pub fn place(&self, slab: SlabRef, position: u32, len: u32) -> Place {
        match (self.homes.get(slab.chunk), self.spill.file()) {
            (Some(Home::Memory(slot)), _) => Place::Memory(self.map.address(
                self.geometry().slot_offset(slot) + u64::from(position),
                u64::from(len),
            )),
            (Some(Home::Spill(slot)), Some(file)) => {
                Place::Spill(Arc::clone(file), file.offset(slot, position))
            }
            _ => Place::Nowhere,
        }
    }

    // ---- moves -------------------------------------------------------------------------------

    /// Moves the chunk whose last lease ended longest ago to the spill file. An error is the device's; the
    /// chunk stays in memory. `left` is told of a chunk that moved before its slot of memory is used again.
    pub fn spill_oldest(&self, left: &dyn Fn(u32)) -> Result<Spilled, Errno> {
        let Some(file) = self.spill.usable_file() else {
            return Ok(Spilled::Nothing);
        };
        let _one_at_a_time = self.spill.begin();
        let begun = self
            .pool
            .lock()
            .begin_move(&mut |chunk| self.homes.begin_copy(chunk));
        let Some((chunk, to)) = begun else {
            return Ok(Spilled::Nothing);
        };
        let Some(Home::Memory(from)) = self.homes.get(chunk) else {
            unreachable!("a resting chunk is in memory");
        };
        let bytes = self.geometry().chunk_bytes;
        let there = self.bytes_there(chunk);
        let data = self.map.address(self.geometry().slot_offset(from), there);
        // SAFETY: in the mapping; all its pieces are sealed and `begin_copy` keeps changes out. If the chunk
        // is freed meanwhile its slot is not reused before `abandon_move`.
        let written = file.write(to, unsafe {
            std::slice::from_raw_parts(data, there as usize)
        });
        let moved = written.is_ok() && self.homes.close(chunk);
        let mut pool = self.pool.lock();
        let stays = !moved || pool.is_emptied();
        if stays {
            if let Some(emptied) = pool.abandon_move(written.is_err()) {
                self.forget_chunk(emptied, &mut pool);
            }
        } else {
            probe();
            self.store_home(chunk, Home::Spill(to));
            pool.finish_move();
        }
        drop(pool);
        self.homes.open(chunk);
        if !stays {
            left(chunk);
            self.pool.lock().free_left_slot(from);
        }
        written?;
        self.listeners.report_freed();
        if stays {
            return Ok(Spilled::Again);
        }
        self.spill.count_moved(bytes);
        Ok(Spilled::Chunk(chunk))
    }

    pub(crate) fn store_home(&self, chunk: u32, home: Home) {
        self.tables
            .home(chunk)
            .store(home.to_word(chunk), Ordering::Release);
        self.homes.set(chunk, Some(home));
    }

    /// Makes what was spilled survive a loss of power, as far as the arena does.
    pub fn sync_spill(&self) -> Result<(), Errno> {
        self.spill.sync()
    }
}
