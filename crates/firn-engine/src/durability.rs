//! Durability levels of files and trees: what a file's data survives. Returns the level that a file has, and raises
//! files to a level.
//!
//! Terms
//! * The *backing* is the directory that the mount serves. A byte is *pending* while the backing does not have it.
//! * A file is *drained* when the backing has all of its bytes, and *durable* when they are synced there.
//! * A file's *names are synced* if a sync covered each name on the way from the root to it.
//! * A *fingerprint* is size and time of the backing's file. After a sync, the inode records the fingerprint that the
//!   file had before it. The file is durable as long as its fingerprint is this one.
//!
//! Why the fingerprint is read before the sync: bytes may be drained, or changed by other programs, during the sync,
//! which then does not cover them. Such a file has another fingerprint afterwards, and does not count as durable.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use firn_backing::{Backing, Errno, KernelReads, Kind, SyncScope, is_below};
use firn_format::durability::DurabilityLevel;

use crate::base::Base;
use crate::drain::Drain;
use crate::drainer::Drainer;
use crate::file::File;
use crate::file_events::FileChange;
use crate::intake::Intake;
use crate::names::{Fingerprint, Inode, last_name_change};
use crate::open_files::OpenFiles;
use crate::space::Room;
use crate::tree::{NameTree, SyncSnapshot};
use crate::{InodeId, Result};

/// Time between two progress reports of a long wait.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// The number of files whose drain a caller waits for. Only the last file wakes the caller: checks of all files after
/// each one would take quadratic time.
#[derive(Default)]
struct DrainCountdown {
    files: parking_lot::Mutex<usize>,
    all_ended: parking_lot::Condvar,
}

/// A file whose drain a caller waits for.
struct AwaitedFile<B: Backing> {
    file: Arc<File<B>>,
    /// Result of the drain; `None` before it has ended.
    result: Arc<parking_lot::Mutex<Option<Result<()>>>>,
}

impl DrainCountdown {
    /// Counts a file whose drain begins.
    fn add_file(&self) {
        *self.files.lock() += 1;
    }

    /// Uncounts a file whose drain has ended. The last one wakes the caller.
    fn remove_file(&self) {
        let mut files = self.files.lock();
        *files -= 1;
        if *files == 0 {
            self.all_ended.notify_all();
        }
    }

    /// Returns when the last file is done, or after `timeout`.
    fn wait(&self, timeout: Duration) {
        let mut files = self.files.lock();
        self.all_ended
            .wait_while_for(&mut files, |files| *files > 0, timeout);
    }
}

/// Answers which durability level a file has, and brings files to a level.
pub struct Durability<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
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

impl<B: Backing> Durability<B> {
    pub(crate) fn new(drainer: &Arc<Drainer<B>>) -> Self {
        Self {
            base: Arc::clone(&drainer.base),
            tree: Arc::clone(&drainer.tree),
            drain: Arc::clone(&drainer.drain),
            intake: Arc::clone(&drainer.intake),
            open_files: Arc::clone(&drainer.open_files),
            room: Arc::clone(&drainer.room),
            drainer: Arc::clone(drainer),
        }
    }

    /// Returns the durability level of all bytes of an inode. Fails with ESTALE if the inode is not known.
    pub fn level_of_file(&self, inode_id: InodeId) -> Result<DurabilityLevel> {
        Ok(self.level_of(&*self.tree.inode(inode_id)?))
    }

    /// Returns the durability level of all bytes of a file. All answers come from here: the extended attribute, `firn
    /// ls` and the control socket. The call waits for the backing.
    pub(crate) fn level_of(&self, inode: &Inode<B>) -> DurabilityLevel {
        if let Some(file) = self.open_files.known_file(inode) {
            let mut state = file.lock();
            self.intake.ingest_published(&file, &mut state);
            if !state.pending.is_empty() {
                return state.durability_of_pending(&self.base.arena);
            }
        }
        self.level_in_backing(inode)
    }

    /// Returns the durability level of a file without pending bytes. There are three outcomes:
    /// * *durable*, if this firnd has synced its bytes and names, and size and time are unchanged since
    /// * *drained* otherwise: all bytes are in the backing
    /// * a lower level, if the backing limits it (`level_max`), for example because a transaction may still
    ///   undo the changes
    pub(crate) fn level_in_backing(&self, inode: &Inode<B>) -> DurabilityLevel {
        // `None` if data or names are not synced. Otherwise size and time at the last sync.
        let synced = inode.synced();
        // An unsynced file is drained. A backing that keeps bytes in logs (`finishes_files`) may report a lower level,
        // so it is asked below.
        if synced.is_none() && !self.base.backing.features().finishes_files {
            return DurabilityLevel::Drained;
        }
        let Ok(object) = self.tree.object(inode) else {
            return DurabilityLevel::Drained;
        };
        let is_unchanged_since_sync = synced.is_some_and(|synced| {
            let attr = self.base.backing.attr(&object);
            attr.is_ok_and(|attr| Fingerprint::from_attr(&attr) == synced)
        });
        let level = if is_unchanged_since_sync {
            DurabilityLevel::Durable
        } else {
            DurabilityLevel::Drained
        };
        let level_max = self.base.backing.level_max(&object);
        level.min(level_max)
    }

    /// Syncs a file's data, and the directories with its names, in the backing. If `data_only` is true, syncs
    /// only the attributes that reads of the data need, as fdatasync(2) does.
    ///
    /// If no byte was pending (not in the backing), the file is durable afterwards. Pending bytes are not drained here,
    /// and the file keeps its level. If the sync of the data fails, the data counts as unsynced again, and the error is
    /// recorded for the status.
    pub(crate) fn sync_data(&self, file: &Arc<File<B>>, data_only: bool) -> Result<()> {
        let (writer, had_no_pending_bytes) = {
            let state = file.lock();
            (state.writer.clone(), state.pending.is_empty())
        };
        let backing_file = match writer {
            Some(writer) => writer,
            None => self.open_files.reader(file)?,
        };
        if self.base.backing.kernel_reads(&backing_file.file) == KernelReads::Shared {
            // Another host may have synced newer bytes than those that the arena caches.
            self.room.evict_if_backing_changed(file)?;
        }
        // The sync may not cover bytes that are changed or drained during it. So the snapshot of size and time is taken
        // before the sync. `data_unsynced` is cleared before the sync too, and each later drain sets it again.
        let snapshot_before_sync = self.tree.take_sync_snapshot(&file.inode).ok();
        file.inode.data_unsynced.store(false, Ordering::Release);
        if let Err(errno) = self.base.backing.sync(&backing_file.file, data_only) {
            file.inode.data_unsynced.store(true, Ordering::Release);
            self.record_sync_error(&file.inode, errno);
            return Err(errno);
        }
        self.sync_names(&file.inode)?;
        if had_no_pending_bytes && let Some(snapshot) = snapshot_before_sync {
            file.inode.synced.set(snapshot.fingerprint);
            let events = &self.base.file_events;
            events.record(&file.inode, FileChange::Durable);
            // The inode is kept after the kernel forgets it, so that the level remains known.
            self.tree.names.remember(&file.inode, snapshot.bytes);
        }
        Ok(())
    }

    /// Records for the status that a sync of a file's data failed.
    fn record_sync_error(&self, inode: &Inode<B>, errno: Errno) {
        let path = inode.paths().into_iter().next().unwrap_or_default();
        self.base
            .errors
            .record(path, errno, "fsync of the backing failed".into());
    }

    /// Syncs all objects at or below a directory in the backing, and marks the known files there as durable, if no byte
    /// of them is pending.
    fn sync_data_below(&self, path: &[u8], directory: &Inode<B>) -> Result<()> {
        let mut inodes = self.known_inodes_below(path);
        // Only directories and files are needed below. The references to other inodes are dropped now, so that the
        // tables can forget these inodes during the sync.
        inodes.retain(|inode| matches!(inode.kind, Kind::Dir | Kind::File));
        let files: Vec<_> = inodes
            .iter()
            .filter(|inode| inode.kind == Kind::File)
            .collect();
        // Names and files may be changed, and files drained, during the sync. So the state that it covers is read
        // first.
        let name_change_before_sync = last_name_change();
        let snapshots: Vec<_> = files
            .iter()
            .map(|inode| self.tree.take_sync_snapshot(inode).ok())
            .collect();
        let unsynced_files: Vec<_> = files
            .iter()
            .filter(|inode| inode.data_unsynced.swap(false, Ordering::AcqRel))
            .collect();
        let synced = self
            .tree
            .object(directory)
            .and_then(|object| self.base.backing.sync_scope(SyncScope::Tree(&object)));
        if synced.is_err() {
            for inode in unsynced_files {
                inode.data_unsynced.store(true, Ordering::Release);
            }
            return synced;
        }
        for dir in inodes.iter().filter(|inode| inode.kind == Kind::Dir) {
            dir.record_entries_synced(name_change_before_sync);
        }
        for (inode, snapshot) in files.iter().zip(snapshots) {
            // The sync of the tree covers names in it. A file may have another name elsewhere.
            if !inode.are_names_synced() {
                self.sync_names(inode)?;
            }
            if let Some(snapshot) = snapshot {
                self.mark_synced_if_clean(inode, snapshot);
            }
        }
        Ok(())
    }

    /// Returns the known inodes at or below `path`; the empty path is the top of the mount.
    fn known_inodes_below(&self, path: &[u8]) -> Vec<Arc<Inode<B>>> {
        let mut inodes = self.tree.names.all_inodes();
        if !path.is_empty() {
            inodes.retain(|inode| inode.paths().iter().any(|known| is_below(known, path)));
        }
        inodes
    }

    /// Marks an inode as durable after a sync of its data, unless it has pending bytes, which the sync did not cover.
    /// `snapshot` is the state of the file from before the sync.
    fn mark_synced_if_clean(&self, inode: &Arc<Inode<B>>, snapshot: SyncSnapshot) {
        // A file that is not in the table has no pending bytes.
        let file = self.open_files.known_file(inode);
        // The lock is held until the mark is set, so that no write comes in between.
        let state = file.as_ref().map(|file| {
            let mut state = file.lock();
            // Bytes that a client process has stored in the arena, without a request, count as written too.
            self.intake.ingest_published(file, &mut state);
            state
        });
        let is_clean = state.as_ref().is_none_or(|state| state.pending.is_empty());
        if is_clean {
            inode.synced.set(snapshot.fingerprint);
        }
        // The lock is released, because the mark is set.
        drop(state);
        if is_clean {
            let events = &self.base.file_events;
            events.record(inode, FileChange::Durable);
        }
        // The inode is kept after the kernel forgets it, so that the level remains known.
        if inode.synced.get().is_some() {
            self.tree.names.remember(inode, snapshot.bytes);
        }
    }

    /// Syncs the names in a directory. Changes of names that come during the sync are not covered.
    pub(crate) fn sync_entries(&self, dir: &Inode<B>) -> Result<()> {
        let name_change_before_sync = last_name_change();
        self.base.backing.sync_dir(&self.tree.object(dir)?)?;
        dir.record_entries_synced(name_change_before_sync);
        Ok(())
    }

    /// Syncs each directory on the way to the root that has an unsynced name of this inode or of a directory above
    /// it. Fails with the error of the first directory that cannot be synced; names in it then remain unsynced.
    pub(crate) fn sync_names(&self, inode: &Arc<Inode<B>>) -> Result<()> {
        if inode.name_unsynced.swap(false, Ordering::AcqRel) {
            for parent in inode.parents() {
                if let Err(errno) = self.sync_entries(&parent) {
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

    /// Returns the files with pending bytes at or below `path`.
    pub(crate) fn pending_below(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        self.intake.ingest_all_published();
        let files = self.open_files.files.all();
        files
            .into_iter()
            .filter(|file| file.lock().pending.bytes() > 0)
            .filter(|file| path.is_empty() || file.inode.paths().iter().any(|p| is_below(p, path)))
            .collect()
    }

    /// Begins to drain the files at or below `path`, and returns at once.
    pub fn drain_tree(&self, path: &[u8]) {
        for file in self.pending_below(path) {
            let mut state = file.lock();
            state.drain.retry_now();
            self.drain.force(&file, &mut state);
        }
    }

    /// Drains the files at or below `path` (writes their pending bytes to the backing), and blocks until they have the
    /// level `until`. The empty path is the root.
    ///
    /// `progress` gets the numbers of bytes and files that are left, about ten times a second. If `progress` returns
    /// false, the wait ends with ECANCELED. If a file cannot be drained, its errno is returned after the other files
    /// are drained.
    pub fn wait_tree(
        &self,
        path: &[u8],
        until: DurabilityLevel,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        if !path.is_empty() {
            self.tree.inode_at(path)?;
        }
        self.drain_and_wait_below(path, progress)?;
        if until == DurabilityLevel::Durable {
            self.make_durable(path)
        } else {
            Ok(())
        }
    }

    /// Drains the files at or below `path` (writes their pending bytes to the backing), and blocks until each drain has
    /// ended. Reports progress, and returns errors, as [`Self::wait_tree`] does.
    fn drain_and_wait_below(
        &self,
        path: &[u8],
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<()> {
        let mut awaited_files = Vec::new();
        // Each file is counted before it is drained, so that the first report has all of them.
        let (mut total_bytes, mut total_files) = (0, 0);
        let countdown = Arc::new(DrainCountdown::default());
        for file in self.pending_below(path) {
            total_bytes += file.lock().pending.bytes();
            total_files += 1;
            awaited_files.push(self.start_awaited_drain(file, &countdown));
        }
        if !progress(total_bytes, total_files) {
            return Err(Errno::CANCELED);
        }
        let mut last_error = None;
        loop {
            let (mut remaining_bytes, mut remaining_files) = (0, 0);
            awaited_files.retain(|AwaitedFile { file, result }| {
                let result = *result.lock();
                if let Some(result) = result {
                    // After a failure the wait continues, so that the other files reach the level.
                    last_error = result.err().or(last_error);
                    return false;
                }
                remaining_bytes += file.lock().pending.bytes();
                remaining_files += 1;
                true
            });
            if !progress(remaining_bytes, remaining_files) {
                return Err(Errno::CANCELED);
            }
            if remaining_files == 0 {
                return last_error.map_or(Ok(()), Err);
            }
            countdown.wait(REPORT_EVERY);
        }
    }

    /// Begins to drain a file (to write its pending bytes to the backing), and counts it in `countdown` until the drain
    /// has ended. The returned value gets the result of the drain.
    fn start_awaited_drain(
        &self,
        file: Arc<File<B>>,
        countdown: &Arc<DrainCountdown>,
    ) -> AwaitedFile<B> {
        let awaited = AwaitedFile {
            file: Arc::clone(&file),
            result: Arc::new(parking_lot::Mutex::new(None)),
        };
        countdown.add_file();
        let result_slot = Arc::clone(&awaited.result);
        let countdown = Arc::clone(countdown);
        let store_result = move |result| {
            *result_slot.lock() = Some(result);
            countdown.remove_file();
        };
        self.drainer.when_drained(&file, Box::new(store_result));
        awaited
    }

    /// Syncs the file or tree at `path` in the backing, and all names that lead to it from the root on: also those that
    /// count as synced, because an earlier firnd may have made them without a sync. The caller has drained the files,
    /// because a sync covers only bytes in the backing.
    fn make_durable(&self, path: &[u8]) -> Result<()> {
        let inode = self.tree.inode_at(path)?;
        if inode.kind == Kind::File {
            let file = self.open_files.acquire_file(&inode);
            let data_only = false;
            let result = self.sync_data(&file, data_only);
            self.open_files.drop_if_unused(&file);
            result?;
        }
        let last_slash = path.iter().rposition(|byte| *byte == b'/');
        let parent_path = &path[..last_slash.unwrap_or(0)];
        self.sync_dirs(parent_path)?;
        if inode.kind == Kind::Dir {
            self.sync_data_below(path, &inode)?;
        }
        Ok(())
    }

    /// Syncs the root and each directory on a path.
    fn sync_dirs(&self, path: &[u8]) -> Result<()> {
        let mut inode = Arc::clone(self.tree.names.root());
        self.sync_entries(&inode)?;
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            inode = self.tree.inode_in_dir(&inode, name)?;
            self.sync_entries(&inode)?;
        }
        Ok(())
    }
}
