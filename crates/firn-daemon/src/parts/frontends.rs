//! The parts of the two frontends, the ways in which programs use a mount. [`FuseRequests`] shows figures of the
//! kernel's requests in the status. The part of a stub tree, a mount of empty files on tmpfs, creates its names in the
//! backing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_engine::{DrainPolicy, Engine};
use firn_format::quote::quoted;
use firn_fuse::{Failures, WaitingThread, WaitingThreads};
use firn_protocol::path::BytePath;
use firn_protocol::{HeldPolicy, Reply, Request, Status, WaitingProgram};
use firn_workers::Workers;
use parking_lot::Mutex;

use super::arena::count_remaining_bytes;
use crate::frontend::{Stubs, TreeEnd};
use crate::part::{ArenaEnd, Part, StopContext};
use crate::replies::failure_reply;
use crate::single_job::SingleJob;
use crate::store::Store;

/// Shortest wait of a program's call that the status shows.
const SHOWN_WAIT_MIN: Duration = Duration::from_secs(1);
/// Limit of waiting programs that the status names.
const SHOWN_PROGRAMS_MAX: usize = 8;

/// Describes the program of a waiting thread; `None` if the thread has ended.
fn describe_program(waiting: &WaitingThread) -> Option<WaitingProgram> {
    // This file of /proc can be read without waiting, whatever the thread does.
    let name = std::fs::read(format!("/proc/{}/comm", waiting.thread)).ok()?;
    Some(WaitingProgram {
        name: quoted(name.trim_ascii_end()),
        thread: waiting.thread,
        call: waiting.operation.to_owned(),
        seconds: waiting.waited.as_secs_f64(),
    })
}

/// The requests of the kernel.
pub(crate) struct FuseRequests {
    pub(crate) waiting_writers: Arc<AtomicU64>,
    pub(crate) waiting_threads: WaitingThreads,
    pub(crate) failures: Arc<Failures>,
}

impl Part for FuseRequests {
    fn fill_status(&self, status: &mut Status) {
        status.waiting_writers = self.waiting_writers.load(Ordering::Relaxed);
        let waiting_threads = self
            .waiting_threads
            .find(SHOWN_WAIT_MIN, SHOWN_PROGRAMS_MAX);
        status.waiting_programs = waiting_threads
            .iter()
            .filter_map(describe_program)
            .collect();
        status.failed_requests = self.failures.figures();
    }
}

/// After a walk through the tree the job rests this many times as long as the walk took, which limits its use of a
/// core.
const REST_PER_WALK: u32 = 20;

/// The names of a stub tree, which programs change without a request to firnd.
pub(crate) struct StubNames {
    engine: Arc<Engine<Store>>,
    stubs: Arc<Stubs>,
    workers: Workers,
    walk_job: SingleJob,
    /// Earliest time of the next walk through the tree.
    next_walk: Arc<Mutex<Instant>>,
}

impl StubNames {
    pub(crate) fn new(
        engine: &Arc<Engine<Store>>,
        stubs: &Arc<Stubs>,
        workers: &Workers,
    ) -> Arc<Self> {
        Arc::new(Self {
            engine: Arc::clone(engine),
            stubs: Arc::clone(stubs),
            workers: workers.clone(),
            walk_job: SingleJob::default(),
            next_walk: Arc::new(Mutex::new(Instant::now())),
        })
    }
}

impl Part for StubNames {
    /// Starts a walk through the stub tree (empty files on tmpfs; the preload library serves their bytes), unless one
    /// runs or the last one was just now. If data drains as it comes, the walk creates the names of the tree in the
    /// backing. Otherwise it only frees the memory of removed files, because their removal is not reported.
    fn run_due(&self) {
        let is_eager = self.engine.options().drain == DrainPolicy::Eager;
        let has_bytes = self.engine.arena().used_bytes() > 0;
        let has_work = is_eager || has_bytes;
        if !has_work || Instant::now() < *self.next_walk.lock() {
            return;
        }
        let tree = Arc::clone(&self.stubs.tree);
        let next_walk = Arc::clone(&self.next_walk);
        self.walk_job.start(&self.workers, move || {
            let start = Instant::now();
            let walked = if is_eager {
                tree.reconcile_soon()
            } else {
                tree.sweep_soon()
            };
            if let Err(error) = walked {
                tracing::warn!(%error, "cannot create every name of the stub tree in the backing yet");
            }
            let rest: Duration = start.elapsed() * REST_PER_WALK;
            *next_walk.lock() = Instant::now() + rest;
        });
    }

    /// Brings the names in the backing up to date before a request about a path is answered. A failure refuses the
    /// request.
    fn refuse(&self, request: &Request) -> Option<Reply> {
        let path = path_that_needs_current_names(request)?;
        let error = self.stubs.tree.reconcile().err()?;
        Some(failure_reply(error, path))
    }

    /// Ends the stub tree (empty files on tmpfs): it stays if the arena still has data of its files, and is removed
    /// otherwise. This is called when no request comes any more.
    fn stop(&self, context: &mut StopContext) {
        if context.was_never_visible {
            return;
        }
        let tree_end = match (context.arena_end, context.held_policy) {
            (ArenaEnd::Keep, _) => TreeEnd::Keep,
            (ArenaEnd::Discard, _) => TreeEnd::Discard,
            (ArenaEnd::RemoveIfEmpty, HeldPolicy::Keep)
                if count_remaining_bytes(&self.engine) > 0 =>
            {
                TreeEnd::Keep
            }
            (ArenaEnd::RemoveIfEmpty, _) => TreeEnd::Remove,
        };
        let stubs = Arc::clone(&self.stubs);
        context.run_backing_work(move || stubs.end(tree_end));
    }
}

/// Returns the path of a request if its answer depends on the names that the backing has now; otherwise `None`. Names
/// of a stub tree must be created in the backing before such a request is answered.
fn path_that_needs_current_names(request: &Request) -> Option<&BytePath> {
    match request {
        Request::Wait { path, .. }
        | Request::Drain { path }
        | Request::Flatten { path }
        | Request::Files { path, .. }
        | Request::Begin { path, .. }
        | Request::Prepare { path, .. }
        | Request::Commit { path, .. }
        | Request::Evict { path }
        | Request::Pin { path, .. }
        | Request::Place { path }
        | Request::MarkPartnered { path, .. }
        | Request::Chunks { path, .. } => Some(path),
        Request::Hello
        | Request::Status
        | Request::Record
        | Request::Region
        | Request::Partner { .. }
        | Request::CheckChunks { .. }
        | Request::ReleaseChunks { .. }
        | Request::ReportPull { .. }
        | Request::ClearErrors
        | Request::Abort { .. }
        | Request::Restore { .. }
        | Request::Upgrade { .. }
        | Request::Unmount { .. } => None,
    }
}
