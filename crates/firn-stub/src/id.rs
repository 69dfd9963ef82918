//! Which stub is which: inode number and generation, from name_to_handle_at(2).
//!
//! tmpfs gives each inode a random generation of 32 bits, so a number that is used again is told from the
//! stub that had it before. No extended attribute is needed, which programs could copy and kernels before
//! 6.6 do not have on tmpfs.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::AtFlags;

/// Identity of an object on a tmpfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StubId {
    /// Inode number.
    pub inode: u64,
    /// Tells two users of one number apart.
    pub generation: u32,
}

/// What shmem_encode_fh (Linux, mm/shmem.c) stores: generation, low and high half of the number.
const HANDLE_BYTES: u32 = 12;
const HANDLE_KIND: i32 = 1;

#[repr(C)]
struct RawHandle {
    bytes: u32,
    kind: i32,
    words: [u32; 32],
}

impl StubId {
    /// Id of what `path` leads to from `dir`, without following a final symlink; an empty path means `dir` itself.
    pub(crate) fn at(dir: BorrowedFd<'_>, path: &CStr) -> io::Result<Self> {
        let mut raw = RawHandle {
            bytes: size_of::<[u32; 32]>() as u32,
            kind: 0,
            words: [0; 32],
        };
        let mut mount = 0i32;
        let flags = if path.is_empty() {
            AtFlags::EMPTY_PATH.bits()
        } else {
            0
        };
        // SAFETY: the kernel writes at most `bytes` bytes behind the head of `raw`, and one number.
        let result = unsafe {
            libc::syscall(
                libc::SYS_name_to_handle_at,
                dir.as_raw_fd(),
                path.as_ptr(),
                &raw mut raw,
                &raw mut mount,
                flags,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        if raw.bytes != HANDLE_BYTES || raw.kind != HANDLE_KIND {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        let [generation, low, high, ..] = raw.words;
        Ok(Self {
            inode: u64::from(high) << 32 | u64::from(low),
            generation,
        })
    }

    /// Identity of an open file.
    pub(crate) fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        Self::at(fd, c"")
    }

    /// Opens it by what it is, wherever it stands; ESTALE where it is gone, EPERM without CAP_DAC_READ_SEARCH. `tree`
    /// is any descriptor of the same file system.
    pub(crate) fn open(self, tree: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        let mut raw = RawHandle {
            bytes: HANDLE_BYTES,
            kind: HANDLE_KIND,
            words: [0; 32],
        };
        [raw.words[0], raw.words[1], raw.words[2]] = [
            self.generation,
            self.inode as u32,
            (self.inode >> 32) as u32,
        ];
        let flags = libc::O_PATH | libc::O_CLOEXEC | libc::O_NOFOLLOW;
        // SAFETY: the kernel reads the head of `raw` and as many bytes as its `bytes` says, of which there are more.
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
        // SAFETY: the kernel just gave it to us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }
}

/// A stub as a name: in the log, and of its file in the backing while it has no other.
pub(crate) fn id_text(id: StubId) -> String {
    format!("{:x}-{:08x}", id.inode, id.generation)
}

pub(crate) fn id_of(text: &[u8]) -> Option<StubId> {
    let (inode, generation) = std::str::from_utf8(text).ok()?.split_once('-')?;
    Some(StubId {
        inode: u64::from_str_radix(inode, 16).ok()?,
        generation: u32::from_str_radix(generation, 16).ok()?,
    })
}
