//! Decides which thread makes a call of the backing, so that one thread is always free to read requests.
//!
//! Terms
//! * A *reading thread* is a thread of the transport: it reads requests from the kernel. There are `fuse-threads` + 1
//!   of them.
//! * A *call* is work for one request that may hang, because it calls the backing (the directory that the mount serves)
//!   or waits for another request.
//! * A *call slot* is the right of a reading thread to make a call itself. There are `fuse-threads` slots.
//!
//! Ordinarily the thread that read a request also makes its call, because nothing is faster. But a hanging server can
//! block that thread for ever. So a thread that finds no free slot does not make its call itself:
//!
//! 1. It offers the call to the first reading thread that ends its own call.
//! 2. If no thread accepts the call within [`OFFER_TIMEOUT`], it passes the call to the workers.
//!
//! Promises
//! * However many calls hang, a reading thread is free again after [`OFFER_TIMEOUT`] at the latest.
//! * While calls return, only offered calls change threads, and these are few.
//!
//! Work that never calls the backing (a forget, a wait with a callback) needs no slot.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use firn_workers::{Class, Task, Workers};
use parking_lot::Mutex;

use crate::topic::Topic;

/// How long a call is offered to the other reading threads: longer than most calls of a server that answers, and too
/// short to matter if the server does not answer.
const OFFER_TIMEOUT: Duration = Duration::from_millis(2);

/// One call under way, as counted in [`CallSlots::calls`].
const CALL: u64 = 1;
/// One call that ended, as counted in [`CallSlots::calls`].
const ENDED: u64 = 1 << 16;

/// The call slots of a mount, and the call that waits for a free one.
///
/// An offer of a call goes through these states:
/// 1. A thread without a slot stores the call in `offered_call`, and sets `is_offered`.
/// 2. A thread that has a free slot takes the call out and makes it. Or the offering thread takes it out after
///    [`OFFER_TIMEOUT`], and records the failed offer in `ended_at_failed_offer`.
/// 3. After a failed offer, no offer is made until another call has ended.
pub(crate) struct CallSlots {
    workers: Workers,
    /// Number of slots: one less than there are reading threads. Set before the first request.
    slots_max: AtomicU64,
    /// Calls under way in the low 16 bits; calls that ended in the other bits.
    calls: AtomicU64,
    /// The call that the thread without a slot offers.
    offered_call: Mutex<Option<Task>>,
    /// Whether `offered_call` holds a call. A thread whose call ends reads this without the lock.
    is_offered: AtomicBool,
    /// Number of ended calls at the begin of the last offer that no thread accepted. Until another call ends, no thread
    /// will accept a new offer either.
    ended_at_failed_offer: AtomicU64,
}

/// A call slot in use. Dropping it frees the slot and runs a call that is offered.
pub(crate) struct CallSlot<'a>(&'a CallSlots);

impl CallSlots {
    pub(crate) fn new(workers: Workers) -> Self {
        Self {
            workers,
            slots_max: AtomicU64::new(1),
            calls: AtomicU64::new(0),
            offered_call: Mutex::new(None),
            is_offered: AtomicBool::new(false),
            ended_at_failed_offer: AtomicU64::new(u64::MAX),
        }
    }

    /// Sets the number of slots. The transport has one more reading thread.
    pub(crate) fn set_threads(&self, slots_max: usize) {
        self.slots_max.store(slots_max as u64, Ordering::SeqCst);
    }

    /// Takes a slot for a call on this thread. `None`: all slots are in use, so this thread is the last that can read
    /// requests.
    pub(crate) fn acquire(&self) -> Option<CallSlot<'_>> {
        let calls = self.calls.fetch_add(CALL, Ordering::SeqCst);
        if calls_under_way(calls) < self.slots_max.load(Ordering::Relaxed) {
            return Some(CallSlot(self));
        }
        self.calls.fetch_sub(CALL, Ordering::SeqCst);
        None
    }

    /// Lets another thread make a call. Used if [`CallSlots::acquire`] returned no slot.
    pub(crate) fn run_elsewhere(&self, topic: Topic, call: Task) {
        let call = if self.is_offer_useless() {
            Some(call)
        } else {
            self.offer_call(call)
        };
        if let Some(call) = call {
            self.workers.add_on_topic(Class::Call, topic, call);
        }
    }

    /// Whether no call has ended since an offer that no thread took. Another offer would then only cost its timeout.
    fn is_offer_useless(&self) -> bool {
        ended_calls(self.calls.load(Ordering::SeqCst))
            == self.ended_at_failed_offer.load(Ordering::Relaxed)
    }

    /// Offers a call to the other threads that read requests, because this thread has no slot (the right to make a call
    /// that may hang). Returns `None` if the call was taken: by another thread, or by this one if a slot became free.
    ///
    /// Returns the call if no thread takes it within [`OFFER_TIMEOUT`], or if another call is offered already.
    fn offer_call(&self, call: Task) -> Option<Task> {
        let ended_before_offer = ended_calls(self.calls.load(Ordering::SeqCst));
        {
            let mut offered_call = self.offered_call.lock();
            if offered_call.is_some() {
                // Slots became free and were taken again meanwhile, and another thread without a slot offers its call.
                return Some(call);
            }
            *offered_call = Some(call);
            self.is_offered.store(true, Ordering::SeqCst);
        }
        // A race: a call that ended before the store above did not see the offer. But that call freed a slot, so this
        // thread looks for a free slot itself.
        self.run_offered_calls();
        if self.is_offered.load(Ordering::SeqCst) {
            std::thread::sleep(OFFER_TIMEOUT);
        }
        // If another thread has taken the call, nothing is left to do.
        let unclaimed_call = self.take_offered_call()?;
        // Until a further call ends, new offers are useless, and are not made (`is_offer_useless`).
        self.ended_at_failed_offer
            .store(ended_before_offer, Ordering::Relaxed);
        Some(unclaimed_call)
    }

    /// Withdraws the offer. Returns the call unless a thread has taken it.
    fn take_offered_call(&self) -> Option<Task> {
        let mut offer = self.offered_call.lock();
        self.is_offered.store(false, Ordering::SeqCst);
        offer.take()
    }

    /// Runs offered calls on this thread, as long as there are any and a slot is free.
    fn run_offered_calls(&self) {
        while self.is_offered.load(Ordering::SeqCst) {
            let Some(slot) = self.acquire() else { return };
            match self.take_offered_call() {
                Some(call) => call(),
                None => return slot.release_without_offer(),
            }
            slot.release_without_offer();
        }
    }

    /// Moves one call from those under way to those that ended.
    fn count_end(&self) {
        self.calls.fetch_add(ENDED - CALL, Ordering::SeqCst);
    }
}

impl CallSlot<'_> {
    /// Frees the slot without running offered calls: the loop of [`CallSlots::run_offered_calls`] does that.
    fn release_without_offer(self) {
        self.0.count_end();
        std::mem::forget(self);
    }
}

impl Drop for CallSlot<'_> {
    fn drop(&mut self) {
        self.0.count_end();
        self.0.run_offered_calls();
    }
}

fn calls_under_way(calls: u64) -> u64 {
    calls % ENDED
}

fn ended_calls(calls: u64) -> u64 {
    calls / ENDED
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use firn_engine::InodeId;

    use super::*;

    const TEST_TIMEOUT: Duration = Duration::from_secs(60);

    fn call_slots(threads: usize) -> Arc<CallSlots> {
        let slots = CallSlots::new(Workers::default());
        slots.set_threads(threads);
        Arc::new(slots)
    }

    /// Makes a call as the dispatcher does: on this thread if a slot is free, else elsewhere.
    fn run(slots: &CallSlots, topic: Topic, call: impl FnOnce() + Send + 'static) {
        match slots.acquire() {
            Some(_slot) => call(),
            None => slots.run_elsewhere(topic, Box::new(call)),
        }
    }

    /// Starts a reading thread whose call hangs until the returned sender is dropped. Returns once the call hangs.
    fn hang(slots: &Arc<CallSlots>) -> (mpsc::Sender<()>, std::thread::JoinHandle<()>) {
        let (release, hung) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let slots = Arc::clone(slots);
        let thread = std::thread::spawn(move || {
            run(&slots, Topic::Inode(InodeId(1)), move || {
                let _ = begun.send(());
                let _ = hung.recv();
            });
        });
        begins.recv_timeout(TEST_TIMEOUT).expect("the call begins");
        (release, thread)
    }

    /// Makes a call and returns the thread that made it.
    fn thread_of_a_call(slots: &CallSlots) -> std::thread::ThreadId {
        let (sender, receiver) = mpsc::channel();
        run(slots, Topic::Inode(InodeId(2)), move || {
            let _ = sender.send(std::thread::current().id());
        });
        receiver.recv_timeout(TEST_TIMEOUT).expect("the call ends")
    }

    #[test]
    fn calls_are_made_where_they_were_read_while_a_thread_is_left() {
        let slots = call_slots(2);
        let this_thread = std::thread::current().id();
        assert_eq!(thread_of_a_call(&slots), this_thread);
        let (release, hung) = hang(&slots);
        assert_eq!(thread_of_a_call(&slots), this_thread);
        drop(release);
        hung.join().expect("a thread");
        assert_eq!(calls_under_way(slots.calls.load(Ordering::SeqCst)), 0);
    }

    #[test]
    fn regression_the_last_thread_that_reads_makes_no_call() {
        let slots = call_slots(2);
        let this_thread = std::thread::current().id();
        let hung = [hang(&slots), hang(&slots)];
        // No thread takes the first call; the other calls go to the workers without an offer.
        for _ in 0..100 {
            assert_ne!(thread_of_a_call(&slots), this_thread);
        }
        assert!(slots.is_offer_useless());
        for (release, thread) in hung {
            drop(release);
            thread.join().expect("a thread");
        }
        assert_eq!(thread_of_a_call(&slots), this_thread);
    }

    #[test]
    fn what_is_offered_is_done_once_by_a_thread_that_comes_back() {
        const CALLS: u64 = 20_000;
        let slots = call_slots(3);
        let done = Arc::new(AtomicU64::new(0));
        let readers: Vec<_> = (0..4)
            .map(|_| {
                let slots = Arc::clone(&slots);
                let done = Arc::clone(&done);
                std::thread::spawn(move || {
                    for call in 0..CALLS {
                        let done = Arc::clone(&done);
                        run(&slots, Topic::Inode(InodeId(call)), move || {
                            done.fetch_add(1, Ordering::SeqCst);
                        });
                    }
                })
            })
            .collect();
        readers
            .into_iter()
            .for_each(|reader| reader.join().expect("a reader"));
        let deadline = std::time::Instant::now() + TEST_TIMEOUT;
        while done.load(Ordering::SeqCst) < 4 * CALLS {
            assert!(std::time::Instant::now() < deadline, "a call was lost");
            std::thread::yield_now();
        }
        assert_eq!(done.load(Ordering::SeqCst), 4 * CALLS);
        assert_eq!(calls_under_way(slots.calls.load(Ordering::SeqCst)), 0);
        assert!(slots.offered_call.lock().is_none());
    }
}
