//! The errors of `firn mount`, and of firnd, the process that serves the mount.

use std::io;
use std::path::{Path, PathBuf};

use firn_backing::Errno;
use firn_client::PathsError;
use firn_format::quote::quoted_path;
use firn_fuse::SessionError;
use firn_rules::RuleSetError;

use crate::error::{AttachError, BUSY, FAILED, USAGE, attach_failures};

/// Why [`crate::mount()`] failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each text says what the variant is")]
pub enum MountError {
    #[error(transparent)]
    Attach(#[from] AttachError),
    #[error(transparent)]
    Rules(#[from] RuleSetError),
    #[error("mount point {path} does not exist: create the directory first", path = quoted_path(path))]
    MountPointMissing { path: PathBuf },
    #[error("mount point {path} is not a directory: name an existing directory", path = quoted_path(path))]
    MountPointNotDirectory { path: PathBuf },
    #[error("cannot use mount point {path}: {source}", path = quoted_path(path))]
    MountPointUnusable { path: PathBuf, source: io::Error },
    #[error(
        "mount point {path} already has a firn mount (of {backing}): choose another, or, if no job uses it, unmount it with `firn umount {path}`", path = quoted_path(path))]
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
    #[error(
        "mount point {mount_point} is not empty, and the mount would hide its contents: name an empty directory, or mount over it with -o nonempty{hint}", mount_point = quoted_path(mount_point), hint = swapped_hint(mount_point, backing, *is_backing_empty))]
    MountPointNotEmpty {
        mount_point: PathBuf,
        backing: PathBuf,
        /// If the backing is empty, the user has probably swapped the two directories.
        is_backing_empty: bool,
    },
    #[error("the mount is not taken over: {why}; unmount it, and mount it again")]
    NotTakenOver { why: String },
    #[error(transparent)]
    Session(#[from] SessionError),
    #[error(
        "names in the stub tree at {prefix} are not in {backing} yet: mount it there with --frontend=preload, or create them there with `firn recover {backing}`", backing = quoted_path(backing), prefix = quoted_path(prefix))]
    TreeWaits { backing: PathBuf, prefix: PathBuf },
    #[error("files stay in logs, and no data of them is lost: {source}; mend the backing, then run `firn flatten --all --backing {backing}` or mount it again", backing = quoted_path(backing))]
    FilesRemainInLogs { backing: PathBuf, source: Errno },
    #[error(
        "{} could not be drained and stay in {arena}: mend the backing, then run `firn recover {backing}` or mount it again", firn_format::quantity::bytes(*bytes), arena = quoted_path(arena), backing = quoted_path(backing))]
    DataRemains {
        bytes: u64,
        arena: PathBuf,
        backing: PathBuf,
    },
    #[error("firnd ended before the mount was usable and without a message: its log is {log}")]
    Silent { log: String },
    /// The text and the exit status that firnd reported over the pipe.
    #[error("{text}")]
    Reported { text: String, code: u8 },
    #[error("cannot {what}: {source}")]
    Io {
        what: &'static str,
        source: io::Error,
    },
}

attach_failures!(MountError: PathsError);

/// Returns a hint that backing and mount point are probably swapped; an empty text otherwise.
fn swapped_hint(mount_point: &Path, backing: &Path, is_backing_empty: bool) -> String {
    if !is_backing_empty {
        return String::new();
    }
    let [mount_point, backing] = [mount_point, backing].map(quoted_path);
    format!(
        "; the backing comes first, and {backing} is empty: was `firn mount {mount_point} {backing}` meant?"
    )
}

impl MountError {
    /// Returns the exit status of firn for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Attach(error) => error.exit_code(),
            Self::MountPointMissing { .. }
            | Self::MountPointNotDirectory { .. }
            | Self::MountPointUnusable { .. }
            | Self::Session(_)
            | Self::NotTakenOver { .. }
            | Self::Io { .. }
            | Self::DataRemains { .. }
            | Self::FilesRemainInLogs { .. }
            | Self::Silent { .. } => FAILED,
            Self::MountPointInBacking { .. }
            | Self::BackingInMountPoint { .. }
            | Self::Rules(_)
            | Self::MountPointNotEmpty { .. } => USAGE,
            Self::MountPointBusy { .. } | Self::TreeWaits { .. } => BUSY,
            Self::Reported { code, .. } => *code,
        }
    }

    /// Returns a function that makes an error of a failed system call; `what` completes "cannot ...".
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
