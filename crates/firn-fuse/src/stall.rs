//! Writes that wait for room in the arena.
//!
//! Promises
//! * First come, first served: while one waits, later ones queue behind it, so none starves.
//! * No FUSE thread waits here: the payload is copied aside (one request per waiting writer, at most
//!   1 MiB) and a worker goes on when the engine says that there is room.
//! * What was taken of a write is never lost: a write that fails half way answers with its first part.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_backing::{Backing, Errno};
use firn_engine::{Engine, InodeId, Principal, Written};
use fuser::ReplyWrite;
use parking_lot::Mutex;

use crate::caller::Process;
use crate::coherence::{Coherence, Target};
use crate::failures::Answer;
use crate::workers::{Topic, Workers};

/// One write request.
pub(crate) struct Write<B: Backing> {
    /// Where it goes.
    pub(crate) target: Target,
    /// Whose write(2) it is; none: a store to a mapping.
    pub(crate) by: Option<Process>,
    /// The answer.
    pub(crate) reply: Answer<B, ReplyWrite>,
}

impl<B: Backing> Write<B> {
    pub(crate) fn by(&self) -> Option<&dyn Principal> {
        self.by.as_ref().map(|by| by as &dyn Principal)
    }
}

struct Waiting<B: Backing> {
    write: Write<B>,
    data: Vec<u8>,
    taken: usize,
}

struct Queue<B: Backing> {
    waiting: VecDeque<Waiting<B>>,
    /// Whether somebody will look at the queue again: a callback is registered or a worker runs.
    watched: bool,
}

/// The queue.
pub(crate) struct Stalled<B: Backing> {
    engine: Arc<Engine<B>>,
    workers: Workers,
    coherence: Arc<Coherence<B>>,
    queue: Mutex<Queue<B>>,
    /// Length of the queue, for status and for the fast path of [`Stalled::write`].
    count: Arc<AtomicU64>,
}

impl<B: Backing> Stalled<B> {
    pub(crate) fn new(
        engine: Arc<Engine<B>>,
        workers: Workers,
        coherence: Arc<Coherence<B>>,
    ) -> Arc<Self> {
        let queue = Queue {
            waiting: VecDeque::new(),
            watched: false,
        };
        Arc::new(Self {
            engine,
            workers,
            coherence,
            queue: Mutex::new(queue),
            count: Arc::default(),
        })
    }

    fn finish(&self, write: Write<B>, taken: usize, error: Option<Errno>) {
        let Write { target, reply, .. } = write;
        match error {
            Some(error) if taken == 0 => reply.error(error),
            _ => self
                .coherence
                .after_write(target, taken, move || reply.success().written(taken as u32)),
        }
    }

    /// Number of writes that wait.
    pub(crate) fn count(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.count)
    }

    /// Carries out a write now, or later if there is no room.
    pub(crate) fn write(self: &Arc<Self>, write: Write<B>, data: &[u8]) {
        if self.count.load(Ordering::Acquire) > 0 {
            return self.wait(write, data, 0);
        }
        let target = write.target;
        match self
            .engine
            .write(target.handle, target.offset, data, write.by())
        {
            Ok(Written::Bytes(taken)) if taken >= data.len() => {
                self.finish(write, data.len(), None)
            }
            Ok(Written::Bytes(taken)) => self.wait(write, data, taken),
            Ok(Written::Full) => self.wait(write, data, 0),
            Err(error) => self.finish(write, 0, Some(error)),
        }
    }

    fn wait(self: &Arc<Self>, write: Write<B>, data: &[u8], taken: usize) {
        // Only what is left is kept.
        let kept = Waiting {
            write,
            data: data[taken..].to_vec(),
            taken,
        };
        let mut queue = self.queue.lock();
        queue.waiting.push_back(kept);
        self.count
            .store(queue.waiting.len() as u64, Ordering::Release);
        if !std::mem::replace(&mut queue.watched, true) {
            drop(queue);
            self.watch();
        }
    }

    /// Goes on when there is room. The callback comes from a drain thread, or at once from this one.
    fn watch(self: &Arc<Self>) {
        let this = Arc::clone(self);
        self.engine.on_space(Box::new(move |outcome| {
            let workers = this.workers.clone();
            workers.run(move || match outcome {
                Ok(()) => this.go_on(),
                Err(error) => this.fail(error),
            });
        }));
    }

    /// Serves the queue from its head until there is no room or nobody waits. Only one worker at a
    /// time is here (`watched`).
    fn go_on(self: &Arc<Self>) {
        while let Some(head) = self.pop() {
            if self.asks_backing(&head) {
                // Those behind it do not wait for that.
                let this = Arc::clone(self);
                let topic = Topic::Inode(InodeId(head.write.target.inode.0));
                self.workers
                    .run_about(topic, move || this.go_on_alone(head));
            } else if let Some(left) = self.try_again(head) {
                self.push_front(left);
                return self.watch();
            }
        }
    }

    fn asks_backing(&self, head: &Waiting<B>) -> bool {
        let target = &head.write.target;
        let end = target
            .offset
            .saturating_add((head.taken + head.data.len()) as u64);
        self.engine
            .write_may_wait(target.handle, end, head.write.by())
    }

    /// Carries out one that was taken out of the queue; where there is no room it is the next one again.
    fn go_on_alone(self: &Arc<Self>, head: Waiting<B>) {
        if let Some(left) = self.try_again(head)
            && self.push_front(left)
        {
            self.watch();
        }
    }

    /// Gives back what finds no room.
    fn try_again(&self, mut head: Waiting<B>) -> Option<Waiting<B>> {
        let target = &head.write.target;
        let offset = target.offset + head.taken as u64;
        match self
            .engine
            .write(target.handle, offset, &head.data, head.write.by())
        {
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
    fn pop(&self) -> Option<Waiting<B>> {
        let mut queue = self.queue.lock();
        let head = queue.waiting.pop_front();
        let left = queue.waiting.len() as u64 + u64::from(head.is_some());
        self.count.store(left, Ordering::Release);
        queue.watched = head.is_some();
        head
    }

    /// Whether the caller is to see to it that somebody looks at the queue again.
    fn push_front(&self, head: Waiting<B>) -> bool {
        let mut queue = self.queue.lock();
        queue.waiting.push_front(head);
        self.count
            .store(queue.waiting.len() as u64, Ordering::Release);
        !std::mem::replace(&mut queue.watched, true)
    }

    /// Nothing can drain: everyone who waits now is told why.
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
