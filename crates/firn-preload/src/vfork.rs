//! Detects whether this code runs in a child of vfork(2). Such a child uses the memory of its parent, and must not
//! change it.
//!
//! A child has the thread pointer of the parent's thread that waits for it. So the threads that are in vfork(2) are
//! listed by their thread pointers.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys;

/// Number of calls of vfork(2) under way. While it is 0, the list need not be searched.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

/// Maximum number of threads in vfork(2) at once. Further ones wait.
const THREADS_MAX: usize = 64;
/// Thread pointers of the threads in vfork(2); 0 in free slots. A thread whose child calls vfork(2) is listed twice.
static THREADS: [AtomicU64; THREADS_MAX] = [const { AtomicU64::new(0) }; THREADS_MAX];

/// Whether this code runs in a child of vfork(2).
#[inline(always)]
pub(crate) fn is_vfork_child() -> bool {
    UNDER_WAY.load(Ordering::Relaxed) != 0 && is_listed(sys::thread_pointer())
}

#[cold]
fn is_listed(thread: u64) -> bool {
    THREADS
        .iter()
        .any(|slot| slot.load(Ordering::Relaxed) == thread)
}

/// Replaces a word in one slot. Returns false if no slot has it.
fn replace(from: u64, to: u64) -> bool {
    THREADS.iter().any(|slot| {
        slot.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })
}

/// Lists this thread before vfork(2). From now on code in it counts as code of the child.
pub(crate) fn begin_vfork() {
    UNDER_WAY.fetch_add(1, Ordering::Relaxed);
    while !replace(0, sys::thread_pointer()) {
        sys::sleep_ms(1);
    }
}

/// Removes this thread from the list after vfork(2), in the parent.
pub(crate) fn end_vfork() {
    replace(sys::thread_pointer(), 0);
    UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
}
