//! Tests of the arena through its file.
//!
//! What was published is found by a new attach, damage is reported, and a reader of the tables never sees a piece before
//! its bytes.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use firn_arena::{Arena, ArenaError, Damage, Identity, Lease, PieceRef, check};
use firn_format::geometry::Geometry;
use firn_format::piece::word;
use firn_format::slab::{Class, chunk_word, slab_word};
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn identity() -> Identity {
    Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 2,
    }
}

/// Returns a new arena without a spill file, its path and its directory.
fn new_arena(chunks: u64, chunk_bytes: u64) -> (tempfile::TempDir, PathBuf, Arena) {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let path = dir.path().join("arena");
    let geometry = Geometry::new(chunks * chunk_bytes, chunk_bytes).expect("a valid geometry");
    let arena = Arena::create(&path, geometry, &identity()).expect("created");
    (dir, path, arena)
}

/// Publishes `data` as a new piece, or as more of the last piece if it continues that. `None` means that the slab is
/// full.
fn append(
    arena: &Arena,
    lease: &mut Lease,
    file: u64,
    offset: u64,
    data: &[u8],
) -> Option<PieceRef> {
    let reserved = lease.reserve(file, offset, data.len() as u64)?;
    assert_eq!(
        reserved.len as usize,
        data.len(),
        "the test stays within a slab"
    );
    arena.fill_slab(lease.slab(), reserved.position, data);
    if lease.continues(file, offset, reserved) {
        return Some(arena.extend_piece(lease, reserved.len, 0).0);
    }
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

/// Proves S-write-1.
#[test]
fn published_pieces_outlive_the_process_that_wrote_them() {
    let (_dir, path, arena) = new_arena(4, 1 << 20);
    let mut lease = arena.lease_slab(Class::Medium).unwrap();
    append(&arena, &mut lease, 7, 100, b"hello ").unwrap();
    append(&arena, &mut lease, 7, 106, b"world").unwrap();
    append(&arena, &mut lease, 8, 5000, &[3; 9000]).unwrap();
    // The writer died: its lease is not sealed.
    let _ = lease;
    drop(arena);
    let (arena, stored, damage) = Arena::attach(&path).unwrap();
    assert_eq!(damage, []);
    let pieces: Vec<_> = stored
        .iter()
        .map(|stored| (stored.piece.file, stored.piece.offset, stored.piece.len))
        .collect();
    assert_eq!(pieces, [(7, 100, 11), (8, 5000, 9000)]);
    let mut text = [0; 11];
    arena
        .copy_out(stored[0].record.slab, stored[0].piece.position, &mut text)
        .unwrap();
    assert_eq!(&text, b"hello world");
    assert_eq!(u64::from(stored[1].piece.position) % 4096, 5000 % 4096);
    assert!(arena.next_sequence() > stored[1].piece.sequence);
}

#[test]
fn room_comes_back_when_the_last_byte_is_retired_and_the_lease_sealed() {
    let (_dir, _path, arena) = new_arena(1, 1 << 20);
    let mut lease = arena.lease_slab(Class::Whole).unwrap();
    assert!(arena.lease_slab(Class::Whole).is_none());
    let piece = append(&arena, &mut lease, 1, 0, &[1; 100]).unwrap();
    arena.retire_bytes(piece, 40, false);
    arena.retire_bytes(piece, 60, true);
    assert!(
        arena.lease_slab(Class::Small).is_none(),
        "the lease still holds the slab"
    );
    arena.seal_slab(lease);
    assert_eq!(arena.used_bytes(), 0);
    let again = arena.lease_slab(Class::Small).unwrap();
    arena.seal_slab(again);
}

#[test]
fn a_lease_falls_back_to_a_smaller_class() {
    let (_dir, _path, arena) = new_arena(2, 1 << 20);
    let small = arena.lease_slab(Class::Small).unwrap();
    let whole = arena.lease_slab(Class::Whole).unwrap();
    assert_eq!((small.class(), whole.class()), (Class::Small, Class::Whole));
    let fallen = arena.lease_slab(Class::Whole).unwrap();
    assert_eq!(fallen.class(), Class::Small);
    for lease in [small, whole, fallen] {
        arena.seal_slab(lease);
    }
}

#[test]
fn records_of_an_earlier_lease_do_not_come_back() {
    let (_dir, path, arena) = new_arena(1, 64 << 10);
    let mut lease = arena.lease_slab(Class::Whole).unwrap();
    for n in 0..13 {
        let piece = append(&arena, &mut lease, 1, n * 8192, &[1; 10]).unwrap();
        arena.retire_bytes(piece, 10, true);
    }
    assert!(lease.reserve(1, 1 << 30, 1).is_none(), "the table is full");
    arena.seal_slab(lease);
    let mut lease = arena.lease_slab(Class::Whole).unwrap();
    append(&arena, &mut lease, 2, 0, b"new").unwrap();
    // The writer died: its lease is not sealed.
    let _ = lease;
    drop(arena);
    let (_arena, stored, damage) = Arena::attach(&path).unwrap();
    assert_eq!(damage, []);
    assert_eq!(
        stored
            .iter()
            .map(|stored| stored.piece.file)
            .collect::<Vec<_>>(),
        [2]
    );
}

/// Flips bit `bit` after byte `offset` of a file.
fn flip_bit(path: &Path, offset: u64, bit: u32) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset + u64::from(bit / 8))
        .unwrap();
    byte[0] ^= 1 << (bit % 8);
    file.write_all_at(&byte, offset + u64::from(bit / 8))
        .unwrap();
}

/// Proves S-crash-8.
#[test]
fn flipped_bits_are_named_and_what_is_whole_is_kept() {
    let (_dir, path, arena) = new_arena(2, 64 << 10);
    let mut lease = arena.lease_slab(Class::Whole).unwrap();
    let first = append(&arena, &mut lease, 1, 0, b"first").unwrap();
    append(&arena, &mut lease, 1, 9000, b"second").unwrap();
    // The writer died: its lease is not sealed.
    let _ = lease;
    let geometry = *arena.geometry();
    drop(arena);
    let record = geometry.record_offset(first.slab.chunk, first.record);
    let header = geometry.slab_header_offset(first.slab.chunk, 0);
    let class = geometry.table_offset(first.slab.chunk) + chunk_word::CLASS;
    type IsExpected = fn(&Damage) -> bool;
    let cases: [(u64, usize, IsExpected); 5] = [
        (record + word::OFFSET, 1, |damage| {
            matches!(damage, Damage::Piece { .. })
        }),
        (record + word::SEAL, 1, |damage| {
            matches!(damage, Damage::Piece { .. })
        }),
        (header + slab_word::STATE, 2, |damage| {
            matches!(damage, Damage::SlabState { .. })
        }),
        (header + slab_word::PUBLISHED + 3, 2, |damage| {
            matches!(damage, Damage::PublishCounter { .. })
        }),
        (class, 0, |damage| {
            matches!(damage, Damage::ClassWord { .. })
        }),
    ];
    for (offset, kept, expected) in cases {
        flip_bit(&path, offset, 4);
        let report = check(&path).unwrap();
        assert_eq!(report.pieces.len(), kept, "byte {offset}");
        assert!(
            report.damage.iter().any(expected),
            "byte {offset}: {:?}",
            report.damage
        );
        flip_bit(&path, offset, 4);
    }
    assert_eq!(check(&path).unwrap().damage, []);
    flip_bit(&path, 40, 0);
    assert!(matches!(check(&path), Err(ArenaError::Format { .. })));
}

#[test]
fn a_truncated_or_foreign_file_is_refused() {
    let (_dir, path, arena) = new_arena(1, 64 << 10);
    drop(arena);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    for size in [len - 1, 5000, 4095, 100, 0] {
        file.set_len(size).unwrap();
        assert!(
            matches!(Arena::attach(&path), Err(ArenaError::Format { .. })),
            "{size} bytes"
        );
    }
    std::fs::write(&path, vec![b'x'; 8192]).unwrap();
    assert!(
        Arena::attach(&path)
            .err()
            .unwrap()
            .to_string()
            .contains("not a firn arena")
    );
}

#[test]
fn an_arena_larger_than_its_file_system_is_refused_and_leaves_nothing() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = dir.path().join("arena");
    let geometry = Geometry::new(1 << 50, 1 << 30).unwrap();
    let error = Arena::create(&path, geometry, &identity()).err().unwrap();
    assert!(matches!(error, ArenaError::NoRoom { .. }), "{error}");
    assert!(error.to_string().contains("arena-size"));
    assert!(!path.exists());
}

/// Writers lease, fill, publish and extend until the arena is full, while a reader reads the tables and the bytes of
/// every live piece. Each byte is computed from its file and offset, so the reader would notice a torn or early
/// publish. `cargo xtask campaign tsan` runs this test with ThreadSanitizer.
#[test]
fn a_reader_never_sees_a_piece_before_its_bytes() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let (_dir, _path, arena) = new_arena(32, 256 << 10);
    let writing = AtomicU32::new(3);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for file in 1..=3u64 {
            let arena = &arena;
            let writing = &writing;
            let mut rng = StdRng::seed_from_u64(seed ^ file);
            threads.push(scope.spawn(move || {
                let mut offset = 0u64;
                while let Some(mut lease) =
                    arena.lease_slab([Class::Small, Class::Medium][rng.random_range(0..2)])
                {
                    fill_lease(arena, &mut lease, file, &mut offset, &mut rng);
                    arena.seal_slab(lease);
                }
                writing.fetch_sub(1, Ordering::AcqRel);
            }));
        }
        let arena = &arena;
        let writing = &writing;
        threads.push(scope.spawn(move || {
            while writing.load(Ordering::Acquire) > 0 {
                verify_all(arena);
            }
        }));
        join(threads);
    });
    assert!(verify_all(&arena) > 0);
}

/// Joins the threads. The scope would wait for them as well, but in a way that ThreadSanitizer does not see.
fn join(threads: Vec<std::thread::ScopedJoinHandle<()>>) {
    for thread in threads {
        thread.join().expect("no assertion failed");
    }
}

/// Returns the byte that tests write at `offset` of `file`.
fn byte_of(file: u64, offset: u64) -> u8 {
    (file.wrapping_mul(31) ^ offset.wrapping_mul(7)) as u8
}

/// Publishes pieces of random lengths until the slab is full.
fn fill_lease(arena: &Arena, lease: &mut Lease, file: u64, offset: &mut u64, rng: &mut StdRng) {
    loop {
        let len = rng.random_range(1..3000u64);
        let Some(reserved) = lease
            .reserve(file, *offset, len)
            .filter(|room| u64::from(room.len) == len)
        else {
            return;
        };
        let data: Vec<u8> = (*offset..*offset + len)
            .map(|offset| byte_of(file, offset))
            .collect();
        arena.fill_slab(lease.slab(), reserved.position, &data);
        if lease.continues(file, *offset, reserved) {
            arena.extend_piece(lease, reserved.len, 0);
        } else {
            let sequence = arena.next_sequence();
            arena.publish_piece(
                lease,
                reserved,
                firn_arena::NewPiece {
                    file_id: file,
                    offset: *offset,
                    sequence,
                    modified: 0,
                },
            );
        }
        *offset += len + u64::from(rng.random_bool(0.1)) * 100;
    }
}

/// Asserts that each live piece has its bytes. Returns the number of pieces.
fn verify_all(arena: &Arena) -> usize {
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
            .unwrap();
        for (index, byte) in bytes.into_iter().enumerate() {
            assert_eq!(
                byte,
                byte_of(
                    stored_piece.piece.file,
                    stored_piece.piece.offset + index as u64
                ),
                "{stored_piece:?} byte {index}"
            );
        }
    }
    stored.len()
}

/// Slabs are leased, retired and leased again while a reader reads the tables. The reader never takes a record of one lease
/// for a record of another.
#[test]
fn reuse_under_a_reader_is_never_mistaken_for_damage() {
    let (_dir, _path, arena) = new_arena(2, 64 << 10);
    let writing = AtomicU32::new(2);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for file in 1..=2u64 {
            let arena = &arena;
            let writing = &writing;
            threads.push(scope.spawn(move || {
                for round in 0..3000u64 {
                    let Some(mut lease) = arena.lease_slab(Class::Small) else {
                        continue;
                    };
                    let pieces: Vec<PieceRef> = (0..5)
                        .filter_map(|n| append(arena, &mut lease, file, round + n * 5000, &[1; 9]))
                        .collect();
                    pieces
                        .into_iter()
                        .for_each(|piece| arena.retire_bytes(piece, 9, true));
                    arena.seal_slab(lease);
                }
                writing.fetch_sub(1, Ordering::AcqRel);
            }));
        }
        let arena = &arena;
        let writing = &writing;
        threads.push(scope.spawn(move || {
            while writing.load(Ordering::Acquire) > 0 {
                let (stored, damage) = arena.read_pieces();
                assert_eq!(damage, []);
                assert!(
                    stored
                        .iter()
                        .all(|stored| (1..=2).contains(&stored.piece.file))
                );
            }
        }));
        join(threads);
    });
    assert_eq!(arena.used_bytes(), 0);
}

/// A free chunk is cut into slabs of another class while a reader reads its table. The records of that class lie elsewhere in
/// the table.
#[test]
fn regression_a_chunk_cut_anew_under_a_reader_is_never_mistaken_for_damage() {
    let (_dir, _path, arena) = new_arena(1, 1 << 20);
    let writing = AtomicU32::new(1);
    std::thread::scope(|scope| {
        let arena = &arena;
        let writing = &writing;
        let writer = scope.spawn(move || {
            for round in 0..6000u64 {
                let class = [Class::Small, Class::Medium, Class::Whole][round as usize % 3];
                let mut leases: Vec<Lease> =
                    (0..2).filter_map(|_| arena.lease_slab(class)).collect();
                for (file, lease) in leases.iter_mut().enumerate() {
                    let pieces: Vec<PieceRef> = (0..9)
                        .filter_map(|n| append(arena, lease, file as u64 + 1, n * 100, &[1; 9]))
                        .collect();
                    pieces
                        .into_iter()
                        .for_each(|piece| arena.retire_bytes(piece, 9, true));
                }
                leases.into_iter().for_each(|lease| arena.seal_slab(lease));
            }
            writing.store(0, Ordering::Release);
        });
        let reader = scope.spawn(move || {
            while writing.load(Ordering::Acquire) > 0 {
                assert_eq!(arena.read_pieces().1, []);
            }
        });
        join(vec![writer, reader]);
    });
    assert_eq!(arena.used_bytes(), 0);
}
