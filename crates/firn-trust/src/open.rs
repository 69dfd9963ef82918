//! Opens and creates directories and files that Firn owns: they belong to this user and are closed to all others.

use std::ffi::CStr;
use std::fmt::Write;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, fstat, mkdirat, openat};
use rustix::io::Errno;

use crate::{Distrust, Expected, FileMetadata};

/// Error for an object of Firn that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A system call failed.
    #[error("{} cannot be opened: {error}", shown(path))]
    Io {
        /// Path of the object.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// The object fails the checks of owner, type and mode.
    #[error(
        "{} {why}; Firn reads nothing from it: inspect it, then remove it or choose another place",
        shown(path)
    )]
    Distrusted {
        /// Path of the object.
        path: PathBuf,
        /// The failed check.
        why: Distrust,
    },
    /// Other users may replace objects in the directory where Firn was to keep files.
    #[error(
        "{} is no place for files of Firn: {}{why}; {}",
        shown(place),
        prefix_for_dir(place, path),
        place_advice(why)
    )]
    Exposed {
        /// The directory in which Firn was to keep files.
        place: PathBuf,
        /// The directory that others may change: `place`, or a directory on the path to it.
        path: PathBuf,
        /// The failed check.
        why: Distrust,
    },
}

impl TrustError {
    /// Returns the errno value that fits the error best. Failed checks are EPERM.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Io { error, .. } => Errno::from_io_error(error).unwrap_or(Errno::IO),
            Self::Distrusted { .. } | Self::Exposed { .. } => Errno::PERM,
        }
    }

    /// Replaces the path in the error, for a caller that opened an object by its name and knows the whole path.
    pub fn at(self, path: &Path) -> Self {
        match self {
            Self::Io { error, .. } => Self::Io {
                path: path.to_owned(),
                error,
            },
            Self::Distrusted { why, .. } => Self::Distrusted {
                path: path.to_owned(),
                why,
            },
            exposed @ Self::Exposed { .. } => exposed,
        }
    }

    /// Returns whether the error is that the name does not exist.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Io { error, .. } if error.kind() == io::ErrorKind::NotFound)
    }
}

/// Flags to open a file. With O_NONBLOCK, a named pipe in place of the file does not block the open. The flag has no
/// effect on regular files.
const FILE_FLAGS: OFlags = OFlags::NOFOLLOW
    .union(OFlags::CLOEXEC)
    .union(OFlags::NONBLOCK);
/// Flags to open a directory for reading.
const DIR_FLAGS: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

/// Opens `path` as a private directory of the effective user. A relative path starts at `parent`.
pub fn open_private_dir(parent: impl AsFd, path: &Path) -> Result<OwnedFd, TrustError> {
    open_private_dir_of(parent, path, effective_user())
}

/// Does the work of [`open_private_dir`] for a directory of user `uid`. Root uses it to read directories of other
/// users.
pub fn open_private_dir_of(
    parent: impl AsFd,
    path: &Path,
    uid: u32,
) -> Result<OwnedFd, TrustError> {
    let failed = |errno: Errno| open_error(parent.as_fd(), path, errno, Expected::Directory, uid);
    let dir = openat(parent.as_fd(), path, DIR_FLAGS, Mode::empty()).map_err(failed)?;
    check(&dir, path, Expected::Directory, uid)?;
    Ok(dir)
}

/// Does the work of [`open_private_dir`], and creates the directory with mode 0700 if the name does not exist.
pub fn create_private_dir(parent: impl AsFd, path: &Path) -> Result<OwnedFd, TrustError> {
    match mkdirat(parent.as_fd(), path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => open_private_dir(parent, path),
        Err(errno) => Err(TrustError::Io {
            path: path.to_owned(),
            error: errno.into(),
        }),
    }
}

/// Opens an existing regular file that is private to the effective user. `flags` select the access.
///
/// The caller must not pass O_TRUNC, because nothing may be truncated before the file was checked.
pub fn open_private_file(
    parent: impl AsFd,
    path: &Path,
    flags: OFlags,
) -> Result<OwnedFd, TrustError> {
    assert!(
        !flags.intersects(OFlags::TRUNC.union(OFlags::CREATE)),
        "a file is looked at before it is changed"
    );
    let uid = effective_user();
    let failed = |errno: Errno| open_error(parent.as_fd(), path, errno, Expected::File, uid);
    let file =
        openat(parent.as_fd(), path, flags.union(FILE_FLAGS), Mode::empty()).map_err(failed)?;
    check(&file, path, Expected::File, uid)?;
    Ok(file)
}

/// Creates a new regular file with mode 0600, open with `flags`. Fails with EEXIST if the name exists, even as a
/// symbolic link.
pub fn create_private_file(
    parent: impl AsFd,
    path: &Path,
    flags: OFlags,
) -> Result<OwnedFd, TrustError> {
    let flags = flags
        .union(FILE_FLAGS)
        .union(OFlags::CREATE)
        .union(OFlags::EXCL);
    openat(parent.as_fd(), path, flags, Mode::RUSR.union(Mode::WUSR)).map_err(|errno| {
        TrustError::Io {
            path: path.to_owned(),
            error: errno.into(),
        }
    })
}

/// Error of [`open_dir_raw`] and [`open_file_raw`].
#[derive(Debug)]
pub enum RawError {
    /// A system call failed.
    Io(Errno),
    /// The object fails the checks. The caller must close the descriptor: the standard library would call close(3),
    /// which the preload library interposes.
    Distrusted(Distrust, OwnedFd),
}

/// Does the work of [`open_private_dir_of`] without memory allocation, for the preload library.
pub fn open_dir_raw(path: &CStr, uid: u32) -> Result<OwnedFd, RawError> {
    let dir = openat(rustix::fs::CWD, path, DIR_FLAGS, Mode::empty()).map_err(RawError::Io)?;
    check_raw(dir, Expected::Directory, uid)
}

/// Opens a private file of user `uid` for reading, like [`open_private_file`] but without memory allocation.
pub fn open_file_raw(parent: impl AsFd, name: &CStr, uid: u32) -> Result<OwnedFd, RawError> {
    let file = openat(
        parent,
        name,
        FILE_FLAGS.union(OFlags::RDONLY),
        Mode::empty(),
    )
    .map_err(RawError::Io)?;
    check_raw(file, Expected::File, uid)
}

/// Returns the descriptor if its object is private to user `uid`. Allocates no memory.
fn check_raw(fd: OwnedFd, expected: Expected, uid: u32) -> Result<OwnedFd, RawError> {
    let metadata = match fstat(&fd) {
        Ok(stat) => FileMetadata::from_stat(&stat),
        // fstat(2) of a descriptor that was just opened fails only on a damaged file system. Mode 0 fails the check.
        Err(_) => FileMetadata {
            mode: 0,
            uid,
            nlink: 0,
        },
    };
    match metadata.check(expected, uid) {
        Ok(()) => Ok(fd),
        Err(why) => Err(RawError::Distrusted(why, fd)),
    }
}

/// Checks that the object of a descriptor is private to user `uid`.
fn check(fd: &OwnedFd, path: &Path, expected: Expected, uid: u32) -> Result<(), TrustError> {
    let stat = fstat(fd).map_err(|errno| TrustError::Io {
        path: path.to_owned(),
        error: errno.into(),
    })?;
    FileMetadata::from_stat(&stat)
        .check(expected, uid)
        .map_err(|why| TrustError::Distrusted {
            path: path.to_owned(),
            why,
        })
}

fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the error of a failed open of an object that should be `expected` and belong to user `uid`. ELOOP and
/// ENOTDIR do not say what is wrong, so the function examines the object for a better message.
fn open_error(
    parent: impl AsFd,
    path: &Path,
    errno: Errno,
    expected: Expected,
    uid: u32,
) -> TrustError {
    let may_be_wrong_kind = matches!(
        errno,
        Errno::LOOP | Errno::NOTDIR | Errno::NXIO | Errno::ISDIR
    );
    if may_be_wrong_kind
        && let Ok(stat) = rustix::fs::statat(parent, path, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)
        && let Err(why) = FileMetadata::from_stat(&stat).check(expected, uid)
    {
        return TrustError::Distrusted {
            path: path.to_owned(),
            why,
        };
    }
    TrustError::Io {
        path: path.to_owned(),
        error: errno.into(),
    }
}

/// Returns the words before the failed check: the directory that others may change.
fn prefix_for_dir(place: &Path, path: &Path) -> String {
    if place == path {
        "it ".to_owned()
    } else {
        format!("{} ", shown(path))
    }
}

/// Returns what the user can do about a directory that others may change.
fn place_advice(why: &Distrust) -> &'static str {
    match why {
        Distrust::Replaceable { .. } => {
            "let only its owner write to it (chmod go-w) or set its sticky bit (chmod +t), or choose a place where only you and root may rename, as in a directory that you make in /tmp or /dev/shm"
        }
        _ => {
            "choose a place where all directories above belong to you or root, such as a directory that you make in /tmp or /dev/shm"
        }
    }
}

/// Returns a path as text for a message. Invalid UTF-8 is escaped here, because it would be lost later. Control
/// characters are replaced where the message is printed (`firn_format::quote`).
fn shown(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        for byte in chunk.invalid() {
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::CWD;

    use super::*;

    #[test]
    fn a_directory_is_made_and_found_again() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("own");
        create_private_dir(CWD, &path).unwrap();
        create_private_dir(CWD, &path).unwrap();
        open_private_dir(CWD, &path).unwrap();
        assert!(
            open_private_dir(CWD, &parent.path().join("none"))
                .unwrap_err()
                .is_missing()
        );
    }

    #[test]
    fn links_other_kinds_and_open_modes_are_refused_and_named() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        std::fs::create_dir(at("open")).unwrap();
        std::fs::set_permissions(at("open"), PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(at("file"), b"x").unwrap();
        create_private_dir(CWD, &at("own")).unwrap();
        symlink(at("own"), at("link")).unwrap();
        rustix::fs::mknodat(CWD, at("pipe"), rustix::fs::FileType::Fifo, Mode::RWXU, 0).unwrap();
        let told = |name: &str| open_private_dir(CWD, &at(name)).unwrap_err().to_string();
        assert!(told("open").contains("has mode 0755"), "{}", told("open"));
        assert!(
            told("file").contains("is a regular file instead of a directory"),
            "{}",
            told("file")
        );
        assert!(
            told("link").contains("is a symbolic link instead of a directory"),
            "{}",
            told("link")
        );
        let file = |name: &str| {
            open_private_file(CWD, &at(name), OFlags::RDONLY)
                .unwrap_err()
                .to_string()
        };
        assert!(file("pipe").contains("is a named pipe"), "{}", file("pipe"));
        assert!(
            file("link").contains("is a symbolic link"),
            "{}",
            file("link")
        );
        assert!(file("own").contains("is a directory"), "{}", file("own"));
    }

    #[test]
    fn a_file_with_a_second_name_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("own");
        create_private_file(CWD, &path, OFlags::RDWR).unwrap();
        open_private_file(CWD, &path, OFlags::RDWR).unwrap();
        std::fs::hard_link(&path, parent.path().join("other")).unwrap();
        let error = open_private_file(CWD, &path, OFlags::RDWR).unwrap_err();
        assert!(matches!(
            error,
            TrustError::Distrusted {
                why: Distrust::Links { found: 2 },
                ..
            }
        ));
    }
}
