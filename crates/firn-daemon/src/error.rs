//! What can go wrong before and around a mount, in words that say what to do.

use std::io;
use std::path::{Path, PathBuf};

use firn_arena::{ArenaError, SpillFault};
use firn_client::PathsError;
use firn_engine::EngineError;
use firn_format::FormatError;
use firn_format::quote::quoted_path;
use firn_fuse::SessionError;
use firn_stub::{PlaceError, TreeError};
use firn_transact::HeldError;
use firn_trust::TrustError;

use crate::process;

/// Exit status: something failed.
const FAILED: u8 = 1;
/// Exit status: an option that cannot be here.
const USAGE: u8 = 2;
/// Exit status: not a Firn arena or mount.
const NOT_FIRN: u8 = 10;
/// Exit status: held by somebody else.
const BUSY: u8 = 11;

/// Any failure of this crate.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum DaemonError {
    #[error("backing directory {path} does not exist: create it, or check the spelling", path = quoted_path(path))]
    BackingMissing { path: PathBuf },
    #[error("backing {path} is not a directory: give the directory that shall hold the files", path = quoted_path(path))]
    BackingNotDirectory { path: PathBuf },
    #[error("cannot use backing directory {path}: {source}", path = quoted_path(path))]
    BackingUnusable { path: PathBuf, source: io::Error },
    #[error("backing directory {path} is on a read-only file system: mount with -o ro, or make it writable", path = quoted_path(path))]
    BackingReadOnly { path: PathBuf },
    #[error("mount point {path} does not exist: create the directory first", path = quoted_path(path))]
    MountPointMissing { path: PathBuf },
    #[error("mount point {path} is not a directory: give an existing directory", path = quoted_path(path))]
    MountPointNotDirectory { path: PathBuf },
    #[error("cannot use mount point {path}: {source}", path = quoted_path(path))]
    MountPointUnusable { path: PathBuf, source: io::Error },
    #[error(
        "mount point {path} already has a firn mount (of {backing}): unmount it with `firn umount {path}`, or take another", path = quoted_path(path))]
    MountPointBusy { path: PathBuf, backing: String },
    #[error("mount point {mount_point} is inside the backing directory {backing}: choose one outside of it", mount_point = quoted_path(mount_point), backing = quoted_path(backing))]
    MountPointInBacking {
        mount_point: PathBuf,
        backing: PathBuf,
    },
    #[error(
        "backing directory {backing} is inside the mount point {mount_point}, which would hide it: choose another mount point", mount_point = quoted_path(mount_point), backing = quoted_path(backing))]
    BackingInMountPoint {
        mount_point: PathBuf,
        backing: PathBuf,
    },
    #[error("{backing} is already mounted on this host{by}: use that mount, or unmount it first", backing = quoted_path(backing))]
    Held { backing: PathBuf, by: String },
    #[error(transparent)]
    Runtime(#[from] PathsError),
    #[error("arena-dir {path} cannot be used: {source}: create it on a tmpfs, or leave the option out", path = quoted_path(path))]
    ArenaDirectory { path: PathBuf, source: io::Error },
    #[error(
        "spill: cannot use directory {path}: {source}: create it on a host-local disk, or leave the option out", path = quoted_path(path))]
    SpillDirectory { path: PathBuf, source: io::Error },
    #[error("spill {spill} is inside {dir}, whose data it shall hold: give a directory on a host-local disk", spill = quoted_path(spill), dir = quoted_path(dir))]
    SpillInside { spill: PathBuf, dir: PathBuf },
    #[error(
        "arena {arena} has data in its spill file: {fault}: mount that device again, or keep what is in memory with `firn recover {backing}`", arena = quoted_path(arena), backing = quoted_path(backing))]
    SpillGone {
        arena: PathBuf,
        fault: String,
        backing: PathBuf,
    },
    #[error(
        "backup: cannot use directory {path}: {source}: create it on another host's file system, or leave the option out", path = quoted_path(path))]
    BackupDirectory { path: PathBuf, source: io::Error },
    #[error("backup {backup} is inside {dir}, whose loss it is for: give a directory elsewhere", backup = quoted_path(backup), dir = quoted_path(dir))]
    BackupInside { backup: PathBuf, dir: PathBuf },
    #[error(
        "{dir} is the backup of a transaction prepared with id {id} that {backing} does not know: finish it with `firn recover --from-backup {dir} {backing}`, or remove that directory to give it up", dir = quoted_path(dir), backing = quoted_path(backing))]
    BackupWaits {
        id: u64,
        dir: PathBuf,
        backing: PathBuf,
    },
    #[error(
        "no whole backup of a transaction{wanted} is in {dir}{others}: give the directory of the option backup", dir = quoted_path(dir))]
    BackupNone {
        dir: PathBuf,
        wanted: String,
        others: String,
    },
    #[error("there are several backups: {all}: say which with --id, or give its directory")]
    BackupSeveral { all: String },
    #[error("{backing} has a transaction of its own in {scope}: mount it, and firn commit or firn abort it", backing = quoted_path(backing))]
    BackupOpen { scope: String, backing: PathBuf },
    #[error("{arena} is the arena of an earlier mount of {backing}: run `firn recover {backing}` first", arena = quoted_path(arena), backing = quoted_path(backing))]
    BackupArena { arena: PathBuf, backing: PathBuf },
    #[error(transparent)]
    Arena(ArenaError),
    #[error("{source}: {limit}")]
    ArenaOverLimit { source: ArenaError, limit: String },
    #[error("{0}")]
    Geometry(FormatError),
    #[error("arena {path} was made for {found}: move it away, or recover that directory first", path = quoted_path(path))]
    ArenaForeign { path: PathBuf, found: String },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "a transaction in {scope} is prepared with id {id} and waits: mount with drain=commit, then firn commit, abort or restore it"
    )]
    TransactionWaits { id: u64, scope: String },
    #[error("the host's name cannot be that of a host: {why}; give another one with host=NAME")]
    HostName { why: String },
    #[error(
        "this host is {host}, and the participants are {participants}: name it among them, or give it one of their names with host=NAME"
    )]
    NoParticipant { host: String, participants: String },
    #[error(
        "{backing} has no transactions of a host {host}: check the name, it is the host's or what host= said", backing = quoted_path(backing))]
    NoSuchHost { host: String, backing: PathBuf },
    #[error("host {host} has {backing} mounted already: give each host its own name with host=NAME", backing = quoted_path(backing))]
    HostHeld { host: String, backing: PathBuf },
    #[error(
        "participants: several hosts cannot share {backing}: {reason}; mount its file system so that locks of files hold between hosts (OPERATIONS, \"Several hosts\"), or mount without participants", backing = quoted_path(backing))]
    LocksDoNotReach { backing: PathBuf, reason: String },
    #[error("transactions of an earlier firnd: {0}")]
    Transactions(#[from] HeldError),
    /// Something in the place of what is Firn's own in the backing or its backup.
    #[error("{backing}: {source}", backing = quoted_path(backing))]
    Planted { backing: PathBuf, source: HeldError },
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(
        "names of {backing} wait in the stub tree at {prefix}: mount it there with --frontend=preload, or carry them over with `firn recover {backing}`", backing = quoted_path(backing), prefix = quoted_path(prefix))]
    TreeWaits { backing: PathBuf, prefix: PathBuf },
    #[error("cannot {what}: {source}")]
    Io {
        what: &'static str,
        source: io::Error,
    },
    #[error(
        "{bytes} bytes could not be drained and are kept in {arena}: mend the backing, then run `firn recover {backing}` or mount it again", arena = quoted_path(arena), backing = quoted_path(backing))]
    Left {
        bytes: u64,
        arena: PathBuf,
        backing: PathBuf,
    },
    #[error("cannot copy held data to {to}: {source}: it is still in the arena; give another directory", to = quoted_path(to))]
    SaveLost { to: PathBuf, source: io::Error },
    #[error("firnd ended before the mount was usable and without a message: its log is {log}")]
    Silent { log: String },
    /// What firnd reported over the pipe.
    #[error("{text}")]
    Reported { text: String, code: u8 },
}

/// Failure of [`crate::mount`].
pub type MountError = DaemonError;
/// Failure of [`crate::recover`].
pub type RecoverError = DaemonError;
/// Failure of [`crate::check`].
pub type CheckError = DaemonError;

impl DaemonError {
    /// The exit status of firn for it.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::BackingMissing { .. }
            | Self::BackingNotDirectory { .. }
            | Self::BackingUnusable { .. }
            | Self::BackingReadOnly { .. }
            | Self::MountPointMissing { .. }
            | Self::MountPointNotDirectory { .. }
            | Self::MountPointUnusable { .. }
            | Self::Runtime(_)
            | Self::Engine(_)
            | Self::Transactions(_)
            | Self::Session(_)
            | Self::Tree(_)
            | Self::Io { .. }
            | Self::Left { .. }
            | Self::SaveLost { .. }
            | Self::SpillGone { .. }
            | Self::BackupNone { .. }
            | Self::Silent { .. } => FAILED,
            Self::MountPointInBacking { .. }
            | Self::BackingInMountPoint { .. }
            | Self::ArenaDirectory { .. }
            | Self::SpillDirectory { .. }
            | Self::SpillInside { .. }
            | Self::BackupDirectory { .. }
            | Self::BackupInside { .. }
            | Self::BackupSeveral { .. }
            | Self::Place(_)
            | Self::HostName { .. }
            | Self::NoSuchHost { .. }
            | Self::NoParticipant { .. }
            | Self::LocksDoNotReach { .. }
            | Self::Geometry(_) => USAGE,
            Self::MountPointBusy { .. }
            | Self::Held { .. }
            | Self::HostHeld { .. }
            | Self::TransactionWaits { .. }
            | Self::BackupWaits { .. }
            | Self::BackupOpen { .. }
            | Self::BackupArena { .. }
            | Self::TreeWaits { .. } => BUSY,
            Self::ArenaForeign { .. }
            | Self::Planted { .. }
            | Self::Trust(TrustError::Distrusted { .. }) => NOT_FIRN,
            Self::Trust(TrustError::Io { .. }) => FAILED,
            Self::Arena(error) | Self::ArenaOverLimit { source: error, .. } => arena_code(error),
            Self::Reported { code, .. } => *code,
        }
    }

    /// Says of which backing it is that something in it is not as what is Firn's own must be.
    pub(crate) fn in_backing(backing: &Path) -> impl Fn(Self) -> Self {
        let backing = backing.to_owned();
        move |error| match error {
            Self::Transactions(
                source @ (HeldError::Distrusted { .. } | HeldError::TooLong { .. }),
            ) => Self::Planted {
                backing: backing.clone(),
                source,
            },
            error => error,
        }
    }

    /// The same for what transactions of an earlier firnd came to.
    pub(crate) fn held(backing: &Path) -> impl Fn(HeldError) -> Self {
        let in_backing = Self::in_backing(backing);
        move |error| in_backing(error.into())
    }

    /// A failed system call.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

impl From<ArenaError> for DaemonError {
    fn from(source: ArenaError) -> Self {
        match process::limit_behind(source.errno()) {
            Some(limit) => Self::ArenaOverLimit { source, limit },
            None => Self::Arena(source),
        }
    }
}

fn arena_code(error: &ArenaError) -> u8 {
    match error {
        ArenaError::NoRoom { .. } => USAGE,
        ArenaError::Format { .. } | ArenaError::Distrusted { .. } => NOT_FIRN,
        ArenaError::Io { source, .. } if *source == rustix::io::Errno::NOENT => NOT_FIRN,
        ArenaError::Spill(
            SpillFault::NoRoom { .. } | SpillFault::LongPath { .. } | SpillFault::NotSpill { .. },
        ) => USAGE,
        ArenaError::Spill(SpillFault::Taken { .. }) => BUSY,
        ArenaError::Spill(SpillFault::Distrusted { .. }) => NOT_FIRN,
        ArenaError::Spill(_) => FAILED,
        ArenaError::Io { .. } => FAILED,
    }
}
