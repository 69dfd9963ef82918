//! The arena as one object: the mapped file of shared memory, its layout, and the parts that keep its state.
//!
//! The arena stores written bytes until they are in the *backing*, the directory that a mount serves. A *slot* is a
//! part of its memory, with the data of one *chunk*, the unit of allocation. A chunk is divided into *slabs*, each
//! filled by one writer.
//!
//! Each part has its own lock or atomics, and its own invariants
//! * `pool`: free chunks, slots and slabs;
//! * `uses`: the counts that keep slabs in use;
//! * `homes`: the slot that has the data of each chunk;
//! * `spill`: the spill file;
//! * `memory_files`: slots that were moved out of the arena's file into files of their own;
//! * `lingering`: clients that may still store bytes after their lease ended;
//! * `callbacks`: the callbacks for freed memory and for pressure.
//!
//! The modules `create`, `attach`, `lease`, `publish`, `moves` and `client` implement the operations that need several
//! parts.
//!
//! Lock order: a thread that moves a chunk holds the mover's lock of `spill`, and then locks the pool. No thread holds
//! any other two of these locks together.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_format::geometry::{DATA_ALIGN, Geometry};
use firn_format::slab::SlabState;
use firn_format::superblock::{Superblock, state_word};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::callbacks::Callbacks;
use crate::homes::ChunkHomes;
use crate::lingering::LingeringWriters;
use crate::map::{JournalRegion, Map};
use crate::memory_files::MemoryFiles;
use crate::pool::{NumaNodeFigures, Pool};
use crate::refs::SlabRef;
use crate::spill_area::SpillArea;
use crate::tables::Tables;
use crate::topology::Topology;
use crate::uses::SlabUses;

/// Bytes that one step of [`Arena::populate`] allocates: whole huge pages, and few enough that an unmount waits
/// only shortly for the end of a step.
const POPULATE_BYTES: u64 = 2 * DATA_ALIGN;

/// An arena that is mapped and attached.
pub struct Arena {
    pub(crate) map: Arc<Map>,
    pub(crate) tables: Tables,
    pub(crate) geometry: Geometry,
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) pool: Mutex<Pool>,
    pub(crate) homes: ChunkHomes,
    pub(crate) uses: SlabUses,
    pub(crate) spill: SpillArea,
    pub(crate) memory_files: MemoryFiles,
    pub(crate) lingering: LingeringWriters,
    pub(crate) callbacks: Callbacks,
}

impl Arena {
    /// Builds the object for the mapped arena file `map`: shared memory that holds written bytes. All of its memory
    /// counts as free, and it has no spill file. An attach then restores the state that the tables in the file record.
    pub(crate) fn assemble(
        path: &Path,
        map: Arc<Map>,
        superblock: Superblock,
        topology: &Topology,
    ) -> Self {
        let geometry = superblock.geometry;
        Self {
            tables: Tables::new(&map, geometry),
            map,
            geometry,
            path: path.to_owned(),
            superblock,
            pool: Mutex::new(Pool::new(geometry, topology.clone())),
            homes: ChunkHomes::new(geometry.chunks()),
            uses: SlabUses::new(&geometry),
            spill: SpillArea::default(),
            memory_files: MemoryFiles::new(path),
            lingering: LingeringWriters::default(),
            callbacks: Callbacks::default(),
        }
    }

    /// Returns the layout of the file.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the superblock: the arena's identity, layout and backing directory.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// Returns the part of the mapping that the journal uses.
    pub fn journal_region(&self) -> JournalRegion {
        JournalRegion {
            map: Arc::clone(&self.map),
            offset: self.geometry.journal_offset(0),
            len: 2 * self.geometry.journal_half_bytes,
        }
    }

    /// Sets the callback `f`, which is called whenever a slab or memory was freed.
    pub fn on_free(&self, f: impl Fn() + Send + Sync + 'static) {
        self.callbacks.set_on_freed(Box::new(f));
    }

    /// Sets the callback `f`, which is called when a writer takes memory while more than `slots` slots are in use, and
    /// when a writer finds no free memory.
    pub fn on_pressure(&self, slots: u32, f: impl Fn() + Send + Sync + 'static) {
        self.callbacks.set_on_pressure(slots, Box::new(f));
    }

    /// Returns the next sequence number; no other call returns the same one.
    pub fn next_sequence(&self) -> u64 {
        self.map
            .u64(state_word::SEQUENCE)
            .fetch_add(1, Ordering::AcqRel)
            + 1
    }

    /// Raises the epoch, the number of firnd processes that have attached the arena. Returns the new epoch; the first
    /// is 1.
    pub fn begin_epoch(&self) -> u64 {
        self.map
            .u64(state_word::EPOCH)
            .fetch_add(1, Ordering::AcqRel)
            + 1
    }

    /// Stores which process has the arena attached and where it is mounted, for the messages of other processes.
    pub fn set_holder(&self, pid: u32, mount_point: &Path) {
        let path = mount_point.as_os_str().as_bytes();
        let path_start = &path[..path.len().min(state_word::HOLDER_PATH_MAX)];
        self.map
            .u32(state_word::HOLDER_PATH)
            .store(path_start.len() as u32, Ordering::Relaxed);
        self.map.write(state_word::HOLDER_PATH + 4, path_start);
        self.map
            .u32(state_word::HOLDER_PID)
            .store(pid, Ordering::Release);
    }

    /// Returns the bytes of the slabs in use whose chunks are in memory.
    pub fn used_bytes(&self) -> u64 {
        self.pool.lock().used_bytes().memory
    }

    /// Returns the memory figures of each NUMA node.
    pub fn numa_node_figures(&self) -> Vec<NumaNodeFigures> {
        self.pool.lock().numa_node_figures()
    }

    /// Allocates the memory for all data that the arena can hold, in order and in steps. Ends early when
    /// `should_continue` returns false.
    ///
    /// Fails if there is too little memory, unless the arena has memory files: then errors are ignored.
    pub fn populate(&self, should_continue: &dyn Fn() -> bool) -> Result<(), Errno> {
        let start = self.geometry.slot_offset(0);
        let end = start + self.geometry.data_bytes();
        let mut offset = start;
        // In fixed steps and not slot by slot: a chunk may be smaller than a huge page.
        while offset < end && should_continue() {
            let len = (end - offset).min(POPULATE_BYTES);
            let populated = self.map.populate(offset, len);
            // With memory files, an error is expected: a memory file that programs read ends inside its last slot, and
            // no memory can be allocated beyond that end. A lack of memory then remains unnoticed too.
            let has_memory_files = self.memory_file_figures().files > 0;
            if !has_memory_files {
                populated?;
            }
            offset += len;
        }
        Ok(())
    }

    /// Asserts that the allocator's counts of used memory agree with the tables in which the arena records what it
    /// contains. No other thread may use the arena during this call.
    pub fn assert_invariants(&self) {
        let pool = self.pool.lock();
        pool.assert_invariants();
        for chunk in 0..self.geometry.chunks() {
            let Some(class) = pool.class_of(chunk) else {
                continue;
            };
            assert_eq!(
                self.tables.class(chunk),
                Ok(Some(class)),
                "class of chunk {chunk}"
            );
            let used_count = (0..self.tables.slab_count(class))
                .filter(|&slab| self.assert_slab_state(SlabRef { chunk, slab }))
                .count();
            assert_eq!(
                used_count as u32,
                pool.used_slabs(chunk),
                "slabs of chunk {chunk} in use"
            );
        }
    }

    /// Asserts that the table calls a slab free if and only if nothing uses it. Returns whether it is used.
    fn assert_slab_state(&self, slab: SlabRef) -> bool {
        let is_used = self.uses.is_used(slab);
        let state = self.tables.state(slab);
        assert_eq!(
            state != Ok(SlabState::Free),
            is_used,
            "{slab:?} is {state:?}"
        );
        is_used
    }

    /// Returns the file, for clients that map it by themselves.
    pub fn file(&self) -> rustix::fd::BorrowedFd<'_> {
        self.map.file()
    }
}
