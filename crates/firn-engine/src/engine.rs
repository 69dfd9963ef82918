//! The parts of one mount, each with its own lock and invariants.
//!
//! What one or two parts do is their own method. Operations of the whole, which no part names, are in the modules above
//! this one, as methods of [`Engine`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use firn_arena::Arena;
use firn_backing::{Backing, Errno, Facts, LaneIndex};
use firn_format::quote::quoted;

use crate::counters::Counters;
use crate::drain::Drain;
use crate::errors::ErrorLog;
use crate::file::{File, FileState, Route};
use crate::file_journal::FileJournal;
use crate::grants::Grants;
use crate::kernel_copies::KernelCopies;
use crate::lost::LostFiles;
use crate::names::{Inode, Names};
use crate::options::EngineOptions;
use crate::privileges::Privileges;
use crate::space::Space;
use crate::spill::Spill;
use crate::tables::{FileTable, Handle, HandleTable};
use crate::{FileIdentity, HandleId, InodeId, Result};

/// Why an engine could not attach.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The root of the backing cannot be read.
    #[error("cannot read the backing directory: {0}")]
    Backing(Errno),
    /// It cannot be noted that a file's data was dropped.
    #[error("the arena's journal is full: data of a transaction that is no more cannot be dropped")]
    JournalFull,
}

/// One mount's names, files and pending data over a backing.
pub struct Engine<B: Backing> {
    pub(crate) backing: B,
    pub(crate) arena: Arena,
    pub(crate) options: EngineOptions,
    pub(crate) journal: FileJournal,
    /// Paths that are told to the journal stay while they are, and renames change them.
    pub(crate) paths: crate::claims::PathClaims,
    pub(crate) names: Names<B>,
    pub(crate) privileges: Privileges,
    pub(crate) files: FileTable<B>,
    pub(crate) handles: HandleTable<B>,
    pub(crate) drain: Drain<B>,
    pub(crate) space: Space<B>,
    pub(crate) grants: Grants<B>,
    pub(crate) counters: Counters,
    pub(crate) errors: ErrorLog,
    pub(crate) spill: Spill,
    pub(crate) passthrough: AtomicBool,
    /// Open handles whose pages the kernel caches.
    pub(crate) cached_opens: AtomicU64,
    pub(crate) kernel_copies: KernelCopies,
    pub(crate) recovered_bytes: u64,
    pub(crate) lost: LostFiles,
    pub(crate) epoch: u64,
    pub(crate) attached: Instant,
}

impl<B: Backing> Engine<B> {
    /// The backing.
    pub fn backing(&self) -> &B {
        &self.backing
    }
    /// The arena.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }
    /// Tells this engine from every other, also over the same arena.
    pub fn incarnation(&self) -> String {
        let uuid = base16ct::lower::encode_string(&self.arena.superblock().uuid);
        format!("{uuid}-{}", self.epoch)
    }
    /// The policies in force.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Which file a handle is open on.
    pub fn identify_file(&self, handle: HandleId) -> Result<Arc<dyn FileIdentity>> {
        Ok(Arc::clone(&self.handle(handle)?.file.inode) as _)
    }

    /// The inode of a handle that is open.
    pub fn inode_of_handle(&self, handle: HandleId) -> Option<InodeId> {
        Some(self.handle(handle).ok()?.file.inode.id)
    }

    /// The path of an inode, or of a name in it, as a person may read it; of one that nobody knows its number.
    pub fn shown_path(&self, inode: InodeId, name: Option<&std::ffi::OsStr>) -> String {
        let mut path = match self.names.get(inode) {
            Some(inode) => inode.paths().into_iter().next().unwrap_or_default(),
            None => format!("(inode {})", inode.0).into_bytes(),
        };
        if let Some(name) = name {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.as_encoded_bytes());
        }
        quoted(&path)
    }

    pub(crate) fn inode(&self, id: InodeId) -> Result<Arc<Inode<B>>> {
        self.names.get(id).ok_or(Errno::STALE)
    }

    /// The object of an inode in the backing.
    pub(crate) fn object(&self, inode: &Inode<B>) -> Result<B::Inode> {
        self.names.object(&self.backing, inode)
    }

    /// The object of an inode by its number.
    pub fn object_of(&self, id: InodeId) -> Result<B::Inode> {
        self.object(&*self.inode(id)?)
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

    /// Where an inode's data goes, as far as somebody can tell.
    fn route_of(&self, inode: &Inode<B>) -> Route {
        if self.drain.has_one_route() {
            return Route::default();
        }
        if let Some(file) = self.known_file(inode) {
            return file.route();
        }
        let Ok(object) = self.object(inode) else {
            return Route::default();
        };
        let Facts { lane, gathers, .. } = self.backing.facts(&object);
        let is_known = lane.index() < self.drain.lane_count();
        Route {
            lane: if is_known { lane } else { LaneIndex::FIRST },
            gathers,
        }
    }

    /// Calls `observer` with each file whose pages the kernel is to drop because it may keep no copy of it any more.
    /// It is called with no lock held and may be called by a thread that a request waits for, so it must not wait for
    /// the kernel. To be called once, before the first open.
    pub fn on_kernel_copy_dropped(&self, observer: Arc<dyn Fn(InodeId) + Send + Sync>) {
        self.kernel_copies.set_observer(observer);
    }

    /// After the arena may have lost its last byte of a file: a copy in the kernel's cache is not a second one any
    /// more. Where the kernel reads drained files straight from the backing, it is of no more use either.
    pub(crate) fn end_kernel_copy(&self, file: &File<B>) {
        if !self.kernel_copies.are_allowed() {
            return;
        }
        {
            let state = file.lock();
            if !state.pending.is_empty() || !state.cache.is_empty() {
                return;
            }
        }
        let inode = file.inode.id;
        if self.kernel_copies.forget(inode) && self.allows_passthrough() {
            self.kernel_copies.drop_pages(&[inode]);
        }
    }

    /// Whether the kernel may read files of the backing by itself.
    pub(crate) fn allows_passthrough(&self) -> bool {
        self.passthrough.load(Ordering::Relaxed) && !self.options.serves_every_read
    }

    /// Lets go of a file that is neither open nor pending.
    pub(crate) fn drop_if_unused(&self, file: &Arc<File<B>>) {
        self.files.remove_if_unused(file);
    }
}
