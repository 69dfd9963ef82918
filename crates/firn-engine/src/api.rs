//! What the engine takes and gives: plain types shared by every frontend.

use std::ffi::OsString;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;

use firn_backing::{Attr, Errno, SetTime};

#[cfg(doc)]
use crate::{KernelCache, OpenFiles, Room};

/// Number of a name space object while the kernel knows it; 1 is the root, as in FUSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InodeId(pub u64);
/// The root of the mount.
pub const ROOT: InodeId = InodeId(1);

/// Number of an open file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HandleId(pub u64);

/// A name resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode; its lookup count went up by one.
    pub inode: InodeId,
    /// Attributes with pending data counted in.
    pub attr: Attr,
}

/// What the kernel may have cached of a tree that changed without a request of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cached {
    /// A name that leads elsewhere now, or nowhere.
    Name {
        /// The directory.
        parent: InodeId,
        /// The name in it.
        name: OsString,
    },
    /// Attributes and pages.
    Inode(InodeId),
}

/// How the frontend shall serve an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenMode {
    /// Reads and writes come to the engine.
    Engine,
    /// Nothing is pending and no writer has the file open: the kernel may read the backing file itself
    /// ([`OpenFiles::backing_fd`] gives it). Every later open of the same inode gets this mode too until
    /// all are released.
    Passthrough,
    /// All bytes of the file are in a memory file, which the kernel may read itself ([`OpenFiles::memory_fd`] gives it). Every
    /// later open of the same inode gets this mode too until all are released; reads and writes of those that may write
    /// come to the engine, and what they change is stored in the memory file at once.
    Memory,
    /// This handle only reads, and the file has no pending bytes or no writer: the kernel may cache pages and read
    /// ahead. It drops them after each write ([`KernelCache::has_cached_readers`]).
    Cached {
        /// What it cached when the file was open before is still right.
        keep: bool,
    },
}

/// An open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// For the calls that follow.
    pub handle: HandleId,
    /// How to serve it.
    pub mode: OpenMode,
    /// The kernel may take the file for shorter than this. Once it knows, call [`KernelCache::note_kernel_size`].
    pub size: Option<u64>,
}

/// What became of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// Number of bytes that are held: all of them, or those before the arena was full.
    Bytes(usize),
    /// The arena has no room now: call again when [`Room::on_space`] says so.
    Full,
}

/// Where bytes are that were appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// Of the first one in the file.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

/// Attributes to set; `None` or [`SetTime::Keep`] leaves one as it is.
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
    /// Whether nothing is to be set.
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

/// Which file of the backing something is about.
pub trait FileIdentity: Send + Sync {
    /// Its inode number in the backing.
    fn number(&self) -> u64;
    /// One of its paths below the mount; empty if it has none.
    fn path(&self) -> Vec<u8>;
}

/// Called with each range that a process wrote directly, when the engine learns of it, and with the number of that
/// process. It is called with the file locked, and calls nothing of the engine.
pub type DirectWriteObserver = Box<dyn Fn(&dyn FileIdentity, u32, Range<u64>) + Send + Sync>;

/// A client may write an open file directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectGrant {
    /// The file in piece records.
    pub file_id: crate::FileId,
    /// Bytes of the file.
    pub size: u64,
    /// The inode, whose attributes the kernel must not keep.
    pub inode: InodeId,
}

/// Where the bytes of a file lie.
#[derive(Debug)]
pub struct DirectList {
    /// Bytes of the file.
    pub size: u64,
    /// The word to look at, in bytes from the start of the arena.
    pub slot: u64,
    /// What stands in it as long as this holds.
    pub stamp: u32,
    /// Sorted by offset; without overlap.
    pub extents: Vec<firn_format::data_socket::Extent>,
    /// Up to here of the file they are all that is known.
    pub end: u64,
    /// The files of the backing that they name.
    pub files: Vec<OwnedFd>,
    /// From then on they may be wrong; none: only the word tells.
    pub until: Option<Instant>,
}

/// Why a client does not get what it asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectRefusal {
    /// No such open file, or not open that way, or its lease is over.
    BadToken,
    /// Only through the kernel, for now.
    Busy,
    /// No room now.
    Full,
}

/// Counters since the attach, from which rates are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transferred {
    /// Bytes taken from programs.
    pub ingest_bytes: u64,
    /// Bytes written to the backing.
    pub drain_bytes: u64,
    /// Bytes moved to the spill file.
    pub moved_bytes: u64,
}

/// How a process came to close a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closing {
    /// It called close(2).
    Called,
    /// It exited by itself with the descriptor open.
    Exited,
    /// It died of a signal with the descriptor open.
    Killed,
}

/// Called once with the outcome of something that had to wait.
pub type Done = Box<dyn FnOnce(Result<(), Errno>) + Send>;
