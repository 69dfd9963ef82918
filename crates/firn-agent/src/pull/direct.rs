//! Writes past the page cache.
//!
//! A copy that is synced as it ends gains nothing by the page cache: its bytes would be copied once more, into pages
//! that must be found first, by processors that the network needs. So the disk takes them from the buffers that they
//! arrived in, where the file system tells the alignment (statx(2), `STATX_DIOALIGN`). Local file systems do. Those of
//! servers, which answer a write later, and tmpfs do not, and are written to as ever.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use crate::ofi::Buffer;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

/// What a [`Buffer`] is aligned to: it is a whole number of pages of a mapping.
const ALIGNMENT_MAX: u32 = 4096;

/// A file that is open for such writes.
pub(crate) struct DirectFile {
    file: File,
    /// Alignment of offsets, lengths and addresses.
    alignment: usize,
}

impl DirectFile {
    /// Opens a file that is open once more. None: it is written to through the page cache.
    pub(crate) fn open(file: &File) -> Option<Self> {
        // The kernel goes from this link to the file itself, whatever its path leads to meanwhile.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::DIRECT;
        let file: File = rustix::fs::open(path, flags, Mode::empty()).ok()?.into();
        let found =
            rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
        let is_told = found.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
        let alignment = found.stx_dio_mem_align.max(found.stx_dio_offset_align);
        let is_possible = is_told && alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX;
        is_possible.then_some(Self {
            file,
            alignment: alignment as usize,
        })
    }

    /// Writes the first bytes of a buffer, and zeros up to the next multiple of the alignment.
    pub(crate) fn write(&self, buffer: &mut Buffer, bytes: usize, at: u64) -> io::Result<()> {
        let end = bytes.next_multiple_of(self.alignment);
        buffer[bytes..end].fill(0);
        self.file.write_all_at(&buffer[..end], at)
    }
}

#[cfg(test)]
mod tests {
    use crate::ofi::Pool;

    use super::*;

    #[test]
    fn what_is_left_of_the_last_sector_is_zeros() {
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
            let mut found = vec![1; 4096 + end + 1];
            let read = file.read_at(&mut found, 0).unwrap();
            assert_eq!(read, 4096 + end);
            assert!(found[4096..][..bytes].iter().all(|byte| *byte == 7));
            assert!(found[4096 + bytes..read].iter().all(|byte| *byte == 0));
        }
    }
}
