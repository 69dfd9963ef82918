//! Finds the mount that a path belongs to.
//!
//! A path may be a mount point, or the *backing* of a mount (the directory that the mount serves), or anything below
//! one of the two, whether or not it exists. This module makes no request to a mount, so `firn status` works even if
//! firnd, the process that serves the mount, is dead or stopped.
//!
//! The kernel's table of mounts shows a type and a source for each mount. Any user that may mount FUSE file systems can
//! choose them. This module therefore trusts these fields only if the kernel says that the user itself mounted it. Root
//! may ask about all mounts. If root and other users mounted the same backing, the mount of root counts.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_format::mountinfo::{Entry, FIRN, holding, parse};
use firn_format::quote::quoted_path;
use firn_protocol::path::BytePath;

use crate::error::ClientError;
use crate::paths::{Key, RuntimeDirs, RuntimeFiles, open_runtime_dir};
use crate::trees::trees_in;

/// A mount of Firn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Canonical path of the backing, the directory that the mount serves.
    pub backing: PathBuf,
    /// The mount point.
    pub mount_point: PathBuf,
    /// The user that mounted it.
    pub user_id: u32,
    /// Whether the mount is a stub tree: a directory on tmpfs with empty files. The preload library serves their bytes.
    /// The kernel does not list it as a mount of Firn.
    pub is_tree: bool,
    /// The runtime directory of the user that mounted it, with the sockets and logs of mounts.
    pub runtime_dir: PathBuf,
}

impl Mount {
    /// Returns the paths of the mount's files in the runtime directory of the user that mounted it.
    pub fn files(&self) -> RuntimeFiles {
        RuntimeFiles::in_dir(&self.runtime_dir, &self.backing, None)
    }

    /// Returns whether another user mounted it.
    pub fn is_of_another_user(&self) -> bool {
        self.user_id != rustix::process::geteuid().as_raw()
    }

    /// Returns the key of the backing, from which the names of the mount's files are made.
    pub fn key(&self) -> Key {
        Key::from_backing(&self.backing)
    }
}

/// A place on a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLocation {
    /// The mount.
    pub mount: Mount,
    /// Path below the mount point, without a leading slash. Empty for the mount point itself.
    pub relative: BytePath,
}

/// Returns all mounts of this user that this process sees. For root it returns the mounts of all users in the
/// kernel's table.
pub fn mounts() -> Result<Vec<Mount>, ClientError> {
    let user = User::of_process();
    let runtime_dirs = RuntimeDirs::from_environment()?;
    let entries = read_mountinfo()?;
    let mut mounts: Vec<Mount> = entries
        .iter()
        .filter_map(|entry| mount_from_entry(entry, &runtime_dirs))
        .filter(|mount| user.may_ask(mount))
        .collect();
    mounts.extend(trees_in(&runtime_dirs.dir_of_user(user.uid))?);
    Ok(mounts)
}

/// Finds the mount that serves `path`, and the path within it.
///
/// `path` may be below a mount point, or in a backing, the directory that a mount serves. Stub trees (mounts without
/// FUSE) are not in the kernel's table, so they are looked up separately. Fails with [`ClientError::NoMount`] if no
/// mount serves the path, and with [`ClientError::NotYours`] if only a mount of another user does.
pub fn find(path: &Path) -> Result<MountLocation, ClientError> {
    let absolute = resolve(path)?;
    let user = User::of_process();
    let runtime_dirs = RuntimeDirs::from_environment()?;
    let table = MountTable {
        entries: read_mountinfo()?,
        runtime_dirs: &runtime_dirs,
        user,
    };
    if let Some(place) = table.find_below_mount_point(&absolute)? {
        return Ok(place);
    }
    if let Some(place) = table.find_in_backing(&absolute, |mount| user.owns(mount)) {
        return Ok(place);
    }
    let trees = trees_in(&runtime_dirs.dir_of_user(user.uid))?;
    if let Some(place) = find_in_trees(&trees, &absolute) {
        return Ok(place);
    }
    // A mount of another user counts only if this user has none.
    match table.find_in_backing(&absolute, |_| true) {
        Some(place) if user.may_ask(&place.mount) => Ok(place),
        Some(place) => Err(not_yours_error(place.mount)),
        None => Err(ClientError::NoMount {
            path: path.to_owned(),
            arena: find_left_arena(&absolute, &runtime_dirs, user),
        }),
    }
}

/// Returns the path of the arena that an earlier mount of `backing` left in the runtime directory, for the error
/// message. Returns `None` if there is none.
fn find_left_arena(backing: &Path, runtime_dirs: &RuntimeDirs, user: User) -> Option<PathBuf> {
    let dir = runtime_dirs.dir_of_user(user.uid);
    // An arena in a directory that is not private does not count.
    open_runtime_dir(&dir, user.uid).ok().flatten()?;
    let arena = RuntimeFiles::in_dir(&dir, backing, None).arena;
    if arena.exists() { Some(arena) } else { None }
}

fn not_yours_error(mount: Mount) -> ClientError {
    ClientError::NotYours {
        mount_point: mount.mount_point,
        user_id: mount.user_id,
    }
}

/// The user of this process.
#[derive(Clone, Copy, Debug)]
struct User {
    uid: u32,
}

impl User {
    fn of_process() -> Self {
        Self {
            uid: rustix::process::geteuid().as_raw(),
        }
    }

    /// Returns whether this user mounted `mount`.
    fn owns(self, mount: &Mount) -> bool {
        mount.user_id == self.uid
    }

    /// Returns whether this user may send requests to the firnd of `mount`. Root may ask every firnd.
    fn may_ask(self, mount: &Mount) -> bool {
        self.uid == 0 || self.owns(mount)
    }
}

/// The kernel's mount table, read for one user.
struct MountTable<'a> {
    /// All mounts of this process's mount namespace.
    entries: Vec<Entry>,
    /// The runtime directories, which have the sockets and arenas of mounts.
    runtime_dirs: &'a RuntimeDirs,
    /// The user for which mounts are looked up.
    user: User,
}

impl MountTable<'_> {
    /// Returns the mount and the path within it, for a path at or below a mount point of Firn.
    ///
    /// `absolute` is a resolved path. Returns `None` if the mount that has the path, the innermost one, is not of Firn.
    /// Fails if that mount belongs to another user, unless this user is root.
    fn find_below_mount_point(
        &self,
        absolute: &Path,
    ) -> Result<Option<MountLocation>, ClientError> {
        let Some(entry) = holding(&self.entries, absolute) else {
            return Ok(None);
        };
        let Some(mount) = mount_from_entry(entry, self.runtime_dirs) else {
            return Ok(None);
        };
        if !self.user.may_ask(&mount) {
            return Err(not_yours_error(mount));
        }
        let Ok(path_in_mount) = absolute.strip_prefix(&entry.mount_point) else {
            return Ok(None);
        };
        // In a bind mount of a directory of the mount, the path within the mount begins with that directory.
        let bound_dir = entry.root.strip_prefix("/").unwrap_or(&entry.root);
        Ok(Some(MountLocation {
            mount,
            relative: without_trailing_slashes(&bound_dir.join(path_in_mount)),
        }))
    }

    /// Returns the place of a path in the backing of a mount. Only mounts with `is_wanted` count.
    ///
    /// If backings are nested, the innermost one that contains the path counts. If several mounts have that backing,
    /// the last one counts.
    fn find_in_backing(
        &self,
        absolute: &Path,
        is_wanted: impl Fn(&Mount) -> bool,
    ) -> Option<MountLocation> {
        let mount = self
            .entries
            .iter()
            .filter_map(|entry| mount_from_entry(entry, self.runtime_dirs))
            .filter(|mount| is_wanted(mount) && absolute.starts_with(&mount.backing))
            .max_by_key(|mount| mount.backing.as_os_str().len())?;
        Some(place_below(mount, absolute, |mount| &mount.backing))
    }
}

/// Returns the place of a path that is at or below a directory of a mount. `directory_of` selects that directory: the
/// mount point or the backing.
fn place_below(mount: Mount, absolute: &Path, directory_of: fn(&Mount) -> &Path) -> MountLocation {
    let path_below = absolute
        .strip_prefix(directory_of(&mount))
        .expect("the path was found below the directory");
    let relative = without_trailing_slashes(path_below);
    MountLocation { mount, relative }
}

/// Returns the place of a path in a stub tree or in the backing of one. Returns `None` if the path is in neither.
fn find_in_trees(trees: &[Mount], absolute: &Path) -> Option<MountLocation> {
    find_below_directory(trees, absolute, |tree| &tree.mount_point)
        .or_else(|| find_below_directory(trees, absolute, |tree| &tree.backing))
}

/// Returns the place of a path at or below one directory of each stub tree. `directory_of` selects that directory: the
/// mount point or the backing.
fn find_below_directory(
    trees: &[Mount],
    absolute: &Path,
    directory_of: fn(&Mount) -> &Path,
) -> Option<MountLocation> {
    // If directories are nested, the innermost one counts: it has the longest path.
    let tree = trees
        .iter()
        .filter(|tree| absolute.starts_with(directory_of(tree)))
        .max_by_key(|tree| directory_of(tree).as_os_str().len())?;
    Some(place_below(tree.clone(), absolute, directory_of))
}

/// Converts an entry of the kernel's table to a mount. Returns `None` if the entry is not a mount of firn, or the
/// kernel does not name its user.
fn mount_from_entry(entry: &Entry, runtime_dirs: &RuntimeDirs) -> Option<Mount> {
    if entry.fs_type != FIRN {
        return None;
    }
    let user_id = entry.user_id?;
    Some(Mount {
        backing: entry.source.clone(),
        mount_point: entry.mount_point.clone(),
        user_id,
        is_tree: false,
        runtime_dir: runtime_dirs.dir_of_user(user_id),
    })
}

/// Returns a path below a mount point without trailing slashes.
fn without_trailing_slashes(path: &Path) -> BytePath {
    let mut bytes = path.as_os_str().as_bytes();
    while let Some(shorter) = bytes.strip_suffix(b"/") {
        bytes = shorter;
    }
    bytes.into()
}

/// Reads the table of mounts that this process sees.
fn read_mountinfo() -> Result<Vec<Entry>, ClientError> {
    const PATH: &str = "/proc/self/mountinfo";
    let bytes = std::fs::read(PATH).map_err(|error| ClientError::Io {
        what: PATH.to_owned(),
        error,
    })?;
    Ok(parse(&bytes))
}

/// Resolves symbolic links in the longest part of `path` that can be resolved, and appends the other components.
///
/// These components may be unresolvable because the path does not exist yet, or lies on a mount whose firnd is dead.
pub fn resolve(path: &Path) -> Result<PathBuf, ClientError> {
    let path_error = |error: io::Error| ClientError::Io {
        what: quoted_path(path),
        error,
    };
    let absolute = std::path::absolute(path).map_err(path_error)?;
    for ancestor in absolute.ancestors() {
        let Ok(resolved) = ancestor.canonicalize() else {
            continue;
        };
        let unresolved = absolute.strip_prefix(ancestor);
        let unresolved = unresolved.expect("an ancestor is a prefix");
        if unresolved.as_os_str().is_empty() {
            // A join with an empty path would add a slash.
            return Ok(resolved);
        }
        return Ok(resolved.join(unresolved));
    }
    Ok(absolute)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
        40 22 0:50 / /ckpt rw - fuse.firn /scratch/run rw,user_id=7,group_id=7\n\
        41 22 0:50 /sub /bound rw - fuse.firn /scratch/run rw,user_id=7,group_id=7\n\
        42 40 0:51 / /ckpt/inner rw - tmpfs tmpfs rw\n\
        43 22 0:52 / /home/8/fake rw - fuse.firn /scratch/run/in rw,user_id=8,group_id=8\n\
        44 22 0:53 / /nobodys rw - fuse.firn /scratch/other rw\n";

    fn find_as(uid: u32, path: &str) -> Result<Option<MountLocation>, ClientError> {
        let dirs = RuntimeDirs::from_environment().unwrap();
        let user = User { uid };
        let table = MountTable {
            entries: parse(TABLE),
            runtime_dirs: &dirs,
            user,
        };
        let absolute = Path::new(path);
        if let Some(place) = table.find_below_mount_point(absolute)? {
            return Ok(Some(place));
        }
        Ok(table.find_in_backing(absolute, |mount| user.owns(mount)))
    }

    #[test]
    fn paths_on_the_mount_in_the_backing_and_in_a_bind_mount_lead_to_the_same_place() {
        for (path, relative) in [
            ("/ckpt", ""),
            ("/ckpt/step_100/rank0", "step_100/rank0"),
            ("/scratch/run", ""),
            ("/scratch/run/step_100", "step_100"),
            ("/bound/x", "sub/x"),
        ] {
            let place = find_as(7, path).unwrap().expect(path);
            assert_eq!(
                (place.mount.backing.as_path(), place.relative.as_path()),
                (Path::new("/scratch/run"), Path::new(relative))
            );
        }
    }

    #[test]
    fn another_mount_below_and_a_path_beside_are_not_ours() {
        for path in [
            "/ckpt/inner/x",
            "/",
            "/scratch",
            "/scratch/runner",
            "/nobodys/x",
            "/scratch/other",
        ] {
            assert_eq!(find_as(7, path).unwrap(), None, "{path}");
        }
    }

    #[test]
    fn regression_a_mount_of_another_user_does_not_answer_for_a_backing() {
        let place = find_as(7, "/scratch/run/in/x").unwrap().unwrap();
        assert_eq!((place.mount.user_id, place.relative), (7, "in/x".into()));
        assert_eq!(find_as(0, "/scratch/run/in/x").unwrap(), None);
        assert!(matches!(
            find_as(7, "/home/8/fake/x"),
            Err(ClientError::NotYours { user_id: 8, .. })
        ));
        assert_eq!(
            find_as(0, "/home/8/fake/x").unwrap().unwrap().mount.user_id,
            8
        );
    }

    #[test]
    fn paths_in_a_stub_tree_and_in_its_backing_lead_to_the_same_place() {
        let tree = |backing: &str, prefix: &str| Mount {
            backing: backing.into(),
            mount_point: prefix.into(),
            user_id: 7,
            is_tree: true,
            runtime_dir: "/dev/shm/firn-7".into(),
        };
        let trees = [
            tree("/scratch/run", "/dev/shm/ckpt"),
            tree("/scratch/run/in", "/dev/shm/in"),
        ];
        for (path, relative) in [
            ("/dev/shm/ckpt/a/b", "a/b"),
            ("/scratch/run/a/b", "a/b"),
            ("/dev/shm/ckpt", ""),
        ] {
            let place = find_in_trees(&trees, Path::new(path)).expect(path);
            assert_eq!(
                (place.mount, place.relative),
                (trees[0].clone(), relative.into())
            );
        }
        assert_eq!(
            find_in_trees(&trees, Path::new("/scratch/run/in/x"))
                .unwrap()
                .mount,
            trees[1]
        );
        assert_eq!(find_in_trees(&trees, Path::new("/dev/shm/ckpt2")), None);
    }

    #[test]
    fn a_path_that_does_not_exist_keeps_its_missing_part() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink(&real, real.join("link")).unwrap();
        assert_eq!(
            resolve(&real.join("link/no/such")).unwrap(),
            real.join("no/such")
        );
    }
}
