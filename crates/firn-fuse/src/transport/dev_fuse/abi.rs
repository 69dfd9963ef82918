//! Messages of the kernel's FUSE protocol, version 7.41, that Firn reads or sends. Names and layouts are those of
//! `include/uapi/linux/fuse.h`; all fields are in the byte order of the machine.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Major version of the protocol.
pub(super) const MAJOR: u32 = 7;
/// Newest minor version that Firn knows. Both sides use the older of their two versions.
pub(super) const MINOR: u32 = 41;
/// Oldest minor version that accepts an [`InitOut`] of this length (Linux 3.15). The other messages are older.
pub(super) const MINOR_MIN: u32 = 23;

/// Kinds of requests.
pub(super) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const READLINK: u32 = 5;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const SETXATTR: u32 = 21;
    pub(crate) const GETXATTR: u32 = 22;
    pub(crate) const LISTXATTR: u32 = 23;
    pub(crate) const REMOVEXATTR: u32 = 24;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const GETLK: u32 = 31;
    pub(crate) const SETLK: u32 = 32;
    pub(crate) const SETLKW: u32 = 33;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const NOTIFY_REPLY: u32 = 41;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const READDIRPLUS: u32 = 44;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
}

/// Kinds of notifications. A notification is a message with `unique` 0 and its kind in `error`.
pub(super) mod notification {
    pub(crate) const INVAL_INODE: i32 = 2;
    pub(crate) const INVAL_ENTRY: i32 = 3;
    pub(crate) const STORE: i32 = 4;
    pub(crate) const RESEND: i32 = 7;
}

/// Capabilities in INIT: `flags` has the lower half, `flags2` the upper half.
pub(super) mod init_flags {
    pub(crate) const ASYNC_READ: u64 = 1 << 0;
    pub(crate) const POSIX_LOCKS: u64 = 1 << 1;
    pub(crate) const BIG_WRITES: u64 = 1 << 5;
    pub(crate) const DONT_MASK: u64 = 1 << 6;
    pub(crate) const FLOCK_LOCKS: u64 = 1 << 10;
    pub(crate) const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub(crate) const DO_READDIRPLUS: u64 = 1 << 13;
    pub(crate) const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub(crate) const ASYNC_DIO: u64 = 1 << 15;
    pub(crate) const PARALLEL_DIROPS: u64 = 1 << 18;
    pub(crate) const POSIX_ACL: u64 = 1 << 20;
    pub(crate) const MAX_PAGES: u64 = 1 << 22;
    pub(crate) const INIT_EXT: u64 = 1 << 30;
    pub(crate) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(crate) const PASSTHROUGH: u64 = 1 << 37;
    /// The kernel can send requests again that were read and not answered (Linux 6.9).
    pub(crate) const HAS_RESEND: u64 = 1 << 39;
    pub(crate) const ALLOW_IDMAP: u64 = 1 << 40;
}

/// Flags of the answer to an open: how the kernel treats the file.
pub(super) mod open_flags {
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    /// Linux 5.16 and later; earlier kernels ignore it.
    pub(crate) const NOFLUSH: u32 = 1 << 5;
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
    pub(crate) const PASSTHROUGH: u32 = 1 << 7;
}

/// Flags that say which fields of [`SetattrIn`] are valid.
pub(super) mod setattr_valid {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
    pub(crate) const ATIME: u32 = 1 << 4;
    pub(crate) const MTIME: u32 = 1 << 5;
    pub(crate) const ATIME_NOW: u32 = 1 << 7;
    pub(crate) const MTIME_NOW: u32 = 1 << 8;
}

/// [`GetattrIn::fh`] is valid: the caller has the file open.
pub(super) const GETATTR_FH: u32 = 1 << 0;
/// The kernel writes back a page of its cache, or the part of a page that a store to a mapping has changed.
pub(super) const WRITE_CACHE: u32 = 1 << 0;
/// The write clears set-id bits, because the writer has no CAP_FSETID.
pub(super) const WRITE_KILL_SUIDGID: u32 = 1 << 2;
/// Sync the data, and only those attributes that are needed to read it.
pub(super) const FSYNC_DATA: u32 = 1 << 0;
/// The lock is one of flock(2).
pub(super) const LOCK_FLOCK: u32 = 1 << 0;
/// An ioctl whose arguments firnd would have to fetch from the caller itself.
pub(super) const IOCTL_UNRESTRICTED: u32 = 1 << 1;

macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? } = $size:literal)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
            #[repr(C)]
            pub(super) struct $name { $(pub(super) $field: $type),* }
            const _: () = assert!(size_of::<$name>() == $size);
        )*
    };
}

messages! {
    /// Precedes each request.
    InHeader {
        len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, extensions: u16, padding: u16,
    } = 40
    /// Precedes each answer and each notification.
    OutHeader { len: u32, error: i32, unique: u64 } = 16

    InitIn { major: u32, minor: u32, readahead_bytes_max: u32, flags: u32, flags2: u32 } = 20
    InitOut {
        major: u32, minor: u32, readahead_bytes_max: u32, flags: u32, background_max: u16, congestion_threshold: u16,
        write_bytes_max: u32, time_granularity_ns: u32, pages_max: u16, map_alignment: u16, flags2: u32,
        stack_depth_max: u32, request_timeout: u16, unused: [u16; 11],
    } = 64

    ForgetIn { lookups: u64 } = 8
    BatchForgetIn { count: u32, padding: u32 } = 8
    ForgetOne { nodeid: u64, lookups: u64 } = 16
    InterruptIn { unique: u64 } = 8

    GetattrIn { flags: u32, padding: u32, fh: u64 } = 16
    SetattrIn {
        valid: u32, padding: u32, fh: u64, size: u64, lock_owner: u64, atime: i64, mtime: i64, ctime: i64,
        atime_ns: u32, mtime_ns: u32, ctime_ns: u32, mode: u32, unused4: u32, uid: u32, gid: u32, unused5: u32,
    } = 88
    MknodIn { mode: u32, rdev: u32, umask: u32, padding: u32 } = 16
    MkdirIn { mode: u32, umask: u32 } = 8
    RenameIn { new_dir: u64 } = 8
    Rename2In { new_dir: u64, flags: u32, padding: u32 } = 16
    LinkIn { old_nodeid: u64 } = 8
    OpenIn { flags: u32, open_flags: u32 } = 8
    CreateIn { flags: u32, mode: u32, umask: u32, open_flags: u32 } = 16
    /// The body of READ, READDIR and READDIRPLUS.
    ReadIn { fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32 } = 40
    WriteIn { fh: u64, offset: u64, size: u32, write_flags: u32, lock_owner: u64, flags: u32, padding: u32 } = 40
    /// The body of RELEASE and RELEASEDIR.
    ReleaseIn { fh: u64, flags: u32, release_flags: u32, lock_owner: u64 } = 24
    FlushIn { fh: u64, unused: u32, padding: u32, lock_owner: u64 } = 24
    FsyncIn { fh: u64, flags: u32, padding: u32 } = 16
    /// A range; `last` is included. `kind`: as `l_type` in fcntl(2).
    FileLock { first: u64, last: u64, kind: u32, pid: u32 } = 24
    /// The body of GETLK, SETLK and SETLKW.
    LockIn { fh: u64, owner: u64, lock: FileLock, flags: u32, padding: u32 } = 48
    SetxattrIn { size: u32, flags: u32 } = 8
    /// The body of GETXATTR and LISTXATTR.
    GetxattrIn { size: u32, padding: u32 } = 8
    IoctlIn { fh: u64, flags: u32, command: u32, argument: u64, in_size: u32, out_size: u32 } = 32
    FallocateIn { fh: u64, offset: u64, len: u64, mode: u32, padding: u32 } = 32
    LseekIn { fh: u64, offset: u64, whence: u32, padding: u32 } = 24
    CopyFileRangeIn {
        fh_in: u64, offset_in: u64, nodeid_out: u64, fh_out: u64, offset_out: u64, len: u64, flags: u64,
    } = 56

    Attr {
        ino: u64, size: u64, blocks: u64, atime: i64, mtime: i64, ctime: i64, atime_ns: u32, mtime_ns: u32,
        ctime_ns: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, block_bytes: u32, flags: u32,
    } = 88
    AttrOut { valid_s: u64, valid_ns: u32, padding: u32, attr: Attr } = 104
    EntryOut {
        nodeid: u64, generation: u64, entry_valid_s: u64, attr_valid_s: u64, entry_valid_ns: u32, attr_valid_ns: u32,
        attr: Attr,
    } = 128
    OpenOut { fh: u64, open_flags: u32, backing_id: i32 } = 16
    WriteOut { size: u32, padding: u32 } = 8
    GetxattrOut { size: u32, padding: u32 } = 8
    LseekOut { offset: u64 } = 8
    IoctlOut { result: i32, flags: u32, in_iovecs: u32, out_iovecs: u32 } = 16
    StatfsOut {
        blocks: u64, blocks_free: u64, blocks_available: u64, files: u64, files_free: u64, block_bytes: u32,
        name_max: u32, fragment_bytes: u32, padding: u32, spare: [u32; 6],
    } = 80
    /// Precedes each name in the answer to READDIR.
    Dirent { ino: u64, offset: u64, name_len: u32, kind: u32 } = 24

    InvalInodeOut { nodeid: u64, offset: i64, len: i64 } = 24
    InvalEntryOut { parent: u64, name_len: u32, flags: u32 } = 16
    StoreOut { nodeid: u64, offset: u64, size: u32, padding: u32 } = 24

    /// Argument of the ioctl that registers a file for passthrough.
    BackingMap { fd: i32, flags: u32, padding: u64 } = 16
}

/// Entries in the answer to READDIR are padded to a multiple of this.
pub(super) const DIRENT_ALIGN: usize = 8;
