//! Memory that children of fork(2) find as zeros (`MADV_WIPEONFORK`, madvise(2)).
//!
//! What describes this process alone (descriptors, connections, locks that are held) lies in values of [`Wiped`]: a
//! child would otherwise use its parent's sockets, leases and offsets. So zeros must mean: nothing is known yet.

use std::ops::Deref;

use crate::sys::syscall;

/// A value on pages of its own.
#[repr(C, align(4096))]
pub(crate) struct Wiped<T> {
    value: T,
}

impl<T: Sync> Wiped<T> {
    /// # Safety
    /// A `T` whose bytes are all zero is a value, and it may become one at a fork(2) whatever it was before.
    pub(crate) const unsafe fn new(value: T) -> Self {
        Self { value }
    }

    /// Makes children of fork(2) find zeros here. `false`: the kernel cannot.
    pub(crate) fn wipe_on_fork(&'static self) -> bool {
        let start = &raw const *self;
        let len = size_of::<Self>();
        // SAFETY: the alignment gives the value whole pages of its own, and `new` was promised that it may be wiped.
        unsafe { syscall!(libc::SYS_madvise, start, len, libc::MADV_WIPEONFORK) == 0 }
    }
}

impl<T> Deref for Wiped<T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}
