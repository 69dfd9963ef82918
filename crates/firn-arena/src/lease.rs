//! Leases: a lease is one writer's exclusive right to fill a slab, a part of shared memory.
//!
//! A *slab* is a part of a *chunk*, the unit in which the arena's memory is allocated. The *arena* is shared memory
//! with the bytes that are not in the backing directory yet. A *piece* is a range of a file's bytes in a slab.
//!
//! Life of a lease
//! 1. [`Arena::lease_slab`] takes a free slab from the pool, near the writer's CPU, and stores a new generation for it.
//! 2. The writer reserves room, stores bytes and publishes pieces (`publish`).
//! 3. [`Arena::seal_slab`] ends the lease. The slab accepts no more bytes, and is freed when nothing in it is pending.
//!
//! Invariants
//! * A slab has one lease at a time. Piece records of earlier leases have another generation and count for nothing.
//! * A crash between the stores of a new lease leaves the slab free.

use std::sync::atomic::Ordering;

use firn_format::append::{Room, SlabCursor};
use firn_format::home::Home;
use firn_format::slab::{Class, SlabState};
use firn_format::superblock::state_word;

use crate::arena::Arena;
use crate::map::crash_point;
use crate::pool::{TakenSlab, numa_node_of};
use crate::refs::{PieceRef, SlabRef};
use crate::uses::PIN;

/// A writer's right to fill a slab. It ends with [`Arena::seal_slab`]: if it is dropped, its slab remains in use for
/// ever.
#[derive(Debug)]
#[must_use = "a lease that is dropped keeps its slab for ever"]
pub struct Lease {
    pub(crate) slab: SlabRef,
    class: Class,
    pub(crate) cursor: SlabCursor,
}

impl Arena {
    /// Leases a slab near the CPU of this thread. The slab is of `class`, or of a smaller class if no slab of `class`
    /// is free. `None` means that no slab is free.
    pub fn lease_slab(&self, class: Class) -> Option<Lease> {
        self.lease_slab_near(class, None)
    }

    /// Leases a slab, a part of shared memory, to a writer that runs on `cpu`; `None` stands for the CPU of this
    /// thread. If no NUMA node has a free slab of `class`, the slab is of a smaller class.
    ///
    /// Returns `None` if no slab is free. The callback for memory pressure is then called as if all memory were in use.
    pub fn lease_slab_near(&self, class: Class, cpu: Option<u32>) -> Option<Lease> {
        self.free_lingering_slabs();
        // If no slot is free, one that a memory file has and does not use comes back to the arena's file.
        if self.pool.lock().needs_idle_slot() {
            self.return_idle_slots(1);
        }
        let mut pool = self.pool.lock();
        let numa_node = match cpu {
            Some(cpu) => pool.topology().nearest_to_cpu(cpu),
            None => pool.topology().nearest_to_this_thread(),
        };
        let Some(taken) = pool.take_slab_of_at_most(class, numa_node) else {
            // No lock is held during a callback.
            drop(pool);
            self.callbacks.report_memory_used(self.geometry.chunk_count);
            return None;
        };
        let lease = self.begin_lease(&taken);
        let memory_used = pool.memory_used();
        drop(pool);
        if taken.new_slot.is_some() {
            self.callbacks.report_memory_used(memory_used);
        }
        Some(lease)
    }

    /// Begins the lease of a slab that was taken from the pool. The caller has locked the pool, so that any thread that
    /// sees the chunk in the pool also finds the chunk's class and home in its table.
    pub(crate) fn begin_lease(&self, taken: &TakenSlab) -> Lease {
        let generation = self.store_lease(taken);
        let &TakenSlab {
            chunk, slab, class, ..
        } = taken;
        let bytes = self.tables.bytes_of(class, slab);
        let records = self.tables.records_of(class, slab);
        Lease {
            slab: SlabRef { chunk, slab },
            class,
            cursor: SlabCursor::new(generation, bytes, records),
        }
    }

    /// Stores a new lease of a slab in the tables and returns its generation, a number that no earlier lease had. If
    /// the chunk is new, its home (the slot with its data) and its class are stored too.
    ///
    /// The state is stored last: after a crash before that, the slab is free.
    fn store_lease(&self, taken: &TakenSlab) -> u64 {
        let &TakenSlab {
            chunk,
            slab,
            class,
            new_slot,
        } = taken;
        let slab_ref = SlabRef { chunk, slab };
        let generation = self
            .map
            .u64(state_word::GENERATION)
            .fetch_add(1, Ordering::AcqRel)
            + 1;
        crash_point();
        self.tables.published(slab_ref).store(0, Ordering::Release);
        self.tables
            .generation(slab_ref)
            .store(generation, Ordering::Release);
        if let Some(slot) = new_slot {
            crash_point();
            self.store_home(chunk, Home::Memory(slot));
            crash_point();
            self.tables.set_class(chunk, Some(class));
        }
        crash_point();
        self.tables.set_state(slab_ref, SlabState::Leased);
        self.uses.begin_lease(slab_ref);
        generation
    }

    /// Returns whether the leased slab is in the memory nearest to the CPU of this thread.
    pub fn is_near(&self, lease: &Lease) -> bool {
        let Some(Home::Memory(slot)) = self.homes.get(lease.slab.chunk) else {
            return false;
        };
        let pool = self.pool.lock();
        numa_node_of(&self.geometry, pool.topology(), slot)
            == pool.topology().nearest_to_this_thread()
    }

    /// Returns whether nothing in the leased slab is pending.
    pub fn is_idle(&self, lease: &Lease) -> bool {
        self.uses.is_only_leased(lease.slab)
    }

    /// Returns the share of memory for each lease if there were one lease more, in bytes. Half of the memory is for
    /// leases; the other half is for data that waits for the drain.
    pub fn share_bytes(&self) -> u64 {
        let bytes_for_leases = self.geometry.data_bytes() / 2;
        let lease_count = u64::from(self.uses.leased()) + 1;
        bytes_for_leases / lease_count
    }

    /// Returns whether a slab of `class` or of a smaller class is free.
    pub fn has_room(&self, class: Class) -> bool {
        self.free_lingering_slabs();
        let pool = self.pool.lock();
        [Class::Small, Class::Medium, Class::Whole]
            .into_iter()
            .any(|candidate| candidate <= class && pool.has_slab(candidate))
    }

    /// Ends a lease. The slab is freed when nothing in it is pending.
    pub fn seal_slab(&self, lease: Lease) {
        let slab = lease.slab;
        crash_point();
        self.tables.set_state(slab, SlabState::Sealed);
        self.end_lease(slab);
    }

    /// Ends the lease of a slab into which its writer can store no more bytes.
    pub(crate) fn end_lease(&self, slab: SlabRef) {
        let mut pool = self.pool.lock();
        let may_chunk_move = pool.end_lease(slab.chunk);
        let memory_used = pool.memory_used();
        // The release below locks the pool again if the slab becomes free.
        drop(pool);
        self.uses.end_lease();
        self.release_uses(slab, PIN);
        if may_chunk_move {
            self.callbacks.report_memory_used(memory_used);
        }
    }
}

impl Lease {
    /// Returns the leased slab.
    pub fn slab(&self) -> SlabRef {
        self.slab
    }

    /// Returns the size class of the slab.
    pub fn class(&self) -> Class {
        self.class
    }

    pub(crate) fn generation(&self) -> u64 {
        self.cursor.generation()
    }

    /// Returns where the free bytes begin, in bytes from the start of the chunk. A new lease begins at the start of the
    /// slab.
    pub(crate) fn start(&self) -> u32 {
        self.cursor.position()
    }

    pub(crate) fn end(&self) -> u32 {
        self.cursor.end()
    }

    /// Returns how many bytes are free.
    pub fn free_bytes(&self) -> u32 {
        self.cursor.free_bytes()
    }

    /// Returns the last piece that was published in this lease.
    pub fn last(&self) -> Option<PieceRef> {
        self.cursor.last().map(|(record, _)| PieceRef {
            slab: self.slab,
            record,
        })
    }

    /// Returns whether bytes of `file` at `offset` that are stored at `room` continue the last piece.
    pub fn continues(&self, file: u64, offset: u64, room: Room) -> bool {
        self.cursor.continues(file, offset) && room.position == self.cursor.position()
    }

    /// Returns room for up to `len` bytes of `file` at `offset`, by the page rule of `firn_format::append`. `None`
    /// means that the slab is full.
    pub fn reserve(&self, file: u64, offset: u64, len: u64) -> Option<Room> {
        if !self.cursor.continues(file, offset) {
            return self.cursor.room_for_piece(offset, len);
        }
        // The caller may still decide to publish a new piece there, which needs a free record.
        if !self.cursor.has_record() {
            return None;
        }
        self.cursor.room_behind_last(len)
    }
}
