//! Whether this code runs in a child of vfork(2), which is on its parent's memory and must leave it alone.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// Calls of vfork(2) under way in any thread: while there is none, nobody asks which thread it is. A look at a
/// thread's own memory is a call in a library that is loaded at the start.
static UNDER_WAY: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// How many children of vfork(2) run on this thread's stack.
    static CHILDREN: Cell<u32> = const { Cell::new(0) };
}

/// Whether this code runs in a child of vfork(2).
#[inline(always)]
pub(crate) fn in_vfork_child() -> bool {
    UNDER_WAY.load(Ordering::Relaxed) != 0 && CHILDREN.with(Cell::get) != 0
}

/// Before vfork(2): from now on this thread is the child.
pub(crate) fn begin_vfork() {
    UNDER_WAY.fetch_add(1, Ordering::Relaxed);
    CHILDREN.with(|count| count.set(count.get().wrapping_add(1)));
}

/// After vfork(2), in the parent.
pub(crate) fn end_vfork() {
    CHILDREN.with(|count| count.set(count.get().saturating_sub(1)));
    UNDER_WAY.fetch_sub(1, Ordering::Relaxed);
}
