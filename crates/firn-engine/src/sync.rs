//! close(2) and fsync(2): the calls that wait for a durability level of one file.
//!
//! A file is *drained* when the backing has all bytes that were pending in memory. A *grant* is a client process's
//! right to write the file directly into that memory.
//!
//! Each function with a callback `done` calls it exactly once with the result. If there is nothing to wait for, it
//! calls `done` before it returns.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_backing::{Backing, FileUse};

use crate::engine::Engine;
use crate::file::File;
use crate::options::{ClosePolicy, FsyncPolicy};
use crate::{Closing, Done, HandleId, InodeId, Result};

impl<B: Backing> Engine<B> {
    /// Handles close(2) of one descriptor. Calls `done` when the file is drained (all its bytes are in the backing), or
    /// with the error when an attempt failed.
    ///
    /// The call does not wait if nothing is pending, or if no name leads to the file. With the policy *held*, data may
    /// remain in memory after close(2), so the call never waits.
    pub fn flush(&self, handle_id: HandleId, closing: Closing, done: Done) {
        let handle = match self.open_files.handle(handle_id) {
            Ok(handle) => handle,
            Err(errno) => return done(Err(errno)),
        };
        // A normal close clears the mark of an earlier close by a killed process: the last close decides whether the
        // file is complete. The mark itself was set before this call, by `record_killed_closer`.
        if closing != Closing::Killed {
            handle.was_closed_by_kill.store(false, Ordering::Release);
        }
        match self.revoke_grant_and_try_close(&handle.file) {
            Some(result) => done(result),
            None => {
                let done = self.time_close(done);
                self.drainer.when_drained(&handle.file, done);
            }
        }
    }

    /// Ends the grant (a client's right to write the file directly) at a close of a descriptor of the file. Returns the
    /// result of close(2), or `None` if the close must wait until the pending bytes are in the backing.
    fn revoke_grant_and_try_close(&self, file: &Arc<File<B>>) -> Option<Result<()>> {
        let mut state = file.lock();
        // The grant must end before close(2) returns. After that, the process may get the same descriptor number for
        // another file. A client library that has not noticed the close would then write to the wrong file.
        self.intake.revoke_grant(file, &mut state);
        let must_wait = self.base.options.close != ClosePolicy::Held
            && !state.unlinked
            && !state.pending.is_empty();
        if must_wait {
            return None;
        }
        // Every close returns the error until a drain succeeds, because this close may come from a child that only
        // inherited the descriptor and ignores the result.
        match state.drain.failure() {
            Some(failure) => Some(Err(failure.errno)),
            None => Some(Ok(())),
        }
    }

    /// Returns whether a close of this handle has to wait for a drain, or to return an error.
    pub fn is_pending(&self, handle_id: HandleId) -> bool {
        self.open_files.handle(handle_id).is_ok_and(|handle| {
            let state = handle.file.lock();
            !state.pending.is_empty() || state.direct.has_grant() || state.drain.failure().is_some()
        })
    }

    /// Wraps `done` to count how long a close waits for the backing from now on.
    fn time_close(&self, done: Done) -> Done {
        let base = Arc::clone(&self.base);
        let start = Instant::now();
        Box::new(move |drained| {
            let waited_us = start.elapsed().as_micros() as u64;
            let counter = &base.counters.close_wait_us;
            counter.fetch_add(waited_us, Ordering::Relaxed);
            done(drained);
        })
    }

    /// Records that the process that closes a handle was killed. Called before that close is answered, and before
    /// [`Engine::flush`].
    pub fn record_killed_closer(&self, handle_id: HandleId) {
        if let Ok(handle) = self.open_files.handle(handle_id) {
            handle.was_closed_by_kill.store(true, Ordering::Release);
        }
    }

    /// Records which thread opened a file, on a backing that finishes files.
    pub fn record_opener(&self, handle_id: HandleId, thread: u32) {
        if self.base.backing.features().finishes_files
            && let Ok(handle) = self.open_files.handle(handle_id)
        {
            handle.opener.store(thread, Ordering::Release);
        }
    }

    /// Records that a writer closes a file, and returns whether the backing must finish the file now, for example copy
    /// its logs into the plain file. If so, the thread that answers must call [`Engine::finish_file`] after
    /// [`Engine::flush`] is done.
    ///
    /// Only the close by the process that opened the handle counts. The file is finished at the close of its last
    /// writer: each handle is counted as closing once, so of several writers that close at once, the last one gets
    /// true.
    pub fn finishes_file(&self, handle_id: HandleId, is_opener: &dyn Fn(u32) -> bool) -> bool {
        if !self.base.backing.features().finishes_files
            || self.base.options.close == ClosePolicy::Held
        {
            return false;
        }
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return false;
        };
        if !handle.writable || !is_opener(handle.opener.load(Ordering::Acquire)) {
            return false;
        }
        let mut state = handle.file.lock();
        // A handle may be closed several times, by several descriptors, and is counted once.
        if !handle.has_closed_descriptor.swap(true, Ordering::AcqRel) {
            state.opens.begin_closing();
        }
        state.opens.are_writers_closing() && !state.unlinked
    }

    /// Lets the backing finish a file, as far as other hosts allow it. The call may take as long as a write of the
    /// whole file.
    pub fn finish_file(&self, handle_id: HandleId) -> Result<()> {
        let handle = self.open_files.handle(handle_id)?;
        let writer = self.open_files.writer(&handle.file)?;
        self.base
            .backing
            .report_use(&writer.file, FileUse::Finished)
    }

    /// Calls `done` when all bytes that are pending now are in the backing, or with the error when an attempt failed.
    pub fn drained(&self, handle_id: HandleId, done: Done) {
        match self.open_files.handle(handle_id) {
            Err(errno) => done(Err(errno)),
            Ok(handle) => self.drainer.when_drained(&handle.file, done),
        }
    }

    /// Does the first half of fsync(2): drains the file (writes its pending bytes to the backing). After `done` gets
    /// `Ok`, the caller does the second half with [`Engine::sync_file`], which must not run in a drain thread. With the
    /// policy *held* there is nothing to drain, and only an error that no program has got yet is returned.
    pub fn fsync(&self, handle_id: HandleId, done: Done) {
        match self.base.options.fsync {
            FsyncPolicy::Durable => self.drained(handle_id, done),
            FsyncPolicy::Held => {
                let failure = self
                    .open_files
                    .handle(handle_id)
                    .map(|handle| handle.file.lock().drain.take_unreported_failure());
                done(match failure {
                    Ok(None) => Ok(()),
                    Ok(Some(errno)) | Err(errno) => Err(errno),
                });
            }
        }
    }

    /// Returns what fsync(2) waits for on this mount.
    pub fn fsync_policy(&self) -> FsyncPolicy {
        self.base.options.fsync
    }

    /// Does the second half of fsync(2): syncs the backing file and its new names. Does nothing if the policy is
    /// *held*.
    pub fn sync_file(&self, handle_id: HandleId, data_only: bool) -> Result<()> {
        if self.base.options.fsync == FsyncPolicy::Held {
            return Ok(());
        }
        let handle = self.open_files.handle(handle_id)?;
        self.open_files.close_excess_files();
        self.open_files
            .with_descriptor(|| self.durability.sync_data(&handle.file, data_only))?;
        self.kernel_cache.drop_kernel_attributes(&handle.file);
        Ok(())
    }

    /// Handles fsync(2) of a directory: syncs its names, and the names that lead to it. Does nothing if the policy is
    /// *held*.
    pub fn sync_dir(&self, inode_id: InodeId) -> Result<()> {
        let inode = self.tree.inode(inode_id)?;
        if self.base.options.fsync == FsyncPolicy::Held {
            return Ok(());
        }
        self.durability.sync_entries(&inode)?;
        self.durability.sync_names(&inode)
    }
}
