//! Callbacks that the arena calls when room becomes free or memory becomes short. The *arena* is shared memory, divided
//! into *slots*, with the bytes that are not in the backing directory yet.
//!
//! Promise: during a callback the arena holds only the lock that guards this callback. A callback must neither set a
//! callback nor call the arena.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

type Callback = Box<dyn Fn() + Send + Sync>;

/// The callbacks of an arena.
pub(crate) struct Listeners {
    /// Called when room has become free.
    freed: Mutex<Option<Callback>>,
    /// Called when memory is short.
    pressure: Mutex<Option<Callback>>,
    /// Memory is short when more than this number of memory slots is in use.
    pressure_above: AtomicU32,
}

impl Default for Listeners {
    fn default() -> Self {
        Self {
            freed: Mutex::new(None),
            pressure: Mutex::new(None),
            pressure_above: AtomicU32::new(u32::MAX),
        }
    }
}

impl Listeners {
    /// Sets the callback for freed room, in place of an earlier one.
    pub(crate) fn set_freed(&self, callback: Callback) {
        *self.freed.lock() = Some(callback);
    }

    /// Sets the callback for short memory. Memory is short when more than `slots` memory slots are in use.
    pub(crate) fn set_pressure(&self, slots: u32, callback: Callback) {
        *self.pressure.lock() = Some(callback);
        self.pressure_above.store(slots, Ordering::Release);
    }

    /// Calls the callback for freed room, if one is set.
    pub(crate) fn report_freed(&self) {
        if let Some(callback) = &*self.freed.lock() {
            callback();
        }
    }

    /// Calls the callback for memory pressure if `slots`, the memory slots in use, exceeds its limit.
    pub(crate) fn report_memory_used(&self, slots: u32) {
        if slots > self.pressure_above.load(Ordering::Acquire)
            && let Some(callback) = &*self.pressure.lock()
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
        let listeners = Listeners::default();
        listeners.report_memory_used(9);
        let (calls, callback) = counting();
        listeners.set_pressure(3, callback);
        listeners.report_memory_used(3);
        assert_eq!(calls.load(Ordering::Relaxed), 0);
        listeners.report_memory_used(4);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn each_freed_room_is_reported() {
        let listeners = Listeners::default();
        listeners.report_freed();
        let (calls, callback) = counting();
        listeners.set_freed(callback);
        listeners.report_freed();
        listeners.report_freed();
        assert_eq!(calls.load(Ordering::Relaxed), 2);
    }
}
