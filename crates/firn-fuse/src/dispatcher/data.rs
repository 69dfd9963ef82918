//! Bytes of files: read, written, made durable, given room.

use std::cell::RefCell;
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno, Seek};
use firn_engine::{Closing, Done, Engine, FsyncPolicy, HandleId, InodeId};
use firn_hosts::{Released, Space};
use firn_workers::Class;

use crate::caller::{Process, closing, is_same_process};
use crate::coherence::Target;
use crate::dispatcher::Dispatcher;
use crate::dispatcher::locks::Append;
use crate::gate::enter_change;
use crate::reply::{Answer, Reply, Responder};
use crate::request::{COPY_BYTES_MAX, CopyRange, Fallocate, Read, Write};
use crate::stall::PendingWrite;
use crate::topic::Topic;

thread_local! {
    /// Where a thread of the transport reads into; grows to the largest request and is used again.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    pub(super) fn read(&self, read: Read, reply: Reply<R>) {
        let handle = read.handle;
        let offset = read.offset;
        let size = read.size as usize;
        let inode = read.inode;
        let truncations = Arc::clone(&self.truncations);
        let call = move |engine: &Engine<B>, buffer: &mut [u8]| match engine
            .read(handle, offset, buffer)
        {
            Ok(len) if len < size && engine.kernel_cache.reads_through_cache(handle) => {
                let data = buffer[..len].to_vec();
                let answer = move || reply.send(Answer::Data(&data));
                truncations.answer_after(inode, Box::new(answer));
            }
            Ok(len) => reply.send(Answer::Data(&buffer[..len])),
            Err(error) => reply.error(error),
        };
        match self.call_slots.acquire() {
            Some(_slot) => READ_BUFFER.with_borrow_mut(|buffer| {
                if buffer.len() < size {
                    buffer.resize(size, 0);
                }
                call(&self.engine, &mut buffer[..size]);
            }),
            None => {
                let engine = Arc::clone(&self.engine);
                let call = Box::new(move || call(&engine, &mut vec![0; size]));
                self.call_slots
                    .run_elsewhere(Topic::Inode(read.inode), call);
            }
        }
    }

    pub(super) fn write(&self, caller: Caller, write: Write<'_>, reply: Reply<R>) {
        let data = write.data;
        let target = Target {
            inode: write.inode,
            handle: write.handle,
            offset: write.offset,
            from_cache: write.from_cache,
        };
        let keeps_set_id = !write.kills_set_id;
        let by = (!write.from_cache).then(|| {
            Process::of(caller)
                .known_to_have_cap_fsetid(keeps_set_id)
                .waiting(reply.still_waits())
        });
        if let (true, Some(by), Some(locks)) = (write.appends, &by, &self.locks) {
            let append = Append {
                target,
                pid: caller.pid,
                by: by.clone(),
            };
            return self.append(locks, append, data.to_vec(), reply);
        }
        let pending = PendingWrite { target, by, reply };
        match self.call_slots.acquire() {
            Some(_slot) => self.stalled.write(pending, data),
            // A write that needs memory only goes on without a copy, whatever hangs.
            None if !self.stalled.may_wait(&pending, 0, data.len()) => {
                self.stalled.write(pending, data);
            }
            None => {
                let stalled = Arc::clone(&self.stalled);
                let data = data.to_vec();
                let call = Box::new(move || stalled.write(pending, &data));
                self.call_slots
                    .run_elsewhere(Topic::Inode(target.inode), call);
            }
        }
    }

    pub(super) fn flush(
        &self,
        caller: Caller,
        inode: InodeId,
        handle: HandleId,
        owner: u64,
        reply: Reply<R>,
    ) {
        let by = if self.engine.open_files.is_writer(handle) {
            closing(caller)
        } else {
            Closing::Called
        };
        let watch = self.gate.as_ref().and_then(|gate| gate.watch());
        let watch = watch.filter(|watch| watch.knows(handle));
        if let Some(watch) = watch.as_ref().filter(|_| by == Closing::Killed)
            && let Err(errno) = watch.close(caller, handle, by)
        {
            tracing::warn!(%errno, "the close of a killed process was not noted");
        }
        let reply = match by {
            Closing::Called => Some(reply),
            Closing::Exited => {
                reply.note_exit();
                Some(reply)
            }
            // A killed process waits for nothing. Once it is answered, another thread may release the handle.
            Closing::Killed => {
                self.engine.note_killed(handle);
                reply.send(Answer::Done);
                None
            }
        };
        let closers = self.workers.clone();
        let answer = move |result: Result<(), Errno>| match (reply, watch) {
            (Some(reply), Some(watch)) => {
                // The close may be what makes a checkpoint complete.
                closers.run_about(Class::Call, Topic::Inode(inode), move || {
                    let closed = watch.close(caller, handle, by);
                    reply.done(result.and(closed));
                });
            }
            (Some(reply), None) => reply.done(result),
            (None, _) => {}
        };
        // A child that executes another program closes what it has inherited, and its parent goes on.
        let is_opener = |opener| is_same_process(opener, caller.pid);
        let finishes = self.engine.finishes_file(handle, &is_opener);
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let flush = move |released: Result<(), Errno>| {
            let done: Done = Box::new(move |flushed: Result<(), Errno>| {
                answer(flushed.and(released));
            });
            if !finishes {
                return engine.flush(handle, by, done);
            }
            let finished = Arc::clone(&engine);
            let drained = Box::new(move |result: Result<(), Errno>| match result {
                Ok(()) => workers.run_about(Class::Call, Topic::Inode(inode), move || {
                    done(finished.finish_file(handle));
                }),
                result => done(result),
            });
            engine.flush(handle, by, drained);
        };
        let stores = self.engine.open_files.may_have_stores(handle);
        let (engine, workers) = (Arc::clone(&self.engine), self.workers.clone());
        let flush = move |released: Result<(), Errno>| {
            if !stores {
                return flush(released);
            }
            workers.run_about(Class::Call, Topic::Inode(inode), move || {
                flush(released.and(engine.take_stores(handle)));
            });
        };
        // Locks of a process end with its first close of the file, and others see before what it wrote.
        self.release_locks(
            inode,
            handle,
            &[Space::Bytes],
            Released::Owner(owner),
            flush,
        );
    }

    pub(super) fn fsync(&self, inode: InodeId, handle: HandleId, data_only: bool, reply: Reply<R>) {
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let coherence = Arc::clone(&self.coherence);
        let is_durable = engine.options().fsync == FsyncPolicy::Durable;
        let drained: Done = Box::new(move |result: Result<(), Errno>| match result {
            Ok(()) if is_durable => {
                workers.run_about(Class::Call, Topic::Inode(inode), move || {
                    let synced = engine.sync_file(handle, data_only);
                    coherence.after_changes_by_others(inode, move || reply.done(synced));
                })
            }
            result => reply.done(result),
        });
        if !self.engine.open_files.may_have_stores(handle) {
            return self.engine.fsync(handle, drained);
        }
        self.run_on_worker(Topic::Inode(inode), move |engine| {
            match engine.take_stores(handle) {
                Ok(()) => engine.fsync(handle, drained),
                Err(errno) => drained(Err(errno)),
            }
        });
    }

    pub(super) fn fsyncdir(&self, inode: InodeId, reply: Reply<R>) {
        self.run_on_worker(Topic::Inode(inode), move |engine| {
            reply.done(engine.sync_dir(inode));
        });
    }

    pub(super) fn fallocate(&self, caller: Caller, request: Fallocate, reply: Reply<R>) {
        let Fallocate {
            inode,
            handle,
            offset,
            len,
            mode,
        } = request;
        let by = Process::of(caller);
        let gate = self.gate.clone();
        let allocate = move |engine: &Engine<B>| {
            let _pass = enter_change(gate.as_deref(), inode)?;
            engine.privilege_rules.drop_privileges(inode, &by)?;
            engine.allocate(handle, mode, offset, len)
        };
        let call = move |engine: &Engine<B>| reply.done(allocate(engine));
        if self.holds_up_changes() {
            self.run_on_worker(Topic::Inode(inode), call);
        } else {
            self.run_drained(inode, handle, call);
        }
    }

    pub(super) fn lseek(
        &self,
        inode: InodeId,
        handle: HandleId,
        offset: i64,
        whence: i32,
        reply: Reply<R>,
    ) {
        let seek = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(Errno::INVAL),
        };
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(Errno::NXIO);
        };
        self.run_drained(inode, handle, move |engine| {
            reply.answer(engine.seek(handle, offset, seek).map(Answer::Position));
        });
    }

    /// Always on a worker: without reflinks the backing copies for as long as it takes.
    pub(super) fn copy_range(&self, caller: Caller, copy: CopyRange, reply: Reply<R>) {
        let len = copy.len.min(COPY_BYTES_MAX);
        let by = Process::of(caller);
        let gate = self.gate.clone();
        let copy_bytes = move |engine: &Engine<B>| {
            let _pass = enter_change(gate.as_deref(), copy.to_inode)?;
            engine.privilege_rules.drop_privileges(copy.to_inode, &by)?;
            engine.copy_range(copy.from, copy.from_offset, copy.to, copy.to_offset, len)
        };
        self.run_on_worker(Topic::Inode(copy.to_inode), move |engine| {
            if reply.is_repeated() && overlaps_itself(engine, &copy, len) {
                // The source may have been written over by the first try.
                return reply.error(Errno::IO);
            }
            reply.answer(copy_bytes(engine).map(|bytes| Answer::Written(bytes as u32)));
        });
    }
}

/// Whether a copy reads bytes that it writes.
fn overlaps_itself<B: Backing>(engine: &Engine<B>, copy: &CopyRange, len: u64) -> bool {
    let is_one_file = engine.open_files.inode_of_handle(copy.from) == Some(copy.to_inode);
    is_one_file && copy.from_offset.abs_diff(copy.to_offset) < len
}
