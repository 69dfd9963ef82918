//! Whether this code runs in a child of vfork(2), which is on its parent's memory and must leave it alone.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys;

/// Calls of vfork(2) under way in any thread: while there is none, threads need not be told apart.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

/// Threads that may be in such a call at once; others wait for their turn.
const THREADS_MAX: usize = 64;
/// The threads whose children run, each with its thread pointer, which the child has too; 0: none. One that calls vfork(2)
/// again in its child is there twice.
static THREADS: [AtomicU64; THREADS_MAX] = [const { AtomicU64::new(0) }; THREADS_MAX];

/// Whether this code runs in a child of vfork(2).
#[inline(always)]
pub(crate) fn in_vfork_child() -> bool {
    UNDER_WAY.load(Ordering::Relaxed) != 0 && is_listed(sys::thread_pointer())
}

#[cold]
fn is_listed(thread: u64) -> bool {
    THREADS
        .iter()
        .any(|slot| slot.load(Ordering::Relaxed) == thread)
}

/// Replaces a word in one slot; `false`: none has it.
fn replace(from: u64, to: u64) -> bool {
    THREADS.iter().any(|slot| {
        slot.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    })
}

/// Before vfork(2): from now on this thread is the child.
pub(crate) fn begin_vfork() {
    UNDER_WAY.fetch_add(1, Ordering::Relaxed);
    while !replace(0, sys::thread_pointer()) {
        sys::sleep_ms(1);
    }
}

/// After vfork(2), in the parent.
pub(crate) fn end_vfork() {
    replace(sys::thread_pointer(), 0);
    UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
}
