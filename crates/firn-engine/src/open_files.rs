//! Open files, and how many files of the backing are open at a time.
//!
//! A program may have as many files open as its own limit allows, and there may be many programs. So a file that is
//! open here does not need a descriptor of its own all the time. Files without a read, write or drain under way are
//! closed when there are too many, and opened again when they are used.
//!
//! Promises
//! * Only what can be opened again is closed: it was, a moment before, by the same way.
//! * A file without a name keeps what it has open: nothing else leads to its bytes.
//!
//! [`OpenFiles::close_excess_files`] is called with no lock held.

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

/// Files that are open or have pending data, and what is open of them in the backing.
pub struct OpenFiles<B: Backing> {
    pub(crate) base: Arc<Base<B>>,
    pub(crate) tree: Arc<NameTree<B>>,
    pub(crate) drain: Arc<Drain<B>>,
    pub(crate) files: FileTable<B>,
    pub(crate) handles: HandleTable<B>,
    /// Has files without a name for the next firnd.
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
    fn has_open(&self) -> bool {
        self.writer.is_some() || self.reader.is_some()
    }

    /// Whether what it has open can be closed while handles on it are open.
    fn may_be_reopened(&self) -> bool {
        let is_busy = self.drain.is_exclusive() || self.drain.writes_in_flight() > 0;
        self.has_open() && !self.unlinked && !is_busy
    }
}

impl<B: Backing> OpenFiles<B> {
    /// Whether the handle may write.
    pub fn is_writer(&self, handle: HandleId) -> bool {
        self.handle(handle).is_ok_and(|handle| handle.writable)
    }

    /// How far the kernel may read a file that is open below.
    pub(crate) fn kernel_reads(&self, file: &File<B>) -> KernelReads {
        let open = file.lock().open_any();
        open.map_or(KernelReads::Passthrough, |open| {
            self.base.backing.kernel_reads(&open.file)
        })
    }

    /// A duplicate of the backing's descriptor, for kernel passthrough.
    pub fn backing_fd(&self, handle: HandleId) -> Option<OwnedFd> {
        let handle = self.handle(handle).ok()?;
        let writer = self.writer(&handle.file).ok()?;
        self.base
            .backing
            .descriptor(&writer.file, DescriptorUse::Passthrough)
    }

    /// Tells the backing of a file that has no writers any more, if it wants to know.
    pub(crate) fn note_written(&self, file: &File<B>) {
        if !self.base.backing.features().finishes_files {
            return;
        }
        let writer = {
            let state = file.lock();
            let is_written = !state.opens.has_writers() && state.pending.is_empty();
            state.writer.clone().filter(|_| is_written)
        };
        if let Some(writer) = writer {
            // The call waits for nothing: what it begins fails elsewhere.
            let _ = self.base.backing.note_use(&writer.file, FileUse::Written);
        }
    }

    /// Closes the backing's file of one that is not open: more files may be in memory than a process may have
    /// descriptors. With pending data only where there are many, and only after a descriptor was had by the name once
    /// more: a later open may be refused (mode 0444).
    pub(crate) fn close_if_unused(&self, file: &File<B>) {
        let pending = {
            let state = file.lock();
            if !state.may_close() {
                return;
            }
            !state.pending.is_empty()
        };
        if pending {
            let many = self.drain.held_files() > self.base.options.objects_max as u64;
            let opens = || {
                let object = self.tree.object(&file.inode)?;
                self.base.backing.open(&object, Access::ReadWrite)
            };
            if !many || opens().is_err() {
                return;
            }
        }
        let mut state = file.lock();
        if state.may_close() && (pending || state.pending.is_empty()) {
            let closed = (state.writer.take(), state.reader.take());
            drop(state);
            drop(closed);
        }
    }

    /// Before the mode of a file changes: a drain, or a program that has the file open, may not get its descriptor
    /// afterwards.
    pub(crate) fn open_before_mode_change(&self, file: &File<B>) {
        let writes = {
            let state = file.lock();
            if state.pending.is_empty() && state.opens.is_empty() {
                return;
            }
            !state.pending.is_empty() || state.opens.has_writers()
        };
        // If it is not to be had now, nothing is lost by the change.
        let _ = self.open_below(file, writes);
    }

    pub(crate) fn open_below(&self, file: &File<B>, writes: bool) -> Result<()> {
        self.with_descriptor(|| {
            if writes {
                self.writer(file).map(drop)
            } else {
                self.reader(file).map(drop)
            }
        })
    }

    /// The file that a handle is open on.
    pub fn identify_file(&self, handle: HandleId) -> Result<Arc<dyn FileIdentity>> {
        Ok(Arc::clone(&self.handle(handle)?.file.inode) as _)
    }

    /// The inode of a handle that is open.
    pub fn inode_of_handle(&self, handle: HandleId) -> Option<InodeId> {
        Some(self.handle(handle).ok()?.file.inode.id)
    }

    pub(crate) fn handle(&self, id: HandleId) -> Result<Arc<Handle<B>>> {
        self.handles.get(id)
    }

    /// The file of an inode, if it is open or has pending data.
    pub(crate) fn known_file(&self, inode: &Inode<B>) -> Option<Arc<File<B>>> {
        self.files.get(inode)
    }

    /// The file of an inode, with `change` applied while it cannot be dropped.
    pub(crate) fn file_with(
        &self,
        inode: &Arc<Inode<B>>,
        change: impl FnOnce(&mut FileState<B>),
    ) -> Arc<File<B>> {
        self.files.change(inode, self.route_of(inode), change)
    }

    /// Where an inode's data goes, as far as it is known.
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
        let is_known = lane.index() < self.drain.lane_count();
        Route {
            lane: if is_known { lane } else { LaneIndex::FIRST },
            gathers,
        }
    }

    /// Remembers the inode of a file that was cut, also when it is neither open nor pending. To be called before the file
    /// is dropped, without its lock.
    pub(crate) fn keep_cut(&self, inode: &Arc<Inode<B>>) {
        if inode.is_cut.load(Ordering::Acquire) {
            self.tree.names.remember(inode, 0);
        }
    }

    /// Lets go of a file that is neither open nor pending.
    pub(crate) fn drop_if_unused(&self, file: &Arc<File<B>>) {
        self.files.remove_if_unused(file);
    }

    /// Closes files of the backing, where more are open than [`EngineOptions::open_files_max`].
    ///
    /// [`EngineOptions::open_files_max`]: crate::EngineOptions
    pub(crate) fn close_excess_files(&self) {
        let max = self.base.options.open_files_max;
        // A look at all of them is paid for by as many opens.
        let batch = (max / 4).max(1);
        if self.base.counters.files_opened.load(Ordering::Relaxed) < batch {
            return;
        }
        self.base.counters.files_opened.store(0, Ordering::Relaxed);
        self.close_down_to(max - batch);
    }

    /// Closes files until no more than `max` are open, if that many can be closed.
    fn close_down_to(&self, max: usize) {
        // A file with work under way is left alone.
        let open = self.files.idle(FileState::may_be_reopened);
        let too_many = open.len().saturating_sub(max);
        open.iter()
            .take(too_many)
            .for_each(|file| self.close_idle(file));
    }

    /// The backing file for writing, opened if need be.
    pub(crate) fn writer(&self, file: &File<B>) -> Result<Arc<BackingFile<B>>> {
        let open = file.lock().writer.clone();
        if let Some(writer) = open {
            return Ok(writer);
        }
        self.close_excess_files();
        let opened = self.with_descriptor(|| {
            let object = &self.tree.object(&file.inode)?;
            match self.base.backing.open(object, Access::ReadWrite) {
                Ok(file) => Ok(BackingFile {
                    file,
                    access: Access::ReadWrite,
                }),
                Err(Errno::ACCESS | Errno::PERM) => {
                    let file = self.base.backing.open(object, Access::Write)?;
                    Ok(BackingFile {
                        file,
                        access: Access::Write,
                    })
                }
                Err(errno) => Err(errno),
            }
        })?;
        self.base.counters.count_opened();
        Ok(file.keep_writer(opened))
    }

    /// The backing file for reading, opened if need be.
    pub(crate) fn reader(&self, file: &File<B>) -> Result<Arc<BackingFile<B>>> {
        if let Some(open) = file.lock().open_reader() {
            return Ok(open);
        }
        self.close_excess_files();
        let opened = self.with_descriptor(|| {
            self.base
                .backing
                .open(&self.tree.object(&file.inode)?, Access::Read)
        })?;
        self.base.counters.count_opened();
        Ok(file.keep_reader(BackingFile {
            file: opened,
            access: Access::Read,
        }))
    }

    /// Gives back all descriptors that can be had again.
    pub fn close_idle_files(&self) {
        self.close_down_to(0);
        self.tree.names.drop_objects();
    }

    fn close_idle(&self, file: &File<B>) {
        let access = match file
            .try_lock()
            .and_then(|state| state.writer.as_ref().map(|open| open.access))
        {
            Some(access) => access,
            None => Access::Read,
        };
        let opens = self
            .tree
            .object(&file.inode)
            .and_then(|object| self.base.backing.open(&object, access));
        if opens.is_err() {
            return;
        }
        let closed = match file.try_lock() {
            Some(mut state) if state.may_be_reopened() => {
                (state.writer.take(), state.reader.take())
            }
            _ => return,
        };
        // Without the lock: a close may write to a server.
        drop(closed);
    }

    /// Calls the backing, once more after files were closed if there was no descriptor left; ENFILE if there still
    /// is none, which is not the caller's limit.
    pub(crate) fn with_descriptor<T>(&self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        let none_left = |errno: &Errno| matches!(*errno, Errno::MFILE | Errno::NFILE);
        match call() {
            Err(errno) if none_left(&errno) => {
                self.close_idle_files();
                call().map_err(|errno| {
                    if none_left(&errno) {
                        Errno::NFILE
                    } else {
                        errno
                    }
                })
            }
            result => result,
        }
    }

    /// Number in the backing of the file that a handle is open on.
    pub fn number_of(&self, handle: HandleId) -> Result<u64> {
        Ok(crate::FileIdentity::number(
            &*self.handle(handle)?.file.inode,
        ))
    }

    /// The files at or below `path` that are open for writing: a program may have stored to a mapping of them what
    /// only the kernel has.
    pub fn written_at(&self, path: &[u8]) -> Vec<InodeId> {
        let handles = self.handles.all();
        let is_at = |inode: &Inode<B>| {
            path.is_empty() || inode.paths().iter().any(|known| is_below(known, path))
        };
        let written = handles
            .iter()
            .filter(|handle| handle.writable && is_at(&handle.file.inode));
        written.map(|handle| handle.file.inode.id).collect()
    }

    pub(crate) fn files_at(&self, path: &[u8]) -> Vec<Arc<File<B>>> {
        let files = self.files.all();
        let is_at = |file: &Arc<File<B>>| {
            let paths = file.inode.paths();
            // Without a name it may have been anywhere.
            path.is_empty() || paths.is_empty() || paths.iter().any(|known| is_below(known, path))
        };
        files.into_iter().filter(is_at).collect()
    }
}
