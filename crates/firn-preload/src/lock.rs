//! A lock that knows its owner, so that a signal handler finds out that its own thread holds it.
//!
//! The word is 0, or the owner's [`thread_pointer`](sys::thread_pointer), which is even, with bit 0 set while a thread
//! may wait. Owner and lock are one word: there is no instant at which it is held and the owner not known. All zeros is
//! a free lock.
//!
//! What a lock guards lies in a [`Locked`], and is reached by its [`Guard`] alone.
//!
//! While the process has one thread, the lock is only for signal handlers: what runs in between gives it back
//! before it returns, so plain loads and stores do. A locked instruction takes 4 ns each.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering, compiler_fence};

use crate::sys;

const WAITING: u64 = 1;
/// A holder that copies 4 KiB is done by then; longer ones are waited for in the kernel.
const SPINS: u32 = 200;

/// The lock.
struct Lock {
    word: AtomicU64,
}

/// The C library's word: not 0 while the process has one thread. Where there is no such word: as if many.
static SINGLE: AtomicPtr<u8> = AtomicPtr::new((&raw const MANY).cast_mut().cast());
static MANY: AtomicU8 = AtomicU8::new(0);

/// Looks for the C library's word (glibc 2.32, `sys/single_threaded.h`).
pub(crate) fn find_thread_word() {
    // SAFETY: the name is a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !found.is_null() {
        SINGLE.store(found.cast(), Ordering::Relaxed);
    }
}

/// Threads may come that the C library does not know of.
pub(crate) fn never_single() {
    SINGLE.store((&raw const MANY).cast_mut().cast(), Ordering::SeqCst);
}

/// Whether the process has one thread. It may have more afterwards only by what this thread does.
#[inline(always)]
fn is_single() -> bool {
    // SAFETY: a byte of the C library, or ours. The library changes it while there is one thread only.
    unsafe { AtomicU8::from_ptr(SINGLE.load(Ordering::Relaxed)).load(Ordering::Relaxed) != 0 }
}

impl Lock {
    const fn new() -> Self {
        Self {
            word: AtomicU64::new(0),
        }
    }

    /// Takes the lock; `false`: this very thread holds it already.
    #[inline(always)]
    fn take(&self) -> bool {
        let me = sys::thread_pointer();
        if is_single() && self.word.load(Ordering::Relaxed) == 0 {
            self.word.store(me, Ordering::Relaxed);
            // The compiler must not move what the lock guards before it: a handler would find it half done.
            compiler_fence(Ordering::SeqCst);
            return true;
        }
        if self
            .word
            .compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
        {
            return true;
        }
        self.take_slowly(me)
    }

    #[cold]
    fn take_slowly(&self, me: u64) -> bool {
        for _ in 0..SPINS {
            let found = self.word.load(Ordering::Relaxed);
            if found & !WAITING == me {
                return false;
            }
            if found == 0
                && self
                    .word
                    .compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return true;
            }
            std::hint::spin_loop();
        }
        loop {
            let found = self.word.load(Ordering::Relaxed);
            if found & !WAITING == me {
                return false;
            }
            // Other threads may wait too: a thread that waited once takes the lock with the mark.
            let wanted = if found == 0 {
                me | WAITING
            } else {
                found | WAITING
            };
            if self
                .word
                .compare_exchange(found, wanted, Ordering::Acquire, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            if found == 0 {
                return true;
            }
            sys::futex_wait(self.low_half(), wanted as u32);
        }
    }

    /// Gives the lock back.
    #[inline(always)]
    fn give(&self) {
        if is_single() {
            return self.word.store(0, Ordering::Release);
        }
        if self.word.swap(0, Ordering::Release) & WAITING != 0 {
            sys::futex_wake(self.low_half());
        }
    }

    /// The half that the kernel compares; it holds the mark.
    fn low_half(&self) -> *const u32 {
        const { assert!(cfg!(target_endian = "little")) };
        self.word.as_ptr().cast()
    }
}

/// A value and its lock. All zeros: a free lock, and a value of zeros.
pub(crate) struct Locked<T> {
    lock: Lock,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one `Guard` at a time, whichever thread has it, and may be sent to that thread.
unsafe impl<T: Send> Sync for Locked<T> {}

/// The lock of a value, taken by this thread.
pub(crate) struct Guard<'a, T> {
    of: &'a Locked<T>,
    /// The lock knows its owner: no other thread can give it back.
    thread: PhantomData<*mut ()>,
}

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            lock: Lock::new(),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock; `None`: this very thread holds it already.
    #[inline(always)]
    pub(crate) fn take_lock(&self) -> Option<Guard<'_, T>> {
        // Not made before the lock is taken: a guard that is dropped gives the lock back.
        self.lock.take().then(|| Guard {
            of: self,
            thread: PhantomData,
        })
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the lock is taken until this guard is dropped, and it has one guard; a signal handler of this thread
        // gets none.
        unsafe { &*self.of.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as for the shared borrow, and the guard itself is borrowed alone.
        unsafe { &mut *self.of.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.of.lock.give();
    }
}
