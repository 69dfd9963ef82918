//! Finds the data of a chunk, a unit of shared memory, in memory or on disk. A gate for each chunk keeps threads from
//! using its bytes while they move.
//!
//! Terms
//! * The *arena* is shared memory with the bytes that are not in the backing directory yet. The *spill file* is space
//!   on a local disk for bytes that no longer fit into memory.
//! * A *chunk* is the unit in which the arena is allocated. Its data is in one *slot*, of memory or of the spill file.
//! * The *home* of a chunk is that slot. A *move* copies the data to another slot.
//! * A thread is *inside* a chunk from [`ChunkHomes::enter`] to [`ChunkHomes::leave`], while it uses the bytes. This
//!   takes little time, and a move waits for it.
//! * A *hold* is such a use without a time limit, from [`ChunkHomes::hold`] to [`ChunkHomes::end_hold`]. A move does
//!   not wait for it, but takes another chunk.
//!
//! Promise: a chunk keeps its home while a thread is inside or holds it.
//!
//! The *gate* of a chunk is its gate word in firnd's memory: two flags and the count of threads inside. A move goes
//! through three states:
//! * it sets COPYING and copies the bytes: readers still enter and leave, threads that change bytes are refused;
//! * it sets CLOSED and waits until no thread is inside: threads that want to enter wait, for at most
//!   [`CLOSE_TIMEOUT`];
//! * it stores the new home and clears both flags.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use firn_format::geometry::Geometry;
use firn_format::home::Home;

use crate::damage::Damage;
use crate::tables::Tables;

/// Flag of a gate word: threads that want to enter wait.
const CLOSED: u32 = 1 << 31;
/// Flag of a gate word: a move copies the bytes, so no thread may change them.
const COPYING: u32 = 1 << 30;
/// Bits of a gate word that count the threads inside.
const INSIDE_MASK: u32 = COPYING - 1;

/// The longest time that a move waits for the threads inside. A read of a piece takes less. A write to the backing may
/// take longer: then the move is abandoned, and the chunk moves later.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(2);

/// Value of [`ChunkGate::home`] for a chunk that is free or has an unknown home.
///
/// The values here are not those of [`Home::to_word`], which are for the arena's file: 64 bits, with a checksum.
const NO_HOME: u32 = u32::MAX;
/// Flag of [`ChunkGate::home`]: the slot is one of the spill file.
const IN_SPILL: u32 = 1 << 31;

/// The home of one chunk and its gate.
struct ChunkGate {
    /// The slot of its data, or `NO_HOME`.
    home: AtomicU32,
    /// Two flags and the count of threads inside.
    gate_word: AtomicU32,
    /// Number of holds: uses without a time limit. Each of them also counts as a thread inside.
    hold_count: AtomicU32,
}

/// The home and the gate of every chunk.
pub(crate) struct ChunkHomes {
    chunks: Vec<ChunkGate>,
}

impl ChunkHomes {
    /// Returns the homes of chunks that are all free.
    pub(crate) fn new(chunks: u32) -> Self {
        let gate = |_| ChunkGate {
            home: AtomicU32::new(NO_HOME),
            gate_word: AtomicU32::new(0),
            hold_count: AtomicU32::new(0),
        };
        Self {
            chunks: (0..chunks).map(gate).collect(),
        }
    }

    /// Returns the home of a chunk. Returns `None` if it is free or its home is unknown.
    pub(crate) fn get(&self, chunk: u32) -> Option<Home> {
        match self.chunks[chunk as usize].home.load(Ordering::Acquire) {
            NO_HOME => None,
            home if home & IN_SPILL != 0 => Some(Home::Spill(home & !IN_SPILL)),
            home => Some(Home::Memory(home)),
        }
    }

    /// Sets the home of a chunk. `None` means that the chunk is free or that its home is unknown.
    pub(crate) fn set(&self, chunk: u32, home: Option<Home>) {
        let word = match home {
            None => NO_HOME,
            Some(Home::Memory(slot)) => slot,
            Some(Home::Spill(slot)) => slot | IN_SPILL,
        };
        self.chunks[chunk as usize]
            .home
            .store(word, Ordering::Release);
    }

    fn gate_word(&self, chunk: u32) -> &AtomicU32 {
        &self.chunks[chunk as usize].gate_word
    }

    /// Enters a chunk, which keeps its home until [`ChunkHomes::leave`]. Waits while a move has the gate closed.
    pub(crate) fn enter(&self, chunk: u32) {
        while self.gate_word(chunk).fetch_add(1, Ordering::AcqRel) & CLOSED != 0 {
            // The mover waits until no thread is inside, so this one leaves before it waits.
            self.leave(chunk);
            while self.gate_word(chunk).load(Ordering::Acquire) & CLOSED != 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Enters a chunk to change its bytes. Returns false, without entering, while a move copies them: the change could
    /// miss the copy.
    pub(crate) fn enter_to_change(&self, chunk: u32) -> bool {
        let may_change =
            self.gate_word(chunk).fetch_add(1, Ordering::AcqRel) & (CLOSED | COPYING) == 0;
        if !may_change {
            self.leave(chunk);
        }
        may_change
    }

    /// Ends one [`ChunkHomes::enter`], or one [`ChunkHomes::enter_to_change`] that returned true.
    pub(crate) fn leave(&self, chunk: u32) {
        let gate_before = self.gate_word(chunk).fetch_sub(1, Ordering::AcqRel);
        debug_assert!(
            gate_before & INSIDE_MASK > 0,
            "no thread is inside chunk {chunk}"
        );
    }

    /// Enters a chunk for a use without a time limit. The mover sees it in [`ChunkHomes::is_held`] and chooses another
    /// chunk instead of waiting.
    pub(crate) fn hold(&self, chunk: u32) {
        self.chunks[chunk as usize]
            .hold_count
            .fetch_add(1, Ordering::AcqRel);
        self.enter(chunk);
    }

    /// Ends one [`ChunkHomes::hold`].
    pub(crate) fn end_hold(&self, chunk: u32) {
        self.leave(chunk);
        let holds_before = self.chunks[chunk as usize]
            .hold_count
            .fetch_sub(1, Ordering::AcqRel);
        debug_assert!(holds_before > 0, "chunk {chunk} is not held");
    }

    /// Returns whether a use without a time limit keeps the chunk where it is.
    pub(crate) fn is_held(&self, chunk: u32) -> bool {
        self.chunks[chunk as usize]
            .hold_count
            .load(Ordering::Acquire)
            > 0
    }

    /// Begins a move: no thread may change the bytes from now on. Returns false, and begins nothing, if a thread is
    /// inside.
    pub(crate) fn begin_copy(&self, chunk: u32) -> bool {
        self.gate_word(chunk)
            .compare_exchange(0, COPYING, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Closes the gate of a chunk after its bytes were copied to another slot: from now on, threads that want to enter
    /// wait. Then waits until all threads inside have left.
    ///
    /// Returns false if that takes longer than [`CLOSE_TIMEOUT`]; the chunk then keeps its old slot. In both cases the
    /// caller ends the move with [`ChunkHomes::open_gate`].
    pub(crate) fn close_gate(&self, chunk: u32) -> bool {
        let gate_before = self.gate_word(chunk).fetch_or(CLOSED, Ordering::AcqRel);
        debug_assert_eq!(
            gate_before & (CLOSED | COPYING),
            COPYING,
            "chunk {chunk} is closed after its copy, once"
        );
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        while self.gate_word(chunk).load(Ordering::Acquire) & INSIDE_MASK != 0 {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Ends a move that is complete or abandoned: opens the gate and permits changes.
    pub(crate) fn open_gate(&self, chunk: u32) {
        let gate_before = self
            .gate_word(chunk)
            .fetch_and(!(CLOSED | COPYING), Ordering::AcqRel);
        debug_assert!(
            gate_before & COPYING > 0,
            "chunk {chunk} was not being copied"
        );
    }
}

/// Returns the home of each chunk, the slot that has its data, for an attach or a check. The index in the result is the
/// chunk. A chunk that is free or damaged has none.
///
/// A home word that is not valid is damage. Two chunks that name the same slot are both damaged, because it is unknown
/// which of them owns the slot.
///
/// During a check, firnd may use the arena. So a chunk that looks damaged is read again: it may have been freed or
/// moved after the first read.
pub(crate) fn read_homes(tables: &Tables, damage: &mut Vec<Damage>) -> Vec<Option<Home>> {
    let geometry = tables.geometry();
    let read_word = |chunk| tables.home(chunk).load(Ordering::Acquire);
    let is_in_use = |chunk| !matches!(tables.class(chunk), Ok(None));
    let mut homes = vec![None; geometry.chunks() as usize];
    let mut chunk_by_home: HashMap<Home, u32> = HashMap::new();
    for chunk in 0..geometry.chunks() {
        if !is_in_use(chunk) {
            continue;
        }
        let word = read_word(chunk);
        let Some(home) = decode_home(word, chunk, geometry) else {
            // Not damaged if it has been freed since.
            if is_in_use(chunk) && read_word(chunk) == word {
                damage.push(Damage::HomeWord { chunk, word });
            }
            continue;
        };
        homes[chunk as usize] = Some(home);
        let Some(earlier_chunk) = chunk_by_home.insert(home, chunk) else {
            continue;
        };
        // Not damaged if the earlier chunk has been freed or moved since: then its slot was free for this chunk.
        let has_same_home = is_in_use(earlier_chunk)
            && Home::from_word(read_word(earlier_chunk), earlier_chunk) == Some(home);
        if has_same_home {
            for damaged_chunk in [chunk, earlier_chunk] {
                homes[damaged_chunk as usize] = None;
                damage.push(Damage::HomeWord {
                    chunk: damaged_chunk,
                    word: read_word(damaged_chunk),
                });
            }
        }
    }
    homes
}

/// Decodes the home word of a chunk. Returns `None` if it is damaged or names a slot that the arena does not have.
fn decode_home(word: u64, chunk: u32, geometry: &Geometry) -> Option<Home> {
    let home = Home::from_word(word, chunk)?;
    let exists = match home {
        Home::Memory(slot) => slot < geometry.chunk_count,
        Home::Spill(slot) => slot < geometry.spill_count,
    };
    exists.then_some(home)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_set_is_what_is_found() {
        let homes = ChunkHomes::new(2);
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
        let homes = ChunkHomes::new(1);
        homes.enter(0);
        assert!(!homes.begin_copy(0));
        homes.leave(0);
        assert!(homes.begin_copy(0));
        assert!(!homes.enter_to_change(0));
        homes.enter(0);
        assert!(!homes.close_gate(0), "a reader is inside");
        homes.open_gate(0);
        assert!(homes.enter_to_change(0));
        homes.leave(0);
        homes.leave(0);
        assert!(homes.begin_copy(0) && homes.close_gate(0));
        homes.open_gate(0);
    }

    #[test]
    fn a_chunk_that_is_held_does_not_move_and_says_so() {
        let homes = ChunkHomes::new(2);
        homes.hold(0);
        homes.hold(0);
        homes.end_hold(0);
        assert!((homes.is_held(0), homes.is_held(1)) == (true, false) && !homes.begin_copy(0));
        homes.end_hold(0);
        assert!(!homes.is_held(0) && homes.begin_copy(0));
    }
}
