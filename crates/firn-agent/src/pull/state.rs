//! Progress of a *pull*, which copies a tree from another host, across all of its connections: finished files,
//! remaining bytes, and the time of the last progress.
//!
//! The *agent* is the process on the other host that serves the tree. The copy is built in a *staging directory*.
//!
//! A pull that reconnects lists the source again. Finished files are not fetched again if they are still listed alike.
//!
//! Invariant: `remaining_bytes` is the number of bytes that are still to be received. It includes the listed size of a
//! file until the file is opened, and from then on the size that the agent holds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use firn_protocol::path::BytePath;

use crate::error::PullError;
use crate::message::{Entry, EntryKind};
use crate::pull::{Outcome, Progress, PullRequest};

/// State of a pull that outlives a connection; see the head of this file.
pub(crate) struct PullState<'a> {
    pub(crate) outcome: Outcome,
    /// Files that are complete in the staging directory, by their path in the list.
    complete_files: BTreeMap<BytePath, CompleteFile>,
    remaining_bytes: u64,
    remaining_files: u64,
    /// Whether the agent has answered the list of this pull at least once.
    pub(crate) was_listed: bool,
    /// When the last block or file became complete; before that, when the pull began.
    pub(crate) last_progress_at: Instant,
    /// Maximum time without progress, after which the pull fails.
    stall_timeout: Duration,
    /// Maximum size of all files together, in memory; `None` means no limit.
    bytes_max: Option<u64>,
    /// Called after each change of the remaining bytes or files.
    report_progress: &'a mut dyn FnMut(Progress),
}

/// A file that is complete in the staging directory.
struct CompleteFile {
    /// The entry of the file in the list from which it was pulled.
    entry: Entry,
    bytes: u64,
    /// Whether the file was changed while it was pulled.
    has_changed: bool,
}

impl<'a> PullState<'a> {
    pub(crate) fn new(request: &PullRequest, report_progress: &'a mut dyn FnMut(Progress)) -> Self {
        Self {
            outcome: Outcome::default(),
            complete_files: BTreeMap::new(),
            remaining_bytes: 0,
            remaining_files: 0,
            was_listed: false,
            last_progress_at: Instant::now(),
            stall_timeout: request.patience,
            bytes_max: request.bytes_max,
            report_progress,
        }
    }

    /// Whether the pull has made no progress for its timeout.
    pub(crate) fn is_stalled(&self) -> bool {
        self.last_progress_at.elapsed() >= self.stall_timeout
    }

    /// Fails if the listed files occupy more memory than the pull may use.
    pub(crate) fn check_total(&self, entries: &[Entry]) -> Result<(), PullError> {
        let stored_bytes = entries.iter().map(Entry::stored_bytes);
        let bytes = stored_bytes.fold(0, u64::saturating_add);
        if let Some(bytes_max) = self.bytes_max
            && bytes > bytes_max
        {
            return Err(PullError::Outgrown { bytes, bytes_max });
        }
        Ok(())
    }

    /// Fails if a pull with limited memory opens a file that is larger than it was listed.
    pub(crate) fn check_size(&self, listed_bytes: u64, bytes: u64) -> Result<(), PullError> {
        if self.bytes_max.is_some() && bytes > listed_bytes {
            return Err(PullError::Outgrown {
                bytes,
                bytes_max: listed_bytes,
            });
        }
        Ok(())
    }

    /// Sets the numbers of remaining files and bytes, at the beginning of a connection.
    pub(crate) fn set_remaining(&mut self, files: u64, bytes: u64) {
        self.remaining_files = files;
        self.remaining_bytes = bytes;
        self.show_progress();
    }

    /// Whether the file of `entry` is complete, and the entry is like the one from which it was pulled.
    pub(crate) fn is_complete(&self, entry: &Entry) -> bool {
        match self.complete_files.get(&entry.path) {
            Some(complete) => is_listed_alike(&complete.entry, entry),
            None => false,
        }
    }

    /// Counts a file with its actual size instead of the listed one.
    pub(crate) fn correct_size(&mut self, listed_bytes: u64, bytes: u64) {
        let with_file = self.remaining_bytes.saturating_add(bytes);
        self.remaining_bytes = with_file.saturating_sub(listed_bytes);
        self.show_progress();
    }

    /// Counts a block that was received. `network_bytes` of its `block_bytes` came over the network; the others are
    /// zeros.
    pub(crate) fn count_received(&mut self, block_bytes: u64, network_bytes: u64) {
        self.outcome.received_bytes += network_bytes;
        self.count_block(block_bytes);
    }

    /// Counts a block that an earlier pull wrote and that is equal to the source.
    pub(crate) fn count_reused(&mut self, bytes: u64) {
        self.outcome.reused_bytes += bytes;
        self.count_block(bytes);
    }

    fn count_block(&mut self, bytes: u64) {
        self.remaining_bytes = self.remaining_bytes.saturating_sub(bytes);
        self.last_progress_at = Instant::now();
        self.show_progress();
    }

    /// Adds the bytes of a file to the remaining bytes, because the file must be read again.
    pub(crate) fn uncount_file(&mut self, bytes: u64) {
        self.remaining_bytes = self.remaining_bytes.saturating_add(bytes);
        self.show_progress();
    }

    /// Records a file that is complete.
    pub(crate) fn record_complete(&mut self, entry: &Entry, bytes: u64, has_changed: bool) {
        let complete = CompleteFile {
            entry: entry.clone(),
            bytes,
            has_changed,
        };
        self.complete_files.insert(entry.path.clone(), complete);
        self.remaining_files = self.remaining_files.saturating_sub(1);
        self.last_progress_at = Instant::now();
        self.show_progress();
    }

    fn show_progress(&mut self) {
        (self.report_progress)(Progress {
            left_bytes: self.remaining_bytes,
            left_files: self.remaining_files,
        });
    }

    /// Returns the outcome. Only the files in `entries`, the last list, are included.
    pub(crate) fn into_outcome(mut self, entries: &[Entry]) -> Outcome {
        for entry in entries {
            let Some(complete) = self.complete_files.remove(&entry.path) else {
                continue;
            };
            self.outcome.files += 1;
            self.outcome.bytes += complete.bytes;
            if complete.has_changed {
                self.outcome.changed.push(entry.path.clone());
            }
        }
        self.outcome
    }
}

/// Whether two entries of one path have the same size, modification time and mode. If not, the file is pulled again.
fn is_listed_alike(earlier: &Entry, current: &Entry) -> bool {
    let file_bytes = |entry: &Entry| match entry.kind {
        EntryKind::File { bytes, .. } => Some(bytes),
        _ => None,
    };
    file_bytes(earlier) == file_bytes(current)
        && earlier.mtime_s == current.mtime_s
        && earlier.mtime_ns == current.mtime_ns
        && earlier.mode == current.mode
}
