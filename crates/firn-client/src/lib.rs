//! The client side of a mount. Programs ask for its state, wait for drains, find bytes in memory (chunk lists), make
//! transactions, and list checkpoints.
//!
//! Terms
//! * *firnd*: the process that serves one mount.
//! * *backing*: the directory that the mount serves.
//! * *arena*: the shared memory with the bytes that are not in the backing yet. *Draining* writes them there.
//! * *chunk list*: says where each byte of a file is. While it is held, its bytes in memory do not change.
//!
//! The module [`mod@find`] finds the mount that any path belongs to. The module [`paths`] finds the runtime files of
//! a mount (socket, arena, log) from its backing. The module [`connect`] sends requests to firnd over the control
//! socket. [`OpenMount`] combines these with the mapping of the arena ([`region`]). The C library is a thin layer over
//! [`OpenMount`]. Direct access of programs to the arena is in the crate `firn-direct`, which does not use this crate.
//!
//! ```no_run
//! use firn_client::{ChunkList, OpenMount};
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! let mount = Arc::new(OpenMount::open(Path::new("/ckpt"))?);
//! println!("{} bytes are held in memory", mount.status()?.held_bytes);
//! // Where each byte of a checkpoint is. The listed pieces stay unchanged until the list is dropped.
//! let chunks = ChunkList::request(&mount, Path::new("/ckpt/step12/rank0"))?;
//! assert!(!chunks.was_changed()?);
//! # Ok::<(), firn_client::MountError>(())
//! ```

pub mod checkpoints;
pub mod connect;
mod error;
pub mod find;
pub mod levels;
pub mod library;
pub mod liveness;
pub mod open_mount;
mod owner;
pub mod paths;
pub mod region;
pub mod trees;

pub use connect::{Connection, Process, Progress};
pub use error::ClientError;
pub use find::{Mount, MountLocation, find, mounts};
pub use liveness::Liveness;
pub use open_mount::{ArenaFile, ChunkList, FreeSpace, MountError, OpenMount};
pub use owner::{owner_process, start_ticks_of, without_umask};
pub use paths::{Key, PathsError, RuntimeFiles};
