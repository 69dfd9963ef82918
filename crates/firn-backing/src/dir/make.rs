//! Makes new objects: the steps of each kind. [`owner`](super::owner) puts the steps in order.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{self, AtFlags, Gid, Mode, OFlags, Uid};

use super::attr::attr;
use super::owner::{Steps, has_ids_of, make_for};
use super::proc::FdPath;
use super::steering::{NewFile, Steering, open_new};
use super::{DirFile, object_at};
use crate::{Access, Attr, Caller, Kind, LaneIndex, Result};

/// A new regular file, open.
pub(super) struct MadeFile {
    pub(super) inode: OwnedFd,
    pub(super) file: DirFile,
    pub(super) attr: Attr,
    pub(super) lane: LaneIndex,
}

/// Creates and opens a regular file. `steering`, if there is one, comes with the directory's lane and chooses the
/// server: by `turn`, or by the name and that lane.
pub(super) fn file(
    caller: &Caller,
    parent: BorrowedFd<'_>,
    name: &OsStr,
    mode: u32,
    steering: Option<(&dyn Steering, LaneIndex)>,
    turn: Option<u64>,
) -> Result<MadeFile> {
    let steps = Steps {
        make: &|mode| {
            let mode = mode & 0o7777;
            let (fd, lane) = match steering {
                None => {
                    let file = open_new(parent, name, mode, OFlags::empty())?;
                    (file, LaneIndex::FIRST)
                }
                Some((steering, parent_lane)) => steering.create(&NewFile {
                    parent,
                    parent_lane,
                    name,
                    mode,
                    turn,
                    caller: has_ids_of(caller).then_some(caller),
                })?,
            };
            let attr = attr(&fd).inspect_err(|_| undo(parent, name, AtFlags::empty()))?;
            Ok(((fd, lane), attr))
        },
        give: &|(fd, _): &(OwnedFd, LaneIndex), uid, gid, mode| give(fd, uid, gid, mode),
        undo: &|| undo(parent, name, AtFlags::empty()),
    };
    let ((fd, lane), attr) = make_for(caller, mode, || is_setgid(parent), false, &steps)?;
    // The inode is opened from the open file: the name may lead to another object by now. No `O_NOFOLLOW`, which would stop
    // at the link in /proc itself.
    let path = FdPath::of(&fd);
    let inode = fs::open(
        path.as_c_str(),
        OFlags::PATH | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .inspect_err(|_| undo(parent, name, AtFlags::empty()))?;
    let file = DirFile {
        fd,
        access: Access::ReadWrite,
        key: (attr.dev, attr.ino),
        lane,
    };
    Ok(MadeFile {
        inode,
        file,
        attr,
        lane,
    })
}

/// Makes any other object with the system call `call`, which takes the mode.
pub(super) fn object(
    caller: &Caller,
    parent: BorrowedFd<'_>,
    name: &OsStr,
    kind: Kind,
    mode: u32,
    call: &dyn Fn(u32) -> Result<()>,
) -> Result<(OwnedFd, Attr)> {
    let flags = if kind == Kind::Dir {
        AtFlags::REMOVEDIR
    } else {
        AtFlags::empty()
    };
    let steps = Steps {
        make: &|mode| {
            call(mode)?;
            // If the object cannot be opened, the call fails, so the object is removed again.
            let inode = object_at(parent, name).inspect_err(|_| undo(parent, name, flags))?;
            let attr = attr(&inode).inspect_err(|_| undo(parent, name, flags))?;
            Ok((inode, attr))
        },
        give: &|inode: &OwnedFd, uid, gid, mode| give(inode, uid, gid, mode),
        undo: &|| undo(parent, name, flags),
    };
    // mkdir(2) ignores set-id bits, and a symbolic link has no mode: no bits to restore after a change of owner.
    let mode = match kind {
        Kind::Dir => mode & 0o1777,
        Kind::Symlink => 0,
        _ => mode,
    };
    let is_device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
    make_for(caller, mode, || is_setgid(parent), is_device, &steps)
}

/// Whether a directory has the setgid bit.
fn is_setgid(parent: BorrowedFd<'_>) -> Result<bool> {
    Ok(attr(parent)?.mode & libc::S_ISGID != 0)
}

/// Sets owner, group and mode of a new object. Sets the mode last, because a change of owner clears set-id bits.
fn give(fd: impl AsFd, uid: u32, gid: Option<u32>, mode: Option<u32>) -> Result<Attr> {
    let fd = fd.as_fd();
    let uid = Some(Uid::from_raw(uid));
    let gid = gid.map(Gid::from_raw);
    fs::chownat(fd, c"", uid, gid, AtFlags::EMPTY_PATH)?;
    if let Some(mode) = mode {
        fs::chmod(FdPath::of(fd).as_c_str(), Mode::from_raw_mode(mode))?;
    }
    attr(fd)
}

/// Removes the new object again. An error here is dropped: the caller reports the error that led here.
fn undo(parent: BorrowedFd<'_>, name: &OsStr, flags: AtFlags) {
    let _ = fs::unlinkat(parent, name, flags);
}
