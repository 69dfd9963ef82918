//! The engine of a mount: names, files, pending data and recovery, without a transport.
//!
//! The engine has no threads, and uses neither FUSE nor sockets. A frontend calls the operations of [`Engine`]. The
//! threads of the drain call [`Drainer::pick`], do the I/O, and call [`Drainer::complete`].
//!
//! Changes of names go at once to the *backing*, the directory that the mount serves. Bytes that programs write go to
//! the *arena*, which is shared memory: a *slab* contains the bytes, a *piece record* says which part of a file they
//! are, and the *journal* contains the names of the file. The *drain* writes the bytes to the backing later; until then
//! they are *pending*.
//!
//! An operation that must wait gets a callback, and returns at once. Three kinds of calls block their thread: calls
//! that need an answer of the backing after a drain, [`Durability::wait_tree`], and calls that wait for one I/O in
//! flight on the same file.
//!
//! # Modules
//!
//! An engine is built in layers. Most modules of the middle layers have a *part*: a struct with separate locks and
//! methods, which refers only to parts on lines below it. [`Engine`] has all parts, and the operations that need many
//! of them. From the top down:
//!
//! * Operations of [`Engine`]: `data` (open, read, write, release), `sync`, `truncate`, `shared`, `recovery`,
//!   `figures`, `chunks`
//! * Parts for requests: `namespace`, `write`, `direct_access`
//! * Parts for rules: `privilege_rules` (set-id bits and capabilities), `durability` and `partner`
//! * `exclusive`: changes of a file during which no drain of it runs
//! * `drainer`: picks, executes and completes writes to the backing
//! * `space`, `cache`, `spill` and `settle`: room in the arena
//! * `kernel_cache` (what the kernel caches) and `reads`
//! * `intake` (written bytes become pending) and `open_files`
//! * `tree` (names and objects), `drain` (queues of files to drain) and `lost` (files that recovery did not find)
//! * `base`: what all parts share, such as backing, arena and journal
//! * Tables: `names`, `tables` (files and handles), `grants`, `privileges`, `claims`, `file_journal`, `errors`,
//!   `counters`
//! * State of one file: `file` and its submodules, `cache`
//! * Plain values: `extents`, `retry`, `options`, `api`

mod api;
mod base;
mod cache;
mod chunks;
mod claims;
mod counters;
mod data;
mod direct_access;
mod drain;
mod drainer;
mod durability;
mod ending;
mod engine;
mod errors;
mod exclusive;
mod extents;
mod figures;
mod file;
mod file_events;
mod file_id;
mod file_journal;
mod grants;
mod intake;
mod kernel_cache;
mod live;
mod lost;
mod nameless;
mod names;
mod namespace;
mod open_files;
mod options;
mod partner;
mod privilege_rules;
mod privileges;
mod reads;
mod recovery;
mod repeat;
mod retry;
mod settle;
mod shared;
mod size;
mod small_map;
mod space;
mod spill;
mod sync;
mod tables;
mod tree;
mod truncate;
mod view;
mod write;

pub use api::*;
pub use cache::{EvictionResult, Pinned};
pub use chunks::{HeldChunks, ListedPart, PartPlace};
pub use counters::RequestTimes;
pub use direct_access::DirectAccess;
pub use drain::Executor;
pub use drainer::Drainer;
pub use drainer::job::{Job, JobErrorSource, JobOutcome};
pub use drainer::pick::{LaneLimits, NextStep};
pub use drainer::wait::NextWork;
pub use durability::Durability;
pub use engine::{Engine, EngineError};
pub use exclusive::Exclusive;
pub use figures::FileFigures;
pub use file::FileId;
pub use file_events::{FileChange, FileEvent};
pub use firn_backing::LaneIndex;
pub use kernel_cache::KernelCache;
pub use live::{
    RecordedRequest, RequestObjects, Resumed, ResumedHandle, ResumedRequest, ResumedRequests,
    TakeoverLosses,
};
pub use lost::{LostFile, LostFiles};
pub use nameless::{FileKeeper, HiddenFile};
pub use namespace::Namespace;
pub use open_files::OpenFiles;
pub use options::{ClosePolicy, DrainPolicy, EngineOptions, FsyncPolicy, Order};
pub use partner::PartnerFigures;
pub use privilege_rules::PrivilegeRules;
pub use privileges::Principal;
pub use recovery::{Recovered, StoredArena};
pub use repeat::{CreatedObject, Creation};
pub use settle::SettleStep;
pub use shared::SharedAppend;
pub use space::Room;
pub use spill::SpillStep;
pub use tree::NameTree;
pub use write::Writes;

/// Result of an operation: the errno that the program gets.
pub type Result<T> = std::result::Result<T, firn_backing::Errno>;
