//! Why a directory cannot be a lane (one I/O server), and why a lane map (a file that assigns names to lanes) cannot be
//! used.

use std::io;
use std::path::PathBuf;

use firn_backing::Errno;
use firn_format::quote::quoted_path;
use firn_transact::OwnError;
use firn_trust::{Distrust, TrustError};

/// Longest lane map that is read, in bytes.
pub(crate) const MAP_BYTES_MAX: u64 = 1 << 20;

/// Why a directory cannot be a lane.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum LaneFault {
    #[error("does not exist: create it, or mount its file system first")]
    Missing,
    #[error("is not a directory: name a directory on the server that files shall go to")]
    NotDirectory,
    #[error("is not a path that links can have: leave out `.`, `..` and double slashes")]
    NotPlain,
    #[error("is on a read-only file system: make it writable, or leave the lane out")]
    ReadOnly,
    #[error("is on a file system without room: make room, or leave the lane out")]
    Full,
    #[error(
        "is on a file system without extended attributes (user.*), by which firn identifies its files: leave the lane out"
    )]
    NoAttributes,
    #[error("cannot be written to by this user: {0}")]
    NotWritable(io::Error),
    #[error("is inside {dir}: name a directory elsewhere", dir = quoted_path(.dir))]
    Inside { dir: PathBuf },
    #[error("contains {dir}: name a separate directory", dir = quoted_path(.dir))]
    Contains { dir: PathBuf },
    #[error("is the same directory as {other}: name each lane once", other = quoted_path(.other))]
    Same { other: PathBuf },
    #[error("is not used: {0}")]
    Exposed(TrustError),
    #[error("is not used: {name} in it {why}; examine it, then remove it")]
    Marker { name: String, why: Distrust },
    #[error(
        "is not the directory that files were placed in: mount its file system; if those files are gone for good, run `firn place --forget {lane} {backing}`",
        lane = quoted_path(.lane), backing = quoted_path(.backing))]
    Unmarked { lane: PathBuf, backing: PathBuf },
    #[error("cannot be used: {0}")]
    Io(io::Error),
}

impl LaneFault {
    pub(crate) fn from_errno(errno: Errno) -> Self {
        match errno {
            Errno::NOENT => Self::Missing,
            Errno::NOTDIR => Self::NotDirectory,
            Errno::ROFS => Self::ReadOnly,
            Errno::NOSPC | Errno::DQUOT => Self::Full,
            Errno::OPNOTSUPP => Self::NoAttributes,
            Errno::ACCESS | Errno::PERM => Self::NotWritable(errno.into()),
            errno => Self::Io(errno.into()),
        }
    }

    pub(crate) fn from_io(error: &io::Error) -> Self {
        Self::from_errno(Errno::from_io_error(error).unwrap_or(Errno::IO))
    }

    pub(crate) fn from_own(error: OwnError) -> Self {
        match error {
            OwnError::Backing(errno) => Self::from_errno(errno),
            OwnError::Distrusted { name, why } => Self::Marker { name, why },
            OwnError::TooLong { .. } => Self::from_errno(Errno::FBIG),
            OwnError::EarlierVersion { .. } => Self::from_errno(Errno::PROTONOSUPPORT),
        }
    }
}

/// Why a lane map cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum MapFault {
    #[error("cannot be read: {0}")]
    Io(io::Error),
    #[error("has more than {MAP_BYTES_MAX} bytes: a lane map has only one line for each pattern")]
    TooLong,
    #[error(transparent)]
    Line(#[from] firn_lanes::rule::MapError),
}
