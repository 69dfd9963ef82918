//! From a path to the mount it belongs to.
//!
//! A path may be a mount point, anything below one (whether or not it exists), a backing, or anything
//! below a backing that is mounted. Nothing here asks a firn mount for anything: a dead or stopped
//! firnd must not keep `firn status` from saying so.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::ClientError;
use crate::mountinfo::{Entry, holding, parse};
use crate::paths::{Key, RuntimeFiles, runtime_dir, runtime_dir_of};
use crate::trees::trees_in;

/// The type of our mounts in mountinfo.
const FS_TYPE: &str = "fuse.firn";

/// A mount of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The backing, canonical.
    pub backing: PathBuf,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// Who mounted it.
    pub user_id: u32,
    /// It is a stub tree, which the kernel does not know as a mount of ours.
    pub is_tree: bool,
}

impl Mount {
    /// Its files in the runtime directory of the user who mounted it.
    pub fn files(&self) -> RuntimeFiles {
        RuntimeFiles::in_dir(&runtime_dir_of(self.user_id), &self.backing, None)
    }

    /// The key of its backing.
    pub fn key(&self) -> Key {
        Key::of(&self.backing)
    }
}

/// A place on a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The mount.
    pub mount: Mount,
    /// Path below the mount point, without a leading slash; empty: the mount itself.
    pub relative: String,
}

/// All mounts of firn that this process sees.
pub fn mounts() -> Result<Vec<Mount>, ClientError> {
    let mounts = read_mountinfo()?;
    Ok(mounts.iter().filter_map(mount_of).chain(trees_in(&runtime_dir())).collect())
}

/// The place on a mount that `path` means.
pub fn find(path: &Path) -> Result<Place, ClientError> {
    let absolute = canonical_as_far_as_possible(path)?;
    let found = find_in(&read_mountinfo()?, &absolute);
    found.or_else(|| find_tree(&trees_in(&runtime_dir()), &absolute)).ok_or_else(|| ClientError::NoMount {
        path: path.to_owned(),
        arena: Some(RuntimeFiles::of(&absolute, None).arena).filter(|arena| arena.exists()),
    })
}

fn find_in(entries: &[Entry], absolute: &Path) -> Option<Place> {
    if let Some(entry) = holding(entries, absolute)
        && let Some(mount) = mount_of(entry)
    {
        let below = absolute.strip_prefix(&entry.mount_point).ok()?;
        // A bind mount of a directory of the mount: its own root comes first.
        let top = entry.root.strip_prefix("/").unwrap_or(&entry.root);
        return Some(Place { mount, relative: text(&top.join(below)) });
    }
    let in_backing = |mount: &Mount| absolute.starts_with(&mount.backing);
    let mount = entries
        .iter()
        .filter_map(mount_of)
        .filter(in_backing)
        .max_by_key(|mount| mount.backing.as_os_str().len())?;
    let relative = text(absolute.strip_prefix(&mount.backing).ok()?);
    Some(Place { mount, relative })
}

/// The place in a stub tree, or in the backing of one.
fn find_tree(trees: &[Mount], absolute: &Path) -> Option<Place> {
    let below = |top: fn(&Mount) -> &Path| {
        let holds = trees.iter().filter(|tree| absolute.starts_with(top(tree)));
        let mount = holds.max_by_key(|tree| top(tree).as_os_str().len())?;
        let relative = text(absolute.strip_prefix(top(mount)).ok()?);
        Some(Place { mount: mount.clone(), relative })
    };
    below(|tree| &tree.mount_point).or_else(|| below(|tree| &tree.backing))
}

fn mount_of(entry: &Entry) -> Option<Mount> {
    (entry.fs_type == FS_TYPE).then(|| Mount {
        backing: entry.source.clone(),
        mount_point: entry.mount_point.clone(),
        user_id: entry.user_id.unwrap_or(0),
        is_tree: false,
    })
}

/// The protocol is JSON, so a path that is not UTF-8 is sent as near as can be.
fn text(path: &Path) -> String {
    path.to_string_lossy().trim_end_matches('/').to_owned()
}

fn read_mountinfo() -> Result<Vec<Entry>, ClientError> {
    const PATH: &str = "/proc/self/mountinfo";
    let bytes = std::fs::read(PATH).map_err(|error| ClientError::Io { what: PATH.to_owned(), error })?;
    Ok(parse(&bytes))
}

/// Resolves symlinks in the longest part of `path` that can be resolved, and appends the rest: the
/// path may not exist yet, or lie on a mount whose firnd is dead.
fn canonical_as_far_as_possible(path: &Path) -> Result<PathBuf, ClientError> {
    let failed = |error: io::Error| ClientError::Io { what: path.display().to_string(), error };
    let absolute = std::path::absolute(path).map_err(failed)?;
    for top in absolute.ancestors() {
        if let Ok(resolved) = top.canonicalize() {
            let rest = absolute.strip_prefix(top).expect("an ancestor is a prefix");
            return Ok(if rest.as_os_str().is_empty() { resolved } else { resolved.join(rest) });
        }
    }
    Ok(absolute)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<Entry> {
        parse(
            b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
              40 22 0:50 / /ckpt rw - fuse.firn /scratch/run rw,user_id=7,group_id=7\n\
              41 22 0:50 /sub /bound rw - fuse.firn /scratch/run rw,user_id=7,group_id=7\n\
              42 40 0:51 / /ckpt/inner rw - tmpfs tmpfs rw\n",
        )
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
            let place = find_in(&entries(), Path::new(path)).expect(path);
            assert_eq!(
                (place.mount.backing.as_path(), place.relative.as_str()),
                (Path::new("/scratch/run"), relative)
            );
        }
    }

    #[test]
    fn another_mount_below_and_a_path_beside_are_not_ours() {
        for path in ["/ckpt/inner/x", "/", "/scratch", "/scratch/runner"] {
            assert_eq!(find_in(&entries(), Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn paths_in_a_stub_tree_and_in_its_backing_lead_to_the_same_place() {
        let tree = |backing: &str, prefix: &str| Mount {
            backing: backing.into(),
            mount_point: prefix.into(),
            user_id: 7,
            is_tree: true,
        };
        let trees = [tree("/scratch/run", "/dev/shm/ckpt"), tree("/scratch/run/in", "/dev/shm/in")];
        for (path, relative) in
            [("/dev/shm/ckpt/a/b", "a/b"), ("/scratch/run/a/b", "a/b"), ("/dev/shm/ckpt", "")]
        {
            let place = find_tree(&trees, Path::new(path)).expect(path);
            assert_eq!((place.mount, place.relative.as_str()), (trees[0].clone(), relative));
        }
        assert_eq!(find_tree(&trees, Path::new("/scratch/run/in/x")).unwrap().mount, trees[1]);
        assert_eq!(find_tree(&trees, Path::new("/dev/shm/ckpt2")), None);
    }

    #[test]
    fn a_path_that_does_not_exist_keeps_its_missing_part() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink(&real, real.join("link")).unwrap();
        assert_eq!(canonical_as_far_as_possible(&real.join("link/no/such")).unwrap(), real.join("no/such"));
    }
}
