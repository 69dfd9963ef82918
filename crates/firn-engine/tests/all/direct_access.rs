//! Tests of direct access: the client's writer works on the arena of an engine in the same process.
//!
//! The client uses the engine's mapping of the arena, so that ThreadSanitizer sees the accesses of both sides to a
//! word.

use crate::common;

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use common::world::{CHUNK, World};
use firn_arena::{Arena, Identity};
use firn_backing::{Caller, Errno, SetTime};
use firn_direct::slab_writer::{Appended, SlabWriter};
use firn_engine::{
    ClientId, DirectRefusal, Engine, EngineOptions, HandleId, HeldChunks, InodeId, ROOT, SetAttr,
    SlabRequest, Written,
};
use firn_format::data_socket::{LEASE_SLABS_MAX, Slab};
use firn_format::geometry::{Geometry, SLAB_SMALL};
use firn_sim::SimBacking;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const CALLER: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
};
const CLIENT: ClientId = ClientId(7);
const O_RDWR: i32 = 2;
/// Bytes of the parked slabs: the engine keeps one small slab of each handle that wrote through the kernel, for the
/// next file.
const PARKED: u64 = 2 * SLAB_SMALL;

/// Returns the address of the arena's first byte.
fn base(engine: &Engine<SimBacking>) -> *mut u8 {
    engine.arena().address(0).cast_mut()
}

fn create(engine: &Engine<SimBacking>, name: &str) -> (InodeId, HandleId) {
    let (entry, opened) = engine
        .create(&CALLER, ROOT, OsStr::new(name), 0o644, O_RDWR)
        .expect("create");
    (entry.inode, opened.handle)
}

fn read(engine: &Engine<SimBacking>, handle: HandleId) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 20];
    let n = engine.read(handle, 0, &mut bytes).expect("read");
    bytes.truncate(n);
    bytes
}

fn size(engine: &Engine<SimBacking>, inode: InodeId) -> u64 {
    engine.namespace.attr(inode, None).expect("attr").size
}

fn truncate(size: u64) -> SetAttr {
    let mode = None;
    let uid = None;
    let gid = None;
    SetAttr {
        mode,
        uid,
        gid,
        size: Some(size),
        atime: SetTime::Keep,
        mtime: SetTime::Keep,
    }
}

fn pattern(offset: u64, len: usize, salt: u8) -> Vec<u8> {
    (offset..offset + len as u64)
        .map(|at| (at % 251) as u8 ^ salt)
        .collect()
}

/// One open file of a client.
struct DirectWriter {
    token: HandleId,
    file_id: u64,
    writer: Option<SlabWriter>,
    /// Slabs to fill after the present one, in this order.
    more: VecDeque<Slab>,
    granted: bool,
}

impl DirectWriter {
    fn of(token: HandleId) -> Self {
        Self {
            token,
            file_id: 0,
            writer: None,
            more: VecDeque::new(),
            granted: false,
        }
    }

    fn open(&mut self, engine: &Engine<SimBacking>) -> Result<u64, DirectRefusal> {
        let grant = engine
            .direct_access
            .grant_direct_access(CLIENT, self.token)?;
        (self.file_id, self.writer, self.granted) = (grant.file_id.get(), None, true);
        self.more.clear();
        Ok(grant.size)
    }

    fn lease(&mut self, engine: &Engine<SimBacking>, want: u64) -> Result<Slab, DirectRefusal> {
        let request = SlabRequest {
            pid: std::process::id(),
            cpu: None,
            bytes: want,
        };
        let slab = match self.more.pop_front() {
            Some(slab) => slab,
            None => {
                let (slab, more) = engine
                    .direct_access
                    .lease_slabs(CLIENT, self.token, request)?;
                self.more.extend(more);
                slab
            }
        };
        // SAFETY: the engine, and so its mapping, outlives the writers of these tests.
        self.writer = Some(unsafe { SlabWriter::new(base(engine), slab, self.file_id) });
        Ok(slab)
    }

    /// Appends bytes directly. Returns their number, which is less than the length of `data` if the grant is revoked
    /// meanwhile.
    fn append(&mut self, engine: &Engine<SimBacking>, offset: u64, data: &[u8]) -> usize {
        let mut done = 0;
        while self.granted && done < data.len() {
            let outcome = match &mut self.writer {
                // SAFETY: pointer and length are those of a slice.
                Some(writer) => unsafe {
                    writer.append(
                        offset + done as u64,
                        data[done..].as_ptr(),
                        data.len() - done,
                    )
                },
                None => Appended::Full,
            };
            match outcome {
                Appended::Bytes(n) => done += n,
                Appended::Full => {
                    self.granted = self.lease(engine, (data.len() - done) as u64).is_ok()
                }
                Appended::Revoked => self.granted = false,
            }
        }
        done
    }

    /// Writes as the preload library does: directly while the client has the grant, then through the kernel.
    fn write(
        &mut self,
        engine: &Engine<SimBacking>,
        offset: u64,
        data: &[u8],
        room: &mut dyn FnMut(),
    ) {
        let mut done = self.append(engine, offset, data);
        while done < data.len() {
            match engine.write(self.token, offset + done as u64, &data[done..], None) {
                Ok(Written::Bytes(n)) => done += n,
                Ok(Written::Full) => room(),
                Err(errno) => panic!("write: {errno}"),
            }
        }
    }
}

fn drain_step(engine: &Engine<SimBacking>) -> bool {
    let firn_engine::NextStep::Job(job) = engine
        .drainer
        .pick(firn_engine::LaneIndex::FIRST, firn_engine::LaneLimits::NONE)
    else {
        return false;
    };
    let outcome = job.execute(engine);
    engine.drainer.complete(job, outcome);
    true
}

#[test]
fn appended_bytes_are_seen_at_once() {
    let world = World::new();
    let (inode, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    assert_eq!(writer.open(&world.engine), Ok(0));
    assert_eq!(writer.append(&world.engine, 0, b"hello "), 6);
    assert_eq!(size(&world.engine, inode), 6);
    assert_eq!(writer.append(&world.engine, 6, b"world"), 5);
    assert_eq!(size(&world.engine, inode), 11);
    let status = world.engine.figures();
    assert_eq!(
        (status.held_bytes, status.direct_files, status.direct_leases),
        (11, 1, 1)
    );
    assert!(world.engine.kernel_cache.is_written_directly(inode));
    assert_eq!(read(&world.engine, token), b"hello world");
    // The read has revoked the grant, which the next direct write notices.
    assert_eq!(writer.append(&world.engine, 11, b"!"), 0);
    world.engine.kernel_cache.record_kernel_size(inode);
    assert!(!world.engine.kernel_cache.is_written_directly(inode));
    world.engine.release(token);
    world.drain_all();
    assert_eq!(world.backing_tree()["file"], b"hello world");
    assert_eq!(world.engine.arena().used_bytes(), 0);
}

#[test]
fn only_the_sole_writer_gets_the_door_and_another_open_ends_it() {
    let world = World::new();
    let (inode, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    let other = world.engine.open(inode, 0).unwrap();
    assert_eq!(writer.open(&world.engine), Err(DirectRefusal::Busy));
    world.engine.release(other.handle);
    assert_eq!(writer.open(&world.engine), Ok(0));
    let data = pattern(0, 300_000, 0);
    assert_eq!(writer.append(&world.engine, 0, &data), data.len());
    let other = world.engine.open(inode, 0).unwrap();
    // An append through the other handle would begin at the length that the kernel has recorded.
    assert_eq!(other.size, Some(300_000));
    assert_eq!(writer.append(&world.engine, 300_000, b"lost?"), 0);
    assert_eq!(read(&world.engine, other.handle), data);
    assert_eq!(writer.open(&world.engine), Err(DirectRefusal::Busy));
    assert_eq!(
        world
            .engine
            .direct_access
            .grant_direct_access(CLIENT, HandleId(99)),
        Err(DirectRefusal::BadToken)
    );
    world.engine.kernel_cache.record_kernel_size(inode);
    world.engine.release(other.handle);
    assert_eq!(world.engine.open(inode, 0).unwrap().size, None);
}

#[test]
fn files_that_only_the_kernel_can_write_get_no_grant() {
    let world = World::new();
    let (inode, token) = create(&world.engine, "file");
    let set = |mode| SetAttr {
        mode: Some(mode),
        size: None,
        ..truncate(0)
    };
    world
        .engine
        .namespace
        .set_attr(inode, set(0o4755), None)
        .unwrap();
    assert_eq!(
        DirectWriter::of(token).open(&world.engine),
        Err(DirectRefusal::Busy)
    );
    world
        .engine
        .namespace
        .set_attr(inode, set(0o755), None)
        .unwrap();
    let mut writer = DirectWriter::of(token);
    let capability = OsStr::new("security.capability");
    world
        .engine
        .namespace
        .set_xattr(inode, capability, b"cap", 0, None)
        .unwrap();
    assert_eq!(writer.open(&world.engine), Err(DirectRefusal::Busy));
    world
        .engine
        .namespace
        .remove_xattr(inode, capability)
        .unwrap();
    assert!(writer.open(&world.engine).is_ok());
    assert_eq!(writer.append(&world.engine, 0, b"x"), 1);
    world
        .engine
        .namespace
        .set_attr(inode, set(0o4755), None)
        .unwrap();
    assert_eq!(writer.append(&world.engine, 1, b"x"), 0);
    world.engine.release(token);
    let readonly = world.engine.open(inode, 0).unwrap().handle;
    assert_eq!(
        DirectWriter::of(readonly).open(&world.engine),
        Err(DirectRefusal::BadToken)
    );
}

/// Proves S-chunks-1, S-chunks-2: the client keeps its grant, and the list keeps its bytes.
#[test]
fn a_chunk_list_has_what_was_published_and_the_writer_goes_on() {
    let world = World::new();
    let (_, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    let data = pattern(0, 50_000, 0);
    assert_eq!(writer.append(&world.engine, 0, &data), data.len());
    let (held, pieces) = HeldChunks::list_file(&world.engine, b"file").unwrap();
    let found = || -> Vec<u8> {
        let start = world.engine.arena().geometry().data_offset();
        let bytes = |piece: &firn_engine::ListedPart| {
            let at = world.engine.arena().address(start + piece.at);
            // SAFETY: the bytes lie in the mapping. The list holds them, so no thread stores there.
            unsafe { std::slice::from_raw_parts(at, piece.bytes as usize) }.to_vec()
        };
        pieces.iter().flat_map(bytes).collect()
    };
    assert!(found() == data && held.bytes() == 50_000 && !held.changed());
    assert_eq!(
        writer.append(&world.engine, 50_000, b"more"),
        4,
        "the grant still holds"
    );
    assert!(found() == data && held.changed());
    assert_eq!(writer.append(&world.engine, 0, &pattern(0, 100, 9)), 100);
    world.engine.release(token);
    world.drain_all();
    assert!(found() == data, "after the drain");
    assert!(world.engine.arena().used_bytes() > 0, "held");
    drop(held);
    assert_eq!(world.engine.arena().used_bytes(), 0);
    assert_eq!(world.backing_tree()["file"].len(), 50_004);
}

/// Proves S-direct-3.
#[test]
fn a_truncation_cuts_what_was_appended_and_ends_the_door() {
    let world = World::new();
    let (inode, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    writer.append(&world.engine, 0, &pattern(0, 10_000, 0));
    world
        .engine
        .namespace
        .set_attr(inode, truncate(4_000), None)
        .unwrap();
    assert_eq!(writer.append(&world.engine, 10_000, b"x"), 0);
    assert_eq!(size(&world.engine, inode), 4_000);
    assert_eq!(writer.open(&world.engine), Ok(4_000));
    assert_eq!(writer.append(&world.engine, 6_000, b"end"), 3);
    let mut expected = pattern(0, 4_000, 0);
    expected.resize(6_000, 0);
    expected.extend(b"end");
    assert_eq!(read(&world.engine, token), expected);
}

#[test]
fn kernel_writes_before_between_and_after_keep_their_order() {
    let mut world = World::new();
    let (_, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    world.engine.write(token, 0, &[1; 100], None).unwrap();
    writer.open(&world.engine).unwrap();
    assert_eq!(writer.append(&world.engine, 50, &[2; 100]), 100);
    world.engine.write(token, 100, &[3; 100], None).unwrap();
    writer.open(&world.engine).unwrap();
    assert_eq!(writer.append(&world.engine, 150, &[4; 100]), 100);
    world.engine.write(token, 240, &[5; 10], None).unwrap();
    let expected: Vec<u8> = [[1; 50], [2; 50], [3; 50], [4; 50], [4; 50]].concat();
    let expected = [&expected[..240], &[5; 10][..]].concat();
    world.stop_now();
    world.recover(u64::MAX);
    world.drain_all();
    assert_eq!(world.backing_tree()["file"], expected);
}

/// Proves S-direct-1.
#[test]
fn every_published_byte_is_there_after_a_crash() {
    for crash in 0..40u64 {
        let mut world = World::new();
        let (_, token) = create(&world.engine, "file");
        let mut writer = DirectWriter::of(token);
        writer.open(&world.engine).unwrap();
        let mut rng = StdRng::seed_from_u64(crash);
        let mut model = Vec::new();
        for step in 0..=crash {
            let at = rng.random_range(0..=model.len());
            let data = pattern(at as u64, rng.random_range(1..9_000), step as u8);
            assert_eq!(
                writer.append(&world.engine, at as u64, &data),
                data.len(),
                "crash {crash} step {step}"
            );
            model.resize(model.len().max(at + data.len()), 0);
            model[at..at + data.len()].copy_from_slice(&data);
            if rng.random_range(0..8) == 0 {
                world.engine.durability.drain_tree(b"");
                world.drain_step();
            }
        }
        // Before the crash, the client ends no lease and sends no request.
        world.stop_now();
        world.recover(u64::MAX);
        world.drain_all();
        assert_eq!(world.backing_tree()["file"], model, "crash {crash}");
        assert_eq!(world.engine.arena().used_bytes(), 0);
    }
}

/// Proves S-direct-1.
#[test]
fn a_crash_at_any_store_while_a_door_is_open_keeps_what_was_acknowledged() {
    for stop in 0.. {
        let mut world = World::new();
        let (inode, token) = create(&world.engine, "file");
        let mut writer = DirectWriter::of(token);
        writer.open(&world.engine).unwrap();
        let data = pattern(0, 40_000, 0);
        assert_eq!(writer.append(&world.engine, 0, &data), data.len());
        world.stop_in(stop);
        // These calls ingest and freeze published pieces, drain them, lease another slab, and revoke the grant.
        world.engine.durability.drain_tree(b"");
        world.drain_step();
        let _ = writer.lease(&world.engine, 200_000);
        let _ = world.engine.open(inode, O_RDWR);
        while !world.stopped() && world.drain_step() {}
        let through = !world.stopped();
        if through {
            world.stop_now();
        }
        world.recover(u64::MAX);
        world.drain_all();
        assert_eq!(world.backing_tree()["file"], data, "stopped after {stop}");
        if through {
            assert!(stop > 10);
            return;
        }
    }
}

#[test]
fn what_may_still_grow_is_not_drained_and_what_was_drained_does_not_grow() {
    let world = World::new();
    let (_, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    let data = pattern(0, 120_000, 0);
    let mut at = 0;
    for len in [1_000, 30_000, 5, 40_000, 48_995] {
        assert_eq!(
            writer.append(&world.engine, at, &data[at as usize..][..len]),
            len
        );
        at += len as u64;
        world.drain_all();
        assert_eq!(world.backing_tree()["file"], data[..at as usize]);
    }
    assert!(writer.granted, "a drain does not revoke the grant");
    world.engine.direct_access.end_direct_access(CLIENT, token);
    assert_eq!(world.engine.arena().used_bytes(), 0);
}

#[test]
fn a_file_has_two_leases_and_a_third_ends_the_first() {
    let world = World::new();
    let (_, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    assert_eq!(writer.append(&world.engine, 0, b"one"), 3);
    let mut first = writer.writer.take().unwrap();
    writer.lease(&world.engine, 10).unwrap();
    let append = |writer: &mut SlabWriter, offset, data: &[u8]| {
        // SAFETY: pointer and length are those of a slice.
        unsafe { writer.append(offset, data.as_ptr(), data.len()) }
    };
    assert_eq!(append(&mut first, 3, b"two"), Appended::Bytes(3));
    assert_eq!(world.engine.figures().direct_leases, 2);
    assert_eq!(writer.append(&world.engine, 6, b"three"), 5);
    assert_eq!(world.engine.figures().direct_leases, 1);
    assert_eq!(append(&mut first, 11, b"late"), Appended::Revoked);
    assert_eq!(read(&world.engine, token), b"onetwothree");
}

#[test]
fn who_has_written_much_gets_several_leases_at_once_and_may_skip_some() {
    const CHUNK_BYTES: u64 = 1 << 20;
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory on tmpfs");
    let identity = Identity {
        backing: PathBuf::from("/backing"),
        dev: 1,
        ino: 1,
    };
    let geometry = Geometry::new(32 * CHUNK_BYTES, CHUNK_BYTES).expect("a valid geometry");
    let arena = Arena::create(&dir.path().join("arena"), geometry, &identity).expect("an arena");
    let options = EngineOptions::new(CHUNK_BYTES);
    let engine = Engine::begin(SimBacking::new(), arena, options).expect("an engine");
    let (_, token) = create(&engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&engine).unwrap();
    let data = pattern(0, 4 * CHUNK_BYTES as usize, 3);
    assert_eq!(writer.append(&engine, 0, &data), data.len());
    let request = SlabRequest {
        pid: std::process::id(),
        cpu: None,
        bytes: 4 * CHUNK_BYTES,
    };
    let leases = engine.direct_access.lease_slabs(CLIENT, token, request);
    let (first, more) = leases.unwrap();
    assert_eq!(
        more.len(),
        LEASE_SLABS_MAX - 1,
        "half of the memory is free"
    );
    assert!(first.sequence < more[0].sequence && more[0].sequence < more[1].sequence);
    // SAFETY: the engine, and so its mapping, outlives the writer, and no other writer has this lease.
    let mut last = unsafe { SlabWriter::new(base(&engine), more[1], writer.file_id) };
    // SAFETY: pointer and length are those of a literal.
    let outcome = unsafe { last.append(data.len() as u64, b"end".as_ptr(), 3) };
    assert_eq!(outcome, Appended::Bytes(3));
    let mut bytes = vec![0; data.len() + 10];
    let count = engine.read(token, 0, &mut bytes).expect("read");
    assert_eq!(&bytes[..count], [&data[..], b"end"].concat());
    assert_eq!(engine.figures().direct_leases, 0);
}

#[test]
fn a_client_that_is_gone_loses_nothing_and_keeps_nothing() {
    let world = World::new();
    let (inode, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    writer.append(&world.engine, 0, b"kept");
    world.engine.direct_access.end_client(ClientId(8));
    assert_eq!(writer.append(&world.engine, 4, b" too"), 4);
    world.engine.direct_access.end_client(CLIENT);
    assert_eq!(writer.append(&world.engine, 8, b"not"), 0);
    assert_eq!(size(&world.engine, inode), 8);
    world.engine.release(token);
    world.drain_all();
    assert_eq!(world.backing_tree()["file"], b"kept too");
    assert_eq!(world.engine.arena().used_bytes(), 0);
}

/// Proves S-direct-2.
#[test]
fn garbage_in_records_and_slab_harms_nobody() {
    for seed in 0..200 {
        let world = World::new();
        let mut rng = StdRng::seed_from_u64(seed);
        let (_, other) = create(&world.engine, "other");
        world
            .engine
            .write(other, 0, &pattern(0, 50_000, 9), None)
            .unwrap();
        let (inode, token) = create(&world.engine, "file");
        let mut writer = DirectWriter::of(token);
        writer.open(&world.engine).unwrap();
        writer.append(&world.engine, 0, &pattern(0, 5_000, 0));
        assert_eq!(size(&world.engine, inode), 5_000);
        let slab = *writer.writer.as_ref().unwrap().slab();
        let words = u64::from(slab.record_count) * 5;
        for _ in 0..rng.random_range(1..60) {
            let at = slab.records + 8 * rng.random_range(0..words.min(40));
            // SAFETY: the word lies in the records of the lease and is aligned.
            let word = unsafe {
                std::sync::atomic::AtomicU64::from_ptr(base(&world.engine).add(at as usize).cast())
            };
            match rng.random_range(0..3) {
                0 => word.store(rng.random(), Ordering::Release),
                1 => word.store(0, Ordering::Release),
                _ => word.store(
                    word.load(Ordering::Acquire) ^ (1 << rng.random_range(0..64)),
                    Ordering::Release,
                ),
            }
        }
        world.engine.figures();
        let _ = writer.append(&world.engine, 5_000, &pattern(5_000, 3_000, 0));
        let opened = world.engine.open(inode, 0).unwrap();
        let n = read(&world.engine, opened.handle).len();
        assert!(n >= 5_000, "what was taken in stays: {n}");
        world.engine.release(opened.handle);
        world.engine.release(token);
        world.engine.release(other);
        world.drain_all();
        assert_eq!(
            world.backing_tree()["other"],
            pattern(0, 50_000, 9),
            "seed {seed}"
        );
        assert!(world.engine.arena().used_bytes() <= PARKED, "seed {seed}");
    }
}

#[test]
fn readers_are_told_where_the_bytes_lie_until_they_change() {
    let world = World::new();
    let (inode, token) = create(&world.engine, "file");
    world
        .engine
        .write(token, 0, &pattern(0, 5_000, 0), None)
        .unwrap();
    world
        .engine
        .write(token, 9_000, &pattern(9_000, 100, 0), None)
        .unwrap();
    assert_eq!(
        world
            .engine
            .direct_access
            .list_extents(token, 0, 0)
            .unwrap_err(),
        DirectRefusal::Busy,
        "it may be written"
    );
    world.engine.release(token);
    let reader = world.engine.open(inode, 0).unwrap().handle;
    let list = world
        .engine
        .direct_access
        .list_extents(reader, 0, 0)
        .unwrap();
    let stamp = || {
        // SAFETY: the word lies in the arena and is aligned.
        let word = unsafe {
            std::sync::atomic::AtomicU32::from_ptr(
                base(&world.engine).add(list.slot as usize).cast(),
            )
        };
        word.load(Ordering::Acquire)
    };
    assert_eq!((list.size, stamp()), (9_100, list.stamp));
    let ranges: Vec<(u64, u64)> = list.extents.iter().map(|e| (e.offset, e.len)).collect();
    assert_eq!(ranges, [(0, 5_000), (9_000, 100)]);
    let mut bytes = vec![0u8; 5_000];
    // SAFETY: the extent lies in the arena.
    unsafe {
        base(&world.engine)
            .add(list.extents[0].at as usize)
            .copy_to(bytes.as_mut_ptr(), 5_000)
    };
    assert_eq!(bytes, pattern(0, 5_000, 0));
    world.drain_all();
    assert_ne!(stamp(), list.stamp, "what was drained may be anybody's");
    for change in 0..3 {
        let writer = world.engine.open(inode, O_RDWR).unwrap().handle;
        world.engine.write(writer, 0, &[change; 100], None).unwrap();
        world.engine.release(writer);
        let before = world
            .engine
            .direct_access
            .list_extents(reader, 0, 0)
            .unwrap()
            .stamp;
        assert_eq!(stamp(), before);
        match change {
            0 => world
                .engine
                .release(world.engine.open(inode, O_RDWR).unwrap().handle),
            1 => {
                world
                    .engine
                    .namespace
                    .set_attr(inode, truncate(50), None)
                    .unwrap();
            }
            _ => world.drain_all(),
        }
        assert_ne!(stamp(), before, "change {change}");
    }
}

/// One thread writes as a client. Other threads read attributes, open, truncate and drain the file. The result is
/// compared with a model. Proves S-direct-1, S-direct-3.
#[test]
fn a_client_and_an_engine_under_threads_agree_with_a_model() {
    let seed: u64 = std::env::var("FIRN_SEED")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or_else(rand::random);
    println!("repeat with FIRN_SEED={seed}");
    for round in 0..6 {
        interleave(seed ^ round);
    }
}

fn interleave(seed: u64) {
    const OPS: u64 = 600;
    const SPAN: u64 = 3 * CHUNK;
    let world = World::new();
    let engine = &*world.engine;
    let (inode, token) = create(engine, "file");
    let model = Mutex::new(Vec::<u8>::new());
    let end = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut writer = DirectWriter::of(token);
            let mut at = 0;
            for op in 0..OPS {
                if !writer.granted && rng.random_range(0..3) == 0 {
                    let _ = writer.open(engine);
                }
                let len = if rng.random_bool(0.1) {
                    rng.random_range(1..70_000)
                } else {
                    rng.random_range(1..900)
                };
                if at + len as u64 > SPAN || rng.random_bool(0.1) {
                    at = rng.random_range(0..SPAN / 2);
                }
                let data = pattern(at, len, op as u8);
                // The comparison with the model is exact only if no write is half done, so the lock is held.
                let mut model = model.lock();
                writer.write(engine, at, &data, &mut || {
                    while drain_step(engine) {}
                    std::thread::yield_now();
                });
                let end = at as usize + len;
                let longer = model.len().max(end);
                model.resize(longer, 0);
                model[at as usize..end].copy_from_slice(&data);
                drop(model);
                at += len as u64;
            }
            engine.direct_access.end_direct_access(CLIENT, token);
        });
        let asker = scope.spawn(|| {
            let mut rng = StdRng::seed_from_u64(seed ^ 0x5eed);
            while !end.load(Ordering::Acquire) {
                match rng.random_range(0..12) {
                    0 => {
                        let model = model.lock();
                        assert_eq!(size(engine, inode), model.len() as u64);
                    }
                    1 => {
                        let model = model.lock();
                        let opened = engine.open(inode, 0).unwrap();
                        assert!(read(engine, opened.handle) == *model, "seed {seed}");
                        engine.release(opened.handle);
                    }
                    2 => {
                        let mut model = model.lock();
                        let cut = rng.random_range(0..=model.len());
                        engine
                            .namespace
                            .set_attr(inode, truncate(cut as u64), None)
                            .unwrap();
                        model.truncate(cut);
                    }
                    3 => {
                        // Another open, at any step of the client, revokes the grant.
                        let opened = engine.open(inode, 0).unwrap();
                        read(engine, opened.handle);
                        engine.release(opened.handle);
                    }
                    4 => drop(read(engine, token)),
                    5 => drop(engine.figures()),
                    6 => engine.durability.drain_tree(b""),
                    7 | 8 => drop(size(engine, inode)),
                    9 => std::thread::sleep(std::time::Duration::from_micros(
                        rng.random_range(0..300),
                    )),
                    _ => drop(drain_step(engine)),
                }
            }
        });
        let drainer = scope.spawn(|| {
            while !end.load(Ordering::Acquire) {
                if !drain_step(engine) {
                    std::thread::yield_now();
                }
            }
        });
        let done = client.join();
        end.store(true, Ordering::Release);
        asker.join().expect("the asker");
        drainer.join().expect("the drainer");
        done.expect("the client");
    });
    engine.release(token);
    world.drain_all();
    assert!(world.backing_tree()["file"] == *model.lock(), "seed {seed}");
    assert!(engine.arena().used_bytes() <= PARKED, "seed {seed}");
    assert_eq!(engine.figures().direct_errors, 0);
}

/// The next write must return the error of a failed drain. Only a write through the kernel can, so direct access ends.
#[test]
fn a_failing_drain_ends_the_door() {
    let world = World::new();
    let (_, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    writer.append(&world.engine, 0, b"data");
    world
        .backing
        .set_plan(|call, _| (call == "write_at").then_some(firn_sim::Fault::Error(Errno::IO)));
    world.engine.durability.drain_tree(b"");
    let firn_engine::NextStep::Job(job) = world
        .engine
        .drainer
        .pick(firn_engine::LaneIndex::FIRST, firn_engine::LaneLimits::NONE)
    else {
        panic!("nothing to drain")
    };
    assert_eq!(writer.append(&world.engine, 4, b"unseen"), 6);
    let outcome = job.execute(&world.engine);
    world.engine.drainer.complete(job, outcome);
    assert_eq!(world.engine.figures().held_bytes, 10);
    assert_eq!(writer.append(&world.engine, 10, b"more"), 0);
    assert_eq!(writer.open(&world.engine), Err(DirectRefusal::Busy));
    assert_eq!(world.engine.write(token, 10, b"more", None), Err(Errno::IO));
}

#[test]
fn what_is_not_asked_about_is_drained_when_it_is_old() {
    let world = World::draining_after(std::time::Duration::from_millis(50));
    let (_, token) = create(&world.engine, "file");
    let mut writer = DirectWriter::of(token);
    writer.open(&world.engine).unwrap();
    for at in [0, 3] {
        assert_eq!(writer.append(&world.engine, at, b"old"), 3);
        let begun = std::time::Instant::now();
        while world.backing_tree()["file"].len() < at as usize + 3 {
            world.drain_step();
            assert!(begun.elapsed().as_secs() < 10, "it is never drained");
        }
    }
    assert!(writer.granted);
}
