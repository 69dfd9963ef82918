//! Plain data that a [`Backing`](crate::Backing) gives out.

use std::ffi::OsStr;
use std::io::IoSlice;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Instant;

use firn_format::clock;
use rustix::time::ClockId;

/// A lane: one I/O server, by its number. Each has a drain queue of its own, and limits of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneIndex(u16);

impl LaneIndex {
    /// The only one, where there is but one server.
    pub const FIRST: Self = Self(0);

    /// The lane with this number, counted from 0.
    pub const fn new(number: u16) -> Self {
        Self(number)
    }

    /// Its number, counted from 0: its place in a table of all lanes.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// What holds for all files of a backing, from its first call to its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// How many lanes, I/O servers, the data of its files lies in: at least one.
    pub lane_count: u16,
    /// Whether something is left to do for a file when no program of this host writes to it any more
    /// ([`FileUse::Written`](crate::FileUse::Written)).
    pub finishes_files: bool,
}

/// What a process knows of an object without asking for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The lane that its data lies in, one of [`Features::lane_count`]. It is advice on which thread writes and when: a
    /// wrong answer costs time and nothing else.
    pub lane: LaneIndex,
    /// Whether one [`Files::write_parts`](crate::Files::write_parts) of pieces that are far from each other costs about as
    /// much as if they were next to each other. Of a directory: whether that may be so of a file below it. It is advice too.
    pub gathers: bool,
    /// Grows each time this host learns that other hosts have changed the bytes of the file while it was open here.
    pub changes_by_others: u64,
}

/// Bytes of a file that follow each other.
#[derive(Clone, Copy, Debug)]
pub struct DataPart<'a> {
    /// Where they begin in the file.
    pub offset: u64,
    /// One slice after the other.
    pub data: &'a [IoSlice<'a>],
}

impl DataPart<'_> {
    /// How many they are.
    pub fn len(&self) -> u64 {
        self.data.iter().map(|slice| slice.len() as u64).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What kind of object a name leads to.
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
    /// From the type bits of `st_mode`; `None` if they name no known kind.
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

/// A point in time: seconds and nanoseconds since the epoch (`0 <= nsec < 10^9`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time {
    /// Seconds; negative before 1970.
    pub sec: i64,
    /// Nanoseconds within the second.
    pub nsec: u32,
}

impl Time {
    /// The clock that the kernel stamps files with ([`firn_format::clock`]), so that times given by Firn and by the backing do
    /// not run backwards against each other.
    pub fn now() -> Self {
        let t = rustix::time::clock_gettime(if Self::is_exact() {
            ClockId::Realtime
        } else {
            ClockId::RealtimeCoarse
        });
        Self {
            sec: t.tv_sec,
            nsec: t.tv_nsec as u32,
        }
    }

    /// Whether the kernel may stamp files with exact times.
    pub(crate) fn is_exact() -> bool {
        static IS_EXACT: OnceLock<bool> = OnceLock::new();
        *IS_EXACT.get_or_init(|| clock::is_exact(rustix::system::uname().release().to_bytes()))
    }

    /// The present, but later than `last` where that was given within the same tick of the clock: a comparison of times
    /// sees each change.
    pub fn now_after(last: Option<Self>) -> Self {
        let now = Self::now();
        match last {
            Some(last) if (now..now.plus_ns(2 * TICK_NS_MAX)).contains(&last) => last.plus_ns(1),
            _ => now,
        }
    }

    /// Nanoseconds since 1970; 0 before, and the largest number after 2554.
    pub fn to_ns(self) -> u64 {
        let sec = u64::try_from(self.sec).ok();
        sec.map_or(0, |sec| {
            sec.saturating_mul(1_000_000_000)
                .saturating_add(self.nsec.into())
        })
    }

    /// From nanoseconds since 1970.
    pub fn from_ns(ns: u64) -> Self {
        Self {
            sec: (ns / 1_000_000_000) as i64,
            nsec: (ns % 1_000_000_000) as u32,
        }
    }

    /// `ns` below 10^9.
    fn plus_ns(self, ns: u32) -> Self {
        let nsec = self.nsec + ns;
        Self {
            sec: self.sec + i64::from(nsec / 1_000_000_000),
            nsec: nsec % 1_000_000_000,
        }
    }
}

/// A tick of the kernel with the lowest rate that it can be built for, 100 Hz.
pub const TICK_NS_MAX: u32 = 10_000_000;

/// Attributes as statx(2) gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Device of the file system that holds the object; with `ino` its identity.
    pub dev: u64,
    /// Inode number.
    pub ino: u64,
    /// Kind of object, also in the type bits of `mode`.
    pub kind: Kind,
    /// `st_mode`: type and permission bits.
    pub mode: u32,
    /// Number of names.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file, `dev_t` as userspace sees it.
    pub rdev: u64,
    /// Bytes.
    pub size: u64,
    /// 512-byte blocks allocated.
    pub blocks: u64,
    /// Preferred I/O size in bytes.
    pub blksize: u32,
    /// Last access.
    pub atime: Time,
    /// Last change of contents.
    pub mtime: Time,
    /// Last change of attributes.
    pub ctime: Time,
    /// Birth, where the file system records it: tells a reused inode number from the old file.
    pub btime: Option<Time>,
}

/// How far the kernel may read an open file by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum KernelReads {
    /// It may keep pages while the file is open, until this host learns that others changed it
    /// ([`Facts::changes_by_others`]): attributes do not tell.
    Shared,
    /// It may keep pages until the file is opened again.
    Cached,
    /// It may read the backing's file, if that has a descriptor.
    Passthrough,
}

/// A part of a file that lies in one piece in a file of the backing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocatedPart {
    /// In the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Which of [`Located::files`] has them; `None`: ask again from a place in this part on.
    pub file: Option<usize>,
    /// Where they begin in that.
    pub position: u64,
}

/// Where bytes of a file lie in files of the backing, for a process that reads them itself.
#[derive(Debug)]
pub struct Located {
    /// Sorted, and without overlap. What is not in them is only to be had by
    /// [`Files::read_at`](crate::Files::read_at).
    pub parts: Vec<LocatedPart>,
    /// Descriptors that can be read by, and not written.
    pub files: Vec<OwnedFd>,
    /// Up to here the range was gone through.
    pub end: u64,
    /// Other hosts may have changed the file, unseen by this one, from then on.
    pub until: Instant,
}

/// Other locks of the same file that this one allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// None.
    Exclusive,
    /// Shared ones.
    Shared,
}

/// Bytes of a file that a lock of a range covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LockRange {
    /// The first one.
    pub first: u64,
    /// The last one, at most [`LockRange::LAST`].
    pub last: u64,
}

impl LockRange {
    /// The last byte that a file can have: a range up to it reaches to the end of the file, wherever that comes to be.
    pub const LAST: u64 = i64::MAX as u64;
    /// All bytes.
    pub const WHOLE: Self = Self {
        first: 0,
        last: Self::LAST,
    };

    /// Whether both have a byte.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.first <= other.last && other.first <= self.last
    }

    /// What is left of it without `other`: before and after that.
    pub fn without(&self, other: &Self) -> impl Iterator<Item = Self> + use<> {
        let Self { first, last } = *self;
        let is_apart = !self.overlaps(other);
        let before = (is_apart || first < other.first).then(|| Self {
            first,
            last: if is_apart { last } else { other.first - 1 },
        });
        let after = (!is_apart && other.last < last).then(|| Self {
            first: other.last + 1,
            last,
        });
        before.into_iter().chain(after)
    }
}

/// One entry of a directory.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// The name.
    pub name: &'a OsStr,
    /// Inode number.
    pub ino: u64,
    /// Kind, where the file system tells.
    pub kind: Option<Kind>,
    /// Where to go on *after* this entry.
    pub cookie: i64,
}

/// What statvfs(3) tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatFs {
    /// Fundamental block size in bytes.
    pub block_size: u64,
    /// Blocks in all.
    pub blocks: u64,
    /// Free blocks.
    pub blocks_free: u64,
    /// Free blocks for users without privilege.
    pub blocks_available: u64,
    /// Inodes in all.
    pub files: u64,
    /// Free inodes.
    pub files_free: u64,
    /// Longest name in bytes.
    pub name_max: u32,
}
