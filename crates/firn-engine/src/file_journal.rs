//! The journal of an arena (the shared memory for written data): the records of file names and drained ranges that
//! recovery reads after a crash. This file also assigns the numbers of file ids and renames in the records.
//!
//! Its lock is a leaf: any other lock may be held when it is taken.

use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::JournalRegion;
use firn_arena::journal::Journal;
use firn_backing::lock::Mutex;
use firn_backing::{Errno, Result};
use firn_format::piece::FILE_MAX;
use firn_format::record::Record;

use crate::file::FileId;

/// The journal of a mount.
pub(crate) struct FileJournal {
    journal: Mutex<Journal<JournalRegion>>,
    last_file_id: AtomicU64,
    last_rename_id: AtomicU64,
}

impl FileJournal {
    /// `epoch` is the number of the engine. It makes numbers of renames unique among engines.
    pub(crate) fn new(journal: Journal<JournalRegion>, epoch: u64) -> Self {
        Self {
            journal: Mutex::new(journal),
            last_file_id: AtomicU64::new(0),
            last_rename_id: AtomicU64::new(epoch << 32),
        }
    }

    /// Sets the highest file id that was used before.
    pub(crate) fn set_last_file_id(&self, last_id: u64) {
        self.last_file_id.store(last_id, Ordering::Relaxed);
    }

    /// Returns a file id that was never used, or `None` if all are used.
    pub(crate) fn new_file_id(&self) -> Option<FileId> {
        let new_id = self.last_file_id.fetch_add(1, Ordering::Relaxed) + 1;
        FileId::new(new_id).filter(|_| new_id <= FILE_MAX)
    }

    pub(crate) fn new_rename_id(&self) -> u64 {
        self.last_rename_id.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns whether no file has pending data, so that no record is needed.
    pub(crate) fn is_empty(&self) -> bool {
        self.journal.lock().ledger().is_empty()
    }

    /// Appends a record. Fails with ENOSPC if the journal is full.
    pub(crate) fn append(&self, record: &Record) -> Result<()> {
        self.journal.lock().append(record).map_err(|_| Errno::NOSPC)
    }

    /// Appends records in order. Fails with ENOSPC if the journal is full; the first records may then be appended.
    pub(crate) fn append_all(&self, records: impl IntoIterator<Item = Record>) -> Result<()> {
        let mut journal = self.journal.lock();
        for record in records {
            journal.append(&record).map_err(|_| Errno::NOSPC)?;
        }
        Ok(())
    }

    /// Appends a record that ends an earlier one. Returns whether the journal had room.
    pub(crate) fn try_append_end(&self, record: &Record) -> bool {
        self.journal.lock().append_end(record).is_ok()
    }

    /// Appends a record that ends an earlier one. The journal reserves room for such records.
    pub(crate) fn append_end(&self, record: &Record) {
        if !self.try_append_end(record) {
            tracing::error!(
                ?record,
                "the arena's journal has no room for a record that ends an earlier one"
            );
        }
    }

    /// Appends a record without which no data is lost. A full journal drops the record.
    pub(crate) fn append_note(&self, record: &Record) {
        if self.append(record).is_err() {
            tracing::debug!(
                ?record,
                "the journal is full; an optional record was dropped"
            );
        }
    }
}
