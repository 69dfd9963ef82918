//! Whether a file was closed by its writers, or cut off.
//!
//! Held files are known to be open, closed, or cut: the journal keeps it as long as the file has a file id. A file that
//! was open when firnd died counts as cut, and one whose writer died of a signal. A process that dies closes its
//! descriptors with the same requests as one that calls close(2); the caller of [`Engine::flush`](crate::Engine::flush)
//! tells the two apart. A descriptor that several processes have is as the last of them left it.

use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_format::record::Record;

use crate::file::FileState;
use crate::file_journal::FileJournal;
use crate::tables::Handle;

impl FileJournal {
    /// The file lost all its bytes: whatever was cut off with them is gone.
    pub(crate) fn record_emptied<B: Backing>(&self, state: &mut FileState<B>) {
        state.opens.forget_cut();
        self.update_ending(state);
    }

    /// A handle was released.
    pub(crate) fn record_released<B: Backing>(&self, handle: &Handle<B>, state: &mut FileState<B>) {
        if handle.writable && handle.killed.load(Ordering::Acquire) {
            state.opens.note_cut();
        }
        self.update_ending(state);
    }

    /// Writes down whether the file is open, closed or cut, if that changed. To be called when a handle was opened for
    /// writing.
    pub(crate) fn update_ending<B: Backing>(&self, state: &mut FileState<B>) {
        if !state.opens.update_ending() {
            return;
        }
        let ending = state.opens.ending();
        // A file that has no id yet gets one as an open file.
        if let Some(file) = state.pending.file_id() {
            self.append_note(&Record::Ended {
                file: file.get(),
                ending,
            });
        }
    }
}
