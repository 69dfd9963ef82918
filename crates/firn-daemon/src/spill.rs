//! Finds the place of an arena's spill file, and checks that it can be used.
//!
//! The spill file holds chunks of the arena on a disk of the host when the arena becomes full.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_client::paths::RuntimeFiles;
use firn_config::Options;
use firn_format::geometry::Geometry;
use firn_format::quote::quoted_path;
use firn_trust::check_place;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::AttachError;
use crate::preflight::CheckedPaths;

/// The `f_type` of statfs(2) for tmpfs.
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// Returns the geometry that the options ask for, and the path of the spill file; the path is empty without one.
pub(crate) fn wanted_geometry(
    files: &RuntimeFiles,
    options: &Options,
) -> Result<(Geometry, PathBuf), AttachError> {
    let (path, bytes) = match &options.spill {
        None => (PathBuf::new(), 0),
        Some(_) if options.spill_bytes == 0 => (path(files, options), options.arena_bytes),
        Some(_) => (
            path(files, options),
            options.spill_bytes.max(options.chunk_bytes),
        ),
    };
    let geometry = Geometry::with_spill(options.arena_bytes, options.chunk_bytes, bytes);
    Ok((geometry.map_err(AttachError::Geometry)?, path))
}

/// Returns the path of the spill file. In a directory, the file gets a name with the arena's key.
fn path(files: &RuntimeFiles, options: &Options) -> PathBuf {
    let Some(spill) = &options.spill else {
        return PathBuf::new();
    };
    if !spill.is_dir() {
        return spill.clone();
    }
    let dir = spill.canonicalize().unwrap_or_else(|_| spill.clone());
    dir.join(format!("firn-{}.spill", files.key))
}

/// Refuses places that cannot hold the spill file. `notice` gets a message if the place is in memory too, which gains
/// nothing.
pub(crate) fn check(
    options: &Options,
    checked: &CheckedPaths,
    notice: &mut dyn FnMut(String),
) -> Result<(), AttachError> {
    let Some(spill) = &options.spill else {
        return Ok(());
    };
    let dir = if spill.is_dir() {
        spill.as_path()
    } else {
        spill.parent().unwrap_or(Path::new("/"))
    };
    let dir = dir
        .canonicalize()
        .map_err(|source| AttachError::SpillDirectory {
            path: dir.into(),
            source,
        })?;
    for outer in [&checked.mount_point, &checked.backing] {
        if dir.starts_with(outer) {
            return Err(AttachError::SpillInside {
                spill: spill.clone(),
                dir: outer.clone(),
            });
        }
    }
    let unusable = |error: Errno| AttachError::SpillDirectory {
        path: dir.clone(),
        source: error.into(),
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&dir, flags, Mode::empty()).map_err(unusable)?;
    check_place(&dir)?;
    let stat = rustix::fs::fstatfs(&opened).map_err(unusable)?;
    if stat.f_type as u64 == TMPFS_MAGIC {
        notice(format!(
            "spill {} is on tmpfs, which is memory too: name a directory on a host-local disk",
            quoted_path(spill)
        ));
    }
    Ok(())
}

/// Returns whether the spill file of an arena is where the options want it.
pub(crate) fn is_at(arena: &firn_arena::Arena, path: &Path) -> bool {
    arena.superblock().spill_path == path.as_os_str().as_bytes()
}
