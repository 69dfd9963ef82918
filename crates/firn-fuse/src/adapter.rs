//! The [`Adapter`]: the FUSE frontend of one mount, from which [`crate::Session`] starts the service of the mount.
//!
//! Terms
//! * The *engine* holds the files of the mount. Bytes that are not in the backing yet are in its *arena*, a shared
//!   memory.
//! * The *backing* is the directory that the mount serves.
//! * The *gate* makes changes wait while a transaction (a checkpoint that appears at once) is prepared or applied.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use firn_backing::Backing;
use firn_engine::Engine;
use firn_hosts::FileLocks;
use firn_workers::Workers;

use crate::coherence::Invalidator;
use crate::dispatcher::{AdapterOptions, Dispatcher};
use crate::failures::Failures;
use crate::gate::Gate;
use crate::transport::dev_fuse::Responder;
use crate::unanswered::WaitingThreads;

/// Translates kernel requests for one engine.
pub struct Adapter<B: Backing> {
    dispatcher: Dispatcher<B, Responder>,
}

impl<B: Backing> Adapter<B> {
    /// Makes an adapter. Work that may take long runs on `workers`, a pool of threads. `gate`: `None` on a mount
    /// without transactions.
    pub fn new(
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        options: AdapterOptions,
        workers: Workers,
    ) -> Self {
        let dispatcher = Dispatcher::new(engine, gate, options, workers);
        Self { dispatcher }
    }

    /// Lets processes access files of `arena` directly, through requests to `socket`. Returns the [`Invalidator`] with
    /// which the server of that socket makes the kernel drop cached data.
    pub fn offer_direct_access(&mut self, arena: [u8; 16], socket: &Path) -> Invalidator {
        self.dispatcher.set_data_socket(arena, socket);
        Invalidator::new(self.dispatcher.coherence())
    }

    /// Makes locks of programs hold for all hosts. Appends then go to the file's end as all hosts see it.
    pub fn share_locks(&mut self, locks: Arc<FileLocks>) {
        self.dispatcher.set_locks(locks);
    }

    /// Returns the counter of writes that now wait for room in the arena.
    pub fn waiting_writers(&self) -> Arc<AtomicU64> {
        self.dispatcher.waiting_writers()
    }

    /// Returns an object that finds threads of programs that wait for answers.
    pub fn waiting_threads(&self) -> WaitingThreads {
        self.dispatcher.waiting_threads()
    }

    /// Returns the counters of failed requests.
    pub fn failures(&self) -> Arc<Failures> {
        self.dispatcher.failures()
    }

    pub(crate) fn into_dispatcher(self) -> Dispatcher<B, Responder> {
        self.dispatcher
    }
}
