//! Reports this mount to the other hosts of the backing, with each heartbeat (renewal) of this host's lease.

use std::sync::Arc;

use firn_protocol::{HostReport, NAMES_MAX, Status};

use crate::answers::MountIdentity;
use crate::error::MountError;
use crate::host_lease::LeaseState;
use crate::part::{ArenaEnd, Part, Parts, StopContext};
use crate::store::Layers as _;

/// Reports a mount to other hosts by the heartbeats (renewals) of its lease.
pub(crate) struct HostReports {
    identity: MountIdentity,
    lease_state: Arc<LeaseState>,
}

impl HostReports {
    pub(crate) fn new(identity: MountIdentity, lease_state: Arc<LeaseState>) -> Arc<Self> {
        Arc::new(Self {
            identity,
            lease_state,
        })
    }
}

/// Returns the report of a mount, with the logged files that are being written.
fn make_report(identity: &MountIdentity, status: &Status) -> HostReport {
    let report = HostReport::from_status(status, rustix::process::geteuid().as_raw());
    // Other hosts cannot flatten a logged file while this host writes to it.
    if identity.engine.backing().log_layer().is_none() {
        return report;
    }
    let (names, count) = identity.engine.files_being_written(NAMES_MAX);
    report.with_written(count, names)
}

impl Part for HostReports {
    fn start(&self, parts: &Parts) -> Result<(), MountError> {
        let identity = self.identity.clone();
        let parts = parts.clone();
        self.lease_state
            .set_reporter(move || make_report(&identity, &identity.status(&parts)));
        Ok(())
    }

    /// Sets a fixed last report with the data that stays behind, and drops the references to the parts.
    fn stop(&self, context: &mut StopContext) {
        let mut status = self.identity.engine.figures();
        status.version = env!("CARGO_PKG_VERSION").into();
        status.backing = self.identity.backing.as_path().into();
        status.mount_point = self.identity.mount_point.as_path().into();
        status.arena = self.identity.engine.arena().path().into();
        if context.arena_end == ArenaEnd::Discard {
            status.held_bytes = 0;
            status.held_files = 0;
        }
        let last_report = make_report(&self.identity, &status);
        self.lease_state.set_reporter(move || last_report.clone());
    }
}
