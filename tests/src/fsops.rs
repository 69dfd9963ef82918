//! Small file operations that tests need and std has not, each returning the plain errno.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr;
use std::time::Duration;

use crate::wait_until;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MsyncFlags, ProtFlags};

/// Opens for reading and writing, creating where needed.
pub fn open_rw(path: &Path) -> File {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options
        .open(path)
        .unwrap_or_else(|e| panic!("open {path:?}: {e}"))
}

/// All of a file.
#[track_caller]
pub fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("read {path:?}: {e}"))
}

/// Bytes at an offset; short only at the end of the file.
#[track_caller]
pub fn read_at(file: &File, offset: u64, len: usize) -> Vec<u8> {
    let mut buf = vec![0; len];
    let mut done = 0;
    while done < len {
        match file
            .read_at(&mut buf[done..], offset + done as u64)
            .expect("pread")
        {
            0 => break,
            count => done += count,
        }
    }
    buf.truncate(done);
    buf
}

/// The errno of an I/O error.
#[track_caller]
pub fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or_else(|| panic!("not an errno: {error}"))
}

/// close(2) with its answer, which std's drop throws away.
pub fn close(file: File) -> Result<(), Errno> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor was owned by `file`, which gave it up here, so it is closed once.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(errno(&std::io::Error::last_os_error())),
    }
}

/// Opens or makes a file of a directory, to read and write: of this directory, whatever its path leads to meanwhile. By the
/// C library, so that the preload library sees it.
pub fn open_in(dir: &File, name: &str) -> std::io::Result<File> {
    let name = CString::new(name)?;
    let flags = libc::O_RDWR | libc::O_CREAT | libc::O_CLOEXEC;
    // SAFETY: the name ends with a zero, and both it and the directory live through the call.
    match unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags, 0o666) } {
        -1 => Err(std::io::Error::last_os_error()),
        // SAFETY: openat(2) has just made the descriptor, so it has no other owner.
        descriptor => Ok(unsafe { File::from_raw_fd(descriptor) }),
    }
}

/// Panics at the first byte that differs, saying where.
#[track_caller]
pub fn assert_same_bytes(what: &str, found: &[u8], expected: &[u8]) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
        let end = (at + 16).min(found.len());
        let found = &found[at..end];
        let expected = &expected[at..end];
        panic!("{what}: differs from byte {at} on: found {found:x?}, expected {expected:x?}");
    }
}

/// Waits until a file of the backing has these bytes. With `flatten=behind`, the default, logs become the plain file only
/// some time after the last close.
#[track_caller]
pub fn assert_becomes_plain(plain: &Path, expected: &[u8]) {
    const LIMIT: Duration = Duration::from_secs(60);
    let what = plain.display().to_string();
    wait_until(&format!("{what} is plain"), LIMIT, || {
        read(plain) == expected
    });
}

/// A mapped part of a file.
pub struct Mapping {
    address: *mut u8,
    len: usize,
}

impl Mapping {
    /// Maps `len` bytes from the start, shared or private, for reading and writing.
    pub fn new(file: &File, len: usize, flags: MapFlags) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address the kernel chooses aliases nothing of ours.
        let address = unsafe { rustix::mm::mmap(ptr::null_mut(), len, prot, flags, file, 0)? };
        Ok(Self {
            address: address.cast(),
            len,
        })
    }

    /// The bytes as they are now; copied, since others may change them.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut copy = vec![0; len];
        // SAFETY: the range lies in the mapping (checked above), which lives as long as `self`.
        unsafe { ptr::copy_nonoverlapping(self.address.add(offset), copy.as_mut_ptr(), len) };
        copy
    }

    /// Stores bytes.
    pub fn write(&self, offset: usize, data: &[u8]) {
        assert!(offset + data.len() <= self.len);
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), self.address.add(offset), data.len()) };
    }

    /// Makes every processor look up the pages of a private mapping again.
    pub fn look_again(&self) -> Result<(), Errno> {
        // SAFETY: address and length are those of the mapping; a private one without stores loses nothing.
        unsafe { rustix::mm::madvise(self.address.cast(), self.len, Advice::LinuxDontNeed) }
    }

    /// msync(2), synchronous.
    pub fn sync(&self) -> Result<(), Errno> {
        // SAFETY: address and length are those of the mapping.
        unsafe { rustix::mm::msync(self.address.cast(), self.len, MsyncFlags::SYNC) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: address and length are those of the mapping, and nothing refers to it any more.
        unsafe { rustix::mm::munmap(self.address.cast(), self.len) }.expect("munmap");
    }
}
