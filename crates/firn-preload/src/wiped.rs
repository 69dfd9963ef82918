//! Memory that children of fork(2) find as zeros (`MADV_WIPEONFORK`, madvise(2)).
//!
//! State of this process alone (descriptors, connections, held locks) is in values of [`Wiped`]. Otherwise a child
//! would use the sockets, leases and offsets of its parent. So zeros must be valid, and must mean that nothing is known
//! yet.

use std::ops::Deref;

use crate::sys::syscall;

/// A value on pages of its own.
#[repr(C, align(4096))]
pub(crate) struct Wiped<T> {
    value: T,
}

impl<T: Sync> Wiped<T> {
    /// Makes a value that will be wiped.
    ///
    /// # Safety
    /// A `T` whose bytes are all zero must be valid, and the value may become zeros at any fork(2).
    pub(crate) const unsafe fn new(value: T) -> Self {
        Self { value }
    }

    /// Makes children of fork(2) find zeros here. Returns false if the kernel does not support that.
    pub(crate) fn wipe_on_fork(&'static self) -> bool {
        let start = &raw const *self;
        let len = size_of::<Self>();
        // SAFETY: the alignment gives the value whole pages of its own, and the caller of `new` has allowed the wipe.
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
