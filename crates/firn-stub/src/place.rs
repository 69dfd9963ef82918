//! Where a stub tree can be: on tmpfs, in a directory that is empty or that an earlier firnd used.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use firn_format::quote::quoted_path;
use rustix::fs::{Mode, OFlags, fstatfs, open};
use rustix::mount::{MountFlags, mount};

use crate::StubId;

const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Why a prefix cannot hold a stub tree.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Only root can mount a tmpfs.
    #[error(
        "{} is not on a tmpfs, and only root can mount one there: take a directory in /dev/shm, or make {} a symlink to one",
        quoted_path(prefix),
        quoted_path(prefix)
    )]
    NotTmpfs {
        /// The prefix.
        prefix: PathBuf,
    },
    /// There is something in it.
    #[error(
        "{} is not empty, and not the tree of an earlier mount of this backing: give an empty directory",
        quoted_path(prefix)
    )]
    NotEmpty {
        /// The prefix.
        prefix: PathBuf,
    },
    /// Any system call.
    #[error("cannot use {} for a stub tree: {source}", quoted_path(prefix))]
    Io {
        /// The prefix.
        prefix: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A kernel, or a sandbox, without file handles.
    #[error(
        "this system does not tell files on tmpfs apart (name_to_handle_at: {source}): without FUSE there is no way to mount here"
    )]
    NoHandles {
        /// Why.
        source: io::Error,
    },
}

/// Prepares a prefix: root gets a tmpfs of its own there, unless one is there that `log` tells of. Says
/// whether one was mounted now.
pub fn check_place(prefix: &Path, log: &Path) -> Result<bool, PlaceError> {
    let failed = |source: io::Error| PlaceError::Io {
        prefix: prefix.to_owned(),
        source,
    };
    let is_tmpfs = || -> io::Result<(bool, io::Result<StubId>)> {
        let dir = open(
            prefix,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        #[allow(
            clippy::unnecessary_cast,
            reason = "the type differs between architectures"
        )]
        let kind = fstatfs(&dir)?.f_type as i64;
        Ok((kind == TMPFS_MAGIC, StubId::of(dir.as_fd())))
    };
    let (mut tmpfs, mut id) = is_tmpfs().map_err(failed)?;
    let known = crate::map::Found::read(log).map_err(failed)?;
    if known.is_some_and(|known| id.as_ref().is_ok_and(|id| *id == known.head.root)) {
        return Ok(false);
    }
    let mut mounted = false;
    // What is in it would be hidden.
    if std::fs::read_dir(prefix).map_err(failed)?.next().is_some() {
        return Err(PlaceError::NotEmpty {
            prefix: prefix.to_owned(),
        });
    }
    if rustix::process::geteuid().is_root() {
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        match mount(
            "firn",
            prefix,
            "tmpfs",
            flags,
            Some(c"mode=0700,nr_inodes=0"),
        ) {
            Ok(()) => {
                mounted = true;
                (tmpfs, id) = is_tmpfs().map_err(failed)?;
            }
            // Root of a container without the right to mount.
            Err(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => {}
            Err(error) => return Err(failed(error.into())),
        }
    }
    if !tmpfs {
        return Err(PlaceError::NotTmpfs {
            prefix: prefix.to_owned(),
        });
    }
    id.map_err(|source| PlaceError::NoHandles { source })?;
    Ok(mounted)
}
