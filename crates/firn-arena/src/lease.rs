//! Leases: a writer's right to fill a slab.

use std::sync::atomic::Ordering;

use firn_format::append::{Room, SlabCursor};
use firn_format::home::Home;
use firn_format::slab::{Class, SlabState};
use firn_format::superblock::state_word;

use crate::arena::Arena;
use crate::map::probe;
use crate::pool::{TakenSlab, numa_node_of};
use crate::refs::{PieceRef, SlabRef};
use crate::uses::PIN;

/// A writer's right to fill a slab. Not dropped but given back with [`Arena::seal_slab`].
#[derive(Debug)]
#[must_use = "a lease that is dropped keeps its slab for ever"]
pub struct Lease {
    pub(crate) slab: SlabRef,
    class: Class,
    pub(crate) cursor: SlabCursor,
}

impl Arena {
    /// Leases a slab of `class`, or of a smaller one where that is all there is, near the CPU of this thread.
    pub fn lease_slab(&self, class: Class) -> Option<Lease> {
        self.lease_slab_near(class, None)
    }

    /// The same near another CPU. A smaller slab near by is not preferred to a larger one far away.
    pub fn lease_slab_near(&self, class: Class, cpu: Option<u32>) -> Option<Lease> {
        self.free_lingering_slabs();
        if self.pool.lock().wants_idle_slot() {
            self.return_idle_slots(1);
        }
        let mut pool = self.pool.lock();
        let near = cpu.map_or_else(|| pool.topology().here(), |cpu| pool.topology().of_cpu(cpu));
        let order = [Class::Whole, Class::Medium, Class::Small];
        let taken = order
            .into_iter()
            .filter(|c| *c <= class)
            .find_map(|class| pool.take(class, near).map(|taken| (class, taken)));
        let Some((class, taken)) = taken else {
            drop(pool);
            self.listeners.report_memory_used(self.geometry.chunk_count);
            return None;
        };
        let lease = self.begin_lease(class, &taken);
        let memory_used = pool.memory_used();
        drop(pool);
        if taken.cut.is_some() {
            self.listeners.report_memory_used(memory_used);
        }
        Some(lease)
    }

    /// Begins the lease of a slab that was taken. With the pool locked: a thread that sees the chunk there finds its class and
    /// home in its table.
    pub(crate) fn begin_lease(&self, class: Class, taken: &TakenSlab) -> Lease {
        let generation = self.enter_lease(class, taken);
        let &TakenSlab { chunk, slab, .. } = taken;
        let bytes = self.tables.bytes_of(class, slab);
        let records = self.tables.records_of(class, slab);
        Lease {
            slab: SlabRef { chunk, slab },
            class,
            cursor: SlabCursor::new(generation, bytes, records),
        }
    }

    /// Stores a new lease in the tables; returns its generation. The state comes last: until then the slab is free.
    fn enter_lease(&self, class: Class, taken: &TakenSlab) -> u64 {
        let &TakenSlab { chunk, slab, cut } = taken;
        let at = SlabRef { chunk, slab };
        let generation = self
            .map
            .u64(state_word::GENERATION)
            .fetch_add(1, Ordering::AcqRel)
            + 1;
        probe();
        self.tables.published(at).store(0, Ordering::Release);
        self.tables
            .generation(at)
            .store(generation, Ordering::Release);
        if let Some(slot) = cut {
            probe();
            self.store_home(chunk, Home::Memory(slot));
            probe();
            self.tables.set_class(chunk, Some(class));
        }
        probe();
        self.tables.set_state(at, SlabState::Leased);
        self.uses.begin_lease(at);
        generation
    }

    /// Whether the slab of a lease is in the memory nearest to the CPU of this thread.
    pub fn is_near(&self, lease: &Lease) -> bool {
        let Some(Home::Memory(slot)) = self.homes.get(lease.slab.chunk) else {
            return false;
        };
        let pool = self.pool.lock();
        numa_node_of(&self.geometry, pool.topology(), slot) == pool.topology().here()
    }

    /// Whether nothing in the slab of a lease is pending.
    pub fn is_idle(&self, lease: &Lease) -> bool {
        self.uses.is_only_leased(lease.slab)
    }

    /// The share of a writer in the arena's memory if there is one more: half of it is for leases, the other half for
    /// what waits for the drain.
    pub fn share_bytes(&self) -> u64 {
        self.geometry.data_bytes() / 2 / (u64::from(self.uses.leased()) + 1)
    }

    /// Whether a lease of `class` or smaller could be had.
    pub fn has_room(&self, class: Class) -> bool {
        self.free_lingering_slabs();
        let pool = self.pool.lock();
        [Class::Small, Class::Medium, Class::Whole]
            .into_iter()
            .any(|c| c <= class && pool.has(c))
    }

    /// Ends a lease. The slab is freed when nothing of it is pending.
    pub fn seal_slab(&self, lease: Lease) {
        let slab = lease.slab;
        probe();
        self.tables.set_state(slab, SlabState::Sealed);
        self.end_lease(slab);
    }

    /// The writer of a slab is known not to touch it any more.
    pub(crate) fn end_lease(&self, slab: SlabRef) {
        let mut pool = self.pool.lock();
        let may_move = pool.end_lease(slab.chunk);
        let memory_used = pool.memory_used();
        drop(pool);
        self.uses.end_lease();
        self.release_uses(slab, PIN);
        if may_move {
            self.listeners.report_memory_used(memory_used);
        }
    }
}

impl Lease {
    /// The slab.
    pub fn slab(&self) -> SlabRef {
        self.slab
    }
    /// Its class.
    pub fn class(&self) -> Class {
        self.class
    }
    pub(crate) fn generation(&self) -> u64 {
        self.cursor.generation()
    }
    /// Start of what is free, at first of the slab.
    pub(crate) fn start(&self) -> u32 {
        self.cursor.position()
    }
    pub(crate) fn end(&self) -> u32 {
        self.cursor.end()
    }
    /// Bytes not yet used.
    pub fn free_bytes(&self) -> u32 {
        self.cursor.free_bytes()
    }
    /// The last piece published here.
    pub fn last(&self) -> Option<PieceRef> {
        self.cursor.last().map(|(record, _)| PieceRef {
            slab: self.slab,
            record,
        })
    }

    /// Whether bytes of `file` at `offset`, filled at `room`, continue the last piece.
    pub fn continues(&self, file: u64, offset: u64, room: Room) -> bool {
        self.cursor.continues(file, offset) && room.position == self.cursor.position()
    }

    /// Room for up to `len` bytes of `file` at `offset`, by the page rule (`firn_format::append`). `None`: the
    /// slab is full.
    pub fn reserve(&self, file: u64, offset: u64, len: u64) -> Option<Room> {
        if !self.cursor.continues(file, offset) {
            return self.cursor.room_for_piece(offset, len);
        }
        // The caller may publish a piece of its own there after all, which needs a record.
        let room = self.cursor.room_behind_last(len);
        room.filter(|_| self.cursor.has_record())
    }
}
