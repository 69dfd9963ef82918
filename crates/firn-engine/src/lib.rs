//! Names, files, extents, recovery: what a write means, without a transport.
//!
//! The engine knows nothing of FUSE, sockets or threads of its own; it is called and answers. A
//! frontend calls the operations of [`Engine`]; a drain calls [`Engine::pick`], does the I/O and calls
//! [`Engine::complete`]. What has to wait is told by a callback. A thread is blocked only by what
//! needs the backing's own answer after a drain, by [`Engine::wait_tree`], and for the short wait for one I/O in flight
//! on the same file.
//!
//! Names go to the backing at once (drain policy *eager*); data is held in the arena and recorded in
//! piece tables, and the journal says which file each piece belongs to.

//!
//! # Modules
//!
//! Each knows only modules below its own line; what several parts have to do with is a method of [`Engine`].
//!
//! ```text
//! operations   namespace, tree · data, write, truncate, sync · drain/{pick, job, complete, wait} · space/reclaim ·
//!              cache/evict · spill/step · direct_access, chunks · privileges/strip · open_files · recovery · figures
//! Engine       engine: the parts of one mount
//! parts        names · tables: files, handles · drain: queues · space · spill · grants · privileges · file_journal
//!              with file_id and ending · claims · lost · errors · counters · kernel_copies
//! a file       file: pending, drain_state, opens, direct · cache
//! values       extents · lane · retry · options · api
//! ```

mod api;
mod cache;
mod chunks;
mod claims;
mod counters;
mod data;
mod direct_access;
mod drain;
mod ending;
mod engine;
mod errors;
mod extents;
mod figures;
mod file;
mod file_id;
mod file_journal;
mod grants;
mod kernel_copies;
mod lost;
mod names;
mod namespace;
mod open_files;
mod options;
mod partner;
mod privileges;
mod recovery;
mod retry;
mod shared;
mod size;
mod small_map;
mod space;
mod spill;
mod sync;
mod tables;
mod tree;
mod truncate;
mod write;

pub use api::*;
pub use chunks::{HeldChunks, ListedPart, PartPlace};
pub use drain::Executor;
pub use drain::job::{Job, JobOutcome};
pub use drain::pick::{LaneLimits, Pick};
pub use drain::wait::NextWork;
pub use engine::{Engine, EngineError};
pub use figures::FileFigures;
pub use file::FileId;
pub use firn_backing::LaneIndex;
pub use lost::LostFile;
pub use options::{ClosePolicy, DrainPolicy, EngineOptions, FsyncPolicy, Order};
pub use partner::PartnerFigures;
pub use privileges::Principal;
pub use recovery::{Recovered, StoredArena};
pub use spill::SpillStep;

/// Result of an operation: the errno that the program gets.
pub type Result<T> = std::result::Result<T, firn_backing::Errno>;
