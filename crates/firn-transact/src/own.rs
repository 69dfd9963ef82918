//! What is Firn's own in a backing or a backup: looked at before anything in it is believed.
//!
//! Who may create names at the top of a backing (a directory of mode 1777, the project directory of a group) may
//! plant a `.firn` there, with a redo record for the next mount to carry out.
//!
//! Promises
//! * Every directory of Firn's own is opened by [`find_dir`] or [`dir`]: a directory and no link to one, of
//!   the effective user, closed to everybody else. Nothing is mended: a directory that was open to others may
//!   already hold what they put there.
//! * Every file of Firn's own is read by [`load`]: regular, of the effective user, and no longer than what Firn
//!   writes, before any memory is taken for it.

use std::ffi::OsStr;

use firn_backing::{Access, Attr, Backing, Errno};
use firn_trust::{Distrust, Expected, Facts};

use crate::scope::HeldError;
use crate::staging::own;

/// Bytes of the largest file that is written or read: 2^30 are a redo record of some 5 × 10^6 objects.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 30;

/// Why something of Firn's own could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnError {
    /// It is not as what is Firn's own must be.
    Distrusted {
        /// Its name, with the directories above it as far as they are known.
        name: String,
        /// What is wrong with it.
        why: Distrust,
    },
    /// It is longer than anything that Firn writes there.
    TooLong {
        /// Its name, as above.
        name: String,
        /// Its size.
        bytes: u64,
    },
    /// The backing refused something.
    Backing(Errno),
}

impl OwnError {
    /// The same, with the directory that it happened in.
    pub(crate) fn below(self, dir: &str) -> Self {
        let full = |name: String| format!("{dir}/{name}");
        match self {
            Self::Distrusted { name, why } => Self::Distrusted {
                name: full(name),
                why,
            },
            Self::TooLong { name, bytes } => Self::TooLong {
                name: full(name),
                bytes,
            },
            Self::Backing(errno) => Self::Backing(errno),
        }
    }

    /// What it means that it happened in a backup.
    pub(crate) fn of_backup(self) -> HeldError {
        match self.below("the backup") {
            Self::Backing(source) => HeldError::Backup { source },
            error => error.into(),
        }
    }
}

impl std::fmt::Display for OwnError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        HeldError::from(self.clone()).fmt(f)
    }
}

impl From<Errno> for OwnError {
    fn from(errno: Errno) -> Self {
        Self::Backing(errno)
    }
}

/// For calls of [`Backing`], which know errnos only. What was found is in the log.
impl From<OwnError> for Errno {
    fn from(error: OwnError) -> Self {
        match error {
            OwnError::Backing(errno) => errno,
            OwnError::Distrusted { name, why } => {
                tracing::error!("{name:?} {why}; nothing in it is believed");
                Self::PERM
            }
            OwnError::TooLong { name, bytes } => {
                tracing::error!(
                    "{name:?} has {bytes} bytes, and Firn writes no more than {FILE_BYTES_MAX}"
                );
                Self::FBIG
            }
        }
    }
}

/// Opens a directory of Firn's own; `None` where nothing has its name.
pub(crate) fn find_dir<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<(B::Inode, Attr)>, OwnError> {
    match base.lookup(parent, OsStr::new(name)) {
        Ok((inode, attr)) => {
            check(name, &attr, Expected::Directory)?;
            Ok(Some((inode, attr)))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens a directory of Firn's own that is there; ENOENT where nothing has its name.
pub(crate) fn must_find_dir<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<B::Inode, OwnError> {
    match find_dir(base, parent, name)? {
        Some((inode, _)) => Ok(inode),
        None => Err(Errno::NOENT.into()),
    }
}

/// Opens a directory of Firn's own, made if nothing has its name. It hands nothing of the group and the ACL of
/// `parent` on to what is made in it.
pub(crate) fn dir<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<B::Inode, OwnError> {
    let (inode, attr) = match base.mkdir(&own(), parent, OsStr::new(name), 0o700) {
        Ok(made) => made,
        Err(Errno::EXIST) => return must_find_dir(base, parent, name),
        Err(errno) => return Err(errno.into()),
    };
    // Whoever may rename in `parent` may have put something else there meanwhile, which is not to be changed.
    check(
        name,
        &Attr {
            mode: attr.mode & libc::S_IFMT,
            ..attr
        },
        Expected::Directory,
    )?;
    if base.has_default_acl(&inode) {
        for acl in ["system.posix_acl_default", "system.posix_acl_access"] {
            match base.remove_xattr(&inode, OsStr::new(acl)) {
                Ok(()) | Err(Errno::NODATA) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    if base.attr(&inode)?.mode & 0o7777 != 0o700 {
        base.set_mode(&inode, 0o700)?;
    }
    check(name, &base.attr(&inode)?, Expected::Directory)?;
    Ok(inode)
}

/// The bytes of a file of Firn's own; `None` where nothing has its name.
pub(crate) fn load<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<Vec<u8>>, OwnError> {
    let (inode, attr) = match base.lookup(parent, OsStr::new(name)) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    // In a private directory a second name is what a crash left of ours.
    check(name, &Attr { nlink: 1, ..attr }, Expected::File)?;
    if attr.size > FILE_BYTES_MAX {
        return Err(OwnError::TooLong {
            name: name.into(),
            bytes: attr.size,
        });
    }
    let size = usize::try_from(attr.size).map_err(|_| Errno::FBIG)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| Errno::NOMEM)?;
    bytes.resize(size, 0);
    let count = base.read_at(&base.open(&inode, Access::Read)?, &mut bytes, 0)?;
    bytes.truncate(count);
    Ok(Some(bytes))
}

fn check(name: &str, attr: &Attr, expected: Expected) -> Result<(), OwnError> {
    let facts = Facts {
        mode: attr.mode,
        uid: attr.uid,
        nlink: u64::from(attr.nlink),
    };
    facts
        .check(expected, own().uid)
        .map_err(|why| OwnError::Distrusted {
            name: name.to_owned(),
            why,
        })
}

/// Whether a stored path, relative to the backing, stays in it: components between single slashes, or nothing.
pub(crate) fn is_path(path: &[u8]) -> bool {
    path.is_empty()
        || path
            .split(|&byte| byte == b'/')
            .all(firn_trust::is_component)
}
