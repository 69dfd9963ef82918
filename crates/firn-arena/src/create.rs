//! Creates a new arena: its file with all memory allocated, the first journal and the superblock. The *arena* is a file
//! of shared memory with the bytes that are not yet in the *backing*, the directory that a mount serves.
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
use crate::map::{FileAccess, Map, crash_point};
use crate::pool::numa_node_of;
use crate::spill::SpillFile;
use crate::spill_area::SpillArea;
use crate::topology::Topology;
use crate::{ArenaError, FreeSpace};

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

/// Asks the kernel to allocate the pages of each NUMA node's slots, the parts of the arena's memory, in that node's
/// memory. This is only a hint: if the call fails, a warning is logged, and the slots are used all the same.
pub(crate) fn prefer_numa_nodes(map: &Map, geometry: &Geometry, topology: &Topology) {
    if topology.count() == 1 {
        return;
    }
    let mut first_slot = 0;
    while first_slot < geometry.chunk_count {
        let numa_node = numa_node_of(geometry, topology, first_slot);
        let mut end_slot = first_slot + 1;
        while end_slot < geometry.chunk_count
            && numa_node_of(geometry, topology, end_slot) == numa_node
        {
            end_slot += 1;
        }
        let offset = geometry.slot_offset(first_slot);
        let bytes = u64::from(end_slot - first_slot) * geometry.chunk_bytes;
        let numa_node_id = topology.id(numa_node);
        if let Err(error) = map.prefer_numa_node(offset, bytes, numa_node_id) {
            tracing::warn!(%error, numa_node = numa_node_id, "cannot place memory on this NUMA node");
        }
        first_slot = end_slot;
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

    /// Creates an arena with a spill file at `spill_path`, of the size that `geometry` says. A spill file there is
    /// replaced if its arena no longer exists.
    pub fn create_with_spill(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
        spill_path: &Path,
    ) -> Result<Self, ArenaError> {
        Self::create_on(path, geometry, identity, spill_path, &Topology::one())
    }

    /// Creates an arena at `path` for the backing directory `identity`, on a machine with the NUMA nodes of `topology`.
    /// Each node gets an equal part of the memory. The spill file, if `geometry` has one, is created at `spill_path`.
    ///
    /// Fails if the name `path` exists. The name is given last, when the arena is complete. So a failed call leaves no
    /// part of an arena under it.
    pub fn create_on(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
        spill_path: &Path,
        topology: &Topology,
    ) -> Result<Self, ArenaError> {
        let unfinished_path = path.with_extension("unfinished");
        // A firnd that crashed may have left a file under this name. No arena in use has this name.
        let _ = rustix::fs::unlink(&unfinished_path);
        let NewFile { file, is_named } = NewFile::create(path, &unfinished_path)
            .map_err(|source| io_error(path, "create it", source))?;
        crash_point();
        let temporary_path = is_named.then_some(unfinished_path.as_path());
        let created = Self::initialise(path, file, geometry, identity, spill_path, topology)
            .and_then(|arena| {
                arena.publish_file(temporary_path, spill_path)?;
                Ok(arena)
            });
        // The error of the creation is returned. A file that cannot be removed is replaced by the next call.
        if created.is_err()
            && let Some(temporary_path) = temporary_path
        {
            let _ = rustix::fs::unlink(temporary_path);
        }
        created
    }

    /// Gives the complete file its name. If this fails, removes the new spill file too, which no arena would use.
    fn publish_file(
        &self,
        temporary_path: Option<&Path>,
        spill_path: &Path,
    ) -> Result<(), ArenaError> {
        crash_point();
        let linked = link_into_place(self.map.file(), temporary_path, &self.path);
        if linked.is_err() && self.spill.file().is_some() {
            // The error of the link is returned, and not that of the removal.
            let _ = rustix::fs::unlink(spill_path);
        }
        linked.map_err(|source| io_error(&self.path, "link it to its name", source))
    }

    /// Makes the new `file` an arena (shared memory for written bytes), and returns it attached. Creates the spill file
    /// at `spill_path` too, if `geometry` has one. The caller gives the file its name `path` later.
    ///
    /// The order matters
    /// 1. The free space is read before memory is allocated, for the message if that fails.
    /// 2. The NUMA nodes are chosen before memory is allocated, because pages that exist stay on their node.
    /// 3. The journal is written before the superblock, so each arena with a superblock has a journal.
    fn initialise(
        path: &Path,
        file: rustix::fd::OwnedFd,
        geometry: Geometry,
        identity: &Identity,
        spill_path: &Path,
        topology: &Topology,
    ) -> Result<Self, ArenaError> {
        // A failed allocation may have used up a part of the free bytes.
        let free_bytes = rustix::fs::fstatvfs(&file).map_or(0, |fs| fs.f_bavail * fs.f_frsize);
        let failed = |what, errno| creation_error(path, &geometry, free_bytes, what, errno);
        rustix::fs::ftruncate(&file, geometry.file_bytes())
            .map_err(|errno| failed("set its length", errno))?;
        let map = Map::new(path, file, geometry.file_bytes(), FileAccess::ReadWrite)
            .map_err(|error| failed("map it", error.errno()))?;
        let map = Arc::new(map);
        prefer_numa_nodes(&map, &geometry, topology);
        allocate_memory(&map, &geometry).map_err(|errno| failed("allocate it", errno))?;
        crash_point();
        let uuid = random_uuid(getrandom::fill)
            .map_err(|errno| failed("get random numbers for it", errno))?;
        let superblock = new_superblock(uuid, geometry, identity, spill_path);
        let spill_area = match geometry.spill_count {
            0 => SpillArea::default(),
            _ => SpillArea::with_file(SpillFile::create(spill_path, &geometry, uuid, path)?),
        };
        let arena = Self {
            spill: spill_area,
            ..Self::assemble(path, map, superblock, topology)
        };
        // The empty journal is only stored here. The caller opens it later.
        drop(Journal::create(arena.journal_region()));
        arena.map.write(0, &arena.superblock.encode());
        Ok(arena)
    }
}

/// Returns the superblock, the first page, of an arena that is created now. `identity` is the backing directory of its
/// mount.
fn new_superblock(
    uuid: [u8; 16],
    geometry: Geometry,
    identity: &Identity,
    spill_path: &Path,
) -> Superblock {
    Superblock {
        uuid,
        geometry,
        backing_dev: identity.dev,
        backing_ino: identity.ino,
        created_s: rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec,
        backing_path: identity.backing.as_os_str().as_bytes().to_vec(),
        spill_path: spill_path.as_os_str().as_bytes().to_vec(),
    }
}

/// Allocates the memory of a new arena. A full tmpfs must fail here, and not with SIGBUS at the first access.
fn allocate_memory(map: &Map, geometry: &Geometry) -> Result<(), Errno> {
    for range in geometry.allocated_ranges() {
        let len = range.end - range.start;
        rustix::fs::fallocate(map.file(), FallocateFlags::empty(), range.start, len)?;
    }
    Ok(())
}

/// Returns the error for a failed call on the arena at `path`.
fn io_error(path: &Path, what: &'static str, source: Errno) -> ArenaError {
    ArenaError::Io {
        path: quoted_path(path),
        what,
        source,
    }
}

/// Returns the error for a step `what` of the creation of an arena that failed with `errno`. If memory ran out, it says
/// which arena size would fit into the `free_bytes` that the file system had before.
fn creation_error(
    path: &Path,
    geometry: &Geometry,
    free_bytes: u64,
    what: &'static str,
    errno: Errno,
) -> ArenaError {
    if !matches!(errno, Errno::NOSPC | Errno::FBIG | Errno::NOMEM) {
        return io_error(path, what, errno);
    }
    // The other errors do not mean that the file system is full.
    let room = (errno == Errno::NOSPC).then(|| FreeSpace {
        free_bytes,
        fitting_bytes: geometry.proposed_arena_bytes(free_bytes),
    });
    ArenaError::NoRoom {
        path: quoted_path(path),
        arena_bytes: geometry.data_bytes(),
        need: geometry.allocated_bytes(),
        reason: errno,
        room,
    }
}

/// A new file of mode 0600 that no other process opens.
struct NewFile {
    file: rustix::fd::OwnedFd,
    /// Whether the file has the temporary name `*.unfinished`, because the file system creates no files without a name.
    is_named: bool,
}

impl NewFile {
    /// Creates a file without a name in the directory of `path`. If the file system cannot do this, the file gets the
    /// temporary name `unfinished_path`. Then the call fails with EEXIST if that name exists.
    fn create(path: &Path, unfinished_path: &Path) -> Result<Self, Errno> {
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
            file: rustix::fs::open(unfinished_path, flags, mode)?,
            is_named: true,
        })
    }
}

/// Links a complete file to its name `path`, or renames it if it has a temporary name. Fails with EEXIST if a file has
/// that name.
fn link_into_place(
    file: impl rustix::fd::AsFd,
    temporary_path: Option<&Path>,
    path: &Path,
) -> Result<(), Errno> {
    use rustix::fd::AsRawFd;
    let cwd = rustix::fs::CWD;
    if let Some(temporary_path) = temporary_path {
        return rustix::fs::renameat_with(cwd, temporary_path, cwd, path, RenameFlags::NOREPLACE);
    }
    // By way of /proc: AT_EMPTY_PATH would need CAP_DAC_READ_SEARCH (open(2), O_TMPFILE).
    let fd_path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    rustix::fs::linkat(cwd, fd_path, cwd, path, rustix::fs::AtFlags::SYMLINK_FOLLOW)
}

/// Returns a random identity for the arena. `fill` is the random source. Fails if the source fails or returns only
/// zeros: two arenas with an identity of zeros could not be distinguished.
fn random_uuid(
    fill: impl FnOnce(&mut [u8]) -> Result<(), getrandom::Error>,
) -> Result<[u8; 16], Errno> {
    let mut uuid = [0; 16];
    if let Err(error) = fill(&mut uuid) {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        return Err(errno.unwrap_or(Errno::IO));
    }
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
