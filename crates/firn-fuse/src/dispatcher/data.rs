//! Requests for the bytes of files: read, write, close, sync, allocate, seek and copy.
//!
//! Each method hands its request to the engine, which holds the files, and arranges for the answer. It decides which
//! thread does so: a thread that reads requests, a worker if the work may take long, or a callback of the engine. A
//! callback runs once data is drained: written from memory to the backing, the directory that the mount serves.

use std::cell::RefCell;
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno, Seek};
use firn_engine::{Closing, Done, Engine, FsyncPolicy, HandleId, InodeId};
use firn_hosts::{LockKind, ReleasedLocks};
use firn_workers::{Class, Workers};

use crate::caller::{Process, closing, is_same_process};
use crate::coherence::Target;
use crate::dispatcher::Dispatcher;
use crate::dispatcher::locks::Append;
use crate::gate::enter_change;
use crate::reply::{Answer, Reply, Responder};
use crate::request::{COPY_BYTES_MAX, CopyRange, Fallocate, Read, Write};
use crate::stall::PendingWrite;
use crate::topic::Topic;
use crate::watch::ChangeWatch;

thread_local! {
    /// Buffer of a thread of the transport for the answers to reads. It grows to the largest request and is never
    /// freed.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A close(2) under way. [`Dispatcher::flush`] lists its five steps; step 1 is the release of locks.
struct PendingClose<B: Backing, R: Responder> {
    engine: Arc<Engine<B>>,
    /// Whether the backing (the directory that the mount serves) has further work for the file after this close, the
    /// last one for writing.
    finishes_file: bool,
    /// Whether mappings of the file may have stored bytes that the engine has not seen yet.
    may_have_mapping_stores: bool,
    answer: CloseAnswer<R>,
}

impl<B: Backing, R: Responder> PendingClose<B, R> {
    /// Step 2: writes the dirty pages of mappings to the file. `lock_release_result` is the result of step 1, and
    /// becomes a part of the answer.
    fn write_back_mappings(self, lock_release_result: Result<(), Errno>) {
        if !self.may_have_mapping_stores {
            return self.flush_and_finish(lock_release_result);
        }
        let workers = self.answer.workers.clone();
        workers.run_on_topic(Class::Call, Topic::Inode(self.answer.inode), move || {
            let written_back = self.engine.write_back_mapping_stores(self.answer.handle);
            self.flush_and_finish(lock_release_result.and(written_back));
        });
    }

    /// Step 3: lets the engine flush the file, finishes it if this is its last close for writing, and then answers. The
    /// close waits for the file's pending bytes, unless the options say otherwise.
    ///
    /// To finish a file is further work of the backing (the directory below the mount) for a closed file.
    /// `earlier_result` is that of steps 1 and 2; its error is answered if this step succeeds.
    fn flush_and_finish(self, earlier_result: Result<(), Errno>) {
        let Self { engine, answer, .. } = self;
        let (inode, handle, closing) = (answer.inode, answer.handle, answer.closing);
        if !self.finishes_file {
            let answer_after_flush = move |flushed: Result<(), Errno>| {
                answer.send(flushed.and(earlier_result));
            };
            return engine.flush(handle, closing, Box::new(answer_after_flush));
        }
        let engine_after_flush = Arc::clone(&engine);
        let finish_file = move |flushed: Result<(), Errno>| {
            if flushed.is_err() {
                return answer.send(flushed);
            }
            let workers = answer.workers.clone();
            workers.run_on_topic(Class::Call, Topic::Inode(inode), move || {
                let finished = engine_after_flush.finish_file(handle);
                answer.send(finished.and(earlier_result));
            });
        };
        engine.flush(handle, closing, Box::new(finish_file));
    }
}

/// What is needed to answer a close(2).
struct CloseAnswer<R: Responder> {
    workers: Workers,
    caller: Caller,
    inode: InodeId,
    handle: HandleId,
    closing: Closing,
    /// The watch of the commit rules, if it knows the handle.
    watch: Option<Arc<dyn ChangeWatch>>,
    /// `None` if the close is answered already, because its process was killed.
    reply: Option<Reply<R>>,
}

impl<R: Responder> CloseAnswer<R> {
    /// Steps 4 and 5: notifies the watch of the close, and sends the answer.
    fn send(self, result: Result<(), Errno>) {
        let Some(reply) = self.reply else {
            return;
        };
        let Some(watch) = self.watch else {
            return reply.done(result);
        };
        // On a worker, because this close may complete a checkpoint, and its commit takes long.
        self.workers
            .run_on_topic(Class::Call, Topic::Inode(self.inode), move || {
                let closed = watch.close(self.caller, self.handle, self.closing);
                reply.done(result.and(closed));
            });
    }
}

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    /// Answers a read. The answer is short only at the end of the file. With a call slot (the right to make a call that
    /// may hang) this thread reads; otherwise another one does.
    pub(super) fn read(&self, read: Read, reply: Reply<R>) {
        let inode = read.inode;
        let size = read.size as usize;
        let truncations = Arc::clone(&self.truncations);
        let read_into = move |engine: &Engine<B>, buffer: &mut [u8]| {
            let len = match engine.read(read.handle, read.offset, buffer) {
                Ok(len) => len,
                Err(error) => return reply.error(error),
            };
            let data = &buffer[..len];
            if len < size && engine.kernel_cache.reads_through_cache(read.handle) {
                // The kernel fills the rest of the page with zeros, so it must know the length of the file first.
                let data = data.to_vec();
                let answer = move || reply.send(Answer::Data(&data));
                truncations.answer_after_truncations(inode, Box::new(answer));
            } else {
                reply.send(Answer::Data(data));
            }
        };
        if let Some(_slot) = self.call_slots.acquire() {
            return READ_BUFFER.with_borrow_mut(|buffer| {
                if buffer.len() < size {
                    buffer.resize(size, 0);
                }
                read_into(&self.engine, &mut buffer[..size]);
            });
        }
        let engine = Arc::clone(&self.engine);
        let call = Box::new(move || read_into(&engine, &mut vec![0; size]));
        self.call_slots.run_elsewhere(Topic::Inode(inode), call);
    }

    /// Answers a write. On a mount with cluster-wide locks, an append first acquires the lock of the file's end.
    ///
    /// Any other write goes through [`WriteQueue::write`](crate::stall::WriteQueue::write), which queues it if it finds
    /// no room or if other writes are queued. With a call slot (the right to make a call that may hang) this thread
    /// writes. Without one, another thread does, unless the write needs only memory.
    pub(super) fn write(&self, caller: Caller, write: Write<'_>, reply: Reply<R>) {
        let data = write.data;
        let target = Target {
            inode: write.inode,
            handle: write.handle,
            offset: write.offset,
            from_cache: write.from_cache,
        };
        let has_cap_fsetid = !write.kills_set_id;
        // A page that the kernel writes back from its cache has no known writer.
        let process = (!write.from_cache).then(|| {
            Process::from_caller(caller)
                .with_cap_fsetid(has_cap_fsetid)
                .with_caller_status(reply.caller_status())
        });
        // An append under the lock of the file's end. Without cluster-wide locks, an append is an ordinary write.
        if write.appends
            && let Some(process) = &process
            && let Some(locks) = &self.locks
        {
            let append = Append {
                target,
                pid: caller.pid,
                process: process.clone(),
            };
            return self.append(locks, append, data.to_vec(), reply);
        }
        let pending = PendingWrite {
            target,
            process,
            reply,
        };
        if let Some(_slot) = self.call_slots.acquire() {
            return self.write_queue.write(pending, data);
        }
        // Without a slot, a write that needs only memory still runs here: it cannot hang, and needs no copy of its
        // data.
        let accepted_bytes = 0;
        if !self
            .write_queue
            .may_wait(&pending, accepted_bytes, data.len())
        {
            return self.write_queue.write(pending, data);
        }
        let write_queue = Arc::clone(&self.write_queue);
        let data = data.to_vec();
        let call = Box::new(move || write_queue.write(pending, &data));
        self.call_slots
            .run_elsewhere(Topic::Inode(target.inode), call);
    }

    /// Answers a FLUSH, which a close(2) of a descriptor sends. The steps, each of which may wait without blocking a
    /// thread:
    ///
    /// 1. The locks of the process on the file end.
    /// 2. The engine takes over stores to a mapping of the file that it has not seen yet.
    /// 3. The engine flushes the file, and finishes it if this is its last close for writing.
    /// 4. The watch of the commit rules is notified of the close.
    /// 5. The answer is sent.
    ///
    /// For a killed process, the watch is notified and the answer is sent before step 1.
    pub(super) fn flush(
        &self,
        caller: Caller,
        inode: InodeId,
        handle: HandleId,
        owner: u64,
        reply: Reply<R>,
    ) {
        let closing = if self.engine.open_files.is_writer(handle) {
            closing(caller)
        } else {
            Closing::Called
        };
        let watch = self.gate.as_ref().and_then(|gate| gate.watch());
        let watch = watch.filter(|watch| watch.knows(handle));
        let reply = match closing {
            Closing::Called => Some(reply),
            Closing::Exited => {
                reply.record_exiting_caller();
                Some(reply)
            }
            Closing::Killed => {
                if let Some(watch) = &watch
                    && let Err(errno) = watch.close(caller, handle, closing)
                {
                    tracing::warn!(%errno, "the commit rules could not record that a killed process closed a file");
                }
                self.engine.record_killed_closer(handle);
                // Nothing waits for this close any more. The answer follows the notice to the watch, because the kernel
                // may release the handle on another thread as soon as it has the answer.
                reply.send(Answer::Done);
                None
            }
        };
        // A child that executes another program closes the descriptors that it has inherited. Its parent may still
        // write, so only a close by the process that opened the file finishes the file.
        let is_opener = |opener| is_same_process(opener, caller.pid);
        let pending_close = PendingClose {
            finishes_file: self.engine.finishes_file(handle, &is_opener),
            may_have_mapping_stores: self.engine.open_files.can_have_mapping_stores(handle),
            engine: Arc::clone(&self.engine),
            answer: CloseAnswer {
                workers: self.workers.clone(),
                caller,
                inode,
                handle,
                closing,
                watch,
                reply,
            },
        };
        // POSIX: the first close of a file by a process ends all its locks on the file. Before another host gets such a
        // lock, it can see what this process wrote.
        let locks_of_process = ReleasedLocks::Owner(owner);
        let write_back_mappings = move |released| pending_close.write_back_mappings(released);
        self.release_locks(
            inode,
            handle,
            &[LockKind::Bytes],
            locks_of_process,
            write_back_mappings,
        );
    }

    /// Answers an fsync(2) or fdatasync(2): drains the file (writes pending bytes to the backing, the directory below
    /// the mount), and with `fsync=durable` syncs it there too. Before that, bytes that mappings have stored and the
    /// engine has not seen are written to the file.
    pub(super) fn fsync(&self, inode: InodeId, handle: HandleId, data_only: bool, reply: Reply<R>) {
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let coherence = Arc::clone(&self.coherence);
        let is_durable = engine.options().fsync == FsyncPolicy::Durable;
        let answer_after_drain: Done = Box::new(move |drained: Result<(), Errno>| {
            if drained.is_err() || !is_durable {
                return reply.done(drained);
            }
            workers.run_on_topic(Class::Call, Topic::Inode(inode), move || {
                let synced = engine.sync_file(handle, data_only);
                coherence.answer_after_remote_changes(inode, move || reply.done(synced));
            });
        });
        if !self.engine.open_files.can_have_mapping_stores(handle) {
            return self.engine.fsync(handle, answer_after_drain);
        }
        self.run_on_worker(Topic::Inode(inode), move |engine| {
            match engine.write_back_mapping_stores(handle) {
                Ok(()) => engine.fsync(handle, answer_after_drain),
                Err(errno) => answer_after_drain(Err(errno)),
            }
        });
    }

    /// Answers an fsync(2) of a directory.
    pub(super) fn fsyncdir(&self, inode: InodeId, reply: Reply<R>) {
        self.run_on_worker(Topic::Inode(inode), move |engine| {
            reply.done(engine.sync_dir(inode));
        });
    }

    /// Answers a fallocate(2). The change takes a pass of the gate, which makes changes wait for transactions. It also
    /// removes set-id bits, as the caller's rights demand.
    ///
    /// The engine allocates after pending bytes of the file are drained: written to the backing, the directory below
    /// the mount.
    pub(super) fn fallocate(&self, caller: Caller, request: Fallocate, reply: Reply<R>) {
        let Fallocate {
            inode,
            handle,
            offset,
            len,
            mode,
        } = request;
        let process = Process::from_caller(caller);
        let gate = self.gate.clone();
        let allocate = move |engine: &Engine<B>| {
            let _pass = enter_change(gate.as_deref(), inode)?;
            engine.privilege_rules.drop_privileges(inode, &process)?;
            engine.allocate(handle, mode, offset, len)
        };
        let call = move |engine: &Engine<B>| reply.done(allocate(engine));
        // The call may wait for a transaction, so a worker runs it even if nothing is to be drained.
        if self.holds_up_changes() {
            self.run_on_worker(Topic::Inode(inode), call);
        } else {
            self.run_drained(inode, handle, call);
        }
    }

    /// Answers an lseek(2) for data or holes, after pending bytes of the file are drained (written to the backing
    /// directory, which knows the holes). The kernel answers all other kinds of lseek(2) itself.
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

    /// Answers a copy_file_range(2). Always runs on a worker: without reflinks the backing (the directory below the
    /// mount) copies the bytes, which may take long. The change takes a pass of the gate, which makes changes wait for
    /// transactions.
    pub(super) fn copy_range(&self, caller: Caller, copy: CopyRange, reply: Reply<R>) {
        let target_inode = copy.to_inode;
        let len = copy.len.min(COPY_BYTES_MAX);
        let process = Process::from_caller(caller);
        let gate = self.gate.clone();
        let copy_bytes = move |engine: &Engine<B>| {
            let _pass = enter_change(gate.as_deref(), target_inode)?;
            engine
                .privilege_rules
                .drop_privileges(target_inode, &process)?;
            engine.copy_range(copy.from, copy.from_offset, copy.to, copy.to_offset, len)
        };
        self.run_on_worker(Topic::Inode(target_inode), move |engine| {
            if reply.is_repeated() && overlaps_itself(engine, &copy, len) {
                // An earlier firnd may have begun this copy and overwritten part of the source. A second copy would
                // then read other bytes.
                return reply.error(Errno::IO);
            }
            match copy_bytes(engine) {
                Ok(copied_bytes) => reply.send(Answer::Written(copied_bytes as u32)),
                Err(error) => reply.error(error),
            }
        });
    }
}

/// Whether the source and the target of a copy are overlapping ranges of one file.
fn overlaps_itself<B: Backing>(engine: &Engine<B>, copy: &CopyRange, len: u64) -> bool {
    let is_one_file = engine.open_files.inode_of_handle(copy.from) == Some(copy.to_inode);
    is_one_file && copy.from_offset.abs_diff(copy.to_offset) < len
}
