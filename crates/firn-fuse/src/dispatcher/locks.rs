//! Locks that reach other hosts, and appends under such a lock.
//!
//! Promise: the holder of a lock sees everything that was written under the lock before, on any host. Each request
//! keeps this promise by the order of its steps:
//!
//! | request | first | then |
//! |---|---|---|
//! | setlk that locks | drain the pending bytes of the file | acquire the lock; look for changes by other hosts |
//! | setlk that unlocks, close, release | drain the pending bytes and make them known to other hosts | release the lock |
//! | write to a file that is open with O_APPEND | acquire the lock of the file's end | write the bytes to the backing; release the lock |
//!
//! If firnd dies in an append, the kernel sends the append again. The next firnd still has the lock of the file's end,
//! under the number of the request. It writes the bytes at the same offset, unless all of them were written.
//!
//! No thread waits for a lock or a drain: each step is a callback.

use std::sync::Arc;

use firn_backing::{Backing, Errno, LockMode, LockRange};
use firn_engine::{Appended, HandleId, InodeId, SharedAppend, Subjects};
use firn_hosts::{FileLocks, LockKind, OnConflict, Owner, ReleasedLocks, WantedLock};
use firn_workers::Class;

use crate::caller::Process;
use crate::coherence::Target;
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
        match self.wanted(&lock, mode) {
            Ok(wanted) => locks.test(
                wanted,
                Box::new(move |in_the_way| reply.answer(in_the_way.map(Answer::Lock))),
            ),
            Err(error) => reply.error(error),
        }
    }

    /// Answers F_SETLK and F_SETLKW, and flock(2). `waits`: the call waits while another lock conflicts; otherwise it
    /// fails.
    pub(super) fn setlk(&self, lock: Lock, waits: bool, reply: Reply<R>) {
        let Some(locks) = &self.locks else {
            return reply.error(Errno::NOLCK);
        };
        let Some(mode) = lock.mode else {
            let released = ReleasedLocks::Range(lock.owner, lock.range);
            let done = move |result| reply.done(result);
            return self.release_locks(lock.inode, lock.handle, &[lock.space], released, done);
        };
        let wanted = match self.wanted(&lock, mode) {
            Ok(wanted) => wanted,
            Err(error) => return reply.error(error),
        };
        let on_conflict = if waits {
            OnConflict::Wait
        } else {
            OnConflict::Fail
        };
        let ticket = locks.next_ticket();
        if waits {
            let locks = Arc::clone(locks);
            reply.set_withdraw(Arc::new(move || locks.interrupt(ticket)));
        }
        locks.register(
            ticket,
            self.answer_when_granted(Arc::clone(locks), wanted, lock, reply),
        );
        let locks = Arc::clone(locks);
        // Bytes that this host wrote without the lock must not overwrite later bytes of the last holder. So they are
        // drained first.
        let drained = Box::new(move |drained| match drained {
            Ok(()) => locks.acquire(ticket, wanted, on_conflict),
            Err(error) => drop(locks.fail(ticket, error)),
        });
        self.engine.drained(lock.handle, drained);
    }

    /// Returns the callback that answers a lock request once the lock is granted or refused. After a grant it looks for
    /// changes by other hosts, and releases the lock again if that fails.
    fn answer_when_granted(
        &self,
        locks: Arc<FileLocks>,
        wanted: WantedLock,
        lock: Lock,
        reply: Reply<R>,
    ) -> firn_hosts::Done {
        let engine = Arc::clone(&self.engine);
        let coherence = Arc::clone(&self.coherence);
        let workers = self.workers.clone();
        let Lock { inode, handle, .. } = lock;
        Box::new(move |granted| {
            if let Err(error) = granted {
                return reply.error(error);
            }
            workers.run_about(Class::Call, Topic::Inode(inode), move || {
                // A caller that got an early answer will not unlock, so this thread must.
                let caught_up = if reply.still_waits().get() {
                    engine.catch_up(handle)
                } else {
                    Err(Errno::INTR)
                };
                match caught_up {
                    Ok(()) => {
                        coherence.after_changes_by_others(inode, move || reply.done(Ok(())));
                    }
                    Err(error) => {
                        let released = ReleasedLocks::Range(wanted.owner.number, wanted.range);
                        let done = Box::new(move |_| reply.error(error));
                        locks.release(wanted.file, wanted.kind, released, done);
                    }
                }
            });
        })
    }

    /// Translates a lock of the kernel for [`FileLocks`].
    fn wanted(&self, lock: &Lock, mode: LockMode) -> Result<WantedLock, Errno> {
        let owner = Owner {
            number: lock.owner,
            handle: lock.handle.0,
            pid: lock.pid,
        };
        Ok(WantedLock {
            file: self.engine.open_files.number_of(lock.handle)?,
            kind: lock.space,
            owner,
            range: lock.range,
            mode,
        })
    }

    /// Whether any lock of the file that `released` selects is held, in one of `spaces`.
    pub(super) fn holds_locks(
        &self,
        handle: HandleId,
        spaces: &[LockKind],
        released: ReleasedLocks,
    ) -> bool {
        let Some(locks) = &self.locks else {
            return false;
        };
        let file = self.engine.open_files.number_of(handle);
        let is_held = |file| {
            spaces
                .iter()
                .any(|&space| locks.is_held(file, space, released))
        };
        file.is_ok_and(is_held)
    }

    /// Releases locks on a file in `spaces`, then calls `next` with the result. Calls `next` at once if no lock is
    /// held.
    ///
    /// Pending bytes are drained and made known to other hosts first. If that fails, the locks are released
    /// nevertheless, so that other hosts are not blocked, and `next` gets the error.
    pub(super) fn release_locks(
        &self,
        inode: InodeId,
        handle: HandleId,
        spaces: &[LockKind],
        released: ReleasedLocks,
        next: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        let (Some(locks), Ok(file)) = (&self.locks, self.engine.open_files.number_of(handle))
        else {
            return next(Ok(()));
        };
        let is_held = |space: &&LockKind| locks.is_held(file, **space, released);
        let mut held = spaces.iter().filter(is_held).copied();
        let Some(first) = held.next() else {
            return next(Ok(()));
        };
        let second = held.next();
        let locks = Arc::clone(locks);
        let release = move |made_known: Result<(), Errno>| {
            if let Some(second) = second {
                locks.release(file, second, released, Box::new(|_| {}));
            }
            let done = Box::new(move |result: Result<(), Errno>| next(made_known.and(result)));
            locks.release(file, first, released, done);
        };
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let drained = Box::new(move |drained: Result<(), Errno>| match drained {
            Ok(()) => workers.run_about(Class::Call, Topic::Inode(inode), move || {
                release(engine.make_known(handle));
            }),
            Err(error) => release(Err(error)),
        });
        self.engine.drained(handle, drained);
    }

    /// Answers a write with O_APPEND: writes where the file ends on all hosts, under the lock of the file's end.
    pub(super) fn append(
        &self,
        locks: &Arc<FileLocks>,
        append: Append,
        data: Vec<u8>,
        mut reply: Reply<R>,
    ) {
        let Append {
            target,
            pid,
            process,
        } = append;
        let file = match self.engine.open_files.number_of(target.handle) {
            Ok(file) => file,
            Err(error) => return reply.error(error),
        };
        let engine = Arc::clone(&self.engine);
        let earlier = reply.begin_once(&engine, Subjects::default);
        let repeated_at = earlier.and_then(|noted| noted.append_offset);
        let is_done = earlier.is_some_and(|noted| noted.is_append_done);
        let coherence = Arc::clone(&self.coherence);
        let workers = self.workers.clone();
        let locks_after_write = Arc::clone(locks);
        let ticket = locks.next_ticket();
        let owner_number = reply.number();
        let locks_to_interrupt = Arc::clone(locks);
        reply.set_withdraw(Arc::new(move || locks_to_interrupt.interrupt(ticket)));
        let granted = move |granted: Result<(), Errno>| {
            if let Err(error) = granted {
                return reply.error(error);
            }
            let mut reply = reply;
            workers.run_about(Class::Call, Topic::Inode(target.inode), move || {
                let shared_append = SharedAppend {
                    data: &data,
                    size_max: LockRange::LAST,
                    by: Some(&process),
                    repeated_at,
                    note_offset: &mut |offset| reply.note_append(offset),
                };
                let appended = match repeated_at.filter(|_| is_done) {
                    Some(offset) => Ok(Appended {
                        offset,
                        len: data.len() as u64,
                    }),
                    None => engine.append_known(target.handle, shared_append),
                };
                if appended.is_ok() {
                    reply.note_append_done();
                }
                let done = Box::new(move |released: Result<(), Errno>| {
                    if let Err(error) = released {
                        tracing::warn!(%error, ino = file, "cannot release the lock of a file's end: appends of other hosts may have to wait");
                    }
                    let Appended { offset, len } = match appended {
                        Ok(appended) => appended,
                        Err(error) => return reply.error(error),
                    };
                    // The kernel computes the new length from the offset of its request. If the bytes went to another
                    // offset, the kernel must be notified of the length.
                    let size = (offset != target.offset).then_some(offset + len);
                    let (inode, handle) = (target.inode, target.handle);
                    let written = Target { offset, ..target };
                    let coherence_after_write = Arc::clone(&coherence);
                    coherence.after_write(written, len as usize, move || {
                        coherence_after_write.tell_size(inode, handle, size, move || {
                            reply.send(Answer::Written(len as u32));
                        });
                    });
                });
                let released = ReleasedLocks::Owner(owner_number);
                locks_after_write.release(file, LockKind::End, released, done);
            });
        };
        locks.register(ticket, Box::new(granted));
        let owner = Owner {
            number: owner_number,
            handle: target.handle.0,
            pid,
        };
        let wanted = WantedLock {
            file,
            kind: LockKind::End,
            owner,
            range: LockRange::WHOLE,
            mode: LockMode::Exclusive,
        };
        locks.acquire(ticket, wanted, OnConflict::Wait);
    }
}
