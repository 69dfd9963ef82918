//! The kernel's cached pages of a file that is written at the same time.
//!
//! The kernel drops the pages of a range before it sends a direct write of it here. A reader through a
//! cached handle may fill them again with what was there before the write, and would keep that. So a
//! write to a file with cached readers is answered only after its pages were dropped once more. (Linux
//! 6.18 does so itself; older kernels do not all.)

use std::sync::{Arc, OnceLock};

use firn_backing::Backing;
use firn_engine::{Engine, HandleId};
use fuser::{INodeNo, Notifier};

use crate::workers::Workers;

/// Where a write went.
#[derive(Clone, Copy)]
pub(crate) struct Target {
    pub(crate) node: INodeNo,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    /// The kernel writes a page of its cache back: it is locked, and what is in it is what is written.
    pub(crate) from_cache: bool,
}

/// Drops pages after writes.
pub(crate) struct Coherence<B: Backing> {
    engine: Arc<Engine<B>>,
    workers: Workers,
    notifier: OnceLock<Notifier>,
}

impl<B: Backing> Coherence<B> {
    pub(crate) fn new(engine: Arc<Engine<B>>, workers: Workers) -> Arc<Self> {
        Arc::new(Self { engine, workers, notifier: OnceLock::new() })
    }

    /// To be called before the first request is served.
    pub(crate) fn start(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier);
    }

    pub(crate) fn notifier(&self) -> Option<&Notifier> {
        self.notifier.get()
    }
    pub(crate) fn engine(&self) -> &Arc<Engine<B>> {
        &self.engine
    }
    pub(crate) fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Calls `answer` once no reader can see what was there before the write of `len` bytes.
    pub(crate) fn after_write(&self, target: Target, len: usize, answer: impl FnOnce() + Send + 'static) {
        let notifier = match self.notifier.get() {
            Some(notifier) if !target.from_cache && self.engine.has_cached_readers(target.handle) => {
                notifier.clone()
            }
            _ => return answer(),
        };
        // Not on this thread: dropping a page waits for a read of it that a FUSE thread must answer.
        self.workers.run(move || {
            let dropped = notifier.inval_inode(target.node, target.offset as i64, len as i64);
            if let Err(error) = dropped
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(%error, node = target.node.0, "cannot drop cached pages after a write");
            }
            answer();
        });
    }
}
