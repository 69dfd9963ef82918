//! Attaching to an arena that is there: leases of dead writers end, pieces are found, slabs are counted.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use firn_format::FormatError;
use firn_format::home::Home;
use firn_format::piece::SEQUENCE_MAX;
use firn_format::quote::quoted_path;
use firn_format::slab::{Class, SlabState};
use firn_format::superblock::{SUPERBLOCK_BYTES, Superblock, state_word};
use firn_trust::{Distrust, Expected, Facts};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::arena::{Arena, PIN, PieceRef, SlabRef, Stored};
use crate::client::{Stopping, revoke_all};
use crate::create::place;
use crate::map::Map;
use crate::moves::{missing, read_homes};
use crate::scan::scan;
use crate::spill::SpillFile;
use crate::topology::Topology;
use crate::{ArenaError, Damage};

impl Arena {
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
