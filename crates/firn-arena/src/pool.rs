//! Which chunks and slabs are free.
//!
//! Invariants
//! * A chunk has a class exactly while one of its slabs is in use.
//! * Chunks are reused last in, first out: their pages are the warm ones.

use firn_format::geometry::Geometry;
use firn_format::slab::Class;

/// Free space, in the memory of firnd; rebuilt at attach.
pub(crate) struct Pool {
    geometry: Geometry,
    free_chunks: Vec<u32>,
    /// Class of each chunk in use.
    class: Vec<Option<Class>>,
    /// Free slabs by class: (chunk, slab). Stale entries (of chunks that were freed) cannot occur:
    /// a chunk's entries go when it is freed.
    free_slabs: [Vec<(u32, u32)>; 3],
    /// Slabs in use by chunk.
    used: Vec<u32>,
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
        let count = geometry.chunk_count;
        Self {
            geometry,
            free_chunks: (0..count).rev().collect(),
            class: vec![None; count as usize],
            free_slabs: [const { Vec::new() }; 3],
            used: vec![0; count as usize],
        }
    }

    pub(crate) fn class(&self, chunk: u32) -> Option<Class> {
        self.class[chunk as usize]
    }

    fn slabs(&self, class: Class) -> u32 {
        (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32
    }

    /// Takes a slab of `class`; tells whether its chunk was cut for it just now.
    pub(crate) fn take(&mut self, class: Class) -> Option<(u32, u32, bool)> {
        if let Some((chunk, slab)) = self.free_slabs[slot(class)].pop() {
            self.used[chunk as usize] += 1;
            return Some((chunk, slab, false));
        }
        let chunk = self.free_chunks.pop()?;
        self.class[chunk as usize] = Some(class);
        self.used[chunk as usize] = 1;
        self.free_slabs[slot(class)].extend((1..self.slabs(class)).rev().map(|slab| (chunk, slab)));
        Some((chunk, 0, true))
    }

    /// Gives a slab back; tells whether its chunk is free again.
    pub(crate) fn give(&mut self, chunk: u32, slab: u32) -> bool {
        let class = self.class[chunk as usize].expect("a slab in use has a class");
        self.used[chunk as usize] -= 1;
        if self.used[chunk as usize] > 0 {
            self.free_slabs[slot(class)].push((chunk, slab));
            return false;
        }
        self.free_slabs[slot(class)].retain(|&(c, _)| c != chunk);
        self.class[chunk as usize] = None;
        self.free_chunks.push(chunk);
        true
    }

    /// At attach: this chunk is cut so, and these slabs of it are in use.
    pub(crate) fn adopt(&mut self, chunk: u32, class: Class, used: &[u32]) {
        self.free_chunks.retain(|&c| c != chunk);
        self.class[chunk as usize] = Some(class);
        self.used[chunk as usize] = used.len() as u32;
        let free = (0..self.slabs(class)).filter(|slab| !used.contains(slab));
        self.free_slabs[slot(class)].extend(free.map(|slab| (chunk, slab)));
    }

    /// At attach: this chunk is not to be used.
    pub(crate) fn set_aside(&mut self, chunk: u32) {
        self.free_chunks.retain(|&c| c != chunk);
    }

    /// Bytes of slabs in use.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.class
            .iter()
            .zip(&self.used)
            .filter_map(|(class, &used)| {
                class.map(|c| u64::from(used) * c.slab_bytes(self.geometry.chunk_bytes))
            })
            .sum()
    }

    /// Whether a slab of `class` could be taken.
    pub(crate) fn has(&self, class: Class) -> bool {
        !self.free_chunks.is_empty() || !self.free_slabs[slot(class)].is_empty()
    }
}
