//! Counts of files on each lane, for the directories that get new files, as far as this host knows.
//!
//! Numbers in names balance the lanes over all hosts without a message, unless they do not tell files apart: a sum that
//! is the same for all names, steps of a thousand on four lanes, or no number at all. The names alone do not show that,
//! so each directory has its files counted.
//!
//! Invariants
//! * Only what differs between the lanes counts: `files` is 0 for one of them and [`AHEAD_MAX`] at most when a
//!   directory is found. So a new lane does not get all files of the next checkpoint.
//! * There are at most [`DIRS_MAX`] directories; the one that was looked at first goes first.

use std::collections::{HashMap, VecDeque};

const DIRS_MAX: usize = 1 << 12;
/// Files of a directory, found when it is looked at, by which a lane is ahead of the emptiest one.
const AHEAD_MAX: u64 = 8;
/// A lane may get this many files of a directory whatever the others have: the ranks of one host may be all of one
/// lane, and those of other hosts of the others.
const FEW_FILES: u64 = 4;

/// The directories, by their inode number.
#[derive(Debug, Default)]
pub(super) struct Dirs {
    /// Files on each lane.
    dirs: HashMap<u64, Vec<u64>>,
    /// Each directory once.
    oldest_first: VecDeque<u64>,
}

impl Dirs {
    pub(super) fn contains(&self, dir: u64) -> bool {
        self.dirs.contains_key(&dir)
    }

    /// Adds a directory with this many files on each lane. A known directory stays as it is.
    pub(super) fn add(&mut self, dir: u64, mut files: Vec<u64>) {
        if self.contains(dir) {
            return;
        }
        while self.dirs.len() >= DIRS_MAX {
            let oldest = self.oldest_first.front().copied();
            self.forget(oldest.expect("each directory is in the queue"));
        }
        let fewest = files.iter().copied().min().unwrap_or(0);
        for count in &mut files {
            *count = (*count - fewest).min(AHEAD_MAX);
        }
        self.dirs.insert(dir, files);
        self.oldest_first.push_back(dir);
    }

    /// Another directory may have its inode number now.
    pub(super) fn forget(&mut self, dir: u64) {
        if self.dirs.remove(&dir).is_some() {
            self.oldest_first.retain(|known| *known != dir);
        }
    }

    /// Whether one more file on this lane is far more than its share.
    pub(super) fn is_crowded(&self, dir: u64, lane: usize) -> bool {
        let Some(files) = self.dirs.get(&dir) else {
            return false;
        };
        let all = files.iter().sum::<u64>() + 1;
        // Half as much again as its share, and one.
        let most = (3 * all).div_ceil(2 * files.len() as u64) + 1;
        files[lane] + 1 > most.max(FEW_FILES)
    }

    /// The lane with the fewest files of a directory; of several, the first one from `start` on.
    pub(super) fn emptiest(&self, dir: u64, start: usize) -> usize {
        let Some(files) = self.dirs.get(&dir) else {
            return start;
        };
        let lanes = (0..files.len()).map(|step| (start + step) % files.len());
        lanes.min_by_key(|lane| files[*lane]).unwrap_or(start)
    }

    #[cfg(test)]
    pub(super) fn is_bounded(&self) -> bool {
        self.dirs.len() <= DIRS_MAX && self.oldest_first.len() == self.dirs.len()
    }

    pub(super) fn count_file(&mut self, dir: u64, lane: usize) {
        if let Some(files) = self.dirs.get_mut(&dir) {
            files[lane] += 1;
        }
    }
}
