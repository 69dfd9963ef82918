//! The tree: how it begins and ends, and the helpers that all parts use.
//!
//! Terms
//! * *path*: relative to the root of the tree; the same path relative to the top of the backing.
//! * *filled*: stubs were made for everything in the backing, so programs may use the tree.
//! * *adopted*: a client has sent a descriptor of a stub, and has a handle of the engine for it.
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
use firn_trust::{Expected, Facts};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags, fstat, open, statat};

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
    pub(crate) has_private: AtomicBool,
    /// Directories as the last complete sweep saw them. `None`: no sweep has removed all names of removed stubs yet.
    pub(crate) swept: Mutex<Option<Vec<WalkedDir>>>,
    closed: AtomicBool,
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
    /// Begins with the tree at `options.root`. If the log says that the tree of an earlier firnd is there, continues
    /// with that tree. Otherwise the directory must be empty, and is filled with stubs for the contents of the backing.
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
        let id = StubId::from_fd(root.as_fd()).map_err(io_error)?;
        let head = LogHead {
            backing: options.backing.as_os_str().as_bytes().to_vec(),
            root: id,
        };
        let saved = SavedMap::read(&options.log)
            .map_err(io_error)?
            .filter(|saved| saved.is_filled);
        let is_root_empty = is_empty(&options.root).map_err(io_error)?;
        let saved = match saved {
            Some(saved) if saved.head == head => Some(saved),
            // An earlier firnd died while it filled this tree. No program has seen these stubs, so the tree is cleared
            // and filled again.
            _ if !is_root_empty && is_partly_filled(&options, &head).map_err(io_error)? => {
                clear(&options.root).map_err(io_error)?;
                None
            }
            _ if !is_root_empty => {
                return Err(TreeError::NotEmpty {
                    root: options.root.clone(),
                });
            }
            Some(saved)
                if saved.head.backing == head.backing && may_have_unsynced_names(&saved) =>
            {
                return Err(TreeError::Elsewhere {
                    root: options.root.clone(),
                    log: options.log.clone(),
                });
            }
            _ => None,
        };
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
            has_private: AtomicBool::new(false),
            swept: Mutex::default(),
            closed: AtomicBool::new(false),
        };
        if is_new {
            tree.fill().map_err(TreeError::Fill)?;
            tree.map.lock().log_filled().map_err(io_error)?;
        } else if let Some(last_change) = last_change {
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
        let parent = statat(&self.root, "..", AtFlags::empty());
        parent.is_ok_and(|parent| parent.st_dev != self.device)
            || rustix::fs::statx(
                &self.root,
                "",
                AtFlags::EMPTY_PATH,
                rustix::fs::StatxFlags::BASIC_STATS,
            )
            .is_ok_and(|stat| {
                stat.stx_attributes
                    .contains(rustix::fs::StatxAttributes::MOUNT_ROOT)
            })
    }

    /// Refuses to adopt descriptors from now on.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
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

    /// Looks up a path in the backing. The attributes are `None` for the root.
    pub(crate) fn find(&self, path: &[u8]) -> Result<(InodeRef<'_, B>, Option<Attr>)> {
        let mut inode = self.reference(ROOT);
        let mut attr = None;
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            let name = OsStr::from_bytes(name);
            let entry = self.engine.namespace.lookup(inode.inode, name)?;
            inode = self.reference(entry.inode);
            attr = Some(entry.attr);
        }
        Ok((inode, attr))
    }

    /// Looks up the directory of a path in the backing. Returns it with the last name of the path.
    pub(crate) fn parent<'p>(&self, path: &'p [u8]) -> Result<(InodeRef<'_, B>, &'p OsStr)> {
        let (dir, name) = split(path);
        Ok((self.find(dir)?.0, OsStr::from_bytes(name)))
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
        let mapped = map.get(id).ok_or(Errno::NOENT)?;
        if let Some(inode) = mapped.inode {
            return Ok(inode);
        }
        let path = mapped.paths.first().cloned().ok_or(Errno::NOENT)?;
        let inode = self.find(&path)?.0.keep();
        if let Some(mapped) = map.get_mut(id) {
            mapped.inode = Some(inode);
        }
        Ok(inode)
    }

    /// Releases the inode of a stub that was removed from the map, if one was removed.
    pub(crate) fn release_inode(&self, removed: Option<MappedStub>) {
        if let Some(inode) = removed.and_then(|mapped| mapped.inode) {
            self.engine.namespace.forget(inode, 1);
        }
    }

    /// Makes the directory of private paths in the backing, unless it is there.
    pub(crate) fn create_private_dir(&self) -> Result<()> {
        if self.has_private.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut dir = self.find(b"")?.0;
        for name in PRIVATE.split(|byte| *byte == b'/') {
            let name = OsStr::from_bytes(name);
            let result = self
                .engine
                .namespace
                .mkdir(&self.caller(), dir.inode, name, 0o700);
            let entry = match result {
                Err(Errno::EXIST) => self.engine.namespace.lookup(dir.inode, name)?,
                result => result?,
            };
            // Another user may have made the directory in the backing.
            let facts = Facts {
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
        self.has_private.store(true, Ordering::Release);
        Ok(())
    }

    /// Removes the directory of private paths from the backing if it is empty.
    fn remove_private_dir(&self) {
        let remove = |dir: &[u8]| {
            self.parent(dir)
                .and_then(|(parent, name)| self.engine.namespace.rmdir(parent.inode, name))
        };
        let _ = remove(PRIVATE).and_then(|()| remove(split(PRIVATE).0));
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
        StubId::from_path(self.root.as_fd(), &c_path).is_ok_and(|id_there| id_there == id)
    }

    pub(crate) fn root_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

/// Makes a stub from its attributes.
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

fn is_empty(dir: &std::path::Path) -> io::Result<bool> {
    Ok(std::fs::read_dir(dir)?.next().is_none())
}

/// Whether the log is of this tree, and an earlier firnd did not fill it completely.
fn is_partly_filled(options: &TreeOptions, head: &LogHead) -> io::Result<bool> {
    Ok(SavedMap::read(&options.log)?.is_some_and(|saved| !saved.is_filled && saved.head == *head))
}

/// Whether a log may have names that were never synced. Any log with private paths counts, because it cannot be found
/// out whether its tree still exists.
fn may_have_unsynced_names(saved: &SavedMap) -> bool {
    saved.has_unnamed()
}

/// Removes the stubs and the log of a tree whose firnd was killed. Needs neither engine nor backing. If the directory
/// `root` is not this tree, it remains as it is.
pub fn remove_left_tree(root: &std::path::Path, log: &std::path::Path) -> io::Result<()> {
    let saved_root = SavedMap::read(log)?.map(|saved| saved.head.root);
    let dir = open(
        root,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let root_id = dir
        .map_err(io::Error::from)
        .and_then(|dir| StubId::from_fd(dir.as_fd()));
    if saved_root.is_some_and(|saved| root_id.is_ok_and(|id| id == saved)) {
        clear(root)?;
    }
    std::fs::remove_file(log)
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
