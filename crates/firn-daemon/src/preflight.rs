//! Checks the paths of backing and mount point before a mount. It changes only one thing: a dead Firn mount at the
//! mount point is unmounted.
//!
//! Promise: if the checks pass, the backing can be read, no living Firn mount is at the mount point, and neither path
//! lies in the other. Otherwise the mount is refused with the reason and what to do.

use std::io;
use std::path::{Path, PathBuf};

use firn_client::liveness::{self, Liveness};
use firn_config::Options;
use firn_format::mountinfo::holding;
use firn_format::quote::quoted_path;
use rustix::fs::{Access, AtFlags, CWD, accessat, stat};
use rustix::io::Errno;

use crate::error::{AttachError, MountError};
use crate::mountinfo;

/// A backing and a mount point that have passed the checks.
#[derive(Debug)]
pub(crate) struct CheckedPaths {
    /// Canonical path of the backing.
    pub(crate) backing: PathBuf,
    /// Canonical path of the mount point.
    pub(crate) mount_point: PathBuf,
}

/// Checks a backing (the directory to serve) and a mount point, and returns their canonical paths. A dead Firn mount at
/// the mount point (its process was killed) is unmounted. `notice` gets a message about that, and one if the user may
/// not write to the backing.
pub(crate) fn check_paths(
    backing: &Path,
    mount_point: &Path,
    options: &Options,
    notice: &mut dyn FnMut(String),
) -> Result<CheckedPaths, MountError> {
    let backing = check_backing(backing, options.read_only)?;
    let mount_point = check_mount_point(mount_point, notice)?;
    check_not_nested(&backing, &mount_point)?;
    if !options.read_only
        && let Some(refusal) = write_refusal(&backing)
    {
        notice(format!(
            "{refusal}: files cannot be made at its top; chown or chmod it, or mount with -o ro"
        ));
    }
    Ok(CheckedPaths {
        backing,
        mount_point,
    })
}

/// Checks that a backing, the directory to serve, exists and can be used. Returns its canonical path. It must be
/// writable as a file system, unless `read_only` is set.
pub fn check_backing(path: &Path, read_only: bool) -> Result<PathBuf, AttachError> {
    let path = absolute_path(path);
    let unusable = |source: io::Error| AttachError::BackingUnusable {
        path: path.clone(),
        source,
    };
    let canonical = match path.canonicalize() {
        Ok(canonical) => canonical,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(AttachError::BackingMissing { path });
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(AttachError::BackingNotDirectory { path });
        }
        Err(error) => return Err(unusable(error)),
    };
    if !canonical.metadata().map_err(unusable)?.is_dir() {
        return Err(AttachError::BackingNotDirectory { path: canonical });
    }
    let needed_access = Access::READ_OK | Access::EXEC_OK;
    accessat(CWD, &canonical, needed_access, AtFlags::EACCESS)
        .map_err(|errno| unusable(errno.into()))?;
    // Only EROFS is an error: the user may be able to write to a directory below this one.
    let writable = accessat(CWD, &canonical, Access::WRITE_OK, AtFlags::EACCESS);
    if writable == Err(Errno::ROFS) && !read_only {
        return Err(AttachError::BackingReadOnly { path: canonical });
    }
    Ok(canonical)
}

/// Returns why this user may not create files at the top of a backing, with its owner and mode. `None` means that the
/// user may, as far as the file system says without an attempt.
pub fn write_refusal(backing: &Path) -> Option<String> {
    let needed_access = Access::WRITE_OK | Access::EXEC_OK;
    let errno = accessat(CWD, backing, needed_access, AtFlags::EACCESS).err()?;
    let user = rustix::process::geteuid().as_raw();
    let owner = match stat(backing) {
        Ok(stat) => {
            let permissions = stat.st_mode & 0o7777;
            format!(", owner {}, mode {permissions:04o}", stat.st_uid)
        }
        Err(_) => String::new(),
    };
    Some(format!(
        "user {user} may not write to backing directory {} ({errno}{owner})",
        quoted_path(backing)
    ))
}

/// Fails if the mount point has files, which the mount would hide: the user may have swapped the arguments. A directory
/// that cannot be listed counts as empty.
pub(crate) fn check_mount_point_empty(checked: &CheckedPaths) -> Result<(), MountError> {
    let CheckedPaths {
        backing,
        mount_point,
    } = checked;
    let entries = mountinfo::all_mounts();
    // Listing the directory would make the automounter wait for the mount that is being made.
    if holding(&entries, mount_point).is_some_and(|entry| entry.fs_type == "autofs") {
        return Ok(());
    }
    if !has_entries(mount_point) {
        return Ok(());
    }
    Err(MountError::MountPointNotEmpty {
        mount_point: mount_point.clone(),
        backing: backing.clone(),
        is_backing_empty: !has_entries(backing),
    })
}

fn has_entries(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some())
}

/// Checks a mount point and returns its canonical path. Dead Firn mounts on it (their process was killed) are
/// unmounted, with a message to `notice` for each. A living one is an error.
fn check_mount_point(path: &Path, notice: &mut dyn FnMut(String)) -> Result<PathBuf, MountError> {
    let path = absolute_path(path);
    while liveness::check_mount_point(&path) == Liveness::Dead {
        unmount_dead_mount(&path, notice)?;
    }
    let canonical = match path.canonicalize() {
        Ok(canonical) => canonical,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(MountError::MountPointMissing { path });
        }
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Err(MountError::MountPointNotDirectory { path });
        }
        Err(source) => return Err(MountError::MountPointUnusable { path, source }),
    };
    if !canonical.is_dir() {
        return Err(MountError::MountPointNotDirectory { path: canonical });
    }
    match mountinfo::find_firn_mount(&canonical) {
        Some(mount) => Err(MountError::MountPointBusy {
            path: canonical,
            backing: quoted_path(&mount.backing),
        }),
        None => Ok(canonical),
    }
}

/// Unmounts the mount at `path`. Its firnd, the process that served it, was killed, so its root answers ENOTCONN. Fails
/// if the mount is not a Firn mount.
fn unmount_dead_mount(path: &Path, notice: &mut dyn FnMut(String)) -> Result<(), MountError> {
    let unusable = |source| MountError::MountPointUnusable {
        path: path.to_owned(),
        source,
    };
    // The last part of the path cannot be resolved, but everything above the mount can.
    let canonical = match (path.parent().map(Path::canonicalize), path.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    };
    let Some(mount) = mountinfo::find_firn_mount(&canonical) else {
        let text = "a dead mount of another program is there: unmount it first (umount -l)";
        return Err(unusable(io::Error::other(text)));
    };
    // A lazy unmount succeeds even while programs still have files open there.
    let lazy = true;
    firn_fuse::detach(&canonical, lazy).map_err(unusable)?;
    notice(format!(
        "removed the dead mount of {} at {} (its firnd had ended)",
        quoted_path(&mount.backing),
        quoted_path(&canonical)
    ));
    Ok(())
}

/// Fails if the mount point lies in the backing, or the backing in the mount point.
fn check_not_nested(backing: &Path, mount_point: &Path) -> Result<(), MountError> {
    if mount_point.starts_with(backing) {
        return Err(MountError::MountPointInBacking {
            mount_point: mount_point.to_owned(),
            backing: backing.to_owned(),
        });
    }
    if backing.starts_with(mount_point) {
        return Err(MountError::BackingInMountPoint {
            mount_point: mount_point.to_owned(),
            backing: backing.to_owned(),
        });
    }
    Ok(())
}

/// Returns the absolute path without resolving links.
fn absolute_path(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(backing: &Path, mount_point: &Path) -> MountError {
        check_paths(backing, mount_point, &Options::default(), &mut |_| {})
            .expect_err("must be refused")
    }

    #[test]
    fn directories_inside_each_other_are_refused_both_ways() {
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("inner");
        std::fs::create_dir(&inner).unwrap();
        assert!(matches!(
            refusal(dir.path(), &inner),
            MountError::MountPointInBacking { .. }
        ));
        assert!(matches!(
            refusal(&inner, dir.path()),
            MountError::BackingInMountPoint { .. }
        ));
        assert!(matches!(
            refusal(&inner, &inner),
            MountError::MountPointInBacking { .. }
        ));
    }

    #[test]
    fn a_symlink_does_not_hide_containment() {
        let dir = tempfile::tempdir().unwrap();
        let backing = dir.path().join("backing");
        std::fs::create_dir_all(backing.join("below")).unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(backing.join("below"), &link).unwrap();
        assert!(matches!(
            refusal(&backing, &link),
            MountError::MountPointInBacking { .. }
        ));
    }

    #[test]
    fn neighbours_with_a_common_prefix_are_apart() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["run", "run2"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        check_paths(
            &dir.path().join("run"),
            &dir.path().join("run2"),
            &Options::default(),
            &mut |_| {},
        )
        .unwrap();
    }

    #[test]
    fn a_mount_point_with_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let [empty, full] = ["empty", "full"].map(|name| dir.path().join(name));
        std::fs::create_dir(&empty).unwrap();
        std::fs::create_dir(&full).unwrap();
        std::fs::write(full.join("model.pt"), b"x").unwrap();
        let pair = |backing: &Path, mount_point: &Path| CheckedPaths {
            backing: backing.into(),
            mount_point: mount_point.into(),
        };
        let text = check_mount_point_empty(&pair(&empty, &full))
            .unwrap_err()
            .to_string();
        assert!(text.contains("is not empty"), "{text}");
        // The arguments were swapped, most likely.
        let swapped = format!("`firn mount {} {}`", full.display(), empty.display());
        assert!(text.contains(&swapped), "{text}");
        check_mount_point_empty(&pair(&full, &empty)).unwrap();
    }

    #[test]
    fn missing_and_wrong_kinds_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        let missing = dir.path().join("missing");
        std::fs::write(&file, b"").unwrap();
        let other = tempfile::tempdir().unwrap();
        assert!(matches!(
            refusal(&missing, other.path()),
            MountError::Attach(AttachError::BackingMissing { .. })
        ));
        assert!(matches!(
            refusal(&file, other.path()),
            MountError::Attach(AttachError::BackingNotDirectory { .. })
        ));
        assert!(matches!(
            refusal(other.path(), &missing),
            MountError::MountPointMissing { .. }
        ));
        assert!(matches!(
            refusal(other.path(), &file),
            MountError::MountPointNotDirectory { .. }
        ));
        assert!(matches!(
            refusal(&file.join("x"), other.path()),
            MountError::Attach(AttachError::BackingNotDirectory { .. })
        ));
    }
}
