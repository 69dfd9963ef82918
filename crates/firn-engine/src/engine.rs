//! Puts an engine together from its parts. The engine does the work of all file operations of one mount.
//!
//! Each part has its own locks and invariants, and uses only parts below it; the list in `lib.rs` shows their order.
//! * An operation that needs one part and parts below it is a method of that part.
//! * An operation that needs many parts is a method of [`Engine`], in a module that the list has at its top.
//!
//! The *backing* is the directory that the mount serves. The *arena* is shared memory with the bytes that are not in
//! the backing yet; they are *pending*, and a *drain* writes them there.

use std::sync::Arc;
use std::time::Instant;

use firn_arena::journal::Journal;
use firn_arena::{Arena, JournalRegion};
use firn_backing::{Backing, Errno};

use crate::base::Base;
use crate::counters::Counters;
use crate::direct_access::DirectAccess;
use crate::drain::Drain;
use crate::drainer::Drainer;
use crate::durability::Durability;
use crate::errors::ErrorLog;
use crate::exclusive::Exclusive;
use crate::file_journal::FileJournal;
use crate::intake::Intake;
use crate::kernel_cache::KernelCache;
use crate::lost::LostFiles;
use crate::names::Names;
use crate::namespace::Namespace;
use crate::open_files::OpenFiles;
use crate::options::EngineOptions;
use crate::privilege_rules::PrivilegeRules;
use crate::privileges::Privileges;
use crate::reads::Reads;
use crate::space::Room;
use crate::tree::NameTree;
use crate::write::Writes;

/// Why an engine could not attach to an arena.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The root of the backing cannot be read.
    #[error("cannot read the backing directory: {0}")]
    Backing(Errno),
    /// The journal has no room to record that a file's data was dropped.
    #[error("the arena's journal is full: data of an ended transaction cannot be dropped")]
    JournalFull,
}

/// The engine of one mount over a backing.
///
/// The fields are the parts, from the lowest up. Each part refers only to parts before it.
pub struct Engine<B: Backing> {
    /// Data that all parts share: the backing, the arena, options and counters.
    pub(crate) base: Arc<Base<B>>,
    /// Inodes and paths.
    pub tree: Arc<NameTree<B>>,
    /// Knows whether files may have set-id bits or capabilities.
    pub(crate) privileges: Arc<Privileges>,
    /// Queues of files to drain.
    pub(crate) drain: Arc<Drain<B>>,
    /// Accepts bytes that client processes write to the arena (shared memory) themselves.
    pub(crate) intake: Arc<Intake<B>>,
    /// Handles, and files that are open or have pending data.
    pub open_files: Arc<OpenFiles<B>>,
    /// Which pages and attributes of files the kernel caches.
    pub kernel_cache: Arc<KernelCache<B>>,
    /// Makes space in the arena (the shared memory for written data): evicts and spills.
    pub room: Arc<Room<B>>,
    /// Writes of pending data to the backing.
    pub drainer: Arc<Drainer<B>>,
    /// Exclusive use of files: changes during which no drain of the file may run.
    pub exclusive: Arc<Exclusive<B>>,
    /// Set-id bits and capabilities.
    pub privilege_rules: Arc<PrivilegeRules<B>>,
    /// Durability levels of files and trees, and waits for them.
    pub durability: Durability<B>,
    /// Reads of files, from the arena and the backing.
    pub(crate) reads: Reads<B>,
    /// Steps of a write before its bytes are accepted.
    pub writes: Writes<B>,
    /// Requests of processes that read and write the arena themselves.
    pub direct_access: DirectAccess<B>,
    /// Names, attributes and directories.
    pub namespace: Namespace<B>,
    /// Data whose file recovery did not find.
    pub lost: LostFiles<B>,
    /// Bytes that the recovery at the engine's start made pending again.
    pub(crate) recovered_bytes: u64,
    /// Number of this engine among all that used the arena, counted from 1.
    pub(crate) epoch: u64,
    /// Time of the engine's start.
    pub(crate) attached_at: Instant,
}

impl<B: Backing> Engine<B> {
    /// Returns the backing.
    pub fn backing(&self) -> &B {
        &self.base.backing
    }

    /// Returns the arena.
    pub fn arena(&self) -> &Arena {
        &self.base.arena
    }

    /// Returns a text that identifies this engine among all engines, including others over the same arena.
    pub fn incarnation(&self) -> String {
        let uuid = base16ct::lower::encode_string(&self.base.arena.superblock().uuid);
        format!("{uuid}-{}", self.epoch)
    }

    /// Returns the policies of the mount.
    pub fn options(&self) -> &EngineOptions {
        &self.base.options
    }

    /// Makes all parts of an engine; each part gets the parts below it. Fails if the root of the backing (the directory
    /// that the mount serves) cannot be read.
    pub(crate) fn assemble(
        backing: B,
        arena: Arena,
        journal: Journal<JournalRegion>,
        options: EngineOptions,
    ) -> Result<Self, EngineError> {
        let root = backing.root();
        let attr = backing.attr(&root).map_err(EngineError::Backing)?;
        let epoch = arena.begin_epoch();
        // The first engine of an arena has the epoch 1. Any later one may find names that an earlier one left unsynced.
        let may_have_unsynced_names = epoch > 1;
        let names = Names::new(root, &attr, may_have_unsynced_names, options.objects_max);
        let drain = Arc::new(Drain::new(&backing, options.order));
        let privileges = Arc::new(Privileges::default());
        let base = Arc::new(Base {
            backing,
            arena,
            options,
            journal: FileJournal::new(journal, epoch),
            counters: Counters::default(),
            errors: ErrorLog::default(),
            file_events: Arc::clone(&drain.file_events),
        });
        let tree = Arc::new(NameTree::new(&base, names));
        let intake = Arc::new(Intake::new(&tree, &drain));
        let open_files = Arc::new(OpenFiles::new(&tree, &drain));
        let kernel_cache = Arc::new(KernelCache::new(&intake, &open_files, &privileges));
        let room = Arc::new(Room::new(&kernel_cache));
        let drainer = Arc::new(Drainer::new(&room));
        let exclusive = Arc::new(Exclusive::new(&drainer));
        let privilege_rules = Arc::new(PrivilegeRules::new(&exclusive, &privileges));
        Ok(Self {
            durability: Durability::new(&drainer),
            reads: Reads::new(&intake, &open_files),
            writes: Writes::new(&privilege_rules),
            direct_access: DirectAccess::new(&room, &privileges),
            namespace: Namespace::new(&privilege_rules),
            lost: LostFiles::new(&base),
            base,
            tree,
            privileges,
            drain,
            intake,
            open_files,
            kernel_cache,
            room,
            drainer,
            exclusive,
            privilege_rules,
            recovered_bytes: 0,
            epoch,
            attached_at: Instant::now(),
        })
    }
}
