//! What is below a directory that is open: reached by descriptors, through no symbolic link, and never out of it.
//!
//! A path may lead elsewhere each time that it is used, where another user may rename what it goes through. What was
//! looked at on a descriptor is therefore used by that descriptor, with these functions.
//!
//! Promises
//! * No symbolic link is followed, no mount point is crossed, and `..` is refused: what is opened, or removed, is below
//!   the directory that is given.
//! * Kernels before 5.6, and containers that do not know openat2(2), get the same by one openat(2) for each component.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat, StatxFlags};
use rustix::fs::{fchmod, fstat, openat, openat2, statat, statx, unlinkat};
use rustix::io::Errno;

/// Flags for a directory on the way.
const THROUGH: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Flags for a directory that is read.
const LISTED: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Opens what is at `path` below `dir`. `mode` counts with O_CREAT and must be empty without. ELOOP: there is a symbolic
/// link on the way, or at its end (with O_DIRECTORY: ENOTDIR); EXDEV: the path, or a mount on its way, leads out of `dir`.
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
        // A seccomp filter that is older than the call answers EPERM. What the file system answers, it answers again.
        Err(Errno::NOSYS | Errno::PERM) => walk_beneath(dir, path, flags, mode),
        opened => opened,
    }
}

/// The same without openat2(2).
fn walk_beneath(dir: impl AsFd, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let device = fstat(dir.as_fd())?.st_dev;
    let mut parent: Option<OwnedFd> = None;
    let mut names = path.components().peekable();
    while let Some(name) = names.next() {
        let name = name.as_os_str();
        let from = parent.as_ref().map_or(dir.as_fd(), |fd| fd.as_fd());
        let is_last = names.peek().is_none();
        let (flags, mode) = if is_last {
            (flags, mode)
        } else {
            (THROUGH, Mode::empty())
        };
        let next = openat(from, name, flags, mode).map_err(|errno| match errno {
            // openat2(2) says ELOOP of a link on the way.
            Errno::NOTDIR if !is_last && is_link(from, name) => Errno::LOOP,
            errno => errno,
        })?;
        if is_last {
            return Ok(next);
        }
        if fstat(&next)?.st_dev != device {
            return Err(Errno::XDEV);
        }
        parent = Some(next);
    }
    Err(Errno::NOENT)
}

fn is_link(dir: impl AsFd, name: &OsStr) -> bool {
    let found = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW);
    found.is_ok_and(|found| found.st_mode & libc::S_IFMT == libc::S_IFLNK)
}

/// Opens the directory that `path` lies in, for the calls that take a directory and a name in it.
pub fn open_parent_beneath(dir: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => {
            open_beneath(dir, parent, THROUGH, Mode::empty())
        }
        _ => openat(dir, c".", THROUGH, Mode::empty()),
    }
}

/// Opens a directory below `dir` for reading. One that its owner closed to himself is given mode 0700 first.
pub fn open_dir_beneath(dir: impl AsFd, path: &Path) -> Result<OwnedFd, Errno> {
    match open_beneath(dir.as_fd(), path, LISTED, Mode::empty()) {
        Err(Errno::ACCESS) => {
            let closed = open_beneath(dir.as_fd(), path, THROUGH, Mode::empty())?;
            set_mode_by_descriptor(&closed, Mode::RWXU)?;
            open_beneath(dir, path, LISTED, Mode::empty())
        }
        opened => opened,
    }
}

/// chmod(2) of what is open, also by O_PATH.
fn set_mode_by_descriptor(fd: impl AsFd, mode: Mode) -> Result<(), Errno> {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    rustix::fs::chmod(path, mode)
}

/// Names in a directory that is open for reading, without `.` and `..`.
pub fn names_in(dir: impl AsFd) -> Result<Vec<std::ffi::OsString>, Errno> {
    let mut names = Vec::new();
    // A descriptor of its own: where the given one stands does not matter.
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

/// Removes what `name` names in `dir`: a directory with all that is in it, whatever the modes of directories are.
/// ENOENT: there is nothing.
pub fn remove_beneath(dir: impl AsFd, name: &OsStr) -> Result<(), Errno> {
    let dir = dir.as_fd();
    if !crate::is_component(name.as_bytes()) {
        return Err(Errno::INVAL);
    }
    let refused = match unlinkat(dir, name, AtFlags::empty()) {
        // Of a directory Linux says EISDIR, and POSIX EPERM.
        Err(errno @ (Errno::ISDIR | Errno::PERM)) => errno,
        removed => return removed,
    };
    match unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        Err(Errno::NOTDIR) => return Err(refused),
        removed => return removed,
    }
    empty_dir(open_dir_beneath(dir, Path::new(name))?)?;
    unlinkat(dir, name, AtFlags::REMOVEDIR)
}

fn empty_dir(dir: OwnedFd) -> Result<(), Errno> {
    if fstat(&dir)?.st_mode & libc::S_IRWXU != libc::S_IRWXU {
        fchmod(&dir, Mode::RWXU)?;
    }
    for name in names_in(&dir)? {
        match remove_beneath(&dir, &name) {
            Err(Errno::NOENT) => {}
            removed => removed?,
        }
    }
    Ok(())
}

/// Which object something is, whatever its name: no other one has the same numbers while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectId {
    device: u64,
    inode: u64,
}

impl ObjectId {
    /// Facts from a stat structure.
    pub fn of(stat: &Stat) -> Self {
        // The width of these fields differs between architectures.
        #[allow(clippy::unnecessary_cast)]
        Self {
            device: stat.st_dev as u64,
            inode: stat.st_ino as u64,
        }
    }
}

/// [`remove_beneath`] of one object. ESTALE: something else has its name, and nothing of that was removed. Of a directory
/// the contents are removed by its descriptor, and the name only if it names an empty directory then.
pub fn remove_object(dir: impl AsFd, name: &OsStr, object: ObjectId) -> Result<(), Errno> {
    let dir = dir.as_fd();
    let check = |found: Stat| {
        if ObjectId::of(&found) == object {
            Ok(found)
        } else {
            Err(Errno::STALE)
        }
    };
    let found = check(statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?)?;
    if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        return unlinkat(dir, name, AtFlags::empty());
    }
    let opened = open_dir_beneath(dir, Path::new(name))?;
    check(fstat(&opened)?)?;
    empty_dir(opened)?;
    unlinkat(dir, name, AtFlags::REMOVEDIR)
}

/// Visits what `name` names in `dir`, and all below where it is a directory, as far as it belongs to user `uid`: what
/// others put there, and what vanishes meanwhile, is not visited. Paths are relative to `dir`. What is told of each is what the
/// file system says now (`stat_now`).
pub fn visit_own(
    dir: impl AsFd,
    name: &OsStr,
    uid: u32,
    visit: &mut dyn FnMut(&Path, &Stat),
) -> Result<(), Errno> {
    visit_own_at(dir, name, Path::new(name), uid, visit)
}

/// statat(2) of a name whose attributes the kernel asks for before, also where it has some that it may still use: on a mount
/// those may be from before another host's write.
fn stat_now(dir: impl AsFd, name: &OsStr) -> Result<Stat, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW.union(AtFlags::STATX_FORCE_SYNC);
    // A container that does not know statx(2) has what stat(2) says.
    let _ = statx(dir.as_fd(), name, flags, StatxFlags::BASIC_STATS);
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

fn visit_own_at(
    dir: impl AsFd,
    name: &OsStr,
    path: &Path,
    uid: u32,
    visit: &mut dyn FnMut(&Path, &Stat),
) -> Result<(), Errno> {
    let found = match stat_now(dir.as_fd(), name) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?,
    };
    if found.st_uid != uid {
        return Ok(());
    }
    visit(path, &found);
    if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
        return Ok(());
    }
    let below = match open_beneath(dir, Path::new(name), LISTED, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        below => below?,
    };
    // Another directory, which another user put in its place.
    if fstat(&below)?.st_uid != uid {
        return Ok(());
    }
    for name in names_in(&below)? {
        visit_own_at(&below, &name, &path.join(&name), uid, visit)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    type Open = fn(&OwnedFd, &str, OFlags, Mode) -> Result<OwnedFd, Errno>;

    /// Both ways: that of the kernel, and that of kernels without openat2(2).
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
        openat(rustix::fs::CWD, path, LISTED, Mode::empty()).unwrap()
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
        let look =
            |name: &str| ObjectId::of(&statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).unwrap());
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
