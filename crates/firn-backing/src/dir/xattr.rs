//! Extended attributes of the object behind an `O_PATH` descriptor.
//!
//! [`FdPath`] leads to the object itself, a symlink included. So the kernel answers as to the `l…xattr` calls on a
//! name: EPERM for `user.*` on anything but files and directories, success for `trusted.*` with the capability.

use std::ffi::OsStr;
use std::os::fd::AsFd;

use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};

use super::proc::FdPath;
use crate::{Errno, Result};

/// Most values and lists fit, so that most calls need no second one for the size.
const FIRST_GUESS_BYTES: usize = 256;
/// Linux gives no longer value or list (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const BYTES_MAX: usize = 1 << 16;

pub(super) fn get(fd: impl AsFd, name: &OsStr) -> Result<Vec<u8>> {
    let path = FdPath::of(fd);
    sized(|buf| getxattr(path.as_c_str(), name, buf))
}

pub(super) fn list(fd: impl AsFd) -> Result<Vec<u8>> {
    let path = FdPath::of(fd);
    sized(|buf| listxattr(path.as_c_str(), buf))
}

pub(super) fn set(fd: impl AsFd, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
    let flags = XattrFlags::from_bits_retain(flags as u32);
    setxattr(FdPath::of(fd).as_c_str(), name, value, flags)
}

pub(super) fn remove(fd: impl AsFd, name: &OsStr) -> Result<()> {
    removexattr(FdPath::of(fd).as_c_str(), name)
}

/// Calls with growing buffers until the answer fits: it may grow between asking its size and reading.
fn sized(call: impl Fn(&mut [u8]) -> Result<usize>) -> Result<Vec<u8>> {
    let mut buf = vec![0; FIRST_GUESS_BYTES];
    loop {
        match call(&mut buf) {
            Ok(len) => {
                buf.truncate(len);
                return Ok(buf);
            }
            // An empty buffer asks for the size. Never shrink: zero would ask again, and for ever.
            // A file system that says so of any buffer is not believed.
            Err(Errno::RANGE) if buf.len() < BYTES_MAX => {
                let len = call(&mut [])?;
                buf.resize(len.max(2 * buf.len()).min(BYTES_MAX), 0);
            }
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_a_list_that_fits_no_buffer_is_asked_for_a_few_times_only() {
        let calls = std::cell::Cell::new(0);
        let answer = sized(|buf| {
            calls.set(calls.get() + 1);
            if buf.is_empty() {
                Ok(usize::MAX / 2)
            } else {
                Err(Errno::RANGE)
            }
        });
        assert_eq!(answer, Err(Errno::RANGE));
        assert!(calls.get() < 20, "{} calls", calls.get());
    }
}
