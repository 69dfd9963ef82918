//! Calls that copy all descriptors to another process: fork, exec, spawn.
//!
//! Counted twice: `total` tells a thread that opened a file meanwhile that such a call came between; `under_way` tells
//! that one has not returned yet. A descriptor opened in another thread between these steps and the fork is not taken
//! for this process's alone.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::wiped::Wiped;

struct Sharing {
    under_way: AtomicU32,
    total: AtomicU64,
}

// SAFETY: two counters, which zeros are values of: no such call yet.
static SHARING: Wiped<Sharing> = unsafe {
    Wiped::new(Sharing {
        under_way: AtomicU32::new(0),
        total: AtomicU64::new(0),
    })
};

/// Makes children of fork(2) begin with no such call. `false`: the kernel cannot.
pub(crate) fn wipe_on_fork() -> bool {
    SHARING.wipe_on_fork()
}

/// Such a call begins.
pub(crate) fn count_begin() {
    SHARING.under_way.fetch_add(1, Ordering::SeqCst);
    SHARING.total.fetch_add(1, Ordering::SeqCst);
}

/// Such a call is over. A child of fork(2) did not begin it.
pub(crate) fn count_end() {
    let less = |count: u32| Some(count.saturating_sub(1));
    let _ = SHARING
        .under_way
        .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
}

/// Whether such a call is under way.
pub(crate) fn is_under_way() -> bool {
    SHARING.under_way.load(Ordering::SeqCst) != 0
}

/// What a caller takes before it opens a file.
pub(crate) struct Moment {
    total: u64,
}

impl Moment {
    /// Takes the count.
    #[inline(always)]
    pub(crate) fn now() -> Self {
        Self {
            total: SHARING.total.load(Ordering::SeqCst),
        }
    }

    /// Whether no descriptor was copied to another process since.
    pub(crate) fn is_undisturbed(&self) -> bool {
        SHARING.under_way.load(Ordering::SeqCst) == 0
            && SHARING.total.load(Ordering::SeqCst) == self.total
    }
}
