//! The spill file: space on a local device for chunks of the arena that no longer fit into memory. The *arena* is
//! shared memory with the bytes that are not in the backing directory yet; a *chunk* is the unit in which it is
//! allocated. A *slot* is the place of one chunk.
//!
//! Promises
//! * When [`SpillFile::write`] succeeds, the bytes are on the device, and not only in the page cache. Otherwise a later
//!   write error would lose them, because memory no longer has them.
//! * A file that belongs to another arena is never written to. An existing file is replaced only if it is a spill file
//!   whose arena is gone.
//! * The whole file is allocated at its creation, if the file system supports that.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_format::FormatError;
use firn_format::geometry::Geometry;
use firn_format::quote::quoted_path;
use firn_format::spill::{SPILL_DATA_OFFSET, SPILL_HEADER_BYTES, SpillHeader};
use firn_format::superblock::{SPILL_PATH_MAX, SUPERBLOCK_BYTES, Superblock};
use firn_trust::{Distrust, Expected, FileMetadata};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::map::{FileAccess, crash_point};

/// Longest wait for the lock of the file. A killed firnd closes its files one by one, so the lock may end late.
const LOCK_WAIT: Duration = Duration::from_secs(5);
/// Time between two tries to lock.
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Reasons why a spill file cannot be made or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpillFault {
    /// A system call failed.
    #[error("spill file {}: cannot {what}: {source}", quoted_path(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Error of the call.
        source: Errno,
    },
    /// The device has too little space.
    #[error(
        "spill file {}: no room for {} ({reason}): lower spill-size, or choose another path with spill",
        quoted_path(path),
        firn_format::quantity::bytes(*need)
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes that the file needs.
        need: u64,
        /// Error of the allocation.
        reason: Errno,
    },
    /// Another file is there that is no spill file.
    #[error(
        "{} exists and is no spill file of Firn ({source}): choose another path with spill, or remove the file",
        quoted_path(path)
    )]
    NotSpill {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// Another user could have made the file.
    #[error(
        "spill file {} {reason}; Firn reads nothing from it: remove it, or choose another path with spill",
        quoted_path(path)
    )]
    Distrusted {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: Distrust,
    },
    /// The file belongs to an existing arena.
    #[error(
        "spill file {} belongs to arena {}: choose another path with spill, or recover that arena first",
        quoted_path(path),
        quoted_path(arena)
    )]
    Taken {
        /// The file.
        path: PathBuf,
        /// The path of the other arena.
        arena: PathBuf,
    },
    /// The file does not belong to this arena.
    #[error("spill file {}: {source}", quoted_path(path))]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// The file is shorter than when it was made.
    #[error(
        "spill file {} is truncated: {found} bytes, {expected} needed",
        quoted_path(path)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Present length.
        found: u64,
        /// Length when it was made.
        expected: u64,
    },
    /// The path is too long for the superblock.
    #[error(
        "the path of spill file {} is longer than {SPILL_PATH_MAX} bytes: choose a shorter one",
        quoted_path(path)
    )]
    LongPath {
        /// The file.
        path: PathBuf,
    },
}

impl SpillFault {
    /// Returns the errno that describes the fault best.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Io { source, .. } => *source,
            Self::NoRoom { reason, .. } => *reason,
            Self::NotSpill { .. } | Self::Taken { .. } => Errno::EXIST,
            Self::Distrusted { .. } => Errno::PERM,
            Self::Foreign { .. } | Self::Truncated { .. } => Errno::IO,
            Self::LongPath { .. } => Errno::NAMETOOLONG,
        }
    }
}

/// A spill file that can at least be read.
pub(crate) struct OpenedSpillFile {
    pub(crate) file: SpillFile,
    /// Why no chunk may be moved to the file, if so.
    pub(crate) write_fault: Option<SpillFault>,
}

/// An open spill file.
#[derive(Debug)]
pub struct SpillFile {
    path: PathBuf,
    /// Descriptor for reads, which go through the page cache.
    cached: OwnedFd,
    /// Descriptor for writes of whole slots that bypass the page cache, so that errors of the device show. `None` means
    /// that the file system has no direct I/O.
    direct: Option<OwnedFd>,
    slot_bytes: u64,
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
}

/// Returns a function that makes a fault from the error of a call. `what` says what the call was for.
fn call_fault(path: &Path, what: &'static str) -> impl Fn(Errno) -> SpillFault {
    let path = path.to_owned();
    move |source| SpillFault::Io {
        path: path.clone(),
        what,
        source,
    }
}

/// Makes a fault from the error of an open. If the path leads to anything but a regular file, the fault is the kind of
/// the file, whatever error the kernel returned.
fn open_fault(path: &Path, errno: Errno) -> SpillFault {
    let uid = rustix::process::geteuid().as_raw();
    if let Ok(stat) = rustix::fs::lstat(path)
        && let Err(reason) = FileMetadata::from_stat(&stat).check(Expected::File, uid)
    {
        return SpillFault::Distrusted {
            path: path.into(),
            reason,
        };
    }
    call_fault(path, "open it")(errno)
}

/// Checks that no other user could have made the file.
fn check_trust(path: &Path, file: BorrowedFd<'_>) -> Result<(), SpillFault> {
    let stat = rustix::fs::fstat(file).map_err(call_fault(path, "stat it"))?;
    FileMetadata::from_stat(&stat)
        .check(Expected::File, rustix::process::geteuid().as_raw())
        .map_err(|reason| SpillFault::Distrusted {
            path: path.into(),
            reason,
        })
}

/// Checks that the spill file was made for the arena with this superblock, the arena's first page. Fails if another
/// arena owns it.
fn check_identity(
    path: &Path,
    file: BorrowedFd<'_>,
    superblock: &Superblock,
) -> Result<(), SpillFault> {
    let foreign = |source| SpillFault::Foreign {
        path: path.into(),
        source,
    };
    let header = read_header(file).map_err(foreign)?;
    let geometry = &superblock.geometry;
    let is_of_this_arena = header.uuid == superblock.uuid
        && header.slot_bytes == geometry.chunk_bytes
        && header.slot_count == geometry.spill_count;
    if !is_of_this_arena {
        return Err(foreign(FormatError::Field {
            what: "spill header",
            why: "it was made for another arena".into(),
        }));
    }
    Ok(())
}

/// Allocates the space of a new spill file, or only sets its length if the file system cannot allocate. Then a full
/// device shows only when a chunk moves.
fn allocate(path: &Path, file: BorrowedFd<'_>, len: u64) -> Result<(), SpillFault> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => {
            rustix::fs::ftruncate(file, len).map_err(call_fault(path, "set its length"))
        }
        Err(reason @ (Errno::NOSPC | Errno::FBIG | Errno::DQUOT)) => Err(SpillFault::NoRoom {
            path: path.into(),
            need: len,
            reason,
        }),
        Err(source) => Err(call_fault(path, "allocate it")(source)),
    }
}

/// Reads the header of a spill file.
fn read_header(file: BorrowedFd<'_>) -> Result<SpillHeader, FormatError> {
    let mut header = [0u8; SPILL_HEADER_BYTES];
    // A header that cannot be read is as invalid as an empty one.
    let read_bytes = rustix::io::pread(file, &mut header[..], 0).unwrap_or(0);
    SpillHeader::decode(&header[..read_bytes])
}

/// Returns the length of a spill file.
fn file_bytes(geometry: &Geometry) -> u64 {
    SPILL_DATA_OFFSET + geometry.spill_bytes()
}

impl SpillFile {
    /// Makes the spill file for the arena `uuid` at the path `arena`, and allocates its space. An existing spill file
    /// is replaced if its arena is gone; any other existing file is left alone, and the call fails.
    pub(crate) fn create(
        path: &Path,
        geometry: &Geometry,
        uuid: [u8; 16],
        arena: &Path,
    ) -> Result<Self, SpillFault> {
        if path.as_os_str().len() > SPILL_PATH_MAX {
            return Err(SpillFault::LongPath { path: path.into() });
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let mut opened = open(path, flags);
        if let Err(Errno::EXIST) = opened {
            remove_stale(path)?;
            opened = open(path, flags);
        }
        let file = opened.map_err(call_fault(path, "make it"))?;
        let created = Self::initialise(path, file, geometry, uuid, arena);
        // The error of the creation is returned, and not that of the removal.
        if created.is_err() {
            let _ = rustix::fs::unlink(path);
        }
        created
    }

    /// Locks and allocates a new spill file and writes its header. The lock keeps another firnd from replacing the
    /// file. The header is durable when this returns.
    fn initialise(
        path: &Path,
        file: OwnedFd,
        geometry: &Geometry,
        uuid: [u8; 16],
        arena: &Path,
    ) -> Result<Self, SpillFault> {
        lock(path, &file)?;
        allocate(path, file.as_fd(), file_bytes(geometry))?;
        let header = SpillHeader {
            uuid,
            slot_bytes: geometry.chunk_bytes,
            slot_count: geometry.spill_count,
            arena_path: arena.as_os_str().as_bytes().to_vec(),
        };
        write_all(file.as_fd(), &header.encode(), 0).map_err(call_fault(path, "write to it"))?;
        rustix::fs::fsync(&file).map_err(call_fault(path, "sync it"))?;
        Ok(Self::assemble(path, file, geometry))
    }

    /// Returns the spill file that is open for reads as `cached`.
    fn assemble(path: &Path, cached: OwnedFd, geometry: &Geometry) -> Self {
        let direct = open(path, OFlags::WRONLY | OFlags::DIRECT).ok();
        Self {
            path: path.into(),
            cached,
            direct,
            slot_bytes: geometry.chunk_bytes,
        }
    }

    /// Opens the spill file of an arena, which has the chunks that do not fit into memory. Fails if nothing in it can
    /// be read.
    pub(crate) fn open(
        superblock: &Superblock,
        access: FileAccess,
    ) -> Result<OpenedSpillFile, SpillFault> {
        let path = PathBuf::from(std::ffi::OsString::from_vec(superblock.spill_path.clone()));
        let mut write_refusal = None;
        let mut opened = open(&path, access.open_flags());
        if access == FileAccess::ReadWrite
            && let Err(errno @ (Errno::ROFS | Errno::ACCESS)) = opened
        {
            // The slots can still be read.
            opened = open(&path, OFlags::RDONLY);
            write_refusal = Some(call_fault(&path, "open it for writing")(errno));
        }
        let file = opened.map_err(|errno| open_fault(&path, errno))?;
        check_trust(&path, file.as_fd())?;
        check_identity(&path, file.as_fd(), superblock)?;
        if access == FileAccess::ReadWrite {
            lock(&path, &file)?;
        }
        let geometry = &superblock.geometry;
        let stat = rustix::fs::fstat(&file).map_err(call_fault(&path, "stat it"))?;
        let found_len = stat.st_size as u64;
        let expected_len = file_bytes(geometry);
        // A missing part is reported rather than a refusal to write, because it means lost data.
        let write_fault = if found_len < expected_len {
            Some(SpillFault::Truncated {
                path: path.clone(),
                found: found_len,
                expected: expected_len,
            })
        } else {
            write_refusal
        };
        Ok(OpenedSpillFile {
            file: Self::assemble(&path, file, geometry),
            write_fault,
        })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the file has all bytes of a slot.
    pub(crate) fn has_slot(&self, slot: u32) -> bool {
        let end = self.offset(slot, 0) + self.slot_bytes;
        rustix::fs::fstat(&self.cached).is_ok_and(|stat| stat.st_size as u64 >= end)
    }

    /// Returns the offset in the file of byte `position` of a slot.
    pub fn offset(&self, slot: u32, position: u32) -> u64 {
        SPILL_DATA_OFFSET + u64::from(slot) * self.slot_bytes + u64::from(position)
    }

    /// Fills `out` with bytes from `offset` of the file. Fails with EIO if the file is too short.
    pub fn read(&self, mut offset: u64, mut out: &mut [u8]) -> Result<(), Errno> {
        while !out.is_empty() {
            match rustix::io::pread(&self.cached, &mut *out, offset) {
                Ok(0) => return Err(Errno::IO),
                Ok(count) => {
                    out = &mut out[count..];
                    offset += count as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Writes the data of one chunk to a slot of the spill file. When this returns, the device has the bytes.
    pub(crate) fn write(&self, slot: u32, bytes: &[u8]) -> Result<(), Errno> {
        crash_point();
        let offset = self.offset(slot, 0);
        if let Some(direct) = &self.direct {
            match write_all(direct.as_fd(), bytes, offset) {
                // Direct I/O is not possible for this memory or on this file system: the page cache is used.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
                result => return result,
            }
        }
        write_all(self.cached.as_fd(), bytes, offset)?;
        rustix::fs::fdatasync(&self.cached)?;
        // The spill file exists to free memory, so its pages in the page cache are freed too.
        let _ = rustix::fs::fadvise(
            &self.cached,
            offset,
            std::num::NonZero::new(bytes.len() as u64),
            Advice::DontNeed,
        );
        Ok(())
    }

    /// Makes all spilled chunks durable.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fdatasync(&self.cached)
    }
}

/// Writes all bytes at `offset`.
fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => {
                bytes = &bytes[count..];
                offset += count as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Locks the spill file until it is closed, so that no other firnd uses or replaces it. Fails if another process keeps
/// the lock for [`LOCK_WAIT`]. After any other error the file is used without a lock.
fn lock(path: &Path, file: &OwnedFd) -> Result<(), SpillFault> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                std::thread::sleep(LOCK_RETRY_INTERVAL)
            }
            Err(Errno::WOULDBLOCK) => {
                // The path of that arena is unknown, so the message gets these words in its place.
                return Err(SpillFault::Taken {
                    path: path.into(),
                    arena: "of a running firnd".into(),
                });
            }
            // Locked, or it cannot be locked, for example on a file system without locks.
            _ => return Ok(()),
        }
    }
}

/// Removes a spill file whose arena is gone, for example because the host lost its memory. Fails, and removes nothing,
/// if the file is no spill file or its arena exists.
fn remove_stale(path: &Path) -> Result<(), SpillFault> {
    let file = open(path, OFlags::RDONLY).map_err(|errno| open_fault(path, errno))?;
    check_trust(path, file.as_fd())?;
    let header = read_header(file.as_fd()).map_err(|source| SpillFault::NotSpill {
        path: path.into(),
        source,
    })?;
    let arena = PathBuf::from(std::ffi::OsString::from_vec(header.arena_path.clone()));
    if read_uuid(&arena) == Some(header.uuid) {
        return Err(SpillFault::Taken {
            path: path.into(),
            arena,
        });
    }
    lock(path, &file)?;
    tracing::info!(spill = %quoted_path(path), arena = %quoted_path(&arena), "replacing a spill file whose arena is gone");
    rustix::fs::unlink(path).map_err(call_fault(path, "remove it"))
}

/// Reads the identity of the arena at `path`. Returns `None` if no arena is there.
fn read_uuid(path: &Path) -> Option<[u8; 16]> {
    let file = open(path, OFlags::RDONLY).ok()?;
    let mut bytes = [0u8; SUPERBLOCK_BYTES];
    rustix::io::pread(&file, &mut bytes[..], 0).ok()?;
    let superblock = Superblock::decode(&bytes).ok()?;
    Some(superblock.uuid)
}
