//! Counts how many files of each directory are on each lane (a directory or server for data), as far as this host
//! knows. With the counts, the rule balances the lanes if the numbers in names do not.
//!
//! Numbers in names balance the lanes over all hosts without messages, if the numbers distinguish the files. They fail
//! in three cases: all names have the same sum, the numbers grow by a multiple of the number of lanes, or there is no
//! number. The names alone do not reveal these cases.
//!
//! Invariants
//! * Only differences between the lanes matter. When a directory is added, the lane with the fewest files has count 0,
//!   and the others have at most [`AHEAD_MAX`]. A new lane therefore does not get all files of the next checkpoint.
//! * There are at most [`DIRS_MAX`] directories. The one that was added first is removed first.

use std::collections::{HashMap, VecDeque};

/// Maximum number of directories whose files are counted.
const DIRS_MAX: usize = 1 << 12;
/// Maximum count of a lane when a directory is added: the number of files by which the lane is ahead of the emptiest
/// lane.
const AHEAD_MAX: u64 = 8;
/// Number of files of a directory that any lane may get, whatever the counts of the other lanes are. All ranks of this
/// host may belong to one lane, while the ranks of other hosts belong to the other lanes.
const FEW_FILES: u64 = 4;

/// The directories, by their inode number.
#[derive(Debug, Default)]
pub(super) struct Dirs {
    /// Number of files on each lane, by directory.
    dirs: HashMap<u64, Vec<u64>>,
    /// The directories in the order in which they were added, each once.
    oldest_first: VecDeque<u64>,
}

impl Dirs {
    pub(super) fn contains(&self, dir: u64) -> bool {
        self.dirs.contains_key(&dir)
    }

    /// Adds a directory with its number of files on each lane. If the directory is already known, nothing changes.
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

    /// Forgets a directory, because another directory may have its inode number now.
    pub(super) fn forget(&mut self, dir: u64) {
        if self.dirs.remove(&dir).is_some() {
            self.oldest_first.retain(|older| *older != dir);
        }
    }

    /// Returns whether one more file would give this lane far more than its share.
    pub(super) fn is_crowded(&self, dir: u64, lane: usize) -> bool {
        let Some(files) = self.dirs.get(&dir) else {
            return false;
        };
        let total = files.iter().sum::<u64>() + 1;
        // The limit is one and a half times the fair share, plus one.
        let files_max = (3 * total).div_ceil(2 * files.len() as u64) + 1;
        files[lane] + 1 > files_max.max(FEW_FILES)
    }

    /// Returns the lane with the fewest files of a directory. If several lanes have equally few, the first one from
    /// `start` on is returned.
    pub(super) fn emptiest(&self, dir: u64, start: usize) -> usize {
        let Some(files) = self.dirs.get(&dir) else {
            return start;
        };
        (0..files.len())
            .map(|step| (start + step) % files.len())
            .min_by_key(|lane| files[*lane])
            .unwrap_or(start)
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
