//! How far a pull is, over all its connections.
//!
//! Invariant: `left_bytes` is what is not there yet of all files, by the sizes that are known.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::message::{Entry, EntryKind};
use crate::pull::{Outcome, Progress, PullRequest};

/// See the head of this file.
pub(crate) struct PullState<'a> {
    pub(crate) outcome: Outcome,
    /// Files that are there, by what they were listed as.
    done: BTreeMap<BytePath, DoneFile>,
    left_bytes: u64,
    left_files: u64,
    /// The agent has listed what is wanted.
    pub(crate) was_listed: bool,
    /// When the last byte came.
    pub(crate) moved_at: Instant,
    /// How long none may come.
    patience: Duration,
    /// Bytes that all files may have; none: as many as they do.
    bytes_max: Option<u64>,
    tell: &'a mut dyn FnMut(Progress),
}

struct DoneFile {
    entry: Entry,
    bytes: u64,
    changed: bool,
}

impl<'a> PullState<'a> {
    pub(crate) fn new(request: &PullRequest, tell: &'a mut dyn FnMut(Progress)) -> Self {
        Self {
            outcome: Outcome::default(),
            done: BTreeMap::new(),
            left_bytes: 0,
            left_files: 0,
            was_listed: false,
            moved_at: Instant::now(),
            patience: request.patience,
            bytes_max: request.bytes_max,
            tell,
        }
    }

    /// Whether the pull is given up because no byte came for too long.
    pub(crate) fn is_late(&self) -> bool {
        self.moved_at.elapsed() >= self.patience
    }

    /// Whether there is room for all that is listed.
    pub(crate) fn check_total(&self, entries: &[Entry]) -> Result<(), PullError> {
        let bytes = entries
            .iter()
            .map(Entry::stored_bytes)
            .fold(0, u64::saturating_add);
        match self.bytes_max {
            Some(bytes_max) if bytes > bytes_max => Err(PullError::Outgrown { bytes, bytes_max }),
            _ => Ok(()),
        }
    }

    /// Checks the room for a file whose size differs from the listed one.
    pub(crate) fn check_size(&self, expected: u64, found: u64) -> Result<(), PullError> {
        match self.bytes_max {
            Some(_) if found > expected => Err(PullError::Outgrown {
                bytes: found,
                bytes_max: expected,
            }),
            _ => Ok(()),
        }
    }

    /// Begins to count the files and bytes that are still to come.
    pub(crate) fn begin(&mut self, files: u64, bytes: u64) {
        (self.left_files, self.left_bytes) = (files, bytes);
        self.show();
    }

    /// Whether a file is there that is listed like this.
    pub(crate) fn is_done(&self, entry: &Entry) -> bool {
        self.done
            .get(&entry.path)
            .is_some_and(|done| is_same(&done.entry, entry))
    }

    /// A file has another size than was expected.
    pub(crate) fn know_size(&mut self, expected: u64, found: u64) {
        self.left_bytes = self
            .left_bytes
            .saturating_add(found)
            .saturating_sub(expected);
        self.show();
    }

    /// A block came; `bytes` bytes of it over the network.
    pub(crate) fn received(&mut self, block: u64, bytes: u64) {
        self.outcome.received_bytes += bytes;
        self.block(block);
    }

    /// A block was there already.
    pub(crate) fn reused(&mut self, bytes: u64) {
        self.outcome.reused_bytes += bytes;
        self.block(bytes);
    }

    fn block(&mut self, bytes: u64) {
        self.left_bytes = self.left_bytes.saturating_sub(bytes);
        self.moved_at = Instant::now();
        self.show();
    }

    /// A file must be read again.
    pub(crate) fn undo(&mut self, bytes: u64) {
        self.left_bytes = self.left_bytes.saturating_add(bytes);
        self.show();
    }

    /// A file is there.
    pub(crate) fn done(&mut self, entry: &Entry, bytes: u64, changed: bool) {
        let entry = entry.clone();
        let done = DoneFile {
            entry: entry.clone(),
            bytes,
            changed,
        };
        self.done.insert(entry.path, done);
        self.left_files = self.left_files.saturating_sub(1);
        self.moved_at = Instant::now();
        self.show();
    }

    fn show(&mut self) {
        (self.tell)(Progress {
            left_bytes: self.left_bytes,
            left_files: self.left_files,
        });
    }

    /// What came of it, for the files that a plan has.
    pub(crate) fn into_outcome(mut self, entries: &[Entry]) -> Outcome {
        for entry in entries {
            if let Some(done) = self.done.remove(&entry.path) {
                self.outcome.files += 1;
                self.outcome.bytes += done.bytes;
                if done.changed {
                    self.outcome.changed.push(entry.path.clone());
                }
            }
        }
        self.outcome
    }
}

/// Whether nothing tells that a file is another one, or has other bytes, than before.
fn is_same(before: &Entry, now: &Entry) -> bool {
    let bytes = |entry: &Entry| match entry.kind {
        EntryKind::File { bytes, .. } => Some(bytes),
        _ => None,
    };
    (bytes(before), before.mtime_s, before.mtime_ns, before.mode)
        == (bytes(now), now.mtime_s, now.mtime_ns, now.mode)
}
