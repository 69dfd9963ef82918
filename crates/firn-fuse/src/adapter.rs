//! The frontend of a mount before it is mounted.

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
    /// An adapter that is not mounted yet; what cannot be done at once is done by `workers`. `gate`: that of a mount
    /// with transactions.
    pub fn new(
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        options: AdapterOptions,
        workers: Workers,
    ) -> Self {
        let dispatcher = Dispatcher::new(engine, gate, options, workers);
        Self { dispatcher }
    }

    /// Tells processes that they may write and read the files of `arena` directly, and at which socket to ask. The
    /// server of that socket drops what the kernel has cached with the [`Invalidator`].
    pub fn offer_direct_access(&mut self, arena: [u8; 16], socket: &Path) -> Invalidator {
        self.dispatcher.set_data_socket(arena, socket);
        Invalidator::new(self.dispatcher.coherence())
    }

    /// Programs lock files for all hosts, and append to them as if there were one.
    pub fn share_locks(&mut self, locks: Arc<FileLocks>) {
        self.dispatcher.set_locks(locks);
    }

    /// Number of writes that wait for room in the arena, kept current.
    pub fn waiting_writers(&self) -> Arc<AtomicU64> {
        self.dispatcher.waiting_writers()
    }

    /// Threads of programs that wait for answers.
    pub fn waiting_threads(&self) -> WaitingThreads {
        self.dispatcher.waiting_threads()
    }

    /// The requests that failed.
    pub fn failures(&self) -> Arc<Failures> {
        self.dispatcher.failures()
    }

    pub(crate) fn into_dispatcher(self) -> Dispatcher<B, Responder> {
        self.dispatcher
    }
}
