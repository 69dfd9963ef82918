//! The part that copies data of open transactions to the backup (`backup=`) ahead of their commit.

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
    every: Duration,
    rounds: Mutex<Option<BackupThread>>,
}

impl BackupRounds {
    pub(crate) fn new(engine: &Arc<Engine<Store>>, every: Duration) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            every,
            rounds: Mutex::new(None),
        })
    }
}

impl Part for BackupRounds {
    fn start(&self, _: &Parts) -> Result<(), MountError> {
        let rounds = BackupThread::start(&self.engine, self.every);
        *self.rounds.lock() = Some(rounds.map_err(MountError::io("start a thread"))?);
        Ok(())
    }

    fn stop(&self, stop: &mut StopContext) {
        let rounds = self.rounds.lock().take();
        stop.run_backing_work(move || drop(rounds));
    }
}
