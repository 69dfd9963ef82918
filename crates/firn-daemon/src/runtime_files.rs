//! Finds the files of a mount that are outside of its backing: arena, sockets, log and others.
//!
//! Promise: their directory is used only if it belongs to the user, or if other users cannot change what it holds.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_backing::Errno;
use firn_client::paths::{RuntimeFiles, create_runtime_dir};
use firn_client::{PathsError, trees};
use firn_config::Options;
use firn_trust::check_place;
use rustix::fs::OFlags;

use crate::error::AttachError;

/// Returns the paths of the runtime files of `backing`. The runtime directory is made if it is missing.
pub(crate) fn find_runtime_files(
    backing: &Path,
    options: &Options,
) -> Result<RuntimeFiles, AttachError> {
    let runtime_dir = create_runtime_dir()?;
    if let Some(dir) = &options.arena_dir {
        open_arena_dir(dir)?;
    }
    Ok(RuntimeFiles::in_dir(
        &runtime_dir,
        backing,
        options.arena_dir.as_deref(),
    ))
}

/// Opens a directory for arenas. Fails if other users could replace files in it.
pub(crate) fn open_arena_dir(dir: &Path) -> Result<OwnedFd, AttachError> {
    let unusable = |errno: Errno| AttachError::ArenaDirectory {
        path: dir.to_owned(),
        source: errno.into(),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(dir, flags, rustix::fs::Mode::empty()).map_err(unusable)?;
    check_place(dir)?;
    Ok(opened)
}

/// Returns whether the path exists, even as a dangling link.
pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Returns the path of the backing's stub tree if some of its names are not in the backing; `None` otherwise.
pub(crate) fn waiting_tree(files: &RuntimeFiles) -> Result<Option<PathBuf>, PathsError> {
    if !files.names.exists() {
        return Ok(None);
    }
    Ok(trees::read(&files.stub)?.map(|tree| tree.mount_point))
}
