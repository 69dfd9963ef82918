//! Whether a file was closed by its writers, or cut off.
//!
//! Held files are known to be open, closed, or cut: the journal keeps it as long as the file is bound. A
//! file that was open when firnd died counts as cut. A writer that is killed alone closes its files as far
//! as anyone can see: the kernel sends the same requests, and asking /proc about the process in their
//! midst can wait for a lock that the process holds.

use firn_backing::Backing;
use firn_format::record::{Ending, Record};

use crate::engine::{Engine, Handle};
use crate::file::FileState;

impl<B: Backing> Engine<B> {
    /// A handle that may write was opened; `anew`: the file was made or emptied by that.
    pub(crate) fn writer_opened(&self, state: &mut FileState<B>, anew: bool) {
        if anew {
            state.cut = false;
        }
        self.set_ending(state, Ending::Open);
    }

    /// A handle was released.
    pub(crate) fn writer_closed(&self, handle: &Handle<B>, state: &mut FileState<B>) {
        if handle.writable && state.writers == 0 {
            let ending = if state.cut { Ending::Cut } else { Ending::Closed };
            self.set_ending(state, ending);
        }
    }

    fn set_ending(&self, state: &mut FileState<B>, ending: Ending) {
        if state.ending == ending {
            return;
        }
        state.ending = ending;
        // A file that is not bound yet is bound as an open one.
        if let Some(file) = state.bound {
            self.note(&Record::Ended { file, ending });
        }
    }
}
