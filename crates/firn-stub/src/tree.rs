//! The stub tree: a mount point without FUSE. This file begins and ends it, and has the helpers that all parts use.
//!
//! Terms
//! * *stub*: an object on tmpfs that stands for one of the backing. Stubs of files are empty.
//! * *backing*: the directory that the mount serves. *Engine*: the part of firnd that stores files' bytes.
//! * *path*: relative to the root of the tree; the same path relative to the top of the backing.
//! * *log*: the record of which stub is at which path. It survives firnd, the process that serves the mount.
//! * *filled*: stubs were made for everything in the backing, so programs may use the tree.
//! * *adopted*: a client (a program with the preload library) has sent a descriptor of a stub, and has a handle of the
//!   engine for it.
//!
//! Lock order: `map`, then `adopted_stubs`.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_backing::{Attr, Backing, Caller, Errno, Kind, Time};
use firn_engine::{Engine, HandleId, InodeId, ROOT, Result};
use firn_format::quote::quoted_path;
use firn_trust::{Expected, FileMetadata};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, fstat, open, statat, statx};

use crate::StubId;
use crate::map::{LogHead, Map, MappedStub, SavedMap};
use crate::open::AdoptedStub;
use crate::path::{PRIVATE, RelPath, split};

/// Reasons why a tree cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// A system call on the directory or the log failed.
    #[error("cannot use the stub tree at {}: {source}", quoted_path(root))]
    Io {
        /// Root of the tree.
        root: PathBuf,
        /// Error of the call.
        source: io::Error,
    },
    /// The directory is not empty, and no log describes its contents.
    #[error(
        "{} is neither empty nor the stub tree of an earlier mount of this backing: choose an empty directory",
        quoted_path(root)
    )]
    NotEmpty {
        /// Root of the tree.
        root: PathBuf,
    },
    /// The log describes a tree at another place, which may have names that are not synced.
    #[error(
        "the names of this backing are in a stub tree at another place than {}: mount there again, or remove {} to abandon the files that are not drained",
        quoted_path(root),
        quoted_path(log)
    )]
    Elsewhere {
        /// Root of the tree that was asked for.
        root: PathBuf,
        /// Path of the log.
        log: PathBuf,
    },
    /// Stubs for the contents of the backing could not be made.
    #[error("cannot make stubs for the contents of the backing: {0}")]
    Fill(Errno),
}

/// Options of a tree.
#[derive(Clone, Debug)]
pub struct TreeOptions {
    /// Root of the tree: a directory on tmpfs.
    pub root: PathBuf,
    /// Path of the log, beside the arena.
    pub log: PathBuf,
    /// Path of the backing, for the head of the log.
    pub backing: PathBuf,
    /// Whether the backing places new files by their names, in lanes or logs. If so, the directories above such a file
    /// are synced when the stub is first adopted.
    pub places_by_name: bool,
}

/// A directory as a walk saw it.
#[derive(Debug)]
pub(crate) struct WalkedDir {
    pub path: RelPath,
    pub id: StubId,
    /// Change time: when its names were last changed.
    pub ctime: Time,
}

/// A stub tree over an engine.
pub struct Tree<B: Backing> {
    pub(crate) engine: Arc<Engine<B>>,
    pub(crate) root: OwnedFd,
    pub(crate) device: u64,
    pub(crate) head: LogHead,
    pub(crate) options: TreeOptions,
    pub(crate) map: Mutex<Map>,
    /// Adopted descriptors. Locked after `map`.
    pub(crate) adopted_stubs: Mutex<HashMap<HandleId, AdoptedStub>>,
    /// Whether the directory of private paths was created and checked.
    pub(crate) has_private_dir: AtomicBool,
    /// Directories as the last complete sweep saw them. `None`: no sweep has removed all names of removed stubs yet.
    pub(crate) dirs_of_last_sweep: Mutex<Option<Vec<WalkedDir>>>,
    is_closed: AtomicBool,
}

/// An object of the backing.
pub(crate) struct FoundObject<'a, B: Backing> {
    pub inode: InodeRef<'a, B>,
    /// `None` for the root.
    pub attr: Option<Attr>,
}

/// The directory of a path in the backing, and the last name of the path.
pub(crate) struct ParentDir<'a, 'p, B: Backing> {
    pub dir: InodeRef<'a, B>,
    pub name: &'p OsStr,
}

/// A reference to an inode of the engine, which is released on drop.
pub(crate) struct InodeRef<'a, B: Backing> {
    engine: &'a Engine<B>,
    pub inode: InodeId,
}

impl<B: Backing> InodeRef<'_, B> {
    /// Keeps the reference: the caller must release it.
    pub(crate) fn keep(self) -> InodeId {
        let inode = self.inode;
        std::mem::forget(self);
        inode
    }
}

impl<B: Backing> Drop for InodeRef<'_, B> {
    fn drop(&mut self) {
        if self.inode != ROOT {
            self.engine.namespace.forget(self.inode, 1);
        }
    }
}

/// A stub: its path, its identity, and its attributes from the kernel.
#[derive(Clone, Debug)]
pub(crate) struct Stub {
    pub path: RelPath,
    pub id: StubId,
    pub kind: Kind,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    pub nlink: u64,
    pub size: u64,
    pub mtime: Time,
    pub ctime: Time,
}

impl<B: Backing> Tree<B> {
    /// Begins with the stub tree at `options.root`, a directory on tmpfs that becomes the mount point.
    ///
    /// If the log says that the tree of an earlier firnd (the process that serves the mount) is there, continues with
    /// that tree. Otherwise the directory must be empty, and gets a stub for each object of the backing, the directory
    /// that the mount serves.
    pub fn begin(
        engine: Arc<Engine<B>>,
        options: TreeOptions,
    ) -> std::result::Result<Self, TreeError> {
        let io_error = |source: io::Error| TreeError::Io {
            root: options.root.clone(),
            source,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            open(&options.root, flags, Mode::empty()).map_err(|error| io_error(error.into()))?;
        let stat = fstat(&root).map_err(|error| io_error(error.into()))?;
        let head = LogHead {
            backing: options.backing.as_os_str().as_bytes().to_vec(),
            root: StubId::from_fd(root.as_fd()).map_err(io_error)?,
        };
        let saved = prepare_root(&options, &head)?;
        // Only the mounting user may use the data socket, so the tree is closed to other users.
        rustix::fs::fchmod(&root, Mode::RWXU).map_err(|error| io_error(error.into()))?;
        let last_change = saved.as_ref().and_then(SavedMap::last_change);
        let is_new = saved.is_none();
        let map = Map::begin(&options.log, &head, saved).map_err(io_error)?;
        let tree = Self {
            engine,
            root,
            device: stat.st_dev,
            head,
            options: options.clone(),
            map: Mutex::new(map),
            adopted_stubs: Mutex::default(),
            has_private_dir: AtomicBool::new(false),
            dirs_of_last_sweep: Mutex::default(),
            is_closed: AtomicBool::new(false),
        };
        if is_new {
            tree.fill().map_err(TreeError::Fill)?;
            tree.map.lock().log_filled().map_err(io_error)?;
        } else if let Some(last_change) = last_change {
            // The earlier firnd may have died between logging its last change and making it in the backing.
            tree.revert_unmade_change(last_change).map_err(io_error)?;
        }
        Ok(tree)
    }

    /// Returns the root of the tree.
    pub fn root(&self) -> &std::path::Path {
        &self.options.root
    }

    /// Returns `st_dev` of the stubs, and the identity of the root.
    pub fn identity(&self) -> (u64, StubId) {
        (self.device, self.head.root)
    }

    /// Whether the root of the tree is the root of its file system, so that every file on it is a stub.
    pub fn is_whole_device(&self) -> bool {
        if let Ok(parent) = statat(&self.root, "..", AtFlags::empty())
            && parent.st_dev != self.device
        {
            return true;
        }
        // If the mount is below a directory of the same device, only statx(2) shows it.
        let requested = StatxFlags::BASIC_STATS;
        match statx(&self.root, "", AtFlags::EMPTY_PATH, requested) {
            Ok(stat) => stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
            Err(_) => false,
        }
    }

    /// Refuses to adopt descriptors from now on.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Removes the stubs and the log. Called when all data is drained and all names are synced.
    pub fn remove(&self) -> io::Result<()> {
        self.close();
        self.remove_private_dir();
        clear(&self.options.root)?;
        std::fs::remove_file(&self.options.log)
    }

    // ---- the engine --------------------------------------------------------------------------

    pub(crate) fn caller(&self) -> Caller {
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        Caller { uid, gid, pid: 0 }
    }

    /// Looks up a path in the backing.
    pub(crate) fn find(&self, path: &[u8]) -> Result<FoundObject<'_, B>> {
        let mut inode = self.reference(ROOT);
        let mut attr = None;
        for name in path.split(|byte| *byte == b'/') {
            // The path of the root has one empty name.
            if name.is_empty() {
                continue;
            }
            let name = OsStr::from_bytes(name);
            let entry = self.engine.namespace.lookup(inode.inode, name)?;
            inode = self.reference(entry.inode);
            attr = Some(entry.attr);
        }
        Ok(FoundObject { inode, attr })
    }

    /// Looks up the directory of a path in the backing.
    pub(crate) fn find_parent<'p>(&self, path: &'p [u8]) -> Result<ParentDir<'_, 'p, B>> {
        let (dir_path, name) = split(path);
        Ok(ParentDir {
            dir: self.find(dir_path)?.inode,
            name: OsStr::from_bytes(name),
        })
    }

    /// Takes over a reference that the engine has counted for `inode`.
    pub(crate) fn reference(&self, inode: InodeId) -> InodeRef<'_, B> {
        InodeRef {
            engine: &*self.engine,
            inode,
        }
    }

    /// Returns the inode of a stub that is in the map. The map holds the reference to it.
    pub(crate) fn inode_of(&self, map: &mut Map, id: StubId) -> Result<InodeId> {
        let mapped = map.get_mut(id).ok_or(Errno::NOENT)?;
        if let Some(inode) = mapped.inode {
            return Ok(inode);
        }
        let path = mapped.paths.first().ok_or(Errno::NOENT)?;
        let inode = self.find(path)?.inode.keep();
        mapped.inode = Some(inode);
        Ok(inode)
    }

    /// Releases the inode of a stub that was removed from the map, if one was removed.
    pub(crate) fn release_inode(&self, removed: Option<MappedStub>) {
        if let Some(inode) = removed.and_then(|mapped| mapped.inode) {
            self.engine.namespace.forget(inode, 1);
        }
    }

    /// Makes the directory `.firn/stub` in the backing (the directory that the mount serves), unless it is there. Files
    /// have a private path in it as long as the name of their stub is not synced.
    ///
    /// Fails with EPERM if the directory, or the one above it, belongs to another user or is open to others.
    pub(crate) fn create_private_dir(&self) -> Result<()> {
        if self.has_private_dir.load(Ordering::Acquire) {
            return Ok(());
        }
        let namespace = &self.engine.namespace;
        let mut dir = self.find(b"")?.inode;
        for name in PRIVATE.split(|byte| *byte == b'/') {
            let name = OsStr::from_bytes(name);
            let entry = match namespace.mkdir(&self.caller(), dir.inode, name, 0o700) {
                Ok(entry) => entry,
                Err(Errno::EXIST) => namespace.lookup(dir.inode, name)?,
                Err(error) => return Err(error),
            };
            // Another user may have made the directory in the backing.
            let facts = FileMetadata {
                mode: entry.attr.mode,
                uid: entry.attr.uid,
                nlink: u64::from(entry.attr.nlink),
            };
            if let Err(fault) = facts.check(Expected::Directory, self.caller().uid) {
                tracing::error!(
                    "{name:?} in the backing {fault}; Firn reads nothing from it: move it away"
                );
                return Err(Errno::PERM);
            }
            dir = self.reference(entry.inode);
        }
        self.has_private_dir.store(true, Ordering::Release);
        Ok(())
    }

    /// Removes the directory of private paths from the backing if it is empty, and then the directory above it.
    fn remove_private_dir(&self) {
        let remove_dir = |path: &[u8]| {
            let ParentDir { dir, name } = self.find_parent(path)?;
            self.engine.namespace.rmdir(dir.inode, name)
        };
        let (dir_above, _) = split(PRIVATE);
        // An error is ignored: a directory with files in it remains.
        let _ = remove_dir(PRIVATE).and_then(|()| remove_dir(dir_above));
    }

    // ---- the stubs ---------------------------------------------------------------------------

    /// Returns the stub at a path now. Fails if there is none, or if the object there belongs to another file system.
    pub(crate) fn stub(&self, path: &[u8]) -> io::Result<Stub> {
        let c_path = CString::new(path).map_err(|_| io::ErrorKind::InvalidInput)?;
        let flags = if path.is_empty() {
            AtFlags::EMPTY_PATH
        } else {
            AtFlags::SYMLINK_NOFOLLOW
        };
        let stat = statat(&self.root, c_path.as_c_str(), flags)?;
        let id = StubId::from_path(self.root.as_fd(), &c_path)?;
        if stat.st_dev != self.device || stat.st_ino != id.inode {
            return Err(io::ErrorKind::NotFound.into());
        }
        stub_from_stat(path.to_vec(), id, &stat)
    }

    /// Whether the stub is at this path now.
    pub(crate) fn is_at(&self, path: &[u8], id: StubId) -> bool {
        let Ok(c_path) = CString::new(path) else {
            return false;
        };
        match StubId::from_path(self.root.as_fd(), &c_path) {
            Ok(id_at_path) => id_at_path == id,
            Err(_) => false,
        }
    }

    pub(crate) fn root_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

/// Makes the description of a stub (an object of the tree on tmpfs) from its attributes. Fails if the kernel returned a
/// kind of object that Firn does not know.
pub(crate) fn stub_from_stat(
    path: RelPath,
    id: StubId,
    stat: &rustix::fs::Stat,
) -> io::Result<Stub> {
    let kind = Kind::from_mode(stat.st_mode).ok_or(io::ErrorKind::Unsupported)?;
    let time = |sec: i64, nsec: u64| Time {
        sec,
        nsec: nsec as u32,
    };
    Ok(Stub {
        path,
        id,
        kind,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: stat.st_rdev,
        nlink: stat.st_nlink,
        size: stat.st_size as u64,
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        ctime: time(stat.st_ctime, stat.st_ctime_nsec),
    })
}

/// Returns the errno of an error of a system call.
pub(crate) fn to_errno(error: &io::Error) -> Errno {
    error
        .raw_os_error()
        .map_or(Errno::IO, Errno::from_raw_os_error)
}

/// Prepares the root directory of a stub tree. If the tree of an earlier firnd (the process that serves the mount) is
/// there, returns its map, which says which stub is at which path. Otherwise returns `None`, and the root is empty.
///
/// Fails if the root has other contents. Also fails if the log describes a tree elsewhere that may have names which
/// were never synced to the backing, the directory that the mount serves: a new log would lose them.
fn prepare_root(
    options: &TreeOptions,
    head: &LogHead,
) -> std::result::Result<Option<SavedMap>, TreeError> {
    let root = &options.root;
    let io_error = |source: io::Error| TreeError::Io {
        root: root.clone(),
        source,
    };
    let saved = SavedMap::read(&options.log).map_err(io_error)?;
    let is_root_empty = is_empty(root).map_err(io_error)?;
    if let Some(saved) = saved {
        let is_this_tree = saved.head == *head;
        if is_this_tree && saved.is_filled {
            // An earlier firnd has completed this tree.
            return Ok(Some(saved));
        }
        if is_this_tree && !is_root_empty {
            // An earlier firnd died while it filled this tree. No program has seen these stubs, so the tree is cleared
            // and filled again.
            clear(root).map_err(io_error)?;
            return Ok(None);
        }
        // If the log is filled here, it is that of another tree. It cannot be found out whether that tree still exists,
        // so any private path in the log counts.
        let may_have_unsynced_names =
            saved.is_filled && saved.head.backing == head.backing && saved.has_unnamed();
        if is_root_empty && may_have_unsynced_names {
            return Err(TreeError::Elsewhere {
                root: root.clone(),
                log: options.log.clone(),
            });
        }
    }
    if !is_root_empty {
        return Err(TreeError::NotEmpty { root: root.clone() });
    }
    Ok(None)
}

fn is_empty(dir: &std::path::Path) -> io::Result<bool> {
    Ok(std::fs::read_dir(dir)?.next().is_none())
}

/// Removes the stubs and the log of a tree whose firnd was killed. Needs neither engine nor backing. If the directory
/// `root` is not this tree, it remains as it is.
pub fn remove_left_tree(root: &std::path::Path, log: &std::path::Path) -> io::Result<()> {
    let saved = SavedMap::read(log)?;
    let present_root = root_id(root);
    if let (Some(saved), Ok(present_root)) = (saved, present_root)
        && saved.head.root == present_root
    {
        clear(root)?;
    }
    std::fs::remove_file(log)
}

fn root_id(root: &std::path::Path) -> io::Result<StubId> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let dir = open(root, flags, Mode::empty())?;
    StubId::from_fd(dir.as_fd())
}

/// Removes everything in a directory.
fn clear(dir: &std::path::Path) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
        } else {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
