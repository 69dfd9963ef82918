//! What is Firn's own in a backing or a backup: looked at before anything in it is believed.
//!
//! A user with permission to create names at the top of a backing (a directory of mode 1777, the project directory of a
//! group) may plant a `.firn` there, with a change log for the next mount to apply.
//!
//! Promises
//! * Every directory of Firn's own is opened by [`find_dir`] or [`dir`]: a directory and no link to one, of
//!   the effective user, closed to all others. Nothing is mended: a directory that was open to others may
//!   already hold what they put there.
//! * Every file of Firn's own is read by [`load`]: regular, of the effective user, and no longer than what Firn
//!   writes, before any memory is taken for it.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Access, Attr, Backing, Caller, Errno, Kind, RenameFlags};
use firn_trust::{Distrust, Expected, Facts};

/// The directory at the top of a backing that is Firn's own.
pub const TOP: &str = ".firn";
/// In it: logs of files that many hosts write.
pub const LOGS: &str = "log";
/// In it: files of a stub tree that have no name yet.
pub const STUBS: &str = "stub";

/// Bits of a mode that say what kind of object it is (`S_IFMT`).
const FILE_TYPE_BITS: u32 = 0o170_000;

/// Bytes of the largest file that is written or read: 2^30 are a redo record of some 5 × 10^6 objects.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// Why something of Firn's own could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnError {
    /// It is not as what is Firn's own must be.
    #[error(
        "{name} {why}; Firn reads nothing from it: mount as the user whose it is, or look at what it is and move it away"
    )]
    Distrusted {
        /// Its name, with the directories above it as far as they are known.
        name: String,
        /// What is wrong with it.
        why: Distrust,
    },
    /// It is longer than anything that Firn writes there.
    #[error(
        "{name} has {bytes} bytes, and Firn writes no more than {bytes_max}: look at what it is and move it away"
    )]
    TooLong {
        /// Its name, as above.
        name: String,
        /// Its size.
        bytes: u64,
        /// The most that it may have.
        bytes_max: u64,
    },
    /// An earlier version of Firn made it, and this one reads it no more.
    #[error(
        "{name} is of an earlier version of Firn: run `firn flatten --backing DIR --all` with that version first"
    )]
    EarlierVersion {
        /// Its name, as above.
        name: String,
    },
    /// The backing refused something.
    #[error("the backing failed: {0}")]
    Backing(#[source] Errno),
}

impl OwnError {
    /// Adds the directory to the error.
    #[must_use]
    pub fn below(self, dir: &str) -> Self {
        let full = |name: String| format!("{dir}/{name}");
        match self {
            Self::Distrusted { name, why } => Self::Distrusted {
                name: full(name),
                why,
            },
            Self::TooLong {
                name,
                bytes,
                bytes_max,
            } => Self::TooLong {
                name: full(name),
                bytes,
                bytes_max,
            },
            Self::EarlierVersion { name } => Self::EarlierVersion { name: full(name) },
            Self::Backing(errno) => Self::Backing(errno),
        }
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
                tracing::error!("{name:?} {why}; Firn reads nothing from it");
                Self::PERM
            }
            OwnError::TooLong {
                name,
                bytes,
                bytes_max,
            } => {
                tracing::error!(
                    "{name:?} has {bytes} bytes, and Firn writes no more than {bytes_max}"
                );
                Self::FBIG
            }
            OwnError::EarlierVersion { name } => {
                tracing::error!("{name:?} is of an earlier version of Firn: that one flattens it");
                Self::PROTONOSUPPORT
            }
        }
    }
}

/// Opens a directory of Firn's own; `None` where nothing has its name.
pub fn find_dir<B: Backing>(
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
pub fn must_find_dir<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<B::Inode, OwnError> {
    match find_dir(base, parent, name)? {
        Some((inode, _)) => Ok(inode),
        None => Err(Errno::NOENT.into()),
    }
}

/// Opens a directory of Firn's own, and creates it if nothing has its name. What is created in it inherits neither the group nor
/// the ACL of `parent`.
pub fn dir<B: Backing>(base: &B, parent: &B::Inode, name: &str) -> Result<B::Inode, OwnError> {
    let (inode, attr) = match base.mkdir(&own_caller(), parent, OsStr::new(name), 0o700) {
        Ok(made) => made,
        Err(Errno::EXIST) => return must_find_dir(base, parent, name),
        Err(errno) => return Err(errno.into()),
    };
    // A user that may rename in `parent` may have put another object there meanwhile: it is checked before it is changed.
    check(
        name,
        &Attr {
            mode: attr.mode & FILE_TYPE_BITS,
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

/// Finds a file of Firn's own; `None` where nothing has its name.
pub fn find_file<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<B::Inode>, OwnError> {
    let found = find(base, parent, OsStr::new(name))?;
    let Some((inode, attr)) = found else {
        return Ok(None);
    };
    // In a private directory a second name is what a crash left of ours.
    check(name, &Attr { nlink: 1, ..attr }, Expected::File)?;
    Ok(Some(inode))
}

/// Opens a file of Firn's own for reading and writing, made empty if nothing has its name.
pub fn open_or_create<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<B::File, OwnError> {
    loop {
        if let Some(inode) = find_file(base, parent, name)? {
            return Ok(base.open(&inode, Access::ReadWrite)?);
        }
        match base.create(&own_caller(), parent, OsStr::new(name), 0o600) {
            Ok((_, file, _)) => return Ok(file),
            // Another thread or host made it first.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The bytes of a file of Firn's own; `None` where nothing has its name.
pub fn load<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<Vec<u8>>, OwnError> {
    load_at_most(base, parent, name, FILE_BYTES_MAX)
}

/// The bytes of a file of Firn's own with at most `bytes_max` bytes.
pub fn load_at_most<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes_max: u64,
) -> Result<Option<Vec<u8>>, OwnError> {
    let (inode, attr) = match base.lookup(parent, OsStr::new(name)) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    // In a private directory a second name is what a crash left of ours.
    check(name, &Attr { nlink: 1, ..attr }, Expected::File)?;
    if attr.size > bytes_max {
        return Err(OwnError::TooLong {
            name: name.into(),
            bytes: attr.size,
            bytes_max,
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

/// The text of a symbolic link of Firn's own; `None` where nothing has its name. What it leads to is not looked at.
pub fn load_link<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<Vec<u8>>, OwnError> {
    let Some((inode, attr)) = find(base, parent, OsStr::new(name))? else {
        return Ok(None);
    };
    check(name, &attr, Expected::Symlink)?;
    Ok(Some(base.readlink(&inode)?))
}

fn check(name: &str, attr: &Attr, expected: Expected) -> Result<(), OwnError> {
    let facts = Facts {
        mode: attr.mode,
        uid: attr.uid,
        nlink: u64::from(attr.nlink),
    };
    facts
        .check(expected, own_caller().uid)
        .map_err(|why| OwnError::Distrusted {
            name: name.to_owned(),
            why,
        })
}

/// This process, for objects that are its own.
pub fn own_caller() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: 0,
    }
}

/// `Ok(None)` where there is nothing of that name.
pub fn find<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &OsStr,
) -> Result<Option<(B::Inode, firn_backing::Attr)>, Errno> {
    match base.lookup(parent, name) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// The name that something has before it is whole.
pub fn new_name(name: &str) -> String {
    format!("{name}.new")
}

/// Makes a file with these bytes, durable but for its name, which is not yet `name` ([`new_name`]).
pub fn write<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes: &[u8],
) -> Result<(), Errno> {
    // It would not be read again.
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(Errno::FBIG);
    }
    let new = new_name(name);
    let new = OsStr::new(&new);
    if find(base, parent, new)?.is_some() {
        base.unlink(parent, new)?;
    }
    let (_, file, _) = base.create(&own_caller(), parent, new, 0o600)?;
    write_all(base, &file, bytes, 0)?;
    base.sync(&file, false)
}

/// pwrite(2), until all is written.
pub fn write_all<B: Backing>(
    base: &B,
    file: &B::File,
    bytes: &[u8],
    offset: u64,
) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        done += match base.write_at(file, &[IoSlice::new(&bytes[done..])], offset + done as u64)? {
            0 => return Err(Errno::IO),
            count => count,
        };
    }
    Ok(())
}

/// Puts a file with these bytes in the place of `name`, durably.
pub fn store<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes: &[u8],
) -> Result<(), Errno> {
    put(base, parent, name, bytes)?;
    base.sync_dir(parent)
}

/// Puts a file with these bytes in the place of `name`. The next sync of the directory makes the name durable.
pub fn put<B: Backing>(base: &B, parent: &B::Inode, name: &str, bytes: &[u8]) -> Result<(), Errno> {
    write(base, parent, name, bytes)?;
    let new = new_name(name);
    base.rename(
        parent,
        OsStr::new(&new),
        parent,
        OsStr::new(name),
        RenameFlags::empty(),
    )
}

/// Changes a directory, by a file of this name that is made and removed: where listings lag, the next one that this process
/// reads has all that came before.
pub fn touch<B: Backing>(base: &B, dir: &B::Inode, name: &str) -> Result<(), Errno> {
    let name = OsStr::new(name);
    match base.create(&own_caller(), dir, name, 0o600) {
        // Another thread is at it, or one that died left it.
        Ok(_) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    match base.unlink(dir, name) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// A name, the inode number and the kind of what it leads to.
pub type Entry = (Vec<u8>, u64, Option<Kind>);

/// Names and kinds in a directory, but `.` and `..`.
pub fn list<B: Backing>(base: &B, dir: &B::Inode) -> Result<Vec<Entry>, Errno> {
    let mut names = Vec::new();
    base.read_dir(&base.open_dir(dir)?, 0, &mut |entry| {
        if entry.name != "." && entry.name != ".." {
            names.push((entry.name.as_bytes().to_vec(), entry.ino, entry.kind));
        }
        true
    })?;
    Ok(names)
}

/// Removes all that is below a directory.
pub fn clear<B: Backing>(base: &B, dir: &B::Inode) -> Result<(), Errno> {
    clear_but(base, dir, &|_| false)
}

/// Removes all below a directory, except the names in it that `stays` accepts.
pub fn clear_but<B: Backing>(
    base: &B,
    dir: &B::Inode,
    stays: &dyn Fn(&[u8]) -> bool,
) -> Result<(), Errno> {
    for (name, _, kind) in list(base, dir)?
        .into_iter()
        .filter(|(name, ..)| !stays(name))
    {
        let name = OsStr::from_bytes(&name);
        let kind = match kind {
            Some(kind) => kind,
            // A name that leads nowhere is no directory's.
            None => find(base, dir, name)?.map_or(Kind::File, |(_, attr)| attr.kind),
        };
        if kind == Kind::Dir {
            clear(base, &base.lookup(dir, name)?.0)?;
            base.rmdir(dir, name)?;
        } else {
            base.unlink(dir, name)?;
        }
    }
    Ok(())
}

/// Whether a stored path, relative to the backing, stays in it: components between single slashes, or nothing.
pub fn is_path(path: &[u8]) -> bool {
    path.is_empty()
        || path
            .split(|&byte| byte == b'/')
            .all(firn_trust::is_component)
}
