//! Errors of requests to firnd, the process that serves a mount. Each error has an errno value and an exit code.
//!
//! The text of an error names the mount and says what the user can do next.

use std::io;
use std::path::PathBuf;

use firn_format::quote::quoted_path;
use firn_protocol::Holder;
use firn_trust::PeerError;

use crate::paths::PathsError;

/// Exit code: the request failed.
const EXIT_FAILED: u8 = 1;
/// Exit code: the path is not on a mount.
const EXIT_NO_MOUNT: u8 = 10;
/// Exit code: the mount or its files are in use.
const EXIT_IN_USE: u8 = 11;
/// Exit code: all connections to firnd are in use.
const EXIT_NO_CONNECTION: u8 = 12;

/// A failed call of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The path is not on a mount of firn.
    #[error(
        "{} is not on a firn mount{}",
        quoted_path(path),
        no_mount_hint(path, arena)
    )]
    NoMount {
        /// The path as the caller named it.
        path: PathBuf,
        /// The arena that an earlier mount of this backing left: a file with bytes that are not in the backing yet.
        arena: Option<PathBuf>,
    },
    /// The mount exists, but its firnd is dead.
    #[error(
        "the mount at {} is dead: firnd was killed; run `firn mount {} {}` to recover",
        quoted_path(mount_point),
        quoted_path(backing),
        quoted_path(mount_point)
    )]
    Dead {
        /// The backing: the directory that the mount serves.
        backing: PathBuf,
        /// The mount point.
        mount_point: PathBuf,
    },
    /// The mount is alive, but its firnd cannot be reached through a socket.
    #[error(
        "the firnd of the mount at {} lives, but its socket is not in {}: set FIRN_RUNTIME_DIR to the value that it had at the mount. If the socket was removed, send firnd SIGTERM: it then drains and unmounts",
        quoted_path(mount_point),
        quoted_path(runtime_dir)
    )]
    NoSocket {
        /// The mount point.
        mount_point: PathBuf,
        /// The runtime directory in which the socket was expected.
        runtime_dir: PathBuf,
    },
    /// A process of another user listens on the socket.
    #[error(
        "the process that answers at {} is not the firnd of {}: {why}. Nothing was sent to it",
        quoted_path(socket),
        quoted_path(mount_point)
    )]
    Stranger {
        /// The mount point.
        mount_point: PathBuf,
        /// The socket on which that process listens.
        socket: PathBuf,
        /// Why that process is not trusted.
        why: PeerError,
    },
    /// The runtime directory cannot be used.
    #[error(transparent)]
    Paths(#[from] PathsError),
    /// firnd is alive, but does not answer.
    #[error(
        "the firnd of {} (process {pid}) did not answer within {seconds} s. It may be stopped, or its host overloaded: see its log, {}",
        quoted_path(mount_point),
        quoted_path(log)
    )]
    Silent {
        /// The mount point.
        mount_point: PathBuf,
        /// Seconds that the client waited.
        seconds: u64,
        /// Id of the process that holds the socket, or `unknown`.
        pid: String,
        /// The log of firnd, which has more details.
        log: PathBuf,
    },
    /// The connection ended before the answer.
    #[error(
        "the firnd of {} ended before it answered. Run `firn status {}` to see whether the mount still exists, and see its log, {}",
        quoted_path(mount_point),
        quoted_path(mount_point),
        quoted_path(log)
    )]
    Gone {
        /// The mount point.
        mount_point: PathBuf,
        /// The log of firnd, which has more details.
        log: PathBuf,
    },
    /// firnd accepts no more connections now.
    #[error("the firnd of {} has no connection left: {}", quoted_path(mount_point), busy_hint(*connections, holders))]
    Busy {
        /// The mount point.
        mount_point: PathBuf,
        /// Maximum number of connections.
        connections: u32,
        /// The processes with the most connections. Empty if firnd closed this connection because many processes
        /// connected at once.
        holders: Vec<Holder>,
    },
    /// firnd belongs to another user.
    #[error(
        "the mount at {} belongs to user {user_id}; run this as that user",
        quoted_path(mount_point)
    )]
    NotYours {
        /// The mount point.
        mount_point: PathBuf,
        /// The user that mounted it.
        user_id: u32,
    },
    /// firnd uses another version of the protocol.
    #[error(
        "firnd {version} speaks protocol {found}, this firn {expected}; use the firn of firnd's version, or unmount with that firn and mount again"
    )]
    Protocol {
        /// Protocol version of firnd.
        found: u32,
        /// Protocol version of this client.
        expected: u32,
        /// Package version of firnd.
        version: String,
    },
    /// firnd sent a message that is not a valid answer to the request.
    #[error(
        "firnd sent a message that this firn does not understand ({what}): compare their versions with `firn version` and `firn status`"
    )]
    Nonsense {
        /// The beginning of the message, or the error of the parser.
        what: String,
    },
    /// firnd refused the request, or tried it and failed.
    #[error("{message}")]
    Refused {
        /// The errno value that firnd sent.
        errno: i32,
        /// The error message that firnd sent.
        message: String,
    },
    /// A system call failed.
    #[error("{what}: {error}")]
    Io {
        /// The file or the socket that the call was about.
        what: String,
        /// The error of the call.
        error: io::Error,
    },
}

impl ClientError {
    /// Returns the positive errno value that fits best for an error of a request to firnd, the process that serves a
    /// mount.
    pub fn errno(&self) -> i32 {
        use rustix::io::Errno;
        match self {
            Self::NoMount { .. } => Errno::NODEV.raw_os_error(),
            Self::Dead { .. } | Self::NoSocket { .. } | Self::Gone { .. } => {
                Errno::NOTCONN.raw_os_error()
            }
            Self::Stranger { .. } => Errno::PERM.raw_os_error(),
            Self::Paths(error) => error.errno().raw_os_error(),
            Self::Silent { .. } => Errno::TIMEDOUT.raw_os_error(),
            Self::Busy { .. } => Errno::AGAIN.raw_os_error(),
            Self::NotYours { .. } => Errno::ACCESS.raw_os_error(),
            Self::Protocol { .. } | Self::Nonsense { .. } => Errno::PROTO.raw_os_error(),
            // A faulty firnd may send 0 or a negative number, but an error must not be reported as 0.
            Self::Refused { errno, .. } if *errno > 0 => *errno,
            Self::Refused { .. } => Errno::PROTO.raw_os_error(),
            Self::Io { error, .. } => error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
        }
    }

    /// Returns the exit code for this error (docs/OPERATIONS.md).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::NoMount { .. } => EXIT_NO_MOUNT,
            Self::Refused { errno, .. } if *errno == rustix::io::Errno::BUSY.raw_os_error() => {
                EXIT_IN_USE
            }
            Self::Busy { .. } => EXIT_NO_CONNECTION,
            Self::Refused { .. }
            | Self::Dead { .. }
            | Self::NoSocket { .. }
            | Self::Stranger { .. }
            | Self::Paths(_)
            | Self::Silent { .. }
            | Self::Gone { .. }
            | Self::NotYours { .. }
            | Self::Protocol { .. }
            | Self::Nonsense { .. }
            | Self::Io { .. } => EXIT_FAILED,
        }
    }
}

/// Returns the end of the message of [`ClientError::NoMount`]: what the user can do next.
fn no_mount_hint(path: &std::path::Path, arena: &Option<PathBuf>) -> String {
    let path = quoted_path(path);
    match arena {
        Some(arena) => {
            format!(
                ", but an earlier mount left data in {}: run `firn recover {path}`",
                quoted_path(arena)
            )
        }
        None => "; `firn status` lists the mounts".to_owned(),
    }
}

/// Returns the end of the message of [`ClientError::Busy`]: which processes have the connections.
fn busy_hint(connections: u32, holders: &[Holder]) -> String {
    if holders.is_empty() {
        return "too many processes connect at once; try again".to_owned();
    }
    let whose = holders.iter().map(|Holder { pid, connections }| match pid {
        0 => format!("processes outside its PID namespace have {connections}"),
        pid => format!("process {pid} has {connections}"),
    });
    format!(
        "all {connections} connections are in use, by requests in progress and by chunk lists that are held ({}). Try \
        again, or end one of these",
        whose.collect::<Vec<_>>().join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_mount_says_how_to_recover() {
        let error = ClientError::Dead {
            backing: "/scratch/run".into(),
            mount_point: "/ckpt".into(),
        };
        assert_eq!(
            error.to_string(),
            "the mount at /ckpt is dead: firnd was killed; run `firn mount /scratch/run /ckpt` to recover"
        );
    }

    #[test]
    fn no_mount_is_exit_code_ten_and_busy_eleven() {
        let no_mount = ClientError::NoMount {
            path: "/x".into(),
            arena: None,
        };
        assert_eq!(
            no_mount.to_string(),
            "/x is not on a firn mount; `firn status` lists the mounts"
        );
        assert_eq!(no_mount.exit_code(), 10);
        assert_eq!(
            ClientError::Refused {
                errno: 16,
                message: String::new()
            }
            .exit_code(),
            11
        );
    }

    #[test]
    fn a_refusal_has_its_errno_and_is_never_a_success() {
        let errno = |errno| {
            ClientError::Refused {
                errno,
                message: String::new(),
            }
            .errno()
        };
        assert_eq!((errno(16), errno(0), errno(-1)), (16, 71, 71));
    }
}
