//! Which chunks, slots and slabs are free, and which chunk moves next.
//!
//! A chunk in use has a slot of memory or of the spill file; a new one needs a free chunk and a free slot
//! of memory. There are as many chunks as slots, so a free chunk is never what is missing.
//!
//! Invariants
//! * A chunk has a class exactly while one of its slabs is in use, or it was emptied while it moved.
//! * Chunks and slots are reused last in, first out: their pages are the warm ones.
//! * Only slabs of chunks in memory that do not move are free for writers.
//! * `resting` holds the chunks in memory of which no slab is leased, in the order in which the last lease
//!   of each ended; nothing where there is no spill file.

use std::collections::BTreeSet;

use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::slab::Class;

/// Free space, in the memory of firnd; rebuilt at attach.
pub(crate) struct Pool {
    geometry: Geometry,
    free_chunks: Vec<u32>,
    free_memory: Vec<u32>,
    free_spill: Vec<u32>,
    chunks: Vec<Chunk>,
    /// Free slabs by class: (chunk, slab). Stale entries (of chunks that were freed) cannot occur:
    /// a chunk's entries go when it is freed.
    free_slabs: [Vec<(u32, u32)>; 3],
    resting: BTreeSet<(u64, u32)>,
    /// Counts ends of leases.
    clock: u64,
    moving: Option<Moving>,
    /// A chunk has moved, and its slot of memory is not free yet.
    leaving: bool,
}

#[derive(Clone, Copy, Default)]
struct Chunk {
    /// While in use.
    class: Option<Class>,
    /// Slabs in use.
    used: u32,
    /// Slabs that a writer fills.
    leased: u32,
    /// Its place in `resting`.
    rests_since: Option<u64>,
    /// Its data is not in memory.
    away: bool,
}

/// A chunk on its way to the spill file.
struct Moving {
    chunk: u32,
    to: u32,
    rested_since: u64,
    /// Its free slabs: nobody may write to them now.
    free: Vec<u32>,
    emptied: bool,
}

/// A slab that was taken.
pub(crate) struct Taken {
    pub(crate) chunk: u32,
    pub(crate) slab: u32,
    /// Its chunk was cut for it just now and got this slot.
    pub(crate) cut: Option<u32>,
}

fn slot(class: Class) -> usize {
    match class {
        Class::Small => 0,
        Class::Medium => 1,
        Class::Whole => 2,
    }
}

impl Pool {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            free_chunks: (0..geometry.chunks()).rev().collect(),
            free_memory: (0..geometry.chunk_count).rev().collect(),
            free_spill: (0..geometry.spill_count).rev().collect(),
            chunks: vec![Chunk::default(); geometry.chunks() as usize],
            free_slabs: [const { Vec::new() }; 3],
            resting: BTreeSet::new(),
            clock: 0,
            moving: None,
            leaving: false,
        }
    }

    fn at(&mut self, chunk: u32) -> &mut Chunk {
        &mut self.chunks[chunk as usize]
    }

    pub(crate) fn class(&self, chunk: u32) -> Option<Class> {
        self.chunks[chunk as usize].class
    }

    fn slabs(&self, class: Class) -> u32 {
        (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32
    }

    // ---- slabs -------------------------------------------------------------------------------

    /// Takes a slab of `class` for a writer.
    pub(crate) fn take(&mut self, class: Class) -> Option<Taken> {
        let taken = if let Some((chunk, slab)) = self.free_slabs[slot(class)].pop() {
            Taken { chunk, slab, cut: None }
        } else {
            if self.free_chunks.is_empty() {
                return None;
            }
            let memory = self.free_memory.pop()?;
            let chunk = self.free_chunks.pop().expect("just looked");
            *self.at(chunk) = Chunk { class: Some(class), ..Chunk::default() };
            self.free_slabs[slot(class)].extend((1..self.slabs(class)).rev().map(|slab| (chunk, slab)));
            Taken { chunk, slab: 0, cut: Some(memory) }
        };
        self.disturb(taken.chunk);
        let chunk = self.at(taken.chunk);
        chunk.used += 1;
        chunk.leased += 1;
        Some(taken)
    }

    /// The writer of a slab is done; tells whether the chunk may move now.
    pub(crate) fn end_lease(&mut self, chunk: u32) -> bool {
        self.at(chunk).leased -= 1;
        self.rest(chunk)
    }

    /// Puts a chunk of which no slab is leased behind those that may move.
    fn rest(&mut self, chunk: u32) -> bool {
        let found = self.chunks[chunk as usize];
        let rests =
            self.geometry.spill_count > 0 && found.leased == 0 && !found.away && found.class.is_some();
        if rests && found.rests_since.is_none() {
            self.clock += 1;
            self.rest_since(chunk, self.clock);
        }
        rests
    }

    fn rest_since(&mut self, chunk: u32, when: u64) {
        self.at(chunk).rests_since = Some(when);
        self.resting.insert((when, chunk));
    }

    fn disturb(&mut self, chunk: u32) -> Option<u64> {
        let since = self.at(chunk).rests_since.take()?;
        self.resting.remove(&(since, chunk));
        Some(since)
    }

    /// Gives a slab back; tells whether its chunk is free again, whose slot the caller then gives back.
    pub(crate) fn give(&mut self, chunk: u32, slab: u32) -> bool {
        let found = self.at(chunk);
        let (class, away) = (found.class.expect("a slab in use has a class"), found.away);
        found.used -= 1;
        let empty = found.used == 0;
        match &mut self.moving {
            Some(moving) if moving.chunk == chunk => {
                moving.free.push(slab);
                moving.emptied = empty;
                return false;
            }
            _ => {}
        }
        if empty {
            self.free_chunk(chunk);
        } else if !away {
            self.free_slabs[slot(class)].push((chunk, slab));
        }
        empty
    }

    fn free_chunk(&mut self, chunk: u32) {
        self.disturb(chunk);
        if let Some(class) = self.at(chunk).class.take() {
            self.free_slabs[slot(class)].retain(|&(c, _)| c != chunk);
        }
        self.at(chunk).away = false;
        self.free_chunks.push(chunk);
    }

    /// A chunk left this slot.
    pub(crate) fn free_slot(&mut self, home: Home) {
        match home {
            Home::Memory(slot) => self.free_memory.push(slot),
            Home::Spill(slot) => self.free_spill.push(slot),
        }
    }

    // ---- moves -------------------------------------------------------------------------------

    /// Begins to move the chunk that rests longest among those that `may`; returns it and its slot in
    /// the spill file.
    pub(crate) fn begin_move(&mut self, may: &mut dyn FnMut(u32) -> bool) -> Option<(u32, u32)> {
        assert!(self.moving.is_none(), "one move at a time");
        if self.free_spill.is_empty() {
            return None;
        }
        let (rested_since, chunk) = self.resting.iter().copied().find(|&(_, chunk)| may(chunk))?;
        let to = self.free_spill.pop().expect("just looked");
        self.disturb(chunk);
        let class = self.chunks[chunk as usize].class.expect("a resting chunk is in use");
        let (of_chunk, others) =
            std::mem::take(&mut self.free_slabs[slot(class)]).into_iter().partition(|&(c, _)| c == chunk);
        self.free_slabs[slot(class)] = others;
        let of_chunk: Vec<(u32, u32)> = of_chunk;
        let free = of_chunk.into_iter().map(|(_, slab)| slab).collect();
        self.moving = Some(Moving { chunk, to, rested_since, free, emptied: false });
        Some((chunk, to))
    }

    /// Nothing of the chunk that moves is used any more.
    pub(crate) fn is_emptied(&self) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.emptied)
    }

    /// The chunk is in the spill file now; its free slabs wait until all of it is free. Its slot of memory comes
    /// with [`Pool::left`].
    pub(crate) fn finish_move(&mut self) {
        let moving = self.moving.take().expect("a move is under way");
        self.at(moving.chunk).away = true;
        self.leaving = true;
    }

    /// The slot of memory of the chunk that moved last can be used again.
    pub(crate) fn left(&mut self, slot: u32) {
        self.leaving = false;
        self.free_memory.push(slot);
    }

    /// The chunk stays where it is. `again_last`: its slot of the spill file is tried after the others.
    /// Returns the chunk if it was emptied and so is free.
    pub(crate) fn abandon_move(&mut self, again_last: bool) -> Option<u32> {
        let Moving { chunk, to, rested_since, free, emptied } =
            self.moving.take().expect("a move is under way");
        if again_last {
            self.free_spill.insert(0, to);
        } else {
            self.free_spill.push(to);
        }
        if emptied {
            self.free_chunk(chunk);
            return Some(chunk);
        }
        let class = self.chunks[chunk as usize].class.expect("it is in use");
        self.free_slabs[slot(class)].extend(free.into_iter().map(|slab| (chunk, slab)));
        self.rest_since(chunk, rested_since);
        None
    }

    // ---- attach ------------------------------------------------------------------------------

    /// This chunk is cut so, and these slabs of it are in use. `None`: nobody knows where its data is.
    pub(crate) fn adopt(&mut self, chunk: u32, class: Class, used: &[u32], home: Option<Home>) {
        let away = !matches!(home, Some(Home::Memory(_)));
        *self.at(chunk) = Chunk { class: Some(class), used: used.len() as u32, away, ..Chunk::default() };
        if !away {
            let free = (0..self.slabs(class)).filter(|slab| !used.contains(slab));
            self.free_slabs[slot(class)].extend(free.map(|slab| (chunk, slab)));
        }
        self.rest(chunk);
    }

    /// A writer of an earlier firnd may still fill a slab of this chunk, which was adopted.
    pub(crate) fn lease_on(&mut self, chunk: u32) {
        self.disturb(chunk);
        self.at(chunk).leased += 1;
    }

    /// These chunks and slots are in use, or nobody knows what is in them.
    pub(crate) fn reserve(&mut self, chunk: &dyn Fn(u32) -> bool, slot: &dyn Fn(Home) -> bool) {
        self.free_chunks.retain(|&c| !chunk(c));
        self.free_memory.retain(|&s| !slot(Home::Memory(s)));
        self.free_spill.retain(|&s| !slot(Home::Spill(s)));
    }

    // ---- figures -----------------------------------------------------------------------------

    /// Bytes of slabs in use in memory, and elsewhere.
    pub(crate) fn used_bytes(&self) -> (u64, u64) {
        let bytes = |chunk: &Chunk| {
            chunk.class.map_or(0, |c| u64::from(chunk.used) * c.slab_bytes(self.geometry.chunk_bytes))
        };
        self.chunks.iter().fold((0, 0), |(memory, away), chunk| {
            if chunk.away { (memory, away + bytes(chunk)) } else { (memory + bytes(chunk), away) }
        })
    }

    /// Slots of memory in use.
    pub(crate) fn memory_used(&self) -> u32 {
        self.geometry.chunk_count - self.free_memory.len() as u32
    }

    /// Slots of the spill file that are free.
    pub(crate) fn spill_free(&self) -> u32 {
        self.free_spill.len() as u32
    }

    /// Whether some chunk among those that `may` could move, or is moving.
    pub(crate) fn can_move(&self, may: &dyn Fn(u32) -> bool) -> bool {
        let rests = || self.resting.iter().any(|&(_, chunk)| may(chunk));
        self.moving.is_some() || self.leaving || (!self.free_spill.is_empty() && rests())
    }

    /// Whether a slab of `class` could be taken.
    pub(crate) fn has(&self, class: Class) -> bool {
        !self.free_slabs[slot(class)].is_empty()
            || (!self.free_chunks.is_empty() && !self.free_memory.is_empty())
    }
}
