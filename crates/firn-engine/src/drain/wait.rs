//! Draining one file while its caller waits, and who carries the jobs out.

use std::sync::Arc;
use std::sync::mpsc;

use firn_backing::Backing;

use super::{Executor, wait_for};
use crate::Result;
use crate::engine::Engine;
use crate::file::File;
use crate::lane::LaneIndex;

impl<B: Backing> Engine<B> {
    /// Sets who carries out the jobs from here on.
    pub fn set_executor(&self, executor: Arc<dyn Executor>) {
        self.drain.set_executor(executor);
    }

    /// The lanes, each to be picked from.
    pub fn lanes(&self) -> impl Iterator<Item = LaneIndex> + use<B> {
        self.drain.lanes()
    }

    /// Drains what a file has pending now, and blocks until it is in the backing or a try failed. To be called with no
    /// lock held, and not by a thread that carries out jobs.
    pub(crate) fn drain_and_wait(&self, file: &Arc<File<B>>) -> Result<()> {
        let (tell, outcome) = mpsc::channel();
        self.when_drained(
            file,
            Box::new(move |result| {
                let _ = tell.send(result);
            }),
        );
        if let Ok(result) = outcome.try_recv() {
            return result;
        }
        match self.drain.executor() {
            Some(executor) => executor.wait_for(&outcome),
            None => wait_for(&outcome),
        }
    }
}
