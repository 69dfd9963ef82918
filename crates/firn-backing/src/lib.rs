//! The backing: the directory, on any file system, where files end up.
//!
//! [`Backing`] is the one seam between Firn and the world below it. [`dir`] is the real one (a
//! directory and its descriptors). The crate `firn-sim` has its simulated twin (faults, crashes, lost
//! writes), and the conformance suite that runs over both.
//!
//! Promises of every implementation
//! * A [`Volume::Inode`] refers to the object, not to a name: it stays valid across renames and, while
//!   it is held, after the last unlink.
//! * Calls are plain: no retries, no caching, the kernel's errno as it is.
//! * All calls may be made from any thread at once, and each may take for ever: no caller holds a lock of [`lock`].

use std::io::IoSlice;

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

/// Result of a backing call: the kernel's errno, untouched.
pub type Result<T> = std::result::Result<T, Errno>;

/// [`Files::write_parts`] where each part is a pwritev(2) of its own.
pub fn write_parts_singly(
    parts: &[DataPart<'_>],
    mut write: impl FnMut(&DataPart<'_>) -> Result<usize>,
) -> Result<u64> {
    let mut written = 0;
    for part in parts {
        let count = match write(part) {
            Ok(count) => count as u64,
            // As write(2): what was written before the fault is good; the next call returns the fault.
            Err(_) if written > 0 => break,
            Err(error) => return Err(error),
        };
        written += count;
        if count < part.len() {
            break;
        }
    }
    Ok(written)
}

/// [`Files::resize`] of a file whose length only the caller changes: ftruncate(2), where the length is to be another
/// one.
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
        Resize::Unchanged => set_len(len()?)?,
    }
    Ok(true)
}

/// Most bytes that [`copy_through_memory`] copies.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// [`Files::copy_range`] for files that no copy_file_range(2) joins: reads, then writes, once.
pub fn copy_through_memory<B: Backing>(
    backing: &B,
    from: &B::File,
    from_offset: u64,
    to: &B::File,
    to_offset: u64,
    len: u64,
) -> Result<u64> {
    let mut buf = vec![0; len.min(COPY_BYTES_MAX) as usize];
    let count = backing.read_at(from, &mut buf, from_offset)?;
    let written = backing.write_at(to, &[IoSlice::new(&buf[..count])], to_offset)?;
    Ok(written as u64)
}

/// Whether a path relative to the root is `top` or below it; of the root, whose path is empty, all are.
pub fn is_below(path: &[u8], top: &[u8]) -> bool {
    top.is_empty()
        || path
            .strip_prefix(top)
            .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}
