//! Compares at intervals how this host and the other living hosts mount the backing, and shows the differences in the
//! status. This is a part, one feature of a mount.

use std::sync::Arc;
use std::time::{Duration, Instant};

use firn_protocol::Status;
use firn_workers::Workers;
use parking_lot::Mutex;

use crate::part::Part;
use crate::peers::PeerComparison;
use crate::single_job::SingleJob;

/// Pause between two comparisons; a host that is alive renews its lease twice in this time.
const COMPARE_EVERY: Duration = Duration::from_secs(5);

/// The comparison with other hosts, which is repeated while the mount exists.
pub(crate) struct Peers {
    peer_comparison: Arc<PeerComparison>,
    workers: Workers,
    job: SingleJob,
    next_comparison: Mutex<Instant>,
}

impl Peers {
    pub(crate) fn new(peer_comparison: PeerComparison, workers: &Workers) -> Arc<Self> {
        Arc::new(Self {
            peer_comparison: Arc::new(peer_comparison),
            workers: workers.clone(),
            job: SingleJob::default(),
            next_comparison: Mutex::new(Instant::now() + COMPARE_EVERY),
        })
    }
}

impl Part for Peers {
    fn run_due(&self) {
        let now = Instant::now();
        let mut next = self.next_comparison.lock();
        if now >= *next {
            *next = now + COMPARE_EVERY;
            let peer_comparison = Arc::clone(&self.peer_comparison);
            self.job
                .start(&self.workers, move || peer_comparison.compare_again());
        }
    }

    fn fill_status(&self, status: &mut Status) {
        status.host_differences = self.peer_comparison.differences();
    }
}
