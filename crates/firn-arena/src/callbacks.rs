//! Callbacks that the arena calls when memory becomes free and under memory pressure. The *arena* is shared memory,
//! divided into *slots*, with the bytes that are not in the backing directory yet. *Memory pressure* means that more
//! slots are in use than a limit.
//!
//! Promise: during a callback the arena holds only the lock that guards this callback. A callback must neither set a
//! callback nor call the arena.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

type Callback = Box<dyn Fn() + Send + Sync>;

/// The callbacks of an arena.
pub(crate) struct Callbacks {
    /// Called when memory has become free.
    on_freed: Mutex<Option<Callback>>,
    /// Called under memory pressure.
    on_pressure: Mutex<Option<Callback>>,
    /// There is memory pressure when more than this number of memory slots is in use.
    pressure_above: AtomicU32,
}

impl Default for Callbacks {
    fn default() -> Self {
        Self {
            on_freed: Mutex::new(None),
            on_pressure: Mutex::new(None),
            pressure_above: AtomicU32::new(u32::MAX),
        }
    }
}

impl Callbacks {
    /// Sets the callback for freed memory, in place of an earlier one.
    pub(crate) fn set_on_freed(&self, callback: Callback) {
        *self.on_freed.lock() = Some(callback);
    }

    /// Sets the callback for memory pressure, which begins when more than `slots` memory slots are in use.
    pub(crate) fn set_on_pressure(&self, slots: u32, callback: Callback) {
        *self.on_pressure.lock() = Some(callback);
        self.pressure_above.store(slots, Ordering::Release);
    }

    /// Calls the callback for freed memory, if one is set.
    pub(crate) fn report_freed(&self) {
        if let Some(callback) = &*self.on_freed.lock() {
            callback();
        }
    }

    /// Calls the callback for memory pressure if `slots`, the memory slots in use, exceeds its limit.
    pub(crate) fn report_memory_used(&self, slots: u32) {
        if slots > self.pressure_above.load(Ordering::Acquire)
            && let Some(callback) = &*self.on_pressure.lock()
        {
            callback();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn counting() -> (Arc<AtomicU32>, Callback) {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&calls);
        let callback = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        (calls, Box::new(callback))
    }

    #[test]
    fn pressure_is_more_slots_in_use_than_were_named() {
        let callbacks = Callbacks::default();
        callbacks.report_memory_used(9);
        let (calls, callback) = counting();
        callbacks.set_on_pressure(3, callback);
        callbacks.report_memory_used(3);
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        callbacks.report_memory_used(4);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn each_freed_room_is_reported() {
        let callbacks = Callbacks::default();
        callbacks.report_freed();
        let (calls, callback) = counting();
        callbacks.set_on_freed(callback);
        callbacks.report_freed();
        callbacks.report_freed();
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
}
