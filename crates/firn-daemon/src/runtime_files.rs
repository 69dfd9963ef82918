//! Where the files of a mount are that are not in its backing.
//!
//! Promise: a directory of them is used only if it is the user's own, or other users cannot change what is in it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use firn_backing::Errno;
use firn_client::paths::{RuntimeFiles, create_runtime_dir};
use firn_client::{PathsError, trees};
use firn_config::Options;
use firn_trust::check_place;
use rustix::fs::OFlags;

use crate::error::AttachError;

/// Finds the place of the runtime files of `backing`, and makes the runtime directory if there is none.
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

/// Opens a directory of arenas. Refused where others could exchange files in it.
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

/// Whether anything has this name, a link that leads nowhere too.
pub(crate) fn exists(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Where the names of a backing wait in a stub tree.
pub(crate) fn waiting_tree(files: &RuntimeFiles) -> Result<Option<PathBuf>, PathsError> {
    if !files.names.exists() {
        return Ok(None);
    }
    Ok(trees::read(&files.stub)?.map(|tree| tree.mount_point))
}
