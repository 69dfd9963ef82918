//! A probe directory: a check of `firn doctor` creates one in the backing, and tries operations on files there.
//!
//! Promises
//! * A check creates and removes files only through the descriptor of a directory that this process has just created
//!   with mode 0700. It never opens, writes or removes an object of another user.
//! * The directory is removed when the [`ProbeDir`] is dropped. A check that is killed leaves its directory, and a
//!   later check of the same user removes that. The later check recognises the directory by its name, owner, mode and
//!   age.
//! * Removal is limited. In a shared backing, a user with permission to rename can give a probe's name to another
//!   directory of this user. So only files whose names begin with [`PREFIX`] are removed from a directory, and the
//!   directory itself is removed only when it is empty.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use firn_backing::{Backing as _, DirBacking, Volume as _};
use firn_trust::{
    Expected, FileMetadata, ObjectId, create_private_file, list_names, open_private_dir,
};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat, fstat, mkdirat, open, statat, unlinkat};

use rustix::io::Errno;

use crate::doctor::user_id;

/// Prefix of the names of probe directories, and of all files in them.
pub(crate) const PREFIX: &str = ".firn-doctor-";
/// Age in seconds from which a probe directory counts as abandoned. No check runs that long: its parent kills it
/// earlier.
const ABANDONED_AFTER_S: i64 = 3600;

/// A probe directory. It is removed when the value is dropped.
pub(crate) struct ProbeDir {
    /// Descriptor of the backing.
    backing: OwnedFd,
    /// Name of the probe directory.
    name: OsString,
    /// Descriptor of the probe directory.
    dir: OwnedFd,
    /// Identity of the probe directory, which its removal compares.
    object: ObjectId,
}

impl ProbeDir {
    /// Creates a probe directory, in which a check tries operations, at the top of a backing. Fails if the directory
    /// under the new name is not this user's own.
    pub(crate) fn create(backing: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let backing = open(backing, flags, Mode::empty())?;
        let random = getrandom::u64().map_err(|error| io::Error::other(error.to_string()))?;
        let name = OsString::from(format!("{PREFIX}{random:016x}"));
        mkdirat(&backing, &name, Mode::RWXU)?;
        match Self::open(&backing, &name) {
            Ok((dir, object)) => Ok(Self {
                backing,
                name,
                dir,
                object,
            }),
            Err(error) => {
                // Another user may have renamed another directory to this name (head of this file). RMDIR removes only
                // an empty directory.
                let _ = unlinkat(&backing, &name, AtFlags::REMOVEDIR);
                Err(error)
            }
        }
    }

    /// Opens a new probe directory. Returns its descriptor and its identity. Fails if it is not this user's own.
    fn open(backing: &OwnedFd, name: &OsStr) -> io::Result<(OwnedFd, ObjectId)> {
        let dir = open_private_dir(backing, Path::new(name)).map_err(|error| {
            // One cause is a file server that maps root to another user (root_squash).
            io::Error::other(format!(
                "files made here do not belong to this user: {error}"
            ))
        })?;
        let object = ObjectId::from_stat(&fstat(&dir)?);
        Ok((dir, object))
    }

    /// Returns the descriptor of the probe directory.
    pub(crate) fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// Opens the probe directory as a backing.
    ///
    /// It is opened by its descriptor and its identity is compared, so that no other user can substitute another
    /// directory. Fails with ESTALE if the identity differs.
    pub(crate) fn open_backing(&self) -> io::Result<DirBacking> {
        let backing = DirBacking::open(format!("/proc/self/fd/{}", self.dir.as_raw_fd()))?;
        let opened_attr = backing.attr(&backing.root())?;
        let probe_stat = fstat(&self.dir)?;
        #[allow(
            clippy::unnecessary_cast,
            reason = "the width differs between architectures"
        )]
        let probe_identity = (probe_stat.st_dev as u64, probe_stat.st_ino as u64);
        if (opened_attr.dev, opened_attr.ino) == probe_identity {
            Ok(backing)
        } else {
            Err(Errno::STALE.into())
        }
    }

    /// Creates a file in the probe directory, whose name is [`file_name`] of `name`.
    pub(crate) fn file(&self, name: &str) -> io::Result<File> {
        let name = file_name(name);
        create_private_file(&self.dir, Path::new(&name), OFlags::RDWR)
            .map(File::from)
            .map_err(io::Error::other)
    }

    /// Removes the probe directories that killed checks of this user left behind. Returns how many were removed.
    ///
    /// A directory that cannot be removed is skipped.
    pub(crate) fn remove_abandoned(&self) -> usize {
        let (Ok(own_stat), Ok(entries)) = (fstat(&self.dir), Dir::read_from(&self.backing)) else {
            return 0;
        };
        // The new probe's modification time is the present by the clock of the file server, which stamps all probes.
        let now_s = own_stat.st_mtime;
        // All names are read before the first removal, which would disturb the listing.
        let mut other_probes: Vec<OsString> = Vec::new();
        for entry in entries.flatten() {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name.as_bytes().starts_with(PREFIX.as_bytes()) && name != self.name {
                other_probes.push(name.to_owned());
            }
        }
        let mut removed_count = 0;
        for name in &other_probes {
            let Ok(stat) = statat(&self.backing, name, AtFlags::SYMLINK_NOFOLLOW) else {
                continue;
            };
            if is_abandoned(&stat, now_s)
                && remove_probe(&self.backing, name, ObjectId::from_stat(&stat)).is_ok()
            {
                removed_count += 1;
            }
        }
        removed_count
    }
}

/// Returns whether a directory was left behind by a check: it is this user's own, and old. `now_s` is the present time
/// by the clock of the same file system, in seconds since 1970.
fn is_abandoned(dir: &Stat, now_s: i64) -> bool {
    let is_ours = FileMetadata::from_stat(dir)
        .check(Expected::Directory, user_id())
        .is_ok();
    is_ours && now_s - dir.st_mtime > ABANDONED_AFTER_S
}

impl Drop for ProbeDir {
    fn drop(&mut self) {
        // After an error the directory stays, and a later check removes it as abandoned.
        let _ = remove_probe(&self.backing, &self.name, self.object);
    }
}

/// Returns the name of a check's file in its probe directory.
pub(crate) fn file_name(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Removes a probe directory: first the files of checks in it, and then the directory if it is empty.
///
/// `object` is the identity of the probe directory. Fails with ESTALE, and removes nothing, if another directory has
/// its name now.
fn remove_probe(backing: &OwnedFd, name: &OsStr, object: ObjectId) -> io::Result<()> {
    let dir = open_private_dir(backing, Path::new(name)).map_err(io::Error::other)?;
    if ObjectId::from_stat(&fstat(&dir)?) != object {
        return Err(Errno::STALE.into());
    }
    for file in list_names(&dir)? {
        if file.as_bytes().starts_with(PREFIX.as_bytes()) {
            unlinkat(&dir, &file, AtFlags::empty())?;
        }
    }
    Ok(unlinkat(backing, name, AtFlags::REMOVEDIR)?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    use std::time::{Duration, SystemTime};

    use super::*;

    fn age(path: &Path, by: Duration) {
        let time = SystemTime::now() - by;
        let times = fs::FileTimes::new().set_modified(time);
        File::open(path).unwrap().set_times(times).unwrap();
    }

    #[test]
    fn a_probe_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let probe = ProbeDir::create(dir.path()).unwrap();
        probe.file("a").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        drop(probe);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_put_in_the_place_of_a_probe_stays() {
        let dir = tempfile::tempdir().unwrap();
        let probe = ProbeDir::create(dir.path()).unwrap();
        let place = dir.path().join(&probe.name);
        fs::rename(&place, dir.path().join("moved")).unwrap();
        fs::create_dir(&place).unwrap();
        fs::write(place.join("precious"), b"x").unwrap();
        drop(probe);
        assert!(place.join("precious").exists());
    }

    #[test]
    fn only_old_private_directories_are_left_ones() {
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str, mode: u32| {
            let path = dir.path().join(format!("{PREFIX}{name}"));
            fs::DirBuilder::new().mode(mode).create(&path).unwrap();
            fs::write(path.join(file_name("synced")), b"x").unwrap();
            path
        };
        let old = Duration::from_secs(2 * ABANDONED_AFTER_S as u64);
        let left = make("left", 0o700);
        age(&left, old);
        let running = make("running", 0o700);
        let open_to_all = make("open", 0o755);
        age(&open_to_all, old);
        // Another user has renamed an ordinary directory of this user to the name of a probe.
        let renamed = make("renamed", 0o700);
        fs::write(renamed.join("model.pt"), b"x").unwrap();
        age(&renamed, old);
        let file = dir.path().join(format!("{PREFIX}file"));
        fs::write(&file, b"x").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o700)).unwrap();
        age(&file, old);
        let probe = ProbeDir::create(dir.path()).unwrap();
        assert_eq!(probe.remove_abandoned(), 1);
        assert!(!left.exists() && running.exists() && open_to_all.exists() && file.exists());
        assert!(renamed.join("model.pt").exists());
    }
}
