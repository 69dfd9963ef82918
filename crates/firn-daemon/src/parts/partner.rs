//! Answers requests about the partner (`partner=`), the host with copies of this host's files. This is a part, one
//! feature of a mount.

use std::sync::Arc;

use firn_format::durability::DurabilityLevel;
use firn_protocol::{Reply, Request, Status};

use crate::part::{ClientRequest, Part};
use crate::partner::{PartnerReporter, PartnerState};
use crate::replies::{deadline_after, throttle_progress};

/// Answers requests that wait for the copies, and receives the reports of the process that sends the copies.
pub(crate) struct PartnerCopies(pub(crate) Arc<PartnerState>);

impl Part for PartnerCopies {
    fn fill_status(&self, status: &mut Status) {
        status.partner = Some(self.0.status());
    }

    /// Answers requests about the partner, the host with copies of this host's files: waits until it has copied a path,
    /// or stores a report of it. `None` for all other requests.
    fn answer(&self, client_request: &mut ClientRequest<'_>) -> Option<Reply> {
        match client_request.request {
            Request::Wait {
                path,
                until: DurabilityLevel::Partnered,
                timeout_ms,
            } => {
                let progress = &mut throttle_progress("copying", client_request.send_progress);
                Some(self.0.wait(path, deadline_after(*timeout_ms), progress))
            }
            // The process that copies files to the partner reports which host that is.
            Request::Partner { host, note } => {
                let reporter = &mut client_request.client.partner;
                Some(PartnerReporter::store_report(
                    reporter,
                    &self.0,
                    host.clone(),
                    note.clone(),
                ))
            }
            _ => None,
        }
    }
}
