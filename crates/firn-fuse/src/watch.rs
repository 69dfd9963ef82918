//! A watch over what programs do with names and files: commit rules begin transactions before a change and end them after it.
//!
//! It belongs to the [`Gate`], and only mounts with rules have one: on all others a change costs one look whether
//! there is one.
//!
//! Promises of an implementation
//! * [`ChangeWatch::concerns`] asks nothing of the backing.
//! * The others may take as long as a commit. They are called on workers, with no [`Pass`](crate::Pass) held.

use std::ffi::OsString;
use std::sync::Arc;

use firn_backing::{Caller, Errno};
use firn_engine::{Closing, HandleId, InodeId};

use crate::gate::Gate;

/// A change that is about to be made.
#[derive(Clone, Debug)]
pub enum WatchedChange {
    /// A file is opened for writing.
    Open(InodeId),
    /// A file is made and opened, in this directory under this name.
    Create(InodeId, OsString),
    /// Something else gets a name.
    Make(InodeId, OsString),
    /// The length of a file changes.
    Cut(InodeId),
    /// A name goes.
    Remove(InodeId, OsString),
    /// A name becomes another one.
    Rename((InodeId, OsString), (InodeId, OsString)),
}

/// A change that was let in.
#[derive(Debug)]
pub struct WatchTicket {
    /// The implementation's number of it.
    pub number: u64,
}

/// What watches changes.
pub trait ChangeWatch: Send + Sync {
    /// Whether the rules have to do with a change.
    fn concerns(&self, change: &WatchedChange) -> bool;

    /// Before a change; an error refuses it.
    fn begin_change(&self, caller: Caller, change: &WatchedChange) -> Result<WatchTicket, Errno>;

    /// After it. `handle`: of the file that it opened for writing.
    fn end_change(&self, ticket: WatchTicket, is_made: bool, handle: Option<HandleId>);

    /// Whether what is seen there was left by a writer that has ended, and is about to be dropped.
    fn must_settle(&self, inode: InodeId) -> bool;

    /// Waits until it is dropped: a program that is started again finds what it will find.
    fn settle(&self, inode: InodeId);

    /// Whether a handle is one that was given to [`ChangeWatch::end_change`].
    fn knows(&self, handle: HandleId) -> bool;

    /// A process closes a handle that the watch knows, or is ended with it.
    fn close(&self, caller: Caller, handle: HandleId, by: Closing) -> Result<(), Errno>;

    /// The kernel has no descriptor of the handle any more.
    fn release(&self, handle: HandleId);
}

/// A watch, and the change that concerns it.
pub(crate) type WatchFound = (Arc<dyn ChangeWatch>, WatchedChange);

/// The watch that a change concerns.
pub(crate) fn watch_of(
    gate: Option<&dyn Gate>,
    change: impl FnOnce() -> WatchedChange,
) -> Option<WatchFound> {
    let watch = gate?.watch()?;
    let change = change();
    watch.concerns(&change).then_some((watch, change))
}

/// A change that is watched, if rules have to do with it.
pub(crate) struct Watched {
    watch: Option<WatchFound>,
    caller: Caller,
}

impl Watched {
    pub(crate) fn new(watch: Option<WatchFound>, caller: Caller) -> Self {
        Self { watch, caller }
    }

    /// Makes the change, unless the watch refuses it.
    pub(crate) fn make<T>(self, make: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
        self.open(make, |_| None)
    }

    /// The same of one that opens a file for writing.
    pub(crate) fn open<T>(
        self,
        make: impl FnOnce() -> Result<T, Errno>,
        handle_of: impl FnOnce(&T) -> Option<HandleId>,
    ) -> Result<T, Errno> {
        let Some((watch, change)) = self.watch else {
            return make();
        };
        let ticket = watch.begin_change(self.caller, &change)?;
        let made = make();
        let handle = made.as_ref().ok().and_then(handle_of);
        watch.end_change(ticket, made.is_ok(), handle);
        made
    }
}
