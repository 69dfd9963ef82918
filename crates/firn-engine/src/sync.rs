//! Waiting for durability levels: close, fsync, `firn wait`.

use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_backing::{Backing, Errno, FileUse, KernelReads, SyncScope, is_below};
use firn_format::durability::DurabilityLevel;

use crate::engine::Engine;
use crate::file::{File, Waiter};
use crate::names::Inode;
use crate::options::{ClosePolicy, FsyncPolicy};
use crate::{Closing, Done, HandleId, InodeId, Result};

/// How often a long wait reports its progress.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Number of files that somebody waits for. The waiter is woken by the last of them, not by each: to look at all files
/// after every one would take quadratic time.
#[derive(Default)]
struct Draining {
    files: parking_lot::Mutex<usize>,
    all_ended: parking_lot::Condvar,
}

impl Draining {
    fn begin(&self) {
        *self.files.lock() += 1;
    }

    fn end(&self) {
        let mut files = self.files.lock();
        *files -= 1;
        if *files == 0 {
            self.all_ended.notify_all();
        }
    }

    /// Returns when the last file has ended, or after `timeout`.
    fn wait(&self, timeout: Duration) {
        let mut files = self.files.lock();
        self.all_ended
            .wait_while_for(&mut files, |files| *files > 0, timeout);
    }
}

impl<B: Backing> Engine<B> {
    /// close(2) of one descriptor: `done` is called when the file is drained or a try to drain it
    /// failed; at once where the policy is *held* or no name leads to the file.
    pub fn flush(&self, handle: HandleId, by: Closing, done: Done) {
        match self.handle(handle) {
            Err(errno) => done(Err(errno)),
            Ok(handle) => {
                // The last one counts: whoever closes after others were killed has seen to the file.
                handle
                    .killed
                    .store(by == Closing::Killed, Ordering::Release);
                let skip = {
                    let mut state = handle.file.lock();
                    // Not at the release, which the kernel sends some time after close(2) returned: the
                    // number may be another descriptor by then, and the client has not seen the close.
                    self.revoke_grant(&handle.file, &mut state);
                    let skip = self.options.close == ClosePolicy::Held
                        || state.unlinked
                        || state.pending.is_empty();
                    // Every close is told as long as it is so: this one may be that of a child which only
                    // inherited the descriptor, and whom nobody asks.
                    skip.then(|| state.drain.failure().map(|failure| failure.errno))
                };
                match skip {
                    Some(None) => done(Ok(())),
                    Some(Some(errno)) => done(Err(errno)),
                    None => self.when_drained(&handle.file, done),
                }
            }
        }
    }

    /// Notes that the process that closes a handle was killed. For a close that is answered before [`Engine::flush`].
    pub fn note_killed(&self, handle: HandleId) {
        if let Ok(handle) = self.handle(handle) {
            handle.killed.store(true, Ordering::Release);
        }
    }

    /// This thread has opened a file.
    pub fn note_opener(&self, handle: HandleId, thread: u32) {
        if self.backing.features().finishes_files
            && let Ok(handle) = self.handle(handle)
        {
            handle.opener.store(thread, Ordering::Release);
        }
    }

    /// Whether something is left to do for the file when this close(2) is over: whoever answers it calls
    /// [`Engine::finish_file`] once [`Engine::flush`] is done. Nothing is as long as other writers have it open, or where
    /// it is not closed by the process of the thread that opened it.
    pub fn finishes_file(&self, handle: HandleId, is_opener: &dyn Fn(u32) -> bool) -> bool {
        if !self.backing.features().finishes_files || self.options.close == ClosePolicy::Held {
            return false;
        }
        let Ok(handle) = self.handle(handle) else {
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
        let handle = self.handle(handle)?;
        let writer = self.writer(&handle.file)?;
        self.backing.note_use(&writer.file, FileUse::Finished)
    }

    /// `done` is called when what the file has pending now is in the backing, or a try failed.
    pub fn drained(&self, handle: HandleId, done: Done) {
        match self.handle(handle) {
            Err(errno) => done(Err(errno)),
            Ok(handle) => self.when_drained(&handle.file, done),
        }
    }

    /// First half of fsync(2); the second is [`Engine::sync_file`], to be called off the drain
    /// threads once `done` said `Ok`.
    pub fn fsync(&self, handle: HandleId, done: Done) {
        match self.options.fsync {
            FsyncPolicy::Durable => self.drained(handle, done),
            FsyncPolicy::Held => {
                let told = self
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
        self.options.fsync
    }

    /// Syncs the backing file and, where it is new, its names. Does nothing where the policy is *held*.
    pub fn sync_file(&self, handle: HandleId, data_only: bool) -> Result<()> {
        if self.options.fsync == FsyncPolicy::Held {
            return Ok(());
        }
        let handle = self.handle(handle)?;
        self.close_excess_files();
        self.with_descriptor(|| self.sync_data(&handle.file, data_only))?;
        self.drop_kernel_attributes(&handle.file);
        Ok(())
    }

    pub(crate) fn sync_data(&self, file: &Arc<File<B>>, data_only: bool) -> Result<()> {
        let (writer, clean) = {
            let state = file.lock();
            (state.writer.clone(), state.pending.is_empty())
        };
        let source = writer.map_or_else(|| self.reader(file), Ok)?;
        if self.backing.kernel_reads(&source.file) == KernelReads::Shared {
            // What other hosts have synced is newer than what the arena keeps.
            self.check_cache(file)?;
        }
        // Cleared before the sync: what is drained during it is not known to be covered.
        file.inode.data_unsynced.store(false, Ordering::Release);
        if let Err(errno) = self.backing.sync(&source.file, data_only) {
            file.inode.data_unsynced.store(true, Ordering::Release);
            let path = file.inode.paths().into_iter().next().unwrap_or_default();
            self.errors
                .record(path, errno, "fsync of the backing failed".into());
            return Err(errno);
        }
        self.sync_names(&file.inode)?;
        if clean {
            file.inode.durable.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Syncs all that is at or below a directory, and marks the files there that firnd knows as durable.
    fn sync_data_below(&self, path: &[u8], directory: &Inode<B>) -> Result<()> {
        let mut files = self.names.all();
        files.retain(|inode| {
            inode.kind == firn_backing::Kind::File
                && (path.is_empty() || inode.paths().iter().any(|known| is_below(known, path)))
        });
        // Cleared before the sync, as for one file.
        let unsynced: Vec<_> = files
            .iter()
            .filter(|inode| inode.data_unsynced.swap(false, Ordering::AcqRel))
            .collect();
        let synced = self
            .object(directory)
            .and_then(|top| self.backing.sync_scope(SyncScope::Tree(&top)));
        if synced.is_err() {
            for inode in unsynced {
                inode.data_unsynced.store(true, Ordering::Release);
            }
            return synced;
        }
        for inode in &files {
            self.mark_durable_if_clean(inode);
        }
        Ok(())
    }

    /// After a sync of an inode's data: what is pending by now was not covered.
    fn mark_durable_if_clean(&self, inode: &Inode<B>) {
        let Some(file) = self.known_file(inode) else {
            inode.durable.store(true, Ordering::Release);
            return;
        };
        let mut state = file.lock();
        self.ingest_published(&file, &mut state);
        if state.pending.is_empty() {
            inode.durable.store(true, Ordering::Release);
        }
    }

    /// Syncs every directory above that has a new name on the way.
    fn sync_names(&self, inode: &Arc<Inode<B>>) -> Result<()> {
        if inode.name_unsynced.swap(false, Ordering::AcqRel) {
            for parent in inode.parents() {
                let synced = self
                    .object(&parent)
                    .and_then(|dir| self.backing.sync_dir(&dir));
                if let Err(errno) = synced {
                    inode.name_unsynced.store(true, Ordering::Release);
                    return Err(errno);
                }
            }
        }
        for parent in inode.parents() {
            self.sync_names(&parent)?;
        }
        Ok(())
    }

    /// fsync(2) of a directory.
    pub fn sync_dir(&self, inode: InodeId) -> Result<()> {
        let inode = self.inode(inode)?;
        if self.options.fsync == FsyncPolicy::Held {
            return Ok(());
        }
        self.backing.sync_dir(&self.object(&inode)?)?;
        self.sync_names(&inode)
    }

    pub(crate) fn when_drained(&self, file: &Arc<File<B>>, done: Done) {
        let mut state = file.lock();
        self.ingest_published(file, &mut state);
        if state.pending.is_empty() {
            drop(state);
            done(Ok(()));
            return;
        }
        let until = state
            .pending
            .extents()
            .iter()
            .map(|(_, e)| e.sequence)
            .max()
            .unwrap_or(0);
        self.drain.count_waiter();
        state.drain.add_waiter(Waiter { until, done });
        // Someone waits: the next try is now, not after the back-off.
        state.drain.retry_now();
        self.drain.force(file, &mut state);
        self.drain.queue_of(file).note_awaited(file);
        // Also if the file is in line already: who drains may have put it off.
        self.drain.wake(file.lane);
    }

    // ---- trees -------------------------------------------------------------------------------

    pub(crate) fn pending_below(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        self.ingest_all_published();
        let files = self.files.all();
        files
            .into_iter()
            .filter(|file| file.lock().pending.bytes() > 0)
            .filter(|file| path.is_empty() || file.inode.paths().iter().any(|p| is_below(p, path)))
            .collect()
    }

    /// Begins to drain the files at or below `path`.
    pub fn drain_tree(&self, path: &[u8]) {
        for file in self.pending_below(path) {
            let mut state = file.lock();
            state.drain.retry_now();
            self.drain.force(&file, &mut state);
        }
    }

    /// Drains the files at or below `path` and blocks until they stand on `until`. `progress` is told
    /// the bytes and files that are left, some ten times a second, and ends the wait with false
    /// (ECANCELED). A file that cannot be drained ends it with its errno.
    pub fn wait_tree(
        &self,
        path: &[u8],
        until: DurabilityLevel,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        if !path.is_empty() {
            self.find(path)?;
        }
        let mut first = Vec::new();
        let draining = Arc::new(Draining::default());
        for file in self.pending_below(path) {
            let errors = Arc::new(parking_lot::Mutex::new(None));
            let told = Arc::clone(&errors);
            first.push((Arc::clone(&file), Arc::clone(&errors)));
            let draining = Arc::clone(&draining);
            draining.begin();
            let done = move |result| {
                *told.lock() = Some(result);
                draining.end();
            };
            self.when_drained(&file, Box::new(done));
        }
        let mut failed = None;
        loop {
            let mut left = (0, 0);
            first.retain(|(file, told)| {
                match *told.lock() {
                    Some(Ok(())) => return false,
                    Some(Err(errno)) => {
                        // The others are waited for: one that fails does not keep them from their level.
                        failed = Some(errno);
                        return false;
                    }
                    None => {}
                }
                left.0 += file.lock().pending.bytes();
                left.1 += 1;
                true
            });
            if !progress(left.0, left.1) {
                return Err(Errno::CANCELED);
            }
            if left.1 == 0 {
                break;
            }
            draining.wait(REPORT_EVERY);
        }
        if let Some(errno) = failed {
            return Err(errno);
        }
        if until == DurabilityLevel::Durable {
            self.make_durable(path)
        } else {
            Ok(())
        }
    }

    /// What is at the path, and the names that lead to it. An earlier firnd may have made them and not synced them.
    fn make_durable(&self, path: &[u8]) -> Result<()> {
        let inode = self.find(path)?;
        if inode.kind == firn_backing::Kind::File {
            let file = self.file_with(&inode, |_| {});
            let result = self.sync_data(&file, false);
            self.drop_if_unused(&file);
            result?;
        } else if inode.kind == firn_backing::Kind::Dir {
            self.sync_data_below(path, &inode)?;
        }
        let above = path
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(&[][..], |end| &path[..end]);
        self.sync_dirs(above)
    }

    /// Syncs the directories on a path, and the top.
    fn sync_dirs(&self, path: &[u8]) -> Result<()> {
        let mut inode = Arc::clone(self.names.root());
        self.backing.sync_dir(&self.object(&inode)?)?;
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            inode = self.find_in(&inode, name)?;
            self.backing.sync_dir(&self.object(&inode)?)?;
        }
        Ok(())
    }

    /// The inode of a path below the mount.
    pub(crate) fn find(&self, path: &[u8]) -> Result<Arc<Inode<B>>> {
        let mut inode = Arc::clone(self.names.root());
        for name in path.split(|b| *b == b'/').filter(|name| !name.is_empty()) {
            // The kernel resolves these; in a path that comes another way they may lead out of the backing.
            if matches!(name, b"." | b"..") {
                return Err(Errno::NOENT);
            }
            inode = self.find_in(&inode, name)?;
        }
        Ok(inode)
    }

    fn find_in(&self, dir: &Arc<Inode<B>>, name: &[u8]) -> Result<Arc<Inode<B>>> {
        let name = std::ffi::OsStr::from_bytes(name);
        let (object, attr) = self.backing.lookup(&self.object(dir)?, name)?;
        Ok(self.names.register(object, &attr, dir, name, 0))
    }
}
