//! The pool of free chunks, slots and slabs, and the order in which chunks move to the spill file.
//!
//! A chunk in use has a slot, in memory or in the spill file. A new chunk needs a free chunk number and a free slot of
//! memory. There are as many chunk numbers as slots, so a free slot always finds a free number.
//!
//! Terms
//! * A chunk is *cut* into slabs of one class when it gets a slot.
//! * A chunk *rests* while it is in memory and none of its slabs is leased. Only a resting chunk may move to the spill file.
//! * A chunk is *away* while its data is in the spill file.
//! * A slot is *lent* while a memory file has it. A lent slot without a chunk is *idle*, or *stuck* if the arena's file
//!   could not take it back.
//!
//! Invariants
//! * A chunk is free, or it has a class. A chunk that an attach found damaged may be neither.
//! * A slot is free, or a chunk has it, or the chunk that had it has just moved. Lent slots without a chunk are not free.
//! * The unused slabs of a chunk in memory are free, in the list of its NUMA node. Those of a moving chunk are in the move,
//!   and those of a chunk that is away are not free. So writers get slabs only of chunks in memory that do not move.
//! * A chunk has a class exactly while a slab of it is in use, or while it moves.
//! * Chunks and slots are reused last in, first out, because the pages of the last one are most likely in a cache.
//! * Each NUMA node has an equal run of the slots of memory, in the order of the NUMA nodes. A writer gets a slab of the
//!   nearest NUMA node that has one, even if a chunk must be cut for it.
//! * `resting` has exactly the resting chunks, in the order in which their last leases ended. It is empty without a spill
//!   file.

use std::collections::BTreeSet;

use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::slab::Class;

use crate::topology::Topology;

/// The pool. It is in the memory of firnd, and rebuilt at attach.
pub(crate) struct Pool {
    geometry: Geometry,
    topology: Topology,
    free_chunks: Vec<u32>,
    free_spill: Vec<u32>,
    chunks: Vec<Chunk>,
    numa_nodes: Vec<NumaNode>,
    resting: BTreeSet<(u64, u32)>,
    /// Number of times that a chunk began to rest. Orders `resting`.
    clock: u64,
    moving: Option<Moving>,
    /// Whether a chunk has moved and its slot of memory is not free yet.
    is_slot_leaving: bool,
    /// For each slot of memory: whether it is lent.
    lent: Vec<bool>,
    /// Idle slots.
    idle: BTreeSet<u32>,
    /// Stuck slots.
    stuck: Vec<u32>,
    /// Number of slots that are being moved between the arena's file and a memory file.
    exchanged: usize,
    /// Chunks and slots of memory that were lost to damage at attach.
    lost: (usize, usize),
    /// Number of changes since the invariants were checked.
    unchecked_changes: u32,
}

/// Free slots and slabs of one NUMA node.
#[derive(Default)]
struct NumaNode {
    free_memory: Vec<u32>,
    /// Free slabs of each class, as chunk and slab. When a chunk is freed, its slabs are removed, so no entry is stale.
    free_slabs: [Vec<(u32, u32)>; 3],
    slots: u32,
    foreign_slabs: u64,
}

/// Figures of one NUMA node's part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNodeFigures {
    /// Number that the kernel gives the NUMA node.
    pub id: u32,
    /// Size of its slots.
    pub bytes: u64,
    /// Size of those in use.
    pub used_bytes: u64,
    /// Number of slabs, since attach, that went to writers nearer to another NUMA node.
    pub foreign_slabs: u64,
}

#[derive(Clone, Copy, Default)]
struct Chunk {
    /// Class of its slabs, while it is in use.
    class: Option<Class>,
    /// Number of slabs in use.
    used: u32,
    /// Number of leased slabs.
    leased: u32,
    /// When it began to rest, as a value of [`Pool::clock`].
    rests_since: Option<u64>,
    /// Whether its data is in the spill file.
    is_away: bool,
    /// The NUMA node of its slot, while it is in memory.
    numa_node: usize,
}

/// A chunk that moves to the spill file.
struct Moving {
    chunk: u32,
    /// Its slot in the spill file.
    to: u32,
    rested_since: u64,
    /// Its free slabs. No writer may get one during the move.
    free: Vec<u32>,
    is_emptied: bool,
}

/// A slab that was taken for a writer.
pub(crate) struct TakenSlab {
    pub(crate) chunk: u32,
    pub(crate) slab: u32,
    /// Slot of memory that the chunk got, if the chunk was cut for this slab.
    pub(crate) cut: Option<u32>,
}

/// Index of a class in the lists of free slabs.
fn class_index(class: Class) -> usize {
    match class {
        Class::Small => 0,
        Class::Medium => 1,
        Class::Whole => 2,
    }
}

/// Returns the NUMA node of a slot of memory.
pub(crate) fn numa_node_of(geometry: &Geometry, topology: &Topology, memory: u32) -> usize {
    (u64::from(memory) * topology.count() as u64 / u64::from(geometry.chunk_count)) as usize
}

impl Pool {
    pub(crate) fn new(geometry: Geometry, topology: Topology) -> Self {
        let mut numa_nodes: Vec<NumaNode> = std::iter::repeat_with(NumaNode::default)
            .take(topology.count())
            .collect();
        for memory in (0..geometry.chunk_count).rev() {
            let numa_node = &mut numa_nodes[numa_node_of(&geometry, &topology, memory)];
            numa_node.free_memory.push(memory);
            numa_node.slots += 1;
        }
        Self {
            geometry,
            topology,
            free_chunks: (0..geometry.chunks()).rev().collect(),
            free_spill: (0..geometry.spill_count).rev().collect(),
            chunks: vec![Chunk::default(); geometry.chunks() as usize],
            numa_nodes,
            resting: BTreeSet::new(),
            clock: 0,
            moving: None,
            is_slot_leaving: false,
            lent: vec![false; geometry.chunk_count as usize],
            idle: BTreeSet::new(),
            stuck: Vec::new(),
            exchanged: 0,
            lost: (0, 0),
            unchecked_changes: 0,
        }
    }

    /// Checks the invariants after a change, in debug builds. With many chunks the check is slow, so it follows only some
    /// changes.
    fn check(&mut self) {
        const CHUNKS_EACH_TIME: u32 = 64;
        if !cfg!(debug_assertions) {
            return;
        }
        self.unchecked_changes += 1;
        if self.unchecked_changes > self.geometry.chunks() / CHUNKS_EACH_TIME {
            self.unchecked_changes = 0;
            self.assert_invariants();
        }
    }

    /// Asserts the invariants at the head of this file.
    pub(crate) fn assert_invariants(&self) {
        self.assert_free_chunks();
        let mut free_slabs = self.collect_free_slabs();
        let mut in_memory = 0;
        let mut away_count = 0;
        let mut resting = 0;
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
            resting += usize::from(chunk_state.rests_since.is_some());
            if chunk_state.is_away {
                away_count += 1
            } else {
                in_memory += 1
            }
        }
        assert_eq!(self.resting.len(), resting, "chunks that rest");
        self.assert_counts(in_memory, away_count);
    }

    /// Asserts that each free chunk is free once and has no class.
    fn assert_free_chunks(&self) {
        let mut free = vec![false; self.chunks.len()];
        for &chunk in &self.free_chunks {
            assert!(
                !std::mem::replace(&mut free[chunk as usize], true),
                "chunk {chunk} is free twice"
            );
            assert!(
                self.chunks[chunk as usize].class.is_none(),
                "chunk {chunk} is free and in use"
            );
        }
    }

    /// Returns the free slabs of each chunk. Asserts that each is listed under the NUMA node and class of its chunk, and that
    /// the chunk is in memory.
    fn collect_free_slabs(&self) -> Vec<Vec<u32>> {
        let mut free_slabs = vec![Vec::new(); self.chunks.len()];
        for (index, numa_node) in self.numa_nodes.iter().enumerate() {
            for (class, slabs) in numa_node.free_slabs.iter().enumerate() {
                for &(chunk, slab) in slabs {
                    let chunk_state = self.chunks[chunk as usize];
                    let place = (
                        chunk_state.numa_node,
                        chunk_state.class.map(class_index),
                        chunk_state.is_away,
                    );
                    assert_eq!(
                        place,
                        (index, Some(class), false),
                        "slab {slab} of chunk {chunk} is free"
                    );
                    free_slabs[chunk as usize].push(slab);
                }
            }
        }
        free_slabs
    }

    /// Asserts the invariants of a chunk in use. `free_slabs` are its slabs that a writer could get.
    fn assert_chunk(&self, chunk: usize, class: Class, mut free_slabs: Vec<u32>) {
        let chunk_state = self.chunks[chunk];
        let moving = self
            .moving
            .as_ref()
            .filter(|moving| moving.chunk as usize == chunk);
        if let Some(moving) = moving {
            assert!(
                free_slabs.is_empty() && !chunk_state.is_away,
                "chunk {chunk} moves and its slabs can be had"
            );
            free_slabs.clone_from(&moving.free);
            assert_eq!(
                moving.is_emptied,
                chunk_state.used == 0,
                "chunk {chunk} moves"
            );
        }
        let free_count = free_slabs.len();
        free_slabs.sort_unstable();
        free_slabs.dedup();
        assert_eq!(
            free_slabs.len(),
            free_count,
            "a slab of chunk {chunk} is free twice"
        );
        assert!(
            free_slabs
                .last()
                .is_none_or(|&slab| slab < self.slabs(class)),
            "chunk {chunk}: {free_slabs:?}"
        );
        assert!(
            chunk_state.used > 0 || moving.is_some(),
            "chunk {chunk} has a class and is empty"
        );
        assert!(
            chunk_state.leased <= chunk_state.used,
            "chunk {chunk}: {} leased, {} used",
            chunk_state.leased,
            chunk_state.used
        );
        if !chunk_state.is_away {
            let slab_count = self.slabs(class) as usize;
            assert_eq!(
                free_count + chunk_state.used as usize,
                slab_count,
                "slabs of chunk {chunk}"
            );
        }
        let is_resting = self.geometry.spill_count > 0
            && chunk_state.leased == 0
            && !chunk_state.is_away
            && moving.is_none();
        assert_eq!(
            chunk_state.rests_since.is_some(),
            is_resting,
            "chunk {chunk} may move"
        );
        if let Some(since) = chunk_state.rests_since {
            assert!(
                self.resting.contains(&(since, chunk as u32)),
                "chunk {chunk} rests"
            );
        }
    }

    /// Asserts that chunks and slots are free, in use or lost: `in_memory` and `away_count` are the chunks in use.
    fn assert_counts(&self, in_memory: usize, away_count: usize) {
        let free_memory: usize = self
            .numa_nodes
            .iter()
            .map(|numa_node| numa_node.free_memory.len())
            .sum();
        let used = in_memory + away_count;
        let lost_chunks = self.chunks.len().checked_sub(self.free_chunks.len() + used);
        let slots = self.geometry.chunk_count as usize;
        let lent = self.idle.len() + self.stuck.len() + self.exchanged;
        let accounted = free_memory + in_memory + lent + usize::from(self.is_slot_leaving);
        let lost_slots = slots.checked_sub(accounted);
        let (lost_chunks, lost_slots) = lost_chunks
            .zip(lost_slots)
            .expect("no more chunks and slots than there are");
        assert!(
            lost_chunks <= self.lost.0,
            "{lost_chunks} chunks are neither free nor in use"
        );
        assert!(
            lost_slots <= self.lost.1,
            "{lost_slots} slots are neither free nor in use"
        );
        let spilled = self.geometry.spill_count as usize - self.free_spill.len();
        let moving = usize::from(self.moving.is_some());
        assert!(
            spilled <= away_count + moving + self.lost.0,
            "{spilled} slots of the spill file for {away_count} chunks"
        );
    }

    fn chunk_mut(&mut self, chunk: u32) -> &mut Chunk {
        &mut self.chunks[chunk as usize]
    }

    pub(crate) fn class(&self, chunk: u32) -> Option<Class> {
        self.chunks[chunk as usize].class
    }

    fn slabs(&self, class: Class) -> u32 {
        (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32
    }

    // ---- slabs -------------------------------------------------------------------------------

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Returns the free slabs of a class on the NUMA node of a chunk.
    fn slabs_beside(&mut self, chunk: u32, class: Class) -> &mut Vec<(u32, u32)> {
        let numa_node = self.chunks[chunk as usize].numa_node;
        &mut self.numa_nodes[numa_node].free_slabs[class_index(class)]
    }

    /// Takes a free slab of `class` for a writer that runs near the NUMA node `near`. `None`: no node has one.
    ///
    /// The nearest node with a free slab of the class, or with a free slot of memory, gives the slab. If it has no free
    /// slab, a free chunk gets a slot of the node and is cut into slabs of the class.
    pub(crate) fn take(&mut self, class: Class, near: usize) -> Option<TakenSlab> {
        let has_free_chunk = !self.free_chunks.is_empty();
        let has_room = |numa_node: &NumaNode| numa_node.has_slab(class, has_free_chunk);
        let numa_node = self
            .topology
            .order(near)
            .iter()
            .map(|&numa_node| numa_node as usize)
            .find(|&numa_node| has_room(&self.numa_nodes[numa_node]))?;
        let taken = if let Some((chunk, slab)) =
            self.numa_nodes[numa_node].free_slabs[class_index(class)].pop()
        {
            TakenSlab {
                chunk,
                slab,
                cut: None,
            }
        } else {
            let slot = self.numa_nodes[numa_node]
                .free_memory
                .pop()
                .expect("a node without a free slab of the class has a free slot");
            let chunk = self
                .free_chunks
                .pop()
                .expect("`has_room` needs a free chunk");
            *self.chunk_mut(chunk) = Chunk {
                class: Some(class),
                numa_node,
                ..Chunk::default()
            };
            let other_slabs = (1..self.slabs(class)).rev().map(|slab| (chunk, slab));
            self.numa_nodes[numa_node].free_slabs[class_index(class)].extend(other_slabs);
            TakenSlab {
                chunk,
                slab: 0,
                cut: Some(slot),
            }
        };
        self.numa_nodes[numa_node].foreign_slabs += u64::from(numa_node != near);
        self.disturb(taken.chunk);
        let chunk = self.chunk_mut(taken.chunk);
        chunk.used += 1;
        chunk.leased += 1;
        self.check();
        Some(taken)
    }

    /// Ends the lease of a slab. Returns whether its chunk rests now.
    pub(crate) fn end_lease(&mut self, chunk: u32) -> bool {
        self.chunk_mut(chunk).leased -= 1;
        let is_resting = self.rest(chunk);
        self.check();
        is_resting
    }

    /// Lets a chunk rest if none of its slabs is leased. Returns whether it rests.
    fn rest(&mut self, chunk: u32) -> bool {
        let chunk_state = self.chunks[chunk as usize];
        let is_resting = self.geometry.spill_count > 0
            && chunk_state.leased == 0
            && !chunk_state.is_away
            && chunk_state.class.is_some();
        if is_resting && chunk_state.rests_since.is_none() {
            self.clock += 1;
            self.rest_since(chunk, self.clock);
        }
        is_resting
    }

    /// Adds a chunk to `resting`.
    fn rest_since(&mut self, chunk: u32, when: u64) {
        self.chunk_mut(chunk).rests_since = Some(when);
        self.resting.insert((when, chunk));
    }

    /// Ends the rest of a chunk. Returns since when it has rested.
    fn disturb(&mut self, chunk: u32) -> Option<u64> {
        let since = self.chunk_mut(chunk).rests_since.take()?;
        self.resting.remove(&(since, chunk));
        Some(since)
    }

    /// Frees a slab. Returns whether its chunk is free now; the caller then frees the chunk's slot.
    pub(crate) fn free_slab(&mut self, chunk: u32, slab: u32) -> bool {
        let chunk_state = self.chunk_mut(chunk);
        let class = chunk_state.class.expect("a slab in use has a class");
        let is_away = chunk_state.is_away;
        chunk_state.used -= 1;
        let empty = chunk_state.used == 0;
        match &mut self.moving {
            Some(moving) if moving.chunk == chunk => {
                moving.free.push(slab);
                moving.is_emptied = empty;
                return false;
            }
            _ => {}
        }
        if empty {
            self.free_chunk(chunk);
        } else {
            if !is_away {
                self.slabs_beside(chunk, class).push((chunk, slab));
            }
            self.check();
        }
        empty
    }

    /// Frees a chunk.
    fn free_chunk(&mut self, chunk: u32) {
        self.disturb(chunk);
        if let Some(class) = self.chunk_mut(chunk).class.take() {
            self.slabs_beside(chunk, class)
                .retain(|&(slab_chunk, _)| slab_chunk != chunk);
        }
        self.chunk_mut(chunk).is_away = false;
        self.free_chunks.push(chunk);
    }

    /// Frees a slot that has no chunk any more. A lent slot becomes idle.
    pub(crate) fn free_slot(&mut self, home: Home) {
        match home {
            Home::Memory(slot) if self.lent[slot as usize] => {
                self.idle.insert(slot);
            }
            Home::Memory(slot) => self.push_free_slot(slot),
            Home::Spill(slot) => self.free_spill.push(slot),
        }
        self.check();
    }

    fn push_free_slot(&mut self, slot: u32) {
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        self.numa_nodes[numa_node].free_memory.push(slot);
    }

    // ---- slots of memory files -----------------------------------------------------------------

    /// Takes a free slot for a memory file, while more than `spare` slots are free.
    pub(crate) fn take_slot_to_lend(&mut self, spare: u32) -> Option<u32> {
        let free = |of: &NumaNode| of.free_memory.len();
        if self.numa_nodes.iter().map(free).sum::<usize>() <= spare as usize {
            return None;
        }
        let slot = self
            .numa_nodes
            .iter_mut()
            .find_map(|numa_node| numa_node.free_memory.pop())?;
        self.exchanged += 1;
        self.check();
        Some(slot)
    }

    /// Frees a slot that was taken for a memory file and stays in the arena's file.
    pub(crate) fn keep_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.push_free_slot(slot);
        self.check();
    }

    /// Notes that a taken slot is lent now.
    pub(crate) fn lend_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.lent[slot as usize] = true;
        self.idle.insert(slot);
        self.check();
    }

    /// Takes an idle slot that is to be moved back to the arena's file.
    pub(crate) fn take_idle_slot(&mut self) -> Option<u32> {
        let slot = self.idle.pop_first()?;
        self.exchanged += 1;
        Some(slot)
    }

    /// Takes this slot in the same way. Returns false if it is not idle.
    pub(crate) fn take_this_idle_slot(&mut self, slot: u32) -> bool {
        let is_idle = self.idle.remove(&slot);
        self.exchanged += usize::from(is_idle);
        is_idle
    }

    /// Notes that a taken slot is stuck: the arena's file has no memory for it.
    pub(crate) fn put_stuck_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.stuck.push(slot);
        self.check();
    }

    /// Makes stuck slots idle, so that they are tried again.
    pub(crate) fn retry_stuck_slots(&mut self) {
        self.idle.extend(self.stuck.drain(..));
    }

    /// Notes that a taken slot is in the arena's file again.
    pub(crate) fn unlend_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.lent[slot as usize] = false;
        self.push_free_slot(slot);
        self.check();
    }

    /// At attach: notes that a slot is lent.
    pub(crate) fn adopt_lent_slot(&mut self, slot: u32) {
        self.lent[slot as usize] = true;
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        let free = &mut self.numa_nodes[numa_node].free_memory;
        let before = free.len();
        free.retain(|&free_slot| free_slot != slot);
        if free.len() < before {
            self.idle.insert(slot);
        }
    }

    /// At attach: notes that a slot is lost, because damage hides where it is.
    pub(crate) fn lose_slot(&mut self, slot: u32) {
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        let free = &mut self.numa_nodes[numa_node].free_memory;
        let before = free.len();
        free.retain(|&free_slot| free_slot != slot);
        self.lost.1 += before - free.len();
    }

    pub(crate) fn is_idle_slot(&self, slot: u32) -> bool {
        self.idle.contains(&slot)
    }

    pub(crate) fn idle_slots(&self) -> usize {
        self.idle.len()
    }

    /// Whether the next chunk for a writer needs an idle slot, because no other slot is free.
    pub(crate) fn wants_idle_slot(&self) -> bool {
        !self.idle.is_empty()
            && self
                .numa_nodes
                .iter()
                .all(|numa_node| numa_node.free_memory.is_empty())
    }

    /// Takes a free chunk for an idle slot, cut into one slab, which is leased.
    pub(crate) fn take_idle_chunk(&mut self, slot: u32) -> Option<TakenSlab> {
        if self.free_chunks.is_empty() || !self.idle.remove(&slot) {
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
        self.check();
        Some(TakenSlab {
            chunk,
            slab: 0,
            cut: Some(slot),
        })
    }

    // ---- moves -------------------------------------------------------------------------------

    /// Begins to move a chunk to the spill file: the one among those that `may` move that has rested longest. Returns the chunk
    /// and its slot in the spill file.
    pub(crate) fn begin_move(&mut self, may: &mut dyn FnMut(u32) -> bool) -> Option<(u32, u32)> {
        assert!(self.moving.is_none(), "one move at a time");
        if self.free_spill.is_empty() {
            return None;
        }
        let (rested_since, chunk) = self
            .resting
            .iter()
            .copied()
            .find(|&(_, chunk)| may(chunk))?;
        let to = self.free_spill.pop().expect("just looked");
        self.disturb(chunk);
        let class = self.chunks[chunk as usize]
            .class
            .expect("a resting chunk is in use");
        let free_slabs = self.slabs_beside(chunk, class);
        let free = free_slabs
            .extract_if(.., |(slab_chunk, _)| *slab_chunk == chunk)
            .map(|(_, slab)| slab)
            .collect();
        self.moving = Some(Moving {
            chunk,
            to,
            rested_since,
            free,
            is_emptied: false,
        });
        self.check();
        Some((chunk, to))
    }

    /// Whether the last slab of the moving chunk was freed.
    pub(crate) fn is_emptied(&self) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.is_emptied)
    }

    /// Ends a move: the chunk is in the spill file. Its free slabs stay unused until the whole chunk is free. Its slot of memory
    /// is freed by [`Pool::free_left_slot`].
    pub(crate) fn finish_move(&mut self) {
        let moving = self.moving.take().expect("a move is under way");
        self.chunk_mut(moving.chunk).is_away = true;
        self.is_slot_leaving = true;
        self.check();
    }

    /// Frees the slot of memory that the moved chunk has left.
    pub(crate) fn free_left_slot(&mut self, slot: u32) {
        self.is_slot_leaving = false;
        self.free_slot(Home::Memory(slot));
    }

    /// Gives up a move: the chunk stays where it is. `try_slot_last`: use its slot in the spill file only after all others.
    /// Returns the chunk if it was emptied meanwhile and is free now.
    pub(crate) fn abandon_move(&mut self, try_slot_last: bool) -> Option<u32> {
        let Moving {
            chunk,
            to,
            rested_since,
            free,
            is_emptied,
        } = self.moving.take().expect("a move is under way");
        if try_slot_last {
            self.free_spill.insert(0, to);
        } else {
            self.free_spill.push(to);
        }
        if is_emptied {
            self.free_chunk(chunk);
            return Some(chunk);
        }
        let class = self.chunks[chunk as usize].class.expect("it is in use");
        self.slabs_beside(chunk, class)
            .extend(free.into_iter().map(|slab| (chunk, slab)));
        self.rest_since(chunk, rested_since);
        self.check();
        None
    }

    // ---- attach ------------------------------------------------------------------------------

    /// At attach: notes that a chunk is in use, with its class and its used slabs. `home` `None`: damage hides where its data is.
    pub(crate) fn adopt(&mut self, chunk: u32, class: Class, used: &[u32], home: Option<Home>) {
        let numa_node = match home {
            Some(Home::Memory(memory)) => {
                Some(numa_node_of(&self.geometry, &self.topology, memory))
            }
            _ => None,
        };
        let is_away = numa_node.is_none();
        let used_count = used.len() as u32;
        self.lost = (
            self.lost.0.saturating_sub(1),
            self.lost.1.saturating_sub(usize::from(!is_away)),
        );
        let numa_node = numa_node.unwrap_or(0);
        *self.chunk_mut(chunk) = Chunk {
            class: Some(class),
            used: used_count,
            is_away,
            numa_node,
            ..Chunk::default()
        };
        if !is_away {
            let free = (0..self.slabs(class)).filter(|slab| !used.contains(slab));
            self.slabs_beside(chunk, class)
                .extend(free.map(|slab| (chunk, slab)));
        }
        self.rest(chunk);
    }

    /// At attach: notes that a writer of an earlier firnd may still fill a slab of this chunk.
    pub(crate) fn lease_on(&mut self, chunk: u32) {
        self.disturb(chunk);
        self.chunk_mut(chunk).leased += 1;
    }

    /// At attach: makes chunks and slots unavailable that are in use, or that damage hides. They count as lost until they are
    /// adopted.
    pub(crate) fn reserve(&mut self, chunk: &dyn Fn(u32) -> bool, slot: &dyn Fn(Home) -> bool) {
        let free_memory = |of: &Self| {
            let free = |numa_node: &NumaNode| numa_node.free_memory.len();
            of.numa_nodes.iter().map(free).sum::<usize>() + of.idle.len()
        };
        let before = (self.free_chunks.len(), free_memory(self));
        self.free_chunks.retain(|&free_chunk| !chunk(free_chunk));
        for numa_node in &mut self.numa_nodes {
            numa_node
                .free_memory
                .retain(|&free_slot| !slot(Home::Memory(free_slot)));
        }
        self.idle
            .retain(|&free_slot| !slot(Home::Memory(free_slot)));
        // The reserved chunks and slots count as lost until `adopt` takes them.
        self.lost.0 += before.0 - self.free_chunks.len();
        self.lost.1 += before.1 - free_memory(self);
        self.free_spill
            .retain(|&free_slot| !slot(Home::Spill(free_slot)));
    }

    /// Returns the number of slabs of a chunk that are in use.
    pub(crate) fn used_slabs(&self, chunk: u32) -> u32 {
        self.chunks[chunk as usize].used
    }

    // ---- figures -----------------------------------------------------------------------------

    /// Returns the size of the slabs in use: in memory, and in the spill file.
    pub(crate) fn used_bytes(&self) -> (u64, u64) {
        let bytes = |chunk: &Chunk| {
            chunk.class.map_or(0, |class| {
                u64::from(chunk.used) * class.slab_bytes(self.geometry.chunk_bytes)
            })
        };
        self.chunks.iter().fold((0, 0), |(memory, spilled), chunk| {
            if chunk.is_away {
                (memory, spilled + bytes(chunk))
            } else {
                (memory + bytes(chunk), spilled)
            }
        })
    }

    /// Returns the number of slots of memory in use.
    pub(crate) fn memory_used(&self) -> u32 {
        let unused = self.idle.len() + self.exchanged;
        self.numa_nodes.iter().map(NumaNode::used).sum::<u32>() - unused as u32
    }

    /// Returns the figures of each NUMA node.
    pub(crate) fn numa_node_figures(&self) -> Vec<NumaNodeFigures> {
        let bytes = |slots: u32| u64::from(slots) * self.geometry.chunk_bytes;
        let figures = |(index, numa_node): (usize, &NumaNode)| NumaNodeFigures {
            id: self.topology.id(index),
            bytes: bytes(numa_node.slots),
            used_bytes: bytes(numa_node.used()),
            foreign_slabs: numa_node.foreign_slabs,
        };
        self.numa_nodes.iter().enumerate().map(figures).collect()
    }

    /// Returns the number of free slots of the spill file.
    pub(crate) fn spill_free(&self) -> u32 {
        self.free_spill.len() as u32
    }

    /// Whether a chunk among those that `may` move can move, or is moving.
    pub(crate) fn can_move(&self, may: &dyn Fn(u32) -> bool) -> bool {
        let has_movable_chunk = || self.resting.iter().any(|&(_, chunk)| may(chunk));
        self.moving.is_some()
            || self.is_slot_leaving
            || (!self.free_spill.is_empty() && has_movable_chunk())
    }

    /// Whether a slab of `class` can be taken.
    pub(crate) fn has_slab(&self, class: Class) -> bool {
        let has_free_chunk = !self.free_chunks.is_empty();
        (has_free_chunk && !self.idle.is_empty())
            || self
                .numa_nodes
                .iter()
                .any(|numa_node| numa_node.has_slab(class, has_free_chunk))
    }
}

impl NumaNode {
    fn used(&self) -> u32 {
        self.slots - self.free_memory.len() as u32
    }

    /// Whether a slab of `class` can be taken from this node.
    fn has_slab(&self, class: Class, has_free_chunk: bool) -> bool {
        !self.free_slabs[class_index(class)].is_empty()
            || (has_free_chunk && !self.free_memory.is_empty())
    }
}
