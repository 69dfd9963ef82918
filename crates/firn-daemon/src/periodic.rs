//! What a mount does every second.
//!
//! A job that may ask the backing runs on a worker ([`Class::Job`]), one of each kind at a time: the main loop, which
//! must notice signals and unmounts, waits for no backing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use firn_backing::DirBacking;
use firn_engine::{Cached, DrainPolicy, Engine};
use firn_fuse::Invalidator;
use firn_lanes::Lanes;
use firn_stub::Tree;
use firn_workers::{Class, Workers};
use parking_lot::Mutex;

use crate::gate::TransactionGate;
use crate::peers::PeerBoard;
use crate::placement;
use crate::pulls::Pulls;
use crate::rates::{Totals, Window};
use crate::store::{Layers as _, Store};

/// The walk through a large tree takes this share of a core's time at most: it rests so many times as long as it took.
const NAME_SYNC_REST: u32 = 20;

/// A host that lives shows it twice in this time.
const LOOK_AT_PEERS_EVERY: Duration = Duration::from_secs(5);

/// The periodic jobs of a mount.
pub(crate) struct Periodic {
    pub(crate) engine: Arc<Engine<Store>>,
    /// None without transactions.
    pub(crate) gate: Option<Arc<TransactionGate>>,
    pub(crate) workers: Workers,
    /// Where the samples for the rates go.
    pub(crate) window: Arc<Mutex<Window>>,
    pub(crate) pulls: Arc<Pulls>,
    /// Makes the kernel drop what it has cached; none where it caches nothing.
    pub(crate) kernel: Option<Invalidator>,
    pub(crate) name_sync: Option<NameSync>,
    pub(crate) host_watch: SingleJob,
    pub(crate) peers: PeerLook,
    pub(crate) lane_removals: SingleJob,
}

/// Looks how other hosts mount the backing.
pub(crate) struct PeerLook {
    board: Arc<PeerBoard>,
    job: SingleJob,
    /// Time of the next one.
    next: Mutex<Instant>,
}

impl PeerLook {
    pub(crate) fn new(board: Arc<PeerBoard>) -> Self {
        Self {
            board,
            job: SingleJob::default(),
            next: Mutex::new(Instant::now() + LOOK_AT_PEERS_EVERY),
        }
    }
}

/// Syncs the names of a stub tree.
pub(crate) struct NameSync {
    tree: Arc<Tree<Store>>,
    job: SingleJob,
    /// Earliest time of the next one.
    next: Arc<Mutex<Instant>>,
}

impl NameSync {
    pub(crate) fn new(tree: Arc<Tree<Store>>) -> Self {
        Self {
            tree,
            job: SingleJob::default(),
            next: Arc::new(Mutex::new(Instant::now())),
        }
    }
}

impl Periodic {
    /// Does, or begins, what is due. To be called about once a second.
    pub(crate) fn run_due(&self) {
        self.sample_rates();
        self.sync_names();
        self.watch_hosts();
        self.look_at_peers();
        self.remove_from_lanes();
    }

    fn sample_rates(&self) {
        let sums = self.engine.transferred();
        self.window.lock().add(
            Instant::now(),
            Totals {
                ingest: sums.ingest_bytes,
                drain: sums.drain_bytes,
                spill: sums.moved_bytes,
                pulled: self.pulls.bytes(),
            },
        );
    }

    /// Where data drains as it comes, so do the names of a stub tree. Elsewhere the memory of what was removed there
    /// is given back: nobody tells of it.
    fn sync_names(&self) {
        let Some(names) = &self.name_sync else { return };
        let is_eager = self.engine.options().drain == DrainPolicy::Eager;
        let has_bytes = self.engine.arena().used_bytes() > 0;
        if !(is_eager || has_bytes) || Instant::now() < *names.next.lock() {
            return;
        }
        let tree = Arc::clone(&names.tree);
        let next = Arc::clone(&names.next);
        names.job.start(&self.workers, move || {
            let began = Instant::now();
            let synced = if is_eager {
                tree.reconcile_soon()
            } else {
                tree.sweep_soon()
            };
            if let Err(error) = synced {
                tracing::warn!(%error, "cannot create every name of the stub tree in the backing yet");
            }
            let rest: Duration = began.elapsed() * NAME_SYNC_REST;
            *next.lock() = Instant::now() + rest;
        });
    }

    /// Files that were removed, and wait in their lanes for a sync, give their room back.
    fn remove_from_lanes(&self) {
        let has_work = |lanes: &Lanes<DirBacking>| lanes.has_removals();
        if self.engine.backing().placed().is_some_and(has_work) {
            let engine = Arc::clone(&self.engine);
            let remove = move || placement::finish_removals(engine.backing());
            self.lane_removals.start(&self.workers, remove);
        }
    }

    fn look_at_peers(&self) {
        let now = Instant::now();
        let mut next = self.peers.next.lock();
        if now >= *next {
            *next = now + LOOK_AT_PEERS_EVERY;
            let board = Arc::clone(&self.peers.board);
            self.peers
                .job
                .start(&self.workers, move || board.look_again());
        }
    }

    /// Looks whether other hosts have aborted what this one takes part in.
    fn watch_hosts(&self) {
        let Some(gate) = self.gate.clone().filter(|gate| gate.store().shares()) else {
            return;
        };
        let kernel = self.kernel.clone();
        self.host_watch.start(&self.workers, move || {
            let invalidate = |cached: Cached| {
                if let Some(kernel) = &kernel {
                    kernel.invalidate(&cached);
                }
            };
            crate::transactions::follow(&gate, &invalidate);
        });
    }
}

/// A job that does not run twice at a time.
#[derive(Default)]
pub(crate) struct SingleJob {
    is_running: Arc<AtomicBool>,
}

impl SingleJob {
    /// Begins the job on a worker, unless it runs.
    pub(crate) fn start(&self, workers: &Workers, job: impl FnOnce() + Send + 'static) {
        if self.is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        let ended = EndOfJob(Arc::clone(&self.is_running));
        let started = workers.try_run(Class::Job, move || {
            let _ended = ended;
            job();
        });
        if let Err(error) = started {
            tracing::warn!(%error, "cannot start a periodic job; firnd tries again");
        }
    }
}

/// Dropped when the job has ended, panicked or not begun.
struct EndOfJob(Arc<AtomicBool>);

impl Drop for EndOfJob {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_job_runs_once_at_a_time_and_again_after_it_ended_or_panicked() {
        let workers = Workers::default();
        let job = SingleJob::default();
        let (begin, begun) = mpsc::channel();
        let (release, hung) = mpsc::channel::<()>();
        let begin_first = begin.clone();
        job.start(&workers, move || {
            begin_first.send("first").unwrap();
            let _ = hung.recv();
        });
        assert_eq!(begun.recv_timeout(LIMIT), Ok("first"));
        job.start(&workers, || panic!("the first one still runs"));
        drop(release);
        workers.wait_until_quiet(&[Class::Job]);
        job.start(&workers, || panic!("on purpose"));
        workers.wait_until_quiet(&[Class::Job]);
        job.start(&workers, move || begin.send("third").unwrap());
        assert_eq!(begun.recv_timeout(LIMIT), Ok("third"));
    }
}
