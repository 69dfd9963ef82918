//! Copies the bytes of one staged file from the backing to the backup, or back.
//!
//! Holes are not copied. A checksum over the copied bytes is stored in the manifest and compared when they are copied
//! back.
//!
//! Promise: an error says whether the backing or the backup failed.

use std::ffi::OsStr;
use std::ops::ControlFlow;

use firn_backing::{Access, Backing, Errno, data_ranges};

use super::mirror::{backup_failed, unlink_if_there};
use crate::change_log::BackupContent;
use crate::copy::{CopyError, OpenFile, copy_blocks};
use crate::error::{BackupError, ReviveError};
use crate::staging;

/// Copies the staged file `inode` of the backing `base` to the new file `name` in the directory `dir` of the backup
/// `store`. Returns what the manifest says of the bytes.
///
/// Calls `goes_on` after each block. Fails with EAGAIN of the backing if `goes_on` returns false or the file became
/// shorter meanwhile.
pub(super) fn copy_to_backup<B: Backing>(
    base: &B,
    inode: &B::Inode,
    store: &B,
    dir: &B::Inode,
    name: &str,
    goes_on: impl Fn() -> bool,
) -> Result<BackupContent, BackupError> {
    let from = base.open(inode, Access::Read)?;
    let size = base.attr_of_file(&from)?.size;
    unlink_if_there(store, dir, OsStr::new(name)).map_err(backup_failed)?;
    let (_, to, _) = store
        .create(&staging::firnd_caller(), dir, OsStr::new(name), 0o600)
        .map_err(backup_failed)?;
    let mut ranges = Vec::new();
    let mut crc = 0;
    let mut visit = |bytes: &[u8]| {
        crc = crc32c::crc32c_append(crc, bytes);
        if goes_on() {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    for data in data_ranges(base, &from, 0..size) {
        let from = OpenFile {
            backing: base,
            file: &from,
        };
        let to = OpenFile {
            backing: store,
            file: &to,
        };
        copy_blocks(from, to, data.clone(), &mut visit).map_err(|error| match error {
            CopyError::Read(errno) => errno.into(),
            CopyError::Write(errno) => backup_failed(errno),
            CopyError::EndsAt(_) | CopyError::Stopped => Errno::AGAIN.into(),
        })?;
        ranges.push((data.start, data.end));
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

/// Fills the empty file `to` of the backing `base` with bytes of the backup.
///
/// Fails with `Damaged` if the backup does not have the file, or has other bytes than were copied to it.
pub(super) fn copy_from_backup<B: Backing>(
    backup: &BackupDir<'_, B>,
    content: &BackupContent,
    base: &B,
    to: &B::File,
) -> Result<(), ReviveError> {
    let damaged = || ReviveError::Damaged {
        file: content.file.clone(),
    };
    let store = backup.store;
    let found =
        staging::find(store, backup.dir, OsStr::new(&content.file)).map_err(backup_failed)?;
    let (inode, _) = found.ok_or_else(damaged)?;
    let from = store.open(&inode, Access::Read).map_err(backup_failed)?;
    base.set_len(to, content.size)?;
    let mut crc = 0;
    let mut visit = |bytes: &[u8]| {
        crc = crc32c::crc32c_append(crc, bytes);
        ControlFlow::Continue(())
    };
    for &(start, end) in &content.ranges {
        let from = OpenFile {
            backing: store,
            file: &from,
        };
        let to = OpenFile {
            backing: base,
            file: to,
        };
        copy_blocks(from, to, start..end, &mut visit).map_err(|error| match error {
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
