//! A directory of copies. Each copy appears, is replaced and disappears as a whole.
//!
//! ```text
//!   NAME            a complete copy
//!   .next-NAME      a copy that is being made: once complete it is renamed to NAME, or exchanged for the old copy
//!   .removed-NAME   a copy that is being removed
//! ```
//!
//! Promises
//! * At every moment NAME is a complete copy or is not there: one rename changes it.
//! * A copy loses its name before the first of its files is removed.
//! * Names are changed and removed by the descriptor of the directory, in which no other user may replace them. What
//!   another user put there is no copy and is not removed.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_trust::{ObjectId, names_in, remove_object};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, Stat, renameat_with, statat};
use rustix::io::Errno;

use crate::error::PullError;
use crate::pull::{is_on_firn, local, rename_new, sync_dir};

const NEXT: &str = ".next-";
const REMOVED: &str = ".removed-";

/// A directory of copies, by its descriptor.
pub(crate) struct CopyDirectory {
    dir: OwnedFd,
    /// For messages, and for a pull, which checks the directory of its target itself.
    path: PathBuf,
    uid: u32,
    /// Whether names are made durable. On a firn mount they are not: copies there are meant to be held.
    is_synced: bool,
}

impl CopyDirectory {
    /// Opens a directory, which others may share as long as they cannot replace names in it.
    pub(crate) fn open(path: &Path) -> Result<Self, PullError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty());
        let dir = dir.map_err(|errno| local(path)(errno.into()))?;
        firn_trust::check_shared_parent(&dir, path)?;
        let is_synced = !is_on_firn(path);
        Ok(Self {
            is_synced,
            ..Self::in_memory(dir, path.to_owned())
        })
    }

    /// In a directory that was looked at, and whose names last as long as the memory of this host.
    pub(crate) fn in_memory(dir: OwnedFd, path: PathBuf) -> Self {
        Self {
            dir,
            path,
            uid: rustix::process::geteuid().as_raw(),
            is_synced: false,
        }
    }

    /// Path of the directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Names of the whole copies.
    pub(crate) fn names(&self) -> Result<Vec<OsString>, PullError> {
        let mut names = self.all_names()?;
        names.retain(|name| is_name(name) && self.has(name));
        Ok(names)
    }

    fn all_names(&self) -> Result<Vec<OsString>, PullError> {
        names_in(&self.dir).map_err(|errno| local(&self.path)(errno.into()))
    }

    /// Whether there is a whole copy of this name.
    pub(crate) fn has(&self, name: &OsStr) -> bool {
        self.find_own(name).is_some()
    }

    /// What has this name, where it is the user's.
    fn find_own(&self, name: &OsStr) -> Option<Stat> {
        let found = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        (found.st_uid == self.uid).then_some(found)
    }

    /// Makes room for a copy in the making. Returns its path, at which nothing is.
    pub(crate) fn begin(&self, name: &OsStr) -> Result<PathBuf, PullError> {
        let is_taken = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if is_taken && !self.has(name) {
            return Err(PullError::Exists {
                path: self.path.join(name),
            });
        }
        self.abandon(name)?;
        Ok(self.path.join(next_name(name)))
    }

    /// Gives the copy that was begun, and is whole now, its name.
    pub(crate) fn finish(&self, name: &OsStr) -> Result<(), PullError> {
        let next = next_name(name);
        let is_exchanged = self.has(name);
        let renamed = if is_exchanged {
            renameat_with(&self.dir, &next, &self.dir, name, RenameFlags::EXCHANGE)
        } else {
            rename_new(&self.dir, &next, &self.dir, name)
        };
        renamed.map_err(self.failed(name))?;
        if self.is_synced {
            sync_dir(&self.dir).map_err(local(&self.path))?;
        }
        // What the name had before.
        self.abandon(name)
    }

    /// Removes what was begun.
    pub(crate) fn abandon(&self, name: &OsStr) -> Result<(), PullError> {
        self.remove_own(&next_name(name))
    }

    /// Removes a copy; there may be none.
    pub(crate) fn remove(&self, name: &OsStr) -> Result<(), PullError> {
        let removed = removed_name(name);
        self.remove_own(&removed)?;
        if self.has(name) {
            renameat_with(&self.dir, name, &self.dir, &removed, RenameFlags::empty())
                .map_err(self.failed(name))?;
        }
        self.remove_own(&removed)
    }

    /// Removes what interrupted copies and removals left. No copy may be under way. Returns what could not be removed.
    pub(crate) fn sweep(&self) -> Vec<PullError> {
        let names = match self.all_names() {
            Ok(names) => names,
            Err(error) => return vec![error],
        };
        let left = names.iter().filter(|name| is_left_over(name));
        left.filter_map(|name| self.remove_own(name).err())
            .collect()
    }

    fn remove_own(&self, name: &OsStr) -> Result<(), PullError> {
        let Some(found) = self.find_own(name) else {
            return Ok(());
        };
        remove_object(&self.dir, name, ObjectId::of(&found)).map_err(self.failed(name))
    }

    /// An error of the file system at this name.
    pub(crate) fn failed(&self, name: &OsStr) -> impl Fn(Errno) -> PullError {
        let path = self.path.join(name);
        move |errno| local(&path)(errno.into())
    }
}

impl AsFd for CopyDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// Whether a copy can have this name.
pub(crate) fn is_name(name: &OsStr) -> bool {
    !name.is_empty() && !name.as_bytes().starts_with(b".")
}

fn is_left_over(name: &OsStr) -> bool {
    [NEXT, REMOVED]
        .iter()
        .any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()))
}

/// Name of a copy in the making.
pub(crate) fn next_name(name: &OsStr) -> OsString {
    let mut next = OsString::from(NEXT);
    next.push(name);
    next
}

/// Name of a copy that is being removed.
pub(crate) fn removed_name(name: &OsStr) -> OsString {
    let mut removed = OsString::from(REMOVED);
    removed.push(name);
    removed
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::chown;

    use super::*;

    const COPY: &str = "step_1";

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    fn begin(directory: &CopyDirectory, bytes: &str) -> PathBuf {
        let next = directory.begin(COPY.as_ref()).unwrap();
        fs::create_dir(&next).unwrap();
        fs::write(next.join("rank0"), bytes).unwrap();
        next
    }

    #[test]
    fn a_copy_appears_is_exchanged_and_goes_as_a_whole() {
        let top = tempfile::tempdir().unwrap();
        let directory = CopyDirectory::open(top.path()).unwrap();
        let read = || fs::read_to_string(top.path().join("step_1/rank0")).unwrap();
        begin(&directory, "half");
        assert_eq!(names(top.path()), [".next-step_1"]);
        // Begun again: nothing of the first try is used.
        begin(&directory, "old");
        directory.finish(COPY.as_ref()).unwrap();
        assert_eq!(read(), "old");
        begin(&directory, "new");
        assert_eq!(read(), "old");
        directory.finish(COPY.as_ref()).unwrap();
        assert_eq!(read(), "new");
        assert_eq!(names(top.path()), [COPY]);
        assert_eq!(directory.names().unwrap(), [COPY]);
        directory.remove(COPY.as_ref()).unwrap();
        directory.remove(COPY.as_ref()).unwrap();
        assert!(names(top.path()).is_empty());
    }

    #[test]
    fn what_was_interrupted_is_swept_and_a_pull_that_goes_on_is_not() {
        let top = tempfile::tempdir().unwrap();
        let directory = CopyDirectory::open(top.path()).unwrap();
        for name in [".next-step_1", ".removed-step_2", "step_3"] {
            fs::create_dir_all(top.path().join(name).join("sub")).unwrap();
        }
        fs::create_dir(top.path().join(".firn-pull-.next-step_1")).unwrap();
        assert!(directory.sweep().is_empty());
        assert_eq!(names(top.path()), [".firn-pull-.next-step_1", "step_3"]);
        assert_eq!(directory.names().unwrap(), ["step_3"]);
    }

    /// Proves S-agent-34.
    #[test]
    fn what_another_user_put_there_is_no_copy_and_stays() {
        let top = tempfile::tempdir().unwrap();
        let directory = CopyDirectory::open(top.path()).unwrap();
        for name in [COPY, ".next-step_2", ".removed-step_3"] {
            fs::create_dir(top.path().join(name)).unwrap();
            if chown(top.path().join(name), Some(65_534), None).is_err() {
                eprintln!("skipped: only root can give files away");
                return;
            }
        }
        let before = names(top.path());
        assert!(directory.names().unwrap().is_empty());
        assert!(matches!(
            directory.begin(COPY.as_ref()),
            Err(PullError::Exists { .. })
        ));
        directory.remove(COPY.as_ref()).unwrap();
        assert!(directory.sweep().is_empty());
        assert_eq!(names(top.path()), before);
    }
}
