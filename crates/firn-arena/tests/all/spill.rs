//! Tests of chunks that move to the spill file.
//!
//! * Their bytes can be read there, also after a crash at any store of the move.
//! * Their slots of memory are used again.
//! * A fault of the device is an error, and never gives other bytes.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use firn_arena::{
    Arena, ArenaError, Damage, Identity, Lease, PieceBytes, PieceRef, SpillFault, SpillOutcome,
    check,
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

    /// Detaches as if all processes had died, calls `change`, which may change the files, and attaches again.
    fn reattach(&mut self, change: impl FnOnce(&Self)) -> (Vec<Piece>, Vec<Damage>) {
        self.arena = None;
        change(self);
        let (arena, stored, damage) = Arena::attach(&self.path()).expect("attached");
        for kept in &stored {
            arena.keep_piece(kept.record, kept.piece.len);
        }
        arena.free_unkept_slabs(&stored);
        self.arena = Some(arena);
        (stored.iter().map(|stored| stored.piece).collect(), damage)
    }
}

/// Returns the byte that each test writes at `offset` of `file`.
fn byte_of(file: u64, offset: u64) -> u8 {
    (file.wrapping_mul(37) ^ offset.wrapping_mul(11) ^ (offset >> 8)) as u8
}

fn bytes_of(file: u64, offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len)
        .map(|offset| byte_of(file, offset))
        .collect()
}

/// Publishes `len` bytes of a file as a new piece; `None` if the slab has too little room.
fn append(arena: &Arena, lease: &mut Lease, file: u64, offset: u64, len: u64) -> Option<PieceRef> {
    let reserved = lease
        .reserve(file, offset, len)
        .filter(|room| u64::from(room.len) == len)?;
    arena.fill_slab(
        lease.slab(),
        reserved.position,
        &bytes_of(file, offset, len),
    );
    let sequence = arena.next_sequence();
    Some(arena.publish_piece(
        lease,
        reserved,
        firn_arena::NewPiece {
            file_id: file,
            offset,
            sequence,
            modified: 0,
        },
    ))
}

/// Fills a whole chunk with bytes of one file, seals it, and returns its piece.
fn fill_chunk(arena: &Arena, file: u64) -> PieceRef {
    let mut lease = arena.lease_slab(Class::Whole).expect("room");
    assert_eq!(lease.class(), Class::Whole);
    let piece = append(arena, &mut lease, file, 0, CHUNK).expect("a chunk of room");
    arena.seal_slab(lease);
    piece
}

/// Asserts that each piece in the tables has its bytes. Returns the number of pieces.
fn verify(arena: &Arena) -> usize {
    let (stored, damage) = arena.read_pieces();
    assert_eq!(damage, []);
    for stored_piece in &stored {
        let mut bytes = vec![0; stored_piece.piece.len as usize];
        arena
            .copy_out(
                stored_piece.record.slab,
                stored_piece.piece.position,
                &mut bytes,
            )
            .expect("readable");
        let Piece {
            file, offset, len, ..
        } = stored_piece.piece;
        assert!(
            bytes == bytes_of(file, offset, u64::from(len)),
            "{stored_piece:?}"
        );
    }
    stored.len()
}

#[test]
fn a_spilled_chunk_reads_the_same_and_gives_its_memory_back() {
    let mut fixture = Fixture::new(2, 3);
    let arena = fixture.arena();
    let first = fill_chunk(arena, 1);
    let second = fill_chunk(arena, 2);
    assert!(arena.lease_slab(Class::Small).is_none(), "memory is full");
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(SpillOutcome::Chunk(first.slab.chunk))
    );
    assert!(arena.is_spilled(first.slab.chunk) && !arena.is_spilled(second.slab.chunk));
    assert!(
        matches!(arena.find_bytes(first.slab, 0, 1), PieceBytes::Spill(_, at) if at == SPILL_DATA_OFFSET)
    );
    assert!(matches!(
        arena.find_bytes(second.slab, 0, 1),
        PieceBytes::Memory(_)
    ));
    assert_eq!(arena.used_bytes(), CHUNK);
    fill_chunk(arena, 3);
    assert_eq!(verify(arena), 3);
    assert_eq!(arena.sync_spill(), Ok(()));
    let (pieces, damage) = fixture.reattach(|_| {});
    assert_eq!((pieces.len(), damage), (3, vec![]));
    assert_eq!(verify(fixture.arena()), 3);
    assert_eq!(fixture.arena().spill_figures().unwrap().used_bytes, CHUNK);
}

#[test]
fn slots_of_the_spill_file_are_bounded_and_used_again() {
    let fixture = Fixture::new(1, 2);
    let arena = fixture.arena();
    let mut spilled = Vec::new();
    for file in 1..=2 {
        spilled.push(fill_chunk(arena, file));
        assert!(matches!(
            arena.spill_oldest(&|_| ()),
            Ok(SpillOutcome::Chunk(_))
        ));
    }
    let held = fill_chunk(arena, 3);
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(SpillOutcome::Nothing),
        "both slots are in use"
    );
    assert!(!arena.can_spill());
    for round in 4..40 {
        let Some(Home::Spill(slot)) = arena.home(spilled[0].slab.chunk) else {
            panic!("spilled")
        };
        arena.retire_bytes(spilled.remove(0), CHUNK as u32, true);
        let Ok(SpillOutcome::Chunk(chunk)) = arena.spill_oldest(&|_| ()) else {
            panic!("a slot is free")
        };
        assert_eq!(arena.home(chunk), Some(Home::Spill(slot)));
        spilled.push(PieceRef {
            slab: firn_arena::SlabRef { chunk, slab: 0 },
            record: held.record,
        });
        fill_chunk(arena, round);
        assert_eq!(verify(arena), 3);
    }
    assert_eq!(
        std::fs::metadata(fixture.spill()).unwrap().len(),
        SPILL_DATA_OFFSET + 2 * CHUNK
    );
}

#[test]
fn the_oldest_sealed_chunk_moves_first_and_a_leased_or_pinned_one_stays() {
    let fixture = Fixture::new(4, 4);
    let arena = fixture.arena();
    let lease = arena.lease_slab(Class::Whole).unwrap();
    let pieces = [
        fill_chunk(arena, 1),
        fill_chunk(arena, 2),
        fill_chunk(arena, 3),
    ];
    arena.pin_slab(pieces[0].slab);
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(SpillOutcome::Chunk(pieces[1].slab.chunk))
    );
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(SpillOutcome::Chunk(pieces[2].slab.chunk))
    );
    assert_eq!(arena.spill_oldest(&|_| ()), Ok(SpillOutcome::Nothing));
    arena.unpin_slab(pieces[0].slab);
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(SpillOutcome::Chunk(pieces[0].slab.chunk))
    );
    assert_eq!(
        arena.spill_oldest(&|_| ()),
        Ok(SpillOutcome::Nothing),
        "the rest is leased"
    );
    arena.seal_slab(lease);
}

#[test]
fn after_attach_the_chunk_that_was_written_longest_ago_moves_first() {
    let mut fixture = Fixture::new(3, 3);
    let order: Vec<u32> = (1..=3)
        .map(|file| fill_chunk(fixture.arena(), file).slab.chunk)
        .collect();
    fixture.reattach(|_| {});
    for chunk in order {
        assert_eq!(
            fixture.arena().spill_oldest(&|_| ()),
            Ok(SpillOutcome::Chunk(chunk))
        );
    }
}

#[test]
fn bytes_change_in_place_in_memory_only() {
    let fixture = Fixture::new(1, 1);
    let arena = fixture.arena();
    let piece = fill_chunk(arena, 1);
    assert!(arena.overwrite_bytes(piece.slab, 0, &bytes_of(1, 0, 10)));
    arena.spill_oldest(&|_| ()).unwrap();
    assert!(!arena.overwrite_bytes(piece.slab, 0, &[0; 10]));
    assert_eq!(verify(arena), 1);
}

#[test]
fn free_slabs_of_a_spilled_chunk_are_not_leased() {
    let fixture = Fixture::new(1, 1);
    let arena = fixture.arena();
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
    let fixture = Fixture::new(2, 0);
    fill_chunk(fixture.arena(), 1);
    assert_eq!(
        fixture.arena().spill_oldest(&|_| ()),
        Ok(SpillOutcome::Nothing)
    );
    assert_eq!(fixture.arena().spill_figures(), None);
    assert!(!fixture.spill().exists());
}

#[test]
fn pressure_is_told_above_the_threshold_only() {
    use std::sync::Arc;
    let fixture = Fixture::new(4, 4);
    let told = Arc::new(AtomicBool::new(false));
    let tell = Arc::clone(&told);
    fixture
        .arena()
        .on_pressure(2, move || tell.store(true, Ordering::Relaxed));
    fill_chunk(fixture.arena(), 1);
    fill_chunk(fixture.arena(), 2);
    assert!(!told.load(Ordering::Relaxed));
    fill_chunk(fixture.arena(), 3);
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
    let mut fixture = Fixture::new(rng.random_range(1..6), rng.random_range(0..6));
    let mut leases: Vec<Lease> = Vec::new();
    let mut live: BTreeMap<PieceRef, (u64, u64)> = BTreeMap::new();
    let mut file = 0;
    for _ in 0..400 {
        let arena = fixture.arena();
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
                let (pieces, damage) = fixture.reattach(|_| {});
                assert_eq!(damage, []);
                assert_eq!(pieces.len(), live.len());
            }
            _ => {}
        }
        assert_eq!(verify(fixture.arena()), live.len());
    }
    for lease in leases {
        fixture.arena().seal_slab(lease);
    }
    for (piece, (_, len)) in live {
        fixture.arena().retire_bytes(piece, len as u32, true);
    }
    assert_eq!(
        (fixture.arena().used_bytes(), fixture.arena().memory_used()),
        (0, 0)
    );
    assert_eq!(
        fixture
            .arena()
            .spill_figures()
            .map_or(0, |figures| figures.used_bytes),
        0
    );
    let count = fixture.arena().geometry().chunk_count;
    let leases_left: Vec<Lease> =
        std::iter::from_fn(|| fixture.arena().lease_slab(Class::Whole)).collect();
    assert_eq!(
        leases_left.len(),
        count as usize,
        "all memory can be leased again"
    );
    leases_left
        .into_iter()
        .for_each(|lease| fixture.arena().seal_slab(lease));
}

#[test]
fn readers_see_the_same_bytes_while_chunks_move_and_memory_is_used_again() {
    let fixture = Fixture::new(4, 12);
    let arena = fixture.arena();
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
                        arena.pin_slab(found.record.slab);
                        let mut bytes = vec![0; len as usize];
                        arena
                            .copy_out(found.record.slab, position, &mut bytes)
                            .expect("readable");
                        assert!(bytes == bytes_of(file, offset, u64::from(len)), "{found:?}");
                        arena.unpin_slab(found.record.slab);
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
                fill_chunk(arena, file);
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
        let mut fixture = Fixture::new(2, 1);
        let piece = fill_chunk(fixture.arena(), 1);
        fill_chunk(fixture.arena(), 2);
        let steps = Rc::new(Cell::new(0));
        let count = Rc::clone(&steps);
        let path = fixture.path();
        let spill = fixture.spill();
        firn_arena::set_probe(Some(Box::new(move || {
            if count.get() == stop {
                std::fs::copy(&path, path.with_extension("crashed")).expect("copied");
                std::fs::copy(&spill, spill.with_extension("crashed")).expect("copied");
            }
            count.set(count.get() + 1);
        })));
        fixture
            .arena()
            .spill_oldest(&|_| ())
            .expect("the device is well");
        // The slot of memory is used by others at once.
        fill_chunk(fixture.arena(), 3);
        fixture.arena().retire_bytes(piece, CHUNK as u32, true);
        firn_arena::set_probe(None);
        if stop >= steps.get() {
            assert!(stop > 5, "the probe sees the stores");
            return;
        }
        let (pieces, damage) = fixture.reattach(|fixture| {
            for file in [fixture.path(), fixture.spill()] {
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
        verify(fixture.arena());
        let held = fixture.arena().read_pieces().0.len() as u32;
        let spilled = fixture.arena().spill_figures().unwrap().used_bytes / CHUNK;
        assert_eq!(
            fixture.arena().memory_used() + spilled as u32,
            held,
            "step {stop}: one slot a chunk"
        );
    }
}

// ---- damage ----------------------------------------------------------------------------------

/// One chunk in the spill file, one in memory.
fn half_spilled() -> Fixture {
    let fixture = Fixture::new(2, 2);
    fill_chunk(fixture.arena(), 1);
    fixture.arena().spill_oldest(&|_| ()).unwrap();
    fill_chunk(fixture.arena(), 2);
    fixture
}

/// Returns the pieces that can be read. Asserts that a read of any other piece is an error.
fn readable(arena: &Arena) -> Vec<u64> {
    let mut files = Vec::new();
    for found in arena.read_pieces().0 {
        let mut bytes = vec![0; found.piece.len as usize];
        if arena
            .copy_out(found.record.slab, found.piece.position, &mut bytes)
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
    let mut fixture = half_spilled();
    let aside = fixture.spill().with_extension("aside");
    let (pieces, damage) =
        fixture.reattach(|fixture| std::fs::rename(fixture.spill(), &aside).unwrap());
    assert_eq!(pieces.len(), 2, "nothing is dropped");
    assert!(
        matches!(&damage[..], [Damage::Spill { pieces: 1, bytes: CHUNK, reason, .. }] if reason.contains("cannot open it")),
        "{damage:?}"
    );
    assert!(matches!(
        fixture.arena().spill_fault(),
        Some(SpillFault::Io {
            source: Errno::NOENT,
            ..
        })
    ));
    assert_eq!(readable(fixture.arena()), [2]);
    assert!(!fixture.arena().can_spill());
    assert_eq!(
        fixture.arena().spill_oldest(&|_| ()),
        Ok(SpillOutcome::Nothing)
    );
    let (_, damage) = fixture.reattach(|fixture| std::fs::rename(&aside, fixture.spill()).unwrap());
    assert_eq!(damage, [], "the device is back");
    assert_eq!(readable(fixture.arena()), [1, 2]);
}

#[test]
fn a_truncated_spill_file_gives_what_it_still_has() {
    let mut fixture = Fixture::new(1, 2);
    for file in 1..=2 {
        fill_chunk(fixture.arena(), file);
        fixture.arena().spill_oldest(&|_| ()).unwrap();
    }
    let (_, damage) = fixture.reattach(|fixture| {
        let file = std::fs::File::options()
            .write(true)
            .open(fixture.spill())
            .unwrap();
        file.set_len(SPILL_DATA_OFFSET + CHUNK + 100).unwrap();
    });
    assert!(
        matches!(&damage[..], [Damage::Spill { slot: 1, .. }]),
        "{damage:?}"
    );
    assert_eq!(readable(fixture.arena()), [1]);
}

#[test]
fn a_foreign_spill_file_is_neither_read_nor_written() {
    let mut fixture = half_spilled();
    let other = half_spilled();
    let before = std::fs::read(other.spill()).unwrap();
    let (_, damage) = fixture.reattach(|fixture| {
        std::fs::remove_file(fixture.spill()).unwrap();
        std::fs::copy(other.spill(), fixture.spill()).unwrap();
    });
    assert!(
        matches!(&damage[..], [Damage::Spill { reason, .. }] if reason.contains("another arena")),
        "{damage:?}"
    );
    assert_eq!(readable(fixture.arena()), [2]);
    fill_chunk(fixture.arena(), 3);
    fixture.arena().spill_oldest(&|_| ()).unwrap();
    assert!(std::fs::read(fixture.spill()).unwrap() == before);
    let report = check(&fixture.path()).unwrap();
    assert!(matches!(
        report.spill_fault,
        Some(SpillFault::Foreign { .. })
    ));
}

#[test]
fn every_flipped_bit_of_a_home_is_found() {
    let mut fixture = half_spilled();
    let table = fixture.arena().geometry().table_offset(0);
    for bit in 0..64 {
        let flip = |fixture: &Fixture| {
            use std::os::unix::fs::FileExt;
            let file = std::fs::File::options()
                .read(true)
                .write(true)
                .open(fixture.path())
                .unwrap();
            let at = table + chunk_word::HOME + bit / 8;
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], at).unwrap();
        };
        flip(&fixture);
        let report = check(&fixture.path()).unwrap();
        assert!(
            matches!(report.damage[..], [Damage::HomeWord { chunk: 0, .. }]),
            "{:?}",
            report.damage
        );
        let (pieces, damage) = fixture.reattach(|_| {});
        assert_eq!((pieces.len(), damage.len()), (2, 1));
        assert_eq!(readable(fixture.arena()).len(), 1);
        fixture.arena = None;
        flip(&fixture);
        fixture.reattach(|_| {});
    }
}

#[test]
fn two_chunks_never_share_a_slot() {
    let mut fixture = half_spilled();
    let geometry = *fixture.arena().geometry();
    let (_, damage) = fixture.reattach(|fixture| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options()
            .write(true)
            .open(fixture.path())
            .unwrap();
        for chunk in 0..2 {
            let word = Home::Memory(0).to_word(chunk).to_le_bytes();
            file.write_all_at(&word, geometry.table_offset(chunk) + chunk_word::HOME)
                .unwrap();
        }
    });
    assert!(
        matches!(
            damage[..],
            [Damage::HomeWord { .. }, Damage::HomeWord { .. }]
        ),
        "{damage:?}"
    );
    assert_eq!(readable(fixture.arena()), Vec::<u64>::new());
}

// ---- creation --------------------------------------------------------------------------------

#[test]
fn only_a_spill_file_whose_arena_is_gone_is_replaced() {
    let mut fixture = half_spilled();
    let geometry = *fixture.arena().geometry();
    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 2,
    };
    let make = |fixture: &Fixture| {
        Arena::create_with_spill(
            &other.path().join("arena"),
            geometry,
            &identity,
            &fixture.spill(),
        )
        .map(drop)
    };
    fixture.arena = None;
    let taken = make(&fixture).unwrap_err();
    assert!(
        matches!(taken, ArenaError::Spill(SpillFault::Taken { .. })),
        "{taken}"
    );
    assert!(!other.path().join("arena").exists());
    fixture.reattach(|_| {});
    assert_eq!(verify(fixture.arena()), 2, "it was not touched");
    fixture.arena = None;
    std::fs::remove_file(fixture.path()).unwrap();
    make(&fixture).expect("its arena is gone");
    std::fs::remove_file(other.path().join("arena")).unwrap();
    std::fs::write(fixture.spill(), "somebody's file").unwrap();
    let error = make(&fixture).unwrap_err();
    assert!(
        matches!(error, ArenaError::Spill(SpillFault::NotSpill { .. })),
        "{error}"
    );
    assert_eq!(std::fs::read(fixture.spill()).unwrap(), b"somebody's file");
}
