//! The drain: writes *pending* bytes, which only the *arena* (shared memory) has, to the *backing*, the directory that
//! the mount serves.
//!
//! Each write is a job, and has three steps. [`Drainer::pick`] chooses bytes of the next file of a lane (one I/O
//! server), [`Job::execute`] writes them, and [`Drainer::complete`] records the result. An
//! [`Executor`](crate::Executor) carries out these steps in its threads. The engine has no threads.
//!
//! docs/internals/drain.md
//!
//! [`Job::execute`]: crate::Job::execute

pub(crate) mod complete;
pub(crate) mod job;
pub(crate) mod pick;
pub(crate) mod wait;

use std::sync::Arc;

use firn_backing::Backing;

use crate::base::Base;
use crate::drain::Drain;
use crate::intake::Intake;
use crate::kernel_cache::KernelCache;
use crate::open_files::OpenFiles;
use crate::space::Room;
use crate::tree::NameTree;

/// Picks the next write to the backing, and records its result.
pub struct Drainer<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// What the kernel caches.
    pub(crate) kernel_cache: Arc<KernelCache<B>>,
    /// Makes space in the arena.
    pub(crate) room: Arc<Room<B>>,
}

impl<B: Backing> Drainer<B> {
    pub(crate) fn new(room: &Arc<Room<B>>) -> Self {
        Self {
            base: Arc::clone(&room.base),
            tree: Arc::clone(&room.tree),
            drain: Arc::clone(&room.drain),
            intake: Arc::clone(&room.intake),
            open_files: Arc::clone(&room.open_files),
            kernel_cache: Arc::clone(&room.kernel_cache),
            room: Arc::clone(room),
        }
    }
}
