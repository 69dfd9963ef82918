//! Changes of a file's length, and others that need the backing file for themselves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::lock::MutexGuard;
use firn_backing::{Backing, Errno, Seek};
use firn_format::record::Record;

use crate::engine::Engine;
use crate::file::{BackingFile, File, FileState};
use crate::{HandleId, Result};

impl<B: Backing> Engine<B> {
    /// ftruncate(2). The journal knows of it before the backing does, so that a crash leaves the old
    /// file or the new one: pieces beyond the new end never come back.
    pub(crate) fn truncate_file(&self, file: &Arc<File<B>>, size: u64) -> Result<()> {
        let target = self.writer(file)?;
        let mut state = file.begin_exclusive();
        self.revoke_grant(file, &mut state);
        state.note_change(&self.arena);
        let result = self.truncate_exclusively(file, &mut state, &target, size);
        file.end_exclusive(&mut state);
        if size == 0 && result.is_ok() {
            self.journal.record_emptied(&mut state);
        }
        let waiters = self.finish_drained(file, &mut state);
        self.drain.enqueue(file, &mut state);
        drop(state);
        for waiter in waiters {
            (waiter.done)(Ok(()));
        }
        self.wake_writers();
        result
    }

    fn truncate_exclusively(
        &self,
        file: &Arc<File<B>>,
        state: &mut MutexGuard<'_, FileState<B>>,
        target: &BackingFile<B>,
        size: u64,
    ) -> Result<()> {
        file.inode.durable.store(false, Ordering::Relaxed);
        // Bytes that are written meanwhile are later ones: they make pieces of their own.
        state.pending.end_tail();
        let cuts = state.pending.end() > size;
        let Some(file_id) = state.pending.file_id().filter(|_| cuts) else {
            state.unlocked(|| self.backing.set_len(&target.file, size))?;
            state.cache.drop_range(&self.arena, size..u64::MAX);
            state.cache.trust();
            if !state.pending.is_empty() {
                state.pending.touch();
                state.pending.keep_time(&self.arena);
            }
            file.inode.data_unsynced.store(true, Ordering::Release);
            return Ok(());
        };
        let sequence = self.arena.next_sequence();
        let begin = Record::TruncateBegin {
            file: file_id.get(),
            sequence,
            size,
        };
        self.journal.append(&begin)?;
        let result = state.unlocked(|| self.backing.set_len(&target.file, size));
        if result.is_ok() {
            // The end goes first: once a dead piece's slab is reused, a replay must not need it. Without
            // it a recovery would truncate again, over what was drained since: then the pieces stay
            // pending until the journal takes it.
            let end = Record::TruncateEnd {
                file: file_id.get(),
                sequence,
                size,
                done: true,
            };
            self.journal.append_end(&end);
            state.pending.add_drained_range();
            let before = state.pending.bytes();
            let cancelled = state.cut(&self.arena, size..u64::MAX, sequence);
            self.counters
                .cancelled_bytes
                .fetch_add(cancelled, Ordering::Relaxed);
            self.drain.count_held(file, before, state.pending.bytes());
            state.pending.touch();
            state.pending.keep_time(&self.arena);
            file.inode.data_unsynced.store(true, Ordering::Release);
        } else {
            self.journal.append_end(&Record::TruncateEnd {
                file: file_id.get(),
                sequence,
                size,
                done: false,
            });
        }
        result
    }

    /// fallocate(2); drains the file first, also where no contents change: whether its time does is the
    /// backing's to say, and a drain after it would put back the time of the last write.
    pub fn allocate(&self, handle: HandleId, mode: i32, offset: u64, len: u64) -> Result<()> {
        let handle = self.handle(handle)?;
        if !handle.writable {
            return Err(Errno::BADF);
        }
        self.end_grant(&handle.file);
        self.drain_and_wait(&handle.file)?;
        self.with_exclusive_file(&handle.file, |target| {
            self.backing.allocate(target, mode, offset, len)
        })
    }

    /// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`; drains the file first.
    pub fn seek(&self, handle: HandleId, offset: u64, what: Seek) -> Result<u64> {
        let handle = self.handle(handle)?;
        self.drain_and_wait(&handle.file)?;
        let source = self.reader(&handle.file)?;
        self.backing.seek(&source.file, offset, what)
    }

    /// copy_file_range(2) between files of the mount; drains both first.
    pub fn copy_range(
        &self,
        from: HandleId,
        from_offset: u64,
        to: HandleId,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let from = self.handle(from)?;
        let to = self.handle(to)?;
        if !from.readable || !to.writable {
            return Err(Errno::BADF);
        }
        self.end_grant(&from.file);
        self.end_grant(&to.file);
        self.drain_and_wait(&from.file)?;
        self.drain_and_wait(&to.file)?;
        let source = self.reader(&from.file)?;
        self.with_exclusive_file(&to.file, |target| {
            self.backing
                .copy_range(&source.file, from_offset, target, to_offset, len)
        })
    }

    /// Whether the file has pending bytes, so that those calls would wait for a drain.
    pub fn needs_drain(&self, handle: HandleId) -> bool {
        self.handle(handle).is_ok_and(|h| {
            let mut state = h.file.lock();
            self.ingest_published(&h.file, &mut state);
            !state.pending.is_empty()
        })
    }

    /// Runs `work` on the backing file while no drain writes to it.
    pub(crate) fn with_exclusive_file<T>(
        &self,
        file: &Arc<File<B>>,
        work: impl FnOnce(&B::File) -> Result<T>,
    ) -> Result<T> {
        let target = self.writer(file)?;
        let mut state = file.begin_exclusive();
        self.revoke_grant(file, &mut state);
        state.note_change(&self.arena);
        state.cache.drop_all(&self.arena);
        state.pending.end_tail();
        let result = state.unlocked(|| work(&target.file));
        file.inode.durable.store(false, Ordering::Relaxed);
        file.inode.data_unsynced.store(true, Ordering::Release);
        file.end_exclusive(&mut state);
        self.drain.enqueue(file, &mut state);
        result
    }
}
