//! Stub trees: what firnd writes down for the preload library and for `firn`, since the kernel does not know
//! them as mounts of ours.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use firn_format::door::{PATH_BYTES, STUB_MAGIC, StubTree};
use zerocopy::{FromBytes, IntoBytes};

use crate::find::Mount;

/// The trees that are written down in a runtime directory, those of dead firnds too.
pub fn trees_in(runtime_dir: &Path) -> Vec<Mount> {
    let entries = std::fs::read_dir(runtime_dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.path());
    let stubs = names.filter(|path| path.extension().is_some_and(|extension| extension == "stub"));
    stubs.filter_map(|path| read(&path)).collect()
}

/// The tree that is written down in a file.
pub fn read(path: &Path) -> Option<Mount> {
    let bytes = std::fs::read(path).ok()?;
    let tree = StubTree::read_from_bytes(&bytes).ok().filter(|tree| tree.magic == STUB_MAGIC)?;
    Some(Mount {
        backing: path_of(&tree.backing),
        mount_point: path_of(&tree.prefix),
        user_id: rustix::process::geteuid().as_raw(),
        is_tree: true,
    })
}

/// Writes a tree down, in one step for whoever reads.
pub fn write(path: &Path, tree: &StubTree) -> io::Result<()> {
    let new = path.with_extension("stub.new");
    let mut file = File::options().create(true).truncate(true).write(true).mode(0o600).open(&new)?;
    file.write_all(tree.as_bytes())?;
    std::fs::rename(&new, path)
}

/// A path as [`StubTree`] has it; `None` where it does not fit.
pub fn path_bytes(path: &Path) -> Option<[u8; PATH_BYTES]> {
    let mut bytes = [0; PATH_BYTES];
    let path = path.as_os_str().as_bytes();
    bytes.get_mut(..path.len()).filter(|_| path.len() < PATH_BYTES)?.copy_from_slice(path);
    Some(bytes)
}

fn path_of(bytes: &[u8]) -> PathBuf {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    PathBuf::from(OsString::from_vec(bytes.get(..end).unwrap_or_default().to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_that_was_written_down_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let tree = StubTree {
            magic: STUB_MAGIC,
            device_major: 0,
            device_minor: 7,
            whole_device: 1,
            pid: 1,
            arena: [3; 16],
            socket: [0; 112],
            prefix: path_bytes(Path::new("/dev/shm/p")).unwrap(),
            backing: path_bytes(Path::new("/back")).unwrap(),
        };
        write(&dir.path().join("key.stub"), &tree).unwrap();
        std::fs::write(dir.path().join("torn.stub"), b"FIRN").unwrap();
        let found = trees_in(dir.path());
        assert_eq!(found.len(), 1);
        assert_eq!(
            (&*found[0].mount_point, &*found[0].backing),
            (Path::new("/dev/shm/p"), Path::new("/back"))
        );
    }
}
