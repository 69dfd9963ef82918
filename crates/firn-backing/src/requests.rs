//! Values that say what a call of a backing is to do: where several calls would do the same, a value says which.

use std::ffi::OsStr;

use bitflags::bitflags;

use crate::{LockMode, LockRange, Time};

/// What to do with one of a file's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// Leave it.
    Keep,
    /// The present.
    Now,
    /// This time.
    At(Time),
}

/// What [`Attributes::stat`](crate::Attributes::stat) is asked about.
#[derive(Debug)]
pub enum Target<'a, I, F> {
    /// An object.
    Inode(&'a I),
    /// An open file.
    File(&'a F),
}

impl<I, F> Clone for Target<'_, I, F> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I, F> Copy for Target<'_, I, F> {}

/// How old attributes may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// As the client of a network file system keeps it, which may be behind what other hosts did.
    Known,
    /// As the server has it. Later reads go as far as the length that this returns.
    Current,
}

/// A change of one attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttrChange<'a> {
    /// fchmod(2); ENOTSUP/EOPNOTSUPP for a symlink.
    Mode(u32),
    /// fchownat(2) of the object itself; `None` leaves an id as it is. A native chown by a caller
    /// without privilege clears set-id bits; the kernel does that here as it does anywhere.
    Owner {
        /// The user.
        uid: Option<u32>,
        /// The group.
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

/// What [`Names::make`](crate::Names::make) makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewKind<'a> {
    /// mkdir(2).
    Dir {
        /// Permission bits.
        mode: u32,
    },
    /// mknod(2): a regular file, a fifo, a socket or a device.
    Node {
        /// Type and permission bits; without a type it is a regular file.
        mode: u32,
        /// Device number, in the kernel's `dev_t` encoding of userspace.
        rdev: u64,
    },
    /// symlink(2).
    Symlink {
        /// Where it leads.
        target: &'a OsStr,
    },
}

/// What [`Names::remove`](crate::Names::remove) removes a name of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remove {
    /// Anything but a directory.
    NonDir,
    /// An empty directory (`AT_REMOVEDIR`).
    Dir,
}

/// What becomes of the length of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resize {
    /// It is this one: ftruncate(2).
    To(u64),
    /// It is this one, or more: another host may have made the file longer since this one asked.
    AtLeast(u64),
    /// Ends a [`Resize::To`] of this host in which it died.
    Finish(u64),
    /// It stays. Contents are changed to what they are, so that the kernel takes away what a change does
    /// (set-user-ID bits, file capabilities) where this process may not.
    Unchanged,
}

/// What becomes of memory that keeps bytes of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageAdvice {
    /// They are going to be synced: they may begin to go to the device.
    WriteOut,
    /// They are not going to be read again: the memory may be used otherwise.
    Forget,
}

/// What programs of this host do with an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileUse {
    /// A program opens it and cannot write: it sees what other hosts have closed.
    OpenedToRead,
    /// A program opens it and may write: what it writes is newer than what other hosts have closed, and they know that it
    /// does.
    OpenedToWrite,
    /// No program of this host has the file open for writing, and what they wrote is written: what is left to do for it
    /// is to be done soon. The call waits for nothing.
    Written,
    /// No program of this host has the file open for writing: all that is left to do for it is done now, as far as
    /// other hosts let it.
    Finished,
}

/// What the receiver of a descriptor does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DescriptorUse {
    /// The kernel reads and writes the file by itself, as far as it is open for that here.
    Passthrough,
    /// Another process reads the file, and cannot write it.
    Reading,
    /// A later process goes on with the file, which may have no name any more: [`Files::adopt`](crate::Files::adopt).
    Keeping,
}

/// A file that a backing has from a descriptor.
#[derive(Debug)]
pub struct Adopted<I, F> {
    /// The object.
    pub inode: I,
    /// The open file.
    pub file: F,
    /// How it is open.
    pub access: Access,
    /// What the object is.
    pub attr: crate::Attr,
}

impl<I, F> Adopted<I, F> {
    /// The same as a layer shows it.
    pub fn map<J, G>(self, inode: impl FnOnce(I) -> J, file: impl FnOnce(F) -> G) -> Adopted<J, G> {
        Adopted {
            inode: inode(self.inode),
            file: file(self.file),
            access: self.access,
            attr: self.attr,
        }
    }
}

/// How much is made durable.
#[derive(Debug)]
pub enum SyncScope<'a, I> {
    /// Everything in the backing. Once this was done, what others change beside this backing may be left out. syncfs(2)
    /// where that reaches the file system; else each file and directory by itself, which the first time takes a walk of
    /// the whole tree.
    All,
    /// Only what was changed through this backing since it was opened, which spares a walk of all else.
    Changes,
    /// A directory and all below it; not the names that lead to it.
    Tree(&'a I),
    /// fsync(2) of a directory: it and the names in it, and the symbolic links and devices in it, which no other call
    /// syncs.
    Dir(&'a I),
}

impl<I> Clone for SyncScope<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for SyncScope<'_, I> {}

/// The user for which a name is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// File system user id of the calling process.
    pub uid: u32,
    /// File system group id of the calling process.
    pub gid: u32,
    /// Process id, 0 if unknown.
    pub pid: u32,
}

/// How to open a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// `O_RDONLY`.
    Read,
    /// `O_WRONLY`.
    Write,
    /// `O_RDWR`.
    ReadWrite,
}

/// What decides where the data of a new file lies: a lane, a log, or neither.
#[derive(Debug)]
pub enum Placing<'a, I> {
    /// Its name, and the directory that it is made in.
    ByName,
    /// The turn, from 0, where turns go round the lanes that take new files. The file lies in no log.
    Turn(u64),
    /// The name that the file is going to have in this directory.
    Named {
        /// The directory.
        parent: &'a I,
        /// The name.
        name: &'a OsStr,
    },
    /// The lane of this file. The new file lies in no log.
    Beside(&'a I),
}

impl<I> Clone for Placing<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I> Copy for Placing<'_, I> {}

impl<'a, I> Placing<'a, I> {
    /// Translates the directory or file into the inode of another backing.
    pub fn map<J>(self, to: impl FnOnce(&'a I) -> &'a J) -> Placing<'a, J> {
        match self {
            Self::ByName => Placing::ByName,
            Self::Turn(turn) => Placing::Turn(turn),
            Self::Named { parent, name } => Placing::Named {
                parent: to(parent),
                name,
            },
            Self::Beside(inode) => Placing::Beside(to(inode)),
        }
    }
}

/// How much [`Sharing::locate`](crate::Sharing::locate) tells at once.
#[derive(Clone, Copy, Debug)]
pub struct LocateLimits {
    /// Parts.
    pub parts_max: usize,
    /// Descriptors. What lies in more files than these is left out.
    pub files_max: usize,
}

/// A lock that is taken, ended or tested, without waiting.
///
/// Locks of whole files and those of ranges do not know of each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockRequest {
    /// flock(2). The lock excludes other open files, of this process or elsewhere. It belongs to the open file, and ends
    /// when that is dropped or its process ends, however it ends. [`LockMode::Exclusive`] needs a file that is open for
    /// writing. How far the lock reaches is the file system's affair: one that keeps it on this host does not say so.
    ///
    /// Not a lock of an open file description (`F_OFD_SETLK`): at a close Linux tells a FUSE server of the unlock for
    /// flock(2) and for the locks of a process, but not for those. So the lock of a killed process would stay.
    File(LockMode),
    /// fcntl(2) with `F_SETLK`: this process has the range locked in this mode from now on. All locks that a process
    /// has of a file end when it closes any open file of it, and when it ends: so a process that locks ranges of a file
    /// has it open once. To lock exclusively needs a file that is open for writing, to share it one that is open for
    /// reading.
    Range(LockRange, LockMode),
    /// fcntl(2) with `F_UNLCK`: this process has the range not locked any more.
    Unlock(LockRange),
    /// fcntl(2) with `F_GETLK`: whether a [`LockRequest::Range`] would be granted now.
    Test(LockRange, LockMode),
}

/// What `seek` looks for.
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
