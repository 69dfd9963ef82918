//! Exclusive use of one thing across calls of the backing.
//!
//! It stands in for a lock, which nobody holds while the backing is called, and is only for what no one but the callers of
//! that one thing waits for: the names of one transaction (docs/internals/locks.md).

use std::sync::Arc;

use firn_backing::lock::Mutex;
use parking_lot::Condvar;

/// One that many may share, or one may have.
#[derive(Default)]
pub(crate) struct Claim {
    state: Mutex<State>,
    for_sharers: Condvar,
    for_owners: Condvar,
}

#[derive(Default)]
struct State {
    sharers: usize,
    has_owner: bool,
    waiting_owners: usize,
}

impl Claim {
    /// Waits until nobody has it alone or waits for that.
    pub(crate) fn share(claim: &Arc<Self>) -> Shared {
        let mut state = claim.state.lock();
        while state.has_owner || state.waiting_owners > 0 {
            state.wait(&claim.for_sharers);
        }
        state.sharers += 1;
        Shared(Arc::clone(claim))
    }

    /// Waits until nobody else has it.
    pub(crate) fn own(claim: &Arc<Self>) -> Owned {
        let mut state = claim.state.lock();
        state.waiting_owners += 1;
        while state.has_owner || state.sharers > 0 {
            state.wait(&claim.for_owners);
        }
        state.waiting_owners -= 1;
        state.has_owner = true;
        Owned(Arc::clone(claim))
    }

    fn let_go(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        if state.waiting_owners == 0 {
            self.for_sharers.notify_all();
        } else if state.sharers == 0 {
            self.for_owners.notify_one();
        }
    }
}

/// A share of a claim.
pub(crate) struct Shared(Arc<Claim>);

impl Drop for Shared {
    fn drop(&mut self) {
        self.0.let_go(|state| state.sharers -= 1);
    }
}

/// A claim that one has alone.
pub(crate) struct Owned(Arc<Claim>);

impl Drop for Owned {
    fn drop(&mut self) {
        self.0.let_go(|state| state.has_owner = false);
    }
}
