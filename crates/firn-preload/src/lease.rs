//! The lease of a descriptor: what it may fill, and how that ends.

pub(crate) mod fill;

use std::mem::MaybeUninit;

use firn_direct::slab_writer::SlabWriter;

/// What a descriptor may fill, and whether more is on its way. All zeros: nothing.
pub(crate) struct LeaseSlot {
    /// Whether `writer` is one. No `Option`: its `None` need not be zeros.
    has_writer: bool,
    /// Whether the next lease was asked for, and was not taken yet.
    pub(crate) has_asked: bool,
    writer: MaybeUninit<SlabWriter>,
}

impl LeaseSlot {
    pub(crate) const fn new() -> Self {
        Self {
            has_writer: false,
            has_asked: false,
            writer: MaybeUninit::uninit(),
        }
    }

    /// There is none, and none was asked for.
    pub(crate) fn clear_lease(&mut self) {
        self.has_writer = false;
        self.has_asked = false;
    }

    #[inline(always)]
    pub(crate) fn writer(&mut self) -> Option<&mut SlabWriter> {
        // SAFETY: `has_writer` is set after `writer` was written, and only then; a `SlabWriter` needs no drop.
        self.has_writer
            .then(|| unsafe { self.writer.assume_init_mut() })
    }

    pub(crate) fn set_writer(&mut self, writer: SlabWriter) {
        self.writer.write(writer);
        self.has_writer = true;
    }
}

/// Why bytes did not go into a lease.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseLost {
    /// It was revoked, or the number is another descriptor now.
    Revoked,
    /// The arena has no room.
    Full,
    /// No connection, or firnd does not know the descriptor.
    NoConnection,
    /// The process has a limit for file sizes: the kernel and firnd know what to do then.
    Limited,
}
