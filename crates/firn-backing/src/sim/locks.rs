//! Locks of files on the simulated disk.
//!
//! Invariants
//! * A file has one exclusive lock, or any number of shared ones, as far as locks reach.
//! * An open file has one lock at most. It ends with the open file and with its process.

use crate::{Errno, LockMode, Result};

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
    }
}
