//! The commit rules as a part of a mount.

use std::sync::Arc;

use firn_workers::spawn_thread;

use super::{CommitRules, watch_exits};
use crate::error::MountError;
use crate::part::{Part, Parts, Stop};

/// The commit rules of a mount.
pub(crate) struct WatchedRules(pub(crate) Arc<CommitRules>);

impl Part for WatchedRules {
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        let rules = Arc::clone(&self.0);
        let started = spawn_thread("firn-exits", move || watch_exits(&rules));
        started.map_err(MountError::io("start the thread that watches writers"))
    }

    /// What is not complete now is dropped, so that it keeps nobody from unmounting.
    fn prepare_end(&self) {
        self.0.abort_all();
    }

    fn stop(&self, stop: &mut Stop) {
        let rules = Arc::clone(&self.0);
        let is_unseen = stop.is_unseen;
        stop.ask_backing(move || {
            rules.exits.stop();
            if !is_unseen {
                rules.abort_all();
            }
        });
    }
}
