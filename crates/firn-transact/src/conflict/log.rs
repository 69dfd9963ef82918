//! [`AccessLog`]: which bytes the processes of this host read and wrote, while a transaction of several hosts is open.
//!
//! The mount adds each read and write here. Before the hosts vote on the commit, the accesses to the files of the
//! transaction are taken out of the log and published. If the commit fails, they are put back.
//!
//! Promise: while the log is off, an access costs one load of an atomic and takes no lock.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::ranges::RangeSet;

/// Number of tables over which the files are spread, so that two threads seldom wait for the same lock.
const SHARDS: usize = 16;

/// Whether a process reads bytes or changes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// The bytes were read, even if the file ended before them.
    Read,
    /// The bytes were written, cut off or cleared.
    Write,
}

/// The accesses of one process to one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessAccesses {
    /// Bytes that the process read.
    pub read: RangeSet,
    /// Bytes that the process wrote, cut off or cleared.
    pub written: RangeSet,
}

impl ProcessAccesses {
    fn add(&mut self, access: Access, range: Range<u64>) {
        match access {
            Access::Read => self.read.insert(range),
            Access::Write => self.written.insert(range),
        }
    }
}

/// A file and the accesses of processes to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessedFile {
    /// Inode number of the file in the backing.
    pub ino: u64,
    /// A path of the file at its first use, relative to the backing.
    pub path: Vec<u8>,
    /// Accesses by process id; 0 stands for all processes whose id is not known.
    pub processes: BTreeMap<u32, ProcessAccesses>,
}

/// The accesses of processes to files, recorded while the log is on.
#[derive(Debug, Default)]
pub struct AccessLog {
    is_on: AtomicBool,
    /// Used files by inode number, each in the table of [`AccessLog::shard`].
    shards: [Mutex<HashMap<u64, AccessedFile>>; SHARDS],
}

impl AccessLog {
    /// Returns an empty log, which is off.
    pub fn new() -> Self {
        Self::default()
    }

    /// Turns the log on or off. While the log is off, [`Self::add`] does nothing; accesses that were recorded before
    /// remain.
    pub fn switch(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Release);
    }

    /// Returns whether accesses are recorded.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Acquire)
    }

    /// Records that process `pid` (0: unknown) read or wrote a range of the file `ino`. `path` is called only if the
    /// log does not have the file yet. Does nothing while the log is off.
    pub fn add(
        &self,
        ino: u64,
        path: impl FnOnce() -> Vec<u8>,
        pid: u32,
        access: Access,
        range: Range<u64>,
    ) {
        if !self.is_on() || range.is_empty() {
            return;
        }
        let mut shard = self.shard(ino).lock();
        let used = shard.entry(ino).or_insert_with(|| AccessedFile {
            ino,
            path: path(),
            processes: BTreeMap::new(),
        });
        used.processes.entry(pid).or_default().add(access, range);
    }

    /// Removes from the log the files for whose path `is_selected` returns true. Returns them in the order of their
    /// inode numbers.
    pub fn take(&self, is_selected: impl Fn(&[u8]) -> bool) -> Vec<AccessedFile> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            let mut files = shard.lock();
            for (_, used) in files.extract_if(|_, used| is_selected(&used.path)) {
                taken.push(used);
            }
        }
        taken.sort_by_key(|used| used.ino);
        taken
    }

    /// Adds accesses that [`Self::take`] returned to those that were recorded since.
    pub fn put_back(&self, taken: Vec<AccessedFile>) {
        for used in taken {
            let mut shard = self.shard(used.ino).lock();
            let recorded = shard.entry(used.ino).or_insert_with(|| AccessedFile {
                processes: BTreeMap::new(),
                ..used.clone()
            });
            for (pid, accesses) in &used.processes {
                let recorded_accesses = recorded.processes.entry(*pid).or_default();
                recorded_accesses.read.extend(&accesses.read);
                recorded_accesses.written.extend(&accesses.written);
            }
        }
    }

    fn shard(&self, ino: u64) -> &Mutex<HashMap<u64, AccessedFile>> {
        &self.shards[ino as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_and_processes_stay_apart() {
        let log = AccessLog::new();
        let add = |ino, pid, access, range| {
            log.add(ino, || format!("dir/{ino}").into(), pid, access, range)
        };
        add(1, 7, Access::Write, 0..10);
        assert_eq!(log.take(|_| true), [], "it is off");
        log.switch(true);
        for at in [20, 0, 10, 40] {
            add(1, 7, Access::Write, at..at + 10);
        }
        add(1, 8, Access::Read, 5..6);
        add(17, 8, Access::Read, 5..5);
        add(18, 8, Access::Read, 5..6);
        let taken = log.take(|path| path == b"dir/1");
        let [used] = &taken[..] else {
            panic!("{taken:?}")
        };
        assert_eq!((used.ino, used.path.as_slice()), (1, &b"dir/1"[..]));
        assert_eq!(
            used.processes[&7].written.iter().collect::<Vec<_>>(),
            [0..30, 40..50]
        );
        assert!(used.processes[&7].read.is_empty());
        assert_eq!(used.processes[&8].read.len(), 1);
        add(1, 7, Access::Write, 30..40);
        log.put_back(taken);
        let taken = log.take(|_| true);
        assert_eq!(
            taken.iter().map(|used| used.ino).collect::<Vec<_>>(),
            [1, 18]
        );
        assert_eq!(
            taken[0].processes[&7].written.iter().collect::<Vec<_>>(),
            [0..50; 1]
        );
    }
}
