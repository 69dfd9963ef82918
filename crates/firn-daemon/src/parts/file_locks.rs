//! Locks of programs that reach other hosts.

use std::sync::Arc;
use std::time::Duration;

use firn_hosts::FileLocks;

use crate::part::{Part, Stop};

/// How long the end of a mount waits until lock files are removed. Files that stay do no harm.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

pub(crate) struct LocksOfFiles(pub(crate) Arc<FileLocks>);

impl Part for LocksOfFiles {
    fn stop(&self, _: &mut Stop) {
        self.0.stop(STOP_PATIENCE);
    }
}
