//! [`Application`]: the act of applying one decided commit to the backing, the directory below the mount. It is not a
//! program.
//!
//! A *decided* commit counts even after a crash. To *apply* it is to make its changes in the backing, which may happen
//! later. Meanwhile programs may begin the next transaction in the same directory; its changes begin when the commit is
//! applied. A *scope* is a transaction and the part of the tree that it covers.
//!
//! This state has the claim that lets one thread at a time apply the commit, the scope that follows, and the error of
//! the last attempt.

use std::sync::Arc;

use firn_backing::Backing;
use firn_backing::lock::Mutex;

use super::Scope;
use crate::claim::Claim;

/// State of applying one transaction's commit to the backing.
pub(crate) struct Application<B: Backing> {
    /// The thread that applies the commit holds this claim exclusively.
    pub(crate) applying: Claim,
    /// The transaction that follows: its changes begin when this commit is applied.
    next_scope: Mutex<Option<Arc<Scope<B>>>>,
    /// Error of the last attempt; `None` if it succeeded or there was none.
    last_error: Mutex<Option<String>>,
}

impl<B: Backing> Default for Application<B> {
    fn default() -> Self {
        Self {
            applying: Claim::default(),
            next_scope: Mutex::default(),
            last_error: Mutex::default(),
        }
    }
}

impl<B: Backing> Application<B> {
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
