//! The path `/proc/self/fd/N` of a descriptor, made without an allocation.
//!
//! Some calls take no `O_PATH` descriptor, not even with `AT_EMPTY_PATH`: open, xattrs, chmod, utimensat, link. They
//! take this path instead. The kernel follows the path to the object itself and no further, even if the object is a
//! symbolic link. So calls that follow links work for every kind of object.

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};

/// Size of the buffer: enough for the prefix, ten digits and the zero byte.
const LEN: usize = 32;

/// Path of an open descriptor below `/proc`. It is valid while the descriptor is open.
pub(super) struct FdPath([u8; LEN]);

impl FdPath {
    pub(super) fn from_fd(fd: impl AsFd) -> Self {
        let mut bytes = [0; LEN];
        // The last byte is never written, so it remains the zero byte at the end.
        write!(
            &mut bytes[..LEN - 1],
            "/proc/self/fd/{}",
            fd.as_fd().as_raw_fd()
        )
        .expect("a descriptor number has at most ten digits");
        Self(bytes)
    }

    pub(super) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).expect("the last byte is zero")
    }
}
