//! Checks and prepares the directory of a *stub tree*: a mount point without FUSE, with empty files that stand for the
//! files of the mount.
//!
//! The directory must be on tmpfs. It must be empty, or have the tree of an earlier firnd, the process that serves the
//! mount.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use firn_format::quote::quoted_path;
use rustix::fs::{Mode, OFlags, fstatfs, open};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use crate::StubId;

/// `f_type` of tmpfs in statfs(2).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Reasons why a directory cannot hold a stub tree.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The directory is not on tmpfs, and this process is not root and cannot mount one.
    #[error(
        "{} is not on a tmpfs, and only root can mount one there: choose a directory in /dev/shm, or make {} a symlink to one",
        quoted_path(prefix),
        quoted_path(prefix)
    )]
    NotTmpfs {
        /// The directory.
        prefix: PathBuf,
    },
    /// The directory is not empty.
    #[error(
        "{} is neither empty nor the stub tree of an earlier mount of this backing: choose an empty directory",
        quoted_path(prefix)
    )]
    NotEmpty {
        /// The directory.
        prefix: PathBuf,
    },
    /// A system call failed.
    #[error("cannot use {} for a stub tree: {source}", quoted_path(prefix))]
    Io {
        /// The directory.
        prefix: PathBuf,
        /// Error of the call.
        source: io::Error,
    },
    /// The kernel or a sandbox does not supply file handles.
    #[error(
        "this system does not identify files on tmpfs (name_to_handle_at: {source}): a mount without FUSE is not possible here"
    )]
    NoHandles {
        /// Error of name_to_handle_at(2).
        source: io::Error,
    },
}

/// Prepares the directory `prefix` for a stub tree, and returns whether a tmpfs was mounted there. `log` is the path of
/// the log of names that an earlier firnd may have left.
///
/// If `prefix` has the tree that `log` describes, nothing is done, and it returns false. Otherwise `prefix` must be
/// empty, and root mounts a new tmpfs there if `prefix` is not on one. Fails if `prefix` is then not on a tmpfs with
/// file handles.
pub fn check_place(prefix: &Path, log: &Path) -> Result<bool, PlaceError> {
    let io_error = |source: io::Error| PlaceError::Io {
        prefix: prefix.to_owned(),
        source,
    };
    let mut directory = PlaceState::read(prefix).map_err(io_error)?;
    let saved = crate::map::SavedMap::read(log).map_err(io_error)?;
    if let (Some(saved), Ok(id)) = (saved, &directory.id)
        && *id == saved.head.root
    {
        return Ok(false);
    }
    // A new tmpfs would hide the contents of the directory.
    let mut contents = std::fs::read_dir(prefix).map_err(io_error)?;
    if contents.next().is_some() {
        return Err(PlaceError::NotEmpty {
            prefix: prefix.to_owned(),
        });
    }
    // The directory is closed before a tmpfs is mounted over it.
    drop(contents);
    let is_mounted =
        rustix::process::geteuid().is_root() && mount_tmpfs(prefix).map_err(io_error)?;
    if is_mounted {
        directory = PlaceState::read(prefix).map_err(io_error)?;
    }
    if !directory.is_tmpfs {
        return Err(PlaceError::NotTmpfs {
            prefix: prefix.to_owned(),
        });
    }
    match directory.id {
        Ok(_) => Ok(is_mounted),
        Err(source) => Err(PlaceError::NoHandles { source }),
    }
}

/// A directory as it is now.
struct PlaceState {
    is_tmpfs: bool,
    /// Identity of the directory, if its file system supplies file handles.
    id: io::Result<StubId>,
}

impl PlaceState {
    fn read(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = open(path, flags, Mode::empty())?;
        #[allow(
            clippy::unnecessary_cast,
            reason = "the type differs between architectures"
        )]
        let file_system_type = fstatfs(&dir)?.f_type as i64;
        Ok(Self {
            is_tmpfs: file_system_type == TMPFS_MAGIC,
            id: StubId::from_fd(dir.as_fd()),
        })
    }
}

/// Mounts a tmpfs. Returns false if this process lacks the right to mount, as root of a container may.
fn mount_tmpfs(path: &Path) -> io::Result<bool> {
    let flags = MountFlags::NODEV | MountFlags::NOSUID;
    let options = Some(c"mode=0700,nr_inodes=0");
    match mount("firn", path, "tmpfs", flags, options) {
        Ok(()) => Ok(true),
        Err(Errno::PERM | Errno::ACCESS) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
