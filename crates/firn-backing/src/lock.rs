//! Locks that are never held across a call of a backing.
//!
//! A call of a backing may take as long as the server behind it likes. A thread that holds a lock meanwhile makes all
//! others that want the lock wait for the server. [`Mutex`] and [`RwLock`] are those of `parking_lot`; where debug
//! assertions are on, each thread counts the guards that it holds, and [`assert_none_held`] is what the simulated
//! backing asks first in each of its calls.

use std::ops::{Deref, DerefMut};

use parking_lot::Condvar;

/// Counts the guards of one thread while it lives.
struct Held(());

#[cfg(debug_assertions)]
thread_local! {
    static HELD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

impl Held {
    fn count() -> Self {
        #[cfg(debug_assertions)]
        HELD.with(|held| held.set(held.get() + 1));
        Self(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // A guard that is dropped while the thread's own variables are destroyed is not counted.
        #[cfg(debug_assertions)]
        let _ = HELD.try_with(|held| held.set(held.get() - 1));
    }
}

/// Panics where the calling thread holds a lock of this module. `call`: what it is about to do.
#[track_caller]
pub fn assert_none_held(call: &str) {
    #[cfg(debug_assertions)]
    if !std::thread::panicking() {
        let held = HELD.with(std::cell::Cell::get);
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
    /// Guards `value`.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }
    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let guard = self.0.lock();
        MutexGuard {
            guard,
            _held: Held::count(),
        }
    }
    /// The lock, if it is free.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = self.0.try_lock()?;
        Some(MutexGuard {
            guard,
            _held: Held::count(),
        })
    }
}

/// A lock of a [`Mutex`].
pub struct MutexGuard<'a, T> {
    guard: parking_lot::MutexGuard<'a, T>,
    _held: Held,
}

impl<T> MutexGuard<'_, T> {
    /// Lets go of the lock while `work` runs, and takes it again.
    pub fn unlocked<R>(&mut self, work: impl FnOnce() -> R) -> R {
        parking_lot::MutexGuard::unlocked(&mut self.guard, || uncounted(work))
    }
    /// Waits for `condition` to be notified; the lock is free meanwhile.
    pub fn wait(&mut self, condition: &Condvar) {
        condition.wait(&mut self.guard);
    }
    /// Waits for `condition` to be notified, for at most `time`; the lock is free during the wait.
    pub fn wait_for(&mut self, condition: &Condvar, time: std::time::Duration) {
        condition.wait_for(&mut self.guard, time);
    }
}

/// Runs `work`, which the guard that lets go for it is not held across.
fn uncounted<R>(work: impl FnOnce() -> R) -> R {
    struct CountAgain;
    impl Drop for CountAgain {
        fn drop(&mut self) {
            std::mem::forget(Held::count());
        }
    }
    drop(Held(()));
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
    /// Guards `value`.
    pub const fn new(value: T) -> Self {
        Self(parking_lot::RwLock::new(value))
    }
    /// Waits for the lock that many may have.
    pub fn read(&self) -> impl Deref<Target = T> + '_ {
        let guard = self.0.read();
        RwLockGuard {
            guard,
            _held: Held::count(),
        }
    }
    /// Waits for the lock that one may have.
    pub fn write(&self) -> impl DerefMut<Target = T> + '_ {
        let guard = self.0.write();
        RwLockGuard {
            guard,
            _held: Held::count(),
        }
    }
}

struct RwLockGuard<G> {
    guard: G,
    _held: Held,
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
