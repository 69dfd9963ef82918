//! The client side of a mount: its state, drains and waits, chunk lists, transactions, and lists of checkpoints.
//!
//! The module [`mod@find`] finds the mount that any path belongs to. The module [`paths`] finds the runtime files of
//! a mount from its backing. The module [`connect`] sends requests to firnd over the control socket. [`OpenMount`]
//! combines these with the mapping of the arena ([`region`]). The C library is a thin layer over [`OpenMount`].
//! Direct access is in the crate `firn-direct`, which the preload library uses without this crate.
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
