//! Opens, lists and removes objects below an open directory. The functions use descriptors, follow no symbolic link,
//! and never leave the directory.
//!
//! If another user may rename a directory on a path, the path may lead to another object each time. An object that
//! was checked on a descriptor is therefore used through that descriptor, with these functions.
//!
//! Promises
//! * No symbolic link is followed, no mount point is crossed, and `..` is refused. Every opened or removed object is
//!   below the given directory.
//! * On kernels before 5.6, and in containers without openat2(2), one openat(2) for each component does the same.
//!   There, a bind mount of a directory of the same file system is not seen as a mount point.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, StatxFlags};
use rustix::fs::{fchmod, fstat, openat, openat2, statat, statx, unlinkat};
use rustix::io::Errno;

/// Flags to open a directory on the path.
const PATH_DIR_FLAGS: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Flags to open a directory for reading.
const READ_DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Opens the object at `path` below `dir`. `mode` applies with O_CREAT and must be empty otherwise.
///
/// Fails with ELOOP if there is a symbolic link on the path or at its end (at the end with O_DIRECTORY: ENOTDIR).
/// Fails with EXDEV if the path, or a mount on it, leads out of `dir`.
pub fn open_beneath(
    dir: impl AsFd,
    path: &Path,
    flags: OFlags,
    mode: Mode,
) -> Result<OwnedFd, Errno> {
    let is_plain = |component| matches!(component, Component::Normal(_));
    if !path.components().all(is_plain) {
        return Err(Errno::XDEV);
    }
    let flags = flags.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
    match openat2(dir.as_fd(), path, flags, mode, resolve) {
        // EPERM may come from a seccomp filter that does not know openat2(2). If the file system itself refuses, so
        // does the walk.
        Err(Errno::NOSYS | Errno::PERM) => walk_beneath(dir, path, flags, mode),
        opened => opened,
    }
}

/// Opens the object at `path` below `dir`, as [`open_beneath`] does, with one openat(2) for each component. The caller
/// has checked that `path` has plain names only.
fn walk_beneath(dir: impl AsFd, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let device = fstat(dir.as_fd())?.st_dev;
    let mut parent: Option<OwnedFd> = None;
    let mut names = path.components().peekable();
    while let Some(component) = names.next() {
        let name = component.as_os_str();
        let parent_fd = parent.as_ref().map_or(dir.as_fd(), |fd| fd.as_fd());
        let is_last = names.peek().is_none();
        let (flags, mode) = if is_last {
            (flags, mode)
        } else {
            (PATH_DIR_FLAGS, Mode::empty())
        };
        let object = match openat(parent_fd, name, flags, mode) {
            Ok(object) => object,
            // openat2(2) fails with ELOOP for a symbolic link on the path, so the walk does too.
            Err(Errno::NOTDIR) if !is_last && is_link(parent_fd, name) => return Err(Errno::LOOP),
            Err(errno) => return Err(errno),
        };
        if fstat(&object)?.st_dev != device {
            return Err(Errno::XDEV);
        }
        if is_last {
            return Ok(object);
        }
        parent = Some(object);
    }
    // The path has no component.
    Err(Errno::NOENT)
}

/// Returns whether a name leads to a symbolic link.
fn is_link(dir: impl AsFd, name: &OsStr) -> bool {
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFLNK)
}

/// Opens the directory that contains `path`, for system calls that take a directory and a name in it.
pub fn open_parent_beneath(dir: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => {
            open_beneath(dir, parent, PATH_DIR_FLAGS, Mode::empty())
        }
        _ => openat(dir, c".", PATH_DIR_FLAGS, Mode::empty()),
    }
}

/// Opens a directory below `dir` for reading. If the mode denies access to the owner, the directory first gets mode
/// 0700.
pub fn open_dir_beneath(dir: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    let opened = open_beneath(dir.as_fd(), path, READ_DIR_FLAGS, Mode::empty());
    if opened.as_ref().err() != Some(&Errno::ACCESS) {
        return opened;
    }
    let closed_dir = open_beneath(dir.as_fd(), path, PATH_DIR_FLAGS, Mode::empty())?;
    set_mode_by_descriptor(&closed_dir, Mode::RWXU)?;
    open_beneath(dir, path, READ_DIR_FLAGS, Mode::empty())
}

/// Changes the mode of an open object, also of one that was opened with O_PATH.
fn set_mode_by_descriptor(fd: impl AsFd, mode: Mode) -> Result<(), Errno> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    rustix::fs::chmod(path, mode)
}

/// Returns the names in a directory that is open for reading, without `.` and `..`.
pub fn list_names(dir: impl AsFd) -> Result<Vec<std::ffi::OsString>, Errno> {
    let mut names = Vec::new();
    // The listing uses its own descriptor, so the position of the given one does not matter.
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if !is_dot(name) {
            names.push(OsStr::from_bytes(name.to_bytes()).to_owned());
        }
    }
    Ok(names)
}

fn is_dot(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

/// Removes the object `name` in `dir`. A directory is removed with its content, even if modes of directories in it deny
/// access. Fails with ENOENT if the name does not exist.
pub fn remove_beneath(dir: impl AsFd, name: &OsStr) -> Result<(), Errno> {
    let dir = dir.as_fd();
    if !crate::is_component(name.as_bytes()) {
        return Err(Errno::INVAL);
    }
    let unlink_error = match unlinkat(dir, name, AtFlags::empty()) {
        // For a directory, unlinkat(2) fails with EISDIR on Linux, and with EPERM in POSIX.
        Err(errno @ (Errno::ISDIR | Errno::PERM)) => errno,
        outcome => return outcome,
    };
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        // The object is no directory, so the first error counts.
        Err(Errno::NOTDIR) => return Err(unlink_error),
        outcome => return outcome,
    }
    empty_dir(open_dir_beneath(dir, Path::new(name))?)?;
    unlinkat(dir, name, AtFlags::REMOVEDIR)
}

/// Removes all objects in a directory. If its mode denies access to the owner, the directory first gets mode 0700.
fn empty_dir(dir: OwnedFd) -> Result<(), Errno> {
    if fstat(&dir)?.st_mode & libc::S_IRWXU != libc::S_IRWXU {
        fchmod(&dir, Mode::RWXU)?;
    }
    for name in list_names(&dir)? {
        match remove_beneath(&dir, &name) {
            // Another process has removed the object meanwhile.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Identifies an object independently of its name. No two existing objects have the same numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectId {
    device: u64,
    inode: u64,
}

impl ObjectId {
    /// Takes the numbers from a stat structure.
    pub fn from_stat(stat: &Stat) -> Self {
        // The width of these fields differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        Self {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
        }
    }
}

/// Removes the object `name` in `dir` like [`remove_beneath`], if that object is `object`.
///
/// Fails with ESTALE if the name belongs to another object, and removes nothing of that object. The content of a
/// directory is removed through its descriptor; then the name is removed if it is that of an empty directory.
pub fn remove_object(dir: impl AsFd, name: &OsStr, object: ObjectId) -> Result<(), Errno> {
    let dir = dir.as_fd();
    let stat = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
    check_is_object(&stat, object)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return unlinkat(dir, name, AtFlags::empty());
    }
    let open_dir = open_dir_beneath(dir, Path::new(name))?;
    // The name may lead to another directory since the check above.
    check_is_object(&fstat(&open_dir)?, object)?;
    empty_dir(open_dir)?;
    unlinkat(dir, name, AtFlags::REMOVEDIR)
}

/// Fails with ESTALE if these are the attributes of another object.
fn check_is_object(stat: &Stat, object: ObjectId) -> Result<(), Errno> {
    if ObjectId::from_stat(stat) == object {
        Ok(())
    } else {
        Err(Errno::STALE)
    }
}

/// Visits the object `name` in `dir` and, if it is a directory, all objects below it that belong to user `uid`.
///
/// Objects of other users and objects that vanish during the visit are left out. Paths are relative to `dir`. The
/// attributes of each object are current (`stat_now`).
pub fn visit_own(
    dir: impl AsFd,
    name: &OsStr,
    uid: u32,
    visit: &mut dyn FnMut(&Path, &Stat),
) -> Result<(), Errno> {
    visit_own_at(dir, name, Path::new(name), uid, visit)
}

/// Returns current attributes of a name. Forces the kernel to request them from the file system, even if it has valid
/// cached ones: on a mount, cached attributes may be older than a write of another host.
fn stat_now(dir: impl AsFd, name: &OsStr) -> Result<Stat, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW.union(AtFlags::STATX_FORCE_SYNC);
    // In a container without statx(2), the possibly cached attributes of stat(2) suffice.
    let _ = statx(dir.as_fd(), name, flags, StatxFlags::BASIC_STATS);
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// Visits the object `name` in `dir`, and what is below it, as far as it belongs to user `uid`. The object is reported
/// as `path`.
fn visit_own_at(
    dir: impl AsFd,
    name: &OsStr,
    path: &Path,
    uid: u32,
    visit: &mut dyn FnMut(&Path, &Stat),
) -> Result<(), Errno> {
    let stat = match stat_now(dir.as_fd(), name) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    if stat.st_uid != uid {
        return Ok(());
    }
    visit(path, &stat);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(());
    }
    let open_dir = match open_beneath(dir, Path::new(name), READ_DIR_FLAGS, Mode::empty()) {
        Ok(open_dir) => open_dir,
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno),
    };
    // Another user has replaced the directory since the check above.
    if fstat(&open_dir)?.st_uid != uid {
        return Ok(());
    }
    for child in list_names(&open_dir)? {
        visit_own_at(&open_dir, &child, &path.join(&child), uid, visit)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    type Open = fn(&OwnedFd, &str, OFlags, Mode) -> Result<OwnedFd, Errno>;

    /// Both implementations: openat2(2), and the walk for kernels without it.
    const WAYS: [(&str, Open); 2] = [
        ("openat2", |dir, path, flags, mode| {
            open_beneath(dir, Path::new(path), flags, mode)
        }),
        ("openat", |dir, path, flags, mode| {
            let flags = flags.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
            walk_beneath(dir, Path::new(path), flags, mode)
        }),
    ];

    fn open_dir(path: &Path) -> OwnedFd {
        openat(rustix::fs::CWD, path, READ_DIR_FLAGS, Mode::empty()).unwrap()
    }

    #[test]
    fn regression_no_mount_point_is_opened() {
        let top = open_dir(Path::new("/"));
        for (way, open) in WAYS {
            for path in ["proc", "proc/self"] {
                let opened = open(&top, path, READ_DIR_FLAGS, Mode::empty());
                assert_eq!(opened.err(), Some(Errno::XDEV), "{way}: {path}");
            }
        }
    }

    #[test]
    fn nothing_is_opened_through_a_link_or_outside() {
        let parent = tempfile::tempdir().unwrap();
        let top = parent.path().join("top");
        fs::create_dir_all(top.join("a/b")).unwrap();
        fs::create_dir(parent.path().join("outside")).unwrap();
        fs::write(top.join("a/b/file"), b"x").unwrap();
        fs::write(parent.path().join("outside/file"), b"x").unwrap();
        symlink("../../outside", top.join("a/out")).unwrap();
        symlink("b", top.join("a/in")).unwrap();
        symlink("b/file", top.join("a/link")).unwrap();
        let dir = open_dir(&top);
        for (way, open) in WAYS {
            let read = |path| open(&dir, path, OFlags::RDONLY, Mode::empty()).map(drop);
            assert_eq!(read("a/b/file"), Ok(()), "{way}");
            assert_eq!(read("a/b"), Ok(()), "{way}");
            assert_eq!(read("a/none"), Err(Errno::NOENT), "{way}");
            assert_eq!(read("a/b/file/x"), Err(Errno::NOTDIR), "{way}");
            for link in ["a/out/file", "a/in/file", "a/link"] {
                assert_eq!(read(link), Err(Errno::LOOP), "{way} {link}");
            }
            let listed = open(&dir, "a/in", OFlags::DIRECTORY, Mode::empty());
            assert_eq!(listed.map(drop), Err(Errno::NOTDIR), "{way}");
            let create = OFlags::WRONLY | OFlags::CREATE;
            let made = open(&dir, &format!("a/b/{way}"), create, Mode::RUSR);
            assert_eq!(made.map(drop), Ok(()), "{way}");
            let made = open(&dir, &format!("a/out/{way}"), create, Mode::RUSR);
            assert_eq!(made.map(drop), Err(Errno::LOOP), "{way}");
        }
        assert_eq!(
            fs::read_dir(parent.path().join("outside")).unwrap().count(),
            1
        );
        for path in ["../outside/file", "/etc/passwd", "a/../../outside/file", ""] {
            let opened = open_beneath(&dir, Path::new(path), OFlags::RDONLY, Mode::empty());
            assert!(opened.is_err(), "{path}");
        }
    }

    #[test]
    fn a_tree_is_removed_whatever_its_modes_are_and_nothing_that_its_links_lead_to() {
        let parent = tempfile::tempdir().unwrap();
        let outside = parent.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), b"x").unwrap();
        let tree = parent.path().join("tree");
        fs::create_dir_all(tree.join("closed/sub")).unwrap();
        fs::write(tree.join("closed/sub/file"), b"x").unwrap();
        symlink(&outside, tree.join("closed/link")).unwrap();
        for (dir, mode) in [("closed/sub", 0o500), ("closed", 0)] {
            fs::set_permissions(tree.join(dir), Permissions::from_mode(mode)).unwrap();
        }
        let dir = open_dir(parent.path());
        remove_beneath(&dir, OsStr::new("tree")).unwrap();
        assert!(!tree.exists());
        symlink(&outside, parent.path().join("link")).unwrap();
        remove_beneath(&dir, OsStr::new("link")).unwrap();
        assert!(outside.join("file").exists());
        assert_eq!(remove_beneath(&dir, OsStr::new("tree")), Err(Errno::NOENT));
        assert_eq!(remove_beneath(&dir, OsStr::new("..")), Err(Errno::INVAL));
    }

    #[test]
    fn only_the_object_that_was_looked_at_is_removed() {
        let parent = tempfile::tempdir().unwrap();
        let dir = open_dir(parent.path());
        for name in ["old", "new"] {
            fs::create_dir(parent.path().join(name)).unwrap();
            fs::write(parent.path().join(name).join("file"), name).unwrap();
        }
        let look = |name: &str| {
            ObjectId::from_stat(&statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).unwrap())
        };
        let old = look("old");
        fs::rename(parent.path().join("old"), parent.path().join("away")).unwrap();
        fs::rename(parent.path().join("new"), parent.path().join("old")).unwrap();
        let name = OsStr::new("old");
        assert_eq!(remove_object(&dir, name, old), Err(Errno::STALE));
        assert!(parent.path().join("old/file").exists());
        symlink("away", parent.path().join("new")).unwrap();
        let removed = remove_object(&dir, OsStr::new("new"), old);
        assert_eq!(removed, Err(Errno::STALE));
        assert_eq!(remove_object(&dir, OsStr::new("away"), old), Ok(()));
        assert!(!parent.path().join("away").exists());
    }
}
