//! The bound of the arena memory that an agent holds for all of its connections together.
//!
//! The engine cannot free the memory of a held file. Without a bound, pullers could fill the arena.
//!
//! Invariant: `held_bytes <= bytes_max`, except while a single file that is larger than the bound is held alone.

use std::sync::{Arc, Mutex, PoisonError};

/// The bound, and the bytes that count against it.
pub struct Holds {
    bytes_max: u64,
    held_bytes: Mutex<u64>,
}

/// The right to hold some bytes. Dropping it releases the bytes.
pub struct Hold {
    holds: Arc<Holds>,
    bytes: u64,
}

impl Holds {
    /// Makes a bound of `bytes_max`, with no bytes held yet.
    pub fn new(bytes_max: u64) -> Arc<Self> {
        Arc::new(Self {
            bytes_max,
            held_bytes: Mutex::new(0),
        })
    }

    /// Acquires the right to hold `bytes` more. Returns `None` if the bound leaves no room until another hold ends.
    ///
    /// The right is always granted to a file without bytes in memory, and to any file if nothing else is held.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Option<Hold> {
        let mut held = self
            .held_bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let total = held.checked_add(bytes)?;
        if total > self.bytes_max && *held > 0 && bytes > 0 {
            return None;
        }
        *held = total;
        Some(Hold {
            holds: Arc::clone(self),
            bytes,
        })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let held = self.holds.held_bytes.lock();
        *held.unwrap_or_else(PoisonError::into_inner) -= self.bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_bounded_and_a_larger_file_is_held_alone() {
        let holds = Holds::new(10);
        let first = holds.take(6).unwrap();
        assert!(holds.take(5).is_none());
        let second = holds.take(4).unwrap();
        assert!(holds.take(0).is_some(), "no memory is always granted");
        drop((first, second));
        let large = holds.take(100).unwrap();
        assert!(holds.take(1).is_none());
        drop(large);
        assert!(holds.take(10).is_some());
    }
}
