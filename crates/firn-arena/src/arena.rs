//! The mapped region: its parts, its fixed facts, its words.
//!
//! The parts have locks and invariants of their own: `pool` (free chunks, slots and slabs), `uses` (what keeps a slab),
//! `homes` (where each chunk is), `spill_area`, `memory_files` (slots that the arena's file does without), `lingering` (clients that may still store bytes) and `listeners`. What
//! is done with several of them: `create`, `attach`, `lease`, `publish`, `moves` and `client`.
//!
//! Locks: a move of a chunk (`spill_area`) locks the pool meanwhile; no other two locks are held together.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_format::geometry::{DATA_ALIGN, Geometry};
use firn_format::slab::SlabState;
use firn_format::superblock::{Superblock, state_word};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::homes::Homes;
use crate::lingering::LingeringWriters;
use crate::listeners::Listeners;
use crate::map::{JournalRegion, Map};
use crate::memory_files::MemoryFiles;
use crate::pool::{NumaNodeFigures, Pool};
use crate::refs::SlabRef;
use crate::spill_area::SpillArea;
use crate::tables::Tables;
use crate::topology::Topology;
use crate::uses::SlabUses;

/// Bytes that get their memory at once: whole huge pages, and no long pause before a mount can end.
const POPULATE_BYTES: u64 = 2 * DATA_ALIGN;

/// The mapped region.
pub struct Arena {
    pub(crate) map: Arc<Map>,
    pub(crate) tables: Tables,
    pub(crate) geometry: Geometry,
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) pool: Mutex<Pool>,
    pub(crate) homes: Homes,
    pub(crate) uses: SlabUses,
    pub(crate) spill: SpillArea,
    pub(crate) memory_files: MemoryFiles,
    pub(crate) lingering: LingeringWriters,
    pub(crate) listeners: Listeners,
}

impl Arena {
    /// An arena all of whose chunks are free, without a spill file.
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
            homes: Homes::new(geometry.chunks()),
            uses: SlabUses::new(&geometry),
            spill: SpillArea::default(),
            memory_files: MemoryFiles::new(path),
            lingering: LingeringWriters::default(),
            listeners: Listeners::default(),
        }
    }
    /// The layout.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
    /// What it was made for.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }
    /// The journal's bytes.
    pub fn journal_region(&self) -> JournalRegion {
        JournalRegion {
            map: Arc::clone(&self.map),
            offset: self.geometry.journal_offset(0),
            len: 2 * self.geometry.journal_half_bytes,
        }
    }
    /// Calls `f` whenever a slab was freed.
    pub fn on_free(&self, f: impl Fn() + Send + Sync + 'static) {
        self.listeners.set_freed(Box::new(f));
    }
    /// Calls `f` when a writer took memory while more than `slots` of it were in use, or found none.
    pub fn on_pressure(&self, slots: u32, f: impl Fn() + Send + Sync + 'static) {
        self.listeners.set_pressure(slots, Box::new(f));
    }
    /// The next sequence number.
    pub fn next_sequence(&self) -> u64 {
        self.map
            .u64(state_word::SEQUENCE)
            .fetch_add(1, Ordering::AcqRel)
            + 1
    }
    /// Counts a lifetime of firnd; returns which it is, from 1.
    pub fn begin_epoch(&self) -> u64 {
        self.map
            .u64(state_word::EPOCH)
            .fetch_add(1, Ordering::AcqRel)
            + 1
    }
    /// Names the process that has it attached, for messages of others.
    pub fn set_holder(&self, pid: u32, mount_point: &Path) {
        let bytes = mount_point.as_os_str().as_bytes();
        let bytes = &bytes[..bytes.len().min(state_word::HOLDER_PATH_MAX)];
        self.map
            .u32(state_word::HOLDER_PATH)
            .store(bytes.len() as u32, Ordering::Relaxed);
        self.map.write(state_word::HOLDER_PATH + 4, bytes);
        self.map
            .u32(state_word::HOLDER_PID)
            .store(pid, Ordering::Release);
    }
    /// Bytes of slabs in use in memory.
    pub fn used_bytes(&self) -> u64 {
        self.pool.lock().used_bytes().0
    }

    /// What the NUMA nodes have and gave.
    pub fn numa_node_figures(&self) -> Vec<NumaNodeFigures> {
        self.pool.lock().numa_node_figures()
    }

    /// Gives memory to all slots, from the first on, until all are done or `go_on` is false.
    pub fn populate(&self, go_on: &dyn Fn() -> bool) -> Result<(), Errno> {
        let start = self.geometry.slot_offset(0);
        let end = self.geometry.slot_offset(0) + self.geometry.data_bytes();
        let mut at = start;
        // Not slot by slot: chunks may be smaller than a huge page.
        while at < end && go_on() {
            let len = (end - at).min(POPULATE_BYTES);
            let populated = self.map.populate(at, len);
            // A memory file that programs read is as long as what it holds.
            if self.memory_file_figures().files == 0 {
                populated?;
            }
            at += len;
        }
        Ok(())
    }

    /// Asserts that what is counted is what is there: of slabs and chunks, here and in the piece tables. To be called
    /// while no other thread uses the arena.
    pub fn assert_invariants(&self) {
        let pool = self.pool.lock();
        pool.assert_invariants();
        for chunk in 0..self.geometry.chunks() {
            let Some(class) = pool.class(chunk) else {
                continue;
            };
            assert_eq!(
                self.tables.class(chunk),
                Ok(Some(class)),
                "class of chunk {chunk}"
            );
            let mut used = 0;
            for slab in 0..self.tables.slab_count(class) {
                used += u32::from(self.assert_slab(SlabRef { chunk, slab }));
            }
            assert_eq!(
                used,
                pool.used_slabs(chunk),
                "slabs of chunk {chunk} in use"
            );
        }
    }

    /// Asserts that the state of a slab in its table is what its uses say; returns whether it is used.
    fn assert_slab(&self, slab: SlabRef) -> bool {
        let is_used = self.uses.is_used(slab);
        let state = self.tables.state(slab);
        assert_eq!(
            state != Ok(SlabState::Free),
            is_used,
            "{slab:?} is {state:?}"
        );
        is_used
    }

    /// The file, for clients that map it themselves.
    pub fn file(&self) -> rustix::fd::BorrowedFd<'_> {
        self.map.file()
    }
}
