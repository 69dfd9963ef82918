//! Takes part in transactions of several hosts, as long as this host has its lease, the locked file that shows other
//! hosts that it is alive.

use std::sync::Arc;

use firn_protocol::{Reply, Request};
use firn_workers::Workers;

use super::transactions::InvalidateCache;
use crate::gate::TransactionGate;
use crate::host_lease::LeaseState;
use crate::part::Part;
use crate::single_job::SingleJob;
use crate::transactions::{refuse_all_changes, undo_transactions_aborted_elsewhere};

/// This host as a participant in transactions that another host commits or aborts.
pub(crate) struct Participation {
    gate: Arc<TransactionGate>,
    lease: Arc<LeaseState>,
    invalidate_cache: InvalidateCache,
    workers: Workers,
    abort_check: SingleJob,
}

impl Participation {
    pub(crate) fn new(
        gate: &Arc<TransactionGate>,
        lease: Arc<LeaseState>,
        invalidate_cache: &InvalidateCache,
        workers: &Workers,
    ) -> Arc<Self> {
        Arc::new(Self {
            gate: Arc::clone(gate),
            lease,
            invalidate_cache: Arc::clone(invalidate_cache),
            workers: workers.clone(),
            abort_check: SingleJob::default(),
        })
    }
}

impl Part for Participation {
    /// Checks whether other hosts have aborted a transaction that this host takes part in.
    ///
    /// After the lease is lost, another process may act in the name of this host. All open transactions are then given
    /// up, and each change in them fails.
    fn run_due(&self) {
        if self.gate.store().scopes.shares() {
            let gate = Arc::clone(&self.gate);
            let invalidate_cache = Arc::clone(&self.invalidate_cache);
            self.abort_check.start(&self.workers, move || {
                undo_transactions_aborted_elsewhere(&gate, &*invalidate_cache)
            });
        }
        if self.lease.loss_reason().is_some() {
            refuse_all_changes(&self.gate);
        }
    }

    /// Refuses requests about transactions after this host has lost its lease, the locked file by which other hosts see
    /// that it lives. `None`: this part does not refuse the request.
    fn refuse(&self, request: &Request) -> Option<Reply> {
        match request {
            Request::Begin { .. }
            | Request::Prepare { .. }
            | Request::Commit { .. }
            | Request::Abort { .. }
            | Request::Restore { .. } => {}
            _ => return None,
        }
        // Without the lease, another process may act in this host's name.
        let lost = self.lease.loss_reason()?;
        Some(Reply::Error {
            errno: libc::ECANCELED,
            message: format!(
                "this host has lost its part in the transactions of several hosts: {lost}; run `firn umount --force`, and mount again"
            ),
        })
    }
}
