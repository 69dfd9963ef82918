//! Attaching to an arena that is there: leases of dead writers end, pieces are found, slabs are counted.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;
use std::sync::atomic::Ordering;

use firn_format::home::Home;
use firn_format::piece::SEQUENCE_MAX;
use firn_format::slab::{Class, SlabState};
use firn_format::superblock::state_word;

use crate::ArenaError;
use crate::arena::Arena;
use crate::create::place;
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

/// A chunk whose slabs stay as they are after an attach.
struct AdoptedChunk {
    chunk: u32,
    /// Sequence of its newest piece.
    newest: u64,
    /// How it is cut, and its slabs in use; `None`: its table does not tell.
    cut: Option<(Class, Vec<u32>)>,
}

impl Arena {
    /// Attaches to an existing file and reads its piece tables. Leases of dead writers end. The
    /// pieces that the caller does not keep afterwards ([`Arena::keep_piece`]) are freed by [`Arena::free_unkept_slabs`].
    ///
    /// Where the spill file is gone or damaged, [`Arena::spill_fault`] says so, the pieces in it are named as
    /// damage and stay pending, and reading them fails.
    pub fn attach(path: &Path) -> Result<(Self, Vec<Stored>, Vec<Damage>), ArenaError> {
        Self::attach_on(path, &Topology::one())
    }

    /// The same on a machine with several NUMA nodes. Pages that are there stay where they are.
    pub fn attach_on(
        path: &Path,
        topology: &Topology,
    ) -> Result<(Self, Vec<Stored>, Vec<Damage>), ArenaError> {
        let (map, superblock) = open_arena(path, true)?;
        let mut arena = Self::assemble(path, map, superblock, topology);
        place(&arena.map, &arena.geometry, topology);
        // Before any record is read: what is read is then all there will ever be.
        let lingering = revoke_all(&arena.tables, &arena.cut_chunks());
        let mut damage = Vec::new();
        let mut stored = Vec::new();
        scan(&arena.tables, &mut damage, &mut |found| stored.push(found));
        arena.restore_sequence(&stored);
        let mut homes = read_homes(&arena.tables, &mut damage);
        let mut found = read_places(&arena.tables, &arena.memory_files, &arena.superblock.uuid);
        report_unreadable_slots(&mut found, &stored, &mut homes, &mut damage);
        if arena.geometry.spill_count > 0 {
            arena.spill = SpillArea::from_opened(SpillFile::open(&arena.superblock, true));
            report_unreadable(&homes, &stored, &arena.spill, &mut damage);
        }
        arena.adopt_memory_files(found, &homes)?;
        arena.adopt(&stored, &lingering, &homes);
        arena.lingering = LingeringWriters::new(lingering);
        Ok((arena, stored, damage))
    }

    /// What the tables hold now: live pieces and damage.
    pub fn read_pieces(&self) -> (Vec<Stored>, Vec<Damage>) {
        let mut stored = Vec::new();
        let mut damage = Vec::new();
        scan(&self.tables, &mut damage, &mut |found| stored.push(found));
        (stored, damage)
    }

    /// The next sequence follows every piece that was found. The counter is one word that nothing protects: if it is
    /// damaged it is too low, or so high that nothing could follow.
    fn restore_sequence(&self, stored: &[Stored]) {
        let highest = stored.iter().map(|found| found.piece.sequence).max();
        let highest = highest.unwrap_or(0);
        let counter = self.map.u64(state_word::SEQUENCE);
        if counter.fetch_max(highest, Ordering::Relaxed) > SEQUENCE_MAX / 2 {
            counter.store(highest, Ordering::Relaxed);
        }
    }

    /// The chunks that are cut, as far as their class can be read.
    fn cut_chunks(&self) -> Vec<(u32, Class)> {
        let class = |chunk| self.tables.class(chunk).ok().flatten();
        (0..self.geometry.chunks())
            .filter_map(|chunk| Some((chunk, class(chunk)?)))
            .collect()
    }

    /// Enters what is in use into pool, homes and uses; everything else is free.
    fn adopt(&self, stored: &[Stored], lingering: &[LingeringWriter], homes: &[Option<Home>]) {
        let mut adopted = self.sort_chunks(stored, lingering);
        let chunks: HashSet<u32> = adopted.iter().map(|found| found.chunk).collect();
        let slots: HashSet<Home> = chunks
            .iter()
            .filter_map(|chunk| homes[*chunk as usize])
            .collect();
        let mut pool = self.pool.lock();
        pool.reserve(&|chunk| chunks.contains(&chunk), &|home| {
            slots.contains(&home)
        });
        // The oldest first: in this order they move to the spill file.
        adopted.sort_unstable_by_key(|found| (found.newest, found.chunk));
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
            // Beside the pin that ends with `free_unkept_slabs`, which is for slabs with pieces.
            if stored.iter().any(|found| found.at.slab == *slab) {
                self.uses.add(*slab, PIN);
            }
        }
    }

    /// The chunks that stay, with their slabs in use pinned and all others free.
    fn sort_chunks(&self, stored: &[Stored], lingering: &[LingeringWriter]) -> Vec<AdoptedChunk> {
        // Slabs in use and the newest write of each chunk.
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
                // Its pieces may be whole: it is not leased while this arena lives.
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

    /// `used` is sorted.
    fn adopt_slabs(&self, chunk: u32, used: &[u32]) {
        for slab in 0..self.geometry.small_slabs() {
            let at = SlabRef { chunk, slab };
            if used.binary_search(&slab).is_ok() {
                self.tables.set_state(at, SlabState::Sealed);
                // Until `free_unkept_slabs`, so that no slab is freed while pieces are kept.
                self.uses.set_pinned(at);
            } else {
                self.tables.set_state(at, SlabState::Free);
            }
        }
    }

    fn clear_chunk(&self, chunk: u32) {
        for slab in 0..self.geometry.small_slabs() {
            self.tables
                .set_state(SlabRef { chunk, slab }, SlabState::Free);
        }
        self.tables.set_class(chunk, None);
        self.homes.set(chunk, None);
    }

    /// After attach: `bytes` of this piece are pending.
    pub fn keep_piece(&self, at: PieceRef, bytes: u32) {
        self.uses.add(at.slab, u64::from(bytes));
    }

    /// After attach, once: frees the slabs of which nothing was kept.
    pub fn free_unkept_slabs(&self, stored: &[Stored]) {
        let mut slabs: Vec<SlabRef> = stored.iter().map(|s| s.at.slab).collect();
        slabs.sort_unstable();
        slabs.dedup();
        for slab in slabs {
            self.release_uses(slab, PIN);
        }
    }
}
