//! The ending of a file: records how its writers left it (open, closed, or cut short by the death of a writer).
//!
//! The record is in the journal of the arena, and exists as long as the file has a *file id*, which is its number in
//! the journal while data is pending. A file counts as cut if firnd died while it was open, or if its writer was killed
//! by a signal. The descriptors of a killed process are closed by the same requests as with close(2). The caller of
//! [`Engine::flush`](crate::Engine::flush) distinguishes the two cases. If several processes share a descriptor, the
//! last close counts.

use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_format::record::Record;

use crate::file::FileState;
use crate::file_journal::FileJournal;
use crate::tables::Handle;

impl FileJournal {
    /// Records that a file was truncated to 0, so that it does not count as cut any more.
    pub(crate) fn record_emptied<B: Backing>(&self, state: &mut FileState<B>) {
        state.opens.clear_cut();
        self.update_ending(state);
    }

    /// Records that a handle was released. The file is cut if the process of a writer was killed.
    pub(crate) fn record_released<B: Backing>(&self, handle: &Handle<B>, state: &mut FileState<B>) {
        if handle.writable && handle.was_closed_by_kill.load(Ordering::Acquire) {
            state.opens.record_cut();
        }
        self.update_ending(state);
    }

    /// Records in the journal whether the file is open, closed or cut, if that changed. Also called after a handle was
    /// opened for writing. A file without a file id needs no record: the record that begins its id says that it is
    /// open.
    pub(crate) fn update_ending<B: Backing>(&self, state: &mut FileState<B>) {
        if !state.opens.update_ending() {
            return;
        }
        let ending = state.opens.ending();
        // The record that begins a file id says that the file is open.
        if let Some(file) = state.pending.file_id() {
            self.append_note(&Record::Ended {
                file: file.get(),
                ending,
            });
        }
    }
}
