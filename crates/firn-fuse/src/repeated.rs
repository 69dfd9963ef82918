//! Records of an earlier firnd (the process that serves the mount) about requests that the kernel may send again.
//!
//! The kernel sends a request again if the firnd that read it died before it answered. The record of that firnd says
//! what the request may have done already. Some records are never used, because their answer was sent before firnd
//! died. They remain until the mount ends, which does no harm: the kernel never uses a request number twice.

use std::collections::HashMap;

use firn_engine::{HandleId, ResumedRequest, ResumedRequests};
use parking_lot::Mutex;

/// Bit in the number of a request that the kernel sends again.
pub(crate) const UNIQUE_RESEND: u64 = 1 << 63;

/// Records of an earlier firnd, by the number of the request.
#[derive(Debug, Default)]
pub(crate) struct RepeatedRequests {
    requests: Mutex<HashMap<u64, ResumedRequest>>,
    opened: Mutex<HashMap<u64, HandleId>>,
}

impl RepeatedRequests {
    /// Adds the records. Called before the first request.
    pub(crate) fn fill(&self, left: ResumedRequests) {
        let handles = left.handles.iter();
        self.opened
            .lock()
            .extend(handles.map(|handle| (handle.unique, handle.id)));
        self.requests.lock().extend(left.requests);
    }

    /// Removes and returns the record of a request.
    pub(crate) fn take_request(&self, number: u64) -> Option<ResumedRequest> {
        self.requests.lock().remove(&number)
    }

    /// Removes and returns the handle that a request had opened.
    pub(crate) fn take_handle(&self, number: u64) -> Option<HandleId> {
        self.opened.lock().remove(&number)
    }
}
