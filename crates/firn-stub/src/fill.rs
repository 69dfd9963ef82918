//! Fills a new stub tree: a directory on tmpfs that stands for the *backing*, the directory that the mount serves.
//!
//! The tree gets a *stub* for each object of the backing: each directory, file, link and device, with its attributes.
//! The stub of a file is empty, because the preload library serves its bytes. If an object of the backing has several
//! names, its stub gets the same names. Parents precede their contents; directories get their attributes last.
//!
//! If firnd, the process that serves the mount, dies in between, the tree's log is not marked as filled. The next firnd
//! then clears the tree and begins again.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Attr, Backing, Errno, Kind, RenameFlags};
use firn_engine::{HandleId, InodeId, ROOT, Result};
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, chmodat, chownat, linkat,
    mkdirat, mknodat, openat, symlinkat, utimensat,
};

use crate::map::Map;
use crate::path::{PRIVATE, RelPath, join};
use crate::tree::{Tree, to_errno};

/// The names in a directory. Owned, so that the directory is closed before they are used.
type Names = Vec<OsString>;
/// For each object with several names, the first path at which it has a stub. The key is the object's device and inode
/// number in the backing.
type LinkedStubs = HashMap<(u64, u64), RelPath>;

/// A directory of the tree, and its attributes in the backing.
struct FilledDir {
    path: RelPath,
    attr: Attr,
}

impl<B: Backing> Tree<B> {
    /// Makes a stub (an empty stand-in on tmpfs) for everything in the backing, the directory that the mount serves.
    ///
    /// The caller begins with an empty tree, and afterwards marks the log as filled. If the log has no such mark, the
    /// next firnd clears the tree and fills it again. Holds the lock of the map throughout.
    pub(crate) fn fill(&self) -> Result<()> {
        let mut map = self.map.lock();
        let mut linked_stubs = LinkedStubs::new();
        let root = FilledDir {
            path: RelPath::new(),
            attr: self.engine.namespace.attr(ROOT, None)?,
        };
        // All directories, the parents first. Those from `next_index` on are not filled yet.
        let mut dirs = vec![root];
        let mut next_index = 0;
        while let Some(dir) = dirs.get(next_index) {
            next_index += 1;
            let dir_path = dir.path.clone();
            let dir_inode = self.find(&dir_path)?.inode;
            for name in self.names_in(dir_inode.inode)? {
                // The directory of Firn's own files gets no stub. Files of an earlier tree that have no name are set
                // aside.
                if dir_path.is_empty() && name == ".firn" {
                    self.set_unnamed_aside()?;
                    continue;
                }
                let entry = self.engine.namespace.lookup(dir_inode.inode, &name)?;
                let child = self.reference(entry.inode);
                let path = join(&dir_path, name.as_bytes());
                self.create_stub(&mut map, &path, &entry.attr, child.inode, &mut linked_stubs)?;
                if entry.attr.kind == Kind::Dir {
                    let attr = entry.attr;
                    dirs.push(FilledDir { path, attr });
                }
            }
        }
        // Attributes of directories come last: filling a directory changes its times, and its mode may deny writing.
        let dirs_below_root = dirs.iter().skip(1);
        for dir in dirs_below_root.rev() {
            self.set_attributes(&dir.path, &dir.attr)?;
        }
        Ok(())
    }

    /// Creates the stub of one object of the backing (the served directory) at `path`, and adds it to the map.
    ///
    /// If another name of the object already has a stub, `path` becomes a further name of that stub. `linked_stubs`
    /// remembers the first path of each object with several names.
    fn create_stub(
        &self,
        map: &mut Map,
        path: &[u8],
        attr: &Attr,
        inode: InodeId,
        linked_stubs: &mut LinkedStubs,
    ) -> Result<()> {
        if attr.kind != Kind::Dir && attr.nlink > 1 {
            let object = (attr.dev, attr.ino);
            if let Some(first_path) = linked_stubs.get(&object) {
                linkat(
                    &self.root,
                    &**first_path,
                    &self.root,
                    path,
                    AtFlags::empty(),
                )?;
                return self.add_to_map(map, path, attr.kind);
            }
            linked_stubs.insert(object, path.to_vec());
        }
        self.create_object_on_tmpfs(path, attr, inode)?;
        if attr.kind != Kind::Dir {
            self.set_attributes(path, attr)?;
        }
        self.add_to_map(map, path, attr.kind)
    }

    /// Creates the stub of an object on the tmpfs of the tree: an empty file, a directory, a link or a device.
    ///
    /// `attr` and `inode` are those of the object in the backing. Only the owner may use the stub, until its attributes
    /// are set. Fails if there is something at `path`.
    fn create_object_on_tmpfs(&self, path: &[u8], attr: &Attr, inode: InodeId) -> Result<()> {
        let root = &self.root;
        let owner_only = Mode::RUSR | Mode::WUSR;
        match attr.kind {
            Kind::File => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                // The file is only created, so it is closed at once.
                drop(openat(root, path, flags, owner_only)?);
            }
            Kind::Dir => mkdirat(root, path, Mode::RWXU)?,
            Kind::Symlink => {
                let target = self.engine.namespace.readlink(inode)?;
                symlinkat(OsStr::from_bytes(&target), root, path)?;
            }
            kind => mknodat(root, path, file_type(kind), owner_only, attr.rdev)?,
        }
        Ok(())
    }

    /// Adds a new stub to the map.
    fn add_to_map(&self, map: &mut Map, path: &[u8], kind: Kind) -> Result<()> {
        let stub = self.stub(path).map_err(|error| to_errno(&error))?;
        map.insert(stub.id, kind, path)
            .map_err(|error| to_errno(&error))?;
        Ok(())
    }

    /// Sets owner, mode and times of the stub at `path` to those that its object has in the backing, the directory that
    /// the mount serves. The stub of the root has the empty path.
    fn set_attributes(&self, path: &[u8], attr: &Attr) -> Result<()> {
        let root = &self.root;
        let no_follow = AtFlags::SYMLINK_NOFOLLOW;
        let stub_path: &[u8] = if path.is_empty() { b"." } else { path };
        // The error is ignored: without the right to change owners, the stubs belong to this process's user.
        let _ = chownat(
            root,
            stub_path,
            Some(Uid::from_raw(attr.uid)),
            Some(Gid::from_raw(attr.gid)),
            no_follow,
        );
        if attr.kind != Kind::Symlink {
            chmodat(
                root,
                stub_path,
                Mode::from_raw_mode(attr.mode & 0o7777),
                AtFlags::empty(),
            )?;
        }
        let time = |time: firn_backing::Time| Timespec {
            tv_sec: time.sec,
            tv_nsec: i64::from(time.nsec) as _,
        };
        let times = Timestamps {
            last_access: time(attr.atime),
            last_modification: time(attr.mtime),
        };
        utimensat(root, stub_path, &times, no_follow)
    }

    /// Returns the names in a directory of the backing, the directory that the mount serves, without `.` and `..`.
    fn names_in(&self, dir: InodeId) -> Result<Names> {
        let handle: HandleId = self.engine.namespace.open_dir(dir)?;
        let mut names = Names::new();
        let read = self.engine.namespace.read_dir(handle, 0, &mut |entry| {
            if entry.name != "." && entry.name != ".." {
                names.push(entry.name.to_owned());
            }
            true
        });
        self.engine.namespace.release_dir(handle);
        read.map(|()| names)
    }

    /// Renames the directory of private paths, `.firn/stub`, if it has files of an earlier tree.
    ///
    /// A file has a private path in the backing until the name of its stub is synced. The names themselves are on tmpfs
    /// only, so they are lost if the host loses its memory. The files are then retained under
    /// `.firn/unnamed-TIME`, apart from the files of this tree. Does nothing if there is no such file.
    fn set_unnamed_aside(&self) -> Result<()> {
        let firn_dir = self.find(b".firn")?.inode;
        let Ok(private_dir) = self.find(PRIVATE) else {
            return Ok(());
        };
        if self.names_in(private_dir.inode.inode)?.is_empty() {
            return Ok(());
        }
        // The reference to the directory ends before the directory is renamed; it is not needed any more.
        drop(private_dir);
        let now = firn_backing::Time::now().sec;
        let new_name = OsString::from(format!("unnamed-{now}"));
        let rename = |flags| {
            self.engine.namespace.rename(
                firn_dir.inode,
                OsStr::new("stub"),
                firn_dir.inode,
                &new_name,
                flags,
            )
        };
        match rename(RenameFlags::NOREPLACE) {
            Ok(()) => {}
            // Some file systems do not support this flag.
            Err(Errno::INVAL | Errno::NOSYS) => rename(RenameFlags::empty())?,
            Err(error) => return Err(error),
        }
        tracing::warn!(
            directory = %format!(".firn/{}", new_name.to_string_lossy()),
            "files of an earlier stub tree remain in this directory of the backing: their names were lost with the memory of the host"
        );
        Ok(())
    }
}

/// Translates a kind for mknod(2).
fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::File => FileType::RegularFile,
        Kind::Dir => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::Fifo,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharacterDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}
