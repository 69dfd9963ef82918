//! How far a decided transaction is applied, and which transaction follows it.

use std::sync::Arc;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use super::Scope;
use crate::claim::Claim;

/// How far a decided transaction is.
pub(crate) struct Application<B: Backing> {
    /// Owned by the thread that applies the commit.
    pub(crate) applying: Claim,
    /// The transaction that begins when this one is applied.
    next: Mutex<Option<Arc<Scope<B>>>>,
    trouble: Mutex<Option<String>>,
}

impl<B: Backing> Default for Application<B> {
    fn default() -> Self {
        Self {
            applying: Claim::default(),
            next: Mutex::default(),
            trouble: Mutex::default(),
        }
    }
}

impl<B: Backing> Application<B> {
    pub(crate) fn next(&self) -> Option<Arc<Scope<B>>> {
        self.next.lock().clone()
    }

    pub(crate) fn take_next(&self) -> Option<Arc<Scope<B>>> {
        self.next.lock().take()
    }

    pub(crate) fn set_next(&self, next: Arc<Scope<B>>) {
        *self.next.lock() = Some(next);
    }

    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    /// Notes why an attempt to apply it failed, or that it did not.
    pub(crate) fn note_result<E: ToString>(&self, result: &Result<(), E>) {
        *self.trouble.lock() = result.as_ref().err().map(ToString::to_string);
    }
}
