//! A new arena: its file, with all of its room allocated, and the first journal and superblock in it.
//!
//! The file has no name until it is whole: an arena that is found can be attached.

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
use crate::map::{Map, probe};
use crate::pool::numa_node_of;
use crate::spill::SpillFile;
use crate::spill_area::SpillArea;
use crate::topology::Topology;
use crate::{ArenaError, Room};

/// What the arena is for.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Canonical path of the backing directory.
    pub backing: PathBuf,
    /// Its device.
    pub dev: u64,
    /// Its inode.
    pub ino: u64,
}

/// Asks the kernel to take the pages of each NUMA node's slots from that NUMA node. Advice: where it cannot, slabs
/// are handed out in the same way.
pub(crate) fn place(map: &Map, geometry: &Geometry, topology: &Topology) {
    if topology.count() == 1 {
        return;
    }
    let mut slot = 0;
    while slot < geometry.chunk_count {
        let numa_node = numa_node_of(geometry, topology, slot);
        let same = |next: &u32| numa_node_of(geometry, topology, *next) == numa_node;
        let end = (slot..geometry.chunk_count)
            .take_while(same)
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
    /// Makes the file, with all its room allocated, and attaches. Fails if it exists.
    pub fn create(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
    ) -> Result<Self, ArenaError> {
        Self::create_with_spill(path, geometry, identity, Path::new(""))
    }

    /// The same with a spill file, whose room the geometry says. A spill file there whose arena is gone is
    /// replaced.
    pub fn create_with_spill(
        path: &Path,
        geometry: Geometry,
        identity: &Identity,
        spill: &Path,
    ) -> Result<Self, ArenaError> {
        Self::create_on(path, geometry, identity, spill, &Topology::one())
    }

    /// The same on a machine with several NUMA nodes, each of which gets an equal part.
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
        // Without a name until it is whole: an arena that is found can be attached, and a kill in here leaves none.
        // What an earlier firn left under the name that it used is in no other firn's way.
        let unfinished = path.with_extension("unfinished");
        let _ = rustix::fs::unlink(&unfinished);
        let unnamed = Unnamed::create(path, &unfinished).map_err(io("create it"))?;
        probe();
        let Unnamed { file, name } = unnamed;
        let made =
            Self::initialise(path, file, geometry, identity, spill, topology).and_then(|arena| {
                probe();
                let named = give_name(arena.map.file(), name.then_some(&unfinished), path);
                if named.is_err() && arena.spill.file().is_some() {
                    let _ = rustix::fs::unlink(spill);
                }
                named.map_err(io("give it its name"))?;
                Ok(arena)
            });
        if made.is_err() && name {
            let _ = rustix::fs::unlink(&unfinished);
        }
        made
    }

    fn initialise(
        path: &Path,
        file: rustix::fd::OwnedFd,
        geometry: Geometry,
        identity: &Identity,
        spill: &Path,
        topology: &Topology,
    ) -> Result<Self, ArenaError> {
        // Before it is tried: a part of it may be allocated when the rest does not fit.
        let free_bytes =
            rustix::fs::fstatvfs(&file).map_or(0, |found| found.f_bavail * found.f_frsize);
        let failed = |what| {
            move |why| {
                let path = quoted_path(path);
                match why {
                    Errno::NOSPC | Errno::FBIG | Errno::NOMEM => ArenaError::NoRoom {
                        path,
                        arena_bytes: geometry.data_bytes(),
                        need: geometry.allocated_bytes(),
                        why,
                        room: (why == Errno::NOSPC).then(|| Room {
                            free_bytes,
                            fitting_bytes: geometry.proposed_arena_bytes(free_bytes),
                        }),
                    },
                    source => ArenaError::Io { path, what, source },
                }
            }
        };
        rustix::fs::ftruncate(&file, geometry.file_bytes()).map_err(failed("size it"))?;
        let map = Map::new(path, file, geometry.file_bytes(), true)
            .map_err(|error| failed("map it")(error.errno()))?;
        let map = Arc::new(map);
        // Before there are pages: those that are there stay where they are.
        place(&map, &geometry, topology);
        // Allocated, not only sized: a full tmpfs must say so here, not with SIGBUS at the first touch.
        for range in geometry.allocated_ranges() {
            rustix::fs::fallocate(
                map.file(),
                FallocateFlags::empty(),
                range.start,
                range.end - range.start,
            )
            .map_err(failed("allocate it"))?;
        }
        probe();
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
        // Before the superblock: what is an arena has a journal.
        drop(Journal::create(arena.journal_region()));
        arena.map.write(0, &arena.superblock.encode());
        Ok(arena)
    }
}

/// A new file of mode 0600, known to this process only.
struct Unnamed {
    file: rustix::fd::OwnedFd,
    /// It has the name of what is unfinished after all: the file system makes no files without one.
    name: bool,
}

impl Unnamed {
    fn create(path: &Path, unfinished: &Path) -> Result<Self, Errno> {
        let mode = Mode::RUSR | Mode::WUSR;
        let dir = match path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        match rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
            Ok(file) => return Ok(Self { file, name: false }),
            // A kernel or file system without O_TMPFILE (open(2), ERRORS).
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(Self {
            file: rustix::fs::open(unfinished, flags, mode)?,
            name: true,
        })
    }
}

/// Gives a file its name where nothing has that: EEXIST otherwise.
fn give_name(
    file: impl rustix::fd::AsFd,
    unfinished: Option<&PathBuf>,
    path: &Path,
) -> Result<(), Errno> {
    use rustix::fd::AsRawFd;
    let here = rustix::fs::CWD;
    match unfinished {
        Some(unfinished) => {
            rustix::fs::renameat_with(here, unfinished, here, path, RenameFlags::NOREPLACE)
        }
        // AT_EMPTY_PATH would need CAP_DAC_READ_SEARCH (open(2), O_TMPFILE).
        None => {
            let link = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
            rustix::fs::linkat(here, link, here, path, rustix::fs::AtFlags::SYMLINK_FOLLOW)
        }
    }
}

/// What tells an arena from any other. All zeros would be what two arenas have that had no random numbers, so a
/// source that fails, or gives only zeros, is an error.
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
