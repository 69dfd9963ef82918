//! Whether a file was closed by its writers, or cut off.
//!
//! Held files are known to be open, closed, or cut: the journal keeps it as long as the file is bound. A
//! file that was open when firnd died counts as cut, and one whose writer died of a signal. A process that
//! dies closes its descriptors with the same requests as one that calls close(2); whoever calls
//! [`Engine::flush`] tells the two apart. A descriptor that several processes have is as the last of them
//! left it.

use std::sync::atomic::Ordering;

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
        state.cut |= handle.writable && handle.killed.load(Ordering::Acquire);
        if handle.writable && state.writers == 0 {
            let ending = if state.cut {
                Ending::Cut
            } else {
                Ending::Closed
            };
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
            self.append_note(&Record::Ended { file, ending });
        }
    }
}
