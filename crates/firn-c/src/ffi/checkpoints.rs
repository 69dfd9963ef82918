//! The functions of the C interface that list the checkpoints of a directory.
//!
//! A checkpoint is *whole* (complete) if its files are closed and no open transaction may have changed it. It is *cut*
//! (incomplete) if the writer of a file was killed before it closed the file. Its durability *level* says where its
//! bytes are: in memory only, in the backing, or synced there. firn.h documents the numbers below.

use std::ffi::{CString, OsStr, OsString, c_char, c_int};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use firn_client::checkpoints::{Checkpoint, CheckpointState, Directory};
use firn_format::step::step_of;

use super::state::level_number;
use super::{CPath, NO_PLACE, OutPlace, guarded};
use crate::error::Error;

// States of a checkpoint. `WRITTEN` means open for writing. `UNKNOWN` means that there is no mount to ask, and
// `UNREADABLE` that the checkpoint cannot be examined.
const WHOLE: u32 = 0;
const WRITTEN: u32 = 1;
const CUT: u32 = 2;
const IN_TRANSACTION: u32 = 3;
const EMPTY: u32 = 4;
const UNKNOWN: u32 = 5;
const UNREADABLE: u32 = 6;
const NO_LEVEL: u32 = u32::MAX;

/// `struct firn_checkpoint`.
#[derive(Debug)]
#[repr(C)]
pub struct CheckpointItem {
    /// Name in the directory.
    name: *const c_char,
    /// Training step in the name.
    step: u64,
    /// Size of all its files together.
    bytes: u64,
    /// Number of its files.
    files: u64,
    /// Newest modification time in it, in seconds since 1970.
    modified_s: i64,
    /// Nanoseconds of that time.
    modified_ns: u32,
    /// One of the states above.
    state: u32,
    /// Lowest durability level of its files, or `NO_LEVEL`.
    level: u32,
    /// 1 for a directory, 0 for a file.
    directory: u32,
    /// Always 0.
    reserved: [u64; 2],
}

const _: () = assert!(size_of::<CheckpointItem>() == 72);

/// `struct firn_checkpoint_list`.
pub struct CheckpointListHandle {
    /// The checkpoints, the last modified first.
    items: Vec<CheckpointItem>,
    /// The strings to which the `name` fields of the items point.
    names: Vec<CString>,
}

impl CheckpointListHandle {
    /// Lists the checkpoints of a directory that have a training step in their name, for C. A checkpoint that cannot be
    /// examined is listed as unreadable. Fails if the directory cannot be read.
    fn list(directory: &Directory) -> Result<Self, Error> {
        let listing = directory.list_checkpoints()?;
        let mut list = Self {
            items: Vec::new(),
            names: Vec::new(),
        };
        for checkpoint in listing.checkpoints {
            if let Some(item) = item_from_checkpoint(&checkpoint) {
                list.add(checkpoint.name, item);
            }
        }
        for (name, _object, _error) in listing.failed {
            if let Some(item) = unreadable_item(&name) {
                list.add(name, item);
            }
        }
        Ok(list)
    }

    /// Adds an item whose `name` is not set yet.
    fn add(&mut self, name: OsString, item: CheckpointItem) {
        // A name in a directory contains no zero byte.
        let name = CString::new(name.into_vec()).unwrap_or_default();
        self.items.push(CheckpointItem {
            // The bytes of the string remain at this address when the string value moves.
            name: name.as_ptr(),
            ..item
        });
        self.names.push(name);
    }
}

/// Converts a checkpoint for C. Returns `None` if the checkpoint has no training step in its name. The field `name` is
/// null: the list owns that string, and the caller sets the pointer to it.
fn item_from_checkpoint(checkpoint: &Checkpoint) -> Option<CheckpointItem> {
    let step = checkpoint.step?;
    let (modified_s, modified_ns) = checkpoint.modified;
    Some(CheckpointItem {
        name: std::ptr::null(),
        step,
        bytes: checkpoint.bytes,
        files: checkpoint.files,
        modified_s,
        modified_ns: modified_ns as u32,
        state: match checkpoint.wholeness {
            CheckpointState::Whole => WHOLE,
            CheckpointState::Written => WRITTEN,
            CheckpointState::Cut => CUT,
            CheckpointState::InTransaction => IN_TRANSACTION,
            CheckpointState::Empty => EMPTY,
            CheckpointState::Unknown => UNKNOWN,
        },
        level: checkpoint
            .level
            .map_or(NO_LEVEL, |level| level_number(level) as u32),
        directory: checkpoint.is_dir.into(),
        reserved: [0; 2],
    })
}

/// Makes the item of a checkpoint that could not be examined. Returns `None` if its name has no step.
fn unreadable_item(name: &OsStr) -> Option<CheckpointItem> {
    Some(CheckpointItem {
        name: std::ptr::null(),
        step: step_of(name)?,
        bytes: 0,
        files: 0,
        modified_s: 0,
        modified_ns: 0,
        state: UNREADABLE,
        level: NO_LEVEL,
        directory: 0,
        reserved: [0; 2],
    })
}

/// `firn_list_checkpoints`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_list_checkpoints(
    directory: CPath<'_>,
    to: OutPlace<'_, Box<CheckpointListHandle>>,
) -> c_int {
    guarded(|| {
        let place = to.ok_or(Error::Argument(NO_PLACE))?;
        let path = directory.path()?;
        let directory = Directory::find(path)?;
        if !directory.is_mounted()
            && let Some(arena) = directory.find_left_arena()
        {
            return Err(Error::NotMounted {
                path: path.as_os_str().as_bytes().to_owned(),
                arena,
            });
        }
        place.write(Box::new(CheckpointListHandle::list(&directory)?));
        Ok(())
    })
}

/// `firn_checkpoint_list_count`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_checkpoint_list_count(list: Option<&CheckpointListHandle>) -> usize {
    list.map_or(0, |list| list.items.len())
}

/// `firn_checkpoint_list_items`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_checkpoint_list_items(
    list: Option<&CheckpointListHandle>,
) -> *const CheckpointItem {
    list.map_or(std::ptr::null(), |list| list.items.as_ptr())
}

/// `firn_checkpoint_list_free`.
#[unsafe(no_mangle)]
pub extern "C" fn firn_checkpoint_list_free(list: Option<Box<CheckpointListHandle>>) {
    guarded(|| {
        drop(list);
        Ok(())
    });
}
