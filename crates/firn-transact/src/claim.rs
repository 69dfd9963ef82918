//! Exclusive use of one thing across calls of the backing.
//!
//! A claim stands in for a lock, because no lock may be held while the backing is called. Each claim guards one thing
//! that only its own callers wait for: the names of one transaction, one object, one backup
//! (docs/internals/locks.md).
//!
//! Promises
//! * A claim is no lock: calls of the backing may be made with it.
//! * A thread that waits for a claim may wait for a call of the backing, so it holds no lock there. Debug builds
//!   assert it.

use std::ops::{Deref, DerefMut};

use firn_backing::lock::{Mutex, RwLock, assert_none_held};
use parking_lot::Condvar;

/// One that many may share, or one may have.
#[derive(Default)]
pub(crate) struct Claim {
    state: Mutex<ClaimState>,
    for_sharers: Condvar,
    for_owners: Condvar,
}

#[derive(Default)]
struct ClaimState {
    sharers: usize,
    has_owner: bool,
    waiting_owners: usize,
}

impl Claim {
    /// Waits until no thread owns the claim or waits to own it.
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

    /// Waits until no other thread shares or owns the claim.
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

    fn let_go(&self, change: impl FnOnce(&mut ClaimState)) {
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
pub(crate) struct Shared<C: Deref<Target = Claim>>(C);

impl<C: Deref<Target = Claim>> Drop for Shared<C> {
    fn drop(&mut self) {
        self.0.let_go(|state| state.sharers -= 1);
    }
}

/// A claim that one has alone.
pub(crate) struct Owned<C: Deref<Target = Claim>>(C);

impl<C: Deref<Target = Claim>> Drop for Owned<C> {
    fn drop(&mut self) {
        self.0.let_go(|state| state.has_owner = false);
    }
}

/// A value with a claim of its own. It stays the same while a caller shares it, and only its owner changes it. Each look and
/// each change takes a lock for an instant.
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

    /// Waits until no thread owns the value or waits to own it.
    #[track_caller]
    pub(crate) fn share(&self) -> Sharing<'_, T> {
        Sharing {
            view: View(&self.value),
            _claim: Claim::share(&self.claim),
        }
    }

    /// Waits until no other thread shares or owns the value.
    #[track_caller]
    pub(crate) fn own(&self) -> Owning<'_, T> {
        Owning {
            view: View(&self.value),
            _claim: Claim::own(&self.claim),
        }
    }

    /// The value at this instant, for a caller that must not wait: its owner may be half through a change.
    pub(crate) fn peek(&self) -> impl Deref<Target = T> + '_ {
        self.value.read()
    }
}

/// A value that one caller has at a time.
pub(crate) struct Exclusive<T> {
    claim: Claim,
    /// `None` while a caller has it.
    value: Mutex<Option<T>>,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            claim: Claim::default(),
            value: Mutex::new(Some(value)),
        }
    }

    /// Waits until no other thread has the value, and takes it until the guard is dropped.
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

/// The value of an [`Exclusive`]. It is no lock.
pub(crate) struct Taken<'a, T> {
    place: &'a Mutex<Option<T>>,
    /// There until the guard is dropped.
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
        // Before the claim, which is a field, is let go.
        *self.place.lock() = self.value.take();
    }
}

/// The value of a [`Claimed`] that the caller shares or owns.
pub(crate) struct View<'a, T>(&'a RwLock<T>);

impl<T> View<'_, T> {
    /// The value. The guard is a lock: no call of the backing with it.
    pub(crate) fn look(&self) -> impl Deref<Target = T> + '_ {
        self.0.read()
    }
}

/// A share of a [`Claimed`].
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

/// A [`Claimed`] that the caller has alone.
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
    /// The value, to be changed. The guard is a lock: no call of the backing with it.
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
        let look = owned.look();
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
