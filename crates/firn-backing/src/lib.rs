//! The backing: the directory, on any file system, that a mount serves and where its files end up.
//!
//! [`Backing`] is the only interface between Firn and the file system below it. [`dir`] implements it with a directory
//! and its descriptors. The crate `firn-sim` implements it with a simulated disk (faults, crashes, lost writes), and
//! has the conformance suite for all implementations.
//!
//! Promises of every implementation
//! * A [`Volume::Inode`] refers to an object, not to a name. It stays valid when the object is renamed and, while it is
//!   held, after the object's last name was removed.
//! * A call does one thing: it does not retry or cache, and it returns the kernel's errno.
//! * Any thread may make any call at any time. A call may never return, so no caller holds a lock of [`lock`].

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::unix::ffi::OsStrExt as _;

pub use data_ranges::{DataRanges, data_ranges};
pub use descriptors::raise_descriptor_limit;
pub use firn_format::durability::DurabilityLevel;
pub use rustix::io::Errno;

pub mod backoff;
mod calls;
mod data_ranges;
mod descriptors;
pub mod dir;
mod either;
mod layer;
pub mod lock;
pub mod parallel;
mod requests;
mod types;
pub mod unsynced;

pub use calls::*;
pub use dir::DirBacking;
pub use either::Either;
pub use requests::*;
pub use types::*;

/// Result of a call of a backing. The errno is the kernel's, unchanged.
pub type Result<T> = std::result::Result<T, Errno>;

/// Implements [`Files::write_parts`] with one call of `write` for each part. Stops at the first part that is not
/// written completely, and returns the number of bytes written. Returns an error only if no byte was written.
pub fn write_parts_singly(
    parts: &[DataPart<'_>],
    mut write: impl FnMut(&DataPart<'_>) -> Result<usize>,
) -> Result<u64> {
    let mut total_bytes = 0;
    for part in parts {
        let written_bytes = match write(part) {
            Ok(count) => count as u64,
            // As in write(2): the parts before the error count, and the next call returns the error.
            Err(_) if total_bytes > 0 => break,
            Err(error) => return Err(error),
        };
        total_bytes += written_bytes;
        if written_bytes < part.len() {
            break;
        }
    }
    Ok(total_bytes)
}

/// Implements [`Files::resize`] by `set_len`, which sets the length of a file. Suits a file of which only the caller
/// changes the length.
///
/// Returns true, as [`Files::resize`] does when the change is made. For [`Resize::Finish`] the length is set again, as
/// for [`Resize::To`].
pub fn resize_by_set_len(
    resize: Resize,
    len: impl FnOnce() -> Result<u64>,
    set_len: impl FnOnce(u64) -> Result<()>,
) -> Result<bool> {
    match resize {
        Resize::To(new_len) | Resize::Finish(new_len) => set_len(new_len)?,
        Resize::AtLeast(new_len) => {
            if len()? < new_len {
                set_len(new_len)?;
            }
        }
        // The length remains, but the kernel treats the call as a change of contents and removes privileges.
        Resize::Unchanged => set_len(len()?)?,
    }
    let is_changed = true;
    Ok(is_changed)
}

/// Maximum number of bytes that one call of [`copy_through_memory`] copies.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// Implements [`Files::copy_range`] for files that copy_file_range(2) cannot copy between: one read, then one write.
pub fn copy_through_memory<B: Backing>(
    backing: &B,
    from: &B::File,
    from_offset: u64,
    to: &B::File,
    to_offset: u64,
    len: u64,
) -> Result<u64> {
    let mut buffer = vec![0; len.min(COPY_BYTES_MAX) as usize];
    let read_bytes = backing.read_at(from, &mut buffer, from_offset)?;
    let data = [IoSlice::new(&buffer[..read_bytes])];
    let written_bytes = backing.write_at(to, &data, to_offset)?;
    Ok(written_bytes as u64)
}

/// Returns the path of a name in the directory with path `dir`, which is empty for the top.
pub fn join_path(dir: &[u8], name: &OsStr) -> Vec<u8> {
    let slash: &[u8] = if dir.is_empty() { b"" } else { b"/" };
    [dir, slash, name.as_bytes()].concat()
}

/// Returns whether `path` is `top` or below it. Both are relative to the root, and the root has the empty path.
pub fn is_below(path: &[u8], top: &[u8]) -> bool {
    if top.is_empty() {
        return true;
    }
    match path.strip_prefix(top) {
        Some(suffix) => suffix.is_empty() || suffix[0] == b'/',
        None => false,
    }
}
