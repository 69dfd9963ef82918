//! Which chunks, slots and slabs are free, and which chunk moves next.
//!
//! A chunk in use has a slot of memory or of the spill file; a new one needs a free chunk and a free slot
//! of memory. There are as many chunks as slots, so a free chunk is never what is missing.
//!
//! Invariants
//! * A chunk is free or has a class, but for those that an attach found damaged, and then not both. So it is with slots:
//!   each is free or a chunk's, or its chunk has just moved.
//! * The unused slabs of a chunk in memory are free, beside its NUMA node. Those of a chunk that moves wait with the move,
//!   and those of a chunk in the spill file are not free.
//! * A chunk has a class exactly while one of its slabs is in use, or it was emptied while it moved.
//! * Chunks and slots are reused last in, first out: their pages are the warm ones.
//! * Only slabs of chunks in memory that do not move are free for writers.
//! * Slots of memory belong to NUMA nodes, equal runs of them in the order of the NUMA nodes. A writer gets a
//!   slab of the nearest NUMA node that has one, also where a chunk has to be cut for it.
//! * A slot that a memory file has is `lent`; without a chunk it is idle, or stuck, and not free.
//! * `resting` holds the chunks in memory of which no slab is leased, in the order in which the last lease
//!   of each ended; nothing where there is no spill file.

use std::collections::BTreeSet;

use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::slab::Class;

use crate::topology::Topology;

/// Free space, in the memory of firnd; rebuilt at attach.
pub(crate) struct Pool {
    geometry: Geometry,
    topology: Topology,
    free_chunks: Vec<u32>,
    free_spill: Vec<u32>,
    chunks: Vec<Chunk>,
    numa_nodes: Vec<NumaNode>,
    resting: BTreeSet<(u64, u32)>,
    /// Counts ends of leases.
    clock: u64,
    moving: Option<Moving>,
    /// A chunk has moved, and its slot of memory is not free yet.
    leaving: bool,
    /// By slot of memory: a memory file has it.
    lent: Vec<bool>,
    /// Slots of memory files without a chunk.
    idle: BTreeSet<u32>,
    /// The same of which the arena's file could not take one back.
    stuck: Vec<u32>,
    /// Slots on their way between the arena's file and a memory file.
    exchanged: usize,
    /// Chunks and slots of memory that an attach gave up.
    lost: (usize, usize),
    /// Changes since the invariants were asserted.
    unchecked: u32,
}

/// What is free of one NUMA node.
#[derive(Default)]
struct NumaNode {
    free_memory: Vec<u32>,
    /// Free slabs by class: (chunk, slab). Stale entries (of chunks that were freed) cannot occur:
    /// a chunk's entries go when it is freed.
    free_slabs: [Vec<(u32, u32)>; 3],
    slots: u32,
    foreign: u64,
}

/// One NUMA node's part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNodeFigures {
    /// The kernel's number.
    pub id: u32,
    /// Bytes of its chunks.
    pub bytes: u64,
    /// Bytes of those in use.
    pub used_bytes: u64,
    /// Since attach: slabs given to writers that run nearer to another NUMA node.
    pub foreign_slabs: u64,
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
    /// The NUMA node of its slot, while it is in memory.
    numa_node: usize,
}

/// A chunk on its way to the spill file.
struct Moving {
    chunk: u32,
    to: u32,
    rested_since: u64,
    /// Its free slabs: none may be written to now.
    free: Vec<u32>,
    emptied: bool,
}

/// A slab that was taken.
pub(crate) struct TakenSlab {
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

/// The NUMA node to which a slot of memory belongs.
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
            leaving: false,
            lent: vec![false; geometry.chunk_count as usize],
            idle: BTreeSet::new(),
            stuck: Vec::new(),
            exchanged: 0,
            lost: (0, 0),
            unchecked: 0,
        }
    }

    /// Asserts the invariants after a change. With many chunks, which would take long, after some.
    fn check(&mut self) {
        const CHUNKS_EACH_TIME: u32 = 64;
        if !cfg!(debug_assertions) {
            return;
        }
        self.unchecked += 1;
        if self.unchecked > self.geometry.chunks() / CHUNKS_EACH_TIME {
            self.unchecked = 0;
            self.assert_invariants();
        }
    }

    pub(crate) fn assert_invariants(&self) {
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
        let mut free_slabs = vec![Vec::new(); self.chunks.len()];
        for (index, numa_node) in self.numa_nodes.iter().enumerate() {
            for (class, slabs) in numa_node.free_slabs.iter().enumerate() {
                for &(chunk, slab) in slabs {
                    let found = self.chunks[chunk as usize];
                    let stands = (found.numa_node, found.class.map(slot), found.away);
                    assert_eq!(
                        stands,
                        (index, Some(class), false),
                        "slab {slab} of chunk {chunk} is free"
                    );
                    free_slabs[chunk as usize].push(slab);
                }
            }
        }
        let mut in_memory = 0;
        let mut away = 0;
        let mut resting = 0;
        for (chunk, found) in self.chunks.iter().enumerate() {
            let mut slabs = std::mem::take(&mut free_slabs[chunk]);
            let Some(class) = found.class else {
                assert!(
                    slabs.is_empty() && found.rests_since.is_none(),
                    "chunk {chunk} is not in use"
                );
                continue;
            };
            let moving = self
                .moving
                .as_ref()
                .filter(|moving| moving.chunk as usize == chunk);
            if let Some(moving) = moving {
                assert!(
                    slabs.is_empty() && !found.away,
                    "chunk {chunk} moves and its slabs can be had"
                );
                slabs.clone_from(&moving.free);
                assert_eq!(moving.emptied, found.used == 0, "chunk {chunk} moves");
            }
            let count = slabs.len();
            slabs.sort_unstable();
            slabs.dedup();
            assert_eq!(slabs.len(), count, "a slab of chunk {chunk} is free twice");
            assert!(
                slabs.last().is_none_or(|&slab| slab < self.slabs(class)),
                "chunk {chunk}: {slabs:?}"
            );
            assert!(
                found.used > 0 || moving.is_some(),
                "chunk {chunk} has a class and is empty"
            );
            assert!(
                found.leased <= found.used,
                "chunk {chunk}: {} leased, {} used",
                found.leased,
                found.used
            );
            if !found.away {
                let all = self.slabs(class) as usize;
                assert_eq!(count + found.used as usize, all, "slabs of chunk {chunk}");
            }
            let rests = self.geometry.spill_count > 0
                && found.leased == 0
                && !found.away
                && moving.is_none();
            assert_eq!(found.rests_since.is_some(), rests, "chunk {chunk} may move");
            if let Some(since) = found.rests_since {
                assert!(
                    self.resting.contains(&(since, chunk as u32)),
                    "chunk {chunk} rests"
                );
                resting += 1;
            }
            if found.away {
                away += 1
            } else {
                in_memory += 1
            }
        }
        assert_eq!(self.resting.len(), resting, "chunks that rest");
        let free_memory: usize = self
            .numa_nodes
            .iter()
            .map(|numa_node| numa_node.free_memory.len())
            .sum();
        let used = in_memory + away;
        let lost_chunks = self.chunks.len().checked_sub(self.free_chunks.len() + used);
        let slots = self.geometry.chunk_count as usize;
        let lent = self.idle.len() + self.stuck.len() + self.exchanged;
        let known = free_memory + in_memory + lent + usize::from(self.leaving);
        let lost_slots = slots.checked_sub(known);
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
            spilled <= away + moving + self.lost.0,
            "{spilled} slots of the spill file for {away} chunks"
        );
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

    pub(crate) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Free slabs beside those of a chunk.
    fn slabs_beside(&mut self, chunk: u32, class: Class) -> &mut Vec<(u32, u32)> {
        let numa_node = self.chunks[chunk as usize].numa_node;
        &mut self.numa_nodes[numa_node].free_slabs[slot(class)]
    }

    /// Takes a slab of `class` for a writer that runs near `NUMA node`.
    pub(crate) fn take(&mut self, class: Class, near: usize) -> Option<TakenSlab> {
        let whole = !self.free_chunks.is_empty();
        let has = |numa_node: &NumaNode| numa_node.has(class, whole);
        let numa_node = self
            .topology
            .order(near)
            .iter()
            .map(|&n| n as usize)
            .find(|&n| has(&self.numa_nodes[n]))?;
        let taken =
            if let Some((chunk, slab)) = self.numa_nodes[numa_node].free_slabs[slot(class)].pop() {
                TakenSlab {
                    chunk,
                    slab,
                    cut: None,
                }
            } else {
                let memory = self.numa_nodes[numa_node]
                    .free_memory
                    .pop()
                    .expect("just looked");
                let chunk = self.free_chunks.pop().expect("just looked");
                *self.at(chunk) = Chunk {
                    class: Some(class),
                    numa_node,
                    ..Chunk::default()
                };
                let others = (1..self.slabs(class)).rev().map(|slab| (chunk, slab));
                self.numa_nodes[numa_node].free_slabs[slot(class)].extend(others);
                TakenSlab {
                    chunk,
                    slab: 0,
                    cut: Some(memory),
                }
            };
        self.numa_nodes[numa_node].foreign += u64::from(numa_node != near);
        self.disturb(taken.chunk);
        let chunk = self.at(taken.chunk);
        chunk.used += 1;
        chunk.leased += 1;
        self.check();
        Some(taken)
    }

    /// The writer of a slab is done; tells whether the chunk may move now.
    pub(crate) fn end_lease(&mut self, chunk: u32) -> bool {
        self.at(chunk).leased -= 1;
        let rests = self.rest(chunk);
        self.check();
        rests
    }

    /// Puts a chunk of which no slab is leased behind those that may move.
    fn rest(&mut self, chunk: u32) -> bool {
        let found = self.chunks[chunk as usize];
        let rests = self.geometry.spill_count > 0
            && found.leased == 0
            && !found.away
            && found.class.is_some();
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
        let class = found.class.expect("a slab in use has a class");
        let away = found.away;
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
        } else {
            if !away {
                self.slabs_beside(chunk, class).push((chunk, slab));
            }
            self.check();
        }
        empty
    }

    fn free_chunk(&mut self, chunk: u32) {
        self.disturb(chunk);
        if let Some(class) = self.at(chunk).class.take() {
            self.slabs_beside(chunk, class).retain(|&(c, _)| c != chunk);
        }
        self.at(chunk).away = false;
        self.free_chunks.push(chunk);
    }

    /// A chunk left this slot.
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

    /// Takes a free slot for a memory file, while more than `spare` are free.
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

    /// The slot that was taken stays in the arena's file.
    pub(crate) fn keep_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.push_free_slot(slot);
        self.check();
    }

    /// A memory file has the slot that was taken.
    pub(crate) fn lend_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.lent[slot as usize] = true;
        self.idle.insert(slot);
        self.check();
    }

    /// Takes an idle slot, to be given back to the arena's file.
    pub(crate) fn take_idle_slot(&mut self) -> Option<u32> {
        let slot = self.idle.pop_first()?;
        self.exchanged += 1;
        Some(slot)
    }

    /// The same of this slot; false if it is not idle.
    pub(crate) fn take_this_idle_slot(&mut self, slot: u32) -> bool {
        let is_idle = self.idle.remove(&slot);
        self.exchanged += usize::from(is_idle);
        is_idle
    }

    /// There is no memory for a slot that was to be given back.
    pub(crate) fn put_stuck_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.stuck.push(slot);
        self.check();
    }

    /// What could not be given back is tried again.
    pub(crate) fn retry_stuck_slots(&mut self) {
        self.idle.extend(self.stuck.drain(..));
    }

    /// The arena's file has the slot again.
    pub(crate) fn unlend_slot(&mut self, slot: u32) {
        self.exchanged -= 1;
        self.lent[slot as usize] = false;
        self.push_free_slot(slot);
        self.check();
    }

    /// At attach: a memory file has this slot.
    pub(crate) fn adopt_lent_slot(&mut self, slot: u32) {
        self.lent[slot as usize] = true;
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        let free = &mut self.numa_nodes[numa_node].free_memory;
        let before = free.len();
        free.retain(|&known| known != slot);
        if free.len() < before {
            self.idle.insert(slot);
        }
    }

    /// At attach: damage hides where this slot is, and what is in it.
    pub(crate) fn lose_slot(&mut self, slot: u32) {
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        let free = &mut self.numa_nodes[numa_node].free_memory;
        let before = free.len();
        free.retain(|&known| known != slot);
        self.lost.1 += before - free.len();
    }

    pub(crate) fn is_idle_slot(&self, slot: u32) -> bool {
        self.idle.contains(&slot)
    }

    pub(crate) fn idle_slots(&self) -> usize {
        self.idle.len()
    }

    /// Whether the next chunk of a writer needs a slot that a memory file has.
    pub(crate) fn wants_idle_slot(&self) -> bool {
        !self.idle.is_empty()
            && self
                .numa_nodes
                .iter()
                .all(|numa_node| numa_node.free_memory.is_empty())
    }

    /// Takes a free chunk for an idle slot, as one slab.
    pub(crate) fn take_idle_chunk(&mut self, slot: u32) -> Option<TakenSlab> {
        if self.free_chunks.is_empty() || !self.idle.remove(&slot) {
            return None;
        }
        let chunk = self.free_chunks.pop()?;
        let numa_node = numa_node_of(&self.geometry, &self.topology, slot);
        *self.at(chunk) = Chunk {
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

    /// Begins to move the chunk that rests longest among those that `may`; returns it and its slot in
    /// the spill file.
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
            .extract_if(.., |(c, _)| *c == chunk)
            .map(|(_, slab)| slab)
            .collect();
        self.moving = Some(Moving {
            chunk,
            to,
            rested_since,
            free,
            emptied: false,
        });
        self.check();
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
        self.check();
    }

    /// The slot of memory of the chunk that moved last can be used again.
    pub(crate) fn left(&mut self, slot: u32) {
        self.leaving = false;
        self.free_slot(Home::Memory(slot));
    }

    /// The chunk stays where it is. `again_last`: its slot of the spill file is tried after the others.
    /// Returns the chunk if it was emptied and so is free.
    pub(crate) fn abandon_move(&mut self, again_last: bool) -> Option<u32> {
        let Moving {
            chunk,
            to,
            rested_since,
            free,
            emptied,
        } = self.moving.take().expect("a move is under way");
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
        self.slabs_beside(chunk, class)
            .extend(free.into_iter().map(|slab| (chunk, slab)));
        self.rest_since(chunk, rested_since);
        self.check();
        None
    }

    // ---- attach ------------------------------------------------------------------------------

    /// This chunk is cut so, and these slabs of it are in use. `None`: damage hides where its data is.
    pub(crate) fn adopt(&mut self, chunk: u32, class: Class, used: &[u32], home: Option<Home>) {
        let numa_node = match home {
            Some(Home::Memory(memory)) => {
                Some(numa_node_of(&self.geometry, &self.topology, memory))
            }
            _ => None,
        };
        let away = numa_node.is_none();
        let used_count = used.len() as u32;
        self.lost = (
            self.lost.0.saturating_sub(1),
            self.lost.1.saturating_sub(usize::from(!away)),
        );
        let numa_node = numa_node.unwrap_or(0);
        *self.at(chunk) = Chunk {
            class: Some(class),
            used: used_count,
            away,
            numa_node,
            ..Chunk::default()
        };
        if !away {
            let free = (0..self.slabs(class)).filter(|slab| !used.contains(slab));
            self.slabs_beside(chunk, class)
                .extend(free.map(|slab| (chunk, slab)));
        }
        self.rest(chunk);
    }

    /// A writer of an earlier firnd may still fill a slab of this chunk, which was adopted.
    pub(crate) fn lease_on(&mut self, chunk: u32) {
        self.disturb(chunk);
        self.at(chunk).leased += 1;
    }

    /// These chunks and slots are in use, or damage hides what is in them.
    pub(crate) fn reserve(&mut self, chunk: &dyn Fn(u32) -> bool, slot: &dyn Fn(Home) -> bool) {
        let free_memory = |of: &Self| {
            let free = |numa_node: &NumaNode| numa_node.free_memory.len();
            of.numa_nodes.iter().map(free).sum::<usize>() + of.idle.len()
        };
        let before = (self.free_chunks.len(), free_memory(self));
        self.free_chunks.retain(|&c| !chunk(c));
        for numa_node in &mut self.numa_nodes {
            numa_node.free_memory.retain(|&s| !slot(Home::Memory(s)));
        }
        self.idle.retain(|&s| !slot(Home::Memory(s)));
        // Until they are adopted.
        self.lost.0 += before.0 - self.free_chunks.len();
        self.lost.1 += before.1 - free_memory(self);
        self.free_spill.retain(|&s| !slot(Home::Spill(s)));
    }

    /// Slabs of a chunk in use.
    pub(crate) fn used_slabs(&self, chunk: u32) -> u32 {
        self.chunks[chunk as usize].used
    }

    // ---- figures -----------------------------------------------------------------------------

    /// Bytes of slabs in use in memory, and elsewhere.
    pub(crate) fn used_bytes(&self) -> (u64, u64) {
        let bytes = |chunk: &Chunk| {
            chunk.class.map_or(0, |c| {
                u64::from(chunk.used) * c.slab_bytes(self.geometry.chunk_bytes)
            })
        };
        self.chunks.iter().fold((0, 0), |(memory, away), chunk| {
            if chunk.away {
                (memory, away + bytes(chunk))
            } else {
                (memory + bytes(chunk), away)
            }
        })
    }

    /// Slots of memory in use.
    pub(crate) fn memory_used(&self) -> u32 {
        let unused = self.idle.len() + self.exchanged;
        self.numa_nodes.iter().map(NumaNode::used).sum::<u32>() - unused as u32
    }

    /// What the NUMA nodes have and gave.
    pub(crate) fn numa_node_figures(&self) -> Vec<NumaNodeFigures> {
        let bytes = |slots: u32| u64::from(slots) * self.geometry.chunk_bytes;
        let figures = |(index, numa_node): (usize, &NumaNode)| NumaNodeFigures {
            id: self.topology.id(index),
            bytes: bytes(numa_node.slots),
            used_bytes: bytes(numa_node.used()),
            foreign_slabs: numa_node.foreign,
        };
        self.numa_nodes.iter().enumerate().map(figures).collect()
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
        let whole = !self.free_chunks.is_empty();
        (whole && !self.idle.is_empty())
            || self
                .numa_nodes
                .iter()
                .any(|numa_node| numa_node.has(class, whole))
    }
}

impl NumaNode {
    fn used(&self) -> u32 {
        self.slots - self.free_memory.len() as u32
    }

    fn has(&self, class: Class, free_chunk: bool) -> bool {
        !self.free_slabs[slot(class)].is_empty() || (free_chunk && !self.free_memory.is_empty())
    }
}
