//! Leases of client processes, with a client's own writer over a second mapping of the file.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use firn_arena::{AcceptedBytes, Arena, ClientLease, Identity};
use firn_direct::slab_writer::{Appended, SlabWriter};
use firn_format::data_socket::{OFFSET_MAX, Slab};
use firn_format::geometry::Geometry;
use firn_format::piece::{PIECE_BYTES, Piece, word};
use firn_format::slab::{Class, WRITER_BUSY, writer_idle};
use rustix::mm::{MapFlags, ProtFlags};

const FILE: u64 = 3;

fn create(path: &Path, chunks: u64) -> Arena {
    let identity = Identity {
        backing: "/backing".into(),
        dev: 1,
        ino: 2,
    };
    Arena::create(
        path,
        Geometry::new(chunks * (1 << 20), 1 << 20).unwrap(),
        &identity,
    )
    .unwrap()
}

/// A client's mapping of the whole file.
struct Client(*mut u8, usize);

impl Client {
    fn of(arena: &Arena) -> Self {
        let len = arena.geometry().file_bytes() as usize;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the call makes a new mapping.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                prot,
                MapFlags::SHARED,
                arena.file(),
                0,
            )
            .unwrap()
        };
        Self(base.cast(), len)
    }
    fn writer(&self, slab: Slab) -> SlabWriter {
        // SAFETY: the whole arena is mapped as long as this client lives.
        unsafe { SlabWriter::new(self.0, slab, FILE) }
    }
    /// Records a piece, whatever the rules say.
    fn record(&self, slab: &Slab, index: u64, piece: Piece) {
        let at = slab.records + index * PIECE_BYTES;
        self.word(at + word::FILE)
            .store(piece.file_word(), Ordering::Relaxed);
        self.word(at + word::OFFSET)
            .store(piece.offset, Ordering::Relaxed);
        self.word(at + word::POSITION)
            .store(piece.position_word(), Ordering::Relaxed);
        self.word(at + word::SEAL)
            .store(piece.seal(slab.generation), Ordering::Relaxed);
    }
    fn word(&self, at: u64) -> &AtomicU64 {
        // SAFETY: within the mapping, and aligned by the format.
        unsafe { AtomicU64::from_ptr(self.0.add(at as usize).cast()) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: this client made the mapping, and nothing uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), self.1) };
    }
}

fn append(writer: &mut SlabWriter, offset: u64, data: &[u8]) -> Appended {
    // SAFETY: `data` is a slice, so all its bytes can be read.
    unsafe { writer.append(offset, data.as_ptr(), data.len()) }
}

fn lease(arena: &Arena, class: Class) -> ClientLease {
    arena
        .lease_client(class, FILE, std::process::id(), None)
        .expect("room")
}

fn take(arena: &Arena, lease: &mut ClientLease) -> Vec<(u64, u32)> {
    let mut accepted = Vec::new();
    arena
        .accept_published(lease, &mut |bytes| accepted.push((bytes.offset, bytes.len)))
        .unwrap();
    accepted
}

#[test]
fn what_a_client_published_is_taken_in_once_and_as_it_grows() {
    let dir = tempfile::tempdir().unwrap();
    let arena = create(&dir.path().join("arena"), 4);
    let mut lease = lease(&arena, Class::Medium);
    let client = Client::of(&arena);
    let mut writer = client.writer(arena.client_slab(&lease, 0));
    assert_eq!(take(&arena, &mut lease), []);
    append(&mut writer, 10, b"abc");
    assert_eq!(take(&arena, &mut lease), [(10, 3)]);
    append(&mut writer, 13, b"de");
    append(&mut writer, 100, b"f");
    append(&mut writer, 101, b"g");
    assert_eq!(take(&arena, &mut lease), [(13, 2), (100, 2)]);
    assert_eq!(take(&arena, &mut lease), []);
    let mut accepted: Vec<AcceptedBytes> = Vec::new();
    append(&mut writer, 102, b"hi");
    arena
        .freeze_client(&mut lease, &mut |bytes| accepted.push(bytes))
        .unwrap();
    let mut out = [0; 2];
    arena
        .copy_out(accepted[0].piece.slab, accepted[0].position, &mut out)
        .unwrap();
    assert_eq!(&out, b"hi");
    append(&mut writer, 104, b"j");
    accepted.clear();
    arena
        .revoke_client(&mut lease, &mut |bytes| accepted.push(bytes))
        .unwrap();
    assert_eq!((accepted[0].offset, accepted.len()), (104, 1));
    assert_eq!(append(&mut writer, 105, b"k"), Appended::Revoked);
    arena.end_client(lease);
}

#[test]
fn a_slab_whose_writer_is_busy_is_not_used_again_before_it_is_idle() {
    let dir = tempfile::tempdir().unwrap();
    let arena = create(&dir.path().join("arena"), 1);
    let mut lease = lease(&arena, Class::Whole);
    let slab = arena.client_slab(&lease, 0);
    let client = Client::of(&arena);
    let mut writer = client.writer(slab);
    client
        .word(slab.writer)
        .store(writer_idle(slab.generation) | WRITER_BUSY, Ordering::SeqCst);
    arena.revoke_client(&mut lease, &mut |_| {}).unwrap();
    arena.end_client(lease);
    assert!(!arena.has_room(Class::Small));
    assert_eq!(arena.free_lingering_slabs(), 1);
    // The client stores this word at the end of an append.
    client
        .word(slab.writer)
        .store(writer_idle(slab.generation), Ordering::SeqCst);
    assert!(arena.has_room(Class::Whole));
    assert_eq!(append(&mut writer, 0, b"x"), Appended::Revoked);
}

#[test]
fn a_slab_of_a_dead_process_is_free_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let arena = create(&dir.path().join("arena"), 1);
    let mut child = Command::new("sleep")
        .arg("1000")
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()
        .unwrap();
    let mut lease = arena
        .lease_client(Class::Whole, FILE, child.id(), None)
        .unwrap();
    let slab = arena.client_slab(&lease, 0);
    let client = Client::of(&arena);
    client
        .word(slab.writer)
        .fetch_or(WRITER_BUSY, Ordering::SeqCst);
    arena.revoke_client(&mut lease, &mut |_| {}).unwrap();
    arena.end_client(lease);
    assert_eq!(arena.free_lingering_slabs(), 1);
    child.kill().unwrap();
    // The child was not waited for yet. As a zombie it stores nothing.
    while arena.free_lingering_slabs() > 0 {
        std::thread::yield_now();
    }
    assert!(arena.has_room(Class::Whole));
    child.wait().unwrap();
}

#[test]
fn attach_finds_every_published_byte_and_stops_clients_that_live_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("arena");
    let arena = create(&path, 4);
    let quiet = lease(&arena, Class::Medium);
    let busy = lease(&arena, Class::Medium);
    let client = Client::of(&arena);
    let slabs = [arena.client_slab(&quiet, 0), arena.client_slab(&busy, 0)];
    let mut writers = slabs.map(|slab| client.writer(slab));
    for writer in &mut writers {
        assert_eq!(append(writer, 0, &[7; 5000]), Appended::Bytes(5000));
        assert_eq!(append(writer, 9000, &[8; 10]), Appended::Bytes(10));
    }
    let held = writer_idle(slabs[1].generation) | WRITER_BUSY;
    client.word(slabs[1].writer).store(held, Ordering::SeqCst);
    let word = arena.file_word(5);
    drop(arena);

    let (arena, stored, damage) = Arena::attach(&path).unwrap();
    assert!(damage.is_empty(), "{damage:?}");
    assert_ne!(arena.file_word(5), word);
    let mut found: Vec<(u64, u32)> = stored
        .iter()
        .map(|s| (s.piece.offset, s.piece.len))
        .collect();
    found.sort_unstable();
    assert_eq!(found, [(0, 5000), (0, 5000), (9000, 10), (9000, 10)]);
    let settled = stored.clone();
    drop(stored);
    arena.free_unkept_slabs(&settled);
    // Nothing was kept: the slab of the quiet client is free, that of the busy one is not.
    assert_eq!(arena.free_lingering_slabs(), 1);
    assert!(arena.used_bytes() > 0);
    assert_eq!(append(&mut writers[0], 5000, b"x"), Appended::Revoked);
    // The client stores this word at the end of an append.
    client
        .word(slabs[1].writer)
        .store(writer_idle(slabs[1].generation), Ordering::SeqCst);
    assert_eq!(append(&mut writers[1], 5000, b"x"), Appended::Revoked);
    assert_eq!(arena.free_lingering_slabs(), 0);
    assert_eq!(arena.used_bytes(), 0);
}

#[test]
fn regression_a_record_beyond_the_largest_offset_does_not_count_after_the_death_of_firnd() {
    for offset in [OFFSET_MAX - 3, 1 << 60, (1 << 63) - 5] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let arena = create(&path, 4);
        let slab = arena.client_slab(&lease(&arena, Class::Medium), 0);
        let client = Client::of(&arena);
        append(&mut client.writer(slab), 0, b"good");
        let piece = Piece {
            file: FILE,
            offset,
            sequence: slab.sequence + 1,
            position: 4,
            len: 4,
        };
        client.record(&slab, 1, piece);
        drop(arena);
        for _ in 0..2 {
            let (arena, stored, damage) = Arena::attach(&path).unwrap();
            assert!(damage.is_empty(), "{damage:?}");
            let found: Vec<u64> = stored.iter().map(|stored| stored.piece.offset).collect();
            assert_eq!(found, [0], "a piece at {offset}");
            stored
                .iter()
                .for_each(|stored| arena.keep_piece(stored.record, stored.piece.len));
            arena.free_unkept_slabs(&stored);
        }
    }
}

#[test]
fn a_record_that_breaks_the_rules_ends_the_lease_and_never_counts() {
    type Spoil = fn(&mut Piece, u32);
    let spoils: [Spoil; 5] = [
        |piece, _| piece.file += 1,
        |piece, _| piece.sequence += 1,
        |piece, end| piece.position = end - 1,
        |piece, _| piece.len = 1 << 30,
        |piece, _| piece.offset = 1 << 60,
    ];
    for (case, spoil) in spoils.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("arena");
        let arena = create(&path, 4);
        let mut lease = lease(&arena, Class::Medium);
        let slab = arena.client_slab(&lease, 0);
        let client = Client::of(&arena);
        let mut writer = client.writer(slab);
        append(&mut writer, 0, b"good");
        assert_eq!(take(&arena, &mut lease), [(0, 4)]);
        let mut piece = Piece {
            file: FILE,
            offset: 4,
            sequence: slab.sequence + 1,
            position: 4,
            len: 4,
        };
        spoil(&mut piece, 4);
        client.record(&slab, 1, piece);
        let looked = arena.accept_published(&mut lease, &mut |bytes| panic!("{bytes:?}"));
        // A piece that leaves the slab does not pass the check of its record, so it counts as not published.
        assert_eq!(looked.is_err(), case != 3, "case {case}");
        let revoked = arena.revoke_client(&mut lease, &mut |bytes| panic!("{bytes:?}"));
        assert_eq!(revoked.is_err(), looked.is_err());
        assert_eq!(arena.read_pieces().0.len(), 1, "case {case}");
        arena.end_client(lease);
    }
}
