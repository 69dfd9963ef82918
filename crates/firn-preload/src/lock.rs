//! A lock that stores its owner, so that a signal handler can find out that its own thread holds it.
//!
//! The lock is one word: 0 if it is free, else the owner's [`thread_pointer`](sys::thread_pointer), which is even. Bit
//! 0 is set while a thread may wait. Because owner and lock are one word, a held lock always has a known owner. All
//! zeros are a free lock.
//!
//! A guarded value is in a [`Locked`], and only its [`Guard`] gives access to it.
//!
//! While the process has one thread, only signal handlers can interfere, and a handler unlocks before it returns. So
//! plain loads and stores are enough then. They save the 4 ns of each locked instruction.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU64, Ordering, compiler_fence};

use crate::sys;

/// Value of the word while no thread holds the lock.
const FREE: u64 = 0;
/// Bit of the word: a thread may wait for the lock.
const WAITING: u64 = 1;
/// Attempts before a thread waits in the kernel. A holder that copies 4 KiB is done by then.
const SPINS: u32 = 200;

/// The lock without a value.
struct Lock {
    word: AtomicU64,
}

/// Address of the C library's byte that is not 0 while the process has one thread. If the C library has no such byte,
/// it is the address of [`ALWAYS_MANY`], so that the process counts as one with several threads.
static ONE_THREAD_BYTE: AtomicPtr<u8> = AtomicPtr::new((&raw const ALWAYS_MANY).cast_mut().cast());
/// Stands for the byte of a C library that has none.
static ALWAYS_MANY: AtomicU8 = AtomicU8::new(0);

/// Looks up the C library's byte (`__libc_single_threaded`, since glibc 2.32).
pub(crate) fn find_one_thread_byte() {
    // SAFETY: the name is a C string.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"__libc_single_threaded".as_ptr()) };
    if !address.is_null() {
        ONE_THREAD_BYTE.store(address.cast(), Ordering::Relaxed);
    }
}

/// Makes the process count as one with several threads for good, because the C library may not know of all threads.
pub(crate) fn assume_many_threads() {
    ONE_THREAD_BYTE.store((&raw const ALWAYS_MANY).cast_mut().cast(), Ordering::SeqCst);
}

/// Whether the process has one thread. Only that thread itself can start further ones.
#[inline(always)]
fn has_one_thread() -> bool {
    // SAFETY: the address is that of a byte of the C library or of this module. The C library changes the byte only
    // while there is one thread.
    unsafe {
        AtomicU8::from_ptr(ONE_THREAD_BYTE.load(Ordering::Relaxed)).load(Ordering::Relaxed) != 0
    }
}

impl Lock {
    const fn new() -> Self {
        Self {
            word: AtomicU64::new(FREE),
        }
    }

    /// Takes the lock. Returns false if this thread holds it already.
    #[inline(always)]
    fn acquire(&self) -> bool {
        let this_thread = sys::thread_pointer();
        if has_one_thread() && self.word.load(Ordering::Relaxed) == FREE {
            self.word.store(this_thread, Ordering::Relaxed);
            // The compiler must not move accesses to the guarded value before the store. Otherwise a signal handler
            // could take the lock in between and find the value half changed.
            compiler_fence(Ordering::SeqCst);
            return true;
        }
        self.replace_word(FREE, this_thread) || self.acquire_slowly(this_thread)
    }

    /// Replaces the word if it has the expected value. Returns whether it had.
    #[inline(always)]
    fn replace_word(&self, expected: u64, new_word: u64) -> bool {
        self.word
            .compare_exchange(expected, new_word, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Takes a lock that another thread holds. Returns false if this thread holds it: this is a signal handler, and to
    /// wait would be for ever. It first tries for a short time, and then waits in the kernel.
    #[cold]
    fn acquire_slowly(&self, this_thread: u64) -> bool {
        for _ in 0..SPINS {
            let word = self.word.load(Ordering::Relaxed);
            if word & !WAITING == this_thread {
                return false;
            }
            if word == FREE && self.replace_word(FREE, this_thread) {
                return true;
            }
            std::hint::spin_loop();
        }
        loop {
            let word = self.word.load(Ordering::Relaxed);
            if word & !WAITING == this_thread {
                return false;
            }
            // Further threads may wait. So a thread that has waited takes the lock with the bit set, and wakes one of
            // them when it unlocks.
            if word == FREE {
                if self.replace_word(FREE, this_thread | WAITING) {
                    return true;
                }
            } else if self.replace_word(word, word | WAITING) {
                sys::futex_wait(self.low_half(), (word | WAITING) as u32);
            }
        }
    }

    /// Unlocks, and wakes a waiting thread.
    #[inline(always)]
    fn release(&self) {
        if has_one_thread() {
            return self.word.store(FREE, Ordering::Release);
        }
        if self.word.swap(FREE, Ordering::Release) & WAITING != 0 {
            sys::futex_wake(self.low_half());
        }
    }

    /// Address of the half of the word that the kernel compares. It has the bit `WAITING`.
    fn low_half(&self) -> *const u32 {
        const { assert!(cfg!(target_endian = "little")) };
        self.word.as_ptr().cast()
    }
}

/// A value and its lock. All zeros are a free lock and a value of zeros.
pub(crate) struct Locked<T> {
    lock: Lock,
    value: UnsafeCell<T>,
}

// SAFETY: only one `Guard` at a time gives access to the value, and `T: Send` allows that thread to use it.
unsafe impl<T: Send> Sync for Locked<T> {}

/// Access to a value whose lock this thread holds. Dropping it unlocks.
pub(crate) struct Guard<'a, T> {
    locked: &'a Locked<T>,
    /// Keeps the guard in its thread, because the lock's word names that thread.
    thread: PhantomData<*mut ()>,
}

impl<T> Locked<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            lock: Lock::new(),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock. Returns `None` if this thread holds it already.
    #[inline(always)]
    pub(crate) fn lock_unless_held_by_thread(&self) -> Option<Guard<'_, T>> {
        // `then_some` would make a guard in any case, and drop it, which unlocks.
        self.lock.acquire().then(|| Guard {
            locked: self,
            thread: PhantomData,
        })
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock until it is dropped, and it is the only one: even a signal handler of this
        // thread gets no second one.
        unsafe { &*self.locked.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and the guard is borrowed mutably.
        unsafe { &mut *self.locked.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.locked.lock.release();
    }
}
