//! The copies on a partner host (`partner=`), as a part.

use std::sync::Arc;

use firn_format::durability::DurabilityLevel;
use firn_protocol::{Reply, Request, Status};

use crate::part::{Part, Question};
use crate::partner::{PartnerBoard, PartnerSpeaker};
use crate::replies::{deadline_of, throttle_progress};

/// Answers requests that wait for the copies, and receives the reports of the process that sends the copies.
pub(crate) struct PartnerCopies(pub(crate) Arc<PartnerBoard>);

impl Part for PartnerCopies {
    fn fill_status(&self, status: &mut Status) {
        status.partner = Some(self.0.status());
    }

    fn answer(&self, question: &mut Question<'_>) -> Option<Reply> {
        match question.request {
            Request::Wait {
                path,
                until: DurabilityLevel::Partnered,
                timeout_ms,
            } => {
                let progress = &mut throttle_progress("copying", question.send_progress);
                Some(self.0.wait(path, deadline_of(*timeout_ms), progress))
            }
            Request::Partner { host, note } => {
                let speaker = &mut question.client.partner;
                let (host, note) = (host.clone(), note.clone());
                Some(PartnerSpeaker::store_report(speaker, &self.0, host, note))
            }
            _ => None,
        }
    }
}
