//! The errors of attaching an arena to its backing, which a mount and a recovery do. The arena is shared memory with
//! the bytes that are not in the backing directory yet.

use std::io;
use std::path::{Path, PathBuf};

use firn_arena::ArenaError;
use firn_client::PathsError;
use firn_engine::EngineError;
use firn_etcd::EtcdError;
use firn_format::FormatError;
use firn_format::quote::quoted_path;
use firn_lanes::RecordError;
use firn_stub::{PlaceError, TreeError};
use firn_transact::{
    BackupError, CommitError, OpenError, OwnError, ReviveError, StoreError, TransactionError,
};
use firn_trust::TrustError;

use crate::error::{BUSY, FAILED, LaneFault, MapFault, NOT_FIRN, USAGE, arena_code};
use crate::process;

/// Why an arena cannot be attached to its backing.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum AttachError {
    #[error("backing directory {path} does not exist: create it, or check the spelling", path = quoted_path(path))]
    BackingMissing { path: PathBuf },
    #[error("backing {path} is not a directory: name the directory for the files", path = quoted_path(path))]
    BackingNotDirectory { path: PathBuf },
    #[error("cannot use backing directory {path}: {source}", path = quoted_path(path))]
    BackingUnusable { path: PathBuf, source: io::Error },
    #[error("backing directory {path} is on a read-only file system: mount with -o ro, or make it writable", path = quoted_path(path))]
    BackingReadOnly { path: PathBuf },
    #[error("{backing} is already mounted on this host{by}: use that mount, or unmount it first", backing = quoted_path(backing))]
    Held { backing: PathBuf, by: String },
    #[error(transparent)]
    Runtime(#[from] PathsError),
    #[error("arena-dir {path} cannot be used: {source}: create it on a tmpfs, or leave the option out", path = quoted_path(path))]
    ArenaDirectory { path: PathBuf, source: io::Error },
    #[error(
        "spill: cannot use directory {path}: {source}: create it on a host-local disk, or leave the option out", path = quoted_path(path))]
    SpillDirectory { path: PathBuf, source: io::Error },
    #[error("spill {spill} is inside {dir}, whose data it would hold: name a directory on a host-local disk", spill = quoted_path(spill), dir = quoted_path(dir))]
    SpillInside { spill: PathBuf, dir: PathBuf },
    #[error(
        "arena {arena} has data in its spill file: {fault}: mount the device of that file again, or recover the data in memory with `firn recover {backing}`", arena = quoted_path(arena), backing = quoted_path(backing))]
    SpillGone {
        arena: PathBuf,
        fault: String,
        backing: PathBuf,
    },
    #[error(
        "backup: cannot use directory {path}: {source}: create it on another host's file system, or leave the option out", path = quoted_path(path))]
    BackupDirectory { path: PathBuf, source: io::Error },
    #[error("backup {backup} is inside {dir}, whose loss it is to survive: name a directory elsewhere", backup = quoted_path(backup), dir = quoted_path(dir))]
    BackupInside { backup: PathBuf, dir: PathBuf },
    #[error(
        "{dir} is the backup of a transaction prepared with id {id} that {backing} does not know: finish it with `firn recover --from-backup {dir} {backing}`, or remove that directory to give it up", dir = quoted_path(dir), backing = quoted_path(backing))]
    BackupWaits {
        id: u64,
        dir: PathBuf,
        backing: PathBuf,
    },
    #[error("lane {lane} {why}", lane = quoted_path(lane))]
    Lane { lane: PathBuf, why: LaneFault },
    #[error("placement={placement}: {why}")]
    Steering {
        placement: &'static str,
        why: String,
    },
    #[error("{backing} has no files in a lane {lane}: `firn status` lists its lanes while it is mounted", lane = quoted_path(lane), backing = quoted_path(backing))]
    NoSuchLane { lane: PathBuf, backing: PathBuf },
    #[error(
        "lane {lane} has {files} files of {backing}: copy them elsewhere through a mount and remove them first", lane = quoted_path(lane), backing = quoted_path(backing))]
    LaneInUse {
        lane: PathBuf,
        backing: PathBuf,
        files: usize,
    },
    #[error("lane-map {path}: {why}", path = quoted_path(path))]
    LaneMap { path: PathBuf, why: MapFault },
    #[error("{backing}: {source}", backing = quoted_path(backing))]
    LaneRecord {
        backing: PathBuf,
        source: RecordError,
    },
    #[error(transparent)]
    Arena(ArenaError),
    #[error("{source}: {limit}")]
    ArenaOverLimit { source: ArenaError, limit: String },
    #[error(transparent)]
    Geometry(FormatError),
    #[error("arena {path} was made for {found}: move it away, or recover that directory first", path = quoted_path(path))]
    ArenaForeign { path: PathBuf, found: String },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "a transaction in {scope} is prepared with id {id} and waits: mount with drain=commit, then firn commit, abort or restore it"
    )]
    TransactionWaits { id: u64, scope: String },
    #[error("this host's name cannot be used: {why}; give it another one with host=NAME")]
    HostName { why: String },
    #[error(
        "this host is {host}, and the participants are {participants}: add it to the participants, or give it one of their names with host=NAME"
    )]
    NoParticipant { host: String, participants: String },
    #[error("host {host} has {backing} mounted already: give each host its own name with host=NAME", backing = quoted_path(backing))]
    HostHeld { host: String, backing: PathBuf },
    #[error(
        "participants: several hosts cannot share {backing}: {reason}; mount its file system so that file locks reach \
         other hosts (docs/features/hosts.md), or mount without participants", backing = quoted_path(backing))]
    LocksDoNotReach { backing: PathBuf, reason: String },
    #[error(
        "tokens=flock: hosts cannot share tokens in {backing}: {reason}; mount its file system so that file locks \
         reach other hosts (docs/features/hosts.md), or use tokens=etcd", backing = quoted_path(backing))]
    TokensDoNotReach { backing: PathBuf, reason: String },
    #[error(
        "layout=log: hosts cannot tell in {backing} which of them are alive: {reason}; mount its file system with file \
         locks (docs/features/hosts.md), or leave layout out", backing = quoted_path(backing))]
    LogsDoNotReach { backing: PathBuf, reason: String },
    #[error(
        "host {host} has {backing} mounted with {theirs}, and this mount has {ours}: {why}", backing = quoted_path(backing))]
    PeerDiffers {
        backing: PathBuf,
        host: String,
        theirs: String,
        ours: String,
        why: &'static str,
    },
    #[error("token-endpoints: {0}")]
    TokenEndpoints(EtcdError),
    #[error("transactions of an earlier firnd: {0}")]
    Transactions(TransactionError),
    /// A file or directory at the place of Firn's own files, in the backing or its backup, is not Firn's.
    #[error("{backing}: {source}", backing = quoted_path(backing))]
    Planted { backing: PathBuf, source: OwnError },
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error("cannot {what}: {source}")]
    Io {
        what: &'static str,
        source: io::Error,
    },
}

impl AttachError {
    /// Returns the exit status of firn for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            // The backing, its file system or the arena failed.
            Self::BackingMissing { .. }
            | Self::BackingNotDirectory { .. }
            | Self::BackingUnusable { .. }
            | Self::BackingReadOnly { .. }
            | Self::Runtime(_)
            | Self::Engine(_)
            | Self::Transactions(_)
            | Self::Tree(_)
            | Self::Io { .. }
            // All other errors of the record mean that it is not Firn's.
            | Self::LaneRecord {
                source: RecordError::Own(OwnError::Backing(_)),
                ..
            }
            | Self::SpillGone { .. } => FAILED,
            // The user must change an option or a directory that an option names.
            Self::ArenaDirectory { .. }
            | Self::SpillDirectory { .. }
            | Self::SpillInside { .. }
            | Self::BackupDirectory { .. }
            | Self::BackupInside { .. }
            | Self::Lane { .. }
            | Self::NoSuchLane { .. }
            | Self::LaneMap { .. }
            | Self::Steering { .. }
            | Self::Place(_)
            | Self::HostName { .. }
            | Self::NoParticipant { .. }
            | Self::LocksDoNotReach { .. }
            | Self::TokensDoNotReach { .. }
            | Self::LogsDoNotReach { .. }
            | Self::TokenEndpoints(_)
            | Self::Geometry(_) => USAGE,
            // Another process, host or transaction has the backing.
            Self::Held { .. }
            | Self::HostHeld { .. }
            | Self::PeerDiffers { .. }
            | Self::TransactionWaits { .. }
            | Self::LaneInUse { .. }
            | Self::BackupWaits { .. } => BUSY,
            // What is there belongs to another backing, or another user could have made it.
            Self::ArenaForeign { .. }
            | Self::Planted { .. }
            | Self::LaneRecord { .. }
            | Self::Trust(TrustError::Distrusted { .. } | TrustError::Exposed { .. }) => NOT_FIRN,
            Self::Trust(TrustError::Io { .. }) => FAILED,
            Self::Arena(error) | Self::ArenaOverLimit { source: error, .. } => arena_code(error),
        }
    }

    /// Returns a function that adds the path of the backing to an error about Firn's own files in it.
    pub(crate) fn in_backing(backing: &Path) -> impl Fn(Self) -> Self {
        let backing = backing.to_owned();
        move |error| match error {
            Self::Transactions(TransactionError::Store(StoreError::Own(source)))
            | Self::Transactions(TransactionError::Backup(BackupError::Own(source)))
                if !matches!(source, OwnError::Backing(_)) =>
            {
                Self::Planted {
                    backing: backing.clone(),
                    source,
                }
            }
            error => error,
        }
    }

    /// Returns a function that converts an error of an earlier firnd's transactions and adds the path of the backing.
    pub(crate) fn transactions<E: Into<Self>>(backing: &Path) -> impl Fn(E) -> Self {
        let in_backing = Self::in_backing(backing);
        move |error| in_backing(error.into())
    }

    /// Returns a function that makes an error of a failed system call; `what` completes "cannot ...".
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl From<ArenaError> for AttachError {
    fn from(source: ArenaError) -> Self {
        match process::describe_limit_behind(source.errno()) {
            Some(limit) => Self::ArenaOverLimit { source, limit },
            None => Self::Arena(source),
        }
    }
}

/// Implements `From` for the errors of an earlier firnd's transactions.
macro_rules! transaction_failures {
    ($($source:ty),*) => {$(
        impl From<$source> for AttachError {
            fn from(source: $source) -> Self {
                Self::Transactions(source.into())
            }
        }
    )*};
}
transaction_failures!(
    BackupError,
    CommitError,
    OpenError,
    ReviveError,
    StoreError,
    TransactionError
);

impl LaneFault {
    /// Returns the attach error for a lane with this fault.
    pub(crate) fn in_lane(self, lane: &Path) -> AttachError {
        AttachError::Lane {
            lane: lane.into(),
            why: self,
        }
    }
}
