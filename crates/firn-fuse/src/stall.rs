//! Queue of writes that wait for room in the arena, the shared memory with the bytes that are not in the backing yet.
//!
//! Terms
//! * The *backing* is the directory that the mount serves. Written bytes go there from the arena, which makes room.
//! * A *stalled* write found no room for all of its bytes.
//! * The *accepted* bytes of a write are those that the engine has stored; the other bytes of the payload are the
//!   *remainder*.
//!
//! Promises
//! * First come, first served: while one write is stalled, later writes queue behind it, so none starves. One
//!   exception: a stalled write that has to call the backing leaves the queue, and the writes behind it proceed.
//! * No thread of the transport waits here. The remainder is copied (at most 1 MiB for each waiting program). A worker
//!   writes it when the engine has room.
//! * Accepted bytes are never lost: a write that fails after some bytes answers with the number of its accepted bytes.
//! * A write whose caller is about to die or to stop leaves the queue. It answers with the number of its accepted
//!   bytes, or with EINTR if there are none.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, Principal, Written};
use firn_workers::{Class, Workers};
use parking_lot::Mutex;

use crate::caller::Process;
use crate::coherence::{Coherence, Target};
use crate::gate::{Gate, Pass};
use crate::reply::{Answer, Reply, Responder};
use crate::topic::Topic;

/// A write that is not answered yet.
pub(crate) struct PendingWrite<R: Responder> {
    /// File and offset of the first byte.
    pub(crate) target: Target,
    /// The process that called write(2). `None`: the kernel writes back a page of a mapping.
    pub(crate) process: Option<Process>,
    /// The obligation to answer.
    pub(crate) reply: Reply<R>,
}

impl<R: Responder> PendingWrite<R> {
    pub(crate) fn principal(&self) -> Option<&dyn Principal> {
        let process = self.process.as_ref();
        process.map(|process| process as &dyn Principal)
    }
}

/// A write in the queue.
struct StalledWrite<R: Responder> {
    write: PendingWrite<R>,
    remainder: Vec<u8>,
    accepted_bytes: usize,
}

struct Queue<R: Responder> {
    writes: VecDeque<StalledWrite<R>>,
    /// Whether the queue will be served again: a callback for room is registered, or a worker serves the queue now.
    will_be_served: bool,
}

/// The stalled writes of a mount.
pub(crate) struct WriteQueue<B: Backing, R: Responder> {
    engine: Arc<Engine<B>>,
    gate: Option<Arc<dyn Gate>>,
    workers: Workers,
    coherence: Arc<Coherence<B>>,
    queue: Mutex<Queue<R>>,
    /// Number of stalled writes. The status shows it, and [`WriteQueue::write`] reads it without the lock.
    count: Arc<AtomicU64>,
}

impl<B: Backing, R: Responder> WriteQueue<B, R> {
    /// Makes an empty queue. `gate`, which makes changes wait for transactions, is `None` on a mount without them.
    pub(crate) fn new(
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        workers: Workers,
        coherence: Arc<Coherence<B>>,
    ) -> Arc<Self> {
        let queue = Queue {
            writes: VecDeque::new(),
            will_be_served: false,
        };
        Arc::new(Self {
            engine,
            gate,
            workers,
            coherence,
            queue: Mutex::new(queue),
            count: Arc::default(),
        })
    }

    /// Answers a write that ended after `accepted_bytes` accepted bytes. `error`: set if the write failed. An error is
    /// reported only if no byte was accepted (write(2)).
    fn answer(&self, write: PendingWrite<R>, accepted_bytes: usize, error: Option<Errno>) {
        let PendingWrite { target, reply, .. } = write;
        match error {
            Some(error) if accepted_bytes == 0 => reply.error(error),
            _ => self
                .coherence
                .answer_after_write(target, accepted_bytes, move || {
                    reply.send(Answer::Written(accepted_bytes as u32))
                }),
        }
    }

    /// Returns the counter of stalled writes.
    pub(crate) fn count(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.count)
    }

    /// Carries out a write: at once if there is room and no write is queued, else as soon as there is room.
    pub(crate) fn write(self: &Arc<Self>, write: PendingWrite<R>, data: &[u8]) {
        if self.count.load(Ordering::Acquire) > 0 {
            return self.enqueue(write, data, 0);
        }
        match self.write_through_gate(&write, 0, data) {
            Ok(Written::Bytes(accepted_bytes)) if accepted_bytes >= data.len() => {
                self.answer(write, data.len(), None)
            }
            Ok(Written::Bytes(accepted_bytes)) => self.enqueue(write, data, accepted_bytes),
            Ok(Written::Full) => self.enqueue(write, data, 0),
            Err(error) => self.answer(write, 0, Some(error)),
        }
    }

    /// Writes the remainder through the gate. Returns how many bytes of it the engine accepted.
    fn write_through_gate(
        &self,
        write: &PendingWrite<R>,
        accepted_bytes: usize,
        remainder: &[u8],
    ) -> Result<Written, Errno> {
        let _pass = match &self.gate {
            Some(gate) => {
                Some(self.acquire_write_pass(&**gate, write, accepted_bytes, remainder.len())?)
            }
            None => None,
        };
        let offset = write.target.offset + accepted_bytes as u64;
        self.engine
            .write(write.target.handle, offset, remainder, write.principal())
    }

    /// Waits until transactions allow a write, and returns the right to make it (a *pass*). There are two kinds:
    /// * [`Gate::enter`] for a write that needs only memory. It is allowed while a transaction is prepared.
    /// * [`Gate::enter_change`] for a write that first changes the backing (the directory below the mount). It waits
    ///   for the outcome of the transaction.
    fn acquire_write_pass<'a>(
        &self,
        gate: &'a dyn Gate,
        write: &PendingWrite<R>,
        accepted_bytes: usize,
        remainder_len: usize,
    ) -> Result<Pass<'a>, Errno> {
        let pass = gate.enter(write.target.inode);
        let end = end_of(write, accepted_bytes, remainder_len);
        // The pass is already held, so no transaction of the file can be prepared between this check and the write.
        let needs_only_memory = !gate.holds_up_changes() || !self.changes_backing(write, end)?;
        if needs_only_memory {
            return Ok(pass);
        }
        // Returned first, because a thread may hold only one pass.
        drop(pass);
        gate.enter_change(write.target.inode)
    }

    /// Whether a write up to the offset `end` changes the backing before the engine accepts its bytes.
    fn changes_backing(&self, write: &PendingWrite<R>, end: u64) -> Result<bool, Errno> {
        let handle = write.target.handle;
        let writes = &self.engine.writes;
        // The first question needs no call of the backing.
        if !writes.can_write_wait(handle, end, write.principal()) {
            return Ok(false);
        }
        writes.write_changes_backing(handle, end, write.principal())
    }

    /// Whether the remainder of a write (the bytes that the engine has not stored yet) has to call the backing (the
    /// directory below the mount), or to wait for a transaction. If not, the write needs only memory.
    pub(crate) fn may_wait(
        &self,
        write: &PendingWrite<R>,
        accepted_bytes: usize,
        remainder_len: usize,
    ) -> bool {
        let target = &write.target;
        if let Some(gate) = &self.gate
            && gate.is_quiescing(target.inode)
        {
            return true;
        }
        let end = end_of(write, accepted_bytes, remainder_len);
        self.engine
            .writes
            .can_write_wait(target.handle, end, write.principal())
    }

    /// Puts a write that found no room in the arena (the memory for pending bytes) at the end of the queue. Its first
    /// `accepted_bytes` bytes have found room.
    fn enqueue(self: &Arc<Self>, write: PendingWrite<R>, data: &[u8], accepted_bytes: usize) {
        let stalled = StalledWrite {
            write,
            remainder: data[accepted_bytes..].to_vec(),
            accepted_bytes,
        };
        let reply = &stalled.write.reply;
        let unique = reply.unique();
        let weak = Arc::downgrade(self);
        let withdraw = move || match weak.upgrade() {
            Some(writes) => writes.withdraw(unique),
            None => false,
        };
        // After a signal to the caller, this takes the write out of the queue and answers it.
        reply.set_withdraw(Arc::new(withdraw));
        let mut queue = self.queue.lock();
        queue.writes.push_back(stalled);
        self.count
            .store(queue.writes.len() as u64, Ordering::Release);
        // If a callback for room is registered, or a worker is at the queue, this write is served too.
        let is_served_already = std::mem::replace(&mut queue.will_be_served, true);
        // Unlocked first, because `register_for_room` may serve the queue at once, on this thread.
        drop(queue);
        if !is_served_already {
            self.register_for_room();
        }
    }

    /// Takes a write out of the queue because of a signal to its caller. Answers it with the number of its accepted
    /// (stored) bytes, or with EINTR if there are none. Returns false if the write is not in the queue: then another
    /// thread answers it.
    fn withdraw(&self, unique: u64) -> bool {
        let mut queue = self.queue.lock();
        let mut writes = queue.writes.iter();
        let Some(index) = writes.position(|stalled| stalled.write.reply.unique() == unique) else {
            return false;
        };
        let Some(withdrawn) = queue.writes.remove(index) else {
            return false;
        };
        // Not set to the length of the queue: a write that `take_head` took out is being served and must remain
        // counted.
        self.count.fetch_sub(1, Ordering::AcqRel);
        // The answer is sent without the lock.
        drop(queue);
        self.answer(withdrawn.write, withdrawn.accepted_bytes, Some(Errno::INTR));
        true
    }

    /// Registers a callback for the next room in the arena. It runs on a drain thread, or at once on this thread.
    fn register_for_room(self: &Arc<Self>) {
        let writes = Arc::clone(self);
        self.engine
            .room
            .call_when_space_is_free(Box::new(move |outcome| {
                let workers = writes.workers.clone();
                workers.run(Class::Memory, move || match outcome {
                    Ok(()) => writes.serve_queue(),
                    Err(error) => writes.fail(error),
                });
            }));
    }

    /// Serves the queue from its head, until there is no room or no stalled write. `will_be_served` ensures that only
    /// one worker at a time does so.
    fn serve_queue(self: &Arc<Self>) {
        while let Some(head) = self.take_head() {
            if self.may_wait(&head.write, head.accepted_bytes, head.remainder.len()) {
                // This write calls the backing, or waits for a transaction. The writes behind it need only memory.
                let writes = Arc::clone(self);
                let topic = Topic::Inode(head.write.target.inode);
                self.workers
                    .run_on_topic(Class::Call, topic, move || writes.serve_detached_head(head));
            } else if let Some(stalled) = self.write_remainder(head) {
                self.return_head(stalled);
                return self.register_for_room();
            }
        }
    }

    /// Carries out a write that `serve_queue` took out of the queue. If there is no room, it becomes the head again.
    fn serve_detached_head(self: &Arc<Self>, head: StalledWrite<R>) {
        if let Some(stalled) = self.write_remainder(head)
            && self.return_head(stalled)
        {
            self.register_for_room();
        }
    }

    /// Writes the remaining bytes of a write that found no room in the arena (the memory for pending bytes). Returns
    /// the write if some of them find no room now. `None`: the write is answered.
    fn write_remainder(&self, mut stalled: StalledWrite<R>) -> Option<StalledWrite<R>> {
        // The caller got an early answer because of a signal, so its remaining bytes are not written.
        if !stalled.write.reply.caller_status().is_waiting() {
            self.answer(stalled.write, stalled.accepted_bytes, Some(Errno::INTR));
            return None;
        }
        let written =
            self.write_through_gate(&stalled.write, stalled.accepted_bytes, &stalled.remainder);
        let newly_accepted = match written {
            Ok(Written::Bytes(bytes)) => bytes,
            Ok(Written::Full) => return Some(stalled),
            Err(error) => {
                self.answer(stalled.write, stalled.accepted_bytes, Some(error));
                return None;
            }
        };
        if newly_accepted >= stalled.remainder.len() {
            let accepted_bytes = stalled.accepted_bytes + stalled.remainder.len();
            self.answer(stalled.write, accepted_bytes, None);
            return None;
        }
        stalled.remainder.drain(..newly_accepted);
        stalled.accepted_bytes += newly_accepted;
        Some(stalled)
    }

    /// Takes the head out of the queue. The head remains counted, so that new writes queue behind it while it is
    /// served. If the queue is empty, clears `will_be_served`.
    fn take_head(&self) -> Option<StalledWrite<R>> {
        let mut queue = self.queue.lock();
        let head = queue.writes.pop_front();
        let stalled_count = queue.writes.len() as u64 + u64::from(head.is_some());
        self.count.store(stalled_count, Ordering::Release);
        queue.will_be_served = head.is_some();
        head
    }

    /// Puts a write back at the head. Returns true if nothing will serve the queue: then the caller has to call
    /// [`WriteQueue::register_for_room`].
    fn return_head(&self, head: StalledWrite<R>) -> bool {
        let mut queue = self.queue.lock();
        queue.writes.push_front(head);
        self.count
            .store(queue.writes.len() as u64, Ordering::Release);
        !std::mem::replace(&mut queue.will_be_served, true)
    }

    /// Answers all stalled writes with an error: nothing can be drained, so there will be no room.
    fn fail(self: &Arc<Self>, error: Errno) {
        let failed = {
            let mut queue = self.queue.lock();
            queue.will_be_served = false;
            self.count.store(0, Ordering::Release);
            std::mem::take(&mut queue.writes)
        };
        for stalled in failed {
            self.answer(stalled.write, stalled.accepted_bytes, Some(error));
        }
    }
}

/// Returns the file offset after the last byte of a write.
fn end_of<R: Responder>(
    write: &PendingWrite<R>,
    accepted_bytes: usize,
    remainder_len: usize,
) -> u64 {
    let offset = write.target.offset;
    offset.saturating_add((accepted_bytes + remainder_len) as u64)
}
