//! Reads and writes the records of *stub trees*: mount points without FUSE, each a directory on tmpfs with empty files
//! (the stubs). The preload library serves their bytes.
//!
//! The kernel does not list a stub tree as a mount of Firn. firnd, the process that serves a mount, therefore records
//! each stub tree in a file `KEY.stub` of the user's runtime directory. `KEY` is made from the path of the served
//! directory. The preload library and `firn` find the stub trees there.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use firn_format::data_socket::{PATH_BYTES, STUB_MAGIC, StubTree};
use firn_trust::open_private_file;
use rustix::fs::{Dir, OFlags};
use zerocopy::{FromBytes, IntoBytes};

use crate::find::Mount;
use crate::paths::{PathsError, open_runtime_dir};

/// Returns the stub trees that are recorded in the runtime directory of this user, also those of dead firnds.
///
/// Fails if the directory may belong to another user.
pub fn trees_in(runtime_dir: &Path) -> Result<Vec<Mount>, PathsError> {
    let Some(dir) = open_runtime_dir(runtime_dir, current_user_id())? else {
        return Ok(Vec::new());
    };
    let mut trees = Vec::new();
    for entry in Dir::read_from(&dir).into_iter().flatten().flatten() {
        let name = Path::new(OsStr::from_bytes(entry.file_name().to_bytes()));
        let is_record = name.extension() == Some(OsStr::new("stub"));
        if is_record && let Some(tree) = read_record(&dir, name, runtime_dir) {
            trees.push(tree);
        }
    }
    Ok(trees)
}

/// Reads the record of a stub tree from a file in the runtime directory of this user. Returns `None` if there is no
/// valid record at `path`. Fails if the directory may belong to another user.
pub fn read(path: &Path) -> Result<Option<Mount>, PathsError> {
    let (Some(runtime_dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(None);
    };
    match open_runtime_dir(runtime_dir, current_user_id())? {
        Some(dir) => Ok(read_record(dir, Path::new(name), runtime_dir)),
        None => Ok(None),
    }
}

/// Reads the record of a stub tree (a mount without FUSE) from the file `name` of the opened directory `dir`.
///
/// `runtime_dir` is the path of `dir`; the caller has checked that the directory belongs to this user. Returns `None`
/// if the file cannot be read, is not private to this user, or is no record.
fn read_record(dir: impl AsFd, name: &Path, runtime_dir: &Path) -> Option<Mount> {
    let file = open_private_file(dir, name, OFlags::RDONLY).ok()?;
    let mut bytes = [0; size_of::<StubTree>()];
    File::from(file).read_exact(&mut bytes).ok()?;
    let tree = StubTree::read_from_bytes(&bytes).ok()?;
    if tree.magic != STUB_MAGIC {
        return None;
    }
    Some(Mount {
        backing: decode_path(&tree.backing),
        mount_point: decode_path(&tree.prefix),
        user_id: current_user_id(),
        is_tree: true,
        runtime_dir: runtime_dir.to_owned(),
    })
}

fn current_user_id() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Writes the record of a stub tree atomically: a reader sees either the old record or the new one.
pub fn write(path: &Path, tree: &StubTree) -> io::Result<()> {
    let new_path = path.with_extension("stub.new");
    let mut file = File::options()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new_path)?;
    file.write_all(tree.as_bytes())?;
    std::fs::rename(&new_path, path)
}

/// Converts a path to the form in which [`StubTree`] stores it. Returns `None` if the path is too long.
pub fn path_bytes(path: &Path) -> Option<[u8; PATH_BYTES]> {
    let path = path.as_os_str().as_bytes();
    // A zero byte must follow the path.
    if path.len() >= PATH_BYTES {
        return None;
    }
    let mut bytes = [0; PATH_BYTES];
    bytes[..path.len()].copy_from_slice(path);
    Some(bytes)
}

/// Returns the path that [`path_bytes`] stored.
fn decode_path(bytes: &[u8]) -> PathBuf {
    let mut parts = bytes.split(|byte| *byte == 0);
    let path = parts.next().unwrap_or_default();
    PathBuf::from(OsString::from_vec(path.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_that_was_written_down_is_found() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o700),
        )
        .unwrap();
        let tree = StubTree {
            magic: STUB_MAGIC,
            device_major: 0,
            device_minor: 7,
            whole_device: 1,
            pid: 1,
            refuses_locks: 0,
            unused: 0,
            arena: [3; 16],
            socket: [0; 112],
            prefix: path_bytes(Path::new("/dev/shm/p")).unwrap(),
            backing: path_bytes(Path::new("/back")).unwrap(),
        };
        write(&dir.path().join("key.stub"), &tree).unwrap();
        std::fs::write(dir.path().join("torn.stub"), b"FIRN").unwrap();
        std::os::unix::fs::symlink("key.stub", dir.path().join("link.stub")).unwrap();
        let found = trees_in(dir.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(
            (&*found[0].mount_point, &*found[0].backing),
            (Path::new("/dev/shm/p"), Path::new("/back"))
        );
        let read_again = read(&dir.path().join("key.stub")).unwrap();
        assert_eq!(read_again.as_ref(), found.first());
    }

    #[test]
    fn regression_a_tree_in_a_directory_that_others_may_enter_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key.stub"), b"").unwrap();
        std::fs::set_permissions(
            dir.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        assert!(trees_in(dir.path()).is_err());
        assert!(read(&dir.path().join("key.stub")).is_err());
    }
}
