//! Create, attach, lease, append, publish, free.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use firn_format::FormatError;
use firn_format::geometry::{DATA_ALIGN, Geometry, PAGE};
use firn_format::home::Home;
use firn_format::piece::{Checked, Piece, RawPiece, SEQUENCE_MAX, dead, word};
use firn_format::quote::quoted_path;
use firn_format::slab::{Class, SlabState, chunk_word, slab_word};
use firn_format::superblock::{SUPERBLOCK_BYTES, Superblock, state_word};
use firn_journal::Journal;
use firn_trust::{Distrust, Expected, Facts};
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::client::{Stopping, revoke_all};
use crate::homes::Homes;
use crate::map::{JournalRegion, Map, probe};
use crate::moves::{missing, read_homes};
use crate::pool::{NumaNodeFigures, Pool, Taken, numa_node_of};
use crate::spill::{SpillFault, SpillFile};
use crate::topology::Topology;
use crate::{ArenaError, Damage};

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

/// A writer's right to fill a slab. Not dropped but given back with [`Arena::seal`].
#[derive(Debug)]
#[must_use = "a lease that is dropped keeps its slab for ever"]
pub struct Lease {
    slab: SlabRef,
    class: Class,
    generation: u64,
    /// Next free byte, from the start of the chunk.
    next: u32,
    /// End of the slab, from the start of the chunk.
    end: u32,
    /// Next free record and their end.
    record: u32,
    record_end: u32,
    /// The last piece published here: its record and the piece.
    last: Option<(PieceRef, Piece)>,
}

/// Room for bytes in a leased slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Bytes from the start of the chunk.
    pub position: u32,
    /// Bytes that fit.
    pub len: u32,
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
const PIN: u64 = 1 << 40;

type OnFree = Box<dyn Fn() + Send + Sync>;

/// The mapped region.
pub struct Arena {
    pub(crate) map: Arc<Map>,
    geometry: Geometry,
    path: PathBuf,
    superblock: Superblock,
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
    uses: Vec<AtomicU64>,
    on_free: Mutex<Option<OnFree>>,
    /// Slabs of ended leases whose clients may still store bytes; each is pinned.
    stopping: Mutex<Vec<Stopping>>,
}

/// Asks the kernel to take the pages of each NUMA node's slots from that NUMA node. Advice: where it cannot, slabs
/// are handed out in the same way.
fn place(map: &Map, geometry: &Geometry, topology: &Topology) {
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
        // Without a name until it is whole: whoever finds an arena finds one that can be attached, and a kill in
        // here leaves none. What an earlier firn left under the name that it used is in the way of nobody else.
        let unfinished = path.with_extension("unfinished");
        let _ = rustix::fs::unlink(&unfinished);
        let unnamed = Unnamed::create(path, &unfinished).map_err(io("create it"))?;
        probe();
        let Unnamed { file, name } = unnamed;
        let made =
            Self::initialise(path, file, geometry, identity, spill, topology).and_then(|arena| {
                probe();
                let named = give_name(arena.map.file(), name.then_some(&unfinished), path);
                if named.is_err() && arena.spill.is_some() {
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
        let need = geometry.allocated_bytes();
        let failed = |what| {
            move |why| {
                let path = quoted_path(path);
                match why {
                    Errno::NOSPC | Errno::FBIG | Errno::NOMEM => {
                        ArenaError::NoRoom { path, need, why }
                    }
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
            0 => None,
            _ => Some(Arc::new(SpillFile::create(spill, &geometry, uuid, path)?)),
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

    fn assemble(path: &Path, map: Arc<Map>, superblock: Superblock, topology: &Topology) -> Self {
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

    /// Attaches to an existing file and reads its piece tables. Leases of dead writers end. The
    /// pieces that the caller does not [`Arena::keep`] afterwards are freed by [`Arena::settle`].
    ///
    /// Where the spill file is gone or damaged, [`Arena::spill_fault`] says so, the pieces in it are named as
    /// damage and stay pending, and reading them fails.
    pub fn attach(path: &Path) -> Result<(Self, Vec<Stored>, Vec<Damage>), ArenaError> {
        Self::attach_on(path, &Topology::one())
    }

    /// The same on a machine with several NUMA nodes. Pages that are there stay where they are.
    pub fn attach_on(
        path: &Path,
        topology: &Topology,
    ) -> Result<(Self, Vec<Stored>, Vec<Damage>), ArenaError> {
        let (map, superblock) = open(path, true)?;
        let mut arena = Self::assemble(path, map, superblock, topology);
        place(&arena.map, &arena.geometry, topology);
        // Before anything is read: what is read is then all there will ever be.
        let stopping = revoke_all(&arena.map, &arena.geometry, &arena.classes());
        let mut stored = Vec::new();
        let mut damage = Vec::new();
        let mut highest = 0;
        scan(&arena.map, &arena.geometry, &mut damage, &mut |found| {
            highest = highest.max(found.piece.sequence);
            stored.push(found);
        });
        // The counter is one word that nothing protects: it may only be too low, or too high, if it is damaged.
        let counter = arena.map.u64(state_word::SEQUENCE);
        if counter.fetch_max(highest, Ordering::Relaxed) > SEQUENCE_MAX / 2 {
            counter.store(highest, Ordering::Relaxed);
        }
        let homes = read_homes(&arena.map, &arena.geometry, &mut damage);
        if arena.geometry.spill_count > 0 {
            match SpillFile::open(&arena.superblock, true) {
                Ok((file, fault)) => {
                    arena.spill = Some(Arc::new(file));
                    arena.spill_fault = fault;
                }
                Err(fault) => arena.spill_fault = Some(fault),
            }
            missing(
                &homes,
                &stored,
                arena.spill.as_deref(),
                arena.spill_fault.as_ref(),
                &mut damage,
            );
        }
        arena.adopt(&stored, &stopping, &homes);
        *arena.stopping.lock() = stopping;
        Ok((arena, stored, damage))
    }

    /// The chunks that are cut, as far as their class can be read.
    fn classes(&self) -> Vec<(u32, Class)> {
        let class = |chunk| {
            Class::from_word(self.chunk_class(chunk).load(Ordering::Acquire))
                .ok()
                .flatten()
        };
        (0..self.geometry.chunks())
            .filter_map(|chunk| Some((chunk, class(chunk)?)))
            .collect()
    }

    fn adopt(&self, stored: &[Stored], stopping: &[Stopping], homes: &[Option<Home>]) {
        // Slabs in use and the newest write of each chunk.
        let mut used: BTreeMap<u32, (Vec<u32>, u64)> = BTreeMap::new();
        for Stored { at, piece, .. } in stored {
            let (slabs, newest) = used.entry(at.slab.chunk).or_default();
            slabs.push(at.slab.slab);
            *newest = piece.sequence.max(*newest);
        }
        for Stopping { slab, .. } in stopping {
            used.entry(slab.chunk).or_default().0.push(slab.slab);
        }
        let mut kept = Vec::new();
        for chunk in 0..self.geometry.chunks() {
            let class = Class::from_word(self.chunk_class(chunk).load(Ordering::Acquire));
            match (class, used.remove(&chunk)) {
                // Its pieces may be whole: nobody gets it while this arena lives.
                (Err(_), _) => kept.push((u64::MAX, chunk, None)),
                (Ok(Some(class)), Some((mut slabs, newest))) => {
                    slabs.sort_unstable();
                    slabs.dedup();
                    self.adopt_slabs(chunk, &slabs);
                    kept.push((newest, chunk, Some((class, slabs))));
                }
                _ => self.clear_chunk(chunk),
            }
        }
        let mut pool = self.pool.lock();
        let chunks: std::collections::HashSet<u32> =
            kept.iter().map(|(_, chunk, _)| *chunk).collect();
        let slots: std::collections::HashSet<Home> = chunks
            .iter()
            .filter_map(|chunk| homes[*chunk as usize])
            .collect();
        pool.reserve(&|chunk| chunks.contains(&chunk), &|home| {
            slots.contains(&home)
        });
        // The oldest first: in this order they move to the spill file.
        kept.sort_unstable_by_key(|(newest, chunk, _)| (*newest, *chunk));
        for (_, chunk, used) in kept {
            let home = homes[chunk as usize];
            self.homes.set(chunk, home);
            if let Some((class, slabs)) = used {
                pool.adopt(chunk, class, &slabs, home);
            }
        }
        for Stopping { slab, .. } in stopping {
            pool.lease_on(slab.chunk);
            // Beside the pin that ends at `settle`, which is for slabs with pieces.
            if stored.iter().any(|s| s.at.slab == *slab) {
                self.add_uses(*slab, PIN);
            }
        }
    }

    fn adopt_slabs(&self, chunk: u32, used: &[u32]) {
        for slab in 0..self.geometry.small_slabs() {
            let at = SlabRef { chunk, slab };
            if used.binary_search(&slab).is_ok() {
                self.slab_state(at)
                    .store(SlabState::Sealed.to_word(), Ordering::Release);
                // Held until `settle`, so that no slab is freed while pieces are kept.
                self.uses(at).store(PIN, Ordering::Relaxed);
            } else {
                self.slab_state(at)
                    .store(SlabState::Free.to_word(), Ordering::Release);
            }
        }
    }

    fn clear_chunk(&self, chunk: u32) {
        for slab in 0..self.geometry.small_slabs() {
            self.slab_state(SlabRef { chunk, slab })
                .store(SlabState::Free.to_word(), Ordering::Release);
        }
        self.chunk_class(chunk)
            .store(Class::to_word(None), Ordering::Release);
        self.homes.set(chunk, None);
    }

    /// After attach: `bytes` of this piece are pending.
    pub fn keep(&self, at: PieceRef, bytes: u32) {
        self.uses(at.slab)
            .fetch_add(u64::from(bytes), Ordering::AcqRel);
    }

    /// After attach, once: slabs of which nothing was kept are free.
    pub fn settle(&self, stored: &[Stored]) {
        let mut slabs: Vec<SlabRef> = stored.iter().map(|s| s.at.slab).collect();
        slabs.sort_unstable();
        slabs.dedup();
        for slab in slabs {
            self.release_uses(slab, PIN);
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

    /// What the tables hold now: live pieces and damage.
    pub fn stored(&self) -> (Vec<Stored>, Vec<Damage>) {
        let mut stored = Vec::new();
        let mut damage = Vec::new();
        scan(&self.map, &self.geometry, &mut damage, &mut |found| {
            stored.push(found)
        });
        (stored, damage)
    }

    // ---- leases ------------------------------------------------------------------------------

    /// Leases a slab of `class`, or of a smaller one where that is all there is, near the CPU of this thread.
    pub fn lease(&self, class: Class) -> Option<Lease> {
        self.lease_near(class, None)
    }

    /// The same near another CPU. A smaller slab near by is not preferred to a larger one far away.
    pub fn lease_near(&self, class: Class, cpu: Option<u32>) -> Option<Lease> {
        self.await_clients();
        let mut pool = self.pool.lock();
        let near = cpu.map_or_else(|| pool.topology().here(), |cpu| pool.topology().of_cpu(cpu));
        let order = [Class::Whole, Class::Medium, Class::Small];
        let taken = order
            .into_iter()
            .filter(|c| *c <= class)
            .find_map(|class| pool.take(class, near).map(|taken| (class, taken)));
        let Some((class, Taken { chunk, slab, cut })) = taken else {
            drop(pool);
            self.tell_pressure(self.geometry.chunk_count);
            return None;
        };
        let at = SlabRef { chunk, slab };
        let generation = self
            .map
            .u64(state_word::GENERATION)
            .fetch_add(1, Ordering::AcqRel)
            + 1;
        let header = self.geometry.slab_header_offset(chunk, slab);
        probe();
        self.map
            .u32(header + slab_word::PUBLISHED)
            .store(0, Ordering::Release);
        self.map
            .u64(header + slab_word::GENERATION)
            .store(generation, Ordering::Release);
        if let Some(slot) = cut {
            probe();
            self.store_home(chunk, Home::Memory(slot));
            probe();
            self.chunk_class(chunk)
                .store(Class::to_word(Some(class)), Ordering::Release);
        }
        probe();
        self.slab_state(at)
            .store(SlabState::Leased.to_word(), Ordering::Release);
        self.uses(at).store(PIN, Ordering::Release);
        let memory_used = pool.memory_used();
        drop(pool);
        if cut.is_some() {
            self.tell_pressure(memory_used);
        }
        let bytes = class.slab_bytes(self.geometry.chunk_bytes);
        let records = records_of(&self.geometry, class, slab);
        Some(Lease {
            slab: at,
            class,
            generation,
            next: (u64::from(slab) * bytes) as u32,
            end: ((u64::from(slab) + 1) * bytes) as u32,
            record: records.start,
            record_end: records.end,
            last: None,
        })
    }

    /// Whether the slab of a lease is in the memory nearest to the CPU of this thread.
    pub fn is_near(&self, lease: &Lease) -> bool {
        let Some(Home::Memory(slot)) = self.homes.get(lease.slab.chunk) else {
            return false;
        };
        let pool = self.pool.lock();
        numa_node_of(&self.geometry, pool.topology(), slot) == pool.topology().here()
    }

    /// Whether nothing in the slab of a lease is pending.
    pub fn is_idle(&self, lease: &Lease) -> bool {
        self.uses(lease.slab).load(Ordering::Acquire) == PIN
    }

    /// Whether a lease of `class` or smaller could be had.
    pub fn has_room(&self, class: Class) -> bool {
        self.await_clients();
        let pool = self.pool.lock();
        [Class::Small, Class::Medium, Class::Whole]
            .into_iter()
            .any(|c| c <= class && pool.has(c))
    }

    /// Ends a lease. The slab is freed when nothing of it is pending.
    pub fn seal(&self, lease: Lease) {
        let slab = lease.slab;
        probe();
        self.slab_state(slab)
            .store(SlabState::Sealed.to_word(), Ordering::Release);
        self.end_lease(slab);
    }

    /// The writer of a slab is known not to touch it any more.
    pub(crate) fn end_lease(&self, slab: SlabRef) {
        let mut pool = self.pool.lock();
        let may_move = pool.end_lease(slab.chunk);
        let memory_used = pool.memory_used();
        drop(pool);
        self.release_uses(slab, PIN);
        if may_move {
            self.tell_pressure(memory_used);
        }
    }

    /// Publishes what was filled at `reserved` as a new piece, `modified` at that time (nanoseconds since 1970). The
    /// slab counts the bytes as live.
    pub fn publish(
        &self,
        lease: &mut Lease,
        reserved: Reserved,
        (file, offset): (u64, u64),
        sequence: u64,
        modified: u64,
    ) -> PieceRef {
        let piece = Piece {
            file,
            offset,
            sequence,
            position: reserved.position,
            len: reserved.len,
        };
        let at = PieceRef {
            slab: lease.slab,
            record: lease.record,
        };
        self.uses(lease.slab)
            .fetch_add(u64::from(piece.len), Ordering::AcqRel);
        let base = self.geometry.record_offset(at.slab.chunk, at.record);
        let raw = piece.raw(lease.generation);
        self.map
            .u64(base + word::WHO)
            .store(raw.who, Ordering::Relaxed);
        self.map
            .u64(base + word::OFFSET)
            .store(raw.offset, Ordering::Relaxed);
        self.map
            .u64(base + word::PLACE)
            .store(raw.place, Ordering::Relaxed);
        self.map
            .u64(base + word::MODIFIED)
            .store(modified, Ordering::Relaxed);
        probe();
        self.map
            .u64(base + word::SEAL)
            .store(raw.seal, Ordering::Release);
        let header = self
            .geometry
            .slab_header_offset(at.slab.chunk, at.slab.slab);
        probe();
        self.map
            .u32(header + slab_word::PUBLISHED)
            .fetch_add(1, Ordering::Release);
        lease.record += 1;
        lease.next = reserved.position + reserved.len;
        lease.last = Some((at, piece));
        at
    }

    /// Publishes what was filled directly behind the last piece of the lease as more of it; returns
    /// the piece and its sequence.
    pub fn extend(&self, lease: &mut Lease, len: u32, modified: u64) -> (PieceRef, u64) {
        let (at, piece) = lease.last.as_mut().expect("extend follows publish");
        piece.len += len;
        self.uses(at.slab)
            .fetch_add(u64::from(len), Ordering::AcqRel);
        let base = self.geometry.record_offset(at.slab.chunk, at.record);
        self.map
            .u64(base + word::MODIFIED)
            .store(modified, Ordering::Relaxed);
        probe();
        self.map
            .u64(base + word::SEAL)
            .store(piece.seal(lease.generation), Ordering::Release);
        lease.next += len;
        (*at, piece.sequence)
    }

    /// `bytes` of a piece are not pending any more; `last` says that none is left. A dead piece is
    /// marked before its slab can be reused.
    pub fn retire(&self, at: PieceRef, bytes: u32, last: bool) {
        if last {
            self.mark_dead(at);
        }
        self.release_uses(at.slab, u64::from(bytes));
    }

    /// `bytes` of a slab are not used any more.
    pub fn release(&self, slab: SlabRef, bytes: u64) {
        self.release_uses(slab, bytes);
    }

    /// Nothing of a piece is pending.
    pub fn mark_dead(&self, at: PieceRef) {
        let base = self.geometry.record_offset(at.slab.chunk, at.record);
        let header = self
            .geometry
            .slab_header_offset(at.slab.chunk, at.slab.slab);
        let generation = self
            .map
            .u64(header + slab_word::GENERATION)
            .load(Ordering::Relaxed);
        probe();
        self.map
            .u64(base + word::SEAL)
            .store(dead(generation), Ordering::Release);
    }

    /// The time of the last write to a piece, nanoseconds since 1970, as its record has it.
    pub fn modified(&self, at: PieceRef) -> u64 {
        self.modified_word(at).load(Ordering::Relaxed)
    }

    /// Notes the time of a write to a piece, or of one to its file of which no other piece tells.
    pub fn set_modified(&self, at: PieceRef, modified: u64) {
        probe();
        self.modified_word(at).store(modified, Ordering::Relaxed);
    }

    fn modified_word(&self, at: PieceRef) -> &AtomicU64 {
        self.map
            .u64(self.geometry.record_offset(at.slab.chunk, at.record) + word::MODIFIED)
    }

    /// Keeps a slab, and its data where it is, while an I/O reads it.
    pub fn pin(&self, slab: SlabRef) {
        self.uses(slab).fetch_add(PIN, Ordering::AcqRel);
        self.homes.enter(slab.chunk);
    }
    /// Ends a [`Arena::pin`].
    pub fn unpin(&self, slab: SlabRef) {
        self.homes.leave(slab.chunk);
        self.release_uses(slab, PIN);
    }

    /// Keeps a slab, and its data where it is, for any time: who waits for room does not wait for this chunk
    /// to move.
    pub fn hold(&self, slab: SlabRef) {
        self.uses(slab).fetch_add(PIN, Ordering::AcqRel);
        self.homes.hold(slab.chunk);
    }
    /// Ends a [`Arena::hold`].
    pub fn let_go(&self, slab: SlabRef) {
        self.homes.let_go(slab.chunk);
        self.release_uses(slab, PIN);
        let memory_used = self.pool.lock().memory_used();
        self.tell_pressure(memory_used);
    }

    fn release_uses(&self, slab: SlabRef, amount: u64) {
        let before = self.uses(slab).fetch_sub(amount, Ordering::AcqRel);
        assert!(
            before >= amount,
            "slab {slab:?} released more often than it was used"
        );
        if before != amount {
            return;
        }
        probe();
        self.slab_state(slab)
            .store(SlabState::Free.to_word(), Ordering::Release);
        let mut pool = self.pool.lock();
        if pool.give(slab.chunk, slab.slab) {
            self.forget_chunk(slab.chunk, &mut pool);
        }
        drop(pool);
        self.tell_free();
    }

    /// A chunk became free: so does its slot.
    pub(crate) fn forget_chunk(&self, chunk: u32, pool: &mut Pool) {
        probe();
        self.chunk_class(chunk)
            .store(Class::to_word(None), Ordering::Release);
        if let Some(home) = self.homes.get(chunk) {
            self.homes.set(chunk, None);
            pool.free_slot(home);
        }
    }

    pub(crate) fn tell_free(&self) {
        if let Some(f) = &*self.on_free.lock() {
            f();
        }
    }

    fn uses(&self, slab: SlabRef) -> &AtomicU64 {
        &self.uses[slab.chunk as usize * self.geometry.small_slabs() as usize + slab.slab as usize]
    }
    fn slab_state(&self, slab: SlabRef) -> &std::sync::atomic::AtomicU32 {
        self.map
            .u32(self.geometry.slab_header_offset(slab.chunk, slab.slab) + slab_word::STATE)
    }
    fn chunk_class(&self, chunk: u32) -> &std::sync::atomic::AtomicU32 {
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

    /// Class of a chunk in use.
    pub fn class_of(&self, chunk: u32) -> Option<Class> {
        self.pool.lock().class(chunk)
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

impl Lease {
    /// The slab.
    pub fn slab(&self) -> SlabRef {
        self.slab
    }
    /// Its class.
    pub fn class(&self) -> Class {
        self.class
    }
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }
    /// Start of what is free, at first of the slab.
    pub(crate) fn start(&self) -> u32 {
        self.next
    }
    pub(crate) fn end(&self) -> u32 {
        self.end
    }
    /// Bytes not yet used.
    pub fn free_bytes(&self) -> u32 {
        self.end - self.next
    }
    /// The last piece published here.
    pub fn last(&self) -> Option<PieceRef> {
        self.last.map(|(at, _)| at)
    }

    /// Whether bytes of `file` at `offset`, filled at `reserved`, continue the last piece.
    pub fn continues(&self, file: u64, offset: u64, reserved: Reserved) -> bool {
        self.last.is_some_and(|(_, p)| {
            p.file == file
                && p.offset + u64::from(p.len) == offset
                && p.position + p.len == reserved.position
        })
    }

    /// Room for up to `len` bytes of `file` at `offset`. Where they continue the last piece they lie
    /// directly behind it; else, from a page on or at the start of the slab, the position is congruent
    /// to the file offset modulo the page size, so that whole pages can be written or mapped as they
    /// are. `None`: the slab is full.
    pub fn reserve(&self, file: u64, offset: u64, len: u64) -> Option<Reserved> {
        let continues = self
            .last
            .is_some_and(|(_, p)| p.file == file && p.offset + u64::from(p.len) == offset);
        let mut position = u64::from(self.next);
        if !continues {
            if self.record == self.record_end {
                return None;
            }
            if len >= PAGE || self.last.is_none() {
                position += (offset % PAGE + PAGE - position % PAGE) % PAGE;
            }
        }
        let room = u64::from(self.end).saturating_sub(position);
        // A piece of its own needs a record; a continuing one may still have to become one.
        if room == 0 || (continues && self.record == self.record_end) {
            return None;
        }
        Some(Reserved {
            position: position as u32,
            len: len.min(room) as u32,
        })
    }
}

/// A new file of mode 0600 that nobody else has.
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

/// Records of slab `slab` in a chunk of `class`.
pub(crate) fn records_of(geometry: &Geometry, class: Class, slab: u32) -> std::ops::Range<u32> {
    let slabs = (geometry.chunk_bytes / class.slab_bytes(geometry.chunk_bytes)) as u32;
    let each = geometry.records_per_chunk() / slabs;
    slab * each..(slab + 1) * each
}

/// Opens and maps a file of this user whose superblock is good.
pub(crate) fn open(path: &Path, writable: bool) -> Result<(Arc<Map>, Superblock), ArenaError> {
    let name = || quoted_path(path);
    let io = |what| {
        move |source| ArenaError::Io {
            path: quoted_path(path),
            what,
            source,
        }
    };
    let access = if writable {
        OFlags::RDWR
    } else {
        OFlags::RDONLY
    };
    // O_NONBLOCK: nobody may write to a named pipe that is in its place.
    let flags = access | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        // What O_NOFOLLOW says of a link.
        Errno::LOOP => {
            let why = Distrust::Kind {
                found: "a symbolic link",
                expected: "a regular file",
            };
            ArenaError::Distrusted { path: name(), why }
        }
        errno => io("open it")(errno),
    })?;
    let stat = rustix::fs::fstat(&file).map_err(io("stat it"))?;
    let size = stat.st_size as u64;
    let facts = Facts::of(&stat).check(Expected::File, rustix::process::geteuid().as_raw());
    let distrusted = |why| ArenaError::Distrusted { path: name(), why };
    if let Err(why @ Distrust::Kind { .. }) = facts {
        return Err(distrusted(why));
    }
    let mut page = vec![0u8; SUPERBLOCK_BYTES.min(size as usize)];
    rustix::io::pread(&file, &mut page[..], 0).map_err(io("read it"))?;
    // Of a file that is no arena at all this says more than whose it is.
    let superblock = Superblock::decode(&page).map_err(|source| ArenaError::Format {
        path: name(),
        source,
    })?;
    facts.map_err(distrusted)?;
    let expected = superblock.geometry.file_bytes();
    if size < expected {
        let source = FormatError::Truncated {
            what: "arena",
            found: size,
            expected,
        };
        return Err(ArenaError::Format {
            path: name(),
            source,
        });
    }
    Ok((
        Arc::new(Map::new(path, file, expected, writable)?),
        superblock,
    ))
}

/// Reads every piece record that counts; what fails its check goes to `damage`.
pub(crate) fn scan(
    map: &Map,
    geometry: &Geometry,
    damage: &mut Vec<Damage>,
    live: &mut dyn FnMut(Stored),
) {
    for chunk in 0..geometry.chunks() {
        let class = match Class::from_word(
            map.u32(geometry.table_offset(chunk) + chunk_word::CLASS)
                .load(Ordering::Acquire),
        ) {
            Ok(None) => continue,
            Ok(Some(class)) => class,
            Err(word) => {
                damage.push(Damage::Chunk { chunk, word });
                continue;
            }
        };
        let bytes = class.slab_bytes(geometry.chunk_bytes);
        for slab in 0..(geometry.chunk_bytes / bytes) as u32 {
            scan_slab(map, geometry, SlabRef { chunk, slab }, class, damage, live);
        }
    }
}

fn scan_slab(
    map: &Map,
    geometry: &Geometry,
    at: SlabRef,
    class: Class,
    damage: &mut Vec<Damage>,
    live: &mut dyn FnMut(Stored),
) {
    let header = geometry.slab_header_offset(at.chunk, at.slab);
    let state = SlabState::from_word(map.u32(header + slab_word::STATE).load(Ordering::Acquire));
    match state {
        Ok(SlabState::Free) => return,
        Ok(_) => {}
        // Which it was is unknown: what its records say is checked one by one all the same.
        Err(word) => damage.push(Damage::Slab { slab: at, word }),
    }
    // A live arena may lease the slab anew while it is read: then what was read is of two leases. It may
    // also free the chunk and cut it into slabs of another class, whose records lie elsewhere: then
    // nothing of this slab is there any more.
    let class_now = map.u32(geometry.table_offset(at.chunk) + chunk_word::CLASS);
    let state_now = map.u32(header + slab_word::STATE);
    const TRIES: usize = 3;
    for _ in 0..TRIES {
        let generation = map
            .u64(header + slab_word::GENERATION)
            .load(Ordering::Acquire);
        let mut found = Vec::new();
        let mut wrong = Vec::new();
        scan_records(
            map,
            geometry,
            at,
            class,
            generation,
            &mut wrong,
            &mut |stored| found.push(stored),
        );
        fence(Ordering::Acquire);
        if class_now.load(Ordering::Acquire) != Class::to_word(Some(class))
            || state_now.load(Ordering::Acquire) == SlabState::Free.to_word()
        {
            return;
        }
        if map
            .u64(header + slab_word::GENERATION)
            .load(Ordering::Acquire)
            == generation
        {
            damage.extend(wrong);
            found.into_iter().for_each(live);
            return;
        }
    }
}

fn scan_records(
    map: &Map,
    geometry: &Geometry,
    at: SlabRef,
    class: Class,
    generation: u64,
    damage: &mut Vec<Damage>,
    live: &mut dyn FnMut(Stored),
) {
    let header = geometry.slab_header_offset(at.chunk, at.slab);
    let published = map
        .u32(header + slab_word::PUBLISHED)
        .load(Ordering::Acquire);
    let bytes = class.slab_bytes(geometry.chunk_bytes);
    let start = u64::from(at.slab) * bytes;
    let end = (u64::from(at.slab) + 1) * bytes;
    let records = records_of(geometry, class, at.slab);
    if published > records.len() as u32 {
        damage.push(Damage::Count {
            slab: at,
            published,
            max: records.len() as u32,
        });
    }
    for (index, record) in records.enumerate() {
        let base = geometry.record_offset(at.chunk, record);
        let raw = load(map, base);
        let piece_ref = PieceRef { slab: at, record };
        match raw.check(generation, start, end) {
            Ok(checked) => {
                // A whole record beyond the counter was being published when its writer died: its
                // bytes are there, so it counts.
                if let Checked::Live(piece) = checked {
                    let modified = map.u64(base + word::MODIFIED).load(Ordering::Relaxed);
                    live(Stored {
                        at: piece_ref,
                        piece,
                        modified,
                    });
                }
            }
            Err(error) if (index as u32) < published => {
                damage.push(Damage::Piece {
                    piece: piece_ref,
                    error,
                });
            }
            // Not published: whatever lies here is left over from before.
            Err(_) => {}
        }
    }
}

pub(crate) fn load(map: &Map, base: u64) -> RawPiece {
    let seal = map.u64(base + word::SEAL).load(Ordering::Acquire);
    RawPiece {
        who: map.u64(base + word::WHO).load(Ordering::Relaxed),
        offset: map.u64(base + word::OFFSET).load(Ordering::Relaxed),
        place: map.u64(base + word::PLACE).load(Ordering::Relaxed),
        seal,
    }
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
