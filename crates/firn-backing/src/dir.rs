//! A real directory as the backing.
//!
//! Promises
//! * Everything goes through descriptors: the directory may be renamed, or hidden below a mount, and
//!   the same objects are still meant.
//! * A node is an `O_PATH` descriptor: it needs no right on the object, opens no device, and keeps the
//!   object after its last name is gone.
//! * New objects belong to the caller where this process is root (`owner`).
//!
//! Relies on
//! * `/proc` being mounted (`proc`).
//! * The process having umask 0, which the daemon sets at its start: the trait's modes are complete,
//!   and only with umask 0 do the default ACLs of a parent directory decide alone.

use std::ffi::OsStr;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{self, AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, SeekFrom, Uid};

use crate::{
    Access, Attr, Backing, Caller, DirEntry, Errno, Kind, RenameFlags, Result, Seek, SetTime, StatFs,
};

mod attr;
mod make;
mod owner;
mod proc;
mod reopen;
mod stream;
mod times;
mod xattr;

use proc::FdPath;
pub use stream::DirStream;

/// A directory of this machine, on whatever file system.
#[derive(Debug)]
pub struct DirBacking {
    path: PathBuf,
    /// `O_PATH`, as every node.
    root: Arc<OwnedFd>,
    /// Opened for reading: syncfs(2) does not take `O_PATH`.
    readable_root: OwnedFd,
}

/// An open regular file.
#[derive(Debug)]
pub struct DirFile {
    fd: OwnedFd,
    access: Access,
}

impl DirFile {
    /// How it was opened.
    pub fn access(&self) -> Access {
        self.access
    }
}

impl DirBacking {
    /// Opens the directory `path`, which must be readable. ENOTDIR for anything else.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref().canonicalize()?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = fs::open(&path, flags | OFlags::PATH, Mode::empty())?;
        let readable_root = reopen::dir(&root)?;
        Ok(Self { path, root: Arc::new(root), readable_root })
    }

    /// The canonical path that was opened. For people and for keys; no call goes through it.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The errno of the system call that just failed.
fn last_errno() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}

/// The object that `name` means, without following it.
fn node_at(parent: &OwnedFd, name: &OsStr) -> Result<Arc<OwnedFd>> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(Arc::new(fs::openat(parent, name, flags, Mode::empty())?))
}

impl Backing for DirBacking {
    type Node = Arc<OwnedFd>;
    type File = DirFile;
    type Dir = DirStream;

    fn root(&self) -> Self::Node {
        self.root.clone()
    }

    fn lookup(&self, parent: &Self::Node, name: &OsStr) -> Result<(Self::Node, Attr)> {
        let node = node_at(parent, name)?;
        let attr = attr::attr(&node)?;
        Ok((node, attr))
    }

    fn create(
        &self,
        caller: &Caller,
        parent: &Self::Node,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Node, Self::File, Attr)> {
        make::file(caller, parent, name, mode)
    }

    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Self::Node,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Node, Attr)> {
        let make = |mode| fs::mkdirat(parent, name, Mode::from_raw_mode(mode));
        make::object(caller, parent, name, Kind::Dir, mode, &make)
    }

    fn mknod(
        &self,
        caller: &Caller,
        parent: &Self::Node,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Self::Node, Attr)> {
        // No type bits mean a regular file (mknod(2)).
        let typed = if mode & libc::S_IFMT == 0 { mode | libc::S_IFREG } else { mode };
        let kind = Kind::from_mode(typed).ok_or(Errno::INVAL)?;
        let file_type = FileType::from_raw_mode(typed);
        let make = |mode| fs::mknodat(parent, name, file_type, Mode::from_raw_mode(mode & 0o7777), rdev);
        make::object(caller, parent, name, kind, mode, &make)
    }

    fn symlink(
        &self,
        caller: &Caller,
        parent: &Self::Node,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Self::Node, Attr)> {
        let make = |_| fs::symlinkat(target, parent, name);
        make::object(caller, parent, name, Kind::Symlink, 0, &make)
    }

    fn link(&self, node: &Self::Node, parent: &Self::Node, name: &OsStr) -> Result<Attr> {
        // `AT_EMPTY_PATH` would need CAP_DAC_READ_SEARCH; following the link in /proc does not.
        let path = FdPath::of(node);
        fs::linkat(CWD, path.as_c_str(), parent, name, AtFlags::SYMLINK_FOLLOW)?;
        attr::attr(node)
    }

    fn unlink(&self, parent: &Self::Node, name: &OsStr) -> Result<()> {
        fs::unlinkat(parent, name, AtFlags::empty())
    }

    fn rmdir(&self, parent: &Self::Node, name: &OsStr) -> Result<()> {
        fs::unlinkat(parent, name, AtFlags::REMOVEDIR)
    }

    fn rename(
        &self,
        parent: &Self::Node,
        name: &OsStr,
        new_parent: &Self::Node,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()> {
        let flags = fs::RenameFlags::from_bits_retain(flags.bits());
        fs::renameat_with(parent, name, new_parent, new_name, flags)
    }

    fn readlink(&self, node: &Self::Node) -> Result<Vec<u8>> {
        match fs::readlinkat(node, c"", Vec::new()) {
            Ok(target) => Ok(target.into_bytes()),
            // The empty path of a node that is no link; readlink(2) of its name says EINVAL.
            Err(Errno::NOENT) => Err(Errno::INVAL),
            Err(e) => Err(e),
        }
    }

    fn attr(&self, node: &Self::Node) -> Result<Attr> {
        attr::attr(node)
    }

    fn attr_of_file(&self, file: &Self::File) -> Result<Attr> {
        attr::attr(&file.fd)
    }

    fn set_mode(&self, node: &Self::Node, mode: u32) -> Result<()> {
        // Older kernels change the mode of a symlink on some file systems, and still report an error.
        if attr::attr(node)?.kind == Kind::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        fs::chmod(FdPath::of(node).as_c_str(), Mode::from_raw_mode(mode & 0o7777))
    }

    fn set_owner(&self, node: &Self::Node, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        fs::chownat(node, c"", uid, gid, AtFlags::EMPTY_PATH)
    }

    fn set_times(&self, node: &Self::Node, atime: SetTime, mtime: SetTime) -> Result<()> {
        times::set(node, atime, mtime)
    }

    fn get_xattr(&self, node: &Self::Node, name: &OsStr) -> Result<Vec<u8>> {
        xattr::get(node, name)
    }

    fn set_xattr(&self, node: &Self::Node, name: &OsStr, value: &[u8], flags: i32) -> Result<()> {
        xattr::set(node, name, value, flags)
    }

    fn list_xattr(&self, node: &Self::Node) -> Result<Vec<u8>> {
        xattr::list(node)
    }

    fn remove_xattr(&self, node: &Self::Node, name: &OsStr) -> Result<()> {
        xattr::remove(node, name)
    }

    fn open_dir(&self, node: &Self::Node) -> Result<Self::Dir> {
        Ok(DirStream::new(reopen::dir(node)?))
    }

    fn read_dir(
        &self,
        dir: &Self::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()> {
        dir.read(cookie, sink)
    }

    fn sync_dir(&self, node: &Self::Node) -> Result<()> {
        match reopen::dir(node) {
            Ok(dir) => fs::fsync(dir),
            // A directory that we may write to but not read: the larger promise holds the smaller.
            Err(Errno::ACCESS) => self.sync_all(),
            Err(e) => Err(e),
        }
    }

    fn open(&self, node: &Self::Node, access: Access) -> Result<Self::File> {
        Ok(DirFile { fd: reopen::file(node, access)?, access })
    }

    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match rustix::io::pread(&file.fd, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(count) => done += count,
                // As read(2): what was read before the fault is good; the next call tells the fault.
                Err(_) if done > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn write_at(&self, file: &Self::File, data: &[IoSlice<'_>], offset: u64) -> Result<usize> {
        rustix::io::pwritev(&file.fd, data, offset)
    }

    fn set_len(&self, file: &Self::File, len: u64) -> Result<()> {
        fs::ftruncate(&file.fd, len)
    }

    fn allocate(&self, file: &Self::File, mode: i32, offset: u64, len: u64) -> Result<()> {
        let mode = FallocateFlags::from_bits_retain(mode as u32);
        fs::fallocate(&file.fd, mode, offset, len)
    }

    fn seek(&self, file: &Self::File, offset: u64, what: Seek) -> Result<u64> {
        // Moves the descriptor's own position, which nothing here uses.
        let from = match what {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        fs::seek(&file.fd, from)
    }

    fn copy_range(
        &self,
        from: &Self::File,
        from_offset: u64,
        to: &Self::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64> {
        let (mut from_at, mut to_at) = (from_offset, to_offset);
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let done = fs::copy_file_range(&from.fd, Some(&mut from_at), &to.fd, Some(&mut to_at), len)?;
        Ok(done as u64)
    }

    fn begin_sync(&self, file: &Self::File, offset: u64, len: u64) {
        // SAFETY: the call reads and writes no memory of ours. Where it fails nothing has begun, which is all the same.
        unsafe {
            libc::sync_file_range(
                file.fd.as_raw_fd(),
                offset as i64,
                len as i64,
                libc::SYNC_FILE_RANGE_WRITE,
            );
        }
    }

    fn sync(&self, file: &Self::File, data_only: bool) -> Result<()> {
        if data_only { fs::fdatasync(&file.fd) } else { fs::fsync(&file.fd) }
    }

    fn fd<'a>(&self, file: &'a Self::File) -> Option<BorrowedFd<'a>> {
        Some(file.fd.as_fd())
    }

    fn statfs(&self) -> Result<StatFs> {
        let s = fs::fstatvfs(&self.root)?;
        Ok(StatFs {
            block_size: s.f_frsize,
            blocks: s.f_blocks,
            blocks_free: s.f_bfree,
            blocks_available: s.f_bavail,
            files: s.f_files,
            files_free: s.f_ffree,
            name_max: s.f_namemax.try_into().unwrap_or(u32::MAX),
        })
    }

    fn sync_all(&self) -> Result<()> {
        fs::syncfs(&self.readable_root)
    }
}
