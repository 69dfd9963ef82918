//! Counts the uses of each slab. A *slab* is a part of shared memory that one writer fills. It can be leased to the
//! next writer only when nothing uses it.
//!
//! The counter of a slab is the number of its *live* bytes (not yet in the backing directory), plus 2^40 for each
//! *pin*. A pin is any other use:
//! * a lease, until it ends;
//! * an I/O that reads the slab;
//! * after an attach, pieces that are not counted yet;
//! * a client that may still store bytes after its lease.
//!
//! Promise: only the caller that releases the last use of a slab learns that the slab became free.
//!
//! Invariants
//! * The uses released never exceed the uses added (asserted).
//! * A slab with a count of 0 has no use.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::geometry::Geometry;

use crate::refs::SlabRef;

/// What one use of a slab other than by live bytes adds to its counter. Larger than the bytes of any slab, so live
/// bytes never look like a pin.
pub(crate) const PIN: u64 = 1 << 40;

/// The uses of all slabs, counted without a lock: live bytes, plus [`PIN`] for each other use.
pub(crate) struct SlabUses {
    /// One counter for each smallest slab. A larger slab uses the counter of its first smallest slab.
    counts: Vec<AtomicU64>,
    small_slabs: u32,
    /// Number of leases that have not ended.
    leased: AtomicU32,
}

impl SlabUses {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let slabs = geometry.chunks() as usize * geometry.small_slabs() as usize;
        Self {
            counts: (0..slabs).map(|_| AtomicU64::new(0)).collect(),
            small_slabs: geometry.small_slabs(),
            leased: AtomicU32::new(0),
        }
    }

    fn count(&self, slab: SlabRef) -> &AtomicU64 {
        debug_assert!(slab.slab < self.small_slabs, "{slab:?} is beyond its chunk");
        &self.counts[slab.chunk as usize * self.small_slabs as usize + slab.slab as usize]
    }

    /// Counts a new lease of a free slab, and sets the pin of the lease, the first use of the slab.
    pub(crate) fn begin_lease(&self, slab: SlabRef) {
        let count_before = self.count(slab).swap(PIN, Ordering::AcqRel);
        debug_assert_eq!(count_before, 0, "{slab:?} is leased while it is used");
        self.count_lease();
    }

    /// Counts a lease without a pin: the slab is pinned already.
    pub(crate) fn count_lease(&self) {
        self.leased.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the end of a lease. The caller then releases the [`PIN`] of the lease.
    pub(crate) fn end_lease(&self) {
        let count_before = self.leased.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(count_before > 0, "more leases ended than began");
    }

    /// Returns the number of leases that have not ended.
    pub(crate) fn leased(&self) -> u32 {
        self.leased.load(Ordering::Relaxed)
    }

    /// Pins a slab with records at attach, until its pending pieces are known.
    pub(crate) fn set_pinned(&self, slab: SlabRef) {
        self.count(slab).store(PIN, Ordering::Relaxed);
    }

    /// Adds live bytes, or a [`PIN`].
    pub(crate) fn add(&self, slab: SlabRef, amount: u64) {
        self.count(slab).fetch_add(amount, Ordering::AcqRel);
    }

    /// Releases live bytes, or a [`PIN`]. Returns true if this was the last use of the slab.
    pub(crate) fn release(&self, slab: SlabRef, amount: u64) -> bool {
        let count_before = self.count(slab).fetch_sub(amount, Ordering::AcqRel);
        assert!(
            count_before >= amount,
            "{slab:?} released more often than it was used"
        );
        count_before == amount
    }

    pub(crate) fn is_used(&self, slab: SlabRef) -> bool {
        self.count(slab).load(Ordering::Acquire) > 0
    }

    /// Returns whether the lease is the only use of a leased slab.
    pub(crate) fn is_only_leased(&self, slab: SlabRef) -> bool {
        self.count(slab).load(Ordering::Acquire) == PIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLAB: SlabRef = SlabRef { chunk: 1, slab: 2 };

    fn uses() -> SlabUses {
        SlabUses {
            counts: (0..8).map(|_| AtomicU64::new(0)).collect(),
            small_slabs: 4,
            leased: AtomicU32::new(0),
        }
    }

    #[test]
    fn only_the_release_of_the_last_use_frees_a_slab() {
        let uses = uses();
        uses.begin_lease(SLAB);
        assert!(uses.is_only_leased(SLAB));
        assert_eq!(uses.leased(), 1);
        uses.add(SLAB, 100);
        assert!(!uses.is_only_leased(SLAB));
        uses.end_lease();
        assert!(!uses.release(SLAB, PIN));
        assert_eq!(uses.leased(), 0);
        assert!(!uses.release(SLAB, 60));
        assert!(uses.release(SLAB, 40));
        assert!(!uses.is_used(SLAB));
    }

    #[test]
    fn a_use_is_that_of_one_slab() {
        let uses = uses();
        uses.add(SLAB, PIN);
        assert!(!uses.is_used(SlabRef { chunk: 1, slab: 1 }));
        assert!(!uses.is_used(SlabRef { chunk: 0, slab: 2 }));
    }

    #[test]
    #[should_panic(expected = "released more often than it was used")]
    fn nothing_is_released_that_was_not_added() {
        let uses = uses();
        uses.add(SLAB, 5);
        uses.release(SLAB, 6);
    }
}
