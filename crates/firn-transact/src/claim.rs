//! [`Claim`]: a read-write lock that a thread may hold while it calls the backing, the file system below the mount.
//!
//! Ordinary locks must not be held then, because the call may hang. Each claim guards one resource: the names of one
//! transaction, one object, or one backup (docs/internals/locks.md).
//!
//! Promises
//! * A thread that holds a claim may call the backing.
//! * A thread that waits for a claim holds no lock, because it may wait for another thread's call of the backing. Debug
//!   builds assert this.
//! * A thread that waits for exclusive use of a claim has priority over threads that want to share it.

use std::ops::{Deref, DerefMut};

use firn_backing::lock::{Mutex, RwLock, assert_none_held};
use parking_lot::Condvar;

/// A claim: many threads may share it, or one thread may hold it exclusively.
#[derive(Default)]
pub(crate) struct Claim {
    state: Mutex<ClaimState>,
    /// Wakes the threads that wait to share the claim.
    readers_may_continue: Condvar,
    /// Wakes a thread that waits for exclusive use.
    writer_may_continue: Condvar,
}

/// The holders of a claim and the threads that wait for it. A *reader* shares it; a *writer* has exclusive use.
#[derive(Default)]
struct ClaimState {
    /// Number of threads that share the claim.
    readers: usize,
    /// Whether a thread holds the claim exclusively.
    has_writer: bool,
    /// Number of threads that wait for exclusive use.
    waiting_writers: usize,
}

impl Claim {
    /// Waits until no thread has or awaits exclusive use of the claim. Returns a guard, which shares the claim.
    #[track_caller]
    pub(crate) fn acquire_shared<C: Deref<Target = Self>>(claim: C) -> SharedClaim<C> {
        assert_none_held("a claim, which waits for a call");
        {
            let mut state = claim.state.lock();
            while state.has_writer || state.waiting_writers > 0 {
                state.wait(&claim.readers_may_continue);
            }
            state.readers += 1;
        }
        SharedClaim(claim)
    }

    /// Waits until no other thread holds the claim. Returns a guard, which holds the claim exclusively.
    #[track_caller]
    pub(crate) fn acquire_exclusive<C: Deref<Target = Self>>(claim: C) -> ExclusiveClaim<C> {
        assert_none_held("a claim, which waits for a call");
        {
            let mut state = claim.state.lock();
            state.waiting_writers += 1;
            while state.has_writer || state.readers > 0 {
                state.wait(&claim.writer_may_continue);
            }
            state.waiting_writers -= 1;
            state.has_writer = true;
        }
        ExclusiveClaim(claim)
    }

    /// Calls `remove_holder` to remove this thread from the holders, and wakes the threads that may have the claim now.
    fn release(&self, remove_holder: impl FnOnce(&mut ClaimState)) {
        let mut state = self.state.lock();
        remove_holder(&mut state);
        if state.waiting_writers == 0 {
            self.readers_may_continue.notify_all();
        } else if state.readers == 0 {
            self.writer_may_continue.notify_one();
        }
    }
}

/// Guard: shares the claim until the guard is dropped.
pub(crate) struct SharedClaim<C: Deref<Target = Claim>>(C);

impl<C: Deref<Target = Claim>> Drop for SharedClaim<C> {
    fn drop(&mut self) {
        self.0.release(|state| state.readers -= 1);
    }
}

/// Guard: holds the claim exclusively until the guard is dropped.
pub(crate) struct ExclusiveClaim<C: Deref<Target = Claim>>(C);

impl<C: Deref<Target = Claim>> Drop for ExclusiveClaim<C> {
    fn drop(&mut self) {
        self.0.release(|state| state.has_writer = false);
    }
}

/// A value with a claim of its own.
///
/// The value does not change while a caller shares it, and only a caller with exclusive use changes it. Each read and
/// each change takes a short lock as well.
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

    /// Waits until no thread has or awaits exclusive use of the value. Returns a guard, which shares the value.
    #[track_caller]
    pub(crate) fn acquire_shared(&self) -> SharedValue<'_, T> {
        SharedValue {
            view: ClaimedView(&self.value),
            _claim: Claim::acquire_shared(&self.claim),
        }
    }

    /// Waits until no other thread uses the value. Returns a guard, which has exclusive use of the value.
    #[track_caller]
    pub(crate) fn acquire_exclusive(&self) -> ExclusiveValue<'_, T> {
        ExclusiveValue {
            view: ClaimedView(&self.value),
            _claim: Claim::acquire_exclusive(&self.claim),
        }
    }

    /// Returns the value at this instant, for a caller that must not wait for the claim. Another thread may be in the
    /// middle of several changes.
    pub(crate) fn read_unclaimed(&self) -> impl Deref<Target = T> + '_ {
        self.value.read()
    }
}

/// A value that only one caller at a time can use.
pub(crate) struct Exclusive<T> {
    claim: Claim,
    /// `None` while a caller uses the value.
    value: Mutex<Option<T>>,
}

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            claim: Claim::default(),
            value: Mutex::new(Some(value)),
        }
    }

    /// Waits until no other thread uses the value. Returns a guard, which has the value until the guard is dropped.
    #[track_caller]
    pub(crate) fn acquire(&self) -> ExclusiveGuard<'_, T> {
        let claim = Claim::acquire_exclusive(&self.claim);
        let value = self.value.lock().take();
        ExclusiveGuard {
            returns_to: &self.value,
            value,
            _claim: claim,
        }
    }
}

/// Guard: the value of an [`Exclusive`]. The guard is not a lock, so its holder may call the backing.
pub(crate) struct ExclusiveGuard<'a, T> {
    /// The field that gets the value back when the guard is dropped.
    returns_to: &'a Mutex<Option<T>>,
    /// `Some` until the guard is dropped.
    value: Option<T>,
    _claim: ExclusiveClaim<&'a Claim>,
}

impl<T> Deref for ExclusiveGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().expect("the guard has the value")
    }
}

impl<T> DerefMut for ExclusiveGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("the guard has the value")
    }
}

impl<T> Drop for ExclusiveGuard<'_, T> {
    fn drop(&mut self) {
        // The value goes back before the field `_claim` is dropped, so the next writer finds the value.
        *self.returns_to.lock() = self.value.take();
    }
}

/// The value of a [`Claimed`] that the caller has acquired, shared or exclusively.
pub(crate) struct ClaimedView<'a, T>(&'a RwLock<T>);

impl<T> ClaimedView<'_, T> {
    /// Returns the value. The returned guard is a lock: its holder must not call the backing.
    pub(crate) fn read(&self) -> impl Deref<Target = T> + '_ {
        self.0.read()
    }
}

/// Guard: shares a [`Claimed`] value.
pub(crate) struct SharedValue<'a, T> {
    view: ClaimedView<'a, T>,
    _claim: SharedClaim<&'a Claim>,
}

impl<'a, T> Deref for SharedValue<'a, T> {
    type Target = ClaimedView<'a, T>;
    fn deref(&self) -> &ClaimedView<'a, T> {
        &self.view
    }
}

/// Guard: has exclusive use of a [`Claimed`] value.
pub(crate) struct ExclusiveValue<'a, T> {
    view: ClaimedView<'a, T>,
    _claim: ExclusiveClaim<&'a Claim>,
}

impl<'a, T> Deref for ExclusiveValue<'a, T> {
    type Target = ClaimedView<'a, T>;
    fn deref(&self) -> &ClaimedView<'a, T> {
        &self.view
    }
}

impl<T> ExclusiveValue<'_, T> {
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
        assert!(is_refused(&|| drop(Claim::acquire_shared(&claim))));
        assert!(is_refused(&|| drop(Claim::acquire_exclusive(&claim))));
        assert!(is_refused(&|| drop(value.acquire_exclusive())));
        drop(guard);
        assert_none_held("a call");
        drop(Claim::acquire_exclusive(&claim));
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_claim_is_no_lock_and_a_look_is_one() {
        let value = Claimed::new(1);
        let owned = value.acquire_exclusive();
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
                        let mut taken = place.acquire();
                        let seen = *taken;
                        std::thread::yield_now();
                        *taken = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*place.acquire(), 4000);
    }
}
