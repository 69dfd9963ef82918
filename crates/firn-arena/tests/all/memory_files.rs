//! Tests of slots in memory files.
//!
//! * Their bytes can be read there, also after a crash at any store.
//! * The slots are used again, and return to the arena's file.
//! * A damaged memory file is reported, and never read as other bytes.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::{
    Arena, Damage, FileLocation, Identity, Lease, MemoryFile, PieceRef, SlabRef, check,
};
use firn_format::geometry::Geometry;
use firn_format::piece::Piece;
use firn_format::slab::{Class, chunk_word};

const CHUNK: u64 = 128 << 10;
const CHUNKS: u32 = 8;

struct Fixture {
    dir: tempfile::TempDir,
    arena: Arena,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let geometry = Geometry::new(u64::from(CHUNKS) * CHUNK, CHUNK).expect("a valid geometry");
        let identity = Identity {
            backing: PathBuf::from("/backing"),
            dev: 1,
            ino: 2,
        };
        let arena = Arena::create(&dir.path().join("arena"), geometry, &identity);
        let arena = arena.expect("created");
        Self { dir, arena }
    }

    fn memory_files(&self) -> Vec<PathBuf> {
        memory_files_in(self.dir.path())
    }
}

fn memory_files_in(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(dir)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.to_string_lossy().contains("arena.m"))
        .collect();
    paths.sort();
    paths
}

fn bytes_of(file: u64, offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len)
        .map(|offset| (file.wrapping_mul(37) ^ offset.wrapping_mul(11) ^ (offset >> 8)) as u8)
        .collect()
}

fn publish(arena: &Arena, mut lease: Lease, file: u64, offset: u64, len: u64) -> PieceRef {
    let room = lease.reserve(file, offset, len).expect("room");
    assert_eq!(u64::from(room.len), len);
    arena.fill_slab(lease.slab(), room.position, &bytes_of(file, offset, len));
    let sequence = arena.next_sequence();
    let piece = arena.publish_piece(
        &mut lease,
        room,
        firn_arena::NewPiece {
            file_id: file,
            offset,
            sequence,
            modified: 0,
        },
    );
    arena.seal_slab(lease);
    piece
}

/// Returns a file of `chunks` chunks, the last half full, in slabs of the arena's own file.
fn write_file(arena: &Arena, file: u64, chunks: u64) -> Vec<(PieceRef, u64)> {
    (0..chunks)
        .map(|chunk| {
            let lease = arena.lease_slab(Class::Whole).expect("room");
            let len = len_of(chunk, chunks);
            (publish(arena, lease, file, chunk * CHUNK, len), len)
        })
        .collect()
}

fn len_of(chunk: u64, chunks: u64) -> u64 {
    if chunk + 1 == chunks {
        CHUNK / 2
    } else {
        CHUNK
    }
}

/// Moves the file into a memory file, chunk by chunk.
fn settle(arena: &Arena, file: u64, old: &mut [(PieceRef, u64)], memory: &Arc<MemoryFile>) {
    let chunks = old.len() as u64;
    for (chunk, (piece, len)) in old.iter_mut().enumerate() {
        let lease = arena.lease_memory_slot(memory, chunk as u16, 0);
        let lease = lease.expect("no error").expect("a slot");
        let new = publish(
            arena,
            lease,
            file,
            chunk as u64 * CHUNK,
            len_of(chunk as u64, chunks),
        );
        arena.retire_bytes(*piece, *len as u32, true);
        *piece = new;
    }
    arena.end_memory_file(memory);
}

fn drop_pieces(arena: &Arena, pieces: &[(PieceRef, u64)]) {
    for (piece, len) in pieces {
        arena.retire_bytes(*piece, *len as u32, true);
    }
}

/// Asserts that each piece has its bytes. Returns the pieces.
fn verify(arena: &Arena) -> Vec<Piece> {
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
    stored.into_iter().map(|stored| stored.piece).collect()
}

/// Asserts that all slots of memory can be leased as whole chunks.
fn lease_all(arena: &Arena) {
    let leases: Vec<Lease> = std::iter::from_fn(|| arena.lease_slab(Class::Whole)).collect();
    let whole = leases.iter().filter(|lease| lease.class() == Class::Whole);
    assert_eq!(whole.count(), CHUNKS as usize, "slots are lost");
    for lease in leases {
        arena.seal_slab(lease);
    }
}

/// Begins a memory file for `slots` chunks.
fn begin_file(arena: &Arena, slots: u32) -> Arc<MemoryFile> {
    let memory = arena.begin_memory_file(slots).expect("no error");
    memory.expect("one")
}

/// Attaches and keeps all pieces.
fn attach(path: &Path) -> (Arena, Vec<Damage>) {
    let (arena, stored, damage) = Arena::attach(path).expect("attached");
    for stored_piece in &stored {
        arena.keep_piece(stored_piece.record, stored_piece.piece.len);
    }
    arena.free_unkept_slabs(&stored);
    arena.remove_unused_memory_files();
    (arena, damage)
}

#[test]
fn a_memory_file_has_the_bytes_in_order_and_memory_counts_once() {
    let fixture = Fixture::new();
    let mut pieces = write_file(&fixture.arena, 1, 3);
    assert_eq!(fixture.arena.memory_used(), 3);
    let before = allocated(fixture.dir.path());
    let memory = begin_file(&fixture.arena, 3);
    settle(&fixture.arena, 1, &mut pieces, &memory);
    assert_eq!(fixture.arena.memory_used(), 3);
    assert_eq!(verify(&fixture.arena).len(), 3);
    assert!(
        allocated(fixture.dir.path()) <= before,
        "memory counts twice"
    );
    let len = 2 * CHUNK + CHUNK / 2;
    fixture
        .arena
        .begin_view(&memory, len)
        .expect("it gets its length");
    let given = memory.reader().expect("given");
    let mut bytes = vec![0; len as usize + 1];
    let file = std::fs::File::from(given);
    let read_bytes = file.read_at(&mut bytes, 0).expect("read");
    assert_eq!(read_bytes as u64, len, "it is as long as the file");
    assert!(bytes[..read_bytes] == bytes_of(1, 0, len));
    assert!(file.write_at(b"x", 0).is_err(), "it can only be read");
    let place = fixture
        .arena
        .locate_bytes(pieces[1].0.slab, 5)
        .expect("a place");
    assert!(matches!(place, FileLocation::MemoryFile(_, at) if at == CHUNK + 5));
    drop_pieces(&fixture.arena, &pieces);
    fixture.arena.trim_memory_files(u64::MAX);
    assert_eq!(
        fixture.memory_files().len(),
        1,
        "the next firnd finds a view by its name"
    );
    fixture.arena.end_view(&memory);
    assert_eq!(
        fixture.memory_files(),
        [] as [PathBuf; 0],
        "what was given is not used again"
    );
    lease_all(&fixture.arena);
    fixture.arena.assert_invariants();
}

/// Bytes that the files of a directory take.
fn allocated(dir: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).expect("a directory");
    let blocks = |entry: std::io::Result<std::fs::DirEntry>| {
        entry
            .expect("an entry")
            .metadata()
            .expect("metadata")
            .blocks()
    };
    entries.map(blocks).sum::<u64>() * 512
}

#[test]
fn an_idle_memory_file_is_used_again_and_gives_way_to_writers() {
    let fixture = Fixture::new();
    let mut pieces = write_file(&fixture.arena, 1, 3);
    let memory = begin_file(&fixture.arena, 3);
    settle(&fixture.arena, 1, &mut pieces, &memory);
    drop_pieces(&fixture.arena, &pieces);
    fixture.arena.trim_memory_files(3 * CHUNK);
    assert_eq!(fixture.arena.memory_file_figures().idle_bytes, 3 * CHUNK);
    let mut pieces = write_file(&fixture.arena, 2, 3);
    let again = begin_file(&fixture.arena, 3);
    assert!(Arc::ptr_eq(&again, &memory));
    settle(&fixture.arena, 2, &mut pieces, &again);
    assert_eq!(verify(&fixture.arena).len(), 3);
    drop_pieces(&fixture.arena, &pieces);
    assert_eq!(fixture.arena.memory_used(), 0);
    lease_all(&fixture.arena);
    assert_eq!(fixture.memory_files(), [] as [PathBuf; 0]);
    fixture.arena.assert_invariants();
}

#[test]
fn regression_a_cut_file_that_is_read_in_its_memory_file_is_no_damage() {
    let fixture = Fixture::new();
    let mut pieces = write_file(&fixture.arena, 1, 3);
    let memory = begin_file(&fixture.arena, 3);
    settle(&fixture.arena, 1, &mut pieces, &memory);
    let cut = CHUNK / 4;
    fixture.arena.shorten_piece(pieces[2].0, cut);
    fixture
        .arena
        .begin_view(&memory, 2 * CHUNK + cut)
        .expect("it gets its length");
    let Fixture { dir, arena } = fixture;
    drop(memory);
    drop(arena);
    let (arena, damage) = attach(&dir.path().join("arena"));
    assert_eq!(damage, []);
    let live_pieces = verify(&arena);
    let last = live_pieces.iter().find(|piece| piece.offset == 2 * CHUNK);
    assert_eq!(last.map(|piece| u64::from(piece.len)), Some(cut));
}

#[test]
fn regression_a_memory_file_keeps_its_name_while_it_is_filled() {
    let fixture = Fixture::new();
    let mut pieces = write_file(&fixture.arena, 1, 3);
    let begin = || fixture.arena.begin_memory_file(3).expect("no error");
    let memory = begin().expect("one");
    settle(&fixture.arena, 1, &mut pieces, &memory);
    drop_pieces(&fixture.arena, &pieces);
    let mut pieces = write_file(&fixture.arena, 2, 3);
    let again = begin().expect("one");
    assert!(Arc::ptr_eq(&again, &memory));
    // No other slot is free, so a writer needs the idle slots.
    assert_eq!(fixture.arena.return_idle_slots(3), 3);
    settle(&fixture.arena, 2, &mut pieces, &again);
    let Fixture { dir, arena } = fixture;
    drop((memory, again));
    drop(arena);
    let (arena, damage) = attach(&dir.path().join("arena"));
    assert_eq!(damage, []);
    assert_eq!(verify(&arena).len(), 3);
}

#[test]
fn a_crash_at_any_store_leaves_each_piece_whole_and_each_slot_usable() {
    let steps = Arc::new(AtomicU64::new(0));
    let mut crashes = 0;
    loop {
        let fixture = Fixture::new();
        let crashed = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
        let mut pieces = write_file(&fixture.arena, 1, 3);
        steps.store(0, Ordering::Relaxed);
        let (from, to) = (fixture.dir.path().to_owned(), crashed.path().to_owned());
        let count = Arc::clone(&steps);
        firn_arena::set_probe(Some(Box::new(move || {
            if count.fetch_add(1, Ordering::Relaxed) == crashes {
                copy_dir(&from, &to);
            }
        })));
        let memory = begin_file(&fixture.arena, 3);
        settle(&fixture.arena, 1, &mut pieces, &memory);
        let kept_until = steps.load(Ordering::Relaxed);
        drop_pieces(&fixture.arena, &pieces);
        fixture.arena.trim_memory_files(u64::MAX);
        fixture.arena.trim_memory_files(0);
        firn_arena::set_probe(None);
        if steps.load(Ordering::Relaxed) <= crashes {
            break;
        }
        let (arena, damage) = attach(&crashed.path().join("arena"));
        assert_eq!(damage, [], "step {crashes}: a crash is no damage");
        let live_pieces = verify(&arena);
        if crashes < kept_until {
            for chunk in 0..3 {
                let has = live_pieces
                    .iter()
                    .any(|piece| piece.offset == chunk * CHUNK);
                assert!(has, "step {crashes}: chunk {chunk} is lost");
            }
        }
        let (stored, _) = arena.read_pieces();
        for stored in stored {
            arena.retire_bytes(stored.record, stored.piece.len, true);
        }
        lease_all(&arena);
        arena.assert_invariants();
        assert_eq!(memory_files_in(crashed.path()), [] as [PathBuf; 0]);
        crashes += 1;
    }
    assert!(crashes > 20, "{crashes} crashes");
}

fn copy_dir(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a directory") {
        let path = entry.expect("an entry").path();
        std::fs::copy(&path, to.join(path.file_name().expect("a name"))).expect("copied");
    }
}

/// Returns a settled file whose memory file was changed by `change` between two attaches.
fn damaged(change: impl FnOnce(&Path, &Fixture)) -> (Fixture, Vec<Damage>) {
    let Fixture { dir, arena } = Fixture::new();
    let mut pieces = write_file(&arena, 1, 3);
    let memory = begin_file(&arena, 3);
    settle(&arena, 1, &mut pieces, &memory);
    let fixture = Fixture { dir, arena };
    let path = fixture.memory_files().remove(0);
    change(&path, &fixture);
    let checked = check(&fixture.dir.path().join("arena"))
        .expect("checked")
        .damage;
    let Fixture { dir, arena } = fixture;
    drop(memory);
    drop(arena);
    let (arena, damage) = attach(&dir.path().join("arena"));
    assert_eq!(checked, damage, "`firn check` tells the same");
    (Fixture { dir, arena }, damage)
}

/// Returns the number of unreadable chunks, and asserts that all others can be read.
fn count_unreadable(fixture: &Fixture) -> usize {
    let (stored, _) = fixture.arena.read_pieces();
    let unreadable = stored.iter().filter(|stored_piece| {
        let mut bytes = vec![0; stored_piece.piece.len as usize];
        let read = fixture.arena.copy_out(
            stored_piece.record.slab,
            stored_piece.piece.position,
            &mut bytes,
        );
        let Piece {
            file, offset, len, ..
        } = stored_piece.piece;
        assert!(read.is_err() || bytes == bytes_of(file, offset, u64::from(len)));
        read.is_err()
    });
    unreadable.count()
}

#[test]
fn a_memory_file_that_is_gone_short_or_of_others_is_told_and_not_read() {
    let (fixture, damage) = damaged(|path, _| std::fs::remove_file(path).expect("removed"));
    assert_eq!(
        (damage.len(), count_unreadable(&fixture)),
        (3, 3),
        "{damage:?}"
    );
    let (fixture, damage) = damaged(|path, _| {
        let file = std::fs::File::options()
            .write(true)
            .open(path)
            .expect("opens");
        file.set_len(CHUNK + 7).expect("cut");
    });
    assert_eq!(
        (damage.len(), count_unreadable(&fixture)),
        (2, 2),
        "{damage:?}"
    );
    let (fixture, damage) = damaged(|path, _| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o644)).expect("a mode");
    });
    assert_eq!(
        (damage.len(), count_unreadable(&fixture)),
        (3, 3),
        "{damage:?}"
    );
    let (fixture, damage) = damaged(|path, fixture| {
        let target = fixture.dir.path().join("elsewhere");
        std::fs::rename(path, &target).expect("moved");
        std::os::unix::fs::symlink(&target, path).expect("a link");
    });
    assert_eq!(
        (damage.len(), count_unreadable(&fixture)),
        (3, 3),
        "{damage:?}"
    );
    if rustix::process::geteuid().is_root() {
        let (fixture, damage) = damaged(|path, _| {
            std::os::unix::fs::chown(path, Some(65534), None).expect("another owner");
        });
        assert_eq!(
            (damage.len(), count_unreadable(&fixture)),
            (3, 3),
            "{damage:?}"
        );
    }
}

#[test]
fn a_flipped_bit_in_the_word_of_a_slot_is_damage_of_that_slot() {
    let (fixture, damage) = damaged(|_, fixture| {
        let geometry = *fixture.arena.geometry();
        let chunk = fixture.arena.read_pieces().0[1].record.slab.chunk;
        let firn_format::home::Home::Memory(slot) = fixture.arena.home(chunk).expect("a home")
        else {
            panic!("in memory");
        };
        let at = geometry.table_offset(slot) + chunk_word::MEMORY_FILE_LOCATION;
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(fixture.arena.path())
            .expect("opens");
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).expect("read");
        file.write_all_at(&[byte[0] ^ 1], at).expect("written");
    });
    assert!(
        matches!(&damage[..], [Damage::MemoryFile { pieces: 1, .. }]),
        "{damage:?}"
    );
    assert_eq!(count_unreadable(&fixture), 1);
}

#[test]
fn memory_files_of_an_arena_that_is_gone_are_in_nobodys_way() {
    let fixture = Fixture::new();
    let stale = fixture.dir.path().join("arena.m0");
    std::fs::write(&stale, b"stale").expect("written");
    let mut pieces = write_file(&fixture.arena, 1, 2);
    let memory = begin_file(&fixture.arena, 2);
    settle(&fixture.arena, 1, &mut pieces, &memory);
    assert_eq!(verify(&fixture.arena).len(), 2);
    std::fs::write(fixture.dir.path().join("arena.m7"), b"stale").expect("written");
    let Fixture { dir, arena } = fixture;
    drop(memory);
    drop(arena);
    let (arena, damage) = attach(&dir.path().join("arena"));
    assert_eq!(damage, []);
    assert_eq!(verify(&arena).len(), 2);
    assert_eq!(memory_files_in(dir.path()), [stale]);
    drop(arena);
    firn_arena::remove_memory_files(&dir.path().join("arena"));
    assert_eq!(memory_files_in(dir.path()), [] as [PathBuf; 0]);
}

#[test]
fn a_view_without_a_slot_is_there_after_an_attach() {
    let fixture = Fixture::new();
    let mut pieces = write_file(&fixture.arena, 1, 3);
    let memory = begin_file(&fixture.arena, 3);
    settle(&fixture.arena, 1, &mut pieces, &memory);
    let (number, len) = (memory.number(), 2 * CHUNK + CHUNK / 2);
    fixture
        .arena
        .begin_view(&memory, len)
        .expect("it gets its length");
    drop_pieces(&fixture.arena, &pieces);
    let Fixture { dir, arena } = fixture;
    drop((memory, arena));
    let (arena, _, _) = Arena::attach(&dir.path().join("arena")).expect("attached");
    let view = arena.reopen_view(number).expect("it is there");
    arena.remove_unused_memory_files();
    arena.trim_memory_files(0);
    let mut bytes = vec![0; len as usize + 1];
    assert_eq!(view.load(0, &mut bytes), Ok(len as usize), "its length");
    assert!(bytes[..len as usize] == bytes_of(1, 0, len));
    arena.end_view(&view);
    assert_eq!(memory_files_in(dir.path()), [] as [PathBuf; 0]);
    assert!(arena.reopen_view(number).is_err(), "its name is gone");
    arena.assert_invariants();
}

#[test]
fn without_spare_slots_a_memory_file_gets_none() {
    let fixture = Fixture::new();
    let memory = begin_file(&fixture.arena, 2);
    let spare = CHUNKS - 1;
    let lease = fixture
        .arena
        .lease_memory_slot(&memory, 0, spare)
        .expect("no error");
    let slab: SlabRef = lease.as_ref().expect("one is to spare").slab();
    assert!(fixture.arena.memory_file_of(slab.chunk).is_some());
    let none = fixture
        .arena
        .lease_memory_slot(&memory, 1, spare)
        .expect("no error");
    assert!(none.is_none());
    fixture.arena.seal_slab(lease.expect("a lease"));
    fixture.arena.assert_invariants();
}

#[test]
fn regression_slots_without_a_chunk_outlive_the_loss_of_their_memory_file() {
    let Fixture { dir, arena } = Fixture::new();
    let mut pieces = write_file(&arena, 1, 3);
    let memory = begin_file(&arena, 3);
    settle(&arena, 1, &mut pieces, &memory);
    drop_pieces(&arena, &pieces);
    arena.trim_memory_files(3 * CHUNK);
    assert_eq!(arena.memory_file_figures().idle_bytes, 3 * CHUNK);
    drop((memory, arena));
    for path in memory_files_in(dir.path()) {
        std::fs::remove_file(path).expect("removed");
    }
    let (arena, damage) = attach(&dir.path().join("arena"));
    assert_eq!(damage, []);
    lease_all(&arena);
    arena.assert_invariants();
}
