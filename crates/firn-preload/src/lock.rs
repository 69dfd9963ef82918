//! A lock that knows its owner, so that a signal handler finds out that its own thread holds it.
//!
//! The word is 0, or the owner's [`thread_pointer`](sys::thread_pointer), which is even, with bit 0 set
//! while somebody may wait. Owner and lock are one word: there is no instant at which it is held and
//! the owner not known. All zeros is a free lock.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::sys;

const WAITING: u64 = 1;
/// A holder that copies 4 KiB is done by then; longer ones are waited for in the kernel.
const SPINS: u32 = 200;

/// The lock.
pub(crate) struct Lock {
    word: AtomicU64,
}

impl Lock {
    pub(crate) const fn new() -> Self {
        Self { word: AtomicU64::new(0) }
    }

    /// Takes the lock; `false`: this very thread holds it already.
    #[inline(always)]
    pub(crate) fn take(&self) -> bool {
        let me = sys::thread_pointer();
        if self.word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
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
            if found == 0 && self.word.compare_exchange(0, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return true;
            }
            std::hint::spin_loop();
        }
        loop {
            let found = self.word.load(Ordering::Relaxed);
            if found & !WAITING == me {
                return false;
            }
            // Others may wait too: who waited once takes it with the mark.
            let wanted = if found == 0 { me | WAITING } else { found | WAITING };
            if self.word.compare_exchange(found, wanted, Ordering::Acquire, Ordering::Relaxed).is_err() {
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
    pub(crate) fn give(&self) {
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
