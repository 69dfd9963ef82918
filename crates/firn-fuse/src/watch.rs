//! The *watch*: an observer that learns of changes of names and files, and passes them to the commit rules.
//!
//! A *commit rule* says which changes are one checkpoint, and which change completes it. A rule begins a *transaction*
//! (all of its changes appear at once) before a change, and ends it after a change. The watch belongs to the [`Gate`],
//! which makes changes wait for transactions; only a mount with rules has one. On any other mount, the cost of a change
//! is one test whether there is a watch.
//!
//! Promises of an implementation
//! * [`ChangeWatch::concerns`] does not call the backing (the directory that the mount serves), so it is quick.
//! * The other methods may take as long as a commit. They are called on workers, without a [`Pass`](crate::Pass).

use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::{Caller, Errno};
use firn_engine::{Closing, HandleId, InodeId};

use crate::gate::Gate;

/// A change that a program is about to make.
#[derive(Clone, Debug)]
pub enum WatchedChange {
    /// A program opens a file for writing.
    Open(InodeId),
    /// A program creates and opens a file: the directory, and the name in it.
    Create(InodeId, OsString),
    /// A program makes another object or a hard link: the directory, and the name in it.
    Make(InodeId, OsString),
    /// A program changes the length of a file, by truncate(2) or the like.
    Cut(InodeId),
    /// A program removes a name: the directory, and the name in it.
    Remove(InodeId, OsString),
    /// A program renames: the old directory and name, and the new ones.
    Rename((InodeId, OsString), (InodeId, OsString)),
}

/// Proof that a watch has admitted a change. Returned to the watch with [`ChangeWatch::end_change`].
#[derive(Debug)]
pub struct WatchTicket {
    /// The watch's number of the change.
    pub number: u64,
}

/// Watches changes for the commit rules.
pub trait ChangeWatch: Send + Sync {
    /// Whether the rules concern a change. Only such changes are reported to the other methods.
    fn concerns(&self, change: &WatchedChange) -> bool;

    /// Returns the key of the checkpoint that a path belongs to; `None` if no pattern of the rules matches.
    fn checkpoint_key(&self, path: &[u8]) -> Option<Vec<u8>>;

    /// Reports a change before it is made. An error refuses the change.
    fn begin_change(&self, caller: Caller, change: &WatchedChange) -> Result<WatchTicket, Errno>;

    /// Reports the end of a change. `handle`: the handle, if the change opened a file for writing.
    fn end_change(&self, ticket: WatchTicket, is_made: bool, handle: Option<HandleId>);

    /// Whether the contents of `inode` are of an incomplete checkpoint with no writer any more. They are about to be
    /// dropped: the file gets its earlier contents back, or disappears.
    fn must_drop_contents(&self, inode: InodeId) -> bool;

    /// Waits until such contents of `inode` are dropped. Called before an open, so that a restarted program does not
    /// find contents that then disappear.
    fn settle(&self, inode: InodeId);

    /// Whether a handle was reported with [`ChangeWatch::end_change`] and is not released yet.
    fn knows(&self, handle: HandleId) -> bool;

    /// Reports that a process closes such a handle, or ends and thereby closes it.
    fn close(&self, caller: Caller, handle: HandleId, by: Closing) -> Result<(), Errno>;

    /// Reports that the kernel has released such a handle.
    fn release(&self, handle: HandleId);
}

/// A change that the rules concern, and the watch to report it to.
pub(crate) struct ChangeToReport {
    watch: Arc<dyn ChangeWatch>,
    change: WatchedChange,
}

/// Returns the change with the watch, if the mount has a watch and the rules concern the change.
pub(crate) fn change_to_report(
    gate: Option<&dyn Gate>,
    change: impl FnOnce() -> WatchedChange,
) -> Option<ChangeToReport> {
    let watch = gate?.watch()?;
    let change = change();
    watch
        .concerns(&change)
        .then_some(ChangeToReport { watch, change })
}

/// Makes one change. If it is to be reported, its begin and end are reported to the watch.
pub(crate) struct ChangeReporter {
    to_report: Option<ChangeToReport>,
    caller: Caller,
}

impl ChangeReporter {
    pub(crate) fn new(to_report: Option<ChangeToReport>, caller: Caller) -> Self {
        Self { to_report, caller }
    }

    /// Makes a change that opens no file. An error of the watch refuses it.
    pub(crate) fn make_change<T>(
        self,
        make: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        self.make_open(make, |_| None)
    }

    /// Makes a change that opens a file for writing. `returned_handle` returns the handle in the result.
    pub(crate) fn make_open<T>(
        self,
        make: impl FnOnce() -> Result<T, Errno>,
        returned_handle: impl FnOnce(&T) -> Option<HandleId>,
    ) -> Result<T, Errno> {
        let Some(ChangeToReport { watch, change }) = self.to_report else {
            return make();
        };
        let ticket = watch.begin_change(self.caller, &change)?;
        let result = make();
        let handle = result.as_ref().ok().and_then(returned_handle);
        watch.end_change(ticket, result.is_ok(), handle);
        result
    }
}
