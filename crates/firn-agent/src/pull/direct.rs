//! Writes past the page cache (`O_DIRECT`), for files that are copied from another host (a *pull*).
//!
//! Each file of a pull is synced at its end, so the page cache only costs time: the kernel must find pages and copy
//! each byte once more, on processors that the network needs. With `O_DIRECT` the disk reads the bytes from the buffers
//! in which they arrived.
//!
//! This module relies on `STATX_DIOALIGN` of statx(2) for the alignment that a file system requires. Local file systems
//! report it. tmpfs and most network file systems do not; their files are written through the page cache.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::ofi::Buffer;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

/// Alignment that each [`Buffer`] has, because it consists of whole pages of a mapping.
const ALIGNMENT_MAX: u32 = 4096;

/// A file that is open with `O_DIRECT`.
pub(crate) struct DirectFile {
    file: File,
    /// Each offset, length and address must be a multiple of this number of bytes.
    alignment: usize,
}

impl DirectFile {
    /// Opens an open file a second time, for writes past the page cache (`O_DIRECT`).
    ///
    /// Returns `None` if the file system has no such writes, does not report their alignment, or needs a larger
    /// alignment than a [`Buffer`] has. The caller then writes through the page cache.
    pub(crate) fn open(file: &File) -> Option<Self> {
        // This link leads to the open file itself, even if the file's name now leads to another file.
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::DIRECT;
        let direct_fd = rustix::fs::open(link, flags, Mode::empty()).ok()?;
        let requested = StatxFlags::DIOALIGN;
        let status = rustix::fs::statx(&direct_fd, c"", AtFlags::EMPTY_PATH, requested).ok()?;
        let is_reported = status.stx_mask & requested.bits() != 0;
        let alignment = status.stx_dio_mem_align.max(status.stx_dio_offset_align);
        // A file system without direct writes reports an alignment of 0, which is no power of two.
        if !is_reported || !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
            return None;
        }
        Some(Self {
            file: File::from(direct_fd),
            alignment: alignment as usize,
        })
    }

    /// Writes the first `bytes` of a buffer at `offset`, and then zeros up to the next multiple of the alignment.
    ///
    /// Only the last block of a file is not aligned. At the end of the pull, the zeros are cut off.
    pub(crate) fn write(&self, buffer: &mut Buffer, bytes: usize, offset: u64) -> io::Result<()> {
        let aligned_bytes = bytes.next_multiple_of(self.alignment);
        buffer[bytes..aligned_bytes].fill(0);
        self.file.write_all_at(&buffer[..aligned_bytes], offset)
    }
}

#[cfg(test)]
mod tests {
    use crate::ofi::Pool;

    use super::*;

    #[test]
    fn the_rest_of_the_last_sector_is_zeros() {
        let mut buffers = Pool::create(1, 1 << 20).unwrap();
        let buffer = &mut buffers[0];
        for (bytes, end) in [(1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)] {
            buffer.fill(7);
            let file = tempfile::tempfile().unwrap();
            let direct = DirectFile {
                file: file.try_clone().unwrap(),
                alignment: 512,
            };
            direct.write(buffer, bytes, 4096).unwrap();
            let mut content = vec![1; 4096 + end + 1];
            let read = file.read_at(&mut content, 0).unwrap();
            assert_eq!(read, 4096 + end);
            assert!(content[4096..][..bytes].iter().all(|byte| *byte == 7));
            assert!(content[4096 + bytes..read].iter().all(|byte| *byte == 0));
        }
    }
}
