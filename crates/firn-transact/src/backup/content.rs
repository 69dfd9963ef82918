//! The bytes of one staged file: out of a backing into its backup, and back.

use std::ffi::OsStr;
use std::ops::ControlFlow;

use firn_backing::{Access, Backing, Errno, data_ranges};

use super::mirror::{backup_failed, unlink_if_there};
use crate::change_log::BackupContent;
use crate::copy::{CopyError, OpenFile, copy_blocks};
use crate::error::{BackupError, ReviveError};
use crate::staging;

/// Copies a staged file. Fails with EAGAIN of the backing if it changed, or `go_on` returned false.
pub(super) fn copy_out<B: Backing>(
    base: &B,
    inode: &B::Inode,
    store: &B,
    dir: &B::Inode,
    name: &str,
    go_on: impl Fn() -> bool,
) -> Result<BackupContent, BackupError> {
    let from = base.open(inode, Access::Read)?;
    let size = base.attr_of_file(&from)?.size;
    unlink_if_there(store, dir, OsStr::new(name)).map_err(backup_failed)?;
    let (_, to, _) = store
        .create(&staging::own(), dir, OsStr::new(name), 0o600)
        .map_err(backup_failed)?;
    let mut ranges = Vec::new();
    let mut crc = 0;
    let mut visit = |bytes: &[u8]| {
        crc = crc32c::crc32c_append(crc, bytes);
        if go_on() {
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

/// Fills an empty file with what the backup, the directory `from` of a store, has of it.
pub(super) fn copy_in<B: Backing>(
    (store, dir): (&B, &B::Inode),
    content: &BackupContent,
    base: &B,
    to: &B::File,
) -> Result<(), ReviveError> {
    let damaged = || ReviveError::Damaged {
        file: content.file.clone(),
    };
    let found = staging::find(store, dir, OsStr::new(&content.file)).map_err(backup_failed)?;
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
