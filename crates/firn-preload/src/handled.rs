//! The result of a call in this library: it is done, or the kernel must serve it.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use crate::table::Entry;

/// Result of a call in this library.
pub(crate) enum Handled {
    /// The call is done, with this result. A negative result is `-errno`.
    Done(isize),
    /// The kernel must serve the call. The ticket is finished after that.
    Forward(Ticket),
}

impl Handled {
    /// Makes a call that is done.
    pub(crate) fn of(result: Result<usize, c_int>) -> Self {
        Self::Done(match result {
            Ok(done) => done as isize,
            Err(errno) => -(errno as isize),
        })
    }
}

/// Marks a call of the kernel that may use the kernel's offset of a descriptor. While it is under way the offset does
/// not become private.
pub(crate) struct Ticket {
    entry: Option<&'static Entry>,
}

impl Ticket {
    /// The ticket of a call that uses no offset of a descriptor in the table.
    pub(crate) const NONE: Self = Self { entry: None };

    /// Makes a ticket for a descriptor. Its offset does not become private before [`Ticket::finish`].
    pub(crate) fn of(entry: &'static Entry) -> Self {
        entry.in_kernel.fetch_add(1, Ordering::AcqRel);
        Self { entry: Some(entry) }
    }

    /// Ends the ticket after the call has returned.
    pub(crate) fn finish(self) {
        if let Some(entry) = self.entry {
            // The counter may be 0 by now: the number was reused, and its entry set anew.
            let one_less = |count: u32| Some(count.saturating_sub(1));
            let _ = entry
                .in_kernel
                .fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_less);
        }
    }
}
