//! Locks that must not be held across a call of a backing (the file system below Firn).
//!
//! A call of a backing may wait for a server without end. If a thread held a lock meanwhile, all threads that want the
//! lock would wait too. [`Mutex`] and [`RwLock`] are those of `parking_lot`. With debug assertions, each thread also
//! counts the guards that it holds, and [`assert_none_held`] checks the count: the simulated backing calls it first in
//! each call.

use std::ops::{Deref, DerefMut};

use parking_lot::Condvar;

/// While it lives, counts as one guard of the thread that made it.
struct GuardCount(());

#[cfg(debug_assertions)]
thread_local! {
    static HELD_GUARDS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

impl GuardCount {
    fn increment() -> Self {
        #[cfg(debug_assertions)]
        HELD_GUARDS.with(|count| count.set(count.get() + 1));
        Self(())
    }
}

impl Drop for GuardCount {
    fn drop(&mut self) {
        // The counter no longer exists if the guard is dropped while the thread's local variables are destroyed.
        #[cfg(debug_assertions)]
        let _ = HELD_GUARDS.try_with(|count| count.set(count.get() - 1));
    }
}

/// Panics if the calling thread holds a lock of this module. `call`: name of the call that it is about to make.
#[track_caller]
pub fn assert_none_held(call: &str) {
    #[cfg(debug_assertions)]
    if !std::thread::panicking() {
        let held = HELD_GUARDS.with(std::cell::Cell::get);
        assert!(
            held == 0,
            "{held} locks are held across `{call}` of the backing"
        );
    }
    let _ = call;
}

/// A [`parking_lot::Mutex`] whose guards are counted.
#[derive(Debug, Default)]
pub struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    /// Makes a lock that guards `value`.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.0.lock();
        MutexGuard {
            guard,
            _count: GuardCount::increment(),
        }
    }

    /// Takes the lock if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.0.try_lock()?;
        Some(MutexGuard {
            guard,
            _count: GuardCount::increment(),
        })
    }
}

/// A lock of a [`Mutex`], held until this is dropped.
pub struct MutexGuard<'a, T> {
    guard: parking_lot::MutexGuard<'a, T>,
    _count: GuardCount,
}

impl<T> MutexGuard<'_, T> {
    /// Releases the lock, runs `work`, and takes the lock again.
    pub fn unlocked<R>(&mut self, work: impl FnOnce() -> R) -> R {
        parking_lot::MutexGuard::unlocked(&mut self.guard, || run_uncounted(work))
    }

    /// Waits until `condition` is notified. The lock is released during the wait.
    pub fn wait(&mut self, condition: &Condvar) {
        condition.wait(&mut self.guard);
    }

    /// Waits until `condition` is notified, for at most `time`. The lock is released during the wait.
    pub fn wait_for(&mut self, condition: &Condvar, time: std::time::Duration) {
        condition.wait_for(&mut self.guard, time);
    }
}

/// Runs `work` without counting the guard that is released for it.
fn run_uncounted<R>(work: impl FnOnce() -> R) -> R {
    struct CountAgain;
    impl Drop for CountAgain {
        fn drop(&mut self) {
            std::mem::forget(GuardCount::increment());
        }
    }
    drop(GuardCount(()));
    let _again = CountAgain;
    work()
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// A [`parking_lot::RwLock`] whose guards are counted.
#[derive(Debug, Default)]
pub struct RwLock<T>(parking_lot::RwLock<T>);

impl<T> RwLock<T> {
    /// Makes a lock that guards `value`.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }

    /// Waits for the lock for reading, which several threads may have at a time.
    pub fn read(&self) -> impl Deref<Target = T> + '_ {
        let guard = self.0.read();
        RwLockGuard {
            guard,
            _count: GuardCount::increment(),
        }
    }

    /// Waits for the lock for writing, which one thread may have at a time.
    pub fn write(&self) -> impl DerefMut<Target = T> + '_ {
        let guard = self.0.write();
        RwLockGuard {
            guard,
            _count: GuardCount::increment(),
        }
    }
}

struct RwLockGuard<G> {
    guard: G,
    _count: GuardCount,
}

impl<G: Deref> Deref for RwLockGuard<G> {
    type Target = G::Target;
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for RwLockGuard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;

    fn is_refused() -> bool {
        std::panic::catch_unwind(|| assert_none_held("read_at")).is_err()
    }

    #[test]
    fn a_guard_is_counted_while_it_lives() {
        let lock = Mutex::new(1);
        assert!(!is_refused());
        let mut guard = lock.lock();
        assert!(is_refused());
        guard.unlocked(|| assert!(!is_refused()));
        assert!(is_refused());
        drop(guard);
        assert!(!is_refused());
    }

    #[test]
    fn other_threads_locks_do_not_count() {
        let lock = RwLock::new(1);
        let _guard = lock.read();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(!is_refused()));
        });
        assert!(is_refused());
    }
}
