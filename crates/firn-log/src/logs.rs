//! [`Logs`]: the requests to a log layout (files that hosts write to logs of their own), for callers that do not know
//! the type of the backing below it.

use std::time::Duration;

use firn_backing::{Backing, Errno, Result};

use crate::backing::{LogBacking, LoggedTotals, UnflattenedFiles};
use crate::orphans::Orphans;
use crate::salvage::Report;

/// Wait before the next attempt to flatten a file while other hosts copy parts of it.
const RETRY_WAIT: Duration = Duration::from_millis(50);

/// The requests to a log layout, without the type of the backing below it.
pub trait Logs: Sync {
    /// Copies the logs of files that were closed, and are queued for that, to the plain files ([`LogBacking::settle`]).
    /// Returns the numbers of files that are left in logs.
    fn settle(&self) -> UnflattenedFiles;
    /// Waits until there is a file to settle, or a call of [`Logs::wake`], for at most `time`.
    fn wait_for_ended(&self, time: Duration);
    /// Ends the present or the next [`Logs::wait_for_ended`] at once.
    fn wake(&self);
    /// Returns how many files and bytes are in logs, as far as this host knows.
    fn count_logged(&self) -> LoggedTotals;
    /// Walks all files to find logs without a file. Removes those of removed files ([`LogBacking::find_orphans`]).
    fn find_orphans(&self) -> Result<Orphans>;
    /// Finishes removals of files that dead hosts began ([`LogBacking::end_removals`]).
    fn end_removals(&self) -> Result<()>;
    /// Counts the files at or below `path` that have containers.
    fn count_below(&self, path: &[u8]) -> Result<usize>;
    /// Flattens the files at or below `path`, as far as other hosts allow.
    fn flatten_at(&self, path: &[u8]) -> Result<UnflattenedFiles>;
    /// Flattens the files at or below `path`, and waits for other hosts that copy parts of them.
    fn flatten_whole(&self, path: &[u8]) -> Result<UnflattenedFiles>;
    /// Flattens the files at or below `path`. Damaged parts of logs are reported to `report` and given up.
    fn flatten_with_loss(&self, path: &[u8], report: &mut dyn Report) -> Result<UnflattenedFiles>;
}

impl<B: Backing> Logs for LogBacking<B> {
    fn settle(&self) -> UnflattenedFiles {
        self.settle()
    }

    fn wait_for_ended(&self, time: Duration) {
        self.wait_for_ended(time);
    }

    fn wake(&self) {
        self.wake();
    }

    fn count_logged(&self) -> LoggedTotals {
        self.count_logged()
    }

    fn find_orphans(&self) -> Result<Orphans> {
        self.find_orphans()
    }

    fn end_removals(&self) -> Result<()> {
        self.end_removals()
    }

    fn count_below(&self, path: &[u8]) -> Result<usize> {
        self.count_logged_below(&find_object(self, path)?)
    }

    fn flatten_at(&self, path: &[u8]) -> Result<UnflattenedFiles> {
        self.flatten_below(&find_object(self, path)?)
    }

    fn flatten_whole(&self, path: &[u8]) -> Result<UnflattenedFiles> {
        let top = find_object(self, path)?;
        wait_for_others(&mut || self.flatten_below(&top))
    }

    fn flatten_with_loss(&self, path: &[u8], report: &mut dyn Report) -> Result<UnflattenedFiles> {
        let top = find_object(self, path)?;
        wait_for_others(&mut || self.flatten_with_loss(&top, report))
    }
}

/// Calls `flatten` again until no other host is copying parts of a file.
fn wait_for_others(
    flatten: &mut dyn FnMut() -> Result<UnflattenedFiles>,
) -> Result<UnflattenedFiles> {
    loop {
        let unflattened = flatten()?;
        if unflattened.under_way == 0 {
            return Ok(unflattened);
        }
        std::thread::sleep(RETRY_WAIT);
    }
}

/// Finds the object at a path below the top of a backing, without following links.
pub fn find_object<B: Backing>(backing: &B, path: &[u8]) -> Result<B::Inode> {
    let mut inode = backing.root();
    for name in path
        .split(|byte| *byte == b'/')
        .filter(|name| !name.is_empty())
    {
        let name = firn_trust::check_component(name).map_err(|_| Errno::NOENT)?;
        inode = backing.lookup(&inode, name)?.0;
    }
    Ok(inode)
}
