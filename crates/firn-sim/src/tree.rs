//! A whole directory tree of any backing (a file system that Firn can use) as plain data, which tests compare.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Access, Backing, Kind, Result};

/// All objects by their path from the top, without a leading slash. The path of the top itself is empty.
pub type Tree = BTreeMap<Vec<u8>, TreeEntry>;

/// The properties of an object that are compared. Sizes and link counts of directories are not, because they differ
/// between file systems.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeEntry {
    /// Kind of the object.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// Owner and group.
    pub owner: (u32, u32),
    /// Number of names (hard links); 0 for a directory.
    pub nlink: u32,
    /// Bytes of a file, target of a symlink.
    pub content: Vec<u8>,
    /// `user.*` attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// Reads the root and everything below it, by path.
pub fn tree<B: Backing>(backing: &B) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut unread_objects = vec![(Vec::new(), backing.root())];
    while let Some((path, inode)) = unread_objects.pop() {
        let entry = read_entry(backing, &inode)?;
        if entry.kind == Kind::Dir {
            for name in names(backing, &inode)? {
                let (child, _) = backing.lookup(&inode, OsStr::from_bytes(&name))?;
                let slash: &[u8] = if path.is_empty() { b"" } else { b"/" };
                unread_objects.push(([&path, slash, &name].concat(), child));
            }
        }
        tree.insert(path, entry);
    }
    Ok(tree)
}

/// Returns the names in a directory except `.` and `..`, in the directory's order.
pub(crate) fn names<B: Backing>(backing: &B, inode: &B::Inode) -> Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    let dir = backing.open_dir(inode)?;
    backing.read_dir(&dir, 0, &mut |entry| {
        if entry.name != "." && entry.name != ".." {
            names.push(entry.name.as_bytes().to_vec());
        }
        true
    })?;
    Ok(names)
}

/// Reads the compared properties of one object.
fn read_entry<B: Backing>(backing: &B, inode: &B::Inode) -> Result<TreeEntry> {
    let attr = backing.attr(inode)?;
    let content = match attr.kind {
        Kind::File => {
            let mut bytes = vec![0; attr.size as usize];
            let file = backing.open(inode, Access::Read)?;
            let count = backing.read_at(&file, &mut bytes, 0)?;
            bytes.truncate(count);
            bytes
        }
        Kind::Symlink => backing.readlink(inode)?,
        _ => Vec::new(),
    };
    let mut xattrs = BTreeMap::new();
    if matches!(attr.kind, Kind::File | Kind::Dir) {
        let names = backing.list_xattr(inode)?;
        for name in names.split(|&byte| byte == 0) {
            if name.starts_with(b"user.") {
                let value = backing.get_xattr(inode, OsStr::from_bytes(name))?;
                xattrs.insert(name.to_vec(), value);
            }
        }
    }
    Ok(TreeEntry {
        kind: attr.kind,
        mode: attr.mode & 0o7777,
        owner: (attr.uid, attr.gid),
        nlink: if attr.kind == Kind::Dir {
            0
        } else {
            attr.nlink
        },
        content,
        xattrs,
    })
}
