//! Locks of files on the simulated disk.
//!
//! Invariants
//! * A file has one exclusive lock, or any number of shared ones, as far as locks reach.
//! * An open file has one lock at most. It ends with the open file and with its process.
//! * Ranges of one process and file do not overlap. They end when the process closes any open file of the file.

use firn_backing::{Errno, LockMode, LockRange, Result};

/// How far a lock reaches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockReach {
    /// Every process over the disk, on any host.
    #[default]
    Everywhere,
    /// The process that has it: each is a host of its own whose kernel asks no server.
    Host,
    /// There are none: each try fails with this.
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
    /// Locks a file, or changes the lock that it has; false where another one is in the way.
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

    /// Locks a range for a process, or unlocks it; false where another one is in the way.
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

    /// Whether another process has locked bytes of the range.
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

    /// The process closed an open file of this file.
    pub(super) fn end_ranges(&mut self, ino: u64, process: usize) {
        self.ranges
            .retain(|held| (held.ino, held.process) != (ino, process));
    }

    pub(super) fn has(&self, file: u64) -> bool {
        self.held.iter().any(|lock| lock.file == file)
    }

    /// The open file was closed.
    pub(super) fn end_of(&mut self, file: u64) {
        self.held.retain(|lock| lock.file != file);
    }

    /// The process ended.
    pub(super) fn end_all_of(&mut self, process: usize) {
        self.held.retain(|lock| lock.process != process);
        self.ranges.retain(|held| held.process != process);
    }
}
