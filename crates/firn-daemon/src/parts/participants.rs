//! Takes part in transactions of several hosts, as long as this host has its lease.

use std::sync::Arc;

use firn_protocol::{Reply, Request};
use firn_workers::Workers;

use super::transactions::Forget;
use crate::gate::TransactionGate;
use crate::host_lease::LeaseState;
use crate::part::Part;
use crate::single_job::SingleJob;
use crate::transactions::{follow, give_up_all};

/// This host as a participant in transactions that another host commits or aborts.
pub(crate) struct Participation {
    gate: Arc<TransactionGate>,
    lease: Arc<LeaseState>,
    forget: Forget,
    workers: Workers,
    abort_check: SingleJob,
}

impl Participation {
    pub(crate) fn new(
        gate: &Arc<TransactionGate>,
        lease: Arc<LeaseState>,
        forget: &Forget,
        workers: &Workers,
    ) -> Arc<Self> {
        Arc::new(Self {
            gate: Arc::clone(gate),
            lease,
            forget: Arc::clone(forget),
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
            let forget = Arc::clone(&self.forget);
            self.abort_check
                .start(&self.workers, move || follow(&gate, &*forget));
        }
        if self.lease.lost().is_some() {
            give_up_all(&self.gate);
        }
    }

    fn refuse(&self, request: &Request) -> Option<Reply> {
        match request {
            Request::Begin { .. }
            | Request::Prepare { .. }
            | Request::Commit { .. }
            | Request::Abort { .. }
            | Request::Restore { .. } => {}
            _ => return None,
        }
        let lost = self.lease.lost()?;
        Some(Reply::Error {
            errno: libc::ECANCELED,
            message: format!(
                "this host has lost its part in the transactions of several hosts: {lost}; run `firn umount --force`, and mount again"
            ),
        })
    }
}
