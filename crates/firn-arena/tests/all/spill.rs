//! Chunks that moved to the spill file: their bytes are found there, also after a crash at any store of
//! the move; their slots are used again; what the device does wrong is an error and never other bytes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_arena::{
    Arena, ArenaError, Damage, Identity, Lease, PieceRef, Place, SpillFault, Spilled, check,
};
use firn_format::geometry::Geometry;
use firn_format::home::Home;
use firn_format::piece::Piece;
use firn_format::slab::{Class, chunk_word};
use firn_format::spill::SPILL_DATA_OFFSET;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustix::io::Errno;

const CHUNK: u64 = 128 << 10;

struct Fixture {
    dir: tempfile::TempDir,
    arena: Option<Arena>,
}

impl Fixture {
    fn new(memory: u64, spill: u64) -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let geometry =
            Geometry::with_spill(memory * CHUNK, CHUNK, spill * CHUNK).expect("a valid geometry");
        let identity = Identity {
            backing: PathBuf::from("/backing"),
            dev: 1,
            ino: 2,
        };
        let path = dir.path().join("arena");
        let spill = dir.path().join("spill");
        let arena = Arena::create_with_spill(&path, geometry, &identity, &spill).expect("created");
        Self {
            dir,
            arena: Some(arena),
        }
    }
    fn path(&self) -> PathBuf {
        self.dir.path().join("arena")
    }
    fn spill(&self) -> PathBuf {
        self.dir.path().join("spill")
    }
    fn arena(&self) -> &Arena {
        self.arena.as_ref().expect("attached")
    }
    /// All processes die; `change` is done to the files before the next attach.
    fn again(&mut self, change: impl FnOnce(&Self)) -> (Vec<Piece>, Vec<Damage>) {
        self.arena = None;
        change(self);
        let (arena, stored, damage) = Arena::attach(&self.path()).expect("attached");
        for found in &stored {
            arena.keep_piece(found.at, found.piece.len);
        }
        arena.free_unkept_slabs(&stored);
        self.arena = Some(arena);
        (stored.iter().map(|s| s.piece).collect(), damage)
    }
}

fn byte_of(file: u64, offset: u64) -> u8 {
    (file.wrapping_mul(37) ^ offset.wrapping_mul(11) ^ (offset >> 8)) as u8
}

fn bytes_of(file: u64, offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| byte_of(file, at)).collect()
}

fn append(arena: &Arena, lease: &mut Lease, file: u64, offset: u64, len: u64) -> Option<PieceRef> {
    let reserved = lease
        .reserve(file, offset, len)
        .filter(|r| u64::from(r.len) == len)?;
    arena.fill_slab(
        lease.slab(),
        reserved.position,
        &bytes_of(file, offset, len),
    );
    let sequence = arena.next_sequence();
    Some(arena.publish_piece(lease, reserved, (file, offset), sequence, 0))
}

/// A sealed chunk full of one file.
fn chunk_of(arena: &Arena, file: u64) -> PieceRef {
    let mut lease = arena.lease_slab(Class::Whole).expect("room");
    assert_eq!(lease.class(), Class::Whole);
    let piece = append(arena, &mut lease, file, 0, CHUNK).expect("a chunk of room");
    arena.seal_slab(lease);
    piece
}

/// Every piece in the tables has its bytes; returns how many there are.
fn verify(arena: &Arena) -> usize {
    let (stored, damage) = arena.read_pieces();
    assert_eq!(damage, []);
    for found in &stored {
        let mut bytes = vec![0; found.piece.len as usize];
        arena
            .copy_out(found.at.slab, found.piece.position, &mut bytes)
            .expect("readable");
        let Piece {
            file, offset, len, ..
        } = found.piece;
        assert!(bytes == bytes_of(file, offset, u64::from(len)), "{found:?}");
    }
    stored.len()
}

#[test]
fn a_spilled_chunk_reads_the_same_and_gives_its_memory_back() {
    let mut f = Fixture::new(2, 3);
    let arena = f.arena();
    let first = chunk_of(arena, 1);
    let second = chunk_of(arena, 2);
    assert!(arena.lease_slab(Class::Small).is_none(), "memory is full");
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(Spilled::Chunk(first.slab.chunk))
    );
    assert!(arena.is_spilled(first.slab.chunk) && !arena.is_spilled(second.slab.chunk));
    assert!(
        matches!(arena.place(first.slab, 0, 1), Place::Spill(_, at) if at == SPILL_DATA_OFFSET)
    );
    assert!(matches!(arena.place(second.slab, 0, 1), Place::Memory(_)));
    assert_eq!(arena.used_bytes(), CHUNK);
    chunk_of(arena, 3);
    assert_eq!(verify(arena), 3);
    assert_eq!(arena.sync_spill(), Ok(()));
    let (pieces, damage) = f.again(|_| {});
    assert_eq!((pieces.len(), damage), (3, vec![]));
    assert_eq!(verify(f.arena()), 3);
    assert_eq!(f.arena().spill_figures().unwrap().used_bytes, CHUNK);
}

#[test]
fn slots_of_the_spill_file_are_bounded_and_used_again() {
    let f = Fixture::new(1, 2);
    let arena = f.arena();
    let mut spilled = Vec::new();
    for file in 1..=2 {
        spilled.push(chunk_of(arena, file));
        assert!(matches!(arena.spill_oldest(&|_| ()), Ok(Spilled::Chunk(_))));
    }
    let held = chunk_of(arena, 3);
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(Spilled::Nothing),
        "both slots are in use"
    );
    assert!(!arena.can_spill());
    for round in 4..40 {
        let Some(Home::Spill(slot)) = arena.home(spilled[0].slab.chunk) else {
            panic!("spilled")
        };
        arena.retire_bytes(spilled.remove(0), CHUNK as u32, true);
        let Ok(Spilled::Chunk(chunk)) = arena.spill_oldest(&|_| ()) else {
            panic!("a slot is free")
        };
        assert_eq!(arena.home(chunk), Some(Home::Spill(slot)));
        spilled.push(PieceRef {
            slab: firn_arena::SlabRef { chunk, slab: 0 },
            record: held.record,
        });
        chunk_of(arena, round);
        assert_eq!(verify(arena), 3);
    }
    assert_eq!(
        std::fs::metadata(f.spill()).unwrap().len(),
        SPILL_DATA_OFFSET + 2 * CHUNK
    );
}

#[test]
fn the_oldest_sealed_chunk_moves_first_and_a_leased_or_pinned_one_stays() {
    let f = Fixture::new(4, 4);
    let arena = f.arena();
    let lease = arena.lease_slab(Class::Whole).unwrap();
    let pieces = [chunk_of(arena, 1), chunk_of(arena, 2), chunk_of(arena, 3)];
    arena.pin_slab(pieces[0].slab);
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(Spilled::Chunk(pieces[1].slab.chunk))
    );
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(Spilled::Chunk(pieces[2].slab.chunk))
    );
    assert_eq!(arena.spill_oldest(&|_| ()), Ok(Spilled::Nothing));
    arena.unpin_slab(pieces[0].slab);
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(Spilled::Chunk(pieces[0].slab.chunk))
    );
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(Spilled::Nothing),
        "the rest is leased"
    );
    arena.seal_slab(lease);
}

#[test]
fn after_attach_the_chunk_that_was_written_longest_ago_moves_first() {
    let mut f = Fixture::new(3, 3);
    let order: Vec<u32> = (1..=3)
        .map(|file| chunk_of(f.arena(), file).slab.chunk)
        .collect();
    f.again(|_| {});
    for chunk in order {
        assert_eq!(f.arena().spill_oldest(&|_| ()), Ok(Spilled::Chunk(chunk)));
    }
}

#[test]
fn bytes_change_in_place_in_memory_only() {
    let f = Fixture::new(1, 1);
    let arena = f.arena();
    let piece = chunk_of(arena, 1);
    assert!(arena.overwrite_bytes(piece.slab, 0, &bytes_of(1, 0, 10)));
    arena.spill_oldest(&|_| ()).unwrap();
    assert!(!arena.overwrite_bytes(piece.slab, 0, &[0; 10]));
    assert_eq!(verify(arena), 1);
}

#[test]
fn free_slabs_of_a_spilled_chunk_are_not_leased() {
    let f = Fixture::new(1, 1);
    let arena = f.arena();
    let mut lease = arena.lease_slab(Class::Small).unwrap();
    let piece = append(arena, &mut lease, 1, 0, 1000).unwrap();
    arena.seal_slab(lease);
    arena.spill_oldest(&|_| ()).unwrap();
    let fresh = arena.lease_slab(Class::Small).expect("memory is free");
    assert_ne!(fresh.slab().chunk, piece.slab.chunk);
    arena.seal_slab(fresh);
    arena.retire_bytes(piece, 1000, true);
    assert_eq!(arena.spill_figures().unwrap().used_bytes, 0);
    assert_eq!(arena.memory_used(), 0);
}

#[test]
fn without_a_spill_file_nothing_moves() {
    let f = Fixture::new(2, 0);
    chunk_of(f.arena(), 1);
    assert_eq!(f.arena().spill_oldest(&|_| ()), Ok(Spilled::Nothing));
    assert_eq!(f.arena().spill_figures(), None);
    assert!(!f.spill().exists());
}

#[test]
fn pressure_is_told_above_the_threshold_only() {
    use std::sync::Arc;
    let f = Fixture::new(4, 4);
    let told = Arc::new(AtomicBool::new(false));
    let tell = Arc::clone(&told);
    f.arena()
        .on_pressure(2, move || tell.store(true, Ordering::Relaxed));
    chunk_of(f.arena(), 1);
    chunk_of(f.arena(), 2);
    assert!(!told.load(Ordering::Relaxed));
    chunk_of(f.arena(), 3);
    assert!(told.load(Ordering::Relaxed));
}

/// Random leases, appends, retirements, moves and attaches, against the set of what is live.
#[test]
fn random_operations_agree_with_a_model() {
    let seed: u64 = std::env::var("FIRN_SEED")
        .map_or_else(|_| rand::random(), |s| s.parse().expect("a number"));
    println!("FIRN_SEED={seed}");
    for round in 0..30 {
        let mut rng = StdRng::seed_from_u64(seed ^ round);
        random_run(&mut rng);
    }
}

fn random_run(rng: &mut StdRng) {
    let mut f = Fixture::new(rng.random_range(1..6), rng.random_range(0..6));
    let mut leases: Vec<Lease> = Vec::new();
    let mut live: BTreeMap<PieceRef, (u64, u64)> = BTreeMap::new();
    let mut file = 0;
    for _ in 0..400 {
        let arena = f.arena();
        match rng.random_range(0..20) {
            0..4 => {
                leases.extend(arena.lease_slab(
                    [Class::Small, Class::Medium, Class::Whole][rng.random_range(0..3)],
                ))
            }
            4..12 if !leases.is_empty() => {
                let at = rng.random_range(0..leases.len());
                let offset = rng.random_range(0..1 << 30);
                let len = rng.random_range(1..20_000);
                file += 1;
                if let Some(piece) = append(arena, &mut leases[at], file, offset, len) {
                    live.insert(piece, (file, len));
                }
            }
            12..14 if !leases.is_empty() => {
                arena.seal_slab(leases.swap_remove(rng.random_range(0..leases.len())))
            }
            14..16 if !live.is_empty() => {
                let piece = *live
                    .keys()
                    .nth(rng.random_range(0..live.len()))
                    .expect("in range");
                let (_, len) = live.remove(&piece).expect("just seen");
                arena.retire_bytes(piece, len as u32, true);
            }
            16..19 => {
                arena.spill_oldest(&|_| ()).expect("the device is well");
            }
            19 if rng.random_bool(0.3) => {
                leases.clear();
                let (pieces, damage) = f.again(|_| {});
                assert_eq!(damage, []);
                assert_eq!(pieces.len(), live.len());
            }
            _ => {}
        }
        assert_eq!(verify(f.arena()), live.len());
    }
    for lease in leases {
        f.arena().seal_slab(lease);
    }
    for (piece, (_, len)) in live {
        f.arena().retire_bytes(piece, len as u32, true);
    }
    assert_eq!((f.arena().used_bytes(), f.arena().memory_used()), (0, 0));
    assert_eq!(
        f.arena()
            .spill_figures()
            .map_or(0, |figures| figures.used_bytes),
        0
    );
    let count = f.arena().geometry().chunk_count;
    let all: Vec<Lease> = std::iter::from_fn(|| f.arena().lease_slab(Class::Whole)).collect();
    assert_eq!(all.len(), count as usize, "all memory can be leased again");
    all.into_iter().for_each(|lease| f.arena().seal_slab(lease));
}

#[test]
fn readers_see_the_same_bytes_while_chunks_move_and_memory_is_used_again() {
    let f = Fixture::new(4, 12);
    let arena = f.arena();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for reader in 0..2 {
            let done = &done;
            threads.push(scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(reader);
                while !done.load(Ordering::Acquire) {
                    let (stored, _) = arena.read_pieces();
                    for found in stored.iter().filter(|_| rng.random_bool(0.5)) {
                        let Piece {
                            file,
                            offset,
                            len,
                            position,
                            ..
                        } = found.piece;
                        arena.pin_slab(found.at.slab);
                        let mut bytes = vec![0; len as usize];
                        arena
                            .copy_out(found.at.slab, position, &mut bytes)
                            .expect("readable");
                        assert!(bytes == bytes_of(file, offset, u64::from(len)), "{found:?}");
                        arena.unpin_slab(found.at.slab);
                    }
                }
            }));
        }
        let done = &done;
        threads.push(scope.spawn(move || {
            // Nothing is retired, so that a reader never holds a piece of a chunk that was freed.
            for file in 1..=14 {
                while !arena.has_room(Class::Whole) {
                    arena.spill_oldest(&|_| ()).expect("the device is well");
                }
                chunk_of(arena, file);
            }
            done.store(true, Ordering::Release);
        }));
        for thread in threads {
            thread.join().expect("no assertion failed");
        }
    });
    assert_eq!(verify(arena), 14);
}

// ---- crashes ---------------------------------------------------------------------------------

#[cfg(feature = "probe")]
#[test]
fn a_crash_at_any_store_of_a_move_leaves_the_chunk_in_one_place() {
    use std::cell::Cell;
    use std::rc::Rc;
    for stop in 0.. {
        let mut f = Fixture::new(2, 1);
        let piece = chunk_of(f.arena(), 1);
        chunk_of(f.arena(), 2);
        let steps = Rc::new(Cell::new(0));
        let count = Rc::clone(&steps);
        let path = f.path();
        let spill = f.spill();
        firn_arena::set_probe(Some(Box::new(move || {
            if count.get() == stop {
                std::fs::copy(&path, path.with_extension("crashed")).expect("copied");
                std::fs::copy(&spill, spill.with_extension("crashed")).expect("copied");
            }
            count.set(count.get() + 1);
        })));
        f.arena().spill_oldest(&|_| ()).expect("the device is well");
        // The slot of memory is used by others at once.
        chunk_of(f.arena(), 3);
        f.arena().retire_bytes(piece, CHUNK as u32, true);
        firn_arena::set_probe(None);
        if stop >= steps.get() {
            assert!(stop > 5, "the probe sees the stores");
            return;
        }
        let (pieces, damage) = f.again(|f| {
            for file in [f.path(), f.spill()] {
                std::fs::rename(file.with_extension("crashed"), file).expect("put back");
            }
        });
        assert_eq!(damage, [], "step {stop}");
        let files: Vec<u64> = pieces
            .iter()
            .map(|p| p.file)
            .filter(|file| *file == 2)
            .collect();
        assert_eq!(files, [2], "step {stop}");
        verify(f.arena());
        let held = f.arena().read_pieces().0.len() as u32;
        let spilled = f.arena().spill_figures().unwrap().used_bytes / CHUNK;
        assert_eq!(
            f.arena().memory_used() + spilled as u32,
            held,
            "step {stop}: one slot a chunk"
        );
    }
}

// ---- damage ----------------------------------------------------------------------------------

/// One chunk in the spill file, one in memory.
fn half_spilled() -> Fixture {
    let f = Fixture::new(2, 2);
    chunk_of(f.arena(), 1);
    f.arena().spill_oldest(&|_| ()).unwrap();
    chunk_of(f.arena(), 2);
    f
}

/// The pieces that can be read, and that the others are an error.
fn readable(arena: &Arena) -> Vec<u64> {
    let mut files = Vec::new();
    for found in arena.read_pieces().0 {
        let mut bytes = vec![0; found.piece.len as usize];
        if arena
            .copy_out(found.at.slab, found.piece.position, &mut bytes)
            .is_ok()
        {
            assert!(bytes == bytes_of(found.piece.file, found.piece.offset, bytes.len() as u64));
            files.push(found.piece.file);
        }
    }
    files.sort_unstable();
    files
}

#[test]
fn a_missing_spill_file_is_named_and_the_rest_is_kept() {
    let mut f = half_spilled();
    let aside = f.spill().with_extension("aside");
    let (pieces, damage) = f.again(|f| std::fs::rename(f.spill(), &aside).unwrap());
    assert_eq!(pieces.len(), 2, "nothing is dropped");
    assert!(
        matches!(&damage[..], [Damage::Spill { pieces: 1, bytes: CHUNK, why, .. }] if why.contains("cannot open it")),
        "{damage:?}"
    );
    assert!(matches!(
        f.arena().spill_fault(),
        Some(SpillFault::Io {
            source: Errno::NOENT,
            ..
        })
    ));
    assert_eq!(readable(f.arena()), [2]);
    assert!(!f.arena().can_spill());
    assert_eq!(f.arena().spill_oldest(&|_| ()), Ok(Spilled::Nothing));
    let (_, damage) = f.again(|f| std::fs::rename(&aside, f.spill()).unwrap());
    assert_eq!(damage, [], "the device is back");
    assert_eq!(readable(f.arena()), [1, 2]);
}

#[test]
fn a_truncated_spill_file_gives_what_it_still_has() {
    let mut f = Fixture::new(1, 2);
    for file in 1..=2 {
        chunk_of(f.arena(), file);
        f.arena().spill_oldest(&|_| ()).unwrap();
    }
    let (_, damage) = f.again(|f| {
        let file = std::fs::File::options()
            .write(true)
            .open(f.spill())
            .unwrap();
        file.set_len(SPILL_DATA_OFFSET + CHUNK + 100).unwrap();
    });
    assert!(
        matches!(&damage[..], [Damage::Spill { slot: 1, .. }]),
        "{damage:?}"
    );
    assert_eq!(readable(f.arena()), [1]);
}

#[test]
fn a_foreign_spill_file_is_neither_read_nor_written() {
    let mut f = half_spilled();
    let other = half_spilled();
    let before = std::fs::read(other.spill()).unwrap();
    let (_, damage) = f.again(|f| {
        std::fs::remove_file(f.spill()).unwrap();
        std::fs::copy(other.spill(), f.spill()).unwrap();
    });
    assert!(
        matches!(&damage[..], [Damage::Spill { why, .. }] if why.contains("another arena")),
        "{damage:?}"
    );
    assert_eq!(readable(f.arena()), [2]);
    chunk_of(f.arena(), 3);
    f.arena().spill_oldest(&|_| ()).unwrap();
    assert!(std::fs::read(f.spill()).unwrap() == before);
    let report = check(&f.path()).unwrap();
    assert!(matches!(
        report.spill_fault,
        Some(SpillFault::Foreign { .. })
    ));
}

#[test]
fn every_flipped_bit_of_a_home_is_found() {
    let mut f = half_spilled();
    let table = f.arena().geometry().table_offset(0);
    for bit in 0..64 {
        let flip = |f: &Fixture| {
            use std::os::unix::fs::FileExt;
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .open(f.path())
                .unwrap();
            let at = table + chunk_word::HOME + bit / 8;
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], at).unwrap();
        };
        flip(&f);
        let report = check(&f.path()).unwrap();
        assert!(
            matches!(report.damage[..], [Damage::Home { chunk: 0, .. }]),
            "{:?}",
            report.damage
        );
        let (pieces, damage) = f.again(|_| {});
        assert_eq!((pieces.len(), damage.len()), (2, 1));
        assert_eq!(readable(f.arena()).len(), 1);
        f.arena = None;
        flip(&f);
        f.again(|_| {});
    }
}

#[test]
fn two_chunks_never_share_a_slot() {
    let mut f = half_spilled();
    let g = *f.arena().geometry();
    let (_, damage) = f.again(|f| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(f.path()).unwrap();
        for chunk in 0..2 {
            let word = Home::Memory(0).to_word(chunk).to_le_bytes();
            file.write_all_at(&word, g.table_offset(chunk) + chunk_word::HOME)
                .unwrap();
        }
    });
    assert!(
        matches!(damage[..], [Damage::Home { .. }, Damage::Home { .. }]),
        "{damage:?}"
    );
    assert_eq!(readable(f.arena()), Vec::<u64>::new());
}

// ---- creation --------------------------------------------------------------------------------

#[test]
fn only_a_spill_file_whose_arena_is_gone_is_replaced() {
    let mut f = half_spilled();
    let geometry = *f.arena().geometry();
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 2,
    };
    let make = |f: &Fixture| {
        Arena::create_with_spill(&other.path().join("arena"), geometry, &identity, &f.spill())
            .map(drop)
    };
    f.arena = None;
    let taken = make(&f).unwrap_err();
    assert!(
        matches!(taken, ArenaError::Spill(SpillFault::Taken { .. })),
        "{taken}"
    );
    assert!(!other.path().join("arena").exists());
    f.again(|_| {});
    assert_eq!(verify(f.arena()), 2, "it was not touched");
    f.arena = None;
    std::fs::remove_file(f.path()).unwrap();
    make(&f).expect("its arena is gone");
    std::fs::remove_file(other.path().join("arena")).unwrap();
    std::fs::write(f.spill(), "somebody's file").unwrap();
    let error = make(&f).unwrap_err();
    assert!(
        matches!(error, ArenaError::Spill(SpillFault::NotSpill { .. })),
        "{error}"
    );
    assert_eq!(std::fs::read(f.spill()).unwrap(), b"somebody's file");
}
