//! The file locks of programs that exclude programs on other hosts, as a part of the mount that is stopped at its end.

use std::sync::Arc;
use std::time::Duration;

use firn_hosts::FileLocks;

use crate::part::{Part, StopContext};

/// Timeout at the end of a mount for the removal of lock files. Files that remain do no harm.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);

/// The locks that this mount holds for its programs; the stop releases them.
pub(crate) struct LocksOfFiles(pub(crate) Arc<FileLocks>);

impl Part for LocksOfFiles {
    fn stop(&self, stop: &mut StopContext) {
        if stop.was_never_visible {
            // Another firnd may resume the locks. Otherwise they end with this process.
            return;
        }
        self.0.stop(STOP_TIMEOUT);
    }
}
