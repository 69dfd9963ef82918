//! Exclusive use of a file of the backing (the directory that a mount serves): truncations, and other changes during
//! which no drain may write pending bytes to the file.
//!
//! [`File::acquire_exclusive_use`] waits for drains in flight and prevents new ones. So the lock of the file can be
//! released during calls of the backing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_backing::Backing;
use firn_backing::lock::MutexGuard;
use firn_format::record::Record;

use crate::Result;
use crate::base::Base;
use crate::drain::Drain;
use crate::drainer::Drainer;
use crate::file::{BackingFile, File, FileId, FileState};
use crate::intake::Intake;
use crate::open_files::OpenFiles;
use crate::space::Room;
use crate::view::refresh_view;

/// Changes files while no drain writes to them.
pub struct Exclusive<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// Makes space in the arena.
    pub(crate) room: Arc<Room<B>>,
    /// Writes pending bytes to the backing.
    pub(crate) drainer: Arc<Drainer<B>>,
}

impl<B: Backing> Exclusive<B> {
    pub(crate) fn new(drainer: &Arc<Drainer<B>>) -> Self {
        Self {
            base: Arc::clone(&drainer.base),
            drain: Arc::clone(&drainer.drain),
            intake: Arc::clone(&drainer.intake),
            open_files: Arc::clone(&drainer.open_files),
            room: Arc::clone(&drainer.room),
            drainer: Arc::clone(drainer),
        }
    }

    /// Drops the pending data (bytes that are not in the backing yet) of a file that has neither a name nor a handle.
    /// Callers that wait for its drain get `Ok`.
    pub(crate) fn discard(&self, file: &Arc<File<B>>) {
        // Waits until no drain writes the file, because a drain reads the bytes that are dropped here.
        let mut state = file.acquire_exclusive_use();
        let bytes_before = state.pending.bytes();
        let whole_file = 0..u64::MAX;
        let last_sequence = u64::MAX;
        let cancelled_bytes = state.drop_extents(&self.base.arena, whole_file, last_sequence);
        self.base
            .counters
            .cancelled_bytes
            .fetch_add(cancelled_bytes, Ordering::Relaxed);
        state.pending.set_mtime(None);
        self.drain
            .record_pending_change(file, bytes_before, state.pending.bytes());
        let waiters = self.drainer.finish_drained(file, &mut state);
        file.release_exclusive_use(&mut state);
        // The lock is released, because the callbacks may take any lock.
        drop(state);
        for waiter in waiters {
            (waiter.done)(Ok(()));
        }
        // The file may be in use as a memory file, which must show the change.
        refresh_view(&self.intake, &self.open_files, file);
    }

    /// Drops pending data at or below `path`. A file without a name may not belong to this tree, so it is drained
    /// instead. If the drain fails, its data is dropped too.
    pub fn discard_tree(&self, path: &[u8]) {
        for file in self.open_files.files_at(path) {
            let is_nameless = file.lock().unlinked;
            if !is_nameless || self.drainer.drain_and_wait(&file).is_err() {
                self.discard(&file);
            }
            self.open_files.drop_if_unused(&file);
        }
        self.room.wake_writers();
    }

    /// Sets the length of a file (ftruncate(2)), in the backing and in the pending data.
    ///
    /// The journal gets a record before the backing is changed. So a crash leaves the old length or the new one, and
    /// pieces beyond the new end never become pending again. Fails with ENOSPC, without a change, if the journal is
    /// full.
    pub(crate) fn truncate_file(&self, file: &Arc<File<B>>, size: u64) -> Result<()> {
        let writer = self.open_files.writer(file)?;
        let mut state = file.acquire_exclusive_use();
        // A client process with a grant must not write the file directly any more.
        self.intake.revoke_grant(file, &mut state);
        state.record_change(&self.base.arena);
        let result = self.truncate_exclusively(file, &mut state, &writer, size);
        file.release_exclusive_use(&mut state);
        if size == 0 && result.is_ok() {
            // An empty file does not count as incomplete any more.
            self.base.journal.record_emptied(&mut state);
            file.inode.record_cut(state.opens.is_cut());
        }
        let waiters = self.drainer.finish_drained(file, &mut state);
        // A drain may have been refused during the exclusive use.
        self.drain.enqueue(file, &mut state);
        // The lock is released, because the callbacks may take any lock.
        drop(state);
        for waiter in waiters {
            (waiter.done)(Ok(()));
        }
        self.room.wake_writers();
        result
    }

    /// Sets the length of a file in the backing, and drops its bytes beyond that length from the arena. The caller has
    /// exclusive use of the file: no drain writes to it. The lock of `state` is released during the call of the
    /// backing.
    fn truncate_exclusively(
        &self,
        file: &Arc<File<B>>,
        state: &mut MutexGuard<'_, FileState<B>>,
        writer: &BackingFile<B>,
        size: u64,
    ) -> Result<()> {
        // The file is not durable any more.
        file.inode.synced.clear();
        // Recovery orders the truncation and the pieces by their sequences. Bytes that are written during the
        // truncation are newer than it, so they must not join a piece (a recorded append) from before it.
        state.pending.stop_extending_last_piece();
        if state.pending.end() > size
            && let Some(file_id) = state.pending.file_id()
        {
            return self.truncate_pending_bytes(file, state, writer, size, file_id);
        }
        // No pending byte is cut, so recovery needs no record.
        state.unlocked(|| self.base.backing.set_len(&writer.file, size))?;
        state.cache.drop_range(&self.base.arena, size..u64::MAX);
        state.set_view_len(&self.base.arena, size);
        // The cached bytes remain valid: this firnd changed the length, and not a program that does not use the mount.
        state.cache.accept_backing_state();
        if !state.pending.is_empty() {
            // The truncation is now the last change. Otherwise the drain of the pending bytes, or a recovery, would set
            // the earlier time of the last write.
            state.pending.record_write();
            state.pending.store_time_in_piece(&self.base.arena);
        }
        file.inode.data_unsynced.store(true, Ordering::Release);
        Ok(())
    }

    /// Truncates a file that has pending bytes (not in the backing yet) beyond the new end, and drops these bytes.
    /// Records the begin and the end of the truncation in the journal, so that recovery can complete it after a crash.
    /// The caller has exclusive use: no drain writes to the file.
    fn truncate_pending_bytes(
        &self,
        file: &Arc<File<B>>,
        state: &mut MutexGuard<'_, FileState<B>>,
        writer: &BackingFile<B>,
        size: u64,
        file_id: FileId,
    ) -> Result<()> {
        let sequence = self.base.arena.next_sequence();
        self.base.journal.append(&Record::TruncateBegin {
            file: file_id.get(),
            sequence,
            size,
        })?;
        let result = state.unlocked(|| self.base.backing.set_len(&writer.file, size));
        // The end is recorded before pieces (recorded appends) die, because a recovery after this record does not need
        // them. The journal has reserved room for the record: without it, a recovery would truncate once more, and
        // remove bytes that were drained since.
        self.base.journal.append_end(&Record::TruncateEnd {
            file: file_id.get(),
            sequence,
            size,
            done: result.is_ok(),
        });
        result?;
        // In the journal, the end record counts as one more drained range of the file: all bytes beyond the new end.
        state.pending.count_drained_range();
        let bytes_before = state.pending.bytes();
        let cancelled_bytes = state.drop_extents(&self.base.arena, size..u64::MAX, sequence);
        self.base
            .counters
            .cancelled_bytes
            .fetch_add(cancelled_bytes, Ordering::Relaxed);
        self.drain
            .record_pending_change(file, bytes_before, state.pending.bytes());
        state.set_view_len(&self.base.arena, size);
        state.pending.record_write();
        state.pending.store_time_in_piece(&self.base.arena);
        file.inode.data_unsynced.store(true, Ordering::Release);
        Ok(())
    }

    /// Runs `work` on the backing file while no drain writes to it, and returns its result. Cached bytes of the file
    /// are dropped, because `work` may change the file. The caller has drained the file if `work` needs its pending
    /// bytes.
    pub(crate) fn with_exclusive_file<T>(
        &self,
        file: &Arc<File<B>>,
        work: impl FnOnce(&B::File) -> Result<T>,
    ) -> Result<T> {
        let writer = self.open_files.writer(file)?;
        let mut state = file.acquire_exclusive_use();
        self.intake.revoke_grant(file, &mut state);
        state.record_change(&self.base.arena);
        state.cache.drop_all(&self.base.arena);
        // An append must not extend a piece (a recorded append) from before the change.
        state.pending.stop_extending_last_piece();
        let result = state.unlocked(|| work(&writer.file));
        // The file is not durable any more.
        file.inode.synced.clear();
        file.inode.data_unsynced.store(true, Ordering::Release);
        file.release_exclusive_use(&mut state);
        // A drain may have been refused during the exclusive use.
        self.drain.enqueue(file, &mut state);
        // The lock is released, because the next call reads the file.
        drop(state);
        // A memory file that programs read must show the change.
        refresh_view(&self.intake, &self.open_files, file);
        result
    }
}
