//! Attaches to an existing arena, for example after a crash of firnd, the process that serves the mount.
//!
//! Terms
//! * The *arena* is a file of shared memory with the bytes that are not in the backing directory yet.
//! * Its *chunks* are divided into *slabs*. A *lease* is a writer's right to fill a slab; a *client* is a process that
//!   fills a slab itself.
//! * A *piece* is a range of a file's bytes in a slab. Its record is in the arena too, so it survives firnd.
//! * The *home* of a chunk is the memory, or the part of the spill file, that has its data.
//! * A *memory file* is a further file of shared memory, with all bytes of one large file.
//!
//! Steps, whose order matters
//! 1. Client leases of an earlier firnd are revoked, so that no client adds records during the scan.
//! 2. The scan reads the piece records of all chunks.
//! 3. The homes of chunks, the memory files and the spill file are read. Pieces whose bytes cannot be read are reported
//!    as damage.
//! 4. The state in firnd's memory is rebuilt: the pool of free chunks, the home of each chunk, and the uses of each
//!    slab.
//!
//! A *pin* is a use of a slab, which keeps the slab from being freed
//! * Each slab with a piece gets a pin. The caller counts the pieces that it keeps ([`Arena::keep_piece`]), and
//!   [`Arena::free_unkept_slabs`] releases the pins. So no slab is freed before the caller has decided about all its
//!   pieces.
//! * Each slab of a lingering client, which may still store bytes into it, gets a pin. The pin is released when the
//!   client has stopped or died.
//! * A slab with a piece and a lingering client has both pins.

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
use crate::map::FileAccess;
use crate::memory_files::{exclude_unreadable_slots, read_memory_file_slots};
use crate::open::open_arena;
use crate::pool::Pool;
use crate::refs::{PieceRef, SlabRef, StoredPiece};
use crate::scan::{report_missing_spill_slots, scan_pieces};
use crate::spill::SpillFile;
use crate::spill_area::SpillArea;
use crate::topology::Topology;
use crate::uses::PIN;

/// A chunk that is in use when an arena is attached.
struct UsedChunk {
    chunk: u32,
    /// Sequence number of its newest piece, which orders the chunks for [`Pool::adopt_chunk`]. [`u64::MAX`] means
    /// unknown, because the class is damaged. Such a chunk is not adopted.
    newest_sequence: u64,
    /// How the chunk is divided. `None` means that its class word is damaged.
    slabs: Option<UsedSlabs>,
}

/// What pieces and lingering clients say about a chunk.
#[derive(Default)]
struct ChunkUse {
    /// Indexes of the slabs with a piece or a lingering client, in any order; one may be listed twice.
    slabs: Vec<u32>,
    /// Sequence number of the newest piece, or 0 without one.
    newest_sequence: u64,
}

/// The slabs in use of a chunk.
struct UsedSlabs {
    /// Class of all slabs of the chunk.
    class: Class,
    /// Indexes of the slabs in use, in order.
    used: Vec<u32>,
}

impl Arena {
    /// Attaches to an existing arena on a machine with one NUMA node. Returns the arena, its pieces, and the damage
    /// that was found.
    ///
    /// The leases of earlier writers end. The caller keeps the pieces that it needs ([`Arena::keep_piece`]), and then
    /// frees all others ([`Arena::free_unkept_slabs`]).
    ///
    /// Fails if the file is not a valid arena of this user. If the spill file is gone or damaged, the attach succeeds,
    /// and [`Arena::spill_fault`] says what is wrong. The pieces in the unreadable part are reported as damage and stay
    /// pending. Reads of them fail.
    pub fn attach(path: &Path) -> Result<(Self, Vec<StoredPiece>, Vec<Damage>), ArenaError> {
        Self::attach_on(path, &Topology::one())
    }

    /// Does what [`Arena::attach`] does, on a machine with the NUMA nodes of `topology`: maps the existing arena at
    /// `path`, and rebuilds the state that is kept only in memory. Pages that exist stay on their node.
    ///
    /// Returns the arena, its pieces (recorded ranges of files' bytes), and the damage that was found. Fails if the
    /// file is not a valid arena of this user.
    pub fn attach_on(
        path: &Path,
        topology: &Topology,
    ) -> Result<(Self, Vec<StoredPiece>, Vec<Damage>), ArenaError> {
        let (map, superblock) = open_arena(path, FileAccess::ReadWrite)?;
        let mut arena = Self::assemble(path, map, superblock, topology);
        prefer_numa_nodes(&arena.map, &arena.geometry, topology);
        // Before the scan: no client can publish a record that the scan would miss.
        let lingering = revoke_all(&arena.tables, &arena.chunk_classes());
        let mut damage = Vec::new();
        let stored = scan_pieces(&arena.tables, &mut damage);
        arena.restore_sequence(&stored);
        // The home of a chunk is the slot that has its data: in the arena's file, in a memory file or in the spill
        // file. If a file is missing or too short, the pieces in it are reported as damage, and the attach goes on.
        let mut homes = read_homes(&arena.tables, &mut damage);
        let mut memory_file_slots =
            read_memory_file_slots(&arena.tables, &arena.memory_files, &arena.superblock.uuid);
        exclude_unreadable_slots(&mut memory_file_slots, &stored, &mut homes, &mut damage);
        if arena.geometry.spill_count > 0 {
            let opened = SpillFile::open(&arena.superblock, FileAccess::ReadWrite);
            arena.spill = SpillArea::from_opened(opened);
            report_missing_spill_slots(&homes, &stored, &arena.spill, &mut damage);
        }
        arena.map_memory_file_slots(memory_file_slots)?;
        arena.restore_allocation(&stored, &lingering, &homes);
        arena.lingering = LingeringWriters::new(lingering);
        Ok((arena, stored, damage))
    }

    /// Reads the live pieces and the damage that the tables have now.
    pub fn read_pieces(&self) -> (Vec<StoredPiece>, Vec<Damage>) {
        let mut damage = Vec::new();
        let stored = scan_pieces(&self.tables, &mut damage);
        (stored, damage)
    }

    /// Sets the sequence counter to at least the highest sequence number of the pieces.
    ///
    /// No checksum covers the counter. A damaged counter may be too low, or so high that the numbers above it run out.
    fn restore_sequence(&self, stored: &[StoredPiece]) {
        let highest = stored
            .iter()
            .map(|stored_piece| stored_piece.piece.sequence)
            .max()
            .unwrap_or(0);
        let counter = self.map.u64(state_word::SEQUENCE);
        if counter.fetch_max(highest, Ordering::Relaxed) > SEQUENCE_MAX / 2 {
            counter.store(highest, Ordering::Relaxed);
        }
    }

    /// Returns the chunks that are cut into slabs, with the class of the slabs. A chunk whose class is damaged is left
    /// out.
    fn chunk_classes(&self) -> Vec<(u32, Class)> {
        let mut classes = Vec::new();
        for chunk in 0..self.geometry.chunks() {
            if let Ok(Some(class)) = self.tables.class(chunk) {
                classes.push((chunk, class));
            }
        }
        classes
    }

    /// Rebuilds the allocator's state. First all used chunks and their slots are taken off the free lists. Then each
    /// used chunk is registered with its class and its used slabs.
    ///
    /// `stored` has the pieces (recorded ranges of bytes) that the scan found, and `lingering` the clients that may
    /// still store bytes. `homes` has the slot of each chunk.
    fn restore_allocation(
        &self,
        stored: &[StoredPiece],
        lingering: &[LingeringWriter],
        homes: &[Option<Home>],
    ) {
        let mut used_chunks = self.restore_chunks(stored, lingering);
        let used_chunk_numbers: HashSet<u32> = used_chunks.iter().map(|used| used.chunk).collect();
        let used_slots: HashSet<Home> = used_chunk_numbers
            .iter()
            .filter_map(|chunk| homes[*chunk as usize])
            .collect();
        let mut pool = self.pool.lock();
        pool.reserve_used(&|chunk| used_chunk_numbers.contains(&chunk), &|home| {
            used_slots.contains(&home)
        });
        // Chunks move to the spill file in the order in which the pool adopts them, so the oldest is first.
        used_chunks.sort_unstable_by_key(|used| (used.newest_sequence, used.chunk));
        for UsedChunk { chunk, slabs, .. } in used_chunks {
            let home = homes[chunk as usize];
            self.homes.set(chunk, home);
            // A chunk without `slabs` has a damaged class and is not adopted. It remains off the free lists, so no
            // writer gets a slab of it.
            if let Some(UsedSlabs { class, used }) = slabs {
                pool.adopt_chunk(chunk, class, &used, home);
            }
        }
        self.restore_lingering_leases(&mut pool, stored, lingering);
    }

    /// Keeps the slabs of lingering clients from being freed until these clients have stopped or died. Such a client
    /// may still store bytes into its slab, although its lease is over.
    ///
    /// Each one counts as a lease of its chunk in `pool`, as a lease in `self.uses`, and as a pin of its slab.
    fn restore_lingering_leases(
        &self,
        pool: &mut Pool,
        stored: &[StoredPiece],
        lingering: &[LingeringWriter],
    ) {
        let slabs_with_pieces: HashSet<SlabRef> =
            stored.iter().map(|piece| piece.record.slab).collect();
        for LingeringWriter { slab, .. } in lingering {
            pool.add_lease(slab.chunk);
            self.uses.count_lease();
            // The slab has one pin already. In a slab with pieces it is the pin of the pieces, which is released once
            // the caller has counted them. So the client needs a pin of its own there.
            if slabs_with_pieces.contains(slab) {
                self.uses.add(*slab, PIN);
            }
        }
    }

    /// Restores the table of every chunk, and returns the chunks in use. Clears all other chunks. Of a chunk in use,
    /// the slabs in use are sealed and pinned, so that they are not freed yet; the others become free.
    ///
    /// A slab is in use if it has a piece (a recorded range of bytes) or a lingering client. A chunk with a damaged
    /// class counts as in use, and its table is left as it is.
    fn restore_chunks(
        &self,
        stored: &[StoredPiece],
        lingering: &[LingeringWriter],
    ) -> Vec<UsedChunk> {
        let mut uses = collect_chunk_uses(stored, lingering);
        let mut used_chunks = Vec::new();
        for chunk in 0..self.geometry.chunks() {
            let chunk_use = uses.remove(&chunk);
            let Ok(class) = self.tables.class(chunk) else {
                // The class is damaged, but the pieces may be valid. No slab of the chunk is leased while this arena is
                // attached, so its age is not needed.
                used_chunks.push(UsedChunk {
                    chunk,
                    newest_sequence: u64::MAX,
                    slabs: None,
                });
                continue;
            };
            let (Some(class), Some(mut chunk_use)) = (class, chunk_use) else {
                self.clear_chunk(chunk);
                continue;
            };
            chunk_use.slabs.sort_unstable();
            chunk_use.slabs.dedup();
            self.seal_used_slabs(chunk, &chunk_use.slabs);
            used_chunks.push(UsedChunk {
                chunk,
                newest_sequence: chunk_use.newest_sequence,
                slabs: Some(UsedSlabs {
                    class,
                    used: chunk_use.slabs,
                }),
            });
        }
        used_chunks
    }

    /// Seals and pins the slabs `used` of a chunk, and makes its other slabs free. `used` is sorted.
    fn seal_used_slabs(&self, chunk: u32, used: &[u32]) {
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

    /// Counts `bytes` of a piece as pending after an attach.
    pub fn keep_piece(&self, piece: PieceRef, bytes: u32) {
        self.uses.add(piece.slab, u64::from(bytes));
    }

    /// Releases the pins that the attach set on the slabs of `stored`. This frees each slab of which no piece was kept.
    /// The caller does this once, after it has kept all pieces that it needs.
    pub fn free_unkept_slabs(&self, stored: &[StoredPiece]) {
        let mut slabs: Vec<SlabRef> = stored.iter().map(|piece| piece.record.slab).collect();
        slabs.sort_unstable();
        slabs.dedup();
        for slab in slabs {
            self.release_uses(slab, PIN);
        }
    }
}

/// Collects, for each chunk with a piece (a recorded range of bytes) or a lingering client, its slabs in use and its
/// newest piece. A lingering client may still store bytes into its slab.
fn collect_chunk_uses(
    stored: &[StoredPiece],
    lingering: &[LingeringWriter],
) -> BTreeMap<u32, ChunkUse> {
    let mut uses: BTreeMap<u32, ChunkUse> = BTreeMap::new();
    for StoredPiece { record, piece, .. } in stored {
        let chunk_use = uses.entry(record.slab.chunk).or_default();
        chunk_use.slabs.push(record.slab.slab);
        chunk_use.newest_sequence = chunk_use.newest_sequence.max(piece.sequence);
    }
    for LingeringWriter { slab, .. } in lingering {
        let chunk_use = uses.entry(slab.chunk).or_default();
        chunk_use.slabs.push(slab.slab);
    }
    uses
}
