//! Directory streams: getdents64(2) with cookies.
//!
//! A cookie is the kernel's `d_off`: the position after an entry. The stream keeps the last block of entries, so a
//! reader that takes few entries at a time costs one seek and one read for each block. A read from the start always
//! asks the kernel again, as rewinddir(3) does.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use parking_lot::Mutex;
use rustix::fs::{SeekFrom, seek};

use crate::{DirEntry, Errno, Kind, Result};

/// Size of a block, as in glibc's readdir(3): enough for some hundred entries.
const BLOCK_BYTES: usize = 32 << 10;

// Offsets of the fields of `struct linux_dirent64`: u64 d_ino, i64 d_off, u16 d_reclen, u8 d_type, then the name and a
// zero byte.
const INO_OFFSET: usize = 0;
const COOKIE_OFFSET: usize = 8;
const LEN_OFFSET: usize = 16;
const TYPE_OFFSET: usize = 18;
const NAME_OFFSET: usize = 19;

/// Cookie for a read from the start of the directory.
const FIRST_COOKIE: i64 = 0;

/// Position of the type bits in `st_mode`.
const FILE_TYPE_SHIFT: u32 = 12;

/// An open directory. Threads may share it, because each call has its own cookie.
pub struct DirStream {
    fd: OwnedFd,
    block: Mutex<Block>,
}

/// A block of entries, in the form of the kernel.
#[derive(Default)]
struct Block {
    bytes: Vec<u8>,
    /// Number of bytes in `bytes` that hold entries.
    filled: usize,
}

impl DirStream {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            block: Mutex::default(),
        }
    }

    /// Passes the entries of the directory after `cookie` (the position after an entry) to `sink` until it returns
    /// false or the directory ends. Uses the block of entries from the last read if it contains the position.
    pub(super) fn read(
        &self,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let mut block = self.block.lock();
        let mut offset = match block.offset_after(cookie) {
            Some(offset) if cookie != FIRST_COOKIE => offset,
            _ => {
                let position = u64::try_from(cookie).map_err(|_| Errno::INVAL)?;
                block.filled = 0;
                seek(&self.fd, SeekFrom::Start(position))?;
                0
            }
        };
        loop {
            while offset < block.filled {
                let (entry, next_offset) = block.entry(offset);
                if !sink(entry) {
                    return Ok(());
                }
                offset = next_offset;
            }
            let is_at_end = !block.fill(&self.fd)?;
            if is_at_end {
                return Ok(());
            }
            offset = 0;
        }
    }
}

impl Block {
    /// Reads the next block of directory entries from the kernel. Returns false at the end of the directory.
    fn fill(&mut self, fd: &OwnedFd) -> Result<bool> {
        self.filled = 0;
        self.bytes.resize(BLOCK_BYTES, 0);
        // SAFETY: the kernel writes at most `BLOCK_BYTES` into `bytes`, which has that length.
        let read_bytes = unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                fd.as_raw_fd(),
                self.bytes.as_mut_ptr(),
                BLOCK_BYTES,
            )
        };
        match usize::try_from(read_bytes) {
            Ok(filled) => self.filled = filled,
            Err(_) => return Err(super::last_errno()),
        }
        Ok(self.filled > 0)
    }

    /// Returns the offset of the entry after the one with `cookie`, if that one is in this block.
    fn offset_after(&self, cookie: i64) -> Option<usize> {
        let mut offset = 0;
        while offset < self.filled {
            let (entry, next_offset) = self.entry(offset);
            if entry.cookie == cookie {
                return Some(next_offset);
            }
            offset = next_offset;
        }
        None
    }

    /// Returns the entry at `offset`, and the offset of the next one.
    fn entry(&self, offset: usize) -> (DirEntry<'_>, usize) {
        let raw = &self.bytes[offset..self.filled];
        let len = usize::from(u16::from_ne_bytes([raw[LEN_OFFSET], raw[LEN_OFFSET + 1]]));
        let padded_name = &raw[NAME_OFFSET..len];
        let name_end = padded_name.iter().position(|&byte| byte == 0);
        let name = &padded_name[..name_end.unwrap_or(padded_name.len())];
        let entry = DirEntry {
            name: OsStr::from_bytes(name),
            ino: u64::from_ne_bytes(eight_bytes(raw, INO_OFFSET)),
            // `d_type` has the type bits of `st_mode`, shifted; 0 if the file system does not report them.
            kind: Kind::from_mode(u32::from(raw[TYPE_OFFSET]) << FILE_TYPE_SHIFT),
            cookie: i64::from_ne_bytes(eight_bytes(raw, COOKIE_OFFSET)),
        };
        (entry, offset + len)
    }
}

/// Returns the eight bytes at `offset`.
fn eight_bytes(raw: &[u8], offset: usize) -> [u8; 8] {
    raw[offset..offset + 8].try_into().expect("eight bytes")
}
