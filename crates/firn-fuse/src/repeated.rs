//! Requests that the kernel sends again, because the firnd that read them died before it had answered.
//!
//! What such a request may have done already is told by what its firnd noted ([`RepeatedRequests`]). A note that no request
//! asks for, because its answer had left, stays until the mount ends: numbers of requests are not used again.

use std::collections::HashMap;

use firn_engine::{HandleId, ResumedRequest, ResumedRequests};
use parking_lot::Mutex;

/// Bit of the number of a request that is sent again.
pub(crate) const UNIQUE_RESEND: u64 = 1 << 63;

/// What an earlier firnd had in work, by the number of the request.
#[derive(Debug, Default)]
pub(crate) struct RepeatedRequests {
    requests: Mutex<HashMap<u64, ResumedRequest>>,
    opened: Mutex<HashMap<u64, HandleId>>,
}

impl RepeatedRequests {
    /// To be called before the first request.
    pub(crate) fn fill(&self, left: ResumedRequests) {
        let handles = left.handles.iter();
        self.opened
            .lock()
            .extend(handles.map(|handle| (handle.unique, handle.id)));
        self.requests.lock().extend(left.requests);
    }

    /// What was noted of a request, once.
    pub(crate) fn take_request(&self, number: u64) -> Option<ResumedRequest> {
        self.requests.lock().remove(&number)
    }

    /// What a request had opened, once.
    pub(crate) fn take_handle(&self, number: u64) -> Option<HandleId> {
        self.opened.lock().remove(&number)
    }
}
