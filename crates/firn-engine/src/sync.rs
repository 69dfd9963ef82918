//! Waiting for durability levels: close, fsync, `firn wait`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use firn_backing::{Backing, FileUse};

use crate::engine::Engine;
use crate::options::{ClosePolicy, FsyncPolicy};
use crate::{Closing, Done, HandleId, InodeId, Result};

impl<B: Backing> Engine<B> {
    /// close(2) of one descriptor: `done` is called when the file is drained or a try to drain it
    /// failed; at once where the policy is *held* or no name leads to the file.
    pub fn flush(&self, handle: HandleId, by: Closing, done: Done) {
        match self.open_files.handle(handle) {
            Err(errno) => done(Err(errno)),
            Ok(handle) => {
                // The last close counts: a process that closes after others were killed has seen to the file. A killed
                // process was noted, and answered, before: others may have closed the file since.
                if by != Closing::Killed {
                    handle.killed.store(false, Ordering::Release);
                }
                let skip = {
                    let mut state = handle.file.lock();
                    // Not at the release, which the kernel sends some time after close(2) returned: the
                    // number may be another descriptor by then, and the client has not seen the close.
                    self.intake.revoke_grant(&handle.file, &mut state);
                    let skip = self.base.options.close == ClosePolicy::Held
                        || state.unlinked
                        || state.pending.is_empty();
                    // Every close is told as long as it is so: this one may be that of a child which only inherited the
                    // descriptor and ignores the result.
                    skip.then(|| state.drain.failure().map(|failure| failure.errno))
                };
                match skip {
                    Some(None) => done(Ok(())),
                    Some(Some(errno)) => done(Err(errno)),
                    None => {
                        let done = self.time_close(done);
                        self.drainer.when_drained(&handle.file, done);
                    }
                }
            }
        }
    }

    /// Whether a close of this handle would have something to wait for, or to tell.
    pub fn is_pending(&self, handle: HandleId) -> bool {
        self.open_files.handle(handle).is_ok_and(|handle| {
            let state = handle.file.lock();
            !state.pending.is_empty() || state.direct.has_grant() || state.drain.failure().is_some()
        })
    }

    /// Counts how long a close waits for the backing from now on.
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

    /// Notes that the process that closes a handle was killed: before it is answered, and before [`Engine::flush`].
    pub fn note_killed(&self, handle: HandleId) {
        if let Ok(handle) = self.open_files.handle(handle) {
            handle.killed.store(true, Ordering::Release);
        }
    }

    /// This thread has opened a file.
    pub fn note_opener(&self, handle: HandleId, thread: u32) {
        if self.base.backing.features().finishes_files
            && let Ok(handle) = self.open_files.handle(handle)
        {
            handle.opener.store(thread, Ordering::Release);
        }
    }

    /// Whether something is left to do for the file when this close(2) is over: if so, the answering thread calls
    /// [`Engine::finish_file`] once [`Engine::flush`] is done. Nothing is as long as other writers have it open, or
    /// where it is not closed by the process of the thread that opened it.
    pub fn finishes_file(&self, handle: HandleId, is_opener: &dyn Fn(u32) -> bool) -> bool {
        if !self.base.backing.features().finishes_files
            || self.base.options.close == ClosePolicy::Held
        {
            return false;
        }
        let Ok(handle) = self.open_files.handle(handle) else {
            return false;
        };
        if !handle.writable || !is_opener(handle.opener.load(Ordering::Acquire)) {
            return false;
        }
        let mut state = handle.file.lock();
        // Two that close at the same time count both: the second one sees it.
        if !handle.closing.swap(true, Ordering::AcqRel) {
            state.opens.begin_closing();
        }
        state.opens.are_writers_closing() && !state.unlinked
    }

    /// Does that, as far as other hosts let it. May take as long as writing the file.
    pub fn finish_file(&self, handle: HandleId) -> Result<()> {
        let handle = self.open_files.handle(handle)?;
        let writer = self.open_files.writer(&handle.file)?;
        self.base.backing.note_use(&writer.file, FileUse::Finished)
    }

    /// `done` is called when what the file has pending now is in the backing, or a try failed.
    pub fn drained(&self, handle: HandleId, done: Done) {
        match self.open_files.handle(handle) {
            Err(errno) => done(Err(errno)),
            Ok(handle) => self.drainer.when_drained(&handle.file, done),
        }
    }

    /// First half of fsync(2); the second is [`Engine::sync_file`], to be called off the drain
    /// threads once `done` said `Ok`.
    pub fn fsync(&self, handle: HandleId, done: Done) {
        match self.base.options.fsync {
            FsyncPolicy::Durable => self.drained(handle, done),
            FsyncPolicy::Held => {
                let told = self
                    .open_files
                    .handle(handle)
                    .map(|h| h.file.lock().drain.take_unreported_failure());
                done(match told {
                    Ok(None) => Ok(()),
                    Ok(Some(errno)) | Err(errno) => Err(errno),
                });
            }
        }
    }

    /// What fsync(2) means on this mount.
    pub fn fsync_policy(&self) -> FsyncPolicy {
        self.base.options.fsync
    }

    /// Syncs the backing file and, where it is new, its names. Does nothing where the policy is *held*.
    pub fn sync_file(&self, handle: HandleId, data_only: bool) -> Result<()> {
        if self.base.options.fsync == FsyncPolicy::Held {
            return Ok(());
        }
        let handle = self.open_files.handle(handle)?;
        self.open_files.close_excess_files();
        self.open_files
            .with_descriptor(|| self.durability.sync_data(&handle.file, data_only))?;
        self.kernel_cache.drop_kernel_attributes(&handle.file);
        Ok(())
    }

    /// fsync(2) of a directory.
    pub fn sync_dir(&self, inode: InodeId) -> Result<()> {
        let inode = self.tree.inode(inode)?;
        if self.base.options.fsync == FsyncPolicy::Held {
            return Ok(());
        }
        self.durability.sync_entries(&inode)?;
        self.durability.sync_names(&inode)
    }
}
