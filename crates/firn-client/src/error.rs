//! What can go wrong between a client and firnd. Every text says what to do next.

use std::io;
use std::path::PathBuf;

/// A failed call of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The path is on no mount of firn.
    #[error("{} is not on a firn mount{}", path.display(), no_mount_hint(path, arena))]
    NoMount {
        /// As asked for.
        path: PathBuf,
        /// The arena that an earlier mount of this backing left.
        arena: Option<PathBuf>,
    },
    /// The mount is there, its firnd is not.
    #[error("the mount at {} is dead: firnd was killed; run `firn mount {} {}` to recover", mount_point.display(), backing.display(), mount_point.display())]
    Dead {
        /// Its backing.
        backing: PathBuf,
        /// Where it is mounted.
        mount_point: PathBuf,
    },
    /// firnd is there, but does not speak.
    #[error("firnd of {} does not answer within {seconds} s (process {pid}); it may be stopped or its machine overloaded: look at its log, {}", mount_point.display(), log.display())]
    Silent {
        /// Where it is mounted.
        mount_point: PathBuf,
        /// How long we waited.
        seconds: u64,
        /// Who holds the socket, as far as it is known.
        pid: String,
        /// Where it says more.
        log: PathBuf,
    },
    /// The connection ended before the answer.
    #[error("firnd of {} ended while it was asked; run `firn status {}` to see whether the mount still stands, and look at its log, {}", mount_point.display(), mount_point.display(), log.display())]
    Gone {
        /// Where it is mounted.
        mount_point: PathBuf,
        /// Where it says more.
        log: PathBuf,
    },
    /// firnd belongs to somebody else.
    #[error("the mount at {} belongs to user {user_id}; run this as that user", mount_point.display())]
    NotYours {
        /// Where it is mounted.
        mount_point: PathBuf,
        /// Whose it is.
        user_id: u32,
    },
    /// firnd speaks another version.
    #[error(
        "firnd {version} speaks protocol {found}, this firn {expected}; use the firn of that version, or unmount with it and mount again"
    )]
    Protocol {
        /// firnd's.
        found: u32,
        /// Ours.
        expected: u32,
        /// firnd's package version.
        version: String,
    },
    /// firnd says something that is no answer to the question.
    #[error(
        "firnd sent what this firn does not understand ({what}); are both of the same version? compare `firn version` and `firn status`"
    )]
    Nonsense {
        /// What.
        what: String,
    },
    /// firnd did what it could and failed.
    #[error("{message}")]
    Refused {
        /// The errno that says it best.
        errno: i32,
        /// firnd's words.
        message: String,
    },
    /// The system refused something.
    #[error("{what}: {error}")]
    Io {
        /// On what.
        what: String,
        /// Why.
        error: io::Error,
    },
}

impl ClientError {
    /// The errno that says it best, positive.
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno;
        match self {
            Self::NoMount { .. } => Errno::NODEV.raw_os_error(),
            Self::Dead { .. } | Self::Gone { .. } => Errno::NOTCONN.raw_os_error(),
            Self::Silent { .. } => Errno::TIMEDOUT.raw_os_error(),
            Self::NotYours { .. } => Errno::ACCESS.raw_os_error(),
            Self::Protocol { .. } | Self::Nonsense { .. } => Errno::PROTO.raw_os_error(),
            // Whatever a firnd may say, an error is not 0.
            Self::Refused { errno, .. } if *errno > 0 => *errno,
            Self::Refused { .. } => Errno::PROTO.raw_os_error(),
            Self::Io { error, .. } => error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        }
    }

    /// The exit code that says it (docs/OPERATIONS.md).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoMount { .. } => 10,
            Self::Refused { errno, .. } if *errno == rustix::io::Errno::BUSY.raw_os_error() => 11,
            Self::Refused { .. }
            | Self::Dead { .. }
            | Self::Silent { .. }
            | Self::Gone { .. }
            | Self::NotYours { .. }
            | Self::Protocol { .. }
            | Self::Nonsense { .. }
            | Self::Io { .. } => 1,
        }
    }
}

fn no_mount_hint(path: &std::path::Path, arena: &Option<PathBuf>) -> String {
    let path = path.display();
    match arena {
        Some(arena) => {
            format!(", but holds data of an earlier one in {}: run `firn recover {path}`", arena.display())
        }
        None => "; `firn status` lists the mounts".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_mount_says_how_to_recover() {
        let error = ClientError::Dead { backing: "/scratch/run".into(), mount_point: "/ckpt".into() };
        assert_eq!(
            error.to_string(),
            "the mount at /ckpt is dead: firnd was killed; run `firn mount /scratch/run /ckpt` to recover"
        );
    }

    #[test]
    fn no_mount_is_exit_code_ten_and_busy_eleven() {
        let no_mount = ClientError::NoMount { path: "/x".into(), arena: None };
        assert_eq!(no_mount.to_string(), "/x is not on a firn mount; `firn status` lists the mounts");
        assert_eq!(no_mount.exit_code(), 10);
        assert_eq!(ClientError::Refused { errno: 16, message: String::new() }.exit_code(), 11);
    }

    #[test]
    fn a_refusal_has_its_errno_and_is_never_a_success() {
        let errno = |errno| ClientError::Refused { errno, message: String::new() }.errno();
        assert_eq!((errno(16), errno(0), errno(-1)), (16, 71, 71));
    }
}
