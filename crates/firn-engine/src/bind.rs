//! Bindings: the journal's knowledge of which file pending pieces belong to.

use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_format::piece::FILE_MAX;
use firn_format::record::{Ending, Identity, Record};

use crate::engine::Engine;
use crate::file::{File, FileState};

impl<B: Backing> Engine<B> {
    /// Binds a file before its first piece; `None` where the journal is full. No rename can change
    /// its paths meanwhile.
    pub(crate) fn bind_with_paths(&self, file: &File<B>) -> Option<u64> {
        self.paths
            .while_staying(|| file.inode.paths(), || self.bind(file, &mut file.lock()))
    }

    pub(crate) fn bind(&self, file: &File<B>, state: &mut FileState<B>) -> Option<u64> {
        if let Some(bound) = state.bound {
            return Some(bound);
        }
        let inode = &file.inode;
        let binding = self.last_binding.fetch_add(1, Ordering::Relaxed) + 1;
        if binding > FILE_MAX {
            return None;
        }
        let identity = Identity {
            dev: inode.key.0,
            ino: inode.key.1,
            btime: inode.btime.map(|t| (t.sec, t.nsec)),
        };
        let record = Record::Bind {
            file: binding,
            identity,
            paths: inode.paths(),
            ending: Ending::Open,
        };
        self.journal.lock().append(&record).ok()?;
        state.bound = Some(binding);
        Some(binding)
    }

    /// Ends the binding of a file of which nothing is pending.
    pub(crate) fn unbind(&self, state: &mut FileState<B>) {
        if let Some(file) = state.bound
            && state.pending == 0
            && state.door.is_none()
            && self
                .journal
                .lock()
                .append_end(&Record::Unbind { file })
                .is_ok()
        {
            state.bound = None;
            state.voids = 0;
        }
    }

    /// Keeps the time of a bound file that does not follow from its pieces.
    pub(crate) fn record_time(&self, state: &FileState<B>) {
        if let (Some(file), Some(mtime)) = (state.bound, state.mtime) {
            self.append_note(&Record::ModifiedAt {
                file,
                time: (mtime.sec, mtime.nsec),
                written: state.written,
            });
        }
    }

    /// Appends a record that ends what was begun; the journal keeps room for it.
    pub(crate) fn append_end_record(&self, record: &Record) {
        if self.journal.lock().append_end(record).is_err() {
            tracing::error!(?record, "the journal has no room left for an end");
        }
    }

    /// Appends a record about a bound file that may be missing without harm to data.
    pub(crate) fn append_note(&self, record: &Record) {
        if self.journal.lock().append(record).is_err() {
            tracing::debug!(?record, "the journal is full; a note was not kept");
        }
    }
}
