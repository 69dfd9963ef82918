//! Opens, checks, reads and writes the files and directories that Firn itself owns in a backing or a backup.
//!
//! A *backing* is the directory that a mount serves. Firn keeps its own files in `.firn/` at the top of it.
//!
//! A user that may create names at the top of a backing could plant a `.firn` there, with a change log for the next
//! mount to apply. Examples of such backings are a directory of mode 1777 and the project directory of a group. Firn
//! therefore checks each object before it uses the content.
//!
//! Promises
//! * Every directory that Firn owns is opened by [`find_dir`] or [`make_dir`]. It must be a directory and not a
//!   symbolic link, belong to the effective user, and be closed to all other users. A directory with wrong permissions
//!   is never repaired, because other users may already have put files into it.
//! * Every file that Firn owns is read by [`read_file`]. It must be a regular file of the effective user and no longer
//!   than Firn writes it. These checks come before memory is allocated for it.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt;

use firn_backing::{Access, Attr, Backing, Caller, Errno, Kind, RenameFlags};
use firn_trust::{Distrust, Expected, FileMetadata};

/// Name of Firn's directory at the top of a backing.
pub const TOP: &str = ".firn";
/// Name of the directory in `.firn/` for the logs of files that several hosts write.
pub const LOGS: &str = "log";
/// Name of the directory in `.firn/` for new files that have no name yet. They belong to a stub tree, a mount point
/// with empty files on tmpfs.
pub const STUBS: &str = "stub";

/// Bits of a mode that give the file type (`S_IFMT`).
const FILE_TYPE_BITS: u32 = 0o170_000;

/// Bits of a mode that give the permissions.
const PERMISSION_BITS: u32 = 0o7777;
/// Permissions of a directory that Firn creates for itself.
const DIR_MODE: u32 = 0o700;
/// Permissions of a file that Firn creates for itself.
pub(crate) const FILE_MODE: u32 = 0o600;

/// Maximum size in bytes of a file that Firn writes or reads. A redo record of 2^30 bytes describes some 5 × 10^6
/// objects.
pub const FILE_BYTES_MAX: u64 = 1 << 30;

/// Error of opening a file or directory that Firn owns.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OwnError {
    /// The object fails the checks of owner, type and mode.
    #[error(
        "{name} {why}; Firn reads nothing from it: mount as its owner, or check its content and move it away"
    )]
    Distrusted {
        /// Name of the object, with the directories above it as far as they are known.
        name: String,
        /// The failed check.
        why: Distrust,
    },
    /// The file is longer than any file that Firn writes there.
    #[error(
        "{name} has {bytes} bytes, but Firn writes at most {bytes_max} there: check its content and move it away"
    )]
    TooLong {
        /// Name of the file, with the directories above it as far as they are known.
        name: String,
        /// Size of the file in bytes.
        bytes: u64,
        /// Maximum size in bytes.
        bytes_max: u64,
    },
    /// An earlier version of Firn wrote the file, in a format that this version does not read.
    #[error(
        "{name} was written by an earlier version of Firn: run `firn flatten --backing DIR --all` with that version first"
    )]
    EarlierVersion {
        /// Name of the file, with the directories above it as far as they are known.
        name: String,
    },
    /// A call of the backing failed.
    #[error("the backing failed: {0}")]
    Backing(#[source] Errno),
}

impl OwnError {
    /// Returns the error with `dir/` before the name in it, so that the message shows the path. An error of the backing
    /// has no name and stays as it is.
    #[must_use]
    pub fn below(self, dir: &str) -> Self {
        let path_of = |name: String| format!("{dir}/{name}");
        match self {
            Self::Distrusted { name, why } => Self::Distrusted {
                name: path_of(name),
                why,
            },
            Self::TooLong {
                name,
                bytes,
                bytes_max,
            } => Self::TooLong {
                name: path_of(name),
                bytes,
                bytes_max,
            },
            Self::EarlierVersion { name } => Self::EarlierVersion {
                name: path_of(name),
            },
            Self::Backing(errno) => Self::Backing(errno),
        }
    }
}

impl From<Errno> for OwnError {
    fn from(errno: Errno) -> Self {
        Self::Backing(errno)
    }
}

/// Converts the error for callers of [`Backing`], which handle only errno values. The details go to the log.
impl From<OwnError> for Errno {
    /// Returns the errno for an error of a file or directory that Firn owns. Firn's own errors are logged, because an
    /// errno does not say what is wrong.
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
                    "{name:?} has {bytes} bytes, but Firn writes at most {bytes_max} there"
                );
                Self::FBIG
            }
            OwnError::EarlierVersion { name } => {
                tracing::error!(
                    "{name:?} was written by an earlier version of Firn: flatten it with that version"
                );
                Self::PROTONOSUPPORT
            }
        }
    }
}

/// Opens and checks a directory that Firn owns. Returns `None` if the name does not exist.
pub fn find_dir<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<(B::Inode, Attr)>, OwnError> {
    match base.lookup(parent, OsStr::new(name)) {
        Ok((inode, attr)) => {
            check_trust(name, &attr, Expected::Directory)?;
            Ok(Some((inode, attr)))
        }
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Opens and checks a directory that Firn owns and that must exist. Fails with ENOENT if the name does not exist.
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

/// Opens and checks a directory that Firn owns, and creates it if the name does not exist. Fails if the object of that
/// name is no directory, belongs to another user, or is open to others.
///
/// Objects in a created directory inherit neither the group nor the ACL of `parent`.
pub fn make_dir<B: Backing>(base: &B, parent: &B::Inode, name: &str) -> Result<B::Inode, OwnError> {
    let (inode, attr) = match base.mkdir(&own_caller(), parent, OsStr::new(name), DIR_MODE) {
        Ok(created) => created,
        Err(Errno::EXIST) => return must_find_dir(base, parent, name),
        Err(errno) => return Err(errno.into()),
    };
    // Check the new directory before changing it. A user that may rename in `parent` may have replaced it by another
    // object.
    let type_and_owner = Attr {
        mode: attr.mode & FILE_TYPE_BITS,
        ..attr
    };
    check_trust(name, &type_and_owner, Expected::Directory)?;
    if base.has_default_acl(&inode) {
        remove_inherited_acls(base, &inode)?;
    }
    if base.attr(&inode)?.mode & PERMISSION_BITS != DIR_MODE {
        base.set_mode(&inode, DIR_MODE)?;
    }
    check_trust(name, &base.attr(&inode)?, Expected::Directory)?;
    Ok(inode)
}

/// Removes the ACLs that a new directory has inherited from its parent.
fn remove_inherited_acls<B: Backing>(base: &B, dir: &B::Inode) -> Result<(), Errno> {
    for acl in ["system.posix_acl_default", "system.posix_acl_access"] {
        match base.remove_xattr(dir, OsStr::new(acl)) {
            Ok(()) | Err(Errno::NODATA) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Finds and checks a file that Firn owns. Returns `None` if the name does not exist.
pub fn find_file<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<B::Inode>, OwnError> {
    let Some((inode, attr)) = find(base, parent, OsStr::new(name))? else {
        return Ok(None);
    };
    check_file_trust(name, attr)?;
    Ok(Some(inode))
}

/// Opens a file that Firn owns for reading and writing. Creates it empty if the name does not exist. An existing file
/// must pass the checks of type and owner.
pub fn open_or_create<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<B::File, OwnError> {
    loop {
        if let Some(inode) = find_file(base, parent, name)? {
            return Ok(base.open(&inode, Access::ReadWrite)?);
        }
        match base.create(&own_caller(), parent, OsStr::new(name), FILE_MODE) {
            Ok((_, file, _)) => return Ok(file),
            // Another thread or host created the file first.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Reads a file that Firn owns, of at most [`FILE_BYTES_MAX`] bytes. Returns `None` if the name does not exist.
pub fn read_file<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<Vec<u8>>, OwnError> {
    read_file_at_most(base, parent, name, FILE_BYTES_MAX)
}

/// Reads a file that Firn owns, of at most `bytes_max` bytes. Type, owner and size are checked before memory is
/// allocated. Returns `None` if the name does not exist.
pub fn read_file_at_most<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes_max: u64,
) -> Result<Option<Vec<u8>>, OwnError> {
    let Some((inode, attr)) = find(base, parent, OsStr::new(name))? else {
        return Ok(None);
    };
    check_file_trust(name, attr)?;
    if attr.size > bytes_max {
        return Err(OwnError::TooLong {
            name: name.into(),
            bytes: attr.size,
            bytes_max,
        });
    }
    let file_len = usize::try_from(attr.size).map_err(|_| Errno::FBIG)?;
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(file_len)
        .map_err(|_| Errno::NOMEM)?;
    bytes.resize(file_len, 0);
    let file = base.open(&inode, Access::Read)?;
    let read_bytes = base.read_at(&file, &mut bytes, 0)?;
    bytes.truncate(read_bytes);
    Ok(Some(bytes))
}

/// Reads the target of a symbolic link that Firn owns, and does not follow it. Returns `None` if the name does not
/// exist.
pub fn read_link<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
) -> Result<Option<Vec<u8>>, OwnError> {
    let Some((inode, attr)) = find(base, parent, OsStr::new(name))? else {
        return Ok(None);
    };
    check_trust(name, &attr, Expected::Symlink)?;
    Ok(Some(base.readlink(&inode)?))
}

/// Checks type, owner and mode of an object that Firn owns. Fails with `Distrusted` if one of them is wrong.
fn check_trust(name: &str, attr: &Attr, expected: Expected) -> Result<(), OwnError> {
    let facts = FileMetadata {
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

/// Checks a regular file that Firn owns, except for its link count. In a private directory a second name can only be a
/// leftover of a crash of Firn.
fn check_file_trust(name: &str, attr: Attr) -> Result<(), OwnError> {
    check_trust(name, &Attr { nlink: 1, ..attr }, Expected::File)
}

/// Returns this process as the owner of objects that Firn creates for itself.
pub fn own_caller() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        pid: 0,
    }
}

/// Looks up `name` in `parent`. Returns `Ok(None)` if the name does not exist.
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

/// Returns whether `name` in `parent` leads to the object with this inode number.
pub(crate) fn name_refers_to<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    ino: u64,
) -> Result<bool, Errno> {
    let found = find(base, parent, OsStr::new(name))?;
    Ok(found.is_some_and(|(_, attr)| attr.ino == ino))
}

/// Returns the temporary name that a file has until it is complete.
pub fn new_name(name: &str) -> String {
    format!("{name}.new")
}

/// Creates a file with these bytes under the temporary name of `name` ([`new_name`]). The content is durable; the name
/// is not. Fails with FBIG if there are more than [`FILE_BYTES_MAX`] bytes.
pub fn write_new_file<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes: &[u8],
) -> Result<(), Errno> {
    // A longer file would be refused when it is read.
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(Errno::FBIG);
    }
    let temporary = new_name(name);
    let temporary_name = OsStr::new(&temporary);
    // An earlier process may have left an incomplete file.
    if find(base, parent, temporary_name)?.is_some() {
        base.unlink(parent, temporary_name)?;
    }
    let (_, file, _) = base.create(&own_caller(), parent, temporary_name, FILE_MODE)?;
    write_all(base, &file, bytes, 0)?;
    // Sync the length and the other metadata too, not only the data.
    let is_data_only = false;
    base.sync(&file, is_data_only)
}

/// Writes all bytes at `offset`, with as many pwrite(2) calls as necessary.
pub fn write_all<B: Backing>(
    base: &B,
    file: &B::File,
    bytes: &[u8],
    offset: u64,
) -> Result<(), Errno> {
    let mut written_bytes = 0;
    while written_bytes < bytes.len() {
        let remaining = IoSlice::new(&bytes[written_bytes..]);
        match base.write_at(file, &[remaining], offset + written_bytes as u64)? {
            // A write of no bytes would be repeated for ever.
            0 => return Err(Errno::IO),
            count => written_bytes += count,
        }
    }
    Ok(())
}

/// Replaces the file `name` by a file with these bytes, durably.
pub fn replace_file<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes: &[u8],
) -> Result<(), Errno> {
    replace_file_unsynced(base, parent, name, bytes)?;
    base.sync_dir(parent)
}

/// Replaces the file `name` by a file with these bytes. A crash leaves the old file or the new one. The content is
/// durable when this returns; the new name is durable after the next sync of the directory.
pub fn replace_file_unsynced<B: Backing>(
    base: &B,
    parent: &B::Inode,
    name: &str,
    bytes: &[u8],
) -> Result<(), Errno> {
    write_new_file(base, parent, name, bytes)?;
    let temporary_name = new_name(name);
    base.rename(
        parent,
        OsStr::new(&temporary_name),
        parent,
        OsStr::new(name),
        RenameFlags::empty(),
    )
}

/// Changes a directory by creating and removing the file `name` in it.
///
/// Some file systems return outdated listings. After this change, the next listing of this process includes all
/// earlier changes of other hosts.
pub fn force_fresh_listing<B: Backing>(base: &B, dir: &B::Inode, name: &str) -> Result<(), Errno> {
    let name = OsStr::new(name);
    match base.create(&own_caller(), dir, name, FILE_MODE) {
        // Another thread is doing the same, or a process that died left the file.
        Ok(_) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error),
    }
    match base.unlink(dir, name) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Directory entry: name, inode number, and file type if the file system reports it.
pub type Entry = (Vec<u8>, u64, Option<Kind>);

/// Lists the entries of a directory, without `.` and `..`.
pub fn list<B: Backing>(base: &B, dir: &B::Inode) -> Result<Vec<Entry>, Errno> {
    let mut entries = Vec::new();
    let open_dir = base.open_dir(dir)?;
    base.read_dir(&open_dir, 0, &mut |entry| {
        if entry.name != "." && entry.name != ".." {
            entries.push((entry.name.as_bytes().to_vec(), entry.ino, entry.kind));
        }
        // Continue with the next entry.
        true
    })?;
    Ok(entries)
}

/// Removes everything in a directory, recursively.
pub fn clear<B: Backing>(base: &B, dir: &B::Inode) -> Result<(), Errno> {
    clear_but(base, dir, &|_| false)
}

/// Removes the contents of `dir` recursively, except its entries whose names `is_kept` accepts. A kept directory
/// remains with its contents. Stops at the first error.
pub fn clear_but<B: Backing>(
    base: &B,
    dir: &B::Inode,
    is_kept: &dyn Fn(&[u8]) -> bool,
) -> Result<(), Errno> {
    for (name, _ino, kind) in list(base, dir)? {
        if is_kept(&name) {
            continue;
        }
        let name = OsStr::from_bytes(&name);
        let kind = match kind {
            Some(kind) => kind,
            // A name that has vanished is not a directory.
            None => find(base, dir, name)?.map_or(Kind::File, |(_, attr)| attr.kind),
        };
        if kind == Kind::Dir {
            let (subdir, _attr) = base.lookup(dir, name)?;
            clear(base, &subdir)?;
            // Close the directory before its removal.
            drop(subdir);
            base.rmdir(dir, name)?;
        } else {
            base.unlink(dir, name)?;
        }
    }
    Ok(())
}

/// Returns whether a stored path, relative to the backing, stays inside the backing.
///
/// A valid path is empty, or consists of components that are separated by single slashes.
pub fn is_path(path: &[u8]) -> bool {
    path.is_empty()
        || path
            .split(|&byte| byte == b'/')
            .all(firn_trust::is_component)
}
