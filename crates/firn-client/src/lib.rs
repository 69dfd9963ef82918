//! What a program does with a mount: state, drain and wait, chunk lists, transactions, lists of checkpoints.
//!
//! From any path to the mount it lies on ([`mod@find`]), from the backing of that mount to its files
//! ([`paths`]), and over the control socket to firnd ([`connect`]). [`OpenMount`] puts them together with the
//! mapping of the arena ([`region`]); the C library is a thin layer over it. Direct access is in `firn-direct`,
//! which the preload library uses without this crate.
//!
//! ```no_run
//! use firn_client::{ChunkList, OpenMount};
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! let mount = Arc::new(OpenMount::open(Path::new("/ckpt"))?);
//! println!("{} bytes are held in memory", mount.status()?.held_bytes);
//! // Where each byte of a checkpoint is. What is listed stays as it is until the list is dropped.
//! let chunks = ChunkList::make(&mount, Path::new("/ckpt/step12/rank0"))?;
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
pub use find::{Mount, Place, find, mounts};
pub use liveness::Liveness;
pub use open_mount::{ChunkList, MountError, OpenMount, Room};
pub use owner::{owner_process, start_ticks_of, without_umask};
pub use paths::{Key, PathsError, RuntimeFiles};
