//! Attaches to an existing arena: revokes the leases of earlier writers, reads the pieces, and rebuilds the counts.
//!
//! The order matters
//! * client leases are revoked first, so that no client adds records during the scan;
//! * the scan reads all piece records, of all chunks;
//! * homes, memory files and the spill file are read, and what cannot be read is reported as damage;
//! * pool, homes and uses are filled in. Each slab with pieces gets a pin.
//!
//! The caller then counts the pieces that it keeps ([`Arena::keep_piece`]), and [`Arena::free_unkept_slabs`] takes
//! the pins off. So no slab is freed before the caller has decided about all its pieces.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering;

use firn_format::home::Home;
use firn_format::piece::SEQUENCE_MAX;
use firn_format::slab::{Class, SlabState};
use firn_format::superblock::state_word;

use crate::ArenaError;
use crate::arena::Arena;
use crate::create::prefer_numa_nodes;
use crate::damage::Damage;
use crate::homes::read_homes;
use crate::lingering::{LingeringWriter, LingeringWriters, revoke_all};
use crate::memory_files::{read_places, report_unreadable_slots};
use crate::open::open_arena;
use crate::refs::{PieceRef, SlabRef, Stored};
use crate::scan::{report_unreadable, scan};
use crate::spill::SpillFile;
use crate::spill_area::SpillArea;
use crate::topology::Topology;
use crate::uses::PIN;

/// A chunk that is in use when an arena is attached.
struct AdoptedChunk {
    chunk: u32,
    /// Sequence number of its newest piece. [`u64::MAX`]: its class is damaged.
    newest: u64,
    /// The class of its slabs, and the slabs in use in order. `None`: the class is damaged.
    cut: Option<(Class, Vec<u32>)>,
}

impl Arena {
    /// Attaches to an existing arena on one NUMA node. Returns it with the pieces and the damage that were read.
    ///
    /// The leases of earlier writers end. The caller keeps the pieces that it needs ([`Arena::keep_piece`]) and then frees
    /// the rest ([`Arena::free_unkept_slabs`]).
    ///
    /// If the spill file is gone or damaged, the attach succeeds and [`Arena::spill_fault`] says what is wrong. The pieces
    /// in the unreadable part are reported as damage and stay pending; reads of them fail.
    pub fn attach(path: &Path) -> Result<(Self, Vec<Stored>, Vec<Damage>), ArenaError> {
        Self::attach_on(path, &Topology::one())
    }

    /// Does what [`Arena::attach`] does on a machine with several NUMA nodes. Pages that exist stay on their node.
    pub fn attach_on(
        path: &Path,
        topology: &Topology,
    ) -> Result<(Self, Vec<Stored>, Vec<Damage>), ArenaError> {
        let (map, superblock) = open_arena(path, true)?;
        let mut arena = Self::assemble(path, map, superblock, topology);
        prefer_numa_nodes(&arena.map, &arena.geometry, topology);
        // Before the scan: no client can publish a record that the scan would miss.
        let lingering = revoke_all(&arena.tables, &arena.cut_chunks());
        let mut damage = Vec::new();
        let mut stored = Vec::new();
        scan(&arena.tables, &mut damage, &mut |piece| stored.push(piece));
        arena.restore_sequence(&stored);
        let mut homes = read_homes(&arena.tables, &mut damage);
        let mut slots = read_places(&arena.tables, &arena.memory_files, &arena.superblock.uuid);
        report_unreadable_slots(&mut slots, &stored, &mut homes, &mut damage);
        if arena.geometry.spill_count > 0 {
            arena.spill = SpillArea::from_opened(SpillFile::open(&arena.superblock, true));
            report_unreadable(&homes, &stored, &arena.spill, &mut damage);
        }
        arena.adopt_memory_files(slots, &homes)?;
        arena.adopt(&stored, &lingering, &homes);
        arena.lingering = LingeringWriters::new(lingering);
        Ok((arena, stored, damage))
    }

    /// Reads the live pieces and the damage that the tables have now.
    pub fn read_pieces(&self) -> (Vec<Stored>, Vec<Damage>) {
        let mut stored = Vec::new();
        let mut damage = Vec::new();
        scan(&self.tables, &mut damage, &mut |piece| stored.push(piece));
        (stored, damage)
    }

    /// Sets the sequence counter to at least the highest sequence number of the pieces. No checksum covers the counter:
    /// a damaged one is too low, or so high that no number is left above it.
    fn restore_sequence(&self, stored: &[Stored]) {
        let highest = stored.iter().map(|stored| stored.piece.sequence).max();
        let highest = highest.unwrap_or(0);
        let counter = self.map.u64(state_word::SEQUENCE);
        if counter.fetch_max(highest, Ordering::Relaxed) > SEQUENCE_MAX / 2 {
            counter.store(highest, Ordering::Relaxed);
        }
    }

    /// The chunks that are cut into slabs, with the class of the slabs. A chunk whose class is damaged is left out.
    fn cut_chunks(&self) -> Vec<(u32, Class)> {
        let class = |chunk| self.tables.class(chunk).ok().flatten();
        (0..self.geometry.chunks())
            .filter_map(|chunk| Some((chunk, class(chunk)?)))
            .collect()
    }

    /// Enters the chunks, slots and slabs in use into pool, homes and uses. Everything else is free.
    fn adopt(&self, stored: &[Stored], lingering: &[LingeringWriter], homes: &[Option<Home>]) {
        let mut adopted = self.sort_out_chunks(stored, lingering);
        let used_chunks: HashSet<u32> = adopted.iter().map(|adopted| adopted.chunk).collect();
        let used_slots: HashSet<Home> = used_chunks
            .iter()
            .filter_map(|chunk| homes[*chunk as usize])
            .collect();
        let mut pool = self.pool.lock();
        pool.reserve(&|chunk| used_chunks.contains(&chunk), &|home| {
            used_slots.contains(&home)
        });
        // The oldest first: chunks move to the spill file in this order.
        adopted.sort_unstable_by_key(|adopted| (adopted.newest, adopted.chunk));
        for AdoptedChunk { chunk, cut, .. } in adopted {
            let home = homes[chunk as usize];
            self.homes.set(chunk, home);
            if let Some((class, slabs)) = cut {
                pool.adopt(chunk, class, &slabs, home);
            }
        }
        for LingeringWriter { slab, .. } in lingering {
            pool.lease_on(slab.chunk);
            self.uses.count_lease();
            // This pin ends when the writer is gone. A slab with pieces has a second one, which `free_unkept_slabs` takes off.
            if stored.iter().any(|stored| stored.at.slab == *slab) {
                self.uses.add(*slab, PIN);
            }
        }
    }

    /// Returns the chunks in use, pins their slabs in use, and makes all other slabs and chunks free.
    fn sort_out_chunks(
        &self,
        stored: &[Stored],
        lingering: &[LingeringWriter],
    ) -> Vec<AdoptedChunk> {
        // For each chunk in use: its slabs in use, and the sequence number of its newest piece.
        let mut used: BTreeMap<u32, (Vec<u32>, u64)> = BTreeMap::new();
        for Stored { at, piece, .. } in stored {
            let (slabs, newest) = used.entry(at.slab.chunk).or_default();
            slabs.push(at.slab.slab);
            *newest = piece.sequence.max(*newest);
        }
        for LingeringWriter { slab, .. } in lingering {
            used.entry(slab.chunk).or_default().0.push(slab.slab);
        }
        let mut adopted = Vec::new();
        for chunk in 0..self.geometry.chunks() {
            match (self.tables.class(chunk), used.remove(&chunk)) {
                // Its pieces may still be valid. No slab of it is leased while this arena is attached.
                (Err(_), _) => adopted.push(AdoptedChunk {
                    chunk,
                    newest: u64::MAX,
                    cut: None,
                }),
                (Ok(Some(class)), Some((mut slabs, newest))) => {
                    slabs.sort_unstable();
                    slabs.dedup();
                    self.adopt_slabs(chunk, &slabs);
                    let cut = Some((class, slabs));
                    adopted.push(AdoptedChunk { chunk, newest, cut });
                }
                _ => self.clear_chunk(chunk),
            }
        }
        adopted
    }

    /// Pins the slabs `used` of a chunk and makes its other slabs free. `used` is sorted.
    fn adopt_slabs(&self, chunk: u32, used: &[u32]) {
        for slab in 0..self.geometry.small_slabs() {
            let slab_ref = SlabRef { chunk, slab };
            if used.binary_search(&slab).is_ok() {
                self.tables.set_state(slab_ref, SlabState::Sealed);
                // Pinned until `free_unkept_slabs`, so that no slab is freed while the caller counts pieces.
                self.uses.set_pinned(slab_ref);
            } else {
                self.tables.set_state(slab_ref, SlabState::Free);
            }
        }
    }

    /// Makes a chunk and its slabs free.
    fn clear_chunk(&self, chunk: u32) {
        for slab in 0..self.geometry.small_slabs() {
            self.tables
                .set_state(SlabRef { chunk, slab }, SlabState::Free);
        }
        self.tables.set_class(chunk, None);
        self.homes.set(chunk, None);
    }

    /// Says after an attach that `bytes` of this piece are pending.
    pub fn keep_piece(&self, piece: PieceRef, bytes: u32) {
        self.uses.add(piece.slab, u64::from(bytes));
    }

    /// Frees the slabs of which the caller kept nothing. To be called once after an attach.
    pub fn free_unkept_slabs(&self, stored: &[Stored]) {
        let mut slabs: Vec<SlabRef> = stored.iter().map(|stored| stored.at.slab).collect();
        slabs.sort_unstable();
        slabs.dedup();
        for slab in slabs {
            self.release_uses(slab, PIN);
        }
    }
}
