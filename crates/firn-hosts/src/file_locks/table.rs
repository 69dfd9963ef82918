//! The table of fcntl(2) or flock(2) locks that programs of this host have on one file.
//!
//! Invariants
//! * Ranges of one owner do not overlap.
//! * If ranges of two owners overlap, both locks are shared.

use firn_backing::{LockMode, LockRange};

/// The owner of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Unique number of the owner.
    pub number: u64,
    /// Number of the open file through which the lock was taken. The lock ends with that open file.
    pub handle: u64,
    /// Process id of the owner, reported to other processes.
    pub pid: u32,
}

/// A held lock of a byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldLock {
    /// The program that has the lock.
    pub owner: Owner,
    /// The locked bytes.
    pub range: LockRange,
    /// Shared or exclusive.
    pub mode: LockMode,
}

/// The locks of this host's programs on one file; the module text describes it.
#[derive(Default)]
pub(super) struct Table {
    held: Vec<HeldLock>,
}

impl Table {
    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Returns all locks.
    pub(super) fn locks(&self) -> &[HeldLock] {
        &self.held
    }

    pub(super) fn owners(&self) -> impl Iterator<Item = Owner> {
        self.held.iter().map(|held| held.owner)
    }

    /// Returns a lock of another owner that excludes the given one.
    pub(super) fn conflict(
        &self,
        owner: u64,
        range: LockRange,
        mode: LockMode,
    ) -> Option<HeldLock> {
        let conflicts = |held: &&HeldLock| {
            let is_one_exclusive = held.mode == LockMode::Exclusive || mode == LockMode::Exclusive;
            held.owner.number != owner && is_one_exclusive && held.range.overlaps(&range)
        };
        self.held.iter().find(conflicts).copied()
    }

    /// Adds a lock. It replaces the locks that its owner had on the same bytes.
    pub(super) fn add(&mut self, lock: HeldLock) {
        self.cut(|held| (held.owner.number == lock.owner.number).then_some(lock.range));
        self.held.push(lock);
        debug_assert!(self.is_consistent());
    }

    /// Removes from each lock the range that `range_to_remove` returns for that lock. Returns the removed bytes on
    /// which no lock remains.
    pub(super) fn remove(
        &mut self,
        range_to_remove: impl Fn(&HeldLock) -> Option<LockRange>,
    ) -> Vec<LockRange> {
        let removed_ranges = self.cut(range_to_remove);
        removed_ranges
            .into_iter()
            .flat_map(|range| self.unlocked_parts(range))
            .collect()
    }

    /// Removes a range of bytes from each lock: the one that `range_to_remove` returns for the lock, if any. Returns
    /// the removed ranges, limited to the lock. Other locks may still cover bytes of them.
    fn cut(&mut self, range_to_remove: impl Fn(&HeldLock) -> Option<LockRange>) -> Vec<LockRange> {
        let mut removed_ranges = Vec::new();
        let mut remaining_locks = Vec::with_capacity(self.held.len());
        for held in self.held.drain(..) {
            let overlapping_range =
                range_to_remove(&held).filter(|range| range.overlaps(&held.range));
            let Some(range) = overlapping_range else {
                remaining_locks.push(held);
                continue;
            };
            removed_ranges.push(LockRange {
                first: range.first.max(held.range.first),
                last: range.last.min(held.range.last),
            });
            let remaining_ranges = held.range.without(&range);
            remaining_locks.extend(remaining_ranges.map(|range| HeldLock { range, ..held }));
        }
        self.held = remaining_locks;
        removed_ranges
    }

    /// Returns the parts of a range that are not locked.
    fn unlocked_parts(&self, range: LockRange) -> Vec<LockRange> {
        let mut unlocked = vec![range];
        for held in &self.held {
            unlocked = unlocked
                .iter()
                .flat_map(|part| part.without(&held.range))
                .collect();
        }
        unlocked
    }

    /// Returns whether the invariants at the head of this file hold.
    fn is_consistent(&self) -> bool {
        for (index, lock) in self.held.iter().enumerate() {
            for later_lock in &self.held[index + 1..] {
                if !lock.range.overlaps(&later_lock.range) {
                    continue;
                }
                let are_shared =
                    lock.mode == LockMode::Shared && later_lock.mode == LockMode::Shared;
                if !are_shared || lock.owner.number == later_lock.owner.number {
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LockMode::{Exclusive, Shared};

    fn owner(number: u64) -> Owner {
        Owner {
            number,
            handle: number,
            pid: 1,
        }
    }

    fn range(first: u64, last: u64) -> LockRange {
        LockRange { first, last }
    }

    fn held(number: u64, first: u64, last: u64, mode: LockMode) -> HeldLock {
        HeldLock {
            owner: owner(number),
            range: range(first, last),
            mode,
        }
    }

    /// Random locks beside a model that has an entry for each byte and owner.
    #[test]
    fn a_table_is_what_a_model_of_bytes_says() {
        const BYTES: u64 = 12;
        const OWNERS: u64 = 3;
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut draw = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let mut table = Table::default();
        let mut model = [[None; OWNERS as usize]; BYTES as usize];
        for step in 0..5000 {
            let (one, other) = (draw(BYTES), draw(BYTES));
            let of = range(one.min(other), one.max(other));
            let bytes = of.first as usize..=of.last as usize;
            let number = draw(OWNERS);
            let mode = [Some(Exclusive), Some(Shared), None][draw(3) as usize];
            let Some(mode) = mode else {
                let freed = table.remove(|held| (held.owner.number == number).then_some(of));
                let had: Vec<_> = bytes
                    .clone()
                    .filter(|&byte| model[byte][number as usize].take().is_some())
                    .collect();
                let is_freed = |byte: &usize| model[*byte].iter().all(Option::is_none);
                let mut expected: Vec<_> = had.into_iter().filter(is_freed).collect();
                let mut found: Vec<_> = freed
                    .iter()
                    .flat_map(|range| range.first as usize..=range.last as usize)
                    .collect();
                found.sort_unstable();
                expected.sort_unstable();
                assert_eq!(found, expected, "step {step}");
                continue;
            };
            let excludes = |byte: usize| {
                (0..OWNERS as usize).any(|owner| {
                    owner != number as usize
                        && model[byte][owner]
                            .is_some_and(|held| held == Exclusive || mode == Exclusive)
                })
            };
            let is_free = !bytes.clone().any(excludes);
            assert_eq!(
                table.conflict(number, of, mode).is_none(),
                is_free,
                "step {step}"
            );
            if is_free {
                table.add(held(number, of.first, of.last, mode));
                bytes.for_each(|byte| model[byte][number as usize] = Some(mode));
            }
        }
    }
}
