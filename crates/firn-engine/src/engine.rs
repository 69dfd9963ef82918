//! The engine's state and its small common parts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use firn_arena::{Arena, Lease};
use firn_backing::lock::Mutex;
use firn_backing::{Backing, Errno};
use firn_format::quote::quoted;
use firn_format::tally::Tally;

use crate::direct_access::Grants;
use crate::drain::Drain;
use crate::errors::ErrorLog;
use crate::file::{File, FileState};
use crate::file_journal::FileJournal;
use crate::lane::LaneIndex;
use crate::lost::LostFiles;
use crate::names::{Inode, Names};
use crate::privileges::Privileges;
use crate::space::Space;
use crate::spill::Spill;
use crate::sync::Progress;
use crate::tables::{FileTable, HandleTable};
use crate::{FileIdentity, HandleId, InodeId, Result};

/// When close(2) returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClosePolicy {
    /// When the file is in the backing.
    Drain,
    /// At once.
    Held,
}

/// What fsync(2) means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FsyncPolicy {
    /// Durable in the backing.
    Durable,
    /// Held in the arena, as after write(2).
    Held,
}

/// When pending data goes to the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DrainPolicy {
    /// As it comes.
    Eager,
    /// When somebody asks: [`Engine::drain_tree`], [`Engine::wait_tree`], fsync(2). What was drained stays
    /// in memory until its room is needed. A full arena is ENOSPC.
    Demand,
}

/// Policies of one mount.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// See [`DrainPolicy`].
    pub drain: DrainPolicy,
    /// See [`ClosePolicy`].
    pub close: ClosePolicy,
    /// See [`FsyncPolicy`].
    pub fsync: FsyncPolicy,
    /// Data older than this is drained, however little.
    pub drain_age: Duration,
    /// Unforced writes to the backing have at least so many bytes: one chunk.
    pub drain_write_bytes_min: u64,
    /// A write to the backing has at most so many bytes.
    pub drain_write_bytes_max: u64,
    /// Percent of memory in use above which sealed chunks move to the spill file, where there is one.
    pub spill_upper_percent: u32,
    /// Percent of memory in use down to which they move.
    pub spill_lower_percent: u32,
    /// Let the kernel read files that have nothing pending.
    pub passthrough: bool,
    /// Every read of a program comes to the engine: the kernel caches no bytes, and no process is told where bytes lie.
    pub serves_every_read: bool,
    /// Objects of the backing (descriptors) held beside those of files in use. The kernel may know more;
    /// they are looked up again when used.
    pub objects_max: usize,
    /// Files of the backing that stay open (one or two descriptors each) for those that programs have open. More
    /// are closed and opened again when used.
    pub open_files_max: usize,
}

impl EngineOptions {
    /// The defaults for chunks of `chunk_bytes`.
    pub fn new(chunk_bytes: u64) -> Self {
        Self {
            drain: DrainPolicy::Eager,
            close: ClosePolicy::Drain,
            fsync: FsyncPolicy::Durable,
            drain_age: Duration::from_secs(5),
            drain_write_bytes_min: chunk_bytes,
            // Four chunks: larger ones gained nothing on any backing measured and hold the lane longer.
            drain_write_bytes_max: chunk_bytes.saturating_mul(4).clamp(1 << 20, 64 << 20),
            spill_upper_percent: 80,
            spill_lower_percent: 60,
            passthrough: false,
            serves_every_read: false,
            objects_max: 4096,
            open_files_max: 4096,
        }
    }
}

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

/// An open file.
pub(crate) struct Handle<B: Backing> {
    pub id: HandleId,
    pub file: Arc<File<B>>,
    pub readable: bool,
    pub writable: bool,
    pub lease: Mutex<Option<Lease>>,
    /// How the frontend serves it.
    pub mode: Mutex<crate::OpenMode>,
    /// Bytes written: decides the class of the next slab.
    pub written: AtomicU64,
    /// The process that closed it last died of a signal.
    pub killed: AtomicBool,
}

/// What the drain decides, each counted and, with `log-level=debug`, logged.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Decision {
    /// A run of a file goes to the backing now.
    Picked,
    /// It is there.
    Written,
    /// It failed: the file waits for its next try.
    Waits,
    /// The wait is over.
    Retried,
    /// Whoever waits for room is told that there will be none.
    GivenUp,
    /// A chunk went to the spill file.
    Spilled,
}

/// Counts of [`Decision`]s.
pub(crate) struct Decisions(pub(crate) Tally<6>);

impl Default for Decisions {
    fn default() -> Self {
        Self(Tally::new([
            "picked", "written", "waits", "retried", "given up", "spilled",
        ]))
    }
}

impl Decisions {
    pub(crate) fn count(&self, decision: Decision) {
        self.0.count(decision as usize);
    }
}

/// Counters since attach.
#[derive(Default)]
pub(crate) struct Counters {
    pub ingest_bytes: AtomicU64,
    pub ingest_writes: AtomicU64,
    pub drain_bytes: AtomicU64,
    pub drain_writes: AtomicU64,
    pub drain_errors: AtomicU64,
    pub drain_decisions: Decisions,
    pub cancelled_bytes: AtomicU64,
    pub evicted_bytes: AtomicU64,
    pub read_bytes: AtomicU64,
    pub held_bytes: AtomicU64,
    pub held_files: AtomicU64,
    /// Lists of chunks in use.
    pub chunk_lists: AtomicU64,
    /// Drained bytes that are still in the arena. Shared with the files that have some.
    pub cached_bytes: Arc<AtomicU64>,
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
    pub(crate) open_files: crate::open_files::OpenFiles,
    pub(crate) counters: Counters,
    pub(crate) errors: ErrorLog,
    pub(crate) spill: Spill,
    pub(crate) progress: Progress,
    pub(crate) passthrough: AtomicBool,
    /// Open handles whose pages the kernel caches.
    pub(crate) cached_opens: AtomicU64,
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
        let uuid = self
            .arena
            .superblock()
            .uuid
            .map(|byte| format!("{byte:02x}"))
            .concat();
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
        self.files.change(inode, LaneIndex::FIRST, change)
    }

    /// Lets go of a file that is neither open nor pending.
    pub(crate) fn drop_if_unused(&self, file: &Arc<File<B>>) {
        self.files.remove_if_unused(file);
    }

    /// Counts a change of what is held by one file.
    pub(crate) fn count_held(&self, before: u64, after: u64) {
        if after >= before {
            self.counters
                .held_bytes
                .fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.counters
                .held_bytes
                .fetch_sub(before - after, Ordering::Relaxed);
        }
        match (before == 0, after == 0) {
            (true, false) => self.counters.held_files.fetch_add(1, Ordering::Relaxed),
            (false, true) => self.counters.held_files.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
    }
}
