//! Group commit for one file: the appends of several threads are written in batches.
//!
//! One thread writes at a time. During its write, the other threads collect their bytes in the next batch, which one of
//! them then writes with one call.
//!
//! Promises
//! * The bytes of an append that returned follow those appended before, without a gap. A reader that starts at the
//!   beginning finds them.
//! * No lock is held across a call of the backing.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, PageAdvice, Result};
use firn_hosts::own;
use parking_lot::Condvar;

/// A file to which only this process appends.
pub(crate) struct Appender<B: Backing> {
    file: B::File,
    state: Mutex<AppendState>,
    write_ended: Condvar,
}

/// What has been written, and the next batch.
#[derive(Default)]
struct AppendState {
    /// End of the bytes that count.
    end: u64,
    /// Number of bytes that are durable.
    durable_end: u64,
    /// Position from which bytes need a sync. The bytes before it are durable, or are notes of a sync (entries that say
    /// which bytes are durable) directly after the durable ones.
    sync_needed_from: u64,
    /// Bytes of the next batch.
    next_bytes: Vec<u8>,
    /// Result of the next batch, once it is written: the position of its first byte.
    next_result: Arc<OnceLock<Result<u64>>>,
    /// Whether a thread is writing a batch.
    is_writing: bool,
}

impl<B: Backing> Appender<B> {
    /// Makes an appender to an empty file.
    pub(crate) fn new(file: B::File) -> Self {
        Self {
            file,
            state: Mutex::default(),
            write_ended: Condvar::new(),
        }
    }

    /// Appends `bytes` to the file and returns their position. Threads that append at the same time share a write:
    /// their bytes are collected in a batch, and one of the threads writes it for all. The call returns when the batch
    /// is written. After an error its bytes do not count, and the next batch takes their place.
    pub(crate) fn append(&self, backing: &B, bytes: &[u8]) -> Result<u64> {
        let mut state = self.state.lock();
        let offset_in_batch = state.next_bytes.len() as u64;
        state.next_bytes.extend_from_slice(bytes);
        let own_result = Arc::clone(&state.next_result);
        loop {
            if let Some(result) = own_result.get() {
                return result.map(|batch_start| batch_start + offset_in_batch);
            }
            if state.is_writing {
                // Another thread is writing a batch. It may be the one with these bytes.
                state.wait(&self.write_ended);
                continue;
            }
            state.is_writing = true;
            let batch_bytes = std::mem::take(&mut state.next_bytes);
            let batch_result = std::mem::take(&mut state.next_result);
            let batch_start = state.end;
            let written =
                state.unlocked(|| own::write_all(backing, &self.file, &batch_bytes, batch_start));
            debug_assert_eq!(state.end, batch_start, "one batch is written at a time");
            if written.is_ok() {
                state.end += batch_bytes.len() as u64;
            }
            // No other thread sets the result of this batch.
            let _ = batch_result.set(written.map(|()| batch_start));
            state.is_writing = false;
            self.write_ended.notify_all();
        }
    }

    /// Starts writing the appended bytes to the device, without waiting for that.
    pub(crate) fn begin_sync(&self, backing: &B) {
        let unsynced = {
            let state = self.state.lock();
            state.sync_needed_from..state.end
        };
        backing.advise(&self.file, unsynced, PageAdvice::WriteOut);
    }

    /// Makes the appended bytes durable. Returns false if they need no sync, or if another thread's sync made them
    /// durable first.
    pub(crate) fn sync(&self, backing: &B) -> Result<bool> {
        let appended_end = {
            let state = self.state.lock();
            if state.end <= state.sync_needed_from {
                return Ok(false);
            }
            state.end
        };
        // The lock is not held during the sync, so other threads may append.
        let is_data_only = true;
        backing.sync(&self.file, is_data_only)?;
        let mut state = self.state.lock();
        let has_made_durable = appended_end > state.durable_end;
        state.durable_end = state.durable_end.max(appended_end);
        state.sync_needed_from = state.sync_needed_from.max(appended_end);
        debug_assert!(
            state.durable_end <= state.sync_needed_from && state.sync_needed_from <= state.end
        );
        Ok(has_made_durable)
    }

    /// Records that the note of a sync in `range` needs no sync itself. If a crash loses the note, a later reader only
    /// detects less damage.
    pub(crate) fn mark_clean(&self, range: Range<u64>) {
        let mut state = self.state.lock();
        if state.sync_needed_from == range.start {
            state.sync_needed_from = range.end;
        }
        debug_assert!(
            state.sync_needed_from <= state.end,
            "the clean part was appended"
        );
    }

    /// Returns the number of durable bytes.
    pub(crate) fn synced(&self) -> u64 {
        self.state.lock().durable_end
    }
}
