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
    file_locks: Vec<FileLock>,
    range_locks: Vec<RangeLock>,
}

struct RangeLock {
    ino: u64,
    process: usize,
    range: LockRange,
    mode: LockMode,
}

struct FileLock {
    ino: u64,
    process: usize,
    /// Number of the open file.
    file: u64,
    mode: LockMode,
}

impl Locks {
    /// Locks a whole file for the open file number `file`, or changes the mode of its lock. Returns false if another
    /// open file has a conflicting lock.
    pub(super) fn lock_file(
        &mut self,
        ino: u64,
        process: usize,
        file: u64,
        mode: LockMode,
    ) -> Result<bool> {
        if let LockReach::Refused(errno) = self.reach {
            return Err(errno);
        }
        let conflicts = self.file_locks.iter().any(|lock| {
            let is_seen = self.reach == LockReach::Everywhere || lock.process == process;
            // A lock of the same open file is replaced.
            let is_other_open_file = lock.ino == ino && lock.file != file;
            is_seen && is_other_open_file && excludes(lock.mode, mode)
        });
        if conflicts {
            return Ok(false);
        }
        self.end_file_lock(file);
        self.file_locks.push(FileLock {
            ino,
            process,
            file,
            mode,
        });
        Ok(true)
    }

    /// Locks a range for a process, or unlocks it if `mode` is `None`. Returns false if another process has a
    /// conflicting lock.
    pub(super) fn lock_range(
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
        let is_own = |lock: &RangeLock| (lock.ino, lock.process) == (ino, process);
        let (own_locks, mut locks): (Vec<_>, Vec<_>) = std::mem::take(&mut self.range_locks)
            .into_iter()
            .partition(is_own);
        let new_lock = |range, mode| RangeLock {
            ino,
            process,
            range,
            mode,
        };
        // The parts of the process's earlier locks outside the range stay.
        for lock in own_locks {
            for remaining in lock.range.without(&range) {
                locks.push(new_lock(remaining, lock.mode));
            }
        }
        if let Some(mode) = mode {
            locks.push(new_lock(range, mode));
        }
        self.range_locks = locks;
        Ok(true)
    }

    /// Returns whether another process has a lock in the range that conflicts with this mode. Locks that do not reach
    /// other processes never conflict.
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
        if self.reach != LockReach::Everywhere {
            return Ok(false);
        }
        Ok(self.range_locks.iter().any(|lock| {
            let is_of_other_process = lock.ino == ino && lock.process != process;
            is_of_other_process && excludes(lock.mode, mode) && lock.range.overlaps(&range)
        }))
    }

    /// Ends all byte-range locks of a process on a file, because the process closed a descriptor of it.
    pub(super) fn end_range_locks(&mut self, ino: u64, process: usize) {
        self.range_locks
            .retain(|lock| (lock.ino, lock.process) != (ino, process));
    }

    pub(super) fn has_file_lock(&self, file: u64) -> bool {
        self.file_locks.iter().any(|lock| lock.file == file)
    }

    /// Ends the whole-file lock of an open file that was closed.
    pub(super) fn end_file_lock(&mut self, file: u64) {
        self.file_locks.retain(|lock| lock.file != file);
    }

    /// Ends all locks of a process that ended.
    pub(super) fn end_locks_of_process(&mut self, process: usize) {
        self.file_locks.retain(|lock| lock.process != process);
        self.range_locks.retain(|lock| lock.process != process);
    }
}

/// Returns whether two locks exclude each other.
fn excludes(first: LockMode, second: LockMode) -> bool {
    first == LockMode::Exclusive || second == LockMode::Exclusive
}
