//! Handles of a file: how each handle is served, and how the writers left the file.
//!
//! Terms: a file's *ending* is open, closed, or cut. A *cut* file is incomplete, because a writer was killed or firnd
//! died while a writer had it open.
//!
//! Invariants
//! * Each handle is counted in one mode.
//! * `writers` is at most the number of handles, and `closing_writers` at most `writers`.

use firn_format::record::Ending;
use smallvec::SmallVec;

use crate::{HandleId, OpenMode};

/// The handles part of a file's state. All counts are numbers of handles.
pub(crate) struct Opens {
    handles: SmallVec<[HandleId; 1]>,
    /// Handles whose reads and writes go to the engine.
    through_engine: u32,
    /// Handles for which the kernel reads the backing's file, or the file's memory file (a file in memory with all its
    /// bytes). It reads the same one of the two for all handles of a file.
    passthrough: u32,
    /// Handles for which the kernel caches pages.
    cached: u32,
    /// Handles whose processes map the file's memory file. The kernel does not read the memory file for these handles.
    mapped: u32,
    /// Handles that may write.
    writers: u32,
    /// Handles that may write and of which a descriptor was closed. Counted only on mounts that need the number.
    closing_writers: u32,
    /// The ending that was last derived from the handles.
    ending: Ending,
    /// Whether the file was cut, and not truncated to 0 since.
    is_cut: bool,
}

impl Default for Opens {
    fn default() -> Self {
        Self {
            handles: SmallVec::new(),
            through_engine: 0,
            passthrough: 0,
            cached: 0,
            mapped: 0,
            writers: 0,
            closing_writers: 0,
            ending: Ending::Closed,
            is_cut: false,
        }
    }
}

impl Opens {
    /// Counts a new handle.
    pub(crate) fn add(&mut self, handle_id: HandleId, mode: OpenMode, is_writer: bool) {
        self.handles.push(handle_id);
        *self.count_mut(mode) += 1;
        self.writers += u32::from(is_writer);
        self.check();
    }

    /// Uncounts a released handle. `mode` and `is_writer` are those with which the handle was last counted.
    pub(crate) fn remove(&mut self, handle_id: HandleId, mode: OpenMode, is_writer: bool) {
        self.handles.retain(|known| *known != handle_id);
        *self.count_mut(mode) -= 1;
        self.writers -= u32::from(is_writer);
        self.check();
    }

    /// Counts a handle in another mode.
    pub(crate) fn change_mode(&mut self, from: OpenMode, to: OpenMode) {
        *self.count_mut(from) -= 1;
        *self.count_mut(to) += 1;
        self.check();
    }

    /// Returns the counter of the handles in this mode.
    fn count_mut(&mut self, mode: OpenMode) -> &mut u32 {
        match mode {
            OpenMode::Engine => &mut self.through_engine,
            OpenMode::Passthrough | OpenMode::Memory => &mut self.passthrough,
            OpenMode::Cached { .. } => &mut self.cached,
        }
    }

    /// Returns whether the file has no handle.
    pub(crate) fn is_empty(&self) -> bool {
        self.handles.is_empty()
    }

    /// Returns whether this handle is the only one and is served by the engine.
    pub(crate) fn is_only(&self, handle_id: HandleId) -> bool {
        self.handles[..] == [handle_id] && self.through_engine == 1
    }

    /// Counts a writer of which a descriptor was closed for the first time.
    pub(crate) fn begin_closing(&mut self) {
        self.closing_writers += 1;
        self.check();
    }

    /// Uncounts a closed writer, before its handle is removed.
    pub(crate) fn end_closing(&mut self) {
        self.closing_writers -= 1;
    }

    /// Returns whether each writer has closed a descriptor. Most writers have only one descriptor, so the file is then
    /// most likely complete.
    pub(crate) fn are_writers_closing(&self) -> bool {
        self.closing_writers == self.writers
    }

    /// Counts a handle whose process began to map the file's memory file.
    pub(crate) fn add_mapping(&mut self) {
        self.mapped += 1;
    }

    /// Uncounts a handle that [`Opens::add_mapping`] counted.
    pub(crate) fn remove_mapping(&mut self) {
        self.mapped -= 1;
    }

    /// Returns whether the kernel or a process may read the file's memory file without a request.
    pub(crate) fn has_viewers(&self) -> bool {
        self.passthrough + self.mapped > 0
    }

    /// Returns whether any handle may write.
    pub(crate) fn has_writers(&self) -> bool {
        self.writers > 0
    }

    /// Returns whether the engine serves the reads and writes of any handle.
    pub(crate) fn has_through_engine(&self) -> bool {
        self.through_engine > 0
    }

    /// Returns whether the kernel reads the backing's file or the memory file itself.
    pub(crate) fn has_passthrough(&self) -> bool {
        self.passthrough > 0
    }

    /// Returns whether the kernel caches pages of the file.
    pub(crate) fn has_cached(&self) -> bool {
        self.cached > 0
    }

    /// Returns the ending that was last derived from the handles.
    pub(crate) fn ending(&self) -> Ending {
        self.ending
    }

    /// Makes the state of a cut file.
    pub(crate) fn for_cut_file() -> Self {
        Self {
            ending: Ending::Cut,
            is_cut: true,
            ..Self::default()
        }
    }

    /// Returns whether the file was cut, and not truncated to 0 since.
    pub(crate) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Restores the ending that an earlier firnd recorded. A file that was open is cut, unless a writer's handle was
    /// restored.
    pub(crate) fn restore_ending(&mut self, ending: Ending) {
        self.ending = match ending {
            Ending::Open if self.writers == 0 => Ending::Cut,
            recorded => recorded,
        };
        self.is_cut = self.ending == Ending::Cut;
    }

    /// Forgets that the file was cut, because it was truncated to 0.
    pub(crate) fn clear_cut(&mut self) {
        self.is_cut = false;
    }

    /// Records that a writer was killed by a signal.
    pub(crate) fn record_cut(&mut self) {
        self.is_cut = true;
    }

    /// Derives the ending from the handles. Returns whether it changed.
    pub(crate) fn update_ending(&mut self) -> bool {
        let ending = if self.writers > 0 {
            Ending::Open
        } else if self.is_cut {
            Ending::Cut
        } else {
            Ending::Closed
        };
        let is_changed = self.ending != ending;
        self.ending = ending;
        is_changed
    }

    /// Asserts the invariants of the counts of handles, in debug builds. The mode of a handle says what serves its
    /// reads.
    #[inline]
    fn check(&self) {
        let read_by_kernel = self.passthrough + self.cached;
        let handles_in_modes = u64::from(self.through_engine) + u64::from(read_by_kernel);
        debug_assert_eq!(
            handles_in_modes,
            self.handles.len() as u64,
            "handles and their modes"
        );
        debug_assert!(
            self.writers as usize <= self.handles.len(),
            "more writers than handles"
        );
        debug_assert!(
            self.closing_writers <= self.writers,
            "more close than write"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: HandleId = HandleId(1);
    const TWO: HandleId = HandleId(2);

    #[test]
    fn handles_are_counted_by_mode() {
        let mut opens = Opens::default();
        opens.add(ONE, OpenMode::Engine, true);
        assert!(opens.is_only(ONE));
        opens.add(TWO, OpenMode::Passthrough, false);
        assert!(!opens.is_only(ONE));
        assert!(opens.has_passthrough());
        opens.change_mode(OpenMode::Passthrough, OpenMode::Engine);
        assert!(!opens.has_passthrough());
        opens.remove(ONE, OpenMode::Engine, true);
        assert!(!opens.has_writers());
        opens.remove(TWO, OpenMode::Engine, false);
        assert!(opens.is_empty());
    }

    #[test]
    fn a_file_is_cut_until_it_is_emptied() {
        let mut opens = Opens::default();
        opens.add(ONE, OpenMode::Engine, true);
        assert!(opens.update_ending());
        assert_eq!(opens.ending(), Ending::Open);
        opens.record_cut();
        opens.remove(ONE, OpenMode::Engine, true);
        assert!(opens.update_ending());
        assert_eq!(opens.ending(), Ending::Cut);
        opens.clear_cut();
        assert!(opens.update_ending());
        assert_eq!(opens.ending(), Ending::Closed);
    }

    #[test]
    fn a_file_that_was_open_when_firnd_died_is_cut() {
        let mut opens = Opens::default();
        opens.restore_ending(Ending::Open);
        assert_eq!(opens.ending(), Ending::Cut);
        opens.restore_ending(Ending::Closed);
        assert_eq!(opens.ending(), Ending::Closed);
    }
}
