//! The spill file: slots for chunks on a NUMA node-local device.
//!
//! Promises
//! * [`SpillFile::write`] returns when the device has the bytes or refused them, not when the page cache has:
//!   an error that came later would find the bytes gone from memory.
//! * A file that belongs to another arena is never written to, and no file is replaced unless it is a spill
//!   file whose arena is gone.
//! * All its room is allocated at creation, where the file system can.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use firn_format::FormatError;
use firn_format::geometry::Geometry;
use firn_format::quote::quoted_path;
use firn_format::spill::{SPILL_DATA_OFFSET, SPILL_HEADER_BYTES, SpillHeader};
use firn_format::superblock::{SPILL_PATH_MAX, SUPERBLOCK_BYTES, Superblock};
use firn_trust::{Distrust, Expected, Facts};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::map::probe;

/// A firnd that is being killed closes its files one by one.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Why a spill file cannot be made or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpillFault {
    /// A system call on it failed.
    #[error("spill file {}: cannot {what}: {source}", quoted_path(path))]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: Errno,
    },
    /// The device does not have that much room.
    #[error(
        "spill file {}: no room for {} ({why}): lower spill-size, or put it elsewhere with spill",
        quoted_path(path),
        firn_format::quantity::bytes(*need)
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes wanted.
        need: u64,
        /// The system's reason.
        why: Errno,
    },
    /// Something is there that is no spill file.
    #[error(
        "{} is there and is no spill file of firn ({source}): name another with spill, or remove it",
        quoted_path(path)
    )]
    NotSpill {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// It is not a file that only this user could have made.
    #[error(
        "spill file {} {why}; Firn reads nothing from it: remove it, or name another with spill",
        quoted_path(path)
    )]
    Distrusted {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: Distrust,
    },
    /// It belongs to an arena that is there.
    #[error(
        "spill file {} belongs to arena {}: name another with spill, or recover that arena first",
        quoted_path(path),
        quoted_path(arena)
    )]
    Taken {
        /// The file.
        path: PathBuf,
        /// Whose it is.
        arena: PathBuf,
    },
    /// Its bytes are not those of this arena.
    #[error("spill file {}: {source}", quoted_path(path))]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
    /// It is shorter than it was made.
    #[error(
        "spill file {} is truncated: {found} bytes, {expected} needed",
        quoted_path(path)
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Bytes there.
        found: u64,
        /// Bytes that it was made with.
        expected: u64,
    },
    /// Its path does not fit the superblock.
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
    /// The errno that says it best.
    pub fn errno(&self) -> Errno {
        match self {
            Self::Io { source, .. } => *source,
            Self::NoRoom { why, .. } => *why,
            Self::NotSpill { .. } | Self::Taken { .. } => Errno::EXIST,
            Self::Distrusted { .. } => Errno::PERM,
            Self::Foreign { .. } | Self::Truncated { .. } => Errno::IO,
            Self::LongPath { .. } => Errno::NAMETOOLONG,
        }
    }
}

/// An open spill file.
#[derive(Debug)]
pub struct SpillFile {
    path: PathBuf,
    /// Through the page cache: reads of any position.
    cached: OwnedFd,
    /// Past it, where the file system can: whole slots, with the device's own answer.
    direct: Option<OwnedFd>,
    slot_bytes: u64,
}

fn open(path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
}

fn io(path: &Path, what: &'static str) -> impl Fn(Errno) -> SpillFault {
    let path = path.to_owned();
    move |source| SpillFault::Io {
        path: path.clone(),
        what,
        source,
    }
}

/// Why a file was not opened: what is no regular file is not believed, whichever error the kernel has for it.
fn unopened(path: &Path) -> impl Fn(Errno) -> SpillFault {
    let path = path.to_owned();
    move |errno| {
        let found = rustix::fs::lstat(&path).map(|stat| Facts::of(&stat));
        let uid = rustix::process::geteuid().as_raw();
        match found.map(|facts| facts.check(Expected::File, uid)) {
            Ok(Err(why)) => SpillFault::Distrusted {
                path: path.clone(),
                why,
            },
            _ => io(&path, "open it")(errno),
        }
    }
}

/// Whether only this user could have made it.
fn check_trust(path: &Path, file: BorrowedFd<'_>) -> Result<(), SpillFault> {
    let stat = rustix::fs::fstat(file).map_err(io(path, "stat it"))?;
    Facts::of(&stat)
        .check(Expected::File, rustix::process::geteuid().as_raw())
        .map_err(|why| SpillFault::Distrusted {
            path: path.into(),
            why,
        })
}

fn read_header(file: BorrowedFd<'_>) -> Result<SpillHeader, FormatError> {
    let mut page = [0u8; SPILL_HEADER_BYTES];
    let n = rustix::io::pread(file, &mut page[..], 0).unwrap_or(0);
    SpillHeader::decode(&page[..n])
}

fn file_bytes(geometry: &Geometry) -> u64 {
    SPILL_DATA_OFFSET + geometry.spill_bytes()
}

impl SpillFile {
    /// Makes the file for the arena `uuid` at `arena`, with all its room.
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
        let file = match open(path, flags) {
            Err(Errno::EXIST) => {
                remove_stale(path)?;
                open(path, flags)
            }
            other => other,
        };
        let file = file.map_err(io(path, "make it"))?;
        let made = Self::initialise(path, file, geometry, uuid, arena);
        if made.is_err() {
            let _ = rustix::fs::unlink(path);
        }
        made
    }

    fn initialise(
        path: &Path,
        file: OwnedFd,
        geometry: &Geometry,
        uuid: [u8; 16],
        arena: &Path,
    ) -> Result<Self, SpillFault> {
        lock(path, &file)?;
        let need = file_bytes(geometry);
        match rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, need) {
            Ok(()) => {}
            // The file system cannot promise room: a full device is told when a chunk moves.
            Err(Errno::OPNOTSUPP) => {
                rustix::fs::ftruncate(&file, need).map_err(io(path, "size it"))?
            }
            Err(why @ (Errno::NOSPC | Errno::FBIG | Errno::DQUOT)) => {
                return Err(SpillFault::NoRoom {
                    path: path.into(),
                    need,
                    why,
                });
            }
            Err(source) => return Err(io(path, "allocate it")(source)),
        }
        let header = SpillHeader {
            uuid,
            slot_bytes: geometry.chunk_bytes,
            slot_count: geometry.spill_count,
            arena_path: arena.as_os_str().as_bytes().to_vec(),
        };
        write_all(file.as_fd(), &header.encode(), 0).map_err(io(path, "write to it"))?;
        rustix::fs::fsync(&file).map_err(io(path, "sync it"))?;
        Ok(Self::assemble(path, file, geometry))
    }

    fn assemble(path: &Path, cached: OwnedFd, geometry: &Geometry) -> Self {
        let direct = open(path, OFlags::WRONLY | OFlags::DIRECT).ok();
        Self {
            path: path.into(),
            cached,
            direct,
            slot_bytes: geometry.chunk_bytes,
        }
    }

    /// Opens the file of an arena. The second value says what is wrong with it although the slots that it
    /// has can be read.
    pub(crate) fn open(
        superblock: &Superblock,
        writable: bool,
    ) -> Result<(Self, Option<SpillFault>), SpillFault> {
        let path = PathBuf::from(std::ffi::OsString::from_vec(superblock.spill_path.clone()));
        let (file, refused) = match open(
            &path,
            if writable {
                OFlags::RDWR
            } else {
                OFlags::RDONLY
            },
        ) {
            Err(source @ (Errno::ROFS | Errno::ACCESS)) if writable => (
                open(&path, OFlags::RDONLY),
                Some(io(&path, "open it for writing")(source)),
            ),
            other => (other, None),
        };
        let file = file.map_err(unopened(&path))?;
        check_trust(&path, file.as_fd())?;
        let header = read_header(file.as_fd()).map_err(|source| SpillFault::Foreign {
            path: path.clone(),
            source,
        })?;
        let geometry = &superblock.geometry;
        let expected = (superblock.uuid, geometry.chunk_bytes, geometry.spill_count);
        if (header.uuid, header.slot_bytes, header.slot_count) != expected {
            let why = "it was made for another arena".into();
            let source = FormatError::Field {
                what: "spill header",
                why,
            };
            return Err(SpillFault::Foreign { path, source });
        }
        if writable {
            lock(&path, &file)?;
        }
        let found = rustix::fs::fstat(&file)
            .map_err(io(&path, "stat it"))?
            .st_size as u64;
        let expected = file_bytes(geometry);
        let short = found < expected;
        let truncated = short.then(|| SpillFault::Truncated {
            path: path.clone(),
            found,
            expected,
        });
        Ok((Self::assemble(&path, file, geometry), truncated.or(refused)))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file has all bytes of a slot.
    pub(crate) fn has_slot(&self, slot: u32) -> bool {
        let end = self.offset(slot, 0) + self.slot_bytes;
        rustix::fs::fstat(&self.cached).is_ok_and(|stat| stat.st_size as u64 >= end)
    }

    /// Where byte `position` of a slot is in the file.
    pub fn offset(&self, slot: u32, position: u32) -> u64 {
        SPILL_DATA_OFFSET + u64::from(slot) * self.slot_bytes + u64::from(position)
    }

    /// Reads all of `out` from `offset` of the file.
    pub fn read(&self, mut offset: u64, mut out: &mut [u8]) -> Result<(), Errno> {
        while !out.is_empty() {
            match rustix::io::pread(&self.cached, &mut *out, offset) {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => {
                    out = &mut out[n..];
                    offset += n as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    /// Writes a slot; the device has it when this returns.
    pub(crate) fn write(&self, slot: u32, bytes: &[u8]) -> Result<(), Errno> {
        probe();
        let offset = self.offset(slot, 0);
        if let Some(direct) = &self.direct {
            match write_all(direct.as_fd(), bytes, offset) {
                // This memory or this file system cannot after all.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => {}
                other => return other,
            }
        }
        write_all(self.cached.as_fd(), bytes, offset)?;
        rustix::fs::fdatasync(&self.cached)?;
        // The point of the spill file is free memory, the page cache's too.
        let _ = rustix::fs::fadvise(
            &self.cached,
            offset,
            std::num::NonZero::new(bytes.len() as u64),
            Advice::DontNeed,
        );
        Ok(())
    }

    /// Makes all that was spilled survive a loss of power.
    pub(crate) fn sync(&self) -> Result<(), Errno> {
        rustix::fs::fdatasync(&self.cached)
    }
}

fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8], mut offset: u64) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, offset) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => {
                bytes = &bytes[n..];
                offset += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Held until the file is closed; a file system without locks does without.
fn lock(path: &Path, file: &OwnedFd) -> Result<(), SpillFault> {
    let until = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10))
            }
            Err(Errno::WOULDBLOCK) => {
                return Err(SpillFault::Taken {
                    path: path.into(),
                    arena: "of a running firnd".into(),
                });
            }
            _ => return Ok(()),
        }
    }
}

/// Removes what a NUMA node that lost its memory left: a spill file whose arena is gone.
fn remove_stale(path: &Path) -> Result<(), SpillFault> {
    let file = open(path, OFlags::RDONLY).map_err(unopened(path))?;
    check_trust(path, file.as_fd())?;
    let header = read_header(file.as_fd()).map_err(|source| SpillFault::NotSpill {
        path: path.into(),
        source,
    })?;
    let arena = PathBuf::from(std::ffi::OsString::from_vec(header.arena_path.clone()));
    let mut page = [0u8; SUPERBLOCK_BYTES];
    let found =
        open(&arena, OFlags::RDONLY).and_then(|file| rustix::io::pread(&file, &mut page[..], 0));
    if found.is_ok()
        && Superblock::decode(&page).is_ok_and(|superblock| superblock.uuid == header.uuid)
    {
        return Err(SpillFault::Taken {
            path: path.into(),
            arena,
        });
    }
    lock(path, &file)?;
    tracing::info!(spill = %quoted_path(path), arena = %quoted_path(&arena), "replacing a spill file whose arena is gone");
    rustix::fs::unlink(path).map_err(io(path, "remove it"))
}
