//! Locks that reach other hosts, and appends under such a lock.
//!
//! Promise: the holder of a lock sees everything that was written under the lock before, on any host. Each request
//! keeps this promise by the order of its steps:
//!
//! * Lock: drain the pending bytes of the file (write them to the backing, the directory that the mount serves);
//!   acquire the lock; look for changes by other hosts.
//! * Unlock, close or release: drain the pending bytes and make them known to other hosts; release the lock.
//! * Write to a file that is open with O_APPEND: acquire the lock of the file's end; write the bytes to the backing;
//!   release the lock.
//!
//! No thread waits for a lock or a drain: each step is a callback.
//!
//! If firnd (the process that serves the mount) dies in an append, the kernel sends the append again. The next firnd
//! still has the lock of the file's end, under the number of the request. It writes the bytes at the same offset,
//! unless all of them were written.

use std::sync::Arc;

use firn_backing::{Backing, Errno, LockMode, LockRange};
use firn_engine::{Appended, Engine, HandleId, InodeId, RequestObjects, SharedAppend};
use firn_format::live::Request as EarlierAttempt;
use firn_hosts::{FileLocks, LockKind, OnConflict, Owner, ReleasedLocks, WantedLock};
use firn_workers::Class;

use crate::caller::Process;
use crate::coherence::{Coherence, Target};
use crate::dispatcher::Dispatcher;
use crate::reply::{Answer, Reply, Responder};
use crate::request::Lock;
use crate::topic::Topic;

/// A write to the end of a file.
pub(super) struct Append {
    /// The file, and the offset that the kernel has recorded as the file's end.
    pub(super) target: Target,
    pub(super) pid: u32,
    pub(super) process: Process,
}

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Answers F_GETLK with a lock that conflicts with the requested one, if there is any.
    pub(super) fn getlk(&self, lock: Lock, reply: Reply<R>) {
        let (Some(locks), Some(mode)) = (&self.locks, lock.mode) else {
            return reply.error(Errno::INVAL);
        };
        let wanted_lock = match self.wanted_lock(&lock, mode) {
            Ok(wanted_lock) => wanted_lock,
            Err(error) => return reply.error(error),
        };
        let answer = Box::new(move |conflicting: Result<_, Errno>| {
            reply.answer(conflicting.map(Answer::Lock));
        });
        locks.test(wanted_lock, answer);
    }

    /// Answers F_SETLK and F_SETLKW, and flock(2), on a mount with cluster-wide locks, which hold for all hosts. With
    /// `waits` the call waits while another lock conflicts; otherwise it fails. Without a mode it is an unlock.
    ///
    /// The order matters: the request is registered, so that a signal can end it at any time. Then pending bytes are
    /// drained (written to the backing), and then the lock is acquired.
    pub(super) fn setlk(&self, lock: Lock, waits: bool, reply: Reply<R>) {
        let Some(locks) = &self.locks else {
            return reply.error(Errno::NOLCK);
        };
        let Some(mode) = lock.mode else {
            let unlocked = ReleasedLocks::Range(lock.owner, lock.range);
            let done = move |result| reply.done(result);
            return self.release_locks(lock.inode, lock.handle, &[lock.kind], unlocked, done);
        };
        let wanted_lock = match self.wanted_lock(&lock, mode) {
            Ok(wanted_lock) => wanted_lock,
            Err(error) => return reply.error(error),
        };
        // Identifies this request among those that wait for a lock.
        let ticket = locks.next_ticket();
        let on_conflict = if waits {
            let locks = Arc::clone(locks);
            reply.set_withdraw(Arc::new(move || locks.interrupt(ticket)));
            OnConflict::Wait
        } else {
            OnConflict::Fail
        };
        let answer = self.answer_when_granted(Arc::clone(locks), wanted_lock, lock, reply);
        locks.register(ticket, answer);
        let locks = Arc::clone(locks);
        // Bytes that this host wrote without the lock must not overwrite later bytes of the last holder.
        let acquire_after_drain = Box::new(move |drained| match drained {
            Ok(()) => locks.acquire(ticket, wanted_lock, on_conflict),
            // The result is ignored: if the request has ended already, because of a signal, it is answered.
            Err(error) => drop(locks.fail(ticket, error)),
        });
        self.engine.drained(lock.handle, acquire_after_drain);
    }

    /// Returns the callback that answers a request for a cluster-wide lock, once the lock is granted or refused.
    ///
    /// After a grant, the callback reads the changes that other hosts have published, and answers. If that fails, or if
    /// the caller does not wait any more, it releases the lock again and answers with the error.
    fn answer_when_granted(
        &self,
        locks: Arc<FileLocks>,
        wanted_lock: WantedLock,
        lock: Lock,
        reply: Reply<R>,
    ) -> firn_hosts::ResultCallback {
        let engine = Arc::clone(&self.engine);
        let coherence = Arc::clone(&self.coherence);
        let workers = self.workers.clone();
        let Lock { inode, handle, .. } = lock;
        Box::new(move |granted| {
            if let Err(error) = granted {
                return reply.error(error);
            }
            workers.run_on_topic(Class::Call, Topic::Inode(inode), move || {
                let is_caller_waiting = reply.caller_status().is_waiting();
                // A caller that got an early answer will not unlock, so this thread must.
                let may_keep_lock = if is_caller_waiting {
                    engine.read_published_changes(handle)
                } else {
                    Err(Errno::INTR)
                };
                match may_keep_lock {
                    Ok(()) => {
                        coherence.answer_after_remote_changes(inode, move || reply.done(Ok(())));
                    }
                    Err(error) => {
                        let released =
                            ReleasedLocks::Range(wanted_lock.owner.number, wanted_lock.range);
                        let done = Box::new(move |_| reply.error(error));
                        locks.release(wanted_lock.file, wanted_lock.kind, released, done);
                    }
                }
            });
        })
    }

    /// Translates a lock of the kernel for [`FileLocks`].
    fn wanted_lock(&self, lock: &Lock, mode: LockMode) -> Result<WantedLock, Errno> {
        let owner = Owner {
            number: lock.owner,
            handle: lock.handle.0,
            pid: lock.pid,
        };
        Ok(WantedLock {
            file: self.engine.open_files.backing_inode_number(lock.handle)?,
            kind: lock.kind,
            owner,
            range: lock.range,
            mode,
        })
    }

    /// Whether a cluster-wide lock of one of these kinds is held on the handle's file. `selected` restricts the locks
    /// to an owner or a range. False on a mount without cluster-wide locks, or if the file is not known.
    pub(super) fn holds_locks(
        &self,
        handle: HandleId,
        kinds: &[LockKind],
        selected: ReleasedLocks,
    ) -> bool {
        let Some(locks) = &self.locks else {
            return false;
        };
        let Ok(file) = self.engine.open_files.backing_inode_number(handle) else {
            return false;
        };
        kinds
            .iter()
            .any(|kind| locks.is_held(file, *kind, selected))
    }

    /// Publishes the file's bytes to other hosts, releases cluster-wide locks on the file, and then calls `on_released`
    /// with the result. If no selected lock of these kinds is held, calls `on_released` at once.
    ///
    /// To publish is to drain pending bytes (write them to the directory below the mount) and to notify other hosts. If
    /// that fails, the locks are released nevertheless, so that other hosts are not blocked, and `on_released` gets the
    /// error. Of `kinds`, at most two may be held.
    pub(super) fn release_locks(
        &self,
        inode: InodeId,
        handle: HandleId,
        kinds: &[LockKind],
        selected: ReleasedLocks,
        on_released: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        let (Some(locks), Ok(file)) = (
            &self.locks,
            self.engine.open_files.backing_inode_number(handle),
        ) else {
            return on_released(Ok(()));
        };
        let mut held_kinds = kinds
            .iter()
            .copied()
            .filter(|kind| locks.is_held(file, *kind, selected));
        let Some(first_kind) = held_kinds.next() else {
            return on_released(Ok(()));
        };
        let second_kind = held_kinds.next();
        let locks = Arc::clone(locks);
        let release = move |publish_result: Result<(), Errno>| {
            if let Some(second_kind) = second_kind {
                // Only the result of the first kind is passed on.
                locks.release(file, second_kind, selected, Box::new(|_| {}));
            }
            let done = Box::new(move |released: Result<(), Errno>| {
                on_released(publish_result.and(released));
            });
            locks.release(file, first_kind, selected, done);
        };
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let release_after_drain = Box::new(move |drained: Result<(), Errno>| match drained {
            Ok(()) => workers.run_on_topic(Class::Call, Topic::Inode(inode), move || {
                release(engine.publish_writes(handle));
            }),
            Err(error) => release(Err(error)),
        });
        self.engine.drained(handle, release_after_drain);
    }

    /// Answers a write with O_APPEND: writes where the file ends on all hosts, under the lock of the file's end. No
    /// thread waits for the lock: a callback writes once it is granted.
    ///
    /// If an earlier firnd (the serving process) died in this append, the kernel sends it again. The retry has the same
    /// lock, and reuses the recorded offset.
    pub(super) fn append(
        &self,
        locks: &Arc<FileLocks>,
        append: Append,
        data: Vec<u8>,
        mut reply: Reply<R>,
    ) {
        let target = append.target;
        let file = match self.engine.open_files.backing_inode_number(target.handle) {
            Ok(file) => file,
            Err(error) => return reply.error(error),
        };
        let earlier_attempt = reply.find_attempt_or_record(&self.engine, RequestObjects::default);
        let ticket = locks.next_ticket();
        let lock_owner = Owner {
            // A repeated request has the same number, so the lock of an earlier firnd counts as its own.
            number: reply.number(),
            handle: target.handle.0,
            pid: append.pid,
        };
        // A signal to the caller ends the wait for the lock.
        let locks_to_interrupt = Arc::clone(locks);
        reply.set_withdraw(Arc::new(move || locks_to_interrupt.interrupt(ticket)));
        let locked_append = LockedAppend {
            engine: Arc::clone(&self.engine),
            locks: Arc::clone(locks),
            file,
            lock_owner,
            process: append.process,
            data,
            earlier_attempt,
            answer: AppendAnswer {
                coherence: Arc::clone(&self.coherence),
                target,
                reply,
            },
        };
        let workers = self.workers.clone();
        let granted = move |granted: Result<(), Errno>| {
            if let Err(error) = granted {
                return locked_append.answer.reply.error(error);
            }
            workers.run_on_topic(Class::Call, Topic::Inode(target.inode), move || {
                locked_append.write_and_unlock();
            });
        };
        locks.register(ticket, Box::new(granted));
        locks.acquire(ticket, lock_of_end(file, lock_owner), OnConflict::Wait);
    }
}

/// Returns the lock of the end of a file, under which appends of all hosts follow one another.
fn lock_of_end(file: u64, owner: Owner) -> WantedLock {
    WantedLock {
        file,
        kind: LockKind::End,
        owner,
        range: LockRange::WHOLE,
        mode: LockMode::Exclusive,
    }
}

/// An append that holds the lock of the file's end, or waits for it.
struct LockedAppend<B: Backing, R: Responder> {
    engine: Arc<Engine<B>>,
    locks: Arc<FileLocks>,
    /// The file's number for all hosts.
    file: u64,
    lock_owner: Owner,
    process: Process,
    data: Vec<u8>,
    /// The record of an earlier firnd that has begun the same append.
    earlier_attempt: Option<EarlierAttempt>,
    answer: AppendAnswer<B, R>,
}

impl<B: Backing, R: Responder> LockedAppend<B, R> {
    /// Writes the bytes of an append, releases the lock of the file's end, and then answers. Called once the lock is
    /// granted.
    fn write_and_unlock(mut self) {
        let appended = self.write();
        if appended.is_ok() {
            // If firnd dies now, the next firnd does not write these bytes again.
            self.answer.reply.record_append_done();
        }
        let file = self.file;
        let answer = self.answer;
        let answer_after_release = move |released: Result<(), Errno>| {
            if let Err(error) = released {
                tracing::warn!(%error, ino = file, "cannot release the lock on the end of a file: appends of other \
                    hosts may have to wait");
            }
            match appended {
                Ok(appended) => answer.send(appended),
                Err(error) => answer.reply.error(error),
            }
        };
        let locks_of_append = ReleasedLocks::Owner(self.lock_owner.number);
        self.locks.release(
            file,
            LockKind::End,
            locks_of_append,
            Box::new(answer_after_release),
        );
    }

    /// Writes the bytes to the end of the file, unless an earlier firnd (which served this mount and died) has done so.
    /// `earlier_attempt` is that firnd's record of the same request. Called with the lock of the file's end.
    fn write(&mut self) -> Result<Appended, Errno> {
        // There are three cases: a new append; one that was begun, with an offset; and one that is done.
        let earlier_offset = self
            .earlier_attempt
            .and_then(|earlier| earlier.append_offset);
        let is_done = self
            .earlier_attempt
            .is_some_and(|earlier| earlier.is_append_done);
        if let Some(offset) = earlier_offset
            && is_done
        {
            let len = self.data.len() as u64;
            return Ok(Appended { offset, len });
        }
        let AppendAnswer { reply, target, .. } = &mut self.answer;
        let shared_append = SharedAppend {
            data: &self.data,
            // No limit: the last offset that a lock can have is also the last of a file.
            size_max: LockRange::LAST,
            by: Some(&self.process),
            repeated_at: earlier_offset,
            note_offset: &mut |offset| reply.record_append_offset(offset),
        };
        self.engine.append_known(target.handle, shared_append)
    }
}

/// What is needed to answer an append.
struct AppendAnswer<B: Backing, R: Responder> {
    coherence: Arc<Coherence<B>>,
    /// The file, and the offset that the kernel has recorded as the file's end.
    target: Target,
    reply: Reply<R>,
}

impl<B: Backing, R: Responder> AppendAnswer<B, R> {
    /// Answers an append after its bytes are at `appended`, and after the kernel has dropped old pages there and
    /// recorded the new length.
    fn send(self, appended: Appended) {
        let Self {
            coherence,
            target,
            reply,
        } = self;
        let Appended { offset, len } = appended;
        // The kernel computes the new length from the offset of its request. If the bytes went to another offset, the
        // kernel must be notified of the length.
        let size = (offset != target.offset).then_some(offset + len);
        let written = Target { offset, ..target };
        let coherence_after_write = Arc::clone(&coherence);
        coherence.answer_after_write(written, len as usize, move || {
            coherence_after_write.raise_kernel_size(target.inode, target.handle, size, move || {
                reply.send(Answer::Written(len as u32));
            });
        });
    }
}
