//! The kernel's cache: which pages and attributes of files the kernel may have, and whether they are still valid. The
//! frontend, which answers the kernel's requests, makes the kernel drop invalid pages.
//!
//! Terms
//! * The *backing* is the directory that the mount serves. A *memory file* is a file in memory with all bytes of one
//!   large file.
//! * *Passthrough*: the kernel reads a file of the backing, or a memory file, itself instead of asking the engine.
//! * A *cached open* is an open handle whose reads the kernel serves from its page cache.
//! * A *stamp* (`PageCacheStamp`) is the state of the backing's file when the kernel last began to cache its pages:
//!   size, times, and a count of changes by other hosts. Pages are valid while the file has the same stamp.
//!
//! Relies on: a change of the backing's file changes its stamp. A second change within one tick of the backing's clock
//! may leave the times as they are. So a stamp counts only if its times were already some seconds old.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use firn_backing::{Backing, KernelReads, Time};

use crate::base::Base;
use crate::file::File;
use crate::intake::Intake;
use crate::names::{Inode, PageCacheStamp};
use crate::open_files::OpenFiles;
use crate::privileges::Privileges;
use crate::tree::NameTree;
use crate::{HandleId, InodeId, OpenMode};

/// Records what the kernel caches of each file, and when a cached page or attribute becomes invalid.
pub struct KernelCache<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and their names.
    pub(crate) tree: Arc<NameTree<B>>,
    /// Knows whether files may have set-id bits or capabilities.
    pub(crate) privileges: Arc<Privileges>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Open files and handles.
    pub(crate) open_files: Arc<OpenFiles<B>>,
    /// Whether the kernel may read files of the backing itself. False after one failure, and if the option forbids it.
    passthrough: AtomicBool,
    /// Whether the kernel may read memory files itself. False after one failure, and if the option forbids it.
    memory_passthrough: AtomicBool,
    /// Number of open handles that the kernel serves from its page cache.
    cached_opens: AtomicU64,
}

impl<B: Backing> KernelCache<B> {
    pub(crate) fn new(
        intake: &Arc<Intake<B>>,
        open_files: &Arc<OpenFiles<B>>,
        privileges: &Arc<Privileges>,
    ) -> Self {
        Self {
            base: Arc::clone(&intake.base),
            tree: Arc::clone(&intake.tree),
            privileges: Arc::clone(privileges),
            intake: Arc::clone(intake),
            open_files: Arc::clone(open_files),
            passthrough: AtomicBool::new(intake.base.options.passthrough),
            memory_passthrough: AtomicBool::new(intake.base.options.passthrough),
            cached_opens: AtomicU64::new(0),
        }
    }

    /// Counts an open handle whose pages the kernel caches.
    pub(crate) fn count_cached_open(&self) {
        self.cached_opens.fetch_add(1, Ordering::AcqRel);
    }

    /// Uncounts a released handle whose pages the kernel cached.
    pub(crate) fn count_cached_release(&self) {
        let previous_count = self.cached_opens.fetch_sub(1, Ordering::AcqRel);
        debug_assert!(previous_count > 0, "an open ends that was not counted");
    }

    /// Returns whether the kernel can read files of the backing itself: no attempt has failed yet.
    pub(crate) fn can_pass_through(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed)
    }

    /// Returns whether the kernel's cached pages of the backing's file are still valid. Records the present state of
    /// the file for the next call. The answer is false if the backing cannot tell.
    ///
    /// The pages are valid if size, times and counts are those of the last call, and the times were already old at that
    /// call. Otherwise a second change within one tick of the backing's clock could have left the times as they were.
    pub(crate) fn check_and_update_page_stamp(&self, inode: &Inode<B>) -> bool {
        /// Minimum age of the times, in seconds: any later change is then certain to change them.
        const OLD_ENOUGH_S: i64 = 2;
        let Ok(object) = self.tree.object(inode) else {
            return false;
        };
        // The count is read before the attributes. A change between the two reads then counts as a new change.
        let changes_by_others = self.base.backing.facts(&object).changes_by_others;
        let Ok(attr) = self.base.backing.attr(&object) else {
            return false;
        };
        let last_change_s = attr.mtime.sec.max(attr.ctime.sec);
        let mut stored_stamp = inode.page_cache_stamp.lock();
        let last_stamp = stored_stamp.as_deref().copied();
        let are_times_old = last_change_s + OLD_ENOUGH_S < Time::now().sec;
        let last_changes = last_stamp.map_or(0, |stamp| stamp.changes_by_others);
        let new_stamp = PageCacheStamp {
            size: attr.size,
            mtime: attr.mtime,
            ctime: attr.ctime,
            are_times_old,
            // Another thread may have recorded a later count meanwhile.
            changes_by_others: changes_by_others.max(last_changes),
            changes_in_pages: last_stamp.map_or(changes_by_others, |stamp| stamp.changes_in_pages),
            memory_file_changes: last_stamp.and_then(|stamp| stamp.memory_file_changes),
        };
        *stored_stamp = Some(Box::new(new_stamp));
        // The first call finds no earlier stamp, so it returns false. If the stamps are equal, the times were old at
        // the last call too.
        let is_unchanged = last_stamp == Some(new_stamp);
        are_times_old && !new_stamp.has_stale_pages() && is_unchanged
    }

    /// Records changes by other hosts of a file of which the kernel may have pages. Called after a call of the backing
    /// about the file, because the backing learns of such changes only in its calls.
    pub(crate) fn record_changes_by_others(&self, inode: &Inode<B>, object: &B::Inode) {
        if inode.page_cache_stamp.lock().is_none() {
            return;
        }
        let changes = self.base.backing.facts(object).changes_by_others;
        if let Some(stamp) = inode.page_cache_stamp.lock().as_mut() {
            stamp.changes_by_others = stamp.changes_by_others.max(changes);
        }
    }

    /// Returns the count of the last known change by another host, if the kernel may have pages from before that
    /// change. The caller makes the kernel drop them, and calls [`KernelCache::record_dropped_pages`].
    pub fn stale_pages(&self, inode_id: InodeId) -> Option<u64> {
        if !self.base.backing.features().finishes_files {
            return None;
        }
        let inode = self.tree.inode(inode_id).ok()?;
        let page_cache_stamp = inode.page_cache_stamp.lock();
        match &*page_cache_stamp {
            Some(stamp) if stamp.has_stale_pages() => Some(stamp.changes_by_others),
            _ => None,
        }
    }

    /// Makes the kernel's pages stale after a drain of a file that other hosts write.
    ///
    /// Before the drain, reads laid the bytes of the arena over the bytes of all other hosts. After the drain, bytes
    /// that another host wrote at the same time may lie over the drained bytes. Cached pages do not show this.
    pub(crate) fn make_pages_stale_after_drain(&self, file: &File<B>) {
        if self.base.backing.features().finishes_files
            && self.open_files.kernel_reads(file) == KernelReads::Shared
            && let Some(stamp) = file.inode.page_cache_stamp.lock().as_mut()
        {
            // The pages then lack each change of another host.
            stamp.changes_in_pages = 0;
        }
    }

    /// Records that the kernel has pages from answers of an earlier firnd, and that other hosts may have written the
    /// file since.
    pub(crate) fn expect_stale_pages(&self, inode: &Inode<B>) {
        if self.base.backing.features().finishes_files {
            *inode.page_cache_stamp.lock() = Some(Box::new(PageCacheStamp::stale()));
        }
    }

    /// Records that the kernel has no page from before the change by another host with the count `change`.
    pub fn record_dropped_pages(&self, inode_id: InodeId, change: u64) {
        if let Ok(inode) = self.tree.inode(inode_id)
            && let Some(stamp) = inode.page_cache_stamp.lock().as_mut()
        {
            stamp.changes_in_pages = stamp.changes_in_pages.max(change);
        }
    }

    /// Returns whether the kernel reads this handle through its page cache.
    pub fn reads_through_cache(&self, handle_id: HandleId) -> bool {
        self.open_files
            .handle(handle_id)
            .is_ok_and(|handle| matches!(*handle.mode.lock(), OpenMode::Cached { .. }))
    }

    /// Returns whether the kernel caches pages of this handle's file that a write through the handle does not change.
    pub fn has_cached_readers(&self, handle_id: HandleId) -> bool {
        self.cached_opens.load(Ordering::Acquire) > 0
            && self.open_files.handle(handle_id).is_ok_and(|handle| {
                handle.file.lock().opens.has_cached()
                    && !matches!(*handle.mode.lock(), OpenMode::Cached { .. })
            })
    }

    /// Makes the kernel ask for a file's attributes again, on a backing where other hosts may write the file.
    pub(crate) fn drop_kernel_attributes(&self, file: &File<B>) {
        if self.base.backing.features().finishes_files {
            if let Ok(object) = self.tree.object(&file.inode) {
                self.record_changes_by_others(&file.inode, &object);
                self.intake.end_lists_before_changes(file, &object);
            }
            self.privileges.report_attributes_changed(file.inode.id);
        }
    }

    /// Returns whether the kernel may read memory files itself.
    pub(crate) fn passes_memory_through(&self) -> bool {
        self.memory_passthrough.load(Ordering::Relaxed) && !self.base.options.serves_every_read
    }

    /// Records that the kernel cannot read this handle's memory file. This handle and all later ones are served by
    /// the engine.
    pub fn no_memory_passthrough(&self, handle_id: HandleId) {
        self.memory_passthrough.store(false, Ordering::Relaxed);
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return;
        };
        let mut state = handle.file.lock();
        let mut mode = handle.mode.lock();
        if *mode == OpenMode::Memory {
            *mode = OpenMode::Engine;
            state.opens.change_mode(OpenMode::Memory, OpenMode::Engine);
            state.end_view(&self.base.arena);
        }
    }

    /// Records that passthrough failed for this handle. This handle and all later ones are served by the engine.
    pub fn no_passthrough(&self, handle_id: HandleId) {
        self.passthrough.store(false, Ordering::Relaxed);
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return;
        };
        let mut state = handle.file.lock();
        let mut mode = handle.mode.lock();
        if *mode == OpenMode::Passthrough {
            *mode = OpenMode::Engine;
            state
                .opens
                .change_mode(OpenMode::Passthrough, OpenMode::Engine);
        }
    }

    /// Makes the kernel serve a handle of the engine from its page cache, and write through the cache. Returns false if
    /// the kernel cannot do so, because it reads the inode's file itself (passthrough), or if the engine does not serve
    /// the handle.
    pub fn serve_through_cache(&self, handle_id: HandleId) -> bool {
        let Ok(handle) = self.open_files.handle(handle_id) else {
            return false;
        };
        let mut state = handle.file.lock();
        let mut mode = handle.mode.lock();
        if *mode != OpenMode::Engine || state.opens.has_passthrough() {
            return false;
        }
        let cached_mode = OpenMode::Cached { keep: false };
        state.opens.change_mode(*mode, cached_mode);
        *mode = cached_mode;
        self.count_cached_open();
        true
    }

    /// Returns whether the kernel may have wrong attributes of an inode: a client may be writing the file, or has
    /// written it and the kernel has not got the new length.
    pub fn is_written_directly(&self, inode_id: crate::InodeId) -> bool {
        let Some(inode) = self.tree.names.get(inode_id) else {
            return false;
        };
        let has_grant = !self.intake.grants.is_empty()
            && self
                .open_files
                .known_file(&inode)
                .is_some_and(|file| file.lock().direct.has_grant());
        // Read last, because the end of a grant sets this flag.
        has_grant || inode.is_size_stale_in_kernel.load(Ordering::Acquire)
    }

    /// Records that the kernel now has the length of an inode's file.
    pub fn record_kernel_size(&self, inode_id: crate::InodeId) {
        if let Some(inode) = self.tree.names.get(inode_id) {
            inode
                .is_size_stale_in_kernel
                .store(false, Ordering::Release);
        }
    }

    /// Returns whether the kernel may read files of the backing itself, and no policy forbids it.
    pub(crate) fn allows_passthrough(&self) -> bool {
        self.can_pass_through() && !self.base.options.serves_every_read
    }
}
