//! A directory of a check's own in a backing, where files are tried.
//!
//! Promises
//! * Everything is made and removed by the descriptor of a directory that this process has just made, with mode 0700: what
//!   belongs to others is never opened, written or removed.
//! * It is removed with the value. A check that was killed leaves its directory, and a later check of the same user
//!   removes it. It is known by its name, owner and mode, and by an age that no running check has.
//! * A user with permission to rename in a shared backing can give that name to another directory of the user. So only
//!   files whose names begin as that of the directory are removed from it, and then the directory, if it is empty.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use firn_backing::{Backing as _, DirBacking, Volume as _};
use firn_trust::{Expected, Facts, ObjectId, create_private_file, names_in, open_private_dir};
use rustix::fs::{AtFlags, Dir, Mode, OFlags, Stat, fstat, mkdirat, open, statat, unlinkat};

use rustix::io::Errno;

use crate::doctor::user;

/// What names of such directories, and of all files in them, begin with.
pub(crate) const PREFIX: &str = ".firn-doctor-";
/// No check runs for this long: its parent kills it earlier.
const LEFT_AFTER_S: i64 = 3600;

/// Such a directory.
pub(crate) struct Probe {
    backing: OwnedFd,
    name: OsString,
    dir: OwnedFd,
    object: ObjectId,
}

impl Probe {
    /// Makes one in a backing.
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
                // Empty, or it is not removed.
                let _ = unlinkat(&backing, &name, AtFlags::REMOVEDIR);
                Err(error)
            }
        }
    }

    fn open(backing: &OwnedFd, name: &OsStr) -> io::Result<(OwnedFd, ObjectId)> {
        let dir = open_private_dir(backing, Path::new(name)).map_err(|error| {
            // A server that makes root another user (root_squash), say.
            io::Error::other(format!("files made here are not this user's own: {error}"))
        })?;
        let object = ObjectId::of(&fstat(&dir)?);
        Ok((dir, object))
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &OwnedFd {
        &self.dir
    }

    /// The directory as a backing. Others cannot lead the way to it elsewhere, unseen.
    pub(crate) fn open_backing(&self) -> io::Result<DirBacking> {
        let opened = DirBacking::open(format!("/proc/self/fd/{}", self.dir.as_raw_fd()))?;
        let found = opened.attr(&opened.root())?;
        let own = fstat(&self.dir)?;
        #[allow(
            clippy::unnecessary_cast,
            reason = "the width differs between architectures"
        )]
        let is_same = (found.dev, found.ino) == (own.st_dev as u64, own.st_ino as u64);
        if is_same {
            Ok(opened)
        } else {
            Err(Errno::STALE.into())
        }
    }

    /// A new file in it, whose name is [`file_name`].
    pub(crate) fn file(&self, name: &str) -> io::Result<File> {
        let name = file_name(name);
        let made = create_private_file(&self.dir, Path::new(&name), OFlags::RDWR);
        made.map(File::from).map_err(io::Error::other)
    }

    /// Removes directories of checks of this user that were killed. Returns how many.
    pub(crate) fn remove_left(&self) -> usize {
        let (Ok(own), Ok(entries)) = (fstat(&self.dir), Dir::read_from(&self.backing)) else {
            return 0;
        };
        let names = entries.flatten().filter_map(|entry| {
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            let is_one = name.as_bytes().starts_with(PREFIX.as_bytes()) && name != self.name;
            is_one.then(|| name.to_owned())
        });
        let names: Vec<OsString> = names.collect();
        let removed = names.iter().filter(|name| {
            let found = statat(&self.backing, *name, AtFlags::SYMLINK_NOFOLLOW);
            found.is_ok_and(|found| {
                is_left(&found, own.st_mtime)
                    && remove(&self.backing, name, ObjectId::of(&found)).is_ok()
            })
        });
        removed.count()
    }
}

/// Whether a directory was left by a check; `now_s` is the time of the same file system.
fn is_left(found: &Stat, now_s: i64) -> bool {
    let is_ours = Facts::of(found).check(Expected::Directory, user()).is_ok();
    is_ours && now_s - found.st_mtime > LEFT_AFTER_S
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = remove(&self.backing, &self.name, self.object);
    }
}

/// The name that a file of a check has in the directory.
pub(crate) fn file_name(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Removes the files of a check from the directory `name`, if that is `object`, and the directory, if it is empty then.
fn remove(backing: &OwnedFd, name: &OsStr, object: ObjectId) -> io::Result<()> {
    let dir = open_private_dir(backing, Path::new(name)).map_err(io::Error::other)?;
    if ObjectId::of(&fstat(&dir)?) != object {
        return Err(Errno::STALE.into());
    }
    for file in names_in(&dir)? {
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
        let probe = Probe::create(dir.path()).unwrap();
        probe.file("a").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        drop(probe);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_was_put_in_the_place_of_a_probe_stays() {
        let dir = tempfile::tempdir().unwrap();
        let probe = Probe::create(dir.path()).unwrap();
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
        let old = Duration::from_secs(2 * LEFT_AFTER_S as u64);
        let left = make("left", 0o700);
        age(&left, old);
        let running = make("running", 0o700);
        let open_to_all = make("open", 0o755);
        age(&open_to_all, old);
        // Another directory of the user, to which another user gave such a name.
        let renamed = make("renamed", 0o700);
        fs::write(renamed.join("model.pt"), b"x").unwrap();
        age(&renamed, old);
        let file = dir.path().join(format!("{PREFIX}file"));
        fs::write(&file, b"x").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o700)).unwrap();
        age(&file, old);
        let probe = Probe::create(dir.path()).unwrap();
        assert_eq!(probe.remove_left(), 1);
        assert!(!left.exists() && running.exists() && open_to_all.exists() && file.exists());
        assert!(renamed.join("model.pt").exists());
    }
}
