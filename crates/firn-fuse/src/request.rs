//! Requests of the kernel as typed values, independent of the transport (the code that read and parsed them).
//!
//! A [`Request`] borrows names and data from the transport's buffer, so no byte is copied. Data that is needed after
//! [`crate::dispatcher::Dispatcher::dispatch`] has returned must be copied.
//!
//! A FORGET is no [`Operation`], because it has no answer: it goes to [`crate::dispatcher::Dispatcher::forget`]. The
//! transport answers ENOSYS to operations that Firn leaves to the kernel (access, bmap, poll).

use std::ffi::{OsStr, OsString};

use firn_backing::{Caller, LockMode, LockRange};
use firn_engine::{HandleId, InodeId, SetAttr};
use firn_hosts::LockKind;

/// One request that has an answer.
pub(crate) struct Request<'a> {
    /// The kernel's number of the request on this connection.
    pub(crate) unique: u64,
    /// The calling process; all zero if the kernel asks for itself.
    pub(crate) caller: Caller,
    pub(crate) operation: Operation<'a>,
}

/// A name in a directory.
#[derive(Clone, Copy)]
pub(crate) struct Name<'a> {
    pub(crate) parent: InodeId,
    pub(crate) name: &'a OsStr,
}

/// A [`Name`] that outlives its request.
#[derive(Clone)]
pub(crate) struct OwnedName {
    pub(crate) parent: InodeId,
    pub(crate) name: OsString,
}

impl Name<'_> {
    pub(crate) fn to_owned(self) -> OwnedName {
        OwnedName {
            parent: self.parent,
            name: self.name.to_owned(),
        }
    }
}

/// Mode bits of a new object, and the umask of its creator.
#[derive(Clone, Copy)]
pub(crate) struct NewMode {
    pub(crate) mode: u32,
    pub(crate) umask: u32,
}

/// A read of a file.
pub(crate) struct Read {
    pub(crate) inode: InodeId,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    pub(crate) size: u32,
}

/// A write to a file.
pub(crate) struct Write<'a> {
    pub(crate) inode: InodeId,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    pub(crate) data: &'a [u8],
    /// The kernel writes back a page of its cache. The request names no process that changed the page.
    pub(crate) from_cache: bool,
    /// The writer may not keep set-id bits, because the kernel found no CAP_FSETID.
    pub(crate) kills_set_id: bool,
    /// The file is open with O_APPEND. `offset` is the length of the file that the kernel has recorded.
    pub(crate) appends: bool,
}

/// A request about a lock of an open file, as fcntl(2) and flock(2) make it.
#[derive(Clone, Copy)]
pub(crate) struct Lock {
    pub(crate) inode: InodeId,
    pub(crate) handle: HandleId,
    /// The kernel's number of the lock's owner.
    pub(crate) owner: u64,
    pub(crate) pid: u32,
    pub(crate) kind: LockKind,
    pub(crate) range: LockRange,
    /// Whether the lock is shared or exclusive; `None` unlocks.
    pub(crate) mode: Option<LockMode>,
}

/// A fallocate(2) of a range of an open file. `mode` has the flags of fallocate(2).
pub(crate) struct Fallocate {
    pub(crate) inode: InodeId,
    pub(crate) handle: HandleId,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) mode: i32,
}

/// Maximum number of bytes that one request of copy_file_range(2) copies. The count in the answer has 32 bits, and a
/// copy of this length ends in reasonable time on any backing.
pub(crate) const COPY_BYTES_MAX: u64 = 1 << 30;

/// copy_file_range(2) between two open files of the mount.
pub(crate) struct CopyRange {
    pub(crate) from: HandleId,
    pub(crate) from_offset: u64,
    pub(crate) to_inode: InodeId,
    pub(crate) to: HandleId,
    pub(crate) to_offset: u64,
    pub(crate) len: u64,
}

macro_rules! operations {
    ($($(#[$doc:meta])* $operation:ident $fields:tt = $name:literal),* $(,)?) => {
        /// An operation with its arguments, in the order of the kernel's table.
        pub(crate) enum Operation<'a> { $($(#[$doc])* $operation $fields),* }

        /// An operation without its arguments.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum OperationKind { $($operation),* }

        /// Names of the operations in the log and in the status, by [`OperationKind`].
        pub(crate) const OPERATION_NAMES: [&str; [$($name),*].len()] = [$($name),*];

        impl Operation<'_> {
            pub(crate) fn kind(&self) -> OperationKind {
                match self { $(Self::$operation { .. } => OperationKind::$operation),* }
            }
        }
    };
}

operations! {
    Lookup(Name<'a>) = "lookup",
    Getattr { inode: InodeId, handle: Option<HandleId> } = "getattr",
    Setattr { inode: InodeId, set: SetAttr } = "setattr",
    Readlink { inode: InodeId } = "readlink",
    Mknod { child: Name<'a>, mode: NewMode, device: u64 } = "mknod",
    Mkdir { child: Name<'a>, mode: NewMode } = "mkdir",
    Unlink(Name<'a>) = "unlink",
    Rmdir(Name<'a>) = "rmdir",
    Symlink { child: Name<'a>, target: &'a OsStr } = "symlink",
    /// `flags`: those of renameat2(2).
    Rename { from: Name<'a>, to: Name<'a>, flags: u32 } = "rename",
    Link { inode: InodeId, child: Name<'a> } = "link",
    /// `flags`: those of open(2).
    Open { inode: InodeId, flags: i32 } = "open",
    Read(Read) = "read",
    Write(Write<'a>) = "write",
    /// A close(2) of a descriptor. `owner`: owner of the POSIX locks that end with it.
    Flush { inode: InodeId, handle: HandleId, owner: u64 } = "flush",
    Release { inode: InodeId, handle: HandleId } = "release",
    Fsync { inode: InodeId, handle: HandleId, data_only: bool } = "fsync",
    Opendir { inode: InodeId } = "opendir",
    /// Lists the entries after the one with this cookie; with 0, all entries.
    Readdir { inode: InodeId, handle: HandleId, cookie: i64 } = "readdir",
    /// Does what [`Operation::Readdir`] does, with attributes. Each entry of the answer counts as one look-up.
    Readdirplus { inode: InodeId, handle: HandleId, cookie: i64 } = "readdirplus",
    Releasedir { inode: InodeId, handle: HandleId } = "releasedir",
    Fsyncdir { inode: InodeId } = "fsyncdir",
    Statfs { inode: InodeId } = "statfs",
    /// `flags`: those of setxattr(2).
    Setxattr { inode: InodeId, name: &'a OsStr, value: &'a [u8], flags: i32 } = "setxattr",
    /// `size`: length of the caller's buffer; 0 asks for the length of the value only.
    Getxattr { inode: InodeId, name: &'a OsStr, size: u32 } = "getxattr",
    /// `size`: as for [`Operation::Getxattr`].
    Listxattr { inode: InodeId, size: u32 } = "listxattr",
    Removexattr { inode: InodeId, name: &'a OsStr } = "removexattr",
    Create { child: Name<'a>, mode: NewMode, flags: i32 } = "create",
    Ioctl { inode: InodeId, handle: HandleId, command: u32, out_size: u32 } = "ioctl",
    Fallocate(Fallocate) = "fallocate",
    /// `whence`: SEEK_DATA or SEEK_HOLE; the kernel answers the other values itself.
    Lseek { inode: InodeId, handle: HandleId, offset: i64, whence: i32 } = "lseek",
    CopyRange(CopyRange) = "copy_file_range",
    /// F_GETLK of fcntl(2).
    Getlk(Lock) = "getlk",
    /// F_SETLK and flock(2) with LOCK_NB; with `waits` F_SETLKW and flock(2).
    Setlk { lock: Lock, waits: bool } = "setlk",
}

impl OperationKind {
    /// Whether the operation changes a file, a name or a lock. Its caller, if alive, must then get the true outcome,
    /// even if a signal asks it to end.
    pub(crate) fn is_change(self) -> bool {
        match self {
            Self::Setattr
            | Self::Mknod
            | Self::Mkdir
            | Self::Unlink
            | Self::Rmdir
            | Self::Symlink
            | Self::Rename
            | Self::Link
            | Self::Write
            | Self::Setxattr
            | Self::Removexattr
            | Self::Create
            | Self::Fallocate
            | Self::CopyRange
            | Self::Setlk => true,
            Self::Lookup
            | Self::Getattr
            | Self::Readlink
            | Self::Open
            | Self::Read
            | Self::Flush
            | Self::Release
            | Self::Fsync
            | Self::Opendir
            | Self::Readdir
            | Self::Readdirplus
            | Self::Releasedir
            | Self::Fsyncdir
            | Self::Statfs
            | Self::Getxattr
            | Self::Listxattr
            | Self::Ioctl
            | Self::Lseek
            | Self::Getlk => false,
        }
    }

    /// Whether any signal that runs a handler ends the wait. For fcntl(2) and flock(2), programs rely on such a signal:
    /// they limit the wait with an alarm.
    pub(crate) fn is_ended_by_any_signal(self) -> bool {
        self == Self::Setlk
    }

    /// The operation's name in the log and in the status.
    pub(crate) fn name(self) -> &'static str {
        OPERATION_NAMES[self as usize]
    }
}

impl<'a> Operation<'a> {
    /// Returns the inode that the operation is about. If it is about a name, returns the directory and the name in it.
    pub(crate) fn inode_and_name(&self) -> (InodeId, Option<&'a OsStr>) {
        match self {
            Self::Lookup(child)
            | Self::Unlink(child)
            | Self::Rmdir(child)
            | Self::Mknod { child, .. }
            | Self::Mkdir { child, .. }
            | Self::Symlink { child, .. }
            | Self::Rename { from: child, .. }
            | Self::Link { child, .. }
            | Self::Create { child, .. } => (child.parent, Some(child.name)),
            Self::Getattr { inode, .. }
            | Self::Setattr { inode, .. }
            | Self::Readlink { inode }
            | Self::Open { inode, .. }
            | Self::Read(Read { inode, .. })
            | Self::Write(Write { inode, .. })
            | Self::Flush { inode, .. }
            | Self::Release { inode, .. }
            | Self::Fsync { inode, .. }
            | Self::Opendir { inode }
            | Self::Readdir { inode, .. }
            | Self::Readdirplus { inode, .. }
            | Self::Releasedir { inode, .. }
            | Self::Fsyncdir { inode }
            | Self::Statfs { inode }
            | Self::Setxattr { inode, .. }
            | Self::Getxattr { inode, .. }
            | Self::Listxattr { inode, .. }
            | Self::Removexattr { inode, .. }
            | Self::Ioctl { inode, .. }
            | Self::Fallocate(Fallocate { inode, .. })
            | Self::Lseek { inode, .. }
            | Self::Getlk(Lock { inode, .. })
            | Self::Setlk {
                lock: Lock { inode, .. },
                ..
            }
            | Self::CopyRange(CopyRange {
                to_inode: inode, ..
            }) => (*inode, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_its_name() {
        assert_eq!(OperationKind::Lookup.name(), "lookup");
        assert_eq!(OperationKind::CopyRange.name(), "copy_file_range");
        let inode = InodeId(7);
        let operation = Operation::Readlink { inode };
        assert_eq!(operation.kind().name(), "readlink");
        assert_eq!(operation.inode_and_name(), (inode, None));
    }
}
