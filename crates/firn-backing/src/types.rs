//! Data types that a [`Backing`](crate::Backing) returns: attributes, times, directory entries, and other facts about
//! files.
//!
//! The types have no reference to a backing, so layers pass them on unchanged.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Instant;

use firn_format::clock;
use rustix::time::ClockId;

/// Number of a lane. A lane is one I/O server; it has its own queue of writes and its own limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneIndex(u16);

impl LaneIndex {
    /// The only lane of a backing with one server.
    pub const FIRST: Self = Self(0);

    /// Returns the lane with this number, counted from 0.
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Returns the number of the lane, counted from 0, as an index into a table of all lanes.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// Properties of a backing that never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Number of lanes (I/O servers) that hold the data of its files; at least 1.
    pub lane_count: u16,
    /// Whether a file needs further work after the last program of this host has closed it for writing
    /// ([`FileUse::Written`](crate::FileUse::Written)).
    pub finishes_files: bool,
    /// Whether all processes that have a descriptor of one open file share its range locks
    /// ([`LockRequest::Range`](crate::LockRequest)). Such a lock ends with the last descriptor. Otherwise it ends with
    /// the process that acquired it.
    pub shares_range_locks: bool,
}

/// Properties of an object that are known without a call of the file system. The *drain*, which writes pending bytes to
/// the backing, chooses its next writes by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Lane (I/O server) that holds its data, one of [`Features::lane_count`]. A wrong lane costs time but does no
    /// harm.
    pub lane: LaneIndex,
    /// Whether scattered writes are cheap: one [`Files::write_parts`](crate::Files::write_parts) of distant pieces
    /// costs about as much as one of adjoining pieces. For a directory: whether this may hold for a file below it. A
    /// wrong value does no harm.
    pub gathers: bool,
    /// Counter that grows each time this host learns that another host changed the bytes of the file while it was open
    /// here.
    pub changes_by_others: u64,
}

/// Contiguous bytes of a file.
#[derive(Clone, Copy, Debug)]
pub struct DataPart<'a> {
    /// Offset of the first byte in the file.
    pub offset: u64,
    /// The bytes, as slices in order.
    pub data: &'a [IoSlice<'a>],
}

impl DataPart<'_> {
    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.data.iter().map(|slice| slice.len() as u64).sum()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Kind of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
}

impl Kind {
    /// Returns the kind that the type bits of `st_mode` mean; `None` if they mean no known kind.
    pub fn from_mode(mode: u32) -> Option<Self> {
        match mode & libc::S_IFMT {
            libc::S_IFREG => Some(Self::File),
            libc::S_IFDIR => Some(Self::Dir),
            libc::S_IFLNK => Some(Self::Symlink),
            libc::S_IFIFO => Some(Self::Fifo),
            libc::S_IFSOCK => Some(Self::Socket),
            libc::S_IFCHR => Some(Self::CharDevice),
            libc::S_IFBLK => Some(Self::BlockDevice),
            _ => None,
        }
    }
}

/// A point in time since 1970, with `0 <= nsec < 10^9`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Seconds; negative before 1970.
    pub sec: i64,
    /// Nanoseconds within the second.
    pub nsec: u32,
}

/// Nanoseconds in a second.
const NS_PER_S: u64 = 1_000_000_000;

impl Time {
    /// Returns the present time of the clock with which the kernel stamps files ([`firn_format::clock`]). So times that
    /// Firn sets and times that the kernel sets are in order.
    pub fn now() -> Self {
        let now = rustix::time::clock_gettime(if Self::is_exact() {
            ClockId::Realtime
        } else {
            ClockId::RealtimeCoarse
        });
        Self {
            sec: now.tv_sec,
            nsec: now.tv_nsec as u32,
        }
    }

    /// Whether the kernel may stamp files with exact times, and not only with the time of the last tick.
    pub(crate) fn is_exact() -> bool {
        static IS_EXACT: OnceLock<bool> = OnceLock::new();
        *IS_EXACT.get_or_init(|| clock::is_exact(rustix::system::uname().release().to_bytes()))
    }

    /// Returns the present time, or a time just after `last` if `last` is up to two ticks ([`TICK_NS_MAX`]) ahead of
    /// the present time. So each change gets a later time than the change before.
    pub fn now_after(last: Option<Self>) -> Self {
        let now = Self::now();
        match last {
            Some(last) if (now..now.plus_ns(2 * TICK_NS_MAX)).contains(&last) => last.plus_ns(1),
            _ => now,
        }
    }

    /// Returns nanoseconds since 1970: 0 for earlier times, and the largest number for times after 2554.
    pub fn to_ns(self) -> u64 {
        let seconds = u64::try_from(self.sec).ok();
        seconds.map_or(0, |seconds| {
            seconds
                .saturating_mul(NS_PER_S)
                .saturating_add(self.nsec.into())
        })
    }

    /// Returns the time that is `ns` nanoseconds after 1970.
    pub fn from_ns(ns: u64) -> Self {
        Self {
            sec: (ns / NS_PER_S) as i64,
            nsec: (ns % NS_PER_S) as u32,
        }
    }

    /// Returns the time `ns` nanoseconds later; `ns` is below 10^9.
    fn plus_ns(self, ns: u32) -> Self {
        let nsec = self.nsec + ns;
        Self {
            sec: self.sec + i64::from(nsec / NS_PER_S as u32),
            nsec: nsec % NS_PER_S as u32,
        }
    }
}

/// Longest tick of a kernel's clock: that of the lowest configurable rate, 100 Hz.
pub const TICK_NS_MAX: u32 = 10_000_000;

/// Attributes as statx(2) returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Device of the object's file system. Together with `ino` it identifies the object.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Kind of object, also in the type bits of `mode`.
    pub kind: Kind,
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// User id of the owner.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Device number of a device file, in userspace's encoding of `dev_t`.
    pub rdev: u64,
    /// Length in bytes.
    pub size: u64,
    /// 512-byte blocks allocated.
    pub blocks: u64,
    /// Preferred I/O size in bytes.
    pub blksize: u32,
    /// Time of the last access.
    pub atime: Time,
    /// Time of the last change of contents.
    pub mtime: Time,
    /// Time of the last change of attributes.
    pub ctime: Time,
    /// Time of creation, if the file system records it. It distinguishes an object from an older one with the same
    /// inode number.
    pub btime: Option<Time>,
}

/// Whether the kernel may serve reads of an open file by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelReads {
    /// The kernel may keep pages while the file is open, until this host learns that other hosts changed the file
    /// ([`Facts::changes_by_others`]). Attributes do not show such a change.
    Shared,
    /// The kernel may keep pages until the next open of the file.
    Cached,
    /// The kernel may read the file of the backing directly, if there is a descriptor of it.
    Passthrough,
}

/// A range of a file that is contiguous in a file of the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocatedPart {
    /// Offset of the range in the file.
    pub offset: u64,
    /// Length of the range.
    pub len: u64,
    /// Index in [`Located::files`] of the file with the bytes. `None`: this answer does not contain the file; call
    /// `locate` again, from an offset in this range.
    pub file: Option<usize>,
    /// Offset of the bytes in that file.
    pub position: u64,
}

/// Where ranges of a file are in files of the backing, for a process that reads them itself.
#[derive(Debug)]
pub struct Located {
    /// Ranges, sorted and without overlap. Other bytes can be read only with [`Files::read_at`](crate::Files::read_at).
    pub parts: Vec<LocatedPart>,
    /// Files of the backing with the bytes of the ranges, open for reading only.
    pub files: Vec<OwnedFd>,
    /// Offset up to which the requested range was searched.
    pub end: u64,
    /// Time up to which the answer is valid. Later, other hosts may have changed the file without notice to this host.
    pub until: Instant,
}

/// Which other locks may exist together with a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// No other lock may overlap.
    Exclusive,
    /// Other shared locks may overlap.
    Shared,
}

/// Range of a file that a lock covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockRange {
    /// Offset of the first byte.
    pub first: u64,
    /// Offset of the last byte, at most [`LockRange::LAST`].
    pub last: u64,
}

impl LockRange {
    /// Offset of the last possible byte. A range up to it reaches to the end of the file, however long the file
    /// becomes.
    pub const LAST: u64 = i64::MAX as u64;
    /// All bytes.
    pub const WHOLE: Self = Self {
        first: 0,
        last: Self::LAST,
    };

    /// Whether the ranges have a byte in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// Returns this range without `other`: what is before `other`, and what is after it.
    pub fn without(&self, other: &Self) -> impl Iterator<Item = Self> + use<> {
        let mut part_before = None;
        let mut part_after = None;
        if self.overlaps(other) {
            if self.first < other.first {
                part_before = Some(Self {
                    first: self.first,
                    last: other.first - 1,
                });
            }
            if other.last < self.last {
                part_after = Some(Self {
                    first: other.last + 1,
                    last: self.last,
                });
            }
        } else {
            part_before = Some(*self);
        }
        part_before.into_iter().chain(part_after)
    }
}

/// One entry of a directory.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// The name.
    pub name: &'a OsStr,
    /// Inode number.
    pub ino: u64,
    /// Kind of the object, if the file system reports it.
    pub kind: Option<Kind>,
    /// Position from which the listing resumes *after* this entry.
    pub cookie: i64,
}

/// Figures of a file system, as in statvfs(3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Fundamental block size in bytes.
    pub block_size: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for users without privilege.
    pub blocks_available: u64,
    /// Number of inodes.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Longest name in bytes.
    pub name_max: u32,
}
