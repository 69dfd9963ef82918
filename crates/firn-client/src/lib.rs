//! A process's connection to firnd.
//!
//! From any path to the mount it lies on ([`mod@find`]), from the backing of that mount to its files
//! ([`paths`]), and over the socket to firnd ([`connect`]).

pub mod connect;
mod error;
pub mod find;
pub mod library;
pub mod liveness;
pub mod mountinfo;
pub mod paths;
pub mod trees;

pub use connect::{Connection, Process, Progress};
pub use error::ClientError;
pub use find::{Mount, Place, find, mounts};
pub use liveness::Liveness;
pub use paths::{Key, PathsError, RuntimeFiles};
