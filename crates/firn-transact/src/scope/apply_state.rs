//! [`ApplyState`]: how far a decided commit is applied to the backing, the directory below the mount.
//!
//! A *decided* commit counts even after a crash. To *apply* it is to make its changes in the backing, which may happen
//! later. Meanwhile programs may begin the next transaction in the same directory; its changes begin when the commit is
//! applied.

use std::sync::Arc;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use super::Scope;
use crate::claim::Claim;

/// State of the application of one transaction's commit to the backing.
pub(crate) struct ApplyState<B: Backing> {
    /// The thread that applies the commit holds this claim exclusively.
    pub(crate) applying: Claim,
    /// The transaction that follows: its changes begin when this commit is applied.
    next_scope: Mutex<Option<Arc<Scope<B>>>>,
    /// Error of the last attempt; `None` if it succeeded or there was none.
    last_error: Mutex<Option<String>>,
}

impl<B: Backing> Default for ApplyState<B> {
    fn default() -> Self {
        Self {
            applying: Claim::default(),
            next_scope: Mutex::default(),
            last_error: Mutex::default(),
        }
    }
}

impl<B: Backing> ApplyState<B> {
    pub(crate) fn next_scope(&self) -> Option<Arc<Scope<B>>> {
        self.next_scope.lock().clone()
    }

    pub(crate) fn take_next_scope(&self) -> Option<Arc<Scope<B>>> {
        self.next_scope.lock().take()
    }

    pub(crate) fn set_next_scope(&self, next_scope: Arc<Scope<B>>) {
        *self.next_scope.lock() = Some(next_scope);
    }

    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    /// Records the result of an attempt to apply the commit, for the status.
    pub(crate) fn record_result<E: ToString>(&self, result: &Result<(), E>) {
        *self.last_error.lock() = result.as_ref().err().map(ToString::to_string);
    }
}
