//! File ids: numbers that identify a file in the journal (the arena's record of names and drained ranges) and in the
//! records of written bytes (*pieces*).
//!
//! A file gets an id before its first piece, by a record in the journal with its identity and names. So recovery after
//! a crash finds the file of each piece. The id ends when nothing is pending any more, and is never used again.

use firn_backing::Backing;
use firn_format::record::{Ending, Identity, Record};

use crate::claims::PathClaims;
use crate::file::{File, FileId, FileState};
use crate::file_journal::FileJournal;

impl FileJournal {
    /// Assigns an id to a file before its first piece, and returns the id. Returns `None` if the journal is full.
    /// Prevents renames of the file's paths meanwhile.
    pub(crate) fn allocate_file_id_excluding_renames<B: Backing>(
        &self,
        paths: &PathClaims,
        file: &File<B>,
    ) -> Option<FileId> {
        let allocate = || self.allocate_file_id(file, &mut file.lock());
        paths.with_unchanged_paths(|| file.inode.paths(), allocate)
    }

    /// Assigns an id to a file that has none, and returns the file's id. The id is the file's number in the journal and
    /// in the records of its bytes. Returns `None` if the journal is full or no number is left. The caller prevents
    /// renames of the file's paths meanwhile.
    pub(crate) fn allocate_file_id<B: Backing>(
        &self,
        file: &File<B>,
        state: &mut FileState<B>,
    ) -> Option<FileId> {
        if let Some(existing_id) = state.pending.file_id() {
            return Some(existing_id);
        }
        let inode = &file.inode;
        let id = self.new_file_id()?;
        let identity = Identity {
            dev: inode.key.dev,
            ino: inode.key.ino,
            btime: inode.btime.map(|time| (time.sec, time.nsec)),
        };
        let record = Record::FileIdBegin {
            file: id.get(),
            identity,
            paths: inode.paths(),
            ending: Ending::Open,
        };
        self.append(&record).ok()?;
        state.pending.set_file_id(id);
        Some(id)
    }

    /// Ends the id of a file, if the file has no pending data and no grant (a client's right to write it directly). If
    /// the journal has no room for that record, the id remains.
    pub(crate) fn end_file_id<B: Backing>(&self, state: &mut FileState<B>) {
        if !state.pending.is_empty() || state.direct.has_grant() {
            return;
        }
        let Some(id) = state.pending.file_id() else {
            return;
        };
        let record = Record::FileIdEnd { file: id.get() };
        if self.try_append_end(&record) {
            state.pending.end_file_id();
        }
    }

    /// Records a modification time that a program set, because the piece records do not have it.
    pub(crate) fn record_time<B: Backing>(&self, state: &FileState<B>) {
        if let (Some(file), Some(mtime)) = (state.pending.file_id(), state.pending.mtime()) {
            self.append_note(&Record::ModifiedAt {
                file: file.get(),
                time: (mtime.sec, mtime.nsec),
                written: state.pending.recorded_ns(),
            });
        }
    }
}
