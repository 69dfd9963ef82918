//! A directory tree as a comparable value: what two trees must agree in to count as the same.
//!
//! Compared are names, types, modes, owners, link counts, sizes, contents, link targets, extended
//! attributes and modification times that were set. Left out is what two copies cannot share: inode
//! numbers, change times, and sizes and blocks of directories.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Modification times before this were set by a test, later ones by the clock.
const CLOCK_EPOCH: i64 = 1_500_000_000;

/// One object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Type and permission bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// Link count.
    pub links: u64,
    /// Size of a file or link.
    pub size: u64,
    /// Modification time where a test set it.
    pub mtime: Option<(i64, i64)>,
    /// Hash of a file's content, or a link's target.
    pub content: Vec<u8>,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Device number of a special file.
    pub device: u64,
}

/// Relative path to object.
pub type Tree = BTreeMap<PathBuf, Object>;

/// Reads a tree.
pub fn snapshot(root: &Path) -> Tree {
    let mut tree = Tree::new();
    walk(root, Path::new(""), &mut tree);
    tree
}

/// Panics with the first differences unless the trees are the same.
#[track_caller]
pub fn assert_same(what: &str, found: &Tree, expected: &Tree) {
    let differences = differences(found, expected);
    assert!(
        differences.is_empty(),
        "{what}:\n{}",
        differences.join("\n")
    );
}

/// What differs, at most a handful of lines.
pub fn differences(found: &Tree, expected: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    for path in found
        .keys()
        .chain(expected.keys().filter(|path| !found.contains_key(*path)))
    {
        let is = found.get(path);
        let should = expected.get(path);
        if is != should {
            lines.push(format!(
                "{}:\n  found    {is:?}\n  expected {should:?}",
                path.display()
            ));
        }
    }
    lines.truncate(8);
    lines
}

fn walk(root: &Path, below: &Path, tree: &mut Tree) {
    let path = root.join(below);
    let mut entries: Vec<_> = fs::read_dir(&path)
        .unwrap_or_else(|e| panic!("read directory {path:?}: {e}"))
        .map(|entry| {
            entry
                .unwrap_or_else(|e| panic!("an entry of {path:?}: {e}"))
                .file_name()
        })
        .collect();
    entries.sort();
    for name in entries {
        let below = below.join(&name);
        let object = object(&root.join(&below));
        let directory = object.mode & libc::S_IFMT == libc::S_IFDIR;
        tree.insert(below.clone(), object);
        if directory {
            walk(root, &below, tree);
        }
    }
}

fn object(path: &Path) -> Object {
    let meta = fs::symlink_metadata(path).unwrap_or_else(|e| panic!("stat {path:?}: {e}"));
    let kind = meta.file_type();
    let content = if kind.is_file() {
        digest(&crate::fsops::read(path))
    } else if kind.is_symlink() {
        fs::read_link(path)
            .expect("readlink")
            .as_os_str()
            .as_bytes()
            .to_vec()
    } else {
        Vec::new()
    };
    let special = kind.is_char_device() || kind.is_block_device();
    Object {
        mode: meta.mode(),
        owner: (meta.uid(), meta.gid()),
        links: meta.nlink(),
        size: if kind.is_dir() { 0 } else { meta.size() },
        mtime: (meta.mtime() < CLOCK_EPOCH).then(|| (meta.mtime(), meta.mtime_nsec())),
        content,
        xattrs: if kind.is_symlink() {
            BTreeMap::new()
        } else {
            xattrs(path)
        },
        device: if special { meta.rdev() } else { 0 },
    }
}

/// Extended attributes of a path.
pub fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0u8; 64 << 10];
    let len = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::NOTSUP) => 0,
        Err(e) => panic!("listxattr {path:?}: {e}"),
    };
    let mut found = BTreeMap::new();
    for name in names[..len]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0u8; 64 << 10];
        let len = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap_or_else(|e| {
            panic!("getxattr {path:?} {:?}: {e}", String::from_utf8_lossy(name))
        });
        value.truncate(len);
        found.insert(name.to_vec(), value);
    }
    found
}

/// FNV-1a over 64 bits, twice with different starts: enough to tell test files apart.
fn digest(data: &[u8]) -> Vec<u8> {
    let hash = |start: u64| {
        data.iter().fold(start, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
        })
    };
    [hash(0xcbf2_9ce4_8422_2325), hash(0x8422_2325_cbf2_9ce4)]
        .iter()
        .flat_map(|h| h.to_le_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn two_trees() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let a = dir.path().join("a");
        let b = dir.path().join("b");
        for root in [&a, &b] {
            fs::create_dir_all(root.join("sub")).expect("mkdir");
            fs::write(root.join("sub/file"), "text").expect("write");
            std::os::unix::fs::symlink("file", root.join("sub/link")).expect("symlink");
        }
        (dir, a, b)
    }

    #[test]
    fn equal_trees_have_no_differences() {
        let (_dir, a, b) = two_trees();
        assert!(differences(&snapshot(&a), &snapshot(&b)).is_empty());
    }

    #[test]
    fn each_kind_of_difference_is_seen() {
        let changes: [fn(&Path); 6] = [
            |root| fs::write(root.join("sub/file"), "tent").expect("write"),
            |root| fs::write(root.join("more"), "").expect("write"),
            |root| fs::remove_file(root.join("sub/link")).expect("unlink"),
            |root| fs::hard_link(root.join("sub/file"), root.join("hard")).expect("link"),
            |root| {
                fs::set_permissions(root.join("sub"), fs::Permissions::from_mode(0o700))
                    .expect("chmod")
            },
            |root| {
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::setxattr(root.join("sub/file"), "user.x", b"1", flags)
                    .expect("setxattr");
            },
        ];
        for (index, change) in changes.iter().enumerate() {
            let (_dir, a, b) = two_trees();
            change(&b);
            assert!(
                !differences(&snapshot(&a), &snapshot(&b)).is_empty(),
                "change {index} was not seen"
            );
        }
    }
}
