//! The backing: the directory, on any file system, where files end up.
//!
//! [`Backing`] is the one seam between Firn and the world below it. [`dir`] is the real one (a
//! directory and its descriptors). The crate `firn-sim` has its simulated twin (faults, crashes, lost
//! writes), and the conformance suite that runs over both.
//!
//! Promises of every implementation
//! * A [`Backing::Inode`] refers to the object, not to a name: it stays valid across renames and, while
//!   it is held, after the last unlink.
//! * Calls are plain: no retries, no caching, the kernel's errno as it is.
//! * All calls may be made from any thread at once, and each may take for ever: nobody makes one with a lock
//!   of [`lock`] held.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

pub use data_ranges::{DataRanges, data_ranges};
pub use descriptors::raise_descriptor_limit;
pub use rustix::io::Errno;

pub mod backoff;
mod data_ranges;
mod descriptors;
pub mod dir;
mod either;
pub mod lock;
mod types;
pub mod unsynced;
pub use dir::DirBacking;
pub use either::Either;
pub use types::*;

/// Result of a backing call: the kernel's errno, untouched.
pub type Result<T> = std::result::Result<T, Errno>;

/// A directory tree on some file system.
pub trait Backing: Send + Sync + 'static {
    /// A reference to an object of any kind (for a directory: an `O_PATH` descriptor).
    type Inode: Clone + Send + Sync + 'static;
    /// An open regular file.
    type File: Send + Sync + 'static;
    /// An open directory stream.
    type Dir: Send + Sync + 'static;

    /// The top directory.
    fn root(&self) -> Self::Inode;

    // ---- names -------------------------------------------------------------------------------

    /// Finds `name` in `parent`, without following a final symlink. `name` has no slash.
    fn lookup(&self, parent: &Self::Inode, name: &OsStr) -> Result<(Self::Inode, Attr)>;
    /// Creates and opens a regular file that did not exist (`O_CREAT|O_EXCL`, EEXIST otherwise), for
    /// reading and writing whatever `mode` allows. `mode` is complete: no umask is applied. The owner
    /// becomes `caller` where this process may arrange that.
    fn create(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Inode, Self::File, Attr)>;
    /// mkdir(2); `mode` and owner as in [`Backing::create`].
    fn mkdir(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
    ) -> Result<(Self::Inode, Attr)>;
    /// mknod(2): regular files, fifos, sockets and devices; `mode` holds the type, `rdev` is in the
    /// kernel's `dev_t` encoding of userspace.
    fn mknod(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        rdev: u64,
    ) -> Result<(Self::Inode, Attr)>;
    /// symlink(2).
    fn symlink(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        target: &OsStr,
    ) -> Result<(Self::Inode, Attr)>;
    /// linkat(2): another name for `inode`.
    fn link(&self, inode: &Self::Inode, parent: &Self::Inode, name: &OsStr) -> Result<Attr>;
    /// unlinkat(2) of anything but a directory.
    fn unlink(&self, parent: &Self::Inode, name: &OsStr) -> Result<()>;
    /// unlinkat(2) with `AT_REMOVEDIR`.
    fn rmdir(&self, parent: &Self::Inode, name: &OsStr) -> Result<()>;
    /// renameat2(2).
    fn rename(
        &self,
        parent: &Self::Inode,
        name: &OsStr,
        new_parent: &Self::Inode,
        new_name: &OsStr,
        flags: RenameFlags,
    ) -> Result<()>;
    /// The inode that a look-up of `name` would return of an object that was renamed to it. It makes no system call.
    fn moved_to(&self, inode: &Self::Inode, _parent: &Self::Inode, _name: &OsStr) -> Self::Inode {
        inode.clone()
    }
    /// readlinkat(2).
    fn readlink(&self, inode: &Self::Inode) -> Result<Vec<u8>>;

    // ---- attributes --------------------------------------------------------------------------

    /// fstat(2) of a host.
    fn attr(&self, inode: &Self::Inode) -> Result<Attr>;
    /// fstat(2) of an open file.
    fn attr_of_file(&self, file: &Self::File) -> Result<Attr>;
    /// The same of a host, asked of the server: the client of a network file system may keep attributes for a while, and be
    /// behind what other hosts did. What is read afterwards goes as far as the length that this tells.
    fn attr_now(&self, inode: &Self::Inode) -> Result<Attr> {
        self.attr(inode)
    }
    /// The same of an open file.
    fn attr_of_file_now(&self, file: &Self::File) -> Result<Attr> {
        self.attr_of_file(file)
    }
    /// fchmod(2); ENOTSUP/EOPNOTSUPP for a symlink.
    fn set_mode(&self, inode: &Self::Inode, mode: u32) -> Result<()>;
    /// fchownat(2) of the object itself; `None` leaves an id as it is. A native chown by a caller
    /// without privilege clears set-id bits; the kernel does that here as it does anywhere.
    fn set_owner(&self, inode: &Self::Inode, uid: Option<u32>, gid: Option<u32>) -> Result<()>;
    /// utimensat(2) of the object itself.
    fn set_times(&self, inode: &Self::Inode, atime: SetTime, mtime: SetTime) -> Result<()>;
    /// getxattr(2) into a buffer of the size that the value has.
    fn get_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<Vec<u8>>;
    /// setxattr(2); `flags` are `XATTR_CREATE`, `XATTR_REPLACE` or 0.
    fn set_xattr(&self, inode: &Self::Inode, name: &OsStr, value: &[u8], flags: i32) -> Result<()>;
    /// listxattr(2): names, each ended by a zero byte.
    fn list_xattr(&self, inode: &Self::Inode) -> Result<Vec<u8>>;
    /// removexattr(2).
    fn remove_xattr(&self, inode: &Self::Inode, name: &OsStr) -> Result<()>;

    /// Whether new objects in directory `inode` take their mode from a POSIX default ACL: then the
    /// umask of their maker does not count (acl(5)).
    fn has_default_acl(&self, inode: &Self::Inode) -> bool {
        self.get_xattr(inode, OsStr::new("system.posix_acl_default"))
            .is_ok()
    }

    // ---- directories -------------------------------------------------------------------------

    /// opendir(3).
    fn open_dir(&self, inode: &Self::Inode) -> Result<Self::Dir>;
    /// Reads entries, `.` and `..` included, from `cookie` on (0: from the start; else a
    /// [`DirEntry::cookie`] of this directory) until `sink` returns false or the directory ends.
    fn read_dir(
        &self,
        dir: &Self::Dir,
        cookie: i64,
        sink: &mut dyn FnMut(DirEntry<'_>) -> bool,
    ) -> Result<()>;
    /// fsync(2) of a directory: it and the names in it are durable, and the symbolic links and devices in it, which no
    /// other call syncs.
    fn sync_dir(&self, inode: &Self::Inode) -> Result<()>;

    // ---- data --------------------------------------------------------------------------------

    /// Opens a regular file. `access` is what this process wants, whatever the file's mode says of
    /// others. Never truncates, never creates, never follows a symlink.
    fn open(&self, inode: &Self::Inode, access: Access) -> Result<Self::File>;
    /// pread(2), until `buf` is full or the file ends; returns the bytes read.
    fn read_at(&self, file: &Self::File, buf: &mut [u8], offset: u64) -> Result<usize>;
    /// pwritev(2), once: may write less than asked.
    fn write_at(&self, file: &Self::File, data: &[IoSlice<'_>], offset: u64) -> Result<usize>;
    /// Writes parts that do not overlap and are not empty, in whatever order they are in. May write less than asked: so
    /// many bytes as it says, from the first part on, and nothing of the others. After an error none of them counts.
    fn write_parts(&self, file: &Self::File, parts: &[DataPart<'_>]) -> Result<u64> {
        write_parts_singly(self, file, parts)
    }
    /// Whether one [`Backing::write_parts`] of pieces that are far from each other costs about as much as if they were next to
    /// each other. Of a directory: whether that may be so of a file below it. Like [`Backing::lane_of`] it makes no
    /// system call and waits for nothing, and a wrong answer costs time and nothing else.
    fn gathers(&self, _inode: &Self::Inode) -> bool {
        false
    }
    /// ftruncate(2).
    fn set_len(&self, file: &Self::File, len: u64) -> Result<()>;
    /// Makes a file at least so long: another host may have made it longer since this one asked.
    fn grow(&self, file: &Self::File, len: u64) -> Result<()> {
        match self.attr_of_file(file)?.size < len {
            true => self.set_len(file, len),
            false => Ok(()),
        }
    }
    /// Ends a [`Backing::set_len`] of this host in which it died. Whether the file is as after it: where not, it is as
    /// before it.
    fn finish_set_len(&self, file: &Self::File, len: u64) -> Result<bool> {
        self.set_len(file, len).map(|()| true)
    }
    /// Changes contents to what they are, so that the kernel takes away what a change does (set-user-ID bits, file
    /// capabilities) where this process may not.
    fn rewrite_nothing(&self, file: &Self::File) -> Result<()> {
        let len = self.attr_of_file(file)?.size;
        self.set_len(file, len)
    }
    /// fallocate(2) with its `mode` bits.
    fn allocate(&self, file: &Self::File, mode: i32, offset: u64, len: u64) -> Result<()>;
    /// lseek(2) with `SEEK_DATA` or `SEEK_HOLE`.
    fn seek(&self, file: &Self::File, offset: u64, what: Seek) -> Result<u64>;
    /// copy_file_range(2), once.
    fn copy_range(
        &self,
        from: &Self::File,
        from_offset: u64,
        to: &Self::File,
        to_offset: u64,
        len: u64,
    ) -> Result<u64>;
    /// fsync(2), or fdatasync(2) where `data_only`.
    fn sync(&self, file: &Self::File, data_only: bool) -> Result<()>;
    /// A range is going to be synced: it may begin to go to the device. Does not wait for that.
    fn begin_sync(&self, _file: &Self::File, _offset: u64, _len: u64) {}
    /// A range is not going to be read again: memory that keeps it may be used otherwise. Loses nothing.
    fn forget_pages(&self, _file: &Self::File, _offset: u64, _len: u64) {}
    /// flock(2) without waiting: false where another open file has a lock that excludes this one, in this process
    /// or elsewhere. The lock belongs to `file`, and ends when that is dropped or its process ends, however it ends.
    /// [`LockMode::Exclusive`] needs a file that is open for writing. How far the lock reaches is the file system's
    /// affair: one that keeps it on this host does not say so.
    ///
    /// Not a lock of an open file description (`F_OFD_SETLK`): Linux tells a FUSE server of the unlock at close for
    /// flock(2) and for the locks of a process, but not for those, so the lock of a killed process would stay.
    ///
    /// What lies over another backing has no locks of its own: hosts meet in the one below.
    fn try_lock(&self, _file: &Self::File, _mode: LockMode) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }
    /// fcntl(2) with `F_SETLK`: this process has the range locked from now on as `mode` says, or, without a mode, not at
    /// all. False where another process is in the way; what this one has locked stays as it was. All locks that a process
    /// has of a file end when it closes any open file of it, and when it ends: so who locks ranges of a file has it open
    /// once. To lock exclusively needs a file that is open for writing, to share it one that is open for reading.
    ///
    /// Locks of [`Backing::try_lock`] and these do not know of each other.
    fn lock_range(
        &self,
        _file: &Self::File,
        _range: LockRange,
        _mode: Option<LockMode>,
    ) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }
    /// fcntl(2) with `F_GETLK`: whether another process has locked bytes of the range so that this one cannot lock them.
    fn is_range_locked(
        &self,
        _file: &Self::File,
        _range: LockRange,
        _mode: LockMode,
    ) -> Result<bool> {
        Err(Errno::OPNOTSUPP)
    }
    /// The descriptor, for kernel passthrough; `None` where there is none.
    fn fd<'a>(&self, file: &'a Self::File) -> Option<BorrowedFd<'a>>;

    /// A descriptor by which another process may read the file, and not write it; `None` where there is none.
    fn reading_fd(&self, _file: &Self::File) -> Option<OwnedFd> {
        None
    }
    /// Where bytes of `range` lie in files of the backing, as [`Backing::read_at`] would give them; `None` where the kernel
    /// reads the file by itself, or nobody else can. What is told stays as it is, whatever becomes of the file, until
    /// this host changes it, learns that others have ([`Backing::changes_by_others`]), or [`Located::until`].
    fn locate(
        &self,
        _file: &Self::File,
        _range: Range<u64>,
        _limits: LocateLimits,
    ) -> Result<Option<Located>> {
        Ok(None)
    }

    // ---- files that several hosts write ------------------------------------------------------

    /// How far the kernel may read an open file by itself.
    fn kernel_reads(&self, _file: &Self::File) -> KernelReads {
        KernelReads::Passthrough
    }
    /// A program opens the file, which is open here now: it sees what other hosts have closed. If it may write
    /// (`writes`), what it writes is newer than that, and other hosts know that it does.
    fn note_opened(&self, _file: &Self::File, _writes: bool) -> Result<()> {
        Ok(())
    }
    /// Grows each time this host learns that other hosts have changed the bytes of an open file. Makes no call.
    fn changes_by_others(&self, _inode: &Self::Inode) -> u64 {
        0
    }
    /// Whether something is left to do for a file when no program of this host writes to it any more. Makes no call.
    fn finishes_files(&self) -> bool {
        false
    }
    /// No program of this host has the file open for writing, and what they wrote is written: what is left to do for it
    /// is to be done soon. Waits for nothing.
    fn note_written(&self, _file: &Self::File) {}
    /// Does that now, as far as other hosts let it.
    fn finish_file(&self, _file: &Self::File) -> Result<()> {
        Ok(())
    }
    /// Whether bytes of the file are not in their places, so that only Firn can read them.
    fn is_logged(&self, _inode: &Self::Inode) -> bool {
        false
    }

    // ---- lanes -------------------------------------------------------------------------------

    /// How many lanes, I/O servers, the data of its files lies in: at least one, and always as many.
    /// Like [`Backing::lane_of`] it makes no system call and waits for nothing: it may be asked with locks held.
    fn lane_count(&self) -> u16 {
        1
    }
    /// The lane that an object's data lies in, one of [`Backing::lane_count`]. It is advice about who writes and when:
    /// a wrong answer costs time and nothing else.
    fn lane_of(&self, _inode: &Self::Inode) -> LaneIndex {
        LaneIndex::FIRST
    }
    /// The lane of a turn, from 0, where turns go round the lanes that take new files; none where this one chooses no
    /// lane for a new file. It makes no system call either.
    fn lane_of_turn(&self, _turn: u64) -> Option<LaneIndex> {
        None
    }
    /// [`Backing::create`] of a file whose place is not that of its name here.
    fn create_placed(
        &self,
        caller: &Caller,
        parent: &Self::Inode,
        name: &OsStr,
        mode: u32,
        _placing: Placing<'_, Self::Inode>,
    ) -> Result<(Self::Inode, Self::File, Attr)> {
        self.create(caller, parent, name, mode)
    }

    // ---- the whole ---------------------------------------------------------------------------

    /// fstatvfs(3).
    fn statfs(&self) -> Result<StatFs>;
    /// Makes everything in the backing durable, data and names, whoever changed it. Once this was done, what others
    /// change beside this backing may be left out. syncfs(2) where that reaches the file system; else each file and
    /// directory by itself, which the first time takes a walk of the whole tree.
    fn sync_all(&self) -> Result<()>;
    /// The same for what was changed through this backing since it was opened: no more is walked for it.
    fn sync_changes(&self) -> Result<()>;
    /// The same as [`Backing::sync_all`] for a directory and all below it; not for the names that lead to it.
    fn sync_tree(&self, inode: &Self::Inode) -> Result<()>;
    /// Which way that goes for the top directory.
    fn sync_way(&self) -> SyncWay;
}

/// [`Backing::write_parts`] where each part is a [`Backing::write_at`] of its own.
pub fn write_parts_singly<B: Backing + ?Sized>(
    backing: &B,
    file: &B::File,
    parts: &[DataPart<'_>],
) -> Result<u64> {
    let mut written = 0;
    for part in parts {
        let count = match backing.write_at(file, part.data, part.offset) {
            Ok(count) => count as u64,
            // As write(2): what was written before the fault is good; the next call tells the fault.
            Err(_) if written > 0 => break,
            Err(error) => return Err(error),
        };
        written += count;
        if count < part.len() {
            break;
        }
    }
    Ok(written)
}

/// Most bytes that [`copy_through_memory`] copies.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// [`Backing::copy_range`] for files that no copy_file_range(2) joins: reads, then writes, once.
pub fn copy_through_memory<B: Backing>(
    backing: &B,
    from: &B::File,
    from_offset: u64,
    to: &B::File,
    to_offset: u64,
    len: u64,
) -> Result<u64> {
    let mut buf = vec![0; len.min(COPY_BYTES_MAX) as usize];
    let count = backing.read_at(from, &mut buf, from_offset)?;
    let written = backing.write_at(to, &[IoSlice::new(&buf[..count])], to_offset)?;
    Ok(written as u64)
}

/// Whether a path relative to the root is `top` or below it; of the root, whose path is empty, all are.
pub fn is_below(path: &[u8], top: &[u8]) -> bool {
    top.is_empty()
        || path
            .strip_prefix(top)
            .is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}
