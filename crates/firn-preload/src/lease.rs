//! The *lease* of a descriptor: the right to fill a *slab*, a free range of the shared memory, with the bytes of its
//! writes. firnd, the process that serves the mount, grants leases and may revoke them.

pub(crate) mod fill;

use std::mem::MaybeUninit;

use firn_direct::slab_writer::SlabWriter;

/// The lease of a descriptor, if it has one. All zeros mean that it has none.
pub(crate) struct LeaseSlot {
    /// Whether `writer` is initialized. An `Option` would not do, because its `None` need not be zeros.
    has_writer: bool,
    /// Whether the next lease was requested and not taken yet.
    pub(crate) is_next_requested: bool,
    writer: MaybeUninit<SlabWriter>,
}

impl LeaseSlot {
    pub(crate) const fn new() -> Self {
        Self {
            has_writer: false,
            is_next_requested: false,
            writer: MaybeUninit::uninit(),
        }
    }

    /// Drops the lease, and forgets that the next one was requested.
    pub(crate) fn clear_lease(&mut self) {
        self.has_writer = false;
        self.is_next_requested = false;
    }

    /// Returns the writer of the leased slab.
    #[inline(always)]
    pub(crate) fn writer(&mut self) -> Option<&mut SlabWriter> {
        // SAFETY: `has_writer` is set only after `writer` was written, and a `SlabWriter` needs no drop.
        self.has_writer
            .then(|| unsafe { self.writer.assume_init_mut() })
    }

    pub(crate) fn set_writer(&mut self, writer: SlabWriter) {
        self.writer.write(writer);
        self.has_writer = true;
    }
}

/// Why bytes could not be written to a lease.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseLost {
    /// firnd has revoked the lease, or the number is another file now.
    Revoked,
    /// The arena (the shared memory) has no room for a further lease.
    Full,
    /// The connection has ended, or firnd does not know the open file.
    NoConnection,
    /// The process has a limit of file sizes, which only the kernel and firnd enforce.
    Limited,
}
