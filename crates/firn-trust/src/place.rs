//! Checks that no other user can replace an object that Firn owns.
//!
//! A user that may rename in a directory decides where each path through it leads, even if the objects below are closed
//! to that user. An attacker could put back an old directory of the victim in this way, with an old arena (a file of
//! Firn's shared memory) in it. Objects that Firn keeps outside the backing therefore lie below safe directories. Such
//! a directory belongs to the user or to root, and others either may not write to it or may only add names (the sticky
//! bit). Examples are `/dev/shm`, `/tmp` and `/run/user/UID`. sshd requires the same of the path to its files
//! (`StrictModes`).
//!
//! Promises
//! * Each directory is checked by its descriptor, from the root on, and the next name is looked up in it.
//! * A symbolic link on the path is accepted only if it belongs to the user or to root. The directories of its target
//!   are checked too.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, openat, readlinkat};
use rustix::io::Errno;

use crate::{Distrust, FileMetadata, TrustError};

/// Maximum number of symbolic links, as in the kernel (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// Checks that Firn may keep its files in an open directory, which other users may share.
///
/// The directories above are not checked. A caller that reaches its files through the descriptor does not need that.
pub fn check_shared_parent(dir: impl AsFd, path: &Path) -> Result<(), TrustError> {
    check_dir(dir, path, path, effective_user())
}

/// Checks that Firn may keep its files in the directory `dir`, which other users may share, and find them by path
/// later. Checks `dir` and each directory above.
pub fn check_place(dir: &Path) -> Result<(), TrustError> {
    check_place_of(dir, effective_user())
}

/// Checks that no user but `uid` and root can replace files that are kept in `dir`. Checks `dir` and each directory
/// above, from the root on.
pub fn check_place_of(dir: &Path, uid: u32) -> Result<(), TrustError> {
    let io_error = |path: &Path, error| TrustError::Io {
        path: path.to_owned(),
        error,
    };
    let absolute = std::path::absolute(dir).map_err(|error| io_error(dir, error))?;
    let root_path = PathBuf::from("/");
    let root = openat(CWD, c"/", PATH_DIR, Mode::empty())
        .map_err(|errno| io_error(&root_path, errno.into()))?;
    let mut walk = PathWalk {
        place: dir,
        uid,
        open_dirs: vec![OpenDir {
            fd: root,
            path: root_path,
        }],
        names: names_of(&absolute),
        followed_links: 0,
    };
    walk.check_current_dir()?;
    while let Some(name) = walk.names.pop_front() {
        walk.step(&name)?;
    }
    Ok(())
}

const PATH_DIR: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
const PATH_LINK: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A walk from the root to a directory.
struct PathWalk<'a> {
    /// The directory in which Firn is to keep files.
    place: &'a Path,
    /// The user that owns the files.
    uid: u32,
    /// The directories from the root to the current one.
    open_dirs: Vec<OpenDir>,
    /// The names that remain to be walked.
    names: VecDeque<OsString>,
    /// Number of symbolic links that were followed.
    followed_links: usize,
}

/// An open directory of a walk.
struct OpenDir {
    fd: OwnedFd,
    path: PathBuf,
}

impl PathWalk<'_> {
    /// Goes one name further on the path: to the object `name` of the current directory. A directory is checked, and a
    /// symbolic link is followed.
    fn step(&mut self, name: &OsStr) -> Result<(), TrustError> {
        if name == ".." {
            // The directory above the root is the root.
            if self.open_dirs.len() > 1 {
                self.open_dirs.pop();
            }
            return Ok(());
        }
        let current_dir = self.current_dir();
        let path = current_dir.path.join(name);
        let io_error = |errno: Errno| TrustError::Io {
            path: path.clone(),
            error: errno.into(),
        };
        // O_DIRECTORY makes autofs mount its file system.
        match openat(&current_dir.fd, name, PATH_DIR, Mode::empty()) {
            Ok(fd) => {
                self.open_dirs.push(OpenDir { fd, path });
                self.check_current_dir()
            }
            Err(Errno::NOTDIR) => {
                let link =
                    openat(&current_dir.fd, name, PATH_LINK, Mode::empty()).map_err(io_error)?;
                self.follow(&link, &path)
            }
            Err(errno) => Err(io_error(errno)),
        }
    }

    fn current_dir(&self) -> &OpenDir {
        self.open_dirs.last().expect("the root stays")
    }

    fn check_current_dir(&self) -> Result<(), TrustError> {
        let OpenDir { fd, path } = self.current_dir();
        check_dir(fd, path, self.place, self.uid)
    }

    /// Goes on with the names in the target of a symbolic link, which must belong to the user or to root.
    fn follow(&mut self, link: &OwnedFd, path: &Path) -> Result<(), TrustError> {
        let io_error = |errno: Errno| TrustError::Io {
            path: path.to_owned(),
            error: errno.into(),
        };
        let metadata = FileMetadata::from_stat(&fstat(link).map_err(io_error)?);
        if FileType::from_raw_mode(metadata.mode) != FileType::Symlink {
            return Err(io_error(Errno::NOTDIR));
        }
        let owner = owner_of(&metadata);
        if owner != self.uid && owner != 0 {
            return Err(TrustError::Exposed {
                place: self.place.to_owned(),
                path: path.to_owned(),
                why: Distrust::Owner {
                    found: metadata.uid,
                    expected: self.uid,
                },
            });
        }
        self.followed_links += 1;
        if self.followed_links > LINKS_MAX {
            return Err(io_error(Errno::LOOP));
        }
        let target = readlinkat(link, c"", Vec::new()).map_err(io_error)?;
        let target_path = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target_path.is_absolute() {
            self.open_dirs.truncate(1);
        }
        let mut names = names_of(&target_path);
        names.append(&mut self.names);
        self.names = names;
        Ok(())
    }
}

/// Returns the names and the `..` in a path.
fn names_of(path: &Path) -> VecDeque<OsString> {
    let mut names = VecDeque::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => names.push_back(name.to_owned()),
            Component::ParentDir => names.push_back("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    names
}

/// Checks that no user but `uid` and root can replace objects in the directory at `path`. This directory is `place`,
/// in which Firn will keep files, or one above it.
fn check_dir(dir: impl AsFd, path: &Path, place: &Path, uid: u32) -> Result<(), TrustError> {
    let stat = fstat(dir).map_err(|errno| TrustError::Io {
        path: path.to_owned(),
        error: errno.into(),
    })?;
    let metadata = FileMetadata::from_stat(&stat);
    // In a container, root may appear as the user that stands for unmapped ids; `owner_of` then returns 0.
    let with_known_owner = FileMetadata {
        uid: owner_of(&metadata),
        ..metadata
    };
    with_known_owner
        .check_parent(uid)
        .map_err(|why| TrustError::Exposed {
            place: place.to_owned(),
            path: path.to_owned(),
            why,
        })
}

fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the owner of an object, or 0 if the owner may be root.
///
/// In unprivileged containers, the user namespace does not map root. There, `/` and `/dev/shm` belong to the user that
/// stands for all unmapped users.
fn owner_of(metadata: &FileMetadata) -> u32 {
    match user_for_unmapped() {
        Some(unknown_user) if metadata.uid == unknown_user => 0,
        _ => metadata.uid,
    }
}

/// Returns the user that stands for root and other unmapped users (user_namespaces(7)). Returns `None` if the namespace
/// maps root.
fn user_for_unmapped() -> Option<u32> {
    static UNKNOWN: OnceLock<Option<u32>> = OnceLock::new();
    *UNKNOWN.get_or_init(|| {
        let map = std::fs::read_to_string("/proc/self/uid_map").ok()?;
        if knows_root(&map) {
            return None;
        }
        let unknown = std::fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
        unknown.trim().parse().ok()
    })
}

/// Returns whether a user map (`uid_map`) contains the root user outside the namespace. Each line has the first user
/// inside, the first user outside, and a count.
fn knows_root(map: &str) -> bool {
    map.lines()
        .filter_map(|line| line.split_whitespace().nth(1))
        .any(|first_outside| first_outside == "0")
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// A place below `/tmp` must be accepted, because `/tmp` has the sticky bit.
    #[test]
    fn every_directory_on_the_way_counts_and_the_one_at_fault_is_named() {
        let top = tempfile::tempdir().unwrap();
        let place = top.path().join("project/job/place");
        fs::create_dir_all(&place).unwrap();
        let [project, job] = ["project", "project/job"].map(|name| top.path().join(name));
        assert!(check_place(&place).is_ok());
        for mode in [0o2770, 0o777, 0o775] {
            set_mode(&project, mode);
            let error = check_place(&place).unwrap_err();
            assert!(
                matches!(&error, TrustError::Exposed { path, place: asked, .. } if *path == project && *asked == place),
                "{error}"
            );
            let text = error.to_string();
            assert!(text.contains(&format!("mode {mode:04o}")), "{text}");
            // Through its descriptor, only the directory itself is checked.
            let dir = openat(CWD, &place, PATH_DIR, Mode::empty()).unwrap();
            assert!(check_shared_parent(&dir, &place).is_ok());
        }
        set_mode(&project, 0o1777);
        assert!(check_place(&place).is_ok());
        for dir in [&job, &place] {
            set_mode(dir, 0o777);
            assert!(check_place(&place).is_err());
            set_mode(dir, 0o755);
        }
        assert!(check_place(&place).is_ok());
        assert!(
            check_place(&top.path().join("none"))
                .unwrap_err()
                .is_missing()
        );
    }

    #[test]
    fn the_way_that_a_link_leads_is_looked_at_too() {
        let top = tempfile::tempdir().unwrap();
        let place = top.path().join("open/place");
        fs::create_dir_all(&place).unwrap();
        fs::create_dir(top.path().join("closed")).unwrap();
        symlink("../open/place", top.path().join("closed/link")).unwrap();
        symlink(top.path().join("closed/link"), top.path().join("far")).unwrap();
        symlink("loop", top.path().join("loop")).unwrap();
        let [near, far] = ["closed/link", "far"].map(|name| top.path().join(name));
        for link in [&near, &far] {
            assert!(check_place(link).is_ok());
        }
        set_mode(&top.path().join("open"), 0o777);
        for link in [&near, &far] {
            assert!(check_place(link).is_err());
        }
        assert!(check_place(&top.path().join("loop")).is_err());
    }

    #[test]
    fn a_place_of_another_user_is_none() {
        let top = tempfile::tempdir().unwrap();
        let error = check_place_of(top.path(), 4_000_000_000);
        match effective_user() {
            // A directory of root is safe for every user.
            0 => assert!(error.is_ok()),
            _ => assert!(error.is_err()),
        }
    }

    #[test]
    fn the_map_of_a_namespace_says_whether_root_is_known() {
        assert!(knows_root("         0          0 4294967295\n"));
        assert!(knows_root("0 1000 1\n1 0 1\n"));
        assert!(!knows_root("1000 1000 1\n"));
        assert!(!knows_root(""));
    }
}
