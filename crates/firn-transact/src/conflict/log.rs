//! What processes of this host read and write while a transaction is open.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::ranges::Ranges;

/// Number of tables over which the files are spread, so that threads seldom meet.
const SHARDS: usize = 16;

/// How bytes are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Access {
    /// They were read, or there were none to read.
    Read,
    /// The bytes were written, cut off or cleared.
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

/// A file that processes used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Its inode in the backing.
    pub ino: u64,
    /// A path of the file at its first use, relative to the backing.
    pub path: Vec<u8>,
    /// Accesses by process id; 0: unknown process.
    pub processes: BTreeMap<u32, Accesses>,
}

/// Ranges by file and process. Files go by their inode.
#[derive(Debug, Default)]
pub struct Log {
    on: AtomicBool,
    shards: [Mutex<HashMap<u64, Used>>; SHARDS],
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

    /// Records an access of process `pid` (0: unknown) to the file `ino`. `path` is called only for a file that is
    /// new to this log.
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
        let new = || Used {
            ino,
            path: path(),
            processes: BTreeMap::new(),
        };
        let used = shard.entry(ino).or_insert_with(new);
        used.processes.entry(pid).or_default().add(access, range);
    }

    /// Takes out what was taken down of the files whose path `is_meant`, in the order of their inodes.
    pub fn take(&self, is_meant: impl Fn(&[u8]) -> bool) -> Vec<Used> {
        let mut taken = Vec::new();
        for shard in &self.shards {
            taken.extend(
                shard
                    .lock()
                    .extract_if(|_, used| is_meant(&used.path))
                    .map(|(_, used)| used),
            );
        }
        taken.sort_by_key(|used| used.ino);
        taken
    }

    /// Puts back what was taken out, to what came since.
    pub fn put_back(&self, taken: Vec<Used>) {
        for used in taken {
            let mut shard = self.shard(used.ino).lock();
            let known = shard.entry(used.ino).or_insert_with(|| Used {
                processes: BTreeMap::new(),
                ..used.clone()
            });
            for (pid, accesses) in &used.processes {
                let known = known.processes.entry(*pid).or_default();
                known.read.extend(&accesses.read);
                known.written.extend(&accesses.written);
            }
        }
    }

    fn shard(&self, file: u64) -> &Mutex<HashMap<u64, Used>> {
        &self.shards[file as usize % SHARDS]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_and_processes_stay_apart() {
        let log = Log::new();
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
