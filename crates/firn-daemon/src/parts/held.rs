//! What is only held, until the mount ends.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::lock::Locks;
use crate::part::{ArenaEnd, Part, Stop};

/// Something that acts as long as it is there: the source of tokens.
pub(crate) struct Held<T>(Mutex<Option<T>>);

impl<T: Send + 'static> Held<T> {
    pub(crate) fn part(held: T) -> Arc<dyn Part> {
        Arc::new(Self(Mutex::new(Some(held))))
    }
}

impl<T: Send> Part for Held<T> {
    fn stop(&self, _: &mut Stop) {
        let held = self.0.lock().take();
        drop(held);
    }
}

/// The locks of a mount, which are given back last.
pub(crate) struct HeldLocks(Mutex<Option<Locks>>);

impl HeldLocks {
    pub(crate) fn new(locks: Locks) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(locks))))
    }
}

impl Part for HeldLocks {
    fn stop(&self, stop: &mut Stop) {
        let Some(mut locks) = self.0.lock().take() else {
            return;
        };
        if !stop.is_call_under_way {
            // Nothing of this process changes the backing any more.
            locks.host_lease().release();
        }
        if stop.is_call_under_way || stop.arena == ArenaEnd::Keep {
            std::mem::forget(locks);
        }
    }
}
