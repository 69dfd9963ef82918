//! Which thread carries out what the kernel asks for.
//!
//! A call of the backing may take for ever, and so may the thread that makes it. Ordinarily the thread of the transport
//! that read a request also carries it out: nothing is faster. But there is one thread more than may be in such calls
//! (`fuse-threads`). What that thread reads while all others are in calls, it does not carry out. It offers the request
//! to the first of the others that comes back; if none does within [`PATIENCE`], it leaves the request to the workers.
//!
//! Promises
//! * A thread that reads requests is free, or will be within [`PATIENCE`], however many calls hang.
//! * As long as calls return, none of them changes threads but the few that are offered.
//!
//! What keeps it so: the dispatcher says what a request is about. A call that may ask the backing or wait for another
//! request is made with a slot ([`CallSlots::acquire`]) on this thread, and without one by
//! [`CallSlots::run_elsewhere`]. The rest (forgetting, flushing, waiting with a callback) is done by the thread that
//! read the request, whichever that is.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use firn_workers::{Class, Task, Workers};
use parking_lot::Mutex;

use crate::topic::Topic;

/// How long a request is offered to threads that come back from their calls. Longer than what most calls take where a
/// server answers, and not felt where it does not.
const PATIENCE: Duration = Duration::from_millis(2);

/// One call under way, in [`CallSlots::calls`].
const CALL: u64 = 1;
/// One call that ended, there.
const ENDED: u64 = 1 << 16;

/// The calls that threads of the transport are in.
pub(crate) struct CallSlots {
    workers: Workers,
    /// The threads that may be in calls: all but one. Set before the first request.
    max: AtomicU64,
    /// Calls under way in the low 16 bits, calls that ended in the others.
    calls: AtomicU64,
    /// The call that the thread in no call wants to hand over.
    offer: Mutex<Option<Task>>,
    is_offered: AtomicBool,
    /// How many calls had ended when an offer was last of no use: while that has not changed, none will be.
    vain_offer_at: AtomicU64,
}

/// A call on this thread; counts until it is dropped.
pub(crate) struct CallSlot<'a>(&'a CallSlots);

impl CallSlots {
    pub(crate) fn new(workers: Workers) -> Self {
        Self {
            workers,
            max: AtomicU64::new(1),
            calls: AtomicU64::new(0),
            offer: Mutex::new(None),
            is_offered: AtomicBool::new(false),
            vain_offer_at: AtomicU64::new(u64::MAX),
        }
    }

    /// This many threads may be in calls; one more reads requests.
    pub(crate) fn set_threads(&self, max: usize) {
        self.max.store(max as u64, Ordering::SeqCst);
    }

    /// Leave to make a call that may hang, on this thread; `None` where it is the last one that reads requests.
    pub(crate) fn acquire(&self) -> Option<CallSlot<'_>> {
        if under_way(self.calls.fetch_add(CALL, Ordering::SeqCst))
            < self.max.load(Ordering::Relaxed)
        {
            return Some(CallSlot(self));
        }
        self.calls.fetch_sub(CALL, Ordering::SeqCst);
        None
    }

    /// Runs a call for which [`CallSlots::acquire`] had no slot.
    pub(crate) fn run_elsewhere(&self, topic: Topic, call: Task) {
        let call = if self.is_stuck() {
            Some(call)
        } else {
            self.offer(call)
        };
        if let Some(call) = call {
            self.workers.add_about(Class::Call, topic, call);
        }
    }

    /// Whether no call ended since an offer was of no use.
    fn is_stuck(&self) -> bool {
        ended(self.calls.load(Ordering::SeqCst)) == self.vain_offer_at.load(Ordering::Relaxed)
    }

    /// Offers a call to the other threads; gives it back if none of them came.
    fn offer(&self, call: Task) -> Option<Task> {
        let before = ended(self.calls.load(Ordering::SeqCst));
        {
            let mut offer = self.offer.lock();
            if offer.is_some() {
                // Threads came and went, and another one offers already.
                return Some(call);
            }
            *offer = Some(call);
            self.is_offered.store(true, Ordering::SeqCst);
        }
        // A thread that came back before it could see the offer left room for this thread.
        self.run_offered();
        if self.is_offered.load(Ordering::SeqCst) {
            std::thread::sleep(PATIENCE);
        }
        let call = self.take_offer()?;
        self.vain_offer_at.store(before, Ordering::Relaxed);
        Some(call)
    }

    fn take_offer(&self) -> Option<Task> {
        let mut offer = self.offer.lock();
        self.is_offered.store(false, Ordering::SeqCst);
        offer.take()
    }

    /// Runs what is offered, if there is room.
    fn run_offered(&self) {
        while self.is_offered.load(Ordering::SeqCst) {
            let Some(slot) = self.acquire() else { return };
            match self.take_offer() {
                Some(call) => call(),
                None => return slot.release_quietly(),
            }
            slot.release_quietly();
        }
    }

    fn count_end(&self) {
        self.calls.fetch_add(ENDED - CALL, Ordering::SeqCst);
    }
}

impl CallSlot<'_> {
    /// Without looking whether a call is offered.
    fn release_quietly(self) {
        self.0.count_end();
        std::mem::forget(self);
    }
}

impl Drop for CallSlot<'_> {
    fn drop(&mut self) {
        self.0.count_end();
        self.0.run_offered();
    }
}

fn under_way(calls: u64) -> u64 {
    calls % ENDED
}

fn ended(calls: u64) -> u64 {
    calls / ENDED
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use firn_engine::InodeId;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn call_slots(threads: usize) -> Arc<CallSlots> {
        let slots = CallSlots::new(Workers::default());
        slots.set_threads(threads);
        Arc::new(slots)
    }

    /// A request, as the dispatcher carries it out.
    fn run(slots: &CallSlots, topic: Topic, call: impl FnOnce() + Send + 'static) {
        match slots.acquire() {
            Some(_slot) => call(),
            None => slots.run_elsewhere(topic, Box::new(call)),
        }
    }

    /// Makes a call of it hang, on a thread that stands for one of the transport's; it hangs until the sender is dropped.
    fn hang(slots: &Arc<CallSlots>) -> (mpsc::Sender<()>, std::thread::JoinHandle<()>) {
        let (release, hung) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let slots = Arc::clone(slots);
        let thread = std::thread::spawn(move || {
            run(&slots, Topic::Inode(InodeId(1)), move || {
                let _ = tell.send(());
                let _ = hung.recv();
            });
        });
        told.recv_timeout(LIMIT).expect("the call begins");
        (release, thread)
    }

    /// Which thread a call that is made now is on.
    fn thread_of_a_call(slots: &CallSlots) -> std::thread::ThreadId {
        let (tell, told) = mpsc::channel();
        run(slots, Topic::Inode(InodeId(2)), move || {
            let _ = tell.send(std::thread::current().id());
        });
        told.recv_timeout(LIMIT).expect("the call ends")
    }

    #[test]
    fn calls_are_made_where_they_were_read_while_a_thread_is_left() {
        let slots = call_slots(2);
        let here = std::thread::current().id();
        assert_eq!(thread_of_a_call(&slots), here);
        let (release, hung) = hang(&slots);
        assert_eq!(thread_of_a_call(&slots), here);
        drop(release);
        hung.join().expect("a thread");
        assert_eq!(under_way(slots.calls.load(Ordering::SeqCst)), 0);
    }

    #[test]
    fn regression_the_last_thread_that_reads_makes_no_call() {
        let slots = call_slots(2);
        let here = std::thread::current().id();
        let hung = [hang(&slots), hang(&slots)];
        // Not the second time either, when nothing is offered any more.
        for _ in 0..100 {
            assert_ne!(thread_of_a_call(&slots), here);
        }
        assert!(slots.is_stuck());
        for (release, thread) in hung {
            drop(release);
            thread.join().expect("a thread");
        }
        assert_eq!(thread_of_a_call(&slots), here);
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
        let deadline = std::time::Instant::now() + LIMIT;
        while done.load(Ordering::SeqCst) < 4 * CALLS {
            assert!(std::time::Instant::now() < deadline, "a call was lost");
            std::thread::yield_now();
        }
        assert_eq!(done.load(Ordering::SeqCst), 4 * CALLS);
        assert_eq!(under_way(slots.calls.load(Ordering::SeqCst)), 0);
        assert!(slots.offer.lock().is_none());
    }
}
