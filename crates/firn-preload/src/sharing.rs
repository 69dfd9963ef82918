//! Counts the calls that copy all descriptors to another process: fork, exec and spawn.
//!
//! The race: one thread opens a file while another one is in fork(2). A child then shares the new descriptor. So its
//! offset must stay with the kernel and not become *private* (kept by this process). Two counters prevent this.
//! `under_way` is not 0 while such a call has not returned. `total` has grown if such a call has begun since the thread
//! began to open its file.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::wiped::Wiped;

/// The two counters (head of this file).
struct Sharing {
    under_way: AtomicU32,
    total: AtomicU64,
}

/// The counters of this process.
// SAFETY: zeros are valid counters: no such call was made yet.
static SHARING: Wiped<Sharing> = unsafe {
    Wiped::new(Sharing {
        under_way: AtomicU32::new(0),
        total: AtomicU64::new(0),
    })
};

/// Makes children of fork(2) count from 0. Returns false if the kernel does not support that.
pub(crate) fn wipe_on_fork() -> bool {
    SHARING.wipe_on_fork()
}

/// Counts the beginning of a call that copies all descriptors.
pub(crate) fn count_begin() {
    SHARING.under_way.fetch_add(1, Ordering::SeqCst);
    SHARING.total.fetch_add(1, Ordering::SeqCst);
}

/// Counts the end of a call that copies all descriptors. In a child of fork(2) the counter is 0 already, because the
/// child has not begun the call.
pub(crate) fn count_end() {
    let one_less = |count: u32| Some(count.saturating_sub(1));
    // The function always returns a value, so the update cannot fail.
    let _ = SHARING
        .under_way
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
}

/// Whether a call that copies all descriptors is under way.
pub(crate) fn is_under_way() -> bool {
    SHARING.under_way.load(Ordering::SeqCst) != 0
}

/// The count at some moment. A caller reads it before it opens a file.
pub(crate) struct SharingSnapshot {
    total: u64,
}

impl SharingSnapshot {
    /// Reads the current count.
    #[inline(always)]
    pub(crate) fn take() -> Self {
        Self {
            total: SHARING.total.load(Ordering::SeqCst),
        }
    }

    /// Whether no call has copied descriptors to another process since the count was read.
    pub(crate) fn is_unchanged(&self) -> bool {
        SHARING.under_way.load(Ordering::SeqCst) == 0
            && SHARING.total.load(Ordering::SeqCst) == self.total
    }
}
