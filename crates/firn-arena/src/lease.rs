//! Leases: a writer's right to fill a slab.

use std::sync::atomic::Ordering;

use firn_format::append::{Room, SlabCursor};
use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::slab::{Class, SlabState, slab_word};
use firn_format::superblock::state_word;

use crate::arena::{Arena, PIN, PieceRef, SlabRef};
use crate::map::probe;
use crate::pool::{Taken, numa_node_of};

/// A writer's right to fill a slab. Not dropped but given back with [`Arena::seal`].
#[derive(Debug)]
#[must_use = "a lease that is dropped keeps its slab for ever"]
pub struct Lease {
    pub(crate) slab: SlabRef,
    class: Class,
    pub(crate) cursor: SlabCursor,
}

impl Arena {
    /// Leases a slab of `class`, or of a smaller one where that is all there is, near the CPU of this thread.
    pub fn lease(&self, class: Class) -> Option<Lease> {
        self.lease_near(class, None)
    }

    /// The same near another CPU. A smaller slab near by is not preferred to a larger one far away.
    pub fn lease_near(&self, class: Class, cpu: Option<u32>) -> Option<Lease> {
        self.await_clients();
        let mut pool = self.pool.lock();
        let near = cpu.map_or_else(|| pool.topology().here(), |cpu| pool.topology().of_cpu(cpu));
        let order = [Class::Whole, Class::Medium, Class::Small];
        let taken = order
            .into_iter()
            .filter(|c| *c <= class)
            .find_map(|class| pool.take(class, near).map(|taken| (class, taken)));
        let Some((class, Taken { chunk, slab, cut })) = taken else {
            drop(pool);
            self.tell_pressure(self.geometry.chunk_count);
            return None;
        };
        let at = SlabRef { chunk, slab };
        let generation = self
            .map
            .u64(state_word::GENERATION)
            .fetch_add(1, Ordering::AcqRel)
            + 1;
        let header = self.geometry.slab_header_offset(chunk, slab);
        probe();
        self.map
            .u32(header + slab_word::PUBLISHED)
            .store(0, Ordering::Release);
        self.map
            .u64(header + slab_word::GENERATION)
            .store(generation, Ordering::Release);
        if let Some(slot) = cut {
            probe();
            self.store_home(chunk, Home::Memory(slot));
            probe();
            self.chunk_class(chunk)
                .store(Class::to_word(Some(class)), Ordering::Release);
        }
        probe();
        self.slab_state(at)
            .store(SlabState::Leased.to_word(), Ordering::Release);
        self.uses(at).store(PIN, Ordering::Release);
        let memory_used = pool.memory_used();
        drop(pool);
        if cut.is_some() {
            self.tell_pressure(memory_used);
        }
        let bytes = class.slab_bytes(self.geometry.chunk_bytes);
        let records = records_of(&self.geometry, class, slab);
        let start = (u64::from(slab) * bytes) as u32;
        let end = ((u64::from(slab) + 1) * bytes) as u32;
        Some(Lease {
            slab: at,
            class,
            cursor: SlabCursor::new(generation, start..end, records),
        })
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
        self.uses(lease.slab).load(Ordering::Acquire) == PIN
    }

    /// Whether a lease of `class` or smaller could be had.
    pub fn has_room(&self, class: Class) -> bool {
        self.await_clients();
        let pool = self.pool.lock();
        [Class::Small, Class::Medium, Class::Whole]
            .into_iter()
            .any(|c| c <= class && pool.has(c))
    }

    /// Ends a lease. The slab is freed when nothing of it is pending.
    pub fn seal(&self, lease: Lease) {
        let slab = lease.slab;
        probe();
        self.slab_state(slab)
            .store(SlabState::Sealed.to_word(), Ordering::Release);
        self.end_lease(slab);
    }

    /// The writer of a slab is known not to touch it any more.
    pub(crate) fn end_lease(&self, slab: SlabRef) {
        let mut pool = self.pool.lock();
        let may_move = pool.end_lease(slab.chunk);
        let memory_used = pool.memory_used();
        drop(pool);
        self.release_uses(slab, PIN);
        if may_move {
            self.tell_pressure(memory_used);
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

/// Records of slab `slab` in a chunk of `class`.
pub(crate) fn records_of(geometry: &Geometry, class: Class, slab: u32) -> std::ops::Range<u32> {
    let slabs = (geometry.chunk_bytes / class.slab_bytes(geometry.chunk_bytes)) as u32;
    let each = geometry.records_per_chunk() / slabs;
    slab * each..(slab + 1) * each
}
