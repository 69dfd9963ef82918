//! Extended attributes of the object of an `O_PATH` descriptor.
//!
//! [`FdPath`] leads to the object itself, even if it is a symbolic link. So the kernel answers as it does for
//! `lgetxattr` and the like: EPERM for `user.*` on anything but files and directories, success for `trusted.*` with the
//! capability.

use std::ffi::OsStr;
use std::os::fd::AsFd;

use rustix::fs::{XattrFlags, getxattr, listxattr, removexattr, setxattr};

use super::proc::FdPath;
use crate::{Errno, Result};

/// Size of the first buffer. Most values and lists fit, so most calls need no second call for the size.
const FIRST_GUESS_BYTES: usize = 256;
/// Maximum length of a value or list on Linux (`XATTR_SIZE_MAX`, `XATTR_LIST_MAX`).
const BYTES_MAX: usize = 1 << 16;

/// Returns the value of an attribute.
pub(super) fn get(fd: impl AsFd, name: &OsStr) -> Result<Vec<u8>> {
    let path = FdPath::from_fd(fd);
    call_with_growing_buffer(|buf| getxattr(path.as_c_str(), name, buf))
}

/// Returns the names of the attributes, each with a zero byte after it.
pub(super) fn list(fd: impl AsFd) -> Result<Vec<u8>> {
    let path = FdPath::from_fd(fd);
    call_with_growing_buffer(|buf| listxattr(path.as_c_str(), buf))
}

/// Sets an attribute.
pub(super) fn set(fd: impl AsFd, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
    let flags = XattrFlags::from_bits_retain(flags as u32);
    setxattr(FdPath::from_fd(fd).as_c_str(), name, value, flags)
}

/// Removes an attribute.
pub(super) fn remove(fd: impl AsFd, name: &OsStr) -> Result<()> {
    removexattr(FdPath::from_fd(fd).as_c_str(), name)
}

/// Repeats a call with larger buffers until the answer fits. The answer may grow after the call that returns its size.
fn call_with_growing_buffer(call: impl Fn(&mut [u8]) -> Result<usize>) -> Result<Vec<u8>> {
    let mut buffer = vec![0; FIRST_GUESS_BYTES];
    loop {
        match call(&mut buffer) {
            Ok(len) => {
                buffer.truncate(len);
                return Ok(buffer);
            }
            // The call with an empty buffer returns the size. The buffer never shrinks: an empty one would only ask for
            // the size again, without end. If a file system returns ERANGE for the largest buffer too, that is the
            // result.
            Err(Errno::RANGE) if buffer.len() < BYTES_MAX => {
                let needed_len = call(&mut [])?;
                let new_len = needed_len.max(2 * buffer.len()).min(BYTES_MAX);
                buffer.resize(new_len, 0);
            }
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_a_list_that_fits_no_buffer_is_asked_for_a_few_times_only() {
        let calls = std::cell::Cell::new(0);
        let answer = call_with_growing_buffer(|buf| {
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
