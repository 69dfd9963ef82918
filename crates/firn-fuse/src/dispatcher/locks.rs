//! Locks that reach other hosts, and appends under one.
//!
//! | request | before | then |
//! |---|---|---|
//! | setlk that locks | what is pending is drained | the lock; then what other hosts wrote is looked at |
//! | setlk that unlocks, a close, a release | what is pending is drained and made known | the lock is let go |
//! | a write to a file that is open with O_APPEND | the lock of the file's end | the bytes go to the backing, then the lock is let go |
//!
//! So the holder of a lock sees what was written under it before, on whatever host. No thread waits for a lock.

use std::sync::Arc;

use firn_backing::{Backing, Errno, LockMode, LockRange};
use firn_engine::{Appended, HandleId, InodeId};
use firn_hosts::{FileLocks, Owner, Released, Space, Wanted};
use firn_workers::Class;

use crate::caller::Process;
use crate::coherence::Target;
use crate::dispatcher::Dispatcher;
use crate::reply::{Answer, Reply, Responder};
use crate::request::Lock;
use crate::topic::Topic;

/// A write to the end of a file.
pub(super) struct Append {
    /// Where the kernel believes the end to be.
    pub(super) target: Target,
    pub(super) pid: u32,
    pub(super) by: Process,
}

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    pub(super) fn getlk(&self, lock: Lock, reply: Reply<R>) {
        let (Some(locks), Some(mode)) = (&self.locks, lock.mode) else {
            return reply.error(Errno::INVAL);
        };
        match self.wanted(&lock, mode) {
            Ok(wanted) => locks.test(
                wanted,
                Box::new(move |found| reply.answer(found.map(Answer::Lock))),
            ),
            Err(error) => reply.error(error),
        }
    }

    pub(super) fn setlk(&self, lock: Lock, waits: bool, reply: Reply<R>) {
        let Some(locks) = &self.locks else {
            return reply.error(Errno::NOLCK);
        };
        let Some(mode) = lock.mode else {
            let what = Released::Range(lock.owner, lock.range);
            let done = move |released| reply.done(released);
            return self.release_locks(lock.inode, lock.handle, &[lock.space], what, done);
        };
        let wanted = match self.wanted(&lock, mode) {
            Ok(wanted) => wanted,
            Err(error) => return reply.error(error),
        };
        let ticket = locks.next_ticket();
        if waits {
            let locks = Arc::clone(locks);
            reply.set_withdraw(Arc::new(move || locks.interrupt(ticket)));
        }
        locks.register(
            ticket,
            self.when_locked(Arc::clone(locks), wanted, lock, reply),
        );
        let locks = Arc::clone(locks);
        // What this host wrote without the lock is older than what the last holder wrote.
        let drained = Box::new(move |drained| match drained {
            Ok(()) => locks.acquire(ticket, wanted, waits),
            Err(error) => drop(locks.fail(ticket, error)),
        });
        self.engine.drained(lock.handle, drained);
    }

    /// What becomes of a request that is granted, or not.
    fn when_locked(
        &self,
        locks: Arc<FileLocks>,
        wanted: Wanted,
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
                // For a caller that is gone, only this thread can unlock it.
                let caught_up = match reply.still_waits().get() {
                    true => engine.catch_up(handle),
                    false => Err(Errno::INTR),
                };
                match caught_up {
                    Ok(()) => {
                        coherence.after_changes_by_others(inode, move || reply.done(Ok(())));
                    }
                    Err(error) => {
                        let what = Released::Range(wanted.owner.number, wanted.range);
                        let done = Box::new(move |_| reply.error(error));
                        locks.release(wanted.file, wanted.space, what, done);
                    }
                }
            });
        })
    }

    fn wanted(&self, lock: &Lock, mode: LockMode) -> Result<Wanted, Errno> {
        let owner = Owner {
            number: lock.owner,
            handle: lock.handle.0,
            pid: lock.pid,
        };
        Ok(Wanted {
            file: self.engine.open_files.number_of(lock.handle)?,
            space: lock.space,
            owner,
            range: lock.range,
            mode,
        })
    }

    /// Whether there is something to release.
    pub(super) fn holds_locks(&self, handle: HandleId, spaces: &[Space], what: Released) -> bool {
        let Some(locks) = &self.locks else {
            return false;
        };
        let file = self.engine.open_files.number_of(handle);
        let is_held = |file| spaces.iter().any(|&space| locks.is_held(file, space, what));
        file.is_ok_and(is_held)
    }

    /// Calls `next` when the locks are released, if there are any. Other hosts see before what was written under them;
    /// a failure of that is reported, and does not block them.
    pub(super) fn release_locks(
        &self,
        inode: InodeId,
        handle: HandleId,
        spaces: &[Space],
        what: Released,
        next: impl FnOnce(Result<(), Errno>) + Send + 'static,
    ) {
        let (Some(locks), Ok(file)) = (&self.locks, self.engine.open_files.number_of(handle))
        else {
            return next(Ok(()));
        };
        let is_held = |space: &&Space| locks.is_held(file, **space, what);
        let mut held = spaces.iter().filter(is_held).copied();
        let Some(first) = held.next() else {
            return next(Ok(()));
        };
        let second = held.next();
        let locks = Arc::clone(locks);
        let release = move |known: Result<(), Errno>| {
            if let Some(second) = second {
                locks.release(file, second, what, Box::new(|_| {}));
            }
            let done = Box::new(move |released: Result<(), Errno>| next(known.and(released)));
            locks.release(file, first, what, done);
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

    /// Writes at the end that the file has on all hosts.
    pub(super) fn append(
        &self,
        locks: &Arc<FileLocks>,
        append: Append,
        data: Vec<u8>,
        reply: Reply<R>,
    ) {
        let Append { target, pid, by } = append;
        let file = match self.engine.open_files.number_of(target.handle) {
            Ok(file) => file,
            Err(error) => return reply.error(error),
        };
        let engine = Arc::clone(&self.engine);
        let coherence = Arc::clone(&self.coherence);
        let workers = self.workers.clone();
        let taken = Arc::clone(locks);
        let ticket = locks.next_ticket();
        let owner = ticket.number();
        let withdrawn = Arc::clone(locks);
        reply.set_withdraw(Arc::new(move || withdrawn.interrupt(ticket)));
        let granted = move |granted: Result<(), Errno>| {
            if let Err(error) = granted {
                return reply.error(error);
            }
            workers.run_about(Class::Call, Topic::Inode(target.inode), move || {
                let appended =
                    engine.append_known(target.handle, &data, LockRange::LAST, Some(&by));
                let released = Box::new(move |released: Result<(), Errno>| {
                    if let Err(error) = released {
                        tracing::warn!(%error, ino = file, "cannot let go of the end of a file");
                    }
                    let Appended { offset, len } = match appended {
                        Ok(appended) => appended,
                        Err(error) => return reply.error(error),
                    };
                    // The kernel takes the file for as long as if the bytes were where it believed the end to be.
                    let size = (offset != target.offset).then_some(offset + len);
                    let (inode, handle) = (target.inode, target.handle);
                    let written = Target { offset, ..target };
                    let told = Arc::clone(&coherence);
                    coherence.after_write(written, len as usize, move || {
                        told.tell_size(inode, handle, size, move || {
                            reply.send(Answer::Written(len as u32));
                        });
                    });
                });
                taken.release(file, Space::End, Released::Owner(owner), released);
            });
        };
        locks.register(ticket, Box::new(granted));
        let owner = Owner {
            number: owner,
            handle: target.handle.0,
            pid,
        };
        let wanted = Wanted {
            file,
            space: Space::End,
            owner,
            range: LockRange::WHOLE,
            mode: LockMode::Exclusive,
        };
        locks.acquire(ticket, wanted, true);
    }
}
