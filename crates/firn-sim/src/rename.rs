//! renameat2(2): its checks in the kernel's order (fs/namei.c, `do_renameat2` and `vfs_rename`).

use std::ffi::OsStr;

use super::disk::{Disk, Inode, NewName};
use firn_backing::{Errno, RenameFlags, Result};

/// A directory and a name in it.
#[derive(Clone, Copy)]
pub(super) struct DirEntryName<'a> {
    /// Inode number of the directory.
    pub(super) dir: u64,
    pub(super) name: &'a OsStr,
}

impl<'a> DirEntryName<'a> {
    /// Returns the change that gives this name to an object, or removes it.
    fn set_to(self, ino: Option<u64>) -> NewName<'a> {
        NewName {
            dir: self.dir,
            name: self.name,
            ino,
        }
    }
}

/// Renames `from` to `to`, or exchanges the two, with the errors of renameat2(2). If a call has several errors, the
/// order of the checks decides which of them it returns.
pub(super) fn rename(
    disk: &mut Disk,
    from: DirEntryName<'_>,
    to: DirEntryName<'_>,
    flags: RenameFlags,
) -> Result<()> {
    check_flags_and_names(from.name, to.name, flags)?;
    let is_exchange = flags.contains(RenameFlags::EXCHANGE);
    let from_lookup = disk.find(from.dir, from.name);
    let to_lookup = disk.find(to.dir, to.name);
    if from_lookup == Err(Errno::NOTDIR) || to_lookup == Err(Errno::NOTDIR) {
        return Err(Errno::NOTDIR);
    }
    disk.check_not_read_only()?;
    let renamed = from_lookup?.ok_or(Errno::NOENT)?;
    let replaced = to_lookup?;
    check_objects(disk, from, to, renamed, replaced, flags)?;
    if replaced == Some(renamed) {
        return Ok(());
    }
    if disk.dir(to.dir)?.nlink == 0 {
        return Err(Errno::NOENT);
    }
    if is_exchange {
        disk.apply_name_changes(&[from.set_to(replaced), to.set_to(Some(renamed))]);
        return Ok(());
    }
    if let Some(replaced) = replaced {
        check_replaceable(disk.inode(renamed)?, disk.inode(replaced)?)?;
    }
    let whiteout = if flags.contains(RenameFlags::WHITEOUT) {
        Some(disk.whiteout())
    } else {
        None
    };
    disk.apply_name_changes(&[from.set_to(whiteout), to.set_to(Some(renamed))]);
    Ok(())
}

/// Checks whether the flags allow to replace an object, and whether a directory would come to lie in itself. `renamed`
/// and `replaced` are the inode numbers behind the two names.
fn check_objects(
    disk: &Disk,
    from: DirEntryName<'_>,
    to: DirEntryName<'_>,
    renamed: u64,
    replaced: Option<u64>,
    flags: RenameFlags,
) -> Result<()> {
    let is_exchange = flags.contains(RenameFlags::EXCHANGE);
    if replaced.is_some() && flags.contains(RenameFlags::NOREPLACE) {
        return Err(Errno::EXIST);
    }
    if replaced.is_none() && is_exchange {
        return Err(Errno::NOENT);
    }
    if disk.is_above(renamed, to.dir) {
        return Err(Errno::INVAL);
    }
    if let Some(replaced) = replaced
        && disk.is_above(replaced, from.dir)
    {
        return Err(if is_exchange {
            Errno::INVAL
        } else {
            Errno::NOTEMPTY
        });
    }
    Ok(())
}

/// Makes the checks that need no look-up.
fn check_flags_and_names(from: &OsStr, to: &OsStr, flags: RenameFlags) -> Result<()> {
    let has_unknown_flags = flags.bits() & !RenameFlags::all().bits() != 0;
    let excludes_exchange = RenameFlags::NOREPLACE | RenameFlags::WHITEOUT;
    let is_contradictory =
        flags.contains(RenameFlags::EXCHANGE) && flags.intersects(excludes_exchange);
    if has_unknown_flags || is_contradictory {
        return Err(Errno::INVAL);
    }
    let is_dots = |name: &OsStr| name == "." || name == "..";
    if is_dots(from) {
        return Err(Errno::BUSY);
    }
    if is_dots(to) {
        return Err(if flags.contains(RenameFlags::NOREPLACE) {
            Errno::EXIST
        } else {
            Errno::BUSY
        });
    }
    Ok(())
}

/// Checks whether the kinds of two objects allow one to replace the other.
fn check_replaceable(renamed: &Inode, replaced: &Inode) -> Result<()> {
    match (renamed.is_dir(), replaced.is_dir()) {
        (true, false) => Err(Errno::NOTDIR),
        (false, true) => Err(Errno::ISDIR),
        (true, true) if !replaced.entries.is_empty() => Err(Errno::NOTEMPTY),
        _ => Ok(()),
    }
}
