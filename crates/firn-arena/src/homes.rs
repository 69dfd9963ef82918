//! Where the data of each chunk is now, and the threads that rely on it.
//!
//! Promise: between [`Homes::enter`] and [`Homes::leave`] a chunk stays where it is.
//!
//! One counter a chunk, in the memory of firnd. A move marks it *copying* while the bytes are copied: readers come and
//! go, but no thread changes a byte in place. Then it closes the gate, waits for those inside to leave, changes the
//! home and opens again. A thread that comes meanwhile waits; that is short, or the move gives up.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use firn_format::home::Home;

use crate::damage::Damage;
use crate::tables::Tables;

const CLOSED: u32 = 1 << 31;
const COPYING: u32 = 1 << 30;
const INSIDE: u32 = COPYING - 1;

/// Longest a move waits for those inside: a read of a piece takes less, a write to the backing may take any
/// time, and then the chunk moves later.
const CLOSE_WAIT: Duration = Duration::from_millis(2);

const NOWHERE: u32 = u32::MAX;
const IN_SPILL: u32 = 1 << 31;

struct Place {
    home: AtomicU32,
    guard: AtomicU32,
    /// Uses that may last, each of which is inside too.
    held: AtomicU32,
}

/// All chunks.
pub(crate) struct Homes {
    places: Vec<Place>,
}

impl Homes {
    pub(crate) fn new(chunks: u32) -> Self {
        let place = |_| Place {
            home: AtomicU32::new(NOWHERE),
            guard: AtomicU32::new(0),
            held: AtomicU32::new(0),
        };
        Self {
            places: (0..chunks).map(place).collect(),
        }
    }

    /// Where a chunk is; `None`: free, or unknown.
    pub(crate) fn get(&self, chunk: u32) -> Option<Home> {
        match self.places[chunk as usize].home.load(Ordering::Acquire) {
            NOWHERE => None,
            home if home & IN_SPILL != 0 => Some(Home::Spill(home & !IN_SPILL)),
            home => Some(Home::Memory(home)),
        }
    }

    pub(crate) fn set(&self, chunk: u32, home: Option<Home>) {
        let word = match home {
            None => NOWHERE,
            Some(Home::Memory(slot)) => slot,
            Some(Home::Spill(slot)) => slot | IN_SPILL,
        };
        self.places[chunk as usize]
            .home
            .store(word, Ordering::Release);
    }

    fn guard(&self, chunk: u32) -> &AtomicU32 {
        &self.places[chunk as usize].guard
    }

    /// From now on the chunk stays where it is.
    pub(crate) fn enter(&self, chunk: u32) {
        while self.guard(chunk).fetch_add(1, Ordering::AcqRel) & CLOSED != 0 {
            self.leave(chunk);
            while self.guard(chunk).load(Ordering::Acquire) & CLOSED != 0 {
                std::thread::yield_now();
            }
        }
    }

    /// The same for a thread that changes bytes; false while they are being copied.
    pub(crate) fn enter_to_change(&self, chunk: u32) -> bool {
        let free = self.guard(chunk).fetch_add(1, Ordering::AcqRel) & (CLOSED | COPYING) == 0;
        if !free {
            self.leave(chunk);
        }
        free
    }

    pub(crate) fn leave(&self, chunk: u32) {
        let before = self.guard(chunk).fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before & INSIDE > 0, "no thread is inside chunk {chunk}");
    }

    /// As [`Homes::enter`], for a thread that may stay for any time, so that moves of the chunk are refused instead of
    /// waited for.
    pub(crate) fn hold(&self, chunk: u32) {
        self.places[chunk as usize]
            .held
            .fetch_add(1, Ordering::AcqRel);
        self.enter(chunk);
    }

    pub(crate) fn let_go(&self, chunk: u32) {
        self.leave(chunk);
        let before = self.places[chunk as usize]
            .held
            .fetch_sub(1, Ordering::AcqRel);
        debug_assert!(before > 0, "chunk {chunk} is not held");
    }

    pub(crate) fn is_held(&self, chunk: u32) -> bool {
        self.places[chunk as usize].held.load(Ordering::Acquire) > 0
    }

    /// The bytes of a chunk are about to be copied; false while a thread is inside.
    pub(crate) fn begin_copy(&self, chunk: u32) -> bool {
        self.guard(chunk)
            .compare_exchange(0, COPYING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// The copy is made: closes the gate and waits until all threads have left. False: they stay too long.
    pub(crate) fn close(&self, chunk: u32) -> bool {
        let before = self.guard(chunk).fetch_or(CLOSED, Ordering::AcqRel);
        debug_assert_eq!(
            before & (CLOSED | COPYING),
            COPYING,
            "chunk {chunk} is closed after its copy, once"
        );
        let until = Instant::now() + CLOSE_WAIT;
        while self.guard(chunk).load(Ordering::Acquire) & INSIDE != 0 {
            if Instant::now() >= until {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// The move ended, one way or the other.
    pub(crate) fn open(&self, chunk: u32) {
        let before = self
            .guard(chunk)
            .fetch_and(!(CLOSED | COPYING), Ordering::AcqRel);
        debug_assert!(before & COPYING > 0, "chunk {chunk} was not being copied");
    }
}

/// Where each chunk in use is, as its table says; two that claim one slot are both damaged, because the slot's owner is
/// unknown.
pub(crate) fn read_homes(tables: &Tables, damage: &mut Vec<Damage>) -> Vec<Option<Home>> {
    let geometry = tables.geometry();
    let word = |chunk| tables.home(chunk).load(Ordering::Acquire);
    let in_use = |chunk| !matches!(tables.class(chunk), Ok(None));
    let mut homes = vec![None; geometry.chunks() as usize];
    let mut owners = HashMap::new();
    for chunk in (0..geometry.chunks()).filter(|chunk| in_use(*chunk)) {
        let found = word(chunk);
        let home = Home::from_word(found, chunk).filter(|home| match *home {
            Home::Memory(slot) => slot < geometry.chunk_count,
            Home::Spill(slot) => slot < geometry.spill_count,
        });
        let Some(home) = home else {
            // A live arena may have freed it between the two looks.
            if in_use(chunk) && word(chunk) == found {
                damage.push(Damage::Home { chunk, word: found });
            }
            continue;
        };
        homes[chunk as usize] = Some(home);
        if let Some(other) = owners.insert(home, chunk)
            && in_use(other)
            && Home::from_word(word(other), other) == Some(home)
        {
            homes[chunk as usize] = None;
            homes[other as usize] = None;
            damage.extend([chunk, other].map(|chunk| Damage::Home {
                chunk,
                word: word(chunk),
            }));
        }
    }
    homes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_what_is_found() {
        let homes = Homes::new(2);
        for home in [
            None,
            Some(Home::Memory(0)),
            Some(Home::Memory(9)),
            Some(Home::Spill(0)),
        ] {
            homes.set(1, home);
            assert_eq!((homes.get(0), homes.get(1)), (None, home));
        }
    }

    #[test]
    fn a_copy_begins_only_where_no_thread_is_inside_and_keeps_changes_out() {
        let homes = Homes::new(1);
        homes.enter(0);
        assert!(!homes.begin_copy(0));
        homes.leave(0);
        assert!(homes.begin_copy(0));
        assert!(!homes.enter_to_change(0));
        homes.enter(0);
        assert!(!homes.close(0), "a reader is inside");
        homes.open(0);
        assert!(homes.enter_to_change(0));
        homes.leave(0);
        homes.leave(0);
        assert!(homes.begin_copy(0) && homes.close(0));
        homes.open(0);
    }

    #[test]
    fn a_chunk_that_is_held_does_not_move_and_says_so() {
        let homes = Homes::new(2);
        homes.hold(0);
        homes.hold(0);
        homes.let_go(0);
        assert!((homes.is_held(0), homes.is_held(1)) == (true, false) && !homes.begin_copy(0));
        homes.let_go(0);
        assert!(!homes.is_held(0) && homes.begin_copy(0));
    }
}
