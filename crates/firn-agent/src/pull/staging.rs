//! Where a copy is made until it is whole: `.firn-pull-NAME` beside the name that it will have.
//!
//! ```text
//!   .firn-pull-NAME/     mode 0700, looked at before anything in it is used
//!       lock             one pull at a time
//!       tree             becomes NAME by one rename
//! ```
//!
//! Promises
//! * NAME appears whole, and never in the place of something else.
//! * What an earlier pull left there is used again or removed; none of it is believed (its blocks are compared).

use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use firn_protocol::path::BytePath;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, RenameFlags, Timespec, Timestamps};
use rustix::io::Errno;

use crate::error::PullError;
use crate::message::{Entry, EntryKind};
use crate::pull::plan::Plan;

const LOCK: &str = "lock";
const TREE: &str = "tree";
/// Permission bits that a copy takes over: set-id bits mean another user there.
const MODE_BITS: u32 = 0o777;
const OWNER_ALL: u32 = 0o700;

/// See the head of this file.
pub(crate) struct Staging {
    target: PathBuf,
    parent: OwnedFd,
    path: PathBuf,
    /// Whether what is written is made durable: on a firn mount it is held, and that is what was asked for.
    is_synced: bool,
    _lock: File,
}

impl Staging {
    /// For a copy at `target`, which must not exist yet.
    pub(crate) fn open(target: &Path) -> Result<Self, PullError> {
        let target = std::path::absolute(target).map_err(local(target))?;
        let (Some(dir), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(PullError::Exists { path: target });
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(dir, flags, Mode::empty())
            .map_err(|errno| local(dir)(errno.into()))?;
        let mut staged = std::ffi::OsString::from(".firn-pull-");
        staged.push(name);
        let path = dir.join(&staged);
        if target.symlink_metadata().is_ok() {
            remove_empty(&path);
            return Err(PullError::Exists { path: target });
        }
        let own = firn_trust::create_private_dir(&parent, Path::new(&staged))
            .map_err(|error| error.at(&path))?;
        let lock = lock(&own, &path, &target)?;
        let is_synced = !is_on_firn(dir);
        Ok(Self {
            target,
            parent,
            path,
            is_synced,
            _lock: lock,
        })
    }

    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Where an entry is until the copy is whole.
    pub(crate) fn locate(&self, path: &BytePath) -> PathBuf {
        let tree = self.path.join(TREE);
        match path.is_empty() {
            true => tree,
            false => tree.join(path),
        }
    }

    /// Makes directories and links, and removes what the plan does not have.
    pub(crate) fn prepare(&self, plan: &Plan) -> Result<(), PullError> {
        self.remove_strays(plan, &BytePath::default())?;
        for entry in plan.entries() {
            let path = self.locate(&entry.path);
            let made = match &entry.kind {
                EntryKind::Directory => make_dir(&path),
                EntryKind::Link { target } => std::os::unix::fs::symlink(target, &path),
                EntryKind::File { .. } | EntryKind::Other => Ok(()),
            };
            match made {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(local(&path)(error));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn remove_strays(&self, plan: &Plan, below: &BytePath) -> Result<(), PullError> {
        let path = self.locate(below);
        let metadata = match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata.map_err(local(&path))?,
        };
        let kind = metadata.file_type();
        let stays = plan.find(below).is_some_and(|entry| match &entry.kind {
            EntryKind::Directory => kind.is_dir(),
            EntryKind::File { .. } => kind.is_file(),
            EntryKind::Link { target } => {
                std::fs::read_link(&path).is_ok_and(|found| found == target.as_path())
            }
            EntryKind::Other => false,
        });
        if !stays {
            return remove(&path, kind.is_dir()).map_err(local(&path));
        }
        if !kind.is_dir() {
            return Ok(());
        }
        // It was made closed to its owner where its original is.
        make_writable(&path).map_err(local(&path))?;
        for entry in std::fs::read_dir(&path).map_err(local(&path))? {
            let name = entry.map_err(local(&path))?.file_name();
            self.remove_strays(plan, &below.as_path().join(name).into())?;
        }
        Ok(())
    }

    /// Gives directories and links their times, makes all durable, and gives the copy its name.
    pub(crate) fn finish(&self, plan: &Plan) -> Result<(), PullError> {
        // What is in a directory before the directory itself.
        for entry in plan.entries().iter().rev() {
            self.finish_entry(entry)?;
        }
        let tree = self.path.join(TREE);
        rename_new(&tree, &self.target).map_err(|errno| match errno {
            Errno::EXIST | Errno::NOTEMPTY => PullError::Exists {
                path: self.target.clone(),
            },
            errno => local(&self.target)(errno.into()),
        })?;
        let top = &plan.entries()[0];
        if top.kind == EntryKind::Directory && top.mode & OWNER_ALL != OWNER_ALL {
            let dir = File::open(&self.target).map_err(local(&self.target))?;
            set_mode(&self.target, top.mode).map_err(local(&self.target))?;
            self.sync(&dir).map_err(local(&self.target))?;
        }
        self.sync(&self.parent).map_err(local(&self.target))
    }

    fn sync(&self, dir: &impl AsFd) -> io::Result<()> {
        match self.is_synced {
            true => sync_dir(dir),
            false => Ok(()),
        }
    }

    fn finish_entry(&self, entry: &Entry) -> Result<(), PullError> {
        let path = self.locate(&entry.path);
        let done = || -> io::Result<()> {
            match entry.kind {
                EntryKind::Directory => {
                    // The top is renamed yet: for that its owner must be able to write to it.
                    let needed = if entry.path.is_empty() { OWNER_ALL } else { 0 };
                    // Opened before its mode may forbid that, and synced after all that is said of it.
                    let dir = File::open(&path)?;
                    set_times(&path, entry)?;
                    set_mode(&path, entry.mode | needed)?;
                    self.sync(&dir)
                }
                EntryKind::Link { .. } => set_times(&path, entry),
                EntryKind::File { .. } | EntryKind::Other => Ok(()),
            }
        };
        done().map_err(local(&path))
    }
}

impl Drop for Staging {
    /// Where nothing has come there is nothing to go on with.
    fn drop(&mut self) {
        remove_empty(&self.path);
    }
}

/// An error of the target's file system.
pub(crate) fn local(path: &Path) -> impl Fn(io::Error) -> PullError {
    let path = path.to_owned();
    move |error| PullError::Local {
        path: path.clone(),
        error,
    }
}

/// Gives an open file the mode and the time of its original.
pub(crate) fn finish_file(file: &File, entry: &Entry) -> io::Result<()> {
    file.set_permissions(Permissions::from_mode(entry.mode & MODE_BITS))?;
    Ok(rustix::fs::futimens(file, &times(entry))?)
}

fn lock(dir: &OwnedFd, path: &Path, target: &Path) -> Result<File, PullError> {
    let name = Path::new(LOCK);
    let file = match firn_trust::create_private_file(dir, name, OFlags::RDWR) {
        Err(firn_trust::TrustError::Io { error, .. })
            if error.kind() == io::ErrorKind::AlreadyExists =>
        {
            firn_trust::open_private_file(dir, name, OFlags::RDWR)
        }
        made => made,
    };
    let file = file.map_err(|error| error.at(&path.join(LOCK)))?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file.into()),
        Err(Errno::WOULDBLOCK) => Err(PullError::Busy {
            path: target.into(),
        }),
        Err(errno) => Err(local(path)(errno.into())),
    }
}

/// Where there is nothing of that name. Of file systems that cannot promise it (NFS): a directory that is not empty
/// is not replaced either.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) if to.symlink_metadata().is_ok() => Err(Errno::EXIST),
        Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::rename(from, to),
        renamed => renamed,
    }
}

/// What a pull left that was killed after its rename.
fn remove_empty(staging: &Path) {
    if staging.join(TREE).symlink_metadata().is_err()
        && std::fs::read_dir(staging).is_ok_and(|entries| entries.count() <= 1)
    {
        let _ = std::fs::remove_file(staging.join(LOCK));
        let _ = std::fs::remove_dir(staging);
    }
}

/// Whether what is written there is held by a firnd.
fn is_on_firn(dir: &Path) -> bool {
    let Ok(dir) = dir.canonicalize() else {
        return false;
    };
    firn_client::find(&dir).is_ok_and(|place| dir.starts_with(&place.mount.mount_point))
}

fn make_dir(path: &Path) -> io::Result<()> {
    std::fs::create_dir(path)?;
    make_writable(path)
}

fn make_writable(path: &Path) -> io::Result<()> {
    std::fs::set_permissions(path, Permissions::from_mode(OWNER_ALL))
}

fn set_mode(path: &Path, mode: u32) -> io::Result<()> {
    std::fs::set_permissions(path, Permissions::from_mode(mode & MODE_BITS))
}

fn set_times(path: &Path, entry: &Entry) -> io::Result<()> {
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    Ok(rustix::fs::utimensat(CWD, path, &times(entry), flags)?)
}

fn times(entry: &Entry) -> Timestamps {
    let time = Timespec {
        tv_sec: entry.mtime_s,
        tv_nsec: i64::from(entry.mtime_ns.min(999_999_999)),
    };
    Timestamps {
        last_access: time,
        last_modification: time,
    }
}

fn sync_dir(dir: &impl AsFd) -> io::Result<()> {
    match rustix::fs::fsync(dir) {
        // Some file systems have nothing to sync there.
        Err(Errno::INVAL) => Ok(()),
        synced => Ok(synced?),
    }
}

fn remove(path: &Path, is_dir: bool) -> io::Result<()> {
    if is_dir {
        make_writable(path)?;
        return std::fs::remove_dir_all(path);
    }
    std::fs::remove_file(path)
}

/// Removes a file, or a tree whatever the modes of its directories are; nothing may be there.
pub fn remove_tree(path: &Path) -> Result<(), PullError> {
    let removed = match path.symlink_metadata() {
        Ok(found) if found.is_dir() => {
            make_all_writable(path).and_then(|()| std::fs::remove_dir_all(path))
        }
        Ok(_) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(local(path)(error)),
        _ => Ok(()),
    }
}

fn make_all_writable(dir: &Path) -> io::Result<()> {
    make_writable(dir)?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            make_all_writable(&entry.path())?;
        }
    }
    Ok(())
}
