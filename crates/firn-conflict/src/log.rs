//! What processes of this node read and write while a transaction is open.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::ranges::Ranges;

/// Files are spread over so many tables, so that threads seldom meet.
const SHARDS: usize = 16;

/// How bytes are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// They were read, or there were none to read.
    Read,
    /// They were written, cut off or cleared.
    Write,
}

/// What one process did with one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Accesses {
    /// Bytes that it read.
    pub read: Ranges,
    /// Bytes that it wrote.
    pub written: Ranges,
}

impl Accesses {
    fn add(&mut self, access: Access, range: Range<u64>) {
        match access {
            Access::Read => self.read.insert(range),
            Access::Write => self.written.insert(range),
        }
    }
}

/// By process.
type Processes = BTreeMap<u32, Accesses>;

/// Ranges by file and process. Files go by any number that stays theirs.
#[derive(Debug, Default)]
pub struct Log {
    on: AtomicBool,
    shards: [Mutex<HashMap<u64, Processes>>; SHARDS],
}

impl Log {
    /// A log that takes nothing down yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on accesses are taken down, or not.
    pub fn switch(&self, on: bool) {
        self.on.store(on, Ordering::Release);
    }

    /// Whether accesses are taken down.
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Acquire)
    }

    /// Takes an access of process `pid` down; 0: nobody knows which.
    pub fn add(&self, file: u64, pid: u32, access: Access, range: Range<u64>) {
        if self.is_on() && !range.is_empty() {
            self.shard(file).lock().entry(file).or_default().entry(pid).or_default().add(access, range);
        }
    }

    /// What is known of a file.
    pub fn of(&self, file: u64) -> BTreeMap<u32, Accesses> {
        self.shard(file).lock().get(&file).cloned().unwrap_or_default()
    }

    /// Files of which something is known.
    pub fn files(&self) -> Vec<u64> {
        self.shards.iter().flat_map(|shard| shard.lock().keys().copied().collect::<Vec<_>>()).collect()
    }

    /// What was taken down of a file is over.
    pub fn forget(&self, file: u64) {
        self.shard(file).lock().remove(&file);
    }

    fn shard(&self, file: u64) -> &Mutex<HashMap<u64, Processes>> {
        &self.shards[file as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_and_processes_stay_apart() {
        let log = Log::new();
        log.add(1, 7, Access::Write, 0..10);
        assert!(log.files().is_empty(), "it is off");
        log.switch(true);
        for at in [20, 0, 10, 40] {
            log.add(1, 7, Access::Write, at..at + 10);
        }
        log.add(1, 8, Access::Read, 5..6);
        log.add(17, 8, Access::Read, 5..5);
        let found = log.of(1);
        assert_eq!(found[&7].written.iter().collect::<Vec<_>>(), [0..30, 40..50]);
        assert!(found[&7].read.is_empty());
        assert_eq!(found[&8].read.iter().collect::<Vec<_>>(), std::slice::from_ref(&(5..6)));
        assert_eq!(log.files(), [1]);
        log.forget(1);
        assert!(log.of(1).is_empty());
    }
}
