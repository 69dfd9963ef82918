//! Fills a new tree with stubs for the contents of the backing.
//!
//! The tree gets each directory, file, link and device with its attributes; files are empty. Names of one object in the
//! backing become names of one stub. Parents precede their contents; directories get their attributes last.
//!
//! A crash in between leaves a log that is not marked as filled. The next firnd then clears the tree and begins again.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Attr, Backing, Errno, Kind};
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

impl<B: Backing> Tree<B> {
    /// Makes a stub for everything in the backing. Until the log says that the tree is filled, the log is not complete.
    pub(crate) fn fill(&self) -> Result<()> {
        let mut map = self.map.lock();
        let mut linked = HashMap::new();
        let mut dirs: Vec<(RelPath, Attr)> =
            vec![(Vec::new(), self.engine.namespace.attr(ROOT, None)?)];
        let mut next = 0;
        while let Some((dir, _)) = dirs.get(next).cloned() {
            next += 1;
            let (inode, _) = self.find(&dir)?;
            for name in self.names_in(inode.inode)? {
                if dir.is_empty() && name == ".firn" {
                    self.set_unnamed_aside()?;
                    continue;
                }
                let entry = self.engine.namespace.lookup(inode.inode, &name)?;
                let child = self.reference(entry.inode);
                let path = join(&dir, name.as_bytes());
                self.create_stub(&mut map, &path, &entry.attr, child.inode, &mut linked)?;
                if entry.attr.kind == Kind::Dir {
                    dirs.push((path, entry.attr));
                }
            }
        }
        // Attributes of directories come last: filling a directory changes its times, and its mode may deny writing.
        for (path, attr) in dirs.iter().skip(1).rev() {
            self.set_attributes(path, attr)?;
        }
        Ok(())
    }

    /// Makes one stub. `linked`: first path of each object with several names.
    fn create_stub(
        &self,
        map: &mut Map,
        path: &[u8],
        attr: &Attr,
        inode: InodeId,
        linked: &mut HashMap<(u64, u64), RelPath>,
    ) -> Result<()> {
        let root = &self.root;
        if attr.kind != Kind::Dir && attr.nlink > 1 {
            if let Some(first) = linked.get(&(attr.dev, attr.ino)) {
                linkat(root, &**first, root, path, AtFlags::empty())?;
                return self.add_to_map(map, path, attr.kind);
            }
            linked.insert((attr.dev, attr.ino), path.to_vec());
        }
        let private = Mode::RUSR | Mode::WUSR;
        match attr.kind {
            Kind::File => {
                drop(openat(
                    root,
                    path,
                    OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC,
                    private,
                )?);
            }
            Kind::Dir => mkdirat(root, path, Mode::RWXU)?,
            Kind::Symlink => symlinkat(
                OsStr::from_bytes(&self.engine.namespace.readlink(inode)?),
                root,
                path,
            )?,
            kind => mknodat(root, path, file_type(kind), private, attr.rdev)?,
        }
        if attr.kind != Kind::Dir {
            self.set_attributes(path, attr)?;
        }
        self.add_to_map(map, path, attr.kind)
    }

    /// Adds a new stub to the map.
    fn add_to_map(&self, map: &mut Map, path: &[u8], kind: Kind) -> Result<()> {
        let stub = self.stub(path).map_err(|error| to_errno(&error))?;
        map.insert(stub.id, kind, path)
            .map_err(|error| to_errno(&error))?;
        Ok(())
    }

    /// Sets owner, mode and times of a stub to those in the backing.
    fn set_attributes(&self, path: &[u8], attr: &Attr) -> Result<()> {
        let root = &self.root;
        let no_follow = AtFlags::SYMLINK_NOFOLLOW;
        let stub_path: &[u8] = if path.is_empty() { b"." } else { path };
        // Without the right to change owners, the stubs belong to this process's user.
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

    /// Returns the names in a directory of the backing, without `.` and `..`.
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

    /// If the host of an earlier tree lost its memory, the names of files with private paths are lost. Retains these
    /// files: renames their directory, so that they are not mixed with files of this tree.
    fn set_unnamed_aside(&self) -> Result<()> {
        let firn = self.find(b".firn")?.0;
        let Ok((stubs, _)) = self.find(PRIVATE) else {
            return Ok(());
        };
        if self.names_in(stubs.inode)?.is_empty() {
            return Ok(());
        }
        drop(stubs);
        let now = firn_backing::Time::now().sec;
        let new_name = OsString::from(format!("unnamed-{now}"));
        let flags = firn_backing::RenameFlags::NOREPLACE;
        let renamed = self.engine.namespace.rename(
            firn.inode,
            OsStr::new("stub"),
            firn.inode,
            &new_name,
            flags,
        );
        match renamed {
            Err(Errno::INVAL | Errno::NOSYS) => {
                let flags = firn_backing::RenameFlags::empty();
                self.engine.namespace.rename(
                    firn.inode,
                    OsStr::new("stub"),
                    firn.inode,
                    &new_name,
                    flags,
                )?;
            }
            renamed => renamed?,
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
