//! A directory stream: getdents64(2) with cookies.
//!
//! A cookie is the kernel's `d_off`, the place after an entry. The last block that the kernel gave is kept. So a reader
//! that takes a directory in small helpings costs one seek and one read per block, not per helping. A read from the
//! start always asks the kernel anew (rewinddir(3)).

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use parking_lot::Mutex;
use rustix::fs::{SeekFrom, seek};

use crate::{DirEntry, Errno, Kind, Result};

/// As glibc's readdir(3): enough for some hundred entries.
const BLOCK_BYTES: usize = 32 << 10;

// Fields of `struct linux_dirent64`: u64 d_ino, i64 d_off, u16 d_reclen, u8 d_type, name, zero.
const OFF_AT: usize = 8;
const RECLEN_AT: usize = 16;
const TYPE_AT: usize = 18;
const NAME_AT: usize = 19;

/// An open directory. Threads may share it: each call states its own cookie.
pub struct DirStream {
    fd: OwnedFd,
    block: Mutex<Block>,
}

/// Entries as the kernel laid them out.
#[derive(Default)]
struct Block {
    bytes: Vec<u8>,
    /// Bytes of `bytes` that hold entries.
    filled: usize,
}

impl DirStream {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self {
            fd,
            block: Mutex::default(),
        }
    }

    pub(super) fn read(
        &self,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        let mut block = self.block.lock();
        let mut at = match block.after(cookie) {
            Some(at) if cookie != 0 => at,
            _ => {
                let offset = u64::try_from(cookie).map_err(|_| Errno::INVAL)?;
                block.filled = 0;
                seek(&self.fd, SeekFrom::Start(offset))?;
                0
            }
        };
        loop {
            while at < block.filled {
                let (entry, next) = block.entry(at);
                if !sink(entry) {
                    return Ok(());
                }
                at = next;
            }
            if !block.fill(&self.fd)? {
                return Ok(());
            }
            at = 0;
        }
    }
}

impl Block {
    /// Reads the next block; false at the end.
    fn fill(&mut self, fd: &OwnedFd) -> Result<bool> {
        self.filled = 0;
        self.bytes.resize(BLOCK_BYTES, 0);
        // SAFETY: the kernel writes at most `BLOCK_BYTES` into `bytes`, which has that length.
        let got = unsafe {
            libc::syscall(
                libc::SYS_getdents64,
                fd.as_raw_fd(),
                self.bytes.as_mut_ptr(),
                BLOCK_BYTES,
            )
        };
        match usize::try_from(got) {
            Ok(filled) => self.filled = filled,
            Err(_) => return Err(super::last_errno()),
        }
        Ok(self.filled > 0)
    }

    /// Where the entry after `cookie` starts, if the entry with that cookie is here.
    fn after(&self, cookie: i64) -> Option<usize> {
        let mut at = 0;
        while at < self.filled {
            let (entry, next) = self.entry(at);
            if entry.cookie == cookie {
                return Some(next);
            }
            at = next;
        }
        None
    }

    /// The entry at `at`, and where the next one starts.
    fn entry(&self, at: usize) -> (DirEntry<'_>, usize) {
        let raw = &self.bytes[at..self.filled];
        let len = usize::from(u16::from_ne_bytes([raw[RECLEN_AT], raw[RECLEN_AT + 1]]));
        let name = &raw[NAME_AT..len];
        let name = &name[..name.iter().position(|&b| b == 0).unwrap_or(name.len())];
        let entry = DirEntry {
            name: OsStr::from_bytes(name),
            ino: u64::from_ne_bytes(field(raw, 0)),
            // `d_type` is the type part of `st_mode`, shifted; 0 where the file system does not tell.
            kind: Kind::from_mode(u32::from(raw[TYPE_AT]) << 12),
            cookie: i64::from_ne_bytes(field(raw, OFF_AT)),
        };
        (entry, at + len)
    }
}

fn field(raw: &[u8], at: usize) -> [u8; 8] {
    raw[at..at + 8].try_into().expect("eight bytes")
}
