//! Identity of a *stub*, a file on tmpfs that stands for a file of the mount: inode number and generation, from
//! name_to_handle_at(2).
//!
//! tmpfs gives each inode a random generation of 32 bits. The generation distinguishes a stub from an earlier one with
//! the same inode number. An extended attribute would not identify a stub: programs could copy it, and tmpfs has none
//! before Linux 6.6.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::AtFlags;

/// Identity of an object on a tmpfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StubId {
    /// Inode number.
    pub inode: u64,
    /// Generation: distinguishes stubs that had the same inode number one after the other.
    pub generation: u32,
}

/// Length of a file handle of tmpfs. shmem_encode_fh (Linux, mm/shmem.c) stores three words: the generation, and the
/// lower and upper half of the number.
const HANDLE_BYTES: u32 = 12;
/// Type of a file handle of tmpfs.
const HANDLE_KIND: i32 = 1;

/// Words of the longest file handle of any file system.
const HANDLE_WORDS_MAX: usize = 32;

/// `struct file_handle` with room for the handle of any file system.
#[repr(C)]
struct RawHandle {
    bytes: u32,
    kind: i32,
    words: [u32; HANDLE_WORDS_MAX],
}

impl StubId {
    /// Returns the identity of the object on tmpfs at `path` in `dir`: its inode number and generation, from the file
    /// handle that the kernel makes for it.
    ///
    /// Does not follow a symbolic link. An empty path means `dir`. Fails with EOPNOTSUPP if the file system is not
    /// tmpfs, because only its handles have a known form.
    pub(crate) fn from_path(dir: BorrowedFd<'_>, path: &CStr) -> io::Result<Self> {
        let mut raw = RawHandle {
            bytes: size_of::<[u32; HANDLE_WORDS_MAX]>() as u32,
            kind: 0,
            words: [0; HANDLE_WORDS_MAX],
        };
        let mut mount_id = 0i32;
        let flags = if path.is_empty() {
            AtFlags::EMPTY_PATH.bits()
        } else {
            0
        };
        // SAFETY: the kernel writes at most `bytes` bytes after the two fields of `raw`, and the number in `mount_id`.
        let result = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                dir.as_raw_fd(),
                path.as_ptr(),
                &raw mut raw,
                &raw mut mount_id,
                flags,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        if raw.bytes != HANDLE_BYTES || raw.kind != HANDLE_KIND {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        // tmpfs stores the generation, and then the two halves of the inode number.
        let [generation, low, high, ..] = raw.words;
        Ok(Self {
            inode: u64::from(high) << 32 | u64::from(low),
            generation,
        })
    }

    /// Returns the identity of an open file.
    pub(crate) fn from_fd(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Self::from_path(fd, c"")
    }

    /// Opens the stub with this identity (inode number and generation) with `O_PATH`, whatever its name is.
    ///
    /// `tree` is any descriptor on the same tmpfs. Fails with ESTALE if the stub is gone, and with EPERM if this
    /// process lacks CAP_DAC_READ_SEARCH.
    pub(crate) fn open(self, tree: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let mut words = [0; HANDLE_WORDS_MAX];
        words[0] = self.generation;
        words[1] = self.inode as u32;
        words[2] = (self.inode >> 32) as u32;
        let mut raw = RawHandle {
            bytes: HANDLE_BYTES,
            kind: HANDLE_KIND,
            words,
        };
        let flags = libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        // SAFETY: the kernel reads the two fields of `raw`, and `bytes` bytes after them, which `raw` has.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                tree.as_raw_fd(),
                &raw mut raw,
                flags,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just returned this descriptor, and nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}

/// Formats an identity: for the log, and as the private name of the stub's file in the backing.
pub(crate) fn format_id(id: StubId) -> String {
    format!("{:x}-{:08x}", id.inode, id.generation)
}

/// Parses an identity that [`format_id`] formatted.
pub(crate) fn parse_id(text: &[u8]) -> Option<StubId> {
    let (inode, generation) = std::str::from_utf8(text).ok()?.split_once('-')?;
    Some(StubId {
        inode: u64::from_str_radix(inode, 16).ok()?,
        generation: u32::from_str_radix(generation, 16).ok()?,
    })
}
