//! Finds the place of an arena's spill file, and checks that it can be used.
//!
//! The arena is shared memory with the bytes that are not in the backing yet. The spill file holds chunks of it on a
//! disk of the host when the arena becomes full.

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

/// The shape that the options ask for.
pub(crate) struct WantedGeometry {
    pub(crate) geometry: Geometry,
    /// Path of the spill file; empty without one.
    pub(crate) spill_path: PathBuf,
}

/// Returns the geometry that the options ask for: the sizes of the arena (shared memory), of its chunks, and of the
/// spill file, which extends the arena on a disk. A spill file without a size gets the size of the arena.
pub(crate) fn wanted_geometry(
    files: &RuntimeFiles,
    options: &Options,
) -> Result<WantedGeometry, AttachError> {
    let (spill_path, spill_bytes) = match &options.spill {
        None => (PathBuf::new(), 0),
        Some(spill) if options.spill_bytes == 0 => {
            (spill_file_path(spill, files), options.arena_bytes)
        }
        Some(spill) => (
            spill_file_path(spill, files),
            options.spill_bytes.max(options.chunk_bytes),
        ),
    };
    let geometry = Geometry::with_spill(options.arena_bytes, options.chunk_bytes, spill_bytes)
        .map_err(AttachError::Geometry)?;
    Ok(WantedGeometry {
        geometry,
        spill_path,
    })
}

/// Returns the path of the spill file. If the option names a directory, the file gets a name with the arena's key.
fn spill_file_path(spill: &Path, files: &RuntimeFiles) -> PathBuf {
    if !spill.is_dir() {
        return spill.to_owned();
    }
    let dir = spill.canonicalize().unwrap_or_else(|_| spill.to_owned());
    dir.join(format!("firn-{}.spill", files.key))
}

/// Fails if the place of the spill file, which extends the arena (the host's memory) on a disk, cannot be used.
/// `notice` gets a message if the place is in memory too, which gains nothing. Without the option `spill` it does
/// nothing.
pub(crate) fn check_spill_place(
    options: &Options,
    checked: &CheckedPaths,
    notice: &mut dyn FnMut(String),
) -> Result<(), AttachError> {
    let Some(spill) = &options.spill else {
        return Ok(());
    };
    let named_dir = if spill.is_dir() {
        spill.as_path()
    } else {
        spill.parent().unwrap_or(Path::new("/"))
    };
    let dir = named_dir
        .canonicalize()
        .map_err(|source| AttachError::SpillDirectory {
            path: named_dir.into(),
            source,
        })?;
    for mount_dir in [&checked.mount_point, &checked.backing] {
        if dir.starts_with(mount_dir) {
            return Err(AttachError::SpillInside {
                spill: spill.clone(),
                dir: mount_dir.clone(),
            });
        }
    }
    let unusable = |errno: Errno| AttachError::SpillDirectory {
        path: dir.clone(),
        source: errno.into(),
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
