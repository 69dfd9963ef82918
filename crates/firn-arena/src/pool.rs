//! The allocator of the arena: the pool of free chunks, slots and slabs, and the order in which chunks move to the
//! spill file.
//!
//! The *arena* is shared memory with the bytes that are not in the backing directory yet. A *chunk* is the unit in
//! which it is allocated, and a *slot* has space for the data of one chunk. A chunk in use has a slot, in memory or in
//! the *spill file* on a local disk. A chunk is divided into *slabs*. A *lease* is a writer's right to fill a slab. A
//! new chunk needs a free chunk number and a free slot of memory. There are as many chunk numbers as slots, so whenever
//! a slot is free, a number is free too.
//!
//! A chunk is *divided* into slabs of one *class* when it gets a slot: small, medium, or one as large as the chunk.
//!
//! | state of a chunk | meaning |
//! |---|---|
//! | free | it has no class and no slot |
//! | in memory | its data is in a slot of memory |
//! | resting | in memory, and none of its slabs is leased |
//! | moving | its data is being copied to the spill file, and none of its slabs is leased |
//! | spilled | its data is in the spill file |
//!
//! | state of a slot of memory | meaning |
//! |---|---|
//! | free | in the arena's file, without a chunk: a new chunk may get it |
//! | used | a chunk has its data there, or has just moved from there |
//! | idle | in a *memory file* (`memory_files`, all bytes of one large file in order), without a chunk |
//! | stuck | like idle, but the arena's file had no memory to take it back |
//!
//! Invariants
//! * A chunk is free, or it has a class. A chunk that an attach found damaged may be neither.
//! * A chunk has a class exactly while one of its slabs is in use, or while it moves.
//! * The unused slabs of a chunk in memory are free, in the list of its NUMA node. Those of a moving chunk are in the
//!   [`Move`], and those of a spilled chunk are not free. So writers get slabs only of chunks in memory that do not
//!   move.
//! * Each NUMA node has an equal run of the slots of memory, in the order of the NUMA nodes.
//! * `resting` has exactly the resting chunks, in the order in which their last leases ended. It is empty without a
//!   spill file.
//!
//! Policy
//! * Chunks and slots are reused last in, first out, because the pages of the last one are most likely in a cache.
//! * A writer gets a slab of the nearest NUMA node that has one, even if a chunk must be divided for it.
//! * The chunk that has rested longest moves first.

use std::collections::BTreeSet;

use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::slab::Class;

use crate::topology::Topology;

/// The pool. It exists only in the memory of firnd, and is rebuilt at attach.
pub(crate) struct Pool {
    geometry: Geometry,
    topology: Topology,
    /// Chunk numbers that are free. The last one is used next.
    free_chunks: Vec<u32>,
    /// Slots of the spill file that are free. The last one is used next.
    free_spill_slots: Vec<u32>,
    /// The state of each chunk.
    chunks: Vec<Chunk>,
    numa_nodes: Vec<NumaNode>,
    /// The resting chunks, with the longest resting one first: the value of `clock` when it began to rest, and the
    /// chunk.
    resting: BTreeSet<(u64, u32)>,
    /// Number of times that a chunk began to rest. Orders `resting`.
    clock: u64,
    /// The move to the spill file that is under way.
    moving: Option<Move>,
    /// Whether a chunk has moved to the spill file and its slot of memory is not free yet.
    has_slot_to_free: bool,
    /// For each slot of memory, whether it is in a memory file.
    is_in_memory_file: Vec<bool>,
    /// Idle slots.
    idle_slots: BTreeSet<u32>,
    /// Stuck slots.
    stuck_slots: Vec<u32>,
    /// Number of slots that are being moved between the arena's file and a memory file. They are in no list.
    slots_changing_file: usize,
    /// Number of chunks that cannot be used, because an attach found them damaged.
    unusable_chunks: usize,
    /// Number of slots of memory that cannot be used, because an attach found them damaged.
    unusable_slots: usize,
    /// Number of changes since the invariants were checked.
    unchecked_changes: u32,
}

/// Free slots and slabs of one NUMA node.
#[derive(Default)]
struct NumaNode {
    /// Slots of memory that are free. The last one is used next.
    free_slots: Vec<u32>,
    /// Free slabs of each class, as chunk and slab. When a chunk is freed, its slabs are removed, so no entry is stale.
    free_slabs: [Vec<(u32, u32)>; 3],
    /// Number of slots of memory on this node.
    slots: u32,
    /// Number of slabs, since attach, that went to writers nearer to another NUMA node.
    foreign_slabs: u64,
}

/// Figures of one NUMA node's part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNodeFigures {
    /// The kernel's number of the NUMA node.
    pub id: u32,
    /// Size of the node's slots in bytes.
    pub bytes: u64,
    /// Size of the node's slots that are in use, in bytes.
    pub used_bytes: u64,
    /// Number of slabs, since attach, that went to writers nearer to another NUMA node.
    pub foreign_slabs: u64,
}

/// The state of one chunk. The default is that of a free chunk.
#[derive(Clone, Copy, Default)]
struct Chunk {
    /// Class of its slabs, while it is in use.
    class: Option<Class>,
    /// Number of slabs in use.
    used: u32,
    /// Number of leased slabs.
    leased: u32,
    /// When the chunk began to rest, as a value of [`Pool::clock`]. `None` means that it does not rest.
    rests_since: Option<u64>,
    /// Whether the chunk's data is in the spill file.
    is_spilled: bool,
    /// The NUMA node of its slot, while it is in memory.
    numa_node: usize,
}

/// A move of a chunk to the spill file that is under way.
struct Move {
    chunk: u32,
    /// The slot of the spill file to which the chunk moves.
    spill_slot: u32,
    /// The chunk's [`Chunk::rests_since`] before the move, which is restored if the move is abandoned.
    rested_since: u64,
    /// The chunk's free slabs. No writer may get one during the move.
    free_slabs: Vec<u32>,
    /// Whether the last slab in use was freed during the move.
    is_emptied: bool,
}

/// A move that [`Pool::begin_move`] has begun.
pub(crate) struct BegunMove {
    pub(crate) chunk: u32,
    /// The slot of the spill file to which the chunk moves.
    pub(crate) spill_slot: u32,
}

/// Size of the slabs in use, in bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct UsedBytes {
    /// Slabs of chunks in memory.
    pub(crate) memory: u64,
    /// Slabs of spilled chunks.
    pub(crate) spilled: u64,
}

/// A slab that was taken for a writer.
pub(crate) struct TakenSlab {
    pub(crate) chunk: u32,
    pub(crate) slab: u32,
    pub(crate) class: Class,
    /// The slot of memory that the chunk got, if it was divided for this slab. `None` means that it was in use before.
    pub(crate) new_slot: Option<u32>,
}

/// Returns the index of a class in [`NumaNode::free_slabs`].
fn class_index(class: Class) -> usize {
    match class {
        Class::Small => 0,
        Class::Medium => 1,
        Class::Whole => 2,
    }
}

/// Returns the NUMA node of a slot of memory.
pub(crate) fn numa_node_of(geometry: &Geometry, topology: &Topology, slot: u32) -> usize {
    (u64::from(slot) * topology.count() as u64 / u64::from(geometry.chunk_count)) as usize
}

impl Pool {
    /// Returns the pool, the allocator, of an empty arena: all slots of memory and all chunks are free. Each NUMA node
    /// gets the slots of its part of the memory.
    pub(crate) fn new(geometry: Geometry, topology: Topology) -> Self {
        let mut numa_nodes: Vec<NumaNode> = std::iter::repeat_with(NumaNode::default)
            .take(topology.count())
            .collect();
        for slot in (0..geometry.chunk_count).rev() {
            let numa_node = &mut numa_nodes[numa_node_of(&geometry, &topology, slot)];
            numa_node.free_slots.push(slot);
            numa_node.slots += 1;
        }
        Self {
            geometry,
            topology,
            free_chunks: (0..geometry.chunks()).rev().collect(),
            free_spill_slots: (0..geometry.spill_count).rev().collect(),
            chunks: vec![Chunk::default(); geometry.chunks() as usize],
            numa_nodes,
            resting: BTreeSet::new(),
            clock: 0,
            moving: None,
            has_slot_to_free: false,
            is_in_memory_file: vec![false; geometry.chunk_count as usize],
            idle_slots: BTreeSet::new(),
            stuck_slots: Vec::new(),
            slots_changing_file: 0,
            unusable_chunks: 0,
            unusable_slots: 0,
            unchecked_changes: 0,
        }
    }

    /// Checks the invariants after a change, in debug builds. A check takes time in proportion to the number of chunks,
    /// so with more chunks it is made after more changes.
    fn check_sometimes(&mut self) {
        const CHUNKS_PER_CHANGE: u32 = 64;
        if !cfg!(debug_assertions) {
            return;
        }
        self.unchecked_changes += 1;
        if self.unchecked_changes > self.geometry.chunks() / CHUNKS_PER_CHANGE {
            self.unchecked_changes = 0;
            self.assert_invariants();
        }
    }

    /// Asserts the invariants at the head of this file: each chunk, slot and slab is free once or in use.
    pub(crate) fn assert_invariants(&self) {
        self.assert_free_chunks();
        let mut free_slabs = self.collect_free_slabs();
        let mut in_memory_count = 0;
        let mut spilled_count = 0;
        let mut resting_count = 0;
        for (chunk, chunk_state) in self.chunks.iter().enumerate() {
            let slabs = std::mem::take(&mut free_slabs[chunk]);
            let Some(class) = chunk_state.class else {
                assert!(
                    slabs.is_empty() && chunk_state.rests_since.is_none(),
                    "chunk {chunk} is not in use"
                );
                continue;
            };
            self.assert_chunk(chunk, class, slabs);
            resting_count += usize::from(chunk_state.rests_since.is_some());
            if chunk_state.is_spilled {
                spilled_count += 1;
            } else {
                in_memory_count += 1;
            }
        }
        assert_eq!(self.resting.len(), resting_count, "chunks that rest");
        self.assert_counts(in_memory_count, spilled_count);
    }

    /// Asserts that each free chunk is free once and has no class.
    fn assert_free_chunks(&self) {
        let mut was_seen = vec![false; self.chunks.len()];
        for &chunk in &self.free_chunks {
            assert!(
                !std::mem::replace(&mut was_seen[chunk as usize], true),
                "chunk {chunk} is free twice"
            );
            assert!(
                self.chunks[chunk as usize].class.is_none(),
                "chunk {chunk} is free and in use"
            );
        }
    }

    /// Returns the free slabs of each chunk. Asserts that each is listed under the NUMA node and class of its chunk,
    /// and that the chunk is in memory.
    fn collect_free_slabs(&self) -> Vec<Vec<u32>> {
        let mut free_slabs = vec![Vec::new(); self.chunks.len()];
        for (index, numa_node) in self.numa_nodes.iter().enumerate() {
            for (class, slabs) in numa_node.free_slabs.iter().enumerate() {
                for &(chunk, slab) in slabs {
                    let chunk_state = self.chunks[chunk as usize];
                    let listing = (
                        chunk_state.numa_node,
                        chunk_state.class.map(class_index),
                        chunk_state.is_spilled,
                    );
                    assert_eq!(
                        listing,
                        (index, Some(class), false),
                        "slab {slab} of chunk {chunk} is free"
                    );
                    free_slabs[chunk as usize].push(slab);
                }
            }
        }
        free_slabs
    }

    /// Asserts the invariants of a chunk in use. `listed_free_slabs` are the slabs of the chunk that a writer could
    /// get; there are none while the chunk moves to the spill file.
    fn assert_chunk(&self, chunk: usize, class: Class, listed_free_slabs: Vec<u32>) {
        let chunk_state = self.chunks[chunk];
        let move_of_chunk = self
            .moving
            .as_ref()
            .filter(|moving| moving.chunk as usize == chunk);
        let is_moving = move_of_chunk.is_some();
        let free_slabs = match move_of_chunk {
            None => listed_free_slabs,
            Some(move_of_chunk) => {
                assert!(
                    listed_free_slabs.is_empty() && !chunk_state.is_spilled,
                    "chunk {chunk} moves and its slabs can be had"
                );
                assert_eq!(
                    move_of_chunk.is_emptied,
                    chunk_state.used == 0,
                    "chunk {chunk} moves"
                );
                move_of_chunk.free_slabs.clone()
            }
        };
        assert!(
            chunk_state.used > 0 || is_moving,
            "chunk {chunk} has a class and is empty"
        );
        assert!(
            chunk_state.leased <= chunk_state.used,
            "chunk {chunk}: {} leased, {} used",
            chunk_state.leased,
            chunk_state.used
        );
        self.assert_free_slabs(chunk, class, free_slabs);
        self.assert_rest(chunk, is_moving);
    }

    /// Asserts that each slab of a chunk exists, and is free once or in use. `free_slabs` are those of the chunk. A
    /// chunk in the spill file has no free slabs, because no writer can fill it there.
    fn assert_free_slabs(&self, chunk: usize, class: Class, mut free_slabs: Vec<u32>) {
        let chunk_state = self.chunks[chunk];
        let slab_count = self.slab_count(class);
        let free_count = free_slabs.len();
        free_slabs.sort_unstable();
        free_slabs.dedup();
        assert_eq!(
            free_slabs.len(),
            free_count,
            "a slab of chunk {chunk} is free twice"
        );
        assert!(
            free_slabs.last().is_none_or(|&slab| slab < slab_count),
            "chunk {chunk}: {free_slabs:?}"
        );
        if !chunk_state.is_spilled {
            assert_eq!(
                free_count + chunk_state.used as usize,
                slab_count as usize,
                "slabs of chunk {chunk}"
            );
        }
    }

    /// Asserts that a chunk in use rests if and only if it may move to the spill file. A chunk rests while it is in
    /// memory and none of its slabs is leased.
    fn assert_rest(&self, chunk: usize, is_moving: bool) {
        let chunk_state = self.chunks[chunk];
        let may_move = self.geometry.spill_count > 0
            && chunk_state.leased == 0
            && !chunk_state.is_spilled
            && !is_moving;
        assert_eq!(
            chunk_state.rests_since.is_some(),
            may_move,
            "chunk {chunk} may move"
        );
        if let Some(since) = chunk_state.rests_since {
            assert!(
                self.resting.contains(&(since, chunk as u32)),
                "chunk {chunk} rests"
            );
        }
    }

    /// Asserts that each chunk and each slot (the memory for one chunk) is free, in use or unusable after damage.
    /// `in_memory_count` and `spilled_count` are the numbers of chunks in use, in memory and in the spill file.
    ///
    /// What is neither free nor in use must be counted as unusable.
    fn assert_counts(&self, in_memory_count: usize, spilled_count: usize) {
        let free_slots: usize = self
            .numa_nodes
            .iter()
            .map(|numa_node| numa_node.free_slots.len())
            .sum();
        let known_chunks = self.free_chunks.len() + in_memory_count + spilled_count;
        let other_chunks = self.chunks.len().checked_sub(known_chunks);
        let slots_outside_arena_file =
            self.idle_slots.len() + self.stuck_slots.len() + self.slots_changing_file;
        let known_slots = free_slots
            + in_memory_count
            + slots_outside_arena_file
            + usize::from(self.has_slot_to_free);
        let other_slots = (self.geometry.chunk_count as usize).checked_sub(known_slots);
        let (other_chunks, other_slots) = other_chunks
            .zip(other_slots)
            .expect("no more chunks and slots than there are");
        assert!(
            other_chunks <= self.unusable_chunks,
            "{other_chunks} chunks are neither free nor in use"
        );
        assert!(
            other_slots <= self.unusable_slots,
            "{other_slots} slots are neither free nor in use"
        );
        let used_spill_slots = self.geometry.spill_count as usize - self.free_spill_slots.len();
        let moving_count = usize::from(self.moving.is_some());
        assert!(
            used_spill_slots <= spilled_count + moving_count + self.unusable_chunks,
            "{used_spill_slots} slots of the spill file for {spilled_count} chunks"
        );
    }

    fn chunk_mut(&mut self, chunk: u32) -> &mut Chunk {
        &mut self.chunks[chunk as usize]
    }

    /// Returns the class of a chunk's slabs, or `None` if the chunk is not in use.
    pub(crate) fn class_of(&self, chunk: u32) -> Option<Class> {
        self.chunks[chunk as usize].class
    }

    /// Returns the number of slabs in a chunk of this class.
    fn slab_count(&self, class: Class) -> u32 {
        (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32
    }

    // ---- slabs -------------------------------------------------------------------------------

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the free slabs of a class on the NUMA node of a chunk.
    fn free_slabs_near(&mut self, chunk: u32, class: Class) -> &mut Vec<(u32, u32)> {
        let numa_node = self.chunks[chunk as usize].numa_node;
        &mut self.numa_nodes[numa_node].free_slabs[class_index(class)]
    }

    /// Takes a free slab as [`Pool::take_slab`] does, of `class` or else of the next smaller class of which one is
    /// free.
    pub(crate) fn take_slab_of_at_most(&mut self, class: Class, near: usize) -> Option<TakenSlab> {
        [Class::Whole, Class::Medium, Class::Small]
            .into_iter()
            .filter(|&candidate| candidate <= class)
            .find_map(|candidate| self.take_slab(candidate, near))
    }

    /// Takes a free slab of `class` for a writer that runs near the NUMA node `near`. Returns `None` if no node has
    /// one.
    ///
    /// The slab comes from the nearest node that has a free slab of the class, or a free slot (memory for one chunk).
    /// If the node has only a free slot, a free chunk gets that slot and is divided into slabs of the class.
    fn take_slab(&mut self, class: Class, near: usize) -> Option<TakenSlab> {
        let numa_node = self.nearest_node_with_slab(class, near)?;
        let free_slab = self.numa_nodes[numa_node].free_slabs[class_index(class)].pop();
        let taken = match free_slab {
            Some((chunk, slab)) => TakenSlab {
                chunk,
                slab,
                class,
                new_slot: None,
            },
            None => self.divide_chunk(class, numa_node),
        };
        self.numa_nodes[numa_node].foreign_slabs += u64::from(numa_node != near);
        // A chunk with a leased slab must not move to the spill file.
        self.end_rest(taken.chunk);
        let chunk = self.chunk_mut(taken.chunk);
        chunk.used += 1;
        chunk.leased += 1;
        self.check_sometimes();
        Some(taken)
    }

    /// Returns the NUMA node nearest to `near` from which a slab of `class` can be taken.
    fn nearest_node_with_slab(&self, class: Class, near: usize) -> Option<usize> {
        let has_free_chunk = !self.free_chunks.is_empty();
        self.topology
            .nodes_by_distance(near)
            .iter()
            .map(|&numa_node| numa_node as usize)
            .find(|&numa_node| self.numa_nodes[numa_node].has_slab(class, has_free_chunk))
    }

    /// Assigns a free slot, memory for one chunk, of a NUMA node to a free chunk, and divides the chunk into slabs of a
    /// class. Returns the first slab, and makes the others free. The caller has checked that a chunk and a slot are
    /// free.
    fn divide_chunk(&mut self, class: Class, numa_node: usize) -> TakenSlab {
        let slot = self.numa_nodes[numa_node]
            .free_slots
            .pop()
            .expect("a node without a free slab of the class has a free slot");
        let chunk = self
            .free_chunks
            .pop()
            .expect("`NumaNode::has_slab` needs a free chunk");
        *self.chunk_mut(chunk) = Chunk {
            class: Some(class),
            numa_node,
            ..Chunk::default()
        };
        let other_slabs = (1..self.slab_count(class)).rev().map(|slab| (chunk, slab));
        self.numa_nodes[numa_node].free_slabs[class_index(class)].extend(other_slabs);
        TakenSlab {
            chunk,
            slab: 0,
            class,
            new_slot: Some(slot),
        }
    }

    /// Ends the lease of one slab of `chunk`. Returns whether the chunk rests now, and so may move to the spill file.
    pub(crate) fn end_lease(&mut self, chunk: u32) -> bool {
        self.chunk_mut(chunk).leased -= 1;
        let is_resting = self.start_rest(chunk);
        self.check_sometimes();
        is_resting
    }

    /// Makes a chunk rest if the conditions hold: there is a spill file, and the chunk is in use, in memory and without
    /// a lease. Returns whether it rests.
    fn start_rest(&mut self, chunk: u32) -> bool {
        let chunk_state = self.chunks[chunk as usize];
        let is_resting = self.geometry.spill_count > 0
            && chunk_state.leased == 0
            && !chunk_state.is_spilled
            && chunk_state.class.is_some();
        if is_resting && chunk_state.rests_since.is_none() {
            self.clock += 1;
            self.start_rest_since(chunk, self.clock);
        }
        is_resting
    }

    /// Adds a chunk to `resting`. `when` is the value of the clock that orders it.
    fn start_rest_since(&mut self, chunk: u32, when: u64) {
        self.chunk_mut(chunk).rests_since = Some(when);
        self.resting.insert((when, chunk));
    }

    /// Removes a chunk from `resting`. Returns since when it has rested, or `None` if it did not rest.
    fn end_rest(&mut self, chunk: u32) -> Option<u64> {
        let since = self.chunk_mut(chunk).rests_since.take()?;
        self.resting.remove(&(since, chunk));
        Some(since)
    }

    /// Frees a slab, a part of a chunk, when nothing uses it any more. Returns whether its chunk is free now. Then the
    /// caller frees the chunk's slot. While the chunk moves to the spill file, the slab is noted and false is returned.
    pub(crate) fn free_slab(&mut self, chunk: u32, slab: u32) -> bool {
        let chunk_state = self.chunk_mut(chunk);
        let class = chunk_state.class.expect("a slab in use has a class");
        let is_spilled = chunk_state.is_spilled;
        chunk_state.used -= 1;
        let is_empty = chunk_state.used == 0;
        if let Some(moving) = &mut self.moving
            && moving.chunk == chunk
        {
            // The end of the move decides what becomes of the chunk and its slabs.
            moving.free_slabs.push(slab);
            moving.is_emptied = is_empty;
            return false;
        }
        if is_empty {
            self.free_chunk(chunk);
            return true;
        }
        if !is_spilled {
            self.free_slabs_near(chunk, class).push((chunk, slab));
        }
        self.check_sometimes();
        false
    }

    /// Frees a chunk.
    fn free_chunk(&mut self, chunk: u32) {
        self.end_rest(chunk);
        if let Some(class) = self.chunk_mut(chunk).class.take() {
            self.free_slabs_near(chunk, class)
                .retain(|&(slab_chunk, _)| slab_chunk != chunk);
        }
        self.chunk_mut(chunk).is_spilled = false;
        self.free_chunks.push(chunk);
    }

    /// Frees a slot that no longer has a chunk. A slot of a memory file becomes idle instead.
    pub(crate) fn free_slot(&mut self, home: Home) {
        match home {
            Home::Memory(slot) if self.is_in_memory_file[slot as usize] => {
                self.idle_slots.insert(slot);
            }
            Home::Memory(slot) => self.push_free_slot(slot),
            Home::Spill(slot) => self.free_spill_slots.push(slot),
        }
        self.check_sometimes();
    }

    /// Adds a slot of memory to the free slots of its NUMA node.
    fn push_free_slot(&mut self, slot: u32) {
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        self.numa_nodes[numa_node].free_slots.push(slot);
    }

    // ---- slots of memory files -----------------------------------------------------------------

    /// Takes a free slot, memory for one chunk, to be moved to a memory file. Returns `None` if at most
    /// `reserved_slots` slots are free.
    ///
    /// The caller then calls [`Pool::record_in_memory_file`], or [`Pool::restore_free_slot`] if the move fails.
    pub(crate) fn take_free_slot(&mut self, reserved_slots: u32) -> Option<u32> {
        let free_count: usize = self
            .numa_nodes
            .iter()
            .map(|numa_node| numa_node.free_slots.len())
            .sum();
        if free_count <= reserved_slots as usize {
            return None;
        }
        let slot = self
            .numa_nodes
            .iter_mut()
            .find_map(|numa_node| numa_node.free_slots.pop())?;
        self.slots_changing_file += 1;
        self.check_sometimes();
        Some(slot)
    }

    /// Makes a slot free again that was not moved to a memory file.
    pub(crate) fn restore_free_slot(&mut self, slot: u32) {
        self.slots_changing_file -= 1;
        self.push_free_slot(slot);
        self.check_sometimes();
    }

    /// Records that a slot was moved to a memory file. It is idle now.
    pub(crate) fn record_in_memory_file(&mut self, slot: u32) {
        self.slots_changing_file -= 1;
        self.is_in_memory_file[slot as usize] = true;
        self.idle_slots.insert(slot);
        self.check_sometimes();
    }

    /// Takes an idle slot that is to be moved back to the arena's file. Returns `None` if no slot is idle.
    ///
    /// The caller then calls [`Pool::record_in_arena_file`], or [`Pool::record_stuck_slot`] if the move fails.
    pub(crate) fn take_any_idle_slot(&mut self) -> Option<u32> {
        let slot = self.idle_slots.pop_first()?;
        self.slots_changing_file += 1;
        Some(slot)
    }

    /// Takes this slot, as [`Pool::take_any_idle_slot`] takes any. Returns false, and takes nothing, if it is not idle.
    pub(crate) fn take_idle_slot(&mut self, slot: u32) -> bool {
        let is_idle = self.idle_slots.remove(&slot);
        self.slots_changing_file += usize::from(is_idle);
        is_idle
    }

    /// Records that a slot is stuck in its memory file, because the arena's file has no memory for it.
    pub(crate) fn record_stuck_slot(&mut self, slot: u32) {
        self.slots_changing_file -= 1;
        self.stuck_slots.push(slot);
        self.check_sometimes();
    }

    /// Makes stuck slots idle, so that their return is tried again.
    pub(crate) fn retry_stuck_slots(&mut self) {
        self.idle_slots.extend(self.stuck_slots.drain(..));
    }

    /// Records that a slot was moved back to the arena's file. It is free now.
    pub(crate) fn record_in_arena_file(&mut self, slot: u32) {
        self.slots_changing_file -= 1;
        self.is_in_memory_file[slot as usize] = false;
        self.push_free_slot(slot);
        self.check_sometimes();
    }

    /// At attach: records that a slot is in a memory file. If no chunk has it, it is idle.
    pub(crate) fn adopt_memory_file_slot(&mut self, slot: u32) {
        self.is_in_memory_file[slot as usize] = true;
        if self.remove_free_slot(slot) {
            self.idle_slots.insert(slot);
        }
    }

    /// At attach: makes a slot unusable, because its location word is invalid or its memory file cannot be used.
    pub(crate) fn exclude_slot(&mut self, slot: u32) {
        if self.remove_free_slot(slot) {
            self.unusable_slots += 1;
        }
    }

    /// Removes a slot from the free slots of its NUMA node. Returns false if it was not free.
    fn remove_free_slot(&mut self, slot: u32) -> bool {
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        let free_slots = &mut self.numa_nodes[numa_node].free_slots;
        let count_before = free_slots.len();
        free_slots.retain(|&free_slot| free_slot != slot);
        free_slots.len() < count_before
    }

    pub(crate) fn is_idle_slot(&self, slot: u32) -> bool {
        self.idle_slots.contains(&slot)
    }

    pub(crate) fn idle_slot_count(&self) -> usize {
        self.idle_slots.len()
    }

    /// Returns whether the next chunk for a writer needs an idle slot, because no other slot is free.
    pub(crate) fn needs_idle_slot(&self) -> bool {
        !self.idle_slots.is_empty()
            && self
                .numa_nodes
                .iter()
                .all(|numa_node| numa_node.free_slots.is_empty())
    }

    /// Leases an idle slot, which is memory of a memory file without a chunk. A free chunk gets the slot and becomes
    /// one slab of the class `Whole`. Returns `None` if no chunk is free or `slot` is not idle.
    pub(crate) fn lease_idle_slot(&mut self, slot: u32) -> Option<TakenSlab> {
        if self.free_chunks.is_empty() || !self.idle_slots.remove(&slot) {
            return None;
        }
        let chunk = self.free_chunks.pop()?;
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        *self.chunk_mut(chunk) = Chunk {
            class: Some(Class::Whole),
            used: 1,
            leased: 1,
            numa_node,
            ..Chunk::default()
        };
        self.check_sometimes();
        Some(TakenSlab {
            chunk,
            slab: 0,
            class: Class::Whole,
            new_slot: Some(slot),
        })
    }

    // ---- moves -------------------------------------------------------------------------------

    /// Begins to move a chunk to the spill file: of the chunks for which `may_move` returns true, the one that has
    /// rested longest. A chunk rests while it is in memory and none of its slabs is leased. Returns `None` if there is
    /// no such chunk, or no free slot in the spill file.
    ///
    /// The caller ends the move with [`Pool::finish_move`] or [`Pool::abandon_move`]. Until then no writer gets a slab
    /// of the chunk.
    pub(crate) fn begin_move(
        &mut self,
        may_move: &mut dyn FnMut(u32) -> bool,
    ) -> Option<BegunMove> {
        assert!(self.moving.is_none(), "one move at a time");
        if self.free_spill_slots.is_empty() {
            return None;
        }
        let (rested_since, chunk) = self
            .resting
            .iter()
            .copied()
            .find(|&(_, chunk)| may_move(chunk))?;
        let spill_slot = self.free_spill_slots.pop().expect("a slot is free");
        self.end_rest(chunk);
        let class = self.chunks[chunk as usize]
            .class
            .expect("a resting chunk is in use");
        let free_slabs = self
            .free_slabs_near(chunk, class)
            .extract_if(.., |(slab_chunk, _)| *slab_chunk == chunk)
            .map(|(_, slab)| slab)
            .collect();
        self.moving = Some(Move {
            chunk,
            spill_slot,
            rested_since,
            free_slabs,
            is_emptied: false,
        });
        self.check_sometimes();
        Some(BegunMove { chunk, spill_slot })
    }

    /// Returns whether the last slab of the moving chunk was freed.
    pub(crate) fn is_moving_chunk_emptied(&self) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.is_emptied)
    }

    /// Ends a move: the chunk is in the spill file now. Its free slabs stay unused until the whole chunk is free.
    ///
    /// The caller then frees the chunk's slot of memory with [`Pool::free_vacated_slot`].
    pub(crate) fn finish_move(&mut self) {
        let moving = self.moving.take().expect("a move is under way");
        self.chunk_mut(moving.chunk).is_spilled = true;
        self.has_slot_to_free = true;
        self.check_sometimes();
    }

    /// Frees the slot of memory in which the moved chunk was.
    pub(crate) fn free_vacated_slot(&mut self, slot: u32) {
        self.has_slot_to_free = false;
        self.free_slot(Home::Memory(slot));
    }

    /// Abandons a move to the spill file: the chunk stays in memory. Returns the chunk if its last slab was freed
    /// during the move, so that it is free now. Returns `None` otherwise.
    ///
    /// With `try_slot_last`, the slot of the spill file is used again only after all others, because a write to it
    /// failed.
    pub(crate) fn abandon_move(&mut self, try_slot_last: bool) -> Option<u32> {
        let Move {
            chunk,
            spill_slot,
            rested_since,
            free_slabs,
            is_emptied,
        } = self.moving.take().expect("a move is under way");
        if try_slot_last {
            self.free_spill_slots.insert(0, spill_slot);
        } else {
            self.free_spill_slots.push(spill_slot);
        }
        if is_emptied {
            self.free_chunk(chunk);
            return Some(chunk);
        }
        let class = self.chunks[chunk as usize].class.expect("it is in use");
        self.free_slabs_near(chunk, class)
            .extend(free_slabs.into_iter().map(|slab| (chunk, slab)));
        self.start_rest_since(chunk, rested_since);
        self.check_sometimes();
        None
    }

    // ---- attach ------------------------------------------------------------------------------

    /// At attach: registers a chunk in use, with its class and its used slabs. `home` is the slot with its data, or
    /// `None` if damage has made that slot unknown.
    ///
    /// Called after [`Pool::reserve_used`], which has taken the chunk and its slot off the free lists. It has counted
    /// the chunk, and a slot of memory, as unusable. This call ends that count.
    pub(crate) fn adopt_chunk(
        &mut self,
        chunk: u32,
        class: Class,
        used: &[u32],
        home: Option<Home>,
    ) {
        self.unusable_chunks = self.unusable_chunks.saturating_sub(1);
        let (is_spilled, numa_node) = match home {
            Some(Home::Memory(slot)) => {
                self.unusable_slots = self.unusable_slots.saturating_sub(1);
                (false, numa_node_of(&self.geometry, &self.topology, slot))
            }
            // Such a chunk is on no NUMA node, so the index is never used. A chunk with an unknown slot counts as
            // spilled, so that no writer gets a slab of it.
            Some(Home::Spill(_)) | None => (true, 0),
        };
        *self.chunk_mut(chunk) = Chunk {
            class: Some(class),
            used: used.len() as u32,
            is_spilled,
            numa_node,
            ..Chunk::default()
        };
        if !is_spilled {
            let unused_slabs = (0..self.slab_count(class)).filter(|slab| !used.contains(slab));
            self.free_slabs_near(chunk, class)
                .extend(unused_slabs.map(|slab| (chunk, slab)));
        }
        self.start_rest(chunk);
    }

    /// At attach: counts the lease of a client of an earlier firnd, which may still fill a slab of this chunk.
    pub(crate) fn add_lease(&mut self, chunk: u32) {
        self.end_rest(chunk);
        self.chunk_mut(chunk).leased += 1;
    }

    /// At attach: takes the chunks and slots (places for one chunk each) that are in use off the free lists, so that no
    /// writer gets them.
    ///
    /// They count as unusable until [`Pool::adopt_chunk`] registers them. Those that it never registers are damaged,
    /// and remain unusable.
    pub(crate) fn reserve_used(
        &mut self,
        is_chunk_used: &dyn Fn(u32) -> bool,
        is_slot_used: &dyn Fn(Home) -> bool,
    ) {
        let chunks_before = self.free_chunks.len();
        let slots_before = self.free_or_idle_slots();
        self.free_chunks.retain(|&chunk| !is_chunk_used(chunk));
        for numa_node in &mut self.numa_nodes {
            numa_node
                .free_slots
                .retain(|&slot| !is_slot_used(Home::Memory(slot)));
        }
        self.idle_slots
            .retain(|&slot| !is_slot_used(Home::Memory(slot)));
        self.unusable_chunks += chunks_before - self.free_chunks.len();
        self.unusable_slots += slots_before - self.free_or_idle_slots();
        self.free_spill_slots
            .retain(|&slot| !is_slot_used(Home::Spill(slot)));
    }

    /// Returns the number of slots of memory without a chunk.
    fn free_or_idle_slots(&self) -> usize {
        let free_slots = |numa_node: &NumaNode| numa_node.free_slots.len();
        self.numa_nodes.iter().map(free_slots).sum::<usize>() + self.idle_slots.len()
    }

    /// Returns the number of slabs of a chunk that are in use.
    pub(crate) fn used_slabs(&self, chunk: u32) -> u32 {
        self.chunks[chunk as usize].used
    }

    // ---- figures -----------------------------------------------------------------------------

    /// Returns the size of the slabs in use.
    pub(crate) fn used_bytes(&self) -> UsedBytes {
        let mut sums = UsedBytes::default();
        for chunk in &self.chunks {
            let Some(class) = chunk.class else { continue };
            let slab_bytes = class.slab_bytes(self.geometry.chunk_bytes);
            let bytes = u64::from(chunk.used) * slab_bytes;
            if chunk.is_spilled {
                sums.spilled += bytes;
            } else {
                sums.memory += bytes;
            }
        }
        sums
    }

    /// Returns the number of slots of memory in use.
    pub(crate) fn memory_used(&self) -> u32 {
        let unused = self.idle_slots.len() + self.slots_changing_file;
        self.numa_nodes
            .iter()
            .map(NumaNode::used_slots)
            .sum::<u32>()
            - unused as u32
    }

    /// Returns the figures of each NUMA node.
    pub(crate) fn numa_node_figures(&self) -> Vec<NumaNodeFigures> {
        let bytes = |slots: u32| u64::from(slots) * self.geometry.chunk_bytes;
        let figures = |(index, numa_node): (usize, &NumaNode)| NumaNodeFigures {
            id: self.topology.id(index),
            bytes: bytes(numa_node.slots),
            used_bytes: bytes(numa_node.used_slots()),
            foreign_slabs: numa_node.foreign_slabs,
        };
        self.numa_nodes.iter().enumerate().map(figures).collect()
    }

    /// Returns the number of free slots of the spill file.
    pub(crate) fn free_spill_slot_count(&self) -> u32 {
        self.free_spill_slots.len() as u32
    }

    /// Returns whether a chunk is moving, or a chunk for which `may_move` returns true could move now.
    pub(crate) fn can_move(&self, may_move: &dyn Fn(u32) -> bool) -> bool {
        let has_movable_chunk = || self.resting.iter().any(|&(_, chunk)| may_move(chunk));
        self.moving.is_some()
            || self.has_slot_to_free
            || (!self.free_spill_slots.is_empty() && has_movable_chunk())
    }

    /// Returns whether a slab of `class` can be taken.
    pub(crate) fn has_slab(&self, class: Class) -> bool {
        let has_free_chunk = !self.free_chunks.is_empty();
        (has_free_chunk && !self.idle_slots.is_empty())
            || self
                .numa_nodes
                .iter()
                .any(|numa_node| numa_node.has_slab(class, has_free_chunk))
    }
}

impl NumaNode {
    /// Returns the number of slots that are not free.
    fn used_slots(&self) -> u32 {
        self.slots - self.free_slots.len() as u32
    }

    /// Returns whether a slab of `class` can be taken from this node.
    fn has_slab(&self, class: Class, has_free_chunk: bool) -> bool {
        !self.free_slabs[class_index(class)].is_empty()
            || (has_free_chunk && !self.free_slots.is_empty())
    }
}
