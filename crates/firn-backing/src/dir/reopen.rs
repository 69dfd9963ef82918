//! Reopening: opens the object of an inode (an `O_PATH` descriptor) for reading or writing.
//!
//! Promises
//! * Only regular files and directories are opened. Opening a FIFO, socket or device could block or have other effects.
//! * A file whose mode denies access to its owner is opened nevertheless if this process is its owner. A program may
//!   open the file, then remove the right, and still write: open(2) checks rights only once. Recovery must write these
//!   bytes.
//!
//! For such a file the owner's mode bits are widened for a moment. Known race: another program of this user may open
//! the file in that moment.

use std::os::fd::{AsFd, OwnedFd};

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, chmod, open};

use super::owner::{AsCaller, MODE_BITS, own_ids};
use super::{attr::attr, proc::FdPath};
use crate::{Access, Attr, Errno, Kind, Result};

/// Serializes the widening of modes, so that one thread does not take away the bits that another one needs.
static WIDENING: Mutex<()> = Mutex::new(());

/// Opens the regular file of `inode`. Fails with EISDIR, ELOOP or ENXIO for an object of another kind.
pub(super) fn open_file(inode: impl AsFd, access: Access) -> Result<OwnedFd> {
    let inode = inode.as_fd();
    let present_attr = attr(inode)?;
    match present_attr.kind {
        Kind::File => {}
        Kind::Dir => return Err(Errno::ISDIR),
        Kind::Symlink => return Err(Errno::LOOP),
        Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
            return Err(Errno::NXIO);
        }
    }
    let path = FdPath::from_fd(inode);
    let flags = OFlags::CLOEXEC | OFlags::NOCTTY | access_flags(access);
    let try_open = || open(path.as_c_str(), flags, Mode::empty());
    match try_open() {
        Err(Errno::ACCESS) => open_with_more_rights(&path, &present_attr, access, &try_open),
        result => result,
    }
}

/// Opens the directory of `inode` for reading.
pub(super) fn open_dir(inode: impl AsFd) -> Result<OwnedFd> {
    let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::RDONLY;
    open(FdPath::from_fd(inode).as_c_str(), flags, Mode::empty())
}

/// Opens a directory for a sync, even if its mode denies reading to its owner.
pub(super) fn open_dir_to_sync(inode: impl AsFd) -> Result<OwnedFd> {
    let inode = inode.as_fd();
    let try_open = || open_dir(inode);
    match try_open() {
        Err(Errno::ACCESS) => {
            let path = FdPath::from_fd(inode);
            open_with_more_rights(&path, &attr(inode)?, Access::Read, &try_open)
        }
        result => result,
    }
}

/// Returns the flags of open(2) for an access mode.
fn access_flags(access: Access) -> OFlags {
    match access {
        Access::Read => OFlags::RDONLY,
        Access::Write => OFlags::WRONLY,
        Access::ReadWrite => OFlags::RDWR,
    }
}

/// Tries to open a file or directory again after EACCES, with more rights: root takes the ids of the owner, and the
/// owner widens the mode. Fails with EACCES if this process is neither root nor the owner.
fn open_with_more_rights(
    path: &FdPath,
    attr: &Attr,
    access: Access,
    try_open: &dyn Fn() -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    let (uid, _) = own_ids();
    let is_root = uid == 0;
    if is_root && attr.uid != 0 {
        // A server that squashes root may deny root an access that it allows the owner.
        let _ids = AsCaller::new(attr.uid, attr.gid).ok_or(Errno::ACCESS)?;
        return try_open();
    }
    if attr.uid != uid {
        return Err(Errno::ACCESS);
    }
    open_with_widened_mode(path, access, try_open)
}

/// Opens a file or directory of this process's user after adding the mode bits that `access` needs. Restores the mode
/// afterwards. If the mode cannot be restored, fails even if the file was opened.
fn open_with_widened_mode(
    path: &FdPath,
    access: Access,
    try_open: &dyn Fn() -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    let _widening = WIDENING.lock();
    // Another thread may have restored the mode since the caller read it.
    let stat = rustix::fs::stat(path.as_c_str())?;
    let mode = Mode::from_raw_mode(stat.st_mode & MODE_BITS);
    let needed_bits = match access {
        Access::Read => Mode::RUSR,
        Access::Write => Mode::WUSR,
        Access::ReadWrite => Mode::RUSR | Mode::WUSR,
    };
    chmod(path.as_c_str(), mode | needed_bits)?;
    let result = try_open();
    chmod(path.as_c_str(), mode)?;
    result
}
