//! Reads of files: combines bytes of the *arena*, the shared memory for written data, with bytes of the *backing*, the
//! directory that the mount serves.
//!
//! Pending bytes (not in the backing yet) take precedence over cached bytes (drained to the backing, but still in the
//! arena), and cached bytes over bytes of the backing.
//!
//! Promise: a read returns the file as it was at one moment.
//!
//! Bytes of the backing are read without the file's lock. If the file was changed meanwhile, in the arena and in the
//! backing, the read is repeated. After [`READ_ATTEMPTS_MAX`] attempts, the read excludes changes.

use std::ops::Range;
use std::sync::Arc;

use firn_backing::Backing;

use crate::Result;
use crate::base::Base;
use crate::drain::Drain;
use crate::extents::Extents;
use crate::file::{BackingFile, File, FileState};
use crate::intake::Intake;
use crate::open_files::OpenFiles;

/// Maximum number of attempts of a read while the file is being changed. The next one excludes truncations and drains.
const READ_ATTEMPTS_MAX: usize = 10;

/// Result of one attempt of a read.
#[derive(Default)]
struct ReadAttempt {
    /// Number of bytes that were read.
    bytes: u64,
    /// The counters of changes before bytes of the backing were read; `None` if all bytes came from the arena.
    counters_before: Option<ChangeCounters>,
    /// Whether the backing's file ended before pending bytes of a higher offset, so that the attempt filled the gap
    /// with zeros.
    has_zero_filled_gap: bool,
}

/// Counters of a file's changes.
#[derive(Clone, Copy)]
struct ChangeCounters {
    /// Changes of bytes or length through the mount ([`FileState::changes`](crate::file::FileState)).
    changes: u64,
    /// Changes of the backing's file
    /// ([`DrainState::backing_changes`](crate::file::DrainState::backing_changes)).
    backing_changes: u32,
}

/// Reads files.
pub(crate) struct Reads<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
}

impl<B: Backing> Reads<B> {
    pub(crate) fn new(intake: &Arc<Intake<B>>, open_files: &Arc<OpenFiles<B>>) -> Self {
        Self {
            base: Arc::clone(&intake.base),
            drain: Arc::clone(&intake.drain),
            intake: Arc::clone(intake),
            open_files: Arc::clone(open_files),
        }
    }

    /// Reads bytes from the arena and the backing into `buf` from `offset` on, as the file was at one moment. Returns
    /// the number of bytes, which is less than the length of `buf` only at the end of the file.
    pub(crate) fn read_at_one_moment(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<u64> {
        for _ in 0..READ_ATTEMPTS_MAX {
            let attempt = self.read_once(file, offset, buf)?;
            if self.is_consistent(file, &attempt) {
                return Ok(attempt.bytes);
            }
        }
        // Programs change the file faster than it can be read, so this read excludes truncations and drains.
        let mut state = file.acquire_exclusive_use();
        let result = state.unlocked(|| self.read_exclusively(file, offset, buf));
        file.release_exclusive_use(&mut state);
        // A drain may have been refused during the exclusive use.
        self.drain.enqueue(file, &mut state);
        result
    }

    /// Reads a file while the caller has its exclusive use, so that no drain or truncation changes the backing's
    /// file.
    pub(crate) fn read_exclusively(
        &self,
        file: &Arc<File<B>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<u64> {
        self.read_once(file, offset, buf)
            .map(|attempt| attempt.bytes)
    }

    /// Returns whether one attempt of a read returned the file as it was at one moment. If the attempt may have read in
    /// the middle of a truncation, waits for its end and returns false.
    ///
    /// An attempt reads the backing after the pending bytes, which only the arena has. If the file was truncated,
    /// written again and partly drained in between, the attempt has seen holes of the backing that the file never had.
    fn is_consistent(&self, file: &Arc<File<B>>, attempt: &ReadAttempt) -> bool {
        let Some(before) = attempt.counters_before else {
            return true;
        };
        let mut state = file.lock();
        // A client process may have stored bytes in the arena without a request.
        self.intake.ingest_published(file, &mut state);
        if state.drain.is_exclusive() && attempt.has_zero_filled_gap {
            // A truncation may have caused the gap. The lock is taken again only to wait for the end of its exclusive
            // use.
            drop(state);
            drop(file.lock_without_exclusive_use());
            return false;
        }
        // Bytes of two moments are mixed only if both the arena and the backing were changed meanwhile.
        state.changes == before.changes || state.drain.backing_changes() == before.backing_changes
    }

    /// Makes one attempt of a read: reads the bytes in the arena (shared memory) under the file's lock, and the gaps
    /// from the backing without it. The caller checks the counters in the result for changes meanwhile.
    fn read_once(&self, file: &Arc<File<B>>, offset: u64, buf: &mut [u8]) -> Result<ReadAttempt> {
        let end = offset.saturating_add(buf.len() as u64).min(i64::MAX as u64);
        let mut attempt = ReadAttempt::default();
        if offset >= end {
            return Ok(attempt);
        }
        let mut state = file.lock();
        // A client with a grant could write the file without a request.
        self.intake.revoke_grant(file, &mut state);
        let counters_before = ChangeCounters {
            changes: state.changes,
            backing_changes: state.drain.backing_changes(),
        };
        // Up to this offset the file has bytes for certain. Its length in the backing may be smaller.
        let mut known_end = state.pending.end().min(end);
        let gaps = self.read_arena(&state, offset..end, buf)?;
        let has_last_byte = gaps.last().is_none_or(|gap| gap.end < end);
        if has_last_byte {
            known_end = end;
        }
        let reader = state.open_reader();
        // The lock is released, because the next steps call the backing.
        drop(state);
        if !gaps.is_empty() {
            attempt.counters_before = Some(counters_before);
            let reader = match reader {
                Some(reader) => reader,
                None => self.open_files.reader(file)?,
            };
            for gap in gaps {
                let out = &mut buf[(gap.start - offset) as usize..(gap.end - offset) as usize];
                let read_end = gap.start + self.read_gap(&reader, out, gap.start)?;
                // The backing's file may end inside the gap although the file goes on. Zeros then fill the rest.
                let is_zero_filled = read_end < gap.end.min(known_end);
                attempt.has_zero_filled_gap |= is_zero_filled;
                known_end = known_end.max(read_end);
            }
        }
        attempt.bytes = known_end.max(offset).min(end) - offset;
        Ok(attempt)
    }

    /// Reads the bytes of `range` that are in the arena into `buf`, which begins at the start of the range: the pending
    /// ones (not in the backing yet), then the cached ones (also in the backing). Returns the gaps, which must be read
    /// from the backing.
    fn read_arena(
        &self,
        state: &FileState<B>,
        range: Range<u64>,
        buf: &mut [u8],
    ) -> Result<Vec<Range<u64>>> {
        let offset = range.start;
        let gaps = self.read_extents(state.pending.extents(), vec![range], offset, buf)?;
        if state.cache.is_empty() {
            return Ok(gaps);
        }
        match self.read_extents(state.cache.extents(), gaps.clone(), offset, buf) {
            Ok(gaps_beside_cache) => Ok(gaps_beside_cache),
            // Cached bytes that cannot be read from the spill file are read from the backing.
            Err(_) => Ok(gaps),
        }
    }

    /// Reads bytes of the backing, and fills the rest of `out` with zeros if the backing's file ends earlier. Returns
    /// the number of bytes that were read.
    fn read_gap(&self, reader: &BackingFile<B>, out: &mut [u8], offset: u64) -> Result<u64> {
        let read_bytes = self.base.backing.read_at(&reader.file, out, offset)?;
        out[read_bytes..].fill(0);
        Ok(read_bytes as u64)
    }

    /// Reads those parts of `gaps` (ranges not read yet) that are in `extents` (ranges with the place of their bytes in
    /// the arena). `buf` begins at file offset `offset`. Returns the gaps that remain.
    fn read_extents(
        &self,
        extents: &Extents,
        gaps: Vec<Range<u64>>,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<Vec<Range<u64>>> {
        let mut remaining_gaps = Vec::new();
        for gap in gaps {
            let mut read_end = gap.start;
            for (start, extent) in extents.within(gap.clone()) {
                if start > read_end {
                    remaining_gaps.push(read_end..start);
                }
                let out = &mut buf[(start - offset) as usize..][..extent.len as usize];
                self.base
                    .arena
                    .copy_out(extent.piece.slab, extent.position, out)?;
                read_end = start + extent.len;
            }
            if read_end < gap.end {
                remaining_gaps.push(read_end..gap.end);
            }
        }
        Ok(remaining_gaps)
    }
}
