//! Writes to a file past the page cache, as firnd writes the spill file, to measure the rate of the device.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use anyhow::Context;
use rustix::fs::{FallocateFlags, fallocate};

/// Alignment of a buffer for direct writes that is sufficient for every device.
const ALIGN: usize = 4096;

/// Creates a file of `bytes` bytes with all its blocks allocated. This time is not measured.
pub(super) fn make(path: &Path, bytes: u64) -> anyhow::Result<File> {
    let mut options = OpenOptions::new();
    let file = options
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(path);
    let file = file.with_context(|| format!("cannot open {} for direct writes", path.display()))?;
    fallocate(file.as_fd(), FallocateFlags::empty(), 0, bytes)
        .with_context(|| format!("no room for {}", path.display()))?;
    Ok(file)
}

/// Makes `count` sequential writes of `bytes` bytes. `buffer` must have space for an aligned block of this size.
pub(super) fn write(file: &File, count: u64, bytes: u64, buffer: &[u8]) -> anyhow::Result<()> {
    let skip = buffer.as_ptr().align_offset(ALIGN);
    let block = &buffer[skip..][..bytes as usize];
    for index in 0..count {
        file.write_all_at(block, index * bytes)
            .context("a direct write failed")?;
    }
    Ok(())
}

/// Returns the size of a buffer that contains `bytes` aligned bytes.
pub(super) fn buffer_bytes(bytes: u64) -> u64 {
    bytes + ALIGN as u64
}
