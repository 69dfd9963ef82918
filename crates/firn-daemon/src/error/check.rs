//! The errors of `firn check`, which reads an arena (a mount's shared memory) or the logs of files.

use std::io;
use std::path::PathBuf;

use firn_arena::ArenaError;
use firn_format::quote::quoted_path;

use crate::error::{AttachError, FAILED, arena_code};

/// Why [`crate::check()`] could not read an arena, or [`crate::check_logs`] a backing. Damage that a check finds is
/// part of its report, and is not an error.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The file cannot be read, or is not an arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The backing's lanes cannot be opened.
    #[error(transparent)]
    Lanes(#[from] AttachError),
    /// The backing cannot be read.
    #[error("cannot read the logs of files in {backing}: {source}", backing = quoted_path(backing))]
    Logs {
        /// The backing.
        backing: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl CheckError {
    /// Returns the exit status of firn for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Arena(error) => arena_code(error),
            Self::Lanes(error) => error.exit_code(),
            Self::Logs { .. } => FAILED,
        }
    }
}
