//! Failures of a check.

use firn_arena::ArenaError;

use crate::error::arena_code;

/// Why [`crate::check`] could not look at an arena. Damage that it found is no failure.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// It cannot be read, or is no arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
}

impl CheckError {
    /// The exit status of firn for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Arena(error) => arena_code(error),
        }
    }
}
