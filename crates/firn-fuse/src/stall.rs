//! Writes that wait for room in the arena.
//!
//! Promises
//! * First come, first served: while one waits, later ones queue behind it, so none starves.
//! * No thread of the transport waits here. The payload is copied aside (one request per waiting writer, at most 1
//!   MiB), and a worker goes on when the engine says that there is room.
//! * What was taken of a write is never lost: a write that fails half way answers with its first part.
//! * A write whose caller is to end or to stop leaves the queue, and answers with what was taken of it, else EINTR.

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
    /// Where it goes.
    pub(crate) target: Target,
    /// Whose write(2) it is; none: a store to a mapping.
    pub(crate) by: Option<Process>,
    /// The answer.
    pub(crate) reply: Reply<R>,
}

impl<R: Responder> PendingWrite<R> {
    pub(crate) fn principal(&self) -> Option<&dyn Principal> {
        self.by.as_ref().map(|by| by as &dyn Principal)
    }
}

struct StalledWrite<R: Responder> {
    write: PendingWrite<R>,
    data: Vec<u8>,
    taken: usize,
}

struct Queue<R: Responder> {
    waiting: VecDeque<StalledWrite<R>>,
    /// Whether the queue will be looked at again: a callback is registered or a worker runs.
    watched: bool,
}

/// The writes that wait.
pub(crate) struct StalledWrites<B: Backing, R: Responder> {
    engine: Arc<Engine<B>>,
    gate: Option<Arc<dyn Gate>>,
    workers: Workers,
    coherence: Arc<Coherence<B>>,
    queue: Mutex<Queue<R>>,
    /// Length of the queue, for status and for the fast path of [`StalledWrites::write`].
    count: Arc<AtomicU64>,
}

impl<B: Backing, R: Responder> StalledWrites<B, R> {
    pub(crate) fn new(
        engine: Arc<Engine<B>>,
        gate: Option<Arc<dyn Gate>>,
        workers: Workers,
        coherence: Arc<Coherence<B>>,
    ) -> Arc<Self> {
        let queue = Queue {
            waiting: VecDeque::new(),
            watched: false,
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

    fn finish(&self, write: PendingWrite<R>, taken: usize, error: Option<Errno>) {
        let PendingWrite { target, reply, .. } = write;
        match error {
            Some(error) if taken == 0 => reply.error(error),
            _ => self.coherence.after_write(target, taken, move || {
                reply.send(Answer::Written(taken as u32))
            }),
        }
    }

    /// Number of writes that wait.
    pub(crate) fn count(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.count)
    }

    /// Carries out a write now, or later if there is no room.
    pub(crate) fn write(self: &Arc<Self>, write: PendingWrite<R>, data: &[u8]) {
        if self.count.load(Ordering::Acquire) > 0 {
            return self.wait(write, data, 0);
        }
        match self.write_through_gate(&write, 0, data) {
            Ok(Written::Bytes(taken)) if taken >= data.len() => {
                self.finish(write, data.len(), None)
            }
            Ok(Written::Bytes(taken)) => self.wait(write, data, taken),
            Ok(Written::Full) => self.wait(write, data, 0),
            Err(error) => self.finish(write, 0, Some(error)),
        }
    }

    /// Gives the engine what is left of a write, of which `taken` bytes are taken.
    fn write_through_gate(
        &self,
        write: &PendingWrite<R>,
        taken: usize,
        left: &[u8],
    ) -> Result<Written, Errno> {
        let _pass = match &self.gate {
            Some(gate) => Some(self.enter(&**gate, write, taken, left.len())?),
            None => None,
        };
        let offset = write.target.offset + taken as u64;
        self.engine
            .write(write.target.handle, offset, left, write.principal())
    }

    /// A write is taken while a transaction is prepared, but for one that changes the backing at once.
    fn enter<'a>(
        &self,
        gate: &'a dyn Gate,
        write: &PendingWrite<R>,
        taken: usize,
        left: usize,
    ) -> Result<Pass<'a>, Errno> {
        let target = &write.target;
        let pass = gate.enter(target.inode);
        let end = end_of(write, taken, left);
        // Asked with the pass: from here on no transaction of the file is prepared.
        let waits = gate.holds_up_changes()
            && self
                .engine
                .writes
                .write_may_wait(target.handle, end, write.principal())
            && self
                .engine
                .writes
                .write_changes_backing(target.handle, end, write.principal())?;
        if !waits {
            return Ok(pass);
        }
        drop(pass);
        gate.enter_change(target.inode)
    }

    /// Whether what is left of a write has to ask the backing, or to wait, before its bytes are taken.
    pub(crate) fn may_wait(&self, write: &PendingWrite<R>, taken: usize, left: usize) -> bool {
        let inode = write.target.inode;
        let is_quiescing = self
            .gate
            .as_ref()
            .is_some_and(|gate| gate.is_quiescing(inode));
        let end = end_of(write, taken, left);
        is_quiescing
            || self
                .engine
                .writes
                .write_may_wait(write.target.handle, end, write.principal())
    }

    fn wait(self: &Arc<Self>, write: PendingWrite<R>, data: &[u8], taken: usize) {
        // Only what is left is kept.
        let stalled = StalledWrite {
            write,
            data: data[taken..].to_vec(),
            taken,
        };
        let this = Arc::downgrade(self);
        let unique = stalled.write.reply.unique();
        let withdraw = move || this.upgrade().is_some_and(|this| this.withdraw(unique));
        stalled.write.reply.set_withdraw(Arc::new(withdraw));
        let mut queue = self.queue.lock();
        queue.waiting.push_back(stalled);
        self.count
            .store(queue.waiting.len() as u64, Ordering::Release);
        if !std::mem::replace(&mut queue.watched, true) {
            drop(queue);
            self.watch();
        }
    }

    /// Answers a write that waits in the queue with what was taken of it; false where it is not there.
    fn withdraw(&self, unique: u64) -> bool {
        let withdrawn = {
            let mut queue = self.queue.lock();
            let mut waiting = queue.waiting.iter();
            let index = waiting.position(|stalled| stalled.write.reply.unique() == unique);
            let Some(withdrawn) = index.and_then(|index| queue.waiting.remove(index)) else {
                return false;
            };
            // One that was popped stays counted.
            self.count.fetch_sub(1, Ordering::AcqRel);
            withdrawn
        };
        self.finish(withdrawn.write, withdrawn.taken, Some(Errno::INTR));
        true
    }

    /// Goes on when there is room. The callback comes from a drain thread, or at once from this one.
    fn watch(self: &Arc<Self>) {
        let this = Arc::clone(self);
        self.engine.room.on_space(Box::new(move |outcome| {
            let workers = this.workers.clone();
            workers.run(Class::Memory, move || match outcome {
                Ok(()) => this.resume(),
                Err(error) => this.fail(error),
            });
        }));
    }

    /// Serves the queue from its head until there is no room or no stalled write. Only one worker at a time is here
    /// (`watched`).
    fn resume(self: &Arc<Self>) {
        while let Some(head) = self.pop() {
            if self.may_wait(&head.write, head.taken, head.data.len()) {
                // Those behind it do not wait for that.
                let this = Arc::clone(self);
                let topic = Topic::Inode(head.write.target.inode);
                self.workers
                    .run_about(Class::Call, topic, move || this.resume_alone(head));
            } else if let Some(left) = self.try_again(head) {
                self.push_front(left);
                return self.watch();
            }
        }
    }

    /// Carries out one that was taken out of the queue; where there is no room it is the next one again.
    fn resume_alone(self: &Arc<Self>, head: StalledWrite<R>) {
        if let Some(left) = self.try_again(head)
            && self.push_front(left)
        {
            self.watch();
        }
    }

    /// Gives back what finds no room.
    fn try_again(&self, mut head: StalledWrite<R>) -> Option<StalledWrite<R>> {
        if !head.write.reply.still_waits().get() {
            self.finish(head.write, head.taken, Some(Errno::INTR));
            return None;
        }
        match self.write_through_gate(&head.write, head.taken, &head.data) {
            Ok(Written::Bytes(bytes)) if bytes >= head.data.len() => {
                let taken = head.taken + head.data.len();
                self.finish(head.write, taken, None);
                return None;
            }
            Ok(Written::Bytes(bytes)) => {
                head.data.drain(..bytes);
                head.taken += bytes;
            }
            Ok(Written::Full) => {}
            Err(error) => {
                self.finish(head.write, head.taken, Some(error));
                return None;
            }
        }
        Some(head)
    }

    /// Takes the head, leaving it counted: new writes must queue behind it while it is served.
    fn pop(&self) -> Option<StalledWrite<R>> {
        let mut queue = self.queue.lock();
        let head = queue.waiting.pop_front();
        let left = queue.waiting.len() as u64 + u64::from(head.is_some());
        self.count.store(left, Ordering::Release);
        queue.watched = head.is_some();
        head
    }

    /// Returns whether the caller has to arrange that the queue is looked at again.
    fn push_front(&self, head: StalledWrite<R>) -> bool {
        let mut queue = self.queue.lock();
        queue.waiting.push_front(head);
        self.count
            .store(queue.waiting.len() as u64, Ordering::Release);
        !std::mem::replace(&mut queue.watched, true)
    }

    /// Nothing can drain: all stalled writes fail with the reason.
    fn fail(self: &Arc<Self>, error: Errno) {
        let failed = {
            let mut queue = self.queue.lock();
            queue.watched = false;
            self.count.store(0, Ordering::Release);
            std::mem::take(&mut queue.waiting)
        };
        for waiting in failed {
            self.finish(waiting.write, waiting.taken, Some(error));
        }
    }
}

/// The end of a write of which `taken` bytes are taken and `left` are left.
fn end_of<R: Responder>(write: &PendingWrite<R>, taken: usize, left: usize) -> u64 {
    write.target.offset.saturating_add((taken + left) as u64)
}
