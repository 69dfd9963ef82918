//! The part of a mount that copies data of open transactions to the backup (`backup=`, a second directory) ahead of
//! their commit.

use std::sync::Arc;
use std::time::Duration;

use firn_engine::Engine;
use parking_lot::Mutex;

use crate::backup::BackupThread;
use crate::error::MountError;
use crate::part::{Part, Parts, StopContext};
use crate::store::Store;

/// The thread that makes these copies in rounds.
pub(crate) struct BackupRounds {
    engine: Arc<Engine<Store>>,
    pause: Duration,
    thread: Mutex<Option<BackupThread>>,
}

impl BackupRounds {
    pub(crate) fn new(engine: &Arc<Engine<Store>>, pause: Duration) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            pause,
            thread: Mutex::new(None),
        })
    }
}

impl Part for BackupRounds {
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        let thread = BackupThread::start(&self.engine, self.pause)
            .map_err(MountError::io("start a thread"))?;
        *self.thread.lock() = Some(thread);
        Ok(())
    }

    fn stop(&self, context: &mut StopContext) {
        let thread = self.thread.lock().take();
        // The drop waits for the current round.
        context.run_backing_work(move || drop(thread));
    }
}
