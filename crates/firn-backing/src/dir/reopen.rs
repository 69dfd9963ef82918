//! From an inode to an open file.
//!
//! Promises
//! * A fifo, socket or device is never opened: that could block, or do things to a machine.
//! * A file whose mode denies its own owner is opened all the same where this process owns it. Recovery must write what
//!   the program wrote before it took the right away: open(2) checks rights only once. The mode is restored at once; an
//!   open in between sees the wider owner bits.

use std::os::fd::{AsFd, OwnedFd};

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags, chmod, open};

use super::owner::{AsCaller, own_ids};
use super::{attr::attr, proc::FdPath};
use crate::{Access, Attr, Errno, Kind, Result};

/// One at a time: a second one would take the widened mode for the file's own and restore that.
static WIDENING: Mutex<()> = Mutex::new(());

/// Opens the regular file behind `inode`.
pub(super) fn file(inode: impl AsFd, access: Access) -> Result<OwnedFd> {
    let inode = inode.as_fd();
    let now = attr(inode)?;
    match now.kind {
        Kind::File => {}
        Kind::Dir => return Err(Errno::ISDIR),
        Kind::Symlink => return Err(Errno::LOOP),
        Kind::Fifo | Kind::Socket | Kind::CharDevice | Kind::BlockDevice => {
            return Err(Errno::NXIO);
        }
    }
    let path = FdPath::of(inode);
    let flags = OFlags::CLOEXEC | OFlags::NOCTTY | access_flags(access);
    let plain = || open(path.as_c_str(), flags, Mode::empty());
    match plain() {
        Err(Errno::ACCESS) => denied(&path, &now, access, &plain),
        result => result,
    }
}

/// Opens the directory behind `inode` for reading.
pub(super) fn dir(inode: impl AsFd) -> Result<OwnedFd> {
    let flags = OFlags::CLOEXEC | OFlags::DIRECTORY | OFlags::RDONLY;
    open(FdPath::of(inode).as_c_str(), flags, Mode::empty())
}

/// Opens a directory for a sync, also if its mode denies reading to its owner.
pub(super) fn dir_to_sync(inode: impl AsFd) -> Result<OwnedFd> {
    let inode = inode.as_fd();
    match dir(inode) {
        Err(Errno::ACCESS) => denied(&FdPath::of(inode), &attr(inode)?, Access::Read, &|| {
            dir(inode)
        }),
        opened => opened,
    }
}

fn access_flags(access: Access) -> OFlags {
    match access {
        Access::Read => OFlags::RDONLY,
        Access::Write => OFlags::WRONLY,
        Access::ReadWrite => OFlags::RDWR,
    }
}

/// The second try after EACCES: root as the owner (a server that squashes root denies it what the owner
/// may do), an owner with wider mode bits.
fn denied(
    path: &FdPath,
    before: &Attr,
    access: Access,
    open: &dyn Fn() -> Result<OwnedFd>,
) -> Result<OwnedFd> {
    let (uid, _) = own_ids();
    if uid == 0 && before.uid != 0 {
        let _ids = AsCaller::new(before.uid, before.gid).ok_or(Errno::ACCESS)?;
        return open();
    }
    if before.uid != uid {
        return Err(Errno::ACCESS);
    }
    let _one_at_a_time = WIDENING.lock();
    let mode = before.mode & 0o7777;
    let needed = match access {
        Access::Read => 0o400,
        Access::Write => 0o200,
        Access::ReadWrite => 0o600,
    };
    chmod(path.as_c_str(), Mode::from_raw_mode(mode | needed))?;
    let opened = open();
    chmod(path.as_c_str(), Mode::from_raw_mode(mode))?;
    opened
}
