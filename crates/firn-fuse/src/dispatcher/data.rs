//! Bytes of files: read, written, made durable, given room.

use std::cell::RefCell;
use std::sync::Arc;

use firn_backing::{Backing, Caller, Errno, Seek};
use firn_conflict::Access;
use firn_engine::{Closing, Engine, FsyncPolicy, HandleId, InodeId};
use firn_workers::Class;

use crate::caller::{Process, closing};
use crate::coherence::Target;
use crate::dispatcher::Dispatcher;
use crate::reply::{Answer, Reply, Responder};
use crate::request::{CopyRange, Fallocate, Read, Write};
use crate::stall::PendingWrite;
use crate::topic::Topic;

/// Bytes that one copy_file_range reply covers: its count is 32 bits wide, and a request of this
/// length is done in reasonable time on any backing.
const COPY_BYTES_MAX: u64 = 1 << 30;

thread_local! {
    /// Where a thread of the transport reads into; grows to the largest request and is used again.
    static READ_BUFFER: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl<B: Backing, R: Responder> Dispatcher<B, R> {
    pub(super) fn read(&self, caller: Caller, read: Read, reply: Reply<R>) {
        let handle = read.handle;
        let offset = read.offset;
        let size = read.size as usize;
        let end = offset.saturating_add(read.size.into());
        self.engine
            .accessed(handle, caller.pid, Access::Read, offset..end);
        let call = move |engine: &Engine<B>, buffer: &mut [u8]| match engine
            .read(handle, offset, buffer)
        {
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
        // The kernel writes pages of mappings for nobody in particular.
        let pid = if write.from_cache { 0 } else { caller.pid };
        let end = write.offset.saturating_add(data.len() as u64);
        self.engine
            .accessed(write.handle, pid, Access::Write, write.offset..end);
        let keeps_set_id = !write.kills_set_id;
        let by =
            (!write.from_cache).then(|| Process::of(caller).known_to_have_cap_fsetid(keeps_set_id));
        let pending = PendingWrite { target, by, reply };
        match self.call_slots.acquire() {
            Some(_slot) => self.stalled.write(pending, data),
            // A write that needs memory only goes on without a copy, whatever hangs.
            None if !self
                .engine
                .write_may_wait(target.handle, end, pending.principal()) =>
            {
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

    pub(super) fn flush(&self, caller: Caller, handle: HandleId, reply: Reply<R>) {
        let by = if self.engine.is_writer(handle) {
            closing(caller)
        } else {
            Closing::Called
        };
        self.engine
            .flush(handle, by, Box::new(move |result| reply.done(result)));
    }

    pub(super) fn fsync(&self, inode: InodeId, handle: HandleId, data_only: bool, reply: Reply<R>) {
        let engine = Arc::clone(&self.engine);
        let workers = self.workers.clone();
        let is_durable = engine.options().fsync == FsyncPolicy::Durable;
        let drained = Box::new(move |result: Result<(), Errno>| match result {
            Ok(()) if is_durable => {
                workers.run_about(Class::Call, Topic::Inode(inode), move || {
                    reply.done(engine.sync_file(handle, data_only));
                })
            }
            result => reply.done(result),
        });
        self.engine.fsync(handle, drained);
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
        if mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0 {
            let range = offset..offset.saturating_add(len);
            self.engine
                .accessed(handle, caller.pid, Access::Write, range);
        }
        let by = Process::of(caller);
        self.run_drained(inode, handle, move |engine| {
            let ready = engine.drop_privileges(inode, &by);
            reply.done(ready.and_then(|()| engine.allocate(handle, mode, offset, len)));
        });
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
        let range = |offset: u64| offset..offset.saturating_add(len);
        let pid = caller.pid;
        self.engine
            .accessed(copy.from, pid, Access::Read, range(copy.from_offset));
        self.engine
            .accessed(copy.to, pid, Access::Write, range(copy.to_offset));
        let by = Process::of(caller);
        self.run_on_worker(Topic::Inode(copy.to_inode), move |engine| {
            let copied = engine.drop_privileges(copy.to_inode, &by).and_then(|()| {
                engine.copy_range(copy.from, copy.from_offset, copy.to, copy.to_offset, len)
            });
            reply.answer(copied.map(|bytes| Answer::Written(bytes as u32)));
        });
    }
}
