//! Bounds the memory that an agent may hold for all of its connections together.
//!
//! An *agent* serves the files of a mount to other hosts, where *pullers* copy them. While it sends a file, it *holds*
//! the file's bytes in the *arena*, the shared memory of the mount: the mount cannot free them. Without a budget,
//! pullers could thus fill the arena.
//!
//! Invariant: `held_bytes <= bytes_max`, except while a single file that is larger than the budget is held alone.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The maximum number of held bytes, and the bytes that count against it.
pub struct HoldBudget {
    bytes_max: u64,
    held_bytes: Mutex<u64>,
}

/// Bytes that are reserved in a [`HoldBudget`] for one held file. Dropping the value releases them.
pub struct HoldReservation {
    budget: Arc<HoldBudget>,
    bytes: u64,
}

impl HoldBudget {
    /// Makes a budget of `bytes_max`, with no bytes held yet.
    pub fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes_max,
            held_bytes: Mutex::new(0),
        })
    }

    /// Reserves `bytes` for a file. Returns `None` if they exceed the budget until another reservation ends.
    ///
    /// A file without bytes in memory always gets its reservation. So does any file if nothing else is held.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Option<HoldReservation> {
        let mut held_bytes = self.lock();
        let total_bytes = held_bytes.checked_add(bytes)?;
        if total_bytes > self.bytes_max && *held_bytes > 0 && bytes > 0 {
            return None;
        }
        *held_bytes = total_bytes;
        Some(HoldReservation {
            budget: Arc::clone(self),
            bytes,
        })
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.held_bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HoldReservation {
    fn drop(&mut self) {
        *self.budget.lock() -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_bounded_and_a_larger_file_is_held_alone() {
        let budget = HoldBudget::new(10);
        let first = budget.reserve(6).unwrap();
        assert!(budget.reserve(5).is_none());
        let second = budget.reserve(4).unwrap();
        assert!(budget.reserve(0).is_some(), "no memory is always granted");
        drop((first, second));
        let large = budget.reserve(100).unwrap();
        assert!(budget.reserve(1).is_none());
        drop(large);
        assert!(budget.reserve(10).is_some());
    }
}
