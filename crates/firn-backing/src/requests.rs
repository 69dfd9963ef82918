//! Types of arguments that say what a call of a backing (the directory that a mount serves) is to do. For example, one
//! call changes the mode, the owner or the times of an object, as its [`AttrChange`] says.

use std::ffi::OsStr;

use bitflags::bitflags;

use crate::{LockMode, LockRange, Time};

/// What to do with a time of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// Keep the time that the file has.
    Keep,
    /// Set it to the present time.
    Now,
    /// Set it to this time.
    At(Time),
}

/// The object whose attributes [`Attributes::stat`](crate::Attributes::stat) returns.
#[derive(Debug)]
pub enum Target<'a, I, F> {
    /// An object.
    Inode(&'a I),
    /// An open file.
    File(&'a F),
}

// Not derived: the derived impl would require that `I` and `F` can be cloned.
impl<I, F> Clone for Target<'_, I, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I, F> Copy for Target<'_, I, F> {}

/// Whether attributes may come from a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// The attributes may come from a cache of this host. On a network file system, changes by other hosts may be
    /// missing.
    Known,
    /// The attributes come from the server and are the present ones. Later reads see all bytes up to the returned
    /// length.
    Current,
}

/// A change of one attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrChange<'a> {
    /// fchmod(2). Fails with EOPNOTSUPP for a symbolic link.
    Mode(u32),
    /// fchownat(2) of the object itself; `None` keeps an id. The kernel clears set-id bits if this process has no
    /// privilege.
    Owner {
        /// New user id.
        uid: Option<u32>,
        /// New group id.
        gid: Option<u32>,
    },
    /// utimensat(2) of the object itself.
    Times {
        /// Time of the last access.
        atime: SetTime,
        /// Time of the last change of contents.
        mtime: SetTime,
    },
    /// setxattr(2).
    SetXattr {
        /// The name.
        name: &'a OsStr,
        /// The value.
        value: &'a [u8],
        /// `XATTR_CREATE`, `XATTR_REPLACE` or 0.
        flags: i32,
    },
    /// removexattr(2).
    RemoveXattr {
        /// The name.
        name: &'a OsStr,
    },
}

/// The object that [`Names::make`](crate::Names::make) makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewKind<'a> {
    /// mkdir(2).
    Dir {
        /// Permission bits.
        mode: u32,
    },
    /// mknod(2): a regular file, a fifo, a socket or a device.
    Node {
        /// Type and permission bits. Without type bits it is a regular file.
        mode: u32,
        /// Device number, as a userspace `dev_t`.
        rdev: u64,
    },
    /// symlink(2).
    Symlink {
        /// Target of the link.
        target: &'a OsStr,
    },
}

/// The kind of object that [`Names::remove`](crate::Names::remove) removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remove {
    /// Anything but a directory.
    NonDir,
    /// An empty directory (`AT_REMOVEDIR`).
    Dir,
}

/// A change of the length of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// Set this length: ftruncate(2).
    To(u64),
    /// Set at least this length. Another host may have made the file longer meanwhile.
    AtLeast(u64),
    /// Complete a [`Resize::To`] of this host during which its process died.
    Finish(u64),
    /// Keep the length. The kernel treats this as a change of contents and removes set-user-ID bits and file
    /// capabilities, even if this process has no right to remove them.
    Unchanged,
}

/// Advice about cached pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageAdvice {
    /// The pages will be synced soon: begin to write them to the device.
    WriteOut,
    /// The pages will not be read again: free their memory.
    Forget,
}

/// How programs of this host use an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// A program opens it for reading only. The program sees what other hosts have written and closed.
    OpenedToRead,
    /// A program opens it for writing. Its writes are newer than all bytes that other hosts have closed, and other
    /// hosts learn that this host writes.
    OpenedToWrite,
    /// No program of this host has it open for writing any more, and all its bytes are written. The backing does its
    /// remaining work for the file soon. The call does not wait for that.
    Written,
    /// No program of this host has it open for writing any more. Remaining work for the file is done in this call, as
    /// far as other hosts allow it.
    Finished,
}

/// What the receiver of a descriptor does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorUse {
    /// The kernel reads and writes the file itself, as far as the file's access mode allows.
    Passthrough,
    /// Another process reads the file; it must not be able to write.
    Reading,
    /// A later process continues to use the file ([`Files::adopt`](crate::Files::adopt)). The file may have no name any
    /// more.
    Keeping,
}

/// A file that a backing has opened again from a descriptor.
#[derive(Debug)]
pub struct Adopted<I, F> {
    /// The object.
    pub inode: I,
    /// The open file.
    pub file: F,
    /// Access mode of the open file.
    pub access: Access,
    /// Attributes of the object.
    pub attr: crate::Attr,
}

impl<I, F> Adopted<I, F> {
    /// Translates inode and file into those of a layer.
    pub fn map<J, G>(self, inode: impl FnOnce(I) -> J, file: impl FnOnce(F) -> G) -> Adopted<J, G> {
        Adopted {
            inode: inode(self.inode),
            file: file(self.file),
            access: self.access,
            attr: self.attr,
        }
    }
}

/// What [`Volume::sync_scope`](crate::Volume::sync_scope) makes durable.
#[derive(Debug)]
pub enum SyncScope<'a, I> {
    /// Everything in the backing. After the first such call, changes that other programs make without this backing may
    /// be left out.
    ///
    /// Uses syncfs(2) if that makes the file system durable. Else it syncs each changed file and directory. The first
    /// such sync walks the tree and syncs all files and directories.
    All,
    /// Only objects that were changed through this backing since it was opened. Needs no walk of the whole tree.
    Changes,
    /// A directory and all below it, but not the names that lead to it.
    Tree(&'a I),
    /// A directory and the names in it (fsync(2)). Includes symbolic links and devices in it, for which there is no
    /// other call.
    Dir(&'a I),
}

impl<I> Clone for SyncScope<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for SyncScope<'_, I> {}

/// The process for which an object is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// File system user id.
    pub uid: u32,
    /// File system group id.
    pub gid: u32,
    /// Process id, 0 if unknown.
    pub pid: u32,
}

/// Access mode of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `O_RDONLY`.
    Read,
    /// `O_WRONLY`.
    Write,
    /// `O_RDWR`.
    ReadWrite,
}

/// The criterion that selects the lane, and the log, for the data of a new file.
#[derive(Debug)]
pub enum PlacementHint<'a, I> {
    /// Its name and directory.
    ByName,
    /// Its number among new files, counted from 0: new files go to the lanes in rotation. The file is in no log.
    Turn(u64),
    /// The name that the file will get later, in this directory.
    Named {
        /// The directory.
        parent: &'a I,
        /// The name.
        name: &'a OsStr,
    },
    /// The lane of this file. The new file is in no log.
    Beside(&'a I),
}

impl<I> Clone for PlacementHint<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for PlacementHint<'_, I> {}

impl<'a, I> PlacementHint<'a, I> {
    /// Translates the directory or file into the inode of another backing.
    pub fn map<J>(self, to: impl FnOnce(&'a I) -> &'a J) -> PlacementHint<'a, J> {
        match self {
            Self::ByName => PlacementHint::ByName,
            Self::Turn(turn) => PlacementHint::Turn(turn),
            Self::Named { parent, name } => PlacementHint::Named {
                parent: to(parent),
                name,
            },
            Self::Beside(inode) => PlacementHint::Beside(to(inode)),
        }
    }
}

/// Limits of one answer of [`Sharing::locate`](crate::Sharing::locate).
#[derive(Clone, Copy, Debug)]
pub struct LocateLimits {
    /// Maximum number of ranges.
    pub parts_max: usize,
    /// Maximum number of descriptors. Ranges in further files are left out.
    pub files_max: usize,
}

/// A request about a lock, which never waits.
///
/// Locks of whole files and locks of ranges do not conflict with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockRequest {
    /// Lock the whole file (flock(2)). The lock belongs to the open file and conflicts with locks of other open files,
    /// in this process or elsewhere. It ends when the open file is dropped or its process ends, however it ends.
    /// [`LockMode::Exclusive`] needs a file that is open for writing. On some file systems the lock excludes only
    /// programs of this host, and no error reports that.
    ///
    /// `F_OFD_SETLK` is no alternative. When a file is closed, Linux tells a FUSE server to unlock locks of flock(2)
    /// and of processes, but not those of `F_OFD_SETLK`. So such a lock would outlive a killed process.
    File(LockMode),
    /// Unlock the whole file (flock(2) with `LOCK_UN`). The lock ends even if other processes have a descriptor of the
    /// open file.
    UnlockFile,
    /// Lock a range in this mode (fcntl(2) with `F_OFD_SETLK` or `F_SETLK`). The lock belongs to the open file if
    /// [`Features::shares_range_locks`](crate::Features::shares_range_locks), else to the process. In the second case,
    /// all locks of the process on a file end when the process closes any open file of that file. So a process that
    /// locks ranges opens the file only once. An exclusive lock needs a file that is open for writing, a shared one a
    /// file that is open for reading.
    Range(LockRange, LockMode),
    /// Unlock a range (fcntl(2) with `F_UNLCK`).
    Unlock(LockRange),
    /// Test whether [`LockRequest::Range`] would be granted now (fcntl(2) with `F_OFD_GETLK` or `F_GETLK`).
    Test(LockRange, LockMode),
}

/// The kind of range that [`Files::seek`](crate::Files::seek) searches for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    /// `SEEK_DATA`.
    Data,
    /// `SEEK_HOLE`.
    Hole,
}

bitflags! {
    /// Flags of renameat2(2), with the kernel's bits.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RenameFlags: u32 {
        /// `RENAME_NOREPLACE`.
        const NOREPLACE = 1;
        /// `RENAME_EXCHANGE`.
        const EXCHANGE = 2;
        /// `RENAME_WHITEOUT`.
        const WHITEOUT = 4;
    }
}
