//! Reports this mount to the other hosts of the backing, with each beat (renewal) of this host's lease.

use std::sync::Arc;

use firn_protocol::{HostReport, NAMES_MAX, Status};

use crate::answers::Identity;
use crate::error::MountError;
use crate::host_lease::LeaseState;
use crate::part::{ArenaEnd, Part, Parts, Stop};
use crate::store::Layers as _;

/// What the beats of a lease report of a mount.
pub(crate) struct HostReports {
    identity: Identity,
    beats: Arc<LeaseState>,
}

impl HostReports {
    pub(crate) fn new(identity: Identity, beats: Arc<LeaseState>) -> Arc<Self> {
        Arc::new(Self { identity, beats })
    }
}

/// Returns the report of a mount, with the logged files that are being written.
fn report(identity: &Identity, status: &Status) -> HostReport {
    let report = HostReport::of(status, rustix::process::geteuid().as_raw());
    // Other hosts cannot flatten a logged file while this host writes to it.
    if identity.engine.backing().logged().is_none() {
        return report;
    }
    let (names, count) = identity.engine.files_being_written(NAMES_MAX);
    report.with_written(count, names)
}

impl Part for HostReports {
    fn start(&self, parts: &Parts) -> Result<(), MountError> {
        let (identity, parts) = (self.identity.clone(), parts.clone());
        self.beats
            .report_by(move || report(&identity, &identity.status(&parts)));
        Ok(())
    }

    /// Sets a fixed last report with the data that stays behind, and drops the references to the parts.
    fn stop(&self, stop: &mut Stop) {
        let mut status = self.identity.engine.figures();
        status.version = env!("CARGO_PKG_VERSION").into();
        status.backing = self.identity.backing.as_path().into();
        status.mount_point = self.identity.mount_point.as_path().into();
        status.arena = self.identity.engine.arena().path().into();
        if stop.arena_end == ArenaEnd::Discard {
            status.held_bytes = 0;
            status.held_files = 0;
        }
        let last = report(&self.identity, &status);
        self.beats.report_by(move || last.clone());
    }
}
