//! Plain types that frontends (the parts that answer the kernel) and the engine exchange: numbers, modes, results and
//! refusals.

use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;

use firn_backing::{Attr, Errno, SetTime};

#[cfg(doc)]
use crate::{KernelCache, OpenFiles, Room};

/// Number of an inode while the kernel has references to it. 1 is the root, as in FUSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeId(pub u64);
/// The root of the mount.
pub const ROOT: InodeId = InodeId(1);

/// Number of an open file or directory. It is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandleId(pub u64);

/// Result of resolving a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode; its lookup count went up by one.
    pub inode: InodeId,
    /// Attributes with pending data (bytes that are not in the backing yet) counted in.
    pub attr: Attr,
}

/// Cached data of the kernel that became invalid by a change that the kernel did not request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cached {
    /// A name that now leads to another object, or to none.
    Name {
        /// The directory.
        parent: InodeId,
        /// The name in it.
        name: OsString,
    },
    /// Attributes and pages of an inode.
    Inode(InodeId),
}

/// How the frontend must serve an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads and writes are sent to the engine.
    Engine,
    /// The kernel may read the backing file itself ([`OpenFiles::backing_fd`] gives the descriptor), because nothing
    /// is pending and no writer has the file open. Every later open of the inode gets this mode too, until all of
    /// them are released.
    Passthrough,
    /// The kernel may read a memory file with all bytes of the file itself ([`OpenFiles::memory_fd`] gives the
    /// descriptor). Every later open of the inode gets this mode too, until all of them are released. Handles that
    /// may write still send reads and writes to the engine, which stores each change in the memory file at once.
    Memory,
    /// The kernel may cache pages and read ahead, because this handle only reads and the file has no pending bytes or
    /// no writer. The frontend makes the kernel drop the pages after each write ([`KernelCache::has_cached_readers`]).
    Cached {
        /// Whether pages that the kernel cached when the file was last open are still valid.
        keep: bool,
    },
}

/// Result of an open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The handle, for later calls.
    pub handle: HandleId,
    /// How to serve the handle.
    pub mode: OpenMode,
    /// Length of the file, if the kernel may have recorded a smaller one. The frontend reports it to the kernel and
    /// then calls [`KernelCache::record_kernel_size`].
    pub size: Option<u64>,
}

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Number of bytes that were written: all, or those that the arena had room for.
    Bytes(usize),
    /// Nothing was written, as the arena (the shared memory for written data) has no room now. The caller writes again
    /// after [`Room::call_when_space_is_free`] calls back.
    Full,
}

/// Position of bytes that were appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// File offset of the first byte.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

/// Attributes to set. `None` or [`SetTime::Keep`] leaves an attribute as it is.
#[derive(Clone, Copy, Debug)]
pub struct SetAttr {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Access time.
    pub atime: SetTime,
    /// Modification time.
    pub mtime: SetTime,
}

impl SetAttr {
    /// Returns whether no attribute is to be set.
    pub fn is_empty(&self) -> bool {
        let ids = self.uid.is_none() && self.gid.is_none();
        ids && self.mode.is_none()
            && self.size.is_none()
            && self.atime == SetTime::Keep
            && self.mtime == SetTime::Keep
    }
}

/// A connection of a client process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(pub u64);

/// Identifies a file of the backing.
pub trait FileIdentity: Send + Sync {
    /// Inode number in the backing.
    fn number(&self) -> u64;
    /// One of the file's paths below the mount; empty if it has no name.
    fn path(&self) -> Vec<u8>;
}

/// Callback for each range that a process wrote directly, called when the engine ingests the range. The number is the
/// process id. It runs with the file locked, so it must not call the engine.
pub type DirectWriteObserver = Box<dyn Fn(&dyn FileIdentity, u32, Range<u64>) + Send + Sync>;

/// The right of a client to write an open file directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectGrant {
    /// Number of the file in piece records.
    pub file_id: crate::FileId,
    /// Length of the file in bytes.
    pub size: u64,
    /// The inode. The kernel must not cache its attributes.
    pub inode: InodeId,
}

/// A client's request for slabs to fill.
#[derive(Clone, Copy, Debug)]
pub struct SlabRequest {
    /// Process id of the client, as firnd sees it; 0 if firnd cannot see the process.
    pub pid: u32,
    /// CPU that the client runs on; `None` if it is not known.
    pub cpu: Option<u32>,
    /// Number of bytes that the client is about to write.
    pub bytes: u64,
}

/// List of the places of a file's bytes, for a process that reads the bytes itself.
#[derive(Debug)]
pub struct DirectList {
    /// Length of the file in bytes.
    pub size: u64,
    /// Position of the file's word, in bytes from the start of the arena.
    pub slot: u64,
    /// Value of the file's word while the list is valid.
    pub stamp: u32,
    /// Parts of the file, sorted by offset, without overlap.
    pub extents: Vec<firn_format::data_socket::Extent>,
    /// File offset up to which the list is complete.
    pub end: u64,
    /// Descriptors of the files that extents name by index.
    pub files: Vec<OwnedFd>,
    /// Time after which the list may be invalid; `None` if only a change of the file's word makes it invalid.
    pub until: Option<Instant>,
}

/// Why a request of a client is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectRefusal {
    /// The file is not open, or not open in this way, or the grant ended.
    BadToken,
    /// The file can only be used through the kernel at present.
    Busy,
    /// The arena has no room at present.
    Full,
}

/// Counters since the attach, for computing rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// Number of bytes accepted from programs.
    pub ingest_bytes: u64,
    /// Number of bytes written to the backing.
    pub drain_bytes: u64,
    /// Number of bytes moved to the spill file.
    pub moved_bytes: u64,
}

/// Why a process closes a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// The process called close(2).
    Called,
    /// The process exited by itself with the descriptor open.
    Exited,
    /// A signal killed the process while the descriptor was open.
    Killed,
}

/// Callback that gets the result of an operation that had to wait. It is called once.
pub type Done = Box<dyn FnOnce(Result<(), Errno>) + Send>;
