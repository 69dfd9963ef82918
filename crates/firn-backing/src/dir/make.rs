//! Creation of new objects: the steps for each kind of object.
//!
//! [`create_for_caller`] carries out the steps, so that the object belongs to the caller: it creates the object, and
//! sets the owner if needed. After an error in the second step it removes the object. The first step removes what it
//! has made itself.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Gid, Mode, OFlags, Uid};

use super::attr::attr;
use super::owner::{CreationSteps, FirstTry, MODE_BITS, NewOwner, create_for_caller, has_ids_of};
use super::proc::FdPath;
use super::steering::{NewFile, Steering, open_new};
use super::{DirFile, object_at};
use crate::{Access, Attr, Caller, Kind, LaneIndex, Result};

/// A new regular file as the system call opened it.
struct OpenNewFile {
    fd: OwnedFd,
    /// The lane (I/O server) that has the file.
    lane: LaneIndex,
}

/// A new regular file, open.
pub(super) struct CreatedFile {
    pub(super) inode: OwnedFd,
    pub(super) file: DirFile,
    pub(super) attr: Attr,
    pub(super) lane: LaneIndex,
}

/// Creates and opens a regular file for `caller`. `steering`, if there is one, chooses the lane (one I/O server): by
/// the turn of `new_file`, or by its name and the lane of its directory.
pub(super) fn create_file(
    caller: &Caller,
    new_file: &NewFile<'_>,
    steering: Option<&dyn Steering>,
) -> Result<CreatedFile> {
    let NewFile { parent, name, .. } = *new_file;
    let remove_file = || remove_new(parent, name, AtFlags::empty());
    // `create_for_caller` decides which of these steps to run, and with the ids of which user.
    let steps = CreationSteps {
        create: &|mode| {
            let new_file = open_new_file(caller, new_file, mode & MODE_BITS, steering)?;
            let attr = attr(&new_file.fd).inspect_err(|_| remove_file())?;
            Ok((new_file, attr))
        },
        set_owner: &|new_file: &OpenNewFile, owner| set_owner(&new_file.fd, owner),
        remove: &remove_file,
    };
    let (OpenNewFile { fd, lane }, attr) = create_for_caller(
        caller,
        new_file.mode,
        || is_setgid(parent),
        FirstTry::AsCaller,
        &steps,
    )?;
    // The inode is opened from the open file: the name may lead to another object by now. No `O_NOFOLLOW`, which would
    // stop at the link in /proc itself.
    let path = FdPath::from_fd(&fd);
    let inode_flags = OFlags::PATH | OFlags::CLOEXEC;
    let inode =
        fs::open(path.as_c_str(), inode_flags, Mode::empty()).inspect_err(|_| remove_file())?;
    let file = DirFile {
        fd,
        access: Access::ReadWrite,
        key: (attr.dev, attr.ino),
        lane,
    };
    Ok(CreatedFile {
        inode,
        file,
        attr,
        lane,
    })
}

/// Creates and opens a file with these mode bits. `steering`, if there is one, chooses its lane (its I/O server);
/// otherwise the lane is the first.
fn open_new_file(
    caller: &Caller,
    new_file: &NewFile<'_>,
    mode: u32,
    steering: Option<&dyn Steering>,
) -> Result<OpenNewFile> {
    let Some(steering) = steering else {
        let fd = open_new(new_file.parent, new_file.name, mode, OFlags::empty())?;
        let lane = LaneIndex::FIRST;
        return Ok(OpenNewFile { fd, lane });
    };
    // If this thread has the ids of the caller now, the steering is told so. Otherwise the owner is set later.
    let (fd, lane) = steering.create(&NewFile {
        mode,
        caller: has_ids_of(caller).then_some(caller),
        ..*new_file
    })?;
    Ok(OpenNewFile { fd, lane })
}

/// The mode bits that mkdir(2) uses: permissions and the sticky bit.
const MKDIR_MODE_BITS: u32 = 0o1777;

/// Creates an object other than a regular file, so that it belongs to `caller`. Returns a descriptor of the object.
/// After an error no object remains. `call` is the system call that makes the object; it takes the mode bits.
pub(super) fn create_object(
    caller: &Caller,
    parent: BorrowedFd<'_>,
    name: &OsStr,
    kind: Kind,
    mode: u32,
    call: &dyn Fn(u32) -> Result<()>,
) -> Result<(OwnedFd, Attr)> {
    let remove_flags = if kind == Kind::Dir {
        AtFlags::REMOVEDIR
    } else {
        AtFlags::empty()
    };
    let remove_object = || remove_new(parent, name, remove_flags);
    let steps = CreationSteps {
        create: &|mode| {
            call(mode)?;
            // If the object cannot be opened, the call fails, so the object is removed again.
            let inode = object_at(parent, name).inspect_err(|_| remove_object())?;
            let attr = attr(&inode).inspect_err(|_| remove_object())?;
            Ok((inode, attr))
        },
        set_owner: &|inode: &OwnedFd, owner| set_owner(inode, owner),
        remove: &remove_object,
    };
    // mkdir(2) ignores set-id bits, and a symbolic link has no mode: no bits to restore after a change of owner.
    let mode = match kind {
        Kind::Dir => mode & MKDIR_MODE_BITS,
        Kind::Symlink => 0,
        _ => mode,
    };
    // The caller's ids have no capability to make a device file.
    let first_try = if matches!(kind, Kind::CharDevice | Kind::BlockDevice) {
        FirstTry::AsProcess
    } else {
        FirstTry::AsCaller
    };
    create_for_caller(caller, mode, || is_setgid(parent), first_try, &steps)
}

/// Returns whether a directory has the setgid bit.
fn is_setgid(parent: BorrowedFd<'_>) -> Result<bool> {
    Ok(attr(parent)?.mode & libc::S_ISGID != 0)
}

/// Sets owner, group and mode of a new object. Sets the mode last, because a change of owner clears set-id bits.
fn set_owner(fd: impl AsFd, owner: NewOwner) -> Result<Attr> {
    let fd = fd.as_fd();
    let uid = Some(Uid::from_raw(owner.uid));
    let gid = owner.gid.map(Gid::from_raw);
    fs::chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH)?;
    if let Some(mode) = owner.mode {
        fs::chmod(FdPath::from_fd(fd).as_c_str(), Mode::from_raw_mode(mode))?;
    }
    attr(fd)
}

/// Removes a new object again. An error here is dropped: the caller reports the error that led here.
fn remove_new(parent: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) {
    let _ = fs::unlinkat(parent, name, flags);
}
