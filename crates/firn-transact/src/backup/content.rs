//! Copies the bytes of one file of a transaction from the backing (the directory below the mount) to the backup, or
//! back.
//!
//! Holes are not copied. A checksum over the copied bytes is stored in the *manifest*, the backup's list of files and
//! changes. It is compared when the bytes are copied back.
//!
//! Promise: an error says whether the backing or the backup failed.

use std::ffi::OsStr;
use std::ops::ControlFlow;

use firn_backing::{Access, Backing, Errno, data_ranges};

use super::mirror::{backup_failed, unlink_if_exists};
use crate::change_log::BackupContent;
use crate::copy::{CopyError, OpenFile, copy_blocks};
use crate::error::{BackupError, ReviveError};
use crate::staging;

/// Stands for no failure: [`copy_to_backup`] was stopped, or the file became shorter.
pub(super) const COPY_STOPPED: Errno = Errno::AGAIN;

/// Copies the file `inode` of a transaction in the backing `base` to the new file `name` in the directory `dir` of the
/// backup `store`. Returns its size, ranges and checksum for the manifest, the backup's list of files. Holes are not
/// copied.
///
/// Calls `may_continue` before each block is written. If the result is false or the file became shorter meanwhile, the
/// copy stops and fails with [`COPY_STOPPED`] as an error of the backing.
pub(super) fn copy_to_backup<B: Backing>(
    base: &B,
    inode: &B::Inode,
    store: &B,
    dir: &B::Inode,
    name: &str,
    may_continue: impl Fn() -> bool,
) -> Result<BackupContent, BackupError> {
    let staged_file = base.open(inode, Access::Read)?;
    let size = base.attr_of_file(&staged_file)?.size;
    unlink_if_exists(store, dir, OsStr::new(name)).map_err(backup_failed)?;
    let (_, backup_file, _) = store
        .create(&staging::daemon_caller(), dir, OsStr::new(name), 0o600)
        .map_err(backup_failed)?;
    let source = OpenFile {
        backing: base,
        file: &staged_file,
    };
    let target = OpenFile {
        backing: store,
        file: &backup_file,
    };
    let mut ranges = Vec::new();
    let mut crc = 0;
    let mut visit = |bytes: &[u8]| {
        crc = crc32c::crc32c_append(crc, bytes);
        if may_continue() {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    for range in data_ranges(base, &staged_file, 0..size) {
        copy_blocks(source, target, range.clone(), &mut visit).map_err(|error| match error {
            CopyError::Read(errno) => errno.into(),
            CopyError::Write(errno) => backup_failed(errno),
            CopyError::EndsAt(_) | CopyError::Stopped => COPY_STOPPED.into(),
        })?;
        ranges.push((range.start, range.end));
    }
    Ok(BackupContent {
        file: name.to_owned(),
        size,
        ranges,
        crc,
    })
}

/// The directory of one transaction in a backup, to read from.
pub(super) struct BackupDir<'a, B: Backing> {
    pub(super) store: &'a B,
    pub(super) dir: &'a B::Inode,
}

/// Fills the empty file `staged_file` of a transaction, in the backing `base`, with the bytes that `content` describes
/// in the backup.
///
/// Fails with `Damaged` if the backup does not have the file, or has other bytes than were copied to it.
pub(super) fn copy_from_backup<B: Backing>(
    backup: &BackupDir<'_, B>,
    content: &BackupContent,
    base: &B,
    staged_file: &B::File,
) -> Result<(), ReviveError> {
    let damaged = || ReviveError::Damaged {
        file: content.file.clone(),
    };
    let store = backup.store;
    let found =
        staging::find(store, backup.dir, OsStr::new(&content.file)).map_err(backup_failed)?;
    let Some((inode, _)) = found else {
        return Err(damaged());
    };
    let backup_file = store.open(&inode, Access::Read).map_err(backup_failed)?;
    base.set_len(staged_file, content.size)?;
    let source = OpenFile {
        backing: store,
        file: &backup_file,
    };
    let target = OpenFile {
        backing: base,
        file: staged_file,
    };
    let mut crc = 0;
    let mut visit = |bytes: &[u8]| {
        crc = crc32c::crc32c_append(crc, bytes);
        ControlFlow::Continue(())
    };
    for &(start, end) in &content.ranges {
        copy_blocks(source, target, start..end, &mut visit).map_err(|error| match error {
            CopyError::Read(errno) => backup_failed(errno).into(),
            CopyError::Write(errno) => errno.into(),
            CopyError::EndsAt(_) | CopyError::Stopped => damaged(),
        })?;
    }
    if crc == content.crc {
        Ok(())
    } else {
        Err(damaged())
    }
}
