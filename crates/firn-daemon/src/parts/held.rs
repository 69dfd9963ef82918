//! Values that a mount only has to keep until its end, such as its locks: they are released when the mount stops. Each
//! is a *part*, one feature or resource that a mount starts and stops.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::lock::Locks;
use crate::part::{ArenaEnd, Part, StopContext};

/// A value that works as long as it exists, such as the source of tokens. The stop drops it.
pub(crate) struct HeldValue<T>(Mutex<Option<T>>);

impl<T: Send + 'static> HeldValue<T> {
    pub(crate) fn into_part(held: T) -> Arc<dyn Part> {
        Arc::new(Self(Mutex::new(Some(held))))
    }
}

impl<T: Send> Part for HeldValue<T> {
    fn stop(&self, _: &mut StopContext) {
        let held = self.0.lock().take();
        drop(held);
    }
}

/// The locks of a mount, which are released last.
pub(crate) struct HeldLocks(Mutex<Option<Locks>>);

impl HeldLocks {
    pub(crate) fn new(locks: Locks) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(locks))))
    }
}

impl Part for HeldLocks {
    /// Releases the locks of the mount after all other parts have stopped. They stay until the end of the process if it
    /// may still change the backing, or if the arena (the host's memory) is kept.
    fn stop(&self, context: &mut StopContext) {
        let Some(mut locks) = self.0.lock().take() else {
            return;
        };
        if !context.has_backing_call_in_progress {
            // No call of this process can change the backing any more, so other hosts may act.
            locks.host_lease().release();
        }
        // With a call under way, or an arena that stays, only the end of the process releases the locks.
        if context.has_backing_call_in_progress || context.arena_end == ArenaEnd::Keep {
            std::mem::forget(locks);
        }
    }
}
