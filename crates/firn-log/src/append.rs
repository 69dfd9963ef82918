//! Appends of several threads to one file.
//!
//! Promises
//! * What an append that returned has written follows what was written before it, without a gap: a reader that goes from
//!   the beginning finds it.
//! * No lock is held across a call of the backing. A thread that finds a write under way waits for it; all bytes that
//!   were appended by then are written in one call.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use firn_backing::lock::Mutex;
use firn_backing::{Backing, PageAdvice, Result};
use firn_hosts::own;
use parking_lot::Condvar;

/// A file to which only this process appends.
pub(crate) struct Appender<B: Backing> {
    file: B::File,
    state: Mutex<LogEnd>,
    written: Condvar,
}

#[derive(Default)]
struct LogEnd {
    /// Bytes that count.
    end: u64,
    /// Bytes that are durable.
    synced: u64,
    /// Up to here nothing waits for a sync: what is durable, and notes behind it which say that it is.
    told: u64,
    /// Bytes for the next write, and the state of the last one.
    bytes: Vec<u8>,
    batch: Arc<OnceLock<Result<u64>>>,
    is_writing: bool,
}

impl<B: Backing> Appender<B> {
    /// To an empty file.
    pub(crate) fn new(file: B::File) -> Self {
        Self {
            file,
            state: Mutex::default(),
            written: Condvar::new(),
        }
    }

    /// Appends, and says where. After an error nothing of it counts, and what is appended next takes its place.
    pub(crate) fn append(&self, base: &B, bytes: &[u8]) -> Result<u64> {
        let mut state = self.state.lock();
        let in_batch = state.bytes.len() as u64;
        state.bytes.extend_from_slice(bytes);
        let own_batch = Arc::clone(&state.batch);
        loop {
            if let Some(result) = own_batch.get() {
                return result.map(|start| start + in_batch);
            }
            if state.is_writing {
                state.wait(&self.written);
                continue;
            }
            state.is_writing = true;
            let bytes = std::mem::take(&mut state.bytes);
            let batch = std::mem::take(&mut state.batch);
            let end = state.end;
            let result = state.unlocked(|| own::write_all(base, &self.file, &bytes, end));
            debug_assert_eq!(state.end, end, "one batch is written at a time");
            if result.is_ok() {
                state.end += bytes.len() as u64;
            }
            let _ = batch.set(result.map(|()| end));
            state.is_writing = false;
            self.written.notify_all();
        }
    }

    /// What was appended may begin to go to the device.
    pub(crate) fn begin_sync(&self, base: &B) {
        let unsynced = {
            let state = self.state.lock();
            state.told..state.end
        };
        base.advise(&self.file, unsynced, PageAdvice::WriteOut);
    }

    /// Makes what was appended durable. Returns whether this call made anything durable.
    pub(crate) fn sync(&self, base: &B) -> Result<bool> {
        let end = {
            let state = self.state.lock();
            if state.end <= state.told {
                return Ok(false);
            }
            state.end
        };
        base.sync(&self.file, true)?;
        let mut state = self.state.lock();
        let is_more = end > state.synced;
        state.synced = state.synced.max(end);
        state.told = state.told.max(end);
        debug_assert!(state.synced <= state.told && state.told <= state.end);
        Ok(is_more)
    }

    /// Marks this range as a note that says what is durable. The note itself need not be durable, so it alone causes no
    /// sync.
    pub(crate) fn note_told(&self, range: Range<u64>) {
        let mut state = self.state.lock();
        if state.told == range.start {
            state.told = range.end;
        }
        debug_assert!(state.told <= state.end, "what is told was appended");
    }

    /// Bytes that are durable.
    pub(crate) fn synced(&self) -> u64 {
        self.state.lock().synced
    }
}
