//! The path `/proc/self/fd/N` of a descriptor, without an allocation.
//!
//! It is the way from an `O_PATH` descriptor to calls that have no `AT_EMPTY_PATH`: opening, xattrs,
//! chmod, utimensat, link. The kernel jumps from this link to the object itself and goes no further,
//! even where the object is a symlink, so the calls that follow links are right for every kind.

use std::ffi::CStr;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};

/// Room for the prefix, ten digits and the ending zero.
const LEN: usize = 32;

/// Path of an open descriptor under `/proc`; valid while the descriptor is open.
pub(super) struct FdPath([u8; LEN]);

impl FdPath {
    pub(super) fn of(fd: impl AsFd) -> Self {
        let mut bytes = [0; LEN];
        // Ten digits fit, and the last byte is never reached, so it stays the ending zero.
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
