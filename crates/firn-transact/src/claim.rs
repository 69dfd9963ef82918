//! Claims: shared or exclusive use of one resource, across calls of the backing.
//!
//! No thread may hold a lock while it calls the backing, because the call may hang. A claim takes the place of a lock
//! there. Each claim guards one resource: the names of one transaction, one object, or one backup
//! (docs/internals/locks.md).
//!
//! Promises
//! * A thread that has a claim may call the backing.
//! * A thread that waits for a claim holds no lock, because it may wait for another thread's call of the backing. Debug
//!   builds assert this.
//! * A thread that waits to own a claim goes before threads that want to share it.

use std::ops::{Deref, DerefMut};

use firn_backing::lock::{Mutex, RwLock, assert_none_held};
use parking_lot::Condvar;

/// A claim: many threads may share it, or one thread may own it.
#[derive(Default)]
pub(crate) struct Claim {
    state: Mutex<ClaimState>,
    for_sharers: Condvar,
    for_owners: Condvar,
}

/// How a claim is used now.
#[derive(Default)]
struct ClaimState {
    /// Number of threads that share the claim.
    sharers: usize,
    /// Whether a thread owns the claim.
    has_owner: bool,
    /// Number of threads that wait to own the claim.
    waiting_owners: usize,
}

impl Claim {
    /// Waits until no thread owns the claim or waits to own it. Returns a guard, which shares the claim.
    #[track_caller]
    pub(crate) fn share<C: Deref<Target = Self>>(claim: C) -> Shared<C> {
        assert_none_held("a claim, which waits for a call");
        {
            let mut state = claim.state.lock();
            while state.has_owner || state.waiting_owners > 0 {
                state.wait(&claim.for_sharers);
            }
            state.sharers += 1;
        }
        Shared(claim)
    }

    /// Waits until no other thread shares or owns the claim. Returns a guard, which owns the claim.
    #[track_caller]
    pub(crate) fn own<C: Deref<Target = Self>>(claim: C) -> Owned<C> {
        assert_none_held("a claim, which waits for a call");
        {
            let mut state = claim.state.lock();
            state.waiting_owners += 1;
            while state.has_owner || state.sharers > 0 {
                state.wait(&claim.for_owners);
            }
            state.waiting_owners -= 1;
            state.has_owner = true;
        }
        Owned(claim)
    }

    /// Ends a share or an ownership with `change`, and wakes the threads that may have the claim now.
    fn release_with(&self, change: impl FnOnce(&mut ClaimState)) {
        let mut state = self.state.lock();
        change(&mut state);
        if state.waiting_owners == 0 {
            self.for_sharers.notify_all();
        } else if state.sharers == 0 {
            self.for_owners.notify_one();
        }
    }
}

/// Guard: its thread shares the claim until it is dropped.
pub(crate) struct Shared<C: Deref<Target = Claim>>(C);

impl<C: Deref<Target = Claim>> Drop for Shared<C> {
    fn drop(&mut self) {
        self.0.release_with(|state| state.sharers -= 1);
    }
}

/// Guard: its thread owns the claim until it is dropped.
pub(crate) struct Owned<C: Deref<Target = Claim>>(C);

impl<C: Deref<Target = Claim>> Drop for Owned<C> {
    fn drop(&mut self) {
        self.0.release_with(|state| state.has_owner = false);
    }
}

/// A value with a claim of its own.
///
/// The value does not change while a caller shares it; only its owner changes it. Each read and each change takes a
/// short lock as well.
pub(crate) struct Claimed<T> {
    claim: Claim,
    value: RwLock<T>,
}

impl<T> Claimed<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            claim: Claim::default(),
            value: RwLock::new(value),
        }
    }

    /// Waits until no thread owns the value or waits to own it. Returns a guard, which shares the value.
    #[track_caller]
    pub(crate) fn share(&self) -> Sharing<'_, T> {
        Sharing {
            view: View(&self.value),
            _claim: Claim::share(&self.claim),
        }
    }

    /// Waits until no other thread shares or owns the value. Returns a guard, which owns the value.
    #[track_caller]
    pub(crate) fn own(&self) -> Owning<'_, T> {
        Owning {
            view: View(&self.value),
            _claim: Claim::own(&self.claim),
        }
    }

    /// Returns the value at this instant, for a caller that must not wait for the claim. The owner may be in the middle
    /// of several changes.
    pub(crate) fn peek(&self) -> impl Deref<Target = T> + '_ {
        self.value.read()
    }
}

/// A value that only one caller at a time can take.
pub(crate) struct Exclusive<T> {
    claim: Claim,
    /// `None` while a caller has the value.
    value: Mutex<Option<T>>,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            claim: Claim::default(),
            value: Mutex::new(Some(value)),
        }
    }

    /// Waits until no other thread has the value. Returns a guard, which has the value until it is dropped.
    #[track_caller]
    pub(crate) fn take(&self) -> Taken<'_, T> {
        let claim = Claim::own(&self.claim);
        let value = self.value.lock().take();
        Taken {
            place: &self.value,
            value,
            _claim: claim,
        }
    }
}

/// Guard: the value of an [`Exclusive`]. It is not a lock, so calls of the backing are allowed.
pub(crate) struct Taken<'a, T> {
    place: &'a Mutex<Option<T>>,
    /// `Some` until the guard is dropped.
    value: Option<T>,
    _claim: Owned<&'a Claim>,
}

impl<T> Deref for Taken<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().expect("it is taken")
    }
}

impl<T> DerefMut for Taken<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("it is taken")
    }
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        // The value goes back before the field `_claim` is dropped, so the next owner finds it.
        *self.place.lock() = self.value.take();
    }
}

/// The value of a [`Claimed`] that the caller shares or owns.
pub(crate) struct View<'a, T>(&'a RwLock<T>);

impl<T> View<'_, T> {
    /// Returns the value. The returned guard is a lock: its holder must not call the backing.
    pub(crate) fn read(&self) -> impl Deref<Target = T> + '_ {
        self.0.read()
    }
}

/// Guard: its thread shares a [`Claimed`] value.
pub(crate) struct Sharing<'a, T> {
    view: View<'a, T>,
    _claim: Shared<&'a Claim>,
}

impl<'a, T> Deref for Sharing<'a, T> {
    type Target = View<'a, T>;
    fn deref(&self) -> &View<'a, T> {
        &self.view
    }
}

/// Guard: its thread owns a [`Claimed`] value.
pub(crate) struct Owning<'a, T> {
    view: View<'a, T>,
    _claim: Owned<&'a Claim>,
}

impl<'a, T> Deref for Owning<'a, T> {
    type Target = View<'a, T>;
    fn deref(&self) -> &View<'a, T> {
        &self.view
    }
}

impl<T> Owning<'_, T> {
    /// Returns the value for a change. The returned guard is a lock: its holder must not call the backing.
    pub(crate) fn edit(&self) -> impl DerefMut<Target = T> + '_ {
        self.view.0.write()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;

    use super::*;

    /// Proves S-tx-120.
    #[test]
    #[cfg(debug_assertions)]
    fn who_waits_for_a_claim_holds_no_lock() {
        let lock = Mutex::new(());
        let claim = Claim::default();
        let value = Claimed::new(1);
        let guard = lock.lock();
        let is_refused = |wait: &dyn Fn()| catch_unwind(AssertUnwindSafe(wait)).is_err();
        assert!(is_refused(&|| drop(Claim::share(&claim))));
        assert!(is_refused(&|| drop(Claim::own(&claim))));
        assert!(is_refused(&|| drop(value.own())));
        drop(guard);
        assert_none_held("a call");
        drop(Claim::own(&claim));
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_claim_is_no_lock_and_a_look_is_one() {
        let value = Claimed::new(1);
        let owned = value.own();
        *owned.edit() = 2;
        assert_none_held("a call");
        let look = owned.read();
        let refused = catch_unwind(|| assert_none_held("a call"));
        assert!(refused.is_err());
        assert_eq!(*look, 2);
    }

    #[test]
    fn one_at_a_time_has_what_is_taken() {
        let place = Arc::new(Exclusive::new(0_u64));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let mut taken = place.take();
                        let seen = *taken;
                        std::thread::yield_now();
                        *taken = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*place.take(), 4000);
    }
}
