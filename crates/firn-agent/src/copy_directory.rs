//! A directory with copies of another host's files. Each copy, a file or a directory tree, appears, is replaced and
//! disappears as a whole.
//!
//! ```text
//!   NAME            a complete copy
//!   .next-NAME      a copy that is being made; when complete it is renamed to NAME, or exchanged for the old NAME
//!   .removed-NAME   a copy that is being removed
//! ```
//!
//! Promises
//! * At any time NAME is a complete copy or does not exist, because one rename changes it.
//! * Before the first file of a copy is removed, the copy loses its name.
//! * Names are changed and removed through the descriptor of the directory, in which no other user may replace names. A
//!   file or directory of another user does not count as a copy, and is not removed.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use firn_trust::{ObjectId, list_names, remove_object};
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, Stat, renameat_with, statat};
use rustix::io::Errno;

use crate::error::PullError;
use crate::pull::{is_on_firn_mount, local_error, rename_to_new_name, sync_dir};

const UNFINISHED_PREFIX: &str = ".next-";
const REMOVED_PREFIX: &str = ".removed-";

/// An open directory of copies.
pub(crate) struct CopyDirectory {
    dir: OwnedFd,
    /// Path for messages, and for the target of a pull (the copying of a tree), which checks the directory itself.
    path: PathBuf,
    /// User that owns the copies.
    uid: u32,
    /// Whether names are made durable. On a firn mount they are not, because a user stores copies there to have them in
    /// memory.
    is_synced: bool,
}

impl CopyDirectory {
    /// Opens a directory. Fails if another user may replace names in it.
    pub(crate) fn open(path: &Path) -> Result<Self, PullError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| local_error(path)(errno.into()))?;
        firn_trust::check_shared_parent(&dir, path)?;
        let is_synced = !is_on_firn_mount(path);
        Ok(Self {
            is_synced,
            ..Self::from_checked_memory_dir(dir, path.to_owned())
        })
    }

    /// Uses a directory that is already checked. It is in memory, so its names are not made durable.
    pub(crate) fn from_checked_memory_dir(dir: OwnedFd, path: PathBuf) -> Self {
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

    /// Returns the names of the complete copies.
    pub(crate) fn copy_names(&self) -> Result<Vec<OsString>, PullError> {
        let mut names = self.all_names()?;
        names.retain(|name| is_copy_name(name) && self.has_copy(name));
        Ok(names)
    }

    fn all_names(&self) -> Result<Vec<OsString>, PullError> {
        list_names(&self.dir).map_err(|errno| local_error(&self.path)(errno.into()))
    }

    /// Whether there is a complete copy of this name.
    pub(crate) fn has_copy(&self, name: &OsStr) -> bool {
        self.status_of_own(name).is_some()
    }

    /// Returns the status of a name if it exists and belongs to this user.
    fn status_of_own(&self, name: &OsStr) -> Option<Stat> {
        let status = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
        if status.st_uid == self.uid {
            Some(status)
        } else {
            None
        }
    }

    /// Begins a copy: removes an earlier unfinished copy, and returns the path at which the new one is to be made.
    /// Fails if the name of the copy belongs to another user.
    pub(crate) fn begin_copy(&self, name: &OsStr) -> Result<PathBuf, PullError> {
        let exists = statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok();
        if exists && !self.has_copy(name) {
            return Err(PullError::Exists {
                path: self.path.join(name),
            });
        }
        self.abort_copy(name)?;
        Ok(self.path.join(unfinished_name(name)))
    }

    /// Renames a complete copy to its name, and removes the copy that had the name before.
    pub(crate) fn commit_copy(&self, name: &OsStr) -> Result<(), PullError> {
        let new_copy = unfinished_name(name);
        let renamed = if self.has_copy(name) {
            renameat_with(&self.dir, &new_copy, &self.dir, name, RenameFlags::EXCHANGE)
        } else {
            rename_to_new_name(&self.dir, &new_copy, &self.dir, name)
        };
        renamed.map_err(self.error_at(name))?;
        if self.is_synced {
            sync_dir(&self.dir).map_err(local_error(&self.path))?;
        }
        // After an exchange, the old copy has the name of an unfinished one, and is removed like one.
        self.abort_copy(name)
    }

    /// Removes the unfinished copy of this name, if there is one.
    pub(crate) fn abort_copy(&self, name: &OsStr) -> Result<(), PullError> {
        self.remove_own(&unfinished_name(name))
    }

    /// Removes the complete copy of this name, if there is one.
    pub(crate) fn remove_copy(&self, name: &OsStr) -> Result<(), PullError> {
        let name_for_removal = removed_name(name);
        // An interrupted removal may have left this name.
        self.remove_own(&name_for_removal)?;
        if self.has_copy(name) {
            let flags = RenameFlags::empty();
            renameat_with(&self.dir, name, &self.dir, &name_for_removal, flags)
                .map_err(self.error_at(name))?;
        }
        self.remove_own(&name_for_removal)
    }

    /// Removes the remains of interrupted copies and removals. No copy may be under way. Returns one error for each
    /// name that could not be removed.
    pub(crate) fn remove_leftovers(&self) -> Vec<PullError> {
        let names = match self.all_names() {
            Ok(names) => names,
            Err(error) => return vec![error],
        };
        let mut errors = Vec::new();
        for name in names.iter().filter(|name| is_leftover(name)) {
            if let Err(error) = self.remove_own(name) {
                errors.push(error);
            }
        }
        errors
    }

    /// Removes a name and everything below it, if it belongs to this user.
    fn remove_own(&self, name: &OsStr) -> Result<(), PullError> {
        let Some(status) = self.status_of_own(name) else {
            return Ok(());
        };
        remove_object(&self.dir, name, ObjectId::from_stat(&status)).map_err(self.error_at(name))
    }

    /// Returns a function that makes the error of a system call on a name.
    pub(crate) fn error_at(&self, name: &OsStr) -> impl Fn(Errno) -> PullError {
        let path = self.path.join(name);
        move |errno| local_error(&path)(errno.into())
    }
}

impl AsFd for CopyDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// Whether a copy may have this name: names that begin with a dot are reserved.
pub(crate) fn is_copy_name(name: &OsStr) -> bool {
    !name.is_empty() && !name.as_bytes().starts_with(b".")
}

/// Whether a name is that of an unfinished copy or of a copy that is being removed.
fn is_leftover(name: &OsStr) -> bool {
    [UNFINISHED_PREFIX, REMOVED_PREFIX]
        .iter()
        .any(|prefix| name.as_bytes().starts_with(prefix.as_bytes()))
}

/// Returns the name under which the copy `name` is made.
pub(crate) fn unfinished_name(name: &OsStr) -> OsString {
    let mut unfinished = OsString::from(UNFINISHED_PREFIX);
    unfinished.push(name);
    unfinished
}

/// Returns the name that the copy `name` gets before it is removed.
pub(crate) fn removed_name(name: &OsStr) -> OsString {
    let mut removed = OsString::from(REMOVED_PREFIX);
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
        let unfinished = directory.begin_copy(COPY.as_ref()).unwrap();
        fs::create_dir(&unfinished).unwrap();
        fs::write(unfinished.join("rank0"), bytes).unwrap();
        unfinished
    }

    #[test]
    fn a_copy_appears_is_replaced_and_disappears_as_a_whole() {
        let top = tempfile::tempdir().unwrap();
        let directory = CopyDirectory::open(top.path()).unwrap();
        let read = || fs::read_to_string(top.path().join("step_1/rank0")).unwrap();
        begin(&directory, "half");
        assert_eq!(names(top.path()), [".next-step_1"]);
        // The second begin removes the first try.
        begin(&directory, "old");
        directory.commit_copy(COPY.as_ref()).unwrap();
        assert_eq!(read(), "old");
        begin(&directory, "new");
        assert_eq!(read(), "old");
        directory.commit_copy(COPY.as_ref()).unwrap();
        assert_eq!(read(), "new");
        assert_eq!(names(top.path()), [COPY]);
        assert_eq!(directory.copy_names().unwrap(), [COPY]);
        directory.remove_copy(COPY.as_ref()).unwrap();
        directory.remove_copy(COPY.as_ref()).unwrap();
        assert!(names(top.path()).is_empty());
    }

    #[test]
    fn leftovers_are_removed_and_the_staging_directory_of_a_pull_is_not() {
        let top = tempfile::tempdir().unwrap();
        let directory = CopyDirectory::open(top.path()).unwrap();
        for name in [".next-step_1", ".removed-step_2", "step_3"] {
            fs::create_dir_all(top.path().join(name).join("sub")).unwrap();
        }
        fs::create_dir(top.path().join(".firn-pull-.next-step_1")).unwrap();
        assert!(directory.remove_leftovers().is_empty());
        assert_eq!(names(top.path()), [".firn-pull-.next-step_1", "step_3"]);
        assert_eq!(directory.copy_names().unwrap(), ["step_3"]);
    }

    /// Proves S-agent-34.
    #[test]
    fn files_of_another_user_are_no_copies_and_are_not_removed() {
        let top = tempfile::tempdir().unwrap();
        let directory = CopyDirectory::open(top.path()).unwrap();
        for name in [COPY, ".next-step_2", ".removed-step_3"] {
            fs::create_dir(top.path().join(name)).unwrap();
            if chown(top.path().join(name), Some(65_534), None).is_err() {
                eprintln!("skipped: only root can give files away");
                return;
            }
        }
        let names_before = names(top.path());
        assert!(directory.copy_names().unwrap().is_empty());
        assert!(matches!(
            directory.begin_copy(COPY.as_ref()),
            Err(PullError::Exists { .. })
        ));
        directory.remove_copy(COPY.as_ref()).unwrap();
        assert!(directory.remove_leftovers().is_empty());
        assert_eq!(names(top.path()), names_before);
    }
}
