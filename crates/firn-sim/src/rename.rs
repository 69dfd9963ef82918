//! renameat2(2): its checks in the kernel's order (fs/namei.c, `do_renameat2` and `vfs_rename`).

use std::ffi::OsStr;

use super::disk::{Disk, Inode};
use firn_backing::{Errno, RenameFlags, Result};

/// A directory and a name in it.
pub(super) type Place<'a> = (u64, &'a OsStr);

pub(super) fn rename(disk: &mut Disk, from: Place, to: Place, flags: RenameFlags) -> Result<()> {
    let exchange = flags.contains(RenameFlags::EXCHANGE);
    if flags.bits() & !RenameFlags::all().bits() != 0
        || exchange && flags.intersects(RenameFlags::NOREPLACE | RenameFlags::WHITEOUT)
    {
        return Err(Errno::INVAL);
    }
    let dots = |name: &OsStr| name == "." || name == "..";
    if dots(from.1) {
        return Err(Errno::BUSY);
    }
    if dots(to.1) {
        return Err(if flags.contains(RenameFlags::NOREPLACE) {
            Errno::EXIST
        } else {
            Errno::BUSY
        });
    }
    let old = disk.find(from.0, from.1);
    let new = disk.find(to.0, to.1);
    if let (Err(Errno::NOTDIR), _) | (_, Err(Errno::NOTDIR)) = (&old, &new) {
        return Err(Errno::NOTDIR);
    }
    disk.writable()?;
    let old = old?.ok_or(Errno::NOENT)?;
    let new = new?;
    if new.is_some() && flags.contains(RenameFlags::NOREPLACE) {
        return Err(Errno::EXIST);
    }
    if new.is_none() && exchange {
        return Err(Errno::NOENT);
    }
    if disk.is_above(old, to.0) {
        return Err(Errno::INVAL);
    }
    if let Some(new) = new
        && disk.is_above(new, from.0)
    {
        return Err(if exchange {
            Errno::INVAL
        } else {
            Errno::NOTEMPTY
        });
    }
    if new == Some(old) {
        return Ok(());
    }
    if disk.dir(to.0)?.nlink == 0 {
        return Err(Errno::NOENT);
    }
    if exchange {
        disk.change(&[(from.0, from.1, new), (to.0, to.1, Some(old))]);
        return Ok(());
    }
    if let Some(new) = new {
        may_replace(disk.inode(old)?, disk.inode(new)?)?;
    }
    let left = if flags.contains(RenameFlags::WHITEOUT) {
        Some(disk.whiteout())
    } else {
        None
    };
    disk.change(&[(from.0, from.1, left), (to.0, to.1, Some(old))]);
    Ok(())
}

fn may_replace(old: &Inode, new: &Inode) -> Result<()> {
    match (old.is_dir(), new.is_dir()) {
        (true, false) => Err(Errno::NOTDIR),
        (false, true) => Err(Errno::ISDIR),
        (true, true) if !new.entries.is_empty() => Err(Errno::NOTEMPTY),
        _ => Ok(()),
    }
}
