//! The mapped region: its parts, its fixed facts, its words.
//!
//! What is done with it: `create`, `attach`, `lease`, `publish`, `scan`, `moves` (spill file) and `client`
//! (leases of client processes).

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use firn_format::geometry::{DATA_ALIGN, Geometry};
use firn_format::piece::Piece;
use firn_format::slab::{Class, SlabState, chunk_word, slab_word};
use firn_format::superblock::{Superblock, state_word};
use parking_lot::Mutex;
use rustix::io::Errno;

use crate::client::Stopping;
use crate::homes::Homes;
use crate::map::{JournalRegion, Map};
use crate::pool::{NumaNodeFigures, Pool};
use crate::spill::{SpillFault, SpillFile};
use crate::topology::Topology;

/// One slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlabRef {
    /// Index of the chunk.
    pub chunk: u32,
    /// Index of the slab in it.
    pub slab: u32,
}

/// One piece record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PieceRef {
    /// The slab that holds the data.
    pub slab: SlabRef,
    /// Index of the record in the chunk's table.
    pub record: u32,
}

/// A piece found at attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Where its record is.
    pub at: PieceRef,
    /// What it says.
    pub piece: Piece,
    /// Time of the last write to it, nanoseconds since 1970; 0: not known. Nothing protects it.
    pub modified: u64,
}

/// Bytes that get their memory at once: whole huge pages, and no long pause before a mount can end.
const POPULATE_BYTES: u64 = 2 * DATA_ALIGN;
/// One use of a slab other than by live bytes: a lease, an I/O in flight.
pub(crate) const PIN: u64 = 1 << 40;

type OnFree = Box<dyn Fn() + Send + Sync>;

/// The mapped region.
pub struct Arena {
    pub(crate) map: Arc<Map>,
    pub(crate) geometry: Geometry,
    pub(crate) path: PathBuf,
    pub(crate) superblock: Superblock,
    pub(crate) pool: Mutex<Pool>,
    pub(crate) homes: Homes,
    pub(crate) spill: Option<Arc<SpillFile>>,
    pub(crate) spill_fault: Option<SpillFault>,
    /// Held during a move.
    pub(crate) mover: Mutex<()>,
    pub(crate) moved_bytes: AtomicU64,
    /// More slots of memory than this in use are told.
    pub(crate) pressure_at: AtomicU32,
    pub(crate) on_pressure: Mutex<Option<OnFree>>,
    /// By smallest slab: live bytes, plus [`PIN`] for each other use. The slab is free at 0.
    pub(crate) uses: Vec<AtomicU64>,
    pub(crate) on_free: Mutex<Option<OnFree>>,
    /// Slabs of ended leases whose clients may still store bytes; each is pinned.
    pub(crate) stopping: Mutex<Vec<Stopping>>,
}

impl Arena {
    pub(crate) fn assemble(
        path: &Path,
        map: Arc<Map>,
        superblock: Superblock,
        topology: &Topology,
    ) -> Self {
        let geometry = superblock.geometry;
        let slabs = geometry.chunks() as usize * geometry.small_slabs() as usize;
        Self {
            map,
            geometry,
            path: path.to_owned(),
            superblock,
            pool: Mutex::new(Pool::new(geometry, topology.clone())),
            homes: Homes::new(geometry.chunks()),
            spill: None,
            spill_fault: None,
            mover: Mutex::new(()),
            moved_bytes: AtomicU64::new(0),
            pressure_at: AtomicU32::new(u32::MAX),
            on_pressure: Mutex::new(None),
            uses: (0..slabs).map(|_| AtomicU64::new(0)).collect(),
            on_free: Mutex::new(None),
            stopping: Mutex::new(Vec::new()),
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
        *self.on_free.lock() = Some(Box::new(f));
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
    /// Says who has it attached, for messages of others.
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
            self.map.populate(at, len)?;
            at += len;
        }
        Ok(())
    }

    pub(crate) fn uses(&self, slab: SlabRef) -> &AtomicU64 {
        &self.uses[slab.chunk as usize * self.geometry.small_slabs() as usize + slab.slab as usize]
    }
    pub(crate) fn slab_state(&self, slab: SlabRef) -> &AtomicU32 {
        self.map
            .u32(self.geometry.slab_header_offset(slab.chunk, slab.slab) + slab_word::STATE)
    }
    pub(crate) fn chunk_class(&self, chunk: u32) -> &AtomicU32 {
        self.map
            .u32(self.geometry.table_offset(chunk) + chunk_word::CLASS)
    }

    /// Asserts that what is counted is what is there: of slabs and chunks, here and in the piece tables. To be called
    /// while nobody else uses the arena.
    pub fn assert_invariants(&self) {
        let pool = self.pool.lock();
        pool.assert_invariants();
        for chunk in 0..self.geometry.chunks() {
            let Some(class) = pool.class(chunk) else {
                continue;
            };
            let word = self.chunk_class(chunk).load(Ordering::Acquire);
            assert_eq!(word, Class::to_word(Some(class)), "class of chunk {chunk}");
            let slabs =
                (self.geometry.chunk_bytes / class.slab_bytes(self.geometry.chunk_bytes)) as u32;
            let at = |slab| SlabRef { chunk, slab };
            let used = (0..slabs).filter(|&slab| self.uses(at(slab)).load(Ordering::Acquire) > 0);
            assert_eq!(
                used.count() as u32,
                pool.used_slabs(chunk),
                "slabs of chunk {chunk} in use"
            );
            for slab in 0..slabs {
                let is_used = self.uses(at(slab)).load(Ordering::Acquire) > 0;
                let state = SlabState::from_word(self.slab_state(at(slab)).load(Ordering::Acquire));
                assert_eq!(
                    state != Ok(SlabState::Free),
                    is_used,
                    "slab {slab} of chunk {chunk} is {state:?}"
                );
            }
        }
    }
}

/// For the arena's other modules.
impl Arena {
    pub(crate) fn map(&self) -> &Map {
        &self.map
    }
    pub(crate) fn stopping(&self) -> &Mutex<Vec<Stopping>> {
        &self.stopping
    }
    pub(crate) fn add_uses(&self, slab: SlabRef, bytes: u64) {
        self.uses(slab).fetch_add(bytes, Ordering::AcqRel);
    }
    pub(crate) fn set_state(&self, slab: SlabRef, state: SlabState) {
        self.slab_state(slab)
            .store(state.to_word(), Ordering::Release);
    }
    /// The file, for clients that map it themselves.
    pub fn file(&self) -> rustix::fd::BorrowedFd<'_> {
        self.map.file()
    }
}
