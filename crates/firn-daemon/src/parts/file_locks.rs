//! Releases the locks that programs have on files at the end of a mount, if these locks also exclude programs on other
//! hosts. A *lock file* is the file in the backing that firnd locks for a file's programs, so that other hosts see it.

use std::sync::Arc;
use std::time::Duration;

use firn_hosts::FileLocks;

use crate::part::{Part, StopContext};

/// Timeout at the end of a mount for the removal of lock files. Files that remain do no harm.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The locks that this mount holds for its programs; the stop releases them.
pub(crate) struct LocksOfFiles(pub(crate) Arc<FileLocks>);

impl Part for LocksOfFiles {
    fn stop(&self, context: &mut StopContext) {
        if context.was_never_visible {
            // Locks of an earlier firnd's programs stay, because another firnd may resume them. Without a keeper they
            // end with this process.
            return;
        }
        self.0.stop(STOP_TIMEOUT);
    }
}
