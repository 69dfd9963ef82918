//! Advisory file locks of the simulated disk: whole-file locks as by flock(2), and byte-range locks as by fcntl(2).
//!
//! Each simulated process stands for one host. [`LockReach`] says whether processes see each other's locks.
//!
//! Invariants
//! * Among processes that see each other's locks, a file has one exclusive lock or any number of shared ones.
//! * An open file has at most one whole-file lock. The lock ends when the file is closed or the process dies.
//! * The byte ranges that a process has locked in a file do not overlap. They all end when the process closes any
//!   descriptor of that file, as POSIX has it.

use firn_backing::{Errno, LockMode, LockRange, Result};

/// Which processes see a lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockReach {
    /// Every process over the disk, on any host.
    #[default]
    Everywhere,
    /// Only the process that took the lock, as on a network file system whose locks stay on one host.
    Host,
    /// No process can lock: each attempt fails with this error.
    Refused(Errno),
}

/// The locks that are held.
#[derive(Default)]
pub(super) struct Locks {
    pub(super) reach: LockReach,
    held: Vec<HeldLock>,
    ranges: Vec<HeldRange>,
}

struct HeldRange {
    ino: u64,
    process: usize,
    range: LockRange,
    mode: LockMode,
}

struct HeldLock {
    ino: u64,
    process: usize,
    /// Number of the open file.
    file: u64,
    mode: LockMode,
}

impl Locks {
    /// Locks a whole file, or changes the mode of its lock. Returns false if another open file has a conflicting lock.
    pub(super) fn take(
        &mut self,
        ino: u64,
        process: usize,
        file: u64,
        mode: LockMode,
    ) -> Result<bool> {
        if let LockReach::Refused(errno) = self.reach {
            return Err(errno);
        }
        let is_seen = |lock: &&HeldLock| {
            let is_near = self.reach == LockReach::Everywhere || lock.process == process;
            lock.ino == ino && lock.file != file && is_near
        };
        let excludes =
            |lock: &HeldLock| lock.mode == LockMode::Exclusive || mode == LockMode::Exclusive;
        if self.held.iter().filter(is_seen).any(excludes) {
            return Ok(false);
        }
        self.end_of(file);
        self.held.push(HeldLock {
            ino,
            process,
            file,
            mode,
        });
        Ok(true)
    }

    /// Locks a range for a process, or unlocks it if `mode` is `None`. Returns false if another process has a
    /// conflicting lock.
    pub(super) fn take_range(
        &mut self,
        ino: u64,
        process: usize,
        range: LockRange,
        mode: Option<LockMode>,
    ) -> Result<bool> {
        if let Some(mode) = mode
            && self.is_range_locked(ino, process, range, mode)?
        {
            return Ok(false);
        }
        let is_own = |held: &HeldRange| (held.ino, held.process) == (ino, process);
        let (own, mut ranges): (Vec<_>, Vec<_>) = std::mem::take(&mut self.ranges)
            .into_iter()
            .partition(is_own);
        let new = |range, mode| HeldRange {
            ino,
            process,
            range,
            mode,
        };
        for held in own {
            ranges.extend(held.range.without(&range).map(|left| new(left, held.mode)));
        }
        ranges.extend(mode.map(|mode| new(range, mode)));
        self.ranges = ranges;
        Ok(true)
    }

    /// Returns whether another process has a lock in the range that conflicts with this mode.
    pub(super) fn is_range_locked(
        &self,
        ino: u64,
        process: usize,
        range: LockRange,
        mode: LockMode,
    ) -> Result<bool> {
        if let LockReach::Refused(errno) = self.reach {
            return Err(errno);
        }
        Ok(self.reach == LockReach::Everywhere
            && self.ranges.iter().any(|held| {
                let excludes = held.mode == LockMode::Exclusive || mode == LockMode::Exclusive;
                let is_other = held.ino == ino && held.process != process;
                is_other && excludes && held.range.overlaps(&range)
            }))
    }

    /// Ends all byte-range locks of a process on a file, because the process closed a descriptor of it.
    pub(super) fn end_ranges(&mut self, ino: u64, process: usize) {
        self.ranges
            .retain(|held| (held.ino, held.process) != (ino, process));
    }

    pub(super) fn has(&self, file: u64) -> bool {
        self.held.iter().any(|lock| lock.file == file)
    }

    /// Ends the whole-file lock of an open file that was closed.
    pub(super) fn end_of(&mut self, file: u64) {
        self.held.retain(|lock| lock.file != file);
    }

    /// Ends all locks of a process that ended.
    pub(super) fn end_all_of(&mut self, process: usize) {
        self.held.retain(|lock| lock.process != process);
        self.ranges.retain(|held| held.process != process);
    }
}
