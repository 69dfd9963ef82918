//! Chunks go to the spill file, and their data is found there.
//!
//! A move: the slot is copied to the spill file; the home word in the chunk's header is stored; the slot of
//! memory is free. Before the store the copy means nothing, after it the slot of memory does: a crash at any
//! instant leaves the chunk in exactly one place. Pieces and extents speak of chunks, so none of them changes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::slab::{Class, chunk_word};
use rustix::io::Errno;

use crate::arena::{Arena, SlabRef, Stored};
use crate::check::Damage;
use crate::map::{Map, probe};
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
// SAFETY: as above.
unsafe impl Sync for Place {}

/// Bytes from the start of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Located {
    /// Of the arena.
    Arena(u64),
    /// Of the spill file.
    Spill(u64),
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
        self.spill.as_ref()
    }
    /// What was wrong with the spill file at attach. What it still has can be read; nothing moves to it.
    pub fn spill_fault(&self) -> Option<&SpillFault> {
        self.spill_fault.as_ref()
    }
    /// Figures of the spill file; `None` for an arena without one.
    pub fn spill_figures(&self) -> Option<SpillFigures> {
        let g = self.geometry();
        (g.spill_count > 0).then(|| SpillFigures {
            bytes: g.spill_bytes(),
            used_bytes: g.spill_bytes() - u64::from(self.pool.lock().spill_free()) * g.chunk_bytes,
            moved_bytes: self.moved_bytes.load(Ordering::Relaxed),
        })
    }
    /// Slots of memory in use, of [`Geometry::chunk_count`].
    pub fn memory_used(&self) -> u32 {
        self.pool.lock().memory_used()
    }
    /// Whether a move could make room in memory.
    pub fn can_spill(&self) -> bool {
        // What an I/O uses moves soon after; what is held may be held for ever.
        self.can_move_to_spill()
            && self
                .pool
                .lock()
                .can_move(&|chunk| !self.homes.is_held(chunk))
    }
    fn can_move_to_spill(&self) -> bool {
        self.spill.is_some() && self.spill_fault.is_none()
    }
    /// Where a chunk is; `None`: it is free, or nobody knows.
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
            Some(Home::Spill(slot)) => {
                let file = self.spill.as_ref();
                file.is_some_and(|file| self.spill_fault.is_none() || file.has_slot(slot))
            }
            None => false,
        }
    }
    /// Calls `f` when a writer took memory while more than `slots` of it were in use, or found none.
    pub fn on_pressure(&self, slots: u32, f: impl Fn() + Send + Sync + 'static) {
        *self.on_pressure.lock() = Some(Box::new(f));
        self.pressure_at.store(slots, Ordering::Release);
    }
    pub(crate) fn tell_pressure(&self, used: u32) {
        if used > self.pressure_at.load(Ordering::Acquire)
            && let Some(f) = &*self.on_pressure.lock()
        {
            f();
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
        self.map.at(at, 1)
    }

    /// Where the data of a leased chunk begins, in bytes from the start of the file.
    pub fn data_offset(&self, chunk: u32) -> u64 {
        self.in_memory(SlabRef { chunk, slab: 0 }, 0)
            .expect("a leased chunk is in memory")
    }

    /// Where pending bytes are, for those who map or open the files themselves; holds while the slab is pinned.
    /// `None`: the spill file is gone, or damage hides where they are.
    pub fn locate(&self, slab: SlabRef, position: u32) -> Option<Located> {
        match (self.homes.get(slab.chunk)?, &self.spill) {
            (Home::Memory(slot), _) => Some(Located::Arena(
                self.geometry().slot_offset(slot) + u64::from(position),
            )),
            (Home::Spill(slot), Some(file)) => Some(Located::Spill(file.offset(slot, position))),
            (Home::Spill(_), None) => None,
        }
    }

    /// Copies bytes to reserved room of a leased slab. Nobody sees them before they are published.
    pub fn fill(&self, slab: SlabRef, position: u32, data: &[u8]) {
        let at = self
            .in_memory(slab, position)
            .expect("a leased slab is in memory");
        self.map.write(at, data);
    }

    /// Changes pending bytes where they lie. False: they are spilled or about to be; nothing was changed.
    pub fn overwrite(&self, slab: SlabRef, position: u32, data: &[u8]) -> bool {
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
        match (self.homes.get(slab.chunk), &self.spill) {
            (Some(Home::Memory(slot)), _) => Place::Memory(self.map.at(
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
        let Some(file) = self.spill.as_ref().filter(|_| self.can_move_to_spill()) else {
            return Ok(Spilled::Nothing);
        };
        let _one_at_a_time = self.mover.lock();
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
        let data = self.map.at(self.geometry().slot_offset(from), bytes);
        // SAFETY: in the mapping; all its pieces are sealed and `begin_copy` keeps changes out. If the chunk
        // is freed meanwhile its slot is not reused before `abandon_move`.
        let written = file.write(to, unsafe {
            std::slice::from_raw_parts(data, bytes as usize)
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
            self.pool.lock().left(from);
        }
        written?;
        self.tell_free();
        if stays {
            return Ok(Spilled::Again);
        }
        self.moved_bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Spilled::Chunk(chunk))
    }

    pub(crate) fn store_home(&self, chunk: u32, home: Home) {
        let word = self.geometry().table_offset(chunk) + chunk_word::HOME;
        self.map
            .u64(word)
            .store(home.to_word(chunk), Ordering::Release);
        self.homes.set(chunk, Some(home));
    }

    /// Makes what was spilled survive a loss of power, as far as the arena does.
    pub fn sync_spill(&self) -> Result<(), Errno> {
        self.spill.as_ref().map_or(Ok(()), |file| file.sync())
    }
}

/// Where each chunk in use is; two that claim one slot are both damaged, for nobody knows whose it is.
pub(crate) fn read_homes(
    map: &Map,
    geometry: &Geometry,
    damage: &mut Vec<Damage>,
) -> Vec<Option<Home>> {
    let word = |chunk: u32| {
        map.u64(geometry.table_offset(chunk) + chunk_word::HOME)
            .load(Ordering::Acquire)
    };
    let in_use = |chunk: u32| {
        let class = map
            .u32(geometry.table_offset(chunk) + chunk_word::CLASS)
            .load(Ordering::Acquire);
        !matches!(Class::from_word(class), Ok(None))
    };
    let mut homes = vec![None; geometry.chunks() as usize];
    let mut owners = std::collections::HashMap::new();
    for chunk in (0..geometry.chunks()).filter(|chunk| in_use(*chunk)) {
        let found = word(chunk);
        let home = Home::from_word(found, chunk).filter(|home| match *home {
            Home::Memory(slot) => slot < geometry.chunk_count,
            Home::Spill(slot) => slot < geometry.spill_count,
        });
        let Some(home) = home else {
            // A live arena may have freed it between the two looks.
            if in_use(chunk) && word(chunk) == found {
                damage.push(Damage::Home { chunk, word: found });
            }
            continue;
        };
        homes[chunk as usize] = Some(home);
        if let Some(other) = owners.insert(home, chunk)
            && in_use(other)
            && Home::from_word(word(other), other) == Some(home)
        {
            homes[chunk as usize] = None;
            homes[other as usize] = None;
            damage.extend([chunk, other].map(|chunk| Damage::Home {
                chunk,
                word: word(chunk),
            }));
        }
    }
    homes
}

/// Names the pieces whose bytes are in slots that the spill file does not have.
pub(crate) fn missing(
    homes: &[Option<Home>],
    pieces: &[Stored],
    file: Option<&SpillFile>,
    fault: Option<&SpillFault>,
    damage: &mut Vec<Damage>,
) {
    let mut of_chunk: std::collections::BTreeMap<(u32, u32), (u64, u64)> = Default::default();
    for stored in pieces {
        let chunk = stored.at.slab.chunk;
        if let Some(Home::Spill(slot)) = homes[chunk as usize]
            && !file.is_some_and(|file| file.has_slot(slot))
        {
            let (count, bytes) = of_chunk.entry((chunk, slot)).or_default();
            *count += 1;
            *bytes += u64::from(stored.piece.len);
        }
    }
    for ((chunk, slot), (pieces, bytes)) in of_chunk {
        let why = fault.map_or_else(|| "it is not there".into(), ToString::to_string);
        damage.push(Damage::Spill {
            chunk,
            slot,
            pieces,
            bytes,
            why,
        });
    }
}
