//! How a call that a hook was called for ends: done, or left to the kernel.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::table::Entry;

/// What became of a call.
pub(crate) enum Handled {
    /// It is done: the result, -errno where it failed.
    Done(isize),
    /// The kernel has to do it.
    Forward(Ticket),
}

impl Handled {
    pub(crate) fn of(result: Result<usize, c_int>) -> Self {
        Self::Done(match result {
            Ok(done) => done as isize,
            Err(errno) => -(errno as isize),
        })
    }
}

/// A call of the kernel's that may use the kernel's offset of one of our descriptors.
pub(crate) struct Ticket {
    entry: Option<&'static Entry>,
}

impl Ticket {
    /// A descriptor that is not ours.
    pub(crate) const NONE: Self = Self { entry: None };

    /// The offset must not become private before [`Ticket::finish`].
    pub(crate) fn of(entry: &'static Entry) -> Self {
        entry.in_kernel.fetch_add(1, Ordering::AcqRel);
        Self { entry: Some(entry) }
    }

    /// The call has returned.
    pub(crate) fn finish(self) {
        if let Some(entry) = self.entry {
            let less = |count: u32| Some(count.saturating_sub(1));
            let _ = entry
                .in_kernel
                .fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        }
    }
}
