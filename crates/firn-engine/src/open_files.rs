//! Open files, and the limit of files of the backing that are open at a time.
//!
//! Many programs may each have as many files open as their own limit allows, which together may exceed firnd's limit.
//! So an open file of a program does not always have a descriptor of the backing. If too many descriptors are open,
//! files without a read, write or drain under way are closed in the backing, and opened again at their next use.
//!
//! Promises
//! * A file is closed in the backing only if it can be opened again: firnd tries such an open just before the close.
//! * A file without a name remains open in the backing, because no name leads to its bytes.
//!
//! [`OpenFiles::close_excess_files`] is called without a lock held.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use firn_backing::{
    Access, Backing, DescriptorUse, Errno, Facts, FileUse, KernelReads, LaneIndex, is_below,
};

use crate::base::Base;
use crate::drain::Drain;
use crate::file::{BackingFile, File, FileState, Route};
use crate::nameless::FileKeeper;
use crate::names::Inode;
use crate::tables::{FileTable, Handle, HandleTable};
use crate::tree::NameTree;
use crate::{FileIdentity, HandleId, InodeId, Result};

/// Files that are open or have pending data, and their open files in the backing.
pub struct OpenFiles<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    pub(crate) files: FileTable<B>,
    pub(crate) handles: HandleTable<B>,
    /// Keeper of descriptors of files without a name, for the next firnd; set at most once.
    pub(crate) keeper: OnceLock<Arc<dyn FileKeeper>>,
}

impl<B: Backing> OpenFiles<B> {
    pub(crate) fn new(tree: &Arc<NameTree<B>>, drain: &Arc<Drain<B>>) -> Self {
        Self {
            base: Arc::clone(&tree.base),
            tree: Arc::clone(tree),
            drain: Arc::clone(drain),
            files: FileTable::default(),
            handles: HandleTable::default(),
            keeper: OnceLock::new(),
        }
    }
}

impl<B: Backing> FileState<B> {
    /// Returns whether the file is open in the backing.
    fn has_open(&self) -> bool {
        self.writer.is_some() || self.reader.is_some()
    }

    /// Returns whether the backing's file may be closed although handles are open, because nothing uses it now and a
    /// name leads to it.
    fn can_be_reopened(&self) -> bool {
        let is_busy = self.drain.is_exclusive() || self.drain.writes_in_flight() > 0;
        self.has_open() && !self.unlinked && !is_busy
    }
}

impl<B: Backing> OpenFiles<B> {
    /// Returns whether the handle may write.
    pub fn is_writer(&self, handle_id: HandleId) -> bool {
        self.handle(handle_id).is_ok_and(|handle| handle.writable)
    }

    /// Returns to what extent the kernel may read a file of the backing itself. A file that is not open in the backing
    /// counts as readable.
    pub(crate) fn kernel_reads(&self, file: &File<B>) -> KernelReads {
        let Some(backing_file) = file.lock().open_any() else {
            return KernelReads::Passthrough;
        };
        self.base.backing.kernel_reads(&backing_file.file)
    }

    /// Returns a duplicate of the backing's descriptor, for kernel passthrough; `None` if the backing has no such
    /// descriptor.
    pub fn backing_fd(&self, handle_id: HandleId) -> Option<OwnedFd> {
        let handle = self.handle(handle_id).ok()?;
        let writer = self.writer(&handle.file).ok()?;
        self.base
            .backing
            .descriptor(&writer.file, DescriptorUse::Passthrough)
    }

    /// Notifies a backing that finishes files if a file is completely drained and has no writers.
    pub(crate) fn notify_file_written(&self, file: &File<B>) {
        if !self.base.backing.features().finishes_files {
            return;
        }
        let state = file.lock();
        if state.opens.has_writers() || !state.pending.is_empty() {
            return;
        }
        let writer = state.writer.clone();
        drop(state);
        if let Some(writer) = writer {
            // The call does not wait. The work that the call begins reports its errors elsewhere.
            let _ = self.base.backing.report_use(&writer.file, FileUse::Written);
        }
    }

    /// Closes the backing's file if no handle is open: more files may be in memory than a process may have descriptors.
    ///
    /// A file with pending data (not in the backing yet) must be opened again for its drain. It is closed only if there
    /// are many such files, and if a trial open succeeds: the file's mode, for example 0444, may forbid the open.
    pub(crate) fn close_if_unused(&self, file: &File<B>) {
        let had_pending_bytes = {
            let state = file.lock();
            if !state.can_close() {
                return;
            }
            !state.pending.is_empty()
        };
        if had_pending_bytes {
            // As many files as objects may be open with pending data.
            let open_files_max = self.base.options.objects_max as u64;
            let has_few_files = self.drain.pending_files() <= open_files_max;
            if has_few_files || self.try_open(file, Access::ReadWrite).is_err() {
                return;
            }
        }
        let mut state = file.lock();
        // If bytes became pending only now, the check above was not made, so the file remains open.
        let is_checked = had_pending_bytes || state.pending.is_empty();
        if state.can_close() && is_checked {
            let closed_files = (state.writer.take(), state.reader.take());
            // The lock is released first, because a close may write to a server.
            drop(state);
            drop(closed_files);
        }
    }

    /// Opens the backing's file by its name.
    fn try_open(&self, file: &File<B>, access: Access) -> Result<B::File> {
        let object = self.tree.object(&file.inode)?;
        self.base.backing.open(&object, access)
    }

    /// Opens the backing's file before a change of its mode or access list. After the change, firnd may have no right
    /// to open it for a drain or for a program that has the file open.
    pub(crate) fn open_before_access_change(&self, file: &File<B>) {
        let needs_writer = {
            let state = file.lock();
            if state.pending.is_empty() && state.opens.is_empty() {
                return;
            }
            !state.pending.is_empty() || state.opens.has_writers()
        };
        // An error is ignored: if the file cannot be opened now, the change does no further harm.
        let _ = self.open_in_backing(file, needs_writer);
    }

    /// Opens the backing's file, for writing if `needs_writer`, else for reading.
    pub(crate) fn open_in_backing(&self, file: &File<B>, needs_writer: bool) -> Result<()> {
        self.with_descriptor(|| {
            if needs_writer {
                self.writer(file).map(drop)
            } else {
                self.reader(file).map(drop)
            }
        })
    }

    /// Returns the identity of the file that a handle is open on.
    pub fn identify_file(&self, handle_id: HandleId) -> Result<Arc<dyn FileIdentity>> {
        Ok(Arc::clone(&self.handle(handle_id)?.file.inode) as _)
    }

    /// Returns the inode of an open handle.
    pub fn inode_of_handle(&self, handle_id: HandleId) -> Option<InodeId> {
        Some(self.handle(handle_id).ok()?.file.inode.id)
    }

    pub(crate) fn handle(&self, id: HandleId) -> Result<Arc<Handle<B>>> {
        self.handles.get(id)
    }

    /// Returns the file of an inode, if it is open or has bytes in the arena.
    pub(crate) fn known_file(&self, inode: &Inode<B>) -> Option<Arc<File<B>>> {
        self.files.get(inode)
    }

    /// Returns the file of an inode; makes it if it is not in the table.
    pub(crate) fn acquire_file(&self, inode: &Arc<Inode<B>>) -> Arc<File<B>> {
        self.acquire_file_with(inode, |_| {})
    }

    /// Does what [`Self::acquire_file`] does, and applies `change` while the file cannot be removed from the table.
    pub(crate) fn acquire_file_with(
        &self,
        inode: &Arc<Inode<B>>,
        change: impl FnOnce(&mut FileState<B>),
    ) -> Arc<File<B>> {
        self.files
            .get_or_insert(inode, self.route_of(inode), change)
    }

    /// Returns where an inode's data goes: the lane (I/O server), and whether the backing *gathers*, that is, writes
    /// distant pieces of the file in one call. Returns the first lane if the backing does not know the object.
    fn route_of(&self, inode: &Inode<B>) -> Route {
        if self.drain.has_one_route() {
            return Route::default();
        }
        if let Some(file) = self.known_file(inode) {
            return file.route();
        }
        let Ok(object) = self.tree.object(inode) else {
            return Route::default();
        };
        let Facts { lane, gathers, .. } = self.base.backing.facts(&object);
        let is_valid = lane.index() < self.drain.lane_count();
        Route {
            lane: if is_valid { lane } else { LaneIndex::FIRST },
            gathers,
        }
    }

    /// Remembers the inode of a file that was cut, after the file is neither open nor pending. Called before the file
    /// is dropped from the table, without its lock.
    pub(crate) fn remember_cut_inode(&self, inode: &Arc<Inode<B>>) {
        if inode.is_cut.load(Ordering::Acquire) {
            self.tree.names.remember(inode, 0);
        }
    }

    /// Removes a file from the table if it is neither open nor has bytes in the arena.
    pub(crate) fn drop_if_unused(&self, file: &Arc<File<B>>) {
        self.files.remove_if_unused(file);
    }

    /// Closes files of the backing if more are open than [`EngineOptions::open_files_max`].
    ///
    /// [`EngineOptions::open_files_max`]: crate::EngineOptions
    pub(crate) fn close_excess_files(&self) {
        let max = self.base.options.open_files_max;
        // The check examines all files, so it is made only once in a batch of opens.
        let batch = (max / 4).max(1);
        if self.base.counters.files_opened.load(Ordering::Relaxed) < batch {
            return;
        }
        self.base.counters.files_opened.store(0, Ordering::Relaxed);
        self.close_down_to(max - batch);
    }

    /// Closes files until at most `max` are open, as far as they can be closed.
    fn close_down_to(&self, max: usize) {
        // A file with work under way is not closed.
        let closable_files = self.files.idle(FileState::can_be_reopened);
        let excess = closable_files.len().saturating_sub(max);
        for file in closable_files.iter().take(excess) {
            self.close_idle(file);
        }
    }

    /// Returns the backing file for writing; opens it if it is not open. It is also open for reading if the backing
    /// allows that.
    pub(crate) fn writer(&self, file: &File<B>) -> Result<Arc<BackingFile<B>>> {
        let existing_writer = file.lock().writer.clone();
        if let Some(writer) = existing_writer {
            return Ok(writer);
        }
        self.close_excess_files();
        let opened = self.with_descriptor(|| self.open_writer(&file.inode))?;
        self.base.counters.count_opened();
        Ok(file.store_writer(opened))
    }

    /// Opens the backing's file for reading and writing, or only for writing if the backing does not allow more.
    fn open_writer(&self, inode: &Inode<B>) -> Result<BackingFile<B>> {
        let object = self.tree.object(inode)?;
        let backing = &self.base.backing;
        match backing.open(&object, Access::ReadWrite) {
            Ok(file) => Ok(BackingFile {
                file,
                access: Access::ReadWrite,
            }),
            Err(Errno::ACCESS | Errno::PERM) => Ok(BackingFile {
                file: backing.open(&object, Access::Write)?,
                access: Access::Write,
            }),
            Err(errno) => Err(errno),
        }
    }

    /// Returns the backing's file for reading; opens it if it is not open. If too many files are open, closes unused
    /// ones first. Fails with the errno of the backing.
    pub(crate) fn reader(&self, file: &File<B>) -> Result<Arc<BackingFile<B>>> {
        if let Some(existing_reader) = file.lock().open_reader() {
            return Ok(existing_reader);
        }
        self.close_excess_files();
        let opened = self.with_descriptor(|| {
            self.base
                .backing
                .open(&self.tree.object(&file.inode)?, Access::Read)
        })?;
        self.base.counters.count_opened();
        Ok(file.store_reader(BackingFile {
            file: opened,
            access: Access::Read,
        }))
    }

    /// Closes all files of the backing that can be opened again.
    pub fn close_idle_files(&self) {
        self.close_down_to(0);
        self.tree.names.close_cached_objects();
    }

    /// Closes an unused file in the backing, after a trial open has shown that it can be opened again. If the trial
    /// fails, or if the file's lock is taken because the file is in use, the file remains open.
    fn close_idle(&self, file: &File<B>) {
        let writer_access = file
            .try_lock()
            .and_then(|state| state.writer.as_ref().map(|writer| writer.access));
        let access = writer_access.unwrap_or(Access::Read);
        let trial_open = self.try_open(file, access);
        if trial_open.is_err() {
            return;
        }
        let closed_files = match file.try_lock() {
            Some(mut state) if state.can_be_reopened() => {
                (state.writer.take(), state.reader.take())
            }
            _ => return,
        };
        // The lock is released first, because a close may write to a server.
        drop(closed_files);
    }

    /// Makes a call of the backing that may need a descriptor. If no descriptor is free, closes files and makes the
    /// call once more.
    ///
    /// Fails with ENFILE if there is still no descriptor. (Programs would take EMFILE for their own limit.)
    pub(crate) fn with_descriptor<T>(&self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        let result = call();
        if !matches!(result, Err(Errno::MFILE | Errno::NFILE)) {
            return result;
        }
        self.close_idle_files();
        match call() {
            Err(Errno::MFILE) => Err(Errno::NFILE),
            result => result,
        }
    }

    /// Returns the inode number in the backing of the file that a handle is open on.
    pub fn backing_inode_number(&self, handle_id: HandleId) -> Result<u64> {
        Ok(crate::FileIdentity::number(
            &*self.handle(handle_id)?.file.inode,
        ))
    }

    /// Returns the files at or below `path` that are open for writing. A program may have stored bytes to a mapping of
    /// such a file, and only the kernel has these bytes.
    pub fn files_open_for_writing_below(&self, path: &[u8]) -> Vec<InodeId> {
        let is_below_path = |inode: &Inode<B>| {
            path.is_empty() || inode.paths().iter().any(|known| is_below(known, path))
        };
        let mut inodes = Vec::new();
        for handle in self.handles.all() {
            if handle.writable && is_below_path(&handle.file.inode) {
                inodes.push(handle.file.inode.id);
            }
        }
        inodes
    }

    /// Returns the files in the table that may be at or below `path`.
    pub(crate) fn files_at(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        let mut files = self.files.all();
        files.retain(|file| {
            let paths = file.inode.paths();
            // A file without a known name may have been anywhere.
            path.is_empty() || paths.is_empty() || paths.iter().any(|known| is_below(known, path))
        });
        files
    }
}
