//! The tree and what every part of it uses.

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
use crate::map::{Found, Head, Map};
use crate::open::Open;
use crate::path::{PRIVATE, Rel, split};

/// Why a tree cannot be begun.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// The directory or its log.
    #[error("cannot use the stub tree at {}: {source}", quoted_path(root))]
    Io {
        /// The prefix.
        root: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// There is something in it, and no log tells what.
    #[error(
        "{} is not empty, and not the tree of an earlier mount of this backing: give an empty directory",
        quoted_path(root)
    )]
    NotEmpty {
        /// The prefix.
        root: PathBuf,
    },
    /// The log tells of another tree that may hold names.
    #[error(
        "the names of this backing are in the stub tree at another place than {}: mount it there again, or remove {} to give up what was not drained",
        quoted_path(root),
        quoted_path(log)
    )]
    Elsewhere {
        /// The prefix that was asked for.
        root: PathBuf,
        /// The log.
        log: PathBuf,
    },
    /// What the backing holds could not be shown.
    #[error("cannot make stubs for what the backing holds: {0}")]
    Fill(Errno),
}

/// What a tree is made of.
#[derive(Clone, Debug)]
pub struct TreeOptions {
    /// The prefix: a directory on tmpfs.
    pub root: PathBuf,
    /// The log, beside the arena.
    pub log: PathBuf,
    /// The backing, for the log's head.
    pub backing: PathBuf,
    /// The backing places new files by their names, in lanes or in logs. The directories of such a file are then carried
    /// over when a program first writes to it.
    pub places_by_name: bool,
}

/// A directory of a walk.
#[derive(Debug)]
pub(crate) struct WalkedDir {
    pub path: Rel,
    pub id: StubId,
    /// When something was last put into it or taken from it.
    pub ctime: Time,
}

/// A stub tree over an engine.
pub struct Tree<B: Backing> {
    pub(crate) engine: Arc<Engine<B>>,
    pub(crate) root: OwnedFd,
    pub(crate) device: u64,
    pub(crate) head: Head,
    pub(crate) options: TreeOptions,
    pub(crate) map: Mutex<Map>,
    /// Descriptors that clients told of. Taken after `map`.
    pub(crate) opens: Mutex<HashMap<HandleId, Open>>,
    pub(crate) has_private: AtomicBool,
    /// The directories, where all that was gone by then was dropped.
    pub(crate) swept: Mutex<Option<Vec<WalkedDir>>>,
    closed: AtomicBool,
}

/// One reference to an inode of the engine.
pub(crate) struct Ref<'a, B: Backing> {
    engine: &'a Engine<B>,
    pub inode: InodeId,
}

impl<B: Backing> Ref<'_, B> {
    /// Keeps the reference beyond this value.
    pub(crate) fn keep(self) -> InodeId {
        let inode = self.inode;
        std::mem::forget(self);
        inode
    }
}

impl<B: Backing> Drop for Ref<'_, B> {
    fn drop(&mut self) {
        if self.inode != ROOT {
            self.engine.namespace.forget(self.inode, 1);
        }
    }
}

/// A stub as the kernel tells of it.
#[derive(Clone, Debug)]
pub(crate) struct Stub {
    pub path: Rel,
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
    /// Begins with the tree at a prefix: with that of an earlier firnd, where its log tells so, else with
    /// an empty directory, in which stubs are made for what the backing holds.
    pub fn begin(
        engine: Arc<Engine<B>>,
        options: TreeOptions,
    ) -> std::result::Result<Self, TreeError> {
        let failed = |source: io::Error| TreeError::Io {
            root: options.root.clone(),
            source,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = open(&options.root, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
        let stat = fstat(&root).map_err(|e| failed(e.into()))?;
        let id = StubId::of(root.as_fd()).map_err(failed)?;
        let head = Head {
            backing: options.backing.as_os_str().as_bytes().to_vec(),
            root: id,
        };
        let found = Found::read(&options.log)
            .map_err(failed)?
            .filter(|found| found.filled);
        let empty = is_empty(&options.root).map_err(failed)?;
        let found = match found {
            Some(found) if found.head == head => Some(found),
            // A half-made tree that no program has seen: its stubs are made anew.
            _ if !empty && half_made(&options, &head).map_err(failed)? => {
                clear(&options.root).map_err(failed)?;
                None
            }
            _ if !empty => {
                return Err(TreeError::NotEmpty {
                    root: options.root.clone(),
                });
            }
            Some(found) if found.head.backing == head.backing && stands_elsewhere(&found) => {
                return Err(TreeError::Elsewhere {
                    root: options.root.clone(),
                    log: options.log.clone(),
                });
            }
            _ => None,
        };
        // Only the user that mounted may use the data socket.
        rustix::fs::fchmod(&root, Mode::RWXU).map_err(|e| failed(e.into()))?;
        let last = found.as_ref().and_then(Found::last);
        let fresh = found.is_none();
        let map = Map::begin(&options.log, &head, found).map_err(failed)?;
        let tree = Self {
            engine,
            root,
            device: stat.st_dev,
            head,
            options: options.clone(),
            map: Mutex::new(map),
            opens: Mutex::default(),
            has_private: AtomicBool::new(false),
            swept: Mutex::default(),
            closed: AtomicBool::new(false),
        };
        if fresh {
            tree.fill().map_err(TreeError::Fill)?;
            tree.map.lock().filled().map_err(failed)?;
        } else if let Some(last) = last {
            tree.mend(last).map_err(failed)?;
        }
        Ok(tree)
    }

    /// The prefix.
    pub fn root(&self) -> &std::path::Path {
        &self.options.root
    }

    /// `st_dev` of the stubs, and which one the root is.
    pub fn identity(&self) -> (u64, StubId) {
        (self.device, self.head.root)
    }

    /// Whether the root of the tree is the root of its file system: then every file there is a stub.
    pub fn is_whole_device(&self) -> bool {
        let above = statat(&self.root, "..", AtFlags::empty());
        above.is_ok_and(|above| above.st_dev != self.device)
            || rustix::fs::statx(
                &self.root,
                "",
                AtFlags::EMPTY_PATH,
                rustix::fs::StatxFlags::BASIC_STATS,
            )
            .is_ok_and(|found| {
                found
                    .stx_attributes
                    .contains(rustix::fs::StatxAttributes::MOUNT_ROOT)
            })
    }

    /// Nothing is opened or synced any more.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Removes the stubs and the log. To be called when all is drained and synced.
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

    /// The inode of a path in the backing.
    pub(crate) fn find(&self, path: &[u8]) -> Result<(Ref<'_, B>, Option<Attr>)> {
        let mut at = (
            Ref {
                engine: &*self.engine,
                inode: ROOT,
            },
            None,
        );
        for name in path
            .split(|byte| *byte == b'/')
            .filter(|name| !name.is_empty())
        {
            let entry = self
                .engine
                .namespace
                .lookup(at.0.inode, OsStr::from_bytes(name))?;
            at = (
                Ref {
                    engine: &*self.engine,
                    inode: entry.inode,
                },
                Some(entry.attr),
            );
        }
        Ok(at)
    }

    /// The directory that a path lies in, and its name there.
    pub(crate) fn parent<'p>(&self, path: &'p [u8]) -> Result<(Ref<'_, B>, &'p OsStr)> {
        let (dir, name) = split(path);
        Ok((self.find(dir)?.0, OsStr::from_bytes(name)))
    }

    pub(crate) fn reference(&self, inode: InodeId) -> Ref<'_, B> {
        Ref {
            engine: &*self.engine,
            inode,
        }
    }

    /// The engine's inode of a stub that is known, with a reference that its item keeps.
    pub(crate) fn inode_of(&self, map: &mut Map, id: StubId) -> Result<InodeId> {
        let item = map.item(id).ok_or(Errno::NOENT)?;
        if let Some(inode) = item.inode {
            return Ok(inode);
        }
        let path = item.paths.first().cloned().ok_or(Errno::NOENT)?;
        let inode = self.find(&path)?.0.keep();
        if let Some(item) = map.item_mut(id) {
            item.inode = Some(inode);
        }
        Ok(inode)
    }

    /// Gives back what an item that is gone held.
    pub(crate) fn let_go(&self, gone: Option<(StubId, crate::map::Item)>) {
        if let Some(inode) = gone.and_then(|(_, item)| item.inode) {
            self.engine.namespace.forget(inode, 1);
        }
    }

    pub(crate) fn make_private_dir(&self) -> Result<()> {
        if self.has_private.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut dir = self.find(b"")?.0;
        for name in PRIVATE.split(|byte| *byte == b'/') {
            let name = OsStr::from_bytes(name);
            let made = self
                .engine
                .namespace
                .mkdir(&self.caller(), dir.inode, name, 0o700);
            let entry = match made {
                Err(Errno::EXIST) => self.engine.namespace.lookup(dir.inode, name)?,
                made => made?,
            };
            // Another program may have made it beside the mount.
            let facts = Facts {
                mode: entry.attr.mode,
                uid: entry.attr.uid,
                nlink: u64::from(entry.attr.nlink),
            };
            if let Err(why) = facts.check(Expected::Directory, self.caller().uid) {
                tracing::error!(
                    "{name:?} in the backing {why}; Firn reads nothing from it: move it away"
                );
                return Err(Errno::PERM);
            }
            dir = self.reference(entry.inode);
        }
        self.has_private.store(true, Ordering::Release);
        Ok(())
    }

    /// Where nothing waits for a name any more, nothing in the backing tells of a tree.
    fn remove_private_dir(&self) {
        let remove = |dir: &[u8]| {
            self.parent(dir)
                .and_then(|(parent, name)| self.engine.namespace.rmdir(parent.inode, name))
        };
        let _ = remove(PRIVATE).and_then(|()| remove(split(PRIVATE).0));
    }

    // ---- the stubs ---------------------------------------------------------------------------

    /// The stub at a path, as it is now.
    pub(crate) fn stub(&self, path: &[u8]) -> io::Result<Stub> {
        let c_path = CString::new(path).map_err(|_| io::ErrorKind::InvalidInput)?;
        let empty = if path.is_empty() {
            AtFlags::EMPTY_PATH
        } else {
            AtFlags::SYMLINK_NOFOLLOW
        };
        let stat = statat(&self.root, c_path.as_c_str(), empty)?;
        let id = StubId::at(self.root.as_fd(), &c_path)?;
        if stat.st_dev != self.device || stat.st_ino != id.inode {
            return Err(io::ErrorKind::NotFound.into());
        }
        stub_of(path.to_vec(), id, &stat)
    }

    /// Whether a stub stands at a path now.
    pub(crate) fn stands(&self, path: &[u8], id: StubId) -> bool {
        let Ok(c_path) = CString::new(path) else {
            return false;
        };
        StubId::at(self.root.as_fd(), &c_path).is_ok_and(|found| found == id)
    }

    pub(crate) fn root_fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }
}

pub(crate) fn stub_of(path: Rel, id: StubId, stat: &rustix::fs::Stat) -> io::Result<Stub> {
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

/// Errnos of system calls of our own.
pub(crate) fn errno(error: &io::Error) -> Errno {
    error
        .raw_os_error()
        .map_or(Errno::IO, Errno::from_raw_os_error)
}

fn is_empty(dir: &std::path::Path) -> io::Result<bool> {
    Ok(std::fs::read_dir(dir)?.next().is_none())
}

fn half_made(options: &TreeOptions, head: &Head) -> io::Result<bool> {
    Ok(Found::read(&options.log)?.is_some_and(|found| !found.filled && found.head == *head))
}

/// Whether the tree of a log may still be there. Its root is found among the mounts and the places that outlive
/// processes only by the prefix it names, so any log that tells of names counts.
fn stands_elsewhere(found: &Found) -> bool {
    found.has_unnamed()
}

/// Removes the stubs and the log of a tree whose firnd was killed, without its engine and its backing. A directory at
/// `root` that is not this tree is left as it is.
pub fn remove_left_tree(root: &std::path::Path, log: &std::path::Path) -> io::Result<()> {
    let known = Found::read(log)?.map(|found| found.head.root);
    let dir = open(
        root,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let stands = dir
        .map_err(io::Error::from)
        .and_then(|dir| StubId::of(dir.as_fd()));
    if known.is_some_and(|known| stands.is_ok_and(|id| id == known)) {
        clear(root)?;
    }
    std::fs::remove_file(log)
}

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
