//! Creates a new arena: its file with all memory allocated, the first journal and the superblock.
//!
//! Promises
//! * The file gets its name last. So each arena that has a name can be attached, and an earlier crash leaves no arena.
//! * All memory is allocated here. If the file system has too little room, the mount fails, and no process gets a
//!   SIGBUS later.
//! * An existing file of that name is left alone, and the call fails.
//!
//! Relies on: the file system creates files without a name (O_TMPFILE). Where it cannot, the file is called
//! `*.unfinished` until it is complete, and the next call replaces it.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::journal::Journal;
use firn_format::geometry::Geometry;
use firn_format::quote::quoted_path;
use firn_format::superblock::Superblock;
use rustix::fs::{FallocateFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::arena::Arena;
use crate::map::{Map, crash_point};
use crate::pool::numa_node_of;
use crate::spill::SpillFile;
use crate::spill_area::SpillArea;
use crate::topology::Topology;
use crate::{ArenaError, Room};

/// The backing directory that an arena belongs to.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Canonical path of the backing directory.
    pub backing: PathBuf,
    /// Device number of the directory.
    pub dev: u64,
    /// Inode number of the directory.
    pub ino: u64,
}

/// Asks the kernel to allocate the pages of each NUMA node's slots in that node's memory. This is only a hint: if the
/// call fails, a warning is logged, and the slots are leased all the same.
pub(crate) fn prefer_numa_nodes(map: &Map, geometry: &Geometry, topology: &Topology) {
    if topology.count() == 1 {
        return;
    }
    let mut slot = 0;
    while slot < geometry.chunk_count {
        let numa_node = numa_node_of(geometry, topology, slot);
        let is_same_node = |next: &u32| numa_node_of(geometry, topology, *next) == numa_node;
        let end = (slot..geometry.chunk_count)
            .take_while(is_same_node)
            .last()
            .expect("the slot itself")
            + 1;
        let bytes = u64::from(end - slot) * geometry.chunk_bytes;
        if let Err(error) =
            map.prefer_numa_node(geometry.slot_offset(slot), bytes, topology.id(numa_node))
        {
            tracing::warn!(%error, numa_node = topology.id(numa_node), "cannot place memory on this NUMA node");
        }
        slot = end;
    }
}

impl Arena {
    /// Creates an arena without a spill file, on one NUMA node, and attaches to it. Fails if `path` exists.
    pub fn create(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
    ) -> Result<Self, ArenaError> {
        Self::create_with_spill(path, geometry, identity, Path::new(""))
    }

    /// Creates an arena with a spill file at `spill`, of the size that `geometry` says. A spill file there is replaced if
    /// its arena no longer exists.
    pub fn create_with_spill(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
        spill: &Path,
    ) -> Result<Self, ArenaError> {
        Self::create_on(path, geometry, identity, spill, &Topology::one())
    }

    /// Creates an arena with a spill file on a machine with several NUMA nodes. Each node gets an equal part of the memory.
    pub fn create_on(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
        spill: &Path,
        topology: &Topology,
    ) -> Result<Self, ArenaError> {
        let io = |what| {
            move |source| ArenaError::Io {
                path: quoted_path(path),
                what,
                source,
            }
        };
        // A firnd that crashed may have left a file under this name. No running firnd uses the file.
        let unfinished = path.with_extension("unfinished");
        let _ = rustix::fs::unlink(&unfinished);
        let new_file = NewFile::create(path, &unfinished).map_err(io("create it"))?;
        crash_point();
        let NewFile { file, is_named } = new_file;
        let created =
            Self::initialise(path, file, geometry, identity, spill, topology).and_then(|arena| {
                crash_point();
                let naming = give_name(arena.map.file(), is_named.then_some(&unfinished), path);
                if naming.is_err() && arena.spill.file().is_some() {
                    let _ = rustix::fs::unlink(spill);
                }
                naming.map_err(io("link it to its name"))?;
                Ok(arena)
            });
        if created.is_err() && is_named {
            let _ = rustix::fs::unlink(&unfinished);
        }
        created
    }

    /// Fills the new file, and returns the arena attached to it. The file gets the name `path` later.
    fn initialise(
        path: &Path,
        file: rustix::fd::OwnedFd,
        geometry: Geometry,
        identity: &Identity,
        spill: &Path,
        topology: &Topology,
    ) -> Result<Self, ArenaError> {
        // Read before the allocation, because a failed allocation may have used up a part of the free bytes.
        let free_bytes = rustix::fs::fstatvfs(&file).map_or(0, |fs| fs.f_bavail * fs.f_frsize);
        let failed = |what| {
            move |reason| {
                let path = quoted_path(path);
                match reason {
                    Errno::NOSPC | Errno::FBIG | Errno::NOMEM => ArenaError::NoRoom {
                        path,
                        arena_bytes: geometry.data_bytes(),
                        need: geometry.allocated_bytes(),
                        reason,
                        room: (reason == Errno::NOSPC).then(|| Room {
                            free_bytes,
                            fitting_bytes: geometry.proposed_arena_bytes(free_bytes),
                        }),
                    },
                    source => ArenaError::Io { path, what, source },
                }
            }
        };
        rustix::fs::ftruncate(&file, geometry.file_bytes()).map_err(failed("set its length"))?;
        let map = Map::new(path, file, geometry.file_bytes(), true)
            .map_err(|error| failed("map it")(error.errno()))?;
        let map = Arc::new(map);
        // Before the allocation: pages that exist stay on their NUMA node.
        prefer_numa_nodes(&map, &geometry, topology);
        // Allocated, not only sized: a full tmpfs must fail here, and not with SIGBUS at the first access.
        for range in geometry.allocated_ranges() {
            rustix::fs::fallocate(
                map.file(),
                FallocateFlags::empty(),
                range.start,
                range.end - range.start,
            )
            .map_err(failed("allocate it"))?;
        }
        crash_point();
        let uuid = random_uuid(getrandom::fill).map_err(failed("get random numbers for it"))?;
        let superblock = Superblock {
            uuid,
            geometry,
            backing_dev: identity.dev,
            backing_ino: identity.ino,
            created_s: rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec,
            backing_path: identity.backing.as_os_str().as_bytes().to_vec(),
            spill_path: spill.as_os_str().as_bytes().to_vec(),
        };
        let spill = match geometry.spill_count {
            0 => SpillArea::default(),
            _ => SpillArea::with_file(SpillFile::create(spill, &geometry, uuid, path)?),
        };
        let arena = Self {
            spill,
            ..Self::assemble(path, map, superblock, topology)
        };
        // The journal precedes the superblock: each arena with a superblock has a journal.
        drop(Journal::create(arena.journal_region()));
        arena.map.write(0, &arena.superblock.encode());
        Ok(arena)
    }
}

/// A new file of mode 0600 that no other process opens.
struct NewFile {
    file: rustix::fd::OwnedFd,
    /// Whether the file has the name `*.unfinished`, because the file system creates no files without a name.
    is_named: bool,
}

impl NewFile {
    /// Creates a file without a name in the directory of `path`. If the file system cannot do this, the file gets the
    /// name `unfinished`; fails with EEXIST if that name exists.
    fn create(path: &Path, unfinished: &Path) -> Result<Self, Errno> {
        let mode = Mode::RUSR | Mode::WUSR;
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        match rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
            Ok(file) => {
                return Ok(Self {
                    file,
                    is_named: false,
                });
            }
            // The kernel or the file system has no O_TMPFILE (open(2), ERRORS).
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(Self {
            file: rustix::fs::open(unfinished, flags, mode)?,
            is_named: true,
        })
    }
}

/// Gives the file its name. Fails with EEXIST if a file has that name.
fn give_name(
    file: impl rustix::fd::AsFd,
    unfinished: Option<&PathBuf>,
    path: &Path,
) -> Result<(), Errno> {
    use rustix::fd::AsRawFd;
    let cwd = rustix::fs::CWD;
    match unfinished {
        Some(unfinished) => {
            rustix::fs::renameat_with(cwd, unfinished, cwd, path, RenameFlags::NOREPLACE)
        }
        // By way of /proc: AT_EMPTY_PATH would need CAP_DAC_READ_SEARCH (open(2), O_TMPFILE).
        None => {
            let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
            rustix::fs::linkat(cwd, link, cwd, path, rustix::fs::AtFlags::SYMLINK_FOLLOW)
        }
    }
}

/// Returns a random identity for the arena. Fails if the random source fails or returns only zeros: two arenas with an
/// identity of zeros could not be distinguished.
fn random_uuid(
    fill: impl FnOnce(&mut [u8]) -> Result<(), getrandom::Error>,
) -> Result<[u8; 16], Errno> {
    let mut uuid = [0; 16];
    let errno = |error: getrandom::Error| {
        error
            .raw_os_error()
            .map_or(Errno::IO, Errno::from_raw_os_error)
    };
    fill(&mut uuid).map_err(errno)?;
    if uuid == [0; 16] {
        return Err(Errno::IO);
    }
    Ok(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_without_random_numbers_there_is_no_arena() {
        assert_eq!(
            random_uuid(|_| Err(getrandom::Error::UNSUPPORTED)),
            Err(Errno::IO)
        );
        assert_eq!(random_uuid(|_| Ok(())), Err(Errno::IO));
        assert_ne!(
            random_uuid(getrandom::fill).unwrap(),
            random_uuid(getrandom::fill).unwrap()
        );
    }
}
