//! A small arena file with damage: check and attach say the same, name what is wrong, and neither
//! takes a piece for another.
#![no_main]

use std::cell::RefCell;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use arbitrary::Arbitrary;
use firn_arena::journal::replay;
use firn_arena::{Arena, Damage, Identity, NewPiece, StoredPiece, check};
use firn_format::geometry::Geometry;
use firn_format::slab::Class;
use firn_format::superblock::SUPERBLOCK_BYTES;
use libfuzzer_sys::fuzz_target;

const CHUNK_BYTES: u64 = 64 << 10;

#[derive(Arbitrary, Debug)]
struct Input {
    damage: Vec<(Area, u16, u8)>,
    /// The superblock's checksum is made right again: what stands behind it is tried.
    reseal: bool,
}

#[derive(Arbitrary, Clone, Copy, Debug)]
enum Area {
    Superblock,
    State,
    Journal,
    Table,
}

/// The file, and the bytes before the data as they were made.
struct Sample {
    _dir: tempfile::TempDir,
    path: PathBuf,
    file: std::fs::File,
    head: Vec<u8>,
    geometry: Geometry,
    pieces: Vec<StoredPiece>,
}

thread_local! {
    static SAMPLE: RefCell<Sample> = RefCell::new(sample());
}

fn sample() -> Sample {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("arena");
    let geometry = Geometry::new(CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 2,
    };
    let arena = Arena::create(&path, geometry, &identity).expect("created");
    let mut lease = arena.lease_slab(Class::Small).expect("a slab");
    for n in 0..4 {
        let reserved = lease.reserve(n, n * 10_000, 3000).expect("room");
        arena.fill_slab(lease.slab(), reserved.position, &[n as u8; 3000]);
        let sequence = arena.next_sequence();
        let new = NewPiece {
            file_id: n,
            offset: n * 10_000,
            sequence,
            modified: 0,
        };
        let piece = arena.publish_piece(&mut lease, reserved, new);
        if n == 2 {
            arena.retire_bytes(piece, 3000, true);
        }
    }
    // Its writer died.
    std::mem::forget(lease);
    let (pieces, damage) = arena.read_pieces();
    assert_eq!((pieces.len(), damage.len()), (3, 0));
    drop(arena);
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .expect("open the arena");
    let mut head = vec![0; geometry.table_offset(geometry.chunk_count) as usize];
    file.read_exact_at(&mut head, 0).expect("read the arena");
    Sample {
        _dir: dir,
        path,
        file,
        head,
        geometry,
        pieces,
    }
}

fuzz_target!(|input: Input| SAMPLE.with_borrow(|sample| attempt(sample, &input)));

fn attempt(sample: &Sample, input: &Input) {
    let mut changed = Vec::new();
    for &(area, at, bits) in &input.damage {
        let at = position(&sample.geometry, area, at);
        let mut byte = [0];
        sample
            .file
            .read_exact_at(&mut byte, at)
            .expect("read the arena");
        sample
            .file
            .write_all_at(&[byte[0] ^ bits], at)
            .expect("write the arena");
        changed.push(at & !4095);
    }
    if input.reseal {
        let mut page = [0; SUPERBLOCK_BYTES];
        sample
            .file
            .read_exact_at(&mut page, 0)
            .expect("read the arena");
        let crc = crc32c::crc32c(&page[..SUPERBLOCK_BYTES - 4]);
        sample
            .file
            .write_all_at(&crc.to_le_bytes(), SUPERBLOCK_BYTES as u64 - 4)
            .expect("write the arena");
        changed.push(0);
    }
    compare(sample, input);
    // Attach changes the state page and the table.
    changed.push(4096);
    changed.extend((sample.geometry.table_offset(0)..sample.head.len() as u64).step_by(4096));
    changed.sort_unstable();
    changed.dedup();
    for at in changed {
        let page = &sample.head[at as usize..at as usize + 4096];
        sample.file.write_all_at(page, at).expect("write the arena");
    }
}

fn position(geometry: &Geometry, area: Area, at: u16) -> u64 {
    let at = u64::from(at);
    match area {
        Area::Superblock => at % 4096,
        Area::State => 4096 + at % 4096,
        Area::Journal => geometry.journal_offset(usize::from(at as u8 & 1)) + at % 256,
        Area::Table => geometry.table_offset(0) + at % geometry.table_bytes(),
    }
}

fn compare(sample: &Sample, input: &Input) {
    let report = match check(&sample.path) {
        Ok(report) => report,
        Err(error) => {
            let attached = Arena::attach(&sample.path)
                .err()
                .expect("attach refuses what check refuses");
            assert_eq!(attached.to_string(), error.to_string());
            return;
        }
    };
    // The sum of every record is whole, so a piece that is found is one that was written, though
    // damage to its state may bring back a dead one. The time of a write is not in the sum (FORMAT, "Damage").
    for found in &report.pieces {
        let is_same =
            |written: &StoredPiece| (written.record, written.piece) == (found.record, found.piece);
        assert!(
            found.piece.file == 2 || sample.pieces.iter().any(is_same),
            "{found:?}"
        );
    }
    if report.pieces.len() < sample.pieces.len() {
        assert!(!input.damage.is_empty());
    }
    replay(&report.journal);

    let (arena, stored, damage) =
        Arena::attach(&sample.path).expect("attach takes what check takes");
    assert_eq!((&stored, &damage), (&report.pieces, &report.damage));
    arena.free_unkept_slabs(&stored);
    assert_eq!(arena.used_bytes(), 0, "nothing was kept");
    // The one chunk is free, or its class or the place of its slot is unknown.
    let is_unknown =
        |found: &Damage| matches!(found, Damage::ClassWord { .. } | Damage::MemoryFile { .. });
    let unknown = damage.iter().any(is_unknown);
    let lease = arena.lease_slab(Class::Whole);
    assert_eq!(lease.is_none(), unknown);
    if let Some(lease) = lease {
        arena.seal_slab(lease);
    }
}
